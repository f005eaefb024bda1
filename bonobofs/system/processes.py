"""Find, signal and await processes. A process is identified by its pid and start time, because pids are reused."""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.system.paths import is_within
from bonobofs.system.terminal import printable

_PROGRAMS: Final = ("BONOBOFS_BD",)


class Process(NamedTuple):
    """A process that uses a mount."""

    pid: int
    name: str
    how: str
    """How it uses it: `cwd`, `root`, `open file`, `mapping`, `mount namespace`."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, {self.how})"


def plain_environment() -> dict[str, str]:
    """Return the environment of a session's processes. From the caller's it has only PATH and places of programs."""
    named = {name: os.environ[name] for name in _PROGRAMS if name in os.environ}
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", **named}


def boot_id() -> str:
    """Return the kernel's id of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_time(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the boot; None if there is none. A zombie counts."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in brackets, may hold spaces and brackets of its own.
    return int(line[line.rindex(b")") + 2 :].split()[19])


def is_alive(pid: int | None, started: int | None) -> bool:
    """Return whether the process with this pid and start time still runs."""
    return pid is not None and started is not None and not wait_for_end(pid, started, 0)


def send(pid: int, started: int, number: signal.Signals) -> bool:
    """Signal the process with this pid and start time. False: it is gone or belongs to another user."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if start_time(pid) != started:
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def wait_for_end(pid: int, started: int, seconds: float) -> bool:
    """Wait until the process has ended with all its threads; False if it still runs after that time.

    It need not be a child. A zombie has ended. When this returns True, its descriptors are closed.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        # Instead of ESRCH, for a number that now belongs to a thread: ENOENT, before Linux 6.15 EINVAL.
        if error.errno in (errno.ESRCH, errno.ENOENT, errno.EINVAL):
            return True
        raise
    try:
        if start_time(pid) != started:
            return True
        # A poll, as select() takes no descriptor above 1023.
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(handle)


def mapped_files(pid: int) -> set[str]:
    """Return the files that a process has mapped: program, libraries and others."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return set()
    # The path is the sixth field; anonymous mappings have none.
    return {os.fsdecode(line.split(maxsplit=5)[5]) for line in maps.splitlines() if line.count(b" /")}


def ancestors(pid: int) -> Iterator[int]:
    """Yield a process and its ancestors, as far as they can be read."""
    while pid > 0:
        yield pid
        try:
            line = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return
        pid = int(line[line.rindex(b")") + 2 :].split()[1])


def has_variable(pid: int, name: str) -> bool:
    """Return whether the process began with a variable in its environment; False if that cannot be read."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(entry.startswith(name.encode() + b"=") for entry in environment.split(b"\0"))


def with_cwd_in(directory: Path) -> list[Process]:
    """Return processes with their working directory there or below. Links are read, not followed, so nothing hangs."""
    return [Process(pid, _name(pid), "cwd") for pid in _pids() if _below(_link(f"/proc/{pid}/cwd"), directory)]


def users_of(directory: Path) -> list[Process]:
    """Return processes that use the mount there, as far as this user may see."""
    found = []
    for pid in _pids():
        how = next(_holds(pid, directory), None)
        if how is not None:
            found.append(Process(pid, _name(pid), how))
    return found


def in_other_namespaces(holds_it: Callable[[Path], bool]) -> list[Process]:
    """Return processes of other mount namespaces whose mount table passes `holds_it`, as far as this user may see."""
    holds = {_link("/proc/self/ns/mnt"): False, "": False}
    found = []
    for pid in _pids():
        namespace = _link(f"/proc/{pid}/ns/mnt")
        if namespace not in holds:
            try:
                holds[namespace] = holds_it(Path(f"/proc/{pid}/mountinfo"))
            except OSError:
                continue
        if holds[namespace]:
            found.append(Process(pid, _name(pid), "mount namespace"))
    return found


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP, SIGTSTP) or a debugger has stopped the process."""
    return _state(pid) in (b"T", b"t")


def is_zombie(pid: int) -> bool:
    """Return whether the main thread of the process has ended. Other threads may still wait for the kernel."""
    return _state(pid) == b"Z"


def _state(pid: int) -> bytes:
    """Return the letter of the state of a process; empty if there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return b""
    return line[line.rindex(b")") + 2 :][:1]


def _holds(pid: int, directory: Path) -> Iterator[str]:
    for link in ("cwd", "root"):
        if _below(_link(f"/proc/{pid}/{link}"), directory):
            yield link
    try:
        handles = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        handles = []
    if any(_below(_link(f"/proc/{pid}/fd/{handle}"), directory) for handle in handles):
        yield "open file"
    if any(_below(path, directory) for path in mapped_files(pid)):
        yield "mapping"


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _name(pid: int) -> str:
    try:
        return printable(os.fsdecode(Path(f"/proc/{pid}/comm").read_bytes()).strip(), "?")
    except OSError:
        return "?"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _below(path: str, directory: Path) -> bool:
    return is_within(path.removesuffix(" (deleted)"), directory)
