"""A full disk: without space for the record, no change is made; without space in the source, the change fails."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bonobofs import session
from tests.attacks.attack import CONTENT
from tests.attacks.ground import build
from tests.support.observe import out_of_band
from tests.support.syscalls import make, opened, read
from tests.support.users import outcome, run_in_child
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, bonobofs

pytestmark = pytest.mark.root


@contextlib.contextmanager
def _small_disk(path: Path, kilobytes: int) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory on a disk of its own, of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with _small_disk(disk, 1000):
        monkeypatch.setenv("BONOBOFS_HOME", str(disk / "home"))
        yield session.home()


def _free(disk: Path) -> int:
    st = os.statvfs(disk)
    return st.f_bavail * st.f_frsize


def _append_until_full(path: Path) -> object:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for _ in range(1000):
            os.write(fd, bytes(4096))
    except OSError as error:
        return error.errno
    finally:
        os.close(fd)
    return None


def _fill(path: Path) -> None:
    """Take all the room that is left."""
    assert _append_until_full(path) == errno.ENOSPC


def _make_until_refused(top: Path) -> tuple[int, object]:
    """Make files until one is refused; how many were made, and the error."""
    for number in range(1000):
        came = outcome(make, top / f"aidlc-docs/{number}.md")
        if came is not None:
            return number, came
    return 1000, None


def test_without_space_for_the_record_changes_are_refused(mounted: Mounted, source: Path, home: Path) -> None:
    """Every change fails with EIO, and reads succeed. With space again, changes succeed."""
    build(source)
    world = mounted()
    _fill(home / "filler")
    made, came = run_in_child(_make_until_refused, world.path)
    assert came == errno.EIO
    assert sorted(os.listdir(source / "aidlc-docs")) == sorted(f"{number}.md" for number in range(made))
    for call, *arguments in (
        (os.mkdir, world.path / "tests/new"),
        (os.unlink, world.path / "aidlc-docs/0.md"),
        (os.truncate, world.path / "aidlc-docs/0.md", 10),
        (os.rename, world.path / "aidlc-docs/0.md", world.path / "aidlc-docs/x.md"),
        (os.chmod, world.path / "aidlc-docs/0.md", 0o600),
        (os.setxattr, world.path / "aidlc-docs/0.md", "user.x", b"1"),
    ):
        assert run_in_child(outcome, call, *arguments) == errno.EIO
    assert run_in_child(outcome, os.truncate, world.path / "src/main.py", 0) == errno.EACCES
    assert run_in_child(read, world.path / "README.md") == CONTENT
    denials = run_in_child(read, world.path / ".bonobofs/denials.jsonl").decode().splitlines()
    assert json.loads(denials[0])["code"] == "UNRECORDED"
    assert json.loads(denials[-1])["code"] == "DEFAULT"
    (home / "filler").unlink()

    assert run_in_child(outcome, make, world.path / "aidlc-docs/again.md") is None
    entries = world.entries()
    assert [entry.details["error"] for entry in entries if entry.kind == "alert"] == ["No space left on device"]
    assert [e.path for e in entries if e.kind == "intent" and e.result == "allowed"] == [
        *(f"aidlc-docs/{number}.md" for number in range(made)),
        "aidlc-docs/again.md",
    ]
    assert bonobofs("audit", "verify").returncode == 0
    assert world.umount().closed


def test_why_status_and_umount_name_a_full_state_directory(mounted: Mounted, source: Path, home: Path) -> None:
    """The mount is unmounted although its end cannot be recorded. With space again, the same command records it."""
    build(source)
    world = mounted()
    path, why = world.path / "aidlc-docs", "user.bonobofs.why.plan.md"
    assert json.loads(os.getxattr(path, why))["allowed"]
    _fill(home / "filler")
    assert run_in_child(_make_until_refused, world.path)[1] == errno.EIO
    assert json.loads(os.getxattr(path, why))["code"] == "UNRECORDED"
    assert f"{home} is on a full disk" in bonobofs("status").stdout
    world.kill(signal.SIGKILL)  # otherwise the server frees a page, and may have room to end its record
    _append_until_full(home / "more")
    failed = bonobofs("umount", world.path)
    assert failed.returncode == 1
    assert failed.stderr.startswith(
        f"bonobofs: {world.path} is unmounted, but the end of the session cannot be recorded"
    )
    assert not os.path.ismount(world.path)
    for name in ("filler", "more"):
        (home / name).unlink()
    assert bonobofs("umount", world.path).returncode == 0
    assert "is on a full disk" not in bonobofs("status", "--all").stdout


def test_a_full_source_is_reported_and_recorded(mounted: Mounted, tmp_path: Path) -> None:
    """ENOSPC reaches the program, and the outcome in the record is that error."""
    source = tmp_path / "small"
    source.mkdir()
    with _small_disk(source, 400):
        build(source)
        world = mounted(source=source)
        assert run_in_child(_append_until_full, world.path / "aidlc-docs/plan.md") == errno.ENOSPC
        assert run_in_child(outcome, os.truncate, world.path / "aidlc-docs/plan.md", 0) is None
        assert run_in_child(_append_until_full, world.path / "aidlc-docs/plan.md") == errno.ENOSPC
        outcomes = [(entry.path, entry.reason) for entry in world.entries() if entry.result == "error"]
        assert outcomes == [("aidlc-docs/plan.md", "ENOSPC: No space left on device")] * 2
        (source / "external").touch()
        until(lambda: list(out_of_band(world)) == ["external"], "the watcher reports this change, no other")
        assert world.clear() == []


def test_a_removal_frees_a_nearly_full_disk(mounted: Mounted, tmp_path: Path) -> None:
    """The store keeps a removed file while its disk has room. It leaves the reserve to programs and to the trail."""
    source, size = tmp_path / "small", 2 << 20
    source.mkdir()
    with _small_disk(source, 16_000):
        (source / ".bonobofs").mkdir(mode=0o700)
        for name in ("kept", "lost"):
            (source / name).write_bytes(bytes(size))
        world = mounted(source=source, policy=ALLOW_ALL)
        free = _free(source)
        run_in_child(os.unlink, world.path / "kept")
        assert _free(source) < free + size // 2, "the store has the content"
        (source / "filler").write_bytes(bytes(_free(source) - size // 4))
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 1.1, "the store reads the free space again")
        run_in_child(os.unlink, world.path / "lost")
        until(lambda: _free(source) >= size, "the removal frees the space")
        undone = bonobofs("undo", "--path", source / "lost")
        assert "the disk of the store is nearly full" in undone.stdout + undone.stderr
        assert undone.returncode != 0
        (source / "filler").unlink()
        assert bonobofs("undo", "--path", source / "kept").returncode == 0
        assert (source / "kept").read_bytes() == bytes(size)
        world.umount()
        assert bonobofs("audit", "verify").returncode == 0


def _copy_into(path: Path, origin: Path) -> list[object]:
    with opened(origin, os.O_RDONLY) as old, opened(path, os.O_RDWR) as new:
        return [outcome(os.copy_file_range, old, new, length, at, at) for length, at in ((16_384, 0), (12_288, 4096))]


def test_a_copy_on_a_full_disk_returns_how_much_it_copied(mounted: Mounted, tmp_path: Path) -> None:
    """The target has one block. The server writes the judged first bytes there, and has no space for the rest."""
    source = tmp_path / "small"
    source.mkdir()
    with _small_disk(source, 400):
        build(source)
        (source / "tests/old").write_bytes(b"x" * 16_384)
        (source / "aidlc-docs/new.md").write_bytes(bytes(4096))
        world = mounted(source=source)
        _fill(source / "filler")
        result = run_in_child(_copy_into, world.path / "aidlc-docs/new.md", world.path / "tests/old")
        assert result == [4096, errno.ENOSPC]
        assert (source / "aidlc-docs/new.md").read_bytes() == b"x" * 4096
        assert [entry.path for entry in world.entries() if entry.kind == "alert"] == []
        assert world.clear() == []
