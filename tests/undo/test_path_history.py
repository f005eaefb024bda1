"""The history of a path is the same from the index, from a part of it, and from the trails alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import read
from bonobofs.audit.trail_storage import compress
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.session import change_history, undo_service
from bonobofs.state.home import head_path, trail_path
from bonobofs.undo.changes import Change, Selection, change_id, changes_of
from bonobofs.undo.difference import differences
from bonobofs.undo.path_history import PathQuery, find_changes
from tests.support.commands import environment
from tests.support.mount_fixtures import MakePlace
from tests.support.postgres import Postgres
from tests.support.random_changes import DIRECTORIES, NAMES, change_at_random, make_tree
from tests.support.recorded_changes import path_of, record
from tests.support.world import bonobofs

POLICY = 'default = "allow"\nhidden = ["**"]\n[[keep]]\npaths = ["e/f/a"]\n[[protect]]\npaths = ["d/kept"]\n'
PATHS = ("", *NAMES, *DIRECTORIES, "a.new", "d/kept", "none")


def index_now(home: Path) -> None:
    session.flush_servers(home)
    with session.open_index(home) as index:
        index.catch_up()


def scanned(home: Path, names: list[str], path: str) -> list[Change]:
    """The history of a path and all below it, the simplest way there is."""
    found: list[tuple[datetime, str, int, Change]] = []
    for name in names:
        trail = trail_path(home, name)
        known = {change.entry.seq: change for change in changes_of(trail)}
        latest, turn = datetime.fromtimestamp(0, UTC), (0, "")
        for entry in read(trail):
            latest = max(latest, entry.timestamp)
            if (entry.kind, entry.operation) == ("event", "turn"):
                turn = entry.seq, entry.details["name"]
            if (entry.kind == "intent" or entry.operation == "out_of_band") and concerns(entry, path):
                found.append((latest, name, entry.seq, known.get(entry.seq, Change(entry, None, *turn))))
    return [change for *_, change in sorted(found, key=lambda each: each[:3])]


def concerns(entry: AuditEntry, path: str) -> bool:
    parts = path.split("/") if path else []
    for name in (entry.path, entry.details.get("to"), entry.details.get("from")):
        names = str(name).split("/") if name is not None else None
        if names is None or (name == "" and path):
            continue
        if names[: len(parts)] == parts or (entry.operation == "rename" and parts[: len(names)] == names):
            return True
    return False


def assert_same(home: Path, names: list[str], paths: tuple[str, ...], mosts: tuple[int | None, ...]) -> None:
    for path in paths:
        expected = scanned(home, names, path)
        for most in mosts:
            found = find_changes(home, names, PathQuery({path}, path), most).changes
            assert found == expected[-(most or len(expected) + 1) :], (path, most)


def assert_same_differences(home: Path, source: Path, rng: random.Random) -> None:
    """`diff --path` and `show` say what they say with all changes of the source at hand."""
    images, changes = change_history.images_of(home, str(source)), undo_service.changes_of_source(home, str(source))
    for path in PATHS:
        selected = Selection(path=path, since=rng.choice((None, rng.choice(changes).entry.timestamp)))
        expected = differences(source, images, [each for each in changes if each in selected], changes)
        assert undo_service.differences_of(home, str(source), selected) == expected
    for change in rng.sample(changes, 20):
        lines = [line for each in differences(source, images, [change], changes) for line in each.unified()]
        shown = undo_service.show(home, change.id)
        assert (shown["diff"], shown["turn"].split(" ")[0]) == (lines, change_id(change.entry.session, change.turn))


def spoil(home: Path) -> list[Callable[[], object]]:
    """Make the index unusable in several ways, from the mildest on."""
    index = home / "index.db"

    def truncate() -> None:
        os.truncate(index, index.stat().st_size // 2)

    def overwrite() -> None:
        index.write_bytes(b"garbage" * 1000)

    def take_away() -> None:
        for file in home.glob("index.db*"):
            file.unlink()

    return [truncate, overwrite, take_away]


@pytest.mark.parametrize("seed", range(3))
def test_the_index_and_the_trails_answer_alike(own_place: MakePlace, tmp_path: Path, seed: int) -> None:
    """Two agents change the same tree: creates, writes, renames, links, exchanges, refusals, external changes."""
    rng = random.Random(seed)
    source = tmp_path / "source"
    source.mkdir()
    make_tree(source)
    (source / "d/kept").touch()
    places = [own_place(policy=POLICY), own_place(policy=POLICY)]
    home, names = places[0].home, [place.session.session for place in places]
    for number in range(90):
        place = rng.choice(places)
        change_at_random(place.path, rng)
        if number % 20 == 7:
            assert bonobofs("mark", f"turn {number}", cwd=place.path).returncode == 0
        if number % 25 == 9:
            subprocess.run("rm -f d/kept e/f/a", shell=True, cwd=place.path, capture_output=True, check=False)
        if number == rng.choice((30, 60)):
            index_now(home)
    session.flush_servers(home)
    assert_same(home, names, PATHS, (None, 3))
    index_now(home)
    assert_same(home, names, PATHS, (None, 1, 50))
    assert find_changes(home, names, PathQuery({"a"}, "a")).unindexed == 0
    assert_same_differences(home, source, rng)
    for place in places:
        place.umount()
        compress(place.trail)
    assert_same(home, names, PATHS, (None, 4))
    for do in spoil(home):
        do()
        assert_same(home, names, PATHS, (5,))
    assert_same_differences(home, source, rng)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize("seed", range(4))
def test_an_index_that_is_behind_answers_as_the_trails(
    home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, seed: int, database: str
) -> None:
    """Outcomes come late or never, clocks go back and agree, contents are lost, lines are damaged, trails replaced."""
    if database == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        monkeypatch.setenv("BONOBOFS_DATABASE", server.make_database())
    rng = random.Random(seed)
    names = [f"s{number}" for number in range(4)]
    trails = {name: _trail(home, name) for name in (*names, "of another source")}
    intents: dict[Trail, list[int]] = {trail: [] for trail in trails.values()}
    index_at = rng.sample(range(300), 3)
    for number in range(300):
        trail = trails[rng.choice(list(trails))]
        _append(trail, intents[trail], rng)
        if number in index_at:
            index_now(home)
        if number == 250:
            trails["s2"].close()
            compress(trails["s2"].path)
            trails["s2"] = trails["s0"]
    for trail in trails.values():
        trail.flush()
    with trails["s1"].path.open("ab") as out:
        out.write(b'garbage\n{"timestamp":')
    paths = ("", "a", "é", "d", "d/\udcff", "d/\\", "d/b*", "other")
    assert_same(home, names, paths, (None, 2, 10))
    replaced = trails["s3"].path
    replaced.write_bytes(b"".join(replaced.read_bytes().splitlines(keepends=True)[:-20:2]))
    trails["s0"].close()
    trails["s0"].path.unlink()
    assert_same(home, names[1:], paths, (None, 2))
    assert find_changes(home, names, PathQuery({"a"}, "a")) == find_changes(home, names[1:], PathQuery({"a"}, "a"))
    for trail in trails.values():
        trail.close()


def _trail(home: Path, name: str) -> Trail:
    moment = iter(range(10**18, 10**18 + 10**15, 10**9))
    identity = TrailIdentity(name, "alice", "id")
    return Trail.create(trail_path(home, name), head_path(home, name), identity, clock=lambda: next(moment))


def _append(trail: Trail, intents: list[int], rng: random.Random) -> None:
    """Append an entry. `intents` are the numbers of the intents in the trail."""

    def path() -> str:
        return rng.choice(("", "d/", "d/e/")) + rng.choice(("a", "é", "\udcff", "\\", "b*", "😀"))

    def intend(operation: str, path: str, **details: str) -> int:
        intents.append(trail.intent(operation, path, "modify", "work", details=details))
        return intents[-1]

    kind = rng.randrange(12) if intents else 0
    if kind < 5:
        seq = intend("write_file", name := path())
        if kind < 3:
            trail.outcome(seq, "write_file", path() if kind else name, error=rng.choice((0, 28)), bytes=9)
    elif kind == 5:
        intend("rename", rng.choice((path(), "d", "d/e")), to=rng.choice((path(), "other")))
    elif kind == 6:
        trail.outcome(rng.choice(intents), "write_file", path())
    elif kind == 7:
        trail.begin_turn(rng.choice(("", "é", "two words")), "mark")
    elif kind == 8:
        trail.event("content_lost", {"change": rng.choice(intents), "not_kept": "the disk is full"})
    elif kind == 9:
        trail.event("out_of_band", {"what": "appeared"}, path=path())
    else:
        moment = datetime.fromtimestamp(10**9, UTC) + timedelta(seconds=rng.randrange(10**6))
        result = rng.choice(("denied", "allowed"))
        what = rng.choice(("intent", "event", "alert"))
        entry = AuditEntry(moment, "file", "link", "alice", {"from": path()}, result, None, kind=what, path=path())
        trail.append(entry)


def test_a_history_loads_no_database_library(own_place: MakePlace, tmp_path: Path) -> None:
    """It takes as long to load as a history may take."""
    (tmp_path / "source").mkdir()
    place = own_place()
    (place.path / "a").write_text("one")
    index_now(place.home)
    program = (
        "import sys; from bonobofs.cli import main; main(['history', sys.argv[1], '--json']);"
        "print({'sqlalchemy', 'pydantic', 'pygit2', 'rich'} & set(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, str(place.path / "a")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=60)
    (change,) = json.loads(done.stdout)
    assert change["operation"] == "create_file"
    assert datetime.fromisoformat(change["time"]).utcoffset() == timedelta(0)
    shown = json.loads(bonobofs("show", change["change"], "--json").stdout)
    assert shown["time"] == change["time"]
    local = datetime.fromisoformat(change["time"]) + timedelta(hours=7, minutes=30)
    for words in (("history", str(place.path / "a")), ("show", change["change"])):
        assert f"{local:%Y-%m-%d %H:%M:%S}" in bonobofs(*words, env={"TZ": "UTC-07:30"}).stdout
    assert done.stderr == "set()\n"


def test_a_history_far_behind_the_index_brings_it_up_to_date(home: Path, tmp_path: Path) -> None:
    """It answers from the trails first; later calls read less of them."""
    names = record(home, tmp_path, 8_000)
    path = tmp_path / path_of(0)
    query = PathQuery({path_of(0)}, path_of(0))
    unindexed = [find_changes(home, names, query).unindexed]
    shown = []
    while unindexed[-1] > 8 << 20:
        done = bonobofs("history", path, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        shown.append(done.stdout)
        unindexed.append(find_changes(home, names, query).unindexed)
        assert unindexed[-1] < unindexed[-2]
    assert set(shown) == {bonobofs("history", path, "--json").stdout}
    index_now(home)
    assert_same(home, names, ("", "tree", "tree/package1", path_of(0)), (50,))
    assert bonobofs("audit", "verify").returncode == 0


def test_a_damaged_index_is_reported_and_the_answer_stays(home: Path, tmp_path: Path) -> None:
    record(home, tmp_path, 8_000)
    path = tmp_path / path_of(0)
    expected = bonobofs("history", path, "--json").stdout
    (home / "index.db").write_bytes(b"garbage" * 1000)
    done = bonobofs("history", path, "--json")
    assert (done.returncode, done.stdout) == (0, expected)
    assert "audit index --rebuild" in done.stderr
    assert bonobofs("audit", "index", "--rebuild").returncode == 0
    assert bonobofs("history", path, "--json").stdout == expected
