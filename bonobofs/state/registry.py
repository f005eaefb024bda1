"""Who there is: one JSON document of labels, each with the UUID that is the identity and the role it has by itself.

    {"agents": {LABEL: {"id": UUID, "role": ROLE or null}}}

The label may be read by people and may one day name somebody else; records hold the UUID beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bonobofs.errors import StateError, UsageError
from bonobofs.state.home import read_document, write_document

_LONGEST_LABEL = 64


class Registered(NamedTuple):
    """One agent. `role` is None where nobody has given it one of its own."""

    label: str
    id: str
    role: str | None
    new: bool
    """It was entered by this call."""


def check_label(label: str) -> str:
    """A label that is safe in a line of a log, a terminal and a file name; else UsageError."""
    if not label or len(label) > _LONGEST_LABEL or not label.isprintable() or "/" in label or label != label.strip():
        raise UsageError(
            f"{label!r} cannot name an agent; use 1 to {_LONGEST_LABEL} printable characters without a slash"
        )
    return label


def register(home: Path, label: str, role: str | None) -> Registered:
    """The agent of that label, entered with the role if the label is new. A known agent's own role stays."""
    check_label(label)
    path = home / "agents.json"
    with _locked(home / "agents.lock"):
        document = _read(path)
        agents = document["agents"]
        known = agents.get(label)
        if known is not None:
            return Registered(label, known["id"], known["role"], new=False)
        agents[label] = {"id": str(uuid.uuid4()), "role": role}
        write_document(path, document)
        return Registered(label, agents[label]["id"], role, new=True)


def identity_of(home: Path, label: str) -> str | None:
    """The UUID of the living agent of that label; None where there is none."""
    known = _read(home / "agents.json")["agents"].get(label)
    return str(known["id"]) if known else None


def _read(path: Path) -> dict[str, Any]:
    try:
        document = read_document(path)
    except FileNotFoundError:
        return {"agents": {}}
    agents = document.get("agents")
    if not isinstance(agents, dict) or not all(
        isinstance(one, dict) and isinstance(one.get("id"), str) and "role" in one for one in agents.values()
    ):
        raise StateError(f"{path} is not the register of agents that bonobofs wrote; move it away")
    return document


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock is on a file of its own: the document is replaced, and a lock on it would be left behind."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
