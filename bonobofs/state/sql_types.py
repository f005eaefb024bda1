"""What SQL needs beyond SQLAlchemy's own: text that may be no text, and the database's clock, on both databases."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, Dialect, Text, TypeDecorator
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

_BYTE = re.compile("[\udc80-\udcff\\\\]")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|(\\))")


class ExactText(TypeDecorator[str]):
    r"""Text that may hold bytes that are not UTF-8, as names of files do: those are kept as \xNN, a backslash as \\."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else escape(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else _unescape(value)


def escape(text: str) -> str:
    return _BYTE.sub(lambda found: "\\\\" if found[0] == "\\" else f"\\x{ord(found[0]) - 0xDC00:02x}", text)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(0xDC00 + int(found[1], 16)) if found[1] else "\\", text)


def moment(milliseconds: int) -> datetime:
    """A moment of the database, for people and comparisons; `milliseconds_of` is the way back."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def milliseconds_of(when: datetime) -> int:
    return round(when.timestamp() * 1000)


class clock(FunctionElement[int]):  # noqa: N801 - it is a function of SQL
    """The database's own time: milliseconds since 1970, UTC. On PostgreSQL it goes on within a transaction."""

    type = BigInteger()
    inherit_cache = True


@compiles(clock, "sqlite")
def _clock_of_sqlite(element: clock, compiler: Any, **_: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


@compiles(clock, "postgresql")
def _clock_of_postgresql(element: clock, compiler: Any, **_: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"
