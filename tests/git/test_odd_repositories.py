"""Repositories of every kind work in a mount as outside, or are refused with a reason."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from bonobofs import session
from bonobofs.state.project_policies import store_preset
from tests.git.desks import Desk
from tests.git.test_session_git_dir import PRESET, git
from tests.support.repositories import Repo
from tests.support.world import Mounted

READING: Final = (
    "status --porcelain=v2 --branch --untracked-files=all",
    "log --all --stat --format=%H%d%n%B",
    "ls-files --stage",
    "for-each-ref",
    "rev-parse --is-shallow-repository",
    "submodule status --recursive",
    "stash list",
    "diff HEAD",
    "show --stat HEAD",
    "fsck --full",
)
CHANGING: Final = ("switch -q -c aidlc/odd", "add -A", "commit -q -m one", "gc -q", "fsck", "status --porcelain")

Make = Callable[[Path, Path], object]


def _origin(beside: Path) -> Repo:
    origin = Repo(beside / "origin").init()
    origin.commit("first", {"README.md": "one\n", "src/app.py": "a = 1\n", "docs/a/b.md": "b\n"})
    origin.commit("second", {"README.md": "two\n"})
    origin.git("tag", "-a", "-m", "tagged", "v1")
    origin.commit("third", {"README.md": "three\n"})
    origin.git("config", "uploadpack.allowFilter", "true")
    return origin


def _clone(source: Path, beside: Path, *options: str) -> Repo:
    origin = _origin(beside)
    origin.git("clone", "-q", *options, f"file://{origin.root}", str(source))
    return Repo(source)


def unborn(source: Path, _: Path) -> None:
    Repo(source).init().write("first.txt", "not committed\n")


def detached(source: Path, beside: Path) -> None:
    _clone(source, beside).git("switch", "-q", "--detach", "HEAD~1")


def shallow(source: Path, beside: Path) -> None:
    _clone(source, beside, "--depth=2")


def partial(source: Path, beside: Path) -> None:
    _clone(source, beside, "--filter=blob:none")


def alternates(source: Path, beside: Path) -> None:
    origin = _origin(beside)
    middle, far = beside / "middle", origin.root
    origin.git("clone", "-q", "--shared", str(far), str(middle))
    Repo(middle).commit("in the middle", {"middle.txt": "1\n"})
    origin.git("clone", "-q", "--shared", str(middle), str(source))
    Repo(source).commit("here", {"here.txt": "1\n"})


def packed(source: Path, beside: Path) -> None:
    repo = _clone(source, beside)
    repo.git("branch", "topic", "HEAD~1")
    repo.git("gc", "-q", "--prune=now")
    repo.git("commit-graph", "write", "--reachable")
    repo.git("multi-pack-index", "write")


def submodules(source: Path, beside: Path) -> None:
    inner = Repo(beside / "inner").init()
    inner.commit("inner", {"inner.txt": "1\n"})
    middle = Repo(beside / "middle").init()
    middle.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner.root), "deep")
    middle.commit("middle")
    repo = _clone(source, beside)
    repo.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(middle.root), "lib/middle")
    repo.git("-c", "protocol.file.allow=always", "submodule", "update", "-q", "--init", "--recursive")
    repo.commit("with submodules")


def large_files_without_their_program(source: Path, beside: Path) -> None:
    repo = _clone(source, beside)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 3\n"
    repo.commit("large", {".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n", "a.bin": pointer})


def sha256(source: Path, _: Path) -> None:
    repo = Repo(source)
    repo.git("init", "-q", "-b", "main", "--object-format=sha256")
    repo.commit("first", {"README.md": "one\n"})


def sparse(source: Path, beside: Path) -> None:
    repo = _clone(source, beside)
    repo.git("sparse-checkout", "set", "--cone", "--sparse-index", "src")


def split_index(source: Path, beside: Path) -> None:
    repo = _clone(source, beside)
    repo.git("update-index", "--split-index")
    repo.write("new.txt", "new\n")
    repo.git("add", "new.txt")


def staged_and_stashed(source: Path, beside: Path) -> None:
    repo = _clone(source, beside)
    repo.write("README.md", "put aside\n")
    repo.git("stash")
    repo.write("README.md", "staged\n")
    repo.git("add", "README.md")
    repo.write("README.md", "not staged\n")


def symbolic_refs(source: Path, beside: Path) -> None:
    repo = _clone(source, beside)
    repo.git("symbolic-ref", "refs/heads/alias", "refs/heads/main")
    (source / ".git/refs/heads/link").symlink_to("main")


WORKING: Final = (
    *(unborn, detached, shallow, partial, alternates, packed, submodules, large_files_without_their_program, sha256),
    *(sparse, split_index, staged_and_stashed, symbolic_refs),
)


@pytest.mark.parametrize("make", WORKING, ids=[make.__name__ for make in WORKING])
def test_git_reads_the_same_in_the_mount_as_outside(mounted: Mounted, source: Path, tmp_path: Path, make: Make) -> None:
    """Each reading command has the same output, and a commit on the session's own branch works."""
    make(source, tmp_path)
    plain = tmp_path / "plain"
    subprocess.run(["cp", "-a", source, plain], check=True)
    world = mounted(policy=PRESET, source=source)
    for command in READING:
        said = git(world.path, *command.split(), code=None)
        assert said == git(plain, *command.split(), code=None), command
    (world.path / "odd.txt").write_text("odd\n")
    for command in CHANGING:
        git(world.path, *command.split())
    assert git(world.path, "log", "--format=%an", "-1").strip() == "alice"


def test_unpublished_work_in_a_submodule_is_kept(mounted: Mounted, source: Path, tmp_path: Path) -> None:
    """Also in a nested one. No program of the agent's configuration and hooks runs in what is kept."""
    submodules(source, tmp_path)
    world = mounted(policy=PRESET, source=source)
    inner, ran = world.path / "lib/middle/deep", tmp_path / "ran"
    git(inner, "switch", "-q", "-c", "own")
    git(inner, "commit", "-q", "--allow-empty", "-m", "in the submodule")
    tip = git(inner, "rev-parse", "HEAD").strip()
    (inner / "inner.txt").write_text("put aside\n")
    git(inner, "stash", "-q")
    git(world.path / "lib/middle", "switch", "-q", "-c", "Fetched", "HEAD")
    git_dir = world.path / ".git/modules/lib/middle"
    for directory in (git_dir, git_dir / "modules/deep"):
        git(world.path, "config", "--file", str(directory / "config"), "core.fsmonitor", f"touch {ran}; false")
        (directory / "hooks").mkdir(exist_ok=True)
        (directory / "hooks/post-checkout").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (kept,) = world.umount().kept
    assert (kept.branches, kept.stashes, kept.operations) == ({}, 0, [])
    assert kept.modules == {"modules/lib/middle/modules/deep": {"own": 1, "refs/stash": 1}}
    place = f"{kept.place}/modules/lib/middle/modules/deep"
    assert f"git fetch {place} own refs/stash; " in str(kept)
    for directory in (Path(kept.place, "modules/lib/middle"), Path(place)):
        assert not (directory / "hooks").exists()
        assert "fsmonitor" not in (directory / "config").read_text()
        git(directory, "fsck", "--connectivity-only")
    operator = Repo(source / "lib/middle/deep")
    operator.git("fetch", "-q", place, "own")
    assert operator.id("FETCH_HEAD") == tip
    assert not ran.exists()


def test_a_commit_in_a_submodule_stays_in_the_session(mounted: Mounted, source: Path, tmp_path: Path) -> None:
    """The session has its own repository of the submodule, which reads the objects of the source."""
    submodules(source, tmp_path)
    before = Repo(source / "lib/middle").id()
    world = mounted(policy=PRESET, source=source)
    inner = world.path / "lib/middle"
    git(inner, "switch", "-q", "-c", "own")
    git(inner, "commit", "-q", "--allow-empty", "-m", "in the submodule")
    assert "new commits" in git(world.path, "status")
    # A command without a hook, after which the session's git publishes.
    done = Desk(world).run("reset", "-q", "--soft", "HEAD^", at="lib/middle")
    assert (done.returncode, done.stderr) == (0, "")
    assert Repo(source / "lib/middle").id() == before
    assert (source / ".git/HEAD").read_text() == "ref: refs/heads/main\n"


def test_a_partial_clone_fetches_missing_objects(mounted: Mounted, source: Path, tmp_path: Path) -> None:
    """From the remote into the session's own store."""
    partial(source, tmp_path)
    world = mounted(policy=PRESET, source=source)
    assert git(world.path, "show", "HEAD~2:README.md") == "one\n"


def test_an_unpublishable_repository_is_reported_at_the_mount(home: Path, source: Path, tmp_path: Path) -> None:
    """A repository with SHA-256 objects works in the session, and its commits are kept at the end."""
    sha256(source, tmp_path)
    mountpoint = tmp_path / "mount"
    mountpoint.mkdir()
    made = session.start(home, session.MountRequest(source, mountpoint, policy=PRESET))
    try:
        git(mountpoint, "switch", "-q", "-c", "aidlc/kept")
        assert "not published" in git(mountpoint, "commit", "-q", "--allow-empty", "-m", "one")
    finally:
        ended = session.unmount_session(home, mountpoint)
    assert any("cannot publish" in note for note in made.notes)
    assert [kept.branches for kept in ended.kept] == [{"aidlc/kept": 1}]


def _reftable(source: Path) -> None:
    Repo(source).git("config", "core.repositoryformatversion", "1")
    Repo(source).git("config", "extensions.refStorage", "reftable")


def _unknown_extension(source: Path) -> None:
    Repo(source).git("config", "core.repositoryformatversion", "1")
    Repo(source).git("config", "extensions.brandNew", "1")


def _shared_directories(source: Path) -> None:
    (source / ".git/refs").rename(source / ".git/elsewhere")
    (source / ".git/refs").symlink_to("elsewhere")


def _no_repository(source: Path) -> None:
    shutil.rmtree(source / ".git")
    (source / ".git").write_text("gitdir: /nowhere/at/all\n")


def _broken_configuration(source: Path) -> None:
    (source / ".git/config").write_text("[core\n")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_reftable, "keeps its refs as reftable"),
        (_unknown_extension, "the extension brandnew"),
        (_shared_directories, "is a symlink"),
        (_no_repository, "/nowhere/at/all"),
        (_broken_configuration, "bad config line 1"),
    ],
)
def test_an_unsupported_repository_is_reported_at_the_mount(
    home: Path, source: Path, tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    """The mount serves, its `.git` is the source's and read-only, and a note has the reason."""
    Repo(source).init().commit("first", {"README.md": "one\n"})
    spoil(source)
    mountpoint = tmp_path / "mount"
    mountpoint.mkdir()
    store_preset(home, source.resolve(), "aidlc")
    made = session.start(home, session.MountRequest(source, mountpoint, policy=PRESET))
    try:
        assert any("Git cannot change anything" in note and words in note for note in made.notes), made.notes
        with pytest.raises(OSError, match=r"Read-only|Not a directory"):
            (mountpoint / ".git/config").write_text("changed")
    finally:
        session.unmount_session(home, mountpoint)


def test_a_filter_of_the_repository_runs_in_the_session(mounted: Mounted, source: Path) -> None:
    """Without it, encrypted files would be committed as plain text. It runs as the agent."""
    repo = Repo(source).init()
    repo.git("config", "filter.secret.clean", "tr a-z n-za-m")
    repo.git("config", "filter.secret.required", "true")
    repo.git("config", "core.editor", "false")
    repo.commit("first", {".gitattributes": "secret filter=secret\n"})
    world = mounted(policy=PRESET, source=source)
    git(world.path, "switch", "-q", "-c", "aidlc/secret")
    (world.path / "secret").write_text("hello\n")
    git(world.path, "add", "secret")
    git(world.path, "commit", "-q", "-m", "one")
    assert git(world.path, "show", "HEAD:secret") == "uryyb\n"
    assert git(world.path, "config", "core.editor", code=1) == ""
