"""Leases as the engine knows them: plain data about who holds what, in one automaton.

A path that matches an exclusive lease is its holder's. Where shared leases match, it is their holders', nobody else's.
Where it is not known who holds what, every path may be somebody else's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from bonobofs.policy.decision import Holding
from bonobofs.policy.pattern import Matcher, parse


class Held(NamedTuple):
    """One lease that matches."""

    holding: Holding
    shared: bool
    own: bool
    """It is held by whoever this is known for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leases:
    """Who holds what, as one session knows it."""

    held: Matcher[Held]
    known: bool = True

    def against(self, parts: Sequence[str]) -> Holding | None:
        """Somebody else's hold on a path that keeps this session out; None where nothing does."""
        others, own = [], False
        for one in self.held.find(parts):
            if one.own:
                own = True
            else:
                others.append(one)
        # An own exclusive lease and somebody else's on one path cannot be; an own shared one lets in beside theirs.
        stop = next((one for one in others if not (own and one.shared)), None)
        return None if stop is None else stop.holding

    def owns(self, parts: Sequence[str]) -> bool:
        """Whether a lease of this session's own holder covers the path."""
        return any(one.own for one in self.held.find(parts))


def compile_leases(documents: Iterable[Mapping[str, Any]]) -> Leases:
    """Make leases ready. Each has `patterns`, `shared`, `own`, `holder` (a label), `chain` or None, and `until`.

    `holder_id` is the UUID that goes with the label, where there is one.
    """
    return Leases(
        Matcher(
            (
                parse(pattern),
                Held(
                    Holding(each["holder"], each["chain"], each["until"], each.get("holder_id")),
                    bool(each["shared"]),
                    bool(each["own"]),
                ),
            )
            for each in documents
            for pattern in each["patterns"]
        )
    )


UNKNOWN: Final = Leases(Matcher(()), known=False)
"""Nothing is known of any lease."""
