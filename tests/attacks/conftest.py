"""Fixtures: mounts to attack, and small file systems that use an inode number again at once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.attacks.ground import ground, open_directory
from tests.support.mount_fixtures import own_place

__all__ = ["MakeFileSystem", "file_system", "ground", "open_directory", "own_place"]
MakeFileSystem = Callable[..., Path]
"""file_system("ext4", reserved=20, directory=tmp_path) mounts a new one of 16 MiB.

`reserved` is the percentage of blocks for root. `directory` gets the file that holds the blocks.
"""


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[MakeFileSystem]:
    """Only root may use it."""
    places: list[Path] = []

    def make(kind: str, *, reserved: int = 0, directory: Path = tmp_path) -> Path:
        place = tmp_path / f"{kind}-{len(places)}"
        place.mkdir()
        if kind == "ext4":
            image = directory / f"{place.name}.image"
            with image.open("wb") as stream:
                stream.truncate(16 << 20)
            subprocess.run(["mkfs.ext4", "-q", "-m", str(reserved), image], check=True)
            subprocess.run(["mount", "-o", "loop", image, place], check=True)
        else:
            subprocess.run(["mount", "-t", kind, "none", place], check=True)
        places.append(place)
        return place

    yield make
    # A lazy umount frees the loop device as soon as the last user of the file system ends.
    busy = [place for place in places if subprocess.run(["umount", place], check=False).returncode != 0]
    for place in busy:
        subprocess.run(["umount", "-l", place], check=True)
    assert not busy, f"the test left these file systems in use: {busy}"
