"""Made histories of many shapes, and what git itself makes of merging them."""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.support.git_guards import Repo

WORDS = [f"word{number}" for number in range(18)]


class Shape:
    """What a history is like."""

    def __init__(self, rng: random.Random) -> None:
        self.files = rng.choice([1, 3, 8, 20])
        self.lines = rng.choice([1, 5, 30, 80])
        self.branches = rng.choice([2, 2, 3])
        self.commits = rng.choice([3, 6, 10])
        self.crosses = rng.random() < 0.4
        self.renames = rng.random() < 0.4
        self.kinds = rng.random() < 0.3
        """Symlinks, modes, directories in place of files."""


class _State(NamedTuple):
    commit: str
    files: dict[str, tuple[str, str]]
    """Mode and content of each path."""


class _History:
    def __init__(self, repo: Repo, rng: random.Random, shape: Shape) -> None:
        self.repo, self.rng, self.shape = repo, rng, shape
        self.number = 0

    def commit(self, files: dict[str, tuple[str, str]], *parents: str) -> _State:
        lines = []
        for path, (mode, content) in files.items():
            oid = self.repo.git("hash-object", "-w", "--stdin", given=content).strip()
            lines.append(f"{mode} {oid}\t{path}")
        index = str(self.repo.root / ".git" / "made-index")
        self.repo.git("read-tree", "--empty", GIT_INDEX_FILE=index)
        self.repo.git("update-index", "--index-info", given="\n".join(lines) + "\n", GIT_INDEX_FILE=index)
        tree = self.repo.git("write-tree", GIT_INDEX_FILE=index).strip()
        self.number += 1
        date = f"{1700000000 + self.number} +0000"
        arguments = [word for parent in parents for word in ("-p", parent)]
        oid = self.repo.git("commit-tree", tree, *arguments, "-m", f"Commit {self.number}", GIT_COMMITTER_DATE=date)
        return _State(oid.strip(), files)

    def text(self) -> str:
        return "".join(
            f"{self.rng.choice(WORDS)} {number}\n" for number in range(self.rng.randint(1, self.shape.lines))
        )

    def first(self) -> _State:
        names = [f"{self.rng.choice(['', 'docs/', 'src/', 'src/deep/'])}file{n}.txt" for n in range(self.shape.files)]
        return self.commit({name: ("100644", self.text()) for name in names})

    def changed(self, state: _State, *more: str) -> _State:
        files = dict(state.files)
        for _ in range(self.rng.randint(1, 3)):
            self._change(files)
        return self.commit(files, state.commit, *more)

    def _change(self, files: dict[str, tuple[str, str]]) -> None:
        rng = self.rng
        names = sorted(files)
        kinds = ["edit"] * 6 + ["add", "delete"]
        kinds += ["rename"] * 2 if self.shape.renames else []
        kinds += ["mode", "symlink", "directory"] if self.shape.kinds else []
        kind = rng.choice(kinds) if names else "add"
        name = rng.choice(names) if names else ""
        if kind == "add":
            files.setdefault(f"new{rng.randint(0, 5)}.txt", ("100644", self.text()))
        elif kind == "edit" and files[name][0] != "120000":
            mode, content = files[name]
            lines = content.splitlines(keepends=True)
            at = rng.randrange(len(lines) + 1)
            lines[at : at + rng.randint(0, 2)] = [f"{rng.choice(WORDS)} changed {rng.randint(0, 9)}\n"]
            files[name] = (mode, "".join(lines))
        elif kind == "delete" and len(names) > 1:
            del files[name]
        elif kind == "rename":
            target = f"{rng.choice(['', 'docs/', 'other/'])}renamed{rng.randint(0, 9)}.txt"
            if target not in files:
                files[target] = files.pop(name)
        elif kind == "mode" and files[name][0] != "120000":
            files[name] = ("100755" if files[name][0] == "100644" else "100644", files[name][1])
        elif kind == "symlink":
            files[name] = ("120000", rng.choice(WORDS))
        elif kind == "directory" and not any(other.startswith(name + "/") for other in files):
            files[f"{name}/inside.txt"] = files.pop(name)


def grow(repo: Repo, rng: random.Random, shape: Shape) -> list[tuple[str, str]]:
    """Make a history, and give pairs of commits to be merged."""
    history = _History(repo, rng, shape)
    base = history.first()
    tips = [base] * shape.branches
    pairs = []
    for _ in range(shape.commits):
        which = rng.randrange(len(tips))
        tips[which] = history.changed(tips[which])
        if shape.crosses and rng.random() < 0.3:
            one, other = rng.sample(range(len(tips)), 2)
            # Each takes the other in, with a result of its own: two bases from here on.
            both = tips[one], tips[other]
            tips[one] = history.commit(both[0].files, both[0].commit, both[1].commit)
            tips[other] = history.commit(both[rng.randrange(2)].files, both[1].commit, both[0].commit)
        one, other = rng.sample(range(len(tips)), 2)
        pairs.append((tips[one].commit, tips[other].commit))
    return pairs


def merges_of(repo: Repo, ours: str, theirs: str) -> tuple[str | None, set[str]]:
    """The tree that git merges to, or None and the paths in conflict."""
    if repo.git("merge-base", ours, theirs).strip() == ours:
        return repo.tree(theirs), set()
    if repo.git("merge-base", ours, theirs).strip() == theirs:
        return repo.tree(ours), set()
    done = repo.run("merge-tree", "--write-tree", "--name-only", "--no-messages", ours, theirs)
    tree, *paths = done.stdout.splitlines()
    # Of a file where a directory is, git tells the name that it would give it.
    return (tree, set()) if done.returncode == 0 else (None, {path.split("~")[0] for path in paths})
