"""Enforcement in the handlers, without a kernel: every request that changes something is authorized and recorded."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import re
import stat
import struct
import subprocess
import uuid
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, Final, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import read
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import ProtocolError, TrailError
from bonobofs.fuse import abi as p
from bonobofs.fuse.dispatch import Operations
from bonobofs.fuse.external_changes import fingerprint_of
from bonobofs.fuse.inode_table import InodeTable
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.mount_context import Header, Notifications
from bonobofs.fuse.overlay import Overlay, OverlayUsage
from bonobofs.fuse.slices import finished
from bonobofs.fuse.temp_files import TempFiles
from bonobofs.fuse.virtual_dir import VirtualDir
from bonobofs.policy.decision import Denied, Layer, Permit, Refused
from bonobofs.policy.document import parse
from bonobofs.policy.engine import Policy, compile_policy
from bonobofs.policy.request import NO_FACTS, Context, Principal, Request
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, ROOT

DENY_ALL: Final = 'default = "deny"\n'
FUSE: Final = ROOT / "bonobofs" / "fuse"
CHANGING: Final = sorted(opcode for opcode, role in p.ROLES.items() if role is p.RequestEffect.CHANGES)


def _policy(text: str, generation: int = 1) -> Policy:
    return compile_policy(parse(text, "test").model_dump(mode="json"), generation)


class Server:
    """The handlers of a mount over a small tree, and a way to send them requests."""

    def __init__(self, directory: Path, policy: str, *, unwritable: bool = False) -> None:
        self.source = directory / "source"
        (self.source / "sub").mkdir(parents=True)
        (self.source / "empty").mkdir()
        (self.source / "file").write_bytes(b"content")
        (self.source / "other").write_bytes(b"another")
        os.setxattr(self.source / "file", "user.mark", b"here")
        self._root = os.open(self.source, os.O_RDONLY | os.O_DIRECTORY)
        self.trail = directory / "trail"
        agent = Principal("alice", str(uuid.uuid4()), "agent")
        identity = TrailIdentity("session", agent.label, agent.id)
        if unwritable:
            full, null = os.open("/dev/full", os.O_WRONLY), os.open("/dev/null", os.O_WRONLY)
            self._log = Trail(full, null, identity, self.trail)
        else:
            self._log = Trail.create(self.trail, directory / "head", identity)
        self.guard = Enforcer(_policy(policy), agent, self._log, has_layers=True)
        self.decisions = 0
        self._count_decisions()
        self._inodes = InodeTable()
        self._source = LayerStore(self._root, self._inodes, cache=64, pins=64)
        store = directory / "layer"
        store.mkdir()
        self._top = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
        above = LayerStore(self._top, self._inodes, cache=8, pins=8, layer=Layer.SCRATCH)
        self._overlay = Overlay(above, self._inodes, OverlayUsage(lambda: self.guard.policy), count())
        virtual = VirtualDir({b"policy.md": lambda _: b"text"})
        notices = Notifications(
            lambda *_: None, lambda *_: None, lambda *_: None, lambda: True, lambda call: call(True)
        )
        self._operations = Operations(
            self._inodes, self._source, TempFiles("", 0, count()), self._overlay, self.guard, virtual, notices
        )
        self.handlers = self._operations.handlers

    def _count_decisions(self) -> None:
        """Count the decisions of the engine. A subclass of the enforcer would exclude the compiled build."""
        engine = self.guard._decide  # noqa: SLF001

        def decide(policy: Policy, agent: Principal, request: Request, context: Context = NO_FACTS) -> Permit | Denied:
            self.decisions += 1
            return engine(policy, agent, request, context)

        self.guard._decide = decide  # noqa: SLF001

    def close(self) -> None:
        with contextlib.suppress(TrailError):
            self.guard.flush_all()
        with contextlib.suppress(TrailError):
            self._log.close()

    def send(self, opcode: int, node: int, body: bytes) -> bytes:
        """Return the handler's reply."""
        answer = self.handlers[opcode](Header(node, os.geteuid(), os.getegid(), os.getpid(), 0), memoryview(body))
        if isinstance(answer, Generator):
            return finished(answer)
        return answer if isinstance(answer, bytes) else b"".join(answer)

    def set_fingerprint(self, node: int, path: Path) -> None:
        """Store the file's present fingerprint in its node, so that the mount sees no external change."""
        self._operations.mount.node(node).fingerprint = fingerprint_of(path.stat())

    def close_files(self) -> None:
        """Close the files that no program needs open, as the mount does when it is idle."""
        self._source.begin_request(monotonic())
        self._source.close_unused()

    def node(self, name: str) -> int:
        """The node id of a name at the root."""
        return int(p.ENTRY_OUT.unpack_from(self.send(p.Opcode.LOOKUP, p.ROOT_ID, name.encode() + b"\0"))[0])

    def entries(self) -> list[AuditEntry]:
        """The entries of changes. Those of processes depend on who started the tests."""
        self.guard.flush_all()
        return [entry for entry in read(self.trail) if entry.operation != "process"]

    def tree(self) -> dict[str, Any]:
        """Return everything in the source that a request could change."""
        found = {}
        for path in [self.source, *sorted(self.source.rglob("*"))]:
            s = path.lstat()
            content = path.read_bytes() if path.is_file() else None
            attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)}
            what = (s.st_ino, s.st_mode, s.st_uid, s.st_gid, s.st_size, s.st_nlink, s.st_mtime_ns, s.st_blocks)
            found[str(path)] = (*what, content, attributes)
        return found

    def request(self, opcode: p.Opcode) -> tuple[int, bytes]:
        """Return a node and a body with which the kernel would request this change."""
        file, other = self.node("file"), self.node("other")
        set_mode = p.SETATTR_IN.pack(int(p.Set.MODE), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0o600, 0, 0, 0, 0)
        copy = p.COPY_FILE_RANGE_IN.pack(0, 0, other, 0, 7, 7, 0)
        known: dict[p.Opcode, tuple[int, bytes]] = {
            p.Opcode.CREATE: (p.ROOT_ID, p.CREATE_IN.pack(os.O_WRONLY | os.O_CREAT, 0o100644, 0o022, 0) + b"new\0"),
            p.Opcode.WRITE: (file, p.WRITE_IN.pack(0, 0, 5, 0, 0, os.O_WRONLY, 0) + b"bytes"),
            p.Opcode.SETATTR: (file, set_mode),
            p.Opcode.FALLOCATE: (file, p.FALLOCATE_IN.pack(0, 0, 65536, 0, 0)),
            p.Opcode.COPY_FILE_RANGE: (file, copy),
            p.Opcode.COPY_FILE_RANGE_64: (file, copy),
            p.Opcode.UNLINK: (p.ROOT_ID, b"file\0"),
            p.Opcode.RMDIR: (p.ROOT_ID, b"empty\0"),
            p.Opcode.RENAME: (p.ROOT_ID, p.RENAME_IN.pack(p.ROOT_ID) + b"file\0moved\0"),
            p.Opcode.RENAME2: (p.ROOT_ID, p.RENAME2_IN.pack(p.ROOT_ID, 2, 0) + b"file\0other\0"),
            p.Opcode.LINK: (p.ROOT_ID, p.LINK_IN.pack(file) + b"linked\0"),
            p.Opcode.SYMLINK: (p.ROOT_ID, b"link\0file\0"),
            p.Opcode.MKDIR: (p.ROOT_ID, p.MKDIR_IN.pack(0o755, 0o022) + b"made\0"),
            p.Opcode.MKNOD: (p.ROOT_ID, p.MKNOD_IN.pack(0o010644, 0, 0o022, 0) + b"fifo\0"),
            p.Opcode.SETXATTR: (file, p.SETXATTR_IN.pack(2, 0, 0, 0) + b"user.new\0ab"),
            p.Opcode.REMOVEXATTR: (file, b"user.mark\0"),
        }
        return known[opcode]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """serve(policy) returns the handlers of a mount. What a server keeps until its process ends is released here."""
    umask = os.umask(0o022)
    before = _descriptors()
    servers: list[Server] = []

    def make(policy: str, *, unwritable: bool = False) -> Server:
        servers.append(Server(tmp_path / f"server-{len(servers)}", policy, unwritable=unwritable))
        return servers[-1]

    yield make
    for server in servers:
        server.close()
    for fd in _descriptors() - before:
        os.close(fd)
    os.umask(umask)


def _descriptors() -> set[int]:
    readable_directory = [int(fd) for fd in os.listdir("/proc/self/fd")]
    return {fd for fd in readable_directory if os.path.lexists(f"/proc/self/fd/{fd}")}


def test_every_opcode_is_served_or_refused_as_the_table_says(serve: Any) -> None:
    """Each changing or reading opcode has a handler. A refused opcode has none."""
    served = set(serve(DENY_ALL).handlers)
    needed = {opcode for opcode, role in p.ROLES.items() if role in (p.RequestEffect.CHANGES, p.RequestEffect.READS)}
    refused = {opcode for opcode, role in p.ROLES.items() if role is p.RequestEffect.REFUSED}
    assert needed - served == {p.Opcode.INIT}, "INIT is the handshake's"
    assert served & refused == set()


@pytest.mark.parametrize("opcode", CHANGING, ids=lambda opcode: opcode.name)
def test_nothing_changes_under_a_policy_that_denies_all(serve: Any, opcode: p.Opcode) -> None:
    """The handler of every changing request asks the enforcer first: the request is refused and recorded, and nothing
    changes.
    """
    server: Server = serve(DENY_ALL)
    node, body = server.request(opcode)
    before = server.tree()
    with pytest.raises(Refused) as refused:
        server.send(opcode, node, body)
    assert server.tree() == before
    assert refused.value.errno == errno.EACCES
    (entry,) = [entry for entry in server.entries() if entry.result == "denied"]
    assert (entry.governance, entry.code, entry.agent) == ("deny", "DEFAULT", "alice")


@pytest.mark.parametrize("opcode", CHANGING, ids=lambda opcode: opcode.name)
def test_every_change_is_intended_in_the_record(serve: Any, opcode: p.Opcode) -> None:
    """Under a policy that permits everything, the same requests change something, each with an intent and an
    outcome.
    """
    server: Server = serve(ALLOW_ALL)
    node, body = server.request(opcode)
    before = server.tree()
    server.send(opcode, node, body)
    intent, outcome = server.entries()
    assert server.tree() != before
    assert (intent.kind, outcome.kind) == ("intent", "outcome")
    assert outcome.details["intent"] == intent.seq
    assert outcome.result == "allowed"


@pytest.mark.parametrize("opcode", CHANGING, ids=lambda opcode: opcode.name)
def test_a_change_is_refused_if_its_record_fails(serve: Any, opcode: p.Opcode) -> None:
    """If the trail cannot be written, a change is refused with EIO and not made. Reads go on."""
    server: Server = serve(ALLOW_ALL, unwritable=True)
    node, body = server.request(opcode)
    before = server.tree()
    with pytest.raises(Refused) as refused:
        server.send(opcode, node, body)
    assert (refused.value.errno, refused.value.decision.code) == (errno.EIO, "UNRECORDED")
    assert server.tree() == before
    assert server.send(p.Opcode.READ, server.node("file"), p.READ_IN.pack(0, 0, 100, 0, 0, 0, 0)) == b"content"


def test_a_new_policy_invalidates_every_decision(serve: Any) -> None:
    """A write batch ends with its policy; the next write is judged by the new one."""
    server: Server = serve(ALLOW_ALL)
    node = server.node("file")

    def write(data: bytes) -> None:
        server.send(p.Opcode.WRITE, node, p.WRITE_IN.pack(0, 0, len(data), 0, 0, os.O_WRONLY, 0) + data)

    write(b"first")
    server.guard.change_policy(_policy(DENY_ALL, generation=2))
    with pytest.raises(Refused):
        write(b"second")
    assert (server.source / "file").read_bytes() == b"firstnt"


def _create(server: Server, name: bytes) -> int:
    body = p.CREATE_IN.pack(os.O_WRONLY | os.O_CREAT, 0o100644, 0o022, 0) + name + b"\0"
    return int(p.ENTRY_OUT.unpack_from(server.send(p.Opcode.CREATE, p.ROOT_ID, body))[0])


def _setattr(valid: p.Set, *, mtime: int = 0, mode: int = 0, owner: int = 0, group: int = 0) -> bytes:
    return p.SETATTR_IN.pack(int(valid), 0, 0, 0, 0, 0, mtime, 0, 0, 0, 0, mode, 0, owner, group, 0)


def _intents(server: Server, name: str) -> list[str]:
    return [entry.operation for entry in server.entries() if entry.kind == "intent" and entry.path == name]


def test_the_program_that_writes_a_file_sets_its_times_in_the_write_batch(serve: Any) -> None:
    """The outcome counts it. No entry has the values of times, so none is lost."""
    server: Server = serve(ALLOW_ALL)
    node = _create(server, b"made")
    for seconds in (7, 8):
        server.send(p.Opcode.SETATTR, node, _setattr(p.Set.ATIME | p.Set.ATIME_NOW | p.Set.MTIME, mtime=seconds))
    assert (server.source / "made").stat().st_mtime == 8
    assert _intents(server, "made") == ["create_file"]
    (outcome,) = [entry for entry in server.entries() if entry.kind == "outcome"]
    assert (outcome.operation, outcome.details["attributes"], outcome.details["size"]) == ("create_file", 2, 0)


@pytest.mark.parametrize("after", ["another program", "a closed batch", "a new policy", "a hard link", "an ask"])
def test_times_have_an_entry_outside_the_write_batch(serve: Any, after: str) -> None:
    ask = '[[ask]]\npaths = ["made"]\noperations = ["set_owner"]\n' if after == "an ask" else ""
    server: Server = serve(ALLOW_ALL + ask)
    node, pid = _create(server, b"made"), os.getpid()
    if after == "another program":
        pid = os.getppid()
    elif after == "a closed batch":
        server.guard.close_batches()
    elif after == "a new policy":
        server.guard.change_policy(_policy(ALLOW_ALL, generation=2))
    elif after == "a hard link":
        server.send(p.Opcode.LINK, p.ROOT_ID, p.LINK_IN.pack(node) + b"linked\0")
    header = Header(node, os.geteuid(), os.getegid(), pid, 0)
    answer = server.handlers[p.Opcode.SETATTR](header, memoryview(_setattr(p.Set.MTIME, mtime=7)))
    assert isinstance(answer, bytes)
    assert (server.source / "made").stat().st_mtime == 7
    assert _intents(server, "made") == ["create_file", "set_times"]


def test_times_in_a_write_batch_do_not_outlive_its_permit(serve: Any) -> None:
    server: Server = serve(ALLOW_ALL)
    node = _create(server, b"made")
    before = (server.source / "made").stat().st_mtime_ns
    server.guard.change_policy(_policy(DENY_ALL, generation=2))
    with pytest.raises(Refused):
        server.send(p.Opcode.SETATTR, node, _setattr(p.Set.MTIME, mtime=7))
    assert (server.source / "made").stat().st_mtime_ns == before


def test_owner_and_mode_that_a_file_has_are_set_in_the_write_batch(serve: Any) -> None:
    """An archive sets both for each file. The engine decides, and the change time is set. A new mode is in the outcome
    of the file's creation. Later it has an entry, and so has a set-id bit.
    """
    server: Server = serve(ALLOW_ALL)
    node, path = _create(server, b"made"), server.source / "made"
    before, decisions = path.stat(), server.decisions

    def has_gone_on() -> bool:
        path.parent.touch()
        return path.parent.stat().st_mtime_ns > before.st_ctime_ns

    until(has_gone_on, "the kernel's clock goes on")
    same = _setattr(p.Set.UID | p.Set.GID | p.Set.MODE, mode=0o100644, owner=before.st_uid, group=before.st_gid)
    server.send(p.Opcode.SETATTR, node, same)
    assert (server.decisions - decisions, path.stat().st_ctime_ns > before.st_ctime_ns) == (2, True)
    assert _intents(server, "made") == ["create_file"]
    server.send(p.Opcode.SETATTR, node, same)
    server.send(p.Opcode.SETATTR, node, _setattr(p.Set.MODE, mode=0o640))
    for name, mode in ((b"next", 0o600), (b"set-id", 0o4755)):
        server.send(p.Opcode.SETATTR, _create(server, name), _setattr(p.Set.MODE, mode=mode))
        assert stat.S_IMODE((server.source / name.decode()).stat().st_mode) == mode
    found = {name: _intents(server, name) for name in ("made", "next", "set-id")}
    assert found["made"] == ["create_file", "set_owner", "set_mode"]
    assert found["next"] == ["create_file"]
    assert found["set-id"] == ["create_file", "set_mode"]
    counted = [entry.details for entry in server.entries() if "attributes" in entry.details]
    assert [(each["attributes"], each["mode"]) for each in counted] == [(1, "0644"), (1, "0600")]


def test_a_mode_in_the_write_batch_needs_the_name_of_the_batch(serve: Any) -> None:
    """The file was renamed outside of the mount, on a file system that gives both changes the same change time."""
    server: Server = serve(ALLOW_ALL)
    node, moved = _create(server, b"made"), server.source / "elsewhere"
    (server.source / "made").rename(moved)
    server.set_fingerprint(node, moved)
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        server.send(p.Opcode.SETATTR, node, _setattr(p.Set.MODE, mode=0o755))
    assert stat.S_IMODE(moved.stat().st_mode) == 0o644


def test_attributes_in_the_write_batch_open_no_file(serve: Any) -> None:
    """A running program cannot be opened for writing, and one that is open for writing cannot be run (ETXTBSY)."""
    server: Server = serve(ALLOW_ALL)
    node, program = _create(server, b"made"), Path("/bin/sleep").read_bytes()
    write = p.WRITE_IN.pack(0, 0, len(program), 0, 0, os.O_WRONLY, 0) + program
    server.send(p.Opcode.WRITE, node, write)
    server.send(p.Opcode.SETATTR, node, _setattr(p.Set.MODE, mode=0o755))
    server.close_files()
    with subprocess.Popen([server.source / "made", "60"]) as running:
        try:
            for valid in (p.Set.MODE, p.Set.MTIME):
                server.send(p.Opcode.SETATTR, node, _setattr(valid, mode=0o755, mtime=7))
        finally:
            running.kill()
    assert (server.source / "made").stat().st_mtime == 7


def test_a_mode_that_the_write_batch_does_not_cover_ends_it(serve: Any) -> None:
    """The log has the modes in their order."""
    server: Server = serve(ALLOW_ALL)
    node = _create(server, b"made")
    for mode in (0o600, 0o640):
        server.send(p.Opcode.SETATTR, node, _setattr(p.Set.MODE, mode=mode))
    server.send(p.Opcode.WRITE, node, p.WRITE_IN.pack(0, 0, 1, 0, 0, os.O_WRONLY, 0) + b"x")
    modes = [(entry.operation, entry.details.get("mode")) for entry in server.entries() if entry.kind == "outcome"]
    assert modes[0] == ("create_file", "0600")
    assert modes[-1] == ("write_file", None)
    assert ("set_mode", "0640") in [(entry.operation, entry.details.get("mode")) for entry in server.entries()]


def test_a_mode_that_fails_in_the_write_batch_has_entries(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Server = serve(ALLOW_ALL)
    node = _create(server, b"made")

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EIO, "")

    with monkeypatch.context() as patch:
        patch.setattr(os, "chmod", fail)
        patch.setattr(os, "fchmod", fail)
        with pytest.raises(OSError, match=re.escape(f"[Errno {errno.EIO}]")):
            server.send(p.Opcode.SETATTR, node, _setattr(p.Set.MODE, mode=0o600))
    (failed,) = [each for each in server.entries() if each.operation == "set_mode" and each.kind == "outcome"]
    assert failed.result == "error"


ONCE_FOR_EACH_NAME: Final = {p.Opcode.RENAME: 2, p.Opcode.RENAME2: 4, p.Opcode.LINK: 2}
"""Decisions of the requests that change more than one name. An exchange removes two names and creates two."""
TEXTS: Final = """
default = "deny"
[[rule]]
name = "texts"
paths = ["**"]
executable = false
"""
"""A policy whose verdict about a file depends on its first bytes."""


@pytest.mark.parametrize("policy", [ALLOW_ALL, TEXTS], ids=["any content", "texts"])
@pytest.mark.parametrize("opcode", CHANGING, ids=lambda opcode: opcode.name)
def test_a_request_is_decided_once_for_each_name(serve: Any, opcode: p.Opcode, policy: str) -> None:
    server: Server = serve(policy)
    node, body = server.request(opcode)
    server.send(opcode, node, body)
    assert server.decisions == ONCE_FOR_EACH_NAME.get(opcode, 1)


def test_a_write_of_executable_content_is_decided_twice(serve: Any) -> None:
    """The engine decides again with the first bytes, and denies it. Later writes of a batch are not decided."""
    server: Server = serve(TEXTS)
    node = server.node("file")

    def write(offset: int, data: bytes) -> int:
        before = server.decisions
        server.send(p.Opcode.WRITE, node, p.WRITE_IN.pack(0, offset, len(data), 0, 0, os.O_WRONLY, 0) + data)
        return server.decisions - before

    assert (write(0, b"text"), write(100, b"more")) == (1, 0)
    with pytest.raises(Refused):
        write(0, b"#!/bin/sh")
    assert server.decisions == 3


def test_the_first_write_of_a_scratch_file_is_decided_once(serve: Any) -> None:
    """The verdict is for the overlay: the file is copied up, and the write is made there under the same permit."""
    server: Server = serve('default = "deny"\n[[scratch]]\npaths = ["**"]\n')
    node = server.node("file")
    assert server.send(p.Opcode.WRITE, node, p.WRITE_IN.pack(0, 0, 5, 0, 0, os.O_WRONLY, 0) + b"bytes")
    assert server.decisions == 1
    assert (server.source / "file").read_bytes() == b"content"
    assert (server.source.parent / "layer/file").read_bytes() == b"bytesnt"
    server.send(p.Opcode.RENAME, p.ROOT_ID, p.RENAME_IN.pack(p.ROOT_ID) + b"other\0moved\0")
    assert server.decisions == 3
    assert (server.source.parent / "layer/moved").read_bytes() == b"another"


def test_a_name_that_is_looked_up_again_does_not_count_twice(serve: Any) -> None:
    """A hard link whose directory the kernel forgot and looked up again is one known name. The other is unknown."""
    server: Server = serve('default = "allow"\n[[protect]]\npaths = ["closed/"]\n')
    (server.source / "closed").mkdir()
    (server.source / "closed/hook").write_text("kept")
    os.link(server.source / "closed/hook", server.source / "sub/linked")

    def look() -> tuple[int, int]:
        directory = server.node("sub")
        return directory, int(p.ENTRY_OUT.unpack_from(server.send(p.Opcode.LOOKUP, directory, b"linked\0"))[0])

    for node in reversed(look()):
        server.send(p.Opcode.FORGET, node, p.FORGET_IN.pack(1))
    _, file = look()
    with pytest.raises(Refused) as refused:
        server.send(p.Opcode.WRITE, file, p.WRITE_IN.pack(0, 0, 5, 0, 0, os.O_WRONLY, 0) + b"sneak")
    assert refused.value.decision.code == "HARDLINK"
    assert (server.source / "closed/hook").read_text() == "kept"


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(opcode=st.sampled_from(list(p.Opcode)), node=st.integers(0, 6), body=st.binary(max_size=160))
def test_no_message_changes_what_the_policy_denies(nonsense: Server, opcode: p.Opcode, node: int, body: bytes) -> None:
    """Random and truncated requests are answered or refused, and change nothing in the source."""
    handler = nonsense.handlers.get(opcode)
    if handler is None:
        return
    before = nonsense.tree()
    with contextlib.suppress(Exception):  # the connection turns it into a reply
        handler(Header(node, 1, 1, os.getpid(), body[0] if body else 0), memoryview(body))
    assert nonsense.tree() == before


@pytest.mark.parametrize("opcode", CHANGING, ids=lambda opcode: opcode.name)
def test_a_truncated_request_changes_nothing(serve: Any, opcode: p.Opcode) -> None:
    """Truncated at any byte, a request is refused like any other under a policy that denies everything."""
    server: Server = serve(DENY_ALL)
    node, body = server.request(opcode)
    before = server.tree()
    for length in range(len(body)):
        with pytest.raises((OSError, ProtocolError, struct.error)):
            server.send(opcode, node, body[:length])
    assert server.tree() == before


@pytest.fixture
def nonsense(serve: Any) -> Server:
    server: Server = serve(DENY_ALL)
    for name in ("file", "other", "sub", "empty"):
        server.node(name)
    return server


MUTATORS: Final = frozenset(
    """
    chmod chown copy_file_range fallocate fchmod fchown ftruncate lchown link mkdir mkfifo mknod posix_fallocate pwrite
    pwritev remove removexattr rename renameat2 renames replace rmdir sendfile setxattr symlink truncate unlink utime
    utimens write writev
    """.split()  # noqa: SIM905 - a list of words is read as such
)


def _calls(path: Path) -> Iterator[tuple[ast.FunctionDef | None, str]]:
    """Each call of `os.X` or `syscalls.X` that could change the source, and the function it stands in."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("os", "syscalls")
            and node.attr in MUTATORS
        ):
            around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            yield (around[-1] if around else None), node.attr


def test_only_the_layer_store_changes_the_source() -> None:
    """No other module of the mount calls what changes files; some write to descriptors of their own."""
    own = {
        "kernel_transport.py": {"write", "writev"},
        "diagnostics.py": {"write"},
        "cpu_latency.py": {"write"},
        "splice.py": {"write"},
        "notifications.py": {"write"},
        "main.py": {"write"},
        "server.py": {"write", "utime"},
        "layer_store.py": MUTATORS,
    }
    stray = {
        f"{path.name}: {call}"
        for path in FUSE.glob("*.py")
        for _, call in _calls(path)
        if call not in own.get(path.name, set())
    }
    assert stray == set()


def test_each_layer_store_change_requires_a_permit() -> None:
    """Each function of the layer store that changes a file takes the enforcer's Permit.

    Two functions take none: they open directories of the session's own layer for a walk, and restore the mode. `walk`
    asserts that it is the layer.
    """
    without = set()
    for function, call in _calls(FUSE / "layer_store.py"):
        assert function is not None
        taken = {a.arg: ast.unparse(a.annotation) for a in function.args.args if a.annotation is not None}
        if taken.get("permit") != "Permit":
            without.add(f"{function.name}: {call}")
    assert without == {"_open_closed: chmod", "_passable: fchmod"}


def test_only_the_policy_package_makes_a_permit() -> None:
    """Only the policy engine makes a Permit; the codec reads one that another process of the session received."""
    makers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "bonobofs").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Permit"
    }
    assert makers
    assert {Path(maker).parts[:2] for maker in makers} <= {("bonobofs", "policy"), ("bonobofs", "ipc")}
