"""What can be called through the guard socket, and as whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.audit.verify import verify_trail
from bonobofs.errors import ForbiddenError, UsageError
from bonobofs.policy.decision import Code, Refused
from bonobofs.state import leases
from bonobofs.state.database import Database
from tests.calls.conftest import Called, CalledMount
from tests.watch.looking import out_of_band, recorded, status, too_few_watches, until
from tests.worlds import OrdinaryUser, bonobofs, register


def test_whoami_is_what_the_mount_says(alice: Called) -> None:
    assert alice("whoami") == json.loads((alice.path / ".bonobofs/whoami.json").read_text())


def test_a_file_is_written_and_removed_by_the_doors_leave(alice: Called) -> None:
    """The record has intent and outcome, the mount shows the file at once, and nobody takes it for a stranger's."""
    assert not (alice.path / "docs/plan.md").exists()
    assert alice("write_file", path="docs/plan.md", content="# The plan\n") == {"path": "docs/plan.md"}
    assert (alice.path / "docs/plan.md").read_text() == "# The plan\n"
    assert (alice.path / "docs/plan.md").stat().st_mode & 0o777 == 0o644
    assert alice("write_file", path=str(alice.path / "docs/plan.md"), content="anew")
    assert (alice.path / "docs/plan.md").read_text() == "anew"
    assert alice("delete_file", path="docs/plan.md") is None
    assert not (alice.path / "docs/plan.md").exists()
    entries = alice.of("docs/plan.md")
    assert [(one.kind, one.operation, one.action, one.tool, one.result) for one in entries] == [
        ("intent", "write_file", "create", "write_file", "allowed"),
        ("outcome", "write_file", "create", "", "allowed"),
        ("intent", "write_file", "modify", "write_file", "allowed"),
        ("outcome", "write_file", "modify", "", "allowed"),
        ("intent", "delete_file", "delete", "delete_file", "allowed"),
        ("outcome", "delete_file", "delete", "", "allowed"),
    ]
    (alice.source / "sign").touch()
    until(lambda: "sign" in out_of_band(alice.world), "what is a stranger's is entered")
    assert list(out_of_band(alice.world)) == ["sign"]


def test_the_tools_read_the_workspace_and_are_recorded(alice: Called) -> None:
    """Lines, names and matches, under paths of the workspace or the mount; each call is one entry."""
    (alice.path / "docs").mkdir()
    (alice.path / "docs/plan.md").write_text("one\ntwo\nthree\n")
    read = alice("read_file", path="docs/plan.md", offset=2, limit=1)
    assert (read["content"], read["start_line"], read["total_lines"]) == ("     2\ttwo", 2, 3)
    assert alice("read_file", path=str(alice.path / "docs/plan.md"))["end_line"] == 3
    (entry,) = alice("list_files")["entries"]
    assert (entry["path"], entry["kind"]) == ("docs", "directory")
    assert alice("list_files", path=str(alice.path), recursive=True, pattern="*.md")["entries"][0]["path"] == (
        "docs/plan.md"
    )
    (match,) = alice("search_files", query="^tw", include="*.md")["matches"]
    assert match == {"path": "docs/plan.md", "line": 2, "text": "two"}
    with pytest.raises(IsADirectoryError):
        alice("read_file", path="docs")
    calls = [one for one in alice.world.entries() if one.kind == "event" and one.tool]
    assert [(one.operation, one.path, one.result) for one in calls] == [
        ("read_file", "docs/plan.md", "allowed"),
        ("read_file", "docs/plan.md", "allowed"),
        ("list_files", "", "allowed"),
        ("list_files", "", "allowed"),
        ("search_files", "", "allowed"),
        ("read_file", "docs", "error"),
    ]


def test_a_tool_that_the_role_lacks_is_refused(mounted_called: CalledMount) -> None:
    """Though the role may write: what it is given beside the mount is the policy's to say."""
    called = mounted_called(policy='default = "allow"\n[role.r]\nwrite = ["**"]\ntools = ["read_file"]\n', role="r")
    (called.path / "a").write_text("text")
    assert called("read_file", path="a")["total_lines"] == 1
    for name, more in (("write_file", {"path": "b", "content": "text"}), ("search_files", {"query": "text"})):
        with pytest.raises(Refused) as refused:
            called(name, **more)
        assert refused.value.decision.code is Code.ROLE


def test_a_role_that_is_not_defined_leases_nothing(mounted_called: CalledMount) -> None:
    """It may do nothing, and so keep nobody else from anything."""
    called = mounted_called(policy='default = "allow"\n', role="stranger")
    for name, more in (("lease.acquire", {"patterns": ["**"]}), ("lease.extend", {})):
        with pytest.raises(Refused) as refused:
            called(name, **more)
        assert refused.value.decision.code is Code.ROLE
    assert called("lease.list") == []


def test_a_lease_in_somebody_elses_mount_is_not_ones_own(alice: Called, tmp_path: Path) -> None:
    """The state directory of the session gets it, for its agent. That of the caller would bind no session there."""
    other = {"BONOBOFS_HOME": str(tmp_path / "other")}
    acquired = bonobofs("lease", "acquire", "docs/**", cwd=alice.path, env=other)
    assert acquired.returncode == 0, acquired.stderr
    (lease,) = alice("lease.list")
    assert (lease["agent"], lease["patterns"]) == ("alice", ["docs/**"])
    assert bonobofs("lease", "list", env=other).stdout == "nothing is leased\n"


def test_what_is_not_overwritten_is_an_error_that_is_recorded(alice: Called) -> None:
    alice("write_file", path="a", content="first")
    with pytest.raises(FileExistsError):
        alice("write_file", path="a", content="second", createOnly=True)
    assert (alice.path / "a").read_text() == "first"
    assert [one.result for one in alice.of("a")][-1] == "error"


def test_a_denial_is_told_as_everywhere(mounted_called: CalledMount) -> None:
    """Code, rule and remedy; it counts in the mount's own list of denials, and repeats are alerts there."""
    called = mounted_called(policy=None)
    for _ in range(3):
        with pytest.raises(Refused) as refused:
            called("write_file", path="notes.txt", content="text")
    denied = refused.value.decision
    assert (denied.code, denied.path) == (Code.DEFAULT, "notes.txt")
    assert called("why", path="notes.txt")["code"] == "DEFAULT"
    shown = [json.loads(line) for line in (called.path / ".bonobofs/denials.jsonl").read_text().splitlines()]
    assert [one["path"] for one in shown] == ["notes.txt"] * 3
    assert [one.reason for one in called.world.entries() if one.kind == "alert"] == [
        "three denials of one agent within five minutes"
    ]


def test_who_names_another_agent_is_refused_with_an_alert(alice: Called) -> None:
    """Whatever is called; the agent's own label and UUID are as good as none."""
    who = alice("whoami")
    for agent in (who["agent"], who["agent_id"]):
        alice("write_file", path="own", content="text", agent=agent)
    for name, more in (("write_file", {"path": "a", "content": "text"}), ("lease.acquire", {"patterns": ["**"]})):
        with pytest.raises(Refused) as refused:
            alice(name, agent="bob", **more)
        assert refused.value.decision.code is Code.IDENTITY
    assert not (alice.source / "a").exists()
    assert alice("lease.list") == []
    alerts = [one for one in alice.world.entries() if one.kind == "alert"]
    assert [(one.code, one.operation) for one in alerts] == [("IDENTITY", "write_file"), ("IDENTITY", "call")]
    denials = [one for one in alice.world.entries() if one.kind == "intent" and one.result == "denied"]
    assert [(one.tool, one.details["claimed"]) for one in denials] == [("write_file", "bob"), ("lease.acquire", "bob")]


def test_what_leaves_the_workspace_is_refused(alice: Called, tmp_path: Path) -> None:
    """By name, by an absolute path, by a symlink."""
    (alice.source / "out").symlink_to(tmp_path)
    for path in ("../a", str(tmp_path / "a"), "out/a", "a\0b"):
        with pytest.raises(Refused) as refused:
            alice("write_file", path=path, content="text")
        assert refused.value.decision.code is Code.OUTSIDE
    assert not (tmp_path / "a").exists()


def test_what_is_held_apart_is_made_in_the_mount_alone(mounted_called: CalledMount) -> None:
    """`why` says what the mount would; the tool, which can hold nothing apart, is refused."""
    called = mounted_called(policy='default = "allow"\n[[scratch]]\npaths = ["build/"]\n')
    assert called("why", path="build/a.o")["rule"].startswith("scratch")
    with pytest.raises(Refused, match="Scratch files exist only inside a mount"):
        called("write_file", path="build/a.o", content="text")
    assert not (called.source / "build").exists()


def test_leases_are_the_sessions_own(alice: Called, mounted_called: CalledMount) -> None:
    """Acquired, they bind others when the call returns; others' are not to be released; the record has each."""
    bob = mounted_called(agent="bob")
    lease = alice("lease.acquire", patterns=["docs/**"], reason="mine", seconds=60)
    assert (lease["agent"], lease["patterns"]) == ("alice", ["docs/**"])
    (bob.path / "docs").mkdir()
    with pytest.raises(PermissionError):
        (bob.path / "docs/a").touch()
    with pytest.raises(Refused) as refused:
        bob("write_file", path="docs/a", content="text")
    assert refused.value.decision.holding is not None
    assert refused.value.decision.holding.holder == "alice"
    with pytest.raises(ForbiddenError):
        bob("lease.acquire", patterns=["**/*.md"])
    with pytest.raises(ForbiddenError, match="is held by alice"):
        bob("lease.release", lease=lease["id"])
    alice("write_file", path="docs/a", content="text")
    assert [entry.lock for entry in alice.of("docs/a")][:1] == ["own"]
    assert alice("lease.extend", seconds=3600)["until"] > lease["until"]
    assert [one["id"] for one in bob("lease.list")] == [lease["id"]]
    alice("lease.release")
    assert bob("lease.list") == []
    assert [recorded(alice.world, name)[0].details["lease"] for name in ("acquire_lease", "release_lease")] == [
        lease["id"]
    ] * 2


SENSELESS: tuple[tuple[str, dict[str, object], str], ...] = (
    ("rm", {}, "there is no call 'rm'"),
    ("write_file", {"path": "a"}, "needs content"),
    ("write_file", {"path": "a", "content": 7}, "content is not of the type str"),
    ("write_file", {"path": "a", "content": "a", "mode": 7}, "takes no mode"),
    ("lease.acquire", {"patterns": ["a", 7]}, "patterns must be a list of texts"),
    ("lease.acquire", {"patterns": ["a"], "seconds": True}, "seconds is not of the type int"),
    ("lease.acquire", {"patterns": ["a"], "seconds": -1}, "a lease lasts more than nothing"),
    ("lease.acquire", {"patterns": ["[a"]}, "cannot be leased"),
    ("read_file", {"path": "a", "offset": 1 << 70}, "too large a number"),
    ("lease.release", {}, "holds no lease"),
    ("why", {"path": "a", "operation": "explode"}, "there is no operation 'explode'"),
)


def test_what_cannot_be_meant_is_said(alice: Called) -> None:
    for name, arguments, said in SENSELESS:
        with pytest.raises(UsageError, match=said):
            alice(name, **arguments)


@pytest.mark.parametrize("transport", ["kernel", "portable"])
def test_what_is_changed_shows_at_once(mounted_called: CalledMount, transport: str) -> None:
    """What the kernel knew before is looked up anew."""
    changes_show_at_once(mounted_called(transport=transport))


@pytest.mark.alone
@pytest.mark.root
def test_what_is_changed_shows_at_once_where_nobody_watches(source: Path, mounted_called: CalledMount) -> None:
    with too_few_watches(source):
        called = mounted_called()
    assert "the limit of watched directories is reached" in (status(called.world).watch or "")
    changes_show_at_once(called)


def changes_show_at_once(called: Called) -> None:
    for turn in range(30):
        assert not (called.path / f"docs/{turn}").exists()
        called("write_file", path=f"docs/{turn}", content="first")
        assert (called.path / f"docs/{turn}").read_text() == "first"
        called("write_file", path=f"docs/{turn}", content="second, longer")
        assert (called.path / f"docs/{turn}").read_text() == "second, longer"
        assert len(os.listdir(called.path / "docs")) == 1
        called("delete_file", path=f"docs/{turn}")
        assert not (called.path / f"docs/{turn}").exists()
    assert out_of_band(called.world) == {}


def test_the_command_line_in_a_mount_is_the_sessions(alice: Called, home: Path) -> None:
    """`lease` and `why` there are its agent's; elsewhere, or with a name, they are the operator's."""
    made = bonobofs("lease", "acquire", "docs/**", cwd=alice.path)
    assert made.returncode == 0, made.stderr
    (lease,) = alice("lease.list")
    assert lease["agent"] == "alice"
    assert made.stdout.startswith(f"{lease['id']} until ")
    register("bob")
    assert bonobofs("lease", "acquire", "--agent", "bob", "lib/**", cwd=alice.world.source).returncode == 0
    (other,) = [one for one in alice("lease.list") if one["agent"] == "bob"]
    assert bonobofs("lease", "release", other["id"], cwd=alice.path).returncode == 77
    refused = bonobofs("why", "--json", "lib/a.py", cwd=alice.path)
    assert (refused.returncode, json.loads(refused.stdout)["holder"]) == (77, "bob")
    assert bonobofs("lease", "extend", "--for", "2h", cwd=alice.path).returncode == 0
    assert bonobofs("lease", "release", cwd=alice.path).returncode == 0
    assert bonobofs("lease", "release", other["id"]).returncode == 0
    with Database.open(home) as database:
        assert leases.list_leases(database) == []


def test_an_ordinary_user_has_a_socket_too(ordinary_user: OrdinaryUser) -> None:
    """Without rights, and where the mount covers the source, if there is a right to a namespace."""
    policy = ordinary_user.directory / "policy.toml"
    policy.write_text('default = "allow"\n')
    for name in ("source", "mount"):
        assert ordinary_user.run("mkdir", ordinary_user.directory / name).returncode == 0
    source = ordinary_user.directory / "source"
    covered = ordinary_user.run("unshare", "--user", "--mount", "true").returncode == 0
    for mountpoint in (ordinary_user.directory / "mount", *([source] if covered else [])):
        made = ordinary_user.bonobofs("mount", source, mountpoint, "--agent", "eve", "--policy", policy)
        assert made.returncode == 0, made.stderr
        try:
            # By the command line, which is in the mount.
            said = ordinary_user.run(
                "sh", "-c", f"cd {mountpoint} && exec {ordinary_user.python} -m bonobofs lease acquire 'docs/**'"
            )
            assert said.returncode == 0, said.stderr
            assert "eve" in ordinary_user.bonobofs("lease", "list").stdout
            wrote = ordinary_user.run(ordinary_user.python, "-c", WRITE, mountpoint.name)
            assert wrote.returncode == 0, wrote.stderr
        finally:
            assert ordinary_user.bonobofs("umount", mountpoint).returncode == 0
        assert (source / f"by-{mountpoint.name}").read_text() == "text"


WRITE = """
import sys
from bonobofs import session
from bonobofs.ipc.client import call
from bonobofs.state.home import inside_directory
(one,) = session.statuses(session.home())
directory = inside_directory(session.home(), one.session.session)
print(call(directory, "write_file", path=f"by-{sys.argv[1]}", content="text"))
"""


def test_the_socket_is_gone_with_its_session(alice: Called) -> None:
    """Nobody who comes later finds it, and a caller is told."""
    alice("whoami")
    alice.world.umount()
    assert not (alice.directory / "guard.sock").exists()
    with pytest.raises(FileNotFoundError):
        alice.connect()


def test_many_at_once_are_all_answered(alice: Called) -> None:
    """Forty programs that write and remove, while the mount writes too; the record is whole at the end."""
    program = """
import sys
from pathlib import Path
from bonobofs.ipc.client import call
directory, name = Path(sys.argv[1]), sys.argv[2]
for turn in range(5):
    call(directory, "write_file", path=f"{name}/file", content=str(turn))
assert Path(sys.argv[3], name, "file").read_text() == "4"
call(directory, "delete_file", path=f"{name}/file")
assert not Path(sys.argv[3], name, "file").exists()
"""
    command = [sys.executable, "-c", program, str(alice.directory)]
    running = [subprocess.Popen([*command, f"d{number}", str(alice.path)]) for number in range(20)]
    for turn in range(200):
        (alice.path / "own").write_text(str(turn))
    assert [one.wait(100) for one in running] == [0] * 20
    alice.world.umount()
    report = verify_trail(alice.world.trail, alice.world.head, session=alice.world.session.session)
    assert (report.findings, report.unfinished) == ([], [])
