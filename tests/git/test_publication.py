"""Publication through a real mount: what reaches the source, what is refused, and what the record says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from bonobofs.ipc.client import call
from tests.git.conftest import FREE, Publishing, PublishingMaker
from tests.git.desks import Desk
from tests.support.commands import bonobofs
from tests.support.observe import out_of_band
from tests.support.repositories import Repo
from tests.support.wait import until

SEVERAL = (
    "rebase -q main",
    "-c sequence.editor=true rebase -q -i --autosquash HEAD~2",
    "cherry-pick aidlc/picks~1 aidlc/picks",
    "cherry-pick aidlc/picks",
    "revert --no-edit HEAD~2..HEAD",
    "am -q 0001-one.patch 0002-two.patch",
)
"""Commands after whose last commit a hook publishes."""
ALONE = ("reset -q --hard HEAD~1", "rebase -q --apply main", "rebase -q --onto main HEAD", "commit -qm x --allow-empty")
"""Commands of the session's git."""


def _commit(one: Publishing, message: str, path: str) -> str:
    """Commit a new file in the mount; return what git says on standard error."""
    one.repo.write(path, message)
    one.repo.git("add", path)
    return one.repo.run("commit", "-q", "-m", message).stderr.decode()


def test_a_commit_is_published_by_its_hook_and_recorded(publishing: PublishingMaker) -> None:
    one = publishing()
    assert "published aidlc/gt-1 (0 commits)" in one.repo.run("switch", "-qc", "aidlc/gt-1").stderr.decode()
    made = one.repo.commit("[gt-1] Add a page", {"docs/c.md": "c\n"})
    assert one.source.id("aidlc/gt-1") == made
    intent, outcome = [entry for entry in one.entries() if entry.operation == "publish"][-2:]
    assert (intent.kind, outcome.kind, outcome.result) == ("intent", "outcome", "allowed")
    update = {"ref": "refs/heads/aidlc/gt-1", "new": made, "kind": "fast-forward", "commits": [made], "count": 1}
    assert intent.details["updates"] == [{**update, "old": one.source.id("main")}]
    assert intent.details["paths"] == ["docs/c.md"]
    # The checkout of the operator follows.
    assert (one.git_dir / "HEAD").read_text() == "ref: refs/heads/aidlc/gt-1\n"
    assert one.source.git("status", "--porcelain") == ""
    # What is refused stays in the session, is explained, and can be amended.
    refused = one.repo.run("commit", "-q", "--amend", "-m", "No issue").stderr.decode()
    assert refused.count("not published: git.message. ") == 1
    assert "git commit --amend" in refused
    assert one.source.id("aidlc/gt-1") == made
    assert one.denials()[-1]["rule"] == "git.message"
    assert one.entries()[-1].result == "denied"
    assert "published aidlc/gt-1" in one.repo.run("commit", "--amend", "-m", "[gt-1] Good").stderr.decode()
    assert one.source.id("aidlc/gt-1") == one.repo.id()


def test_a_path_that_the_operator_allows_can_be_published(publishing: PublishingMaker) -> None:
    """A refused publication asks too. The record of the publication names the answer."""
    one = publishing(policy=FREE + '[[ask]]\npaths = ["docs/"]\n')
    one.repo.git("switch", "-qc", "aidlc/x")
    one.repo.git("update-index", "--add", "--cacheinfo", f"100644,{one.repo.id('main:a.md')},docs/a.yml")
    refused = one.repo.run("commit", "-qm", "[gt-1] Add a workflow").stderr.decode()
    (question,) = re.findall(r"The question is (q-\w+)\.", refused)
    until(lambda: bonobofs("ask", "show", question).returncode == 0, "the question is stored")
    assert bonobofs("ask", "allow", question).returncode == 0
    until(lambda: one.repo.run("push", "source", "aidlc/x").returncode == 0, "the answer permits the publication")
    assert one.source.id("aidlc/x") == one.repo.id()
    intent = [entry for entry in one.entries() if entry.operation == "publish" and entry.kind == "intent"][-1]
    assert intent.details["answers"] == [1]


def test_a_refused_path_adds_no_line_to_the_output_of_git(publishing: PublishingMaker) -> None:
    one = publishing(policy=FREE + '[[protect]]\npaths = ["kept/"]\n')
    one.repo.git("switch", "-qc", "aidlc/x")
    path = "kept/a\nbonobofs: \x1b[31mb"
    one.repo.git("update-index", "--add", "--cacheinfo", f"100644,{one.repo.id('main:a.md')},{path}")
    refused = one.repo.run("commit", "-qm", "[gt-1] Add a file").stderr.decode()
    assert "kept/a\ufffdbonobofs: \ufffd[31mb:" in refused
    pushed = one.push("aidlc/x", code=1)
    assert "kept/a\ufffdbonobofs: \ufffd[31mb:" in pushed


def _work(publishing: PublishingMaker) -> Publishing:
    """Commits of the agent on aidlc/x and aidlc/picks, patches, and a main that has moved."""
    one = publishing(policy=FREE + '[git]\nmessage_pattern = "."\n')
    (one.git_dir / "info/exclude").write_text("*.patch\n")
    one.repo.git("switch", "-qc", "aidlc/picks")
    for name in ("one", "two"):
        one.repo.commit(name, {f"{name}.md": f"{name}\n"})
    one.repo.git("format-patch", "-q", "main")
    one.repo.git("switch", "-qc", "aidlc/x", "main")
    for message in ("first", "fixup! first"):
        one.repo.commit(message, {"first.md": f"{message}\n"})
    one.source.git("branch", "elsewhere", "main")
    blob = one.source.git("hash-object", "-w", "--stdin", given="moved\n").strip()
    tree = one.source.git("mktree", given=one.source.git("ls-tree", "main") + f"100644 blob {blob}\tmoved.md\n").strip()
    made = one.source.git("commit-tree", "-p", "main", "-m", "moved", tree).strip()
    one.source.git("update-ref", "refs/heads/main", made)
    return one


@pytest.mark.parametrize("shim", [False, True])
def test_git_publishes_once_after_each_command(publishing: PublishingMaker, *, shim: bool) -> None:
    """The session's git does so after every command, also with -C from outside of the mount, and without a denial."""
    one = _work(publishing)
    desk, start = Desk(one.world), one.repo.id()
    for number, command in enumerate((*SEVERAL, *ALONE) if shim else SEVERAL):
        branch = f"aidlc/x-{number}"
        one.repo.git("switch", "-qc", branch, start)
        if shim:
            done = desk.run("-C", str(one.world.path), *command.split(), at=one.world.home)
            said, status = done.stderr, done.returncode
        else:
            ran = one.repo.run(*command.split())
            said, status = ran.stderr.decode(), ran.returncode
        assert status == 0, (command, said)
        assert one.repo.id(branch) == one.repo.id() != start, command
        assert one.source.id(branch) == one.repo.id(), (command, said)
        assert said.count("published") == 1, (command, said)
    assert one.denials() == []


def test_commits_of_an_alias_and_of_a_program_that_git_started_are_published(publishing: PublishingMaker) -> None:
    """The hooks of git publish what its shim will not."""
    one = publishing(policy=FREE + '[git]\nmessage_pattern = "."\n')
    desk = Desk(one.world)
    desk.git("switch", "-qc", "aidlc/x")
    both = "; ".join(f"git switch -qc aidlc/{name} main && git commit -qm {name} --allow-empty" for name in "yz")
    desk.git("-c", f"alias.both=!{both}", "both")
    later = f"( sleep 2; cd '{one.world.path}'; git commit -q --allow-empty -m later ) >/dev/null 2>&1 &"
    desk.git("-c", f"alias.begin=!{later}", "begin")
    until(lambda: one.source.git("log", "-1", "--format=%s", "aidlc/z") == "later\n", "the later commit is published")
    assert one.source.id("aidlc/y") == one.repo.id("aidlc/y")


@pytest.mark.parametrize("end", ["--skip", "--quit"])
def test_the_sessions_git_publishes_when_an_operation_ends(publishing: PublishingMaker, end: str) -> None:
    one = publishing(policy=FREE + '[git]\nmessage_pattern = "."\n')
    desk = Desk(one.world)
    desk.git("switch", "-qc", "aidlc/picks")
    for name, text in (("new.md", "new\n"), ("a.md", "theirs\n")):
        one.repo.commit(name, {name: text})
    desk.git("switch", "-qc", "aidlc/x", "main")
    one.repo.commit("ours", {"a.md": "ours\n"})
    assert desk.run("cherry-pick", "aidlc/picks~1", "aidlc/picks").returncode == 1
    desk.git("reset", "-q", "--merge") if end == "--quit" else None
    desk.git("cherry-pick", end)
    assert one.source.id("aidlc/x") == one.repo.id()


def test_a_commit_that_is_refused_is_reported_once_by_the_sessions_git(publishing: PublishingMaker) -> None:
    one = publishing()
    desk = Desk(one.world)
    desk.git("switch", "-qc", "aidlc/x")
    done = desk.run("commit", "-q", "--allow-empty", "-m", "No issue")
    assert done.stderr.count("not published: git.message. ") == 1
    assert [denial["rule"] for denial in one.denials()] == ["git.message"]


def test_what_git_prints_names_the_fault(publishing: PublishingMaker) -> None:
    """A message that the pattern does not match, a tag of published commits, and the branch of this work tree."""
    one = publishing(policy=FREE + '[git]\nmessage_pattern = "x."\n')
    one.repo.git("switch", "-qc", "aidlc/x")
    refused = _commit(one, "No", "docs/c.md")
    assert "A message must match `x.`. Commit: " in refused
    assert "Write a message that matches `x.`. Use `git commit --amend`." in refused
    one.repo.git("commit", "-q", "--amend", "-m", "x1")
    one.repo.git("tag", "t1")
    assert "published t1 (tag)" in one.push("t1")
    assert "A branch that is checked out cannot be deleted." in one.push(":aidlc/x", code=1)


def test_push_fetch_and_delete_of_a_branch(publishing: PublishingMaker) -> None:
    one = publishing()
    one.repo.git("switch", "-q", "--detach")
    made = one.repo.commit("[gt-1] Add a page", {"docs/c.md": "c\n"})
    one.repo.git("switch", "-q", "main")
    one.repo.git("branch", "aidlc/y", made)
    assert "remote: bonobofs: published aidlc/y (1 commit)" in one.push("aidlc/y")
    assert one.source.id("aidlc/y") == made
    assert "git.protected" in one.push(f"{made}:refs/heads/main", code=1)
    assert "git.ref" in one.push(f"{made}:refs/notes/x", code=1)
    one.source.git("branch", "operators")
    one.repo.git("fetch", "-q", "source")
    assert one.repo.id("source/operators") == one.source.id("main")
    one.push(":aidlc/y")
    assert one.source.id("aidlc/y") == ""


def test_the_operators_checkout_follows_and_keeps_staged_changes(publishing: PublishingMaker) -> None:
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    one.source.write("docs/mine.md", "staged by the operator\n")
    one.source.git("add", "docs/mine.md")
    one.repo.write("a.md", "changed\n")
    one.repo.git("commit", "-qm", "[gt-1] Change a", "a.md")
    assert one.source.id("aidlc/x") == one.repo.id()
    assert one.source.git("status", "--porcelain") == "A  docs/mine.md\n"
    one.repo.git("switch", "-q", "main")
    assert one.source.git("status", "--porcelain") == "A  docs/mine.md\n"
    assert (one.git_dir / "HEAD").read_text() == "ref: refs/heads/main\n"
    # The operator commits at once, on what the session has left.
    one.source.git("commit", "-qm", "The operator's")
    assert one.source.git("show", "--name-only", "--format=", "HEAD") == "docs/mine.md\n"


def test_switches_are_no_external_changes(publishing: PublishingMaker) -> None:
    """The temporary files of a switch in the source's .git are part of the recorded change.

    The watcher reads the events of each switch by themselves.
    """
    one = publishing()
    one.repo.git("branch", "-q", "aidlc/x")
    for number, branch in enumerate(("aidlc/x", "main") * 5):
        one.repo.git("switch", "-q", branch)
        one.source.write(name := f"beside-{number}.md", "written beside the mount\n")
        until(lambda name=name: name in out_of_band(one.world), "the external change is recorded")  # type: ignore[misc]
    assert [path for path in out_of_band(one.world) if path.startswith(".git/")] == []


def test_a_session_follows_a_commit_of_the_operator_in_its_work_tree(publishing: PublishingMaker) -> None:
    """As the refusal says. A rebase would overwrite files that the operator's commit has made in the work tree."""
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    _commit(one, "[gt-1] First", "docs/first.md")
    one.source.commit("[gt-1] By the operator", {"docs/op.md": "op\n"})
    refused = _commit(one, "[gt-1] Second", "docs/second.md")
    assert "not published: git.force. " in refused
    assert "`git fetch source`" in refused
    assert "`git reset source/BRANCH`" in refused
    one.repo.git("fetch", "-q", "source")
    assert "untracked" in one.repo.run("rebase", "source/aidlc/x").stderr.decode()
    one.repo.git("reset", "-q", "source/aidlc/x")
    assert "published aidlc/x (1 commit)" in _commit(one, "[gt-1] Second", "docs/second.md")
    subjects = one.source.git("log", "--format=%s", "main..aidlc/x").splitlines()
    assert subjects == ["[gt-1] Second", "[gt-1] By the operator", "[gt-1] First"]
    assert one.source.git("status", "--porcelain") == one.repo.git("status", "--porcelain") == ""


def test_a_switch_over_staged_work_or_a_moved_head_is_not_mirrored(publishing: PublishingMaker) -> None:
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    one.repo.commit("[gt-1] Change a", {"a.md": "changed\n"})
    blob = one.source.git("hash-object", "-w", "--stdin", given="staged\n").strip()
    one.source.git("update-index", "--cacheinfo", f"100644,{blob},a.md")
    told = one.repo.run("switch", "main").stderr.decode()
    assert "git.staged" in told
    assert "bonobofs worktree add" in told
    assert (one.git_dir / "HEAD").read_text() == "ref: refs/heads/aidlc/x\n"
    one.source.git("update-index", "--cacheinfo", f"100644,{one.source.id('aidlc/x:a.md')},a.md")
    one.source.git("symbolic-ref", "HEAD", "refs/heads/other")
    assert "git.checkout" in one.repo.run("switch", "aidlc/x").stderr.decode()
    assert (one.git_dir / "HEAD").read_text() == "ref: refs/heads/other\n"
    one.source.git("symbolic-ref", "HEAD", "refs/heads/main")


@pytest.mark.parametrize("ref", ["refs/tags/v1", "refs/remotes/origin/main", "refs/custom/x", "refs/heads/../tags/v1"])
def test_the_operators_head_follows_to_branches_alone(publishing: PublishingMaker, ref: str) -> None:
    """On another ref, the operator's next commit would move that ref."""
    one = publishing()
    one.source.git("update-ref", os.path.normpath(ref), "main")
    one.repo.git("switch", "-qc", "aidlc/x")
    for check in (True, False):
        answer = call(one.socket.parent, "git.head", head=f"ref: {ref}", check=check)
        assert answer["denied"]["rule"] == "git.unpublished"
    assert (one.git_dir / "HEAD").read_text() == "ref: refs/heads/aidlc/x\n"


def test_an_empty_source_gets_no_head_that_git_cannot_read(publishing: PublishingMaker, tmp_path: Path) -> None:
    one = publishing(source=Repo(tmp_path / "empty").init())
    assert call(one.socket.parent, "git.head", head="ref: refs/heads/a..b")["denied"]["rule"] == "git.unpublished"
    assert call(one.socket.parent, "git.head", head="ref: refs/heads/aidlc/x")["status"] == 0
    assert (one.git_dir / "HEAD").read_text() == "ref: refs/heads/aidlc/x\n"


def test_a_linked_worktree_publishes_and_moves_no_head_of_the_source(
    publishing: PublishingMaker, tmp_path: Path
) -> None:
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    tree = Repo(tmp_path / "linked")
    tree.env = one.repo.env
    for made in (["-qb", "aidlc/y", str(tree.root)], ["--detach", str(tmp_path / "detached"), "aidlc/y"]):
        told = one.repo.run("worktree", "add", *made).stderr.decode()
        assert "Traceback" not in told
        assert ("published aidlc/y (0 commits)\n" in told) == ("aidlc/y" in made[:2])
    tree.write("y.md", "y\n")
    tree.git("add", "y.md")
    assert tree.run("commit", "-qm", "[gt-1] Add y").stderr.decode() == "published aidlc/y (1 commit)\n"
    assert one.source.id("aidlc/y") == tree.id()
    assert "git.message" in tree.run("commit", "--amend", "-qm", "No issue").stderr.decode()
    assert (one.git_dir / "HEAD").read_text() == "ref: refs/heads/aidlc/x\n"
    assert one.source.git("status", "--porcelain") == ""


def test_a_later_failure_says_that_the_branch_is_published(publishing: PublishingMaker) -> None:
    """The publisher cannot be stored: the branch has moved, the agent reads why, and the outcome is a success."""
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    lock = one.world.home / "published.lock"
    lock.unlink()
    lock.mkdir()
    told = _commit(one, "[gt-1] One", "one.md")
    assert "published aidlc/x (1 commit), but a later step failed: " in told
    assert one.source.id("aidlc/x") == one.repo.id()
    assert one.source.git("status", "--porcelain") == ""
    outcome = [entry for entry in one.entries() if (entry.kind, entry.operation) == ("outcome", "publish")][-1]
    assert (outcome.result, len(outcome.details["incomplete"])) == ("allowed", 1)
    lock.rmdir()
    assert "published aidlc/x (1 commit)\n" in _commit(one, "[gt-1] Two", "two.md")


def test_a_locked_index_keeps_the_branch_from_moving(publishing: PublishingMaker) -> None:
    """Otherwise the operator's index would show the commit as a staged reversal."""
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    before = one.source.id("aidlc/x")
    (one.git_dir / "index.lock").touch()
    told = _commit(one, "[gt-1] One", "one.md")
    assert "not published: the checkout is locked; remove " in told
    assert one.source.id("aidlc/x") == before
    (one.git_dir / "index.lock").unlink()
    assert "published aidlc/x (2 commits)\n" in _commit(one, "[gt-1] Two", "two.md")
    assert one.source.git("status", "--porcelain") == ""


def test_a_locked_head_keeps_the_index_of_the_checkout(publishing: PublishingMaker) -> None:
    """A switch that the source cannot follow says so, and changes neither HEAD nor index of the source."""
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    one.repo.commit("[gt-1] One", {"one.md": "1"})
    (one.git_dir / "HEAD.lock").touch()
    told = one.repo.run("switch", "main").stderr.decode()
    assert "HEAD of the source is not changed: the checkout is locked" in told
    assert one.source.git("diff", "--cached", "--name-only") == ""
    (one.git_dir / "HEAD.lock").unlink()
