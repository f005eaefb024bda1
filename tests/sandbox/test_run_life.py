"""The life of `run`: streams, exit status, signals, limits, and what is left after each kind of end."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from bonobofs.system import mounts, processes
from tests.sandbox.boxes import POLICY, Box
from tests.sandbox.test_run_view import make_repository
from tests.support import proc
from tests.support.wait import until
from tests.support.world import OrdinaryUser

pytestmark = pytest.mark.root
SECONDS = 60.0


def is_mounted(box: Box) -> bool:
    return any(box.top in mount.mountpoint.parents for mount in mounts.bonobofs_mounts())


def nothing_is_left(box: Box) -> None:
    """No process with the test's directory in its command line, no mount, every record closed."""

    def is_clean() -> bool:
        here = str(box.top).encode()
        named = any(here in proc.command_line(pid) for pid in os.listdir("/proc") if pid.isdecimal())
        return not (named or is_mounted(box))

    until(is_clean, "all processes and mounts end", seconds=SECONDS)
    assert not list(box.state.glob("runs/*"))
    assert "nothing is mounted" in box.bonobofs("status").stdout
    assert box.bonobofs("audit", "verify").returncode == 0
    closing = [entry for entry in box.entries() if entry["operation"] == "close"]
    assert closing


def start(box: Box, *command: str) -> subprocess.Popen[str]:
    """Start `run`, and return when its command has printed its first line."""
    running = subprocess.Popen(
        box.run_words(*command),
        env=box.environment,
        cwd=box.source,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "begun\n", running.communicate()
    return running


def test_the_exit_status_is_that_of_the_command(any_box: Box) -> None:
    for command, status in (("exit 255", 255), ("kill -TERM $$", 143)):
        assert any_box.run("sh", "-c", command).returncode == status
    missing = any_box.run("no-such-program")
    assert (missing.returncode, "no-such-program: No such file" in missing.stderr) == (127, True)
    assert any_box.run("./a.md").returncode == 126
    nothing_is_left(any_box)


def test_a_python_that_is_reached_through_a_symlink_starts_the_command(user_box: Box) -> None:
    """As with uv and Homebrew: the interpreter of a virtual environment is a symlink through a symlink."""
    code = "import sys; print(sys.base_prefix, sys.executable, sys.version_info[1])"
    prefix, _, minor = subprocess.check_output([user_box.user.python, "-c", code], text=True).split()
    top = user_box.top
    (top / "python").symlink_to(prefix)
    (top / "venv" / "bin").mkdir(parents=True)
    (top / "venv" / "pyvenv.cfg").write_text(f"home = {top}/python/bin\n")
    (top / "venv" / "bin" / "python").symlink_to(top / "python" / "bin" / f"python3.{minor}")
    user_box.user.python = str(top / "venv" / "bin" / "python")
    found = subprocess.check_output([user_box.user.python, "-c", code], text=True).split()
    assert found[:2] == [str(top / "python"), user_box.user.python]
    ran = user_box.run("echo", "begun")
    assert (ran.returncode, ran.stdout) == (0, "begun\n"), ran.stderr


def test_a_mount_that_fails_is_reported_in_the_words_of_bubblewrap() -> None:
    """Root finds the path of `read`, and the user of the command cannot reach it."""
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        box = Box(OrdinaryUser(Path(name)), as_root=True)
        below = box.top / "closed" / "below"
        below.mkdir(parents=True)
        below.parent.chmod(0o700)
        box.write_policy(POLICY + f'read = ["{below}"]\n')
        for _ in range(2):
            ran = box.run("true")
            message = f"the sandbox cannot start: bwrap: Can't find source path {below}"
            assert (ran.returncode, message in ran.stderr) == (1, True), ran.stderr
        nothing_is_left(box)


def test_a_working_directory_that_cannot_be_entered_is_reported(user_box: Box) -> None:
    closed = user_box.source / "closed"
    closed.mkdir(mode=0o700)
    for _ in range(2):
        ran = subprocess.run(
            user_box.run_words("true"),
            env=user_box.environment,
            cwd=closed,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert (ran.returncode, "bwrap: Can't chdir to" in ran.stderr) == (1, True), ran.stderr
    nothing_is_left(user_box)


def test_background_processes_end_with_the_command(any_box: Box) -> None:
    ran = any_box.run("sh", "-c", "setsid sh -c 'sleep 1000 & sleep 1000' & echo begun")
    assert (ran.returncode, ran.stdout) == (0, "begun\n")
    nothing_is_left(any_box)


def test_a_signal_reaches_the_command(user_box: Box) -> None:
    """The command's own handler runs, and decides the exit status."""
    running = start(user_box, "bash", "-c", "trap 'echo trapped; exit 9' TERM; echo begun; while :; do sleep 0.1; done")
    launcher = _launcher(running.pid)
    os.kill(launcher, signal.SIGTERM)
    out, _ = running.communicate(timeout=SECONDS)
    assert (out, running.returncode) == ("trapped\n", 9)
    nothing_is_left(user_box)


def test_a_command_that_ignores_the_end_is_killed(user_box: Box) -> None:
    running = start(user_box, "bash", "-c", "trap '' TERM HUP INT; echo begun; while :; do sleep 1; done")
    for _ in range(2):
        os.kill(_launcher(running.pid), signal.SIGTERM)
    running.communicate(timeout=SECONDS)
    assert running.returncode == 137
    nothing_is_left(user_box)


def test_nothing_survives_a_killed_launcher(any_box: Box) -> None:
    """Kill -9 of the launcher ends a process in a session of its own, unmounts, and closes the record."""
    running = start(any_box, "sh", "-c", "setsid sleep 1000 & echo begun; sleep 1000")
    os.kill(_launcher(running.pid), signal.SIGKILL)
    running.communicate(timeout=SECONDS)
    nothing_is_left(any_box)


def test_a_launcher_that_is_killed_before_the_mount_leaves_no_session(user_box: Box) -> None:
    """The session is registered, and its server has no record yet."""
    with subprocess.Popen(
        user_box.run_words("true"), env=user_box.environment, cwd=user_box.source, stderr=subprocess.DEVNULL
    ) as running:
        until(lambda: [*user_box.state.glob("sessions/*/session.json")], "a session is there", seconds=SECONDS)
        running.kill()
    until(lambda: not [*user_box.state.glob("runs/*")], "the keeper has ended the session", seconds=SECONDS)
    assert user_box.bonobofs("status").stdout == "nothing is mounted\n"
    assert user_box.bonobofs("audit", "verify").returncode == 0


def test_no_mounted_worktree_survives_a_launcher_that_is_killed_during_the_start(user_box: Box) -> None:
    """The launcher has mounted the worktree, and is killed while it probes the mount."""
    make_repository(user_box)
    words = user_box.run_words("true", options=("--issue", "gt-7", "--agent", "alice", "--new"))
    with subprocess.Popen(words, env=user_box.environment, cwd=user_box.source, stderr=subprocess.DEVNULL) as running:
        until(lambda: is_mounted(user_box), "the mount appears", seconds=SECONDS)
        running.kill()
    nothing_is_left(user_box)


def test_nothing_survives_a_terminal_that_hangs_up_during_the_start(any_box: Box) -> None:
    """The hangup ends the launcher before the command starts. The keeper unmounts without the terminal."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(any_box.source)
        os.execvpe("unshare", any_box.run_words("sleep", "1000"), any_box.environment)
    until(lambda: [*any_box.state.glob("sessions/*/egress.log")], "the mount is ready", seconds=SECONDS)
    os.close(master)
    os.waitpid(pid, 0)
    nothing_is_left(any_box)


def test_a_killed_keeper_is_reported(user_box: Box) -> None:
    """The command ends as usual, and `run` tells the operator that the mount is left."""
    running = start(user_box, "sh", "-c", "echo begun; read line")
    os.kill(proc.children(running.pid)[0], signal.SIGKILL)
    _, errors = running.communicate("go\n", timeout=SECONDS)
    assert (running.returncode, "the mount may still exist" in errors) == (1, True)
    (mount,) = [mount for mount in mounts.bonobofs_mounts() if user_box.top in mount.mountpoint.parents]
    assert user_box.bonobofs("umount", mount.mountpoint).returncode == 0


def test_a_killed_server_fails_closed(user_box: Box) -> None:
    """The workspace answers ENOTCONN, and `run` ends with the command."""
    running = start(user_box, "sh", "-c", "echo begun; read line; echo x > made.md || echo refused; ls; exit 3")
    told = user_box.bonobofs("status", "--json").stdout
    server = int(re.findall(r'"pid": (\d+)', told)[0])
    os.kill(server, signal.SIGKILL)
    until(lambda: not processes.is_alive(server, processes.start_time(server)), "the server ends")
    out, errors = running.communicate("go\n", timeout=SECONDS)
    assert "refused" in out
    assert "not connected" in errors
    assert not (user_box.source / "made.md").exists()
    assert running.returncode == 3
    assert not is_mounted(user_box)


def test_a_killed_companion_comes_back(user_box: Box) -> None:
    """The directory of guard.sock is bound, so the socket of the new companion appears in the sandbox."""
    call = (
        "import json, os, socket, sys\n"
        "end = socket.socket(socket.AF_UNIX); end.connect(os.environ['BONOBOFS_SOCKET'])\n"
        'end.sendall(b\'{"call": "whoami"}\\n\'); print(json.loads(end.makefile().readline())["ok"])\n'
    )
    (user_box.source / "call.py").write_text(call)
    script = "echo begun; read line; until python3 call.py 2>/dev/null; do sleep 0.1; done"
    running = start(user_box, "sh", "-c", script)
    told = user_box.bonobofs("status", "--json").stdout
    server = int(re.findall(r'"pid": (\d+)', told)[0])
    os.kill(proc.child(server, b"bonobofs"), signal.SIGKILL)
    out, _ = running.communicate("go\n", timeout=SECONDS)
    assert (out, running.returncode) == ("True\n", 0)
    nothing_is_left(user_box)


def test_the_time_limit_ends_the_command(user_box: Box) -> None:
    user_box.write_policy(POLICY + 'time = "1s"\n')
    ran = user_box.run("sleep", "1000")
    assert ran.returncode == 124
    nothing_is_left(user_box)


def test_a_command_never_runs_as_root(user_box: Box) -> None:
    ran = subprocess.run(
        [user_box.user.python, "-m", "bonobofs", "run", user_box.source, "--", "true"],
        env=user_box.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert (ran.returncode, "name its user: --user NAME" in ran.stderr) == (2, True)


def _launcher(pid: int) -> int:
    """Return the process that `unshare` and `setpriv` became: they replace themselves."""
    return pid
