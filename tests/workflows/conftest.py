"""Where workflows run: outside /tmp, where vim would make no backups."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.world import Mounted
from tests.workflows.workshop import Workshop


@pytest.fixture
def ground() -> Iterator[Path]:
    """An empty directory. Set up before `mounted`, so that it outlives the mounts in it."""
    mask = os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="bonobofs-workflow-", dir="/var/tmp") as name:
        yield Path(name)
    os.umask(mask)


@pytest.fixture
def workshop(ground: Path, mounted: Mounted) -> Workshop:
    return Workshop(ground, mounted)
