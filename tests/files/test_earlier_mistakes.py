"""Each test is a mistake of an earlier implementation of the same rules."""

from __future__ import annotations

import os
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


def test_a_directory_without_a_rule_and_the_root_are_closed(alice: Guarded) -> None:
    for path in ("docs/a.md", "scripts/run.sh", "setup.cfg", "notes.md"):
        assert code_of(alice.files.write_file(path, "a", "alice")) == Code.DEFAULT


def test_a_directory_with_the_prefix_of_an_allowed_name_is_closed(alice: Guarded) -> None:
    for path in ("aidlc-docs-x/a.md", "aidlc-docs.md", "testsuite/a.py", "orchestrator2/a.py"):
        assert code_of(alice.files.write_file(path, "a", "alice")) == Code.DEFAULT


def test_500_kb_are_500_000_bytes_not_512_000(alice: Guarded) -> None:
    assert code_of(alice.files.write_file("orchestrator/a.py", "x" * 500_001, "alice")) == Code.SIZE
    assert alice.files.write_file("orchestrator/a.py", "x" * 500_000, "alice") == alice.root / "orchestrator/a.py"


def test_1_mb_is_1_000_000_bytes_not_1_048_576(alice: Guarded) -> None:
    assert code_of(alice.files.write_file("aidlc-docs/a.md", "x" * 1_000_001, "alice")) == Code.SIZE


def test_suffixes_are_case_sensitive(alice: Guarded) -> None:
    assert code_of(alice.files.write_file("orchestrator/a.PY", "a", "alice")) == Code.SUFFIX


def test_a_denial_is_returned_by_the_plain_functions(alice: Guarded) -> None:
    assert code_of(alice.files.write_file("src/a.py", "a", "alice")) == Code.DEFAULT
    assert code_of(alice.files.delete_file("README.md", "alice")) == Code.KEEP


def test_an_existing_file_is_an_error_in_the_record_and_no_denial(alice: Guarded) -> None:
    alice.files.guarded_write_file("aidlc-docs/a.md", "a", "alice")
    with pytest.raises(FileExistsError):
        alice.files.write_file("aidlc-docs/a.md", "a", "alice")
    assert {entry.result for entry in alice.entries()} == {"allowed", "error"}


def test_an_unexpected_error_is_recorded(alice: Guarded) -> None:
    with pytest.raises(FileNotFoundError):
        alice.files.delete_file("aidlc-docs/none.md", "alice")
    assert alice.entries()[-1].result == "error"


def test_three_denials_within_five_minutes_are_an_alert(alice: Guarded) -> None:
    for number in range(3):
        alice.files.validate_path(f"src/{number}.py")
    (alert,) = alice.alerts()
    assert alert.agent_id == alice.session.guard.agent.id


def test_the_name_of_another_agent_is_refused(alice: Guarded) -> None:
    assert code_of(alice.files.write_file("aidlc-docs/a.md", "a", "somebody")) == Code.IDENTITY


def test_a_repeated_denial_is_counted_and_not_listed(source: Path) -> None:
    """Its size in memory and in the record is bounded."""
    with open_session(source, agent="alice") as session:
        files = FileGuard(session)
        for _ in range(500):
            assert not files.write_file("src/a.py", "a", "alice")
        trail = session.guard.trail
    denials = [entry for entry in session.log.recent(MOST) if entry.result == "denied" and entry.kind != "alert"]
    assert sum(entry.details.get("count", 1) for entry in denials) == 500
    assert len(denials) <= 4
    assert trail.path.stat().st_size < 10_000


def test_a_delayed_entry_is_written_once(program: Program, source: Path) -> None:
    """Entries that could not be written are neither lost nor doubled, and their number is bounded."""
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


def test_recent_returns_at_most_1000_entries(alice: Guarded) -> None:
    for number in range(MOST):
        alice.files.validate_path(f"src/{number}.py")
    assert len(alice.files.audit.recent(MOST + 5)) == MOST
    assert [entry.path for entry in alice.files.audit.recent(1)] == [f"src/{MOST - 1}.py"]
    assert len(alice.files.audit.recent()) == 50


def test_after_its_session_a_guard_refuses_every_call(source: Path) -> None:
    with open_session(source, agent="alice") as session:
        files = FileGuard(session)
    assert code_of(files.write_file("aidlc-docs/a.md", "a", "alice")) == Code.UNRECORDED
    assert list(source.iterdir()) == []
    descriptors = len(os.listdir("/proc/self/fd"))
    files.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1


def test_the_head_of_the_trail_is_renewed_without_a_request(alice: Guarded) -> None:
    """No entry follows a denial. A second later, a truncation of it is detectable."""
    alice.files.write_file("src/a.py", "a", "alice")
    deadline = time.monotonic() + 30
    while read_head(alice.trail.with_suffix(".head")).seq < 1:
        assert time.monotonic() < deadline
