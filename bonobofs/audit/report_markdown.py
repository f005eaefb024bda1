"""Render a report as Markdown for a pull request.

Texts of a trail are untrusted: names of files and agents, and reasons of failures. The renderer escapes them: none can
create a heading, link, image or mention, or leave its table cell. The result fits into a pull request's description.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from bonobofs.system.terminal import escape

EXAMPLES: Final = 5
"""Maximum number of agents in the title, and of paths of a denial."""
LONGEST: Final = 300
"""Maximum number of characters of a name. A longer name is shortened in its middle."""

_CALLS: Final = re.compile(r"[@#&]|://|www\.", re.IGNORECASE)
"""Text that GitHub and similar sites turn into a link or a mention in spite of a backslash."""


def render(document: dict[str, Any]) -> str:
    """Return the document of `report.Report.document` as Markdown."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: dict[str, Any]) -> Iterator[str]:
    totals, more = document["totals"], document["more"]
    agents = sorted({session["agent"] for session in document["sessions"]})
    yield f"# Changes by {_listed([_code(agent) for agent in agents[:EXAMPLES]], len(agents)) or 'no agent'}"
    yield ""
    yield (
        f"{_many(totals['paths'], 'path')} changed, {_many(totals['refused'], 'change')} refused, "
        f"{totals['failed']} failed, {_many(totals['alerts'], 'alert')}."
    )
    if totals["out_of_band"]:
        yield f"{_many(totals['out_of_band'], 'path')} changed externally."
    if totals["unreadable"]:
        yield f"**{_many(totals['unreadable'], 'line')} of the trails cannot be read: run `bonobofs audit verify`.**"
    behind = totals["out_of_band"] - len(document["out_of_band"])
    missing = {**more, "out_of_band": behind}
    for name, section in _SECTIONS.items():
        if document[name]:
            yield from section.lines(document[name], missing.get(name, 0))


class _Section(NamedTuple):
    """A heading and its items, limited in length so that all sections fit into one comment."""

    title: str
    characters: int
    render: Callable[[dict[str, Any]], str]
    """Returns the lines of one item."""
    what_to_do: str = ""
    heading: tuple[str, ...] = ()
    of_each: str = ""
    """Key that groups the items, if they have more than one value of it."""

    def lines(self, items: list[dict[str, Any]], omitted: int) -> Iterator[str]:
        yield from ("", f"## {self.title}", "")
        if self.what_to_do:
            yield from (self.what_to_do, "")
        left = self.characters
        groups = {item[self.of_each]: None for item in items} if self.of_each else {}
        under: str | None = None
        if len(groups) <= 1:
            yield from self.heading
        for number, item in enumerate(items):
            text = self.render(item)
            left -= len(text) + 1
            if left < 0 and number:
                omitted += len(items) - number
                break
            if len(groups) > 1 and item[self.of_each] != under:
                if under is not None:
                    yield ""
                under = item[self.of_each]
                yield from (f"In {_code(under)}:", "", *self.heading)
            yield text
        if omitted:
            yield from ("", f"And {omitted} more.")


def _changed_line(item: dict[str, Any]) -> str:
    what = f"renamed from {_cell(item['was'])}" if item["was"] else item["what"]
    return f"| {_cell(item['path'])} | {what} | {item['changes']} | {item['bytes']} |"


def _refused_line(item: dict[str, Any]) -> str:
    lines = [
        f"- **{_plain(item['code'])}**, rule {_code(item['rule'])}, {_times(item['times'])}: {_plain(item['reason'])}"
    ]
    named = [_code(path) for path in item["paths"][:EXAMPLES] if path]
    left = len(item["paths"]) + item["more_paths"] - len(named)
    if named:
        lines.append(f"  - where: {', '.join(named)}{f' and {left} more' if left > 0 else ''}")
    if item["instead"]:
        lines.append(f"  - what to do: {_plain(item['instead'])}")
    return "\n".join(lines)


def _failed_line(item: dict[str, Any]) -> str:
    return f"- {_plain(item['operation'])} {_code(item['path'])}, {_times(item['times'])}: {_plain(item['reason'])}"


def _noticed_line(item: dict[str, Any]) -> str:
    reason = f": {_plain(item['reason'])}" if item["reason"] else ""
    what = f"{_plain(item['operation'])} {_code(item['path'])}"
    how = f" It {_plain(item['what'])}." if item.get("what") else ""
    return f"- {_moment(item['timestamp'])}, {_code(item['agent'])}, {what}{reason}{how}"


def _behind_line(item: dict[str, Any]) -> str:
    return f"- {_moment(item['timestamp'])}, {_code(item['path'])} {_plain(item['what'])}"


def _session_line(item: dict[str, Any]) -> str:
    role = f", role {_code(item['role'])}" if item["role"] else ""
    source = f" on {_code(item['source'])}" if item["source"] else ""
    times = f"{_moment(item['first'])} to {_moment(item['last'])}"
    line = f"- {_code(item['agent'])}{role}{source}, {times}, session {_code(item['session'])}"
    if item["seq"]:
        line += f"\n  - its record has {item['seq']} entries, the last with the hash {_code(item['hash'])}"
    return line


_SECTIONS: Final = {
    "changed": _Section(
        "Changed",
        20_000,
        _changed_line,
        heading=("| path | what | changes | bytes written |", "|---|---|---:|---:|"),
        of_each="source",
    ),
    "refused": _Section("Refused", 16_000, _refused_line),
    "failed": _Section(
        "Failed",
        4_000,
        _failed_line,
        "The policy permitted these changes, and they failed: remove the cause.",
    ),
    "alerts": _Section("Alerts", 4_000, _noticed_line, "Review each one before the merge."),
    "out_of_band": _Section(
        "External changes",
        4_000,
        _behind_line,
        "No rule was applied to these, and their author is unknown: review each one.",
    ),
    "unfinished": _Section(
        "Begun without a recorded outcome",
        4_000,
        _noticed_line,
        "They may have been made; `bonobofs audit verify` shows the present state.",
    ),
    "sessions": _Section("Sessions", 7_000, _session_line),
}
"""Together less than the 65,536 characters of a pull request's description."""


def _cell(text: str) -> str:
    """Return a text as a code span in a table."""
    return _code(text).replace("|", "\\|")


def _code(text: str) -> str:
    """Return a text as a code span, in which no Markdown, link or mention is active."""
    safe = escape(text)
    if len(safe) > LONGEST:
        safe = f"{safe[: LONGEST // 2]}…{safe[-LONGEST // 2 :]}"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", safe)), default=0))
    # A renderer removes one space at both ends, unless the span has spaces only.
    pad = " " if "`" in safe or (safe[:1] == safe[-1:] == " " and safe.strip(" ")) else ""
    return f"{fence}{pad}{safe}{pad}{fence}" if safe else "the root"


def _plain(text: str) -> str:
    """Return a text with its Markdown escaped. A text with a mention or a link becomes a code span."""
    safe = escape(text)
    if len(safe) > LONGEST or _CALLS.search(safe):
        return _code(text)
    return "".join(f"\\{character}" if character in "\\`*_{}[]<>|!~" else character for character in safe)


def _moment(text: str) -> str:
    return f"{text[:19].replace('T', ' ')} UTC"


def _listed(names: list[str], number: int) -> str:
    if number > len(names):
        names = [*names, f"{number - len(names)} more"]
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
