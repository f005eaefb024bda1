"""`audit tail|query|verify|export` over what a real mount recorded."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.guards import FileGuard
from bonobofs.session import open_session
from bonobofs.state.home import head_path, trail_path
from tests.support.postgres import Postgres
from tests.support.world import ALLOW_ALL, Mounted, World, bonobofs, environment


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def world(mounted: Mounted) -> World:
    """One mount under the default policy, in which something was allowed and something refused."""
    world = mounted()
    (world.path / "aidlc-docs").mkdir()
    (world.path / "aidlc-docs" / "plan.md").write_text("a plan")
    with pytest.raises(PermissionError):
        (world.path / "aidlc-docs" / "plan.sh").write_text("a plan")
    return world


def test_tail_shows_the_last_changes(world: World) -> None:
    """The servers close their batches first, so no entry is missing."""
    said = bonobofs("audit", "tail").stdout
    assert "allowed  alice  create_file  aidlc-docs/plan.md" in said
    assert "denied   alice  create_file  aidlc-docs/plan.sh  SUFFIX: " in said
    last = bonobofs("audit", "tail", "-n", "1").stdout
    assert last.count("\n") == 1


def test_tail_shows_renames_and_the_requested_number_of_lines(mounted: Mounted) -> None:
    """Arrows point to the new name. `-n` counts shown lines, regardless of entries between them."""
    world = mounted(policy=ALLOW_ALL)
    (world.path / "a").write_text("a")
    (world.path / "a").rename(world.path / "b")
    os.link(world.path / "b", world.path / "c")
    said = bonobofs("audit", "tail").stdout
    assert "rename  a -> b" in said
    assert "link  b -> c" in said
    for count in (1, 2, 3):
        assert len(bonobofs("audit", "tail", "-n", str(count)).stdout.splitlines()) == count
    with open_session(world.source, agent="bob") as opened:
        trail = opened.guard.trail
        trail.event("note")
        for _ in range(40):
            trail.outcome(trail.intent("mkdir", "d", "create", ""), "mkdir", "d")
    shown = bonobofs("audit", "tail", "-n", "41").stdout.splitlines()
    assert len(shown) == 41
    details = {"branch": "aidlc/x", "message": "[gt-1] Add the plan\n\nMore."}
    with open_session(world.source, agent="bob") as opened:
        opened.guard.trail.intent("commit", "", "modify", "", guard="git", details=details)
        assert "commit  aidlc/x [gt-1] Add the plan\n" in bonobofs("audit", "tail", "-n", "1").stdout


def test_tail_json_prints_one_object_per_line(world: World) -> None:
    """The lines are those of the trail, unchanged."""
    shown = bonobofs("audit", "tail", "--json").stdout
    assert shown.encode() == world.trail.read_bytes()
    (denied,) = _lines(bonobofs("audit", "tail", "--json", "--denied").stdout)
    assert (denied["code"], denied["path"], denied["result"]) == ("SUFFIX", "aidlc-docs/plan.sh", "denied")


def test_tail_alerts_shows_only_alerts(world: World) -> None:
    """The third denial within five minutes is an alert."""
    for name in ("a.txt", "b.txt"):
        with pytest.raises(PermissionError):
            (world.path / name).touch()
    (alert,) = _lines(bonobofs("audit", "tail", "--json", "--alerts").stdout)
    assert alert["kind"] == "alert"


def test_tail_follow_runs_until_it_is_interrupted(world: World) -> None:
    """`audit tail -f` shows new entries, and Ctrl-C ends it without a message."""
    follower = subprocess.Popen(
        [sys.executable, "-m", "bonobofs", "audit", "tail", "-f", "-n", "1", "--denied", "--json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with follower:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["path"] == "aidlc-docs/plan.sh"
        with pytest.raises(PermissionError):
            (world.path / "new.txt").touch()
        assert json.loads(follower.stdout.readline())["path"] == "new.txt"
        follower.send_signal(signal.SIGINT)
        _, errors = follower.communicate(timeout=30)
    assert follower.returncode == 130
    assert errors == ""


def test_query_filters_by_agent_path_operation_result_and_time(mounted: Mounted, world: World) -> None:
    """Each filter narrows the result. A change is shown with its outcome."""
    other = mounted(policy=ALLOW_ALL, agent="bob")
    (other.path / "elsewhere").touch()

    def query(*arguments: str) -> list[str]:
        return [one["path"] for one in json.loads(bonobofs("audit", "query", "--json", *arguments).stdout)]

    assert query("--agent", "bob", "--operation", "create_file") == ["elsewhere"]
    assert query("--agent", other.session.agent_id, "--operation", "create_file") == ["elsewhere"]
    assert query("--path", "aidlc-docs/*.md") == ["aidlc-docs/plan.md"]
    assert query("--path", "aidlc-docs", "--result", "denied") == ["aidlc-docs/plan.sh"]
    assert query("--operation", "mkdir", "--since", "1h") == ["aidlc-docs"]
    assert query("--operation", "mkdir", "--since", "2999-01-01") == []
    (made,) = json.loads(bonobofs("audit", "query", "--json", "--path", "aidlc-docs/plan.md").stdout)
    assert made["outcome"]["details"]["size"] == len("a plan")
    assert "denied   alice  create_file  aidlc-docs/plan.sh" in bonobofs("audit", "query", "--result", "denied").stdout


def test_a_path_is_found_as_history_finds_it(mounted: Mounted, world: World, tmp_path: Path) -> None:
    """By its place in the mount or the source. A path outside is an error; elsewhere it begins at any root."""
    (tmp_path / "two").mkdir()
    other = mounted(policy=ALLOW_ALL, agent="bob", source=tmp_path / "two")
    (other.path / "aidlc-docs").mkdir()
    (other.path / "aidlc-docs" / "plan.md").touch()
    made = {"--operation": "create_file", "--result": "allowed"}
    options = [text for pair in made.items() for text in pair]

    def query(path: str | Path, cwd: Path) -> list[tuple[str, str]]:
        found = bonobofs("audit", "query", "--json", *options, "--path", path, cwd=cwd)
        assert found.returncode == 0, found.stderr
        return [(one["agent"], one["path"]) for one in json.loads(found.stdout)]

    wanted = [("alice", "aidlc-docs/plan.md")]
    for root in (world.path, world.source):
        for path, cwd in (
            (root / "aidlc-docs", tmp_path),
            (os.path.relpath(root / "aidlc-docs", tmp_path), tmp_path),
            (root, tmp_path),
            (root / "**/*.md", tmp_path),
            ("plan.md", root / "aidlc-docs"),
            ("../aidlc-docs", root / "aidlc-docs"),
        ):
            assert query(path, cwd) == wanted, (path, cwd)
    assert query("aidlc-docs", tmp_path) == [*wanted, ("bob", "aidlc-docs/plan.md")]
    (one,) = json.loads(bonobofs("audit", "report", "--path", world.path, "--json").stdout)["sessions"]
    assert one["session"] == world.session.session
    for path in ("/etc", "../x"):
        refused = bonobofs("audit", "query", "--path", path, cwd=tmp_path)
        assert (refused.returncode, "no session had a source around" in refused.stderr) == (2, True)
        assert "--session" not in refused.stderr


def test_an_invalid_time_is_a_usage_error(world: World) -> None:
    """The message shows valid forms."""
    refused = bonobofs("audit", "query", "--since", "yesterday")
    assert refused.returncode == 2
    assert "give 30s, 10m" in refused.stderr


def test_verify_succeeds_on_unchanged_trails(world: World) -> None:
    """For a live session, for a closed one, and without sessions."""
    living = bonobofs("audit", "verify")
    assert (living.returncode, living.stdout) == (
        0,
        f"1 trails, {len(world.all_entries())} entries: as they were written\n",
    )
    world.umount()
    (report,) = json.loads(bonobofs("audit", "verify", "--json").stdout)
    assert (report["session"], report["status"], report["findings"]) == (world.session.session, "closed", [])


def test_verify_names_the_changed_entry(world: World) -> None:
    """One changed byte is found, and the exit code is 1."""
    world.umount()
    world.trail.write_bytes(world.trail.read_bytes().replace(b"plan.sh", b"plan.md"))
    found = bonobofs("audit", "verify")
    assert found.returncode == 1
    assert "was changed" in found.stderr
    assert json.loads(bonobofs("audit", "verify", "--json").stdout)[0]["findings"]


def test_verify_reports_a_missing_trail(world: World) -> None:
    """The record of the session names its end, so a complete trail cannot disappear unnoticed."""
    world.umount()
    world.trail.unlink()
    world.head.unlink()
    gone = bonobofs("audit", "verify")
    assert gone.returncode == 1
    assert "missing" in gone.stderr


@pytest.mark.parametrize("kind", ["FIFO", "directory", "endless"])
@pytest.mark.parametrize(
    "name", ["trails/x.jsonl", "trails/x.jsonl.gz", "trails/ID.head", "pruned.jsonl", "pruned.head"]
)
def test_a_file_of_the_record_that_is_not_regular_is_a_finding(world: World, kind: str, name: str) -> None:
    """No command waits for it, and the other trails are verified."""
    world.umount()
    path = world.home / name.replace("ID", world.session.session)
    path.unlink(missing_ok=True)
    if kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        (os.mkfifo if kind == "FIFO" else os.mkdir)(path)
    told = bonobofs("audit", "verify")
    assert told.returncode == 1
    assert f"{path} cannot be read: ".replace(".gz", "") in told.stderr
    assert "1 findings" in told.stdout or name == "pruned.head"
    reports = json.loads(bonobofs("audit", "verify", "--json").stdout)
    assert [each["status"] for each in reports if each["session"] == world.session.session] == ["closed"]
    assert bonobofs("audit", "tail").returncode == (1 if name.startswith("trails/x") else 0)


def test_a_huge_head_is_a_finding_in_bounded_memory(world: World) -> None:
    world.umount()
    os.truncate(world.head, 6 << 30)
    told = bonobofs("audit", "verify")
    assert told.returncode == 1
    assert f"the head {world.head} is damaged" in told.stderr


def test_no_command_waits_for_a_fifo_in_the_register_or_the_log(mounted: Mounted) -> None:
    ended = mounted()
    ended.umount()
    world = mounted(mountpoint=ended.path, source=ended.source)
    os.mkfifo(world.home / "trails/x.jsonl")
    assert bonobofs("umount", str(world.path)).returncode == 0
    document = world.home / "sessions" / ended.session.session / "session.json"
    document.unlink()
    os.mkfifo(document)
    told = bonobofs("audit", "verify")
    assert f"{document} cannot be read: it is not a regular file" in told.stderr
    assert f"{document} cannot be read" in bonobofs("status", "--all").stderr


def test_a_killed_server_is_reported_as_crashed_and_is_no_finding(world: World) -> None:
    """The trail is open and ends at its head: exit 0."""
    world.entries()
    world.kill()
    crashed = bonobofs("audit", "verify")
    assert crashed.returncode == 0, crashed.stderr
    assert f"{world.session.session}: crashed after entry" in crashed.stdout


def test_export_prints_every_entry(world: World) -> None:
    """JSON lines are those of the trail. CSV has a header and one row per entry."""
    world.umount()
    assert bonobofs("audit", "export", "--format", "jsonl").stdout.encode() == world.trail.read_bytes()
    rows = list(csv.DictReader(io.StringIO(bonobofs("audit", "export", "--format", "csv").stdout)))
    assert [row["path"] for row in rows if row["result"] == "denied"] == ["aidlc-docs/plan.sh"]
    assert len(rows) == len(world.trail.read_bytes().splitlines())


def test_a_closed_pipe_is_no_failure(world: World) -> None:
    """`bonobofs audit export | head -1` prints one line and no error."""
    piped = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m bonobofs audit export --format jsonl | head -n 1'],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert piped.stdout.count("\n") == 1
    assert piped.stderr == ""


def test_changes_are_counted_by_the_requested_field(world: World) -> None:
    """The most frequent denial is one line."""
    for _ in range(3):
        with pytest.raises(PermissionError):
            (world.path / "a.txt").touch()
    said = bonobofs("audit", "query", "--result", "denied", "--count", "rule", "--json")
    counted = {one["rule"]: one["times"] for one in json.loads(said.stdout)}
    assert counted == {"default": 3, "artifacts": 1}
    assert bonobofs("audit", "query", "--result", "denied", "--count", "rule").stdout.split() == [
        "3", "default", "1", "artifacts",
    ]  # fmt: skip
    (one,) = json.loads(bonobofs("audit", "query", "--count", "agent", "--json").stdout)
    assert (one["agent"], one["label"]) == (world.session.agent_id, "alice")


def test_a_report_is_printed_as_markdown_and_json(world: World) -> None:
    """For a pull request and for programs. Its hash is that of the trail's head."""
    said = bonobofs("audit", "report", "--agent", "alice")
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("# Changes by `alice`\n\n2 paths changed, 1 change refused, 0 failed, 0 alerts.\n")
    assert "| `aidlc-docs/plan.md` | created | " in said.stdout
    assert "what to do: Write a .md file of at most" in said.stdout
    world.umount()
    document = json.loads(bonobofs("audit", "report", "--session", world.session.session, "--json").stdout)
    (session,) = document["sessions"]
    assert json.loads(world.head.read_bytes())["hash"] == session["hash"]
    assert (session["source"], session["role"]) == (str(world.source), world.session.role)
    assert [one["path"] for one in document["changed"]] == ["aidlc-docs", "aidlc-docs/plan.md"]
    assert json.loads(bonobofs("audit", "report", "--path", "nowhere", "--json").stdout)["sessions"] == []


def test_the_printed_ids_of_a_session_and_its_first_turn_are_accepted(mounted: Mounted, world: World) -> None:
    """`query` and `report`, also after a mark. Of an ambiguous UUID, the error asks for more digits."""
    other = mounted(policy=ALLOW_ALL, agent="bob")
    (other.path / "elsewhere").touch()
    short = world.session.session[:8]
    assert bonobofs("mark", "next", cwd=world.path).returncode == 0
    (world.path / "aidlc-docs/later.md").touch()
    (first, _) = json.loads(bonobofs("audit", "report", "--session", short, "--json").stdout)["turns"]
    assert (first["turn"], first["session"]) == (f"{short}:0", world.session.session)
    for option in (("--turn", first["turn"]), ("--session", short)):
        found = json.loads(bonobofs("audit", "query", *option, "--operation", "create_file", "--json").stdout)
        paths = ["aidlc-docs/plan.md", "aidlc-docs/plan.sh", *["aidlc-docs/later.md"] * (option[0] == "--session")]
        assert [one["path"] for one in found] == paths
        report = json.loads(bonobofs("audit", "report", *option, "--json").stdout)
        assert [one["session"] for one in report["sessions"]] == [world.session.session]
    # A trail of a session that begins with the same digits.
    twin = short + str(uuid.uuid4())[8:]
    Trail.create(trail_path(world.home, twin), head_path(world.home, twin), TrailIdentity(twin, "eve", "")).close()
    several = bonobofs("audit", "query", "--session", short)
    assert (several.returncode, "2 sessions begin with" in several.stderr) == (2, True)
    assert bonobofs("audit", "query", "--session", twin).returncode == 0
    unknown = bonobofs("audit", "query", "--session", "zz")
    assert (unknown.returncode, "no entry has 'zz'" in unknown.stderr) == (2, True)


def test_the_index_can_be_rebuilt(world: World) -> None:
    """Its answers are as before. A rewritten trail is reported."""
    before = bonobofs("audit", "query", "--json").stdout
    world.umount()
    told = bonobofs("audit", "index", "--rebuild")
    lines = world.trail.read_bytes().splitlines(keepends=True)
    assert told.stdout == f"{len(lines)} entries were read\n"
    after = json.loads(bonobofs("audit", "query", "--json").stdout)
    assert after[: len(json.loads(before))] == json.loads(before)
    world.trail.write_bytes(b"".join(lines[:-1]))
    assert "was replaced since it was indexed" in bonobofs("audit", "query").stderr


def test_no_output_controls_a_terminal(mounted: Mounted) -> None:
    """Neither a file name that a program chose, nor a forged line in a trail."""
    world = mounted(policy=ALLOW_ALL)
    name = os.fsdecode(b"\x1b]0;x\x07\x9b2J\r\xe2\x80\xae\xff")
    (world.path / name).write_text("x")
    world.umount()
    forged = dict.fromkeys(("operation", "agent", "agent_id", "path", "rule", "code", "reason", "tool"), "\x1b[2J")
    line = json.loads(world.trail.read_bytes().splitlines()[0])
    with world.trail.open("a", errors="surrogateescape") as out:
        for result, kind in (("denied", "intent"), ("allowed", "alert"), ("error", "outcome")):
            out.write(json.dumps({**line, **forged, "result": result, "kind": kind}) + "\n")
        out.write(f"{name}\n")
    for arguments in (
        ["tail"],
        ["query"],
        ["query", "--count", "agent"],
        ["query", "--count", "path"],
        ["report"],
        ["verify"],
        ["export", "--format", "csv"],
    ):
        told = bonobofs("audit", *arguments)
        for text in (told.stdout.replace("\r\n", "\n"), told.stderr):
            assert all(character.isprintable() for character in text.replace("\n", "")), arguments
        assert "\\x1b" in told.stdout or arguments == ["verify"]


def test_hosts_with_a_shared_database_share_their_history(
    home: Path, source: Path, tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host finds the indexed entries of the other. Each reads the trails of its own state directory."""
    monkeypatch.setenv("BONOBOFS_DATABASE", postgres.make_database())
    (tmp_path / "policy.toml").write_text(ALLOW_ALL)
    for name in ("here", "there"):
        monkeypatch.setenv("BONOBOFS_HOME", str(tmp_path / name))
        with open_session(source, agent=name, policy=tmp_path / "policy.toml") as session:
            FileGuard(session).write_file(f"{name}.txt", "text", agent=name)
        assert bonobofs("audit", "index").returncode == 0
    for name in ("here", "there"):
        monkeypatch.setenv("BONOBOFS_HOME", str(tmp_path / name))
        found = json.loads(bonobofs("audit", "query", "--operation", "write_file", "--json").stdout)
        assert [one["path"] for one in found] == ["here.txt", "there.txt"]
        document = json.loads(bonobofs("audit", "report", "--json").stdout)
        assert [(one["source"], one["path"]) for one in document["changed"]] == [
            (str(source), "here.txt"),
            (str(source), "there.txt"),
        ]


@pytest.mark.parametrize("command", ["query", "report"])
def test_an_unknown_filter_value_is_a_usage_error_that_names_the_nearest(mounted: Mounted, command: str) -> None:
    """A mistyped value is no empty result."""
    world = mounted(policy=ALLOW_ALL, agent="alice")
    (world.path / "a").write_text("text")
    wrong = {"agent": ("alcie", "did you mean alice?"), "session": ("x7", world.session.session)}
    found = [["--agent", "alice"], ["--session", world.session.session]]
    if command == "query":
        wrong |= {"result": ("denid", "denied"), "operation": ("writefile", "write_file"), "rule": ("hiden", "hidden")}
        found += [["--result", "error"], ["--operation", "symlink"], ["--rule", "hidden"], ["--operation", "mount"]]
    for name, (value, said) in wrong.items():
        failed = bonobofs("audit", command, f"--{name}", value)
        assert (failed.returncode, failed.stdout) == (2, "")
        assert f"--{name}: no entry has '{value}'" in failed.stderr
        assert said in failed.stderr
    for arguments in found:
        assert bonobofs("audit", command, *arguments).returncode == 0
