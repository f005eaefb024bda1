"""Sessions: the registry, the end of a boot, and callers without a mount."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.audit.reader import read
from bonobofs.errors import BonobofsError
from bonobofs.guards import FileTools
from bonobofs.policy.decision import Refused
from bonobofs.policy.request import Context, Kind, Operation, Request, WorkspacePath
from bonobofs.state import sessions
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted


def test_session_files_are_private_to_the_operator(home: Path, mounted: Mounted) -> None:
    """Directories and programs are 0700 and files 0600, for every umask."""
    before = os.umask(0)
    try:
        mounted(policy=ALLOW_ALL)
    finally:
        os.umask(before)
    for path in (home, *home.rglob("*")):
        wanted = 0o700 if path.is_dir() or path.parent.name == "bin" else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_session_json_has_the_documented_fields(mounted: Mounted) -> None:
    """Agent, source, policy, process and boot."""
    world = mounted(agent="ann")
    record = json.loads((world.home / "sessions" / world.session.session / "session.json").read_text())
    assert list(record) == [
        "session",
        "agent",
        "agent_id",
        "team",
        "role",
        "chain",
        "source",
        "mountpoint",
        "pid",
        "starttime",
        "transport",
        "policy",
        "boot_id",
        "started",
        "ended",
        "issue",
        "source_inode",
    ]
    assert record["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (record["agent"], record["ended"]) == ("ann", None)
    assert list(record["policy"]) == ["origin", "digest", "generation"]


def test_whoami_shows_the_registered_session(mounted: Mounted) -> None:
    """An agent in the mount can read its identity and cannot change it."""
    world = mounted(agent="ann", role="worker")
    who = json.loads((world.path / ".bonobofs" / "whoami.json").read_text())
    made = world.session
    assert who == {
        "agent": "ann",
        "agent_id": made.agent_id,
        "team": None,
        "role": "worker",
        "chain": None,
        "issue": None,
        "session": made.session,
        "source": made.source,
        "policy": made.policy.digest,
        "policy_origin": "preset:aidlc",
        "socket": str(world.home / "sessions" / made.session / "inside/guard.sock"),
        "tools": ["read_file", "write_file", "list_files", "search_files"],
        "git": ["add", "commit", "rm", "mv", "restore"],
        "beads": ["create", "update", "close", "label", "comment"],
    }


def test_differences_after_an_unclean_boot_are_recorded(mounted: Mounted) -> None:
    """Unrecorded differences are entries of the next session's trail, once, and alerts if protected."""
    world = mounted(policy=ALLOW_ALL + '[[protect]]\npaths = ["secret/"]\n')
    (world.source / "secret").mkdir()
    (world.path / "known.md").write_text("as recorded")
    world.entries()
    world.kill()
    sessions.save(world.home, world.session._replace(boot_id="another boot"))
    (world.source / "known.md").write_text("otherwise than recorded")
    (world.source / "secret" / "key").write_text("new")

    order = session.MountRequest(world.source, world.path, agent="alice", policy=Path(world.session.policy.origin))
    again = session.start(world.home, order)
    assert any("The machine went down" in note for note in again.notes)
    entries = list(read(world.home / "trails" / f"{again.session.session}.jsonl"))
    entered = {entry.path for entry in entries if (entry.kind, entry.operation) == ("event", "out_of_band")}
    assert entered == {"known.md", "secret", "secret/key"}
    assert "secret/key" in {entry.path for entry in entries if entry.kind == "alert"}
    session.unmount_session(world.home, world.path)

    # By then it is accounted for.
    third = session.start(world.home, order)
    assert not any("went down" in note for note in third.notes)
    session.unmount_session(world.home, world.path)


def test_a_crash_within_one_boot_needs_no_comparison(mounted: Mounted) -> None:
    """A killed process loses no record, so none can be missing."""
    world = mounted(policy=ALLOW_ALL)
    world.kill()
    (world.source / "behind").touch()
    again = mounted(policy=ALLOW_ALL, mountpoint=world.path)
    assert not [entry for entry in again.entries() if entry.operation == "out_of_band"]


def test_open_session_enforces_the_policy_without_a_mount(home: Path, source: Path) -> None:
    """It returns a guard with its own record, which is closed at the end."""
    with session.open_session(source, agent="ann") as opened:
        with opened.guard.authorize(Request(Operation.MKDIR, WorkspacePath("aidlc-docs"), Kind.DIRECTORY), Context()):
            (source / "aidlc-docs").mkdir()
        with pytest.raises(Refused):
            opened.guard.authorize(Request(Operation.CREATE_FILE, WorkspacePath("x.exe")), Context(size=0))
        (living,) = session.statuses(home)
        assert (living.state, living.session.mountpoint) == (session.SessionState.SERVING, None)
        assert [entry.result for entry in opened.log.filter_by_agent("ann")] == ["allowed", "allowed", "denied"]
    assert session.statuses(home) == []
    kinds = [(entry.kind, entry.operation) for entry in read(home / "trails" / f"{opened.session.session}.jsonl")]
    assert kinds[-1] == ("event", "close")


def test_a_session_without_a_mount_refuses_the_same_sources(home: Path) -> None:
    """The state directory cannot be guarded from within."""
    with pytest.raises(BonobofsError, match="lies inside the source"), session.open_session(home.parent):
        pass


def test_the_shipped_roles_apply_in_a_mount(mounted: Mounted) -> None:
    """`mount --role impl` may write as its rules allow, `--role control` may not. Each can read its rights."""
    impl, control, unknown = (mounted(role=role, agent=role) for role in ("impl", "control", "unheard-of"))
    (impl.path / "tests").mkdir()
    (impl.path / "tests/test_a.py").write_text("assert True\n")
    with pytest.raises(PermissionError):
        (impl.path / "tests/a.json").write_text("{}")
    for world in (control, unknown):
        with pytest.raises(PermissionError):
            (world.path / "tests/test_a.py").unlink()
        assert json.loads((world.path / ".bonobofs/denials.jsonl").read_text().splitlines()[-1])["code"] == "ROLE"
    tools = "- Tools of the guard socket: `read_file`, `list_files`, `search_files`."
    assert tools in (control.path / ".bonobofs/policy.md").read_text()
    assert "may do nothing" in (unknown.path / ".bonobofs/policy.md").read_text()
    assert json.loads((unknown.path / ".bonobofs/whoami.json").read_text())["tools"] == []


def test_a_file_written_by_a_tool_shows_in_the_mount(mounted: Mounted) -> None:
    world = mounted(role="impl")
    assert not (world.path / "tests").exists()
    with session.open_session(world.source, agent="ann", role="impl") as opened:
        tools = FileTools(opened)
        tools.guarded_write_file("tests/test_a.py", "assert True\n")
        until((world.path / "tests/test_a.py").exists, "the file shows in the mount")
        (world.path / "tests/test_a.py").write_text("assert 1\n")
        assert tools.guarded_read_file("tests/test_a.py").content == "     1\tassert 1"
        tools.close()
    assert [entry for entry in world.entries() if entry.operation == "out_of_band"] == []
