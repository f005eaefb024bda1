"""kill -9 while a staged file is published: the source has the old file or the new one, and no temporary name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from bonobofs.audit.reader import read
from tests.crash.conftest import Examine
from tests.crash.test_kill_between import Change, killed_at
from tests.support.trees import snapshot
from tests.support.users import run_in_child
from tests.support.wait import until
from tests.support.world import Mounted, World

pytestmark = pytest.mark.root

POLICY: Final = """
default = "deny"
temporary = ["**/*.tmp"]
[[rule]]
name = "notes"
paths = ["notes/"]
suffixes = [".md"]
"""
OLD: Final = b"the old text"
NEW: Final = b"the new text, which is longer"


def _by_rename(top: Path, target: str) -> None:
    (top / "notes/x.tmp").write_bytes(NEW)
    os.rename(top / "notes/x.tmp", top / target)


def _by_link(top: Path, target: str) -> None:
    (top / "notes/x.tmp").write_bytes(NEW)
    os.link(top / "notes/x.tmp", top / target)


class Step(NamedTuple):
    """A moment at which the server is killed: at the entry or the exit of a system call."""

    call: str
    delay: str
    target: str
    act: Callable[[Path, str], None]
    then: set[bytes | None]
    """What the target may hold afterwards; None: it may be absent."""
    when: int = 1
    """Which of these calls it is. The first link of a replacement keeps the old content."""


STEPS: Final = {
    "over, before the old content is kept": Step("linkat", "delay_enter", "notes/a.md", _by_rename, {OLD}),
    "over, before the link": Step("linkat", "delay_enter", "notes/a.md", _by_rename, {OLD}, when=2),
    "over, after the link": Step("linkat", "delay_exit", "notes/a.md", _by_rename, {OLD}, when=2),
    "over, before the rename": Step("renameat,renameat2", "delay_enter", "notes/a.md", _by_rename, {OLD}),
    "over, after the rename": Step("renameat,renameat2", "delay_exit", "notes/a.md", _by_rename, {NEW}),
    "new, before": Step("linkat", "delay_enter", "notes/b.md", _by_rename, {None}),
    "new, after": Step("linkat", "delay_exit", "notes/b.md", _by_rename, {NEW}),
    "linked, before": Step("linkat", "delay_enter", "notes/b.md", _by_link, {None}),
    "linked, after": Step("linkat", "delay_exit", "notes/b.md", _by_link, {NEW}),
}


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


@pytest.mark.parametrize("name", STEPS)
def test_a_kill_during_publication_leaves_one_complete_file(
    mounted: Mounted, source: Path, examine: Examine, name: str
) -> None:
    """At any moment, the record explains the state, and the next mount shows one complete file."""
    step = STEPS[name]
    (source / "notes").mkdir()
    (source / "notes/a.md").write_bytes(OLD)
    before = snapshot(source)
    world = mounted(policy=POLICY)
    operation = "link" if step.act is _by_link else "rename"
    change = Change(operation, step.call, lambda top: step.act(top, step.target), when=step.when)
    with killed_at(world, change, step.delay):
        until(lambda: _is_there(world, step, operation), "the server came to that call")
    assert _content(source / step.target) in step.then
    examine(world, before)
    again = mounted(policy=POLICY, mountpoint=world.path)
    assert _content(source / step.target) in step.then
    names = {"a.md"} | ({"b.md"} if step.then == {NEW} and step.target.endswith("b.md") else set())
    assert set(os.listdir(source / "notes")) == set(run_in_child(os.listdir, again.path / "notes")) == names
    run_in_child(_by_rename, again.path, step.target)
    assert (source / step.target).read_bytes() == NEW


def _is_there(world: World, step: Step, operation: str) -> bool:
    if not any(entry.operation == operation for entry in read(world.trail) if entry.kind == "intent"):
        return False
    linked = any(name.startswith(".bonobofs-") for name in os.listdir(world.source / "notes"))
    if step.delay == "delay_enter":
        return linked or "linkat" in step.call
    if "rename" in step.call:
        return _content(world.source / step.target) == NEW
    return linked or _content(world.source / step.target) == NEW
