"""`mount`, `umount` and `status`, as a person runs them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bonobofs.system import mounts, processes
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, ROOT, Mounted, OrdinaryUser, bonobofs, environment, wait_for_mount


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    path = tmp_path / "mount"
    path.mkdir()
    return path


def _status(*arguments: str) -> list[dict[str, Any]]:
    listed = json.loads(bonobofs("status", "--json", *arguments).stdout)
    assert isinstance(listed, list)
    return listed


@pytest.mark.parametrize(("asked", "taken"), [("auto", "kernel"), ("kernel", "kernel"), ("portable", "portable")])
def test_a_directory_is_mounted_used_and_unmounted(source: Path, mountpoint: Path, asked: str, taken: str) -> None:
    """The commands of the README work with either transport."""
    made = bonobofs("mount", source, mountpoint, "--agent", "alice", "--transport", asked)
    try:
        assert made.returncode == 0, made.stderr
        assert f"{source} on {mountpoint} for alice, role agent" in made.stdout
        assert f"transport {taken}" in made.stdout
        assert [one["transport"] for one in _status()] == [taken]
        assert [(mount.fstype, mount.source) for mount in mounts.at(mountpoint)] == [("fuse.bonobofs", str(source))]
        (mountpoint / "aidlc-docs").mkdir()
        (mountpoint / "aidlc-docs" / "plan.md").write_text("a plan")
        with pytest.raises(PermissionError):
            (mountpoint / "aidlc-docs" / "plan.txt").write_text("a plan")
    finally:
        ended = bonobofs("umount", mountpoint)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{mountpoint}: unmounted\n"
    assert (source / "aidlc-docs" / "plan.md").read_text() == "a plan"
    assert not mounts.at(mountpoint)
    assert bonobofs("status").stdout == "nothing is mounted\n"
    assert [one["state"] for one in _status("--all")] == ["ended"]


def test_keep_scratch_keeps_the_scratch_layer(source: Path, mountpoint: Path, home: Path) -> None:
    """`--keep-scratch` leaves the layer in the session's directory. Without it the layer is removed."""
    for kept in ([], ["--keep-scratch"]):
        assert bonobofs("mount", source, mountpoint, *kept).returncode == 0
        (mountpoint / "build").mkdir()
        (mountpoint / "build/x").write_text("built")
        assert bonobofs("umount", mountpoint).returncode == 0
        assert list(source.iterdir()) == []
        found = [path.relative_to(home / "sessions").parts[1:] for path in (home / "sessions").rglob("x")]
        assert found == ([("kept", "build", "x")] if kept else [])


def test_mount_py_mounts_as_the_command_does(source: Path, mountpoint: Path) -> None:
    """`python mount.py SOURCE MOUNTPOINT` works from a checkout without an installation."""
    made = subprocess.run([sys.executable, ROOT / "mount.py", source, mountpoint], capture_output=True, check=False)
    try:
        assert made.returncode == 0, made.stderr
        assert (mountpoint / ".bonobofs" / "policy.md").read_text().startswith("# ")
    finally:
        assert bonobofs("umount", mountpoint).returncode == 0


def test_relative_paths_and_a_working_directory_in_the_mountpoint_work(source: Path, mountpoint: Path) -> None:
    """`bonobofs mount ../source .` warns that the calling shell is outside the mount."""
    shell = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m bonobofs mount ../source . ; echo "exit $?"'],
        cwd=mountpoint,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        assert shell.stdout.endswith("exit 0\n"), shell.stderr
        assert (
            f"Processes with their working directory in {mountpoint} stay outside the mount: sh (pid " in shell.stderr
        )
    finally:
        assert bonobofs("umount", mountpoint).returncode == 0


def test_the_source_itself_can_be_the_mountpoint(source: Path) -> None:
    """The writes are there after the end."""
    made = bonobofs("mount", source, source)
    try:
        assert made.returncode == 0, made.stderr
        assert (source / ".bonobofs" / "whoami.json").exists()
        (source / "tests").mkdir()
    finally:
        assert bonobofs("umount", source).returncode == 0
    assert os.listdir(source) == ["tests"]


def test_status_json_has_the_documented_fields(mounted: Mounted) -> None:
    """source, mountpoint, agent, role, session, pid, state, transport and policy."""
    world = mounted(policy=ALLOW_ALL, agent="bob")
    until(lambda: _status()[0]["old_contents"] is not None, "the store is measured")
    (one,) = _status()
    assert one["source"] == str(world.source)
    assert one["mountpoint"] == str(world.path)
    assert (one["agent"], one["role"], one["state"], one["transport"]) == ("bob", "agent", "serving", "kernel")
    assert (one["session"], one["pid"]) == (world.session.session, world.pid)
    assert set(one["policy"]) == {"origin", "digest", "generation"}
    assert one["old_contents"] == {"bytes": 0, "max_total": 2 * 10**9}
    said = bonobofs("status").stdout
    assert f"serving  {world.path}" in said
    assert "old contents for undo: 0.0 MB of 2,000 MB" in said
    assert "not watched" not in said


def test_a_killed_server_fails_closed_and_mount_recovers_it(mounted: Mounted) -> None:
    """After kill -9 the path returns ENOTCONN, `status` shows the remedy, and `mount` again serves it."""
    world = mounted(policy=ALLOW_ALL)
    (world.path / "before").write_text("kept")
    world.kill()
    with pytest.raises(OSError, match="not connected") as failure:
        (world.path / "before").read_text()
    assert failure.value.errno == errno.ENOTCONN
    assert [one["state"] for one in _status()] == ["dead"]
    assert f"{world.path}: its server is gone; run bonobofs mount again" in bonobofs("status").stdout

    again = bonobofs("mount", world.source, world.path)
    assert again.returncode == 0, again.stderr
    assert (world.path / "before").read_text() == "kept"
    assert [one["state"] for one in _status()] == ["serving"]
    assert bonobofs("umount", world.path).returncode == 0
    assert not mounts.at(world.path)
    assert _status() == []


def test_umount_removes_dead_mounts(mounted: Mounted) -> None:
    """Also while a process has its working directory there."""
    world = mounted(policy=ALLOW_ALL)
    with subprocess.Popen(["cat"], cwd=world.path, stdin=subprocess.PIPE) as stands_inside:
        world.kill()
        ended = bonobofs("umount", world.path)
        stands_inside.communicate()
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{world.path}: 1 dead mount taken off\n"
    assert not mounts.at(world.path)
    assert _status() == []


def test_umount_removes_stacked_dead_mounts(mounted: Mounted) -> None:
    """Mounting over dead mounts, and dying again, leaves nothing that one `umount` does not clear."""
    world = mounted(policy=ALLOW_ALL)
    world.kill()
    again = mounted(policy=ALLOW_ALL, mountpoint=world.path)
    again.kill()
    mounted(policy=ALLOW_ALL, mountpoint=world.path)
    assert bonobofs("umount", world.path).returncode == 0
    assert not mounts.at(world.path)


def test_a_dead_mount_over_its_own_source_is_recovered(source: Path, mounted: Mounted) -> None:
    """The dead mount is removed first, as it covers the source."""
    world = mounted(policy=ALLOW_ALL, mountpoint=source)
    world.kill()
    again = bonobofs("mount", source, source)
    assert again.returncode == 0, again.stderr
    assert f"dead mount on {world.path} was unmounted" in again.stderr
    assert len(mounts.at(source)) == 1


@pytest.mark.parametrize("mend", ["mount", "umount"])
def test_a_session_without_server_and_closing_entry_is_crashed(mend: str, mounted: Mounted) -> None:
    """`status` shows it until the next mount or umount there."""
    world = mounted(policy=ALLOW_ALL)
    world.kill()
    mounts.detach(world.path, lazy=True)
    assert [one["state"] for one in _status()] == ["crashed"]
    if mend == "mount":
        mounted(policy=ALLOW_ALL).umount()
    else:
        assert bonobofs("umount", world.path).returncode == 0
    assert _status() == []


def test_umount_of_a_busy_mount_names_the_process(mounted: Mounted) -> None:
    """It fails in one line, and the mount continues to serve."""
    world = mounted(policy=ALLOW_ALL)
    with subprocess.Popen(["cat"], cwd=world.path, stdin=subprocess.PIPE) as stands_inside:
        busy = bonobofs("umount", world.path)
        assert busy.returncode == 1
        assert busy.stderr.count("\n") == 1
        assert f"is in use by cat (pid {stands_inside.pid}, cwd)" in busy.stderr
        (world.path / "still").write_text("served")
        stands_inside.communicate()


def test_umount_waits_for_a_process_that_is_ending(mounted: Mounted) -> None:
    """A command may leave a child that ends a moment later, as git does."""
    world = mounted(policy=ALLOW_ALL)
    with subprocess.Popen(["sleep", "0.4"], cwd=world.path):
        assert bonobofs("umount", world.path).stderr == ""
    assert not mounts.at(world.path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("transport", ["kernel", "portable"])
def test_a_signal_ends_a_foreground_mount_cleanly(
    source: Path, mountpoint: Path, transport: str, number: signal.Signals
) -> None:
    """`--foreground` serves in the started process, and a signal ends mount, record and process."""
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "bonobofs",
            "mount",
            str(source),
            str(mountpoint),
            "--foreground",
            "--transport",
            transport,
        ],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with server:
        wait_for_mount(mountpoint)
        (one,) = _status()
        assert (one["pid"], one["state"]) == (server.pid, "serving")
        assert (mountpoint / ".bonobofs" / "policy.md").exists()
        server.send_signal(number)
        _, said = server.communicate(timeout=30)
    assert server.returncode == (130 if number == signal.SIGINT else 0), said
    assert not mounts.at(mountpoint)
    assert [one["state"] for one in _status("--all")] == ["ended"]


def test_a_missing_policy_is_one_line_and_leaves_no_session(home: Path, source: Path, mountpoint: Path) -> None:
    """One line, and neither a session nor a record."""
    failed = bonobofs("mount", source, mountpoint, "--policy", "/nonexistent/policy.toml")
    assert failed.returncode == 1
    assert (
        failed.stderr == "bonobofs: there is no policy file /nonexistent/policy.toml; name one, or leave --policy out\n"
    )
    assert list((home / "sessions").iterdir()) == []
    assert list((home / "trails").iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--foreground"]])
def test_a_failed_mount_reports_the_reason_and_leaves_no_session(
    options: list[str], ordinary_user: OrdinaryUser
) -> None:
    """One line, in the background and in the foreground."""
    source, mountpoint = ordinary_user.directory / "source", ordinary_user.directory / "mount"
    ordinary_user.run("mkdir", source, mountpoint)
    failed = ordinary_user.bonobofs("mount", source, mountpoint, *options, env={"PATH": "/nonexistent"})
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert "fusermount3 is not installed" in failed.stderr
    assert ordinary_user.run("ls", ordinary_user.directory / "home" / "sessions").stdout == ""


def test_an_unreadable_source_is_refused(ordinary_user: OrdinaryUser) -> None:
    """One line that says so."""
    source, mountpoint = ordinary_user.directory / "source", ordinary_user.directory / "mount"
    ordinary_user.run("mkdir", "-m", "0300", source)
    ordinary_user.run("mkdir", mountpoint)
    failed = ordinary_user.bonobofs("mount", source, mountpoint)
    assert failed.returncode == 1
    assert failed.stderr == f"bonobofs: the source {source} cannot be read: Permission denied\n"


def test_one_of_two_concurrent_mounts_succeeds(source: Path, mountpoint: Path) -> None:
    """The other command names the session that has the mountpoint."""
    command = [sys.executable, "-m", "bonobofs", "mount", str(source), str(mountpoint), "--agent", "alice"]
    env = environment()
    both = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in range(2)]
    said = [one.communicate(timeout=60)[1].decode() for one in both]
    try:
        assert sorted(one.returncode for one in both) == [0, 1]
        assert any(f"{mountpoint} is already mounted by alice" in text for text in said)
    finally:
        assert bonobofs("umount", mountpoint).returncode == 0


@pytest.mark.parametrize(
    ("below", "at", "said"),
    [
        ("none", "mount", "cannot be used: No such file"),
        ("source", "none", "create it: mkdir -p"),
        ("file", "mount", "is not a directory"),
        ("source", "file", "is not a directory"),
        ("source", "source/inside", "lies inside its source"),
        ("around/source", "around", "lies inside the mountpoint"),
        ("source", "/", "the root directory cannot be a mountpoint"),
        ("home", "mount", "lies inside the source"),
        ("source", "home", "lies inside the mountpoint"),
        ("home/trails", "mount", "holds the record"),
        ("source", "home/sessions", "holds the record"),
        ("source", sys.prefix, "inside the mountpoint, which would hang"),
        ("source", str(ROOT), "inside the mountpoint, which would hang"),
    ],
)
def test_unsafe_source_and_mountpoint_pairs_are_refused(
    below: str, at: str, said: str, tmp_path: Path, source: Path, mountpoint: Path
) -> None:
    """Each refusal is one line with the remedy and exit 1. No mount and no session is made."""
    (source / "inside").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "around" / "source").mkdir(parents=True)
    refused = bonobofs("mount", tmp_path / below, tmp_path / at)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert said in refused.stderr
    assert not mounts.at(tmp_path / at)
    assert _status("--all") == []


def test_a_mount_cannot_be_a_source_or_contain_a_mountpoint(mounted: Mounted, tmp_path: Path) -> None:
    """A directory inside a mount and a used mountpoint are refused."""
    world = mounted(policy=ALLOW_ALL)
    (world.path / "inside").mkdir()
    for below, at, said in [
        (world.path / "inside", tmp_path / "other", "lies in a mount of bonobofs"),
        (tmp_path / "other", world.path / "inside", "lies in a mount of bonobofs"),
        (tmp_path / "other", world.path, "is already mounted by alice"),
    ]:
        (tmp_path / "other").mkdir(exist_ok=True)
        refused = bonobofs("mount", below, at)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert said in refused.stderr


def test_a_second_mount_of_a_source_is_served_with_a_warning(mounted: Mounted, tmp_path: Path) -> None:
    """Two agents may work on one source. The warning says that file locks do not apply across mounts."""
    world = mounted(policy=ALLOW_ALL)
    (tmp_path / "second").mkdir()
    made = bonobofs("mount", world.source, tmp_path / "second", "--agent", "bob", "--new")
    try:
        assert made.returncode == 0
        assert f"{world.source} is also mounted on {world.path}" in made.stderr
    finally:
        assert bonobofs("umount", tmp_path / "second").returncode == 0


def test_a_policy_inside_the_source_is_never_read(source: Path, mountpoint: Path) -> None:
    """An agent could change it there."""
    (source / "policy.toml").write_text(ALLOW_ALL)
    refused = bonobofs("mount", source, mountpoint, "--policy", source / "policy.toml")
    assert refused.returncode == 2
    assert "lies inside the source" in refused.stderr


def test_the_operators_policy_precedes_the_packaged_one(home: Path, mounted: Mounted) -> None:
    """The order is --policy, policy.toml in the state directory, the packaged default."""
    (home / "policy.toml").write_text(ALLOW_ALL)
    world = mounted()
    assert world.session.policy.origin == str(home / "policy.toml")
    (world.path / "anything").write_text("goes")
    other = mounted(policy='default = "deny"')
    with pytest.raises(PermissionError):
        (other.path / "anything").write_text("goes")


def test_the_role_is_that_of_the_option_the_agent_or_the_policy(mounted: Mounted) -> None:
    """A new agent is registered with the role of its first mount, and keeps it."""
    policy = ALLOW_ALL + 'default_role = "reader"\n[role.reader]\n[role.writer]\nwrite = ["**"]\n'
    assert mounted(policy=policy, agent="ann").session.role == "reader"
    assert mounted(policy=policy, agent="ben", role="writer").session.role == "writer"
    assert mounted(policy=policy, agent="ben").session.role == "writer"
    assert mounted(policy=policy, agent="ben", role="reader").session.role == "reader"
    assert mounted(policy=policy, agent="ben").session.role == "writer"


def test_an_undefined_role_is_refused(source: Path, mountpoint: Path) -> None:
    """The nearest role and the list of roles are shown. No mount and no agent is made."""
    refused = bonobofs("mount", source, mountpoint, "--agent", "alice", "--role", "contol")
    assert refused.returncode == 2
    assert refused.stderr == (
        "bonobofs: the policy preset:aidlc does not define the role contol; did you mean control? it defines: agent, "
        "control, Harmbe, impl, lead, orchestrator, ProjectMinder, worker\n"
    )
    assert not mounts.at(mountpoint)
    assert json.loads(bonobofs("agent", "list", "--json").stdout) == []


def test_an_agent_with_an_undefined_role_may_only_read(source: Path, mountpoint: Path) -> None:
    """The mount reports it, and every change is refused."""
    assert bonobofs("agent", "add", "alice", "--role", "unheard-of").returncode == 0
    made = bonobofs("mount", source, mountpoint, "--agent", "alice")
    try:
        assert "The policy does not define the role unheard-of, so the agent may only read" in made.stderr
        with pytest.raises(PermissionError):
            (mountpoint / "aidlc-docs").mkdir()
    finally:
        assert bonobofs("umount", mountpoint).returncode == 0


def test_an_agent_keeps_its_identity(mounted: Mounted) -> None:
    """One label has one UUID in every session, and another label another UUID."""
    first, second, other = mounted(agent="ann"), mounted(agent="ann"), mounted(agent="ben")
    assert first.session.agent_id == second.session.agent_id
    assert first.session.agent_id != other.session.agent_id
    assert first.session.session != second.session.session


@pytest.mark.parametrize("label", ["", "a/b", "a\nb", " a", "x" * 65])
def test_a_label_that_could_forge_a_line_is_refused(label: str, source: Path, mountpoint: Path) -> None:
    """A label is shown in terminals, logs and file names."""
    refused = bonobofs("mount", source, mountpoint, "--agent", label)
    assert refused.returncode == 2
    assert "cannot name an agent" in refused.stderr


def test_an_ordinary_user_mounts_and_unmounts(ordinary_user: OrdinaryUser) -> None:
    """Without root it works through fusermount3, including the recovery of a killed server."""
    source, mountpoint = ordinary_user.directory / "source", ordinary_user.directory / "mount"
    ordinary_user.run("mkdir", source, mountpoint)
    made = ordinary_user.bonobofs("mount", source, mountpoint, "--agent", "alice", "--policy", "aidlc")
    assert made.returncode == 0, made.stderr
    (one,) = json.loads(ordinary_user.bonobofs("status", "--json").stdout)
    assert one["state"] == "serving"
    refused = ordinary_user.run("touch", mountpoint / "denied.txt")
    assert "Permission denied" in refused.stderr
    assert ordinary_user.run("sh", "-c", f"kill -KILL {one['pid']}").returncode == 0
    assert processes.wait_for_end(one["pid"], one["starttime"], 30)
    again = ordinary_user.bonobofs("mount", source, mountpoint, "--agent", "alice")
    assert again.returncode == 0, again.stderr
    assert ordinary_user.run("ls", mountpoint).returncode == 0
    assert ordinary_user.bonobofs("audit", "verify").returncode == 0
    ended = ordinary_user.bonobofs("umount", mountpoint)
    assert ended.returncode == 0, ended.stderr


def test_a_source_with_a_name_that_is_not_utf8_is_served(tmp_path: Path, mounted: Mounted) -> None:
    """Names are bytes. Output is escaped, and stored names are exact."""
    source = tmp_path / os.fsdecode(b"s\xff ource\n\\040")
    source.mkdir()
    mountpoint = tmp_path / os.fsdecode(b"m\xfe ount\t")
    mountpoint.mkdir()
    world = mounted(policy=ALLOW_ALL, source=source, mountpoint=mountpoint)
    (world.path / "x").write_text("there")
    assert (source / "x").read_text() == "there"
    assert "\\xff ource\\n\\\\040" in bonobofs("status").stdout
    (one,) = _status()
    assert one["source"] == str(source)
    assert bonobofs("umount", mountpoint).returncode == 0
