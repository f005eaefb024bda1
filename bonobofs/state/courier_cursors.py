"""How far each courier is, kept where a killed one finds it again."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import insert, select, update

from bonobofs.state.database import Database
from bonobofs.state.schema import cursors


class Carried(NamedTuple):
    """How far one trail has been carried."""

    place: int = 0
    """Bytes of the trail."""
    seq: int = 0
    """Number of the last entry; 0: none."""
    hash: str = ""
    """Its hash."""
    noted: str = ""
    """The server's moment of the letter with that entry, in its spelling."""


class CourierCursors:
    """The cursors of all couriers of one state directory."""

    def __init__(self, database: Database) -> None:
        """Stand over the database; nothing is read yet."""
        self._database = database

    def load(self, courier: str) -> dict[str, Carried]:
        """How far a courier is, by session; StateError."""
        asked = select(cursors).where(cursors.c.courier == courier)
        with self._database.read() as connection:
            return {row.session: Carried(row.place, row.seq, row.hash, row.noted) for row in connection.execute(asked)}

    def note(self, courier: str, session: str, carried: Carried) -> None:
        """Keep how far it is with one trail; StateError."""
        row = carried._asdict()
        this = (cursors.c.courier == courier) & (cursors.c.session == session)
        with self._database.note() as connection:
            if not connection.execute(update(cursors).where(this).values(row)).rowcount:
                connection.execute(insert(cursors).values(courier=courier, session=session, **row))
