"""The policy of each project, keyed by its source: `policies/NAME-HASH.toml` is the operator's policy (`init`), and
`policies/NAME-HASH.json` the preset that its first session chose.

HASH is the start of the SHA-256 of the source's path without symlinks, because two sources may have the same name.
"""

from __future__ import annotations

import hashlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from bonobofs.errors import PolicyError
from bonobofs.state.home import read_document, write_document


class StoredPreset(NamedTuple):
    """The preset that the first session of a source chose."""

    preset: str
    chosen: str
    """Time of the choice, ISO 8601."""


def policy_file(home: Path, source: Path) -> Path:
    """Return the path of a project's policy; the file may be absent. `source` must be free of symlinks."""
    return home / "policies" / f"{_key(source)}.toml"


def is_known(home: Path, source: Path) -> bool:
    """Return True if the source has a policy or a stored preset. PolicyError."""
    return exists(policy_file(home, source)) or exists(_choice(home, source))


def exists(file: Path) -> bool:
    """Return True if a file or symlink of this name exists. PolicyError: the check failed."""
    try:
        file.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise PolicyError(f"{file}: the policy cannot be read: {error.strerror}") from error
    return True


def stored_preset(home: Path, source: Path) -> StoredPreset | None:
    """Return the stored preset of a source; None before its first session. PolicyError, StateError."""
    file = _choice(home, source)
    if not exists(file):
        return None
    try:
        document = read_document(file)
        return StoredPreset(str(document["preset"]), str(document["chosen"]))
    except KeyError as error:
        raise PolicyError(f"{file}: it names no preset; move it away, and the next mount chooses again") from error
    except OSError as error:
        raise PolicyError(f"{file}: the stored preset cannot be read: {error.strerror}") from error


def store_preset(home: Path, source: Path, preset: str) -> str:
    """Store the preset of a source unless one is stored; return the stored preset. PolicyError, StateError, OSError."""
    file = _choice(home, source)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    document = {"source": str(source), "preset": preset, "chosen": datetime.now(UTC).isoformat()}
    write_document(file, document, replace=False)
    stored = stored_preset(home, source)
    return stored.preset if stored is not None else preset


def _choice(home: Path, source: Path) -> Path:
    return home / "policies" / f"{_key(source)}.json"


def _key(source: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", source.name).strip("-")[:40] or "source"
    return f"{name}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:16]}"
