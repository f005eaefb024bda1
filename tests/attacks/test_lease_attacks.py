"""An agent tries to lease everything for a year, as itself or under another name."""

from __future__ import annotations

import json

import pytest

from bonobofs.errors import BonobofsError
from bonobofs.ipc.client import call
from bonobofs.policy.decision import Code, Refused
from bonobofs.session import lease_service
from bonobofs.state.home import inside_directory
from tests.support.world import ALLOW_ALL, Mounted, bonobofs

LIMITED = ALLOW_ALL + '[leases]\nmax = "2h"\n'
YEAR = 365 * 24 * 3600


@pytest.mark.parametrize("options", [(), ("--agent", "bob"), ("--chain", "C9"), ("--agent", "ann", "--chain", "C9")])
def test_no_command_in_a_mount_leases_beyond_the_limits(mounted: Mounted, options: tuple[str, ...]) -> None:
    """A holder that is named does not make the caller the operator; the record has the refusal, and an alert."""
    world = mounted(policy=LIMITED, agent="ann")
    for scope in ((), ("--all-workspaces",), ("--workspace", "/")):
        said = bonobofs("lease", "acquire", "**", "--for", "365d", *options, *scope, cwd=world.path)
        assert said.returncode == 77, said.stderr
    assert lease_service.list_leases(world.home) == []
    named = any(option in ("bob", "C9") for option in options)
    assert (Code.IDENTITY in {entry.code for entry in world.entries() if entry.kind == "alert"}) is named


@pytest.mark.parametrize("options", [("--agent", "ann"), ("--chain", "C1"), ("--agent", "ann", "--chain", "C1")])
def test_a_command_in_a_mount_may_name_the_session(mounted: Mounted, options: tuple[str, ...]) -> None:
    """The lease belongs to the session, within the limits and this workspace, with an entry in the record."""
    world = mounted(policy=LIMITED, agent="ann", chain="C1")
    made = bonobofs("lease", "acquire", "docs/**", "--for", "1h", *options, cwd=world.path)
    assert made.returncode == 0, made.stderr
    (lease,) = lease_service.list_leases(world.home)
    assert (lease.holder.key, lease.workspace) == ("chain:C1", str(world.source))
    assert "acquire_lease" in {entry.operation for entry in world.entries()}


def test_no_locks_are_imported_in_a_mount(mounted: Mounted) -> None:
    world = mounted(policy=LIMITED, agent="ann")
    locks = {"version": 1, "chains": {"C9": {"files": ["**"], "agent": "bob"}}}
    (world.path / "locks.json").write_text(json.dumps(locks))
    assert bonobofs("lease", "import", "locks.json", "--all-workspaces", cwd=world.path).returncode == 2
    assert lease_service.list_leases(world.home) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"seconds": YEAR},
        {"seconds": 3600, "workspace": "/"},
        {"seconds": 3600, "workspace": "every"},
        {"seconds": 3600, "agent": "bob"},
        {"seconds": 3600, "chain": "C9"},
    ],
)
def test_no_call_leases_beyond_the_limits(mounted: Mounted, arguments: dict[str, object]) -> None:
    """Through guard.sock: not longer, not elsewhere, not for another holder, not by an extension."""
    world, other = mounted(policy=LIMITED, agent="ann"), mounted(policy=ALLOW_ALL, agent="bob")
    directory = inside_directory(world.home, world.session.session)
    with pytest.raises((Refused, BonobofsError)):
        call(directory, "lease.acquire", patterns=["**"], **arguments)
    assert lease_service.list_leases(world.home) == []
    call(directory, "lease.acquire", patterns=["docs/**"])
    with pytest.raises(Refused):
        call(directory, "lease.extend", seconds=YEAR)
    (lease,) = lease_service.list_leases(world.home)
    assert (lease.workspace, (lease.until - lease.acquired).total_seconds() <= 7200) == (str(world.source), True)
    assert other.source == world.source
