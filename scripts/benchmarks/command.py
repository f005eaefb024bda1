"""The command line: prepare the trees, measure each as each user in a child process, print and store the results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import peers, table, trees
from benchmarks.plan import BenchError, Plan
from benchmarks.workloads import ROWS, WORKLOADS
from benchmarks.worlds import FLOORS, WORLDS, import_path, unmount

CHECKOUT = Path(__file__).resolve().parent.parent.parent
PURPOSE = """\
Time the same work on the bare directory, on bonobofs with policy and log on, and on its peers, and print how many times
longer it takes. Missing peers are installed: tools by apt-get, Python packages in an environment under the cache
directory. Work happens in a directory of its own that is gone afterwards."""
SCRATCH = Path("/var/tmp")
IMAGE_BYTES = 32 << 30
IN_MEMORY = ("tmpfs", "ramfs")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    os.umask(0o022)
    try:
        if options.list:
            print("\n".join(f"{name:18} {title}" for name, title in (ROWS | table.PARTS).items()))
            return 0
        results = json.loads(options.show.read_text()) if options.show else _measure(options)
        _hand_out(results, options)
        return int(table.failed(results))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted; mounts and directories are removed", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=PURPOSE)
    add = parser.add_argument
    add("--rounds", type=int, default=3, metavar="N", help="rounds over all workloads and worlds (3)")
    add(
        "--rows",
        default="",
        metavar="ROW,…",
        help="rows of --list, workloads, or the groups git, memory and parallel (all but the slow memory-million)",
    )
    worlds = ",".join(world for world in WORLDS if world not in FLOORS)
    about = f"native always, and of {', '.join(WORLDS)} (all but the floors)"
    add("--worlds", default=worlds, metavar="WORLD,…", help=about)
    add("--tree", action="append", metavar="TREE", help="generated, stdlib or a directory; repeatable (generated)")
    add("--user", action="append", metavar="USER", help="measure as this user, name or uid; repeatable (yourself)")
    add("--scale", type=float, default=1.0, metavar="F", help="multiply all counts and sizes, to try things out (1)")
    add("--work", type=Path, metavar="DIR", help="work in DIR, on a disk (as root: a new ext4 in a file in /var/tmp)")
    add("--json", type=Path, metavar="FILE", help="keep every single time in FILE")
    add("--show", type=Path, metavar="FILE", help="measure nothing: show what --json kept")
    add("--update-docs", action="store_true", help="replace the figures in docs/figures.md and README.md")
    add("--list", action="store_true", help="list the rows and end")
    return parser


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    worlds = _worlds(options.worlds)
    rows, parts = _chosen(options.rows, worlds)
    users = [_user(name) for name in options.user or [str(os.geteuid())]]
    if any(user.pw_uid != os.geteuid() for user in users) and os.geteuid() != 0:
        raise BenchError("only root can measure as another user: run it as that user instead")
    compiled = bool({"compiled"} & set(worlds) or {"breakdown-compiled"} & set(parts))
    tools = (
        {"git", *worlds}
        | ({"gcc"} if compiled else set())
        | ({"rg"} & set(rows))
        | ({"fusermount3"} if len(worlds) > 1 else set())
    )
    peers.install_tools(tools & set(peers.TOOLS))
    also = ["pytest-xdist"] if "parallel-pytest" in parts else []
    python = peers.for_bonobofs(peers.interpreter(users), CHECKOUT, users, also)
    loopback_python = peers.environment(python, [peers.MFUSEPY]) if "mfusepy" in worlds else ""
    results: dict[str, Any] = {
        "versions": peers.versions([*worlds[1:], *sorted(tools & {"git", "rg"})], loopback_python, CHECKOUT),
        "rounds": options.rounds,
        "scale": options.scale,
        "worlds": worlds,
        "runs": [],
    }
    with _work_directory(options.work) as work:
        results["machine"] = _machine(work)
        if options.scale >= 1 and _file_system(work).startswith(IN_MEMORY):
            raise BenchError(f"{work} is in memory, not on a disk: give another directory with --work")
        code = copy_of_checkout(work / "code", python)
        compiled_code = _compiled_copy(work, python) if compiled else ""
        for number, tree in enumerate(options.tree or ["generated"]):
            base = work / f"tree{number}"
            print(f"preparing {tree}", file=sys.stderr)
            trees.prepare(tree, base, options.scale)
            for user in users:
                trees.hand_over(base, user.pw_uid, user.pw_gid)
                sizes = (options.rounds, options.scale)
                plan = Plan(str(base), *sizes, rows, tuple(worlds), parts, python, loopback_python, str(compiled_code))
                run = _run_as(user, plan, code)
                results["runs"].append(run | {"title": _title(tree), "tree": tree, "user": user.pw_name})
                parts = tuple(part for part in parts if part in table.BREAKDOWN)
            shutil.rmtree(base)
    return results


def _chosen(rows: str, worlds: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The rows and the parts of bonobofs that `--rows` names; without it, all but the slow ones."""
    names = [name for name in rows.split(",") if name]
    if not names:
        parts = tuple(name for name in table.PARTS if name not in table.SLOW)
        return tuple(ROWS), parts if "bonobofs" in worlds else ()
    for group in {"git", "memory", "parallel"} & set(names):  # all of its parts
        names += [part for part in table.PARTS if part.startswith(f"{group}-") and part not in table.SLOW]
    if unknown := set(names) - set(ROWS) - set(WORKLOADS) - set(table.PARTS) - {"git", "parallel"}:
        raise BenchError(f"no row or workload {', '.join(sorted(unknown))}: see scripts/bench --list")
    groups = {row for name in names if name in WORKLOADS for row in WORKLOADS[name].rows}
    return tuple(row for row in ROWS if row in groups or row in names), tuple(m for m in table.PARTS if m in names)


def _worlds(names: str) -> list[str]:
    """The worlds that are asked for, the bare directory first: everything is divided by it."""
    chosen = {name for name in names.split(",") if name} | {"native"}
    if unknown := chosen - set(WORLDS):
        raise BenchError(f"no world {', '.join(sorted(unknown))}: there are {', '.join(WORLDS)}")
    return [world for world in WORLDS if world in chosen]


def _user(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError:
        raise BenchError(f"no user {name}: fusermount3 serves only users that the machine knows") from None


@contextlib.contextmanager
def _work_directory(parent: Path | None) -> Iterator[Path]:
    """A directory that is gone afterwards, with whatever is still mounted in it, on Ctrl-C and SIGTERM too."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    place = Path(tempfile.mkdtemp(prefix="bonobofs-bench-", dir=parent or SCRATCH))
    place.chmod(0o755)
    work = place / "work"
    work.mkdir()
    try:
        if parent is None and os.geteuid() == 0:
            _mount_own_disk(place / "disk", work)
        yield work
    finally:
        unmount(place)
        shutil.rmtree(place, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _mount_own_disk(image: Path, work: Path) -> None:
    """A new ext4 with a journal, so that neither the state of the machine's own disk nor its options count.

    On an ext4 without a journal, for one, every create after many deletions searches for seconds.
    """
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    for command in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(work)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BenchError(f"{command[0]}: {done.stderr.strip()}: give a directory on a disk with --work")


def _file_system(directory: Path) -> str:
    """Type and device, such as "ext4 on /dev/sda1"."""
    command = ["findmnt", "--noheadings", "--output", "FSTYPE,SOURCE", "--target", str(directory)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return " on ".join(found.stdout.split())


def copy_of_checkout(code: Path, python: str) -> Path:
    """Copy the checkout to `code`, with its bytecode, where every user can read it and it is not edited meanwhile."""
    for name in ("bonobofs", "scripts", "tests/fakes", "tests/support"):
        shutil.copytree(CHECKOUT / name, code / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("policy.toml", "pyproject.toml"):  # the packaged policy is sought beside pyproject.toml
        shutil.copyfile(CHECKOUT / name, code / name)
    subprocess.run([python, "-m", "compileall", "-q", str(code)], check=True)
    return code


def _compiled_copy(work: Path, python: str) -> Path:
    """Copy the checkout and put the compiled modules of a wheel beside their sources."""
    print("compiling bonobofs", file=sys.stderr)
    code, wheels = copy_of_checkout(work / "compiled", python), work / "wheel"
    for name in ("README.md", "LICENSE"):
        shutil.copyfile(CHECKOUT / name, code / name)
    builder = peers.environment(python, peers.BUILD)
    done = subprocess.run(
        [builder, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)],
        cwd=code,
        env=os.environ | {"HATCH_BUILD_HOOK_ENABLE_MYPYC": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise BenchError(f"the compiled build failed ({lines}): are gcc and Python's headers installed?")
    with zipfile.ZipFile(next(wheels.iterdir())) as wheel:
        wheel.extractall(code, [name for name in wheel.namelist() if name.endswith(".so")])
    return code


def _run_as(user: pwd.struct_passwd, plan: Plan, code: Path) -> dict[str, Any]:
    """Run `measure` as USER to its end; when we are interrupted it is told so, and cleans up before we do."""
    other = user.pw_uid != os.geteuid()
    groups = os.getgrouplist(user.pw_name, user.pw_gid)
    measuring = subprocess.Popen(
        [plan.python, "-m", "benchmarks.measure"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=plan.base,
        env=import_path(str(code)),
        user=user.pw_uid if other else None,
        group=user.pw_gid if other else None,
        extra_groups=groups if other else None,
        start_new_session=True,
    )
    try:
        said, _ = measuring.communicate(plan.to_json())
    except BaseException:
        measuring.terminate()
        measuring.wait()
        raise
    if measuring.returncode:
        raise BenchError(f"measuring as {user.pw_name} ended with {measuring.returncode}")
    run: dict[str, Any] = json.loads(said)
    return run


def _machine(work: Path) -> str:
    """One line: processor, memory, kernel, file system, and whether it was busy."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{model}, {os.cpu_count()} CPUs, {memory:.0f} GiB, Linux {platform.release()}, "
        f"{_file_system(work)}, load {os.getloadavg()[0]:.1f} when begun"
    )


def _title(tree: str) -> str:
    known = {"generated": "Generated tree", "stdlib": "Python's standard library as a repository"}
    return known.get(tree) or f"Repository `{Path(tree).resolve().name}`"


def _hand_out(results: dict[str, Any], options: argparse.Namespace) -> None:
    print(table.markdown(results), end="")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.update_docs:
        table.update(CHECKOUT, results)
