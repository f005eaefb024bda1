"""Taking over `agents.json`, in which earlier versions kept the labels and identities of agents.

{"agents": {LABEL: {"id": UUID, "role": ROLE or null}}}
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select

from bonobofs.errors import StateError
from bonobofs.state.database import Database
from bonobofs.state.home import read_document
from bonobofs.state.schema import agents
from bonobofs.state.sql_types import clock


def take_over(database: Database, path: Path) -> None:
    """Enter the agents of that file, under the identities that they have, and rename it to `agents.json.imported`.

    A label that already lives in the database, as when another state directory shares it, stays with who has it; the
    other identity is entered as one that was removed, so that its records can be read. StateError for a damaged file.
    """
    with database.change() as connection:
        try:
            entries = _read(path)
        except FileNotFoundError:
            return
        known = set(connection.scalars(select(agents.c.id)))
        living = set(connection.scalars(select(agents.c.name).where(agents.c.removed.is_(None))))
        for label, entry in entries.items():
            if entry["id"] not in known:
                removed = clock() if label in living else None
                connection.execute(
                    insert(agents).values(
                        id=entry["id"], name=label, role=entry["role"], created=clock(), removed=removed
                    )
                )
    # Another process may have done all of it a moment ago.
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_name(f"{path.name}.imported"))


def _read(path: Path) -> dict[str, dict[str, Any]]:
    entries = read_document(path).get("agents")
    if not isinstance(entries, dict) or not all(
        isinstance(one, dict) and isinstance(one.get("id"), str) and "role" in one for one in entries.values()
    ):
        raise StateError(f"{path} is not the register of agents that bonobofs wrote; move it away")
    return entries
