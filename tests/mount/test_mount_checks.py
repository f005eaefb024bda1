"""Checks of source and mountpoint before a mount."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bonobofs.session import mount_checks
from bonobofs.system import mounts
from tests.support.world import ROOT, bonobofs, environment


@pytest.fixture
def folding(tmp_path: Path) -> Iterator[Path]:
    """A directory in which `Name` and `nAME` are one file."""
    directory = tmp_path / "folding"
    directory.mkdir()
    server = subprocess.Popen(
        [sys.executable, ROOT / "tests" / "mount" / "case_folding.py", directory],
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


def test_a_case_insensitive_source_is_detected(folding: Path) -> None:
    """`.GIT` would be `.git` there, and no rule about names would be reliable."""
    assert (folding / "nAME").exists()
    assert mount_checks.folds_case(folding)


def test_a_case_sensitive_source_is_accepted(tmp_path: Path) -> None:
    """Also if one file has both names, and if two files have them."""
    (tmp_path / "name").touch()
    (tmp_path / "NAME").hardlink_to(tmp_path / "name")
    (tmp_path / "other").touch()
    (tmp_path / "OTHER").touch()
    assert not mount_checks.folds_case(tmp_path)


@pytest.mark.parametrize("inside", ["source", "mount"])
def test_a_database_inside_source_or_mountpoint_is_refused(
    inside: str, source: Path, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "mount").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / inside)
    for place in (inside, "link"):
        env = {"BONOBOFS_DATABASE": f"sqlite:///{tmp_path}/{place}/state.db"}
        wrong = bonobofs("mount", source, tmp_path / "mount", env=env)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
        assert f"the database {tmp_path}/{inside}/state.db lies inside the {inside}" in wrong.stderr
    assert list((tmp_path / inside).iterdir()) == []
