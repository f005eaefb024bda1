"""A mount whose guard socket is called."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.ipc.client import call
from bonobofs.state.home import inside_directory
from tests.support.world import ALLOW_ALL, Mounted, World


class Called:
    """A mount and its guard socket."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.path = world.path
        self.source = world.source
        self.directory = inside_directory(world.home, world.session.session)

    def __call__(self, name: str, /, **arguments: Any) -> Any:
        return call(self.directory, name, **arguments)

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """A raw connection, for a hostile program."""
        with closing(self.connect()) as end:
            yield end

    def connect(self) -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        handle = os.open(self.directory, os.O_PATH)
        try:
            end.connect(f"/proc/self/fd/{handle}/guard.sock")
        except OSError:
            end.close()
            raise
        finally:
            os.close(handle)
        end.settimeout(30)
        return end

    def of(self, path: str) -> list[AuditEntry]:
        """The entries of a path."""
        return [entry for entry in self.world.entries() if entry.path == path]


def answer(end: socket.socket) -> dict[str, Any]:
    """The next answer; {} if the server has closed the connection."""
    received = b""
    while not received.endswith(b"\n"):
        try:
            data = end.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            return {}
        received += data
    document: dict[str, Any] = json.loads(received)
    return document


CalledMount = Callable[..., Called]


@pytest.fixture
def mounted_called(mounted: Mounted) -> CalledMount:
    """As `mounted`, under an allow-all policy if none is given."""

    def mount(**order: Any) -> Called:
        return Called(mounted(**{"policy": ALLOW_ALL, **order}))

    return mount


@pytest.fixture
def alice(mounted_called: CalledMount) -> Called:
    return mounted_called()
