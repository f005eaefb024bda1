"""The requests that the kernel sends to the server."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.fuse.abi import MAX_WRITE, ROOT_ID, Init
from bonobofs.fuse.cpu_latency import RunQueue
from bonobofs.fuse.kernel_transport import READ_AHEAD_KB, SPIN, KernelTransport
from bonobofs.system import mounts
from tests.support.mount_fixtures import MakePlace, Traffic
from tests.support.users import run_in_child
from tests.support.wait import until


def _open_and_close(path: Path) -> None:
    os.close(os.open(path, os.O_RDONLY))


def test_only_the_first_open_is_sent(traffic: Traffic) -> None:
    """OPEN is answered ENOSYS once, and no open, release or flush follows for as long as the mount lasts."""
    files = [traffic.source / str(number) for number in range(20)]
    for file in files:
        file.write_text("there")
    traffic.settle()
    names = [traffic.path / file.name for file in files]
    first = traffic.during(_open_and_close, names[0])
    assert [(sent.opcode, sent.error) for sent in first if sent.opcode == "OPEN"] == [("OPEN", 38)]
    (traffic.path / "new").write_text("as well")

    def everything() -> None:
        for name in [*names, traffic.path / "new"]:
            for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND):
                os.close(os.open(name, flags))

    assert set(traffic.opcodes(everything)) <= {"LOOKUP", "GETATTR"}
    assert traffic.opcodes(everything) == []


def test_only_the_first_directory_open_is_sent(traffic: Traffic) -> None:
    """OPENDIR is answered ENOSYS once, and no RELEASEDIR ever comes."""
    (traffic.source / "below").mkdir()
    first = traffic.during(os.listdir, traffic.path)
    assert [(sent.opcode, sent.error) for sent in first if sent.opcode == "OPENDIR"] == [("OPENDIR", 38)]
    opcodes = traffic.opcodes(os.listdir, traffic.path / "below") + traffic.opcodes(os.listdir, traffic.path)
    assert {"OPENDIR", "RELEASEDIR"}.isdisjoint(opcodes)


def test_flush_is_never_sent_after_the_first(traffic: Traffic) -> None:
    """Closing a file costs nothing, also one that was written or is being made."""

    def write(*numbers: int) -> None:
        for number in numbers:
            (traffic.path / f"file-{number}").write_text("content")

    write(0)
    (traffic.source / "warm").touch()
    traffic.settle()
    _open_and_close(traffic.path / "warm")
    assert {"FLUSH", "RELEASE"}.isdisjoint(traffic.opcodes(write, 1, 2, 3, 4))


def test_content_is_read_once_and_then_cached(traffic: Traffic) -> None:
    """A second read of a file sends nothing, also after a write of its own: EXPLICIT_INVAL_DATA."""
    (traffic.source / "file").write_bytes(os.urandom(300_000))
    traffic.settle()
    fd = os.open(traffic.path / "file", os.O_RDWR)
    assert "READ" in traffic.opcodes(os.pread, fd, 300_000, 0)
    assert traffic.opcodes(os.pread, fd, 300_000, 0) == []
    os.pwrite(fd, b"changed", 100)
    assert traffic.opcodes(os.pread, fd, 300_000, 0) == []
    os.close(fd)


def test_a_warm_walk_is_free(traffic: Traffic) -> None:
    """Names, attributes, listings, symlinks and what does not exist are believed for long."""
    (traffic.source / "below").mkdir()
    for number in range(50):
        (traffic.source / "below" / str(number)).touch()
    (traffic.source / "link").symlink_to("below")
    traffic.settle()

    def walk() -> None:
        for directory, _, files in os.walk(traffic.path):
            for file in files:
                os.stat(os.path.join(directory, file))
        os.readlink(traffic.path / "link")
        assert not (traffic.path / "missing").exists()

    assert {"READDIRPLUS", "READLINK", "LOOKUP"} <= set(traffic.opcodes(walk))
    # The kernel forgets a directory's access time when it lists it for the first time, and a notification may be late.
    until(lambda: traffic.opcodes(walk) == [], "a walk sends no request")


def test_a_listing_includes_the_attributes(traffic: Traffic) -> None:
    """READDIRPLUS: a listing with the attributes of 200 files needs no request for any of them."""
    for number in range(200):
        (traffic.source / str(number)).touch()
    traffic.settle()
    sent = traffic.during(lambda: [entry.stat() for entry in os.scandir(traffic.path)])
    opcodes = [request.opcode for request in sent]
    assert "READDIRPLUS" in opcodes
    assert "LOOKUP" not in opcodes
    assert {request.node for request in sent if request.opcode == "GETATTR"} <= {ROOT_ID}


def test_creating_a_cached_missing_name_needs_no_lookup(traffic: Traffic) -> None:
    """Negative entries are cached: what was looked for and not found is not looked up again."""
    path = traffic.path / "new"
    assert not path.exists()
    assert "LOOKUP" not in traffic.opcodes(path.exists)
    traffic.opcodes(path.touch)
    assert path.exists()


def test_a_mebibyte_is_one_write(traffic: Traffic) -> None:
    """WRITE carries up to 1 MiB."""
    data = os.urandom(1 << 20)
    fd = os.open(traffic.path / "file", os.O_RDWR | os.O_CREAT)
    sent = traffic.during(os.write, fd, data)
    os.close(fd)
    assert MAX_WRITE == 1 << 20
    assert [one.size for one in sent if one.opcode == "WRITE"] == [MAX_WRITE + 40]
    assert (traffic.source / "file").read_bytes() == data


def test_a_write_is_one_request(traffic: Traffic) -> None:
    """HANDLE_KILLPRIV_V2: no look at security.capability comes before a write."""
    fd = os.open(traffic.path / "file", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"first")
    opcodes = traffic.opcodes(lambda: [os.write(fd, b"more") for _ in range(10)])
    os.close(fd)
    assert opcodes == ["WRITE"] * 10


def test_the_handshake_negotiates_the_flags_of_the_design(traffic: Traffic) -> None:
    """Every feature that the design asks for is on, and none is that would let changes or modes pass by."""
    wanted = (
        Init.NO_OPEN_SUPPORT,
        Init.NO_OPENDIR_SUPPORT,
        Init.DO_READDIRPLUS,
        Init.CACHE_SYMLINKS,
        Init.PARALLEL_DIROPS,
        Init.EXPLICIT_INVAL_DATA,
        Init.HANDLE_KILLPRIV_V2,
        Init.MAX_PAGES,
        Init.POSIX_ACL,
        Init.DONT_MASK,
        Init.CREATE_SUPP_GROUP,
        Init.SETXATTR_EXT,
    )
    assert [flag.name for flag in wanted if not traffic.flags & flag] == []
    unwanted = {"POSIX_LOCKS": 1, "ATOMIC_O_TRUNC": 3, "FLOCK_LOCKS": 10, "WRITEBACK_CACHE": 16, "PASSTHROUGH": 37}
    assert [name for name, bit in unwanted.items() if traffic.flags >> bit & 1] == []


def test_a_truncating_open_truncates(traffic: Traffic) -> None:
    """O_TRUNC arrives as SETATTR before the first write, so no old tail is left."""
    (traffic.source / "file").write_text("a long old text")
    traffic.settle()
    opcodes = traffic.opcodes((traffic.path / "file").write_text, "short")
    assert "SETATTR" in opcodes
    assert (traffic.source / "file").read_text() == "short"


def test_reading_does_not_change_access_times(place: MakePlace) -> None:
    """The mount is `noatime`, checks modes itself, and is never unmounted by a helper process."""
    world = place()
    options = world.does(
        lambda: subprocess.check_output(["findmnt", "-n", "-o", "OPTIONS", str(world.path)], text=True)
    )
    assert {"noatime", "default_permissions"} <= set(options.strip().split(","))
    assert "auto_unmount" not in options
    assert mounts.at(world.path)


def test_an_idle_server_does_not_spin(own_place: MakePlace) -> None:
    """The spin before each poll is bounded: an unused mount takes no CPU time."""
    world = own_place()
    (world.path / "file").write_text("used once")

    def wakings() -> int:
        found = re.search(
            r"^voluntary_ctxt_switches:\s*(\d+)", Path(f"/proc/{world.pid}/status").read_text(), re.MULTILINE
        )
        assert found
        return int(found[1])

    def ticks() -> int:
        fields = Path(f"/proc/{world.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    start, spent = wakings(), ticks()
    until(lambda: wakings() >= start + 3, "the idle server tidies up")
    assert ticks() - spent <= 3


def test_the_server_spins_only_where_there_are_two_cpus() -> None:
    """On one CPU a spin would keep the caller from running; on two it saves the waking."""

    def spin_on(cpus: set[int]) -> int:
        os.sched_setaffinity(0, cpus)
        fd = os.open("/dev/null", os.O_RDWR)
        return KernelTransport(fd).spins

    cpus = os.sched_getaffinity(0)
    assert run_in_child(spin_on, {min(cpus)}) == 0
    assert run_in_child(spin_on, cpus) == (SPIN if len(cpus) > 1 else 0)


def test_the_run_queue_is_full_while_a_process_waits_for_a_processor() -> None:
    """The server does not poll then: it would take the processor from its callers. Later it polls again."""
    queue = RunQueue()
    requests, sender = os.pipe()
    transport = KernelTransport(requests)

    def only_checks() -> bool:
        for _ in range(SPIN):
            transport._spin()  # noqa: SLF001
        os.write(sender, b"x")
        if not transport._spin():  # noqa: SLF001
            return True
        os.read(requests, 1)
        return False

    busy = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range((os.cpu_count() or 1) + 1)
    ]
    try:
        until(queue.is_oversubscribed, "more processes run than there are processors")
        until(only_checks, "the server polls no more")
    finally:
        for process in busy:
            process.kill()
            process.wait()
        queue.close()
    until(lambda: transport._spin() or not transport.spins, "the server polls again")  # noqa: SLF001
    transport.close()
    os.close(sender)


def test_a_mapping_is_read_and_written_back(place: MakePlace) -> None:
    """A shared mapping of a file in the mount reaches the file below at msync."""
    world = place()

    def story() -> None:
        path = world.path / "file"
        path.write_bytes(bytes(8192))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as view:
            view[4096:4100] = b"page"
            view.flush()
        assert (world.source / "file").read_bytes() == bytes(4096) + b"page" + bytes(4092)

    world.does(story)


@pytest.mark.root
def test_root_has_the_kernel_read_further_ahead(own_place: MakePlace) -> None:
    """The kernel requests a file that is read sequentially in long pieces. Only root may set this."""
    path = str(own_place().path)
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    device = next(line.split()[2] for line in lines if line.split()[4] == path)
    assert int(Path(f"/sys/class/bdi/{device}/read_ahead_kb").read_text()) == READ_AHEAD_KB
