"""Retention: ended trails are compressed and pruned; trails of live sessions stay."""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.audit.reader import read
from bonobofs.audit.tombstones import tombstones
from bonobofs.audit.trail_storage import compressed, stat_trail
from bonobofs.session.retention import compress_ended, prune
from tests.support.world import ALLOW_ALL, Mounted, World, bonobofs


def trail_of(world: World) -> Path:
    return world.home / "trails" / f"{world.session.session}.jsonl"


def test_umount_compresses_the_trail_and_every_command_reads_it(mounted: Mounted) -> None:
    world = mounted(policy=ALLOW_ALL)
    (world.path / "note.txt").write_text("x")
    entries = world.all_entries()
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


def test_an_older_plain_trail_is_a_finding_and_does_not_replace_the_compressed_one(
    mounted: Mounted, source: Path
) -> None:
    """An operator restores a backup that was taken during the session."""
    world = mounted(policy=ALLOW_ALL)
    (world.path / "first.txt").write_text("x")
    session.flush_servers(world.home)
    backup = shutil.copytree(world.home / "trails", world.home.with_name("backup"))
    (world.path / "second.txt").write_text("x")
    world.umount()
    entries = list(read(trail_of(world)))
    shutil.copytree(backup, world.home / "trails", dirs_exist_ok=True)
    told = bonobofs("audit", "verify")
    assert told.returncode == 1
    assert f"{compressed(trail_of(world))} and {trail_of(world).name} have different content" in told.stderr
    mounted(policy=ALLOW_ALL, source=source, mountpoint=world.path).umount()
    (failure,) = compress_ended(world.home)
    assert "cannot be compressed" in failure
    assert "move the wrong file away" in failure
    trail_of(world).unlink()
    assert list(read(trail_of(world))) == entries


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


def test_the_daemon_compresses_a_large_trail(mounted: Mounted, source: Path) -> None:
    world = mounted(policy=ALLOW_ALL)
    world.umount()
    compressed(trail_of(world)).unlink()
    trail_of(world).write_bytes(b"x" * 5_000_000)
    compress_ended(world.home)
    assert trail_of(world).exists()
    compress_ended(world.home, most=None)
    assert not trail_of(world).exists()


def small(home: Path, limits: str = "max_total = 1") -> None:
    (home / "policy.toml").write_text(f"{ALLOW_ALL}[audit]\n{limits}\n")


def pruned(world: World) -> bool:
    return not compressed(trail_of(world)).exists() and not trail_of(world).exists()


def write(world: World, count: int) -> None:
    for number in range(count):
        (world.path / f"{number}.txt").write_text("x" * 10)


def test_the_oldest_ended_trails_are_pruned_and_verify_succeeds(mounted: Mounted) -> None:
    old, young, living = (mounted(policy=ALLOW_ALL) for _ in range(3))
    for world in (old, young):
        write(world, 5)
        world.umount()
    home = old.home
    sizes = [stat_trail(trail_of(world)).st_size for world in (old, young, living)]
    small(home, f"max_total = {sum(sizes) - sizes[0] // 2}")
    before = sorted(home.rglob("trails/*"))
    dry = json.loads(bonobofs("audit", "prune", "--dry-run", "--json").stdout)
    assert [one["session"] for one in dry["pruned"]] == [old.session.session]
    assert dry["bytes"] == sizes[0]
    assert sorted(home.rglob("trails/*")) == before
    told = bonobofs("audit", "prune")
    assert (told.returncode, old.session.session in told.stdout) == (0, True), told.stderr
    assert (pruned(old), pruned(young), pruned(living)) == (True, False, False)
    verified = bonobofs("audit", "verify", "--json")
    assert verified.returncode == 0, verified.stdout
    status = {one["session"]: one["status"] for one in json.loads(verified.stdout)}
    assert status[old.session.session] == "pruned"
    assert bonobofs("audit", "query", "--session", old.session.session).stdout == ""
    small(home)
    assert bonobofs("audit", "prune").returncode == 0
    assert (pruned(young), pruned(living)) == (True, False)
    assert bonobofs("audit", "verify").returncode == 0
    for path in home.glob("pruned.*"):
        path.rename(home / f"away.{path.name}")
    assert bonobofs("audit", "verify").returncode == 1  # a trail is missing, and nothing says why


def test_trails_are_pruned_by_age(mounted: Mounted) -> None:
    world = mounted(policy=ALLOW_ALL)
    world.umount()
    now = datetime.now(UTC)
    assert prune(world.home, now=now + timedelta(days=89)).pruned == []
    (found,) = prune(world.home, now=now + timedelta(days=91)).pruned
    assert (found.session, found.why) == (world.session.session, "older than 90d")
    assert pruned(world)


@pytest.mark.parametrize("spoil", ["cut", "edit", "remove the record"])
def test_a_removed_or_changed_tombstone_is_a_finding(mounted: Mounted, spoil: str) -> None:
    home = Path()
    for _ in range(2):
        world = mounted(policy=ALLOW_ALL)
        world.umount()
        home = world.home
    small(home)
    assert len(prune(home).pruned) == 2
    record = home / "pruned.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    if spoil == "cut":
        record.write_bytes(lines[0])
    elif spoil == "edit":
        record.write_bytes(lines[0].replace(b'"seq":2', b'"seq":3', 1) + lines[1])
    else:
        record.unlink()
    assert bonobofs("audit", "verify").returncode == 1
    refused = bonobofs("audit", "prune")
    assert (refused.returncode, "does not verify" in refused.stderr) == (1, True)


def test_a_trail_that_does_not_verify_is_kept(mounted: Mounted) -> None:
    world = mounted(policy=ALLOW_ALL)
    write(world, 3)
    world.umount()
    trail = world.trail  # in its plain form
    trail.write_bytes(trail.read_bytes().replace(b"1.txt", b"7.txt"))
    small(world.home)
    found = prune(world.home)
    assert (found.pruned, list(found.kept)) == ([], [world.session.session])
    assert not pruned(world)


@pytest.mark.parametrize("step", range(0, 48, 6))
def test_a_killed_pruning_can_be_continued(mounted: Mounted, step: int) -> None:
    """The process dies at one of its system calls. Verify accepts the state, and the next pruning finishes."""
    worlds = [mounted(policy=ALLOW_ALL) for _ in range(2)]
    for world in worlds:
        world.umount()
    home = worlds[0].home
    small(home)
    child = os.fork()
    if not child:
        left = iter(range(step))

        def die(event: str, arguments: tuple[object, ...]) -> None:
            ours = event in ("open", "os.remove") and str(home) in str(arguments[0])
            if ours and next(left, None) is None:
                os._exit(9)

        sys.addaudithook(die)
        prune(home)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 9)
    told = bonobofs("audit", "verify")
    assert told.returncode == 0, told.stdout + told.stderr
    prune(home)
    assert all(pruned(world) for world in worlds)
    assert not list((home / "trails").iterdir())
    assert len(tombstones(home)) == 2
    assert bonobofs("audit", "verify").returncode == 0


def test_a_trail_that_agent_mail_lacks_is_kept(mounted: Mounted) -> None:
    world = mounted(policy=f'{ALLOW_ALL}[agent_mail]\nurl = "http://127.0.0.1:9/mcp/"\n')
    world.umount()
    small(world.home)
    found = prune(world.home)
    assert (found.pruned, found.kept) == ([], {world.session.session: "Agent Mail does not have all of it yet"})
    assert bonobofs("audit", "prune", "--dry-run").returncode == 1
    assert not pruned(world)
