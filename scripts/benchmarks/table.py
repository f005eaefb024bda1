"""Results as a table for people, and as the part of README.md between its two markers."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks.plan import BenchError
from benchmarks.workloads import ROWS

BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
PARTS = {
    "decision": ("One decision under 1,000 rules on distinct paths, nothing cached", "{:.2f} us"),
    "log": ("One change in the log, intent and outcome", "{:.2f} us"),
    "index": ("Entries of the record taken into the index (SQLite) in a second", "{:,.0f}"),
    "git-status": ("`git status` in a repository of 50,000 files, by native", "{:.2f} times"),
    "git-commit": ("`git add` and `git commit` of one file there, beyond twice native", "{:.0f} ms"),
    "git-commit-many": ("`git commit -a` of 10,000 files, by native", "{:.2f} times"),
    "git-switch": ("`git switch` over 10,000 changed files, by native", "{:.1f} times"),
    "git-delay": ("Longest wait of another writer while 600 MB are added and committed", "{:.0f} ms"),
    "beads": ("The Beads gate's own part of an update among 1,000 issues", "{:.1f} ms"),
    "memory": ("Resident after walking 100,000 files", "{:.0f} MB"),
}
Run = dict[str, Any]


def ratio(run: Run, row: str, world: str) -> float:
    """Time in WORLD by that on the bare directory in the same round, median of the rounds.

    A machine that others share is slower in one round than in the next, for all worlds alike.
    """
    times: dict[str, list[float]] = run["times"][row]
    return statistics.median(taken / native for taken, native in zip(times[world], times["native"], strict=True))


def geometric_mean(run: Run, world: str) -> float:
    return math.exp(statistics.fmean(math.log(ratio(run, row, world)) for row in run["times"]))


def markdown(results: dict[str, Any]) -> str:
    """One table for each tree and user, what was measured on, and the parts by themselves."""
    texts = [_about(results)]
    for run in results["runs"]:
        if run["times"]:
            texts.append(_table(run, results["worlds"]))
        texts += [": ".join(PARTS[name]).format(value) + "." for name, value in run["parts"].items()]
    return "\n\n".join(texts) + "\n"


def update(readme: Path, results: dict[str, Any]) -> None:
    """Put the table between the markers of README. Figures of a reduced run are not for publication."""
    if results["scale"] < 1 or results["rounds"] < 3:
        raise BenchError("--update-readme needs full size (--scale 1) and at least --rounds 3")
    text = readme.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise BenchError(f"{readme} has no line {BEGIN} followed by {END}: add both where the table belongs")
    readme.write_text(f"{before}{BEGIN}\n{markdown(results)}{END}{after}")


def _about(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    reduced = f" Reduced to {results['scale']:g} of the full size." if results["scale"] != 1 else ""
    return (
        f"Time divided by native time in the same round, median of {results['rounds']} rounds, worlds in turn, every "
        f"mount fresh; policy and log on. Cold: first touch after mounting, the source's own caches warm. "
        f"{results['machine']}. {versions}.{reduced}"
    )


def _table(run: Run, worlds: list[str]) -> str:
    size = f"{run['files']:,} files with `.git`, {run['bytes'] / 1e6:.0f} MB"
    caption = f"{run['title']}: {size}, as {run['user']}, Python {run['python']}"
    others = [world for world in worlds if world != "native"]
    lines = [f"**{caption}**", "", f"| workload | {' | '.join(worlds)} |", "|---" * (len(worlds) + 1) + "|"]
    rows = [row for row in ROWS if row in run["times"]]
    for row in rows:
        native = _time(statistics.median(run["times"][row]["native"]))
        factors = [_factor(ratio(run, row, world)) for world in others]
        lines.append(f"| {ROWS[row]} | {' | '.join([native, *factors])} |")
    if others and len(rows) > 1:
        means = " | ".join(f"**{_factor(geometric_mean(run, world))}**" for world in others)
        lines.append(f"| **geometric mean of {len(rows)} rows** | 1 | {means} |")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.2g} us" if seconds < 1e-4 else f"{seconds * 1e3:.3g} ms"


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"
