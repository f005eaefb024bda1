"""The index answers every query as a scan of the trails does."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.index import (
    AuditIndex,
    Claim,
    GroupBy,
    IndexQuery,
    call_variables,
    microseconds,
    session_variables,
)
from bonobofs.audit.index_store import IndexTables, open_tables
from bonobofs.audit.reader import RecordedChange, read, trails_in
from bonobofs.audit.report import ChangeReport
from bonobofs.audit.writer import Trail, TrailIdentity
from tests.support.postgres import Postgres

BEGAN = datetime(2026, 1, 31, 12, tzinfo=UTC)
NAMES = ("a", "b.md", "\udcff", "é", "a%", "\\", "*", "😀")
RULES = ("artifacts", "code", "it's")
AGENTS = (("alice", "id-1"), ("bob", "id-2"), ("alice", "id-3"))
"""A label that was used again belongs to another."""


@pytest.fixture(params=["sqlite", "postgresql"])
def tables(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexTables]:
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        monkeypatch.setenv("BONOBOFS_DATABASE", server.make_database())
    tables = open_tables(home)
    yield tables
    tables.close()


def write_trails(home: Path, chance: random.Random) -> None:
    """A few sessions, with everything that a record may hold, by clocks that go forward."""
    for number in range(chance.randint(1, 5)):
        label, identity = chance.choice(AGENTS)
        paths = home / "trails" / f"s{number}.jsonl", home / "trails" / f"s{number}.head"
        trail = Trail.create(*paths, TrailIdentity(f"s{number}", label, identity))
        moment = BEGAN
        for _ in range(chance.randint(0, 40)):
            moment += timedelta(milliseconds=chance.choice((0, 1, 1000)))
            trail.append(entry(chance, moment, label, identity, trail.head[0]))
        trail.close()
        with trail.path.open("ab") as out:
            out.write(chance.choice((b"", b"garbage\n", b'{"timestamp":')))


def entry(chance: random.Random, moment: datetime, label: str, identity: str, before: int) -> AuditEntry:
    kind = chance.choice(("intent", "intent", "outcome", "outcome", "alert", "event"))
    result = chance.choice(("allowed", "allowed", "denied", "error")) if kind != "event" else "allowed"
    details: dict[str, Any] = {"intent": chance.randint(1, max(1, before))} if kind == "outcome" else {}
    if result == "denied" and kind == "outcome":
        details["count"] = chance.randint(1, 50)
    if chance.random() < 0.3:
        details[chance.choice(("to", "from"))] = path_of(chance)
    return AuditEntry(
        moment, "file", chance.choice(("create_file", "rename", "mkdir")), label, details, result, None, kind=kind,
        agent_id=identity, path=path_of(chance), rule=chance.choice(RULES) if result == "denied" else "",
        code=chance.choice(("SUFFIX", "ROLE")) if result == "denied" else None,
    )  # fmt: skip


def path_of(chance: random.Random) -> str:
    return "/".join(chance.choice(NAMES) for _ in range(chance.randint(0, 3)))


def scanned(home: Path) -> list[list[RecordedChange]]:
    """The changes of each trail, each outcome put to the intent that it names."""
    found = []
    for trail in trails_in(home / "trails"):
        changes: list[RecordedChange] = []
        for one in read(trail):
            if one.kind == "outcome" and one.result != "denied":
                for place, (intent, outcome) in enumerate(changes):
                    awaits = outcome is None and (intent.kind, intent.result) == ("intent", "allowed")
                    if awaits and intent.seq == one.details.get("intent"):
                        changes[place] = RecordedChange(intent, one)
                        break
                else:
                    changes.append(RecordedChange(one))
            else:
                changes.append(RecordedChange(one))
        found.append(changes)
    return found


def answers(change: RecordedChange, session: str, wanted: IndexQuery) -> bool:
    one, outcome = change
    last = max(microseconds(each.timestamp) for each in (one, outcome) if each is not None)
    other = next((one.details[key] for key in ("to", "from") if key in one.details), "")
    who = wanted.agent is None or wanted.agent in (one.agent, one.agent_id)
    who = one.agent_id == wanted.agent_id if wanted.agent_id is not None else who
    return (
        who
        and wanted.session in (None, session)
        and wanted.operation in (None, one.operation)
        and wanted.rule in (None, one.rule)
        and wanted.result in (None, change.result)
        and (wanted.since is None or last >= wanted.since)
        and (wanted.until is None or microseconds(one.timestamp) <= wanted.until)
        and (
            wanted.path is None
            or any(below(path, wanted.path) for path in (one.path, other) if path or path == one.path)
        )
    )


def below(path: str, asked: str) -> bool:
    """Whether a path is the requested one, or lies below it; `*` matches any one name."""
    names, wanted = path.split("/"), asked.split("/")
    return len(names) >= len(wanted) and all(want in ("*", name) for name, want in zip(names, wanted, strict=False))


def asked(chance: random.Random) -> IndexQuery:
    """One, two or three filters: with more hardly anything answers."""

    def moment() -> int:
        return microseconds(BEGAN + timedelta(milliseconds=chance.choice((-1, 0, 1, 500, 1000, 1001, 5000, 10**6))))

    agent, identity = chance.choice((("alice", None), ("id-1", None), ("alice", "id-3")))
    filters: list[dict[str, Any]] = [
        {"agent": agent, "agent_id": identity},
        {"session": chance.choice(("s0", "s1", "nobody"))},
        {"path": chance.choice((*(name for name in NAMES if "*" not in name), "a/b.md", "*/a"))},
        {"operation": chance.choice(("create_file", "rename"))},
        {"rule": chance.choice(RULES)},
        {"result": chance.choice(("allowed", "denied", "error"))},
        {"since": moment()},
        {"until": moment()},
    ]
    chosen: dict[str, Any] = {}
    for one in chance.sample(filters, chance.randint(1, 3)):
        chosen |= one
    return IndexQuery(**chosen)


def told(changes: list[RecordedChange]) -> list[str]:
    return sorted(str(change) for change in changes)


@pytest.mark.parametrize("seed", range(4))
def test_the_index_answers_as_a_scan_of_the_trails(home: Path, tables: IndexTables, seed: int) -> None:
    """By agent, session, path, operation, rule, result and time, singly and combined, and so do its counts."""
    chance = random.Random(seed)
    index = AuditIndex(home, "here", tables, batch=chance.randint(1, 50))
    write_trails(home, chance)
    index.catch_up()
    trails = {path.stem: changes for path, changes in zip(trails_in(home / "trails"), scanned(home), strict=True)}
    for _ in range(40):
        wanted = asked(chance)
        found = list(index.changes(wanted))
        expected = [each for name, changes in trails.items() for each in changes if answers(each, name, wanted)]
        assert told(found) == told(expected), wanted
        assert [one.entry.timestamp for one in found] == sorted(one.entry.timestamp for one in found)
        for by in (GroupBy.AGENT, GroupBy.PATH, GroupBy.RULE, GroupBy.CODE, GroupBy.RESULT, GroupBy.OPERATION):
            assert counted(index, wanted, by) == counted_here(expected, by), (wanted, by)


@pytest.mark.parametrize("seed", range(3))
def test_the_most_frequent_rules_are_equal_by_index_report_and_scan(home: Path, tables: IndexTables, seed: int) -> None:
    """By a count of the index, by a report, and by the trails."""
    write_trails(home, random.Random(seed))
    index = AuditIndex(home, "here", tables)
    index.catch_up()
    report = ChangeReport({})
    report.add(index.changes(IndexQuery()))
    top = Counter[str]()
    for one in report.document()["top_denied_rules"]:
        top[one["rule"]] += one["times"]
    refused = Counter[str]()
    for change in itertools.chain(*scanned(home)):
        if change.entry.result == "denied" and change.entry.kind != "alert":
            refused[change.entry.rule] += change.entry.details.get("count", 1)
    assert top == refused
    assert {one.value: one.times for one in index.count(IndexQuery(result="denied"), GroupBy.RULE)} == refused


def counted(index: AuditIndex, wanted: IndexQuery, by: GroupBy) -> dict[str, tuple[int, int]]:
    return {one.value: (one.changes, one.times) for one in index.count(wanted, by)}


def counted_here(changes: list[RecordedChange], by: GroupBy) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for change in changes:
        one = change.entry
        if one.kind not in ("intent", "outcome"):
            continue
        values = {GroupBy.AGENT: one.agent_id, GroupBy.RESULT: change.result, GroupBy.CODE: one.code or ""}
        value = values[by] if by in values else getattr(one, by.value)
        number, times = found.get(value, (0, 0))
        found[value] = number + 1, times + one.details.get("count", 1)
    return found


def test_changes_are_found_by_command_of_a_parent_and_by_turn(home: Path, tables: IndexTables) -> None:
    """A trail may be damaged: a cycle of parents does not matter, and neither does a number that occurs twice."""
    trail = Trail.create(home / "trails/s-1.jsonl", home / "trails/s-1.head", TrailIdentity("s-1", "alice", "id-1"))

    def process(command: str, parent: int) -> int:
        return trail.event("process", {"observed": {"command": command, "parent": parent}})

    def change(path: str, by: int) -> None:
        trail.intent("create_file", path, "create", "code", caller=f'{{"process":{by}}}')

    make = process("make all", 0)
    child = process("sed 's/100%_\\\\é/x/'", make)
    change("a", child)
    first = trail.begin_turn("two words", "mark")
    change("b", make)
    process("one of a cycle", trail.head[0] + 2)
    cycle = process("two of a cycle", trail.head[0])
    change("c", cycle)
    second = trail.begin_turn("two words", "hook")
    change("d", 0)
    trail.close()
    line = next(iter(read(trail.path))).to_json()
    with trail.path.open("a") as out:
        out.write(f"{line}\n")
    index = AuditIndex(home, "home", tables)
    index.catch_up()

    def found(**conditions: Any) -> list[str]:
        return [change.entry.path for change in index.changes(IndexQuery(operation="create_file", **conditions))]

    assert found(command="make") == ["a", "b"]
    assert found(command="100%_\\\\é") == ["a"]
    assert found(command="Make") == []
    assert found(command="one of a cycle") == ["c"]
    assert found(turns=index.find_turns(f"s-1:{first}")) == ["b", "c"]
    assert found(turns=index.find_turns(f"s:{second}")) == ["d"]
    assert found(turns=index.find_turns("two words")) == ["b", "c", "d"]
    assert found(turns=index.find_turns("two words"), command="make") == ["b"]
    assert index.find_turns("three") == ()
    assert [count.value for count in index.count(IndexQuery(command="make"), GroupBy.PATH)] == ["a", "b"]
    assert index.command("s-1", child) == "sed 's/100%_\\\\é/x/'"
    assert index.command("s-1", 99) == index.command("none", make) == ""


def test_changes_are_found_by_claimed_call_and_session(home: Path, tables: IndexTables) -> None:
    """A call ends with its end, else with the next prompt; an id that is unknown is no id; a part of an id is another.

    Two calls of one session may run at once: the client does not say which of them makes a change.
    """
    trail = Trail.create(home / "trails/s.jsonl", home / "trails/s.head", TrailIdentity("s", "alice", "id-1"))

    def begin(call: str, of_session: str = "claude-1") -> None:
        trail.event("call_begin", {"tool_call": call, "tool": "Bash", "agent_session": of_session})

    def end(call: str) -> None:
        trail.event("call_end", {"tool_call": call})

    def change(path: str, **claimed: str) -> None:
        process = trail.event("process", {"observed": {"name": "sh"}, "claimed": claimed})
        trail.intent("create_file", path, "create", "code", caller=f'{{"process":{process}}}')

    change("before")
    begin("one")
    change("in one")
    begin("two", "claude-2")
    change("in both")
    end("one")
    change("in two")
    trail.begin_turn("a mark ends no call", "mark")
    change("in two, marked")
    trail.begin_turn("prompt", "hook")
    change("after")
    begin("unknown")
    change("in an unknown call")
    end("unknown")
    change("by variables", CLAUDE_CODE_SESSION_ID="claude-1", TRACEPARENT="00-4bf9-00f0.67-01")
    change("of a thread", CODEX_THREAD_ID="claude-2")
    for number in range(2000):
        begin(f"many {number}", "of many calls")
        end(f"many {number}")
    begin("many", "of many calls")
    change("in the last of many")
    trail.close()
    index = AuditIndex(home, "home", tables)
    index.catch_up()

    def found(of_call: str | None, of_session: str = "") -> list[str]:
        calls = tuple(each for each in index.calls() if of_call == each.id or of_session == each.agent_session)
        claim = Claim(calls, session_variables(of_session) if of_call is None else call_variables(of_call))
        return [each.entry.path for each in index.changes(IndexQuery(operation="create_file", claims=(claim,)))]

    assert found("one") == ["in one", "in both"]
    assert found("two") == ["in both", "in two", "in two, marked"]
    assert found("unknown") == found("4bf") == found("00f0x67") == []
    assert found("4bf9") == found("00f0.67") == found("00-4bf9-00f0.67-01") == ["by variables"]
    assert found(None, "claude-1") == ["in one", "in both", "by variables"]
    assert found(None, "claude-2") == ["in both", "in two", "in two, marked", "of a thread"]
    assert found(None, "of many calls") == ["in the last of many"]
    assert found(None, "claude") == []
    report = ChangeReport({}, index)
    report.add(index.changes(IndexQuery()))
    sums = [
        (call["call"], call["changes"], call["shared"]) for turn in report.document()["turns"] for call in turn["calls"]
    ]
    assert sums == [("one", 2, 1), ("two", 2, 1), ("two", 1, 0), ("many", 1, 0)]
    assert "during tool calls, as the client claims: `Bash` `one` (2 changes, 0 refused, 1 of them" in report.markdown()
