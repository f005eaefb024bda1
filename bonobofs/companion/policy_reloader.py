"""Reload policy.toml of a session when the file changes."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from bonobofs.errors import BonobofsError
from bonobofs.ipc.channel import Channel, MessageKind
from bonobofs.ipc.session_config import CompanionConfig
from bonobofs.state.home import write_document

_INTERVAL: Final = 0.15
"""Seconds between two checks. A change is loaded once two checks see the same file: an editor may still write it."""

Fingerprint = tuple[int, int, int, int, int] | None
"""Device, inode number, mtime, ctime and size of the file; None: it does not exist."""


class PolicyReloader:
    """Checks the policy file by its name, so that a write, a rename and a changed symlink are all seen."""

    def __init__(self, channel: Channel, config: CompanionConfig) -> None:
        """After a restart of the companion, the first check loads the file, because it may have changed."""
        session = config.session
        self._channel: Final = channel
        self._file: Final = Path(session.policy_file) if session.policy_file else None
        self._home: Final = Path(session.home)
        self._session: Final = session.session
        self._source: Final = Path(session.source)
        self._in_force = session.policy
        self._observe: Final = session.observe
        self._copy: Final = Path(session.session_dir, "policy.json")
        self._loaded = self._fingerprint() if config.is_first else None
        self._seen = self._loaded
        self._is_broken = False
        self._next_check = 0.0

    def due(self, now: float) -> float:
        """Seconds until the next check."""
        return max(0.0, self._next_check - now)

    def check(self, now: float) -> None:
        """Load the policy if the file has changed."""
        self._next_check = now + _INTERVAL
        fingerprint = self._fingerprint()
        if fingerprint == self._loaded:
            self._seen = fingerprint
        elif fingerprint != self._seen:
            self._seen = fingerprint
            import_module("bonobofs.session.registration")  # takes about as long as the wait for the second check
        else:
            self.load(always=False)

    def load(self, *, always: bool = True) -> None:
        """Load the policy and send it to the server. `always`: send it even if its meaning is unchanged."""
        if self._file is None:
            return
        from bonobofs.session import registration  # noqa: PLC0415 - loads pydantic

        self._loaded = self._seen = self._fingerprint()
        try:
            chosen = registration.load_policy(self._home, self._file, self._source)
            if self._observe:
                chosen = chosen.observing()
            # The new [[scratch]] may match other files that git tracks.
            tracked = registration.find_tracked(self._home, self._source, chosen.compiled).paths
        except BonobofsError as error:
            self._is_broken = True
            self._channel.send(MessageKind.POLICY_ERROR, {"origin": str(self._file), "error": str(error)})
            return
        policy: dict[str, Any] = chosen.plain
        if always or self._is_broken or policy != self._in_force:
            self._in_force = policy
            write_document(self._copy, policy)
            registration.save_tracked(self._home, self._session, tracked)
            file = _owner_and_time(Path(os.path.realpath(self._file)))
            document = {"origin": chosen.origin, "policy": policy, "tracked": tracked, "file": file}
            self._channel.send(MessageKind.POLICY, document)
        self._is_broken = False

    def _fingerprint(self) -> Fingerprint:
        if self._file is None:
            return None
        try:
            st = os.stat(self._file)
        except OSError:
            return None
        return st.st_dev, st.st_ino, st.st_mtime_ns, st.st_ctime_ns, st.st_size


def _owner_and_time(file: Path) -> dict[str, Any]:
    """Return {"owner", "modified"} of the policy file; {} if it does not exist.

    Linux does not record which process wrote a file. The owner is the best evidence of the author.
    """
    try:
        st = os.stat(file)
    except OSError:
        return {}
    return {"owner": st.st_uid, "modified": datetime.fromtimestamp(st.st_mtime, UTC).isoformat(timespec="milliseconds")}
