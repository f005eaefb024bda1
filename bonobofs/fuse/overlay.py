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
from bonobofs.fuse.inode_table import Inodes, Node
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.temp_table import LISTED, is_below, joined, printable
from bonobofs.fuse.virtual_dir import ALL
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


class Beside:
    """What the layer has beside one directory of the source.

    `names` are the names that lie in the counterpart `upper`, each with its place behind the source's own names in a
    listing, which it takes where the source does not have the name too. `gone` are names of the source that must not
    show, though something in the layer may have the name again. `dressed` says that the directory's own attributes are
    the counterpart's.
    """

    __slots__ = ("dressed", "gone", "names", "upper")

    def __init__(self, upper: Node) -> None:
        self.upper: Final = upper
        self.names: Final[dict[bytes, int]] = {}
        self.gone: Final[set[bytes]] = set()
        self.dressed = False


class Scratch:
    """The layer of one session, and which of its directories lie beside which of the source."""

    def __init__(self, store: LayerStore, inodes: Inodes, sizes: Sizes, cookies: count[int]) -> None:
        """`cookies` number what a listing shows behind the source's own names."""
        self.store: Final = store
        self.directories: Final[dict[WorkspacePath, Beside]] = {}
        self.sizes: Final = sizes
        sizes.inodes = self._all
        sizes.numbers = store.numbers
        self.room: Final = Room(store.root)
        self._inodes: Final = inodes
        self._cookies: Final = cookies

    def beside(self, node: Node) -> Beside | None:
        """What lies beside this directory of the source."""
        if not self.directories or node.layer:
            return None
        return self.directories.get(self._inodes.path(node))

    def is_counterpart(self, node: Node) -> bool:
        """Whether a directory of the layer lies beside one of the source, which is shown in its place."""
        beside = self.directories.get(self._inodes.path(node))
        return beside is not None and beside.upper is node

    def counterpart(self, node: Node, permit: Permit) -> Beside:
        """What lies beside this directory of the source, made where nothing did; all above it too."""
        missing: list[Node] = []
        at = node
        while (beside := self.directories.get(self._inodes.path(at))) is None:
            missing.append(at)
            if at.parent is None:
                break
            at = at.parent
        if beside is not None and not missing:
            return self._followed(node, beside, permit)
        for at in reversed(missing):
            path = self._inodes.path(at)
            if not path:
                upper = self.store.top
            elif at.parent is None or beside is None:
                raise stale()  # it was removed, and something else may have its path
            else:
                above = self._followed(at.parent, beside, permit).upper
                directory = self.store.directory(above, changing=True)
                self.store.mkdir(directory, at.name, 0o700, permit)
                st = os.stat(at.name, dir_fd=directory, follow_symlinks=False)
                upper = self._inodes.reference(above, at.name, st)
            beside = self.directories[path] = Beside(upper)
        assert beside is not None
        return self._followed(node, beside, permit)

    def _followed(self, node: Node, beside: Beside, permit: Permit) -> Beside:
        if not beside.dressed:
            self._follow(node, beside.upper, permit)
        return beside

    def _follow(self, node: Node, upper: Node, permit: Permit) -> None:
        """Files are made in the counterpart by whoever may make them in the directory, and belong to the same group."""
        if not self.store.privileged:
            return  # all is made by the same user
        below, above = node.store.stat(node), self.store.stat(upper)
        wanted = (below.st_uid, below.st_gid, stat.S_IMODE(below.st_mode))
        if wanted != (above.st_uid, above.st_gid, stat.S_IMODE(above.st_mode)):
            self.store.dress(upper, node, permit)

    def show(self, name: bytes) -> None:
        """Show what lies at the top of the layer under this name, in place of what the source has at its root."""
        beside = self.directories[WorkspacePath("")] = Beside(self.store.top)
        self.appeared(beside, name)

    def appeared(self, beside: Beside, name: bytes) -> None:
        """Something lies in the counterpart under this name."""
        if name not in beside.names:
            beside.names[name] = next(self._cookies)

    def vanished(self, beside: Beside, name: bytes, *, below: bool) -> None:
        """Nothing is to be shown under this name any more."""
        beside.names.pop(name, None)
        if below:
            beside.gone.add(name)

    def below(self, path: WorkspacePath) -> Iterator[tuple[WorkspacePath, Beside]]:
        """The directories of the source at `path` and below that have something beside them."""
        if path in self.directories:  # or nothing below has: a counterpart has one above it
            for at, beside in self.directories.items():
                if is_below(at, path):
                    yield at, beside

    def discard(self, path: WorkspacePath, permit: Permit) -> None:
        """No directory of the source is shown at `path` any more.

        What is still in its counterpart was left when somebody removed the directory behind the mount.
        """
        if path not in self.directories:
            return
        upper = self.directories[path].upper
        assert upper.parent is not None
        directory, name = self.store.directory(upper.parent, changing=True), upper.name
        for each in self.store.walk(directory, name, closed=True):
            if each is not None:
                self.sizes.drop(each.st.st_ino + self.store.numbers)
                if (below := WorkspacePath(f"{path}/{each.path}")) not in self.directories:
                    self.sizes.add_names(below, -1)
        self.store.remove_tree(directory, name, permit)
        for at, beside in list(self.below(path)):
            del self.directories[at]
            self._inodes.cut_off(beside.upper)
            self._inodes.forget(beside.upper.id, 1)
            self.store.release(beside.upper)

    def move(self, node: Node, name: bytes, old: WorkspacePath, new: WorkspacePath, permit: Permit) -> None:
        """A directory of the source goes by `name` in `node` now: what lies beside it goes along."""
        moved = list(self.below(old))
        if not moved:
            return
        upper = self.directories[old].upper
        above = self.counterpart(node, permit).upper
        assert upper.parent is not None
        source, target = self.store.directory(upper.parent, changing=True), self.store.directory(above, changing=True)
        self.store.rename(source, upper.name, target, name, 0, permit)
        self._inodes.rename(upper, above, name)
        for at, _ in moved:
            del self.directories[at]
        for at, beside in moved:
            self.directories[WorkspacePath(new + at[len(old) :])] = beside

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
            beside = self.counterpart(below, permit)
            fd = self.store.copy(node, self.store.directory(beside.upper, changing=True), name, permit)
            self._inodes.drop_link(old, below, name)
        node.store.release(node)
        st = os.fstat(fd)
        self._inodes.renumber(node, st.st_ino + self.store.numbers, self.store)
        if below is None:
            self.store.hold_nameless(node, fd, R | W)
        else:
            self._inodes.rename(node, beside.upper, name)
            self.store.keep_copied(node, fd)
            self.appeared(beside, name)
            for parent, other in others:
                self._link_up(node, parent, other, old, permit)
            self.sizes.add_names(path, 1)
        if node.kind is Kind.FILE:
            self.sizes.note(node.ino, path, st.st_size)
        return others

    def _link_up(self, node: Node, parent: Node, name: bytes, old: int, permit: Permit) -> None:
        """A further name of what was brought up leads to the copy, too."""
        beside = self.counterpart(parent, permit)
        self.store.link(node, self.store.directory(beside.upper, changing=True), name, permit)
        self._inodes.drop_link(old, parent, name)
        assert node.parent is not None
        self._inodes.note_link(node.ino, node.parent, node.name)
        self._inodes.note_link(node.ino, beside.upper, name)
        self.appeared(beside, name)
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
        for path, beside in sorted(self.directories.items()) if viewer == ALL else ():
            for name in sorted(beside.gone - beside.names.keys()):
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
        return node.store.leads(parent, name, node)
    except OSError:
        return False


class Room:
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


class Sizes:
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

    def note(self, number: int, path: WorkspacePath, size: int | None = None, *, attributes: int = 0) -> None:
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

    def move(self, number: int, path: WorkspacePath) -> None:
        """Count the inode towards the table of its new path."""
        _, size, attributes = self._holds.get(number, (0, 0, 0))
        self.drop(number)
        self.note(number, path, size, attributes=attributes)

    def add_names(self, path: WorkspacePath, number: int) -> None:
        """Count so many more names (negative: fewer) towards the table of the path."""
        table = self._table(path)
        if table is not None and table.max_total is not None:
            self._totals[table.index] = self._totals.get(table.index, 0) + number * NAME

    def bounds(self, path: WorkspacePath) -> bool:
        """Whether the path counts towards a table that has a bound."""
        table = self._table(path)
        return table is not None and table.max_total is not None

    def drop(self, number: int) -> None:
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
                self.note(number, each, size, attributes=known.pop(number, (0, 0, 0))[2])
                self.add_names(each, 1)
        return policy.scratch_table(path)
