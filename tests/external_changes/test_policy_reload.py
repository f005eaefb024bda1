"""A changed policy is in force within a second, for decisions and for open files."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

from tests.support import proc
from tests.support.observe import companion_of, recorded, status, text
from tests.support.users import outcome
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World, bonobofs

CLOSED: Final = ALLOW_ALL + '[[protect]]\npaths = ["docs/"]\n'
SOON: Final = 10.0
"""Seconds within which it must be so under load; on a quiet machine it is one."""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy file, in a directory of its own."""
    path = tmp_path / "policies" / "policy.toml"
    path.parent.mkdir()
    path.write_text(ALLOW_ALL)
    return path


@pytest.fixture
def world(mounted: Mounted, source: Path, policy: Path) -> World:
    (source / "docs").mkdir()
    return mounted(policy=policy)


def _write(world: World) -> object:
    return outcome((world.path / "docs/plan.md").write_text, "text")


def _replace(policy: Path) -> None:
    beside = policy.with_name("new")
    beside.write_text(CLOSED)
    beside.rename(policy)


def _remove_and_make(policy: Path) -> None:
    policy.unlink()
    policy.write_text(CLOSED)


def _replace_directory(policy: Path) -> None:
    new = policy.parent.with_name("new policies")
    shutil.copytree(policy.parent, new)
    (new / policy.name).write_text(CLOSED)
    policy.parent.rename(policy.parent.with_name("old policies"))
    new.rename(policy.parent)


WAYS: dict[str, Callable[[Path], object]] = {
    "written in place": lambda policy: policy.write_text(CLOSED),
    "replaced by a rename": _replace,
    "removed and made again": _remove_and_make,
    "its directory replaced": _replace_directory,
}


@pytest.mark.parametrize("how", WAYS)
def test_a_changed_policy_file_is_reloaded(world: World, policy: Path, how: str) -> None:
    """By each way of changing a file."""
    assert _write(world) != errno.EROFS
    WAYS[how](policy)
    until(lambda: _write(world) == errno.EROFS, "the new policy is in force", seconds=SOON)
    policy.write_text(ALLOW_ALL)
    until(lambda: _write(world) != errno.EROFS, "the old one is in force again", seconds=SOON)


def test_a_changed_symlink_loads_its_new_target(mounted: Mounted, source: Path, policy: Path) -> None:
    """The name given to `mount` is followed; the origin shown is its target."""
    (source / "docs").mkdir()
    link, other = policy.with_name("link"), policy.with_name("other.toml")
    other.write_text(CLOSED)
    link.symlink_to(policy)
    world = mounted(policy=link)
    assert status(world).session.policy.origin == str(policy)
    link.unlink()
    link.symlink_to(other)
    until(lambda: _write(world) == errno.EROFS, "the new policy is in force", seconds=SOON)
    assert status(world).session.policy.origin == str(other)


def test_open_files_follow_the_new_policy(world: World, policy: Path) -> None:
    """The next write to an open file is refused, and permitted again under the old policy."""
    with (world.path / "docs/log.md").open("ab", buffering=0) as file:
        file.write(b"one\n")
        policy.write_text(CLOSED)
        until(lambda: outcome(file.write, b"two\n") == errno.EROFS, "the open file is refused", seconds=SOON)
        size = (world.source / "docs/log.md").stat().st_size
        policy.write_text(ALLOW_ALL)
        until(lambda: outcome(file.write, b"three\n") != errno.EROFS, "the open file is let in", seconds=SOON)
    assert (world.source / "docs/log.md").stat().st_size > size


def test_every_view_of_the_policy_shows_the_new_one(world: World, policy: Path) -> None:
    """policy.md, whoami.json, `status`, `policy show`, `why` and the trail: generation, digest and origin."""
    before = json.loads((world.path / ".bonobofs/whoami.json").read_text())["policy"]
    policy.write_text(CLOSED)
    until(lambda: status(world).session.policy.generation == 2, "it is the second generation", seconds=SOON)
    mark = status(world).session.policy
    assert mark.digest != before
    assert mark.origin == str(policy)
    assert json.loads((world.path / ".bonobofs/whoami.json").read_text())["policy"] == mark.digest
    assert "docs/" in (world.path / ".bonobofs/policy.md").read_text()
    (one,) = json.loads(bonobofs("status", "--json").stdout)
    assert one["policy"] == {"origin": str(policy), "digest": mark.digest, "generation": 2}
    for place in (world.path, world.source / "docs"):
        shown = json.loads(bonobofs("policy", "show", "--json", cwd=place).stdout)
        assert (shown["origin"], shown["digest"], shown["generation"]) == (str(policy), mark.digest, 2)
        assert shown["session"] == world.session.session
        assert f"digest {mark.digest}, generation 2" in bonobofs("policy", "show", cwd=place).stdout
    assert json.loads(bonobofs("why", "--json", "docs/x", cwd=world.path).stdout)["code"] == "PROTECTED"
    (event,) = recorded(world, "policy")
    st = policy.stat()
    modified = datetime.fromtimestamp(st.st_mtime, UTC).isoformat(timespec="milliseconds")
    assert event.details == {
        "origin": str(policy),
        "file": {"owner": st.st_uid, "modified": modified},
        "policy": mark.digest,
        "previous": before,
        "generation": 2,
    }


def test_an_invalid_policy_is_reported_and_not_loaded(world: World, policy: Path) -> None:
    """The last good one stays in force; an alert, `status` and `policy show` say which line is wrong."""
    policy.write_text(CLOSED)
    until(lambda: _write(world) == errno.EROFS, "the good policy is in force", seconds=SOON)
    policy.write_text(ALLOW_ALL + 'colour = "red"\n')
    until(lambda: recorded(world, "policy", "alert"), "there is an alert", seconds=SOON)
    assert _write(world) == errno.EROFS
    (alert,) = recorded(world, "policy", "alert")
    assert alert.reason == "The policy could not be loaded; the last good one stays in force."
    assert alert.details["error"].startswith(f"{policy}:4: colour: unknown key")
    assert status(world).policy_error == alert.details["error"]
    assert status(world).session.policy.generation == 2
    assert alert.details["error"] in bonobofs("status").stdout
    shown = bonobofs("policy", "show", cwd=world.path)
    assert alert.details["error"] in shown.stderr
    policy.write_text(CLOSED)
    until(lambda: status(world).policy_error is None, "it is well again", seconds=SOON)
    policy.unlink()
    until(
        lambda: "there is no policy file" in (status(world).policy_error or ""), "its absence is reported", seconds=SOON
    )
    assert _write(world) == errno.EROFS


def test_a_policy_inside_the_source_is_refused(mounted: Mounted, source: Path, policy: Path) -> None:
    """A symlink that is changed to lead into the source is refused, as by `mount`."""
    link = policy.with_name("link")
    link.symlink_to(policy)
    world = mounted(policy=link)
    (source / "mine.toml").write_text(ALLOW_ALL)
    link.unlink()
    link.symlink_to(source / "mine.toml")
    until(lambda: "lies inside the source" in (status(world).policy_error or ""), "it is refused", seconds=SOON)
    assert status(world).session.policy.generation == 1


def test_sighup_reloads_the_policy(world: World) -> None:
    """SIGHUP gives a new generation of the same policy; the mount goes on."""
    os.kill(world.pid, signal.SIGHUP)
    until(lambda: status(world).session.policy.generation == 2, "it is the second generation", seconds=SOON)
    (world.path / "docs/plan.md").write_text("served on")
    assert text(world.source / "docs/plan.md") == "served on"
    os.kill(companion_of(world.pid), signal.SIGKILL)
    until(lambda: recorded(world, "companion", "alert"), "the companion is missed", seconds=SOON)
    os.kill(world.pid, signal.SIGHUP)
    until(lambda: status(world).session.policy.generation == 3, "the restarted one loads it", seconds=SOON)
    assert world.is_alive


def test_an_unchanged_policy_is_not_reloaded(world: World, policy: Path) -> None:
    """A touched file, and a file with another comment, give no new generation."""
    os.utime(policy)
    policy.write_text(ALLOW_ALL + "# no more than a word\n")
    policy.write_text(ALLOW_ALL + "# another\n")
    os.kill(world.pid, signal.SIGHUP)
    until(lambda: status(world).session.policy.generation > 1, "the signal is obeyed", seconds=SOON)
    assert status(world).session.policy.generation == 2


def test_the_server_frees_earlier_policies(mounted: Mounted, source: Path, policy: Path) -> None:
    """After many reloads, the server holds one policy."""
    rules = (f'[[rule]]\nname = "r{number}"\npaths = ["**/d{number}/**/*.md"]\n' for number in range(300))
    policy.write_text(ALLOW_ALL + "".join(rules))
    world = mounted(policy=policy)

    def load_anew(last: int) -> None:
        while (generation := status(world).session.policy.generation) < last:
            os.kill(world.pid, signal.SIGHUP)
            until(lambda: status(world).session.policy.generation > generation, "a new generation", seconds=SOON)

    load_anew(4)
    before = proc.memory(world.pid)
    load_anew(12)
    assert proc.memory(world.pid) < before + (1_000 << 10), "each policy takes about as many bytes"


def test_a_role_removed_from_the_policy_may_only_read(mounted: Mounted, policy: Path) -> None:
    """The session goes on. After the reload its role is unknown, and every change is refused."""
    policy.write_text(ALLOW_ALL + '[role.writer]\nwrite = ["**"]\n')
    world = mounted(policy=policy, role="writer")
    (world.path / "before").write_text("written")
    policy.write_text(ALLOW_ALL)
    os.kill(world.pid, signal.SIGHUP)
    until(lambda: status(world).session.policy.generation > 1, "the policy without the role is in force", seconds=SOON)
    assert outcome((world.path / "after").touch) == errno.EACCES
    assert (world.path / "before").read_text() == "written"
