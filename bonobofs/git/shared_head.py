"""HEAD and index of the source's checkout, which follow the session: the index is rebuilt from trees, never copied.

New content is prepared in a file of its own. A hard link of that file is the lock, and a rename of the lock replaces
the index or HEAD, so a lock that is left is provably ours: it is the same file.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bonobofs.errors import GitError
from bonobofs.git.repository import ENVIRONMENT, Difference, Entry

_MOST_NAMED: Final = 200
"""Paths up to which git is asked for these alone, and not for the whole index."""
_TRIES: Final = 40
_BETWEEN: Final = 25
"""Milliseconds between two tries while another process holds the lock."""
_NO_OBJECT: Final = "0" * 40


class StagedError(GitError):
    """The operator has staged something else under a path that is to change."""


@contextmanager
def prepared_index(
    git_dir: Path, room: Path, token: str, changes: Iterable[Difference], *, keep: bool
) -> Iterator[Index]:
    """The index of a checkout with these changes, to be put in place by `Index.replace`.

    Where the operator has staged something else under a path, that is kept (`keep`), or StagedError is raised. `room`
    is a directory for an empty git directory; `token` is in the name of every file in `git_dir`.
    """
    index = Index(git_dir, room, token, {each.path: each for each in changes}, keep=keep)
    try:
        yield index
    finally:
        index.remove()


class Index:
    """A changed copy of the index of one checkout."""

    def __init__(self, git_dir: Path, room: Path, token: str, changes: dict[bytes, Difference], *, keep: bool) -> None:
        self._place: Final = git_dir / "index"
        self._lock: Final = git_dir / "index.lock"
        self._copy: Final = git_dir / f"bonobofs-{token}.index"
        self._room: Final = room / "index"
        self._changes: Final = changes
        self._keep: Final = keep
        self._seen: tuple[int, ...] | None = None
        self._is_changed = False
        self._prepare()

    def replace(self) -> None:
        """Put the copy in place. GitError: another process holds the lock all the time."""
        if not self._is_changed:
            return
        for _ in range(_TRIES):
            try:
                os.link(self._copy, self._lock)
            except FileExistsError:
                select.select([], [], [], _BETWEEN / 1000)
                continue
            if _mark(self._place) == self._seen:
                os.rename(self._lock, self._place)
                return
            os.unlink(self._lock)
            self._prepare()
        raise GitError("the index of the checkout is locked; remove index.lock if no git runs", kind="busy")

    def remove(self) -> None:
        """Remove the copy."""
        self._copy.unlink(missing_ok=True)
        shutil.rmtree(self._room, ignore_errors=True)

    def _prepare(self) -> None:
        if not self._changes:
            return  # also where the source has no index
        self._seen = _mark(self._place)
        self._copy.unlink(missing_ok=True)
        if self._seen is not None:
            shutil.copy(self._place, self._copy)
        lines = b"".join(self._lines())
        if lines:
            self._git("update-index", "-z", "--index-info", given=lines)
        self._is_changed = bool(lines)

    def _lines(self) -> Iterator[bytes]:
        staged = self._staged()
        for path, old, new in self._changes.values():
            found = staged.get(path, [])
            here = found[0] if found else None
            if len(found) < 2 and here == new:
                continue
            if len(found) > 1 or here != old:
                if not self._keep:
                    raise StagedError(f"{os.fsdecode(path)} is staged with other content", kind="staged")
                continue
            mode, oid = (0, _NO_OBJECT) if new is None else new
            yield b"%o %s\t%s\0" % (mode, oid.encode(), path)

    def _staged(self) -> dict[bytes, list[Entry]]:
        if self._seen is None:
            return {}
        paths = list(self._changes) if len(self._changes) <= _MOST_NAMED else []
        found: dict[bytes, list[Entry]] = {}
        for line in self._git("ls-files", "--stage", "-z", "--", *paths).split(b"\0")[:-1]:
            about, _, path = line.partition(b"\t")
            mode, oid, _ = about.decode("ascii").split(" ")
            found.setdefault(path, []).append(Entry(int(mode, 8), oid))
        return found

    def _git(self, *arguments: str | bytes, given: bytes = b"") -> bytes:
        """Run git on the copy, in an empty git directory. GitError: it failed."""
        if not self._room.exists():
            for name in ("objects", "refs"):
                (self._room / name).mkdir(parents=True)
            (self._room / "HEAD").write_text("ref: refs/heads/none\n", encoding="ascii")
            for shared in self._place.parent.glob("sharedindex.*"):
                (self._room / shared.name).symlink_to(os.path.abspath(shared))
        environment = {
            **ENVIRONMENT,
            "GIT_DIR": str(self._room),
            "GIT_INDEX_FILE": os.path.abspath(self._copy),
            "GIT_LITERAL_PATHSPECS": "1",
        }
        # A split index would refer to a file of the empty git directory.
        command = ["git", "-c", "core.splitIndex=false", *arguments]
        done = subprocess.run(command, input=given, env=environment, capture_output=True, check=False)
        if done.returncode != 0:
            text = done.stderr.decode(errors="replace").strip()
            raise GitError(f"the index of the checkout cannot be changed: {text}", kind="index")
        return done.stdout


def read_head(git_dir: Path) -> str:
    """The content of HEAD: `ref: REF`, or an object id."""
    return (git_dir / "HEAD").read_text(encoding="utf-8", errors="surrogateescape").strip()


def replace_head(git_dir: Path, token: str, old: str, new: str, log: str) -> None:
    """Let HEAD be `new` if it is `old`, and append a line to its reflog. GitError: it is not, or it is locked."""
    copy, lock = git_dir / f"bonobofs-{token}.HEAD", git_dir / "HEAD.lock"
    try:
        with copy.open("x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{new}\n")
            file.flush()
            os.fdatasync(file.fileno())
        os.link(copy, lock)
        if read_head(git_dir) != old:
            lock.unlink()
            raise GitError("HEAD of the checkout was moved by another process", kind="moved")
        with suppress(FileNotFoundError), (git_dir / "logs" / "HEAD").open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(log.encode("utf-8", "surrogateescape"))
        lock.rename(git_dir / "HEAD")
    except FileExistsError as error:
        raise GitError("HEAD of the checkout is locked; remove HEAD.lock if no git runs", kind="busy") from error
    finally:
        copy.unlink(missing_ok=True)


def is_checked_out_elsewhere(git_dir: Path, common: Path, ref: str) -> bool:
    """Whether another work tree of the repository has the branch checked out."""
    found = [*(common / "worktrees").glob("*"), *([common] if (common / "index").exists() else [])]
    own = os.path.realpath(git_dir)
    for each in found:
        with suppress(OSError):
            if os.path.realpath(each) != own and read_head(each) == f"ref: {ref}":
                return True
    return False


def _mark(place: Path) -> tuple[int, ...] | None:
    try:
        st = place.stat()
    except FileNotFoundError:
        return None
    return st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns
