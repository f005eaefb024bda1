"""Small worlds for tests: a source, a real mount of it, and its record."""

from __future__ import annotations

import gzip
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pydantic

from bonobofs import session
from bonobofs.audit.entry import PROCESS, AuditEntry
from bonobofs.audit.reader import read
from bonobofs.audit.trail_storage import compressed
from bonobofs.session import Session
from bonobofs.state import agent_registry
from bonobofs.state.database import Database
from bonobofs.system import mounts, processes, syscalls
from tests.support import proc
from tests.support.commands import ROOT, bonobofs, environment

__all__ = [
    "ALLOW_ALL",
    "NOBODY",
    "ROOT",
    "Mounted",
    "OrdinaryUser",
    "World",
    "bonobofs",
    "environment",
    "plain",
    "register",
    "wait_for_mount",
]

NOBODY = 65534
_MS_REMOUNT: Final = 32
_MOUNT_FLAGS: Final = os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC
"""Flags that have the same value for statvfs(3) and mount(2)."""

ALLOW_ALL = 'default = "allow"\nhidden = ["**"]\ndevices = true\n'
"""A policy that admits every change but those that leave the workspace."""


def register(*agents: str) -> None:
    """Register agents in the state directory of the test."""
    with Database.open(session.home()) as database:
        for label in agents:
            agent_registry.add(database, label)


def wait_for_mount(mountpoint: Path) -> None:
    """Wait until the kernel's table of mounts has it; the table says when it changes."""
    poll = select.poll()
    with Path("/proc/self/mountinfo").open("rb") as table:
        poll.register(table, select.POLLERR | select.POLLPRI)
        while not mounts.at(mountpoint):
            assert poll.poll(30_000), f"{mountpoint} was not mounted in time"


class OrdinaryUser:
    """A user without rights, with a directory of its own: another one where the tests run as root, else this one."""

    _python = ""
    """Found once, because the search starts interpreters."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ids: dict[str, Any] = {}
        if os.geteuid() == 0:
            self._ids = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            os.chown(directory, NOBODY, NOBODY)
        self.packages = f"{ROOT}:{Path(pydantic.__file__).parent.parent}"
        self._env = {
            "BONOBOFS_HOME": str(directory / "home"),
            "HOME": str(directory),
            "LC_ALL": "C.UTF-8",
            "PATH": os.environ["PATH"],
            "PYTHONPATH": self.packages,
        }
        if not OrdinaryUser._python:
            OrdinaryUser._python = self._find_python()
        self.python = OrdinaryUser._python

    def run(self, *command: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program as this user, in its directory."""
        return subprocess.run(
            command,
            cwd=self.directory,
            env={**self._env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            **self._ids,
        )

    def bonobofs(self, *arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return self.run(self.python, "-m", "bonobofs", *arguments, env=env)

    def _find_python(self) -> str:
        """The interpreter of the tests may lie where only root may look."""
        for python in (sys.executable, "/usr/bin/python3"):
            try:
                if self.run(python, "-c", "import pydantic").returncode == 0:
                    return python
            except PermissionError:
                continue
        raise AssertionError("no Python that an ordinary user could run; make the checkout readable to others")


def plain(trail: Path) -> Path:
    """Give the path of a trail, which is decompressed first if it is compressed: a test reads or spoils its lines."""
    packed = compressed(trail)
    if packed.exists() and not trail.exists():
        found = packed.stat()
        trail.write_bytes(gzip.decompress(packed.read_bytes()))
        trail.chmod(0o600)
        os.chown(trail, found.st_uid, found.st_gid)
        packed.unlink()
    return trail


class World:
    """A mount that really is there. `path` is the mountpoint, `source` what is below it."""

    def __init__(self, home: Path, made: Session) -> None:
        self.home = home
        self.session = made
        self.source = Path(made.source)
        self.path = Path(made.mountpoint or "")

    @property
    def trail(self) -> Path:
        return plain(self.home / "trails" / f"{self.session.session}.jsonl")

    @property
    def head(self) -> Path:
        return self.trail.with_suffix(".head")

    @property
    def pid(self) -> int:
        """The process that serves the mount."""
        assert self.session.pid is not None
        return self.session.pid

    @property
    def is_alive(self) -> bool:
        return processes.is_alive(self.session.pid, self.session.starttime)

    def entries(self) -> list[AuditEntry]:
        """All that the record holds but the descriptions of processes, once the server has settled it."""
        return [entry for entry in self.all_entries() if entry.operation != PROCESS]

    def all_entries(self) -> list[AuditEntry]:
        session.flush_servers(self.home)
        return list(read(self.trail))

    def umount(self) -> session.Unmounted:
        return session.unmount_session(self.home, self.path)

    def forget(self) -> None:
        """Make the kernel forget each name and inode of the mount that no process has open. It needs root.

        The kernel drops them when a file system is mounted again, and FUSE then sends FORGET for each inode.
        """
        flags = os.statvfs(self.path).f_flag & _MOUNT_FLAGS
        syscalls.mount(b"none", os.fsencode(self.path), b"", _MS_REMOUNT | flags, b"")

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the server by a signal and wait until it is gone."""
        assert self.session.pid is not None
        assert self.session.starttime is not None
        processes.send(self.session.pid, self.session.starttime, number)
        if not processes.wait_for_end(self.session.pid, self.session.starttime, 30):
            stacks = proc.threads(self.session.pid, "stack")
            raise AssertionError(f"the server does not end; the kernel's stacks of its threads are {stacks}")

    def clear(self) -> list[str]:
        """End every process and mount that is left, by force if necessary, and return what should not
        have been left.
        """
        wrong = []
        if mounts.at(self.path):
            try:
                self.umount()
            except Exception as error:  # noqa: BLE001 - any error is reported, and the mount cleared away
                wrong.append(f"{self.path} could not be unmounted: {error}")
        while mounts.at(self.path):
            mounts.detach(self.path, lazy=True)
        if self.is_alive:
            wrong.append(f"the server of {self.path} (pid {self.pid}) outlived its mount")
            self.kill()
        return wrong


Mounted = Callable[..., World]
"""mounted(policy=…, agent=…, role=…, source=…, mountpoint=…, transport=…, allow_other=…, companion=…) mounts.

The end of the test unmounts.
`policy` is a path, or the text of a policy; None is the packaged default.
"""
