"""Parse a command line of bd: the real bd runs it if it only reads; otherwise it becomes one or more issue operations.

Commands and flags that are not listed here are refused. bd has several hundred commands, its read-only mode lets many
of them write, and most flags can select another database, another name, or a way around a rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple


class UnsupportedCommand(Exception):  # noqa: N818 - a refusal, not an error
    """The gate refuses a command line. `rule` is the rule without `beads.`, `about` a sentence with details."""

    def __init__(self, rule: str, about: str = "") -> None:
        super().__init__(rule, about)
        self.rule: Final = rule
        self.about: Final = about


class Form(NamedTuple):
    """The flags and the number of words of one command."""

    values: Mapping[str, str]
    """Flags with a value: the name of the flag for each spelling, without dashes."""
    switches: Mapping[str, str]
    """Flags without a value, in the same form."""
    least: int
    """Minimum and maximum number of words that are not flags."""
    most: int


class Parsed(NamedTuple):
    """A parsed command line."""

    words: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    """All values of each flag, in order."""
    switches: frozenset[str]

    def last(self, name: str) -> str | None:
        """Return the last value of a flag, which counts if the flag takes one; None if it is absent."""
        return self.values[name][-1] if name in self.values else None

    def each(self, name: str) -> list[str]:
        """Return the values of a flag that takes several, also split at commas."""
        return [part.strip() for value in self.values[name] for part in value.split(",")]


def form(values: str = "", switches: str = "", words: tuple[int, int] = (0, 0)) -> Form:
    """Make a form from flags such as `assignee:a`: the name, then its other spellings after colons."""
    return Form(_spelled(values), _spelled(switches), *words)


def parse(arguments: Sequence[str], form: Form) -> Parsed:
    """Parse the words of one command.

    Raises UnsupportedCommand for an unknown flag, a missing value, a wrong number of words, or a file (`@...`).
    """
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
            _take(form, name, value if has_value else None, rest, values, switches)
        else:
            # `-p1`, `-p=1`, `-p 1`, and several switches in one argument, which may end in a flag with a value.
            letters = argument[1:]
            while letters:
                letter, letters = letters[0], letters[1:]
                if letter in form.switches:
                    switches.add(form.switches[letter])
                else:
                    _take(form, letter, letters.removeprefix("=") if letters else None, rest, values, switches)
                    break
    for text in (*words, *(text for texts in values.values() for text in texts)):
        if text.startswith("@"):
            raise UnsupportedCommand("file", f"This is about {text!a}.")
    if not form.least <= len(words) <= form.most:
        takes = f"at least {form.least}" if len(words) < form.least else f"at most {form.most}"
        raise UnsupportedCommand("form", f"It has {len(words)} words that are not flags, and takes {takes}.")
    return Parsed(tuple(words), {name: tuple(texts) for name, texts in values.items()}, frozenset(switches))


def _take(
    form: Form, name: str, value: str | None, rest: list[str], values: dict[str, list[str]], switches: set[str]
) -> None:
    flag = f"{'--' if len(name) > 1 else '-'}{ascii(name)[1:-1]}"
    if name in form.switches:
        if value not in (None, "true"):
            raise UnsupportedCommand("flag", f"This is about {flag}, which has no value.")
        switches.add(form.switches[name])
    elif name in form.values:
        if value is None and not rest:
            raise UnsupportedCommand("form", f"A value is missing after {flag}.")
        values.setdefault(form.values[name], []).append(rest.pop(0) if value is None else value)
    else:
        raise UnsupportedCommand("flag", f"This is about {flag}.")


def _spelled(flags: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for flag in flags.split():
        name, *others = flag.split(":")
        names |= dict.fromkeys((name, *others), name)
    return names


def joined(forms: Iterable[Form]) -> Form:
    """Merge forms: the flags of all, the number of words of the last."""
    every = list(forms)
    values = {spelling: name for each in every for spelling, name in each.values.items()}
    switches = {spelling: name for each in every for spelling, name in each.switches.items()}
    return Form(values, switches, every[-1].least, every[-1].most)


MANY: Final = 1000
_WORD: Final = re.compile(r"[a-z][a-z-]*")
_EVERYWHERE: Final = form(switches="json quiet:q verbose:v")
"""Flags that every command takes. They change the output only."""
_TIMES: Final = "created-after created-before updated-after updated-before closed-after closed-before"
_WHICH: Final = (
    "assignee:a label:l label-any status:s type:t limit:n desc-contains notes-contains priority-min priority-max"
    f" sort has-metadata-key metadata-field {_TIMES}"
)
_WITHOUT: Final = "no-assignee no-labels empty-description"

READING: Final[Mapping[str, Form]] = {
    "list": form(
        f"{_WHICH} priority:p title title-contains exclude-label exclude-type label-pattern label-regex parent"
        " spec mol-type defer-after defer-before due-after due-before format",
        f"{_WITHOUT} all long pretty tree flat ready overdue deferred pinned no-pinned no-parent no-pager include-gates"
        " include-infra include-templates reverse:r skip-labels",
    ),
    "show": form("as-of", "short long children refs thread include-comments include-dependents local-time", (1, MANY)),
    "ready": form(
        "assignee:a exclude-label exclude-type has-metadata-key label:l label-any limit:n metadata-field mol mol-type"
        " parent priority:p sort:s type:t",
        "explain gated include-deferred include-ephemeral plain pretty unassigned:u",
    ),
    "blocked": form("parent"),
    "children": form("", "", (1, 1)),
    "count": form(
        f"assignee:a label:l label-any status:s type:t priority:p priority-min priority-max title title-contains"
        f" desc-contains notes-contains {_TIMES}",
        f"{_WITHOUT} by-assignee by-label by-priority by-status by-type",
    ),
    "search": form(f"{_WHICH} external-contains query", f"{_WITHOUT} long reverse:r", (0, MANY)),
    "query": form("limit:n sort", "all:a long reverse:r parse-only", (1, 1)),
    "stale": form("days:d limit:n status:s"),
    "lint": form("type:t status:s", "", (0, MANY)),
    "history": form("limit:n", "", (1, 1)),
    "graph": form("", "all compact box dot", (0, 1)),
    "status": form("", "all assigned no-activity"),
    "statuses": form(),
    "types": form(),
    "state": form("", "", (2, 2)),
    "info": form(),
    "version": form(),
    "where": form(),
    "quickstart": form(),
    "prime": form("", "full mcp"),
    "help": form("", "", (0, MANY)),
    "comments": form("", "local-time", (1, 1)),
    "dep list": form("direction type:t", "", (1, MANY)),
    "dep tree": form("direction max-depth:d status format", "reverse show-all-paths", (1, 1)),
    "dep cycles": form(),
    "label list": form("", "", (1, 1)),
    "label list-all": form(),
    "epic status": form("", "eligible-only"),
    "gate list": form("limit:n", "all:a"),
    "gate show": form("", "", (1, 1)),
    "swarm list": form(),
    "swarm status": form("", "", (1, 1)),
}
"""Commands that the real bd runs in its read-only mode, with the flags that only read."""

WRITING: Final[Mapping[str, Form]] = {
    "create": form(
        "title type:t priority:p description:d design acceptance notes assignee:a labels:l:label parent deps",
        "silent",
        (0, 1),
    ),
    "update": form(
        "title type:t priority:p description:d design acceptance notes assignee:a status:s add-label remove-label"
        " set-labels parent",
        "claim",
        (1, MANY),
    ),
    "close": form("reason:r", "", (1, MANY)),
    "reopen": form("reason:r", "", (1, MANY)),
    "dep": form("blocks:b", "", (1, 1)),
    "dep add": form("type:t blocked-by depends-on", "", (1, 2)),
    "dep remove": form("", "", (2, 2)),
    "label add": form("", "", (2, MANY)),
    "label remove": form("", "", (2, MANY)),
    "comment": form("", "", (2, MANY)),
    "comments add": form("", "", (2, 2)),
}
"""Commands that become operations of the gate."""

_LISTS: Final = {
    "labels": "labels",
    "deps": "dependencies",
    "add-label": "add_labels",
    "remove-label": "remove_labels",
    "set-labels": "labels",
}
"""The field of the gate for each flag that takes several values."""
_ALIASES: Final = {"new": "create", "done": "close", "view": "show", "dep rm": "dep remove"}
_FAMILIES: Final = frozenset(name.split()[0] for name in (*READING, *WRITING) if " " in name)
_FILES: Final = frozenset({"body-file", "design-file", "reason-file", "file", "graph", "stdin", "metadata", "output"})
"""Flags by which bd would read or write a file. Their refusal gives this reason."""


class ReadCommand(NamedTuple):
    """A command line for the real bd, which only reads. It is rebuilt from the parsed one."""

    arguments: tuple[str, ...]
    """All arguments, the command first."""


OPERATIONS: Final = ("create", "update", "close", "reopen", "tie", "untie", "label", "comment")


class Step(NamedTuple):
    """One operation of the gate."""

    name: str
    """One of OPERATIONS."""
    issue: str
    arguments: Mapping[str, Any]


class WriteCommand(NamedTuple):
    """Operations for the gate, in order, until one is refused."""

    command: str
    steps: tuple[Step, ...]
    json: bool
    silent: bool = False


def parse_command_line(arguments: Sequence[str]) -> ReadCommand | WriteCommand:
    """Parse a command line. Raises UnsupportedCommand if the gate refuses it."""
    before, words = _split_flags(arguments)
    if not words:
        return ReadCommand(("help",))
    name, rest = _split_command(words)
    if name not in READING and name not in WRITING:
        raise UnsupportedCommand("command", f"This is about {ascii(name)[1:-1]}.")
    if {"-h", "--help"} & {*before, *rest[: rest.index("--") if "--" in rest else None]}:
        return ReadCommand(("help", *name.split()))
    if name == "help" and not all(_WORD.fullmatch(word) for word in rest):
        raise UnsupportedCommand("form", "bd help takes the name of a command.")
    every = [*before, *rest]
    if files := [argument for argument in every if argument.startswith("--") and _flag(argument) in _FILES]:
        raise UnsupportedCommand("file", f"This is about --{_flag(files[0])}.")
    parsed = parse(every, joined((_EVERYWHERE, {**READING, **WRITING}[name])))
    if name in READING:
        return ReadCommand(_rebuilt(name, parsed))
    return WriteCommand(name, tuple(_STEPS[name](parsed)), "json" in parsed.switches, "silent" in parsed.switches)


def _split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags before the command, which take no values, and the rest."""
    for at, argument in enumerate(arguments):
        if not argument.startswith("-"):
            return list(arguments[:at]), list(arguments[at:])
        if argument in ("--version", "-V"):
            return [], ["version"]
        if argument not in {"--help", "-h"}:
            parse([argument], _EVERYWHERE)
    return list(arguments), []


def _split_command(words: list[str]) -> tuple[str, list[str]]:
    """Return the command, of one or two words, and the words after it."""
    if words[0] in _FAMILIES and len(words) > 1:
        two = " ".join(words[:2])
        two = _ALIASES.get(two, two)
        if two in READING or two in WRITING:
            return two, words[2:]
        if words[0] not in READING and words[0] not in WRITING and not words[1].startswith("-"):
            return two, words[2:]
        # Otherwise the first word is a command of its own, as in `comments ID`.
    return _ALIASES.get(words[0], words[0]), words[1:]


def _rebuilt(name: str, parsed: Parsed) -> tuple[str, ...]:
    flags = [f"--{flag}={value}" for flag, texts in parsed.values.items() for value in texts]
    words = parsed.words if name == "help" else ("--", *parsed.words) if parsed.words else ()
    return (*name.split(), *flags, *(f"--{switch}" for switch in sorted(parsed.switches)), *words)


def _flag(argument: str) -> str:
    return argument[2:].partition("=")[0]


def _fields(parsed: Parsed) -> dict[str, Any]:
    """Return the values of the flags, by the names of the gate's fields."""
    return {
        _LISTS.get(name, name): parsed.each(name) if name in _LISTS else parsed.last(name) for name in parsed.values
    }


def _create(parsed: Parsed) -> list[Step]:
    fields = _fields(parsed)
    if ("title" in fields) == bool(parsed.words):
        raise UnsupportedCommand("form", "It needs one title.")
    fields["title"] = fields.get("title", *parsed.words)
    fields["type"] = fields.get("type") or "task"
    fields["priority"] = fields.get("priority") or 2
    return [Step("create", "", fields)]


def _update(parsed: Parsed) -> list[Step]:
    fields = _fields(parsed)
    if "claim" in parsed.switches:
        fields["claim"] = True
    return [Step("update", issue, fields) for issue in parsed.words]


def _close_or_reopen(name: str) -> Any:
    return lambda parsed: [Step(name, issue, {"reason": parsed.last("reason")}) for issue in parsed.words]


def _tie(parsed: Parsed) -> list[Step]:
    others = [*parsed.words[1:], *(parsed.values.get("blocked-by", ())), *(parsed.values.get("depends-on", ()))]
    if len(others) != 1:
        raise UnsupportedCommand("form", "It needs an issue and one blocker.")
    return [Step("tie", parsed.words[0], {"other": others[0], "type": parsed.last("type") or "blocks"})]


def _block(parsed: Parsed) -> list[Step]:
    blocked = parsed.last("blocks")
    if blocked is None:
        raise UnsupportedCommand("form", "It needs --blocks with the issue that is blocked.")
    return [Step("tie", blocked, {"other": parsed.words[0], "type": "blocks"})]


def _label(way: str) -> Any:
    return lambda parsed: [Step("label", issue, {way: [parsed.words[-1]]}) for issue in parsed.words[:-1]]


def _comment(parsed: Parsed) -> list[Step]:
    return [Step("comment", parsed.words[0], {"text": " ".join(parsed.words[1:])})]


_STEPS: Final[Mapping[str, Any]] = {
    "create": _create,
    "update": _update,
    "close": _close_or_reopen("close"),
    "reopen": _close_or_reopen("reopen"),
    "dep": _block,
    "dep add": _tie,
    "dep remove": lambda parsed: [Step("untie", parsed.words[0], {"other": parsed.words[1]})],
    "label add": _label("add"),
    "label remove": _label("remove"),
    "comment": _comment,
    "comments add": _comment,
}
