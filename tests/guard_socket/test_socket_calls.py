"""The calls of the guard socket, and the agent as which each acts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.audit.verify import verify_trail
from bonobofs.errors import BonobofsError, ForbiddenError, UsageError
from bonobofs.policy.decision import Code, Refused
from bonobofs.state import leases
from bonobofs.state.database import Database
from bonobofs.state.home import session_directory
from tests.guard_socket.conftest import Called, CalledMount
from tests.support.observe import out_of_band, recorded, status, too_few_watches
from tests.support.wait import until
from tests.support.world import OrdinaryUser, bonobofs, register


def test_whoami_equals_that_of_the_mount(alice: Called) -> None:
    assert alice("whoami") == json.loads((alice.path / ".bonobofs/whoami.json").read_text())


def test_calls_that_cannot_be_loaded_give_an_error(mounted_called: CalledMount) -> None:
    """The mount works, the error of a call says what is missing, and so does the log."""
    called = mounted_called(companion="tests.guard_socket.broken_companion")
    (called.path / "file").write_text("written")
    for _ in range(2):
        with pytest.raises(BonobofsError, match=r"bonobofs\.companion\.calls.*mount again"):
            called("whoami")
    log = session_directory(called.world.home, called.world.session.session) / "server.log"
    assert log.read_text().count("the calls of the session cannot be loaded: ModuleNotFoundError") == 1


def test_a_file_is_written_and_removed_with_a_permit(alice: Called) -> None:
    """The trail has intent and outcome, the mount shows the file at once, and it is no out-of-band change."""
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
    until(lambda: "sign" in out_of_band(alice.world), "the external change is recorded")
    assert list(out_of_band(alice.world)) == ["sign"]


def test_the_file_tools_read_the_workspace_and_are_recorded(alice: Called) -> None:
    """Lines, names and matches, by paths of the workspace or the mount; each call is one entry."""
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
    """Also if the role may write: the policy lists the tools that a role may call."""
    called = mounted_called(policy='default = "allow"\n[role.r]\nwrite = ["**"]\ntools = ["read_file"]\n', role="r")
    (called.path / "a").write_text("text")
    assert called("read_file", path="a")["total_lines"] == 1
    for name, arguments in (("write_file", {"path": "b", "content": "text"}), ("search_files", {"query": "text"})):
        with pytest.raises(Refused) as refused:
            called(name, **arguments)
        assert refused.value.decision.code is Code.ROLE


def test_an_undefined_role_leases_nothing(mounted_called: CalledMount) -> None:
    """It may change nothing, so a lease of it would only block other agents."""
    called = mounted_called(policy='default = "allow"\n', role="stranger")
    for name, arguments in (("lease.acquire", {"patterns": ["**"]}), ("lease.extend", {})):
        with pytest.raises(Refused) as refused:
            called(name, **arguments)
        assert refused.value.decision.code is Code.ROLE
    assert called("lease.list") == []


def test_a_lease_acquired_in_a_mount_belongs_to_its_agent(alice: Called, tmp_path: Path) -> None:
    """It is stored in the state directory of the session, not in that of the caller."""
    other = {"BONOBOFS_HOME": str(tmp_path / "other")}
    acquired = bonobofs("lease", "acquire", "docs/**", cwd=alice.path, env=other)
    assert acquired.returncode == 0, acquired.stderr
    (lease,) = alice("lease.list")
    assert (lease["agent"], lease["patterns"]) == ("alice", ["docs/**"])
    assert bonobofs("lease", "list", env=other).stdout == "nothing is leased\n"


def test_create_only_on_an_existing_file_is_a_recorded_error(alice: Called) -> None:
    alice("write_file", path="a", content="first")
    with pytest.raises(FileExistsError):
        alice("write_file", path="a", content="second", createOnly=True)
    assert (alice.path / "a").read_text() == "first"
    assert [one.result for one in alice.of("a")][-1] == "error"


def test_a_denial_has_code_rule_and_remedy(mounted_called: CalledMount) -> None:
    """It is in the mount's denials.jsonl, and the third one is an alert."""
    called = mounted_called(policy=None)
    for _ in range(3):
        with pytest.raises(Refused) as refused:
            called("write_file", path="notes.txt", content="text")
    denied = refused.value.decision
    assert (denied.code, denied.path) == (Code.DEFAULT, "notes.txt")
    assert called("why", path="notes.txt")["code"] == "DEFAULT"
    denials = [json.loads(line) for line in (called.path / ".bonobofs/denials.jsonl").read_text().splitlines()]
    assert [denial["path"] for denial in denials] == ["notes.txt"] * 3
    assert [one.reason for one in called.world.entries() if one.kind == "alert"] == [
        "three denials of one agent within five minutes"
    ]


def test_a_call_that_names_another_agent_is_refused_with_an_alert(alice: Called) -> None:
    """For every call; the agent's own label and UUID are accepted."""
    who = alice("whoami")
    for agent in (who["agent"], who["agent_id"]):
        alice("write_file", path="own", content="text", agent=agent)
    for name, arguments in (("write_file", {"path": "a", "content": "text"}), ("lease.acquire", {"patterns": ["**"]})):
        with pytest.raises(Refused) as refused:
            alice(name, agent="bob", **arguments)
        assert refused.value.decision.code is Code.IDENTITY
    assert not (alice.source / "a").exists()
    assert alice("lease.list") == []
    alerts = [one for one in alice.world.entries() if one.kind == "alert"]
    assert [(one.code, one.operation) for one in alerts] == [("IDENTITY", "write_file"), ("IDENTITY", "call")]
    denials = [one for one in alice.world.entries() if one.kind == "intent" and one.result == "denied"]
    assert [(one.tool, one.details["claimed"]) for one in denials] == [("write_file", "bob"), ("lease.acquire", "bob")]


def test_a_path_outside_the_workspace_is_refused(alice: Called, tmp_path: Path) -> None:
    """By `..`, by an absolute path, by a symlink."""
    (alice.source / "out").symlink_to(tmp_path)
    for path in ("../a", str(tmp_path / "a"), "out/a", "a\0b"):
        with pytest.raises(Refused) as refused:
            alice("write_file", path=path, content="text")
        assert refused.value.decision.code is Code.OUTSIDE
    assert not (tmp_path / "a").exists()


def test_scratch_files_are_created_only_in_the_mount(mounted_called: CalledMount) -> None:
    """`why` answers for the mount; the tool is refused, because it works on the source."""
    called = mounted_called(policy='default = "allow"\n[[scratch]]\npaths = ["build/"]\n')
    assert called("why", path="build/a.o")["rule"].startswith("scratch")
    with pytest.raises(Refused, match="Scratch files exist only inside a mount"):
        called("write_file", path="build/a.o", content="text")
    assert not (called.source / "build").exists()


def test_leases_belong_to_the_agent_of_the_session(alice: Called, mounted_called: CalledMount) -> None:
    """A lease binds other agents when the call returns; they cannot release it; the trail has each."""
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


INVALID: tuple[tuple[str, dict[str, object], str], ...] = (
    ("rm", {}, "there is no call 'rm'"),
    ("write_file", {"path": "a"}, "needs content"),
    ("write_file", {"path": "a", "content": 7}, "content is not of the type str"),
    ("write_file", {"path": "a", "content": "a", "mode": 7}, "takes no mode"),
    ("lease.acquire", {"patterns": ["a", 7]}, "patterns must be a list of texts"),
    ("lease.acquire", {"patterns": ["a"], "seconds": True}, "seconds is not of the type int"),
    ("lease.acquire", {"patterns": ["a"], "seconds": -1}, "a lease lasts more than 0 seconds"),
    ("lease.acquire", {"patterns": ["[a"]}, "cannot be leased"),
    ("read_file", {"path": "a", "offset": 1 << 70}, "too large a number"),
    ("lease.release", {}, "holds no lease"),
    ("why", {"path": "a", "operation": "explode"}, "there is no operation 'explode'"),
)


def test_invalid_arguments_are_usage_errors(alice: Called) -> None:
    for name, arguments, message in INVALID:
        with pytest.raises(UsageError, match=message):
            alice(name, **arguments)


@pytest.mark.parametrize("transport", ["kernel", "portable"])
def test_the_change_of_a_call_shows_at_once(mounted_called: CalledMount, transport: str) -> None:
    """Cached names and attributes are invalidated before the call returns."""
    changes_show_at_once(mounted_called(transport=transport))


@pytest.mark.alone
@pytest.mark.root
def test_a_call_shows_at_once_without_a_watcher(source: Path, mounted_called: CalledMount) -> None:
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


def test_the_command_line_in_a_mount_acts_as_the_agent(alice: Called, home: Path) -> None:
    """`lease` and `why` act as the agent of the mount; elsewhere, or with `--agent`, as the operator."""
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


def test_an_ordinary_user_has_a_guard_socket(ordinary_user: OrdinaryUser) -> None:
    """Also if the mount covers the source, where the kernel allows user namespaces."""
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
            # The command line calls the socket when it runs in the mount.
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


def test_the_socket_ends_with_its_session(alice: Called) -> None:
    """guard.sock is removed, and a later connection fails."""
    alice("whoami")
    alice.world.umount()
    assert not (alice.directory / "guard.sock").exists()
    with pytest.raises(FileNotFoundError):
        alice.connect()


def test_many_calls_at_once_are_all_answered(alice: Called) -> None:
    """Twenty programs write and remove while the mount writes too; the trail verifies at the end."""
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


def test_a_mark_begins_a_turn_of_the_session(alice: Called) -> None:
    """A write that goes on over a mark gets an intent in each turn."""
    with open(alice.path / "notes.md", "w", buffering=1) as file:
        file.write("one\n")
        marked = alice("mark", name="say more")["turn"]
        file.write("two\n")
    second = alice("mark", name="prompt", by="hook")["turn"]
    alice("call.begin", tool_call="toolu_1", tool="Bash", agent_session="s-1", turn="t-1")
    alice("call.end", tool_call="toolu_1")
    turns = recorded(alice.world, "turn")
    assert [entry.details for entry in turns] == [
        {"name": "say more", "by": "mark"},
        {"name": "prompt", "by": "hook"},
    ]
    assert [f"{entry.session[:8]}:{entry.seq}" for entry in turns] == [marked, second]
    writes = [entry.seq for entry in recorded(alice.world, "write_file", "intent")]
    assert any(turns[0].seq < seq < turns[1].seq for seq in writes)
    (begin,), (end,) = recorded(alice.world, "call_begin"), recorded(alice.world, "call_end")
    assert begin.details.pop("process") == end.details.pop("process") > 0
    assert begin.details == {"tool_call": "toolu_1", "tool": "Bash", "agent_session": "s-1", "turn": "t-1"}
    assert end.details == {"tool_call": "toolu_1"}
    with pytest.raises(UsageError):
        alice("mark", name="x", by="pause")


def test_the_command_marks_the_session_of_its_mount(alice: Called) -> None:
    ran = bonobofs("mark", "say hello", cwd=alice.path)
    assert ran.returncode == 0, ran.stderr
    (turn,) = recorded(alice.world, "turn")
    assert ran.stdout == f"{turn.session[:8]}:{turn.seq}\n"
    ran = bonobofs("mark", "say hello", cwd=alice.source.parent)
    assert ran.returncode == 2
    assert "run this in the mount" in ran.stderr
