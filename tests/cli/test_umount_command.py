"""`umount` after every way in which a mount can end, and `status` of a mount that does not serve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.audit.reader import is_closed
from bonobofs.state import scratch_dir
from bonobofs.state.home import session_directory
from bonobofs.system import mounts, processes
from tests.support.world import ALLOW_ALL, Mounted, World, bonobofs, environment, wait_for_mount


def _end(world: World, way: str) -> None:
    """End the mount without `bonobofs umount`, and wait until the server has gone."""
    if way.startswith("SIG"):
        world.kill(signal.Signals[way])
        return
    subprocess.run([*way.split(), str(world.path)], check=True)
    assert world.session.pid is not None
    assert world.session.starttime is not None
    assert processes.wait_for_end(world.session.pid, world.session.starttime, 30)


@pytest.mark.parametrize("way", [pytest.param("umount", marks=pytest.mark.root), "fusermount3 -u", "SIGTERM", "SIGINT"])
def test_umount_says_that_the_record_is_closed(mounted: Mounted, way: str) -> None:
    """A session that ended by itself has not crashed, and `umount` afterwards succeeds."""
    world = mounted(policy=ALLOW_ALL)
    _end(world, way)
    ended = bonobofs("umount", world.path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        0,
        f"{world.path}: already unmounted; the record is closed\n",
        "",
    )


@pytest.mark.root
@pytest.mark.parametrize("transport", ["kernel", "portable"])
def test_umount_ends_a_mount_that_is_copied_in_another_namespace(mounted: Mounted, transport: str) -> None:
    """The server ends, the record is closed, and the processes with the dead copy are named."""
    world = mounted(policy=ALLOW_ALL, transport=transport)
    script = "echo ready; read line; ls -d $0"
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, str(world.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        (world.path / "file").write_text("recorded")
        ended = bonobofs("umount", world.path)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == f"{world.path}: unmounted\n"
        assert f"sh (pid {holder.pid}, mount namespace)" in ended.stderr
        assert not world.is_alive
        assert [one["state"] for one in json.loads(bonobofs("status", "--all", "--json").stdout)] == ["ended"]
        said, _ = holder.communicate("\n")
        assert "not connected" in said
    assert world.entries()[-1].operation == "close"
    assert bonobofs("audit", "verify").returncode == 0


@pytest.mark.root
def test_umount_names_a_bind_mount_that_keeps_a_copy(mounted: Mounted, tmp_path: Path) -> None:
    """A copy in the same namespace is named by its mountpoint."""
    world = mounted(policy=ALLOW_ALL)
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["mount", "--bind", str(world.path), str(other)], check=True)
    try:
        ended = bonobofs("umount", world.path)
    finally:
        mounts.detach(other, lazy=True)
    assert (ended.returncode, ended.stdout) == (0, f"{world.path}: unmounted\n")
    assert f"every access to it fails: {other}" in ended.stderr


@pytest.mark.root
def test_a_mount_over_its_source_keeps_no_copy_of_other_mounts(mounted: Mounted, tmp_path: Path) -> None:
    """Its companion has its own mount namespace, without the mounts that existed before."""
    first = mounted(policy=ALLOW_ALL)
    own = tmp_path / "own"
    own.mkdir()
    second = mounted(policy=ALLOW_ALL, source=own, mountpoint=own)
    ended = first.umount()
    assert (ended.closed, ended.copies) == (True, ())
    (second.path / "file").write_text("served")
    assert second.umount().closed


def test_umount_returns_while_the_server_removes_many_scratch_files(mounted: Mounted) -> None:
    """The record is closed, the session has ended, and the mountpoint can be mounted again."""
    world = mounted(policy=ALLOW_ALL)
    layer = session_directory(world.home, world.session.session) / scratch_dir.NAME
    # Enough names that their removal takes seconds. ext4 gives one file at most 65,000.
    for file in ("a", "b", "c", "d"):
        (layer / file).touch()
        for number in range(50_000):
            os.link(layer / file, layer / f"{file}{number}")
    whole = layer.stat().st_mtime_ns
    command = [sys.executable, "-m", "bonobofs", "umount", str(world.path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as umount:
        # The server removes the first name after it has closed the trail.
        while layer.stat().st_mtime_ns == whole:
            assert umount.poll() is None
        assert is_closed(world.trail)
        os.kill(world.pid, signal.SIGSTOP)
        out, error = umount.communicate(timeout=60)
    try:
        assert umount.returncode == 0, error
        assert out == f"{world.path}: unmounted\n"
        assert f"the server (pid {world.pid}) still removes the session's scratch files" in error
        assert any(layer.iterdir())
        assert [one["state"] for one in json.loads(bonobofs("status", "--all", "--json").stdout)] == ["ended"]
        again = mounted(policy=ALLOW_ALL)
        (again.path / "file").write_text("recorded")
        assert again.umount().remover is None
        assert any(layer.iterdir())
    finally:
        os.kill(world.pid, signal.SIGCONT)
    assert world.session.starttime is not None
    assert processes.wait_for_end(world.pid, world.session.starttime, 60)
    assert not layer.exists()


@pytest.mark.parametrize("early", [True, False])
def test_ctrl_c_ends_a_foreground_mount_without_a_traceback(source: Path, tmp_path: Path, early: bool) -> None:
    """A terminal sends SIGINT to the whole process group, the companion included; at any moment of the start."""
    mountpoint = tmp_path / "mount"
    mountpoint.mkdir()
    command = [sys.executable, "-m", "bonobofs", "mount", str(source), str(mountpoint), "--foreground"]
    with subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()  # the command turns into the server after it has said where it mounts
        if not early:
            wait_for_mount(mountpoint)
        os.killpg(server.pid, signal.SIGINT)
        _, said = server.communicate(timeout=30)
    assert (server.returncode, said) == (130, "")
    assert not mounts.at(mountpoint)
    assert bonobofs("audit", "verify").returncode == 0


def test_status_says_that_the_server_is_stopped(mounted: Mounted) -> None:
    """A stopped server does not serve; `status` names the command that continues it, and `umount` ends it."""
    world = mounted(policy=ALLOW_ALL)
    os.kill(world.pid, signal.SIGSTOP)
    said = bonobofs("status").stdout
    assert f"stopped  {world.path}" in said
    assert f"continue it: kill -CONT {world.pid}" in said
    os.kill(world.pid, signal.SIGCONT)
    assert f"serving  {world.path}" in bonobofs("status").stdout
    os.kill(world.pid, signal.SIGSTOP)
    assert bonobofs("umount", world.path).stdout == f"{world.path}: unmounted\n"


@pytest.mark.parametrize("replaced", [False, True])
def test_status_says_that_the_source_is_removed(mounted: Mounted, source: Path, replaced: bool) -> None:
    """Also if another directory has its path now: the mount shows the old one."""
    world = mounted(policy=ALLOW_ALL)
    source.rename(source.with_name("before"))
    if replaced:
        source.mkdir()
    said = bonobofs("status").stdout
    assert f"source removed  {world.path}" in said
    assert f"run bonobofs umount {world.path}, then mount again" in said
    assert world.umount().closed
