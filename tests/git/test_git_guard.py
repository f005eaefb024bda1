"""GitGuard: the arguments, rules, results and errors of its design, and an entry for each operation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs.errors import GitError
from bonobofs.git.git_guard import AIDLC_BRANCH_PREFIX, COMMIT_MESSAGE_PATTERN, PROTECTED_BRANCHES
from bonobofs.guards import GitGuard, MergeResult, ValidationResult
from bonobofs.policy.decision import Code, Refused
from tests.support.git_guards import FREE, Gate, Gated, Repo, alice, gated, repo

__all__ = ["alice", "gated", "repo"]


def denied(result: object) -> tuple[Code | None, str]:
    assert isinstance(result, ValidationResult), result
    assert not result
    return result.code, result.rule


def test_the_signatures_are_those_of_the_design() -> None:
    """Callers of the design's GitGuard call this one unchanged."""
    wanted = {
        "create_branch": "(self, branch_name, agent, base)",
        "checkout_branch": "(self, branch_name, agent)",
        "commit": "(self, message, files, agent, issue_id)",
        "merge": "(self, source, target, agent, strategy)",
        "get_status": "(self, agent)",
        "get_diff": "(self, path)",
    }
    for name, parameters in wanted.items():
        names = ", ".join(inspect.signature(getattr(GitGuard, name)).parameters)
        assert f"({names})" == parameters
    for name in ("create_branch", "checkout_branch", "commit", "merge"):
        assert hasattr(GitGuard, f"guarded_{name}")
    assert (AIDLC_BRANCH_PREFIX, PROTECTED_BRANCHES) == ("aidlc/", ["main", "master", "develop"])
    assert COMMIT_MESSAGE_PATTERN.match("[gt-17.2] Add functional design")


def test_a_branch_is_made_checked_out_and_committed_to(repo: Repo, gated: Gate) -> None:
    """What the design describes from start to end works, and git sees it as its own."""
    alice = gated(repo)
    assert alice.guard.create_branch("aidlc/unit-1-scribe", "alice") == "aidlc/unit-1-scribe"
    assert alice.guard.checkout_branch("aidlc/unit-1-scribe", "alice") is None
    repo.write("docs/new.md", "New\n")
    made = alice.guard.commit("Add it", [Path("docs/new.md")], "alice", "gt-17")
    assert made == repo.head("aidlc/unit-1-scribe")
    assert repo.git("log", "-1", "--format=%s|%an|%cn|%b") == "[gt-17] Add it|alice|alice|\n"
    identity = alice.session.guard.agent.id
    assert repo.git("log", "-1", "--format=%ae") == f"{identity}@bonobofs.invalid\n"
    assert repo.status() == ""
    repo.check()


def test_the_working_tree_follows_a_checkout(alice: Gated) -> None:
    """After a checkout files, index and HEAD are those of the branch."""
    alice.commit("Second", docs__plan_md="Another plan\n", docs__more_md="More\n")
    alice.git("branch", "aidlc/other", "main")
    assert alice.guard.checkout_branch("aidlc/other", "alice") is None
    assert alice.files() == {"docs/plan.md": (0, b"The plan\n")}
    assert alice.status() == ""
    assert alice.guard.checkout_branch("aidlc/work", "alice") is None
    assert alice.files()["docs/more.md"] == (0, b"More\n")
    assert alice.status() == ""
    assert alice.git("reflog", "-1", "--format=%gs") == "checkout: moving from aidlc/other to aidlc/work\n"
    alice.check()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("unit-1", "git.prefix"),
        ("feature/x", "git.prefix"),
        ("aidlc/", "git.name"),
        ("aidlc/Unit", "git.name"),
        ("aidlc/a b", "git.name"),
        ("aidlc/a..b", "git.name"),
        ("aidlc/a.lock", "git.name"),
        ("aidlc//a", "git.name"),
        ("aidlc/-a", "git.name"),
        ("aidlc/a/", "git.name"),
        ("aidlc/\u0430", "git.name"),
        ("-flag", "git.name"),
        ("refs/heads/x:main", "git.name"),
        ("@{-1}", "git.name"),
        ("HEAD", "git.name"),
        ("aidlc/a\n", "git.name"),
        ("aidlc/\ud800", "git.name"),
        ("", "git.name"),
    ],
)
def test_a_branch_is_named_as_the_rules_say(repo: Repo, gated: Gate, name: str, rule: str) -> None:
    """A name that is not an agent's own is refused, made by no trick of git's own words."""
    alice = gated(repo)
    before = repo.git("for-each-ref")
    assert denied(alice.guard.create_branch(name, "alice")) == (Code.GIT, rule)
    with pytest.raises(Refused):
        alice.guard.guarded_create_branch(name, "alice")
    assert repo.git("for-each-ref") == before


@pytest.mark.parametrize("name", ["main", "master", "develop"])
def test_protected_branches_are_not_touched(repo: Repo, gated: Gate, name: str) -> None:
    """Nothing is committed to, merged into or made as a protected branch."""
    repo.git("branch", "aidlc/x")
    if name != "main":
        repo.git("checkout", "-q", "-b", name)
    alice = gated(repo)
    repo.write("docs/plan.md", "Changed\n")
    before = repo.git("for-each-ref")
    guard = alice.guard
    assert denied(guard.commit("[gt-1] Change", ["docs/plan.md"], "alice", "gt-1")) == (Code.PROTECTED, "git.protected")
    assert denied(guard.merge("aidlc/x", name, "alice")) == (Code.PROTECTED, "git.protected")
    assert denied(guard.create_branch(name, "alice")) == (Code.PROTECTED, "git.protected")
    assert repo.git("for-each-ref") == before
    assert repo.staged() == repo.git("ls-files", "--stage")
    assert [entry.code for entry in alice.of("commit")] == ["PROTECTED"]


def test_the_base_of_a_branch_must_be_there(alice: Gated) -> None:
    """A branch is made at another branch, and at nothing else that git would guess."""
    for base in ("nowhere", "-x", "HEAD~1", "main@{1}", "main:docs", "", "refs/heads"):
        assert denied(alice.guard.create_branch("aidlc/a", "alice", base)) == (Code.GIT, "git.base"), base
    first = alice.head("main")
    alice.commit("Second", docs__b_md="b\n")
    assert alice.guard.create_branch("aidlc/a", "alice", "aidlc/work") == "aidlc/a"
    assert alice.guard.create_branch("aidlc/b", "alice") == "aidlc/b"
    assert (alice.head("aidlc/a"), alice.head("aidlc/b")) == (alice.head("aidlc/work"), first)
    assert denied(alice.guard.create_branch("aidlc/b", "alice")) == (Code.GIT, "git.exists")


def test_a_branch_stands_not_where_another_has_its_directory(alice: Gated) -> None:
    """As with git, aidlc/work/more cannot be made beside aidlc/work, packed or not."""
    for _ in range(2):
        assert denied(alice.guard.create_branch("aidlc/work/more", "alice")) == (Code.GIT, "git.exists")
        alice.git("pack-refs", "--all")
    alice.check()


def test_a_checkout_demands_a_clean_tree(alice: Gated) -> None:
    """What is not committed, staged or not, refuses a checkout and stays; untracked files do not."""
    alice.git("branch", "aidlc/other")
    alice.write("docs/plan.md", "Changed\n")
    assert denied(alice.guard.checkout_branch("aidlc/other", "alice")) == (Code.GIT, "git.clean")
    alice.git("add", "-A")
    assert denied(alice.guard.checkout_branch("aidlc/other", "alice")) == (Code.GIT, "git.clean")
    assert alice.of("checkout_branch")[-1].details["paths"] == ["docs/plan.md"]
    alice.git("commit", "-qm", "x")
    alice.write("notes.txt", "untracked")
    assert alice.guard.checkout_branch("aidlc/other", "alice") is None
    assert (alice.root / "notes.txt").read_text() == "untracked"
    assert denied(alice.guard.checkout_branch("aidlc/none", "alice")) == (Code.GIT, "git.branch")


def test_a_checkout_overwrites_no_untracked_file(alice: Gated) -> None:
    """A file that the branch brings, and that lies there untracked or ignored, refuses the checkout."""
    alice.commit("More", docs__more_md="More\n", x_log="tracked here\n")
    alice.git("checkout", "-q", "-b", "aidlc/other", "main")
    alice.write("docs/more.md", "mine\n")
    assert denied(alice.guard.checkout_branch("aidlc/work", "alice")) == (Code.GIT, "git.clean")
    (alice.root / "docs/more.md").unlink()
    alice.write(".git/info/exclude", "*.log\n")
    alice.write("x.log", "mine\n")
    assert denied(alice.guard.checkout_branch("aidlc/work", "alice")) == (Code.GIT, "git.clean")
    assert (alice.root / "x.log").read_text() == "mine\n"


def test_a_directory_of_untracked_files_gives_way_to_no_file(alice: Gated) -> None:
    """The branch brings a file of the name; what is in the directory stays, and it is said why."""
    alice.commit("A file", other="a file here\n")
    alice.git("checkout", "-q", "-b", "aidlc/other", "main")
    alice.write("other/mine.md", "mine\n")
    before = alice.files()
    assert denied(alice.guard.checkout_branch("aidlc/work", "alice")) == (Code.GIT, "git.clean")
    assert alice.files() == before
    (alice.root / "other/mine.md").unlink()
    alice.guard.checkout_branch("aidlc/work", "alice")
    assert (alice.root / "other").read_text() == "a file here\n"


MESSAGES = [
    ("Add it", "gt-17", "[gt-17] Add it"),
    ("[gt-17] Add it", "gt-17", "[gt-17] Add it"),
    ("[gt-1.2] Add it", "gt-1.2", "[gt-1.2] Add it"),
    ("  Add it  \n\n\nand more  \n\n", "gt-17", "[gt-17] Add it\n\nand more"),
    ("[gt-18] Add it", "gt-17", None),
    ("[gt-17]", "gt-17", None),
    ("[gt-17] ", "gt-17", None),
    ("[] x", "gt-17", None),
    ("[a b] x", "gt-17", None),
    ("", "gt-17", None),
    (" \n ", "gt-17", None),
    ("Add it", "", None),
    ("[gt-17] Add it", "", "[gt-17] Add it"),
    ("[gt-17]Add", "", None),
    ("Add\0it", "gt-17", None),
]


@pytest.mark.parametrize(("message", "issue", "stored"), MESSAGES)
def test_a_message_names_its_issue(alice: Gated, message: str, issue: str, stored: str | None) -> None:
    """The issue is prepended where it is missing; another one, or nothing after it, is refused."""
    alice.write("docs/plan.md", "Changed\n")
    before = alice.head()
    result = alice.guard.commit(message, ["docs/plan.md"], "alice", issue)
    if stored is None:
        assert denied(result) == (Code.GIT, "git.message")
        assert (alice.head(), alice.status()) == (before, " M docs/plan.md\n")
    else:
        assert alice.git("log", "-1", "--format=%B").rstrip("\n") == stored
        tidied = alice.git("stripspace", given=alice.git("cat-file", "commit", "HEAD").split("\n\n", 1)[1])
        assert alice.git("cat-file", "commit", "HEAD").split("\n\n", 1)[1] == tidied


def test_only_the_named_files_are_committed(alice: Gated) -> None:
    """What else is changed stays changed, and what else is staged stays staged."""
    alice.commit("Files", a_txt="a\n", b_txt="b\n", c_txt="c\n", d_txt="d\n")
    for name in "abc":
        alice.write(f"{name}.txt", f"{name} changed\n")
    (alice.root / "d.txt").unlink()
    alice.write("new.txt", "new\n")
    alice.git("add", "b.txt", "new.txt")
    made = alice.guard.commit("Change a", ["a.txt", "d.txt"], "alice", "gt-1")
    assert alice.git("show", "--name-status", "--format=", str(made)) == "M\ta.txt\nD\td.txt\n"
    assert alice.status() == "M  b.txt\n M c.txt\nA  new.txt\n"
    entry = alice.of("commit")[-2]
    assert (entry.guard, entry.kind, entry.tool) == ("git", "intent", "commit")
    assert entry.details["files"] == ["a.txt", "d.txt"]
    assert (entry.details["message"], entry.details["hash"]) == ("[gt-1] Change a\n", made)
    alice.check()


def test_every_file_passes_the_rules_for_files(repo: Repo, gated: Gate) -> None:
    """A file that the agent may not write, it may not commit, delete, or reach by a path that leads out."""
    repo.git("checkout", "-q", "-b", "aidlc/work")
    repo.commit("Docs", aidlc_docs__a_md="x")
    policy = '[[rule]]\nname = "docs"\npaths = ["docs/"]\nsuffixes = [".md"]\nmax_size = 100\nexecutable = false\n'
    alice = gated(repo, policy=policy + '[[keep]]\npaths = ["docs/plan.md"]\n')
    repo.write("docs/run.py", "print()\n")
    repo.write("docs/big.md", "x" * 101)
    repo.write("docs/run.md", "#!/bin/sh\n")
    repo.write("docs/mode.md", "x", mode=0o755)
    repo.write("src/a.md", "x")
    (repo.root / "docs/link.md").symlink_to("/etc/passwd")
    (repo.root / "docs/plan.md").unlink()
    before = repo.head(), repo.staged()
    wanted = {
        "docs/run.py": Code.SUFFIX,
        "docs/big.md": Code.SIZE,
        "docs/run.md": Code.EXECUTABLE,
        "docs/mode.md": Code.EXECUTABLE,
        "src/a.md": Code.DEFAULT,
        "docs/link.md": Code.OUTSIDE,
        "docs/plan.md": Code.KEEP,
        "../outside.md": Code.OUTSIDE,
        "/etc/passwd": Code.OUTSIDE,
        "docs/../docs/x.md": Code.OUTSIDE,
        ".git/config": Code.PROTECTED,
        ".hidden.md": Code.HIDDEN,
    }
    for path, code in wanted.items():
        result = alice.guard.commit("Try", [path], "alice", "gt-1")
        assert isinstance(result, ValidationResult), path
        assert result.code is code, (path, result)
    assert (repo.head(), repo.staged()) == before
    repo.check()


def test_a_file_that_is_not_there_is_no_denial(alice: Gated) -> None:
    """An unknown path, and a commit of nothing, are errors that are entered, and change nothing."""
    with pytest.raises(GitError, match="did not match") as caught:
        alice.guard.commit("Try", ["docs/none.md"], "alice", "gt-1")
    assert (caught.value.kind, caught.value.paths) == ("pathspec", ("docs/none.md",))
    with pytest.raises(GitError, match="nothing to commit"):
        alice.guard.guarded_commit("Try", ["docs/plan.md"], "alice", "gt-1")
    assert [entry.result for entry in alice.of("commit")] == ["error", "error"]
    alice.check()


def test_a_merge_says_what_came_of_it(alice: Gated) -> None:
    """A merge gives its commit; a squash one with a single parent; both leave the files of the target in place."""
    alice.git("branch", "aidlc/target", "main")
    alice.commit("[gt-2] More", docs__more_md="More\n")
    alice.git("checkout", "-q", "aidlc/target")
    alice.commit("Other", docs__other_md="Other\n")
    result = alice.guard.merge("aidlc/work", "aidlc/target", "alice")
    assert result == MergeResult(True, alice.head(), [], "merge")
    assert alice.git("log", "-1", "--format=%s %P").split()[-2:] == [
        alice.head("HEAD^1"),
        alice.head("aidlc/work"),
    ]
    assert alice.status() == ""
    assert (alice.root / "docs/more.md").exists()
    alice.git("reset", "-q", "--hard", "HEAD^1")
    squashed = alice.guard.merge("aidlc/work", "aidlc/target", "alice", "squash")
    assert squashed == MergeResult(True, alice.head(), [], "squash")
    assert len(alice.git("log", "-1", "--format=%P").split()) == 1
    assert alice.git("log", "-1", "--format=%s") == "[gt-2] Squash branch 'aidlc/work' into aidlc/target\n"
    assert alice.status() == ""
    assert denied(alice.guard.merge("aidlc/work", "aidlc/target", "alice", "octopus")) == (Code.GIT, "git.strategy")
    alice.check()


def test_conflicts_are_reported_and_nothing_changes(alice: Gated) -> None:
    """A merge with conflicts names the paths, and leaves no trace in files, index or refs."""
    alice.git("branch", "aidlc/target", "main")
    alice.commit("Mine", docs__plan_md="Mine\n")
    alice.git("checkout", "-q", "aidlc/target")
    alice.commit("Theirs", docs__plan_md="Theirs\n")
    before = alice.files(), alice.staged(), alice.git("for-each-ref"), sorted((alice.root / ".git").iterdir())
    for strategy in ("merge", "squash"):
        result = alice.guard.merge("aidlc/work", "aidlc/target", "alice", strategy)
        assert result == MergeResult(False, None, ["docs/plan.md"], strategy)
    assert (alice.files(), alice.staged(), alice.git("for-each-ref")) == before[:3]
    assert sorted((alice.root / ".git").iterdir()) == before[3]
    assert alice.of("merge")[-1].details["conflicts"] == ["docs/plan.md"]
    alice.check()


def test_a_branch_that_is_not_checked_out_is_merged_into(alice: Gated) -> None:
    """Neither files nor index are touched when the target is not where HEAD is."""
    alice.git("branch", "aidlc/target", "main")
    alice.commit("More", docs__more_md="More\n")
    alice.write("docs/plan.md", "not committed\n")
    before = alice.files(), alice.staged()
    result = alice.guard.merge("aidlc/work", "aidlc/target", "alice")
    assert isinstance(result, MergeResult)
    assert (result.success, result.fast_forward) == (True, True)
    assert alice.head("aidlc/target") == alice.head("aidlc/work")
    assert (alice.files(), alice.staged()) == before
    assert denied(alice.guard.merge("aidlc/none", "aidlc/target", "alice")) == (Code.GIT, "git.branch")
    assert denied(alice.guard.merge("aidlc/work", "aidlc/none", "alice")) == (Code.GIT, "git.branch")


def test_a_merge_into_what_is_checked_out_demands_a_clean_tree(alice: Gated) -> None:
    """Uncommitted changes refuse a merge that would have to change files."""
    alice.git("branch", "aidlc/other", "main")
    alice.commit("More", docs__more_md="More\n")
    alice.git("checkout", "-q", "aidlc/other")
    alice.write("docs/plan.md", "not committed\n")
    assert denied(alice.guard.merge("aidlc/work", "aidlc/other", "alice")) == (Code.GIT, "git.clean")
    assert (alice.root / "docs/plan.md").read_text() == "not committed\n"


def test_status_and_diff_are_those_of_git(alice: Gated) -> None:
    """Staged, modified and untracked files are told, and the patch is one that git applies."""
    alice.commit("Files", a_txt="a\nb\nc\n", b_txt="b\n", c_txt="c\n")
    alice.write("a.txt", "a\nB\nc\n")
    alice.write("b.txt", "b2\n")
    alice.git("add", "b.txt")
    (alice.root / "c.txt").unlink()
    alice.write("new/x.txt", "x")
    alice.write(".gitignore", "*.log\n")
    alice.write("y.log", "x")
    status = alice.guard.get_status("alice")
    assert (status.branch, status.clean, status.staged) == ("aidlc/work", False, ["b.txt"])
    assert (status.modified, status.untracked) == (["a.txt", "c.txt"], [".gitignore", "new/x.txt"])
    patch = alice.guard.get_diff()
    changed = alice.files()
    alice.git("reset", "-q", "--hard")
    alice.git("apply", given=patch)
    assert alice.files() == changed
    only = alice.guard.get_diff("a.txt")
    assert re.findall(r"^\+\+\+ (.*)$", only, re.MULTILINE) == ["b/a.txt"]
    alice.git("checkout", "-q", "--detach")
    assert alice.guard.get_status("alice").branch == ""


def test_another_agent_is_refused(alice: Gated) -> None:
    """Who names another agent than the session's is refused as IDENTITY, with an alert, by every call."""
    guard = alice.guard
    calls: list[Callable[[], object]] = [
        lambda: guard.create_branch("aidlc/a", "mallory"),
        lambda: guard.checkout_branch("main", "mallory"),
        lambda: guard.commit("x", ["docs/plan.md"], "mallory", "gt-1"),
        lambda: guard.merge("main", "aidlc/work", "mallory"),
    ]
    for call in calls:
        assert denied(call()) == (Code.IDENTITY, "identity")
    with pytest.raises(Refused):
        guard.get_status("mallory")
    assert [entry.code for entry in alice.entries() if entry.kind == "alert"][:4] == ["IDENTITY"] * 4
    assert guard.create_branch("aidlc/a", alice.session.guard.agent.id) == "aidlc/a"


def test_a_role_has_only_the_operations_of_its_list(repo: Repo, gated: Gate) -> None:
    """What is not in the role's `git` is refused as ROLE, before anything is looked at."""
    repo.git("checkout", "-q", "-b", "aidlc/work")
    alice = gated(repo, policy=FREE + '[role.worker]\nwrite = ["**"]\ngit = ["add", "commit"]\n', role="worker")
    assert denied(alice.guard.create_branch("aidlc/x", "alice"))[0] is Code.ROLE
    assert denied(alice.guard.checkout_branch("main", "alice"))[0] is Code.ROLE
    assert denied(alice.guard.merge("main", "aidlc/work", "alice"))[0] is Code.ROLE
    repo.write("docs/plan.md", "Changed\n")
    assert alice.guard.commit("x", ["docs/plan.md"], "alice", "gt-1") == repo.head()


def test_the_policy_has_the_last_word(repo: Repo, gated: Gate) -> None:
    """Prefix, protected branches, message pattern and author come from [git]."""
    table = """[git]
branch_prefix = "team/a/"
protected_branches = ["main", "release/*"]
message_pattern = "^(feat|fix): .+"
author_email = "{agent}+{id}@example.org"
"""
    repo.git("branch", "release/1")
    alice = gated(repo, policy=FREE + table)
    assert denied(alice.guard.create_branch("aidlc/x", "alice")) == (Code.GIT, "git.prefix")
    assert denied(alice.guard.merge("main", "release/1", "alice")) == (Code.PROTECTED, "git.protected")
    assert alice.guard.create_branch("team/a/x", "alice") == "team/a/x"
    alice.guard.checkout_branch("team/a/x", "alice")
    repo.write("docs/plan.md", "Changed\n")
    assert denied(alice.guard.commit("Change", ["docs/plan.md"], "alice", "gt-1")) == (Code.GIT, "git.message")
    assert alice.guard.commit("fix: change", ["docs/plan.md"], "alice", "gt-1") == repo.head()
    identity = alice.session.guard.agent.id
    assert repo.git("log", "-1", "--format=%s %ae") == f"fix: change alice+{identity}@example.org\n"
