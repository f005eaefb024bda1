"""kill -9 at every changing system call of a publication: the operator's git works at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from bonobofs.system import mounts
from tests.git.conftest import Publishing, PublishingMaker
from tests.support import proc
from tests.support.observe import companion_of
from tests.support.wait import until

CALLS = ("rename", "link", "unlink", "mkdir", "rmdir", "fsync", "fdatasync", "ftruncate", "sendto", "fchmod", "write")
"""System calls at which the worker is killed, before they run."""


def _pids(one: Publishing) -> tuple[int, int, int]:
    """The server, the companion and the worker."""
    companion = companion_of(one.world.pid)
    return one.world.pid, companion, proc.child(companion, b"git.worker")


def _traced(pid: int, call: str, number: int, sent: str = "SIGKILL") -> subprocess.Popen[bytes]:
    """Send the process a signal at its n-th such call."""
    inject = f"inject={call}:signal={sent}:when={number}"
    tracer = subprocess.Popen(
        ["strace", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject, "-p", str(pid)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while not proc.is_traced(pid):
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


def test_a_hook_of_a_killed_worker_ends(publishing: PublishingMaker) -> None:
    """It opens a FIFO when the worker is gone. The push that it belongs to would wait for it without limit."""
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    one.repo.commit("[gt-1] One", {"a.md": "1\n"})
    worker = _pids(one)[2]
    state = one.world.home / "sessions" / one.world.session.session / "git-worker.json"
    left = Path(json.loads(state.read_text())["directory"], "receive-left")
    left.mkdir()
    for name in ("request", "answer"):
        os.mkfifo(left / name)
    os.kill(worker, signal.SIGKILL)
    hooks = [subprocess.Popen(["sh", "-c", script], cwd=left) for script in ("echo x >request", "read line <answer")]
    try:
        for hook in hooks:
            until(lambda: proc.state(hook.pid) == "S", "the hook waits")  # noqa: B023
        one.repo.commit("[gt-1] Two", {"a.md": "2\n"})
        for hook in hooks:
            hook.wait(30)
    finally:
        for hook in hooks:
            hook.kill()
            hook.wait()
    assert not left.exists()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("call", CALLS)
def test_a_worker_killed_at_any_step_leaves_a_valid_repository(publishing: PublishingMaker, call: str) -> None:
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


def _stopped(one: Publishing, call: str, number: int) -> subprocess.Popen[bytes]:
    """Begin a commit whose publication stops at that call of the worker; the process of the commit."""
    worker = _pids(one)[2]
    tracer = _traced(worker, call, number, "SIGSTOP")
    one.repo.write("a.md", f"{call} {number}\n")
    command = ["git", "commit", "-q", "-m", f"[gt-1] Stopped {number}", "a.md"]
    running = subprocess.Popen(command, cwd=one.repo.root, env=one.repo.env, stderr=subprocess.DEVNULL)
    until(lambda: proc.state(worker) in "tT", "the worker stops")
    tracer.send_signal(signal.SIGINT)
    tracer.communicate()
    return running


@pytest.mark.parametrize(("call", "number"), [("rename", 2), ("rename", 5), ("link", 1)])
def test_a_companion_killed_during_publication_leaves_a_valid_repository(
    publishing: PublishingMaker, call: str, number: int
) -> None:
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    _, companion, worker = _pids(one)
    running = _stopped(one, call, number)
    os.kill(companion, signal.SIGKILL)
    os.kill(worker, signal.SIGCONT)
    running.wait(60)
    until(lambda: proc.state(worker) in "Z-", "the worker ends")
    until(lambda: not _left(one), "nothing is left")
    _operate(one, number)
    one.repo.git("reset", "-q", "--soft", one.source.id("aidlc/x"))
    one.repo.write("docs/b.md", "next\n")
    told = one.repo.run("commit", "-q", "-m", "[gt-1] Next", "docs/b.md").stderr.decode()
    assert "published aidlc/x (1 commit)" in told


@pytest.mark.parametrize(("call", "number"), [("rename", 4), ("link", 1), ("fsync", 6)])
def test_killing_every_process_leaves_a_valid_repository(publishing: PublishingMaker, call: str, number: int) -> None:
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    worker = _pids(one)[2]
    running = _stopped(one, call, number)
    os.kill(worker, signal.SIGKILL)
    one.world.kill()
    mounts.detach(one.world.path, lazy=True)
    running.kill()
    running.wait()
    one.source.git("status", "--porcelain")
    again = publishing(source=one.source)
    until(lambda: not _left(one), "nothing is left")
    _operate(again, number)


def _left(one: Publishing) -> list[str]:
    return [path.name for path in one.git_dir.rglob("*") if path.suffix == ".lock" or "bonobofs" in path.name]
