"""What is reserved at Agent Mail, mirrored into leases: each under its origin, beside what was acquired here."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, delete, literal, select, update

from bonobofs.errors import UsageError
from bonobofs.state import heartbeats
from bonobofs.state.database import Database
from bonobofs.state.leases import (
    Conflict,
    Holder,
    Lease,
    Overlap,
    Wanted,
    check,
    enter,
    line,
    living,
    unless_others_hold_it,
)
from bonobofs.state.schema import agents, leases
from bonobofs.state.sql_types import clock, milliseconds_of


def mirror(database: Database, wanted: Wanted, overlap: Overlap, *, until: datetime) -> Conflict | None:
    """Grant what was reserved elsewhere, until its end there, under its `origin`; else the conflict, nothing changed.

    Done again with the same content it changes nothing, nor where that end is over by the database's clock.
    """
    if not wanted.origin:
        raise UsageError("what is mirrored has an origin")
    check(wanted)
    ends = milliseconds_of(until)
    with database.read() as connection:
        known = next(iter(living(connection, leases.c.origin == wanted.origin)), None)
    if known is not None and _is_the_same(known, wanted):
        if milliseconds_of(known.until) != ends:
            with database.change() as connection:
                connection.execute(update(leases).where(leases.c.id == known.id).values(until=ends))
                heartbeats.next_generation(connection)
        return None

    def grant(connection: Connection) -> None:
        if ends <= connection.execute(select(clock())).scalar_one():
            return
        connection.execute(delete(leases).where(leases.c.origin == wanted.origin))
        enter(connection, wanted, literal(ends))

    return unless_others_hold_it(database, wanted, overlap, grant)


def unmirror(database: Database, origin: str) -> bool:
    """End what was mirrored from there; whether there was anything."""
    with database.change() as connection:
        gone = connection.execute(delete(leases).where(leases.c.origin == origin, leases.c.origin != "")).rowcount
        if gone:
            heartbeats.next_generation(connection)
        return gone > 0


def mirrored(database: Database, prefix: str) -> dict[str, Lease]:
    """What is mirrored from origins that begin so, by origin."""
    with database.read() as connection:
        found = living(connection, leases.c.origin != "", leases.c.origin.startswith(prefix, autoescape=True))
    return {lease.origin: lease for lease in found}


def holder_of_mail(database: Database, name: str, source: str) -> Holder:
    """Who an agent of Agent Mail is here: the living agent whose label it is, as it is written there, else nobody's.

    Agent Mail keeps letters and digits only, or a few signs more, and case does not count. An agent that works in the
    source for a chain holds by the chain: what it has reserved must not keep itself out.
    """
    with database.read() as connection:
        rows = connection.execute(select(agents.c.name, agents.c.id).where(agents.c.removed.is_(None))).all()
        found = [(label, identity) for label, identity in rows if label == name]
        found = found or [(label, identity) for label, identity in rows if _as_mailed(label) == _as_mailed(name)]
        if len(found) != 1:
            return Holder(line(name), None)
        ((label, identity),) = found
        chains = heartbeats.chains(connection, identity, source)
    return Holder(label, identity, chains[0] if len(chains) == 1 else None)


def _as_mailed(label: str) -> str:
    return "".join(character for character in label.casefold() if character.isalnum())


def _is_the_same(lease: Lease, wanted: Wanted) -> bool:
    as_wanted = (wanted.holder.key, set(wanted.patterns), wanted.shared, wanted.workspace)
    return (lease.holder.key, set(lease.patterns), lease.shared, lease.workspace) == as_wanted
