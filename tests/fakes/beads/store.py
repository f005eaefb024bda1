"""The database: one JSON file that is replaced as a whole, behind a lock that everybody waits for without end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .answers import Failed
from .workspace import Workspace, database_name

Issue = dict[str, Any]
Edge = dict[str, Any]
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
ORDERING = frozenset({"blocks", "conditional-blocks"})
"""The only edges along which a cycle is looked for, and by which an issue is blocked at closing."""

UNINITIALIZED = "database not initialized: issue_prefix config is missing"
"""Why nothing is created where there is no prefix. What only reads finds nothing, and is content."""


def now(*, exact: bool = False) -> str:
    """A time as `create` prints it (exact) and as it is stored: rounded to whole seconds, up or down."""
    moment = datetime.now(timezone.utc)  # noqa: UP017 - an older Python may run this
    if exact:
        return moment.strftime("%Y-%m-%dT%H:%M:%S.%f") + "123Z"
    return datetime.fromtimestamp(round(moment.timestamp()), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: UP017


def random_uuid() -> str:
    digits = os.urandom(16).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


class Store:
    """The issues and edges of one workspace, for the time of one call, which has them to itself."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        directory = workspace.database
        noms = directory / ".dolt" / "noms"
        noms.mkdir(parents=True, exist_ok=True)
        self._lock = _wait(noms / "LOCK")
        self._file = directory / "state.json"
        self._state: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else _empty("")

    @staticmethod
    def make(workspace: Workspace, prefix: str) -> None:
        workspace.database.mkdir(parents=True)
        _replace(workspace.database / "state.json", _empty(prefix))

    @property
    def prefix(self) -> str:
        """The prefix of all ids; "" in a database without init, which a call has created."""
        return str(self._state["prefix"])

    @staticmethod
    def prefix_at(path: Path) -> str:
        """The prefix of the database in that directory. It is read without the lock."""
        file = Workspace(path, None, database_name(path)).database / "state.json"
        return str(json.loads(file.read_text())["prefix"]) if file.exists() else ""

    @property
    def config(self) -> dict[str, str]:
        found: dict[str, str] = self._state["config"]
        return found

    @property
    def issues(self) -> dict[str, Issue]:
        found: dict[str, Issue] = self._state["issues"]
        return found

    @property
    def edges(self) -> list[Edge]:
        found: list[Edge] = self._state["edges"]
        return found

    @property
    def comments(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self._state["comments"]
        return found

    def save(self) -> None:
        """Write all changes of this call together. A SIGTERM from now on does not make the call fail."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _replace(self._file, self._state)

    def custom_statuses(self) -> list[str]:
        # What has been said once stays: unsetting the key does not take a status away.
        return [word.partition(":")[0] for word in self._state["statuses"]]

    def add_statuses(self, words: str) -> None:
        self._state["statuses"] += [word.strip() for word in words.split(",") if word.strip()]

    def is_empty(self) -> bool:
        return not self.issues

    def resolve(self, word: str) -> str | None:
        """The full id that an abbreviation means; None: there is none. Failed where it could be several."""
        if word in self.issues:
            return word
        hashes = {id_: id_[len(self.prefix) + 1 :] for id_ in self.issues}
        word = word.removeprefix(f"{self.prefix}-")
        exact = [id_ for id_, tail in hashes.items() if tail == word]
        found = exact or [id_ for id_, tail in hashes.items() if word and word in tail]
        if len(found) > 1:
            raise Failed(f"ambiguous ID {word!r} matches: {', '.join(sorted(found))}")
        return found[0] if found else None

    def new_id(self, parent: str, *, wisp: bool) -> str:
        if parent:
            taken = [id_.rpartition(".")[2] for id_ in self.issues if id_.rpartition(".")[0] == parent]
            return f"{parent}.{max(map(int, filter(str.isdigit, taken)), default=0) + 1}"
        start = f"{self.prefix}-wisp-" if wisp else f"{self.prefix}-"
        while True:
            number = int.from_bytes(os.urandom(4), "big") % 36**3
            tail = "".join(DIGITS[number // 36**place % 36] for place in range(3))
            if start + tail not in self.issues:
                return start + tail

    def is_closed(self, id_: str) -> bool:
        return id_ not in self.issues or self.issues[id_]["status"] == "closed"

    def blockers(self, id_: str) -> list[str]:
        """Those that are not closed."""
        ends = [edge["depends_on_id"] for edge in self.edges if edge["issue_id"] == id_ and edge["type"] in ORDERING]
        return [end for end in ends if not self.is_closed(end)]

    def children(self, id_: str) -> list[str]:
        return [e["issue_id"] for e in self.edges if e["depends_on_id"] == id_ and e["type"] == "parent-child"]

    def parents(self, id_: str) -> list[str]:
        return [e["depends_on_id"] for e in self.edges if e["issue_id"] == id_ and e["type"] == "parent-child"]


def _empty(prefix: str) -> dict[str, Any]:
    return {"prefix": prefix, "config": {}, "statuses": [], "issues": {}, "edges": [], "comments": []}


def _replace(path: Path, state: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(state))
    temporary.rename(path)


def _wait(path: Path) -> int:
    """Wait for the lock without limit. On SIGTERM print that the database is locked."""

    def told_to_end(*_: object) -> None:
        raise Failed("opening the database: the database is locked by another dolt process", "stderr")

    with_lock: Callable[..., Any] = signal.getsignal(signal.SIGTERM)  # type: ignore[assignment] # main has set it
    signal.signal(signal.SIGTERM, told_to_end)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    signal.signal(signal.SIGTERM, with_lock)
    return lock
