"""A change of the companion that is under way: leases wait for it, the mount shows it, and its end is entered."""

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
from bonobofs.audit.verify import Status, verify_trail
from bonobofs.errors import StateError
from bonobofs.policy.decision import Code, Refused
from bonobofs.session import launcher, lease_service
from bonobofs.session.lease_service import HolderOption, LeaseTerms
from bonobofs.state.heartbeats import BEAT, LAPSE
from tests.calls.conftest import Called, CalledMount, answer
from tests.watch.looking import companion_of, out_of_band, recorded, until


class Running:
    """Something that is done in a thread; `came` is what it gave, or raised."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.came: list[Any] = []
        self._act = act
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.came.append(self._act())
        except Exception as error:  # noqa: BLE001 - it is looked at by who waits
            self.came.append(error)

    def wait(self) -> Any:
        self._thread.join(60)
        (came,) = self.came
        return came


@pytest.fixture
def slow(mounted_called: CalledMount, monkeypatch: pytest.MonkeyPatch) -> Called:
    """Alice's mount, whose companion has a gate with slow changes."""
    monkeypatch.setattr(launcher, "COMPANION", "tests.calls.beside")
    return mounted_called()


def outcome(called: Called, path: str) -> AuditEntry:
    """How the last change of a path ended."""
    until(lambda: [one for one in called.of(path) if one.kind == "outcome"], f"the change of {path} has ended")
    return [one for one in called.of(path) if one.kind == "outcome"][-1]


@contextmanager
def under_way(called: Called, go: Path, path: str, makes: list[str], **more: Any) -> Iterator[Running]:
    """While the block runs, the change is; then it ends by itself, if nothing has ended it before."""
    running = Running(lambda: called("change", path=path, makes=makes, until=str(go), **more))
    try:
        until(lambda: all((called.source / name).exists() for name in makes), "it is under way")
        yield running
    finally:
        go.touch()
        running.wait()


def test_a_lease_waits_for_what_was_admitted_before(slow: Called, home: Path, tmp_path: Path) -> None:
    """Though that takes longer than a silent session is waited for; what is asked after it is bound by it."""
    go = tmp_path / "go"
    with under_way(slow, go, "docs/a.md", ["docs/a.md"]) as change:
        acquiring = Running(lambda: lease_service.acquire(home, HolderOption("bob"), ["docs/**"], LeaseTerms()))
        until(lambda: slow("lease.list"), "the lease is entered")
        deadline = time.monotonic() + LAPSE + 3 * BEAT
        until(lambda: time.monotonic() > deadline or acquiring.came, "time goes by")
        assert acquiring.came == []
        with pytest.raises(Refused) as refused:
            slow("write_file", path="docs/b.md", content="text")
        assert refused.value.decision.code is Code.LEASED
        (slow.path / "other").write_text("the mount goes on")
    assert change.wait() is None
    assert acquiring.wait().holder.agent == "bob"
    assert outcome(slow, "docs/a.md").result == "allowed"


def test_what_it_touches_is_its_own_and_all_else_a_strangers(slow: Called, tmp_path: Path) -> None:
    """A path, a tree that is named as touched, and what somebody changes elsewhere meanwhile."""
    for name in ("a", "made/by/it", "theirs"):
        assert not (slow.path / name).exists()
    makes = ["a", *(f"made/by/{number}" for number in range(300))]
    with under_way(slow, tmp_path / "go", "a", makes, touches=["made/"]):
        (slow.source / "theirs").write_text("a stranger's")
        until(lambda: "theirs" in out_of_band(slow.world), "it is entered")
    assert sorted(os.listdir(slow.path / "made/by")) == sorted(str(number) for number in range(300))
    (slow.source / "made/by/7").write_text("a stranger's")
    until(lambda: "made/by/7" in out_of_band(slow.world), "it is entered")
    assert set(out_of_band(slow.world)) == {"theirs", "made/by/7"}
    (intent,) = [one for one in slow.of("a") if one.kind == "intent"]
    assert intent.details["touches"] == ["made/"]


def test_no_directory_is_moved_from_under_it(slow: Called, tmp_path: Path) -> None:
    """What is written was judged by where it lies: its directory, and those above, are busy until it is there."""
    for name in ("one/two", "beside"):
        (slow.path / name).mkdir(parents=True)
    with under_way(slow, tmp_path / "go", "one/two/a", ["one/two/a"]):
        for name in ("one", "one/two"):
            with pytest.raises(OSError, match="busy"):
                (slow.path / name).rename(slow.path / "moved")
        (slow.path / "beside").rename(slow.path / "moved")
        (slow.path / "one/file").touch()
        (slow.path / "one/file").rename(slow.path / "file")
    (slow.path / "one/two").rename(slow.path / "two")
    assert (slow.path / "two/a").read_text() == "made"


def test_another_mount_of_the_source_knows_it_too(slow: Called, mounted_called: CalledMount, tmp_path: Path) -> None:
    """By the record; what the change touched is shown there, and nobody takes it for a stranger's."""
    other = mounted_called(agent="bob")
    with under_way(slow, tmp_path / "go", "a", ["a", "made/b"], touches=["made/"]):
        until((other.path / "made/b").exists, "it shows")
    (slow.source / "sign").touch()
    until(lambda: "sign" in out_of_band(other.world), "what is a stranger's is entered")
    assert set(out_of_band(other.world)) == {"sign"}


def test_a_companion_that_is_killed_in_the_middle(slow: Called, home: Path, tmp_path: Path) -> None:
    """The end is entered as unknown, what is half done is taken away, the mount shows what is there, and goes on."""
    by = stray_name()
    (slow.source / "docs").mkdir()
    assert not (slow.path / "docs/a.md").exists()
    assert not (slow.path / "docs" / by).exists()
    with under_way(slow, tmp_path / "go", "docs/a.md", ["docs/a.md", f"docs/{by}"], by=by) as change:
        os.kill(companion_of(slow.world.pid), signal.SIGKILL)
        ended = outcome(slow, "docs/a.md")
        assert (ended.result, ended.details["end"]) == ("error", "unknown")
        assert "Owner died" in (ended.reason or "")
        assert isinstance(change.wait(), StateError)
        assert not (slow.source / "docs" / by).exists()
        assert (slow.path / "docs/a.md").read_text() == "made"
        assert slow("whoami")["agent"] == "alice"
        until(lambda: recorded(slow.world, "companion"), "another stands")
        lease_service.acquire(home, HolderOption("bob"), ["docs/**"], LeaseTerms())
        with pytest.raises(PermissionError):
            (slow.path / "docs/a.md").write_text("text")
    (slow.source / "sign").touch()
    until(lambda: "sign" in out_of_band(slow.world), "what is a stranger's is entered")
    assert set(out_of_band(slow.world)) == {"sign"}
    assert [one.path for one in recorded(slow.world, "remove_temporary")] == [f"docs/{by}"]
    slow.world.umount()
    report = verify_trail(slow.world.trail, slow.world.head, session=slow.world.session.session)
    assert (report.findings, report.unfinished, report.status) == ([], [], Status.CLOSED)


def test_the_end_of_the_mount_waits_for_it_a_little(slow: Called, tmp_path: Path) -> None:
    """What ends within a second has its outcome, and who asked for it is told; what comes meanwhile is refused."""
    go = tmp_path / "go"
    running = Running(lambda: slow("change", path="a", makes=["a"], until=str(go)))
    until((slow.source / "a").exists, "it is under way")
    ending = Running(slow.world.umount)
    until(lambda: not (slow.directory / "guard.sock").exists(), "no more calls are taken")
    go.touch()
    assert running.wait() is None
    assert ending.wait().closed
    assert outcome(slow, "a").result == "allowed"


def test_who_is_connected_already_calls_no_more_then(slow: Called, tmp_path: Path) -> None:
    """Its call is answered, and not made."""
    with slow.connected() as end, under_way(slow, tmp_path / "go", "a", ["a"]):
        ending = Running(slow.world.umount)
        until(lambda: not (slow.directory / "guard.sock").exists(), "no more calls are taken")
        end.sendall(b'{"call": "write_file", "path": "b", "content": "text"}\n')
        said = answer(end)
    assert not said or said["error"]["message"] == "the session is ending"
    assert ending.wait().closed
    assert not (slow.source / "b").exists()


def test_what_does_not_end_keeps_no_mount(slow: Called, tmp_path: Path) -> None:
    """It is ended, and how it ended is not known; the record is closed."""
    with under_way(slow, tmp_path / "go", "a", ["a"]):
        companion = companion_of(slow.world.pid)
        assert slow.world.umount().closed
        assert not Path(f"/proc/{companion}").exists()
        assert outcome(slow, "a").details["end"] == "unknown"


def test_a_server_that_is_killed_in_the_middle(slow: Called, mounted_called: CalledMount, tmp_path: Path) -> None:
    """Its companion ends with it; the intent without outcome tells the next mount."""
    by = stray_name()
    with under_way(slow, tmp_path / "go", "a", ["a", by], by=by):
        companion = companion_of(slow.world.pid)
        slow.world.kill()
        until(lambda: not Path(f"/proc/{companion}").exists(), "the companion is gone")
    again = mounted_called()
    assert not (again.path / by).exists()
    assert (again.path / "a").read_text() == "made"
    report = verify_trail(slow.world.trail, slow.world.head, session=slow.world.session.session)
    assert [one.path for one in report.unfinished] == ["a"]
