"""Git commands may write published files that the agent may not write, and no other content."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bonobofs.policy.decision import Refused
from tests.git.desks import LARGE, NOTES, Desk, make_source
from tests.support.observe import companion_of
from tests.support.repositories import Repo
from tests.support.wait import until
from tests.support.world import Mounted, World, register


@pytest.fixture
def repo(source: Path) -> Repo:
    return make_source(source)


@pytest.fixture
def desk(mounted: Mounted, repo: Repo) -> Desk:
    return Desk(mounted(policy=NOTES))


def content(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a work tree: whether it is executable or a symlink, and what it holds."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = 2, os.fsencode(path.readlink())
        elif path.is_file() and not name.startswith(".git"):
            found[name] = int(path.stat().st_mode & 0o100 != 0), path.read_bytes()
    return found


def checkouts(world: World) -> list[dict[str, Any]]:
    return [entry.details for entry in world.entries() if entry.operation == "checkout"]


@pytest.mark.parametrize("command", [["merge", "main"], ["rebase", "main"], ["switch", "main"]])
def test_a_merge_of_main_updates_the_work_tree(desk: Desk, repo: Repo, command: list[str], tmp_path: Path) -> None:
    """The work tree is that of a plain clone after the same command, and the record has one entry of it."""
    (desk.world.path / "docs/mine.md").write_text("mine\n")
    desk.git("add", "docs/mine.md")
    desk.git("commit", "-qm", "[gt-1] Mine")
    repo.git("clone", "-q", "--branch", "aidlc/x", ".", str(tmp_path / "plain"))
    plain = Repo(tmp_path / "plain")
    plain.git("branch", "-q", "main", "origin/main")
    plain.commit("[gt-1] Mine", {"docs/mine.md": "mine\n"})
    plain.git(*command)
    desk.git(*command)
    assert content(repo.root) == content(plain.root)
    assert content(desk.world.path) == content(plain.root)
    assert desk.git("status", "--porcelain") == ""
    assert desk.git("rev-parse", "HEAD^{tree}").strip() == plain.id("HEAD^{tree}")
    (checkout,) = checkouts(desk.world)
    assert checkout["commit"] == repo.id("main")
    assert set(checkout["paths"]) >= {"Cargo.toml", "ci/new.yml", "ci/old.yml", "link", "run.sh", "large.bin"}
    assert not list(repo.root.rglob(".bonobofs*"))


def test_own_changes_are_still_judged(desk: Desk) -> None:
    """After a merge, the same files are refused as before."""
    desk.git("merge", "-q", "main")
    for name in ("Cargo.toml", "ci/new.yml", "run.sh"):
        with pytest.raises(PermissionError):
            (desk.world.path / name).write_text("x")
        with pytest.raises(PermissionError):
            (desk.world.path / name).unlink()


def test_a_command_can_be_reverted(desk: Desk, repo: Repo) -> None:
    """`reset --hard`, `merge --abort` and `switch -` restore the files that the command has replaced."""
    before = content(repo.root)
    desk.git("merge", "-q", "main")
    desk.git("reset", "-q", "--hard", "ORIG_HEAD")
    assert content(repo.root) == before
    desk.git("switch", "-q", "main")
    desk.git("switch", "-q", "-")
    assert content(repo.root) == before
    repo.git("branch", "-q", "aidlc/y", "main")
    (desk.world.path / "docs/b.md").write_text("mine\n")
    desk.git("add", ".")
    desk.git("commit", "-qm", "[gt-1] Conflict")
    desk.git("merge", "main", code=1)
    assert (repo.root / "Cargo.toml").read_text() == "v2\n"
    desk.git("merge", "--abort")
    assert (repo.root / "Cargo.toml").read_text() == "v1\n"
    assert desk.git("status", "--porcelain") == ""


def test_a_conflict_is_resolved(desk: Desk, repo: Repo) -> None:
    (desk.world.path / "docs/b.md").write_text("mine\n")
    desk.git("add", ".")
    desk.git("commit", "-qm", "[gt-1] Conflict")
    desk.git("rebase", "main", code=1)
    (desk.world.path / "docs/b.md").write_text("both\n")
    desk.git("add", "docs/b.md")
    desk.git("rebase", "--continue", GIT_EDITOR="true")
    assert (repo.root / "Cargo.toml").read_text() == "v2\n"
    assert (repo.root / "docs/b.md").read_text() == "both\n"


def commit_with(desk: Desk, path: str, text: bytes, *parents: str) -> str:
    """A commit of the agent with other content at a path, made without the work tree."""
    index = str(desk.world.home / "index")
    desk.git("read-tree", parents[-1], GIT_INDEX_FILE=index)
    desk.git("update-index", "--add", "--cacheinfo", f"100644,{desk.blob(text)},{path}", GIT_INDEX_FILE=index)
    tree = desk.git("write-tree", GIT_INDEX_FILE=index).strip()
    named = [word for parent in parents for word in ("-p", parent)]
    return desk.git("commit-tree", tree, *named, "-m", "[gt-1] Merge branch main").strip()


@pytest.mark.parametrize("command", [["merge"], ["rebase"], ["switch", "--detach"], ["reset", "--hard"], ["checkout"]])
def test_content_of_the_agent_is_refused_before_the_command(desk: Desk, repo: Repo, command: list[str]) -> None:
    """A commit that claims to be a merge of main, with the agent's own content in a refused path."""
    forged = commit_with(desk, "Cargo.toml", b"mine\n", "HEAD", "main")
    before = content(repo.root)
    told = desk.refused(*command, forged)
    assert told["path"] == "Cargo.toml"
    assert "no protected branch has this content there now" in told["about"]
    assert content(repo.root) == before
    assert checkouts(desk.world) == []
    assert desk.git("rev-parse", "--abbrev-ref", "HEAD").strip() == "aidlc/x"


def test_an_old_published_version_is_refused(desk: Desk, repo: Repo) -> None:
    desk.git("merge", "-q", "main")
    repo.git("branch", "-q", "-f", "other", "main")
    operator = Repo(repo.root.parent / "operator")
    repo.git("clone", "-q", "--branch", "main", ".", str(operator.root))
    operator.commit("[gt-1] Third", {"Cargo.toml": "v3\n"})
    repo.git("fetch", "-q", str(operator.root), "main:main")
    old = repo.id("main~1")
    Repo(desk.world.path).git("fetch", "-q", str(operator.root), "HEAD")  # the role has no fetch
    desk.git("merge", "-q", "FETCH_HEAD")
    assert (repo.root / "Cargo.toml").read_text() == "v3\n"
    forged = commit_with(desk, "Cargo.toml", b"v1\n", "HEAD")
    assert desk.refused("merge", forged)["path"] == "Cargo.toml"
    assert desk.refused("switch", "--detach", f"{old}~1")["path"] == "Cargo.toml"
    assert (repo.root / "Cargo.toml").read_text() == "v3\n"


def test_a_branch_of_another_agent_is_refused(mounted: Mounted, repo: Repo) -> None:
    other = Repo(repo.root.parent / "other")
    repo.git("clone", "-q", "--branch", "main", ".", str(other.root))
    other.commit("[gt-1] Other", {"Cargo.toml": "other\n"})
    repo.git("fetch", "-q", str(other.root), "HEAD:aidlc/other")
    desk = Desk(mounted(policy=NOTES))
    assert desk.refused("merge", "aidlc/other")["path"] == "Cargo.toml"
    assert desk.refused("switch", "aidlc/other")["path"] == "Cargo.toml"
    assert (repo.root / "Cargo.toml").read_text() == "v1\n"


def test_uncommitted_work_of_the_operator_stays(desk: Desk, repo: Repo) -> None:
    """A file without a commit is not replaced, also not by `reset --hard` or `checkout -f`."""
    (repo.root / "Cargo.toml").write_text("not committed\n")
    for command in (["reset", "--hard", "main"], ["checkout", "-f", "main"]):
        assert "changes that no commit has" in desk.refused(*command)["about"]
    assert (repo.root / "Cargo.toml").read_text() == "not committed\n"


def test_a_kept_file_is_updated_and_not_removed(desk: Desk, repo: Repo) -> None:
    """`[[keep]]` refuses the removal of a file; git replaces its content by removing it first."""
    (desk.world.path / "README.md").write_text("mine\n")
    desk.git("commit", "-qam", "[gt-1] Readme")
    mode = (repo.root / "README.md").stat().st_mode
    desk.git("switch", "-q", "-c", "aidlc/z", "HEAD~1")
    assert (repo.root / "README.md").read_text() == "r1\n"
    desk.git("switch", "-q", "aidlc/x")
    assert (repo.root / "README.md").read_text() == "mine\n"
    assert (repo.root / "README.md").stat().st_mode == mode
    assert not [entry for entry in desk.world.entries() if entry.path == "README.md" and entry.result == "denied"]
    with pytest.raises(PermissionError):
        (desk.world.path / "README.md").unlink()


# -- while a grant lasts: processes of the agent beside git


@pytest.fixture
def granted(desk: Desk, repo: Repo) -> Callable[..., int]:
    """Ask for published files as the session's git does; the number of the grant."""

    def ask(*paths: str) -> int:
        files = []
        for path in paths:
            listed = repo.git("ls-tree", "main", path).split()
            mode, oid = (int(listed[0], 8), listed[2]) if listed else (0, "")
            size = int(repo.git("cat-file", "-s", oid)) if oid else -1
            target = repo.git("cat-file", "blob", oid) if mode == 0o120000 else ""
            files.append([path, mode, oid, size, target])
        told = desk.call(
            "git.preflight", subcommand="merge", arguments=["main"], commit=repo.id("main"), head=repo.id(), files=files
        )
        number: int = told["grant"]
        assert number
        return number

    return ask


def test_other_content_is_refused_during_a_grant(desk: Desk, repo: Repo, granted: Callable[..., int]) -> None:
    """For every write of any process, the source has the content before or the published content."""
    number = granted("Cargo.toml", "run.sh", "link")
    path, below = desk.world.path / "Cargo.toml", repo.root / "Cargo.toml"
    early = os.open(path, os.O_RDONLY)
    with pytest.raises(PermissionError):
        path.write_text("mine")
    path.unlink()
    assert not path.exists()
    assert "Cargo.toml" not in os.listdir(desk.world.path)
    assert below.read_text() == "v1\n"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    assert below.read_text() == "v2\n"
    for data, at in ((b"mine", 0), (b"v2\nx", 0), (b"x", 3), (b"V", 0)):
        with pytest.raises(PermissionError):
            os.pwrite(fd, data, at)
    assert os.pwrite(fd, b"v2", 0) == 2
    refused: list[Callable[[], None]] = [
        partial(os.ftruncate, fd, 1),
        partial(os.fchmod, fd, 0o755),
        partial(os.link, path, desk.world.path / "docs/x.md"),
        partial(os.rename, path, desk.world.path / "docs/x.md"),
        partial(os.setxattr, path, "user.x", b"x"),
        path.unlink,
    ]
    for change in refused:
        with pytest.raises(PermissionError):
            change()
    (desk.world.path / "link").unlink()
    with pytest.raises(PermissionError):
        (desk.world.path / "link").symlink_to("/etc")
    assert (repo.root / "link").readlink() == Path("Cargo.toml")
    desk.call("git.finish", grant=number)
    assert (desk.world.path / "link").readlink() == Path("Cargo.toml")
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"v2", 0)
    assert below.read_text() == path.read_text() == "v2\n"
    assert os.pread(early, 9, 0) == b"v1\n"
    os.close(early)
    os.close(fd)
    assert [each["paths"] for each in checkouts(desk.world)] == [["Cargo.toml"]]


def test_a_file_removed_under_a_grant_is_restored(desk: Desk, repo: Repo, granted: Callable[..., int]) -> None:
    number = granted("Cargo.toml", "ci/old.yml")
    (desk.world.path / "Cargo.toml").unlink()
    assert not (desk.world.path / "Cargo.toml").exists()
    desk.call("git.finish", grant=number)
    assert (desk.world.path / "Cargo.toml").read_text() == "v1\n"
    assert (desk.world.path / "ci/old.yml").read_text() == "c1\n"
    with pytest.raises(PermissionError):
        (desk.world.path / "ci/old.yml").unlink()
    assert checkouts(desk.world) == []


def test_a_file_changed_after_the_grant_is_not_replaced(desk: Desk, repo: Repo, granted: Callable[..., int]) -> None:
    """The operator saves the file after the grant, which applies to the earlier file."""
    number = granted("Cargo.toml", "ci/new.yml")
    (repo.root / "Cargo.toml").write_text("saved\n")
    with pytest.raises(PermissionError):
        (desk.world.path / "Cargo.toml").unlink()
    (repo.root / "ci/new.yml").write_text("saved\n")
    with pytest.raises(OSError, match=r"exists|Permission|Stale") as caught:
        os.close(os.open(desk.world.path / "ci/new.yml", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    assert caught.value.errno in (errno.EEXIST, errno.EACCES, errno.ESTALE)
    desk.call("git.finish", grant=number)
    assert (repo.root / "Cargo.toml").read_text() == (repo.root / "ci/new.yml").read_text() == "saved\n"
    assert not list(repo.root.rglob(".bonobofs*"))


def test_a_killed_server_leaves_the_old_or_the_new_content(
    desk: Desk, repo: Repo, granted: Callable[..., int], mounted: Mounted
) -> None:
    granted("Cargo.toml", "run.sh", "large.bin")
    (desk.world.path / "Cargo.toml").unlink()
    fd = os.open(desk.world.path / "run.sh", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    desk.world.kill()
    os.close(fd)
    assert (repo.root / "Cargo.toml").read_text() == "v1\n"
    assert (repo.root / "run.sh").read_text() == "#!/bin/sh\n"
    desk.world.clear()
    again = Desk(mounted(policy=NOTES, mountpoint=desk.world.path))
    again.git("reset", "-q", "--hard", "main")
    assert (repo.root / "large.bin").read_bytes() == LARGE


def test_a_grant_ends_with_the_companion(desk: Desk, repo: Repo, granted: Callable[..., int]) -> None:
    granted("Cargo.toml", "run.sh")
    (desk.world.path / "Cargo.toml").unlink()
    os.close(os.open(desk.world.path / "run.sh", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    os.kill(companion_of(desk.world.pid), signal.SIGKILL)
    until((desk.world.path / "Cargo.toml").exists, "the file is shown again")
    assert (repo.root / "Cargo.toml").read_text() == "v1\n"
    (checkout,) = checkouts(desk.world)
    assert (checkout["paths"], checkout["end"]) == (["run.sh"], "unknown")


def test_a_lease_of_another_agent_is_respected(desk: Desk, repo: Repo, mounted: Mounted) -> None:
    register("bob")
    bob = mounted(policy='default = "allow"\nhidden = ["**"]\n', agent="bob")
    Desk(bob).call("lease.acquire", patterns=["Cargo.toml"])
    told = desk.refused("merge", "main")
    assert (told["path"], told["code"]) == ("Cargo.toml", "E_GIT_LEASED")
    assert (repo.root / "Cargo.toml").read_text() == "v1\n"


def test_invalid_grant_calls_are_refused(desk: Desk) -> None:
    words: dict[str, Any] = {"subcommand": "merge", "arguments": [], "commit": "", "head": ""}
    for files in ([["a"]], [["a", "b", "c", "d", "e"]], [[1, 2, 3, 4, 5]], ["a"]):
        with pytest.raises(Exception, match="files are lists"):
            desk.call("git.preflight", **words, files=files)
    with pytest.raises(Exception, match="needs files"):
        desk.call("git.preflight", **words)
    for path in ("../x", "/etc/passwd", "a//b", ".bonobofs/x"):
        with pytest.raises(Refused):
            desk.call("git.preflight", **words, files=[[path, 0o100644, "0" * 40, 1, ""]])
    desk.call("git.finish", grant=99)
