"""The attacks of a hostile agent that slow down or stop others. Each attack is one row of ATTACKS.

An attack repeats its act until it is killed. An act that fails with OSError ends one turn; the next turn follows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import string
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bonobofs.errors import BonobofsError
from bonobofs.ipc.client import call
from tests.attacks.directory_lock import hold

CROWD = 50_000
"""Files of the directory that is moved."""
WIDE = 20_500
"""Subdirectories of the directory that is moved."""
LINKS = 20_000
DEEP = 1_800
"""Levels of the directory that is moved."""
LONG_PATH = 600
"""Levels with names of 250 bytes: a path of 150 KB."""
REMOVED = 700
LARGE = 400 << 20
YEAR = 366 * 24 * 3600
MIB = 1 << 20

POLICY = """\
default = "allow"
hidden = ["**"]
temporary = ["**/*.tmp"]

[[protect]]
paths = ["**/closed/"]

[[scratch]]
paths = ["**/build/"]
max_total = "20MB"

[[rule]]
name = "notes"
paths = ["**/notes/"]
suffixes = [".md"]
"""
"""Admits what the attacks need, and refuses or holds the rest."""


class Agent(NamedTuple):
    """Where the hostile agent works."""

    mount: Path
    arena: Path
    """Its own directory in the mount."""
    inside: Path
    """The directory of the session's socket."""
    own: Path
    """An empty directory outside the mounts."""


Act = Callable[[Agent, int], None]
opened_files: list[int] = []
"""What `unlink_open` has open."""


class Attack(NamedTuple):
    """One row: the act with the number of its turn, and what the operator puts into the arena before the mount."""

    act: Act
    prepare: Callable[[Path], None] | None = None
    beside: Callable[[Path], None] | None = None
    """What the operator does meanwhile in the arena, by the path of the source."""


def run(attack: Attack, agent: Agent, count: Callable[[], None]) -> None:
    """Repeat the act until this process is killed. `count` is called after each turn that did not fail."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for turn in itertools.count():
        with contextlib.suppress(OSError, BonobofsError):
            attack.act(agent, turn)
            count()


def descend(top: Path, names: Iterator[str]) -> int:
    """Make directories in each other, below `top`, and return a descriptor of the last."""
    fd = os.open(top, os.O_RDONLY)
    for name in names:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    return fd


def _swap(one: Path, other: Path) -> None:
    """Rename whichever of the two exists onto the other name."""
    os.rename(*((one, other) if one.exists() else (other, one)))


def stat_whoami(agent: Agent, turn: int) -> None:
    os.stat(agent.mount / ".bonobofs/whoami.json")


def loop_leases(agent: Agent, turn: int) -> None:
    call(agent.inside, "lease.acquire", patterns=["arena/**", f"arena/{turn}/*.py"], seconds=60)
    call(agent.inside, "lease.release")


def open_denials(agent: Agent, turn: int) -> None:
    """Keep 250 versions open at once."""
    opened = []
    for number in range(250):
        with contextlib.suppress(OSError):
            os.mkdir(agent.arena / "closed" / str(turn % 7) / str(number))
        opened.append(os.open(agent.mount / ".bonobofs/denials.jsonl", os.O_RDONLY))
        os.read(opened[-1], MIB)
    for fd in opened:
        os.close(fd)


def move_deep(agent: Agent, turn: int) -> None:
    if turn == 0:
        os.close(descend(agent.arena, iter(["deep"] * DEEP)))
    _swap(agent.arena / "deep", agent.arena / "deep-moved")


def make_links(arena: Path) -> None:
    (arena / "file").write_bytes(b"x")
    (arena / "links").mkdir()
    for number in range(LINKS):
        os.link(arena / "file", arena / f"links/{number}")


def use_links(agent: Agent, turn: int) -> None:
    os.stat(agent.arena / f"links/{turn % LINKS}")
    os.getxattr(agent.arena / "file", "user.bonobofs.why")
    with contextlib.suppress(OSError):
        (agent.arena / "file").write_bytes(b"y")


def make_crowd(arena: Path) -> None:
    (arena / "crowd").mkdir()
    for number in range(CROWD):
        os.close(os.open(arena / f"crowd/{number}", os.O_CREAT | os.O_WRONLY))


def move_crowd(agent: Agent, turn: int) -> None:
    _swap(agent.arena / "crowd", agent.arena / "crowd-moved")


def make_wide(arena: Path) -> None:
    for number in range(WIDE):
        (arena / f"wide/{number}").mkdir(parents=True)


def move_wide(agent: Agent, turn: int) -> None:
    _swap(agent.arena / "wide", agent.arena / "wide-moved")


def sync_large(agent: Agent, turn: int) -> None:
    """fsync(2) of 100 MiB each, four at a time."""

    def sync(number: int) -> None:
        fd = os.open(agent.arena / f"synced-{number}", os.O_CREAT | os.O_WRONLY)
        for _ in range(100):
            os.write(fd, bytes(MIB))
        os.fsync(fd)
        os.close(fd)

    threads = [threading.Thread(target=sync, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def make_large(arena: Path) -> None:
    with (arena / "large").open("wb") as file:
        file.writelines(bytes([number % 256]) * MIB for number in range(LARGE // MIB))


def copy_large(agent: Agent, turn: int) -> None:
    with (agent.arena / "large").open("rb") as old, (agent.arena / "copy").open("wb") as new:
        while os.copy_file_range(old.fileno(), new.fileno(), LARGE):
            pass


def stage_files(agent: Agent, turn: int) -> None:
    """500 temporary files more in each of 40 turns, which are removed in the next 40; some are beyond the budget."""
    for number in range(turn % 40 * 500, turn % 40 * 500 + 500):
        path = agent.arena / f"notes/{number}.tmp"
        with contextlib.suppress(OSError):
            path.unlink() if turn % 80 >= 40 else path.write_bytes(b"x")


def unlink_open(agent: Agent, turn: int) -> None:
    """500 open files more in each turn that have no name, up to 10,000, which are closed at once."""
    for number in range(500):
        path = agent.arena / f"open-{number}"
        with contextlib.suppress(OSError):
            opened_files.append(os.open(path, os.O_CREAT | os.O_RDWR))
            path.unlink()
    if turn % 20 == 19:
        while opened_files:
            os.close(opened_files.pop())


def remove_long_paths(agent: Agent, turn: int) -> None:
    """Remove 700 files with paths of 150 KB."""
    fd = descend(agent.arena, (f"{level:03}" + "\u00e9" * 123 for level in range(LONG_PATH)))
    for number in range(REMOVED):
        os.close(os.open(f"{number}", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    for number in range(REMOVED):
        os.unlink(f"{number}", dir_fd=fd)
    os.close(fd)


def send_large_messages(agent: Agent, turn: int) -> None:
    """Calls of 14 MB and of 7 million characters, and one without end."""
    letters = b'{"call": "write_file", "path": "arena/m", "content": "' + b"\\u00e9" * 7_000_000
    paths = b'{"call": "git.commit", "paths": [' + b'"a",' * 3_500_000 + b'"a"]}\n'
    garbage = b'{"call": "git.commit", "message": "' + "\u00e9".encode() * 7_000_000 + b'"}\n'
    for message in (paths, garbage, letters):
        with socket.socket(socket.AF_UNIX) as end, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            handle = os.open(agent.inside, os.O_PATH)
            try:
                end.connect(f"/proc/self/fd/{handle}/guard.sock")
            finally:
                os.close(handle)
            end.settimeout(5)
            end.sendall(message)
            end.recv(4096)


def make_directories(agent: Agent, turn: int) -> None:
    """One directory for each inotify watch that the user may have, and more."""
    if turn % 1000 == 0:
        os.mkdir(agent.arena / f"flood-{turn // 1000}")
    os.mkdir(agent.arena / f"flood-{turn // 1000}/{turn}")


def close_directories(agent: Agent, turn: int) -> None:
    """Directories that the watcher may enter and not list."""
    path = agent.arena / f"shut-{turn % 100}"
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    path.chmod(0o111 if turn % 200 < 100 else 0o755)


def be_refused(agent: Agent, turn: int) -> None:
    with contextlib.suppress(OSError):
        os.mkdir(agent.arena / f"closed/{turn}")


def be_refused_deep(agent: Agent, turn: int) -> None:
    """Each refusal names a path of 3,000 bytes."""
    with contextlib.suppress(OSError):
        os.mkdir(agent.arena / "closed" / Path(*["\udcff" * 250] * 12) / str(turn))


def make_closed(arena: Path) -> None:
    (arena / "closed" / Path(*["\udcff" * 250] * 12)).mkdir(parents=True)
    for number in range(7):
        (arena / f"closed/{number}").mkdir()


def fill_scratch(agent: Agent, turn: int) -> None:
    """Fill scratch with bytes, empty files, directories and symlinks, up to its bound."""
    top = agent.arena / "build" / str(turn % 50)
    top.mkdir(parents=True, exist_ok=True)
    for number in range(200):
        with contextlib.suppress(OSError):
            (top / f"{number}").write_bytes(bytes(100_000 if number % 10 == 0 else 0))
            (top / f"{number}.d").mkdir()
            (top / f"{number}.l").symlink_to("x" * 4000)


def change_umask(agent: Agent, turn: int) -> None:
    os.umask(0o777)
    (agent.arena / f"masked-{turn}").mkdir()
    os.close(os.open(agent.arena / f"masked-{turn}.file", os.O_CREAT | os.O_WRONLY))
    os.mkfifo(agent.arena / f"masked-{turn}.fifo")


def make_held(arena: Path) -> None:
    (arena / "held").mkdir()


def hold_directory(agent: Agent, turn: int) -> None:
    """Keep the lock of a directory: getdents64 into a page of a FUSE file that is never read."""
    if turn == 0:
        os.listdir(agent.arena / "held")
        hold(agent.arena / "held", agent.own)
    time.sleep(0.1)


def change_held(arena: Path) -> None:
    """The mount tells the kernel of the change, which needs the lock."""
    path = arena / "held/name"
    path.unlink() if path.exists() else path.touch()


def lease_everything(agent: Agent, turn: int) -> None:
    """Ask for a year, in one pattern and in many."""
    for patterns in (["**"], [f"{letter}**" for letter in string.ascii_letters]):
        with contextlib.suppress(OSError, BonobofsError):
            call(agent.inside, "lease.acquire", patterns=patterns, seconds=YEAR)
    with contextlib.suppress(BonobofsError):  # every lease was refused
        call(agent.inside, "lease.release")


def append_elsewhere(agent: Agent, turn: int) -> None:
    """Write at the beginning of a file that is open to append to, with RWF_NOAPPEND, and allocate far beyond."""
    fd = os.open(agent.arena / "appended", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        with contextlib.suppress(OSError):
            os.pwritev(fd, [b"x" * 4096], 0, 0x20)
        os.posix_fallocate(fd, 0, 64 * MIB)
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


ATTACKS: dict[str, Attack] = {
    "8 stat whoami.json": Attack(stat_whoami),
    "8 loop leases": Attack(loop_leases),
    "8 open denials.jsonl": Attack(open_denials, make_closed),
    "8 move a deep directory": Attack(move_deep),
    "9 use a file of many names": Attack(use_links, make_links),
    "9 move many files": Attack(move_crowd, make_crowd),
    "9 sync large files": Attack(sync_large),
    "9 copy a large file": Attack(copy_large, make_large),
    "10 stage files": Attack(stage_files),
    "10 unlink open files": Attack(unlink_open),
    "10 move many directories": Attack(move_wide, make_wide),
    "11 remove long paths": Attack(remove_long_paths),
    "11 send large messages": Attack(send_large_messages),
    "12 make directories": Attack(make_directories),
    "12 close directories": Attack(close_directories),
    "13 be refused": Attack(be_refused),
    "13 be refused at long paths": Attack(be_refused_deep),
    "13 fill scratch": Attack(fill_scratch),
    "14 change the umask": Attack(change_umask),
    "15 keep a directory's lock": Attack(hold_directory, make_held, change_held),
    "16 lease everything": Attack(lease_everything),
    "16 write without append": Attack(append_elsewhere),
}
"""Rows of one number attack the same resource: memory, time, descriptors, companion, watcher, record, modes, caches,
and places in files and leases."""
