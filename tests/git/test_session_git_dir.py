"""The session's own `.git`: any git works in a mount, and its changes stay out of the source until published."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from bonobofs.git.session_repository import all_kept
from tests.support.repositories import Repo
from tests.support.wait import until
from tests.support.world import Mounted, OrdinaryUser, World, bonobofs

GIT: Final = shutil.which("git") or ""
PRESET: Final = Path("project")
COMMANDS: Final = (
    "status --porcelain",
    "log --oneline --all",
    "switch -q -c aidlc/work",
    "add new.txt",
    "commit -q -m one",
    "commit -q --allow-empty -m two",
    "mv new.txt moved.txt",
    "stash push -q",
    "stash pop -q",
    "reset -q --hard",
    "rebase -q -f main",
    "switch -q main",
    "merge-base main aidlc/work",
    "switch -q aidlc/work",
    "cherry-pick main~1",
    "cherry-pick --skip",
    "branch -m aidlc/other",
    "tag own",
    "gc -q",
    "reflog expire --all --expire=now",
    "fsck --strict",
    "worktree list",
)
TRANSPORTS: Final = ("kernel", "portable")


def git(where: Path, *arguments: str, code: int | None = 0) -> str:
    """Run git with no environment at all, as `env -i` does, and return what it says on both outputs."""
    ran = subprocess.run(
        [GIT, "--no-pager", *arguments],
        cwd=where,
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    assert code is None or ran.returncode == code, (arguments, ran.returncode, ran.stdout)
    return ran.stdout


@pytest.fixture
def repo(source: Path) -> Repo:
    """A repository of three commits, with a branch and a tag."""
    made = Repo(source).init()
    made.commit("first", {"README.md": "one\n", "src/app.py": "a = 1\n"})
    made.git("branch", "topic")
    made.commit("second", {"README.md": "two\n"})
    made.git("tag", "-a", "-m", "first", "v1")
    made.commit("third", {"src/lib.py": "b = 2\n"})
    return made


def enter(mounted: Mounted, source: Path, transport: str = "auto", **more: object) -> World:
    return mounted(policy=PRESET, source=source, transport=transport, **more)


def denials(world: World) -> list[dict[str, str]]:
    lines = (world.path / ".bonobofs/denials.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_git_needs_no_environment_in_a_mount(mounted: Mounted, repo: Repo, transport: str) -> None:
    """Neither PATH nor a shell, and every ref of the source is unchanged."""
    before = repo.refs()
    world = enter(mounted, repo.root, transport)
    (world.path / "new.txt").write_text("new\n")
    for command in COMMANDS:
        git(world.path, *command.split(), code=None if command.startswith("cherry-pick") else 0)
    assert git(world.path, "log", "-1", "--format=%an").strip() == "alice"
    assert repo.refs().items() >= before.items()
    assert repo.git("status", "--porcelain") == git(world.path, "status", "--porcelain")


def test_a_linked_work_tree_has_a_repository_of_its_own(mounted: Mounted, repo: Repo, tmp_path: Path) -> None:
    """Where the source's `.git` is a file, the mount shows a directory, on the branch of that work tree."""
    repo.git("worktree", "add", "-q", "-b", "aidlc/linked", str(tmp_path / "linked"))
    world = enter(mounted, tmp_path / "linked")
    (world.path / "new.txt").write_text("new\n")
    git(world.path, "add", "-A")
    git(world.path, "commit", "-q", "-m", "in the linked tree")
    assert git(world.path, "symbolic-ref", "HEAD").strip() == "refs/heads/aidlc/linked"
    git(world.path, "fsck")
    assert (world.path / ".git").is_dir()
    assert (tmp_path / "linked/.git").is_file()
    assert repo.git("log", "-1", "--format=%s", "aidlc/linked").strip() == "in the linked tree"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_protected_branch_always_equals_that_of_the_source(mounted: Mounted, repo: Repo, transport: str) -> None:
    """Also with packed refs. A new branch is listed soon."""
    world = enter(mounted, repo.root, transport)

    def is_current() -> bool:
        return git(world.path, "rev-parse", "main").strip() == repo.id("main")

    for number in range(3):
        repo.commit(f"by the operator {number}", {"README.md": f"{number}\n"})
        assert is_current()
        repo.git("pack-refs", "--all")
        assert is_current()
    repo.git("branch", "develop")
    assert git(world.path, "rev-parse", "develop").strip() == repo.id("main")
    repo.git("branch", "-D", "develop")
    assert git(world.path, "rev-parse", "-q", "--verify", "develop", code=1) == ""
    repo.git("branch", "master")
    until(lambda: "master" in git(world.path, "branch", "--list").split(), "the new branch is listed")


def test_a_protected_branch_is_listed_once_no_branch_of_the_session_is_in_its_way(mounted: Mounted, repo: Repo) -> None:
    """Loose or packed. Until then the mount leaves no temporary file."""
    policy = 'default = "allow"\nhidden = ["**"]\n[git]\nprotected_branches = ["main", "stable", "release/*"]\n'
    repo.git("branch", "stable/x")
    world = mounted(policy=policy, source=repo.root)

    def listed() -> set[str]:
        return set(git(world.path, "branch", "--list", "--format=%(refname:short)").split())

    git(world.path, "branch", "release")
    repo.git("branch", "release/1")
    repo.git("branch", "-m", "stable/x", "stable")
    until(lambda: git(world.path, "rev-parse", "-q", "--verify", "stable", code=None) == "", "the server looks")
    repo.git("branch", "release/2")
    repo.git("branch", "release-3")
    assert {"stable", "release/1", "release/2"}.isdisjoint(listed())
    assert sorted(os.listdir(world.path / ".git/refs/heads")) == ["main", "release", "stable", "topic"]
    git(world.path, "branch", "-D", "release")
    until(lambda: {"release/1", "release/2"} <= listed(), "the branches of the source are listed")
    assert git(world.path, "rev-parse", "release/1").strip() == repo.id("main")


@pytest.mark.parametrize(
    "command",
    [
        "commit --allow-empty -m moved",
        "branch -f main topic",
        "branch -D main",
        "branch -m main other",
        "update-ref -d refs/heads/main",
        "reset --hard HEAD~1",
        "symbolic-ref refs/heads/main refs/heads/topic",
    ],
)
def test_a_session_cannot_move_a_protected_branch(mounted: Mounted, repo: Repo, command: str) -> None:
    """The refusal says that the branch follows the source, and how to continue."""
    world = enter(mounted, repo.root)
    if "-D" in command or "-f" in command:
        git(world.path, "switch", "-q", "topic")
    assert git(world.path, *command.split(), code=None)
    assert git(world.path, "rev-parse", "main").strip() == repo.id("main")
    refusal = denials(world)[-1]
    assert refusal["rule"] == "repository:protected"
    assert "git switch -c" in refusal["instead"]
    git(world.path, "switch", "-q", "-C", "aidlc/after")


def test_the_git_directory_cannot_be_moved_or_replaced(mounted: Mounted, repo: Repo) -> None:
    """`.git` cannot be renamed, replaced, removed or given another mode, and no symlink in it leads out."""
    world = enter(mounted, repo.root)
    inside = world.path / ".git"
    (world.path / "other").mkdir()
    attempts: tuple[Callable[[], object], ...] = (
        lambda: inside.rename(world.path / "moved"),
        lambda: (world.path / "other").rename(inside),
        inside.rmdir,
        lambda: inside.chmod(0o700),
        lambda: (inside / "link").symlink_to("/etc/passwd"),
        lambda: (inside / "link").symlink_to("../README.md"),
        lambda: (inside / "refs/link").symlink_to("../../README.md"),
        lambda: (inside / "refs/heads").rename(inside / "refs/elsewhere"),
        lambda: (world.path / "config").hardlink_to(inside / "config"),
        lambda: (inside / "config").rename(world.path / "config"),
        lambda: (world.path / "README.md").rename(inside / "README.md"),
        (world.path / ".bonobofs/objects/new").touch,
        (world.path / ".bonobofs/objects/info").rmdir,
        lambda: (world.path / "link").symlink_to(".git/config"),
    )
    for attempt in attempts:
        with pytest.raises(OSError, match=r"not permitted|Read-only|cross-device|not empty|exists"):
            attempt()
    (inside / "refs/link").symlink_to("heads/main")
    assert (inside / "refs/link").read_text().strip() == repo.id("main")
    assert sorted(path.name for path in repo.root.iterdir()) == [".git", "README.md", "other", "src"]


def test_changes_of_the_repository_are_counted_in_the_record(mounted: Mounted, repo: Repo) -> None:
    """The record has one entry for a program's changes in `.git`, and none of the source."""
    world = enter(mounted, repo.root)
    git(world.path, "switch", "-q", "-c", "aidlc/work")
    git(world.path, "commit", "-q", "--allow-empty", "-m", "one")
    paths = {entry.path for entry in world.entries() if entry.kind == "intent"}
    assert paths - {""} == {".git"}  # a publication names no path
    assert "scratch" not in (world.path / ".bonobofs/scratch").read_text()


def test_the_git_directory_does_not_count_towards_a_scratch_quota(mounted: Mounted, repo: Repo) -> None:
    """Its file system is the source's."""
    policy = 'extends = "project"\n[[scratch]]\npaths = ["out/"]\nmax_total = "100KB"\n'
    world = mounted(policy=policy, source=repo.root)
    (world.path / "large").write_bytes(os.urandom(300_000))
    git(world.path, "add", "large")
    (world.path / "out").mkdir()
    (world.path / "out/fits").write_bytes(bytes(90_000))
    with pytest.raises(OSError, match="File too large"):
        (world.path / "out/more").write_bytes(bytes(20_000))
    git(world.path, "hash-object", "-w", "large")
    assert os.statvfs(world.path / ".git").f_blocks == os.statvfs(world.home).f_blocks


@pytest.mark.parametrize("killed", [False, True])
def test_unpublished_work_is_kept_and_named(mounted: Mounted, repo: Repo, *, killed: bool) -> None:
    """The operator can fetch it, which runs no program that the agent has named."""
    world = enter(mounted, repo.root)
    git(world.path, "switch", "-q", "-c", "Unfit/name")
    git(world.path, "commit", "-q", "--allow-empty", "-m", "one")
    tip = git(world.path, "rev-parse", "HEAD").strip()
    (world.path / "README.md").write_text("put aside\n")
    git(world.path, "stash", "-q")
    git(world.path, "config", "core.alternateRefsCommand", f"touch {world.home}/ran; false")
    git(world.path, "config", "core.fsmonitor", f"touch {world.home}/ran; false")
    (world.path / ".git/commondir").write_text("/nowhere")
    (world.path / ".git/.git").write_text("gitdir: /nowhere")
    if killed:
        world.kill()
    ended = world.umount()
    (kept,) = ended.kept or all_kept(world.home)
    assert (kept.branches, kept.stashes, kept.operations) == ({"Unfit/name": 1}, 1, [])
    assert kept in all_kept(world.home)
    assert f"git fetch {kept.place} Unfit/name" in str(kept)
    repo.git("fetch", "-q", kept.place, "Unfit/name", "refs/stash:refs/heads/aside")
    assert repo.id("FETCH_HEAD") == tip
    assert repo.git("show", "aside:README.md") == "put aside\n"
    assert not (world.home / "ran").exists()
    listed = bonobofs("status", "--json", env={"BONOBOFS_HOME": str(world.home)})
    assert [one["kept"]["place"] for one in json.loads(listed.stdout)] == [kept.place]
    assert kept.place in bonobofs("status").stdout


@pytest.mark.parametrize(
    ("story", "kept"),
    [
        ("switch -q -c Fix_1; commit -q -m one; pack-refs --all", {"Fix_1": 1}),
        ("switch -q -c a\u2028b; commit -q -m one", {"a\u2028b": 1}),
        ("switch -q --detach; commit -q -m one; tag wip; switch -q main", {"refs/tags/wip": 1}),
        ("switch -q --detach; commit -q -m one; tag -a -m wip wip; switch -q main; gc -q", {"refs/tags/wip": 1}),
        ("switch -q --detach; commit -q -m one", {"HEAD": 1}),
        ("switch -q --detach; commit -q -m one; update-ref refs/own/x HEAD; switch -q main", {"refs/own/x": 1}),
        ("stash -q; pack-refs --all", {"refs/stash": 1}),
        ("stash -q; stash drop -q", {}),
        ("switch -q --detach; commit -q -m one; switch -q main", {}),
    ],
)
def test_every_ref_with_unpublished_commits_is_kept(
    mounted: Mounted, repo: Repo, story: str, kept: dict[str, int]
) -> None:
    """Packed refs and tags too. The printed command fetches them. Commits that only a reflog reaches are not kept."""
    repo.git("branch", "moved")
    world = enter(mounted, repo.root)
    (world.path / "README.md").write_text("changed\n")
    git(world.path, "add", "README.md")
    for command in story.split("; "):
        git(world.path, *command.split(" "))
    repo.git("branch", "-D", "moved")
    found = world.umount().kept
    assert [each.branches | ({"refs/stash": each.stashes} if each.stashes else {}) for each in found] == [kept] * bool(
        kept
    )
    for each in found:
        command = str(each).partition("to fetch from it: git ")[2].partition(";")[0]
        repo.git(*shlex.split(command))
        assert repo.git("show", "FETCH_HEAD:README.md") == "changed\n"


def test_a_detached_linked_work_tree_is_kept(mounted: Mounted, repo: Repo, tmp_path: Path) -> None:
    """The object id of its HEAD names it."""
    world = enter(mounted, repo.root)
    git(world.path, "worktree", "add", "-q", "--detach", str(tmp_path / "linked"))
    git(tmp_path / "linked", "commit", "-q", "--allow-empty", "-m", "one")
    tip = git(tmp_path / "linked", "rev-parse", "HEAD").strip()
    (kept,) = world.umount().kept
    assert kept.branches == {tip: 1}
    repo.git("fetch", "-q", kept.place, tip)


def test_an_operation_in_progress_is_kept(mounted: Mounted, repo: Repo) -> None:
    """A rebase that waits for a conflict resolution survives umount."""
    repo.git("switch", "-q", "-c", "aidlc/work", "topic")
    repo.commit("conflicts", {"README.md": "mine\n"})
    world = enter(mounted, repo.root)
    git(world.path, "rebase", "main", code=1)
    (kept,) = world.umount().kept
    assert kept.operations == ["a rebase in progress"]


def test_a_repository_without_own_commits_is_removed(mounted: Mounted, repo: Repo) -> None:
    """Commits that the source has, also under another name, are not kept."""
    world = enter(mounted, repo.root)
    git(world.path, "switch", "-q", "-c", "aidlc/work", "main~1")
    git(world.path, "switch", "-q", "--detach", "main")
    git(world.path, "gc", "-q")
    git(world.path, "repack", "-q", "-a", "-d")
    assert world.umount().kept == ()
    assert not (world.home / "kept").exists()
    assert not (world.home / "sessions" / world.session.session / "repository").exists()


def test_why_agrees_with_the_mount_below_git(mounted: Mounted, repo: Repo) -> None:
    world = enter(mounted, repo.root)
    for where, path, code in (
        (world.path, ".git/config", 0),
        (world.path, ".git/refs/heads/main", 77),
        (world.path, ".git/refs/heads/topic", 0),
        (repo.root, ".git/config", 77),
    ):
        assert bonobofs("why", where / path).returncode == code, (where, path)
    assert "`.git` is the repository of this session." in bonobofs("why", world.path / ".git/config").stdout
    assert "`.git` is the repository of this session." in (world.path / ".bonobofs/policy.md").read_text()


def test_a_mount_over_its_own_source_has_a_repository(mounted: Mounted, repo: Repo) -> None:
    """The server reads the source's objects and branches below the mount that covers them."""
    world = enter(mounted, repo.root, mountpoint=repo.root)
    (world.path / "new.txt").write_text("new\n")
    git(world.path, "switch", "-q", "-c", "aidlc/over")
    git(world.path, "add", "-A")
    git(world.path, "commit", "-q", "-m", "one")
    git(world.path, "fsck")
    tip = git(world.path, "rev-parse", "aidlc/over").strip()
    world.umount()
    assert repo.id("aidlc/over") == tip


def test_an_ordinary_user_has_a_repository(ordinary_user: OrdinaryUser) -> None:
    """A mount without root works the same, and its repository belongs to that user."""
    source, mountpoint = ordinary_user.directory / "source", ordinary_user.directory / "mount"
    for command in (
        ("mkdir", source, mountpoint),
        ("git", "init", "-q", "-b", "main", source),
        (
            "git",
            "-C",
            source,
            "-c",
            "user.name=o",
            "-c",
            "user.email=o@x.y",
            "commit",
            "-q",
            "--allow-empty",
            "-m",
            "1",
        ),
    ):
        assert ordinary_user.run(*command).returncode == 0
    made = ordinary_user.bonobofs("mount", source, mountpoint, "--policy", "project")
    assert made.returncode == 0, made.stderr
    try:
        for line in ("switch -q -c aidlc/own", "commit -q --allow-empty -m two", "gc -q", "fsck"):
            ran = ordinary_user.run("git", "-C", mountpoint, *line.split())
            assert ran.returncode == 0, (line, ran.stderr)
        assert "aidlc/own" in ordinary_user.run("git", "-C", source, "branch").stdout
    finally:
        ended = ordinary_user.bonobofs("umount", mountpoint)
    assert ended.returncode == 0, ended.stderr


def test_git_stores_no_object_that_the_source_has(mounted: Mounted, repo: Repo) -> None:
    """The pack keeps its time, and git's attempt to change that is no denial."""
    repo.git("gc", "-q")
    (pack,) = (repo.root / ".git/objects/pack").glob("*.pack")
    before = pack.stat().st_mtime_ns
    world = enter(mounted, repo.root)
    (world.path / "copy.md").write_text("two\n")
    git(world.path, "add", "copy.md")
    assert "count: 0" in git(world.path, "count-objects", "-v").splitlines()
    assert pack.stat().st_mtime_ns == before
    assert denials(world) == []
