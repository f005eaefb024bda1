"""Run commands in a process that has loaded bonobofs: `python -m tests.support.command_server DESCRIPTOR`.

Each command is a process of its own. It has the arguments, directory, umask, environment and descriptors of the
request. Loading the package takes 0.2 to 0.6 s of processor time for each command, and a fork of this process 0.01 s.
"""

from __future__ import annotations

import gc
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
from importlib import import_module

import bonobofs.cli
import bonobofs.session
import bonobofs.state


def _load() -> None:
    """Import what commands use."""
    for package in (bonobofs.cli, bonobofs.session, bonobofs.state):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    import_module("sqlalchemy.dialects.sqlite")


def _next_command(channel: socket.socket) -> bool:
    """Return True in the process of the next command, and False in this one when no more commands come."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 4)
        if not request:
            return False
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    *standard, status = descriptors
    pid = os.fork()
    if pid:
        for descriptor in standard:
            os.close(descriptor)
        os.write(status, b"%d\n" % pid)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.close(status)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    command = json.loads(request)
    sys.argv[1:] = command["arguments"]
    os.environ.clear()
    os.environ.update(command["environment"])
    os.umask(command["umask"])
    os.chdir(command["cwd"])
    return True


if __name__ == "__main__":
    _load()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if _next_command(socket.socket(fileno=int(sys.argv.pop(1)))):
        runpy.run_module("bonobofs", run_name="__main__", alter_sys=True)
