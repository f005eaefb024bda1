"""Keep idle processors from halting while requests are served, through /dev/cpu_dma_latency.

A caller sleeps while its request is served, so its processor is idle. In a virtual machine with `guest_halt_poll_ns` 0,
the idle processor halts at once, and waking it takes longer than the request: a round trip takes 20 us instead of 8.
A PM QoS request of latency 0 makes idle processors poll (Documentation/power/pm_qos_interface.rst). Only root may make
it, and the group to which `bonobofs doctor --fix` gives the device. The server makes it while it is awake. The request
ends with its descriptor, also if the server is killed.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

_DEVICE: Final = Path("/dev/cpu_dma_latency")
_DRIVER: Final = Path("/sys/devices/system/cpu/cpuidle/current_driver")
_HALT_POLL: Final = Path("/sys/module/haltpoll/parameters/guest_halt_poll_ns")
MAX_PROCESSORS: Final = 8
"""Maximum of processors for which the request pays: each change of it interrupts every idle processor."""
_POLL: Final = struct.pack("=i", 0)
_NO_LIMIT: Final = struct.pack("=i", 2_000_000_000)
"""Microseconds that waking may take."""


def halt_poll_ns() -> int | None:
    """For how many nanoseconds idle processors poll before they halt; None if this is no such virtual machine."""
    try:
        return int(_HALT_POLL.read_text(encoding="ascii")) if _DRIVER.read_text().strip() == "haltpoll" else None
    except (OSError, ValueError):
        return None


def is_needed() -> bool:
    """Whether a request pays on this machine: idle processors halt at once, and there are few of them."""
    return halt_poll_ns() == 0 and 1 < (os.cpu_count() or 1) <= MAX_PROCESSORS


def device() -> Path | None:
    """The device, if a request pays and this user may make it."""
    return _DEVICE if is_needed() and os.access(_DEVICE, os.W_OK) else None


class RunQueue:
    """The number of runnable processes. If the machine has fewer processors, polling delays the callers."""

    def __init__(self) -> None:
        self._processors: Final = os.cpu_count() or 1
        try:
            self._fd = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # /proc is not mounted
            self._fd = -1

    def is_oversubscribed(self) -> bool:
        """Whether more processes are runnable than the machine has processors."""
        if self._fd < 0:
            return False
        try:
            running = int(os.pread(self._fd, 64, 0).split(None, 4)[3].partition(b"/")[0])
        except (OSError, ValueError, IndexError):  # in a container, another program may serve this file
            self.close()
            return False
        return running > self._processors

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class CpuLatency:
    """The PM QoS request of one server, without limit at first. Without the device, nothing happens."""

    def __init__(self) -> None:
        self._fd = -1
        self._is_polling = False
        self._served = -1
        if (found := device()) is not None:
            with suppress(OSError):  # a container may show the device and refuse to open it
                self._fd = os.open(found, os.O_WRONLY | os.O_CLOEXEC)
                os.write(self._fd, _NO_LIMIT)

    def disallow_halt(self) -> None:
        """Make idle processors poll: a request is being served."""
        if not self._is_polling and self._fd >= 0:
            os.write(self._fd, _POLL)
            self._is_polling = True

    def allow_halt(self) -> None:
        """Let idle processors halt: the server is about to sleep."""
        if self._is_polling:
            os.write(self._fd, _NO_LIMIT)
            self._is_polling = False

    def check(self, served: int) -> None:
        """Let processors halt if no request was served since the last call: the server may hang. Any thread."""
        if served == self._served:
            self.allow_halt()
        self._served = served

    def close(self) -> None:
        """Withdraw the request."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._is_polling = False
