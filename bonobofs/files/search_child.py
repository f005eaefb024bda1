"""The program that searches files, run as a child process so that its time and memory can be limited.

It imports only the standard library. It opens only regular files below the directory `root`, on the same file system,
and follows no symlink.

Standard input: one line of JSON with `root` (a descriptor), `query`, `most`, `longest_file`, `longest_line`, `seconds`
and `memory` (bytes), then the paths, each terminated by NUL. Standard output: one line of JSON for each match, `[path,
line, text]`, then one line `{"searched", "skipped", "more"}`, or `{"error"}` if the query is not a valid expression.
"""

from __future__ import annotations

import json
import os
import re
import resource
import stat
import sys
from typing import Any, Final

_HEAD: Final = 8192
"""A file with a NUL in this many first bytes is binary."""
_BEFORE: Final = 100
"""Characters of a long line that are kept before the match."""


class _Files:
    """Opens files by path. It keeps the last directory open, because the next file is often in the same one."""

    def __init__(self, root: int) -> None:
        self._root: Final = root
        self._device: Final = os.fstat(root).st_dev
        self._directory = root
        self._path = ""

    def read(self, path: str, most: int) -> bytes | None:
        """Return the content; None if the file is binary, too large or not regular. Raises OSError."""
        directory, _, name = path.rpartition("/")
        self._open(directory)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._directory)
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_dev != self._device or status.st_size > most:
                return None
            head = file.read(_HEAD)
            return None if b"\0" in head else head + file.read(most)

    def _open(self, directory: str) -> None:
        if directory == self._path:
            return
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
        try:
            for name in filter(None, directory.split("/")):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                above, descriptor = descriptor, os.open(name, flags, dir_fd=descriptor)
                os.close(above)
        except OSError:
            os.close(descriptor)
            raise
        if self._directory != self._root:
            os.close(self._directory)
        self._directory, self._path = descriptor, directory


def main() -> None:
    line, _, names = sys.stdin.buffer.read().partition(b"\n")
    arguments: dict[str, Any] = json.loads(line)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (arguments["seconds"], arguments["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (arguments["memory"], arguments["memory"]))
    try:
        expression = re.compile(arguments["query"])
    except (re.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
        _write({"error": str(error) or type(error).__name__})
        return
    files, matches, searched, skipped = _Files(arguments["root"]), 0, 0, 0
    for name in names.split(b"\0")[:-1]:
        path = os.fsdecode(name)
        try:
            content = files.read(path, arguments["longest_file"])
            if content is None:
                skipped += 1
                continue
            searched += 1
            for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), 1):
                match = expression.search(line)
                if match is not None:
                    if matches == arguments["most"]:
                        _write({"searched": searched, "skipped": skipped, "more": True})
                        return
                    matches += 1
                    _write([path, number, _cut(line, match.start(), arguments["longest_line"])])
        except (OSError, MemoryError, RecursionError):
            skipped += 1
    _write({"searched": searched, "skipped": skipped, "more": False})


def _cut(line: str, start: int, longest: int) -> str:
    """Return the line, or the part of a long line in which the match begins."""
    begin = max(0, min(start - _BEFORE, len(line) - longest))
    return line[begin : begin + longest] if len(line) > longest else line


def _write(document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
