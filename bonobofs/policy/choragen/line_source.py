"""Reading a file of Choragen so that every line of it can be named: what is there, and where it stands."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import yaml

from bonobofs.errors import PolicyError
from bonobofs.policy.pattern import parse

_BRACES: Final = re.compile(r"\{([^{}]*,[^{}]*)\}")
_MOST: Final = 1000


def text_of(file: Path) -> str:
    """What a file holds; PolicyError where it cannot be read."""
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
    """The entries of a table; what is there and is none is said to be lost."""
    if not isinstance(node, yaml.MappingNode) and not is_null(node):
        lost.append(means_nothing(key, node))
    return items_of(node)


def list_of(key: yaml.Node, node: yaml.Node, lost: list[str]) -> list[yaml.Node]:
    """The entries of a list; what is there and is none is said to be lost."""
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
    """A moment; None where it is none."""
    try:
        found = datetime.fromisoformat(str(node.value))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
