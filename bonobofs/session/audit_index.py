"""What the record of all sessions says together: the index over their trails, and what is known beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from bonobofs.audit.index import Index, Progress
from bonobofs.audit.report import About
from bonobofs.audit.verify import read_head
from bonobofs.errors import StateError, TrailError
from bonobofs.state import heartbeats
from bonobofs.state.home import head_path, read_document, session_directory
from bonobofs.state.sessions import read_all


@contextlib.contextmanager
def open_index(home: Path) -> Iterator[Index]:
    """The index of a state directory, as it was left; `catch_up` brings it up to the trails. StateError."""
    # Most commands need no database, and reading SQLAlchemy takes longer than they do.
    from bonobofs.audit.index_store import open_tables  # noqa: PLC0415
    from bonobofs.state.database import home_id  # noqa: PLC0415

    tables = open_tables(home)
    try:
        yield Index(home, home_id(home), tables)
    finally:
        tables.close()


def rebuild_index(home: Path) -> Progress:
    """Throw away what the index has of this state directory's trails, and read them all; StateError."""
    from bonobofs.audit.index_store import throw_away  # noqa: PLC0415 - as above

    try:
        with open_index(home) as index:
            return index.rebuild()
    except StateError as error:
        if not throw_away(home, error):
            raise
    with open_index(home) as index:
        return index.rebuild()


def about_sessions(home: Path) -> dict[str, About]:
    """What is known of each session that can be read, by UUID; of other hosts' by the database."""
    from bonobofs.state.database import Database  # noqa: PLC0415 - as above

    with Database.open(home) as database:
        found = {name: About(role, source) for name, role, source in heartbeats.entered(database)}
    for session in read_all(home)[0]:
        head = _head(home, session.session)
        found[session.session] = About(session.role, session.source, session.policy.digest, *head)
    return found


def _head(home: Path, session: str) -> tuple[int, str]:
    try:
        head = read_head(head_path(home, session))
    except (FileNotFoundError, TrailError):
        return 0, ""
    return head.seq, head.hash


def rules_of_sessions(home: Path) -> set[str]:
    """The names of the [[rule]] tables of all sessions' policies."""
    found: set[str] = set()
    for session in read_all(home)[0]:
        with contextlib.suppress(OSError, StateError):
            policy = read_document(session_directory(home, session.session) / "policy.json")
            found.update(rule["name"] for rule in policy.get("rule", ()))
    return found


def agents_of(home: Path) -> set[str]:
    """The labels and UUIDs of the agents of the register, and of those that were removed from it."""
    from bonobofs.state import agent_registry  # noqa: PLC0415 - as above
    from bonobofs.state.database import Database  # noqa: PLC0415 - as above

    with Database.open(home) as database:
        return {name for one in agent_registry.list_agents(database, removed=True) for name in (one.label, one.id)}
