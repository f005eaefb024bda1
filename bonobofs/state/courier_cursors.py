"""Store the cursor of each courier: how much of each trail it has sent."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import insert, select, update

from bonobofs.state.database import Database
from bonobofs.state.schema import cursors


class Carried(NamedTuple):
    """The part of one trail that a courier has sent."""

    place: int = 0
    """Offset in the trail, in bytes."""
    seq: int = 0
    """Number of the last entry; 0: none."""
    hash: str = ""
    """Hash of the last entry."""
    noted: str = ""
    """The server's time of the last letter, in the server's format."""


class CourierCursors:
    """The cursors of all couriers of one state directory."""

    def __init__(self, database: Database) -> None:
        """Use the database; nothing is read yet."""
        self._database = database

    def load(self, courier: str) -> dict[str, Carried]:
        """Return the cursors of a courier by session. StateError."""
        statement = select(cursors).where(cursors.c.courier == courier)
        with self._database.read() as connection:
            rows = connection.execute(statement)
            return {row.session: Carried(row.place, row.seq, row.hash, row.noted) for row in rows}

    def note(self, courier: str, session: str, carried: Carried) -> None:
        """Store the cursor of one trail. StateError."""
        row = carried._asdict()
        this = (cursors.c.courier == courier) & (cursors.c.session == session)
        with self._database.note() as connection:
            if not connection.execute(update(cursors).where(this).values(row)).rowcount:
                connection.execute(insert(cursors).values(courier=courier, session=session, **row))
