"""Adding checked objects to the source's object store: never a partial file under a final name."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from pathlib import Path
from typing import Final

import pygit2

_KINDS: Final = {1: b"commit", 2: b"tree", 3: b"blob", 4: b"tag"}
_MOST_LOOSE: Final = 100
_MOST_BYTES: Final = 4 << 20
"""A push of fewer objects and bytes is stored as loose objects, so that packs do not accumulate."""
_SUFFIXES: Final = (".pack", ".rev", ".bitmap", ".mtimes", ".keep", ".idx")
"""In the order in which the files of a pack must appear; a pack exists for git once its .idx does."""


def add_objects(found: Path, store: Path, token: str) -> None:
    """Add everything from the object directory `found` to `store`, and sync it. OSError.

    What is there already stays. Temporary files in `store` are named `tmp_bonobofs_TOKEN_…`; git ignores them and
    prunes old ones.
    """
    for last in (False, False, True):
        try:
            _add_objects(found, store, token)
        except FileNotFoundError:  # git gc removed an empty directory, or a temporary file
            if last:
                raise
        else:
            return


def _add_objects(found: Path, store: Path, token: str) -> None:
    packs = sorted((found / "pack").glob("pack-*.pack"))
    if packs and sum(pack.stat().st_size for pack in packs) <= _MOST_BYTES and _write_loose(found, store, token):
        return
    for pack in packs:
        for suffix in _SUFFIXES:
            piece = pack.with_suffix(suffix)
            if suffix != ".keep" and piece.exists():
                _add(piece, store / "pack" / piece.name, store, token)
    for directory in found.iterdir():
        if len(directory.name) == 2 and directory.is_dir():
            target = store / directory.name
            target.mkdir(exist_ok=True)
            for piece in directory.iterdir():
                _add(piece, target / piece.name, store, token)


def _write_loose(found: Path, store: Path, token: str) -> bool:
    """Store the objects of small packs as loose objects. False: there are too many, or they are too large."""
    odb = pygit2.Odb(str(found))
    oids = [oid for _, oid in zip(range(_MOST_LOOSE + 1), odb, strict=False)]
    if len(oids) > _MOST_LOOSE or sum(odb.read_header(oid)[1] for oid in oids) > _MOST_BYTES:
        return False
    for oid in oids:
        name = str(oid)
        target = store / name[:2] / name[2:]
        if target.exists():
            continue
        kind, data = odb.read(oid)
        target.parent.mkdir(exist_ok=True)
        temporary = store / f"tmp_bonobofs_{token}_{name}"
        content = zlib.compress(b"%s %d\0" % (_KINDS[int(kind)], len(data)) + data, 1)
        with temporary.open("wb") as file:
            os.fchmod(file.fileno(), 0o444)
            file.write(content)
            file.flush()
            os.fdatasync(file.fileno())
        temporary.rename(target)
    return True


def _add(piece: Path, target: Path, store: Path, token: str) -> None:
    if target.exists():
        return
    with piece.open("rb") as file:
        os.fdatasync(file.fileno())
    try:
        target.hardlink_to(piece)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        temporary = store / f"tmp_bonobofs_{token}_{piece.name}"
        shutil.copyfile(piece, temporary)
        with temporary.open("rb") as file:
            os.fchmod(file.fileno(), 0o444)
            os.fdatasync(file.fileno())
        temporary.rename(target)
