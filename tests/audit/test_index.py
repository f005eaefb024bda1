"""The index has exactly the content of the trails: after one read, many reads, a kill or a rebuild."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs import session
from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.index import AuditIndex, GroupBy, IndexQuery, decode_text, encode_text, microseconds
from bonobofs.audit.index_store import CHANGES, METADATA, SCHEMA, TRAILS, IndexTables, open_tables, sqlite_engine
from bonobofs.audit.reader import UNREADABLE, RecordedChange, read, trails_in
from bonobofs.audit.trail_storage import compress
from bonobofs.audit.writer import Trail
from bonobofs.errors import StateError
from bonobofs.policy.decision import Code, Denied
from bonobofs.policy.request import Operation, WorkspacePath
from tests.audit.conftest import Create, creating
from tests.support.postgres import Postgres
from tests.support.world import environment

DENIED = Denied(Code.SUFFIX, "artifacts", "Only .md.", "Write .md.", WorkspacePath("a.sh"), Operation.CREATE_FILE)


@pytest.fixture(params=["sqlite", "postgresql"])
def tables(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexTables]:
    """An index in its own file, or in the database that hosts share."""
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        monkeypatch.setenv("BONOBOFS_DATABASE", server.make_database())
    tables = open_tables(home)
    yield tables
    tables.close()


@pytest.fixture
def index(home: Path, tables: IndexTables) -> AuditIndex:
    return AuditIndex(home, "here", tables)


def change(trail: Trail, path: str, operation: Operation = Operation.CREATE_FILE, error: int = 0) -> None:
    trail.outcome(trail.intent(operation, path, "create", "artifacts"), operation, path, error=error)


def paths(index: AuditIndex, **wanted: Any) -> list[str]:
    return [found.entry.path for found in index.changes(IndexQuery(**wanted))]


def joined(entries: Iterable[AuditEntry]) -> list[RecordedChange]:
    """What the index should hold of one trail, the simplest way there is: all in memory, each outcome sought."""
    changes: list[RecordedChange] = []
    for entry in entries:
        if entry.kind == "outcome" and entry.result != "denied":
            intent = entry.details.get("intent")
            for place, known in enumerate(changes):
                awaited = (known.entry.kind, known.entry.result) == ("intent", "allowed") and known.outcome is None
                if awaited and known.entry.seq == intent:
                    changes[place] = RecordedChange(known.entry, entry)
                    break
            else:
                changes.append(RecordedChange(entry))
        else:
            changes.append(RecordedChange(entry))
    return changes


def test_a_change_is_found_with_its_outcome_in_the_order_of_intents(
    create: Create, home: Path, index: AuditIndex
) -> None:
    """The outcome may be recorded long after its intent, and indexed in a later read."""
    trail = create(home / "trails")
    first = trail.intent(Operation.WRITE_FILE, "long", "modify", "code")
    change(trail, "short")
    change(trail, "failed", error=28)
    trail.flush()
    assert index.catch_up().entries == 5
    trail.outcome(first, Operation.WRITE_FILE, "long", bytes=9)
    trail.intent(Operation.MKDIR, "open", "create", "code")
    assert index.catch_up().entries == 2
    assert [(each.entry.path, each.result, each.outcome is not None) for each in index.changes(IndexQuery())] == [
        ("long", "allowed", True),
        ("short", "allowed", True),
        ("failed", "error", True),
        ("open", "allowed", False),
    ]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("docs", ["docs/a.md", "docs/deep/b.md", "src/c.py"]),
        ("docs/", ["docs/a.md", "docs/deep/b.md", "src/c.py"]),
        ("./docs/deep", ["docs/deep/b.md", "src/c.py"]),
        ("docs/*.md", ["docs/a.md"]),
        ("docs/**/*.md", ["docs/a.md", "docs/deep/b.md"]),
        ("**/*.py", ["src/c.py"]),
        ("*.md", []),
        ("*9.md", []),
        ("?.md", []),
        ("m/?.md", ["m/é.md", "m/\udcff.md", "m/\\.md", "m/😀.md"]),
        ("m/*9.md", []),
        ("m/\udcff*", ["m/\udcff.md"]),
        ("m/\\*", ["m/\\.md"]),
        ("doc?/a.md", ["docs/a.md"]),
        ("docs2", ["docs2/a"]),
        ("a+b[c]\nd", ["a+b[c]\nd"]),
    ],
)
def test_a_path_filter_includes_everything_below_and_a_pattern_its_matches(
    create: Create, home: Path, index: AuditIndex, asked: str, found: list[str]
) -> None:
    """One character is one, for any number of bytes, and for bytes that are not UTF-8."""
    trail = create(home / "trails")
    change(trail, "docs/a.md")
    change(trail, "docs/deep/b.md")
    trail.intent(Operation.RENAME, "src/c.py", "modify", "code", details={"to": "docs/deep/c.py"})
    change(trail, "docs2/a")
    change(trail, "a+b[c]\nd")
    for name in ("é", "\udcff", "\\", "😀"):
        change(trail, f"m/{name}.md")
    trail.flush()
    index.catch_up()
    assert paths(index, path=asked) == found


def test_each_filter_narrows_the_answer(create: Create, home: Path, index: AuditIndex) -> None:
    """By agent, session, operation, rule, result and time, singly and combined."""
    trail, other = create(home / "trails"), create(home / "trails", "t", "bob")
    change(trail, "made")
    change(trail, "failed", error=28)
    change(trail, "d", Operation.MKDIR)
    change(other, "elsewhere")
    trail.denial(DENIED, "create")
    trail.flush()
    other.flush()
    index.catch_up()
    assert paths(index, result="error") == ["failed"]
    assert paths(index, operation="mkdir") == ["d"]
    assert paths(index, operation="mkdir", result="error") == []
    assert paths(index, agent="alice") == paths(index, agent="id-of-alice") == ["made", "failed", "d", "a.sh"]
    assert paths(index, agent="alice", agent_id="another of that name") == []
    assert paths(index, session="t") == ["elsewhere"]
    assert paths(index, session="of nobody") == []
    assert paths(index, rule="artifacts", result="denied") == ["a.sh"]
    soon, past = (microseconds(datetime.now(UTC) + timedelta(hours=hours)) for hours in (1, -1))
    assert paths(index, since=soon) == paths(index, until=past) == []
    assert len(paths(index, since=past, until=soon)) == 5


def test_changes_are_grouped_and_counted(create: Create, home: Path, index: AuditIndex) -> None:
    """A repeated denial counts every repetition. Alerts are not changes."""
    trail = create(home / "trails")
    change(trail, "a.md")
    trail.denial_repeats(trail.denial(DENIED, "create"), DENIED, 41)
    trail.alert("three denials", path="a.sh", code="SUFFIX")
    trail.flush()
    index.catch_up()
    counted = index.count(IndexQuery(), GroupBy.RESULT)
    assert [(one.value, one.changes, one.times) for one in counted] == [("denied", 2, 42), ("allowed", 1, 1)]
    (by_rule,) = index.count(IndexQuery(result="denied"), GroupBy.RULE)
    assert (by_rule.value, by_rule.times) == ("artifacts", 42)
    (by_agent,) = index.count(IndexQuery(), GroupBy.AGENT)
    assert (by_agent.value, by_agent.label) == ("id-of-alice", "alice")
    assert index.count(IndexQuery(), GroupBy.SESSION)[0].value == "s"
    assert len(index.count(IndexQuery(), GroupBy.PATH, most=1)) == 1


def test_changes_are_sorted_by_time_and_each_trail_keeps_its_order(
    create: Create, home: Path, index: AuditIndex
) -> None:
    """Also if a clock was set back."""
    one, two = create(home / "trails", "one"), create(home / "trails", "two")
    now = datetime(2026, 1, 31, 12, tzinfo=UTC)
    for trail, seconds in ((one, 1), (one, 5), (one, 2), (two, 3), (two, 6)):
        moment = now + timedelta(seconds=seconds)
        trail.append(AuditEntry(moment, "git", "note", "a", {}, "allowed", None, path=f"{trail.path.stem}{seconds}"))
    index.catch_up()
    assert paths(index) == ["one1", "two3", "one5", "one2", "two6"]


def test_an_incomplete_line_is_read_when_it_is_complete(create: Create, home: Path, index: AuditIndex) -> None:
    """It is neither shown nor skipped."""
    trail = create(home / "trails")
    change(trail, "a")
    trail.flush()
    whole = trail.path.read_bytes()
    trail.path.write_bytes(whole[:-10])
    assert index.catch_up().entries == 1
    trail.path.write_bytes(whole)
    assert index.catch_up().entries == 1
    assert [each.outcome is not None for each in index.changes(IndexQuery())] == [True]


def test_a_rewritten_trail_is_read_again_and_reported(create: Create, home: Path, index: AuditIndex) -> None:
    """The old rows are removed. The rows of a deleted trail are removed too."""
    trail, other = create(home / "trails"), create(home / "trails", "t")
    change(trail, "before")
    change(other, "other")
    trail.flush()
    other.flush()
    index.catch_up()
    trail.path.unlink()
    trail.path.with_suffix(".head").unlink()
    change(anew := create(home / "trails"), "after!")
    anew.flush()
    told = index.catch_up()
    assert (told.redone, told.entries) == (("s",), 2)
    assert sorted(paths(index)) == ["after!", "other"]
    other.path.unlink()
    assert index.catch_up().redone == ()
    assert paths(index) == ["after!"]


def test_an_unreadable_trail_does_not_block_others(create: Create, home: Path, index: AuditIndex) -> None:
    """It is reported."""
    (home / "trails" / "a.jsonl").mkdir()
    change(trail := create(home / "trails", "b"), "read")
    trail.flush()
    (told,) = index.catch_up().unread
    assert told.endswith("a.jsonl cannot be read: it is not a regular file")
    assert paths(index) == ["read"]


def test_a_continuous_writer_does_not_delay_other_trails(create: Create, home: Path, index: AuditIndex) -> None:
    """Entries written during a read are left for the next read."""
    restless, other = create(home / "trails", "a"), create(home / "trails", "b")
    change(restless, "first")
    restless.flush()
    change(other, "other")
    other.flush()

    def may_continue() -> bool:
        change(restless, "more")
        restless.flush()
        return True

    index.catch_up(may_continue)
    assert "other" in paths(index)


def test_a_stop_request_ends_the_wait_for_another_reader(create: Create, home: Path, index: AuditIndex) -> None:
    """For instance, a query stopped in a terminal must not prevent the daemon from ending."""
    change(trail := create(home / "trails"), "a")
    trail.flush()
    with (home / "index.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert index.catch_up(lambda: False).entries == 0
    assert index.catch_up().entries == 2


def test_each_update_of_an_ended_time_reads_one_batch(create: Create, home: Path, tables: IndexTables) -> None:
    """So that an index that is always updated for a short time becomes complete."""
    trails = [create(home / "trails", name) for name in "ab"]
    for trail in trails:
        for number in range(3):
            change(trail, f"f{number}")
        trail.flush()
    index = AuditIndex(home, "here", tables, batch=2)
    updates = [index.catch_up(lambda: False).entries for _ in range(7)]
    assert updates == [2, 2, 2, 2, 2, 2, 0]


def test_a_trail_replaced_at_the_same_size_is_reported(create: Create, home: Path, index: AuditIndex) -> None:
    """Also to a reader that has just read it."""
    change(trail := create(home / "trails"), "plan")  # which no hash can hold
    trail.flush()
    assert [index.catch_up().entries for _ in range(3)] == [2, 0, 0]
    trail.path.write_bytes(trail.path.read_bytes().replace(b"plan", b"text"))
    assert index.catch_up().redone == ()  # the hash at its end is the same: that is for audit.verify
    trail.path.write_bytes(trail.path.read_bytes()[:-8] + b'f00ff"}\n')
    assert index.catch_up().redone == ("s",)
    assert paths(index)[0] == "text"


def test_two_readers_index_each_entry_once(create: Create, home: Path, index: AuditIndex, tables: IndexTables) -> None:
    """Also if a state directory was copied with its name, so that two readers have two locks."""
    change(trail := create(home / "trails"), "a")
    trail.flush()
    entered = tables.enter_trail("here", "s")
    index.catch_up()
    with pytest.raises(StateError, match="another process"):
        tables.advance(0, entered._replace(offset=7), [], {})
    assert paths(index) == ["a"]


def test_any_trail_name_can_be_indexed(create: Create, home: Path, index: AuditIndex) -> None:
    """A name that is not UTF-8 must not block other trails."""
    change(trail := create(home / "trails"), "a")
    trail.flush()
    odd = home / "trails" / "\udcff\\.jsonl"
    odd.write_bytes(trail.path.read_bytes())
    assert [index.catch_up().entries for _ in range(2)] == [4, 0]
    assert paths(index, session=odd.stem) == ["a"]
    assert {one.value for one in index.count(IndexQuery(), GroupBy.SESSION)} == {"s", odd.stem}


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00"])
def test_a_timestamp_out_of_range_is_a_damaged_line(create: Create, home: Path, index: AuditIndex, moment: str) -> None:
    """It is shown as a line that is no entry, and causes no error."""
    trail = create(home / "trails")
    trail.event("e")
    document = json.loads(trail.path.read_bytes())
    with trail.path.open("a") as out:
        out.write(json.dumps({**document, "timestamp": moment, "seq": 0}) + "\n")
    assert index.catch_up().entries == 2
    assert [each.entry.operation for each in index.changes(IndexQuery())] == ["e", UNREADABLE]


def test_doubled_and_damaged_lines_are_indexed(create: Create, home: Path, tables: IndexTables) -> None:
    """They are shown unchanged, in any read."""
    trail = create(home / "trails")
    change(trail, "a")
    trail.flush()
    raw = trail.path.read_bytes()
    huge = raw.replace(b'"seq":1,', b'"seq":99999999999999999999999,').replace(b'"intent":1', b'"intent":1e999')
    trail.path.write_bytes(raw + b"{}\n\xff\x00\n" + raw + raw.replace(b'"intent":1', b'"intent":[]') + huge)
    index = AuditIndex(home, "here", tables, batch=1)
    assert index.catch_up().entries == 10
    found = list(index.changes(IndexQuery()))
    assert sum(1 + (each.outcome is not None) for each in found) == 10
    assert sum(each.entry.operation == UNREADABLE for each in found) == 2


_ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(["intent", "outcome", "denied", "repeated", "alert"]),
        st.integers(1, 30),
        st.text("ab/é\udcff\\\n", max_size=4),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(entries=_ENTRIES, at_once=st.integers(1, 7), cuts=st.lists(st.integers(0, 30), max_size=3))
def test_the_index_equals_the_trail_for_reads_of_any_size(
    tmp_path_factory: pytest.TempPathFactory,
    entries: list[tuple[str, int, str]],
    at_once: int,
    cuts: list[int],
) -> None:
    """After a rebuild it is the same."""
    home = tmp_path_factory.mktemp("home")
    (home / "trails").mkdir()
    with creating() as create:
        trail = create(home / "trails")
        for kind, number, path in entries:
            match kind:
                case "intent":
                    trail.intent(Operation.WRITE_FILE, path, "modify", "r")
                case "outcome":
                    trail.outcome(number, Operation.WRITE_FILE, path, error=number % 2)
                    trail.flush()
                case "denied":
                    trail.denial(DENIED._replace(path=WorkspacePath(path)), "create")
                case "repeated":
                    trail.denial_repeats(number, DENIED, number)
                case _:
                    trail.alert("look", path=path)
    whole = trail.path.read_bytes()
    expected = joined(read(trail.path))
    lines = whole.splitlines(keepends=True)
    tables = IndexTables(sqlite_engine(home / "index.db"))
    index = AuditIndex(home, "here", tables, batch=at_once)
    for cut in sorted(cuts):
        trail.path.write_bytes(b"".join(lines[:cut]))
        index.catch_up()
    trail.path.write_bytes(whole)
    index.catch_up()

    def held() -> list[RecordedChange]:
        return sorted(index.changes(IndexQuery()), key=lambda each: each.entry.seq)

    assert held() == expected
    index.rebuild()
    assert held() == expected
    tables.close()


@settings(deadline=None)
@given(st.text(st.characters()))
def test_every_text_has_one_encoding_in_the_tables(text: str) -> None:
    """It is ASCII and can be decoded."""
    stored = encode_text(text)
    assert stored.isascii()
    assert "\0" not in stored
    assert decode_text(stored) == text


def test_a_killed_reader_neither_loses_nor_doubles_an_entry(create: Create, home: Path, index: AuditIndex) -> None:
    """The cursor moves in the transaction of the rows. The test kills the reader at every step."""
    trail = create(home / "trails")
    for number in range(3000):
        change(trail, f"d{number % 7}/f{number}")
    trail.close()
    program = """
import sys
from pathlib import Path
from bonobofs.audit import index
from bonobofs.audit.index_store import open_tables
index.ENTRIES_AT_ONCE = 50
home = Path(sys.argv[1])
def may_continue():
    print("on", flush=True)
    return True
index.Index(home, "here", open_tables(home)).catch_up(may_continue)
"""
    for rounds in (3, 20, 9):
        with subprocess.Popen(
            [sys.executable, "-c", program, home], stdout=subprocess.PIPE, env=environment(), text=True
        ) as reader:
            assert reader.stdout is not None
            for _ in range(rounds):
                reader.stdout.readline()
            os.kill(reader.pid, signal.SIGKILL)
    index.catch_up()
    assert [each.entry.path for each in index.changes(IndexQuery())] == [
        each.entry.path for each in joined(read(trail.path))
    ]
    assert index.catch_up().entries == 0


def test_the_index_follows_a_hundred_growing_trails(create: Create, home: Path, index: AuditIndex) -> None:
    """Any subset of them has grown since the last read."""
    trails = [create(home / "trails", f"s{number:03}") for number in range(100)]
    for turn in range(5):
        for trail in trails[turn::3]:
            change(trail, f"f{turn}")
            trail.flush()
        index.catch_up()
    assert index.catch_up().entries == 0
    for trail in trails:
        found = list(index.changes(IndexQuery(session=trail.identity.session)))
        assert found == joined(read(trail.path))


def test_a_rebuild_during_writes_has_each_entry_once(create: Create, home: Path, tables: IndexTables) -> None:
    """A daemon updates the index at the same time."""
    trails = [create(home / "trails", name) for name in "abc"]
    ended = threading.Event()

    def write() -> None:
        for number in range(1000):
            for trail in trails:
                change(trail, f"f{number}")

    def keep_up() -> None:
        mine = AuditIndex(home, "here", tables)
        while not ended.wait(0.1):
            mine.catch_up()

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(write), pool.submit(keep_up)]
        for _ in range(5):
            AuditIndex(home, "here", tables).rebuild()
        ended.set()
        for each in working:
            each.result()
    for trail in trails:
        trail.flush()
    index = AuditIndex(home, "here", tables)
    index.catch_up()
    for trail in trails:
        assert list(index.changes(IndexQuery(session=trail.identity.session))) == joined(read(trail.path))


def test_tables_of_another_version_are_rebuilt(
    create: Create, home: Path, index: AuditIndex, tables: IndexTables
) -> None:
    """They are derived from the trails, so no data is lost."""
    change(trail := create(home / "trails"), "a")
    trail.flush()
    index.catch_up()
    with tables.engine.begin() as connection:
        connection.execute(SCHEMA.update().values(version=0))
        connection.exec_driver_sql("ALTER TABLE index_changes DROP COLUMN outcome")
    tables = IndexTables(tables.engine)
    anew = AuditIndex(home, "here", tables)
    assert paths(anew) == []
    anew.catch_up()
    assert paths(anew) == ["a"]


def test_concurrent_processes_may_create_the_tables(home: Path, tables: IndexTables) -> None:
    """For instance a daemon and a query on a new state directory."""
    with tables.engine.begin() as connection:
        METADATA.drop_all(connection)
    with ThreadPoolExecutor(8) as pool:
        for made in pool.map(lambda _: open_tables(home), range(8)):
            made.close()
    assert AuditIndex(home, "here", tables).catch_up().entries == 0


def test_an_invalid_index_is_a_one_line_error(home: Path) -> None:
    """The line names what can be read without it."""
    (home / "index.db").write_bytes(b"something else, longer than the header of a database" * 100)
    with pytest.raises(StateError, match=r"cannot be used: .*audit tail.*--rebuild"):
        IndexTables(sqlite_engine(home / "index.db"))


def test_a_damaged_index_can_be_rebuilt(create: Create, home: Path) -> None:
    """Whether the damage is found at the opening or later."""
    change(trail := create(home / "trails"), "a")
    trail.flush()
    with session.open_index(home) as index:
        index.catch_up()
    whole = (home / "index.db").read_bytes()
    for damaged in (b"something else" * 1000, whole[:4096] + b"\xff" * (len(whole) - 4096)):
        for path in home.glob("index.db*"):
            path.unlink()
        (home / "index.db").write_bytes(damaged)
        assert session.rebuild_index(home).entries == 2
        with session.open_index(home) as index:
            assert paths(index) == ["a"]


def test_an_older_version_keeps_the_index_of_a_newer_one(
    home: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise hosts that share it would drop each other's tables in turn."""
    monkeypatch.setenv("BONOBOFS_DATABASE", postgres.make_database())
    tables = open_tables(home)
    with tables.engine.begin() as connection:
        connection.execute(SCHEMA.update().values(version=1000))
    with pytest.raises(StateError, match="use the newer bonobofs"):
        open_tables(home)
    tables.close()


def test_every_index_column_has_a_comment() -> None:
    """The schema is explained where it is made."""
    assert all(column.comment for table in (SCHEMA, TRAILS, CHANGES) for column in table.columns)


def test_two_state_directories_may_share_an_index(
    create: Create, home: Path, index: AuditIndex, tables: IndexTables, tmp_path: Path
) -> None:
    """Each removes and rebuilds only the rows of its own trails. A query covers both."""
    there = tmp_path / "there"
    (there / "trails").mkdir(parents=True)
    other = AuditIndex(there, "there", tables)
    change(one := create(home / "trails"), "one")
    change(two := create(there / "trails", "t"), "two")
    one.flush()
    two.flush()
    index.catch_up()
    other.catch_up()
    index.rebuild()
    assert sorted(paths(index)) == sorted(paths(other)) == ["one", "two"]
    assert len(trails_in(there / "trails")) == 1
    assert json.loads(two.path.read_bytes().splitlines()[0])["path"] == "two"


def test_the_cursor_survives_the_compression_of_a_trail(index: AuditIndex, home: Path, create: Create) -> None:
    trail = create(home / "trails")
    for number in range(300):
        change(trail, f"{number}.md")
    trail.flush()
    assert index.catch_up().entries == 600
    trail.close()
    compress(trail.path)
    assert index.catch_up() == (1, (), ())
    assert index.catch_up() == (0, (), ())
    assert index.rebuild().entries == 601
    assert len(paths(index, operation="create_file")) == 300
