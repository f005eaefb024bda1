"""Shared fixtures. A mount is real, is always taken off, and a test that leaves a mount or a server behind fails."""

from __future__ import annotations

import compileall
import itertools
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from bonobofs import session
from bonobofs.session import launcher
from bonobofs.state.database import Database
from bonobofs.state.project_policies import store_preset
from bonobofs.system import mounts
from tests.support import commands
from tests.support.beads_workspace import find_bd
from tests.support.postgres import Postgres
from tests.support.world import Mounted, OrdinaryUser, World

# The checkout may not be the tester's to write in, and a database of examples would be looked for there.
# A deadline would measure the machine and the tests that run beside, not the code.
hypothesis.settings.register_profile("nothing is left behind", database=None, deadline=None)
hypothesis.settings.load_profile("nothing is left behind")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "root: needs root, and is not collected for others; CI is root")
    config.addinivalue_line("markers", "alone: measures time or changes the machine; scripts/test runs it by itself")
    # A shell that starts the tests in the background ignores SIGINT, and so would every program that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The tests start thousands of interpreters, also those of a user who cannot write here.
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        for directory in (commands.ROOT / "bonobofs", sysconfig.get_path("purelib")):
            compileall.compile_dir(directory, quiet=2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """To load all modules takes longer than most of the tests that are marked `alone`."""
    if config.getoption("markexpr") != "alone" or not collection_path.name.startswith("test_"):
        return None
    return "mark.alone" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.geteuid() != 0:
        layer = [item for item in items if item.get_closest_marker("root")]
        config.hook.pytest_deselected(items=layer)
        items[:] = [item for item in items if item not in layer]
    # A long test that begins last would keep one worker busy while the others have ended.
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def pytest_report_header() -> str:
    """Name the bd that the tests of the gate use: the real one if it is installed."""
    return f"bd: {find_bd()}"


def _as_utf8(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """On CI a skip is a failure: a suite that passes by skipping hides what it should show."""
    report: pytest.TestReport = yield  # type: ignore[assignment] # the wrapper protocol of pluggy
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and on CI nothing may be: {call.excinfo}"
    # A worker sends its reports as UTF-8, and would end with one that names a file in other bytes.
    if report.failed and _as_utf8(report.longreprtext) != report.longreprtext:
        report.longrepr = _as_utf8(report.longreprtext)
    report.sections = [(title, _as_utf8(text)) for title, text in report.sections]
    return report  # type: ignore[return-value] # as above


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    base = tmp_path_factory.getbasetemp().resolve()
    commands.close()
    left = [str(mount.mountpoint) for mount in mounts.bonobofs_mounts() if base in mount.mountpoint.parents]
    assert not left, f"mounts were left: {left}"


@pytest.fixture(autouse=True, scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a database with nothing in it.

    It is made before all tests: who becomes another user in one may not read where Python's own library lies.
    """
    first = tmp_path_factory.mktemp("first")
    with Database.open(first):
        pass
    return first / "bonobofs.db"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own, also for the programs that it starts."""
    monkeypatch.setenv("BONOBOFS_HOME", str(tmp_path / "home"))
    return session.home()


@pytest.fixture
def kept_database(home: Path, new_database: Path) -> None:
    """The state directory has its database already: making one for each test shows no more than the first did."""
    shutil.copy(new_database, home)


@pytest.fixture
def source(home: Path, tmp_path: Path) -> Path:
    """An empty directory to be guarded. An earlier session of it took the preset `aidlc`."""
    path = tmp_path / "source"
    path.mkdir()
    store_preset(home, path.resolve(), "aidlc")
    return path


@pytest.fixture
def ordinary_user() -> Iterator[OrdinaryUser]:
    """A user without rights. Its directory is not in tmp_path, which none but the user of the tests may enter."""
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        directory = Path(name)
        yield OrdinaryUser(directory)
        left = [mount.mountpoint for mount in mounts.bonobofs_mounts() if directory in mount.mountpoint.parents]
        for mountpoint in left:
            mounts.detach(mountpoint, lazy=True)
        assert not left, f"mounts were left: {left}"


@pytest.fixture
def mounted(home: Path, kept_database: None, source: Path, tmp_path: Path) -> Iterator[Mounted]:
    """Mount `source`, or another directory, as `mount` does; everything is unmounted after the test.

    If there is no policy, an earlier session of the source took the preset `aidlc`.
    """
    worlds: list[World] = []
    numbers = itertools.count()

    def mount(
        *,
        policy: Path | str | None = None,
        agent: str | None = "alice",
        role: str | None = None,
        chain: str | None = None,
        source: Path = source,
        mountpoint: Path | None = None,
        transport: str = "auto",
        allow_other: bool = False,
        companion: str = launcher.COMPANION,
        observe: bool = False,
    ) -> World:
        number = next(numbers)
        store_preset(home, source.resolve(), "aidlc")
        if isinstance(policy, str):
            file = tmp_path / f"policy-{number}.toml"
            file.write_text(policy, encoding="utf-8")
            policy = file
        if mountpoint is None:
            mountpoint = tmp_path / f"mount-{number}"
            mountpoint.mkdir()
        order = session.MountRequest(
            source,
            mountpoint,
            agent=agent,
            role=role,
            chain=chain,
            policy=policy,
            transport=transport,
            allow_other=allow_other,
            companion=companion,
            observe=observe,
        )
        world = World(home, session.start(home, order).session)
        worlds.append(world)
        return world

    yield mount
    wrong = [line for world in reversed(worlds) for line in world.clear()]
    assert not wrong, "; ".join(wrong)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server of the tests' own, started for the first that asks for it."""
    # Not in tmp_path: the path of a socket is short, and its user may not enter there.
    with tempfile.TemporaryDirectory(prefix="bonobofs-pg-") as name:
        server = Postgres(Path(name))
        yield server
        server.stop()
