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

from bonobofs.errors import BonobofsError
from bonobofs.git.command_line import Git, Line, contacts_remote, only_reads, resolve, split
from bonobofs.git.preflight import details, next_head, plan
from bonobofs.ipc.client import call, call_with
from bonobofs.policy.decision import Refused, as_document
from bonobofs.state.home import GUARD_SOCKET

REFUSED: Final = 77
CLIENT: Final = str(Path(__file__).with_name("publish_client.py"))
_WITH_HOOKS: Final = ("am", "checkout", "commit", "merge", "switch")
"""Subcommands after which a hook of the session publishes."""
_AT_A_TIME: Final = 4000
"""Files of one call."""
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
        decision = refused.decision
        return _show(as_document(decision, decision.path, decision.operation), line.name)
    except (BonobofsError, OSError) as error:
        sys.stderr.write(f"git: {error}\n")
    return 1


def _run(session: Path, real: str, given: list[str], line: Line) -> int:
    git = Git(real, line.options)
    words: dict[str, Any] = {"subcommand": line.name, "arguments": list(line.arguments)}
    here = _directory(line)
    begun = call(session, "git.begin", **words, directory=here, remote=contacts_remote(line))
    root = str(begun["root"])
    top = os.path.realpath(git.line("rev-parse", "--show-toplevel") or "/")
    if not f"{top}/".startswith(f"{root}/"):
        os.execv(real, [real, *given])  # another repository, or none: only the role's list is the session's
    grants: list[int] = []
    commit, changes = plan(git, line)
    files = details(git, changes, reads_content=begun["reads_content"]) if changes else []
    if head := next_head(git, line):
        told = call(session, "git.head", head=head, check=True)
        if "denied" in told:
            return _show(told["denied"], line.name)
    before = _head(git)
    theirs, ours = os.pipe()  # the session ends the grants when this process ends
    for at in range(0, len(files), _AT_A_TIME):
        asked = {**words, "commit": commit, "head": before[1], "files": files[at : at + _AT_A_TIME]}
        grants.append(call_with([theirs], session, "git.preflight", **asked)["grant"])
    since = datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        status = _wait(real, given)
    finally:
        for grant in filter(None, grants):
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
    return 128 - status if status < 0 else status


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


def _refusals(root: str, since: str) -> list[dict[str, Any]]:
    """The refusals of the mount since a time, each path once."""
    found: dict[str, dict[str, Any]] = {}
    with suppress(OSError), open(os.path.join(root, ".bonobofs/denials.jsonl"), encoding="utf-8") as lines:
        for told in map(json.loads, lines):
            if told.pop("timestamp") >= since and told["operation"] not in _TRIED:
                found.setdefault(told["path"], told)
    return list(found.values())


def _show(told: dict[str, Any], subcommand: str) -> int:
    """Tell a refusal by one line of JSON and one of help; the exit status."""
    code, error = _WORDS.get(told["rule"]) or _by_code(told)
    held = f"It is held by {told['holder']} until {told['until']}." if "holder" in told else ""
    path = f"{told['path']}:" if told["path"] else ""
    text = " ".join(f"git: {path} {told['reason']} {told.get('about', '')} {held} {told['instead']}".split())
    document = {"cleo_error": True, **told, "code": code, "subcommand": subcommand, "error": error}
    sys.stderr.buffer.write(os.fsencode(f"{json.dumps(document)}\n{text}\n"))
    sys.stderr.flush()
    return REFUSED


def _by_code(told: dict[str, Any]) -> tuple[str, str]:
    if told["rule"].startswith("role:") and ":git:" in told["rule"]:
        return "E_GIT_OP_BLOCKED", "op-blocked"
    word = told["rule"].removeprefix("git.") if told["code"] == "GIT" else told["code"].lower()
    return f"E_GIT_{word.upper().replace('-', '_')}", word
