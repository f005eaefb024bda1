"""Every change of a trail is found, and the report names the first affected entry and the change."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bonobofs.audit.temp_cleanup import stray_name
from bonobofs.audit.verify import Damage, TrailReport, TrailStatus, describe_below, read_head, verify, verify_trail
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.errors import TrailError
from bonobofs.policy.request import Operation
from tests.support.commands import environment

Lines = list[bytes]

LENGTH = 10
"""Entries of the trail that is tampered with, its closing entry among them."""

places = st.integers(min_value=0, max_value=LENGTH - 1)


def write_trail(directory: Path, session: str = "s", *, closed: bool = True) -> Trail:
    trail = Trail.create(
        directory / f"{session}.jsonl", directory / f"{session}.head", TrailIdentity(session, "alice", "id")
    )
    for number in range((LENGTH - 1) // 2):
        path = f"aidlc-docs/{session}{number}.md"
        seq = trail.intent(Operation.CREATE_FILE, path, "create", "artifacts", details={"pid": number})
        trail.outcome(seq, Operation.CREATE_FILE, path, bytes=number)
    trail.event("note")
    trail.sync()
    if closed:
        trail.close()
    return trail


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Hold a closed trail of LENGTH entries and its head."""
    made = tmp_path / "trails"
    made.mkdir()
    write_trail(made)
    return made


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold the same for many tamperings; each writes its own copy."""
    made = tmp_path_factory.mktemp("kept")
    write_trail(made)
    return made


def examine(directory: Path) -> TrailReport:
    return verify_trail(directory / "s.jsonl", directory / "s.head", session="s")


def lines_of(directory: Path) -> Lines:
    return (directory / "s.jsonl").read_bytes().splitlines(keepends=True)


def tampered(kept: Path, lines: Lines) -> TrailReport:
    copy = kept / "copy.jsonl"
    copy.write_bytes(b"".join(lines))
    return verify_trail(copy, kept / "s.head", session="s")


def first(report: TrailReport) -> tuple[Damage, int | None]:
    assert report.findings, "it was not found"
    return report.findings[0].what, report.findings[0].seq


def rehashed(line: bytes, **fields: Any) -> bytes:
    """A line with some of its fields changed, that agrees with its own hash."""
    document = json.loads(line) | fields
    del document["hash"]
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    return body + b',"hash":"' + sha256(body).hexdigest().encode() + b'"}\n'


def hash_of(line: bytes) -> str:
    return str(json.loads(line)["hash"])


def test_an_unchanged_trail_has_no_finding(directory: Path) -> None:
    report = examine(directory)
    assert (report.entries, report.findings, report.unfinished) == (LENGTH, [], [])
    assert (report.status, report.torn) == ("closed", False)


def test_every_change_of_a_single_byte_names_the_entry(kept: Path) -> None:
    lines = lines_of(kept)
    for number, line in enumerate(lines):
        for place in range(len(line) - 1):
            changed = bytearray(line)
            changed[place] ^= 1
            report = tampered(kept, [*lines[:number], bytes(changed), *lines[number + 1 :]])
            assert first(report) == (Damage.CHANGED, number + 1), (number, place)


@given(place=places, byte=st.integers(0, 255).filter(lambda byte: byte != 10))
def test_every_change_of_a_newline_is_found(kept: Path, place: int, byte: int) -> None:
    lines = lines_of(kept)
    lines[place] = lines[place][:-1] + bytes([byte])
    what, seq = first(tampered(kept, lines))
    if place < LENGTH - 1:
        assert (what, seq) == (Damage.CHANGED, place + 1)
    else:
        assert what in (Damage.ADDED, Damage.TAIL)


@given(start=places, count=st.integers(1, LENGTH))
def test_missing_entries_are_named_by_the_first_of_them(kept: Path, start: int, count: int) -> None:
    lines = lines_of(kept)
    at_end = start + count >= LENGTH
    report = tampered(kept, lines[:start] + lines[start + count :])
    assert first(report) == (Damage.TAIL if at_end else Damage.MISSING, start + 1)


@given(one=places, other=places)
def test_two_exchanged_entries_are_named_as_moved(kept: Path, one: int, other: int) -> None:
    lines = lines_of(kept)
    if one != other:
        lines[one], lines[other] = lines[other], lines[one]
        what, seq = first(tampered(kept, lines))
        assert what is Damage.MOVED
        assert seq in (one + 1, other + 1)


@given(origin=places, target=places)
def test_a_moved_entry_is_named(kept: Path, origin: int, target: int) -> None:
    lines = lines_of(kept)
    if origin != target:
        line = lines.pop(origin)
        lines.insert(target, line)
        what, seq = first(tampered(kept, lines))
        assert what is Damage.MOVED
        # Of two neighbours either may be said to have moved.
        assert seq == origin + 1 or (abs(origin - target) == 1 and seq == target + 1)


@given(origin=places, target=st.integers(0, LENGTH))
def test_a_copied_entry_is_named_as_added(kept: Path, origin: int, target: int) -> None:
    lines = lines_of(kept)
    lines.insert(target, lines[origin])
    report = tampered(kept, lines)
    assert report.findings[0].what is Damage.ADDED
    assert report.findings[0].line in (target + 1, *((target + 2,) if origin == target else ()))


@given(target=places, junk=st.sampled_from([b"\n", b"{}\n", b"[[[[\n", b"\0\xff\n", b'{"timestamp":"now"}\n']))
def test_an_invalid_line_is_named_as_added(kept: Path, target: int, junk: bytes) -> None:
    lines = lines_of(kept)
    lines.insert(target, junk)
    report = tampered(kept, lines)
    assert (report.findings[0].what, report.findings[0].line) == (Damage.ADDED, target + 1)


@given(target=st.integers(1, LENGTH - 1), linked=st.booleans(), operation=st.sampled_from(["note", "close"]))
def test_a_forged_entry_is_named_as_added_even_if_it_links_to_its_predecessor(
    kept: Path, target: int, linked: bool, operation: str
) -> None:
    lines = lines_of(kept)
    prev = hash_of(lines[target - 1]) if linked else "f" * 64
    forged = rehashed(lines[target], prev=prev, seq=target + 1, path="forged", kind="event", operation=operation)
    lines.insert(target, forged)
    report = tampered(kept, lines)
    assert (report.findings[0].what, report.findings[0].line) == (Damage.ADDED, target + 1)


@given(place=places)
def test_an_entry_of_another_session_is_named_as_added(kept: Path, place: int) -> None:
    lines = lines_of(kept)
    foreign = [rehashed(line, session="other") for line in lines]
    lines.insert(place, foreign[place])
    report = tampered(kept, lines)
    assert (report.findings[0].what, report.findings[0].line) == (Damage.ADDED, place + 1)


@given(place=st.integers(0, LENGTH - 2))
def test_a_changed_entry_with_a_new_hash_is_found_by_its_successor(kept: Path, place: int) -> None:
    lines = lines_of(kept)
    lines[place] = rehashed(lines[place], path="elsewhere")
    assert first(tampered(kept, lines)) == (Damage.CHANGED, place + 1)


def test_a_changed_last_entry_with_a_new_hash_is_found_by_the_head(kept: Path) -> None:
    lines = lines_of(kept)
    lines[-1] = rehashed(lines[-1], agent="bob")
    assert first(tampered(kept, lines)) == (Damage.CHANGED, LENGTH)


@given(place=places)
def test_a_rewritten_suffix_is_found_by_the_head(kept: Path, place: int) -> None:
    lines = lines_of(kept)
    lines[place] = rehashed(lines[place], path="elsewhere")
    for number in range(place + 1, LENGTH):
        lines[number] = rehashed(lines[number], prev=hash_of(lines[number - 1]))
    assert first(tampered(kept, lines)) == (Damage.CHANGED, LENGTH)


def test_an_entry_after_the_closing_entry_is_named_as_added(kept: Path) -> None:
    lines = lines_of(kept)
    lines.append(rehashed(lines[1], seq=LENGTH + 1, prev=hash_of(lines[-1])))
    report = tampered(kept, lines)
    assert first(report) == (Damage.ADDED, LENGTH + 1)
    assert "closing" in report.findings[0].message


def test_a_trail_replaced_by_that_of_another_session_is_found(directory: Path) -> None:
    for suffix in ("jsonl", "head"):
        (directory / f"s.{suffix}").rename(directory / f"t.{suffix}")
    (report,) = verify(directory)
    assert first(report) == (Damage.CHANGED, 1)


def test_every_change_of_the_head_is_found(directory: Path) -> None:
    head = directory / "s.head"
    original = head.read_bytes()
    settled = slice(original.index(b'"settled":"') + 11, original.index(b'"}'))
    for place in range(len(original)):
        if place not in range(settled.start, settled.stop):
            changed = bytearray(original)
            changed[place] ^= 1
            head.write_bytes(changed)
            assert examine(directory).findings, place


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        (["s.jsonl"], {Damage.TRAIL: "s.jsonl is missing"}),
        (["s.head"], {Damage.HEAD: "a missing end of the trail cannot be detected"}),
        (["s.jsonl", "s.head"], {Damage.TRAIL: "s.jsonl and its head are missing"}),
    ],
)
def test_a_missing_file_of_a_known_session_is_named(directory: Path, lost: list[str], found: dict[Damage, str]) -> None:
    write_trail(directory, "t")
    for name in lost:
        (directory / name).unlink()
    ours, other = verify(directory, expected=["s", "t"])
    assert [finding.what for finding in ours.findings] == list(found)
    assert ours.findings[0].message.endswith(found[ours.findings[0].what])
    assert (ours.session, other.session, other.findings) == ("s", "t", [])


@pytest.mark.parametrize("junk", [b"", b"{", b'{"seq":"x"}', b"[]", b"null", b"\xff" * 192, b"[" * 100_000])
def test_an_invalid_head_is_reported(directory: Path, junk: bytes) -> None:
    (directory / "s.head").write_bytes(junk)
    with pytest.raises(TrailError):
        read_head(directory / "s.head")
    assert [finding.what for finding in examine(directory).findings] == [Damage.HEAD]


def test_a_trail_that_ends_at_its_head_is_crashed_or_open_without_finding(tmp_path: Path) -> None:
    trail = write_trail(tmp_path, closed=False)
    (dead,) = verify(tmp_path)
    (living,) = verify(tmp_path, live=lambda session: session == "s")
    assert (dead.status, dead.findings) == ("crashed", [])
    assert (living.status, living.findings) == ("open", [])
    trail.close()


def test_a_last_line_truncated_by_a_crash_is_no_finding(tmp_path: Path) -> None:
    trail = write_trail(tmp_path, closed=False)
    whole = trail.path.read_bytes()
    trail.event("note")
    line = trail.path.read_bytes()[len(whole) :]
    for length in range(1, len(line)):
        trail.path.write_bytes(whole + line[:length])
        report = examine(tmp_path)
        assert (report.findings, report.torn, report.status) == ([], True, "crashed"), length
    trail.path.write_bytes(whole + b"\0" * 4096)
    assert (examine(tmp_path).findings, examine(tmp_path).torn) == ([], True)
    for junk in (b"x", b"{}", line[:-1] + b"x", b'{"timestamp":"\xff'):
        trail.path.write_bytes(whole + junk)
        assert first(examine(tmp_path))[0] is Damage.ADDED
    trail.close()


def test_a_gigantic_line_is_found_in_bounded_memory(directory: Path) -> None:
    with (directory / "s.jsonl").open("ab") as stream:
        stream.truncate(stream.tell() + 80 * 1024 * 1024)
    tracemalloc.start()
    report = examine(directory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert first(report)[0] is Damage.ADDED
    assert peak < 70 * 1024 * 1024


def test_an_outcome_without_its_intent_is_found(tmp_path: Path) -> None:
    trail = Trail.create(tmp_path / "s.jsonl", tmp_path / "s.head", TrailIdentity("s", "alice", "id"))
    seq = trail.intent(Operation.MKDIR, "d", "create", "code")
    for _ in range(2):
        trail.outcome(seq, Operation.MKDIR, "d")
    trail.close()
    assert first(examine(tmp_path)) == (Damage.ORPHAN, 3)


def test_intents_without_outcome_are_listed_with_the_state_of_the_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d/file").write_bytes(b"x" * 12)
    (source / "d/file").chmod(0o640)
    (source / "away").symlink_to("/etc")
    os.mkfifo(source / "fifo", 0o600)
    trail = Trail.create(tmp_path / "s.jsonl", tmp_path / "s.head", TrailIdentity("s", "alice", "id"))
    for path in ("d/file", "gone", "d", "away", "away/passwd", "fifo", "d/file/below", "n\0l", "../s.jsonl"):
        trail.intent(Operation.CREATE_FILE, path, "create", "code")
    trail.intent(Operation.RENAME, "gone", "modify", "code", details={"to": "d/file"})
    trail.outcome(trail.intent(Operation.MKDIR, "d", "create", "code"), Operation.MKDIR, "d")
    trail.close()
    (report,) = verify(tmp_path, describe=lambda _: describe_below(source))
    assert report.findings == []
    assert {each.path: each.shows for each in report.unfinished[:-1]} == {
        "d/file": "a file, 12 bytes, mode 640",
        "gone": "absent",
        "d": "a directory, mode 755",
        "away": "a symlink",
        "away/passwd": "absent",
        "fifo": "a FIFO, mode 600",
        "d/file/below": "absent",
        "n\0l": "cannot be read: embedded null byte",
        "../s.jsonl": "cannot be read: the path leaves the source",
    }
    assert report.unfinished[-1].shows == "gone: absent; d/file: a file, 12 bytes, mode 640"


def test_an_unfinished_intent_is_listed_with_its_layer_and_temporary_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    left = stray_name()
    for name in ("plan.md", left):
        (source / name).write_text("text")
    trail = Trail.create(tmp_path / "s.jsonl", tmp_path / "s.head", TrailIdentity("s", "alice", "id"))
    trail.intent(Operation.CREATE_FILE, "x.tmp", "create", "temporary", details={"layer": "temporary"})
    trail.intent(Operation.RENAME, "x.tmp", "modify", "temporary", details={"to": "plan.md", "by": left})
    trail.close()
    (report,) = verify(tmp_path, describe=lambda _: describe_below(source))
    kept, entering = (each.shows for each in report.unfinished)
    assert kept == "the change was not in the source, but in another layer"
    assert entering == f"x.tmp: absent; plan.md: a file, 4 bytes, mode 644; {left}: a file, 4 bytes, mode 644"


def test_verifying_a_long_trail_takes_bounded_memory(tmp_path: Path) -> None:
    trail = Trail.create(tmp_path / "s.jsonl", tmp_path / "s.head", TrailIdentity("s", "alice", "id"))
    for number in range(10_000):
        trail.outcome(trail.intent(Operation.MKDIR, f"d{number}", "create", "code"), Operation.MKDIR, f"d{number}")
    trail.close()
    tracemalloc.start()
    report = examine(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (report.entries, report.findings) == (20_001, [])
    assert peak < 1_000_000


@given(data=st.data())
def test_the_verifier_reads_any_bytes_without_an_error(kept: Path, data: st.DataObject) -> None:
    lines = lines_of(kept)
    for _ in range(data.draw(st.integers(1, 4))):
        tamper: Callable[[Lines, st.DataObject], None] = data.draw(st.sampled_from([_cut, _junk, _double, _forge]))
        tamper(lines, data)
    raw = b"".join(lines)
    report = tampered(kept, lines)
    assert report.findings or raw == b"".join(lines_of(kept))


def _cut(lines: Lines, data: st.DataObject) -> None:
    if lines:
        lines.pop(data.draw(st.integers(0, len(lines) - 1)))


def _junk(lines: Lines, data: st.DataObject) -> None:
    lines.insert(data.draw(st.integers(0, len(lines))), data.draw(st.binary(min_size=1, max_size=40)))


def _double(lines: Lines, data: st.DataObject) -> None:
    if lines:
        lines.insert(data.draw(st.integers(0, len(lines))), data.draw(st.sampled_from(lines)))


def _forge(lines: Lines, data: st.DataObject) -> None:
    odd = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
    field = st.sampled_from(["seq", "prev", "details", "kind", "session", "path", "result", "operation"])
    with_entries = [
        number for number, line in enumerate(lines) if line.startswith(b'{"timestamp"') and line[-2:] == b"}\n"
    ]
    if with_entries:
        number = data.draw(st.sampled_from(with_entries))
        lines[number] = rehashed(lines[number], **data.draw(st.dictionaries(field, odd, min_size=1, max_size=3)))


@pytest.mark.root
@pytest.mark.parametrize("call", ["openat:when=1", "pwrite64", "fsync:when=1", "openat:when=2", "fsync:when=2"])
def test_a_kill_while_a_trail_is_created_is_no_damage(tmp_path: Path, call: str) -> None:
    """The head is written before the trail exists. An existing trail with an empty head is damage."""
    paths = tmp_path / "s.head", tmp_path / "s.jsonl"
    name, _, when = call.partition(":")
    fault = f"inject={name}:signal=KILL" + (f":{when}" if when else "")
    where = [option for path in (*paths, tmp_path) for option in ("-P", str(path))]
    program = (
        "from pathlib import Path; from bonobofs.audit.writer import Trail, TrailIdentity\n"
        f"Trail.create(Path({str(paths[1])!r}), Path({str(paths[0])!r}), TrailIdentity('s', 'alice', 'id'))"
    )
    command = ["strace", "-f", "-qq", "-o", "/dev/null", *where, "-e", f"trace={name}", "-e", fault]
    killed = subprocess.run([*command, sys.executable, "-c", program], env=environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [report.findings for report in verify(tmp_path)] in ([], [[]])
    paths[0].write_bytes(b"")
    paths[1].unlink(missing_ok=True)
    assert [report.status for report in verify(tmp_path, expected=["s"])] == [TrailStatus.GONE]
    paths[1].write_bytes(b"")
    assert first(examine(tmp_path))[0] is Damage.HEAD
