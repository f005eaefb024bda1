"""What stands between a file and its blob: line ends and `$Id$`, as attributes and configuration ask.

libgit2 does the converting, by its own built-in rules. A path whose attributes name a program for it (`filter=lfs` with
a driver in some configuration) is refused: without the program its blob would not be what it is meant to be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import pygit2
from pygit2.enums import FilterMode
from pygit2.ffi import C, ffi

from bonobofs.errors import GitError
from bonobofs.guards.git.repository import Repository

_NAME: Final = b".gitattributes"


class Conversion:
    """The conversions of one repository, as its attributes are now."""

    def __init__(self, repository: Repository, is_there: Callable[[bytes], bool]) -> None:
        """`is_there` says whether the working tree has a path."""
        self._store: Final = repository.store
        self._settings: Final = repository.settings
        self._is_there: Final = is_there
        converts = repository.settings.text("core.autocrlf") not in (None, "false", "no", "off", "0", "")
        elsewhere = repository.settings.text("core.attributesfile") is not None
        self._always: Final = converts or elsewhere or any(place.exists() for place in _places(repository))
        self._staged: set[bytes] | None = None
        self._known: Final[dict[bytes, bool]] = {}

    def follow(self, staged: Iterable[bytes]) -> None:
        """Know the paths of the index, which has attributes where the working tree has none."""
        self._staged = {path.rpartition(b"/")[0] for path in staged if path.endswith(_NAME)}

    def forget(self) -> None:
        """Attributes have changed."""
        self._known.clear()

    def _may_have(self, path: bytes) -> bool:
        """Whether any attribute may speak of a path, or the configuration has all files converted."""
        above = path.rpartition(b"/")[0]
        if above not in self._known:
            # Every one on the way is looked at: whoever reads them does not ask what they are.
            there = self._is_there(above + b"/" + _NAME if above else _NAME)
            there = there or self._staged is None or above in self._staged
            self._known[above] = (bool(above) and self._may_have(above)) or there
        return self._always or self._known[above]

    def check(self, path: bytes) -> None:
        """GitError: a program, or an encoding that is not known here, is to convert the path."""
        if not self._may_have(path):
            return
        name = _text(path)
        driver = self._attribute(name, "filter")
        if isinstance(driver, str):
            keys = (f"filter.{driver}.{what}" for what in ("clean", "smudge", "process"))
            if any(self._settings.text(key) for key in keys):
                raise GitError(f"{name} goes through the filter {driver}", kind="filter", paths=(name,))
        if isinstance(self._attribute(name, "working-tree-encoding"), str):
            raise GitError(f"{name} has an encoding of its own in the working tree", kind="filter", paths=(name,))

    def to_blob(self, path: bytes, content: bytes) -> bytes:
        """What git keeps of a file."""
        return self._converted(path, FilterMode.TO_ODB, content) if content and self._may_have(path) else content

    def to_file(self, path: bytes, oid: bytes) -> bytes:
        """What git puts into a file."""
        blob = self._store[pygit2.Oid(raw=oid)]
        return self._converted(path, FilterMode.TO_WORKTREE, blob) if self._may_have(path) else blob.read_raw()

    def _attribute(self, name: str, attribute: str) -> bool | str | None:
        try:
            return self._store.get_attr(name, attribute)
        except (pygit2.GitError, ValueError, KeyError) as error:
            raise GitError(f"the attributes of {name} cannot be read: {error}", kind="unsupported") from error

    def _converted(self, path: bytes, mode: FilterMode, given: bytes | pygit2.Object) -> bytes:
        try:
            chain = self._store.load_filter_list(_text(path), mode)
            if chain is None:
                return given if isinstance(given, bytes) else given.read_raw()
            # What pygit2 has for this ends at the first NUL.
            buffer = ffi.new("git_buf *")
            try:
                if isinstance(given, bytes):
                    failed = C.git_filter_list_apply_to_buffer(buffer, chain._pointer, given, len(given))  # noqa: SLF001
                else:
                    blob = ffi.new("git_blob **")
                    ffi.buffer(blob)[:] = given._pointer[:]  # noqa: SLF001
                    failed = C.git_filter_list_apply_to_blob(buffer, chain._pointer, blob[0])  # noqa: SLF001
                if failed:
                    raise GitError(f"{_text(path)} cannot be converted", kind="unsupported")
                return bytes(ffi.buffer(buffer.ptr, buffer.size)) if buffer.size else b""
            finally:
                C.git_buf_dispose(buffer)
        except (pygit2.GitError, ValueError, KeyError) as error:
            raise GitError(f"{_text(path)} cannot be converted: {error}", kind="unsupported") from error


def _places(repository: Repository) -> Iterable[Path]:
    """Where attributes for every path may be."""
    own = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return repository.layout.common / "info/attributes", Path("/etc/gitattributes"), Path(own, "git/attributes")


def _text(path: bytes) -> str:
    """For attributes, which are looked up by text: what is none becomes a letter that no pattern names."""
    return path.decode("utf-8", "replace")
