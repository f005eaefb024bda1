"""Two agents and an operator work on one project for an hour. Then the log must have no alert and no refusal."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import json
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.command import CHECKOUT, SCRATCH
from benchmarks.plan import BenchError
from benchmarks.worlds import unmount

AGENTS = ("alice", "bob")
LONGEST = 300.0
"""Seconds that one task may take."""
REPOSITORY = """\
git init -q
git add .
git -c user.name=operator -c user.email=operator@example.invalid -c commit.gpgsign=false commit -qm 'The project'
"""
SOURCES = {
    ".gitignore": "__pycache__/\n.venv/\nnode_modules/\ntarget/\n*.o\n",
    "README.md": "# A project\n",
    "package.json": '{"name": "project", "version": "1.0.0", "private": true}\n',
}
OF_AGENT = {
    "src/{agent}/__init__.py": "",
    "src/{agent}/app.py": "def answer():\n    return 42\n",
    "src/{agent}/main.c": "int main(void) { return 0; }\n",
    "src/{agent}/Makefile": "app: main.o\n\t$(CC) -o $@ $^\nclean:\n\trm -f app main.o\n",
    "rust/{agent}/Cargo.toml": '[package]\nname = "{agent}"\nversion = "0.1.0"\nedition = "2021"\n',
    "rust/{agent}/src/main.rs": "fn main() {}\n",
    "tests/test_{agent}.py": (
        "import unittest\n\n\nclass Test(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(1, 1)\n"
    ),
}
GUARD_CALLS = """\
import json, os, socket, sys
path = {"path": f"src/{sys.argv[1]}/tool.py"}
calls = [("write_file", {**path, "content": "x = 1\\n"}), ("read_file", path), ("delete_file", path)]
with socket.socket(socket.AF_UNIX) as line:
    line.connect(json.load(open(".bonobofs/whoami.json"))["socket"])
    answers = line.makefile()
    for name, arguments in calls:
        line.sendall(json.dumps({"call": name, **arguments}).encode() + b"\\n")
        answer = answers.readline()
        print(answer)
        if not json.loads(answer)["ok"]:
            sys.exit(1)
"""
"""The file tools, through the guard socket."""

AGENT_TASKS = {
    "editors": """\
echo "# $(date +%N)" > src/$A/.app.py.swp; cat src/$A/app.py > src/$A/app.py.tmp; echo '# saved' >> src/$A/app.py.tmp
mv src/$A/app.py.tmp src/$A/app.py; rm src/$A/.app.py.swp; echo "# $(date +%N)" >> src/$A/app.py
sed -i 's/^# saved$/# edited/' src/$A/app.py; perl -pi -e 's/^# edited\\n//; s/^# [0-9]+\\n//' src/$A/app.py""",
    "git": """\
git status --short > /dev/null; git diff --stat > /dev/null; git log --oneline > /dev/null
git blame README.md > /dev/null; git grep -q answer""",
    "venv": """\
rm -rf .venv; $PYTHON -m venv .venv; .venv/bin/pip install --quiet --no-index --no-deps $WHEEL
.venv/bin/python -c 'import day_wheel'""",
    "npm": """\
rm -rf node_modules; mkdir -p node_modules/.staging/left-pad node_modules/.bin
echo '{"name": "left-pad"}' > node_modules/.staging/left-pad/package.json
mv node_modules/.staging/left-pad node_modules/left-pad; rmdir node_modules/.staging
ln -s ../left-pad/package.json node_modules/.bin/left-pad; echo '{}' > node_modules/.package-lock.json""",
    "tests": "$PYTHON -m $TESTER tests/test_$A.py",
    "make": "make -s -C src/$A; make -s -C src/$A clean",
    "cargo": "cd rust/$A; cargo build --quiet --offline",
    "tools": "$PYTHON $GUARD_CALLS $A",
    "leases": """\
$BONOBOFS lease acquire "src/$A/**" --for 5m; echo '# leased' >> src/$A/__init__.py; : > src/$A/__init__.py
$BONOBOFS lease release""",
}
"""By what it is called, a script that an agent $A runs at the top of its mount."""

OPERATOR_TASKS = {
    "git": "git status --short; git diff --stat; git log --oneline",
    "look": "$BONOBOFS status; $BONOBOFS audit tail -n 20; $BONOBOFS why $MOUNT/src/alice/app.py",
    "report": "$BONOBOFS audit report",
}
"""The same for the operator, at the top of the source."""

NEEDS = {"make": ("make", "gcc"), "cargo": ("cargo",), "editors": ("perl",)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/workday", description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=60.0, help="how long (60)")
    parser.add_argument(
        "--work", type=Path, default=SCRATCH, metavar="DIR", help=f"work in a new directory in DIR ({SCRATCH})"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _directory(options.work) as base:
            return Workday(base).run(options.minutes * 60)
    except BenchError as error:
        print(f"workday: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("workday: interrupted; the mounts and their directory are removed", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _directory(parent: Path) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="bonobofs-workday-", dir=parent))
    try:
        yield place
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        unmount(place)
        shutil.rmtree(place, ignore_errors=True)


class Workday:
    """The project, its two mounts, and the programs at work."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.source = base / "project"
        python = peers.for_bonobofs(sys.executable, CHECKOUT, [pwd.getpwuid(os.geteuid())])
        self.environment = {
            **os.environ,
            "BONOBOFS": f"{shlex.quote(python)} -m bonobofs",
            "BONOBOFS_HOME": str(base / "home"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GUARD_CALLS": str(base / "guard_calls.py"),
            "MOUNT": str(base / AGENTS[0]),
            "PYTHON": python,
            "PYTHONPATH": str(CHECKOUT),
            "TESTER": "pytest -q" if python == sys.executable and importlib.util.find_spec("pytest") else "unittest",
            "WHEEL": str(base / "day_wheel-1.0-py3-none-any.whl"),
        }
        self.is_over = threading.Event()
        self.failures: list[str] = []
        self.tasks = 0
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    def run(self, seconds: float) -> int:
        """Work, unmount, verify the record, and print what it holds that it should not."""
        self._make_project()
        try:
            for agent in AGENTS:
                (self.base / agent).mkdir()
                self._demand(f"$BONOBOFS mount . {self.base / agent} --agent {agent} --policy project --new")
            self._work(seconds)
        finally:
            endings = [self._run_plain(f"$BONOBOFS umount {self.base / agent}") for agent in AGENTS]
        if any(endings):
            raise BenchError("; ".join(filter(None, endings)))
        self._demand("$BONOBOFS audit verify")
        found = [*self.failures, *self._false_entries()]
        for line in found:
            print(line)
        print(f"{self.tasks} tasks in {seconds / 60:g} minutes: {len(found)} false entries and failures")
        return 1 if found else 0

    def _make_project(self) -> None:
        files = SOURCES | {
            name.format(agent=agent): text.replace("{agent}", agent)
            for agent in AGENTS
            for name, text in OF_AGENT.items()
        }
        for name, text in files.items():
            (self.source / name).parent.mkdir(parents=True, exist_ok=True)
            (self.source / name).write_text(text)
        (self.base / "guard_calls.py").write_text(GUARD_CALLS)
        with zipfile.ZipFile(self.environment["WHEEL"], "w") as wheel:
            wheel.writestr("day_wheel.py", "")
            wheel.writestr("day_wheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: day-wheel\nVersion: 1.0\n")
            wheel.writestr(
                "day_wheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr("day_wheel-1.0.dist-info/RECORD", "")
        self._demand(REPOSITORY)

    def _work(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        workers = [
            threading.Thread(target=self._repeat, args=(AGENT_TASKS, self.base / agent, agent, end)) for agent in AGENTS
        ]
        workers.append(threading.Thread(target=self._repeat, args=(OPERATOR_TASKS, self.source, "operator", end)))
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        finally:
            self.is_over.set()
            with self._lock:
                for program in self._running:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(program.pid, signal.SIGKILL)
            for worker in workers:
                worker.join()

    def _repeat(self, tasks: dict[str, str], top: Path, name: str, end: float) -> None:
        possible = {task: script for task, script in tasks.items() if all(map(shutil.which, NEEDS.get(task, ())))}
        while True:
            for task, script in possible.items():
                if self.is_over.is_set() or time.monotonic() > end:
                    return
                said = self._run(script, top, name)
                if os.strerror(errno.ESTALE) in said:
                    said = self._run(script, top, name)  # docs/limits.md: a file was replaced between its open and read
                if said:
                    self.failures.append(f"{name}, {task}: {said}")
                self.tasks += 1

    def _run(self, script: str, top: Path, name: str = "") -> str:
        """Run a script, and return what it said if it failed."""
        with self._lock:
            if self.is_over.is_set():
                return ""
            program = subprocess.Popen(
                ["bash", "-ec", script],
                cwd=top,
                env={**self.environment, "A": name},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(program)
        try:
            said, _ = program.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            said = program.communicate()[0] + f"it took more than {LONGEST:g} seconds"
        with self._lock:
            self._running.discard(program)
        is_ended_by_us = self.is_over.is_set()
        return f"exit {program.returncode}: {said.strip()}" if program.returncode and not is_ended_by_us else ""

    def _demand(self, script: str) -> None:
        if said := self._run_plain(script):
            raise BenchError(f"{script}: {said}")

    def _run_plain(self, script: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", script],
            cwd=self.source,
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        return f"exit {done.returncode}: {done.stdout}{done.stderr}".strip() if done.returncode else ""

    def _false_entries(self) -> Iterator[str]:
        command = ["bash", "-ec", "$BONOBOFS audit export --format jsonl"]
        done = subprocess.run(
            command, cwd=self.source, env=self.environment, capture_output=True, text=True, check=True
        )
        for line in done.stdout.splitlines():
            entry: dict[str, Any] = json.loads(line)
            if entry["kind"] == "alert" or entry["result"] == "denied" or entry["operation"] == "out_of_band":
                yield line
