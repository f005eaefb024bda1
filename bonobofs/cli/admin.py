"""`bonobofs db status|upgrade|backup` and `bonobofs serve`."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated

from bonobofs import session
from bonobofs.cli.options import Group, Option
from bonobofs.cli.output import document, note, say, waiting
from bonobofs.errors import UsageError

db_app = Group(help="Check, upgrade and back up the database.")


@db_app.command("status")
def status(json: Annotated[bool, Option("--json", help="One JSON document.")] = False) -> int:
    """Show the database and its state. Exit 1 unless bonobofs can use it as it is.

    \b
    current  ready                                old    run bonobofs db upgrade
    empty    no tables yet; the first command     newer  written by a newer bonobofs
             that needs them creates them         faulty something is missing or damaged
    """
    # SQLAlchemy and Alembic load for longer than `serve` runs.
    from bonobofs.state import migrate  # noqa: PLC0415
    from bonobofs.state.database import Database  # noqa: PLC0415

    with Database(session.home()) as database:
        found = migrate.status(database)
    if json:
        document(dataclasses.asdict(found))
    else:
        say(f"{found.database}: {found.state}, schema {found.schema or 'none'}, this version reads {found.newest}")
        for fault in found.faults:
            say(fault)
        for live in found.live:
            say(f"live: {live}")
        say(f"backups: {len(found.backups)}{f', the last is {found.backups[-1]}' if found.backups else ''}")
    return 0 if found.state in (migrate.DatabaseState.CURRENT, migrate.DatabaseState.EMPTY) else 1


@db_app.command("upgrade")
def upgrade() -> None:
    """Migrate the database to the schema of this version.

    A dated backup is made first. The migration is one transaction that ends with a health check. If it fails, the
    database is unchanged. The command is refused while a session is live. It is idempotent.
    """
    from bonobofs.state import migrate  # noqa: PLC0415 - as in `status`
    from bonobofs.state.database import Database  # noqa: PLC0415 - as in `status`

    with Database(session.home()) as database:
        done = migrate.upgrade(database)
    if done.before == done.after:
        say(f"{database.name}: already at {done.after}")
    elif done.before is None:
        say(f"{database.name}: created at {done.after}")
    else:
        say(f"{database.name}: migrated from {done.before} to {done.after}; backup: {done.backup}")


@db_app.command("backup")
def backup() -> None:
    """Write a dated backup to the state directory. PostgreSQL needs pg_dump."""
    from bonobofs.state import migrate as backups  # noqa: PLC0415 - as in `status`
    from bonobofs.state.database import Database  # noqa: PLC0415 - as in `status`

    with Database(session.home()) as database:
        say(str(backups.create_backup(database)))


if TYPE_CHECKING:
    from bonobofs import daemon


def serve(
    foreground: Annotated[bool, Option("--foreground", help="Serve in this process until Ctrl-C.")] = False,
    stop: Annotated[bool, Option("--stop", help="Stop the daemon and wait until it has ended.")] = False,
    status: Annotated[bool, Option("--status", help="Show its state; exit 1 if none runs.")] = False,
    json: Annotated[bool, Option("--json", help="With --status: one JSON document.")] = False,
) -> int:
    """Run the daemon of this state directory: it updates the index, expires leases and sends the record to Agent Mail.

    Mounts work without it. Its errors are in serve.log in the state directory.

    \b
    Examples:
      bonobofs serve
      bonobofs serve --status
      bonobofs serve --stop
      bonobofs serve --foreground       from a service
    """
    # The import takes longer than most commands run.
    from bonobofs import daemon  # noqa: PLC0415

    if foreground + stop + status > 1 or (json and not status):
        raise UsageError("--foreground, --stop and --status are mutually exclusive; --json needs --status")
    home = session.home()
    os.chdir("/")
    if status:
        return _print_daemon(daemon.status(home), json=json)
    if stop:
        with waiting("ending the daemon"):
            ended = daemon.stop(home)
        say(f"the daemon of {home} has ended" if ended is not None else f"no daemon runs for {home}")
    elif foreground:
        daemon.serve(home)
    else:
        with waiting("starting the daemon"):
            started = daemon.start(home)
        say(f"serving {home}, pid {started.pid}")
    return 0


def _print_daemon(status: daemon.DaemonStatus, *, json: bool) -> int:
    running = status.daemon
    if json:
        document({"pid": running.pid if running else None, "started": status.started or None, "parts": status.problems})
    elif running is None:
        say("no daemon runs")
    else:
        say(f"serving, pid {running.pid}, since {status.started}")
        for part, problem in status.problems.items():
            (note if problem else say)(f"{part}: {problem or 'well'}")
    return 0 if running is not None else 1
