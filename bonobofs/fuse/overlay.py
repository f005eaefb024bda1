"""The scratch layer: what may be written at will, shown over the source, which it never reaches.

The layer is a tree in the session's directory, in which each thing has the path that it has in the mount. A directory
of the source gets a counterpart there when the first scratch thing appears in it; what lies in the counterpart hides
what the source has under the same name, and a name of the source that was removed is remembered as gone. A directory
that was made in the layer shows nothing of the source, whatever has its name there.

Counterparts, and what is gone, are kept by path: it does not matter which directories the kernel remembers. They end
with the session, like the layer.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from itertools import count, islice
from time import monotonic
from typing import Final

from bonobofs.fuse.fd_cache import R, W, stale
from bonobofs.fuse.inode_table import InodeTable, Node, is_below, joined
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.virtual_dir import ALL, LISTED, printable
from bonobofs.policy import messages
from bonobofs.policy.compiled import REPOSITORY, ScratchTable
from bonobofs.policy.decision import Denied, Permit
from bonobofs.policy.engine import Policy
from bonobofs.policy.request import Kind, Operation, Request, WorkspacePath

_REPOSITORY: Final = WorkspacePath(REPOSITORY)
NAME: Final = 4096
"""Bytes that a name counts beside its content: the disk space of an inode with its block, or of a directory entry."""
RESERVE: Final = 64 << 20
"""Bytes of the state directory's file system that scratch leaves free; an eighth of it where that is less."""
RESERVED_INODES: Final = 4096
"""Inodes that scratch leaves free, or an eighth of them."""
_SHARE: Final = 8
_FRESH: Final = 0.1
"""Seconds after which the free space is read again."""
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
"""Operations that take space."""


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
    """The layer of one session, and which of its directories lie beside which of the source."""

    def __init__(self, store: LayerStore, inodes: InodeTable, sizes: OverlayUsage, cookies: count[int]) -> None:
        """`cookies` number what a listing shows behind the source's own names."""
        self.store: Final = store
        self.directories: Final[dict[WorkspacePath, UpperDir]] = {}
        self.sizes: Final = sizes
        sizes.inodes = self._all
        sizes.numbers = store.numbers
        self.room: Final = FreeSpace(store.root)
        self._inodes: Final = inodes
        self._cookies: Final = cookies

    def upper_dir(self, node: Node) -> UpperDir | None:
        """What lies beside this directory of the source."""
        if not self.directories or node.layer:
            return None
        return self.directories.get(self._inodes.path(node))

    def is_upper_dir(self, node: Node) -> bool:
        """Whether a directory of the layer lies beside one of the source, which is shown in its place."""
        upper_dir = self.directories.get(self._inodes.path(node))
        return upper_dir is not None and upper_dir.node is node

    def ensure_upper_dir(self, node: Node, permit: Permit) -> UpperDir:
        """What lies beside this directory of the source, made where nothing did; all above it too."""
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
                raise stale()  # it was removed, and something else may have its path
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
        """Files are made in the counterpart by whoever may make them in the directory, and belong to the same group."""
        if not self.store.privileged:
            return  # all is made by the same user
        below, above = node.store.stat(node), self.store.stat(upper)
        wanted = (below.st_uid, below.st_gid, stat.S_IMODE(below.st_mode))
        if wanted != (above.st_uid, above.st_gid, stat.S_IMODE(above.st_mode)):
            self.store.copy_attributes(upper, node, permit)

    def show_name(self, name: bytes) -> None:
        """Show what lies at the top of the layer under this name, in place of what the source has at its root."""
        upper_dir = self.directories[WorkspacePath("")] = UpperDir(self.store.top)
        self.add_upper(upper_dir, name)

    def add_upper(self, upper_dir: UpperDir, name: bytes) -> None:
        """Something lies in the counterpart under this name."""
        if name not in upper_dir.names:
            upper_dir.names[name] = next(self._cookies)

    def hide(self, upper_dir: UpperDir, name: bytes, *, below: bool) -> None:
        """Nothing is to be shown under this name any more."""
        upper_dir.names.pop(name, None)
        if below:
            upper_dir.whiteouts.add(name)

    def upper_dirs_below(self, path: WorkspacePath) -> Iterator[tuple[WorkspacePath, UpperDir]]:
        """The directories of the source at `path` and below that have something beside them."""
        if path in self.directories:  # or nothing below has: a counterpart has one above it
            for at, upper_dir in self.directories.items():
                if is_below(at, path):
                    yield at, upper_dir

    def remove_upper_dir(self, path: WorkspacePath, permit: Permit) -> None:
        """No directory of the source is shown at `path` any more.

        What is still in its counterpart was left when somebody removed the directory behind the mount.
        """
        if path not in self.directories:
            return
        upper = self.directories[path].node
        assert upper.parent is not None
        directory, name = self.store.directory(upper.parent, changing=True), upper.name
        for each in self.store.walk(directory, name, closed=True):
            if each is not None:
                self.sizes.forget(each.st.st_ino + self.store.numbers)
                if (below := WorkspacePath(f"{path}/{each.path}")) not in self.directories:
                    self.sizes.add_names(below, -1)
        self.store.remove_tree(directory, name, permit)
        for at, upper_dir in list(self.upper_dirs_below(path)):
            del self.directories[at]
            self._inodes.cut_off(upper_dir.node)
            self._inodes.forget(upper_dir.node.id, 1)
            self.store.release(upper_dir.node)

    def move_upper_dir(self, node: Node, name: bytes, old: WorkspacePath, new: WorkspacePath, permit: Permit) -> None:
        """A directory of the source goes by `name` in `node` now: what lies beside it goes along."""
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

    # -- bringing up what the source has

    def copy_up(self, node: Node, permit: Permit) -> list[tuple[Node, bytes]]:
        """Let a file or symlink of the source go on in the layer, before it is changed; its other names, brought along.

        A request does not tell by which of its names the file was opened, so all that are known lead to the copy.
        EXDEV: it is something else.
        """
        if node.kind not in (Kind.FILE, Kind.SYMLINK):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        path, old, below, name = self._inodes.path(node), node.ino, node.parent, node.name
        others = [link for link in self._inodes.links(old) if link != (below, name) and _leads(node, *link)]
        if below is None:
            fd = self.store.copy_nameless(node, permit)
        else:
            upper_dir = self.ensure_upper_dir(below, permit)
            fd = self.store.copy(node, self.store.directory(upper_dir.node, changing=True), name, permit)
            self._inodes.drop_link(old, below, name)
        node.store.release(node)
        st = os.fstat(fd)
        self._inodes.renumber(node, st.st_ino + self.store.numbers, self.store)
        if below is None:
            self.store.hold_nameless(node, fd, R | W)
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
        """A further name of what was brought up leads to the copy, too."""
        upper_dir = self.ensure_upper_dir(parent, permit)
        self.store.link(node, self.store.directory(upper_dir.node, changing=True), name, permit)
        self._inodes.drop_link(old, parent, name)
        assert node.parent is not None
        self._inodes.note_link(node.ino, node.parent, node.name)
        self._inodes.note_link(node.ino, upper_dir.node, name)
        self.add_upper(upper_dir, name)
        self.sizes.add_names(self._inodes.join(parent, name), 1)

    # -- room

    def refusal(self, request: Request) -> Denied | None:
        """Return the refusal of an operation that would take a little more space."""
        if request.operation not in _GROWTH:
            return None
        return self.sizes.refusal(request, more=NAME) or self.room.refusal(request, NAME, 1)

    # -- telling

    def describe(self, viewer: int) -> bytes:
        """A line for each thing in the layer, and for each name of the source that is gone: kind, bytes, path.

        A viewer other than ALL is shown the things that it owns, among the first LISTED of all.
        """
        lines = list(islice(self._lines(viewer), LISTED + 1))
        if len(lines) > LISTED:
            lines[LISTED] = "scratch\t0\tand more\n"  # how many would take a walk through all of it
        return "".join(lines).encode("utf-8", "surrogateescape")

    def _lines(self, viewer: int) -> Iterator[str]:
        """A line for each thing; "" for one that belongs to another user."""
        for path, upper_dir in sorted(self.directories.items()) if viewer == ALL else ():
            for name in sorted(upper_dir.whiteouts - upper_dir.names.keys()):
                yield f"removed\t0\t{printable(joined(path, name))}\n"
        for path, st in self._all():
            yield f"scratch\t{st.st_size}\t{printable(path)}\n" if viewer in (ALL, st.st_uid) else ""

    def _all(self) -> Iterator[tuple[WorkspacePath, os.stat_result]]:
        """Everything that lies in the layer, but the session's repository, which no [[scratch]] counts."""
        for each in self.store.walk(self.store.directory(self.store.top), b".", closed=True):
            if each is None or is_below(path := WorkspacePath(each.path), _REPOSITORY):
                continue
            if path not in self.directories:
                yield path, each.st


def _leads(node: Node, parent: Node, name: bytes) -> bool:
    try:
        return node.store.leads_to(parent, name, node)
    except OSError:
        return False


class FreeSpace:
    """The space that the file system of the state directory has for scratch, beside the reserve for trails.

    Other sessions and programs take space there too. The free space is read again after 0.1 s, and after the layer grew
    by an eighth of the reserve: eight sessions that read it at the same time read it again before they use it up.
    """

    def __init__(self, directory: int) -> None:
        """`directory` is a descriptor of a directory of that file system."""
        self._directory: Final = directory
        self._bytes = self._names = 0
        """What may be taken before the free space is read again."""
        self._read = 0.0

    def refusal(self, request: Request, size: int, names: int = 0) -> Denied | None:
        """Take `size` bytes and `names` inodes; return the refusal where only the reserve has them."""
        self._bytes -= size
        self._names -= names
        now = monotonic()
        if min(self._bytes, self._names) < 0 or now - self._read >= _FRESH:
            self._read = now
            v = os.statvfs(self._directory)
            total = v.f_blocks * v.f_frsize
            reserve, inodes = min(RESERVE, total // _SHARE), min(RESERVED_INODES, v.f_files // _SHARE)
            self._bytes = min(v.f_bavail * v.f_frsize - reserve - size, reserve // _SHARE)
            # A file system that has no limit of inodes says 0.
            self._names = min(v.f_favail - inodes, inodes // _SHARE) - names if v.f_files else RESERVED_INODES
        if min(self._bytes, self._names) >= 0:
            return None
        return Denied(*messages.NO_SPACE, request.path, request.operation)


class OverlayUsage:
    """How many bytes each table of the policy has in the layer, and whether there is room for more.

    Each name counts NAME bytes, each inode the size of its content and of the extended attributes that were set. The
    counterparts of directories of the source do not count.
    """

    def __init__(self, policy: Callable[[], Policy]) -> None:
        self.inodes: Callable[[], Iterator[tuple[WorkspacePath, os.stat_result]]] = lambda: iter(())
        """What is to be counted anew when the policy has changed."""
        self.numbers = 0
        """Added to an inode number of the layer."""
        self._policy: Final = policy
        self._generation = policy().generation
        self._holds: dict[int, tuple[int, int, int]] = {}
        """By number of an inode: its table, bytes of content, bytes of extended attributes."""
        self._totals: Final[dict[int, int]] = {}

    def refusal(self, request: Request, number: int = -1, size: int = 0, *, more: int = 0) -> Denied | None:
        """Return the refusal of what its table has no room for.

        The inode `number` would hold `size` bytes, and names and extended attributes would take `more` bytes.
        """
        table = self._table(request.path)
        if table is None or table.max_total is None:
            return None
        index, has, _ = self._holds.get(number, (table.index, 0, 0))
        growth = max(size - (has if index == table.index else 0), 0) + more
        if growth <= 0 or self._totals.get(table.index, 0) + growth <= table.max_total:
            return None
        return Denied(*table.full, request.path, request.operation)

    def set_size(self, number: int, path: WorkspacePath, size: int | None = None, *, attributes: int = 0) -> None:
        """Note that the inode of this path holds `size` bytes (None: as before), and more bytes of attributes."""
        known = self._holds.get(number)
        if known is None:
            table = self._table(path)
            if table is None or table.max_total is None:
                return
            known = table.index, 0, 0
        index, before, had = known
        after, has = before if size is None else size, max(had + attributes, 0)
        self._holds[number] = index, after, has
        self._totals[index] = self._totals.get(index, 0) + after - before + has - had

    def recount(self, number: int, path: WorkspacePath) -> None:
        """Count the inode towards the table of its new path."""
        _, size, attributes = self._holds.get(number, (0, 0, 0))
        self.forget(number)
        self.set_size(number, path, size, attributes=attributes)

    def add_names(self, path: WorkspacePath, number: int) -> None:
        """Count so many more names (negative: fewer) towards the table of the path."""
        table = self._table(path)
        if table is not None and table.max_total is not None:
            self._totals[table.index] = self._totals.get(table.index, 0) + number * NAME

    def is_limited(self, path: WorkspacePath) -> bool:
        """Whether the path counts towards a table that has a bound."""
        table = self._table(path)
        return table is not None and table.max_total is not None

    def forget(self, number: int) -> None:
        """The inode `number` is no more."""
        index, size, attributes = self._holds.pop(number, (0, 0, 0))
        if size or attributes:
            self._totals[index] -= size + attributes

    def _table(self, path: str) -> ScratchTable | None:
        """The table that the path counts towards, in the policy of this moment."""
        policy = self._policy()
        if policy.generation != self._generation:
            self._generation = policy.generation
            known, self._holds = self._holds, {}
            self._totals.clear()
            for each, st in self.inodes():
                number = st.st_ino + self.numbers
                size = st.st_size if stat.S_ISREG(st.st_mode) else 0
                self.set_size(number, each, size, attributes=known.pop(number, (0, 0, 0))[2])
                self.add_names(each, 1)
        return policy.scratch_table(path)
