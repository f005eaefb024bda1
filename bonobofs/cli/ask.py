"""`bonobofs ask list|show|allow|deny|revoke|wait|watch|forward`."""

from __future__ import annotations

import dataclasses
import getpass
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self

from bonobofs import session
from bonobofs.cli.options import Argument, Group, Option
from bonobofs.cli.output import document, listing, local_time, note, say
from bonobofs.errors import BonobofsError, ForbiddenError, StateError, UsageError
from bonobofs.ipc.client import SOCKET_VARIABLE, call
from bonobofs.policy.decision import Refused
from bonobofs.policy.lease_limits import seconds_of
from bonobofs.state.home import session_directory
from bonobofs.state.question_files import (
    MOST_OPEN,
    Question,
    Questions,
    QuestionState,
    give_answer,
    read_questions,
)
from bonobofs.state.question_files import revoke as revoke_answer
from bonobofs.system import processes

if TYPE_CHECKING:
    from bonobofs.session.approval_webhook import ApprovalWebhook

app = Group(help="Answer the questions of sessions: changes that [[ask]] matches.")

STILL_OPEN: Final = 75
"""Exit status of `ask wait` without an answer, EX_TEMPFAIL of sysexits.h."""
_APPLY_SECONDS: Final = 5.0
_SENT_AT_ONCE: Final = 8
_SEND_AGAIN_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.1
_KEY_SECONDS: Final = 0.5
_LONGEST_CALL: Final = 600
_LONGEST_SECONDS: Final = 366 * 86_400
_KEYS: Final = "o once, p this path for the session, e edit the pattern, n no, r no with a reason, s skip, q quit"

QuestionArgument = Annotated[str, Argument(metavar="QUESTION", help="Its id: q- and ten digits.")]
NoteOption = Annotated[str, Option("--note", metavar="TEXT", help="A sentence that the agent reads.")]
PatternOption = Annotated[
    str | None, Option("--pattern", metavar="P", help="Answer for all paths that it matches, such as .github/**.")
]
JsonOption = Annotated[bool, Option("--json", help="One JSON document.")]


class _Found(NamedTuple):
    """A question of a served session."""

    question: Question
    all: Questions
    status: session.SessionStatus

    @property
    def state(self) -> QuestionState:
        return self.all.state_of(self.question)


@app.command("list")
def list_(
    all_: Annotated[bool, Option("--all", help="Answered and expired questions too.")] = False,
    json: JsonOption = False,
) -> None:
    """List the open questions of all mounted sessions, the oldest first.

    \b
    Example:
      bonobofs ask list --all --json
    """
    found = [one for one in _questions() if all_ or one.state is QuestionState.OPEN]
    rows = [
        (one.question.question, one.state, one.question.agent, f"{one.question.operation} {one.question.path}",
         str(one.question.count), local_time(one.question.last))
        for one in found
    ]  # fmt: skip
    heading = ("QUESTION", "STATE", "AGENT", "CHANGE", "REFUSALS", "LAST")
    listing([_as_document(one) for one in found], heading, rows, "no question waits for an answer", json=json)
    for status, each in _by_session():
        if sum(each.state_of(one) is QuestionState.OPEN for one in each.questions.values()) >= MOST_OPEN:
            note(f"session {status.session.session} has {MOST_OPEN} open questions; further ones are not stored")


@app.command("show")
def show(question: QuestionArgument, json: JsonOption = False) -> None:
    """Show a question: the change, the rule, the file as it is now, and the program that caused it.

    \b
    Example:
      bonobofs ask show q-0123456789
    """
    found = _find(question)
    if json:
        document(_as_document(found))
        return
    for line in _lines(found):
        say(line)


@app.command("allow")
def allow(
    question: QuestionArgument,
    once: Annotated[bool, Option("--once", help="Only one change, with what follows within 5 s.")] = False,
    duration: Annotated[
        str | None, Option("--for", metavar="T", help="How long: 10m, 2h. Default: until the session ends.")
    ] = None,
    pattern: PatternOption = None,
    note: NoteOption = "",
) -> None:
    """Permit a change, for the session: its path, or with --pattern more. The rules and leases still apply.

    The command returns when the session enforces the answer. A new policy ends all answers.

    \b
    Examples:
      bonobofs ask allow q-0123456789 --once
      bonobofs ask allow q-0123456789 --pattern '.github/**' --for 1h
    """
    seconds = None if duration is None else _seconds(duration)
    if seconds == 0:
        raise UsageError("--for 0s permits nothing; give a longer time, or --once for one change")
    _answer(_find(question), allows=True, once=once, seconds=seconds, pattern=_checked(pattern), note=note)


@app.command("deny")
def deny(question: QuestionArgument, pattern: PatternOption = None, note: NoteOption = "") -> None:
    """Refuse a change, for the session. The agent reads the note with each further refusal.

    \b
    Example:
      bonobofs ask deny q-0123456789 --note 'Leave the workflows; tell me what you need.'
    """
    _answer(_find(question), allows=False, pattern=_checked(pattern), note=note)


@app.command("revoke")
def revoke(question: QuestionArgument) -> None:
    """End the answer to a question: the next change asks again.

    \b
    Example:
      bonobofs ask revoke q-0123456789
    """
    found = _find(question)
    _check_outside(found.status)
    answer = revoke_answer(session.home(), found.question)
    covers = answer.pattern or answer.path
    _await_applied(found, read_questions(_directory(found.status)).number)
    say(f"{question}: the answer about {covers} has ended")


@app.command("wait")
def wait(
    question: QuestionArgument,
    duration: Annotated[str, Option("--for", metavar="T", help="How long to wait.")] = "10m",
    json: JsonOption = False,
) -> int:
    """Wait for the answer to a question. Exit 0: allowed, 77: refused, 75: no answer yet.

    \b
    Example:
      bonobofs ask wait q-0123456789 --for 10m
    """
    seconds = _seconds(duration)
    answer = _wait(question, seconds)
    if json:
        document(answer)
    else:
        said = f". The operator's note: {answer['note']}" if answer["note"] else ""
        say(f"{question}: {answer['state']}, {answer['path']}{said}")
    if answer["state"] == QuestionState.ALLOWED:
        return 0
    return Refused.exit_code if answer["state"] == QuestionState.DENIED else STILL_OPEN


@app.command("watch")
def watch() -> int:
    """Show each open question as it comes, and answer it with one key.

    \b
    Example:
      bonobofs ask watch
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("ask watch needs a terminal; use ask list, allow and deny")
    say("waiting for questions; Ctrl-C ends")
    with _Keys() as keys:
        _answer_with(keys)
    return 0


def _answer_with(keys: _Keys) -> None:
    """Show the open questions one after the other, and take the answers, until `q`."""
    skipped: set[str] = set()
    shown = ""
    while True:
        open_ = [each for each in _questions() if each.state is QuestionState.OPEN]
        found = next((each for each in open_ if each.question.question not in skipped), None)
        number = found.question.question if found is not None else ""
        if found is not None and number != shown:
            say("")
            for line in (*_lines(found), _KEYS):
                say(line)
        shown = number
        key = keys.next()
        if key == "q":
            return
        if found is None or not key:
            continue
        if key == "s":
            skipped.add(number)
        elif key in "openr":
            _answer_key(found, key, keys)


@app.command("forward")
def forward(
    url: Annotated[str, Argument(metavar="URL", help="A service that takes nono's approval webhook, version 1.")],
    seconds: Annotated[int, Option("--timeout", metavar="S", minimum=1, help="How long it may hold a question.")] = 60,
) -> None:
    """Send each open question to an HTTP service, and apply its answers, until Ctrl-C.

    A grant or denial is an answer for the path, until the session ends. An error or a timeout is none: the question
    stays open, and is sent again. Of several channels, the first answer counts.

    \b
    Example:
      bonobofs ask forward https://approvals.example.com/hook --timeout 120
    """
    from bonobofs.session.approval_webhook import ApprovalWebhook  # noqa: PLC0415 - loads http.client

    webhook = ApprovalWebhook(url, seconds)
    sent: set[str] = set()
    say(f"questions go to {url}; Ctrl-C ends")
    while True:
        for found in _questions():
            number = found.question.question
            if found.state is QuestionState.OPEN and number not in sent and len(sent) < _SENT_AT_ONCE:
                sent.add(number)
                threading.Thread(target=_forward, args=(webhook, found, sent), daemon=True).start()
        time.sleep(_POLL_SECONDS * 3)


def _forward(webhook: ApprovalWebhook, found: _Found, sent: set[str]) -> None:
    """Send one question and apply the answer. Without an answer, it may be sent again later."""
    path = os.path.join(found.status.session.source, found.question.path)
    try:
        answer = webhook.ask(found.question, path, f"{found.question.operation} (rule {found.question.rule})")
        if answer.allows is None:
            note(f"{found.question.question}: {answer.note}; it stays open")
            time.sleep(_SEND_AGAIN_SECONDS)
        else:
            _answer(found, by="webhook", allows=answer.allows, note=answer.note)
    except (BonobofsError, OSError) as error:
        note(f"{found.question.question}: {error}")
    finally:
        sent.discard(found.question.question)


def _answer_key(found: _Found, key: str, keys: _Keys) -> None:
    try:
        if key == "e":
            _answer(found, allows=True, pattern=keys.line(f"pattern [{found.question.path}]: "))
        elif key == "r":
            _answer(found, allows=False, note=keys.line("note to the agent: "))
        else:
            _answer(found, allows=key != "n", once=key == "o")
    except (BonobofsError, OSError) as error:
        note(str(error))


class _Keys:
    """The keys of the terminal, one at a time. A key that is typed early is kept."""

    def __init__(self) -> None:
        self._terminal: Final = sys.stdin.fileno()
        self._before: Final = termios.tcgetattr(self._terminal)

    def __enter__(self) -> Self:
        tty.setcbreak(self._terminal, termios.TCSADRAIN)
        return self

    def __exit__(self, *_: object) -> None:
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)

    def next(self) -> str:
        """Return the next key; "" if none comes within half a second. The end of the terminal is `q`."""
        if not select.select([self._terminal], [], [], _KEY_SECONDS)[0]:
            return ""
        return os.read(self._terminal, 1).decode("ascii", "replace") or "q"

    def line(self, prompt: str) -> str:
        """Return a line that the operator edits; "" at the end of the terminal."""
        self.__exit__()
        try:
            return input(prompt).strip()
        except EOFError:
            return ""
        finally:
            self.__enter__()


def _by_session() -> Iterator[tuple[session.SessionStatus, Questions]]:
    home = session.home()
    for status in session.statuses(home):
        if status.state in session.SERVED:
            yield status, read_questions(session_directory(home, status.session.session))


def _questions() -> list[_Found]:
    found = [_Found(question, all_, status) for status, all_ in _by_session() for question in all_.questions.values()]
    return sorted(found, key=lambda one: one.question.first)


def _find(question: str) -> _Found:
    found = next((one for one in _questions() if one.question.question == question), None)
    if found is None:
        raise UsageError(f"no mounted session has the question {question}; see bonobofs ask list")
    return found


def _directory(status: session.SessionStatus) -> Path:
    return session_directory(session.home(), status.session.session)


def _answer(found: _Found, *, allows: bool, by: str | None = None, seconds: float | None = None, **terms: Any) -> None:
    """Answer a question, and return when the session enforces the answer."""
    _check_outside(found.status)
    found_now = give_answer(
        session.home(),
        found.question,
        allows=allows,
        by=by or getpass.getuser(),
        policy=found.status.session.policy.digest,
        seconds=seconds,
        **terms,
    )
    _await_applied(found, found_now.number)
    covers = terms.get("pattern") or found.question.path
    scope = "once" if terms.get("once") else "until the session ends" if seconds is None else f"for {seconds:.0f} s"
    say(f"{found.question.question}: {'allowed' if allows else 'denied'}, {found.question.effect} {covers}, {scope}")


def _await_applied(found: _Found, number: int) -> None:
    deadline = time.monotonic() + _APPLY_SECONDS
    directory = _directory(found.status)
    while read_questions(directory).applied < number:
        if time.monotonic() >= deadline:
            raise StateError(
                f"the answer is stored, but session {found.status.session.session} does not enforce it yet; "
                "look at bonobofs status"
            )
        time.sleep(_POLL_SECONDS)


def _check_outside(status: session.SessionStatus) -> None:
    """Refuse a process of the session: the agent may not answer its own question. ForbiddenError."""
    mountpoint = status.session.mountpoint
    using = {one.pid for one in processes.users_of(Path(mountpoint))} if mountpoint else set()
    for pid in processes.ancestors(os.getpid()):
        if pid in using or processes.has_variable(pid, SOCKET_VARIABLE):
            raise ForbiddenError(
                "a process of a session cannot answer; answer in a terminal outside of the mount and of bonobofs shell"
            )


def _wait(question: str, seconds: float) -> dict[str, Any]:
    """Wait by the session of the working directory or shell, else by the files of the state directory."""
    called = session.callable_session(session.home(), Path.cwd())
    directory = called.directory if called is not None else None
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        if directory is not None or os.environ.get(SOCKET_VARIABLE):
            part = max(0, min(_LONGEST_CALL, int(left) + 1))
            answer: dict[str, Any] = call(directory, "ask.wait", question=question, seconds=part)
        else:
            found = _find(question)
            given = found.all.answer_of(found.question)
            answer = {"question": question, "path": found.question.path, "state": found.state}
            answer |= {"note": "", "until": ""} if given is None else {"note": given.note, "until": given.until}
            time.sleep(min(_POLL_SECONDS * 2, max(0.0, left)))
        if answer["state"] != QuestionState.OPEN or left <= 0:
            return answer


def _seconds(duration: str) -> float:
    seconds = seconds_of(duration)
    if seconds is None or seconds > _LONGEST_SECONDS:
        raise UsageError(f"{duration!r} is not a duration of at most 366 days; write 30s, 10m, 24h or 7d")
    return seconds


def _checked(pattern: str | None) -> str:
    if pattern == "":
        raise UsageError("--pattern is empty; name paths, or leave it out to answer for the path of the question")
    return pattern or ""


def _as_document(found: _Found) -> dict[str, Any]:
    answer = found.all.answer_of(found.question)
    return {
        **dataclasses.asdict(found.question),
        "state": found.state,
        "answer": None if answer is None else dataclasses.asdict(answer),
        "size": _size(found),
    }


def _size(found: _Found) -> int | None:
    """Bytes of the file in the source; None if there is none."""
    try:
        return os.lstat(os.path.join(found.status.session.source, found.question.path)).st_size
    except OSError:
        return None


def _lines(found: _Found) -> Iterator[str]:
    question, size = found.question, _size(found)
    refusals = f"{question.count} refusal{'' if question.count == 1 else 's'}"
    last = local_time(question.last)
    yield f"question  {question.question}, {found.state}, {refusals}, the last at {last}"
    yield f"change    {question.operation} {question.path} ({question.effect})"
    yield f"file      {'does not exist' if size is None else f'{size:,} bytes'} in {found.status.session.source}"
    yield f"rule      {question.rule}"
    yield f"agent     {question.agent}, session {question.session}"
    who = ", ".join(f"{name} {question.details[name]}" for name in ("pid", "uid") if name in question.details)
    yield f"program   {question.tool or 'unknown'}{f' ({who})' if who else ''}"
    if (answer := found.all.answer_of(question)) is not None:
        word, until = "yes" if answer.allows else "no", local_time(answer.until) if answer.until else "the session ends"
        yield f"answer    {word} to {answer.pattern or answer.path}, by {answer.by}, until {until}"
