"""`bonobofs audit tail|query|report|verify|prune|export|index`."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import json as jsonlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from bonobofs import session
from bonobofs.audit import reader
from bonobofs.audit import report as reports
from bonobofs.audit.entry import COUNTS, PROCESS, TURN, AuditEntry
from bonobofs.audit.index import (
    AuditIndex,
    Claim,
    Count,
    GroupBy,
    IndexQuery,
    Progress,
    call_variables,
    microseconds,
    session_variables,
)
from bonobofs.audit.tombstones import tombstones
from bonobofs.audit.verify import Damage, Finding, TrailReport, TrailStatus, describe_below, verify
from bonobofs.cli.actor import nearest
from bonobofs.cli.options import Group, Option
from bonobofs.cli.output import document, note, say, waiting
from bonobofs.errors import UsageError
from bonobofs.policy.denials import BUILT_IN_RULES
from bonobofs.policy.request import Operation

app = Group(help="Read, search, summarize, verify and export the record of every change.")

_SECONDS_BETWEEN_LOOKS = 0.2


class Format(enum.StrEnum):
    """What `audit export` writes."""

    JSONL = "jsonl"
    CSV = "csv"


Json = Annotated[bool, Option("--json", help="Print JSON.")]


@app.command("tail")
def tail(
    follow: Annotated[bool, Option("-f", "--follow", help="Print new entries until Ctrl-C.")] = False,
    denied: Annotated[bool, Option("--denied", help="Only refusals.")] = False,
    alerts: Annotated[bool, Option("--alerts", help="Only alerts.")] = False,
    lines: Annotated[int, Option("-n", "--lines", minimum=0, metavar="N", help="Number of entries.")] = 20,
    json: Annotated[bool, Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show the last entries of all sessions, the oldest first.

    \b
    Examples:
      bonobofs audit tail --denied
      bonobofs audit tail -f --alerts
    """
    home = session.home()
    session.flush_servers(home)
    trails = home / "trails"
    follower = reader.Follower(trails) if follow else None
    filters = _TailFilter(denied=denied, alerts=alerts, outcomes=json)
    _print(_last(trails, lines, filters), json=json)
    while follower is not None:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        _print(filters.of(follower.poll()), json=json)


Agent = Annotated[str | None, Option(metavar="A", help="Label or UUID of an agent.")]
OfSession = Annotated[
    str | None, Option("--session", metavar="UUID", help="One session, by the first digits of its UUID.")
]
Path_ = Annotated[
    str | None,
    Option(
        "--path",
        metavar="PATH",
        help="A path in a mount or source, else from the root of any workspace; with all below it. * and ** match.",
    ),
]
Turn = Annotated[str | None, Option("--turn", metavar="TURN", help="Id or name of a turn.")]
Since = Annotated[str | None, Option(metavar="MOMENT", help="30s, 10m, 2h, 1d, or a moment in ISO 8601.")]
Until = Annotated[str | None, Option(metavar="MOMENT", help="Like --since; later entries are left out.")]


@app.command("query")
def query(
    agent: Agent = None,
    of_session: OfSession = None,
    path: Path_ = None,
    operation: Annotated[
        str | None, Option(metavar="OPERATION", help="Such as write_file, rename, delete_file.")
    ] = None,
    rule: Annotated[str | None, Option(metavar="RULE", help="The rule that decided.")] = None,
    result: Annotated[str | None, Option(metavar="RESULT", help="allowed, denied or error.")] = None,
    since: Since = None,
    until: Until = None,
    command: Annotated[
        str | None, Option(metavar="TEXT", help="Part of the command line of the process or of one of its parents.")
    ] = None,
    turn: Turn = None,
    call: Annotated[
        str | None, Option(metavar="ID", help="A tool call, as the hooks or TRACEPARENT of the client claim it.")
    ] = None,
    claimed_session: Annotated[
        str | None, Option("--claimed-session", metavar="ID", help="A session or thread, as the client claims it.")
    ] = None,
    count: Annotated[GroupBy | None, Option(metavar="FIELD", help=f"Count by {', '.join(GroupBy)} instead.")] = None,
    json: Json = False,
) -> int:
    """Search the record. Each change is shown with its result; in JSON, with its `outcome`.

    Exit 1 if the record of a session cannot be read; the others are still searched.

    \b
    Examples:
      bonobofs audit query --agent alice --result denied --since 1d
      bonobofs audit query --path docs --operation delete_file --json
      bonobofs audit query --result denied --count rule
      bonobofs audit query --command 'npm install' --turn b6d4a2f2:7
      bonobofs audit query --call toolu_01A09q90qw90lq917835lq9
    """
    home = session.home()
    base = _query(home, agent, of_session, path, since, until)
    filters = dataclasses.replace(base, operation=operation, rule=rule, result=result, command=command)
    with _index(home) as (index, progress):
        filters = _with_claims(index, _with_turn(index, filters, turn), call, claimed_session)
        filters = _check_filters(home, index, filters)
        if count is not None:
            _print_counts(index.count(filters, count), count, json=json)
        elif json:
            document([_plain(change) for change in index.changes(filters)])
        else:
            for change in index.changes(filters):
                counted = change.outcome is not None and COUNTS in change.outcome.details
                say(_line(change.outcome if counted and change.outcome else change.entry, change.result))
    return 1 if progress.unread else 0


@app.command("report")
def report(
    agent: Agent = None,
    of_session: OfSession = None,
    path: Path_ = None,
    since: Since = None,
    until: Until = None,
    turn: Turn = None,
    json: Json = False,
) -> int:
    """Print a report in Markdown: changes, refusals and their remedies.

    It is meant for a pull request and ends with the hashes of the trails behind it.

    \b
    Examples:
      bonobofs audit report --agent alice --since 1d > report.md
      bonobofs audit report --session 3d1fbd0c --json
    """
    home = session.home()
    filters = _query(home, agent, of_session, path, since, until)
    with _index(home) as (index, progress):
        result = reports.ChangeReport(session.about_sessions(home), index)
        filters = _with_turn(index, filters, turn)
        filters = _check_filters(home, index, filters)
        result.add(index.changes(filters))
    unreadable = session.unreadable(home)
    for error in unreadable.values():
        note(str(error))
    if json:
        document(result.document())
    else:
        print(result.markdown(), end="")
    return 1 if progress.unread or unreadable else 0


@app.command("index")
def index_(
    rebuild: Annotated[bool, Option("--rebuild", help="Delete the index first.")] = False,
) -> int:
    """Update the index from the record. `query` and `report` do this themselves.

    \b
    Example:
      bonobofs audit index --rebuild
    """
    home = session.home()
    with waiting("reading the record"):
        if rebuild:
            progress = session.rebuild_index(home)
        else:
            with session.open_index(home) as index:
                progress = index.catch_up()
    _print_trouble(progress)
    say(f"{progress.entries} entries were read")
    return 1 if progress.unread else 0


@app.command("verify")
def verify_(
    witness: Annotated[bool, Option("--witness", help="Also compare with the heads in Agent Mail.")] = False,
    json: Json = False,
) -> int:
    """Verify the record; exit 1 if an entry was changed, moved, added or is missing.

    A killed session is reported as crashed, with its unfinished changes and what the source has there now. That is no
    finding.

    Only --witness detects a record that was rewritten together with its heads. It also exits 1 if Agent Mail has no
    letter of this state directory.

    \b
    Examples:
      bonobofs audit verify
      bonobofs audit verify --witness
    """
    home = session.home()
    session.flush_servers(home)
    known = {each.session.session: each for each in session.statuses(home, include_ended=True)}
    reports = list(
        verify(
            home / "trails",
            live=lambda name: name in known and known[name].state in {*session.SERVED, session.SessionState.ENDING},
            describe=lambda name: describe_below(Path(known[name].session.source)) if name in known else None,
            expected=[name for name, each in known.items() if each.session.pid is not None],
            pruned=partial(tombstones, home),
        )
    )
    reports += [record] if (record := session.verify_record(home)) is not None else []
    unreadable = session.unreadable(home).items()
    _add([Finding(name, Damage.SESSION, None, None, str(error)) for name, error in unreadable], reports)
    witnesses = session.ask_witnesses(home) if witness else None
    if witnesses is not None:
        _add(witnesses.findings, reports)
        _print_witnesses(witnesses)
    if json:
        document([_report(report) for report in reports])
    else:
        for report in reports:
            _print_entry(report)
        result = sum(len(report.findings) for report in reports)
        entries = sum(report.entries for report in reports)
        say(f"{len(reports)} trails, {entries} entries: {f'{result} findings' if result else 'as they were written'}")
    silent = witnesses is not None and not witnesses.letters
    return 1 if silent or any(report.findings for report in reports) else 0


@app.command("prune")
def prune(
    dry_run: Annotated[bool, Option("--dry-run", help="Show what would be pruned; change nothing.")] = False,
    json: Json = False,
) -> int:
    """Compress the trails of ended sessions, and remove the oldest beyond the limits of [audit].

    The limits are in policy.toml of the state directory; the defaults are 90 days and 5 GB. Each pruned trail leaves a
    tombstone with its head, count and period, which `verify` checks. Exit 1 if a trail that was due is kept.

    \b
    Examples:
      bonobofs audit prune --dry-run
      bonobofs audit prune --json
    """
    with waiting("reading the record"):
        result = session.prune(session.home(), dry_run=dry_run)
    size = sum(each.bytes for each in result.pruned)
    if json:
        pruned = [each._asdict() for each in result.pruned]
        document(
            {"dry_run": dry_run, "bytes": size, "pruned": pruned, "kept": result.kept, "failures": result.failures}
        )
    else:
        for each in result.pruned:
            period = f"{each.first} to {each.last}"
            say(f"{each.session}  {each.agent}  {each.seq} entries, {each.bytes} bytes, {period}: {each.why}")
        for name, reason in result.kept.items():
            note(f"{name} is kept: {reason}")
        for failure in result.failures:
            note(failure)
        say(f"{len(result.pruned)} trails, {size} bytes {'would be' if dry_run else 'were'} pruned")
    return 1 if result.kept or result.failures else 0


@app.command("export")
def export(
    form: Annotated[
        Format, Option("--format", metavar="jsonl|csv", help="jsonl: exact entries; csv: for spreadsheets.")
    ],
) -> None:
    """Write every entry of every session to standard output.

    \b
    Example:
      bonobofs audit export --format csv > changes.csv
    """
    home = session.home()
    session.flush_servers(home)
    entries = reader.merged(reader.trails_in(home / "trails"))
    if form is Format.JSONL:
        reader.export_jsonl(entries, sys.stdout)
        return
    # RFC 4180 ends its lines itself.
    with open(sys.stdout.fileno(), "w", newline="", encoding="utf-8", closefd=False) as out:
        reader.export_csv(entries, out)


def _check_filters(home: Path, index: AuditIndex, filters: IndexQuery) -> IndexQuery:
    """Return the filters with the whole UUID of the session.

    UsageError, with similar values: a value is unknown and in no entry, or several UUIDs begin as the session.
    """
    sessions = {*index.sessions(), *(each.session.session for each in session.statuses(home, include_ended=True))}
    chosen = [each for each in sessions if filters.session and each.startswith(filters.session)]
    if len(chosen) > 1:
        raise UsageError(
            f"--session: the UUIDs of {len(chosen)} sessions begin with {filters.session!r}; give more digits"
        )
    if chosen:
        filters = dataclasses.replace(filters, session=chosen[0])
    known: dict[GroupBy, Iterable[str]] = {
        GroupBy.RESULT: ("allowed", "denied", "error"),
        GroupBy.OPERATION: [each.value for each in Operation],
        GroupBy.RULE: (*BUILT_IN_RULES, *session.rules_of_sessions(home)),
        GroupBy.SESSION: sessions,
        GroupBy.AGENT: session.agents_of(home),
    }
    for by, values in known.items():
        value = getattr(filters, by.value)
        alone = IndexQuery(**{by.value: value}, agent_id=filters.agent_id if by is GroupBy.AGENT else None)
        if value is None or value in values or next(iter(index.changes(alone)), None) is not None:
            continue
        recorded = [name for each in index.count(IndexQuery(), by) for name in (each.value, each.label) if name]
        raise UsageError(f"--{by.value}: no entry has {value!r}{nearest(value, [*values, *recorded])}")
    return filters


def _with_turn(index: AuditIndex, filters: IndexQuery, turn: str | None) -> IndexQuery:
    """Add the condition that a change belongs to a turn. UsageError: there is no such turn."""
    if turn is None:
        return filters
    turns = index.find_turns(turn)
    if not turns:
        known = [name for each in index.turns() for name in (each.name, each.id) if name]
        raise UsageError(f"--turn: no turn has the name or id {turn!r}{nearest(turn, known)}")
    return dataclasses.replace(filters, turns=turns)


def _with_claims(index: AuditIndex, filters: IndexQuery, call: str | None, of_session: str | None) -> IndexQuery:
    """Add the condition that a change belongs to a claimed tool call and session. UsageError: no client claims it."""
    calls = index.calls() if call is not None or of_session is not None else []
    for name, value in (("call", call), ("claimed-session", of_session)):
        if value is None:
            continue
        is_call = name == "call"
        matching = tuple(each for each in calls if value == (each.id if is_call else each.agent_session))
        claim = Claim(matching, call_variables(value) if is_call else session_variables(value))
        if not matching and next(iter(index.changes(IndexQuery(claims=(claim,)))), None) is None:
            known = [each.id if is_call else each.agent_session for each in calls]
            raise UsageError(f"--{name}: no client claims {value!r}{nearest(value, known)}")
        filters = dataclasses.replace(filters, claims=(*filters.claims, claim))
    return filters


def _query(
    home: Path, agent: str | None, of_session: str | None, path: str | None, since: str | None, until: str | None
) -> IndexQuery:
    now = datetime.now(UTC)
    sessions, inside = _located(home, path) if path is not None else (None, None)
    return IndexQuery(
        agent=agent,
        agent_id=session.identity_of(home, agent) if agent is not None else None,
        session=of_session,
        sessions=sessions,
        path=inside,
        since=microseconds(reader.since(since, now)) if since is not None else None,
        until=microseconds(reader.since(until, now)) if until is not None else None,
    )


def _located(home: Path, path: str) -> tuple[tuple[str, ...] | None, str]:
    """Return the sessions of the source around a path or pattern, and the path from the root of the source.

    None: it is in no source, and is a path from the root of any source. UsageError: it cannot be one.
    """
    from bonobofs.session import change_history  # noqa: PLC0415 - loads the packages of undo

    try:
        sessions, inside = change_history.locate(home, path)
    except UsageError:
        if os.path.isabs(path) or os.path.normpath(path).startswith(".."):
            raise
        return None, path
    return tuple(each.session for each in sessions), inside


@contextlib.contextmanager
def _index(home: Path) -> Iterator[tuple[AuditIndex, Progress]]:
    """Open the index, updated from all readable trails."""
    session.flush_servers(home)
    with session.open_index(home) as index:
        with waiting("reading the record"):
            progress = index.catch_up()
        _print_trouble(progress)
        yield index, progress


def _print_trouble(progress: Progress) -> None:
    for problem in progress.unread:
        note(problem)
    for name in progress.redone:
        note(f"the trail of session {name} was replaced since it was indexed; run bonobofs audit verify")


def _print_counts(counts: list[Count], by: GroupBy, *, json: bool) -> None:
    if json:
        named = [{by.value: each.value, "changes": each.changes, "times": each.times} for each in counts]
        if by is GroupBy.AGENT:
            named = [{**plain, "label": each.label} for plain, each in zip(named, counts, strict=True)]
        document(named)
        return
    for each in counts:
        say(f"{each.times:9}  {f'{each.label}  {each.value}' if each.label else each.value or '-'}")


def _print_witnesses(witnesses: session.WitnessReport) -> None:
    for name in witnesses.unknown:
        note(f"Agent Mail has no letter of session {name}: its record was not sent yet, or the letters were deleted")
    if not witnesses.letters:
        note("the mail server has no letter of this state directory, so it confirms nothing")


def _add(findings: list[Finding], reports: list[TrailReport]) -> None:
    """Add findings to the reports; a session without a trail gets a new report."""
    known = {report.session: report for report in reports}
    for finding in findings:
        if finding.session not in known:
            known[finding.session] = TrailReport(finding.session, TrailStatus.GONE)
            reports.append(known[finding.session])
        known[finding.session].findings.append(finding)


def _print_entry(report: TrailReport) -> None:
    for finding in report.findings:
        note(f"{report.session}: {finding.message}")
    if report.status is TrailStatus.CRASHED:
        torn = "; its last line was cut short" if report.torn else ""
        say(f"{report.session}: crashed after entry {report.entries}{torn}")
    for intent in report.unfinished:
        what = f"{intent.operation} {intent.path}"
        say(f"{report.session}: entry {intent.seq}, {what}, has no outcome; there is now: {intent.shows or 'unknown'}")
    if report.unfinished_uncounted:
        say(f"{report.session}: {report.unfinished_uncounted} more entries have no outcome")


def _report(report: TrailReport) -> dict[str, Any]:
    return {
        "session": report.session,
        "status": report.status,
        "entries": report.entries,
        "torn": report.torn,
        "findings": [finding._asdict() for finding in report.findings],
        "unfinished": [intent._asdict() for intent in report.unfinished],
        "unfinished_uncounted": report.unfinished_uncounted,
    }


def _last(trails: Path, lines: int, filters: _TailFilter) -> list[AuditEntry]:
    """Give the last `lines` entries that are wanted, oldest first."""
    result = itertools.chain.from_iterable(_last_of(trail, lines, filters) for trail in reader.trails_in(trails))
    return sorted(result, key=lambda entry: entry.timestamp)[-lines:] if lines else []


def _last_of(trail: Path, lines: int, filters: _TailFilter) -> Iterable[AuditEntry]:
    reach = 2 * lines
    entries = reader.last(trail, reach)
    result = deque(filters.of(entries), maxlen=lines)
    # The whole trail is read only if its end has too few matches.
    return (
        result if len(result) == lines or len(entries) < reach else deque(filters.of(reader.read(trail)), maxlen=lines)
    )


class _TailFilter(NamedTuple):
    """Selects the entries that `tail` shows. A successful change is shown once, not as intent and outcome."""

    denied: bool
    alerts: bool
    outcomes: bool

    def of(self, entries: Iterable[AuditEntry]) -> Iterator[AuditEntry]:
        for entry in entries:
            if entry.operation == PROCESS and entry.kind == "event" and not self.outcomes:
                continue  # the entries of changes refer to it
            if self.denied or self.alerts:
                if (self.alerts and entry.kind == "alert") or (
                    self.denied and entry.result == "denied" and entry.kind != "alert"
                ):
                    yield entry
            elif self.outcomes or (entry.kind == "outcome" and entry.result == "allowed") == (COUNTS in entry.details):
                yield entry  # of a counter in scratch, the outcome says more than its intent


def _print(entries: Iterable[AuditEntry], *, json: bool) -> None:
    for entry in entries:
        if json:
            print(entry.to_json())
        else:
            say(_line(entry, entry.result))
    sys.stdout.flush()


def _plain(change: reader.RecordedChange) -> dict[str, Any]:
    outcome = jsonlib.loads(change.outcome.to_json()) if change.outcome is not None else None
    return {**jsonlib.loads(change.entry.to_json()), "result": change.result, "outcome": outcome}


def _line(entry: AuditEntry, result: str) -> str:
    """Format an entry as one line: time, result, agent, operation, path and reason."""
    moment = entry.timestamp.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    kind = entry.kind if entry.kind in ("alert", "event") else result
    why = [f"{entry.code}:"] if entry.code else []
    why += [text for text in (entry.reason, entry.details.get("about")) if isinstance(text, str) and text]
    count = entry.details.get("count")
    times = [f"({count} times more)"] if isinstance(count, int) else []
    counts = entry.details.get(COUNTS)
    if isinstance(counts, dict) and counts:
        times = [f"(in scratch: {', '.join(f'{number} {what}' for what, number in counts.items() if number)})"]
    particulars = _PARTICULARS.get(entry.guard)
    if entry.operation == TURN and entry.kind == "event":
        particulars = _turn
    what = _moved(entry) or (particulars(entry) if particulars is not None else "")
    return "  ".join(filter(None, (moment, f"{kind:7}", entry.agent, entry.operation, what, *times, " ".join(why))))


def _moved(entry: AuditEntry) -> str:
    """Return the path; for a rename, link or copy, both paths."""
    came, went = (entry.details.get(key) for key in ("from", "to"))
    return " -> ".join(path for path in (came, entry.path, went) if isinstance(path, str) and path)


def _turn(entry: AuditEntry) -> str:
    """Return the name of a turn, or what began it."""
    return str(entry.details.get("name") or f"by {entry.details.get('by')}")


def _commit(entry: AuditEntry) -> str:
    """Return the denied path, the branches and tags, and the first line of the message."""
    named = [entry.details.get(key) for key in ("source", "from", "branch", "new", "tag", "target")]
    names = " -> ".join(dict.fromkeys(name for name in named if isinstance(name, str) and name))
    message = entry.details.get("message")
    return " ".join(filter(None, (entry.path, names, *(message.splitlines()[:1] if isinstance(message, str) else ()))))


def _issue(entry: AuditEntry) -> str:
    """Return the id of the issue; the title of a new one, which has no id yet."""
    named = (entry.details.get("issue"), entry.details.get("title"))
    return next((each for each in named if isinstance(each, str)), "")


def _connection(entry: AuditEntry) -> str:
    """Return host and port."""
    host, port = entry.details.get("host"), entry.details.get("port")
    return f"{host}:{port}" if isinstance(host, str) and host else ""


_PARTICULARS: Final = {"beads": _issue, "git": _commit, "network": _connection}
