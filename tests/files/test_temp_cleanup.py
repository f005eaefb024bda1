"""The next session removes the temporary names of a killed process, and no other file."""

from __future__ import annotations

import os
from pathlib import Path

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import read
from bonobofs.audit.temp_cleanup import Stray, stray_name, strays_of
from bonobofs.audit.verify import describe_below, verify
from bonobofs.guards import FileGuard
from bonobofs.session import open_session
from bonobofs.state.sessions import load_all, note_ends
from tests.files.conftest import Program
from tests.support.world import ALLOW_ALL, Mounted

KILLED = """
import json, signal
if not os.fork():
    with open_session(sys.argv[1], agent="alice") as session:
        for operation, path, details in json.loads(sys.argv[2]):
            session.guard.trail.intent(operation, path, "modify", "artifacts", details=details)
        os.kill(os.getpid(), signal.SIGKILL)
os.wait()
"""
NAMES = [stray_name() for _ in range(6)]


def killed(program: Program, source: Path, *intents: tuple[str, str, dict[str, object]]) -> None:
    """A session that was killed with these intents at the end of its record."""
    program(KILLED.replace("json.loads(sys.argv[2])", repr(list(intents))), source)


def removals(entries: list[AuditEntry]) -> list[str]:
    return [entry.path for entry in entries if (entry.kind, entry.operation) == ("event", "remove_temporary")]


def test_a_temporary_name_is_in_the_directory_of_its_target(program: Program, home: Path, source: Path) -> None:
    """For a rename, the target is the new name."""
    (source / "a/b").mkdir(parents=True)
    killed(
        program,
        source,
        ("rename", "a/sedAbCdEf", {"to": "a/b/plan.md", "by": NAMES[0]}),
        ("link", "plan.md", {"from": "a/b/x", "by": NAMES[1], "inode": 7}),
        ("write_file", "a/plan.md", {"by": "plan.md"}),
        ("write_file", "a/plan.md", {"by": f"../{NAMES[2]}"}),
        ("write_file", "a/plan.md", {"by": 7}),
        ("write_file", "a/plan.md", {"by": NAMES[3], "to": 7}),
    )
    found = strays_of(home, source)
    assert [(each.path, each.inodes) for each in found] == [
        (f"a/b/{NAMES[0]}", []),
        (NAMES[1], [7]),
        (f"a/{NAMES[3]}", []),
    ]
    assert strays_of(home, source / "a") == []
    (report,) = verify(home / "trails", describe=lambda _: describe_below(source))
    assert report.unfinished[0].shows == f"a/sedAbCdEf: absent; a/b/plan.md: absent; a/b/{NAMES[0]}: absent"


def test_only_the_last_ended_sessions_are_searched_again(program: Program, home: Path, source: Path) -> None:
    """The cost of a mount must not grow with the number of earlier sessions."""
    killed(program, source, ("write_file", "plan.md", {"by": NAMES[0]}))
    (session,) = load_all(home)
    for _ in range(8):
        program("with open_session(sys.argv[1], agent='alice'): pass", source)
        assert len(strays_of(home, source)) == 1, "its end is not recorded yet"
    note_ends(home, [session.session])
    assert strays_of(home, source) == []


def test_the_next_mount_removes_and_records_the_temporary_name(
    program: Program, mounted: Mounted, source: Path
) -> None:
    """The file is removed before the mount serves. No other file is touched."""
    (source / "a").mkdir()
    for name in NAMES[:3]:
        (source / "a" / name).write_text("half done")
    (source / "a/plan.md").write_text("whole")
    killed(
        program,
        source,
        ("rename", "x.tmp", {"to": "a/plan.md", "by": NAMES[0]}),
        ("write_file", "a/plan.md", {"by": NAMES[1]}),
    )
    world = mounted(policy=ALLOW_ALL, source=source)
    assert sorted(os.listdir(world.path / "a")) == sorted([NAMES[2], "plan.md"])
    assert sorted(os.listdir(source / "a")) == sorted([NAMES[2], "plan.md"])
    assert sorted(removals(world.entries())) == sorted([f"a/{NAMES[0]}", f"a/{NAMES[1]}"])


def test_only_the_declared_inode_is_removed(program: Program, home: Path, source: Path) -> None:
    """Another file, which an undo had renamed, returns to its name. No symlink in the path is followed."""
    elsewhere = source.parent / "elsewhere"
    elsewhere.mkdir()
    (source / "out").symlink_to(elsewhere)
    (source / "docs").mkdir()
    (source / "inside").symlink_to("docs")
    kept = [source / NAMES[0], elsewhere / NAMES[1], source / "docs" / NAMES[2]]
    for path in kept:
        path.write_text("kept")
    (source / NAMES[3]).mkdir()
    (source / NAMES[4]).write_text("left")
    (source / NAMES[5]).symlink_to("nowhere")
    killed(
        program,
        source,
        ("rename", "x", {"to": "plan.md", "by": NAMES[0], "inode": kept[0].stat().st_ino + 1}),
        ("rename", "x", {"to": "out/plan.md", "by": NAMES[1]}),
        ("rename", "x", {"to": "inside/plan.md", "by": NAMES[2]}),
        ("rename", "x", {"to": "plan.md", "by": NAMES[3]}),
        ("rename", "x", {"to": "plan.md", "by": NAMES[4], "inode": (source / NAMES[4]).stat().st_ino}),
        ("rename", "x", {"to": "plan.md", "by": NAMES[5]}),
    )
    with open_session(source, agent="bob") as session:
        FileGuard(session).close()
        entries = list(read(session.guard.trail.path))
    assert removals(entries) == [NAMES[4], NAMES[5]]
    kept[0] = source / "plan.md"
    assert [path.read_text() for path in kept] == ["kept"] * 3
    assert [entry.path for entry in entries if entry.operation == "return_file"] == [NAMES[0]]
    assert (source / NAMES[3]).is_dir()
    assert not os.path.lexists(source / NAMES[5])


def test_a_finished_change_needs_no_cleanup(program: Program, home: Path, source: Path) -> None:
    """The outcome says that the name was released. The next session does not search for it."""
    program(
        """
import signal
if not os.fork():
    with open_session(sys.argv[1], agent="alice") as session:
        trail = session.guard.trail
        for result in (0, 5):
            seq = trail.intent("rename", "x", "modify", "r", details={"to": "y", "by": sys.argv[2 + bool(result)]})
            trail.outcome(seq, "rename", "x", error=result)
        os.kill(os.getpid(), signal.SIGKILL)
os.wait()
""",
        source,
        NAMES[0],
        NAMES[1],
    )
    (stray,) = strays_of(home, source)
    assert isinstance(stray, Stray)
    assert stray.path == NAMES[1]
