"""The session that an MCP server belongs to: its socket, its mount and its git."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.errors import MountError, UsageError
from bonobofs.ipc.client import call_within
from bonobofs.session.session_list import session_of_mount

_ANSWER_SECONDS: Final = 120.0
"""Timeout of each read from guard.sock. A search takes 10 s, a call of bd 60 s."""
LONGEST_WAIT: Final = 100
"""Seconds that one call waits for an answer of the operator."""
_LARGEST_CALL: Final = (16 << 20) - 4096
"""Bytes of one call that guard.sock reads."""
_LONGEST_ESCAPE: Final = 6
_POLICY: Final = "policy.md"
_REFUSALS: Final = "denials.jsonl"
_MOST_REFUSALS: Final = 20


class SessionLink(NamedTuple):
    """The session of one mount. It stays the session of the first look: a later mount there is another session."""

    inside: Path
    """Directory of guard.sock and bin."""
    mountpoint: Path

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Call guard.sock. Raises as `ipc.client.call_within`; UsageError: the call is too large for it."""
        texts = sum(len(value) for value in arguments.values() if isinstance(value, str))
        if texts > _LARGEST_CALL // _LONGEST_ESCAPE and len(json.dumps(arguments)) > _LARGEST_CALL:
            raise UsageError("one call has at most 16 MiB, with escapes; write a larger file in the mount")
        return call_within(_ANSWER_SECONDS, self.inside, name, **arguments)

    def policy(self) -> str:
        """Return what the agent may write, in words. OSError."""
        return self._read(_POLICY)

    def refusals(self) -> str:
        """Return the last refusals, one JSON document a line, oldest first. OSError."""
        return "".join(self._read(_REFUSALS).splitlines(keepends=True)[-_MOST_REFUSALS:])

    def _read(self, name: str) -> str:
        return (self.mountpoint / ".bonobofs" / name).read_text(encoding="utf-8", errors="backslashreplace")


def link_around(directory: Path) -> SessionLink:
    """Return the session in whose mount a directory lies. MountError: it lies in none, or the session is closed."""
    place = Path(os.path.abspath(directory))
    try:
        os.stat(place)
    except OSError as error:
        raise MountError(f"{place} cannot be entered: {error.strerror}") from error
    found = session_of_mount(Path(os.path.realpath(place)))
    if found is None:
        raise MountError(
            f"{place} is in no mount of bonobofs that this user may call; start it in a mount, or name the mount: "
            "bonobofs mcp MOUNTPOINT"
        )
    return SessionLink(found.directory, found.mountpoint)
