"""How one POSIX case is run in several worlds and what it saw there is compared.

A world is a directory on the host's file system or the same directory through a mount. A case makes calls in a fresh
directory of the world and says of each what must come out; an error comes out as its name ("ENOENT"). What came out
must be what the case says, and the same in every world, except for what `differences` lists.

Cases run in a process of their own for each world, which forks for each case: it has one thread, may become another
user, and may be killed when a mount hangs.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.policy.decision import Code

MIRRORED_BYTES: Final = 4 << 20
"""Files up to this size are compared byte by byte with the source after each case."""


Differences = dict[str, dict[str, tuple[object, str]]]
"""By case and sight: what comes out instead, and why: the code of a rule, or a fact in words."""

CODES: Final = frozenset(Code)


class _Any:
    """Equal to every value; only the worlds are compared with each other."""

    def __repr__(self) -> str:
        return "anything"

    def __reduce__(self) -> str:
        return "ANY"


ANY: Final = _Any()


class User(NamedTuple):
    """Ids under which a call is made."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


class Sight(NamedTuple):
    """One call of a case: what it is, what must come out, what came out."""

    what: str
    expected: Any
    value: Any


class Seen(NamedTuple):
    """What a case saw in one world."""

    sights: list[Sight]
    failure: str
    """A traceback, if the case itself broke off; else empty."""
    unlike_source: list[str]
    """What the mount shows otherwise than the directory below it, after the case."""
    codes: list[str]
    """Codes of the refusals in the case's directory, as the mount itself tells them."""


def attempt(call: Callable[..., object], *args: object) -> object:
    """The call's result, or the name of the error it raised."""
    try:
        return call(*args)
    except OSError as error:
        if error.errno is None:
            raise
        return "EOPNOTSUPP" if error.errno == errno.EOPNOTSUPP else errno.errorcode[error.errno]


def in_child(call: Callable[..., object], *args: object, by: User | None = None) -> Any:
    """The outcome of a call that another process makes, as `by` if given. A signal comes out as its number."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            if by is not None:
                os.setgroups(by.groups)
                os.setresgid(by.gid, by.gid, by.gid)
                os.setresuid(by.uid, by.uid, by.uid)
            answer = pickle.dumps(attempt(call, *args))
            while answer:
                answer = answer[os.write(writer, answer) :]
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as stream:
        answer = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status > 0:
        raise RuntimeError("the child of a case broke off; its traceback is above")
    return pickle.loads(answer) if status == 0 else f"signal {-status}"


class See:
    """Given to a case: its directory, and the way to say what must come out of a call."""

    def __init__(self, at: Path, top: Path) -> None:
        self.at = at
        """A fresh directory; the working directory too."""
        self.top = top
        """Root of the world; `crowd` in it holds many entries."""
        self.sights: list[Sight] = []

    def __call__(
        self, what: str, expected: object, call: Callable[..., object], *args: object, by: User | None = None
    ) -> Any:
        """Make the call (in a child, as user `by`), note what came out, and return it."""
        if any(what == sight.what for sight in self.sights):
            raise ValueError(f"two sights are called {what!r}")
        value = attempt(call, *args) if by is None else in_child(call, *args, by=by)
        self.sights.append(Sight(what, expected, value))
        return value


class Case(NamedTuple):
    """One case: a name such as `rename.over_an_open_file`, and the function that looks."""

    name: str
    look: Callable[[See], None]
    root: bool
    """It needs root: other users, owners, devices."""


class World(NamedTuple):
    """Where cases are run."""

    name: str
    run: Callable[[Case], Seen]
    bare: Callable[[Case], Seen]
    """The same case on the host's file system, under the same user."""
    differences: Differences


def case(*, root: bool = False) -> Callable[[Callable[[See], None]], Callable[[World], None]]:
    """Make a test of a case; it is run in every world that it can be run in."""

    def decorate(look: Callable[[See], None]) -> Callable[[World], None]:
        module = look.__module__.rpartition(".")[2].removeprefix("test_")
        this = Case(f"{module}.{look.__name__.removeprefix('test_')}", look, root)

        def test(world: World) -> None:
            findings = compare(this, world)
            assert not findings, f"{this.name} in the world {world.name}:\n  " + "\n  ".join(findings)

        test.__name__, test.__doc__, test.__module__ = look.__name__, look.__doc__, look.__module__
        test.case = this  # type: ignore[attr-defined]
        return test

    return decorate


def compare(this: Case, world: World) -> list[str]:
    """What is wrong with a case in a world, one line each; empty when all is as it must be."""
    seen = world.run(this)
    bare = seen if world.name == "bare" else world.bare(this)
    findings = [seen.failure] if seen.failure else []
    findings += [f"on the bare directory: {bare.failure}"] if bare.failure and bare is not seen else []
    findings += [f"unlike the source: {line}" for line in seen.unlike_source]
    excepted = world.differences.get(this.name, {})
    below = {sight.what: sight.value for sight in bare.sights}
    for what, expected, value in seen.sights:
        if what in excepted:
            if excepted[what][0] is not ANY and value != excepted[what][0]:
                findings.append(f"{what}: {value!r}, but {excepted[what][0]!r} is listed ({excepted[what][1]})")
        elif expected is not ANY and value != expected:
            findings.append(f"{what}: {value!r}, not {expected!r}")
        elif value != below.get(what):
            findings.append(f"{what}: {value!r}, but on the bare directory {below.get(what)!r}")
    known = {sight.what for sight in seen.sights}
    findings += [f"listed as different, but not seen: {what}" for what in excepted if what not in known]
    codes = sorted({because for _, because in excepted.values() if because in CODES})
    if seen.codes != codes:
        findings.append(f"refused by {seen.codes}, listed are {codes}")
    return findings


def refusals(at: Path, top: Path) -> list[str]:
    """Codes of the refusals below a directory of a mount."""
    shown = (top / ".bonobofs/denials.jsonl").read_text().splitlines()
    here = f"{at.relative_to(top)}/"
    return sorted({denial["code"] for denial in map(json.loads, shown) if denial["path"].startswith(here)})


def unlike(at: Path, below: Path) -> list[str]:
    """What a tree in the mount shows otherwise than the tree in the source: attributes, contents, names."""
    found: list[str] = []
    waiting = [(at, below)]
    while waiting:
        here, there = waiting.pop()
        for look in (_attributes, _extended, _content):
            mine, theirs = attempt(look, here), attempt(look, there)
            if mine != theirs:
                found.append(f"{here.relative_to(at)} {look.__name__.strip('_')}: {mine!r}, below {theirs!r}"[:2000])
        if stat.S_ISDIR(os.lstat(here).st_mode):
            mine, theirs = attempt(_listing, here), attempt(_listing, there)
            if mine != theirs:
                found.append(f"{here.relative_to(at)} lists {mine!r}, below {theirs!r}"[:2000])
            elif isinstance(mine, list):
                waiting += [(here / name, there / name) for name in mine]
    return found


def _listing(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def _attributes(path: Path) -> list[int]:
    """All that stat says but the device and the time of the last access."""
    s = os.lstat(path)
    numbers = [s.st_ino, s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_size, s.st_rdev, s.st_blocks]
    return [*numbers, s.st_mtime_ns, s.st_ctime_ns]


def _extended(path: Path) -> dict[str, bytes]:
    names = os.listxattr(path, follow_symlinks=False)
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in sorted(names)}


def _content(path: Path) -> object:
    s = os.lstat(path)
    if stat.S_ISLNK(s.st_mode):
        return os.readlink(path)
    if not stat.S_ISREG(s.st_mode) or s.st_size > MIRRORED_BYTES:
        return None
    return path.read_bytes()
