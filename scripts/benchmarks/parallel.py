"""Loads that run at the same time, compared with the same work done one after another.

A load makes its directory before the mount, and works there twice: at once (W seconds) and serially (S seconds), each
time in a directory of its own. The order changes from round to round. The figure is the median of W/S. The same is
done on the bare directory: it shows how much of W/S is the machine's.

Source: issue 15 asks for a W/S of at most 1.6, and of sessions that are as fast as one alone, by processor.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pwd
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

from benchmarks.plan import BenchError, Plan
from benchmarks.worlds import WORLDS, bonobofs, server_of, sleeping_floor

ROUNDS: Final = 4
"""Pairs, half of them in each order."""
LIMIT: Final = 240.0
"""Seconds after which programs that hang are killed."""
TREES: Final = 4
TREE_FILES: Final = 1_000
SOURCES: Final = 16
CRATES: Final = 6
PACKAGES: Final = 8
PACKAGE_FILES: Final = 60
TEST_FILES: Final = 8
TESTS: Final = 60
READ_FILES: Final = 4_000
"""Files that each of two readers reads."""
SESSIONS: Final = 16
SESSION_FILES: Final = 2_000
SESSION_ROUNDS: Final = 2
ABSENT: Final = "no-such-words-in-any-file"

Figures = dict[str, float]
"""`bonobofs`, `native` and, for sessions, `floor`: W/S. `cpu`: processor time of programs and server of bonobofs at
once, by that of the serial work."""


class Command(NamedTuple):
    """A program of a load, and its exit status."""

    words: list[str]
    ends_with: int = 0
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed


class Load(NamedTuple):
    """Work in a directory. Both lists have the same work; the programs of `at_once` run at the same time."""

    prepare: Callable[[Plan, Path], None]
    serial: Callable[[Plan, Path], list[Command]]
    at_once: Callable[[Plan, Path], list[Command]]


def _tar_prepare(plan: Plan, directory: Path) -> None:
    archive = _once(plan, "small.tar", lambda path: _write_archive(path, plan.count(TREE_FILES), "part"))
    for number in range(TREES):
        (directory / str(number)).mkdir()
    shutil.copyfile(archive, directory / "tree.tar")


def _tar(plan: Plan, directory: Path) -> list[Command]:
    return [
        Command(["tar", "-xf", str(directory / "tree.tar"), "-C", str(directory / str(number))])
        for number in range(TREES)
    ]


def _make_prepare(plan: Plan, directory: Path) -> None:
    count = plan.count(SOURCES)
    for number in range(count):
        body = "".join(f"int f{number}_{line}(int x) {{ return x * {line} + {number}; }}\n" for line in range(200))
        (directory / f"part{number}.c").write_text(body)
    objects = " ".join(f"part{number}.o" for number in range(count))
    (directory / "Makefile").write_text(f"lib.a: {objects}\n\tar rcs $@ $^\n%.o: %.c\n\tcc -O1 -c $< -o $@\n")


def _make(jobs: int) -> Callable[[Plan, Path], list[Command]]:
    return lambda _, directory: [Command(["make", "-C", str(directory), "--silent", f"-j{jobs}"])]


def _cargo_prepare(plan: Plan, directory: Path) -> None:
    names = [f"part{number}" for number in range(plan.count(CRATES))]
    members = ", ".join(f'"{name}"' for name in names)
    (directory / "Cargo.toml").write_text(f'[workspace]\nresolver = "2"\nmembers = [{members}]\n')
    for name in names:
        source = directory / name / "src" / "lib.rs"
        source.parent.mkdir(parents=True)
        source.write_text("".join(f"pub fn f{line}(x: u64) -> u64 {{ x * {line} + 1 }}\n" for line in range(100)))
        package = f'[package]\nname = "{name}"\nversion = "0.1.0"\nedition = "2021"\n'
        (directory / name / "Cargo.toml").write_text(package)


def _cargo(jobs: int) -> Callable[[Plan, Path], list[Command]]:
    def commands(_: Plan, directory: Path) -> list[Command]:
        manifest = str(directory / "Cargo.toml")
        words = ["cargo", "build", "--offline", "--quiet", f"-j{jobs}", "--manifest-path", manifest]
        home = pwd.getpwuid(os.geteuid()).pw_dir
        places = {name: f"{home}/.{name.split('_')[0].lower()}" for name in ("RUSTUP_HOME", "CARGO_HOME")}
        return [Command(words, environment=places | {"CARGO_TARGET_DIR": str(directory / "target")})]

    return commands


def _npm_prepare(plan: Plan, directory: Path) -> None:
    """Two projects that depend on the same packages, which are archives beside them."""
    names = [f"bench-package-{number}" for number in range(plan.count(PACKAGES))]
    for name in names:
        manifest = json.dumps({"name": name, "version": "1.0.0"})
        archive = _once(
            plan, f"{name}.tgz", lambda path, text=manifest: _write_archive(path, PACKAGE_FILES, "package/lib", text)
        )
        shutil.copyfile(archive, directory / archive.name)
    dependencies = {name: f"file:../{name}.tgz" for name in names}
    for project in ("first", "second"):
        (directory / project).mkdir()
        manifest = json.dumps({"name": project, "version": "1.0.0", "private": True, "dependencies": dependencies})
        (directory / project / "package.json").write_text(manifest)


def _npm(plan: Plan, directory: Path) -> list[Command]:
    """The package manager's cache is new, and on the bare directory, as in a home directory."""
    options = ["--offline", "--no-audit", "--no-fund", "--silent", "--no-update-notifier"]
    cache = Path(plan.base, "npm-cache")
    shutil.rmtree(cache, ignore_errors=True)
    return [
        Command(["npm", "install", *options, "--cache", str(cache / project), "--prefix", str(directory / project)])
        for project in ("first", "second")
    ]


def _pytest_prepare(plan: Plan, directory: Path) -> None:
    text = f"import pytest\n@pytest.mark.parametrize('n', range({plan.count(TESTS)}))\ndef test_file(n, tmp_path):\n"
    text += "    (tmp_path / 'file').write_text('x' * n)\n    assert len((tmp_path / 'file').read_text()) == n\n"
    for number in range(TEST_FILES):
        (directory / f"test_{number}.py").write_text(text)


def _pytest(workers: int) -> Callable[[Plan, Path], list[Command]]:
    def commands(plan: Plan, directory: Path) -> list[Command]:
        words = [plan.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers)]
        return [Command([*words, "--rootdir", str(directory), "--basetemp", str(directory / "tmp"), str(directory)])]

    return commands


def _readers_prepare(plan: Plan, directory: Path) -> None:
    archive = _once(plan, "read.tar", lambda path: _write_archive(path, plan.count(READ_FILES), "part"))
    for name in ("first", "second"):
        (directory / name).mkdir()
        _extract(archive, directory / name)


def _readers(_: Plan, directory: Path) -> list[Command]:
    return [Command(["grep", "-rF", ABSENT, str(directory / name)], ends_with=1) for name in ("first", "second")]


LOADS: Final[dict[str, Load]] = {
    "parallel-tar": Load(_tar_prepare, _tar, _tar),
    "parallel-make": Load(_make_prepare, _make(1), _make(2)),
    "parallel-cargo": Load(_cargo_prepare, _cargo(1), _cargo(2)),
    "parallel-npm": Load(_npm_prepare, _npm, _npm),
    "parallel-pytest": Load(_pytest_prepare, _pytest(1), _pytest(2)),
    "parallel-readers": Load(_readers_prepare, _readers, _readers),
}


def measure(plan: Plan, name: str) -> Figures:
    """Return the figures of one load."""
    load = LOADS[name]
    ratios = _Ratios()
    for turn, world in itertools.product(range(ROUNDS), ("native", "bonobofs")):
        with _prepared(plan, load) as place, WORLDS[world](plan) as root:
            servers = [server_of(root, plan)] if world == "bonobofs" else []
            ways = {
                way: _Way(getattr(load, way)(plan, root / place / way), servers, one_by_one=way == "serial")
                for way in ("serial", "at_once")
            }
            ratios.add(world, _run_both(plan, ways, backwards=bool(turn % 2)), "at_once", "serial")
    return ratios.medians()


def sessions(plan: Plan) -> Figures:
    """Sixteen mounts whose agents read the same small files at once, by one alone and by processor.

    With T seconds for one alone while the other mounts are idle, N sessions on P processors need N x T / P seconds. The
    figure is the time of all N at once divided by it. The floor shows the part of switching between the servers.
    """
    if shutil.which("grep") is None:
        raise BenchError("grep is not installed")
    tree = plan.source / "out"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    _extract(_once(plan, "session.tar", lambda path: _write_archive(path, plan.count(SESSION_FILES), "part")), tree)
    ratios, needed = _Ratios(), SESSIONS / min(os.cpu_count() or 1, SESSIONS)
    mount = {"bonobofs": bonobofs, "floor": sleeping_floor}
    for turn, world in itertools.product(range(SESSION_ROUNDS), ("native", *mount)):
        with contextlib.ExitStack() as mounts:
            roots, servers = [plan.source] * (SESSIONS + 1), []
            if world != "native":
                points = [Path(plan.base, f"session-{number}") for number in range(SESSIONS + 1)]
                roots = [mounts.enter_context(mount[world](plan, point)) for point in points]
            if world == "bonobofs":
                servers = [server_of(point, plan) for point in points]
            reads = [Command(["grep", "-rF", ABSENT, str(root / "out")], ends_with=1) for root in roots]
            ways = {"alone": _Way(reads[:1], servers[:1]), "all": _Way(reads[1:], servers[1:])}
            costs = _run_both(plan, ways, backwards=bool(turn % 2))
            ratios.add(world, costs, "all", "alone", seconds=needed, cpu=SESSIONS)
    shutil.rmtree(tree)
    return ratios.medians()


class _Way(NamedTuple):
    """A way to do a load: its programs, and the servers whose processor time counts."""

    commands: list[Command]
    servers: list[int]
    one_by_one: bool = False


class _Cost(NamedTuple):
    """What a way took: seconds, and seconds of processor time."""

    seconds: float
    cpu: float


class _Ratios:
    """The figures of each round."""

    def __init__(self) -> None:
        self._rounds: dict[str, list[float]] = {}

    def add(
        self, world: str, costs: dict[str, _Cost], above: str, below: str, *, seconds: float = 1, cpu: float = 1
    ) -> None:
        """Add the costs of `above` divided by those of `below`, which count `seconds` and `cpu` times."""
        ratio = costs[above].seconds / costs[below].seconds / seconds
        words = " ".join(f"{way} {cost.seconds:.2f} s (CPU {cost.cpu:.2f} s)" for way, cost in costs.items())
        print(f"    {world}: {words}, ratio {ratio:.2f}", file=sys.stderr, flush=True)
        self._rounds.setdefault(world, []).append(ratio)
        if world == "bonobofs":
            self._rounds.setdefault("cpu", []).append(costs[above].cpu / costs[below].cpu / cpu)

    def medians(self) -> Figures:
        return {name: statistics.median(ratios) for name, ratios in self._rounds.items()}


@contextlib.contextmanager
def _prepared(plan: Plan, load: Load) -> Iterator[str]:
    """Make the directories of both ways to work; yield the name of their parent in the source."""
    place = plan.source / "out"
    shutil.rmtree(place, ignore_errors=True)
    for way in ("serial", "at_once"):
        (place / way).mkdir(parents=True)
        load.prepare(plan, place / way)
    subprocess.run(["sync", "--file-system", str(place)], check=True)
    try:
        yield place.name
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _run_both(plan: Plan, ways: dict[str, _Way], *, backwards: bool) -> dict[str, _Cost]:
    costs = {}
    for name in sorted(ways, key=list(ways).index, reverse=backwards):
        commands, servers, one_by_one = ways[name]
        before = _cpu_seconds(servers)
        groups = [[command] for command in commands] if one_by_one else [commands]
        seconds = sum(_run_at_once(plan, group) for group in groups)
        costs[name] = _Cost(seconds, _cpu_seconds(servers) - before)
    return costs


def _cpu_seconds(servers: list[int]) -> float:
    """Processor time of the programs that have ended, and of the servers."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = usage.ru_utime + usage.ru_stime
    for pid in servers:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def _once(plan: Plan, name: str, write: Callable[[Path], None]) -> Path:
    """Return a file outside of what is mounted, written at the first call."""
    path = Path(plan.base, name)
    if not path.exists():
        write(path)
    return path


def _write_archive(path: Path, files: int, directory: str, manifest: str = "") -> None:
    """Write an archive of small files, 20 in each directory; `manifest` is the package.json of an npm package."""
    chance = random.Random(5)
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as archive:
        names = {f"{directory}{number // 20}/file{number}.js": chance.randrange(400, 8_000) for number in range(files)}
        contents = {name: b"// text\n" * (size // 8) for name, size in names.items()}
        if manifest:
            contents["package/package.json"] = manifest.encode()
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))


def _extract(archive: Path, directory: Path) -> None:
    subprocess.run(["tar", "-xf", str(archive), "-C", str(directory)], check=True)


def _run_at_once(plan: Plan, commands: list[Command]) -> float:
    """Return the seconds until the last of the programs has ended. BenchError: one has failed, or hangs."""
    with plan.complaints.open("ab") as complaints:
        started = perf_counter()
        running = [
            subprocess.Popen(
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                cwd=plan.base,
                env=os.environ | command.environment,
                start_new_session=True,
            )
            for command in commands
        ]
        try:
            _await_all(running)
            seconds = perf_counter() - started
        finally:
            for program in running:
                if program.poll() is None:
                    os.killpg(program.pid, signal.SIGKILL)
                    program.wait()
    for program, command in zip(running, commands, strict=True):
        if program.returncode != command.ends_with:
            raise BenchError(f"{' '.join(command.words[:5])} ended with {program.returncode}")
    return seconds


def _await_all(running: list[subprocess.Popen[bytes]]) -> None:
    """Wait without a timer for each program: an alarm ends the wait after LIMIT seconds."""

    def give_up(*_: object) -> None:
        raise BenchError(f"{' '.join(map(str, running[0].args[:5]))} took more than {LIMIT:.0f} s")  # type: ignore[index]

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        for program in running:
            program.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
