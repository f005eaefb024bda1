"""`bonobofs lease acquire|extend|release|list|import`."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any

from bonobofs import session
from bonobofs.cli.actor import check_agent
from bonobofs.cli.options import Argument, Group, Option
from bonobofs.cli.output import listing, note, say, waiting
from bonobofs.errors import UsageError
from bonobofs.ipc.client import call
from bonobofs.policy.lease_limits import seconds_of
from bonobofs.policy.presets import choragen_import
from bonobofs.system import mounts

app = Group(help="Acquire, extend, release and list leases.")

AgentOption = Annotated[str | None, Option("--agent", metavar="A", help="The holder. Default: your login name.")]
ChainOption = Annotated[
    str | None, Option("--chain", metavar="C", help="The chain of work that holds it, instead of the agent.")
]
WorkspaceOption = Annotated[
    Path | None,
    Option(metavar="DIR", help="The source that it covers. Default: the one around the working directory."),
]
AllOption = Annotated[bool, Option("--all-workspaces", help="It covers every source; for the operator.")]
ForOption = Annotated[str, Option("--for", metavar="T", help="How long from now: 30s, 10m, 24h, 7d.")]
LeaseArgument = Annotated[str | None, Argument(metavar="[LEASE]", help="UUID of any lease. Default: the holder's own.")]


@app.command("acquire")
def acquire(
    patterns: Annotated[list[str], Argument(metavar="PATTERN...", help="What it covers, such as docs/**.")],
    agent: AgentOption = None,
    chain: ChainOption = None,
    shared: Annotated[bool, Option("--shared", help="Other shared holders may change what matches too.")] = False,
    duration: ForOption = "24h",
    reason: Annotated[str, Option(metavar="R", help="Why, for others to read.")] = "",
    workspace: WorkspaceOption = None,
    all_workspaces: AllOption = False,
) -> None:
    """Reserve matching paths for the holder. The new lease replaces the holder's earlier one.

    All patterns are granted or none. When the command returns, every live session enforces the lease. In a mount, the
    lease commands act as the session: --agent and --chain may only name its own agent and chain.

    \b
    Examples:
      bonobofs lease acquire --chain CHAIN-001 'src/**' 'docs/api.md' --for 2h
      bonobofs lease acquire --agent alice --shared 'docs/**'
    """
    if all_workspaces and workspace is not None:
        raise UsageError("--workspace and --all-workspaces are mutually exclusive")
    holder, seconds = session.lease_service.HolderOption(agent, chain), _seconds(duration)
    with waiting("waiting for the live sessions"):
        lease = _by_the_session(
            holder,
            "acquire",
            patterns=patterns,
            shared=shared,
            seconds=seconds,
            reason=reason,
            workspace="every" if all_workspaces else workspace and os.path.realpath(workspace),
        ) or session.lease_service.as_document(
            session.lease_service.acquire(
                session.home(),
                holder,
                patterns,
                session.lease_service.LeaseTerms(
                    shared, seconds, reason, _workspace(workspace, all_workspaces=all_workspaces)
                ),
                note,
            )
        )
    say(f"{lease['id']} until {_moment(lease['until'])}")


@app.command("extend")
def extend(
    lease: LeaseArgument = None, agent: AgentOption = None, chain: ChainOption = None, duration: ForOption = "24h"
) -> None:
    """Extend a lease.

    \b
    Example:
      bonobofs lease extend --chain CHAIN-001 --for 24h
    """
    holder, seconds = session.lease_service.HolderOption(agent, chain), _seconds(duration)
    extended = _by_the_session(holder, "extend", lease=lease, seconds=seconds) or session.lease_service.as_document(
        session.lease_service.extend(session.home(), holder, lease, seconds, note)
    )
    say(f"{extended['id']} until {_moment(extended['until'])}")


@app.command("release")
def release(lease: LeaseArgument = None, agent: AgentOption = None, chain: ChainOption = None) -> None:
    """End a lease.

    \b
    Examples:
      bonobofs lease release --chain CHAIN-001
      bonobofs lease release 0b4f8a52-6a6e-4e55-9c7e-0b6f0b6d6d10     as the operator, any holder's
    """
    holder = session.lease_service.HolderOption(agent, chain)
    with waiting("waiting for the live sessions"):
        released = _by_the_session(holder, "release", lease=lease) or session.lease_service.as_document(
            session.lease_service.release(session.home(), holder, lease, note)
        )
    say(f"{released['id']} is released")


@app.command("list")
def list_(json: Annotated[bool, Option("--json", help="One JSON document: a list.")] = False) -> None:
    """List the leases in effect."""
    current = session.lease_service.list_leases(session.home())
    rows = [
        (
            str(each.holder),
            "shared" if each.shared else "exclusive",
            ", ".join(each.patterns),
            each.workspace or "every",
            _moment(each.until.isoformat()),
            each.reason or "-",
            each.id,
        )
        for each in current
    ]
    heading = ("HOLDER", "KIND", "PATTERNS", "SOURCE", "UNTIL", "REASON", "LEASE")
    listing(list(map(session.lease_service.as_document, current)), heading, rows, "nothing is leased", json=json)


@app.command("import")
def import_(
    file: Annotated[Path, Argument(metavar="FILE", help="Choragen's locks.json.")],
    workspace: WorkspaceOption = None,
    all_workspaces: AllOption = False,
) -> int:
    """Acquire the locks of Choragen, each for its chain; exit 1 if one cannot be granted, with a line for each.

    \b
    Example:
      bonobofs lease import .choragen/locks.json
    """
    if session.callable_session(session.home(), Path.cwd()) is not None:
        raise UsageError("a session acquires no leases for other chains; run this outside of the mount")
    script = choragen_import()
    locks, lost = script.read_locks(script.text_of(file), datetime.now(UTC))
    acquired, refused = session.lease_service.import_locks(
        session.home(),
        list(starmap(session.lease_service.ImportedLock, locks)),
        _workspace(workspace, all_workspaces=all_workspaces),
        note,
    )
    for each in acquired:
        say(f"{each.id} for {each.holder}: {', '.join(each.patterns)}, until {_moment(each.until.isoformat())}")
    for line in lost + refused:
        note(f"{file}: {line}")
    return 1 if lost or refused else 0


def _seconds(duration: str) -> int:
    seconds = seconds_of(duration)
    if seconds is None:
        raise UsageError(f"{duration!r} is no positive duration; give one such as 30s, 10m, 24h or 7d")
    return seconds


def _workspace(directory: Path | None, *, all_workspaces: bool) -> Path | None:
    """The workspace that a lease covers, by default the one around the working directory; None for all."""
    if all_workspaces:
        return None
    if directory is not None:
        return Path(os.path.realpath(directory))
    return session.lease_service.workspace_around(session.home(), Path.cwd())


def _moment(when: str) -> str:
    return datetime.fromisoformat(when).isoformat(timespec="seconds")


def _by_the_session(holder: session.lease_service.HolderOption, verb: str, **arguments: Any) -> dict[str, Any] | None:
    """Call the session of the mount around the working directory; None outside a mount.

    In a mount, a person acts as its agent, as every program does. The session refuses other holders.
    """
    here = Path.cwd()
    own_session = session.callable_session(session.home(), here)
    if own_session is None:
        mount = mounts.mount_around(here)
        if mount is not None and holder == session.lease_service.HolderOption():
            raise UsageError(
                f"the session of {mount.mountpoint} does not let this user call it, so a lease from here would not "
                "bind it; run this as its operator, have root mount with --user, or name --agent or --chain"
            )
        check_agent(session.home(), holder.agent)
        return None
    lease: dict[str, Any] = call(
        own_session.directory, f"lease.{verb}", **arguments, agent=holder.agent, chain=holder.chain
    )
    return lease
