"""`bonobofs why`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from bonobofs import session
from bonobofs.cli.output import document, say
from bonobofs.cli.suggestions import check_role
from bonobofs.errors import UsageError
from bonobofs.policy.decision import Holding, Refused
from bonobofs.policy.grants import OF_A_GATE
from bonobofs.policy.request import Operation


def why(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A path in a mount, or from the workspace's root; it need not exist.")
    ],
    op: Annotated[
        Operation | None,
        typer.Option(metavar="OPERATION", help="What is to be done there. Default: what writing there takes."),
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="PATH", help="The new path, with --op rename or link: both are judged.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="N", help="How large the file will be: 700000, 700KB, 1MiB.")
    ] = None,
    role: Annotated[
        str | None, typer.Option(metavar="R", help="For whom. Default: the session's role, else default_role.")
    ] = None,
    workspace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The workspace's root. Default: the mount or source around PATH, else the working directory.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The decision as one JSON document.")] = False,
) -> int:
    """Say whether a change would be allowed and, if not, why and what would be. Nothing is changed or recorded.

    The exit code is 0 for allowed and 77 for refused.

    \b
    Examples:
      bonobofs why docs/plan.txt
      bonobofs why docs/report.md --size 2MB
      bonobofs why README.md --op delete_file --role reviewer
      bonobofs why docs --op rename --to src/docs
      bonobofs why . --op merge --role worker
    """
    home = session.home()
    if role is not None:
        check_role(role, session.in_force(home, None, workspace or Path(os.path.abspath(path))))
    answer = session.ask(home, path, operation=op, to=to, size=_bytes(size), role=role, workspace=workspace)
    if json:
        document(answer)
    else:
        _tell(answer)
    return 0 if answer["allowed"] else Refused.exit_code


def _tell(answer: dict[str, Any]) -> None:
    root = "" if answer["operation"] in OF_A_GATE else "the root"
    what = f"{answer['operation']} {answer['path'] or root}".rstrip()
    if answer["allowed"]:
        say(f"allowed: {what} (rule {answer['rule']})")
    else:
        say(f"refused: {what} ({answer['code']}, rule {answer['rule']})")
    held = str(Holding(answer["holder"], answer["chain"], answer["until"])) if "holder" in answer else None
    for line in filter(None, (answer["reason"], held, answer["instead"])):
        say(line)


def _bytes(size: str | None) -> int | None:
    if size is None:
        return None
    try:
        return int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        raise UsageError(f"{size!r} is no size; give bytes, or such as 700KB or 1MiB") from None
