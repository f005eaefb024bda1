"""The program `git` of a session. The real git does everything; the session is asked before and after.

Before: the role's list of subcommands, and for a command that brings other content into the work tree, which refused
paths it would change. What a protected branch has there now is granted for the command. After: the grant ends, the
branch is published, and the refusals of this command are shown. Nothing rests on this program: a git that is run
without it meets the refusals of the mount, and publishes by its hooks.

Nothing in the environment says who asks: the session is the one in whose directory the program lies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bonobofs.decision import Code, Denied, Refused, as_document
from bonobofs.errors import BonobofsError
from bonobofs.git.command_line import Git, Line, contacts_remote, only_reads, resolve, split
from bonobofs.git.preflight import details, next_head, plan
from bonobofs.request import Operation
from bonobofs.sandbox.boundary import is_cwd_inside_worktree
from bonobofs.state.calling import call, call_with
from bonobofs.state.home import GUARD_SOCKET

REFUSED: Final = 77
CLIENT: Final = str(Path(__file__).with_name("client.py"))
_WITH_HOOKS: Final = ("am", "checkout", "commit", "merge", "switch")
"""Subcommands after which a hook of the session publishes."""
_CHECKED_OUT: Final = {"code": "E_GIT_CHECKOUT", "subcommand": "switch", "error": "checkout"}
_TRIED: Final = ("rmdir", "set_times")
"""What git tries and does without."""
_MOST_SHOWN: Final = 5
"""Refusals of one command that are shown."""
_WORDS: Final = {"git.isolation": ("E_GIT_BOUNDARY_CWD_OUTSIDE_WORKTREE", "cwd-outside-worktree")}
"""The code and CLEO's word for what a rule refuses."""


def main() -> int:
    """`git`, with the session's directory and the real git before its own arguments; the exit status."""
    directory, real, *given = sys.argv[1:]
    line = resolve(real, split(given))
    if only_reads(line):
        os.execv(real, [real, *given])
    session = Path(directory)
    try:
        return _run(session, real, given, line)
    except Refused as refused:
        return _show(refused.decision, line.name)
    except (BonobofsError, OSError) as error:
        _say(f"git: {error}\n")
    return 1


def _run(session: Path, real: str, given: list[str], line: Line) -> int:
    git = Git(real, line.options)
    words: dict[str, Any] = {"subcommand": line.name, "arguments": list(line.arguments)}
    here = _directory(line)
    begun = call(session, "git.begin", **words, directory=here, remote=contacts_remote(line))
    root = str(begun["root"])
    if not is_cwd_inside_worktree(os.path.realpath(git.line("rev-parse", "--show-toplevel") or "/"), root):
        os.execv(real, [real, *given])  # another repository, or none: only the role's list is the session's
    commit, changes = plan(git, line)
    files = details(git, changes, reads_content=begun["reads_content"]) if changes else []
    if head := next_head(git, line):
        told = call(session, "git.head", head=head, check=True)
        if told["status"]:
            text = f"git: {told['line']}\n".replace("not published: ", "")
            _say(f"{json.dumps({'cleo_error': True, **told.get('denied', {}), **_CHECKED_OUT})}\n{text}")
            return REFUSED
    grant, before = 0, _head(git)
    theirs, ours = os.pipe()  # the session ends the grant when this process ends
    if files:
        asked = {**words, "commit": commit, "head": before[1], "files": files}
        grant = call_with([theirs], session, "git.preflight", **asked)["grant"]
    since = datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        status = _wait(real, given)
    finally:
        if grant:
            call(session, "git.finish", grant=grant)
    os.close(ours)
    if _head(git) != before and line.name not in _WITH_HOOKS:
        subprocess.run([sys.executable, "-I", "-S", "-E", CLIENT, session / GUARD_SOCKET, "publish"], check=False)
    refusals = _refusals(root, since) if status else []
    for denied in refusals[:_MOST_SHOWN]:
        _show(denied, line.name)
    return REFUSED if refusals else status


def _wait(real: str, given: list[str]) -> int:
    """Run the real git with our files and signals; its exit status."""
    handled = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in (signal.SIGINT, signal.SIGQUIT):  # the terminal sends them to git too
        signal.signal(number, lambda *_: None)
    with subprocess.Popen([real, *given]) as running:
        for number in handled:
            signal.signal(number, lambda sent, _: running.send_signal(sent))
        status = running.wait()
    for number in (*handled, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if status < 0:
        return 128 - status
    return status


def _directory(line: Line) -> str:
    """Where git works, without symlinks; "" where that is gone."""
    with suppress(OSError):
        place = os.getcwd()
        for option, value in zip(line.options, line.options[1:], strict=False):
            place = os.path.join(place, value) if option == "-C" else place
        return os.path.realpath(place, strict=True)
    return ""


def _head(git: Git) -> tuple[str, str]:
    """The branch and the commit of HEAD."""
    return git.line("symbolic-ref", "--quiet", "HEAD"), git.commit("HEAD")


def _refusals(root: str, since: str) -> list[Denied]:
    """The refusals of the mount since a time, each path once."""
    found: dict[str, Denied] = {}
    with suppress(OSError), open(os.path.join(root, ".bonobofs/denials.jsonl"), encoding="utf-8") as lines:
        for text in lines:
            told = json.loads(text)
            if told.pop("timestamp") >= since and told["operation"] not in _TRIED:
                holding = {name: told.pop(name, None) for name in ("holder", "chain", "until", "allowed")}
                kinds = {"code": Code(told["code"]), "operation": Operation(told["operation"])}
                denied = Denied(**{**told, **kinds})
                found.setdefault(denied.path, denied._replace(about=denied.about or _held(holding)))
    return list(found.values())


def _held(holding: dict[str, str | None]) -> str:
    return f"It is held by {holding['holder']} until {holding['until']}." if holding["holder"] else ""


def _show(denied: Denied, subcommand: str) -> int:
    """Tell a refusal by one line of JSON and one of help; the exit status."""
    code, error = _WORDS.get(denied.rule) or _by_code(denied)
    told = {"cleo_error": True, **as_document(denied, denied.path, denied.operation)}
    text = " ".join(f"git: {denied.path}: {denied.reason} {denied.about} {denied.instead}".split())
    text = text.replace("git: : ", "git: ", 1)
    _say(f"{json.dumps({**told, 'code': code, 'subcommand': subcommand, 'error': error})}\n{text}\n")
    return REFUSED


def _by_code(denied: Denied) -> tuple[str, str]:
    if denied.rule.startswith("role:") and ":git:" in denied.rule:
        return "E_GIT_OP_BLOCKED", "op-blocked"
    word = denied.rule.removeprefix("git.") if denied.code is Code.GIT else denied.code.lower()
    return f"E_GIT_{word.upper().replace('-', '_')}", word


def _say(text: str) -> None:
    sys.stderr.buffer.write(os.fsencode(text))
    sys.stderr.flush()
