"""Handlers of RENAME and RENAME2. Both names are authorized, and everything below a moved directory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator
from functools import partial
from struct import Struct
from typing import Final

from bonobofs.audit.entry import REPLACES
from bonobofs.enforcement.authorizer import Admission, RelatedChange
from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse.external_changes import fingerprint_after_rename
from bonobofs.fuse.inode_table import Node, joined
from bonobofs.fuse.mount_context import LEAVES, NOTHING, Handler, Header, MountContext, Reply
from bonobofs.fuse.overlay import NAME
from bonobofs.fuse.overlay_ops import OverlayOps
from bonobofs.fuse.slices import Steps
from bonobofs.fuse.temp_files import End, TempFileOps, replaced_change
from bonobofs.policy import denials
from bonobofs.policy.decision import CrossLayerError, Layer, Permit, Refused, WrongLayerError
from bonobofs.policy.request import EXISTS, Context, Operation, Request, WorkspacePath, kind_of
from bonobofs.system import syscalls

_ATTEMPTS: Final = 3
"""Maximum of attempts to authorize a move."""


class RenameOps:
    """Handlers that rename."""

    def __init__(self, mount: MountContext, staged: TempFileOps, layers: OverlayOps) -> None:
        self._mount: Final = mount
        self._staged: Final = staged
        self._layers: Final = layers
        o = p.Opcode
        self.handlers: Final[dict[int, Handler]] = {
            o.RENAME: partial(self._rename, p.RENAME_IN),
            o.RENAME2: partial(self._rename, p.RENAME2_IN),
        }

    def _rename(self, form: Struct, header: Header, body: memoryview) -> Reply:
        target_id, flags = (*form.unpack_from(body), 0)[:2]
        old, new = p.strings(body[form.size :], 2)
        if flags & ~(syscalls.RENAME_NOREPLACE | syscalls.RENAME_EXCHANGE):
            raise os_error(errno.EINVAL)
        origin = self._end(header, old)
        target = self._end(header if target_id == header.node_id else header._replace(node_id=target_id), new)
        if _is_directory(origin.st) or (flags & syscalls.RENAME_EXCHANGE and _is_directory(target.st)):
            return self._rename_directory(header, origin, target, flags)
        try:
            if self._is_renamed_staged(header, origin, target, flags):
                return NOTHING
            permits = self._judge_ends(header, origin, target, exchange=bool(flags & syscalls.RENAME_EXCHANGE))
            return self._rename_in_a_layer(header, origin, target, permits, flags)
        except OSError as error:
            self._layers.show_cross_layer_denial(header, Operation.RENAME, origin.path, error)
            raise

    def _is_renamed_staged(self, header: Header, origin: End, target: End, flags: int) -> bool:
        """Rename a staged file. False: no staged file has these names. ENOENT: no file has the old name."""
        if self._mount.temp_files.directories and self._staged.rename_staged(header, origin, target, flags):
            return True
        if origin.st is None:
            raise os_error(errno.ENOENT)
        return False

    def _rename_directory(self, header: Header, origin: End, target: End, flags: int) -> Steps:
        exchange = bool(flags & syscalls.RENAME_EXCHANGE)
        try:
            if self._is_renamed_staged(header, origin, target, flags):
                return NOTHING
            origin, target, permits = yield from self._judge_move(header, origin, target, exchange=exchange)
            return self._rename_in_a_layer(header, origin, target, permits, flags)
        except OSError as error:
            self._layers.show_cross_layer_denial(header, Operation.RENAME, origin.path, error)
            raise

    def _rename_in_a_layer(self, header: Header, origin: End, target: End, permits: list[Permit], flags: int) -> bytes:
        """Rename in the source, or in the overlay if a permit is for the overlay or a directory is in it.

        EXDEV: the rename would cross layers (`_layer_of_move`).
        """
        exchange = bool(flags & syscalls.RENAME_EXCHANGE)
        details: dict[str, object] = {"to": target.path}
        if exchange:
            details["exchange"] = True
        layer = self._layer_of_move(origin, target, permits, exchange=exchange)
        if layer is not Layer.SOURCE:
            origin, target = self._ends_in_overlay(header, origin, target, permits, flags)
        else:
            self._check_source_ends(origin, target, exchange=exchange)
            if not exchange and target.st is not None and not _is_same_file(origin, target):
                details[REPLACES] = True
            details |= self._mount.preimages.before_rename(origin, target)
        assert origin.st is not None
        request = Request(Operation.RENAME, origin.path, kind_of(origin.st.st_mode))
        admission = self._mount.authorize(header, request, *permits, details=details, layer=layer)
        with admission:
            self._move(origin, target, flags, admission)
            if layer is Layer.SOURCE:
                other = target.parent, target.directory
                self._mount.preimages.record_dir_times(admission, origin.parent, origin.directory, other)
        return NOTHING

    def _layer_of_move(self, origin: End, target: End, permits: list[Permit], *, exchange: bool) -> Layer:
        """Return the layer in which a rename is made. EXDEV: it would move more than a file of the source to the
        overlay, or only some of the permits are for the overlay.
        """
        layers = [origin.parent.layer, target.parent.layer, *[permit.layer for permit in permits]]
        if layers.count(Layer.SOURCE) == len(layers):
            return Layer.SOURCE
        for end in (origin, target) if exchange else (origin,):
            if end.parent.layer is Layer.SOURCE and end.st is not None and not _can_be_copied(end.st):
                raise self._not_moved(end)
        for permit in permits:
            if permit.layer is not Layer.SCRATCH:
                raise WrongLayerError(permit)
        return Layer.SCRATCH

    def _check_source_ends(self, origin: End, target: End, *, exchange: bool) -> None:
        """Raise EXDEV for an exchange of directories that have upper directories, EBUSY for one that is in use."""
        ends = (origin, target) if exchange else (origin,)
        if exchange and any(next(self._mount.overlay.upper_dirs_below(end.path), None) for end in ends):
            raise os_error(errno.EXDEV)
        for end in ends:
            if _is_directory(end.st) and self._mount.is_in_use(end.path):
                raise os_error(errno.EBUSY)

    def _move(self, origin: End, target: End, flags: int, admission: Admission) -> None:
        """Rename in the layer of the permit. In the overlay, a file of the source under either name is hidden."""
        permit = admission.permit
        exchange, same = bool(flags & syscalls.RENAME_EXCHANGE), _is_same_file(origin, target)
        st, replaced, upper_target, store = origin.st, target.st, target, self._mount.source
        assert st is not None
        moved, other = self._mount.close_batch_of(origin.parent, st), None
        if replaced is not None and exchange:
            other = self._mount.close_batch_of(target.parent, replaced)
        elif replaced is not None and not same:
            other = self._pin_replaced(target, replaced, permit)
        if permit.layer is not Layer.SOURCE:
            upper_target, store = self._upper_end(target, permit), self._mount.overlay.store
        ends = origin.directory, origin.name, upper_target.directory, target.name
        rename = partial(store.rename, *ends, flags, permit)
        lost = None if permit.layer is not Layer.SOURCE or exchange or same else replaced
        self._mount.preimages.replace(admission, lost, other, target.directory, target.name, rename)
        if same:
            return
        if exchange and replaced is not None:
            self._note_moved(other, upper_target, origin, replaced)
        else:
            self._mount.mark_own_name(origin.parent, origin.name, 0)
        if replaced is not None and not exchange:
            self._mount.after_unlink(other, target.parent, target.name, replaced)
        self._note_moved(moved, origin, upper_target, st)
        if permit.layer is not Layer.SOURCE:
            if not exchange:
                self._move_in_overlay(origin, target, upper_target, permit)
            self._layers.note_size(moved, target.path)
            self._layers.note_size(other if exchange else None, origin.path)
        else:
            self._staged.move_staged(origin, target, exchange=exchange)
            self._move_upper(origin, target, permit, exchange=exchange)

    def _move_in_overlay(self, origin: End, target: End, upper_target: End, permit: Permit) -> None:
        self._layers.hide_name(origin.shown, origin.name, permit)
        self._layers.add_upper(target.shown, upper_target.parent, target.name)
        self._mount.overlay.sizes.add_names(origin.path, -1)

    def _pin_replaced(self, target: End, replaced: os.stat_result, permit: Permit) -> Node | None:
        if stat.S_ISDIR(replaced.st_mode):
            self._layers.check_shown_empty(target.parent, target.directory, target.name, target.path, permit)
        return self._mount.pin_for_removal(target.parent, target.directory, target.name, replaced)

    def _upper_end(self, target: End, permit: Permit) -> End:
        """Return the target in the upper layer."""
        overlay, parent = self._mount.overlay, target.parent
        if parent.layer is Layer.SOURCE:
            parent = overlay.ensure_upper_dir(target.shown, permit).node
            overlay.remove_upper_dir(target.path, permit)
        return target._replace(parent=parent, directory=overlay.store.directory(parent, changing=True))

    def _ends_in_overlay(
        self, header: Header, origin: End, target: End, permits: list[Permit], flags: int
    ) -> tuple[End, End]:
        """Return the ends of a rename in the overlay, after the files of the source are copied up."""
        exchange = bool(flags & syscalls.RENAME_EXCHANGE)
        if flags & syscalls.RENAME_NOREPLACE and target.st is not None:
            raise os_error(errno.EEXIST)
        # The checks of a directory hold in this slice only.
        at_once = _is_directory(origin.st) or _is_directory(target.st)
        origin = self._copied_up_end(header, origin, permits[0], at_once=at_once)
        if exchange:
            target = self._copied_up_end(header, target, permits[0], at_once=at_once)
        self._check_moved_quota(header, origin, target, exchange=exchange)
        return origin, target

    def _copied_up_end(self, header: Header, end: End, permit: Permit, *, at_once: bool) -> End:
        """Return the end after its file was copied up from the source."""
        if end.parent.layer is not Layer.SOURCE or end.st is None:
            return end
        node = self._mount.inodes.reference(end.parent, end.name, end.st)
        try:
            self._layers.copy_up(header, node, permit, at_once=at_once)
        finally:
            self._mount.forget_node(node.id, 1)
        parent, directory = self._layers.resolve_layer(end.shown, end.directory, end.name)
        st = os.stat(end.name, dir_fd=directory, follow_symlinks=False)
        return end._replace(parent=parent, directory=directory, st=st)

    def _check_moved_quota(self, header: Header, origin: End, target: End, *, exchange: bool) -> None:
        """Raise Refused if the move exceeds the quota of another [[scratch]].

        EXDEV for a directory that would change its quota.
        """
        policy = self._mount.enforcer.policy
        old, new = policy.scratch_table(origin.path), policy.scratch_table(target.path)
        if old is new or old is None or new is None:
            return
        for end, path in ((origin, target.path), (target, origin.path))[: 2 if exchange else 1]:
            assert end.st is not None
            if stat.S_ISDIR(end.st.st_mode):
                raise CrossLayerError(denials.TWO_SCRATCH)
            self._layers.check_quota(header, Request(Operation.RENAME, path), size=end.st.st_size, more=NAME)

    def _upper_changes(self, origin: End, path: WorkspacePath) -> Iterator[RelatedChange | None]:
        """Yield the changes of upper directories that move with a directory of the source.

        All must be scratch at the new path too.
        """
        store = self._mount.overlay.store
        for at, upper_dir in list(self._mount.overlay.upper_dirs_below(origin.path)):
            new_path = WorkspacePath(path + at[len(origin.path) :])
            for name in upper_dir.whiteouts - upper_dir.names.keys():
                yield _arriving_in_overlay(joined(new_path, name), EXISTS)
            if upper_dir.attrs_copied:
                yield _arriving_in_overlay(new_path, EXISTS)
            for name in list(upper_dir.names):
                directory = store.directory(upper_dir.node)  # other requests may close it between two slices
                st = os.stat(name, dir_fd=directory, follow_symlinks=False)
                yield _arriving_in_overlay(joined(new_path, name), _leading(directory, name, st))
                if stat.S_ISDIR(st.st_mode):
                    for each in store.walk(store.directory(upper_dir.node), name):
                        if each is None:
                            yield None
                            continue
                        below = WorkspacePath(f"{joined(new_path, name)}/{each.path}")
                        yield _arriving_in_overlay(below, _leading(each.directory, each.name, each.st))

    def _move_upper(self, origin: End, target: End, permit: Permit, *, exchange: bool) -> None:
        """Move the upper directories with their directory of the source, and remove that of the replaced one."""
        if self._mount.overlay.directories and not exchange:
            self._mount.overlay.remove_upper_dir(target.path, permit)
            self._mount.overlay.move_upper_dir(target.parent, target.name, origin.path, target.path, permit)

    def _end(self, header: Header, name: bytes) -> End:
        parent, directory = self._mount.parent_to_change(header, Operation.RENAME, name)
        layer_dir = parent
        try:
            layer_dir, directory = self._layers.resolve_layer(parent, directory, name)
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            st = None
        return End(parent, layer_dir, directory, name, self._mount.join(parent, name), st)

    def _judge_move(
        self, header: Header, origin: End, target: End, *, exchange: bool
    ) -> Generator[None, None, tuple[End, End, list[Permit]]]:
        """Authorize everything that a rename of a directory moves. Return the ends as they are then, and their permits.

        The content of a directory is authorized in slices. Meanwhile, requests that would change that content wait
        (`moving_trees`). The authorization starts again if the policy, the leases or an end of the rename changed, or
        the companion made a change. The caller renames in the slice of the last check, so nothing comes in between.
        EBUSY: the authorization was restarted too often.
        """
        for _ in range(_ATTEMPTS):
            request_number, state = self._mount.source.request_number, self._mount.enforcer.state
            trees = [origin.path, target.path]
            self._mount.moving_trees.extend(trees)
            try:
                permits = self._judge_ends(header, origin, target, exchange=exchange)
                yield from self._judge_below(header, origin, target, exchange=exchange)
            finally:
                for tree in trees:
                    self._mount.moving_trees.remove(tree)
            if request_number == self._mount.source.request_number:
                return origin, target, permits
            before = origin, target
            origin, target = [self._end(header._replace(node_id=end.shown.id), end.name) for end in before]
            if origin.st is None:
                raise os_error(errno.ENOENT)
            if state == self._mount.enforcer.state and all(map(_is_same, before, (origin, target))):
                return origin, target, self._judge_ends(header, origin, target, exchange=exchange)
        raise os_error(errno.EBUSY)

    def _judge_ends(self, header: Header, origin: End, target: End, *, exchange: bool) -> list[Permit]:
        """Return the permits for the names of the two ends. The first is for the old name."""
        assert origin.st is not None
        leaving = Request(Operation.RENAME, origin.path, kind_of(origin.st.st_mode))
        permits = [self._mount.enforcer.permit(leaving, LEAVES, self._mount.caller(header))]
        permits.append(self._mount.permit(header, self._arriving_end(origin, origin.st, target.path)))
        if target.st is not None:
            replaced = replaced_change(target, target.st, leaving.kind, exchange=exchange)
            permits.append(self._mount.permit(header, replaced))
            if exchange:
                permits.append(self._mount.permit(header, self._arriving_end(target, target.st, origin.path)))
        return permits

    def _judge_below(self, header: Header, origin: End, target: End, *, exchange: bool) -> Iterator[None]:
        """Authorize what is below the moved directories, and yield where other requests may be served."""
        moved = ((origin, target.path), (target, origin.path)) if exchange else ((origin, target.path),)
        wrong_layer: End | None = None
        try:
            for end, path in moved:
                for change in self._changes_below(end, path):
                    if change is not None:
                        permit = self._mount.permit(header, change)
                        expected = change.layer if end.parent.layer is Layer.SOURCE else Layer.SCRATCH
                        if expected is not None and permit.layer is not expected:
                            wrong_layer = end
                    yield
        except Refused:
            raise
        except OSError as error:
            self._note_failure(header, origin, target, error)
            raise
        if wrong_layer is not None:
            raise self._not_moved(wrong_layer)

    def _not_moved(self, end: End) -> CrossLayerError:
        """Return EXDEV for an end that is not a file, and would be moved to another layer."""
        is_scratch = end.parent.layer is Layer.SOURCE and self._mount.enforcer.policy.scratch_table(end.path)
        return CrossLayerError(denials.OF_SOURCE if is_scratch else denials.ELSEWHERE)

    def _note_failure(self, header: Header, origin: End, target: End, error: OSError) -> None:
        """Record that a directory could not be read, so that nothing was moved."""
        assert origin.st is not None
        request = Request(Operation.RENAME, origin.path, kind_of(origin.st.st_mode))
        self._mount.enforcer.record_call(
            request,
            LEAVES,
            caller=self._mount.caller(header),
            details={"to": target.path},
            error=error.errno or errno.EIO,
        )

    def _arriving_end(self, origin: End, st: os.stat_result, path: WorkspacePath) -> RelatedChange:
        return self._mount.arriving_change(Operation.RENAME, path, origin.directory, origin.name, st)

    def _changes_below(self, origin: End, path: WorkspacePath) -> Iterator[RelatedChange | None]:
        """Yield two changes for each name below a moved directory: it leaves its path, and appears at another.

        None: other requests may be served.
        """
        if origin.st is None or not stat.S_ISDIR(origin.st.st_mode):
            return
        if self._mount.temp_files.directories:
            yield from self._staged.staged_changes(origin, path)
        if self._mount.overlay.directories and origin.parent.layer is Layer.SOURCE:
            yield from self._upper_changes(origin, path)
        policy = self._mount.enforcer.policy if origin.parent.layer is Layer.SOURCE else None
        # The descriptor in `origin` may have been closed since the first slice.
        for below in self._mount.source.walk(origin.parent.store.directory(origin.parent), origin.name):
            if below is None:
                yield None
                continue
            leaving = WorkspacePath(f"{origin.path}/{below.path}")
            # The source's own files at scratch paths move with their directory. No other file moves to a scratch path.
            carried = policy is not None and policy.is_scratch(leaving.split("/"))
            context, layer = LEAVES._replace(carried=carried), None if carried else Layer.SOURCE
            yield RelatedChange(Request(Operation.RENAME, leaving, kind_of(below.st.st_mode)), context, layer)
            arriving = WorkspacePath(f"{path}/{below.path}")
            change = self._mount.arriving_change(Operation.RENAME, arriving, below.directory, below.name, below.st)
            yield change._replace(context=change.context._replace(carried=carried), layer=layer)

    def _note_moved(self, node: Node | None, origin: End, target: End, st: os.stat_result) -> None:
        self._mount.mark_own_name(target.parent, target.name, st.st_ino)
        if node is None:
            return
        node.fingerprint = fingerprint_after_rename(st)
        if node.parent is origin.parent and node.name == origin.name:
            self._mount.inodes.rename(node, target.parent, target.name)
        else:
            self._mount.inodes.drop_link(node.ino, origin.parent, origin.name)
            self._mount.inodes.note_link(node.ino, target.parent, target.name)


def _arriving_in_overlay(path: WorkspacePath, context: Context) -> RelatedChange:
    return RelatedChange(Request(Operation.RENAME, path), context, Layer.SCRATCH)


def _leading(directory: int, name: bytes, st: os.stat_result) -> Context:
    """Return the context of an existing file of the overlay, with its target if it is a symlink."""
    if not stat.S_ISLNK(st.st_mode):
        return EXISTS
    return EXISTS._replace(target=os.fsdecode(os.readlink(name, dir_fd=directory)))


def _is_directory(st: os.stat_result | None) -> bool:
    return st is not None and stat.S_ISDIR(st.st_mode)


def _can_be_copied(st: os.stat_result) -> bool:
    return stat.S_ISREG(st.st_mode) or stat.S_ISLNK(st.st_mode)


def _is_same_file(origin: End, target: End) -> bool:
    """Whether both names lead to one file, which renameat2(2) leaves as it is."""
    st, replaced = origin.st, target.st
    return st is not None and replaced is not None and os.path.samestat(st, replaced)


def _is_same(one: End, other: End) -> bool:
    """Whether an end of a rename is the same file in the same place."""
    is_absent = one.st is None and other.st is None
    return one.path == other.path and (is_absent or (one.parent is other.parent and _is_same_file(one, other)))
