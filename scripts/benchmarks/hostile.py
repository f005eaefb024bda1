"""Run each attack of a hostile agent, and measure the delays of a second agent and an operator."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import attacks, peers
from benchmarks.attacks import ATTACKS, Agent, Attack
from benchmarks.command import CHECKOUT, SCRATCH, copy_of_checkout
from benchmarks.plan import BenchError
from benchmarks.worlds import unmount

SLOWEST: Final = 0.1
"""Seconds that a request of the others may take."""
COMMAND: Final = 2.0
"""Seconds that a command of the operator may take: it loads Python before its first request."""
LOADS: Final = 5
"""A command loads Python in up to three processes, one after the other, and waits for the database and the kernel."""
ATTEMPTS: Final = 3
"""How often an attack is measured that breaks a bound of time: the server's own delay shows each time."""
MEMORY: Final = 150_000_000
"""Bytes that a server may have resident."""
PAUSE: Final = 0.005
"""Seconds between two rounds of requests."""
SAMPLE: Final = 0.1
PATIENCE: Final = 600.0
"""Seconds that the first turn of an attack may take beyond its time, and that a killed attack may take to end."""
LOAD: Final = "load Python"
NOBODY: Final = 65534
PURPOSE: Final = f"""\
Mount two sources three times. A hostile agent attacks in its mount. Four observers send requests all the while and
measure each: the operator in the mount of the attack, a second agent in a mount of the same source, a third in a mount
of another source, and one in a directory without a mount. The slowest request of the last shows what the machine and
its disk delay. The time for which an observer in a mount or its server waits for a processor does not count. The
operator also runs status, why, audit tail, audit verify, and mounts and unmounts a further source, and loads Python,
which shows what the machine delays for commands.

Bounds: a request takes at most {SLOWEST * 1000:.0f} ms more than the slowest without a mount during the same
attack. A command takes at most {COMMAND:.0f} s more than {LOADS} times the slowest load of Python during the same
attack or before all; audit verify reads the whole record and has no bound. An attack that breaks one of these is
measured again, {ATTEMPTS} times at most: what the server delays shows each time.
A server has at most {MEMORY // 10**6} MB
resident. No request and no command fails, each session serves after each attack with the same server, and the
record verifies. An attack of which no turn succeeds is an error.

Root attacks as the user {NOBODY} in a mount made with --user; other users attack as themselves."""

Operation = Callable[[int], object]


class Meter:
    """Times of one observer, in memory that its process shares with this one: seconds by CLOCK_MONOTONIC."""

    def __init__(self, operations: dict[str, Operation], server: int = 0) -> None:
        """`server` is the process whose first thread serves the operations; 0 is none."""
        self._operations: Final = operations
        self._server: Final = server
        self.names: Final = list(operations)
        self._cells: Final = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")

    def clear(self) -> None:
        """Forget the times of what has ended; an operation that is under way stays."""
        for cell in (1, *range(2, 2 + 2 * len(self.names), 2)):
            self._cells[cell] = 0.0

    @property
    def turns(self) -> int:
        return int(self._cells[1])

    def count(self) -> None:
        self._cells[1] += 1

    def run(self, failures: Path) -> None:
        """Repeat the operations for ever; what fails is entered in the file and they go on."""
        for turn in itertools.count():
            for index, (name, operation) in enumerate(self._operations.items()):
                delayed = self._delays()
                began = self._cells[0] = time.monotonic()
                self._cells[3 + 2 * index] = -1.0
                try:
                    operation(turn)
                except OSError as error:
                    with failures.open("a") as stream:
                        stream.write(f"{name}: {error}\n")
                took = time.monotonic() - began - (self._delays() - delayed)
                self._cells[2 + 2 * index] = max(self._cells[2 + 2 * index], took)
                self._cells[3 + 2 * index] = 0.0
            self.count()
            time.sleep(PAUSE)

    def _delays(self) -> float:
        """Seconds for which this process and the server have been ready and had no processor."""
        if not self._server:
            return 0.0
        stats = (Path(f"/proc/{process}/schedstat").read_text() for process in ("self", self._server))
        return sum(int(stat.split()[1]) for stat in stats) / 1e9

    def slowest(self) -> dict[str, float]:
        """Seconds by name since `clear`. An operation that is under way counts with its time until now."""
        found = {}
        for index, name in enumerate(self.names):
            waits = time.monotonic() - self._cells[0] if self._cells[3 + 2 * index] else 0.0
            found[name] = max(self._cells[2 + 2 * index], waits)
        return found


def requests(place: Path, *, mounted: bool = True) -> dict[str, Operation]:
    """Requests in one directory, each by its name, with the number of the turn."""

    def write(turn: int) -> None:
        with (place / "new").open("wb", buffering=0) as stream:
            stream.write(b"a line of text\n" * (turn % 50 + 1))

    found: dict[str, Operation] = {
        "write": write,
        "read": lambda turn: (place / "new").read_bytes(),
        "look up": lambda turn: (place / f"missing-{turn}").exists(),
        "list": lambda turn: os.listdir(place),
        "rename": lambda turn: os.rename(place / "new", place / "old"),
        "remove": lambda turn: (place / "old").unlink(),
        "make directory": lambda turn: (place / "directory").mkdir(),
        "remove directory": lambda turn: (place / "directory").rmdir(),
    }
    if mounted:
        found["ask why"] = lambda turn: os.getxattr(place, "user.bonobofs.why.name")
    return found


class Mount(NamedTuple):
    """One session. `server` is the process that serves it."""

    mountpoint: Path
    session: str
    server: int


class Row(NamedTuple):
    """What one attack cost."""

    name: str
    turns: int
    requests: dict[str, dict[str, float]]
    """Seconds of the slowest, by observer and operation."""
    memory: dict[str, int]
    """The most bytes that each server, and each companion, had."""
    entries: int
    """That the record of the hostile agent's session got."""
    broken: list[str]


class Soak:
    """The sources, mounts and observers below one directory."""

    def __init__(self, base: Path, python: str, report: Callable[[int], None]) -> None:
        self._base = base
        self._program = [python, "-m", "bonobofs"]
        self._report = report
        self._home = base / "home"
        self._mounts: dict[str, Mount] = {}
        self._meters: dict[str, Meter] = {}
        self._pids: list[int] = []
        self._read = 0

    def prepare(self, chosen: dict[str, Attack]) -> None:
        """Make the sources with what the attacks need there, mount, and start the observers."""
        for name in ("shared", "other", "further", "bare", "mnt-further", "agent"):
            (self._base / name).mkdir()
        for name in ("arena", "arena/notes", "same-mount", "same-source"):
            (self._base / "shared" / name).mkdir()
        (self._base / "other/other-source").mkdir()
        for attack in chosen.values():
            if attack.prepare:
                attack.prepare(self._base / "shared/arena")
        (self._base / "policy.toml").write_text(attacks.POLICY)
        user = []
        if os.geteuid() == 0:
            subprocess.run(["chown", "-R", str(NOBODY), self._base / "shared/arena", self._base / "agent"], check=True)
            (self._base / "shared").chmod(0o755)
            user = ["--user", str(NOBODY)]
        self._mount("same-mount", "shared", "mallory", *user)
        self._mount("same-source", "shared", "bob")
        self._mount("other-source", "other", "carol")
        for name, mount in self._mounts.items():
            self._meters[name] = Meter(requests(mount.mountpoint / name), mount.server)
        self._meters["no-mount"] = Meter(requests(self._base / "bare", mounted=False))
        self._meters["operator"] = Meter(self._commands())
        for name, meter in self._meters.items():
            self._start(lambda name=name, meter=meter: meter.run(self._failures(name)))  # type: ignore[misc]

    def _start(self, act: Callable[[], None], user: int | None = None) -> int:
        pid = fork(act, user)
        self._pids.append(pid)
        self._report(pid)
        return pid

    def _end(self, pid: int) -> list[str]:
        """Kill one that was started, and say so if it does not end."""
        self._pids.remove(pid)
        problems = end(pid)
        self._report(-pid)
        return problems

    def stop(self) -> list[str]:
        """Kill all that was started."""
        return [problem for pid in self._pids[:] for problem in self._end(pid)]

    def _failures(self, name: str) -> Path:
        return self._base / f"failures-{name}"

    def bonobofs(self, *arguments: str | Path) -> str:
        """Run one command and return its output. ChildProcessError if it fails."""
        done = subprocess.run(
            [*self._program, *arguments], cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            said = " ".join((done.stdout + done.stderr).split())[-400:]
            raise ChildProcessError(f"bonobofs {' '.join(map(str, arguments))} ended with {done.returncode}: {said}")
        return done.stdout

    def _mount(self, name: str, source: str, agent: str, *options: str) -> None:
        mountpoint = self._base / f"mnt-{name}"
        mountpoint.mkdir()
        policy = ("--policy", self._base / "policy.toml")
        self.bonobofs("mount", self._base / source, mountpoint, "--agent", agent, "--new", *policy, *options)
        found = self._status()[str(mountpoint)]
        self._mounts[name] = Mount(mountpoint, found["session"], found["pid"])

    def _status(self) -> dict[str, dict[str, str | int]]:
        return {mount["mountpoint"]: mount for mount in json.loads(self.bonobofs("status", "--json"))}

    def _commands(self) -> dict[str, Operation]:
        further, mountpoint = self._base / "further", self._base / "mnt-further"
        commands: dict[str, tuple[str | Path, ...]] = {
            "status": ("status",),
            "why": ("why", self._mounts["same-mount"].mountpoint / "arena/x.md"),
            "audit tail": ("audit", "tail"),
            "mount": ("mount", further, mountpoint, "--agent", "dora", "--new", "--policy", "docs"),
            "umount": ("umount", mountpoint),
            "audit verify": ("audit", "verify"),
        }
        load = [self._program[0], "-c", "import pydantic, sqlalchemy, rich"]
        return {
            LOAD: lambda turn: subprocess.run(load, cwd="/", check=True),
            **{name: lambda turn, words=words: self.bonobofs(*words) for name, words in commands.items()},  # type: ignore[misc]
        }

    def attack(self, name: str, attack: Attack | None, seconds: float) -> Row:
        """Let the agent attack for so long; None is no attack."""
        for meter in self._meters.values():
            meter.clear()
        self._new_entries()
        turns = Meter({})
        pid = 0
        if attack:
            mount = self._mounts["same-mount"]
            inside = self._home / "sessions" / mount.session / "inside"
            agent = Agent(mount.mountpoint, mount.mountpoint / "arena", inside, self._base / "agent")
            user = NOBODY if os.geteuid() == 0 else None
            pid = self._start(lambda: attacks.run(attack, agent, turns.count), user)
        memory = self._watch(time.monotonic() + seconds, turns if pid else None, attack and attack.beside)
        broken = [] if turns.turns or not attack else ["no turn of the attack succeeded"]
        if pid:
            broken += self._end(pid)
        times = {observer: meter.slowest() for observer, meter in self._meters.items()}
        return Row(name, turns.turns, times, memory, self._new_entries(), broken + self._lost())

    def _watch(self, until: float, turns: Meter | None, beside: Callable[[Path], None] | None) -> dict[str, int]:
        """Sample until then, and until one turn of the attack is done; the most memory of each server and companion.

        `beside` is what the operator does in the source meanwhile.
        """
        most: dict[str, int] = {}
        while (now := time.monotonic()) < until or (turns and not turns.turns and now < until + PATIENCE):
            for name, mount in self._mounts.items():
                for process, pid in (("", mount.server), (" companion", child_of(mount.server))):
                    most[name + process] = max(most.get(name + process, 0), resident(pid))
            if beside:
                beside(self._base / "shared/arena")
            time.sleep(SAMPLE)
        return most

    def _new_entries(self) -> int:
        """Of the hostile agent's session, since the last call."""
        trail = self._home / f"trails/{self._mounts['same-mount'].session}.jsonl"
        with trail.open("rb") as stream:
            stream.seek(self._read)
            count = 0
            while block := stream.read(1 << 20):
                count += block.count(b"\n")
            self._read = stream.tell()
        return count

    def _lost(self) -> list[str]:
        """What has failed since the last call, and the sessions that do not serve."""
        found = []
        for name in self._meters:
            if self._failures(name).exists():
                lines = self._failures(name).read_text().splitlines()
                self._failures(name).unlink()
                found.append(f"{name}: {len(lines)} failed, first: {lines[0]}")
        status = self._status()
        for name, mount in self._mounts.items():
            now = status.get(str(mount.mountpoint), {})
            if (now.get("state"), now.get("pid")) != ("serving", mount.server):
                found.append(f"the session of {name} is lost: {now.get('state')}, process {now.get('pid')}")
        return found

    def settle(self) -> list[str]:
        """End the observers and the sessions; the record must verify."""
        broken = self.stop()
        broken += [f"{name} had {most / 1e6:.0f} MB resident" for name, most in self._most() if most > MEMORY]
        unmount(self._base / "mnt-further")
        try:
            for mount in self._mounts.values():
                self.bonobofs("umount", mount.mountpoint)
            print(self.bonobofs("audit", "verify").strip())
        except ChildProcessError as error:
            broken.append(str(error))
        return broken

    def _most(self) -> list[tuple[str, int]]:
        return [(name, resident(mount.server, "VmHWM:")) for name, mount in self._mounts.items()]


def fork(act: Callable[[], None], user: int | None = None) -> int:
    """Run it in a process group of its own, as that user. It dies with this process."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        os.setpgid(0, 0)
        os.closerange(3, 1024)  # an open end of the pipe would keep the directory from being cleared
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir("/")
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; a change of user clears it
        if os.getppid() == parent:
            act()
    except BaseException as error:  # noqa: BLE001 - the edge of a process
        print(f"hostile: {error!r}", file=sys.stderr)
    finally:
        os._exit(0)


def end(pid: int) -> list[str]:
    """Kill a group of `fork`, and say so if it does not end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return []
        time.sleep(0.01)
    return [f"process {pid} has not ended {PATIENCE:.0f} s after SIGKILL"]


def resident(pid: int, field: str = "VmRSS:") -> int:
    """Bytes; 0 if the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * int(status.partition(field)[2].split()[0]) if field in status else 0


def child_of(pid: int) -> int:
    """The companion of a server; 0 if it is gone."""
    try:
        return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or ["0"])[0])
    except OSError:
        return 0


def late(row: Row, baseline: Row) -> list[str]:
    """Say which bounds of time the row breaks. The baseline is measured without an attack."""
    broken = []
    load = max(each.requests["operator"][LOAD] for each in (row, baseline))
    machine = max(row.requests["no-mount"].values())
    for observer in row.requests.keys() - {"no-mount"}:
        for name, took in row.requests[observer].items():
            usual, bound = machine, SLOWEST
            if observer == "operator":
                usual, bound = LOADS * load, COMMAND
            if took > usual + bound and name not in ("audit verify", LOAD):
                more = f"{took - usual:.3f} s more than the machine delays; the bound is {bound:.3f} s"
                broken.append(f"{observer}: {name} took {took:.3f} s, {more}")
    return broken


def large(row: Row) -> list[str]:
    """Say which bounds of memory the row breaks."""
    broken = []
    for name, most in row.memory.items():
        if most > MEMORY and "companion" not in name:
            broken.append(f"the server of {name} had {most / 1e6:.0f} MB; the bound is {MEMORY / 1e6:.0f} MB")
    return broken


HEAD: Final = (
    f"{'attack':30} {'turns':>7} {'same mount':>11} {'same source':>12} {'other source':>13} {'no mount':>10}"
    f"  {'command':18} {'servers MB':>11}  {'companions MB':>15} {'entries':>8}"
)


def show(row: Row) -> None:
    """Print the slowest request of each observer in milliseconds, the memory of each process, and the entries."""
    times = {observer: max(found.values()) * 1000 for observer, found in row.requests.items()}
    command, took = max(
        ((name, took) for name, took in row.requests["operator"].items() if name != LOAD), key=lambda item: item[1]
    )
    names = ("same-mount", "same-source", "other-source")
    servers, companions = (
        "/".join(f"{row.memory.get(name + process, 0) / 1e6:.0f}" for name in names) for process in ("", " companion")
    )
    print(
        f"{row.name:30} {row.turns:7} {times['same-mount']:8.0f} ms {times['same-source']:9.0f} ms"
        f" {times['other-source']:10.0f} ms {times['no-mount']:7.0f} ms  {took:4.1f} s {command:12}"
        f" {servers:>11}  {companions:>15} {row.entries:8}",
        flush=True,
    )


@contextlib.contextmanager
def directory(parent: Path) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """A directory that another process clears when this one ends, also by SIGKILL.

    The second value reports the process groups to that process, for it to kill them before: a group that was started
    by its number, one that has ended by the negative number.
    """
    place = Path(tempfile.mkdtemp(prefix="bonobofs-hostile-", dir=parent))
    place.chmod(0o755)
    reader, writer = os.pipe()
    cleaner = os.fork()
    if cleaner == 0:
        try:
            os.close(writer)
            os.setsid()
            with open(reader) as stream:
                reports = [int(line) for line in stream]
            for group in {one for one in reports if one > 0 and -one not in reports}:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            unmount(place)
            for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):  # shutil.rmtree recurses
                subprocess.run([*command, place], stderr=subprocess.DEVNULL)
        finally:
            os._exit(0)
    os.close(reader)
    os.set_inheritable(writer, False)
    try:
        yield place, lambda group: os.write(writer, b"%d\n" % group) and None
    finally:
        os.close(writer)
        os.waitpid(cleaner, 0)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    chosen = {name: attack for name, attack in ATTACKS.items() if options.only in name}
    if not chosen:
        print(f"hostile: no attack is named {options.only}; there are {', '.join(ATTACKS)}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT is ignored in a background job of a shell
        signal.signal(number, signal.default_int_handler)
    try:
        with directory(options.work) as (base, report):
            users = [pwd.getpwuid(uid) for uid in {os.geteuid(), NOBODY if os.geteuid() == 0 else os.geteuid()}]
            python = peers.for_bonobofs(peers.interpreter(users), CHECKOUT, users)
            code = copy_of_checkout(base / "code", python)
            os.environ |= {"PYTHONPATH": str(code), "BONOBOFS_HOME": str(base / "home")}
            soak = Soak(base, python, report)
            try:
                return _run(soak, chosen, options.minutes * 60 / (len(chosen) + 1))
            finally:
                soak.stop()
    except (BenchError, ChildProcessError) as error:
        print(f"hostile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hostile: interrupted; the mounts and the directory are removed", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/hostile", description=PURPOSE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("minutes", type=float, help="how long; all attacks get the same time")
    add("--only", default="", metavar="WORD", help="the attacks with this word in their name")
    add("--work", type=Path, default=SCRATCH, metavar="DIR", help=f"work in a new directory in DIR ({SCRATCH})")
    return parser


def _run(soak: Soak, chosen: dict[str, Attack], seconds: float) -> int:
    """Measure without an attack, then each attack; 1 if a bound is broken."""
    soak.prepare(chosen)
    print(HEAD)
    baseline = soak.attack("no attack", None, seconds)
    show(baseline)
    problems = [f"no attack: {problem}" for problem in baseline.broken]
    for name, attack in chosen.items():
        for _ in range(ATTEMPTS):
            row = soak.attack(name, attack, seconds)
            show(row)
            problems += [f"{name}: {problem}" for problem in row.broken + large(row)]
            if not (broken := late(row, baseline)):
                break
        problems += [f"{name}: {problem}" for problem in broken]
    problems += soak.settle()
    for problem in problems:
        print(f"broken: {problem}")
    return 1 if problems else 0
