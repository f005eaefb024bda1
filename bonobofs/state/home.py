"""The state directory: its path, its checks, the paths in it, and its JSON documents.

bonobofs.db             teams, agents, sessions and leases (`schema`), unless BONOBOFS_DATABASE names another database
home.id                 the UUID of this directory, among those that share a database
backups/                copies of the database, from `db backup` and before every `db upgrade`
sessions/UUID/          session.json, policy.json, server.log (`sessions`); scratch or kept (`scratch_dir`)
sessions/UUID/inside/   guard.sock and bin, which the user of `mount --user` can reach
sessions/UUID/egress.key    proves egress to the companion (`companion.calls`)
trails/UUID.jsonl       the trail of one session, UUID.jsonl.gz once it has ended; UUID.head holds its last number
                        and hash
pruned.jsonl            tombstones of pruned trails, with their pruned.head
network.toml            the operator's network lists (`sandbox.network_list`)
worktrees/UUID/         an agent's worktree (`worktree_registry`)
kept/UUID               files kept from a removed worktree, or the repository of an ended session
policies/               the policy or the preset of each source (`project_policies`); validated policies, NAME.cache
policy.toml             the operator's policy (optional)
index.db                the search index (`audit.index_store`)
published.json          the agent that published each branch (`git.source_refs`)
runs/, homes/           mountpoints of `bonobofs run`, and the kept home directories of its agents
append-locks            the append locks that the servers share (`fuse.append_lock`)
bonobofs.log            tracebacks of failed commands; serve.log is that of the daemon (`daemon.main`)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, Final

from bonobofs.errors import StateError
from bonobofs.system.paths import regular_file

GUARD_SOCKET: Final = "guard.sock"
"""The socket of a session, in its `inside` directory (`ipc.client`)."""
INSIDE: Final = "inside"
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)
EGRESS_KEY: Final = "egress.key"
"""The file of a session directory with the key by which egress proves itself to the companion."""


def home() -> Path:
    """Return `$BONOBOFS_HOME`, else `bonobofs` in the XDG state directory: absolute, without symlinks; created (0700).

    Raises StateError if it cannot be created or other users could change its content.
    """
    named = os.environ.get("BONOBOFS_HOME")
    if not named:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        named = os.path.join(state, "bonobofs")
    if not os.path.isabs(named):
        raise StateError(f"the state directory {named} is no absolute path; set BONOBOFS_HOME to one")
    path = Path(os.path.realpath(named))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        for part in ("sessions", "trails"):
            (path / part).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StateError(
            f"the state directory {path} cannot be used: {error.strerror}; set BONOBOFS_HOME to another directory"
        ) from error
    if found.st_uid not in (os.getuid(), 0) and os.getuid() != 0:
        raise StateError(f"the state directory {path} belongs to another user; set BONOBOFS_HOME to one of your own")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise StateError(f"others can write in the state directory {path}; chmod go-w {path}")
    return path


def home_id(home: Path) -> str:
    """Return the UUID of this state directory; create it at the first call. StateError: the file holds no UUID."""
    path = home / "home.id"
    if not path.exists():
        write_text(path, f"{new_uuid()}\n", replace=False)
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if not is_uuid(text):
        raise StateError(f"{path} does not hold the UUID that bonobofs wrote there; move it away")
    return text.lower()


def is_uuid(text: str) -> bool:
    """Return whether the text is a UUID in its usual form, in upper or lower case."""
    return _UUID.fullmatch(text) is not None


def new_uuid() -> str:
    """Return a random UUID of version 4. The modules uuid and tempfile load for 3 ms, and every mount would wait."""
    digits = os.urandom(16).hex()
    variant = "89ab"[int(digits[16], 16) % 4]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def session_directory(home: Path, session: str) -> Path:
    return home / "sessions" / session


def inside_directory(home: Path, session: str) -> Path:
    return session_directory(home, session) / INSIDE


def trail_path(home: Path, session: str) -> Path:
    return home / "trails" / f"{session}.jsonl"


def head_path(home: Path, session: str) -> Path:
    return home / "trails" / f"{session}.head"


def denials_path(home: Path, agent_id: str) -> Path:
    """Return the file in which all sessions of an agent count its denials."""
    return home / "denials" / agent_id


def write_document(path: Path, document: dict[str, Any], *, replace: bool = True, durable: bool = True) -> None:
    """Write a JSON document atomically, if `durable` also across power loss. Mode 0600.

    Without `replace`, an old file stays.
    """
    write_text(path, json.dumps(document, indent=1) + "\n", replace=replace, durable=durable)


def write_text(path: Path, text: str, *, replace: bool = True, durable: bool = True) -> None:
    """Write a file as `write_document` does. OSError."""
    temporary = path.parent / f".{path.name}.{os.urandom(8).hex()}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if replace:
            os.rename(temporary, path)
        else:
            # link(2) is atomic: of several processes the first decides, and each reads a complete file.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON document that bonobofs wrote. StateError: it is damaged. OSError, FileNotFoundError."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            document = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path} is not the JSON document that bonobofs wrote; move it away") from error
    if not isinstance(document, dict):
        raise StateError(f"{path} is not the JSON document that bonobofs wrote; move it away")
    return document
