"""The companion, kept going: when it dies another is started, later each time, and at least every 30 seconds.

Where the mount covers the source, the next one stands in the mount namespace of the first, in which nothing does. All
get the source by its descriptor as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

from bonobofs.errors import MountError, TrailError
from bonobofs.fuse.companion_requests import Hearing
from bonobofs.fuse.companion_supervisor import Beginning, Companion, Standing, start
from bonobofs.fuse.diagnostics import Diagnostics
from bonobofs.fuse.transport import Transport

_WAITS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds after each death in a row until another is started; the last holds for all further deaths."""
_MANY: Final = 6
"""Deaths in a row after which `status` and an alert say that the companion keeps ending."""
_LONG: Final = 60.0
"""Seconds after which a death is the first again."""
_NONE: Final = "it was mounted without the process that watches"


def accompany(config: dict[str, Any], beginning: Beginning) -> tuple[Companion | None, Standing]:
    """The first, once it stands. MountError: without it, this mount must not be."""
    if config.get("companion") is None:
        return None, Standing(_NONE)
    companion = beginning.companion
    if companion is None:
        why = beginning.failure.strerror if beginning.failure is not None else ""
        standing = Standing(f"the process that watches cannot be started: {why}")
    else:
        standing = companion.wait()
    if standing.refused:
        raise MountError(standing.refused)
    if config["source"] == config["mountpoint"] and not standing.layer:
        raise MountError(f"mounting over the source itself needs a process beside the mount, but {standing.watch}")
    return companion, standing


class Beside:
    """Used by the thread that serves, whose end would be the companion's."""

    def __init__(
        self,
        config: dict[str, Any],
        companion: Companion | None,
        root: int,
        transport: Transport,
        hearing: Hearing,
        diagnostics: Diagnostics,
    ) -> None:
        self._config: Final = config
        self._companion = companion
        self._root: Final = root
        self._transport: Final = transport
        self._hearing: Final = hearing
        self._diagnostics: Final = diagnostics
        self._namespaces: Final = () if companion is None else companion.namespaces
        self._ear = -1
        self._deaths = 0
        self._began = 0.0
        self._due = 0.0 if companion is None and config.get("companion") is not None else float("inf")

    def fileno(self) -> int:
        """What can be read when it has said something, or has ended; -1: there is none just now."""
        return self._ear

    def listen(self) -> None:
        """Begin to hear the companion that stands."""
        if self._companion is not None:
            self._ear = self._companion.fileno()
            self._transport.listen(self._ear, self.heard)

    def heard(self) -> None:
        """Take in what it has said. Never raises."""
        try:
            if not self._hearing.heard() and self._ear >= 0:
                self._transport.deafen(self._ear)
                self._ear = -1
                self._lost()
        except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
            self._diagnostics.failed("what the companion said", error)

    def tidy(self, now: float) -> None:
        """Start another companion, if it is time."""
        if now >= self._due:
            self._due = float("inf")
            self._began = now
            try:
                self._companion = start(self._config, self._hearing.policy, self._root, self._namespaces, first=False)
            except OSError as error:
                self._diagnostics.say(f"the companion cannot be started: {error.strerror}")
                self._plan(now)
            else:
                self._hearing.begin(self._companion)
                self.listen()

    def _lost(self) -> None:
        companion, self._companion = self._companion, None
        if companion is None:
            return
        handle = companion.kill()

        def ended() -> None:
            self._transport.deafen(handle)
            os.close(handle)
            companion.bury()
            self._hearing.buried()
            self._plan(time.monotonic())
            self.tidy(time.monotonic())

        # Until it has, some change of its own may still go on.
        self._transport.listen(handle, self._unfailing(ended))

    def _unfailing(self, act: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
                self._diagnostics.failed("the end of the companion", error)

        return run

    def _plan(self, now: float) -> None:
        self._deaths = 1 if now - self._began >= _LONG else self._deaths + 1
        wait = _WAITS[min(self._deaths, len(_WAITS)) - 1]
        self._due = now + wait
        if self._deaths >= _MANY:
            try:
                self._hearing.report_deaths(self._deaths, wait, alert=self._deaths == _MANY)
            except TrailError as error:
                self._diagnostics.say(str(error))
