"""A server with unexpected failures: `python -m tests.mount.failing_server`.

It is the real server in a process of its own, with its configuration on standard input. A lookup of a name that
begins with `fail` raises; a name that begins with `fail-later` raises after the reply, and in the next round of
tidying up.
"""

from __future__ import annotations

import os
import sys

from bonobofs.fuse import main as process
from bonobofs.fuse import server
from bonobofs.fuse.abi import Opcode
from bonobofs.fuse.dispatch import Operations
from bonobofs.fuse.mount_context import Header, Reply


class _Failing(Operations):
    after = tidying = False

    def prune_nodes(self) -> None:
        if self.after:
            self.after = False
            raise LookupError("after the reply")
        super().prune_nodes()

    def expire_caches(self) -> None:
        if self.tidying:
            self.tidying = False
            raise LookupError("tidying up")
        super().expire_caches()


def _lookup(operations: _Failing) -> None:
    real = operations.handlers[Opcode.LOOKUP]

    def lookup(header: Header, body: memoryview) -> Reply:
        name = bytes(body)
        if name.startswith(b"fail-later"):
            operations.after = operations.tidying = True
        elif name.startswith(b"fail"):
            raise ValueError("an unexpected error")
        return real(header, body)

    operations.handlers[Opcode.LOOKUP] = lookup


def main() -> int:
    """Serve until the mount ends."""

    def made(*parts: object) -> _Failing:
        operations = _Failing(*parts)  # type: ignore[arg-type] # whatever the server gives
        _lookup(operations)
        return operations

    vars(server)["Operations"] = made
    if "full" in sys.argv:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
