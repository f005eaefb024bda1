"""Any sequence of system calls, with files kept open, has the same effect in the mount as without it."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bonobofs.system import syscalls
from tests.support.mount_fixtures import MakePlace
from tests.support.users import outcome

NAMES: Final = ("a", "b", "c", "d", "d/a", "d/b", "e", "e/a", "e/d", "e/d/a")
HANDLES: Final = 6
INNER: Final = ("a", "b", "d/b", "e/d")
HEADS: Final = (b"", b"#!", b"!", b"\x7fELF")


class Calls:
    """System calls on a small tree, and what came of each."""

    def __init__(self, top: Path, seed: int, names: tuple[str, ...] = NAMES, targets: tuple[str, ...] = INNER) -> None:
        """Names and targets of symlinks must not lead out of `top`: what is called on them is called by root too."""
        self._top = top
        self._names = names
        self._targets = targets
        self._random = random.Random(seed)
        self._handles: dict[int, int] = {}
        self.seen: list[tuple[object, ...]] = []

    def run(self, count: int) -> list[tuple[object, ...]]:
        kinds: list[Callable[[], object]] = [
            *[self._open] * 4,
            *[self._use] * 8,
            *[self._rename] * 4,
            *[self._name] * 6,
            *[self._attribute] * 2,
            *[self._look] * 3,
        ]
        for _ in range(count):
            self._random.choice(kinds)()
        for handle in self._handles.values():
            os.close(handle)
        return self.seen

    def _path(self) -> Path:
        return self._top / self._random.choice(self._names)

    def _note(self, what: str, call: Callable[..., object], *arguments: Any) -> object:
        said = outcome(call, *arguments)
        shown = [str(a.relative_to(self._top)) if isinstance(a, Path) else a for a in arguments]
        self.seen.append((what, *shown, said))
        return said

    def _open(self) -> None:
        number = self._random.randrange(HANDLES)
        old = self._handles.pop(number, -1)
        if old >= 0:
            os.close(old)
        flags = self._random.choice((os.O_RDWR, os.O_RDONLY, os.O_WRONLY))
        for extra in (os.O_CREAT, os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_EXCL):
            flags |= extra if self._random.random() < 0.4 else 0
        path, mode = self._path(), self._random.choice((0o644, 0o600, 0o444, 0o000))

        def opened() -> str:
            self._handles[number] = os.open(path, flags | os.O_NONBLOCK, mode)
            return "opened"

        self.seen.append(("open", str(path.relative_to(self._top)), flags, mode, outcome(opened)))

    def _use(self) -> None:
        number = self._random.randrange(HANDLES)
        fd = self._handles.get(number, -1)
        data = self._random.choice(HEADS) + bytes([65 + self._random.randrange(26)]) * self._random.randrange(1, 6000)
        data = data[: self._random.choice((1, 2, 9, 6000))]
        offset = self._random.choice((0, 1, 5, self._random.randrange(9000)))
        uses: list[tuple[str, Callable[..., object], tuple[object, ...]]] = [
            ("write", os.write, (data,)),
            ("pwrite", os.pwrite, (data, offset)),
            ("pread", os.pread, (9000, 0)),
            ("pread", os.pread, (100, offset)),
            ("ftruncate", os.ftruncate, (offset,)),
            ("fstat", self._fstat, ()),
            ("fchmod", _fchmod, (self._random.choice((0o644, 0o400, 0)),)),
            ("fsync", os.fsync, ()),
            ("fallocate", syscalls.fallocate, (0, offset, 100)),
            ("punch a hole", syscalls.fallocate, (3, offset, 100)),
        ]
        what, call, arguments = self._random.choice(uses)
        if fd >= 0:
            self.seen.append((what, number, *arguments, outcome(call, fd, *arguments)))

    def _fstat(self, fd: int) -> tuple[object, ...]:
        s = os.fstat(fd)
        return stat.filemode(s.st_mode), s.st_size if stat.S_ISREG(s.st_mode) else 0, s.st_nlink

    def _rename(self) -> None:
        flags = self._random.choice((0, 0, syscalls.RENAME_NOREPLACE, syscalls.RENAME_EXCHANGE))

        def renamed(old: Path, new: Path) -> None:
            syscalls.renameat2(-100, bytes(old), -100, bytes(new), flags)

        self._note(f"rename {flags}", renamed, self._path(), self._path())

    def _name(self) -> None:
        what, call = self._random.choice(
            [("unlink", os.unlink), ("rmdir", os.rmdir), ("mkdir", os.mkdir), ("mkdir", os.mkdir), ("fifo", os.mkfifo)]
        )
        which = self._random.random()
        if which < 0.3:
            self._note("link", os.link, self._path(), self._path())
        elif which < 0.4:
            self._note("symlink", os.symlink, self._random.choice(self._targets), self._path())
        else:
            self._note(what, call, self._path())

    def _attribute(self) -> None:
        path, mode = self._path(), self._random.choice((0o755, 0o644, 0o700))
        self._note("chmod", os.chmod, path, mode | 0o700)
        self._note("utime", os.utime, path, (1, self._random.randrange(10**9)))
        self._note("setxattr", os.setxattr, path, "user.x", bytes([65 + self._random.randrange(26)]))

    def _look(self) -> None:
        path = self._path()
        self._note("listdir", lambda at: sorted(os.listdir(at)), path)
        self._note("stat", lambda at: (stat.filemode(at.stat().st_mode), at.stat().st_nlink), path)
        self._note("getxattr", os.getxattr, path, "user.x")
        if path.is_file():
            self._note("read", Path.read_bytes, path)


def _fchmod(fd: int, mode: int) -> None:
    # A directory that its owner cannot read cannot be judged, so a mount refuses to move it.
    os.fchmod(fd, mode | 0o700 if stat.S_ISDIR(os.fstat(fd).st_mode) else mode)


def _tree(top: Path) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for path in sorted(top.rglob("*")):
        s = path.lstat()
        content = outcome(path.read_bytes) if stat.S_ISREG(s.st_mode) else b""
        # What passes through a FIFO of a mount never reaches the file system below, and so leaves no time there.
        old = s.st_mtime < 10**9 and not stat.S_ISFIFO(s.st_mode)
        found.append((str(path.relative_to(top)), s.st_mode, s.st_nlink, old, content))
    return found


def test_any_sequence_of_calls_works_as_without_a_mount(place: MakePlace) -> None:
    """Opens, writes, renames, exchanges, links and removals in random order have the same results and the same final
    tree.
    """
    world = place()

    def story(seed: int) -> None:
        bare, through = world.source.parent / f"bare-{seed}", world.path / str(seed)
        seen = []
        for top in (bare, through):
            top.mkdir()
            seen.append(Calls(top, seed).run(400))
        for number, (below, here) in enumerate(zip(*seen, strict=True)):
            assert here == below, f"seed {seed}, call {number}, after {seen[0][max(0, number - 30) : number]}"
        assert _tree(through) == _tree(bare)
        assert _tree(world.source / str(seed)) == _tree(bare)

    for seed in range(30):
        world.does(story, seed)
    world.umount()
    assert (world.home / "sessions" / world.session.session / "server.log").read_text() == ""


POLICY: Final = """
default = "deny"
[[protect]]
paths = ["closed/"]
[[rule]]
name = "notes"
paths = ["notes/"]
suffixes = [".md"]
executable = false
[[rule]]
name = "code"
paths = ["code/"]
[[rule]]
name = "small"
paths = ["small/"]
max_size = "10B"
"""
GUARDED: Final = (
    *("code", "code/a", "code/b.md", "code/d", "code/d/a.md", "code/d/a", "code/linked"),
    *("notes", "notes/a.md", "notes/b.md", "notes/c.txt", "notes/d", "notes/d/a.md", "notes/linked.md"),
    *("small", "small/a", "small/b.md", "small/d", "small/d/a", "small/linked"),
    *("closed", "closed/hook", "closed/new", "other"),
)


def _wrong(top: Path) -> list[str]:
    """What no call should have been able to do."""
    found = []
    for path in top.rglob("*"):
        s, place = path.lstat(), path.relative_to(top)
        if path.is_symlink():
            to = os.path.normpath(place.parent / os.readlink(path))
            found += [f"{place} leads to {to}"] if to.startswith(("/", "..", "closed")) else []
        elif stat.S_ISREG(s.st_mode) and path.stat().st_ino != (top / "closed/hook").stat().st_ino:
            found += [f"{place} has {s.st_size} bytes"] if place.parts[0] == "small" and s.st_size > 10 else []
            if place.parts[0] == "notes":
                content = outcome(path.read_bytes)
                runs = s.st_mode & 0o111 or (isinstance(content, bytes) and content.startswith((b"#!", b"\x7fELF")))
                found += [f"{place} can be run"] if runs else []
                found += [f"{place} is no note"] if path.suffix != ".md" else []
    return found


def test_no_sequence_of_calls_bypasses_the_policy(place: MakePlace) -> None:
    """After any calls in any order, protected files are unchanged, and all others conform to the rules."""
    world = place(policy=POLICY)

    def story() -> None:
        top = world.source
        for directory in ("code", "notes", "small", "closed"):
            (top / directory).mkdir()
        hook = top / "closed/hook"
        hook.write_text("protected")
        hook.chmod(0o640)
        for name in ("code/linked", "notes/linked.md", "small/linked"):
            os.link(hook, top / name)
        outside = top.parent / "outside"
        outside.mkdir()
        (outside / "a").write_text("nobody's business")
        leading = (
            str(outside),
            "../outside",
            "../../outside/a",
            "closed",
            "../closed/hook",
            "../../closed",
            "a",
            "d/a.md",
        )

        def kept() -> list[tuple[object, ...]]:
            return [
                (
                    path.lstat().st_mode,
                    path.lstat().st_mtime_ns,
                    path.is_file() and path.read_text(),
                    os.listxattr(path),
                )
                for path in (outside, outside / "a")
            ] + [(hook.read_text(), hook.stat().st_mode, hook.stat().st_mtime_ns, os.listxattr(hook))]

        before = kept()
        for seed in range(70):
            seen = Calls(world.path, seed, GUARDED, leading).run(300)
            assert kept() == before, seed
            assert set(os.listdir(top)) <= {"closed", "code", "notes", "small"}, seed
            assert os.listdir(top / "closed") == ["hook"], seed
            assert _wrong(top) == [], (seed, seen)

    world.does(story)
    assert (world.home / "sessions" / world.session.session / "server.log").read_text() == ""
