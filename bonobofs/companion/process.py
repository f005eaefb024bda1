"""The companion's life: `main`, with the number of the descriptor of its line to the server as its last argument.

It ends with the server, whichever way that ends: the kernel kills it, and the line has an end. Where the mount is to
cover the source itself, it stands in a mount namespace of its own, in which the source stays what it is.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

from bonobofs.companion.judging import Judging
from bonobofs.companion.leases import Leases
from bonobofs.companion.policy import PolicyFile
from bonobofs.companion.watching import Watching
from bonobofs.fuse import system
from bonobofs.fuse.control import Kind, Line
from bonobofs.integrity.watch import UnwatchableError

_MOST_SECONDS: Final = 3600.0


class Companion:
    """The services of one session, and the loop that runs them."""

    def __init__(self, line: Line, config: dict[str, Any], watching: Watching | None, leases: Leases) -> None:
        source = Path(config["source"])
        file = config["policy_file"]
        self._line: Final = line
        self._watching: Final = watching
        self._judging: Final = Judging(line, Path(config["home"]), config["session"], source)
        self._leases: Final = leases
        self._policy: Final = PolicyFile(line, file and Path(file), source, Path(config["session_dir"]))

    def run(self) -> None:
        """Serve until the server is gone."""
        while True:
            now = monotonic()
            ready = self._wait(now)
            now = monotonic()
            if self._line.fileno() in ready:
                try:
                    messages = self._line.receive()
                except EOFError:
                    return
                for kind, body in messages:
                    self._act(kind, body, now)
            if self._watching is not None and self._watching.fileno() in ready:
                self._watching.read(now)
            if self._watching is not None and self._watching.due(now) <= 0:
                self._watching.tell_closed()
            if self._judging.due(now) <= 0:
                self._judging.judge()
            if self._policy.due(now) <= 0:
                self._policy.look(now)

    def _wait(self, now: float) -> set[int]:
        """The descriptors that can be read, or none when a service is due."""
        poll = select.poll()
        poll.register(self._line.fileno(), select.POLLIN)
        seconds = min(self._judging.due(now), self._policy.due(now), _MOST_SECONDS)
        watching = self._watching
        if watching is not None:
            seconds = min(seconds, watching.due(now))
        if watching is not None and watching.fileno() >= 0:
            wait = watching.may_read(now)
            if wait <= 0:
                poll.register(watching.fileno(), select.POLLIN)
            else:
                seconds = min(seconds, wait)
        return {fd for fd, _ in poll.poll(seconds * 1000)}

    def _act(self, kind: Kind, body: bytes, now: float) -> None:
        if kind is Kind.SUSPECTS:
            self._judging.suspect(json.loads(body), now)
        elif kind is Kind.RELOAD:
            self._policy.load()
        elif kind is Kind.BOUND:
            self._leases.bound(json.loads(body)["number"])
        elif kind is Kind.SETTLE:
            self._settle(now)

    def _settle(self, now: float) -> None:
        if self._watching is not None:
            self._watching.read_rest(now)
        self._judging.judge()
        self._line.tell(Kind.SETTLE)


@dataclass(frozen=True, slots=True)
class _Standing:
    watch: str
    refused: str = ""
    apart: bool = False


def _stand_apart(config: dict[str, Any]) -> _Standing:
    """Where the mount covers the source, go where it does not."""
    if config["mountpoint"] != config["source"]:
        return _Standing("")
    try:
        system.unshare_mounts()
    except OSError as error:
        return _Standing(
            "",
            f"mounting over the source itself needs a mount namespace for what works beside the mount, and there is no "
            f"right to one ({error.strerror}); mount on another directory, or as root",
        )
    return _Standing("", apart=True)


def _first(line: Line) -> dict[str, Any]:
    """The configuration, which is the first that the server says."""
    poll = select.poll()
    poll.register(line.fileno(), select.POLLIN)
    messages: list[tuple[Kind, bytes]] = []
    while not messages:
        poll.poll()
        messages = line.receive()
    config: dict[str, Any] = json.loads(messages[0][1])
    return config


def main() -> int:
    """Stand beside the server that is at the other end of the line; the exit code."""
    system.die_with_parent()
    line = Line(socket.socket(fileno=int(sys.argv.pop())), waits=True)
    os.umask(0o077)
    try:
        config = _first(line)
    except EOFError:
        return 0
    standing = _stand_apart(config)
    system.forbid_tracing()
    leases = Leases(line, config)
    watching: Watching | None = None
    if not standing.refused:
        os.chdir(config["source"])
        try:
            watching = Watching(line)
        except (UnwatchableError, OSError) as error:
            standing = _Standing(str(error), apart=standing.apart)
    line.tell(Kind.STANDING, asdict(standing))
    Companion(line, config, watching, leases).run()
    leases.end()
    return 0
