"""Find the files that bonobofs ships: the presets, and the script that imports files of Choragen."""

from __future__ import annotations

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

from bonobofs.errors import PolicyError

PRESETS: Final = ("project", "strict", "aidlc", "docs", "read-only")
PRESET: Final = "preset:"
"""Prefix of the origin of a preset. The origin of any other policy is its file."""


def packaged_default() -> Path:
    """Return the file of the preset `aidlc`: in the package of a wheel, or at the top of a checkout. PolicyError."""
    return _shipped("policy.toml", "policy.toml")


def choragen_import() -> ModuleType:
    """Load the script that converts the files of Choragen. PolicyError: the installation lacks it."""
    spec = spec_from_file_location("choragen_import", _shipped("choragen_import.py", "scripts/choragen_import.py"))
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def _shipped(in_package: str, in_checkout: str) -> Path:
    """Return a file that a wheel has in the package and a checkout has elsewhere."""
    package = Path(__file__).resolve().parent.parent
    inside, outside = package / in_package, package.parent / in_checkout
    if inside.is_file():
        return inside
    # The parent of an installed package is site-packages. A file there belongs to another package.
    if outside.is_file() and (package.parent / "pyproject.toml").is_file():
        return outside
    raise PolicyError(f"{inside} is missing; install bonobofs again")


def preset_file(name: str) -> Path:
    """Return the file of a preset. PolicyError: the installation lacks it."""
    if name == "aidlc":
        return packaged_default()
    file = Path(__file__).resolve().parent / "presets" / f"{name}.toml"
    if not file.is_file():
        raise PolicyError(f"{file}: the preset {name} is missing; install bonobofs again")
    return file


def origin_of(file: Path) -> str:
    """Return `preset:NAME` for the file of a preset, or else the real path of the file."""
    path = os.path.realpath(file)
    for name in PRESETS:
        if path == str(preset_file(name)):
            return f"{PRESET}{name}"
    return path
