"""The modules that the hot commands load: what a command does not load costs no time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.ipc.client import call
from bonobofs.state.home import inside_directory, session_directory
from tests.support.commands import environment
from tests.support.world import Mounted

PROGRAM = """
import json, sys
from bonobofs import cli
status = cli.main(sys.argv[1:])
sys.stdout.flush()
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
sys.exit(status)
"""
SLOW = {"asyncio", "http", "multiprocessing", "logging", "email", "ssl", "unittest"}
"""Modules of the standard library that take longer to load than the rest of a command."""


def _third_party(loaded: list[str]) -> set[str]:
    # The shared library of the compiled build is a module at the top.
    top = {name.partition(".")[0] for name in loaded if not name.endswith("__mypyc")}
    # A .pth file of setuptools loads _distutils_hack into every process.
    return (top - set(sys.stdlib_module_names) - {"bonobofs", "__main__", "_distutils_hack"}) | (top & SLOW)


def _run(*arguments: str | Path, home: Path | None = None) -> list[str]:
    more = {} if home is None else {"BONOBOFS_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment(**more),
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded: list[str] = json.loads(done.stderr.splitlines()[-1])
    return loaded


@pytest.mark.root
def test_mount_umount_and_why_load_no_library(home: Path, tmp_path: Path) -> None:
    """The second mount of a source finds the validated policy, so it needs no pydantic; SQLite needs no SQLAlchemy.

    git lists the tracked files of a repository, so libgit2 is not loaded.
    """
    source, mountpoint = tmp_path / "source", tmp_path / "mountpoint"
    mountpoint.mkdir()
    subprocess.run(["git", "init", "-q", source], check=True)
    for _ in range(2):
        mounted = _run("mount", source, mountpoint, "--agent", "ann", "--new", home=home)
        try:
            why = _run("why", mountpoint / "file", home=home)
            status = _run("status", home=home)
        finally:
            unmounted = _run("umount", mountpoint, home=home)
    for loaded in (mounted, why, status, unmounted):
        assert _third_party(loaded) == set()
    assert not {"bonobofs.session.registration", "bonobofs.state.sqlite_file", "sqlite3"} & set(why)


def test_the_companion_loads_the_calls_after_the_mount_is_served(mounted: Mounted) -> None:
    """A call right after the mount waits until they are loaded."""
    world = mounted(companion="tests.mount.listing_companion")
    inside = inside_directory(world.home, world.session.session)
    assert call(inside, "whoami")["agent"] == world.session.agent
    log = (session_directory(world.home, world.session.session) / "server.log").read_text()
    loaded: list[str] = json.loads(log.splitlines()[0])
    late = {"bonobofs.companion.calls", "bonobofs.files.file_guard", "bonobofs.beads.bd_runner", "bonobofs.agent_mail"}
    assert not late & set(loaded)
    assert _third_party(loaded) == {"watchdog", "logging", "tests"}


@pytest.mark.parametrize(
    "family",
    [
        *(
            "",
            "mount",
            "umount",
            "status",
            "why",
            "shell",
            "run",
            "init",
            "serve",
            "doctor",
            "policy",
            "audit",
            "agent",
        ),
        *("team", "lease", "git", "worktree", "beads", "network", "db", "audit query", "lease acquire", "policy check"),
    ],
)
def test_help_loads_no_library(family: str) -> None:
    assert _third_party(_run(*family.split(), "--help")) == set()
