"""Write-ahead journal of a publication, so that another process can clean up after a killed writer.

    journal = Journal(directory / JOURNAL)
    with journal.writing(git_dir, common_dir, updates) as token:
        ...

    recover(directory / JOURNAL)    # after the writer's death, by any process that may write to the repository

The writer holds a lock on the journal file while it lives.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from bonobofs.git.source_refs import read_head, read_ref
from bonobofs.system.locks import lock, try_once

JOURNAL: Final = "journal.json"
HEAD: Final = "HEAD"
"""Name of the checkout's HEAD in a journal. Its values are the contents of the HEAD file."""
_MOST_LOCK_BYTES: Final = 100
_SLACK: Final = 1.0
"""Seconds by which the clock of a file system may lag."""


class Leftover(NamedTuple):
    """Update that a killed publication intended. `is_made`: the ref already has the new value."""

    ref: str
    old: str
    new: str
    is_made: bool
    git_dir: Path


class Journal:
    """Journal of one writer."""

    def __init__(self, file: Path) -> None:
        """Open and lock the file. Raises BlockingIOError if another writer holds the lock, else OSError."""
        self.token: Final = os.urandom(16).hex()
        """Part of the name of every temporary file."""
        self._file: Final[IO[str]] = file.open("a+", encoding="utf-8")
        lock(self._file.fileno(), retry=try_once)
        self._begun: Final[list[list[list[Any]]]] = []
        self._since = 0.0

    @contextmanager
    def writing(
        self, git_dir: Path, common_dir: Path, updates: Sequence[tuple[Any, ...]], *, is_recovery: bool = False
    ) -> Iterator[str]:
        """Record the intended updates, sync, and yield the token. `updates` begin with (ref, old, new).

        The end of the outermost block removes the temporary files and clears the journal. The journal stays for the
        next writer after an EOFError, which says that the companion is gone, and after each error of a recovery.
        """
        self._begun.append([list(update[:3]) for update in updates])
        self._since = self._since if len(self._begun) > 1 else time.time()
        document = {
            "token": self.token,
            "git_dir": os.path.abspath(git_dir),
            "common_dir": os.path.abspath(common_dir),
            "updates": [update for each in self._begun for update in each],
            "began": self._since,
        }
        self._write(json.dumps(document))
        try:
            yield self.token
        except BaseException as error:
            if is_recovery:
                self._begun.pop()
            elif not isinstance(error, EOFError):
                self._end(git_dir, common_dir)
            raise
        self._end(git_dir, common_dir)

    def _end(self, git_dir: Path, common_dir: Path) -> None:
        self._begun.pop()
        if not self._begun:
            _remove_temporaries(git_dir, common_dir, self.token)
            self._write("")

    def clear(self) -> None:
        """Discard the entries of an earlier writer."""
        self._write("")

    def close(self) -> None:
        """Close the journal file, which releases its lock."""
        self._file.close()

    def _write(self, text: str) -> None:
        self._file.truncate(0)
        self._file.write(text)
        self._file.flush()
        if text:
            os.fdatasync(self._file.fileno())


def recover(file: Path) -> list[Leftover]:
    """Remove locks and temporary files of a dead writer, finish its move of HEAD, and return its intended ref updates.

    Idempotent: the journal is not changed. Raises BlockingIOError if the writer lives, else OSError.
    """
    try:
        stream = file.open("r+", encoding="utf-8")
    except FileNotFoundError:
        return []
    with stream:
        lock(stream.fileno(), retry=try_once)
        try:
            document = json.loads(stream.read())
        except ValueError:  # the writer was killed before its first change or after its end
            return []
        common, git_dir = Path(document["common_dir"]), Path(document["git_dir"])
        updates = [(ref, old, new) for ref, old, new in document["updates"]]
        for ref, old, new in updates:
            if ref == HEAD:
                _finish_head(git_dir, document["token"], old, new)
        _remove_temporaries(git_dir, common, document["token"])
        for ref, _, new in updates:
            if ref == HEAD:
                continue
            _remove_lock(common / f"{ref}.lock", new, document["began"])
            if not new:
                _remove_lock(common / "packed-refs.lock", None, document["began"])
        return [
            Leftover(ref, old, new, read_ref(common, ref) == new, git_dir) for ref, old, new in updates if ref != HEAD
        ]


def _finish_head(git_dir: Path, token: str, old: str, new: str) -> None:
    """Set HEAD to `new` if the writer replaced the index and HEAD still is `old`."""
    with suppress(FileNotFoundError):
        index = git_dir / f"bonobofs-{token}.index"
        if read_head(git_dir) == old and index.samefile(git_dir / "index"):
            copy = git_dir / f"bonobofs-{token}.last"
            copy.write_text(f"{new}\n", encoding="utf-8", errors="surrogateescape")
            copy.rename(git_dir / HEAD)


def _remove_temporaries(git_dir: Path, common: Path, token: str) -> None:
    """Remove the files with the token in their names, and the locks that are hard links of such files."""
    ours: set[tuple[int, int]] = set()
    found = [*_named(git_dir, token), *_named(common / "objects", token)]
    for path in found:
        st = path.stat()
        ours.add((st.st_dev, st.st_ino))
    for name in ("HEAD.lock", "index.lock"):
        with suppress(FileNotFoundError):
            st = (git_dir / name).stat()
            if (st.st_dev, st.st_ino) in ours:
                (git_dir / name).unlink()
    for path in found:
        path.unlink(missing_ok=True)


def _named(directory: Path, token: str) -> Iterable[Path]:
    with suppress(FileNotFoundError):
        return [directory / name for name in os.listdir(directory) if token in name]
    return []


def _remove_lock(path: Path, new: str | None, began: float) -> None:
    """Remove a lock that libgit2 made for the dead writer: not older than the journal, and empty or with `new`."""
    with suppress(FileNotFoundError, NotADirectoryError):
        st = path.stat()
        if st.st_mtime < began - _SLACK or st.st_uid != os.geteuid() or _is_open(st.st_dev, st.st_ino):
            return
        if new is not None:
            text = path.read_text(encoding="ascii", errors="replace")[:_MOST_LOCK_BYTES].strip()
            if text not in ("", new):
                return
        path.unlink()


def _is_open(device: int, inode: int) -> bool:
    """True if a process that we may inspect has the file open."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                for name in os.listdir(process / "fd"):
                    with suppress(OSError):
                        st = os.stat(process / "fd" / name)
                        if (st.st_dev, st.st_ino) == (device, inode):
                            return True
    return False
