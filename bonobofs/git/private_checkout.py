"""A private git directory in the state directory, in which bonobofs runs git on the work tree of a source.

It is built like a session's: it has copies of the source's refs, index and harmless configuration, and the source's
objects as an alternate. No git process opens the source's git directory, so git runs no hook, filter, driver or monitor
that the source configures. A mount lists the tracked files with it, so it does not load libgit2.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from bonobofs.errors import GitError
from bonobofs.git.journal import JOURNAL, Journal, recover
from bonobofs.git.session_repository import Author, Owner, build, configuration, read_regular_file, write_config
from bonobofs.git.source_refs import ENVIRONMENT, find_git_dirs, read_head, run_git
from bonobofs.system.locks import locked

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
NOTHING: Final[Mapping[str, str]] = {}


class PrivateCheckout:
    """One work tree and its private git directory, for one operation. The caller closes it."""

    def __init__(self, root: Path, home: Path) -> None:
        """`root` is the top of the work tree, `home` the state directory. Raises GitError if bonobofs cannot use it."""
        dirs = find_git_dirs(root)
        self.root: Final = root
        self.source: Final = dirs.private
        self.common_dir: Final = dirs.common
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
            entries = ((key, value) for key, value in configuration(dirs) if _HARMLESS.fullmatch(key))
            write_config(self.room / "git/config", [*entries, ("core.bare", "false"), ("gc.auto", "0")])
            alternate = os.fsencode(self.common_dir / "objects")
            (self.objects / "info/alternates").write_bytes(alternate + b"\n")
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
        more: Mapping[str, str] = NOTHING,
    ) -> bytes:
        """Run git at the top of the work tree and return its standard output.

        `data` is the standard input, `more` is added to the environment. `operator` lets git use the operator's
        configuration and keys. Raises GitError if the exit status is not in `codes`, and after 120 s.
        """
        environment = {**self._environment, **more}
        if operator:
            del environment["GIT_CONFIG_NOSYSTEM"], environment["GIT_CONFIG_GLOBAL"]
            environment |= {name: os.environ[name] for name in _OPERATOR if name in os.environ}
        return run_git(*arguments, data=data, directory=self.root, environment=environment, codes=codes)

    def tracked(self) -> dict[str, tuple[int, str]]:
        """Return {path: (mode, object id)} of the index."""
        found = (record.partition("\t") for record in split_records(self.run("ls-files", "-z", "--stage")))
        return {path: (int(about.split(" ")[0], 8), about.split(" ")[1]) for about, _, path in found}

    def has_commit(self) -> bool:
        """Return False only if HEAD is on a branch that does not exist yet; True also if its ref is damaged."""
        head = read_head(self.source)
        ref = head.removeprefix("ref: ")
        packed = read_regular_file(self.common_dir / "packed-refs") or b""
        return ref == head or os.path.lexists(self.common_dir / ref) or os.fsencode(f" {ref}\n") in packed


def tracked_paths(root: Path, home: Path, is_selected: Callable[[str], bool]) -> set[str]:
    """Return the paths in index or HEAD of the work tree that are selected.

    A submodule's path ends in "/". Raises GitError.
    """
    with closing(PrivateCheckout(root, home)) as checkout:
        words = ("ls-tree", "-r", "-z", "--full-tree", "HEAD")
        found = split_records(checkout.run("ls-files", "-z", "--stage"))
        try:
            found += split_records(checkout.run(*words))
        except GitError:
            if checkout.has_commit():
                raise
    records = (record.partition("\t") for record in found)
    return {f"{path}/" if mode.startswith("160000") else path for mode, _, path in records if is_selected(path)}


def _make_room(directory: Path) -> tuple[Path, Journal]:
    """Make a private directory with a journal. Recover and remove the directories of killed operations first."""
    directory.mkdir(mode=0o700, exist_ok=True)
    with locked(directory / "lock"):
        room = directory / f"guard-{os.urandom(16).hex()}"
        room.mkdir(mode=0o700)
        journal = Journal(room / JOURNAL)
        for left in set(directory.glob("guard-*")) - {room}:
            # Its operation may still run, its repository may be gone, or its index may be locked.
            with suppress(OSError, GitError):
                if updates := recover(left / JOURNAL):
                    from bonobofs.git.shared_head import finish_index  # noqa: PLC0415 - loads libgit2

                    finish_index(updates, room / "index", journal)
                shutil.rmtree(left)
        return room, journal


def split_records(output: bytes) -> list[str]:
    """Split NUL-terminated output of git into records."""
    return [os.fsdecode(record) for record in output.split(b"\0")[:-1]]


def join_records(records: Iterable[bytes]) -> bytes:
    """Join records into NUL-terminated input for git."""
    return b"".join(record + b"\0" for record in records)
