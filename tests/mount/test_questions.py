"""Questions to the operator in a real mount, and their answers."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bonobofs.errors import StateError, UsageError
from bonobofs.ipc.client import call
from bonobofs.policy.answers import WRITE, question_id
from bonobofs.state.home import inside_directory, session_directory
from bonobofs.state.question_files import MOST_OPEN, give_answer, read_questions
from tests.support.commands import bonobofs, environment
from tests.support.observe import companion_of, recorded
from tests.support.users import run_in_child
from tests.support.wait import until
from tests.support.world import Mounted, World

POLICY = """
default = "allow"
hidden = ["**"]
[[protect]]
paths = ["ci/locked.yml"]
[[ask]]
paths = ["ci/"]
"""


@pytest.fixture
def world(mounted: Mounted, source: Path) -> World:
    (source / "ci").mkdir()
    (source / "ci/a.yml").write_text("old")
    (source / "ci/locked.yml").write_text("old")
    return mounted(policy=POLICY)


def write(world: World, name: str, text: str = "new") -> bool:
    """Overwrite a file as a program does, with several requests. False: refused."""
    try:
        run_in_child(Path.write_text, world.path / name, text)
    except PermissionError:
        return False
    return True


def questions(world: World) -> dict[str, dict[str, Any]]:
    """The questions that the operator sees, by path."""
    found = json.loads(bonobofs("ask", "list", "--all", "--json").stdout)
    return {each["path"]: each for each in found if each["session"] == world.session.session}


def question(world: World, name: str) -> str:
    """Cause a question, and return its id."""
    assert not write(world, name)
    until(lambda: name in questions(world), "the question is stored")
    return str(questions(world)[name]["question"])


def answered(*arguments: str) -> str:
    done = bonobofs("ask", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_change_is_refused_until_the_operator_allows_it(world: World) -> None:
    number = question(world, "ci/a.yml")
    assert "1 question waits for an answer" in bonobofs("status").stdout
    assert (world.source / "ci/a.yml").read_text() == "old"
    assert "old" not in answered("show", number)
    assert "allowed, write ci/a.yml" in answered("allow", number, "--note", "as we said")
    assert write(world, "ci/a.yml")
    assert write(world, "ci/a.yml", "newer")
    assert not write(world, "ci/b.yml")
    assert (world.source / "ci/a.yml").read_text() == "newer"
    entries = world.entries()
    answer = next(entry for entry in entries if entry.operation == "answer")
    assert answer.details["question"] == number
    assert answer.details["by"]
    changes = [one for one in entries if one.path == "ci/a.yml" and one.kind == "intent" and one.result == "allowed"]
    assert changes
    assert all(one.details["answers"] == [answer.details["number"]] for one in changes)
    refused = [one for one in entries if one.code == "ASK" and one.kind == "intent"]
    assert refused[0].details["question"] == number


def test_an_answer_that_permits_nothing_or_without_end_is_a_usage_error(world: World) -> None:
    """The question stays open. Times are local, as `audit tail` shows them."""
    number = question(world, "ci/a.yml")
    for option, value in (("--for", "9999999d"), ("--for", "0s"), ("--pattern", "")):
        wrong = bonobofs("ask", "allow", number, option, value)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1), wrong.stderr
    assert questions(world)["ci/a.yml"]["state"] == "open"
    last = datetime.fromisoformat(questions(world)["ci/a.yml"]["last"])
    zone = {"TZ": "UTC-07:30"}
    local = last.astimezone(timezone(timedelta(hours=7, minutes=30))).strftime("%Y-%m-%d %H:%M:%S")
    assert local in bonobofs("ask", "list", env=zone).stdout
    assert local in bonobofs("ask", "show", number, env=zone).stdout


def test_a_no_is_remembered_and_the_agent_reads_the_note(world: World) -> None:
    number = question(world, "ci/a.yml")
    answered("deny", number, "--pattern", "ci/**", "--note", "Leave the workflows.")
    for name in ("ci/a.yml", "ci/new.yml"):
        assert not write(world, name)
        why = bonobofs("why", world.path / name)
        assert why.returncode == 77
        assert "Leave the workflows." in why.stdout
    assert list(questions(world)) == ["ci/a.yml"]
    again = bonobofs("ask", "allow", number)
    assert again.returncode == 2
    assert "denied already" in again.stderr
    answered("revoke", number)
    answered("allow", number)
    assert write(world, "ci/a.yml")


def test_once_permits_one_change_with_all_its_requests(world: World) -> None:
    number = question(world, "ci/a.yml")
    answered("allow", number, "--once")
    assert write(world, "ci/a.yml")
    until(lambda: not write(world, "ci/a.yml"), "the answer has ended")

    def is_open() -> bool:
        return not write(world, "ci/a.yml") and questions(world)["ci/a.yml"]["state"] == "open"

    until(is_open, "the question is open again")
    answered("allow", question(world, "ci/b.yml"))
    until(lambda: write(world, "ci/b.yml"), "the other answer is in force")
    assert not write(world, "ci/a.yml")


def test_programs_that_write_a_new_file_do_not_ask_for_edits(mounted: Mounted) -> None:
    """The shell creates the file, and each program has a write batch of its own."""
    world = mounted(policy=POLICY.replace("[[ask]]", '[[ask]]\noperations = ["write_file"]'))
    (world.path / "ci").mkdir()
    command = "(/bin/echo one; /bin/echo two; /bin/echo three) > ci/new"
    subprocess.run(["sh", "-c", command], cwd=world.path, check=True)
    assert (world.source / "ci/new").read_text() == "one\ntwo\nthree\n"
    assert not write(world, "ci/new")


def test_a_cache_that_moves_with_its_directory_does_not_ask(mounted: Mounted, source: Path) -> None:
    (source / "a/cache/ci").mkdir(parents=True)
    (source / "a/cache/ci/x.yml").touch()
    policy = POLICY.replace('"ci/"', '"**/ci/"') + '[[scratch]]\npaths = ["**/cache/"]\n'
    world = mounted(policy=policy)
    (world.path / "a").rename(world.path / "b")
    assert (source / "b/cache/ci/x.yml").exists()


def test_an_answer_with_a_time_ends(world: World) -> None:
    number = question(world, "ci/a.yml")
    answered("allow", number, "--for", "2s")
    assert write(world, "ci/a.yml")
    until(lambda: not write(world, "ci/a.yml"), "the answer has ended")


def test_a_pattern_that_misses_the_question_is_refused(world: World) -> None:
    number = question(world, "ci/a.yml")
    done = bonobofs("ask", "allow", number, "--pattern", "docs/**")
    assert done.returncode == 2
    assert "does not match ci/a.yml" in done.stderr
    invalid = bonobofs("ask", "allow", number, "--pattern", "ci/[")
    assert invalid.returncode == 2
    assert "'ci/[' is not a valid pattern" in invalid.stderr
    assert not write(world, "ci/a.yml")


def test_an_answer_opens_no_protected_path(world: World) -> None:
    answered("allow", question(world, "ci/a.yml"), "--pattern", "**")
    assert write(world, "ci/b.yml")
    with pytest.raises(OSError, match="Read-only"):
        run_in_child(Path.write_text, world.path / "ci/locked.yml", "new")


def test_the_agent_waits_for_the_answer_in_one_call(world: World) -> None:
    number = question(world, "ci/a.yml")
    directory = inside_directory(world.home, world.session.session)
    assert call(directory, "ask.wait", question=number, seconds=0)["state"] == "open"
    got: list[dict[str, Any]] = []
    waiter = threading.Thread(target=lambda: got.append(call(directory, "ask.wait", question=number, seconds=60)))
    waiter.start()
    answered("allow", number, "--note", "go on")
    waiter.join(60)
    assert got[0]["state"] == "allowed"
    assert got[0]["note"] == "go on"
    assert bonobofs("ask", "wait", number, cwd=world.path).returncode == 0
    assert bonobofs("ask", "wait", number).returncode == 0
    with pytest.raises(UsageError, match="no question q-0000000000"):
        call(directory, "ask.wait", question="q-0000000000", seconds=0)


def test_the_agent_can_wait_before_the_session_has_the_question(world: World) -> None:
    """The agent may have the refusal before the session has its question."""
    directory = inside_directory(world.home, world.session.session)
    number = question_id(world.session.session, WRITE, "ci/a.yml")
    got: list[dict[str, Any]] = []
    waiter = threading.Thread(target=lambda: got.append(call(directory, "ask.wait", question=number, seconds=0)))
    waiter.start()
    call(directory, "whoami")  # the session has the first call, too
    assert not write(world, "ci/a.yml")
    waiter.join(60)
    assert [(each["path"], each["state"]) for each in got] == [("ci/a.yml", "open")]


def test_wait_without_an_answer_exits_with_75_and_after_a_no_with_77(world: World) -> None:
    number = question(world, "ci/a.yml")
    assert bonobofs("ask", "wait", number, "--for", "1s", cwd=world.path).returncode == 75
    answered("deny", number)
    assert bonobofs("ask", "wait", number, "--for", "1s", cwd=world.path).returncode == 77


def test_a_process_of_the_session_cannot_answer(world: World) -> None:
    number = question(world, "ci/a.yml")
    inside = [
        subprocess.run(
            [sys.executable, "-m", "bonobofs", "ask", "allow", number],
            env=environment(**more), cwd=cwd, capture_output=True, text=True, check=False,
        )
        for cwd, more in ((world.path, {}), (Path("/"), {"BONOBOFS_SOCKET": "/any"}))
    ]  # fmt: skip
    for done in inside:
        assert done.returncode != 0
        assert "cannot answer" in done.stderr
    with pytest.raises(UsageError, match=r"there is no call 'ask\.allow'"):
        call(inside_directory(world.home, world.session.session), "ask.allow")
    assert not write(world, "ci/a.yml")


def test_a_new_policy_ends_the_answers(mounted: Mounted, source: Path, tmp_path: Path) -> None:
    (source / "ci").mkdir()
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    world = mounted(policy=policy)
    number = question(world, "ci/a.yml")
    answered("allow", number)
    assert write(world, "ci/a.yml")
    policy.write_text(POLICY + '[[keep]]\npaths = ["x"]\n')
    until(lambda: not write(world, "ci/a.yml"), "the answer has ended with its policy")


def test_questions_and_answers_survive_the_companion(world: World) -> None:
    first, second = question(world, "ci/a.yml"), question(world, "ci/b.yml")
    answered("allow", first)
    before = len(recorded(world, "companion"))
    os.kill(companion_of(world.pid), signal.SIGKILL)
    until(lambda: len(recorded(world, "companion")) > before, "another companion stands")
    assert write(world, "ci/a.yml")
    answered("allow", second)
    assert write(world, "ci/b.yml")
    assert len(recorded(world, "answer")) == 2


def test_a_flood_of_questions_is_bounded(world: World) -> None:
    for number in range(MOST_OPEN + 30):
        assert not write(world, f"ci/{number}")
    until(lambda: len(questions(world)) >= MOST_OPEN, "the questions are stored")
    assert len(questions(world)) == MOST_OPEN
    assert f"{MOST_OPEN} open questions" in bonobofs("ask", "list").stderr


def test_of_two_answers_the_first_counts(world: World) -> None:
    number = question(world, "ci/a.yml")
    found = read_questions(session_directory(world.home, world.session.session)).questions[number]
    digest = world.session.policy.digest
    give_answer(world.home, found, allows=False, by="first", policy=digest)
    with pytest.raises(UsageError, match="first"):
        give_answer(world.home, found, allows=True, by="second", policy=digest)
    assert not write(world, "ci/a.yml")


def test_a_question_whose_path_was_changed_is_not_shown(world: World) -> None:
    """the operator approves the path that the session named, or nothing."""
    number = question(world, "ci/a.yml")
    file = session_directory(world.home, world.session.session) / "questions.json"
    document = json.loads(file.read_text())
    document["questions"][number]["path"] = "ci/harmless.yml"
    file.write_text(json.dumps(document))
    with pytest.raises(StateError, match="does not fit"):
        read_questions(file.parent)


def test_watch_shows_a_question_and_answers_with_one_key(world: World) -> None:
    number = question(world, "ci/a.yml")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir("/")
        os.execve(sys.executable, [sys.executable, "-m", "bonobofs", "ask", "watch"], environment(TERM="dumb"))
    try:
        seen = b""
        while b"q quit" not in seen:
            assert select.select([terminal], [], [], 60)[0], seen
            seen += os.read(terminal, 1 << 16)
        assert number.encode() in seen
        assert b"write_file ci/a.yml" in seen or b"truncate ci/a.yml" in seen
        os.write(terminal, b"p")
        until(lambda: write(world, "ci/a.yml"), "the key has answered")
        os.write(terminal, b"\x03")
    finally:
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) in (0, 130)


class Service(BaseHTTPRequestHandler):
    """An approval service with one answer after the other."""

    answers: ClassVar[list[tuple[int, bytes]]] = []
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, body = self.answers.pop(0) if self.answers else (500, b"")
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def forwarded(*answers: tuple[int, bytes]) -> Iterator[list[dict[str, Any]]]:
    """`ask forward` to a service of this machine with these answers; gives the requests that come."""
    Service.answers, Service.requests = [*answers], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/hook"
        program = [sys.executable, "-m", "bonobofs", "ask", "forward", url]
        forwarder = subprocess.Popen(program, env=environment(), cwd="/", stdout=subprocess.DEVNULL)
        try:
            yield Service.requests
        finally:
            forwarder.send_signal(signal.SIGINT)
            assert forwarder.wait(30) == 130
            server.shutdown()


def test_a_service_grants_and_denies(world: World) -> None:
    number = question(world, "ci/a.yml")
    with forwarded(
        (200, b'{"decision": "granted"}'), (200, b'{"decision": "denied", "reason": "not now"}')
    ) as requests:
        until(lambda: write(world, "ci/a.yml"), "the service has granted it")
        sent = requests[0]["request"]
        assert sent["request_id"] == number
        assert sent["path"] == str(world.source / "ci/a.yml")
        assert sent["session_id"] == world.session.session
        question(world, "ci/b.yml")
        until(lambda: questions(world)["ci/b.yml"]["state"] == "denied", "the service has denied it")
    assert "not now" in bonobofs("why", world.path / "ci/b.yml").stdout


@pytest.mark.parametrize(
    "answer",
    [(302, b""), (500, b'{"decision": "granted"}'), (200, b"granted"), (200, b'{"decision": "maybe"}'), (200, b"[]")],
    ids=["redirect", "error", "no JSON", "unknown word", "no object"],
)
def test_an_answer_without_a_decision_grants_nothing(world: World, answer: tuple[int, bytes]) -> None:
    question(world, "ci/a.yml")
    with forwarded(answer) as requests:
        until(lambda: bool(requests), "the question is sent")
        assert not write(world, "ci/a.yml")
    assert questions(world)["ci/a.yml"]["state"] == "open"
