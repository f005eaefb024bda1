"""The courier: what the trails say, carried to one mailbox, each entry once.

It reads behind the writers and holds up nobody. Refusals and alerts go at once, with all that came before them; the
rest waits for a digest. A letter is sent and then noted. Whoever is killed between the two, or does not learn whether a
letter arrived, reads the thread back before the next one: of all letters at most the last is not noted, and it is the
one that the server has after the last noted moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from bonobofs.audit.agent_mail.letters import Letter, Posted, posted
from bonobofs.audit.agent_mail.mailbox import Mailbox, Sent
from bonobofs.audit.history import EPOCH, LONGEST_LINE, entry_of
from bonobofs.audit.record import AuditEntry
from bonobofs.errors import MailError
from bonobofs.state.carried import Carried


class Cursors(Protocol):
    """Where it is kept how far a courier is."""

    def load(self, courier: str, /) -> Mapping[str, Carried]:
        """By session; StateError."""

    def note(self, courier: str, session: str, carried: Carried, /) -> None:
        """Keep it; StateError."""


class Pace(NamedTuple):
    """Seconds that an entry may wait."""

    digest: float = 60.0
    """Where every entry is listed."""
    head: float = 600.0
    """Where only refusals are: then the rest is witnessed, not told."""


class Courier:
    """Carries the trails of one state directory that name the same address."""

    def __init__(
        self,
        name: str,
        mailbox: Mailbox,
        cursors: Cursors,
        home: str,
        *,
        only_denials: bool = False,
        pace: Pace = Pace(),  # noqa: B008 - a constant
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`name` tells this courier from others; `home` is the UUID of the state directory; `tell` is given alarms."""
        self._name: Final = name
        self._mailbox = mailbox
        self._cursors = cursors
        self._home = home
        self._only_denials = only_denials
        self._patience = pace.head if only_denials else pace.digest
        self._tell = tell
        self._piles: dict[str, _Pile] = {}
        self._known: dict[str, Carried] | None = None
        self._certain = False
        self._unnoted: tuple[str, Carried] | None = None

    def run(self, trails: Mapping[str, Path], goes_on: Callable[[], bool] = lambda: True) -> int:
        """Carry what is due of these trails, by session, and give how many letters went.

        MailError, StateError: what was not carried stays due; come again later. Of a trail that cannot be read is told.
        """
        if self._known is None:
            self._known = dict(self._cursors.load(self._name))
        self._note()
        count = 0
        for session, trail in trails.items():
            try:
                while goes_on() and (pile := self._pile(session, trail)).is_due(self._patience):
                    if self._certain:
                        self._send(pile)
                        count += 1
                    else:
                        self._read_back(trails)
            except FileNotFoundError:
                self._piles.pop(session, None)
            except OSError as error:
                self._tell(f"the trail {trail} cannot be read: {error.strerror}")
        return count

    def _pile(self, session: str, trail: Path) -> _Pile:
        known = self._known or {}
        pile = self._piles.get(session)
        if pile is None:
            pile = _Pile(trail, Letter(session, self._home), known.get(session, Carried()), self._only_denials)
            self._piles[session] = pile
        if not pile.gather():
            self._tell(f"the trail of session {session} is shorter than what was carried of it")
        return pile

    def _send(self, pile: _Pile) -> None:
        letter = pile.letter
        try:
            moment = self._mailbox.send(letter.subject, letter.body, letter.importance)
        except MailError as error:
            self._certain = error.carried_out is False
            raise
        self._carry(letter.session, Carried(pile.place, letter.last, letter.hash, moment))

    def _carry(self, session: str, carried: Carried) -> None:
        """What is carried now, on record before anything else is sent."""
        pile = self._piles.pop(session)
        self._piles[session] = pile.after(carried)
        self._unnoted = (session, carried)
        self._note()

    def _note(self) -> None:
        if self._unnoted is not None and self._known is not None:
            session, carried = self._unnoted
            self._cursors.note(self._name, session, carried)
            self._known[session] = carried
            self._unnoted = None

    def _read_back(self, trails: Mapping[str, Path]) -> None:
        """Find what has arrived beyond what is noted."""
        known = self._known or {}
        since = max((carried.noted for session, carried in known.items() if session in trails), default="")
        for sent in self._mailbox.sent(since):
            letter = posted(sent.subject)
            if letter is None or letter.home != self._home[:8] or letter.session not in trails:
                continue
            if letter.last > known.get(letter.session, Carried()).seq:
                self._skip(letter, sent, trails[letter.session])
        self._certain = True

    def _skip(self, letter: Posted, sent: Sent, trail: Path) -> None:
        carried = (self._known or {}).get(letter.session, Carried())
        place = carried.place
        for line, entry in _entries(trail, place):
            place += len(line)
            if entry.seq == letter.last:
                if not entry.hash.startswith(letter.hash):
                    self._tell(
                        f"entry {letter.last} of session {letter.session} is another than the one that was posted"
                    )
                self._pile(letter.session, trail)
                self._carry(letter.session, Carried(place, letter.last, entry.hash, sent.moment))
                return
        self._tell(f"session {letter.session} ends before entry {letter.last}, which was posted")


class _Pile:
    """What one trail has that is not carried yet, as a letter in the making."""

    def __init__(self, trail: Path, letter: Letter, carried: Carried, only_denials: bool) -> None:
        self.letter = letter
        self.place = carried.place
        """Bytes of the trail up to the end of the letter."""
        self._trail = trail
        self._only_denials = only_denials
        self._began = 0.0

    def after(self, carried: Carried) -> _Pile:
        """The pile that begins where this letter ends."""
        letter = Letter(self.letter.session, self.letter.home, self.letter.agent, self.letter.agent_id)
        return _Pile(self._trail, letter, carried, self._only_denials)

    def gather(self) -> bool:
        """Take in what the trail has since the last time, until the letter is full; False: it has less than before."""
        size = self._trail.stat().st_size
        if self.letter.is_full() or size <= self.place:
            return size >= self.place
        for line, entry in _entries(self._trail, self.place):
            if not self.letter.entries:
                self._began = time.monotonic()
            self.letter.take(entry, only_denials=self._only_denials)
            self.place += len(line)
            if self.letter.is_full():
                break
        return True

    def is_due(self, patience: float) -> bool:
        letter = self.letter
        if not letter.entries:
            return False
        waited = time.monotonic() - self._began
        return letter.is_urgent or letter.is_full() or letter.closed or waited >= patience


def _entries(trail: Path, place: int) -> Iterator[tuple[bytes, AuditEntry]]:
    """The whole lines of a trail from a place on."""
    moment = EPOCH
    with trail.open("rb") as stream:
        stream.seek(place)
        for line in iter(lambda: stream.readline(LONGEST_LINE), b""):
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                return
            entry = entry_of(line, trail.stem, moment)
            moment = entry.timestamp
            yield line, entry
