"""What is asked of scratch paths: the source and the layer are shown as one tree, and only the layer is changed.

Handlers act in whichever of the two has what they were asked about. Where a verdict sends a change of something of the
source to the layer, it is brought up there first, or its name hidden, and the change made there.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Final

from bonobofs.enforcement.enforcer import Caller, RelatedChange, WrongLayerError
from bonobofs.fuse.external_changes import once_moved
from bonobofs.fuse.inode_table import Node, kind_of
from bonobofs.fuse.mount_context import LEAVES, MOST_NAMES, NOTHING, Crossing, Handler, Header, Reply
from bonobofs.fuse.overlay import NAME, Beside
from bonobofs.fuse.slices import Steps
from bonobofs.fuse.temp_files import End, Holding
from bonobofs.fuse.temp_table import joined
from bonobofs.policy import messages
from bonobofs.policy.decision import Denied, Layer, Permit, Refused
from bonobofs.policy.request import EXISTS, Context, Kind, Operation, Request, WorkspacePath
from bonobofs.system import syscalls

Removal = Callable[[int, bytes, Permit], None]
_ATTEMPTS: Final = 3
"""How often the judgement of a move begins."""


class Scratching(Holding):
    """What the handlers do where a path is scratch."""

    # -- where things are

    def _where(self, parent: Node, directory: int, name: bytes) -> tuple[Node, int]:
        """The directory, of the source or beside it, in which that lies which is shown under the name.

        FileNotFoundError: the source has the name, and it is gone.
        """
        beside = self._scratch.beside(parent)
        if beside is None:
            return parent, directory
        if name in beside.names:
            return beside.upper, self._scratch.store.directory(beside.upper, changing=True)
        if name in beside.gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return parent, directory

    def _home(self, header: Header, request: Request, parent: Node, directory: int, permit: Permit) -> tuple[Node, int]:
        """The directory in which something new is to be made, as the verdict says. FileExistsError: the name is taken.

        Elsewhere: it should be made in the source, in a directory that the source does not have. Refused, ENOSPC: the
        disk has no space for it.
        """
        name = os.fsencode(request.path.rpartition("/")[2])
        if permit.layer is Layer.SCRATCH:
            self._check_room(header, request, more=NAME)
            self._check_disk(header, request, NAME, 1)
        elif header.uid:
            self._backing.check_reserve(NAME)
        if permit.layer is parent.layer:
            beside = self._scratch.beside(parent)
            if beside is not None:
                beside.gone.discard(name)  # the policy says by now that it is no scratch: the source shows
            return parent, directory
        if parent.layer:
            raise WrongLayerError(permit)
        if permit.layer is Layer.STAGED:
            return parent, directory
        beside = self._scratch.counterpart(parent, permit)
        if name in beside.names or (name not in beside.gone and inode_number(directory, name)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._scratch.discard(self._inodes.join(parent, name), permit)
        return beside.upper, self._scratch.store.directory(beside.upper, changing=True)

    def _appeared(self, parent: Node, home: Node, name: bytes) -> None:
        """Something lies under this name in `home`, beside the directory in which it is shown."""
        if home.layer is Layer.SCRATCH:
            self._scratch.sizes.add_names(self._inodes.join(parent, name), 1)
        if home is not parent:
            beside = self._scratch.directories[self._inodes.path(parent)]
            self._scratch.appeared(beside, name)

    def _vanished(self, parent: Node, name: bytes, permit: Permit) -> None:
        """What was shown under this name, of the layer or of the source, is to be shown no more."""
        if permit.layer is Layer.SCRATCH and not parent.layer:
            beside = self._scratch.counterpart(parent, permit)
            below = inode_number(parent.store.directory(parent), name)
            self._scratch.vanished(beside, name, below=below > 0)
            self._lately.note(parent.ino, name, below)  # in the source nothing was done

    # -- reading

    def _lookup_beside(self, parent: Node, name: bytes) -> bytes | None:
        """The entry of a name that the layer has or hides; None: look in the source."""
        beside = self._scratch.beside(parent)
        if beside is None:
            return None
        if name in beside.names:
            return self._entry_beside(beside, name)
        return self._no_entry if name in beside.gone else None

    def _entry_beside(self, beside: Beside, name: bytes) -> bytes:
        return self._entry(beside.upper, name, self._scratch.store.stat_entry(beside.upper, name))

    # -- changing what the source has

    def _or_in_scratch(self, handler: Handler) -> Handler:
        """The handler of a change of a node, which is made in the layer where the verdict says so."""

        def handle(header: Header, body: memoryview) -> Reply:
            try:
                return handler(header, body)
            except WrongLayerError:
                node = self._node(header.node_id)
                raised = self._raise(header, node)
                if raised is None:
                    raise
                return handler(header._replace(node_id=raised.id), body)

        return handle

    def _raise(self, header: Header, node: Node) -> Node | None:
        """Bring something of the source up into the layer, if a change of it belongs there; what is to be changed then.

        Raises Refused where there is no room for it.
        """
        if node.layer:
            return None
        request = Request(Operation.WRITE_FILE, self._inodes.path(node), node.kind)
        verdict = self._enforcer.decide(request, EXISTS)
        if isinstance(verdict, Denied) or verdict.layer is not Layer.SCRATCH:
            return None
        if node.is_dir:
            self._check_disk(header, request, NAME, 1)
            beside = self._scratch.counterpart(node, verdict)
            if not beside.dressed:
                self._scratch.store.dress(beside.upper, node, verdict)
                beside.dressed = True
            return beside.upper
        st = node.store.stat(node)
        if node.kind is Kind.FILE:
            self._check_scratch_alone(header, node, request)
            self._check_room(header, request, node.ino, st.st_size, more=NAME)
        self._check_disk(header, request, st.st_blocks * 512 + NAME, 1)
        self._settle_run(node)
        for parent, name in self._scratch.copy_up(node, verdict):
            self._notices.entry(parent.id, name)  # another file from now on
        self._notices.inode(node.id, -1, 0)
        return node

    def _check_scratch_alone(self, header: Header, node: Node, request: Request) -> None:
        """Raises Refused where the file has a name that is not scratch: the request does not tell which was meant.

        Who has it open by that name would write into the layer, and lose it there.
        """
        links = self._inodes.links(node.ino)
        if len(links) > MOST_NAMES:
            raise self._enforcer.refuse(
                Denied(*messages.HARDLINK, request.path, request.operation), self._caller(header)
            )
        for parent, name in links:
            verdict = self._enforcer.decide(Request(request.operation, self._inodes.join(parent, name)), EXISTS)
            if isinstance(verdict, Permit) and verdict.layer is Layer.SCRATCH:
                continue
            try:
                leads = node.store.leads(parent, name, node)
            except OSError:
                leads = False
            if leads:
                raise self._enforcer.refuse(
                    Denied(*messages.HARDLINK, request.path, request.operation), self._caller(header)
                )

    def _check_room(self, header: Header, request: Request, number: int = -1, size: int = 0, *, more: int = 0) -> None:
        """Raises Refused where its [[scratch]] has no room for a file of this size, and `more` bytes beside it."""
        denied = self._scratch.sizes.refusal(request, number, size, more=more)
        if denied is not None:
            raise self._enforcer.refuse(denied, self._caller(header))

    def _check_space(self, header: Header, node: Node, request: Request, needed: int) -> None:
        """Raise ENOSPC where a change of the node would allocate `needed` bytes that are reserved."""
        if node.layer is not Layer.SCRATCH:
            node.store.check_reserve(needed)
        elif needed > 0:
            self._check_disk(header, request, needed)

    # -- removing

    def _removal(self, where: Node, permit: Permit, effect: Removal) -> Removal:
        """What removes a name: of the layer, the effect itself; what the source has stays, and is only hidden."""
        if permit.layer is where.layer:
            return effect
        if permit.layer is not Layer.SCRATCH:
            raise WrongLayerError(permit)
        return _stays

    def _check_shown_empty(self, where: Node, directory: int, name: bytes, path: WorkspacePath, permit: Permit) -> None:
        """ENOTEMPTY: a directory shows something that the layer has, or that is held, or that stays in the source."""
        self._check_none_held(path)
        if where.layer or not (permit.layer or self._scratch.directories):
            return
        beside = self._scratch.directories.get(path)
        full = beside is not None and bool(beside.names)
        if permit.layer:
            gone = beside.gone if beside is not None else set()
            full = full or any(each not in gone for each in self._backing.names_in(directory, name))
        if full:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    # -- moving

    def _rename_in_scratch(self, header: Header, source: End, target: End, flags: int) -> Steps:
        """A rename of which both ends are scratch. EXDEV: they are not, or a directory of the source would be moved."""
        exchange = bool(flags & syscalls.RENAME_EXCHANGE)
        if flags & syscalls.RENAME_NOREPLACE and target.st is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        source = self._raised_end(header, source)
        if exchange and target.st is not None:
            target = self._raised_end(header, target)
        source, target = yield from self._judge_move(header, source, target, exchange=exchange, layer=Layer.SCRATCH)
        assert source.st is not None
        request = Request(Operation.RENAME, source.path, kind_of(source.st.st_mode))
        parts = [part._replace(layer=Layer.SCRATCH) for part in self._ends(source, target, exchange=exchange)]
        self._check_moved_room(header, source, target, exchange=exchange)
        details = {"to": target.path, "exchange": True} if exchange else {"to": target.path}
        with self._enforcer.authorize(
            request, LEAVES, *parts, caller=self._caller(header), details=details, layer=Layer.SCRATCH
        ) as permit:
            self._rename_above(source, source.st, target, permit, exchange=exchange)
        return NOTHING

    def _rename_above(self, source: End, st: os.stat_result, target: End, permit: Permit, *, exchange: bool) -> None:
        """Move a name of the layer. What the source has under the new name is only shown no more."""
        over, store = target.st, self._scratch.store
        moved, other = self._settled(source.parent, st), None
        if over is not None and exchange:
            other = self._settled(target.parent, over)
        elif over is not None:
            other = self._giving_way_above(target, over, permit)
        home = target.parent if target.parent.layer else self._scratch.counterpart(target.shown, permit).upper
        if home is not target.parent:
            self._scratch.discard(target.path, permit)
        above = target._replace(parent=home, directory=store.directory(home, changing=True))
        ends = source.directory, source.name, above.directory, target.name
        self._or_stays(other, lambda: store.rename(*ends, syscalls.RENAME_EXCHANGE if exchange else 0, permit))
        self._renamed(source, st, moved, target, above, other, exchange=exchange)
        if not exchange:
            self._vanished(source.shown, source.name, permit)
            self._appeared(target.shown, home, target.name)
            self._scratch.sizes.add_names(source.path, -1)
        self._resized(moved, target.path)
        if exchange:
            self._resized(other, source.path)

    def _giving_way_above(self, target: End, over: os.stat_result, permit: Permit) -> Node | None:
        if stat.S_ISDIR(over.st_mode):
            self._check_shown_empty(target.parent, target.directory, target.name, target.path, permit)
        return self._leaving(target.parent, target.directory, target.name, over)

    def _raised_end(self, header: Header, end: End) -> End:
        """The end, of what was brought up into the layer if the source had it. EXDEV: it cannot be."""
        if end.parent.layer or end.st is None:
            return end
        if not stat.S_ISREG(end.st.st_mode) and not stat.S_ISLNK(end.st.st_mode):
            raise Crossing(messages.OF_SOURCE if self._enforcer.policy.scratch_table(end.path) else messages.ELSEWHERE)
        node = self._inodes.reference(end.parent, end.name, end.st)
        try:
            if self._raise(header, node) is None:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        finally:
            self._forget_node(node.id, 1)
        parent, directory = self._where(end.shown, end.directory, end.name)
        st = os.stat(end.name, dir_fd=directory, follow_symlinks=False)
        return end._replace(parent=parent, directory=directory, st=st)

    def _check_moved_room(self, header: Header, source: End, target: End, *, exchange: bool) -> None:
        """Raises Refused where another [[scratch]] counts the file now and has no room, EXDEV for directories."""
        policy = self._enforcer.policy
        old, new = policy.scratch_table(source.path), policy.scratch_table(target.path)
        if old is new or old is None or new is None:
            return
        for end, path in ((source, target.path), (target, source.path))[: 2 if exchange else 1]:
            assert end.st is not None
            if stat.S_ISDIR(end.st.st_mode):
                raise Crossing(messages.TWO_SCRATCH)
            self._check_room(header, Request(Operation.RENAME, path), size=end.st.st_size, more=NAME)

    def _resized(self, node: Node | None, path: WorkspacePath) -> None:
        """A file of the layer may have another size now, or count towards another [[scratch]]."""
        if node is not None and node.layer is Layer.SCRATCH and node.kind is Kind.FILE and node.parent is not None:
            self._scratch.sizes.move(node.ino, path)
            self._scratch.sizes.note(node.ino, path, node.store.stat(node).st_size)

    def _check_none_beside(self, *paths: WorkspacePath) -> None:
        """EXDEV: something lies beside a directory, or below it."""
        if self._scratch.directories and any(next(self._scratch.below(path), None) for path in paths):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    def _scratch_moving(self, origin: End, path: WorkspacePath) -> Iterator[RelatedChange | None]:
        """What lies beside a directory of the source that moves to `path`, and below: it must be scratch there too."""
        store = self._scratch.store
        for at, beside in list(self._scratch.below(origin.path)):
            there = WorkspacePath(path + at[len(origin.path) :])
            for name in beside.gone - beside.names.keys():
                yield _arriving_beside(joined(there, name), EXISTS)
            if beside.dressed:
                yield _arriving_beside(there, EXISTS)
            for name in list(beside.names):
                directory = store.directory(beside.upper)  # between two steps, other requests may close it
                st = os.stat(name, dir_fd=directory, follow_symlinks=False)
                yield _arriving_beside(joined(there, name), _leading(directory, name, st))
                if stat.S_ISDIR(st.st_mode):
                    for each in store.walk(store.directory(beside.upper), name):
                        if each is None:
                            yield None
                            continue
                        below = WorkspacePath(f"{joined(there, name)}/{each.path}")
                        yield _arriving_beside(below, _leading(each.directory, each.name, each.st))

    def _scratch_moved(self, source: End, target: End, permit: Permit, *, exchange: bool) -> None:
        """A directory of the source has moved: what lies beside it goes along, and it hides what had the name."""
        if self._scratch.directories and not exchange:
            self._scratch.discard(target.path, permit)
            self._scratch.move(target.parent, target.name, source.path, target.path, permit)

    def _end_again(self, header: Header, end: End) -> End:
        """The end as it is now, after other requests were served."""
        return self._end(header._replace(node_id=end.shown.id), end.name)

    def _end(self, header: Header, name: bytes) -> End:
        parent, directory = self._changing(header, Operation.RENAME, name)
        where = parent
        try:
            where, directory = self._where(parent, directory, name)
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            st = None
        return End(parent, where, directory, name, self._inodes.join(parent, name), st)

    def _judge_move(
        self, header: Header, source: End, target: End, *, exchange: bool, layer: Layer = Layer.SOURCE
    ) -> Generator[None, None, tuple[End, End]]:
        """Judge all that a rename moves, and let others be served between; the ends, as they are at the end.

        Until it is through, requests that would change what it judges wait (`_trees`). A change of the policy, of the
        leases, or by the companion, or of an end behind the mount, makes it begin anew. The caller makes the change in
        the same step, so nothing comes between the last look and the change. EBUSY: it had to begin anew too often.
        """
        moving = (source.st, target.st) if exchange else (source.st,)
        if not any(st is not None and stat.S_ISDIR(st.st_mode) for st in moving):
            return source, target  # `authorize` judges all
        caller = self._caller(header)
        for _ in range(_ATTEMPTS):
            turn, state = self._backing.turn, self._enforcer.state
            trees = [source.path, target.path]
            self._trees.extend(trees)
            try:
                yield from self._judge_parts(self._parts(source, target, exchange=exchange), layer, caller)
            except (Refused, WrongLayerError):
                raise
            except OSError as error:
                self._note_failure(header, source, target, error)
                raise
            finally:
                for tree in trees:
                    self._trees.remove(tree)
            if turn == self._backing.turn:
                return source, target
            before, source, target = (source, target), self._end_again(header, source), self._end_again(header, target)
            if source.st is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if state == self._enforcer.state and all(map(_is_same, before, (source, target))):
                return source, target
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def _judge_parts(self, parts: Iterable[RelatedChange | None], layer: Layer, caller: Caller) -> Iterator[None]:
        """`parts` has None where nothing is to be judged, and others may be served."""
        elsewhere = None
        for part in parts:
            if part is None:
                yield
                continue
            judged = part._replace(layer=layer) if layer else part
            elsewhere = self._enforcer.judge(judged, caller) or elsewhere
            yield
        if elsewhere is not None:
            raise elsewhere

    def _note_failure(self, header: Header, source: End, target: End, error: OSError) -> None:
        """Enter that a directory could not be looked through, so that nothing was moved."""
        assert source.st is not None
        request = Request(Operation.RENAME, source.path, kind_of(source.st.st_mode))
        self._enforcer.note(
            request,
            LEAVES,
            caller=self._caller(header),
            details={"to": target.path},
            error=error.errno or errno.EIO,
        )

    def _parts(self, source: End, target: End, *, exchange: bool) -> Iterator[RelatedChange | None]:
        """All that a rename moves, and what gives way to it."""
        assert source.st is not None
        yield RelatedChange(Request(Operation.RENAME, source.path, kind_of(source.st.st_mode)), LEAVES)
        yield from self._ends(source, target, exchange=exchange)
        yield from self._below(source, source.st, target.path)
        if exchange and target.st is not None:
            yield from self._below(target, target.st, source.path)

    def _ends(self, source: End, target: End, *, exchange: bool) -> list[RelatedChange]:
        """What appears under the new name, and what becomes of that which has it."""
        assert source.st is not None
        parts = [self._arriving(source, source.st, target.path)]
        if target.st is not None:
            leaving = LEAVES if exchange else EXISTS
            parts.append(RelatedChange(Request(Operation.RENAME, target.path, kind_of(target.st.st_mode)), leaving))
            if exchange:
                parts.append(self._arriving(target, target.st, source.path))
        return parts

    def _arriving(self, origin: End, st: os.stat_result, path: WorkspacePath) -> RelatedChange:
        request = Request(Operation.RENAME, path, kind_of(st.st_mode))
        return RelatedChange(request, self._appearing(origin.directory, origin.name, st, request))

    def _below(self, origin: End, st: os.stat_result, path: WorkspacePath) -> Iterator[RelatedChange | None]:
        """Everything below a directory that moves to `path`: it leaves one path and appears at another."""
        if kind_of(st.st_mode) is not Kind.DIRECTORY:
            return
        if self._held.directories:
            yield from self._held_moving(origin, path)
        if self._scratch.directories and not origin.parent.layer:
            yield from self._scratch_moving(origin, path)
        # The descriptor in `origin` may have been closed since the first step.
        for below in self._backing.walk(origin.parent.store.directory(origin.parent), origin.name):
            if below is None:
                yield None
                continue
            kind = kind_of(below.st.st_mode)
            leaving = WorkspacePath(f"{origin.path}/{below.path}")
            # What the source has at a scratch path goes along with its directory.
            yield RelatedChange(Request(Operation.RENAME, leaving, kind), LEAVES, None)
            request = Request(Operation.RENAME, WorkspacePath(f"{path}/{below.path}"), kind)
            context = self._appearing(below.directory, below.name, below.st, request)
            if not origin.parent.layer:
                context = context._replace(carried=True)
            yield RelatedChange(request, context, None)

    def _renamed(
        self,
        source: End,
        st: os.stat_result,
        moved: Node | None,
        target: End,
        home: End,
        other: Node | None,
        *,
        exchange: bool,
    ) -> None:
        """What was moved lies in `home` now, and what was in `target` has given way or moved the other way."""
        if target.st is not None and exchange:
            self._moved(other, home, source, target.st)
        else:
            self._did_name(source.parent, source.name, 0)
        if target.st is not None and not exchange:
            self._left(other, target.parent, target.name, target.st)
        self._moved(moved, source, home, st)

    def _moved(self, node: Node | None, origin: End, target: End, st: os.stat_result) -> None:
        self._did_name(target.parent, target.name, st.st_ino)
        if node is None:
            return
        node.told = once_moved(st)
        if node.parent is origin.parent and node.name == origin.name:
            self._inodes.rename(node, target.parent, target.name)
        else:
            self._inodes.drop_link(node.ino, origin.parent, origin.name)
            self._inodes.note_link(node.ino, target.parent, target.name)

    # -- counting

    def _left(self, node: Node | None, parent: Node, name: bytes, st: os.stat_result) -> None:
        super()._left(node, parent, name, st)
        if parent.layer is not Layer.SCRATCH:
            return
        self._scratch.sizes.add_names(self._inodes.join(parent, name), -1)
        if node is None and (st.st_nlink == 1 or stat.S_ISDIR(st.st_mode)):
            self._scratch.sizes.drop(st.st_ino + parent.store.numbers)

    def _forget_node(self, node_id: int, count: int) -> None:
        node = self._nodes.get(node_id)
        super()._forget_node(node_id, count)
        if node is not None and node.layer is Layer.SCRATCH and node.parent is None and node.lookups <= 0:
            self._scratch.sizes.drop(node.ino)


def _arriving_beside(path: WorkspacePath, context: Context) -> RelatedChange:
    return RelatedChange(Request(Operation.RENAME, path), context, Layer.SCRATCH)


def _leading(directory: int, name: bytes, st: os.stat_result) -> Context:
    """Of something in the layer: that it exists, and where it leads if it is a symlink."""
    if not stat.S_ISLNK(st.st_mode):
        return EXISTS
    return EXISTS._replace(target=os.fsdecode(os.readlink(name, dir_fd=directory)))


def _is_same(one: End, other: End) -> bool:
    """Whether an end of a rename is where it was, and what it was."""
    if one.path != other.path or one.parent is not other.parent or one.st is None or other.st is None:
        return one.path == other.path and one.st is other.st
    return (one.st.st_ino, one.st.st_dev) == (other.st.st_ino, other.st.st_dev)


def _stays(_directory: int, _name: bytes, _leave: Permit) -> None:
    """What the source has is left as it is."""


def inode_number(directory: int, name: bytes) -> int:
    """The inode number that the name leads to; 0: to nothing."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return 0
