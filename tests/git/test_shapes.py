"""Repositories of every shape work, or are refused in clear words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bonobofs.decision import Code, Refused
from bonobofs.errors import GitError
from tests.git.conftest import ENVIRONMENT, FREE, Gate, Gated, Repo
from tests.worlds import NOBODY


def refused(gate: Gate, repo: Repo) -> str:
    """Why the gate does not work here; the refusal is entered, and nothing is changed."""
    alice = gate(repo)
    with pytest.raises(GitError) as caught:
        alice.gate.create_branch("aidlc/x", "HEAD")
    assert caught.value.kind in ("unsupported", "no-repository")
    return str(caught.value)


def test_an_empty_repository_gets_its_first_commit(tmp_path: Path, gated: Gate) -> None:
    """On a branch that may be committed to, an unborn one is born."""
    root = tmp_path / "empty"
    root.mkdir()
    repo = Repo(root)
    repo.git("init", "-q", "-b", "aidlc/first")
    alice = gated(repo)
    repo.write("docs/plan.md", "The plan\n")
    assert alice.guard.get_status("alice").untracked == ["docs/plan.md"]
    made = alice.gate.commit("[gt-1] First", ["docs/plan.md"], only=True)
    assert (made.hash, made.parents) == (repo.head(), ())
    assert repo.status() == ""
    assert repo.git("reflog", "--format=%gs") == "commit (initial): [gt-1] First\n"
    repo.check()


def test_an_empty_repository_on_main_is_the_operators(tmp_path: Path, gated: Gate) -> None:
    """Main stays protected before it has a commit, and no branch can be made of nothing."""
    root = tmp_path / "empty"
    root.mkdir()
    repo = Repo(root)
    repo.git("init", "-q", "-b", "main")
    alice = gated(repo)
    repo.write("docs/plan.md", "The plan\n")
    assert not alice.guard.commit("First", ["docs/plan.md"], "alice", "gt-1")
    assert not alice.guard.create_branch("aidlc/x", "alice")


def test_a_detached_head_is_moved_itself(alice: Gated) -> None:
    """Commits and resets work where HEAD is on no branch, and no branch moves."""
    alice.git("checkout", "-q", "--detach")
    before = alice.git("for-each-ref")
    alice.write("docs/plan.md", "Changed\n")
    made = alice.gate.commit("[gt-1] Change", ["docs/plan.md"])
    assert (alice.head(), made.branch) == (made.hash, "")
    assert alice.gate.merge("main").up_to_date
    alice.gate.reset("main", "hard")
    assert alice.head() == alice.head("main")
    assert alice.git("for-each-ref") == before
    assert alice.gate.switch("aidlc/work").previous == ""
    alice.check()


def test_a_worktree_of_git_is_guarded_as_its_own(repo: Repo, gated: Gate, tmp_path: Path) -> None:
    """Where `.git` is a file, the gate works on that worktree's HEAD and index, and leaves the others alone."""
    repo.git("worktree", "add", "-q", "-b", "aidlc/wt", str(tmp_path / "wt"))
    repo.git("branch", "aidlc/free")
    worktree = Repo(tmp_path / "wt")
    alice = gated(worktree)
    worktree.write("docs/plan.md", "Changed\n")
    made = alice.gate.commit("[gt-1] Change", ["docs/plan.md"])
    assert repo.head("aidlc/wt") == made.hash
    assert (worktree.status(), repo.status()) == ("", "")
    with pytest.raises(GitError, match="checked out"):
        alice.gate.switch("main")
    with pytest.raises(Refused):
        alice.gate.merge("aidlc/wt", target="main")
    alice.gate.switch("aidlc/free")
    assert worktree.status() == ""
    repo.check()
    operator = gated(repo, agent="bob")
    with pytest.raises(GitError, match="checked out"):
        operator.gate.delete_branch("aidlc/free", force=True)


def test_a_git_file_that_leads_astray_is_refused(repo: Repo, gated: Gate, tmp_path: Path) -> None:
    """`.git` may lead to no repository inside the working tree, and to no worktree that does not lead back."""
    repo.git("worktree", "add", "-q", "-b", "aidlc/wt", str(tmp_path / "wt"))
    astray = tmp_path / "astray"
    astray.mkdir()
    (astray / ".git").write_text((tmp_path / "wt/.git").read_text())
    assert "do not name each other" in refused(gated, Repo(astray))
    inside = tmp_path / "inside"
    inside.mkdir()
    Repo(inside).git("init", "-q", "--separate-git-dir", str(inside / "docs"))
    assert "in its own working tree" in refused(gated, Repo(inside))
    link = tmp_path / "link"
    link.mkdir()
    (link / ".git").symlink_to(repo.root / ".git")
    assert "symlink" in refused(gated, Repo(link))
    (tmp_path / "none").mkdir()
    assert "not the top of a git repository" in refused(gated, Repo(tmp_path / "none"))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/.git").write_text("gitdir: /nowhere\n")
    assert "is not there" in refused(gated, Repo(tmp_path / "torn"))


@pytest.mark.parametrize("part", ["refs", "objects", "HEAD", "index", "packed-refs", "logs", "config"])
def test_a_part_that_is_a_symlink_is_not_followed(repo: Repo, gated: Gate, tmp_path: Path, part: str) -> None:
    """Nothing is written by way of a symlink in the repository."""
    repo.git("pack-refs", "--all")
    elsewhere = tmp_path / "elsewhere"
    (repo.root / ".git" / part).rename(elsewhere)
    (repo.root / ".git" / part).symlink_to(elsewhere)
    assert "symlink" in refused(gated, repo)


@pytest.mark.parametrize("part", ["refs/heads/aidlc", "refs/heads", "logs/refs"])
def test_no_ref_is_moved_by_way_of_a_symlink(alice: Gated, tmp_path: Path, part: str) -> None:
    """A directory of refs or reflogs that is a symlink leads no change out of the repository."""
    elsewhere = tmp_path / "elsewhere"
    (alice.root / ".git" / part).rename(elsewhere)
    (alice.root / ".git" / part).symlink_to(elsewhere)
    before = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    alice.write("docs/plan.md", "Changed\n")
    for attempt in (
        lambda: alice.gate.commit("[gt-1] x", ["docs/plan.md"]),
        lambda: alice.gate.create_branch("aidlc/x"),
    ):
        with pytest.raises(GitError, match="symlink"):
            attempt()
    assert {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} == before


def test_what_is_not_known_is_refused_by_name(repo: Repo, gated: Gate, tmp_path: Path) -> None:
    """SHA-256, reftables, partial clones, bare repositories and split indexes are told apart."""
    other = tmp_path / "sha256"
    other.mkdir()
    Repo(other).git("init", "-q", "--object-format=sha256")
    assert "SHA-1 alone" in refused(gated, Repo(other))
    for key, value, word in (
        ("extensions.refStorage", "reftable", "reftable"),
        ("extensions.partialClone", "origin", "partial clone"),
        ("core.bare", "true", "bare"),
    ):
        copy = repo.copy(tmp_path / word.split()[0])
        copy.git("config", "core.repositoryFormatVersion", "1")
        copy.git("config", key, value)
        assert word in refused(gated, copy)
    repo.git("update-index", "--split-index")
    repo.git("checkout", "-q", "-b", "aidlc/work")
    repo.write("docs/plan.md", "Changed\n")
    with pytest.raises(GitError, match="split"):
        gated(repo).gate.commit("[gt-1] x", ["docs/plan.md"])


def test_a_sparse_checkout_stays_sparse(alice: Gated) -> None:
    """Files that sparse checkout leaves out are neither missed nor brought back."""
    alice.commit("More", other__a_md="a\n", docs__b_md="b\n")
    alice.git("branch", "aidlc/other")
    alice.git("checkout", "-q", "aidlc/other")
    alice.commit("Change", other__a_md="changed\n", docs__b_md="changed\n")
    alice.git("checkout", "-q", "aidlc/work")
    alice.git("sparse-checkout", "set", "--no-cone", "docs/")
    assert not (alice.root / "other").exists()
    alice.gate.merge("aidlc/other")
    assert not (alice.root / "other").exists()
    assert (alice.root / "docs/b.md").read_text() == "changed\n"
    assert alice.status() == ""
    alice.check()


def test_symlinks_and_modes_are_kept(alice: Gated) -> None:
    """A symlink is committed and checked out as one, and so is an executable bit; neither is followed."""
    alice.write("run.sh", "echo\n", mode=0o755)
    (alice.root / "link").symlink_to("docs/plan.md")
    alice.gate.commit("[gt-1] Kinds", ["run.sh", "link"])
    assert [line.split()[0] for line in alice.staged().splitlines()] == ["100644", "120000", "100755"]
    alice.git("branch", "aidlc/other", "main")
    alice.gate.switch("aidlc/other")
    assert not (alice.root / "link").is_symlink()
    alice.gate.switch("aidlc/work")
    assert os.readlink(alice.root / "link") == "docs/plan.md"
    assert (alice.root / "run.sh").stat().st_mode & 0o777 == 0o755 & ~_umask()
    (alice.root / "run.sh").chmod(0o644)
    alice.gate.commit("[gt-1] Mode", ["run.sh"])
    (alice.root / "link").unlink()
    alice.write("link", "now a file\n")
    alice.gate.commit("[gt-1] File", ["link"])
    assert {line.split()[0] for line in alice.staged().splitlines()} == {"100644"}
    assert alice.status() == ""
    alice.check()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_symlink_on_the_way_is_not_followed(alice: Gated, tmp_path: Path) -> None:
    """A file behind a symlinked directory is committed under no name, and nothing is written behind it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/a.md").write_text("outside\n")
    alice.commit("More", dir__a_md="a\n")
    alice.git("checkout", "-q", "-b", "aidlc/other")
    alice.commit("Change", dir__a_md="changed\n")
    alice.git("checkout", "-q", "aidlc/work")
    (alice.root / "dir/a.md").unlink()
    (alice.root / "dir").rmdir()
    (alice.root / "dir").symlink_to(tmp_path / "outside")
    for attempt in (lambda: alice.gate.switch("aidlc/other"), lambda: alice.gate.reset("aidlc/other", "hard")):
        with pytest.raises((GitError, Refused, OSError)):
            attempt()
    assert (tmp_path / "outside/a.md").read_text() == "outside\n"
    made = alice.gate.commit("[gt-1] Gone", ["dir/a.md"])
    assert made.files == ("dir/a.md",)
    assert alice.git("ls-tree", "-r", "--name-only", "HEAD") == "docs/plan.md\n"


@pytest.mark.parametrize(
    ("attributes", "config"),
    [
        ("*.txt text eol=crlf\n", {}),
        ("*.txt text=auto eol=lf\n", {}),
        ("*.txt text\n", {"core.autocrlf": "true"}),
        ("*.txt -text\n", {"core.autocrlf": "true"}),
        ("", {"core.autocrlf": "input"}),
        ("", {"core.autocrlf": "true"}),
        ("*.txt ident\n", {}),
        ("*.txt binary\n", {"core.autocrlf": "true"}),
    ],
)
def test_line_ends_are_those_of_git(
    repo: Repo, gated: Gate, tmp_path: Path, attributes: str, config: dict[str, str]
) -> None:
    """Blobs and files are what git makes of them under these attributes, and status is clean for both."""
    repo.git("checkout", "-q", "-b", "aidlc/work")
    repo.write(".gitattributes", attributes)
    repo.commit("Attributes")
    for key, value in config.items():
        repo.git("config", key, value)
    twin = repo.copy(tmp_path / "twin")
    contents = {"lf.txt": "a\nb\n", "crlf.txt": "a\r\nb\r\n", "mixed.txt": "a\r\nb\n$Id$\n", "nul.txt": "a\r\n\0\n"}
    for world in (repo, twin):
        for name, content in contents.items():
            world.write(name, content)
    alice = gated(repo)
    alice.gate.commit("[gt-1] Files", list(contents))
    twin.git("add", "-A")
    twin.git("commit", "-qm", "Files")
    assert repo.tree() == twin.tree()
    assert repo.status() == ""
    repo.git("branch", "aidlc/old", "main")
    alice.gate.switch("aidlc/old")
    alice.gate.switch("aidlc/work")
    twin.git("checkout", "-q", "main")
    twin.git("checkout", "-q", "aidlc/work")
    assert repo.files() == twin.files()
    assert repo.status() == ""
    repo.check()


def test_submodules_are_left_as_they_are(alice: Gated, tmp_path: Path) -> None:
    """What has a submodule can be committed to and merged; which commit it is at, only the operator changes."""
    inner = tmp_path / "inner"
    inner.mkdir()
    module = Repo(inner)
    module.git("init", "-q", "-b", "main")
    module.commit("One", a_txt="a\n")
    alice.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "sub")
    alice.git("commit", "-qm", "Submodule")
    alice.git("checkout", "-q", "-b", "aidlc/bump")
    Repo(alice.root / "sub").commit("Two", a_txt="b\n")
    alice.git("commit", "-qam", "Bump")
    alice.git("checkout", "-q", "aidlc/work")
    alice.git("submodule", "--quiet", "update")
    alice.write("docs/plan.md", "Changed\n")
    assert alice.gate.commit("[gt-1] Change", ["docs/plan.md"]).files == ("docs/plan.md",)
    assert alice.status() == ""
    for attempt in (lambda: alice.gate.merge("aidlc/bump"), lambda: alice.gate.switch("aidlc/bump")):
        with pytest.raises(Refused) as caught:
            attempt()
        assert (caught.value.decision.code, caught.value.decision.rule) == (Code.GIT, "git.submodule")
    alice.git("-C", "sub", "checkout", "-q", "HEAD")
    with pytest.raises(Refused):
        alice.gate.commit("[gt-1] Bump", ["sub"])
    assert alice.gate.reset("HEAD", "hard") == alice.head()
    assert (alice.root / "sub/a.txt").exists()


def test_names_that_are_no_text_are_kept(alice: Gated) -> None:
    """A name that is not UTF-8, or holds a newline, is committed and checked out byte for byte."""
    names = [b"docs/\xff\xfe.md", b"docs/new\nline.md", "docs/\u00e4\u6f22.md".encode(), b'docs/tab\t"quote\\.md']
    for name in names:
        Path(os.fsdecode(os.fsencode(alice.root) + b"/" + name)).write_text("x")
    alice.gate.commit("[gt-1] Names", [os.fsdecode(name) for name in names])
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "-z", "--name-only", "HEAD"],
        cwd=alice.root,
        env=ENVIRONMENT,
        capture_output=True,
        check=True,
    ).stdout
    assert set(names) < set(listed.split(b"\0"))
    assert alice.status() == ""
    alice.git("branch", "aidlc/old", "main")
    alice.gate.switch("aidlc/old")
    alice.gate.switch("aidlc/work")
    assert alice.status() == ""
    assert alice.gate.status().clean
    alice.check()


def test_a_packed_repository_works(alice: Gated) -> None:
    """Packed objects and refs are read; packed branches are moved, renamed and removed."""
    for number in range(5):
        alice.commit(f"Commit {number}", docs__plan_md=f"{number}\n")
    alice.git("branch", "aidlc/old")
    alice.git("gc", "-q")
    alice.write("docs/plan.md", "Changed\n")
    alice.gate.commit("[gt-1] Change", ["docs/plan.md"])
    alice.gate.rename_branch("aidlc/old", "aidlc/new/name")
    assert alice.git("for-each-ref", "--format=%(refname)").split() == [
        "refs/heads/aidlc/new/name",
        "refs/heads/aidlc/work",
        "refs/heads/main",
    ]
    alice.gate.delete_branch("aidlc/new/name", force=True)
    assert "aidlc/new" not in alice.git("for-each-ref")
    assert not (alice.root / ".git/refs/heads/aidlc/new").exists()
    alice.check()


def test_free_is_what_it_says(alice: Gated) -> None:
    """The policy of these tests keeps `.git` closed."""
    assert "**/.git/" in FREE
    with pytest.raises(Refused) as caught:
        alice.gate.commit("[gt-1] x", [".git/config"])
    assert caught.value.decision.code is Code.PROTECTED


@pytest.mark.root
def test_what_root_makes_belongs_to_the_owner(alice: Gated) -> None:
    """A service that runs as root leaves nothing in another user's repository that this user could not go on with."""
    alice.git("checkout", "-q", "-b", "aidlc/other")
    alice.commit("More", new__dir__a_md="a\n")
    alice.git("checkout", "-q", "aidlc/work")
    subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", alice.root], check=True)
    alice.write("docs/plan.md", "Changed\n")
    alice.gate.commit("[gt-1] Change", ["docs/plan.md"])
    alice.gate.merge("aidlc/other")
    alice.gate.create_branch("aidlc/deep/er")
    alice.gate.tag("v1", message="Version")
    alice.gate.rename_branch("aidlc/deep/er", "aidlc/name")
    alice.write("docs/plan.md", "Aside\n")
    alice.gate.stash_push()
    alice.gate.stash_apply(drop=True)
    with pytest.raises(Refused):
        alice.gate.commit("no issue", ["docs/plan.md"])
    alice.write(".git/refs/heads/main.lock", "")
    with pytest.raises(GitError):
        alice.gate.commit("[gt-1] Nothing", ["docs/none.md"])
    (alice.root / ".git/refs/heads/main.lock").unlink()
    others = [str(path) for path in alice.root.rglob("*") if path.lstat().st_uid != NOBODY]
    assert others == []
