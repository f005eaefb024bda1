"""Everyday command lines of git, and a repository in which each has something to do."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

AUTHOR: Final = {
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "C",
    "GIT_COMMITTER_EMAIL": "c@example.org",
}
"""Two people: what the gate commits is the agent's, and committed by the service."""


class Step(NamedTuple):
    """A command line, and what is done before it."""

    line: str
    before: str = ""
    """Lines of sh, run in both repositories, each with its own git."""
    at: str = "."
    """The directory in which the line is run."""


STORIES: Final = {
    "adding": (
        Step("git add docs/new.md", "echo new > docs/new.md"),
        Step("git add -n docs", "echo more >> docs/a.md"),
        Step("git add -v docs/*.md"),
        Step("git add -A", "echo newer > docs/newer.md; rm docs/b.md"),
        Step("git add -u", "rm docs/newer.md; echo x > other/untracked.md"),
        Step("git add .", "echo new > docs/z.md; echo more >> docs/a.md", at="docs"),
        Step("git -C docs add a.md ../other", "echo more >> docs/a.md"),
        Step("git add nowhere.md"),
        Step("git add ignored.tmp", "echo x > ignored.tmp"),
        Step("git add -f ignored.tmp"),
        Step("git add"),
        Step("git status --short"),
    ),
    "committing": (
        Step("git commit -m '[gt-1] Nothing to do'"),
        Step("git commit -m '[gt-1] Not staged'", "echo more >> docs/a.md"),
        Step("git commit -am '[gt-1] Say more'", "rm docs/b.md; echo new > docs/new.md"),
        Step("git commit -m'[gt-1] Clings'", "git add docs/new.md"),
        Step("git commit -qm '[gt-1] Quiet'", "echo newer > docs/newer.md; git add docs/newer.md"),
        Step("git commit -F message", "printf '[gt-1] From a file\\n\\nMore.\\n\\n\\n' > message; git add message"),
        Step("git commit --message '[gt-1] One' -m Two", "chmod +x docs/a.md; git add docs/a.md"),
        Step("git commit -m '[gt-1] One alone' docs/a.md", "echo x >> docs/a.md; echo y >> message; git add message"),
        Step("git commit --amend -m '[gt-1] Anew'"),
        Step("git commit --amend --no-edit", "echo z > docs/z.md; git add -A"),
        Step("git commit --allow-empty -m '[gt-1] Nothing'"),
        Step("git commit --dry-run -a", "echo more >> docs/a.md"),
        Step("git -c core.abbrev=9 commit -am '[gt-1] Short'"),
        Step("git commit -m '[gt-1] Nowhere' nowhere.md"),
        Step("git log --format=%s%n%b -4"),
    ),
    "removing and moving": (
        Step("git rm docs/b.md"),
        Step("git rm --cached other/c.md"),
        Step("git rm -q docs/a.md", "echo more >> docs/a.md"),
        Step("git rm nowhere.md"),
        Step("git rm docs"),
        Step("git rm -f docs/a.md"),
        Step("git mv .gitignore ignored"),
        Step("git mv nowhere.md z.md"),
        Step("git commit -qm '[gt-1] Tidy'"),
        Step("git mv -v ignored docs/", "mkdir docs; echo a > docs/one.md; git add docs"),
        Step("git mv docs papers"),
        Step("git mv one.md ../other", at="papers"),
        Step("git status --short"),
        Step("git rm -r papers", "git commit -qm '[gt-1] Moved'"),
    ),
    "restoring": (
        Step("git restore docs/a.md", "echo more >> docs/a.md"),
        Step("git restore .", "echo more >> docs/a.md; rm docs/b.md; echo new > docs/new.md"),
        Step("git restore --staged docs/a.md", "echo more >> docs/a.md; git add docs"),
        Step("git restore -SW docs"),
        Step("git restore --source=HEAD~1 docs/a.md"),
        Step("git restore -s HEAD --staged --worktree -- docs/a.md"),
        Step("git restore nowhere.md"),
        Step("git restore"),
        Step("git checkout -- docs/a.md", "echo more >> docs/a.md"),
        Step("git checkout .", "echo more >> docs/a.md; rm docs/b.md"),
        Step("git checkout HEAD~1 -- docs/a.md"),
        Step("git checkout HEAD docs"),
        Step("git checkout -- nowhere.md"),
    ),
    "resetting": (
        Step("git reset", "echo more >> docs/a.md; git add docs/a.md"),
        Step("git reset docs/a.md", "git add docs/a.md"),
        Step("git reset -q HEAD -- docs/a.md", "git add docs/a.md"),
        Step("git reset --hard", "echo new > docs/new.md; git add docs/new.md"),
        Step("git reset --soft HEAD~1"),
        Step("git reset"),
        Step("git reset --hard v1"),
        Step("git reset HEAD~1"),
        Step("git reset --hard nowhere"),
        Step("git reset nowhere"),
    ),
    "branching": (
        Step("git branch aidlc/new"),
        Step("git branch aidlc/old HEAD~1"),
        Step("git branch aidlc/none nowhere"),
        Step("git branch aidlc/side"),
        Step("git branch -d aidlc/done"),
        Step("git branch -d aidlc/side"),
        Step("git branch -d aidlc/nowhere"),
        Step("git branch -D aidlc/side"),
        Step("git branch -m aidlc/old aidlc/older"),
        Step("git branch"),
        Step("git branch --show-current"),
        Step("git tag v2"),
        Step("git tag v0 HEAD~1"),
        Step("git tag -a v3 -m 'The third'"),
        Step("git tag v1"),
        Step("git tag -d v1"),
        Step("git tag -d nowhere"),
        Step("git tag -n"),
    ),
    "switching": (
        Step("git checkout aidlc/side"),
        Step("git checkout -"),
        Step("git checkout -b aidlc/new"),
        Step("git checkout -b aidlc/newer HEAD~1"),
        Step("git checkout nowhere"),
        Step("git switch aidlc/work", "echo new > docs/new.md"),
        Step("git switch -c aidlc/newest", "echo more >> docs/b.md"),
        Step("git switch aidlc/work"),
        Step("git switch aidlc/work"),
        Step("git switch aidlc/side", "git commit -qam '[gt-1] More'; rm docs/new.md"),
        Step("git switch -", "echo more >> other/c.md"),
        Step("git checkout", "echo more >> other/c.md"),
        Step("git switch --detach HEAD~1", "git checkout -q -- ."),
        Step("git checkout aidlc/side"),
        Step("git checkout HEAD~1"),
        Step("git switch nowhere"),
        Step("git switch -c aidlc/side"),
    ),
    "merging": (
        Step("git merge aidlc/done"),
        Step("git merge nowhere"),
        Step("git merge --no-ff aidlc/ahead -m '[gt-1] Bring it in'"),
        Step("git merge --ff-only aidlc/side"),
        Step("git merge --squash aidlc/side"),
        Step("git commit -m '[gt-1] Squashed'"),
        Step("git merge -m '[gt-1] Join' aidlc/side"),
        Step("git merge aidlc/ahead", "git reset -q --hard v1"),
        Step("git log --graph --format=%s"),
    ),
    "stashing": (
        Step("git stash pop"),
        Step("git stash"),
        Step("git stash", "echo more >> docs/a.md"),
        Step("git stash pop"),
        Step("git stash push -m 'for later' docs/a.md", "echo more >> docs/b.md"),
        Step("git stash list"),
        Step("git stash -u", "echo new > docs/new.md"),
        Step("git stash apply stash@{1}"),
        Step("git stash drop"),
        Step("git stash push -k", "git add docs/a.md; echo y >> docs/b.md"),
        Step("git stash show"),
        Step("git stash clear"),
        Step("git stash drop"),
    ),
    "aliases": (
        Step("git ci '[gt-1] By an alias'", "echo more >> docs/a.md"),
        Step("git st"),
        Step("git -c alias.up='add -v' up docs", "echo more >> docs/a.md"),
        Step("git nonsense"),
        Step("git last"),
    ),
}


def make_repository(path: Path) -> None:
    """Two commits on aidlc/work; beside it a branch that went another way, one that went on, one that is done.

    Each has the same ids: the words of a stash have that of its commit.
    """
    script = """
    GIT_AUTHOR_DATE='1700000000 +0100' GIT_COMMITTER_DATE='1700000000 +0100'
    export GIT_AUTHOR_DATE GIT_COMMITTER_DATE
    git init -q -b aidlc/work .
    git config core.autocrlf false
    git config alias.ci 'commit -a -m'; git config alias.st 'status --short'; git config alias.last 'log -1 --format=%s'
    mkdir docs other
    echo one > docs/a.md; echo two > docs/b.md; echo three > other/c.md; echo '*.tmp' > .gitignore
    git add -A; git commit -qm '[gt-0] The first'
    git branch aidlc/done
    git switch -qc aidlc/side; echo side > other/side.md; git add -A; git commit -qm '[gt-0] Aside'
    git switch -q aidlc/work
    printf 'one\\nand a half\\n' > docs/a.md; git commit -qam '[gt-0] The second'
    git tag v1
    git switch -qc aidlc/ahead; echo ahead > other/ahead.md; git add -A; git commit -qm '[gt-0] Ahead'
    git switch -q aidlc/work
    """
    path.mkdir(exist_ok=True)
    run_sh(script, path)


def run_sh(script: str, where: Path, programs: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script with the real git, or with what lies there instead, for somebody without a configuration."""
    plain = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C.UTF-8",
        **AUTHOR,
    }
    if programs is not None:
        plain["PATH"] = f"{programs}:{plain['PATH']}"
    return subprocess.run(
        ["sh", "-c", script],
        cwd=where,
        env=plain,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def told(text: str) -> str:
    """What was said, but for the ids of objects and for times, which differ as commits are made at other times."""
    text = re.sub(r"\b[0-9a-f]{7,40}\b", "ID", text)
    return re.sub(r"(?m)^ (Author|Date): .*\n", r" \1\n", text)


def state(repository: Path) -> dict[str, object]:
    """All that a command line may change: references by tree and message, the index, the files, the stash."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout

    refs = git("for-each-ref", "--format=%(refname)").split()
    return {
        "head": git("symbolic-ref", "-q", "HEAD") or git("log", "-1", "--format=%T %B"),
        "refs": {ref: git("log", "--topo-order", "--format=%T %B", ref, "--") for ref in refs if ref != "refs/stash"},
        "stash": git("stash", "list", "--format=%gd %T %s"),
        "index": git("ls-files", "--stage"),
        "status": git("status", "--porcelain"),
        "diff": git("diff", "HEAD"),
    }
