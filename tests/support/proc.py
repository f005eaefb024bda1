"""Read /proc of a process. A process, thread or descriptor that ends meanwhile is left out."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def threads(pid: int | str, name: str) -> dict[int, str]:
    """The text of a file of each thread, such as `status`, by the id of the thread."""
    return {int(thread): text for thread, text in _texts(f"/proc/{pid}/task", name).items()}


def children(pid: int | str) -> list[int]:
    """The child processes of all threads of a process."""
    return [int(child) for text in threads(pid, "children").values() for child in text.split()]


def child(pid: int | str, words: bytes = b"") -> int:
    """The only child process with these bytes in its command line."""
    (found,) = [each for each in children(pid) if words in command_line(each)]
    return found


def command_line(pid: int | str) -> bytes:
    """The words of the command, each with a zero byte after it. They are empty for a process that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def processes_with(word: Path) -> list[int]:
    """The processes that have this word in their command line."""
    return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and os.fsencode(word) in words_of(pid)]


def words_of(pid: int | str) -> list[bytes]:
    """The words of the command."""
    return command_line(pid).split(b"\0")


def descriptors(pid: int | str) -> list[str]:
    """The targets of the open descriptors of a process."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def descriptor_infos(pid: int | str) -> list[str]:
    """What the kernel tells of each open descriptor of a process, such as its inotify watches."""
    return list(_texts(f"/proc/{pid}/fdinfo", "").values())


def memory(pid: int | str, field: str = "VmRSS") -> int:
    """Bytes of memory that the process has now (VmRSS), or has had at most (VmHWM)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def is_traced(pid: int | str) -> bool:
    """Whether a tracer holds every thread of the process."""
    return all("TracerPid:\t0\n" not in status for status in threads(pid, "status").values())


def state(pid: int | str) -> str:
    """The letter of the state of a process, or "-" if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return _letter(Path(f"/proc/{pid}/stat").read_text())
    return "-"


def blocked_threads(pid: int | str) -> int:
    """How many threads wait in the kernel, for a lock or a disk, and take no signal."""
    return sum(_letter(stat) == "D" for stat in threads(pid, "stat").values())


def _letter(stat: str) -> str:
    return stat.rpartition(") ")[2][0]


def _texts(directory: str, name: str) -> dict[str, str]:
    """The text of `name` below each entry, or of the entry itself, by the name of the entry."""
    found = {}
    for entry in os.listdir(directory):
        with suppress(FileNotFoundError, ProcessLookupError):
            found[entry] = Path(directory, entry, name).read_text()
    return found
