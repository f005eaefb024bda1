"""Every promise about the database is tried on SQLite and on a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bonobofs.state.database import Database
from tests.support.postgres import Postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which database it is; what is opened in this test, or by a program that it starts, is a new one of that kind."""
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        monkeypatch.setenv("BONOBOFS_DATABASE", server.make_database())
    return str(request.param)


@pytest.fixture
def opened(where: str, home: Path) -> Iterator[Callable[[Path], Database]]:
    """opened(HOME) opens the database for a state directory; all are closed after the test."""
    found: list[Database] = []

    def open_for(directory: Path) -> Database:
        for part in ("sessions", "trails"):
            (directory / part).mkdir(parents=True, exist_ok=True)
        found.append(Database.open(directory))
        return found[-1]

    yield open_for
    for database in found:
        database.close()


@pytest.fixture
def database(opened: Callable[[Path], Database], home: Path) -> Database:
    return opened(home)
