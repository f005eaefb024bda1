"""Entry of the server process of one mount; standard input has its configuration as JSON.

The companion is started before the rest of the server is loaded, so that both load at the same time.
"""

from __future__ import annotations

import os
import sys

from bonobofs.fuse.companion_supervisor import start_server
from bonobofs.ipc.session_config import SessionConfig
from bonobofs.system import syscalls


def main() -> int:
    """Serve the mount that standard input describes; the exit status."""
    config = SessionConfig.from_json(sys.stdin.read())
    os.chdir("/")
    syscalls.forbid_tracing()
    syscalls.raise_limit()
    start = start_server(config)
    from bonobofs.fuse.server import serve  # noqa: PLC0415 - after the start of the companion

    # After the imports: a __pycache__ that they create must serve other users too.
    os.umask(0o077)
    return serve(config, start)


if __name__ == "__main__":
    sys.exit(main())
