"""A checkout as GitGuard works on it: a private git directory beside it, in which the service runs git.

The private directory has a configuration of its own, a copy of the index, and the source's objects as an alternate.
No git process opens the source's git directory, so no hook, filter, driver or monitor that it names can run. The
environment of each process is made from nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from bonobofs.errors import GitError
from bonobofs.git.journal import JOURNAL, Journal, recover
from bonobofs.git.repository import BRANCHES, ENVIRONMENT, Repository, find_git_dir

_SECONDS: Final = 120
"""After which a git process is ended."""
_OPERATOR: Final = ("HOME", "XDG_CONFIG_HOME", "GNUPGHOME", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "TMPDIR")
"""Variables of the operator by which git finds the operator's configuration, and a signer its keys."""
_SETTINGS: Final = (
    "core.filemode",
    "core.symlinks",
    "core.ignorecase",
    "core.autocrlf",
    "core.eol",
    "core.excludesfile",
    "core.sparsecheckout",
    "core.sparsecheckoutcone",
    "merge.renames",
    "merge.directoryrenames",
    "merge.renamelimit",
)
"""Keys of the operator and of the source that change a result and name no program."""
_PRIVATE: Final = {
    "core.bare": "false",
    "core.hookspath": "/dev/null",
    "core.fsmonitor": "false",
    "core.splitindex": "false",
    "core.untrackedcache": "false",
    "core.quotepath": "false",
    "core.safecrlf": "false",
    "gc.auto": "0",
}
_COPIED: Final = ("info/exclude", "info/attributes", "shallow")
_UNDER_WAY: Final = {
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase",
    "BISECT_START": "a bisect",
}
"""By a file or directory of git, the operation that is in progress while it exists."""


_NOTHING: Final[Mapping[str, str]] = {}
_CONVERSIONS: Final = ("text", "eol", "crlf", "ident", "working-tree-encoding", "filter")


@dataclass(frozen=True)
class GitStatus:
    """What `git status` would show."""

    branch: str
    """"" if HEAD is detached."""
    clean: bool
    """Nothing is staged or modified. Untracked files do not count."""
    staged: list[str]
    modified: list[str]
    """Changed or deleted in the work tree, or in conflict."""
    untracked: list[str]
    """Each file that is not ignored."""


class Head(NamedTuple):
    """Where HEAD is."""

    branch: str
    """"" if HEAD is detached."""
    commit: str | None
    """None if the branch has no commit yet."""


class Checkout:
    """One work tree and its private git directory, for one operation. Close it."""

    def __init__(self, root: Path, home: Path) -> None:
        """`root` is the top of the work tree, `home` the state directory. GitError: the repository cannot be used."""
        git_dir = find_git_dir(root)
        if git_dir is None or not git_dir.is_dir():
            raise GitError(f"{root} is not the top of a git work tree", kind="no-repository")
        self.root: Final = root
        self.source: Final = git_dir
        self._room, self.journal = _make_room(home / "git")
        self.git: Final = self._room / "git"
        self._environment: Final = {
            **ENVIRONMENT,
            "GIT_DIR": str(self.git),
            "GIT_WORK_TREE": str(root),
            "GIT_LITERAL_PATHSPECS": "1",
            "GIT_NO_LAZY_FETCH": "1",
        }
        self.settings: dict[str, str] = {}
        try:
            (self.objects / "info").mkdir(parents=True)
            self.repository: Final = Repository(git_dir, [self.objects])
            self._fill(self.repository.common_dir)
            self._drivers: Final = self._configure()
            self.head: Final = self._read_head()
            text = self.head.commit or f"ref: {BRANCHES}{self.head.branch}"
            (self.git / "HEAD").write_bytes(os.fsencode(text) + b"\n")
            self._index_before: Final = self._copy_index()
        except BaseException:
            self.close()
            raise

    @property
    def objects(self) -> Path:
        """The directory of new objects."""
        return self.git / "objects"

    def room(self, name: str) -> Path:
        """A private directory of that name, made now."""
        place = self._room / name
        place.mkdir()
        return place

    def close(self) -> None:
        """Remove the private directory."""
        self.journal.close()
        with suppress(OSError):
            recover(self._room / JOURNAL)
        shutil.rmtree(self._room, ignore_errors=True)

    def _fill(self, common: Path) -> None:
        for name in ("refs", "info"):
            (self.git / name).mkdir()
        (self.objects / "info/alternates").write_bytes(os.fsencode(common / "objects") + b"\n")
        for directory, names in ((common, _COPIED), (self.source, ("info/sparse-checkout",))):
            for name in names:
                with suppress(FileNotFoundError):
                    _copy(directory / name, self.git / name)
        (self.git / "config").write_text("[core]\n\trepositoryformatversion = 0\n", encoding="utf-8")
        (self.git / "HEAD").write_text("ref: refs/heads/none\n", encoding="utf-8")

    def _configure(self) -> set[str]:
        """Write the configuration; the names of the filters that some configuration defines."""
        # The operator's configuration first, so that the repository's overrides it, as with git.
        found: dict[str, str] = {}
        for record in split(self.run("config", "--list", "-z", operator=True)):
            key, _, text = record.partition("\n")
            found[key] = text
        found |= {entry.name: entry.value or "true" for entry in self.repository.raw.config}
        self.settings |= {key: found[key] for key in _SETTINGS if key in found}
        with (self.git / "config").open("a", encoding="utf-8", errors="surrogateescape") as config:
            for key, text in (*self.settings.items(), *_PRIVATE.items()):
                section, _, name = key.partition(".")
                escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                config.write(f'[{section}]\n\t{name} = "{escaped}"\n')
        drivers = (key.split(".") for key in found if key.startswith("filter."))
        return {".".join(words[1:-1]) for words in drivers if words[-1] in ("clean", "smudge", "process")}

    def _copy_index(self) -> os.stat_result | None:
        """Copy the index and the files that it shares; the state of the source's index at that moment."""
        for shared in self.source.glob("sharedindex.*"):
            _copy(shared, self.git / shared.name)
        before = _look(self.source / "index")
        if before is not None:
            _copy(self.source / "index", self.git / "index")
            shutil.copyfile(self.git / "index", self._room / "index")
        return before

    def run(
        self,
        *arguments: str,
        data: bytes | BinaryIO = b"",
        codes: Sequence[int] = (0,),
        operator: bool = False,
        more: Mapping[str, str] = _NOTHING,
    ) -> bytes:
        """Run git at the top of the work tree, and give its output.

        `data` is the standard input, `more` goes into the environment. `operator`: with the operator's configuration
        and keys. GitError: git ended with another code than `codes`, or took too long.
        """
        environment = {**self._environment, **more}
        if operator:
            del environment["GIT_CONFIG_NOSYSTEM"], environment["GIT_CONFIG_GLOBAL"]
            environment |= {name: os.environ[name] for name in _OPERATOR if name in os.environ}
        given: dict[str, Any] = {"input": data} if isinstance(data, bytes) else {"stdin": data}
        done: subprocess.CompletedProcess[bytes]
        try:
            done = subprocess.run(
                ["git", *arguments],
                **given,
                capture_output=True,
                check=False,
                timeout=_SECONDS,
                cwd=self.root,
                env=environment,
            )
        except subprocess.TimeoutExpired as error:
            message = f"git {arguments[0]} took longer than {_SECONDS} s; nothing was changed"
            raise GitError(message, kind="busy") from error
        if done.returncode not in codes:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            text = lines[-1].removeprefix("fatal: ").removeprefix("error: ") if lines else f"exit {done.returncode}"
            raise GitError(f"git: {text}", kind="unsupported")
        return done.stdout

    def _read_head(self) -> Head:
        try:
            text = os.fsdecode((self.source / "HEAD").read_bytes()).strip()
        except OSError as error:
            raise GitError(f"HEAD of the repository cannot be read: {error.strerror}", kind="unsupported") from error
        if not text.startswith("ref: "):
            return Head("", text)
        ref = text.removeprefix("ref: ")
        if not ref.startswith(BRANCHES):
            raise GitError(f"HEAD is on {ref}, which is no branch", kind="unsupported")
        return Head(ref.removeprefix(BRANCHES), self.repository.target(ref) or None)

    def check_settled(self) -> None:
        """GitError: an operation of git waits to be ended in this checkout."""
        for name, operation in _UNDER_WAY.items():
            if (self.source / name).exists():
                raise GitError(
                    f"{operation} is in progress in this checkout; end it or abort it with git", kind="unmerged"
                )
        unmerged = self.run("ls-files", "-z", "--unmerged")
        if unmerged:
            paths = sorted({record.partition("\t")[2] for record in split(unmerged)})
            raise GitError("the index has conflicts; resolve them with git", kind="unmerged", paths=paths)

    def changed_paths(self) -> list[str]:
        """The tracked paths with a change that is not committed, staged or not."""
        return sorted({path for _, path in self.status(untracked=False)})

    def status(self, *, untracked: bool = True, ignored: bool = False) -> Iterator[tuple[str, str]]:
        """Each changed path, after the two letters that `git status --porcelain` gives it."""
        words = ["--untracked-files=all" if untracked else "--untracked-files=no", *(["--ignored"] if ignored else [])]
        found = self.run("status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=dirty", *words)
        for record in split(found):
            yield record[:2], record[3:]

    def tracked(self) -> dict[str, str]:
        """By path, the mode that the index has."""
        found = split(self.run("ls-files", "-z", "--stage"))
        return {record.partition("\t")[2]: record[:6] for record in found}

    def tree_of(self, commit: str | None) -> str:
        """The tree of a commit; the empty tree of none. GitError."""
        if commit is None:
            return self.run("hash-object", "-w", "-t", "tree", "--stdin").decode().strip()
        return self.run("rev-parse", "--verify", f"{commit}^{{tree}}").decode().strip()

    def branches_elsewhere(self) -> set[str]:
        """The branches that other worktrees of the repository have checked out."""
        common = self.repository.common_dir
        found = set()
        for git_dir in (common, *common.glob("worktrees/*")):
            if git_dir.resolve() == self.source.resolve():
                continue
            with suppress(OSError):
                text = os.fsdecode((git_dir / "HEAD").read_bytes()).strip()
                found.add(text.removeprefix(f"ref: {BRANCHES}"))
        return found

    def attributes(self, paths: Sequence[str]) -> dict[str, dict[str, str]]:
        """By path, the attributes by which git converts a file, each with its value."""
        found: dict[str, dict[str, str]] = {path: {} for path in paths}
        words = iter(
            split(self.run("check-attr", "-z", "--stdin", *_CONVERSIONS, data=joined(map(os.fsencode, paths))))
        )
        for path, attribute, value in zip(words, words, words, strict=True):
            if value not in ("unspecified", "unset"):
                found[path][attribute] = value
        return found

    def filtered(self, paths: Sequence[str]) -> list[str]:
        """The paths whose content goes through a program that some configuration names. The service runs none."""
        return [path for path, found in self.attributes(paths).items() if found.get("filter") in self._drivers]

    def install_index(self) -> None:
        """Put the private index in place of the source's. GitError: another program has it, or has changed it."""
        self._put_index(self.git / "index", self._index_before)

    def restore_index(self) -> None:
        """Put the former index in place of one that `install_index` has installed. GitError as there."""
        if self._index_before is None:
            (self.source / "index").unlink(missing_ok=True)
        else:
            self._put_index(self._room / "index", _look(self.source / "index"))

    def _put_index(self, content: Path, before: os.stat_result | None) -> None:
        mode = 0o644 if before is None else before.st_mode & 0o777

        def is_current() -> bool:
            now = _look(self.source / "index")
            return (before and _fingerprint(before)) == (now and _fingerprint(now))

        self._replace("index", content.read_bytes(), mode, is_current)

    def set_head(self, branch: str, commit: str, who: str) -> None:
        """Let HEAD of the source name a branch, which is at this commit; `who` is `NAME <EMAIL>` for the reflog.

        GitError: another program has moved HEAD, or has its lock.
        """
        self._replace("HEAD", os.fsencode(f"ref: {BRANCHES}{branch}\n"), 0o644, lambda: self._read_head() == self.head)
        log = self.source / "logs/HEAD"
        if log.exists():
            old = self.head.commit or "0" * len(commit)
            text = f"{old} {commit} {who} {int(time.time())} +0000\tcheckout: moving from "
            with log.open("ab") as file:
                file.write(os.fsencode(f"{text}{self.head.branch or self.head.commit} to {branch}\n"))

    def _replace(self, name: str, content: bytes, mode: int, is_current: Callable[[], bool]) -> None:
        """Replace a file of the source's git directory, under the lock that git takes for it."""
        place, lock = self.source / name, self.source / f"{name}.lock"
        token = self.journal.begin(self.source, self.repository.common_dir, ())
        temporary = self.source / f"bonobofs-{token}"
        try:
            with temporary.open("xb") as file:
                file.write(content)
                os.fchmod(file.fileno(), mode)
            give(temporary, os.stat(self.source))
            try:
                os.link(temporary, lock)
            except FileExistsError:
                message = f"{name}.lock is held by another program; if none is at work here, remove {lock}"
                raise GitError(message, kind="busy", paths=(str(lock),)) from None
            try:
                if not is_current():
                    raise GitError(f"{name} was changed by another program; try again", kind="busy")
                os.rename(lock, place)
            except BaseException:
                lock.unlink(missing_ok=True)
                raise
        finally:
            temporary.unlink(missing_ok=True)
            self.journal.end()

    def new_objects(self) -> list[Path]:
        """The files and directories of new objects, relative to the object directory."""
        return [place.relative_to(self.objects) for place in self.objects.glob("??/**/*")]

    def give_back(self, branch: str, objects: Iterable[Path]) -> None:
        """As root: give what was written for a branch to the owner of the repository."""
        common = self.repository.common_dir
        owner = os.stat(common)
        made = {common / "objects" / above for place in objects for above in (place, place.parent)}
        for top in (common, common / "logs"):
            place = top / BRANCHES / branch
            made |= {place, *(above for above in place.parents if above.is_relative_to(top))}
        for place in made:
            with suppress(FileNotFoundError):
                give(place, owner)


@contextmanager
def opened(root: Path, home: Path) -> Iterator[Checkout]:
    """The checkout at `root`, for one operation."""
    checkout = Checkout(root, home)
    try:
        yield checkout
    finally:
        checkout.close()


def status_of(root: Path, home: Path) -> GitStatus:
    """What is staged, modified and untracked in the work tree at `root`. GitError."""
    check_rules(root)
    with opened(root, home) as checkout:
        found = list(checkout.status())
    unmerged = {path for code, path in found if "U" in code or code in ("AA", "DD")}
    staged = sorted(path for code, path in found if code[0] not in " ?" and path not in unmerged)
    modified = sorted(path for code, path in found if code[1] not in " ?" or path in unmerged)
    untracked = sorted(path for code, path in found if code == "??")
    return GitStatus(checkout.head.branch, not (staged or modified), staged, modified, untracked)


def diff_of(root: Path, home: Path, path: str | None) -> str:
    """The changes of tracked files since HEAD, as a patch; of all, or of a file or directory. GitError.

    Bytes that are not UTF-8 are carried by surrogateescape.
    """
    words = ["diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--ignore-submodules=dirty"]
    with opened(root, home) as checkout:
        base = checkout.tree_of(checkout.head.commit)
        return os.fsdecode(checkout.run(*words, base, "--", *([] if path is None else [path])))


def tracked_paths(root: Path, home: Path, wanted: Callable[[str], bool]) -> set[str]:
    """The wanted paths that the index or HEAD of the work tree `root` has. A submodule's ends in a slash. GitError."""
    try:
        with opened(root, home) as checkout:
            found = split(checkout.run("ls-files", "-z", "--stage"))
            if checkout.head.commit is not None:
                found += split(checkout.run("ls-tree", "-r", "-z", "--full-tree", checkout.head.commit))
    except OSError as error:
        raise GitError(f"the repository cannot be read: {error}", kind="unsupported") from error
    records = (record.partition("\t") for record in found)
    return {f"{path}/" if mode.startswith("160000") else path for mode, _, path in records if wanted(path)}


def check_rules(top: Path) -> None:
    """GitError: a .gitignore or .gitattributes is no regular file. git waits for ever to read from a FIFO."""
    for directory, names, files in os.walk(top):
        if ".git" in names:
            names.remove(".git")
        for name in {".gitignore", ".gitattributes"}.intersection(files):
            place = os.path.join(directory, name)
            if os.path.exists(place) and not os.path.isfile(place):
                path = os.path.relpath(place, top)
                raise GitError(f"{path} is no file; remove it", kind="unsupported", paths=(path,))


def _make_room(directory: Path) -> tuple[Path, Journal]:
    """A private directory with a journal. What killed operations left is removed first."""
    directory.mkdir(mode=0o700, exist_ok=True)
    with (directory / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in directory.glob("guard-*"):
            with suppress(OSError):  # its operation goes on, or its repository is gone
                recover(left / JOURNAL)
                shutil.rmtree(left)
        room = Path(tempfile.mkdtemp(prefix="guard-", dir=directory))
        return room, Journal(room / JOURNAL)


def _look(place: Path) -> os.stat_result | None:
    try:
        return os.stat(place, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _fingerprint(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size


def give(place: Path, owner: os.stat_result) -> None:
    """As root: give a file to the owner of the repository, who otherwise could not change it."""
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.chown(place, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _copy(source: Path, target: Path) -> None:
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file, open(target, "wb") as copy:
        shutil.copyfileobj(file, copy)


def split(output: bytes) -> list[str]:
    """The records of an output of git, each of which ends in NUL."""
    return [os.fsdecode(record) for record in output.split(b"\0")[:-1]]


def joined(records: Iterable[bytes]) -> bytes:
    """Records for the input of git, each with a NUL after it."""
    return b"".join(record + b"\0" for record in records)
