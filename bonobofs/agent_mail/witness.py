"""The heads that were posted, compared with what the trails hold now.

A trail that was rewritten whole, its head with it, agrees with itself. It does not agree with the letters that went out
while the old one was there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from bonobofs.agent_mail.letter import Posted
from bonobofs.audit.reader import read, trails_in
from bonobofs.audit.tombstones import Tombstone, Tombstones
from bonobofs.audit.verify import Finding, What


def compare(letters: Iterable[Posted], trails: Path, home: str, pruned: Tombstones = dict) -> Iterator[Finding]:
    """Give, for each session of this state directory that was posted, the first entry that is not as it was then.

    `home` is the UUID of the state directory; `pruned` reads the tombstones. TrailError when a trail cannot be read.
    """
    heads: dict[str, dict[int, str]] = defaultdict(dict)
    for letter in letters:
        if letter.home == home[:8] and letter.last:
            heads[letter.session].setdefault(letter.last, letter.hash)
    for session, known in sorted(heads.items()):
        finding = _compare(session, known, trails / f"{session}.jsonl", pruned)
        if finding is not None:
            yield finding


def _compare(session: str, known: dict[int, str], trail: Path, pruned: Tombstones) -> Finding | None:
    last = max(known)
    if trail not in trails_in(trail.parent):
        tombstone = pruned().get(session)
        if tombstone is not None:
            return _compare_tombstone(known, tombstone)
        message = f"{trail} is missing: the witness knows of it, up to entry {last}"
        return Finding(session, What.WITNESS, None, None, message)
    waiting = dict(known)
    for entry in read(trail):
        stated = waiting.pop(entry.seq, None)
        if stated is not None and not entry.hash.startswith(stated):
            message = f"entry {entry.seq} is another than the one that the witness knows: the trail was rewritten"
            return Finding(session, What.WITNESS, entry.seq, None, message)
    if waiting:
        message = f"entry {min(waiting)} is missing: the witness knows of entries up to {last}"
        return Finding(session, What.WITNESS, min(waiting), None, message)
    return None


def _compare_tombstone(known: dict[int, str], tombstone: Tombstone) -> Finding | None:
    last = max(known)
    if last < tombstone.seq or (last == tombstone.seq and tombstone.hash.startswith(known[last])):
        return None
    message = f"the record of pruned trails ends it with entry {tombstone.seq}, and the witness knows of another end"
    return Finding(tombstone.session, What.WITNESS, last, None, message)
