"""Reservations of Agent Mail as leases: what is advice there binds here.

What is reserved there is a lease here within seconds, and so is its end. A reservation that overlaps with somebody
else's lease is no lease: it is told to the thread, once, and tried again. While the server cannot be asked, what was
mirrored lasts until it ends by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from bonobofs.agent_mail.mail_client import Mailbox, Reservation
from bonobofs.daemon.jobs import GoesOn, Job, Lanes
from bonobofs.errors import MailError, PolicyError, StateError, UsageError
from bonobofs.policy.overlap import patterns_meet
from bonobofs.policy.pattern import is_wild, parse
from bonobofs.session.mail_settings import Settings, open_mailbox, settings_of
from bonobofs.state import leases
from bonobofs.state.database import Database, home_id
from bonobofs.state.sessions import Session, lives, load
from bonobofs.system.terminal import escape


class Mirroring(Job):
    """Mirrors the reservations of the projects whose policies ask for it, while a session works there."""

    name = "reservations"
    pause = 2.0

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._database: Database | None = None
        self._lanes: Lanes
        self._ended: set[str] = set()
        self._places: dict[tuple[Settings, str], _Place] = {}

    def step(self, _: GoesOn) -> str:
        if self._database is None:
            self._database = self._open.enter_context(Database.open(self._home))
            self._lanes = self._open.enter_context(contextlib.closing(Lanes(self.name)))
        mine = home_id(self._home)
        work = {}
        problems = []
        for session in self._living():
            try:
                settings = settings_of(self._home, mine, session)
            except StateError as error:
                problems.append(str(error))
                continue
            if settings is not None and settings.mirrors:
                key = settings, session.source
                if key not in self._places:
                    self._places[key] = _Place(self._home, settings, session.source)
                work[self._places[key].prefix] = partial(self._places[key].mirror, self._database)
        return "; ".join([*problems, *self._lanes.go(work, self.pause)])

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


class _Place:
    """The reservations of one project, for one source. It is asked by one thread at a time."""

    def __init__(self, home: Path, settings: Settings, source: str) -> None:
        self._home: Final = home
        self._settings: Final = settings
        self._source: Final = source
        named = source.encode(errors="backslashreplace").decode()
        self.prefix: Final = f"agent_mail:{settings.address.url} {settings.address.project} {named} "
        """What the origins of its leases begin with."""
        self._mailbox: Mailbox | None = None
        self._told: set[str] = set()
        """Origins of reservations whose conflict is in the thread."""

    def mirror(self, database: Database) -> list[str]:
        """Make the leases of the source what the reservations are, and say which could not be."""
        try:
            if self._mailbox is None:
                self._mailbox = open_mailbox(self._home, self._settings)
            reserved = {f"{self.prefix}{one.id}": one for one in self._mailbox.reservations()}
            for origin in leases.mirrored(database, self.prefix).keys() - reserved.keys():
                leases.unmirror(database, origin)
            # All that can be leases before anything is sent, which takes its time.
            problems = {origin: self._enter(database, one, origin) for origin, one in reserved.items()}
            wrong = {origin: problem for origin, problem in problems.items() if problem}
            self._told &= wrong.keys()
            said = [
                f"{reserved[origin].pattern}, reserved by {reserved[origin].agent}, is no lease: {problem}"
                for origin, problem in wrong.items()
            ]
            new = [origin for origin in wrong if origin not in self._told]
            return said + self._tell(self._mailbox, {origin: (reserved[origin], wrong[origin]) for origin in new})
        except MailError as error:
            # The next one reads the token anew.
            self._mailbox = None
            return [str(error)]

    def _tell(self, mailbox: Mailbox, wrong: dict[str, tuple[Reservation, str]]) -> list[str]:
        """Alert the thread of each, once: also an earlier daemon may have, or a letter that was not answered."""
        if not wrong:
            return []
        known = {sent.subject for sent in mailbox.sent(min(one.made for one, _ in wrong.values()))}
        problems = []
        for origin, (reservation, problem) in wrong.items():
            subject = f"alert: {escape(reservation.agent)[:64]}'s reservation {reservation.id} is no lease"
            try:
                if subject not in known:
                    mailbox.send(subject, _body(reservation, problem), "urgent")
                self._told.add(origin)
            except MailError as error:
                if not error.refused:
                    raise
                problems.append(str(error))
        return problems

    def _enter(self, database: Database, reservation: Reservation, origin: str) -> str:
        """Mirror one reservation; "" when that is done, else why it cannot be."""
        try:
            conflict = leases.mirror(
                database,
                leases.LeaseRequest(
                    leases.holder_of_mail(database, reservation.agent, self._source),
                    covered(reservation.pattern, self._settings.address.project, Path(self._source)),
                    shared=not reservation.exclusive,
                    reason=reservation.reason,
                    workspace=self._source,
                    origin=origin,
                ),
                patterns_meet,
                until=reservation.expires,
            )
        except (PolicyError, UsageError) as error:
            return str(error)
        return "" if conflict is None else str(conflict)


class Expiring(Job):
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


def _body(reservation: Reservation, problem: str) -> str:
    return _BODY.format(pattern=escape(reservation.pattern), problem=escape(problem))


_MOST: Final = 32
"""Patterns of one lease that a reservation is written out to; one that takes more covers all below its first star."""
_STARS: Final = re.compile(r"\*+")


def covered(reserved: str, project: str, source: Path) -> tuple[str, ...]:
    """The patterns of a lease on this source that cover what is reserved; PolicyError where there is none."""
    text = reserved
    for above in (str(source), project):
        text = text.removeprefix(f"{above.rstrip('/')}/")
    text = text.removeprefix("./")
    parse(text)
    if not is_wild(text):
        below = not text.endswith("/") and (source / text).is_dir()
        return (f"{text}/",) if below else (text,)
    parts = text.split("/")
    written = ["/".join(found) for found in itertools.product(*(list(_passing(part)) for part in parts))]
    if len(written) > _MOST:
        first = next(number for number, part in enumerate(parts) if "*" in part)
        written = ["/".join([*parts[:first], "**"])]
    patterns = tuple(dict.fromkeys(re.sub(r"\*\*(/\*\*)+", "**", pattern) for pattern in written))
    for pattern in patterns:
        parse(pattern)
    return patterns


def _passing(part: str) -> Iterator[str]:
    """A component whose stars pass over slashes, as components of ours; in `[...]` a star is none."""
    if "[" in part or "*" not in part:
        yield part
        return
    before, *after = _STARS.split(part)
    # Where a star stands at the beginning, what it passes over may be nothing: one form says both.
    forms = [before]
    for place, text in enumerate(after):
        last = place == len(after) - 1 and not text
        grown = []
        for form in forms:
            name = form.rpartition("/")[2]
            if not name:
                grown.append(f"{form}**" if last else f"{form}**/*{text}")
            else:
                grown += [f"{form}*{text}", f"{form}*/**" if last else f"{form}*/**/*{text}"]
        forms = grown
    yield from forms
