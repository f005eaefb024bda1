"""A compressed trail reads as the plain one, from any offset; no crash or damage loses or hides an entry."""

from __future__ import annotations

import gzip
import os
import resource
import sys
from pathlib import Path

import pytest

from bonobofs.audit.reader import is_closed, last, read, trails_in
from bonobofs.audit.trail_storage import BLOCK, compress, compressed, open_trail, size_of, stat_trail
from bonobofs.audit.verify import Damage, TrailReport, TrailStatus, verify_trail
from bonobofs.policy.request import Operation
from tests.audit.conftest import Create

STEPS = 14
"""System calls of a compression that are audit events: files are opened, renamed, removed."""
ENTRIES = 1000
"""Entries of a trail, which make several blocks."""


@pytest.fixture
def trail(tmp_path: Path, create: Create) -> Path:
    (tmp_path / "trails").mkdir()
    made = create(tmp_path / "trails")
    for number in range((ENTRIES - 1) // 2):
        seq = made.intent(Operation.CREATE_FILE, f"docs/{number}.md", "create", "docs")
        made.outcome(seq, Operation.CREATE_FILE, f"docs/{number}.md")
    made.event("note")
    made.close()
    return made.path


def examine(trail: Path) -> TrailReport:
    return verify_trail(trail, trail.with_suffix(".head"), session="s")


def test_both_forms_have_the_same_content(trail: Path) -> None:
    plain, entries, status = trail.read_bytes(), list(read(trail)), trail.stat()
    assert len(plain) > 4 * BLOCK
    compress(trail)
    assert not trail.exists()
    assert gzip.decompress(compressed(trail).read_bytes()) == plain
    assert compressed(trail).stat().st_size < len(plain) / 3
    assert (stat_trail(trail).st_mtime_ns, stat_trail(trail).st_mode) == (status.st_mtime_ns, status.st_mode)
    assert size_of(trail) == len(plain)
    assert trails_in(trail.parent) == [trail]
    with open_trail(trail) as stream:
        assert stream.read() == plain
        for place in (0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 7, len(plain) - 1, len(plain), len(plain) + 5):
            assert stream.seek(place) == place
            assert stream.read(100) == plain[place : place + 100]
    assert list(read(trail)) == entries
    assert last(trail, 3) == entries[-3:]
    assert is_closed(trail)
    report = examine(trail)
    assert (report.status, report.entries, report.findings) == (TrailStatus.CLOSED, ENTRIES, [])


def test_an_empty_trail_is_compressed_too(tmp_path: Path) -> None:
    trail = tmp_path / "s.jsonl"
    trail.touch()
    compress(trail)
    assert (list(read(trail)), size_of(trail), gzip.decompress(compressed(trail).read_bytes())) == ([], 0, b"")


@pytest.mark.parametrize("step", range(16))
def test_a_crash_at_any_step_loses_and_doubles_no_entry(trail: Path, step: int) -> None:
    """A child dies at this step. The state then reads as before, and the next run finishes."""
    entries = list(read(trail))
    child = os.fork()
    if not child:
        left = iter(range(step))

        def die(event: str, _: tuple[object, ...]) -> None:
            if event.startswith(("open", "os.")) and next(left, None) is None:
                os._exit(9)

        sys.addaudithook(die)
        compress(trail)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (9 if step < STEPS else 0)
    assert (trails_in(trail.parent), list(read(trail))) == ([trail], entries)
    assert not examine(trail).findings
    if trail.exists():
        compress(trail)
    assert list(read(trail)) == entries
    assert {path.name for path in trail.parent.iterdir()} == {"s.jsonl.gz", "s.head"}


def test_a_full_disk_leaves_the_plain_form(trail: Path) -> None:
    plain = trail.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            compress(trail)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert trail.read_bytes() == plain
    assert {path.name for path in trail.parent.iterdir()} == {"s.jsonl", "s.head"}


@pytest.mark.parametrize("place", [0, 5, 30, 0.3, 0.6, 0.999, -1, -12, -30])
def test_damage_is_a_finding(trail: Path, place: float) -> None:
    """For any changed byte the trail reads as written, or verify finds the damage; no call raises."""
    entries = list(read(trail))
    compress(trail)
    data = bytearray(compressed(trail).read_bytes())
    data[int(place * len(data)) if 0 < place < 1 else int(place)] ^= 0xFF
    compressed(trail).write_bytes(data)
    report = examine(trail)
    assert report.findings or list(read(trail)) == entries
    if place in (0.3, 0.6):
        assert report.findings[0].what in (Damage.CHANGED, Damage.MISSING)
        assert list(read(trail))[-1] == entries[-1]  # what lies behind a damaged block is read


@pytest.mark.parametrize("change", [b"junk", -30])
def test_a_change_behind_the_last_entry_is_a_finding(trail: Path, change: bytes | int) -> None:
    """The index of the blocks is damaged, and no entry is lost."""
    entries = list(read(trail))
    compress(trail)
    data = compressed(trail).read_bytes()
    compressed(trail).write_bytes(data + change if isinstance(change, bytes) else data[:change])
    (found,) = examine(trail).findings
    assert "was changed or cut behind its last entry" in found.message
    assert list(read(trail)) == entries


@pytest.mark.parametrize("left", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_compressed_trail_is_a_finding(trail: Path, left: float) -> None:
    entries = list(read(trail))
    compress(trail)
    os.truncate(compressed(trail), int(left * compressed(trail).stat().st_size))
    found = examine(trail).findings
    assert found[0].what is Damage.TAIL
    assert entries[: len(list(read(trail)))] == list(read(trail))
