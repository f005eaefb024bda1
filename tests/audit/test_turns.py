"""Turns: a mark, a hook or a pause begins one, and each change belongs to the last that began before it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bonobofs.audit.writer import PAUSE, Trail, TrailIdentity
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import TrailError
from bonobofs.policy.engine import compile_policy
from bonobofs.policy.request import NO_FACTS, Operation, Principal, Request, WorkspacePath

ALICE = Principal("alice", "3f0c8a52-6a6e-4e55-9c7e-0b6f0b6d6d10", "agent")


class Clock:
    """The system's clock in nanoseconds, as far as the trail reads it."""

    def __init__(self) -> None:
        self.seconds = 1_800_000_000

    def __call__(self) -> int:
        return self.seconds * 10**9


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def enforcer(tmp_path: Path, clock: Clock) -> Iterator[Enforcer]:
    identity = TrailIdentity("s", ALICE.label, ALICE.id)
    trail = Trail.create(tmp_path / "s.jsonl", tmp_path / "s.head", identity, clock=clock)
    yield Enforcer(compile_policy({"default": "allow"}), ALICE, trail)
    trail.close()


def change(enforcer: Enforcer, path: str = "a") -> int:
    """Make a change; return the turn to which it belongs."""
    with enforcer.authorize(Request(Operation.CREATE_FILE, WorkspacePath(path))):
        return enforcer.turn


def entries(enforcer: Enforcer) -> list[dict[str, Any]]:
    enforcer.flush_all()
    return [json.loads(line) for line in enforcer.trail.path.read_text().splitlines()]


def test_a_mark_begins_a_turn_and_its_entry_is_its_number(enforcer: Enforcer) -> None:
    assert change(enforcer) == 0
    turn = enforcer.begin_turn("say hello")
    assert change(enforcer) == turn == enforcer.trail.turn
    entry = entries(enforcer)[turn - 1]
    assert (entry["seq"], entry["kind"], entry["operation"]) == (turn, "event", "turn")
    assert entry["details"] == {"name": "say hello", "by": "mark"}


def test_a_write_in_progress_stays_in_the_turn_before(enforcer: Enforcer) -> None:
    request = Request(Operation.WRITE_FILE, WorkspacePath("a"))
    batch = enforcer.open_batch(1, request, NO_FACTS, 0.0)
    turn = enforcer.begin_turn("next")
    assert batch.generation != enforcer.generation
    (outcome,) = [entry for entry in entries(enforcer) if entry["details"].get("intent") == batch.seq]
    assert batch.seq < outcome["seq"] < turn


def test_a_pause_begins_a_turn_with_the_next_change(enforcer: Enforcer, clock: Clock) -> None:
    assert change(enforcer) == 0
    clock.seconds += PAUSE
    assert change(enforcer) == 0
    clock.seconds += PAUSE + 1
    turn = change(enforcer)
    assert turn > 0
    clock.seconds += PAUSE
    assert change(enforcer) == turn
    found = entries(enforcer)
    assert [entry["details"] for entry in found if entry["operation"] == "turn"] == [{"name": "", "by": "pause"}]
    assert found[turn]["kind"] == "intent"


def test_a_change_that_takes_long_is_no_pause(enforcer: Enforcer, clock: Clock) -> None:
    with enforcer.authorize(Request(Operation.CREATE_FILE, WorkspacePath("a"))):
        clock.seconds += 5 * PAUSE

    assert change(enforcer) == 0


@pytest.mark.parametrize(("by", "ends_pauses"), [("hook", True), ("mark", False)])
def test_hooks_end_the_pauses_of_a_session(enforcer: Enforcer, clock: Clock, by: str, *, ends_pauses: bool) -> None:
    """An agent that tests for a minute is still in the turn of its prompt."""
    turn = enforcer.begin_turn("prompt", by)
    change(enforcer)
    clock.seconds += 6 * PAUSE
    assert (change(enforcer) == turn) is ends_pauses


def test_a_mark_keeps_the_changes_after_a_pause(enforcer: Enforcer, clock: Clock) -> None:
    """The agent was idle before the mark, and thinks after it: its changes are in the turn with the name."""
    change(enforcer)
    clock.seconds += 6 * PAUSE
    turn = enforcer.begin_turn("task", "mark")
    clock.seconds += 6 * PAUSE
    assert change(enforcer) == turn
    clock.seconds += PAUSE + 1
    assert change(enforcer) > turn


def test_a_clock_that_is_set_back_begins_no_turn(enforcer: Enforcer, clock: Clock) -> None:
    change(enforcer)
    clock.seconds -= 3600
    assert change(enforcer) == 0


def test_a_turn_that_cannot_be_recorded_does_not_begin() -> None:
    full, null = os.open("/dev/full", os.O_WRONLY), os.open("/dev/null", os.O_WRONLY)
    trail = Trail(full, null, TrailIdentity("s", "alice", "id"), Path("t"))
    with pytest.raises(TrailError):
        trail.begin_turn("lost", "mark")
    assert trail.turn == 0
    with pytest.raises(TrailError):
        trail.close()


def test_a_name_is_cut(enforcer: Enforcer) -> None:
    enforcer.begin_turn("x" * 100_000)
    assert len(entries(enforcer)[0]["details"]["name"]) == 200
