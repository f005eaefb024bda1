"""Parse git command lines: the subcommand, whether it is read-only, and whether it contacts a remote."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from bonobofs.policy.role_lists import FAMILIES

Arguments = tuple[str, ...]

READING: Final = frozenset(
    """
    annotate blame cat-file check-attr check-ignore check-mailmap check-ref-format cherry column count-objects describe
    diff diff-files diff-index diff-pairs diff-tree difftool fast-export fmt-merge-msg for-each-ref for-each-repo
    format-patch fsck fsck-objects get-tar-commit-id grep help interpret-trailers last-modified log ls-files ls-tree
    mailinfo mailsplit merge-base merge-file merge-tree name-rev patch-id pickaxe range-diff refs request-pull rev-list
    rev-parse shortlog show show-branch show-index show-ref status stripspace unpack-file upload-archive upload-pack var
    verify-commit verify-pack verify-tag version whatchanged
    """.split()  # noqa: SIM905 - a list of words is read as such
)
"""Subcommands that every role may run. They write a file of the work tree only if an option names it."""
_VERBS: Final = {
    "bisect": ("log", "view", "visualize", "terms"),
    "bundle": ("verify", "list-heads", "create"),
    "notes": ("", "list", "show"),
    "reflog": ("", "show", "exists"),
    "remote": ("", "get-url"),
    "rerere": ("status", "diff", "remaining"),
    "sparse-checkout": ("list",),
    "stash": ("list", "show"),
    "submodule": ("", "status", "summary"),
    "worktree": ("list",),
}
"""Subcommands that are read-only with one of these first words; "" is none."""
_LISTING: Final = (
    "-l",
    "-a",
    "-r",
    "-v",
    "-vv",
    "-n",
    "--list",
    "--contains",
    "--no-contains",
    "--merged",
    "--no-merged",
)
_LISTING_ALONE: Final = (*_LISTING, "--show-current", "--points-at", "--column", "--all", "--remotes", "--verbose")
_ASKING: Final = ("--get", "--get-all", "--get-regexp", "--get-urlmatch", "--get-color", "--list", "-l", "get", "list")
_VALUED: Final = ("-C", "-c", "--git-dir", "--work-tree", "--namespace", "--super-prefix", "--config-env")
"""Options of git itself that may take the next word as their value."""
_TELLING: Final = ("-v", "--version", "-h", "--help", "--html-path", "--man-path", "--info-path")
_REMOTE: Final = ("push", "fetch", "pull", "ls-remote")
_MOST_ALIASES: Final = 20
SOURCE: Final = "source"
"""Name of the remote of a session that is its source."""


class Line(NamedTuple):
    """A command line of git."""

    options: Arguments
    """Words before the subcommand."""
    name: str
    """Subcommand that git would run. "!" is an alias for a program, "" means no subcommand."""
    arguments: Arguments


class GitRunner:
    """Run the real git in the working directory, with the options before the subcommand."""

    def __init__(self, program: str, options: Arguments) -> None:
        self._command: Final = (program, *options)

    def run(self, *words: str) -> tuple[int, str]:
        """Return exit status and standard output."""
        ran = subprocess.run([*self._command, *words], capture_output=True, stdin=subprocess.DEVNULL, check=False)
        return ran.returncode, os.fsdecode(ran.stdout)

    def output(self, *words: str, data: bytes) -> bytes:
        """Return standard output for the standard input `data`. The exit status is ignored."""
        return subprocess.run([*self._command, *words], input=data, capture_output=True, check=False).stdout

    def lines(self, *words: str, end: str = "\n") -> list[str]:
        """Return the output split at `end`, or [] if git fails."""
        status, text = self.run(*words)
        return text.split(end)[:-1] if status == 0 else []

    def line(self, *words: str) -> str:
        """Return the first line of the output, or ""."""
        return next(iter(self.lines(*words)), "")

    def commit(self, name: str) -> str:
        """Return the id of the commit that `name` resolves to, or ""."""
        return self.line("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") if name[:1] not in ("", "-") else ""


def parse_line(words: Sequence[str]) -> Line:
    """Parse the words after `git`."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in _TELLING:
        at += 2 if words[at] in _VALUED else 1
    if at >= len(words) or words[at] in _TELLING:
        return Line(tuple(words), "", ())
    return Line(tuple(words[:at]), words[at], tuple(words[at + 1 :]))


def resolve(program: str, line: Line) -> Line:
    """Expand the aliases of a command line."""
    for _ in range(_MOST_ALIASES):
        if line.name in READING or line.name in FAMILIES["git"]:
            break
        git = GitRunner(program, line.options)
        meaning = git.line("config", "--get", f"alias.{line.name}") if line.name else ""
        if not meaning or line.name in git.lines("--list-cmds=main"):
            break
        if meaning.startswith("!"):
            return line._replace(name="!")
        try:
            inner = parse_line(shlex.split(meaning))
        except ValueError:
            break
        line = Line(line.options + inner.options, inner.name, inner.arguments + line.arguments)
    return line


def positional_words(arguments: Sequence[str], valued: Collection[str] = ()) -> list[str]:
    """Return the positional words before `--`. The options `valued` take the next word as their value."""
    found, skip = [], False
    for word in arguments:
        if word == "--":
            break
        if skip:
            skip = False
        elif word in valued:
            skip = True
        elif not word.startswith("-") or word == "-":
            found.append(word)
    return found


def only_reads(line: Line) -> bool:
    """True if the command is read-only for the repository and the work tree."""
    name, arguments = line.name, line.arguments
    if not name or name in READING or arguments[:1] == ("--help",) or arguments == ("-h",):
        return True
    words = positional_words(arguments)
    if name in _VERBS:
        return (words[0] if words else "") in _VERBS[name] and not (name == "remote" and arguments[:1] == ("update",))
    if name in ("branch", "tag"):
        if any(word.split("=")[0] in _LISTING for word in arguments) and not (name == "branch" and "-f" in arguments):
            return True
        return not words and all(word.split("=")[0] in _LISTING_ALONE for word in arguments)
    if name == "config":
        return any(word in _ASKING for word in arguments) or (len(words) == 1 and len(arguments) == 1)
    if name == "symbolic-ref":
        return len(words) == 1 and "-d" not in arguments and "--delete" not in arguments
    return name == "archive" and not contacts_remote(line)


def contacts_remote(line: Line) -> bool:
    """True if the command contacts a repository other than the source."""
    words = positional_words(line.arguments)
    if line.name in _REMOTE:
        return words[:1] != [SOURCE]
    if line.name == "remote":
        return words[:1] in (["show"], ["update"], ["prune"])
    if line.name == "archive":
        return any(word.startswith("--remote") for word in line.arguments)
    return line.name == "clone" and any("://" in word or ":" in word.split("/")[0] for word in words)
