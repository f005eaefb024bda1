"""Two mounts of one source, and a mount that covers its source: each sees what the others do."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.system import mounts
from tests.external_changes.test_visibility import LOADED, MEDIAN
from tests.support.observe import companion_of, out_of_band, text
from tests.support.wait import seconds_until, until
from tests.support.world import ALLOW_ALL, Mounted, OrdinaryUser, environment

APPENDER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
for number in range(int(sys.argv[3])):
    os.write(fd, f"{sys.argv[2]} {number:04}\\n".encode())
"""


@pytest.mark.alone
def test_two_agents_see_each_others_changes(mounted: Mounted, source: Path) -> None:
    """In two mounts of one source, within 50 ms at the median, and none is out of band."""
    (source / "shared").write_text("as it was")
    alice, bob = mounted(policy=ALLOW_ALL, agent="alice"), mounted(policy=ALLOW_ALL, agent="bob")
    took = []
    for turn in range(20):
        for one, other in ((alice, bob), (bob, alice)):
            said = f"{one.session.agent} {turn}"
            assert not (other.path / said).exists()
            (one.path / "shared").write_text(said)
            took.append(seconds_until(lambda at=other, said=said: text(at.path / "shared") == said, "it shows"))  # type: ignore[misc]
            (one.path / said).touch()
            took.append(seconds_until((other.path / said).exists, "the new file shows"))
    assert statistics.median(took) < MEDIAN * LOADED
    (source / "the end").touch()
    for world in (alice, bob):
        until(lambda at=world: "the end" in out_of_band(at), "the sign is entered")  # type: ignore[misc]
        assert set(out_of_band(world)) == {"the end"}


def test_appends_through_two_mounts_lose_no_line(mounted: Mounted, source: Path) -> None:
    """Two programs append to one file, each through its own mount: every line is complete and shows in both."""
    (source / "log").touch()
    worlds = [mounted(policy=ALLOW_ALL, agent=agent) for agent in ("alice", "bob")]
    lines = 500
    running = [
        subprocess.Popen([sys.executable, "-c", APPENDER, world.path / "log", world.session.agent, str(lines)])
        for world in worlds
    ]
    assert [program.wait(60) for program in running] == [0, 0]
    found = (source / "log").read_text().splitlines()
    wanted = [f"{agent} {number:04}" for agent in ("alice", "bob") for number in range(lines)]
    assert sorted(found) == wanted
    for world in worlds:
        until(lambda at=world: (text(at.path / "log") or "").splitlines() == found, "the mount shows every line")  # type: ignore[misc]


@pytest.mark.root
def test_a_mount_over_its_source_is_watched(mounted: Mounted, source: Path) -> None:
    """The companion is in a mount namespace of its own, in which the source is visible."""
    (source / "file").write_text("as it was")
    below = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    world = mounted(policy=ALLOW_ALL, mountpoint=source)
    companion = companion_of(world.pid)
    assert os.readlink(f"/proc/{companion}/ns/mnt") != os.readlink(f"/proc/{world.pid}/ns/mnt")
    assert f" {source} " not in Path(f"/proc/{companion}/mountinfo").read_text()
    assert text(world.path / "file") == "as it was"
    for turn in range(5):
        fd = os.open("file", os.O_WRONLY, dir_fd=below)
        os.pwrite(fd, b"AS IT %03d" % turn, 0)
        os.close(fd)
        until(lambda wanted=f"AS IT {turn:03}": text(source / "file") == wanted, "it shows")  # type: ignore[misc]
    os.close(below)
    until(lambda: "file" in out_of_band(world), "it is entered")


def test_an_ordinary_user_may_cover_a_source_with_user_namespaces(
    ordinary_user: OrdinaryUser,
) -> None:
    """Without them, the mount is refused in one line that says why, and nothing is left of it."""
    source = ordinary_user.directory / "source"
    ordinary_user.run("mkdir", source)
    may = ordinary_user.run("unshare", "-Urm", "true").returncode == 0
    made = ordinary_user.bonobofs("mount", source, source)
    if may:
        assert made.returncode == 0, made.stderr
        assert ordinary_user.bonobofs("umount", source).returncode == 0
    else:
        assert made.returncode == 1
        assert "needs a mount namespace" in made.stderr
    assert mounts.at(source) == []


@pytest.mark.root
def test_without_mount_namespaces_a_source_cannot_be_covered(source: Path) -> None:
    """The mount is refused in one line that says why and what to do, and nothing is left of it."""
    bounded = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    made = subprocess.run(
        [*bounded, sys.executable, "-m", "bonobofs", "mount", source, source],
        env=environment(),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 1
    assert "needs a mount namespace for the companion, and the kernel refuses one" in made.stderr
    assert made.stderr.count("\n") == 1
    assert mounts.at(source) == []
