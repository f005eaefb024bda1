"""The leases, followed for the server: in a thread, as a database that does not answer must keep nobody waiting."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any, Final

from bonobofs.errors import BonobofsError
from bonobofs.ipc.channel import Kind, Line

_SECONDS_TO_LEAVE: Final = 0.5
_SECONDS_BETWEEN: Final = 0.5
"""Between two attempts, while the database does not answer."""
_NO_LOOK: Final = 0


class Leases:
    """One service of the companion.

    Each look is told to the server under a number, with what it has shown; the server answers with that number once
    every change is bound by it, and then it is acknowledged to the others.
    """

    def __init__(self, line: Line, config: dict[str, Any]) -> None:
        self._line: Final = line
        self._config: Final = config
        self._bound: Final[queue.SimpleQueue[int]] = queue.SimpleQueue()
        self._thread: Final = threading.Thread(target=self._run, daemon=True)
        self._ended: Final = threading.Event()
        self._number = 0
        self.told: list[dict[str, Any]] = []
        """What the server was last told of the leases."""
        os.environ.update(config["database"])
        self._thread.start()

    def bound(self, number: int) -> None:
        """The server is bound by what that look has shown."""
        self._bound.put(number)

    def end(self) -> None:
        """Say that the session has ended, if the database takes it at once; else its silence says so."""
        self._ended.set()
        self._bound.put(_NO_LOOK)
        self._thread.join(_SECONDS_TO_LEAVE)

    def _run(self) -> None:
        said = ""
        while not self._ended.is_set():
            try:
                self._follow()
            except (BonobofsError, OSError) as error:
                # The server refuses changes until a look succeeds; why, is told once, in its log.
                if str(error) != said:
                    said = str(error)
                    self._line.tell(Kind.UNKNOWN, {"reason": " ".join(said.split())})
                    sys.stderr.write(f"bonobofs: the leases cannot be followed: {' '.join(said.split())}\n")
                    sys.stderr.flush()
            self._wait(monotonic() + _SECONDS_BETWEEN)

    def _follow(self) -> None:
        from bonobofs.state import heartbeats  # noqa: PLC0415 - loading it takes longer than all else here
        from bonobofs.state.database import Database  # noqa: PLC0415
        from bonobofs.state.lease_follower import BEAT, Follower  # noqa: PLC0415

        # Where the database is missing, none is made: its emptiness would say that nothing is leased.
        with Database(Path(self._config["home"])) as database:
            follower = Follower(database, self._config["session"], self._config["holder"], self._config["source"])
            while not self._ended.is_set():
                began = monotonic()
                seen = follower.look()
                self._number += 1
                self.told = self.told if seen.leases is None else seen.leases
                self._line.tell(Kind.LEASES, {"number": self._number, "until": seen.until, "leases": seen.leases})
                if self._wait(began + BEAT, self._number):
                    follower.acknowledge(seen)
                    self._wait(began + BEAT)
            heartbeats.detach(database, self._config["session"])

    def _wait(self, deadline: float, number: int = _NO_LOOK) -> bool:
        """Wait until then, or until the server is bound by that number; whether it is."""
        while not self._ended.is_set() and (left := deadline - monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                if self._bound.get(timeout=left) == number != _NO_LOOK:
                    return True
        return False
