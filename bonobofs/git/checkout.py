"""Checkout for GitGuard: a private git directory in the state directory, in which bonobofs runs git on the work tree.

The private directory is built like a session's: it has copies of the source's refs, index and harmless configuration,
and the source's objects as an alternate. No git process opens the source's git directory, so git runs no hook, filter,
driver or monitor that the source configures.
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
"""Timeout of one git process."""
_OPERATOR: Final = ("HOME", "XDG_CONFIG_HOME", "GNUPGHOME", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "TMPDIR")
"""Variables that git and its signing program need to find the operator's configuration and keys."""
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
"""Configuration keys of the source that change results and name no program. A session copies more keys."""
_UNDER_WAY: Final = {
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase",
    "BISECT_START": "a bisect",
}
"""Operation in progress, by the file or directory that git keeps during it."""
_NOTHING: Final[Mapping[str, str]] = {}


@dataclass(frozen=True)
class GitStatus:
    """State of a work tree, as `git status` shows it."""

    branch: str
    """"" if HEAD is detached."""
    clean: bool
    """No file is staged or modified. Untracked files are ignored."""
    staged: list[str]
    modified: list[str]
    """Files that are changed or deleted in the work tree, or in conflict."""
    untracked: list[str]
    """Untracked files, without ignored ones."""


class Head(NamedTuple):
    """Branch and commit of HEAD."""

    branch: str
    """"" if HEAD is detached."""
    commit: str
    """"" if the branch has no commit yet."""


class Checkout:
    """One work tree and its private git directory, for one operation. The caller closes it."""

    def __init__(self, root: Path, home: Path) -> None:
        """`root` is the top of the work tree, `home` the state directory. Raises GitError if bonobofs cannot use it."""
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
        """Run git at the top of the work tree and return its standard output.

        `data` is the standard input, `more` is added to the environment. `operator` lets git use the operator's
        configuration and keys. Raises GitError if the exit status is not in `codes`, and after 120 s.
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
        """Raise GitError if a merge, rebase or other git operation is in progress in this checkout."""
        for name, operation in _UNDER_WAY.items():
            if (self.source / name).exists():
                raise GitError(
                    f"{operation} is in progress in this checkout; end it or abort it with git", kind="unmerged"
                )

    def status(self, *, untracked: bool = True, ignored: bool = False) -> Iterator[tuple[str, str]]:
        """Yield (code, path) of each changed path. The code has two letters, as in `git status --porcelain`."""
        words = ["--untracked-files=all" if untracked else "--untracked-files=no", *(["--ignored"] if ignored else [])]
        found = self.run("status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=dirty", *words)
        for record in split(found):
            yield record[:2], record[3:]

    def tracked(self) -> dict[str, tuple[int, str]]:
        """Return {path: (mode, object id)} of the index."""
        found = (record.partition("\t") for record in split(self.run("ls-files", "-z", "--stage")))
        return {path: (int(about.split(" ")[0], 8), about.split(" ")[1]) for about, _, path in found}

    def tree_of(self, commit: str) -> str:
        """Return the tree of a commit; "" has the empty tree. Raises GitError."""
        if not commit:
            return self.run("hash-object", "-w", "-t", "tree", "--stdin").decode().strip()
        return self.run("rev-parse", "--verify", f"{commit}^{{tree}}").decode().strip()

    def filtered(self, paths: Iterable[str], *options: str) -> list[str]:
        """Return the paths with a `filter` attribute. `--cached` reads the attributes from the private index."""
        data = joined(map(os.fsencode, paths))
        words = iter(split(self.run("check-attr", *options, "-z", "--stdin", "filter", data=data)))
        found = zip(words, words, words, strict=True)
        return [path for path, _, value in found if value not in ("unspecified", "unset")]

    @contextmanager
    def entered(self) -> Iterator[str]:
        """Record a change of index or HEAD in the journal. Yield the token in the names of its temporary files."""
        try:
            yield self.journal.begin(self.source, self.repository.common_dir, ())
        finally:
            self.journal.end()

    def new_objects(self) -> list[Path]:
        """Return the new loose objects, relative to the object directory."""
        return [place.relative_to(self.objects) for place in self.objects.glob("??/*")]

    def give_back(self, branch: str, objects: Iterable[Path] = ()) -> None:
        """If we are root, chown the files that were written for a branch to the owner of the repository."""
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
    """Open the checkout at `root` for one operation. Raises GitError."""
    checkout = Checkout(root, home)
    try:
        yield checkout
    finally:
        checkout.close()


def status_of(root: Path, home: Path) -> GitStatus:
    """Return the staged, modified and untracked files of the work tree at `root`. Raises GitError."""
    check_rules(root)
    with opened(root, home) as checkout:
        found = list(checkout.status())
    unmerged = {path for code, path in found if "U" in code or code in ("AA", "DD")}
    staged = sorted(path for code, path in found if code[0] not in " ?" and path not in unmerged)
    modified = sorted(path for code, path in found if code[1] not in " ?" or path in unmerged)
    untracked = sorted(path for code, path in found if code == "??")
    return GitStatus(checkout.head.branch, not (staged or modified), staged, modified, untracked)


def diff_of(root: Path, home: Path, path: str | None) -> str:
    """Return the changes of tracked files since HEAD as a patch. `path` selects a file or directory. Raises GitError.

    Bytes that are not UTF-8 are decoded with surrogateescape.
    """
    words = ["diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--ignore-submodules=dirty"]
    with opened(root, home) as checkout:
        base = checkout.tree_of(checkout.head.commit)
        return os.fsdecode(checkout.run(*words, base, "--", *([] if path is None else [path])))


def tracked_paths(root: Path, home: Path, wanted: Callable[[str], bool]) -> set[str]:
    """Return the `wanted` paths in index or HEAD of the work tree. A submodule's path ends in "/". Raises GitError."""
    with opened(root, home) as checkout:
        found = split(checkout.run("ls-files", "-z", "--stage"))
        if checkout.head.commit:
            found += split(checkout.run("ls-tree", "-r", "-z", "--full-tree", checkout.head.commit))
    records = (record.partition("\t") for record in found)
    return {f"{path}/" if mode.startswith("160000") else path for mode, _, path in records if wanted(path)}


def check_rules(top: Path) -> None:
    """Raise GitError if a .gitignore or .gitattributes is not a regular file. git would block on a FIFO."""
    for directory, names, files in os.walk(top):
        if ".git" in names:
            names.remove(".git")
        for name in {".gitignore", ".gitattributes"}.intersection(files):
            place = os.path.join(directory, name)
            if os.path.exists(place) and not os.path.isfile(place):
                path = os.path.relpath(place, top)
                raise GitError(f"{path} is no file; remove it", kind="unsupported", paths=(path,))


def _make_room(directory: Path) -> tuple[Path, Journal]:
    """Make a private directory with a journal. Recover and remove the directories of killed operations first."""
    directory.mkdir(mode=0o700, exist_ok=True)
    with locked(directory / "lock"):
        for left in directory.glob("guard-*"):
            with suppress(OSError):  # its operation still runs, or its repository is gone
                recover(left / JOURNAL)
                shutil.rmtree(left)
        room = Path(tempfile.mkdtemp(prefix="guard-", dir=directory))
        return room, Journal(room / JOURNAL)


def give(place: Path, owner: os.stat_result) -> None:
    """If we are root, chown a file to the owner of the repository."""
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.chown(place, owner.st_uid, owner.st_gid, follow_symlinks=False)


def split(output: bytes) -> list[str]:
    """Split NUL-terminated output of git into records."""
    return [os.fsdecode(record) for record in output.split(b"\0")[:-1]]


def joined(records: Iterable[bytes]) -> bytes:
    """Join records into NUL-terminated input for git."""
    return b"".join(record + b"\0" for record in records)


_FRESH: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class IndexUpdate:
    """Update of the index only. The files in the work tree already have the committed content."""

    def __init__(self, checkout: Checkout, old: str, new: str) -> None:
        """Update from commit `old` to commit `new`. Staged content of the changed paths is replaced."""
        staged = checkout.tracked()
        found = ((one, staged.get(os.fsdecode(one.path))) for one in checkout.repository.differences(old, new))
        self.differences: Final = [one._replace(old=None if was is None else Entry(*was)) for one, was in found]
        self._checkout: Final = checkout

    def apply(self, permit: Permit) -> None:  # noqa: ARG002 - no change without one
        """Change the index. Raises GitError if another process holds its lock."""
        checkout = self._checkout
        with (
            checkout.entered() as token,
            prepared_index(checkout.source, checkout.room / "index", token, self.differences, keep=True) as index,
        ):
            index.replace()


class TreeUpdate:
    """Update of files and index from one commit to another. The checkout must be clean."""

    def __init__(self, checkout: Checkout, workspace: Workspace, old: str, new: str) -> None:
        """Check and export the update. Raises GitError, of kind `untracked` if an untracked file is in the way."""
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
        # git leaves the checkout of a submodule as it is, and so do we.
        self._steps: Final = [one for one in self.differences if not _is_submodule(one)]
        paths = joined(one.path for one in self._steps if one.new is not None)
        checkout.run("checkout-index", "-z", "--stdin", f"--prefix={self._export}/", data=paths)

    def apply(self, permit: Permit) -> None:
        """Change files, then the index. Raises GitError if a file was changed meanwhile or the index is locked."""
        checkout = self._checkout
        with (
            checkout.entered() as token,
            prepared_index(checkout.source, checkout.room / "index", token, self.differences, keep=False) as index,
        ):
            # Deletions first: a file may become a directory.
            for one in sorted(self._steps, key=lambda one: (one.new is not None, one.path)):
                path = os.fsdecode(one.path)
                if self._look(one.path) != self._known[one.path]:
                    raise GitError(f"{path} was changed meanwhile", kind="dirty", paths=(path,))
                self._put(path, None if one.new is None else self._export / path, permit)
            index.replace()

    def _look(self, path: bytes) -> tuple[int, ...] | None:
        """Return the fingerprint (inode, size, mtime) of a work tree file, or None if it is missing or a directory."""
        above, _, name = os.fsdecode(path).rpartition("/")
        try:
            directory = self._workspace.open_directory(above)
        except OSError:
            return None  # a parent is a file or a symlink
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        finally:
            os.close(directory)
        return None if stat.S_ISDIR(found.st_mode) else (found.st_ino, found.st_size, found.st_mtime_ns)

    def _is_in_the_way(self, path: bytes, leaving: set[bytes]) -> bool:
        """True if `path` is a file, or a directory with files not in `leaving`. Ignored files count."""
        root = os.fsencode(self._checkout.root)
        if self._known[path] is not None:
            return True
        below = (os.path.join(at, name) for at, _, names in os.walk(os.path.join(root, path)) for name in names)
        return any(os.path.relpath(name, root) not in leaving for name in below)

    def _put(self, path: str, source: Path | None, permit: Permit) -> None:  # noqa: ARG002 - no change without one
        """Replace a path by an exported file. With None, remove the path and the parents that become empty."""
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
        """Open a directory, optionally making it and its parents. The caller closes the descriptor."""
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
