"""`policy show`: the policy that is in force somewhere, or that a file holds."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bonobofs.policy.engine import Policy, compile_policy
from bonobofs.session.registration import choose_policy
from bonobofs.session.session_list import around
from bonobofs.state.home import read_document, session_directory


class InForce(NamedTuple):
    """A policy and where it stands."""

    origin: str
    compiled: Policy
    role: str
    session: str | None
    """The session in which it is in force; None: it is what a mount would begin with."""
    error: str | None
    """Why the file that is there now is not in force."""
    why: str
    """Why it was chosen; empty for the policy of a session."""


def in_force(home: Path, file: Path | None, path: Path) -> InForce:
    """The policy in a file that is named, else of the session in whose mount or source a path lies, else of a new one.

    PolicyError, StateError.
    """
    one = around(home, path) if file is None else None
    if one is None:
        chosen = choose_policy(home, file, path if file is None else None)
        return InForce(chosen.origin, chosen.compiled, chosen.document.default_role, None, None, chosen.why)
    made = one.session
    plain = read_document(session_directory(home, made.session) / "policy.json")
    compiled = compile_policy(plain, made.policy.generation)
    return InForce(made.policy.origin, compiled, made.role, made.session, one.policy_error, "")
