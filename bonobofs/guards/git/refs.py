"""Branches, tags and HEAD: what they point to, and what moving them by compare-and-swap needs.

A ref is moved as git moves it: NAME.lock is made, which fails where somebody else has it; what the ref holds is
compared with what was expected; the new value comes into its place by one rename. The lock is a link to a file that
the journal states, so that after a crash it is known whose it was.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import GitError

ZERO: Final = "0" * 40
HEADS: Final = "refs/heads/"
TAGS: Final = "refs/tags/"

_OID: Final = re.compile(r"[0-9a-f]{40}")
_BAD: Final = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|^\.|\.lock(/|$)|\.$|/$|^/|^-|^@$")
_HOPS: Final = 5
"""How many symbolic refs are followed, as git does."""
_LOGGED: Final = ("refs/heads/", "refs/remotes/", "refs/notes/")


class Value(NamedTuple):
    """What a ref holds: the id of an object, or the name of another ref."""

    oid: str | None
    target: str | None = None


class Move(NamedTuple):
    """A ref that is to change from one value to another; None is a ref that is not there."""

    name: str
    old: Value | None
    new: Value | None
    log: str = ""
    """What the reflog says; "" leaves it as it is."""
    log_old: str = ZERO
    log_new: str = ZERO


def is_name(name: str) -> bool:
    """Whether git would have this as the name of a ref."""
    return bool(name) and name.isprintable() and not _BAD.search(name)


class Refs:
    """The refs of one repository, as one of its worktrees has them."""

    def __init__(self, git: Path, common: Path, *, logs: bool) -> None:
        """`git` is the worktree's own directory, `common` the one that all share; `logs`: keep reflogs of branches."""
        self._git: Final = git
        self._common: Final = common
        self._logs: Final = logs

    def place(self, name: str) -> Path:
        """The file of a ref that is not packed."""
        own = not name.startswith("refs/") or name.startswith(("refs/bisect/", "refs/worktree/", "refs/rewritten/"))
        return (self._git if own else self._common) / name

    def log_place(self, name: str) -> Path:
        own = not name.startswith("refs/")
        return (self._git if own else self._common) / "logs" / name

    def read(self, name: str) -> Value | None:
        """What the ref holds; None: it is not there. GitError: it holds something else, or is a symlink."""
        place = self.place(name)
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise GitError(
                    f"the ref {name} is a symlink, which the gate does not follow", kind="unsupported"
                ) from None
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
                return self._packed(name)
            raise
        try:
            text = os.read(descriptor, 4096).decode("utf-8", "surrogateescape").strip()
        except IsADirectoryError:
            return self._packed(name)
        finally:
            os.close(descriptor)
        if text.startswith("ref:"):
            return Value(None, text[4:].strip())
        if not _OID.fullmatch(text):
            raise GitError(f"the ref {name} is damaged", kind="unsupported")
        return Value(text)

    def resolve(self, name: str) -> str | None:
        """The object to which the ref leads, by way of others; None where the way ends before one."""
        for _ in range(_HOPS):
            value = self.read(name)
            if value is None or value.target is None:
                return None if value is None else value.oid
            name = value.target
        raise GitError(f"the ref {name} leads in a circle", kind="unsupported")

    def head(self) -> tuple[str, str | None]:
        """The branch that HEAD is on, "" where it is detached, and its commit, None where there is none yet."""
        value = self.read("HEAD")
        if value is None:
            raise GitError("the repository has no HEAD", kind="no-repository")
        if value.target is None:
            return "", value.oid
        if not value.target.startswith(HEADS):
            raise GitError(f"HEAD is on {value.target}, which is no branch", kind="unsupported")
        return value.target.removeprefix(HEADS), self.resolve(value.target)

    def all(self, prefix: str) -> Iterator[str]:
        """The names of refs below a prefix that ends in a slash, packed or not."""
        found = {name for name in self._packed_refs() if name.startswith(prefix)}
        top = self.place(prefix)
        for directory, _, files in os.walk(top):
            below = os.path.relpath(directory, top)
            for file in files:
                if not file.endswith(".lock"):
                    found.add(prefix + (file if below == "." else f"{below}/{file}"))
        yield from sorted(found)

    def _packed(self, name: str) -> Value | None:
        oid = self._packed_refs().get(name)
        return None if oid is None else Value(oid)

    def _packed_refs(self) -> dict[str, str]:
        try:
            descriptor = os.open(self._common / "packed-refs", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return {}
        with os.fdopen(descriptor, "rb") as file:
            # Some letters of names and messages end a line for `splitlines`.
            lines = file.read().decode("utf-8", "surrogateescape").split("\n")
        pairs = (line.split(" ", 1) for line in lines if line[:1] not in ("#", "^", ""))
        try:
            return {name: oid for oid, name in pairs}
        except ValueError:
            raise GitError("packed-refs is damaged; `git fsck` says more", kind="unsupported") from None

    def clash(self, name: str) -> str | None:
        """A ref that stands in the way of a new one, as a file where a directory is needed or the other way round."""
        above = {name[:at] for at, letter in enumerate(name) if letter == "/"}
        return next(
            (other for other in self.all("refs/") if other in above or other.startswith(f"{name}/")),
            None,
        )

    def make_room(self, name: str) -> None:
        """Make the directories above a ref, and take away empty ones that have its name."""
        place = self.place(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and not place.is_symlink():
            for directory, _, _ in os.walk(place, topdown=False):
                with suppress(OSError):
                    os.rmdir(directory)

    def unpack(self, name: str, link: str) -> None:
        """Take a ref out of packed-refs, of which the caller has the lock; `link` is a file to fill and to rename."""
        place = self._common / "packed-refs"
        kept: list[bytes] = []
        dropped = False
        for line in place.read_bytes().splitlines(keepends=True):
            if line[:1] not in (b"#", b"^"):
                dropped = line.rstrip(b"\n").split(b" ", 1)[-1] == os.fsencode(name)
            if not dropped:
                kept.append(line)
        Path(link).write_bytes(b"".join(kept))
        os.rename(link, place)

    def is_packed(self, name: str) -> bool:
        return name in self._packed_refs()

    def remove_log(self, name: str) -> None:
        """Take the reflog away, and the directories that are left empty by that and by the ref."""
        place = self.log_place(name)
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            place.unlink()
        for top, file in ((self._common / "logs/refs", place), (self._common / "refs", self.place(name))):
            directory = file.parent
            # git expects refs/heads and the like to be there.
            while directory.parent != top and top in directory.parents:
                try:
                    directory.rmdir()
                except OSError:
                    break
                directory = directory.parent

    def read_log(self, name: str) -> list[str]:
        """The lines of a reflog, the oldest first, each with its newline."""
        try:
            with os.fdopen(_no_follow(self.log_place(name)), "rb") as file:
                lines = file.read().decode("utf-8", "surrogateescape").split("\n")
                return [f"{line}\n" for line in lines if line]
        except FileNotFoundError:
            return []

    def write_log(self, name: str, content: str) -> None:
        """Put another content in place of a reflog, whose ref the caller has locked; "" takes it away."""
        place = self.log_place(name)
        if not content:
            with suppress(FileNotFoundError):
                place.unlink()
            return
        new = place.with_name(place.name + ".lock")
        new.write_bytes(content.encode("utf-8", "surrogateescape"))
        new.rename(place)

    def log(self, name: str, old: str, new: str, who: str, message: str) -> None:
        """Add a line to a reflog, unless it is the last one there already; `who` is `NAME <EMAIL> TIME ZONE`."""
        place = self.log_place(name)
        kept = name == "HEAD" or name.startswith(_LOGGED) or name == "refs/stash"
        if not place.exists() and not (self._logs and kept):
            return
        line = f"{old} {new} {who}\t{' '.join(message.split())}\n".encode("utf-8", "surrogateescape")
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size < len(line) or os.pread(descriptor, len(line), size - len(line)) != line:
                os.write(descriptor, line)
        finally:
            os.close(descriptor)


def _no_follow(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def now(identity: str) -> str:
    """`NAME <EMAIL> SECONDS ZONE` for commits and reflogs, at this moment."""
    moment = time.time()
    offset = time.localtime(moment).tm_gmtoff // 60
    sign = "-" if offset < 0 else "+"
    return f"{identity} {int(moment)} {sign}{abs(offset) // 60:02}{abs(offset) % 60:02}"
