"""The process that serves one mount: `python -m bonobofs.fuse.main`, its configuration as JSON on standard input.

The companion is started before anything else is loaded: each has as much to load, and neither need wait for the other.
"""

from __future__ import annotations

import json
import os
import sys

from bonobofs.fuse.companion_supervisor import begin
from bonobofs.system import syscalls


def main() -> int:
    """Serve the mount that standard input describes; the exit code."""
    config = json.load(sys.stdin)
    os.chdir("/")
    os.umask(0o077)
    syscalls.forbid_tracing()
    syscalls.raise_limit()
    beginning = begin(config)
    from bonobofs.fuse.server import serve  # noqa: PLC0415 - as said above

    return serve(config, beginning)


if __name__ == "__main__":
    sys.exit(main())
