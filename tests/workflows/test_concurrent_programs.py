"""Several processes at once: databases, locks, and watchers of changes through the mount."""

from __future__ import annotations

import re
import sys

from tests.workflows.line_program import Beside
from tests.workflows.workshop import PACKAGES, Place, workflow

WRITER = """
import sqlite3, sys
base = sqlite3.connect("data/notes.db", timeout=30, isolation_level=None)
mode = base.execute("PRAGMA journal_mode = WAL").fetchone()[0]
base.execute("CREATE TABLE IF NOT EXISTS note (who TEXT, number INTEGER)")
print(mode, flush=True)
for line in sys.stdin:
    first, last = map(int, line.split())
    for number in range(first, last):
        base.execute("INSERT INTO note VALUES (?, ?)", (sys.argv[1], number))
    print(base.execute("SELECT count(*) FROM note").fetchone()[0], flush=True)
"""

DUMP = """
import sqlite3
base = sqlite3.connect("data/notes.db")
print(base.execute("PRAGMA integrity_check").fetchone()[0], *base.execute("SELECT * FROM note ORDER BY 1, 2"))
"""

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
fcntl.flock(file, fcntl.LOCK_UN)
fcntl.lockf(file, fcntl.LOCK_EX, 4)
print("locked", flush=True)
sys.stdin.readline()
"""

TRY_LOCKF = """
import fcntl
file = open("aidlc-docs/plan.md", "r+")
for start in (0, 4):
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 4, start)
        print("free")
    except BlockingIOError:
        print("locked")
"""

WATCHDOG = """
import sys
from watchdog.events import FileSystemEventHandler
from watchdog.observers import Observer

class Say(FileSystemEventHandler):
    def on_any_event(self, event):
        if not event.is_directory and event.event_type in ("created", "modified", "moved", "deleted", "closed"):
            print(event.event_type, event.src_path, event.dest_path, flush=True)

observer = Observer()
observer.schedule(Say(), ".", recursive=True)
observer.start()
print("ready", flush=True)
sys.stdin.readline()
observer.stop()
observer.join()
"""

CHOKIDAR = """
const chokidar = require('chokidar');
const watcher = chokidar.watch('.', { ignoreInitial: true });
watcher.on('all', (event, path) => console.log(event, path));
watcher.on('ready', () => console.log('ready'));
process.stdin.on('end', () => watcher.close()).resume();
"""


def data(at: Place) -> None:
    (at / "data").mkdir()


@workflow(data)
def test_two_processes_write_sqlite_in_turn(at: Place) -> list[str]:
    """They write one database in WAL mode, and each sees the other's rows."""
    first = at.start(sys.executable, "-c", WRITER, "a")
    said = [*first.until("wal"), first.ask("0 10")]
    second = at.start(sys.executable, "-c", WRITER, "b")
    said += second.until("wal")
    for number in range(10, 50, 10):
        said += [writer.ask(f"{number} {number + 10}") for writer in (first, second)]
    assert at.names("data") == ["notes.db", "notes.db-shm", "notes.db-wal"]
    first.permit()
    second.permit()
    assert said[-1] == "90"
    return [*said, *at.names("data"), at.run(sys.executable, "-c", DUMP)]


@workflow(data, layer=["data/notes.db"])
def test_two_processes_write_sqlite_concurrently(at: Place) -> str:
    """They write one database in WAL mode, and no row is lost; the order is random."""
    writers = []
    for who in ("a", "b"):
        writers.append(at.start(sys.executable, "-c", WRITER, who))
        writers[-1].until("wal")  # to change the mode is what SQLite does not wait for
    for writer in writers:
        writer.tell("0 100")
    for writer in writers:
        writer.until(".*")
        writer.permit()
    said = at.run(sys.executable, "-c", DUMP)
    assert said.startswith("ok ")
    assert said.count("('a', ") == said.count("('b', ") == 100
    return said


@workflow()
def test_flock_excludes_other_processes(at: Place) -> list[str]:
    """A file that one process has locked, completely or in part, is locked for another until it is released."""
    holder = at.start(sys.executable, "-c", HOLDER, "aidlc-docs/plan.md")
    assert holder.line() == "held"
    at.run("flock", "--nonblock", "--conflict-exit-code=9", "aidlc-docs/plan.md", "true", code=9)
    assert holder.ask("let go") == "locked"
    said = [
        at.run("flock", "--nonblock", "aidlc-docs/plan.md", "echo", "mine"),
        at.run(sys.executable, "-c", TRY_LOCKF),
    ]
    holder.permit()
    assert said == ["mine\n", "locked\nfree\n"]
    return [*said, at.run(sys.executable, "-c", TRY_LOCKF)]


Change = tuple[tuple[str, ...], str]
"""A command, and the last line that a watcher says of what it did."""


def _watch(watcher: Beside, at: Place, *changes: Change) -> list[str]:
    """What a watcher said of the changes, each made when it had spoken of the one before; each line once, sorted."""
    watcher.until("ready")
    said: set[str] = set()
    for command, line in changes:
        at.run(*command)
        said |= set(watcher.until(line))
    watcher.permit()
    return sorted({re.sub(r"sed\w{6}", "sedXXXXXX", line) for line in said})


@workflow()
def test_watchdog_reports_changes(at: Place) -> list[str]:
    """watchdog sees files created, written, replaced, moved and removed through the mount."""
    return _watch(
        at.start(sys.executable, "-c", WATCHDOG, env={"PYTHONPATH": PACKAGES}),
        at,
        (("cp", "aidlc-docs/plan.md", "templates/copy.md"), "closed ./templates/copy.md "),
        (("cp", "templates/plan.md", "aidlc-docs/plan.md"), "closed ./aidlc-docs/plan.md "),
        (("sed", "-i", "s/Plan/PLAN/", "aidlc-docs/plan.md"), "moved ./aidlc-docs/sed.* ./aidlc-docs/plan.md"),
        (("mv", "templates/plan.md", "templates/moved.md"), "moved ./templates/plan.md ./templates/moved.md"),
        (("rm", "orchestrator/sum.py"), "deleted ./orchestrator/sum.py "),
    )


@workflow()
def test_chokidar_reports_changes(at: Place) -> None:
    """chokidar sees files and directories added, changed, replaced and removed through the mount."""
    # What more it says, of temporary names and the like, is chance on the bare directory too.
    _watch(
        at.start("node", "-e", CHOKIDAR, env={"NODE_PATH": "/usr/share/nodejs"}),
        at,
        (("cp", "aidlc-docs/plan.md", "templates/copy.md"), "add templates/copy.md"),
        (("cp", "templates/plan.md", "aidlc-docs/plan.md"), "change aidlc-docs/plan.md"),
        (("sed", "-i", "s/Design/design/", "aidlc-docs/design.md"), "change aidlc-docs/design.md"),
        (("mkdir", "aidlc-docs/units/unit-3"), "addDir aidlc-docs/units/unit-3"),
        (("rm", "orchestrator/sum.py"), "unlink orchestrator/sum.py"),
    )


@workflow()
def test_entr_runs_its_command_after_a_change(at: Place) -> None:
    """After a write through the mount, and after a replacement of the file."""
    entr = at.start("entr", "-n", "sh", "-c", "cat aidlc-docs/plan.md; echo end")
    entr.tell("aidlc-docs/plan.md")
    entr.close_input()
    assert entr.until("end") == ["one", "two", "three", "end"]
    _repeat(entr, at, ("cp", "templates/plan.md", "aidlc-docs/plan.md"), ["# Plan", "end"])
    _repeat(entr, at, ("sed", "-i", "s/Plan/PLAN/", "aidlc-docs/plan.md"), ["# PLAN", "end"])


def _repeat(entr: Beside, at: Place, command: tuple[str, ...], wanted: list[str]) -> None:
    """Make a change until entr says what is wanted: it overlooks one that is made while its own command ends."""
    said: list[str] = []
    for _ in range(100):
        at.run(*command)
        while said != wanted and (line := entr.line(0.3)) is not None:
            said = [line, *entr.until("end")]
        if said == wanted:
            return
    raise AssertionError(f"entr did not see {command}, but said {said}")
