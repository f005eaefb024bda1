"""The compared file systems: the bare directory, bonobofs and its peers, mounted again for each trial."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.plan import BenchError, Plan

PATIENCE = 30.0
"""Seconds that a mount may take to appear, and a server to end."""

POLICY = """\
default = "allow"
hidden = ["**"]

[[protect]]
paths = ["sealed/", "policy.toml", ".bonobofs/"]

[[keep]]
paths = ["AGENTS.md", "README.md"]

[[rule]]
name = "documents"
paths = ["aidlc-docs/", "templates/"]
suffixes = [".md"]
max_size = "1 MB"

[[rule]]
name = "code"
paths = ["orchestrator/", "tests/"]
suffixes = [".py"]
max_size = "500 KB"

[[rule]]
name = "work"
paths = ["tree/", "out/"]
max_size = "2 GB"
executable = true

[role.bench]
write = ["**"]
"""
"""Allows what is measured by a rule that must be looked at, size included; nothing is allowed by having no rules."""

OCTAL = re.compile(rb"\\([0-7]{3})")
"""How mountinfo writes blanks and backslashes in names."""

LONG = "attr_timeout=3600,entry_timeout=3600,negative_timeout=3600"
MERGERFS = (
    "cache.files=auto-full,cache.attr=3600,cache.entry=3600,cache.negative_entry=3600,cache.readdir=true,"
    "cache.symlinks=true,cache.statfs=60,category.create=ff,minfreespace=0,inodecalc=passthrough,xattr=nosys,noatime"
)
BINDFS = f"kernel_cache,noatime,{LONG}"


def _bindfs(plan: Plan) -> list[str]:
    return ["bindfs", "-f", "--no-allow-other", "--xattr-none", "-o", BINDFS, str(plan.source), str(plan.mountpoint)]


def _mergerfs(plan: Plan) -> list[str]:
    """Debian ships its mergerfs-fusermount without the set-id bit: an ordinary user's must be fusermount3."""
    command = ["mergerfs", "-f", "-o", MERGERFS, str(plan.source), str(plan.mountpoint)]
    if os.geteuid() == 0:
        return command
    programs = Path(plan.base, "bin")
    programs.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (programs / "mergerfs-fusermount").symlink_to(shutil.which("fusermount3") or "fusermount3")
    return ["env", f"PATH={programs}:{os.environ['PATH']}", *command]


def _mfusepy(plan: Plan) -> list[str]:
    program = Path(__file__).with_name("loopback.py")
    return [plan.loopback_python, str(program), str(plan.source), str(plan.mountpoint)]


@contextlib.contextmanager
def _native(plan: Plan) -> Iterator[Path]:
    yield plan.source


def _served_by(command: Callable[[Plan], list[str]]) -> World:
    """A server that stays in the foreground, is ended by unmounting, and is ours to wait for."""
    return lambda plan: _serving(plan, command(plan), plan.mountpoint)


@contextlib.contextmanager
def _serving(plan: Plan, command: list[str], mountpoint: Path) -> Iterator[Path]:
    with plan.complaints.open("ab") as complaints:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=complaints, stderr=complaints)
    try:
        _await_mount(plan, server, mountpoint)
        yield mountpoint
    finally:
        unmount(mountpoint)
        _end(server)


def import_path(code: str) -> dict[str, str]:
    """The environment in which Python imports the copy `code` of the checkout."""
    return {**os.environ, "PYTHONPATH": f"{code}/scripts:{code}"}


@contextlib.contextmanager
def bonobofs(plan: Plan, mountpoint: Path | None = None, environment: dict[str, str] | None = None) -> Iterator[Path]:
    """Policy and log on, as always; `bonobofs umount` returns when the session is settled."""
    mountpoint = mountpoint or plan.mountpoint
    mountpoint.mkdir(exist_ok=True)
    plan.policy.write_text(POLICY)
    program = [plan.python, "-m", "bonobofs"]
    with plan.complaints.open("ab") as complaints:
        mount = [*program, "mount", str(plan.source), str(mountpoint)]
        command = subprocess.Popen(
            [*mount, "--agent", "bench", "--role", "bench", "--policy", str(plan.policy)],
            stdin=subprocess.DEVNULL,
            stdout=complaints,
            stderr=complaints,
            env=environment,
        )
        try:
            _await_mount(plan, command, mountpoint)
            yield mountpoint
        finally:
            umount = [*program, "umount", str(mountpoint)]
            subprocess.run(umount, stdout=complaints, stderr=complaints, env=environment)
            unmount(mountpoint)
            _end(command)


def _compiled(plan: Plan) -> contextlib.AbstractContextManager[Path]:
    return bonobofs(plan, environment=import_path(plan.compiled))


def server_of(mountpoint: Path, plan: Plan) -> int:
    """Return the process id of the server of a mount of bonobofs."""
    command = [plan.python, "-m", "bonobofs", "status", "--json"]
    status = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return next(int(mount["pid"]) for mount in status if mount["mountpoint"] == str(mountpoint))


def _floor(plan: Plan, between: str, mountpoint: Path) -> list[str]:
    return [plan.python, str(Path(__file__).with_name("floor.py")), str(plan.source), str(mountpoint), between]


def sleeping_floor(plan: Plan, mountpoint: Path) -> contextlib.AbstractContextManager[Path]:
    """The floor as one of several mounts: it sleeps between requests."""
    mountpoint.mkdir(exist_ok=True)
    return _serving(plan, _floor(plan, "sleeps", mountpoint), mountpoint)


@contextlib.contextmanager
def _floor_beside(plan: Plan) -> Iterator[Path]:
    """The floor whose server and program share one processor: a wake-up is a switch, and interrupts no processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with sleeping_floor(plan, plan.mountpoint) as root:
            yield root
    finally:
        os.sched_setaffinity(0, before)


World = Callable[[Plan], contextlib.AbstractContextManager[Path]]
"""Mounts the plan's source, gives the directory to work in, unmounts."""

WORLDS: dict[str, World] = {
    "native": _native,
    "bonobofs": bonobofs,
    "compiled": _compiled,
    "mergerfs": _served_by(_mergerfs),
    "bindfs": _served_by(_bindfs),
    "mfusepy": _served_by(_mfusepy),
    "floor": _served_by(lambda plan: _floor(plan, "polls", plan.mountpoint)),
    "floor beside": _floor_beside,
}
FLOORS = ("floor", "floor beside")
"""They answer at once, from memory: the least time of a server in this interpreter."""


def mounts_below(directory: Path) -> list[str]:
    """Mount points at or below DIRECTORY, the youngest first. Dead mounts are listed too."""
    prefix = os.fspath(directory)
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    points = [os.fsdecode(OCTAL.sub(_byte, line.split(b" ")[4])) for line in lines]
    return [point for point in reversed(points) if point == prefix or point.startswith(prefix + "/")]


def _byte(octal: re.Match[bytes]) -> bytes:
    return bytes([int(octal[1], 8)])


def unmount(directory: Path) -> None:
    """Unmount everything at and below DIRECTORY; what is busy is detached, so that nothing stays behind."""
    program, detach = (["umount"], "-l") if os.geteuid() == 0 else (["fusermount3", "-u"], "-z")
    for point in mounts_below(directory):
        if subprocess.run([*program, point], capture_output=True).returncode:
            subprocess.run([*program, detach, point], capture_output=True)
    if left := mounts_below(directory):
        print(f"left mounted: {' '.join(left)}", file=sys.stderr)


def _await_mount(plan: Plan, server: subprocess.Popen[bytes], mountpoint: Path) -> None:
    """Return when the mount point is mounted and answers. The kernel reports changes of the mount table to poll()."""
    waited = 0.0
    with open("/proc/self/mountinfo") as table:
        change = select.poll()
        change.register(table, select.POLLERR | select.POLLPRI)
        while not mounts_below(mountpoint):
            if server.poll() not in (None, 0) or waited > PATIENCE:
                raise BenchError(f"no mount came of {' '.join(map(str, server.args))}: see {tail(plan)}")  # type: ignore[arg-type]
            change.poll(100)
            waited += 0.1
    os.stat(mountpoint)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Wait for a server whose mount is gone; end it when it does not notice."""
    try:
        server.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def tail(plan: Plan) -> str:
    """The last lines that any program complained in."""
    lines = plan.complaints.read_text(errors="replace").splitlines() if plan.complaints.exists() else []
    return " | ".join(lines[-4:]) or "nothing was said"
