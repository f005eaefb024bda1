"""Where an earlier implementation of the same rules went wrong. Each test is one of its mistakes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bonobofs.audit.reader import MOST
from bonobofs.audit.verify import read_head
from bonobofs.guards import FileGuard, ValidationResult
from bonobofs.policy.decision import Code
from bonobofs.session import open_session
from tests.files.conftest import Guarded, Program


def code_of(result: object) -> Code | None:
    assert isinstance(result, ValidationResult)
    return result.code


def test_a_directory_that_no_rule_names_is_closed_and_so_is_the_top(alice: Guarded) -> None:
    for path in ("docs/a.md", "scripts/run.sh", "setup.cfg", "notes.md"):
        assert code_of(alice.files.write_file(path, "a", "alice")) == Code.DEFAULT


def test_a_directory_whose_name_only_begins_like_an_allowed_one_is_closed(alice: Guarded) -> None:
    for path in ("aidlc-docs-x/a.md", "aidlc-docs.md", "testsuite/a.py", "orchestrator2/a.py"):
        assert code_of(alice.files.write_file(path, "a", "alice")) == Code.DEFAULT


def test_500_kb_are_500_000_bytes_not_512_000(alice: Guarded) -> None:
    assert code_of(alice.files.write_file("orchestrator/a.py", "x" * 500_001, "alice")) == Code.SIZE
    assert alice.files.write_file("orchestrator/a.py", "x" * 500_000, "alice") == alice.root / "orchestrator/a.py"


def test_1_mb_is_1_000_000_bytes_not_1_048_576(alice: Guarded) -> None:
    assert code_of(alice.files.write_file("aidlc-docs/a.md", "x" * 1_000_001, "alice")) == Code.SIZE


def test_a_suffix_in_other_letters_is_another_suffix(alice: Guarded) -> None:
    assert code_of(alice.files.write_file("orchestrator/a.PY", "a", "alice")) == Code.SUFFIX


def test_a_denial_is_returned_by_the_plain_functions(alice: Guarded) -> None:
    assert code_of(alice.files.write_file("src/a.py", "a", "alice")) == Code.DEFAULT
    assert code_of(alice.files.delete_file("README.md", "alice")) == Code.KEEP


def test_an_existing_file_is_an_error_in_the_record_and_no_denial(alice: Guarded) -> None:
    alice.files.guarded_write_file("aidlc-docs/a.md", "a", "alice")
    with pytest.raises(FileExistsError):
        alice.files.write_file("aidlc-docs/a.md", "a", "alice")
    assert {entry.result for entry in alice.entries()} == {"allowed", "error"}


def test_an_unforeseen_error_does_not_pass_the_record_by(alice: Guarded) -> None:
    with pytest.raises(FileNotFoundError):
        alice.files.delete_file("aidlc-docs/none.md", "alice")
    assert alice.entries()[-1].result == "error"


def test_three_denials_within_five_minutes_are_an_alert(alice: Guarded) -> None:
    for number in range(3):
        alice.files.validate_path(f"src/{number}.py")
    (alert,) = alice.alerts()
    assert alert.agent_id == alice.session.guard.agent.id


def test_anybodys_name_is_not_good_enough(alice: Guarded) -> None:
    assert code_of(alice.files.write_file("aidlc-docs/a.md", "a", "somebody")) == Code.IDENTITY


def test_the_same_denial_again_and_again_is_counted_and_not_listed(source: Path) -> None:
    """What is kept of it in memory and in the record stays small."""
    with open_session(source, agent="alice") as session:
        files = FileGuard(session)
        for _ in range(500):
            assert not files.write_file("src/a.py", "a", "alice")
        trail = session.guard.trail
    denials = [entry for entry in session.log.recent(MOST) if entry.result == "denied" and entry.kind != "alert"]
    assert sum(entry.details.get("count", 1) for entry in denials) == 500
    assert len(denials) <= 4
    assert trail.path.stat().st_size < 10_000


def test_what_waits_for_a_record_that_cannot_be_written_is_entered_once(program: Program, source: Path) -> None:
    """No entry is lost, none is doubled, and nothing piles up meanwhile."""
    said = program(
        """
import resource
from bonobofs.audit.verify import verify_trail
with open_session(sys.argv[1], agent="alice") as session:
    files, trail = FileGuard(session), session.guard.trail
    files.guarded_write_file("aidlc-docs/a.md", "a", "alice")
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (trail.path.stat().st_size, room[1]))
    for number in range(1000):
        files.write_file(f"aidlc-docs/{number}.md", "a", "alice")
    print(len(trail._queued))
    resource.setrlimit(resource.RLIMIT_FSIZE, room)
    files.guarded_write_file("aidlc-docs/b.md", "a", "alice")
    print([(entry.kind, entry.operation) for entry in files.audit.recent()][4:])
    report = verify_trail(trail.path, trail.path.with_suffix(".head"), session=session.session.session, live=True)
    print(report.findings, report.unfinished)
""",
        source,
    )
    assert said.splitlines() == [
        "1",
        "[('alert', 'alert'), ('intent', 'write_file'), ('outcome', 'write_file')]",
        "[] []",
    ]


def test_recent_gives_at_most_a_thousand(alice: Guarded) -> None:
    for number in range(MOST):
        alice.files.validate_path(f"src/{number}.py")
    assert len(alice.files.audit.recent(MOST + 5)) == MOST
    assert [entry.path for entry in alice.files.audit.recent(1)] == [f"src/{MOST - 1}.py"]
    assert len(alice.files.audit.recent()) == 50


def test_a_guard_outlives_its_session_only_to_refuse(source: Path) -> None:
    with open_session(source, agent="alice") as session:
        files = FileGuard(session)
    assert code_of(files.write_file("aidlc-docs/a.md", "a", "alice")) == Code.UNRECORDED
    assert list(source.iterdir()) == []
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        files._workspace.locate(files._workspace.named("aidlc-docs/a.md"), follow=True)


def test_the_head_of_the_record_is_renewed_though_nobody_asks(alice: Guarded) -> None:
    """A denial is followed by nothing; a second later it can not be cut off unnoticed any more."""
    alice.files.write_file("src/a.py", "a", "alice")
    deadline = time.monotonic() + 30
    while read_head(alice.trail.with_suffix(".head")).seq < 1:
        assert time.monotonic() < deadline
