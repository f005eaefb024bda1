"""Attacks on the guard socket: other users have no access, and no caller delays the session's callers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from bonobofs.companion.socket_server import MAX_CONNECTIONS, MAX_LINE
from bonobofs.ipc.client import call
from tests.guard_socket.conftest import Called, answer
from tests.support.observe import companion_of
from tests.support.wait import until
from tests.support.world import NOBODY

WHOAMI = b'{"call": "whoami"}\n'


def serves(called: Called) -> bool:
    """Whether the socket and the mount do, still by the same companion."""
    (called.path / "served").write_text("text")
    return bool(called("whoami")["agent"] == "alice")


@pytest.fixture(autouse=True)
def _served_by_the_same(alice: Called) -> object:
    before = companion_of(alice.world.pid)
    yield
    assert serves(alice)
    assert companion_of(alice.world.pid) == before


def test_the_socket_is_private_to_its_user(alice: Called) -> None:
    """Only the owner has access to socket and directory."""
    assert (alice.directory / "guard.sock").stat().st_mode & 0o777 == 0o600
    assert alice.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.root
def test_another_user_is_refused_by_uid(alice: Called) -> None:
    """By the credentials of the kernel, also if every mode on the path allows access."""
    (alice.directory / "guard.sock").chmod(0o666)
    handle = os.open(alice.directory, os.O_PATH)
    program = "import socket, sys; s = socket.socket(socket.AF_UNIX)\n"
    program += f"s.connect('/proc/self/fd/{handle}/guard.sock'); print(s.recv(9999).decode())"
    try:
        alice.directory.chmod(0o711)
        said = subprocess.run(
            ["/usr/bin/python3", "-c", program],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            pass_fds=(handle,),
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    finally:
        os.close(handle)
    told = json.loads(said.stdout)
    assert told["ok"] is False
    assert told["error"]["message"] == "this socket belongs to another user"


GARBAGE = (
    b"\0" * 100,
    b"GET / HTTP/1.1\r",
    b"\xff\xfe{",
    b"[" * 100_000,
    b"7",
    b"null",
    b'{"call": 7}',
    b'{"call": {"call": "whoami"}}',
    b'{"CALL": "whoami"}',
    b'{"call": "whoami", "agent": {"a": [1]}}',
    b'{"call": "__class__"}',
    b'{"call": "write_file", "path": "\\ud800", "content": "\\ud800"}',
    b'{"call": "write_file", "path": ["a"], "content": "a"}',
    b"",
)


def test_garbage_gets_an_error_and_the_connection_stays_open(alice: Called) -> None:
    for line in GARBAGE:
        with alice.connected() as end:
            end.sendall(line + b"\n")
            said = answer(end)
            assert said["ok"] is False, (line[:100], said)
            end.sendall(WHOAMI)
            assert answer(end)["result"]["agent"] == "alice", line[:100]


def test_an_unterminated_line_delays_no_other_caller_and_expires(alice: Called) -> None:
    """Bytes beyond the limit are not kept, and a line that is not completed in time closes the connection.

    However many there are of them.
    """
    halves = [alice.connect() for _ in range(MAX_CONNECTIONS - 8)]
    for half in halves:
        half.sendall(b'{"call": "who')
    with alice.connected() as end:
        block = b"a" * (1 << 20)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range((MAX_LINE >> 20) + 2):
                end.sendall(block)
                if end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) if _readable(end) else b"":
                    break
        assert serves(alice)
        said = answer(end)
        assert said == {} or "at most" in said["error"]["message"]
        assert answer(end) == {}
    for half in halves:
        half.settimeout(60)
        assert answer(half) == {}
        half.close()


def _readable(end: socket.socket) -> bool:
    try:
        return bool(end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return False


def test_the_longest_call_is_accepted(alice: Called) -> None:
    content = "x" * (MAX_LINE - 100)
    assert alice("write_file", path="large", content=content) == {"path": "large"}
    assert (alice.path / "large").stat().st_size == len(content)


def test_two_hundred_connections_do_not_block_a_new_one(alice: Called) -> None:
    """A new connection replaces the one that has been idle for the longest time."""
    ends = [alice.connect() for _ in range(200)]
    try:
        assert serves(alice)
        ends[-1].sendall(WHOAMI)
        assert answer(ends[-1])["ok"]
        assert answer(ends[0]) == {}
        held = os.listdir(f"/proc/{companion_of(alice.world.pid)}/fd")
        assert len(held) < MAX_CONNECTIONS + 40
    finally:
        for end in ends:
            end.close()


def test_a_caller_that_reads_no_answers_delays_no_other(alice: Called) -> None:
    """It sends thousands of calls and reads nothing."""
    with alice.connected() as end:
        end.settimeout(1)
        with contextlib.suppress(TimeoutError, BrokenPipeError, ConnectionResetError):
            for _ in range(2000):
                end.sendall(WHOAMI * 100)
        assert serves(alice)


def test_callers_that_disconnect_leave_nothing(alice: Called) -> None:
    """Also during a call: it runs, and its outcome is recorded."""
    for number in range(50):
        with alice.connected() as end:
            end.sendall(json.dumps({"call": "write_file", "path": f"{number}", "content": "text"}).encode() + b"\n")
    until(lambda: len(list(alice.source.glob("[0-9]*"))) == 50, "all were made")
    for number in (0, 49):
        until(lambda n=number: len(alice.of(str(n))) == 2, "its outcome is there")  # type: ignore[misc]
    assert serves(alice)
    companion = companion_of(alice.world.pid)
    until(lambda: len(os.listdir(f"/proc/{companion}/fd")) < 40, "every connection is closed")


def test_the_identity_of_a_caller_comes_from_the_session_only(alice: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment, working directory and program of a caller do not change the agent."""
    monkeypatch.setenv("BONOBOFS_AGENT", "root")
    monkeypatch.setenv("USER", "bob")
    monkeypatch.chdir("/")
    assert call(Path(alice.directory), "whoami")["agent"] == "alice"
