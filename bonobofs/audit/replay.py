"""Replay recorded changes: judge what programs tried under another policy than the one of that time.

The trail has no first bytes, owners, links or kinds of a file, so a replayed decision rests on operation, paths, size
and role. Leases, answers and what git tracked are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bonobofs.audit.entry import LAYER, AuditEntry
from bonobofs.policy.compiled import Policy
from bonobofs.policy.decision import Code, Decision, Denied
from bonobofs.policy.engine import OBSERVED, decide, decide_move
from bonobofs.policy.request import CHANGES, Context, Kind, Operation, Principal, Request, WorkspacePath

_KINDS: Final = {
    Operation.MKDIR: Kind.DIRECTORY,
    Operation.RMDIR: Kind.DIRECTORY,
    Operation.SYMLINK: Kind.SYMLINK,
    Operation.MKNOD: Kind.FIFO,
}


class TriedChange(NamedTuple):
    """A change that a program tried, as often as it did. Equal changes are judged equally."""

    role: str
    operation: Operation
    path: str
    to: str
    """The new name of a rename; "" for another change."""


@dataclass(slots=True)
class Occurrences:
    """The attempts of a change, and their context."""

    count: int = 0
    refused: int = 0
    codes: set[str] = field(default_factory=set)
    """Codes of the refusals, also of those that were only observed."""
    size: int = -1
    """Largest size of the file afterwards; -1: unknown."""
    mode: int = -1
    """All permission bits that were set; -1: unknown."""

    def add_mode(self, entry: AuditEntry) -> None:
        """Add the permission bits that an intent or outcome has, if any."""
        mode = entry.details.get("mode")
        if isinstance(mode, str):
            self.mode = max(self.mode, 0) | int(mode, 8)

    @property
    def is_executable(self) -> bool:
        """True if the change made a file executable, by its mode or its first bytes."""
        return Code.EXECUTABLE in self.codes or (self.mode != -1 and self.mode & 0o111 != 0)


class ReplayedChange(NamedTuple):
    """A tried change, and how two policies decide it."""

    change: TriedChange
    seen: Occurrences
    before: Decision
    after: Decision

    @property
    def differs(self) -> bool:
        """True if one policy permits what the other refuses."""
        return isinstance(self.before, Denied) is not isinstance(self.after, Denied)


def tried_changes(
    entries: Iterable[AuditEntry], roles: Mapping[str, str], default_role: str
) -> dict[TriedChange, Occurrences]:
    """Collect the changes of the source that the entries record. `roles` has the role of each session by UUID."""
    found: dict[TriedChange, Occurrences] = {}
    by_path: dict[tuple[str, str], list[Occurrences]] = {}
    for entry in entries:
        if entry.guard != "file" or entry.operation not in CHANGES or LAYER in entry.details:
            continue
        if entry.kind == "outcome":
            size, count = (
                value if isinstance(value := entry.details.get(key), int) else 0 for key in ("size", "count")
            )
            tried = by_path.get((entry.session, entry.path), [])
            for one in tried:
                one.size = max(one.size, size or -1)
                one.add_mode(entry)
            if entry.result == "denied" and tried:  # repetitions of the last refusal of the path
                tried[-1].count += count
                tried[-1].refused += count
        elif entry.kind == "intent":
            to = entry.details.get("to")
            change = TriedChange(
                roles.get(entry.session, default_role),
                Operation(entry.operation),
                entry.path,
                to if isinstance(to, str) else "",
            )
            seen = found.get(change)
            if seen is None:
                seen = found[change] = Occurrences()
                by_path.setdefault((entry.session, entry.path), []).append(seen)
            seen.count += 1
            seen.add_mode(entry)
            seen.refused += entry.result == "denied"
            if entry.code is not None:
                seen.codes.add(entry.code)
            elif entry.rule.startswith(OBSERVED):
                seen.codes.add(entry.rule.split(":")[1])
    return found


def judge(policy: Policy, change: TriedChange, seen: Occurrences) -> Decision:
    """Return the decision of a policy on a tried change."""
    agent = Principal("", "", change.role)
    path, kind = WorkspacePath(change.path), _KINDS.get(change.operation, Kind.FILE)
    context = Context(size=seen.size, mode=0o755 if seen.is_executable else seen.mode)
    if not change.to:
        return decide(policy, agent, Request(change.operation, path, kind), context)
    ends = (
        decide(policy, agent, Request(change.operation, path, kind), Context(leaves=True)),
        decide(policy, agent, Request(change.operation, WorkspacePath(change.to), kind), context),
    )
    return decide_move(change.path, change.operation, ends)


def replay(changes: Mapping[TriedChange, Occurrences], before: Policy, after: Policy) -> list[ReplayedChange]:
    """Judge each change under both policies."""
    return [
        ReplayedChange(change, seen, judge(before, change, seen), judge(after, change, seen))
        for change, seen in changes.items()
    ]
