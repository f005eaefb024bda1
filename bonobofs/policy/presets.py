"""Find the files of the presets, the policies that bonobofs ships."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from bonobofs.errors import PolicyError

PRESETS: Final = ("project", "aidlc", "docs", "read-only")
PRESET: Final = "preset:"
"""Prefix of the origin of a preset. The origin of any other policy is its file."""


def packaged_default() -> Path:
    """Return the file of the preset `aidlc`: in the package of a wheel, or at the top of a checkout. PolicyError."""
    package = Path(__file__).resolve().parent.parent
    inside, top = package / "policy.toml", package.parent / "policy.toml"
    if inside.is_file():
        return inside
    # The parent of an installed package is site-packages. A policy.toml there belongs to another package.
    if top.is_file() and (package.parent / "pyproject.toml").is_file():
        return top
    raise PolicyError(f"{inside}: the default policy is missing; install bonobofs again")


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
