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
from bonobofs.fuse.external_changes import fingerprint_after_rename
from bonobofs.fuse.inode_table import Node, kind_of
from bonobofs.fuse.mount_context import LEAVES, MOST_NAMES, NOTHING, CrossLayerError, Handler, Header, Reply
from bonobofs.fuse.overlay import NAME, UpperDir
from bonobofs.fuse.slices import Steps
from bonobofs.fuse.temp_files import End, TempFileOps
from bonobofs.fuse.temp_table import joined
from bonobofs.policy import messages
from bonobofs.policy.decision import Denied, Layer, Permit, Refused
from bonobofs.policy.request import EXISTS, Context, Kind, Operation, Request, WorkspacePath
from bonobofs.system import syscalls

Removal = Callable[[int, bytes, Permit], None]
_ATTEMPTS: Final = 3
"""How often the judgement of a move begins."""


class OverlayOps(TempFileOps):
    """What the handlers do where a path is scratch."""

    # -- where things are

    def _resolve_layer(self, parent: Node, directory: int, name: bytes) -> tuple[Node, int]:
        """The directory, of the source or beside it, in which that lies which is shown under the name.

        FileNotFoundError: the source has the name, and it is gone.
        """
        upper_dir = self._overlay.upper_dir(parent)
        if upper_dir is None:
            return parent, directory
        if name in upper_dir.names:
            return upper_dir.node, self._overlay.store.directory(upper_dir.node, changing=True)
        if name in upper_dir.whiteouts:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return parent, directory

    def _target_dir(
        self, header: Header, request: Request, parent: Node, directory: int, permit: Permit
    ) -> tuple[Node, int]:
        """The directory in which something new is to be made, as the verdict says. FileExistsError: the name is taken.

        Elsewhere: it should be made in the source, in a directory that the source does not have. Refused, ENOSPC: the
        disk has no space for it.
        """
        name = os.fsencode(request.path.rpartition("/")[2])
        if permit.layer is Layer.SCRATCH:
            self._check_quota(header, request, more=NAME)
            self._check_state_disk(header, request, NAME, 1)
        elif header.uid:
            self._source.check_reserve(NAME)
        if permit.layer is parent.layer:
            upper_dir = self._overlay.upper_dir(parent)
            if upper_dir is not None:
                upper_dir.whiteouts.discard(name)  # the policy says by now that it is no scratch: the source shows
            return parent, directory
        if parent.layer:
            raise WrongLayerError(permit)
        if permit.layer is Layer.STAGED:
            return parent, directory
        upper_dir = self._overlay.ensure_upper_dir(parent, permit)
        if name in upper_dir.names or (name not in upper_dir.whiteouts and inode_number(directory, name)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._overlay.remove_upper_dir(self._inodes.join(parent, name), permit)
        return upper_dir.node, self._overlay.store.directory(upper_dir.node, changing=True)

    def _add_upper(self, parent: Node, target_dir: Node, name: bytes) -> None:
        """Something lies under this name in `target_dir`, beside the directory in which it is shown."""
        if target_dir.layer is Layer.SCRATCH:
            self._overlay.sizes.add_names(self._inodes.join(parent, name), 1)
        if target_dir is not parent:
            upper_dir = self._overlay.directories[self._inodes.path(parent)]
            self._overlay.add_upper(upper_dir, name)

    def _hide_name(self, parent: Node, name: bytes, permit: Permit) -> None:
        """What was shown under this name, of the layer or of the source, is to be shown no more."""
        if permit.layer is Layer.SCRATCH and not parent.layer:
            upper_dir = self._overlay.ensure_upper_dir(parent, permit)
            below = inode_number(parent.store.directory(parent), name)
            self._overlay.hide(upper_dir, name, below=below > 0)
            self._own_effects.note_name(parent.ino, name, below)  # in the source nothing was done

    # -- reading

    def _lookup_upper(self, parent: Node, name: bytes) -> bytes | None:
        """The entry of a name that the layer has or hides; None: look in the source."""
        upper_dir = self._overlay.upper_dir(parent)
        if upper_dir is None:
            return None
        if name in upper_dir.names:
            return self._upper_entry(upper_dir, name)
        return self._no_entry if name in upper_dir.whiteouts else None

    def _upper_entry(self, upper_dir: UpperDir, name: bytes) -> bytes:
        return self._entry(upper_dir.node, name, self._overlay.store.stat_entry(upper_dir.node, name))

    # -- changing what the source has

    def _or_in_overlay(self, handler: Handler) -> Handler:
        """The handler of a change of a node, which is made in the layer where the verdict says so."""

        def handle(header: Header, body: memoryview) -> Reply:
            try:
                return handler(header, body)
            except WrongLayerError:
                node = self._node(header.node_id)
                raised = self._copy_up(header, node)
                if raised is None:
                    raise
                return handler(header._replace(node_id=raised.id), body)

        return handle

    def _copy_up(self, header: Header, node: Node) -> Node | None:
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
            self._check_state_disk(header, request, NAME, 1)
            upper_dir = self._overlay.ensure_upper_dir(node, verdict)
            if not upper_dir.attrs_copied:
                self._overlay.store.copy_attributes(upper_dir.node, node, verdict)
                upper_dir.attrs_copied = True
            return upper_dir.node
        st = node.store.stat(node)
        if node.kind is Kind.FILE:
            self._check_scratch_alone(header, node, request)
            self._check_quota(header, request, node.ino, st.st_size, more=NAME)
        self._check_state_disk(header, request, st.st_blocks * 512 + NAME, 1)
        self._close_batch(node)
        for parent, name in self._overlay.copy_up(node, verdict):
            self._notifications.entry(parent.id, name)  # another file from now on
        self._notifications.inode(node.id, -1, 0)
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
                leads = node.store.leads_to(parent, name, node)
            except OSError:
                leads = False
            if leads:
                raise self._enforcer.refuse(
                    Denied(*messages.HARDLINK, request.path, request.operation), self._caller(header)
                )

    def _check_quota(self, header: Header, request: Request, number: int = -1, size: int = 0, *, more: int = 0) -> None:
        """Raises Refused where its [[scratch]] has no room for a file of this size, and `more` bytes beside it."""
        denied = self._overlay.sizes.refusal(request, number, size, more=more)
        if denied is not None:
            raise self._enforcer.refuse(denied, self._caller(header))

    def _check_free_space(self, header: Header, node: Node, request: Request, needed: int) -> None:
        """Raise ENOSPC where a change of the node would allocate `needed` bytes that are reserved."""
        if node.layer is not Layer.SCRATCH:
            node.store.check_reserve(needed)
        elif needed > 0:
            self._check_state_disk(header, request, needed)

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
        self._check_none_staged(path)
        if where.layer or not (permit.layer or self._overlay.directories):
            return
        upper_dir = self._overlay.directories.get(path)
        full = upper_dir is not None and bool(upper_dir.names)
        if permit.layer:
            gone = upper_dir.whiteouts if upper_dir is not None else set()
            full = full or any(each not in gone for each in self._source.names_in(directory, name))
        if full:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    # -- moving

    def _rename_in_overlay(self, header: Header, source: End, target: End, flags: int) -> Steps:
        """A rename of which both ends are scratch. EXDEV: they are not, or a directory of the source would be moved."""
        exchange = bool(flags & syscalls.RENAME_EXCHANGE)
        if flags & syscalls.RENAME_NOREPLACE and target.st is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        source = self._copied_up_end(header, source)
        if exchange and target.st is not None:
            target = self._copied_up_end(header, target)
        source, target = yield from self._judge_move(header, source, target, exchange=exchange, layer=Layer.SCRATCH)
        assert source.st is not None
        request = Request(Operation.RENAME, source.path, kind_of(source.st.st_mode))
        parts = [part._replace(layer=Layer.SCRATCH) for part in self._end_changes(source, target, exchange=exchange)]
        self._check_moved_quota(header, source, target, exchange=exchange)
        details = {"to": target.path, "exchange": True} if exchange else {"to": target.path}
        with self._enforcer.authorize(
            request, LEAVES, *parts, caller=self._caller(header), details=details, layer=Layer.SCRATCH
        ) as permit:
            self._rename_in_upper(source, source.st, target, permit, exchange=exchange)
        return NOTHING

    def _rename_in_upper(self, source: End, st: os.stat_result, target: End, permit: Permit, *, exchange: bool) -> None:
        """Move a name of the layer. What the source has under the new name is only shown no more."""
        over, store = target.st, self._overlay.store
        moved, other = self._close_batch_of(source.parent, st), None
        if over is not None and exchange:
            other = self._close_batch_of(target.parent, over)
        elif over is not None:
            other = self._pin_replaced_upper(target, over, permit)
        target_dir = target.parent if target.parent.layer else self._overlay.ensure_upper_dir(target.shown, permit).node
        if target_dir is not target.parent:
            self._overlay.remove_upper_dir(target.path, permit)
        above = target._replace(parent=target_dir, directory=store.directory(target_dir, changing=True))
        ends = source.directory, source.name, above.directory, target.name
        self._unpin_on_failure(other, lambda: store.rename(*ends, syscalls.RENAME_EXCHANGE if exchange else 0, permit))
        self._note_renamed(source, st, moved, target, above, other, exchange=exchange)
        if not exchange:
            self._hide_name(source.shown, source.name, permit)
            self._add_upper(target.shown, target_dir, target.name)
            self._overlay.sizes.add_names(source.path, -1)
        self._note_size(moved, target.path)
        if exchange:
            self._note_size(other, source.path)

    def _pin_replaced_upper(self, target: End, over: os.stat_result, permit: Permit) -> Node | None:
        if stat.S_ISDIR(over.st_mode):
            self._check_shown_empty(target.parent, target.directory, target.name, target.path, permit)
        return self._pin_for_removal(target.parent, target.directory, target.name, over)

    def _copied_up_end(self, header: Header, end: End) -> End:
        """The end, of what was brought up into the layer if the source had it. EXDEV: it cannot be."""
        if end.parent.layer or end.st is None:
            return end
        if not stat.S_ISREG(end.st.st_mode) and not stat.S_ISLNK(end.st.st_mode):
            raise CrossLayerError(
                messages.OF_SOURCE if self._enforcer.policy.scratch_table(end.path) else messages.ELSEWHERE
            )
        node = self._inodes.reference(end.parent, end.name, end.st)
        try:
            if self._copy_up(header, node) is None:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        finally:
            self._forget_node(node.id, 1)
        parent, directory = self._resolve_layer(end.shown, end.directory, end.name)
        st = os.stat(end.name, dir_fd=directory, follow_symlinks=False)
        return end._replace(parent=parent, directory=directory, st=st)

    def _check_moved_quota(self, header: Header, source: End, target: End, *, exchange: bool) -> None:
        """Raises Refused where another [[scratch]] counts the file now and has no room, EXDEV for directories."""
        policy = self._enforcer.policy
        old, new = policy.scratch_table(source.path), policy.scratch_table(target.path)
        if old is new or old is None or new is None:
            return
        for end, path in ((source, target.path), (target, source.path))[: 2 if exchange else 1]:
            assert end.st is not None
            if stat.S_ISDIR(end.st.st_mode):
                raise CrossLayerError(messages.TWO_SCRATCH)
            self._check_quota(header, Request(Operation.RENAME, path), size=end.st.st_size, more=NAME)

    def _note_size(self, node: Node | None, path: WorkspacePath) -> None:
        """A file of the layer may have another size now, or count towards another [[scratch]]."""
        if node is not None and node.layer is Layer.SCRATCH and node.kind is Kind.FILE and node.parent is not None:
            self._overlay.sizes.recount(node.ino, path)
            self._overlay.sizes.set_size(node.ino, path, node.store.stat(node).st_size)

    def _check_no_upper(self, *paths: WorkspacePath) -> None:
        """EXDEV: something lies beside a directory, or below it."""
        if self._overlay.directories and any(next(self._overlay.upper_dirs_below(path), None) for path in paths):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    def _upper_changes(self, origin: End, path: WorkspacePath) -> Iterator[RelatedChange | None]:
        """What lies beside a directory of the source that moves to `path`, and below: it must be scratch there too."""
        store = self._overlay.store
        for at, upper_dir in list(self._overlay.upper_dirs_below(origin.path)):
            there = WorkspacePath(path + at[len(origin.path) :])
            for name in upper_dir.whiteouts - upper_dir.names.keys():
                yield _arriving_in_overlay(joined(there, name), EXISTS)
            if upper_dir.attrs_copied:
                yield _arriving_in_overlay(there, EXISTS)
            for name in list(upper_dir.names):
                directory = store.directory(upper_dir.node)  # between two steps, other requests may close it
                st = os.stat(name, dir_fd=directory, follow_symlinks=False)
                yield _arriving_in_overlay(joined(there, name), _leading(directory, name, st))
                if stat.S_ISDIR(st.st_mode):
                    for each in store.walk(store.directory(upper_dir.node), name):
                        if each is None:
                            yield None
                            continue
                        below = WorkspacePath(f"{joined(there, name)}/{each.path}")
                        yield _arriving_in_overlay(below, _leading(each.directory, each.name, each.st))

    def _move_upper(self, source: End, target: End, permit: Permit, *, exchange: bool) -> None:
        """A directory of the source has moved: what lies beside it goes along, and it hides what had the name."""
        if self._overlay.directories and not exchange:
            self._overlay.remove_upper_dir(target.path, permit)
            self._overlay.move_upper_dir(target.parent, target.name, source.path, target.path, permit)

    def _end_again(self, header: Header, end: End) -> End:
        """The end as it is now, after other requests were served."""
        return self._end(header._replace(node_id=end.shown.id), end.name)

    def _end(self, header: Header, name: bytes) -> End:
        parent, directory = self._parent_to_change(header, Operation.RENAME, name)
        where = parent
        try:
            where, directory = self._resolve_layer(parent, directory, name)
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            st = None
        return End(parent, where, directory, name, self._inodes.join(parent, name), st)

    def _judge_move(
        self, header: Header, source: End, target: End, *, exchange: bool, layer: Layer = Layer.SOURCE
    ) -> Generator[None, None, tuple[End, End]]:
        """Authorize everything that a rename moves, in slices. Return the two ends as they are afterwards.

        Until it ends, requests that would change what it checks wait (`_moving_trees`). It starts again when the
        policy, the leases, or an end of the rename have changed, or the companion has made a change. The caller makes
        the change in the same slice, so nothing comes between the last check and the change. EBUSY: it started too
        often.
        """
        moving = (source.st, target.st) if exchange else (source.st,)
        if not any(st is not None and stat.S_ISDIR(st.st_mode) for st in moving):
            return source, target  # `authorize` judges all
        caller = self._caller(header)
        for _ in range(_ATTEMPTS):
            request_number, state = self._source.request_number, self._enforcer.state
            trees = [source.path, target.path]
            self._moving_trees.extend(trees)
            try:
                yield from self._judge_changes(self._moved_changes(source, target, exchange=exchange), layer, caller)
            except (Refused, WrongLayerError):
                raise
            except OSError as error:
                self._note_failure(header, source, target, error)
                raise
            finally:
                for tree in trees:
                    self._moving_trees.remove(tree)
            if request_number == self._source.request_number:
                return source, target
            before, source, target = (source, target), self._end_again(header, source), self._end_again(header, target)
            if source.st is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if state == self._enforcer.state and all(map(_is_same, before, (source, target))):
                return source, target
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def _judge_changes(self, parts: Iterable[RelatedChange | None], layer: Layer, caller: Caller) -> Iterator[None]:
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

    def _moved_changes(self, source: End, target: End, *, exchange: bool) -> Iterator[RelatedChange | None]:
        """All that a rename moves, and what gives way to it."""
        assert source.st is not None
        yield RelatedChange(Request(Operation.RENAME, source.path, kind_of(source.st.st_mode)), LEAVES)
        yield from self._end_changes(source, target, exchange=exchange)
        yield from self._changes_below(source, source.st, target.path)
        if exchange and target.st is not None:
            yield from self._changes_below(target, target.st, source.path)

    def _end_changes(self, source: End, target: End, *, exchange: bool) -> list[RelatedChange]:
        """What appears under the new name, and what becomes of that which has it."""
        assert source.st is not None
        parts = [self._arriving_change(source, source.st, target.path)]
        if target.st is not None:
            leaving = LEAVES if exchange else EXISTS
            parts.append(RelatedChange(Request(Operation.RENAME, target.path, kind_of(target.st.st_mode)), leaving))
            if exchange:
                parts.append(self._arriving_change(target, target.st, source.path))
        return parts

    def _arriving_change(self, origin: End, st: os.stat_result, path: WorkspacePath) -> RelatedChange:
        request = Request(Operation.RENAME, path, kind_of(st.st_mode))
        return RelatedChange(request, self._new_name_context(origin.directory, origin.name, st, request))

    def _changes_below(self, origin: End, st: os.stat_result, path: WorkspacePath) -> Iterator[RelatedChange | None]:
        """Everything below a directory that moves to `path`: it leaves one path and appears at another."""
        if kind_of(st.st_mode) is not Kind.DIRECTORY:
            return
        if self._temp_files.directories:
            yield from self._staged_changes(origin, path)
        if self._overlay.directories and not origin.parent.layer:
            yield from self._upper_changes(origin, path)
        # The descriptor in `origin` may have been closed since the first step.
        for below in self._source.walk(origin.parent.store.directory(origin.parent), origin.name):
            if below is None:
                yield None
                continue
            kind = kind_of(below.st.st_mode)
            leaving = WorkspacePath(f"{origin.path}/{below.path}")
            # What the source has at a scratch path goes along with its directory.
            yield RelatedChange(Request(Operation.RENAME, leaving, kind), LEAVES, None)
            request = Request(Operation.RENAME, WorkspacePath(f"{path}/{below.path}"), kind)
            context = self._new_name_context(below.directory, below.name, below.st, request)
            if not origin.parent.layer:
                context = context._replace(carried=True)
            yield RelatedChange(request, context, None)

    def _note_renamed(
        self,
        source: End,
        st: os.stat_result,
        moved: Node | None,
        target: End,
        target_dir: End,
        other: Node | None,
        *,
        exchange: bool,
    ) -> None:
        """What was moved lies in `target_dir` now, and what was in `target` has given way or moved the other way."""
        if target.st is not None and exchange:
            self._note_moved(other, target_dir, source, target.st)
        else:
            self._mark_own_name(source.parent, source.name, 0)
        if target.st is not None and not exchange:
            self._after_unlink(other, target.parent, target.name, target.st)
        self._note_moved(moved, source, target_dir, st)

    def _note_moved(self, node: Node | None, origin: End, target: End, st: os.stat_result) -> None:
        self._mark_own_name(target.parent, target.name, st.st_ino)
        if node is None:
            return
        node.fingerprint = fingerprint_after_rename(st)
        if node.parent is origin.parent and node.name == origin.name:
            self._inodes.rename(node, target.parent, target.name)
        else:
            self._inodes.drop_link(node.ino, origin.parent, origin.name)
            self._inodes.note_link(node.ino, target.parent, target.name)

    # -- counting

    def _after_unlink(self, node: Node | None, parent: Node, name: bytes, st: os.stat_result) -> None:
        super()._after_unlink(node, parent, name, st)
        if parent.layer is not Layer.SCRATCH:
            return
        self._overlay.sizes.add_names(self._inodes.join(parent, name), -1)
        if node is None and (st.st_nlink == 1 or stat.S_ISDIR(st.st_mode)):
            self._overlay.sizes.forget(st.st_ino + parent.store.numbers)

    def _forget_node(self, node_id: int, count: int) -> None:
        node = self._nodes.get(node_id)
        super()._forget_node(node_id, count)
        if node is not None and node.layer is Layer.SCRATCH and node.parent is None and node.lookups <= 0:
            self._overlay.sizes.forget(node.ino)


def _arriving_in_overlay(path: WorkspacePath, context: Context) -> RelatedChange:
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
