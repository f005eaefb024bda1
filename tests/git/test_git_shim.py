"""The session's git adds the role's list and the explanation of refusals to the real git."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.git.desks import NOTES, Desk, make_source
from tests.support.repositories import Repo
from tests.support.wait import until
from tests.support.world import Mounted


@pytest.fixture
def repo(source: Path) -> Repo:
    return make_source(source)


@pytest.fixture
def desk(mounted: Mounted, repo: Repo) -> Desk:
    return Desk(mounted(policy=NOTES))


@pytest.fixture
def worker(mounted: Mounted, repo: Repo) -> Desk:
    return Desk(mounted(policy=NOTES, role="worker"))


READING = """
status; log --oneline; diff; show; branch; branch -a; branch --list; tag; tag -l; stash list; remote -v; worktree list;
config --get user.name; config --list; notes list; reflog; rev-parse HEAD; submodule status; bisect log; for-each-ref
"""
WRITING = """
push origin x; fetch; pull; rebase main; checkout main; switch main; reset --hard; merge main; tag v1; branch aidlc/y;
stash; stash pop; cherry-pick main; revert HEAD; am x; apply x; clean -xdf; gc; init; clone . x; config user.name x;
update-ref refs/heads/x HEAD; symbolic-ref HEAD refs/heads/x; remote add a b; worktree add x; bisect start; notes add
"""


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.replace("\n", " ").split(";") if line.strip()]


def test_every_role_may_read(worker: Desk) -> None:
    """The real git runs, with its output and its exit status."""
    real = Repo(worker.world.path)
    for words in lines(READING):
        ours, plain = worker.run(*words), real.run(*words)
        assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout.decode()), words
        assert "cleo_error" not in ours.stderr


def test_a_command_outside_the_role_list_is_refused(worker: Desk) -> None:
    head = worker.git("rev-parse", "HEAD")
    for words in lines(WRITING):
        told = worker.refused(*words)
        assert (told["code"], told["error"], told["subcommand"]) == ("E_GIT_OP_BLOCKED", "op-blocked", words[0])
    assert worker.git("rev-parse", "HEAD") == head
    entries = [entry for entry in worker.world.entries() if entry.guard == "git" and entry.result == "denied"]
    assert len(entries) >= len(lines(WRITING)) // 2


def test_a_star_does_not_include_remote_commands(desk: Desk) -> None:
    for words in (["push", "origin", "x"], ["fetch"], ["pull"], ["clone", "https://example.org/x"], ["ls-remote"]):
        assert desk.refused(*words)["code"] == "E_GIT_OP_BLOCKED"
    desk.git("push", "-q", "source", "HEAD")


def test_options_and_aliases_are_resolved(worker: Desk) -> None:
    for words in (
        ["-C", ".", "switch", "main"],
        ["-c", "a.b=c", "reset", "--hard"],
        ["--no-pager", "-P", "merge", "main"],
        ["-c", "alias.x=switch", "x", "main"],
        ["-c", "alias.x=-C docs reset", "x", "--hard"],
        ["-c", "alias.x=y", "-c", "alias.y=rebase", "x", "main"],
        ["-c", "alias.x=!git switch main", "x"],
    ):
        assert worker.refused(*words)["error"] == "op-blocked", words
    assert worker.git("-c", "alias.st=status --short", "st") == ""
    assert worker.run("frobnicate").returncode == 77


def test_a_worker_outside_its_worktree_is_refused(worker: Desk, tmp_path: Path) -> None:
    """CLEO's boundary precedes the role's list."""
    done = subprocess.run(
        ["git", "-C", str(tmp_path), "add", "x"], env=worker.env, cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 77
    told = json.loads(done.stderr.splitlines()[0])
    assert (told["code"], told["error"]) == ("E_GIT_BOUNDARY_CWD_OUTSIDE_WORKTREE", "cwd-outside-worktree")


def test_in_other_repositories_the_real_git_runs(desk: Desk, tmp_path: Path) -> None:
    at = tmp_path / "elsewhere"
    at.mkdir()
    for words in lines("init -q .; add .; commit -q --allow-empty -m x; switch -qc y"):
        env = {**desk.env, **Repo(at).env, "PATH": desk.env["PATH"]}
        subprocess.run(["git", *words], cwd=at, env=env, check=True)


def test_a_refusal_prints_no_control_characters(desk: Desk, repo: Repo) -> None:
    name = "a\x1b[31m\u202etxt"
    (repo.root / name).write_text("red\n")
    done = desk.run("clean", "-f", name)
    assert done.returncode == 77
    text = next(line for line in done.stderr.splitlines() if line.startswith("git: "))
    assert "a\ufffd[31m\ufffdtxt" in text


def test_the_denials_during_a_command_are_shown(desk: Desk, repo: Repo) -> None:
    """The real git fails, the shim prints the reasons, and the exit status is 77."""
    done = desk.run("rm", "Cargo.toml")
    assert done.returncode == 77
    assert "unable to unlink" in done.stderr or "could not" in done.stderr or "Permission denied" in done.stderr
    told = desk.refused("rm", "Cargo.toml")
    assert (told["path"], told["code"], told["operation"]) == ("Cargo.toml", "E_GIT_DEFAULT", "delete_file")
    assert desk.run("rm", "docs/nothing.md").returncode == 128
    assert (repo.root / "Cargo.toml").read_text() == "v1\n"


def test_input_status_and_arguments_pass_through(desk: Desk) -> None:
    (desk.world.path / "docs/odd name.md").write_text("x\n")
    desk.git("add", "--", "docs/odd name.md")
    desk.git("commit", "-q", "-F", "-", given="[gt-1] From standard input\n\nä\n")
    assert desk.git("log", "-1", "--format=%B").strip() == "[gt-1] From standard input\n\nä"
    assert desk.run("commit", "-m", "[gt-1] Nothing").returncode == 1
    assert desk.run("merge", "nothing").returncode == 1
    assert desk.run("commit", "--frobnicate").returncode == 129
    assert desk.git("-C", "docs", "commit", "--allow-empty", "-qm", "[gt-1] Below") == ""


def test_a_signal_ends_git_and_the_shim(desk: Desk, tmp_path: Path) -> None:
    """The real git receives SIGTERM and removes its lock, and the grant ends."""
    editor = tmp_path / "editor"
    editor.write_text(f"#!/bin/sh\n: >{tmp_path}/open\nread x <{tmp_path}/fifo\ncd /\n: >{tmp_path}/closed\n")
    editor.chmod(0o755)
    os.mkfifo(tmp_path / "fifo")
    (desk.world.path / "docs/a.md").write_text("two\n")
    with subprocess.Popen(
        ["git", "commit", "-a"], cwd=desk.world.path, env={**desk.env, "GIT_EDITOR": str(editor)}, text=True
    ) as running:
        until((tmp_path / "open").exists, "the editor runs")
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) in (128 + signal.SIGTERM, -signal.SIGTERM)
    with open(tmp_path / "fifo", "w", encoding="ascii") as fifo:
        fifo.write("\n")
    until((tmp_path / "closed").exists, "the editor has left the mount")
    assert not (desk.world.path / ".git/index.lock").exists()


def test_a_killed_shim_ends_its_grant(desk: Desk, repo: Repo, tmp_path: Path) -> None:
    """The real git continues alone, and the mount refuses its writes; the files are as before or as published."""
    hook = desk.world.path / ".git/hooks/pre-rebase"
    hook.write_text(f"#!/bin/sh\n: >{tmp_path}/began\nread x <{tmp_path}/fifo\n")
    hook.chmod(0o755)
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(
        ["git", "rebase", "main"], cwd=desk.world.path, env=desk.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as running:
        until((tmp_path / "began").exists, "git runs its hook")
        running.kill()
        running.wait(30)

        def is_over() -> bool:
            try:
                (desk.world.path / "Cargo.toml").unlink()
            except PermissionError:
                return True
            return False

        until(is_over, "the grant ends")
        with open(tmp_path / "fifo", "w", encoding="ascii") as fifo:
            fifo.write("\n")
        assert running.stdout is not None
        running.stdout.read()
    assert (repo.root / "Cargo.toml").read_text() in ("v1\n", "v2\n")
    assert (desk.world.path / "Cargo.toml").read_text() == (repo.root / "Cargo.toml").read_text()
    shutil.rmtree(desk.world.path / ".git/rebase-merge", ignore_errors=True)
    hook.unlink()
    desk.git("reset", "-q", "--hard", "main")
    assert (repo.root / "Cargo.toml").read_text() == "v2\n"


def test_a_switch_that_the_operator_cannot_follow_is_refused(desk: Desk, repo: Repo) -> None:
    """HEAD and index are the operator's too. The operator's staged changes stay staged."""
    desk.git("switch", "-q", "-c", "aidlc/y")
    (desk.world.path / "docs/a.md").write_text("y\n")
    desk.git("commit", "-qam", "[gt-1] Y")
    desk.git("switch", "-q", "aidlc/x")
    assert repo.git("symbolic-ref", "HEAD").strip() == "refs/heads/aidlc/x"
    blob = repo.git("hash-object", "-w", "--stdin", given="staged\n").strip()
    repo.git("update-index", "--cacheinfo", f"100644,{blob},docs/a.md")
    told = desk.refused("switch", "aidlc/y")
    assert "worktree add" in told["instead"]
    assert desk.git("symbolic-ref", "HEAD").strip() == "refs/heads/aidlc/x"
    assert repo.git("ls-files", "-s", "docs/a.md").split()[1] == blob


def test_a_role_with_pull_may_pull(mounted: Mounted, repo: Repo, tmp_path: Path) -> None:
    """Content of the remote that no protected branch has is refused."""
    remote = Repo(tmp_path / "remote")
    repo.git("clone", "-q", "--branch", "main", ".", str(remote.root))
    repo.git("remote", "add", "origin", str(remote.root))
    policy = NOTES + '[role.puller]\nwrite = ["**"]\ngit = ["*", "fetch", "pull"]\n'
    desk = Desk(mounted(policy=policy, role="puller"))
    desk.git("pull", "-q", "--rebase", "origin", "main")
    assert (repo.root / "Cargo.toml").read_text() == "v2\n"
    remote.commit("[gt-1] Newer", {"Cargo.toml": "newer\n", "docs/c.md": "c\n"})
    assert desk.refused("pull", "-q", "--rebase", "origin", "main")["path"] == "Cargo.toml"
    assert (repo.root / "Cargo.toml").read_text() == "v2\n"
