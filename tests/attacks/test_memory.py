"""Requests that are repeated leave nothing in the server: its memory is the same after them as before."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bonobofs import session
from bonobofs.policy.engine import compile_policy
from bonobofs.policy.leases import compile_leases
from tests.attacks.bounds import resident
from tests.fuse.people import tell
from tests.worlds import ALLOW_ALL, ROOT, Mounted

WARM: Final = 300
REPEATED: Final = 1_200
GROWTH: Final = 800
"""Bytes of memory for each request: a third of what one `whoami.json` left behind."""
POLICY: Final = f'{ALLOW_ALL}[[protect]]\npaths = ["closed/"]\n'


def _stat_whoami(mount: Path, _: int) -> None:
    os.stat(mount / ".bonobofs/whoami.json")


def _ask_why(mount: Path, _: int) -> None:
    os.getxattr(mount / "file", "user.bonobofs.why")


def _be_refused(mount: Path, _: int) -> None:
    with contextlib.suppress(OSError):
        os.mkdir(mount / "closed/new")


def _see_refusals(mount: Path, number: int) -> None:
    with contextlib.suppress(OSError):
        os.mkdir(mount / f"closed/{number % 7}")
    os.stat(mount / ".bonobofs/denials.jsonl")


def _make(mount: Path, number: int) -> None:
    path = mount / f"{number}.md"
    path.write_bytes(b"x")
    path.unlink()


def _replace(mount: Path, _: int) -> None:
    (mount / "new").write_bytes(b"x")
    os.rename(mount / "new", mount / "old")


def _link(mount: Path, number: int) -> None:
    os.link(mount / "file", mount / f"link-{number}")
    os.unlink(mount / f"link-{number}")


def _make_directory(mount: Path, number: int) -> None:
    os.mkdir(mount / f"directory-{number}")
    os.rmdir(mount / f"directory-{number}")


def _change(mount: Path, number: int) -> None:
    os.chmod(mount / "file", 0o600 | number & 0o77)
    os.setxattr(mount / "file", "user.number", b"%d" % number)
    os.truncate(mount / "file", number)


def _look_for(mount: Path, number: int) -> None:
    assert not os.path.lexists(mount / f"missing-{number}")


ACTS: Final = (
    _stat_whoami,
    _ask_why,
    _be_refused,
    _see_refusals,
    _make,
    _replace,
    _link,
    _make_directory,
    _change,
    _look_for,
)


def _repeat(act: Callable[[Path, int], None], mount: Path, numbers: range) -> None:
    for number in numbers:
        act(mount, number)


def test_no_request_that_is_repeated_makes_the_server_grow(mounted: Mounted, source: Path) -> None:
    """Each kind of request, REPEATED times after the first WARM: at most GROWTH bytes for each."""
    (source / "closed").mkdir()
    (source / "file").write_bytes(b"x")
    world = mounted(policy=POLICY)
    grown = {}
    for act in ACTS:
        tell(_repeat, act, world.path, range(WARM))
        before = resident(world.pid)
        tell(_repeat, act, world.path, range(WARM, WARM + REPEATED))
        grown[act.__name__] = (resident(world.pid) - before) // REPEATED
    assert {name: each for name, each in grown.items() if each > GROWTH} == {}


VERSIONS: Final = 150


def _open_versions(mount: Path) -> list[int]:
    """Keep VERSIONS versions of `denials.jsonl` open, each after a refusal of a path of 3,000 bytes."""
    opened = []
    for number in range(VERSIONS):
        with contextlib.suppress(OSError):
            os.mkdir(mount / "closed" / Path(*["\udcff" * 250] * 12) / str(number))
        opened.append(os.open(mount / ".bonobofs/denials.jsonl", os.O_RDONLY))
    last = os.read(opened[-1], 2 << 20)
    return [len(last), last.count(b"\n"), len(opened)]


def test_open_versions_of_the_refusals_do_not_make_the_server_grow(mounted: Mounted, source: Path) -> None:
    """The server keeps a bounded number of snapshots, each of at most a megabyte."""
    (source / "closed" / Path(*["\udcff" * 250] * 12)).mkdir(parents=True)
    world = mounted(policy=POLICY)
    before = resident(world.pid)
    size, lines, opened = tell(_open_versions, world.path)
    assert opened == VERSIONS
    assert 800_000 < size <= 1 << 20
    assert lines > 40
    assert resident(world.pid) - before < 64 << 20


def test_policies_and_leases_are_freed_without_the_garbage_collector(home: Path) -> None:
    """A server runs without it: each lease that is acquired or released would leave its automaton behind."""
    policy = session.choose_policy(home, ROOT / "policy.toml").plain
    lease = {"patterns": ["docs/**", "src/*.py", "**/a/**/b"], "shared": False, "own": False, "holder": "bob"}
    compile_leases([{**lease, "chain": None, "until": ""}])  # what is imported late is not counted
    compile_policy(policy)
    gc.collect()
    gc.disable()
    try:
        compile_leases([{**lease, "chain": None, "until": ""}])
        compile_policy(policy)
        assert gc.collect() == 0
    finally:
        gc.enable()
