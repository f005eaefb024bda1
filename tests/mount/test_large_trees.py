"""Large trees and files: memory and time depend only on what is accessed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from bonobofs.session import build
from tests.support import proc
from tests.support.mount_fixtures import MakePlace
from tests.support.observe import companion_of, fill_queue, out_of_band, stopped
from tests.support.users import run_in_child
from tests.support.wait import until

CROWD: Final = 100_000
MEGABYTE: Final = 1_000_000


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A source with one directory of 100,000 files."""
    source = tmp_path_factory.mktemp("large")
    (source / "crowd").mkdir()
    directory = os.open(source / "crowd", os.O_RDONLY)
    for number in range(CROWD):
        os.mknod(f"file-{number:06}", 0o644, dir_fd=directory)
    os.close(directory)
    yield source
    shutil.rmtree(source)


def test_a_hundred_thousand_entries_are_listed_and_walked_within_75_megabytes(
    own_place: MakePlace, crowd: Path
) -> None:
    """Each entry comes exactly once, with its attributes, and the server stays small; also with warm caches."""
    world = own_place(source=crowd)
    expected = [f"file-{number:06}" for number in range(CROWD)]
    for _ in range(2):
        with os.scandir(world.path / "crowd") as entries:
            found = sorted(entry.name for entry in entries if entry.stat().st_size == 0)
        assert found == expected
    assert proc.memory(world.pid) < (75 if build() == "pure Python" else 85) * MEGABYTE  # compiled modules take 8 MB


def test_the_server_returns_the_memory_of_forgotten_files(own_place: MakePlace, crowd: Path) -> None:
    """When a walked tree is moved out of the source, the kernel forgets it, and the server shrinks."""
    world = own_place(source=crowd)
    with os.scandir(world.path / "crowd") as entries:
        assert sum(entry.stat().st_size == 0 for entry in entries) == CROWD
    walked = proc.memory(world.pid)
    outside = crowd.with_name("outside")
    (crowd / "crowd").rename(outside)
    try:
        until(lambda: proc.memory(world.pid) < walked - 20 * MEGABYTE, "the server returns memory")
        assert not (world.path / "crowd").exists()
    finally:
        outside.rename(crowd / "crowd")


def test_a_comparison_after_lost_events_costs_no_memory_for_listed_files(own_place: MakePlace, crowd: Path) -> None:
    """Each node takes 240 bytes, a listed file 112. A listed file that differs is still reported."""
    world = own_place(source=crowd)
    with os.scandir(world.path / "crowd") as entries:
        last = [entry.name for entry in entries if entry.stat().st_size == 0][-1]
    listed = proc.memory(world.pid)
    with stopped(companion_of(world.pid)):
        fill_queue(crowd)
        os.utime(crowd / "crowd" / last)
    until(lambda: f"crowd/{last}" in out_of_band(world), "the last file was compared")
    assert proc.memory(world.pid) - listed < 8 * MEGABYTE


def test_a_listed_file_becomes_a_node_at_its_first_request(own_place: MakePlace) -> None:
    """A file that is known from listings alone can be read, changed, linked, replaced and removed as any other."""
    world = own_place()
    names = [f"file-{number}" for number in range(8)]
    for name in names:
        (world.source / name).write_text(name)

    def story() -> None:
        for _ in range(2):
            with os.scandir(world.path) as entries:
                assert {entry.name for entry in entries if entry.stat().st_size == 6} == set(names)
        assert (world.path / "file-0").read_text() == "file-0"
        (world.path / "file-1").write_text("changed")
        os.link(world.path / "file-2", world.path / "link")
        os.replace(world.path / "file-3", world.path / "file-4")
        (world.path / "file-5").unlink()
        os.replace(world.path / "file-6", world.path / "moved")
        (world.path / "file-7").chmod(0o600)

    run_in_child(story)
    text = {path.name: path.read_text() for path in world.source.iterdir()}
    kept = {"file-0": "file-0", "file-1": "changed", "file-4": "file-3", "file-7": "file-7", "moved": "file-6"}
    assert text == kept | {"file-2": "file-2", "link": "file-2"}
    assert (world.source / "file-7").stat().st_mode & 0o777 == 0o600


def test_a_listing_alone_costs_no_memory_for_long(own_place: MakePlace, crowd: Path) -> None:
    """The server drops the nodes that the kernel forgets."""
    world = own_place(source=crowd)
    assert len(os.listdir(world.path / "crowd")) == CROWD
    assert proc.memory(world.pid) < 100 * MEGABYTE


def test_only_accessed_files_cost_memory(own_place: MakePlace, crowd: Path) -> None:
    """Mounting a large tree and accessing ten files takes as little memory as if there were no others."""
    (crowd.parent / "small").mkdir(exist_ok=True)
    small = own_place(source=crowd.parent / "small")
    world = own_place(source=crowd)
    for number in range(0, CROWD, CROWD // 10):
        file = world.path / "crowd" / f"file-{number:06}"
        assert file.read_bytes() == b""
        file.chmod(0o600)
        file.chmod(0o644)
    assert proc.memory(world.pid) - proc.memory(small.pid) < 2 * MEGABYTE
    (crowd.parent / "small").rmdir()


def test_interleaved_readers_each_see_everything(own_place: MakePlace) -> None:
    """Two programs that read one directory alternately both get each entry once."""
    world = own_place()

    def story() -> None:
        expected = {f"{number:04}-{'x' * 100}" for number in range(2000)}
        for name in expected:
            (world.source / name).touch()
        with os.scandir(world.path) as one, os.scandir(world.path) as other:
            seen: tuple[list[str], list[str]] = ([], [])
            for first, second in zip(one, other, strict=True):
                seen[0].append(first.name)
                seen[1].append(second.name)
        for names in seen:
            assert len(names) == len(expected)
            assert set(names) == expected

    world.does(story)


def test_a_listing_skips_no_entry_while_others_come_and_go(own_place: MakePlace) -> None:
    """While a directory changes, each remaining entry is read exactly once, as `rm -r` needs."""
    world = own_place()

    def story() -> None:
        names = [f"{number:04}-{'x' * 100}" for number in range(3000)]
        for name in names:
            (world.source / name).touch()
        seen = []
        with os.scandir(world.path) as entries:
            for entry in entries:
                seen.append(entry.name)
                if entry.name in names and int(entry.name[:4]) % 2:
                    os.unlink(entry.path)
                if len(seen) % 100 == 0:
                    (world.path / f"new-{len(seen)}").touch()
        kept = [name for name in seen if not name.startswith("new-")]
        assert sorted(kept) == names
        left = {name for name in names if not int(name[:4]) % 2}
        assert {name for name in os.listdir(world.path) if not name.startswith("new-")} == left

    world.does(story)


def test_a_large_tree_is_removed_whole(own_place: MakePlace) -> None:
    """`rm -rf` of many files in many directories leaves nothing in the source or the mount."""
    world = own_place()

    def story() -> None:
        for directory in range(20):
            (world.source / f"tree/{directory}").mkdir(parents=True)
            for number in range(100):
                (world.source / f"tree/{directory}/{number}").touch()
        shutil.rmtree(world.path / "tree")
        assert os.listdir(world.source) == []

    world.does(story)


def test_changing_the_same_files_again_and_again_does_not_grow_the_server(own_place: MakePlace) -> None:
    """Batches, callers, links and nodes of removed files are dropped."""
    world = own_place()

    def round_of(count: int) -> None:
        for number in range(count):
            path = world.path / f"file-{number}"
            path.write_text("content")
            os.link(path, world.path / "linked")
            os.unlink(world.path / "linked")
            path.rename(world.path / "moved")
            os.unlink(world.path / "moved")

    run_in_child(round_of, 300)
    before = proc.memory(world.pid)
    for _ in range(2):
        run_in_child(round_of, 300)
    assert proc.memory(world.pid) - before < 2 * MEGABYTE
