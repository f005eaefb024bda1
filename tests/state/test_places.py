"""Where a mount may stand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bonobofs.state import mounts, places
from tests.worlds import ROOT, environment


@pytest.fixture
def folding(tmp_path: Path) -> Iterator[Path]:
    """A directory in which `Name` and `nAME` are one file."""
    directory = tmp_path / "folding"
    directory.mkdir()
    server = subprocess.Popen(
        [sys.executable, ROOT / "tests" / "state" / "folding.py", directory],
        cwd="/",
        env=environment(),
        stdout=subprocess.PIPE,
    )
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield directory
        mounts.detach(directory)
    assert server.returncode == 0


def test_a_source_that_folds_case_is_known(folding: Path) -> None:
    """`.GIT` would be `.git` there, and no rule about names could be kept."""
    assert (folding / "nAME").exists()
    assert places.folds_case(folding)


def test_a_source_that_tells_case_apart_is_not(tmp_path: Path) -> None:
    """Also where one file has both names, and where two files do."""
    (tmp_path / "name").touch()
    (tmp_path / "NAME").hardlink_to(tmp_path / "name")
    (tmp_path / "other").touch()
    (tmp_path / "OTHER").touch()
    assert not places.folds_case(tmp_path)
