"""Refuse names of agents and roles that are unknown, and show the nearest known ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from bonobofs.errors import UsageError

if TYPE_CHECKING:
    from bonobofs import session


def close_names(name: str, choices: Iterable[str]) -> list[str]:
    """Return at most three known names that look like a misspelling of the name, the nearest first."""
    return difflib.get_close_matches(name, sorted(set(choices)), n=3, cutoff=0.6)


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `; did you mean alice?`, else `; known are alice, bob`, or "" where nothing is known."""
    names = sorted(set(choices))
    close = close_names(name, names)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"; known are {', '.join(names[:12])}{more}" if names else ""


def check_agent(home: Path, agent: str | None, *, new: bool | None = None) -> None:
    """Refuse the name of an agent that is not registered. UsageError.

    `new` is the `--new` of a command that can register the agent; None for a command that cannot. Such a command also
    takes any name while the state directory has no agent.
    """
    if agent is None or new:
        return
    from bonobofs.state import agent_registry  # noqa: PLC0415 - loads SQLAlchemy, which `umount` does not need
    from bonobofs.state.database import Database  # noqa: PLC0415

    with Database.open(home) as database:
        if agent_registry.find(database, agent) is not None:
            return
        labels = [one.label for one in agent_registry.list_agents(database)]
    if labels or new is None:
        remedy = f"bonobofs agent add {agent}" if new is None else "--new"
        choices = nearest(agent, labels)
        end = "" if choices.endswith("?") else ";"
        raise UsageError(f"no agent is named {agent}{choices}{end} to register it: {remedy}")


def check_role(role: str | None, policy: session.ChosenPolicy | session.PolicyInForce) -> None:
    """Refuse a role that the policy does not define. UsageError."""
    roles = policy.compiled.roles
    if role is not None and role not in roles:
        close = close_names(role, roles)
        guess = f"; did you mean {' or '.join(close)}?" if close else ";"
        defined = ", ".join(sorted(roles, key=str.lower))
        raise UsageError(f"the policy {policy.origin} does not define the role {role}{guess} it defines: {defined}")
