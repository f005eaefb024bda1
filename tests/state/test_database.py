"""Database failures: the leases are then unknown, changes are refused, and no data is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from bonobofs import session
from bonobofs.errors import ForbiddenError, StateError
from bonobofs.policy.overlap import patterns_meet
from bonobofs.state import agent_registry, leases, migrate, session_rows, sqlite_file
from bonobofs.state.database import Database
from bonobofs.state.home import home_id
from bonobofs.state.lease_follower import LAPSE
from bonobofs.state.leases import LeaseRequest
from bonobofs.state.session_rows import Holder
from tests.state.test_mount_leases import acquire, writes
from tests.support.postgres import Postgres
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World, bonobofs, environment

Harm = Callable[[Database], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def removed(database: Database) -> Iterator[None]:
    path = Path(database.url.database or "")
    files = [path.with_name(path.name + end) for end in ("", "-wal", "-shm")]
    away = [(file, file.with_name(f"{file.name}.away")) for file in files if file.exists()]
    for file, other in away:
        file.rename(other)
    try:
        yield
    finally:
        for file, other in away:
            other.rename(file)


@contextlib.contextmanager
def replaced(database: Database) -> Iterator[None]:
    """By an empty one, as the next command makes where there is none."""
    with removed(database):
        assert bonobofs("lease", "list").stdout == "nothing is leased\n"
        yield


@contextlib.contextmanager
def damaged(database: Database) -> Iterator[None]:
    path = Path(database.url.database or "")
    with removed(database):
        path.write_bytes(b"no database" * 1000)
        path.chmod(0o600)
        yield


@contextlib.contextmanager
def newer(database: Database) -> Iterator[None]:
    def become(revision: str) -> None:
        with database.engine.begin() as connection:
            connection.execute(text(f"UPDATE {sqlite_file.VERSION_TABLE} SET version_num = '{revision}'"))

    become("9999")
    try:
        yield
    finally:
        become(sqlite_file.REVISION)


@contextlib.contextmanager
def without_a_table(database: Database) -> Iterator[None]:
    def rename(old: str, new: str) -> None:
        with database.engine.begin() as connection:
            connection.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))

    rename("counters", "elsewhere")
    try:
        yield
    finally:
        rename("elsewhere", "counters")


@contextlib.contextmanager
def locked(database: Database) -> Iterator[None]:
    """By a program that holds it and says nothing."""
    program = (
        "import sys; from pathlib import Path; from bonobofs.state.database import Database\n"
        "with Database(Path(sys.argv[1])).change(): print('held', flush=True); sys.stdin.read()"
    )
    if not database.is_sqlite:
        program = program.replace(".change()", ".alone()")
    with subprocess.Popen(
        [sys.executable, "-c", program, str(database.home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as holding:
        assert holding.stdout is not None
        assert holding.stdout.readline() == "held\n"
        try:
            yield
        finally:
            holding.kill()


def refuses_while(world: World, database: Database, harm: Harm) -> None:
    """A mount that has leases to keep does not know them meanwhile, and knows them afterwards, by itself."""
    assert writes(world.path / "free.md")
    acquire(database, "bob", "docs/**")
    with harm(database):
        until(lambda: not writes(world.path / "free.md"), "what is leased is not known", seconds=LAPSE + 5)
        assert (world.path / "free.md").read_text() == "text"
        until(lambda: not writes(world.path / "free.md"), "it stays so")
    until(lambda: writes(world.path / "free.md"), "it is known again")
    assert not writes(world.path / "docs/a.md")
    assert [lease.patterns for lease in leases.list_leases(database)] == [("docs/**",)]


@pytest.mark.parametrize("harm", [newer, without_a_table, locked])
def test_an_unreadable_database_refuses_changes(mounted: Mounted, database: Database, harm: Harm) -> None:
    world = mounted(policy=ALLOW_ALL)
    (world.path / "docs").mkdir()
    refuses_while(world, database, harm)


@pytest.mark.parametrize("harm", [removed, replaced, damaged])
def test_a_replaced_database_file_refuses_changes(mounted: Mounted, home: Path, harm: Harm) -> None:
    """A session does not continue on a file that has lost its name, which other processes do not see."""
    world = mounted(policy=ALLOW_ALL)
    (world.path / "docs").mkdir()
    with Database.open(home) as database:
        refuses_while(world, database, harm)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of two megabytes."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def full(database: Database) -> Iterator[None]:
    filling = Path(database.url.database or "").with_name("filling")
    with open(filling, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filling.unlink()


@contextlib.contextmanager
def read_only(database: Database) -> Iterator[None]:
    place = Path(database.url.database or "").parent
    # Whoever has it open keeps a mount from becoming read-only; what covers it is as good.
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.root
@pytest.mark.parametrize("harm", [full, read_only])
def test_a_full_disk_refuses_changes(
    mounted: Mounted, small: Path, monkeypatch: pytest.MonkeyPatch, harm: Harm
) -> None:
    monkeypatch.setenv("BONOBOFS_DATABASE", f"sqlite:///{small}/state.db")
    world = mounted(policy=ALLOW_ALL)
    (world.path / "docs").mkdir()
    with Database.open(session.home()) as database:
        refuses_while(world, database, harm)


@pytest.mark.root
@pytest.mark.parametrize(
    ("harm", "advice"), [(full, "is full; free some space"), (read_only, "is read-only; remount it writable")]
)
def test_the_remedy_of_a_full_or_read_only_disk_is_no_backup(
    small: Path, monkeypatch: pytest.MonkeyPatch, harm: Harm, advice: str
) -> None:
    """A restored backup would lose what the database has."""
    monkeypatch.setenv("BONOBOFS_HOME", str(small))
    with Database.open(session.home()) as database:
        (small / "backups").mkdir()
        for name in ("bonobofs.db.lock", "bonobofs.db.turn"):
            (small / name).touch(0o600)
    with harm(database):
        for command in (("agent", "list"), ("lease", "list")):
            failed = bonobofs(*command)
            assert failed.returncode == 1, failed.stdout
            assert ("backups" in failed.stderr, advice in failed.stderr) == (False, True), failed.stderr


def test_backups_are_named_for_damage_if_there_are_some(home: Path) -> None:
    with Database.open(home) as database, damaged(database):
        assert "and there is no backup" in bonobofs("agent", "list").stderr
        (home / "backups").mkdir()
        assert f"backups are in {home}/backups" in bonobofs("agent", "list").stderr


def test_a_session_missing_in_the_database_is_refused(mounted: Mounted, database: Database) -> None:
    """For instance after a restored backup: lease requests would not wait for the session."""
    world = mounted(policy=ALLOW_ALL)
    assert writes(world.path / "a.md")
    with database.change() as connection:
        connection.execute(text("DELETE FROM sessions"))
    until(lambda: not writes(world.path / "a.md"), "it is refused", seconds=LAPSE + 5)
    log = world.home / "sessions" / world.session.session / "server.log"
    until(lambda: "has no session" in log.read_text(), "the server's log says why")


def test_a_mount_whose_companion_cannot_start_refuses_changes(mounted: Mounted, home: Path) -> None:
    """The companion follows the leases."""
    world = mounted(policy=ALLOW_ALL, companion="bonobofs.companion.no_such_module")
    assert not writes(world.path / "a.md")
    assert list(world.path.iterdir()) == []


def test_a_transaction_of_a_killed_process_blocks_no_other(database: Database, home: Path) -> None:
    """It is rolled back, and its locks are released."""
    program = (
        "import sys, os; from pathlib import Path; from bonobofs.state import agent_registry\n"
        "from bonobofs.state.database import Database\n"
        "with Database(Path(sys.argv[1])).change() as connection:\n"
        "    agent_registry.insert_agent(connection, 'ghost', None, None, ())\n"
        "    os.kill(os.getpid(), 9)"
    )
    ran = subprocess.run([sys.executable, "-c", program, home], env=environment(), check=False)
    assert ran.returncode == -signal.SIGKILL
    agent_registry.add(database, "ann")
    assert [one.label for one in agent_registry.list_agents(database, removed=True)] == ["ann"]


def test_postgresql_aborts_an_idle_transaction(postgres: Postgres, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that disappears or stops within a transaction would block every lease."""
    monkeypatch.setenv("BONOBOFS_DATABASE", postgres.make_database())
    with Database.open(home) as database, database.change() as connection:
        assert connection.scalar(text("SHOW idle_in_transaction_session_timeout")) == "10s"


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_one_acquirer_wins_under_every_isolation_level(
    postgres: Postgres, home: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    """A waiting transaction sees the leases that were granted meanwhile."""
    where = postgres.make_database()
    monkeypatch.setenv("BONOBOFS_DATABASE", where)
    with postgres.connect() as connection:
        name = where.partition("@/")[2].partition("?")[0]
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'")
    said: list[str] = []

    def acquire_once(number: int, ready: threading.Barrier) -> None:
        with Database.open(home) as mine:
            holder = Holder(f"agent-{number}", session_rows.register(mine, f"agent-{number}").id)
            ready.wait()
            try:
                leases.acquire(mine, LeaseRequest(holder, ("docs/**",)), patterns_meet)
                said.append("won")
            except ForbiddenError:
                said.append("lost")

    for _ in range(5):
        said.clear()
        ready = threading.Barrier(4)
        threads = [threading.Thread(target=acquire_once, args=(number, ready)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(said) == ["lost", "lost", "lost", "won"]
        with Database.open(home) as database:
            leases.release(database, leases.list_leases(database)[0].id)


def test_a_mount_connects_to_postgresql_as_its_operator_does(
    postgres: Postgres, mounted: Mounted, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if libpq's own environment variables configure the connection."""
    name, _, host = postgres.make_database().partition("@/")[2].partition("?host=")
    monkeypatch.setenv("PGHOST", host)
    monkeypatch.setenv("PGUSER", "tests")
    monkeypatch.setenv("BONOBOFS_DATABASE", f"postgresql:///{name}")
    assert writes(mounted(policy=ALLOW_ALL).path / "a.md")


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "where", ["postgresql://ann:{}@/x?host=/nowhere", "postgresql:///x?host=/nowhere&user=ann&password={}"]
)
def test_no_output_contains_the_password(where: str, home: Path, source: Path, tmp_path: Path) -> None:
    env = {"BONOBOFS_DATABASE": where.format(SECRET)}
    mountpoint = tmp_path / "mount"
    mountpoint.mkdir()
    for command in (["agent", "list"], ["db", "status", "--json"], ["db", "upgrade"], ["mount", source, mountpoint]):
        said = bonobofs(*command, env=env)
        assert said.returncode == 1
        assert "/nowhere" in said.stdout + said.stderr.replace("%2F", "/")
        assert SECRET not in said.stdout + said.stderr
    assert not (home / "bonobofs.log").exists()


@pytest.mark.parametrize(
    "form", ["postgresql://tests:{}@/{}?host={}", "postgresql:///{1}?host={2}&user=tests&password={0}"]
)
def test_the_password_is_not_an_argument_of_pg_dump(
    form: str, postgres: Postgres, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user can read process arguments. A pg_dump that fails without a message is reported too."""
    name, _, host = postgres.make_database().partition("@/")[2].partition("?host=")
    monkeypatch.setenv("BONOBOFS_DATABASE", form.format(SECRET, name, host))
    program = tmp_path / "bin" / "pg_dump"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho "$PGPASSWORD" > {tmp_path}/given\nexit 3\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    with Database.open(home) as database, pytest.raises(StateError, match=r"pg_dump failed.*exit status 3"):
        migrate.create_backup(database)
    assert (tmp_path / "given").read_text() == f"{SECRET}\n"
    assert SECRET not in (tmp_path / "arguments").read_text()
    assert f"dbname='{name}'" in (tmp_path / "arguments").read_text()


def test_state_files_are_private_to_the_operator(mounted: Mounted, home: Path) -> None:
    """For every umask. A database that other users can write is not used."""
    before = os.umask(0)
    try:
        world = mounted(policy=ALLOW_ALL)
        assert bonobofs("db", "backup").returncode == 0
        assert bonobofs("lease", "acquire", "--all-workspaces", "x").returncode == 0
        world.umount()
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in home.rglob("*")}
    assert {path.name for path in found} >= {"bonobofs.db", "bonobofs.db.lock", "bonobofs.db.turn", "home.id"}
    assert {str(path): oct(mode) for path, mode in found.items() if mode & 0o077} == {}
    (home / "bonobofs.db").chmod(0o620)
    refused = bonobofs("lease", "list")
    assert (refused.returncode, refused.stderr) == (
        1,
        f"bonobofs: others can write in the database {home}/bonobofs.db; chmod go-w {home}/bonobofs.db\n",
    )


def test_a_state_directory_keeps_its_identity(home: Path) -> None:
    """If the identity cannot be read, it is not created again."""
    assert home_id(home) == home_id(home)
    (home / "home.id").write_text("")
    with pytest.raises(StateError, match="move it away"):
        home_id(home)


def test_a_damaged_database_is_reported_and_kept(home: Path) -> None:
    """A file that is no database, and a database with a damaged page."""
    with Database.open(home) as database:
        for number in range(300):
            agent_registry.add(database, f"agent-{number}")
    path = home / "bonobofs.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'agents_living'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    content = bytearray(path.read_bytes())
    content[(root - 1) * size + 8 : root * size] = bytes(size - 8)
    for what in (bytes(content), b"no database" * 1000):
        path.write_bytes(what)
        status = bonobofs("db", "status")
        assert (status.returncode, status.stderr) == (1, "")
        assert ": faulty, schema " in status.stdout
        assert path.read_bytes()[-4096:] == what[-4096:]


def test_a_heartbeat_causes_no_disk_write(home: Path) -> None:
    """It is written twice a second while a mount exists. Data that must survive a power cut is synced."""
    with Database.open(home) as database:
        for transaction, level in ((database.change, 2), (database.note, 1), (database.change, 2), (database.read, 2)):
            with transaction() as connection:
                assert connection.scalar(text("PRAGMA synchronous")) == level


def test_a_session_ends_without_the_database(database: Database, source: Path) -> None:
    """For other sessions it ends when its heartbeats stop."""
    with contextlib.ExitStack() as holding, session.open_session(source, agent="ann"):
        holding.enter_context(locked(database))
