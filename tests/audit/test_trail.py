"""The trail of one session: its entries, what it survives, what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bonobofs.audit.entry import FIELDS, ZERO, AuditEntry
from bonobofs.audit.reader import MOST, AuditLog, read
from bonobofs.audit.verify import read_head, verify_trail
from bonobofs.audit.writer import HEAD_SIZE, Trail, TrailIdentity
from bonobofs.errors import TrailError
from bonobofs.policy.decision import Code, Denied
from bonobofs.policy.request import Operation, WorkspacePath

SESSION = "0b0b6f5e-6c5e-4a8e-9d7f-1c2d3e4f5a6b"
ALICE = TrailIdentity(SESSION, "alice", "1b0b6f5e-6c5e-4a8e-9d7f-1c2d3e4f5a6b")
KEPT = Denied(
    Code.KEEP,
    "keep",
    "This file is kept.",
    "Change it instead.",
    WorkspacePath("README.md"),
    Operation.DELETE_FILE,
)

paths = st.binary(min_size=1, max_size=60).map(os.fsdecode)


def create(directory: Path) -> Trail:
    return Trail.create(directory / f"{SESSION}.jsonl", directory / f"{SESSION}.head", ALICE)


def documents(trail: Trail) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trail.path.read_bytes().splitlines()]


def is_intact(directory: Path) -> bool:
    report = verify_trail(directory / f"{SESSION}.jsonl", directory / f"{SESSION}.head", session=SESSION)
    return not report.findings


@pytest.fixture
def trail(tmp_path: Path) -> Iterator[Trail]:
    made = create(tmp_path)
    yield made
    made.close()


def run(program: str, *arguments: object, code: int = 0) -> str:
    """Run a program in a process of its own, where it may take room or life from itself."""
    head = "import os, resource, sys\nfrom pathlib import Path\nfrom bonobofs.audit.writer import *\n"
    command = [sys.executable, "-c", head + program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_an_intent_is_written_at_once_and_its_outcome_with_the_next_entry(trail: Trail) -> None:
    first = trail.intent(Operation.CREATE_FILE, "a.md", "create", "artifacts")
    assert [each["kind"] for each in documents(trail)] == ["intent"]
    trail.outcome(first, Operation.CREATE_FILE, "a.md", bytes=5)
    assert len(documents(trail)) == 1
    second = trail.intent(Operation.DELETE_FILE, "a.md", "delete", "artifacts")
    assert (first, second) == (1, 3)
    assert [each["kind"] for each in documents(trail)] == ["intent", "outcome", "intent"]
    assert documents(trail)[1]["details"] == {"intent": first}


def test_every_entry_has_all_fields_in_one_order_with_the_hash_last(trail: Trail) -> None:
    seq = trail.intent(
        Operation.RENAME, "a", "modify", "code", tool="/bin/mv", lock="own", details={"to": "b", "pid": 7}
    )
    trail.outcome(seq, Operation.RENAME, "a", details={"size": 3})
    trail.outcome(trail.intent(Operation.LINK, "c", "create", "code"), Operation.LINK, "c", error=28)
    denial = trail.denial(KEPT, "delete", tool="/bin/rm")
    trail.denial_repeats(denial, KEPT, 41)
    trail.alert("Look at this.", path="x", code="OUTSIDE")
    trail.event("open", {"boot": "b"})
    AuditLog(trail).log(AuditEntry(datetime.now(UTC), "git", "commit", "alice", {"n": [1, {}]}, "allowed", None))
    assert {tuple(each) for each in documents(trail)} == {FIELDS}
    assert FIELDS[-1] == "hash"
    assert FIELDS[:7] == ("timestamp", "guard", "operation", "agent", "details", "result", "reason")


def test_denials_failures_and_repetitions_have_their_results(trail: Trail) -> None:
    denial = trail.denial(KEPT, "delete", tool="/bin/rm", details={"pid": 7})
    trail.denial_repeats(denial, KEPT, 41)
    trail.outcome(trail.intent(Operation.LINK, "c", "create", "code"), Operation.LINK, "c", error=28)
    trail.flush()
    refused, repeated, _, failed = documents(trail)
    assert (refused["kind"], refused["result"], refused["governance"]) == ("intent", "denied", "deny")
    assert (refused["code"], refused["rule"], refused["reason"]) == ("KEEP", "keep", "This file is kept.")
    assert refused["details"] == {"pid": 7, "instead": "Change it instead."}
    assert repeated["details"]["intent"] == denial
    assert repeated["details"]["count"] == 41
    assert (failed["result"], failed["reason"]) == ("error", "ENOSPC: No space left on device")


def test_each_hash_covers_its_line_and_links_to_the_one_before(trail: Trail) -> None:
    for number in range(20):
        trail.outcome(trail.intent(Operation.MKDIR, f"d{number}", "create", "code"), Operation.MKDIR, f"d{number}")
    trail.flush()
    link = ZERO
    for number, line in enumerate(trail.path.read_bytes().splitlines(), 1):
        body, _, rest = line.rpartition(b',"hash":"')
        assert rest == sha256(body).hexdigest().encode() + b'"}'
        document = json.loads(line)
        assert (document["seq"], document["prev"]) == (number, link)
        link = document["hash"]
    assert trail.head == (40, link)


def test_timestamps_are_utc_with_microseconds_and_never_decrease(trail: Trail) -> None:
    before = datetime.now(UTC)
    for _ in range(50):
        trail.intent(Operation.MKDIR, "d", "create", "code")
        trail.event("tick")
    stamps = [each["timestamp"] for each in documents(trail)]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", stamp) for stamp in stamps)
    moments = [datetime.fromisoformat(stamp) for stamp in stamps]
    assert moments == sorted(moments)
    assert before.replace(microsecond=0) <= moments[0] <= moments[-1] <= datetime.now(UTC)


@given(path=paths, tool=st.text(max_size=20), rule=st.text(max_size=20), label=st.text(max_size=20))
def test_every_name_is_read_back_and_no_name_forges_a_line(
    tmp_path_factory: pytest.TempPathFactory, path: str, tool: str, rule: str, label: str
) -> None:
    directory = tmp_path_factory.mktemp("trail")
    trail = Trail.create(directory / f"{SESSION}.jsonl", directory / f"{SESSION}.head", ALICE._replace(agent=label))
    seq = trail.intent(Operation.RENAME, path, "modify", rule, tool=tool, details={"to": path, path: path})
    trail.outcome(seq, Operation.RENAME, path)
    trail.alert(path, path=path, details={"of": [path]})
    trail.close()
    raw = trail.path.read_bytes()
    assert raw.count(b"\n") == 4
    assert all(32 <= byte < 127 or byte == 10 for byte in raw)
    intent, outcome, alert, _ = read(trail.path)
    assert (intent.path, intent.tool, intent.rule, intent.agent) == (path, tool, rule, label)
    assert intent.details == {"to": path, path: path}
    assert outcome.path == path
    assert (alert.reason, alert.details) == (path, {"of": [path]})
    assert is_intact(directory)


@pytest.mark.parametrize(
    "hostile", ['x"}\n{"timestamp":"', "a\r\nb", "\x1b[2J\x7f\x9b", "\u2028\u202e", "\udcff\udcfe"]
)
def test_a_hostile_name_stays_within_its_line(trail: Trail, hostile: str) -> None:
    trail.intent(Operation.CREATE_FILE, hostile, "create", "code", tool=hostile)
    assert len(trail.path.read_bytes().splitlines()) == 1
    assert next(read(trail.path)).path == hostile


@given(
    details=st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_details_and_lines_are_equal_after_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, details: dict[str, Any]
) -> None:
    trail = create(tmp_path_factory.mktemp("trail"))
    trail.event("note", details)
    line = trail.path.read_text()
    trail.close()
    entry = AuditEntry.from_line(line)
    assert entry.details == details
    assert entry.to_json() + "\n" == line


def test_recent_returns_at_most_1000_last_entries_oldest_first(trail: Trail) -> None:
    log = AuditLog(trail)
    for number in range(MOST + 5):
        trail.event("note", {"n": number})
    trail.outcome(1, "note", "")
    assert [entry.details.get("n") for entry in log.recent(3)] == [MOST + 3, MOST + 4, None]
    assert len(log.recent(MOST * 2)) == MOST
    assert len(log.recent()) == 50
    assert log.recent(0) == []


def test_filter_by_agent_takes_a_uuid_or_the_label_of_the_living_agent(trail: Trail) -> None:
    old, living = "11111111-0000-4000-8000-000000000000", "22222222-0000-4000-8000-000000000000"
    log = AuditLog(trail, {"bob": living}.get)
    for identity in (old, living):
        log.log(AuditEntry(datetime.now(UTC), "git", "commit", "bob", {}, "allowed", None, agent_id=identity))
    assert [entry.agent_id for entry in log.filter_by_agent("bob")] == [living]
    assert [entry.agent_id for entry in log.filter_by_agent(old)] == [old]
    assert log.filter_by_agent("nobody") == []
    assert [entry.agent_id for entry in AuditLog(trail).filter_by_agent("bob")] == [old, living]


def test_an_entry_of_seven_fields_is_logged_with_the_sessions_identity(trail: Trail) -> None:
    moment = datetime(2026, 1, 31, 12, 0, 0, 5, UTC)
    AuditLog(trail).log(AuditEntry(moment, "beads", "create_issue", "alice", {"id": "gt-1"}, "denied", "No."))
    (entry,) = read(trail.path)
    assert (entry.timestamp, entry.guard, entry.operation, entry.agent) == (moment, "beads", "create_issue", "alice")
    assert (entry.details, entry.result, entry.reason) == ({"id": "gt-1"}, "denied", "No.")
    assert (entry.session, entry.agent_id, entry.seq) == (SESSION, ALICE.agent_id, 1)


def test_trail_and_head_are_private_and_created_once(tmp_path: Path) -> None:
    trail = create(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob(f"{SESSION}.*")} == {0o600}
    with pytest.raises(TrailError, match="cannot be created"):
        create(tmp_path)
    trail.event("note")
    trail.close()
    assert is_intact(tmp_path)


def test_a_failed_creation_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / f"{SESSION}.head").touch()
    with pytest.raises(TrailError, match="cannot be created"):
        create(tmp_path)
    assert [path.name for path in tmp_path.glob("*.*")] == [f"{SESSION}.head"]


def test_the_head_keeps_its_size_and_names_the_last_synced_entry(tmp_path: Path, trail: Trail) -> None:
    head = tmp_path / f"{SESSION}.head"
    assert read_head(head) == (0, ZERO, None)
    before = datetime.now(UTC)
    for count in (1, 1000):
        for _ in range(count):
            trail.event("note")
        was_synced = trail.is_synced
        trail.sync()
        assert (was_synced, trail.is_synced) == (False, True)
        seq, link, settled = read_head(head)
        assert (seq, link) == trail.head
        assert settled is not None
        assert before <= settled <= datetime.now(UTC)
        assert head.stat().st_size == HEAD_SIZE


def test_sync_writes_the_pending_outcomes(tmp_path: Path, trail: Trail) -> None:
    trail.outcome(trail.intent(Operation.MKDIR, "d", "create", "code"), Operation.MKDIR, "d")
    trail.sync()
    assert read_head(tmp_path / f"{SESSION}.head").seq == 2


def test_the_closing_entry_is_the_last(tmp_path: Path) -> None:
    trail = create(tmp_path)
    seq = trail.intent(Operation.MKDIR, "d", "create", "code")
    trail.outcome(seq, Operation.MKDIR, "d")
    trail.close()
    trail.close()
    last = documents(trail)[-1]
    assert (last["kind"], last["operation"], last["seq"]) == ("event", "close", 3)
    assert read_head(tmp_path / f"{SESSION}.head")[:2] == (3, last["hash"])
    trail.outcome(seq, Operation.MKDIR, "d")
    for call in (trail.flush, trail.sync, lambda: trail.event("note")):
        with pytest.raises(TrailError, match="it is closed"):
            call()
    assert len(documents(trail)) == 3


def test_entries_and_syncs_of_several_threads_make_one_chain(tmp_path: Path) -> None:
    trail = create(tmp_path)
    done = threading.Event()

    def change(name: str) -> None:
        for _ in range(200):
            trail.outcome(trail.intent(Operation.MKDIR, name, "create", "code"), Operation.MKDIR, name)

    def settle() -> None:
        while not done.is_set():
            trail.sync()

    workers = [threading.Thread(target=change, args=(name,)) for name in "abc"]
    settler = threading.Thread(target=settle)
    for thread in (settler, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    settler.join()
    trail.close()
    report = verify_trail(trail.path, tmp_path / f"{SESSION}.head", session=SESSION)
    assert (report.entries, report.findings, report.unfinished) == (1201, [], [])


FULL = """
directory, room = Path(sys.argv[1]), int(sys.argv[2])
trail = Trail.create(directory / "s.jsonl", directory / "s.head", TrailIdentity("s", "alice", "id"))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
first = trail.intent("mkdir", "a", "create", "code")
trail.outcome(first, "mkdir", "a")
before = trail.head, trail.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (before[1] + room, hard))
for call in (lambda: trail.intent("mkdir", "b", "create", "code"), trail.flush, trail.sync):
    try:
        call()
    except TrailError as error:
        print(error)
    else:
        sys.exit("a record that has no room was taken")
    assert (trail.head, trail.path.stat().st_size) == before, "half a record stayed"
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
trail.outcome(trail.intent("mkdir", "b", "create", "code"), "mkdir", "b")
trail.close()
"""


@pytest.mark.parametrize("room", [0, 1, 300, 700])
def test_a_short_write_is_truncated_and_later_writes_succeed(tmp_path: Path, room: int) -> None:
    said = run(FULL, tmp_path, room).splitlines()
    assert all(line.startswith(f"the trail {tmp_path}/s.jsonl cannot be written: ") for line in said)
    report = verify_trail(tmp_path / "s.jsonl", tmp_path / "s.head", session="s")
    assert (report.findings, report.unfinished, report.status) == ([], [], "closed")
    entries = list(read(tmp_path / "s.jsonl"))
    assert [(entry.kind, entry.path) for entry in entries] == [
        ("intent", "a"),
        ("outcome", "a"),
        ("alert", ""),
        ("intent", "b"),
        ("outcome", "b"),
        ("event", ""),
    ]
    assert entries[2].reason == "The trail could not be written."


DEVICE_FULL = """
identity = TrailIdentity("s", "a", "i")
trail = Trail(os.open("/dev/full", os.O_WRONLY), os.open("/dev/null", os.O_WRONLY), identity, Path("t"))
try:
    trail.intent("mkdir", "a", "create", "code")
except TrailError as error:
    print(error, trail.head[0])
"""


def test_a_full_disk_is_a_trail_error_without_an_entry() -> None:
    assert run(DEVICE_FULL) == "the trail t cannot be written: No space left on device 0\n"


POISONED = """
reading, writing = os.pipe2(os.O_NONBLOCK)
trail = Trail(writing, os.open("/dev/null", os.O_WRONLY), TrailIdentity("s", "a", "i"), Path("t"))
os.write(writing, b"x" * (65536 - 4096))
for _ in range(2):
    try:
        trail.intent("mkdir", "x" * 8000, "create", "code")
    except TrailError as error:
        print(error)
    while True:
        try:
            os.read(reading, 65536)
        except BlockingIOError:
            break
"""


def test_a_trail_with_a_partial_entry_that_cannot_be_truncated_is_closed() -> None:
    """A pipe accepts half of a long write, and cannot be truncated."""
    first, second = run(POISONED).splitlines()
    assert first.startswith("the trail t cannot be written: ")
    assert second == "the trail t cannot be written: an incomplete entry could not be cut off: Invalid argument"


INTERRUPTED = """
import signal
class Stop(Exception):
    pass
def stop(number, frame):
    raise Stop
signal.signal(signal.SIGALRM, stop)
directory = Path(sys.argv[1])
trail = Trail.create(directory / "s.jsonl", directory / "s.head", TrailIdentity("s", "alice", "id"))
stopped = 0
while stopped < 400:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.00002 + stopped % 40 * 0.000002)
        while True:
            trail.outcome(trail.intent("mkdir", "a", "create", "code"), "mkdir", "a")
    except Stop:
        stopped += 1
trail.close()
"""


def test_an_exception_from_a_signal_handler_leaves_the_chain_valid(tmp_path: Path) -> None:
    run(INTERRUPTED, tmp_path)
    report = verify_trail(tmp_path / "s.jsonl", tmp_path / "s.head", session="s")
    assert report.findings == []
    assert report.status == "closed"


KILLED = """
directory = Path(sys.argv[1])
trail = Trail.create(directory / "s.jsonl", directory / "s.head", TrailIdentity("s", "alice", "id"))
for number in range(10**9):
    seq = trail.intent("mkdir", f"d{number}", "create", "code")
    os.write(1, b"%d\\n" % seq)
    trail.outcome(seq, "mkdir", f"d{number}")
    if number % 64 == 0:
        trail.sync()
"""


@pytest.mark.parametrize("lines", [1, 2, 65, 400, 1023])
def test_a_killed_process_loses_no_intent_that_returned(tmp_path: Path, lines: int) -> None:
    program = f"import os, sys\nfrom pathlib import Path\nfrom bonobofs.audit.writer import *\n{KILLED}"
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(lines)]
        writer.send_signal(signal.SIGKILL)
        told += writer.stdout.read().splitlines()
    returned = {int(line) for line in told}
    report = verify_trail(tmp_path / "s.jsonl", tmp_path / "s.head", session="s")
    assert (report.findings, report.status) == ([], "crashed")
    assert len(report.unfinished) <= 1
    assert returned <= {entry.seq for entry in read(tmp_path / "s.jsonl") if entry.kind == "intent"}
