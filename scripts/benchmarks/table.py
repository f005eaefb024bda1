"""Results as Markdown, and as the part of docs/figures.md and README.md between two markers."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.plan import BenchError
from benchmarks.workloads import ROWS
from benchmarks.worlds import FLOORS

OPERATIONS = {
    "write": "4 KiB write",
    "create": "create+write+close",
    "rename": "rename",
    "unlink": "unlink",
    "untar": "one file of `tar -x`",
    "rm": "one file of `rm -rf`",
    "compileall": "one module of compileall",
    "find-cold": "one name of a cold `find`",
    "grep-cold": "one file of a cold `grep -r`",
}
"""The rows whose parts `breakdown` measures, and one operation of each."""
README_ROWS = ("rg", "status", "open", "write", "create", "untar")
"""The rows that README.md shows."""
SINGLE = {
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
}
"""Figures that are one number: title, and the number with its unit."""
PARALLEL = {
    "parallel-tar": "four `tar -x`",
    "parallel-make": "`make -j2` of a C project, by `make -j1`",
    "parallel-cargo": "`cargo build -j2` of a workspace, by `-j1`",
    "parallel-npm": "two `npm install` of local archives",
    "parallel-pytest": "pytest with two workers, by one worker",
    "parallel-readers": "two `grep -r` of cold trees of 4,000 small files",
    "parallel-sessions": "16 mounts, a cold `grep -r` in each, by one alone and by processor",
}
"""Loads that run at the same time."""
MEMORY = {
    "memory-names": "ten walks over 100,000 files, each forgotten before the next",
    "memory-million": "one walk over 1,000,000 files",
}
"""Memory by the number of names."""
BREAKDOWN = {
    "breakdown": "where the time of an operation goes",
    "breakdown-compiled": "the same in the compiled build",
}
PARTS = {name: title for name, (title, _) in SINGLE.items()} | PARALLEL | MEMORY | BREAKDOWN
SLOW = ("memory-million", *BREAKDOWN)
"""Parts that only `--rows` measures."""
Run = dict[str, Any]


def title_of(name: str) -> str:
    return PARTS[name]


def figure_of(name: str, figure: Any) -> str:
    """One part in a line."""
    if name in SINGLE:
        return SINGLE[name][1].format(figure)
    if name in BREAKDOWN:
        return ", ".join(f"{row} {parts['bonobofs']:.1f} us" for row, parts in figure["rows"].items())
    if name in PARALLEL:
        return ", ".join(f"{world} {value:.2f}" for world, value in figure.items())
    return ", ".join(f"{names:,.0f}: {walked:.0f}, {forgotten:.0f} MB" for names, walked, forgotten in figure)


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
    texts = [text for text in _sections(results).values() if text]
    failures = [
        f"Not measured: {name}: {reason}" for run in results["runs"] for name, reason in run["failures"].items()
    ]
    return "\n\n".join([_about(results), *texts, *failures]) + "\n"


def failed(results: dict[str, Any]) -> bool:
    """Whether a row could not be measured."""
    return any(run["failures"] for run in results["runs"])


def update(checkout: Path, results: dict[str, Any]) -> None:
    """Replace the sections of docs/figures.md that were measured as a whole, and the rows of README.md.

    Figures of a reduced run are not published.
    """
    if results["scale"] < 1 or results["rounds"] < 3:
        raise BenchError("--update-docs needs full size (--scale 1) and at least --rounds 3")
    page = checkout / "docs" / "figures.md"
    sections, first = _sections(results), results["runs"][0]
    whole = {
        "figures": all(set(ROWS) <= set(run["times"]) for run in results["runs"]),
        "single figures": set(SINGLE) <= set(first["parts"]),
        "loads at once": set(PARALLEL) <= set(first["parts"]),
        "memory": set(MEMORY) - set(SLOW) <= set(first["parts"]),
    }
    for name, text in sections.items():
        if text and name not in whole:
            _replace(page, name, f"{text}\n")
        elif text and whole[name]:
            _replace(page, name, f"{_about(results)}\n\n{text}\n")
        elif text:
            print(f"bench: {page} keeps its section {name}: not all of its rows were measured", file=sys.stderr)
    if whole["figures"]:
        worlds = [world for world in results["worlds"] if world not in FLOORS]
        run = {**first, "times": {row: first["times"][row] for row in README_ROWS}}
        _replace(checkout / "README.md", "figures", "\n".join(_rows(run, worlds)) + "\n")


def _sections(results: dict[str, Any]) -> dict[str, str]:
    """The text of each section; empty if none of its rows was measured."""
    runs = results["runs"]
    parts: dict[str, Any] = {name: figure for run in runs for name, figure in run["parts"].items()}
    return {
        "figures": "\n\n".join(_table(run, results["worlds"]) for run in runs if run["times"]),
        "single figures": "\n".join(
            ["| part | figure |", "|---|---|"] * bool(set(SINGLE) & set(parts))
            + [f"| {SINGLE[name][0]} | {figure_of(name, parts[name])} |" for name in SINGLE if name in parts]
        ),
        "loads at once": "\n".join(_parallel(parts)),
        "memory": "\n\n".join(_memory(name, parts[name]) for name in MEMORY if name in parts),
    } | {
        f"{part}, {'root' if run['user'] == 'root' else 'user'}": _breakdown(results, run, run["parts"][part])
        for run in runs
        for part in BREAKDOWN
        if part in run["parts"]
    }


def _breakdown(results: dict[str, Any], run: Run, figure: dict[str, Any]) -> str:
    """The parts of an operation in microseconds."""
    about = f"**{figure['build']}, as {_user(run)}**, Python {run['python']}. {_measured_on(results)}"
    peers = [name for name in ("mergerfs", "bindfs") if name in figure["rows"]["write"]]
    titles = [
        "one operation",
        "native",
        "requests",
        "floor",
        "calls on the source",
        "log",
        "decisions",
        "Python",
        "rest",
    ]
    lines = [f"| {' | '.join([*titles, 'bonobofs', *peers])} |", "|---" * (len(titles) + 1 + len(peers)) + "|"]
    for row, us in figure["rows"].items():
        cells = [OPERATIONS[row], f"{us['native']:.1f}", f"{us['requests']:.2g}", f"{us['floor']:.0f}"]
        cells += [f"{us['source']:.0f} ({us['calls']:.2g})", f"{us['log']:.0f} ({us['entries']:.0f})"]
        cells += [f"{us[name]:z.0f}" for name in ("decisions", "python", "rest", "bonobofs", *peers)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([about, "", *lines])


def _parallel(parts: dict[str, Any]) -> list[str]:
    columns = {
        "bonobofs": "time, bonobofs",
        "native": "time, native",
        "floor": "time, floor",
        "cpu": "processor time, bonobofs",
    }
    lines = [f"| at once, by one after another | {' | '.join(columns.values())} |", "|---" * (1 + len(columns)) + "|"]
    for name, title in PARALLEL.items():
        if name in parts:
            cells = [f"{parts[name][key]:.2f}" if key in parts[name] else "" for key in columns]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def _memory(name: str, rows: list[list[float]]) -> str:
    lines = [f"| {names:,.0f} | {walked:.0f} MB | {forgotten:.0f} MB |" for names, walked, forgotten in rows]
    head = ["| names walked | resident after the walk | after the kernel has forgotten them |", "|---|---|---|"]
    return "\n".join([f"**{MEMORY[name].capitalize()}**", "", *head, *lines])


def _replace(page: Path, section: str, figures: str) -> None:
    start, stop = f"<!-- {section} -->", f"<!-- /{section} -->"
    before, begin, rest = page.read_text().partition(start)
    _, end, after = rest.partition(stop)
    if not (begin and end):
        raise BenchError(f"{page} has no line {start} followed by {stop}: add both where the table belongs")
    page.write_text(f"{before}{start}\n{figures}{stop}{after}")


def _about(results: dict[str, Any]) -> str:
    return (
        f"Time divided by native time in the same round, median of {results['rounds']} rounds, worlds in turn, every "
        f"mount fresh; policy and log on. Cold: first touch after mounting, the source's own caches warm. "
        f"{_measured_on(results)}"
    )


def _measured_on(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    reduced = f" Reduced to {results['scale']:g} of the full size." if results["scale"] != 1 else ""
    return f"{results['machine']}. {versions}.{reduced}"


def _table(run: Run, worlds: list[str]) -> str:
    size = f"{run['files']:,} files with `.git`, {run['bytes'] / 1e6:.0f} MB"
    caption = f"{run['title']}: {size}, as {_user(run)}, Python {run['python']}"
    lines = [f"**{caption}**", "", *_rows(run, worlds)]
    others = worlds[1:]
    if others and len(run["times"]) > 1:
        means = " | ".join(f"**{_factor(geometric_mean(run, world))}**" for world in others)
        lines.append(f"| **geometric mean of {len(run['times'])} rows** | 1 | {means} |")
    return "\n".join(lines)


def _user(run: Run) -> str:
    return "root" if run["user"] == "root" else "an ordinary user"


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
