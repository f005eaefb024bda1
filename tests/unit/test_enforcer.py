"""The enforcer: each change needs a permit, and each request is recorded."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from bonobofs.audit.entry import LONGEST_TEXT
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.enforcement.authorizer import Caller, RelatedChange
from bonobofs.enforcement.denial_recorder import ALERT_DENIALS
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.enforcement.write_batches import LONGEST, MOST, QUIET
from bonobofs.policy.decision import Code, Denied, Layer, Refused, as_document
from bonobofs.policy.engine import compile_policy
from bonobofs.policy.lease_set import compile_leases
from bonobofs.policy.request import NO_FACTS, Context, Operation, Principal, Request, WorkspacePath
from tests.support.world import environment

ALICE = Principal("alice", "3f0c8a52-6a6e-4e55-9c7e-0b6f0b6d6d10", "agent")
POLICY = {
    "protect": [{"paths": [".git/"]}],
    "rule": [{"name": "notes", "paths": ["notes/"], "suffixes": [".md"], "max_size": 100, "executable": False}],
}
APART_POLICY = {"scratch": [{"paths": ["build/"]}], "temporary": ["**/*.tmp"]}


@pytest.fixture
def trail(tmp_path: Path) -> Iterator[Trail]:
    made = Trail.create(tmp_path / "s.jsonl", tmp_path / "s.head", TrailIdentity("s", ALICE.label, ALICE.id))
    yield made
    made.close()


@pytest.fixture
def guard(trail: Trail) -> Enforcer:
    return Enforcer(compile_policy(POLICY), ALICE, trail)


def create(path: str) -> Request:
    return Request(Operation.CREATE_FILE, WorkspacePath(path))


def entries(trail: Trail) -> list[dict[str, Any]]:
    trail.flush()
    return [json.loads(line) for line in trail.path.read_text().splitlines()]


def test_the_intent_is_in_the_trail_before_the_block_runs(guard: Enforcer, trail: Trail) -> None:
    with guard.authorize(create("notes/a.md")):
        (intent,) = [json.loads(line) for line in trail.path.read_text().splitlines()]
    assert (intent["kind"], intent["operation"], intent["path"]) == ("intent", "create_file", "notes/a.md")
    assert (intent["action"], intent["rule"], intent["agent_id"]) == ("create", "notes", ALICE.id)


def test_the_outcome_names_its_intent_and_how_it_ended(guard: Enforcer, trail: Trail) -> None:
    with guard.authorize(create("notes/a.md")):
        pass
    with pytest.raises(OSError, match="No space"), guard.authorize(create("notes/b.md")):
        raise OSError(errno.ENOSPC, "No space left on device")
    first, done, second, failed = entries(trail)
    assert (done["kind"], done["details"]["intent"], done["result"]) == ("outcome", first["seq"], "allowed")
    assert (failed["details"]["intent"], failed["result"]) == (second["seq"], "error")
    assert "ENOSPC" in failed["reason"]


def test_a_refused_change_never_runs_its_block(guard: Enforcer, trail: Trail) -> None:
    ran = []
    with pytest.raises(Refused) as refused, guard.authorize(create("notes/a.txt"), caller=Caller("touch", {"pid": 7})):
        ran.append(1)
    assert not ran
    assert (refused.value.errno, refused.value.decision.code) == (errno.EACCES, Code.SUFFIX)
    (entry,) = entries(trail)
    assert (entry["result"], entry["code"], entry["governance"]) == ("denied", "SUFFIX", "deny")
    assert (entry["tool"], entry["details"]["pid"]) == ("touch", 7)


def test_a_caller_without_layers_is_refused_a_change_of_another_layer(guard: Enforcer, trail: Trail) -> None:
    guard.policy = compile_policy({**POLICY, **APART_POLICY})
    for path in ("build/a", "notes/a.tmp"):
        ran = []
        with pytest.raises(Refused) as refused, guard.authorize(create(path)):
            ran.append(1)
        with pytest.raises(Refused), guard.authorize(create("notes/a.md"), NO_FACTS, RelatedChange(create(path))):
            ran.append(1)
        with pytest.raises(Refused):
            guard.open_batch(1, create(path), NO_FACTS, 0.0)
        assert not ran
        assert (refused.value.errno, refused.value.decision.code) == (errno.EACCES, Code.DEFAULT)
        assert isinstance(guard.decide(create(path)), Denied)
    assert {entry["result"] for entry in entries(trail) if entry["kind"] == "intent"} == {"denied"}


def test_the_record_says_which_changes_leave_the_source_as_it_is(trail: Trail) -> None:
    guard = Enforcer(compile_policy({**POLICY, **APART_POLICY}), ALICE, trail, has_layers=True)
    held, note = Request(Operation.RENAME, WorkspacePath("a.tmp")), RelatedChange(create("notes/a.md"))
    with guard.authorize(create("build/a"), details={"size": 1}, layer=None) as permit:
        assert permit.layer is Layer.SCRATCH
    other = RelatedChange(create("b.tmp"), layer=Layer.STAGED)
    with guard.authorize(held, Context(leaves=True), other, layer=Layer.STAGED) as permit:
        assert permit.layer is Layer.STAGED
    with guard.authorize(held, Context(leaves=True), note, layer=Layer.STAGED) as permit:
        assert permit.layer is Layer.STAGED
    with guard.authorize(create("notes/a.md")) as permit:
        assert permit.layer is Layer.SOURCE
    guard.open_batch(1, create("build/a"), Context(size=10**6), 0.0, layer=Layer.SCRATCH)
    guard.open_batch(2, create("notes/a.md"), Context(size=5), 0.0)
    told = [entry["details"].get("layer") for entry in entries(trail) if entry["kind"] == "intent"]
    assert told == ["scratch", "staged", None, None, None]  # both of build/ are counted under one intent


def test_scratch_changes_are_counted_by_program_and_scratch_path(trail: Trail) -> None:
    """A thousand changes are one intent, written at the first, and one outcome with the counts."""
    policy = {"scratch": [{"paths": ["**/.venv/", "build/"]}]}
    guard = Enforcer(compile_policy(policy), ALICE, trail, has_layers=True)
    pip, make = Caller("pip", {"pid": 1}), Caller("make")
    with guard.authorize(create("a/.venv/0"), caller=pip, layer=None):
        (intent,) = entries(trail)
    assert (intent["tool"], intent["path"], intent["rule"]) == ("pip", "a/.venv", "scratch:**/.venv/")
    for number in range(998):
        run = guard.open_batch(number, create(f"a/.venv/lib/{number}"), NO_FACTS, 0.0, caller=pip, layer=None)
        run.written = 2
    with guard.authorize(Request(Operation.RMDIR, WorkspacePath("a/.venv/lib")), caller=pip, layer=None):
        pass
    with pytest.raises(OSError, match="full"), guard.authorize(create("a/.venv/x"), caller=pip, layer=None):
        raise OSError(errno.ENOSPC, "full")
    with guard.authorize(create("build/x"), caller=make, layer=None):
        pass
    guard.flush_all()
    pairs = {(one["path"], one["kind"]): one for one in entries(trail)}
    assert len(pairs) == len(entries(trail)) == 4
    outcome = pairs["a/.venv", "outcome"]
    assert outcome["details"]["counts"] == {"created": 999, "modified": 0, "deleted": 1, "failed": 1}
    assert (outcome["bytes"], outcome["details"]["intent"]) == (1996, intent["seq"])
    assert pairs["build", "outcome"]["details"]["counts"]["created"] == 1


def test_the_number_of_scratch_counters_is_bounded(trail: Trail) -> None:
    """Changes beyond the limit are counted without program and path. Each change is counted."""
    guard = Enforcer(compile_policy({"scratch": [{"paths": ["**/*.pyc"]}]}), ALICE, trail, has_layers=True)
    for number in range(1000):
        with guard.authorize(create(f"{number}.pyc"), caller=Caller(f"p{number}"), layer=None):
            pass
    guard.flush_all()
    found = entries(trail)
    assert len(found) == 2 * (MOST + 1)
    assert sum(one["details"]["counts"]["created"] for one in found if one["kind"] == "outcome") == 1000


def test_a_scratch_counter_is_recorded_when_it_is_idle_and_at_the_end(trail: Trail) -> None:
    guard = Enforcer(compile_policy(APART_POLICY), ALICE, trail, has_layers=True)
    with guard.authorize(create("build/a"), layer=None):
        pass
    now = monotonic()
    guard.flush_idle(now)
    assert [one["kind"] for one in entries(trail)] == ["intent"]
    guard.flush_idle(now + QUIET)
    assert [one["kind"] for one in entries(trail)] == ["intent", "outcome"]
    run = guard.open_batch(1, create("build/b"), NO_FACTS, 0.0, layer=None)
    run.last = monotonic() + LONGEST
    guard.flush_idle(run.last)
    assert [one["kind"] for one in entries(trail)] == ["intent", "outcome"] * 2
    assert run.generation != guard.generation  # further writes open a new counter


def test_a_scratch_change_is_refused_if_the_record_fails(trail: Trail) -> None:
    guard = Enforcer(compile_policy(APART_POLICY), ALICE, trail, has_layers=True)
    trail.close()
    with pytest.raises(Refused) as refused, guard.authorize(create("build/a"), layer=None):
        pass
    assert refused.value.decision.code is Code.UNRECORDED


def test_a_decision_for_another_layer_is_no_permit(trail: Trail) -> None:
    """A change whose bytes would go to another layer than the decision names fails with EXDEV. It is not made and is
    no denial.
    """
    guard = Enforcer(compile_policy({**POLICY, **APART_POLICY}), ALICE, trail, has_layers=True)
    held, note, built = create("a.tmp"), create("notes/a.md"), create("build/a")
    asked = [
        (held, Layer.SOURCE),
        (held, Layer.SCRATCH),
        (note, Layer.STAGED),
        (note, Layer.SCRATCH),
        (built, Layer.SOURCE),
    ]
    for request, layer in asked:
        for ask in (
            lambda: guard.authorize(request, layer=layer),  # noqa: B023 - asked at once
            lambda: guard.open_batch(1, request, Context(), 0.0, layer=layer),  # noqa: B023 - as above
            lambda: guard.authorize(note, Context(), RelatedChange(request, layer=layer)),  # noqa: B023 - as above
        ):
            with pytest.raises(OSError, match="cross-device"):
                ask()
    assert entries(trail) == []


def test_one_refused_related_change_refuses_the_operation(guard: Enforcer, trail: Trail) -> None:
    rename = Request(Operation.RENAME, WorkspacePath("notes/a.md"))
    onto = RelatedChange(Request(Operation.RENAME, WorkspacePath(".git/config")))
    with pytest.raises(Refused) as refused, guard.authorize(rename, Context(leaves=True), onto):
        pass
    assert (refused.value.errno, refused.value.decision.path) == (errno.EROFS, ".git/config")
    assert [entry["result"] for entry in entries(trail)] == ["denied"]


def test_a_repeated_refusal_is_counted_and_not_repeated_in_the_trail(guard: Enforcer, trail: Trail) -> None:
    for _ in range(1000):
        with pytest.raises(Refused):
            guard.authorize(create("notes/a.txt"))
    guard.flush_all()
    first, alert, settled = entries(trail)
    assert (first["kind"], alert["kind"], settled["kind"]) == ("intent", "alert", "outcome")
    assert (settled["details"]["intent"], settled["details"]["count"]) == (first["seq"], 999)
    assert guard.denial_recorder.number == 1000


def test_the_third_denial_within_five_minutes_is_an_alert_once(guard: Enforcer, trail: Trail) -> None:
    for number in range(3 * ALERT_DENIALS):
        with pytest.raises(Refused):
            guard.authorize(create(f"elsewhere/{number}"))
    assert [entry["kind"] for entry in entries(trail)].count("alert") == 1


def test_optional_locks_of_git_are_refused_without_an_alert(guard: Enforcer, trail: Trail) -> None:
    for number in range(10):
        for lock in (".git/index.lock", f".git/worktrees/{number}/index.lock"):
            with pytest.raises(Refused):
                guard.authorize(create(lock))
    assert "alert" not in [entry["kind"] for entry in entries(trail)]


def test_an_editors_write_probe_raises_no_alert(guard: Enforcer, trail: Trail) -> None:
    for number in range(10):
        for probe in (f"secret{number}/4913", f"secret{number}/notes.md~"):
            with pytest.raises(Refused):
                guard.authorize(create(probe))
    assert "alert" not in [entry["kind"] for entry in entries(trail)]


def test_git_locks_of_hooks_and_config_raise_an_alert(guard: Enforcer, trail: Trail) -> None:
    for _ in range(ALERT_DENIALS):
        with pytest.raises(Refused):
            guard.authorize(create(".git/config.lock"))
    assert [entry["kind"] for entry in entries(trail)].count("alert") == 1


def test_an_attempt_to_leave_the_workspace_is_an_alert_at_once(guard: Enforcer, trail: Trail) -> None:
    with pytest.raises(Refused):
        guard.authorize(create("notes/../../etc/passwd"))
    denied, alert = entries(trail)
    assert (denied["code"], alert["kind"], alert["code"]) == ("OUTSIDE", "alert", "OUTSIDE")


def test_a_write_batch_is_one_intent_and_one_outcome(guard: Enforcer, trail: Trail) -> None:
    run = guard.open_batch(5, Request(Operation.WRITE_FILE, WorkspacePath("notes/a.md")), Context(size=10), 5.0)
    for _ in range(50):
        run.count, run.written, run.size, run.last = run.count + 1, run.written + 2, 100, 10.0
    guard.flush_idle(10.0 + QUIET / 2)
    assert [entry["kind"] for entry in entries(trail)] == ["intent"]
    guard.flush_idle(10.0 + QUIET)
    intent, outcome = entries(trail)
    assert (outcome["details"]["intent"], outcome["bytes"]) == (intent["seq"], 100)
    assert (outcome["details"]["writes"], outcome["details"]["size"]) == (50, 100)


def test_a_closed_write_batch_permits_no_more_writes(guard: Enforcer) -> None:
    run = guard.open_batch(5, Request(Operation.WRITE_FILE, WorkspacePath("notes/a.md")), Context(size=10), 0.0)
    assert run.generation == guard.generation
    guard.close_batch(5)
    assert run.generation != guard.generation


def test_a_write_batch_extends_to_the_size_limit_of_its_rule(guard: Enforcer) -> None:
    run = guard.open_batch(5, Request(Operation.WRITE_FILE, WorkspacePath("notes/a.md")), Context(size=10), 0.0)
    assert run.limit == 100


def test_a_change_is_not_made_if_its_record_fails(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from pathlib import Path
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.enforcement.write_batches import LONGEST, MOST
from bonobofs.policy.engine import compile_policy
from bonobofs.policy.request import Operation, Principal, Request
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
base = Path(sys.argv[1])
enforcer = Enforcer(compile_policy({"default": "allow"}), Principal("a", "b", "agent"),
                    Trail.create(base / "t.jsonl", base / "t.head", TrailIdentity("t", "a", "b")))
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
try:
    with enforcer.authorize(Request(Operation.CREATE_FILE, "x")):
        print("ran")
except PermissionError as error:
    print(error.errno, error.decision.code.value)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with enforcer.authorize(Request(Operation.CREATE_FILE, "x")):
    print("ran")
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert ran.stdout.split() == [str(errno.EIO), "UNRECORDED", "ran"]


def test_only_the_engine_makes_a_permit() -> None:
    package = Path(__file__).resolve().parents[2] / "bonobofs"
    makers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "Permit(" in path.read_text(encoding="utf-8")
    }
    # The codec reads a permit that another process of the session received.
    assert makers == {"ipc/codec.py", "policy/compiled.py", "policy/decision.py", "policy/engine.py"}


# Changes of the companion


def test_every_entry_names_the_channel_of_its_request(guard: Enforcer, trail: Trail) -> None:
    note = WorkspacePath("notes/a.md")
    with guard.authorize(
        Request(Operation.COMMIT, WorkspacePath("")), NO_FACTS, RelatedChange(create(note)), guard="git"
    ):
        pass
    for _ in range(3):
        with pytest.raises(Refused):
            guard.authorize(
                Request(Operation.COMMIT, WorkspacePath("")), NO_FACTS, RelatedChange(create("x.sh")), guard="git"
            )
    with pytest.raises(Refused):
        guard.authorize(create("x.sh"))
    with pytest.raises(Refused):
        guard.authorize(Request(Operation.CREATE_EPIC, WorkspacePath("")), guard="beads")
    guard.flush_all()
    found = [(entry["kind"], entry["guard"], entry["operation"], entry["result"]) for entry in entries(trail)]
    assert found == [
        ("intent", "git", "commit", "allowed"),
        ("outcome", "git", "commit", "allowed"),
        ("intent", "git", "create_file", "denied"),
        ("alert", "git", "create_file", "denied"),
        ("intent", "file", "create_file", "denied"),
        ("intent", "beads", "create_epic", "denied"),
        ("outcome", "git", "create_file", "denied"),
    ]


def test_a_call_that_only_reads_is_one_entry(guard: Enforcer, trail: Trail) -> None:
    request = Request(Operation.READ_FILE, WorkspacePath(".git/config"))
    guard.record_call(request, caller=Caller("read_file", {"offset": 3}), size=120)
    guard.record_call(request, error=errno.ENOENT)
    with pytest.raises(Refused):
        guard.record_call(request._replace(path=WorkspacePath("../x")))
    read, failed, refused, _ = entries(trail)
    assert (read["kind"], read["operation"], read["path"], read["bytes"]) == (
        "event",
        "read_file",
        ".git/config",
        120,
    )
    assert (read["tool"], read["rule"], read["details"]) == ("read_file", "role:agent:tools:read_file", {"offset": 3})
    assert (read["governance"], read["lock"], read["result"], read["action"]) == ("pass", "none", "allowed", "")
    assert (failed["result"], "ENOENT" in failed["reason"]) == ("error", True)
    assert (refused["governance"], refused["code"], refused["operation"]) == ("deny", "OUTSIDE", "read_file")


def test_the_entry_of_a_read_call_names_the_lease_holder(guard: Enforcer, trail: Trail) -> None:
    lease = {"shared": False, "until": "2030-01-01T00:00:00+00:00"}
    held = [
        {**lease, "patterns": ["notes/mine/"], "own": True, "holder": "alice", "chain": None},
        {**lease, "patterns": ["notes/bob/"], "own": False, "holder": "bob", "chain": None},
        {**lease, "patterns": ["notes/chain/"], "own": False, "holder": "bob", "chain": "CHAIN-1"},
    ]
    guard.set_leases(inf, compile_leases(held))
    for name in ("mine", "bob", "chain", "free"):
        guard.record_call(Request(Operation.READ_FILE, WorkspacePath(f"notes/{name}/a.md")))
    assert [entry["lock"] for entry in entries(trail)] == ["own", "bob", "CHAIN-1", "none"]


def test_a_call_returns_no_data_if_its_record_fails(guard: Enforcer, trail: Trail) -> None:
    trail.close()
    with pytest.raises(Refused) as refused:
        guard.record_call(Request(Operation.READ_FILE, WorkspacePath("a")))
    assert refused.value.decision.code is Code.UNRECORDED


def test_gate_denials_are_counted_together_only_for_equal_requests(guard: Enforcer, trail: Trail) -> None:
    """Denials of two issues are two entries. Details of the request are in the message and in the record."""
    denied = Denied(Code.BEADS, "beads.owner", "No.", "Ask.", WorkspacePath(""), Operation.UPDATE_ISSUE)
    for issue in ("gt-1", "gt-2", "gt-1"):
        asked = denied._replace(about=f"{issue} is bob's.")
        refused = guard.deny(asked, Caller("guarded_update", {"issue": issue}), guard="beads")
        assert str(refused).startswith(f"[Errno 13] No. {issue} is bob's. Ask.")
        assert as_document(asked, "", asked.operation)["about"] == f"{issue} is bob's."
    guard.flush_all()
    first, second, _, again = entries(trail)
    assert first["details"] == {"issue": "gt-1", "about": "gt-1 is bob's.", "instead": "Ask."}
    assert (second["details"]["issue"], second["reason"]) == ("gt-2", "No.")
    assert again["details"] == {"intent": first["seq"], "count": 1, "instead": "Ask."}


def test_many_idle_batches_are_closed_in_several_steps(trail: Trail) -> None:
    """700 batches of files with paths of 150 KB delayed other requests by 0.4 s while all were closed at once."""
    guard = Enforcer(compile_policy({"default": "allow"}), ALICE, trail, outcomes_later=True)
    for number in range(700):
        guard.open_batch(number, create(f"{number}/{'x' * 150_000}"), NO_FACTS, 0.0)
    parts = 1
    while guard.flush_idle(QUIET):
        parts += 1
    trail.flush()
    assert parts > 1
    found = entries(trail)
    assert [one["kind"] for one in found] == ["intent"] * 700 + ["outcome"] * 700
    whole = f"7/{'x' * 150_000}"
    cut = f"{whole[:LONGEST_TEXT]}... (150002 characters, sha256 {sha256(whole.encode()).hexdigest()})"
    assert found[7]["path"] == found[707]["path"] == cut


def test_outcomes_are_queued_one_by_one_and_all_before_the_next_intent(trail: Trail) -> None:
    """The server queues them while no request waits; a request that comes sooner waits for none of them."""
    guard = Enforcer(compile_policy({"default": "allow"}), ALICE, trail, outcomes_later=True)
    first, second, third = create("a"), create("b"), create("c")
    batch = guard.open_batch(1, first, NO_FACTS, 0.0)
    with guard.authorize(second):
        guard.close_batch(1)
    assert [entry["kind"] for entry in entries(trail)] == ["intent", "intent"]
    assert guard.write_outcome()
    assert [entry["path"] for entry in entries(trail)] == ["a", "b", "a"]
    with guard.authorize(third):
        pass
    assert [(entry["path"], entry["kind"]) for entry in entries(trail)[2:]] == [
        ("a", "outcome"),
        ("b", "outcome"),
        ("c", "intent"),
    ]
    assert not guard.write_outcome()
    assert not guard.write_outcome()
    found = entries(trail)
    assert [entry["details"].get("intent") for entry in found] == [None, None, batch.seq, batch.seq + 1, None, 5]
