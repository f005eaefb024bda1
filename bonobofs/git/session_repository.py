"""The session's own `.git`: a complete repository, made from the source's when a mount begins.

It has its own refs, index, configuration and hooks. It reads the source's objects through alternates, which the mount
shows in `.bonobofs`. bonobofs copies files and runs no program that the source's repository names. The time does not
depend on the number of packed refs or tracked files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import GitError
from bonobofs.git.source_refs import BRANCHES, REMOTES, SHIM, GitDirs, find_git_dirs, read_ref, run_git
from bonobofs.state import scratch_dir
from bonobofs.state.home import session_directory
from bonobofs.state.sessions import Session, lives, read_all
from bonobofs.system.locks import lock, try_once
from bonobofs.system.paths import remove_tree

CLIENT: Final = Path(__file__).resolve().parent / "publish_client.py"
"""Program that git runs in a session to call the guard socket."""
_SERVICE_HOOKS: Final = ("post-commit", "post-merge", "post-rewrite", "post-checkout", "post-applypatch")
"""Hooks that publish after they have run the repository's own hook of the same name."""
_HOOKS: Final = (
    *(*_SERVICE_HOOKS, "applypatch-msg", "pre-applypatch", "pre-commit", "pre-merge-commit", "prepare-commit-msg"),
    *("commit-msg", "pre-rebase", "pre-push", "pre-auto-gc", "post-index-change", "reference-transaction"),
)
_IS_LEFT_TO_SHIM: Final = (
    'read -r head <"${GIT_DIR:-.git}/HEAD"; case $head in ref:*) [ "$head" = "${SHIM#* }" ] ;; esac && '
    'kill -0 "${SHIM%% *}"'.replace("SHIM", SHIM)
)
"""True in a hook if the shim runs that started git, and will publish this HEAD: a detached one, or its first branch.

A program that git has started may change to another branch, and may go on after the shim.
"""
_MOST_STORES: Final = 16
_EXTENSIONS: Final = frozenset(("objectformat", "partialclone", "noop", "preciousobjects", "worktreeconfig"))
_NOT_COPIED: Final = re.compile(r".*\.lock|(logs/)?refs/(bisect|worktree|rewritten)/.*|info/refs")
"""Lock files, and refs of one work tree and of an operation in progress there."""
_LEFT_OUT: Final = re.compile(
    r"(include|includeif|credential|alias|pager|gc|maintenance|http|user|author|committer|gpg|sendemail|safe"
    r"|uploadpack|uploadpackfilter|receive|mergetool|difftool|browser|man|web|instaweb|guitool|imap|trailer)\..*"
    r"|diff\.external|interactive\.difffilter"
    r"|core\.(fsmonitor|sshcommand|editor|pager|hookspath|gitproxy|askpass|worktree|bare|alternaterefscommand)"
    r"|sequence\.editor|commit\.(gpgsign|template)|tag\.(gpgsign|forcesignannotated)|extensions\.worktreeconfig"
    r"|remote\.source\..*|remote\..*\.(uploadpack|receivepack|vcs|proxy|proxyauthmethod)|submodule\..*\.update",
    re.IGNORECASE,
)
"""Keys that name a program, hold a secret, or are set by bonobofs.

Filters and drivers are kept and run as the agent. Without the filter of git-crypt, git would commit plain secrets.
"""


class Author(NamedTuple):
    """Committer of the session."""

    name: str
    email: str


class Owner(NamedTuple):
    """User and group of the session."""

    uid: int
    gid: int


class BuiltRepository(NamedTuple):
    """A session's repository."""

    common: str
    """Directory of the source's refs."""
    stores: tuple[str, ...]
    """Object stores of the source that it reads, in the order in which the mount shows them."""
    notes: tuple[str, ...]
    """Notes for the operator, one sentence each."""


def build(
    source: Path, git_dir: Path, author: Author, protected: Sequence[str], socket: Path, owner: Owner
) -> BuiltRepository:
    """Make the repository at `git_dir`, which must not exist. Raises GitError if the source's cannot be used.

    `protected` lists names and patterns of branches that follow the source. `socket` is the session's guard socket.
    """
    try:
        builder = _Builder(author, protected, socket)
        dirs = find_git_dirs(source)
        builder.make(dirs, git_dir, source)
        for directory, _, names in os.walk(git_dir):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                os.chown(path, *owner, follow_symlinks=False)
    except (OSError, ValueError) as error:
        raise GitError(f"the repository of {source} cannot be read: {error}", kind="unreadable") from error
    return BuiltRepository(str(dirs.common), tuple(builder.stores), tuple(builder.notes))


class _Builder:
    """Makes the repository of one session and those of its submodules."""

    def __init__(self, author: Author, protected: Sequence[str], socket: Path) -> None:
        self.stores: Final[list[str]] = []
        self.notes: Final[list[str]] = []
        self._author: Final = author
        self._protected: Final = protected
        # git runs it in a shell.
        self._client: Final = shlex.join([sys.executable, "-I", "-S", "-E", str(CLIENT), str(socket)])

    def make(self, dirs: GitDirs, git_dir: Path, source: Path | None, above: str = "../..") -> None:
        """Make a repository. `above` leads from its objects to the mount's root. A submodule has no `source`."""
        entries = configuration(dirs)
        _check(dirs, entries)
        for directory in ("objects/info", "objects/pack", "refs/heads", "refs/tags", "info", "hooks/own", "logs"):
            (git_dir / directory).mkdir(parents=True)
        self._write_config(git_dir / "config", entries, is_submodule=source is None)
        self._write_alternates(dirs.common / "objects", git_dir, above)
        _copy_all(dirs.common, git_dir, "packed-refs", "refs", "logs/refs", "info", "shallow", "description")
        shared = [path.name for path in dirs.private.glob("sharedindex.*")]
        _copy_all(dirs.private, git_dir, "HEAD", "index", *shared, "logs/HEAD", "info")
        if not os.path.lexists(git_dir / "HEAD"):
            raise GitError(f"{dirs.private} has no HEAD", kind="unreadable")
        if source is not None:
            if ("extensions.objectformat", "sha256") in entries:
                self.notes.append("Git works in this mount, but cannot publish: the repository has SHA-256 objects.")
            self._make_protected_loose(git_dir)
            self._write_hooks(dirs, git_dir / "hooks", dict(entries).get("core.hookspath", ""), source)
        modules = dirs.private / "modules"
        for module in _modules(modules):
            inner = git_dir / "modules" / module.relative_to(modules)
            self.make(GitDirs(module, module), inner, None, "../" * len(inner.relative_to(git_dir).parts) + above)

    def _write_config(self, path: Path, entries: list[tuple[str, str]], *, is_submodule: bool) -> None:
        kept = [
            (key, value)
            for key, value in entries
            if not _LEFT_OUT.fullmatch(key) or (is_submodule and key == "core.worktree")
        ]
        kept += [
            *(("core.bare", "false"), ("gc.auto", "0"), ("gc.packRefs", "false"), ("maintenance.auto", "false")),
            # Saves two FUSE requests for each object, against link and unlink.
            ("core.createObject", "rename"),
            *(("user.name", self._author.name), ("user.email", self._author.email)),
        ]
        if not is_submodule:
            kept += [
                ("remote.source.url", "/bonobofs/source"),
                ("remote.source.receivepack", f"{self._client} receive-pack"),
                ("remote.source.uploadpack", f"{self._client} upload-pack"),
                ("remote.source.fetch", "+refs/heads/*:refs/remotes/source/*"),
                ("remote.source.skipFetchAll", "true"),
            ]
        write_config(path, kept)

    def _write_alternates(self, store: Path, git_dir: Path, above: str) -> None:
        lines = []
        for each in all_stores(store):
            if each not in self.stores:
                self.stores.append(each)
            number = self.stores.index(each)
            lines.append(f"{above}/.bonobofs/objects{f'-{number}' if number else ''}\n")
        if len(self.stores) > _MOST_STORES:
            raise GitError(f"it reads more than {_MOST_STORES} object stores", kind="unsupported")
        (git_dir / "objects/info/alternates").write_text("".join(lines))

    def _make_protected_loose(self, git_dir: Path) -> None:
        """Write a loose ref for each packed protected branch. The mount replaces it when the source's branch moves."""
        packed = read_regular_file(git_dir / "packed-refs") or b""
        for pattern in self._protected:
            for name, value in _packed_branches(packed, pattern):
                path = git_dir / "refs/heads" / name
                if not os.path.lexists(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(value + b"\n")

    def _write_hooks(self, dirs: GitDirs, git_dir: Path, hooks_path: str, source: Path) -> None:
        """Copy the repository's hooks, or call those of core.hooksPath in place. Publication runs after them.

        git runs hooks at the top of the work tree.
        """
        for name in _HOOKS:
            found = source / Path(hooks_path).expanduser() / name if hooks_path else dirs.common / "hooks" / name
            own = ""
            if hooks_path or found.is_symlink():
                found = Path(os.path.normpath(found) if hooks_path else os.path.realpath(found))
                own = shlex.quote(os.path.relpath(found, source) if source in found.parents else str(found))
            elif _copy(found, git_dir / "own" / name):
                own = f'"${{0%/*}}/own/{name}"'
            lines = [f'if [ -x {own} ]; then {own} "$@" || status=$?; fi'] if own else []
            publish = f'{{ {_IS_LEFT_TO_SHIM}; }} 2>/dev/null || {self._client} publish {name} "$@" </dev/null'
            lines += [publish] if name in _SERVICE_HOOKS else []
            if lines:
                (git_dir / name).write_text("\n".join(["#!/bin/sh", *lines, "exit ${status:-0}", ""]))
                (git_dir / name).chmod(0o755)


def configuration(dirs: GitDirs) -> list[tuple[str, str]]:
    """Return (key, value) of the repository's own files, in order. Keys are lower case except the subsection."""
    entries: list[tuple[str, str]] = []
    for file in (dirs.common / "config", dirs.private / "config.worktree"):
        if file.name == "config" or (("extensions.worktreeconfig", "true") in entries and file.exists()):
            content = read_regular_file(Path(os.path.realpath(file)))
            if content is None:
                raise GitError(f"{file} is no file", kind="unreadable")
            entries += _parse_configuration(content)
    return entries


@lru_cache(maxsize=4)  # a mount needs the same file three times
def _parse_configuration(content: bytes) -> tuple[tuple[str, str], ...]:
    """Return (key, value) of a git configuration file. Raises GitError."""
    words = ("config", "--file", "-", "--no-includes", "--list", "-z")
    listed = os.fsdecode(run_git(*words, data=content, kind="unreadable"))
    pairs = (item.partition("\n") for item in listed.split("\0") if item)
    return tuple((key, value if newline else "true") for key, newline, value in pairs)


def _check(dirs: GitDirs, entries: list[tuple[str, str]]) -> None:
    """Raise GitError if the repository uses a format or extension that a session does not support."""
    for key, value in entries:
        section, _, name = key.partition(".")
        if key == "extensions.refstorage" and value.lower() != "files":
            raise GitError(
                f"it keeps its refs as {value}; migrate it: git refs migrate --ref-format=files", kind="refs"
            )
        if section == "extensions" and name not in (*_EXTENSIONS, "refstorage"):
            raise GitError(f"it uses the extension {name}, which the service does not know", kind="unsupported")
    for name in ("refs", "objects"):
        if not stat.S_ISDIR(os.lstat(dirs.common / name).st_mode):
            raise GitError(f"{dirs.common / name} is a symlink; make it a directory", kind="unsupported")


def write_config(path: Path, entries: Sequence[tuple[str, str]]) -> None:
    """Write a git configuration file with these (key, value) entries."""

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t") + '"'

    lines = []
    for key, value in entries:
        section, _, rest = key.partition(".")
        subsection, _, name = rest.rpartition(".")
        lines.append(f"[{section} {quoted(subsection)}]" if subsection else f"[{section}]")
        lines.append(f"\t{name} = {quoted(value)}")
    path.write_text("\n".join([*lines, ""]), encoding="utf-8", errors="surrogateescape")


def all_stores(store: Path) -> list[str]:
    """Return an object store and its alternates, recursively and without duplicates."""
    found = [os.path.realpath(store)]
    for each in found:  # grows during the loop
        for line in os.fsdecode(read_regular_file(Path(each, "info/alternates")) or b"").splitlines():
            real = os.path.realpath(os.path.join(each, line))
            if line and not line.startswith("#") and real not in found and os.path.isdir(real):
                found.append(real)
    return found


def _packed_branches(packed: bytes, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, value) of the branches in a packed-refs file that match a pattern.

    The file is sorted and may hold a million refs. Only refs with the literal prefix of the pattern are parsed.
    """
    beginning = b" refs/heads/" + os.fsencode(re.split(r"[*?[]", pattern, maxsplit=1)[0])
    start, end = packed.find(beginning), packed.rfind(beginning)
    lines = packed[packed.rfind(b"\n", 0, start) + 1 : packed.find(b"\n", end)].splitlines() if start >= 0 else []
    for line in lines:
        value, _, name = line.partition(b" refs/heads/")
        if name and fnmatchcase(os.fsdecode(name), pattern):
            yield os.fsdecode(name), value


def _modules(directory: Path) -> Iterator[Path]:
    """Yield the repositories of submodules, without those of nested submodules."""
    for path in sorted(directory.iterdir()) if directory.is_dir() and not directory.is_symlink() else ():
        if (path / "HEAD").exists():
            yield path
        else:
            yield from _modules(path)


def _copy_all(root: Path, target: Path, *names: str) -> None:
    """Copy files and directories. Copy a symlink only if its target is relative and has no `..`."""
    for name in names:
        top = root / name
        for path in files(top) if top.is_dir() and not top.is_symlink() else [top]:
            shown = path.relative_to(root)
            if _NOT_COPIED.fullmatch(str(shown)) or not os.path.lexists(path):
                continue
            (target / shown).parent.mkdir(parents=True, exist_ok=True)
            if not path.is_symlink():
                _copy(path, target / shown)
            elif not (text := path.readlink()).is_absolute() and ".." not in text.parts:
                (target / shown).symlink_to(text)


def files(directory: Path) -> Iterator[Path]:
    """Yield every file and symlink below a directory."""
    for above, directories, names in os.walk(directory):
        links = (name for name in directories if os.path.islink(os.path.join(above, name)))
        yield from (Path(above, name) for name in (*names, *links))


def _no_symlink(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def read_regular_file(path: Path) -> bytes | None:
    """Return the content of a file, or None if it is missing or a symlink. We may have more rights than the session."""
    try:
        with open(path, "rb", opener=_no_symlink) as stream:
            return stream.read()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None


def _copy(path: Path, target: Path) -> bool:
    """Copy a file with its times. Return False if it does not exist.

    git compares file times with the time of the index, so the copy of an index must keep its time.
    """
    try:
        with open(path, "rb", opener=_no_symlink) as original, open(target, "wb") as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
            st = os.fstat(original.fileno())
            os.fchmod(copy.fileno(), 0o755 if st.st_mode & 0o100 else 0o644)
    except FileNotFoundError:
        return False
    os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))
    return True


_NOTE: Final = "bonobofs.json"
_STASH: Final = "refs/stash"
_OPERATIONS: Final = {
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase or am",
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "BISECT_LOG": "a bisect",
}
"""Operation, by the file or directory that git keeps while it is in progress."""
_ARMED: Final = (".git", "config", "config.worktree", "commondir", "gitdir", "hooks", "objects/info/alternates", _NOTE)


class Kept(NamedTuple):
    """A session's repository that was kept after its end."""

    session: str
    agent: str
    source: str
    place: str
    branches: dict[str, int]
    """{branch or other ref: number of commits that neither the source nor a remote-tracking branch has}.

    -1 is unknown, "HEAD" a detached HEAD, and an object id the detached HEAD of a linked work tree.
    """
    stashes: int
    operations: list[str]
    modules: dict[str, dict[str, int]] = {}  # noqa: RUF012 - never changed
    """`branches` of submodules, by directory below `place`. "refs/stash" has the number of its entries."""

    def __str__(self) -> str:
        """Describe its content and how to fetch from it."""
        works = {"": self.branches | ({_STASH: self.stashes} if self.stashes else {}), **self.modules}
        held = [
            f"{name}{f' of {directory}' if directory else ''} ({'entries' if name == _STASH else 'commits'}: "
            f"{'unknown' if count < 0 else count})"
            for directory, work in works.items()
            for name, count in work.items()
        ]
        commands = [
            shlex.join(["git", "fetch", os.path.normpath(os.path.join(self.place, directory)), *work])
            for directory, work in works.items()
            if work
        ]
        place = shlex.quote(self.place)
        return (
            f"kept: the repository of {self.agent}'s session {self.session[:8]} on {self.source}, with "
            f"{', '.join([*held, *self.operations])}; to fetch from it: "
            f"{'; '.join(commands) or f'git fetch {place} HEAD'}; to drop it: rm -r {place}"
        )


def keep_ended(home: Path) -> list[Kept]:
    """Keep or remove the repository of every ended session. Return those that this call has kept."""
    found = []
    for session in read_all(home)[0]:
        directory = session_directory(home, session.session)
        if not os.path.exists(f"{directory}/{scratch_dir.REPOSITORY}") or lives(session):
            continue
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock(fd, retry=try_once)
            if (directory / scratch_dir.REPOSITORY).exists():
                kept = _kept(home, session, directory / scratch_dir.REPOSITORY)
                found += [kept] if kept is not None else []
                if kept is None:
                    remove_tree(fd, os.fsencode(scratch_dir.REPOSITORY))
        except BlockingIOError:
            pass  # another process is at it
        finally:
            os.close(fd)
    return found


def all_kept(home: Path) -> list[Kept]:
    """Settle ended sessions, then return every kept repository that still exists, sorted by session."""
    keep_ended(home)
    found = []
    for path in sorted((home / "kept").glob(f"*/{_NOTE}")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Kept(**json.loads(path.read_bytes())))
    return found


def operations_in_progress(git_dir: Path) -> list[str]:
    """Return the operations that git has begun and not ended, as `a merge`."""
    return [operation for name, operation in _OPERATIONS.items() if os.path.lexists(git_dir / name)]


def _kept(home: Path, session: Session, git_dir: Path) -> Kept | None:
    """Move the repository to `kept/`, or return None if neither it nor a submodule has work of its own."""
    works, operations = dict[str, dict[str, int]](), list[str]()
    for repository, common in _disarm(git_dir, Path(session.source)).items():
        name = os.path.relpath(repository, git_dir)
        stashes = len(_stashes(repository) - _stashes(common))
        works[name] = _own_work(repository, common) | ({_STASH: stashes} if stashes else {})
        within = "" if repository == git_dir else f" in {name}"
        operations += [f"{operation} in progress{within}" for operation in operations_in_progress(repository)]
    if not any(works.values()) and not operations:
        return None
    branches, target = works.pop("."), home / "kept" / session.session
    stashes, modules = branches.pop(_STASH, 0), {name: work for name, work in works.items() if work}
    kept = Kept(session.session, session.agent, session.source, str(target), branches, stashes, operations, modules)
    (git_dir / _NOTE).write_text(json.dumps(kept._asdict()))
    target.parent.mkdir(mode=0o700, exist_ok=True)
    os.rename(git_dir, target)
    return kept


def _disarm(git_dir: Path, source: Path) -> dict[Path, Path]:
    """Remove hooks and configuration of the agent, also from every repository inside. chown to root if we are root.

    The repository has no symlink that leads out of it, because the mount refuses those.

    Returns: {repository: directory of the refs of its counterpart in the source}.
    """
    dirs, found = GitDirs(source / ".git", source / ".git"), dict[Path, Path]()
    with contextlib.suppress(OSError, GitError):  # if the source is gone, every tip of the session is kept
        dirs = find_git_dirs(source)
    for above, directories, names in os.walk(git_dir):
        repository, entries = Path(above), {*directories, *names}
        if repository != git_dir and not ("HEAD" in entries and entries & {"objects", "commondir"}):
            continue
        for path in (repository / name for name in _ARMED):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if repository == git_dir or "objects" in entries:
            common = dirs.common if repository == git_dir else dirs.private / repository.relative_to(git_dir)
            _configure_kept(repository, common)
            found[repository] = common
    for above, _, names in os.walk(git_dir) if os.geteuid() == 0 else ():
        for each in (above, *(os.path.join(above, name) for name in names)):
            os.chown(each, 0, 0, follow_symlinks=False)
    git_dir.chmod(0o700)
    return found


def _configure_kept(repository: Path, common: Path) -> None:
    """Write configuration and alternates that depend on the source alone."""
    entries, stores = list[tuple[str, str]](), list[str]()
    with contextlib.suppress(OSError, ValueError, GitError):
        entries = [pair for pair in configuration(GitDirs(common, common)) if pair[0].startswith("extensions.")]
        stores = all_stores(common / "objects")
    version = ("core.repositoryformatversion", "1" if entries else "0")
    fetchable = ("uploadpack.allowAnySHA1InWant", "true")
    write_config(repository / "config", [version, ("core.bare", "true"), fetchable, *entries])
    for path in (repository / "objects", repository / "objects/info"):
        if path.is_symlink() or not path.is_dir():  # damaged by the agent
            path.unlink(missing_ok=True)
            path.mkdir()
    (repository / "objects/info/alternates").write_bytes(os.fsencode("".join(f"{store}\n" for store in stores)))


def _own_work(git_dir: Path, common: Path) -> dict[str, int]:
    """Return {ref: number of unpublished commits} of the refs and detached HEADs that may be the session's own."""
    objects = git_dir / "objects"
    loose = {path.parent.name + path.name for path in objects.glob("[0-9a-f][0-9a-f]/*")}
    packs = any(objects.glob("pack/*.pack"))
    if not loose and not packs:
        return {}
    theirs = set[tuple[str, str]]()
    with contextlib.suppress(GitError):  # without the source, every tip is the session's own
        theirs = _refs(common)
    try:
        found = {name: tip for tip, name in _refs(git_dir) - theirs if not name.startswith((REMOTES, _STASH))}
    except GitError:  # the agent damaged it
        return {"HEAD": -1}
    for path in (git_dir / "HEAD", *git_dir.glob("worktrees/*/HEAD")):
        tip = (read_regular_file(path) or b"").decode(errors="replace").strip()
        if re.fullmatch("[0-9a-f]{40,64}", tip):
            found["HEAD" if path.parent == git_dir else tip] = tip
    own = {name.removeprefix(BRANCHES): tip for name, tip in sorted(found.items()) if packs or tip in loose}
    return {name: count for name, tip in own.items() if (count := _missing(git_dir, tip))}


def _refs(git_dir: Path) -> set[tuple[str, str]]:
    """Return (object id, name) of every ref. Raises GitError."""
    lines = os.fsdecode(run_git(f"--git-dir={git_dir}", "for-each-ref", "--format=%(objectname) %(refname)"))
    # A name may have characters at which `splitlines` splits.
    return {(tip, name) for tip, _, name in (line.partition(" ") for line in filter(None, lines.split("\n")))}


def _missing(git_dir: Path, tip: str) -> int:
    """Return the number of commits that neither the source nor a remote-tracking branch has, or -1 if git fails."""
    others = ("--not", "--alternate-refs", "--exclude=source/*", "--remotes")
    try:
        return int(run_git(f"--git-dir={git_dir}", "rev-list", "--count", tip, *others))
    except (GitError, ValueError):
        return -1


def _stashes(repository: Path) -> set[bytes]:
    """Return the commits of the stash, whose newest one has no entry if the log was removed."""
    log = read_regular_file(repository / "logs" / _STASH) or b""
    newest = os.fsencode(read_ref(repository, _STASH))
    return {line.split(b" ")[1] for line in log.splitlines() if line.count(b" ") > 1} | {newest} - {b""}
