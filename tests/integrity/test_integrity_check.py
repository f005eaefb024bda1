"""IntegrityCheck finds, records and reverts each difference of a protected directory, and follows no link."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import stat
import subprocess
import sys
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from bonobofs.errors import UsageError
from bonobofs.guards import IntegrityCheck
from bonobofs.integrity import protected_tree
from bonobofs.integrity.protected_tree import IntegrityError
from tests.support.repositories import Repo
from tests.support.world import OrdinaryUser


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "workspace"
    (root / "okrs/q1").mkdir(parents=True)
    (root / "okrs/company.yml").write_text("objective: grow\n")
    (root / "okrs/q1/team.yml").write_text("kr: 1\n")
    (root / "okrs/run.sh").write_text("#!/bin/sh\n")
    (root / "okrs/run.sh").chmod(0o755)
    (root / "okrs/latest").symlink_to("q1/team.yml")
    (root / "src").mkdir()
    return root


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def picture(directory: Path) -> dict[str, tuple[Any, ...]]:
    """Kind, mode, content and time of each path."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in [directory, *directory.rglob("*")]:
        st = path.lstat()
        if path.is_symlink():
            found[str(path)] = ("symlink", os.readlink(path))
        elif path.is_dir():
            found[str(path)] = ("directory", stat.S_IMODE(st.st_mode))
        else:
            found[str(path)] = ("file", stat.S_IMODE(st.st_mode), path.read_bytes(), st.st_mtime_ns)
    return found


def edit(okrs: Path) -> None:
    """Make each kind of change."""
    (okrs / "company.yml").write_text("objective: rest\n")
    (okrs / "q1/team.yml").unlink()
    (okrs / "q1").rmdir()
    (okrs / "run.sh").chmod(0o644)
    (okrs / "latest").unlink()
    (okrs / "latest").mkdir()
    (okrs / "latest/new.yml").write_text("new: 1\n")


def test_an_untouched_directory_has_no_changes(root: Path) -> None:
    check = IntegrityCheck(root)
    (root / "src/app.py").write_text("other directories are free")
    (root / "okrs/company.yml").touch()
    check.capture_after()
    assert not check.has_changes()
    assert check.changes == ()


def test_each_difference_is_found_with_its_hashes(root: Path) -> None:
    check = IntegrityCheck(root)
    edit(root / "okrs")
    check.capture_after()
    assert check.has_changes()
    found = {change.path: change.document() for change in check.changes}
    assert {path: plain["change"] for path, plain in found.items()} == {
        "okrs/company.yml": "changed",
        "okrs/latest": "changed",
        "okrs/latest/new.yml": "added",
        "okrs/q1": "removed",
        "okrs/q1/team.yml": "removed",
        "okrs/run.sh": "changed",
    }
    assert found["okrs/company.yml"] == {
        "path": "okrs/company.yml",
        "change": "changed",
        "before": digest("objective: grow\n"),
        "after": digest("objective: rest\n"),
    }
    assert (found["okrs/latest/new.yml"]["before"], found["okrs/latest/new.yml"]["after"]) == (None, digest("new: 1\n"))
    assert found["okrs/run.sh"]["modes"] == ["0755", "0644"]
    assert found["okrs/latest"]["kinds"] == ["symlink", "directory"]


def test_a_revert_restores_content_mode_time_and_links(root: Path, tmp_path: Path) -> None:
    before = picture(root / "okrs")
    check = IntegrityCheck(root)
    edit(root / "okrs")
    assert check.revert(tmp_path / "kept"), check.revert_error
    assert picture(root / "okrs") == before
    assert (tmp_path / "kept/okrs/company.yml").read_text() == "objective: rest\n"
    assert (tmp_path / "kept/okrs/latest/new.yml").read_text() == "new: 1\n"
    assert check.has_changes()  # what the agent did stays on record
    check.capture_after()
    assert not check.has_changes()


def test_a_replaced_file_is_not_kept_through_a_symlink(root: Path, tmp_path: Path) -> None:
    """An agent that may write the artifacts directory puts a symlink where the revert keeps its files."""
    (outside := tmp_path / "outside").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/okrs").symlink_to(outside)
    check = IntegrityCheck(root)
    edit(root / "okrs")
    assert check.revert(tmp_path / "kept"), check.revert_error
    assert os.listdir(outside) == []
    (kept,) = tmp_path.glob("kept-*")
    assert (kept / "okrs/company.yml").read_text() == "objective: rest\n"


def test_no_artifact_is_written_into_a_protected_directory(root: Path) -> None:
    check = IntegrityCheck(root)
    (root / "okrs/company.yml").write_text("objective: rest\n")
    assert not check.revert(root / "okrs/kept")
    assert "okrs/kept" in check.revert_error
    assert not (root / "okrs/kept").exists()
    assert (root / "okrs/company.yml").read_text() == "objective: rest\n"
    with pytest.raises(UsageError, match="okrs"):
        check.write_violation(root / "okrs")


@pytest.mark.parametrize("made", [True, False])
def test_a_whole_directory_that_appears_or_disappears_is_reverted(root: Path, tmp_path: Path, *, made: bool) -> None:
    if made:
        (root / "okrs").rename(tmp_path / "away")
    check = IntegrityCheck(root)
    if made:
        (tmp_path / "away").rename(root / "okrs")
    else:
        (root / "okrs").rename(tmp_path / "away")
    assert check.has_changes()
    assert check.revert(), check.revert_error
    assert (root / "okrs").exists() is not made


def test_the_violation_has_the_form_of_the_specification(root: Path, tmp_path: Path) -> None:
    check = IntegrityCheck(root)
    (root / "okrs/company.yml").write_text("objective: rest\n")
    check.capture_after()
    check.revert()
    path = check.write_violation(tmp_path / "artifacts/ITEM-1", item_id="ITEM-1")
    assert path == tmp_path / "artifacts/ITEM-1/violation.json"
    violation = json.loads(path.read_text())
    files = violation["details"].pop("files")
    run_id = violation["details"].pop("run_id")
    assert violation == {
        "violation_type": "okrs_direct_edit",
        "details": {
            "message": "Agent directly modified okrs/ directory, which is prohibited by AGENTS.md",
            "changed_files": ["okrs/company.yml"],
            "reverted": True,
            "revert_error": "",
            "item_id": "ITEM-1",
        },
    }
    assert re.fullmatch(r"\d{8}T\d{6}Z", run_id)
    assert files == [check.changes[0].document()]


def test_a_violation_of_the_caller_is_written_as_it_is(root: Path, tmp_path: Path) -> None:
    path = IntegrityCheck(root).write_violation(tmp_path, {"violation_type": "mine", "details": {}})
    assert json.loads(path.read_text()) == {"violation_type": "mine", "details": {}}


def test_a_violation_replaces_a_symlink_instead_of_following_it(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "violation.json").symlink_to(victim)
    IntegrityCheck(root).write_violation(tmp_path)
    assert victim.read_text() == "mine"


def test_other_directories_can_be_protected(root: Path) -> None:
    (root / "docs/plans").mkdir(parents=True)
    check = IntegrityCheck(root, ["docs/plans/", "okrs"])
    (root / "docs/free.md").write_text("not protected")
    (root / "docs/plans/a.md").write_text("x")
    check.capture_after()
    assert [change.path for change in check.changes] == ["docs/plans/a.md"]
    violation = check.violation()
    assert violation["violation_type"] == "protected_direct_edit"
    assert "docs/plans/" in violation["details"]["message"]
    assert check.revert()
    assert not (root / "docs/plans/a.md").exists()


@pytest.mark.parametrize("name", ["/etc", "../x", "okrs/../..", "", ".", "a//b", "a\0b"])
def test_a_directory_outside_the_root_is_a_usage_error(root: Path, name: str) -> None:
    with pytest.raises(UsageError):
        IntegrityCheck(root, [name])


def test_a_missing_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="no-such"):
        IntegrityCheck(tmp_path / "no-such")


def test_a_protected_directory_that_becomes_a_symlink_is_found_and_its_target_untouched(
    root: Path, tmp_path: Path
) -> None:
    before = picture(root / "okrs")
    check = IntegrityCheck(root)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "company.yml").write_text("other")
    (root / "okrs").rename(tmp_path / "away")
    (root / "okrs").symlink_to(outside)
    check.capture_after()
    assert "okrs" in {change.path for change in check.changes}
    assert check.revert(), check.revert_error
    assert (outside / "company.yml").read_text() == "other"
    assert [path.name for path in outside.iterdir()] == ["company.yml"]
    assert picture(root / "okrs") == before


def test_a_parent_that_becomes_a_symlink_is_found_and_not_followed(root: Path, tmp_path: Path) -> None:
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/x").write_text("x")
    check = IntegrityCheck(root, ["a/b"])
    outside = tmp_path / "outside"
    (outside / "b").mkdir(parents=True)
    (outside / "b/x").write_text("theirs")
    (root / "a").rename(tmp_path / "away")
    (root / "a").symlink_to(outside)
    assert check.revert(), check.revert_error
    assert (outside / "b/x").read_text() == "theirs"
    assert (root / "a/b/x").read_text() == "x"
    assert not (root / "a").is_symlink()


def test_fifos_sockets_and_odd_names_are_found_and_removed(root: Path) -> None:
    okrs = root / "okrs"
    check = IntegrityCheck(root)
    os.mkfifo(okrs / "pipe")
    with closing(socket.socket(socket.AF_UNIX)) as end:
        here = os.open(okrs, os.O_PATH)
        end.bind(f"/proc/self/fd/{here}/s")
        os.close(here)
    odd = os.fsencode(okrs) + b"/two\nlines\xff.yml"
    with open(odd, "w") as file:
        file.write("x")
    check.capture_after()
    kinds = {change.path: change.after.kind for change in check.changes if change.after is not None}
    assert kinds == {"okrs/pipe": "fifo", "okrs/s": "socket", os.fsdecode(b"okrs/two\nlines\xff.yml"): "file"}
    text = json.dumps(check.violation())
    assert "\n" not in text
    assert json.loads(text)["details"]["changed_files"][2] == os.fsdecode(b"okrs/two\nlines\xff.yml")
    assert check.revert(), check.revert_error
    assert not os.path.lexists(odd)


def test_a_fifo_that_is_protected_is_not_opened(root: Path) -> None:
    os.mkfifo(root / "okrs/pipe")
    check = IntegrityCheck(root)
    (root / "okrs/pipe").unlink()
    assert check.has_changes()
    assert not check.revert()
    assert "okrs/pipe" in check.revert_error


def test_names_outside_utf_8_survive_a_snapshot(root: Path, tmp_path: Path) -> None:
    odd = os.fsencode(root / "okrs") + b"/\xff\n.yml"
    with open(odd, "wb") as file:
        file.write(b"\xfe")
    IntegrityCheck(root).save(tmp_path / "snapshot")
    os.unlink(odd)
    check = IntegrityCheck.load(tmp_path / "snapshot")
    assert check.has_changes()
    assert check.revert(), check.revert_error
    with open(odd, "rb") as file:
        assert file.read() == b"\xfe"


def test_a_deep_tree_is_found_and_removed(root: Path) -> None:
    check = IntegrityCheck(root)
    here = os.open(root / "okrs", os.O_RDONLY)
    for _ in range(protected_tree.DEEPEST + 1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    check.capture_after()
    assert any(change.after is not None and "levels" in change.after.problem for change in check.changes)
    assert check.revert(), check.revert_error
    assert not (root / "okrs/d").exists()


def test_a_huge_sparse_file_is_found_without_reading_it(root: Path) -> None:
    check = IntegrityCheck(root)
    with open(root / "okrs/company.yml", "r+b") as file:
        file.truncate(1 << 42)
    check.capture_after()
    (change,) = check.changes
    assert "bytes" in change.document()["problem"]
    assert check.revert(), check.revert_error
    assert (root / "okrs/company.yml").read_text() == "objective: grow\n"
    with open(root / "okrs/huge", "wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(IntegrityError, match="huge"):
        IntegrityCheck(root)


def test_a_file_that_another_program_writes_is_read_again_and_never_taken_for_whole(root: Path) -> None:
    """A writer that never stops cannot make the capture hang, nor hide a change."""
    check = IntegrityCheck(root)
    program = "import sys\nwith open(sys.argv[1], 'ab', 0) as file:\n    while True:\n        file.write(b'x' * 4096)\n"
    victim = root / "okrs/company.yml"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", program, victim]) as writer:
        while victim.stat().st_size < 1 << 16:
            pass
        check.capture_after()
        assert check.has_changes()
        writer.kill()
    assert check.revert(), check.revert_error


def test_directories_that_come_and_go_do_not_end_a_capture(root: Path) -> None:
    program = (
        "import os, sys\nos.chdir(sys.argv[1])\nprint('on', flush=True)\n"
        "while True:\n    os.makedirs('a/b/c')\n    open('a/b/c/f', 'w').close()\n"
        "    os.unlink('a/b/c/f')\n    os.removedirs('a/b/c')\n"
    )
    (root / "okrs/live").mkdir()
    (root / "okrs/live/stays").touch()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, root / "okrs/live"], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(100):
            check = IntegrityCheck(root)
            assert "okrs/live/stays" in check.before
            assert check.before["okrs/company.yml"].hash == digest("objective: grow\n")
        writer.kill()


def test_an_unreadable_file_is_an_error_before_and_a_change_after(ordinary_user: OrdinaryUser) -> None:
    program = """
import os, sys
from pathlib import Path
from bonobofs.integrity.integrity_check import IntegrityCheck
from bonobofs.integrity.protected_tree import IntegrityError
root = Path(sys.argv[1])
(root / "okrs/sub").mkdir(parents=True)
(root / "okrs/a").write_text("a")
(root / "okrs/sub/b").write_text("b")
check = IntegrityCheck(root)
(root / "okrs/a").chmod(0)
(root / "okrs/sub/b").write_text("c")
(root / "okrs/sub").chmod(0)
check.capture_after()
assert {change.path for change in check.changes} >= {"okrs/a", "okrs/sub"}
try:
    IntegrityCheck(root)
except IntegrityError as error:
    assert "Permission denied" in str(error), error
else:
    raise AssertionError
assert check.revert(), check.revert_error
assert (root / "okrs/a").read_text() == "a"
assert (root / "okrs/sub/b").read_text() == "b"
"""
    ran = ordinary_user.run(ordinary_user.python, "-c", program, "w")
    assert ran.returncode == 0, ran.stderr


def test_a_file_beyond_what_a_capture_keeps_comes_from_git(root: Path) -> None:
    """A changed index does not matter: the blob is found by its content."""
    repo = Repo(root).init()
    repo.git("add", ".")
    repo.git("commit", "-qm", "Begin")
    check = IntegrityCheck(root, kept=3)
    assert digest("objective: grow\n") not in check.contents
    before = picture(root / "okrs")
    edit(root / "okrs")
    (root / "okrs/latest/new.yml").unlink()
    (root / "okrs/latest").rmdir()
    (root / "okrs/latest").symlink_to("q1/team.yml")
    repo.git("add", ".")
    assert check.revert(), check.revert_error
    assert picture(root / "okrs").keys() == before.keys()
    assert (root / "okrs/company.yml").read_text() == "objective: grow\n"


def test_content_that_is_nowhere_is_an_error_that_says_so(root: Path) -> None:
    check = IntegrityCheck(root, kept=3)
    (root / "okrs/company.yml").write_text("x")
    assert not check.revert()
    assert "backup" in check.revert_error
    assert check.violation()["details"]["reverted"] is False
    assert (root / "okrs/company.yml").read_text() == "x"


@pytest.mark.parametrize("seed", range(20))
def test_random_edits_are_reverted(root: Path, tmp_path: Path, seed: int) -> None:
    """Any sequence of changes leaves the tree as it was, byte by byte, and what its symlinks name untouched."""
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    chance = random.Random(seed)
    okrs = root / "okrs"
    before = picture(okrs)
    check = IntegrityCheck(root)
    for _ in range(chance.randrange(1, 40)):
        places = [okrs, *(path for path in okrs.rglob("*") if path.is_dir() and not path.is_symlink())]
        path = chance.choice(places) / chance.choice(["a", "b", "company.yml", "q1", "latest", "team.yml"])
        kind = chance.randrange(6)
        try:
            if kind == 0 and not path.is_symlink():
                path.write_bytes(chance.randbytes(8))
            elif kind == 1:
                path.mkdir()
            elif kind == 2:
                path.symlink_to(chance.choice(["a", str(outside), ".."]))
            elif kind == 3:
                path.unlink()
            elif kind == 4:
                path.rename(chance.choice(places) / chance.choice(["a", "b", "c"]))
            elif not path.is_symlink():
                path.chmod(chance.choice([0o600, 0o644, 0o755, 0o700]))
        except OSError:
            continue
    assert check.revert(), check.revert_error
    assert picture(okrs) == before
    assert outside.read_text() == "theirs"


_RIVAL = """
import os, resource, sys
from pathlib import Path
from bonobofs.integrity.integrity_check import IntegrityCheck
root, kept = map(Path, sys.argv[1:3])
edit, event, word, act = sys.argv[3:]
os.chdir(root / "okrs")
check = IntegrityCheck(root)
exec(edit)
Path("../other").write_text("theirs")
waits = True
def rival(found, arguments):
    global waits
    if waits and found == event and word in repr(arguments) and (found != "open" or arguments[2] & os.O_EXCL):
        waits = False
        exec(act)
sys.addaudithook(rival)
print(check.revert(kept), check.revert_error)
assert not waits
"""
_CHANGE = "Path('company.yml').write_text('objective: rest')"
_ADD = "Path('new.yml').write_text('new: 10')"
_RELINK = "os.unlink('latest'); os.symlink('run.sh', 'latest')"


def revert_with_rival(root: Path, kept: Path, *program: str) -> str:
    """Revert an edit while another program acts at an audit event of Python. `program`: edit, event, word, act."""
    ran = subprocess.run(
        [sys.executable, "-c", _RIVAL, root, kept, *program], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("edit", "name", "act"),
    [
        (_ADD, "new.yml", "os.rename('../other', 'new.yml')"),
        (_ADD, "new.yml", "Path('new.yml').write_text('theirs')"),
        (_CHANGE, "company.yml", "os.rename('../other', 'company.yml')"),
        (_CHANGE, "company.yml", "Path('company.yml').write_text('theirs')"),
    ],
)
def test_a_file_that_another_program_changes_after_its_copy_stays(
    root: Path, tmp_path: Path, edit: str, name: str, act: str
) -> None:
    output = revert_with_rival(root, tmp_path / "kept", edit, "open", repr(name), act)
    assert output == f"False okrs/{name}: another program changed the file during the revert; revert again\n"
    assert (root / "okrs" / name).read_text() == "theirs"
    assert not list(root.rglob(".integrity-*"))


@pytest.mark.parametrize(
    ("edit", "event", "word", "act", "name"),
    [
        (_RELINK, "os.symlink", ".integrity-", "os.rename('../other', 'latest')", "latest"),
        ("os.unlink('company.yml')", "open", ".integrity-", "os.rename('../other', 'company.yml')", "company.yml"),
        (_ADD, "os.remove", "", "Path('new.yml').write_text('theirs')", "new.yml"),
    ],
)
def test_a_file_that_takes_the_place_of_a_change_is_kept(
    root: Path, tmp_path: Path, edit: str, event: str, word: str, act: str, name: str
) -> None:
    """It takes the place of a symlink or of a removed file, or has the name of a file that was reverted before."""
    before = picture(root / "okrs")
    assert revert_with_rival(root, tmp_path / "kept", edit, event, word, act) == "True \n"
    assert picture(root / "okrs") == before
    assert "theirs" in [path.read_text() for path in tmp_path.glob(f"kept*/okrs/{name}")]


def test_a_directory_that_takes_the_name_of_a_file_is_not_lost(root: Path, tmp_path: Path) -> None:
    act = "os.unlink('new.yml'); os.mkdir('new.yml'); Path('new.yml/a').write_text('theirs')"
    assert "False okrs/new.yml: " in revert_with_rival(root, tmp_path / "kept", _ADD, "open", "'new.yml'", act)
    assert (root / "okrs/new.yml/a").read_text() == "theirs"


def test_a_file_whose_copy_fails_is_not_reverted(root: Path, tmp_path: Path) -> None:
    edit = "Path('company.yml').write_text('x' * 5000)"
    full = "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    output = revert_with_rival(root, tmp_path / "kept", edit, "open", "'company.yml'", full)
    assert "False okrs/company.yml: File too large" in output
    assert (root / "okrs/company.yml").read_text() == "x" * 5000


def test_a_revert_that_is_killed_at_any_step_can_be_done_again(root: Path, tmp_path: Path) -> None:
    """The snapshot stays until the revert is complete, so the next revert completes it."""
    before = picture(root / "okrs")
    IntegrityCheck(root).save(tmp_path / "snapshot")
    program = """
import os, signal, sys
from pathlib import Path
from bonobofs.integrity.integrity_check import IntegrityCheck
from bonobofs.system import syscalls
left, rename = int(sys.argv[2]), syscalls.renameat2
def renameat2(*arguments):
    count("renameat2", arguments)
    rename(*arguments)
syscalls.renameat2 = renameat2
def count(event, arguments):
    global left
    if event in ("renameat2", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.symlink") or (
        event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    ):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
check = IntegrityCheck.load(Path(sys.argv[1]))
sys.addaudithook(count)
assert check.revert(), check.revert_error
"""
    step, code = 0, -9
    while code == -9:
        edit(root / "okrs")
        code = subprocess.run([sys.executable, "-c", program, tmp_path / "snapshot", str(step)], check=False).returncode
        assert code in (0, -9)
        check = IntegrityCheck.load(tmp_path / "snapshot")
        assert check.revert(), check.revert_error
        assert picture(root / "okrs") == before
        step += 1
    assert step > 5


def test_root_returns_a_removed_directory_to_its_owner(root: Path) -> None:
    for path in (root / "okrs/q1", root / "okrs/q1/team.yml"):
        os.chown(path, 65534, 65533)
    check = IntegrityCheck(root)
    check.capture_before()
    shutil.rmtree(root / "okrs/q1")
    check.capture_after()
    check.revert()
    for path in (root / "okrs/q1", root / "okrs/q1/team.yml"):
        assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65533)
