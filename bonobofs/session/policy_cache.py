"""Validated policies, stored in the state directory, because loading pydantic takes longer than a mount.

A stored policy is used only while its file, the presets and the modules that validate a policy are those that made it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bonobofs.errors import StateError
from bonobofs.policy import presets
from bonobofs.state.home import read_document, write_document


def load_plain(home: Path, file: Path) -> dict[str, Any]:
    """Return the policy of a file as JSON data, the input of `compile_policy`. PolicyError."""
    place = home / "policies" / f"{hashlib.sha256(os.fsencode(file)).hexdigest()}.cache"
    key = _key(file)
    with contextlib.suppress(OSError, StateError, KeyError):
        stored = read_document(place)
        if key is not None and stored["key"] == key:
            plain: dict[str, Any] = stored["policy"]
            return plain
    from bonobofs.policy.document import load  # noqa: PLC0415 - loads pydantic

    plain = load(file).model_dump(mode="json")
    # A file that changed meanwhile is not stored: the key would belong to another content.
    if key is not None and key == _key(file):
        with contextlib.suppress(OSError):
            place.parent.mkdir(mode=0o700, exist_ok=True)
            write_document(place, {"key": key, "policy": plain})
    return plain


def _key(file: Path) -> str | None:
    """Return a digest of all that decides what the file means; None if a part cannot be read."""
    try:
        whole = hashlib.sha256(file.read_bytes())
        for path in _parts():
            status = os.stat(path)
            whole.update(f"{path} {status.st_mtime_ns} {status.st_size}".encode(errors="surrogateescape"))
    except OSError:
        return None
    return whole.hexdigest()


def _parts() -> Iterator[str]:
    """Yield the files of the package that decide what a policy file means."""
    package = Path(presets.__file__).resolve().parent
    for directory in (package, package / "presets"):
        yield from sorted(entry.path for entry in os.scandir(directory) if entry.is_file())
    yield str(presets.packaged_default())
