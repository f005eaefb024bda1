"""The git worker process, which receives, judges and publishes. `main` takes the descriptor of its channel.

The worker runs as the owner of the source's repository, with an empty environment, and ends when its companion does.
It serves one request at a time, a line of JSON with descriptors, and calls the enforcer over the same channel.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Unpack

import pygit2

from bonobofs.audit.entry import TOUCHES
from bonobofs.enforcement.authorizer import (
    NO_CALLER,
    Admission,
    Caller,
    CallRecord,
    ChangeRecord,
    Outcome,
    RelatedChange,
)
from bonobofs.errors import BonobofsError, GitError
from bonobofs.git import branch_rules
from bonobofs.git.branch_rules import RuleRefusal, UpdateKind, identity, rules_of
from bonobofs.git.journal import HEAD, JOURNAL, Journal, Leftover, recover
from bonobofs.git.publication import GUARD, MOST_UPDATES, PUSH, IncompleteError, Published, Publisher, RefUpdate
from bonobofs.git.published_files import prepare
from bonobofs.git.repository import GitRepository, TreeDifference
from bonobofs.git.shared_head import HeadReplacement, IndexConflictError, IndexReplacement, finish_index, finish_moves
from bonobofs.git.source_refs import BRANCHES, ENVIRONMENT, find_git_dirs, read_head
from bonobofs.ipc.codec import decode_decision, encode_denied, encode_request
from bonobofs.policy.answers import compile_answers
from bonobofs.policy.compiled import Tracked
from bonobofs.policy.decision import Denied, Permit, Refused, as_document
from bonobofs.policy.engine import Policy, compile_policy, decide_in_source
from bonobofs.policy.lease_set import UNKNOWN, compile_leases
from bonobofs.policy.request import NO_FACTS, Context, Operation, Principal, Request, WorkspacePath
from bonobofs.system.terminal import printable

MOST_ADVERTISED: Final = 2000
"""Number of source branches that a push sees. A push to any other existing branch is refused as moved."""
SECONDS: Final = 300.0
"""Timeout of one push."""
_MOST_BYTES: Final = 4 << 30
_MOST_MEMORY: Final = 4 << 30
_LONGEST_REQUEST: Final = 1 << 20
_LONGEST_FAILURE: Final = 500
_TRIES: Final = 50
_BETWEEN: Final = 0.1
"""Seconds between retries to lock a journal."""
_SWITCH: Final = Caller("git checkout")
_UNDO: Final = Caller("undo")
_NICE: Final = 5
_HOOK: Final = """\
#!/bin/sh
{
    printf '%s\\n' "$GIT_QUARANTINE_PATH"
    while IFS= read -r line; do printf '%s\\n' "$line"; done
    echo .
} >request
while IFS= read -r line; do
    case $line in
    ok) exit 0 ;;
    no) exit 1 ;;
    *) printf '%s\\n' "$line" >&2 ;;
    esac
done <answer
exit 1
"""
_CONFIG: Final = """\
[core]
    repositoryformatversion = 0
    bare = true
    alternateRefsCommand = true
    bigFileThreshold = 16m
    fsync = none
[receive]
    fsckObjects = true
    unpackLimit = 100
    maxInputSize = {most}
    denyCurrentBranch = ignore
    autogc = false
    shallowUpdate = false
[uploadpack]
    allowAnySHA1InWant = false
[gc]
    auto = 0
"""


class WorkerChannel:
    """JSON lines with descriptors, to and from the companion."""

    def __init__(self, end: socket.socket) -> None:
        self._end: Final = end
        self._received = b""
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, document: dict[str, Any]) -> None:
        """Send one line. Raises EOFError if the companion is gone."""
        try:
            self._end.sendall(json.dumps(document).encode() + b"\n")
        except ConnectionError as error:
            raise EOFError from error

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Return the next line and its descriptors. Raises EOFError if the companion is gone."""
        while b"\n" not in self._received:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._end, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
            except ConnectionError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._received += data
            self._descriptors += descriptors
        line, _, self._received = self._received.partition(b"\n")
        descriptors, self._descriptors = self._descriptors, []
        return json.loads(line), descriptors

    def ask(self, kind: str, **document: Any) -> dict[str, Any]:
        """Return the companion's answer. Raises GitError if the request failed, EOFError if the companion is gone."""
        self.send({"ask": kind, **document})
        answer = self.receive()[0]
        if "failed" in answer:
            raise GitError(answer["failed"], kind="companion")
        return answer


class JudgingAuthorizer:
    """`Authorizer` that decides here by the companion's policy and leases. The server records each decision.

    The server compares the generation of policy and leases with its own. If they differ, the request is judged again.
    """

    def __init__(self, channel: WorkerChannel, agent: Principal) -> None:
        self.agent: Final = agent
        self._channel: Final = channel
        self._plain: dict[str, Any] = {}
        self._generation: Any = None
        self.policy: Policy = compile_policy({})
        self.records = True
        """Whether denials are recorded: not those of a check."""

    def follow(self, state: dict[str, Any]) -> None:
        """Replace the state for decisions: {"policy", "tracked", "leases", "answers", "generation"}."""
        self._generation = state.pop("generation")
        if state != self._plain:
            self._plain = state
            policy = compile_policy(state["policy"]).with_tracked(
                Tracked(state["tracked"]) if state["tracked"] else None
            )
            leases = state["leases"]
            known = None if leases is None else compile_leases(leases) if isinstance(leases, list) else UNKNOWN
            self.policy = policy.bound_by(known).with_answers(compile_answers(*state["answers"]))

    def decide(self, request: Request, context: Context = NO_FACTS) -> Permit | Denied:
        """As `Authorizer.decide`."""
        return decide_in_source(self.policy, self.agent, request, context)

    def authorize(
        self, request: Request, context: Context = NO_FACTS, *related: RelatedChange, **record: Unpack[ChangeRecord]
    ) -> Admission:
        """As `Authorizer.authorize`."""
        guard = record.get("guard", "file")
        while True:
            answers = set()
            for part in (RelatedChange(request, context), *related):
                decision = self.decide(part.request, part.context)
                if isinstance(decision, Denied):
                    raise self.deny(decision, record.get("caller", NO_CALLER), guard=guard)
                answers.add(decision.answer)
            judged = {"generation": self._generation, "answers": sorted(answers - {0})}
            answer = self._channel.ask("admit", question=encode_request(request, context), **judged, **record)
            if "state" not in answer:
                break
            self.follow(answer["state"])
        permit = decode_decision(answer)
        if isinstance(permit, Denied):
            raise Refused(permit)
        return Admission(self._ended, request, permit, answer["number"], record.get("action", ""), guard)

    def record_call(self, request: Request, context: Context = NO_FACTS, /, **record: Unpack[CallRecord]) -> None:
        """Not supported: publication has no read-only calls."""
        raise NotImplementedError

    def deny(self, denied: Denied, caller: Caller = NO_CALLER, *, guard: str = "file") -> Refused:
        """As `Authorizer.deny`."""
        if self.records:
            self._channel.ask("refuse", **encode_denied(denied), caller=list(caller), guard=guard)
        return Refused(denied)

    def _ended(self, outcome: Outcome) -> None:
        error, reason, details = outcome.error, outcome.reason, outcome.details
        self._channel.ask("ended", number=outcome.seq, error=error, reason=reason, details=details)


class _RemoteBranches:
    """`Branches` of the companion, over the channel."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel: Final = channel
        self.publishers: dict[str, str] = {}
        """Agents that published the tips to which branches are taken back; "": unknown. Others: the session's agent."""

    def find(self, ref: str) -> tuple[str, str]:
        answer = self._channel.ask("find", ref=ref)
        return answer["agent"], answer["tip"]

    def note(self, ref: str, tip: str) -> None:
        self._channel.ask("note", ref=ref, tip=tip, publisher=self.publishers.get(ref))


class Worker:
    """Serves one session. The working directory must be the root of the source."""

    def __init__(self, channel: WorkerChannel, config: dict[str, Any]) -> None:
        """`config`: {"agent", "issue", "directory", "leftovers", "is_operator"}.

        `directory` belongs to this worker. `leftovers` lists directories of dead workers of this source. The worker
        recovers and removes them. Raises GitError, OSError.
        """
        self._channel: Final = channel
        self._issue: Final[str | None] = config["issue"]
        self._is_operator: Final[bool] = config["is_operator"]
        self._directory: Final = Path(config["directory"])
        self._git_dir, self._common = find_git_dirs(Path.cwd())
        self._authorizer: Final = JudgingAuthorizer(channel, Principal(*config["agent"]))
        self._branches: Final = _RemoteBranches(channel)
        directories = [self._directory, *map(Path, config["leftovers"])]
        own = identity(self._authorizer.agent, rules_of({}))
        found = [(str(each), finish_moves(_patiently(recover, each / JOURNAL), own)) for each in directories]
        self._left: Final = [(directory, left) for directory, leftovers in found for left in leftovers]
        self._journal: Final = Journal(self._directory / JOURNAL)
        finish_index([left for _, left in self._left], self._directory, self._journal)
        self._journal.clear()
        for each in directories:
            _release_hooks(each)
        for old in (*self._directory.glob("receive-*"), self._directory / "index", *directories[1:]):
            shutil.rmtree(old, ignore_errors=True)
        self._acts: Final[dict[str, Callable[[dict[str, Any], list[int]], dict[str, Any]]]] = {
            "receive": self._receive,
            "upload": lambda _, descriptors: self._upload(descriptors),
            "head": lambda call, _: self._mirror(call),
            "prepare": self._prepare,
            "take_back": lambda call, _: self._take_back(call),
        }

    def run(self) -> None:
        """Serve requests until the companion is gone. Raises EOFError."""
        self._channel.send({"recovered": [[directory, *left[:4]] for directory, left in self._left]})
        while True:
            call, descriptors = self._channel.receive()
            try:
                self._authorizer.follow(call.pop("state"))
                answer = self._acts[call.pop("do")](call, descriptors)
            except (BonobofsError, OSError) as error:
                answer = _failure(error)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._channel.send({"done": answer})

    def _receive(self, call: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Run receive-pack on the descriptors, judge and publish in its hook, then mirror HEAD."""
        receiving = _Receiving(self._directory, self._common, self._advertised(call.get("ref", "")))
        try:
            answer = self._serve(receiving, descriptors, quiet="ref" in call)
        finally:
            receiving.remove()
        if "head" in call and answer["status"] == 0:
            try:
                answer |= {key: value for key, value in self._mirror(call).items() if value}
            except (BonobofsError, OSError) as error:
                failed = _failure(error, "HEAD of the source is not changed")
                answer |= {**failed, "line": "; ".join(filter(None, (answer["line"], failed["line"])))}
        return answer

    def _serve(self, receiving: _Receiving, descriptors: list[int], *, quiet: bool) -> dict[str, Any]:
        answer: dict[str, Any] = {"status": 0, "line": ""}
        found = None
        with receiving.start("receive-pack", descriptors) as running:
            try:
                found = receiving.wait_for_hook(running, self._channel.fileno())
                if found is not None:
                    answer = self._publish(*found)
                    shown = [] if quiet or not answer["line"] else [f"bonobofs: {answer['line']}"]
                    receiving.answer([*shown, "no" if answer["status"] else "ok"])
                receiving.wait(running, self._channel.fileno())
            except GitError as error:
                if found is None:
                    raise self._refuse(branch_rules.LIMIT, f"{error}.", PUSH) from error
            finally:
                _end(running)
        failure = receiving.failure() if found is None else ""
        if failure:
            raise self._refuse(branch_rules.OBJECT, f"{failure}.", PUSH)
        return answer if found is not None else {**answer, "status": abs(running.returncode)}

    def _publish(self, updates: Sequence[RefUpdate], objects: Path) -> dict[str, Any]:
        try:
            if len(updates) > MOST_UPDATES:
                raise self._refuse(branch_rules.LIMIT, f"More than {MOST_UPDATES} references.", PUSH)
            repository = GitRepository(self._git_dir, [objects])
            follow = partial(self._follow, repository, updates)
            published = self._publisher(repository, objects).publish(updates, issue=self._issue, follow=follow)
        except IncompleteError as error:
            failed = "; ".join(error.failures)
            return {"status": 0, "line": f"{_described(error.published)}, but a later step failed: {failed}"}
        except (BonobofsError, OSError) as error:
            return _failure(error)
        return {"status": 0, "line": _described(published)}

    def _publisher(self, repository: GitRepository, objects: Path) -> Publisher:
        authorizer, branches = self._authorizer, self._branches
        return Publisher(
            authorizer, repository, branches, objects=objects, journal=self._journal, is_operator=self._is_operator
        )

    @contextmanager
    def _follow(
        self, repository: GitRepository, updates: Sequence[RefUpdate], _: Permit
    ) -> Iterator[Callable[[], None]]:
        """Prepare the index of the checkout for a move of its branch."""
        head = read_head(self._git_dir)
        old, new = next((update[1:] for update in updates if head == f"ref: {update.ref}"), ("", ""))
        old, new = ("" if set(oid) == {"0"} else oid for oid in (old, new))
        with self._index(repository.differences(old, new), keep=True) as index:
            index.lock()
            yield index.install

    def _take_back(self, call: dict[str, Any]) -> dict[str, Any]:
        """Move refs back to earlier values, or only judge that with `check`. A killed call may be repeated.

        `updates` lists (ref, value, earlier value), `publishers` has the agents of the earlier values by ref, `details`
        go into the entry. Raises Refused, GitError.
        """
        updates = [RefUpdate(*update) for update in call["updates"]]
        repository = GitRepository(self._git_dir)
        self._authorizer.records = not call["check"]
        self._branches.publishers = call["publishers"]
        try:
            if not call["check"] and all(repository.target(update.ref) == update.new for update in updates):
                for update in updates:
                    self._branches.note(update.ref, update.new)
            elif missing := [update.new for update in updates if update.new and not repository.has(update.new)]:
                raise GitError(f"the repository no longer has {missing[0]}", kind="missing")
            else:
                self._move_back(repository, updates, call)
        finally:
            self._authorizer.records = True
            self._branches.publishers = {}
        return {"status": 0, "line": ""}

    def _move_back(self, repository: GitRepository, updates: Sequence[RefUpdate], call: dict[str, Any]) -> None:
        objects = self._directory / "no-objects"
        objects.mkdir(exist_ok=True)
        publisher = self._publisher(repository, objects)
        if call["check"]:
            publisher.check(updates, _UNDO)
            return
        follow = partial(self._follow, repository, updates)
        publisher.publish(updates, issue=None, details=call["details"], caller=_UNDO, follow=follow)

    def _index(self, changes: Iterable[TreeDifference], *, keep: bool) -> IndexReplacement:
        return IndexReplacement(self._git_dir, self._directory, self._journal.token, changes, keep=keep)

    def _mirror(self, call: dict[str, Any]) -> dict[str, Any]:
        """Set HEAD and index of the source's checkout to the session's HEAD. Raises Refused.

        `head` is the session's HEAD. `expected` is the source's HEAD as this session last saw or set it. `shared` is
        true if another session works on this checkout. `check` only judges.
        """
        head, current = call["head"], read_head(self._git_dir)
        if head == current:
            return {"status": 0, "line": "", "head": head}
        repository = GitRepository(self._git_dir)
        old, new = (self._commit_of(repository, each) for each in (current, head))
        if current != call["expected"] or call["shared"]:
            raise self._refuse(branch_rules.SHARED, f"HEAD of the source: {current}.", _SWITCH)
        is_branch = head.startswith(f"ref: {BRANCHES}") and pygit2.reference_is_valid_name(head[5:])
        is_missing = not new and (bool(old) or not is_branch)
        check = call.get("check")  # the command that follows may publish the commit of the new HEAD
        if (head.startswith("ref: ") and not is_branch) or (is_missing and not check):
            raise self._refuse(branch_rules.UNPUBLISHED, f"HEAD: {head}.", _SWITCH)
        details = {"from": current, "to": head, "commit": new, TOUCHES: [".git/"]}
        request = Request(Operation.CHECKOUT_BRANCH, WorkspacePath(""))
        person = identity(self._authorizer.agent, rules_of(self._authorizer.policy.document))
        with (
            self._journal.writing(self._git_dir, self._common, [(HEAD, current, head)]) as token,
            self._demanded_index(repository, old, new or old) as index,
        ):
            if check:
                return {"status": 0, "line": ""}
            index.lock()
            with (
                self._authorizer.authorize(request, caller=_SWITCH, details=details, guard=GUARD),
                HeadReplacement(self._git_dir, token, (current, head), (old, new), person) as new_head,
            ):
                new_head.lock()
                index.install()
                new_head.install()
        return {"status": 0, "line": "", "head": head}

    @contextmanager
    def _demanded_index(self, repository: GitRepository, old: str, new: str) -> Iterator[IndexReplacement]:
        try:
            with self._index(repository.differences(old, new), keep=False) as index:
                yield index
        except IndexConflictError as error:
            raise self._refuse(branch_rules.INDEX_CHANGED, f"{error}.", _SWITCH) from error

    def _commit_of(self, repository: GitRepository, head: str) -> str:
        """Return the commit of a HEAD value, or "" if the source does not have it."""
        oid = repository.target(head[5:]) if head.startswith("ref: ") else head
        return oid if oid and repository.commit(oid) is not None else ""

    def _refuse(self, refusal: RuleRefusal, about: str, caller: Caller) -> Refused:
        operation = Operation.PUBLISH if caller is PUSH else Operation.CHECKOUT_BRANCH
        return self._authorizer.deny(refusal.of(operation, about=about), caller, guard=GUARD)

    def _upload(self, descriptors: list[int]) -> dict[str, Any]:
        receiving = _Receiving(self._directory, self._common, self._advertised(""))
        try:
            with receiving.start("upload-pack", descriptors) as running:
                try:
                    receiving.wait(running, self._channel.fileno())
                finally:
                    _end(running)
        finally:
            receiving.remove()
        return {"status": running.returncode}

    def _prepare(self, call: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        rules = rules_of(self._authorizer.policy.document)
        return prepare(GitRepository(self._git_dir), rules, descriptors[0], call)

    def _advertised(self, ref: str) -> dict[str, str]:
        """Return {ref: commit} of the protected branches, `ref` and up to MOST_ADVERTISED branches of the source."""
        repository = GitRepository(self._git_dir)
        rules = rules_of(self._authorizer.policy.document)
        names = [BRANCHES + name for name in rules.protected_branches]
        found = {name: repository.target(name) for name in [*names, *filter(None, [ref])] if "*" not in name}
        for each in repository.raw.references.iterator():
            if len(found) >= MOST_ADVERTISED:
                break
            if each.name.startswith(BRANCHES) and not isinstance(each.target, str):
                found[each.name] = str(each.target)
        return {name: oid for name, oid in found.items() if oid and repository.commit(oid) is not None}


class _Receiving:
    """Synthetic git directory for one push or fetch, and the git process in it."""

    def __init__(self, temp_dir: Path, common: Path, refs: dict[str, str]) -> None:
        self._quarantine: Final = Path(tempfile.mkdtemp(prefix="receive-", dir=temp_dir))
        self._make(common, refs)
        self._request = os.open(self._quarantine / "request", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        self._answer = os.open(self._quarantine / "answer", os.O_RDWR | os.O_CLOEXEC)
        self._events: Final = self._quarantine / "events"
        self._deadline = time.monotonic() + SECONDS

    def _make(self, common: Path, refs: dict[str, str]) -> None:
        git_dir = self._quarantine
        for name in ("objects/info", "refs", "hooks"):
            (git_dir / name).mkdir(parents=True)
        source = os.path.realpath(common)
        files = {
            "HEAD": "ref: refs/heads/bonobofs-none\n",
            "config": _CONFIG.format(most=_MOST_BYTES),
            "objects/info/alternates": f"{json.dumps(source + '/objects')}\n",
            "packed-refs": "".join(f"{refs[name]} {name}\n" for name in sorted(refs)),
            "hooks/pre-receive": _HOOK,
        }
        for name, text in files.items():
            (git_dir / name).write_text(text, encoding="utf-8", errors="surrogateescape")
        (git_dir / "hooks/pre-receive").chmod(0o700)
        with suppress(FileNotFoundError):
            shutil.copyfile(common / "shallow", git_dir / "shallow")
        for name in ("request", "answer"):
            os.mkfifo(git_dir / name, 0o600)

    def start(self, program: str, descriptors: list[int]) -> subprocess.Popen[bytes]:
        """Start `git PROGRAM` with one descriptor for both stdin and stdout, or one for each. Raises GitError."""
        if not descriptors:
            raise GitError("the call needs a descriptor", kind="usage")
        running = subprocess.Popen(
            ["git", program, str(self._quarantine)],
            stdin=descriptors[0],
            stdout=descriptors[-1],
            stderr=subprocess.DEVNULL,
            env={**ENVIRONMENT, "GIT_TRACE2_EVENT": str(self._events)},
            start_new_session=True,
        )
        resource.prlimit(running.pid, resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS)))
        return running

    def wait_for_hook(self, running: subprocess.Popen[bytes], line: int) -> tuple[list[RefUpdate], Path] | None:
        """Return the updates and the object directory from the hook, or None if git ended before its hook.

        Raises GitError and EOFError as `wait`, and GitError for too long a request.
        """
        request = b""
        while not request.endswith(b"\n.\n"):
            if self._request not in self._wait(running, line, self._request):
                return None
            request += os.read(self._request, 1 << 16)
            if len(request) > _LONGEST_REQUEST:
                raise GitError(f"a push moves at most {MOST_UPDATES} references", kind="limit")
        path, *lines = request.decode("utf-8", "surrogateescape").removesuffix("\n.\n").split("\n")
        words = (line.split(" ", 2) for line in lines)
        return [RefUpdate(ref, old, new) for old, new, ref in words], Path(path)

    def wait(self, running: subprocess.Popen[bytes], line: int) -> None:
        """Wait for the end of git. Raises EOFError if the companion is gone, GitError after 300 s."""
        self._wait(running, line)
        running.wait()

    def _wait(self, running: subprocess.Popen[bytes], line: int, *inputs: int) -> set[int]:
        """Wait until git ends or an input is readable, and return the readable descriptors."""
        ended = os.pidfd_open(running.pid)
        poll = select.poll()
        for descriptor in (ended, line, *inputs):
            poll.register(descriptor, select.POLLIN)
        try:
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000)}
        finally:
            os.close(ended)
        if line in ready and ended not in ready:
            raise EOFError
        if not ready:
            raise GitError(f"the transfer took more than {SECONDS:.0f} s", kind="limit")
        return ready

    def answer(self, lines: list[str]) -> None:
        """Send the hook its answer. The last line is `ok` or `no`."""
        text = "\n".join(" ".join(line.split("\n")) for line in lines)
        os.write(self._answer, text.encode("utf-8", "surrogateescape") + b"\n")

    def failure(self) -> str:
        """Return why git stored no objects, or "" if no child of it failed."""
        messages, failed = [], False
        with suppress(FileNotFoundError):
            for line in self._events.read_bytes().splitlines():
                event = json.loads(line)
                failed |= event["event"] == "child_exit" and event["code"] != 0
                if event["event"] == "error":
                    messages.append(event["msg"])
        return ": ".join(messages)[:_LONGEST_FAILURE] or "git cannot read the pack" if failed else ""

    def remove(self) -> None:
        os.close(self._request)
        os.close(self._answer)
        shutil.rmtree(self._quarantine, ignore_errors=True)


def _limit() -> None:
    """Limit memory, file size and priority of this process and of its children, which are only parts of git."""
    for kind, most in (
        (resource.RLIMIT_AS, _MOST_MEMORY),
        (resource.RLIMIT_FSIZE, _MOST_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)  # noqa: PLW2901 - within what is allowed
        resource.setrlimit(kind, (most, most))
    os.nice(_NICE)


def _patiently(act: Callable[[Path], list[Leftover]], journal: Path) -> list[Leftover]:
    """Retry for 5 s while another writer holds the journal. Raises BlockingIOError if it does not end."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            return act(journal)
        select.select([], [], [], _BETWEEN)
    return act(journal)


def _release_hooks(directory: Path) -> None:
    """End the hooks that a killed worker left. One that opens a FIFO without a partner waits, and with it the push."""
    for fifo in (*directory.glob("receive-*/request"), *directory.glob("receive-*/answer")):
        with suppress(OSError):
            partner = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            fifo.unlink()  # a hook that comes later finds no FIFO
            os.close(partner)


def _end(running: subprocess.Popen[bytes]) -> None:
    """Kill the process group of the program."""
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def _described(published: Sequence[Published]) -> str:
    lines = []
    for update in published:
        count = len(update.commits)  # of a tag also commits that a branch has published
        words = {UpdateKind.DELETE: "deleted", UpdateKind.TAG: "tag"}
        change = words.get(update.kind, f"{count} commit{'' if count == 1 else 's'}")
        lines.append(f"published {update.ref.split('/', 2)[2]} ({change})")
    return "; ".join(lines)


def _failure(error: Exception, effect: str = "not published") -> dict[str, Any]:
    """Return the answer to the agent for a refusal or a failure."""
    if not isinstance(error, Refused):
        return {"status": 1, "line": printable(f"{effect}: {error}")}
    denied = error.decision
    holder = "" if denied.holding is None else str(denied.holding)
    path = f"{denied.path}:" if denied.path else ""
    question = denied.question and f"The question is {denied.question}."
    text = " ".join(filter(None, (path, denied.reason, denied.about, holder, question, denied.instead)))
    document = as_document(denied, denied.path, denied.operation)
    return {"status": 1, "denied": document, "line": printable(f"{effect}: {denied.rule}. {text}")}


def main(number: int) -> int:
    """Serve on the socket `number` until the companion is gone. Return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = WorkerChannel(socket.socket(fileno=number))
    try:
        config, _ = channel.receive()
        if config["owner"] is not None:
            uid, gid = config["owner"]
            os.setgroups([gid])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            os.umask(0o022)
        _limit()
        try:
            worker = Worker(channel, config)
        except (BonobofsError, OSError) as error:
            channel.send({"failed": str(error)})
            return 1
        worker.run()
    except EOFError:
        return 0
    return 0
