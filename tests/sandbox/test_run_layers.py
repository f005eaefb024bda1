"""Each layer of the sandbox alone, and the sandbox without one layer: which of them stops which attack."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bonobofs.errors import MountError
from bonobofs.sandbox import bwrap_arguments, seccomp_filter
from bonobofs.sandbox.bwrap_arguments import Account, Descriptors, View
from tests.sandbox.attack_programs import ATTACKS
from tests.sandbox.boxes import HERE, Box
from tests.support.commands import ROOT
from tests.support.world import NOBODY, OrdinaryUser

pytestmark = pytest.mark.root
FILES = ("read_secrets", "read_the_state_directory", "write_the_system", "open_the_core_pattern")
CALLS = (
    "use_io_uring",
    "call_the_kernel",
    "open_strange_sockets",
    "open_netlink_sockets",
    "clone3_a_namespace",
    "type_into_the_terminal",
)
ELSEWHERE = {
    # the mount
    "write_a_denied_name",
    "write_an_allowed_name",
    "write_the_configuration_of_git",
    # limits and environment
    "fork_without_end",
    "fill_the_memory_file_systems",
    "use_much_memory",
    "find_variables_of_the_caller",
    "find_a_directory_of_the_caller_on_path",
    "read_the_environment_of_process_1",
    # without Landlock the first process stays stopped, and the sandbox never ends
    "stop_process_1",
}
"""Attacks that a part of `run` stops which these tests leave out."""


class Bench:
    """A directory with secrets, and ways to run the attacks under chosen layers. No layer needs a mount of ours."""

    def __init__(self, user: OrdinaryUser) -> None:
        self.box = Box(user)
        (self.box.source / "one_layer.py").write_bytes((HERE / "one_layer.py").read_bytes())
        secret = self.box.top / "secret"
        secret.write_text("secret")
        secret.chmod(0o644)
        self.inside = self.box.top / "state/sessions/1/inside"
        self.inside.mkdir(parents=True)
        for path in (self.box.top / "state", *(self.box.top / "state").rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        (self.box.top / "state/trail").write_text("trail")
        self.path = self.box.top / "host.sock"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.path.chmod(0o777)
        self.listener.listen()
        account = Account("nobody", NOBODY, NOBODY, str(self.box.top / "h"), "/bin/sh")
        source = str(self.box.source)
        self.view = View(account, source, source, source, str(self.inside), str(self.box.top / "state"))
        self.context = {
            "attacks": [name for name in ATTACKS if name not in ELSEWHERE],
            "secrets": [str(secret)],
            "state": [str(self.box.top / "state/trail")],
            "source": source,
            "hidden": [str(self.box.top / "secret"), "cgroup", "sysfs"],
            "sockets": [str(self.path)],
            "abstract": "\0bonobofs-layers",
            "pid": os.getpid(),
        }

    def run(self, *command: str, fds: Sequence[int] = ()) -> dict[str, str]:
        """Run a command as an ordinary user in a network namespace of its own."""
        listens = (
            "import socket, os, sys; s = socket.socket(socket.AF_UNIX); s.bind('\\0bonobofs-layers'); s.listen(); "
        )
        listens += "s.set_inheritable(False); os.spawnvp(os.P_WAIT, sys.argv[1], sys.argv[1:])"
        who = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
        ran = subprocess.run(
            ["unshare", "--net", "--", *who, "/usr/bin/python3", "-c", listens, *command],
            cwd=self.box.source,
            env={"PATH": os.environ["PATH"], "HOME": "/tmp", "BONOBOFS_SOCKET": str(self.inside / "guard.sock")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            pass_fds=fds,
        )
        assert ran.stdout, ran.stderr
        found: dict[str, str] = json.loads(ran.stdout)
        return found

    @property
    def program(self) -> list[str]:
        return ["/usr/bin/python3", "attack_programs.py", json.dumps(self.context)]

    def layers(self, *layers: str) -> list[str]:
        """Return a command that enters some layers in place, without namespaces."""
        read = bwrap_arguments.readable(self.view)
        # The secrets lie in the machine's own /tmp.
        write = [path for path in bwrap_arguments.writable(self.view) if path != "/tmp"]
        config = json.dumps({"read": [*read, str(ROOT)], "write": write, "package": str(ROOT)})
        return ["/usr/bin/python3", "one_layer.py", ",".join(layers) or "none", config, *self.program]

    def namespaces(self, command: Sequence[str], *, seccomp: bool) -> dict[str, str]:
        """Run a command in the namespaces of the sandbox, without the last step."""
        files = []

        def memory(content: bytes) -> int:
            files.append(os.memfd_create("test"))
            os.write(files[-1], content)
            os.lseek(files[-1], 0, os.SEEK_SET)
            return files[-1]

        contents = {path: memory(text.encode()) for path, text in bwrap_arguments.etc_files(self.view.account).items()}
        info = memory(b"")
        filter_fd = memory(seccomp_filter.build()) if seccomp else -1
        view = self.view._replace(read=(str(ROOT / "bonobofs"),))
        options = bwrap_arguments.build(view, Descriptors(info, filter_fd, contents))
        try:
            return self.run("bwrap", *options, "--", *command, fds=files)
        finally:
            for fd in files:
                os.close(fd)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        made = Bench(OrdinaryUser(Path(name)))
        yield made
        made.listener.close()


def test_without_a_layer_the_attacks_succeed(bench: Bench) -> None:
    """The attacks are real: on the bare machine most of them reach their goal."""
    found = bench.run(*bench.layers())
    for name in ("read_secrets", "read_the_state_directory", "connect_to_an_abstract_socket"):
        assert found[name] == "done", name
    assert "done" in found["unshare_namespaces"]
    assert found["connect_to_sockets_of_the_host"] == "ENOENT done"
    assert "done" in found["open_strange_sockets"]
    assert "done" in found["open_netlink_sockets"]
    assert found["use_io_uring"] != "ENOSYS"


def test_landlock_alone_closes_files_mounts_and_processes(bench: Bench) -> None:
    found = bench.run(*bench.layers("landlock"))
    assert {found[name] for name in FILES} == {"EACCES"}
    assert found["change_the_mounts"] != "done"
    assert found["trace_process_1"] == "EPERM"
    assert found["connect_to_an_abstract_socket"] == "EPERM"
    assert "done" in found["open_strange_sockets"]
    assert found["use_io_uring"] != "ENOSYS"


def test_seccomp_alone_closes_system_calls(bench: Bench) -> None:
    found = bench.run(*bench.layers("seccomp"))
    assert found["use_io_uring"] == found["clone3_a_namespace"] == "ENOSYS"
    assert found["call_the_kernel"] == found["change_the_mounts"] == found["unshare_namespaces"] == "EPERM"
    assert found["open_strange_sockets"] == found["open_netlink_sockets"] == "EAFNOSUPPORT"
    assert found["type_into_the_terminal"] == "EPERM"
    assert found["read_secrets"] == "done"


def test_namespaces_alone_close_files_processes_and_sockets(bench: Bench) -> None:
    found = bench.namespaces(bench.program, seccomp=False)
    assert (found["read_secrets"], found["read_the_state_directory"]) == ("ENOENT", "ENOENT")
    assert found["signal_processes_outside"] == "ESRCH"
    assert found["connect_to_sockets_of_the_host"] == "ENOENT"
    assert found["connect_to_an_abstract_socket"] == "ECONNREFUSED"
    assert found["unshare_namespaces"] != "done"
    assert "done" in found["open_strange_sockets"]
    assert found["use_io_uring"] != "ENOSYS"
    assert found["trace_process_1"] == "done"


def successes(found: dict[str, str]) -> set[str]:
    return {name for name, result in found.items() if "done" in result.split()}


def test_without_landlock_the_other_layers_stop_all_but_reaching_process_1(bench: Bench) -> None:
    found = bench.namespaces(bench.program, seccomp=True)
    assert successes(found) == {"trace_process_1", "signal_process_1", "read_the_memory_of_process_1"}


def test_without_seccomp_the_other_layers_stop_all_but_system_calls(bench: Bench) -> None:
    found = bench.namespaces(bench.layers("landlock"), seccomp=False)
    assert successes(found) <= {*CALLS, "use_the_32_bit_interface"}
    assert {"open_strange_sockets", "open_netlink_sockets"} <= successes(found)


def test_without_namespaces_the_other_layers_stop_all_but_looking_around(bench: Bench) -> None:
    """Names, processes, sockets and networks of the host are visible; no file can be read or changed."""
    found = bench.run(*bench.layers("landlock", "seccomp"))
    assert found.pop("leave_the_network_namespace") != ""
    assert successes(found) <= {
        "list_other_homes",
        "look_at_sys",
        "read_the_mounts",
        "connect_to_sockets_of_the_host",
        "see_processes_outside",
        "signal_processes_outside",
    }
    assert {"see_processes_outside", "connect_to_sockets_of_the_host"} <= successes(found)


def test_the_filter_has_a_table_for_each_machine_or_refuses() -> None:
    """Every jump of a filter stays in it. A machine without a table is refused."""
    for machine in ("x86_64", "aarch64"):
        program = seccomp_filter.build(machine)
        instructions = [program[at : at + 8] for at in range(0, len(program), 8)]
        assert all(at + 1 + code[2] < len(instructions) for at, code in enumerate(instructions[:-1]))
        assert instructions[-1][0] == 0x06
    with pytest.raises(MountError, match="riscv64"):
        seccomp_filter.build("riscv64")


def test_a_machine_without_bubblewrap_or_landlock_or_namespaces_is_refused(bench: Bench) -> None:
    """There is no weaker mode: `run` says what to do, and nothing runs."""
    box = bench.box
    empty = box.top / "empty"
    empty.mkdir()
    for name in ("unshare", "setpriv", "fusermount3", "git"):
        (empty / name).symlink_to(f"/usr/bin/{name}")
    without = box.run("touch", "ran", env={"PATH": str(empty)})
    assert (without.returncode, "install the package bubblewrap" in without.stderr) == (1, True)
    (empty / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    (empty / "bwrap").chmod(0o755)
    (empty / "sh").symlink_to("/bin/sh")
    closed = box.run("touch", "ran", env={"PATH": str(empty)})
    assert (closed.returncode, "No permissions to create a new namespace" in closed.stderr) == (1, True)
    assert "bonobofs doctor" in closed.stderr
    assert not (box.source / "ran").exists()
    assert box.bonobofs("status").stdout == "nothing is mounted\n"


WITHOUT = """
import ctypes, os, platform, struct, sys

# system call on x86_64 and aarch64, bits that its first argument has (0: any), errno
x86_64, aarch64, bits, error = map(int, sys.argv[1:5])
number = x86_64 if platform.machine() == "x86_64" else aarch64
code = [(0x20, 0, 0, 0), (0x15, 0, 4, number), (0x20, 0, 0, 16), (0x54, 0, 0, bits), (0x15, 0, 1, bits)]
code += [(6, 0, 0, 0x50000 | error), (6, 0, 0, 0x7FFF0000)]
text = b"".join(struct.pack("=HBBI", *line) for line in code)
class Program(ctypes.Structure): _fields_ = (("n", ctypes.c_ushort), ("f", ctypes.c_char_p))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(22, 2, ctypes.byref(Program(len(code), text)), 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execvp(sys.argv[5], sys.argv[5:])
"""
MISSING = {
    "Landlock": ((444, 444, 0, 38), "the kernel has no Landlock"),
    "AF_PACKET": ((41, 198, 17, 97), "record refused connections (AF_PACKET; the kernel needs CONFIG_PACKET)"),
    "user namespaces": ((56, 220, 0x10000000, 1), "the sandbox cannot start: bwrap: "),
    "seccomp": ((157, 167, 22, 22), "prctl(PR_SET_SECCOMP)"),
}


@pytest.mark.parametrize("layer", MISSING)
def test_a_kernel_without_a_layer_is_refused(bench: Bench, layer: str) -> None:
    """A filter that answers an errno stands for such a kernel. Nothing runs, and the message says what is missing."""
    box = bench.box
    box.as_root = True
    os.chown(box.top, 0, 0)
    box.top.chmod(0o755)
    numbers, message = MISSING[layer]
    words = box.run_words("touch", "ran")
    at = words.index(box.user.python)
    ran = subprocess.run(
        [*words[:at], box.user.python, "-c", WITHOUT, *map(str, numbers), *words[at:]],
        env=box.environment,
        cwd=box.source,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (ran.returncode, message in ran.stderr) == (1, True), ran.stderr
    assert "bonobofs doctor" in ran.stderr or "landlock in the list" in ran.stderr
    assert not (box.source / "ran").exists()
    assert box.bonobofs("status").stdout == "nothing is mounted\n"


LATE_SIGNAL = """
import ctypes, os, signal, sys
from bonobofs.sandbox import bwrap_arguments
from bonobofs.sandbox.bwrap_arguments import Account, View
from bonobofs.sandbox.sandbox_process import CommandUser, ResourceLimits, SandboxProcess

source, inside, uid = sys.argv[1], sys.argv[2], int(sys.argv[3])
view = View(Account("nobody", uid, uid, "/home/nobody", "/bin/sh"), source, source, source, inside,
            os.path.dirname(inside), bwrap_arguments.own_code())
null = os.open("/dev/null", os.O_RDWR)
user = CommandUser(uid, uid, ())
sandbox = SandboxProcess(view, {"PATH": "/usr/bin"}, streams=[null] * 3, terminal=-1, identity=user)
assert sandbox.release(view, ["sh", "-c", "exit 5"], ResourceLimits()) == ""
assert sandbox.wait() == 5

# Another process gets the number of the command, as the leader of a group.
libc = ctypes.CDLL(None, use_errno=True)
number = ctypes.c_int(sandbox.command_pid)
read, write = os.pipe()
arguments = (ctypes.c_uint64 * 11)(0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(number), 1, 0)
pid = libc.syscall(435, arguments, ctypes.sizeof(arguments))
if pid == 0:
    os.setsid()
    os.write(write, b"x")
    signal.pause()
assert pid == sandbox.command_pid, os.strerror(ctypes.get_errno())
os.read(read, 1)
sandbox.send(signal.SIGTERM)
sandbox.kill()
assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the late signal reached another process"
os.kill(pid, signal.SIGKILL)
assert os.waitpid(pid, 0)[1] == signal.SIGKILL
print("alive")
"""


def test_no_signal_reaches_a_process_that_has_the_number_of_the_ended_command(bench: Bench) -> None:
    ran = subprocess.run(
        [bench.box.user.python, "-c", LATE_SIGNAL, str(bench.box.source), str(bench.inside), str(NOBODY)],
        cwd="/",
        env=bench.box.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.stdout == "alive\n", ran.stderr
