"""Large, deep or endless input of a caller grows neither companion nor server, and delays no other caller."""

from __future__ import annotations

import contextlib
import json
import select
import time
from pathlib import Path

import pytest

from bonobofs.errors import UsageError
from bonobofs.files import bounded_reader
from tests.guard_socket.conftest import Called, CalledMount, answer
from tests.support import proc
from tests.support.observe import companion_of
from tests.support.wait import PATIENCE, until

WHOAMI = b'{"call": "whoami"}\n'
_MB = 1 << 20


def log_of(called: Called) -> Path:
    """Where the processes of a session tell what failed."""
    return called.directory.parent / "server.log"


def test_a_caller_that_sends_many_calls_gets_every_answer(alice: Called) -> None:
    """Also if the answers fill the socket buffer."""
    with alice.connected() as end:
        end.sendall(WHOAMI * 3000)
        file = end.makefile("rb")
        for _ in range(3000):
            assert json.loads(file.readline())["ok"]


@pytest.mark.parametrize("pattern", ["{" + "a," * 50_000, "[" + "a" * 100_000, "*a" * 50_000])
def test_no_pattern_delays_other_callers(alice: Called, pattern: str) -> None:
    """A long pattern is refused before it is parsed."""
    alice("write_file", path="a" * 200, content="text")
    began = time.monotonic()
    with pytest.raises(UsageError):
        alice("list_files", pattern=pattern)
    assert time.monotonic() - began < 20


def test_an_overlong_path_is_not_recorded(alice: Called) -> None:
    for path in ("a" * _MB, "a/" * (_MB // 2), "../" * _MB):
        with pytest.raises((UsageError, OSError)):
            alice("write_file", path=path, content="text")
        with pytest.raises((UsageError, OSError)):
            alice("read_file", path=path, agent="bob")
    assert max(len(line) for line in alice.world.trail.read_bytes().splitlines()) < 20_000
    assert len((alice.path / ".bonobofs/denials.jsonl").read_bytes()) < 20_000


def test_invalid_text_is_a_usage_error_and_not_recorded(alice: Called) -> None:
    with pytest.raises(UsageError):
        alice("write_file", path="a", content="\ud800" * 100_000)
    assert log_of(alice).stat().st_size < 10_000


def test_a_call_with_many_values_takes_little_memory(alice: Called) -> None:
    companion = companion_of(alice.world.pid)
    with alice.connected() as end:
        for value in (b"{},", b'"",', b"[],"):
            end.sendall(b'{"call": "whoami", "x": [' + value * (15 * _MB // 3) + b"7]}\n")
            assert answer(end)["ok"] is False
    assert proc.memory(companion, "VmHWM") < 300 * _MB


SEARCH = b'{"call": "search_files", "query": "(a+)+$"}\n'


def test_endless_searches_delay_only_searches(alice: Called) -> None:
    """Two searches run at once; calls of other names are answered meanwhile."""
    alice("write_file", path="long", content="a" * 40 + "!")
    companion = companion_of(alice.world.pid)
    ends = [alice.connect() for _ in range(40)]
    try:
        for end in ends:
            end.sendall(SEARCH)
        until(lambda: len(proc.children(companion)) == 2, "two searches run")
        refused, _, _ = select.select(ends, [], [], PATIENCE)
        assert "try again" in answer(refused[0])["error"]["message"]
        began = time.monotonic()
        for turn in range(5):
            assert alice("write_file", path="other", content=str(turn))
            assert alice("whoami")["agent"] == "alice"
            assert len(proc.children(companion)) <= 2
        assert time.monotonic() - began < bounded_reader.SECONDS
        (alice.path / "mine").write_text("the mount goes on")
    finally:
        for end in ends:
            end.close()


def test_calls_of_closed_connections_count_in_the_memory_limit(mounted_called: CalledMount, tmp_path: Path) -> None:
    """The server keeps a complete call until it has run, and counts it; other calls are answered meanwhile."""
    called, go = mounted_called(companion="tests.guard_socket.slow_companion"), tmp_path / "go"
    line = json.dumps({"call": "write_file", "path": "b", "content": "x" * (8 * _MB)}).encode() + b"\n"
    with called.connected() as slow:
        change = {"call": "change", "path": "a", "makes": ["a"], "until": str(go), "alone": True}
        slow.sendall(json.dumps(change).encode() + b"\n")
        until((called.source / "a").exists, "the change lock is held")
        for _ in range(40):
            with contextlib.suppress(OSError), called.connected() as end:
                end.sendall(line)
        assert called("whoami")["agent"] == "alice"
        assert proc.memory(companion_of(called.world.pid), "VmHWM") < 400 * _MB
        go.touch()
        assert answer(slow)["ok"]
    until((called.source / "b").exists, "a complete call has run")


def test_read_file_cuts_a_file_of_many_empty_lines(alice: Called) -> None:
    alice("write_file", path="empty", content="\n" * (8 * _MB))
    read = alice("read_file", path="empty")
    assert read["end_line"] <= 1_000_000
    assert "go on with offset" in read["cut"]
    assert alice("read_file", path="empty", offset=read["end_line"] + 1, limit=1)["content"]
