"""The process that serves one mount, from its configuration to its end.

It imports all that it needs and goes to `/` before it mounts: a server whose code, directory or standard input lies
under its own mount would wait for itself. It loads neither pydantic nor a database.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Any, Final

from bonobofs.audit import recovery, temp_cleanup
from bonobofs.audit.recovery import Difference
from bonobofs.audit.writer import Identity, Trail
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import BonobofsError, InterruptedWaitError, MountError, TrailError
from bonobofs.fuse import abi as p
from bonobofs.fuse.append_lock import AppendLock
from bonobofs.fuse.companion_requests import Hearing
from bonobofs.fuse.companion_restart import Beside, accompany
from bonobofs.fuse.companion_supervisor import Beginning, Companion, Standing
from bonobofs.fuse.diagnostics import Diagnostics
from bonobofs.fuse.dir_ops import FIRST_COOKIE
from bonobofs.fuse.dispatch import Operations
from bonobofs.fuse.inode_table import InodeTable
from bonobofs.fuse.kernel_transport import Connection, mount, unmount
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.overlay import Overlay, OverlayUsage
from bonobofs.fuse.remote_authorization import Admissions
from bonobofs.fuse.session_git_dir import SessionGitDir, SessionUser
from bonobofs.fuse.temp_files import TempFiles
from bonobofs.fuse.transport import Hooks, Transport
from bonobofs.fuse.virtual_dir import ALL, LONGEST, VirtualDir
from bonobofs.fuse.virtual_dir import NAME as VIRTUAL
from bonobofs.policy.compiled import Tracked
from bonobofs.policy.decision import Layer
from bonobofs.policy.engine import Policy, callable_words, compile_policy, describe
from bonobofs.policy.request import Principal
from bonobofs.state import scratch_dir as layers
from bonobofs.state.home import GUARD_SOCKET, INSIDE, denials_path
from bonobofs.system import syscalls

TIDY: Final = 1.0
"""Seconds between two rounds of settling, syncing and closing what is quiet."""
_SOON: Final = 0.005
"""Seconds between two rounds of comparing what changed unseen."""
_SECONDS_TO_KNOW: Final = 10.0
"""Seconds that a mount waits at its beginning until its leases are known."""
_SECONDS_TO_RENEW: Final = 1.0
"""Seconds that one request waits for a companion that is late, once."""
LINGER: Final = 3.0
"""Seconds for which a busy mount is still served after it has been told to end."""
_MOST_CACHED: Final = 4096


class Server:
    """One mount from its configuration to its end."""

    _who: tuple[str, bytes] = ("", b"")
    """`whoami.json`, after the digest of the policy that it was made for: json.dumps with an indent leaves cycles."""
    _ended_by = 0
    """The first signal that ended it."""
    _ending = 0.0
    _settle_asked = False
    _reload_asked = False
    _more = False
    _tidied = 0.0
    _trail_fails = False

    def __init__(self, config: dict[str, Any], beginning: Beginning) -> None:
        self._config: Final = config
        self._mountpoint: Final[str] = config["mountpoint"]
        agent = Principal(config["agent"]["label"], config["agent"]["id"], config["role"])
        if beginning.root < 0 and beginning.failure is not None:
            raise beginning.failure
        self._root: Final = beginning.root
        policy = _policy(config)
        identity = Identity(config["session"], agent.label, agent.id)
        self._trail: Final = Trail.create(Path(config["trail"]), Path(config["head"]), identity)
        self._enforcer: Final = Enforcer(
            policy,
            agent,
            self._trail,
            outcomes_later=True,
            holds_apart=True,
            denials=denials_path(Path(config["home"]), agent.id),
        )
        inodes = InodeTable()
        limit = syscalls.raise_limit()
        self._backing: Final = _backing(self._root, inodes, limit)
        held, scratch = self._layer(inodes, limit)
        repository = self._repository(inodes, limit)
        self._backing.read_mounts()
        self._diagnostics: Final = Diagnostics()
        companion, standing = accompany(config, beginning)
        virtual = VirtualDir(
            {
                b"policy.md": lambda _: describe(self._enforcer.policy, agent.role).encode(),
                b"denials.jsonl": self._denials,
                b"whoami.json": lambda _: self._whoami(agent),
                b"scratch": lambda viewer: held.describe(viewer) + scratch.describe(viewer),
            },
            config.get("user"),
        )
        transport = _transport(config)
        self._transport: Final = transport(
            mount(
                config["source"],
                self._mountpoint,
                self._root,
                allow_other=config["allow_other"],
                devices=policy.devices,
                expected=config.get("mountpoint_identity"),
            )
        )
        self._operations: Final = Operations(
            inodes,
            self._backing,
            held,
            scratch,
            self._enforcer,
            virtual,
            self._transport.notices,
        )
        self._operations.append_lock = _turns(Path(config["home"]))
        if repository is not None:
            self._operations.show(repository)
        self._watched: Final = not standing.watch
        self._hearing, self._beside = self._attend(companion, standing)
        self._synced = threading.Event()

    def _attend(self, companion: Companion | None, standing: Standing) -> tuple[Hearing, Beside]:
        config, diagnostics, noticing = self._config, self._diagnostics, self._operations.external_changes
        admissions = Admissions(
            self._enforcer, noticing, self._transport.notices, self._operations.grants, self._root, config["session"]
        )
        self._operations.is_in_use = admissions.needs
        self._operations.own_change = admissions.own_change
        hearing = Hearing(companion, standing, self._operations, admissions, self._enforcer, config, diagnostics)
        beside = Beside(config, companion, self._root, self._transport, hearing, diagnostics)
        return hearing, beside

    def _layer(self, inodes: InodeTable, limit: int) -> tuple[TempFiles, Overlay]:
        """What will be held, and the scratch layer. `limit` is how many descriptors may be open."""
        directory, cookies = Path(self._config["session_dir"]), count(FIRST_COOKIE + 1)
        path = layers.create(directory, keep=self._config.get("keep_scratch", False))
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        store = LayerStore(top, inodes, cache=min(limit // 8, _MOST_CACHED), pins=limit // 16, layer=Layer.SCRATCH)
        scratch = Overlay(store, inodes, OverlayUsage(lambda: self._enforcer.policy), cookies)
        self._enforcer.room = scratch.refusal
        return TempFiles(str(directory), limit // 2, cookies), scratch

    def _repository(self, inodes: InodeTable, limit: int) -> SessionGitDir | None:
        """What the mount shows of the session's own `.git`; None: it has none."""
        shown = self._config["repository"]
        if shown is None:
            return None
        stores = {}
        for number, path in enumerate(shown["stores"]):
            name = f"objects-{number}" if number else "objects"
            top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            place = os.fsdecode(VIRTUAL) + f"/{name}"
            cache, pins = min(limit // 32, _MOST_CACHED), limit // 64
            stores[name.encode()] = LayerStore(top, inodes, cache=cache, pins=pins, layer=Layer.SCRATCH, place=place)
        person = SessionUser(shown["uid"], shown["gid"], tuple(shown["groups"]))
        common = os.open(shown["common"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return SessionGitDir(self._backing, stores, common, person, shared=self._config["allow_other"])

    def _whoami(self, agent: Principal) -> bytes:
        policy = self._enforcer.policy
        digest, text = self._who
        if digest != policy.digest:
            text = self._describe_agent(agent, policy)
            self._who = policy.digest, text
        return text

    def _describe_agent(self, agent: Principal, policy: Policy) -> bytes:
        who = {name: self._config.get(name) for name in ("team", "role", "chain", "session", "source")}
        may_call = callable_words(policy, agent.role)
        socket = os.path.join(self._config["session_dir"], INSIDE, GUARD_SOCKET)
        in_force = {"policy": policy.digest, "policy_origin": self._hearing.policy_origin, "socket": socket}
        who = {"agent": agent.label, "agent_id": agent.id, **who, **in_force, **may_call}
        return json.dumps(who, indent=2).encode() + b"\n"

    def _denials(self, viewer: int) -> bytes:
        """One line for each refusal that the viewer may see, the last ones that fit: a path alone may have 150 KB."""
        lines: deque[bytes] = deque()
        room = LONGEST
        for uid, denial in reversed(self._enforcer.denials):
            if viewer not in (ALL, uid):
                continue
            line = json.dumps(denial).encode() + b"\n"
            room -= len(line)
            if room < 0:
                break
            lines.appendleft(line)
        return b"".join(lines)

    def run(self) -> int:
        """Serve until the mount ends, then settle and close the trail; the exit code."""
        self._install_signals()
        self._transport.handshake(watched=self._watched)
        self._beside.listen()
        # Also where nobody can be heard: then nothing is ever known of leases.
        self._enforcer.follow(0.0)
        self._begin_trail()
        self._catch_up(_SECONDS_TO_KNOW)
        threading.Thread(target=self._keep_synced, daemon=True).start()
        _say(self._config, "ready")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        # No request may leave reference cycles (tests/attacks/test_memory.py): a collection with 100,000 nodes stops
        # the mount for tens of milliseconds.
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            hooks = Hooks(self._before, self._after, self._tidy, self._failed)
            self._transport.serve(self._operations.handlers, hooks)
        finally:
            self._transport.close()
            self._hear_the_last()
            self._end_trail()
            layers.remove(Path(self._config["session_dir"]))
        return InterruptedWaitError.exit_code if self._ended_by == signal.SIGINT else 0

    def _install_signals(self) -> None:
        signal.set_wakeup_fd(self._transport.waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told_to_end)
        signal.signal(signal.SIGHUP, self._told_to_reload)
        signal.signal(signal.SIGUSR1, self._told_to_settle)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def _told_to_end(self, number: int, frame: object) -> None:
        if not self._ending:
            self._ended_by = number
            self._ending = time.monotonic() + LINGER
            threading.Thread(target=self._take_off, daemon=True).start()

    def _told_to_settle(self, number: int, frame: object) -> None:
        self._settle_asked = True

    def _told_to_reload(self, number: int, frame: object) -> None:
        self._reload_asked = True

    def _take_off(self) -> None:
        """Unmount, which may need the serving thread to answer; where the mount is busy, detach and linger."""
        if not unmount(self._mountpoint, lazy=False):
            unmount(self._mountpoint, lazy=True)

    def _before(self, now: float) -> None:
        if clock_gettime(CLOCK_BOOTTIME) >= self._enforcer.known_until:
            self._catch_up(_SECONDS_TO_RENEW)
        self._operations.begin(now)

    def _catch_up(self, seconds: float) -> None:
        """Hear what the companion says of the leases: before a change is refused, it may only be late."""
        deadline = time.monotonic() + seconds
        self._beside.heard()
        while self._enforcer.is_forgetting() and (left := deadline - time.monotonic()) > 0:
            ear = self._beside.fileno()
            if ear < 0:
                break
            poll = select.poll()
            poll.register(ear, select.POLLIN)
            if poll.poll(left * 1000):
                self._beside.heard()
        self._enforcer.forget_in_time()

    def _after(self) -> None:
        try:
            self._enforcer.enter_outcomes()
            self._backing.after()
            self._operations.prune_nodes()
        except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
            self._diagnostics.failed("what follows a request", error)

    def _tidy(self, now: float) -> float | None:
        if self._ending and now >= self._ending:
            return None
        try:
            if self._more and now < self._tidied + TIDY:
                self._more = self._settle_quiet(now)
                self._more |= self._hearing.tidy()
                return _SOON
            self._tidied = now
            self._tidy_up(now)
        except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
            self._diagnostics.failed("tidying up", error)
        self._diagnostics.count()
        return _SOON if self._more else TIDY

    def _settle_quiet(self, now: float) -> bool:
        """Settle what is quiet, or all where SIGUSR1 requested it. True: more of it is left."""
        try:
            if not self._settle_asked:
                return self._enforcer.settle_quiet(now)
            self._settle()
        except TrailError as error:
            self._trail_fails = True
            self._diagnostics.say(str(error))
        return False

    def _tidy_up(self, now: float) -> None:
        self._more = self._settle_quiet(now)
        if self._trail_fails:
            self._trail_fails = False
            self._enforcer.end_runs()
            self._enforcer.end_counters()
        if self._reload_asked:
            self._reload_asked = False
            self._hearing.reload()
        self._beside.tidy(now)
        self._hearing.trust_caches(self._transport.blocked_notices)
        self._more |= self._hearing.tidy()
        self._operations.quiet()

    def _settle(self) -> None:
        """Settle all that is under way, as was asked by SIGUSR1, and say so by the time of a file."""
        self._settle_asked = False
        try:
            self._enforcer.settle_all()
            self._trail.sync()
        finally:
            Path(self._config["session_dir"], "settled").touch(mode=0o600)

    def _keep_synced(self) -> None:
        while not self._synced.wait(TIDY):
            try:
                if not self._trail.is_synced:
                    self._trail.sync()
            except TrailError as error:
                self._trail_fails = True
                self._diagnostics.say(str(error))

    def _begin_trail(self) -> None:
        details = {name: self._config[name] for name in ("source", "mountpoint", "role")}
        self._trail.event("mount", {**details, "policy": self._enforcer.policy.digest})
        found = self._config.get("out_of_band", [])
        protected = {each["path"] for each in found if each["protected"]}
        recovery.enter(
            self._trail, (Difference(each["path"], each["what"]) for each in found), lambda path: path in protected
        )
        temp_cleanup.remove(
            self._root, self._trail, (temp_cleanup.Stray(*each) for each in self._config.get("strays", []))
        )
        self._trail.sync()

    def _hear_the_last(self) -> None:
        try:
            self._hearing.end()
        except Exception as error:  # noqa: BLE001 - the record is closed whatever fails
            self._diagnostics.failed("the last that the companion said", error)

    def _end_trail(self) -> None:
        self._synced.set()
        try:
            self._enforcer.settle_all()
            self._trail.close()
        except TrailError as error:
            self._diagnostics.say(str(error))

    def _failed(self, opcode: int, error: Exception) -> None:
        self._diagnostics.failed(p.Opcode(opcode).name, error)


def _policy(config: dict[str, Any]) -> Policy:
    policy = compile_policy(config["policy"]).with_tracked(Tracked(config["tracked"]) if config["tracked"] else None)
    return policy if config["repository"] is None else policy.with_repository()


def _backing(root: int, inodes: InodeTable, limit: int) -> LayerStore:
    """The source, which may have 13 of 16 descriptors, and the scratch layer 3. Those of a cache give way to others.

    Temporary files take half at most, so that some are left for files that are removed while they are open.
    """
    return LayerStore(root, inodes, cache=min(limit // 4, _MOST_CACHED), pins=limit // 2 + limit // 16)


def _turns(home: Path) -> AppendLock | None:
    try:
        return AppendLock(home)
    except OSError:
        return None  # appends go on; two mounts may tear a line


def _transport(config: dict[str, Any]) -> Callable[[int], Transport]:
    """What serves the connection. mfusepy is loaded only where it is wanted, and before anything is mounted."""
    if config["transport"] == "kernel":
        return Connection
    sys.path.append(config["packages"])
    from bonobofs.fuse.libfuse_transport import Portable  # noqa: PLC0415 - as said above

    sys.path.remove(config["packages"])
    return Portable


def _say(config: dict[str, Any], word: str) -> None:
    fd = config.get("ready_fd")
    if fd is not None:
        os.write(fd, f"{word}\n".encode("utf-8", "surrogateescape"))
        os.close(fd)
        config["ready_fd"] = None


def serve(config: dict[str, Any], beginning: Beginning) -> int:
    """Serve the mount from its beginning to its end; the exit code."""
    try:
        return Server(config, beginning).run()
    except (BonobofsError, OSError) as error:
        text = " ".join(str(error).split())
        _say(config, f"error: {text}")
        sys.stderr.write(f"bonobofs: {text}\n")
        return error.exit_code if isinstance(error, BonobofsError) else MountError.exit_code
