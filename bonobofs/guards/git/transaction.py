"""One operation on a repository, alone with it, from its locks to its effect.

    with Transaction(...) as transaction:       waits for other operations of the service, mends what a dead one left
        index = transaction.lock_index()        as git locks, so that git waits or fails too, and so do we
        value = transaction.lock("HEAD")
        ...                                     everything is looked at and judged
        transaction.apply(change, leave)        stated in the journal, then done: files, index, refs

A change that fails on the way is taken back; one that is killed on the way is carried on by the next operation.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bonobofs.decision import Allowed
from bonobofs.errors import GitError
from bonobofs.guards.beneath import Workspace
from bonobofs.guards.git import busy
from bonobofs.guards.git.index import Index, Stat
from bonobofs.guards.git.journal import Change, Journal, Left, Step, change_of, left_of, unlink
from bonobofs.guards.git.refs import Move, Value, now
from bonobofs.guards.git.repository import Blob, Repository, find
from bonobofs.guards.git.worktree import WorkTree

_LOCK_WAIT: Final = 3.0
"""Seconds to wait for another program's lock. git itself waits for none of the index."""
_FOR_NOW: Final = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)
"""What may be otherwise soon; a journal is kept until then."""


class Transaction:
    """Made for one operation. Not for several threads."""

    def __init__(self, home: Path, workspace: Workspace, session: str, identity: str) -> None:
        """`home` is the state directory, `identity` the `NAME <EMAIL>` of reflogs."""
        self._home: Final = home
        self._state: Final = home / "git"
        self._workspace: Final = workspace
        self._session: Final = session
        self._identity: Final = identity
        self._locks: Final[dict[Path, Path]] = {}
        self._values: Final[dict[str, Value | None]] = {}
        self._token: Final = secrets.token_hex(16)
        self._alone: ExitStack
        self._is_half_done = False
        self._done = Change()
        self.index: Index | None = None
        self.index_time = 0
        """When the index was written, in nanoseconds."""
        self.staged = b""
        """The index as this operation has written it; empty: it has not."""
        self.mended: Final[list[dict[str, Any]]] = []
        """What was carried on of operations that were killed."""

    def __enter__(self) -> Self:
        layout = find(self._workspace.root, self._home)
        with ExitStack() as alone:
            alone.enter_context(busy.alone(self._home, layout.common))
            head = {"git": str(layout.git), "common": str(layout.common), "root": str(layout.root)}
            self._journal = Journal(self._state, self._token, {**head, "session": self._session})
            for left in left_of(self._state, layout):
                self._mend(left)
            self.repository = Repository(layout)
            self.tree = WorkTree(self._workspace, self.repository)
            self._alone = alone.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._is_half_done:
                self._release()
                self._journal.end()
            self._give_back(self._done)
        finally:
            self.tree.__exit__(None, None, None)
            self.repository.close()
            self._alone.close()

    def lock_index(self) -> Index:
        """The index, which nobody else changes from now on."""
        git = self.repository.layout.git
        self._lock(git / "index.lock")
        try:
            descriptor = os.open(git / "index", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            self.index = Index()
            self.tree.follow(self.index)
            return self.index
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            self.index_time = status.st_mtime_ns
            self.index = Index.read(file.read(), status.st_mtime_ns)
            self.tree.follow(self.index)
            return self.index

    def lock(self, name: str) -> Value | None:
        """What a ref holds, which nobody else changes from now on."""
        if name not in self._values:
            refs = self.repository.refs
            for place in (refs.place(name), refs.log_place(name)):
                if os.path.realpath(place.parent) != str(place.parent):
                    raise GitError(
                        f"a symlink is on the way to {name}, which the gate does not follow", kind="unsupported"
                    )
            if refs.read(name) is None:
                other = refs.clash(name)
                if other is not None:
                    raise GitError(f"{name} cannot be made beside {other}", kind="exists")
                refs.make_room(name)
            place = refs.place(name)
            self._lock(place.with_name(place.name + ".lock"))
            self._values[name] = refs.read(name)
        return self._values[name]

    def _lock(self, lock: Path) -> None:
        by = self._temporary(lock)
        self._journal.lock(lock, by)
        os.close(os.open(by, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))

        def taken() -> bool:
            try:
                os.link(by, lock)
            except FileExistsError:
                return False
            return True

        if not busy.waited(taken, _LOCK_WAIT):
            unlink(by)
            message = f"{lock.name} is held by another program; if none is at work here, remove {lock}"
            raise GitError(message, kind="busy", paths=(str(lock),))
        self._locks[lock] = by

    def _temporary(self, lock: Path) -> Path:
        """A name on the same file system, outside all that git looks through."""
        layout = self.repository.layout
        top = layout.git if lock.is_relative_to(layout.git) else layout.common
        return top / f"bonobofs-{self._token}-{len(self._locks)}"

    def _release(self) -> None:
        for lock, by in self._locks.items():
            _unlock(lock, by)
        self._locks.clear()

    def apply(self, change: Change, leave: Allowed, about: dict[str, Any]) -> None:
        """Do it. A file that somebody else has changed meanwhile ends it, with all taken back.

        Everything that it moves or stages is locked. GitError, OSError: nothing was changed.
        """
        self._check(change)
        for move in change.moves:
            self._content(move)
        who = now(self._identity)
        self._journal.plan(change, who, about)
        done: list[Step] = []
        try:
            stats = self._files(change, done, leave)
            self._stage(change, stats)
        except BaseException:
            self._take_back(done, leave)
            raise
        self._is_half_done = True  # what fails from here on is left to be mended
        self._finish(change, who)
        self._is_half_done = False
        self._done = change

    def _check(self, change: Change) -> None:
        for move in change.moves:
            if self._values[move.name] != move.old:
                raise GitError(f"{move.name} was moved by another program", kind="busy")
        assert self.index is not None or not (change.staged or change.files)

    def _files(self, change: Change, done: list[Step], leave: Allowed) -> dict[bytes, Stat]:
        """Bring the files to their new state."""
        stats: dict[bytes, Stat] = {}
        for step in _in_order(change.files):
            if not self._holds(step.path, step.old):
                name = step.path.decode("utf-8", "surrogateescape")
                raise GitError(f"{name} was changed meanwhile", kind="dirty", paths=(name,))
            done.append(step)
            self._step(step, stats, self._token, leave)
        return stats

    def _step(self, step: Step, stats: dict[bytes, Stat], token: str, leave: Allowed | Left) -> None:
        if step.new is None:
            self.tree.remove(step.path, leave)
        else:
            stats[step.path] = self.tree.write(step.path, step.new, stray(token, step.path), leave)

    def _holds(self, path: bytes, blob: Blob | None) -> bool:
        """Whether that is in the working tree; a file that is as it was staged need not be read."""
        entry = None if self.index is None else self.index.entries.get(path)
        if entry is not None and blob == Blob(entry.mode, entry.oid):
            return self.tree.is_unchanged(entry, self.index_time)
        return self.tree.holds(path, blob, entry)

    def _take_back(self, done: list[Step], leave: Allowed) -> None:
        self.tree.forget()
        for step in reversed(done):
            self.tree.remove_stray(step.path, stray(self._token, step.path))
            with suppress(OSError, GitError):
                if not self._holds(step.path, step.old):
                    self._step(Step(step.path, step.new, step.old), {}, self._token, leave)

    def _stage(self, change: Change, stats: dict[bytes, Stat]) -> None:
        """Write the index, and give it its name."""
        if self.index is None or not (change.staged or change.files):
            return
        self.index.update(
            {path: entry and entry._replace(stat=stats.get(path, entry.stat)) for path, entry in change.staged.items()}
        )
        place = self.repository.layout.git / "index"
        by = self._locks[place.with_name("index.lock")]
        self.staged = self.index.serialize()
        with open(by, "wb") as file:
            file.write(self.staged)
        with suppress(FileNotFoundError):
            by.chmod(os.stat(place).st_mode & 0o777)
        place.with_name("index.lock").rename(place)

    def _content(self, move: Move) -> None:
        """Write what a ref is to hold into its lock, and to the disk."""
        place = self.repository.refs.place(move.name)
        by = self._locks[place.with_name(place.name + ".lock")]
        if move.old == move.new:
            return
        if move.new is not None:
            text = f"ref: {move.new.target}\n" if move.new.target is not None else f"{move.new.oid}\n"
            with open(by, "wb") as file:
                file.write(os.fsencode(text))
                file.flush()
                os.fsync(file.fileno())
        elif self.repository.refs.is_packed(move.name):
            packed = self.repository.layout.common / "packed-refs.lock"
            if packed not in self._locks:
                self._lock(packed)

    def _finish(self, change: Change, who: str) -> None:
        """Move the refs. All that could have failed has been done."""
        refs = self.repository.refs
        for move in change.moves:
            place = refs.place(move.name)
            lock = place.with_name(place.name + ".lock")
            if move.log:
                refs.log(move.name, move.log_old, move.log_new, who, move.log)
            if move.old == move.new:
                continue
            if move.new is not None:
                with suppress(FileNotFoundError):
                    lock.rename(place)
                continue
            if refs.is_packed(move.name):
                packed = self.repository.layout.common / "packed-refs.lock"
                refs.unpack(move.name, os.fspath(packed))
                self._lock_again(packed)
            unlink(place)
            _unlock(lock, self._locks[lock])
            refs.remove_log(move.name)
        for name, content in change.logs:
            refs.write_log(name, content)

    def _give_back(self, change: Change) -> None:
        """As root: what was made belongs to whoever owns the repository, who else could not go on with it."""
        layout, refs = self.repository.layout, self.repository.refs
        owner = os.stat(layout.common)
        if os.geteuid() != 0 or owner.st_uid == 0:
            return
        made = {layout.git / "index"}
        for oid in self.repository.written:
            place = layout.common / "objects" / oid.hex()[:2]
            made |= {place, place / oid.hex()[2:]}
        for place in (place for move in change.moves for place in (refs.place(move.name), refs.log_place(move.name))):
            made |= {place, *(above for above in place.parents if above.is_relative_to(layout.common))}
        for place in made:
            with suppress(OSError):
                os.chown(place, owner.st_uid, owner.st_gid, follow_symlinks=False)

    def _lock_again(self, lock: Path) -> None:
        """The lock was renamed to what it locks; a further ref may have to be taken out."""
        by = self._locks.pop(lock)
        unlink(by)

    def _mend(self, left: Left) -> None:
        """Carry on what was planned, or undo what was locked for it."""
        if left.plan is not None:
            # Of a worktree that is no longer there, nothing is left to be carried on.
            try:
                root = Path(left.head["root"])
                workspace = self._workspace if root == self._workspace.root else Workspace(root)
                self.repository = Repository(find(root, self._home))
                with WorkTree(workspace, self.repository) as self.tree:
                    self._carry_on(change_of(left.plan), left.plan["who"], left)
                self.mended.append({"session": left.head["session"], **left.plan["about"]})
            except (OSError, GitError) as error:
                if isinstance(error, OSError) and error.errno in _FOR_NOW:
                    what = "an operation that was cut short cannot be ended now"
                    raise GitError(f"{what}: {error.strerror}", kind="busy") from error
        self._locks.clear()
        self._values.clear()
        self.index = None
        for lock, by in left.locks:
            _unlock(lock, by)
        unlink(left.journal)

    def _carry_on(self, change: Change, who: str, left: Left) -> None:
        self._locks.update({lock: by for lock, by in left.locks if _same(lock, by)})
        token = left.head["token"]
        git = self.repository.layout.git
        if git / "index.lock" in self._locks:
            self.index = self._index_again(git / "index")
            stats: dict[bytes, Stat] = {}
            for step in _in_order(change.files):
                self.tree.remove_stray(step.path, stray(token, step.path))
                # What somebody else has made of the file meanwhile is theirs, and shows as their change.
                if self._holds(step.path, step.old):
                    self._step(step, stats, token, left)
            self._stage(change, stats)
        moves = tuple(move for move in change.moves if self._lock_of(move) in self._locks)
        for move in moves:
            self._content(move)
        self._finish(Change(moves=moves, logs=change.logs), who)

    def _index_again(self, place: Path) -> Index:
        try:
            status = place.lstat()
        except FileNotFoundError:
            return Index()
        return Index.read(place.read_bytes(), status.st_mtime_ns)

    def _lock_of(self, move: Move) -> Path:
        place = self.repository.refs.place(move.name)
        return place.with_name(place.name + ".lock")


def stray(token: str, path: bytes) -> bytes:
    """The name by way of which a file comes to its place."""
    return b".bonobofs-" + sha256(token.encode() + path).hexdigest()[:32].encode()


def _in_order(steps: tuple[Step, ...]) -> list[Step]:
    """Those that go first, and attributes before the files that they speak of."""
    return sorted(steps, key=lambda step: (step.new is not None, not step.path.endswith(b".gitattributes"), step.path))


def _same(lock: Path, by: Path) -> bool:
    try:
        return os.path.samestat(os.lstat(lock), os.lstat(by))
    except OSError:
        return False


def _unlock(lock: Path, by: Path) -> None:
    """Take a lock away that is ours, and what shows that it is."""
    if _same(lock, by):
        unlink(lock)
    unlink(by)
