"""Find the line of each key and array element of a TOML text, for error messages.

tomllib returns values without lines. This scanner takes only texts that tomllib accepts, and parses no more than it
needs to count lines.
"""

from __future__ import annotations

import re
import tomllib
from typing import Final

KeyPath = tuple[str | int, ...]
"""The path to a value: keys of tables and indices of arrays, like pydantic's `loc`."""

_BLANK: Final = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_KEY: Final = re.compile(r"""[ \t]*("(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_-]+)[ \t]*""")
_STRING: Final = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})|' r"'''.*?'''(?:'{0,2})|" r'"(?:\\.|[^"\\])*"|' r"'[^']*'",
    re.DOTALL,
)
_SCALAR: Final = re.compile(r"[^,\]}#\r\n]+")


def positions(text: str) -> dict[KeyPath, int]:
    """Return the line, counted from 1, of every key and array element of a valid TOML text."""
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self._counted = (0, 1)
        self._tables: dict[KeyPath, int] = {}

    def document(self) -> None:
        table: KeyPath = ()
        self._skip(_BLANK)
        while self.at < len(self.text):
            if self.text.startswith("[[", self.at):
                table = self._array_of_tables()
            elif self.text[self.at] == "[":
                self.at += 1
                table = self._key(())
                self.at += 1
            else:
                self._pair(table)
            self._skip(_BLANK)

    def _array_of_tables(self) -> KeyPath:
        self.at += 2
        array = self._key(())
        index = self._tables[array] = self._tables.get(array, -1) + 1
        self._note((*array, index))
        self.at += 2
        return (*array, index)

    def _pair(self, table: KeyPath) -> None:
        key_path = self._key(table)
        self.at += 1
        self._value(key_path)

    def _key(self, table: KeyPath) -> KeyPath:
        """Parse a dotted key. The name of an array of tables refers to the last element of that array."""
        key_path = table
        while True:
            match = _KEY.match(self.text, self.at)
            if match is None:
                raise ValueError("not a key")
            name = match[1]
            key_path = (*key_path, _unquoted(name))
            self._note(key_path, match.start(1))
            self.at = match.end()
            dotted = self.text.startswith(".", self.at)
            if not dotted:
                return key_path
            if key_path in self._tables:
                key_path = (*key_path, self._tables[key_path])
            self.at += 1

    def _value(self, key_path: KeyPath) -> None:
        self._skip(_BLANK)
        self._note(key_path)
        opening = self.text[self.at]
        if opening == "[":
            self._elements(key_path)
        elif opening == "{":
            self._inline_table(key_path)
        elif not self._skip(_STRING):
            self._skip(_SCALAR)

    def _elements(self, key_path: KeyPath) -> None:
        self.at += 1
        index = 0
        self._skip(_BLANK)
        while self.text[self.at] != "]":
            self._value((*key_path, index))
            index += 1
            self._separator()
        self.at += 1

    def _inline_table(self, key_path: KeyPath) -> None:
        self.at += 1
        self._skip(_BLANK)
        while self.text[self.at] != "}":
            self._pair(key_path)
            self._separator()
        self.at += 1

    def _separator(self) -> None:
        self._skip(_BLANK)
        if self.text[self.at] == ",":
            self.at += 1
            self._skip(_BLANK)

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        match = pattern.match(self.text, self.at)
        if match is None:
            return False
        self.at = match.end()
        return True

    def _note(self, key_path: KeyPath, at: int | None = None) -> None:
        """Store the line of a key path, unless it has one: the header of a table comes before its keys."""
        at = self.at if at is None else at
        counted, line = self._counted
        line += self.text.count("\n", counted, at)
        self._counted = (at, line)
        self.lines.setdefault(key_path, line)


def _unquoted(name: str) -> str:
    if name[0] in "\"'":
        return str(next(iter(tomllib.loads(f"x = {name}").values())))
    return name
