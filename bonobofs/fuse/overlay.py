"""The overlay: an upper layer for scratch files, merged with the source, which scratch changes never reach.

The upper layer is a directory tree of the session. Each file in it has the same path as in the mount. A directory of
the source gets an upper directory when the first scratch file is created in it. A name in the upper directory hides the
same name of the source. A removed name of the source is a whiteout. A directory that was created in the overlay is
opaque: it shows nothing of the source.

Upper directories and whiteouts are stored by path, so they do not depend on which nodes the kernel knows. They end with
the session.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator, Iterator
from itertools import count, islice
from time import monotonic
from typing import Any, Final

from bonobofs.errors import os_error
from bonobofs.fuse.fd_cache import R, W, stale
from bonobofs.fuse.inode_table import InodeTable, Node, joined
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.slices import LongCall, Run
from bonobofs.fuse.virtual_dir import ALL, LISTED
from bonobofs.policy import denials
from bonobofs.policy.compiled import REPOSITORY, ScratchQuota
from bonobofs.policy.decision import Denied, Layer, Permit
from bonobofs.policy.engine import Policy
from bonobofs.policy.request import Kind, Operation, Request, WorkspacePath
from bonobofs.system.paths import is_within
from bonobofs.system.terminal import escape

_REPOSITORY: Final = WorkspacePath(REPOSITORY)
NAME: Final = 4096
"""Bytes that a name counts in addition to its content: one block for its inode or directory entry."""
RESERVE: Final = 64 << 20
"""Bytes that scratch files leave free on the file system of the state directory, at most an eighth of it."""
RESERVED_INODES: Final = 4096
"""Inodes that scratch files leave free, at most an eighth of all."""
_SHARE: Final = 8
_FRESH: Final = 0.1
"""Seconds until the free space is read again."""
_GROWTH: Final = frozenset(
    {
        Operation.CREATE_FILE,
        Operation.WRITE_FILE,
        Operation.ALLOCATE,
        Operation.COPY_RANGE,
        Operation.MKDIR,
        Operation.MKNOD,
        Operation.SYMLINK,
        Operation.LINK,
        Operation.SET_XATTR,
    }
)
"""Operations that need space."""


class UpperDir:
    """The directory of the overlay's upper layer that is merged with one directory of the source.

    `node` is the upper directory. `names` are the names in it, each with its position in a listing after the source's
    own names; a name that the source has too is listed at its position in the source. `whiteouts` are names of the
    source that are not shown; the upper directory may have such a name again. `attrs_copied`: the directory's
    attributes are those of the upper directory.
    """

    __slots__ = ("attrs_copied", "names", "node", "whiteouts")

    def __init__(self, upper: Node) -> None:
        self.node: Final = upper
        self.names: Final[dict[bytes, int]] = {}
        self.whiteouts: Final[set[bytes]] = set()
        self.attrs_copied = False


class Overlay:
    """The upper layer of one session, and its upper directories by path."""

    def __init__(self, store: LayerStore, inodes: InodeTable, sizes: OverlayUsage, cookies: count[int]) -> None:
        """`cookies` numbers the entries that a listing shows after the source's own."""
        self.store: Final = store
        self.directories: Final[dict[WorkspacePath, UpperDir]] = {}
        self.sizes: Final = sizes
        sizes.inodes = self._scratch_files
        sizes.ino_offset = store.ino_offset
        self.free_space: Final = FreeSpace(store.root)
        self._inodes: Final = inodes
        self._cookies: Final = cookies

    def upper_dir(self, node: Node) -> UpperDir | None:
        """Return the upper directory of this directory of the source, or None."""
        if not self.directories or node.layer is not Layer.SOURCE:
            return None
        return self.directories.get(self._inodes.path(node))

    def is_upper_dir(self, node: Node) -> bool:
        """Whether the node is an upper directory. The mount shows the directory of the source in its place."""
        upper_dir = self.directories.get(self._inodes.path(node))
        return upper_dir is not None and upper_dir.node is node

    def ensure_upper_dir(self, node: Node, permit: Permit) -> UpperDir:
        """Return the upper directory of this directory of the source.

        Create it, and those above, if they do not exist.
        """
        missing: list[Node] = []
        at = node
        while (upper_dir := self.directories.get(self._inodes.path(at))) is None:
            missing.append(at)
            if at.parent is None:
                break
            at = at.parent
        if upper_dir is not None and not missing:
            return self._with_owner(node, upper_dir, permit)
        for at in reversed(missing):
            path = self._inodes.path(at)
            if not path:
                upper = self.store.top
            elif at.parent is None or upper_dir is None:
                raise stale()  # the directory was removed, and another one may have its path
            else:
                above = self._with_owner(at.parent, upper_dir, permit).node
                directory = self.store.directory(above, changing=True)
                self.store.mkdir(directory, at.name, 0o700, permit)
                st = os.stat(at.name, dir_fd=directory, follow_symlinks=False)
                upper = self._inodes.reference(above, at.name, st)
            upper_dir = self.directories[path] = UpperDir(upper)
        assert upper_dir is not None
        return self._with_owner(node, upper_dir, permit)

    def _with_owner(self, node: Node, upper_dir: UpperDir, permit: Permit) -> UpperDir:
        if not upper_dir.attrs_copied:
            self._sync_owner(node, upper_dir.node, permit)
        return upper_dir

    def _sync_owner(self, node: Node, upper: Node, permit: Permit) -> None:
        """Give the upper directory the owner, group and mode of the source's, so that the same users can create files
        in it.
        """
        if not self.store.privileged:
            return  # one user owns all files
        below, above = node.store.stat(node), self.store.stat(upper)
        expected = (below.st_uid, below.st_gid, stat.S_IMODE(below.st_mode))
        if expected != (above.st_uid, above.st_gid, stat.S_IMODE(above.st_mode)):
            self.store.copy_attributes(upper, node, permit)

    def show_name(self, name: bytes) -> None:
        """Show a name at the top of the upper layer in place of the source's."""
        upper_dir = self.directories[WorkspacePath("")] = UpperDir(self.store.top)
        self.add_upper(upper_dir, name)

    def add_upper(self, upper_dir: UpperDir, name: bytes) -> None:
        """Add a name that was created in the upper directory."""
        if name not in upper_dir.names:
            upper_dir.names[name] = next(self._cookies)

    def hide(self, upper_dir: UpperDir, name: bytes, *, below: bool) -> None:
        """Remove a name from the upper directory. `below`: add a whiteout, because the source has the name too."""
        upper_dir.names.pop(name, None)
        if below:
            upper_dir.whiteouts.add(name)

    def upper_dirs_below(self, path: WorkspacePath) -> Iterator[tuple[WorkspacePath, UpperDir]]:
        """Yield the directories of the source at `path` and below that have an upper directory."""
        if path in self.directories:  # an upper directory always has one above it
            for at, upper_dir in self.directories.items():
                if is_within(at, path):
                    yield at, upper_dir

    def remove_upper_dir(self, path: WorkspacePath, permit: Permit) -> None:
        """Remove the upper directory of `path` with all its contents, because its directory is no longer shown.

        It has contents if the source's directory was removed externally.
        """
        if path not in self.directories:
            return
        upper = self.directories[path].node
        assert upper.parent is not None
        directory, name = self.store.directory(upper.parent, changing=True), upper.name
        for each in self.store.walk(directory, name, closed=True):
            if each is not None:
                self.sizes.forget(each.st.st_ino + self.store.ino_offset)
                if (below := WorkspacePath(f"{path}/{each.path}")) not in self.directories:
                    self.sizes.add_names(below, -1)
        self.store.remove_tree(directory, name, permit)
        for at, upper_dir in list(self.upper_dirs_below(path)):
            del self.directories[at]
            self._inodes.detach(upper_dir.node)
            self._inodes.forget(upper_dir.node.id, 1)
            self.store.release(upper_dir.node)

    def move_upper_dir(self, node: Node, name: bytes, old: WorkspacePath, new: WorkspacePath, permit: Permit) -> None:
        """Move the upper directories along with a directory of the source, which is now `name` in `node`."""
        moved = list(self.upper_dirs_below(old))
        if not moved:
            return
        upper = self.directories[old].node
        above = self.ensure_upper_dir(node, permit).node
        assert upper.parent is not None
        source, target = self.store.directory(upper.parent, changing=True), self.store.directory(above, changing=True)
        self.store.rename(source, upper.name, target, name, 0, permit)
        self._inodes.rename(upper, above, name)
        for at, _ in moved:
            del self.directories[at]
        for at, upper_dir in moved:
            self.directories[WorkspacePath(new + at[len(old) :])] = upper_dir

    # -- copy-up

    def copy_up(self, node: Node, run: Run, permit: Permit) -> Generator[LongCall[Any], None, list[tuple[Node, bytes]]]:
        """Copy a file or symlink of the source to the upper layer before a change. Return its other names, which follow
        it. `run` makes the calls that copy the content; meanwhile the file is not changed and keeps its name.

        The request does not show which name the program opened, so all known names lead to the copy. EXDEV: the node is
        neither file nor symlink.
        """
        if node.kind not in (Kind.FILE, Kind.SYMLINK):
            raise os_error(errno.EXDEV)
        path, old, below, name = self._inodes.path(node), node.ino, node.parent, node.name
        upper_dir = None if below is None else self.ensure_upper_dir(below, permit)
        fd = yield from self.store.copy(node, None if upper_dir is None else upper_dir.node, name, run, permit)
        others = [link for link in self._inodes.links(old) if link != (below, name) and _leads(node, *link)]
        if below is not None:
            self._inodes.drop_link(old, below, name)
        node.store.release(node)
        st = os.fstat(fd)
        self._inodes.renumber(node, st.st_ino + self.store.ino_offset, self.store)
        if upper_dir is None:
            self.store.keep_nameless(node, fd, R | W)
        else:
            self._inodes.rename(node, upper_dir.node, name)
            self.store.keep_copied(node, fd)
            self.add_upper(upper_dir, name)
            for parent, other in others:
                self._link_up(node, parent, other, old, permit)
            self.sizes.add_names(path, 1)
        if node.kind is Kind.FILE:
            self.sizes.set_size(node.ino, path, st.st_size)
        return others

    def _link_up(self, node: Node, parent: Node, name: bytes, old: int, permit: Permit) -> None:
        """Link another name of a copied-up file to the copy."""
        upper_dir = self.ensure_upper_dir(parent, permit)
        self.store.link(node, self.store.directory(upper_dir.node, changing=True), name, permit)
        self._inodes.drop_link(old, parent, name)
        assert node.parent is not None
        self._inodes.note_link(node.ino, node.parent, node.name)
        self._inodes.note_link(node.ino, upper_dir.node, name)
        self.add_upper(upper_dir, name)
        self.sizes.add_names(self._inodes.join(parent, name), 1)

    # -- free space

    def take_space(self, request: Request) -> Denied | None:
        """Take the space of a new name, if the operation makes one. Return the refusal if there is too little."""
        if request.operation not in _GROWTH:
            return None
        return self.sizes.refusal(request, more=NAME) or self.free_space.take(request, NAME, 1)

    # -- `.bonobofs/scratch`

    def describe(self, viewer: int) -> bytes:
        """Return a line for each scratch file and each whiteout: kind, bytes, path.

        A viewer other than ALL gets its own files among the first LISTED.
        """
        lines = list(islice(self._lines(viewer), LISTED + 1))
        if len(lines) > LISTED:
            lines[LISTED] = "scratch\t0\tand more\n"  # counting them would need a walk of the whole layer
        return "".join(lines).encode("utf-8", "surrogateescape")

    def _lines(self, viewer: int) -> Iterator[str]:
        """Yield a line for each file; "" for one of another user."""
        for path, upper_dir in sorted(self.directories.items()) if viewer == ALL else ():
            for name in sorted(upper_dir.whiteouts - upper_dir.names.keys()):
                yield f"removed\t0\t{escape(joined(path, name))}\n"
        for path, st in self._scratch_files():
            yield f"scratch\t{st.st_size}\t{escape(path)}\n" if viewer in (ALL, st.st_uid) else ""

    def _scratch_files(self) -> Iterator[tuple[WorkspacePath, os.stat_result]]:
        """Yield every file of the upper layer except the session's repository, which counts towards no [[scratch]]."""
        for each in self.store.walk(self.store.directory(self.store.top), b".", closed=True):
            if each is None or is_within(path := WorkspacePath(each.path), _REPOSITORY):
                continue
            if path not in self.directories:
                yield path, each.st


def _leads(node: Node, parent: Node, name: bytes) -> bool:
    try:
        return node.store.leads_to(parent, name, node)
    except OSError:
        return False


class FreeSpace:
    """The free space of the state directory's file system, above the reserve for audit trails.

    Other sessions and programs use the same file system. The free space is read again after 0.1 s, or when the overlay
    has grown by an eighth of the reserve, so that eight sessions cannot use up the reserve between two reads.
    """

    def __init__(self, directory: int) -> None:
        """`directory` is a descriptor of a directory on that file system."""
        self._directory: Final = directory
        self._bytes = self._names = 0
        """Bytes and inodes that may be taken before the free space is read again."""
        self._read = 0.0

    def take(self, request: Request, size: int, names: int = 0) -> Denied | None:
        """Take `size` bytes and `names` inodes. Return the refusal if only the reserve has them."""
        self._bytes -= size
        self._names -= names
        now = monotonic()
        if min(self._bytes, self._names) < 0 or now - self._read >= _FRESH:
            self._read = now
            v = os.statvfs(self._directory)
            total = v.f_blocks * v.f_frsize
            reserve, inodes = min(RESERVE, total // _SHARE), min(RESERVED_INODES, v.f_files // _SHARE)
            self._bytes = min(v.f_bavail * v.f_frsize - reserve - size, reserve // _SHARE)
            # A file system without a limit of inodes reports 0.
            self._names = min(v.f_favail - inodes, inodes // _SHARE) - names if v.f_files else RESERVED_INODES
        if min(self._bytes, self._names) >= 0:
            return None
        return Denied(*denials.NO_SPACE, request.path, request.operation)


class OverlayUsage:
    """The bytes that each [[scratch]] table of the policy uses in the overlay, and its quota.

    A name counts NAME bytes. An inode counts its size and the extended attributes that were set. Upper directories do
    not count.
    """

    def __init__(self, policy: Callable[[], Policy]) -> None:
        self.inodes: Callable[[], Iterator[tuple[WorkspacePath, os.stat_result]]] = lambda: iter(())
        """Yields all files of the overlay; they are counted again after a change of the policy."""
        self.ino_offset = 0
        """Offset between an inode number of the upper layer and that of its node."""
        self._policy: Final = policy
        self._generation = policy().generation
        self._holds: dict[int, tuple[int, int, int]] = {}
        """By inode number: table, bytes of content, bytes of extended attributes."""
        self._totals: Final[dict[int, int]] = {}

    def refusal(self, request: Request, number: int = -1, size: int = 0, *, more: int = 0) -> Denied | None:
        """Return the refusal if the quota of the request's table is too small.

        The inode `number` would have `size` bytes, and names and extended attributes would take `more` bytes.
        """
        table = self._table(request.path)
        if table is None or table.max_total is None:
            return None
        index, old_size, _ = self._holds.get(number, (table.number, 0, 0))
        growth = max(size - (old_size if index == table.number else 0), 0) + more
        if growth <= 0 or self._totals.get(table.number, 0) + growth <= table.max_total:
            return None
        return Denied(*table.full, request.path, request.operation)

    def set_size(self, number: int, path: WorkspacePath, size: int | None = None, *, attributes: int = 0) -> None:
        """Set the size of the inode at this path (None: unchanged), and add `attributes` bytes of extended
        attributes.
        """
        known = self._holds.get(number)
        if known is None:
            table = self._table(path)
            if table is None or table.max_total is None:
                return
            known = table.number, 0, 0
        index, old_size, old_xattrs = known
        new_size, new_xattrs = old_size if size is None else size, max(old_xattrs + attributes, 0)
        self._holds[number] = index, new_size, new_xattrs
        self._totals[index] = self._totals.get(index, 0) + new_size - old_size + new_xattrs - old_xattrs

    def recount(self, number: int, path: WorkspacePath) -> None:
        """Count the inode towards the table of its new path."""
        _, size, attributes = self._holds.get(number, (0, 0, 0))
        self.forget(number)
        self.set_size(number, path, size, attributes=attributes)

    def add_names(self, path: WorkspacePath, number: int) -> None:
        """Count `number` more names (fewer if negative) towards the table of the path."""
        table = self._table(path)
        if table is not None and table.max_total is not None:
            self._totals[table.number] = self._totals.get(table.number, 0) + number * NAME

    def is_limited(self, path: WorkspacePath) -> bool:
        """Whether the table of the path has a quota."""
        table = self._table(path)
        return table is not None and table.max_total is not None

    def forget(self, number: int) -> None:
        """Stop counting the inode."""
        index, size, attributes = self._holds.pop(number, (0, 0, 0))
        if size or attributes:
            self._totals[index] -= size + attributes

    def _table(self, path: str) -> ScratchQuota | None:
        """Return the table of the path in the current policy, and count all files again if the policy has changed."""
        policy = self._policy()
        if policy.generation != self._generation:
            self._generation = policy.generation
            known, self._holds = self._holds, {}
            self._totals.clear()
            for each, st in self.inodes():
                number = st.st_ino + self.ino_offset
                size = st.st_size if stat.S_ISREG(st.st_mode) else 0
                self.set_size(number, each, size, attributes=known.pop(number, (0, 0, 0))[2])
                self.add_names(each, 1)
        return policy.scratch_table(path)
