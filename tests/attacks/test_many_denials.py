"""Thousands of refusals: each is answered, the record and the server stay small, and there is one alert."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Final

import pytest

from bonobofs.enforcement.denial_recorder import BURST
from tests.attacks.attack import CONTENT
from tests.attacks.ground import build
from tests.support import proc
from tests.support.syscalls import make
from tests.support.users import outcome, run_in_child
from tests.support.world import Mounted, World, bonobofs

MANY: Final = 100_000
_ROOM: Final = 16_000 << 10
"""Bytes by which the server may grow meanwhile."""


@pytest.fixture
def source(source: Path) -> Path:
    build(source)
    return source


def _alerts(world: World) -> list[tuple[str, str | None]]:
    return [(entry.path, entry.code) for entry in world.entries() if entry.kind == "alert"]


def _insist(top: Path, times: int) -> set[int | None]:
    seen: set[int | None] = set()
    os.chdir(top)
    for _ in range(times):
        try:
            os.truncate("src/main.py", 0)
            seen.add(None)
        except OSError as error:
            seen.add(error.errno)
    return seen


def test_a_hundred_thousand_denials_are_one_entry_and_a_count(mounted: Mounted, source: Path) -> None:
    """The record and the server do not grow with the number of attempts."""
    world = mounted()
    run_in_child(_insist, world.path, 1000)
    before = proc.memory(world.pid)
    assert run_in_child(_insist, world.path, MANY) == {errno.EACCES}
    assert proc.memory(world.pid) - before < _ROOM
    entries = [entry for entry in world.entries() if entry.path == "src/main.py" and entry.kind != "alert"]
    assert sum(1 if entry.kind == "intent" else entry.details["count"] for entry in entries) == MANY + 1000
    assert len(entries) < 20
    assert world.trail.stat().st_size < 100_000
    assert len(_alerts(world)) == 1
    assert (source / "src/main.py").read_bytes() == CONTENT


def _try_names(top: Path, count: int) -> set[object]:
    os.chdir(top)
    return {outcome(os.mkdir, f"src/{number}") for number in range(count)}


def test_denials_of_many_names_take_bounded_memory(mounted: Mounted) -> None:
    """The record names the first thousand and counts the rest (tests/attacks/test_refusal_flood)."""
    world = mounted()
    run_in_child(_try_names, world.path, 100)
    before = proc.memory(world.pid)
    assert run_in_child(_try_names, world.path, 10_000) == {errno.EACCES}
    denied = [entry for entry in world.entries() if entry.result == "denied" and entry.kind == "intent"]
    named = {entry.path for entry in denied if entry.path != "src"}
    assert BURST <= len(named) < 10_000
    assert named <= {f"src/{number}" for number in range(10_000)}
    assert proc.memory(world.pid) - before < _ROOM
    shown = run_in_child((world.path / ".bonobofs/denials.jsonl").read_text).splitlines()
    assert [json.loads(line)["path"] for line in shown] == [f"src/{number}" for number in range(9_900, 10_000)]
    assert bonobofs("audit", "verify").returncode == 0


def _try_five(top: Path) -> None:
    for number in range(5):
        with contextlib.suppress(PermissionError):
            os.mkdir(top / f"src/{number}")


def test_the_third_denial_is_an_alert_and_the_next_ones_are_not(mounted: Mounted) -> None:
    """There is one alert in five minutes."""
    world = mounted()
    run_in_child(_try_five, world.path)
    assert _alerts(world) == [("src/2", "DEFAULT")]
    run_in_child(_try_five, world.path)
    assert len(_alerts(world)) == 1


def _lock(top: Path) -> list[object]:
    return [outcome(make, top / ".git/index.lock") for _ in range(5)]


def test_an_optional_git_lock_raises_no_alert(mounted: Mounted) -> None:
    """`git status` tries to refresh its index each time: `denials.jsonl` shows it, and the record has no entry."""
    world = mounted()
    assert run_in_child(_lock, world.path) == [errno.EROFS] * 5
    assert (world.path / ".bonobofs/denials.jsonl").read_text().count(".git/index.lock") == 5
    assert [entry for entry in world.entries() if entry.path == ".git/index.lock"] == []
    assert _alerts(world) == []


def _leave(top: Path) -> None:
    with contextlib.suppress(PermissionError):
        os.symlink("/etc", top / "aidlc-docs/etc")


def test_an_attempt_to_leave_is_an_alert_at_once(mounted: Mounted) -> None:
    """The first symlink that leads outside raises an alert."""
    world = mounted()
    run_in_child(_leave, world.path)
    assert _alerts(world) == [("aidlc-docs/etc", "OUTSIDE")]


_NAMES = (
    b"new\nline.txt",
    b"\x1b]0;title\x07\x1b[31mred.txt",
    b'x","kind":"event","hash":"' + b"0" * 64 + b'"}\n{"timestamp":"2020.txt',
    b"\xff\xfe\x80.txt",
    "\u202egpj.txt".encode(),
    b"\\ud800.txt",
)


def _name_them(top: bytes) -> None:
    for name in _NAMES:
        with contextlib.suppress(PermissionError):
            os.mkdir(os.path.join(top, b"src", name))
        with contextlib.suppress(PermissionError):
            os.symlink(b"/" + name, os.path.join(top, b"aidlc-docs", name))


def test_no_name_forges_a_line_or_controls_a_terminal(mounted: Mounted) -> None:
    """The record has exactly the name; the output is one line of printable characters."""
    world = mounted()
    run_in_child(_name_them, os.fsencode(world.path))
    tried = [os.fsdecode(name) for name in _NAMES]
    entries = world.all_entries()
    assert world.trail.read_bytes().count(b"\n") == len(entries)
    assert [entry.path for entry in entries if entry.kind == "intent" and entry.code == "DEFAULT"] == [
        f"src/{name}" for name in tried
    ]
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    for command in (("audit", "tail", "-n", "100"), ("audit", "query", "--result", "denied"), ("audit", "verify")):
        ran = bonobofs(*command)
        assert ran.returncode == 0
        assert all(line.isprintable() for line in ran.stdout.splitlines()), ran.stdout
        assert not set(ran.stdout) & set("\x1b\x07\r\x9b\u202e")
    shown = bonobofs("audit", "tail", "-n", "100", "--json").stdout.splitlines()
    assert [json.loads(line)["seq"] for line in shown] == [entry.seq for entry in world.all_entries()]
