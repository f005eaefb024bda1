"""Commands, their options and arguments: argparse from the annotated parameters of a function.

A parameter is `Annotated[TYPE, Option(...)]` or `Annotated[TYPE, Argument(...)]`. TYPE is str, int, Path, an enum of
strings, a list of one of them, or bool for a flag; each also with `| None`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

from bonobofs.errors import UsageError

HELP: Final = ("-h", "--help")
_WIDEST: Final = 80
_LARGEST: Final = 2**31 - 1
_VERBATIM: Final = "\b\n"
"""Begins a paragraph of a docstring whose lines the help keeps."""


class Argument(NamedTuple):
    """A positional argument. `verbatim`: it takes all words from its first one on, also what looks like an option."""

    metavar: str
    help: str = ""
    verbatim: bool = False


class Option:
    """An option. Without `names`, its name is that of the parameter. A bool is a flag without a value."""

    def __init__(self, *names: str, metavar: str = "", help: str = "", minimum: int | None = None) -> None:  # noqa: A002
        self.names: Final = names
        self.metavar: Final = metavar
        self.help: Final = help
        self.minimum: Final = minimum


class Parameter(NamedTuple):
    """One parameter of a command's function."""

    key: str
    names: tuple[str, ...]
    """Names of the option; empty: an argument."""
    kind: Any
    """A type."""
    is_list: bool
    is_required: bool
    default: Any
    annotation: Argument | Option

    def convert(self, text: str) -> Any:
        """Return the value that a word stands for. ArgumentTypeError."""
        try:
            value = self.kind(text)
        except ValueError:
            what = "a number" if self.kind is int else f"one of {', '.join(repr(each.value) for each in self.kind)}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        minimum = self.annotation.minimum if isinstance(self.annotation, Option) else None
        if minimum is not None and value < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        if self.kind is int and value > _LARGEST:
            raise argparse.ArgumentTypeError(f"{text} is more than {_LARGEST}")
        return value

    def settings(self) -> dict[str, Any]:
        """Return its settings for `add_argument`."""
        note = "  [required]" if self.is_required else ""
        if self.default not in (None, False, ""):
            note = f"  [default: {self.default}]"
        plain: dict[str, Any] = {"help": (self.annotation.help + note).replace("%", "%%"), "default": self.default}
        if self.names:
            plain |= {"dest": self.key, "required": self.is_required}
        if self.kind is bool:
            return {**plain, "action": "store_true"}
        plain |= {"metavar": self.annotation.metavar, "type": self.convert}
        if self.names:
            return {**plain, "action": "append"} if self.is_list else plain
        if isinstance(self.annotation, Argument) and self.annotation.verbatim:
            return {**plain, "nargs": argparse.REMAINDER}
        if self.is_list:
            return {**plain, "nargs": "+" if self.is_required else "*"}
        return plain if self.is_required else {**plain, "nargs": "?"}


class _Parser(argparse.ArgumentParser):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # As since Python 3.14: a word such as -1h is a value, which the command itself refuses.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += ", and one that begins with - needs the form OPTION=VALUE"
        raise UsageError(f"{message}; see {self.prog} --help")


class _Format(argparse.HelpFormatter):
    """Help of at most 80 columns, with the paragraphs of the docstring."""

    def __init__(self, prog: str) -> None:
        columns = os.environ.get("COLUMNS", "")
        if not columns.isdecimal():
            # Not by shutil, which takes longer to load than argparse.
            columns = str(os.get_terminal_size().columns if sys.stdout.isatty() else _WIDEST)
        super().__init__(prog, max_help_position=32, width=min(int(columns), _WIDEST) - 2)

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, prefix or "Usage: ")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        indent += "  "
        return "\n\n".join(
            textwrap.indent(paragraph.removeprefix(_VERBATIM), indent)
            if paragraph.startswith(_VERBATIM)
            else textwrap.fill(paragraph, width, initial_indent=indent, subsequent_indent=indent)
            for paragraph in text.split("\n\n")
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = f" {action.metavar}" if action.option_strings and action.metavar and action.nargs != 0 else ""
        return ", ".join(action.option_strings) + value or str(action.metavar)


def _parser(path: str, usage: str, text: str) -> _Parser:
    usage = f"{path} [OPTIONS] {usage}".rstrip().replace("%", "%%")
    return _Parser(path, usage, text.replace("%", "%%"), formatter_class=_Format, add_help=False, allow_abbrev=False)


def _add_help(options: argparse._ArgumentGroup) -> None:
    options.add_argument(*HELP, action="help", help="Show this message and exit.")


class Command:
    """A function as a command."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function: Final = function
        first, _, rest = (function.__doc__ or "").partition("\n")
        self.help: Final = f"{first}\n{textwrap.dedent(rest)}".strip()
        self.summary: Final = first_sentence(self.help)

    @cached_property
    def parameters(self) -> list[Parameter]:
        """The parameters in their order. They are read when the command runs: a family has many commands."""
        return list(_parameters(self.function))

    def invoke(self, path: str, words: Sequence[str]) -> Any:
        """Parse the words and call the function; for --help, print the help instead. UsageError."""
        positional = [each for each in self.parameters if not each.names]
        usage = (
            each.annotation.metavar if each.is_required else _bracket(each.annotation.metavar) for each in positional
        )
        parser = _parser(path, " ".join(usage), self.help)
        arguments, options = parser.add_argument_group("Arguments"), parser.add_argument_group("Options")
        for each in self.parameters:
            (options if each.names else arguments).add_argument(*(each.names or [each.key]), **each.settings())
        _add_help(options)
        is_verbatim = any(isinstance(each.annotation, Argument) and each.annotation.verbatim for each in positional)
        # Arguments may stand between options, but parse_intermixed_args loses what follows `--`.
        parse = parser.parse_args if is_verbatim or "--" in words else parser.parse_intermixed_args
        try:
            values = vars(parse(words))
        except SystemExit:
            return None  # after --help
        for each in self.parameters:
            if values[each.key] == [] and not each.is_required:
                values[each.key] = each.default
        return self.function(**{each.key: values[each.key] for each in self.parameters})


class Group:
    """A family of commands, such as `audit`."""

    def __init__(self, help: str) -> None:  # noqa: A002
        self.help: Final = help
        self.summary: Final = first_sentence(help)
        self.members: Final[dict[str, Command | Group]] = {}

    def command(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make the decorated function a command of the group."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.members[name] = Command(function)
            return function

        return add

    def invoke(self, path: str, words: Sequence[str]) -> Any:
        """Run the command that the first word names; for --help, print the help. UsageError."""
        if words and words[0] in HELP:
            print_help(path, self.help, {name: member.summary for name, member in self.members.items()})
            return None
        name = command_name(path, words, self.members)
        return self.members[name].invoke(f"{path} {name}", words[1:])


def print_help(path: str, text: str, summaries: Mapping[str, str], flags: Mapping[str, str] | None = None) -> None:
    """Print the help of a family of commands: its options and the summary of each command."""
    parser = _parser(path, "COMMAND [ARGS]...", text)
    options, commands = parser.add_argument_group("Options"), parser.add_argument_group("Commands")
    for name, explanation in (flags or {}).items():
        options.add_argument(name, action="store_true", help=explanation)
    _add_help(options)
    for name, summary in summaries.items():
        commands.add_argument(name, metavar=name, help=summary)
    parser.print_help()


def command_name(path: str, words: Sequence[str], known: Mapping[str, object]) -> str:
    """Return the first word if it is a known command. UsageError."""
    if words and words[0] in known:
        return words[0]
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake needs it

    problem = f"no such {'option' if words[0][:1] == '-' else 'command'} {words[0]!r}" if words else "missing command"
    close = get_close_matches(words[0], [*known]) if words else []
    guess = f"; did you mean {' or '.join(close)}?" if close else ""
    raise UsageError(f"{problem}{guess}; see {path} --help")


def first_sentence(text: str) -> str:
    """Return the first sentence, on one line."""
    line = " ".join(text.partition("\n\n")[0].split())
    found = re.match(r".*?\.(?= |$)", line)
    return line if found is None else found[0]


def _bracket(metavar: str) -> str:
    return metavar if metavar.startswith(("[", "--")) else f"[{metavar}]"


def _parameters(function: Callable[..., Any]) -> Iterator[Parameter]:
    """Yield the parameters of a command's function."""
    code: Any = function.__code__
    keys = code.co_varnames[: code.co_argcount]
    values = function.__defaults__ or ()
    defaults = dict(zip(keys[len(keys) - len(values) :], values, strict=True))
    hints = get_type_hints(function, include_extras=True)
    for key in keys:
        kind, annotation = get_args(hints[key])
        names: tuple[str, ...] = ()
        if isinstance(annotation, Option):
            names = annotation.names or (f"--{key.replace('_', '-')}",)
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]
        is_list = get_origin(kind) is list
        kind = get_args(kind)[0] if is_list else kind
        yield Parameter(key, names, kind, is_list, key not in defaults, defaults.get(key), annotation)
