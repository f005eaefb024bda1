"""The channel between server and companion: another process of the same user cannot take it or write to it."""

from __future__ import annotations

import json
import os
import socket

import pytest

from bonobofs.errors import ProtocolError
from bonobofs.ipc.channel import Channel, MessageKind
from tests.support.world import OrdinaryUser

THIEF = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
PIDFD_GETFD = 438
server = int(sys.argv[1])

def children():
    with open(f"/proc/{server}/task/{server}/children") as file:
        return file.read().split()

stolen = tried = 0
before = children()
for _ in range(3):
    os.kill(int(before[0]), signal.SIGKILL)
    end = time.monotonic() + 30
    while time.monotonic() < end and ((now := children()) == before or not now):
        pass
    pidfd = os.pidfd_open(int(now[0]))
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        for fd in range(3, 40):
            tried += 1
            stolen += libc.syscall(PIDFD_GETFD, pidfd, fd, 0) >= 0
    before = now
print(stolen, tried > 1000)
"""


def test_a_new_companion_is_never_traceable(ordinary_user: OrdinaryUser) -> None:
    """The attacker kills the companion and tries to take the descriptors of each new one."""
    policy, source, work = (ordinary_user.directory / name for name in ("policy.toml", "source", "work"))
    policy.write_text('default = "allow"\n')
    assert ordinary_user.run("mkdir", source, work).returncode == 0
    made = ordinary_user.bonobofs("mount", source, work, "--policy", policy)
    assert made.returncode == 0, made.stderr
    try:
        (one,) = json.loads(ordinary_user.bonobofs("status", "--json").stdout)
        thief = ordinary_user.run(ordinary_user.python, "-c", THIEF, str(one["pid"]))
        assert (thief.stdout.split(), thief.stderr) == (["0", "True"], "")
    finally:
        assert ordinary_user.bonobofs("umount", work).returncode == 0


def test_a_message_of_another_process_is_refused() -> None:
    """The server accepts only messages of its companion, also if another process has the other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, blocking=False, peer=os.getpid())
        stranger = os.fork()
        if stranger == 0:
            Channel(theirs, blocking=True).send(MessageKind.POLICY, {"origin": "", "policy": {}})
            os._exit(0)
        os.waitpid(stranger, 0)
        with pytest.raises(ProtocolError, match=str(stranger)):
            channel.receive()
        Channel(theirs, blocking=True).send(MessageKind.CHANGES_LOST)
        assert channel.receive() == [(MessageKind.CHANGES_LOST, b"")]
