"""execve(2): scripts and programs that lie in the directory."""

from __future__ import annotations

import os
import shutil
import subprocess

from tests.posix.harness import ANY, See, attempt, case
from tests.support.syscalls import ANNA, BERT, append, make, opened, read

SCRIPT = b'#!/bin/sh\necho "$1"\nexit 7\n'


def _output(*command: str) -> tuple[int, str]:
    """Exit code and output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()


@case()
def test_script(see: See) -> None:
    """A script runs when it may be executed."""
    see("create", None, make, "a.md", SCRIPT)
    see("not yet", "EACCES", _output, "./a.md", "hello")
    see("chmod", None, os.chmod, "a.md", 0o755)
    see("run", (7, "hello"), _output, "./a.md", "hello")
    see("by its whole path", (7, "hello"), _output, str(see.at / "a.md"), "hello")
    see("access", True, os.access, "a.md", os.X_OK)
    see("change it", 18, append, "a.md", b"echo never reached")
    see("run again", (7, "again"), _output, "./a.md", "again")
    see("by its reader", (7, "sh"), _output, "/bin/sh", "a.md", "sh")


@case()
def test_script_just_written(see: See) -> None:
    """A script runs as soon as it has been written and closed, over and over."""

    def write_and_run() -> list[int]:
        codes = []
        for number in range(10):
            make(f"{number}.md", b"#!/bin/sh\nexit %d\n" % number, 0o755)
            codes.append(_output(f"./{number}.md")[0])
        return codes

    see("exit codes", list(range(10)), write_and_run)


@case()
def test_program(see: See) -> None:
    """A program that is copied runs."""
    see("copy", "tool.md", shutil.copyfile, "/bin/true", "tool.md")
    see("chmod", None, os.chmod, "tool.md", 0o755)
    see("run", (0, ""), _output, "./tool.md")
    see("rename", None, os.rename, "tool.md", "other.md")
    see("run the other", (0, ""), _output, "./other.md")
    see("remove", None, os.unlink, "other.md")
    see("gone", "ENOENT", _output, "./other.md")


@case()
def test_other_files_are_not_run(see: See) -> None:
    """What is neither a program nor a script is not run, nor is a directory."""
    see("create", None, make, "a.md", b"neither")
    see("chmod", None, os.chmod, "a.md", 0o755)
    see("run", "ENOEXEC", _output, "./a.md")
    os.mkdir("d")
    see("a directory", "EACCES", _output, "./d")
    see("below a file", "ENOTDIR", _output, "./a.md/x")
    see("a missing file", "ENOENT", _output, "./x.md")


@case()
def test_busy(see: See) -> None:
    """A program that is open for writing is not run; one that runs is as the host has it."""
    see("copy", "tool.md", shutil.copyfile, "/bin/sleep", "tool.md")
    see("chmod", None, os.chmod, "tool.md", 0o755)
    with opened("tool.md", os.O_RDWR):
        see("run while it is written", ANY, _output, "./tool.md", "0")
    see("run", (0, ""), _output, "./tool.md", "0")


@case()
def test_running(see: See) -> None:
    """A program that runs can be removed, and writing to it is as the host has it."""
    see("copy", "tool.md", shutil.copyfile, "/bin/cat", "tool.md")
    see("chmod", None, os.chmod, "tool.md", 0o755)

    said = []

    def running() -> object:
        with subprocess.Popen(["./tool.md"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            outcome = attempt(append, "tool.md", b"")
            os.unlink("tool.md")
            said.append(process.communicate(b"still running")[0])
            return outcome

    see("write to it", ANY, running)
    see("its output", [b"still running"], lambda: said)


@case(root=True)
def test_rights(see: See) -> None:
    """A user without an executable bit cannot run it; root needs any one of the bits."""
    see("create", None, make, "a.md", SCRIPT)
    for number, root, anna in ((0o755, 7, 7), (0o744, 7, "EACCES"), (0o644, "EACCES", "EACCES"), (0o645, 7, 7)):
        see(f"chmod {number:o}", None, os.chmod, "a.md", number)
        see(f"root runs {number:o}", root, lambda: _output("./a.md")[0])
        see(f"anna runs {number:o}", anna, lambda: _output(str(see.at / "a.md"))[0], by=ANNA)


@case(root=True)
def test_set_user_id(see: See) -> None:
    """A set-user-id program runs as its owner, a set-group-id one with its group."""
    see("copy", "tool.md", shutil.copyfile, "/usr/bin/id", "tool.md")
    os.chown("tool.md", *ANNA[:2])
    see("chmod", None, os.chmod, "tool.md", 0o4755)
    see("as its owner", (0, str(ANNA.uid)), _output, str(see.at / "tool.md"), "-u", by=BERT)
    see("really", (0, str(BERT.uid)), _output, str(see.at / "tool.md"), "-ru", by=BERT)
    see("chmod for the group", None, os.chmod, "tool.md", 0o2755)
    see("with its group", (0, str(ANNA.gid)), _output, str(see.at / "tool.md"), "-g", by=BERT)
    see("content", True, lambda: read("tool.md") == read("/usr/bin/id"))
