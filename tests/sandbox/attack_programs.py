"""Attacks on the sandbox, as a program that runs in it. It needs the standard library alone.

`python3 attack_programs.py CONTEXT` runs every attack in a process of its own and prints one JSON object with the
result of each attack. A result is the name of an errno, "done" if the attack succeeded, or a text that the test reads.
The attacks open files of /proc/sys and never write them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT: dict[str, Any] = {}
ATTACKS: dict[str, Callable[[], str]] = {}
libc = ctypes.CDLL(None, use_errno=True)
LONG = platform.machine() == "x86_64"
FAMILIES = (40, 17, 38, 31, 29, 21, 30, 44)  # AF_VSOCK, PACKET, ALG, BLUETOOTH, CAN, RDS, TIPC, XDP
NEW_USER, NEW_MOUNTS = 0x10000000, 0x20000


def attack(function: Callable[[], str]) -> Callable[[], str]:
    ATTACKS[function.__name__] = function
    return function


def syscall(number: int, *arguments: Any) -> str:
    code = libc.syscall(ctypes.c_long(number), *arguments)
    return "done" if code >= 0 else errno.errorcode[ctypes.get_errno()]


def tried(function: Callable[..., Any], *arguments: Any, **more: Any) -> str:
    try:
        function(*arguments, **more)
    except OSError as error:
        return errno.errorcode[error.errno or errno.EIO]
    return "done"


def opened(path: str, flags: int = os.O_RDONLY) -> str:
    return tried(lambda: os.close(os.open(path, flags | os.O_CLOEXEC)))


def all_of(*results: str) -> str:
    return " ".join(sorted(set(results)))


@attack
def read_secrets() -> str:
    return all_of(*(opened(path) for path in CONTEXT["secrets"]))


@attack
def read_the_password_hashes() -> str:
    return opened("/etc/shadow")


@attack
def list_other_homes() -> str:
    return all_of(*(opened(path) for path in ("/root", "/home", "/srv", "/mnt", "/media", "/boot")))


@attack
def read_the_state_directory() -> str:
    return all_of(*(opened(path) for path in CONTEXT["state"]))


@attack
def reach_the_source_by_another_process() -> str:
    below = CONTEXT["source"]
    return all_of(*(opened(f"/proc/{pid}/{link}{below}/a.md") for pid in (1, os.getppid()) for link in ("cwd",)))


@attack
def find_an_inherited_descriptor() -> str:
    kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 256) if os.path.lexists(f"/proc/self/fd/{fd}")]
    return " ".join(kind for kind in kinds if kind.startswith("/") and not kind.startswith("/proc/")) or "none"


@attack
def replace_the_programs_of_the_session() -> str:
    inside = os.path.dirname(os.environ["BONOBOFS_SOCKET"])
    return all_of(
        opened(f"{inside}/bin/ls", os.O_WRONLY | os.O_CREAT),
        tried(os.unlink, f"{inside}/bin/git"),
        tried(os.unlink, f"{inside}/guard.sock"),
        tried(os.rename, inside, f"{inside}.old"),
    )


@attack
def write_the_system() -> str:
    flags = os.O_WRONLY | os.O_CREAT
    return all_of(*(opened(path, flags) for path in ("/usr/x", "/usr/bin/x", "/etc/x", "/x", "/opt/x", "/run/x")))


@attack
def change_a_system_file() -> str:
    return all_of(opened("/etc/passwd", os.O_WRONLY), opened("/usr/bin/env", os.O_WRONLY), tried(os.mkdir, "/y"))


@attack
def write_a_denied_name() -> str:
    return opened("denied.txt", os.O_WRONLY | os.O_CREAT)


@attack
def write_the_configuration_of_git() -> str:
    return all_of(tried(os.mkdir, ".git"), opened(".git", os.O_WRONLY | os.O_CREAT))


@attack
def write_an_allowed_name() -> str:
    return tried(lambda: Path("made.md").write_text("made\n"))


@attack
def link_a_system_program() -> str:
    return tried(os.link, "/usr/bin/env", "/tmp/env")


@attack
def open_the_core_pattern() -> str:
    return opened("/proc/sys/kernel/core_pattern", os.O_WRONLY)


@attack
def open_kernel_files() -> str:
    return all_of(
        opened("/proc/sysrq-trigger", os.O_WRONLY), opened("/proc/kcore"), opened("/proc/sys/vm/drop_caches", 1)
    )


@attack
def open_devices() -> str:
    names = ("fuse", "vda", "sda", "kmsg", "mem", "loop0", "vsock", "kvm", "net/tun")
    return all_of(*(opened(f"/dev/{name}") for name in names))


@attack
def make_a_device() -> str:
    return tried(os.mknod, "/tmp/disk", 0o60600, os.makedev(254, 0))


@attack
def look_at_sys() -> str:
    return opened("/sys")


@attack
def read_the_environment_of_process_1() -> str:
    # /proc/1 may be closed to the command; if it can be read, nothing of the caller is in it.
    found = ""
    for name in ("environ", "cmdline"):
        try:
            found += Path(f"/proc/1/{name}").read_bytes().decode(errors="replace")
        except OSError:
            continue
    return "done" if CONTEXT["word"] in found else "none"


@attack
def read_the_mounts() -> str:
    table = Path("/proc/self/mountinfo").read_text()
    return "done" if any(path in table for path in CONTEXT["hidden"]) else "none"


@attack
def connect_to_sockets_of_the_host() -> str:
    results = []
    for path in (*CONTEXT["sockets"], "/run/docker.sock", "/run/dbus/system_bus_socket", "/tmp/.X11-unix/X0"):
        end = socket.socket(socket.AF_UNIX)
        results.append(tried(end.connect, path))
    return all_of(*results)


@attack
def connect_to_an_abstract_socket() -> str:
    return tried(socket.socket(socket.AF_UNIX).connect, CONTEXT["abstract"])


@attack
def unshare_namespaces() -> str:
    number = 272 if LONG else 97
    return all_of(*(syscall(number, flags) for flags in (NEW_USER, NEW_MOUNTS, NEW_USER | NEW_MOUNTS, 0x40000000)))


@attack
def clone_a_namespace() -> str:
    # A child would be a copy of this process.
    number = 56 if LONG else 220
    return all_of(*(syscall(number, flags | signal.SIGCHLD, 0, 0, 0, 0) for flags in (NEW_USER, NEW_MOUNTS)))


@attack
def clone_with_high_bits() -> str:
    return syscall(56 if LONG else 220, ctypes.c_ulong(1 << 40 | NEW_USER | signal.SIGCHLD), 0, 0, 0, 0)


@attack
def clone3_a_namespace() -> str:
    arguments = (ctypes.c_uint64 * 11)(NEW_USER, 0, 0, 0, signal.SIGCHLD)
    return syscall(435, arguments, ctypes.sizeof(arguments))


@attack
def enter_a_namespace() -> str:
    fd = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    return syscall(308 if LONG else 268, fd, 0)


@attack
def change_the_mounts() -> str:
    mount, umount, pivot, root = (165, 166, 155, 161) if LONG else (40, 39, 41, 51)
    return all_of(
        syscall(mount, b"/tmp", b"/tmp", None, 4096, None),
        syscall(mount, b"none", b"/tmp", b"tmpfs", 0, None),
        syscall(umount, os.fsencode(CONTEXT["source"]), 2),
        syscall(pivot, b"/tmp", b"/tmp"),
        syscall(root, b"/tmp"),
        syscall(430, b"tmpfs", 0),
        syscall(428, -100, b"/", 1),
        syscall(429, -100, b"/tmp", -100, b"/tmp", 0),
        syscall(442, -100, b"/", 0, 0, 0),
    )


@attack
def unmount_with_fusermount() -> str:
    ran = subprocess.run(["fusermount3", "-u", "-z", CONTEXT["source"]], capture_output=True, check=False)
    return "done" if ran.returncode == 0 else "refused"


@attack
def gain_rights_by_a_program() -> str:
    for words in (["su", "-c", "id -u"], ["sudo", "-n", "id", "-u"], ["mount"], ["newgrp", "root"]):
        try:
            ran = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        except OSError:
            continue
        if ran.stdout.strip() == "0":
            return "done"
    status = Path("/proc/self/status").read_text()
    return "none" if "NoNewPrivs:\t1" in status and "CapEff:\t0000000000000000" in status else "done"


@attack
def call_the_kernel() -> str:
    # bpf, perf_event_open, userfaultfd, kexec_load, keyctl, add_key, syslog, settimeofday, open_by_handle_at, kcmp
    numbers = (
        (321, 298, 323, 246, 250, 248, 103, 164, 304, 312, 300, 438, 310, 175, 169)
        if LONG
        else (280, 241, 282, 104, 219, 217, 116, 170, 265, 272, 262, 438, 270, 105, 142)
    )
    return all_of(*(syscall(number, 0, 0, 0, 0, 0, 0) for number in numbers))


@attack
def use_io_uring() -> str:
    return all_of(*(syscall(number, 0, 0, 0, 0) for number in (425, 426, 427)))


@attack
def use_the_32_bit_interface() -> str:
    if not LONG:
        return "ENOSYS"
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, getpid; int 0x80; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    result = ctypes.CFUNCTYPE(ctypes.c_int)(address)()
    x32 = syscall(0x40000000 | 39)
    return all_of(errno.errorcode.get(-result, "done"), x32)


@attack
def trace_process_1() -> str:
    return syscall(101 if LONG else 117, 0x4206, 1, 0, 0)  # PTRACE_SEIZE, which does not stop it


@attack
def stop_process_1() -> str:
    return syscall(101 if LONG else 117, 16, 1, 0, 0)  # PTRACE_ATTACH


@attack
def signal_process_1() -> str:
    return all_of(tried(os.kill, 1, signal.SIGSTOP), tried(os.kill, 1, signal.SIGKILL))


@attack
def read_the_memory_of_process_1() -> str:
    return all_of(opened("/proc/1/mem", os.O_RDWR), opened("/proc/1/root/etc/passwd"))


@attack
def see_processes_outside() -> str:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    commands = b""
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            commands += Path(f"/proc/{pid}/cmdline").read_bytes() if pid > 1 else b""
    return "done" if b"bonobofs.fuse.main" in commands or len(pids) > 50 else "none"


@attack
def signal_processes_outside() -> str:
    pid = CONTEXT["pid"]
    return all_of(tried(os.kill, pid, 0), tried(os.pidfd_open, pid))


@attack
def type_into_the_terminal() -> str:
    fd = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    requests = (0x5412, 0x5412 | 1 << 32, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD
    return all_of(*(syscall(16 if LONG else 29, fd, ctypes.c_ulong(request), b"x") for request in requests))


@attack
def open_strange_sockets() -> str:
    return all_of(*(tried(socket.socket, family, kind) for family in FAMILIES for kind in (1, 2, 3, 5)))


@attack
def open_raw_sockets() -> str:
    return all_of(
        tried(socket.socket, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        tried(socket.socket, socket.AF_INET6, socket.SOCK_RAW, 58),
    )


@attack
def open_netlink_sockets() -> str:
    # sock_diag, audit, kobject_uevent, netfilter, connector
    return all_of(*(tried(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, number) for number in (4, 9, 15, 12, 11)))


@attack
def bind_a_low_port() -> str:
    return all_of(*(tried(socket.socket().bind, ("127.0.0.1", port)) for port in (22, 53, 80, 443)))


@attack
def leave_the_network_namespace() -> str:
    names = os.listdir("/sys/class/net") if os.path.isdir("/sys/class/net") else []
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return " ".join(sorted({line.split(":")[0].strip() for line in lines} | set(names)))


@attack
def fork_without_end() -> str:
    children = []
    result = "done"
    for _ in range(5000):
        try:
            pid = os.fork()
        except OSError as error:
            result = errno.errorcode[error.errno or errno.EIO]
            break
        if pid == 0:
            select.select([], [], [], 30)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return result


@attack
def fill_the_memory_file_systems() -> str:
    results = []
    for place in ("/tmp", "/dev/shm", "/var/tmp", os.environ["HOME"]):
        path = f"{place}/large"
        with open(path, "wb") as file:
            results.append(tried(os.posix_fallocate, file.fileno(), 0, CONTEXT["tmp"] + (1 << 20)))
        os.unlink(path)
    return all_of(*results)


@attack
def use_much_memory() -> str:
    try:
        held = bytearray(CONTEXT["memory"] + (64 << 20))
    except MemoryError:
        return "ENOMEM"
    return f"done {len(held)}"


@attack
def find_variables_of_the_caller() -> str:
    names = ("LD_PRELOAD", "GIT_DIR", "PYTHONPATH", "PYTHONSTARTUP", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS")
    return " ".join(name for name in (*names, "SECRET_WORD") if name in os.environ) or "none"


@attack
def find_a_directory_of_the_caller_on_path() -> str:
    parts = os.environ["PATH"].split(":")
    return "none" if parts[0].endswith("/inside/bin") and all(map(os.path.isdir, parts)) else "done"


def _run(function: Callable[[], str]) -> str:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        result = "unforeseen"
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - the test sees it
            result = f"unforeseen {error!r}"
        finally:
            os.write(write, result.encode())
            os._exit(0)
    os.close(write)
    timer = threading.Timer(60, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    timer.cancel()
    return text


def main() -> None:
    CONTEXT.update(json.loads(sys.argv[1]))
    names = CONTEXT.get("attacks") or list(ATTACKS)
    fcntl.fcntl(1, fcntl.F_GETFD)
    print(json.dumps({name: _run(ATTACKS[name]) for name in names}))


if __name__ == "__main__":
    main()
