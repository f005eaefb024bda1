"""Processes of this machine, read from /proc. A process is its number and its start: numbers are used again."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.system.paths import is_within

_PROGRAMS: Final = ("BONOBOFS_BD",)


class Process(NamedTuple):
    """A process that is in the way: for people, who know it by number and name."""

    pid: int
    name: str
    how: str
    """What it holds: `cwd`, `root`, `open file`, `mapping`, `mount namespace`."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, {self.how})"


def plain_environment() -> dict[str, str]:
    """What the processes of a session are started with: of the caller's, only what says where programs are."""
    named = {name: os.environ[name] for name in _PROGRAMS if name in os.environ}
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", **named}


def boot_id() -> str:
    """The kernel's name for the time since it was started; another one after every boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since the boot; None when there is none. A zombie is still one."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in brackets, may hold spaces and brackets of its own.
    return int(line[line.rindex(b")") + 2 :].split()[19])


def is_alive(pid: int | None, started: int | None) -> bool:
    """Whether the very process that was noted is still there."""
    return pid is not None and started is not None and not wait_for_end(pid, started, 0)


def send(pid: int, started: int, number: signal.Signals) -> bool:
    """Signal the very process that was noted. False when it is gone or belongs to somebody else."""
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
    """Wait until the process has ended with all its threads; False when it is still there after that time.

    It need not be a child; a zombie has ended. What it had open is closed when this returns true.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
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
    """The files that a process has mapped: its program, its libraries, and what it maps itself."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return set()
    # The path is the sixth field; what is mapped without a file has none.
    return {os.fsdecode(line.split(maxsplit=5)[5]) for line in maps.splitlines() if line.count(b" /")}


def with_cwd_in(directory: Path) -> list[Process]:
    """Processes whose working directory is there or below. Links are read, never followed: nothing can hang."""
    return [Process(pid, _name(pid), "cwd") for pid in _pids() if _below(_link(f"/proc/{pid}/cwd"), directory)]


def users_of(directory: Path) -> list[Process]:
    """Processes that keep what is mounted there from being unmounted, as far as this user may look."""
    found = []
    for pid in _pids():
        how = next(_holds(pid, directory), None)
        if how is not None:
            found.append(Process(pid, _name(pid), how))
    return found


def in_other_namespaces(holds_it: Callable[[Path], bool]) -> list[Process]:
    """Processes of other mount namespaces whose table of mounts has it, as far as this user may look."""
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
    """Whether a signal (SIGSTOP, SIGTSTP) or a debugger has stopped the process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return line[line.rindex(b")") + 2 :][:1] in b"Tt"


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
        name = os.fsdecode(Path(f"/proc/{pid}/comm").read_bytes()).strip()
    except OSError:
        return "?"
    return "".join(character if character.isprintable() else "?" for character in name)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _below(path: str, directory: Path) -> bool:
    return is_within(path.removesuffix(" (deleted)"), directory)
