"""The log of a state directory as Python callers see it: the last entries of all sessions, and of one agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import last, trails_in
from bonobofs.audit.writer import Trail
from bonobofs.errors import TrailError

MOST: Final = 1000
"""The largest number of entries that one call gives."""


class Record:
    """The trails of one state directory, read at their ends."""

    def __init__(self, trails: Path, resolve: Callable[[str], str | None] | None = None) -> None:
        """`resolve` gives the UUID of the living agent of a label, None if there is none."""
        self._trails: Final = trails
        self._resolve: Final = resolve

    def recent(self, limit: int = 50) -> list[AuditEntry]:
        """Give the last entries of all sessions, at most `limit` and at most 1000, oldest first. TrailError."""
        return self._last(min(limit, MOST), lambda _: True)

    def filter_by_agent(self, agent: str) -> list[AuditEntry]:
        """Give the last entries of `agent`, a UUID or the label of a living agent, over all sessions, oldest first.

        At most 1000 entries; of each session its last 1000 are searched. TrailError.
        """
        identity = self._resolve(agent) if self._resolve is not None else None

        def is_of_agent(entry: AuditEntry) -> bool:
            return entry.agent_id in (agent, identity) or (self._resolve is None and entry.agent == agent)

        return self._last(MOST, is_of_agent, looked_at=MOST)

    def _last(self, limit: int, wanted: Callable[[AuditEntry], bool], looked_at: int = 0) -> list[AuditEntry]:
        found: list[AuditEntry] = []
        for written, trail in self._newest_first():
            if limit <= 0 or (len(found) == limit and written < found[0].timestamp.timestamp()):
                break  # this trail and those after it end before the oldest entry found
            entries = [entry for entry in last(trail, looked_at or limit) if wanted(entry)]
            found = sorted([*found, *entries], key=lambda entry: entry.timestamp)[-limit:]
        return found

    def _newest_first(self) -> Iterator[tuple[float, Path]]:
        yield from sorted(((trail.stat().st_mtime, trail) for trail in trails_in(self._trails)), reverse=True)


class AuditLog(Record):
    """Append-only log of all privileged operations."""

    def __init__(self, trail: Trail, resolve: Callable[[str], str | None] | None = None) -> None:
        """Append to `trail`, which lies beside the trails of the other sessions; `resolve` as for `Record`."""
        super().__init__(trail.path.parent, resolve)
        self._trail: Final = trail

    def log(self, entry: AuditEntry) -> None:
        """Append an entry; its session, place and hashes become the trail's. TrailError: it was not appended."""
        self._trail.enter(entry)

    def _last(self, limit: int, wanted: Callable[[AuditEntry], bool], looked_at: int = 0) -> list[AuditEntry]:
        # What cannot be written now stays queued; reading goes on without it.
        with suppress(TrailError):
            self._trail.flush()
        return super()._last(limit, wanted, looked_at)
