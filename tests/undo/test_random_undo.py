"""Random sequences of changes by several agents, taken back in whole, in parts and in any order without a conflict."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.ipc.client import call
from bonobofs.state.home import inside_directory
from tests.support.commands import bonobofs, environment
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.random_changes import change_at_random, make_tree
from tests.support.source_state import state_of, undo, without_directory_times

_STAGING = """
default = "deny"
temporary = ["*.tmp"]
[[rule]]
name = "short names"
paths = ["?", "?/?", "?/?/?"]
executable = true
"""
"""A policy under which a new name that ends in .tmp is staged, and published when it is renamed or linked."""


@pytest.mark.parametrize("seed", range(6))
def test_everything_is_taken_back(own_place: MakePlace, tmp_path: Path, seed: int) -> None:
    """Two agents change the same files in turns; the undo of both, and the undo of that, restore every file."""
    rng = random.Random(seed)
    (source := tmp_path / "source").mkdir()
    before = state_of(make_tree(source))
    places = [own_place(policy=_STAGING), own_place(policy=_STAGING)]
    for _ in range(80):
        change_at_random(rng.choice(places).path, rng)
    changed = state_of(source)
    first = undo(places[0], since="1d")
    assert (first["conflicts"], first["failures"]) == ([], [])
    assert state_of(source) == before
    second = undo(places[0], of_session=first["session"])
    assert (second["conflicts"], second["failures"]) == ([], [])
    assert state_of(source) == changed


@pytest.mark.parametrize("seed", [*range(4), 227])
def test_parts_are_taken_back_newest_first(own_place: MakePlace, tmp_path: Path, seed: int) -> None:
    """Sessions that follow each other are taken back one by one; each leaves the state before it."""
    rng = random.Random(seed)
    (source := tmp_path / "source").mkdir()
    make_tree(source)
    places = [own_place() for _ in range(3)]
    states = []
    for place in places:
        states.append(state_of(source))
        for _ in range(25):
            change_at_random(place.path, rng)
    for place, state in zip(reversed(places), reversed(states), strict=True):
        result = undo(place, of_session=place.session.session)
        assert (result["conflicts"], result["failures"]) == ([], [])
        assert state_of(source) == state


@pytest.mark.parametrize("seed", range(4))
def test_turns_are_taken_back_in_any_order_without_a_conflict(own_place: MakePlace, tmp_path: Path, seed: int) -> None:
    """A turn without a conflict is chosen at random until none is left. One with a conflict changes nothing of it.

    An older turn may hide what a newer one changed, so that none can be taken back. Then the undos are taken back, and
    the turns newest first.
    """
    rng = random.Random(seed)
    (source := tmp_path / "source").mkdir()
    before = state_of(make_tree(source))
    places = [own_place(), own_place()]
    turns: list[tuple[Place, str]] = []
    for number in range(10):
        place = rng.choice(places)
        answer = call(inside_directory(place.home, place.session.session), "mark", name=f"turn {number}")
        turns.append((place, answer["turn"]))
        for _ in range(5):
            change_at_random(place.path, rng)
    changed, left, undos = state_of(source), turns.copy(), list[str]()

    def take_back(place: Place, **selection: str) -> None:
        result = undo(place, **selection)
        assert (result["conflicts"], result["failures"]) == ([], [])
        undos.append(result["session"])

    while free := [turn for turn in left if not undo(turn[0], turn=turn[1], dry_run=True)["conflicts"]]:
        place, name = rng.choice(free)
        take_back(place, turn=name)
        left.remove((place, name))
    assert len(left) < len(turns)
    if left:
        for session in reversed(undos.copy()):
            take_back(places[0], of_session=session)
        assert without_directory_times(state_of(source)) == without_directory_times(changed)
        for place, name in reversed(turns):
            take_back(place, turn=name)
    assert without_directory_times(state_of(source)) == without_directory_times(before)


@pytest.mark.root
@pytest.mark.parametrize("when", [9, 13, 17, 26, 33, 36, 41, 47, 61])
def test_a_killed_undo_of_a_random_sequence_is_completed(own_place: MakePlace, tmp_path: Path, when: int) -> None:
    """kill -9 at one of the calls that change a file: the next undo leaves every file and directory as it was."""
    rng = random.Random(when)
    (source := tmp_path / "source").mkdir()
    before = state_of(make_tree(source))
    place = own_place(policy=_STAGING)
    for _ in range(60):
        change_at_random(place.path, rng)
    calls = "renameat,renameat2,linkat,unlinkat,symlinkat,mkdirat,pwrite64,?fchmodat,fchmod,utimensat,sendfile,write"
    inject = f"inject={calls}:signal=KILL:when={when}"
    program = [sys.executable, "-m", "bonobofs", "undo", "--session", place.session.session]
    killed = subprocess.run(
        ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}", "-e", inject, *program],
        cwd="/", env=environment(), capture_output=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    result = undo(place, of_session=place.session.session)
    assert (result["conflicts"], result["failures"]) == ([], [])
    assert state_of(source) == before
    assert bonobofs("audit", "verify").returncode == 0


@pytest.mark.parametrize("seed", range(4))
def test_work_after_an_undo_is_taken_back_alone(own_place: MakePlace, tmp_path: Path, seed: int) -> None:
    """Undos of all, undos of these undos and further changes follow each other; each undo leaves the state before."""
    rng = random.Random(seed)
    (source := tmp_path / "source").mkdir()
    before = state_of(make_tree(source))
    place = own_place(policy=_STAGING)

    def take_back(**selection: str) -> str:
        result = undo(place, **selection)
        assert (result["conflicts"], result["failures"]) == ([], [])
        return str(result["session"])

    for _ in range(4):
        for _ in range(20):
            change_at_random(place.path, rng)
        changed = state_of(source)
        last = take_back(agent="alice")
        assert state_of(source) == before
        for _ in range(rng.randrange(3)):
            last = take_back(of_session=last)
            assert state_of(source) == changed
            again = undo(place, agent="alice")
            assert (again["conflicts"], again["failures"]) == ([], [])
            assert state_of(source) == before
            last = again["session"]
    again = undo(place, agent="alice")
    assert (again["taken_back"], again["conflicts"], again["steps"]) == ([], [], [])
    assert len(again["taken_back_before"]) > 20
