"""For every failure of bd, the stored state decides, and the report agrees with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from bonobofs.beads import BdClient, Edge, Issues, IssueStore, NewIssue, Stored, find_beads
from bonobofs.beads.bd_runner import hold_lock, lock_path
from bonobofs.errors import BeadsError
from bonobofs.policy.decision import Permit
from tests.beads.conftest import ALICE
from tests.fakes.faulty_bd import Faulty
from tests.support import proc
from tests.support.beads_workspace import Workspace
from tests.support.wait import until
from tests.support.world import ROOT, environment


@pytest.fixture
def astray(faulty: Faulty, beads_workspace: Workspace, home: Path) -> IssueStore:
    """The client on a bd that goes wrong."""
    return IssueStore(find_beads(beads_workspace.directory), home, ALICE, program=faulty.path)


class Story(NamedTuple):
    """A change, the command of bd that makes it, and how it is known to be there."""

    command: str
    change: Callable[[BdClient, Permit], Stored]
    is_there: Callable[[Issues], bool]


CREATE = Story(
    "create",
    lambda client, permit: client.create_issue(NewIssue("new", labels=("a:b",), description="text"), permit),
    lambda issues: any((i.title, i.labels, i.description) == ("new", ("a:b",), "text") for i in issues.values()),
)
UPDATE = Story(
    "update",
    lambda client, permit: client.update_issue("gt-one", permit, title="other", add_labels=["a:b"]),
    lambda issues: (issues["gt-one"].title, issues["gt-one"].labels) == ("other", ("a:b",)),
)
CLOSE = Story(
    "close",
    lambda client, permit: client.close_issue("gt-one", permit, reason="why"),
    lambda issues: (issues["gt-one"].status, issues["gt-one"].close_reason) == ("closed", "why"),
)
COMMENT = Story(
    "comments add",
    lambda client, permit: client.add_comment("gt-one", "hello", permit),
    lambda issues: issues["gt-one"].comment_count == 1,
)
STORIES = (
    CREATE,
    UPDATE,
    CLOSE,
    COMMENT,
    Story(
        "reopen",
        lambda client, permit: client.reopen_issue("gt-shut", permit),
        lambda issues: issues["gt-shut"].status == "open",
    ),
    Story(
        "dep add",
        lambda client, permit: client.add_dependency("gt-one", "gt-two", "blocks", permit),
        lambda issues: Edge("gt-one", "gt-two", "blocks") in issues.edges,
    ),
    Story(
        "dep remove",
        lambda client, permit: client.remove_dependency("gt-two", "gt-shut", permit),
        lambda issues: Edge("gt-two", "gt-shut", "related") not in issues.edges,
    ),
)


@pytest.fixture(autouse=True)
def _issues(beads_workspace: Workspace) -> None:
    for id_ in ("gt-one", "gt-two", "gt-shut"):
        beads_workspace.json("create", id_, "--id", id_)
    beads_workspace.json("dep", "add", "gt-two", "gt-shut", "-t", "related")
    beads_workspace.json("close", "gt-shut")


@pytest.mark.parametrize("how", ["killed before", "fails before", "lies", "mumbles"])
def test_a_change_that_is_not_stored_is_an_error(astray: IssueStore, faulty: Faulty, permit: Permit, how: str) -> None:
    """For every exit status of bd, and the issues are unchanged."""
    with astray.locked_client() as client:
        before = dict(client.all_issues())
        for story in STORIES:
            faulty.will(how, story.command)
            with pytest.raises(BeadsError) as raised:
                story.change(client, permit)
            assert raised.value.carried_out is False
            assert dict(client.all_issues(fresh=True)) == before


@pytest.mark.parametrize("how", ["killed after", "fails after", "notices", "bare"])
def test_a_stored_change_is_a_success(astray: IssueStore, faulty: Faulty, permit: Permit, how: str) -> None:
    """For every exit status and output of bd, and it is made once."""
    with astray.locked_client() as client:
        before = len(client.all_issues())
        for story in STORIES:
            faulty.will(how, story.command)
            story.change(client, permit)
            assert story.is_there(client.all_issues(fresh=True))
        assert len(client.all_issues()) == before + 1


@pytest.mark.parametrize(("story", "how", "is_done"), [(CLOSE, "hangs before", False), (CREATE, "hangs after", True)])
def test_a_hanging_bd_is_killed_and_the_stored_state_decides(
    beads_workspace: Workspace, home: Path, faulty: Faulty, permit: Permit, story: Story, how: str, is_done: bool
) -> None:
    """Soon after the timeout, also if it ignores SIGTERM. No process of it is left."""
    faulty.will(how, story.command)
    hasty = IssueStore(find_beads(beads_workspace.directory), home, ALICE, program=faulty.path, limit=7)
    with hasty.locked_client() as client:
        if is_done:
            story.change(client, permit)
        else:
            with pytest.raises(BeadsError, match="time limit") as raised:
                story.change(client, permit)
            assert raised.value.carried_out is False
        assert story.is_there(client.all_issues(fresh=True)) is is_done
    until(lambda: not proc.processes_with(faulty.path), "no process of it is left")


@pytest.mark.parametrize("part", range(8))
def test_the_report_of_a_killed_bd_agrees_with_the_stored_state(
    astray: IssueStore, faulty: Faulty, permit: Permit, part: int
) -> None:
    """A creation is stored completely and reported, or not stored and not reported."""
    with astray.locked_client() as client:
        started = time.monotonic()
        client.create_issue(NewIssue("how long it takes"), permit)
        takes = (time.monotonic() - started) / 2
        faulty.will("killed midway", "create", seconds=takes * part / 7)
        is_done: bool | None = True
        try:
            CREATE.change(client, permit)
        except BeadsError as error:
            is_done = error.carried_out
        found = client.all_issues(fresh=True)
    assert is_done is CREATE.is_there(found)
    assert is_done is ("new" in [issue.title for issue in found.values()])


@pytest.mark.parametrize("story", [CREATE, UPDATE])
def test_a_remaining_process_of_bd_changes_no_issue_later(
    astray: IssueStore, faulty: Faulty, permit: Permit, story: Story
) -> None:
    """All processes of a call have ended before the issues are read back."""
    faulty.will("stores later", story.command)
    with astray.locked_client() as client:
        with pytest.raises(BeadsError, match="somebody else's"):
            story.change(client, permit)
        until(lambda: not proc.processes_with(faulty.path), "no process of it is left")
        faulty.let_go.touch()
        assert not story.is_there(client.all_issues(fresh=True))


def test_a_partly_stored_change_is_reported_in_parts(astray: IssueStore, faulty: Faulty, permit: Permit) -> None:
    """Also if bd exits with success."""
    faulty.will("partly", "update", without=("add-label",))
    with astray.locked_client() as client, pytest.raises(BeadsError, match="in part: label a:b not stored") as raised:
        UPDATE.change(client, permit)
    assert raised.value.carried_out is None
    assert (raised.value.stored, raised.value.missing) == (("title",), ("label a:b",))


@pytest.mark.parametrize("flag", ["labels", "description", "type"])
def test_a_partly_created_issue_is_deleted(astray: IssueStore, faulty: Faulty, permit: Permit, flag: str) -> None:
    """It does not appear later."""
    faulty.will("partly", "create", without=(flag,))
    new = NewIssue("new", "bug", labels=("a:b",), description="text")
    with astray.locked_client() as client:
        before = dict(client.all_issues())
        with pytest.raises(BeadsError, match="nothing is created") as raised:
            client.create_issue(new, permit)
        assert raised.value.carried_out is False
        assert dict(client.all_issues(fresh=True)) == before


def test_a_partly_created_issue_that_cannot_be_deleted_is_named(
    astray: IssueStore, faulty: Faulty, permit: Permit
) -> None:
    """So a person can delete it."""
    faulty.will("partly", "create", without=("labels",))
    faulty.will("fails before", "delete")
    with astray.locked_client() as client:
        with pytest.raises(BeadsError, match="created in part") as raised:
            CREATE.change(client, permit)
        assert raised.value.carried_out is None
        (left,) = (issue.id for issue in client.all_issues().values() if issue.title == "new")
        assert left in str(raised.value)


@pytest.mark.parametrize("fault", ["create killed after", "update fails before", "update lies"])
def test_a_message_is_created_completely_or_not_at_all(
    astray: IssueStore, faulty: Faulty, permit: Permit, fault: str
) -> None:
    """It takes two calls of bd, and either may fail."""
    command, _, how = fault.partition(" ")
    faulty.will(how, command)
    with astray.locked_client() as client:
        before = dict(client.all_issues())
        if command == "create":
            made = client.create_issue(NewIssue("hello", "message"), permit).issue
            assert (made.issue_type, made.ephemeral) == ("message", False)
        else:
            with pytest.raises(BeadsError, match="nothing is created"):
                client.create_issue(NewIssue("hello", "message"), permit)
            assert dict(client.all_issues()) == before


@pytest.mark.parametrize("story", [UPDATE, COMMENT, CREATE])
def test_a_change_that_cannot_be_read_back_is_unknown(
    astray: IssueStore, faulty: Faulty, permit: Permit, story: Story
) -> None:
    """The report says neither that it was made nor that it was not."""
    with astray.locked_client() as client:
        client.all_issues()
        faulty.will("killed after", story.command)
        faulty.will("fails before", "comments" if story.command == "comments add" else "list")
        with pytest.raises(BeadsError, match="it is unknown") as raised:
            story.change(client, permit)
    assert raised.value.carried_out is None


def test_a_bd_that_waits_for_a_lock_is_killed(beads_workspace: Workspace, home: Path, permit: Permit) -> None:
    """bd itself would wait without limit. After the release of the lock, calls work."""
    hasty = IssueStore(find_beads(beads_workspace.directory), home, ALICE, program=beads_workspace.bd, limit=7)
    with hasty.locked_client() as client:
        client.all_issues()
        holder = hold(beads_workspace.lock)
        with pytest.raises(BeadsError) as raised:
            client.close_issue("gt-one", permit)
        assert raised.value.carried_out is None
        end(holder)
        assert not client.all_issues(fresh=True)["gt-one"].is_closed


def test_concurrent_callers_wait_for_the_lock_and_time_out(
    beads: IssueStore, beads_workspace: Workspace, home: Path
) -> None:
    """They do not call bd meanwhile."""
    impatient = IssueStore(find_beads(beads_workspace.directory), home, ALICE, program=beads_workspace.bd, wait=0.1)
    with beads.locked_client(), pytest.raises(BeadsError, match="in use") as raised, impatient.locked_client():
        raise AssertionError("both callers hold the lock")
    assert raised.value.carried_out is False
    with impatient.locked_client() as client:
        client.all_issues()


CALLER = """
import sys
from pathlib import Path
from bonobofs.policy.decision import Permit
from bonobofs.beads import IssueStore, NewIssue
from tests.beads.conftest import ALICE
beads = IssueStore(Path(sys.argv[1]), Path(sys.argv[2]), ALICE, program=Path(sys.argv[3]), limit=float(sys.argv[4]))
with beads.locked_client() as client:
    client.create_issue(NewIssue("new"), Permit("test"))
"""


@pytest.fixture
def kill_a_caller(faulty: Faulty, beads_workspace: Workspace, home: Path) -> Callable[[str, float], None]:
    """Start a caller that creates an issue with a faulty bd, and kill the caller, not its bd, while bd runs."""

    def kill(how: str, limit: float) -> None:
        faulty.will(how, "create")
        words = [str(find_beads(beads_workspace.directory)), str(home), str(faulty.path), str(limit)]
        caller = subprocess.Popen([sys.executable, "-c", CALLER, *words], cwd=ROOT, env=environment())
        until(lambda: "create" in faulty.called(), "bd is asked to create", seconds=60)
        path = lock_path(home, find_beads(beads_workspace.directory))
        (called,) = set(proc.processes_with(faulty.path)) - {caller.pid}
        until(lambda: f" {called} " in path.read_text(), "the call is noted")
        caller.send_signal(signal.SIGKILL)
        caller.wait()

    return kill


def test_a_bd_whose_caller_was_killed_keeps_the_lock_until_it_ends(
    faulty: Faulty,
    astray: IssueStore,
    beads_workspace: Workspace,
    home: Path,
    kill_a_caller: Callable[[str, float], None],
) -> None:
    """The next caller sees what it stored."""
    kill_a_caller("waits", 600)
    with pytest.raises(BeadsError, match="in use"), hold_lock(home, find_beads(beads_workspace.directory), 0.2):
        pass
    faulty.let_go.touch()
    with astray.locked_client() as client:
        assert "new" in [issue.title for issue in client.all_issues().values()]


def test_the_next_caller_kills_a_hanging_bd_of_a_killed_caller(
    faulty: Faulty, astray: IssueStore, kill_a_caller: Callable[[str, float], None]
) -> None:
    """After its timeout, and not before."""
    kill_a_caller("hangs before", 2)
    with astray.locked_client() as client:
        assert "new" not in [issue.title for issue in client.all_issues().values()]
    until(lambda: not proc.processes_with(faulty.path), "no process of it is left")


def hold(lock: Path) -> subprocess.Popen[str]:
    """A process that holds the lock of bd's database until it is ended."""
    program = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True);"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program + "sys.stdin.read()", lock],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def end(holder: subprocess.Popen[str]) -> None:
    holder.communicate("")
    assert holder.returncode == 0
