"""`bonobofs serve`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from bonobofs import session
from bonobofs.cli.output import document, note, say, waiting
from bonobofs.errors import UsageError

if TYPE_CHECKING:
    from bonobofs import daemon


def serve(
    foreground: Annotated[bool, typer.Option("--foreground", help="Serve in this process until Ctrl-C.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the daemon that runs, and wait for it.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Say how it stands; exit 1 when there is none.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --status: one JSON document.")] = False,
) -> int:
    """Run the one daemon of this state directory: it keeps up the index and carries the record to Agent Mail.

    Mounts work without it. What goes wrong in the background is in serve.log in the state directory.

    \b
    Examples:
      bonobofs serve
      bonobofs serve --status
      bonobofs serve --stop
      bonobofs serve --foreground       from a service
    """
    # Most commands need none of this, and it takes longer to read than they run.
    from bonobofs import daemon  # noqa: PLC0415

    if foreground + stop + status > 1 or (json and not status):
        raise UsageError("--foreground, --stop and --status are three things; --json goes with --status")
    home = session.home()
    os.chdir("/")
    if status:
        return _tell(daemon.standing(home), json=json)
    if stop:
        with waiting("ending the daemon"):
            ended = daemon.stop(home)
        say(f"the daemon of {home} has ended" if ended is not None else f"no daemon serves {home}")
    elif foreground:
        daemon.serve(home)
    else:
        with waiting("starting the daemon"):
            started = daemon.start(home)
        say(f"serving {home}, pid {started.pid}")
    return 0


def _tell(standing: daemon.Standing, *, json: bool) -> int:
    running = standing.daemon
    if json:
        document(
            {"pid": running.pid if running else None, "started": standing.started or None, "parts": standing.problems}
        )
    elif running is None:
        say("no daemon serves")
    else:
        say(f"serving, pid {running.pid}, since {standing.started}")
        for part, problem in standing.problems.items():
            (note if problem else say)(f"{part}: {problem or 'well'}")
    return 0 if running is not None else 1
