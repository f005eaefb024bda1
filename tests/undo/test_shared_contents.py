"""The companion hashes the old contents in the store, and equal contents lie once."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from bonobofs.guards import IntegrityCheck
from bonobofs.ipc.client import call
from bonobofs.session.undo_service import expire_images
from bonobofs.state.home import inside_directory
from bonobofs.undo.image_expiry import usage
from bonobofs.undo.images import OBJECTS, ImageFile, object_path
from tests.support import proc
from tests.support.commands import bonobofs
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.observe import companion_of, recorded
from tests.support.source_state import State, state_of, undo, without_directory_times
from tests.support.wait import until

_DATA = b"same" * 5000
_DAY = 86400


def _directory(place: Place) -> Path:
    return place.home / "undo" / place.session.session


def _images(place: Place) -> dict[str, ImageFile]:
    """The images of the session of a mount, by the path of the changed file."""
    found = [file for name in os.listdir(_directory(place)) if (file := ImageFile.parse(name))]
    paths = {entry.seq: entry.path for entry in place.entries() if entry.kind == "intent"}
    return {paths[file.number]: file for file in found}


def _wait_for_hashes(place: Place, count: int) -> dict[str, ImageFile]:
    """Return the hashed images of the session, once there are `count`, and the pack is empty."""

    def is_hashed() -> bool:
        names = os.listdir(_directory(place))
        files = [file for name in names if (file := ImageFile.parse(name))]
        hashed, waiting = ({file.number for file in files if bool(file.hash) is has_hash} for has_hash in (True, False))
        return len(files) == len(names) and len(hashed) == count and not hashed & waiting

    until(is_hashed, f"the companion has hashed {count} images")
    return {path: file for path, file in _images(place).items() if file.hash}


def _object(place: Place, data: bytes) -> Path:
    return object_path(place.home / "undo", sha256(data).hexdigest())


def _fill(source: Path, **files: bytes) -> State:
    source.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (source / name).write_bytes(data)
    return state_of(source)


def _shown(command: str, *arguments: str) -> Any:
    ran = bonobofs(command, *arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_equal_contents_of_three_turns_lie_once(own_place: MakePlace, tmp_path: Path) -> None:
    """Three files are removed in three turns. The size counts the content once, and each turn is taken back."""
    states = [_fill(tmp_path / "source", a=_DATA, b=_DATA, c=_DATA)]
    place = own_place()
    for name in "abc":
        assert bonobofs("mark", f"turn {name}", cwd=place.path).returncode == 0
        (place.path / name).unlink()
        states.append(state_of(place.source))
    files = _wait_for_hashes(place, 3)
    shared = _object(place, _DATA)
    assert {(_directory(place) / file.name).stat().st_ino for file in files.values()} == {shared.stat().st_ino}
    assert usage([place.home / "undo"]) == (1, len(_DATA))
    (change,) = _shown("history", str(place.path / "a"))
    assert change["kept_hash"] == shared.name
    shown = _shown("show", change["change"])
    assert (shown["kept"], shown["kept_hash"]) == (True, shared.name)
    for name in "cba":
        states.pop()
        assert undo(place, turn=f"turn {name}")["conflicts"] == []
        assert state_of(place.source) == states[-1]
    assert bonobofs("audit", "verify").returncode == 0


def test_an_ordinary_user_shares_contents(place: MakePlace) -> None:
    """Removed, replaced and overwritten files: by a link, by a link, and by a copy."""
    mount = place()

    def change() -> None:
        for name in ("removed", "replaced", "written", "small"):
            (mount.source / name).write_bytes(_DATA * 10 if name != "small" else b"x")
        (mount.path / "removed").unlink()
        (mount.path / "new").write_bytes(b"new")
        (mount.path / "new").rename(mount.path / "replaced")
        (mount.path / "written").write_bytes(b"new")

    mount.does(change)
    assert len({file.hash for file in _wait_for_hashes(mount, 3).values()}) == 1
    assert usage([mount.home / "undo"]) == (1, len(_DATA) * 10)


def test_small_copies_of_a_pack_are_shared(own_place: MakePlace, tmp_path: Path) -> None:
    """Small files are written in place in two mounts, and one with attributes: the pack becomes shared files."""
    before = _fill(tmp_path / "source", a=b"small", b=b"small", c=b"other", d=b"small")
    os.setxattr(tmp_path / "source/d", "user.note", b"note")
    before = state_of(tmp_path / "source")
    one, two = own_place(), own_place()
    hashes = set()
    for place, names in ((one, "ac"), (two, "bd")):
        for name in names:
            (place.path / name).write_bytes(b"new")
        hashes |= {file.hash for file in _wait_for_hashes(place, 2).values()}
    assert len(hashes) == 2
    assert usage([one.home / "undo"]).files == 3, "a content with other attributes is not shared"
    (two.path / "a").write_bytes(b"newer")
    _wait_for_hashes(two, 3)
    assert undo(one, since="1d")["conflicts"] == []
    assert state_of(one.source) == before


def test_a_file_that_a_program_of_the_source_writes_is_not_hashed(own_place: MakePlace, tmp_path: Path) -> None:
    """An agent removes the log of a program that runs outside of the mount, and the program appends to it."""
    before = _fill(tmp_path / "source", log=_DATA, other=b"other")
    place = own_place()
    with (place.source / "log").open("ab") as log:
        for name in filter(None, before):
            (place.path / name).unlink()
        assert set(_wait_for_hashes(place, 1)) == {"other"}
        log.write(b"more")
    assert undo(place, agent="alice")["conflicts"] == []
    assert state_of(place.source) == before


@pytest.mark.parametrize("transport", ["kernel", "portable"])
def test_an_open_file_is_hashed_after_the_kernel_has_forgotten_it(
    own_place: MakePlace, tmp_path: Path, transport: str
) -> None:
    """Its own link is the old content until then. A write to it copies first, and only the copy is hashed."""
    before = _fill(tmp_path / "source", read=_DATA, written=_DATA * 2, closed=_DATA * 3, mapped=_DATA * 4)
    place = own_place(transport=transport)
    with (place.path / "mapped").open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    with mapping, (place.path / "read").open("r+b"), (place.path / "written").open("r+b") as written:
        for name in filter(None, before):
            (place.path / name).unlink()
        linked = written.fileno()
        _wait_for_hashes(place, 1)
        assert {path for path, file in _images(place).items() if file.hash} == {"closed"}
        assert os.fstat(linked).st_nlink == 0
        written.write(b"new")
        written.flush()
        mapping[:3] = b"new"
        mapping.flush()
        copies = _wait_for_hashes(place, 3)
        assert copies["written"].hash == sha256(_DATA * 2).hexdigest()
        assert copies["mapped"].hash == sha256(_DATA * 4).hexdigest()
        assert os.fstat(linked).st_nlink == 0
    _wait_for_hashes(place, 4)
    assert undo(place, agent="alice")["conflicts"] == []
    assert state_of(place.source) == before


def test_a_damaged_content_is_reported_and_not_restored(own_place: MakePlace, tmp_path: Path) -> None:
    """The undo of its files is a conflict, that of others is made. The next equal content repairs the object."""
    before = _fill(tmp_path / "source", a=_DATA, b=_DATA, c=b"other" * 100, d=_DATA)
    place = own_place()
    for name in "abc":
        (place.path / name).unlink()
    files = _wait_for_hashes(place, 3)
    with _object(place, _DATA).open("r+b") as file:
        file.write(b"X")
    (change,) = _shown("history", str(place.path / "a"))
    assert _shown("show", change["change"])["kept"] is False
    result = undo(place, agent="alice")
    assert {(each["path"], each["reason"]) for each in result["conflicts"]} == {
        ("a", "the old content is no longer kept"),
        ("b", "the old content is no longer kept"),
    }
    assert set(state_of(place.source)) == {"", "c", "d"}
    (place.path / "d").unlink()
    _wait_for_hashes(place, len(files) + 1)
    assert _object(place, _DATA).read_bytes() == _DATA
    assert undo(place, path="d")["conflicts"] == []
    assert state_of(place.source)["d"] == before["d"]


def test_expiry_counts_shared_contents_once(own_place: MakePlace, tmp_path: Path) -> None:
    """An old image leaves its content to a younger one. A full store loses its oldest content, with all its images."""
    _fill(tmp_path / "source", a=_DATA, b=_DATA, c=b"o" * 20_000, d=b"p" * 20_000)
    place = own_place()
    for name in "abcd":
        (place.path / name).unlink()
    files = _wait_for_hashes(place, 4)
    store = place.home / "undo"

    def age(path: str, seconds: int) -> None:
        old = files[path]
        (_directory(place) / old.name).rename(_directory(place) / old._replace(kept_at=old.kept_at - seconds).name)

    age("a", 8 * _DAY)
    age("b", 1)
    age("c", 2 * _DAY)
    assert expire_images(place.home) == 1
    assert set(_images(place)) == {"b", "c", "d"}
    assert usage([store]) == (3, 60_000)
    assert undo(place, path="b")["conflicts"] == []
    assert undo(place, path="a")["conflicts"] != []
    (place.path / "b").unlink()
    _wait_for_hashes(place, 4)
    (place.home / "policy.toml").write_text('default = "allow"\n[undo]\nmax_total = "50KB"\n')
    assert expire_images(place.home) == 1
    assert "c" not in _images(place), "the oldest content"
    (place.home / "policy.toml").write_text('default = "allow"\n[undo]\nmax_total = "1B"\n')
    expire_images(place.home)
    assert usage([store]).files == 0
    assert list((store / OBJECTS).glob("*/*")) == []


def test_images_of_an_ended_session_are_hashed_by_the_next(own_place: MakePlace, tmp_path: Path) -> None:
    """The companion of a short session has no time to hash. The server of another was killed."""
    before = _fill(tmp_path / "source", a=_DATA, b=_DATA)
    short, killed = own_place(), own_place()
    (short.path / "a").unlink()
    (killed.path / "b").write_bytes(b"new")
    assert short.umount().closed
    assert killed.entries()[-1].kind == "outcome", "the server has recorded the end of the change"
    killed.kill()
    killed.umount()
    (next_one := own_place()).path.stat()
    assert len(_wait_for_hashes(short, 1) | _wait_for_hashes(killed, 1)) == 2
    assert usage([next_one.home / "undo"]).files == 1
    assert undo(next_one, since="1d")["conflicts"] == []
    assert state_of(next_one.source) == before


@pytest.mark.root
def test_a_content_that_the_companion_removes_slowly_is_hashed(own_place: MakePlace, tmp_path: Path) -> None:
    """The companion looks at the store while the file still has its name, and again after the removal."""
    _fill(tmp_path / "source/d", file=_DATA)
    place = own_place()
    companion, log = companion_of(place.pid), tmp_path / "log"
    slow = ("-e", "trace=unlinkat", "-e", "inject=unlinkat:delay_enter=5s", "-p", str(companion))
    with subprocess.Popen(["strace", "-f", "-qq", "-o", log, *slow]) as tracer:
        until(lambda: proc.is_traced(companion), "strace traces it")
        call(inside_directory(place.home, place.session.session), "delete_file", path="d/file")
        tracer.terminate()
    _wait_for_hashes(place, 1)
    assert undo(place, agent="alice")["conflicts"] == []
    assert (place.source / "d/file").read_bytes() == _DATA


@pytest.mark.root
@pytest.mark.parametrize(
    ("call", "when"), [("fdatasync", 3), ("rename", 2), ("link", 2), ("fsync", 1), ("unlinkat", 1)]
)
def test_a_killed_companion_loses_no_image(own_place: MakePlace, tmp_path: Path, call: str, when: int) -> None:
    """kill -9 while it hashes: the next companion completes the work, and every file is restored."""
    names = [f"file{number}" for number in range(6)]
    before = _fill(tmp_path / "source", **{name: _DATA * (1 + number % 2) for number, name in enumerate(names)})
    place = own_place()
    log = str(tmp_path / "log")
    command = ["strace", "-f", "-qq", "-o", log, "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={when}"]
    companion = companion_of(place.pid)
    with subprocess.Popen([*command, "-p", str(companion)]) as tracer:
        until(lambda: proc.is_traced(companion), "strace traces it")
        try:
            for name in names:
                if name < "file4":
                    (place.path / name).unlink()
                else:
                    (place.path / name).write_bytes(b"new")
            until(lambda: recorded(place, "companion"), "the server has another companion")
        finally:
            tracer.terminate()
    _wait_for_hashes(place, 6)
    assert usage([place.home / "undo"]) == (2, 3 * len(_DATA))
    assert undo(place, agent="alice")["conflicts"] == []
    assert state_of(place.source) == before
    assert bonobofs("audit", "verify").returncode == 0


@pytest.mark.parametrize("is_hashed", [False, True])
def test_integrity_revert_finds_a_content_in_the_store(
    own_place: MakePlace, tmp_path: Path, *, is_hashed: bool
) -> None:
    """The snapshot keeps no content, and there is no git repository."""
    okrs = tmp_path / "source/okrs"
    okrs.mkdir(parents=True)
    before = _fill(okrs, small=b"grow\n", large=_DATA * 10, removed=_DATA)
    root = tmp_path / "source"
    assert bonobofs("integrity", "snapshot", str(root)).returncode == 0
    check = IntegrityCheck(root, kept=0)
    place = own_place()
    (place.path / "okrs/small").write_bytes(b"rest\n")
    (place.path / "okrs/large").write_bytes(b"rest\n")
    (place.path / "okrs/removed").unlink()
    if is_hashed:
        _wait_for_hashes(place, 3)
    assert place.umount().closed
    assert check.revert(), check.revert_error
    assert without_directory_times(state_of(okrs)) == without_directory_times(before)
    (okrs / "large").write_bytes(b"rest\n")
    for content in place.home.glob("integrity/*/contents/*"):
        content.unlink()
    ran = bonobofs("integrity", "revert", str(root))
    assert (ran.returncode, ran.stdout) == (0, "changed  okrs/large\n"), ran.stderr
    assert without_directory_times(state_of(okrs)) == without_directory_times(before)
    (okrs / "large").unlink()
    shutil.rmtree(place.home / "undo")
    ran = bonobofs("integrity", "revert", str(root))
    assert ran.returncode == 1
    assert "okrs/large" in ran.stderr
