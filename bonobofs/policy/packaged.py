"""Where the policy lies that bonobofs ships."""

from __future__ import annotations

from pathlib import Path

from bonobofs.errors import PolicyError


def packaged_default() -> Path:
    """The default policy that bonobofs ships: in the wheel inside the package, in a checkout at its top."""
    package = Path(__file__).resolve().parent.parent
    inside, top = package / "policy.toml", package.parent / "policy.toml"
    if inside.is_file():
        return inside
    # Beside an installed package lies site-packages, where a policy.toml would be somebody else's.
    if top.is_file() and (package.parent / "pyproject.toml").is_file():
        return top
    raise PolicyError(f"{inside}: the default policy is missing; install bonobofs again")
