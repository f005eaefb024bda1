"""Leases in a mount: what another holds is refused to every program there, also through files opened before."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.policy.overlap import patterns_meet
from bonobofs.state import leases, session_rows
from bonobofs.state.database import Database
from bonobofs.state.lease_follower import LAPSE
from bonobofs.state.leases import LeaseChange, LeaseRequest
from bonobofs.state.session_rows import Holder
from tests.support.observe import companion_of, stopped
from tests.support.postgres import Postgres
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, bonobofs


def acquire(database: Database, label: str, *patterns: str) -> LeaseChange:
    """As `lease acquire` does: it returns when the lease binds everybody."""
    holder = Holder(label, session_rows.register(database, label).id)
    granted = leases.acquire(database, LeaseRequest(holder, patterns), patterns_meet)
    leases.wait(database, granted.generation)
    return granted


def writes(path: Path) -> bool:
    """Whether a program may write there, in one step."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    except PermissionError:
        return False
    try:
        os.write(file, b"text")
    except PermissionError:
        return False
    finally:
        os.close(file)
    return True


def test_a_symlink_does_not_take_the_place_of_a_directory_above_leased_paths(
    mounted: Mounted, database: Database
) -> None:
    """Through it, other files would be at the leased paths."""
    world = mounted(policy=ALLOW_ALL)
    (world.path / "x/nd").mkdir(parents=True)
    (world.path / "work").mkdir()
    acquire(database, "bob", "work/newdir/**", "new/*/x.md")
    acquire(database, "alice", "own/a.md")
    for name in ("work/newdir", "new", "new/a"):
        (world.path / name).parent.mkdir(exist_ok=True)
        with pytest.raises(PermissionError):
            os.symlink("x", world.path / name)
    for name in ("own", "work/other"):
        os.symlink("x", world.path / name)
    (world.path / "work/newdir").mkdir()
    assert sorted(os.listdir(world.source / "work")) == ["newdir", "other"]


def test_files_of_the_source_at_leased_scratch_paths_do_not_move_with_their_directory(
    mounted: Mounted, source: Path, database: Database
) -> None:
    """They would leave the leased path, or arrive there, although a lease does not bind changes in scratch."""
    world = mounted(policy=ALLOW_ALL + '[[scratch]]\npaths = ["**/cache/"]\n')
    (source / "a/cache").mkdir(parents=True)
    (source / "a/cache/x").write_text("text")
    acquire(database, "bob", "a/cache/**", "b/cache/**")
    for new in ("b", "c"):
        with pytest.raises(PermissionError):
            os.rename(world.path / "a", world.path / new)
    (world.path / "a/cache/y").write_text("in scratch")
    acquire(database, "alice", "d/**")
    os.rename(source / "a", source / "e")
    until((world.path / "e").exists, "it is seen")
    with pytest.raises(PermissionError):
        os.rename(world.path / "e", world.path / "b")
    os.rename(world.path / "e", world.path / "d")
    assert (source / "d/cache/x").read_text() == "text"


def test_a_write_through_a_file_opened_before_the_lease_is_refused(mounted: Mounted, database: Database) -> None:
    """For every kind of write. After the lease it succeeds again."""
    world = mounted(policy=ALLOW_ALL)
    with open(world.path / "docs.md", "w+b", buffering=0) as file:
        file.write(b"before")
        granted = acquire(database, "bob", "docs.md")
        for change in (lambda: file.write(b"after"), lambda: file.truncate(1), lambda: os.fchmod(file.fileno(), 0o600)):
            with pytest.raises(PermissionError):
                change()
        file.seek(0)
        assert file.read() == b"before"
        for change in ((world.path / "docs.md").unlink, lambda: (world.path / "docs.md").rename(world.path / "other")):
            with pytest.raises(PermissionError):
                change()
        assert writes(world.path / "other.md")
        leases.release(database, granted.lease.id)
        until(lambda: writes(world.path / "docs.md"), "it is released")
        file.seek(0)
        file.write(b"after")
    assert (world.source / "docs.md").read_text() == "aftere"


def test_no_change_of_another_agent_follows_acquire(mounted: Mounted, database: Database) -> None:
    """A program that writes continuously is stopped between two writes."""
    world = mounted(policy=ALLOW_ALL)
    (world.path / "log").touch()
    refused = threading.Event()

    def hammer() -> None:
        with open(world.path / "log", "ab", buffering=0) as log:
            try:
                while True:
                    log.write(b"x")
            except PermissionError:
                refused.set()

    thread = threading.Thread(target=hammer, daemon=True)
    thread.start()
    until(lambda: (world.source / "log").stat().st_size, "it writes")
    acquire(database, "bob", "log")
    size = (world.source / "log").stat().st_size
    assert refused.wait(10)
    thread.join()
    assert (world.source / "log").stat().st_size == size


def test_a_policy_change_keeps_the_leases(mounted: Mounted, database: Database) -> None:
    world = mounted(policy=ALLOW_ALL)
    acquire(database, "bob", "docs/**")
    (world.path / "docs").mkdir()
    os.kill(world.pid, signal.SIGHUP)
    until(lambda: session.statuses(world.home)[0].session.policy.generation == 2, "the policy is reloaded")
    assert not writes(world.path / "docs/a.md")
    assert writes(world.path / "a.md")


def test_a_mount_with_unknown_leases_refuses_changes(mounted: Mounted, database: Database) -> None:
    """While the companion is stopped. Reads go on, and changes succeed after the companion's first message."""
    world = mounted(policy=ALLOW_ALL)
    assert writes(world.path / "a.md")
    with stopped(companion_of(world.pid)):
        until(lambda: not writes(world.path / "a.md"), "what is leased is not known", seconds=LAPSE + 5)
        assert (world.path / "a.md").read_text() == "text"
        acquire(database, "bob", "docs/**")
    until(lambda: writes(world.path / "a.md"), "the leases are known again")
    (world.path / "docs").mkdir()
    assert not writes(world.path / "docs/a.md")


def test_two_hosts_share_leases_through_postgresql(
    mounted: Mounted, postgres: Postgres, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease of one host applies on the other. During an outage changes are refused, and no lease is lost."""
    monkeypatch.setenv("BONOBOFS_DATABASE", postgres.make_database())
    here = mounted(policy=ALLOW_ALL, agent="ann")
    monkeypatch.setenv("BONOBOFS_HOME", str(tmp_path / "there"))
    with Database.open(session.home()) as database:
        acquire(database, "bob", "docs/**")
        (here.path / "docs").mkdir()
        assert not writes(here.path / "docs/a.md")
        assert writes(here.path / "a.md")
        postgres.stop()
        try:
            until(lambda: not writes(here.path / "a.md"), "the lease snapshot expires", seconds=LAPSE + 5)
            assert (here.path / "a.md").read_text() == "text"
            log = here.home / "sessions" / here.session.session / "server.log"
            until(lambda: "the leases cannot be read: the database" in log.read_text(), "the server's log says why")
        finally:
            postgres.start()
        until(lambda: writes(here.path / "a.md"), "it is known again")
        assert not writes(here.path / "docs/a.md")
        assert [lease.holder.agent for lease in leases.list_leases(database)] == ["bob"]
    monkeypatch.setenv("BONOBOFS_HOME", str(here.home))


def _exchange(one: Path, other: Path) -> None:
    if ctypes.CDLL(None, use_errno=True).renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _seen(directory: Path) -> dict[str, object]:
    """All that a change of any kind would show in."""
    found: dict[str, object] = {}
    for path in (directory, *directory.rglob("*")):
        st = path.lstat()
        attributes = {name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path)}
        content = path.read_bytes() if stat.S_ISREG(st.st_mode) else None
        found[str(path)] = (
            st.st_ino,
            st.st_mode,
            st.st_uid,
            st.st_nlink,
            st.st_size,
            st.st_mtime_ns,
            content,
            attributes,
        )
    return found


def test_no_system_call_changes_a_path_leased_by_another_agent(mounted: Mounted, database: Database) -> None:
    """No name is created, moved or removed there. Pages that a mapping made dirty before are not written."""
    world = mounted(policy=ALLOW_ALL)
    docs, free = world.path / "docs", world.path / "free"
    (docs / "sub").mkdir(parents=True)
    free.mkdir()
    (docs / "a").write_bytes(b"a" * 400)
    (docs / "sub/b").touch()
    (docs / "ln").symlink_to("a")
    for name in ("x", "y"):
        (free / name).write_bytes(b"x" * 400)
    with (
        open(docs / "a", "r+b", buffering=0) as file,
        open(free / "x", "rb") as other,
        mmap.mmap(file.fileno(), 400) as mapped,
        open(free / ".x.swp", "wb", buffering=0) as temporary,
    ):
        temporary.write(b"held")
        mapped[:5] = b"dirty"
        acquire(database, "bob", "docs/**")
        before = _seen(world.source / "docs")
        calls: dict[str, Callable[[], object]] = {
            "msync": mapped.flush,
            "write": lambda: file.write(b"b"),
            "ftruncate": lambda: file.truncate(1),
            "fallocate": lambda: os.posix_fallocate(file.fileno(), 0, 9999),
            "copy_file_range": lambda: os.copy_file_range(other.fileno(), file.fileno(), 9),
            "fchmod": lambda: os.fchmod(file.fileno(), 0o600),
            "truncate": lambda: os.truncate(docs / "a", 1),
            "open, truncating": lambda: os.open(docs / "a", os.O_WRONLY | os.O_TRUNC),
            "chown": lambda: os.chown(docs / "a", os.geteuid(), os.getegid()),
            "utime": lambda: os.utime(docs / "a", (1, 1)),
            "utime of a symlink": lambda: os.utime(docs / "ln", (1, 1), follow_symlinks=False),
            "setxattr": lambda: os.setxattr(docs / "a", "user.x", b"1"),
            "unlink": lambda: os.unlink(docs / "a"),
            "rmdir": lambda: os.rmdir(docs / "sub"),
            "rename out": lambda: os.rename(docs / "a", free / "n"),
            "rename over": lambda: os.rename(free / "y", docs / "a"),
            "rename in": lambda: os.rename(free / "y", docs / "n"),
            "rename of what was held": lambda: os.rename(free / ".x.swp", docs / "a"),
            "exchange": lambda: _exchange(free / "y", docs / "a"),
            "exchange of directories": lambda: _exchange(free, docs),
            "rename of the directory": lambda: os.rename(docs, world.path / "n"),
            "rename of one below": lambda: os.rename(docs / "sub", docs / "n"),
            "rename of a directory into it": lambda: os.rename(free, docs / "n"),
            "link in": lambda: os.link(free / "y", docs / "n"),
            "link out": lambda: os.link(docs / "a", free / "n"),
            "symlink": lambda: os.symlink("a", docs / "n"),
            "mkdir": lambda: os.mkdir(docs / "n"),
            "mkfifo": lambda: os.mkfifo(docs / "n"),
            "create": lambda: os.open(docs / "n", os.O_CREAT | os.O_EXCL | os.O_WRONLY),
        }
        for name, call in calls.items():
            with pytest.raises(PermissionError):
                call()
            assert _seen(world.source / "docs") == before, name
    session.flush_servers(world.home)
    assert _seen(world.source / "docs") == before
    assert (docs / "a").read_bytes() == b"a" * 400
    codes = {entry.code for entry in world.entries() if entry.result == "denied"}
    assert codes == {"LEASED"}


def test_a_lease_applies_to_every_name_of_a_file(mounted: Mounted, database: Database) -> None:
    """Under the leased name the denial names the holder; under another, it says that one name is not allowed."""
    world = mounted(policy=ALLOW_ALL)
    (world.path / "docs").mkdir()
    (world.path / "docs/a").write_text("text")
    (world.path / "alias").hardlink_to(world.path / "docs/a")
    with open(world.path / "alias", "ab", buffering=0) as opened:
        acquire(database, "bob", "docs/**")
        with pytest.raises(PermissionError):
            opened.write(b"more")
    for path, code in (("docs/a", "LEASED"), ("alias", "HARDLINK")):
        assert not writes(world.path / path)
        why = json.loads(bonobofs("why", world.path / path, "--json").stdout)
        assert (why["code"], why.get("holder")) == (code, "bob" if code == "LEASED" else None)
    assert (world.source / "alias").read_text() == "text"
