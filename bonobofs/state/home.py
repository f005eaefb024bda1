"""The state directory: where it is, what it must be, and how a document is kept in it.

bonobofs.db             teams, agents, sessions and leases (`tables`), unless BONOBOFS_DATABASE names another database
home.id                 the UUID of this directory, among those that share a database
backups/                copies of the database, from `db backup` and before every `db upgrade`
sessions/UUID/          session.json, policy.json, server.log (`sessions`); scratch or kept (`scratch`)
sessions/UUID/inside/   guard.sock; bin; what the user of `mount --user` reaches
trails/UUID.jsonl       the record of one session, UUID.jsonl.gz once it has ended; UUID.head beside it holds its last
                        number and hash
pruned.jsonl            the record of trails that were pruned, with pruned.head beside it
worktrees/UUID/         a worktree that an agent was given (`worktrees`)
kept/UUID               what the removal of a worktree kept, or the repository of a session that ended
policies/               the policy or the preset of each source (`project_policies`)
policy.toml             the operator's policy, where there is one
bonobofs.log            what went wrong in a command, with the traceback
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, Final

from bonobofs.errors import StateError

GUARD_SOCKET: Final = "guard.sock"
"""In the `inside` directory of a session that is served: where it is called (`calling`)."""
INSIDE: Final = "inside"


def home() -> Path:
    """`$BONOBOFS_HOME`, else `bonobofs` in the XDG state directory; absolute, without symlinks, made if missing (0700).

    Raises StateError when it cannot be made, or when others could change what is in it.
    """
    named = os.environ.get("BONOBOFS_HOME")
    if not named:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        named = os.path.join(state, "bonobofs")
    path = Path(os.path.realpath(named))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        for part in ("sessions", "trails"):
            (path / part).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StateError(
            f"the state directory {path} cannot be used: {error.strerror}; set BONOBOFS_HOME to one that can"
        ) from error
    if found.st_uid not in (os.getuid(), 0) and os.getuid() != 0:
        raise StateError(f"the state directory {path} belongs to another user; set BONOBOFS_HOME to one of your own")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise StateError(f"others can write in the state directory {path}; chmod go-w {path}")
    return path


def session_directory(home: Path, session: str) -> Path:
    return home / "sessions" / session


def inside_directory(home: Path, session: str) -> Path:
    return session_directory(home, session) / INSIDE


def trail_path(home: Path, session: str) -> Path:
    return home / "trails" / f"{session}.jsonl"


def head_path(home: Path, session: str) -> Path:
    return home / "trails" / f"{session}.head"


def denials_path(home: Path, agent_id: str) -> Path:
    """The file in which the sessions of an agent count its denials."""
    return home / "denials" / agent_id


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Replace a JSON document at once: a reader sees the old one or the new one, also after power loss. Mode 0600."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_document(path: Path) -> dict[str, Any]:
    """A JSON document of ours; StateError when it is not one. FileNotFoundError passes."""
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise StateError(f"{path} is not the JSON document that bonobofs wrote there; move it away") from error
    if not isinstance(document, dict):
        raise StateError(f"{path} is not the JSON document that bonobofs wrote there; move it away")
    return document
