"""The stories of commands.txt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

_HEADER: Final = re.compile(r"== (?P<name>.*?)(?: \((?:(?P<reads>reads)|refused: (?P<refused>.*))\))?")


class Story(NamedTuple):
    """Lines that run one after the other in the work tree."""

    lines: list[str]
    refused: str = ""
    """Why the mount refuses the last line; "": it does not."""
    reads: bool = False
    """The lines change nothing, so their output is compared too."""


def _read() -> dict[str, Story]:
    stories: dict[str, Story] = {}
    lines: list[str] = []
    for line in Path(__file__).with_name("commands.txt").read_text(encoding="utf-8").splitlines():
        if match := _HEADER.fullmatch(line):
            lines = []
            stories[match["name"]] = Story(lines, match["refused"] or "", bool(match["reads"]))
        elif line and not line.startswith("#"):
            lines.append(line)
    return stories


STORIES: Final = _read()
