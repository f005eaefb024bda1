"""Read the files of Choragen (`choragen.governance.yaml`, `locks.json`) as a policy and as leases.

`bonobofs policy import` and `bonobofs lease import` load this script. It reports, with its line, each entry that has
another meaning in bonobofs, or none. It never widens an entry, and it reports each entry that it drops. It expands
braces in patterns. It does not support `**` within a name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from bonobofs.errors import PolicyError
from bonobofs.policy.overlap import patterns_meet
from bonobofs.policy.pattern import parse
from bonobofs.policy.role_lists import TOOLS, WRITING

_BRACES: Final = re.compile(r"\{([^{}]*,[^{}]*)\}")
_MOST: Final = 1000


def text_of(file: Path) -> str:
    """Read a file. PolicyError: it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def patterns_of(node: yaml.Node, lost: list[str]) -> list[str]:
    if not isinstance(node, yaml.ScalarNode):
        lost.append(f"line {line_of(node)}: what stands there is no pattern")
        return []
    return spelled_out(str(node.value), line_of(node), lost)


def spelled_out(text: str, line: int, lost: list[str]) -> list[str]:
    """Return a pattern in bonobofs's syntax: several if it has braces, none if it cannot be expressed."""
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


def document_of(text: str) -> yaml.Node:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise PolicyError(f"it cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        raise PolicyError("it is not a file of Choragen: it must be a table of keys")
    return root


def items_of(node: yaml.Node | None) -> list[tuple[yaml.Node, yaml.Node]]:
    return node.value if isinstance(node, yaml.MappingNode) else []


def table_of(key: yaml.Node, node: yaml.Node, lost: list[str]) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return the entries of a table. Any other value except null is reported in `lost`."""
    if not isinstance(node, yaml.MappingNode) and not is_null(node):
        lost.append(means_nothing(key, node))
    return items_of(node)


def list_of(key: yaml.Node, node: yaml.Node, lost: list[str]) -> list[yaml.Node]:
    """Return the entries of a list. Any other value except null is reported in `lost`."""
    if isinstance(node, yaml.SequenceNode):
        return node.value  # type: ignore[no-any-return] # PyYAML says Any
    if not is_null(node):
        lost.append(f"line {line_of(node)}: {key.value} is no list, and means nothing")
    return []


def is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def means_nothing(key: yaml.Node, node: yaml.Node) -> str:
    what = f"{key.value}: {node.value}" if isinstance(node, yaml.ScalarNode) else str(key.value)
    return f"line {line_of(key)}: {what} means nothing here"


def moment_of(node: yaml.Node) -> datetime | None:
    """Parse a time in ISO 8601, in UTC if it has no zone. None: it is not a time."""
    try:
        found = datetime.fromisoformat(str(node.value))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


_ALL: Final = ("create", "modify", "delete")
_READING: Final = frozenset({"read_file", "list_files", "search_files"})
_WRITER: Final = "impl"
"""The role of Choragen that has write_file. All roles have the tools that read."""


class Entry(NamedTuple):
    """One entry of the governance file."""

    line: int
    pattern: str
    actions: frozenset[str]
    reason: str = ""


def read_governance(text: str) -> tuple[str, list[str]]:
    """Return a policy in TOML that permits no more than the file, and a line for each part that is lost."""
    root = document_of(text)
    lost: list[str] = []
    parts = _Policy()
    for key, node in items_of(root):
        if key.value == "mutations":
            parts.take_mutations(key, node, lost)
        elif key.value == "roles":
            parts.take_roles(key, node, lost)
        elif key.value == "collision_detection":
            lost += _collisions(key, node)
        else:
            lost.append(means_nothing(key, node))
    parts.compare(lost)
    return parts.text(), lost


class _Policy:
    """The parts of the policy, collected from the governance file."""

    def __init__(self) -> None:
        self.protect: list[str] = []
        self.keep: list[str] = []
        self.rules: list[tuple[str, list[str]]] = []
        self.roles: dict[str, tuple[list[str], list[str]]] | None = None
        self.reasons: list[tuple[str, str]] = []
        self._deletable: list[tuple[Entry, list[str]]] = []
        """Entries that let Choragen delete files. A [[keep]] of another entry prevents that in bonobofs."""
        self._kept: list[tuple[Entry, list[str]]] = []

    def take_mutations(self, table: yaml.Node, node: yaml.Node, lost: list[str]) -> None:
        for key, entries in table_of(table, node, lost):
            if key.value not in ("allow", "deny", "approve"):
                lost.append(means_nothing(key, entries))
                continue
            for entry in _entries(key, entries, lost):
                patterns = self._patterns_of(entry, lost)
                if key.value == "allow":
                    self._allow(f"choragen-{entry.line}", entry, patterns, lost)
                elif key.value == "deny":
                    self._deny(entry, patterns, lost)
                else:
                    self.protect += patterns
                    lost.append(f"line {entry.line}: {entry.pattern} needed a person's yes there; it is refused here")

    def take_roles(self, table: yaml.Node, node: yaml.Node, lost: list[str]) -> None:
        self.roles = {}
        for role, body in table_of(table, node, lost):
            write: list[str] = []
            deny: list[str] = []
            for key, entries in table_of(role, body, lost):
                if key.value not in ("allow", "deny"):
                    lost.append(means_nothing(key, entries))
                    continue
                for entry in _entries(key, entries, lost):
                    patterns = self._patterns_of(entry, lost)
                    if key.value == "deny":
                        deny += patterns
                        if entry.actions != frozenset(_ALL):
                            lost.append(_narrower(entry, "every change is refused here"))
                    elif self._may_write(entry, patterns, lost):
                        write += patterns
            self.roles[role.value] = (write, deny)

    def compare(self, lost: list[str]) -> None:
        """Report the paths that Choragen lets delete and bonobofs does not, because another entry keeps them."""
        for entry, patterns in self._deletable:
            for other, kept in self._kept:
                if any(patterns_meet(one, two) for one in patterns for two in kept):
                    lost.append(
                        f"line {entry.line}: what {entry.pattern} matches may be deleted there; "
                        f"here not where {other.pattern} of line {other.line} does too"
                    )
        if self.roles is not None:
            lost += [
                f"line {name.removeprefix('choragen-')}: beside roles this decides nothing, there as here"
                for name, _ in self.rules
            ]

    def text(self) -> str:
        lines = [
            "# Imported from choragen.governance.yaml. Names that begin with a dot are as any other there.",
            *(f"# {_comment(pattern)}: {_comment(reason)}" for pattern, reason in self.reasons),
            # In Choragen the roles alone decide. Without roles, only the allowed paths may be changed.
            f'default = "{"deny" if self.roles is None else "allow"}"',
            'hidden = ["**"]',
        ]
        for table, paths in (("protect", self.protect), ("keep", self.keep)):
            if paths:
                lines += ["", f"[[{table}]]", f"paths = {_toml(paths)}"]
        if self.roles is None:
            for name, paths in self.rules:
                lines += ["", "[[rule]]", f"name = {_toml(name)}", f"paths = {_toml(paths)}"]
        # In Choragen an agent without a role may do nothing. The built-in role of bonobofs would write everywhere.
        roles = self.roles or {}
        for role, (write, deny) in ({} if self.roles is None else {"agent": ([], []), **roles}).items():
            lines += ["", f"[role.{_toml(role)}]", f"write = {_toml(write)}", f"deny = {_toml(deny)}"]
            if role in roles:
                writing = {WRITING} if role == _WRITER else set()
                lines.append(f"tools = {_toml([tool for tool in TOOLS if tool in _READING | writing])}")
        return "\n".join(lines) + "\n"

    def _patterns_of(self, entry: Entry, lost: list[str]) -> list[str]:
        if entry.reason:
            self.reasons.append((entry.pattern, entry.reason))
        return spelled_out(entry.pattern, entry.line, lost)

    def _allow(self, name: str, entry: Entry, patterns: list[str], lost: list[str]) -> None:
        if patterns and self._may_write(entry, patterns, lost):
            self.rules.append((name, patterns))

    def _may_write(self, entry: Entry, patterns: list[str], lost: list[str]) -> bool:
        """True if the entry can be expressed. An entry without `delete` becomes a [[keep]], too."""
        if entry.actions == frozenset(_ALL):
            self._deletable.append((entry, patterns))
            return True
        if entry.actions == frozenset(_ALL[:2]):
            self.keep += patterns
            self._kept.append((entry, patterns))
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


def _collisions(table: yaml.Node, node: yaml.Node) -> list[str]:
    lost: list[str] = []
    for key, value in table_of(table, node, lost):
        if (key.value, value.value) == ("on_collision", "warn"):
            lost.append(f"line {line_of(key)}: a lease refuses here, it does not only warn")
        elif (key.value, value.value) == ("strategy", "directory-lock"):
            lost.append(f"line {line_of(key)}: a lease covers what its patterns match; lease directories as dir/")
        elif (key.value, value.value) not in (("on_collision", "block"), ("strategy", "file-lock")):
            lost.append(means_nothing(key, value))
    return lost


def _entries(key: yaml.Node, node: yaml.Node, lost: list[str]) -> Iterator[Entry]:
    for each in list_of(key, node, lost):
        line = line_of(each)
        if isinstance(each, yaml.ScalarNode):
            yield Entry(line, str(each.value), frozenset(_ALL))
            continue
        fields = {name.value: value for name, value in items_of(each)}
        pattern, reason = fields.get("pattern"), fields.get("reason")
        if not isinstance(pattern, yaml.ScalarNode):
            lost.append(f"line {line}: an entry without a pattern means nothing")
            continue
        for name, value in items_of(each):
            known = name.value in ("pattern", "actions") or (
                name.value == "reason" and isinstance(value, yaml.ScalarNode)
            )
            if not known:
                lost.append(means_nothing(name, value))
        actions = set(_ALL)
        if "actions" in fields:
            actions = {str(action.value) for action in list_of(pattern, fields["actions"], lost)}
        unknown = sorted(actions - set(_ALL))
        lost += [f"line {line}: the action {action} means nothing, there as here" for action in unknown]
        why = str(reason.value) if isinstance(reason, yaml.ScalarNode) else ""
        yield Entry(line, str(pattern.value), frozenset(actions & set(_ALL)), why)


def _comment(text: str) -> str:
    """Return a text for a comment line."""
    return "".join(each if each.isprintable() else " " for each in text)


def _toml(value: Any) -> str:
    """Format a string or a list of strings. Their JSON form is valid TOML."""
    return json.dumps(value, ensure_ascii=False)


_YEAR: Final = 365 * 86_400


class Lock(NamedTuple):
    """The locks of one chain, as `session.lease_service.ImportedLock`. `seconds` is the time until they expire."""

    line: int
    chain: str
    agent: str | None
    patterns: list[str]
    seconds: float
    reason: str


def read_locks(text: str, now: datetime) -> tuple[list[Lock], list[str]]:
    """Return the present locks of `locks.json`, and a line for each part that is lost. PolicyError: invalid file."""
    # The YAML parser reads JSON too, and it knows the lines. YAML permits no tabs between tokens.
    root = document_of(text.replace("\t", " "))
    lost: list[str] = []
    chains: list[tuple[yaml.Node, yaml.Node]] | None = None
    for key, node in items_of(root):
        if key.value == "chains":
            chains = table_of(key, node, lost)
        elif (key.value, node.value) != ("version", "1"):
            lost.append(means_nothing(key, node))
    if chains is None:
        raise PolicyError("it is not a file of Choragen: it has no chains")
    locks = [lock for key, node in chains if (lock := _lock(key, node, now, lost)) is not None]
    twice = {lock.chain for lock in locks if sum(other.chain == lock.chain for other in locks) > 1}
    lost += [
        f"line {lock.line}: {lock.chain} stands there more than once; the last holds"
        for lock in locks
        if lock.chain in twice
    ]
    return list({lock.chain: lock for lock in locks}.values()), lost


def _lock(key: yaml.Node, node: yaml.Node, now: datetime, lost: list[str]) -> Lock | None:
    line, patterns, agent, acquired = line_of(key), list[str](), None, ""
    seconds: float | None = None
    files = 0
    for name, value in table_of(key, node, lost):
        if name.value == "files":
            for each in list_of(name, value, lost):
                files += 1
                patterns += patterns_of(each, lost)
        elif name.value == "expiresAt" and not is_null(value):
            ends = moment_of(value)
            seconds = 0.0 if ends is None else (ends - now).total_seconds()
            if ends is None:
                lost.append(f"line {line_of(value)}: {key.value} is left out: {value.value!r} is no moment")
                return None
        elif name.value == "agent" and isinstance(value, yaml.ScalarNode):
            agent = None if is_null(value) else str(value.value)
        elif name.value == "acquired" and moment_of(value) is not None:
            acquired = f", acquired there {value.value}"
        elif not is_null(value):
            lost.append(means_nothing(name, value))
    if seconds is None:
        lost.append(f"line {line}: {key.value} never ends there; here it does in a year")
        seconds = float(_YEAR)
    if seconds <= 0:
        lost.append(f"line {line}: {key.value} has ended, and is left out")
    elif not patterns:
        lost.append(
            f"line {line}: {key.value} {'keeps none of its files' if files else 'locks no file'}, and is left out"
        )
    else:
        return Lock(line, key.value, agent, patterns, seconds, f"imported from Choragen{acquired}")
    return None
