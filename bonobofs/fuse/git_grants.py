"""Grants of a git command: published files that the server writes into the source although the policy refuses that.

Git replaces a file by UNLINK, CREATE and WRITE. For a granted path, the server handles them so:
- UNLINK hides the name in the mount. The source keeps the file.
- CREATE writes the published content to a temporary file, and renames it onto the path.
- WRITE succeeds if the file already has these bytes. It changes nothing.
Therefore the source has the old or the published content at each moment, and no bytes from a process of the session.
The policy judges every other request, and every request after the grant has ended.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import BY
from bonobofs.audit.temp_cleanup import stray_name
from bonobofs.enforcement.authorizer import Admission
from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse.external_changes import fingerprint_of
from bonobofs.fuse.inode_table import Node
from bonobofs.fuse.mount_context import Header, MountContext
from bonobofs.fuse.slices import LongCall, Steps
from bonobofs.policy.decision import Layer, Permit
from bonobofs.policy.request import NO_FACTS, Context, Kind, Operation, Request, WorkspacePath
from bonobofs.system import syscalls

GONE: Final = 0
"""Mode of a path that the published tree does not have."""
SYMLINK: Final = 0o120000
EXECUTABLE: Final = 0o100755
KEPT: Final = 1
"""Mode of a path that the role may write but, by `[[keep]]`, not remove. Git may replace its content."""

OPENED: Final = p.OPEN_OUT.pack(0, p.OPEN_KEEP_CACHE | p.OPEN_NOFLUSH, 0)

FileState = tuple[int, int, int, int]
"""Inode number, size, and the times of modification and change in nanoseconds."""


def file_state(st: os.stat_result) -> FileState:
    """Return what distinguishes one state of a file from another."""
    return st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns


class Grant(NamedTuple):
    """A path that a command may bring in. Its content is `size` bytes at `offset` of the file `buffer`."""

    number: int
    mode: int
    """Mode in the published tree."""
    before: FileState | None
    """State of the source's file; None if there is none."""
    buffer: int
    offset: int
    size: int


class GitGrants:
    """The granted paths. Used by the serving thread."""

    def __init__(self) -> None:
        self.files: Final[dict[str, Grant]] = {}
        self.published: Final[set[str]] = set()
        """Granted paths that have the published content already."""
        self.hidden: Final[set[str]] = set()
        """Paths that git has removed and not yet created again. The source still has them."""
        self._directories: Final[dict[str, int]] = {}
        """Directories above the granted paths, with the number of the last command that needs them."""
        self._buffers: Final[dict[int, int]] = {}
        """Descriptors of the content, by the number of the command."""

    def begin(self, number: int, buffer: int, position: int, length: int) -> None:
        """Grant files to the command `number`. `end` closes the file `buffer`, which has their content.

        Its part of `length` bytes at `position` is the list of the files in JSON: path, mode, offset, size, and
        file state or null.
        """
        self._buffers[number] = buffer
        for path, mode, offset, size, before in json.loads(os.pread(buffer, length, position)):
            self.files[path] = Grant(number, mode, before and tuple(before), buffer, offset, size)
            self.published.discard(path)
            above = path.rpartition("/")[0]
            while above:
                self._directories[above] = number
                above = above.rpartition("/")[0]

    def end(self, number: int) -> list[str]:
        """End the grants of a command.

        Return the paths that have the published content. Hidden names are shown again.
        """
        taken = []
        for path, grant in list(self.files.items()):
            if grant.number == number:
                del self.files[path]
                if path in self.published:
                    self.published.discard(path)
                    taken.append(path)
                self.hidden.discard(path)
        for above in [above for above, last in self._directories.items() if last == number]:
            del self._directories[above]
        if (buffer := self._buffers.pop(number, -1)) >= 0:
            os.close(buffer)
        return taken

    def end_all(self) -> list[str]:
        """End the grants of all commands. Return the paths that have the published content."""
        return [path for number in list(self._buffers) for path in self.end(number)]

    def accept_change(self, request: Request, st: os.stat_result | None) -> bool:
        """Accept the removal of a granted file `st`, and the creation or removal of a directory above a granted path.

        Return False for any other request. The kernel removes only an empty directory.
        """
        if request.operation is Operation.MKDIR or request.operation is Operation.RMDIR:
            return request.path in self._directories
        grant = self.files.get(request.path)
        if grant is None or grant.mode != GONE or st is None or grant.before != file_state(st):
            return False
        self.published.add(request.path)
        return True

    def hide_replaced(self, path: WorkspacePath, st: os.stat_result) -> bool:
        """Hide the name in the mount if its removal is the first half of a granted replacement. False: it is not."""
        grant = self.files.get(path)
        if grant is None or grant.mode == GONE or path in self.published or path in self.hidden:
            return False
        if grant.before != file_state(st) or (grant.mode == KEPT and st.st_nlink > 1):
            return False
        self.hidden.add(path)
        return True


class GrantOps:
    """Shared steps of handlers for granted files."""

    def __init__(self, mount: MountContext) -> None:
        self._mount: Final = mount

    def grant_at(self, parent: Node, name: bytes) -> Grant | None:
        """Return the grant of a name that git creates now, or None."""
        if not self._mount.grants.files or parent.layer is not Layer.SOURCE:
            return None
        path = self._mount.join(parent, name)
        grant = self._mount.grants.files.get(path)
        return None if grant is None or path in self._mount.grants.published or grant.mode == GONE else grant

    def admission(
        self,
        header: Header,
        request: Request,
        context: Context | Permit = NO_FACTS,
        st: os.stat_result | None = None,
        details: dict[str, Any] | None = None,
    ) -> Admission:
        """Return the admission of a change of a name. `st` is the file that a removal removes."""
        if self._mount.grants.files and self._mount.grants.accept_change(request, st):
            return self._mount.enforcer.authorize_published(request, self._mount.caller(header), details)
        return self._mount.authorize(header, request, context, details=details, layer=None)

    def take_in_file(
        self, header: Header, grant: Grant, parent: Node, name: bytes, umask: int, groups: tuple[int, ...]
    ) -> Steps:
        """Create a granted file whole. Return the reply to CREATE."""
        request = Request(Operation.CREATE_FILE, self._mount.join(parent, name))
        temporary, mode, store = stray_name().encode(), 0o777 if grant.mode == EXECUTABLE else 0o666, parent.store
        details = {BY: temporary.decode(), **self._before_taking_in(parent, name)}
        admission = self._mount.enforcer.authorize_published(request, self._mount.caller(header), details)
        with admission as permit:
            if header.uid:
                store.check_reserve(grant.size)
            directory, dir_time = store.directory(parent, changing=True), parent.mtime
            create = partial(store.create, directory, temporary, mode, permit)
            fd = self._mount.run_as(header, groups, umask | stat.S_IWOTH, create)
            self._mount.own_effects.note_name(parent.ino, temporary, 0)
            buffer = os.dup(grant.buffer)  # the command may end meanwhile
            try:
                for call in store.fill(fd, buffer, grant.offset, grant.size, permit):
                    job = LongCall(call)
                    yield job
                    job.check()
                self._put_in_place(parent, name, temporary, grant, admission, dir_time)
                self._mount.preimages.after(parent, admission, os.fstat(fd))
            except BaseException:
                os.close(fd)
                with suppress(FileNotFoundError):
                    store.unlink(store.directory(parent, changing=True), temporary, permit)
                raise
            finally:
                os.close(buffer)
        st = os.fstat(fd)
        reply = self._mount.entry(parent, name, st, created=True)
        node = self._mount.inodes.find(st.st_ino + store.ino_offset)
        assert node is not None
        store.keep_created(node, fd, stat.S_IMODE(st.st_mode))
        return reply + OPENED

    def take_in_symlink(
        self, header: Header, parent: Node, name: bytes, target: bytes, groups: tuple[int, ...]
    ) -> bool:
        """Create a granted symlink. False: there is no grant, or it has another target."""
        grant = self.grant_at(parent, name)
        if grant is None or grant.mode != SYMLINK or os.pread(grant.buffer, grant.size, grant.offset) != target:
            return False
        request = Request(Operation.SYMLINK, self._mount.join(parent, name), Kind.SYMLINK)
        temporary = stray_name().encode()
        details = {BY: temporary.decode(), "target": os.fsdecode(target), **self._before_taking_in(parent, name)}
        admission = self._mount.enforcer.authorize_published(request, self._mount.caller(header), details)
        with admission as permit:
            directory, dir_time = parent.store.directory(parent, changing=True), parent.mtime
            self._mount.run_as(header, groups, 0, partial(parent.store.symlink, directory, temporary, target, permit))
            self._mount.own_effects.note_name(parent.ino, temporary, 0)
            try:
                self._put_in_place(parent, name, temporary, grant, admission, dir_time)
            except BaseException:
                with suppress(FileNotFoundError):
                    parent.store.unlink(parent.store.directory(parent, changing=True), temporary, permit)
                raise
        return True

    def _before_taking_in(self, parent: Node, name: bytes) -> dict[str, Any]:
        """Return the state of the file that a granted file replaces, for the intent."""
        directory = parent.store.directory(parent, changing=True)
        replaced = _status(directory, name)
        return {} if replaced is None else self._mount.preimages.before_removal(directory, name, replaced) or {}

    def _put_in_place(
        self, parent: Node, name: bytes, temporary: bytes, grant: Grant, admission: Admission, dir_time: int
    ) -> None:
        """Rename the whole file onto its path. EEXIST: the path has changed since the grant.

        `dir_time`: time of modification of the directory before it had the temporary name.
        """
        path, store = self._mount.join(parent, name), parent.store
        directory = store.directory(parent, changing=True)
        replaced = _status(directory, name)
        found = None if replaced is None else file_state(replaced)
        is_free = path not in self._mount.grants.published and (replaced is None or path in self._mount.grants.hidden)
        if self._mount.grants.files.get(path) is not grant or not is_free or found != grant.before:
            raise os_error(errno.EEXIST)
        other = None if replaced is None else self._mount.pin_for_removal(parent, directory, name, replaced)
        flags = syscalls.RENAME_NOREPLACE if replaced is None else 0
        rename = partial(store.rename, directory, temporary, directory, name, flags, admission.permit)
        self._mount.preimages.replace(admission, replaced, other, directory, name, rename)
        parent.mtime = dir_time
        self._mount.preimages.record_dir_times(admission, parent, directory)
        self._mount.grants.published.add(path)
        if replaced is not None:
            self._mount.after_unlink(other, parent, name, replaced)
        self._mount.mark_own_name(parent, name, os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino)

    def replace_kept(self, parent: Node, directory: int, name: bytes, mode: int, permit: Permit) -> int:
        """Open a kept file that git has removed in the mount, and truncate it. Return -1 if there is none."""
        path = self._mount.join(parent, name)
        grant = self._mount.grants.files.get(path)
        if grant is None or grant.mode != KEPT or path not in self._mount.grants.hidden:
            return -1
        found = _status(directory, name)
        if found is None or file_state(found) != grant.before:
            return -1
        self._mount.grants.published.add(path)
        kept = stat.S_IMODE(found.st_mode) & ~0o111
        fd = parent.store.reopen_empty(directory, name, kept | (kept & 0o444) >> 2 if mode & 0o111 else kept, permit)
        if node := self._mount.inodes.find(found.st_ino + parent.store.ino_offset):
            node.fingerprint = fingerprint_of(os.fstat(fd))
        return fd

    def changes_nothing(self, node: Node, fd: int, position: int, data: memoryview) -> bool:
        """Whether a WRITE brings the bytes that a granted file already has."""
        path = self._mount.path(node) if node.parent is not None else ""
        is_taken = path in self._mount.grants.published and self._mount.grants.files[path].mode != KEPT
        return is_taken and os.pread(fd, len(data), position) == data


def _status(directory: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
