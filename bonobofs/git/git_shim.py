"""Program `git` of a session. It runs the real git, and calls the session before and after it.

1. The session checks the role's list of subcommands.
2. A command may change files that the role may not write. If a protected branch has their new content, the session
   grants these files to the command.
3. The real git runs.
4. The session ends the grant. The shim publishes the branch, and shows the refusals of the command.

Enforcement does not depend on the shim. Without it, the mount refuses the same changes, and hooks publish. The
directory of the program identifies the session.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bonobofs.errors import BonobofsError, reason
from bonobofs.git.command_line import (
    GitRunner,
    Line,
    contacts_remote,
    only_reads,
    parse_line,
    positional_words,
    resolve,
)
from bonobofs.git.source_refs import SHIM, SUBMODULE, SYMLINK, find_common_dir
from bonobofs.ipc.client import call, call_with
from bonobofs.policy.decision import Refused, as_document
from bonobofs.state.home import GUARD_SOCKET
from bonobofs.system.terminal import printable

REFUSED: Final = 77
CLIENT: Final = str(Path(__file__).with_name("publish_client.py"))
_AT_A_TIME: Final = 4000
"""Files in one `git.preflight` call."""
_TRIED: Final = ("rmdir", "set_times")
"""Operations that git tries and whose failure it ignores. Their refusals are not shown."""
_UNDER_WAY: Final = ("rebase-merge", "rebase-apply", "sequencer", "CHERRY_PICK_HEAD", "REVERT_HEAD")
_MOST_SHOWN: Final = 5
"""Refusals shown for one command."""
_WORDS: Final = {"git.isolation": ("E_GIT_BOUNDARY_CWD_OUTSIDE_WORKTREE", "cwd-outside-worktree")}
"""CLEO's error code and word, by rule. Other rules: `_by_code`."""


def main() -> int:
    """Run `SESSION-DIRECTORY REAL-GIT ARGUMENTS…` from sys.argv; return the exit status, 77 for a refusal."""
    directory, real, *arguments = sys.argv[1:]
    line = resolve(real, parse_line(arguments))
    if only_reads(line):
        os.execv(real, [real, *arguments])
    session = Path(directory)
    try:
        return _run(session, real, arguments, line)
    except Refused as refused:
        decision = refused.decision
        return _show(as_document(decision, decision.path, decision.operation), line.name)
    except (BonobofsError, OSError) as error:
        sys.stderr.write(f"git: {reason(error)}\n")
    return 1


def _run(session: Path, real: str, arguments: list[str], line: Line) -> int:
    git = GitRunner(real, line.options)
    words: dict[str, Any] = {"subcommand": line.name, "arguments": list(line.arguments)}
    here = _directory(line)
    begun = call(session, "git.begin", **words, directory=here, remote=contacts_remote(line))
    root = str(begun["root"])
    top = os.path.realpath(git.line("rev-parse", "--show-toplevel") or "/")
    if not f"{top}/".startswith(f"{root}/"):
        os.execv(real, [real, *arguments])  # another repository, or none: only the role's list applies
    grants: list[int] = []
    commit, changes = plan(git, line)
    files = details(git, changes, reads_content=begun["reads_content"]) if changes else []
    if head := next_head(git, line):
        answer = call(session, "git.head", head=head, check=True)
        if "denied" in answer:
            return _show(answer["denied"], line.name)
    before = _head(git)
    theirs, ours = os.pipe()  # closed when this process ends; then the session ends the grants
    for at in range(0, len(files), _AT_A_TIME):
        request = {**words, "commit": commit, "head": before[1], "files": files[at : at + _AT_A_TIME]}
        grants.append(call_with([theirs], session, "git.preflight", **request)["grant"])
    since = datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        status = _wait(real, arguments, before[0])
    finally:
        for grant in filter(None, grants):
            call(session, "git.finish", grant=grant)
    os.close(ours)
    after = _head(git)
    if after[:2] != before[:2] or (before[2] and not after[2]):
        _publish(git, session, real, root)
    refusals = _refusals(root, since) if status else []
    for denied in refusals[:_MOST_SHOWN]:
        _show(denied, line.name)
    return REFUSED if refusals else status


def _publish(git: GitRunner, session: Path, real: str, root: str) -> None:
    """Publish the branch at HEAD, unless the repository is that of a submodule."""
    git_dir = git.line("rev-parse", "--absolute-git-dir")
    if os.path.realpath(find_common_dir(Path(git_dir))) == os.path.realpath(f"{root}/.git"):
        # The client runs `git`, and that must be the real one.
        path = f"{os.path.dirname(real)}:{os.environ.get('PATH', os.defpath)}"
        environment = {**os.environ, "PATH": path, "GIT_DIR": git_dir}
        command = [sys.executable, "-I", "-S", "-E", CLIENT, str(session / GUARD_SOCKET), "publish"]
        subprocess.run(command, env=environment, check=False)


def _wait(real: str, arguments: list[str], branch: str) -> int:
    """Run the real git, forward signals to it, and return its exit status.

    The shim publishes `branch` instead of the hooks of git.
    """
    environment = {**os.environ, SHIM: f"{os.getpid()} ref: {branch}"}
    handled = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in (signal.SIGINT, signal.SIGQUIT):  # the terminal also sends them to git
        signal.signal(number, lambda *_: None)
    with subprocess.Popen([real, *arguments], env=environment) as running:
        for number in handled:
            signal.signal(number, lambda sent, _: running.send_signal(sent))
        status = running.wait()
    for number in (*handled, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    return 128 - status if status < 0 else status


def _directory(line: Line) -> str:
    """Return the real path of git's working directory, or "" if it does not exist."""
    with suppress(OSError):
        directory = os.getcwd()
        for option, value in zip(line.options, line.options[1:], strict=False):
            directory = os.path.join(directory, value) if option == "-C" else directory
        return os.path.realpath(directory, strict=True)
    return ""


def _head(git: GitRunner) -> tuple[str, str, bool]:
    """Return branch and commit of HEAD, and whether git works on several commits."""
    git_dir = git.line("rev-parse", "--absolute-git-dir")
    is_under_way = any(os.path.exists(os.path.join(git_dir, name)) for name in _UNDER_WAY)
    return git.line("symbolic-ref", "--quiet", "HEAD"), git.commit("HEAD"), is_under_way


def _refusals(root: str, since: str) -> list[dict[str, Any]]:
    """Return the mount's refusals since an ISO 8601 time, the first of each path."""
    found: dict[str, dict[str, Any]] = {}
    with suppress(OSError), open(os.path.join(root, ".bonobofs/denials.jsonl"), encoding="utf-8") as lines:
        for denial in map(json.loads, lines):
            if denial.pop("timestamp") >= since and denial["operation"] not in _TRIED:
                found.setdefault(denial["path"], denial)
    return list(found.values())


def _show(denial: dict[str, Any], subcommand: str) -> int:
    """Write a refusal to stderr as one line of JSON and one of text; return the exit status."""
    code, error = _WORDS.get(denial["rule"]) or _by_code(denial)
    holder = f"It is held by {denial['holder']} until {denial['until']}." if "holder" in denial else ""
    path = f"{denial['path']}:" if denial["path"] else ""
    text = " ".join(f"git: {path} {denial['reason']} {denial.get('about', '')} {holder} {denial['instead']}".split())
    document = {"cleo_error": True, **denial, "code": code, "subcommand": subcommand, "error": error}
    sys.stderr.buffer.write(os.fsencode(f"{json.dumps(document)}\n{printable(text)}\n"))
    sys.stderr.flush()
    return REFUSED


def _by_code(denial: dict[str, Any]) -> tuple[str, str]:
    if denial["rule"].startswith("role:") and ":git:" in denial["rule"]:
        return "E_GIT_OP_BLOCKED", "op-blocked"
    word = denial["rule"].removeprefix("git.") if denial["code"] == "GIT" else denial["code"].lower()
    return f"E_GIT_{word.upper().replace('-', '_')}", word


GONE: Final = 0
_HEAD_BYTES: Final = 8
_LARGE: Final = 1 << 20
"""Blob size in bytes from which the preflight sends no first bytes. The mount judges them at the write."""
_UNKNOWN: Final = ""
"""Blob id of content that git does not know before it runs the command."""

Changes = dict[str, tuple[int, str]]
"""{path: (mode, blob id)} after the command; mode 0 means that the command removes the path."""
Plan = tuple[str, Changes]
"""Commit that the command leads to, and its changes."""

_STRATEGY: Final = ("-s", "--strategy", "-X", "--strategy-option", "-S")
_MESSAGE: Final = ("-m", "--message", "-F", "--file", "--cleanup", "--into-name")
_BRANCHING: Final = ("-c", "-C", "--create", "--force-create", "-b", "-B", "--orphan", "--conflict")


def plan(git: GitRunner, line: Line) -> Plan:
    """Predict the changes of a command. Return ("", {}) for a command whose changes cannot be predicted."""
    planner = _PLANNERS.get(line.name)
    return planner(git, line.arguments) if planner is not None else ("", {})


def next_head(git: GitRunner, line: Line) -> str:
    """Return the text of HEAD after `switch` or `checkout`, or "" if HEAD stays or the result is unknown."""
    arguments = line.arguments
    if line.name not in ("switch", "checkout") or "--" in arguments:
        return ""
    for option in ("-c", "-C", "-b", "-B", "--create", "--force-create"):
        if option in arguments[:-1]:
            return f"ref: refs/heads/{arguments[arguments.index(option) + 1]}"
    words = positional_words(arguments, _BRANCHING)
    if len(words) != 1:
        return ""
    name = "@{-1}" if words[0] == "-" else words[0]
    ref = git.line("rev-parse", "--symbolic-full-name", name)
    if ref.startswith("refs/heads/") and not {"-d", "--detach"} & set(arguments):
        return f"ref: {ref}"
    return git.commit(name)


def details(git: GitRunner, changes: Changes, *, reads_content: bool) -> list[list[object]]:
    """Return rows for `git.preflight`: path, mode, blob id, size (-1: unknown), first bytes or symlink target."""
    blobs = {oid: mode for mode, oid in changes.values() if oid and mode not in (GONE, SUBMODULE)}
    sizes: dict[str, int] = {}
    output = git.output("cat-file", "--batch-check=%(objectname) %(objectsize)", data=_lines(blobs))
    for line in output.decode().splitlines():
        oid, _, size = line.partition(" ")
        sizes[oid] = int(size) if size.isdecimal() else -1
    wanted = {oid: size for oid, size in sizes.items() if size >= 0 and (reads_content or blobs[oid] == SYMLINK)}
    read = [oid for oid, size in wanted.items() if size < _LARGE]
    heads: dict[str, str] = {}
    content, at = git.output("cat-file", "--batch", data=_lines(read)), 0
    for oid in read:  # each is preceded by a header line and followed by a newline
        at = content.index(b"\n", at) + 1
        is_link = blobs[oid] == SYMLINK
        text = content[at : at + (sizes[oid] if is_link else min(sizes[oid], _HEAD_BYTES))]
        heads[oid] = os.fsdecode(text) if is_link else text.decode("latin-1")
        at += sizes[oid] + 1
    return [
        [path, mode, oid, sizes.get(oid, -1), heads.get(oid, "")]
        for path, (mode, oid) in changes.items()
        if mode != SUBMODULE
    ]


def _lines(names: Iterable[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()


def _between(git: GitRunner, *command: str) -> Changes:
    """Run a `diff-*` plumbing command and parse its raw output."""
    fields = git.lines(*command[:1], "--raw", "--no-abbrev", "--no-renames", "-z", *command[1:], end="\0")
    found: Changes = {}
    for head, path in zip(fields[::2], fields[1::2], strict=False):
        _, mode, _, oid, status = head.split(" ")
        if status[0] != "U":
            found[path] = int(mode, 8), "" if mode == "000000" else oid
    return found


def _trees(git: GitRunner, old: str, new: str) -> Changes:
    return _between(git, "diff-tree", "-r", old, new)


def _from_index(git: GitRunner, new: str, *paths: str) -> Changes:
    """Return the changes from the index to a tree."""
    return _between(git, "diff-index", "--cached", "-R", new, "--", *paths)


def _merged(git: GitRunner, first: str, second: str) -> str:
    """Return the tree of the merge of two commits, with conflict markers, or "" if git fails."""
    status, text = git.run("merge-tree", "--write-tree", "--no-messages", "--name-only", first, second)
    return text.split("\n", 1)[0] if status in (0, 1) else ""


def _named_in(git: GitRunner, file: str) -> str:
    """Return the commit that a file of the git directory names, or ""."""
    try:
        return git.commit(Path(git.line("rev-parse", "--git-path", file)).read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return ""


def _to(git: GitRunner, commit: str, *paths: str) -> Plan:
    return (commit, _from_index(git, commit, *paths)) if commit else ("", {})


def _checkout(git: GitRunner, arguments: tuple[str, ...]) -> Plan:
    words = positional_words(arguments, _BRANCHING)
    paths = list(arguments[arguments.index("--") + 1 :]) if "--" in arguments else words[1:]
    if not words or any(word.startswith("--orphan") for word in arguments):
        return "", {}
    name = "@{-1}" if words[0] == "-" else words[0]
    commit = git.commit(name)
    if not commit:  # git makes a local branch from a remote branch
        commit = git.commit(git.line("for-each-ref", "--format=%(refname)", f"refs/remotes/*/{name}"))
    return _to(git, commit, *paths)


def _merge(git: GitRunner, arguments: tuple[str, ...]) -> Plan:
    if "--abort" in arguments:
        return _to(git, git.commit("HEAD"))
    if {"--continue", "--quit"} & set(arguments):
        return "", {}
    return _merge_with(git, positional_words(arguments, (*_STRATEGY, *_MESSAGE)) or ["@{upstream}"])


def _merge_with(git: GitRunner, names: list[str]) -> Plan:
    commits = [git.commit(name) for name in names]
    changes: Changes = {}
    for commit in filter(None, commits):
        if tree := _merged(git, "HEAD", commit):
            changes.update(_trees(git, "HEAD", tree))
    return commits[0], changes


def _rebase(git: GitRunner, arguments: tuple[str, ...]) -> Plan:
    if "--abort" in arguments:
        return _to(git, _named_in(git, "rebase-merge/orig-head") or _named_in(git, "rebase-apply/orig-head"))
    if {"--continue", "--skip", "--quit", "--edit-todo", "--root"} & set(arguments):
        return "", {}
    words = positional_words(arguments, (*_STRATEGY, "--onto", "-x", "--exec", "-C", "--whitespace"))
    onto = next((word.partition("=")[2] for word in arguments if word.startswith("--onto=")), "")
    if "--onto" in arguments[:-1]:
        onto = arguments[arguments.index("--onto") + 1]
    return _rebase_on(git, onto or (words[0] if words else "@{upstream}"), words[1] if len(words) > 1 else "HEAD")


def _rebase_on(git: GitRunner, onto: str, branch: str) -> Plan:
    base, tip = git.commit(onto), git.commit(branch)
    if not base or not tip:
        return "", {}
    tree = _merged(git, base, tip)
    return base, {**_from_index(git, base), **(_trees(git, base, tree) if tree else {})}


def _pull(git: GitRunner, arguments: tuple[str, ...]) -> Plan:
    words = positional_words(arguments, _STRATEGY)
    if git.run("fetch", *words)[0] != 0:
        return "", {}  # git pull reports the error
    rebases = git.line("config", "--get", "pull.rebase") in ("true", "merges", "interactive")
    for word in arguments:
        rebases = word.startswith(("--rebase", "-r")) or (rebases and not word.startswith(("--no-rebase", "--ff-only")))
    return _rebase_on(git, "FETCH_HEAD", "HEAD") if rebases else _merge_with(git, ["FETCH_HEAD"])


def _reset(git: GitRunner, arguments: tuple[str, ...]) -> Plan:
    if not {"--hard", "--merge", "--keep"} & set(arguments):
        return "", {}
    return _to(git, git.commit(next(iter(positional_words(arguments)), "HEAD")))


def _stash(git: GitRunner, arguments: tuple[str, ...]) -> Plan:
    words = positional_words(arguments)
    if words[:1] not in (["pop"], ["apply"]):
        return "", {}
    name = words[1] if len(words) > 1 else "0"
    stash = git.commit(f"stash@{{{name}}}" if name.isdecimal() else name)
    return (git.commit("HEAD"), _trees(git, f"{stash}^1", stash)) if stash else ("", {})


def _pick(git: GitRunner, arguments: tuple[str, ...], *, back: bool = False) -> Plan:
    if "--abort" in arguments:
        return _to(git, _named_in(git, "sequencer/head") or git.commit("HEAD"))
    words = positional_words(arguments, (*_STRATEGY, "-m", "--mainline", "--cleanup"))
    ranges = any(".." in word or word.startswith("^") for word in words)
    commits = git.lines("rev-list", *(() if ranges else ("--no-walk=unsorted",)), *words, "--") if words else []
    changes: Changes = {}
    for commit in commits:
        ends = (commit, f"{commit}^1") if back else (f"{commit}^1", commit)
        changes.update(_trees(git, *ends))
    return git.commit("HEAD") if commits else "", changes


def _revert(git: GitRunner, arguments: tuple[str, ...]) -> Plan:
    return _pick(git, arguments, back=True)


def _am(git: GitRunner, arguments: tuple[str, ...]) -> Plan:
    if "--abort" in arguments:
        return _to(git, git.commit("ORIG_HEAD"))
    words = positional_words(arguments, ("-C", "-p", "--directory", "--exclude", "--include", "--patch-format"))
    fields = git.lines("apply", "--numstat", "-z", "--", *words, end="\0") if words else []
    return git.commit("HEAD"), {field.split("\t", 2)[2]: (0o100644, _UNKNOWN) for field in fields if "\t" in field}


_PLANNERS: Final[dict[str, Callable[[GitRunner, tuple[str, ...]], Plan]]] = {
    "am": _am,
    "checkout": _checkout,
    "cherry-pick": _pick,
    "merge": _merge,
    "pull": _pull,
    "rebase": _rebase,
    "reset": _reset,
    "revert": _revert,
    "stash": _stash,
    "switch": _checkout,
}
