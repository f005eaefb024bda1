"""Escape untrusted text for one line of a terminal or a log."""

from __future__ import annotations

import re
from typing import Final

# C0, DEL and C1; line and paragraph separators; bidirectional controls; lone surrogates; the backslash, so that the
# escaping is reversible.
_ESCAPED: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\\\\]")


def escape(text: str) -> str:
    r"""Escape control characters and `\\`, so that the text is one line and cannot steer a terminal."""
    return _ESCAPED.sub(_escaped, text)


def printable(text: str, replacement: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """Replace each character that is not printable."""
    return "".join(character if character.isprintable() else replacement for character in text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    number = ord(character)
    if character == "\\":
        return "\\\\"
    if 0xDC80 <= number <= 0xDCFF:
        return f"\\x{number - 0xDC00:02x}"
    return character.encode("unicode_escape", "surrogatepass").decode()
