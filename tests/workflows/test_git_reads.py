"""git reads in a mount what it reads in the bare directory, and finds a repository of the session there."""

from __future__ import annotations

from typing import Final

from tests.workflows.project import date
from tests.workflows.workshop import Place, workflow


def repository(at: Place) -> None:
    """Make the place a repository with three commits, which are the same each time."""

    def git(*arguments: str, day: int = 1) -> None:
        env = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        for who in ("AUTHOR", "COMMITTER"):
            env |= {f"GIT_{who}_NAME": "Ann", f"GIT_{who}_EMAIL": "ann@example.invalid"}
            env |= {f"GIT_{who}_DATE": f"2020-01-{day:02}T12:00:00Z"}
        at.run("git", *arguments, env=env)

    git("init", "--quiet", "--initial-branch=main", ".")
    git("add", "--all")
    git("commit", "--quiet", "--message=A project")
    at.write("aidlc-docs/plan.md", "one\ntwo and a half\nthree\n")
    git("commit", "--quiet", "--all", "--message=Plan more", day=2)
    (at / "src/sum.c").rename(at / "src/add.c")
    git("add", "--all")
    git("commit", "--quiet", "--message=Rename the sum", day=3)
    date(at.path)


reading: Final = workflow(repository, layer=[".git"])


@reading
def test_git_status_lists_changes(at: Place) -> list[str]:
    """`git status` reports a clean tree as clean, and then changed, new, moved and removed files."""
    said = [at.run("git", "status")]
    at.run("sed", "-i", "s/one/ONE/", "aidlc-docs/plan.md")
    at.run("mv", "templates/plan.md", "aidlc-docs/template.md")
    at.run("rm", "tests/test_sum.py")
    assert "nothing to commit" in said[0]
    return [*said, at.run("git", "status"), at.run("git", "status", "--porcelain=v2", "--branch", "--ignored")]


@reading
def test_git_diff_shows_changes(at: Place) -> list[str]:
    """`git diff` shows changes, also of modes and against an older commit."""
    at.run("sed", "-i", "s/one/ONE/", "aidlc-docs/plan.md")
    at.run("chmod", "+x", "orchestrator/sum.py")
    said = at.run("git", "diff")
    assert "+ONE" in said
    return [said, at.run("git", "diff", "--stat", "HEAD~2"), at.run("git", "diff", "--exit-code", "HEAD", code=1)]


@reading
def test_git_log_shows_the_history(at: Place) -> list[str]:
    """`git log` and `git show` print the history, and follow a file over its rename."""
    said = at.run("git", "log", "--patch", "--stat")
    assert said.count("\ncommit ") == 2
    return [said, at.run("git", "log", "--follow", "--format=%h %s", "src/add.c"), at.run("git", "show", "HEAD~1")]


@reading
def test_git_grep_searches_tree_and_commit(at: Place) -> list[str]:
    """`git grep` searches the tree and an older commit."""
    return [at.run("git", "grep", "--line-number", "sum"), at.run("git", "grep", "sum", "HEAD~2", "--", "src")]


@reading
def test_git_blame_names_the_author_of_each_line(at: Place) -> list[str]:
    """Lines without a commit are marked."""
    at.write("aidlc-docs/plan.md", at.text("aidlc-docs/plan.md") + "four\n")
    said = at.run("git", "blame", "--line-porcelain", "aidlc-docs/plan.md")
    assert said.count("author Not Committed Yet") == 1
    return [line for line in said.splitlines() if "-time" not in line]


@reading
def test_git_reads_the_complete_repository(at: Place) -> list[str]:
    """`git ls-files`, `cat-file`, `fsck`, `archive` and `clone`."""
    at.run("git", "clone", "--quiet", ".", at.home / "clone")
    at.run("git", "archive", "--output", at.home / "tree.tar", "HEAD")
    return [
        at.run("git", "ls-files", "--stage"),
        at.run("git", "cat-file", "-p", "HEAD^{tree}"),
        at.run("git", "fsck", "--full"),
        at.run("tar", "-tvf", at.home / "tree.tar"),
        at.run("git", "-C", at.home / "clone", "rev-parse", "HEAD"),
    ]
