"""Mirror the reservations of Agent Mail as leases, and delete expired leases.

A reservation is advisory in Agent Mail and becomes a binding lease within seconds; its release ends the lease. A
reservation that overlaps with the lease of another holder does not become a lease: the job sends one alert to the
thread and tries again. While the server is unreachable, a mirrored lease lasts until it expires.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from bonobofs.agent_mail.mail_client import Mailbox, Reservation
from bonobofs.daemon.jobs import Condition, PeriodicJob, ServerJob
from bonobofs.errors import MailError, PolicyError, StateError, UsageError
from bonobofs.policy.overlap import patterns_meet
from bonobofs.policy.pattern import is_wild, parse
from bonobofs.session.mail_settings import Settings, open_mailbox, settings_of
from bonobofs.state import leases
from bonobofs.state.database import Database
from bonobofs.state.home import home_id
from bonobofs.state.sessions import Session, lives, load
from bonobofs.system.terminal import escape


class ReservationJob(ServerJob):
    """Mirrors the reservations of each project whose policy enables it, while a session works there."""

    name = "reservations"
    pause = 2.0

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._ended: set[str] = set()
        self._mirrors: dict[tuple[Settings, str], _Mirror] = {}

    def step(self, _: Condition) -> str:
        database, mine = self.database, home_id(self._home)
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
                if key not in self._mirrors:
                    self._mirrors[key] = _Mirror(self._home, settings, session.source)
                work[self._mirrors[key].prefix] = partial(self._mirrors[key].mirror, database)
        return self._run_tasks(work, problems)

    def _living(self) -> list[Session]:
        found = []
        for name in os.listdir(self._home / "sessions"):
            session = None if name in self._ended else load(self._home, name)
            if session is not None and session.ended is not None:
                self._ended.add(name)
            elif session is not None and lives(session):
                found.append(session)
        return found


class _Mirror:
    """The mirrored reservations of one project and one source. One thread at a time uses it."""

    def __init__(self, home: Path, settings: Settings, source: str) -> None:
        self._home: Final = home
        self._settings: Final = settings
        self._source: Final = source
        named = source.encode(errors="backslashreplace").decode()
        self.prefix: Final = f"agent_mail:{settings.address.url} {settings.address.project} {named} "
        """Prefix of the origins of its leases."""
        self._mailbox: Mailbox | None = None
        self._reported: set[str] = set()
        """Origins of the reservations whose alert is in the thread."""

    def mirror(self, database: Database) -> list[str]:
        """Update the leases of the source from the reservations; return the problems."""
        try:
            if self._mailbox is None:
                self._mailbox = open_mailbox(self._home, self._settings)
            reserved = {f"{self.prefix}{one.id}": one for one in self._mailbox.reservations()}
            for origin in leases.mirrored(database, self.prefix).keys() - reserved.keys():
                leases.unmirror(database, origin)
            # Create all leases before an alert is sent, because sending is slow.
            problems = {origin: self._enter(database, one, origin) for origin, one in reserved.items()}
            wrong = {origin: problem for origin, problem in problems.items() if problem}
            self._reported &= wrong.keys()
            said = [
                f"{reserved[origin].pattern}, reserved by {reserved[origin].agent}, is not a lease: {problem}"
                for origin, problem in wrong.items()
            ]
            new = [origin for origin in wrong if origin not in self._reported]
            return said + self._report(self._mailbox, {origin: (reserved[origin], wrong[origin]) for origin in new})
        except MailError as error:
            # The next mailbox reads the token again.
            self._mailbox = None
            return [str(error)]

    def _report(self, mailbox: Mailbox, wrong: dict[str, tuple[Reservation, str]]) -> list[str]:
        """Send an alert for each reservation, once. An earlier daemon, or an unconfirmed letter, can have sent it."""
        if not wrong:
            return []
        known = {sent.subject for sent in mailbox.sent(min(one.created for one, _ in wrong.values()))}
        problems = []
        for origin, (reservation, problem) in wrong.items():
            subject = f"alert: {escape(reservation.agent)[:64]}'s reservation {reservation.id} is no lease"
            try:
                if subject not in known:
                    mailbox.send(subject, _body(reservation, problem), "urgent")
                self._reported.add(origin)
            except MailError as error:
                if not error.refused:
                    raise
                problems.append(str(error))
        return problems

    def _enter(self, database: Database, reservation: Reservation, origin: str) -> str:
        """Mirror one reservation; return the problem, or ""."""
        try:
            conflict = leases.mirror(
                database,
                leases.LeaseRequest(
                    leases.holder_of_mail(database, reservation.agent, self._source),
                    lease_patterns(reservation.pattern, self._settings.address.project, Path(self._source)),
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


class LeaseExpiryJob(PeriodicJob):
    """Deletes expired leases."""

    name = "leases"
    pause = 30.0

    def step(self, _: Condition) -> str:
        leases.expire(self.database)
        return ""


_BODY: Final = """bonobofs does not enforce this reservation, because it cannot become a lease.

~~~text
{pattern}
{problem}
~~~

bonobofs tries again until the reservation is released or expires. Wait for the lease to end, or reserve other files.
"""


def _body(reservation: Reservation, problem: str) -> str:
    return _BODY.format(pattern=escape(reservation.pattern), problem=escape(problem))


_MOST: Final = 32
"""Most patterns of a mirrored lease. A reservation that needs more covers everything below its first star."""
_STARS: Final = re.compile(r"\*+")


def lease_patterns(reserved: str, project: str, source: Path) -> tuple[str, ...]:
    """Return lease patterns that match at least the reserved paths. PolicyError: there are none.

    In Agent Mail a `*` matches across slashes, and the name of a directory reserves its content.
    """
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
    """Return the forms of a component whose stars match across slashes. In `[...]` a star is a literal."""
    if "[" in part or "*" not in part:
        yield part
        return
    before, *after = _STARS.split(part)
    # A star at the beginning can match nothing: one form covers both cases.
    forms = [before]
    for index, text in enumerate(after):
        last = index == len(after) - 1 and not text
        grown = []
        for form in forms:
            name = form.rpartition("/")[2]
            if not name:
                grown.append(f"{form}**" if last else f"{form}**/*{text}")
            else:
                grown += [f"{form}*{text}", f"{form}*/**" if last else f"{form}*/**/*{text}"]
        forms = grown
    yield from forms
