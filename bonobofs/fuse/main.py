"""Entry of the server process of one mount; standard input has its configuration as JSON.

`mount` starts it before its own checks, so that both load at the same time. The server forks the companion after the
first line of the configuration. It imports the modules that both need before the fork. Each process then imports its
own.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Final

from bonobofs.system import mount_probe

_SHARED_MODULES: Final = ("bonobofs.audit.recovery", "bonobofs.enforcement.authorizer")
"""Modules that server and companion need, with all that these import."""


def main() -> int:
    """Serve the mount that standard input describes; the exit status.

    Arguments: MOUNTPOINT; for a server in the background, also CONFIG_FD READY_FD ERRORS_FD.
    """
    if len(sys.argv) > 2 and _fork_server(*map(int, sys.argv[2:])):
        mount_probe.main()
    from bonobofs.fuse.companion_supervisor import start_server  # noqa: PLC0415 - after the fork of the probe
    from bonobofs.ipc.session_config import SessionConfig, StartConfig  # noqa: PLC0415
    from bonobofs.policy.engine import compile_policy  # noqa: PLC0415
    from bonobofs.system import syscalls  # noqa: PLC0415

    os.chdir("/")
    syscalls.forbid_tracing()
    syscalls.raise_limit()
    for name in _SHARED_MODULES:
        import_module(name)
    line = sys.stdin.readline()
    if not line:
        return 0  # the checks of `mount` have failed
    first = StartConfig.from_line(line)
    start = start_server(first)
    from bonobofs.fuse.server import serve  # noqa: PLC0415 - after the start of the companion

    policy = compile_policy(first.policy)
    text = sys.stdin.read()
    if not text:
        return 0
    config = SessionConfig.from_json(text)
    config.open_log()
    start.configure(config)
    # After the imports: a __pycache__ that they create must serve other users too.
    os.umask(0o077)
    return serve(config, start, policy)


def _fork_server(config: int, ready: int, errors: int) -> bool:
    """Fork the server from this process, which becomes the probe: the caller waits for its child. True: the probe.

    The server has the configuration as its standard input, and `errors` as its standard error. It reports its pid on
    `ready`.
    """
    if os.fork():
        for fd in (config, ready, errors):
            os.close(fd)
        return True
    for fd, standard in ((config, 0), (errors, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    os.write(ready, b"%d\n" % os.getpid())
    return False


if __name__ == "__main__":
    sys.exit(main())
