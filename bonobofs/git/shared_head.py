"""HEAD and index of the source's checkout, which follow the session. The session's index is never copied.

New content is written to a temporary file. A hard link of that file is the lock, and a rename of the lock replaces
index or HEAD. A stale lock is ours if it is the same inode as the temporary file.
"""

from __future__ import annotations

import os
import select
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from bonobofs.errors import GitError
from bonobofs.git.journal import Journal, Leftover
from bonobofs.git.repository import Entry, GitRepository, TreeDifference
from bonobofs.git.source_refs import BRANCHES, ENVIRONMENT, read_head, run_git

_MOST_NAMED: Final = 200
"""Up to this number of paths, git lists only these, otherwise the whole index."""
_TRIES: Final = 40
_BETWEEN: Final = 25
"""Milliseconds between retries while another process holds the lock."""
_NO_OBJECT: Final = "0" * 40


class IndexConflictError(GitError):
    """The operator has staged other content at a path that would change."""


class Replacement:
    """New content of HEAD or the index: a temporary file, the lock, and the rename onto the old file.

    A context manager: its entry makes the temporary file, its exit removes it and the lock.
    """

    def __init__(self, git_dir: Path, name: str, token: str) -> None:
        self.copy: Final = git_dir / f"bonobofs-{token}.{name}"
        self._path: Final = git_dir / name
        self._lock: Final = git_dir / f"{name}.lock"
        self.is_locked = False

    def __enter__(self) -> Self:
        try:
            self._prepare()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _prepare(self) -> None:
        raise NotImplementedError

    def lock(self) -> None:
        """Take git's lock, with up to 40 tries in 1 s. Raises GitError if another process holds it longer."""
        for _ in range(_TRIES):
            try:
                os.link(self.copy, self._lock)
            except FileExistsError:
                select.select([], [], [], _BETWEEN / 1000)
            else:
                self.is_locked = True
                return
        raise GitError(f"the checkout is locked; remove {self._lock} if no git runs", kind="busy")

    def unlock(self) -> None:
        if self.is_locked:
            self._lock.unlink(missing_ok=True)
            self.is_locked = False

    def install(self) -> None:
        """Replace the old file, which is locked, and end the lock. The file belongs to the owner of the repository."""
        if self.is_locked:
            if os.geteuid() == 0:
                owner = self._path.parent.stat()
                os.chown(self._lock, owner.st_uid, owner.st_gid)
            os.rename(self._lock, self._path)
            self.is_locked = False

    def _remove(self) -> None:
        self.unlock()
        self.copy.unlink(missing_ok=True)


class IndexReplacement(Replacement):
    """Copy of the index of one checkout with changes."""

    def __init__(
        self, git_dir: Path, temp_dir: Path, token: str, changes: Iterable[TreeDifference], *, keep: bool
    ) -> None:
        """If the operator has staged other content at a path, `keep` leaves it; else IndexConflictError.

        Makes an empty git directory in `temp_dir`. New files in `git_dir` have `token` in their names. Raises GitError.
        """
        super().__init__(git_dir, "index", token)
        self._temp_dir: Final = temp_dir / "index"
        self._changes: Final = {each.path: each for each in changes}
        self._keep: Final = keep
        self._seen: tuple[int, ...] | None = None
        self._is_changed = False

    def lock(self) -> None:
        """As `Replacement.lock`. If the index was changed since it was copied, the copy is made again."""
        while self._is_changed:
            super().lock()
            if _mark(self._path) == self._seen:
                return
            self.unlock()
            self._prepare()

    def _remove(self) -> None:
        super()._remove()
        shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _prepare(self) -> None:
        if not self._changes:
            return  # the source may have no index
        self._seen = _mark(self._path)
        self.copy.unlink(missing_ok=True)
        if self._seen is not None:
            shutil.copy(self._path, self.copy)
        lines = b"".join(self._lines())
        if lines:
            self._git("update-index", "-z", "--index-info", data=lines)
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
                    raise IndexConflictError(f"{os.fsdecode(path)} is staged with other content", kind="staged")
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

    def _git(self, *arguments: str | bytes, data: bytes = b"") -> bytes:
        """Run git on the copy, in an empty git directory. Raises GitError if it fails."""
        if not self._temp_dir.exists():
            for name in ("objects", "refs"):
                (self._temp_dir / name).mkdir(parents=True)
            (self._temp_dir / "HEAD").write_text("ref: refs/heads/none\n", encoding="ascii")
            for shared in self._path.parent.glob("sharedindex.*"):
                (self._temp_dir / shared.name).symlink_to(os.path.abspath(shared))
        environment = {
            **ENVIRONMENT,
            "GIT_DIR": str(self._temp_dir),
            "GIT_INDEX_FILE": os.path.abspath(self.copy),
            "GIT_LITERAL_PATHSPECS": "1",
        }
        # A split index would refer to a file in the empty git directory.
        return run_git("-c", "core.splitIndex=false", *arguments, data=data, environment=environment, kind="index")


class HeadReplacement(Replacement):
    """New HEAD of one checkout."""

    def __init__(
        self, git_dir: Path, token: str, ends: tuple[str, str], commits: tuple[str, str], committer: tuple[str, str]
    ) -> None:
        """`ends` are the old and the new content of HEAD, `commits` their commits ("" for none).

        `committer` is name and e-mail address for the reflog.
        """
        super().__init__(git_dir, "HEAD", token)
        self._old, self._new = ends
        old, new = (commit or _NO_OBJECT for commit in commits)
        names = " to ".join(end.removeprefix(f"ref: {BRANCHES}") for end in ends)
        log = f"{int(time.time())} +0000\tcheckout: moving from {names}\n"
        self._log: Final = f"{old} {new} {committer[0]} <{committer[1]}> {log}"

    def _prepare(self) -> None:
        with self.copy.open("x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{self._new}\n")
            file.flush()
            os.fdatasync(file.fileno())

    def lock(self) -> None:
        """As `Replacement.lock`. Raises GitError also if another process moved HEAD."""
        super().lock()
        if read_head(self._path.parent) != self._old:
            self.unlock()
            raise GitError("HEAD of the checkout was moved by another process", kind="moved")

    def install(self) -> None:
        """As `Replacement.install`. Then append to the reflog, if there is one; ignores errors of that."""
        super().install()
        with suppress(OSError), (self._path.parent / "logs/HEAD").open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(self._log.encode("utf-8", "surrogateescape"))


def finish_moves(leftovers: list[Leftover], committer: tuple[str, str]) -> list[Leftover]:
    """Move the other refs of a killed publication that has moved some. Return its updates. Raises GitError.

    A ref that another process has moved stays. `committer`: name and e-mail address for the reflogs.
    """
    if not any(left.is_made for left in leftovers):
        return leftovers
    repository = GitRepository(leftovers[0].git_dir)
    rest = [left for left in leftovers if not left.is_made and repository.target(left.ref) == left.old]
    if rest:
        repository.move_refs({left[:3]: "publish: recovered" for left in rest}, committer)
    return [left._replace(is_made=left.is_made or left in rest) for left in leftovers]


def finish_index(leftovers: Sequence[Leftover], temp_dir: Path, journal: Journal) -> None:
    """Update the index of each checkout whose branch a killed publication has moved. Raises GitError, OSError."""
    updates = [left[:3] for left in leftovers]
    for left in leftovers:
        if left.is_made and read_head(left.git_dir) == f"ref: {left.ref}":
            repository = GitRepository(left.git_dir)
            changes = repository.differences(left.old, left.new)
            with (
                journal.writing(left.git_dir, repository.common_dir, updates, is_recovery=True) as token,
                IndexReplacement(left.git_dir, temp_dir, token, changes, keep=True) as index,
            ):
                index.lock()
                index.install()


def is_checked_out_elsewhere(git_dir: Path, common: Path, ref: str) -> bool:
    """True if another work tree of the repository has the branch checked out."""
    found = [*(common / "worktrees").glob("*"), *([common] if (common / "index").exists() else [])]
    own = os.path.realpath(git_dir)
    for each in found:
        with suppress(OSError):
            if os.path.realpath(each) != own and read_head(each) == f"ref: {ref}":
                return True
    return False


def _mark(path: Path) -> tuple[int, ...] | None:
    try:
        st = path.stat()
    except FileNotFoundError:
        return None
    return st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns
