"""What the session's git refuses, in which order, and how it says so; and that it is no more than a convenience."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pygit2
import pytest

from bonobofs.decision import Refused
from bonobofs.errors import UsageError
from bonobofs.state.calling import call
from tests.fuse.waiting import until
from tests.sandbox.lines import make_repository, run_sh, state
from tests.worlds import Mounted, World, bonobofs, environment

POLICY = """
default = "allow"
hidden = ["**"]
[[protect]]
paths = [".git/"]
[role.worker]
write = ["**"]
git = ["add", "commit", "rm", "mv", "restore"]
[role.lead]
write = ["**"]
git = ["add", "commit", "rm", "mv", "restore", "branch", "checkout", "switch", "merge", "stash", "reset", "tag"]
[role.reader]
"""


class Desk:
    """A mounted repository, and the git of its session."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.programs = world.home / "sessions" / world.session.session / "inside" / "bin"

    def git(self, line: str, at: str | Path = ".", **env: str) -> subprocess.CompletedProcess[str]:
        """Run `git LINE` as whoever works there would."""
        path = {"PATH": f"{self.programs}:{os.environ['PATH']}"}
        return subprocess.run(
            ["sh", "-c", f"git {line}"],
            cwd=self.world.path / at,
            env={**os.environ, **path, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def refused(self, line: str, at: str | Path = ".", **env: str) -> dict[str, Any]:
        """What the JSON line of a refusal says; the repository is as it was, and the record has the refusal."""
        before = state(self.world.source)
        ran = self.git(line, at, **env)
        assert ran.returncode == 77, (line, ran)
        assert ran.stdout == ""
        told, help_line = ran.stderr.splitlines()
        document: dict[str, Any] = json.loads(told)
        assert document["cleo_error"] is True
        assert document["allowed"] is False
        assert help_line == f"git: {document['reason']} {document['instead']}"
        assert state(self.world.source) == before
        return document


@pytest.fixture
def worker(mounted: Mounted, source: Path) -> Desk:
    make_repository(source)
    return Desk(mounted(policy=POLICY, role="worker"))


@pytest.fixture
def lead(mounted: Mounted, source: Path) -> Desk:
    make_repository(source)
    return Desk(mounted(policy=POLICY, role="lead"))


NEVER = """
push; push --force; push --force-with-lease=x; push origin +x; push --delete origin x; pull; fetch; rebase main;
remote add a b; worktree add x; worktree prune; filter-branch; reflog expire --all; update-ref refs/heads/x HEAD;
symbolic-ref HEAD refs/x; clean -xdf; cherry-pick v1; revert HEAD; apply x; am x; gc; prune; repack; init; clone .
x; config user.name x; read-tree HEAD; checkout-index -a; update-index --refresh; commit-tree HEAD^{tree};
fast-import; notes add; replace v1 HEAD; submodule update; bisect start; sparse-checkout set x; hash-object -w
message; pack-refs; mktree; write-tree; merge-tree a b
"""
OF_LEADS = """
checkout aidlc/side; checkout -b aidlc/x; checkout -- docs/a.md; switch aidlc/side; branch aidlc/x; branch -D
aidlc/side; branch -fd aidlc/side; branch -m aidlc/side aidlc/x; branch -f aidlc/side; reset; reset --hard; stash;
stash pop; tag v2; tag -d v1; merge aidlc/side; branch --delete aidlc/side; reset --har
"""


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\n", " ").split(";")]


def test_what_the_role_does_not_have_is_blocked(worker: Desk) -> None:
    """A worker has neither what nobody has nor what a lead has, whichever way it is spelled."""
    for line in [*_lines(NEVER), *_lines(OF_LEADS)]:
        told = worker.refused(line)
        assert (told["code"], told["error"]) == ("E_GIT_OP_BLOCKED", "op-blocked"), line
        assert told["subcommand"] == line.split()[0]


def test_nobody_has_what_leads_elsewhere(lead: Desk) -> None:
    """Not even a lead has what alters remotes, other worktrees or history."""
    for line in _lines(NEVER):
        assert lead.refused(line)["code"] == "E_GIT_OP_BLOCKED", line


def test_programs_of_others_are_not_run(lead: Desk, tmp_path: Path) -> None:
    """A program git-NAME on PATH is no subcommand that the gate answers, and the record keeps little of long words."""
    program = tmp_path / "git-evil"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    told = lead.refused(f"evil {'x' * 1000}", PATH=f"{lead.programs}:{tmp_path}:{os.environ['PATH']}")
    assert told["code"] == "E_GIT_OP_BLOCKED"
    assert "evil" not in told["reason"]
    assert not (tmp_path / "ran").exists()
    entry = next(entry for entry in lead.world.entries() if entry.guard == "git")
    assert entry.details["command"] == ["evil", "x" * 200]


def test_options_and_aliases_are_seen_through(worker: Desk) -> None:
    """Options before the subcommand, aliases and combined flags hide nothing."""
    for line in (
        "-C . push",
        "-c a.b=c checkout aidlc/side",
        "--no-pager -P push",
        "--git-dir=.git push",
        "-c alias.x=push x",
        "-c alias.x='-C docs switch' x aidlc/side",
        "-c alias.x=y -c alias.y='reset --hard' x",
        "--literal-pathspecs stash",
    ):
        assert worker.refused(line)["error"] == "op-blocked", line
    for line in ("-c alias.x='!git push' x", "-c alias.x=x x", "-c alias.x='!sh -c \"touch /tmp/x\"' x"):
        assert worker.refused(line)["error"] == "alias-not-understood", line
    assert worker.refused("--frobnicate status")["error"] == "option-not-understood"


def test_a_worker_changes_nothing_from_outside(worker: Desk, tmp_path: Path) -> None:
    """The isolation comes before the denylist and the fence, and looks where git would stand."""
    outside = tmp_path / "outside"
    make_repository(outside)
    (worker.world.path / "out").mkdir()
    (tmp_path / "way-in").symlink_to(worker.world.path)
    source = worker.world.source
    for line, at in (
        ("commit -am x", outside),
        ("add docs/a.md", outside),
        ("apply x", outside),
        ("am x", outside),
        (f"-C {outside} rm docs/a.md", "."),
        (f"-C {outside} -C docs mv a.md b.md", "docs"),
        ("restore .", source),
        ("commit -am x", "/"),
        (f"-c alias.x=commit -C {outside} x", "."),
        ("-C nowhere add x", "."),
    ):
        told = worker.refused(line, at)
        assert told["code"] == "E_GIT_BOUNDARY_CWD_OUTSIDE_WORKTREE", line
        assert told["error"] == "cwd-outside-worktree"
    gone = f"cd {tmp_path} && mkdir gone && cd gone && rmdir ../gone && git"
    ran = run_sh(f"{gone} commit -m x", tmp_path, worker.programs)
    assert '"E_GIT_BOUNDARY_CWD_OUTSIDE_WORKTREE"' in ran.stderr
    assert ran.returncode == 77
    assert worker.git("add docs/a.md", tmp_path / "way-in").returncode == 0, "a symlink that leads inside is inside"
    assert worker.refused("push", outside)["code"] == "E_GIT_OP_BLOCKED"


def test_another_repository_is_not_answered_for(lead: Desk, worker: Desk, tmp_path: Path) -> None:
    """Whatever names another repository, index or programs is refused, for every role."""
    outside = tmp_path / "outside"
    make_repository(outside)
    lines = (f"-C {outside} commit -am x", f"--git-dir={outside}/.git commit -am x", "--work-tree=/ add etc")
    for line in (*lines, "--namespace=x commit -m x", "--bare add ."):
        assert lead.refused(line)["code"] == "E_GIT_BOUNDARY_REPOSITORY", line
    for env in ({"GIT_DIR": f"{outside}/.git"}, {"GIT_WORK_TREE": "/"}, {"GIT_INDEX_FILE": "/tmp/index"}):
        for desk in (lead, worker):
            assert desk.refused("commit -am x", **env)["error"] == "another-repository", env
    nested = lead.world.path / "nested"
    nested.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=lead.world.source / "nested", check=True)
    assert lead.refused("add .", "nested")["error"] == "another-repository"


def test_what_add_is_given_lies_in_the_worktree(worker: Desk, tmp_path: Path) -> None:
    """A path that leads out, by itself or by a symlink on its way, is refused; a symlink itself is a file."""
    (tmp_path / "secret").write_text("x")
    (worker.world.source / "way").symlink_to(tmp_path)
    for path in (f"{tmp_path}/secret", "../secret", "docs/../../secret", "way/secret", "way/*", "/etc/passwd", "/"):
        told = worker.refused(f"add {path}")
        assert (told["code"], told["error"]) == ("E_GIT_BOUNDARY_WORKTREE_PATH", "path-outside-worktree"), path
    for path in ("docs/a.md", f"{worker.world.path}/docs/a.md", "docs", "':/docs'", "'docs/*'"):
        assert worker.git(f"add {path}").returncode == 0, path


def test_nothing_in_the_environment_says_who_asks(worker: Desk) -> None:
    """The CLEO_* variables, a bypass among them, change nothing: the session is known by where its git lies."""
    claims = {"CLEO_AGENT_ROLE": "orchestrator", "CLEO_ALLOW_GIT": "1", "CLEO_ALLOW_BRANCH_OPS": "1"}
    assert worker.refused("switch aidlc/side", **claims)["code"] == "E_GIT_OP_BLOCKED"
    assert worker.refused("commit -am x", "/", **claims, CLEO_WORKTREE_ROOT="/")["error"] == "cwd-outside-worktree"
    assert worker.git("add docs/a.md", CLEO_WORKTREE_ROOT="/elsewhere", CLEO_AGENT_ROLE="worker").returncode == 0


def test_a_message_names_its_issue(worker: Desk) -> None:
    """A commit without the id of an issue is refused in CLEO's words, however the message is given."""
    (worker.world.path / "docs/a.md").write_text("more\n")
    (worker.world.path / "message").write_text("No id\n")
    for line in ("commit -am 'No id'", "commit -am'No id'", "commit -aF message", "commit -a --message='[gt-1]'"):
        told = worker.refused(line)
        assert (told["code"], told["error"]) == ("E_GIT_BOUNDARY_COMMIT_TASK_ID", "commit-task-id"), line


def test_a_form_that_is_not_answered_is_refused(lead: Desk) -> None:
    """What the gate does not do is said, and not done in some other way."""
    for line in (
        "add -p",
        "commit --author='a <b>' -m x",
        "merge -s ours aidlc/side",
        "checkout --orphan x",
        "rm --frob x",
    ):
        assert lead.refused(line)["error"] == "form-not-answered", line


def test_refusals_are_in_the_record(worker: Desk) -> None:
    """Each refusal is entered as git's, with what was asked for."""
    worker.refused("push --force origin main")
    worker.refused("commit -am x", "/")
    entries = [entry for entry in worker.world.entries() if entry.guard == "git" and entry.kind != "alert"]
    assert [entry.code for entry in entries] == ["ROLE", "OUTSIDE"]
    assert entries[0].details["command"] == ["push", "--force", "origin", "main"]
    assert entries[1].details["directory"] == "/"


def test_a_role_without_git_reads(mounted: Mounted, source: Path) -> None:
    """Reading is everybody's, also where the role has nothing of git; so is what git itself says of nonsense."""
    make_repository(source)
    desk = Desk(mounted(policy=POLICY, role="reader"))
    for line in ("status", "log --oneline", "diff HEAD~1", "show v1", "branch -a", "stash list", "blame docs/a.md"):
        real = subprocess.run(["sh", "-c", f"git {line}"], cwd=source, capture_output=True, text=True, check=False)
        ours = desk.git(line)
        assert (ours.stdout, ours.returncode) == (real.stdout, real.returncode), line
    assert desk.git("nonsense").returncode == 1
    assert "not a git command" in desk.git("nonsense").stderr
    assert desk.refused("add docs/a.md")["error"] == "op-blocked"


def test_reading_locks_nothing(worker: Desk) -> None:
    """No reading subcommand tries to write in `.git`, also where the index could be brought up to date."""
    for path in sorted((worker.world.path / "docs").iterdir()):
        os.utime(path)
    for line in (
        "status",
        "diff",
        "diff HEAD",
        "describe --dirty --always",
        "-C docs status",
        "branch",
        "branch --merged",
    ):
        assert worker.git(line).returncode == 0, line
    denied = [entry for entry in worker.world.entries() if entry.result == "denied"]
    assert [entry.path for entry in denied] == []


def test_nothing_is_left_in_temporary_directories(lead: Desk, tmp_path: Path) -> None:
    """What is tried before the gate is asked leaves no trace, also when it is refused."""
    room = tmp_path / "room"
    room.mkdir()
    for line in (
        "add -A",
        "commit -am '[gt-1] More'",
        "commit -am x",
        "rm docs/b.md",
        "merge aidlc/side",
        "stash",
        "add nowhere",
    ):
        lead.git(line, TMPDIR=str(room))
    assert list(room.iterdir()) == []


def test_the_real_git_and_libgit2_find_the_mount_closed(lead: Desk) -> None:
    """The session's git is a convenience: with any other program, the mount refuses."""
    source, mount = lead.world.source, lead.world.path
    (mount / "docs/a.md").write_text("more\n")
    before = state(source)
    real = next(Path(one, "git") for one in os.environ["PATH"].split(":") if Path(one, "git").exists())
    for line in (
        "add -A",
        "commit -qam x",
        "branch x",
        "reset -q --hard",
        "tag v2",
        "update-ref refs/heads/x HEAD",
        "stash",
    ):
        ran = subprocess.run([real, "-c", "user.name=a", "-c", "user.email=a@b", *line.split()], cwd=mount, check=False)
        assert ran.returncode != 0, line
        assert state(source) == before, line
    repository = pygit2.Repository(str(mount))
    with pytest.raises((OSError, pygit2.GitError)):
        repository.create_blob(b"x")
    with pytest.raises((OSError, pygit2.GitError)):
        repository.branches.local.create("x", repository.head.peel(pygit2.Commit))
    with pytest.raises((OSError, pygit2.GitError)):
        repository.index.add("docs/a.md")
    with pytest.raises((OSError, pygit2.GitError)):
        repository.index.write()
    for name in ("HEAD", "config", "hooks/pre-commit", "index"):
        with pytest.raises(OSError, match="Read-only"):
            (mount / ".git" / name).write_text("x")
    assert state(source) == before


def test_calls_are_held_to_what_they_take(lead: Desk) -> None:
    """Whoever calls the gate without the session's git finds the same gate; long lists are taken, odd values not."""
    session = lead.programs.parent
    before = state(lead.world.source)
    many = [f"docs/a/name/that/nothing/has/{number:06}.md" for number in range(40_000)]
    assert call(session, "git.add", paths=many)["failed"]["kind"] == "pathspec"
    for name, arguments in (
        ("git.add", {}),
        ("git.add", {"paths": "docs/a.md"}),
        ("git.add", {"paths": ["docs/a.md"], "home": "/"}),
        ("git.add", {"paths": [1]}),
        ("git.move", {"pairs": [["docs/a.md"]]}),
        ("git.stash_drop", {"index": True}),
        ("git.refuse", {"rule": "git.message", "subcommand": "x", "arguments": []}),
        ("git.begin", {"subcommand": "add"}),
        ("git.status", {}),
    ):
        with pytest.raises(UsageError):
            call(session, name, **arguments)
    for path in ("../x", "/etc/passwd", ".git/config", "docs/../.git/HEAD"):
        with suppress(Refused):
            assert "failed" in call(session, "git.add", paths=[path]), path
    assert state(lead.world.source) == before


def test_a_session_that_has_ended_answers_nothing(lead: Desk) -> None:
    """Without a session nothing is changed, and it is not taken for a refusal."""
    lead.world.umount()
    ran = lead.git("add docs/a.md", lead.world.source)
    assert ran.returncode == 1
    assert "does not answer" in ran.stderr


def test_a_shell_at_a_terminal_says_where_the_rules_are(lead: Desk) -> None:
    """One line on stderr; a command, or a shell that reads a pipe, gets none."""
    mount = str(lead.world.path)
    hint = "bonobofs: git and bd here ask the session"
    terminal, theirs = pty.openpty()
    try:
        os.write(terminal, b"exit 3\n")
        words = [sys.executable, "-m", "bonobofs", "shell", mount]
        env = environment(SHELL="/bin/sh")
        ran = subprocess.run(words, env=env, stdin=theirs, capture_output=True, text=True, check=False, timeout=60)
        words += ["--", "true"]
        clean = subprocess.run(words, env=env, stdin=theirs, capture_output=True, text=True, check=False, timeout=60)
    finally:
        os.close(theirs)
        os.close(terminal)
    assert ran.returncode == 3
    assert sum(line.startswith(hint) for line in ran.stderr.splitlines()) == 1
    assert (clean.returncode, clean.stdout, clean.stderr) == (0, "", "")
    assert hint not in bonobofs("shell", mount, env={"SHELL": "/bin/sh"}).stderr


def test_a_shell_has_the_sessions_git(lead: Desk, tmp_path: Path) -> None:
    """`bonobofs shell` starts where the mount is, with its git before others and the CLEO_* variables set."""
    mount = str(lead.world.path)
    ran = bonobofs("shell", mount, "--", "sh", "-c", "command -v git; pwd; env", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    program, where, *lines = ran.stdout.splitlines()
    env = dict(line.split("=", 1) for line in lines if "=" in line)
    assert program == str(lead.programs / "git")
    assert where == mount
    assert {key: env[key] for key in env if key.startswith("CLEO_")} == {
        "CLEO_WORKTREE_ROOT": mount,
        "CLEO_AGENT_ROLE": "lead",
        "CLEO_WORKTREE_BRANCH": "aidlc/work",
        "CLEO_PROJECT_HASH": env["CLEO_PROJECT_HASH"],
        "CLEO_SESSION_ID": lead.world.session.session,
        "CLEO_AGENT_ID": lead.world.session.agent_id,
    }
    inside = bonobofs("shell", mount, "--", "pwd", cwd=lead.world.path / "docs")
    assert inside.stdout == f"{mount}/docs\n", "who stands in the mount stays there"
    assert bonobofs("shell", mount, "--", "sh", "-c", "exit 7").returncode == 7
    assert bonobofs("shell", mount, "--", "git", "push").returncode == 77
    assert bonobofs("shell", str(tmp_path)).returncode == 1
    assert bonobofs("shell", mount, "--", "nothing-like-this").returncode == 1


def test_what_the_gate_does_to_git_is_no_strangers(lead: Desk) -> None:
    """Its locks and journals, too, and where it refuses; what somebody else does to `.git` is."""
    world = lead.world

    def strangers() -> list[str]:
        return [entry.path for entry in world.entries() if entry.operation == "out_of_band" and entry.kind == "event"]

    (world.source / ".git/description").write_text("by hand\n")
    until(strangers, "the change by hand is entered")
    for line in (
        "switch -c aidlc/x",
        "rm docs/a.md",
        "commit -m x",
        "commit -m '[gt-1] x'",
        "switch aidlc/side",
        "tag v9",
    ):
        lead.git(line)
    assert "aidlc/x" in (world.source / ".git/logs/HEAD").read_text()
    world.umount()
    assert strangers() == [".git/description"]
