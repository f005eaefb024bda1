"""The agent and role of a command: refuse unknown names with the nearest known ones, and act as the agent."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, NamedTuple

from bonobofs import session
from bonobofs.cli.options import Option
from bonobofs.errors import UsageError
from bonobofs.policy.presets import PRESETS


def close_names(name: str, choices: Iterable[str]) -> list[str]:
    """Return at most three known names that look like a misspelling of the name, the nearest first."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake needs it

    return get_close_matches(name, sorted(set(choices)), n=3, cutoff=0.6)


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
    from bonobofs.state import session_rows  # noqa: PLC0415 - the database, which `umount` does not need

    with session_rows.open_queries(home) as database:
        labels = session_rows.labels(database, agent)
    if labels is None:
        return
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


AgentOption = Annotated[
    str | None, Option("--agent", metavar="A", help="The agent that acts; required outside a mount.")
]
RoleOption = Annotated[str | None, Option("--role", metavar="R", help="Its role. Default: the agent's own.")]
PolicyOption = Annotated[Path | None, Option("--policy", metavar="FILE", help="Outside a mount: the policy.")]


class ActingAs(NamedTuple):
    """The options of a command that acts as an agent."""

    agent: str | None
    role: str | None
    policy: Path | None

    def mount_session(self) -> session.CallableSession | None:
        """Return the session of the mount around the working directory; None outside a mount.

        Raises UsageError for options that the mount's session already settles, and for a missing --agent.
        """
        called = session.callable_session(session.home(), Path.cwd())
        if called is not None and self != ActingAs(None, None, None):
            raise UsageError("in a mount, the session has the agent, role and policy; leave these options out")
        if called is None and self.agent is None:
            raise UsageError("outside a mount, name the agent with --agent")
        return called

    def open_session(self, top: Path) -> AbstractContextManager[session.OpenSession]:
        """Open a session of the agent on the directory `top`. UsageError: the agent or the role is unknown."""
        home = session.home()
        check_agent(home, self.agent)
        if self.role is not None:
            check_role(self.role, session.choose_policy(home, self.policy, top))
        return session.open_session(top, agent=self.agent or "", role=self.role, policy=self.policy, preset=None)


def policy_path(policy: str | None) -> Path | None:
    """Return the argument of --policy: the name of a preset, else an absolute path."""
    return None if policy is None else Path(policy if policy in PRESETS else os.path.abspath(policy))
