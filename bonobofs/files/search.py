"""Search files for a regular expression in a child process, within limits of time and memory.

The child process is needed to limit the time: Python's `re` backtracks. google-re2 is no replacement. It takes over a
minute for some expressions on one line of 1 MB, and a thread cannot interrupt it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple

from bonobofs.errors import UsageError
from bonobofs.files import search_child

MOST: Final = 1000
"""Limit of the matches of one search."""
LONGEST_FILE: Final = 10_000_000
"""Limit in bytes: larger files are skipped."""
LONGEST_LINE: Final = 500
"""Characters that a match keeps of its line."""
LONGEST_QUERY: Final = 1000
_MEMORY: Final = 1 << 30

# Read at import: if an agent changes the file later, the child still runs this text.
_PROGRAM: Final = Path(search_child.__file__).read_text(encoding="utf-8")


class Match(NamedTuple):
    """One matching line."""

    path: str
    """Relative to the workspace's root."""
    line: int
    """Counted from 1."""
    text: str
    """The line. Of a long line, the part in which the match begins."""


class Searched(NamedTuple):
    """The result of a search."""

    matches: list[Match]
    searched: int
    """Number of files that were read; -1 if the search was stopped at a limit."""
    skipped: int
    """Number of files that are binary, too large or unreadable."""
    more: bool
    """True if there are more than `MOST` matches."""
    in_time: bool
    """False if the search was stopped at its limit of time or memory."""


def search(root: int, query: str, paths: Sequence[str], deadline: float) -> Searched:
    """Search regular files below the directory `root` line by line, until `deadline` (on the monotonic clock).

    Raises UsageError if the query is not a valid expression of Python's `re`.
    """
    if not query or len(query) > LONGEST_QUERY or "\n" in query:
        raise UsageError(f"a query is one line of 1 to {LONGEST_QUERY} characters")
    seconds = max(0.1, deadline - monotonic())
    arguments = {
        "root": root,
        "query": query,
        "most": MOST,
        "longest_file": LONGEST_FILE,
        "longest_line": LONGEST_LINE,
        "seconds": int(seconds) + 1,
        "memory": _MEMORY,
    }
    names = b"".join(os.fsencode(path) + b"\0" for path in paths)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(root,),
        cwd="/",
        env={"LC_ALL": "C.UTF-8"},
    ) as process:
        try:
            output, _ = process.communicate(json.dumps(arguments).encode() + b"\n" + names, timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
    return _parse(output)


def _parse(output: bytes) -> Searched:
    matches: list[Match] = []
    for line in output.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        document: Any = json.loads(line)
        if isinstance(document, list):
            matches.append(Match(*document))
        elif "error" in document:
            raise UsageError(f"the query is not a regular expression: {document['error']}")
        else:
            return Searched(matches, document["searched"], document["skipped"], document["more"], in_time=True)
    return Searched(matches, -1, 0, more=False, in_time=False)
