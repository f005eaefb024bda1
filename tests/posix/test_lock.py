"""flock(2) and fcntl(2) locks, of processes and of open files, between processes."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable

from tests.posix.harness import See, attempt, case, in_child
from tests.support.syscalls import make, opened

_FLOCK = "hhqqi4x"


def _lock(fd: int, command: int, kind: int, start: int = 0, length: int = 0) -> tuple[int, int, int]:
    """A record lock; kind, start and length of the answer (for F_GETLK of what is in the way)."""
    answer = fcntl.fcntl(fd, command, struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0))
    found, _, begin, extent, _ = struct.unpack(_FLOCK, answer)
    return found, begin, extent


def _elsewhere(name: str, call: Callable[[int], object], flags: int = os.O_RDWR) -> object:
    """The outcome of a call that another process makes with a descriptor of its own."""

    def there() -> object:
        with opened(name, flags) as fd:
            return attempt(call, fd)

    return in_child(there)


def _set(kind: int, start: int = 0, length: int = 0) -> Callable[[int], object]:
    return lambda fd: _lock(fd, fcntl.F_SETLK, kind, start, length)[0] == kind


def _flock(how: int) -> Callable[[int], object]:
    return lambda fd: fcntl.flock(fd, how | fcntl.LOCK_NB)


@case()
def test_flock(see: See) -> None:
    """One exclusive or many shared, per open file."""
    make("a.md")
    with opened("a.md") as one, opened("a.md", os.O_RDONLY) as two:
        see("exclusive", None, fcntl.flock, one, fcntl.LOCK_EX)
        see("another open file", "EAGAIN", fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        see("shared by another process", "EAGAIN", _elsewhere, "a.md", _flock(fcntl.LOCK_SH))
        see("down to shared", None, fcntl.flock, one, fcntl.LOCK_SH)
        see("shared by two", None, fcntl.flock, two, fcntl.LOCK_SH | fcntl.LOCK_NB)
        see("shared by a third", None, _elsewhere, "a.md", _flock(fcntl.LOCK_SH))
        see("exclusive by a third", "EAGAIN", _elsewhere, "a.md", _flock(fcntl.LOCK_EX))
        see("unlock", None, fcntl.flock, one, fcntl.LOCK_UN)
        see("up to exclusive", None, fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB)
    see("closed", None, _elsewhere, "a.md", _flock(fcntl.LOCK_EX))


@case()
def test_flock_inherited(see: See) -> None:
    """A lock belongs to the open file: a child holds and releases it with its parent."""
    make("a.md")
    with opened("a.md") as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        see("the child has it", None, in_child, fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        see("kept when the child ends", "EAGAIN", _elsewhere, "a.md", _flock(fcntl.LOCK_SH))
        see("the child releases", None, in_child, fcntl.flock, fd, fcntl.LOCK_UN)
        see("free", None, _elsewhere, "a.md", _flock(fcntl.LOCK_EX))


@case()
def test_records(see: See) -> None:
    """Ranges are locked for reading and writing, and F_GETLK returns the conflicting lock."""
    make("a.md", b"x" * 100)
    with opened("a.md") as fd, opened("a.md", os.O_RDONLY) as reader:
        see("write lock", (fcntl.F_WRLCK, 10, 20), _lock, fd, fcntl.F_SETLK, fcntl.F_WRLCK, 10, 20)
        see("the same elsewhere", "EAGAIN", _elsewhere, "a.md", _set(fcntl.F_WRLCK, 10, 20))
        see("overlapping", "EAGAIN", _elsewhere, "a.md", _set(fcntl.F_RDLCK, 29, 5))
        see("beside it", True, _elsewhere, "a.md", _set(fcntl.F_WRLCK, 30, 5))
        see("before it", True, _elsewhere, "a.md", _set(fcntl.F_WRLCK, 0, 10))
        ask = _elsewhere("a.md", lambda there: _lock(there, fcntl.F_GETLK, fcntl.F_WRLCK, 0, 0))
        see("in the way", (fcntl.F_WRLCK, 10, 20), lambda: ask)
        see("down to reading", True, lambda: _lock(fd, fcntl.F_SETLK, fcntl.F_RDLCK, 15, 5)[0] == fcntl.F_RDLCK)
        see("read elsewhere", True, _elsewhere, "a.md", _set(fcntl.F_RDLCK, 15, 5))
        see("write elsewhere", "EAGAIN", _elsewhere, "a.md", _set(fcntl.F_WRLCK, 15, 5))
        see("split", "EAGAIN", _elsewhere, "a.md", _set(fcntl.F_RDLCK, 14, 1))
        see("write lock through a reader", "EBADF", _lock, reader, fcntl.F_SETLK, fcntl.F_WRLCK)
        see("beyond the end", True, _elsewhere, "a.md", _set(fcntl.F_WRLCK, 1000, 0))
        see("unlock", (fcntl.F_UNLCK, 0, 0), _lock, fd, fcntl.F_SETLK, fcntl.F_UNLCK)
        see("free", True, _elsewhere, "a.md", _set(fcntl.F_WRLCK))


@case()
def test_records_end_with_any_descriptor(see: See) -> None:
    """A process loses its record locks with the first descriptor of the file that it closes, and at its end."""
    make("a.md")
    with opened("a.md") as fd:
        see("lock", True, lambda: _set(fcntl.F_WRLCK)(fd))
        see("held", "EAGAIN", _elsewhere, "a.md", _set(fcntl.F_WRLCK))
        with opened("a.md", os.O_RDONLY):
            pass
        see("lost", True, _elsewhere, "a.md", _set(fcntl.F_WRLCK))
        see("taken by one that ended", True, lambda: _set(fcntl.F_WRLCK)(fd))


@case()
def test_open_file_locks(see: See) -> None:
    """Open file description locks belong to the open file, not to the process."""
    make("a.md")
    with opened("a.md") as one, opened("a.md") as two:
        see("lock", True, lambda: _lock(one, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, 0, 10)[0] == fcntl.F_WRLCK)
        see("the same process, another file", "EAGAIN", _lock, two, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, 5, 10)
        see("a record lock of the process", "EAGAIN", _lock, two, fcntl.F_SETLK, fcntl.F_WRLCK, 5, 10)
        see("beside it", (fcntl.F_WRLCK, 10, 10), _lock, two, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, 10, 10)
        see("what is in the way", (fcntl.F_WRLCK, 0, 10), _lock, two, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, 0, 5)
        see("a child with the same file", True, in_child, _child_with_lock, one)
        with opened("a.md"):
            pass
        see("kept when another is closed", "EAGAIN", _elsewhere, "a.md", _set(fcntl.F_WRLCK, 0, 10))
    see("closed", True, _elsewhere, "a.md", _set(fcntl.F_WRLCK, 0, 10))


def _child_with_lock(fd: int) -> bool:
    return _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, 0, 10)[0] == fcntl.F_WRLCK


@case()
def test_flock_and_record_locks_are_independent(see: See) -> None:
    """flock and record locks do not see each other."""
    make("a.md")
    with opened("a.md") as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        see("a record elsewhere", True, _elsewhere, "a.md", _set(fcntl.F_WRLCK))


@case()
def test_waiting(see: See) -> None:
    """Who waits for a lock gets it when it is released, and finds what was written under it."""
    make("a.md", b"0")
    for what, take, give in (
        ("flock", lambda fd: fcntl.flock(fd, fcntl.LOCK_EX), lambda fd: fcntl.flock(fd, fcntl.LOCK_UN)),
        ("record", lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX), lambda fd: fcntl.lockf(fd, fcntl.LOCK_UN)),
    ):
        with opened("a.md") as fd:
            take(fd)
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                with opened("a.md") as own:
                    os.write(writer, b"!")
                    take(own)
                    os.write(writer, os.pread(own, 10, 0))
                    os._exit(0)
            os.read(reader, 1)
            os.pwrite(fd, what.encode(), 0)
            give(fd)
            os.waitpid(child, 0)
            see(what, what.encode(), os.read, reader, 10)
            os.close(reader)
            os.close(writer)
        os.truncate("a.md", 0)


@case()
def test_counting_together(see: See) -> None:
    """Four processes that add under a lock lose nothing."""
    for what, take, give in (("flock", fcntl.LOCK_EX, fcntl.LOCK_UN), ("record", fcntl.LOCK_EX, fcntl.LOCK_UN)):
        make(f"{what}.md", b"0")
        lock = fcntl.flock if what == "flock" else fcntl.lockf
        children = []
        for _ in range(4):
            if (child := os.fork()) == 0:
                with opened(f"{what}.md") as fd:
                    for _ in range(25):
                        lock(fd, take)
                        number = int(os.pread(fd, 10, 0)) + 1
                        os.pwrite(fd, b"%d" % number, 0)
                        lock(fd, give)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        with opened(f"{what}.md") as fd:
            see(what, b"100", os.pread, fd, 10, 0)


@case()
def test_appending_together(see: See) -> None:
    """Lines that four processes append at once are all there, whole."""
    make("a.md")
    children = []
    for number in range(4):
        if (child := os.fork()) == 0:
            with opened("a.md", os.O_WRONLY | os.O_APPEND) as fd:
                for line in range(50):
                    os.write(fd, b"%d-%02d %s\n" % (number, line, b"x" * 50))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    with open("a.md", "rb") as stream:
        lines = sorted(stream.read().splitlines())
    expected = [b"%d-%02d %s" % (number, line, b"x" * 50) for number in range(4) for line in range(50)]
    see("lines", expected, lambda: lines)


@case()
def test_creating_together(see: See) -> None:
    """Of four processes that create one name exclusively, one succeeds, time after time."""
    won: list[int] = []
    for turn in range(12):
        outcomes = []
        readers = []
        for _ in range(4):
            reader, writer = os.pipe()
            if os.fork() == 0:
                outcome = attempt(make, f"{turn}.md")
                os.write(writer, b"1" if outcome is None else b"0")
                os._exit(0)
            os.close(writer)
            readers.append(reader)
        for reader in readers:
            outcomes.append(int(os.read(reader, 1)))
            os.close(reader)
            os.wait()
        won.append(sum(outcomes))
    see("winners", [1] * 12, lambda: won)
