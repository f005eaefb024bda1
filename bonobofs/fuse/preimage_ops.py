"""What the handlers do to keep pre-images: the attributes go into the intent, the content into the store.

Only changes of the source are kept. Scratch and staged files are the session's own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from bonobofs.audit.entry import (
    AFTER,
    BEFORE,
    DIR_TIMES,
    LOSS,
    NEW_VALUE,
    NOT_KEPT,
    OLD_VALUE,
    REPLACED,
    TO_DIR_TIMES,
    state_text,
)
from bonobofs.enforcement.authorizer import Admission
from bonobofs.errors import TrailError
from bonobofs.fuse.external_changes import fingerprint_of
from bonobofs.fuse.fd_cache import R, W, duplicates
from bonobofs.fuse.inode_table import UNKNOWN, Node
from bonobofs.fuse.slices import Busy, LongCall, Steps
from bonobofs.policy.decision import Layer, Permit
from bonobofs.undo.preimages import (
    COPIED_AT_ONCE,
    LONGEST_XATTR,
    UNREADABLE,
    PathKeeper,
    PreimageStore,
    removal_details,
)

if TYPE_CHECKING:
    from bonobofs.enforcement.write_batches import WriteBatch
    from bonobofs.fuse.layer_store import LayerStore
    from bonobofs.fuse.mount_context import MountContext
    from bonobofs.fuse.temp_files import End

Details = dict[str, Any]


class PreimageOps:
    """Keeps the pre-images of one mount. Without a store it does nothing."""

    def __init__(self, mount: MountContext) -> None:
        self._mount: Final = mount
        self.store: PreimageStore | None = None
        self._in_use: Final[set[int]] = set()
        """Numbers of the pre-images that are files which the kernel still knows."""
        self._unended: Mapping[int, int] = {}  # PathKeeper.linked

    def path_keeper(self) -> PathKeeper | None:
        """Return the keeper of changes that the companion makes in the source by path."""
        if self.store is None:
            return None
        keeper = PathKeeper(self._mount.source.root, self.store, self._note_linked_inode)
        self._unended = keeper.linked
        return keeper

    def _note_linked_inode(self, ino: int, number: int) -> None:
        node = self._mount.inodes.find(ino)
        if node is not None:
            self._set_kept(node, number)
            node.fingerprint = UNKNOWN  # the link has changed its change time

    def _set_kept(self, node: Node, number: int) -> None:
        self._in_use.discard(node.kept)
        node.kept = number
        if number > 0:
            self._in_use.add(number)

    def forget(self, node: Node) -> None:
        """Note that the kernel has forgotten a kept file: no program can write to it through the mount any more."""
        self._in_use.discard(node.kept)

    def list_in_use(self) -> list[int]:
        """Return the numbers of the pre-images that are files which the kernel still knows, or that still have a name.

        All others are final. Close the pack, so that its copies are final, too.
        """
        if self.store is not None:
            self.store.close_pack()
        return [*self._in_use, *self._unended]

    def state(self, node: Node | None, st: os.stat_result) -> str:
        """Return the state of a file for the record. A name in the store does not count."""
        return state_text(st, st.st_nlink if node is None else node.shown_links(st))

    def before_removal(self, directory: int, name: bytes, st: os.stat_result) -> Details | None:
        """Return the details of an intent to remove a name of the source."""
        if self.store is None:
            return None
        return removal_details(directory, name, st)

    def before_rename(self, source: End, target: End) -> Details:
        """Return the details of an intent to rename in the source."""
        if self.store is None or source.st is None:
            return {}
        details: Details = {BEFORE: state_text(source.st)}
        if target.st is not None:
            before = self.before_removal(target.directory, target.name, target.st) or {}
            details[REPLACED] = before.pop(BEFORE)
            details |= before
        return details

    def before_change(self, node: Node, st: os.stat_result) -> Details | None:
        """Return the details of an intent to change a node of the source."""
        if self.store is None or node.layer is not Layer.SOURCE:
            return None
        return {BEFORE: self.state(node, st)}

    def after(self, node: Node, admission: Admission, st: os.stat_result) -> None:
        """Add the state of a node after a change of the source to the outcome."""
        if self.store is not None and node.layer is Layer.SOURCE:
            admission.details = {**(admission.details or {}), AFTER: self.state(node, st)}

    def after_failure(self, node: Node, before: os.stat_result, admission: Admission) -> None:
        """If a failed change of the source has changed a node, add its state to the outcome."""
        with suppress(OSError):
            st = node.store.recent_stat(node)
            if fingerprint_of(st) == fingerprint_of(before):
                self._drop(node, admission.seq)
            else:
                node.fingerprint = fingerprint_of(st)
                self.after(node, admission, st)

    def after_failed_write(self, node: Node, batch: WriteBatch, st: os.stat_result) -> None:
        """If a failed write has changed a file, even its times only, add its state to the batch."""
        if fingerprint_of(st) != node.fingerprint:
            batch.state, batch.size, node.fingerprint = st, st.st_size, fingerprint_of(st)
        elif batch.state is None:
            self._drop(node, batch.seq)

    def _drop(self, node: Node, number: int) -> None:
        """Remove the pre-image of a change that changed nothing. The next change of the file keeps one of its own."""
        node.kept_turn = -1
        if self.store is not None and node.layer is Layer.SOURCE:
            self.store.drop(number)

    def after_name(self, admission: Admission, parent: Node, directory: int, name: bytes) -> None:
        """Add the state of the file that a change of the source has named to the outcome, as `record_dir_times`."""
        if self.store is not None:
            with suppress(OSError):
                st = os.stat(name, dir_fd=directory, follow_symlinks=False)
                admission.details = {**(admission.details or {}), AFTER: state_text(st)}
        self.record_dir_times(admission, parent, directory)

    def record_dir_times(
        self, admission: Admission, parent: Node, directory: int, other: tuple[Node, int] | None = None
    ) -> None:
        """Add the times of a directory of the source in which a change has changed a name to the outcome.

        `other`: the directory of the new path of a rename, and its descriptor.
        """
        if self.store is not None and parent.layer is Layer.SOURCE:
            details = admission.details
            if details is None:
                details = admission.details = {}
            details[DIR_TIMES] = self.dir_times(parent, directory)
            if other is not None and other[0] is not parent:
                details[TO_DIR_TIMES] = self.dir_times(*other)

    def dir_times(self, parent: Node, directory: int) -> str:
        """Return the times of a directory before and after the change of a name in it; "" without a store."""
        if self.store is None:
            return ""
        before = parent.mtime
        after = parent.mtime = os.fstat(directory).st_mtime_ns
        return f"{before} {after}"

    def note_after(self, node: Node, admission: Admission) -> os.stat_result:
        """As `after`; return the state. OSError."""
        st = node.store.recent_stat(node)
        self.after(node, admission, st)
        return st

    def before_xattr(self, node: Node, name: bytes, value: bytes | None) -> Details:
        """Return the details of an intent to give an attribute of a node the value; None: to remove it."""
        if self.store is None or node.layer is not Layer.SOURCE:
            return {}
        try:
            old = node.store.get_xattr(node, name)
        except OSError:
            old = None
        details: Details = {BEFORE: self.state(node, node.store.recent_stat(node))}
        if max(len(old or b""), len(value or b"")) <= LONGEST_XATTR:
            details[OLD_VALUE] = None if old is None else old.hex()
            details[NEW_VALUE] = None if value is None else value.hex()
        return details

    # -- names

    def unlink(
        self,
        layer: LayerStore,
        admission: Admission,
        st: os.stat_result,
        node: Node | None,
        directory: int,
        name: bytes,
        permit: Permit,
    ) -> None:
        """Remove a name of the source, and keep the content if no other name has it."""
        store = self.store
        if store is None or layer.layer is not Layer.SOURCE or not self._is_lost(st):
            layer.unlink(directory, name, permit)
            return
        reason = store.refusal(st)
        if not reason and store.take(admission.seq, directory, name, permit):
            self._note_linked(store, admission, st, node)
            return
        self._copy_before_loss(store, admission, st, node, directory, name, reason)
        layer.unlink(directory, name, permit)

    def replace(
        self,
        admission: Admission,
        st: os.stat_result | None,
        node: Node | None,
        directory: int,
        name: bytes,
        rename: Callable[[], None],
    ) -> None:
        """Rename a file to a name of the source, and keep the file `st` that had it. If it fails, unpin `node`."""
        store = self.store
        if store is not None and st is not None and self._is_lost(st):
            reason = store.refusal(st)
            if not reason and store.link(admission.seq, directory, name):
                self._note_linked(store, admission, st, node)
            else:
                self._copy_before_loss(store, admission, st, node, directory, name, reason)
        try:
            rename()
        except OSError:
            if store is not None and st is not None:
                store.drop(admission.seq)
            if node is not None:
                self._set_kept(node, 0)
                node.store.unpin(node)
            raise

    def _is_lost(self, st: os.stat_result) -> bool:
        return stat.S_ISREG(st.st_mode) and st.st_nlink == 1

    def _note_linked(self, store: PreimageStore, admission: Admission, st: os.stat_result, node: Node | None) -> None:
        store.count(st)
        if node is not None:
            self._set_kept(node, admission.seq)

    def _copy_before_loss(
        self,
        store: PreimageStore,
        admission: Admission,
        st: os.stat_result,
        node: Node | None,
        directory: int,
        name: bytes,
        reason: str,
    ) -> None:
        if not reason:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            except OSError:
                reason = UNREADABLE
            else:
                store.count(st)
                if st.st_size > COPIED_AT_ONCE:
                    store.copy_later(admission.seq, fd, st)
                    if node is not None:
                        self._set_kept(node, -admission.seq)
                else:
                    reason = store.copy(admission.seq, fd, st)
                    os.close(fd)
        if reason:
            admission.details = {**(admission.details or {}), NOT_KEPT: reason}

    # -- content

    def detach(self, node: Node) -> None:
        """Copy the pre-image of a removed file that is still open, because its content will change.

        Busy: a thread copies it first, because it is large. If there is no copy, the trail says why.
        """
        number, store = node.kept, self.store
        assert store is not None
        if number < 0:
            if store.is_copying:
                raise Busy(self._wait_for_copies(store, node))
            self._set_kept(node, 0)
            return
        reason = UNREADABLE
        with suppress(OSError):
            fd = node.store.file(node, R | W)  # the write will need it
            st = os.fstat(fd)
            reason = store.refusal_of_copy(st) if st.st_nlink else ""  # 0: it has expired
            if st.st_nlink and not reason:
                if st.st_size > COPIED_AT_ONCE:
                    raise Busy(self._detach_in_thread(store, node, st))
                reason = store.replace(number, fd, st)
        self._note_detached(store, node, reason)

    def _detach_in_thread(self, store: PreimageStore, node: Node, st: os.stat_result) -> Steps:
        number = node.kept
        reason = yield from self._copy_in_thread(node, lambda fd: store.replace(number, fd, st))
        self._note_detached(store, node, reason)
        return b""

    def _note_detached(self, store: PreimageStore, node: Node, reason: str) -> None:
        """Note that the inode of a node is no longer a pre-image; a `reason` says why no copy is."""
        if reason:
            store.drop(node.kept)
            store.losses.append((node.kept, reason))
            with suppress(TrailError):  # then the change is refused
                self.record_losses()
        self._set_kept(node, 0)
        with suppress(OSError):
            node.fingerprint = fingerprint_of(os.fstat(node.store.file(node, W)))

    def _wait_for_copies(self, store: PreimageStore, node: Node) -> Steps:
        yield from self._mount.make_in_thread(node, store.wait_for_copies)
        return b""

    def record_losses(self) -> None:
        """Record which contents could not be copied after their changes. TrailError."""
        while self.store is not None and self.store.losses:
            number, reason = self.store.losses[0]
            self._mount.enforcer.trail.event(LOSS, {"change": number, NOT_KEPT: reason})
            self.store.losses.popleft()

    def end(self) -> None:
        """Wait for the copies, and record losses. TrailError."""
        if self.store is not None:
            self.store.wait_for_copies()
            self.record_losses()

    def keep_content(self, node: Node, number: int, st: os.stat_result) -> str:
        """Keep the content of a file before its first change in this turn. Return why it was not kept, or "".

        Busy: a thread copies it first, because it is large.
        """
        store = self._first_in_turn(node, st)
        if store is None:
            return ""
        reason = store.refusal(st)
        if reason:
            return reason
        try:
            fd = node.store.file(node, R | W)
        except OSError:
            return UNREADABLE
        if st.st_size > COPIED_AT_ONCE:  # a clone, too, first writes what is dirty to the disk
            node.kept_turn = -1
            raise Busy(self._copy_first(store, node, number, st))
        store.count(st)
        return store.copy(number, fd, st)

    def keep_content_in_thread(
        self, node: Node, admission: Admission, st: os.stat_result
    ) -> Generator[LongCall[Any], None, None]:
        """As `keep_content`, within the steps of a long request. A reason goes into the outcome."""
        store = self._first_in_turn(node, st)
        if store is None:
            return
        reason = store.refusal(st)
        if not reason:
            store.count(st)
            reason = yield from self._copy_in_thread(node, lambda fd: store.copy(admission.seq, fd, st))
        if reason:
            admission.details = {**(admission.details or {}), NOT_KEPT: reason}

    def bytes_to_copy(self, node: Node, st: os.stat_result) -> int:
        """Return how many bytes the next change of the content copies first."""
        if self.store is None or node.layer is not Layer.SOURCE:
            return 0
        if node.kept_turn == self._mount.enforcer.trail.turn:
            return 0
        return 0 if self.store.refusal(st) else st.st_size

    def _first_in_turn(self, node: Node, st: os.stat_result) -> PreimageStore | None:
        if self.store is None or node.layer is not Layer.SOURCE:
            return None
        turn = self._mount.enforcer.trail.turn
        if node.kept_turn == turn or not st.st_size or node.parent is None:
            return None
        node.kept_turn = turn
        return self.store

    def _copy_first(self, store: PreimageStore, node: Node, number: int, st: os.stat_result) -> Steps:
        store.count(st)
        batch = node.batch
        reason = yield from self._copy_in_thread(node, lambda fd: store.copy(number, fd, st))
        if batch is not None:
            batch.not_kept = reason
        node.kept_turn = self._mount.enforcer.trail.turn
        return b""

    def _copy_in_thread(self, node: Node, copy: Callable[[int], str]) -> Generator[LongCall[Any], None, str]:
        """Call `copy` in a thread with a descriptor of the file. Return why the content was not kept, or ""."""
        with suppress(OSError), duplicates(node.store.file(node, R | W)) as (fd,):
            return (yield from self._mount.make_in_thread(node, lambda: copy(fd)))
        return UNREADABLE
