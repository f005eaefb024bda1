"""What all handlers share: the tables and layers of one mount, the caller, entries and attributes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from bonobofs.enforcement.authorizer import NO_CALLER, Admission, Caller, RelatedChange
from bonobofs.enforcement.caller_processes import CallerTable
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.enforcement.write_batches import WriteBatch
from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse import virtual_dir
from bonobofs.fuse.append_lock import AppendLock
from bonobofs.fuse.external_changes import ExternalChanges, fingerprint_after_rename, fingerprint_of
from bonobofs.fuse.fd_cache import stale
from bonobofs.fuse.inode_table import UNKNOWN, InodeTable, ListedFile, Node
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.overlay import Overlay
from bonobofs.fuse.preimage_ops import PreimageOps
from bonobofs.fuse.slices import Busy, LongCall, Result, Steps
from bonobofs.fuse.splice import FileRange
from bonobofs.policy import denials
from bonobofs.policy.decision import Code, Denied, Layer, Permit, Refused
from bonobofs.policy.request import (
    EXISTS,
    NO_FACTS,
    OF_CONTENT,
    STAGED,
    Context,
    Kind,
    Operation,
    Request,
    WorkspacePath,
    kind_of,
)
from bonobofs.system.paths import is_within

if TYPE_CHECKING:
    from bonobofs.fuse.git_grants import GitGrants
    from bonobofs.fuse.session_git_dir import SessionGitDir
    from bonobofs.fuse.temp_files import TempFiles

WATCHED_SECONDS: Final = 86_400
"""Cache timeout of names and attributes while a watcher reports changes of the source."""
UNWATCHED_SECONDS: Final = 1
"""Cache timeout without a watcher."""
UNCACHED_SECONDS: Final = 0
"""Cache timeout while the kernel does not accept notifications."""
NOTHING: Final = b""
LEAVES: Final = Context(leaves=True, in_source=True)
_OF_KEPT: Final = OF_CONTENT | {Operation.SET_XATTR, Operation.REMOVE_XATTR}
"""Operations that change what a pre-image has: content and extended attributes."""
_FAN_OUT: Final = 2
"""Length of the name of a directory of loose git objects."""
INLINE: Final = 1 << 20
"""Bytes that the serving thread changes itself. A larger change may wait a second for the disk."""
_IN_THREADS: Final = 2
"""Maximum of large changes that threads make at a time. A new lease waits for them."""
MOST_NAMES: Final = 1000
"""Maximum of the names of one file that a request checks, at 15 us each. A file with more names cannot be changed."""
SET_IDS: Final = stat.S_ISUID | stat.S_ISGID

Reply = bytes | tuple[bytes, memoryview] | FileRange | Steps


class Header(NamedTuple):
    """The caller and the node of a request."""

    node_id: int
    uid: int
    gid: int
    pid: int
    extensions: int


Handler = Callable[[Header, memoryview], Reply]


class Notifications(NamedTuple):
    """Functions that queue a notification to the kernel."""

    inode: Callable[[int, int, int], None]
    """Node id, offset, length: invalidate the attributes, and the cached pages from the offset on (none if it is
    negative).
    """
    entry: Callable[[int, bytes], None]
    """Node id of the directory, name: invalidate the entry."""
    prune: Callable[[list[int], list[tuple[int, bytes]]], None]
    """Node ids and the names of the same nodes: drop the nodes that no process has open."""
    names: Callable[[], bool]
    """Invalidate all entries. False: the kernel is too old for it."""
    after_pending: Callable[[Callable[[bool], None]], None]
    """Call the function once the kernel has taken all notifications queued before, in any thread.

    It gets False if the kernel blocks.
    """


class MountContext:
    """The tables, layers and services of one mount, and what the handlers of all opcodes do with them."""

    grants: GitGrants

    def __init__(
        self,
        inodes: InodeTable,
        source: LayerStore,
        temp_files: TempFiles,
        overlay: Overlay,
        enforcer: Enforcer,
        virtual: virtual_dir.VirtualDir,
        notifications: Notifications,
    ) -> None:
        self.inodes: Final = inodes
        self.source: Final = source
        self.temp_files: Final = temp_files
        self.overlay: Final = overlay
        self.enforcer: Final = enforcer
        self.virtual_dir: Final = virtual
        self.notifications: Final = notifications
        self.external_changes: Final = ExternalChanges(inodes, source, notifications)
        self.own_effects: Final = self.external_changes.own_effects
        self.nodes: Final = inodes
        self.path: Final = inodes.path
        self.join: Final = inodes.join
        self.callers: Final = CallerTable(self._keeps_commands)
        self.moving_trees: Final[list[WorkspacePath]] = []
        """Paths of the trees that a rename in slices moves.

        No request may change anything in them, or move a directory above.
        """
        self.preimages: Final = PreimageOps(self)
        self.append_lock: AppendLock | None = None
        """The lock that the servers of the same source share for appends."""
        self.device = ""
        """`major:minor` of the mount."""
        self.repository: SessionGitDir | None = None
        """The session's own `.git`."""
        self.is_in_use: Callable[[str], bool] = lambda _: False
        """Whether a change by the companion relies on the path of this directory."""
        self._caller: tuple[Header | None, Caller] = None, NO_CALLER
        """The last header for which a caller was found, and that caller."""
        self.own_change: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context in which a thread changes a file for the mount."""
        self.set_cache_timeout(WATCHED_SECONDS)

    def set_cache_timeout(self, seconds: int) -> None:
        """Set for how many seconds the kernel may cache the entries and attributes of later replies."""
        self.entry_times = (seconds, seconds, 0, 0)
        self.no_entry = p.ENTRY_OUT.pack(0, 0, *self.entry_times) + bytes(p.ATTR.size)
        self.attr_times = p.ATTR_OUT.pack(seconds, 0, 0)

    def authorize(
        self,
        header: Header,
        request: Request,
        context: Context | Permit = NO_FACTS,
        *related: RelatedChange | Permit,
        details: dict[str, Any] | None = None,
        size: int = 0,
        action: str = "",
        layer: Layer | None = Layer.SOURCE,
    ) -> Admission:
        """Authorize a change for the caller of the request, as `Enforcer.authorize` does."""
        caller = self.caller(header)
        return self.enforcer.authorize(
            request, context, *related, caller=caller, details=details, size=size, action=action, layer=layer
        )

    def permit(self, header: Header, change: RelatedChange) -> Permit:
        """Return the permit of a change for the caller of the request. Refused."""
        return self.enforcer.permit(change.request, change.context, self.caller(header), head=change.head)

    def deny(self, header: Header, denied: Denied) -> Refused:
        """Record a denial; return the exception to raise."""
        return self.enforcer.deny(denied, self.caller(header))

    def node(self, node_id: int) -> Node:
        node = self.nodes.get(node_id)
        if node is None:
            raise stale()
        if node.parent is not None and node.parent.lookups <= 0:
            node.store.choose_reachable_name(node)
        return node

    def node_to_change(self, header: Header, operation: Operation, node_id: int = 0) -> Node:
        """Return the node that the request will change: the header's, or `node_id`.

        Raises: PermissionError for a node of `.bonobofs`; Busy if a long request moves or changes the node.
        """
        node_id = node_id or header.node_id
        if node_id >= virtual_dir.FIRST_ID:
            self.refuse_virtual(header, operation, self.virtual_dir.path(node_id))
        node = self.node(node_id)
        if self.repository is not None and self.repository.shared:
            self._check_repository(header, operation, node, b"")
            if node.id == p.ROOT_ID and self.repository.is_borrowed(header.uid, node.store.stat(node)):
                raise os_error(errno.EPERM)
        # A file with several names may have a name below.
        if self.moving_trees and (self._is_moving(self.path(node)) or self.inodes.links(node.ino)):
            raise Busy
        if node.ino in self.external_changes.thread_changes:
            raise Busy
        if node.kept and operation in _OF_KEPT:
            self.preimages.detach(node)
        return node

    def _check_repository(self, header: Header, operation: Operation, node: Node, name: bytes) -> None:
        """Raise Refused for a path in the source's `.git`.

        The policy permits changes of the session's own `.git` only.
        """
        if node.layer is not Layer.SOURCE or node.parent is None:
            return
        path = self.path(node)
        if path == ".git" or path.startswith(".git/"):
            path = self.join(node, name) if name else path
            (refusal, *_) = self.enforcer.policy.protect.find(path.split("/"))
            raise self.deny(header, Denied(*refusal, path, operation))

    def _is_moving(self, path: str) -> bool:
        return any(is_within(WorkspacePath(path), tree) for tree in self.moving_trees)

    def needs_thread(self, size: int) -> bool:
        """Return whether a thread makes a change of `size` bytes. Busy: all threads are in use."""
        if size > INLINE and len(self.external_changes.thread_changes) >= _IN_THREADS:
            raise Busy
        return size > INLINE

    def make_in_thread(self, node: Node, call: Callable[[], Result]) -> Generator[LongCall[Any], None, Result]:
        """Make a change of a file in a thread, within its open admission.

        Other changes of the file wait, and so do changes of each of its names: a moved name is judged by its content.
        """
        job, number = LongCall(call), node.ino
        names = {self.path(node), *starmap(self.join, self.inodes.links(number))}
        self.external_changes.thread_changes[number] = names
        try:
            with self.own_change():
                yield job
        finally:
            del self.external_changes.thread_changes[number]
        return job.check()

    def refuse_virtual(self, header: Header, operation: Operation, path: str) -> NoReturn:
        """Refuse a change of `.bonobofs` with EPERM."""
        self.deny(header, Denied(*denials.RESERVED, WorkspacePath(path), operation))
        raise os_error(errno.EPERM)

    def caller(self, header: Header) -> Caller:
        if header is not self._caller[0]:
            self._caller = header, self.callers.find(header.pid, header.uid, self.source.now)
        return self._caller[1]

    def batch_of(self, header: Header, node: Node) -> WriteBatch | None:
        """Return the write batch of the file that this request continues. None: it begins a new one.

        A batch has the changes of one program in one process, under one policy.
        """
        batch = node.batch
        if batch is None or batch.generation != self.enforcer.generation or batch.caller != self.caller(header):
            return None
        return batch

    def _keeps_commands(self) -> bool:
        return bool(self.enforcer.policy.document.get("attribution", {}).get("commands", True))

    def entry(
        self, parent: Node, name: bytes, st: os.stat_result, *, created: bool = False, is_open: bool = False
    ) -> bytes:
        """Return `fuse_entry_out` with the attributes `st`, and add one reference.

        `created`: the mount has just created the file. `is_open`: it has a descriptor of it, which the node will get.
        """
        store = parent.store
        if store.prefix:
            # Only directories of loose objects are cached: each object is looked up in one. git gc may remove the rest.
            return p.with_cache_timeout(
                UNWATCHED_SECONDS if len(name) == _FAN_OUT else UNCACHED_SECONDS, self._known_entry(parent, name, st)
            )
        return self._known_entry(parent, name, st, created=created, is_open=is_open)

    def _known_entry(
        self, parent: Node, name: bytes, st: os.stat_result, *, created: bool = False, is_open: bool = False
    ) -> bytes:
        store = parent.store
        if st.st_dev != store.device or store.is_mounted_over(parent, name):
            return self._mounted_over_entry(parent, name, st)
        node = self.inodes.reference(parent, name, st)
        current = st.st_size << 62 | st.st_ctime_ns
        if node.fingerprint != current:
            if node.fingerprint == UNKNOWN and st.st_ctime_ns >= self.external_changes.since and not created:
                self.external_changes.check_first_lookup(node, parent, name, st)
            if not is_open or node.lookups > 1:  # the handle of a new node is read when its descriptor is closed
                node = self._with_handle(node, parent, name, st)
            self.check_external(node, st)
        return p.ENTRY_OUT.pack(node.id, 0, *self.entry_times) + self.attr(node, st)

    def listed_entry(self, directory: Node, name: bytes, st: os.stat_result) -> bytes:
        """Return the entry of a listed name, as `entry` does. `directory` has a descriptor."""
        source = self.source
        if (
            stat.S_ISREG(st.st_mode)
            and st.st_nlink == 1
            and directory.store is source
            and st.st_dev == source.device
            and st.st_ctime_ns < self.external_changes.since
            and not self.temp_files.directories
            and not source.is_mounted_over(directory, name)
        ):
            node_id = self.inodes.list_file(directory, name, st, lambda: source.handle(directory.fd, name))
            if node_id:
                return p.ENTRY_OUT.pack(node_id, 0, *self.entry_times) + p.pack_attr(st)
        return self.entry(directory, name, st)

    def _with_handle(self, node: Node, parent: Node, name: bytes, st: os.stat_result) -> Node:
        """Store the file handle in the node. Return a new node if another file has reused the inode number."""
        if node.fd >= 0 or node.pin >= 0:
            return node
        store = parent.store
        handle = store.handle(store.directory(parent), name)
        if node.handle and node.handle != handle:
            node = self.inodes.replace_reused(node, parent, name, st)
        node.handle = handle
        return node

    def is_hidden(self, parent: Node, name: bytes) -> bool:
        """Whether git has removed the name and will create it again."""
        return bool(self.grants.hidden) and self.join(parent, name) in self.grants.hidden

    def hide_secret(self, parent: Node, name: bytes, reader: Header | None = None) -> bool:
        """Return whether the policy hides this name of the source. If so, and `reader` is given, record a denial."""
        policy = self.enforcer.policy
        if not policy.secrets or parent.layer is not Layer.SOURCE or parent.store.prefix:
            return False
        path = self.join(parent, name)
        refusal = policy.secret(path.split("/"))
        if refusal is not None and reader is not None:
            self.enforcer.deny(Denied(*refusal, WorkspacePath(path), Operation.READ_FILE), self.caller(reader))
        return refusal is not None

    def check_external(self, node: Node, st: os.stat_result) -> None:
        """Report an external change if `st` differs from the node's fingerprint.

        Call it before `st` is shown or used for a change.
        """
        current = st.st_size << 62 | st.st_ctime_ns
        known = node.fingerprint
        if known != current:
            if known != UNKNOWN and known != fingerprint_after_rename(st) and node.layer is Layer.SOURCE:
                self.external_changes.on_difference(node, st)
            node.fingerprint = current

    def mark_own_change(self, node: Node) -> None:
        """Store the node's fingerprint after a change by the mount, so that the watcher's event is not reported as
        external.
        """
        try:
            node.fingerprint = fingerprint_of(node.store.recent_stat(node))
        except OSError:
            node.fingerprint = UNKNOWN

    def mark_own_name(self, parent: Node, name: bytes, ino: int) -> None:
        """Record that the mount has made the name lead to inode `ino`; 0: it has removed the name."""
        self.own_effects.note_name(parent.ino, name, ino)
        if self.grants.hidden and ino:
            self.grants.hidden.discard(self.join(parent, name))
        parent.fingerprint = UNKNOWN  # the kernel invalidates a directory's attributes when it changes a name in it

    def attr(self, node: Node, st: os.stat_result) -> bytes:
        """Return `fuse_attr` of the node as the mount shows it: with staged names, and with attributes from the upper
        directory.
        """
        if node.store.prefix:
            return p.readable(p.pack_attr(st))
        if node.id == p.ROOT_ID and self.repository is not None:
            return self.repository.root_attr(self._overlay_attr(node, st), st)
        return self._overlay_attr(node, st)

    def _overlay_attr(self, node: Node, st: os.stat_result) -> bytes:
        if node.kept:
            return p.with_links(p.pack_attr(st), node.shown_links(st))
        if self.temp_files.directories and (names := self.temp_files.names(node)):
            return p.with_links(p.pack_attr(st), st.st_nlink + names)
        if node.is_dir and self.overlay.directories and (dressed := self.attribute_node(node)) is not node:
            return p.with_number(p.pack_attr(dressed.store.stat(dressed)), st.st_ino)
        return p.pack_attr(st)

    def attribute_node(self, node: Node) -> Node:
        """Return the node whose attributes are shown: the upper directory, if it has attributes of its own."""
        upper_dir = self.overlay.upper_dir(node) if node.is_dir else None
        return upper_dir.node if upper_dir is not None and upper_dir.attrs_copied else node

    def forget_node(self, node_id: int, count: int) -> None:
        """Drop references of a node, and release the node with the last one."""
        node = self.inodes.forget(node_id, count)
        if isinstance(node, ListedFile):
            self.external_changes.note_forgotten(node)
        elif node is not None:
            if node.batch is not None:
                self.enforcer.close_batch(node.id)
            if node.parent is not None and node.layer is Layer.SOURCE:
                self.external_changes.note_forgotten(node)
            if node.kept:
                self.preimages.forget(node)
            node.store.release(node)
            if node.layer is Layer.SCRATCH and node.parent is None:
                self.overlay.sizes.forget(node.ino)

    def _mounted_over_entry(self, parent: Node, name: bytes, st: os.stat_result) -> bytes:
        """Return the entry of a directory that is a mountpoint below the source, shown empty. EACCES for a file."""
        if not stat.S_ISDIR(st.st_mode):
            raise os_error(errno.EACCES)
        node = self.inodes.reference_mounted_over(parent, name, st)
        return p.ENTRY_OUT.pack(node.id, 0, 0, 0, 0, 0) + p.pack_attr(st)

    def with_foreign_names(
        self,
        node: Node,
        st: os.stat_result,
        operation: Operation,
        context: Context = EXISTS,
        own: WorkspacePath | None = None,
    ) -> Context:
        """Return `context` with the number of names of the file under which the change is not permitted.

        `own` is the name under which the change is judged, by default that of the node.

        A hard link may have names under several rules. The engine decides the change for each known name. Names that
        are unknown, or no longer lead to the file, count as not permitted.
        """
        links = node.shown_links(st)
        if links < 2 and (node.parent is not None or node.layer is not Layer.SOURCE):
            return context
        if st.st_nlink > MOST_NAMES:
            return context._replace(foreign_names=st.st_nlink)
        good = 0
        for parent, name in self.inodes.links(node.ino):
            try:
                leads = node.store.leads_to(parent, name, node)
            except OSError:
                leads = False
            if not leads:
                self.inodes.drop_link(node.ino, parent, name)
            else:
                decision = self.enforcer.decide(Request(operation, self.join(parent, name)), context)
                if isinstance(decision, Permit):
                    # A scratch name promises that the source is unchanged, so a change of the source does not count as
                    # permitted there.
                    good += node.layer is not Layer.SOURCE or decision.layer is Layer.SOURCE
                else:
                    # If the own name is leased, the decision for it says so and names the holder.
                    path = self.path(node) if own is None else own
                    good += decision.code is Code.LEASED and self.join(parent, name) == path
        return context._replace(foreign_names=links - good)

    def layer_context(self, node: Node) -> Context:
        """Return the context of a change of which only the node's layer matters."""
        if node.layer is Layer.STAGED:
            return STAGED
        return EXISTS if node.layer is Layer.SOURCE else NO_FACTS

    def arriving_change(
        self, operation: Operation, path: WorkspacePath, directory: int, name: bytes, st: os.stat_result
    ) -> RelatedChange:
        """Return the change that gives the file `name` the path `path`: it is judged as a whole, as if it were created
        there.
        """
        request = Request(operation, path, kind_of(st.st_mode))
        if request.kind is Kind.SYMLINK:
            context = Context(target=os.fsdecode(os.readlink(name, dir_fd=directory)), in_source=True)
            return RelatedChange(request, context)
        if request.kind is not Kind.FILE:
            return RelatedChange(request)
        context = Context(size=st.st_size, mode=stat.S_IMODE(st.st_mode), in_source=True)
        head = (lambda: self.source.head_of_entry(directory, name, st)) if st.st_size else None
        return RelatedChange(request, context, head=head)

    def parent_to_change(self, header: Header, operation: Operation, name: bytes) -> tuple[Node, int]:
        """Return the directory in which a name will change, and its verified descriptor.

        Raises: PermissionError for a name of `.bonobofs`; EXDEV in a directory that is mounted over; ESTALE if the
        directory was removed or moved externally; Busy if a long request moves the name.
        """
        p.checked_name(name)
        if header.node_id >= virtual_dir.FIRST_ID or (header.node_id == p.ROOT_ID and name == virtual_dir.NAME):
            above = self.virtual_dir.path(header.node_id) + "/" if header.node_id >= virtual_dir.FIRST_ID else ""
            self.refuse_virtual(header, operation, above + os.fsdecode(name))
        parent = self.node(header.node_id)
        if parent.mounted_over:
            raise os_error(errno.EXDEV)
        if self.repository is not None and self.repository.shared:
            self._check_repository(header, operation, parent, name)
        if parent.parent is None and parent is not self.inodes.root and not parent.store.prefix:
            raise stale()  # removed or moved externally: it is no longer at its last path
        if self.moving_trees or self.external_changes.thread_changes:
            path = self.join(parent, name)
            used = chain(self.moving_trees, *self.external_changes.thread_changes.values())
            if self._is_moving(path) or any(is_within(each, path) for each in used):
                raise Busy
        return parent, parent.store.directory(parent, changing=True)

    def effective_mode(self, directory: int, mode: int, umask: int) -> int:
        """Return the mode for the decision about a new file.

        The umask does not apply in a directory with a default ACL.
        """
        if mode & umask & 0o111:
            try:
                os.getxattr(directory, "system.posix_acl_default")
            except OSError as error:
                if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
                    return mode & ~umask
            return mode
        return mode & ~umask

    def groups(self, header: Header, body: memoryview) -> tuple[int, ...]:
        """Return the caller's groups.

        CREATE_SUPP_GROUP has only the directory's group, but an ACL may name another one.
        """
        from_request = p.supplementary_groups(body, header.extensions) if header.extensions else ()
        if header.uid == 0 or not self.source.privileged:
            return from_request
        return tuple(sorted({*from_request, *_supplementary_groups(header.pid)}))

    def run_as(self, header: Header, groups: tuple[int, ...], umask: int, call: Callable[[], Result]) -> Result:
        """Call a function that creates a file, as the caller of the request. The file system checks its rights."""
        try:
            self.source.act_as(header.uid, header.gid, groups, umask)
            return call()
        finally:
            self.source.act_as_self()

    def pin_for_removal(self, parent: Node, directory: int, name: bytes, st: os.stat_result) -> Node | None:
        """Return the node of a name that will be removed, pinned for the processes that have it open."""
        node = self.close_batch_of(parent, st) if st.st_dev == parent.store.device else None
        if node is not None and node.parent is parent and node.name == name:
            node.store.pin(node, directory, name)
        return node

    def unpin_on_failure(self, node: Node | None, effect: Callable[[], None]) -> None:
        """Run the removal. If it fails, unpin the node that was pinned for it."""
        try:
            effect()
        except OSError:
            if node is not None:
                node.store.unpin(node)
            raise

    def after_unlink(self, node: Node | None, parent: Node, name: bytes, st: os.stat_result) -> None:
        """Update the tables after the removal of a name. The node continues under another known name, or under none."""
        self.inodes.drop_link(st.st_ino + parent.store.ino_offset, parent, name)
        self.mark_own_name(parent, name, 0)
        if parent.layer is Layer.SCRATCH:
            self.overlay.sizes.add_names(self.join(parent, name), -1)
            if node is None and (st.st_nlink == 1 or stat.S_ISDIR(st.st_mode)):
                self.overlay.sizes.forget(st.st_ino + parent.store.ino_offset)
        if node is None:
            return
        if node.parent is parent and node.name == name:
            self._drop_name(node, st)
        if st.st_nlink > 1 and not node.is_dir:
            node.fingerprint = fingerprint_after_rename(st)

    def _drop_name(self, node: Node, st: os.stat_result) -> None:
        """Give the node another known name, or none."""
        for other_parent, other_name in self.inodes.links(node.ino):
            self.inodes.rename(node, other_parent, other_name)
            self.inodes.note_link(node.ino, other_parent, other_name)
            node.store.unpin(node)
            return
        if st.st_nlink > 1 and not node.is_dir:
            self.inodes.orphan(node)
        else:
            self.inodes.detach(node)

    def close_batch_of(self, parent: Node, st: os.stat_result) -> Node | None:
        """Return the node that will be moved or removed, after its write batch is closed under the old path."""
        node = self.inodes.find(st.st_ino + parent.store.ino_offset)
        if node is not None:
            self.check_external(node, st)
        if node is not None and node.batch is not None:
            self.enforcer.close_batch(node.id)
            node.batch = None
        elif stat.S_ISDIR(st.st_mode):
            self.enforcer.close_batches()  # open files below are decided by their new paths
        return node

    def kill_set_ids(self, header: Header, node: Node, fd: int, st: os.stat_result, permit: Permit) -> None:
        """Clear the set-id bits after a change of content, as the server must under HANDLE_KILLPRIV_V2.

        Set-group-id without group execution is kept for a member of the group.
        """
        killed = stat.S_ISUID
        if st.st_mode & stat.S_ISGID and (st.st_mode & stat.S_IXGRP or not is_member(header, st.st_gid)):
            killed |= stat.S_ISGID
        if st.st_mode & killed:
            node.store.set_mode_of(fd, stat.S_IMODE(st.st_mode) & ~killed, permit)
            self.notifications.inode(node.id, -1, 0)


def is_member(header: Header, gid: int) -> bool:
    """Whether the caller is in the group. The request has only the file-system group; the other groups are in /proc."""
    return header.gid == gid or gid in _supplementary_groups(header.pid)


def _supplementary_groups(pid: int) -> list[int]:
    """Return the supplementary groups of a process; [] if it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            return next([*map(int, line.split()[1:])] for line in status if line.startswith(b"Groups:"))
    except (OSError, StopIteration):
        return []
