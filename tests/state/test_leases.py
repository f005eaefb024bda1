"""Leases are granted completely or not at all, to one holder at a time, and apply to every live session."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update

from bonobofs.errors import ForbiddenError, UsageError
from bonobofs.policy.overlap import patterns_meet
from bonobofs.state import agent_registry, heartbeats, leases
from bonobofs.state.database import Database
from bonobofs.state.leases import LeaseChange, LeaseRequest
from bonobofs.state.schema import leases as rows
from bonobofs.state.session_rows import Holder
from tests.support.world import environment


@pytest.fixture
def ann(database: Database) -> Holder:
    return Holder("ann", agent_registry.add(database, "ann").id)


@pytest.fixture
def bob(database: Database) -> Holder:
    return Holder("bob", agent_registry.add(database, "bob").id)


def acquire(database: Database, holder: Holder, *patterns: str, **more: Any) -> LeaseChange:
    return leases.acquire(database, LeaseRequest(holder, patterns)._replace(**more), patterns_meet)


def held(database: Database) -> list[tuple[str, tuple[str, ...]]]:
    return [(lease.holder.key, lease.patterns) for lease in leases.list_leases(database)]


def let_pass(database: Database, lease: leases.Lease) -> None:
    """Let a lease end, without waiting for it."""
    with database.change() as connection:
        connection.execute(update(rows).where(rows.c.id == lease.id).values(until=rows.c.acquired))


def test_a_request_with_one_overlapping_pattern_is_refused_completely(
    database: Database, ann: Holder, bob: Holder
) -> None:
    granted = acquire(database, ann, "docs/**", "src/*.py", reason="chapter 3")
    with pytest.raises(ForbiddenError, match=r"src/a\* overlaps with src/\*.py, held by ann until 20"):
        acquire(database, bob, "free/**", "src/a*")
    assert held(database) == [(ann.key, ("docs/**", "src/*.py"))]
    (lease,) = leases.list_leases(database)
    assert lease == granted.lease
    assert lease.reason == "chapter 3"
    # PostgreSQL reads its clock for each of the two.
    assert timedelta(0) <= lease.until - lease.acquired - timedelta(hours=24) < timedelta(seconds=1)


def test_a_lease_can_expire_before_its_grant_returns(database: Database, ann: Holder) -> None:
    assert acquire(database, ann, "docs/**", seconds=0.0001).lease.patterns == ("docs/**",)
    longer = acquire(database, ann, "docs/**")
    assert leases.extend(database, longer.lease.id, 0.0001).lease.id == longer.lease.id
    assert held(database) == []


def test_disjoint_patterns_may_have_different_holders(database: Database, ann: Holder, bob: Holder) -> None:
    acquire(database, ann, "docs/**/*.md", "src/test_*")
    acquire(database, bob, "docs/**/*.txt", "src/main_*")
    assert [holder for holder, _ in held(database)] == [ann.key, bob.key]


def test_a_holder_that_acquires_again_replaces_its_lease(database: Database, ann: Holder, bob: Holder) -> None:
    first = acquire(database, ann, "docs/**")
    second = acquire(database, ann, "src/**", "docs/a")
    assert second.generation > first.generation
    assert held(database) == [(ann.key, ("docs/a", "src/**"))]
    acquire(database, bob, "docs/b")


def test_a_chain_is_the_holder_of_its_leases(database: Database, ann: Holder, bob: Holder) -> None:
    """Two agents of one chain are one holder. The same agent without a chain is another holder."""
    acquire(database, ann._replace(chain="C1"), "docs/**")
    acquire(database, bob._replace(chain="C1"), "docs/**", "src/**")
    assert held(database) == [("chain:C1", ("docs/**", "src/**"))]
    with pytest.raises(ForbiddenError, match=r"held by chain C1 \(bob\)"):
        acquire(database, ann, "docs/x")


def test_shared_leases_may_overlap_and_block_exclusive_leases(database: Database, ann: Holder, bob: Holder) -> None:
    acquire(database, ann, "docs/**", shared=True)
    acquire(database, bob, "docs/**", shared=True)
    eve = Holder("eve", agent_registry.add(database, "eve").id)
    with pytest.raises(ForbiddenError):
        acquire(database, eve, "docs/a")
    with pytest.raises(ForbiddenError):
        acquire(database, ann, "docs/**")
    leases.release(database, leases.list_leases(database)[1].id, by=bob)
    acquire(database, ann, "docs/**")
    with pytest.raises(ForbiddenError):
        acquire(database, bob, "docs/**", shared=True)


def test_a_lease_applies_to_its_workspace_only(database: Database, ann: Holder, bob: Holder) -> None:
    """A lease of all workspaces applies to each."""
    acquire(database, ann, "docs/**", workspace="/srv/\udcff\\one")
    acquire(database, bob, "docs/**", workspace="/srv/two")
    assert {lease.workspace for lease in leases.list_leases(database)} == {"/srv/\udcff\\one", "/srv/two"}
    eve = Holder("eve", agent_registry.add(database, "eve").id)
    with pytest.raises(ForbiddenError):
        acquire(database, eve, "docs/a")


def test_only_the_holder_or_the_operator_ends_or_extends_a_lease(database: Database, ann: Holder, bob: Holder) -> None:
    lease = acquire(database, ann, "docs/**").lease
    for wrong in (leases.release, leases.extend):
        with pytest.raises(ForbiddenError, match="is held by ann"):
            wrong(database, lease.id, by=bob)
    longer = leases.extend(database, lease.id, 48 * 3600, by=ann).lease
    assert timedelta(hours=47) < longer.until - lease.acquired < timedelta(hours=49)
    assert leases.extend(database, lease.id, 60).lease.until < longer.until
    leases.release(database, lease.id)
    assert held(database) == []
    with pytest.raises(UsageError, match="or it has ended"):
        leases.release(database, lease.id, by=ann)


def test_an_expired_lease_has_no_effect(database: Database, ann: Holder, bob: Holder) -> None:
    """It is not listed, blocks no request and is not revived. The database's clock decides."""
    old = acquire(database, ann, "docs/**").lease
    let_pass(database, old)
    assert held(database) == []
    with pytest.raises(UsageError):
        leases.extend(database, old.id, by=ann)
    acquire(database, bob, "docs/**")
    with pytest.raises(ForbiddenError):
        acquire(database, ann, "docs/**")
    let_pass(database, leases.list_leases(database)[0])
    assert leases.expire(database) == 1
    with database.read() as connection:
        assert connection.scalar(text("SELECT count(*) FROM lease_patterns")) == 0


def test_an_invalid_request_is_refused(database: Database, ann: Holder) -> None:
    long = tuple(f"{number}{'x' * 200}" for number in range(900))
    for patterns, seconds in (((), 1), (("a",), 0), (("a",), -5), (("a",), 1e12), (("a",) * 1001, 1), (long, 1)):
        with pytest.raises(UsageError):
            acquire(database, ann, *patterns, seconds=seconds)
    assert held(database) == []


def test_mirrored_reservations_do_not_replace_local_leases(database: Database, ann: Holder, bob: Holder) -> None:
    """Each has its origin. A conflict is reported and changes no lease. Repeating the mirror changes no lease."""
    later = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    acquire(database, ann, "docs/**")

    def mirror(holder: Holder, number: int, *patterns: str) -> leases.Conflict | None:
        return leases.mirror(
            database, LeaseRequest(holder, patterns, origin=f"mail:{number}"), patterns_meet, until=later
        )

    assert mirror(ann, 1, "docs/a") is None
    assert mirror(ann, 2, "src/**") is None
    assert mirror(Holder("Stranger", None), 3, "lib/**") is None
    with database.read() as connection:
        before = heartbeats.generation(connection)
    assert mirror(ann, 2, "src/**") is None
    conflict = mirror(bob, 4, "src/x")
    assert conflict is not None
    assert (conflict.lease.origin, conflict.requested, conflict.held) == ("mail:2", "src/x", "src/**")
    with database.read() as connection:
        assert heartbeats.generation(connection) == before
    found = leases.mirrored(database, "mail:")
    assert {origin: lease.holder.key for origin, lease in found.items()} == {
        "mail:1": ann.key,
        "mail:2": ann.key,
        "mail:3": "mail:Stranger",
    }
    assert found["mail:1"].until == later
    assert leases.unmirror(database, "mail:2")
    assert not leases.unmirror(database, "mail:2")
    assert mirror(bob, 4, "src/x") is None
    assert len(held(database)) == 4


def test_labels_are_compared_as_agent_mail_writes_them(database: Database) -> None:
    made = agent_registry.add(database, "ops-bot 1")
    assert leases.holder_of_mail(database, "OpsBot1", "/src") == Holder("ops-bot 1", made.id)
    assert leases.holder_of_mail(database, "ops-bot 1", "/src") == Holder("ops-bot 1", made.id)
    assert leases.holder_of_mail(database, "GreenCastle", "/src") == Holder("GreenCastle", None)
    agent_registry.add(database, "opsbot1")
    assert leases.holder_of_mail(database, "OPSBOT1", "/src") == Holder("OPSBOT1", None)


def test_removing_an_agent_ends_its_own_leases(database: Database, ann: Holder) -> None:
    acquire(database, ann, "docs/**")
    acquire(database, ann._replace(chain="C1"), "src/**")
    agent_registry.remove(database, "ann")
    assert held(database) == [("chain:C1", ("src/**",))]


def test_a_long_pattern_comparison_blocks_no_other(
    database: Database, opened: Callable[[Path], Database], tmp_path: Path, ann: Holder, bob: Holder
) -> None:
    """Neither another acquirer nor a heartbeat waits. Leases granted meanwhile are compared too."""
    acquire(database, ann, "docs/**")
    compares, may_continue = threading.Event(), threading.Event()
    said: list[str] = []

    def slow(one: str, other: str) -> bool:
        compares.set()
        assert may_continue.wait(30)
        return patterns_meet(one, other)

    def compare() -> None:
        mine = opened(tmp_path / "home")
        try:
            leases.acquire(mine, LeaseRequest(bob, ("src/**",)), slow)
        except ForbiddenError as error:
            said.append(str(error))

    thread = threading.Thread(target=compare)
    thread.start()
    assert compares.wait(30)
    eve = Holder("eve", agent_registry.add(database, "eve").id)
    acquire(database, eve, "src/a")
    may_continue.set()
    thread.join()
    assert len(said) == 1
    assert "src/** overlaps with src/a, held by eve" in said[0]
    assert held(database) == [(ann.key, ("docs/**",)), (eve.key, ("src/a",))]


def test_a_removed_agent_cannot_acquire(database: Database, ann: Holder) -> None:
    """No session of it begins, even if it was selected before the removal."""
    agent_registry.remove(database, "ann")
    again = agent_registry.add(database, "ann")
    for holder in (ann, ann._replace(chain="C1")):
        with pytest.raises(UsageError, match="no agent ann any more"):
            acquire(database, holder, "docs/**")
    assert held(database) == []
    acquire(database, Holder("ann", again.id), "docs/**")


def test_a_reason_is_one_line(database: Database, ann: Holder) -> None:
    reason = "first\nsecond \x1b[31m\0 \udcff " + "long " * 1000
    kept = acquire(database, ann, "docs/**", reason=reason).lease.reason
    assert kept.startswith("first second \ufffd[31m\ufffd \ufffd long")
    assert len(kept) == 500
    assert leases.list_leases(database)[0].reason == kept


RACERS = """
import json, os, sys, traceback
from pathlib import Path
from bonobofs.errors import ForbiddenError
from bonobofs.policy.overlap import patterns_meet
from bonobofs.state import leases
from bonobofs.state.database import Database

def race(label, identity, pattern, go, done):
    with Database.open(home) as database:
        request = leases.LeaseRequest(leases.Holder(label, identity), (pattern,))
        os.write(done, b"r")
        while os.read(go, 1):
            try:
                leases.acquire(database, request, patterns_meet)
            except ForbiddenError:
                os.write(done, b"l")
            else:
                os.write(done, b"w")

# The racers are forks of this process, which has loaded the libraries and closed its database.
home, racers = Path(sys.argv[1]), []
with Database.open(home):
    pass
for arguments in json.loads(sys.argv[2]):
    (go, start), (result, done) = os.pipe(), os.pipe()
    if not os.fork():
        for descriptor in (0, start, result, *(end for ends in racers for end in ends)):
            os.close(descriptor)
        try:
            race(*arguments, go, done)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(go)
    os.close(done)
    racers.append((start, result))
for round in sys.stdin:
    for start, _ in racers if round == "go\\n" else ():
        os.write(start, b"g")
    print("".join(os.read(result, 1).decode() for _, result in racers), flush=True)
"""


@pytest.mark.timeout(600)
def test_one_of_many_concurrent_acquirers_wins(database: Database, home: Path) -> None:
    """32 processes, 50 rounds. All patterns differ, and every two of them overlap."""
    racers = []
    for number in range(32):
        label = f"agent-{number}"
        pattern = f"src/{'?' * (number % 4)}*/**/*{number}*" if number % 2 else f"**/*{number}*.py"
        racers.append((label, agent_registry.add(database, label).id, pattern))
    with subprocess.Popen(
        [sys.executable, "-c", RACERS, str(home), json.dumps(racers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as running:
        stdin, stdout = running.stdin, running.stdout
        assert stdin is not None
        assert stdout is not None

        def results(command: str) -> str:
            """A letter for each racer: ready, lost or won."""
            stdin.write(f"{command}\n")
            stdin.flush()
            return stdout.readline().strip()

        assert results("wait") == "r" * 32
        for _ in range(50):
            found = results("go")
            assert sorted(found) == ["l"] * 31 + ["w"]
            (lease,) = leases.list_leases(database)
            assert lease.holder.agent == f"agent-{found.index('w')}"
            leases.release(database, lease.id)
        stdin.close()


def test_lease_generations_are_unique(opened: Callable[[Path], Database], home: Path) -> None:
    """Every change of the leases begins a new one, also from many threads."""
    found: list[int] = []

    def work(number: int) -> None:
        mine = opened(home)
        holder = Holder(f"agent-{number}", agent_registry.add(mine, f"agent-{number}").id)
        for _ in range(5):
            granted = acquire(mine, holder, f"dir-{number}/**")
            found.extend((granted.generation, leases.extend(mine, granted.lease.id, by=holder).generation))

    opened(home)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(found) == 60
