"""The sandboxes and the network of these tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.state.home import session_directory
from tests.sandbox.boxes import Box
from tests.sandbox.network_world import POLICY, EgressProcess, Namespace, Network, internet_and_host
from tests.support.world import OrdinaryUser, World


@pytest.fixture(params=["as a user", "as root for a user"])
def any_box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """A sandbox of an ordinary user, then one that root starts for that user."""
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        yield Box(OrdinaryUser(Path(name)), as_root=request.param == "as root for a user")


@pytest.fixture
def user_box() -> Iterator[Box]:
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        yield Box(OrdinaryUser(Path(name)))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """A session with POLICY, its sandbox and its egress, for all tests of a module."""
    directory = tmp_path_factory.mktemp("network")
    with pytest.MonkeyPatch.context() as patch, internet_and_host(directory) as (internet, host):
        patch.setenv("BONOBOFS_HOME", str(directory / "home"))
        home = session.home()
        (directory / "policy.toml").write_text(POLICY)
        for name in ("source", "mount"):
            (directory / name).mkdir()
        order = session.MountRequest(
            directory / "source", directory / "mount", agent="alice", policy=directory / "policy.toml"
        )
        world = World(home, session.start(home, order).session)
        sandbox = Namespace(directory / "sandbox", "127.0.0.1", host, user=True)
        network = Network(directory, internet, host, sandbox, world)
        try:
            network.egress = EgressProcess(host, session_directory(home, world.session.session))
            answer = network.egress.start(sandbox.pid)
            assert answer == {"ready": True}, answer
            yield network
            network.egress.close()
            text = (session_directory(home, world.session.session) / "egress.log").read_text()
            assert "Traceback" not in text, text
        finally:
            sandbox.close()
            wrong = world.clear()
        assert not wrong, "; ".join(wrong)
