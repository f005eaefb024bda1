"""Several at once: commits queue and both land, locks of git are respected, and the index stays true."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bonobofs.errors import GitError
from tests.git.conftest import Gate, Gated, Repo


def test_commits_at_once_queue_and_all_land(repo: Repo, gated: Gate) -> None:
    """Two sessions that commit at the same time lose nothing: each commit has the other's as its ancestor."""
    repo.git("checkout", "-q", "-b", "aidlc/work")
    sessions = [gated(repo, agent=name) for name in ("alice", "bob")]
    start = threading.Barrier(4)

    def commit(number: int) -> list[str]:
        start.wait()
        made = []
        for count in range(5):
            path = f"docs/{number}-{count}.md"
            repo.write(path, "x")
            made.append(sessions[number % 2].gate.commit(f"[gt-{number}] {count}", [path], only=True).hash)
        return made

    with ThreadPoolExecutor(4) as pool:
        made = [oid for each in pool.map(commit, range(4)) for oid in each]
    assert set(repo.git("rev-list", "main..aidlc/work").split()) == set(made)
    assert len(set(made)) == 20
    assert repo.status() == ""
    assert len(repo.git("reflog", "show", "aidlc/work").splitlines()) == 21
    repo.check()


def test_git_and_the_gate_do_not_undo_each_other(repo: Repo, gated: Gate) -> None:
    """Plain git commits beside the gate: each waits or fails by git's own locks, and what succeeded is there."""
    repo.git("checkout", "-q", "-b", "aidlc/work")
    alice = gated(repo)
    landed: list[str] = []
    ended = threading.Event()

    def by_git() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            repo.write(f"git/{number}.txt", "x")
            repo.run("add", f"git/{number}.txt")
            if repo.run("commit", "-q", "-m", "By git", "--", f"git/{number}.txt").returncode == 0:
                landed.append(f"git/{number}.txt")

    thread = threading.Thread(target=by_git)
    thread.start()
    try:
        for number in range(15):
            path = f"gate/{number}.txt"
            repo.write(path, "x")
            try:
                alice.gate.commit(f"[gt-1] {number}", [path], only=True)
            except GitError as error:
                assert error.kind == "busy"  # noqa: PT017 - it may be raised, and need not be
            else:
                landed.append(path)
    finally:
        ended.set()
        thread.join()
    names = repo.git("ls-tree", "-r", "--name-only", "HEAD").splitlines()
    assert set(landed) <= set(names)
    assert any(path.startswith("gate/") for path in landed)
    repo.check()


@pytest.mark.parametrize("lock", ["index.lock", "HEAD.lock", "refs/heads/aidlc/work.lock"])
def test_a_lock_of_git_is_respected(alice: Gated, lock: str) -> None:
    """While another program holds a lock, nothing is changed and the lock stays; afterwards it works."""
    place = alice.root / ".git" / lock
    place.write_text("theirs")
    alice.write("docs/plan.md", "Changed\n")
    before = alice.git("for-each-ref"), alice.staged()
    with pytest.raises(GitError) as caught:
        alice.gate.commit("[gt-1] x", ["docs/plan.md"])
    assert (caught.value.kind, caught.value.paths) == ("busy", (str(place),))
    assert place.read_text() == "theirs"
    assert (alice.git("for-each-ref"), alice.staged()) == before
    place.unlink()
    alice.gate.commit("[gt-1] x", ["docs/plan.md"])
    alice.check()


def test_the_gate_waits_for_a_lock_that_is_soon_gone(alice: Gated) -> None:
    """A program that is done within a moment makes nobody fail."""
    place = alice.root / ".git/index.lock"
    place.write_text("theirs")
    alice.write("docs/plan.md", "Changed\n")
    timer = threading.Timer(0.3, place.unlink)
    timer.start()
    alice.gate.commit("[gt-1] x", ["docs/plan.md"])
    timer.join()
    assert alice.status() == ""


@pytest.mark.parametrize("version", [2, 3, 4])
def test_the_index_stays_true_for_plain_git(alice: Gated, version: int) -> None:
    """Whatever its version, the index has real times: git reads no file again, and what is staged stays staged."""
    for number in range(50):
        alice.write(f"files/{number}.txt", f"{number}\n")
    alice.commit("Files")
    alice.write("only/intended.txt", "x")
    alice.git("update-index", f"--index-version={version}" if version != 3 else "--index-version=2")
    if version == 3:
        alice.git("add", "-N", "only/intended.txt")
    alice.write("files/1.txt", "staged\n")
    alice.git("add", "files/1.txt")
    alice.write("files/2.txt", "changed\n")
    alice.git("config", "core.untrackedCache", "true")
    alice.status()
    alice.gate.commit("[gt-1] x", ["files/2.txt"], only=True)
    assert alice.git("diff-files", "--name-only") == ("only/intended.txt\n" if version == 3 else "")
    assert alice.git("diff-index", "--cached", "--name-only", "HEAD") == (
        "files/1.txt\n" if version != 3 else "files/1.txt\nonly/intended.txt\n"
    )
    times = {path.name: path.stat().st_mtime_ns for path in (alice.root / "files").iterdir()}
    for line in alice.git("ls-files", "--debug", "files").split("files/")[1:]:
        name, rest = line.split("\n", 1)
        seconds, nanoseconds = rest.split("mtime: ")[1].split("\n")[0].split(":")
        assert int(seconds) * 10**9 + int(nanoseconds) == times[name]
    alice.git("update-index", "--really-refresh", code=0 if version != 3 else 1)
    alice.check()


def test_a_change_within_the_same_moment_is_seen(alice: Gated) -> None:
    """A file that changes, with its size kept, right after it was staged by git is not taken for unchanged."""
    for number in range(20):
        path = alice.write("docs/plan.md", f"{number:04}\n")
        alice.git("add", "docs/plan.md")
        path.write_text(f"{number + 5000:04}\n")
        times = path.stat()
        alice.write("other.md", f"{number}\n")
        alice.gate.commit("[gt-1] other", ["other.md"], only=True)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert alice.git("status", "--porcelain", "docs").startswith((" M", "MM")), number
        alice.git("commit", "-qam", "x")


def test_a_file_that_changes_meanwhile_is_not_overwritten(alice: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody writes between the look and the change stays, and all that was done is taken back."""
    alice.commit("Two", a_txt="a\n", b_txt="b\n", c_txt="c\n")
    alice.git("checkout", "-q", "-b", "aidlc/other")
    alice.commit("Changed", a_txt="A\n", b_txt="B\n", c_txt=None)
    alice.git("checkout", "-q", "aidlc/work")
    before = alice.files()
    from bonobofs.guards.git.journal import Journal

    plan = Journal.plan

    def late(*arguments: object, **named: object) -> None:
        plan(*arguments, **named)  # type: ignore[arg-type]
        alice.write("b.txt", "somebody's\n")

    monkeypatch.setattr(Journal, "plan", late)
    with pytest.raises(GitError, match="meanwhile") as caught:
        alice.gate.switch("aidlc/other")
    assert caught.value.paths == ("b.txt",)
    assert alice.files() == {**before, "b.txt": (0, b"somebody's\n")}
    assert alice.git("symbolic-ref", "HEAD") == "refs/heads/aidlc/work\n"
    assert alice.status() == " M b.txt\n"
    alice.check()


def test_a_file_that_cannot_be_written_takes_all_back(alice: Gated) -> None:
    """Where a directory cannot be made, files that were written already are as before."""
    alice.git("checkout", "-q", "-b", "aidlc/other")
    alice.commit("Changed", a_txt="A\n", z__z_txt="z\n", docs__plan_md="Changed\n")
    alice.git("checkout", "-q", "aidlc/work")
    before = alice.files()
    alice.write("z/keep.txt", "x")
    (alice.root / "z/z.txt").mkdir()
    alice.write("z/z.txt/inside", "mine")
    with pytest.raises((GitError, OSError)):
        alice.gate.switch("aidlc/other")
    assert {name: each for name, each in alice.files().items() if not name.startswith("z/")} == before
    assert (alice.root / "z/z.txt/inside").read_text() == "mine"
    alice.check()


def test_ten_thousand_files_are_checked_out(alice: Gated) -> None:
    """A large tree goes and comes back, with an index that git takes as it is."""
    for number in range(10_000):
        alice.write(f"many/{number % 100}/{number}.txt", f"{number}\n")
    alice.commit("Many")
    alice.git("branch", "aidlc/old", "main")
    alice.gate.switch("aidlc/old")
    assert not (alice.root / "many").exists()
    alice.gate.switch("aidlc/work")
    assert alice.git("diff-files", "--name-only") == ""
    assert len(list((alice.root / "many").rglob("*.txt"))) == 10_000
    assert alice.status() == ""
    assert Path(alice.root / "many/7/107.txt").read_text() == "107\n"
    alice.check()
