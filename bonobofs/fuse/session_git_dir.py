"""The session's own `.git` in a mount: its visibility, the object stores of the source, and protected branches.

The repository is in the overlay, so the source's `.git` is hidden from the session's user. Git refuses a work tree that
belongs to another user. Therefore the mount shows the session's user as the owner of its root, with the rights that
this user has in the source.

Protected branches have the source's value at the moment of each lookup. The server copies the value when a program
looks the branch up and the source has changed it. Once a second it looks for new protected branches, so that a listing
shows them.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from bonobofs.audit.temp_cleanup import stray_name
from bonobofs.fuse import abi as p
from bonobofs.fuse.inode_table import Node
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.mount_context import MountContext
from bonobofs.fuse.overlay_ops import inode_number
from bonobofs.policy.decision import Layer, Permit
from bonobofs.system import syscalls

NAME: Final = b".git"
HIDDEN: Final = b"alternates"
"""The list of further stores in an object store. It is hidden, because the session's own list names every store."""
_ACL: Final = "system.posix_acl_access"


HEADS: Final = ".git/refs/heads/"
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_VALUE: Final = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_LONGEST: Final = 1024
_MOST_STEPS: Final = 5
"""Maximum of symbolic refs that are followed, as in git."""

Mark = tuple[int, ...]


class SessionUser(NamedTuple):
    """The session's user."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class SessionGitDir:
    """The session's `.git` and the object stores of the source, as one mount shows them."""

    def __init__(
        self, root: LayerStore, stores: dict[bytes, LayerStore], common: int, user: SessionUser, *, shared: bool
    ) -> None:
        """`stores` are the object stores by their names in `.bonobofs`. `common` is a descriptor of the source's refs
        directory.

        `shared`: users other than the session's may enter the mount.
        """
        self.stores: Final = stores
        self.common: Final = common
        self.shared: Final = shared
        self._root: Final = root
        self.user: Final = user

    def is_seen(self, uid: int) -> bool:
        """Whether this user sees the session's repository. Other users see the source's."""
        return not self.shared or uid == self.user.uid

    def is_borrowed(self, uid: int, st: os.stat_result) -> bool:
        """Whether this user is the owner of the root only because the mount shows it so."""
        return self._root.privileged and uid not in (0, st.st_uid)

    def root_attr(self, attr: bytes, st: os.stat_result) -> bytes:
        """Return `fuse_attr` of the mount's root with the session's user as the owner.

        Returns `attr` unchanged if the root has an ACL, which would give this user the owner's rights.
        """
        if st.st_uid == self.user.uid:
            return attr
        try:
            os.getxattr(self._root.root, _ACL)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise
            return p.with_owner(attr, self.user.uid, self._rights())
        return attr

    def _rights(self) -> int:
        try:
            self._root.act_as(*self.user, 0)
            return sum(
                right
                for right in (os.R_OK, os.W_OK, os.X_OK)
                if os.access(".", right, dir_fd=self._root.root, effective_ids=True)
            )
        finally:
            self._root.act_as_self()


class SourceBranches:
    """The branches of the source, read from its files."""

    def __init__(self, common: int) -> None:
        """`common` is a descriptor of the directory that has the refs; the mount may cover its path."""
        self._common: Final = common
        self._listed: dict[bytes, Mark] = {}
        self._loose: list[str] = []
        self._mark: Mark = ()
        self._pack_entries: Final[dict[bytes, bytes | None]] = {}

    def value(self, branch: str) -> bytes | None:
        """Return the commit id of the branch in hex, or None."""
        name = os.fsencode(f"refs/heads/{branch}")
        for _ in range(_MOST_STEPS):
            content = self._content(name)
            if content is None:
                return self._packed_value(name)
            if not content.startswith(b"ref:"):
                found = _VALUE.match(content)
                return None if found is None else found[0]
            name = content.removeprefix(b"ref:").strip()
        return None

    def loose(self) -> list[str]:
        """Return the branches that have their own files. Changed directories are read again."""
        if not self._listed or any(self._mark_of(path) != mark for path, mark in self._listed.items()):
            self._listed.clear()
            self._loose = list(self._walk(b"refs/heads"))
        return self._loose

    def _walk(self, path: bytes) -> Iterator[str]:
        self._listed[path] = self._mark_of(path)
        try:
            fd = syscalls.open_beneath(self._common, path, _DIRECTORY)
        except OSError:
            return
        try:
            with os.scandir(fd) as entries:
                found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
        finally:
            os.close(fd)
        for name, is_dir in found:
            if is_dir:
                yield from self._walk(path + b"/" + name)
            elif not name.endswith(b".lock"):
                yield os.fsdecode(path + b"/" + name).removeprefix("refs/heads/")

    def _mark_of(self, path: bytes) -> Mark:
        try:
            st = os.stat(path, dir_fd=self._common, follow_symlinks=False)
        except OSError:
            return ()
        return st.st_ino, st.st_mtime_ns, st.st_size, st.st_ctime_ns

    def _content(self, name: bytes) -> bytes | None:
        try:
            fd = syscalls.open_beneath(self._common, name, _READ)
        except OSError:
            return None
        try:
            return os.read(fd, _LONGEST) if stat.S_ISREG(os.fstat(fd).st_mode) else None
        finally:
            os.close(fd)

    def _packed_value(self, name: bytes) -> bytes | None:
        """Return the value in packed-refs.

        The file may have a million lines; it is searched once for each name and change.
        """
        mark = self._mark_of(b"packed-refs")
        if mark != self._mark:
            self._mark = mark
            self._pack_entries.clear()
        if name not in self._pack_entries:
            self._pack_entries[name] = self._find_packed(name) if mark else None
        return self._pack_entries[name]

    def _find_packed(self, name: bytes) -> bytes | None:
        fd = syscalls.open_beneath(self._common, b"packed-refs", _READ)
        try:
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as packed:
                at = packed.find(b" " + name + b"\n")
                found = _VALUE.match(packed, packed.rfind(b"\n", 0, at) + 1) if at >= 0 else None
                return None if found is None else found[0]
        except ValueError:
            return None  # an empty file cannot be mapped
        finally:
            os.close(fd)


class BranchMirrorOps:
    """Keeps protected branches of the session's repository equal to the source's."""

    _branches: SourceBranches | None = None

    def __init__(self, mount: MountContext) -> None:
        self._mount: Final = mount

    def mirror_branches(self, common: int) -> None:
        """Start to mirror the branches of a repository. `common` is a descriptor of the directory that has its refs."""
        self._branches = SourceBranches(common)
        self._mirrored: dict[str, bytes | None] = {}

    def update_mirrored(self, parent: Node, name: bytes) -> bool:
        """Update the name to the source's value if it is a protected branch. Return whether it is one."""
        if self._branches is None or parent.layer is Layer.SOURCE:
            return False
        path = self._mount.join(parent, name)
        if not path.startswith(HEADS):
            return False
        return self._follow_branch(self._branches, path.removeprefix(HEADS))

    def follow_branches(self) -> None:
        """Update every protected branch, including new ones. Called about once a second."""
        if self._branches is not None:
            for branch in {*self._branches.loose(), *self._mirrored}:
                self._follow_branch(self._branches, branch)

    def _follow_branch(self, branches: SourceBranches, branch: str) -> bool:
        repository = self._mount.enforcer.policy.repository
        if repository is None or not repository.protects(branch):
            return False
        value = branches.value(branch)
        if self._mirrored.get(branch) != value:
            self._mirrored.setdefault(branch, None)
            # The session may have a directory with this name, or a branch where this one needs a directory. Then the
            # server tries again about once a second.
            with suppress(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError):
                self._put_branch(os.fsencode(HEADS + branch), value, repository.permit)
                self._mirrored[branch] = value
        return True

    @contextmanager
    def _as_person(self) -> Iterator[None]:
        """Create files as the session's user, who owns the repository."""
        assert self._mount.repository is not None
        self._mount.source.act_as(*self._mount.repository.user, 0)
        try:
            yield
        finally:
            self._mount.source.act_as_self()

    def _put_branch(self, path: bytes, value: bytes | None, permit: Permit) -> None:
        """Replace the file of a branch in the overlay. Programs that have the old one open read it to its end.

        OSError: the session has a directory there, or another file in the place of its directory.
        """
        store, name = self._mount.overlay.store, os.path.basename(path)
        directory = self._branch_directory(os.path.dirname(path), permit)
        try:
            number = inode_number(directory, name)
            if number and stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            node = self._mount.inodes.find(number + store.ino_offset) if number else None
            if node is not None:
                store.pin(node, directory, name)
            if value is not None:
                draft = stray_name().encode()
                with self._as_person():
                    fd = store.create(directory, draft, 0o644, permit)
                try:
                    store.write(fd, memoryview(value + b"\n"), 0, permit)
                    store.rename(directory, draft, directory, name, 0, permit)
                except OSError:
                    store.unlink(directory, draft, permit)
                    raise
                finally:
                    os.close(fd)
            elif number:
                store.unlink(directory, name, permit)
            if node is not None:
                self._mount.inodes.detach(node)
            self._notify(directory, name)
        finally:
            os.close(directory)

    def _notify(self, directory: int, name: bytes) -> None:
        """Make the kernel look up the name again and read the directory again."""
        node = self._mount.inodes.find(os.fstat(directory).st_ino + self._mount.overlay.store.ino_offset)
        if node is not None:
            self._mount.notifications.entry(node.id, name)
            self._mount.notifications.inode(node.id, -1, 0)

    def _branch_directory(self, path: bytes, permit: Permit) -> int:
        """Return a descriptor of a directory of the overlay; it is created if it does not exist.

        OSError: another file is in its place.
        """
        store = self._mount.overlay.store
        with suppress(FileNotFoundError):
            return syscalls.open_beneath(store.root, path, _DIRECTORY)
        above = self._branch_directory(os.path.dirname(path), permit)
        try:
            with self._as_person():
                store.mkdir(above, os.path.basename(path), 0o755, permit)
            self._notify(above, os.path.basename(path))
            return syscalls.open_beneath(above, os.path.basename(path), _DIRECTORY)
        finally:
            os.close(above)
