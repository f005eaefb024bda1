"""Files with several names, of which some or all are scratch, and trees that change externally."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.mount_fixtures import MakePlace, Place
from tests.support.users import outcome
from tests.support.wait import until

POLICY = """
default = "deny"
temporary = ["**/*.tmp"]
[[scratch]]
paths = ["build/"]
[[rule]]
name = "notes"
paths = ["notes/"]
"""


@pytest.fixture
def world(own_place: MakePlace) -> Place:
    made = own_place(policy=POLICY)
    made.does(_fill, made.source)
    return made


def _fill(source: Path) -> None:
    (source / "build/deps").mkdir(parents=True)
    (source / "build/deps/app").write_text("old")
    os.link(source / "build/deps/app", source / "build/app")
    (source / "notes").mkdir()
    (source / "notes/a.md").write_text("text")
    (source / "notes/link").symlink_to("nowhere")
    os.link(source / "notes/a.md", source / "build/a.md")


def test_all_names_of_a_file_lead_to_the_copy_after_copy_up(world: Place) -> None:
    """Data written under one name is read under the other, in any order of lookups."""

    def story() -> None:
        first, second = world.path / "build/deps/app", world.path / "build/app"
        assert first.stat().st_ino == second.stat().st_ino
        second.write_text("new")
        assert (first.read_text(), second.read_text()) == ("new", "new")
        assert first.stat().st_nlink == second.stat().st_nlink == 2
        assert sorted(os.listdir(second.parent)) == ["a.md", "app", "deps"]
        second.unlink()
        assert first.read_text() == "new"
        assert (world.source / "build/app").read_text() == "old"

    world.does(story)


@pytest.mark.parametrize("names", [("build/a.md", "notes/a.md"), ("notes/a.md", "build/a.md")])
def test_a_file_with_scratch_and_source_names_is_not_changed(world: Place, names: tuple[str, str]) -> None:
    """With one scratch name and another one, a write would be lost in the overlay, or reach the source from scratch."""

    def story() -> None:
        for name in names:
            (world.path / name).stat()
        for name in names:
            assert outcome((world.path / name).write_text, "lost") == errno.EPERM
            assert (world.path / name).read_text() == "text"
        (world.path / "notes/b.tmp").write_text("whole")
        (world.path / "notes/b.tmp").rename(world.path / "notes/a.md")
        assert (world.source / "notes/a.md").read_text() == "whole"
        assert (world.source / "build/a.md").read_text() == "text"

    world.does(story)


def test_listings_show_external_creations_and_removals(world: Place) -> None:
    """A file of the overlay is listed once, whether or not the source has the name meanwhile."""

    def story() -> None:
        (world.path / "build/new").write_text("new")
        (world.path / "build/app").write_text("changed")
        (world.path / "notes/held.tmp").write_text("held")
        (world.source / "build/new").write_text("behind")
        (world.source / "build/app").unlink()
        (world.source / "notes/held.tmp").write_text("behind")
        until(lambda: sorted(os.listdir(world.path / "build")) == ["a.md", "app", "deps", "new"], "each is listed once")
        until(lambda: sorted(os.listdir(world.path / "notes")) == ["a.md", "held.tmp", "link"], "each is listed once")

    world.does(story)


def test_a_symlink_that_replaced_another_is_changed_itself(world: Place) -> None:
    """Its times are set on the symlink in the source, not on the staged one."""

    def story() -> None:
        os.symlink("a.md", world.path / "notes/x.tmp")
        os.rename(world.path / "notes/x.tmp", world.path / "notes/link")
        os.utime(world.path / "notes/link", (1, 1), follow_symlinks=False)
        assert os.lstat(world.source / "notes/link").st_mtime == 1

    world.does(story)
