"""Choragen's `locks.json`."""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple

import yaml

from bonobofs.errors import PolicyError
from bonobofs.policy.choragen.line_source import (
    document_of,
    is_null,
    items_of,
    line_of,
    list_of,
    means_nothing,
    moment_of,
    patterns_of,
    table_of,
)

_YEAR: Final = 365 * 86_400


class Lock(NamedTuple):
    """One chain's locks. `seconds` is how long they are still to last."""

    line: int
    chain: str
    agent: str | None
    patterns: list[str]
    seconds: float
    reason: str


def read_locks(text: str, now: datetime) -> tuple[list[Lock], list[str]]:
    """The locks of `locks.json` that have not ended, and what of it cannot be kept. PolicyError: it is none."""
    # It is JSON, in which a tab between two tokens is a blank; YAML, which knows the lines, has no tabs there.
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
