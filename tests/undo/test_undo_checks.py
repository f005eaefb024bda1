"""An undo checks every step before it writes, and a step that fails stops the later steps of its files alone."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bonobofs.errors import BonobofsError
from bonobofs.ipc.client import call
from bonobofs.policy.document import PolicyDocument
from bonobofs.state.home import inside_directory
from bonobofs.system import syscalls
from bonobofs.undo.execution import UndoJournal
from bonobofs.undo.steps import UndoStep, expectation
from tests.support import proc
from tests.support.commands import bonobofs
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.observe import companion_of, stopped
from tests.support.source_state import AGENT_ALL, AGENT_RULES, state_of, undo, without_directory_times
from tests.support.tracing import faulty_undo, traced, traced_undo
from tests.support.users import run_in_child
from tests.support.wait import until

_SCRIPT = "#!/bin/sh\n"


def _make(source: Path) -> None:
    (source / "docs/sub").mkdir(parents=True)
    (source / "bin").mkdir()
    (source / "docs/sub/a").write_text("text\n")
    (source / "docs/b").write_text("b\n")


def _make_source(tmp_path: Path) -> Path:
    _make(tmp_path / "source")
    return tmp_path / "source"


def _call(place: Place, tool: str, **arguments: object) -> dict[str, Any]:
    """Call a tool of the session as the user whose mount it is."""
    guard = inside_directory(place.home, place.session.session)
    answer: dict[str, Any] = place.does(lambda: call(guard, tool, **arguments))
    return answer


def _images(place: Place) -> list[Path]:
    """Return the kept contents of the session that are not in a pack."""
    return [each for each in (place.home / "undo" / place.session.session).iterdir() if each.name.isdecimal()]


def _exchange(one: Path, other: Path) -> None:
    syscalls.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), syscalls.RENAME_EXCHANGE)


def _script(path: Path) -> None:
    path.write_text(_SCRIPT)


def _unreadable(path: Path) -> None:
    path.chmod(0)


@pytest.mark.parametrize(
    ("edit", "reason"), [(_script, "executable"), (_unreadable, "the policy cannot judge it: Permission denied")]
)
def test_the_policy_judges_all_steps_before_the_first(
    ordinary_place: MakePlace, edit: Callable[[Path], None], reason: str
) -> None:
    """A turn moves a directory and then changes another file. The move is refused, and the record says why.

    A preview gives the same answer, and the record gets no denial.
    """
    place = ordinary_place(policy=AGENT_RULES)
    place.does(_make, place.source)
    _call(place, "mark", name="move")
    place.does(lambda: (place.path / "docs/sub").rename(place.path / "bin/sub"))
    place.does(lambda: (place.path / "docs/b").write_text("changed\n"))
    _call(place, "mark", name="edit")
    place.does(edit, place.path / "bin/sub/a")
    count = sum(entry.result == "denied" for entry in place.entries())
    preview = _call(place, "undo.preview", turn="move")
    (conflict,) = preview["conflicts"]
    assert (conflict["path"], {each["path"] for each in preview["taken_back"]}) == ("docs/sub", {"docs/b"})
    assert reason in conflict["reason"]
    assert sum(entry.result == "denied" for entry in place.entries()) == count
    result = _call(place, "undo", turn="move")
    assert (result["conflicts"], result["failures"]) == ([conflict], [])
    assert result["taken_back"] == preview["taken_back"]
    assert (place.source / "docs/b").read_text() == "b\n"
    assert (place.source / "bin/sub/a").exists()
    denied = [entry for entry in place.entries() if entry.result == "denied"][count:]
    assert [entry.path for entry in denied] == (["docs/sub/a"] if edit is _script else [])
    assert _call(place, "undo", turn="edit")["conflicts"] == []
    assert (place.source / "bin/sub/a").read_text() == "text\n"


def test_a_directory_that_is_not_writable_is_a_conflict(ordinary_place: MakePlace) -> None:
    """The undo finds it before it changes another file of the turn."""
    place = ordinary_place(policy=AGENT_ALL)
    place.does(_make, place.source)
    for path in ("docs/b", "docs/sub/a"):
        place.does((place.path / path).unlink)
    (place.source / "docs/sub").chmod(0o555)
    result = _call(place, "undo", turn="last")
    assert [(each["path"], each["reason"]) for each in result["conflicts"]] == [
        ("docs/sub/a", "its directory is not writable")
    ]
    assert (result["failures"], [each["path"] for each in result["taken_back"]]) == ([], ["docs/b"])


@pytest.mark.root
def test_a_step_that_fails_stops_the_steps_below_its_names(own_place: MakePlace, tmp_path: Path) -> None:
    """Two directories were exchanged after a file in one of them changed: the exchange fails, and the file stays.

    The directories of the steps that were not made keep their times.
    """
    source = _make_source(tmp_path)
    (source / "bin/a").write_text("other\n")
    place = own_place(policy=AGENT_ALL)

    def change() -> None:
        (place.path / "docs/sub/a").unlink()
        (place.path / "docs/sub/new").write_text("new\n")
        os.rename(place.path / "bin", place.path / "free")
        os.rename(place.path / "docs/sub", place.path / "bin")
        os.rename(place.path / "free", place.path / "docs/sub")

    run_in_child(change)
    changed = state_of(source)
    faults = ("-e", "trace=renameat2", "-e", "inject=renameat2:error=EIO:when=1")
    result = faulty_undo(source, tmp_path / "log", "-P", str(source), "-P", str(source / "docs"), *faults)
    reasons = [failure["reason"] for failure in result["failures"]]
    assert reasons[0] == "Input/output error"
    assert set(reasons[1:]) == {"an earlier step of its files was not made"}
    assert result["taken_back"] == []
    assert state_of(source) == changed


@pytest.mark.parametrize("is_made", [False, True])
def test_the_operator_completes_an_agents_undo_under_the_policy_of_the_agent(
    own_place: MakePlace, tmp_path: Path, *, is_made: bool
) -> None:
    """The undo of an agent was killed, and a file of the moved directory became a script since: it stays in bin.

    `is_made`: the kill came after the move back. Then the directory returns to bin.
    """
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_RULES)
    (place.path / "docs/sub").rename(place.path / "bin/sub")
    place.umount()
    (source / "bin/sub/a").write_text(_SCRIPT)
    before = state_of(source)
    steps = [UndoStep("rename", "bin/sub", "change", {"to": "docs/sub"})]
    about = _about_agent(place)
    UndoJournal.begin(place.home / "undo", "killed", steps, about)
    if is_made:
        (place.home / "undo/killed.done").write_text(f"{(source / 'bin/sub').stat().st_ino} ")
        (source / "bin/sub").rename(source / "docs/sub")
    result = undo(place, path="docs/b")
    assert result["completed"] == 1
    (failure,) = result["failures"]
    assert failure["path"] == "bin/sub"
    assert "executable" in failure["reason"]
    assert without_directory_times(state_of(source)) == without_directory_times(before)


@pytest.mark.parametrize("name", ["sub", "x" + "é" * 110])
def test_a_refused_move_is_reversed_after_a_kill_although_its_old_name_is_taken(
    own_place: MakePlace, tmp_path: Path, name: str
) -> None:
    """The undo of an agent was killed after a move back that brought a script, and the agent took the old name."""
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_RULES)
    _script(source / "docs/sub/a")
    place.umount()
    (source / "bin" / name).mkdir()
    steps = [UndoStep("rename", f"bin/{name}", "change", {"to": "docs/sub"}, [stat.S_IFDIR])]
    about = _about_agent(place)
    UndoJournal.begin(place.home / "undo", "killed", steps, about)
    (place.home / "undo/killed.done").write_text(f"{(source / 'docs/sub').stat().st_ino} ")
    (failure,) = undo(place, path="nothing")["failures"]
    assert "executable" in failure["reason"]
    assert not (source / "docs/sub").exists()
    (moved,) = os.fsencode(next(source.glob("bin/*/a")).parent.name).decode().split(".")[:-1]
    assert name.startswith(moved)


def test_another_agent_learns_who_completes_a_killed_undo(own_place: MakePlace, tmp_path: Path) -> None:
    """Its own undo is refused: it may not act for the other agent."""
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_ALL)
    (place.path / "docs/b").unlink()
    about = {
        "source": str(source),
        "selection": "",
        "agent": "x",
        "principal": ["bob", "x", "agent"],
        "policy": {},
        "changes": [],
    }
    UndoJournal.begin(place.home / "undo", "killed", [], about)
    done = bonobofs("undo", "--turn", "last", cwd=place.path)
    assert done.returncode == 1
    assert "the next undo of bob or the operator's completes it" in done.stderr
    assert not (source / "docs/b").exists()


@pytest.mark.root
def test_a_directory_keeps_its_time_if_another_mount_changed_a_name_at_the_same_time(
    own_place: MakePlace, tmp_path: Path
) -> None:
    """The first mount reads the time after its change only when the second has made its own, which stays."""
    source = _make_source(tmp_path)
    first, second = own_place(policy=AGENT_ALL), own_place(policy=AGENT_ALL)
    delay = ("-e", "trace=mkdir,mkdirat", "-e", "inject=mkdir,mkdirat:delay_exit=1000000")
    with traced(first, tmp_path / "log", *delay), ThreadPoolExecutor() as pool:
        made = pool.submit(run_in_child, os.mkdir, first.path / "docs/first")
        until((source / "docs/first").exists, "the first change is made")
        run_in_child(os.mkdir, second.path / "docs/second")
        assert not made.done()
        made.result()
    time = (source / "docs").stat().st_mtime_ns
    result = undo(first, of_session=first.session.session)
    assert (result["conflicts"], os.listdir(source / "docs/second")) == ([], [])
    assert (source / "docs").stat().st_mtime_ns > time


def _about_agent(place: Place) -> dict[str, Any]:
    """Return what the journal of an agent's undo says of it, under AGENT_RULES."""
    principal = [place.session.agent, place.session.agent_id, place.session.role]
    policy = PolicyDocument.model_validate(tomllib.loads(AGENT_RULES)).model_dump(mode="json")
    about = {"source": str(place.source), "selection": "", "agent": principal[1], "principal": principal}
    return {**about, "policy": policy, "changes": []}


def _begin_killed(place: Place, *, steps: list[UndoStep], changes: list[list[str]]) -> None:
    """Leave the journal of an undo of the operator that was killed before its first step."""
    about = {"source": str(place.source), "selection": "", "changes": changes}
    UndoJournal.begin(place.home / "undo", "killed", steps, about)


def _killed_undo(place: Place, **selection: str) -> None:
    planned = undo(place, dry_run=True, **selection)
    steps = [UndoStep(**step) for step in planned["steps"]]
    _begin_killed(place, steps=steps, changes=[[each["change"], each["path"]] for each in planned["taken_back"]])


def test_a_file_that_changed_after_the_kill_is_not_removed_under_another_path(
    own_place: MakePlace, tmp_path: Path
) -> None:
    """The step that finds the change has another path than the removal, which comes after a move of the directory."""
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_ALL)
    (place.path / "docs/sub/new").write_text("new\n")
    (place.path / "docs/sub").rename(place.path / "bin/sub")
    (place.path / "bin/sub/new").chmod(0o600)
    place.umount()
    _killed_undo(place, agent="alice")
    (source / "bin/sub/new").write_text("work of the user\n")
    result = undo(place, path="nothing")
    assert [failure["path"] for failure in result["failures"]] == ["bin/sub/new", "docs/sub/new"]
    assert (source / "docs/sub/new").read_text() == "work of the user\n"


@pytest.mark.parametrize(("name", "levels", "stays"), [("n" * 200, 25, True), ("n", 1200, False)])
def test_a_deep_directory_leaves_the_undo_of_other_files(
    own_place: MakePlace, tmp_path: Path, name: str, levels: int, *, stays: bool
) -> None:
    """The longer path is longer than a system call takes: its changes are conflicts. The search for the other name of
    a linked file passes both directories."""
    source = _make_source(tmp_path)
    os.link(source / "docs/b", source / "z")
    place = own_place(policy=AGENT_ALL)

    def make_deep() -> None:
        os.chdir(place.path / "docs")
        for _ in range(levels):
            os.mkdir(name)
            os.chdir(name)

    run_in_child(make_deep)
    (place.path / "docs/b").unlink()
    (place.path / "docs/sub/a").write_text("two\n")
    result = undo(place, agent="alice")
    assert result["failures"] == []
    reasons = {each["reason"] for each in result["conflicts"]}
    assert reasons == (
        {"the source cannot be read: File name too long", "the directory has other files"} if stays else set()
    )
    assert (source / "docs/b").samefile(source / "z")
    assert (source / "docs/sub/a").read_text() == "text\n"
    assert (source / "docs" / name).exists() == stays


def test_a_kept_content_that_a_power_loss_cut_is_a_conflict(own_place: MakePlace, tmp_path: Path) -> None:
    """No step is made: the replacement of a file would be removed first, and then the file could not be restored."""
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_ALL)
    with stopped(companion_of(place.pid)):  # it hashes nothing
        (place.path / "docs/b").unlink()
        (place.path / "bin/new").write_text("new\n")
        (place.path / "bin/new").rename(place.path / "docs/sub/a")
        for number, size in enumerate((5, 2)):
            (image,) = [each for each in _images(place) if each.stat().st_size == size]
            os.truncate(image, number)
    place.umount()
    before = state_of(source)
    result = undo(place, agent="alice")
    assert (result["failures"], result["steps"]) == ([], [])
    assert {each["path"] for each in result["conflicts"]} == {"docs/b", "bin/new"}
    assert state_of(source) == before


def test_scratch_and_staged_files_are_not_kept(own_place: MakePlace, tmp_path: Path) -> None:
    """Each is written in two turns and removed; a file of the source is kept as an example."""
    _make_source(tmp_path)
    rules = """
default = "deny"
temporary = ["docs/*.tmp"]
[[scratch]]
paths = ["build/"]
[[rule]]
name = "text"
paths = ["docs/b"]
"""
    place = own_place(policy=rules)
    (place.path / "build").mkdir()
    for path in (place.path / "build/log", place.path / "docs/note.tmp"):
        path.write_text("one\n")
        assert bonobofs("mark", "next", cwd=place.path).returncode == 0
        path.write_text("two two\n")
        path.unlink()
    assert _images(place) == []
    (place.path / "docs/b").write_text("two\n")
    (image,) = (place.home / "undo" / place.session.session).iterdir()
    assert image.read_bytes().endswith(b"b\n")


def test_a_directory_gets_its_time_back_after_two_kills(own_place: MakePlace, tmp_path: Path) -> None:
    """The first kill came between the second removal and its note, the second one before the time was set."""
    source = _make_source(tmp_path)
    time = (source / "docs").stat().st_mtime_ns
    place = own_place(policy=AGENT_ALL)
    for name in ("a", "b"):
        (place.path / "docs" / f"new-{name}").touch()
    place.umount()
    kill = ("-e", "trace=utimensat", "-e", "inject=utimensat:signal=KILL")
    for resumed in (False, True):
        with traced_undo(source, tmp_path / "log", *kill) as killed:
            killed.communicate()
        assert killed.returncode == -signal.SIGKILL
        (done,) = (place.home / "undo").glob("*.done")
        first, *notes = done.read_bytes().split(b".")
        assert len(notes) == 2
        if not resumed:
            assert b"@" in notes[0]
            done.write_bytes(first + b".")
    assert undo(place, path="nothing")["failures"] == []
    assert not list((source / "docs").glob("new-*"))
    assert (source / "docs").stat().st_mtime_ns == time


def test_a_name_that_is_too_long_leaves_the_search_in_its_directory(own_place: MakePlace, tmp_path: Path) -> None:
    """The other name of the file lies in a directory beside a name whose path no system call takes."""
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_ALL)

    def make_deep() -> None:
        os.chdir(source)
        while len(os.getcwd()) < 3850:
            os.mkdir("n" * 100)
            os.chdir("n" * 100)
        os.mkdir("a" * 250)
        os.link(source / "docs/b", "z")

    run_in_child(make_deep)
    (place.path / "docs/b").unlink()
    result = undo(place, agent="alice")
    assert (result["failures"], result["conflicts"]) == ([], [])
    assert (source / "docs/b").stat().st_nlink == 2


@pytest.mark.root
def test_a_directory_that_takes_the_path_during_a_step_stays(own_place: MakePlace, tmp_path: Path) -> None:
    """The user exchanges two directories after the undo has found its file, and before it writes."""
    source = _make_source(tmp_path)
    (source / "bin/a").write_text("work of the user\n")
    place = own_place(policy=AGENT_ALL)
    (place.path / "docs/sub/a").write_text("two\n")
    place.umount()
    delay = ("-e", "trace=linkat", "-e", "inject=linkat:delay_enter=2000000", "-P", str(source / "docs/sub"))
    with traced_undo(source, tmp_path / "log", *delay) as tracer:
        until(
            lambda: any(_is_in_call(child, _LINKAT) for child in proc.children(tracer.pid)),
            "the undo keeps the content that it replaces",
        )
        _exchange(source / "docs/sub", source / "bin")
        result = json.loads(tracer.communicate()[0])
    assert [(each["path"], each["reason"]) for each in result["failures"]] == [
        ("docs/sub/a", "the file was changed while it was taken back")
    ]
    assert ((source / "docs/sub/a").read_text(), (source / "bin/a").read_text()) == ("work of the user\n", "two\n")


@pytest.mark.root
def test_a_file_that_changes_while_its_old_content_is_copied_stays(own_place: MakePlace, tmp_path: Path) -> None:
    """The user writes after the undo has compared the file, and before the copy replaces it."""
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_ALL)
    (place.path / "docs/sub/a").write_text("two\n")
    place.umount()
    delay = ("-e", "trace=fchmod", "-e", "inject=fchmod:delay_enter=2000000")
    log = tmp_path / "log"
    with traced_undo(source, log, *delay) as tracer:
        until(lambda: log.exists() and "fchmod" in log.read_text(), "the undo copies the old content")
        (source / "docs/sub/a").write_text("work of the user\n")
        result = json.loads(tracer.communicate()[0])
    assert [(each["path"], each["reason"]) for each in result["failures"]] == [
        ("docs/sub/a", "the file was changed while it was taken back")
    ]
    assert (source / "docs/sub/a").read_text() == "work of the user\n"
    assert os.listdir(source / "docs/sub") == ["a"]


def _set_mode(path: Path) -> None:
    path.chmod(0o600)


def _set_time(path: Path) -> None:
    os.utime(path, ns=(1, 10**18))


def _set_xattr(path: Path) -> None:
    os.setxattr(path, "user.color", b"red")


def _rename(path: Path) -> None:
    path.rename(path.parent / "moved")


def _write(path: Path) -> None:
    path.write_text("two\n")


def _create(path: Path) -> None:
    (path.parent / "new").write_text("new\n")


@pytest.mark.root
@pytest.mark.parametrize(
    ("change", "call", "now"),
    [
        (_set_mode, "chmod", "docs/b"),
        (_set_time, "utimensat", "docs/b"),
        (_set_xattr, "removexattr", "docs/b"),
        (_rename, "renameat2", "docs/moved"),
        (_write, "renameat2", "docs/b"),
        (_create, "renameat", "docs/new"),
    ],
)
def test_a_file_that_takes_the_name_during_a_step_stays(
    own_place: MakePlace, tmp_path: Path, change: Callable[[Path], None], call: str, now: str
) -> None:
    """The user exchanges two files after the undo has compared one, and before it changes it."""
    source = _make_source(tmp_path)
    before = state_of(source)
    place = own_place(policy=AGENT_ALL)
    change(place.path / "docs/b")
    place.umount()
    changed = state_of(source)
    log = tmp_path / "calls"
    delay = ("-e", f"trace={call}", "-e", f"inject={call}:delay_enter=2000000:when=1")
    with traced_undo(source, log, *delay) as tracer:
        until(lambda: log.exists() and call in log.read_text(), "the undo changes the file")
        _exchange(source / now, source / "docs/sub/a")
        result = json.loads(tracer.communicate()[0])
    _exchange(source / now, source / "docs/sub/a")
    if call.startswith("renameat"):
        assert [each["reason"] for each in result["failures"]] == ["the file was changed while it was taken back"]
        before = changed
    else:
        assert result["failures"] == []
    assert without_directory_times(state_of(source)) == without_directory_times(before)


@pytest.mark.root
@pytest.mark.parametrize("change", [_write, _create])
def test_a_step_whose_last_call_fails_is_reversed(
    own_place: MakePlace, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """The file that a step has moved to a temporary name cannot be removed. The next undo takes the change back."""
    source = _make_source(tmp_path)
    before = state_of(source)
    place = own_place(policy=AGENT_ALL)
    change(place.path / "docs/b")
    place.umount()
    changed = state_of(source)
    faults = ("-e", "trace=unlinkat", "-e", "inject=unlinkat:error=EIO")
    result = faulty_undo(source, tmp_path / "log", *faults)
    assert [each["reason"] for each in result["failures"]] == ["Input/output error"]
    for stray in source.rglob(".bonobofs-*"):
        stray.unlink()
    assert without_directory_times(state_of(source)) == without_directory_times(changed)
    assert undo(place, agent="alice")["failures"] == []
    assert without_directory_times(state_of(source)) == without_directory_times(before)


@pytest.mark.parametrize("do", ["link", "symlink", "mkdir", "rename"])
def test_a_file_that_takes_the_name_of_a_killed_step_stays(own_place: MakePlace, tmp_path: Path, do: str) -> None:
    """The undo of an agent was killed before a step, and the user creates a script or its directory at the new path.

    The file that a rename step moves was moved elsewhere.
    """
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_RULES)
    place.umount()
    if do == "mkdir":
        (source / "docs/new").mkdir()
    _script(source / "docs/new/script" if do == "mkdir" else source / "docs/new")
    before = state_of(source)
    state = {"mode": 0o777, "uid": os.getuid(), "gid": os.getgid(), "mtime": 10**18}
    arguments = {"of": "docs/b"} if do == "link" else {"target": "b", "xattrs": {}, **state}
    step, reason = UndoStep(do, "docs/new", "change", arguments), "File exists"
    if do == "rename":
        number = (source / "docs/b").stat().st_ino
        (source / "docs/b").rename(source / "moved")
        before = state_of(source)
        expected = expectation(stat.S_IFREG, 2, 0)
        step = UndoStep(do, "docs/b", "change", {"to": "docs/new"}, expected)
        reason = "the file was changed while it was taken back"
    about = _about_agent(place)
    UndoJournal.begin(place.home / "undo", "killed", [step], about)
    if do == "rename":
        (place.home / "undo/killed.done").write_text(f"{number} ")
    result = undo(place, path="nothing")
    assert [(each["path"], each["reason"]) for each in result["failures"]] == [(step.path, reason)]
    assert state_of(source) == before


@pytest.mark.parametrize("target", ["..", "missing"])
def test_a_directory_that_became_a_symlink_fails_its_steps_only(
    own_place: MakePlace, tmp_path: Path, target: str
) -> None:
    """The journal of the killed undo does not stay, and other files are taken back."""
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_ALL)
    (place.path / "docs/sub/a").unlink()
    (place.path / "docs/b").unlink()
    place.umount()
    _killed_undo(place, agent="alice")
    (source / "docs/sub").rmdir()
    (source / "docs/sub").symlink_to(target)
    result = undo(place, path="nothing")
    assert [failure["path"] for failure in result["failures"]] == ["docs/sub/a"]
    assert (source / "docs/b").read_text() == "b\n"
    assert undo(place, path="nothing")["completed"] == 0


@pytest.mark.parametrize("name", ["docs/sub", "docs/b"])
def test_no_step_follows_a_symlink_that_replaced_its_file(own_place: MakePlace, tmp_path: Path, name: str) -> None:
    """An agent may replace a file by a symlink between the plan and the step. Size and time of both may be equal."""
    source = _make_source(tmp_path)
    (outside := tmp_path / "outside").mkdir(mode=0o700)
    (source / "docs/b").write_bytes(bytes(len(str(outside))))
    place = own_place(policy=AGENT_ALL)
    (place.path / name).chmod(0o640)
    (place.path / "bin/new").touch()
    place.umount()
    _killed_undo(place, agent="alice")
    time = (source / name).stat().st_mtime_ns
    (source / name).rename(source / "moved")
    (source / name).symlink_to(outside)
    os.utime(source / name, ns=(time, time), follow_symlinks=False)
    result = undo(place, path="nothing")
    assert [failure["path"] for failure in result["failures"]] == [name]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (outside, source / "moved")] == [0o700, 0o640]
    assert not (source / "bin/new").exists()


def test_a_file_that_replaced_a_symlink_is_not_removed(own_place: MakePlace, tmp_path: Path) -> None:
    """The agent created the symlink, and the user replaced it after the plan was made."""
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_ALL)
    (place.path / "bin/link").symlink_to("../docs/b")
    place.umount()
    _killed_undo(place, agent="alice")
    (source / "bin/link").unlink()
    (source / "bin/link").write_text("work of the user\n")
    result = undo(place, path="nothing")
    assert [failure["path"] for failure in result["failures"]] == ["bin/link"]
    assert (source / "bin/link").read_text() == "work of the user\n"


_RENAMEAT2 = "316 ", "276 "
"""The system call in /proc/PID/syscall: on x86-64, and elsewhere."""
_LINKAT = "265 ", "37 "


def _is_in_call(pid: int, call: tuple[str, str]) -> bool:
    return any(text.startswith(call) for text in proc.threads(pid, "syscall").values())


@pytest.mark.root
@pytest.mark.parametrize("takes_name", [False, True])
def test_a_file_that_the_agent_changes_during_the_move_stays(
    own_place: MakePlace, tmp_path: Path, *, takes_name: bool
) -> None:
    """The file becomes a script after the policy has judged the move back, and before the move.

    `takes_name`: the agent also makes another directory at the path that is free meanwhile.
    """
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_RULES)
    _call(place, "mark", name="move")
    (place.path / "docs/sub").rename(place.path / "bin/sub")
    _call(place, "mark", name="script")
    companion = companion_of(place.pid)
    delay = ("-e", "trace=renameat2", "-e", "inject=renameat2:delay_enter=2000000:delay_exit=2000000:when=1")
    with traced(place, tmp_path / "log", *delay, process=companion), ThreadPoolExecutor() as pool:
        taken_back = pool.submit(_call, place, "undo", turn="move")
        until(lambda: _is_in_call(companion, _RENAMEAT2), "the policy has judged the move back")
        (place.path / "bin/sub/a").write_text(_SCRIPT)
        if takes_name:
            until((source / "docs/sub").exists, "the directory has moved")
            (source / "bin/sub").mkdir()
        result = taken_back.result()
    (failure,) = result["failures"]
    assert "executable" in failure["reason"]
    assert not (source / "docs/sub").exists()
    moved = [name for name in os.listdir(source / "bin") if (source / "bin" / name / "a").exists()]
    assert [name.startswith("sub.") for name in moved] == [takes_name]
    denied = [entry for entry in place.entries() if entry.result == "denied"]
    assert [entry.path for entry in denied] == ["docs/sub/a"]


@pytest.mark.root
def test_the_reversal_of_a_move_leaves_another_directory(own_place: MakePlace, tmp_path: Path) -> None:
    """The user exchanges two directories after a move back has brought a script, and before its reversal."""
    source = _make_source(tmp_path)
    (source / "other/sub").mkdir(parents=True)
    _script(source / "other/sub/a")
    place = own_place(policy=AGENT_RULES)
    _call(place, "mark", name="move")
    (place.path / "docs/sub").rename(place.path / "bin/sub")
    companion = companion_of(place.pid)
    delay = ("-e", "trace=renameat2", "-e", "inject=renameat2:delay_enter=2000000:delay_exit=2000000:when=1")
    with traced(place, tmp_path / "log", *delay, process=companion), ThreadPoolExecutor() as pool:
        taken_back = pool.submit(_call, place, "undo", turn="move")
        until((source / "docs/sub").exists, "the directory has moved")
        _exchange(source / "docs", source / "other")
        result = taken_back.result()
    (failure,) = result["failures"]
    assert (failure["path"], (source / "docs/sub/a").read_text()) == ("bin/sub", _SCRIPT), list(source.rglob("*"))


def test_the_policy_judges_the_content_that_a_move_brings(own_place: MakePlace, tmp_path: Path) -> None:
    """A file is changed, moved and changed again. The move back would bring the last content, which is too large."""
    source = _make_source(tmp_path)
    place = own_place(policy=AGENT_RULES)
    (place.path / "docs/sub/a").write_text("two\n")
    (place.path / "docs/sub/a").rename(place.path / "bin/a")
    (place.path / "bin/a").write_text("x" * 2000)
    (place.path / "docs/b").write_text("c\n")
    changed = state_of(source)
    result = json.loads(bonobofs("undo", "--turn", "last", "--json", cwd=place.path).stdout)
    assert result["failures"] == []
    assert {each["path"] for each in result["conflicts"]} == {"docs/sub/a", "bin/a"}
    after = state_of(source)
    assert [after[path] for path in ("bin/a", "bin")] == [changed[path] for path in ("bin/a", "bin")]
    assert (source / "docs/b").read_text() == "b\n"


@pytest.mark.root
@pytest.mark.parametrize(
    ("kind", "first", "back"),
    [
        *((kind, "chmod 750", "chmod 700") for kind in ("docs/b", "docs/sub")),
        *((kind, "chown 1:1", "chown 0:0") for kind in ("docs/b", "docs/sub")),
        *((kind, "touch -d @1000000000", "touch -d @500000000") for kind in ("docs/b", "docs/sub")),
    ],
)
def test_an_attribute_that_a_later_turn_set_back_is_a_conflict(
    own_place: MakePlace, tmp_path: Path, kind: str, first: str, back: str
) -> None:
    """Taken back in this order, the first turn would stay as what the second turn found."""
    source = _make_source(tmp_path)
    for prepare in ("chmod 700", "chown 0:0", "touch -d @500000000"):
        subprocess.run([*prepare.split(), source / kind], check=True)
    before = state_of(source)
    place = own_place(policy=AGENT_ALL)
    for turn, command in (("first", first), ("back", back)):
        assert bonobofs("mark", turn, cwd=place.path).returncode == 0
        subprocess.run([*command.split(), place.path / kind], check=True)
    assert state_of(source) == before
    (conflict,) = undo(place, turn="first")["conflicts"]
    assert (conflict["path"], "was changed afterwards" in conflict["reason"]) == (kind, True)
    assert state_of(source) == before
    for turn in ("back", "first"):
        result = undo(place, turn=turn)
        assert (result["conflicts"], result["failures"]) == ([], [])
    assert state_of(source) == before


@pytest.mark.root
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("error=EIO", ""), ("signal=KILL", "the session ended before it recorded how the change ended")],
)
def test_a_guard_that_fails_after_it_replaced_a_file_hides_no_change(
    own_place: MakePlace, tmp_path: Path, fault: str, reason: str
) -> None:
    """The server knows that the sync of the directory has failed, and not how the call of a killed companion ended."""
    place = own_place()
    file = place.source / "a"
    file.write_text("precious\n")
    options = ("-P", str(place.source), "-e", "trace=fsync", "-e", f"inject=fsync:{fault}")
    with traced(place, tmp_path / "log", *options, process=companion_of(place.pid)):
        with pytest.raises((OSError, BonobofsError)):
            _call(place, "write_file", path="a", content="agent\n")
        until(lambda: any(entry.result == "error" for entry in place.entries()), "the outcome is recorded")
    assert file.read_text() == "agent\n"
    result = undo(place, agent="alice")
    assert [each["reason"] for each in result["conflicts"]] == [reason] * bool(reason)
    assert file.read_text() == ("agent\n" if reason else "precious\n")
