"""A reservation at Agent Mail is a lease within seconds, until it is released."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bonobofs import daemon
from bonobofs.agent_mail.mail_client import MailServer
from bonobofs.daemon.reservation_mirror import ReservationJob
from bonobofs.policy.overlap import patterns_meet
from bonobofs.session.mail_settings import open_mailbox, settings_of
from bonobofs.state import agent_registry, heartbeats, leases
from bonobofs.state.database import Database
from bonobofs.state.home import home_id
from bonobofs.state.session_rows import Holder
from tests.agent_mail.servers import TOKEN, Fork, Original
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World

SECONDS = 5.0
"""After which a reservation must be a lease."""


@pytest.fixture(autouse=True)
def _no_daemon_is_left(home: Path) -> Iterator[None]:
    yield
    daemon.stop(home)


@pytest.fixture
def database(home: Path) -> Iterator[Database]:
    with Database.open(home) as database:
        yield database


class Reserving:
    """An agent of another user at the server, in either dialect."""

    def __init__(self, server: Fork | Original, project: str) -> None:
        self._fork = server if isinstance(server, Fork) else None
        self._original = server if isinstance(server, Original) else None
        self._project = project
        self._server = MailServer(server.url, TOKEN)

    def reserve(self, agent: str, pattern: str, *, exclusive: bool = True) -> int:
        if self._original is not None:
            number = len(self._original.reservations) + 1
            expires = datetime.now(UTC) + timedelta(hours=1)
            self._original.reservations.append(
                {
                    "id": number,
                    "agent": agent,
                    "path_pattern": pattern,
                    "exclusive": exclusive,
                    "reason": "bd-1",
                    "expires_ts": expires.isoformat(),
                    "released_ts": None,
                }
            )
            return number
        self._server.call("ensure_project", {"human_key": self._project})
        registered = {"project_key": self._project, "program": "t", "model": "m", "name": agent}
        self._server.call("register_agent", registered)
        granted = self._extended("file_reservation_paths", agent, paths=[pattern], exclusive=exclusive, reason="bd-1")
        return int(granted["granted"][0]["id"])

    def release(self, agent: str, number: int) -> None:
        if self._original is not None:
            self._original.reservations[number - 1]["released_ts"] = datetime.now(UTC).isoformat()
        else:
            self._extended("release_file_reservations", agent, file_reservation_ids=[number])

    def _extended(self, tool: str, agent: str, **arguments: Any) -> Any:
        given = {"project_key": self._project, "agent_name": agent, **arguments}
        return self._server.call("call_extended_tool", {"tool_name": tool, "arguments": given})


@pytest.fixture
def world(mounted: Mounted, server: Fork | Original, tmp_path: Path, project: str) -> World:
    (tmp_path / "token").write_text(TOKEN)
    return mounted(
        policy=f'{ALLOW_ALL}[agent_mail]\nurl = "{server.url}"\ntoken_file = "{tmp_path}/token"\n'
        f'project = "{project}"\nmirror_reservations = true\n'
    )


@pytest.fixture
def reserving(server: Fork | Original, project: str) -> Reserving:
    return Reserving(server, project)


def soon(ask: Callable[[], object], what: str) -> None:
    until(ask, what, seconds=SECONDS)


def test_a_reservation_is_a_lease_until_it_is_released(
    home: Path, world: World, database: Database, reserving: Reserving
) -> None:
    """For the local agent of that name; if there is none, for a holder of that name."""
    carol = agent_registry.add(database, f"carol{uuid.uuid4().hex[:8]}")
    other = f"Other{uuid.uuid4().hex[:8]}"
    daemon.start(home)
    until(lambda: "reservations" in daemon.status(home).problems, "the daemon looks", seconds=30)
    mine = reserving.reserve(carol.label, "docs/**")
    reserving.reserve(other, "src/x.py", exclusive=False)
    soon(lambda: len(leases.list_leases(database)) == 2, "both are leases")
    docs, source = sorted(leases.list_leases(database), key=lambda lease: lease.patterns)
    assert (docs.patterns, docs.holder.agent_id, docs.shared) == (("docs/**",), carol.id, False)
    assert (docs.reason, docs.workspace) == ("bd-1", str(world.source))
    assert (source.patterns, source.holder.key, source.shared) == (("src/x.py",), f"mail:{other}", True)
    reserving.release(carol.label, mine)
    soon(lambda: len(leases.list_leases(database)) == 1, "the released one is none")


def test_a_reserved_path_is_refused_in_the_mount(home: Path, world: World, reserving: Reserving) -> None:
    """Within seconds. After the release it is permitted again."""
    (world.path / "docs").mkdir()
    daemon.start(home)
    until(lambda: "reservations" in daemon.status(home).problems, "the daemon looks", seconds=30)
    rival = f"Rival{uuid.uuid4().hex[:8]}"
    number = reserving.reserve(rival, "docs/**")
    soon(lambda: not writes(world, "docs/plan.md"), "it is refused")
    assert writes(world, "src.py")
    assert {entry.code for entry in world.entries() if entry.result == "denied"} == {"LEASED"}
    reserving.release(rival, number)
    soon(lambda: writes(world, "docs/plan.md"), "it is allowed")


def writes(world: World, name: str) -> bool:
    try:
        (world.path / name).write_text("text")
    except PermissionError:
        return False
    return True


def test_a_conflicting_reservation_is_reported_once_and_is_no_lease(
    home: Path, world: World, database: Database, reserving: Reserving
) -> None:
    """Until the conflicting lease has ended. A pattern that cannot be enforced is reported too."""
    holder = Holder("alice", world.session.agent_id)
    held = leases.acquire(database, leases.LeaseRequest(holder, ("docs/plan.md",)), patterns_meet).lease
    rival = f"Rival{uuid.uuid4().hex[:8]}"
    reserving.reserve(rival, "docs/*.md")
    reserving.reserve(rival, "a/../b")
    settings = settings_of(home, home_id(home), world.session)
    assert settings is not None
    mailbox = open_mailbox(home, settings)
    mailbox.open()
    daemon.start(home)

    def alerts() -> list[str]:
        return [sent.subject for sent in mailbox.sent() if sent.subject.startswith("alert: ")]

    until(lambda: len(alerts()) == 2, "both are reported", seconds=30)
    said = f"docs/*.md, reserved by {rival}, is not a lease: docs/**/*.md overlaps with docs/plan.md, held by alice"
    until(lambda: said in daemon.status(home).problems.get("reservations", ""), "it stands there", seconds=30)
    assert [lease.id for lease in leases.list_leases(database)] == [held.id]
    leases.release(database, held.id)
    soon(
        lambda: [lease.patterns for lease in leases.list_leases(database)] == [("docs/**/*.md",)], "it is a lease then"
    )
    daemon.stop(home)
    daemon.start(home)
    until(lambda: "a/../b" in daemon.status(home).problems.get("reservations", ""), "it is looked again", seconds=30)
    assert len(alerts()) == 2


def test_mirrored_leases_stay_during_an_outage(
    home: Path, mounted: Mounted, original: Original, database: Database, tmp_path: Path
) -> None:
    """They expire at their time. Until then the mirror does not treat them as released."""
    (tmp_path / "token").write_text(TOKEN)
    mounted(
        policy=f'{ALLOW_ALL}[agent_mail]\nurl = "{original.url}"\ntoken_file = "{tmp_path}/token"\n'
        "mirror_reservations = true\n"
    )
    Reserving(original, "").reserve("Somebody", "docs/**")
    part = ReservationJob(home)
    assert part.step(lambda: True) == ""
    (lease,) = leases.list_leases(database)
    original.stop()
    assert "cannot be reached" in part.step(lambda: True)
    assert leases.list_leases(database) == [lease]
    part.close()


def mirroring(original: Original, mounted: Mounted, tmp_path: Path) -> World:
    (tmp_path / "token").write_text(TOKEN)
    return mounted(
        policy=f'{ALLOW_ALL}[agent_mail]\nurl = "{original.url}"\ntoken_file = "{tmp_path}/token"\n'
        "mirror_reservations = true\n"
    )


def test_an_expired_or_invalid_reservation_is_ignored(
    home: Path, mounted: Mounted, original: Original, database: Database, tmp_path: Path
) -> None:
    """Any client may write any reservation. Equal lists give equal leases."""
    mirroring(original, mounted, tmp_path)
    reserving = Reserving(original, "")
    reserving.reserve("Late", "late/**")
    original.reservations[0]["expires_ts"] = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    reserving.reserve("Odd\0\ud800", "odd/\0/\udcff")
    reserving.reserve("Odd\0\ud800", "fine/**")
    original.reservations[2]["reason"] = "\0\x1b[2J\ud800"
    original.reservations[2]["expires_ts"] = (datetime.now(UTC) + timedelta(hours=1)).replace(tzinfo=None).isoformat()
    part = ReservationJob(home)
    said = part.step(lambda: True)
    assert "is not a lease" in said
    with database.read() as connection:
        before = heartbeats.generation(connection)
    assert part.step(lambda: True) == said
    with database.read() as connection:
        assert heartbeats.generation(connection) == before
    (lease,) = leases.list_leases(database)
    assert (lease.patterns, lease.reason.isprintable()) == (("fine/**",), True)
    assert timedelta(minutes=59) < lease.until - datetime.now(UTC) < timedelta(minutes=61)
    part.close()


def test_an_alert_without_a_reply_is_sent_once(
    home: Path, mounted: Mounted, original: Original, database: Database, tmp_path: Path
) -> None:
    """A reservation that is no lease does not prevent other leases."""
    mirroring(original, mounted, tmp_path)
    Reserving(original, "").reserve("Rival", "a/../b")
    Reserving(original, "").reserve("Rival", "docs/**")
    original.silent_after = 0
    part = ReservationJob(home)
    assert "closed the connection" in part.step(lambda: True)
    assert len(leases.list_leases(database)) == 1
    for _ in range(3):
        assert "is not a lease" in part.step(lambda: True)
    part.close()
    assert len(original.messages) == 1


def test_a_corrected_token_is_read(home: Path, mounted: Mounted, original: Original, tmp_path: Path) -> None:
    """Without a restart."""
    mirroring(original, mounted, tmp_path)
    (tmp_path / "token").write_text("another")
    part = ReservationJob(home)
    assert "answers 401" in part.step(lambda: True)
    (tmp_path / "token").write_text(TOKEN)
    assert part.step(lambda: True) == ""
    part.close()
