"""The companion's life: `main`, with the number of the descriptor of its line to the server.

It ends with the server, whichever way that ends: the kernel kills it, and the line has an end. Where the mount is to
cover the source itself, it stands in a mount namespace of its own, in which the source stays what it is.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import select
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, Final

from bonobofs.companion.calls import AT_ONCE, called
from bonobofs.companion.change_attribution import Judging
from bonobofs.companion.change_forwarder import Watching
from bonobofs.companion.git_worker import GitWorker
from bonobofs.companion.lease_thread import Leases
from bonobofs.companion.policy_reloader import PolicyFile
from bonobofs.companion.remote_authorizer import RemoteAuthorizer
from bonobofs.companion.session_context import CalledSession
from bonobofs.companion.socket_server import Entrance
from bonobofs.errors import MountError
from bonobofs.ipc.channel import Kind, Line
from bonobofs.policy.request import Principal
from bonobofs.state.home import INSIDE
from bonobofs.system import mounts, syscalls

_MOST_SECONDS: Final = 3600.0


class Companion:
    """The services of one session, and the loop that runs them."""

    def __init__(self, line: Line, config: dict[str, Any], watching: Watching | None, leases: Leases) -> None:
        source = Path(config["source"])
        self._line: Final = line
        self._watching: Final = watching
        self._judging: Final = Judging(line, Path(config["home"]), config["session"], source)
        self._leases: Final = leases
        self._policy: Final = PolicyFile(line, config)
        agent = Principal(config["agent"]["label"], config["agent"]["id"], config["role"])
        self._authorizer: Final = RemoteAuthorizer(line, agent, config["policy"], self._tell_later)
        self._session: Final = CalledSession(config, self._authorizer, self._judging.refresh.note_index)
        self._git_worker: Final = GitWorker(self._session, lambda: leases.told)
        self._session.git_worker = self._git_worker
        self._later: Final[queue.SimpleQueue[tuple[Kind, dict[str, Any]]]] = queue.SimpleQueue()
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._entrance = self._open(Path(config["session_dir"], INSIDE), config["user"])

    def _open(self, directory: Path, guest: int | None) -> Entrance | None:
        try:
            return Entrance(
                directory,
                lambda maker, name, arguments, lent: called(self._session, name, arguments, maker, lent),
                AT_ONCE,
                guest,
            )
        except OSError as error:
            sys.stderr.write(f"bonobofs: the guard socket cannot be opened: {error.strerror}\n")
            sys.stderr.flush()
            return None

    def close(self) -> None:
        """Take no more calls."""
        if self._entrance is not None:
            self._entrance.close()

    def end(self) -> None:
        """Take no more calls, and end the git worker."""
        self.close()
        self._git_worker.close()

    def _tell_later(self, kind: Kind, document: dict[str, Any]) -> None:
        """Tell the server this once it knows all that has changed by now. From a thread that answers a call."""
        self._later.put((kind, document))
        with suppress(BlockingIOError):
            os.write(self._waker, b"\0")

    def _tell_after_changes(self, now: float) -> None:
        """Tell the server what waits for that, but first all that has changed."""
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        waiting = []
        with suppress(queue.Empty):
            while True:
                waiting.append(self._later.get_nowait())
        if waiting and self._watching is not None:
            self._watching.read_rest(now)
        for kind, document in waiting:
            self._line.tell(kind, document)

    def run(self, messages: list[tuple[Kind, bytes]]) -> None:
        """Serve until the server is gone; `messages` it has sent already."""
        threading.Thread(target=self._git_worker.recover, name="bonobofs-recovery", daemon=True).start()
        for kind, body in messages:
            self._act(kind, body, monotonic())
        while True:
            now = monotonic()
            ready = self._wait(now)
            now = monotonic()
            if self._line.fileno() in ready:
                try:
                    messages = self._line.receive()
                except EOFError:
                    return
                for kind, body in messages:
                    self._act(kind, body, now)
            if self._wake in ready:
                self._tell_after_changes(now)
            if self._watching is not None and self._watching.fileno() in ready:
                self._watching.read(now)
            if self._watching is not None and self._watching.due(now) <= 0:
                self._watching.act(now)
            if self._judging.due(now) <= 0:
                self._judging.judge()
            if self._policy.due(now) <= 0:
                self._policy.look(now)

    def _wait(self, now: float) -> set[int]:
        """The descriptors that can be read, or none when a service is due."""
        poll = select.poll()
        poll.register(self._line.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        seconds = min(self._judging.due(now), self._policy.due(now), _MOST_SECONDS)
        watching = self._watching
        if watching is not None:
            seconds = min(seconds, watching.due(now))
        if watching is not None and watching.fileno() >= 0:
            wait = watching.may_read(now)
            if wait <= 0:
                poll.register(watching.fileno(), select.POLLIN)
            else:
                seconds = min(seconds, wait)
        return {fd for fd, _ in poll.poll(seconds * 1000)}

    def _act(self, kind: Kind, body: bytes, now: float) -> None:
        if kind is Kind.SUSPECTS:
            self._judging.suspect(json.loads(body), now)
        elif kind is Kind.RELOAD:
            self._policy.load()
        elif kind is Kind.BOUND:
            self._leases.bound(json.loads(body)["number"])
        elif kind is Kind.ANSWER:
            self._authorizer.answered(body)
        elif kind is Kind.IN_FORCE:
            self._authorizer.change_policy(**json.loads(body))
        elif kind is Kind.CLOSING:
            self.close()
        elif kind is Kind.SETTLE:
            self._settle(now)

    def _settle(self, now: float) -> None:
        if self._watching is not None:
            self._watching.read_rest(now)
        self._judging.judge()
        self._line.tell(Kind.SETTLE)


@dataclass(frozen=True, slots=True)
class _Standing:
    watch: str
    refused: str = ""
    layer: bool = False
    part: bool = False


def _stand_apart(config: dict[str, Any]) -> _Standing:
    """Where the mount covers the source, go where it does not: where the first companion went, or else anywhere."""
    if config["mountpoint"] != config["source"]:
        return _Standing("")
    try:
        for descriptor in config["namespaces"] or _new_namespaces():
            syscalls.enter_namespace(descriptor)
    except OSError as error:
        return _Standing(
            "",
            f"mounting over the source itself needs a mount namespace for what works beside the mount, and there is no "
            f"right to one ({error.strerror}); mount on another directory, or as root",
        )
    return _Standing("", layer=True)


def _drop_copies() -> None:
    """Detach the copies that the new namespace has of other mounts: each would keep its server from ending."""
    if os.geteuid() == 0:  # the kernel locks them in the namespace of an ordinary user
        for mount in mounts.bonobofs_mounts():
            with suppress(OSError, MountError):
                mounts.detach(mount.mountpoint, lazy=True)


def _new_namespaces() -> list[int]:
    """Make the namespaces in a child process, and return their descriptors in the order of entry. OSError.

    The kernel lets an ordinary user write the uid map of a traceable process only. The companion must never be
    traceable, so a child without the channel to the server is.
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
                _drop_copies()
                socket.send_fds(theirs, [b"\0"], _namespaces())
                status = 0
            except OSError as error:
                status = error.errno or errno.EIO
            finally:
                os._exit(status)
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 2)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        raise OSError(status, os.strerror(status))
    return descriptors


def _namespaces() -> list[int]:
    """Those in which this process stands, by descriptors, in the order in which they can be entered."""
    names = ("mnt",) if os.geteuid() == 0 else ("user", "mnt")
    return [os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names]


def _go_to_source(config: dict[str, Any], standing: _Standing) -> None:
    # Apart, the path leads to the source; elsewhere a mount may lie on the way by now.
    if standing.layer:
        os.chdir(config["source"])
        if not os.path.samestat(os.stat("."), os.fstat(config["root"])):
            raise OSError(errno.ESTALE, f"the source {config['source']} was replaced")
    else:
        os.fchdir(config["root"])


def _stand(line: Line, standing: _Standing) -> None:
    descriptors = _namespaces() if standing.layer else []
    if descriptors:
        line.hand_over(Kind.STANDING, asdict(standing), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    else:
        line.tell(Kind.STANDING, asdict(standing))


def _first(line: Line) -> tuple[dict[str, Any], list[tuple[Kind, bytes]]]:
    """The configuration, which is the first that the server says, and what it has said since."""
    poll = select.poll()
    poll.register(line.fileno(), select.POLLIN)
    messages: list[tuple[Kind, bytes]] = []
    while not messages:
        poll.poll()
        messages = line.receive()
    config: dict[str, Any] = json.loads(messages[0][1])
    return config, messages[1:]


def main(channel: int) -> int:
    """Serve beside the server at the other end of the socket `channel` until the server ends; the exit code.

    The server has forked this process, so the kernel has never allowed another process of the user to trace it.
    """
    syscalls.die_with_parent()
    line = Line(socket.socket(fileno=channel), waits=True)
    os.umask(0o077)
    try:
        config, more = _first(line)
    except EOFError:
        return 0
    standing = _stand_apart(config)
    leases = Leases(line, config)
    watching: Watching | None = None
    if not standing.refused:
        try:
            _go_to_source(config, standing)
            watching = Watching(line)
            standing = replace(standing, watch=watching.reason, part=watching.is_partial)
        except OSError as error:
            standing = replace(standing, watch=str(error))
    if standing.refused:
        line.tell(Kind.STANDING, asdict(standing))
        return 0
    companion = Companion(line, config, watching, leases)
    os.umask(config["umask"])
    _stand(line, standing)
    companion.run(more)
    companion.end()
    leases.end()
    return 0
