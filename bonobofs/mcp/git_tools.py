"""The git tools: they run the session's own `git` in the mount, as the agent would, and return what it says."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import Any, Final

from bonobofs.errors import GitError, UsageError
from bonobofs.git.session_git import GitExitError, SessionGit
from bonobofs.ipc.codec import decode_denied
from bonobofs.mcp.session_link import SessionLink
from bonobofs.mcp.tool_arguments import GitBranch, GitCommit, GitDiff, GitMerge, NoArguments
from bonobofs.policy.decision import Code, Denied, Refused

_SECONDS: Final = 600.0
_END_SECONDS: Final = 5.0
_LONGEST_OUTPUT: Final = 4000
_LONGEST_PATCH: Final = 1 << 20
_DIFF: Final = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--")
_CODES: Final = {"op-blocked": Code.ROLE, "cwd-outside-worktree": Code.OUTSIDE}
_SETTINGS: Final = {"GIT_LITERAL_PATHSPECS": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true"}


class CapturedGit(SessionGit):
    """The session's git in its mount, with its output kept."""

    def __init__(self, link: SessionLink) -> None:
        super().__init__(link.inside / "bin/git", link.call("whoami").get("issue"))
        self._directory: Final = link.mountpoint
        self.output = ""
        """What the last program has written."""

    def run(self, *arguments: str, quiet: bool = False) -> int:
        """As `SessionGit.run`."""
        done = self._program(arguments)
        if not quiet:
            self.output = os.fsdecode(done.stderr + done.stdout)
        return done.returncode

    def read(self, *arguments: str) -> str:
        """As `SessionGit.read`."""
        done = self._program(arguments)
        return "" if done.returncode else os.fsdecode(done.stdout).removesuffix("\n")

    def state(self) -> dict[str, Any]:
        """Return branch, commit and the last output."""
        output = self.output[-_LONGEST_OUTPUT:]
        branch = self.read("symbolic-ref", "--quiet", "--short", "HEAD")
        return {"branch": branch, "commit": self.read("rev-parse", "--verify", "--quiet", "HEAD"), "output": output}

    def _program(self, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[bytes]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        # In a pipe, a program that a hook has started in the background would hold up this call.
        with (
            TemporaryFile() as output,
            TemporaryFile() as errors,
            subprocess.Popen(
                [self.program, *arguments],
                cwd=self._directory,
                env={**own, **_SETTINGS},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            ) as process,
        ):
            try:
                process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                process.terminate()  # the session's git ends the real one
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
                process.kill()
                raise GitError(f"git did not end within {_SECONDS:.0f} s", kind="busy") from None
            written = []
            for file in (output, errors):
                file.seek(0)
                written.append(file.read())
            return subprocess.CompletedProcess(arguments, process.returncode, *written)


_ONE_AT_A_TIME: Final = Lock()
"""The tools that change the repository share one index and one HEAD."""


@contextmanager
def _changing() -> Iterator[None]:
    """Wait for the other tools that change the repository. GitError: one does not end."""
    if not _ONE_AT_A_TIME.acquire(timeout=_SECONDS):
        raise GitError("another git tool has not ended", kind="busy")
    try:
        yield
    finally:
        _ONE_AT_A_TIME.release()


@contextmanager
def _explained(git: CapturedGit) -> Iterator[None]:
    """Raise the refusal or the GitError that explains a failed command of the session's git."""
    try:
        yield
    except GitExitError as error:
        raise _failure(git, error) from None


def _failure(git: CapturedGit, error: GitExitError) -> Exception:
    """Return the refusal that the session's git has printed, else what git said."""
    for line in git.output.splitlines():
        if error.status == Refused.exit_code and line.startswith('{"cleo_error"'):
            return Refused(_denied(json.loads(line)))
    text = " ".join(git.output[-_LONGEST_OUTPUT:].split())
    return GitError(text or f"git ended with exit status {error.status}", kind="failed")


def _denied(document: dict[str, Any]) -> Denied:
    """Return the denial in a line of the session's git, whose `code` is CLEO's and whose `error` tells ours."""
    codes = {code.lower(): code for code in Code} | _CODES
    return decode_denied({**document, "code": codes.get(document["error"], Code.GIT).value})


def _plain(*names: str | None) -> None:
    """UsageError: a name would be an option of git."""
    for name in names:
        if name is not None and (not name or name.startswith("-") or "\0" in name):
            raise UsageError(f"the name {name[:64]!a} is invalid: it must not be empty, begin with - or have NUL")


def commit(link: SessionLink, arguments: GitCommit) -> Any:
    """Commit files, or what is staged."""
    git = CapturedGit(link)
    _plain(*(arguments.files or ()))
    with _changing(), _explained(git):
        git.commit(arguments.message, arguments.files or ())
        return git.state()


def branch(link: SessionLink, arguments: GitBranch) -> Any:
    """Create a branch, check it out, or both."""
    git = CapturedGit(link)
    _plain(arguments.name, arguments.base)
    with _changing(), _explained(git):
        if arguments.create is not False:
            git.branch(arguments.name, arguments.base or "HEAD", checkout=bool(arguments.checkout))
        elif arguments.checkout:
            git.checkout(arguments.name)
        return git.state()


def merge(link: SessionLink, arguments: GitMerge) -> Any:
    """Merge a branch."""
    git = CapturedGit(link)
    _plain(arguments.source, arguments.target)
    try:
        with _changing(), _explained(git):
            git.merge(arguments.source, arguments.target, arguments.strategy or "merge")
            return git.state()
    except GitError as error:
        if not error.paths:
            raise
        raise GitError(f"{error}: {', '.join(error.paths[:20])}", kind=error.kind, paths=error.paths) from None


def status(link: SessionLink, _: NoArguments) -> Any:
    """List staged, modified and untracked files."""
    git = CapturedGit(link)
    if git.run("rev-parse", "--git-dir"):
        raise GitError(f"{Path(link.mountpoint)} is no git repository", kind="no-repository")
    staged, modified, untracked = [], [], []
    records = iter(git.read("status", "--porcelain=v1", "-z", "--no-renames").split("\0"))
    for record in filter(None, records):
        code, path = record[:2], record[3:]
        if code == "??":
            untracked.append(path)
        elif "U" in code or code in ("AA", "DD"):
            modified.append(path)
        else:
            staged += [path] if code[0] != " " else []
            modified += [path] if code[1] != " " else []
    lists = {"staged": staged, "modified": modified, "untracked": untracked}
    return {"branch": git.state()["branch"], "clean": not (staged or modified), **lists}


def diff(link: SessionLink, arguments: GitDiff) -> Any:
    """Return the changes since the last commit as a patch."""
    git = CapturedGit(link)
    _plain(arguments.path)
    with _explained(git):
        git.demand(*_DIFF, *([] if arguments.path is None else [arguments.path]))
    cut = "The patch is too long; name one file." if len(git.output) > _LONGEST_PATCH else ""
    return {"patch": git.output[:_LONGEST_PATCH], "cut": cut}
