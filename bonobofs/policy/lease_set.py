"""A lease snapshot for the engine: plain data with all patterns in one automaton.

Only the holder of an exclusive lease may change its paths. Only holders of shared leases may change their paths. If the
leases are unknown, the engine denies every change of the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from bonobofs.policy.decision import Holding
from bonobofs.policy.pattern import Matcher, parse


class LeaseMatch(NamedTuple):
    """One lease that matches."""

    holding: Holding
    shared: bool
    own: bool
    """This session holds the lease."""


class LeaseSet(NamedTuple):
    """The leases from the view of one session."""

    matcher: Matcher[LeaseMatch]
    known: bool = True

    def held_by_other(self, components: Sequence[str]) -> Holding | None:
        """Return the lease of another holder that denies this session a path, or None."""
        return None if self.matcher.is_empty else _held(self.matcher.find(components))

    def held_below(self, components: Sequence[str]) -> Holding | None:
        """Return the lease of another holder on paths below a directory that its pattern names, or None."""
        return _held(self.matcher.find_below(components))

    def owns(self, components: Sequence[str]) -> bool:
        """True if a lease of this session covers the path."""
        return any(one.own for one in self.matcher.find(components))


def _held(found: Sequence[LeaseMatch]) -> Holding | None:
    """Return the lease of another holder among those of a path, or None if the session may change the path."""
    # If the session has an exclusive lease, no other holder has a lease of the path. Its own shared lease permits
    # changes although other holders have shared leases too.
    own = any(one.own for one in found)
    return next((one.holding for one in found if not one.own and not (own and one.shared)), None)


def compile_leases(documents: Iterable[Mapping[str, Any]]) -> LeaseSet:
    """Compile leases. Each has `patterns`, `shared`, `own`, `holder` (a label), `chain` (or None) and `until`.

    `holder_id`, the UUID of the holder, is optional.
    """
    return LeaseSet(
        Matcher(
            (
                parse(pattern),
                LeaseMatch(
                    Holding(each["holder"], each["chain"], each["until"], each.get("holder_id")),
                    bool(each["shared"]),
                    bool(each["own"]),
                ),
            )
            for each in documents
            for pattern in each["patterns"]
        )
    )


UNKNOWN: Final = LeaseSet(Matcher(()), known=False)
"""The snapshot without knowledge of the leases. With it the engine denies every change of the source."""
