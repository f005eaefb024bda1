"""Read the stores of pre-images: by session and number, or by the SHA-256 of the content.

A session's directory has for each pre-image a file `NUMBER`, or a copy in a pack. When the companion has hashed the
content, the file is `NUMBER-TIME-HASH`, with the time of the change in seconds. It is then a hard link of
`objects/HH/HASH`, so that equal contents lie once.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Self

from bonobofs.undo.preimages import HEADER, PACK

OBJECTS: Final = "objects"
_NAME: Final = re.compile(r"(\d+)(?:-(\d+)-([0-9a-f]{64}))?")
_JUST_NOW: Final = 0.1
"""Seconds within which a directory may change without another time of modification."""


class Image(NamedTuple):
    """Content of a file in the store: the session and number of the change before which it was kept."""

    session: str
    number: int


EMPTY: Final = Image("", 0)
"""No bytes."""
MISSING: Final = Image("", -1)
"""Content that the store does not have."""


class ImageFile(NamedTuple):
    """The name of a pre-image in a session's directory."""

    number: int
    kept_at: int = 0
    """Seconds since 1970; 0: the change time of the file."""
    hash: str = ""
    """SHA-256 of the content in hex; "": the content is not hashed yet."""

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Parse a name; None: it names another file."""
        match = _NAME.fullmatch(name)
        return match and cls(int(match[1]), int(match[2] or 0), match[3] or "")

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{self.number}-{self.kept_at}-{self.hash}" if self.hash else f"{self.number}"


class PackedCopy(NamedTuple):
    """A copy in a pack."""

    number: int
    offset: int
    size: int
    checksum: int
    pack: str

    def read(self, directory: Path) -> bytes | None:
        """Return the content; None: it is damaged or incomplete. OSError."""
        with io.FileIO(directory / self.pack) as file:
            data = os.pread(file.fileno(), self.size, self.offset)
        return data if len(data) == self.size and zlib.crc32(data) == self.checksum else None


class _Listing(NamedTuple):
    """The pre-images of a session by number."""

    read_at: float
    files: dict[int, ImageFile]
    packed: dict[int, PackedCopy]


class Images:
    """The stores of pre-images of a source."""

    def __init__(self, *places: Path) -> None:
        """`places`: the directories in which each session may have its store."""
        self._places: Final = places
        self._listings: Final[dict[Path, _Listing]] = {}
        self._intact: Final[dict[tuple[int, int, int], bool]] = {}
        """Whether a content has its hash, by device, inode number and change time."""
        self._others: dict[str, list[Image]] | None = None

    def open(self, image: Image) -> io.FileIO | None:
        """Open an image for reading; None: it is not kept, or is damaged. OSError."""
        for place in self._places:
            directory = place / image.session
            for _ in range(2):  # the companion may rename a file after it was listed
                listing = self._list(directory)
                try:
                    if (file := listing.files.get(image.number)) is not None:
                        return self._verified(directory / file.name, file.hash)
                    if (copy := listing.packed.get(image.number)) is not None:
                        return _in_memory(copy.read(directory))
                    break
                except FileNotFoundError:
                    del self._listings[directory]
        return None

    def has(self, image: Image, size: int = 0) -> bool:
        """Return whether an image is kept, has its hash, and has at least `size` bytes. OSError."""
        content = self.open(image)
        if content is None:
            return False
        with content:
            return os.fstat(content.fileno()).st_size >= size

    def hash_of(self, image: Image) -> str:
        """Return the hash of an image; "" if it is unknown."""
        for place in self._places:
            if (file := self._list(place / image.session).files.get(image.number)) is not None:
                return file.hash
        return ""

    def find(self, digest: str) -> bytes | None:
        """Return a content by its hash; None: the stores do not have it. Contents without a hash are hashed."""
        for place in self._places:
            with suppress(FileNotFoundError):
                content = self._verified(object_path(place, digest), digest)
                if content is not None:
                    with content:
                        return content.read()
        if self._others is None:
            self._others = {}
            for found, image in self._hashes():
                self._others.setdefault(found, []).append(image)
        opened = next(filter(None, map(self.open, self._others.get(digest, ()))), None)
        if opened is None:
            return None
        with opened:
            return opened.read()

    def _hashes(self) -> Iterator[tuple[str, Image]]:
        """Yield each image with its hash. An image may be intact although the object of the same hash is not."""
        for directory in (each for place in self._places if place.is_dir() for each in place.iterdir()):
            if directory.name == OBJECTS or not directory.is_dir():
                continue
            listing = self._list(directory)
            for number in (*listing.files, *listing.packed):
                image = Image(directory.name, number)
                with suppress(OSError):
                    if digest := self.hash_of(image):
                        yield digest, image
                    elif (content := self.open(image)) is not None:
                        with content:
                            yield hashlib.file_digest(content, "sha256").hexdigest(), image

    def _list(self, directory: Path) -> _Listing:
        found = self._listings.get(directory)
        try:
            if found is None or directory.stat().st_mtime >= found.read_at - _JUST_NOW:
                found = self._listings[directory] = list_images(directory)
        except OSError:
            return _Listing(0, {}, {})
        return found

    def _verified(self, path: Path, digest: str) -> io.FileIO | None:
        """Open a file; None: it does not have the hash. A file without one is not verified. FileNotFoundError."""
        file = io.FileIO(path)
        if not digest:
            return file
        st = os.fstat(file.fileno())
        key = st.st_dev, st.st_ino, st.st_ctime_ns
        if key not in self._intact:
            self._intact[key] = hashlib.file_digest(file, "sha256").hexdigest() == digest
            file.seek(0)
        if self._intact[key]:
            return file
        file.close()
        return None


def object_path(store: Path, digest: str) -> Path:
    """Return the file of a content in a store."""
    return store / OBJECTS / digest[:2] / digest


def list_images(directory: Path) -> _Listing:
    """Read a session's directory. OSError."""
    read_at = time.time()
    files: dict[int, ImageFile] = {}
    packed: dict[int, PackedCopy] = {}
    for name in os.listdir(directory):
        if (file := ImageFile.parse(name)) is not None:
            if not file.hash or file.number not in files:  # the file without a hash replaces the other one
                files[file.number] = file
        elif name.startswith(PACK):
            packed |= {copy.number: copy for copy in packed_copies(directory, name)}
    return _Listing(read_at, files, packed)


def packed_copies(directory: Path, name: str) -> Iterator[PackedCopy]:
    """Yield the copies in a pack. A pack that is missing has none."""
    with suppress(FileNotFoundError), (directory / name).open("rb") as file:
        while len(header := file.read(HEADER.size)) == HEADER.size:
            number, size, checksum = HEADER.unpack(header)
            yield PackedCopy(number, file.tell(), size, checksum, name)
            file.seek(size, os.SEEK_CUR)


def _in_memory(data: bytes | None) -> io.FileIO | None:
    """Return an unnamed file with a content."""
    if data is None:
        return None
    file = os.memfd_create("image", os.MFD_CLOEXEC)
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return io.FileIO(file)
