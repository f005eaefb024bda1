"""What bd answers. Its JSON comes bare or in an envelope, its errors on either stream, as JSON or as text.

Notices may stand around either. So the payload is looked for, and no error is told from an answer by its place alone.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

_DECODER: Final = json.JSONDecoder()
_LONGEST: Final = 300
"""Characters of a complaint that are told; an unknown flag is answered with fifty lines."""


class Output(NamedTuple):
    """How one call of bd ended."""

    status: int | None
    """Its exit status, or the negative number of a signal; None: it was ended at its time limit."""
    stdout: str
    stderr: str


def payload(output: Output) -> Any:
    """The JSON on standard output, without its envelope; None where there is none. An error is its object."""
    return _payload(output.stdout)


def complaint(output: Output) -> str:
    """Why bd says that it failed, on one line; "" where it says nothing of the kind."""
    for stream in (output.stdout, output.stderr):
        found = _payload(stream)
        if isinstance(found, dict) and "error" in found:
            return _line(str(found.get("message") or found["error"]))
    if output.status == 0:
        return ""
    # What was wrong stands before the usage, or behind the notices.
    lines = [line.strip() for line in output.stderr.partition("\nUsage:")[0].splitlines() if line.strip()]
    wrong = [line for line in lines if line.lower().startswith("error")]
    told = (wrong or lines or [""])[0 if wrong else -1]
    return _line(told.removeprefix("Error: "))


def notices(output: Output) -> tuple[str, ...]:
    """What bd said beside its answer, a line each."""
    lines = output.stderr.splitlines() if _payload(output.stderr) is None else ()
    return tuple(_line(line) for line in lines if line.strip())


def _payload(text: str) -> Any:
    """The longest JSON that begins a line: what a notice holds of it is shorter than an answer."""
    found: Any = None
    longest = start = 0
    while (start := _opening(text, start)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            if end - start > longest:
                found, longest = value, end - start
        start = end
    if isinstance(found, dict) and found.keys() >= {"data", "schema_version"}:
        return found["data"]
    return found


def _opening(text: str, start: int) -> int:
    """Where the next line begins that could be JSON: an object or an array opens with it; -1 for none."""
    while start <= len(text):
        if text[start : start + 1] in ("{", "[") and (start == 0 or text[start - 1] == "\n"):
            return start
        end = text.find("\n", start)
        if end < 0:
            return -1
        start = end + 1
    return -1


def _line(text: str) -> str:
    text = "".join(character if character.isprintable() else " " for character in text).strip()
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
