"""Trails that a test writes, closed when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.errors import TrailError

Create = Callable[..., Trail]


def _close(trail: Trail) -> None:
    # The test may have damaged what the last entry would go to.
    with suppress(TrailError):
        trail.close()


@contextmanager
def creating() -> Iterator[Create]:
    """Trails are made by `create(directory, session="s", agent="alice")`, for the length of a `with` block."""
    with ExitStack() as made:

        def create(directory: Path, session: str = "s", agent: str = "alice") -> Trail:
            identity = TrailIdentity(session, agent, f"id-of-{agent}")
            trail = Trail.create(directory / f"{session}.jsonl", directory / f"{session}.head", identity)
            made.callback(_close, trail)
            return trail

        yield create


@pytest.fixture
def create() -> Iterator[Create]:
    """Make a trail that is closed at the end of the test; see `creating`."""
    with creating() as made:
        yield made
