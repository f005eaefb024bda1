"""A kill at any system call, and a full disk, leave every image of a store readable; the next call shares the rest."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bonobofs.undo.image_expiry import StoreUsage, drop_unmade, expire, usage
from bonobofs.undo.image_objects import hash_images
from bonobofs.undo.images import OBJECTS, Image, ImageFile, Images, list_images
from bonobofs.undo.preimages import HEADER
from tests.support.commands import environment

_SESSION = "session"
_CONTENTS = {
    1: b"one" * 1000,
    2: b"two" * 1000,
    3: b"one" * 1000,
    4: b"one" * 1000,
    10: b"two" * 1000,
    11: b"packed",
    12: b"packed",
    13: b"",
}
"""By number. 4 has an extended attribute. From 10 on they are in a pack."""
_USAGE = StoreUsage(5, 3000 + 3000 + 3000 + len(b"packed"))
_HASH = """
import os, sys
from pathlib import Path
from bonobofs.undo.image_objects import hash_images
directory = Path(sys.argv[1])
hash_images(directory, sorted(os.listdir(directory)), (), lambda: None)
"""


def _store(place: Path) -> Path:
    """Make a store with one session; return the directory of the session."""
    directory = place / _SESSION
    directory.mkdir(parents=True)
    for number, data in _CONTENTS.items():
        if number < 10:
            (directory / str(number)).write_bytes(data)
        else:
            with (directory / "pack-10").open("ab") as pack:
                pack.write(HEADER.pack(number, len(data), zlib.crc32(data)) + data)
    os.setxattr(directory / "4", "user.note", b"note")
    return directory


def _hash(directory: Path) -> None:
    hash_images(directory, sorted(os.listdir(directory)), (), lambda: None)


def _read(place: Path) -> dict[int, bytes]:
    images, found = Images(place), {}
    for number in _CONTENTS:
        content = images.open(Image(_SESSION, number))
        assert content is not None, f"image {number} is kept"
        with content:
            found[number] = content.read()
    return found


def _check_shared(place: Path) -> None:
    """Every image is hashed and readable, each content lies once, and nothing else is left."""
    assert _read(place) == _CONTENTS
    files = [ImageFile.parse(name) for name in os.listdir(place / _SESSION)]
    assert sorted(file.number for file in files if file is not None and file.hash) == sorted(_CONTENTS)
    assert None not in files
    assert usage([place]) == _USAGE
    assert len(list((place / OBJECTS).glob("*/*"))) == 4


def test_equal_contents_are_shared_except_with_other_attributes(tmp_path: Path) -> None:
    directory = _store(tmp_path / "undo")
    _hash(directory)
    _check_shared(tmp_path / "undo")
    (number_4,) = directory.glob("4-*")
    assert os.getxattr(number_4, "user.note") == b"note"
    assert number_4.stat().st_nlink == 1


def _killed_at(directory: Path, calls: str, when: int) -> bool:
    """Hash in a process that is killed at a call; False: it ended before."""
    command = [
        "strace",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        f"trace={calls}",
        "-e",
        f"inject={calls}:signal=KILL:when={when}",
    ]
    ran = subprocess.run([*command, sys.executable, "-c", _HASH, directory], check=False, env=environment())
    assert ran.returncode in (0, -9, 137)
    return ran.returncode != 0


@pytest.mark.parametrize(
    "call", ["rename", "link", "linkat", "write", "unlinkat", "mkdir", "fdatasync", "fsync", "flock", "fadvise64"]
)
def test_a_kill_at_any_call_loses_no_image(tmp_path: Path, call: str) -> None:
    """The session's images stay readable, and the next mount of the source drops none of them."""
    when = 1
    while _killed_at(directory := _store(tmp_path / str(when)), call, when):
        place = directory.parent
        assert _read(place) == _CONTENTS
        drop_unmade(directory)
        expire([place], 3600, 1 << 30, ())
        assert _read(place) == _CONTENTS
        _hash(directory)
        expire([place], 3600, 1 << 30, ())
        _check_shared(place)
        when += 1
    assert when > 1, "the work has this call"
    _check_shared(directory.parent)


def test_a_content_is_on_the_disk_before_its_file_is_renamed(tmp_path: Path) -> None:
    """The server does not sync a renamed copy. The names of the pack's copies are on the disk before it is removed."""
    directory, log = _store(tmp_path / "undo"), tmp_path / "log"
    calls = ("-y", "-e", "trace=fdatasync,rename,unlink,fsync,unlinkat", "-o", log)
    subprocess.run(["strace", "-qq", *calls, sys.executable, "-c", _HASH, directory], check=True, env=environment())
    synced, renamed = set(), []
    for line in log.read_text().splitlines():
        path = line.partition("<")[2].partition(">")[0]
        if line.startswith(("fdatasync", "fsync")):
            synced.add(path)
        elif line.startswith(("rename(", "unlink(")):
            renamed.append(line.split('"')[1])
            assert renamed[-1] in synced
        else:
            assert f"{directory}" in synced
    assert {f"{directory}/{number}" for number in _CONTENTS} <= set(renamed)


@contextmanager
def _few_inodes(path: Path) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.root
def test_a_full_disk_loses_no_image(tmp_path: Path) -> None:
    """The disk has room for some new names only. Each call ends with ENOSPC until there is room for all."""
    with _few_inodes(tmp_path / "disk") as disk:
        directory = _store(disk / "undo")
        failures = []
        for more in range(200):
            used = os.statvfs(disk)
            inodes = used.f_files - used.f_ffree
            subprocess.run(["mount", "-o", f"remount,nr_inodes={inodes + more % 2}", disk], check=True)
            try:
                _hash(directory)
            except OSError as error:
                failures.append(error.errno)
            else:
                break
            assert _read(disk / "undo") == _CONTENTS
        assert len(failures) > 5
        assert set(failures) == {errno.ENOSPC}
        _check_shared(disk / "undo")


@pytest.mark.root
def test_a_nearly_full_disk_keeps_its_packs(tmp_path: Path) -> None:
    """A pack becomes files only where the store leaves its reserve free."""
    with _few_inodes(tmp_path / "disk") as disk:
        directory = _store(disk / "undo")
        free = os.statvfs(disk)
        (disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - (100 << 10)))
        _hash(directory)
        assert (directory / "pack-10").exists()
        assert _read(disk / "undo") == _CONTENTS
        (disk / "filler").unlink()
        _hash(directory)
        _check_shared(disk / "undo")


def test_a_damaged_object_takes_no_image_with_it(tmp_path: Path) -> None:
    """An equal content replaces the object, and the image of the damaged one stays damaged."""
    directory = _store(tmp_path / "undo")
    hash_images(directory, ["1"], (), lambda: None)
    (damaged,) = directory.glob("1-*")
    damaged.write_bytes(b"damaged")
    _hash(directory)
    images = Images(tmp_path / "undo")
    assert not images.has(Image(_SESSION, 1))
    assert all(images.has(Image(_SESSION, number)) for number in _CONTENTS if number != 1)
    (shared,) = directory.glob("3-*")
    assert images.find(ImageFile.parse(shared.name).hash) == _CONTENTS[3]  # type: ignore[union-attr]


def test_two_processes_hash_one_session(tmp_path: Path) -> None:
    """Companions of two sessions begin with the images of the same ended session."""
    for round_ in range(5):
        directory = _store(tmp_path / str(round_))
        command = [sys.executable, "-c", _HASH, str(directory)]
        both = [subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE) for _ in range(2)]
        assert [process.communicate()[1] for process in both] == [b"", b""]
        _hash(directory)
        _check_shared(directory.parent)


def test_an_image_in_use_is_not_hashed(tmp_path: Path) -> None:
    """So is one with another name, whose change was perhaps not made."""
    directory = _store(tmp_path / "undo")
    os.link(directory / "2", tmp_path / "file")
    hash_images(directory, os.listdir(directory), {1}, lambda: None)
    assert (directory / "1").exists()
    assert (directory / "2").exists()
    drop_unmade(directory)
    assert not (directory / "2").exists()


def test_a_content_without_an_object_is_found_by_its_hash(tmp_path: Path) -> None:
    """The file of another user, or one with other attributes, is not shared: its name alone has the hash."""
    place = tmp_path / "undo"
    directory = _store(place)
    _hash(directory)
    for number in (1, 3):
        (shared,) = directory.glob(f"{number}-*")
        shared.unlink()
    expire([place], 3600, 1 << 30, ())
    (alone,) = directory.glob("4-*")
    digest = ImageFile.parse(alone.name).hash  # type: ignore[union-attr]
    assert not (place / OBJECTS / digest[:2] / digest).exists()
    assert Images(place).find(digest) == _CONTENTS[4]
    alone.write_bytes(b"damaged")
    assert Images(place).find(digest) is None


def test_a_file_without_a_hash_replaces_the_one_with_a_hash(tmp_path: Path) -> None:
    """The server has copied the content of an open file that is about to change."""
    directory = _store(tmp_path / "undo")
    for number in range(20, 40):
        for name in sorted({f"{number}", f"{number}-1-{'0' * 64}"}, reverse=number % 2 == 0):
            (directory / name).write_bytes(name.encode())
    files = list_images(directory).files
    assert [files[number].name for number in range(20, 40)] == [f"{number}" for number in range(20, 40)]
