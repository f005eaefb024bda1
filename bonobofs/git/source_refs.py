"""Git directories of the source, its HEAD and refs, and the publishers of its branches. The standard library alone."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from bonobofs.errors import GitError
from bonobofs.state.home import read_document, write_document
from bonobofs.system.locks import locked

BRANCHES: Final = "refs/heads/"
TAGS: Final = "refs/tags/"
REMOTES: Final = "refs/remotes/"
TREE: Final = 0o040000
FILE: Final = 0o100644
EXECUTABLE: Final = 0o100755
SYMLINK: Final = 0o120000
SUBMODULE: Final = 0o160000

SHIM: Final = "BONOBOFS_GIT_SHIM"
"""Environment variable of what the session's `git` runs. The hooks of the session then leave publication to it."""
ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LC_ALL": "C",
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
}
"""Environment of every git process that bonobofs runs for itself."""
_SECONDS: Final = 120
"""Timeout of one git process."""
_OBJECT_ID: Final = re.compile(r"[0-9a-f]{40}")


def run_git(
    *arguments: str | bytes | Path,
    data: bytes = b"",
    directory: str | Path = "/",
    environment: Mapping[str, str] = ENVIRONMENT,
    codes: Sequence[int] = (0,),
    kind: str = "unsupported",
) -> bytes:
    """Run git with the input `data` and return its output.

    Raises GitError of `kind` if the exit status is not in `codes`, and after 120 s.
    """
    try:
        done = subprocess.run(
            ["git", *arguments],
            input=data,
            capture_output=True,
            check=False,
            timeout=_SECONDS,
            cwd=directory,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git took longer than {_SECONDS} s; nothing was changed", kind="busy") from error
    except OSError as error:
        raise GitError(f"git cannot run: {error}", kind="missing") from error
    if done.returncode not in codes:
        lines = os.fsdecode(done.stderr).strip().splitlines()
        text = lines[-1].removeprefix("fatal: ").removeprefix("error: ") if lines else f"exit {done.returncode}"
        raise GitError(f"git: {text}", kind=kind)
    return done.stdout


class GitDirs(NamedTuple):
    """Directories of one work tree."""

    private: Path
    """HEAD and index."""
    common: Path
    """Configuration, refs and objects. The same directory unless the work tree is a linked one."""


def find_git_dirs(work_tree: Path) -> GitDirs:
    """Return the directories of the work tree with root `work_tree`. Raises GitError if it is no root; OSError."""
    dot_git = work_tree / ".git"
    if not dot_git.exists():
        raise GitError(f"{work_tree} is not the root of a git work tree", kind="no-repository")
    if dot_git.is_file():
        text = os.fsdecode(dot_git.read_bytes())
        if not text.startswith("gitdir: "):
            raise GitError(f"{dot_git} is a file, and names no repository", kind="unreadable")
        dot_git = work_tree / text.removeprefix("gitdir: ").rstrip("\n")
    private = Path(os.path.realpath(dot_git))
    return GitDirs(private, find_common_dir(private))


def find_common_dir(git_dir: Path) -> Path:
    """Return the directory of configuration, refs and objects for a git directory."""
    with suppress(FileNotFoundError):
        return Path(os.path.realpath(git_dir / os.fsdecode((git_dir / "commondir").read_bytes()).rstrip("\n")))
    return git_dir


def read_head(git_dir: Path) -> str:
    """Return the content of HEAD: `ref: REF` or an object id."""
    return os.fsdecode((git_dir / "HEAD").read_bytes()).strip()


def read_ref(common: Path, ref: str) -> str:
    """Return the object id of a ref, or "" if it is missing or symbolic."""
    with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
        text = (common / ref).read_text(encoding="ascii", errors="replace").strip()
        return text if _OBJECT_ID.fullmatch(text) else ""
    with suppress(FileNotFoundError), (common / "packed-refs").open(encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            if line[41:].rstrip("\n") == ref and _OBJECT_ID.fullmatch(line[:40]):
                return line[:40]
    return ""


class Branches(Protocol):
    """Publishing agent and tip of each branch of one repository."""

    def find(self, ref: str) -> tuple[str, str]:
        """Return the UUID of the publishing agent and the tip that it published, or ("", "")."""

    def note(self, ref: str, tip: str) -> None:
        """Store `tip` as published by the session's agent. "" means that the agent deleted the branch."""


class PublishedBranches:
    """`published.json` in the state directory: `{"COMMON-DIR REF": [UUID of the agent, tip]}`, for all sources."""

    def __init__(self, home: Path, common_dir: Path, agent_id: str) -> None:
        self._file: Final = home / "published.json"
        self._common_dir: Final = os.path.realpath(common_dir)
        self._agent_id: Final = agent_id

    def find(self, ref: str) -> tuple[str, str]:
        """As `Branches.find`. Raises StateError if the file is damaged."""
        agent, tip = self._read().get(f"{self._common_dir} {ref}", ("", ""))
        return agent, tip

    def note(self, ref: str, tip: str) -> None:
        """As `Branches.note`. Also called for a branch that bonobofs made for the agent."""
        with locked(self._file.with_suffix(".lock")):
            known = self._read()
            key = f"{self._common_dir} {ref}"
            if tip:
                known[key] = [self._agent_id, tip]
            else:
                known.pop(key, None)
            write_document(self._file, known)

    def _read(self) -> dict[str, Any]:
        try:
            return read_document(self._file)
        except FileNotFoundError:
            return {}
