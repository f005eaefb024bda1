"""The serving process without a kernel: the connection over a socket, and any messages."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import uuid
from itertools import count
from pathlib import Path
from typing import Final

from bonobofs.audit.reader import read
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import ProtocolError
from bonobofs.fuse import abi as p
from bonobofs.fuse.dispatch import Operations
from bonobofs.fuse.inode_table import InodeTable
from bonobofs.fuse.kernel_transport import KernelTransport
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.mount_context import Header, Notifications
from bonobofs.fuse.overlay import Overlay, OverlayUsage
from bonobofs.fuse.temp_files import TempFiles
from bonobofs.fuse.virtual_dir import VirtualDir
from bonobofs.policy.decision import Layer
from bonobofs.policy.document import parse
from bonobofs.policy.engine import compile_policy
from bonobofs.policy.request import Principal
from tests.support.trees import Tree, snapshot, unexplained

POLICY: Final = """
[[protect]]
paths = ["**/.git/"]

[[rule]]
name = "docs"
paths = ["docs/"]
suffixes = [".md"]
max_size = "100KB"
executable = false
"""
FORESEEN: Final = (ProtocolError, struct.error, OverflowError)
"""What a message may raise that no kernel sends; the connection makes EIO of it."""
_SILENT: Final = {opcode for opcode, role in p.ROLES.items() if role is p.RequestEffect.SILENT}


class Reply:
    """What came back: the negative errno or 0, and the body; `came` is false where nothing did."""

    def __init__(self, messages: list[bytes], unique: int) -> None:
        self.came = bool(messages)
        self.error, self.body = 0, b""
        assert len(messages) < 2, "one request has one reply"
        for message in messages:
            size, self.error, answered = p.OUT_HEADER.unpack_from(message)
            self.body = message[p.OUT_SIZE :]
            assert size == len(message)
            assert answered == unique
            assert -4095 <= self.error <= 0
            assert not (self.error and self.body)


class Rig:
    """A small source behind the real connection, handlers, guard and trail."""

    def __init__(self, directory: Path) -> None:
        self.source = directory / "source"
        (self.source / "docs/sub").mkdir(parents=True)
        (self.source / ".git").mkdir()
        for name in ("docs/a.md", "docs/b.md", "docs/sub/c.md", "closed", ".git/config"):
            (self.source / name).write_bytes(b"content of a file")
        (self.source / "docs/link").symlink_to("a.md")
        os.link(self.source / ".git/config", self.source / "docs/hard.md")
        (directory / "outside").mkdir()
        (directory / "outside/secret").write_bytes(b"secret")
        self._top = directory
        self._umask = os.umask(0o022)
        self._root = os.open(self.source, os.O_RDONLY | os.O_DIRECTORY)
        ours, self._kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._kernel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self._kernel.setblocking(False)
        self._connection = KernelTransport(ours.detach())
        agent = Principal("alice", str(uuid.uuid4()), "agent")
        self.trail = directory / "trail"
        self._log = Trail.create(self.trail, directory / "head", TrailIdentity("session", agent.label, agent.id))
        self._guard = Enforcer(compile_policy(parse(POLICY, "test").model_dump(mode="json")), agent, self._log)
        inodes = InodeTable()
        self._source = LayerStore(self._root, inodes, cache=8, pins=64)
        store = directory / "layer"
        store.mkdir()
        top = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
        above = LayerStore(top, inodes, cache=8, pins=64, layer=Layer.SCRATCH)
        self._overlay = Overlay(above, inodes, OverlayUsage(lambda: self._guard.policy), count())
        notices = Notifications(
            lambda *_: None, lambda *_: None, lambda *_: None, lambda: True, lambda call: call(True)
        )
        files = VirtualDir({b"policy.md": lambda _: b"text"})
        self.operations = Operations(
            inodes, self._source, TempFiles(str(directory), 8, count()), self._overlay, self._guard, files, notices
        )
        self.unforeseen: list[str] = []
        self._unique = 0
        self.first = self.snapshot()

    def close(self) -> None:
        self._guard.flush_all()
        self._log.close()
        for node_id in list(self.operations.mount.nodes):
            if node_id != p.ROOT_ID:
                header = Header(node_id, 0, 0, 0, 0)
                self.operations.handlers[p.Opcode.FORGET](header, memoryview(p.FORGET_IN.pack(1 << 62)))
        for store in (self._source, self._overlay.store):
            store.close_released()  # those of forgotten nodes: that of the overlay's root is one
            store.close_unused()
            os.close(store._mountinfo)
        self._connection.close()
        for fd in (
            self._root,
            self._connection._wake,
            self._connection._waker,
            self._connection._slices.bell,
        ):
            os.close(fd)
        self._kernel.close()
        os.umask(self._umask)

    def request(self, opcode: int, node: int, body: bytes, *, uid: int = 0, extensions: int = 0) -> Reply:
        """Send a whole request."""
        self._unique += 2
        header = p.IN_HEADER.pack(
            p.IN_SIZE + len(body), opcode, self._unique, node, uid, uid, os.getpid(), extensions, 0
        )
        return self.send(header + body)

    def send(self, message: bytes) -> Reply:
        """Let the connection serve these bytes as one read of /dev/fuse would have brought them."""
        connection = self._connection
        connection._buffer[: len(message)] = message
        self._source.now += 1.0
        connection._handle(len(message), self.operations.handlers, self._failed)
        self._finish()
        unique = p.IN_HEADER.unpack_from(message)[2] if len(message) >= p.IN_SIZE else 0
        return Reply(self._answers(), unique)

    def _finish(self) -> None:
        """Go on with a long request until it is answered, as the loop of the connection does."""
        slices = self._connection._slices
        while slices.ready or slices._under_way:
            if slices._under_way:
                select.select([slices.bell], [], [])
                slices.collect()
            while slices.ready:
                self._connection._advance(slices.ready.popleft(), self._failed)

    def node(self, *names: str) -> int:
        """The node of a path, looked up from the root."""
        node = p.ROOT_ID
        for name in names:
            node = p.ENTRY_OUT.unpack_from(self.request(p.Opcode.LOOKUP, node, name.encode() + b"\0").body)[0]
        return node

    def snapshot(self) -> Tree:
        return snapshot(self._top, without=("trail", "head"))

    def wrong(self) -> list[str]:
        """Differences that the record does not explain, changes of protected files, and unexpected errors."""
        self._guard.flush_all()
        now = self.snapshot()
        before, after = ({p[7:]: e for p, e in tree.items() if p.startswith("source/")} for tree in (self.first, now))
        found = unexplained(before, after, read(self.trail))
        closed = [path for path in self.first.keys() | now.keys() if not f"{path}/".startswith("source/docs/")]
        found += [f"{path} was changed" for path in closed if self.first.get(path) != now.get(path)]
        return found + self.unforeseen

    def _failed(self, opcode: int, error: Exception) -> None:
        if not isinstance(error, FORESEEN):
            self.unforeseen.append(f"{p.Opcode(opcode).name}: {error!r}")

    def _answers(self) -> list[bytes]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._kernel.recv(p.BUFFER_SIZE))
        return found


def is_silent(opcode: int) -> bool:
    """Whether a request of this kind has no reply."""
    return opcode in _SILENT
