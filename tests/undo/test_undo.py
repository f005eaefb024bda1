"""Changes through a mount are taken back: in whole, in part, and never half."""

from __future__ import annotations

import mmap
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import bonobofs, environment
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.source_state import state_of, undo, without_directory_times
from tests.support.wait import until


def _source(directory: Path) -> Path:
    source = directory / "source"
    (source / "src").mkdir(parents=True)
    (source / "src/app.py").write_text("print('one')\n")
    (source / "src/lib.py").write_text("X = 1\n" * 2000)
    (source / "notes.txt").write_text("notes\n")
    (source / ".gitignore").write_text("*.log\n")
    (source / "build.log").write_text("ignored\n")
    os.symlink("src/app.py", source / "link")
    os.link(source / "notes.txt", source / "same.txt")
    os.utime(source / "src/app.py", ns=(10**18, 10**18 + 123))
    (source / "src/lib.py").chmod(0o640)
    return source


def _shell(place: Place, script: str) -> None:
    subprocess.run(["bash", "-ec", script], cwd=place.path, check=True)


def _kill_undo(place: Place, *trace: str) -> None:
    """Undo the changes of alice under strace, whose options kill the undo."""
    program = [sys.executable, "-m", "bonobofs", "undo", "--agent", "alice", "--path", str(place.source)]
    killed = subprocess.run(
        ["strace", "-f", "-qq", "-o", "/dev/null", *trace, *program],
        cwd="/", env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL


def test_what_a_shell_did_is_taken_back(own_place: MakePlace, tmp_path: Path) -> None:
    """Edits by sed, redirection and mv, removal of ignored and untracked files, links, modes and times."""
    before = state_of(_source(tmp_path))
    place = own_place()
    _shell(
        place,
        """
        sed -i s/one/two/ src/app.py
        echo more >> src/lib.py
        rm build.log link
        mkdir -p new/deep; echo x > new/deep/file; ln -s deep new/l
        mv src moved; chmod 755 moved/app.py; touch -d 2001-01-01 moved/lib.py
        rm same.txt
        echo changed > notes.txt
        """,
    )
    assert state_of(place.source) != before
    result = undo(place, agent="alice")
    assert result["conflicts"] == []
    assert result["failures"] == []
    assert state_of(place.source) == before
    assert (place.path / "src/app.py").read_text() == "print('one')\n"


def test_a_directory_of_before_1970_gets_its_time_back(own_place: MakePlace, tmp_path: Path) -> None:
    """Negative times are no conflict, whether the agent or the user has set them."""
    source = _source(tmp_path)
    (source / "old").mkdir()
    os.utime(source / "old", ns=(-(10**18), -(10**18) - 5))
    before = state_of(source)
    place = own_place()
    os.utime(place.path / "src", ns=(-(10**16), -(10**16) - 7))
    for name in ("old/new", "src/new"):
        (place.path / name).write_text("x")
    result = undo(place, agent="alice")
    assert (result["conflicts"], result["failures"]) == ([], [])
    assert state_of(source) == before


def test_a_sparse_file_stays_sparse(own_place: MakePlace, tmp_path: Path) -> None:
    """A disk image of 32 MiB that takes 8 KiB does not fill the disk when it returns."""
    sparse = _source(tmp_path) / "image"
    with sparse.open("wb") as file:
        file.write(b"start\n")
        file.seek(16 << 20)
        file.write(b"middle\n")
        file.truncate(32 << 20)
    before = state_of(sparse.parent)
    place = own_place()
    _shell(place, "rm image")
    undo(place, agent="alice")
    assert state_of(place.source) == before
    assert sparse.stat().st_blocks * 512 < 1 << 20


def test_an_undo_is_undone(own_place: MakePlace, tmp_path: Path) -> None:
    """The undo's own session is taken back like any other."""
    before = state_of(_source(tmp_path))
    place = own_place()
    _shell(place, "echo two > src/app.py; rm build.log; mv notes.txt n; mkdir d; echo y > d/f; rm -r d")
    changed = state_of(place.source)
    first = undo(place, agent="alice")
    assert state_of(place.source) == before
    second = undo(place, of_session=first["session"])
    assert not second["conflicts"]
    assert state_of(place.source) == changed
    undo(place, of_session=second["session"])
    assert state_of(place.source) == before


def test_a_file_that_changed_afterwards_stays_untouched(own_place: MakePlace, tmp_path: Path) -> None:
    """An external change of one file is a conflict; the other files are taken back."""
    source = _source(tmp_path)
    before = state_of(source)
    place = own_place()
    _shell(place, "echo two > src/app.py; echo two > src/lib.py")
    (source / "src/app.py").write_text("mine\n")
    mine = state_of(source)["src/app.py"]
    result = undo(place, agent="alice")
    assert {conflict["path"] for conflict in result["conflicts"]} == {"src/app.py"}
    after = state_of(source)
    assert after["src/app.py"] == mine
    assert after["src/lib.py"] == before["src/lib.py"]


def _replace_with_same_number(path: Path) -> None:
    """Replace a file behind the mount by a new one, which gets its inode number if the file system reuses numbers."""
    old, clock = path.stat(), path.with_name("clock")

    def time() -> int:
        clock.touch()
        return clock.stat().st_mtime_ns

    until(lambda: time() > old.st_ctime_ns, "the clock of the file system advances")
    path.unlink()
    for number in range(200):
        path.write_text("mine\n")
        if path.stat().st_ino == old.st_ino:
            return
        path.rename(path.with_name(f"other{number}"))
    path.write_text("mine\n")


def test_another_file_with_the_inode_number_stays(own_place: MakePlace, tmp_path: Path) -> None:
    """The kernel gives the number of a removed file to a new one. It is not the file that an agent has changed."""
    _source(tmp_path)
    place = own_place()
    _shell(place, "chmod 600 src/lib.py")
    _replace_with_same_number(place.source / "src/lib.py")
    (place.source / "src/lib.py").chmod(0o600)
    result = undo(place, agent="alice")
    assert {conflict["path"] for conflict in result["conflicts"]} == {"src/lib.py"}
    assert stat.S_IMODE((place.source / "src/lib.py").stat().st_mode) == 0o600


def test_a_conflict_stays_with_its_file(own_place: MakePlace, tmp_path: Path) -> None:
    """An agent removes a file, and its next file gets the inode number: only the first one is a conflict."""
    source = _source(tmp_path)
    before = state_of(source)
    place = own_place(policy='default = "allow"\nhidden = ["**"]\n[undo]\nmax_file = "5KB"\n')
    _shell(place, "rm src/lib.py; echo new > added; chmod 600 added")
    result = undo(place, agent="alice")
    assert {conflict["path"] for conflict in result["conflicts"]} == {"src/lib.py"}
    after = state_of(source)
    assert after.pop("src") != before.pop("src"), "a name of the directory is still changed"
    del before["src/lib.py"]
    assert after == before


def test_work_of_another_session_stays(own_place: MakePlace, tmp_path: Path) -> None:
    """Of two sessions one is taken back; a file of both is a conflict until the later session is taken back."""
    before = state_of(_source(tmp_path))
    one, two = own_place(), own_place()
    _shell(one, "echo one > src/app.py; echo one > notes2")
    _shell(two, "echo two > src/app.py; echo two > other")
    result = undo(one, of_session=one.session.session)
    assert {conflict["path"] for conflict in result["conflicts"]} == {"src/app.py"}
    state = state_of(one.source)
    assert "notes2" not in state
    assert (one.source / "other").read_text() == "two\n"
    undo(two, of_session=two.session.session)
    result = undo(one, of_session=one.session.session, path="src/app.py")
    assert not result["conflicts"]
    after = state_of(one.source)
    assert after.pop("") != before.pop(""), "the first undo removed a name while a later one was there"
    assert after == before


def test_turns_are_taken_back_in_any_order(own_place: MakePlace, tmp_path: Path) -> None:
    """Each turn is a unit; an older turn of the same file waits for the newer one."""
    _source(tmp_path)
    place = own_place()
    states = [state_of(place.source)]
    for number in range(3):
        assert bonobofs("mark", f"turn {number}", cwd=place.path).returncode == 0
        _shell(place, f"echo {number} > src/app.py; echo {number} > file{number}; echo {number} >> src/app.py")
        states.append(state_of(place.source))
    assert undo(place, turn="turn 0")["conflicts"]
    assert state_of(place.source)["src/app.py"] == states[3]["src/app.py"]
    for number in (2, 1):
        assert not undo(place, turn=f"turn {number}")["conflicts"]
    result = undo(place, turn="turn 0")
    assert not result["failures"]
    assert state_of(place.source)["src/app.py"] == states[0]["src/app.py"]


def test_open_handles_and_mappings_keep_the_old_content(own_place: MakePlace, tmp_path: Path) -> None:
    """A write to a removed file that is still open, by write(2) or a mapping, does not reach the pre-image."""
    before = state_of(_source(tmp_path))
    place = own_place()
    with (place.path / "src/lib.py").open("r+b") as file:
        (place.path / "src/lib.py").unlink()
        assert os.fstat(file.fileno()).st_nlink == 0
        file.write(b"overwritten")
        file.flush()
        with mmap.mmap(file.fileno(), 0) as mapping:
            mapping[:5] = b"MMMMM"
            mapping.flush()
    with (place.path / "src/app.py").open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        os.rename(place.path / "notes.txt", place.path / "src/app.py")
        mapping[:5] = b"MMMMM"
        mapping.flush()
    result = undo(place, agent="alice")
    assert not result["conflicts"]
    assert state_of(place.source) == before


def test_a_dry_run_changes_nothing(own_place: MakePlace, tmp_path: Path) -> None:
    """It lists the steps that the undo then makes."""
    _source(tmp_path)
    place = own_place()
    _shell(place, "echo two > src/app.py; rm build.log")
    changed = state_of(place.source)
    planned = undo(place, agent="alice", dry_run=True)
    assert state_of(place.source) == changed
    assert [step["do"] for step in planned["steps"]] == [step["do"] for step in undo(place, agent="alice")["steps"]]


def test_a_file_that_is_too_large_is_refused_with_the_reason(own_place: MakePlace, tmp_path: Path) -> None:
    """The outcome says that the old content was not kept, and the undo repeats it."""
    _source(tmp_path)
    place = own_place(policy='default = "allow"\nhidden = ["**"]\n[undo]\nmax_file = "1KB"\n')
    _shell(place, "echo two > src/lib.py; rm notes.txt; rm same.txt")
    result = undo(place, agent="alice")
    assert [conflict["reason"] for conflict in result["conflicts"] if conflict["path"] == "src/lib.py"]
    assert {conflict["path"] for conflict in result["conflicts"]} == {"src/lib.py"}
    assert (place.source / "src/lib.py").read_text() == "two\n"
    assert (place.source / "notes.txt").read_text() == "notes\n"


@pytest.mark.root
@pytest.mark.parametrize("when", [1, 2, 3, 4, 6, 8, 12])
def test_a_killed_undo_is_completed_by_the_next_call(own_place: MakePlace, tmp_path: Path, when: int) -> None:
    """kill -9 at a system call that changes the source or the journal: the next undo leaves the state before."""
    before = state_of(_source(tmp_path))
    place = own_place()
    _shell(
        place,
        """
        sed -i s/one/two/ src/app.py
        rm build.log link notes.txt
        mkdir new; mv src/lib.py new/lib.py; chmod 600 new/lib.py
        echo x > added
        """,
    )
    changed = state_of(place.source)
    assert changed != before
    calls = "renameat,renameat2,linkat,unlinkat,symlinkat,mkdirat,pwrite64,?fchmodat,utimensat"
    inject = f"inject={calls}:signal=KILL:when={when}"
    _kill_undo(place, "-e", f"trace={calls}", "-e", inject)
    made = undo(place, agent="alice", dry_run=True) if state_of(place.source) == changed else None
    result = undo(place, agent="alice")
    assert state_of(place.source) == before
    assert (result["conflicts"], result["failures"]) == ([], [])
    assert made is None or made["taken_back"] == result["taken_back"]
    assert {each["path"] for each in result["taken_back"]} >= {"build.log", "link", "notes.txt", "added"}
    assert bonobofs("audit", "verify").returncode == 0


@pytest.mark.root
def test_a_resumed_undo_reports_what_failed_before_the_kill(own_place: MakePlace, tmp_path: Path) -> None:
    """A step failed, then the undo was killed: the next call completes the rest and lists both."""
    source = _source(tmp_path)
    before = state_of(source)
    place = own_place()
    _shell(place, "rm build.log; echo x > added; rm src/app.py")
    faults = ("-e", "inject=unlinkat:error=EIO", "-e", "inject=renameat2:signal=KILL:when=3")
    _kill_undo(place, "-P", str(source), "-P", str(source / "src"), "-e", "trace=unlinkat,renameat2", *faults)
    result = undo(place, agent="alice")
    assert result["completed"] == 1
    assert [failure["path"] for failure in result["failures"]] == ["added"]
    assert [each["path"] for each in result["taken_back"]] == ["src/app.py", "build.log"]
    assert result["conflicts"] == []
    (source / "added").unlink()
    after = state_of(source)
    assert after.pop("") != before.pop(""), "the time of a directory with a failed step is left"
    assert after == before


@pytest.mark.root
def test_a_resumed_undo_reports_a_file_that_changed_after_the_kill(own_place: MakePlace, tmp_path: Path) -> None:
    """The other files are taken back, and what the same call selects beyond the killed undo."""
    source = _source(tmp_path)
    place = own_place()
    _shell(place, "echo two > src/app.py; rm build.log")
    _kill_undo(place, "-P", str(source), "-e", "trace=renameat2", "-e", "inject=renameat2:signal=KILL")
    (source / "src/app.py").write_text("mine, and longer\n")
    _shell(place, "rm same.txt")
    result = undo(place, agent="alice")
    assert [failure["path"] for failure in result["failures"]] == ["src/app.py"]
    assert [each["path"] for each in result["taken_back"]] == ["same.txt", "build.log"]
    assert (source / "src/app.py").read_text() == "mine, and longer\n"
    assert (source / "notes.txt").stat().st_nlink == 2


@pytest.mark.root
def test_a_call_that_only_completes_an_undo_names_that_undo(own_place: MakePlace, tmp_path: Path) -> None:
    """The undo was killed after its last step, so the session of the call has no change to take back."""
    source = _source(tmp_path)
    place = own_place()
    _shell(place, "rm build.log")
    _kill_undo(place, "-e", "trace=syncfs", "-e", "inject=syncfs:signal=KILL")
    result = undo(place, agent="alice")
    assert (result["completed"], len(result["to_take_back"])) == (1, 1)
    again = bonobofs("undo", *result["to_take_back"][0].split(), "--path", source)
    assert (again.returncode, (source / "build.log").exists()) == (0, False)


@pytest.mark.root
def test_an_agent_leaves_the_killed_undo_of_the_operator(own_place: MakePlace, tmp_path: Path) -> None:
    """Its policy may refuse steps of the operator's undo, so the agent's call is refused, and names the remedy."""
    source = _source(tmp_path)
    before = state_of(source)
    place = own_place(policy='default = "allow"\n[role.agent]\nwrite = ["**"]\ntools = ["undo"]\n')
    _shell(place, "echo two > src/app.py; rm build.log")
    _kill_undo(place, "-P", str(source), "-e", "trace=renameat2", "-e", "inject=renameat2:signal=KILL")
    half = state_of(source)
    refused = bonobofs("undo", "--turn", "last", cwd=place.path)
    assert refused.returncode != 0
    assert "the operator's next undo completes it" in refused.stderr
    assert state_of(source) == half
    assert undo(place, agent="alice")["completed"] == 1
    assert state_of(source) == before


@pytest.mark.root
@pytest.mark.parametrize("call", ["sendfile", "ftruncate", "fchmod", "utimensat"])
def test_a_kill_within_a_write_in_place_is_completed_by_the_next_call(
    own_place: MakePlace, tmp_path: Path, call: str
) -> None:
    """A file with two names is written in place: the next undo completes it, and both names lead to it."""
    source = _source(tmp_path)
    before = state_of(source)
    place = own_place()
    _shell(place, "seq 1000 > notes.txt")
    _kill_undo(place, "-P", str(source / "notes.txt"), "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL")
    assert state_of(source) != before
    result = undo(place, agent="alice")
    assert result["completed"] == 1
    assert state_of(source) == before


@pytest.mark.root
def test_a_file_replaced_after_a_kill_within_a_write_in_place_stays(own_place: MakePlace, tmp_path: Path) -> None:
    """The next undo takes only the inode that it had begun to write for its own work."""
    source = _source(tmp_path)
    place = own_place()
    _shell(place, "seq 1000 > notes.txt")
    _kill_undo(place, "-P", str(source / "notes.txt"), "-e", "trace=fchmod", "-e", "inject=fchmod:signal=KILL")
    (source / "mine").write_text("mine\n")
    (source / "mine").rename(source / "notes.txt")
    undo(place, agent="alice")
    assert (source / "notes.txt").read_text() == "mine\n"


_STAGING = """
default = "deny"
temporary = ["*.tmp"]
[[rule]]
name = "short names"
paths = ["?", "?/?"]
"""


def _staging(own_place: MakePlace, tmp_path: Path) -> tuple[Path, Place]:
    (source := tmp_path / "source").mkdir()
    (source / "a").write_text("one\n")
    return source, own_place(policy=_STAGING)


def test_an_attribute_that_was_set_before_a_staged_file_replaced_the_file_is_taken_back(
    own_place: MakePlace, tmp_path: Path
) -> None:
    """The store has the replaced file with the attribute; the undo of the attribute comes later."""
    source, place = _staging(own_place, tmp_path)
    before = state_of(source)
    _shell(place, "echo two > a")
    os.setxattr(place.path / "a", "user.note", b"x")
    _shell(place, "echo three > a; echo four > a.tmp; mv a.tmp a")
    result = undo(place, agent="alice")
    assert (result["conflicts"], result["failures"]) == ([], [])
    assert state_of(source) == before


def test_a_name_that_a_staged_file_replaced_leads_to_the_linked_file_again(
    own_place: MakePlace, tmp_path: Path
) -> None:
    """The other name of the file stays, and both lead to one inode."""
    source, place = _staging(own_place, tmp_path)
    before = state_of(source)
    assert bonobofs("mark", "link", cwd=place.path).returncode == 0
    _shell(place, "ln a b; echo two > a")
    linked = state_of(source)
    assert bonobofs("mark", "publication", cwd=place.path).returncode == 0
    _shell(place, "echo three > a.tmp; mv a.tmp a")
    for turn, state in (("publication", linked), ("link", before)):
        result = undo(place, turn=turn)
        assert (result["conflicts"], result["failures"]) == ([], [])
        assert without_directory_times(state_of(source)) == without_directory_times(state)
