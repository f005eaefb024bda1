"""Results as Markdown, and as the part of docs/figures.md and README.md between two markers."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks.plan import BenchError
from benchmarks.workloads import ROWS

README_ROWS = ("rg", "status", "open", "write", "create", "untar")
"""The rows that README.md shows."""
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
    "mount": ("`bonobofs mount`, until the mount answers", "{:.0f} ms"),
    "why": ("`bonobofs why`", "{:.0f} ms"),
    "history": ("`bonobofs history` of one path among 1,000,000 changes", "{:.0f} ms"),
    "help": ("`bonobofs mount --help`", "{:.0f} ms"),
    "parallel-tar": ("Four `tar -x` at once, by one after another", "{:.2f} times"),
    "parallel-make": ("`make -j2` of a C project, by `make -j1`", "{:.2f} times"),
    "parallel-pytest": ("pytest with two workers, by one worker", "{:.2f} times"),
    "parallel-readers": ("Two `grep -r` of cold trees at once, by one after another", "{:.2f} times"),
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


def update(checkout: Path, results: dict[str, Any]) -> None:
    """Replace the figures of docs/figures.md, and the rows of README.md. Figures of a reduced run are not published."""
    if results["scale"] < 1 or results["rounds"] < 3:
        raise BenchError("--update-docs needs full size (--scale 1) and at least --rounds 3")
    _replace(checkout / "docs" / "figures.md", markdown(results))
    run = next(run for run in results["runs"] if run["times"])
    run = {**run, "times": {row: run["times"][row] for row in README_ROWS}}
    _replace(checkout / "README.md", "\n".join(_rows(run, results["worlds"])) + "\n")


def _replace(page: Path, figures: str) -> None:
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise BenchError(f"{page} has no line {BEGIN} followed by {END}: add both where the table belongs")
    page.write_text(f"{before}{BEGIN}\n{figures}{END}{after}")


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
    user = "root" if run["user"] == "root" else "an ordinary user"
    caption = f"{run['title']}: {size}, as {user}, Python {run['python']}"
    lines = [f"**{caption}**", "", *_rows(run, worlds)]
    others = worlds[1:]
    if others and len(run["times"]) > 1:
        means = " | ".join(f"**{_factor(geometric_mean(run, world))}**" for world in others)
        lines.append(f"| **geometric mean of {len(run['times'])} rows** | 1 | {means} |")
    return "\n".join(lines)


def _rows(run: Run, worlds: list[str]) -> list[str]:
    lines = [f"| workload | {' | '.join(worlds)} |", "|---" * (len(worlds) + 1) + "|"]
    for row in (row for row in ROWS if row in run["times"]):
        native = _time(statistics.median(run["times"][row]["native"]))
        factors = [_factor(ratio(run, row, world)) for world in worlds if world != "native"]
        lines.append(f"| {ROWS[row]} | {' | '.join([native, *factors])} |")
    return lines


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.2g} us" if seconds < 1e-4 else f"{seconds * 1e3:.3g} ms"


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"
