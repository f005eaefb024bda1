"""Commands, their options and arguments: the annotated parameters of a function. Parsing, help and usage errors.

A parameter is `Annotated[TYPE, Option(...)]` or `Annotated[TYPE, Argument(...)]`. TYPE is str, int, Path, an enum of
strings, a list of one of them, or bool for a flag; each also with `| None`. The library that this module replaces takes
longer to load than most commands run.
"""

from __future__ import annotations

import enum
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from bonobofs.errors import UsageError

_WIDEST: Final = 80
_NARROWEST: Final = 50
_WIDEST_NAME: Final = 30
_GAP: Final = 2
_VERBATIM: Final = "\b\n"
"""Begins a paragraph of a docstring whose lines the help keeps."""
HELP: Final = ("-h", "--help")


class Argument(NamedTuple):
    """A positional argument."""

    metavar: str
    help: str = ""
    verbatim: bool = False
    """It takes all remaining words from its first one on, also `--` and what looks like an option."""


class Option:
    """An option. Without `names`, its name is that of the parameter. A bool is a flag without a value."""

    def __init__(self, *names: str, metavar: str = "", help: str = "", minimum: int | None = None) -> None:  # noqa: A002
        self.names: Final = names
        self.metavar: Final = metavar
        self.help: Final = help
        self.minimum: Final = minimum


class _Parameter(NamedTuple):
    """One parameter of a command's function."""

    key: str
    names: tuple[str, ...]
    """Names of the option; empty: an argument."""
    kind: Any
    """A type."""
    is_list: bool
    is_required: bool
    default: Any
    given: Argument | Option

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def label(self) -> str:
        """How the usage and the errors name it."""
        if self.names:
            return " / ".join(f"'{name}'" for name in self.names)
        return f"'{self.given.metavar}'"

    def convert(self, text: str) -> Any:
        """Return the value that a word stands for. UsageError."""
        if issubclass(self.kind, enum.Enum):
            values = [each.value for each in self.kind]
            if text not in values:
                known = ", ".join(map(repr, values))
                raise UsageError(f"Invalid value for {self.label}: {text!r} is not one of {known}")
            return self.kind(text)
        try:
            value = self.kind(text)
        except ValueError:
            raise UsageError(f"Invalid value for {self.label}: {text!r} is not a number") from None
        minimum = self.given.minimum if isinstance(self.given, Option) else None
        if minimum is not None and value < minimum:
            raise UsageError(f"Invalid value for {self.label}: {text} is less than {minimum}")
        return value

    def help_row(self) -> tuple[str, str]:
        """Return its names and its explanation."""
        names = ", ".join(self.names) + (f" {self.given.metavar}" if self.names and not self.is_flag else "")
        text = self.given.help
        if self.is_required:
            text += "  [required]"
        elif self.default not in (None, False, ""):
            text += f"  [default: {self.default}]"
        return names or self.given.metavar, text


class Command:
    """A function as a command."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function: Final = function
        self.help: Final = _dedent(function.__doc__ or "")

    @cached_property
    def parameters(self) -> list[_Parameter]:
        """The parameters in their order. They are read when the command runs: a family has many commands."""
        return list(_parameters(self.function))

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return first_sentence(self.help)

    @property
    def options(self) -> dict[str, _Parameter]:
        """The options by name."""
        return {name: each for each in self.parameters for name in each.names}

    def invoke(self, path: str, words: Sequence[str]) -> Any:
        """Parse the words and call the function; for --help, print the help instead. UsageError."""
        try:
            values = self._parse(words)
        except UsageError as error:
            raise UsageError(f"{error}; see {path} --help") from None
        if values is None:
            print(self._format_help(path))
            return None
        return self.function(**values)

    def _parse(self, words: Sequence[str]) -> dict[str, Any] | None:
        """Return the arguments of the function; None: the words ask for the help."""
        options, waiting = self.options, list(words)
        found: dict[str, list[Any]] = {}
        positional: list[str] = []
        verbatim = any(isinstance(each.given, Argument) and each.given.verbatim for each in self.parameters)
        while waiting:
            word = waiting.pop(0)
            if verbatim and (word == "--" or not _is_option(word)):
                positional += [word, *waiting]
                break
            if word == "--":
                positional += waiting
                break
            if not _is_option(word):
                positional.append(word)
            elif word in HELP:
                return None
            else:
                parameter, value = _option(options, word, waiting)
                found.setdefault(parameter.key, []).append(value)
        self._assign(positional, found)
        return {each.key: self._value(each, found.get(each.key)) for each in self.parameters}

    def _assign(self, positional: list[str], found: dict[str, list[Any]]) -> None:
        """Give the words without an option's name to the arguments, in order; a list takes the rest."""
        for each in self.parameters:
            if not each.names and positional:
                count = len(positional) if each.is_list else 1
                found[each.key] = [each.convert(word) for word in positional[:count]]
                del positional[:count]
        if positional:
            raise UsageError(f"Got unexpected extra arguments ({' '.join(positional)})")

    @staticmethod
    def _value(parameter: _Parameter, values: list[Any] | None) -> Any:
        if values is None:
            if parameter.is_required:
                raise UsageError(f"Missing {'option' if parameter.names else 'argument'} {parameter.label}")
            return parameter.default
        return values if parameter.is_list else values[-1]

    def _format_help(self, path: str) -> str:
        arguments = [each for each in self.parameters if not each.names]
        options = [each for each in self.parameters if each.names]
        usage = [each.given.metavar if each.is_required else _bracket(each.given.metavar) for each in arguments]
        return format_help(
            " ".join(["Usage:", path, "[OPTIONS]", *usage]),
            self.help,
            {
                "Arguments": [each.help_row() for each in arguments],
                "Options": [*(each.help_row() for each in options), (", ".join(HELP), "Show this message and exit.")],
            },
        )


class Group:
    """A family of commands, such as `audit`."""

    def __init__(self, help: str) -> None:  # noqa: A002
        self.help: Final = help
        self.members: Final[dict[str, Command | Group]] = {}

    @property
    def summary(self) -> str:
        """The first sentence of its help."""
        return first_sentence(self.help)

    def command(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make the decorated function a command of the group."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.members[name] = Command(function)
            return function

        return add

    def invoke(self, path: str, words: Sequence[str]) -> Any:
        """Run the command that the first word names; for --help, print the help. UsageError."""
        if words and words[0] in HELP:
            summaries = {name: member.summary for name, member in self.members.items()}
            print(group_help(path, self.help, summaries))
            return None
        name = command_name(path, words, self.members)
        return self.members[name].invoke(f"{path} {name}", words[1:])


def command_name(path: str, words: Sequence[str], known: Mapping[str, object]) -> str:
    """Return the first word if it is a known command. UsageError."""
    if not words:
        raise UsageError(f"Missing command; see {path} --help")
    if words[0] in known:
        return words[0]
    if _is_option(words[0]):
        raise UsageError(f"No such option: {words[0].partition('=')[0]}; see {path} --help")
    raise UsageError(f"No such command {words[0]!r}{_similar(words[0], known)}; see {path} --help")


def group_help(path: str, text: str, summaries: Mapping[str, str], options: Sequence[tuple[str, str]] = ()) -> str:
    """Return the help of a family of commands."""
    rows = [*options, (", ".join(HELP), "Show this message and exit.")]
    sections = {"Options": rows, "Commands": summaries.items()}
    return format_help(f"Usage: {path} [OPTIONS] COMMAND [ARGS]...", text, sections)


def format_help(usage: str, text: str, sections: Mapping[str, Any]) -> str:
    """Return usage, wrapped paragraphs, and a list of names and explanations for each section."""
    width = _width()
    blocks = [usage]
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(_VERBATIM):
            blocks.append(textwrap.indent(paragraph.removeprefix(_VERBATIM), "  "))
        elif paragraph:
            blocks.append(_wrap(paragraph, width, "  "))
    for heading, rows in sections.items():
        if rows:
            blocks.append("\n".join([f"{heading}:", *_rows(list(rows), width)]))
    return "\n\n".join(blocks)


def _rows(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    column = min(max(len(name) for name, _ in rows), _WIDEST_NAME) + 2 * _GAP
    for name, text in rows:
        first = f"  {name}"
        if len(first) + _GAP > column:
            yield first
            first = ""
        yield _wrap(text, width, " " * column, first.ljust(column)).rstrip()


def _wrap(text: str, width: int, indent: str, first: str | None = None) -> str:
    # Two spaces stay two, as before [required].
    return textwrap.fill(
        text.replace("\n", " "),
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if not columns.isdecimal():
        try:
            columns = str(os.get_terminal_size(sys.stdout.fileno()).columns)
        except (OSError, ValueError):
            columns = str(_WIDEST)
    return max(min(int(columns), _WIDEST) - 2, _NARROWEST)


def first_sentence(text: str) -> str:
    """Return the first sentence, on one line."""
    line = " ".join(text.partition("\n\n")[0].split())
    found = re.match(r".*?\.(?= |$)", line)
    return line if found is None else found[0]


def _dedent(text: str) -> str:
    first, _, rest = text.partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}".strip()


def _bracket(metavar: str) -> str:
    return metavar if metavar.startswith(("[", "--")) else f"[{metavar}]"


def _is_option(word: str) -> bool:
    return len(word) > 1 and word.startswith("-")


def _option(options: Mapping[str, _Parameter], word: str, waiting: list[str]) -> tuple[_Parameter, Any]:
    """Return the option that a word names and its value, from the word or from the next one. UsageError."""
    name, equals, value = word.partition("=")
    if not word.startswith("--") and len(word) > 2 and word not in options:
        name, equals, value = word[:2], "-", word[2:]
    parameter = options.get(name)
    if parameter is None:
        raise UsageError(f"No such option: {name}{_similar(name, options)}")
    if parameter.is_flag:
        if equals == "=":
            raise UsageError(f"Option {name!r} does not take a value")
        if equals:
            waiting.insert(0, f"-{value}")  # flags of one letter in one word
        return parameter, True
    if not equals:
        if not waiting:
            raise UsageError(f"Option {name!r} requires an argument")
        value = waiting.pop(0)
    return parameter, parameter.convert(value)


def _similar(word: str, known: Mapping[str, object]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake needs it

    close = get_close_matches(word, [*known], cutoff=0.6)
    return f". Did you mean {', '.join(map(repr, close))}?" if close else ""


def _parameters(function: Callable[..., Any]) -> Iterator[_Parameter]:
    """Yield the parameters of a command's function."""
    code: Any = function.__code__
    keys = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = function.__defaults__ or ()
    defaults = dict(zip(keys[code.co_argcount - len(positional) : code.co_argcount], positional, strict=True))
    defaults |= function.__kwdefaults__ or {}
    hints = get_type_hints(function, include_extras=True)
    for key in keys:
        kind, given = get_args(hints[key])
        names: tuple[str, ...] = ()
        if isinstance(given, Option):
            names = given.names or (f"--{key.replace('_', '-')}",)
        kind = next((each for each in get_args(kind) if each is not type(None)), kind) if _is_union(kind) else kind
        is_list = get_origin(kind) is list
        yield _Parameter(
            key, names, get_args(kind)[0] if is_list else kind, is_list, key not in defaults, defaults.get(key), given
        )


def _is_union(kind: Any) -> bool:
    return type(None) in get_args(kind)
