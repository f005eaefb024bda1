"""The standard streams of a command: a terminal of its own, or pipes, and the loop that moves their bytes.

The command never gets a descriptor of the operator, except of /dev/null. With the terminal it could type commands into
the outer shell. A file or a pipe it could reopen in /proc/self/fd, and read what other programs write there.
"""

from __future__ import annotations

import contextlib
import errno
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
_STANDARD: Final = (0, 1)
_ERRORS: Final = 2
_CLOSED: Final = select.POLLERR | select.POLLHUP | select.POLLNVAL


class _Pump:
    """Moves bytes from one descriptor to another, and passes the end of each on to the other. It never waits.

    The operator's pipes are not set to O_NONBLOCK, because other programs use them too.
    """

    def __init__(self, source: int, target: int, *, closes: bool, is_input: bool) -> None:
        """`closes`: source and target are closed at the end."""
        self.source: Final = source
        self.target: Final = target
        self.is_input: Final = is_input
        self.pending = b""
        """Bytes that the target has not taken yet."""
        self.is_open = True
        self._closes: Final = closes
        kind = stat.S_IFMT(os.fstat(target).st_mode)
        self._may_wait: Final = kind in (stat.S_IFIFO, stat.S_IFSOCK)
        self._at_end = False

    def events(self) -> dict[int, int]:
        """Return the events of poll that the pump needs, by descriptor. Poll reports a closed target in any case."""
        return {self.target: select.POLLOUT} if self.pending else {self.source: select.POLLIN, self.target: 0}

    def move(self, ready: dict[int, int]) -> bytes:
        """Move bytes after events. Returns the bytes that were read."""
        if ready.get(self.target, 0) & _CLOSED:
            self.pending, self._at_end = b"", True
        read = b""
        if not self.pending and not self._at_end and ready.get(self.source, 0):
            read = self._read()
        self._write()
        if self._at_end and not self.pending:
            self._close()
        return read

    def _read(self) -> bytes:
        try:
            self.pending = os.read(self.source, _BLOCK)
        except BlockingIOError:
            return b""
        except OSError:
            self.pending = b""  # a terminal without another end answers EIO
        self._at_end = not self.pending
        return self.pending

    def _write(self) -> None:
        try:
            while self.pending:
                self.pending = self.pending[self._write_some() :]
        except BlockingIOError:
            return
        except OSError:
            self.pending, self._at_end = b"", True

    def _write_some(self) -> int:
        if not self._may_wait:
            return os.write(self.target, self.pending)
        try:
            return os.pwritev(self.target, [self.pending], -1, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        # Pipes before Linux 6.4. A writable pipe takes PIPE_BUF bytes.
        if not select.select([], [self.target], [], 0)[1]:
            raise BlockingIOError
        return os.write(self.target, self.pending[: select.PIPE_BUF])

    def _close(self) -> None:
        """Move no more bytes. The writer of the source gets SIGPIPE, and the reader of the target the end."""
        self.is_open = False
        if not self._closes:
            return
        with open(os.devnull, "r+b", buffering=0) as null:
            for fd in {self.source, self.target} - {_ERRORS}:  # `run` reports its own errors there
                if fd in _STANDARD:
                    os.dup2(null.fileno(), fd)  # no other file gets the number
                else:
                    os.close(fd)


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
        if stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3):
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
            self._pumps.append(_Pump(read, fd, closes=True, is_input=False))
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
        now = time.monotonic()
        wait = min(deadline, now + 60) - now
        if self._suspend_until > now:
            wait = min(wait, _LOOK_AGAIN)
        moved = self._move(self._pumps, others, wait)
        if self._master >= 0 and any(pump.is_input and _SUSPEND in data for pump, data in moved):
            self._suspend_until = time.monotonic() + _SECONDS_TO_STOP
        if self._suspend_until <= time.monotonic() or not is_stopped():
            return False
        self.suspend()
        return True

    def _move(
        self, pumps: list[_Pump], others: dict[int, Callable[[], None]], wait: float
    ) -> list[tuple[_Pump, bytes]]:
        """Wait `wait` seconds at most, and answer each event. Returns the pumps with an event, and what they read."""
        masks = dict.fromkeys(others, select.POLLIN)
        for pump in pumps:
            if pump.is_open:
                for fd, mask in pump.events().items():
                    masks[fd] = masks.get(fd, 0) | mask
        poll = select.poll()
        for fd, mask in masks.items():
            poll.register(fd, mask)
        ready = dict(poll.poll(max(0.0, wait) * 1000))
        for fd in ready.keys() & others.keys():
            others[fd]()
        found = [pump for pump in pumps if pump.is_open and not ready.keys().isdisjoint(pump.events())]
        return [(pump, pump.move(ready)) for pump in found]

    def drain(self, others: dict[int, Callable[[], None]], deadline: Callable[[], float]) -> None:
        """Move what the ended command has written, until `deadline` at most, and restore the terminal."""
        outputs = [pump for pump in self._pumps if not pump.is_input]
        while any(pump.is_open for pump in outputs):
            is_full = any(pump.pending and pump.is_open for pump in outputs)
            wait = min(deadline() - time.monotonic(), 60) if is_full else 0
            moved = self._move(outputs, others, wait)
            if not moved and (not is_full or deadline() <= time.monotonic()):
                break
        self.restore()
