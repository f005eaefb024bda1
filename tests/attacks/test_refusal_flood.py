"""Floods: thousands of different denials a second, and denials of very long paths."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from hashlib import sha256
from pathlib import Path

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.writer import LONGEST_OF_REFUSAL
from bonobofs.enforcement.denial_recorder import BURST, RATE, SHOWN_DENIALS
from tests.support.users import outcome, run_in_child
from tests.support.world import ALLOW_ALL, Mounted, bonobofs

POLICY = f'{ALLOW_ALL}[[protect]]\npaths = ["closed/", "shut/"]\n'
FLOOD = 12_000
DEEP = 30
"""Directories, each with a name of 200 bytes."""


def _is_refusal(entry: AuditEntry) -> bool:
    return entry.result == "denied" and entry.kind != "alert"


def test_a_flood_of_denials_is_limited_and_counted(mounted: Mounted, source: Path) -> None:
    """At most BURST + RATE a second are recorded. All others are counted by operation and rule, with one alert."""
    for name in ("closed", "shut"):
        (source / name).mkdir()
    world = mounted(policy=POLICY)
    before = world.trail.stat().st_size

    def flood() -> float:
        began = time.monotonic()
        for number in range(FLOOD):
            with contextlib.suppress(OSError):
                os.mkdir(world.path / ("shut" if number % 5 == 0 else "closed") / str(number))
        return time.monotonic() - began

    seconds = run_in_child(flood)
    seen = (world.path / ".bonobofs/denials.jsonl").read_text().splitlines()
    entries = world.entries()
    one_by_one = [entry for entry in entries if _is_refusal(entry) and entry.kind == "intent"]
    counted = [entry for entry in entries if _is_refusal(entry) and "count" in entry.details]
    assert BURST <= len(one_by_one) <= BURST + RATE * (seconds + 1)
    assert len(one_by_one) + sum(entry.details["count"] for entry in counted) == FLOOD
    assert {(entry.operation, entry.rule, entry.path) for entry in counted} == {
        ("mkdir", f"protect:{name}/", name) for name in ("closed", "shut")
    }
    alerts = [entry for entry in entries if entry.kind == "alert" and entry.operation == "refusals"]
    assert [(entry.agent, entry.path, entry.details["count"] > 0) for entry in alerts] == [("alice", "closed", True)]
    assert world.trail.stat().st_size - before < 1000 * (len(one_by_one) + len(counted) + 10)
    assert [json.loads(line)["path"].partition("/")[2] for line in seen] == [
        str(number) for number in range(FLOOD - SHOWN_DENIALS, FLOOD)
    ]
    assert bonobofs("audit", "verify").returncode == 0
    report = json.loads(bonobofs("audit", "report", "--json").stdout)
    assert report["totals"]["refused"] == FLOOD


def test_a_later_denial_is_recorded_after_a_flood(mounted: Mounted, source: Path) -> None:
    """Also during one: the limit leaves room for RATE a second, and a permitted change is recorded at once."""
    (source / "closed").mkdir()
    world = mounted(policy=POLICY)
    for number in range(2 * BURST):
        assert outcome(os.mkdir, world.path / "closed" / str(number)) == errno.EROFS
    (world.path / "file").write_text("x")
    number, deadline = 0, time.monotonic() + 30
    while not any(entry.path.startswith("closed/later-") for entry in world.entries()):
        assert time.monotonic() < deadline, "no later refusal was entered"
        assert outcome(os.mkdir, world.path / "closed" / f"later-{(number := number + 1)}") == errno.EROFS
    assert "file" in {entry.path for entry in world.entries()}


def test_a_long_path_is_truncated_in_the_entry_of_a_denial(mounted: Mounted) -> None:
    """Its ends stay, with length and hash of the complete path. A permitted change keeps its path."""
    world = mounted(policy=POLICY)
    name = "n" * 200

    def story() -> tuple[object, ...]:
        for top in ("closed", "open"):
            base = world.source if top == "closed" else world.path
            os.mkdir(base / top)
            for at in range(DEEP):
                os.chdir(base / top if at == 0 else name)
                os.mkdir(name)
        os.chdir(world.path / "closed")
        for _ in range(DEEP - 1):
            os.chdir(name)
        return tuple(outcome(os.mkdir, f"new-{number}") for number in range(20))

    assert len(set(run_in_child(story))) == 1
    entries = world.entries()
    whole = "/".join(["closed", *[name] * (DEEP - 1), "new-0"])
    refused = [entry for entry in entries if _is_refusal(entry) and entry.details.get("path_bytes") == len(whole)]
    (first,) = [entry for entry in refused if entry.path.endswith("/new-0") and entry.kind == "intent"]
    assert first.details["path_sha256"] == sha256(whole.encode()).hexdigest()
    assert first.path.startswith("closed/nnn")
    assert max(len(entry.path) for entry in entries if entry.result == "denied") <= LONGEST_OF_REFUSAL
    deep = "/".join(["open", *[name] * DEEP])
    assert deep in {entry.path for entry in entries if entry.result == "allowed"}
    assert bonobofs("audit", "verify").returncode == 0
