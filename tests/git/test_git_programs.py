"""Programs that use git through a library, hooks or a terminal work on the session's repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.git.test_git_commands import POLICY, base_environment, make_repository, run
from tests.support.world import ROOT, Mounted, World
from tests.workflows.terminal import Terminal

TOOLS: Final = Path(os.environ.get("BONOBOFS_TOOLS", ROOT / ".venv-tools")) / "bin"

GITPYTHON: Final = """\
import git
repo = git.Repo(".")
repo.git.switch("-c", "work")
open("new.txt", "w").write("new\\n")
repo.index.add(["new.txt"])
made = repo.index.commit("By GitPython")
assert not repo.is_dirty() and repo.head.commit == made
repo.git.merge("feature", no_edit=True)
assert len(repo.head.commit.parents) == 2
repo.create_tag("marked")
repo.head.reset("HEAD~1", working_tree=True)
"""
PYGIT2: Final = """\
import pygit2
repo = pygit2.Repository(".")
branch = repo.branches.local.create("work", repo.head.peel(pygit2.Commit))
repo.checkout(branch)
open("new.txt", "w").write("new\\n")
repo.index.add("new.txt")
repo.index.write()
who = repo.default_signature
repo.create_commit("HEAD", who, who, "By pygit2", repo.index.write_tree(), [repo.head.target])
assert repo.status() == {}, repo.status()
repo.merge(repo.branches.local["feature"].target)
parents = [repo.head.target, repo.branches.local["feature"].target]
repo.create_commit("HEAD", who, who, "Merged", repo.index.write_tree(), parents)
repo.state_cleanup()
"""
DULWICH: Final = """\
from dulwich import porcelain
porcelain.branch_create(".", "work")
porcelain.update_head(".", "work")
open("new.txt", "w").write("new\\n")
porcelain.add(".", ["new.txt"])
porcelain.commit(".", message=b"By dulwich")
assert not any(porcelain.status(".").staged.values())
"""
VISUAL_STUDIO_CODE: Final = (
    "git rev-parse --show-toplevel --git-dir --git-common-dir",
    "git -c core.longpaths=true status -z -uall",
    "git config --get commit.template || true",
    "git for-each-ref --sort -committerdate --format '%(refname)%00%(objectname)%00%(*objectname)' refs/heads",
    "git checkout -q -b work --no-track main",
    "printf more >> README.md && git add -A -- .",
    "git diff --cached --name-status -z --diff-filter=ADMR --submodule=short",
    "printf 'From the editor\\n' | git -c user.useConfigOnly=true commit --quiet --file -",
    "git log --format=%H%n%aN%n%aE%n%at%n%ct%n%P%n%D%n%B -z -n50 --shortstat --topo-order",
    "git show --textconv HEAD:README.md",
    "git ls-files --stage -- README.md && git cat-file -s HEAD:README.md",
    "printf 'staged' | git hash-object --stdin -w --path README.md",
    "git update-index --cacheinfo 100644 $(printf staged | git hash-object --stdin) README.md",
    "git reset -q HEAD -- . && git clean -f -q -- . && git checkout -q -- .",
    "git stash push -m note || true",
    "git merge --no-edit feature && git reset --soft HEAD~1 && git reset -q --hard",
    "git blame --root --incremental -- README.md >/dev/null",
)


@pytest.fixture
def world(mounted: Mounted, tmp_path: Path) -> World:
    make_repository(tmp_path / "project", tmp_path / "origin.git")
    return mounted(policy=POLICY, source=tmp_path / "project")


def check(world: World, line: str) -> str:
    done = run(line, world.path, {**base_environment(world.home), "PATH": os.environ["PATH"]})
    assert done.code == 0, (line, done)
    return done.output


def by_python(world: World, program: str, python: Path) -> None:
    done = subprocess.run(
        [python, "-c", program],
        cwd=world.path,
        env={**base_environment(world.home), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def assert_sound(world: World) -> None:
    """The session's repository and the source's are whole, and the work tree is clean."""
    check(world, "git fsck --strict --no-dangling")
    assert check(world, "git status --porcelain") == ""
    assert run("git fsck --strict --no-dangling", world.source, base_environment(world.home)).code == 0


@pytest.mark.parametrize("program", [GITPYTHON, DULWICH], ids=["GitPython", "dulwich"])
def test_python_git_libraries_work(program: str, world: World) -> None:
    by_python(world, program, TOOLS / "python")
    assert_sound(world)


def test_libgit2_works(world: World) -> None:
    by_python(world, PYGIT2, Path(sys.executable))
    assert_sound(world)


def test_the_command_lines_of_visual_studio_code_work(world: World) -> None:
    for line in VISUAL_STUDIO_CODE:
        check(world, line)
    assert_sound(world)


def test_pre_commit_installs_its_hook_and_stops_a_commit(world: World) -> None:
    """A local hook that fails stops the commit, and one that passes does not."""
    config = "repos: [{repo: local, hooks: [{id: no-tabs, name: no tabs, language: pygrep, entry: tab, files: txt}]}]\n"
    check(world, "git switch -q -c work")
    (world.path / ".pre-commit-config.yaml").write_text(config)
    pre_commit = TOOLS / "pre-commit"
    check(world, f"git add -A && {pre_commit} install")
    check(world, "git commit -q -m 'Add the hook'")
    check(world, "echo tab > bad.txt && git add bad.txt && ! git commit -q -m 'Bad'")
    check(world, "echo fine > bad.txt && git add bad.txt && git commit -q -m 'Good'")
    assert_sound(world)


def test_tig_shows_and_stages(world: World) -> None:
    """tig at a terminal: the log, then the status view, in which `u` stages a file."""
    check(world, "git switch -q -c work && echo more >> README.md")
    environment = {**base_environment(world.home), "PATH": os.environ["PATH"], "TERM": "xterm"}
    terminal = Terminal(["tig", "status"], world.path, environment)
    try:
        terminal.wait("README.md")
        terminal.type("jjjju")
        terminal.wait("README.md")
        terminal.type("q")
        terminal.end()
    finally:
        terminal.close()
    assert "README.md" in check(world, "git diff --cached --name-only")
