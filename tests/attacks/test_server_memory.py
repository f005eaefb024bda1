"""Repeated requests do not grow the server's memory."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from bonobofs import session
from bonobofs.ipc.client import call
from bonobofs.policy.engine import compile_policy
from bonobofs.policy.lease_set import compile_leases
from bonobofs.state.home import inside_directory
from tests.support import proc
from tests.support.observe import companion_of
from tests.support.users import run_in_child
from tests.support.world import ALLOW_ALL, ROOT, Mounted

REPEATED: Final = int(os.environ.get("BONOBOFS_TEST_REQUESTS", "2000"))
WARM: Final = 2_800
"""Requests that fill the caches first: the server remembers the last 1,000 entries.

It also remembers the names that it changed. A dictionary that grows at 2,731 keys takes 300 KB at once, and grows next
at 10,923.
"""
AT_ONCE: Final = 250
"""Requests that one process makes: `run_in_child` ends it after 40 s."""
GROWTH: Final = min(250 * REPEATED, 8 << 20)
"""Bytes of memory for all requests of one kind. The server remembers the last 40,000 names that it changed."""
LEASES: Final = REPEATED // 160
"""Each takes a second: the calls wait until all sessions follow."""
LEASED: Final = ["docs/**", "src/*.py", "**/a/**/b"]
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
    if number % 8 == 0:
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


def _tell_all(act: Callable[[Path, int], None], mount: Path, numbers: range) -> None:
    for start in numbers[::AT_ONCE]:
        run_in_child(_repeat, act, mount, range(start, min(start + AT_ONCE, numbers.stop)))


@pytest.mark.timeout(60 + REPEATED // 20)
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__.strip("_"))
def test_repeated_requests_do_not_grow_the_server(
    mounted: Mounted, source: Path, record_property: Callable[[str, object], None], act: Callable[[Path, int], None]
) -> None:
    """The server grows by at most GROWTH bytes after the first WARM requests."""
    (source / "closed").mkdir()
    (source / "file").write_bytes(b"x")
    world = mounted(policy=POLICY)
    _tell_all(act, world.path, range(WARM))
    before = proc.memory(world.pid)
    _tell_all(act, world.path, range(WARM, WARM + REPEATED))
    record_property("grown", grown := proc.memory(world.pid) - before)
    assert grown <= GROWTH


@pytest.mark.timeout(60 + REPEATED // 20)
def test_acquired_and_released_leases_do_not_grow_the_server(
    mounted: Mounted, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Neither those of the session that calls guard.sock, nor those of a session with another source."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    world, other = mounted(policy=ALLOW_ALL), mounted(policy=ALLOW_ALL, agent="bob", source=elsewhere)
    directory = inside_directory(world.home, world.session.session)

    def lease(times: int) -> None:
        for _ in range(times):
            call(directory, "lease.acquire", patterns=LEASED)
            call(directory, "lease.release")

    lease(3)
    processes = [world.pid, other.pid, companion_of(world.pid), companion_of(other.pid)]
    before = [proc.memory(pid) for pid in processes]
    lease(LEASES)
    grown = [proc.memory(pid) - was for pid, was in zip(processes, before, strict=True)]
    record_property("grown", grown)
    assert max(grown[:2]) <= GROWTH
    assert max(grown[2:]) <= 8 << 20  # their garbage collector runs for 5,000 new objects, every second lease


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


def test_open_versions_of_denials_jsonl_do_not_grow_the_server(mounted: Mounted, source: Path) -> None:
    """The server keeps a bounded number of snapshots, each of at most a megabyte."""
    (source / "closed" / Path(*["\udcff" * 250] * 12)).mkdir(parents=True)
    world = mounted(policy=POLICY)
    before = proc.memory(world.pid)
    size, lines, opened = run_in_child(_open_versions, world.path)
    assert opened == VERSIONS
    assert 800_000 < size <= 1 << 20
    assert lines > 40
    assert proc.memory(world.pid) - before < 64 << 20


def test_policies_and_leases_are_freed_without_the_garbage_collector(home: Path) -> None:
    """A server runs without it: a reference cycle would keep the automaton of each lease."""
    policy = session.choose_policy(home, ROOT / "policy.toml").plain
    lease = {"patterns": LEASED, "shared": False, "own": False, "holder": "bob"}
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
