"""The process that serves a mount: transport, engine and trail, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.fuse import cpu_latency
from bonobofs.system import processes
from tests.fuse.conftest import MakePlace, Place
from tests.fuse.waiting import until
from tests.worlds import ROOT


def test_it_loads_neither_pydantic_nor_a_database() -> None:
    """All that a server imports is the standard library and the few modules of ours that it needs."""
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


@pytest.fixture
def world(own_place: MakePlace) -> Place:
    return own_place()


@pytest.mark.root
def test_it_stands_in_the_root_directory_and_holds_no_more_than_it_needs(world: Place) -> None:
    """Neither its working directory nor any descriptor of its starter could make it wait for its own mount."""
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
        str(world.home / "turns"),
        *([str(cpu_latency.device())] if cpu_latency.device() else []),
    }
    assert len(targets) < 20


@pytest.mark.alone
@pytest.mark.root
def test_idle_processors_stay_awake_only_while_requests_are_served(world: Place) -> None:
    """Where waking a processor is dear, the kernel is asked to keep them awake, and no longer than the server is."""

    def wish() -> int:
        with open("/dev/cpu_dma_latency", "rb") as device:
            return int.from_bytes(device.read(4), sys.byteorder)

    if cpu_latency.device() is None:
        assert "/dev/cpu_dma_latency" not in {
            os.readlink(f"/proc/{world.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{world.pid}/fd")
        }
        return

    def works() -> bool:
        (world.path / "file").write_text("content")
        return wish() == 0

    until(works, "idle processors are kept awake")
    asking = cpu_latency.Idle()
    try:
        asking.keep_awake()
        asking.look(7)
        assert wish() == 0
        asking.look(7)  # nothing was served since
        until(lambda: wish() > 0, "a request that hangs keeps no processor awake")
    finally:
        asking.close()
    until(lambda: wish() > 0, "they may halt again")


@pytest.mark.root
def test_no_child_of_it_has_dev_fuse_and_it_maps_nothing_below_the_mount(world: Place) -> None:
    """A child would keep /dev/fuse open, and after a kill every access would hang instead of failing."""
    (companion,) = Path(f"/proc/{world.pid}/task/{world.pid}/children").read_text().split()
    held = [os.readlink(f"/proc/{companion}/fd/{fd}") for fd in os.listdir(f"/proc/{companion}/fd")]
    assert held
    assert "/dev/fuse" not in held
    assert str(world.path) not in Path(f"/proc/{world.pid}/maps").read_text()


def test_a_failure_of_its_own_refuses_that_request_and_no_other(world: Place) -> None:
    """The server that meets nonsense in the source goes on: names of any bytes, loops, files that vanish."""
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


def test_its_log_is_silent_when_all_is_well(world: Place) -> None:
    """An ordinary day leaves nothing in the server's own log."""
    for number in range(20):
        (world.path / f"file-{number}").write_text("content")
        (world.path / f"file-{number}").rename(world.path / "moved")
    world.umount()
    assert not processes.is_alive(world.session.pid, world.session.starttime)
    assert (world.home / "sessions" / world.session.session / "server.log").read_text() == ""
