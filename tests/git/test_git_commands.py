"""Every git command line in a mount does what it does in a plain copy of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.git.stories import STORIES, Story
from tests.support.world import Mounted

POLICY: Final = 'default = "allow"\nhidden = ["**"]\n[git]\nbranch_prefix = ""\nmessage_pattern = "."\n'
"""Admits every file and every branch that is not protected."""
OPERATOR: Final = {
    "GIT_AUTHOR_NAME": "Olga",
    "GIT_AUTHOR_EMAIL": "olga@example.org",
    "GIT_COMMITTER_NAME": "Olga",
    "GIT_COMMITTER_EMAIL": "olga@example.org",
}
THROUGH_THE_SHIM: Final = (
    "status",
    "log",
    "add",
    "add -p",
    "add of an ignored file",
    "commit --amend",
    "commit with an editor",
    "rm",
    "mv",
    "restore",
    "reset --hard",
    "clean",
    "revert with a conflict",
    "switch",
    "switch with changes",
    "checkout",
    "branch",
    "merge",
    "merge with a conflict",
    "merge --abort",
    "rebase",
    "rebase with a conflict",
    "rebase -i edit",
    "rebase --exec",
    "cherry-pick with a conflict",
    "stash",
    "stash push",
    "stash with a conflict",
    "am",
    "bisect",
    "config",
    "commit on main",
    "branch -D main",
)
"""Stories that also run with the session's own git first on PATH."""


class Ran(NamedTuple):
    code: int
    output: str
    errors: str


def base_environment(home: Path, second: int = 0) -> dict[str, str]:
    """The environment of both sides: no configuration of the machine, fixed times."""
    return {
        "PATH": os.defpath,
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_DATE": f"{1_700_000_000 + second} +0000",
        "GIT_COMMITTER_DATE": f"{1_700_000_000 + second} +0000",
        "GIT_TERMINAL_PROMPT": "0",
    }


def run(line: str, directory: Path, environment: Mapping[str, str]) -> Ran:
    """Run a line of sh and capture what it prints."""
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=120,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def copy_repository(template: Path, source: Path, origin: Path) -> None:
    """Copy what `make_repository` has made as `template`/source and `template`/origin.git."""
    shutil.copytree(template / "origin.git", origin, symlinks=True)
    shutil.copytree(template / "source", source, symlinks=True, dirs_exist_ok=True)
    for name in ("config", "FETCH_HEAD"):
        file = source / ".git" / name
        file.write_text(file.read_text().replace(str(template / "origin.git"), str(origin)))
    assert run("git update-index --refresh", source, base_environment(source.parent)).code == 0


def make_repository(source: Path, origin: Path) -> None:
    """Make a repository with branches that merge, branches that conflict, tags, a remote and an ignored directory."""
    environment = {**base_environment(source.parent), **OPERATOR}
    second = 0

    def sh(line: str) -> None:
        nonlocal second
        second += 1
        done = run(line, source, {**environment, **dict.fromkeys(_DATES, f"{1600000000 + second} +0000")})
        assert done.code == 0, (line, done)

    source.mkdir(exist_ok=True)
    sh("git init -q -b main . && printf 'one\\ntwo\\nthree\\n' > README.md && echo 'ignored/' > .gitignore")
    sh("mkdir src docs bin && echo guide > docs/guide.md")
    sh("echo 'app = 1' > src/app.py && echo 'util = 1' > src/util.py")
    sh("printf '#!/bin/sh\\n' > bin/run.sh && chmod +x bin/run.sh && ln -s README.md link")
    sh("git add -A && git commit -q -m 'First'")
    sh("echo 'app = 2' >> src/app.py && git commit -q -a -m 'Second'")
    sh("git tag light && git tag -a v1 -m 'The first version'")
    sh("git switch -q -c feature && echo f > feature.txt && git add . && git commit -q -m 'A feature'")
    sh("echo g >> feature.txt && git commit -q -am 'More of it'")
    sh("git switch -q -c conflicting main && sed -i s/one/theirs/ README.md && git commit -q -am 'Theirs'")
    sh("git switch -q main && echo 'util = 3' >> src/util.py && git commit -q -am 'Third'")
    sh("echo four >> README.md && git commit -q -am 'Fourth'")
    sh(f"git clone -q --bare . {origin} && git remote add origin {origin}")
    sh(f"git -C {origin} branch remote-branch v1^0 && git -C {origin} config gc.auto 0")
    sh("git fetch -q origin && git branch -q -u origin/main")


_DATES: Final = ("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE")


def state(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What a repository and its work tree hold, without the ids of commits."""
    printed = run(f" && printf %s '{_CUT}' && ".join(_STATE.values()), directory, environment)
    assert printed.code == 0, printed
    found = dict(zip(_STATE, printed.output.split(_CUT), strict=True))
    found["history"] = _without_ids(found["history"])
    found["refs"] = "\n".join(
        line for line in found["refs"].splitlines() if not line.startswith("refs/remotes/source/")
    )
    found["files"] = "\n".join(sorted(_files(directory)))
    found["under way"] = " ".join(sorted(name for name in _UNDER_WAY if (directory / ".git" / name).exists()))
    return found


def _without_ids(history: str) -> str:
    """Each commit by its tree and subject, with the trees of its parents."""
    commits = [line.split("|", 3) for line in history.splitlines()]
    trees = {oid: tree for oid, tree, _, _ in commits}
    return "\n".join(
        sorted(
            f"{tree} {subject} {[trees[parent] for parent in parents.split()]}" for _, tree, parents, subject in commits
        )
    )


_CUT: Final = "--cut--"
_STATE: Final = {
    "head": "(git symbolic-ref -q HEAD || git log -1 --format=%T-%s)",
    "refs": "refs=$(git for-each-ref --format='%(refname) %(objecttype) %(tree)%(*tree) %(contents:subject)')"
    ' && echo "$refs"',
    "history": "git log --all --format='%H|%T|%P|%s'",
    "index": "git ls-files -s",
    "status": "git status --porcelain --ignored",
    "stash": "case $refs in *refs/stash*) git stash list --format=%gs ;; esac",
}
_UNDER_WAY: Final = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "BISECT_LOG", "rebase-merge", "rebase-apply")


def _files(directory: Path) -> list[str]:
    found = []
    for place, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if name != ".git"]
        for name in names:
            path = Path(place, name)
            mode = "x" if not path.is_symlink() and os.access(path, os.X_OK) and path.stat().st_mode & 0o100 else "-"
            content = os.readlink(path) if path.is_symlink() else path.read_text(errors="surrogateescape")
            found.append(f"{mode} {path.relative_to(directory)} {content!r}")
    return found


class Pair:
    """One repository twice: as a session's mount, and as a plain copy."""

    def __init__(self, mounted: Mounted, template: Path, tmp_path: Path, *, shim: bool) -> None:
        self.source, self.plain = tmp_path / "source", tmp_path / "plain"
        self.homes = (tmp_path / "home-mount", tmp_path / "home-plain")
        for home in self.homes:
            home.mkdir()
        copy_repository(template, self.source, tmp_path / "origin.git")
        copy_repository(template, self.plain, tmp_path / "plain-origin.git")
        self.world = mounted(policy=POLICY, source=self.source)
        self._shim = self.world.home / "sessions" / self.world.session.session / "inside" if shim else None
        self._seconds = 0
        identity = {key: self.mount(f"git config {key}").output.strip() for key in ("user.name", "user.email")}
        assert all(identity.values()), "the session's repository names the agent"
        for key, value in identity.items():
            self.plainly(f"git config {key} '{value}'")

    def mount(self, line: str) -> Ran:
        environment = base_environment(self.homes[0], self._seconds)
        if self._shim is not None:
            environment["PATH"] = f"{self._shim / 'bin'}:{environment['PATH']}"
            environment["BONOBOFS_SOCKET"] = str(self._shim / "guard.sock")
        return run(line, self.world.path, environment)

    def plainly(self, line: str) -> Ran:
        return run(line, self.plain, base_environment(self.homes[1], self._seconds))

    def states(self) -> tuple[dict[str, str], dict[str, str]]:
        return (
            state(self.world.path, base_environment(self.homes[0])),
            state(self.plain, base_environment(self.homes[1])),
        )

    def compare(self, story: Story) -> None:
        for number, line in enumerate(story.lines):
            self._seconds += 1
            ours, real = self.mount(line), self.plainly(line)
            said = f"{line}\n--- mount\n{ours.output}{ours.errors}\n--- plain\n{real.output}{real.errors}"
            if story.refused and number == len(story.lines) - 1:
                assert real.code == 0, f"a plain clone refuses it too: {said}"
                assert ours.code != 0, f"the mount admits what it must refuse: {said}"
                return
            assert ours.code == real.code, said
            if story.reads:
                assert self._neutral(ours.output) == self._neutral(real.output), said
            if not story.reads or number == len(story.lines) - 1:
                mine, theirs = self.states()
                assert mine == theirs, said

    def _neutral(self, output: str) -> str:
        """The output without the places of the two repositories."""
        output = output.replace("/plain-origin.git", "/origin.git")
        for place in (self.world.path, self.source, self.plain):
            output = output.replace(str(place), "PLACE")
        return output


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository and its origin, which each story copies."""
    directory = tmp_path_factory.mktemp("template")
    make_repository(directory / "source", directory / "origin.git")
    return directory


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", STORIES)
def test_git_works_in_a_mount_as_in_a_plain_copy(name: str, mounted: Mounted, template: Path, tmp_path: Path) -> None:
    """With the system's git and an empty environment."""
    Pair(mounted, template, tmp_path, shim=False).compare(STORIES[name])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", THROUGH_THE_SHIM)
def test_the_session_git_works_as_in_a_plain_copy(name: str, mounted: Mounted, template: Path, tmp_path: Path) -> None:
    Pair(mounted, template, tmp_path, shim=True).compare(STORIES[name])
