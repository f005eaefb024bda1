"""A caller's umask applies to what the caller creates, and to nothing that the server creates for others or itself."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.state.home import session_directory
from bonobofs.state.sessions import load_all
from tests.support.wait import until
from tests.support.world import Mounted, OrdinaryUser, World, bonobofs

POLICY = 'default = "allow"\n[[scratch]]\npaths = ["**/build/"]\n'


@pytest.fixture
def mount(ordinary_user: OrdinaryUser) -> Iterator[Path]:
    """A mount of an ordinary user: the modes of files bind that user, which root's rights would hide."""
    top = ordinary_user.directory
    (top / "policy.toml").write_text(POLICY)
    assert ordinary_user.run("mkdir", "source", "mount", "source/sub").returncode == 0
    made = ordinary_user.bonobofs("mount", "source", "mount", "--agent", "alice", "--policy", "policy.toml")
    assert made.returncode == 0, made.stderr
    yield top / "mount"
    ended = ordinary_user.bonobofs("umount", "mount")
    assert ended.returncode == 0, ended.stderr


def test_the_umask_is_reset_after_each_request(mount: Path, ordinary_user: OrdinaryUser) -> None:
    """A new policy makes the server rewrite live.json, with its own mode."""
    top = ordinary_user.directory
    (made,) = load_all(top / "home")
    live = session_directory(top / "home", made.session) / "live.json"
    for number, act in enumerate(("mkdir mount/z", ": >mount/f", "mkfifo mount/p"), 1):
        ordinary_user.run("sh", "-c", f"umask 0777; {act}")
        before = live.stat().st_mtime_ns
        (top / "policy.toml").write_text(POLICY + f"max_total = '{number}GB'\n")
        until(lambda: live.stat().st_mtime_ns != before, "the server has rewritten live.json")  # noqa: B023 - called at once
        assert stat.S_IMODE(live.stat().st_mode) == 0o600

    wrote = ordinary_user.run("sh", "-c", "mkdir -p mount/sub/build/deep && echo x >mount/sub/build/deep/file")
    assert (wrote.returncode, wrote.stderr) == (0, "")
    assert ordinary_user.run("cat", "mount/sub/build/deep/file").stdout == "x\n"
    for command in (["status"], ["why", "mount/sub/a.md"], ["audit", "verify"]):
        told = ordinary_user.bonobofs(*command)
        assert told.returncode == 0, (command, told.stdout, told.stderr)


def test_an_unreadable_session_hides_no_other(mounted: Mounted, source: Path, tmp_path: Path) -> None:
    """The test damages documents instead: root can read every file."""
    good = mounted()
    live_damaged = mounted()
    damaged = mounted()
    place = session_directory(good.home, damaged.session.session)
    document = (place / "session.json").read_bytes()
    (place / "session.json").write_text("{")
    (session_directory(good.home, live_damaged.session.session) / "live.json").write_text("{")
    try:
        told = bonobofs("status")
        assert told.returncode == 1
        assert damaged.session.session in told.stderr
        assert str(good.path) in told.stdout
        assert f"{live_damaged.path}: its live.json cannot be read" in told.stdout
        told = bonobofs("why", f"{good.path}/a.py")
        assert (told.returncode, "DEFAULT" in told.stdout) == (77, True), told.stderr
        told = bonobofs("why", f"{damaged.path}/a.py")
        assert (told.returncode, "is in a mount whose session cannot be read" in told.stderr) == (1, True), told.stderr
        told = bonobofs("audit", "verify")
        assert told.returncode == 1
        assert f"{damaged.session.session}" in told.stdout
        assert "3 trails" in told.stdout
        assert "1 findings" in told.stdout
        _trail_is_no_file(good)
        told = bonobofs("audit", "report")
        assert told.returncode == 1
        assert damaged.session.session in told.stderr
        assert good.session.session in told.stdout
        (again := tmp_path / "again").mkdir()
        told = bonobofs("mount", source, again)
        assert (told.returncode, damaged.session.session in told.stderr) == (0, True), told.stderr
        told = bonobofs("umount", again)
        assert (told.returncode, told.stderr) == (0, "")
    finally:
        (place / "session.json").write_bytes(document)


def _trail_is_no_file(world: World) -> None:
    """A trail that cannot be opened is a finding, and the others are still verified."""
    other = world.home / "trails/00000000-0000-0000-0000-000000000000.jsonl"
    other.mkdir()
    told = bonobofs("audit", "verify")
    assert told.returncode == 1
    assert "4 trails" in told.stdout
    assert f"{other} cannot be read" in told.stderr
    other.rmdir()
    session.flush_servers(world.home)
