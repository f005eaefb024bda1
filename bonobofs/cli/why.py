"""`bonobofs why`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Final

from bonobofs import session
from bonobofs.cli.actor import check_role
from bonobofs.cli.options import Argument, Option
from bonobofs.cli.output import document, say
from bonobofs.errors import UsageError
from bonobofs.policy.decision import Holding, Refused
from bonobofs.policy.request import Operation, PlannedChange
from bonobofs.policy.role_lists import OF_A_GATE

_SIZE: Final = re.compile(r"\s*(\d*\.?\d+)\s*(?:([kmgtpe])(i)?)?b?\s*", re.IGNORECASE)


def why(
    path: Annotated[
        str, Argument(metavar="PATH", help="A path in a mount, or from the workspace's root; it need not exist.")
    ],
    op: Annotated[
        Operation | None,
        Option(metavar="OPERATION", help="The operation. Default: the one that writing there needs."),
    ] = None,
    to: Annotated[
        str | None, Option(metavar="PATH", help="The new path, with --op rename or link. Both paths are checked.")
    ] = None,
    size: Annotated[
        str | None, Option(metavar="N", help="The size of the file after the change: 700000, 700KB, 1MiB.")
    ] = None,
    role: Annotated[
        str | None, Option(metavar="R", help="The role. Default: the session's, else default_role.")
    ] = None,
    workspace: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="The workspace's root. Default: the mount or source around PATH, else the working directory.",
        ),
    ] = None,
    json: Annotated[bool, Option("--json", help="The decision as one JSON document.")] = False,
) -> int:
    """Explain whether a change is allowed and, if not, why and what to do instead. Nothing is changed or recorded.

    Exit 0 if it is allowed, 77 if it is refused.

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
        root = workspace or session.root_around(home, Path(os.path.abspath(path)))
        check_role(role, session.in_force(home, root=root))
    answer = session.explain(home, PlannedChange(path, op, _bytes(size), to, role), workspace)
    if json:
        document(answer)
    else:
        _print_decision(answer)
    return 0 if answer["allowed"] else Refused.exit_code


def _print_decision(answer: dict[str, Any]) -> None:
    root = "" if answer["operation"] in OF_A_GATE else "the root"
    what = f"{answer['operation']} {answer['path'] or root}".rstrip()
    if answer["allowed"]:
        say(f"allowed: {what} (rule {answer['rule']})")
    else:
        say(f"refused: {what} ({answer['code']}, rule {answer['rule']})")
    held = str(Holding(answer["holder"], answer["chain"], answer["until"])) if "holder" in answer else None
    question = f"The question is {answer['question']}." if "question" in answer else None
    for line in filter(None, (answer["reason"], answer.get("about"), held, question, answer["instead"])):
        say(line)


def _bytes(size: str | None) -> int | None:
    if size is None:
        return None
    found = _SIZE.fullmatch(size)
    if found is None:
        raise UsageError(f"{size!r} is not a size; give bytes, 700KB or 1MiB")
    number, unit, binary = found.groups()
    value = float(number) * (1024 if binary else 1000) ** (" kmgtpe".index((unit or " ").lower()))
    if value >= 2**63:
        raise UsageError("--size is more than a file can have; give at most 8EiB")
    return int(value)
