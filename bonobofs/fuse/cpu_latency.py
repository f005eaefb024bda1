"""Idle processors, kept from halting while requests are served.

The caller sleeps while its request is served, so its processor is idle. Where that halts to the host at once
(`guest_halt_poll_ns` is 0, as virtual machines often have it), waking the caller takes longer than all else: a round
trip of 20 us takes 8 when idle processors poll instead. The kernel is asked for that (PM QoS,
Documentation/power/pm_qos_interface.rst) only while the server itself is awake, and only by root, who may ask. The wish
ends with the descriptor: a killed server leaves none behind.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

_DEVICE: Final = Path("/dev/cpu_dma_latency")
_DRIVER: Final = Path("/sys/devices/system/cpu/cpuidle/current_driver")
MOST_PROCESSORS: Final = 8
"""Each change of the wish interrupts every idle processor: with more of them it would cost what it saves."""
_AWAKE: Final = struct.pack("=i", 0)
_NO_WISH: Final = struct.pack("=i", 2_000_000_000)
"""Microseconds that waking may take."""


def device() -> Path | None:
    """The device that takes the wish, where the server makes it: as root, in a virtual machine of few processors."""
    try:
        halts = _DRIVER.read_text().strip() == "haltpoll"
    except OSError:
        return None
    few = 1 < (os.cpu_count() or 1) <= MOST_PROCESSORS
    return _DEVICE if halts and few and os.access(_DEVICE, os.W_OK) else None


class Idle:
    """The wish, off at first. Where it cannot be made, nothing happens."""

    def __init__(self) -> None:
        self._fd = -1
        self._awake = False
        self._served = -1
        if (found := device()) is not None:
            with suppress(OSError):  # a container may show the device and not let it be opened
                self._fd = os.open(found, os.O_WRONLY | os.O_CLOEXEC)
                os.write(self._fd, _NO_WISH)

    def keep_awake(self) -> None:
        """Requests are being served."""
        if not self._awake and self._fd >= 0:
            os.write(self._fd, _AWAKE)
            self._awake = True

    def let_halt(self) -> None:
        """The server is about to wait."""
        if self._awake:
            os.write(self._fd, _NO_WISH)
            self._awake = False

    def look(self, served: int) -> None:
        """Called now and then by another thread, with how many were served: a request that hangs keeps none awake."""
        if served == self._served:
            self.let_halt()
        self._served = served

    def close(self) -> None:
        """Give the wish up for good."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._awake = False
