"""Leases on the command line."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bonobofs import session
from bonobofs.session import lease_service
from tests.support.observe import stopped
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, bonobofs, environment, register


def listed() -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(bonobofs("lease", "list", "--json").stdout)
    return found


def test_a_lease_can_be_acquired_listed_extended_and_released(home: Path) -> None:
    """Other agents are refused meanwhile."""
    register("ann", "bob")
    assert bonobofs("lease", "list").stdout == "nothing is leased\n"
    made = bonobofs(
        "lease",
        "acquire",
        "--all-workspaces",
        "--chain",
        "C1",
        "--agent",
        "ann",
        "--for",
        "2h",
        "--reason",
        "it",
        "src/**",
        "a",
    )
    assert made.returncode == 0, made.stderr
    (lease,) = listed()
    assert made.stdout.startswith(f"{lease['id']} until ")
    assert {name: lease[name] for name in ("holder", "agent", "chain", "patterns", "shared", "reason")} == {
        "holder": "chain:C1",
        "agent": "ann",
        "chain": "C1",
        "patterns": ["a", "src/**"],
        "shared": False,
        "reason": "it",
    }
    until, acquired = (datetime.fromisoformat(str(lease[name])) for name in ("until", "acquired"))
    assert until - acquired == timedelta(hours=2)
    assert "chain C1 (ann)  exclusive  a, src/**" in bonobofs("lease", "list").stdout

    refused = bonobofs("lease", "acquire", "--all-workspaces", "--agent", "bob", "--shared", "**/*.py")
    assert (refused.returncode, refused.stderr.count("\n")) == (77, 1)
    assert "**/*.py overlaps with src/**, held by chain C1 (ann) until" in refused.stderr

    assert bonobofs("lease", "extend", "--chain", "C1", "--for", "7d").returncode == 0
    assert datetime.fromisoformat(str(listed()[0]["until"])) > until + timedelta(days=6)
    assert bonobofs("lease", "release", "--agent", "bob", str(lease["id"])).returncode == 77
    assert bonobofs("lease", "release", "--agent", "bob").returncode == 2
    assert bonobofs("lease", "release", "--chain", "C1").returncode == 0
    assert listed() == []


def test_the_operator_may_release_every_lease(home: Path) -> None:
    """By its UUID, without an agent's name."""
    register("ann")
    bonobofs("lease", "acquire", "--all-workspaces", "--agent", "ann", "docs/**")
    (lease,) = listed()
    assert bonobofs("lease", "extend", str(lease["id"])).returncode == 0
    assert bonobofs("lease", "release", str(lease["id"])).returncode == 0
    assert listed() == []
    assert bonobofs("lease", "release", str(uuid.uuid4())).returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [(), ("/docs",), ("docs", "--for", "soon"), ("docs", "--for", "0s"), ("docs", "--chain", "a/b"), ("!docs",)],
)
def test_invalid_arguments_are_usage_errors(arguments: tuple[str, ...], home: Path) -> None:
    wrong = bonobofs("lease", "acquire", "--all-workspaces", *arguments)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("duration", ["-1h", "soon"])
def test_a_duration_that_is_none_shows_the_form_of_one(duration: str, home: Path) -> None:
    """Also one that begins as an option does."""
    wrong = bonobofs("lease", "acquire", "--all-workspaces", "docs", "--for", duration)
    assert wrong.stderr.startswith(f"bonobofs: '{duration}' is no positive duration; give one such as 30s")


def test_mounts_of_the_holding_chain_may_write_and_others_get_the_holder(mounted: Mounted, home: Path) -> None:
    """`why` and the mount itself name holder and expiry."""
    register("bob")
    world = mounted(policy=ALLOW_ALL, agent="ann")
    assert (
        bonobofs("lease", "acquire", "--all-workspaces", "--chain", "C1", "--agent", "bob", "docs/**").returncode == 0
    )
    (world.path / "docs").mkdir()
    with pytest.raises(PermissionError):
        (world.path / "docs/a.md").touch()
    why = bonobofs("why", world.path / "docs/a.md")
    assert why.returncode == 77
    assert "It is held by bob for chain C1 until 20" in why.stdout
    told = json.loads(bonobofs("why", world.path / "docs/a.md", "--json").stdout)
    denied = json.loads((world.path / ".bonobofs/denials.jsonl").read_text().splitlines()[-1])
    for answer in (told, denied):
        assert (answer["code"], answer["holder"], answer["chain"]) == ("LEASED", "bob", "C1")
        assert answer["until"] == denied["until"]
    world.umount()
    order = session.MountRequest(
        world.source, world.path, agent="ann", policy=Path(world.session.policy.origin), chain="C1"
    )
    again = session.start(home, order)
    try:
        assert again.session.chain == "C1"
        assert json.loads((world.path / ".bonobofs/whoami.json").read_text())["chain"] == "C1"
        (world.path / "docs/a.md").touch()
    finally:
        session.unmount_session(home, world.path)


def test_a_lease_may_apply_to_one_source(mounted: Mounted, tmp_path: Path) -> None:
    register("bob")
    world = mounted(policy=ALLOW_ALL, agent="ann")
    assert bonobofs("lease", "acquire", "--agent", "bob", "--workspace", tmp_path, "**").returncode == 0
    (world.path / "a").touch()
    assert bonobofs("lease", "acquire", "--agent", "bob", "--workspace", world.source, "**").returncode == 0
    with pytest.raises(PermissionError):
        (world.path / "a").write_text("text")


def test_a_workspace_that_is_no_directory_is_refused(mounted: Mounted) -> None:
    """The holder keeps its lease."""
    register("bob")
    world = mounted(policy=ALLOW_ALL, agent="ann")
    (world.source.parent / "file").touch()
    assert bonobofs("lease", "acquire", "--agent", "bob", "--workspace", world.source, "**").returncode == 0
    before = listed()
    for name in ("absent", "file"):
        path = world.source.parent / name
        made = bonobofs("lease", "acquire", "--agent", "bob", "--workspace", path, "**")
        assert (made.returncode, f"{path} is not a directory" in made.stderr) == (2, True)
    assert listed() == before


def test_a_mountpoint_names_its_source(mounted: Mounted) -> None:
    """A directory inside a source is refused: a lease of it would cover no path."""
    register("bob")
    world = mounted(policy=ALLOW_ALL, agent="ann")
    (world.path / "docs").mkdir()
    wrong = bonobofs("lease", "acquire", "--agent", "bob", "--workspace", world.path / "docs", "**")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert f"lies inside {world.source}; name that" in wrong.stderr
    assert wrong.stderr.endswith("such as docs/**\n")
    assert bonobofs("lease", "acquire", "--agent", "bob", "--workspace", world.path, "docs/**").returncode == 0
    assert listed()[0]["workspace"] == str(world.source)
    with pytest.raises(PermissionError):
        (world.path / "docs/a").write_text("text")


def test_an_interrupted_acquire_reports_the_granted_lease(mounted: Mounted) -> None:
    """No other holder gets it. The message names the sessions that have not acknowledged it."""
    register("bob")
    world = mounted(policy=ALLOW_ALL, agent="ann")
    with stopped(world.pid):
        command = [
            sys.executable,
            "-m",
            "bonobofs",
            "lease",
            "acquire",
            "--all-workspaces",
            "--agent",
            "bob",
            "docs/**",
        ]
        with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as acquiring:
            (lease,) = until(listed, "it is granted")
            # Granted a moment ago, it waits from now on.
            until(lambda: "nanosleep" in Path(f"/proc/{acquiring.pid}/wchan").read_text(), "it waits")
            acquiring.send_signal(signal.SIGINT)
            _, said = acquiring.communicate(timeout=30)
    assert acquiring.returncode == 130
    assert said.startswith(f"bonobofs: the lease {lease['id']} is granted, but these sessions may not enforce it yet: ")
    assert f"ann on {os.uname().nodename} in {world.source}" in said
    assert listed() == [lease]


def test_a_session_whose_server_is_stopped_is_named(mounted: Mounted) -> None:
    """After five seconds `acquire` names it and the remedy, and returns when the server continues."""
    register("bob")
    world = mounted(policy=ALLOW_ALL, agent="ann")
    command = [sys.executable, "-m", "bonobofs", "lease", "acquire", "--all-workspaces", "--agent", "bob", "docs/**"]
    with stopped(world.pid):
        acquiring = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
        assert acquiring.stderr is not None
        assert select.select([acquiring.stderr], [], [], 60)[0], "it says nothing"
        said = acquiring.stderr.readline()
        assert acquiring.poll() is None
    with acquiring:
        assert acquiring.wait(60) == 0
    assert f"waits for ann on {os.uname().nodename} in {world.source} (its server is stopped" in said
    assert f"kill -CONT {world.pid}" in said


def test_an_unreadable_file_is_a_one_line_error(home: Path, tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\xff")
    for file in (tmp_path / "none", tmp_path / "odd", tmp_path):
        for command in ("lease", "policy"):
            wrong = bonobofs(command, "import", file)
            assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (1, "", 1)
            assert f"{file} cannot be read" in wrong.stderr
    assert not (home / "bonobofs.log").exists()


def test_locks_of_choragen_become_leases(home: Path, tmp_path: Path) -> None:
    """Each dropped lock is listed with its line, and the exit code is not 0."""
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    locks: dict[str, Any] = {
        "version": 1,
        "chains": {
            "CHAIN-001": {"files": ["src/**"], "agent": "impl", "expiresAt": later},
            "CHAIN-002": {"files": ["src/a"], "expiresAt": later},
        },
    }
    file = tmp_path / "locks.json"
    file.write_text(json.dumps(locks, indent=1))
    done = bonobofs("lease", "import", "--all-workspaces", file)
    assert done.returncode == 1
    (lease,) = listed()
    assert done.stderr == (
        f"bonobofs: {file}: line 11: CHAIN-002: src/a overlaps with src/**, held by chain CHAIN-001 (impl) until "
        f"{str(lease['until'])[:19]}+00:00; wait for it, or ask them to release it\n"
    )
    assert [(lease["holder"], lease["patterns"]) for lease in listed()] == [("chain:CHAIN-001", ["src/**"])]
    del locks["chains"]["CHAIN-002"]
    locks["chains"]["CHAIN-001"]["files"] = ["docs/**"]
    file.write_text(json.dumps(locks, indent=1))
    again = bonobofs("lease", "import", "--all-workspaces", file)
    assert (again.returncode, again.stderr) == (
        1,
        f"bonobofs: {file}: line 4: CHAIN-001 no longer holds src/** here\n",
    )


def test_a_governance_of_choragen_becomes_a_policy(tmp_path: Path) -> None:
    file = tmp_path / "choragen.governance.yaml"
    file.write_text("mutations:\n  allow:\n    - pattern: docs/**\n")
    done = bonobofs("policy", "import", file)
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "policy.toml").write_text(done.stdout)
    assert bonobofs("policy", "check", tmp_path / "policy.toml").returncode == 0
    file.write_text("mutations:\n  approve:\n    - pattern: docs/**\n")
    done = bonobofs("policy", "import", file)
    assert (done.returncode, done.stderr.count("line 3")) == (1, 1)


def test_a_reused_label_of_a_removed_agent_inherits_nothing(mounted: Mounted, home: Path) -> None:
    """No role, team, lease or history. The history is found by UUID, under the label."""
    assert bonobofs("team", "add", "red").returncode == 0
    assert bonobofs("agent", "add", "bob", "--team", "red", "--role", "agent").returncode == 0
    world = mounted(policy=ALLOW_ALL, agent="bob")
    (world.path / "a.md").write_text("text")
    assert bonobofs("lease", "acquire", "--all-workspaces", "--agent", "bob", "docs/**").returncode == 0
    refused = bonobofs("agent", "remove", "bob")
    assert (refused.returncode, "live session" in refused.stderr) == (1, True)
    world.umount()
    first = world.session.agent_id
    assert bonobofs("agent", "remove", first.upper()).returncode == 0
    assert listed() == []
    assert bonobofs("agent", "add", "bob").returncode == 0
    (second,) = json.loads(bonobofs("agent", "list", "--json").stdout)
    assert second["id"] != first
    assert (second["team"], second["team_id"], second["role"], second["roles"]) == (None, None, None, [])
    (gone,) = [one for one in json.loads(bonobofs("agent", "list", "--removed", "--json").stdout) if one["id"] == first]
    (red,) = json.loads(bonobofs("team", "list", "--json").stdout)
    assert (gone["team"], gone["team_id"], gone["roles"]) == ("red", red["id"], ["agent"])

    def done_by(agent: str) -> list[tuple[str, str]]:
        found = json.loads(bonobofs("audit", "query", "--agent", agent, "--json").stdout)
        return [(entry["agent"], entry["agent_id"]) for entry in found]

    assert done_by("bob") == []
    assert set(done_by(first)) == {("bob", first)}
    assert bonobofs("mount", world.source, world.path, "--agent", first).returncode == 2
    assert bonobofs("lease", "release", "--agent", first).returncode == 2


def test_a_uuid_names_an_agent(home: Path) -> None:
    assert bonobofs("agent", "add", "ann").returncode == 0
    (ann,) = json.loads(bonobofs("agent", "list", "--json").stdout)
    assert bonobofs("lease", "acquire", "--all-workspaces", "--agent", ann["id"], "docs/**").returncode == 0
    (lease,) = listed()
    assert (lease["agent"], lease["agent_id"], lease["holder"]) == ("ann", ann["id"], f"agent:{ann['id']}")
    assert bonobofs("lease", "release", "--agent", "ann").returncode == 0


def test_the_scope_is_the_workspace_around_the_working_directory(mounted: Mounted, tmp_path: Path) -> None:
    """In a source or a mount, that source; elsewhere a lease needs a workspace, or all of them."""
    world = mounted(policy=ALLOW_ALL, agent="ann")
    (world.path / "docs").mkdir()
    for directory in (world.source / "docs", world.path, world.source):
        made = bonobofs("lease", "acquire", "--agent", "ann", "docs/**", cwd=directory)
        assert (made.returncode, made.stderr) == (0, "")
        assert [one["workspace"] for one in listed()] == [str(world.source)]
    elsewhere = bonobofs("lease", "acquire", "--agent", "ann", "docs/**", cwd=tmp_path)
    assert (elsewhere.returncode, "give --workspace DIR" in elsewhere.stderr) == (2, True)
    both = bonobofs("lease", "acquire", "--all-workspaces", "--workspace", tmp_path, "docs/**")
    assert (both.returncode, "mutually exclusive" in both.stderr) == (2, True)
    assert bonobofs("lease", "acquire", "--agent", "ann", "--all-workspaces", "docs/**").returncode == 0
    assert [one["workspace"] for one in listed()] == [None]


def test_the_policy_limits_the_leases_of_a_session(mounted: Mounted) -> None:
    """`max` and `who` apply to a session. The operator, who names an agent, may exceed them."""
    text = ALLOW_ALL + '[leases]\nmax = "2h"\nwho = ["agent"]\n[role.other]\nwrite = ["**"]\n'
    world = mounted(policy=text, agent="ann")
    long = bonobofs("lease", "acquire", "docs/**", "--for", "3h", cwd=world.path)
    assert (long.returncode, "limits a lease to 2h" in long.stderr) == (77, True)
    assert "Errno" not in long.stderr
    assert bonobofs("lease", "acquire", "docs/**", "--for", "2h", cwd=world.path).returncode == 0
    assert bonobofs("lease", "extend", "--for", "3h", cwd=world.path).returncode == 77
    assert bonobofs("lease", "extend", "--for", "1h", cwd=world.path).returncode == 0
    everywhere = bonobofs("lease", "acquire", "--all-workspaces", "lib/**", cwd=world.path)
    assert (everywhere.returncode, "in its own workspace" in everywhere.stderr) == (77, True)
    assert "Leases of this workspace: at most 2h long." in (world.path / ".bonobofs/policy.md").read_text()
    operator = bonobofs("lease", "acquire", "--agent", "ann", "lib/**", "--for", "9h", cwd=world.source)
    assert operator.returncode == 0, operator.stderr
    denials = [json.loads(line) for line in (world.path / ".bonobofs/denials.jsonl").read_text().splitlines()]
    assert {(one["code"], one["rule"]) for one in denials} == {("ROLE", "leases")}


@pytest.mark.parametrize(
    ("leases", "role", "code"),
    [
        ("", "nowhere", 77),
        ("", "agent", 0),
        ('[leases]\nwho = ["nowhere"]\n', "nowhere", 0),
        ('[leases]\nwho = ["nowhere"]\n', "agent", 77),
    ],
)
def test_a_read_only_role_leases_only_if_the_policy_allows_it(
    mounted: Mounted, leases: str, role: str, code: int
) -> None:
    """By default, a role cannot block paths that it may not write."""
    world = mounted(policy=ALLOW_ALL + leases + "[role.nowhere]\nwrite = []\n", agent="ann", role=role)
    made = bonobofs("lease", "acquire", "docs/**", cwd=world.path)
    assert (made.returncode, f"The role {role} may not acquire leases" in made.stderr) == (code, code == 77)


def test_the_mount_permits_writes_when_release_returns(mounted: Mounted, home: Path, tmp_path: Path) -> None:
    """In 10 repetitions the next write in each of 5 mounts succeeds at once; the same after a lease is shortened."""
    bob, files = lease_service.HolderOption("bob"), []
    for name in ("a", "b", "c", "d", "e"):
        (tmp_path / name).mkdir()
        files.append(mounted(policy=ALLOW_ALL, agent="ann", source=tmp_path / name).path / "file")
        files[-1].touch()
    for turn in range(10):
        lease_service.acquire(home, bob, ["**"], lease_service.LeaseTerms())
        for file in files:
            with pytest.raises(PermissionError):
                file.write_text("refused")
        lease_service.release(home, bob, None)
        for file in (*files[turn % 5 :], *files[: turn % 5]):
            file.write_text(str(turn))
    file = files[0]
    lease_service.acquire(home, bob, ["**"], lease_service.LeaseTerms())
    lease = lease_service.extend(home, bob, None, 0.001)
    assert lease.until is not None
    assert lease_service.list_leases(home) == []
    file.write_text("over")
