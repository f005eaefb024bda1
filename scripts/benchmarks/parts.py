"""A program that measures single parts of bonobofs: one decision, the log, the index, git and bd, the memory, commands,
and loads at the same time.

Usage: python -m benchmarks.parts decision|log|index|git-…|beads|memory|…, with the plan as JSON on standard input.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import Any

from benchmarks import breakdown, git_commands, memory, parallel
from benchmarks.plan import CHANGES, INDEXED, ISSUES, RECORDS, RULES, BenchError, Plan
from benchmarks.worlds import POLICY, bonobofs
from bonobofs.audit.index import AuditIndex
from bonobofs.audit.index_store import IndexTables, sqlite_engine
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.guards import BeadsGuard
from bonobofs.policy.document import parse
from bonobofs.policy.engine import compile_policy, decide
from bonobofs.policy.request import Context, Operation, Principal, Request, WorkspacePath
from bonobofs.session import open_session
from tests.support.recorded_changes import path_of, record

PASSES = 5
BD = Path(__file__).resolve().parents[2] / "tests" / "fakes" / "bd"
"""Where no BONOBOFS_BD names another: a small program that keeps bd's contract."""
PATHS_PER_RULE = 10


def decision(plan: Plan) -> float:
    """Microseconds for one decision under 1,000 rules on distinct paths.

    Every path is asked once for each compiled policy, and each pass compiles anew, so that no cache can help.
    """
    rules = plan.count(RULES)
    text = 'default = "deny"\n' + "".join(
        f'[[rule]]\nname = "rule-{number}"\npaths = ["area{number % 37}/part{number}/**"]\nsuffixes = [".md"]\n'
        f'max_size = "1 MB"\n'
        for number in range(rules)
    )
    document = parse(text, "bench").model_dump(mode="json")
    agent, context = Principal("bench", str(uuid.uuid4()), "agent"), Context(size=4096)
    chance = random.Random(7)
    passes = []
    for turn in range(PASSES):
        policy = compile_policy(document)
        requests = [
            Request(Operation.WRITE_FILE, WorkspacePath(f"area{number % 37}/part{number}/d{turn}/f{copy}.{suffix}"))
            for number in range(rules)
            for copy, suffix in enumerate(["md"] * (PATHS_PER_RULE - 1) + ["py"])
        ]
        chance.shuffle(requests)
        started = perf_counter_ns()
        for request in requests:
            decide(policy, agent, request, context)
        passes.append((perf_counter_ns() - started) / len(requests) / 1e3)
    return statistics.median(passes)


def log(plan: Plan) -> float:
    """Microseconds for one change in the log: the intent, written before, and the outcome."""
    session = str(uuid.uuid4())
    place = Path(plan.base, "trail")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    trail = Trail.create(
        place / f"{session}.jsonl", place / f"{session}.head", TrailIdentity(session, "bench", str(uuid.uuid4()))
    )
    passes = []
    for turn in range(PASSES):
        count = plan.count(RECORDS) // PASSES + 1
        paths = [f"tree/package{turn}/directory/file_{number}.md" for number in range(count)]
        started = perf_counter_ns()
        for path in paths:
            seq = trail.intent("create_file", path, "create", "work")
            trail.outcome(seq, "create_file", path)
        passes.append((perf_counter_ns() - started) / len(paths) / 1e3)
    trail.close()
    return statistics.median(passes)


def index(plan: Plan) -> float:
    """Entries a second that the index takes in from one trail, of changes at many paths."""
    home = Path(plan.base, "index")
    shutil.rmtree(home, ignore_errors=True)
    (home / "trails").mkdir(parents=True)
    session = str(uuid.uuid4())
    paths = home / "trails" / f"{session}.jsonl", home / "trails" / f"{session}.head"
    trail = Trail.create(*paths, TrailIdentity(session, "bench", str(uuid.uuid4())))
    for number in range(plan.count(INDEXED) // 2):
        path = f"tree/package{number % 50}/directory{number % 377}/file_{number}.md"
        trail.outcome(
            trail.intent("create_file", path, "create", "work", tool="python3", details={"pid": 4711, "uid": 1000}),
            "create_file",
            path,
            action="create",
        )
    trail.close()
    passes = []
    for turn in range(PASSES):
        tables = IndexTables(sqlite_engine(home / f"index-{turn}.db"))
        started = perf_counter_ns()
        progress = AuditIndex(home, "bench", tables).catch_up()
        passes.append(progress.entries / (perf_counter_ns() - started) * 1e9)
        tables.close()
    shutil.rmtree(home)
    return statistics.median(passes)


def beads(plan: Plan) -> float:
    """Milliseconds of the Beads gate's own for one update among 1,000 issues: two lists read, judged and recorded.

    Processor time, in which bd itself has no part.
    """
    base = Path(plan.base, "beads")
    shutil.rmtree(base, ignore_errors=True)
    source, person = base / "source", base / "person"
    for directory in (source, person):
        directory.mkdir(parents=True)
    program = os.environ.setdefault("BONOBOFS_BD", str(BD))
    os.environ["BONOBOFS_HOME"] = str(base / "home")
    environment = {"PATH": os.environ["PATH"], "HOME": str(person), "BEADS_DIR": str(source / ".beads")}
    lines = [
        {"id": f"gt-{number}", "title": f"Issue {number}", "status": "open", "priority": 2, "issue_type": "task"}
        for number in range(plan.count(ISSUES))
    ]
    issues = base / "issues.jsonl"
    issues.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for words in (["init", "--stealth", "--non-interactive", "--quiet", "--prefix", "gt"], ["import", str(issues)]):
        subprocess.run([program, *words], cwd=person, env=environment, check=True, stdout=subprocess.DEVNULL)
    passes = []
    policy = base / "policy.toml"
    policy.write_text('default = "allow"\n')
    with open_session(source, agent="bench", policy=policy) as session:
        guard = BeadsGuard(session)
        for turn in range(2 * PASSES):
            started = process_time_ns()
            guard.guarded_update("gt-0", "bench", priority=turn % 2)
            passes.append((process_time_ns() - started) / 1e6)
    shutil.rmtree(base)
    return statistics.median(passes)


def _command_ms(plan: Plan, *arguments: str) -> float:
    """Milliseconds of one command."""
    started = perf_counter_ns()
    subprocess.run([plan.python, "-m", "bonobofs", *arguments], check=True, stdout=subprocess.DEVNULL)
    return (perf_counter_ns() - started) / 1e6


def mount(plan: Plan) -> float:
    """Milliseconds of `bonobofs mount` until the mount answers; a policy that was used before."""
    plan.policy.write_text(POLICY)
    places, passes = [str(plan.source), str(plan.mountpoint)], []
    for _ in range(2 * PASSES):
        passes.append(_command_ms(plan, "mount", *places, "--agent", "bench", "--policy", str(plan.policy), "--new"))
        _command_ms(plan, "umount", places[1])
    return statistics.median(passes)


def why(plan: Plan) -> float:
    """Milliseconds of `bonobofs why` in a mount."""
    with bonobofs(plan) as root:
        return statistics.median(_command_ms(plan, "why", str(root / "out" / "file")) for _ in range(2 * PASSES))


def history(plan: Plan) -> float:
    """Milliseconds of `bonobofs history` of one path among the changes of eight trails, half of them compressed."""
    home = Path(plan.base, "history")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(mode=0o700)
    record(home, plan.source, plan.count(CHANGES))
    os.environ["BONOBOFS_HOME"] = str(home)
    _command_ms(plan, "audit", "index")
    passes = [_command_ms(plan, "history", str(plan.source / path_of(number))) for number in range(2 * PASSES)]
    shutil.rmtree(home)
    return statistics.median(passes)


def command_help(plan: Plan) -> float:
    """Milliseconds of the help of a command."""
    return statistics.median(_command_ms(plan, "mount", "--help") for _ in range(2 * PASSES))


PARTS: dict[str, Callable[[Plan], Any]] = {
    "decision": decision,
    "log": log,
    "index": index,
    "git-status": git_commands.status,
    "git-commit": git_commands.commit,
    "git-commit-many": git_commands.commit_many,
    "git-switch": git_commands.switch,
    "git-delay": git_commands.delay,
    "beads": beads,
    "memory": memory.walked,
    "memory-names": memory.by_names,
    "memory-million": memory.million,
    "mount": mount,
    "why": why,
    "history": history,
    "help": command_help,
    "breakdown": breakdown.measure,
    "breakdown-compiled": breakdown.measure,
    **{name: partial(parallel.measure, name=name) for name in parallel.LOADS},
    "parallel-sessions": parallel.sessions,
}


def main(name: str) -> int:
    """Print the figure of a part as JSON, or why it could not be measured."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        figure = {"figure": PARTS[name](Plan.from_json(sys.stdin.read()))}
    except (BenchError, OSError, subprocess.CalledProcessError) as error:
        figure = {"failure": str(error)}
    except KeyboardInterrupt:
        return 130
    print(json.dumps(figure))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
