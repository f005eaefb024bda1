"""A companion that dies is restarted with its state; the delay grows if it keeps dying."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.audit.verify import verify_trail
from bonobofs.errors import BonobofsError
from bonobofs.policy.decision import Code, Refused
from bonobofs.session import lease_service
from bonobofs.session.lease_service import HolderOption, LeaseTerms
from tests.guard_socket.conftest import Called, CalledMount
from tests.support import proc
from tests.support.observe import companion_of, out_of_band, recorded, status, text
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, OrdinaryUser, bonobofs


def kill_companion(called: Called) -> None:
    """Kill it, and wait until another stands."""
    before = len(recorded(called.world, "companion"))
    os.kill(companion_of(called.world.pid), signal.SIGKILL)
    until(lambda: len(recorded(called.world, "companion")) > before, "another stands")


@pytest.mark.parametrize("over", [False, True], ids=["beside", "over the source"])
def test_a_new_companion_restores_watch_leases_and_calls(
    mounted_called: CalledMount, source: Path, home: Path, tmp_path: Path, over: bool
) -> None:
    """External changes, leases, the policy, the socket; the log has an alert and an event."""
    if over and os.geteuid() != 0:
        return  # an ordinary user's is in test_calls
    policy = tmp_path / "policy.toml"
    policy.write_text(ALLOW_ALL)
    behind = os.open(source, os.O_PATH)
    (source / "file").write_text("as it was")
    called = mounted_called(policy=policy, mountpoint=source if over else None)
    there = Path(f"/proc/self/fd/{behind}")
    assert (called.path / "file").read_text() == "as it was"
    for turn in range(2):
        kill_companion(called)
        (there / "file").write_text(f"changed {turn}")
        until(lambda wanted=f"changed {turn}": text(called.path / "file") == wanted, "the change shows")  # type: ignore[misc]
        (there / f"new {turn}").write_text("new")
        until(lambda name=f"new {turn}": name in out_of_band(called.world), "it is entered")  # type: ignore[misc]
        assert called("write_file", path=f"by call {turn}", content="text")
        assert (there / f"by call {turn}").read_text() == "text"
        assert f"by call {turn}" in os.listdir(called.path)
        assert status(called.world).watch == session.WATCHING
    lease_service.acquire(home, HolderOption("bob"), ["docs/**"], LeaseTerms())
    (called.path / "docs").mkdir()
    with pytest.raises(PermissionError):
        (called.path / "docs/a").touch()
    assert len(recorded(called.world, "companion", "alert")) == 2
    policy.write_text(ALLOW_ALL + "\n[[protect]]\npaths = ['file']\n")
    until(lambda: status(called.world).session.policy.generation == 2, "the new policy is loaded")
    digest = status(called.world).session.policy.digest
    until(lambda: called("whoami")["policy"] == digest, "the companion has the new policy too")
    assert not any(name.startswith("by call") for name in out_of_band(called.world))
    os.close(behind)


def test_a_policy_changed_during_a_restart_is_loaded(mounted_called: CalledMount, tmp_path: Path) -> None:
    """No process watches the file meanwhile."""
    policy = tmp_path / "policy.toml"
    policy.write_text(ALLOW_ALL)
    called = mounted_called(policy=policy)
    companion = companion_of(called.world.pid)
    os.kill(companion, signal.SIGSTOP)
    policy.write_text('default = "deny"\n')
    os.kill(companion, signal.SIGKILL)
    until(lambda: status(called.world).session.policy.generation == 2, "it is loaded")
    with pytest.raises(PermissionError):
        (called.path / "a").touch()


def test_changes_go_on_during_a_restart(alice: Called) -> None:
    """The lease snapshot is valid until it expires; reading goes on in any case."""
    refused: list[OSError] = []
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            try:
                (alice.path / "a").write_text("text")
            except PermissionError as error:
                refused.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    kill_companion(alice)
    over.set()
    thread.join()
    (alice.path / "a").write_text("and after")
    assert (alice.path / "a").read_text() == "and after"


def test_a_companion_that_keeps_dying_is_restarted_with_delays(alice: Called) -> None:
    """Each delay is longer, up to 30 s. Changes are refused meanwhile, and `status` and `doctor` say why."""
    (alice.source / "file").write_text("as it was")
    before: list[int] = []
    for _ in range(6):
        until(lambda last=before: proc.children(alice.world.pid) not in ([], last), "there is another", seconds=30)  # type: ignore[misc]
        before = proc.children(alice.world.pid)
        os.kill(before[0], signal.SIGKILL)
    until(lambda: "ended 6 times in a row" in (status(alice.world).watch or ""), "status names the deaths")
    until(lambda: status(alice.world).leases is not None, "leases are not known")
    with pytest.raises(PermissionError):
        (alice.path / "a").touch()
    assert (alice.path / "file").read_text() == "as it was"
    (alice.source / "file").write_text("changed")
    until(lambda: text(alice.path / "file") == "changed", "it shows, a second late")
    reasons = [one.reason or "" for one in recorded(alice.world, "companion", "alert")]
    assert len(reasons) == 7
    assert "keeps ending; it is started again" in reasons[-1]
    (one,) = json.loads(bonobofs("status", "--json").stdout)
    assert "has ended" in one["leases"]
    assert "every change of the source is refused" in one["note"]
    said = bonobofs("status").stdout
    assert "not watched" in said
    assert "the leases are unknown" in said
    checks = json.loads(bonobofs("doctor", "--json").stdout)["checks"]
    assert [check["verdict"] for check in checks if check["name"] in ("watching", "leases")] == ["note", "fail"]
    until(lambda: status(alice.world).watch == session.WATCHING, "the seventh stands", seconds=40)
    until(lambda: status(alice.world).leases is None, "leases are known again")
    (alice.path / "a").touch()
    assert alice("whoami")["agent"] == "alice"


def test_status_says_why_the_leases_cannot_be_read(alice: Called, home: Path) -> None:
    """The database is locked for a while."""
    assert status(alice.world).leases is None
    with closing(sqlite3.connect(home / "bonobofs.db", isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        until(lambda: status(alice.world).leases is not None, "it is reported", seconds=60)
        with pytest.raises(PermissionError):
            (alice.path / "a").touch()
        with pytest.raises(Refused) as refused:
            alice("write_file", path="a", content="text")
        assert refused.value.decision.code is Code.LEASED
        until(lambda: "database" in (status(alice.world).leases or ""), "the reason is reported too", seconds=60)
        database.execute("ROLLBACK")
    until(lambda: status(alice.world).leases is None, "they are known again", seconds=60)
    (alice.path / "a").touch()


def test_kills_at_any_moment_leave_complete_files_and_a_valid_trail(alice: Called) -> None:
    """Calls follow one another; each file has the content of some call, and no temporary name is left."""
    over = threading.Event()
    contents = [f"{number}\n" * 40_000 for number in range(4)]

    def write(name: str) -> None:
        number = 0
        while not over.is_set():
            number += 1
            with contextlib.suppress(BonobofsError, OSError):
                alice("write_file", path=f"docs/{name}", content=contents[number % 4])

    threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    try:
        for number in range(3):
            until((alice.path / "docs/c").exists, "they write")
            size = alice.world.trail.stat().st_size
            wanted = size + 3_000 * (number + 1)
            until(lambda wanted=wanted: alice.world.trail.stat().st_size > wanted, "they go on")  # type: ignore[misc]
            kill_companion(alice)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert sorted(os.listdir(alice.source / "docs")) == ["a", "b", "c"]
    for name in ("a", "b", "c"):
        assert (alice.path / "docs" / name).read_text() in contents
        assert (alice.path / "docs" / name).read_bytes() == (alice.source / "docs" / name).read_bytes()
    assert out_of_band(alice.world) == {}
    alice.world.umount()
    report = verify_trail(alice.world.trail, alice.world.head, session=alice.world.session.session)
    assert (report.findings, report.unfinished) == ([], [])


def test_a_companion_restarts_in_the_namespace_of_the_first(ordinary_user: OrdinaryUser) -> None:
    """For an ordinary user whose mount covers the source, where the kernel allows user namespaces."""
    if ordinary_user.run("unshare", "--user", "--mount", "true").returncode != 0:
        return  # it cannot be mounted so; test_together has what is said then
    policy, source = ordinary_user.directory / "policy.toml", ordinary_user.directory / "source"
    policy.write_text('default = "allow"\n')
    assert ordinary_user.run("mkdir", source).returncode == 0
    made = ordinary_user.bonobofs("mount", source, source, "--agent", "eve", "--policy", policy)
    assert made.returncode == 0, made.stderr
    try:
        (one,) = json.loads(ordinary_user.bonobofs("status", "--json").stdout)
        before = companion_of(one["pid"])
        os.kill(before, signal.SIGKILL)
        until(lambda: proc.children(one["pid"]) not in ([], [before]), "there is another")
        # Until the new companion has read the leases, each change is refused.
        until(lambda: ordinary_user.run(ordinary_user.python, "-c", WRITE).returncode == 0, "it writes for a caller")
        assert ordinary_user.run("cat", source / "by-call").stdout == "text"
    finally:
        assert ordinary_user.bonobofs("umount", source).returncode == 0
    assert (source / "by-call").read_text() == "text"


WRITE = """
from bonobofs import session
from bonobofs.ipc.client import call
from bonobofs.state.home import inside_directory
(one,) = session.statuses(session.home())
call(inside_directory(session.home(), one.session.session), "write_file", path="by-call", content="text")
"""
