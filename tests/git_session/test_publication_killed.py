"""kill -9 at every system call of a publication that changes something: the operator's git works at once."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.git_session.conftest import Publishing, PublishingMaker

CALLS = ("rename", "link", "unlink", "mkdir", "rmdir", "fsync", "fdatasync", "ftruncate", "sendto", "fchmod", "write")
"""System calls at which the worker is killed, before they run."""


def _pids(one: Publishing) -> tuple[int, int, int]:
    """The server, the companion and the worker."""
    server = one.world.pid
    companion = _children(server)[0]
    workers = [pid for pid in _children(companion) if b"git.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return server, companion, workers[0]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] or [
        int(child)
        for task in os.listdir(f"/proc/{pid}/task")
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    ]


def _traced(pid: int, call: str, number: int) -> subprocess.Popen[bytes]:
    """Kill the process at its n-th such call."""
    inject = f"inject={call}:signal=SIGKILL:when={number}"
    tracer = subprocess.Popen(
        ["strace", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject, "-p", str(pid)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while b"TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_bytes():
        assert tracer.poll() is None
    return tracer


def _operate(one: Publishing, number: int) -> None:
    """The operator works: nothing is locked, nothing of ours is left, and nothing is staged."""
    staged = [line for line in one.source.git("status", "--porcelain").splitlines() if line[0] not in " ?"]
    assert staged == []
    one.source.check()
    one.source.write("operator.md", f"{number}\n")
    one.source.git("add", "operator.md")
    one.source.git("commit", "-qm", f"[gt-0] The operator's {number}")
    owners = {path.lstat().st_uid for path in one.git_dir.rglob("*")}
    assert owners == {os.geteuid()}


def _is_killed(one: Publishing, call: str, number: int) -> bool:
    """Whether the worker was killed at that call while it published a commit."""
    tracer = _traced(_pids(one)[2], call, number)
    one.repo.git("reset", "-q", "--soft", one.source.id("aidlc/x"))
    one.repo.write("a.md", f"{call} {number}\n")
    one.repo.run("commit", "-q", "-m", f"[gt-1] Change {number}", "a.md")
    killed = tracer.poll() is not None
    tracer.send_signal(signal.SIGINT)
    tracer.communicate()
    return killed


@pytest.mark.timeout(600)
@pytest.mark.parametrize("call", CALLS)
def test_the_worker_is_killed_at_every_step(publishing: PublishingMaker, call: str) -> None:
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    number = 1
    while _is_killed(one, call, number):
        _operate(one, number)
        # The next commit is published, whatever became of that.
        one.repo.git("reset", "-q", "--soft", one.source.id("aidlc/x"))
        one.repo.write("docs/b.md", f"{number}\n")
        told = one.repo.run("commit", "-q", "-m", f"[gt-1] Next {number}", "docs/b.md").stderr.decode()
        assert "published aidlc/x (1 commit)" in told, (number, told)
        number += 1
    _operate(one, number)
    print(call, number, flush=True)
