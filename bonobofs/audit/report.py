"""A report of sessions as plain data: the changed paths, the denials, the failures and the alerts.

The report has the final result of many changes: a file that was created and removed is not in it, and a file that was
created and renamed counts as created. Equal denials are one line with their number.

`markdown` renders a report for a pull request. Texts of a trail are untrusted: names of files and agents, and reasons
of failures. The renderer escapes them: none can create a heading, link, image or mention, or leave its table cell.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from bonobofs.audit.entry import COUNTS, LAYER, PROCESS, REPLACES, AuditEntry, instant, is_effective
from bonobofs.audit.index import ToolCall, Turn
from bonobofs.audit.reader import UNREADABLE, PathNode, RecordedChange
from bonobofs.audit.recovery import OUT_OF_BAND
from bonobofs.policy.request import Operation
from bonobofs.system.terminal import escape

MOST: Final = 500
"""Maximum number of items of each list. Further items are counted."""

_MOST_RUNNING: Final = 256
"""Number of the latest calls among which are those that run: a session keeps the begin of so many."""
_COUNTED: Final = ("changes", "refused", "failed", "alerts", "out_of_band", "unfinished", "apart", "unreadable")


class SessionFacts(NamedTuple):
    """Facts about a session that are not in its trail."""

    role: str = ""
    source: str = ""
    policy: str = ""
    """Digest of the first policy of the session."""
    seq: int = 0
    """Number of the last entry of its trail; 0 if the trail is not in this state directory."""
    hash: str = ""
    """Hash of that entry. A reader can compare it later with the trail."""


@dataclass(slots=True)
class _Session:
    agent: str
    agent_id: str
    first: str
    last: str


@dataclass(slots=True)
class _Refusal:
    reason: str
    instead: str
    times: int = 0
    paths: dict[str, None] = field(default_factory=dict)


class Activity(Protocol):
    """What a report needs to group changes: an `AuditIndex`."""

    def turns(self) -> list[Turn]: ...

    def calls(self) -> list[ToolCall]: ...

    def command(self, session: str, process: int) -> str: ...


@dataclass(slots=True)
class _CallSum:
    call: ToolCall
    changes: int = 0
    refused: int = 0
    shared: int = 0
    """Number of changes and refusals during which another call ran too: the client does not say which made them."""


@dataclass(slots=True)
class _TurnSum:
    turn: Turn
    changes: int = 0
    refused: int = 0
    commands: dict[str, int] = field(default_factory=dict)
    calls: dict[int, _CallSum] = field(default_factory=dict)
    """By number of the entry of the begin."""


class _Node(PathNode):
    """The state of one path in a report."""

    __slots__ = ("changes", "layer", "was", "what", "written")

    def __init__(self) -> None:
        super().__init__()
        self.what = ""
        """`created`, `modified`, `deleted` or `renamed`; "" if the changes cancel each other."""
        self.was = ""
        """The name before a rename."""
        self.layer = False
        """The bytes are in another layer, so the path is not a file of the source."""
        self.changes = 0
        self.written = 0


class ChangeReport:
    """The sum of the changes so far. Its size depends on the number of paths, not on the number of changes."""

    def __init__(self, sessions: Mapping[str, SessionFacts], activity: Activity | None = None) -> None:
        """Create an empty report; `sessions` are the facts by UUID. With `activity`, it groups changes by turn."""
        self._facts = sessions
        self._sessions: dict[str, _Session] = {}
        self._trees: dict[str, _Node] = {}
        """Changed paths, by source."""
        self._refusals: dict[tuple[str, str, str, str], _Refusal] = {}
        self._failures: dict[tuple[str, str, str], int] = {}
        self._alerts: list[AuditEntry] = []
        self._behind: list[AuditEntry] = []
        self._unfinished: list[AuditEntry] = []
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._activity: Final = activity
        self._turns: Final[dict[str, list[Turn]]] = {}
        for turn in () if activity is None else activity.turns():
            self._turns.setdefault(turn.session, []).append(turn)
        self._calls: Final[dict[str, list[ToolCall]]] = {}
        for call in () if activity is None else activity.calls():
            self._calls.setdefault(call.session, []).append(call)
        self._turn_sums: Final[dict[str, _TurnSum]] = {}
        self._commands: Final[dict[tuple[str, int], str]] = {}

    def add(self, changes: Iterable[RecordedChange]) -> None:
        """Add changes in the order of time."""
        for change in changes:
            self._add(change)

    def document(self) -> dict[str, Any]:
        """Return plain data for JSON. `more` counts the items that each list omits."""
        changed = list(self._changed())
        refused = sorted(self._refusals.items(), key=lambda item: -item[1].times)
        lists: dict[str, list[dict[str, Any]]] = {
            "changed": changed,
            "turns": [_turn_document(each) for each in self._turn_sums.values()],
            "refused": [_refused(key, refusal) for key, refusal in refused],
            "failed": [
                {"operation": operation, "path": path, "reason": reason, "times": times}
                for (operation, path, reason), times in self._failures.items()
            ],
            "alerts": [_with_what(entry) for entry in self._alerts],
            "out_of_band": [_with_what(entry) for entry in self._behind if entry.path],
            "unfinished": [_noticed(entry) for entry in self._unfinished],
        }
        return {
            "sessions": [self._session(name, session) for name, session in self._sessions.items()],
            "totals": {**self._counts, "paths": len(changed)},
            "top_denied_rules": self._top_rules(),
            **{name: found[:MOST] for name, found in lists.items()},
            "more": {name: len(found) - MOST for name, found in lists.items() if len(found) > MOST},
        }

    def markdown(self) -> str:
        """Return Markdown for a pull request."""
        return _markdown(self.document())

    def _add(self, change: RecordedChange) -> None:
        entry, counts = change.entry, self._counts
        self._note_session(entry)
        if entry.operation == UNREADABLE:
            counts["unreadable"] += 1
        elif entry.operation == OUT_OF_BAND and entry.kind == "event":
            self._behind.append(entry)
            more = entry.details.get("more")
            counts["out_of_band"] += more if type(more) is int else 1
        elif entry.kind == "alert":
            counts["alerts"] += 1
            self._alerts.append(entry)
            if entry.operation == OUT_OF_BAND:
                self._drop_event_of(entry)
        elif entry.result == "denied":
            self._refuse(entry)
            self._add_to_turn(change)
        else:
            if change.result == "error":
                self._fail(change)
            self._add_made(change)

    def _fail(self, change: RecordedChange) -> None:
        entry = change.entry
        self._counts["failed"] += 1
        key = (entry.operation, entry.path, (change.outcome or entry).reason or "")
        self._failures[key] = self._failures.get(key, 0) + 1

    def _add_made(self, change: RecordedChange) -> None:
        entry, counts = change.entry, self._counts
        if entry.kind == "intent" and is_effective(change.outcome or entry):
            counts["changes"] += _made(change)
            if change.outcome is None:
                counts["unfinished"] += 1
                self._unfinished.append(entry)
            self._change(change)
            self._add_to_turn(change)

    def _drop_event_of(self, alert: AuditEntry) -> None:
        """Remove the event before an alert: an external change of a protected path counts as an alert only."""
        for number in range(len(self._behind) - 1, -1, -1):
            event = self._behind[number]
            if event.session == alert.session:
                if (event.seq, event.path) == (alert.seq - 1, alert.path):
                    del self._behind[number]
                    self._counts["out_of_band"] -= 1
                return

    def _note_session(self, entry: AuditEntry) -> None:
        moment = instant(entry.timestamp)
        session = self._sessions.setdefault(entry.session, _Session(entry.agent, entry.agent_id, moment, moment))
        session.last = moment

    def _refuse(self, entry: AuditEntry) -> None:
        count = entry.details.get("count")
        times = count if type(count) is int else 1
        self._counts["refused"] += times
        key = (entry.code or "", entry.rule, entry.reason or "", str(entry.details.get("instead", "")))
        refusal = self._refusals.setdefault(key, _Refusal(key[2], key[3]))
        refusal.times += times
        refusal.paths.setdefault(entry.path)

    def _add_to_turn(self, change: RecordedChange) -> None:
        if self._activity is None:
            return
        entry = change.entry
        turns = self._turns.get(entry.session, [])
        number = bisect_right(turns, entry.seq, key=lambda turn: turn.seq)
        turn = turns[number - 1] if number else Turn(entry.session, 0, "", "")
        found = self._turn_sums.setdefault(turn.id, _TurnSum(turn))
        count = entry.details.get("count")
        refused = 0 if entry.result != "denied" else count if type(count) is int else 1
        made = 0 if refused else _made(change)
        found.refused += refused
        found.changes += made
        self._add_to_calls(found, entry, made, refused)
        if refused:
            return
        process = entry.details.get(PROCESS)
        key = entry.session, process if type(process) is int else 0
        if key not in self._commands:
            self._commands[key] = self._activity.command(*key) if key[1] else ""
        command = self._commands[key] or entry.tool or "unknown"
        found.commands[command] = found.commands.get(command, 0) + made

    def _add_to_calls(self, turn: _TurnSum, entry: AuditEntry, changes: int, refused: int) -> None:
        calls = self._calls.get(entry.session, [])
        number = bisect_right(calls, entry.seq, key=lambda call: call.seq)
        latest = calls[max(0, number - _MOST_RUNNING) : number]
        running = [call for call in latest if not call.end or entry.seq < call.end]
        for call in running:
            sums = turn.calls.setdefault(call.seq, _CallSum(call))
            sums.changes += changes
            sums.refused += refused
            sums.shared += changes + refused if len(running) > 1 else 0

    def _change(self, change: RecordedChange) -> None:
        entry = change.entry
        if entry.guard != "file":
            return  # the path of an issue or of a git command is not that of a file
        # The changes of a session with unknown source stay separate.
        source = self._facts.get(entry.session, SessionFacts()).source or f"session {entry.session}"
        tree = self._trees.setdefault(source, _Node())
        other = entry.details.get("to")
        if entry.operation == Operation.RENAME and isinstance(other, str):
            self._rename(tree, entry, other)
            return
        held = entry.details.get("from") if entry.operation == Operation.RENAME else None
        node = tree.reach(entry.path)
        node.changes += 1
        node.written += (change.outcome or entry).bytes
        if isinstance(held, str):
            # The program wrote a staged file, and renamed it into the source.
            before = tree.take(held)
            node.written += before.written if before is not None else 0
        node.layer = bool(entry.details.get(LAYER))
        if node.layer:
            self._counts["apart"] += _made(change)
        if entry.action == "create":
            node.what = "modified" if node.what == "deleted" else "created"
        elif entry.action == "delete":
            if node.was:
                before = tree.reach(node.was)
                before.what = "modified" if before.what == "created" else "deleted"
            node.what = "" if node.was or node.what == "created" else "deleted"
            node.was = ""
        elif node.what not in ("created", "renamed"):
            node.what = "modified"

    def _rename(self, tree: _Node, entry: AuditEntry, other: str) -> None:
        if entry.details.get("exchange"):
            for path in (entry.path, other):
                node = tree.reach(path)
                node.changes += 1
                node.what = node.what or "modified"
            return
        moved = tree.take(entry.path) or _Node()
        replaced = tree.reach(other)
        was_there = replaced.what in ("modified", "deleted", "renamed")
        # Without an earlier entry of the new name, the details say whether the source had a file there.
        was_there |= replaced.what != "created" and bool(entry.details.get(REPLACES))
        moved.changes += 1 + replaced.changes
        if moved.what == "created":
            # The program wrote a new file and renamed it over the old one, or to a new name.
            moved.what = "modified" if was_there else "created"
        elif moved.was == other:
            moved.what, moved.was = "modified" if moved.written else "", ""
        else:
            moved.what, moved.was = "renamed", moved.was or entry.path
        moved.layer = bool(entry.details.get(LAYER))
        tree.put(other, moved)

    def _changed(self) -> Iterator[dict[str, Any]]:
        for source, tree in sorted(self._trees.items()):
            for path, node in tree.walk():
                if node.what and not node.layer:
                    yield {
                        "source": source,
                        "path": path,
                        "what": node.what,
                        "was": node.was or None,
                        "changes": node.changes,
                        "bytes": node.written,
                    }

    def _session(self, name: str, session: _Session) -> dict[str, Any]:
        return {
            "session": name,
            "agent": session.agent,
            "agent_id": session.agent_id,
            "first": session.first,
            "last": session.last,
            **self._facts.get(name, SessionFacts())._asdict(),
        }

    def _top_rules(self) -> list[dict[str, Any]]:
        rules: dict[tuple[str, str], int] = {}
        for (code, rule, _, _), refusal in self._refusals.items():
            rules[rule, code] = rules.get((rule, code), 0) + refusal.times
        top = sorted(rules.items(), key=lambda item: (-item[1], item[0]))
        return [{"rule": rule, "code": code, "times": times} for (rule, code), times in top[:10]]


def _turn_document(found: _TurnSum) -> dict[str, Any]:
    commands = sorted(found.commands.items(), key=lambda item: -item[1])
    turn = found.turn
    return {
        "turn": turn.id,
        "session": turn.session,
        "name": turn.name,
        "by": turn.by,
        "changes": found.changes,
        "refused": found.refused,
        "commands": [{"command": command, "changes": changes} for command, changes in commands[:MOST]],
        "more_commands": max(0, len(commands) - MOST),
        "calls": [_call_document(each) for each in list(found.calls.values())[:MOST]],
        "more_calls": max(0, len(found.calls) - MOST),
    }


def _call_document(found: _CallSum) -> dict[str, Any]:
    call = found.call
    claims = {"call": call.id, "tool": call.tool, "agent_session": call.agent_session, "subagent": call.subagent}
    return {**claims, "changes": found.changes, "refused": found.refused, "shared": found.shared}


def _made(change: RecordedChange) -> int:
    """Return the number of changes of an intent: 1, or the sum of a scratch counter."""
    counts = change.outcome.details.get(COUNTS) if change.outcome is not None else None
    if not isinstance(counts, dict):
        return 1
    return sum(number for key, number in counts.items() if key != "failed" and type(number) is int)


def _refused(key: tuple[str, str, str, str], refusal: _Refusal) -> dict[str, Any]:
    code, rule, reason, instead = key
    paths = list(refusal.paths)
    return {
        "code": code,
        "rule": rule,
        "reason": reason,
        "instead": instead,
        "times": refusal.times,
        "paths": paths[:MOST],
        "more_paths": max(0, len(paths) - MOST),
    }


def _noticed(entry: AuditEntry) -> dict[str, Any]:
    return {
        "timestamp": instant(entry.timestamp),
        "session": entry.session,
        "seq": entry.seq,
        "agent": entry.agent,
        "operation": entry.operation,
        "path": entry.path,
        "code": entry.code,
        "reason": entry.reason,
    }


def _with_what(entry: AuditEntry) -> dict[str, Any]:
    return {**_noticed(entry), "what": str(entry.details.get("what", ""))}


EXAMPLES: Final = 5
"""Maximum number of agents in the title, and of paths of a denial."""
LONGEST: Final = 300
"""Maximum number of characters of a name. A longer name is shortened in its middle."""

_CALLS: Final = re.compile(r"[@#&]|://|www\.", re.IGNORECASE)
"""Text that GitHub and similar sites turn into a link or a mention in spite of a backslash."""


def _markdown(document: dict[str, Any]) -> str:
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


def _turn_line(item: dict[str, Any]) -> str:
    name = _code(item["name"]) if item["name"] else {"pause": "after a pause"}.get(item["by"], "without a name")
    line = f"- {_code(item['turn'])} {name}: {_many(item['changes'], 'change')}, {item['refused']} refused"
    made = [f"{_code(each['command'])} ({each['changes']})" for each in item["commands"][:EXAMPLES]]
    left = len(item["commands"]) + item["more_commands"] - len(made)
    if made:
        line += f"\n  - by {', '.join(made)}{f' and {left} more' if left > 0 else ''}"
    calls = [f"{_code(each['tool'])} {_code(each['call'])} ({_during(each)})" for each in item["calls"][:EXAMPLES]]
    left = len(item["calls"]) + item["more_calls"] - len(calls)
    if calls:
        more = f" and {left} more" if left > 0 else ""
        line += f"\n  - during tool calls, as the client claims: {', '.join(calls)}{more}"
    return line


def _during(call: dict[str, Any]) -> str:
    shared = f", {call['shared']} of them during other calls too" if call["shared"] else ""
    return f"{_many(call['changes'], 'change')}, {call['refused']} refused{shared}"


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
        17_000,
        _changed_line,
        heading=("| path | what | changes | bytes written |", "|---|---|---:|---:|"),
        of_each="source",
    ),
    "turns": _Section("Turns", 5_000, _turn_line),
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
