"""Read the kernel's mount table, and unmount. Nothing here reads from a mount, which could hang."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

from bonobofs.errors import MountError
from bonobofs.system import processes, syscalls
from bonobofs.system.paths import is_within

FSTYPE = "fuse.bonobofs"
_OWNER = re.compile(rb"\buser_id=(\d+)")
_CONNECTIONS = "/sys/fs/fuse/connections"
_ESCAPE = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo. Of several on one mountpoint, the last is on top."""

    mountpoint: Path
    fstype: str
    source: str
    device: str
    """`major:minor` of the file system: the same in every copy of a mount."""
    owner: int = -1
    """uid of the user who made a FUSE mount; -1 for other mounts."""


def points_below(table: bytes, directory: str) -> list[str]:
    """Return the mountpoints below a directory, relative to it. `table` is the text of mountinfo."""
    above = directory.rstrip("/") + "/"
    points = [_text(line.split(b" ", 5)[4]) for line in table.splitlines()]
    return [point.removeprefix(above) for point in points if point.startswith(above)]


def all_mounts(table: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """Return all mounts of the namespace of `table`, in the kernel's order."""
    found = []
    for line in table.read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        fstype, source, options = after.split(b" ", 2)
        fields, owner = before.split(b" "), _OWNER.search(options)
        uid = -1 if owner is None else int(owner[1])
        found.append(Mount(Path(_text(fields[4])), _text(fstype), _text(source), fields[2].decode(), uid))
    return found


def bonobofs_mounts() -> list[Mount]:
    """Return the mounts of bonobofs of all users and state directories."""
    return [mount for mount in all_mounts() if mount.fstype == FSTYPE]


def copies_of(mount: Mount) -> tuple[str, ...]:
    """Return where copies of a detached mount remain, as far as this user may see.

    Returns mountpoints of this mount namespace and processes of other namespaces.
    """

    def is_copy(other: Mount) -> bool:
        # The kernel may give the device number to a later mount.
        return other[1:] == mount[1:]

    here = [str(other.mountpoint) for other in bonobofs_mounts() if is_copy(other)]
    return (*here, *map(str, processes.in_other_namespaces(lambda table: any(map(is_copy, all_mounts(table))))))


def at(mountpoint: Path) -> list[Mount]:
    """Return the mounts of bonobofs on exactly this path; the last is on top."""
    return [mount for mount in bonobofs_mounts() if mount.mountpoint == mountpoint]


def mount_around(path: Path) -> Mount | None:
    """Return the innermost mount of bonobofs around a path, or None."""
    inside = [mount for mount in bonobofs_mounts() if is_within(path, mount.mountpoint)]
    return max(inside, key=lambda mount: len(mount.mountpoint.parts), default=None)


def resolve(mountpoint: Path) -> Path:
    """Return the absolute path of a mountpoint without symlinks, without a request to the mount.

    A dead mount answers every request with ENOTCONN, and a hung one does not answer.
    """
    path = Path(os.path.abspath(mountpoint))
    unresolved = Path(os.path.realpath(path.parent), path.name)
    return unresolved if at(unresolved) else Path(os.path.realpath(path))


def open_directory(path: Path) -> int:
    """Open a directory by its absolute path as O_PATH; no component may be a symlink. OSError (ENOTDIR, ENOENT)."""
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in path.parts[1:]:
        try:
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def identity(fd: int) -> tuple[int, int] | None:
    """Return device and inode number of an open directory; None for the root of a dead mount."""
    try:
        st = os.fstat(fd)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        return None
    return st.st_dev, st.st_ino


def detach(mountpoint: Path, *, lazy: bool = False) -> None:
    """Unmount the topmost mount. `lazy` detaches it while it is in use; it is for dead mounts.

    As root, no directory above the mountpoint may be a symlink: it could lead to a mount of another service.

    Raises OSError with EBUSY if the mount is in use, MountError for other errors of the kernel or fusermount3.
    """
    if os.geteuid() == 0:
        try:
            above = open_directory(mountpoint.parent)
        except OSError as error:
            raise MountError(f"{mountpoint} cannot be unmounted: {error.strerror}") from error
        try:
            flags = syscalls.UMOUNT_NOFOLLOW | (syscalls.MNT_DETACH if lazy else 0)
            syscalls.umount(os.fsencode(f"/proc/self/fd/{above}/{mountpoint.name}"), flags)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise
            raise MountError(f"{mountpoint} cannot be unmounted: {error.strerror}") from error
        finally:
            os.close(above)
        return
    import shutil  # noqa: PLC0415 - for ordinary users only
    import subprocess  # noqa: PLC0415

    program = shutil.which("fusermount3")
    if program is None:
        raise MountError("fusermount3 is missing; an ordinary user needs it to unmount: install the package fuse3")
    ran = subprocess.run(
        [program, "-u", *(["-z"] if lazy else []), "--", mountpoint],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd="/",
        check=False,
        env={"LC_ALL": "C", "PATH": os.environ.get("PATH", os.defpath)},
    )
    message = os.fsdecode(ran.stderr).strip()
    if ran.returncode == 0:
        return
    if "busy" in message.lower():
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(mountpoint))
    raise MountError(
        f"{mountpoint} cannot be unmounted: {message.splitlines()[-1] if message else 'fusermount3 failed'}"
    )


def abort_connection(device: str) -> None:
    """End the FUSE connection of a mount: each waiting call fails, and the server gets no further request.

    `device` is `major:minor` of the mount. Root may do this. The user who made the mount may do it if fusectl is
    mounted on its usual directory. OSError.
    """
    name = device.partition(":")[2] + "/abort"
    try:
        fd = os.open(f"{_CONNECTIONS}/{name}", os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        connections = syscalls.open_file_system(b"fusectl")
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=connections)
        finally:
            os.close(connections)
    try:
        os.write(fd, b"1")
    finally:
        os.close(fd)


def _text(field: bytes) -> str:
    """Decode a field: the kernel writes space, tab, newline and backslash as three octal digits."""
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), field))
