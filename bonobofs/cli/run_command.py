"""`bonobofs run`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bonobofs import session
from bonobofs.cli.actor import check_agent, check_role, policy_path
from bonobofs.cli.options import Argument, Option
from bonobofs.cli.output import note
from bonobofs.errors import UsageError

if TYPE_CHECKING:
    from bonobofs.session.protected_run import Protection


def run(
    words: Annotated[
        list[str],
        Argument(
            metavar="[SOURCE] -- COMMAND...",
            help="The source directory, by default this one, and the command after --.",
            verbatim=True,
        ),
    ],
    agent: Annotated[
        str | None,
        Option(metavar="A", help="The agent; a new name needs --new. Default: the name of the user of the command."),
    ] = None,
    role: Annotated[str | None, Option(metavar="R", help="Its role. Default: as for bonobofs mount.")] = None,
    chain: Annotated[str | None, Option(metavar="C", help="The chain of work.")] = None,
    policy: Annotated[
        str | None, Option(metavar="FILE", help="The policy file or preset. Default: as for bonobofs mount.")
    ] = None,
    issue: Annotated[
        str | None,
        Option(metavar="ID", help="Make the worktree of --agent for this issue first, and work there."),
    ] = None,
    user: Annotated[
        str | None,
        Option(metavar="NAME", help="As root: the user of the command. Default: the user of sudo."),
    ] = None,
    env: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Pass this variable to the command. Repeatable."),
    ] = None,
    protect: Annotated[
        list[str] | None,
        Option(metavar="DIR", help="Revert and report changes of this directory; exit 77. Repeatable."),
    ] = None,
    item: Annotated[str, Option(metavar="ID", help="The work item, for the violation.")] = "",
    artifacts: Annotated[
        Path | None, Option(metavar="DIR", help="Where violation.json goes; required by --protect.")
    ] = None,
    new: Annotated[bool, Option("--new", help="Register the agent if its name is new.")] = False,
) -> int:
    """Run a command in a sandbox: the workspace is the policy mount, the rest of the machine is read-only or absent.

    Absent are other homes, the source's files other than through the mount, the state directory, the host's sockets,
    and by default the network. HOME, /tmp, /var/tmp and /dev/shm are private. [run] and [network] of the policy admit
    more. The exit status is that of the command, or 128 and the number of a signal.

    \b
    Examples:
      bonobofs run -- make test
      bonobofs run ~/src/app --agent alice -- bash
      bonobofs run --env ANTHROPIC_API_KEY . -- claude
    """
    before, command = _split(words)
    home = session.home()
    request = session.RunRequest(
        source=Path(os.path.abspath(before[0] if before else ".")),
        command=command,
        directory=Path.cwd(),
        agent=agent,
        role=role,
        chain=chain,
        policy=policy_path(policy),
        issue=issue,
        user=user,
        env=env or [],
        protection=_protection(protect, item, artifacts),
    )
    check_agent(home, agent, new=new)
    if role is not None:
        from bonobofs.session.worktrees import find_repository  # noqa: PLC0415 - loads pygit2

        top = request.source if issue is None else find_repository(home, request.source).top
        check_role(role, session.choose_policy(home, request.policy, top))
    os.chdir("/")
    return session.run(home, request, note)


def _protection(directories: list[str] | None, item: str, artifacts: Path | None) -> Protection | None:
    """Return what to protect. UsageError."""
    if not directories:
        return None
    if artifacts is None:
        raise UsageError("--protect needs --artifacts, the directory for violation.json")
    from bonobofs.session.protected_run import Protection  # noqa: PLC0415 - loads asyncio

    return Protection(directories, Path(os.path.abspath(artifacts)), item)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before `--`, and the command after it. UsageError."""
    at = words.index("--") if "--" in words else -1
    before, command = words[: max(at, 0)], words[at + 1 :]
    if at < 0 or not command or len(before) > 1:
        raise UsageError("name at most one source and then a command: bonobofs run [OPTIONS] [SOURCE] -- COMMAND...")
    return before, command
