"""A publication is taken back: the branch returns to its old value, or the undo says why it cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bonobofs.audit.entry import UNDO
from bonobofs.audit.reader import read
from bonobofs.git.git_guard import GitGuard
from bonobofs.git.git_worker import GitWorker, WorkerSession
from bonobofs.git.source_refs import PublishedBranches
from bonobofs.session import open_session, undo_service
from bonobofs.session.undo_refs import OperatorAuthorizer, RefsOfSource
from bonobofs.state.home import trail_path
from bonobofs.undo.changes import RefMove
from bonobofs.undo.steps import UndoStep
from tests.git.conftest import FREE, Publishing, PublishingMaker
from tests.support import proc
from tests.support.commands import bonobofs, environment
from tests.support.repositories import Repo
from tests.support.source_state import undo
from tests.support.wait import until
from tests.support.world import NOBODY

TRUSTING = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
UNDOING = FREE + '[role.agent]\nwrite = ["**"]\ntools = ["undo"]\ngit = ["*"]\n'


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that every user may search."""
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        directory = Path(name).resolve()
        directory.chmod(0o755)
        yield directory


def _published(one: Publishing, ref: str) -> tuple[str, str]:
    return PublishedBranches(one.world.home, one.git_dir, one.agent.id).find(f"refs/heads/{ref}")


def _last_publication(one: Publishing, ref: str = "") -> str:
    """The name of the last change of the session that published the ref."""
    entries = [each for each in one.entries() if each.kind == "intent" and "updates" in each.details]
    found = [each for each in entries if ref in each.details["updates"][0]["ref"]]
    return f"{one.world.session.session[:8]}:{found[-1].seq}"


def _agents_undo(one: Publishing, *options: str) -> subprocess.CompletedProcess[str]:
    return bonobofs("undo", "--json", *options, cwd=one.world.path)


def test_a_session_is_taken_back_with_its_publications(publishing: PublishingMaker) -> None:
    """Files, branch and index of the checkout are as before; the undo of the undo publishes the same commits again."""
    one = publishing(UNDOING)
    one.source.git("branch", "aidlc/x")
    one.repo.git("fetch", "-q", "source", "aidlc/x:aidlc/x")
    one.repo.git("switch", "-q", "aidlc/x")
    old = one.source.id("aidlc/x")
    made = [one.repo.commit(f"[gt-1] Page {n}", {"docs/c.md": f"{n}\n", "a.md": f"{n}\n"}) for n in range(3)]
    assert one.source.id("aidlc/x") == made[-1]
    shown = undo(one.world, of_session=one.world.session.session, dry_run=True)
    steps = [step for step in shown["steps"] if step["do"] == "publish"]
    assert [step["arguments"]["updates"][0][2] for step in steps] == [made[1], made[0], old]
    assert one.source.id("aidlc/x") == made[-1]
    first = undo(one.world, of_session=one.world.session.session)
    assert (first["conflicts"], first["failures"]) == ([], [])
    assert one.source.id("aidlc/x") == old
    assert one.source.git("status", "--porcelain") == ""
    assert _published(one, "aidlc/x") == ("", ""), "the operator had made the branch"
    entries = [each for each in read(trail_path(one.world.home, first["session"])) if each.operation == "publish"]
    assert [each.details[UNDO] for each in entries if each.kind == "intent"] == [step["change"] for step in steps]
    second = undo(one.world, of_session=first["session"])
    assert (second["conflicts"], second["failures"]) == ([], [])
    assert one.source.id("aidlc/x") == made[-1]
    assert (one.source.root / "docs/c.md").read_text() == "2\n"
    assert one.source.git("status", "--porcelain") == ""
    assert _published(one, "aidlc/x") == (one.agent.id, made[-1])
    assert bonobofs("audit", "verify").returncode == 0


def test_a_created_and_a_deleted_branch_are_taken_back(publishing: PublishingMaker) -> None:
    one = publishing()
    one.repo.git("branch", "aidlc/y")
    one.push("aidlc/y")
    created = _last_publication(one)
    one.push(":aidlc/y")
    deleted = _last_publication(one)
    assert undo(one.world, change=created)["conflicts"][0]["reason"] == "the branch was moved afterwards"
    assert undo(one.world, change=deleted)["conflicts"] == []
    assert one.source.id("aidlc/y") == one.source.id("main")
    assert _published(one, "aidlc/y") == (one.agent.id, one.source.id("main"))
    assert undo(one.world, change=created)["conflicts"] == []
    assert one.source.id("aidlc/y") == ""
    assert _published(one, "aidlc/y") == ("", "")


def test_a_published_tag_is_taken_back(publishing: PublishingMaker) -> None:
    """An annotated tag is removed, and the undo of that makes it again."""
    one = publishing()
    one.repo.git("tag", "-a", "v1", "-m", "one")
    one.push("v1")
    tag = one.source.id("v1")
    first = undo(one.world, change=_last_publication(one))
    assert (first["conflicts"], first["failures"], one.source.id("v1")) == ([], [], "")
    second = undo(one.world, of_session=first["session"])
    assert (second["conflicts"], second["failures"], one.source.id("v1")) == ([], [], tag)


def test_a_branch_that_moved_afterwards_is_a_conflict(publishing: PublishingMaker) -> None:
    """The operator has committed: the branch stays, and the older publications of it too; the files are taken back."""
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    one.repo.commit("[gt-1] One", {"one.md": "1\n"})
    one.source.git("commit", "-q", "--allow-empty", "-m", "[gt-0] The operator's")
    tip = one.source.id("aidlc/x")
    result = undo(one.world, of_session=one.world.session.session)
    assert {each["path"] for each in result["conflicts"]} == {".git/refs/heads/aidlc/x"}
    assert {each["reason"] for each in result["conflicts"]} == {"the branch was moved afterwards"}
    assert one.source.id("aidlc/x") == tip
    assert not (one.source.root / "one.md").exists()


def test_the_creation_of_the_checked_out_branch_is_refused_with_the_reason(publishing: PublishingMaker) -> None:
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    change = _last_publication(one)
    (conflict,) = undo(one.world, change=change)["conflicts"]
    assert conflict["reason"] == "the branch is checked out; switch to another branch first"
    one.repo.git("switch", "-q", "main")
    assert undo(one.world, change=change)["conflicts"] == []
    assert one.source.id("aidlc/x") == ""
    one.repo.git("switch", "-q", "aidlc/x")
    one.push("aidlc/x")
    one.repo.git("switch", "-q", "main")
    one.source.git("worktree", "add", "-q", str(one.source.root.parent / "other"), "aidlc/x")
    (conflict,) = undo(one.world, change=_last_publication(one, "aidlc/x"))["conflicts"]
    assert conflict["reason"] == "another worktree has the branch checked out"


def test_the_operators_staged_change_stays(publishing: PublishingMaker) -> None:
    """The index of the checkout follows the branch, and keeps what the operator has staged."""
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    old = one.source.id("aidlc/x")
    one.repo.commit("[gt-1] One", {"one.md": "1\n"})
    one.source.write("mine.md", "mine\n")
    one.source.git("add", "mine.md")
    assert undo(one.world, change=_last_publication(one))["failures"] == []
    assert one.source.id("aidlc/x") == old
    assert one.source.git("status", "--porcelain") == "A  mine.md\n?? one.md\n"


def test_a_locked_index_leaves_the_branch(publishing: PublishingMaker) -> None:
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    made = one.repo.commit("[gt-1] One", {"one.md": "1\n"})
    (one.git_dir / "index.lock").touch()
    result = undo(one.world, change=_last_publication(one))
    assert [each["path"] for each in result["failures"]] == [".git/refs/heads/aidlc/x"]
    assert result["taken_back"] == []
    assert one.source.id("aidlc/x") == made
    (one.git_dir / "index.lock").unlink()
    assert undo(one.world, change=_last_publication(one))["failures"] == []


def test_the_agent_publishes_again_after_the_operators_undo(publishing: PublishingMaker) -> None:
    """The undo makes no one else the publisher, and gives the agent no right to drop the operator's commits."""
    one = publishing()
    one.source.git("branch", "aidlc/x")
    one.repo.git("fetch", "-q", "source", "aidlc/x:aidlc/x")
    one.repo.git("switch", "-q", "aidlc/x")
    one.repo.commit("[gt-1] One", {"one.md": "1\n"})
    undo(one.world, change=_last_publication(one))
    one.repo.git("reset", "-q", "--hard", "source/aidlc/x", code=None)
    second = one.repo.commit("[gt-1] Two", {"two.md": "2\n"})
    assert one.source.id("aidlc/x") == second
    undo(one.world, change=_last_publication(one))
    one.source.git("branch", "-f", "aidlc/z", "main")
    assert "git.force" in one.push("+aidlc/x~1:refs/heads/aidlc/x", ":aidlc/z", code=1)


def test_an_agent_takes_back_its_own_publication(publishing: PublishingMaker) -> None:
    """The role must have `undo`, and the git list decides; the operator's branch work is not the agent's."""
    one = publishing(UNDOING)
    one.repo.git("switch", "-qc", "aidlc/x")
    made = [one.repo.commit(f"[gt-1] {n}", {"one.md": f"{n}\n"}) for n in range(2)]
    change = _last_publication(one)
    shown = _agents_undo(one, "--change", change, "--dry-run")
    assert (shown.returncode, one.source.id("aidlc/x")) == (0, made[1])
    done = _agents_undo(one, "--change", change)
    assert done.returncode == 0, done.stdout + done.stderr
    assert one.source.id("aidlc/x") == made[0]
    assert _published(one, "aidlc/x") == (one.agent.id, made[0])
    entry = [each for each in one.entries() if each.kind == "intent" and UNDO in each.details][-1]
    assert (entry.details[UNDO], entry.agent_id) == (change, one.agent.id)


def test_an_agents_undo_of_a_publication_follows_the_git_list(publishing: PublishingMaker) -> None:
    """Without `reset` the undo is a conflict with the rule's reason, recorded by no denial of a preview."""
    one = publishing(UNDOING.replace('["*"]', '["commit", "branch", "add"]'))
    one.repo.git("switch", "-qc", "aidlc/x")
    one.repo.commit("[gt-1] One", {"one.md": "1\n"})
    made = one.source.id("aidlc/x")
    denials = len(one.denials())
    shown = _agents_undo(one, "--change", _last_publication(one), "--dry-run")
    assert shown.returncode == 1
    assert "reset" in shown.stdout
    assert len(one.denials()) == denials
    assert _agents_undo(one, "--change", _last_publication(one)).returncode == 1
    assert one.source.id("aidlc/x") == made


def test_an_agent_cannot_take_back_another_agents_publication(publishing: PublishingMaker) -> None:
    one = publishing(UNDOING)
    (second := one.source.root.parent / "second").mkdir()
    other = publishing(UNDOING, source=one.source, agent="bob", mountpoint=second)
    one.repo.git("branch", "aidlc/y")
    one.push("aidlc/y")
    done = _agents_undo(other, "--change", _last_publication(one))
    assert '"taken_back": []' in done.stdout
    assert one.source.id("aidlc/y") == one.source.id("main")


def test_what_the_git_guard_published_is_taken_back(publishing: PublishingMaker, tmp_path: Path) -> None:
    """A commit and a branch are; a merge into the checked out branch is refused, because it has changed files too."""
    one = publishing()
    one.world.umount()
    (policy := tmp_path / "free.toml").write_text(FREE)
    with open_session(one.source.root, agent="alice", policy=policy) as opened, GitGuard(opened) as guard:
        guard.guarded_create_branch("aidlc/x", "alice")
        guard.guarded_checkout_branch("aidlc/x", "alice")
        one.source.write("docs/c.md", "c\n")
        guard.guarded_commit("[gt-1] Page", ["docs/c.md"], "alice", "gt-1")
        guard.guarded_create_branch("aidlc/y", "alice", "main")
        assert guard.guarded_merge("aidlc/x", "aidlc/y", "alice").success
        guard.guarded_checkout_branch("aidlc/y", "alice")
        one.source.git("branch", "-q", "-f", "aidlc/z", "main")
        guard.guarded_checkout_branch("aidlc/z", "alice")
        assert guard.guarded_merge("aidlc/x", "aidlc/z", "alice").success
        session = opened.session.session
    tips = {name: one.source.id(name) for name in ("aidlc/x", "aidlc/y", "aidlc/z")}
    result = undo(one.world, of_session=session)
    assert [(each["path"], each["reason"][:30]) for each in result["conflicts"]] == [
        (".git/refs/heads/aidlc/z", "the merge has changed files of")
    ]
    assert {name: one.source.id(name) for name in tips} == {"aidlc/x": "", "aidlc/y": "", "aidlc/z": tips["aidlc/z"]}
    assert undo(one.world, of_session=result["session"])["conflicts"] == []
    assert {name: one.source.id(name) for name in tips} == tips


@pytest.mark.root
def test_the_owner_of_the_repository_keeps_all_of_its_files(open_place: Path, publishing: PublishingMaker) -> None:
    """The operator is root, the repository an ordinary user's: the worker acts as that user."""
    source = Repo(open_place / "theirs").init()
    source.commit("[gt-0] The beginning", {"a.md": "a\n"})
    for path in (source.root, *source.root.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    source.env |= TRUSTING
    one = publishing(source=source)
    one.repo.env |= TRUSTING
    one.repo.git("switch", "-qc", "aidlc/x")
    one.repo.commit("[gt-1] One", {"one.md": "1\n"})
    result = undo(one.world, change=_last_publication(one))
    assert (result["conflicts"], result["failures"]) == ([], [])
    assert {path.lstat().st_uid for path in one.git_dir.rglob("*")} == {NOBODY}


@pytest.mark.root
@pytest.mark.parametrize("call", ["rename", "link", "sendto"])
def test_a_killed_undo_of_a_publication_is_completed_by_the_next_call(
    publishing: PublishingMaker, tmp_path: Path, call: str
) -> None:
    """kill -9 of the undo or its worker at each such call: the next undo completes it, and no lock is left."""
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    old = one.repo.commit("[gt-1] One", {"one.md": "1\n"})
    number = 1
    while True:
        made = one.repo.commit(f"[gt-1] {number}", {"one.md": f"{number + 1}\n"})
        assert one.source.id("aidlc/x") == made
        change = _last_publication(one)
        if not _killed_at(one, change, call, number, tmp_path / "log"):
            break
        result = undo(one.world, change=change)
        assert result["failures"] == []
        assert [each["reason"] for each in result["conflicts"]] in ([], ["the branch was moved afterwards"])
        assert one.source.id("aidlc/x") == old, (call, number)
        assert _published(one, "aidlc/x") == (one.agent.id, old)
        one.source.check()
        one.repo.git("reset", "-q", "--hard", old)
        number += 1
    assert number > 1
    assert bonobofs("audit", "verify").returncode == 0


@pytest.mark.root
@pytest.mark.parametrize("call", ["rename", "link", "sendto"])
def test_a_killed_undo_of_two_branches_is_completed_by_the_next_call(
    publishing: PublishingMaker, tmp_path: Path, call: str
) -> None:
    """One publication has moved both branches. No kill leaves one of them taken back, and the index follows."""
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    old = one.repo.commit("[gt-1] One", {"one.md": "1\n"})
    one.repo.git("branch", "aidlc/y")
    one.push("aidlc/y")
    number = 1
    while True:
        change = _publish_both(one, old, number)
        if not _killed_at(one, change, call, number, tmp_path / "log"):
            break
        result = undo(one.world, change=change)
        assert result["failures"] == []
        assert [one.source.id(name) for name in ("aidlc/x", "aidlc/y")] == [old, old], (call, number)
        assert [_published(one, name) for name in ("aidlc/x", "aidlc/y")] == [(one.agent.id, old)] * 2
        assert one.source.git("diff", "--cached", "--name-only", "HEAD") == ""
        one.source.check()
        number += 1
    assert number > 1
    assert bonobofs("audit", "verify").returncode == 0


@pytest.mark.parametrize("damage", ["gone", "unreadable", "damaged"])
def test_a_repository_that_cannot_be_read_refuses_its_publications_only(
    publishing: PublishingMaker, damage: str
) -> None:
    """Preview and undo name the reason, and the files are taken back."""
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    one.repo.commit("[gt-1] One", {"one.md": "1\n"})
    session, aside = one.world.session.session, one.source.root / "aside"
    change = _last_publication(one)
    one.world.umount()
    if damage == "damaged":
        os.rename(one.git_dir / "config", aside)
        (one.git_dir / "config").write_text("[core\n")
    else:
        os.rename(one.git_dir, aside)
    if damage == "unreadable":
        one.git_dir.write_text("gitdir: /proc/self/mem\n")
    for dry_run in (True, False):
        result = undo(one.world, of_session=session, dry_run=dry_run)
        assert {each["path"] for each in result["conflicts"]} == {".git/refs/heads/aidlc/x"}
        assert "repository" in result["conflicts"][0]["reason"]
        assert result["failures"] == []
    assert not (one.source.root / "one.md").exists()
    os.rename(aside, one.git_dir / "config" if damage == "damaged" else _removed(one.git_dir))
    assert undo(one.world, change=change)["conflicts"] == []


def _removed(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def test_an_invalid_object_id_is_a_refusal(publishing: PublishingMaker) -> None:
    one = publishing()
    refs = RefsOfSource(one.source.root, None, is_operator=True)
    assert refs.refusal((RefMove("refs/heads/x", "", "no id"),)) == "the repository no longer has no id"


def test_a_slow_worker_is_called_once(publishing: PublishingMaker) -> None:
    """The undo of a publication has one timeout, and the error says what happened."""
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    old = one.source.id("aidlc/x")
    made = one.repo.commit("[gt-1] One", {"one.md": "1\n"})
    source, calls = str(one.source.root), list[GitWorker]()
    with undo_service.operator_session(one.world.home, source) as (session, enforcer, policy), ExitStack() as stack:
        about = one.world.home, session.session, source, None, OperatorAuthorizer(enforcer, policy)
        worker = GitWorker(WorkerSession(*about, access_path=Path(source), is_operator=True))
        stack.callback(worker.close)
        worker.call("take_back", updates=[], check=True, publishers={}, details={})
        os.kill(proc.child("self", b"git.worker"), signal.SIGSTOP)

        def called() -> GitWorker:
            calls.append(worker)
            return worker

        updates = [["refs/heads/aidlc/x", made, old]]
        step = UndoStep("publish", "", "", {"updates": updates, "publishers": {}})
        refs = RefsOfSource(Path(source), called)
        refs.limit = 0.5
        with pytest.raises(OSError, match=r"took too long.*no branch had moved"):
            refs.move_back(step)
        assert (len(calls), one.source.id("aidlc/x")) == (1, made)
        RefsOfSource(Path(source), called).move_back(step)
    assert one.source.id("aidlc/x") == old


@pytest.mark.root
def test_a_locked_index_fails_the_recovery_of_an_undo(publishing: PublishingMaker, tmp_path: Path) -> None:
    """The worker was killed after it moved the branch, and git locks the index: the undo says so. The next worker
    updates the index.
    """
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/x")
    old, first = one.repo.commit("[gt-1] One", {"one.md": "1\n"}), _last_publication(one)
    one.repo.commit("[gt-1] Two", {"one.md": "2\n"})
    change, lock, log = _last_publication(one), one.git_dir / "index.lock", tmp_path / "log"
    log.touch()
    stop = ("-P", str(one.git_dir / "refs/heads/aidlc/x.lock"), "-e", "trace=rename", "-e", "inject=rename:signal=STOP")
    command = ["strace", "-f", "-qq", "-o", str(log), *stop, sys.executable, "-m", "bonobofs"]
    with subprocess.Popen(
        [*command, "undo", "--json", "--change", change],
        cwd="/", env=environment(), stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        until(lambda: "stopped by SIGSTOP" in log.read_text(), "the worker has moved the branch")
        assert one.source.id("aidlc/x") == old
        os.kill(int(log.read_text().split()[0]), signal.SIGKILL)
        until(lambda: _is_created(lock), "the next worker has removed the lock of the dead one")
        shown = json.loads(running.communicate()[0])
    (failure,) = shown["failures"]
    assert "index.lock" in failure["reason"]
    lock.unlink()
    assert undo(one.world, change=first)["failures"] == []
    assert one.source.git("diff", "--cached", "--name-only", "HEAD") == ""


def _is_created(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _publish_both(one: Publishing, old: str, number: int) -> str:
    """Publish one commit as two branches by one push; return the name of the change."""
    blob = one.repo.object("blob", b"%d\n" % number)
    tree = one.repo.git("mktree", given=f"100644 blob {blob}\tnew.md\n").strip()
    made = one.repo.git("commit-tree", "-p", old, "-m", f"[gt-1] {number}", tree).strip()
    one.push(*(f"{made}:refs/heads/{name}" for name in ("aidlc/x", "aidlc/y")))
    assert [one.source.id(name) for name in ("aidlc/x", "aidlc/y")] == [made, made]
    assert len(one.entries()[-2].details["updates"]) == 2
    return _last_publication(one)


def _killed_at(one: Publishing, change: str, call: str, number: int, log: Path) -> bool:
    """Whether an undo, or its worker, was killed at its n-th system call of one name that touches the repository."""
    program = [sys.executable, "-m", "bonobofs", "undo", "--change", change]
    refs = [f"refs/heads/aidlc/{name}{suffix}" for name in "xy" for suffix in (".lock", "")]
    names = ("", *refs, "index.lock", "index")
    paths = [word for name in names for word in ("-P", str(one.git_dir / name))]
    inject = f"inject={call}:signal=KILL:when={number}"
    where = [] if call == "sendto" else paths
    subprocess.run(
        ["strace", "-f", "-qq", "-o", str(log), *where, "-e", f"trace={call}", "-e", inject, *program],
        cwd="/", env=environment(), capture_output=True, check=False,
    )  # fmt: skip
    return "killed by SIGKILL" in log.read_text()
