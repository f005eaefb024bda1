"""What Choragen kept in its own files, read so that it can be kept here: locks and governance.

Everything that means something else here, or nothing, is said with its line: nothing is widened, and nothing is dropped
in silence. Choragen's patterns are ours but for braces, which are written out, and for `**` within a name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import yaml

from bonobofs.errors import PolicyError
from bonobofs.policy.calls import TOOLS, WRITING
from bonobofs.policy.pattern import parse

_ALL: Final = ("create", "modify", "delete")
_WRITER: Final = "impl"
"""The role that has write_file there; the tools that read have all."""
_BRACES: Final = re.compile(r"\{([^{}]*,[^{}]*)\}")
_MOST: Final = 1000
_YEAR: Final = 365 * 86_400


class Lock(NamedTuple):
    """One chain's locks. `seconds` is how long they are still to last."""

    line: int
    chain: str
    agent: str | None
    patterns: list[str]
    seconds: float
    reason: str


class Entry(NamedTuple):
    """One entry of governance, with as much of it as it says."""

    line: int
    pattern: str
    actions: frozenset[str]


def read_locks(text: str, now: datetime) -> tuple[list[Lock], list[str]]:
    """The locks of `locks.json` that have not ended, and what of it cannot be kept. PolicyError: it is none."""
    chains = _child(_document(text), "chains")
    locks: list[Lock] = []
    lost: list[str] = []
    for key, node in _items(chains):
        line = key.start_mark.line + 1
        fields = {name.value: value for name, value in _items(node)}
        patterns: list[str] = []
        for each in _sequence(fields.get("files")):
            patterns += _patterns(each.value, each.start_mark.line + 1, lost)
        ends = fields.get("expiresAt")
        seconds = float(_YEAR) if ends is None else (_moment(ends.value, line) - now).total_seconds()
        if ends is None:
            lost.append(f"line {line}: {key.value} never ends there; here it does in a year")
        if seconds <= 0:
            lost.append(f"line {line}: {key.value} has ended, and is left out")
        elif patterns:
            agent = str(fields["agent"].value) if "agent" in fields else None
            locks.append(Lock(line, key.value, agent, patterns, seconds, "imported from Choragen"))
    return locks, lost


def read_governance(text: str) -> tuple[str, list[str]]:
    """A policy, as TOML, that admits no more than `choragen.governance.yaml` did, and what of that cannot be kept."""
    root = _document(text)
    lost: list[str] = []
    parts = _Policy()
    for key, node in _items(root):
        line = key.start_mark.line + 1
        if key.value == "mutations":
            parts.take_mutations(node, lost)
        elif key.value == "roles":
            parts.take_roles(node, lost)
        elif key.value == "collision_detection":
            lost += _collisions(node)
        else:
            lost.append(f"line {line}: {key.value} means nothing here")
    return parts.text(), lost


class _Policy:
    """A policy in the making."""

    def __init__(self) -> None:
        self.protect: list[str] = []
        self.keep: list[str] = []
        self.rules: list[tuple[str, list[str]]] = []
        self.roles: dict[str, tuple[list[str], list[str]]] | None = None

    def take_mutations(self, node: yaml.Node, lost: list[str]) -> None:
        for key, entries in _items(node):
            for entry in _entries(entries, lost):
                patterns = _patterns(entry.pattern, entry.line, lost)
                if key.value == "allow":
                    self._allow(f"choragen-{entry.line}", entry, patterns, lost)
                elif key.value == "deny":
                    self._deny(entry, patterns, lost)
                elif key.value == "approve":
                    self.protect += patterns
                    lost.append(f"line {entry.line}: {entry.pattern} needed a person's yes there; it is refused here")
                else:
                    lost.append(f"line {entry.line}: {key.value} means nothing here")

    def take_roles(self, node: yaml.Node, lost: list[str]) -> None:
        self.roles = {}
        for role, body in _items(node):
            write: list[str] = []
            deny: list[str] = []
            for key, entries in _items(body):
                for entry in _entries(entries, lost):
                    patterns = _patterns(entry.pattern, entry.line, lost)
                    if key.value == "deny":
                        deny += patterns
                        if entry.actions != frozenset(_ALL):
                            lost.append(_narrower(entry, "every change is refused here"))
                    elif key.value == "allow" and self._may_write(entry, patterns, lost):
                        write += patterns
            self.roles[role.value] = (write, deny)

    def text(self) -> str:
        lines = [
            "# Imported from choragen.governance.yaml. Names that begin with a dot are as any other there.",
            # Roles decide alone there; without any, only what is allowed is.
            f'default = "{"deny" if self.roles is None else "allow"}"',
            'hidden = ["**"]',
        ]
        for table, paths in (("protect", self.protect), ("keep", self.keep)):
            if paths:
                lines += ["", f"[[{table}]]", f"paths = {_toml(paths)}"]
        if self.roles is None:
            for name, paths in self.rules:
                lines += ["", "[[rule]]", f"name = {_toml(name)}", f"paths = {_toml(paths)}"]
        # Who has no role there may do nothing; here there is one by default, which would write everywhere.
        roles = self.roles or {}
        for role, (write, deny) in ({} if self.roles is None else {"agent": ([], []), **roles}).items():
            lines += ["", f"[role.{_toml(role)}]", f"write = {_toml(write)}", f"deny = {_toml(deny)}"]
            if role in roles:
                lines.append(f"tools = {_toml([tool for tool in TOOLS if tool != WRITING or role == _WRITER])}")
        return "\n".join(lines) + "\n"

    def _allow(self, name: str, entry: Entry, patterns: list[str], lost: list[str]) -> None:
        if patterns and self._may_write(entry, patterns, lost):
            self.rules.append((name, patterns))

    def _may_write(self, entry: Entry, patterns: list[str], lost: list[str]) -> bool:
        """Whether what it allows can be said here; of what may be made and changed, nothing may be deleted."""
        if entry.actions == frozenset(_ALL):
            return True
        if entry.actions == frozenset(_ALL[:2]):
            self.keep += patterns
            return True
        lost.append(_narrower(entry, "nothing of it is allowed here"))
        return False

    def _deny(self, entry: Entry, patterns: list[str], lost: list[str]) -> None:
        if entry.actions == frozenset(_ALL[2:]):
            self.keep += patterns
            return
        self.protect += patterns
        if entry.actions != frozenset(_ALL):
            lost.append(_narrower(entry, "every change is refused here"))


def _narrower(entry: Entry, instead: str) -> str:
    actions = ", ".join(sorted(entry.actions)) or "no action"
    return f"line {entry.line}: {entry.pattern} for {actions} alone cannot be said here; {instead}"


def _collisions(node: yaml.Node) -> list[str]:
    lost = []
    for key, value in _items(node):
        line = key.start_mark.line + 1
        if (key.value, value.value) == ("on_collision", "warn"):
            lost.append(f"line {line}: a lease refuses here, it does not only warn")
        elif (key.value, value.value) == ("strategy", "directory-lock"):
            lost.append(f"line {line}: a lease covers what its patterns match; lease directories as dir/")
        elif key.value not in ("on_collision", "strategy"):
            lost.append(f"line {line}: {key.value} means nothing here")
    return lost


def _entries(node: yaml.Node, lost: list[str]) -> Iterator[Entry]:
    for each in _sequence(node):
        line = each.start_mark.line + 1
        if isinstance(each, yaml.ScalarNode):
            yield Entry(line, str(each.value), frozenset(_ALL))
            continue
        fields = {key.value: value for key, value in _items(each)}
        pattern = fields.get("pattern")
        if not isinstance(pattern, yaml.ScalarNode):
            lost.append(f"line {line}: an entry without a pattern means nothing")
            continue
        actions = {action.value for action in _sequence(fields.get("actions"))} if "actions" in fields else set(_ALL)
        unknown = sorted(actions - set(_ALL))
        lost += [f"line {line}: the action {action} means nothing, there as here" for action in unknown]
        yield Entry(line, str(pattern.value), frozenset(actions & set(_ALL)))


def _patterns(text: str, line: int, lost: list[str]) -> list[str]:
    """A pattern in our spelling, several where it had braces; none where it cannot be said."""
    pending, found = [text.removeprefix("./")], list[str]()
    while pending and len(pending) + len(found) <= _MOST:
        each = pending.pop(0)
        braces = _BRACES.search(each)
        if braces is None:
            found.append(each)
        else:
            pending += [each[: braces.start()] + one + each[braces.end() :] for one in braces[1].split(",")]
    try:
        if pending or any("{" in one or "}" in one for one in found):
            raise PolicyError("its braces cannot be written out")
        for one in found:
            parse(one)
    except PolicyError as error:
        lost.append(f"line {line}: {text} is left out: {error}")
        return []
    return found


def _document(text: str) -> yaml.Node:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise PolicyError(f"it cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        raise PolicyError("it is not a file of Choragen: it must be a table of keys")
    return root


def _items(node: yaml.Node | None) -> list[tuple[yaml.Node, yaml.Node]]:
    return node.value if isinstance(node, yaml.MappingNode) else []


def _sequence(node: yaml.Node | None) -> list[yaml.Node]:
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _child(node: yaml.Node, name: str) -> yaml.Node:
    for key, value in _items(node):
        if key.value == name:
            return value
    raise PolicyError(f"it is not a file of Choragen: it has no {name}")


def _moment(text: str, line: int) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise PolicyError(f"line {line}: {text!r} is no moment") from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _toml(value: Any) -> str:
    """A string or a list of strings; of JSON's spellings those are TOML's too."""
    return json.dumps(value, ensure_ascii=False)
