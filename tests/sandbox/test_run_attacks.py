"""Attacks from inside the sandbox, with every layer on: each fails as the table says, and nothing outside changes."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.sandbox.boxes import HERE, Box
from tests.support.world import OrdinaryUser

pytestmark = pytest.mark.root
WORD = "correct-horse"
EXPECTED = {
    "read_secrets": "ENOENT",
    "read_the_password_hashes": "ENOENT",
    "list_other_homes": "ENOENT",
    "read_the_state_directory": "ENOENT",
    "reach_the_source_by_another_process": "EACCES ENOENT",
    "find_an_inherited_descriptor": "none",
    "replace_the_programs_of_the_session": "EBUSY EROFS",
    "write_the_system": "EROFS",
    "change_a_system_file": "EACCES EROFS",
    "write_a_denied_name": "EROFS",
    "write_the_configuration_of_git": "EROFS",
    "write_an_allowed_name": "done",
    "link_a_system_program": "EXDEV",
    "open_the_core_pattern": "EACCES",
    "open_kernel_files": "EACCES ENOENT",
    "open_devices": "ENOENT",
    "make_a_device": "EACCES",
    "look_at_sys": "ENOENT",
    "read_the_environment_of_process_1": "none",
    "read_the_mounts": "none",
    "connect_to_sockets_of_the_host": "ENOENT",
    "connect_to_an_abstract_socket": "ECONNREFUSED",
    "unshare_namespaces": "EPERM",
    "clone_a_namespace": "EPERM",
    "clone_with_high_bits": "EPERM",
    "clone3_a_namespace": "ENOSYS",
    "enter_a_namespace": "EPERM",
    "change_the_mounts": "EPERM",
    "unmount_with_fusermount": "refused",
    "gain_rights_by_a_program": "none",
    "call_the_kernel": "EPERM",
    "use_io_uring": "ENOSYS",
    "use_the_32_bit_interface": "ENOSYS",
    "trace_process_1": "EPERM",
    "stop_process_1": "EPERM",
    "signal_process_1": "EPERM",
    "read_the_memory_of_process_1": "EACCES",
    "see_processes_outside": "none",
    "signal_processes_outside": "ESRCH",
    "type_into_the_terminal": "EPERM",
    "open_strange_sockets": "EAFNOSUPPORT",
    "open_raw_sockets": "EPERM",
    "open_netlink_sockets": "EAFNOSUPPORT",
    "bind_a_low_port": "EACCES",
    "leave_the_network_namespace": "lo",
    "fork_without_end": "EAGAIN",
    "fill_the_memory_file_systems": "ENOSPC",
    "use_much_memory": "ENOMEM",
    "find_variables_of_the_caller": "none",
    "find_a_directory_of_the_caller_on_path": "none",
}


class Attacked(NamedTuple):
    """A sandbox after all attacks."""

    box: Box
    results: dict[str, str]
    before: dict[Path, bytes]
    status: int
    said: str


@pytest.fixture(scope="module", params=["as a user", "as root for a user", "as root in a user namespace"])
def attacked(request: pytest.FixtureRequest) -> Iterator[Attacked]:
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        box = Box(OrdinaryUser(Path(name)), as_root=request.param != "as a user")
        if request.param == "as root in a user namespace":
            box.network = ["/usr/bin/python3", str(HERE / "user_namespace.py")]
        listener, context = _prepare(box)
        secrets = [Path(path) for path in context["secrets"]]
        before = {path: path.read_bytes() for path in (*secrets, box.policy, box.source / "a.md")}
        poison = {"SECRET_WORD": WORD, "SSH_AUTH_SOCK": "/tmp/agent", "GIT_DIR": "/x", "DBUS_SESSION_BUS_ADDRESS": "y"}
        done = box.run("/usr/bin/python3", "attack_programs.py", json.dumps(context), env=poison)
        listener.close()
        results = json.loads(done.stdout) if done.stdout else {}
        yield Attacked(box, results, before, done.returncode, done.stderr)


def _prepare(box: Box) -> tuple[socket.socket, dict[str, Any]]:
    """Make secrets and sockets that the attacks look for."""
    secrets = []
    for path in (".ssh/id_ed25519", ".aws/credentials", ".netrc", "beside/token"):
        file = box.top / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(WORD)
        file.chmod(0o644)
        secrets.append(str(file))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(box.top / "host.sock"))
    os.chmod(box.top / "host.sock", 0o777)
    listener.listen()
    state = [box.state / part for part in ("trails", "bonobofs.db", "home.id", "policies", "mount.lock", "runs")]
    return listener, {
        "word": WORD,
        "secrets": secrets,
        "state": [str(path) for path in state],
        "source": str(box.source),
        "hidden": [str(box.top / "beside"), str(box.policy), "cgroup", "sysfs"],
        "sockets": [str(box.top / "host.sock")],
        "abstract": "\0bonobofs-test",
        "pid": os.getpid(),
        "tmp": 20_000_000,
        "memory": 400_000_000,
    }


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_attack_fails_as_the_table_says(attacked: Attacked, name: str) -> None:
    assert attacked.results.get(name) == EXPECTED[name], (attacked.status, attacked.said)


def test_every_attack_is_in_the_table(attacked: Attacked) -> None:
    assert attacked.results.keys() == EXPECTED.keys(), attacked.said


def test_the_host_is_untouched_and_the_denial_recorded(attacked: Attacked) -> None:
    """The source has the allowed file only, and the record names the other."""
    assert attacked.status == 0, attacked.said
    assert {path: path.read_bytes() for path in attacked.before} == attacked.before
    names = {path.name for path in attacked.box.source.iterdir()}
    assert names == {"a.md", "attack_programs.py", "made.md"}
    entries = attacked.box.entries()
    denied = [entry for entry in entries if entry["result"] == "denied"]
    assert [entry["path"] for entry in denied if entry["rule"] == "no text"] == ["denied.txt"]
    assert attacked.box.bonobofs("audit", "verify").returncode == 0
    assert attacked.box.bonobofs("status").stdout == "nothing is mounted\n"
