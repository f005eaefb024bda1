"""Entry of the companion process, and its event loop.

The companion ends with the server: the kernel sends it a signal, and the channel closes. If the mount covers the
source, the companion runs in a mount namespace of its own, in which the source stays visible.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final

from bonobofs.companion.change_attribution import ChangeAttribution
from bonobofs.companion.change_forwarder import ChangeForwarder
from bonobofs.companion.image_store import ImageStore
from bonobofs.companion.policy_reloader import PolicyReloader
from bonobofs.companion.remote_authorizer import RemoteAuthorizer
from bonobofs.companion.session_context import SessionContext
from bonobofs.companion.session_questions import SessionQuestions
from bonobofs.companion.socket_server import Handler, Limits, SocketServer
from bonobofs.errors import MountError, StateError, reason
from bonobofs.git.git_worker import GitWorker, WorkerSession
from bonobofs.ipc.channel import Channel, CompanionStatus, Message, MessageKind
from bonobofs.ipc.session_config import CompanionConfig, SessionConfig
from bonobofs.policy.request import Principal
from bonobofs.state.home import INSIDE
from bonobofs.state.lease_follower import LeaseFollower, LeaseSnapshot
from bonobofs.state.sessions import read_live
from bonobofs.system import mounts, processes, syscalls

_MAX_WAIT: Final = 3600.0
_DETACH_SECONDS: Final = 0.5
_APPLY_SECONDS: Final = 0.5
_STOPPED: Final = 0
_SERVER_DIED: Final = signal.SIGRTMIN
_END_SECONDS: Final = 1.0
"""Seconds in which the threads of a killed server end."""
_FIRST_SNAPSHOT_SECONDS: Final = 5.0
"""Seconds after which the calls are served although the database does not answer."""


class LeaseForwarder:
    """Sends each lease snapshot to the server, and acknowledges it when the server has applied it.

    It runs in a thread, because a slow database must not delay the event loop.
    """

    def __init__(self, channel: Channel, config: SessionConfig) -> None:
        self._channel: Final = channel
        self._config: Final = config
        self._applied: Final[queue.SimpleQueue[int]] = queue.SimpleQueue()
        self._ended: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="bonobofs-leases", daemon=True)
        self._number = 0
        self._error = ""
        self.began: Final = threading.Event()
        """The server has applied the first snapshot, or the leases cannot be read."""
        self.leases: list[dict[str, Any]] = []
        """The leases of the last snapshot that was sent."""
        os.environ.update(config.database)
        self._thread.start()

    def on_applied(self, number: int) -> None:
        """Note that the server has applied snapshot `number`."""
        self._applied.put(number)

    def stop(self) -> None:
        """Record the end of the session, if the database answers within half a second."""
        self._ended.set()
        self._applied.put(_STOPPED)
        self._thread.join(_DETACH_SECONDS)

    def _run(self) -> None:
        config = self._config
        home = Path(config.home)
        LeaseFollower(home, config.session, config.holder, config.source, self._apply, self._ended).run(self._report)

    def _apply(self, snapshot: LeaseSnapshot, _: Callable[[], None]) -> bool:
        deadline = monotonic() + _APPLY_SECONDS
        self._number += 1
        if snapshot.leases is not None:
            self.leases = snapshot.leases
        document = {"number": self._number, "until": snapshot.expires_at, "leases": snapshot.leases}
        self._channel.send(MessageKind.LEASES, document)
        while not self._ended.is_set() and (left := deadline - monotonic()) > 0:
            with suppress(queue.Empty):
                if self._applied.get(timeout=left) == self._number:
                    self.began.set()
                    return True
        return False

    def _report(self, error: Exception) -> None:
        """Log an error and send it to the server, once."""
        self.began.set()
        text = " ".join(reason(error).split())
        if text != self._error:
            self._error = text
            self._channel.send(MessageKind.LEASES_ERROR, {"reason": text})
            _log(f"the leases cannot be read: {text}")


class CompanionServices:
    """The services of one session, and the loop that runs them."""

    def __init__(
        self, channel: Channel, config: CompanionConfig, forwarder: ChangeForwarder | None, leases: LeaseForwarder
    ) -> None:
        session = config.session
        self._channel: Final = channel
        self._forwarder: Final = forwarder
        self._attribution: Final = ChangeAttribution(channel, Path(session.home), session.session, Path(session.source))
        self._leases: Final = leases
        self._reloader: Final = PolicyReloader(channel, config)
        agent = Principal(session.agent, session.agent_id, session.role)
        self._authorizer: Final = RemoteAuthorizer(channel, agent, session.policy, self._send_later)
        self._session: Final = SessionContext(session, self._authorizer)
        note_index = self._attribution.index.update
        names = self._session.home, session.session, session.source, session.issue
        worker_session = WorkerSession(*names, self._authorizer, note_index, lambda: leases.leases)
        self._git_worker: Final = GitWorker(worker_session)
        self._session.git_worker = self._git_worker
        self._questions: Final = SessionQuestions(channel, session)
        self._session.questions = self._questions
        self._images: Final = ImageStore(channel, session, self._authorizer.images_in_use)
        self._deferred: Final[queue.SimpleQueue[tuple[MessageKind, dict[str, Any]]]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._server = self._open_socket(Path(session.session_dir, INSIDE), session.user)

    def _open_socket(self, directory: Path, guest: int | None) -> SocketServer | None:
        try:
            return SocketServer(directory, self._load_calls, guest)
        except OSError as error:
            _log(f"the guard socket cannot be opened: {error.strerror}")
            return None

    def _load_calls(self) -> tuple[Handler, Limits]:
        """Import the calls after the first lease snapshot: the mount waits for the snapshot, and not for the calls."""
        self._leases.began.wait(_FIRST_SNAPSHOT_SECONDS)
        from bonobofs.companion.calls import LIMITS, handle_call  # noqa: PLC0415 - as the docstring says

        gc.freeze()
        return lambda maker, name, arguments, fds: handle_call(self._session, name, arguments, maker, fds), LIMITS

    def close_socket(self) -> None:
        """Close the guard socket. No further call is accepted."""
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Close the guard socket, and end the git worker."""
        self.close_socket()
        self._git_worker.close()

    def _send_later(self, kind: MessageKind, document: dict[str, Any]) -> None:
        """Send a message after all changes that the watcher has seen. Called by the threads that answer calls."""
        self._deferred.put((kind, document))
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _send_deferred(self, now: float) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        deferred = []
        with suppress(queue.Empty):
            while True:
                deferred.append(self._deferred.get_nowait())
        if deferred and self._forwarder is not None:
            self._forwarder.read_all(now)
        for kind, document in deferred:
            self._channel.send(kind, document)

    def run(self, messages: list[Message]) -> None:
        """Serve until the server closes the channel. `messages` were received with the configuration."""
        threading.Thread(target=self._recover, name="bonobofs-recovery", daemon=True).start()
        for kind, body in messages:
            self._handle(kind, body, monotonic())
        while True:
            ready = self._poll(monotonic())
            now = monotonic()
            if self._channel.fileno() in ready:
                try:
                    messages = self._channel.receive()
                except EOFError:
                    return
                for kind, body in messages:
                    self._handle(kind, body, now)
            if self._wake_read in ready:
                self._send_deferred(now)
            if self._forwarder is not None and self._forwarder.fileno() in ready:
                self._forwarder.read(now)
            if self._forwarder is not None and self._forwarder.due(now) <= 0:
                self._forwarder.run_due(now)
            if self._attribution.due(now) <= 0:
                self._attribution.report()
            if self._reloader.due(now) <= 0:
                self._reloader.check(now)
            if self._questions.due(now) <= 0:
                self._questions.check(now)

    def _recover(self) -> None:
        """Finish what an earlier session left, then keep the store of pre-images within its limits.

        The mount waits for the first lease snapshot, and not for this.
        """
        self._leases.began.wait(_FIRST_SNAPSHOT_SECONDS)
        self._git_worker.recover()
        self._images.run()

    def _poll(self, now: float) -> set[int]:
        """Wait until a descriptor is readable or a service is due. Return the readable descriptors."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        seconds = min(self._attribution.due(now), self._reloader.due(now), self._questions.due(now), _MAX_WAIT)
        forwarder = self._forwarder
        if forwarder is not None:
            seconds = min(seconds, forwarder.due(now))
        if forwarder is not None and forwarder.fileno() >= 0:
            wait = forwarder.seconds_until_read(now)
            if wait <= 0:
                poll.register(forwarder.fileno(), select.POLLIN)
            else:
                seconds = min(seconds, wait)
        return {fd for fd, _ in poll.poll(seconds * 1000)}

    def _handle(self, kind: MessageKind, body: bytes, now: float) -> None:
        if kind is MessageKind.SUSPECTS:
            self._attribution.add_suspects(json.loads(body), now)
        elif kind is MessageKind.RELOAD:
            self._reloader.load()
        elif kind is MessageKind.LEASES_APPLIED:
            self._leases.on_applied(json.loads(body)["number"])
        elif kind is MessageKind.REPLY:
            self._authorizer.on_reply(body)
        elif kind is MessageKind.POLICY_APPLIED:
            document = json.loads(body)
            self._authorizer.change_policy(**document)
            self._questions.change_policy(document["policy"])
        elif kind is MessageKind.ASKED:
            self._questions.on_asked(body)
        elif kind is MessageKind.ANSWERS_APPLIED:
            self._questions.on_applied(body)
        elif kind is MessageKind.CLOSE_SOCKET:
            self.close_socket()
        elif kind is MessageKind.STORE_FULL:
            self._images.make_room(**json.loads(body))
        elif kind is MessageKind.FLUSH:
            self._flush(now)

    def _flush(self, now: float) -> None:
        if self._forwarder is not None:
            self._forwarder.read_all(now)
        self._attribution.report()
        self._channel.send(MessageKind.FLUSH)


def _log(text: str) -> None:
    sys.stderr.write(f"bonobofs: {text}\n")
    sys.stderr.flush()


def _leave_mount(config: CompanionConfig) -> CompanionStatus:
    """If the mount covers the source, enter the namespaces of the first companion, or new ones."""
    if config.session.mountpoint != config.session.source:
        return CompanionStatus("")
    try:
        for fd in config.namespaces or _new_namespaces():
            syscalls.enter_namespace(fd)
    except OSError as error:
        return CompanionStatus(
            "",
            f"mounting over the source itself needs a mount namespace for the companion, and the kernel "
            f"refuses one ({error.strerror}); mount on another directory, or as root",
        )
    return CompanionStatus("", has_namespace=True)


def _new_namespaces() -> list[int]:
    """Create the namespaces in a child process. Return their descriptors in the order of entry. OSError.

    For an ordinary user, the kernel lets only a traceable process have its uid map written. The companion must never be
    traceable. So a child without the channel to the server is.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        pid = os.fork()
        if pid == 0:
            status = errno.EIO
            try:
                syscalls.close_all_but({0, 1, 2, theirs.fileno()})
                syscalls.allow_tracing()
                syscalls.unshare_mounts()
                _detach_copies()
                socket.send_fds(theirs, [b"\0"], _open_namespaces())
                status = 0
            except OSError as error:
                status = error.errno or errno.EIO
            finally:
                os._exit(status)
        theirs.close()
        _, fds, _, _ = socket.recv_fds(ours, 1, 2)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        raise OSError(status, os.strerror(status))
    return fds


def _detach_copies() -> None:
    """Detach the new namespace's copies of other mounts. Each copy would keep the server of its mount alive."""
    if os.geteuid() == 0:  # the kernel locks them in the namespace of an ordinary user
        for mount in mounts.bonobofs_mounts():
            with suppress(OSError, MountError):
                mounts.detach(mount.mountpoint, lazy=True)


def _open_namespaces() -> list[int]:
    """Return descriptors of the namespaces of this process, in the order of entry."""
    names = ("mnt",) if os.geteuid() == 0 else ("user", "mnt")
    return [os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names]


def _enter_source(config: CompanionConfig, status: CompanionStatus) -> None:
    """Make the source the working directory. OSError."""
    if status.has_namespace:
        # The descriptor leads to the source in the server's namespace, where the mount covers it.
        os.chdir(config.session.source)
        if not os.path.samestat(os.stat("."), os.fstat(config.root)):
            raise OSError(errno.ESTALE, f"the source {config.session.source} was replaced")
    else:
        os.fchdir(config.root)


def _send_status(channel: Channel, status: CompanionStatus) -> None:
    fds = _open_namespaces() if status.has_namespace else []
    if fds:
        channel.send_fds(MessageKind.STATUS, status._asdict(), fds)
        for fd in fds:
            os.close(fd)
    else:
        channel.send(MessageKind.STATUS, status._asdict())


def _receive_config(channel: Channel) -> tuple[CompanionConfig, list[Message]]:
    """Return the configuration, and the messages that came with it. EOFError."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    messages: list[Message] = []
    while not messages:
        poll.poll()
        messages = channel.receive()
    return CompanionConfig.from_document(json.loads(messages[0][1])), messages[1:]


def _await_death(server: int, started: int, directory: Path) -> None:
    """Wait until the server is killed, and end this process. `directory` is that of the session.

    A program that waits for the server may hold the lock of a directory. A thread of the server that sends a
    notification about this directory waits for the lock. A kill ends neither the program nor this thread, which keeps
    the FUSE connection open. So the connection is aborted if a thread is left after a second.
    """
    while not processes.is_zombie(server):  # another process may send the signal
        signal.sigwait({_SERVER_DIED})
        if processes.wait_for_end(server, started, _END_SECONDS):
            os._exit(0)
    try:
        live = read_live(directory)
        if live is not None and live.device:
            mounts.abort_connection(live.device)
    except (OSError, StateError) as error:
        _log(f"programs may wait for the killed server: its FUSE connection cannot be ended: {reason(error)}")
    os._exit(0)


def main(fd: int) -> int:
    """Run the companion of the server at the other end of the socket `fd` until the server ends. Return the exit
    status.

    The server has forked this process, so no other process of the user could ever trace it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {_SERVER_DIED})
    syscalls.die_with_parent(_SERVER_DIED)
    server = os.getppid()
    started = processes.start_time(server) or 0
    channel = Channel(socket.socket(fileno=fd), blocking=True)
    os.umask(0o077)
    try:
        config, messages = _receive_config(channel)
    except EOFError:
        return 0
    config.session.open_log()
    status = _leave_mount(config)
    threading.Thread(
        target=_await_death, args=(server, started, Path(config.session.session_dir)), name="bonobofs-end", daemon=True
    ).start()
    leases = LeaseForwarder(channel, config.session)
    forwarder: ChangeForwarder | None = None
    if not status.refused:
        try:
            _enter_source(config, status)
            forwarder = ChangeForwarder(channel)
            status = status._replace(watch=forwarder.gap, part=forwarder.is_partial)
        except OSError as error:
            status = status._replace(watch=reason(error))
    if status.refused:
        channel.send(MessageKind.STATUS, status._asdict())
        return 0
    companion = CompanionServices(channel, config, forwarder, leases)
    os.umask(config.session.umask)
    _send_status(channel, status)
    # Each lease leaves 2,500 objects in cycles, 350 KB. The launcher's threshold of 50,000 serves the imports.
    gc.freeze()
    gc.set_threshold(5_000)
    companion.run(messages)
    companion.close()
    leases.stop()
    return 0
