"""Both dialects of Agent Mail, by one set of tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent_mail.servers import Fork, Original, running
from tests.support.world import ROOT


@pytest.fixture(scope="session")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fork]:
    """The real server. It needs an environment of its own, which scripts/test makes."""
    python = Path(os.environ.get("BONOBOFS_MAIL_VENV", ROOT / ".venv-mail")) / "bin" / "python"
    assert python.exists(), f"there is no Agent Mail at {python}; scripts/test installs it"
    server = Fork(python, tmp_path_factory.mktemp("mail"))
    with running(server):
        yield server


@pytest.fixture
def original() -> Iterator[Original]:
    server = Original()
    with running(server):
        yield server


@pytest.fixture(params=["fork", "original"])
def server(request: pytest.FixtureRequest) -> Fork | Original:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Fork | Original)
    return found


@pytest.fixture
def project() -> str:
    """A project of the test's own on a server that many tests use."""
    return tempfile.mktemp(prefix="project-", dir="/srv")
