"""The standard streams of a command that has no terminal."""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import subprocess
import tempfile
import termios
import threading
from typing import Any

import pytest

from tests.sandbox.boxes import POLICY, Box
from tests.support.wait import until

pytestmark = pytest.mark.root
SECONDS = 100.0


def start(box: Box, script: str, **streams: Any) -> subprocess.Popen[bytes]:
    """Start a script of the shell in the sandbox, with pipes for its streams."""
    return subprocess.Popen(
        box.run_words("sh", "-c", script),
        env=box.environment,
        cwd=box.source,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )


def test_pipes_and_files_pass_bytes_unchanged(user_box: Box) -> None:
    """Streams reach the command through pipes. A file that is standard output cannot be read or truncated inside."""
    data = os.urandom(3 << 20)
    ran = subprocess.run(
        user_box.run_words("sh", "-c", "cat; echo problem >&2"),
        env=user_box.environment,
        cwd=user_box.source,
        input=data,
        capture_output=True,
        check=False,
        timeout=SECONDS,
    )
    assert ran.stdout == data
    assert b"problem" in ran.stderr
    with tempfile.TemporaryFile() as file:
        file.write(b"before\n")
        file.flush()
        script = ": > /proc/self/fd/1; dd if=/proc/self/fd/1 iflag=nonblock 2>/dev/null; echo after"
        user_box.run("sh", "-c", script, stdout=file, stderr=file, capture_output=False)
        file.seek(0)
        text = file.read()
    assert text.startswith(b"before\n")
    assert text.endswith(b"after\n")
    assert text.count(b"before") == 1


def test_a_directory_as_standard_input_is_refused(user_box: Box) -> None:
    handle = os.open(user_box.source, os.O_RDONLY)
    try:
        ran = user_box.run("true", stdin=handle)
    finally:
        os.close(handle)
    assert (ran.returncode, "is a directory" in ran.stderr) == (1, True)


def test_a_reader_that_closes_its_pipe_ends_the_command(user_box: Box) -> None:
    words = " ".join(f"'{word}'" for word in user_box.run_words("yes"))
    ran = subprocess.run(
        ["bash", "-c", f"{words} | head -n 1; echo ${{PIPESTATUS[0]}}"],
        env=user_box.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert ran.stdout == "y\n141\n"


def test_a_hundred_megabytes_pass_in_both_directions(user_box: Box) -> None:
    """The writer and the reader work at the same time, and the reader gets the bytes in order."""
    block = os.urandom(1 << 20)
    with start(user_box, "cat; exit 5", stdin=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None

        def write(pipe: Any) -> None:
            with pipe:
                for _ in range(100):
                    pipe.write(block)

        writer = threading.Thread(target=write, args=(running.stdin,))
        writer.start()
        found = hashlib.sha256()
        while data := running.stdout.read(1 << 20):
            found.update(data)
        writer.join()
        assert running.stderr is not None
        errors = running.stderr.read()
        assert (running.wait(SECONDS), found.hexdigest()) == (5, hashlib.sha256(block * 100).hexdigest()), errors


def test_a_command_cannot_reach_the_pipes_of_the_caller(user_box: Box) -> None:
    """The pipes of the command are others, so it cannot read what another program has written to the caller's."""
    inner, outer = os.pipe()
    os.write(outer, b"of another program\n")
    script = (
        "dd if=/proc/self/fd/1 iflag=nonblock 2>&1 | grep -c another; for n in 0 1 2; do readlink /proc/$$/fd/$n; done"
    )
    with start(user_box, script, stdin=subprocess.PIPE, stdout=outer) as running:
        own = {os.readlink(f"/proc/self/fd/{inner}")}
        own |= {os.readlink(f"/proc/self/fd/{pipe.fileno()}") for pipe in (running.stdin, running.stderr) if pipe}
        running.communicate(timeout=SECONDS)
        os.close(outer)
        with os.fdopen(inner) as pipe:
            first, count, *pipes = pipe.read().splitlines()
        assert (first, count, len(pipes)) == ("of another program", "0", 3)
        assert own.isdisjoint(pipes)


def test_both_streams_in_one_pipe_keep_their_order(user_box: Box) -> None:
    script = "for n in $(seq 500); do echo $n; echo $n >&2; done"
    with start(user_box, script, stderr=subprocess.STDOUT) as running:
        out, _ = running.communicate(timeout=SECONDS)
    lines = [line for line in out.decode().splitlines() if line.isdigit()]
    assert lines == [str(n) for n in range(1, 501) for _ in range(2)]


def test_a_reader_that_begins_after_the_command_has_ended_gets_everything(user_box: Box) -> None:
    with start(user_box, "head -c 120000 /dev/zero; : > done.md; exit 7") as running:
        until((user_box.source / "done.md").exists, "the command has written everything", seconds=SECONDS)
        out, errors = running.communicate(timeout=SECONDS)
        assert (len(out), running.returncode) == (120_000, 7), errors


def test_a_stream_that_is_not_read_does_not_hold_the_others(user_box: Box) -> None:
    """Standard error is full while standard output and standard input work."""
    script = "(head -c 1000000 /dev/zero >&2; echo end >&2) & while read line; do echo $line; done; wait"
    with start(user_box, script, stdin=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stderr is not None
        until(lambda: bytes_in(running.stderr) >= 60_000, "standard error is full", seconds=SECONDS)
        for word in (b"one\n", b"two\n"):
            running.stdin.write(word)
            running.stdin.flush()
            assert running.stdout.readline() == word
        _, errors = running.communicate(timeout=SECONDS)
        assert errors.endswith(b"end\n")
        assert running.returncode == 0


def bytes_in(pipe: Any) -> int:
    """Return the number of bytes that wait in a pipe."""
    count = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return int.from_bytes(count, "little")


def test_a_writer_learns_that_the_command_has_closed_its_input(user_box: Box) -> None:
    with start(
        user_box, "exec <&-; echo begun; until [ -e done.md ]; do sleep 0.1; done", stdin=subprocess.PIPE
    ) as running:
        assert running.stdin is not None
        poll = select.poll()
        poll.register(running.stdin, 0)
        assert poll.poll(SECONDS * 1000) == [(running.stdin.fileno(), select.POLLERR)]
        (user_box.source / "done.md").touch()
        assert running.communicate(timeout=SECONDS)[0] == b"begun\n"


def test_a_reader_learns_that_the_command_has_closed_its_output(user_box: Box) -> None:
    with start(user_box, "echo begun; exec >&-; until [ -e done.md ]; do sleep 0.1; done; exit 3") as running:
        assert running.stdout is not None
        assert running.stdout.read() == b"begun\n"
        (user_box.source / "done.md").touch()
        running.communicate(timeout=SECONDS)
        assert running.returncode == 3


def test_a_quiet_command_gets_sigpipe_at_its_next_write(user_box: Box) -> None:
    """The relay closes its pipe with the caller's, before the command writes again."""
    script = (
        "trap 'echo piped >&2; exit 9' PIPE; echo begun; until [ -e done.md ]; do sleep 0.1; done; echo more; exit 1"
    )
    with start(user_box, script, stdin=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"begun\n"
        running.stdout.close()
        (user_box.source / "done.md").touch()
        errors = running.stderr.read()
        assert (running.wait(SECONDS), b"piped" in errors) == (9, True), errors


def test_the_time_limit_holds_for_a_command_whose_output_is_not_read(user_box: Box) -> None:
    user_box.write_policy(POLICY + 'time = "1s"\n')
    with start(user_box, "yes") as running:
        assert running.wait(SECONDS) == 124
        running.communicate()
