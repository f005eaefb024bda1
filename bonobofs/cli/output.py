"""Output of the commands: plain lines to pipes and files; colour and columns on a terminal, unless NO_COLOR is set."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

from bonobofs.system.terminal import escape

_PATIENCE: Final = 1.0
"""Seconds of a wait after which a terminal shows a spinner."""


def say(text: str, colour: str = "") -> None:
    """Print one line. Bytes that are not UTF-8 and terminal controls are escaped. `colour`: an SGR code, or ""."""
    print(f"\x1b[{colour}m{escape(text)}\x1b[0m" if colour else escape(text))


def note(text: str) -> None:
    """Print one line to standard error, beside the result."""
    print(f"bonobofs: {escape(text)}", file=sys.stderr)


def local_time(moment: str) -> str:
    """Return an ISO 8601 time as the local time of day, without its zone."""
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def document(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2))


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Print rows under a heading. `styles` has the colour of each row, for a terminal."""
    cells = [[escape(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw(heading, cells, styles)
        return
    widths = [max(len(row[column]) for row in [list(heading), *cells]) for column in range(len(heading))]
    for row in [list(heading), *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def listing(
    entries: list[dict[str, Any]], heading: Sequence[str], rows: Sequence[Sequence[str]], empty: str, *, json: bool
) -> None:
    """Print `entries` as one JSON document, else `rows` as a table, else the sentence `empty`."""
    if json:
        document(entries)
    elif rows:
        table(heading, rows)
    else:
        say(empty)


@contextlib.contextmanager
def paged() -> Iterator[None]:
    """On a terminal, show what is printed during a `with` block in the pager of `PAGER`."""
    if not sys.stdout.isatty():
        yield
        return
    from pydoc import pager  # noqa: PLC0415 - only a terminal needs it

    os.environ.setdefault("LESS", "FRX")
    with contextlib.redirect_stdout(io.StringIO()) as text:
        yield
    pager(text.getvalue())


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """On a terminal, show a spinner with the text while a `with` block takes longer than a second."""
    if not sys.stderr.isatty():
        yield
        return
    with contextlib.ExitStack() as stack:

        def show() -> None:
            from rich.console import Console  # noqa: PLC0415 - importing Rich takes a third of the time of a mount

            stack.enter_context(Console(stderr=True).status(escape(text)))

        timer = threading.Timer(_PATIENCE, show)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


_Item = TypeVar("_Item")


def progress(items: Iterable[_Item], total: int, text: str) -> Iterator[_Item]:
    """Yield the items; on a terminal, show a bar of `total` items meanwhile."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.progress import track  # noqa: PLC0415

    yield from track(items, escape(text), total, console=Console(stderr=True), transient=True)


def _draw(heading: Sequence[str], cells: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in heading:
        grid.add_column(name, overflow="fold")
    for number, row in enumerate(cells):
        grid.add_row(*(Text(cell) for cell in row), style=styles[number] if styles else "")
    Console().print(grid)
