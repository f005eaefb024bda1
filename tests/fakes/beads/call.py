"""One call of bd: its arguments, its workspace, and its output."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from typing import Any

from .answers import Answers, Failed
from .store import ORDERING, Edge, Issue, Store
from .workspace import Person, Workspace, is_true, setting


class Call:
    """What every command is given."""

    def __init__(
        self, arguments: list[str], flags: dict[str, Any], answers: Answers, workspace: Workspace, person: Person
    ) -> None:
        self.arguments = arguments
        self.flags = flags
        self.answers = answers
        self.workspace = workspace
        self.person = person
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """Opened at the first use. From then on this call has the lock."""
        if self._store is None:
            self._store = Store(self.workspace)
        return self._store

    def id_of(self, word: str, where: str = "text") -> str:
        """The full id; Failed when there is no such issue."""
        found = self.store.resolve(word)
        if found is None:
            raise Failed(f"no issue found matching {word!r}", where)
        return found

    def ids(self) -> list[str]:
        """The issues that are named; if none is, the one that was touched last."""
        if self.arguments:
            return self.arguments
        try:
            return [(self.workspace.path / "last-touched").read_text().strip()]
        except OSError:
            raise Failed("no issue ID provided and no last touched issue") from None

    def changed(self, id_: str, event: str) -> None:
        """Store what this call has done so far, note the issue as touched, and start the workspace's own program."""
        self.store.save()
        (self.workspace.path / "last-touched").write_text(id_ + "\n")
        hook = self.workspace.path / "hooks" / f"on_{event}"
        if is_true(setting("no-hooks", self.workspace.path)) or not os.access(hook, os.X_OK):
            return
        quiet = subprocess.DEVNULL
        started = subprocess.Popen([hook, id_, event], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
        assert started.stdin is not None
        started.stdin.write(json.dumps(self.shown(id_)).encode())
        started.stdin.close()
        started.returncode = 0  # it is not waited for, and its end does not matter

    def shown(self, id_: str) -> Issue:
        """An issue as bd prints it: keys with empty values are left out."""
        return {key: value for key, value in self.store.issues[id_].items() if value or key == "priority"}

    def counted(self, ids: list[str]) -> list[Issue]:
        """Issues as list and ready print them: with edge records, and counting only what blocks."""
        of: dict[str, list[Edge]] = {}
        for edge in self.store.edges:
            of.setdefault(edge["issue_id"], []).append(edge)
        on = Counter(edge["depends_on_id"] for edge in self.store.edges if edge["type"] in ORDERING)
        parents = {e["issue_id"]: e["depends_on_id"] for e in reversed(self.store.edges) if e["type"] == "parent-child"}
        comments = Counter(comment["issue_id"] for comment in self.store.comments)
        return [
            {
                **self.shown(id_),
                **({"dependencies": of[id_]} if id_ in of else {}),
                **({"parent": parents[id_]} if id_ in parents else {}),
                "dependent_count": on[id_],
                "dependency_count": sum(edge["type"] in ORDERING for edge in of.get(id_, ())),
                "comment_count": comments[id_],
            }
            for id_ in ids
        ]

    def edges_of(self, id_: str) -> list[Edge]:
        return [edge for edge in self.store.edges if edge["issue_id"] == id_]

    def counts(self, id_: str) -> dict[str, int]:
        on = sum(edge["depends_on_id"] == id_ for edge in self.store.edges)
        comments = sum(comment["issue_id"] == id_ for comment in self.store.comments)
        return {"dependent_count": on, "dependency_count": len(self.edges_of(id_)), "comment_count": comments}
