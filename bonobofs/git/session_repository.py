"""The session's own `.git`: a complete repository, made from that of the source when a mount begins.

It has refs, index, configuration and hooks of its own. Its objects are read from the source, through the object stores
that the mount shows in `.bonobofs`. It is built from files: no program runs that the source's repository names, and the
time does not depend on the number of packed refs or tracked files.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import GitError

CLIENT: Final = Path(__file__).resolve().parent / "client.py"
"""The program that git runs in a session to reach the session's service."""
SERVICE_HOOKS: Final = ("post-commit", "post-merge", "post-rewrite", "post-checkout", "post-applypatch")
"""Hooks that publish, after the repository's own hook of the same name."""
_OTHER_HOOKS: Final = (
    *("applypatch-msg", "pre-applypatch", "pre-commit", "pre-merge-commit", "prepare-commit-msg", "commit-msg"),
    *("pre-rebase", "pre-push", "pre-auto-gc", "post-index-change", "reference-transaction", "sendemail-validate"),
)
_SECONDS: Final = 20
_MOST_STORES: Final = 16
_MOST_LOGS: Final = 5_000
"""Reflogs that are copied; those of HEAD, of the current branch and of the stash always are."""
_EXTENSIONS: Final = frozenset(
    ("objectformat", "partialclone", "noop", "noop-v1", "preciousobjects", "worktreeconfig", "compatobjectformat")
)
_OWN_REFS: Final = ("refs/bisect", "refs/worktree", "refs/rewritten")
"""Refs that belong to one work tree and to an operation in progress there."""
_LEFT_OUT: Final = re.compile(
    r"(include|includeif|credential|alias|pager|gc|maintenance|http|user|author|committer|gpg|sendemail|safe"
    r"|uploadpack|uploadpackfilter|receive|mergetool|difftool|browser|man|web|instaweb|guitool|imap|trailer)\..*"
    r"|diff\.external|interactive\.difffilter"
    r"|core\.(fsmonitor|sshcommand|editor|pager|hookspath|gitproxy|askpass|worktree|bare|alternaterefscommand)"
    r"|sequence\.editor|commit\.(gpgsign|template)|tag\.(gpgsign|forcesignannotated)|extensions\.worktreeconfig"
    r"|remote\.source\..*|remote\..*\.(uploadpack|receivepack|vcs|proxy|proxyauthmethod)|submodule\..*\.update",
    re.IGNORECASE,
)
"""Keys that name a program, hold a secret, or are the service's own.

Filters and drivers stay and run as the agent: without the filter of git-crypt, a secret would be committed as it is.
"""


class Author(NamedTuple):
    """Who commits in the session."""

    name: str
    email: str


class Owner(NamedTuple):
    """The session's user."""

    uid: int
    gid: int


class Built(NamedTuple):
    """A session's repository."""

    common: str
    """The directory in which the source's repository has its refs."""
    stores: tuple[str, ...]
    """The object stores of the source that it reads, in the order in which the mount shows them."""


class Places(NamedTuple):
    """Where a repository of the source keeps its files."""

    private: Path
    """HEAD and index of the work tree."""
    common: Path
    """Configuration, refs and objects."""


def build(source: Path, place: Path, author: Author, protected: Sequence[str], socket: Path, owner: Owner) -> Built:
    """Make the repository at `place`, which does not exist. GitError: the source's cannot be served, and why.

    `protected` are names and patterns of branches that follow the source. `socket` is the session's guard socket.
    """
    try:
        maker = _Maker(author, protected, socket)
        places = find(source)
        maker.make(places, place, source)
        for directory, _, names in os.walk(place):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                os.chown(path, *owner, follow_symlinks=False)
    except OSError as error:
        raise GitError(f"the repository of {source} cannot be read: {error}", kind="unreadable") from error
    return Built(str(places.common), tuple(maker.stores))


def find(source: Path) -> Places:
    """Where the repository is whose work tree has its top at `source`. GitError, OSError."""
    private = source / ".git"
    if private.is_file():
        text = private.read_text(encoding="utf-8", errors="surrogateescape")
        if not text.startswith("gitdir: "):
            raise GitError(f"{private} is a file, and names no repository", kind="unreadable")
        private = source / text.removeprefix("gitdir: ").rstrip("\n")
    private = Path(os.path.realpath(private))
    common = private
    if (private / "commondir").exists():
        common = private / (private / "commondir").read_text(encoding="utf-8", errors="surrogateescape").rstrip("\n")
    return Places(private, Path(os.path.realpath(common)))


class _Maker:
    """Makes one session's repository, and those of its submodules."""

    def __init__(self, author: Author, protected: Sequence[str], socket: Path) -> None:
        self.stores: Final[list[str]] = []
        self._author: Final = author
        self._protected: Final = protected
        self._socket: Final = socket

    def make(self, places: Places, place: Path, source: Path | None, above: str = "../..") -> None:
        """Make one at `place`. `above` leads from its objects to the root of the mount; submodules have no `source`."""
        entries = configuration(places)
        _check(places, entries)
        for directory in ("objects/info", "objects/pack", "refs/heads", "refs/tags", "info", "hooks"):
            (place / directory).mkdir(parents=True)
        hooks_path = next((value for key, value in reversed(entries) if key == "core.hookspath"), "")
        self._write_config(place / "config", entries, is_submodule=source is None)
        self._write_alternates(places.common / "objects", place, above)
        _copy_refs(places, place, self._protected if source is not None else ())
        _copy_state(places, place)
        if source is not None:
            self._write_hooks(places, place / "hooks", hooks_path, source)
        modules = places.private / "modules"
        for module in sorted(_modules(modules)):
            inner = place / "modules" / module.relative_to(modules)
            depth = "../" * len(inner.relative_to(place).parts)
            self.make(Places(module, module), inner, None, depth + above)

    def _write_config(self, path: Path, entries: list[tuple[str, str]], *, is_submodule: bool) -> None:
        kept = [
            (key, value)
            for key, value in entries
            if not _LEFT_OUT.fullmatch(key) or (is_submodule and key == "core.worktree")
        ]
        kept += [
            *(("core.bare", "false"), ("gc.auto", "0"), ("gc.packRefs", "false"), ("maintenance.auto", "false")),
            *(("user.name", self._author.name), ("user.email", self._author.email)),
        ]
        if not is_submodule:
            kept += [
                ("remote.source.url", "/bonobofs/source"),
                ("remote.source.receivepack", f"{_command(self._socket)} receive-pack"),
                ("remote.source.uploadpack", f"{_command(self._socket)} upload-pack"),
                ("remote.source.fetch", "+refs/heads/*:refs/remotes/source/*"),
                ("remote.source.skipFetchAll", "true"),
            ]
        path.write_text(config_text(kept), encoding="utf-8", errors="surrogateescape")

    def _write_alternates(self, store: Path, place: Path, above: str) -> None:
        lines = []
        for each in all_stores(store):
            if each not in self.stores:
                self.stores.append(each)
            number = self.stores.index(each)
            lines.append(f"{above}/.bonobofs/objects{f'-{number}' if number else ''}\n")
        if len(self.stores) > _MOST_STORES:
            raise GitError(f"it reads more than {_MOST_STORES} object stores", kind="unsupported")
        (place / "objects/info/alternates").write_text("".join(lines))

    def _write_hooks(self, places: Places, place: Path, hooks_path: str, source: Path) -> None:
        """Copy the repository's hooks, or run those of core.hooksPath where they lie; the service's own come after."""
        own = {name: shlex.quote(path) for name, path in _hooks_elsewhere(places, hooks_path, source).items()}
        if not hooks_path:
            for name in names(places.common / "hooks"):
                if name not in own and not name.endswith(".sample") and name in (*SERVICE_HOOKS, *_OTHER_HOOKS):
                    copied = place / (f"{name}.own" if name in SERVICE_HOOKS else name)
                    if _copy(places.common / "hooks" / name, copied) and name in SERVICE_HOOKS:
                        own[name] = f'"${{0%/*}}/{name}.own"'
        for name in (*SERVICE_HOOKS, *own):
            lines = ["#!/bin/sh", "# bonobofs wrote this hook."]
            if name in SERVICE_HOOKS:
                if name in own:
                    lines.append(f'status=0; if [ -x {own[name]} ]; then {own[name]} "$@" || status=$?; fi')
                client = shlex.quote(str(CLIENT))
                lines.append(f'if [ -e {client} ]; then {_command(self._socket)} publish {name} "$@" </dev/null; fi')
                lines.append(f"exit {'$status' if name in own else '0'}")
            else:
                lines.append(f'if [ -x {own[name]} ]; then exec {own[name]} "$@"; fi')
            (place / name).write_text("\n".join(lines) + "\n")
            (place / name).chmod(0o755)


def _command(socket: Path) -> str:
    """The command line of the client, without its word, for a shell."""
    return shlex.join([sys.executable, "-I", "-S", "-E", str(CLIENT), str(socket)])


def _hooks_elsewhere(places: Places, hooks_path: str, source: Path) -> dict[str, str]:
    """Hooks that are run where they lie, by name. Git runs hooks at the top of the work tree.

    A directory that core.hooksPath names may have other hooks on another branch, so that every name counts.
    """

    def shown(path: Path) -> str:
        return os.path.relpath(path, source) if source in path.parents else str(path)

    if hooks_path:
        directory = Path(os.path.normpath(source / Path(hooks_path).expanduser()))
        return {name: shown(directory / name) for name in (*SERVICE_HOOKS, *_OTHER_HOOKS)}
    hooks = places.common / "hooks"
    return {
        name: shown(Path(os.path.realpath(hooks / name)))
        for name in (*SERVICE_HOOKS, *_OTHER_HOOKS)
        if (hooks / name).is_symlink()
    }


def configuration(places: Places) -> list[tuple[str, str]]:
    """Every key and value of the repository's own files, in order; a key in lower case but for its subsection."""
    entries = _entries(places.common / "config")
    if ("extensions.worktreeconfig", "true") in entries and (places.private / "config.worktree").exists():
        entries += _entries(places.private / "config.worktree")
    return entries


def plain_environment() -> dict[str, str]:
    """The environment of a git that reads no configuration but that of its repository."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }


def _entries(path: Path) -> list[tuple[str, str]]:
    try:
        listed = subprocess.run(
            ["git", "config", "--file", path, "--no-includes", "--list", "-z"],
            cwd="/",
            env=plain_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_SECONDS,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git config cannot run: {error}", kind="missing") from error
    if listed.returncode != 0:
        raise GitError(f"its configuration cannot be read: {os.fsdecode(listed.stderr).strip()}", kind="unreadable")
    pairs = [item.partition("\n") for item in os.fsdecode(listed.stdout).split("\0") if item]
    return [(key, value if newline else "true") for key, newline, value in pairs]


def _check(places: Places, entries: list[tuple[str, str]]) -> None:
    """GitError: git can read the repository, and the session cannot have one like it."""
    for key, value in entries:
        section, _, name = key.partition(".")
        if key == "extensions.refstorage" and value.lower() != "files":
            raise GitError(
                f"it keeps its refs as {value}; migrate it: git refs migrate --ref-format=files", kind="refs"
            )
        if section == "extensions" and name not in (*_EXTENSIONS, "refstorage"):
            raise GitError(f"it uses the extension {name}, which the service does not know", kind="unsupported")
        if key == "core.repositoryformatversion" and value not in ("0", "1"):
            raise GitError(f"its format has version {value}, which the service does not know", kind="unsupported")
    for name in ("refs", "objects"):
        if not stat.S_ISDIR(os.lstat(places.common / name).st_mode):
            raise GitError(f"{places.common / name} is a symlink; make it a directory", kind="unsupported")


def config_text(entries: list[tuple[str, str]]) -> str:
    lines: list[str] = []
    last = ""
    for key, value in entries:
        section, _, rest = key.partition(".")
        subsection, _, name = rest.rpartition(".")
        heading = f"[{section}]"
        if subsection:
            heading = f'[{section} "{_escaped(subsection)}"]'
        if heading != last:
            lines.append(heading)
            last = heading
        text = _escaped(value).replace("\n", "\\n").replace("\t", "\\t")
        lines.append(f'\t{name} = "{text}"')
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def all_stores(store: Path) -> Iterator[str]:
    """An object store, and those that it reads further objects from, each once."""
    waiting, seen = [store], set[str]()
    while waiting:
        real = os.path.realpath(waiting.pop(0))
        if real in seen:
            continue
        seen.add(real)
        yield real
        listed = content(Path(real, "info/alternates"))
        lines = os.fsdecode(listed or b"").splitlines()
        named = (Path(real, line) for line in lines if line and not line.startswith("#"))
        waiting += [path for path in named if path.is_dir()]


def _copy_refs(places: Places, place: Path, protected: Sequence[str]) -> None:
    """Copy packed refs as a file, loose refs one by one, and make every protected branch loose."""
    packed = content(places.common / "packed-refs")
    if packed is not None:
        (place / "packed-refs").write_bytes(packed)
        for pattern in protected:
            for name, value in _packed_branches(packed, pattern):
                _write_ref(place / "refs/heads" / name, value)
    for path in files(places.common / "refs"):
        name = os.path.relpath(path, places.common)
        if name.endswith(".lock") or name.startswith(tuple(f"{own}/" for own in _OWN_REFS)):
            continue
        text = _linked_value(path, places.common / "refs") if path.is_symlink() else content(path)
        if text:
            _write_ref(place / name, text.strip())


def _linked_value(path: Path, refs: Path) -> bytes | None:
    """The content that git finds in a ref that is a symlink: a symbolic ref, or that of another ref."""
    text = os.readlink(path)
    if text.startswith("refs/"):
        return f"ref: {text}".encode(errors="surrogateescape")
    real = Path(os.path.realpath(path))
    return content(real) if refs in real.parents else None


def _write_ref(path: Path, value: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(value + b"\n")


def _packed_branches(packed: bytes, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Names and values of the branches that a pattern matches, in a packed-refs file, which is in order of the names.

    It may hold a million refs, of which only those are looked at that begin as the pattern does.
    """
    beginning = b" refs/heads/" + os.fsencode(re.split(r"[*?[]", pattern, maxsplit=1)[0])
    start, end = packed.find(beginning), packed.rfind(beginning)
    if start < 0:
        return
    begin, stop = packed.rfind(b"\n", 0, start) + 1, packed.find(b"\n", end)
    for line in packed[begin : stop if stop >= 0 else len(packed)].splitlines():
        value, _, name = line.partition(b" refs/heads/")
        if name and fnmatchcase(os.fsdecode(name), pattern):
            yield os.fsdecode(name), value


def _copy_state(places: Places, place: Path) -> None:
    """Copy HEAD, the index, reflogs and what else describes the work tree and its history."""
    head = places.private / "HEAD"
    if head.is_symlink():
        (place / "HEAD").write_text(f"ref: {head.readlink()}\n")
    elif not _copy(head, place / "HEAD"):
        raise GitError(f"{head} is missing", kind="unreadable")
    for name in names(places.private):
        if name == "index" or (name.startswith("sharedindex.") and not name.endswith(".lock")):
            _copy(places.private / name, place / name)
    for name in ("shallow", "description"):
        _copy(places.common / name, place / name)
    for directory in {places.common / "info": None, places.private / "info": None}:
        for name in names(directory):
            if name != "refs" and not name.endswith(".lock"):
                _copy(directory / name, place / "info" / name)
    _copy_logs(places, place)


def _copy_logs(places: Places, place: Path) -> None:
    current = (content(place / "HEAD") or b"").removeprefix(b"ref: ").strip()
    first = [places.common / "logs/refs/stash", places.common / "logs" / os.fsdecode(current)]
    logs = [path for path in first if path.is_file()]
    for path in files(places.common / "logs/refs"):
        if len(logs) >= _MOST_LOGS:
            break
        logs.append(path)
    for path in logs:
        copied = place / path.relative_to(places.common)
        if not str(path.relative_to(places.common / "logs")).startswith(_OWN_REFS):
            copied.parent.mkdir(parents=True, exist_ok=True)
            _copy(path, copied)
    (place / "logs").mkdir(exist_ok=True)
    _copy(places.private / "logs/HEAD", place / "logs/HEAD")


def _modules(directory: Path) -> Iterator[Path]:
    """Repositories of submodules. Those of a submodule's own submodules belong to it."""
    for name in names(directory):
        path = directory / name
        if path.is_symlink() or not path.is_dir():
            continue
        if (path / "HEAD").exists():
            yield path
        else:
            yield from _modules(path)


def files(directory: Path) -> Iterator[Path]:
    """Every file and symlink below a directory."""
    for above, _, names in os.walk(directory):
        for name in names:
            yield Path(above, name)


def names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _open(path: Path) -> int:
    """A descriptor of a regular file; -1: there is none. The service may read more than whoever placed a symlink."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if os.path.lexists(path) and not path.is_symlink():
            raise
        return -1
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return -1


def content(path: Path) -> bytes | None:
    """What a regular file holds; None: there is none."""
    fd = _open(path)
    if fd < 0:
        return None
    with os.fdopen(fd, "rb") as stream:
        return stream.read()


def _copy(path: Path, place: Path) -> bool:
    """Copy a regular file with mode and times; False: there is none.

    Git takes a file for unchanged if it is older than the index, so that the copy of an index needs the same time.
    """
    fd = _open(path)
    if fd < 0:
        return False
    try:
        st = os.fstat(fd)
        with open(place, "wb") as copy:
            left = st.st_size
            while left and (sent := os.copy_file_range(fd, copy.fileno(), left)):
                left -= sent
            os.fchmod(copy.fileno(), 0o755 if st.st_mode & 0o100 else 0o644)
        os.utime(place, ns=(st.st_atime_ns, st.st_mtime_ns))
    finally:
        os.close(fd)
    return True
