"""Mounts for the tests of the transport: as root and as an ordinary user, with others let in, and with its traffic."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bonobofs import session
from bonobofs.ipc.session_config import SessionConfig
from bonobofs.session import Session, launcher, retention
from bonobofs.session.registration import SessionRequest, register_session
from bonobofs.system import mounts
from tests.support.users import IS_ROOT, NOBODY, User, run_in_child
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, ROOT, Mounted, World

# An interpreter in root's home cannot import anything more once a child has become an ordinary user.
codecs.lookup("ascii")
LOADED = (session.start, session.unmount_session, retention)


class Place(World):
    """A mount, and the user whose it is."""

    def __init__(self, home: Path, made: Session, user: User | None, python: str) -> None:
        super().__init__(home, made)
        self.user = user
        self._python = python

    def umount(self) -> session.Unmounted:
        def stop() -> session.Unmounted:
            sys.executable = self._python
            return session.unmount_session(self.home, self.path)

        return run_in_child(stop, user=self.user)

    def does(self, story: Callable[..., Any], *args: object) -> Any:
        """Let the mount's user tell a story."""
        return run_in_child(story, *args, user=self.user)


MakePlace = Callable[..., Place]
"""place(policy=TEXT, source=PATH, mountpoint=PATH, limit=N, transport=NAME) mounts, and the end of the test unmounts.

`limit` is how many descriptors the server may have open, as a hard limit.
"""


@pytest.fixture(scope="session")
def python_for_everyone() -> str:
    """An interpreter that an ordinary user may run; the one of the tests may lie where only root may look."""
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-I", "-S", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if run_in_child(subprocess.call, command, user=NOBODY if IS_ROOT else None) == 0:
                return python
        except PermissionError:
            continue
    raise AssertionError("no Python that an ordinary user could run; make the checkout readable to others")


def _places(directory: Path, user: User | None, python: str) -> Iterator[MakePlace]:
    """Make mounts for a user below a directory of its own, and take them off at the end."""
    made: list[Place] = []

    def start(source: Path, mountpoint: Path, policy: str, limit: int, transport: str) -> Session:
        os.umask(0o022)
        os.environ["BONOBOFS_HOME"] = str(directory / "home")
        sys.executable = python
        if limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        for path in (source, mountpoint):
            if not mounts.at(path):
                path.mkdir(exist_ok=True)
        file = directory / f"policy-{len(made)}.toml"
        file.write_text(policy, encoding="utf-8")
        order = session.MountRequest(source, mountpoint, agent="alice", policy=file, transport=transport)
        return session.start(session.home(), order).session

    def mount(
        *,
        policy: str = ALLOW_ALL,
        source: Path | None = None,
        mountpoint: Path | None = None,
        limit: int = 0,
        transport: str = "auto",
    ) -> Place:
        below, at = source or directory / "source", mountpoint or directory / f"mount-{len(made)}"
        place = Place(
            directory / "home", run_in_child(start, below, at, policy, limit, transport, user=user), user, python
        )
        made.append(place)
        return place

    yield mount
    wrong = [line for place in reversed(made) for line in place.clear()]
    assert not wrong, "; ".join(wrong)


@pytest.fixture
def own_place(tmp_path: Path, home: Path) -> Iterator[MakePlace]:
    """As `place`, for the user who runs the tests."""
    yield from _places(tmp_path, None, sys.executable)


@pytest.fixture
def ordinary_place(python_for_everyone: str) -> Iterator[MakePlace]:
    """As `place`, for an ordinary user, who mounts through fusermount3."""
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        directory = Path(name).resolve()
        if IS_ROOT:
            os.chown(directory, NOBODY.uid, NOBODY.gid)
        yield from _places(directory, NOBODY if IS_ROOT else None, python_for_everyone)


@pytest.fixture(params=["own_place", "ordinary_place"] if IS_ROOT else ["ordinary_place"])
def place(request: pytest.FixtureRequest) -> MakePlace:
    """What holds for root and for an ordinary user alike."""
    make: MakePlace = request.getfixturevalue(request.param)
    return make


class Sent(NamedTuple):
    """One request of the kernel."""

    opcode: str
    node: int
    size: int
    """Bytes after the header."""
    uid: int
    gid: int
    error: int
    """What it was answered, where that is an error."""


class Traffic:
    """A mount whose server writes down what the kernel asks it."""

    def __init__(self, source: Path, path: Path, notes: Path) -> None:
        self.source = source
        self.path = path
        self._notes = notes

    def settle(self) -> None:
        """Return when the server has notified the kernel of every external change until now."""
        last = self.source / ".last"
        for change in (last.touch, last.unlink):
            before = self._notices_about(last.name)
            change()
            until(lambda: self._notices_about(last.name) > before, "the kernel is notified")  # noqa: B023 - called at once

    def _notices_about(self, name: str) -> int:
        return sum(note.get("notice") == "entry" and note["name"] == name for note in self.notes())

    def notes(self) -> list[dict[str, Any]]:
        """What was written down so far, leaving out a line that is still in the making."""
        whole, _, _ = self._notes.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    @property
    def flags(self) -> int:
        """What was negotiated in INIT."""
        return next(int(note["flags"]) for note in self.notes() if "flags" in note)

    def during(self, call: Callable[..., object], *args: object) -> list[Sent]:
        """The requests that a call makes the kernel send; what it forgets meanwhile is left out."""
        before = len(self.notes())
        call(*args)
        notes = self.notes()[before:]
        errors = {note["refused"]: note["error"] for note in notes if "refused" in note}
        return [
            Sent(n["opcode"], n["node"], n["size"], n["uid"], n["gid"], errors.get(n["unique"], 0))
            for n in notes
            if "opcode" in n and "FORGET" not in n["opcode"]
        ]

    def notices(self) -> list[str]:
        """The notifications of the server to the kernel, so far."""
        return [note["notice"] for note in self.notes() if "notice" in note]

    def opcodes(self, call: Callable[..., object], *args: object) -> list[str]:
        return [sent.opcode for sent in self.during(call, *args)]


@contextlib.contextmanager
def served(module: str, *arguments: str | Path, source: Path, home: Path, place: Path) -> Iterator[Path]:
    """A mount of `source`, everything allowed, by a serving program of the tests; its complaints are in `stderr`."""
    mountpoint, policy = place / "mount", place / "policy.toml"
    mountpoint.mkdir()
    policy.write_text(ALLOW_ALL)
    chosen = session.choose_policy(home, policy)
    made = register_session(
        home, source=source, mountpoint=mountpoint, request=SessionRequest("alice"), policy=chosen, transport="kernel"
    ).session
    config = SessionConfig(
        source=made.source,
        mountpoint=str(mountpoint),
        home=str(home),
        session=made.session,
        session_dir=str(place),
        trail=str(place / "trail"),
        head=str(place / "head"),
        agent=made.agent,
        agent_id=made.agent_id,
        role=made.role,
        holder=f"agent:{made.agent_id}",
        policy=chosen.plain,
        policy_origin=str(policy),
        policy_file=str(policy),
        umask=0o022,
        companion=launcher.companion_program(str(source), str(mountpoint)),
    )
    (place / "inside").mkdir()
    ready, ready_end = os.pipe()
    with (
        (place / "stderr").open("wb") as complaints,
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stderr=complaints,
            pass_fds=[ready_end],
        ) as server,
    ):
        os.close(ready_end)
        assert server.stdin is not None
        server.stdin.write(config.start.to_line() + config._replace(ready_fd=ready_end).to_json().encode())
        server.stdin.close()
        with open(ready, "rb") as word:
            assert word.read() == b"ready\n"
        try:
            yield mountpoint
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    until(lambda: not mounts.at(mountpoint), "the mount is gone")


@pytest.fixture
def traffic(home: Path, source: Path, tmp_path: Path) -> Iterator[Traffic]:
    """A mount of `source`, everything allowed, with its traffic."""
    notes = tmp_path / "notes"
    with served("tests.mount.traffic_server", notes, source=source, home=home, place=tmp_path) as mountpoint:
        yield Traffic(source, mountpoint, notes)


class Commons(NamedTuple):
    """A directory and a mount of an equal one: both are open to every user."""

    bare: Path
    world: World

    @property
    def path(self) -> Path:
        return self.world.path

    def alike(self, story: Callable[[Path], object]) -> object:
        """What a story gives on the bare directory, which must be what it gives in the mount."""
        below, through = story(self.bare), story(self.path)
        assert through == below
        return through


@pytest.fixture
def commons(mounted: Mounted) -> Iterator[Callable[..., Commons]]:
    """A mount of root's that lets others in, under an allow-all policy unless another is given."""
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        directory = Path(name).resolve()
        directory.chmod(0o755)
        made: list[World] = []

        def make(policy: str = ALLOW_ALL) -> Commons:
            for below in ("bare", "source", "mount"):
                (directory / below).mkdir()
                (directory / below).chmod(0o777)
            world = mounted(
                policy=policy, source=directory / "source", mountpoint=directory / "mount", allow_other=True
            )
            made.append(world)
            return Commons(directory / "bare", world)

        yield make
        wrong = [line for world in made for line in world.clear()]
        assert not wrong, "; ".join(wrong)
