"""Path resolution: symlinks, swapped directories and every spelling of a path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.files.workspace import Workspace
from bonobofs.guards import ValidationResult
from bonobofs.policy.decision import Code
from tests.files.conftest import Guarded, Opened, Program
from tests.support.world import ROOT


def code_of(result: object) -> Code | None:
    assert isinstance(result, ValidationResult)
    assert not result.allowed
    return result.code


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.mkdir()
    (path / "secret.md").write_text("secret")
    return path


def test_a_path_is_relative_to_the_workspace_or_absolute_in_it(alice: Guarded, tmp_path: Path) -> None:
    """This holds for every working directory, and through a symlink to the workspace."""
    link = tmp_path / "link"
    link.symlink_to(alice.root)
    names: list[str | Path] = [
        "aidlc-docs/0.md",
        alice.root / "aidlc-docs/1.md",
        link / "aidlc-docs/2.md",
        f"/{alice.root}/aidlc-docs/3.md",
        f"/proc/self/root{alice.root}/aidlc-docs/4.md",
    ]
    for number, named in enumerate(names):
        assert alice.files.write_file(named, "a", "alice") == alice.root / f"aidlc-docs/{number}.md"
    assert code_of(alice.files.write_file(f"{alice.root}-evil/aidlc-docs/a.md", "a", "alice")) == Code.OUTSIDE
    assert code_of(alice.files.write_file(f"{alice.root}/../a.md", "a", "alice")) == Code.OUTSIDE
    assert code_of(alice.files.write_file(alice.root, "a", "alice")) == Code.OUTSIDE


def test_a_session_may_be_opened_through_a_symlink(opened: Opened, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    world = opened(workspace=tmp_path / "link")
    assert world.files.write_file(tmp_path / "link/aidlc-docs/a.md", "a", "alice") == source / "aidlc-docs/a.md"


def test_a_symlink_that_leads_out_is_refused_with_an_alert(alice: Guarded, outside: Path) -> None:
    docs = alice.root / "aidlc-docs"
    docs.mkdir()
    (docs / "absolute.md").symlink_to(outside / "secret.md")
    (docs / "relative.md").symlink_to("../../outside/secret.md")
    (docs / "new.md").symlink_to(outside / "new.md")
    (docs / "directory").symlink_to(outside)
    (docs / "above").symlink_to("../..")
    (docs / "proc").symlink_to("/proc/self/root")
    (docs / "twice.md").symlink_to("absolute.md")
    for below in (
        "absolute.md",
        "relative.md",
        "new.md",
        "twice.md",
        "directory/secret.md",
        "directory/none/a.md",
        "above/outside/secret.md",
        f"proc{outside}/secret.md",
    ):
        path = f"aidlc-docs/{below}"
        assert code_of(alice.files.validate_path(path)) == Code.OUTSIDE
        assert code_of(alice.files.write_file(path, "changed", "alice", overwrite=True)) == Code.OUTSIDE
        assert (alice.of(path)[0].code, alice.of(path)[1].kind) == (Code.OUTSIDE, "alert")
    assert code_of(alice.files.delete_file("aidlc-docs/directory/secret.md", "alice")) == Code.OUTSIDE
    assert os.listdir(outside) == ["secret.md"]
    assert (outside / "secret.md").read_text() == "secret"


def test_a_symlink_inside_is_followed_and_its_target_is_judged(alice: Guarded) -> None:
    """As in a mount, the path of the file counts and not the name in the request."""
    for name in ("aidlc-docs", "orchestrator", ".git", "src"):
        (alice.root / name).mkdir()
    docs, code = alice.root / "aidlc-docs", alice.root / "orchestrator"
    (docs / "code").symlink_to("../orchestrator")
    (docs / "git").symlink_to("../.git")
    (docs / "src").symlink_to("../src")
    (alice.root / "src/pages").symlink_to("../aidlc-docs")
    write = alice.files.write_file
    assert code_of(write("aidlc-docs/code/a.md", "a", "alice")) == Code.SUFFIX
    assert write("aidlc-docs/code/new/a.py", "a", "alice") == code / "new/a.py"
    assert write("src/pages/a.md", "a", "alice") == docs / "a.md"
    assert code_of(write("aidlc-docs/git/a.md", "a", "alice")) == Code.PROTECTED
    assert code_of(write("aidlc-docs/src/a.md", "a", "alice")) == Code.DEFAULT
    assert alice.of("orchestrator/new/a.py")[0].result == "allowed"
    assert alice.of(".git/a.md")[0].code == Code.PROTECTED


def test_a_write_follows_a_symlink_and_a_deletion_removes_it(alice: Guarded) -> None:
    file = alice.files.guarded_write_file("aidlc-docs/units/a.md", "old", "alice")
    link = alice.root / "aidlc-docs/current.md"
    link.symlink_to("units/a.md")
    with pytest.raises(FileExistsError):
        alice.files.write_file("aidlc-docs/current.md", "new", "alice")
    assert alice.files.write_file("aidlc-docs/current.md", "new", "alice", overwrite=True) == file
    assert (file.read_text(), link.is_symlink()) == ("new", True)
    assert alice.files.delete_file("aidlc-docs/current.md", "alice") is None
    assert (file.read_text(), os.path.lexists(link)) == ("new", False)


def test_a_dangling_symlink_is_neither_written_nor_replaced(alice: Guarded) -> None:
    docs = alice.root / "aidlc-docs"
    docs.mkdir()
    (docs / "none.md").symlink_to("later.md")
    (docs / "round.md").symlink_to("round.md")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError):
            alice.files.write_file("aidlc-docs/none.md", "a", "alice", overwrite=overwrite)
    with pytest.raises(OSError, match="Too many levels"):
        alice.files.write_file("aidlc-docs/round.md", "a", "alice", overwrite=True)
    with pytest.raises(OSError, match=r"Too many levels|Not a directory"):
        alice.files.write_file("aidlc-docs/none.md/a.md", "a", "alice")
    assert alice.names() == ["aidlc-docs", "aidlc-docs/none.md", "aidlc-docs/round.md"]
    assert alice.files.delete_file("aidlc-docs/none.md", "alice") is None


def test_a_directory_moved_out_is_not_written(alice: Guarded, outside: Path) -> None:
    """The open descriptor still leads to it. The judged path does not."""
    alice.files.guarded_write_file("aidlc-docs/a.md", "a", "alice")
    workspace = Workspace(alice.root)
    place = workspace.locate(workspace.relative("aidlc-docs/b.md"), follow=True)
    assert place is not None
    with place:
        place.check()
        (alice.root / "aidlc-docs").rename(outside / "aidlc-docs")
        with pytest.raises(OSError, match="No such file"):
            place.check()
        (alice.root / "aidlc-docs").mkdir()
        with pytest.raises(OSError, match="Stale"):
            place.check()
        (alice.root / "aidlc-docs").rmdir()
        (alice.root / "aidlc-docs").symlink_to(outside / "aidlc-docs")
        with pytest.raises(OSError, match="Too many levels"):
            place.check()


@pytest.mark.parametrize("put_back", ["nothing", "a directory", "a symlink"])
@pytest.mark.parametrize("change", ["create", "overwrite", "delete", "mkdir"])
def test_a_directory_moved_out_between_permit_and_change_is_unchanged(
    alice: Guarded, outside: Path, monkeypatch: pytest.MonkeyPatch, change: str, put_back: str
) -> None:
    """The change has its permit and its intent, and is not yet made."""
    docs, moved = alice.root / "aidlc-docs", outside / "docs"
    alice.files.guarded_write_file(docs / "a.md", "a", "alice")
    trail = alice.session.guard.trail
    intent = trail.intent

    def enter(*arguments: str, **details: Any) -> int:
        seq = intent(*arguments, **details)
        docs.rename(moved)
        if put_back == "a directory":
            docs.mkdir()
            (docs / "a.md").write_text("b")
        elif put_back == "a symlink":
            docs.symlink_to(moved)
        return seq

    monkeypatch.setattr(trail, "intent", enter)
    changes: dict[str, Callable[[], object]] = {
        "create": lambda: alice.files.write_file(docs / "b.md", "changed", "alice"),
        "overwrite": lambda: alice.files.write_file(docs / "a.md", "changed", "alice", overwrite=True),
        "delete": lambda: alice.files.delete_file(docs / "a.md", "alice"),
        "mkdir": lambda: alice.files.write_file(docs / "new/a.md", "changed", "alice"),
    }
    with pytest.raises(OSError, match=r"Stale|No such file|Too many levels"):
        changes[change]()
    assert [(path.name, path.read_text()) for path in moved.iterdir()] == [("a.md", "a")]
    if put_back == "a directory":
        assert [(path.name, path.read_text()) for path in docs.iterdir()] == [("a.md", "b")]
    assert alice.entries()[-1].result == "error"


def test_a_directory_replaced_during_the_lookup_is_detected(alice: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is read from a descriptor. By then another directory may have that path."""
    docs = alice.root / "aidlc-docs"
    docs.mkdir()
    readlink = os.readlink

    def replace_after(link: str) -> str:
        there = readlink(link)
        if there == str(docs):
            docs.rename(alice.root / "elsewhere")
            docs.mkdir()
        return there

    monkeypatch.setattr(os, "readlink", replace_after)
    with pytest.raises(OSError, match="Stale"):
        alice.files.write_file("aidlc-docs/a.md", "a", "alice")
    assert alice.names() == ["aidlc-docs", "elsewhere"]


SWAPPER = """
import sys
from contextlib import suppress
from tests.support.syscalls import renameat2
print("ready", flush=True)
while True:
    for one, other in zip(sys.argv[1::2], sys.argv[2::2]):
        with suppress(FileNotFoundError):
            renameat2(one, other, 2)
"""


def test_a_swapped_directory_or_file_never_leads_outside(alice: Guarded, outside: Path) -> None:
    """Another program exchanges a directory, and a file, with a symlink to the outside in a loop, while both are
    written and deleted.
    """
    docs = alice.root / "aidlc-docs"
    (docs / "units").mkdir(parents=True)
    (docs / "trap").symlink_to(outside)
    (docs / "a.md").write_text("a")
    (docs / "b.md").symlink_to(outside / "secret.md")
    swapped = ("units", "trap", "a.md", "b.md")
    swapper = subprocess.Popen(
        [sys.executable, "-c", SWAPPER, *(docs / name for name in swapped)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    results = {"written": 0, "refused": 0, "failed": 0}
    try:
        assert swapper.stdout is not None
        assert swapper.stdout.readline() == "ready\n"
        for number in range(300):
            for path in (f"aidlc-docs/units/{number}.md", "aidlc-docs/a.md"):
                try:
                    written = alice.files.write_file(path, "inside", "alice", overwrite=True)
                    results["written" if isinstance(written, Path) else "refused"] += 1
                except OSError:
                    results["failed"] += 1
            with suppress(OSError):
                alice.files.delete_file("aidlc-docs/units/secret.md", "alice")
        assert swapper.poll() is None
    finally:
        swapper.kill()
        swapper.communicate()
    assert os.listdir(outside) == ["secret.md"]
    assert (outside / "secret.md").read_text() == "secret"
    assert results["written"], "nothing was tried"
    assert results["refused"] + results["failed"], "the swapper did not meet the writer"
    assert not [name for name in alice.names() if ".bonobofs-" in name]


def test_a_mount_in_the_workspace_is_not_entered(program: Program, source: Path) -> None:
    """As root, in a mount namespace that ends with the program."""
    if os.geteuid() != 0:
        return
    (source / "aidlc-docs/mounted").mkdir(parents=True)
    said = program(
        """
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "none", sys.argv[1] + "/aidlc-docs/mounted"], check=True)
with open_session(sys.argv[1], agent="alice") as session:
    for change in ("write_file", "delete_file"):
        try:
            arguments = ("a", "alice") if change == "write_file" else ("alice",)
            print(getattr(FileGuard(session), change)("aidlc-docs/mounted/a.md", *arguments))
        except OSError as error:
            print(error.strerror)
    print(os.listdir(sys.argv[1] + "/aidlc-docs/mounted"))
""",
        source,
        before=("unshare", "--mount"),
    )
    assert said.splitlines() == ["Invalid cross-device link"] * 2 + ["[]"]


def test_no_path_text_changes_a_file_outside(alice: Guarded, tmp_path: Path) -> None:
    """Any text as a path: the file is written as the policy allows, or refused, or the file system returns an error."""
    piece = st.one_of(
        st.sampled_from(["..", ".", "", "aidlc-docs", "a.md", ".git", "link", "out", str(alice.root), "~", "%2e%2e"]),
        st.text(max_size=5),
    )
    (alice.root / "aidlc-docs").mkdir()
    (alice.root / "link").symlink_to("aidlc-docs")
    (alice.root / "out").symlink_to("..")
    own = {alice.root, tmp_path / "home"}
    before = sorted(path for path in tmp_path.rglob("*") if not own & {*path.parents})

    @settings(max_examples=150, deadline=None)
    @given(st.lists(piece, min_size=1, max_size=5).map("/".join))
    def attempt(path: str) -> None:
        try:
            written = alice.files.write_file(path, "a", "alice", overwrite=True)
        except OSError:
            return
        if isinstance(written, Path):
            assert alice.root / "aidlc-docs" in written.parents
            assert written.suffix == ".md"
            assert alice.files.validate_path(path).allowed

    attempt()
    assert sorted(path for path in tmp_path.rglob("*") if not own & {*path.parents}) == before
    assert {path.suffix for path in alice.root.rglob("*") if path.is_file()} <= {".md"}
