"""Hash and bound the store of pre-images, and send its size to the server, which counts only what its session adds."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final

from bonobofs.errors import BonobofsError
from bonobofs.ipc.channel import Channel, MessageKind
from bonobofs.ipc.session_config import SessionConfig
from bonobofs.state.sessions import lives, read_all
from bonobofs.undo.image_expiry import is_due, places_of, usage
from bonobofs.undo.images import ImageFile
from bonobofs.undo.preimages import PACK, store_place

_BETWEEN: Final = 600.0
"""Seconds between two measurements: 20 ms for ten thousand files."""
_AFTER_HASH: Final = 60.0
"""Seconds after which the server learns how much the shared contents save."""
_PAUSE: Final = 2.0
"""Seconds between two looks at the images of the session."""
_RESTS: Final = 4
"""Seconds without work after each second of hashing: other threads wait for the interpreter and for the disk."""


class ImageStore:
    """Hashes the pre-images of its session and of ended sessions, measures all, and removes old ones."""

    def __init__(self, channel: Channel, config: SessionConfig, in_use: Callable[[], set[int]]) -> None:
        """`in_use` returns the numbers of the session's images to which programs may still write. OSError."""
        self._channel: Final = channel
        self._home: Final = Path(config.home)
        self._directory: Final = store_place(self._home, Path()) / config.session
        self._in_use: Final = in_use
        self._missing: Final[queue.SimpleQueue[int]] = queue.SimpleQueue()
        self._hashed_at: int | None = None
        """Time of modification of the session's directory after which all its images were hashed; None: not all."""
        self._rested_at = 0.0
        self._measures_at = 0.0

    def make_room(self, size: int) -> None:
        """Make room for a file, and measure."""
        self._missing.put(size)

    def run(self) -> None:
        """Hash, expire and measure until the process ends."""
        self._enforce_limits()
        self._wait(_PAUSE)
        self._hash_ended()
        while True:
            self._hash_own()
            self._enforce_limits()
            self._wait(_PAUSE)

    def _wait(self, seconds: float) -> None:
        """Wait, and meanwhile make room for one file at most."""
        with suppress(queue.Empty):
            self._enforce_limits(self._missing.get(timeout=seconds))

    def _enforce_limits(self, missing: int = 0) -> None:
        """Expire and measure when it is due, or because a file of `missing` bytes has no room."""
        expires = bool(missing) or is_due(self._home)
        if expires:
            from bonobofs.session.undo_service import expire_images  # noqa: PLC0415 - once an hour

            with suppress(BonobofsError, OSError):  # the daemon and the next call try again
                expire_images(self._home, missing)
        if expires or monotonic() >= self._measures_at:
            self._channel.send(MessageKind.STORE_SIZE, {"size": usage(places_of(self._home)).bytes})
            self._measures_at = monotonic() + _BETWEEN

    def _hash_own(self) -> None:
        """Hash the images of the session to which no program can write any more."""
        with suppress(OSError):  # there is no image, the disk is full, or the server is gone: the next call tries again
            modified = self._directory.stat().st_mtime_ns
            if modified == self._hashed_at:
                return
            names = os.listdir(self._directory)  # before the server ends its pack
            waiting = {file.number for name in names if (file := ImageFile.parse(name)) and not file.hash}
            in_use: set[int] = set()
            if waiting or any(name.startswith(PACK) for name in names):
                in_use = self._in_use()
                self._hash(self._directory, names, in_use)
                self._measures_at = min(self._measures_at, monotonic() + _AFTER_HASH)
            self._hashed_at = None if in_use & waiting else modified

    def _hash_ended(self) -> None:
        ended = {each.session for each in read_all(self._home)[0] if each.ended or (each.pid and not lives(each))}
        for directory in (place / session for place in places_of(self._home) for session in ended):
            with suppress(OSError):
                self._hash(directory, os.listdir(directory), set())

    def _hash(self, directory: Path, names: list[str], in_use: set[int]) -> None:
        from bonobofs.undo.image_objects import hash_images  # noqa: PLC0415 - most sessions keep nothing at their start

        self._rested_at = monotonic()
        hash_images(directory, names, in_use, self._throttle)

    def _throttle(self) -> None:
        self._wait(_RESTS * (monotonic() - self._rested_at))
        self._rested_at = monotonic()
