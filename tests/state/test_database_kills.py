"""A process killed at any step leaves the database in the old or the new state, and other processes continue."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bonobofs.state import agent_registry, leases, migrate
from bonobofs.state.database import Database
from bonobofs.state.session_rows import Holder
from tests.state.test_migrations import ADDS, CHANGES, agents_in, scripts, tables_in
from tests.support.world import environment

__all__ = ["scripts"]

KILLED = """
import os, sys
from pathlib import Path
from sqlalchemy import Engine, event
from bonobofs.session import lease_service
from bonobofs.state import migrate
from bonobofs.state.database import Database

def run_until(step):
    left = step

    def count(*_):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)

    for what in ("before_cursor_execute", "after_cursor_execute", "commit"):
        event.listen(Engine, what, count)
    run()

# Each is a child of this process, which has loaded what they need and opened nothing.
for line in sys.stdin:
    child = os.fork()
    if not child:
        run_until(int(line))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
ACQUIRE = """
def run():
    holder = lease_service.HolderOption("bob")
    lease_service.acquire(Path(sys.argv[1]), holder, ["src/**", "lib/**"], lease_service.LeaseTerms())
"""
UPGRADE = """
def run():
    migrate.upgrade(Database(Path(sys.argv[1])), [Path(one) for one in sys.argv[2:]])
"""
_MOST_STEPS = 300


@contextlib.contextmanager
def killed(program: str, *arguments: Path) -> Iterator[Callable[[int], bool]]:
    """killed(STEP) runs it, killed at that step of what it says to the database, and says whether it came so far."""
    with subprocess.Popen(
        [sys.executable, "-c", program + KILLED, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as running:
        stdin, stdout = running.stdin, running.stdout
        assert stdin is not None
        assert stdout is not None

        def at(step: int) -> bool:
            stdin.write(f"{step}\n")
            stdin.flush()
            ended = int(stdout.readline())
            assert ended in (0, -9)
            return ended == -9

        yield at
        stdin.close()


def test_a_killed_acquirer_has_all_or_none_of_its_leases(database: Database, home: Path) -> None:
    """Its earlier leases are replaced by the complete request, or unchanged."""
    bob = Holder("bob", agent_registry.add(database, "bob").id)
    before, after = ("docs/**",), ("lib/**", "src/**")
    seen = set()
    with killed(ACQUIRE, home) as killed_at:
        for step in range(1, _MOST_STEPS):
            leases.acquire(database, leases.LeaseRequest(bob, before), lambda *_: False)
            came_so_far = killed_at(step)
            (lease,) = leases.list_leases(database)
            assert lease.patterns in (before, after)
            seen.add(lease.patterns)
            leases.release(database, lease.id, by=bob)
            if not came_so_far:
                break
        else:
            raise AssertionError("it never came to its end")
    assert seen == {before, after}


def test_a_migration_killed_at_any_step_is_complete_or_undone(
    database: Database, home: Path, scripts: Callable[..., tuple[Path, ...]]
) -> None:
    agent_registry.add(database, "ann")
    before = tables_in(database)
    directories = scripts(ADDS, CHANGES)
    with killed(UPGRADE, home, *directories) as killed_at:
        for step in range(1, _MOST_STEPS):
            came_so_far = killed_at(step)
            if database.revision() == "0002":
                break
            assert came_so_far
            assert tables_in(database) == before
            assert agents_in(database) == ["ann"]
            with Database.open(home) as again:
                assert [one.label for one in agent_registry.list_agents(again)] == ["ann"]
    assert tables_in(database) == before | {"notes"}
    assert agents_in(database) == ["nobody"]
    assert migrate.upgrade(database, directories) == ("0002", "0002", None)
