"""A program: carry out an operation of the gate again and again, killed at each step in turn, and see it mended.

    killed.py DIRECTORY OPERATION

DIRECTORY holds `repo`, and is written to. For each audit event of Python that changes a file system (open for writing,
rename, link, unlink, mkdir, rmdir, symlink, chmod), and before each, a child dies of SIGKILL. What it left must be what
was before or what is after, once the next operation has run; git must find nothing wrong with it. Prints how many steps
there were.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bonobofs.guards.git.gate import GitGate
from bonobofs.session import open_session

ENVIRONMENT = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.truncate"}

OPERATIONS: dict[str, Callable[[GitGate], object]] = {
    "commit": lambda gate: gate.commit("[gt-1] Files", ["a.txt", "gone.txt", "new/file.txt"], only=True),
    "merge": lambda gate: gate.merge("aidlc/other"),
    "switch": lambda gate: gate.switch("aidlc/other"),
    "reset": lambda gate: gate.reset("aidlc/other", "hard"),
    "stash": lambda gate: gate.stash_push(),
    "unstash": lambda gate: gate.stash_apply(drop=True),
    "move": lambda gate: gate.move([("a.txt", "moved/a.txt")]),
    "rename": lambda gate: gate.rename_branch("aidlc/other", "aidlc/renamed"),
    "delete": lambda gate: gate.delete_branch("aidlc/other", force=True),
}


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


def state(root: Path) -> tuple[object, ...]:
    """All that a person sees of it, but for the ids of commits, which hold the time."""
    git(root, "fsck", "--strict", "--no-dangling")
    trees = [
        git(root, "log", "--format=%T %s", name) for name in git(root, "for-each-ref", "--format=%(refname)").split()
    ]
    names = git(root, "for-each-ref", "--format=%(refname)")
    files = {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".git/" not in str(path)
    }
    stash = git(root, "stash", "list", "--format=%gs")
    return git(root, "symbolic-ref", "HEAD"), names, trees, git(root, "status", "--porcelain"), files, stash


def run(root: Path, operation: str, policy: Path, kill_at: int) -> int:
    """Carry it out in a child that dies at a step, 0 for none; gives how it ended, or how many steps there were."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with open_session(root, agent="alice", policy=policy) as session:
                gate = GitGate(session)
                count = 0

                def step(event: str, arguments: tuple[object, ...]) -> None:
                    nonlocal count
                    is_change = event in CHANGES or (
                        event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
                    )
                    if is_change and "trails" not in str(arguments[0]) and "home/locks" not in str(arguments[0]):
                        count += 1
                        if count == kill_at:
                            os.kill(os.getpid(), signal.SIGKILL)

                sys.addaudithook(step)
                OPERATIONS[operation](gate)
                steps, count = count, -1_000_000
                os.write(writer, str(steps).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        said = told.read()
    _, status = os.waitpid(pid, 0)
    assert said or os.WIFSIGNALED(status), f"{operation} failed at {kill_at}"
    return int(said) if said else 0


def main(directory: Path, operation: str) -> None:
    policy = directory / "policy.toml"
    before = state(directory / "repo")
    whole = directory / "whole"
    shutil.copytree(directory / "repo", whole, symlinks=True)
    steps = run(whole, operation, policy, 0)
    after = state(whole)
    assert before != after
    seen = set()
    for kill_at in range(1, steps + 1):
        root = directory / f"killed-{kill_at}"
        shutil.copytree(directory / "repo", root, symlinks=True)
        assert run(root, operation, policy, kill_at) == 0
        git(root, "fsck", "--strict", "--no-dangling")
        with open_session(root, agent="alice", policy=policy) as session:
            GitGate(session).tag(f"after-{kill_at}", "main")
        git(root, "tag", "-d", f"after-{kill_at}")
        found = state(root)
        assert found in (before, after), (operation, kill_at, found, before, after)
        seen.add(found == after)
        left = [str(path) for path in root.rglob("*") if "bonobofs-" in path.name or path.suffix == ".lock"]
        assert not left, (operation, kill_at, left)
        shutil.rmtree(root)
    assert seen == {False, True}, "it was killed before its point of no return, and after"
    print(steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
