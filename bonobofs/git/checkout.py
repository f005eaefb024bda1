"""A checkout as GitGuard works on it: a private git directory beside it, in which the service runs git.

The private directory is built like that of a session: refs, index and harmless configuration of the source are copied,
its objects are an alternate. No git process opens the source's git directory, so no hook, filter, driver or monitor
that it names can run.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import GitError
from bonobofs.files.workspace import Workspace
from bonobofs.git.journal import JOURNAL, Journal, recover
from bonobofs.git.repository import BRANCHES, ENVIRONMENT, SUBMODULE, Difference, Entry, Repository, find_git_dir
from bonobofs.git.session_repository import Author, Owner, build, configuration, find, write_config
from bonobofs.git.shared_head import prepared_index, read_head
from bonobofs.policy.decision import Permit
from bonobofs.system.locks import locked

_SECONDS: Final = 120
"""After which a git process is ended."""
_OPERATOR: Final = ("HOME", "XDG_CONFIG_HOME", "GNUPGHOME", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "TMPDIR")
"""Variables by which git finds the operator's configuration, and a signer the operator's keys."""
_SETTINGS: Final = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.splitIndex": "false",
    "core.untrackedCache": "false",
    "core.quotePath": "false",
    "core.safecrlf": "false",
}
_HARMLESS: Final = re.compile(
    r"core\.(repositoryformatversion|filemode|symlinks|ignorecase|autocrlf|eol|sparsecheckout|sparsecheckoutcone)"
    r"|extensions\.(objectformat|partialclone)|merge\.(renames|directoryrenames|renamelimit)"
)
"""Keys of the source that change a result and name no program. A session keeps more: its programs run as the agent."""
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
    commit: str
    """"" if the branch has no commit yet."""


class Checkout:
    """One work tree and its private git directory, for one operation. Close it."""

    def __init__(self, root: Path, home: Path) -> None:
        """`root` is the top of the work tree, `home` the state directory. GitError: the repository cannot be used."""
        git_dir = find_git_dir(root)
        if git_dir is None or not git_dir.is_dir():
            raise GitError(f"{root} is not the top of a git work tree", kind="no-repository")
        self.root: Final = root
        self.source: Final = git_dir
        self.room, self.journal = _make_room(home / "git")
        self.objects: Final = self.room / "git/objects"
        self._environment = {
            **ENVIRONMENT,
            "GIT_DIR": str(self.room / "git"),
            "GIT_WORK_TREE": str(root),
            "GIT_LITERAL_PATHSPECS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_CONFIG_COUNT": str(len(_SETTINGS)),
        }
        for number, (key, value) in enumerate(_SETTINGS.items()):
            self._environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
        try:
            build(root, self.room / "git", Author("", ""), (), Path(os.devnull), Owner(os.geteuid(), os.getegid()))
            self.repository: Final = Repository(git_dir, [self.objects])
            entries = ((key, value) for key, value in configuration(find(root)) if _HARMLESS.fullmatch(key))
            write_config(self.room / "git/config", [*entries, ("core.bare", "false"), ("gc.auto", "0")])
            alternate = os.fsencode(self.repository.common_dir / "objects")
            (self.objects / "info/alternates").write_bytes(alternate + b"\n")
            self.head: Final = self._read_head()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the private directory."""
        self.journal.close()
        shutil.rmtree(self.room, ignore_errors=True)

    def run(
        self,
        *arguments: str,
        data: bytes = b"",
        codes: Sequence[int] = (0,),
        operator: bool = False,
        more: Mapping[str, str] = _NOTHING,
    ) -> bytes:
        """Run git at the top of the work tree, and return its output.

        `data` is the standard input, `more` goes into the environment. `operator`: with the operator's configuration
        and keys. GitError: git ended with another code than `codes`, or took too long.
        """
        environment = {**self._environment, **more}
        if operator:
            del environment["GIT_CONFIG_NOSYSTEM"], environment["GIT_CONFIG_GLOBAL"]
            environment |= {name: os.environ[name] for name in _OPERATOR if name in os.environ}
        command = ["git", *arguments]
        try:
            done = subprocess.run(
                command, input=data, capture_output=True, check=False, timeout=_SECONDS, cwd=self.root, env=environment
            )
        except subprocess.TimeoutExpired as error:
            raise GitError(f"git took longer than {_SECONDS} s; nothing was changed", kind="busy") from error
        if done.returncode not in codes:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            text = lines[-1].removeprefix("fatal: ").removeprefix("error: ") if lines else f"exit {done.returncode}"
            raise GitError(f"git: {text}", kind="unsupported")
        return done.stdout

    def _read_head(self) -> Head:
        text = read_head(self.source)
        if not text.startswith("ref: "):
            return Head("", text)
        ref = text.removeprefix("ref: ")
        if not ref.startswith(BRANCHES):
            raise GitError(f"HEAD is on {ref}, which is no branch", kind="unsupported")
        return Head(ref.removeprefix(BRANCHES), self.repository.target(ref))

    def check_settled(self) -> None:
        """GitError: an operation of git waits to be ended in this checkout."""
        for name, operation in _UNDER_WAY.items():
            if (self.source / name).exists():
                raise GitError(
                    f"{operation} is in progress in this checkout; end it or abort it with git", kind="unmerged"
                )

    def status(self, *, untracked: bool = True, ignored: bool = False) -> Iterator[tuple[str, str]]:
        """Each changed path, after the two letters that `git status --porcelain` gives it."""
        words = ["--untracked-files=all" if untracked else "--untracked-files=no", *(["--ignored"] if ignored else [])]
        found = self.run("status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=dirty", *words)
        for record in split(found):
            yield record[:2], record[3:]

    def tracked(self) -> dict[str, tuple[int, str]]:
        """By path, mode and object id in the index."""
        found = (record.partition("\t") for record in split(self.run("ls-files", "-z", "--stage")))
        return {path: (int(about.split(" ")[0], 8), about.split(" ")[1]) for about, _, path in found}

    def tree_of(self, commit: str) -> str:
        """The tree of a commit; the empty tree of "". GitError."""
        if not commit:
            return self.run("hash-object", "-w", "-t", "tree", "--stdin").decode().strip()
        return self.run("rev-parse", "--verify", f"{commit}^{{tree}}").decode().strip()

    def filtered(self, paths: Iterable[str], *options: str) -> list[str]:
        """The paths that an attribute sends through a program. `--cached`: an attribute of the private index."""
        data = joined(map(os.fsencode, paths))
        words = iter(split(self.run("check-attr", *options, "-z", "--stdin", "filter", data=data)))
        found = zip(words, words, words, strict=True)
        return [path for path, _, value in found if value not in ("unspecified", "unset")]

    @contextmanager
    def entered(self) -> Iterator[str]:
        """A change of index or HEAD, entered in the journal; the token that names its temporary files."""
        try:
            yield self.journal.begin(self.source, self.repository.common_dir, ())
        finally:
            self.journal.end()

    def new_objects(self) -> list[Path]:
        """The files and directories of new objects, relative to the object directory."""
        return [place.relative_to(self.objects) for place in self.objects.glob("??/*")]

    def give_back(self, branch: str, objects: Iterable[Path] = ()) -> None:
        """As root: give what was written for a branch to the owner of the repository."""
        common = self.repository.common_dir
        owner = os.stat(common)
        made = {common / "objects" / above for place in objects for above in (place, place.parent)}
        made |= {self.source / name for name in ("index", "HEAD", "logs/HEAD")}
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
    with opened(root, home) as checkout:
        found = split(checkout.run("ls-files", "-z", "--stage"))
        if checkout.head.commit:
            found += split(checkout.run("ls-tree", "-r", "-z", "--full-tree", checkout.head.commit))
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
    with locked(directory / "lock"):
        for left in directory.glob("guard-*"):
            with suppress(OSError):  # its operation goes on, or its repository is gone
                recover(left / JOURNAL)
                shutil.rmtree(left)
        room = Path(tempfile.mkdtemp(prefix="guard-", dir=directory))
        return room, Journal(room / JOURNAL)


def give(place: Path, owner: os.stat_result) -> None:
    """As root: give a file to the owner of the repository, who otherwise could not change it."""
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.chown(place, owner.st_uid, owner.st_gid, follow_symlinks=False)


def split(output: bytes) -> list[str]:
    """The records of an output of git, each of which ends in NUL."""
    return [os.fsdecode(record) for record in output.split(b"\0")[:-1]]


def joined(records: Iterable[bytes]) -> bytes:
    """Records for the input of git, each with a NUL after it."""
    return b"".join(record + b"\0" for record in records)


_FRESH: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class IndexUpdate:
    """The change of the index alone: its files are as they are committed."""

    def __init__(self, checkout: Checkout, old: str, new: str) -> None:
        """From one commit to another, whatever is staged of these paths."""
        staged = checkout.tracked()
        found = ((one, staged.get(os.fsdecode(one.path))) for one in checkout.repository.differences(old, new))
        self.differences: Final = [one._replace(old=None if was is None else Entry(*was)) for one, was in found]
        self._checkout: Final = checkout

    def apply(self, permit: Permit) -> None:  # noqa: ARG002 - no change without one
        """Change the index. GitError: another process has it."""
        checkout = self._checkout
        with (
            checkout.entered() as token,
            prepared_index(checkout.source, checkout.room / "index", token, self.differences, keep=True) as index,
        ):
            index.replace()


class TreeUpdate:
    """The change of files and index from one commit to another. The checkout is clean."""

    def __init__(self, checkout: Checkout, workspace: Workspace, old: str, new: str) -> None:
        """GitError: git cannot do it here, or (`untracked`) untracked files are in the way. Nothing was changed."""
        self._checkout: Final = checkout
        self._workspace: Final = workspace
        self._owner: Final = os.fstat(workspace.descriptor)
        self.differences: Final = list(checkout.repository.differences(old, new))
        trees = checkout.tree_of(old), checkout.tree_of(new)
        checkout.run("update-index", "-q", "--refresh", codes=(0, 1))
        try:
            checkout.run("read-tree", "-m", "-u", "--dry-run", *trees)
        except GitError as error:
            raise GitError(str(error), kind="untracked") from error
        self._known: Final = {one.path: self._look(one.path) for one in self.differences}
        leaving = {one.path for one in self.differences if one.new is None}
        for one in self.differences:
            if one.old is None and self._is_in_the_way(one.path, leaving):
                raise GitError(f"{os.fsdecode(one.path)} would be overwritten, and is not tracked", kind="untracked")
        checkout.run("read-tree", "-i", "-m", *trees)
        self._export: Final = checkout.room / "export"
        self._export.mkdir()
        if any(record.startswith("S ") for record in split(checkout.run("ls-files", "-t", "-z"))):
            raise GitError("GitGuard does not switch a sparse checkout; use git in a mount", kind="unsupported")
        # What a submodule has checked out stays, as with git.
        self._steps: Final = [one for one in self.differences if not _is_submodule(one)]
        paths = joined(one.path for one in self._steps if one.new is not None)
        checkout.run("checkout-index", "-z", "--stdin", f"--prefix={self._export}/", data=paths)

    def apply(self, permit: Permit) -> None:
        """Change files, then the index. GitError: a file was changed meanwhile, or another process has the index."""
        checkout = self._checkout
        with (
            checkout.entered() as token,
            prepared_index(checkout.source, checkout.room / "index", token, self.differences, keep=False) as index,
        ):
            # Deletions make room: a file may become a directory.
            for one in sorted(self._steps, key=lambda one: (one.new is not None, one.path)):
                path = os.fsdecode(one.path)
                if self._look(one.path) != self._known[one.path]:
                    raise GitError(f"{path} was changed meanwhile", kind="dirty", paths=(path,))
                self._put(path, None if one.new is None else self._export / path, permit)
            index.replace()

    def _look(self, path: bytes) -> tuple[int, ...] | None:
        """The fingerprint of what the work tree has there; None: nothing, or a directory."""
        above, _, name = os.fsdecode(path).rpartition("/")
        try:
            directory = self._workspace.open_directory(above)
        except OSError:
            return None  # a file or a symlink stands where the directory would be
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        finally:
            os.close(directory)
        return None if stat.S_ISDIR(found.st_mode) else (found.st_ino, found.st_size, found.st_mtime_ns)

    def _is_in_the_way(self, path: bytes, leaving: set[bytes]) -> bool:
        """Whether a file stands there, or a directory with other files than those that leave. Ignored files count."""
        root = os.fsencode(self._checkout.root)
        if self._known[path] is not None:
            return True
        below = (os.path.join(at, name) for at, _, names in os.walk(os.path.join(root, path)) for name in names)
        return any(os.path.relpath(name, root) not in leaving for name in below)

    def _put(self, path: str, source: Path | None, permit: Permit) -> None:  # noqa: ARG002 - no change without one
        """Give a path an exported file, or with None remove it and the directories that are empty without it."""
        above, _, name = path.rpartition("/")
        with suppress(FileNotFoundError):
            directory = self._directory(above, make=source is not None)
            try:
                _remove(directory, name)
                if source is not None:
                    self._create(directory, name, source)
            finally:
                os.close(directory)
        while source is None and above:
            above, _, name = above.rpartition("/")
            try:
                directory = self._directory(above, make=False)
                try:
                    os.rmdir(name, dir_fd=directory)
                finally:
                    os.close(directory)
            except OSError:
                return

    def _directory(self, path: str, *, make: bool) -> int:
        """The directory, for the caller to close."""
        try:
            return self._workspace.open_directory(path)
        except FileNotFoundError:
            if not make:
                raise
        above, _, name = path.rpartition("/")
        directory = self._directory(above, make=True)
        try:
            os.mkdir(name, dir_fd=directory)
            give(Path(f"/proc/self/fd/{directory}", name), self._owner)
        finally:
            os.close(directory)
        return self._workspace.open_directory(path)

    def _create(self, directory: int, name: str, source: Path) -> None:
        found = os.lstat(source)
        if stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(source), name, dir_fd=directory)
        else:
            mode = 0o777 if found.st_mode & stat.S_IXUSR else 0o666
            descriptor = os.open(name, _FRESH, mode, dir_fd=directory)
            with open(descriptor, "wb") as file, open(source, "rb") as content:
                shutil.copyfileobj(content, file)
        give(Path(f"/proc/self/fd/{directory}", name), self._owner)


def _is_submodule(difference: Difference) -> bool:
    return any(entry is not None and entry.mode == SUBMODULE for entry in difference[1:])


def _remove(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        os.rmdir(name, dir_fd=directory)
