"""`undo`: find the selected changes of a source, plan, and take them back as the operator or as a session's agent."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Unpack

from bonobofs.audit.entry import TAKEN_BACK, TURN, UNDO, AuditEntry
from bonobofs.audit.reader import entries_from
from bonobofs.audit.reader import since as moment_of
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.enforcement.authorizer import Admission, Authorizer, Caller, ChangeRecord, RelatedChange
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import StateError, TrailError, UsageError, reason
from bonobofs.policy.decision import Denied, Permit, Refused
from bonobofs.policy.engine import compile_policy, decide_in_source
from bonobofs.policy.request import NO_FACTS, Context, Principal, Request
from bonobofs.session.change_history import change_document, images_of, session_named, sessions_of
from bonobofs.session.session_list import flush_servers
from bonobofs.session.undo_refs import OperatorAuthorizer, RefsOfSource
from bonobofs.state.home import head_path, trail_path
from bonobofs.state.session_rows import OPERATOR
from bonobofs.state.sessions import Session, lives, note_ends, read_all, save
from bonobofs.system import mounts
from bonobofs.system.locks import locked
from bonobofs.system.processes import start_time
from bonobofs.undo.changes import ID, Change, Selection, all_changes, moment_of_change, parse_id
from bonobofs.undo.difference import FileDifference, differences
from bonobofs.undo.execution import CALLER, Execution, Failure, StepAuthorizer, UndoJournal
from bonobofs.undo.image_expiry import expire, places_of
from bonobofs.undo.images import Image, Images
from bonobofs.undo.path_history import NumberQuery, PathQuery, find_changes
from bonobofs.undo.plan import Plan, Record, plan
from bonobofs.undo.step_replay import Judge
from bonobofs.undo.steps import CHANGING_NAMES, UndoStep

if TYPE_CHECKING:
    from bonobofs.git.git_worker import GitWorker
    from bonobofs.policy.document import UndoTable

_MOST_NAMES: Final = 10_000
"""Number of changes in one entry."""
_MOST_PATHS: Final = 20_000
"""Number of paths of one search: SQLite has a limit of parameters."""
_ALLOW_ALL: Final = {
    "default": "allow",
    "hidden": ["**"],
    "symlinks": "any",
    "devices": True,
    "git": {"protected_branches": [], "message_pattern": ""},
}


class AgentAuthorizer(Authorizer, Protocol):
    """The authorizer of a session whose agent takes back its changes (`companion.RemoteAuthorizer`)."""

    plain_policy: dict[str, Any]

    def begin_turn(self, name: str, by: str) -> int:
        """Begin a turn and return its number. TrailError."""

    def decide_each(self, questions: list[tuple[Request, Context]], *, in_source: bool) -> dict[int, Denied]:
        """Return the denials by the index of the question. `in_source`: the files are or will be in the source."""


class LimitedAuthorizer:
    """The operator's authorizer for the undo of an agent that was killed: the agent's policy must permit each step."""

    def __init__(self, authorizer: Authorizer, principal: list[str], policy: dict[str, Any]) -> None:
        """`principal` and `policy`: those of the agent when the undo began, as JSON data."""
        self._authorizer: Final = authorizer
        self._agent: Final = Principal(*principal)
        self._policy: Final = compile_policy(policy)

    def decide(self, request: Request, context: Context = NO_FACTS) -> Permit | Denied:
        """As `Authorizer.decide`."""
        return decide_in_source(self._policy, self._agent, request, context)

    def decide_each(self, questions: list[tuple[Request, Context]], *, in_source: bool) -> dict[int, Denied]:
        """As `AgentAuthorizer.decide_each`. The files are in the source."""
        assert in_source
        decisions = {number: self.decide(*question) for number, question in enumerate(questions)}
        return {number: decision for number, decision in decisions.items() if isinstance(decision, Denied)}

    def deny(self, denied: Denied, caller: Caller) -> Refused:
        """As `Authorizer.deny`."""
        return self._authorizer.deny(denied, caller)

    def authorize(
        self, request: Request, context: Context = NO_FACTS, *related: RelatedChange, **record: Unpack[ChangeRecord]
    ) -> Admission:
        """As `Authorizer.authorize`."""
        for each in (RelatedChange(request, context), *related):
            decision = self.decide(each.request, each.context)
            if isinstance(decision, Denied):
                raise self.deny(decision, CALLER)
        return self._authorizer.authorize(request, context, *related, **record)


class UndoResult(NamedTuple):
    """What an undo did, or would do. The plan and the failures are also those of the undos that it has completed."""

    plan: Plan
    failures: list[Failure]
    """Steps that were not made."""
    completed: int
    """Number of killed undos that this call completed first."""
    before: Sequence[Change] = ()
    """Selected changes that an earlier undo has taken back."""
    session: str = ""
    """UUID of the session that has the changes of the undo."""
    selections: Sequence[str] = ()
    """Options of `undo` that select the changes of this undo and of the completed ones, newest first."""


def limits_of(home: Path) -> UndoTable:
    """Return `[undo]` of `policy.toml` in the state directory: it bounds what all sessions keep. PolicyError."""
    from bonobofs.policy.document import UndoTable, load  # noqa: PLC0415 - `undo` needs no policy

    own = home / "policy.toml"
    return load(own).undo if own.exists() else UndoTable()


def expire_images(home: Path, free_bytes: int = 0) -> int:
    """Remove pre-images as `limits_of` says; return their number. PolicyError.

    Then a tenth of `max_total` is free, and at least `free_bytes`.
    """
    limits = limits_of(home)
    now = datetime.now(UTC)
    keep = (now - moment_of(limits.keep, now)).total_seconds()
    live = {session.session for session in read_all(home)[0] if lives(session)}
    most = min(limits.max_total * 9 // 10, limits.max_total - free_bytes)
    return expire(places_of(home), keep, most, live)


def changes_of_source(home: Path, source: str, since: datetime | None = None) -> list[Change]:
    """Return the changes of all sessions of a source by time. Live sessions first write what they have queued."""
    flush_servers(home)
    trails = [trail_path(home, session.session) for session in sessions_of(home, source)]
    return all_changes(trails, since)


def selection(  # noqa: PLR0913 - the options of the commands
    home: Path,
    source: str,
    *,
    change: str | None = None,
    turn: str | None = None,
    of_session: str | None = None,
    since: datetime | None = None,
    path: str | None = None,
    agent: str | None = None,
) -> Selection:
    """Return the selection that options name. `turn` is `SESSION:NUMBER`, a name or `last`. UsageError."""
    sessions = sessions_of(home, source)
    names = [session.session for session in sessions]
    agents = {session.agent for session in sessions}
    if agent is not None and agent not in agents.union(session.agent_id for session in sessions):
        known = f"known are {', '.join(sorted(agents))}" if agents else "it has no sessions"
        raise UsageError(f"no session of {source} is of an agent {agent!r}; {known}")
    return Selection(
        None if of_session is None else session_named(home, of_session).session,
        None if change is None else _existing(home, change, names),
        None if turn is None else _turn(home, source, turn, names, agent),
        since,
        path,
        agent,
    )


def _turn(home: Path, source: str, turn: str, names: list[str], agent: str | None) -> tuple[str, int]:
    if ID.fullmatch(turn):
        return _existing(home, turn, names, is_turn=True)
    mine = Selection(agent=agent)
    for change in reversed(changes_of_source(home, source)):
        is_turn = UNDO not in change.details if turn == "last" else turn != "" and turn == change.turn_name
        if is_turn and (change.is_made or change.is_publication) and change in mine:
            return change.entry.session, change.turn
    of_name = [
        entry
        for entry in _begins_of_turns(home, names)
        if turn and turn == entry.details.get("name") and agent in (None, entry.agent, entry.agent_id)
    ]
    if of_name:
        return max((entry.timestamp, entry.session, entry.seq) for entry in of_name)[1:]
    raise UsageError(f"no change of {source} is in a turn named {turn!r}; `bonobofs history PATH` shows the turns")


def _begins_of_turns(home: Path, names: Iterable[str]) -> Iterator[AuditEntry]:
    """Yield the entries that begin turns of sessions."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # pruned
            yield from (entry for _, entry in entries_from(trail_path(home, name), 0) if entry.operation == TURN)


def _existing(home: Path, text: str, names: list[str], *, is_turn: bool = False) -> tuple[str, int]:
    """Return session and number of a change, or of a turn. UsageError."""
    session, number = parse_id(text, names)
    flush_servers(home)
    changes = all_changes([trail_path(home, session)])
    numbers = {change.turn if is_turn else change.entry.seq for change in changes}
    if is_turn:
        numbers.update(entry.seq for entry in _begins_of_turns(home, [session]))
    if number not in numbers:
        what = "a turn" if is_turn else "a change"
        raise UsageError(f"{text} is not {what}; `bonobofs history PATH` shows the ids of changes and turns")
    return session, number


def preview(
    home: Path, source: str, selected: Selection, refs: RefsOfSource, authorizer: AgentAuthorizer | None = None
) -> UndoResult:
    """Return what an undo of the selected changes would do. Nothing is changed. OSError.

    `authorizer`: judges the steps of an agent's undo; None: the operator's undo, of which every step is permitted.
    """
    changes = changes_of_source(home, source)
    chosen, before = _choose(changes, selected)
    planned = plan(refs.source, chosen, Record.of(changes), images_of(home, source), refs, _judge(authorizer))
    return UndoResult(planned, [], 0, before)


def _choose(changes: Sequence[Change], selected: Selection) -> tuple[list[Change], list[Change]]:
    """Return the selected changes to take back, and those that an earlier undo has taken back, without its own."""
    chosen = [change for change in changes if change in selected]
    before = {change.id for change in chosen if change.is_taken_back}
    left = [change for change in chosen if change.id not in before and change.details.get(UNDO) not in before]
    return left, [change for change in chosen if change.id in before and UNDO not in change.details]


def _judge(authorizer: AgentAuthorizer | LimitedAuthorizer | None) -> Judge | None:
    if authorizer is None:
        return None
    return lambda changes: authorizer.decide_each([(each.request, each.context) for each in changes], in_source=True)


def undo(home: Path, source: str, selected: Selection, *, dry_run: bool = False) -> dict[str, Any]:
    """Take back the selected changes as the operator, after killed undos of this source are completed; the document.

    StateError, such as a full disk: the next call completes the undo. OSError, TrailError.
    """
    if mounts.mount_around(Path(source)) is not None:
        raise UsageError(f"{source} is covered by a mount; run undo in it, or unmount first: bonobofs umount {source}")
    if dry_run:
        refs = RefsOfSource(Path(source), None, is_operator=True)
        return as_document(preview(home, source, selected, refs))
    with operator_session(home, source) as (session, enforcer, policy), contextlib.ExitStack() as stack:

        @cache
        def worker() -> GitWorker:
            from bonobofs.git.git_worker import GitWorker, WorkerSession  # noqa: PLC0415 - few undos need a worker

            guard = OperatorAuthorizer(enforcer, policy)
            names = home, session.session, source, None, guard
            made = GitWorker(WorkerSession(*names, access_path=Path(source), is_operator=True))
            stack.callback(made.close)
            made.recover()
            return made

        refs = RefsOfSource(Path(source), worker, is_operator=True)
        undoer = Undoer(session.session, enforcer, enforcer.trail.event)
        return as_document(take_back(home, source, selected, undoer, refs))


class Undoer(NamedTuple):
    """Who takes changes back: the operator, or the agent of a session."""

    session: str
    """UUID of the session that has the changes of the undo."""
    authorizer: Authorizer
    record: Callable[[str, dict[str, Any]], object]
    """Records an event of the session: its operation and details."""
    agent: AgentAuthorizer | None = None
    """The authorizer of the agent; None: the operator."""

    def begin(self) -> str:
        """Return the option of `undo` that selects the changes of this undo: a session, or a new turn. TrailError."""
        session = self.session[:8]
        return f"--turn {session}:{self.agent.begin_turn('undo', 'mark')}" if self.agent else f"--session {session}"


def take_back(home: Path, source: str, selected: Selection, undoer: Undoer, refs: RefsOfSource) -> UndoResult:
    """Complete the killed undos of the source, then take back the selected changes. OSError.

    The operator completes an agent's undo under the policy that the agent had. StateError: another's undo was killed,
    or this one stopped, such as for a full disk.
    """
    agent, authorizer = undoer.agent, undoer.authorizer
    with _undoing(home):
        journals = UndoJournal.unfinished(home / "undo", source)
        for _, about in journals:
            if agent is not None and about.get("agent") != agent.agent.id:
                owner = about.get("principal", [""])[0]
                remedy = f"the next undo of {owner} or the operator's" if owner else "the operator's next undo"
                raise StateError(f"another undo of this source was killed; {remedy} completes it")
        images = images_of(home, source)
        selection = undoer.begin()
        failures = _complete(undoer, images, journals, refs)
        changes = changes_of_source(home, source)
        completed = {name for _, about in journals for name, *_ in about["changes"]}
        left = (change for change in changes if completed.isdisjoint((change.id, change.details.get(UNDO))))
        new, before = _choose(list(left), selected)
        planned = plan(refs.source, new, Record.of(changes), images, refs, _judge(agent))
        for denied in planned.denials:
            authorizer.deny(denied, CALLER)
        if planned.steps:
            about = {"source": source, "selection": selection, "changes": [*map(_name_and_paths, planned.taken_back)]}
            if agent is not None:
                about |= {"agent": agent.agent.id, "principal": agent.agent, "policy": agent.plain_policy}
            name = f"{undoer.session}-{secrets.token_hex(4)}"
            journal = UndoJournal.begin(home / "undo", name, planned.steps, about)
            failures += _make(authorizer, undoer, images, journal, about, refs)
        if agent is not None:
            agent.begin_turn("", "mark")  # what the agent changes now is not of the undo
    taken_back = [*planned.taken_back, *(change for change in reversed(changes) if change.id in completed)]
    steps = [*(step for journal, _ in journals for step in journal.steps), *planned.steps]
    made = [*([selection] if planned.steps else []), *_selections_of_undos(changes, taken_back or before)]
    undos = {selection, *(about["selection"] for _, about in journals)}
    selections = list(dict.fromkeys(each for each in made if each in undos or not taken_back))
    planned = Plan(steps, taken_back, planned.refusals)
    return UndoResult(planned, failures, len(journals), before, undoer.session, selections)


def _selections_of_undos(changes: Sequence[Change], taken_back: Sequence[Change]) -> list[str]:
    """Return the options of `undo` that select the earlier undos of some changes, newest first."""
    names = {change.id for change in taken_back}
    entries = ((each.entry, each.turn) for each in reversed(changes) if each.details.get(UNDO) in names)
    return list(
        dict.fromkeys(
            f"--session {entry.session[:8]}" if entry.agent == OPERATOR else f"--turn {entry.session[:8]}:{turn}"
            for entry, turn in entries
        )
    )


def _complete(
    undoer: Undoer, images: Images, journals: Iterable[tuple[UndoJournal, dict[str, Any]]], refs: RefsOfSource
) -> list[Failure]:
    """Complete killed undos. The policy of the agent bounds the operator, if an agent began one. StateError."""
    failures = []
    for journal, about in journals:
        authorizer: StepAuthorizer = undoer.authorizer
        if undoer.agent is None and "policy" in about:
            authorizer = LimitedAuthorizer(undoer.authorizer, about["principal"], about["policy"])
        failures += _make(authorizer, undoer, images, journal, about, refs)
    return failures


def _undoing(home: Path) -> contextlib.AbstractContextManager[int]:
    """Hold the lock that lets one undo of a state directory run at a time."""
    (home / "undo").mkdir(mode=0o700, exist_ok=True)
    return locked(home / "undo" / "lock")


def _make(
    authorizer: StepAuthorizer,
    undoer: Undoer,
    images: Images,
    journal: UndoJournal,
    about: dict[str, Any],
    refs: RefsOfSource,
) -> list[Failure]:
    """Make the steps of a journal, and record what it has taken back. StateError."""
    judge = _judge(authorizer if isinstance(authorizer, LimitedAuthorizer) else undoer.agent)
    execution = Execution(refs.source, authorizer, images, refs, judge=judge)
    try:
        with journal.progress():
            failures = execution.make(journal)
            names = [name for name, *_ in _completed(about["changes"], journal.steps, failures)]
            for start in range(0, len(names), _MOST_NAMES):
                undoer.record(TAKEN_BACK, {"changes": names[start : start + _MOST_NAMES]})
            return failures
    except (OSError, TrailError) as error:
        cause = f"the cause, such as a full disk of {refs.source} or of the state directory"
        why = "the log cannot be written" if isinstance(error, Refused) else reason(error)
        text = f"the undo stopped: {why}; remove {cause}, and the next undo completes it"
        raise StateError(text) from error
    finally:
        execution.close()


@contextlib.contextmanager
def operator_session(home: Path, source: str) -> Iterator[tuple[Session, Enforcer, dict[str, Any]]]:
    """Open a session of the operator, who may change everything; with its policy. StateError, TrailError."""
    from bonobofs.policy.document import PolicyDocument  # noqa: PLC0415 - `undo --dry-run` needs neither of them
    from bonobofs.session.python_session import keeping, remove_strays  # noqa: PLC0415
    from bonobofs.session.registration import ChosenPolicy, SessionRequest, register_session  # noqa: PLC0415

    document = PolicyDocument.model_validate(_ALLOW_ALL).model_dump(mode="json")
    policy = ChosenPolicy(OPERATOR, Path(), document, compile_policy(document), "the operator")
    registered = register_session(
        home,
        source=Path(source),
        mountpoint=None,
        request=SessionRequest(OPERATOR, is_operator=True),
        policy=policy,
        transport="none",
    )
    session = registered.session._replace(pid=os.getpid(), starttime=start_time(os.getpid()))
    identity = TrailIdentity(session.session, session.agent, session.agent_id)
    trail = Trail.create(trail_path(home, session.session), head_path(home, session.session), identity)
    try:
        save(home, session)  # from now on, `audit verify` expects the trail
        enforcer = Enforcer(policy.compiled, Principal(session.agent, session.agent_id, session.role), trail)
        remove_strays(home, Path(source), trail)
        with keeping(home, session, policy.plain, enforcer):
            yield session, enforcer, document
        enforcer.flush_all()
    except StateError:
        with contextlib.suppress(TrailError):  # it has the same cause, and the first error says what to do
            trail.close()
        raise
    finally:
        trail.close()
        with contextlib.suppress(StateError, OSError):
            note_ends(home, [session.session])


def _name_and_paths(change: Change) -> list[str]:
    return [change.id, *change.paths]


def _completed(
    changes: Iterable[Sequence[str]], steps: Iterable[UndoStep], failures: Iterable[Failure]
) -> list[Sequence[str]]:
    """Return the changes, each as its name and paths, that an undo has taken back completely.

    One step may restore the content for several changes of a path. If it has failed, only those are complete that have
    a step for their name.
    """
    names, paths = {failure.change for failure in failures}, {failure.path for failure in failures}
    of_names = {step.change for step in steps if step.do in CHANGING_NAMES and step.do != "put"}
    return [
        change
        for change in changes
        if change[0] not in names and (change[0] in of_names or paths.isdisjoint(change[1:]))
    ]


def as_document(result: UndoResult) -> dict[str, Any]:
    """Return the result as JSON data."""
    planned = result.plan
    names = {name for name, *_ in _completed(map(_name_and_paths, planned.taken_back), planned.steps, result.failures)}
    taken_back = [change for change in planned.taken_back if change.id in names]
    return {
        **{
            key: [{"change": each.id, "path": each.shown_path, "operation": each.operation} for each in changes]
            for key, changes in (("taken_back", taken_back), ("taken_back_before", result.before))
        },
        "conflicts": [
            {"change": refusal.change.id, "path": refusal.change.shown_path, "reason": refusal.reason}
            for refusal in planned.refusals
        ],
        "steps": [step.document() for step in planned.steps],
        "failures": [failure._asdict() for failure in result.failures],
        "completed": result.completed,
        "session": result.session,
        "to_take_back": list(result.selections),
    }


def show(home: Path, name: str) -> dict[str, Any]:
    """Return one change as JSON data, with the states of the file and the lines of its diff. UsageError."""
    if not ID.fullmatch(name):
        parse_id(name, ())
    owner = session_named(home, name.partition(":")[0])
    session, number = parse_id(name, [owner.session])
    sessions = sessions_of(home, owner.source)
    flush_servers(home, sessions)
    found = find_changes(home, [session], NumberQuery(session, number)).changes
    if not found:
        raise UsageError(f"{name} is no change; `bonobofs history PATH` shows the changes of a path")
    change = found[0]
    changes = _changes_of_files(home, sessions, found)
    states = {"before": change.before, "after": change.after, "replaced": change.replaced}
    images = images_of(home, owner.source)
    lines = [line for each in differences(Path(owner.source), images, found, changes) for line in each.unified()]
    return {
        **change_document(change, images),
        **{key: None if state is None else state._asdict() for key, state in states.items()},
        "kept": images.has(Image(session, number)),
        "diff": lines,
    }


def differences_of(home: Path, source: str, selected: Selection) -> list[FileDifference]:
    """Return what the selected changes did to each file. OSError."""
    if not selected.path:
        changes = changes_of_source(home, source)
        chosen = [change for change in changes if change in selected]
    else:
        sessions = sessions_of(home, source)
        flush_servers(home, sessions)
        names, query = [each.session for each in sessions], PathQuery({selected.path}, selected.path)
        chosen = sorted(
            (each for each in find_changes(home, names, query).changes if each in selected), key=moment_of_change
        )
        changes = _changes_of_files(home, sessions, chosen)
    return differences(Path(source), images_of(home, source), chosen, changes)


def _changes_of_files(home: Path, sessions: Sequence[Session], chosen: Sequence[Change]) -> list[Change]:
    """Return by time all changes of the paths of some changes, and of the paths to which renames moved their files."""
    paths = {path for change in chosen for path in change.paths}
    names = [session.session for session in sessions]
    while 0 < len(paths) <= _MOST_PATHS:
        found = sorted(find_changes(home, names, PathQuery(paths)).changes, key=moment_of_change)
        made = (change for change in found if change.is_made)
        moved_to = {change.new_path_of(path) for change in made for path in paths.intersection(change.paths)} - {None}
        if moved_to <= paths:
            return found
        paths.update(filter(None, moved_to))
    return all_changes(trail_path(home, name) for name in names) if paths else []


def difference_document(difference: FileDifference, *, stat: bool) -> dict[str, Any]:
    """Return a difference as JSON data: with its lines, or with the numbers of added and removed lines only."""
    counts = difference.counts()
    return {
        "path": difference.path,
        "old_path": difference.old_path,
        "status": difference.status,
        "changes": list(difference.changes),
        "added": None if counts is None else counts[0],
        "removed": None if counts is None else counts[1],
        **({} if stat else {"diff": difference.unified()}),
    }
