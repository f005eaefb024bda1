"""`bonobofs db status|upgrade|backup`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from bonobofs import session
from bonobofs.cli.output import document, say
from bonobofs.state import backup as backups
from bonobofs.state import migrate as migration
from bonobofs.state.database import Database

app = typer.Typer(help="Look after the database of agents, sessions and leases.", rich_markup_mode=None)


@app.command("status")
def status(json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False) -> int:
    """Say which database is used and how it stands; exit 1 unless it can be used as it is.

    \b
    current  it can be used                       old    bring it up: bonobofs db upgrade
    empty    the first command that needs it,     newer  it needs a newer bonobofs
             or db upgrade, makes the tables      faulty something is missing or damaged
    """
    with Database(session.home()) as database:
        found = migration.status(database)
    if json:
        document(dataclasses.asdict(found))
    else:
        say(f"{found.database}: {found.state}, schema {found.schema or 'none'}, this version reads {found.newest}")
        for fault in found.faults:
            say(fault)
        for live in found.live:
            say(f"live: {live}")
        say(f"backups: {len(found.backups)}{f', the last is {found.backups[-1]}' if found.backups else ''}")
    return 0 if found.state in (migration.State.CURRENT, migration.State.EMPTY) else 1


@app.command("upgrade")
def upgrade() -> None:
    """Bring the database to the schema that this version reads.

    A dated backup is made first. The migration is one transaction with a health check at its end; where it fails,
    everything is as it was before. While a session is live it is refused. Done again, it does nothing.
    """
    with Database(session.home()) as database:
        done = migration.upgrade(database)
    if done.before == done.after:
        say(f"{database.name}: at {done.after} already")
    elif done.before is None:
        say(f"{database.name}: made at {done.after}")
    else:
        say(f"{database.name}: from {done.before} to {done.after}; the backup is {done.backup}")


@app.command("backup")
def backup() -> None:
    """Make a dated backup in the state directory. PostgreSQL is dumped by pg_dump."""
    with Database(session.home()) as database:
        say(str(backups.back_up(database)))
