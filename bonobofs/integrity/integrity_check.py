"""Find, record and revert direct edits of protected directories, such as `okrs/`.

    check = IntegrityCheck(root)                  # captures the state before
    ...                                           # the agent works
    check.capture_after()
    if check.has_changes():
        check.revert(kept=artifacts / "reverted")
        check.write_violation(artifacts, item_id="ITEM-1")

The check compares content, so it also finds changes that did not go through a mount. It needs no git repository.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, Self

from bonobofs.errors import BonobofsError, UsageError, error_text
from bonobofs.integrity.protected_tree import (
    KEPT,
    LARGEST,
    MOUNTED,
    IntegrityError,
    Tree,
    TreeEntry,
    as_plain,
    blocks,
    capture,
    from_plain,
    opened_parent,
)
from bonobofs.state.home import home
from bonobofs.system.paths import (
    Name,
    is_within,
    leads_to,
    regular_file,
    remove_file,
    remove_tree,
    rename_to_free,
    replace_file,
)
from bonobofs.undo.image_expiry import places_of
from bonobofs.undo.images import Images

OKRS: Final = "okrs"
VIOLATION: Final = "violation.json"
MOST: Final = 10_000
"""Maximum number of files that a violation lists."""
_ROUNDS: Final = 3
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITTEN: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MESSAGE: Final = "Agent directly modified {} directory, which is prohibited by AGENTS.md"

Restore = Callable[[TreeEntry], bytes | None]
"""Returns the content of a file before the change; None if it has none."""


class FileChange(NamedTuple):
    """A path that differs. None: it was or is absent."""

    path: str
    before: TreeEntry | None
    after: TreeEntry | None

    @property
    def what(self) -> str:
        """`added`, `removed` or `changed`."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    def document(self) -> dict[str, Any]:
        """Return plain data: the path, what changed, and the SHA-256 of the content before and after, or null."""
        plain: dict[str, Any] = {"path": self.path, "change": self.what}
        for key, entry in (("before", self.before), ("after", self.after)):
            plain[key] = (entry.hash or None) if entry is not None else None
        if self.before is not None and self.after is not None:
            if self.before.kind != self.after.kind:
                plain["kinds"] = [self.before.kind, self.after.kind]
            if self.before.mode != self.after.mode:
                plain["modes"] = [f"{self.before.mode:04o}", f"{self.after.mode:04o}"]
        if self.after is not None and self.after.problem:
            plain["problem"] = self.after.problem
        return plain


class IntegrityCheck:
    """The protected directories of one root, before and after an agent worked there."""

    def __init__(
        self,
        root: str | Path,
        directories: Sequence[str] = (OKRS,),
        *,
        snapshot: tuple[Path, Tree] | None = None,
        kept: int = KEPT,
    ) -> None:
        """Capture the state before. `directories` are paths below `root`; a directory may be absent.

        The capture keeps the contents of files up to `kept` bytes together.

        `snapshot` is instead a state before, with the directory of its contents (`load`).
        IntegrityError: a protected path cannot be read. UsageError: a directory is not below the root.
        """
        self.root: Final = os.path.realpath(root)
        self.directories: Final = tuple(dict.fromkeys(map(_checked, directories)))
        self._kept: Final = kept
        self.before: Tree = {}
        self.after: Tree | None = None
        self.contents: dict[str, bytes] = {}
        """Contents before by hash, as far as the capture kept them."""
        self.reverted = False
        self.revert_error = ""
        """Why the last revert is incomplete; "" if it is complete or there was none."""
        self.changes: tuple[FileChange, ...] = ()
        """The differences that `capture_after` found, by path. A revert does not change them."""
        self._stored: Path | None = None
        self._images: Images | None = None
        if snapshot is None:
            self.capture_before()
        else:
            self._stored, self.before = snapshot

    def capture_before(self) -> None:
        """Capture the state before again. IntegrityError: a protected path cannot be read."""
        contents: dict[str, bytes] = {}
        before = capture(self.root, self.directories, contents, kept=self._kept)
        for path, entry in before.items():
            if entry.problem:
                named = os.path.join(self.root, path)
                raise IntegrityError(f"{named} cannot be protected: {entry.problem}; remove it, or make it readable")
        self.before, self.contents, self.after, self.changes = before, contents, None, ()

    def capture_after(self) -> None:
        """Capture the state after. IntegrityError: the root cannot be read."""
        self.after = capture(self.root, self.directories)
        self.changes = tuple(_differences(self.before, self.after))

    def has_changes(self) -> bool:
        """True if a protected path was added, removed or changed. Captures the state after, if that was not done."""
        if self.after is None:
            self.capture_after()
        return bool(self.changes)

    def revert(self, kept: Path | None = None) -> bool:
        """Restore the state before; True if every path is as it was. Else `revert_error` says why.

        `kept` is a new directory that gets the files that are removed or replaced. If it exists, another one beside it
        gets them. If it is in a protected directory, nothing is restored. Contents come from the capture, else from the
        pre-images that mounts keep for `undo`, else from the objects of the git repository.
        """
        self.has_changes()
        problems: list[str] = []
        try:
            if kept is not None:
                self.check_artifacts(kept)
            for _ in range(_ROUNDS):
                left = list(_differences(self.before, capture(self.root, self.directories)))
                if not left:
                    break
                with _TreeReverter(self.root, self._content, kept) as reverter:
                    problems = list(reverter.revert(left))
                if reverter.has_rival:
                    break
            left = list(_differences(self.before, capture(self.root, self.directories)))
        except (OSError, BonobofsError) as error:
            problems, left = [error_text(error)], list(self.changes)
        self.reverted = not left
        if left:
            named = problems or [f"{change.path} is {change.what} again" for change in left]
            more = f" (and {len(named) - 1} more)" if len(named) > 1 else ""
            self.revert_error = f"{named[0]}{more}"
        else:
            self.revert_error = ""
        return self.reverted

    def violation(self, *, item_id: str = "", run_id: str = "") -> dict[str, Any]:
        """Return the record of the changes as plain data. `run_id` is by default the present time in UTC."""
        paths = [change.path for change in self.changes]
        changed = [each for each in self.directories if any(is_within(p, each) or is_within(each, p) for p in paths)]
        named = changed or list(self.directories)
        details: dict[str, Any] = {
            "message": _MESSAGE.format(", ".join(f"{each}/" for each in named)),
            "changed_files": paths[:MOST],
            "reverted": self.reverted,
            "revert_error": self.revert_error,
            "item_id": item_id,
            "run_id": run_id or new_run_id(),
            "files": [change.document() for change in self.changes[:MOST]],
        }
        if len(self.changes) > MOST:
            details["more"] = len(self.changes) - MOST
        kind = "okrs_direct_edit" if named == [OKRS] else "protected_direct_edit"
        return {"violation_type": kind, "details": details}

    def write_violation(
        self,
        artifacts: str | Path,
        violation: Mapping[str, Any] | None = None,
        *,
        item_id: str = "",
        run_id: str = "",
    ) -> Path:
        """Write `violation.json` into the directory `artifacts`, which is created; return its path.

        `violation` is by default that of this check. UsageError: `artifacts` is in a protected directory.
        IntegrityError: the file cannot be written.
        """
        self.check_artifacts(artifacts)
        if violation is None:
            violation = self.violation(item_id=item_id, run_id=run_id)
        return write_violation(artifacts, violation)

    def check_artifacts(self, artifacts: str | Path) -> None:
        """UsageError: a directory for artifacts is in a protected directory, whose revert would remove it."""
        for directory in self.directories:
            protected = os.path.join(self.root, directory)
            if any(is_within(named, protected) for named in (os.path.abspath(artifacts), os.path.realpath(artifacts))):
                raise UsageError(
                    f"the directory for artifacts, {artifacts}, is in the protected directory {protected}; "
                    "choose a directory outside of it"
                )

    def save(self, directory: Path) -> None:
        """Write the state before into a new directory. OSError."""
        (directory / "contents").mkdir(mode=0o700, parents=True)
        for name, content in self.contents.items():
            (directory / "contents" / name).write_bytes(content)
        plain = {"root": self.root, "directories": self.directories, "before": as_plain(self.before)}
        _write_whole(directory / "snapshot.json", json.dumps({**plain, "sha256": _digest(plain)}).encode())

    @classmethod
    def load(cls, directory: Path) -> IntegrityCheck:
        """Return the check that `save` wrote. FileNotFoundError: there is none. IntegrityError: it is damaged."""
        try:
            with open(directory / "snapshot.json", "rb", opener=regular_file) as file:
                plain = json.loads(file.read())
            if plain.pop("sha256", None) != _digest(plain):
                raise ValueError("its content was changed, or an earlier version wrote it")
            before = from_plain(plain["before"])
            return cls(plain["root"], plain["directories"], snapshot=(directory / "contents", before))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, UsageError) as error:
            problem = (
                f"cannot be read: {error_text(error)}"
                if isinstance(error, OSError)
                else "is damaged, or was written by an earlier version"
            )
            raise IntegrityError(
                f"{directory}/snapshot.json {problem}; remove the directory {directory}, or select another snapshot "
                "with --snapshot"
            ) from error

    def _content(self, entry: TreeEntry) -> bytes | None:
        """Return the content of an entry before, by its hash; None if it is nowhere."""
        for source in (self._from_capture, self._from_snapshot, self._from_images, self._from_git):
            content = source(entry)
            if content is not None and sha256(content).hexdigest() == entry.hash:
                return content
        return None

    def _from_capture(self, entry: TreeEntry) -> bytes | None:
        return self.contents.get(entry.hash)

    def _from_snapshot(self, entry: TreeEntry) -> bytes | None:
        if self._stored is not None:
            with suppress(OSError):
                return (self._stored / entry.hash).read_bytes()
        return None

    def _from_images(self, entry: TreeEntry) -> bytes | None:
        """Return a content that the store of pre-images of the state directory has."""
        with suppress(BonobofsError, OSError):
            if self._images is None:
                self._images = Images(*places_of(home()))
            return self._images.find(entry.hash)
        return None

    def _from_git(self, entry: TreeEntry) -> bytes | None:
        """Return the blob of a file. Its id depends on its content alone, so a changed index does not matter."""
        if not entry.blob:
            return None
        from bonobofs.git.checkout import find_repository  # noqa: PLC0415 - loads libgit2
        from bonobofs.git.repository import GitRepository  # noqa: PLC0415

        with suppress(BonobofsError, OSError):
            return GitRepository(find_repository(Path(self.root)).common).bytes_of(entry.blob)
        return None


def new_run_id() -> str:
    """Return the present time in UTC, such as 20260117T223000Z."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


def write_violation(artifacts: str | Path, violation: Mapping[str, Any]) -> Path:
    """Write `violation.json` into the directory `artifacts`, which is created; return its path. IntegrityError."""
    path = Path(artifacts) / VIOLATION
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, json.dumps(violation, indent=2).encode() + b"\n")
    except OSError as error:
        named = os.path.realpath(artifacts)
        raise IntegrityError(
            f"{VIOLATION} cannot be written in {named}: {error_text(error)}; choose a directory for artifacts that is "
            "writable"
        ) from error
    return path


def _write_whole(path: Path, data: bytes) -> None:
    """Create or replace a file, by a rename. A symlink at the path is replaced, not followed. OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(temporary, _WRITTEN, 0o644)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _digest(plain: dict[str, Any]) -> str:
    """Return the SHA-256 of a snapshot without its `sha256`, in hex."""
    return sha256(json.dumps(plain).encode()).hexdigest()


def _checked(directory: str) -> str:
    """Return a directory without its final slash. UsageError: it is not below the root."""
    parts = directory.rstrip("/").split("/")
    if directory.startswith("/") or "\0" in directory or not set(parts).isdisjoint(("", ".", "..")):
        raise UsageError(f"{directory!a} is not a directory below the root; write it relative, such as okrs")
    return "/".join(parts)


def _differences(before: Tree, after: Tree) -> Iterator[FileChange]:
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old is None or not old.equals(new):
            yield FileChange(path, old, new)


class _TreeReverter:
    """Takes back changes below one root, beneath descriptors, without following symlinks."""

    def __init__(self, root: str, content: Restore, kept: Path | None) -> None:
        self._top: Final = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._content: Final = content
        self._kept: Final = kept
        self._new_kept = -1
        """Descriptor of the new directory for the files that are removed or replaced; -1: there is none."""
        self.has_rival = False
        """Whether another program replaced or wrote a file meanwhile."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._top)
        if self._new_kept >= 0:
            os.close(self._new_kept)

    def revert(self, changes: Sequence[FileChange]) -> Iterator[str]:
        """Take back each change that is possible now; yield a sentence for each that fails."""
        for change in reversed(changes):  # the content of a directory before the directory
            if change.after is not None and (change.before is None or change.before.kind != change.after.kind):
                yield from self._attempt(self._remove, change)
        for change in changes:
            if change.before is not None:
                yield from self._attempt(self._restore, change)

    def _attempt(self, act: Callable[[FileChange, int, str], None], change: FileChange) -> Iterator[str]:
        try:
            with opened_parent(self._top, change.path) as (parent, name):
                act(change, parent, name)
        except (OSError, BonobofsError) as error:
            self.has_rival |= isinstance(error, OSError) and error.errno == errno.ESTALE
            yield f"{change.path}: {error_text(error)}"

    def _remove(self, change: FileChange, parent: int, name: str) -> None:
        after = change.after
        assert after is not None
        with suppress(FileNotFoundError):
            if after.problem == MOUNTED:
                raise IntegrityError(f"{MOUNTED}; unmount it")
            if after.kind != "directory":
                self._discard(change.path, (parent, os.fsencode(name)), None)
            elif after.problem:  # it cannot be listed, or is too deep
                remove_tree(parent, os.fsencode(name))
            else:
                os.rmdir(name, dir_fd=parent)

    def _restore(self, change: FileChange, parent: int, name: str) -> None:
        before, after = change.before, change.after
        assert before is not None
        if before.kind == "directory":
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent)
                _give(parent, name, before.owner)
            self._set_mode(parent, name, before)
        elif after is not None and after.hash == before.hash and after.kind == before.kind == "file":
            self._set_mode(parent, name, before)
        elif before.kind in ("file", "symlink"):
            content = self._content(before)
            if content is None:
                raise IntegrityError(
                    "its content before is neither in the snapshot nor in the git repository; restore it from a backup"
                )
            self._put(change, parent, name, content)
        else:
            raise IntegrityError(f"a {before.kind} cannot be restored; make it again")

    def _put(self, change: FileChange, parent: int, name: str, content: bytes) -> None:
        """Create a file under a temporary name, and rename it. Discard the file that has the name."""
        before, after, temporary, made = change.before, change.after, _temporary(), None
        assert before is not None
        new, at = (parent, os.fsencode(temporary)), (parent, os.fsencode(name))
        try:
            if before.kind == "symlink":
                os.symlink(os.fsdecode(content), temporary, dir_fd=parent)
            else:
                fd = os.open(temporary, _WRITTEN, 0o600, dir_fd=parent)
                with os.fdopen(fd, "wb") as file:
                    file.write(content)
                    file.flush()
                    with suppress(OSError):  # only root may give a file away
                        os.fchown(fd, *before.owner)
                    os.fchmod(fd, before.mode)
                    os.utime(fd, ns=(before.modified, before.modified))
                    os.fsync(fd)
            made = os.stat(temporary, dir_fd=parent, follow_symlinks=False)
            if after is not None and after.kind == before.kind:
                self._discard(change.path, at, new)
            else:
                rename_to_free(new, at)
        except BaseException:
            # After an exchange, a file of another program may have the temporary name.
            if made is None or leads_to(new, made):
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)
            raise

    def _discard(self, path: str, at: Name, new: Name | None) -> None:
        """Copy a file, and remove it or replace it by the file `new`.

        OSError: ESTALE, another program has replaced or written the file since the copy. The file keeps its name.
        """
        fd = os.open(at[1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at[0])
        try:
            st = os.fstat(fd)
            self._keep(path, f"/proc/self/fd/{fd}", st)
            if new is None:
                remove_file(at, (at[0], os.fsencode(_temporary())), partial(_check_version, st))
            else:
                replace_file(new, at, partial(_check_version, st))
        finally:
            os.close(fd)

    def _set_mode(self, parent: int, name: str, before: TreeEntry) -> None:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{fd}", before.mode)
        finally:
            os.close(fd)

    def _keep(self, path: str, file: str, st: os.stat_result) -> None:
        """Copy a file that is about to be removed or replaced, unless it cannot be read or is too large."""
        is_small = stat.S_ISREG(st.st_mode) and st.st_size <= LARGEST
        if self._kept is None or not is_small or not os.access(file, os.R_OK):
            return
        if self._new_kept < 0:
            self._new_kept = os.open(_new_directory(self._kept), _DIRECTORY)
        for above in reversed(PurePosixPath(path).parents[:-1]):
            with opened_parent(self._new_kept, str(above)) as (directory, new), suppress(FileExistsError):
                os.mkdir(new, dir_fd=directory)
        with (
            open(file, "rb") as source,
            opened_parent(self._new_kept, path) as (directory, new),
            os.fdopen(os.open(new, _WRITTEN, 0o600, dir_fd=directory), "wb") as copy,
        ):
            copy.writelines(blocks(source.fileno(), st.st_size))


def _give(parent: int, name: str, owner: tuple[int, int]) -> None:
    """Give a new directory its former owner, as far as this process may. Only root may give a file away."""
    fd = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        if os.fstat(fd).st_uid == os.geteuid():  # no other program has put its own directory there
            with suppress(PermissionError):
                os.fchown(fd, *owner)
    finally:
        os.close(fd)


def _temporary() -> str:
    return f".integrity-{secrets.token_hex(8)}"


def _check_version(st: os.stat_result, at: Name) -> None:
    """ESTALE: a file was replaced or written since it had the state `st`. A rename changes nothing that is compared."""
    now = os.stat(at[1], dir_fd=at[0], follow_symlinks=False)
    if any(getattr(now, field) != getattr(st, field) for field in ("st_mode", "st_ino", "st_size", "st_mtime_ns")):
        raise OSError(errno.ESTALE, "another program changed the file during the revert; revert again")


def _new_directory(path: Path) -> Path:
    """Create a directory, with a further name if the path exists: the agent may have put symlinks there. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        return path
    path = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    path.mkdir(mode=0o700)
    return path


@contextmanager
def saved_until_the_end(check: IntegrityCheck, directory: Path) -> Iterator[None]:
    """Save a check for a `with` block. If the process is killed in the block, `load` finds it there."""
    check.save(directory)
    yield
    shutil.rmtree(directory)
