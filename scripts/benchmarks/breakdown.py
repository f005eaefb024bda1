"""Where the time goes: the parts of one operation of each row, in microseconds.

`floor` is the same work against a server that answers at once (`benchmarks.floor`), the faster of two: one polls on a
processor of its own, the other sleeps and shares the processor of the program. `server` is the time in which the
handlers serve the requests of the row without a kernel. Its parts are system calls on the source and on the store of
old contents (timed in further passes), log entries and decisions (timed in loops), and Python code. The rest of the
time in a mount is neither floor nor server: longer wake-ups, and code that is slower between requests than in a loop.
"""

from __future__ import annotations

import gc
import os
import shutil
import stat
import tarfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic, perf_counter, perf_counter_ns, thread_time_ns
from typing import Any, Final

from benchmarks.plan import FILES, WRITES, BenchError, Plan
from benchmarks.table import OPERATIONS as ROWS
from benchmarks.workloads import WORKLOADS, Workload, prepare_out
from benchmarks.worlds import FLOORS, POLICY, WORLDS, World
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.fuse import abi as p
from bonobofs.fuse.dispatch import Operations
from bonobofs.fuse.inode_table import InodeTable
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.mount_context import Header, Notifications
from bonobofs.fuse.overlay import Overlay, OverlayUsage
from bonobofs.fuse.temp_files import TempFiles
from bonobofs.fuse.virtual_dir import VirtualDir
from bonobofs.policy.decision import Layer
from bonobofs.policy.document import parse
from bonobofs.policy.engine import compile_policy, decide
from bonobofs.policy.request import Context, Operation, Principal, Request, WorkspacePath
from bonobofs.session import build
from bonobofs.system import syscalls
from bonobofs.undo.preimages import PreimageStore, StoreLimits

DECISIONS: Final = {"create": 1, "rename": 2, "unlink": 1, "untar": 3, "rm": 1, "compileall": 3}
"""How often one operation asks the engine. All writes of one file are one decision."""
CHANGES: Final = 2_000
PASSES: Final = 3
CALLS: Final = (
    "chmod",
    "chown",
    "close",
    "fstat",
    "fstatvfs",
    "getxattr",
    "link",
    "listxattr",
    "lseek",
    "mkdir",
    "open",
    "preadv",
    "pwrite",
    "pwritev",
    "rename",
    "rmdir",
    "stat",
    "umask",
    "unlink",
)
"""The calls of `os` by which the server uses the source and the store of old contents."""
SYSCALLS: Final = ("file_handle", "getdents", "utimens")
"""The calls of `system.syscalls` by which it does."""
LISTED_BYTES: Final = 32_768
"""Size of the buffer for which `find` and `grep` ask the kernel."""
_TAR_BLOCK: Final = 10_240
"""tar writes the part of a file in each such block of the archive at once."""
Listed = tuple[int, int, bytes]
"""Node, size (of a directory: -1) and name, with a null byte, of a listed file."""
_MAY_FAIL: Final = (p.Opcode.LOOKUP, p.Opcode.GETXATTR)
"""Requests for what may not exist."""
_CAPABILITY: Final = p.GETXATTR_IN.pack(0, 0) + b"security.capability\0"


class Replay:
    """The handlers of a mount, and the requests that the kernel sends for one operation of each row."""

    def __init__(self, base: Path, source: Path) -> None:
        layer = base / "layer"
        for directory in (layer, base / "undo"):
            directory.mkdir(parents=True)
        agent = Principal("bench", str(uuid.uuid4()), "bench")
        identity = TrailIdentity(str(uuid.uuid4()), agent.label, agent.id)
        self.trail: Final = Trail.create(base / "trail", base / "head", identity)
        document = parse(POLICY, "bench").model_dump(mode="json")
        self._enforcer: Final = Enforcer(
            compile_policy(document), agent, self.trail, outcomes_later=True, has_layers=True
        )
        inodes, numbers = InodeTable(), count(10)
        root, top = (os.open(each, os.O_RDONLY | os.O_DIRECTORY) for each in (source, layer))
        store = LayerStore(root, inodes, cache=4096, pins=4096)
        upper = LayerStore(top, inodes, cache=100, pins=100, layer=Layer.SCRATCH)
        overlay = Overlay(upper, inodes, OverlayUsage(lambda: self._enforcer.policy), numbers)
        notices = Notifications(_ignore, _ignore, _ignore, lambda: True, _ignore)
        temporary = TempFiles(str(base), 8, numbers)
        self._operations: Final = Operations(inodes, store, temporary, overlay, self._enforcer, VirtualDir({}), notices)
        limits = StoreLimits.of(document)
        assert limits is not None
        self._operations.mount.preimages.store = PreimageStore(base / "undo" / "session", limits)
        self._header: Final = Header(p.ROOT_ID, os.geteuid(), os.getegid(), os.getpid(), 0)
        self.requests = 0
        self._out: Final = self._find(p.ROOT_ID, b"out")
        self._nodes: Final[dict[int, int]] = {}
        self._written = 0

    def _request(self, opcode: p.Opcode, node: int, body: bytes) -> bytes:
        """Serve one request; return the reply, or nothing for the content of a file and for what does not exist."""
        self.requests += 1
        self._operations.begin_request(monotonic())
        try:
            reply = self._operations.handlers[opcode](self._header._replace(node_id=node), memoryview(body))
        except OSError as error:
            if opcode not in _MAY_FAIL:
                raise BenchError(f"the server refused {opcode.name} in the breakdown: {error}") from error
            return b""
        finally:
            self._operations.after_reply()
            while self._enforcer.write_outcome():
                pass
        return reply if isinstance(reply, bytes) else b""

    def _find(self, directory: int, name: bytes) -> int:
        return self._node(self._request(p.Opcode.LOOKUP, directory, name + b"\0"))

    def _node(self, entry: bytes) -> int:
        number: int = p.NODE_ID.unpack_from(entry)[0]
        return number

    def _look_up(self, name: bytes, directory: int = 0) -> None:
        self._request(p.Opcode.GETATTR, directory or self._out, bytes(16))
        self._request(p.Opcode.LOOKUP, directory or self._out, name)

    def _write(self, node: int, offset: int, size: int) -> None:
        body = p.WRITE_IN.pack(0, offset, size, 0, 0, os.O_WRONLY, 0) + bytes(size)
        self._request(p.Opcode.WRITE, node, body)

    def create(self, number: int) -> None:
        name = b"f%d\0" % number
        self._look_up(name)
        self._nodes[number] = self._make(self._out, name)
        self._write(self._nodes[number], 0, 100)

    def _make(self, directory: int, name: bytes) -> int:
        body = p.CREATE_IN.pack(os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o100644, 0o022, 0) + name
        node = self._node(self._request(p.Opcode.CREATE, directory, body))
        self._request(p.Opcode.GETXATTR, node, _CAPABILITY)
        return node

    def write(self, number: int) -> None:
        if number == 0:
            self._written = self._make(self._out, b"written\0")
        self._write(self._written, number * 4096, 4096)

    def rename(self, number: int) -> None:
        self._look_up(b"g%d\0" % number)
        names = b"f%d\0g%d\0" % (number, number)
        self._request(p.Opcode.RENAME2, self._out, p.RENAME2_IN.pack(self._out, 0, 0) + names)

    def unlink(self, number: int) -> None:
        self._remove(self._out, b"g%d\0" % number, self._nodes.pop(number))

    def _remove(self, directory: int, name: bytes, node: int) -> None:
        self._request(p.Opcode.GETATTR, directory, bytes(16))
        self._request(p.Opcode.UNLINK, directory, name)
        known = self._operations.mount.inodes.peek(node)
        if known is not None:  # the kernel returns all its references to a removed file at once
            self._operations.mount.forget_node(node, known.lookups)

    def untar(self, top: bytes, members: list[tarfile.TarInfo]) -> None:
        """Unpack an archive, whose first member is its top directory, as the directory `top` in `out`."""
        directories = {"": self._out}
        for member in members:
            parent, _, name = member.name.rpartition("/")
            below = (os.fsencode(name) if parent else top) + b"\0"
            if member.isdir():
                self._request(p.Opcode.LOOKUP, directories[parent], below)
                body = p.MKDIR_IN.pack(0o755, 0o022) + below
                directories[member.name] = self._node(self._request(p.Opcode.MKDIR, directories[parent], body))
            elif member.isfile():
                self._extract(directories[parent], below, member)
        del directories[""]
        for node in directories.values():
            self._set_all(node, 0o040700)

    def _extract(self, directory: int, name: bytes, member: tarfile.TarInfo) -> None:
        self._look_up(name, directory)
        node, offset = self._make(directory, name), 0
        while offset < member.size:
            piece = min(member.size - offset, _TAR_BLOCK - (member.offset_data + offset) % _TAR_BLOCK)
            self._write(node, offset, piece)
            offset += piece
        self._request(p.Opcode.GETXATTR, node, _CAPABILITY)
        self._set_all(node, 0o100600)

    def _set_all(self, node: int, mode: int) -> None:
        for valid in (p.Set.ATIME | p.Set.MTIME, p.Set.UID | p.Set.GID, p.Set.MODE):
            owner = os.geteuid(), os.getegid()
            body = p.SETATTR_IN.pack(valid, 0, 0, 0, 0, 10**9, 10**9, 0, 0, 0, 0, mode, 0, *owner, 0)
            self._request(p.Opcode.SETATTR, node, body)

    def rm(self, name: bytes) -> None:
        """Remove a directory in `out` and what is in it, as `rm -rf` does."""
        self._empty(self._find(self._out, name))
        self._request(p.Opcode.RMDIR, self._out, name + b"\0")

    def _empty(self, directory: int) -> None:
        for node, size, name in list(self._list(directory)):
            if size < 0:
                self._empty(node)
                self._request(p.Opcode.RMDIR, directory, name)
            else:
                self._remove(directory, name, node)

    def find(self) -> list[Listed]:
        """List everything below `tree`, as `find` does."""
        found = [(self._find(p.ROOT_ID, b"tree"), -1, b"tree\0")]
        for node, size, _ in found:
            if size < 0:
                found += self._list(node)
        return found

    def _list(self, directory: int) -> Iterator[Listed]:
        """Yield each file and directory in a directory."""
        cookie = 0
        while entries := self._request(
            p.Opcode.READDIRPLUS, directory, p.READ_IN.pack(0, cookie, LISTED_BYTES, *bytes(4))
        ):
            at = 0
            while at < len(entries):
                node, mode_at = self._node(entries[at:]), at + p.ENTRY_OUT.size
                attr = p.ATTR.unpack_from(entries, mode_at)
                _, cookie, length, kind = p.DIRENT.unpack_from(entries, mode_at + p.ATTR.size)
                name_at = mode_at + p.ATTR.size + p.DIRENT.size
                name = entries[name_at : name_at + length] + b"\0"
                at += (p.ENTRY_OUT.size + p.ATTR.size + p.DIRENT.size + length + 7) & ~7
                if node and kind in (stat.S_IFDIR >> 12, stat.S_IFREG >> 12):
                    yield node, -1 if kind == stat.S_IFDIR >> 12 else attr[1], name

    def grep(self) -> list[Listed]:
        """Read each file below `tree` once."""
        found = self.find()
        for node, size, _ in found:
            if size > 0:
                self._request(p.Opcode.READ, node, p.READ_IN.pack(0, 0, -(-size // 4096) * 4096, *bytes(4)))
        return found

    def compileall(self, number: int) -> None:
        """Look up and read a module, and replace its bytecode by a new file."""
        module, compiled, temporary = (form % number for form in (b"m%d.py", b"m%d.pyc", b"m%d.pyc.1"))
        node = self._find(self._out, module)
        self._request(p.Opcode.READ, node, p.READ_IN.pack(0, 0, 8192, *bytes(4)))
        for name in (compiled, temporary):
            self._look_up(name + b"\0")
        self._write(self._make(self._out, temporary + b"\0"), 0, 8192)
        self._look_up(compiled + b"\0")
        names = temporary + b"\0" + compiled + b"\0"
        self._request(p.Opcode.RENAME2, self._out, p.RENAME2_IN.pack(self._out, 0, 0) + names)


def _ignore(*_: object) -> None:
    pass


@contextmanager
def timed_calls() -> Iterator[dict[str, int]]:
    """Count the calls of CALLS and SYSCALLS and sum their nanoseconds, without those of the clock."""
    sums = {"calls": 0, "ns": 0}
    originals = {(os, name): getattr(os, name) for name in CALLS}
    originals |= {(syscalls, name): getattr(syscalls, name) for name in SYSCALLS}
    clock = perf_counter_ns

    def timed(call: Callable[..., Any], own: int) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            started = clock()
            try:
                return call(*arguments, **options)
            finally:
                sums["ns"] += clock() - started - own
                sums["calls"] += 1

        return run

    empty = timed(_ignore, 0)
    own = min(_elapsed(sums, empty) for _ in range(1000))
    sums.update(calls=0, ns=0)
    for (module, name), call in originals.items():
        setattr(module, name, timed(call, own))
    try:
        yield sums
    finally:
        for (module, name), call in originals.items():
            setattr(module, name, call)


def _elapsed(sums: dict[str, int], call: Callable[[], None]) -> int:
    before = sums["ns"]
    call()
    return sums["ns"] - before


def replay(plan: Plan, base: Path, counts: dict[str, int]) -> dict[str, dict[str, float]]:
    """Return the parts of one operation that the server spends, by row.

    `counts`: the operations of one pass of each row that reads or makes `tree`.
    """
    source, found = plan.source, {}
    with tarfile.open(plan.archive) as archive:
        members = archive.getmembers()
    for number in range(2 * PASSES * CHANGES):
        (source / "out" / f"m{number}.py").write_bytes(bytes(8192))
    changes = Replay(base / "changes", source)
    for row in ("create", "rename", "write", "unlink", "compileall"):
        change = getattr(changes, row)
        found[row] = _parts(changes, [partial(_each, change, turn) for turn in range(2 * PASSES)], CHANGES)
    trees = Replay(base / "trees", source)
    unpack, remove = [], []
    for turn in range(2 * PASSES):
        name = b"tree%d" % turn
        unpack.append(partial(trees.untar, name, members))
        remove.append(partial(trees.rm, name))
    found["untar"] = _parts(trees, unpack, counts["untar"])
    found["rm"] = _parts(trees, remove, counts["rm"])
    for row in ("find-cold", "grep-cold"):
        readers = [Replay(base / row / str(turn), source) for turn in range(2)]
        reads = [reader.find if row == "find-cold" else reader.grep for reader in readers]
        found[row] = _parts(readers[1], reads, counts[row])
    return found


def _each(change: Callable[[int], None], turn: int) -> None:
    for number in range(turn * CHANGES, (turn + 1) * CHANGES):
        change(number)


def _parts(replay: Replay, passes: Sequence[Callable[[], object]], operations: int) -> dict[str, float]:
    """Do the passes, of so many operations each, and return the parts of one operation.

    The first half of the passes gives the time of the server; `replay` does the second half, which gives the calls.
    """
    half = len(passes) // 2
    server = min(map(_seconds, passes[:half]))
    requests, entries, best = replay.requests, replay.trail.head[0], 1 << 62
    with timed_calls() as sums:
        for each in passes[half:]:
            before = sums["ns"]
            each()
            best = min(best, sums["ns"] - before)
        calls = sums["calls"]
    replay.trail.flush()
    total = half * operations
    return {
        "requests": (replay.requests - requests) / total,
        "server": server / operations * 1e6,
        "calls": calls / total,
        "source": best / operations / 1e3,
        "entries": round((replay.trail.head[0] - entries) / total),
    }


def _seconds(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started


def _mean_us(call: Callable[[int], object]) -> float:
    """Microseconds of processor time of one call, the least of PASSES."""
    passes = []
    for _ in range(PASSES):
        started = thread_time_ns()
        for number in range(CHANGES):
            call(number)
        passes.append((thread_time_ns() - started) / CHANGES / 1e3)
    return min(passes)


def one_decision() -> float:
    """Microseconds of one decision about a file of a directory that was judged before."""
    policy, agent = compile_policy(parse(POLICY, "bench").model_dump(mode="json")), Principal("bench", "", "bench")
    requests = [Request(Operation.CREATE_FILE, WorkspacePath(f"out/f{number}")) for number in range(CHANGES)]
    context = Context(size=0, mode=0o644)
    return _mean_us(lambda number: decide(policy, agent, requests[number], context))


def one_entry(trail: Trail) -> float:
    """Microseconds of one entry of a change, the mean of an intent and its outcome."""
    details = {"to": "out/g1", "before": "33188 1000 1000 1700000000000000000 100 123456 1 1700000000000000000"}

    def change(number: int) -> None:
        path = f"out/f{number}"
        seq = trail.intent("rename", path, "modify", "work", tool="python3", details=details, caller='{"pid":1}')
        trail.outcome(seq, "rename", path, action="modify", details=details)

    return _mean_us(change) / 2


def measure(plan: Plan) -> dict[str, Any]:
    """Return the parts of one operation in microseconds, by row, and the build; times are the least of all."""
    base = Path(plan.base, "breakdown")
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    counts = _counts(plan)
    prepare_out(plan, WORKLOADS["files"])
    gc.freeze()
    gc.disable()  # the server collects seldom
    rows: dict[str, dict[str, Any]] = replay(plan, base, counts)
    gc.enable()
    trail = Trail.create(base / "log", base / "log.head", TrailIdentity(str(uuid.uuid4()), "bench", ""))
    decision, entry = one_decision(), one_entry(trail)
    trail.close()
    shutil.rmtree(base)
    own = "bonobofs" if build() == "pure Python" else "compiled"
    others = (name for name in plan.worlds if name not in ("bonobofs", "compiled", "mfusepy", *FLOORS))
    worlds = {name: WORLDS[name] for name in (own, *others, *FLOORS)}
    for _ in range(plan.rounds):
        for name in ("write", "files", "untar", "compileall", "find", "grep"):
            for world, mounted in worlds.items():
                for row, seconds in _visit(plan, WORKLOADS[name], mounted):
                    taken = seconds / counts[row] * 1e6
                    rows[row][world] = min(rows[row].get(world, taken), taken)
    for row, parts in rows.items():
        parts |= {"log": parts["entries"] * entry, "decisions": DECISIONS.get(row, 0) * decision}
        parts |= {"bonobofs": parts.pop(own), "floor": min(parts["floor"], parts.pop("floor beside"))}
        parts["python"] = parts["server"] - sum(parts[name] for name in ("source", "log", "decisions"))
        parts["rest"] = parts["bonobofs"] - parts["floor"] - parts["server"]
    return {"rows": {row: rows[row] for row in ROWS}, "build": build()}


def _counts(plan: Plan) -> dict[str, int]:
    """How many operations each row has."""
    with tarfile.open(plan.archive) as archive:
        members = len(archive.getmembers())
    walked = list(os.walk(plan.source / "tree"))
    files = sum(len(names) for _, _, names in walked)
    modules = sum(name.endswith(".py") for _, _, names in os.walk(plan.modules) for name in names)
    return {
        "write": plan.count(WRITES),
        **dict.fromkeys(("create", "rename", "unlink"), plan.count(FILES)),
        **dict.fromkeys(("untar", "rm"), members),
        "compileall": modules,
        "find-cold": files + len(walked),
        "grep-cold": files,
    }


def _visit(plan: Plan, workload: Workload, world: World) -> Iterator[tuple[str, float]]:
    """Do the work PASSES times in one mount: a mount is busy when it has just begun. Yield rows and seconds.

    Cold rows and compileall have one pass.
    """
    prepare_out(plan, workload)
    with world(plan) as root:
        for _ in range(PASSES if workload.writes and "compileall" not in workload.rows else 1):
            yield from ((row, seconds) for row, seconds in workload.visit(plan, root).items() if row in ROWS)
            (root / "out" / "written").unlink(missing_ok=True)
