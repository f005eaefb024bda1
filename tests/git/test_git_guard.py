"""GitGuard: arguments, rules, results and errors, with a record entry for each operation."""

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
    """A caller written for the design's GitGuard works unchanged."""
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


def test_a_branch_is_created_checked_out_and_committed_to(repo: Repo, gated: Gate) -> None:
    """The complete example of the design works, and git reads the result."""
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


def test_a_checkout_sets_files_index_and_head(alice: Gated) -> None:
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
def test_a_branch_name_must_follow_the_rules(repo: Repo, gated: Gate, name: str, rule: str) -> None:
    """A name without the agent's prefix is refused, and git's special syntax creates none."""
    alice = gated(repo)
    before = repo.git("for-each-ref")
    assert denied(alice.guard.create_branch(name, "alice")) == (Code.GIT, rule)
    with pytest.raises(Refused):
        alice.guard.guarded_create_branch(name, "alice")
    assert repo.git("for-each-ref") == before


@pytest.mark.parametrize("name", ["main", "master", "develop"])
def test_protected_branches_are_not_changed(repo: Repo, gated: Gate, name: str) -> None:
    """They are neither created, committed to nor merged into."""
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


def test_the_base_of_a_branch_must_exist(alice: Gated) -> None:
    """The base is a branch name; no other revision syntax is accepted."""
    for base in ("nowhere", "-x", "HEAD~1", "main@{1}", "main:docs", "", "refs/heads"):
        assert denied(alice.guard.create_branch("aidlc/a", "alice", base)) == (Code.GIT, "git.base"), base
    first = alice.head("main")
    alice.commit("Second", docs__b_md="b\n")
    assert alice.guard.create_branch("aidlc/a", "alice", "aidlc/work") == "aidlc/a"
    assert alice.guard.create_branch("aidlc/b", "alice") == "aidlc/b"
    assert (alice.head("aidlc/a"), alice.head("aidlc/b")) == (alice.head("aidlc/work"), first)
    assert denied(alice.guard.create_branch("aidlc/b", "alice")) == (Code.GIT, "git.exists")


def test_a_branch_cannot_be_a_directory_of_another_branch(alice: Gated) -> None:
    """As with git, aidlc/work/more cannot be created if aidlc/work exists, packed or not."""
    for _ in range(2):
        assert denied(alice.guard.create_branch("aidlc/work/more", "alice")) == (Code.GIT, "git.exists")
        alice.git("pack-refs", "--all")
    alice.check()


def test_a_checkout_needs_a_clean_tree(alice: Gated) -> None:
    """Uncommitted changes, staged or not, refuse a checkout and stay. Untracked files do not."""
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
    """An untracked or ignored file with the name of a file in the branch refuses the checkout."""
    alice.commit("More", docs__more_md="More\n", x_log="tracked here\n")
    alice.git("checkout", "-q", "-b", "aidlc/other", "main")
    alice.write("docs/more.md", "mine\n")
    assert denied(alice.guard.checkout_branch("aidlc/work", "alice")) == (Code.GIT, "git.clean")
    (alice.root / "docs/more.md").unlink()
    alice.write(".git/info/exclude", "*.log\n")
    alice.write("x.log", "mine\n")
    assert denied(alice.guard.checkout_branch("aidlc/work", "alice")) == (Code.GIT, "git.clean")
    assert (alice.root / "x.log").read_text() == "mine\n"


def test_a_directory_of_untracked_files_is_not_replaced_by_a_file(alice: Gated) -> None:
    """The branch has a file of that name. The directory stays, and the error says why."""
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
    """A missing issue is prepended. Another issue, or an empty message after it, is refused."""
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
    """Other changes stay, and other staged files stay staged."""
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


def test_every_committed_file_is_judged(repo: Repo, gated: Gate) -> None:
    """A file that the agent may not write cannot be committed, deleted, or reached by a path that leads out."""
    repo.git("checkout", "-q", "-b", "aidlc/work")
    repo.commit("Docs", aidlc_docs__a_md="x", docs__kept_md="x")
    policy = '[[rule]]\nname = "docs"\npaths = ["docs/"]\nsuffixes = [".md"]\nmax_size = 100\nexecutable = false\n'
    alice = gated(repo, policy=policy + '[[keep]]\npaths = ["docs/plan.md", "docs/kept.md"]\n')
    repo.write("docs/run.py", "print()\n")
    repo.write("docs/big.md", "x" * 101)
    repo.write("docs/run.md", "#!/bin/sh\n")
    repo.write("docs/mode.md", "x", mode=0o755)
    repo.write("src/a.md", "x")
    (repo.root / "docs/link.md").symlink_to("/etc/passwd")
    for name in ("plan.md", "kept.md"):
        (repo.root / "docs" / name).unlink()
    (repo.root / "docs/kept.md").symlink_to("plan.md")
    before = repo.head(), repo.staged()
    wanted = {
        "docs/run.py": Code.SUFFIX,
        "docs/big.md": Code.SIZE,
        "docs/run.md": Code.EXECUTABLE,
        "docs/mode.md": Code.EXECUTABLE,
        "src/a.md": Code.DEFAULT,
        "docs/link.md": Code.OUTSIDE,
        "docs/plan.md": Code.KEEP,
        "docs/kept.md": Code.KEEP,
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


def test_a_missing_file_is_an_error_and_no_denial(alice: Gated) -> None:
    """An unknown path and an empty commit are recorded errors, and change no file."""
    with pytest.raises(GitError, match="did not match") as caught:
        alice.guard.commit("Try", ["docs/none.md"], "alice", "gt-1")
    assert (caught.value.kind, caught.value.paths) == ("pathspec", ("docs/none.md",))
    with pytest.raises(GitError, match="nothing to commit"):
        alice.guard.guarded_commit("Try", ["docs/plan.md"], "alice", "gt-1")
    alice.write("operators.txt", "untracked\n")
    with pytest.raises(GitError, match="nothing to commit") as caught:
        alice.guard.guarded_commit("Try", [], "alice", "gt-1")
    assert caught.value.kind == "nothing"
    assert [entry.result for entry in alice.of("commit")] == ["error", "error", "error"]
    alice.check()


def test_a_merge_returns_its_commit(alice: Gated) -> None:
    """A squash merge has one parent. Both leave the target's files in place."""
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


def test_a_conflicting_merge_names_the_paths_and_changes_nothing(alice: Gated) -> None:
    """Files, index and refs are unchanged."""
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


def test_a_merge_into_another_branch_changes_neither_files_nor_index(alice: Gated) -> None:
    """HEAD is on a different branch than the target."""
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


def test_a_merge_into_the_checked_out_branch_needs_a_clean_tree(alice: Gated) -> None:
    """Uncommitted changes refuse a merge that would have to change files."""
    alice.git("branch", "aidlc/other", "main")
    alice.commit("More", docs__more_md="More\n")
    alice.git("checkout", "-q", "aidlc/other")
    alice.write("docs/plan.md", "not committed\n")
    assert denied(alice.guard.merge("aidlc/work", "aidlc/other", "alice")) == (Code.GIT, "git.clean")
    assert (alice.root / "docs/plan.md").read_text() == "not committed\n"


def test_status_and_diff_are_those_of_git(alice: Gated) -> None:
    """Staged, modified and untracked files are listed, and git applies the patch."""
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
    """A call that names another agent than the session's is refused as IDENTITY, with an alert."""
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
    """An operation outside the role's `git` list is refused as ROLE, before the repository is read."""
    repo.git("checkout", "-q", "-b", "aidlc/work")
    alice = gated(repo, policy=FREE + '[role.worker]\nwrite = ["**"]\ngit = ["add", "commit"]\n', role="worker")
    assert denied(alice.guard.create_branch("aidlc/x", "alice"))[0] is Code.ROLE
    assert denied(alice.guard.checkout_branch("main", "alice"))[0] is Code.ROLE
    assert denied(alice.guard.merge("main", "aidlc/work", "alice"))[0] is Code.ROLE
    repo.write("docs/plan.md", "Changed\n")
    assert alice.guard.commit("x", ["docs/plan.md"], "alice", "gt-1") == repo.head()


def test_the_git_rules_come_from_the_policy(repo: Repo, gated: Gate) -> None:
    """Prefix, protected branches, message pattern and author."""
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
