"""The server of one mount, from its configuration to its end.

It imports every module and changes to `/` before it mounts: a server that needs a file of its own mount would wait for
itself. It loads the standard library alone; the portable transport adds mfusepy.
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
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Final

from bonobofs.audit import recovery, temp_cleanup
from bonobofs.audit.recovery import SourceDifference
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import BonobofsError, InterruptedWaitError, MountError, TrailError
from bonobofs.fuse import abi as p
from bonobofs.fuse.append_lock import AppendLock
from bonobofs.fuse.companion_requests import CompanionRequests, RemoteAuthorization
from bonobofs.fuse.companion_supervisor import CompanionProcess, CompanionSupervisor, EarlyStart, await_ready
from bonobofs.fuse.diagnostics import Diagnostics
from bonobofs.fuse.dir_ops import FIRST_COOKIE
from bonobofs.fuse.dispatch import Operations
from bonobofs.fuse.inode_table import InodeTable
from bonobofs.fuse.kernel_transport import KernelTransport, mount, unmount
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.overlay import Overlay, OverlayUsage
from bonobofs.fuse.session_git_dir import SessionGitDir, SessionUser
from bonobofs.fuse.temp_files import TempFiles
from bonobofs.fuse.transport import Hooks, Transport
from bonobofs.fuse.virtual_dir import ALL, LONGEST, VirtualDir
from bonobofs.fuse.virtual_dir import NAME as VIRTUAL
from bonobofs.ipc.channel import CompanionStatus
from bonobofs.ipc.session_config import SessionConfig
from bonobofs.policy.compiled import Tracked
from bonobofs.policy.decision import Layer
from bonobofs.policy.engine import Policy, callable_words, describe
from bonobofs.policy.request import Principal
from bonobofs.state import scratch_dir as layers
from bonobofs.state.home import GUARD_SOCKET, INSIDE, denials_path
from bonobofs.system import mounts, syscalls
from bonobofs.undo.preimages import PreimageStore, StoreLimits, store_place

TIDY: Final = 1.0
"""Seconds between two rounds of housekeeping: record idle writes, sync the trail, close idle descriptors."""
_SOON: Final = 0.005
"""Seconds between two rounds while external changes remain to be compared."""
_FIRST_LEASES_SECONDS: Final = 10.0
"""Seconds that a mount waits for its first lease snapshot."""
_RENEW_SECONDS: Final = 1.0
"""Seconds that a request waits for a companion that is late with a lease snapshot."""
LINGER: Final = 3.0
"""Seconds that a busy mount is served after a signal has ended it."""
_MAX_CACHED: Final = 4096


class MountServer:
    """The server of one mount, from the mount to the end of the trail."""

    _whoami_cache: tuple[str, bytes] = ("", b"")
    """Digest of the policy, and `whoami.json` for it: json.dumps with an indent leaves reference cycles."""
    _end_signal = 0
    """The first signal that ended the mount."""
    _end_at = 0.0
    _settle_requested = False
    _reload_requested = False
    _has_more = False
    _tidied_at = 0.0
    _trail_fails = False

    def __init__(self, config: SessionConfig, start: EarlyStart, policy: Policy, ready: ReadyPipe) -> None:
        self._config: Final = config
        self._ready: Final = ready
        agent = Principal(config.agent, config.agent_id, config.role)
        if start.root < 0 and start.failure is not None:
            raise start.failure
        self._root: Final = start.root
        policy = _bind_policy(policy, config)
        identity = TrailIdentity(config.session, agent.label, agent.id)
        self._trail: Final = Trail.create(Path(config.trail), Path(config.head), identity)
        self._enforcer: Final = Enforcer(
            policy,
            agent,
            self._trail,
            outcomes_later=True,
            has_layers=True,
            denials=denials_path(Path(config.home), agent.id),
        )
        inodes = InodeTable()
        limit = syscalls.raise_limit()
        self._backing: Final = _source_store(self._root, inodes, limit)
        held, scratch = self._layer(inodes, limit)
        repository = self._repository(inodes, limit)
        self._backing.read_mounts()
        self._diagnostics: Final = Diagnostics()
        companion, status = await_ready(config, start)
        virtual = VirtualDir(
            {
                b"policy.md": lambda _: describe(self._enforcer.policy, agent.role).encode(),
                b"denials.jsonl": self._denials,
                b"whoami.json": lambda _: self._whoami(agent),
                b"scratch": lambda viewer: held.describe(viewer) + scratch.describe(viewer),
            },
            config.user,
        )
        transport = _load_transport(config)
        self._transport: Final = transport(
            mount(
                config.source,
                config.mountpoint,
                self._root,
                allow_other=config.allow_other,
                devices=policy.devices,
                expected=config.mountpoint_identity,
            )
        )
        self._operations: Final = Operations(
            inodes, self._backing, held, scratch, self._enforcer, virtual, self._transport.notices
        )
        for created in mounts.at(Path(config.mountpoint))[-1:]:
            self._operations.mount.device = created.device
        self._keep_preimages(config)
        self._operations.mount.append_lock = _open_append_lock(Path(config.home))
        if repository is not None:
            self._operations.show_repository(repository)
        self._watched: Final = not status.watch
        self._requests, self._supervisor = self._attach(companion, status)
        self._synced = threading.Event()

    def _keep_preimages(self, config: SessionConfig) -> None:
        limits = StoreLimits.of(config.policy)
        if limits is None:
            return
        # By its path, the source may be below the new mount, which does not answer yet.
        directory = store_place(Path(config.home), Path(f"/proc/self/fd/{self._root}")) / config.session
        try:
            store = PreimageStore(directory, limits)
        except OSError as error:
            self._diagnostics.log(f"old contents are not kept: {directory}: {error.strerror}")
            return
        self._operations.mount.preimages.store = store

    def _attach(
        self, companion: CompanionProcess | None, status: CompanionStatus
    ) -> tuple[CompanionRequests, CompanionSupervisor]:
        config, diagnostics, mount = self._config, self._diagnostics, self._operations.mount
        authorization = RemoteAuthorization(mount, self._operations.explain, config.session)
        authorization.keeper = mount.preimages.path_keeper()
        mount.is_in_use = authorization.needs
        mount.own_change = authorization.own_change
        requests = CompanionRequests(companion, status, mount, authorization, config, diagnostics)
        supervisor = CompanionSupervisor(config, companion, self._root, self._transport, requests, diagnostics)
        return requests, supervisor

    def _layer(self, inodes: InodeTable, limit: int) -> tuple[TempFiles, Overlay]:
        """The staged files and the scratch layer. `limit` is how many descriptors may be open."""
        directory, cookies = Path(self._config.session_dir), count(FIRST_COOKIE + 1)
        path = layers.create(directory, keep=self._config.keep_scratch)
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        store = LayerStore(top, inodes, cache=min(limit // 8, _MAX_CACHED), pins=limit // 16, layer=Layer.SCRATCH)
        scratch = Overlay(store, inodes, OverlayUsage(lambda: self._enforcer.policy), cookies)
        self._enforcer.take_space = scratch.take_space
        return TempFiles(str(directory), limit // 2, cookies), scratch

    def _repository(self, inodes: InodeTable, limit: int) -> SessionGitDir | None:
        """The session's own `.git` as the mount shows it."""
        config = self._config.repository
        if config is None:
            return None
        stores = {}
        for number, path in enumerate(config.stores):
            name = f"objects-{number}" if number else "objects"
            top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            prefix = os.fsdecode(VIRTUAL) + f"/{name}"
            cache, pins = min(limit // 32, _MAX_CACHED), limit // 64
            stores[name.encode()] = LayerStore(top, inodes, cache=cache, pins=pins, layer=Layer.SCRATCH, prefix=prefix)
        user = SessionUser(config.uid, config.gid, tuple(config.groups))
        common = os.open(config.common, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return SessionGitDir(self._backing, stores, common, user, shared=self._config.allow_other)

    def _whoami(self, agent: Principal) -> bytes:
        policy = self._enforcer.policy
        digest, text = self._whoami_cache
        if digest != policy.digest:
            text = self._describe_agent(agent, policy)
            self._whoami_cache = policy.digest, text
        return text

    def _describe_agent(self, agent: Principal, policy: Policy) -> bytes:
        config = self._config
        document = {
            "agent": agent.label,
            "agent_id": agent.id,
            "team": config.team,
            "role": config.role,
            "chain": config.chain,
            "issue": config.issue,
            "session": config.session,
            "source": config.source,
            "policy": policy.digest,
            "policy_origin": self._requests.policy_origin,
            "socket": os.path.join(config.session_dir, INSIDE, GUARD_SOCKET),
            **callable_words(policy, agent.role),
        }
        return json.dumps(document, indent=2).encode() + b"\n"

    def _denials(self, viewer: int) -> bytes:
        """The last denials that the viewer may see, as far as they fit: a path alone may have 150 KB."""
        lines: deque[bytes] = deque()
        room = LONGEST
        for uid, denial in reversed(self._enforcer.denial_recorder.last):
            if viewer not in (ALL, uid):
                continue
            line = json.dumps(denial).encode() + b"\n"
            room -= len(line)
            if room < 0:
                break
            lines.appendleft(line)
        return b"".join(lines)

    def run(self) -> int:
        """Serve until the mount ends, then record all outcomes and close the trail; the exit status."""
        self._install_signals()
        self._transport.handshake(watched=self._watched)
        self._supervisor.listen()
        # Without a companion, the leases stay unknown.
        self._enforcer.set_leases(0.0)
        self._begin_trail()
        self._await_leases(_FIRST_LEASES_SECONDS)
        threading.Thread(target=self._keep_synced, daemon=True).start()
        self._ready.send("ready")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        # No request may leave reference cycles (tests/attacks/test_server_memory.py): a collection with 100,000 nodes
        # stops the mount for tens of milliseconds. The imports leave some 500 objects of garbage.
        gc.freeze()
        gc.disable()
        try:
            hooks = Hooks(self._before, self._after, self._rest, self._tidy, self._failed)
            self._transport.serve(self._operations.handlers, hooks)
        finally:
            self._transport.close()
            self._end_companion()
            self._end_trail()
            layers.remove(Path(self._config.session_dir))
        return InterruptedWaitError.exit_code if self._end_signal == signal.SIGINT else 0

    def _install_signals(self) -> None:
        signal.set_wakeup_fd(self._transport.waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_end_signal)
        signal.signal(signal.SIGHUP, self._on_reload_signal)
        signal.signal(signal.SIGUSR1, self._on_settle_signal)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def _on_end_signal(self, number: int, frame: object) -> None:
        if not self._end_at:
            self._end_signal = number
            self._end_at = time.monotonic() + LINGER
            threading.Thread(target=self._unmount, daemon=True).start()

    def _on_settle_signal(self, number: int, frame: object) -> None:
        self._settle_requested = True

    def _on_reload_signal(self, number: int, frame: object) -> None:
        self._reload_requested = True

    def _unmount(self) -> None:
        """Unmount; detach a busy mount. In a thread, as the serving thread may have to answer requests meanwhile."""
        if not unmount(self._config.mountpoint, lazy=False):
            unmount(self._config.mountpoint, lazy=True)

    def _before(self, now: float) -> None:
        boot_time = clock_gettime(CLOCK_BOOTTIME)
        if boot_time >= self._enforcer.leases_expire_at:
            self._await_leases(_RENEW_SECONDS)
        if boot_time >= self._enforcer.answers_expire_at:
            self._requests.answers.apply()
        self._operations.begin_request(now)

    def _await_leases(self, seconds: float) -> None:
        """Wait for a lease snapshot before changes are refused: the companion may only be late."""
        deadline = time.monotonic() + seconds
        self._supervisor.on_readable()
        while self._enforcer.leases_expired() and (left := deadline - time.monotonic()) > 0:
            fd = self._supervisor.fileno()
            if fd < 0:
                break
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if poll.poll(left * 1000):
                self._supervisor.on_readable()
        self._enforcer.expire_leases()

    def _after(self) -> None:
        try:
            self._operations.after_reply()
        except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
            self._diagnostics.failed("what follows a request", error)

    def _rest(self) -> bool:
        """Queue one outcome. A request that comes soon does not wait for all of them."""
        try:
            return self._enforcer.write_outcome()
        except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
            self._diagnostics.failed("the outcome of a change", error)
            return False

    def _tidy(self, now: float) -> float | None:
        if self._end_at and now >= self._end_at:
            return None
        try:
            if self._has_more and now < self._tidied_at + TIDY:
                self._has_more = self._settle_quiet(now)
                self._has_more |= self._requests.tidy()
                return _SOON
            self._tidied_at = now
            self._tidy_all(now)
        except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
            self._diagnostics.failed("tidying up", error)
        self._diagnostics.count()
        return _SOON if self._has_more else TIDY

    def _settle_quiet(self, now: float) -> bool:
        """Record the outcomes of idle writes; after SIGUSR1, of all writes. True: there are more."""
        try:
            self._operations.mount.preimages.record_losses()
            if not self._settle_requested:
                return self._enforcer.flush_idle(now)
            self._settle()
        except TrailError as error:
            self._trail_fails = True
            self._diagnostics.log(str(error))
        return False

    def _tidy_all(self, now: float) -> None:
        self._has_more = self._settle_quiet(now)
        if self._trail_fails:
            self._trail_fails = False
            self._enforcer.close_batches()
            self._enforcer.close_counters()
        if self._reload_requested:
            self._reload_requested = False
            self._requests.reload()
        self._supervisor.tidy(now)
        if (lock := self._operations.mount.append_lock) is not None:
            lock.release_expired()
        self._requests.update_caching(self._transport.blocked_notifications)
        self._has_more |= self._requests.tidy()
        self._operations.expire_caches()

    def _settle(self) -> None:
        """On SIGUSR1: record the outcome of every write, sync the trail, and touch `settled`."""
        self._settle_requested = False
        try:
            self._enforcer.flush_all()
            self._trail.sync()
        finally:
            Path(self._config.session_dir, "settled").touch(mode=0o600)

    def _keep_synced(self) -> None:
        while not self._synced.wait(TIDY):
            try:
                if not self._trail.is_synced:
                    self._trail.sync()
            except TrailError as error:
                self._trail_fails = True
                self._diagnostics.log(str(error))

    def _begin_trail(self) -> None:
        config = self._config
        details = {"source": config.source, "mountpoint": config.mountpoint, "role": config.role}
        self._trail.event("mount", {**details, "policy": self._enforcer.policy.digest})
        protected = {each["path"] for each in config.out_of_band if each["protected"]}
        differences = (SourceDifference(each["path"], each["what"]) for each in config.out_of_band)
        recovery.enter(self._trail, differences, lambda path: path in protected)
        temp_cleanup.remove(self._root, self._trail, (temp_cleanup.Stray(*stray) for stray in config.strays))
        self._trail.sync()

    def _end_companion(self) -> None:
        try:
            self._requests.end()
        except Exception as error:  # noqa: BLE001 - the trail is closed in any case
            self._diagnostics.failed("the end of the companion", error)

    def _end_trail(self) -> None:
        self._synced.set()
        try:
            self._operations.mount.preimages.end()
            self._enforcer.flush_all()
            self._trail.close()
        except TrailError as error:
            self._diagnostics.log(str(error))

    def _failed(self, opcode: int, error: Exception) -> None:
        self._diagnostics.failed(p.Opcode(opcode).name, error)


class ReadyPipe:
    """The pipe on which `mount` waits for the server; it takes one line."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def send(self, line: str) -> None:
        """Send `ready` or an error, and close the pipe; further lines are dropped."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(BrokenPipeError):  # `mount` was killed; the session is served, and `umount` ends it
                os.write(fd, f"{line}\n".encode("utf-8", "surrogateescape"))
            os.close(fd)


def _bind_policy(policy: Policy, config: SessionConfig) -> Policy:
    policy = policy.with_tracked(Tracked(config.tracked) if config.tracked else None)
    return policy if config.repository is None else policy.with_repository()


def _source_store(root: int, inodes: InodeTable, limit: int) -> LayerStore:
    """The store of the source. It may use 13/16 of the descriptors, the scratch layer 3/16.

    Staged files may use half of all, so that some are left for files that are removed while they are open.
    """
    return LayerStore(root, inodes, cache=min(limit // 4, _MAX_CACHED), pins=limit // 2 + limit // 16)


def _open_append_lock(home: Path) -> AppendLock | None:
    try:
        return AppendLock(home)
    except OSError:
        return None  # without it, appends of two mounts may tear a line


def _load_transport(config: SessionConfig) -> Callable[[int], Transport]:
    """The class that serves the connection. mfusepy is loaded only for libfuse, and before the mount is made."""
    if config.transport == "kernel":
        return KernelTransport
    sys.path.append(str(config.packages))
    from bonobofs.fuse.libfuse_transport import LibfuseTransport  # noqa: PLC0415 - see above

    sys.path.remove(str(config.packages))
    return LibfuseTransport


def serve(config: SessionConfig, start: EarlyStart, policy: Policy) -> int:
    """Serve the mount until it ends; the exit status. `policy` is the compiled policy of the configuration."""
    ready = ReadyPipe(config.ready_fd)
    try:
        return MountServer(config, start, policy, ready).run()
    except (BonobofsError, OSError) as error:
        text = " ".join(str(error).split())
        ready.send(f"error: {text}")
        sys.stderr.write(f"bonobofs: {text}\n")
        return error.exit_code if isinstance(error, BonobofsError) else MountError.exit_code
