"""Repository of the source, opened with libgit2 without running its programs or reading a user's configuration."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import pygit2
from pygit2.enums import ObjectType, Option

from bonobofs.errors import GitError
from bonobofs.git.branch_rules import BranchRules
from bonobofs.git.source_refs import BRANCHES, ENVIRONMENT, REMOTES, TREE, find_common_dir, run_git
from bonobofs.policy.request import HEAD_BYTES

_MOST_TREES: Final = 2000
"""Number of cached trees."""
_ID_BYTES: Final = 20
_LARGE: Final = 16 << 20
"""Blob size in bytes from which `git cat-file`, which streams, reads the first bytes."""


class Entry(NamedTuple):
    """Entry of a tree."""

    mode: int
    oid: str


class TreeDifference(NamedTuple):
    """Path that differs between two trees. None means that the tree does not have it."""

    path: bytes
    old: Entry | None
    new: Entry | None


class GitRepository:
    """Objects and refs of one repository."""

    def __init__(self, git_dir: Path, objects: Iterable[Path] = ()) -> None:
        """Open `git_dir`. `objects` are further object directories. Raises GitError if libgit2 cannot read it."""
        _prepare()
        self.git_dir: Final = git_dir
        try:
            self.raw: Final = pygit2.Repository(str(git_dir), pygit2.enums.RepositoryOpenFlag.NO_SEARCH)
        except (pygit2.GitError, KeyError) as error:
            raise GitError(f"the repository cannot be read: {error}", kind="unreadable") from error
        for directory in objects:
            self.raw.odb.add_disk_alternate(str(directory))
        self.common_dir: Final = find_common_dir(git_dir)
        self._entries: Final = lru_cache(_MOST_TREES)(self._read_tree)
        self._objects: Final = [self.common_dir / "objects", *objects]

    def target(self, ref: str) -> str:
        """Return the object id of a ref, or "" if it does not exist. Raises GitError if it is symbolic."""
        try:
            found = self.raw.references[ref]
        except (KeyError, pygit2.InvalidSpecError):
            return ""
        if not isinstance(found.target, pygit2.Oid):
            raise GitError(f"{ref} is a symbolic reference", kind="symbolic")
        return str(found.target)

    def exists(self, ref: str) -> bool:
        return self.raw.references.get(ref) is not None

    def has_remote(self, name: str) -> bool:
        """True if the repository has refs of a remote with this name."""
        return any(ref.startswith(f"{REMOTES}{name}/") for ref in self.raw.references)

    def protected_tips(self, rules: BranchRules) -> list[str]:
        """Return the tips of the protected branches, without duplicates."""
        names: Iterable[str] = rules.protected_branches
        if any(set("*?[") & set(name) for name in names):
            prefixed = (ref for ref in self.raw.references.iterator() if ref.name.startswith(BRANCHES))
            names = [ref.name[len(BRANCHES) :] for ref in prefixed if rules.protects(ref.name[len(BRANCHES) :])]
        found = (self._resolved(BRANCHES + name) for name in names)
        return list(dict.fromkeys(tip for tip in found if tip))

    def heads(self, limit: int = 10_000) -> list[str]:
        """Return the tips of at most `limit` branches."""
        refs = (ref for ref in self.raw.references.iterator() if ref.name.startswith(BRANCHES))
        found = (
            str(ref.target) for _, ref in zip(range(limit), refs, strict=False) if isinstance(ref.target, pygit2.Oid)
        )
        return [oid for oid in dict.fromkeys(found) if self.commit(oid) is not None]

    def _resolved(self, ref: str) -> str:
        try:
            return str(self.raw.references[ref].resolve().target)
        except (KeyError, pygit2.GitError, pygit2.InvalidSpecError):
            return ""

    def has(self, oid: str) -> bool:
        """Return whether the repository has an object. False for an invalid id."""
        try:
            return pygit2.Oid(hex=oid) in self.raw.odb
        except ValueError:
            return False

    def commit(self, oid: str) -> pygit2.Commit | None:
        """Return the commit with this id, or None if it is missing or not a commit."""
        try:
            found: object = self.raw[pygit2.Oid(hex=oid)]
        except (KeyError, ValueError, pygit2.GitError):
            return None
        return found if isinstance(found, pygit2.Commit) else None

    def bytes_of(self, oid: str) -> bytes:
        """Return an object without its header. Raises GitError if it is missing or damaged."""
        try:
            return bytes(self.raw.odb.read(pygit2.Oid(hex=oid))[1])
        except (KeyError, ValueError, pygit2.GitError) as error:
            raise GitError(f"object {oid} cannot be read", kind="damaged") from error

    def new_commits(self, tip: str, excluded: Iterable[str], limit: int) -> list[str]:
        """Return the commits that `tip` reaches and `excluded` does not, parents first, at most `limit + 1`."""
        walk = self.raw.walk(pygit2.Oid(hex=tip), pygit2.enums.SortMode.TOPOLOGICAL | pygit2.enums.SortMode.REVERSE)
        for each in excluded:
            walk.hide(pygit2.Oid(hex=each))
        found = []
        for commit in walk:
            found.append(str(commit.id))
            if len(found) > limit:
                break
        return found

    def merge_bases(self, first: str, second: str) -> tuple[str, ...]:
        """Return all best common ancestors. Raises GitError if git cannot list them."""
        best: object = self.raw.merge_base(pygit2.Oid(hex=first), pygit2.Oid(hex=second))
        if best is None or str(best) in (first, second):
            return () if best is None else (str(best),)
        # libgit2 finds one of them. git is not run if that one is an end, because then it is the only one.
        command = ("merge-base", "--all", first, second)
        return tuple(run_git(*command, environment=self._environment(), kind="damaged").decode("ascii").split())

    def reaches(self, tip: str, commit: str) -> bool:
        """True if `commit` is `tip` or an ancestor of it."""
        return tip == commit or self.raw.descendant_of(pygit2.Oid(hex=tip), pygit2.Oid(hex=commit))

    def differences(self, old: str, new: str) -> Iterator[TreeDifference]:
        """Yield the differences of two commits. "" stands for an empty commit."""
        yield from self._compare(b"", self._tree(old), self._tree(new))

    def _compare(self, above: bytes, old: str, new: str) -> Iterator[TreeDifference]:
        before, after = self._entries(old), self._entries(new)
        for name in sorted(before.keys() | after.keys()):
            ends = before.get(name), after.get(name)
            if ends[0] == ends[1]:
                continue
            trees = ["" if each is None or each.mode != TREE else each.oid for each in ends]
            leaves = [None if each is None or each.mode == TREE else each for each in ends]
            if any(leaves):
                yield TreeDifference(above + name, leaves[0], leaves[1])
            if any(trees):
                yield from self._compare(above + name + b"/", trees[0], trees[1])

    def _tree(self, commit: str) -> str:
        found = self.commit(commit) if commit else None
        return "" if found is None else str(found.tree_id)

    def _read_tree(self, oid: str) -> dict[bytes, Entry]:
        """Return the entries of a tree with their stored modes, or {} for "". Raises GitError if it is damaged."""
        data, at = self.bytes_of(oid) if oid else b"", 0
        found: dict[bytes, Entry] = {}
        while at < len(data):
            end = data.index(b"\0", at)
            mode, _, name = data[at:end].partition(b" ")
            at = end + 1 + _ID_BYTES
            found[name] = Entry(int(mode, 8), data[end + 1 : at].hex())
        return found

    def entry(self, commit: str, path: bytes) -> Entry | None:
        """Return the entry of a commit at `path`, or None if it is missing or a directory."""
        found = self._find(commit, path)
        return None if found is None or found.mode == TREE else found

    def is_directory(self, commit: str, path: bytes) -> bool:
        found = self._find(commit, path)
        return found is not None and found.mode == TREE

    def _find(self, commit: str, path: bytes) -> Entry | None:
        found: Entry | None = Entry(TREE, self._tree(commit))
        for name in path.split(b"/"):
            if found is None or found.mode != TREE:
                return None
            found = self._entries(found.oid).get(name)
        return found

    def size(self, oid: str) -> int:
        """Return the size of a blob in bytes. Raises GitError if it is missing or not a blob."""
        try:
            kind, size = self.raw.odb.read_header(pygit2.Oid(hex=oid))
        except (KeyError, ValueError, pygit2.GitError) as error:
            raise GitError(f"object {oid} cannot be read", kind="damaged") from error
        if kind != ObjectType.BLOB:
            raise GitError(f"object {oid} is no blob", kind="damaged")
        return int(size)

    def first_bytes(self, oid: str) -> bytes:
        """Return the first HEAD_BYTES bytes of a blob. Raises GitError if it cannot be read."""
        if self.size(oid) < _LARGE:
            return self.bytes_of(oid)[:HEAD_BYTES]
        command = ["git", "-c", "core.bigFileThreshold=1m", "cat-file", "blob", oid]
        with subprocess.Popen(
            command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        ) as running:
            assert running.stdout is not None
            head = running.stdout.read(HEAD_BYTES)
            running.kill()
        if len(head) < HEAD_BYTES:
            raise GitError(f"object {oid} cannot be read", kind="damaged")
        return head

    def _environment(self) -> dict[str, str]:
        """Return the environment in which git reads the repository and the further object directories."""
        first, *others = map(str, self._objects)
        alternates = {"GIT_OBJECT_DIRECTORY": first, "GIT_ALTERNATE_OBJECT_DIRECTORIES": ":".join(others)}
        return {**ENVIRONMENT, "GIT_DIR": str(self.git_dir), **alternates}

    def fingerprint(self, oid: str) -> str:
        """Return a digest of a commit's change against its first parent. Line numbers do not affect it."""
        commit = self.commit(oid)
        if commit is None:
            return ""
        parents = commit.parents
        diff = self.raw.diff(parents[0], commit) if parents else commit.tree.diff_to_tree(swap=True)
        digest = sha256()
        for patch in diff:
            assert patch is not None
            delta = patch.delta
            ends = (delta.old_file, delta.new_file)
            parts: list[object] = [(end.raw_path, int(end.mode)) for end in ends]
            if delta.is_binary:
                parts += [str(end.id) for end in ends]
            parts += [(line.origin, line.raw_content) for hunk in patch.hunks for line in hunk.lines]
            digest.update(repr(parts).encode())
        return digest.hexdigest()

    def move_refs(self, updates: Mapping[tuple[str, str, str], str], committer: tuple[str, str]) -> None:
        """Move all refs or none. Raises GitError if another process moved a ref or holds its lock.

        `updates` has the message for the reflog of each (ref, old, new), `committer` the name and e-mail address.
        """
        source = pygit2.Repository(str(self.git_dir), pygit2.enums.RepositoryOpenFlag.NO_SEARCH)
        source.set_ident(*committer)
        try:
            with source.transaction() as transaction:
                for ref, _, _ in updates:
                    transaction.lock_ref(ref)
                for (ref, old, new), message in updates.items():
                    found = source.references.get(ref)
                    if ("" if found is None else str(found.target)) != old:
                        raise GitError(f"{ref} was moved by another process; publish again", kind="moved")
                    if new:
                        transaction.set_target(ref, pygit2.Oid(hex=new), message=message)
                    else:
                        transaction.remove(ref)
        except (pygit2.GitError, ValueError, KeyError) as error:
            raise GitError(f"the branch cannot be moved: {error}", kind="busy") from error

    def has_submodule_commit(self, oid: str) -> bool:
        """True if the source or one of its submodules has the commit."""
        if oid in self.raw:
            return True
        modules = self.common_dir / "modules"
        return any(directory.is_dir() and oid in pygit2.Odb(str(directory)) for directory in modules.glob("**/objects"))


def _prepare() -> None:
    """Limit libgit2 to the repository's own configuration. Let it open repositories of other users."""
    for level in (1, 2, 3, 4):  # programdata, system, xdg, global
        pygit2.option(Option.SET_SEARCH_PATH, level, "")
    pygit2.option(Option.SET_OWNER_VALIDATION, False)
    pygit2.option(Option.SET_EXTENSIONS, ["partialclone", "worktreeconfig", "relativeworktrees"], 3)
