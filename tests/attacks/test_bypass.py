"""Bypasses of the mount: past it, below it, against its server, under another name.

What cannot be prevented fails closed.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.audit.recovery import OUT_OF_BAND, SLACK
from bonobofs.audit.verify import read_head
from bonobofs.errors import BonobofsError
from bonobofs.session import MountRequest
from bonobofs.system import mounts, processes
from tests.attacks.attack import CONTENT, IS_ROOT
from tests.attacks.ground import PATIENCE, build
from tests.support.syscalls import opened
from tests.support.trees import snapshot
from tests.support.users import outcome, run_in_child
from tests.support.wait import until
from tests.support.world import Mounted, OrdinaryUser, World, bonobofs

_PTRACE_ATTACH = 16
_CONNECTIONS = "/sys/fs/fuse/connections"


@pytest.fixture
def source(source: Path) -> Path:
    build(source)
    return source


def _append(path: Path | str) -> object:
    def act() -> int:
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as fd:
            return os.write(fd, b"EVIL")

    return outcome(act)


def _denied(world: World) -> list[tuple[str, str | None]]:
    return [
        (entry.path, entry.code) for entry in world.entries() if entry.result == "denied" and entry.kind == "intent"
    ]


# -- where a mount may stand


def _inside(source: Path, other: Path) -> MountRequest:
    (source / "aidlc-docs/m").mkdir()
    return MountRequest(source, source / "aidlc-docs/m")


def _inside_by_symlink(source: Path, other: Path) -> MountRequest:
    (source / "aidlc-docs/m").mkdir()
    (other / "link").symlink_to(source / "aidlc-docs")
    return MountRequest(source, other / "link/m")


def _inside_by_dots(source: Path, other: Path) -> MountRequest:
    (source / "aidlc-docs/m").mkdir()
    return MountRequest(source, other / ".." / source.name / "aidlc-docs/m")


def _above(source: Path, other: Path) -> MountRequest:
    return MountRequest(source, source.parent)


def _state_in_the_source(source: Path, other: Path) -> MountRequest:
    return MountRequest(source.parent, other)


def _policy_in_the_source(source: Path, other: Path) -> MountRequest:
    return MountRequest(source, other, policy=source / "policy.toml")


def _policy_in_the_source_by_symlink(source: Path, other: Path) -> MountRequest:
    link = other.parent / "policy-link.toml"
    link.symlink_to(source / "policy.toml")
    return MountRequest(source, other, policy=link)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (_inside, "inside its source"),
        (_inside_by_symlink, "inside its source"),
        (_inside_by_dots, "inside its source"),
        (_above, "lies inside the mountpoint"),
        (_state_in_the_source, "inside the source"),
        (_policy_in_the_source, "inside the source"),
        (_policy_in_the_source_by_symlink, "inside the source"),
    ],
)
def test_a_mount_that_could_be_bypassed_is_refused(
    home: Path, source: Path, tmp_path: Path, order: Callable[[Path, Path], MountRequest], says: str
) -> None:
    """A mountpoint in its own source, or a state directory or policy inside it, is refused."""
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(BonobofsError, match=says):
        session.start(home, order(source, other))
    assert not [mount for mount in mounts.bonobofs_mounts() if tmp_path in mount.mountpoint.parents]
    assert session.statuses(home) == []


def test_a_mount_within_a_mount_is_refused(home: Path, mounted: Mounted, tmp_path: Path) -> None:
    """A mount is neither a source nor a mountpoint for another mount."""
    world = mounted()
    other = tmp_path / "other"
    other.mkdir()
    for order in (
        MountRequest(world.path, other),
        MountRequest(other, world.path / "aidlc-docs"),
        MountRequest(world.path / "src", other),
    ):
        with pytest.raises(BonobofsError, match="lies in a mount of bonobofs"):
            session.start(home, order)
    assert run_in_child(_append, world.path / "src/main.py") == errno.EACCES


def test_a_second_mount_of_a_source_widens_no_rule(mounted: Mounted, source: Path, tmp_path: Path) -> None:
    """Each mount judges by its own policy, and judges a change through the other mount again."""
    first = mounted()
    second = mounted(agent="bob")
    before = snapshot(source)
    for world in (first, second):
        assert run_in_child(_append, world.path / "src/main.py") == errno.EACCES
        assert run_in_child(_append, world.path / ".git/config") == errno.EROFS
    assert snapshot(source) == before
    # A name that only the other mount knows is foreign to this one.
    assert run_in_child(_append, first.path / "aidlc-docs/plan.md") == 4
    run_in_child(os.link, second.path / "aidlc-docs/plan.md", second.path / "aidlc-docs/again.md")
    assert run_in_child(_append, first.path / "aidlc-docs/plan.md") == errno.EPERM
    assert {entry.agent for entry in second.entries()} == {"bob"}
    assert _denied(first) == [
        ("src/main.py", "DEFAULT"),
        (".git/config", "PROTECTED"),
        ("aidlc-docs/plan.md", "HARDLINK"),
    ]


# -- in another's name


def test_the_identity_comes_from_the_mount_only(mounted: Mounted) -> None:
    """The record names the session's agent despite changed environment and process name, a forked orphan or a user
    namespace.
    """
    world = mounted()
    script = textwrap.dedent("""
        import ctypes, os, sys
        ctypes.CDLL(None).prctl(15, b'x","agent":"\\n', 0, 0, 0)
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.read(reader, 1)
            try:
                os.truncate("src/main.py", 0)
            except OSError as error:
                print(os.getpid(), error.errno, flush=True)
            os._exit(0)
        os.wait()
        os.write(writer, b".")
    """)
    forged = dict.fromkeys(("BONOBOFS_AGENT", "BONOBOFS_AGENT_ID", "BONOBOFS_ROLE", "USER", "LOGNAME"), "mallory")
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        cwd=world.path,
        env={**os.environ, **forged, "BONOBOFS_HOME": "/nonexistent", "BONOBOFS_SESSION": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE,
    ).stdout.split()
    (entry,) = (one for one in world.entries() if one.path == "src/main.py")
    assert said == [str(entry.details["pid"]), str(errno.EACCES)]
    assert (entry.agent, entry.agent_id) == ("alice", world.session.agent_id)
    assert entry.tool.startswith('x","agent":"')
    assert {entry.agent for entry in world.entries()} == {"alice"}
    assert bonobofs("audit", "verify").returncode == 0


@pytest.mark.root
def test_root_in_a_user_namespace_is_subject_to_the_policy(mounted: Mounted) -> None:
    """It gains no right, also not by a mount over the mount."""
    world = mounted()
    before = snapshot(world.source)
    script = """
        mount --bind "$PWD" "$PWD/aidlc-docs" && truncate -s 0 aidlc-docs/src/main.py
        rm README.md
        chmod 777 src/main.py
        mount -t tmpfs none src && echo fine > src/main.py
    """
    ran = subprocess.run(
        ["unshare", "-U", "-r", "-m", "sh", "-c", script],
        cwd=world.path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (ran.returncode, ran.stderr.count("Permission denied")) == (0, 3), ran.stderr
    assert snapshot(world.source) == before
    assert _denied(world) == [("src/main.py", "DEFAULT"), ("README.md", "KEEP"), ("src/main.py", "DEFAULT")]


# -- against the server


def _changes(top: Path) -> list[object]:
    """What comes of writing, making, removing, and of looking for what the kernel has not seen before."""
    calls = (
        (_append, top / "aidlc-docs/plan.md"),
        (_append, top / "README.md"),
        (os.truncate, top / "src/main.py", 0),
        (os.mkdir, top / "aidlc-docs/new"),
        (os.unlink, top / "src/main.py"),
        (os.rename, top / "README.md", top / "gone"),
        (os.stat, top / "below"),
        (os.listdir, top / "src"),
        ((top / ".git/config").read_bytes,),
    )
    return [outcome(*call) for call in calls]


def _dead(world: World) -> None:
    """Everything fails; a name that the kernel remembers is still the mount's, never the source's."""
    if world.source != world.path:
        (world.source / "below").touch()
    assert set(run_in_child(_changes, world.path)) == {errno.ENOTCONN}
    remembered = run_in_child(outcome, os.stat, world.path)
    bare = os.stat(world.source.parent).st_dev
    assert remembered == errno.ENOTCONN or (isinstance(remembered, os.stat_result) and remembered.st_dev != bare)


@pytest.mark.parametrize("over_itself", [False, True], ids=["beside", "over_the_source"])
def test_after_a_kill_of_the_server_no_file_is_reachable(mounted: Mounted, source: Path, over_itself: bool) -> None:
    """Every access fails with ENOTCONN, and the bare source is not shown."""
    world = mounted(mountpoint=source) if over_itself else mounted()
    world.kill()
    _dead(world)
    (status,) = json.loads(bonobofs("status", "--json").stdout)
    assert status["state"] == "dead"
    assert "mount again" in status["note"]
    assert bonobofs("audit", "verify").returncode == 0
    mounts.detach(world.path, lazy=True)
    assert (source / "README.md").read_bytes() == CONTENT
    assert (source / "src/main.py").read_bytes() == CONTENT
    assert not (source / "aidlc-docs/new").exists()


def test_a_stopped_server_answers_no_request(mounted: Mounted) -> None:
    """A change waits while the server is stopped, and is judged when it continues."""
    world = mounted()
    # The shell enters the mount while the server runs: this process would wait with it for the stopped server.
    with subprocess.Popen(
        ["sh", "-c", "echo ready; read line; echo EVIL >> src/main.py; echo $?"],
        cwd=world.path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as attacker:
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "ready\n"
        os.kill(world.pid, signal.SIGSTOP)
        try:
            attacker.stdin.write("go\n")
            attacker.stdin.flush()
            assert select.select([attacker.stdout], [], [], 0.3) == ([], [], [])
            assert (world.source / "src/main.py").read_bytes() == CONTENT
        finally:
            os.kill(world.pid, signal.SIGCONT)
        said, _ = attacker.communicate(timeout=PATIENCE)
    assert said not in ("", "0\n")
    assert (world.source / "src/main.py").read_bytes() == CONTENT
    assert ("src/main.py", "DEFAULT") in _denied(world)


def test_signals_of_the_user_do_not_bypass_the_policy(mounted: Mounted) -> None:
    """Under many signals to settle and to reload the policy, the server serves on with the same rules."""
    world = mounted()
    for _ in range(200):
        os.kill(world.pid, signal.SIGUSR1)
        os.kill(world.pid, signal.SIGPIPE)
    assert run_in_child(_append, world.path / "src/main.py") == errno.EACCES
    assert run_in_child(_append, world.path / "aidlc-docs/plan.md") == 4
    for _ in range(20):
        os.kill(world.pid, signal.SIGHUP)
    assert run_in_child(_append, world.path / "src/main.py") == errno.EACCES
    assert run_in_child(_append, world.path / "aidlc-docs/plan.md") == 4
    assert (world.source / "src/main.py").read_bytes() == CONTENT


def test_resource_limits_set_by_the_user_stop_only_changes(mounted: Mounted) -> None:
    """prlimit(2) on the user's own server: a change is refused if its record fails, and reads succeed."""
    world = mounted()
    assert run_in_child(_append, world.path / "aidlc-docs/plan.md") == 4
    before = resource.prlimit(world.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(world.pid, resource.RLIMIT_FSIZE, (world.trail.stat().st_size + 100, before[1]))
    assert run_in_child(_append, world.path / "aidlc-docs/other.md") == errno.EIO
    assert run_in_child(_append, world.path / "src/main.py") == errno.EACCES
    assert run_in_child((world.path / "aidlc-docs/plan.md").read_bytes) == b"EVIL"
    assert not (world.source / "aidlc-docs/other.md").exists()
    resource.prlimit(world.pid, resource.RLIMIT_FSIZE, before)
    assert run_in_child(_append, world.path / "aidlc-docs/other.md") == 4
    assert "The trail could not be written." in {entry.reason for entry in world.entries() if entry.kind == "alert"}
    assert bonobofs("audit", "verify").returncode == 0


def test_an_ordinary_user_cannot_read_its_own_server(ordinary_user: OrdinaryUser) -> None:
    """Memory, descriptors, root and environment of the server are inaccessible to its own user."""
    source, mountpoint = ordinary_user.directory / "source", ordinary_user.directory / "mount"
    python = "/usr/bin/python3" if IS_ROOT else sys.executable
    script = textwrap.dedent("""
        import os
        for path in ("source/src", "source/aidlc-docs", "mount"):  # the preset `aidlc` refuses src
            os.makedirs(path)
        open("source/src/main.py", "w").write("kept")
    """)
    assert ordinary_user.run(python, "-c", script).returncode == 0
    assert ordinary_user.bonobofs("mount", source, mountpoint).returncode == 0
    pid = json.loads(ordinary_user.bonobofs("status", "--json").stdout)[0]["pid"]
    tries = textwrap.dedent(f"""
        import ctypes, errno, os, sys
        pid = int(sys.argv[1])
        libc = ctypes.CDLL(None, use_errno=True)
        libc.process_vm_readv.argtypes = [ctypes.c_int] + [ctypes.c_void_p, ctypes.c_ulong] * 2 + [ctypes.c_ulong]
        here = ctypes.create_string_buffer(8)
        vector = (ctypes.c_ulong * 2)(ctypes.addressof(here), 8)
        def call(result):
            if result < 0:
                raise OSError(ctypes.get_errno(), "")
        tries = (
            lambda: open(f"/proc/{{pid}}/mem", "r+b"),
            lambda: open(f"/proc/{{pid}}/environ", "rb"),
            lambda: open(f"/proc/{{pid}}/maps", "rb"),
            lambda: os.listdir(f"/proc/{{pid}}/fd"),
            lambda: os.listdir(f"/proc/{{pid}}/root/"),
            lambda: os.listdir(f"/proc/{{pid}}/cwd/"),
            lambda: os.open(f"/proc/{{pid}}/fd/3", os.O_RDWR),
            lambda: os.listdir(f"/proc/{{pid}}/task/{{pid}}/fd"),
            lambda: call(libc.ptrace({_PTRACE_ATTACH}, pid, 0, 0)),
            lambda: call(libc.syscall(438, os.pidfd_open(pid), 3, 0)),
            lambda: call(libc.process_vm_readv(pid, vector, 1, vector, 1, 0))
        )
        for number, attempt in enumerate(tries):
            try:
                attempt()
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EPERM):
                    continue
                print(number, error)
            else:
                print(number, "went through")
        try:
            os.truncate("mount/src/main.py", 0)
        except OSError as error:
            print(errno.errorcode[error.errno])
    """)
    ran = ordinary_user.run(python, "-c", tries, str(pid))
    assert (ran.stdout, ran.stderr) == ("EACCES\n", "")
    assert ordinary_user.bonobofs("umount", mountpoint).returncode == 0
    assert (source / "src/main.py").read_text() == "kept"


def test_an_ordinary_user_may_unmount_and_the_record_is_closed(ordinary_user: OrdinaryUser) -> None:
    """By `fusermount3 -u`; the mountpoint is empty."""
    source, mountpoint = ordinary_user.directory / "source", ordinary_user.directory / "mount"
    assert ordinary_user.run("mkdir", "-p", source / "aidlc-docs", mountpoint).returncode == 0
    assert ordinary_user.bonobofs("mount", source, mountpoint, "--agent", "eve").returncode == 0
    assert ordinary_user.run("touch", mountpoint / "aidlc-docs/plan.md").returncode == 0
    assert ordinary_user.run("fusermount3", "-u", mountpoint).returncode == 0
    assert ordinary_user.run("ls", "-A", mountpoint).stdout == ""
    until(lambda: '"ended"' in ordinary_user.bonobofs("status", "--all", "--json").stdout, "the session ended")
    verified = json.loads(ordinary_user.bonobofs("audit", "verify", "--json").stdout)
    assert [(one["status"], one["findings"]) for one in verified] == [("closed", [])]


def test_the_name_of_a_source_gives_no_mount_option(ordinary_user: OrdinaryUser) -> None:
    """fusermount3 takes its options as one text. A source path may look like several of them."""
    name = "s,allow_other,suid,dev,fsname=x\\,user_id=0"
    source, mountpoint = ordinary_user.directory / name, ordinary_user.directory / "mount"
    assert ordinary_user.run("mkdir", "-p", source, mountpoint).returncode == 0
    made = ordinary_user.bonobofs("mount", source, mountpoint)
    assert made.returncode == 0, made.stderr
    (mount,) = mounts.at(mountpoint)
    assert mount.source == str(source)
    (line,) = (line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {mountpoint} " in line)
    options = {*line.split()[5].split(","), *line.split()[-1].split(",")}
    assert not options & {"allow_other", "suid", "dev", "user_id=0"}
    assert {"nosuid", "nodev", "default_permissions"} <= options
    assert ordinary_user.bonobofs("umount", mountpoint).returncode == 0


def test_processes_in_a_detached_mount_are_judged_to_its_end(mounted: Mounted) -> None:
    """A lazy unmount removes the path but not the policy: an open directory leads through the mount or fails."""
    world = mounted()
    script = textwrap.dedent("""
        import os, sys
        print("inside", flush=True)
        sys.stdin.readline()
        for path in ("src/main.py", "aidlc-docs/notes.txt", "aidlc-docs/plan.md"):
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
                print("went through", end=" ")
            except OSError as error:
                print(error.errno, end=" ")
    """)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script],
        cwd=world.path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as attacker:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "inside\n"
        mounts.detach(world.path, lazy=True)
        said, _ = attacker.communicate("go\n", timeout=PATIENCE)
    assert said.split() == [str(errno.EACCES), str(errno.EACCES), "went", "through"]
    assert processes.wait_for_end(world.pid, world.session.starttime or 0, PATIENCE)
    assert (world.source / "src/main.py").read_bytes() == CONTENT
    entries = world.entries()
    assert [entry.code for entry in entries if entry.result == "denied" and entry.kind == "intent"] == [
        "DEFAULT",
        "SUFFIX",
    ]
    assert entries[-1].operation == "close"


@pytest.mark.root
def test_an_aborted_connection_fails_closed_and_status_says_so(mounted: Mounted) -> None:
    """After an abort through /sys every access fails, the record is closed, and the dead mount is reported."""
    world = mounted()
    connection = str(os.minor(run_in_child(os.stat, world.path).st_dev))
    subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t fusectl none "$0" && echo 1 > "$0/$1/abort"', _CONNECTIONS, connection],
        check=True,
    )
    assert processes.wait_for_end(world.pid, world.session.starttime or 0, PATIENCE)
    _dead(world)
    assert world.entries()[-1].operation == "close"
    listed = json.loads(bonobofs("status", "--json").stdout)
    assert [one["state"] for one in listed] == ["dead"]
    again = bonobofs("mount", world.source, world.path)
    assert again.returncode == 0, again.stderr
    assert run_in_child(_append, world.path / "src/main.py") == errno.EACCES
    assert bonobofs("umount", world.path).returncode == 0


# -- past the mount


def test_changes_outside_the_mount_are_found_after_an_unclean_boot(mounted: Mounted, source: Path) -> None:
    """The next mount after a crash of the machine reports differences from the record. A mount does not prevent access
    by the source's own path or by an earlier descriptor.
    """
    held = os.open(source / "src/main.py", os.O_WRONLY | os.O_APPEND)
    world = mounted()
    assert run_in_child(_append, world.path / "aidlc-docs/plan.md") == 4
    built = (source / "aidlc-docs/plan.md").stat().st_ctime + SLACK
    until(lambda: _settled(world) > built, "the record was settled later than the source was built")
    world.kill()
    assert run_in_child(_append, source / ".git/config") == 4
    assert run_in_child(os.write, held, b"EVIL") == 4
    os.close(held)
    document = world.home / "sessions" / world.session.session / "session.json"
    document.write_text(document.read_text().replace(world.session.boot_id, "another-boot"))
    mounts.detach(world.path, lazy=True)

    again = mounted()
    found = [(entry.path, entry.kind) for entry in again.entries() if entry.operation == OUT_OF_BAND]
    assert sorted(found) == [(".git/config", "alert"), (".git/config", "event"), ("src/main.py", "event")]


def _settled(world: World) -> float:
    session.flush_servers(world.home)
    settled = read_head(world.head).settled
    return settled.timestamp() if settled is not None else 0.0
