"""One daemon for each state directory. It works while mounts serve, and ends on request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bonobofs import daemon, session
from bonobofs.audit.index import IndexQuery
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.daemon.main import LONGEST_LOG, Daemon, running
from bonobofs.errors import StateError
from bonobofs.guards import FileGuard
from bonobofs.system.processes import is_alive, wait_for_end
from tests.support.postgres import Postgres
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, bonobofs, environment


@pytest.fixture(autouse=True)
def _none_is_left(home: Path) -> Iterator[None]:
    yield
    daemon.stop(home)


def parts(home: Path) -> dict[str, str]:
    return daemon.status(home).problems


def indexed(home: Path, path: str) -> bool:
    """Whether the index has a path, without being brought up to the trails by this look."""
    with session.open_index(home) as index:
        return any(True for _ in index.changes(IndexQuery(path=path)))


def test_the_daemon_starts_reports_its_status_and_stops(home: Path) -> None:
    """In the background. Only its log is left."""
    assert bonobofs("serve", "--status").returncode == 1
    started = bonobofs("serve")
    assert started.returncode == 0, started.stderr
    found = running(home)
    assert found is not None
    assert started.stdout == f"serving {home}, pid {found.pid}\n"
    assert (home / "serve.pid").read_text().split()[0] == str(found.pid)
    until(
        lambda: set(parts(home)) == {"index", "leases", "mail", "reservations", "retention"},
        "every part has been stepped",
    )
    said = json.loads(bonobofs("serve", "--status", "--json").stdout)
    assert (said["pid"], said["parts"]) == (found.pid, dict.fromkeys(parts(home), ""))
    assert bonobofs("serve", "--stop").stdout == f"the daemon of {home} has ended\n"
    assert not is_alive(found.pid, found.starttime)
    assert sorted(path.name for path in home.glob("serve*")) == ["serve.lock", "serve.log"]
    assert (home / "serve.log").read_text() == ""
    assert (home / "serve.lock").read_text() == ""
    assert bonobofs("serve", "--stop").stdout == f"no daemon runs for {home}\n"


def test_a_second_daemon_is_refused(home: Path) -> None:
    """In the background, in the foreground, and with many concurrent starts."""
    with ThreadPoolExecutor(4) as pool:
        tried = list(pool.map(lambda _: _tried(home), range(4)))
    (won,) = [one for one in tried if isinstance(one, Daemon)]
    for lost in (one for one in tried if not isinstance(one, Daemon)):
        assert "serves" in str(lost)
    for arguments in (["serve"], ["serve", "--foreground"]):
        refused = bonobofs(*arguments)
        assert refused.returncode == 1
        assert f", pid {won.pid}; stop it first: bonobofs serve --stop" in refused.stderr


def _tried(home: Path) -> Daemon | StateError:
    try:
        return daemon.start(home)
    except StateError as error:
        return error


def test_a_killed_daemon_leaves_no_lock(home: Path) -> None:
    """The kernel releases the lock with the process, regardless of the PID file."""
    first = daemon.start(home)
    os.kill(first.pid, signal.SIGKILL)
    assert wait_for_end(first.pid, first.starttime, 30)
    assert (home / "serve.pid").exists()
    assert daemon.status(home).daemon is None
    second = daemon.start(home)
    assert second.pid != first.pid


def test_the_serving_process_owns_the_lock(home: Path) -> None:
    """The parent that started it does not: the lock is released with the daemon alone."""
    found = daemon.start(home)
    inode = (home / "serve.lock").stat().st_ino
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if f":{inode} " in line]
    assert [(line[1], line[4]) for line in locks] == [("FLOCK", str(found.pid))]


def test_the_daemon_is_found_without_its_pid_file(home: Path) -> None:
    """The PID file is for people and may be deleted."""
    found = daemon.start(home)
    (home / "serve.pid").unlink()
    assert f"pid {found.pid}" in bonobofs("serve").stderr
    assert daemon.stop(home) == found
    assert not is_alive(found.pid, found.starttime)


def test_the_daemon_ends_when_its_state_directory_is_replaced(home: Path) -> None:
    """So there is one daemon for each directory. It does not touch the files of the new one."""
    found = daemon.start(home)
    home.rename(home.with_name("away"))
    assert bonobofs("status").returncode == 0
    other = daemon.start(home)
    assert wait_for_end(found.pid, found.starttime, 30)
    assert running(home) == other
    assert json.loads(bonobofs("serve", "--status", "--json").stdout)["pid"] == other.pid
    assert "was replaced" in (home.with_name("away") / "serve.log").read_text()


def test_a_long_log_is_rotated(home: Path) -> None:
    """At the next start; one earlier log is kept."""
    (home / "serve.log").write_text("first line\n")
    os.truncate(home / "serve.log", LONGEST_LOG + 1)
    daemon.start(home)
    assert (home / "serve.log.1").read_bytes().startswith(b"first line\n")
    assert (home / "serve.log").read_text() == ""


def test_a_process_that_reuses_the_pid_is_not_stopped(home: Path) -> None:
    """PIDs are reused. PID and start time together identify a process."""
    with subprocess.Popen(["sleep", "100"]) as other:
        (home / "serve.pid").write_text(f"{other.pid} 1\n")
        assert daemon.stop(home) is None
        assert other.poll() is None
        other.kill()


def test_the_foreground_daemon_serves_until_it_is_interrupted(home: Path) -> None:
    """For a service manager."""
    with subprocess.Popen(
        [sys.executable, "-m", "bonobofs", "serve", "--foreground"], env=environment(), stderr=subprocess.PIPE
    ) as process:
        until(lambda: running(home) is not None, "it serves", seconds=60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, b"")


def test_the_daemon_updates_the_index_while_mounts_serve(home: Path, mounted: Mounted) -> None:
    """For a mount that existed before it and for a later one. Entries after its end are indexed at the next start."""
    before = mounted(policy=ALLOW_ALL)
    (before.path / "before").touch()
    daemon.start(home)
    until(lambda: indexed(home, "before"), "the index has what was before", seconds=60)
    later = mounted(policy=ALLOW_ALL)
    (later.path / "later").touch()
    until(lambda: indexed(home, "later"), "the index has what came later", seconds=60)
    daemon.stop(home)
    (later.path / "after").touch()
    session.flush_servers(home)
    assert not indexed(home, "after")
    daemon.start(home)
    until(lambda: indexed(home, "after"), "the index has what came meanwhile", seconds=60)


def test_a_daemon_stopped_during_indexing_loses_no_entry(home: Path) -> None:
    """However often it is stopped within a long trail, the next one continues at the cursor."""
    paths = home / "trails" / "s.jsonl", home / "trails" / "s.head"
    trail = Trail.create(*paths, TrailIdentity("s", "alice", "id-of-alice"))
    for number in range(20_000):
        trail.event("e", path=f"f{number}")
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        found = daemon.start(home)
        until(lambda: counted(home) > 0, "it has begun", seconds=60)
        os.kill(found.pid, number)
        assert wait_for_end(found.pid, found.starttime, 60)
    trail.close()
    daemon.start(home)
    until(lambda: counted(home) >= 20_001, "all is there", seconds=60)
    daemon.stop(home)
    with session.open_index(home) as index:
        assert [one.entry.seq for one in index.changes(IndexQuery())] == list(range(1, 20_002))


def counted(home: Path) -> int:
    with session.open_index(home) as index:
        return sum(1 for _ in index.changes(IndexQuery()))


def test_each_state_directory_has_its_own_daemon_with_a_shared_database(
    tmp_path: Path, source: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with two hosts: each daemon indexes the trails of its own directory."""
    monkeypatch.setenv("BONOBOFS_DATABASE", postgres.make_database())
    (tmp_path / "policy.toml").write_text(ALLOW_ALL)
    homes = [tmp_path / "here", tmp_path / "there"]
    for directory in homes:
        monkeypatch.setenv("BONOBOFS_HOME", str(directory))
        daemon.start(session.home())
    try:
        for directory in homes:
            monkeypatch.setenv("BONOBOFS_HOME", str(directory))
            with session.open_session(source, agent="alice", policy=tmp_path / "policy.toml") as opened:
                FileGuard(opened).write_file(f"{directory.name}.txt", "text", agent="alice")
        for directory in homes:
            for name in ("here.txt", "there.txt"):
                until(lambda d=directory, n=name: indexed(d, n), f"{name} is found", seconds=60)  # type: ignore[misc]
    finally:
        for directory in homes:
            daemon.stop(directory)


def test_a_failing_job_is_reported_and_other_jobs_continue(home: Path, mounted: Mounted) -> None:
    """The job recovers when its problem is solved."""
    (home / "index.db").mkdir()
    daemon.start(home)
    until(lambda: "cannot be used" in parts(home).get("index", ""), "the problem is reported", seconds=60)
    until(lambda: parts(home).get("mail") == "", "the other part is well", seconds=60)
    told = bonobofs("serve", "--status")
    assert told.returncode == 0
    assert "index: the index in" in told.stderr
    world = mounted(policy=ALLOW_ALL)
    (world.path / "file").touch()
    (home / "index.db").rmdir()
    until(lambda: parts(home)["index"] == "", "it is well again", seconds=60)
    until(lambda: indexed(home, "file"), "and keeps up", seconds=60)
    assert "the problem is solved" in (home / "serve.log").read_text()


def test_the_daemon_waits_for_an_unavailable_database(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports the problem, and serves when the database is available."""
    monkeypatch.setenv("BONOBOFS_DATABASE", f"postgresql://nobody@/nothing?host={home}")
    daemon.start(home)
    parts_ = ("index", "leases", "mail", "reservations")
    until(
        lambda: all("cannot be used" in parts(home).get(part, "") for part in parts_), "each part says so", seconds=60
    )
    assert daemon.status(home).daemon is not None


def test_contradictory_options_are_a_usage_error(home: Path) -> None:
    """For instance start and stop together."""
    for arguments in (["--stop", "--foreground"], ["--json"], ["--stop", "--status"]):
        assert bonobofs("serve", *arguments).returncode == 2
