"""What bd says, and where: JSON in two forms, errors on either stream or as text."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

USAGE = "Usage:\n  bd [command] [flags]\n\nFlags:\n" + "".join(f"  --flag-{n}   a flag\n" for n in range(45))

_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")
"""What is stored in the metadata of an issue, and read back raw."""


class Failed(Exception):  # noqa: N818 - how a command ends
    """`where`: "stdout" or "stderr" for JSON, "text" for text on standard error, with or without --json."""

    def __init__(
        self, message: str, where: str = "text", *, status: int = 1, more: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.status = status
        self.more = more or {}


class Answers:
    """The two streams of one call."""

    def __init__(self, *, as_json: bool, envelope: bool) -> None:
        self.as_json = as_json
        self.envelope = envelope

    def tell(self, payload: Any, text: str) -> None:
        """The answer of a command: the payload with --json, else the text."""
        if not self.as_json:
            if text:
                print(text)
            return
        rows = payload if isinstance(payload, list) else []
        if any(_CONTROL.search(json.dumps(row.get("metadata"))) for row in rows if isinstance(row, dict)):
            raise Failed("encoding JSON: invalid character in string literal", "stderr")
        if self.envelope:
            payload = {"data": payload, "schema_version": 1}
        elif isinstance(payload, dict):
            payload = {**payload, "schema_version": 1}
        print(json.dumps(payload, indent=2, ensure_ascii=False))

    def fail(self, failed: Failed) -> int:
        if self.as_json and failed.where != "text":
            error: dict[str, Any] = {"error": failed.message, **failed.more}
            error = {"data": error, "schema_version": 1} if self.envelope else {**error, "schema_version": 1}
            print(json.dumps(error, indent=2), file=sys.stdout if failed.where == "stdout" else sys.stderr)
        else:
            self.notice(f"Error: {failed.message}")
        return failed.status

    @staticmethod
    def notice(text: str) -> None:
        print(text, file=sys.stderr)
