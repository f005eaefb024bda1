"""Failures of the undo of other tools, each as a story that must not happen here.

Elsewhere in this directory: edits by a shell, ignored and untracked files, work of another session, and the undo of an
undo (`test_undo.py`); moves of directories (`test_random_undo.py`).
"""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bonobofs.errors import StateError
from tests.support.commands import bonobofs, environment
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.observe import out_of_band
from tests.support.repositories import Repo
from tests.support.source_state import state_of, undo
from tests.support.tracing import traced
from tests.support.users import outcome
from tests.support.wait import until
from tests.support.world import ALLOW_ALL


def _repository(tmp_path: Path) -> Repo:
    repo = Repo(tmp_path / "source").init()
    repo.commit("[gt-0] The beginning", {"a.md": "a\n", "docs/b.md": "b\n", ".gitignore": "*.log\n"})
    return repo


def _shell(place: Place, script: str) -> None:
    subprocess.run(["bash", "-ec", script], cwd=place.path, check=True, env={**os.environ, "HOME": "/nonexistent"})


def test_index_refs_and_objects_of_the_users_repository_stay(own_place: MakePlace, tmp_path: Path) -> None:
    """An undo of files reads and writes nothing of `.git`: no index is lost, no ref and no orphan object is made."""
    repo = _repository(tmp_path)
    repo.write("staged.md", "staged by the user\n")
    repo.git("add", "staged.md")
    before = state_of(repo.root)
    place = own_place()
    _shell(place, "echo changed > a.md; rm -r docs; echo new > new.md; rm staged.md")
    log = tmp_path / "log"
    traced = ["strace", "-f", "-qq", "-e", "trace=%file", "-o", str(log)]
    program = [sys.executable, "-m", "bonobofs", "undo", "--agent", "alice", "--path", str(repo.root)]
    subprocess.run([*traced, *program], cwd="/", env=environment(), check=True, capture_output=True)
    assert state_of(repo.root) == before
    assert f"{repo.root}/.git/" not in log.read_text()
    assert '".git' not in log.read_text()


def test_a_nested_repository_keeps_its_git_directory(own_place: MakePlace, tmp_path: Path) -> None:
    """Files of a repository within the source are changed and taken back: its `.git` has the same files and name."""
    repo = _repository(tmp_path)
    inner = Repo(repo.root / "vendor").init()
    inner.commit("[gt-0] Inner", {"lib.c": "int x;\n"})
    before = state_of(repo.root)
    place = own_place()
    _shell(place, "echo 'int y;' > vendor/lib.c; rm a.md; touch vendor/new.c")
    assert undo(place, agent="alice")["conflicts"] == []
    assert state_of(repo.root) == before
    assert inner.git("status", "--porcelain") == ""


def test_an_undo_reads_no_file_that_did_not_change(own_place: MakePlace, tmp_path: Path) -> None:
    """Its cost grows with the changes: it opens and lists nothing else, however large the tree is."""
    (source := tmp_path / "source").mkdir()
    (source / "large").mkdir()
    for number in range(50):
        (source / "large" / f"file{number}").write_text("x")
    (source / "changed").write_text("old\n")
    place = own_place()
    (place.path / "changed").write_text("new\n")
    log = tmp_path / "log"
    traced = ["strace", "-f", "-qq", "-e", "trace=%file", "-o", str(log)]
    program = [sys.executable, "-m", "bonobofs", "undo", "--agent", "alice", "--path", str(source)]
    subprocess.run([*traced, *program], cwd="/", env=environment(), check=True, capture_output=True)
    assert (source / "changed").read_text() == "old\n"
    assert "large" not in log.read_text()


def test_files_of_the_users_scripts_survive_and_a_git_clean_is_taken_back(own_place: MakePlace, tmp_path: Path) -> None:
    """An agent's `git clean -fdx` is taken back with ignored files; what the user's script made meanwhile stays."""
    repo = _repository(tmp_path)
    repo.write("build/out.log", "ignored\n")
    repo.write("notes.txt", "untracked\n")
    before = state_of(repo.root)
    place = own_place()
    _shell(place, "git clean -qfdx")
    assert not (repo.root / "notes.txt").exists()
    repo.write("made-by-script.txt", "the user's\n")
    assert undo(place, agent="alice")["conflicts"] == []
    after = state_of(repo.root)
    assert (repo.root / "made-by-script.txt").read_text() == "the user's\n"
    assert after.pop("") != before.pop(""), "the directory has a new name, so that its time stays"
    del after["made-by-script.txt"]
    assert {path: about for path, about in after.items() if not path.startswith(".git/")} == {
        path: about for path, about in before.items() if not path.startswith(".git/")
    }


def test_work_outside_the_source_stays(own_place: MakePlace, tmp_path: Path) -> None:
    """A directory that is replaced by a symlink to the outside is a conflict, and nothing there is written."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("two\n")
    (source := tmp_path / "source").mkdir()
    (source / "d").mkdir()
    (source / "d/file").write_text("one\n")
    (source / "out").symlink_to("../outside")
    before = state_of(source)
    place = own_place()
    (place.path / "d/file").write_text("two\n")
    _shell(place, "rm out; mkdir out; echo mine > out/file")
    (source / "d").rename(source / "moved")
    (source / "d").symlink_to("../outside")
    (outside / "file").touch()
    os.utime(outside / "file", ns=(0, (source / "moved/file").stat().st_mtime_ns))
    there = state_of(outside)
    result = undo(place, agent="alice")
    assert {each["path"] for each in result["conflicts"]} == {"d/file"}
    assert state_of(outside) == there
    assert state_of(source)["out"] == before["out"]


def test_content_that_was_not_kept_is_never_replaced_by_an_older_copy(own_place: MakePlace, tmp_path: Path) -> None:
    """The first content is kept, the second is too large: the undo of its change is refused, and names the reason."""
    (source := tmp_path / "source").mkdir()
    (source / "file").write_text("first\n")
    place = own_place(policy=f'{ALLOW_ALL}[undo]\nmax_file = "1KB"\n')
    states = []
    for number, text in enumerate(("x" * 5000, "third\n")):
        assert bonobofs("mark", f"turn {number}", cwd=place.path).returncode == 0
        (place.path / "file").write_text(text)
        states.append(state_of(source))
    (conflict,) = {each["reason"] for each in undo(place, turn="turn 1")["conflicts"]}
    assert conflict == "the file is larger than max_file"
    assert state_of(source) == states[1]


def test_a_move_is_taken_back_only_with_its_own_turn(own_place: MakePlace, tmp_path: Path) -> None:
    """The undo of a later edit leaves the file where it was moved to, and the undo of the move leaves the edit."""
    (source := tmp_path / "source").mkdir()
    (source / "old").write_text("one\n")
    place = own_place()
    for name, script in (("move", "mv old new"), ("edit", "echo two > new"), ("more", "echo three > new")):
        assert bonobofs("mark", name, cwd=place.path).returncode == 0
        _shell(place, script)
    assert undo(place, turn="more")["conflicts"] == []
    assert {path.name: path.read_text() for path in source.iterdir()} == {"new": "two\n"}
    assert undo(place, turn="move")["conflicts"] == []
    assert {path.name: path.read_text() for path in source.iterdir()} == {"old": "two\n"}


@contextmanager
def _small_disk(path: Path) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def _fill_disk(path: Path) -> None:
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        os.posix_fallocate(file.fileno(), 0, 1 << 30)
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass


@pytest.mark.root
def test_an_undo_on_a_full_disk_is_completed_when_there_is_space(own_place: MakePlace, tmp_path: Path) -> None:
    """No file is half written: each has its old content or that of the agent, until the next call completes all."""
    with _small_disk(tmp_path / "source") as source:
        for name in ("first", "large", "last"):
            (source / name).write_bytes(name.encode() * (200_000 if name == "large" else 1))
        before = state_of(source)
        place = own_place()
        for name in ("first", "large", "last"):
            (place.path / name).write_text("new\n")
        changed = state_of(source)
        _fill_disk(source / "filler")
        with pytest.raises(StateError, match=r"No space left on device; .* the next undo completes it"):
            undo(place, agent="alice")
        half = state_of(source)
        for name in ("first", "large", "last"):
            assert half[name][3:5] in (before[name][3:5], changed[name][3:5])
        assert half["large"][3:5] == changed["large"][3:5]
        (source / "filler").unlink()
        result = undo(place, agent="alice")
        assert (result["completed"], result["conflicts"], result["failures"]) == (1, [], [])
        after = state_of(source)
        assert after.pop("") > before.pop(""), "the user's file was removed meanwhile, so that the time stays"
        assert after == before
        assert place.umount().closed


@pytest.mark.root
def test_the_store_in_the_source_is_no_external_change(own_place: MakePlace, tmp_path: Path) -> None:
    """The state directory is on another file system. What a session and an undo keep in `.bonobofs` is no alert."""
    with _small_disk(tmp_path / "source") as source:
        (source / ".bonobofs").mkdir(mode=0o700)
        for name in ("changed", "removed"):
            (source / name).write_text("precious\n")
        place = own_place()
        (place.path / "changed").write_text("new\n")
        (place.path / "removed").unlink()
        undo(place, agent="alice")
        objects = source / ".bonobofs/undo/objects"
        until(lambda: objects.is_dir() and any(objects.glob("*/*")), "the companion has hashed the contents")
        (source / ".bonobofs/external").touch()
        until(lambda: list(out_of_band(place)) == [".bonobofs/external"], "the watcher reports this change, no other")
        assert place.umount().closed


_LARGEST = 8 << 20
"""Bytes of the largest file that the server may write in these stories."""


def _refused(call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(OSError, match="File too large"):
        call(*arguments)


def _write_and_fail(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(fd, b"DESTROYED")
    _refused(os.pwrite, fd, b"x", _LARGEST)
    os.close(fd)


def _fail_and_write(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY)
    _refused(os.pwrite, fd, b"x", _LARGEST)
    _refused(os.ftruncate, fd, _LARGEST + 1)
    _refused(os.posix_fallocate, fd, 0, _LARGEST + 1)
    os.write(fd, b"DESTROYED")
    os.close(fd)


@pytest.mark.parametrize(
    ("story", "name"), [(_write_and_fail, "file"), (_write_and_fail, "created"), (_fail_and_write, "file")]
)
def test_a_file_of_which_one_write_failed_is_taken_back(
    own_place: MakePlace, tmp_path: Path, story: Callable[[Path], None], name: str
) -> None:
    """The failed write hides no other write of the file from undo, diff and the report."""
    source = tmp_path / "source"
    source.mkdir()
    for each in ("file", "other"):
        (source / each).write_text(f"{each}, precious\n")
    before = state_of(source)
    place = own_place()
    resource.prlimit(place.pid, resource.RLIMIT_FSIZE, (_LARGEST, _LARGEST))
    story(place.path / name)
    (place.path / "other").write_text("fine\n")
    shown = bonobofs("diff", "--session", place.session.session, "--path", source, "--json").stdout
    assert {each["path"] for each in json.loads(shown)} == {name, "other"}
    report = json.loads(bonobofs("audit", "report", "--json").stdout)
    assert {each["path"] for each in report["changed"]} >= {name, "other"}
    assert {each["path"] for each in report["failed"]} == {name}
    result = undo(place, agent="alice")
    assert (result["conflicts"], result["failures"]) == ([], [])
    assert state_of(source) == before


@pytest.mark.root
def test_a_truncation_that_failed_afterwards_is_taken_back(ordinary_place: MakePlace, tmp_path: Path) -> None:
    """The server truncates a set-user-id file, and then cannot clear the bit."""
    place = ordinary_place()
    tool = place.source / "tool"
    place.does(lambda: tool.write_text("precious\n"))
    place.does(lambda: tool.chmod(0o4755))
    before = state_of(place.source)
    with traced(place, tmp_path / "log", "-e", "inject=fchmod:error=EIO"):
        assert place.does(lambda: outcome(os.truncate, place.path / "tool", 0)) == errno.EIO
    assert tool.stat().st_size == 0
    result = place.does(lambda: undo(place, agent="alice"))
    assert (result["conflicts"], result["failures"]) == ([], [])
    assert state_of(place.source) == before
