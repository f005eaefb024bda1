"""The control group of one sandbox, which limits all of its processes together.

It is a directory of cgroup v2 where this process may make one, else a transient scope of systemd's user manager. The
processes are moved into it while bubblewrap waits, so the environment of the command has no address of systemd.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bonobofs.system import mounts

_CONTROLLERS: Final = {"memory", "pids"}
_SECONDS_FOR_SYSTEMD: Final = 5.0
_SECONDS_TO_REMOVE: Final = 5.0
_POLL_SECONDS: Final = 0.005
_OWN_PROCESSES: Final = 2
"""Processes of bubblewrap, which do not count as processes of the command."""
_MANAGER: Final = (
    "busctl", "--user", "--quiet", f"--timeout={_SECONDS_FOR_SYSTEMD:.0f}", "call", "org.freedesktop.systemd1",
    "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))",
)  # fmt: skip


def find_place(name: str) -> Path | None:
    """Return the path of a new group `name` where this process may make one; None: there is no such place.

    It is the nearest group around this process whose groups have limits of memory and processes.
    """
    own = _group_of(os.getpid())
    for directory in () if own is None else (own, *own.parents):
        try:
            controllers = (directory / "cgroup.subtree_control").read_text(encoding="ascii").split()
        except OSError:
            return None
        if {*controllers} >= _CONTROLLERS:
            is_ours = all(os.access(path, os.W_OK) for path in (directory, directory / "cgroup.procs"))
            return directory / name if is_ours else None
    return None


def make(directory: Path, pids: Sequence[int], memory: int, processes: int) -> bool:
    """Make the group, and move processes into it. `memory` is in bytes; 0: no limit. False: the kernel refused it."""
    try:
        directory.mkdir()
        if memory:
            _write(directory / "memory.max", memory)
            with contextlib.suppress(FileNotFoundError):  # the kernel does not count swap
                _write(directory / "memory.swap.max", 0)
        if processes:
            _write(directory / "pids.max", processes + _OWN_PROCESSES)
        for pid in pids:
            _write(directory / "cgroup.procs", pid)
    except OSError:
        return False
    return True


def remove(directory: Path) -> None:
    """Kill the remaining processes of a group, and remove it. OSError: the kernel does not remove it."""
    with contextlib.suppress(OSError):
        _write(directory / "cgroup.kill", 1)
    until = time.monotonic() + _SECONDS_TO_REMOVE
    while True:
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return


def make_scope(name: str, pids: Sequence[int], memory: int, processes: int) -> bool:
    """Have systemd's user manager move processes into a new scope. False: it does not answer, or does not limit.

    Systemd removes the scope when its last process has ended.
    """
    if not os.path.exists(os.path.join(os.environ.get("XDG_RUNTIME_DIR", ""), "systemd", "private")):
        return False
    numbers = [str(pid) for pid in pids]
    words = [f"{name}.scope", "fail", "4", "PIDs", "au", str(len(numbers)), *numbers]
    words += ["MemoryMax", "t", str(memory), "MemorySwapMax", "t", "0"]
    words += ["TasksMax", "t", str(processes + _OWN_PROCESSES), "0"]
    until = time.monotonic() + _SECONDS_FOR_SYSTEMD
    try:
        subprocess.run(
            [*_MANAGER, *words], stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_SECONDS_FOR_SYSTEMD
        )
    except (OSError, subprocess.SubprocessError):
        return False
    while time.monotonic() < until:
        groups = [_group_of(pid) for pid in pids]
        if all(group is not None and group.name == f"{name}.scope" for group in groups):
            return all(group is not None and (group / "memory.max").exists() for group in groups)
        time.sleep(_POLL_SECONDS)
    return False


def _group_of(pid: int) -> Path | None:
    """Return the directory of the cgroup v2 of a process; None: it has none that this process sees."""
    tops = [mount.mountpoint for mount in mounts.all_mounts() if mount.fstype == "cgroup2"]
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            if tops and line.startswith("0::/") and "/.." not in line:
                return tops[0] / line[4:]
    return None


def _write(path: Path, number: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, str(number).encode())
    finally:
        os.close(handle)
