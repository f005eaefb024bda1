"""`bonobofs run -- bash` in a terminal: job control, size, signals and exit status."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bonobofs.system.mounts import bonobofs_mounts
from tests.sandbox.boxes import Box
from tests.support.wait import until
from tests.support.world import OrdinaryUser

pytestmark = pytest.mark.root
SECONDS = 60.0


class Terminal:
    """The operator's terminal, with one program."""

    def __init__(self, box: Box, *program: str) -> None:
        self.box = box
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(box.source)
            os.execvpe(program[0], program, {**box.environment, "PS1": "outer> ", "TERM": "dumb"})
        self.seen = b""
        self.resize(30, 100)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def paste(self, data: bytes) -> None:
        """Type many bytes as fast as the terminal takes them."""
        os.set_blocking(self.fd, False)
        deadline = time.monotonic() + SECONDS
        while data:
            readable, writable, _ = select.select([self.fd], [self.fd], [], deadline - time.monotonic())
            assert readable or writable, f"the terminal takes no more, with {len(data)} bytes left"
            if readable:
                self.seen += os.read(self.fd, 1 << 16)
            if writable:
                with contextlib.suppress(BlockingIOError):
                    data = data[os.write(self.fd, data) :]
        os.set_blocking(self.fd, True)

    def expect(self, text: str) -> str:
        """Return what the terminal shows up to this text."""
        deadline = time.monotonic() + SECONDS
        while text.encode() not in self.seen:
            assert select.select([self.fd], [], [], deadline - time.monotonic())[0], self.seen
            self.seen += os.read(self.fd, 1 << 16)
        before, _, self.seen = self.seen.partition(text.encode())
        return before.decode(errors="replace")

    def command(self, text: str, prompt: str) -> str:
        """Type a command and return its output."""
        self.type(text + "\n")
        self.expect("\n")
        return self.expect(prompt)

    def start(self, *command: str) -> None:
        self.type(" ".join(f"'{word}'" for word in self.box.run_words(*command)) + "\n")
        self.expect("layers in force: ")
        self.expect("\n")

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        """End the shell, and the command in its foreground that a failed test has left."""
        foreground = os.tcgetpgrp(self.fd)
        os.killpg(foreground, signal.SIGKILL)
        if foreground != self.pid:
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)
        until(lambda: not any(self.box.top in each.mountpoint.parents for each in bonobofs_mounts()), "it is unmounted")


def in_foreground(*command: str) -> bool:
    """Return True if a process with this command line has its terminal and is not stopped."""
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (directory / "cmdline").read_text() == "\0".join((*command, "")):
                state, _, group, _, _, foreground = (directory / "stat").read_text().rpartition(") ")[2].split()[:6]
                return group == foreground and state != "T"
    return False


@pytest.fixture(params=["as a user", "as root for a user"])
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        box = Box(OrdinaryUser(Path(name)), as_root=request.param == "as root for a user")
        made = Terminal(box, "bash", "--norc", "-i")
        made.expect("outer> ")
        yield made
        made.close()


def test_a_shell_has_job_control_and_the_size_of_the_terminal(terminal: Terminal) -> None:
    """Ctrl-Z, fg and Ctrl-C reach the jobs of the shell inside, and the status of the shell reaches the outer one."""
    terminal.start("bash", "--norc", "-i")
    terminal.expect("$ ")
    terminal.command("PS1='inner''> '", "inner> ")
    assert "/dev/console" in terminal.command("tty", "inner> ")
    assert "30 100" in terminal.command("stty size", "inner> ")
    terminal.type("trap 'echo resized' WINCH\n")
    terminal.expect("inner> ")
    terminal.resize(50, 132)
    terminal.type("\n")
    terminal.expect("resized")
    terminal.expect("inner> ")
    assert "50 132" in terminal.command("stty size", "50 132") + "50 132"
    terminal.expect("inner> ")
    seconds = str(1000 + os.getpid())
    terminal.type(f"sh -c 'echo begun; exec sleep {seconds}'\n")
    terminal.expect("\nbegun")
    terminal.type("\x1a")
    terminal.expect("Stopped")
    terminal.expect("inner> ")
    terminal.type("fg; echo jo''b $?\n")
    until(lambda: in_foreground("sleep", seconds), "the job has the terminal")
    terminal.type("\x03")
    terminal.expect("inner> ")
    assert "130" in terminal.command("echo $?", "inner> ")
    terminal.type("exit 37\n")
    terminal.expect("outer> ")
    assert "37" in terminal.command("echo $?", "outer> ")


def test_ctrl_z_suspends_a_program_that_is_no_shell(terminal: Terminal) -> None:
    """The outer shell has its prompt and its terminal back, and fg continues the program."""
    terminal.start("sh", "-c", "echo begun; exec cat")
    terminal.expect("begun")
    terminal.type("one\n")
    terminal.expect("one\r\none")
    terminal.type("\x1a")
    terminal.expect("Stopped")
    terminal.expect("outer> ")
    assert " echo " in terminal.command("stty -a", "outer> ")
    terminal.type("fg\n")
    terminal.expect("\n")
    terminal.type("two\n")
    terminal.expect("two\r\ntwo")
    terminal.type("\x03")
    terminal.expect("outer> ")
    assert "130" in terminal.command("echo $?", "outer> ")


def test_ctrl_z_without_a_shell_does_not_stop_the_program(ordinary_user: OrdinaryUser) -> None:
    """No process would continue it, as under `ssh -t host bonobofs run`."""
    box = Box(ordinary_user)
    terminal = Terminal(box, *box.run_words("sh", "-c", "echo begun; exec cat"))
    terminal.expect("begun")
    terminal.type("\x1a")
    terminal.expect("^Z")
    terminal.type("two\n")
    terminal.expect("two\r\ntwo")
    terminal.type("\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 130
    os.close(terminal.fd)


def test_a_paste_that_the_command_reads_slowly_arrives_whole(terminal: Terminal) -> None:
    """Pasted bytes wait while the command's terminal is full, and Ctrl-C works afterwards."""
    script = "stty -icanon; echo begun; for n in $(seq 64); do head -c 1024; sleep 0.02; done | wc -c; exec cat"
    terminal.start("bash", "-c", script)
    terminal.expect("begun")
    terminal.paste(b"x" * (64 << 10))
    terminal.expect("65536")
    terminal.type("one\n")
    terminal.expect("one^Jone")
    terminal.type("\x03")
    terminal.expect("outer> ")
    assert "130" in terminal.command("echo $?", "outer> ")


def test_typed_keys_do_not_reach_the_outer_shell(terminal: Terminal) -> None:
    """The command cannot open the terminal of the operator, nor type into it."""
    program = (
        "import fcntl, os\n"
        "for name in ('/dev/tty', '/dev/console', '/proc/self/fd/0'):\n"
        "    fd = os.open(name, os.O_RDWR)\n"
        "    try: fcntl.ioctl(fd, 0x5412, b'x')\n"
        "    except OSError as error: print(name, error.errno)\n"
    )
    (terminal.box.source / "type.py").write_text(program)
    terminal.start("/usr/bin/python3", "type.py")
    shown = terminal.expect("outer> ")
    assert [line.strip() for line in shown.splitlines() if line.strip()] == [
        "/dev/tty 1",
        "/dev/console 1",
        "/proc/self/fd/0 1",
    ]
