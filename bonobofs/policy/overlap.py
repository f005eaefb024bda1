"""Decide whether two patterns can match the same path.

The result is exact. A pattern is an automaton over the components of a path, and a component is an automaton over the
characters of a name. The search walks the product of two automata until both accept, or no new state is left. It uses
valid paths only: names of 1 to NAME_MAX bytes, without `.` and `..`, with characters to which file names decode.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from bonobofs.policy.pattern import ANY_DEPTH, NAME_MAX, Pattern, Reach, Token, compile_name, is_wild, parse, tokens_of

Ranges = Sequence[tuple[int, int]]

_DOT: Final = ord(".")
_LAST: Final = 0x10FFFF
_IN_NAMES: Final[Ranges] = ((0x01, 0x2D), (0x30, 0xD7FF), (0xDC80, 0xDCFF), (0xE000, _LAST))
"""Characters of names except the dot: no NUL, no slash, and only the surrogates that stand for bytes."""
_WIDTHS: Final[Sequence[tuple[int, Ranges]]] = (
    (1, ((0x01, 0x7F), (0xDC80, 0xDCFF))),
    (2, ((0x80, 0x7FF),)),
    (3, ((0x800, 0xFFFF),)),
)
"""Size in bytes of the characters of a name. A surrogate is one byte that is not UTF-8. Other characters have four."""


# Each pattern is compared with many others, so parsed patterns are cached.
_parsed: Final = functools.lru_cache(4096)(parse)


def patterns_meet(one: str, other: str) -> bool:
    """True if both patterns can match one path. PolicyError: a pattern is invalid."""
    return meets(_parsed(one), _parsed(other))


def meets(one: Pattern, other: Pattern) -> bool:
    """True if both patterns can match one path."""
    mine, yours = _Walk.along(one), _Walk.along(other)
    if not mine.begins_as(yours):
        return False
    seen = {(0, 0)}
    pending = [(0, 0)]
    while pending:
        i, j = pending.pop()
        if i == len(mine.steps) and j == len(yours.steps):
            return True
        for state in _onward(mine, i, yours, j):
            if state not in seen:
                seen.add(state)
                pending.append(state)
    return False


class _Walk(NamedTuple):
    """A pattern as an automaton. `stays`: its last state loops, because the pattern covers a subtree."""

    steps: tuple[str, ...]
    stays: bool

    @classmethod
    def along(cls, pattern: Pattern) -> _Walk:
        below = ("*",) if pattern.reach is Reach.BELOW else ()
        return cls((*pattern.components, *below), pattern.reach is not Reach.ONLY)

    def begins_as(self, other: _Walk) -> bool:
        """False if the leading literal names differ. This rejects most pairs without a search."""
        for mine, yours in zip(self.steps, other.steps, strict=False):
            if is_wild(mine) or is_wild(yours):
                return True
            if mine != yours:
                return False
        return True

    def takes(self, at: int) -> Iterator[tuple[str, int]]:
        """Yield the transitions of a state: the glob of a name, and the next state."""
        if at == len(self.steps):
            if self.stays:
                yield "*", at
        elif self.steps[at] == ANY_DEPTH:
            yield "*", at
        else:
            yield self.steps[at], at + 1


def _onward(mine: _Walk, i: int, yours: _Walk, j: int) -> Iterator[tuple[int, int]]:
    if mine.steps[i : i + 1] == (ANY_DEPTH,):
        yield i + 1, j
    if yours.steps[j : j + 1] == (ANY_DEPTH,):
        yield i, j + 1
    for my_name, my_next in mine.takes(i):
        for your_name, your_next in yours.takes(j):
            if names_meet(my_name, your_name):
                yield my_next, your_next


@functools.lru_cache(1 << 14)
def names_meet(one: str, other: str) -> bool:
    """True if both components, neither of them ANY_DEPTH, can match one name."""
    if not is_wild(one):
        return bool(compile_name(other)(one))
    if not is_wild(other):
        return bool(compile_name(one)(other))
    return _shortest(tokens_of(one), tokens_of(other)) <= NAME_MAX


def _shortest(mine: Sequence[Token], yours: Sequence[Token]) -> int:
    """Return the size in bytes of the shortest name that both globs match; more than NAME_MAX if there is none.

    `dots` is the number of dots while the name has dots only, and 3 once the name cannot be empty, `.` or `..`.
    """
    seen = set()
    pending = [(0, 0, 0, 0)]
    while pending:
        length, i, j, dots = heapq.heappop(pending)
        if (i, j, dots) in seen or length > NAME_MAX:
            continue
        seen.add((i, j, dots))
        if i == len(mine) and j == len(yours):
            if dots == 3:
                return length
            continue
        if i < len(mine) and not mine[i].text:
            heapq.heappush(pending, (length, i + 1, j, dots))
        if j < len(yours) and not yours[j].text:
            heapq.heappush(pending, (length, i, j + 1, dots))
        if i < len(mine) and j < len(yours):
            after = (i + bool(mine[i].text), j + bool(yours[j].text))
            both = _common(_ranges(mine[i]), _ranges(yours[j]))
            if _common(both, ((_DOT, _DOT),)):
                heapq.heappush(pending, (length + 1, *after, min(dots + 1, 3)))
            width = _narrowest(_common(both, _IN_NAMES))
            if width:
                heapq.heappush(pending, (length + width, *after, 3))
    return NAME_MAX + 1


def _ranges(token: Token) -> Ranges:
    """Return the code points that a token matches, as sorted ranges."""
    if not token.text:
        return ((0, _LAST),)
    if not token.negated:
        return sorted(token.ranges)
    left, low = [], 0
    for first, last in sorted(token.ranges):
        if low < first:
            left.append((low, first - 1))
        low = max(low, last + 1)
    return [*left, (low, _LAST)] if low <= _LAST else left


def _common(one: Ranges, other: Ranges) -> Ranges:
    return [
        (max(low, first), min(high, last))
        for low, high in one
        for first, last in other
        if max(low, first) <= min(high, last)
    ]


def _narrowest(characters: Ranges) -> int:
    """Return the size in bytes of the shortest character; 0 if there is none."""
    if not characters:
        return 0
    return next((width for width, ranges in _WIDTHS if _common(characters, ranges)), 4)
