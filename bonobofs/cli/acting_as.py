"""As whom `bonobofs git` and `bonobofs beads` act: the session of the mount, else an agent that the operator names."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from bonobofs import session
from bonobofs.cli.suggestions import check_agent, check_role
from bonobofs.errors import UsageError

AgentOption = Annotated[
    str | None, typer.Option("--agent", metavar="A", help="The agent that acts; required outside a mount.")
]
RoleOption = Annotated[str | None, typer.Option("--role", metavar="R", help="Its role. Default: the agent's own.")]
PolicyOption = Annotated[Path | None, typer.Option("--policy", metavar="FILE", help="Outside a mount: the policy.")]


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
