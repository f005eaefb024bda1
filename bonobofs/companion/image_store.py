"""Bound the store of pre-images, and send its size to the server, which counts only what its own session adds."""

from __future__ import annotations

import queue
from contextlib import suppress
from pathlib import Path
from typing import Final

from bonobofs.errors import BonobofsError
from bonobofs.ipc.channel import Channel, MessageKind
from bonobofs.undo.image_expiry import is_due, places_of, usage

_BETWEEN: Final = 600.0
"""Seconds between two measurements: 20 ms for ten thousand files."""


class ImageStore:
    """Measures the pre-images of a state directory, and removes old ones."""

    def __init__(self, channel: Channel, home: Path) -> None:
        self._channel: Final = channel
        self._home: Final = home
        self._missing: Final[queue.SimpleQueue[int]] = queue.SimpleQueue()

    def make_room(self, size: int) -> None:
        """Make room for a file, and measure."""
        self._missing.put(size)

    def run(self) -> None:
        """Expire and measure until the process ends."""
        missing = 0
        while True:
            if missing or is_due(self._home):
                self._expire(missing)
            self._channel.send(MessageKind.STORE_SIZE, {"size": usage(places_of(self._home)).bytes})
            missing = 0
            with suppress(queue.Empty):
                missing = self._missing.get(timeout=_BETWEEN)

    def _expire(self, free_bytes: int) -> None:
        from bonobofs.session.undo_service import expire_images  # noqa: PLC0415 - once an hour

        with suppress(BonobofsError, OSError):  # the daemon and the next call try again
            expire_images(self._home, free_bytes)
