"""A report of sessions as plain data: the changed paths, the denials, the failures and the alerts.

The report has the final result of many changes: a file that was created and removed is not in it, and a file that was
created and renamed counts as created. Equal denials are one line with their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import COUNTS, LAYER, REPLACES, AuditEntry, instant
from bonobofs.audit.path_history import PathNode
from bonobofs.audit.reader import UNREADABLE, RecordedChange
from bonobofs.audit.recovery import OUT_OF_BAND
from bonobofs.audit.report_markdown import render
from bonobofs.policy.request import Operation

MOST: Final = 500
"""Maximum number of items of each list. Further items are counted."""

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

    def __init__(self, sessions: Mapping[str, SessionFacts]) -> None:
        """Create an empty report; `sessions` are the facts by UUID."""
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
        return render(self.document())

    def _add(self, change: RecordedChange) -> None:
        entry, counts = change.entry, self._counts
        self._meet(entry)
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
        elif change.result == "error":
            counts["failed"] += 1
            reason = (change.outcome or entry).reason or ""
            key = (entry.operation, entry.path, reason)
            self._failures[key] = self._failures.get(key, 0) + 1
        elif entry.kind == "intent":
            counts["changes"] += _made(change)
            if change.outcome is None:
                counts["unfinished"] += 1
                self._unfinished.append(entry)
            self._change(change)

    def _drop_event_of(self, alert: AuditEntry) -> None:
        """Remove the event before an alert: an external change of a protected path counts as an alert only."""
        for number in range(len(self._behind) - 1, -1, -1):
            event = self._behind[number]
            if event.session == alert.session:
                if (event.seq, event.path) == (alert.seq - 1, alert.path):
                    del self._behind[number]
                    self._counts["out_of_band"] -= 1
                return

    def _meet(self, entry: AuditEntry) -> None:
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
