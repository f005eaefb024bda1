"""The outbox of Agent Mail: send the entries of trails to one mailbox, each entry once.

The courier reads the trails and never blocks their writers. Denials and alerts are sent at once, with the entries
before them; other entries wait for a digest. The courier sends a letter and then stores its cursor. After a crash
between the two, or a lost reply, it reads the thread from the time of the cursor before it sends again. The thread has
at most one letter that the cursor lacks.

After a rejected letter, the courier sends fewer entries per letter. Other sessions do not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.agent_mail.letter import MOST_ENTRIES, Letter, Posted, parse_subject
from bonobofs.agent_mail.mail_client import Mailbox, Sent
from bonobofs.audit.reader import entries_from
from bonobofs.audit.trail_storage import size_of
from bonobofs.errors import MailError
from bonobofs.state.sqlite_file import Queries

_AT_ONCE: Final = 20
"""Letters of one session in one round."""
_SMALLER: Final = 8
"""Divisor of the number of entries after a rejected letter."""
_ANY: Final = 2**62


class TrailCursor(NamedTuple):
    """The part of one trail that a courier has sent."""

    offset: int = 0
    """Offset in the trail, in bytes."""
    seq: int = 0
    """Number of the last entry; 0: none."""
    hash: str = ""
    """Hash of the last entry."""
    noted: str = ""
    """The server's time of the last letter, in the server's format."""


class CourierCursors:
    """The cursors of all couriers of one database."""

    def __init__(self, database: Queries) -> None:
        """Use the database. The first call of `load` reads it."""
        self._database = database

    def load(self, courier: str) -> dict[str, TrailCursor]:
        """Return the cursors of a courier by session. StateError."""
        statement = "SELECT session, place, seq, hash, noted FROM cursors WHERE courier = :courier"
        with self._database.queries() as execute:
            return {session: TrailCursor(*rest) for session, *rest in execute(statement, {"courier": courier})}

    def save(self, courier: str, session: str, cursor: TrailCursor) -> None:
        """Store the cursor of one trail. StateError."""
        with self._database.queries(write=True) as execute:
            execute(
                "INSERT INTO cursors (courier, session, place, seq, hash, noted) "
                "VALUES (:courier, :session, :offset, :seq, :hash, :noted) ON CONFLICT (courier, session) "
                "DO UPDATE SET place = :offset, seq = :seq, hash = :hash, noted = :noted",
                {"courier": courier, "session": session, **cursor._asdict()},
            )


class Pace(NamedTuple):
    """Longest time in seconds that an entry waits for its letter."""

    digest: float = 60.0
    """For letters that list every entry."""
    head: float = 600.0
    """For letters that list denials only, and cover the other entries by a hash."""


class Courier:
    """Sends the trails of one state directory that have the same address."""

    def __init__(
        self,
        name: str,
        mailbox: Mailbox,
        cursors: CourierCursors,
        home: str,
        *,
        only_denials: bool = False,
        pace: Pace = Pace(),  # noqa: B008 - a constant
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`name` identifies the courier; `home` is the UUID of the state directory; `warn` takes warnings."""
        self._name: Final = name
        self._mailbox = mailbox
        self._cursors = cursors
        self._home = home
        self._only_denials = only_denials
        self._longest_wait = pace.head if only_denials else pace.digest
        self._warn = warn
        self._pending: dict[str, _PendingLetter] = {}
        self._known: dict[str, TrailCursor] = {}
        self._most: dict[str, int] = {}
        """Most entries of a letter by session, after the server rejected longer ones."""
        self._certain = False
        self._doubtful: set[str] = set()
        """Sessions whose last letter could not be compared with their trail."""
        self._unsaved: tuple[str, TrailCursor] | None = None

    def run(self, trails: Mapping[str, Path], may_continue: Callable[[], bool] = lambda: True) -> int:
        """Send the due letters of these trails, by session; return the number of letters.

        MailError, StateError: the rest stays due for the next call. A trail that cannot be read gives a warning.
        """
        self._load_new_cursors(trails)
        self._save()
        count, refused = 0, None
        for session, trail in trails.items():
            try:
                count += self._run(session, trail, trails, may_continue)
            except FileNotFoundError:
                self._pending.pop(session, None)
            except OSError as error:
                self._warn(f"the trail {trail} cannot be read: {error.strerror}")
            except MailError as error:
                if not error.refused:
                    raise
                refused = error
        if refused is not None:
            raise refused
        return count

    def _load_new_cursors(self, trails: Mapping[str, Path]) -> None:
        """Load the cursors of new sessions: another courier may have sent letters of them."""
        for session in self._known.keys() - trails.keys():
            del self._known[session]
            self._pending.pop(session, None)
        if self._unsaved is not None and self._unsaved[0] not in trails:
            self._unsaved = None
        new = trails.keys() - self._known.keys()
        if new:
            loaded = self._cursors.load(self._name)
            self._known |= {session: loaded.get(session, TrailCursor()) for session in new}
            self._certain = False

    def _run(self, session: str, trail: Path, trails: Mapping[str, Path], may_continue: Callable[[], bool]) -> int:
        """Send pending letters of one trail, at most 20 per round."""
        count = 0
        while (
            count < _AT_ONCE
            and may_continue()
            and (pending := self._fill_letter(session, trail)).is_due(self._longest_wait)
        ):
            if not self._certain or session in self._doubtful:
                self._read_back(trails)
                if session in self._doubtful:
                    break
                continue
            is_full = pending.is_full()
            self._send(pending)
            count += 1
            if not is_full:
                break
        return count

    def _fill_letter(self, session: str, trail: Path) -> _PendingLetter:
        pending = self._pending.get(session)
        if pending is None:
            most = self._most.get(session, _ANY)
            letter = Letter(session, self._home)
            pending = self._pending[session] = _PendingLetter(
                trail, letter, self._known[session], self._only_denials, most
            )
        problem = pending.gather()
        if problem:
            self._warn(problem)
        return pending

    def _send(self, pending: _PendingLetter) -> None:
        letter = pending.letter
        try:
            moment = self._mailbox.send(letter.subject, letter.body, letter.importance)
        except MailError as error:
            self._certain = error.carried_out is False
            if error.refused:
                self._most[letter.session] = max(1, letter.entries // _SMALLER)
                self._pending.pop(letter.session)
            raise
        if letter.session in self._most:
            self._most[letter.session] *= 2
            if self._most[letter.session] >= MOST_ENTRIES:
                del self._most[letter.session]
        self._advance(letter.session, TrailCursor(pending.offset, letter.last, letter.hash, moment))

    def _advance(self, session: str, cursor: TrailCursor) -> None:
        """Store the new cursor before the next letter is sent."""
        pending = self._pending.pop(session)
        self._pending[session] = pending.after(cursor, self._most.get(session, _ANY))
        self._unsaved = (session, cursor)
        self._save()

    def _save(self) -> None:
        if self._unsaved is not None:
            session, cursor = self._unsaved
            self._cursors.save(self._name, session, cursor)
            self._known[session] = cursor
            self._unsaved = None

    def _read_back(self, trails: Mapping[str, Path]) -> None:
        """Find letters in the thread that are not in the cursors."""
        self._doubtful.clear()
        since = max((cursor.noted for cursor in self._known.values()), default="")
        for sent in self._mailbox.sent(since):
            letter = parse_subject(sent.subject)
            if letter is None or letter.home != self._home[:8] or letter.session not in trails:
                continue
            if letter.last > self._known[letter.session].seq:
                trail = trails[letter.session]
                try:
                    self._skip(letter, sent, trail)
                except OSError as error:
                    self._warn(f"the trail {trail} cannot be read: {error.strerror}")
                    self._doubtful.add(letter.session)
        self._certain = True

    def _skip(self, letter: Posted, sent: Sent, trail: Path) -> None:
        cursor = self._known[letter.session]
        offset = cursor.offset
        for line, entry in entries_from(trail, offset):
            offset += len(line)
            if entry.seq == letter.last:
                if not entry.hash.startswith(letter.hash):
                    self._warn(f"entry {letter.last} of session {letter.session} does not match its posted hash")
                self._fill_letter(letter.session, trail)
                self._advance(letter.session, TrailCursor(offset, letter.last, entry.hash, sent.moment))
                return
        self._warn(f"session {letter.session} ends before entry {letter.last}, which was posted")


class _PendingLetter:
    """The pending entries of one trail, as the next letter."""

    def __init__(self, trail: Path, letter: Letter, cursor: TrailCursor, only_denials: bool, most: int) -> None:
        """`letter` is empty; `most` is the most entries that it may have, listed or not."""
        letter.last, letter.hash = cursor.seq, cursor.hash or letter.hash
        self.letter = letter
        self.offset = cursor.offset
        """Offset of the end of the letter in the trail."""
        self._trail = trail
        self._only_denials = only_denials
        self._most = most
        self._began = 0.0

    def after(self, cursor: TrailCursor, most: int) -> _PendingLetter:
        """Return the next letter, which begins after this one."""
        letter = Letter(self.letter.session, self.letter.home, self.letter.agent, self.letter.agent_id)
        return _PendingLetter(self._trail, letter, cursor, self._only_denials, most)

    def gather(self) -> str:
        """Add the new entries of the trail until the letter is full; return a problem of the trail, or ""."""
        size = size_of(self._trail)
        letter = self.letter
        if size < self.offset:
            return f"the trail of session {letter.session} is shorter than the part that was sent"
        if self.is_full() or size == self.offset:
            return ""
        problem = ""
        for line, entry in entries_from(self._trail, self.offset):
            if not letter.entries:
                self._began = time.monotonic()
            if entry.seq and entry.prev != letter.hash:
                problem = f"the trail of session {letter.session} does not continue the part that was sent"
            letter.add_entry(entry, only_denials=self._only_denials)
            self.offset += len(line)
            if self.is_full():
                break
        return problem

    def is_full(self) -> bool:
        return self.letter.is_full() or self.letter.entries >= self._most

    def is_due(self, longest_wait: float) -> bool:
        letter = self.letter
        if not letter.entries:
            return False
        waited = time.monotonic() - self._began
        return letter.is_urgent or self.is_full() or letter.closed or waited >= longest_wait
