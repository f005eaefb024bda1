"""The rules judge a path that git tracks below a scratch path, so its edit outlives the session."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.errors import GitError
from bonobofs.git.private_checkout import tracked_paths as tracked
from bonobofs.guards import FileGuard
from bonobofs.policy.compiled import Tracked
from bonobofs.policy.engine import compile_policy
from bonobofs.session.registration import compact, find_tracked
from tests.support.git_guards import Repo
from tests.support.observe import recorded
from tests.support.users import outcome
from tests.support.wait import until
from tests.support.world import Mounted, World, bonobofs

SCRATCH = '[[scratch]]\npaths = ["dist/", "**/node_modules/"]\n'
TEMPORARY = f'temporary = ["**/sed{"[A-Za-z0-9]" * 6}"]\n'
OPEN = f'default = "allow"\nhidden = ["**"]\n{TEMPORARY}{SCRATCH}'
CLOSED = f'{TEMPORARY}{SCRATCH}[[rule]]\nname = "docs"\npaths = ["docs/"]\n'


@pytest.fixture
def built(tmp_path: Path) -> Repo:
    """A repository with products in it, of which some are in HEAD, some in the index, and some in neither."""
    (tmp_path / "repository").mkdir()
    repo = Repo(tmp_path / "repository")
    repo.git("init", "-q", "-b", "main")
    repo.commit("The first", **{f"dist/{name}.js": f"{name}\n" for name in ("app", "sub/lib", "gone")})
    repo.git("rm", "--cached", "--quiet", "dist/gone.js")
    repo.write("dist/staged.js", "staged\n")
    repo.git("add", "dist/staged.js")
    repo.write("dist/free.js", "free\n")
    return repo


def test_an_edit_of_a_tracked_file_is_in_the_source(built: Repo, mounted: Mounted) -> None:
    world = mounted(policy=OPEN, source=built.root)
    for name in ("app.js", "gone.js", "staged.js", "free.js", "new.js", "sub/lib.js", "sub/new.js"):
        (world.path / "dist" / name).write_text("edited\n")
    subprocess.run(["sed", "-i", "s/edited/again/", "app.js"], cwd=world.path / "dist", check=True)
    assert (world.path / "dist/free.js").read_text() == "edited\n"
    world.umount()
    left = {path.relative_to(built.root / "dist").as_posix(): path.read_text() for path in _files(built.root / "dist")}
    assert left == {
        "app.js": "again\n",
        "gone.js": "edited\n",
        "staged.js": "edited\n",
        "free.js": "free\n",
        "sub/lib.js": "edited\n",
    }


def _files(top: Path) -> list[Path]:
    return [path for path in top.rglob("*") if path.is_file()]


def test_an_edit_without_a_matching_rule_is_refused(built: Repo, mounted: Mounted) -> None:
    world = mounted(policy=CLOSED, source=built.root)
    assert outcome((world.path / "dist/app.js").write_text, "edited") == errno.EACCES
    assert outcome(os.unlink, world.path / "dist/sub/lib.js") == errno.EACCES
    assert outcome(os.rename, world.path / "dist/sub", world.path / "dist/other") == errno.EACCES
    ran = subprocess.run(["sed", "-i", "s/app/x/", "app.js"], cwd=world.path / "dist", check=False, capture_output=True)
    assert ran.returncode
    (world.path / "dist/new.js").write_text("new")
    told = bonobofs("why", world.path / "dist/app.js", "--role", "agent").stdout
    assert "No rule of the policy admits" in told
    world.umount()
    assert built.status() == "D  dist/gone.js\nA  dist/staged.js\n?? dist/free.js\n?? dist/gone.js\n"


def test_a_move_of_a_directory_with_tracked_files_is_judged(built: Repo, mounted: Mounted) -> None:
    world = mounted(policy=OPEN, source=built.root)
    os.rename(world.path / "dist/sub", world.path / "moved")
    (world.path / "dist/new.js").write_text("new")
    # What lies beside the tracked files is scratch here and would not be there.
    assert outcome(os.rename, world.path / "dist", world.path / "out") == errno.EXDEV
    shutil.rmtree(world.path / "dist", ignore_errors=True)
    assert not os.path.lexists(world.path / "dist/app.js")
    world.umount()
    assert (built.root / "moved/lib.js").read_text() == "sub/lib\n"
    assert (built.root / "dist/free.js").read_text() == "free\n", "what git does not track is only hidden"
    assert not (built.root / "dist/app.js").exists()


def test_tracked_paths_are_known_in_a_subdirectory_of_a_repository(built: Repo, mounted: Mounted) -> None:
    built.commit(**{"web/dist/app.js": "app\n", "web/a.md": "a\n"})
    _edits(mounted(policy=OPEN, source=built.root / "web"), "dist/app.js")


def test_tracked_paths_are_known_in_a_linked_worktree(built: Repo, mounted: Mounted, tmp_path: Path) -> None:
    built.git("stash", "--quiet")
    built.git("worktree", "add", "--quiet", str(tmp_path / "linked"))
    _edits(mounted(policy=OPEN, source=tmp_path / "linked"), "dist/app.js")


def _edits(world: World, path: str) -> None:
    (world.path / path).write_text("edited\n")
    (world.path / "dist/new.js").write_text("new\n")
    world.umount()
    assert (world.source / path).read_text() == "edited\n"
    assert not (world.source / "dist/new.js").exists()


def test_a_new_policy_does_not_make_tracked_paths_scratch(built: Repo, mounted: Mounted, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('default = "allow"\nhidden = ["**"]\n')
    world = mounted(policy=policy, source=built.root)
    built.write("dist/late.js", "late\n")
    built.git("add", "dist/late.js")
    policy.write_text(OPEN)
    until(lambda: recorded(world, "policy"), "the new policy is in force")
    for name in ("app.js", "late.js", "free.js"):
        (world.path / "dist" / name).write_text("edited\n")
    assert "scratch" not in bonobofs("why", world.path / "dist/app.js").stdout
    assert "scratch" in bonobofs("why", world.path / "dist/free.js").stdout
    policy.write_text(CLOSED)
    until(lambda: len(recorded(world, "policy")) == 2, "the rules are in force")
    assert outcome((world.path / "dist/app.js").write_text, "more") == errno.EACCES
    world.umount()
    left = {name: (built.root / "dist" / name).read_text() for name in ("app.js", "late.js", "free.js")}
    assert left == {"app.js": "edited\n", "late.js": "edited\n", "free.js": "free\n"}


def test_a_python_session_knows_the_tracked_paths(built: Repo, home: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(OPEN)
    with session.open_session(built.root, agent="alice", policy=policy) as opened:
        files = FileGuard(opened)
        assert files.write_file("dist/app.js", "edited\n", agent="alice", overwrite=True)
        assert not files.write_file("dist/new.js", "new\n", agent="alice")
    assert (built.root / "dist/app.js").read_text() == "edited\n"


@pytest.mark.parametrize("index", [b"", b"DIRC\0\0\0\x02\0\0\0\x09", b"x" * 100])
def test_with_an_unreadable_index_no_existing_file_is_scratch(
    built: Repo, mounted: Mounted, home: Path, index: bytes
) -> None:
    (built.root / ".git/index").write_bytes(index)
    found = find_tracked(home, built.root, compile_policy({"scratch": [{"paths": ["dist/", "**/node_modules/"]}]}))
    assert found.paths == ["dist/"]
    assert len(found.notes) == 1
    world = mounted(policy=OPEN, source=built.root)
    (world.path / "dist/free.js").write_text("edited\n")
    (world.path / "node_modules").mkdir()
    (world.path / "node_modules/x").write_text("x")
    world.umount()
    assert (built.root / "dist/free.js").read_text() == "edited\n"
    assert not (built.root / "node_modules").exists()


def test_reading_the_index_runs_no_program_of_the_repository(built: Repo, home: Path, tmp_path: Path) -> None:
    program = tmp_path / "run"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    for key in ("core.fsmonitor", "core.sshCommand", "core.pager", "core.editor", "filter.x.clean"):
        built.git("config", key, str(program))
    assert tracked(built.root, home, lambda path: path.startswith("dist/")) == {
        *("dist/app.js", "dist/gone.js", "dist/staged.js", "dist/sub/lib.js")
    }
    assert not (tmp_path / "ran").exists()


def test_without_a_commit_the_staged_files_are_tracked(tmp_path: Path, home: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path / "new"], check=True)
    assert tracked(tmp_path / "new", home, lambda _: True) == set()
    (tmp_path / "no").mkdir()
    with pytest.raises(GitError):
        tracked(tmp_path / "no", home, lambda _: True)


def test_a_branch_without_a_commit_has_no_tracked_paths_and_a_damaged_one_is_an_error(
    home: Path, tmp_path: Path
) -> None:
    """HEAD of a new repository has no commit. A damaged ref must not hide what HEAD tracks."""
    root = tmp_path / "new"
    subprocess.run(["git", "init", "-q", "-b", "main", root], check=True)
    assert tracked(root, home, lambda _: True) == set()
    (root / ".git/refs/heads/main").write_text("damaged\n")
    with pytest.raises(GitError):
        tracked(root, home, lambda _: True)


def test_many_tracked_paths_are_stored_as_directories() -> None:
    paths = [f"dist/{one}/{two}/{number}.js" for one in "ab" for two in "cd" for number in range(100)]
    assert compact(paths, 400) == sorted(paths)
    assert compact(paths, 399) == ["dist/a/c/", "dist/a/d/", "dist/b/c/", "dist/b/d/"]
    assert compact([*paths, "dist/x.js"], 3) == ["dist/a/", "dist/b/", "dist/x.js"]
    assert compact([*paths, "dist/x.js"], 1) == ["dist/"]
    for most in (399, 3, 1):
        found = Tracked(compact(paths, most))
        assert all(found.has(path) for path in (*paths, "dist", "dist/a", "dist/b/c"))
        assert not found.has("distant")
