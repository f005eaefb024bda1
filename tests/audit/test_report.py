"""A report tells what came of many changes, and of refusals what to do about them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bonobofs.audit.history import Change
from bonobofs.audit.record import AuditEntry
from bonobofs.audit.report import MOST, About, Report

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
FROM: dict[str, Any] = {"from": ".t"}
ACTIONS = {"create_file": "create", "mkdir": "create", "delete_file": "delete", "rmdir": "delete"}


def change(
    operation: str, path: str, *, rule: str = "code", result: str = "allowed", written: int = 0, **details: Any
) -> Change:
    action = ACTIONS.get(operation, "modify")
    given: dict[str, Any] = {"session": "s", "path": path, "action": action, "agent_id": "u", "rule": rule}
    intent = AuditEntry(NOW, "file", operation, "alice", details, "allowed", None, kind="intent", seq=1, **given)
    reason = "EIO: it broke" if result == "error" else None
    outcome = AuditEntry(NOW, "file", operation, "alice", {"intent": 1}, result, reason, kind="outcome", bytes=written)
    return Change(intent, outcome)


def refusal(path: str, times: int = 0) -> Change:
    details: dict[str, Any] = {"instead": "Write a .md file."}
    kind = "intent"
    if times:
        details, kind = {**details, "intent": 1, "count": times}, "outcome"
    return Change(
        AuditEntry(
            NOW, "file", "create_file", "alice", details, "denied", "Only .md files.", kind=kind, session="s",
            agent_id="u", path=path, code="SUFFIX", rule="artifacts",
        )
    )  # fmt: skip


def told(*changes: Change) -> dict[str, Any]:
    report = Report({"s": About(role="impl", source="/src", seq=9, hash="f" * 64)})
    report.add(changes)
    return report.document()


def changed(*changes: Change) -> dict[str, str]:
    return {
        one["path"]: f"renamed from {one['was']}" if one["was"] else one["what"] for one in told(*changes)["changed"]
    }


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([change("create_file", "a"), change("write_file", "a")], {"a": "created"}),
        ([change("write_file", "a"), change("set_mode", "a")], {"a": "modified"}),
        ([change("create_file", "a"), change("delete_file", "a")], {}),
        ([change("delete_file", "a")], {"a": "deleted"}),
        ([change("delete_file", "a"), change("create_file", "a")], {"a": "modified"}),
        ([change("rename", "a", to="b")], {"b": "renamed from a"}),
        ([change("rename", "a", to="b"), change("rename", "b", to="c")], {"c": "renamed from a"}),
        ([change("rename", "a", to="b"), change("rename", "b", to="a")], {}),
        ([change("rename", "a", to="b"), change("delete_file", "b")], {"a": "deleted"}),
        ([change("create_file", "a"), change("rename", "a", to="b")], {"b": "created"}),
        ([change("write_file", "b"), change("create_file", "t"), change("rename", "t", to="b")], {"b": "modified"}),
        ([change("create_file", "d/x"), change("rename", "d", to="e")], {"e": "renamed from d", "e/x": "created"}),
        ([change("rename", "a", to="b", exchange=True)], {"a": "modified", "b": "modified"}),
        ([change("create_file", "s", apart="scratch")], {}),
        ([change("create_file", ".t", apart="temporary"), change("rename", "a", **FROM)], {"a": "modified"}),
        ([change("create_file", ".t", apart="temporary"), change("rename", ".t", to=".u", apart="temporary")], {}),
        ([change("create_file", "a", result="error")], {}),
    ],
)
def test_it_tells_what_is_left_of_the_changes(changes: list[Change], left: dict[str, str]) -> None:
    """Of a file that was made, renamed and removed again nothing is told."""
    assert changed(*changes) == left


def test_what_a_gate_did_counts_as_a_change_and_is_no_file() -> None:
    commit = change("commit", "")
    commit.entry.guard = "git"
    document = told(change("create_file", "a"), commit)
    assert (document["totals"]["changes"], [one["path"] for one in document["changed"]]) == (2, ["a"])


def test_equal_refusals_are_one_with_their_number_and_the_way_out() -> None:
    """However often and wherever it was asked."""
    (one,) = told(refusal("a.sh"), refusal("a.sh", times=40), refusal("b.sh"))["refused"]
    assert (one["times"], one["paths"], one["instead"]) == (42, ["a.sh", "b.sh"], "Write a .md file.")
    assert told(refusal("a.sh"))["top_denied_rules"] == [{"rule": "artifacts", "code": "SUFFIX", "times": 1}]


def test_what_failed_and_what_was_not_ended_is_told() -> None:
    """A change without an outcome may have been made or not."""
    open_ = Change(change("mkdir", "open").entry)
    document = told(change("mkdir", "d", result="error"), open_)
    assert [(one["path"], one["reason"]) for one in document["failed"]] == [("d", "EIO: it broke")]
    assert [one["path"] for one in document["unfinished"]] == ["open"]
    assert document["totals"]["failed"] == document["totals"]["unfinished"] == 1


def test_what_changed_behind_the_mount_is_told_apart() -> None:
    """Nobody is said to have done it; what was counted only is counted here."""
    given: dict[str, Any] = {"kind": "event", "session": "s"}
    behind = AuditEntry(
        NOW, "file", "out_of_band", "alice", {"what": "holds 7 bytes"}, "allowed", None, path="b", **given
    )
    more = AuditEntry(NOW, "file", "out_of_band", "alice", {"more": 40}, "allowed", None, **given)
    report = Report({})
    report.add([Change(behind), Change(more)])
    document = report.document()
    assert [(one["path"], one["what"]) for one in document["out_of_band"]] == [("b", "holds 7 bytes")]
    assert document["totals"]["out_of_band"] == 41
    text = report.markdown()
    assert "## Changed behind the mount\n\n- 2026-01-31T12:00:00.000000+00:00 `b` holds 7 bytes\n\nAnd 40 more." in text


def test_long_lists_are_cut_and_counted() -> None:
    """A report is read by people."""
    document = told(*(change("create_file", f"f{number:04}", written=2) for number in range(MOST + 7)))
    assert len(document["changed"]) == MOST
    assert document["more"] == {"changed": 7}
    assert document["totals"]["paths"] == MOST + 7


def test_the_markdown_says_it_in_order_and_no_name_can_forge_a_line() -> None:
    """A name may hold whatever a file name may hold."""
    report = Report({"s": About(role="impl", source="/src", seq=9, hash="f" * 64)})
    report.add([change("create_file", "a|`b`\n## Refused", written=7), refusal("x.sh"), refusal("x.sh", times=1)])
    text = report.markdown()
    assert text.splitlines() == [
        "# What was done by alice",
        "",
        "1 path changed, 2 changes refused, 0 failed, 0 alerts.",
        "",
        "## Changed",
        "",
        "| path | | changes | bytes written |",
        "|---|---|---:|---:|",
        "| `` a\\|`b`\\n## Refused `` | created | 1 | 7 |",
        "",
        "## Refused",
        "",
        "- **SUFFIX**, rule `artifacts`, twice: Only .md files.",
        "  - where: `x.sh`",
        "  - what to do: Write a .md file.",
        "",
        "## Sessions",
        "",
        "- alice, role impl on `/src`, 2026-01-31T12:00:00.000000+00:00 to 2026-01-31T12:00:00.000000+00:00, session s",
        f"  - its record has 9 entries, the last with the hash `{'f' * 64}`",
    ]
