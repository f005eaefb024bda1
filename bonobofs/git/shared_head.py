"""HEAD and index of the source's checkout, which follow the session. The session's index is never copied.

New content is written to a temporary file. A hard link of that file is the lock, and a rename of the lock replaces
index or HEAD. A stale lock is ours if it is the same inode as the temporary file.
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
"""Up to this number of paths, git lists only these, otherwise the whole index."""
_TRIES: Final = 40
_BETWEEN: Final = 25
"""Milliseconds between retries while another process holds the lock."""
_NO_OBJECT: Final = "0" * 40


class StagedError(GitError):
    """The operator has staged other content at a path that would change."""


@contextmanager
def prepared_index(
    git_dir: Path, room: Path, token: str, changes: Iterable[Difference], *, keep: bool
) -> Iterator[Index]:
    """Yield a copy of a checkout's index with these changes. `Index.replace` installs it.

    If the operator has staged other content at a path, `keep` leaves it, otherwise StagedError is raised. An empty git
    directory is made in `room`. The names of new files in `git_dir` contain `token`. Raises GitError.
    """
    index = Index(git_dir, room, token, {each.path: each for each in changes}, keep=keep)
    try:
        yield index
    finally:
        index.remove()


class Index:
    """Changed copy of the index of one checkout."""

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
        """Install the copy, with up to 40 tries in 1 s. Raises GitError if another process holds the lock longer."""
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
            return  # the source may have no index
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
        """Run git on the copy, in an empty git directory. Raises GitError if it fails."""
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
        # A split index would refer to a file in the empty git directory.
        command = ["git", "-c", "core.splitIndex=false", *arguments]
        done = subprocess.run(command, input=given, env=environment, capture_output=True, check=False)
        if done.returncode != 0:
            text = done.stderr.decode(errors="replace").strip()
            raise GitError(f"the index of the checkout cannot be changed: {text}", kind="index")
        return done.stdout


def read_head(git_dir: Path) -> str:
    """Return the content of HEAD: `ref: REF` or an object id."""
    return (git_dir / "HEAD").read_text(encoding="utf-8", errors="surrogateescape").strip()


def replace_head(git_dir: Path, token: str, old: str, new: str, log: str) -> None:
    """Change HEAD from `old` to `new` and append a line to its reflog. Raises GitError if it was moved or is locked."""
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
    """True if another work tree of the repository has the branch checked out."""
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
