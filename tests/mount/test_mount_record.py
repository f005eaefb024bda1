"""The audit record of a mount: which entries it gets, when, and that no change happens without one."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from bonobofs import session
from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import read
from bonobofs.system import syscalls
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.users import outcome
from tests.support.wait import until
from tests.support.world import bonobofs

DENY: Final = 'default = "deny"\n[[rule]]\nname = "open"\npaths = ["open/"]\n'


def _now(world: Place) -> list[AuditEntry]:
    """The entries on the disk at this moment, without a request to close the batches."""
    return list(read(world.trail))


def _of(entries: list[AuditEntry], path: str) -> list[AuditEntry]:
    return [entry for entry in entries if entry.path == path]


def _exchange(one: Path, other: Path) -> None:
    syscalls.renameat2(-100, bytes(one), -100, bytes(other), syscalls.RENAME_EXCHANGE)


CHANGES: Final[dict[str, tuple[Callable[[Path], object], str, str, str]]] = {
    "create": (lambda at: os.close(os.open(at / "new", os.O_CREAT | os.O_WRONLY)), "create_file", "new", "create"),
    "write": (lambda at: _write(at / "file"), "write_file", "file", "modify"),
    "truncate": (lambda at: os.truncate(at / "file", 0), "truncate", "file", "modify"),
    "chmod": (lambda at: (at / "file").chmod(0o600), "set_mode", "file", "modify"),
    "chown": (lambda at: os.chown(at / "file", os.geteuid(), -1), "set_owner", "file", "modify"),
    "utimens": (lambda at: os.utime(at / "file"), "set_times", "file", "modify"),
    "setxattr": (lambda at: os.setxattr(at / "file", "user.x", b"x"), "set_xattr", "file", "modify"),
    "removexattr": (lambda at: os.removexattr(at / "file", "user.mark"), "remove_xattr", "file", "modify"),
    "allocate": (lambda at: _allocate(at / "file"), "allocate", "file", "modify"),
    "copy": (lambda at: _copy(at / "other", at / "file"), "copy_range", "file", "modify"),
    "mkdir": (lambda at: (at / "made").mkdir(), "mkdir", "made", "create"),
    "fifo": (lambda at: os.mkfifo(at / "fifo"), "mknod", "fifo", "create"),
    "symlink": (lambda at: (at / "link").symlink_to("file"), "symlink", "link", "create"),
    "link": (lambda at: os.link(at / "file", at / "linked"), "link", "linked", "create"),
    "rename": (lambda at: (at / "file").rename(at / "moved"), "rename", "file", "modify"),
    "exchange": (lambda at: _exchange(at / "file", at / "other"), "rename", "file", "modify"),
    "unlink": (lambda at: (at / "file").unlink(), "delete_file", "file", "delete"),
    "rmdir": (lambda at: (at / "dir").rmdir(), "rmdir", "dir", "delete"),
}


def _write(path: Path) -> None:
    with path.open("r+") as file:
        file.write("x")


def _allocate(path: Path) -> None:
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 10_000)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("r+b") as new:
        os.copy_file_range(old.fileno(), new.fileno(), 3)


def test_every_change_has_an_intent_before_and_an_outcome_after(place: MakePlace) -> None:
    """Each system call that changes something is recorded with operation, caller, path and outcome."""
    world = place()

    def story(what: str) -> None:
        change, *_ = CHANGES[what]
        top = world.source / what
        (top / "dir").mkdir(parents=True)
        for name in ("file", "other"):
            (top / name).write_text("content")
            os.setxattr(top / name, "user.mark", b"here")
        change(world.path / what)

    for what in CHANGES:
        world.does(story, what)
    entries = world.entries()
    outcomes = {entry.details["intent"]: entry for entry in entries if entry.kind == "outcome"}
    for what, (_, operation, path, action) in CHANGES.items():
        (intent,) = [one for one in _of(entries, f"{what}/{path}") if one.kind == "intent"]
        assert (intent.operation, intent.action) == (operation, action), what
        assert (intent.result, intent.governance, intent.guard) == ("allowed", "pass", "file"), what
        assert (intent.agent, intent.agent_id) == ("alice", world.session.agent_id), what
        assert intent.session == world.session.session, what
        assert intent.details["uid"] == (world.user.uid if world.user else os.geteuid()), what
        after = outcomes[intent.seq]
        assert (after.operation, after.path, after.result) == (operation, f"{what}/{path}", "allowed"), what
        assert after.seq > intent.seq, what


def test_an_intent_is_on_record_when_the_call_returns(own_place: MakePlace) -> None:
    """No change is visible before its intent is in the trail."""
    world = own_place()

    def story() -> None:
        for number in range(20):
            (world.path / f"dir-{number}").mkdir()
            assert any(entry.kind == "intent" for entry in _of(_now(world), f"dir-{number}"))

    world.does(story)


def test_a_change_that_fails_below_ends_in_an_error(own_place: MakePlace) -> None:
    """The outcome of a change that the source refused is an error."""
    world = own_place()

    def story() -> None:
        (world.path / "dir/sub").mkdir(parents=True)
        assert outcome(os.rmdir, world.path / "dir") == errno.ENOTEMPTY

    world.does(story)
    intent, after = [entry for entry in world.entries() if entry.operation == "rmdir"]
    assert (intent.result, after.result) == ("allowed", "error")
    assert "ENOTEMPTY" in f"{after.reason} {after.details}" or "not empty" in f"{after.reason} {after.details}"


def test_a_write_batch_is_recorded_at_its_start_and_closes_when_idle(own_place: MakePlace) -> None:
    """A hundred writes are one intent, recorded with the first, and one outcome after an idle second."""
    world = own_place()

    def story() -> None:
        (world.source / "file").write_text("")
        with (world.path / "file").open("wb", buffering=0) as file:
            file.write(b"x" * 10)
            (intent,) = [entry for entry in _of(_now(world), "file") if entry.operation == "write_file"]
            assert intent.kind == "intent"
            for _ in range(99):
                file.write(b"x" * 10)
            assert len([entry for entry in _of(_now(world), "file") if entry.operation == "write_file"]) == 1

    world.does(story)

    def settled() -> list[AuditEntry]:
        return [entry for entry in _of(_now(world), "file") if entry.kind == "outcome" and entry.bytes]

    (after,) = until(settled, "the run of writes settles")
    assert (after.bytes, after.details["writes"], after.details["size"]) == (1000, 100, 1000)


@pytest.mark.parametrize("how", ["fsync", "rename", "unlink", "rename over", "umount", "SIGUSR1"])
def test_a_write_batch_is_closed(own_place: MakePlace, how: str) -> None:
    """A batch is closed by fsync, rename, removal, replacement, unmount or an audit command, before that
    takes effect.
    """
    world = own_place()

    def story() -> None:
        path = world.path / "file"
        with path.open("wb", buffering=0) as file:
            file.write(b"one")
            file.write(b"two")
            if how == "fsync":
                os.fsync(file.fileno())
        (world.path / "other").touch()
        ends: dict[str, Callable[[], object]] = {
            "rename": lambda: path.rename(world.path / "moved"),
            "unlink": path.unlink,
            "rename over": lambda: (world.path / "other").rename(path),
            "SIGUSR1": lambda: os.kill(world.pid, signal.SIGUSR1),
        }
        ends.get(how, lambda: None)()

    world.does(story)
    if how == "umount":
        world.umount()

    def settled() -> list[AuditEntry]:
        return [entry for entry in _of(_now(world), "file") if entry.kind == "outcome" and entry.bytes]

    at_once = how in ("fsync", "SIGUSR1", "umount")
    (after,) = until(settled, "the run of writes settles", seconds=0.9 if at_once else 5)
    assert (after.bytes, after.details["writes"]) == (6, 2)
    moves = [entry for entry in _now(world) if entry.operation in ("rename", "delete_file")]
    assert all(after.seq < move.seq for move in moves if move.kind == "outcome")


def test_a_repeated_denial_is_recorded_once_and_counted(own_place: MakePlace) -> None:
    """Fifty equal refusals are one entry at once, and one with the count of the others after the last."""
    world = own_place(policy=DENY)

    def story() -> None:
        for _ in range(50):
            assert outcome((world.path / "denied").touch) == errno.EACCES
            assert outcome((world.path / "other").mkdir) == errno.EACCES

    world.does(story)

    def counted() -> list[AuditEntry]:
        return [entry for entry in _of(_now(world), "denied") if entry.kind == "outcome"]

    (again,) = until(counted, "the repeated denial is settled with its count")
    (first,) = [entry for entry in _of(_now(world), "denied") if entry.kind == "intent"]
    assert (again.details["intent"], again.details["count"]) == (first.seq, 49)
    assert (first.result, first.code, first.governance) == (again.result, again.code, again.governance)


def test_three_denials_are_an_alert_once(own_place: MakePlace) -> None:
    """The third refusal in five minutes raises an alert. Later ones, and git's optional locks, do not."""
    world = own_place(policy=DENY)

    def story(names: list[str], answer: int = errno.EACCES) -> None:
        for name in names:
            assert outcome((world.path / name).touch) == answer

    def alerts() -> list[AuditEntry]:
        """The watcher may report `.git`, which is made behind the mount."""
        return [entry for entry in world.entries() if entry.kind == "alert" and entry.operation != "out_of_band"]

    world.does((world.source / ".git").mkdir)
    world.does(story, [".git/index.lock"] * 5, errno.EROFS)
    world.does(story, ["one", "two"])
    assert alerts() == []
    world.does(story, ["three", "four", "five", "six", "seven"])
    (alert,) = alerts()
    assert alert.path == "three"


def test_an_attempt_to_leave_the_workspace_is_an_alert(own_place: MakePlace) -> None:
    """A symlink that leads out is refused and raises an alert."""
    world = own_place()

    def story() -> None:
        assert outcome((world.path / "link").symlink_to, "/etc/passwd") == errno.EPERM

    world.does(story)
    denied, alert = [entry for entry in world.entries() if entry.path == "link"]
    assert (denied.code, denied.result) == ("OUTSIDE", "denied")
    assert (alert.kind, alert.code) == ("alert", "OUTSIDE")


def test_the_record_verifies_and_is_closed(place: MakePlace) -> None:
    """After the end, the chain is complete, the head matches, and `audit verify` reports nothing."""
    world = place()
    world.does(lambda: [(world.path / f"file-{n}").write_text("x") for n in range(10)])
    world.umount()
    verified = bonobofs("audit", "verify", env={"BONOBOFS_HOME": str(world.home)})
    assert verified.returncode == 0, verified.stdout
    last = _now(world)[-1]
    assert (last.kind, last.operation) == ("event", "close")


def test_the_mount_is_the_first_entry(own_place: MakePlace) -> None:
    """The entry has source, mountpoint, role and policy."""
    world = own_place()
    first = _now(world)[0]
    assert (first.kind, first.operation) == ("event", "mount")
    assert first.details["source"] == str(world.source)
    assert first.details["mountpoint"] == str(world.path)
    assert first.details["policy"] == world.session.policy.digest


@pytest.mark.alone
def test_a_request_to_close_the_batches_is_answered_at_once(own_place: MakePlace) -> None:
    """Audit commands have servers close their batches, and wait only for that."""
    world = own_place()
    world.does((world.path / "file").write_text, "content")
    start = time.monotonic()
    session.flush_servers(world.home)
    assert time.monotonic() - start < 1
    assert [entry for entry in _of(_now(world), "file") if entry.kind == "outcome" and entry.bytes]


def test_the_head_names_the_last_entry_on_request(own_place: MakePlace) -> None:
    """The head file is at most a second old. On request it names the last entry."""
    world = own_place()
    world.does((world.path / "file").write_text, "content")
    os.kill(world.pid, signal.SIGUSR1)

    def agrees() -> bool:
        head: dict[str, Any] = json.loads(world.head.read_text())
        entries = _now(world)
        settled = any(entry.kind == "outcome" and entry.bytes for entry in entries)
        return settled and (head["seq"], head["hash"]) == (entries[-1].seq, entries[-1].hash)

    until(agrees, "the head names the last entry", seconds=0.9)


def test_an_unwritable_trail_stops_changes_and_not_reads(own_place: MakePlace) -> None:
    """Without space for its entry, every change fails with EIO. Later changes succeed, and the gap is recorded."""
    world = own_place()
    (world.path / "file").write_text("content")
    session.flush_servers(world.home)
    free = resource.prlimit(world.pid, resource.RLIMIT_FSIZE)
    with (world.path / "open").open("wb", buffering=0) as opened:
        opened.write(b"run")
        resource.prlimit(world.pid, resource.RLIMIT_FSIZE, (world.trail.stat().st_size, free[1]))
        at = world.path
        calls: list[Callable[[], object]] = [
            (at / "new").touch,
            (at / "dir").mkdir,
            (at / "file").unlink,
            lambda: (at / "file").rename(at / "moved"),
            lambda: (at / "file").chmod(0o600),
            lambda: (at / "file").write_text("changed"),
        ]
        assert [outcome(call) for call in calls] == [errno.EIO] * len(calls)
        assert (at / "file").read_text() == "content"
        assert set(os.listdir(at)) == {"file", "open"}
        denial = json.loads((at / ".bonobofs/denials.jsonl").read_text().splitlines()[-1])
        assert denial["code"] == "UNRECORDED"
        resource.prlimit(world.pid, resource.RLIMIT_FSIZE, free)
    (at / "new").touch()
    assert [entry.kind for entry in world.entries() if entry.result == "error" or entry.kind == "alert"]
    world.umount()
    assert bonobofs("audit", "verify").returncode == 0


def test_the_record_keeps_the_order_of_changes_of_a_file(own_place: MakePlace) -> None:
    """Two programs change the same names; the record has the changes in the order in which they took effect."""
    world = own_place()

    def story() -> None:
        children = []
        for name in ("one", "two"):
            child = os.fork()
            if child == 0:
                for number in range(40):
                    outcome((world.path / f"{name}-{number}").touch)
                    outcome((world.path / f"{name}-{number}").rename, world.path / "target")
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)

    world.does(story)
    entries = world.entries()
    renames = [entry for entry in entries if entry.operation == "rename" and entry.kind == "intent"]
    assert len(renames) == 80
    done = {entry.details["intent"]: entry.result for entry in entries if entry.kind == "outcome"}
    assert {done[entry.seq] for entry in renames} == {"allowed"}
    assert os.listdir(world.source) == ["target"]


def test_an_agent_cannot_read_or_trace_its_server(ordinary_place: MakePlace) -> None:
    """Other processes of the same user cannot access the server's memory and descriptors."""
    world = ordinary_place()

    def story() -> None:
        assert outcome(os.listdir, f"/proc/{world.pid}/fd") == errno.EACCES
        assert outcome(Path(f"/proc/{world.pid}/mem").open, "rb") == errno.EACCES

    world.does(story)
