"""A repository as the gate has it: found, seen to be one that can be guarded, its objects read and written.

libgit2 keeps the objects and merges; it runs no program that a repository names (hooks, filters, drivers, monitors,
signers), and opens no file of the working tree for us: the directory with `.git` in it is all that it is given. What is
in the working tree is read and written by `worktree`, beneath the workspace.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from hashlib import sha1
from pathlib import Path
from typing import Final, NamedTuple

import pygit2
from pygit2.enums import ObjectType, RepositoryOpenFlag

from bonobofs.errors import GitError
from bonobofs.guards.git.modes import SUBMODULE, TREE
from bonobofs.guards.git.refs import HEADS, TAGS, Refs, is_name
from bonobofs.state.worktrees import behind, shown

# Whose the repository is matters to those who would run what it says. The operator has named this one, and none of it
# is run.
pygit2.settings.owner_validation = False


class Blob(NamedTuple):
    """What a tree or an index says of one path."""

    mode: int
    oid: bytes


class Difference(NamedTuple):
    """A path that two trees have differently; None: that tree does not have it."""

    path: bytes
    old: Blob | None
    new: Blob | None


class Layout(NamedTuple):
    """Where the parts of a repository lie."""

    root: Path
    """The top of the working tree."""
    git: Path
    """What `.git` is or leads to."""
    common: Path
    """The same, or what it shares with other worktrees."""


def _unsupported(message: str) -> GitError:
    return GitError(message, kind="unsupported")


def find(root: Path, home: Path) -> Layout:
    """The repository whose working tree is `root` itself. GitError: there is none, or none that can be guarded.

    `home` is the state directory.
    """
    dot = root / ".git"
    try:
        status = os.lstat(dot)
    except FileNotFoundError:
        raise GitError(f"{root} is not the top of a git repository", kind="no-repository") from None
    if stat.S_ISLNK(status.st_mode):
        raise _unsupported(".git is a symlink; make it a file with `gitdir: PATH` in it, or the directory itself")
    git = dot if stat.S_ISDIR(status.st_mode) else _led_to(home, root, dot)
    common = git
    if (git / "commondir").exists():
        common = Path(os.path.realpath(git / _line(git / "commondir")))
        back = git / "gitdir"
        if not back.exists() or os.path.realpath(git / _line(back)) != str(shown(home, root) / ".git"):
            raise _unsupported(
                "the worktree's `.git` and its repository do not name each other; run `git worktree repair`"
            )
    for directory in (git, common):
        if directory != dot and directory.is_relative_to(root) and not directory.is_relative_to(dot):
            raise _unsupported("the repository lies in its own working tree, where it could be written to")
    for part in (common / "objects", common / "refs"):
        if not stat.S_ISDIR(_kind(part)):
            raise _unsupported(f"{part.name} of the repository is missing or a symlink")
    for part in (git / "index", git / "HEAD", git / "logs", common / "logs", common / "packed-refs", common / "config"):
        if stat.S_ISLNK(_kind(part)):
            raise _unsupported(f"{part.name} of the repository is a symlink, which the gate does not follow")
    return Layout(root, git, common)


def _kind(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _line(path: Path) -> str:
    return os.fsdecode(path.read_bytes()).rstrip("\r\n")


def _led_to(home: Path, root: Path, dot: Path) -> Path:
    text = _line(dot)
    if not text.startswith("gitdir: "):
        raise _unsupported(".git is a file that names no repository")
    git = behind(home, root, Path(os.path.realpath(root / text.removeprefix("gitdir: "))))
    if not git.is_dir():
        raise GitError(f"the repository {git}, which .git names, is not there", kind="no-repository")
    return git


class Repository:
    """One look at a repository; each operation takes a new one, so that nothing old is remembered."""

    def __init__(self, layout: Layout) -> None:
        """GitError: what the repository is made of is not known here."""
        self.layout: Final = layout
        self.written: Final[set[bytes]] = set()
        """The objects that were kept, those too that were there before."""
        _check_format(layout)
        try:
            flags = RepositoryOpenFlag.NO_SEARCH | RepositoryOpenFlag.NO_DOTGIT | RepositoryOpenFlag.BARE
            self.store: Final = pygit2.Repository(str(layout.git), flags)
        except (pygit2.GitError, KeyError, ValueError) as error:
            raise _unsupported(f"the repository cannot be opened: {error}") from error
        # Not what core.worktree says. Only names are matched with attributes and ignored by it.
        self.store.workdir = str(layout.root)
        self._shallow: Final = _shallow(layout)
        config = self.store.config
        self.settings: Final = Settings(config)
        self.refs: Final = Refs(
            layout.git, layout.common, logs=self.settings.flag("core.logallrefupdates", default=True)
        )

    def close(self) -> None:
        self.store.free()

    def write(self, kind: ObjectType, content: bytes) -> bytes:
        """Keep an object, and give its id."""
        oid = bytes(self.store.write(kind, content).raw)
        self.written.add(oid)
        return oid

    def id_of(self, content: bytes) -> bytes:
        """The id that a blob has, kept or not."""
        return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).digest()

    def write_blob(self, content: bytes) -> bytes:
        return self.write(ObjectType.BLOB, content)

    def write_tree(self, content: bytes) -> bytes:
        return self.write(ObjectType.TREE, content)

    def read(self, oid: bytes, kind: ObjectType) -> bytes:
        """The content of an object. GitError: it is missing, or another kind of object."""
        found = self._read(oid)
        if found is None:
            raise GitError(f"the object {oid.hex()} is missing; `git fsck` says more", kind="not-found")
        if found[0] != kind:
            raise GitError(f"the object {oid.hex()} is no {kind.name.lower()}", kind="unsupported")
        return found[1]

    def _read(self, oid: bytes) -> tuple[int, bytes] | None:
        try:
            kind, content = self.store.read(pygit2.Oid(raw=oid))[:2]
        except KeyError:
            return None
        except pygit2.GitError as error:
            raise GitError(f"the object {oid.hex()} cannot be read: {error}", kind="unsupported") from error
        return int(kind), content

    def blob(self, oid: bytes) -> bytes:
        return self.read(oid, ObjectType.BLOB)

    def tree_of(self, commit: str | None) -> bytes | None:
        """The tree of a commit; None of none."""
        return None if commit is None else bytes.fromhex(self.commit(commit)["tree"])

    def commit(self, oid: str) -> _Commit:
        """A commit, taken apart; in a shallow clone the history ends where that does."""
        commit = _parsed(self.read(bytes.fromhex(oid), ObjectType.COMMIT))
        if oid in self._shallow:
            commit.parents = []
        return commit

    def entries(self, tree: bytes | None) -> dict[bytes, Blob]:
        """What lies directly in a tree, by name."""
        found: dict[bytes, Blob] = {}
        if tree is None:
            return found
        content = self.read(tree, ObjectType.TREE)
        at = 0
        while at < len(content):
            space, end = content.index(b" ", at), content.index(b"\0", at)
            found[content[space + 1 : end]] = Blob(int(content[at:space], 8), content[end + 1 : end + 21])
            at = end + 21
        return found

    def lookup(self, tree: bytes | None, path: bytes) -> Blob | None:
        """What a tree has under a path, if that is no directory."""
        found = None
        names = path.split(b"/")
        for depth, name in enumerate(names):
            found = self.entries(tree).get(name)
            if found is None or (found.mode == TREE) != (depth < len(names) - 1):
                return None
            tree = found.oid
        return found

    def walk(self, tree: bytes | None, prefix: bytes = b"") -> Iterator[tuple[bytes, Blob]]:
        """All that is below a tree and is no directory, by path."""
        for name, blob in self.entries(tree).items():
            if blob.mode == TREE:
                yield from self.walk(blob.oid, prefix + name + b"/")
            else:
                yield prefix + name, blob

    def differences(self, old: bytes | None, new: bytes | None, prefix: bytes = b"") -> Iterator[Difference]:
        """The paths that two trees have differently. Nothing is taken for renamed."""
        if old == new:
            return
        before, after = self.entries(old), self.entries(new)
        for name in sorted(before.keys() | after.keys()):
            was, now = before.get(name), after.get(name)
            if was == now:
                continue
            path = prefix + name
            directories = [each.oid if each is not None and each.mode == TREE else None for each in (was, now)]
            if any(directories):
                yield from self.differences(directories[0], directories[1], path + b"/")
            files = [each if each is not None and each.mode != TREE else None for each in (was, now)]
            if any(files):
                yield Difference(path, files[0], files[1])

    def edited(self, tree: bytes | None, edits: Mapping[bytes, Blob | None]) -> bytes:
        """A tree with some paths set, or taken out where they are None."""
        return self._edited(tree, edits) or self.write_tree(b"")

    def _edited(self, tree: bytes | None, edits: Mapping[bytes, Blob | None]) -> bytes | None:
        entries = self.entries(tree)
        below: dict[bytes, dict[bytes, Blob | None]] = {}
        for path, blob in edits.items():
            name, slash, rest = path.partition(b"/")
            if slash:
                below.setdefault(name, {})[rest] = blob
            elif blob is not None:
                entries[name] = blob
            elif name in entries and entries[name].mode != TREE:
                del entries[name]
        for name, inner in below.items():
            there = entries.get(name)
            if there is not None and there.mode != TREE:
                if all(blob is None for blob in inner.values()):
                    continue
                there = None
            made = self._edited(there.oid if there is not None else None, inner)
            if made is None:
                entries.pop(name, None)
            else:
                entries[name] = Blob(TREE, made)
        if not entries:
            return None
        # git's order: a directory is where its name with a slash would be.
        names = sorted(entries, key=lambda name: name + b"/" if entries[name].mode == TREE else name)
        return self.write_tree(b"".join(b"%o %s\0%s" % (entries[name].mode, name, entries[name].oid) for name in names))

    def find_commit(self, name: str) -> str:
        """The commit that a hexadecimal id, a full name of a ref, HEAD, or a branch's or tag's name stands for."""
        oid = None
        if len(name) == 40 and set(name) <= set("0123456789abcdef"):
            oid = name
        elif is_name(name):
            wanted = (name,) if name.startswith("refs/") or name == "HEAD" else (HEADS + name, TAGS + name)
            oid = next(filter(None, map(self.refs.resolve, wanted)), None)
        for _ in range(5):
            found = None if oid is None else self._read(bytes.fromhex(oid))
            if found is None or oid is None:
                break
            if found[0] == ObjectType.COMMIT:
                return oid
            if found[0] != ObjectType.TAG:
                break
            oid = found[1].split(b"\n", 1)[0].removeprefix(b"object ").decode("ascii", "replace")
        raise GitError(f"there is no commit {name!a}", kind="not-found")

    def is_ancestor(self, old: str, new: str) -> bool:
        """Whether the history of `new` holds `old`."""
        return old == new or bool(self.store.descendant_of(new, old))

    def elsewhere(self) -> dict[str, Path]:
        """The branches that other worktrees of the repository are on."""
        found: dict[str, Path] = {}
        others = [self.layout.common] if self.layout.common != self.layout.git else []
        with_worktrees = self.layout.common / "worktrees"
        if with_worktrees.is_dir():
            others += [path for path in with_worktrees.iterdir() if path != self.layout.git]
        for git in others:
            if git == self.layout.common and self.settings.flag("core.bare", default=False):
                continue
            try:
                text = _line(git / "HEAD")
            except OSError:
                continue
            if text.startswith(f"ref: {HEADS}"):
                found[text.removeprefix(f"ref: {HEADS}")] = git
        return found


class Settings:
    """What the configuration of git says, read as data: the operator's and the repository's, but nothing to be run."""

    def __init__(self, config: pygit2.Config) -> None:
        self._config: Final = config

    def text(self, key: str) -> str | None:
        try:
            return str(self._config[key])
        except (KeyError, ValueError, pygit2.GitError):
            return None

    def flag(self, key: str, *, default: bool) -> bool:
        try:
            return bool(self._config.get_bool(key)) if key in self._config else default
        except (ValueError, pygit2.GitError):
            return default


class _Commit(dict[str, str]):
    """The headers of a commit; `parents` and `message` beside them."""

    parents: list[str]
    message: str


def _parsed(content: bytes) -> _Commit:
    head, _, message = content.partition(b"\n\n")
    commit = _Commit()
    commit.parents = []
    for line in head.split(b"\n"):
        key, _, value = line.partition(b" ")
        text = value.decode("utf-8", "surrogateescape")
        if key == b"parent":
            commit.parents.append(text)
        elif key:
            commit.setdefault(key.decode("ascii", "replace"), text)
    encoding = commit.get("encoding", "utf-8")
    try:
        commit.message = message.decode(encoding)
    except (LookupError, UnicodeDecodeError):
        commit.message = message.decode("utf-8", "surrogateescape")
    return commit


def _shallow(layout: Layout) -> frozenset[str]:
    try:
        return frozenset((layout.common / "shallow").read_text("ascii", "replace").split())
    except FileNotFoundError:
        return frozenset()


def _check_format(layout: Layout) -> None:
    """GitError, in clear words, for what libgit2 would refuse in its own, or would misread."""
    try:
        config = pygit2.Config(str(layout.common / "config"))
    except (pygit2.GitError, OSError) as error:
        raise _unsupported(f"the repository's configuration cannot be read: {error}") from error
    settings = Settings(config)
    form = settings.text("extensions.objectformat")
    if form not in (None, "sha1"):
        raise _unsupported(f"the repository keeps its objects by {form}; the gate knows SHA-1 alone")
    if settings.text("extensions.refstorage") not in (None, "files"):
        raise _unsupported("the repository keeps its refs in a reftable; the gate knows files alone")
    if settings.text("extensions.partialclone") is not None:
        raise _unsupported("the repository is a partial clone, whose missing objects only git itself can fetch")
    if layout.git == layout.common and settings.flag("core.bare", default=False):
        raise _unsupported("the repository is bare: it has no working tree")


def is_submodule(blob: Blob | None) -> bool:
    return blob is not None and blob.mode == SUBMODULE
