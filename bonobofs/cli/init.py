"""`bonobofs init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bonobofs import session
from bonobofs.cli.output import document, say
from bonobofs.session.project_policy import write_policy


def init(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The project. Default: this directory.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace the policy that the project has.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write a commented policy for a project from what it holds, to the state directory.

    The next mount of the project takes it. Nothing is written into the project.

    \b
    Example:
      bonobofs init ~/src/app
    """
    written = write_policy(session.home(), source, force=force)
    project, file = written.project, shlex.quote(str(written.file))
    place = shlex.quote(str(project.source))
    commands = [
        f"bonobofs policy check {file}",
        f"bonobofs policy test {file}",
        f"bonobofs why --workspace {place} PATH",
        f"bonobofs mount {place} MOUNTPOINT",
    ]
    if json:
        found = {**project._asdict(), "source": str(project.source)}
        document({**found, "extends": written.preset, "policy": str(written.file), "next": commands})
        return
    say(f"{written.file}: written, with {written.examples} examples; it extends the preset {written.preset}")
    say(f"languages    {', '.join(project.languages) or 'none found'}")
    say(f"lock files   {', '.join(project.lock_files) or 'none'}")
    say(f"scratch      {', '.join(project.scratch) or 'only that of the preset'}")
    for line in project.ignored:
        say(f"not scratch  {line}")
    say("next:")
    for command in commands:
        say(f"  {command}")
