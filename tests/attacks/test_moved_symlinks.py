"""Symlinks below a moved directory are judged at their new path, before anything moves."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.users import outcome
from tests.support.world import Mounted

POLICY = 'default = "allow"\n[[scratch]]\npaths = ["**/build/", "only/out/"]\n'


@pytest.mark.parametrize("place", ["a/b/c", "a/b/build"])
def test_a_symlink_of_the_source_does_not_lead_out_after_its_directory_moved(
    place: str, mounted: Mounted, source: Path
) -> None:
    """At a scratch path too, because the symlink moves in the source itself."""
    (source / place).mkdir(parents=True)
    (source / place / "link").symlink_to("../../../x")
    world = mounted(policy=POLICY)
    assert outcome(os.rename, world.path / "a/b", world.path / "b2") == errno.EPERM
    assert os.path.islink(source / place / "link")
    assert not (world.path / "b2").exists()


def test_a_move_of_a_scratch_symlink_out_of_scratch_is_refused(mounted: Mounted, source: Path) -> None:
    """Within scratch it may lead anywhere."""
    (source / "a/b").mkdir(parents=True)
    (source / "only").mkdir()
    world = mounted(policy=POLICY)
    for top in ("a/b/build", "only/out"):
        (world.path / top).mkdir()
        (world.path / top / "link").symlink_to("../../../x")
    os.rename(world.path / "a/b", world.path / "b2")
    assert os.readlink(world.path / "b2/build/link") == "../../../x"
    assert outcome(os.rename, world.path / "only", world.path / "moved") in (errno.EXDEV, errno.EPERM)
    assert outcome(os.rename, world.path / "b2/build/link", world.path / "b2/link") in (errno.EXDEV, errno.EPERM)
    assert os.readlink(world.path / "only/out/link") == "../../../x"
    assert sorted(os.listdir(source)) == ["a", "b2", "only"]
    assert os.listdir(source / "b2") == []
