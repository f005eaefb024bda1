"""Where the time of a change goes: the parts of one change of each row, in microseconds.

`floor` is the same work against a server that answers at once (`benchmarks.floor`). The system calls on the source and
on the store of old contents are timed while the handlers serve the requests of the row without a kernel. One decision
and one log entry are timed in loops, on the requests and the entries of the row. What then is left of the time in a
mount is the server's other Python code, and longer wake-ups.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import monotonic, perf_counter_ns, thread_time_ns
from typing import Any, Final

from benchmarks.plan import FILES, WRITES, Plan
from benchmarks.table import CHANGES as ROWS
from benchmarks.workloads import WORKLOADS, Workload, prepare_out
from benchmarks.worlds import FLOOR, POLICY, WORLDS, World
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
from bonobofs.undo.preimages import PreimageStore, StoreLimits

DECISIONS: Final = {"write": 0, "create": 1, "rename": 2, "unlink": 1, "untar": 3, "rm": 1}
"""How often one change asks the engine. All writes of one file are one decision."""
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
    "mkdir",
    "open",
    "pwrite",
    "pwritev",
    "rename",
    "rmdir",
    "stat",
    "umask",
    "unlink",
    "utime",
)
"""The calls of `os` by which the server uses the source and the store of old contents."""
_CAPABILITY: Final = p.GETXATTR_IN.pack(0, 0) + b"security.capability\0"


class Replay:
    """The handlers of a mount, and the requests that the kernel sends for one change of each row."""

    def __init__(self, base: Path) -> None:
        source, layer = base / "source", base / "layer"
        for directory in (source / "out", layer, base / "undo"):
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
        store = LayerStore(root, inodes, cache=1000, pins=1000)
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
        self._out: Final = self._node(self._request(p.Opcode.LOOKUP, p.ROOT_ID, b"out\0"))
        self._nodes: Final[dict[int, int]] = {}

    def _request(self, opcode: p.Opcode, node: int, body: bytes) -> bytes:
        """Serve one request; return the reply, or nothing for an error."""
        self.requests += 1
        self._operations.begin_request(monotonic())
        try:
            reply = self._operations.handlers[opcode](self._header._replace(node_id=node), memoryview(body))
        except OSError:
            return b""
        finally:
            self._operations.after_reply()
            while self._enforcer.write_outcome():
                pass
        assert isinstance(reply, bytes)
        return reply

    def _node(self, entry: bytes) -> int:
        number: int = p.NODE_ID.unpack_from(entry)[0]
        return number

    def _look_up(self, name: bytes) -> None:
        self._request(p.Opcode.GETATTR, self._out, bytes(16))
        self._request(p.Opcode.LOOKUP, self._out, name)

    def _write(self, number: int, offset: int, size: int) -> None:
        body = p.WRITE_IN.pack(0, offset, size, 0, 0, os.O_WRONLY, 0) + bytes(size)
        self._request(p.Opcode.WRITE, self._nodes[number], body)

    def create(self, number: int) -> None:
        name = b"f%d\0" % number
        self._look_up(name)
        body = p.CREATE_IN.pack(os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o100644, 0o022, 0) + name
        self._nodes[number] = self._node(self._request(p.Opcode.CREATE, self._out, body))
        self._request(p.Opcode.GETXATTR, self._nodes[number], _CAPABILITY)
        self._write(number, 0, 100)

    def write(self, number: int) -> None:
        self._write(0, number * 4096, 4096)

    def rename(self, number: int) -> None:
        self._look_up(b"g%d\0" % number)
        names = b"f%d\0g%d\0" % (number, number)
        self._request(p.Opcode.RENAME2, self._out, p.RENAME2_IN.pack(self._out, 0, 0) + names)

    def unlink(self, number: int, name: bytes = b"g%d\0") -> None:
        self._request(p.Opcode.GETATTR, self._out, bytes(16))
        self._request(p.Opcode.UNLINK, self._out, name % number)
        self._operations.mount.forget_node(self._nodes.pop(number), 1)

    def untar(self, number: int) -> None:
        self.create(number)
        self._set(number, p.Set.ATIME | p.Set.MTIME)
        self._request(p.Opcode.GETXATTR, self._nodes[number], _CAPABILITY)
        self._set(number, p.Set.UID | p.Set.GID)
        self._set(number, p.Set.MODE)

    def _set(self, number: int, valid: int) -> None:
        owner = os.geteuid(), os.getegid()
        body = p.SETATTR_IN.pack(valid, 0, 0, 0, 0, 10**9, 10**9, 0, 0, 0, 0, 0o100600, 0, *owner, 0)
        self._request(p.Opcode.SETATTR, self._nodes[number], body)

    def rm(self, number: int) -> None:
        self.unlink(number, b"f%d\0")


def _ignore(*_: object) -> None:
    pass


@contextmanager
def timed_calls() -> Iterator[dict[str, int]]:
    """Count the calls of CALLS and sum their nanoseconds, without those of the clock."""
    sums = {"calls": 0, "ns": 0}
    originals = {name: getattr(os, name) for name in CALLS}
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
    for name, call in originals.items():
        setattr(os, name, timed(call, own))
    try:
        yield sums
    finally:
        for name, call in originals.items():
            setattr(os, name, call)


def _elapsed(sums: dict[str, int], call: Callable[[], None]) -> int:
    before = sums["ns"]
    call()
    return sums["ns"] - before


def replay(base: Path) -> dict[str, dict[str, float]]:
    """Return requests, system calls, their microseconds and log entries of one change, by row."""
    found: dict[str, dict[str, float]] = {}
    replay = Replay(base)
    rows = {"create": replay.create, "rename": replay.rename, "write": replay.write, "unlink": replay.unlink}
    rows |= {"untar": replay.untar, "rm": replay.rm}
    for row, change in rows.items():
        requests, entries, best = replay.requests, replay.trail.head[0], 1 << 62
        with timed_calls() as sums:
            for turn in range(PASSES):
                before = sums["ns"]
                for number in range(turn * CHANGES, (turn + 1) * CHANGES):
                    change(number)
                best = min(best, sums["ns"] - before)
            calls = sums["calls"]
        replay.trail.flush()
        total = PASSES * CHANGES
        found[row] = {
            "requests": round((replay.requests - requests) / total),
            "calls": calls / total,
            "source": best / CHANGES / 1e3,
            "entries": round((replay.trail.head[0] - entries) / total),
        }
    return found


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
    """Return the parts of one change in microseconds, by row, and the build; times are the least of all."""
    base = Path(plan.base, "breakdown")
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    rows: dict[str, dict[str, Any]] = replay(base)
    trail = Trail.create(base / "log", base / "log.head", TrailIdentity(str(uuid.uuid4()), "bench", ""))
    decision, entry = one_decision(), one_entry(trail)
    trail.close()
    shutil.rmtree(base)
    worlds = {name: WORLDS[name] for name in plan.worlds if name != "mfusepy"} | {"floor": FLOOR}
    with tarfile.open(plan.archive) as archive:
        members = len(archive.getmembers())
    counts = dict.fromkeys(ROWS, plan.count(FILES)) | {"write": plan.count(WRITES), "untar": members, "rm": members}
    for _ in range(plan.rounds):
        for workload in (WORKLOADS[name] for name in ("write", "files", "untar")):
            for name, world in worlds.items():
                for row, seconds in _visit(plan, workload, world):
                    taken = seconds / counts[row] * 1e6
                    rows[row][name] = min(rows[row].get(name, taken), taken)
    for row, parts in rows.items():
        parts |= {"log": parts["entries"] * entry, "decisions": DECISIONS[row] * decision}
        known = sum(parts[name] for name in ("floor", "source", "log", "decisions"))
        parts["python"] = parts["bonobofs"] - known
    return {"rows": {row: rows[row] for row in ROWS}, "build": build()}


def _visit(plan: Plan, workload: Workload, world: World) -> Iterator[tuple[str, float]]:
    """Do the work PASSES times in one mount: a mount is busy when it has just begun. Yield rows and seconds."""
    prepare_out(plan, workload)
    with world(plan) as root:
        (root / "out").mkdir(exist_ok=True)  # the floor shows no files of the source
        for _ in range(PASSES):
            yield from workload.visit(plan, root).items()
            (root / "out" / "written").unlink(missing_ok=True)
