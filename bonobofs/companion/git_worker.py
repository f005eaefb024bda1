"""The git worker of a session: started for the first publication, kept for the next, ended when it hangs.

The worker judges; this relays its questions to the door, with the policy and leases by which the server judges.
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
from typing import Any, Final

from bonobofs.companion.remote_authorizer import RemoteAuthorizer
from bonobofs.companion.session_context import SessionContext
from bonobofs.enforcement.authorizer import Admission, Caller
from bonobofs.errors import BonobofsError, GitError, TrailError, UsageError
from bonobofs.ipc.codec import decode_denied, decode_request, encode_decision, encode_denied
from bonobofs.policy.decision import Refused
from bonobofs.state.home import read_document, session_directory, write_document

SECONDS: Final = 330.0
"""For one call of the worker; its own limits are shorter."""
_RUN: Final = (
    "import sys; sys.path[:0] = sys.argv[2:3]; sys.path += sys.argv[3:]; "
    "from bonobofs.git.worker import main; sys.exit(main(int(sys.argv[1])))"
)
_ROOT: Final = str(Path(__file__).resolve().parent.parent.parent)
_FILE: Final = "git-worker.json"


class GitWorker:
    """The worker, and what it asks. Used by the threads that answer calls, one call at a time."""

    def __init__(self, session: SessionContext, leases: Callable[[], list[dict[str, Any]]]) -> None:
        """The working directory is the source. What an earlier companion left is removed by `recover`."""
        self._session: Final = session
        self._authorizer: Final[RemoteAuthorizer] = session.guard
        self._leases: Final = leases
        self._file: Final = session_directory(session.home, session.who.session) / _FILE
        self._turn: Final = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket | None = None
        self._received = b""
        self._open: dict[int, Admission] = {}
        kept = read_document(self._file) if self._file.exists() else {}
        self._directory: str = kept.get("directory", "")
        self._left: Final[dict[str, str]] = {}
        """By the directory of a worker of a session that is over, the UUID of its agent."""
        self._head: str = kept.get("head") or _read_head()

    def recover(self) -> None:
        """Remove what a killed worker left in the source, of this session or of one that is over. Never raises."""
        with self._turn, suppress(OSError, BonobofsError, EOFError):
            sessions = import_module("bonobofs.state.sessions")
            own = self._session.who
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
        """End the worker once its call is over, and remove its directory."""
        with self._turn:
            self._stop()
            if self._directory:
                shutil.rmtree(self._directory, ignore_errors=True)

    def call(self, do: str, descriptors: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """Have the worker do something, and return its answer. OSError, GitError: it failed, or took too long."""
        with self._turn:
            if do == "head" or "head" in arguments:
                arguments |= {"expected": self._head, "shared": self._is_shared()}
            try:
                answer = self._call({"do": do, "state": self._state(), **arguments}, descriptors)
            except (EOFError, BrokenPipeError, ConnectionResetError, TimeoutError) as error:
                self._abandon()
                raise GitError(f"the publication was broken off; try again: {error}", kind="worker") from error
            if "head" in answer:
                self._head = answer.pop("head")
                self._keep()
            self._session.note_index()
            return answer

    def _call(self, document: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._send(document, descriptors)
        deadline = monotonic() + SECONDS
        while True:
            asked = self._receive(deadline)
            if "done" in asked:
                done: dict[str, Any] = asked["done"]
                return done
            self._send(self._answer(asked.pop("ask"), asked))

    # -- what the worker asks

    def _answer(self, what: str, asked: dict[str, Any]) -> dict[str, Any]:
        if what == "admit":
            return self._admit(asked)
        if what == "ended":
            admission = self._open.pop(asked["number"])
            admission.reason, admission.details = asked["reason"], asked["details"]
            with suppress(OSError):  # it is recorded; that the mount may not show it yet changes nothing for git
                admission.end(asked["error"])
        elif what == "refuse":
            self._authorizer.deny(decode_denied(asked), Caller(*asked["caller"]), guard=asked["guard"])
        elif what == "find":
            agent, tip = self._published().find(asked["ref"])
            return {"agent": agent, "tip": tip}
        elif what == "note":
            self._published().note(asked["ref"], asked["tip"])
        return {}

    def _admit(self, asked: dict[str, Any]) -> dict[str, Any]:
        request, _ = decode_request(list(asked["question"]))
        try:
            admission = self._authorizer.authorize_judged(request, {**asked, "related": []})
        except Refused as refused:
            return encode_denied(refused.decision)
        if admission is None:
            return {"state": self._state()}
        self._open[admission.seq] = admission
        return {**encode_decision(admission.permit), "number": admission.seq}

    def _state(self) -> dict[str, Any]:
        """The policy and leases by which the server judges. What changes meanwhile changes the generation, too."""
        state = self._authorizer.generation()
        known = self._leases()
        leases = {"none": None, "known": known, "unknown": "unknown"}[state["leases"]]
        kept = session_directory(self._session.home, self._session.who.session) / "tracked.json"
        tracked = read_document(kept)["paths"] if kept.exists() else []
        policy = self._authorizer.plain_policy
        return {"generation": state["generation"], "policy": policy, "leases": leases, "tracked": tracked}

    def _published(self, agent_id: str = "") -> Any:
        module = import_module("bonobofs.git.published_branches")
        return module.PublishedBranches(self._session.home, _common_dir(), agent_id or self._authorizer.agent.id)

    def _is_shared(self) -> bool:
        """Whether another session that lives has the same source."""
        sessions = import_module("bonobofs.state.sessions")
        own = self._session.who
        return any(
            one.source == own.source and one.session != own.session and one.mountpoint and sessions.lives(one)
            for one in sessions.load_all(self._session.home)
        )

    # -- the process

    def _start(self) -> None:
        self._stop()
        owner = _owner()
        if not self._directory or not os.path.isdir(self._directory):
            above = None if owner else session_directory(self._session.home, self._session.who.session)
            self._directory = tempfile.mkdtemp(prefix="bonobofs-git-", dir=above)
            if owner:
                os.chown(self._directory, *owner)
            self._keep()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            packages = [place for place in sys.path if place.startswith("/") and place != _ROOT]
            command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _RUN, str(theirs.fileno()), _ROOT, *packages]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        self._end, self._received = ours, b""
        agent = list(self._authorizer.agent)
        issue = self._session.who.issue
        left = [directory for directory in self._left if os.path.isdir(directory)]
        self._send({"agent": agent, "issue": issue, "directory": self._directory, "owner": owner, "left": left})
        standing = self._receive(monotonic() + SECONDS)
        if "failed" in standing:
            self._stop()
            raise GitError(standing["failed"], kind="unreadable")
        for directory, ref, old, new, is_made in standing["standing"]:
            if is_made:
                self._published(self._left.get(directory, self._authorizer.agent.id)).note(ref, new)
            with suppress(TrailError):
                self._authorizer.event(
                    "publish", {"ref": ref, "old": old, "new": new, "recovered": True, "made": is_made}
                )
        self._left.clear()

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

    def _abandon(self) -> None:
        """The worker hangs or is dead: end it, remove what it left, and enter how its changes ended."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._stop()
        with suppress(OSError, GitError, EOFError):
            self._start()
        for admission in self._open.values():
            admission.details = {"end": "unknown"}
            with suppress(OSError):
                admission.end(errno.EOWNERDEAD)
        self._open.clear()

    def _keep(self) -> None:
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
    """Whether the journal in the directory of a worker tells of a publication that has not ended."""
    journal = Path(directory, "journal.json")
    return bool(directory) and journal.exists() and journal.stat().st_size > 0


def _owner() -> tuple[int, int] | None:
    """Uid and gid of the owner of the source's repository, if the worker must become that user."""
    if os.geteuid() != 0:
        return None
    st = os.stat(".git")
    if st.st_uid == 0:
        return None
    with suppress(KeyError):
        return st.st_uid, pwd.getpwuid(st.st_uid).pw_gid
    return st.st_uid, st.st_gid


def _git_dir() -> Path:
    place = Path(".git")
    if place.is_dir():
        return place
    return Path(place.read_text(encoding="utf-8", errors="surrogateescape").removeprefix("gitdir: ").rstrip("\n"))


def _common_dir() -> Path:
    git_dir = _git_dir()
    with suppress(FileNotFoundError):
        text = (git_dir / "commondir").read_text(encoding="utf-8", errors="surrogateescape")
        return git_dir / text.strip()
    return git_dir


def _read_head() -> str:
    """HEAD of the source; "" if it is not the root of a work tree."""
    with suppress(OSError):
        return (_git_dir() / "HEAD").read_text(encoding="utf-8", errors="surrogateescape").strip()
    return ""


def _receive(session: SessionContext, arguments: dict[str, Any]) -> Any:
    return session.git_worker.call("receive", _given(arguments))


def _upload(session: SessionContext, arguments: dict[str, Any]) -> Any:
    return session.git_worker.call("upload", _given(arguments))


def _publish(session: SessionContext, arguments: dict[str, Any]) -> Any:
    descriptors = _given(arguments, "head")
    head = _text(arguments, "head")
    if head.startswith("ref: refs/heads/"):
        return session.git_worker.call("receive", descriptors, head=head, ref=head.removeprefix("ref: "))
    return session.git_worker.call("head", head=head)


def _head(session: SessionContext, arguments: dict[str, Any]) -> Any:
    """`check`: only ask whether HEAD could be moved so."""
    _given(arguments, "head", "check")
    return session.git_worker.call("head", head=_text(arguments, "head"), check=bool(arguments.get("check")))


def _given(arguments: dict[str, Any], *names: str) -> Sequence[int]:
    descriptors: Sequence[int] = arguments.pop("descriptors", ())
    unknown = arguments.keys() - set(names)
    if unknown:
        raise UsageError(f"the call takes no {', '.join(sorted(unknown))}")
    return descriptors


def _text(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or "\n" in value or "\0" in value:
        raise UsageError(f"the call needs {name}, a text of one line")
    return value


PUBLISHING_CALLS: Final[dict[str, Callable[[SessionContext, dict[str, Any]], Any]]] = {
    "git.receive-pack": _receive,
    "git.upload-pack": _upload,
    "git.publish": _publish,
    "git.head": _head,
}
WITH_DESCRIPTORS: Final = ("git.receive-pack", "git.upload-pack", "git.publish", "git.preflight")
