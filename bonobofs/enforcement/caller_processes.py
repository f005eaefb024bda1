"""Observe the processes that make requests: read each once from /proc, while its request blocks it.

Three grades of attribution stay apart. Proved: agent, session and uid, which entries have. Observed: pid, start time,
program, command line and parent. Claimed: ids of the agent's client from three variables of the process's environment.
What cannot be read stays unknown.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from bonobofs.audit.entry import PROCESS
from bonobofs.audit.writer import Trail
from bonobofs.enforcement.authorizer import Caller
from bonobofs.system.processes import start_time

CLAIMS: Final = ("CLAUDE_CODE_SESSION_ID", "CODEX_THREAD_ID", "TRACEPARENT")
"""The variables that are read. The record has no other part of an environment."""
LONGEST_COMMAND: Final = 1000
"""Characters of a command line in the record."""
DEEPEST: Final = 16
"""Maximum number of parents of a process."""
CURRENT: Final = 0.01
"""Seconds for which the table takes a pid for the same program. With one look a change, a change would take a fifth
longer."""
_FORK_LOOKS: Final = 16
"""Number of requests for which the table looks at a forked process each time: a shell's child soon calls execve."""
_MOST: Final = 1024
_ENVIRONMENT: Final = 1 << 16
_CLAIM: Final = re.compile(rb"\0(" + "|".join(CLAIMS).encode() + rb")=([\w.:/+-]{1,128})(?=\0)")
# The repetitions are bounded, because the text is hostile and the server waits.
_NAME: Final = r"[\w-]{0,24}(?:pass(?:wd|word|phrase)|token|secret|api[-_]?key|access[-_]?key|credential)[\w-]{0,24}"
_VALUE: Final = r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"&;|)]+)"
_SECRETS: Final = (
    re.compile(rf"(?i)(--?{_NAME}[\s=]+){_VALUE}"),
    re.compile(rf"(?i)(\b{_NAME}\s*[=:]\s*){_VALUE}"),
    re.compile(r"(?i)(\bauthorization\s*[=:]\s*)[^'\"]+"),
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)[\w.+/=~-]{8,}"),
    re.compile(r"(://[^/\s:@]*:)[^@\s/]+(?=@)"),
    re.compile(r"(\s(?:-u|--user)[\s=]['\"]?[^\s:'\"]{1,64}:)[^\s'\"]+"),
)
_SUSPICIOUS: Final = re.compile(
    r"(?i)pass|token|secret|key|credential|authorization|bearer|basic|://|^-u|^--user|\s-u|\s--user"
)
"""Matches each text in which another pattern here finds something."""
_OPTION: Final = re.compile(rf"(?i)-{{0,2}}{_NAME}")
"""An option or variable whose value is a secret."""
_HIDDEN: Final = "***"
_THREAD: Final = -1
"""Exit signal of a thread that does not lead its process."""


class CallerProcess:
    """One program in one process: its facts, and the number of its entry in the trail once it is recorded."""

    __slots__ = ("claimed", "looks", "observed", "parent", "program", "seq")

    def __init__(self, program: tuple[int, str, int], observed: dict[str, Any], claimed: dict[str, str]) -> None:
        """`program` is the start time, the name and a digest of the arguments: they tell programs of one pid apart."""
        self.program = program
        self.observed: Final = observed
        self.claimed: Final = claimed
        self.parent: CallerProcess | None = None
        self.seq = 0
        self.looks = 0

    @property
    def is_forked(self) -> bool:
        """True if it has the name and the arguments of its parent: it has not called execve."""
        return self.parent is not None and self.parent.program[1:] == self.program[1:]

    @property
    def name(self) -> str:
        return self.program[1]

    def record(self, trail: Trail) -> int:
        """Return the number of the process's entry; queue it, after those of its parents, if there is none yet."""
        if not self.seq:
            parent = 0 if self.parent is None else self.parent.record(trail)
            details: dict[str, Any] = {"observed": {**self.observed, "parent": parent}}
            if self.claimed:
                details["claimed"] = self.claimed
            self.seq = trail.queue_event(PROCESS, details, tool=self.name)
        return self.seq


class CallerTable:
    """The callers of one mount."""

    def __init__(self, keeps_commands: Callable[[], bool]) -> None:
        """`keeps_commands`: whether the record has command lines."""
        self._keeps_commands: Final = keeps_commands
        self._session_start: Final = start_time(os.getpid()) or 0
        self._until = 0.0
        self._callers: dict[tuple[int, int], Caller] = {}
        self._current: dict[int, CallerProcess | None] = {}
        """By pid or thread id, until `_until`."""
        self._known: dict[int, CallerProcess] = {}
        """By pid or thread id. An entry is valid if start time and name are still the same."""

    def find(self, pid: int, uid: int, now: float) -> Caller:
        """Return the caller of a request. The kernel has proved `uid`; `pid` is 0 if the process is unknown.

        `now` is of the monotonic clock. After CURRENT seconds the table looks at each process again: a pid may be
        reused, and execve changes the program.
        """
        if now >= self._until:
            self._until = now + CURRENT
            self._callers.clear()
            self._current.clear()
        known = self._callers.get((pid, uid))
        if known is not None:
            return known
        process = self._find_process(pid, 0)
        if process is None:
            known = Caller("", {"pid": pid, "uid": uid})
        else:
            known = Caller(process.name, {"pid": process.observed["pid"], "uid": uid}, process)
            if process.is_forked and process.looks < _FORK_LOOKS:
                process.looks += 1
                del self._current[pid]
                return known
        self._callers[pid, uid] = known
        return known

    def find_peer(self, pid: int, start: int) -> CallerProcess | None:
        """Return the process of a connection; None if it has ended, or another process has its pid."""
        self._current.pop(pid, None)
        process = self._find_process(pid, 0)
        return process if process is not None and process.program[0] == start else None

    def _find_process(self, pid: int, depth: int) -> CallerProcess | None:
        """Return a process with its parents up to the first that began before the session; None: it is unknown."""
        if pid <= 0:
            return None
        if pid in self._current:
            return self._current[pid]
        self._current[pid] = process = self._read(pid, depth)
        return process

    def _read(self, pid: int, depth: int) -> CallerProcess | None:
        try:
            data = _read_file(f"/proc/{pid}/stat", 1024)
            end = data.rindex(b")")
            fields = data[end + 2 :].split()
            parent, start, signal = int(fields[1]), int(fields[19]), int(fields[35])
        except (OSError, ValueError, IndexError):
            return None  # the process has ended, or is in a PID namespace that this one does not see
        name = _unescaped(data[data.index(b"(") + 1 : end]).decode("utf-8", "surrogateescape")
        if signal == _THREAD:
            return self._find_leader(pid, depth)
        try:
            arguments = _read_file(f"/proc/{pid}/cmdline", 4 * LONGEST_COMMAND)
        except OSError:
            arguments = b""
        known = self._known.get(pid)
        program = (start, name, hash(arguments))
        if known is not None and known.program == program:
            return known
        observed: dict[str, Any] = {"pid": pid, "start": start, "name": name}
        with suppress(OSError):
            observed["program"] = os.readlink(f"/proc/{pid}/exe")
        if arguments and self._keeps_commands():
            observed["command"] = redacted(os.fsdecode(arguments).rstrip("\0").split("\0"))
        process = CallerProcess(program, observed, _claims(pid))
        if start >= self._session_start and depth < DEEPEST:
            process.parent = self._find_process(parent, depth + 1)
        if parent > 0:
            observed["parent_pid"] = parent
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[pid] = process
        return process

    def _find_leader(self, tid: int, depth: int) -> CallerProcess | None:
        """Return the process of a thread: the kernel names the thread in a request."""
        try:
            status = _read_file(f"/proc/{tid}/status", 4096)
            leader = int(status[status.index(b"\nTgid:") + 6 :].split(maxsplit=1)[0])
        except (OSError, ValueError, IndexError):
            return None
        return self._find_process(leader, depth) if leader != tid else None


def redacted(words: Sequence[str]) -> str:
    """Return a command line with what looks like a secret replaced by `***`, and cut to LONGEST_COMMAND characters."""
    shown, hides_next = [], False
    if not any(map(_SUSPICIOUS.search, words)):
        return _cut(shlex.join(words))
    for word in words:
        name, equals, _ = word.partition("=")
        if hides_next:
            word = _HIDDEN  # noqa: PLW2901
        elif equals and _OPTION.fullmatch(name):
            word = f"{name}={_HIDDEN}"  # noqa: PLW2901
        hides_next = not equals and word.startswith("-") and _OPTION.fullmatch(word) is not None
        shown.append(word)
    command = _cut(shlex.join(shown))
    for pattern in _SECRETS:
        command = pattern.sub(rf"\1{_HIDDEN}", command)
    return _cut(command)


def _cut(command: str) -> str:
    return command if len(command) <= LONGEST_COMMAND else f"{command[: LONGEST_COMMAND - 3]}..."


def _claims(pid: int) -> dict[str, str]:
    """Return the variables of CLAIMS that a process's environment has, if it may be read and they look like ids."""
    try:
        data = _read_file(f"/proc/{pid}/environ", _ENVIRONMENT)
    except OSError:
        return {}
    return {name.decode(): value.decode() for name, value in _CLAIM.findall(b"\0" + data)}


def _read_file(path: str, most: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, most)
    finally:
        os.close(fd)


def details_of(caller: Caller, trail: Trail) -> dict[str, Any]:
    """Return the details of a caller for an entry, with the number of its process's entry."""
    return caller.details if caller.process is None else {**caller.details, PROCESS: caller.process.record(trail)}


def _unescaped(name: bytes) -> bytes:
    r"""Return a name of /proc/PID/stat, in which the kernel writes a newline as \n and a backslash as \\."""
    return name.replace(rb"\n", b"\n").replace(rb"\\", b"\\") if b"\\" in name else name
