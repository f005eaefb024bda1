"""The program `bd` of a session: it sends its command line to the companion, which runs bd on the source.

The session is the one whose directory contains this program. No environment variable selects it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from bonobofs.errors import BonobofsError, reason
from bonobofs.ipc.client import call
from bonobofs.policy.decision import Refused, as_document

REFUSED: Final = Refused.exit_code


def main() -> int:
    """Run `bd`, with the session's directory as the first argument. Returns the exit status."""
    session, *words = sys.argv[1:]
    variables = [name for name, value in os.environ.items() if value and name.startswith(("BEADS_", "BD_"))]
    try:
        answer = call(Path(session), "beads.bd", arguments=words, variables=variables)
    except Refused as refused:
        denied = refused.decision
        answer = _failed("", REFUSED, [as_document(denied, denied.path, denied.operation)])
    except (BonobofsError, OSError) as error:
        answer = _failed(f"bd: {reason(error)}\n")
    _write(sys.stdout.fileno(), answer["stdout"])
    _write(sys.stderr.fileno(), answer["stderr"] + "".join(_refusal(words, each) for each in answer["denied"]))
    return int(answer["status"])


def _failed(stderr: str, status: int = 1, denied: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"status": status, "stdout": "", "stderr": stderr, "denied": denied or []}


def _refusal(words: list[str], decision: dict[str, Any]) -> str:
    """Format a denial: one line of JSON for programs, and one line of text for people."""
    subcommand = next((word for word in words if not word.startswith("-")), "")
    document = {"error": decision["reason"], **decision, "subcommand": subcommand}
    line = " ".join(filter(None, (decision["reason"], decision.get("about"), decision["instead"])))
    return f"{json.dumps(document)}\nbd: {line}\n"


def _write(descriptor: int, text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BrokenPipeError:
            return
