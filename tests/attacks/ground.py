"""A mount under the default policy for all attacks, and what must be the same after each."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from bonobofs import session
from bonobofs.audit.entry import AuditEntry
from tests.attacks.attack import CONTENT, Attack, Place
from tests.support.trees import Tree, snapshot
from tests.support.world import ROOT, World

PATIENCE: Final = 30.0
"""Seconds after which an attacker counts as hung."""

_DIRECTORIES: Final = (
    "aidlc-docs",
    "templates",
    "orchestrator",
    "tests",
    "src",
    ".git/hooks",
    ".git/info",
    ".git/objects/info",
    ".beads",
)
_FILES: Final = (
    "README.md",
    "AGENTS.md",
    "policy.toml",
    "src/main.py",
    ".git/config",
    ".git/HEAD",
    ".beads/issues.jsonl",
)


def build(source: Path) -> None:
    """A small repository: what the default policy admits, closes, protects and keeps."""
    for directory in _DIRECTORIES:
        (source / directory).mkdir(parents=True)
    for name in _FILES:
        (source / name).write_bytes(CONTENT)


class Answer(NamedTuple):
    """What an attacker got."""

    said: str
    pid: int


class Ground(World):
    """The mount that is attacked, and a directory outside its source."""

    def __init__(self, home: Path, made: session.Session, outside: Path) -> None:
        super().__init__(home, made)
        self.outside = outside
        self._read = 0
        self._attackers = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.attacks.attacker", self.path, self.source],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def close(self) -> list[str]:
        """End the attackers, hung ones too, and the mount; what should not have been left."""
        with self._attackers as process:
            os.killpg(process.pid, signal.SIGKILL)
        return self.clear()

    def prepare(self, attack: Attack) -> Place:
        """Make the attack's own files below."""
        place = Place.of(attack.name, str(self.source))
        for directory in (place.docs, place.code):
            (self.source / directory).mkdir()
        for name in (place.closed, place.hook):
            (self.source / name).write_bytes(CONTENT)
            os.setxattr(self.source / name, "user.good", b"1")
        if attack.below is not None:
            attack.below(self.source, place)
        return place

    def snapshot(self, place: Place) -> tuple[Tree, Tree]:
        """What must be the same after the attack: all of the source but the directories of others, and outside."""
        others = {
            f"{top}/{name}"
            for top, own in (("aidlc-docs", place.docs), ("tests", place.code))
            for name in os.listdir(self.source / top)
            if f"{top}/{name}" != own
        }
        return snapshot(self.source, without=others), snapshot(self.outside)

    def run(self, attack: Attack) -> Answer:
        """Let the attacker do its work in the mount."""
        stdin, stdout = self._attackers.stdin, self._attackers.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{attack.name}\n")
        stdin.flush()
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        assert poll.poll(PATIENCE * 1000), f"{attack.name} hangs"
        pid, said = stdout.readline().split()
        return Answer(said, int(pid))

    def news(self) -> list[AuditEntry]:
        """What was entered in the trail since the last look. A refusal is there at once; it needs no settling."""
        with self.trail.open("rb") as stream:
            stream.seek(self._read)
            whole, end, _ = stream.read().rpartition(b"\n")  # the server may be writing the line after it
        self._read += len(whole + end)
        lines = whole.splitlines()
        return [AuditEntry.from_line(line) for line in lines]


@pytest.fixture(scope="session", params=["kernel", "portable"])
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """One mount by each transport for all attacks: none of them may so much as shake it."""
    top = tmp_path_factory.mktemp("attacks")
    source, mountpoint, outside = top / "source", top / "mount", top / "outside"
    for path in (source, mountpoint, outside):
        path.mkdir()
    build(source)
    (outside / "secret.md").write_bytes(CONTENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BONOBOFS_HOME", str(top / "home"))
        home = session.home()
    order = session.MountRequest(source, mountpoint, agent="alice", transport=request.param)
    ground = Ground(home, session.start(home, order).session, outside)
    yield ground
    log = home / "sessions" / ground.session.session / "server.log"
    wrong = ground.close()
    assert log.read_text() == "", "the server had an unexpected error"
    assert wrong == []


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter, which tmp_path is not."""
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        directory = Path(name).resolve()
        directory.chmod(0o755)
        yield directory
