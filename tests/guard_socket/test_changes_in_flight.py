"""Changes in flight in the companion: leases wait for them, the mount shows them, and their outcome is recorded."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.temp_cleanup import stray_name
from bonobofs.audit.verify import TrailStatus, verify_trail
from bonobofs.errors import StateError
from bonobofs.policy.decision import Code, Refused
from bonobofs.session import lease_service
from bonobofs.session.lease_service import HolderOption, LeaseTerms
from bonobofs.state.lease_follower import BEAT, LAPSE
from tests.guard_socket.conftest import Called, CalledMount, answer
from tests.support.observe import companion_of, out_of_band, recorded
from tests.support.wait import until


class Running:
    """A function in a thread; `results` has what it returned or raised."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.results: list[Any] = []
        self._act = act
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.results.append(self._act())
        except Exception as error:  # noqa: BLE001 - the caller of `wait` checks it
            self.results.append(error)

    def wait(self) -> Any:
        self._thread.join(60)
        (result,) = self.results
        return result


@pytest.fixture
def slow(mounted_called: CalledMount) -> Called:
    """A mount whose companion has the call `change`, which takes as long as the test wants."""
    return mounted_called(companion="tests.guard_socket.slow_companion")


def outcome(called: Called, path: str) -> AuditEntry:
    """The outcome of the last change of a path."""
    until(lambda: [one for one in called.of(path) if one.kind == "outcome"], f"the change of {path} has ended")
    return [one for one in called.of(path) if one.kind == "outcome"][-1]


@contextmanager
def in_flight(called: Called, go: Path, path: str, makes: list[str], **more: Any) -> Iterator[Running]:
    """A change that is in flight until the block ends."""
    running = Running(lambda: called("change", path=path, makes=makes, until=str(go), **more))
    try:
        until(lambda: all((called.source / name).exists() for name in makes), "the change is in flight")
        yield running
    finally:
        go.touch()
        running.wait()


def test_a_lease_waits_for_changes_authorized_before(slow: Called, home: Path, tmp_path: Path) -> None:
    """Also for longer than the expiry of heartbeats; a later change is judged by the lease."""
    go = tmp_path / "go"
    with in_flight(slow, go, "docs/a.md", ["docs/a.md"]) as change:
        acquiring = Running(lambda: lease_service.acquire(home, HolderOption("bob"), ["docs/**"], LeaseTerms()))
        until(lambda: slow("lease.list"), "the lease is stored")
        deadline = time.monotonic() + LAPSE + 3 * BEAT
        until(lambda: time.monotonic() > deadline or acquiring.results, "heartbeats would have expired")
        assert acquiring.results == []
        with pytest.raises(Refused) as refused:
            slow("write_file", path="docs/b.md", content="text")
        assert refused.value.decision.code is Code.LEASED
        (slow.path / "other").write_text("the mount goes on")
    assert change.wait() is None
    assert acquiring.wait().holder.agent == "bob"
    assert outcome(slow, "docs/a.md").result == "allowed"


def test_paths_of_a_change_in_flight_are_not_out_of_band(slow: Called, tmp_path: Path) -> None:
    """Its path and a tree in `touches`; another process changes another path meanwhile, which is out of band."""
    for name in ("a", "made/by/it", "theirs"):
        assert not (slow.path / name).exists()
    makes = ["a", *(f"made/by/{number}" for number in range(300))]
    with in_flight(slow, tmp_path / "go", "a", makes, touches=["made/"]):
        (slow.source / "theirs").write_text("external")
        until(lambda: "theirs" in out_of_band(slow.world), "it is recorded")
    assert sorted(os.listdir(slow.path / "made/by")) == sorted(str(number) for number in range(300))
    (slow.source / "made/by/7").write_text("external")
    until(lambda: "made/by/7" in out_of_band(slow.world), "it is recorded")
    assert set(out_of_band(slow.world)) == {"theirs", "made/by/7"}
    (intent,) = [one for one in slow.of("a") if one.kind == "intent"]
    assert intent.details["touches"] == ["made/"]


def test_a_directory_of_a_change_in_flight_cannot_be_moved(slow: Called, tmp_path: Path) -> None:
    """The change was judged by its path, so every directory above it is busy until the outcome."""
    for name in ("one/two", "beside"):
        (slow.path / name).mkdir(parents=True)
    with in_flight(slow, tmp_path / "go", "one/two/a", ["one/two/a"]):
        for name in ("one", "one/two"):
            with pytest.raises(OSError, match="busy"):
                (slow.path / name).rename(slow.path / "moved")
        (slow.path / "beside").rename(slow.path / "moved")
        (slow.path / "one/file").touch()
        (slow.path / "one/file").rename(slow.path / "file")
    (slow.path / "one/two").rename(slow.path / "two")
    assert (slow.path / "two/a").read_text() == "made"


def test_another_mount_of_the_source_attributes_the_change(
    slow: Called, mounted_called: CalledMount, tmp_path: Path
) -> None:
    """The other companion reads the trail: the change shows there, and it is not out of band."""
    other = mounted_called(agent="bob")
    with in_flight(slow, tmp_path / "go", "a", ["a", "made/b"], touches=["made/"]):
        until((other.path / "made/b").exists, "it shows")
    (slow.source / "sign").touch()
    until(lambda: "sign" in out_of_band(other.world), "the external change is recorded")
    assert set(out_of_band(other.world)) == {"sign"}


def test_a_companion_killed_during_a_change(slow: Called, home: Path, tmp_path: Path) -> None:
    """The outcome is recorded as unknown, the temporary file is removed, and the mount serves on."""
    by = stray_name()
    (slow.source / "docs").mkdir()
    assert not (slow.path / "docs/a.md").exists()
    assert not (slow.path / "docs" / by).exists()
    with in_flight(slow, tmp_path / "go", "docs/a.md", ["docs/a.md", f"docs/{by}"], by=by) as change:
        os.kill(companion_of(slow.world.pid), signal.SIGKILL)
        ended = outcome(slow, "docs/a.md")
        assert (ended.result, ended.details["end"]) == ("error", "unknown")
        assert "Owner died" in (ended.reason or "")
        assert isinstance(change.wait(), StateError)
        assert not (slow.source / "docs" / by).exists()
        assert (slow.path / "docs/a.md").read_text() == "made"
        assert slow("whoami")["agent"] == "alice"
        until(lambda: recorded(slow.world, "companion"), "another companion runs")
        lease_service.acquire(home, HolderOption("bob"), ["docs/**"], LeaseTerms())
        with pytest.raises(PermissionError):
            (slow.path / "docs/a.md").write_text("text")
    (slow.source / "sign").touch()
    until(lambda: "sign" in out_of_band(slow.world), "the external change is recorded")
    assert set(out_of_band(slow.world)) == {"sign"}
    assert [one.path for one in recorded(slow.world, "remove_temporary")] == [f"docs/{by}"]
    slow.world.umount()
    report = verify_trail(slow.world.trail, slow.world.head, session=slow.world.session.session)
    assert (report.findings, report.unfinished, report.status) == ([], [], TrailStatus.CLOSED)


def test_an_unmount_waits_a_second_for_a_change(slow: Called, tmp_path: Path) -> None:
    """A change that ends within a second gets its outcome and its answer; new calls are refused."""
    go = tmp_path / "go"
    running = Running(lambda: slow("change", path="a", makes=["a"], until=str(go)))
    until((slow.source / "a").exists, "the change is in flight")
    ending = Running(slow.world.umount)
    until(lambda: not (slow.directory / "guard.sock").exists(), "the socket is removed")
    go.touch()
    assert running.wait() is None
    assert ending.wait().closed
    assert outcome(slow, "a").result == "allowed"


def test_an_open_connection_is_refused_during_an_unmount(slow: Called, tmp_path: Path) -> None:
    """Its call is answered with an error and not run."""
    with slow.connected() as end, in_flight(slow, tmp_path / "go", "a", ["a"]):
        ending = Running(slow.world.umount)
        until(lambda: not (slow.directory / "guard.sock").exists(), "the socket is removed")
        end.sendall(b'{"call": "write_file", "path": "b", "content": "text"}\n')
        reply = answer(end)
    assert not reply or reply["error"]["message"] == "the session is ending"
    assert ending.wait().closed
    assert not (slow.source / "b").exists()


def test_a_change_that_does_not_end_is_aborted_by_an_unmount(slow: Called, tmp_path: Path) -> None:
    """The companion is killed, the outcome is recorded as unknown, and the trail is closed."""
    with in_flight(slow, tmp_path / "go", "a", ["a"]):
        companion = companion_of(slow.world.pid)
        assert slow.world.umount().closed
        assert not Path(f"/proc/{companion}").exists()
        assert outcome(slow, "a").details["end"] == "unknown"


def test_a_server_killed_during_a_change(slow: Called, mounted_called: CalledMount, tmp_path: Path) -> None:
    """Its companion ends with it; the next mount removes the temporary file of the unfinished intent."""
    by = stray_name()
    with in_flight(slow, tmp_path / "go", "a", ["a", by], by=by):
        companion = companion_of(slow.world.pid)
        slow.world.kill()
        until(lambda: not Path(f"/proc/{companion}").exists(), "the companion is gone")
    again = mounted_called()
    assert not (again.path / by).exists()
    assert (again.path / "a").read_text() == "made"
    report = verify_trail(slow.world.trail, slow.world.head, session=slow.world.session.session)
    assert [one.path for one in report.unfinished] == ["a"]


def test_a_written_file_takes_two_requests_to_the_server(slow: Called) -> None:
    """One that judges and records the change, and one for its outcome; also if the file is replaced."""
    for content in ("first", "second"):
        slow("requests")
        slow("write_file", path="a", content=content)
        assert slow("requests") == ["AUTHORIZE", "ENDED"]
        assert (slow.path / "a").read_text() == content
