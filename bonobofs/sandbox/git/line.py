"""A command line of git as git itself reads it: options of git, the subcommand, and what an alias stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

_FLAGS: Final = frozenset(
    {
        "-p",
        "--paginate",
        "-P",
        "--no-pager",
        "--no-replace-objects",
        "--no-lazy-fetch",
        "--no-optional-locks",
        "--no-advice",
        "--literal-pathspecs",
        "--glob-pathspecs",
        "--noglob-pathspecs",
        "--icase-pathspecs",
    }
)
_TELLING: Final = frozenset(
    {"-v", "--version", "-h", "--help", "--exec-path", "--html-path", "--man-path", "--info-path"}
)
_ELSEWHERE: Final = ("--git-dir", "--work-tree", "--namespace", "--super-prefix", "--attr-source", "--exec-path")
"""What leads to another repository, or to other programs. Takes a value, after `=` or as the next word."""
_MOST_ALIASES: Final = 20


class Line(NamedTuple):
    """One call of git."""

    options: tuple[str, ...]
    """What stands before the subcommand, as it stands."""
    name: str
    """The subcommand; "" where there is none, and git only tells something."""
    arguments: tuple[str, ...]
    directories: tuple[str, ...] = ()
    """Where `-C` leads, one after the other."""
    elsewhere: bool = False
    """It names a repository, or the programs to run, by options of its own."""


class NotUnderstood(Exception):  # noqa: N818 - no fault: it is refused
    """A command line of which cannot be told what git would do; the text is one of `git.option`, `git.alias`."""


def split(words: tuple[str, ...]) -> Line:
    """The command line that follows the word `git`. NotUnderstood: an option that is none of git's as it is known."""
    directories: list[str] = []
    elsewhere = False
    at = 0
    while at < len(words):
        word = words[at]
        name, equals, _ = word.partition("=")
        if word in _TELLING:
            return Line(words, "", ())
        if word in ("-C", "-c") or (name == "--config-env" and not equals):
            if word == "-C":
                directories += words[at + 1 : at + 2]
            at += 2
        elif word in _FLAGS or name in ("--config-env", "--list-cmds"):
            if name == "--list-cmds":
                return Line(words, "", ())
            at += 1
        elif word == "--bare" or name in _ELSEWHERE:
            elsewhere = True
            at += 1 if equals or word == "--bare" else 2
        elif word.startswith("-"):
            raise NotUnderstood("git.option")
        else:
            return Line(words[:at], word, words[at + 1 :], tuple(directories), elsewhere)
    return Line(words, "", (), tuple(directories), elsewhere)


def resolve(line: Line, known: Callable[[str], bool], meaning: Callable[[Line], str]) -> Line:
    """The line in which every alias is what it stands for. Nothing is executed.

    `known` tells the subcommands of git itself, which no alias can be named like; `meaning` gives the text of the alias
    that a line names, "" for none. NotUnderstood: an alias for a program, a circle, or a text that git does not take.
    """
    seen: set[str] = set()
    while line.name and not known(line.name):
        text = meaning(line)
        if not text:
            return line
        if text.startswith("!") or line.name in seen or len(seen) >= _MOST_ALIASES:
            raise NotUnderstood("git.alias")
        seen.add(line.name)
        other = split(_words(text))
        line = Line(
            line.options + other.options,
            other.name,
            other.arguments + line.arguments,
            line.directories + other.directories,
            line.elsewhere or other.elsewhere,
        )
    return line


def _words(text: str) -> tuple[str, ...]:
    """The words of an alias, split as git splits them: by white space, with quotes and backslashes."""
    words: list[str] = []
    word: list[str] | None = None
    quote = ""
    characters = iter(text.strip())
    for character in characters:
        if not quote and character.isspace():
            if word is not None:
                words.append("".join(word))
                word = None
            continue
        word = word if word is not None else []
        if not quote and character in "'\"":
            quote = character
        elif character == quote:
            quote = ""
        elif character == "\\" and quote != "'":
            following = next(characters, None)
            if following is None:
                raise NotUnderstood("git.alias")
            word.append(following)
        else:
            word.append(character)
    if quote:
        raise NotUnderstood("git.alias")
    return tuple(words if word is None else [*words, "".join(word)])
