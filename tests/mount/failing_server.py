"""A server with unexpected failures: `python -m tests.mount.failing_server`.

It is the real server in a process of its own, with its configuration on standard input. A lookup of a name that
begins with `fail` raises; a name that begins with `fail-later` raises after the reply, and in the next round of
tidying up.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from bonobofs.fuse import main as process
from bonobofs.fuse import server
from bonobofs.fuse.abi import Opcode
from bonobofs.fuse.dispatch import Operations
from bonobofs.fuse.mount_context import Header, Reply


class _Failing:
    """The real operations with failures. Not a subclass: a compiled class has no interpreted ones."""

    after = tidying = False

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self.handlers = {**operations.handlers, Opcode.LOOKUP: self._lookup}

    def __getattr__(self, name: str) -> object:
        return getattr(self._operations, name)

    def _lookup(self, header: Header, body: memoryview) -> Reply:
        name = bytes(body)
        if name.startswith(b"fail-later"):
            self.after = self.tidying = True
        elif name.startswith(b"fail"):
            raise ValueError("an unexpected error")
        return self._operations.handlers[Opcode.LOOKUP](header, body)

    def after_reply(self) -> None:
        if self.after:
            self.after = False
            raise LookupError("after the reply")
        self._operations.after_reply()

    def expire_caches(self) -> None:
        if self.tidying:
            self.tidying = False
            raise LookupError("tidying up")
        self._operations.expire_caches()


def main() -> int:
    """Serve until the mount ends."""

    def create(*parameters: Any) -> _Failing:
        return _Failing(Operations(*parameters))

    vars(server)["Operations"] = create
    if "full" in sys.argv:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
