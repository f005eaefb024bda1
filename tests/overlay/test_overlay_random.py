"""Random work in a scratch directory that the source also has gives the same result as on a bare directory."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.mount_fixtures import MakePlace
from tests.support.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from tests.support.trees import snapshot
from tests.support.users import outcome

POLICY: Final = 'default = "deny"\n[[scratch]]\npaths = ["build/"]\n'
STEPS: Final = 400
NAMES: Final = ("a", "b", "c", "d", "e")


def _fill(top: Path, chance: random.Random) -> None:
    for name in NAMES[:4]:
        kind = chance.choice(("file", "directory", "symlink", "nothing"))
        if kind == "file":
            (top / name).write_bytes(bytes(chance.randrange(50)))
        elif kind == "directory":
            (top / name).mkdir()
            if len(top.parts) - len(top.anchor) < 40:
                for inner in NAMES[:3]:
                    if chance.random() < 0.5:
                        (top / name / inner).write_text(inner)
                (top / name / "d").mkdir()
                (top / name / "d/e").write_text("deep")
        elif kind == "symlink":
            (top / name).symlink_to(chance.choice(NAMES))


def _write(path: Path, data: bytes, flags: int) -> int:
    fd = os.open(path, flags | os.O_NOFOLLOW, 0o644)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)


def _listed(path: Path) -> list[tuple[str, bool, bool]]:
    with os.scandir(path) as entries:
        return sorted((entry.name, entry.is_dir(follow_symlinks=False), entry.is_symlink()) for entry in entries)


def _told(path: Path) -> tuple[Any, ...]:
    st = path.lstat()
    size = st.st_size if not stat.S_ISDIR(st.st_mode) else 0
    links = st.st_nlink if stat.S_ISREG(st.st_mode) else 0
    return stat.filemode(st.st_mode), size, links


Act = Callable[[Path], object]


def _act(chance: random.Random) -> tuple[str, Act]:
    """One random operation below the given directory."""

    def place() -> str:
        return "/".join(chance.choice(NAMES) for _ in range(chance.choice((1, 1, 2, 2, 3))))

    one, two, data = place(), place(), bytes(chance.randrange(200, 230))
    flags = os.O_WRONLY | chance.choice((0, os.O_APPEND, os.O_TRUNC, os.O_CREAT, os.O_CREAT | os.O_EXCL))
    how = chance.choice((0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE))
    mode, size = chance.choice((0o600, 0o644, 0o755)), chance.randrange(40)
    return chance.choice(
        (
            (f"write {one} {flags:o}", lambda top: _write(top / one, data, flags)),
            (f"write {one} {flags:o}", lambda top: _write(top / one, data, flags)),
            (f"truncate {one}", lambda top: os.truncate(top / one, size) if not (top / one).is_symlink() else None),
            (f"chmod {one}", lambda top: os.chmod(top / one, mode) if not (top / one).is_symlink() else None),
            (f"unlink {one}", lambda top: os.unlink(top / one)),
            (f"rmdir {one}", lambda top: os.rmdir(top / one)),
            (f"mkdir {one}", lambda top: os.mkdir(top / one)),
            (f"symlink {one}", lambda top: os.symlink("a", top / one)),
            (f"rename {one} {two} {how}", lambda top: renameat2(top / one, top / two, how)),
            (f"rename {one} {two} {how}", lambda top: renameat2(top / one, top / two, how)),
            (f"list {one}", lambda top: _listed(top / one)),
            (f"stat {one}", lambda top: _told(top / one)),
            (f"remove {one}", lambda top: shutil.rmtree(top / one) if (top / one).is_dir() else None),
        )
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_work_in_both_layers_is_as_on_a_bare_directory(own_place: MakePlace, tmp_path: Path, seed: int) -> None:
    """Every call has the same outcome, the final trees are equal, and the source is unchanged."""
    chance = random.Random(seed)
    world = own_place(policy=POLICY)
    (world.source / "build").mkdir()
    _fill(world.source / "build", chance)
    bare = tmp_path / "bare"
    shutil.copytree(world.source / "build", bare, symlinks=True)
    before = snapshot(world.source)

    def story() -> None:
        top, done = world.path / "build", []
        for _ in range(STEPS):
            text, act = _act(chance)
            through = outcome(act, top)
            if through == errno.EXDEV:
                continue  # a directory of the source cannot be moved
            done.append(text)
            assert (text, through) == (text, outcome(act, bare)), "; ".join(done[-12:])
        shown, kept = snapshot(top), snapshot(bare)
        assert {path: (e.kind, e.mode, e.content) for path, e in shown.items() if path} == {
            path: (e.kind, e.mode, e.content) for path, e in kept.items() if path
        }

    world.does(story)
    assert snapshot(world.source) == before
