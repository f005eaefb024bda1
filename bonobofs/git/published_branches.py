"""Publishers of branches: `published.json` in the state directory, shared by all sessions of all sources."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Protocol

from bonobofs.state.home import read_document, write_document
from bonobofs.system.locks import locked


class Branches(Protocol):
    """Publishing agent and tip of each branch of one repository."""

    def find(self, ref: str) -> tuple[str, str]:
        """Return the UUID of the publishing agent and the tip that it published, or ("", "")."""

    def note(self, ref: str, tip: str) -> None:
        """Store `tip` as published by the session's agent. "" means that the agent deleted the branch."""


class PublishedBranches:
    """`{"COMMON-DIR REF": [UUID of the agent, tip]}`."""

    def __init__(self, home: Path, common_dir: Path, agent_id: str) -> None:
        self._file: Final = home / "published.json"
        self._common_dir: Final = os.path.realpath(common_dir)
        self._agent_id: Final = agent_id

    def find(self, ref: str) -> tuple[str, str]:
        """As `Branches.find`. Raises StateError if the file is damaged."""
        agent, tip = self._read().get(f"{self._common_dir} {ref}", ("", ""))
        return agent, tip

    def note(self, ref: str, tip: str) -> None:
        """As `Branches.note`. Also called for a branch that bonobofs made for the agent."""
        with locked(self._file.with_suffix(".lock")):
            known = self._read()
            key = f"{self._common_dir} {ref}"
            if tip:
                known[key] = [self._agent_id, tip]
            else:
                known.pop(key, None)
            write_document(self._file, known)

    def _read(self) -> dict[str, Any]:
        try:
            return read_document(self._file)
        except FileNotFoundError:
            return {}
