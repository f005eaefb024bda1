"""The server process: its modules, descriptors, children and log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.fuse import cpu_latency
from bonobofs.system import processes
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.wait import until
from tests.support.world import ROOT


def test_the_server_loads_neither_pydantic_nor_a_database() -> None:
    """The server imports the standard library and few modules of the package."""
    program = "import sys, bonobofs.fuse.server; print('\\n'.join(sys.modules))"
    said = subprocess.check_output(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {program}"], text=True
    )
    loaded = set(said.split())
    foreign = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"bonobofs", "__main__"}
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


@pytest.mark.root
def test_the_server_has_the_root_as_its_directory_and_few_descriptors(world: Place) -> None:
    """Neither its working directory nor an inherited descriptor can make it wait for its own mount."""
    assert os.readlink(f"/proc/{world.pid}/cwd") == "/"
    targets = sorted(os.readlink(f"/proc/{world.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{world.pid}/fd"))
    files = [target for target in targets if target.startswith("/") and not target.startswith(("/dev/null", "/proc/"))]
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
    assert len(targets) < 20


@pytest.mark.alone
@pytest.mark.root
def test_idle_processors_poll_only_while_requests_are_served(world: Place) -> None:
    """In a virtual machine where waking a processor is slow, the server has them poll while it is awake itself."""

    def limit() -> int:
        with open("/dev/cpu_dma_latency", "rb") as device:
            return int.from_bytes(device.read(4), sys.byteorder)

    if cpu_latency.device() is None:
        assert "/dev/cpu_dma_latency" not in {
            os.readlink(f"/proc/{world.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{world.pid}/fd")
        }
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
    (companion,) = Path(f"/proc/{world.pid}/task/{world.pid}/children").read_text().split()
    held = [os.readlink(f"/proc/{companion}/fd/{fd}") for fd in os.listdir(f"/proc/{companion}/fd")]
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
