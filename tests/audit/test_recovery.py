"""After power loss, the next session reports exactly the paths where source and record differ."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import read
from bonobofs.audit.recovery import MOST, OUT_OF_BAND, SourceDifference, compare, enter
from bonobofs.audit.temp_cleanup import stray_name
from bonobofs.audit.writer import HEAD_SIZE, Trail, TrailIdentity
from bonobofs.policy.request import Operation

HOUR = 3600.0


class Past:
    """A session that ended with the power: its source, and a record made at moments of the test's choice.

    Times are seconds from now. What it does to the source happens now; what it enters may have happened then.
    """

    def __init__(self, directory: Path, name: str = "s") -> None:
        self.source = directory / "source"
        self.source.mkdir(exist_ok=True)
        self.head = directory / f"{name}.head"
        self.trail = Trail.create(directory / f"{name}.jsonl", self.head, TrailIdentity(name, "alice", "id"))

    def enter(
        self,
        operation: Operation,
        path: str,
        action: str,
        *,
        at: float = 0,
        took: float | None = 0,
        result: str = "allowed",
        size: int | None = None,
        after: str | None = None,
        details: Mapping[str, object] | None = None,
        guard: str = "file",
    ) -> None:
        """Enter a change and its outcome `took` seconds later; None: it has none."""
        moment = datetime.now(UTC) + timedelta(seconds=at)
        intent = AuditEntry(
            moment, guard, operation, "alice", dict(details or {}), "allowed", None, "intent", path=path
        )._replace(action=action)
        seq = self.trail.append(intent)
        if took is not None:
            ended = moment + timedelta(seconds=took)
            more = {key: value for key, value in (("size", size), ("after", after)) if value is not None}
            outcome = AuditEntry(ended, guard, operation, "alice", {"intent": seq} | more, result, None, "outcome")
            self.trail.append(outcome._replace(path=path))

    def settle(self, at: float) -> None:
        """Make the head say that all was on the disk at a moment."""
        seq, link = self.trail.head
        moment = (datetime.now(UTC) + timedelta(seconds=at)).isoformat(timespec="microseconds")
        text = f'{{"seq":{seq},"hash":"{link}","settled":"{moment}"}}'
        self.head.write_text(f"{text:<{HEAD_SIZE - 1}}\n")

    def differences(self, *others: Past) -> dict[str, str]:
        trails = [(past.trail.path, past.head) for past in (self, *others)]
        found = [(path, what.split(" at ")[0]) for path, what, _ in compare(self.source, trails)]
        assert len(dict(found)) == len(found)
        return dict(found)


CHANGED = "was changed"
ABSENT = "is missing, and the trails record that it exists"
THERE = "exists, and the trails record its removal"


@pytest.fixture
def past(tmp_path: Path) -> Iterator[Past]:
    """Give a session whose record was whole an hour ago: what changed since needs an explanation."""
    made = Past(tmp_path)
    made.settle(-HOUR)
    yield made
    made.trail.close()


def test_a_change_before_the_last_synced_entry_is_not_compared(past: Past) -> None:
    (past.source / "old").write_text("x")
    past.settle(+HOUR)
    assert past.differences() == {}


def test_every_unrecorded_new_or_changed_file_kind_is_reported(past: Past) -> None:
    (past.source / "d/deep").mkdir(parents=True)
    (past.source / "d/deep/file\n\udcff").write_text("x")
    (past.source / "link").symlink_to("/etc")
    os.mkfifo(past.source / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(past.source / "socket"))
    names = ["", "d", "d/deep", "d/deep/file\n\udcff", "link", "fifo", "socket"]
    assert past.differences() == dict.fromkeys(names, CHANGED)


def test_the_store_of_old_contents_is_not_compared(past: Past) -> None:
    """bonobofs itself writes it, and no trail has an entry of that."""
    (past.source / ".bonobofs/undo/session").mkdir(parents=True)
    (past.source / ".bonobofs/undo/session/3").write_text("kept")
    assert past.differences() == dict.fromkeys(["", ".bonobofs"], CHANGED)


def test_a_change_that_failed_with_a_state_was_made(past: Past) -> None:
    """The removal before it does not count then."""
    past.enter(Operation.DELETE_FILE, "file", "delete", at=-100)
    (past.source / "file").write_text("xy")
    past.enter(Operation.CREATE_FILE, "file", "create", result="error", details={"after": "state"})
    assert past.differences() == {"file": THERE}
    past.enter(Operation.CREATE_FILE, "file", "create", result="error", size=2, after="state")
    assert past.differences() == {}


def test_no_symlink_is_followed(past: Past, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("x")
    (past.source / "link").symlink_to(tmp_path / "outside")
    assert set(past.differences()) == {"", "link"}


def test_a_recorded_change_explains_its_path_and_its_directory(past: Past) -> None:
    (past.source / "d").mkdir()
    (past.source / "d/file").write_text("12345")
    past.enter(Operation.MKDIR, "d", "create")
    past.enter(Operation.CREATE_FILE, "d/file", "create", size=5)
    assert past.differences() == {}


def test_a_gate_operation_without_files_explains_no_file(past: Past) -> None:
    """Nor does the removal of a worktree explain the root."""
    (past.source / "file").write_text("12345")
    past.enter(Operation.CREATE_FILE, "file", "create", size=5)
    past.enter(Operation.CREATE_WORKTREE, "", "create", guard="git")
    past.enter(Operation.REMOVE_WORKTREE, "", "delete", guard="git")
    past.enter(Operation.COMMIT, "", "modify", took=None, guard="git")
    assert past.differences() == {}


def test_an_entry_of_another_time_explains_no_difference(past: Past) -> None:
    (past.source / "file").write_text("12345")
    past.enter(Operation.CREATE_FILE, "file", "create", size=5, at=-HOUR / 2)
    assert past.differences() == {"": CHANGED, "file": CHANGED}


def test_a_write_batch_explains_changes_until_it_was_closed(past: Past) -> None:
    (past.source / "file").write_text("12345")
    past.enter(Operation.WRITE_FILE, "file", "modify", size=5, at=-HOUR, took=HOUR + 1)
    assert past.differences() == {}


def test_an_intent_without_outcome_explains_both_states(past: Past) -> None:
    past.enter(Operation.CREATE_FILE, "made", "create", at=-HOUR, took=None)
    past.enter(Operation.CREATE_FILE, "not made", "create", at=-HOUR, took=None)
    past.enter(Operation.DELETE_FILE, "not deleted", "delete", at=-HOUR, took=None)
    past.enter(Operation.RENAME, "old", "modify", at=-HOUR, took=None, details={"to": "new"})
    for name in ("made", "not deleted", "new"):
        (past.source / name).write_text("x")
    assert past.differences() == {}


def test_a_missing_recorded_file_is_reported_once(past: Past) -> None:
    past.enter(Operation.MKDIR, "d", "create")
    past.enter(Operation.CREATE_FILE, "d/file", "create", size=0)
    past.enter(Operation.CREATE_FILE, "old directory/file", "create", size=0)
    past.enter(Operation.SET_MODE, "changed", "modify")
    assert past.differences() == {"d": ABSENT, "old directory/file": ABSENT, "changed": ABSENT}


def test_a_recorded_deletion_of_an_existing_file_is_reported(past: Past) -> None:
    (past.source / "file").write_text("x")
    past.enter(Operation.DELETE_FILE, "file", "delete")
    past.enter(Operation.DELETE_FILE, "gone", "delete")
    assert past.differences() == {"file": THERE}


def test_a_failed_deletion_is_not_expected_to_remove_the_file(past: Past) -> None:
    (past.source / "file").write_text("x")
    past.enter(Operation.DELETE_FILE, "file", "delete", result="error")
    assert past.differences() == {}


def test_a_file_that_became_a_directory_is_not_searched_below(past: Past) -> None:
    (past.source / "d").write_text("x")
    past.enter(Operation.CREATE_FILE, "d/file", "create", size=0)
    assert past.differences() == {"": CHANGED, "d/file": ABSENT}


def test_a_size_that_differs_from_the_record_is_reported(past: Past) -> None:
    (past.source / "file").write_text("12345")
    past.enter(Operation.CREATE_FILE, "file", "create", size=7)
    past.enter(Operation.SET_MODE, "file", "modify")
    assert past.differences() == {"file": "has 5 bytes, and the trails record 7"}


def test_the_last_content_change_determines_the_size(past: Past) -> None:
    (past.source / "file").write_text("12345")
    past.enter(Operation.CREATE_FILE, "file", "create", size=7)
    past.enter(Operation.TRUNCATE, "file", "modify")
    assert past.differences() == {}


def test_a_write_batch_closed_after_another_change_does_not_determine_the_size(past: Past) -> None:
    (past.source / "file").write_text("12345")
    run = past.trail.intent(Operation.WRITE_FILE, "file", "modify", "code")
    past.enter(Operation.TRUNCATE, "file", "modify")
    past.trail.outcome(run, Operation.WRITE_FILE, "file", details={"size": 99})
    past.trail.flush()
    assert past.differences() == {}


def test_a_directory_rename_moves_the_recorded_paths_below(past: Past) -> None:
    past.enter(Operation.MKDIR, "old", "create")
    past.enter(Operation.CREATE_FILE, "old/here", "create", size=5)
    past.enter(Operation.CREATE_FILE, "old/lost", "create", size=5)
    past.enter(Operation.RENAME, "old", "modify", details={"to": "new"})
    (past.source / "new").mkdir()
    (past.source / "new/here").write_text("12345")
    assert past.differences() == {"new/lost": ABSENT}


def test_an_exchange_moves_the_recorded_paths_of_both_sides(past: Past) -> None:
    past.enter(Operation.CREATE_FILE, "one", "create", size=1)
    past.enter(Operation.CREATE_FILE, "two", "create", size=2)
    past.enter(Operation.RENAME, "one", "modify", details={"to": "two", "exchange": True})
    (past.source / "one").write_text("22")
    (past.source / "two").write_text("1")
    assert past.differences() == {}


def test_a_rename_onto_another_name_of_the_same_file_keeps_both(past: Past) -> None:
    (past.source / "one").write_text("x")
    (past.source / "two").hardlink_to(past.source / "one")
    past.enter(Operation.LINK, "two", "create", details={"from": "one"})
    past.enter(Operation.RENAME, "one", "modify", details={"to": "two"})
    assert past.differences() == {}


def test_a_hard_linked_file_is_explained_by_any_of_its_names(past: Past) -> None:
    (past.source / "one").write_text("x")
    (past.source / "two").hardlink_to(past.source / "one")
    past.enter(Operation.SET_MODE, "one", "modify")
    assert past.differences() == {}


def test_a_deleted_name_explains_the_other_names(past: Past) -> None:
    (past.source / "one").write_text("x")
    (past.source / "two").hardlink_to(past.source / "one")
    (past.source / "three").hardlink_to(past.source / "one")
    (past.source / "three").unlink()
    past.enter(Operation.DELETE_FILE, "three", "delete")
    assert past.differences() == {}


def test_an_unexplained_hard_linked_file_is_reported_under_each_name(past: Past) -> None:
    past.settle(-HOUR)
    (past.source / "one").write_text("x")
    (past.source / "two").hardlink_to(past.source / "one")
    assert past.differences() == dict.fromkeys(["", "one", "two"], CHANGED)


def test_a_cleanly_ended_session_is_not_compared(past: Past, tmp_path: Path) -> None:
    later = Past(tmp_path, "t")
    later.enter(Operation.CREATE_FILE, "file", "create", size=1)
    (past.source / "file").write_text("x")
    later.trail.close()
    assert past.differences(later) == {}
    assert past.differences() == {"": CHANGED, "file": CHANGED}
    past.trail.close()
    assert past.differences(later) == {}


def test_without_a_head_the_comparison_starts_at_the_last_entry(past: Past) -> None:
    head = past.head.rename(past.head.with_suffix(".away"))
    past.enter(Operation.CREATE_FILE, "old", "create", at=-HOUR)
    (past.source / "file").write_text("x")
    assert past.differences() == {"": CHANGED, "file": CHANGED, "old": ABSENT}
    head.rename(past.head)


def test_a_difference_is_reported_once(past: Past, tmp_path: Path) -> None:
    (past.source / "file").write_text("x")
    past.enter(Operation.DELETE_FILE, "file", "delete", at=-1)
    found = list(compare(past.source, [(past.trail.path, past.head)]))
    following = Past(tmp_path, "t")
    assert enter(following.trail, found, lambda _: False) == len(found) == 1
    following.settle(-HOUR)
    assert past.differences(following) == {}
    following.trail.close()


def test_differences_are_recorded_and_protected_ones_are_alerts_too(past: Past) -> None:
    found = [SourceDifference("conftest.py", ABSENT), SourceDifference("a\nb", THERE)]
    assert enter(past.trail, found, lambda path: path == "conftest.py") == 2
    entries = list(read(past.trail.path))
    assert [(entry.kind, entry.operation, entry.path, entry.details["what"]) for entry in entries] == [
        ("event", OUT_OF_BAND, "conftest.py", ABSENT),
        ("alert", OUT_OF_BAND, "conftest.py", ABSENT),
        ("event", OUT_OF_BAND, "a\nb", THERE),
    ]


def test_many_differences_are_counted_and_every_alert_is_recorded(past: Past) -> None:
    found = (SourceDifference(f"f{number}", ABSENT) for number in range(MOST + 3))
    assert enter(past.trail, found, lambda path: path == f"f{MOST + 1}") == MOST + 3
    entries = list(read(past.trail.path))
    assert len(entries) == MOST + 2
    assert [entry.kind for entry in entries[-2:]] == ["alert", "event"]
    assert entries[-1].details == {"more": 2}


def test_a_tree_deeper_than_path_max_is_compared(past: Past) -> None:
    past.settle(+HOUR)
    here = os.open(past.source, os.O_RDONLY)
    for _ in range(450):
        os.mkdir("directory", dir_fd=here)
        below = os.open("directory", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    deep, gone = "/".join(["directory"] * 450), "/".join(["gone"] * 2000)
    past.enter(Operation.CREATE_FILE, f"{deep}/lost", "create", size=0)
    past.enter(Operation.CREATE_FILE, f"{gone}/lost", "create", size=0)
    assert past.differences() == {f"{deep}/lost": ABSENT, f"{gone}/lost": ABSENT}


def test_changes_of_other_layers_are_not_expected_in_the_source(past: Past) -> None:
    (past.source / "target").mkdir()
    (past.source / "target/old").write_text("x")
    past.enter(Operation.MKDIR, "target", "create", took=60)
    past.enter(Operation.CREATE_FILE, "target/old", "create", took=60, size=1)
    scratch: dict[str, str | bool] = {"layer": "scratch"}
    past.enter(Operation.CREATE_FILE, "target/new", "create", size=5, details=scratch)
    past.enter(Operation.WRITE_FILE, "target/old", "modify", size=7, details=scratch)
    past.enter(Operation.DELETE_FILE, "target/old", "delete", details=scratch)
    past.enter(Operation.CREATE_FILE, "a.tmp", "create", size=5, details={"layer": "temporary"})
    past.enter(Operation.CREATE_FILE, "b.tmp", "create", took=None, details={"layer": "temporary"})
    assert past.differences() == {}


def test_a_published_staged_file_is_expected_with_any_size(past: Past) -> None:
    for name in ("over", "fresh", "lost", "linked"):
        past.enter(Operation.CREATE_FILE, "x.tmp", "create", details={"layer": "temporary"})
        if name == "over":
            past.enter(Operation.CREATE_FILE, "over", "create", took=60, size=1)
        operation = Operation.LINK if name == "linked" else Operation.RENAME
        past.enter(operation, name, "create", took=60, details={"from": "x.tmp"})
        if name != "lost":
            (past.source / name).write_text("whole")
    assert past.differences() == {"lost": ABSENT}


def test_a_temporary_name_left_by_a_killed_write_is_explained(past: Past) -> None:
    """The process was killed between the link and the rename. The next session removes the name."""
    (past.source / "d").mkdir()
    left, other = stray_name(), stray_name()
    for name in ("file", left, other):
        (past.source / "d" / name).write_text("12345")
    past.enter(Operation.MKDIR, "d", "create")
    past.enter(Operation.CREATE_FILE, "d/file", "create", size=5)
    past.enter(Operation.RENAME, "x.tmp", "modify", took=None, details={"to": "d/file", "by": left})
    assert past.differences() == {f"d/{other}": CHANGED}


def test_paths_touched_by_a_gate_are_explained(past: Past) -> None:
    """Everything below a tree, and single paths, within the time of the operation. Earlier records of them are no
    longer compared.
    """
    for path in ("repo/a/b", "plan.md", "other"):
        (past.source / path).parent.mkdir(parents=True, exist_ok=True)
        (past.source / path).write_text("text")
    past.enter(Operation.CREATE_FILE, "repo/gone", "create", at=-60, size=9)
    past.enter(Operation.MERGE, "", "modify", at=-0.5, took=0.5, guard="git", details={"touches": ["repo/", "plan.md"]})
    assert past.differences() == {"other": CHANGED}


def test_a_killed_gate_operation_explains_the_paths_it_touched(past: Past) -> None:
    """From its intent on."""
    past.enter(Operation.MERGE, "", "modify", at=-60, took=None, guard="git", details={"touches": ["repo/"]})
    (past.source / "repo/a").mkdir(parents=True)
    (past.source / "repository").mkdir()
    assert past.differences() == {"repository": CHANGED}
