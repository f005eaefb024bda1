"""Reservations of Agent Mail as leases: what is advice there binds here.

What is reserved there is a lease here within seconds, and so is its end. A reservation that overlaps with somebody
else's lease is no lease: it is told to the thread, once, and tried again. While the server cannot be asked, what was
mirrored lasts until it ends by itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from bonobofs.audit.agent_mail.mailbox import Mailbox, Reservation
from bonobofs.daemon.parts import GoesOn, Part
from bonobofs.errors import MailError, PolicyError, UsageError
from bonobofs.policy.overlap import patterns_meet
from bonobofs.policy.pattern import parse
from bonobofs.session.mail import Settings, open_mailbox, settings_of
from bonobofs.state import leases, reservations
from bonobofs.state.database import Database, home_id
from bonobofs.state.sessions import Session, lives, load


class Mirroring(Part):
    """Mirrors the reservations of the projects whose policies ask for it, while a session works there."""

    name = "reservations"
    pause = 2.0

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._database: Database | None = None
        self._ended: set[str] = set()
        self._mailboxes: dict[Settings, Mailbox] = {}
        self._told: set[str] = set()
        """Origins of reservations whose conflict is in the thread."""

    def step(self, goes_on: GoesOn) -> str:
        if self._database is None:
            self._database = self._open.enter_context(Database.open(self._home))
        mine = home_id(self._home)
        wanted: dict[tuple[Settings, str], None] = {}
        for session in self._living():
            settings = settings_of(self._home, mine, session)
            if settings is not None and settings.mirrors:
                wanted[settings, session.source] = None
        problems = []
        for settings, source in wanted:
            if goes_on():
                try:
                    problems += self._mirror(self._database, settings, source)
                except MailError as error:
                    problems.append(str(error))
        return "; ".join(problems)

    def close(self) -> None:
        super().close()
        self._database = None

    def _living(self) -> list[Session]:
        found = []
        for name in os.listdir(self._home / "sessions"):
            session = None if name in self._ended else load(self._home, name)
            if session is not None and session.ended is not None:
                self._ended.add(name)
            elif session is not None and lives(session):
                found.append(session)
        return found

    def _mirror(self, database: Database, settings: Settings, source: str) -> list[str]:
        """Make the leases of one source what the reservations are, and say which could not be."""
        if settings not in self._mailboxes:
            self._mailboxes[settings] = open_mailbox(self._home, settings)
        mailbox = self._mailboxes[settings]
        prefix = f"agent_mail:{settings.address.url} {settings.address.project} {source} "
        reserved = {f"{prefix}{one.id}": one for one in mailbox.reservations()}
        for origin in reservations.mirrored(database, prefix).keys() - reserved.keys():
            reservations.unmirror(database, origin)
        problems = []
        for origin, reservation in reserved.items():
            problem = _enter(database, reservation, origin, source)
            if not problem:
                self._told.discard(origin)
                continue
            problems.append(f"{reservation.pattern}, reserved by {reservation.agent}, is no lease: {problem}")
            if origin not in self._told:
                subject = f"alert: {reservation.agent}'s reservation {reservation.id} is no lease"
                mailbox.send(subject, _body(reservation, problem), "urgent")
                self._told.add(origin)
        return problems


class Expiring(Part):
    """Takes away the leases that have ended."""

    name = "leases"
    pause = 30.0

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._database: Database | None = None

    def step(self, _: GoesOn) -> str:
        if self._database is None:
            self._database = self._open.enter_context(Database.open(self._home))
        leases.expire(self._database)
        return ""

    def close(self) -> None:
        super().close()
        self._database = None


_BODY: Final = """Nobody is held to this reservation, because it cannot be a lease of bonobofs.

~~~text
{pattern}
{problem}
~~~

It is tried again until it is released or expires. Wait for the lease to end, or reserve something else.
"""


def _enter(database: Database, reservation: Reservation, origin: str, source: str) -> str:
    """Mirror one reservation; "" when that is done, else why it cannot be."""
    pattern = reservation.pattern.removeprefix(f"{source}/").removeprefix("./")
    try:
        parse(pattern)
        conflict = reservations.mirror(
            database,
            leases.Wanted(
                reservations.holder_of_mail(database, reservation.agent),
                (pattern,),
                shared=not reservation.exclusive,
                reason=reservation.reason,
                workspace=source,
                origin=origin,
            ),
            patterns_meet,
            until=reservation.expires,
        )
    except (PolicyError, UsageError) as error:
        return str(error)
    return "" if conflict is None else str(conflict)


def _body(reservation: Reservation, problem: str) -> str:
    lines = [" ".join(text.split()) for text in (reservation.pattern, problem)]
    return _BODY.format(pattern=lines[0], problem=lines[1])
