"""Trails can be read, queried and exported exactly."""

from __future__ import annotations

import csv
import io
import json
import os
import resource
import tracemalloc
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bonobofs.audit.entry import FIELDS, AuditEntry
from bonobofs.audit.reader import (
    UNREADABLE,
    Follower,
    export_csv,
    export_jsonl,
    is_closed,
    last,
    merged,
    read,
    since,
    trails_in,
)
from bonobofs.audit.writer import Trail
from bonobofs.errors import TrailError, UsageError
from bonobofs.policy.request import Operation
from bonobofs.system.terminal import escape
from tests.audit.conftest import Create, creating

NOW = datetime(2026, 1, 31, 12, 0, 0, 123456, UTC)


def change(trail: Trail, path: str, operation: Operation = Operation.CREATE_FILE, error: int = 0) -> None:
    trail.outcome(trail.intent(operation, path, "create", "artifacts"), operation, path, error=error)


def note(trail: Trail, seconds: float, text: str) -> None:
    moment = NOW + timedelta(seconds=seconds)
    trail.append(AuditEntry(moment, "git", "note", trail.identity.agent, {"text": text}, "allowed", None))


def texts(entries: Iterable[AuditEntry]) -> list[str]:
    return [entry.details["text"] for entry in entries if "text" in entry.details]


@pytest.fixture
def trails(tmp_path: Path) -> Path:
    made = tmp_path / "trails"
    made.mkdir()
    return made


def test_a_damaged_line_is_shown_and_hides_no_other(create: Create, trails: Path) -> None:
    trail = create(trails)
    note(trail, 0, "before")
    with trail.path.open("ab") as stream:
        stream.write(b'\x1b[2J{"timestamp":\n')
        stream.write(trail.path.read_bytes().replace(b'"details":{', b'"details":[],"x":{'))
    note(trail, 1, "after")
    trail.close()
    entries = list(read(trail.path))
    assert [entry.operation for entry in entries] == ["note", UNREADABLE, UNREADABLE, "note", "close"]
    assert (entries[1].session, entries[1].timestamp, entries[1].result) == ("s", NOW, "error")
    assert entries[1].details == {"line": '\x1b[2J{"timestamp":\n'}


def test_an_incomplete_last_line_is_not_read(create: Create, trails: Path) -> None:
    trail = create(trails)
    note(trail, 0, "whole")
    with trail.path.open("ab") as stream:
        stream.write(b'{"timestamp":"2026-')
    assert texts(read(trail.path)) == ["whole"]
    assert texts(last(trail.path, 5)) == ["whole"]


def test_a_missing_trail_is_a_trail_error(trails: Path) -> None:
    for call in (lambda: next(read(trails / "none.jsonl")), lambda: last(trails / "none.jsonl", 1)):
        with pytest.raises(TrailError, match=r"cannot be read: No such file"):
            call()


def test_trails_are_merged_by_time_and_each_keeps_its_order(create: Create, trails: Path) -> None:
    one, two = create(trails, "one"), create(trails, "two", "bob")
    for trail, seconds, text in (
        (one, 0, "a"),
        (two, 1, "b"),
        (one, 3, "d"),
        (one, -500, "d, the clock set back"),
        (two, 2, "c"),
        (two, 4, "e"),
    ):
        note(trail, seconds, text)
    assert texts(merged(trails_in(trails))) == ["a", "b", "c", "d", "d, the clock set back", "e"]


def test_more_trails_than_descriptors_are_merged(create: Create, trails: Path) -> None:
    for number in range(120):
        trail = create(trails, f"s{number}")
        note(trail, number, str(number))
        trail.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    with ExitStack() as held:
        while held.enter_context(open(os.devnull, "rb")).fileno() < highest:
            pass
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        found = texts(merged(trails_in(trails)))
    assert found == [str(number) for number in range(120)]


def test_the_tail_equals_the_end_of_a_full_read(create: Create, trails: Path) -> None:
    trail = create(trails)
    for number in range(500):
        note(trail, number, "x" * (number % 7 * 100))
    everything = list(read(trail.path))
    for count in (0, 1, 2, 99, 110, 499, 500, 501):
        assert last(trail.path, count) == everything[max(0, 500 - count) :]
    assert not is_closed(trail.path)
    trail.close()
    assert is_closed(trail.path)


def test_a_follower_returns_new_entries_and_complete_new_trails(create: Create, trails: Path) -> None:
    one = create(trails, "one")
    note(one, 0, "old")
    follower = Follower(trails)
    assert follower.poll() == []
    note(one, 1, "new")
    two = create(trails, "two")
    note(two, 0.5, "newer session")
    assert texts(follower.poll()) == ["newer session", "new"]
    with two.path.open("ab") as stream:
        stream.write(b'{"time')
    assert follower.poll() == []


def test_a_time_is_relative_to_now_or_in_iso_form() -> None:
    for text, distance in (("30s", 30), ("10m", 600), ("2h", 7200), ("1d", 86400), ("1w", 604800)):
        assert since(text, NOW) == NOW - timedelta(seconds=distance)
    assert since("2026-01-31T12:00:00.123456Z", NOW) == NOW
    assert since("2026-01-31", NOW) == datetime(2026, 1, 31).astimezone()
    for wrong in ("", "yesterday", "10", "m", "-5m", "1.5h", "999999w", "10m\x1b["):
        with pytest.raises(UsageError, match="is not a time"):
            since(wrong, NOW)


def test_the_json_export_has_the_lines_of_the_trail(create: Create, trails: Path) -> None:
    trail = create(trails)
    change(trail, "a\n\udcff€", error=5)
    note(trail, 1, "x")
    trail.close()
    out = io.StringIO()
    export_jsonl(read(trail.path), out)
    assert out.getvalue() == trail.path.read_text()


@given(path=st.binary(min_size=1, max_size=20).map(os.fsdecode))
def test_the_csv_export_has_one_row_per_entry_and_no_formula(
    tmp_path_factory: pytest.TempPathFactory, path: str
) -> None:
    with creating() as create:
        trail = create(tmp_path_factory.mktemp("trails"))
        change(trail, path)
        change(trail, f"={path}")
    out = io.StringIO(newline="")
    export_csv(read(trail.path), out)
    out.getvalue().encode()
    heading, *rows = csv.reader(io.StringIO(out.getvalue(), newline=""))
    assert heading == list(FIELDS)
    assert len(rows) == 5
    for row in rows:
        cells = dict(zip(heading, row, strict=True))
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row)
        assert isinstance(json.loads(cells["details"]), dict)
    cells = dict(zip(heading, rows[2], strict=True))
    assert cells["path"] == "'" + escape(f"={path}")


def test_a_shown_text_is_one_line_without_terminal_controls() -> None:
    assert escape("a\nb\x1b[2J\x7f\x9b\u2028\u202e\udcff\\é€") == "a\\nb\\x1b[2J\\x7f\\x9b\\u2028\\u202e\\xff\\\\é€"
    assert escape("plain/name.md") == "plain/name.md"


def test_reading_a_long_trail_takes_bounded_memory(create: Create, trails: Path) -> None:
    trail = create(trails)
    for number in range(5_000):
        change(trail, f"d{number}")
    trail.close()
    tracemalloc.start()
    count = sum(1 for _ in merged(trails_in(trails)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 10_001
    assert peak < 1_000_000
