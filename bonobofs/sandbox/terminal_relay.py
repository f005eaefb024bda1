"""The standard streams of a command: a terminal of its own, or pipes, and the loop that moves their bytes.

The command never gets a descriptor of the operator's terminal or of a regular file of the operator. With the terminal
it could type commands into the outer shell, and a file it could reopen with other rights.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import stat
import termios
import time
import tty
from collections.abc import Callable
from typing import Any, Final

_BLOCK: Final = 1 << 16
_SUSPEND: Final = b"\x1a"
_SECONDS_TO_STOP: Final = 0.5
"""Seconds after Ctrl-Z in which the relay looks whether the command has stopped."""
_LOOK_AGAIN: Final = 0.02


class _Pump:
    """Moves bytes from one descriptor to another. The target is closed at the end of the source."""

    def __init__(self, source: int, target: int, *, closes: bool, is_input: bool) -> None:
        self.source = source
        self.target = target
        self.closes = closes
        self.is_input = is_input
        self.pending = b""
        self.is_open = True

    def read(self) -> bytes:
        """Read what is there, and write it or keep it as `pending`. Returns the bytes."""
        try:
            data = os.read(self.source, _BLOCK)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""  # a terminal without another end answers EIO
        if not data:
            self.close()
            return b""
        self.pending += data
        self.write()
        return data

    def write(self) -> None:
        """Write `pending`: as much as the command's stream takes, or all of it to the operator's."""
        try:
            while self.pending:
                self.pending = self.pending[os.write(self.target, self.pending) :]
        except BlockingIOError:
            return
        except OSError:
            self.pending = b""
            self.close()

    def close(self) -> None:
        """Move no more bytes."""
        self.is_open = False
        if self.closes and not self.pending:
            os.close(self.target)
            self.closes = False


class TerminalRelay:
    """The standard streams of one command."""

    def __init__(self, uid: int | None = None) -> None:
        """`uid`: the user of the command, if it is another user."""
        self._pumps: Final[list[_Pump]] = []
        self._theirs: Final[list[int]] = []
        self._master = -1
        self._suspend_until = 0.0
        self.saved: list[Any] | None = None
        """Attributes of the operator's terminal, to restore; None: it was not changed."""
        self.terminal = -1
        """The command's own terminal; -1: it has none."""
        if os.isatty(0) and os.isatty(1):
            self.terminal = self._open_terminal(uid)
        self.streams: Final[list[int]] = []
        """Descriptors that become 0, 1 and 2 of the command."""
        for fd in range(3):
            self.streams.append(self._stream(fd))

    def _open_terminal(self, uid: int | None) -> int:
        self._master, slave = pty.openpty()
        if uid is not None:
            os.fchown(slave, uid, -1)
        termios.tcsetattr(slave, termios.TCSANOW, termios.tcgetattr(0))
        os.set_blocking(self._master, False)
        self._theirs.append(slave)
        self._pumps.append(_Pump(0, self._master, closes=False, is_input=True))
        self._pumps.append(_Pump(self._master, 1, closes=False, is_input=False))
        self.copy_size()
        return slave

    def _stream(self, fd: int) -> int:
        found = os.fstat(fd)
        if self.terminal >= 0 and os.isatty(fd):
            return self.terminal
        if stat.S_ISFIFO(found.st_mode) or (stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3)):
            # bubblewrap has streams of its own under the numbers 0 to 2.
            self._theirs.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
            return self._theirs[-1]
        if fd == 2 and os.path.samestat(found, os.fstat(1)):
            return self.streams[1]  # one pipe keeps the order of both streams
        read, write = os.pipe()
        if fd == 0:
            os.set_blocking(write, False)
            self._pumps.append(_Pump(0, write, closes=True, is_input=True))
        else:
            self._pumps.append(_Pump(read, fd, closes=False, is_input=False))
        self._theirs.append(read if fd == 0 else write)
        return self._theirs[-1]

    def copy_size(self) -> None:
        """Give the command's terminal the size of the operator's. The kernel sends SIGWINCH to the command."""
        if self._master >= 0:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))

    def begin(self) -> None:
        """Close the command's ends, and pass keys to the command's terminal unchanged."""
        for fd in self._theirs:
            os.close(fd)
        self._theirs.clear()
        if self._master >= 0:
            self.saved = termios.tcgetattr(0)
            self._set_raw()

    def _set_raw(self) -> None:
        self.copy_size()
        tty.setraw(0, termios.TCSADRAIN)

    def restore(self) -> None:
        """Give the operator's terminal its attributes back."""
        if self.saved is not None:
            with contextlib.suppress(termios.error):  # the operator's terminal is gone
                termios.tcsetattr(0, termios.TCSADRAIN, self.saved)

    def suspend(self) -> None:
        """Stop this process group, as Ctrl-Z does for a program without a sandbox; return when it continues.

        The kernel discards SIGTSTP if no shell could continue the group. Then this returns at once.
        """
        self._suspend_until = 0.0
        self.restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(0, signal.SIGTSTP)
        self._set_raw()

    def run(self, others: dict[int, Callable[[], None]], deadline: float, is_stopped: Callable[[], bool]) -> bool:
        """Move bytes until a descriptor of `others` is readable, or until `deadline` (CLOCK_MONOTONIC).

        Calls the function of each readable descriptor. If Ctrl-Z was typed and `is_stopped` says that the command has
        stopped, it suspends this process. Returns True when this process continues, and the caller continues the
        command.
        """
        masks = dict.fromkeys(others, select.POLLIN)
        waits: list[tuple[_Pump, int, int]] = []
        for pump in self._pumps:
            if pump.is_open:
                fd, mask = (pump.target, select.POLLOUT) if pump.pending else (pump.source, select.POLLIN)
                masks[fd] = masks.get(fd, 0) | mask
                waits.append((pump, fd, mask))
        poll = select.poll()
        for fd, mask in masks.items():
            poll.register(fd, mask)
        now = time.monotonic()
        wait = min(deadline, now + 60) - now
        if self._suspend_until > now:
            wait = min(wait, _LOOK_AGAIN)
        ready = dict(poll.poll(max(0.0, wait) * 1000))
        for fd in ready.keys() & others.keys():
            others[fd]()
        for pump, fd, mask in waits:
            if not ready.get(fd, 0) & (mask | select.POLLERR | select.POLLHUP):
                continue
            if mask == select.POLLOUT:
                pump.write()
            elif _SUSPEND in pump.read() and pump.is_input and self._master >= 0:
                self._suspend_until = time.monotonic() + _SECONDS_TO_STOP
        if self._suspend_until <= time.monotonic() or not is_stopped():
            return False
        self.suspend()
        return True

    def drain(self) -> None:
        """Move what the ended command has written, and restore the terminal."""
        for pump in self._pumps:
            while pump.is_open and not pump.is_input and select.select([pump.source], [], [], 0)[0]:
                pump.read()
        self.restore()
