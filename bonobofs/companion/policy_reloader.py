"""The policy file of a session: loaded anew when what is found under its name has changed."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from bonobofs.errors import BonobofsError
from bonobofs.ipc.channel import Kind, Line
from bonobofs.state.home import write_document

_EVERY: Final = 0.15
"""Seconds between two looks. A change is loaded once two looks have found the same: it may be in the making."""
_LOADER: Final = "bonobofs.session.registration"

Mark = tuple[int, int, int, int, int] | None
"""Device, inode number, both times and size of what the name leads to; None: it leads to nothing."""


class PolicyFile:
    """One service of the companion.

    The name is followed anew each time, so it does not matter how a change comes about: in place, by rename, by another
    directory, by a symlink that leads elsewhere.
    """

    def __init__(self, line: Line, config: dict[str, Any]) -> None:
        """Without a file nothing is ever loaded. What has changed since the policy in force was is loaded soon."""
        file, directory = config["policy_file"], Path(config["session_dir"])
        self._line: Final = line
        self._file: Final = file and Path(file)
        self._home: Final = Path(config["home"])
        self._session: Final[str] = config["session"]
        self._source: Final = Path(config["source"])
        self._in_force: dict[str, Any] = config["policy"]
        self._kept: Final = directory / "policy.json"
        self._loaded: Mark = self._look() if config["first"] else None
        self._seen: Mark = self._loaded
        self._broken = False
        self._next = 0.0

    def due(self, now: float) -> float:
        """Seconds until the next look."""
        return max(0.0, self._next - now)

    def look(self, now: float) -> None:
        """Load the policy if it has changed."""
        self._next = now + _EVERY
        mark = self._look()
        if mark == self._loaded:
            self._seen = mark
        elif mark != self._seen:
            self._seen = mark
            import_module(_LOADER)  # takes as long as the wait for a change to be complete
        else:
            self.load(always=False)

    def load(self, *, always: bool = True) -> None:
        """Load the policy and give it to the server; unless `always`, only one that says something else."""
        if self._file is None:
            return
        self._loaded = self._seen = self._look()
        try:
            chosen = import_module(_LOADER).load_policy(self._file, self._source)
            # The new [[scratch]] may match files that git tracks and the earlier one did not.
            tracked = import_module(_LOADER).find_tracked(self._home, self._source, chosen.compiled).paths
        except BonobofsError as error:
            self._broken = True
            self._line.tell(Kind.BROKEN, {"origin": str(self._file), "error": str(error)})
            return
        plain: dict[str, Any] = chosen.plain
        if always or self._broken or plain != self._in_force:
            self._in_force = plain
            write_document(self._kept, plain)
            import_module(_LOADER).keep(self._home, self._session, tracked)
            evidence = _evidence(Path(os.path.realpath(self._file)))
            told = {"origin": chosen.origin, "policy": plain, "tracked": tracked, "file": evidence}
            self._line.tell(Kind.POLICY, told)
        self._broken = False

    def _look(self) -> Mark:
        if self._file is None:
            return None
        try:
            st = os.stat(self._file)
        except OSError:
            return None
        return st.st_dev, st.st_ino, st.st_mtime_ns, st.st_ctime_ns, st.st_size


def _evidence(file: Path) -> dict[str, Any]:
    """The owner and the modification time of the policy file; {} if it is gone.

    Linux does not tell which process wrote a file. The owner is all that is known of the author of a change.
    """
    try:
        st = os.stat(file)
    except OSError:
        return {}
    return {"owner": st.st_uid, "modified": datetime.fromtimestamp(st.st_mtime, UTC).isoformat(timespec="milliseconds")}
