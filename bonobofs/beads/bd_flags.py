"""Taking a command line of bd apart, as bd does: long flags with their value behind `=` or after it, short ones too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple


class Unanswered(Exception):  # noqa: N818 - no fault: it is what the gate says to a command line
    """A command line that the gate does not answer. `rule` is the rule, without `beads.`; `about` what it is about."""

    def __init__(self, rule: str, about: str = "") -> None:
        super().__init__(rule, about)
        self.rule: Final = rule
        self.about: Final = about


class Form(NamedTuple):
    """What one command may have."""

    values: Mapping[str, str]
    """Flags with a value, by each of their spellings, without dashes; and their names."""
    switches: Mapping[str, str]
    """Flags without a value."""
    least: int
    """How many words it has beside its flags, at least and at most."""
    most: int


class Parsed(NamedTuple):
    """A command line taken apart."""

    words: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    """What each flag was given, in order."""
    switches: frozenset[str]

    def last(self, name: str) -> str | None:
        """The value that counts where only one does."""
        return self.values[name][-1] if name in self.values else None

    def each(self, name: str) -> list[str] | None:
        """Values of a flag that takes several, also by commas; None where it is not given."""
        if name not in self.values:
            return None
        return [part.strip() for value in self.values[name] for part in value.split(",")]


def form(values: str = "", switches: str = "", words: tuple[int, int] = (0, 0)) -> Form:
    """A form from words such as `assignee:a`: a flag, and after the colons its other spellings."""
    return Form(_spelled(values), _spelled(switches), *words)


def parse(arguments: Sequence[str], known: Form) -> Parsed:
    """Unanswered: a flag that is not known, a value that is missing, too few or too many words, or a file."""
    words: list[str] = []
    values: dict[str, list[str]] = {}
    switches: set[str] = set()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            words += rest
            break
        if not argument.startswith("-") or argument == "-":
            words.append(argument)
        elif argument.startswith("--"):
            name, has_value, value = argument[2:].partition("=")
            _take(known, name, value if has_value else None, rest, values, switches)
        else:
            _take_short(known, argument[1:], rest, values, switches)
    for text in (*words, *(text for given in values.values() for text in given)):
        if text.startswith("@"):
            raise Unanswered("file", f"This is about {text!a}.")
    if not known.least <= len(words) <= known.most:
        raise Unanswered("form", f"It has {len(words)} words beside its flags.")
    return Parsed(tuple(words), {name: tuple(given) for name, given in values.items()}, frozenset(switches))


def _take(
    known: Form, name: str, value: str | None, rest: list[str], values: dict[str, list[str]], switches: set[str]
) -> None:
    if name in known.switches:
        if value not in (None, "true"):
            raise Unanswered("flag", f"This is about --{ascii(name)[1:-1]}, which has no value.")
        switches.add(known.switches[name])
    elif name in known.values:
        if value is None:
            if not rest:
                raise Unanswered("form", f"A value is missing after --{name}.")
            value = rest.pop(0)
        values.setdefault(known.values[name], []).append(value)
    else:
        raise Unanswered("flag", f"This is about --{ascii(name)[1:-1]}.")


def _take_short(known: Form, letters: str, rest: list[str], values: dict[str, list[str]], switches: set[str]) -> None:
    """`-p1`, `-p=1`, `-p 1`, and several switches in one, the last of which may be a flag with a value."""
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter in known.switches:
            switches.add(known.switches[letter])
        elif letter in known.values:
            if letters:
                value = letters.removeprefix("=")
            elif rest:
                value = rest.pop(0)
            else:
                raise Unanswered("form", f"A value is missing after -{letter}.")
            values.setdefault(known.values[letter], []).append(value)
            return
        else:
            raise Unanswered("flag", f"This is about -{ascii(letter)[1:-1]}.")


def _spelled(flags: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for flag in flags.split():
        name, *others = flag.split(":")
        found |= dict.fromkeys((name, *others), name)
    return found


def joined(forms: Iterable[Form]) -> Form:
    """One form with the flags of all; the words of the last."""
    every = list(forms)
    values = {spelling: name for each in every for spelling, name in each.values.items()}
    switches = {spelling: name for each in every for spelling, name in each.switches.items()}
    return Form(values, switches, every[-1].least, every[-1].most)
