"""The server process: its modules, descriptors, children and log."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.errors import MountError
from bonobofs.fuse import cpu_latency
from bonobofs.ipc.session_config import SessionConfig, StartConfig
from bonobofs.session import launcher
from bonobofs.session.launcher import ServerStart
from bonobofs.system import processes
from tests.support import proc
from tests.support.commands import bonobofs
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.observe import companion_of
from tests.support.wait import until
from tests.support.world import ROOT


def test_the_server_loads_neither_pydantic_nor_a_database() -> None:
    """The server imports the standard library and few modules of the package."""
    program = "import sys, bonobofs.fuse.server; print('\\n'.join(sys.modules))"
    said = subprocess.check_output(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {program}"], text=True
    )
    loaded = set(said.split())
    top = {name.partition(".")[0] for name in loaded if not name.endswith("__mypyc")}
    foreign = top - set(sys.stdlib_module_names) - {"bonobofs", "__main__"}
    assert foreign == set()
    assert {"sqlite3", "asyncio", "http", "multiprocessing", "logging"} & loaded == set()
    ours = {name for name in loaded if name.startswith("bonobofs.")}
    assert not [name for name in ours if name.split(".")[1] in ("cli", "session", "guards")]


def test_the_companion_and_its_lease_follower_load_no_other_library() -> None:
    """They load pydantic, SQLAlchemy or pygit2 when a call or PostgreSQL needs them."""
    program = "import sys, bonobofs.companion.main, bonobofs.state.lease_follower; print('\\n'.join(sys.modules))"
    output = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert {"sqlalchemy", "pydantic", "pygit2", "psycopg"} & set(output.split()) == set()


@pytest.fixture
def world(own_place: MakePlace) -> Place:
    return own_place()


def test_the_kernel_never_enlarges_the_descriptor_table_of_a_usual_server(world: Place) -> None:
    """In a process with threads, the kernel waits for each enlargement."""
    (size,) = [
        line.split()[1] for line in Path(f"/proc/{world.pid}/status").read_text().splitlines() if "FDSize" in line
    ]
    assert int(size) >= min(1 << 16, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


@pytest.mark.root
def test_the_server_has_the_root_as_its_directory_and_few_descriptors(world: Place) -> None:
    """Neither its working directory nor an inherited descriptor can make it wait for its own mount."""
    assert os.readlink(f"/proc/{world.pid}/cwd") == "/"
    targets = proc.descriptors(world.pid)
    state = str(world.home / "sessions" / world.session.session / ".live.json.")  # open while it is written
    files = [target for target in targets if target.startswith("/")]
    files = [target for target in files if not target.startswith(("/dev/null", "/proc/", state))]
    assert set(files) == {
        "/dev/fuse",
        str(world.source),
        str(world.trail),
        str(world.head),
        str(world.home / "sessions" / world.session.session / "server.log"),
        str(world.home / "sessions" / world.session.session / "scratch"),
        str(world.home / "append-locks"),
        str(world.home / "undo" / world.session.session),
        *([str(cpu_latency.device())] if cpu_latency.device() else []),
    }
    assert len(targets) <= 20


@pytest.mark.alone
@pytest.mark.root
def test_idle_processors_poll_only_while_requests_are_served(world: Place) -> None:
    """In a virtual machine where waking a processor is slow, the server has them poll while it is awake itself."""

    def limit() -> int:
        with open("/dev/cpu_dma_latency", "rb") as device:
            return int.from_bytes(device.read(4), sys.byteorder)

    if cpu_latency.device() is None:
        assert "/dev/cpu_dma_latency" not in proc.descriptors(world.pid)
        return

    def works() -> bool:
        (world.path / "file").write_text("content")
        return limit() == 0

    until(works, "idle processors poll")
    request = cpu_latency.CpuLatency()
    try:
        request.disallow_halt()
        request.check(7)
        assert limit() == 0
        request.check(7)  # nothing was served since
        until(lambda: limit() > 0, "processors halt although a request hangs")
    finally:
        request.close()
    until(lambda: limit() > 0, "processors may halt again")


@pytest.mark.root
def test_no_child_has_dev_fuse_and_the_server_maps_no_file_of_the_mount(world: Place) -> None:
    """A child with /dev/fuse would keep the connection open: after a kill of the server, every access would hang."""
    held = proc.descriptors(companion_of(world.pid))
    assert held
    assert "/dev/fuse" not in held
    assert str(world.path) not in Path(f"/proc/{world.pid}/maps").read_text()


def test_odd_names_and_vanishing_files_cause_no_failure(world: Place) -> None:
    """The source has a symlink loop, and files vanish while they are listed."""
    (world.source / "loop").symlink_to("loop")
    for number in range(200):
        (world.source / f"file-{number}").touch()
    listing = os.scandir(world.path)
    first = next(listing).name
    for number in range(200):
        (world.source / f"file-{number}").unlink()
    assert first
    list(listing)
    listing.close()
    (world.path / "still").write_text("served")
    log = world.home / "sessions" / world.session.session / "server.log"
    assert log.read_text() == ""


def test_ordinary_work_logs_nothing(world: Place) -> None:
    """server.log is empty after writes, renames and an unmount."""
    for number in range(20):
        (world.path / f"file-{number}").write_text("content")
        (world.path / f"file-{number}").rename(world.path / "moved")
    world.umount()
    assert not processes.is_alive(world.session.pid, world.session.starttime)
    assert (world.home / "sessions" / world.session.session / "server.log").read_text() == ""


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    path = tmp_path / "mountpoint"
    path.mkdir()
    return path


def test_a_mount_that_is_refused_leaves_no_process(source: Path, mountpoint: Path) -> None:
    """The server is started before the checks."""
    refused = bonobofs("mount", source, mountpoint, "--policy", "absent.toml")
    assert refused.returncode == 1
    assert "there is no policy file" in refused.stderr
    until(lambda: not proc.processes_with(mountpoint), "the server and the probe have ended")


KILLED = """
import os, sys
from bonobofs.session.launcher import ServerStart
print(*ServerStart(sys.argv[1]).process, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_server_ends_when_the_command_that_started_it_is_killed(mountpoint: Path) -> None:
    """It has no configuration then, and no other process would end it."""
    command = [sys.executable, "-c", KILLED, str(mountpoint)]
    killed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    pid, starttime = map(int, killed.stdout.split())
    assert processes.wait_for_end(pid, starttime, 30)
    until(lambda: not proc.processes_with(mountpoint), "the probe has ended")


KILLED_LATE = """
import os, sys
from pathlib import Path
from bonobofs import session

class Dying(session.ServerStart):
    def serve(self, config):
        assert self.process
        self._line = lambda: os.kill(os.getpid(), 9)
        return super().serve(config)

home, source, mountpoint = map(Path, sys.argv[1:])
with Dying(str(mountpoint)) as server:
    session.start_with(server, home, session.MountRequest(source, mountpoint, agent="ann"))
"""


def test_a_mount_is_served_although_its_command_was_killed(home: Path, source: Path, mountpoint: Path) -> None:
    """Its server reports to a pipe that no process reads. It must not end and leave a dead mount."""
    subprocess.run([sys.executable, "-c", KILLED_LATE, home, source, mountpoint], cwd=ROOT, check=False)
    until(lambda: list((home / "sessions").glob("*/live.json")), "the mount is made")
    assert (mountpoint / ".bonobofs/policy.md").read_text()
    assert bonobofs("umount", mountpoint).stdout == f"{mountpoint}: unmounted\n"
    until(lambda: not proc.processes_with(mountpoint), "the server has ended")
    assert "crashed" not in bonobofs("audit", "verify").stdout


class _StoppedStart(ServerStart):
    """A server that is stopped before it gets its configuration."""

    def serve(self, config: SessionConfig) -> str:
        os.kill(self.process[0], signal.SIGSTOP)
        return super().serve(config)


def test_a_mount_fails_in_time_if_its_server_is_stopped(
    home: Path, source: Path, mountpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration has more bytes than a pipe holds. Nothing is left, and the next mount does not wait."""
    policy = tmp_path / "policy.toml"
    paths = "".join(f"'{number}/**', " for number in range(10_000))
    policy.write_text(f"default = 'allow'\n[[rule]]\nname = 'large'\npaths = [{paths}]\n")
    request = session.MountRequest(source, mountpoint, agent="ann", policy=policy)
    with _StoppedStart(str(mountpoint)) as server, monkeypatch.context() as patch:
        assert server.process
        patch.setattr(launcher, "SECONDS_TO_START", 1.0)
        with pytest.raises(MountError, match="the server did not start in 20 s"):
            session.start_with(server, home, request)
    until(lambda: not proc.processes_with(mountpoint), "the server and the probe have ended")
    assert os.listdir(home / "sessions") == []
    assert bonobofs("mount", source, mountpoint).returncode == 0
    assert bonobofs("umount", mountpoint).returncode == 0


def test_an_error_before_the_fork_is_reported(
    mountpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter cannot start, for example, and the server has no standard error of its own."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho the interpreter is broken >&2\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with ServerStart(str(mountpoint)) as server, pytest.raises(MountError, match="the interpreter is broken"):
        assert server.process


def test_an_error_before_the_configuration_is_reported(source: Path, mountpoint: Path) -> None:
    """The server has no log until it has its configuration."""
    required = SessionConfig._fields[: -len(SessionConfig._field_defaults)]
    config = SessionConfig(**dict.fromkeys(required, ""))  # type: ignore[arg-type] # it is not read
    with ServerStart(str(mountpoint)) as server:
        assert processes.is_alive(*server.process)
        server.begin(StartConfig(str(source), {"protect": 0}))
        assert server.serve(config).startswith("TypeError")
    until(lambda: not proc.processes_with(mountpoint), "the server has ended")
