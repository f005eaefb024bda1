"""Supervise the git worker of a session: start it for the first publication, reuse it, and kill it if it hangs.

The worker judges. Its supervisor, the companion or the operator's `undo`, relays its requests to the enforcer, and
sends it the policy and leases.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple, Protocol

from bonobofs.enforcement.authorizer import Admission, Caller
from bonobofs.errors import BonobofsError, GitError, TrailError
from bonobofs.git.source_refs import PublishedBranches, find_git_dirs, read_head
from bonobofs.ipc.codec import decode_denied, decode_request, encode_decision, encode_denied
from bonobofs.policy.decision import Denied, Refused
from bonobofs.policy.request import Principal, Request
from bonobofs.state.home import read_document, session_directory, write_document

SECONDS: Final = 330.0
"""Timeout of one call of the worker. The worker's own timeouts are shorter."""
_START_SECONDS: Final = 120.0
"""Timeout of the start of a worker, which recovers what a killed worker left."""
_RUN: Final = (
    "import sys; sys.path[:0] = sys.argv[2:3]; sys.path += sys.argv[3:]; "
    "from bonobofs.git.worker import main; sys.exit(main(int(sys.argv[1])))"
)
_ROOT: Final = str(Path(__file__).resolve().parent.parent.parent)
_FILE: Final = "git-worker.json"


class WorkerAuthorizer(Protocol):
    """The enforcer, as the supervisor calls it for the worker: a `RemoteAuthorizer`, or that of the operator."""

    @property
    def agent(self) -> Principal: ...
    @property
    def plain_policy(self) -> dict[str, Any]: ...
    def generation(self) -> dict[str, Any]: ...
    def authorize_judged(self, request: Request, document: dict[str, Any]) -> Admission | None: ...
    def deny(self, denied: Denied, caller: Caller, *, guard: str) -> Refused: ...
    def event(self, operation: str, details: dict[str, Any]) -> object: ...


class WorkerSession(NamedTuple):
    """What a worker needs of its session."""

    home: Path
    session: str
    source: str
    issue: str | None
    guard: WorkerAuthorizer
    note_index: Callable[[], object] = lambda: None
    """Called when the worker may have written the index of the source."""
    leases: Callable[[], list[dict[str, Any]]] = list
    access_path: Path = Path()
    """The path by which to open the source."""
    is_operator: bool = False
    """No rule refuses the operator's calls."""


class GitWorker:
    """The worker process and the handling of its requests. Thread-safe; a lock serializes the calls."""

    def __init__(self, session: WorkerSession) -> None:
        """Call `recover` to clean up after an earlier supervisor."""
        self._session: Final = session
        self._source: Final = session.access_path
        self._authorizer: Final = session.guard
        self._file: Final = session_directory(session.home, session.session) / _FILE
        self._turn: Final = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket | None = None
        self._received = b""
        self._open: dict[int, Admission] = {}
        kept = read_document(self._file) if self._file.exists() else {}
        self._directory: str = kept.get("directory", "")
        self._left: Final[dict[str, str]] = {}
        """{worker directory of an ended session: UUID of its agent}"""
        self._head: str = kept.get("head") or _read_head(self._source)

    def recover(self) -> None:
        """Clean up in the source after killed workers of this session or of ended ones. Ignores errors."""
        with self._turn, suppress(OSError, BonobofsError, EOFError):
            sessions = import_module("bonobofs.state.sessions")
            own = self._session
            for one in sessions.load_all(self._session.home):
                file = session_directory(self._session.home, one.session) / _FILE
                if (
                    one.source == own.source
                    and one.session != own.session
                    and file.exists()
                    and not sessions.lives(one)
                ):
                    self._left[read_document(file)["directory"]] = one.agent_id
            if any(_is_begun(directory) for directory in (self._directory, *self._left)):
                self._start()

    def close(self) -> None:
        """End the worker after its current call. Remove its directory, unless its recovery has failed."""
        with self._turn:
            self._stop()
            if self._directory and not _is_begun(self._directory):
                shutil.rmtree(self._directory, ignore_errors=True)

    def call(
        self, do: str, descriptors: Sequence[int] = (), limit: float = SECONDS, **arguments: Any
    ) -> dict[str, Any]:
        """Send the request `do` to the worker. Return its answer within `limit` seconds. Raises OSError, GitError."""
        with self._turn:
            if do == "head" or "head" in arguments:
                arguments |= {"expected": self._head, "shared": self._is_shared()}
            try:
                answer = self._call({"do": do, "state": self._state(), **arguments}, descriptors, limit)
            except (EOFError, ConnectionError, TimeoutError) as error:
                moved, result = self._abandon()
                # After `worker` another call of `take_back` completes it.
                kind = "slow" if isinstance(error, TimeoutError) and not moved else "worker"
                raise GitError(f"the publication was broken off ({error}); {result}", kind=kind) from error
            if "head" in answer:
                self._head = answer.pop("head")
                self._store_state()
            self._session.note_index()
            return answer

    def _call(self, document: dict[str, Any], descriptors: Sequence[int], limit: float) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._send(document, descriptors)
        deadline = monotonic() + limit
        while True:
            message = self._receive(deadline)
            if "done" in message:
                done: dict[str, Any] = message["done"]
                return done
            try:
                answer = self._answer(message.pop("ask"), message)
            except (BonobofsError, OSError) as error:
                answer = {"failed": str(error)}
            self._send(answer)

    # -- requests of the worker

    def _answer(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name == "admit":
            return self._admit(arguments)
        if name == "ended":
            admission = self._open.pop(arguments["number"])
            admission.reason, admission.details = arguments["reason"], arguments["details"]
            with suppress(OSError):  # the outcome is recorded; only the mount may show the change later
                admission.end(arguments["error"])
        elif name == "refuse":
            self._authorizer.deny(decode_denied(arguments), Caller(*arguments["caller"]), guard=arguments["guard"])
        elif name == "find":
            agent, tip = self._published().find(arguments["ref"])
            return {"agent": agent, "tip": tip}
        elif name == "note":
            publisher = arguments["publisher"]
            self._published(publisher or "").note(arguments["ref"], "" if publisher == "" else arguments["tip"])
        return {}

    def _admit(self, arguments: dict[str, Any]) -> dict[str, Any]:
        request, _ = decode_request(list(arguments["question"]))
        try:
            admission = self._authorizer.authorize_judged(request, {**arguments, "related": []})
        except Refused as refused:
            return encode_denied(refused.decision)
        if admission is None:
            return {"state": self._state()}
        self._open[admission.seq] = admission
        return {**encode_decision(admission.permit), "number": admission.seq}

    def _state(self) -> dict[str, Any]:
        """Return the server's policy, leases and answers. A concurrent change also changes the generation."""
        state = self._authorizer.generation()
        known = self._session.leases()
        leases = {"none": None, "known": known, "unknown": "unknown"}[state["leases"]]
        kept = session_directory(self._session.home, self._session.session) / "tracked.json"
        tracked = read_document(kept)["paths"] if kept.exists() else []
        policy = self._authorizer.plain_policy
        return {**state, "policy": policy, "leases": leases, "tracked": tracked}

    def _published(self, agent_id: str = "") -> PublishedBranches:
        return PublishedBranches(
            self._session.home, find_git_dirs(self._source).common, agent_id or self._authorizer.agent.id
        )

    def _is_shared(self) -> bool:
        """True if another live session has a mount of the same source."""
        sessions = import_module("bonobofs.state.sessions")
        own = self._session
        return any(
            one.source == own.source and one.session != own.session and one.mountpoint and sessions.lives(one)
            for one in sessions.load_all(self._session.home)
        )

    # -- the process

    def _start(self) -> list[str]:
        """Start a worker, which recovers what an earlier one left. Return the refs that the earlier one had moved."""
        self._stop()
        owner = _owner(self._source)
        if not self._directory or not os.path.isdir(self._directory):
            above = None if owner else session_directory(self._session.home, self._session.session)
            self._directory = tempfile.mkdtemp(prefix="bonobofs-git-", dir=above)
            if owner:
                os.chown(self._directory, *owner)
            self._store_state()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            packages = [package for package in sys.path if package.startswith("/") and package != _ROOT]
            command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _RUN, str(theirs.fileno()), _ROOT, *packages]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
                cwd=self._source,
                start_new_session=True,
            )
        self._end, self._received = ours, b""
        agent = list(self._authorizer.agent)
        issue = self._session.issue
        leftovers = [directory for directory in self._left if os.path.isdir(directory)]
        config = {"agent": agent, "issue": issue, "directory": self._directory, "owner": owner}
        self._send({**config, "leftovers": leftovers, "is_operator": self._session.is_operator})
        recovered = self._receive(monotonic() + _START_SECONDS)
        if "failed" in recovered:
            self._stop()
            raise GitError(recovered["failed"], kind="unreadable")
        for directory, ref, old, new, is_made in recovered["recovered"]:
            if is_made:
                self._published(self._left.get(directory, self._authorizer.agent.id)).note(ref, new)
            with suppress(TrailError):
                self._authorizer.event(
                    "publish", {"ref": ref, "old": old, "new": new, "recovered": True, "made": is_made}
                )
        self._left.clear()
        return [ref for _, ref, _, _, is_made in recovered["recovered"] if is_made]

    def _stop(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None
        if self._process is not None:
            try:
                self._process.wait(1)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None

    def _abandon(self) -> tuple[list[str], str]:
        """Kill a worker that hangs or is dead, and clean up after it. Return the refs that it has moved, and a message.

        If it has moved none, its open changes are recorded as unknown.
        """
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._stop()
        moved: list[str] = []
        try:
            moved = self._start()
            result = f"{', '.join(moved)} had moved" if moved else "no branch had moved; try again"
        except (OSError, GitError, EOFError) as error:
            self._stop()  # the next call starts another worker
            result = f"its recovery failed: {error}"
        for admission in self._open.values():
            admission.details = {"end": "recovered" if moved else "unknown"}
            with suppress(OSError):
                admission.end(0 if moved else errno.EOWNERDEAD)
        self._open.clear()
        return moved, result

    def _store_state(self) -> None:
        """Store the worker directory and the last HEAD for the next companion."""
        write_document(self._file, {"directory": self._directory, "head": self._head})

    def _send(self, document: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        assert self._end is not None
        data = json.dumps(document).encode() + b"\n"
        if descriptors:
            sent = socket.send_fds(self._end, [data], list(descriptors))
            data = data[sent:]
        self._end.sendall(data)

    def _receive(self, deadline: float) -> dict[str, Any]:
        assert self._end is not None
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, deadline - monotonic()) * 1000):
                raise TimeoutError("it took too long")
            data = self._end.recv(1 << 16)
            if not data:
                raise EOFError("the process ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        document: dict[str, Any] = json.loads(line)
        return document


def _is_begun(directory: str) -> bool:
    """True if the journal in a worker's directory has an unfinished publication."""
    journal = Path(directory, "journal.json")
    return bool(directory) and journal.exists() and journal.stat().st_size > 0


def _owner(source: Path) -> tuple[int, int] | None:
    """Return uid and gid that the worker must switch to: of the owner of the source's repository, if we are root."""
    if os.geteuid() != 0:
        return None
    st = (source / ".git").stat()
    if st.st_uid == 0:
        return None
    with suppress(KeyError):
        return st.st_uid, pwd.getpwuid(st.st_uid).pw_gid
    return st.st_uid, st.st_gid


def _read_head(source: Path) -> str:
    """Return HEAD of the source, or "" if the source is not the root of a work tree."""
    with suppress(OSError, GitError):
        return read_head(find_git_dirs(source).private)
    return ""
