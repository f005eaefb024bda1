"""The tools of issues, git and worktrees."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from bonobofs.policy.decision import Code
from tests.beads.conftest import bd, beads_workspace  # noqa: F401 - fixtures
from tests.mcp.conftest import Serve, Served
from tests.support.beads_workspace import Workspace
from tests.support.repositories import Repo

POLICY: Final = """
default = "allow"
hidden = ["**"]
[[protect]]
paths = ["**/.beads/", "kept/"]
[git]
branch_prefix = ""
message_pattern = "."
[role.agent]
write = ["**"]
tools = ["read_file", "write_file", "list_files", "search_files"]
git = ["*"]
beads = ["create", "update", "close", "dep", "label", "comment", "reopen", "epic"]
[role.reader]
write = []
tools = ["read_file"]
git = ["add"]
"""


@pytest.fixture
def issues(
    served: Serve,
    beads_workspace: Workspace,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Serve:
    monkeypatch.setenv("BONOBOFS_BD", str(beads_workspace.bd))
    return lambda **order: served(**{"policy": POLICY, **order})


def test_an_issue_from_creation_to_its_end(issues: Serve) -> None:
    alice = issues()
    first = alice.result("task_create", title="Write the plan", priority=1, labels=["phase:plan"])["id"]
    second = alice.result("task_create", title="Build it", dependencies=[first])["id"]
    listed = alice.result("task_list")["issues"]
    assert [(each["id"], each["status"]) for each in listed] == [(first, "open"), (second, "open")]
    assert alice.result("task_assign", issue=first, assignee="alice")["assignee"] == "alice"
    assert alice.result("task_status", issue=first, status="in_progress")["status"] == "in_progress"
    alice.result("task_comment", issue=first, text="half done")
    assert [each["id"] for each in alice.result("task_list", status="in_progress")["issues"]] == [first]
    refused = alice.refusal("task_cancel", issue=second, reason="no need")
    assert refused["code"] == Code.BEADS
    assert alice.result("task_status", issue=first, status="done")["status"] == "closed"
    assert alice.result("task_cancel", issue=second, reason="no need")["close_reason"] == "no need"
    assert alice.result("task_status", issue=second, status="open")["status"] == "open"
    shown = alice.result("task_show", issue=first)
    assert [(each["author"], each["text"]) for each in shown["comments"]] == [("alice", "half done")]
    assert [each["id"] for each in alice.result("task_list", status="done", label="phase:plan")["issues"]] == [first]
    tools = {entry.tool for entry in alice.world.entries() if entry.guard == "beads"}
    assert {"beads.create", "beads.update", "beads.close", "beads.reopen", "beads.comment"} <= tools


def test_files_are_attached_by_path_and_hash(issues: Serve, beads_workspace: Workspace) -> None:  # noqa: F811
    alice = issues()
    issue = alice.result("task_create", title="Write the plan")["id"]
    alice.result("write_file", path="docs/plan.md", content="# Plan\n")
    digest = hashlib.sha256(b"# Plan\n").hexdigest()
    attached = alice.result("task_attach", issue=issue, path="docs/plan.md")
    assert attached == {"issue": issue, "attachments": {"docs/plan.md": digest}}
    assert alice.result("task_show", issue=issue)["attachments"] == {"docs/plan.md": digest}
    assert digest in str(beads_workspace.issue(issue)["metadata"])
    bob = issues(agent="bob")
    alice.result("task_assign", issue=issue, assignee="alice")
    assert bob.refusal("task_attach", issue=issue, path="docs/plan.md")["code"] == Code.BEADS
    assert bob.refusal("task_attach", issue=issue, path="no/such")["error"]["type"] == "FileNotFoundError"
    assert alice.result("task_detach", issue=issue, path="docs/plan.md")["attachments"] == {}
    assert (alice.world.source / "docs/plan.md").exists()


def test_an_open_issue_is_opened_in_any_role(issues: Serve) -> None:
    """A request that would change nothing succeeds, and reopening a closed issue needs `reopen`."""
    alice = issues(policy=POLICY.replace('"reopen", ', ""))
    issue = alice.result("task_create", title="Write the plan", assignee="alice")["id"]
    assert alice.result("task_status", issue=issue, status="open")["status"] == "open"
    alice.result("task_cancel", issue=issue, reason="no need")
    refused = alice.refusal("task_status", issue=issue, status="open")
    assert (refused["code"], refused["operation"]) == (Code.ROLE, "reopen_issue")


def test_a_role_without_operations_is_refused(issues: Serve) -> None:
    reader: Served = issues(role="reader")
    assert reader.refusal("task_create", title="x")["code"] == Code.ROLE
    assert reader.result("task_list") == {"issues": []}


def test_without_issues_the_tools_say_so(served: Serve) -> None:
    alice = served(policy=POLICY)
    assert f"{alice.world.source} has no .beads" in alice.refusal("task_list")["error"]["message"]


@pytest.fixture
def repository(source: Path) -> Repo:
    repo = Repo(source).init()
    repo.commit("Begin", {"docs/a.md": "one\n", "kept/x": "x\n"})
    repo.git("branch", "work")
    repo.git("checkout", "-q", "work")
    return repo


def test_changes_are_committed_branched_and_merged(served: Serve, repository: Repo) -> None:
    alice = served(policy=POLICY)
    alice.result("write_file", path="docs/a.md", content="two\n")
    alice.result("write_file", path="docs/new.md", content="new\n")
    state = alice.result("git_status")
    assert state == {
        "branch": "work", "clean": False, "staged": [], "modified": ["docs/a.md"], "untracked": ["docs/new.md"],
    }  # fmt: skip
    assert "+two" in alice.result("git_diff", path="docs/a.md")["patch"]
    done = alice.result("git_commit", message="Write two", files=["docs/a.md", "docs/new.md"])
    assert done["commit"] == repository.git("rev-parse", "work").strip()
    assert alice.result("git_status")["clean"]
    assert alice.result("git_branch", name="topic", checkout=True)["branch"] == "topic"
    alice.result("write_file", path="docs/topic.md", content="t\n")
    topic = alice.result("git_commit", message="Topic", files=["docs/topic.md"])["commit"]
    merged = alice.result("git_merge", source="topic", target="work")
    assert merged["branch"] == "topic"
    assert repository.git("rev-parse", "work").strip() == topic
    places = alice.result("repo_list")["repositories"]
    assert [(each["kind"], each["path"]) for each in places] == [("source", str(alice.world.source))]


def test_a_new_branch_takes_uncommitted_changes_along(served: Serve, repository: Repo) -> None:
    """As `git switch -c` does at HEAD. With another base, git_branch makes no branch that it cannot check out."""
    repository.git("switch", "-q", "main")
    repository.commit("Later", {"docs/b.md": "b\n"})
    alice = served(policy=POLICY)
    alice.result("write_file", path="docs/a.md", content="two\n")
    refused = alice.refusal("git_branch", name="topic", base="work", checkout=True)
    assert "uncommitted" in refused["reason"]
    assert alice.result("git_branch", name="topic", checkout=True)["branch"] == "topic"
    done = alice.result("git_commit", message="Write two", files=["docs/a.md"])
    assert done["commit"] == repository.git("rev-parse", "topic").strip()
    assert alice.result("git_branch", name="early", base="work", checkout=True)["branch"] == "early"
    assert "exists" in alice.refusal("git_branch", name="topic", checkout=True)["error"]["message"]


def test_refusals_of_git_are_decisions(served: Serve, repository: Repo) -> None:
    reader: Served = served(policy=POLICY, role="reader")
    refused = reader.refusal("git_branch", name="topic")
    assert (refused["code"], refused["allowed"]) == (Code.ROLE, False)
    assert refused["instead"]
    assert "topic" not in repository.git("branch")


def test_a_conflict_changes_nothing(served: Serve, repository: Repo) -> None:
    alice = served(policy=POLICY)
    for branch, text in (("one", "1\n"), ("two", "2\n")):
        alice.result("git_branch", name=branch, base="work", checkout=True)
        alice.result("write_file", path="docs/a.md", content=text)
        alice.result("git_commit", message=f"Text {text.strip()}", files=["docs/a.md"])
    error = alice.refusal("git_merge", source="one")["error"]
    assert "docs/a.md" in error["message"]
    assert alice.result("git_status")["clean"]
    alice.result("write_file", path="docs/a.md", content="dirty\n")
    assert "uncommitted" in alice.refusal("git_merge", source="one")["reason"]


def test_a_merge_that_cannot_begin_says_why(served: Serve, repository: Repo) -> None:
    alice = served(policy=POLICY)
    assert "nope" in alice.refusal("git_merge", source="nope")["error"]["message"]
    alice.result("write_file", path="docs/new.md", content="new\n")
    alice.result("git_commit", message="Write it", files=["docs/new.md"])
    assert alice.refusal("git_merge", source="work", target="main")["code"] == Code.PROTECTED


def test_calls_at_once_commit_to_their_branch(served: Serve, repository: Repo) -> None:
    """A merge into another branch checks it out meanwhile."""
    repository.git("branch", "release")
    alice = served(policy=POLICY)
    for number in range(4):
        alice.result("write_file", path=f"docs/{number}.md", content="new\n")
    calls = [("git_commit", {"message": f"Write {number}", "files": [f"docs/{number}.md"]}) for number in range(4)]
    calls.insert(1, ("git_merge", {"source": "work", "target": "release"}))
    with ThreadPoolExecutor(len(calls)) as pool:
        done = [pool.submit(alice.result, tool, **arguments) for tool, arguments in calls]
    assert {each.result()["branch"] for each in done} == {"work"}
    assert repository.git("rev-list", "--count", "main..work").strip() == "4"


def test_a_program_that_a_hook_leaves_does_not_hold_up_the_tools(served: Serve, repository: Repo) -> None:
    alice = served(policy=POLICY)
    hook = alice.world.path / ".git/hooks/pre-commit"
    hook.write_text("#!/bin/sh\nsleep 100 &\necho $! >left\n")
    hook.chmod(0o755)
    alice.result("write_file", path="docs/new.md", content="new\n")
    began = time.monotonic()
    alice.result("git_commit", message="Write it", files=["docs/new.md"])
    assert time.monotonic() - began < 60
    os.kill(int((alice.world.source / "left").read_text()), signal.SIGKILL)


def test_names_are_no_options(served: Serve, repository: Repo) -> None:
    alice = served(policy=POLICY)
    tries: list[tuple[str, dict[str, Any]]] = [
        ("git_branch", {"name": "-D"}),
        ("git_branch", {"name": "x", "base": "--force"}),
        ("git_merge", {"source": "--abort"}),
        ("git_commit", {"message": "m", "files": ["--all"]}),
        ("git_diff", {"path": "--output=stolen"}),
        ("git_branch", {"name": ""}),
    ]
    for tool, arguments in tries:
        error = alice.refusal(tool, **arguments)["error"]
        assert (error["type"], "must not be empty, begin with -" in error["message"]) == ("UsageError", True), tool
    magic = alice.refusal("git_commit", message="m", files=[":/"])["error"]["message"]
    assert "did not match" in magic
    assert "nothing to commit" in alice.refusal("git_commit", message="m")["error"]["message"]
    assert not (alice.world.source / "stolen").exists()
