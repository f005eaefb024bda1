"""The audit record of scratch changes: many changes, few entries, and a crash hides none."""

from __future__ import annotations

import errno
import json

from bonobofs.audit.entry import COUNTS, AuditEntry
from bonobofs.audit.reader import read
from tests.support.users import outcome
from tests.support.wait import until
from tests.support.world import Mounted, bonobofs

POLICY = 'default = "allow"\n[[scratch]]\npaths = ["**/node_modules/"]\nmax_total = "2MB"\n'
FILES = 300


def of_scratch(entries: list[AuditEntry], kind: str) -> list[AuditEntry]:
    return [entry for entry in entries if "node_modules" in entry.path and entry.kind == kind]


def counted(entries: list[AuditEntry]) -> dict[str, int]:
    found = dict.fromkeys(("created", "modified", "deleted", "failed"), 0)
    for entry in of_scratch(entries, "outcome"):
        for what, number in entry.details[COUNTS].items():
            found[what] += number
    return found


def test_a_build_in_scratch_is_counted_without_file_entries(mounted: Mounted) -> None:
    """The intent of the first change is recorded before the call returns. The counts follow after an idle second."""
    world = mounted(policy=POLICY)
    top = world.path / "web/node_modules"
    top.mkdir(parents=True)
    assert [entry.path for entry in of_scratch(list(read(world.trail)), "intent")] == ["web/node_modules"]
    for number in range(FILES):
        (top / f"{number}.js").write_text("x" * 10)
    for number in range(10):
        (top / f"{number}.js").unlink()
    (top / "10.js").rename(top / "moved.js")
    until(lambda: counted(list(read(world.trail)))["created"] == FILES + 1, "the counts are entered")
    world.umount()
    entries = list(read(world.trail))
    assert counted(entries) == {"created": FILES + 1, "modified": 1, "deleted": 10, "failed": 0}
    assert sum(entry.bytes for entry in of_scratch(entries, "outcome")) == 10 * FILES
    assert {entry.path for entry in entries if "node_modules" in entry.path} == {"web/node_modules"}
    assert len(of_scratch(entries, "intent")) < 20
    told = json.loads(bonobofs("audit", "report", "--json").stdout)
    assert told["totals"]["apart"] == FILES + 12
    shown = bonobofs("audit", "tail", "-n", "1000").stdout
    assert "created" in shown
    assert shown.count("node_modules") == len(of_scratch(entries, "outcome"))


def test_a_refusal_in_scratch_is_recorded(mounted: Mounted) -> None:
    world = mounted(policy=POLICY)
    (world.path / "node_modules").mkdir()
    full = world.path / "node_modules/big"
    assert outcome(full.write_bytes, bytes(2_000_000)) == errno.EFBIG
    (denied,) = [entry for entry in world.entries() if entry.result == "denied" and entry.kind == "intent"]
    assert (denied.code, denied.path) == ("SIZE", "node_modules/big")


def test_a_crash_leaves_the_intent_of_counted_changes(mounted: Mounted) -> None:
    world = mounted(policy=POLICY)
    (world.path / "node_modules").mkdir()
    (world.path / "node_modules/a").write_text("x")
    world.kill()
    world.umount()
    (intent,) = of_scratch(list(read(world.trail)), "intent")
    told = bonobofs("audit", "verify")
    assert told.returncode == 0, told.stdout
    assert f"entry {intent.seq}, write_file node_modules, has no outcome" in told.stdout
