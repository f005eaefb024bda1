"""The policy of each project, by its source: `policies/NAME-HASH.toml` is one that the operator gave it (`init`), and
`policies/NAME-HASH.json` the preset that its first session took.

The hash is over the source's path without symlinks, since two sources may have the same name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from bonobofs.errors import PolicyError
from bonobofs.state.home import read_document, write_document


class StoredPreset(NamedTuple):
    """The preset that the first session of a source took."""

    preset: str
    chosen: str
    """When, in ISO 8601."""


def policy_file(home: Path, source: Path) -> Path:
    """Where the policy of a project lies, if it has one. `source` is without symlinks."""
    return home / "policies" / f"{_key(source)}.toml"


def exists(file: Path) -> bool:
    """Whether there is a file, or a symlink, of this name. PolicyError if that cannot be determined."""
    try:
        file.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise PolicyError(f"{file}: the policy cannot be read: {error.strerror}") from error
    return True


def stored_preset(home: Path, source: Path) -> StoredPreset | None:
    """The preset that is stored for a source; None before its first session. PolicyError, StateError."""
    file = _choice(home, source)
    if not exists(file):
        return None
    try:
        document = read_document(file)
        return StoredPreset(str(document["preset"]), str(document["chosen"]))
    except KeyError as error:
        raise PolicyError(f"{file}: it names no preset; move it away, and the next mount chooses anew") from error
    except OSError as error:
        raise PolicyError(f"{file}: the stored preset cannot be read: {error.strerror}") from error


def store_preset(home: Path, source: Path, preset: str) -> str:
    """Store the preset of a source unless one is stored already; return the one that is stored then."""
    file = _choice(home, source)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    write_document(draft, {"source": str(source), "preset": preset, "chosen": datetime.now(UTC).isoformat()})
    try:
        # Of two first sessions at once, the one that links first decides.
        with contextlib.suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink()
    stored = stored_preset(home, source)
    return stored.preset if stored is not None else preset


def _choice(home: Path, source: Path) -> Path:
    return home / "policies" / f"{_key(source)}.json"


def _key(source: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", source.name).strip("-")[:40] or "source"
    return f"{name}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:16]}"
