"""Options of a subcommand as git's own parser reads them: clusters, values that cling, abbreviations, `--no-`, `--`."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Final, NamedTuple


class Unsupported(Exception):  # noqa: N818 - no fault: it is refused
    """A form that the gate does not answer; the text is what of it."""


class Options(NamedTuple):
    """What a subcommand was given."""

    given: tuple[tuple[str, str], ...]
    """Each option by its canonical name, `no-NAME` where it is undone, with its value or "", in their order."""
    before: tuple[str, ...]
    """What is no option, up to `--`."""
    after: tuple[str, ...]
    """What follows `--`."""
    dashes: bool
    """Whether there is a `--`."""

    @property
    def words(self) -> tuple[str, ...]:
        """All that is no option."""
        return self.before + self.after

    def has(self, name: str) -> bool:
        """Whether an option holds: it is given, and not undone afterwards."""
        said = [given for given, _ in self.given if given in (name, f"no-{name}")]
        return bool(said) and said[-1] == name

    def keep_to(self, names: Container[str]) -> None:
        """Unsupported: an option that is none of these, done or undone, was given."""
        for name, _ in self.given:
            if name not in names and name.removeprefix("no-") not in names:
                raise Unsupported(f"--{name}")

    def values(self, name: str) -> list[str]:
        """Every value that an option was given."""
        return [value for given, value in self.given if given == name]


FLAG: Final = 0
VALUE: Final = 1
MAYBE: Final = 2
"""A value that must cling to the option."""


class Spec(NamedTuple):
    """Options of one subcommand: canonical (long) name to what it takes, and letters to canonical names."""

    takes: Mapping[str, int]
    letters: Mapping[str, str]


def spec(text: str) -> Spec:
    """Read a table of words: `force,f` is a flag, `message,m=` takes a value, and that of `track,t?` must cling."""
    takes: dict[str, int] = {}
    letters: dict[str, str] = {}
    for word in text.split():
        names = word.rstrip("=?")
        name, _, letter = names.partition(",")
        takes[name] = VALUE if word.endswith("=") else MAYBE if word.endswith("?") else FLAG
        if letter:
            letters[letter] = name
    return Spec(takes, letters)


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def parse(table: Spec, arguments: tuple[str, ...]) -> Options:
    """Unsupported: an option that the table has not, or one without its value."""
    given: list[tuple[str, str]] = []
    before: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word == "--":
            return Options(tuple(given), tuple(before), tuple(rest), dashes=True)
        if word.startswith("--"):
            given.append(_long(table, word, rest))
        elif word.startswith("-") and word != "-":
            given += _cluster(table, word, rest)
        else:
            before.append(word)
    return Options(tuple(given), tuple(before), (), dashes=False)


def _long(table: Spec, word: str, words: Iterator[str]) -> tuple[str, str]:
    name, equals, value = word[2:].partition("=")
    undone = name.startswith("no-") and name not in table.takes
    found = _complete(table, name[3:] if undone else name)
    if found is None:
        raise Unsupported(f"--{name}")
    takes = table.takes[found]
    if undone:
        return f"no-{found}", ""
    if takes == FLAG and equals:
        raise Unsupported(word)
    if takes == VALUE and not equals:
        value = _next(words, word)
    return found, value


def _complete(table: Spec, name: str) -> str | None:
    if name in table.takes:
        return name
    found = [option for option in table.takes if option.startswith(name)] if name else []
    return found[0] if len(found) == 1 else None


def _cluster(table: Spec, word: str, words: Iterator[str]) -> Iterator[tuple[str, str]]:
    for at, letter in enumerate(word[1:], start=2):
        name = table.letters.get(letter)
        if name is None:
            raise Unsupported(f"-{letter}")
        rest = word[at:]
        if table.takes[name] == FLAG:
            yield name, ""
            continue
        yield name, rest if rest or table.takes[name] == MAYBE else _next(words, word)
        return


def _next(words: Iterator[str], word: str) -> str:
    value = next(words, None)
    if value is None:
        raise Unsupported(f"{word} without its value")
    return value
