"""A report combines changes per file, and lists denials with their remedies."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import RecordedChange
from bonobofs.audit.report import MOST, ChangeReport, SessionFacts
from bonobofs.system.terminal import escape
from tests.support.world import ALLOW_ALL, Mounted, bonobofs

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
FROM: dict[str, Any] = {"from": ".t"}
ACTIONS = {"create_file": "create", "mkdir": "create", "delete_file": "delete", "rmdir": "delete"}


def change(
    operation: str, path: str, *, rule: str = "code", result: str = "allowed", written: int = 0, **details: Any
) -> RecordedChange:
    action = ACTIONS.get(operation, "modify")
    given: dict[str, Any] = {"session": "s", "path": path, "action": action, "agent_id": "u", "rule": rule}
    intent = AuditEntry(NOW, "file", operation, "alice", details, "allowed", None, kind="intent", seq=1, **given)
    reason = "EIO: it broke" if result == "error" else None
    outcome = AuditEntry(NOW, "file", operation, "alice", {"intent": 1}, result, reason, kind="outcome", bytes=written)
    return RecordedChange(intent, outcome)


def refusal(path: str, times: int = 0) -> RecordedChange:
    details: dict[str, Any] = {"instead": "Write a .md file."}
    kind = "intent"
    if times:
        details, kind = {**details, "intent": 1, "count": times}, "outcome"
    return RecordedChange(
        AuditEntry(
            NOW, "file", "create_file", "alice", details, "denied", "Only .md files.", kind=kind, session="s",
            agent_id="u", path=path, code="SUFFIX", rule="artifacts",
        )
    )  # fmt: skip


def told(*changes: RecordedChange) -> dict[str, Any]:
    report = ChangeReport({"s": SessionFacts(role="impl", source="/src", seq=9, hash="f" * 64)})
    report.add(changes)
    return report.document()


def changed(*changes: RecordedChange) -> dict[str, str]:
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
        ([change("create_file", "t"), change("rename", "t", to="b", replaces=True)], {"b": "modified"}),
        (
            [change("create_file", name) for name in "bt"] + [change("rename", "t", to="b", replaces=True)],
            {"b": "created"},
        ),
        ([change("create_file", "d/x"), change("rename", "d", to="e")], {"e": "renamed from d", "e/x": "created"}),
        ([change("rename", "a", to="b", exchange=True)], {"a": "modified", "b": "modified"}),
        ([change("create_file", "s", layer="scratch")], {}),
        ([change("create_file", ".t", layer="temporary"), change("rename", "a", **FROM)], {"a": "modified"}),
        ([change("create_file", ".t", layer="temporary"), change("rename", ".t", to=".u", layer="temporary")], {}),
        ([change("create_file", "a", result="error")], {}),
    ],
)
def test_a_report_has_the_net_effect_of_the_changes(changes: list[RecordedChange], left: dict[str, str]) -> None:
    """A file that was created, renamed and removed does not appear."""
    assert changed(*changes) == left


def test_a_gate_operation_counts_as_a_change_without_a_file() -> None:
    commit = change("commit", "")
    commit = commit._replace(entry=commit.entry._replace(guard="git"))
    document = told(change("create_file", "a"), commit)
    assert (document["totals"]["changes"], [one["path"] for one in document["changed"]]) == (2, ["a"])


def test_equal_denials_are_one_row_with_count_and_remedy() -> None:
    """From any channel."""
    (one,) = told(refusal("a.sh"), refusal("a.sh", times=40), refusal("b.sh"))["refused"]
    assert (one["times"], one["paths"], one["instead"]) == (42, ["a.sh", "b.sh"], "Write a .md file.")
    assert told(refusal("a.sh"))["top_denied_rules"] == [{"rule": "artifacts", "code": "SUFFIX", "times": 1}]


def test_failed_and_unfinished_changes_are_listed() -> None:
    """A change without an outcome may have been made or not."""
    open_ = RecordedChange(change("mkdir", "open").entry)
    document = told(change("mkdir", "d", result="error"), open_)
    assert [(one["path"], one["reason"]) for one in document["failed"]] == [("d", "EIO: it broke")]
    assert [one["path"] for one in document["unfinished"]] == ["open"]
    assert document["totals"]["failed"] == document["totals"]["unfinished"] == 1


def test_a_report_lists_external_changes_separately() -> None:
    """Their author is unknown. Changes that were only counted are counted here too."""
    given: dict[str, Any] = {"kind": "event", "session": "s"}
    behind = AuditEntry(
        NOW, "file", "out_of_band", "alice", {"what": "holds 7 bytes"}, "allowed", None, path="b", **given
    )
    more = AuditEntry(NOW, "file", "out_of_band", "alice", {"more": 40}, "allowed", None, **given)
    report = ChangeReport({})
    report.add([RecordedChange(behind), RecordedChange(more)])
    document = report.document()
    assert [(one["path"], one["what"]) for one in document["out_of_band"]] == [("b", "holds 7 bytes")]
    assert document["totals"]["out_of_band"] == 41
    text = report.markdown()
    assert "review each one.\n\n- 2026-01-31 12:00:00 UTC, `b` holds 7 bytes\n\nAnd 40 more." in text


def test_a_protected_external_change_is_counted_only_as_an_alert() -> None:
    """Its event is not counted again. An event of another path is counted."""
    given: dict[str, Any] = {"session": "s", "path": "p"}
    what = {"what": "was removed externally"}
    event = AuditEntry(NOW, "file", "out_of_band", "alice", what, "allowed", None, kind="event", seq=3, **given)
    alert = event._replace(kind="alert", result="error", reason="It is protected.", seq=4)
    report = ChangeReport({})
    report.add(
        [
            RecordedChange(event._replace(seq=1)),
            RecordedChange(event._replace(path="b", seq=2)),
            RecordedChange(event),
            RecordedChange(alert),
        ]
    )
    document = report.document()
    assert (document["totals"]["alerts"], document["totals"]["out_of_band"]) == (1, 2)
    assert [one["path"] for one in document["out_of_band"]] == ["p", "b"]
    assert [one["what"] for one in document["alerts"]] == ["was removed externally"]
    assert "`p`: It is protected. It was removed externally." in report.markdown()


def test_long_lists_are_truncated_with_a_count() -> None:
    """People read a report."""
    document = told(*(change("create_file", f"f{number:04}", written=2) for number in range(MOST + 7)))
    assert len(document["changed"]) == MOST
    assert document["more"] == {"changed": 7}
    assert document["totals"]["paths"] == MOST + 7


def test_the_markdown_has_changes_denials_and_remedies_in_order() -> None:
    """What was changed, what was refused, and what to do about it."""
    report = ChangeReport({"s": SessionFacts(role="impl", source="/src", seq=9, hash="f" * 64)})
    report.add([change("create_file", "a|`b`\n## Refused", written=7), refusal("x.sh"), refusal("x.sh", times=1)])
    text = report.markdown()
    assert text.splitlines() == [
        "# Changes by `alice`",
        "",
        "1 path changed, 2 changes refused, 0 failed, 0 alerts.",
        "",
        "## Changed",
        "",
        "| path | what | changes | bytes written |",
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
        "- `alice`, role `impl` on `/src`, 2026-01-31 12:00:00 UTC to 2026-01-31 12:00:00 UTC, session `s`",
        f"  - its record has 9 entries, the last with the hash `{'f' * 64}`",
    ]


def test_changes_of_several_sources_are_listed_separately() -> None:
    """One path in two sources is two files. A session with an unknown source is not mixed with another."""
    report = ChangeReport({"s": SessionFacts(source="/one"), "t": SessionFacts(source="/two")})
    moved = change("rename", "a", to="b")
    for session in ("s", "t", "u", "v"):
        report.add(
            [change("create_file", "a")._replace(entry=change("create_file", "a").entry._replace(session=session))]
        )
    report.add([moved._replace(entry=moved.entry._replace(session="u"))])
    found = [(one["source"], one["path"]) for one in report.document()["changed"]]
    assert found == [("/one", "a"), ("/two", "a"), ("session u", "b"), ("session v", "a")]
    assert [line for line in report.markdown().splitlines() if line.startswith("In ")] == [
        "In `/one`:",
        "In `/two`:",
        "In `session u`:",
        "In `session v`:",
    ]


_HOSTILE = st.text(
    st.sampled_from("`|\\\n*_[]()<>!@#&~ :/w.a-\x1b\udcff\u202e"), min_size=1, max_size=20
) | st.sampled_from(
    [
        "@org/team",
        "https://evil/",
        "www.evil.com",
        "<img src=x>",
        "![x](http://evil/)",
        "`",
        "|",
        "a|b\\",
        "\n\n# x",
        " a ",
        " ",
        "  ",
    ]
)


@given(path=_HOSTILE, agent=_HOSTILE, rule=_HOSTILE, reason=_HOSTILE, instead=_HOSTILE, operation=_HOSTILE)
def test_texts_of_a_record_are_escaped_in_markdown(
    path: str, agent: str, rule: str, reason: str, instead: str, operation: str
) -> None:
    """No heading, link, image, table cell, mention or terminal control."""
    given: dict[str, Any] = {"session": reason, "path": path, "agent_id": "u", "rule": rule, "code": rule}
    details = {"instead": instead, "what": reason}
    entries = [
        AuditEntry(NOW, "file", operation, agent, details, result, reason, kind=kind, **given)
        for kind, result in (("intent", "denied"), ("intent", "allowed"), ("alert", "denied"), ("event", "allowed"))
    ]
    behind = AuditEntry(NOW, "file", "out_of_band", agent, details, "allowed", None, kind="event", **given)
    failed = AuditEntry(NOW, "file", operation, agent, {}, "error", reason, kind="outcome")
    made = change("create_file", path).entry
    report = ChangeReport({reason: SessionFacts(role=rule, source=path, seq=1, hash="f")})
    report.add(
        [
            *map(RecordedChange, entries),
            RecordedChange(behind),
            RecordedChange(entries[1], failed),
            RecordedChange(made._replace(session=reason)),
        ]
    )
    text = report.markdown()
    assert all(character.isprintable() for character in text.replace("\n", ""))
    tokens = MarkdownIt("gfm-like", {"linkify": False, "html": True}).parse(text)
    assert Counter(
        token.type for token in tokens if token.type in ("heading_open", "td_open", "html_block")
    ) == Counter(heading_open=8, td_open=4)
    inside = [child for token in tokens for child in token.children or ()]
    kinds = {"text", "code_inline", "strong_open", "strong_close", "softbreak", "text_special"}
    assert {child.type for child in inside} <= kinds
    said = "".join(child.content for child in inside if child.type != "code_inline")
    assert not re.search(r"@|#|://|www\.", said)
    spans = {child.content for child in inside if child.type == "code_inline"}
    assert {escape(path), escape(agent), escape(rule)} <= spans


def test_a_report_fits_the_limit_of_a_pull_request() -> None:
    """For any number of entries. Omitted rows are counted."""
    long = "/".join(["x" * 250] * 15)
    about = {f"s{number}": SessionFacts(source=long, role="impl", seq=1, hash="f" * 64) for number in range(300)}
    report = ChangeReport(about)
    for number in range(3000):
        refused = refusal(f"{long}/{number}").entry._replace(rule=f"rule{number}", session=f"s{number % 300}")
        report.add([change("create_file", f"{long}/{number}"), RecordedChange(refused)])
        report.add([change("mkdir", f"{long}/{number}", result="error"), RecordedChange(change("mkdir", long).entry)])
        report.add([RecordedChange(refused._replace(kind="alert"))])
        report.add([RecordedChange(refused._replace(kind="event", operation="out_of_band", result="allowed"))])
    text = report.markdown()
    assert len(text) < 65_536
    assert text.count("\nAnd ") == 7


def test_a_file_that_an_editor_replaces_is_listed_as_modified(mounted: Mounted, source: Path) -> None:
    """At first the new version is a file with another name that the rules allow."""
    (source / "plan.py").write_text("one\n")
    world = mounted(policy=ALLOW_ALL)
    for name in ("new.py", "plan.py.new"):
        (world.path / name).write_text("two\n")
    os.rename(world.path / "plan.py.new", world.path / "plan.py")
    world.umount()
    told = json.loads(bonobofs("audit", "report", "--json").stdout)["changed"]
    assert {one["path"]: one["what"] for one in told} == {"plan.py": "modified", "new.py": "created"}
