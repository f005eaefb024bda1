"""A lease applies to every live session when `acquire` returns, and no session uses an expired snapshot."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.audit.reader import read
from bonobofs.errors import StateError
from bonobofs.guards import FileGuard, ValidationResult
from bonobofs.policy.decision import Code, Holding, Refused
from bonobofs.policy.overlap import patterns_meet
from bonobofs.session import OpenSession
from bonobofs.state import heartbeats, leases, session_rows
from bonobofs.state.database import Database
from bonobofs.state.lease_follower import BEAT, LAPSE, LeaseReader, detach
from bonobofs.state.leases import LeaseChange, LeaseRequest
from bonobofs.state.session_rows import Holder
from tests.support.postgres import Postgres
from tests.support.wait import until


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "all.toml"
    path.write_text('default = "allow"\n')
    return path


@pytest.fixture
def ann(where: str, source: Path, policy: Path) -> Iterator[OpenSession]:
    """A session of the agent ann, which writes files."""
    with session.open_session(source, agent="ann", policy=policy) as opened:
        yield opened


def holder(database: Database, label: str) -> Holder:
    return Holder(label, session_rows.register(database, label).id)


def follower_of(database: Database, opened: OpenSession) -> LeaseReader:
    made = opened.session
    return LeaseReader(database, made.session, Holder(made.agent, made.agent_id).key, made.source)


def acquire(database: Database, label: str, *patterns: str, shared: bool = False, seconds: float = 60) -> LeaseChange:
    """As `lease acquire` does: it returns when the lease binds everybody."""
    wanted = LeaseRequest(holder(database, label), patterns, shared=shared, seconds=seconds)
    granted = leases.acquire(database, wanted, patterns_meet)
    leases.wait(database, granted.generation)
    return granted


def write(opened: OpenSession, path: str) -> ValidationResult | None:
    """None where it was written, else the denial."""
    with FileGuard(opened) as files:
        said = files.write_file(path, "text", opened.session.agent, overwrite=True)
    return said if isinstance(said, ValidationResult) else None


def test_a_lease_refuses_changes_by_other_agents(ann: OpenSession, database: Database) -> None:
    """The denial names the holder and the expiry. The record names the lease."""
    assert write(ann, "docs/a.md") is None
    granted = acquire(database, "bob", "docs/**")
    denied = write(ann, "docs/a.md")
    assert denied is not None
    assert denied.code is Code.LEASED
    assert write(ann, "other/a.md") is None
    with FileGuard(ann) as files, pytest.raises(Refused) as refused:
        files.guarded_delete_file("docs/a.md", "ann")
    until = granted.lease.until.isoformat(timespec="seconds")
    assert f"It is held by bob until {until}." in str(refused.value)
    bob = granted.lease.holder.agent_id
    assert refused.value.decision.holding == Holding("bob", None, until, bob)
    entries = list(read(Path(ann.session.source).parent / "home" / "trails" / f"{ann.session.session}.jsonl"))
    (entry, *_) = [entry for entry in entries if entry.result == "denied"]
    assert (entry.code, entry.lock) == ("LEASED", "bob")
    assert {name: entry.details[name] for name in Holding._fields} == {
        "holder": "bob",
        "holder_id": bob,
        "chain": None,
        "until": until,
    }


def test_the_holder_may_change_its_path_and_the_record_names_the_lease(ann: OpenSession, database: Database) -> None:
    acquire(database, "ann", "docs/**")
    assert write(ann, "docs/a.md") is None
    assert write(ann, "a.md") is None
    locks = {entry.path: entry.lock for entry in ann.log.recent() if entry.kind == "intent"}
    assert (locks["docs/a.md"], locks["a.md"]) == ("own", "none")


def test_only_holders_of_a_shared_lease_may_change_its_paths(ann: OpenSession, database: Database) -> None:
    acquire(database, "bob", "docs/**", shared=True)
    assert write(ann, "docs/a.md") is not None
    acquire(database, "ann", "docs/**", shared=True)
    assert write(ann, "docs/a.md") is None


def test_an_expired_or_released_lease_refuses_no_change(ann: OpenSession, database: Database) -> None:
    """The session reads the change itself, without a message."""
    acquire(database, "bob", "docs/**", seconds=0.5)
    until(lambda: write(ann, "docs/a.md") is None, "the lease has ended")
    granted = acquire(database, "bob", "docs/**")
    assert write(ann, "docs/a.md") is not None
    leases.release(database, granted.lease.id)
    until(lambda: write(ann, "docs/a.md") is None, "the lease is released")


def test_acquire_returns_after_a_change_in_flight_has_ended(ann: OpenSession, database: Database) -> None:
    """Also if the change takes longer than the heartbeat expiry."""
    over = threading.Event()

    def change() -> None:
        with ann.change_lock:
            began.set()
            deadline = time.monotonic() + LAPSE + 2 * BEAT
            until(lambda: time.monotonic() > deadline, "it takes its time")
            over.set()

    began = threading.Event()
    thread = threading.Thread(target=change)
    thread.start()
    began.wait()
    acquire(database, "bob", "docs/**")
    assert over.is_set()
    thread.join()
    assert write(ann, "docs/a.md") is not None


def test_acquire_does_not_wait_for_a_session_without_heartbeats(database: Database, ann: OpenSession) -> None:
    """The session was killed, or its host has disappeared."""
    made = ann.session
    ghost = made._replace(session="33333333-3333-4333-8333-333333333333")
    session_rows.insert_session(database, database.home, ghost)
    with database.read() as connection:
        assert len(heartbeats.living(connection)) == 2
    began = time.monotonic()
    granted = acquire(database, "bob", "docs/**")
    assert time.monotonic() - began < LAPSE + 20
    with database.read() as connection:
        assert [(one.id, one.acknowledged) for one in heartbeats.living(connection)] == [
            (made.session, granted.generation)
        ]


def test_a_lease_snapshot_expires_before_the_heartbeat_does(database: Database, ann: OpenSession) -> None:
    """By the session's own clock, from before it sent the heartbeat."""
    follower = follower_of(database, ann)
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    seen = follower.read()
    assert before < seen.expires_at < before + LAPSE
    assert seen.leases == []


def test_an_unacknowledged_snapshot_is_delivered_again(database: Database, ann: OpenSession) -> None:
    """A read that failed because the database disappeared loses no lease."""
    follower = follower_of(database, ann)
    leases.acquire(database, LeaseRequest(holder(database, "bob"), ("docs/**",)), patterns_meet)
    first, second = follower.read(), follower.read()
    assert first.leases == second.leases
    assert first.leases is not None
    follower.acknowledge(second)
    assert follower.read().leases is None


def test_a_mirrored_reservation_does_not_block_its_own_agent(
    where: str, source: Path, policy: Path, database: Database
) -> None:
    """Neither as a member of a chain nor after a change of the chain. Other agents are blocked."""
    ends = datetime.now(UTC) + timedelta(hours=1)

    def owns(agent: str, chain: str | None) -> set[bool]:
        with session.open_session(source, agent=agent, policy=policy) as opened:
            detach(database, opened.session.session)
            mine = opened.session._replace(session=str(uuid.uuid4()), chain=chain)
            session_rows.insert_session(database, database.home, mine)
            ann = leases.holder_of_mail(database, "ann", opened.session.source)
            for origin, pattern in (("mail:1", "docs/**"), ("mail:2", "docs/plan.md")):
                mirrored = LeaseRequest(ann, (pattern,), workspace=opened.session.source, origin=origin)
                assert leases.mirror(database, mirrored, patterns_meet, until=ends) is None
            key = Holder(agent, opened.session.agent_id, chain).key
            seen = LeaseReader(database, mine.session, key, mine.source).read().leases
            detach(database, mine.session)
            assert seen is not None
            assert len(seen) == 2
            return {one["own"] for one in seen}

    for chain in ("C1", None, "C2"):
        assert owns("ann", chain) == {True}
    assert owns("bob", None) == {False}


def test_leases_apply_across_hosts(
    postgres: Postgres, source: Path, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two state directories and one PostgreSQL. During an outage changes are refused, reads go on, and no lease is
    lost.
    """
    monkeypatch.setenv("BONOBOFS_DATABASE", postgres.make_database())
    monkeypatch.setenv("BONOBOFS_HOME", str(tmp_path / "one"))
    with session.open_session(source, agent="ann", policy=policy) as ann:
        monkeypatch.setenv("BONOBOFS_HOME", str(tmp_path / "two"))
        with (
            Database.open(session.home()) as elsewhere,
            session.open_session(source, agent="bob", policy=policy) as bob,
        ):
            acquire(elsewhere, "bob", "docs/**")
            assert write(bob, "docs/a.md") is None
            assert write(ann, "docs/a.md") is not None
            assert write(ann, "a.md") is None

            postgres.stop()
            until(lambda: write(ann, "a.md") is not None, "what is leased cannot be known", seconds=LAPSE + 5)
            until(lambda: write(bob, "docs/a.md") is not None, "its holder cannot know either", seconds=LAPSE + 5)
            assert (source / "a.md").read_text() == "text"
            with pytest.raises(StateError, match="cannot be used"):
                leases.list_leases(elsewhere)

            postgres.start()
            until(lambda: write(ann, "a.md") is None, "it is known again")
            until(lambda: write(bob, "docs/a.md") is None, "the holder knows again")
            assert write(ann, "docs/a.md") is not None
            (lease,) = leases.list_leases(elsewhere)
            assert lease.holder.agent == "bob"
            leases.release(elsewhere, lease.id)
            until(lambda: write(ann, "docs/a.md") is None, "it is released")


def test_a_change_makes_no_database_query(ann: OpenSession, database: Database) -> None:
    """A thread reads the leases. While the database is locked, changes go on until the snapshot expires."""
    with database.alone():
        for number in range(20):
            assert write(ann, f"docs/{number}.md") is None
        until(lambda: write(ann, "docs/late.md") is not None, "the snapshot has expired", seconds=LAPSE + 5)
    until(lambda: write(ann, "docs/late.md") is None, "the leases are known again")


def test_an_open_session_is_live_for_other_sessions(
    opened: Callable[[Path], Database], home: Path, source: Path
) -> None:
    database = opened(home)

    def there() -> list[str]:
        with database.read() as connection:
            return [one.agent for one in heartbeats.living(connection)]

    with session.open_session(source, agent="ann"):
        with session.open_session(source, agent="bob"):
            assert there() == ["ann", "bob"]
        assert there() == ["ann"]
    assert there() == []
