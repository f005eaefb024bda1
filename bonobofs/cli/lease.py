"""`bonobofs lease acquire|extend|release|list|import`."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from bonobofs import session
from bonobofs.cli.output import document, note, say, table, waiting
from bonobofs.errors import UsageError
from bonobofs.policy.choragen import read_locks, text_of
from bonobofs.session import leasing
from bonobofs.session.leasing import Terms, Whose, as_document
from bonobofs.state import mounts
from bonobofs.state.calling import call

app = typer.Typer(help="Say who may change what, and until when.", rich_markup_mode=None)

_DURATION: Final = re.compile(r"(\d+)([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}

AgentOption = Annotated[str | None, typer.Option("--agent", metavar="A", help="The holder. Default: your login name.")]
ChainOption = Annotated[
    str | None, typer.Option("--chain", metavar="C", help="The chain of work that holds it instead of the agent.")
]
ForOption = Annotated[str, typer.Option("--for", metavar="T", help="How long from now: 30s, 10m, 24h, 7d.")]
LeaseArgument = Annotated[
    str | None, typer.Argument(metavar="[LEASE]", help="UUID of anybody's lease. Default: the holder's own.")
]


@app.command("acquire")
def acquire(
    patterns: Annotated[list[str], typer.Argument(metavar="PATTERN...", help="What it covers, such as docs/**.")],
    agent: AgentOption = None,
    chain: ChainOption = None,
    shared: Annotated[bool, typer.Option("--shared", help="Other shared holders may change what matches too.")] = False,
    duration: ForOption = "24h",
    reason: Annotated[str, typer.Option(metavar="R", help="Why, for others to read.")] = "",
    workspace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The one source that it covers. Default: every source.")
    ] = None,
) -> None:
    """Keep everybody else from changing what matches, in place of what this holder held before.

    All of it is granted or none. When this returns, every live session is bound by it. Run in a mount, with neither
    --agent nor --chain, this and the other lease commands are the session's own.

    \b
    Examples:
      bonobofs lease acquire --chain CHAIN-001 'src/**' 'docs/api.md' --for 2h
      bonobofs lease acquire --agent alice --shared 'docs/**'
    """
    where = None if workspace is None else Path(os.path.realpath(workspace))
    whose, terms = Whose(agent, chain), Terms(shared, _seconds(duration), reason, where)
    with waiting("waiting for the live sessions"):
        lease = _by_the_session(
            whose,
            "acquire",
            patterns=patterns,
            shared=shared,
            seconds=terms.seconds,
            reason=reason,
            workspace=None if where is None else str(where),
        ) or as_document(leasing.acquire(session.home(), whose, patterns, terms))
    say(f"{lease['id']} until {_moment(lease['until'])}")


@app.command("extend")
def extend(
    lease: LeaseArgument = None, agent: AgentOption = None, chain: ChainOption = None, duration: ForOption = "24h"
) -> None:
    """Let a lease last longer.

    \b
    Example:
      bonobofs lease extend --chain CHAIN-001 --for 24h
    """
    whose, seconds = Whose(agent, chain), _seconds(duration)
    longer = _by_the_session(whose, "extend", lease=lease, seconds=seconds) or as_document(
        leasing.extend(session.home(), whose, lease, seconds)
    )
    say(f"{longer['id']} until {_moment(longer['until'])}")


@app.command("release")
def release(lease: LeaseArgument = None, agent: AgentOption = None, chain: ChainOption = None) -> None:
    """End a lease.

    \b
    Examples:
      bonobofs lease release --chain CHAIN-001
      bonobofs lease release 0b4f8a52-6a6e-4e55-9c7e-0b6f0b6d6d10     as the operator, whoever holds it
    """
    whose = Whose(agent, chain)
    gone = _by_the_session(whose, "release", lease=lease) or as_document(leasing.release(session.home(), whose, lease))
    say(f"{gone['id']} is released")


@app.command("list")
def list_(json: Annotated[bool, typer.Option("--json", help="One JSON document: a list.")] = False) -> None:
    """List the leases that count now."""
    found = leasing.list_leases(session.home())
    if json:
        document([as_document(one) for one in found])
        return
    if not found:
        say("nothing is leased")
        return
    rows = [
        (
            str(one.holder),
            "shared" if one.shared else "exclusive",
            ", ".join(one.patterns),
            one.workspace or "every",
            _moment(one.until.isoformat()),
            one.reason or "-",
            one.id,
        )
        for one in found
    ]
    table(("HOLDER", "KIND", "PATTERNS", "SOURCE", "UNTIL", "REASON", "LEASE"), rows)


@app.command("import")
def import_(file: Annotated[Path, typer.Argument(metavar="FILE", help="Choragen's locks.json.")]) -> int:
    """Acquire what Choragen has locked, each lock for its chain, and name what cannot be kept; exit 1 then.

    \b
    Example:
      bonobofs lease import .choragen/locks.json
    """
    locks, lost = read_locks(text_of(file), datetime.now(UTC))
    made, refused = leasing.import_locks(session.home(), locks)
    for one in made:
        say(f"{one.id} for {one.holder}: {', '.join(one.patterns)}, until {_moment(one.until.isoformat())}")
    for line in lost + refused:
        note(f"{file}: {line}")
    return 1 if lost or refused else 0


def _seconds(duration: str) -> int:
    found = _DURATION.fullmatch(duration)
    if found is None:
        raise UsageError(f"{duration!r} is no length of time; give such as 30s, 10m, 24h or 7d")
    return int(found[1]) * _SECONDS[found[2]]


def _moment(when: str) -> str:
    return datetime.fromisoformat(when).isoformat(timespec="seconds")


def _by_the_session(whose: Whose, what: str, **arguments: Any) -> dict[str, Any] | None:
    """What the session says in whose mount this is run; None where it is run elsewhere, or a holder is named.

    A person who stands in a mount works as its agent there, as every other program does.
    """
    if whose != Whose():
        return None
    here = Path.cwd()
    called = session.callable_around(session.home(), here)
    if called is None:
        around = mounts.over(here)
        if around is not None:
            raise UsageError(
                f"the session of {around.mountpoint} does not let this user call it, so a lease from here would not "
                "bind it; run this as its operator, have root mount with --user, or name --agent or --chain"
            )
        return None
    lease: dict[str, Any] = call(called.directory, f"lease.{what}", **arguments)
    return lease
