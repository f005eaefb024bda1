"""Another program changes files while an undo changes them, the undo is killed or a call fails: nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bonobofs.ipc.client import call
from bonobofs.state.home import inside_directory
from bonobofs.system import syscalls
from tests.support import proc
from tests.support.commands import bonobofs
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.source_state import AGENT_ALL, state_of, undo, without_directory_times
from tests.support.tracing import faulty_undo, traced_undo
from tests.support.wait import until

pytestmark = pytest.mark.root
_CHANGED = "the file was changed while it was taken back"
_WORK = "work of the user\n"


@pytest.fixture
def place(own_place: MakePlace, tmp_path: Path) -> Place:
    """A mount of files with the contents that are their names."""
    (tmp_path / "source").mkdir()
    for name in "abcdef":
        (tmp_path / "source" / name).write_text(f"{name}\n")
    return own_place(policy=AGENT_ALL)


def _save(path: Path, text: str = _WORK) -> None:
    """Save a file as an editor does, by a rename."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def _append(path: Path) -> None:
    with path.open("a") as file:
        file.write(_WORK)


def _files(source: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(source.iterdir())}


def _texts(source: Path, start: str) -> list[str]:
    return [path.read_text() for path in source.glob(f"{start}*")]


def _delay(call: str, **when: float) -> tuple[str, ...]:
    """Return options of strace that delay the first call, by seconds at its `enter` and `exit`."""
    return ("-e", f"trace={call}", "-e", ":".join([
        f"inject={call}", *(f"delay_{key}={int(seconds * 1e6)}" for key, seconds in when.items()), "when=1",
    ]))  # fmt: skip


def _is_called(log: Path, call: str) -> Callable[[], bool]:
    return lambda: log.exists() and f"{call}(" in log.read_text()


@pytest.mark.parametrize("change", [_save, _append])
@pytest.mark.parametrize(("name", "call"), [("a", "renameat2"), ("new", "renameat")])
def test_what_a_program_writes_before_the_last_call_stays(
    place: Place, tmp_path: Path, change: Callable[[Path], None], name: str, call: str
) -> None:
    (place.path / name).write_text("agent\n")
    place.umount()
    with traced_undo(place.source, log := tmp_path / "log", *_delay(call, enter=1.5)) as tracer:
        until(_is_called(log, call), "the step has compared the file")
        change(place.source / name)
        result = json.loads(tracer.communicate()[0])
    assert [failure["reason"] for failure in result["failures"]] == [_CHANGED]
    assert (place.source / name).read_text().endswith(_WORK)
    assert not list(place.source.glob(".bonobofs-*"))


@pytest.mark.parametrize(("name", "call"), [("a", "renameat2"), ("new", "renameat")])
@pytest.mark.parametrize("happens", ["kill", "save", "move"])
def test_a_file_with_the_temporary_name_returns(
    place: Place, tmp_path: Path, name: str, call: str, happens: str
) -> None:
    """A program saves the file just before it gets the temporary name. Then the undo is killed, or it saves again."""
    (place.path / name).write_text("agent\n")
    place.umount()
    with traced_undo(place.source, log := tmp_path / "log", *_delay(call, enter=1, exit=2)) as tracer:
        until(_is_called(log, call), "the step has compared the file")
        _save(place.source / name)
        until(lambda: _WORK in _texts(place.source, ".bonobofs-"), "the file has the temporary name")
        if happens == "kill":
            os.kill(proc.child(tracer.pid), signal.SIGKILL)
        elif happens == "save":
            _save(place.source / name, "second\n")
        else:
            with suppress(FileNotFoundError):
                (place.source / name).rename(place.source / "moved")
        tracer.communicate()
    undo(place, path="nothing")
    texts = _texts(place.source, name)
    assert _WORK in texts
    assert ("second\n" in texts) == (happens == "save")
    assert not list(place.source.glob(".bonobofs-*"))
    assert bonobofs("audit", "verify").returncode == 0


def _link(place: Place) -> None:
    """Let the agent write a file that has a second name."""
    os.link(place.source / "a", place.source / "a2")
    (place.path / "a2").lstat()
    (place.path / "a").write_text("agent\n")
    place.umount()


def test_a_program_that_opens_a_file_waits_for_a_write_in_place(place: Place, tmp_path: Path) -> None:
    """A file with two names is written in place. What a program writes meanwhile comes afterwards."""
    _link(place)
    with (
        traced_undo(place.source, log := tmp_path / "log", *_delay("sendfile", enter=1.5)) as tracer,
        ThreadPoolExecutor() as pool,
    ):
        until(_is_called(log, "sendfile"), "the step has compared the file")
        written = pool.submit((place.source / "a2").write_text, _WORK)
        assert json.loads(tracer.communicate()[0])["failures"] == []
        written.result()
    assert (place.source / "a").read_text() == _WORK


def test_what_a_program_writes_to_a_half_written_file_is_kept(place: Place, tmp_path: Path) -> None:
    """The undo was killed while it wrote a file with two names. The next call completes it, and can be taken back."""
    _link(place)
    with traced_undo(place.source, tmp_path / "log", "-e", "inject=sendfile:signal=KILL") as tracer:
        tracer.communicate()
    (place.source / "a2").write_text(_WORK)
    result = undo(place, path="nothing")
    assert (result["completed"], (place.source / "a").read_text()) == (1, "a\n")
    assert undo(place, of_session=result["session"])["conflicts"] == []
    assert (place.source / "a").read_text() == _WORK


def _exchange(one: Path, other: Path) -> None:
    syscalls.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), syscalls.RENAME_EXCHANGE)


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_exchange_with_another_file_is_a_conflict(place: Place, name: str) -> None:
    """The user has replaced one of two files that the agent has exchanged."""
    _exchange(place.path / "a", place.path / "b")
    place.umount()
    _save(place.source / name)
    before = state_of(place.source)
    (conflict,) = undo(place, agent="alice")["conflicts"]
    assert conflict["reason"] == "the file was moved afterwards"
    assert state_of(place.source) == before


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_file_that_is_replaced_during_an_exchange_stays(place: Place, tmp_path: Path, name: str) -> None:
    _exchange(place.path / "a", place.path / "b")
    place.umount()
    with traced_undo(place.source, log := tmp_path / "log", *_delay("renameat2", enter=1.5)) as tracer:
        until(_is_called(log, "renameat2"), "the step has compared both files")
        _save(place.source / name)
        changed = without_directory_times(state_of(place.source))
        (failure,) = json.loads(tracer.communicate()[0])["failures"]
    assert failure["reason"] == _CHANGED
    assert without_directory_times(state_of(place.source)) == changed


def test_a_file_that_replaces_a_new_symlink_keeps_owner_and_time(place: Place, tmp_path: Path) -> None:
    (place.source / "link").symlink_to("a")
    os.chown(place.source / "link", 1, 1, follow_symlinks=False)
    (place.path / "link").unlink()
    place.umount()
    (place.source / "user").write_text(_WORK)
    before = (place.source / "user").stat()
    call = "fchownat,chown,lchown"
    with traced_undo(place.source, log := tmp_path / "log", *_delay(call, enter=1.5)) as tracer:
        until(lambda: log.exists() and "chown" in log.read_text(), "the step has made the symlink")
        (place.source / "user").rename(place.source / "link")
        tracer.communicate()
    after = (place.source / "link").stat()
    assert (after.st_uid, after.st_mtime_ns) == (before.st_uid, before.st_mtime_ns)


def test_a_hard_link_at_the_path_of_a_removed_file_stays(place: Place, tmp_path: Path) -> None:
    """The user makes it after the undo was killed. The restored content would go into the linked file."""
    (place.path / "a").unlink()
    place.umount()
    with traced_undo(place.source, tmp_path / "log", "-e", "inject=fchmod:signal=KILL") as tracer:
        tracer.communicate()
    os.link(place.source / "b", place.source / "a")
    (failure,) = undo(place, path="nothing")["failures"]
    assert (failure["path"], (place.source / "b").read_text()) == ("a", "b\n")


def _change_all(place: Place) -> None:
    """Make a change of each kind of step."""
    path = place.path
    os.link(path / "a", path / "a2")
    (path / "a").write_text("agent\n")
    (path / "b").write_text("agent\n")
    (path / "dir").rmdir()
    (path / "link").unlink()
    (path / "new").write_text("new\n")
    (path / "c").rename(path / "moved")
    (path / "tmp").write_text("agent\n")
    (path / "tmp").rename(path / "d")
    (path / "e").unlink()


def _prepare(source: Path) -> None:
    (source / "dir").mkdir(0o750)
    (source / "link").symlink_to("a")
    os.setxattr(source / "dir", "user.k", b"value")
    os.setxattr(source / "e", "user.k", b"value")


def test_a_file_system_without_flags_of_renames_is_served(place: Place, tmp_path: Path) -> None:
    """renameat2 fails as it does there."""
    _prepare(place.source)
    before = without_directory_times(state_of(place.source))
    _change_all(place)
    place.umount()
    result = faulty_undo(place.source, tmp_path / "log", "-e", "inject=renameat2:error=EINVAL")
    assert (result["failures"], result["conflicts"]) == ([], [])
    assert without_directory_times(state_of(place.source)) == before


@pytest.mark.parametrize("call", ["fchmod", "utimensat", "fsetxattr", "sendfile", "linkat", "renameat2", "unlinkat"])
def test_a_step_that_fails_can_be_repeated(place: Place, tmp_path: Path, call: str) -> None:
    """Each of the first calls fails once, of files that are restored, written, moved and removed."""
    _prepare(place.source)
    before = without_directory_times(state_of(place.source))
    for number in range(1, 9):
        _change_all(place)
        fault = ("-e", f"trace={call}", "-e", f"inject={call}:error=EIO:when={number}")
        with traced_undo(place.source, log := tmp_path / "log", *fault) as tracer:
            out, err = tracer.communicate()
        if "INJECTED" not in log.read_text():
            assert number > 1
            break
        assert "the undo stopped" in err or "taken_back" in json.loads(out), (number, out, err)
        result = undo(place, agent="alice", path="")
        assert (result["conflicts"], result["failures"]) == ([], []), number
        assert without_directory_times(state_of(place.source)) == before, number


@contextmanager
def _small_trails(home: Path) -> Iterator[Path]:
    """Put the trails of ended sessions on a disk of their own."""
    trails = home / "trails"
    shutil.copytree(trails, home / "copy")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", trails], check=True)
    try:
        shutil.copytree(home / "copy", trails, dirs_exist_ok=True)
        yield trails
    finally:
        subprocess.run(["umount", trails], check=True)


def test_a_full_disk_of_the_trail_stops_an_undo(place: Place, tmp_path: Path) -> None:
    """The next undo completes it when there is space."""
    for number in range(400):
        (place.source / f"n{number}").write_text("old\n")
    before = without_directory_times(state_of(place.source))
    for number in range(400):
        (place.path / f"n{number}").write_text("agent\n")
    place.umount()
    with _small_trails(place.home) as trails:
        with traced_undo(place.source, log := tmp_path / "log", *_delay("renameat2", exit=2)) as tracer:
            until(_is_called(log, "renameat2"), "the first step is made")
            with suppress(OSError), (trails / "fill").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            _, err = tracer.communicate()
        assert (tracer.returncode, "the next undo completes it" in err) == (1, True), err
        assert "Ask the operator" not in err, "it is the operator who reads this"
        assert without_directory_times(state_of(place.source)) != before
        (trails / "fill").unlink()
        result = undo(place, agent="alice", path="")
        assert (result["failures"], result["completed"]) == ([], 1)
    assert without_directory_times(state_of(place.source)) == before


def test_a_completed_undo_is_taken_back_by_the_printed_commands(place: Place, tmp_path: Path) -> None:
    for name in "abcdef":
        (place.path / name).write_text("agent\n")
    place.umount()
    changed = _files(place.source)
    with traced_undo(place.source, tmp_path / "log", "-e", "inject=utimensat:signal=KILL:when=4") as tracer:
        tracer.communicate()
    assert len(set(_files(place.source).values())) > 1
    repeated = bonobofs("undo", "--agent", "alice", "--path", place.source, cwd=tmp_path).stdout
    assert _files(place.source) == {name: f"{name}\n" for name in "abcdef"}, repeated
    commands = [line.partition(": bonobofs ")[2].split() for line in repeated.splitlines() if "take back" in line]
    assert len(commands) == 2
    assert bonobofs("undo", "--agent", "alice", "--path", place.source).stdout.count("take back the earlier undo:") == 2
    for command in commands:
        bonobofs(*command, cwd=place.source)
    assert _files(place.source) == changed


def test_an_agents_undo_is_taken_back_by_the_printed_command(place: Place) -> None:
    """Its other work stays, before and after the undo. The last turn is never that of an undo."""
    (place.path / "a").write_text("first\n")
    assert bonobofs("mark", "next", cwd=place.path).returncode == 0
    (place.path / "b").write_text("second\n")
    changed = _files(place.source)
    said = bonobofs("undo", "--turn", "last", cwd=place.path).stdout
    assert (place.source / "b").read_text() == "b\n"
    assert bonobofs("undo", "--turn", "last", "--dry-run", cwd=place.path).stdout.startswith("0 changes")
    (place.path / "c").write_text("third\n")
    (command,) = [line.partition(": bonobofs ")[2].split() for line in said.splitlines() if "take back" in line]
    assert bonobofs(*command, cwd=place.path).returncode == 0
    assert _files(place.source) == changed | {"c": "third\n"}


def test_attributes_of_a_removed_open_file_leave_the_kept_one(place: Place) -> None:
    os.setxattr(place.source / "a", "user.note", b"old")
    before = state_of(place.source)
    fd = os.open(place.path / "a", os.O_RDWR)
    (place.path / "a").unlink()
    os.setxattr(fd, "user.note", b"agent")
    os.close(fd)
    place.umount()
    assert undo(place, agent="alice")["conflicts"] == []
    assert state_of(place.source) == before


@pytest.mark.parametrize("names", [1, 2])
def test_a_file_of_another_owner_is_a_conflict(ordinary_place: MakePlace, names: int) -> None:
    """The agent may write it, and cannot restore its owner and time."""
    world = ordinary_place(policy=AGENT_ALL)
    (world.source / "a").write_text("old\n")
    (world.source / "a").chmod(0o666)
    for number in range(1, names):
        os.link(world.source / "a", world.source / f"{number}")
    world.does(lambda: ([name.stat() for name in world.path.iterdir()], (world.path / "a").write_text("agent\n")))
    guard = inside_directory(world.home, world.session.session)
    result = world.does(lambda: call(guard, "undo", turn="last"))
    assert {each["reason"] for each in result["conflicts"]} == {"only its old owner or root can restore it"}
    assert (result["failures"], (world.source / "a").read_text()) == ([], "agent\n")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_restored_file_inherits_no_access_list(place: Place, kind: str) -> None:
    """Nor does it lose what a change of its owner clears: set-id bits and capabilities."""
    (place.source / "dir").mkdir()
    path = place.source / "dir/it"
    if kind == "file":
        path.write_text("old\n")
        os.setxattr(path, "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
        os.chown(path, 1, 1)
        os.setxattr(path, "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
        path.chmod(0o6755)
    else:
        path.mkdir(0o750)
    subprocess.run(["setfacl", "-d", "-m", "u:1234:rwx", place.source / "dir"], check=True)
    before = state_of(place.source)
    (place.path / "dir/it").rmdir() if kind == "directory" else (place.path / "dir/it").unlink()
    place.umount()
    assert undo(place, agent="alice")["conflicts"] == []
    assert state_of(place.source) == before


def test_a_failed_move_leaves_a_file_at_its_new_path(place: Place, tmp_path: Path) -> None:
    """The move is the first step. The user moves the file elsewhere and takes the path to which it would return."""
    (place.path / "a").rename(place.path / "moved")
    place.umount()
    with traced_undo(place.source, log := tmp_path / "log", *_delay("renameat2", enter=1.5)) as tracer:
        until(_is_called(log, "renameat2"), "the step has compared the file")
        (place.source / "moved").rename(place.source / "elsewhere")
        (place.source / "a").write_text(_WORK)
        assert len(json.loads(tracer.communicate()[0])["failures"]) == 1
    assert (place.source / "a").read_text() == _WORK
    assert not (place.source / "moved").exists()


def test_an_agent_takes_back_all_below_the_root(place: Place) -> None:
    (place.path / "a").write_text("agent\n")
    assert bonobofs("undo", "--path", ".", cwd=place.path).returncode == 0
    assert (place.source / "a").read_text() == "a\n"


def test_a_set_id_bit_returns_with_the_owner(place: Place) -> None:
    (place.source / "a").chmod(0o6755)
    before = state_of(place.source)
    os.chown(place.path / "a", 1, 1)
    place.umount()
    assert undo(place, agent="alice")["conflicts"] == []
    assert state_of(place.source) == before


@contextmanager
def _overlayfs(source: Path) -> Iterator[None]:
    """Mount a file system whose files get another inode with their first change."""
    layers = source.parent / "layers"
    for path in (layers, source):
        path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", layers], check=True)
    for name in ("lower", "upper", "work"):
        (layers / name).mkdir()
    for name in "ab":
        (layers / "lower" / name).write_text(f"{name}\n")
    options = f"lowerdir={layers}/lower,upperdir={layers}/upper,workdir={layers}/work"
    try:
        subprocess.run(["mount", "-t", "overlay", "-o", options, "none", source], check=True)
        yield
    finally:
        for path in (source, layers):
            subprocess.run(["umount", path], check=False)


def test_an_exchange_on_overlayfs_is_taken_back(own_place: MakePlace, tmp_path: Path) -> None:
    with _overlayfs(tmp_path / "source"):
        place = own_place(policy=AGENT_ALL)
        _exchange(place.path / "a", place.path / "b")
        (place.path / "a").write_text("agent\n")
        place.umount()
        result = undo(place, agent="alice")
        assert (result["conflicts"], result["failures"]) == ([], [])
        assert _files(place.source) == {"a": "a\n", "b": "b\n"}
