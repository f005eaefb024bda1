"""Attacks on the record: a user with access to the state directory can damage it, but every damage is found."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest

from bonobofs import session
from bonobofs.audit.entry import AuditEntry, body_of
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.cli.audit import verify_
from tests.attacks.ground import build
from tests.support.syscalls import append, make
from tests.support.users import run_in_child
from tests.support.wait import until
from tests.support.world import Mounted, World, bonobofs, plain

Lines = list[bytes]


class Kept(NamedTuple):
    """A state directory with one session that has ended, and the name of that."""

    home: Path
    session: str


@pytest.fixture(scope="module", params=["unmounted", "killed"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    top = tmp_path_factory.mktemp("log")
    for name in ("source", "mount"):
        (top / name).mkdir()
    build(top / "source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BONOBOFS_HOME", str(top / "home"))
        home = session.home()
        world = World(
            home, session.start(home, session.MountRequest(top / "source", top / "mount", agent="alice")).session
        )
        for number in range(6):
            run_in_child(make, world.path / f"aidlc-docs/{number}.md", b"text")
        session.flush_servers(home)
        if request.param == "killed":
            world.kill()
        assert world.clear() == []
    return Kept(home, world.session.session)


def _verify(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Exit code of `audit verify`, and what was done to the one session's record."""
    monkeypatch.setenv("BONOBOFS_HOME", str(home))
    code = verify_(json=True)
    (report,) = json.loads(capsys.readouterr().out)
    return code, [finding["what"] for finding in report["findings"]]


def _entry(line: bytes, **changes: object) -> AuditEntry:
    return AuditEntry.from_line(line)._replace(**changes)  # type: ignore[arg-type] # the tests' own changes


def _sealed(entry: AuditEntry, seq: int, prev: str) -> bytes:
    """An entry as the trail would have written it, with a hash that is right."""
    text = f'{body_of(entry)}{seq},"prev":"{prev}"'
    return f'{text},"hash":"{sha256(text.encode()).hexdigest()}"}}\n'.encode()


def _cut_the_tail(lines: Lines) -> Lines:
    return lines[:-2]


def _cut_the_middle(lines: Lines) -> Lines:
    return lines[:3] + lines[5:]


def _cut_the_beginning(lines: Lines) -> Lines:
    return lines[2:]


def _empty(lines: Lines) -> Lines:
    return []


def _append_a_copy(lines: Lines) -> Lines:
    return [*lines, lines[3]]


def _append_what_is_no_entry(lines: Lines) -> Lines:
    return [*lines, b'{"kind":"intent","result":"allowed"}\n']


def _edit(lines: Lines) -> Lines:
    return [*lines[:4], lines[4].replace(b'"agent":"alice"', b'"agent":"mallo"'), *lines[5:]]


def _set_the_clock_back_in_an_entry(lines: Lines) -> Lines:
    return [*lines[:4], lines[4].replace(b'"timestamp":"2', b'"timestamp":"1'), *lines[5:]]


def _edit_and_seal(lines: Lines) -> Lines:
    entry = _entry(lines[4])
    return [*lines[:4], _sealed(entry._replace(path="aidlc-docs/innocent.md"), entry.seq, entry.prev), *lines[5:]]


def _rewrite_the_rest(lines: Lines) -> Lines:
    done = lines[:4]
    prev = _entry(lines[3]).hash
    for seq, line in enumerate(lines[5:], 5):
        done.append(_sealed(_entry(line), seq, prev))
        prev = _entry(done[-1]).hash
    return done


def _swap(lines: Lines) -> Lines:
    return [*lines[:3], lines[4], lines[3], *lines[5:]]


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (_cut_the_tail, {"tail"}),
        (_cut_the_middle, {"missing"}),
        (_cut_the_beginning, {"missing"}),
        (_empty, {"tail"}),
        (_append_a_copy, {"added"}),
        (_append_what_is_no_entry, {"added", "changed"}),
        (_edit, {"changed"}),
        (_set_the_clock_back_in_an_entry, {"changed"}),
        (_edit_and_seal, {"changed"}),
        (_rewrite_the_rest, {"orphan", "tail"}),
        (_swap, {"moved"}),
    ],
)
def test_every_manipulation_of_a_record_is_found(
    kept: Kept,
    tmp_path: Path,
    spoil: Callable[[Lines], Lines],
    what: set[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`audit verify` fails and names the manipulation."""
    home = tmp_path / "spoilt"
    shutil.copytree(kept.home, home, ignore=shutil.ignore_patterns("guard.sock"))
    assert _verify(home, capsys, monkeypatch) == (0, [])
    trail = plain(home / "trails" / f"{kept.session}.jsonl")
    trail.write_bytes(b"".join(spoil(trail.read_bytes().splitlines(keepends=True))))
    code, found = _verify(home, capsys, monkeypatch)
    assert code == 1
    assert found[0] in what


@pytest.mark.parametrize("gone", [("jsonl",), ("head",), ("jsonl", "head")], ids=["trail", "head", "both"])
def test_a_removed_record_is_found(
    kept: Kept,
    tmp_path: Path,
    gone: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session is known, so its missing record is reported."""
    home = tmp_path / "spoilt"
    shutil.copytree(kept.home, home, ignore=shutil.ignore_patterns("guard.sock"))
    plain(home / "trails" / f"{kept.session}.jsonl")
    for suffix in gone:
        (home / "trails" / f"{kept.session}.{suffix}").unlink()
    code, found = _verify(home, capsys, monkeypatch)
    assert code == 1
    assert found[0] == ("head" if gone == ("head",) else "trail")


def _forge(world: World) -> None:
    last = _entry(world.trail.read_bytes().splitlines(keepends=True)[-1])
    append(world.trail, _sealed(last._replace(path="forged"), last.seq + 1, last.hash))


def _truncate(world: World) -> None:
    os.truncate(world.trail, 0)


def _cut(world: World) -> None:
    os.truncate(world.trail, world.trail.stat().st_size - 20)


@pytest.mark.parametrize("spoil", [_forge, _truncate, _cut])
def test_a_record_damaged_during_the_session_is_found(
    mounted: Mounted, source: Path, spoil: Callable[[World], None]
) -> None:
    """The session and its policy go on. At the end, the record fails verification."""
    build(source)
    world = mounted()
    run_in_child(make, world.path / "aidlc-docs/before.md", b"text")
    session.flush_servers(world.home)
    spoil(world)
    run_in_child(make, world.path / "aidlc-docs/after.md", b"text")
    with pytest.raises(PermissionError):
        run_in_child(make, world.path / "src/after.md")
    world.umount()
    assert bonobofs("audit", "verify").returncode == 1


def _log(world: World) -> str:
    return (world.home / "sessions" / world.session.session / "server.log").read_text()


def _replace(*suffixes: str) -> Callable[[Path, Path], None]:
    def replace(trails: Path, copies: Path) -> None:
        for suffix in suffixes:
            (copy,) = copies.glob(f"*.{suffix}")
            copy.rename(trails / copy.name)

    return replace


def _remove(trails: Path, _: Path) -> None:
    shutil.rmtree(trails)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [(_replace("jsonl", "head"), 1), (_replace("jsonl"), 1), (_replace("head"), 0), (_remove, 1)],
    ids=["both replaced", "trail replaced", "head replaced", "both removed"],
)
def test_a_session_whose_record_is_removed_or_replaced_makes_no_more_changes(
    mounted: Mounted, source: Path, spoil: Callable[[Path, Path], None], code: int
) -> None:
    """At most the changes of one second lack their record, and `audit verify` reports these entries as missing."""
    build(source)
    world = mounted()
    trails = world.home / "trails"
    run_in_child(make, world.path / "aidlc-docs/before.md", b"text")
    session.flush_servers(world.home)
    copies = shutil.copytree(trails, world.home / "copies")
    run_in_child(make, world.path / "aidlc-docs/middle.md", b"text")
    spoil(trails, copies)
    until(lambda: "another program removed or replaced this file or its head" in _log(world), "the server sees it")
    with pytest.raises(OSError, match="Input/output error"):
        run_in_child(make, world.path / "aidlc-docs/after.md", b"text")
    assert not (source / "aidlc-docs/after.md").exists()
    world.umount()
    assert bonobofs("audit", "verify").returncode == code


def test_an_idle_session_notices_that_its_record_was_replaced(mounted: Mounted, source: Path) -> None:
    """Its next change is refused, so no change lacks its record."""
    build(source)
    world = mounted()
    trails = world.home / "trails"
    session.flush_servers(world.home)
    _replace("jsonl", "head")(trails, shutil.copytree(trails, world.home / "copies"))
    until(lambda: "start a new one, and run bonobofs audit verify" in _log(world), "the server sees it")
    with pytest.raises(OSError, match="Input/output error"):
        run_in_child(make, world.path / "aidlc-docs/after.md", b"text")
    world.umount()
    assert bonobofs("audit", "verify").returncode == 0


def test_a_clock_set_back_does_not_break_the_record(home: Path) -> None:
    """Entries are ordered by number, independent of the clock."""
    name = "00000000-0000-4000-8000-000000000000"
    trail = Trail.create(
        home / "trails" / f"{name}.jsonl", home / "trails" / f"{name}.head", TrailIdentity(name, "al", "id")
    )
    moment = datetime(2031, 5, 1, tzinfo=UTC)
    for number in range(10):
        at = moment - timedelta(days=400 * number)
        trail.append(AuditEntry(at, "file", "note", "al", {}, "allowed", None, path=f"{number}.md"))
    trail.close()
    assert bonobofs("audit", "verify").returncode == 0
    shown = [json.loads(line) for line in bonobofs("audit", "tail", "--json").stdout.splitlines()]
    assert {entry["path"] for entry in shown if entry["operation"] == "note"} == {f"{n}.md" for n in range(10)}
    assert len(json.loads(bonobofs("audit", "query", "--operation", "note", "--json").stdout)) == 10
