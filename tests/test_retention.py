"""How long the record is kept: ended trails are compressed and pruned, living ones never."""

from __future__ import annotations

from pathlib import Path

from bonobofs.audit.history import read
from bonobofs.audit.trail_file import compressed
from bonobofs.session.retention import compress_ended
from tests.worlds import ALLOW_ALL, Mounted, World, bonobofs


def trail_of(world: World) -> Path:
    return world.home / "trails" / f"{world.session.session}.jsonl"


def test_umount_compresses_the_trail_and_every_command_reads_it(mounted: Mounted) -> None:
    world = mounted(policy=ALLOW_ALL)
    (world.path / "note.txt").write_text("x")
    entries = world.entries()
    compress_ended(world.home)
    assert not compressed(trail_of(world)).exists()
    world.umount()
    assert compressed(trail_of(world)).exists()
    assert not trail_of(world).exists()
    assert list(read(trail_of(world)))[: len(entries)] == entries
    assert "note.txt" in bonobofs("audit", "tail").stdout
    assert "note.txt" in bonobofs("audit", "query", "--path", "note.txt").stdout
    assert "note.txt" in bonobofs("audit", "report").stdout
    assert bonobofs("audit", "export", "--format", "jsonl").stdout.count('"path":"note.txt"') == 2
    assert bonobofs("audit", "verify").returncode == 0
    assert bonobofs("status", "--all").returncode == 0


def test_a_crashed_session_is_compressed_by_the_next_mount(mounted: Mounted, source: Path) -> None:
    world = mounted(policy=ALLOW_ALL)
    (world.path / "note.txt").write_text("x")
    world.kill()
    compress_ended(world.home)
    assert trail_of(world).exists()  # the next mount may have to compare the source with it
    again = mounted(policy=ALLOW_ALL, source=source, mountpoint=world.path)
    assert compressed(trail_of(world)).exists()
    again.umount()
    told = bonobofs("audit", "verify")
    assert told.returncode == 0, told.stdout + told.stderr
    assert "crashed" in told.stdout


def test_a_large_trail_is_left_to_the_daemon(mounted: Mounted, source: Path) -> None:
    world = mounted(policy=ALLOW_ALL)
    world.umount()
    compressed(trail_of(world)).unlink()
    trail_of(world).write_bytes(b"x" * 5_000_000)
    compress_ended(world.home)
    assert trail_of(world).exists()
    compress_ended(world.home, most=None)
    assert not trail_of(world).exists()
