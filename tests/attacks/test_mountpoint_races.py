"""Races on source and mountpoint: the mount covers the checked directories, or fails."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.errors import BonobofsError, MountError
from bonobofs.system import mounts
from tests.support.world import World

ROUNDS = 8


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory in which every user may rename and remove."""
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o777)
    return directory


def _order(source: Path, mountpoint: Path, *, allow: bool = False) -> session.MountRequest:
    return session.MountRequest(source, mountpoint, allow_writable_parents=allow)


@pytest.mark.parametrize("what", ["source", "mountpoint"])
def test_a_directory_that_another_user_can_replace_is_refused(
    home: Path, source: Path, tmp_path: Path, shared: Path, what: str
) -> None:
    """The message names the replaceable entry and the option that accepts it."""
    other = tmp_path / "other"
    other.mkdir()
    place = shared / "place"
    place.mkdir()
    order = _order(place, other) if what == "source" else _order(source, place)
    with pytest.raises(MountError, match=rf"can replace {place}, .* {what} .*--allow-writable-parents"):
        session.start(home, order)
    made = session.start(home, order._replace(allow_writable_parents=True)).session
    assert World(home, made).clear() == []


def test_a_symlink_that_another_user_can_replace_is_refused(home: Path, tmp_path: Path, shared: Path) -> None:
    """It leads to a private directory, and every directory above its target is root's or the user's."""
    private, other = tmp_path / "private", tmp_path / "other"
    for directory in (private, other):
        directory.mkdir()
    (shared / "link").symlink_to(private)
    with pytest.raises(MountError, match=f"can replace {shared / 'link'}"):
        session.start(home, _order(shared / "link", other))


def test_a_sticky_directory_is_trusted_for_entries_of_the_user(home: Path, source: Path, shared: Path) -> None:
    shared.chmod(0o777 | stat.S_ISVTX)
    place = shared / "place"
    place.mkdir()
    made = session.start(home, _order(source, place)).session
    assert World(home, made).clear() == []
    if os.geteuid() == 0:
        os.chown(place, 65534, 65534)
        with pytest.raises(MountError, match=f"can replace {place}"):
            session.start(home, _order(source, place))


@contextlib.contextmanager
def _swapped(place: Path, victim: Path) -> Iterator[None]:
    """`place` is a directory and a symlink to `victim` in turn, as often as can be."""
    aside, link = place.with_name("aside"), place.with_name("link")
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            place.rename(aside)
            link.symlink_to(victim)
            link.rename(place)
            place.unlink()
            aside.rename(place)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("what", ["source", "mountpoint"])
def test_a_swap_during_the_mount_reaches_no_other_directory(
    home: Path, source: Path, tmp_path: Path, shared: Path, what: str
) -> None:
    """Each round mounts the directory itself, or fails with one line; the victim is neither covered nor served."""
    other, victim, place = tmp_path / "other", tmp_path / "victim", shared / "place"
    for directory in (other, victim, place):
        directory.mkdir()
    (victim / "secret").write_text("private")
    order = _order(place, other, allow=True) if what == "source" else _order(source, place, allow=True)
    for _ in range(ROUNDS):
        made = None
        with _swapped(place, victim), contextlib.suppress(BonobofsError, OSError):
            made = session.start(home, order).session
        assert mounts.at(victim) == []
        if made is None:
            assert mounts.at(place) == mounts.at(other) == []
            continue
        world = World(home, made)
        assert Path(made.source if what == "source" else made.mountpoint or "") == place
        assert not (world.path / "secret").exists()
        assert world.clear() == []


def test_umount_follows_no_symlink_above_the_mountpoint(home: Path, source: Path, tmp_path: Path, shared: Path) -> None:
    """Otherwise root would unmount a mount of another service that has the same name."""
    above, elsewhere, other = shared / "above", tmp_path / "elsewhere", tmp_path / "source-2"
    for directory in (above / "work", elsewhere / "work", other):
        directory.mkdir(parents=True)
    world = World(home, session.start(home, _order(source, above / "work", allow=True)).session)
    bystander = World(home, session.start(home, _order(other, elsewhere / "work")).session)
    above.rename(shared / "aside")
    above.symlink_to(elsewhere)
    with pytest.raises(MountError):
        mounts.detach(above / "work")
    assert mounts.at(elsewhere / "work") != []
    above.unlink()
    (shared / "aside").rename(above)
    assert world.clear() == []
    assert bystander.clear() == []
