"""`bonobofs undo|history|show|diff`."""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bonobofs import session
from bonobofs.audit import reader
from bonobofs.cli.options import Argument, Option
from bonobofs.cli.output import document, local_time, note, paged, say, table
from bonobofs.errors import StateError, UsageError
from bonobofs.ipc.client import call
from bonobofs.session import change_history
from bonobofs.undo.changes import ID

if TYPE_CHECKING:
    from bonobofs.undo.changes import Selection

Json = Annotated[bool, Option("--json", help="One JSON document.")]
SessionOption = Annotated[
    str | None, Option("--session", metavar="UUID", help="A session, by the first digits of its UUID.")
]
TurnOption = Annotated[str | None, Option("--turn", metavar="ID", help="A turn, such as 3d1fbd0c:17, or `last`.")]
SinceOption = Annotated[str | None, Option(metavar="MOMENT", help="30s, 10m, 2h, 1d, or a moment in ISO 8601.")]
PathOption = Annotated[str | None, Option("--path", metavar="PATH", help="A path and all below it.")]
AgentOption = Annotated[str | None, Option("--agent", metavar="A", help="Label or UUID of an agent.")]


def undo(
    change: Annotated[str | None, Option("--change", metavar="ID", help="One change, such as 3d1fbd0c:17.")] = None,
    turn: TurnOption = None,
    of_session: SessionOption = None,
    since: SinceOption = None,
    path: PathOption = None,
    agent: AgentOption = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show what it would do, and change nothing.")] = False,
    json: Json = False,
) -> int:
    """Take back changes of files and publications: exactly the selected ones, newest first. The undo can be undone.

    A file that is no longer as the changes left it is a conflict: it stays untouched and is listed. In a mount, the
    command acts as the session's agent and takes back its own changes; the role must have the tool `undo`. Elsewhere
    it acts as the operator.

    Exit 0 if all selected changes were taken back, 1 if some were not.

    \b
    Examples:
      bonobofs undo --turn last --dry-run
      bonobofs undo --session 3d1fbd0c --path src
    """
    if not any((change, turn, of_session, since, path, agent)):
        raise UsageError("say what to take back: --change, --turn, --session, --since, --path or --agent")
    home = session.home()
    called = session.callable_session(home, Path.cwd())
    if called is not None:
        arguments: dict[str, Any] = {
            "change": change,
            "turn": turn,
            "since": since,
            "path": None
            if path is None
            else change_history.workspace_path(path, (str(called.mountpoint), called.source)),
        }
        if not called.session.startswith(of_session or ""):
            raise UsageError(
                f"in a mount, --session can name only its own session, {called.session[:8]}; run this outside of it"
            )
        if agent not in (None, called.agent_id):
            raise UsageError("in a mount, undo takes back changes of the session's own agent; leave --agent out")
        given = {name: value for name, value in arguments.items() if value is not None}
        if of_session is not None:
            given["this_session"] = True
        result: dict[str, Any] = call(called.directory, "undo.preview" if dry_run else "undo", **given)
    else:
        source, selection = _selected(home, change, turn, of_session, since, path, agent)
        result = session.undo_service.undo(home, source, selection, dry_run=dry_run)
    if json:
        document(result)
    else:
        _print(result, dry_run=dry_run)
    return 1 if result["conflicts"] or result["failures"] else 0


def _print(result: dict[str, Any], *, dry_run: bool) -> None:
    if result["completed"]:
        say(f"{result['completed']} undo that was killed was completed first")
    failed = {failure["path"] for failure in result["failures"]}
    for step in result["steps"]:
        if step["path"] not in failed and step["do"] != "dir_times":
            say(f"  {_described(step)}")
    for failure in result["failures"]:
        say(f"failed: {failure['path']}: {failure['reason']}")
    shown: set[tuple[str, str]] = set()
    for conflict in result["conflicts"]:
        if (conflict["path"], conflict["reason"]) not in shown:
            shown.add((conflict["path"], conflict["reason"]))
            say(f"conflict: {conflict['path']} ({conflict['change']}): {conflict['reason']}; it stays untouched")
    if not any(result[name] for name in ("taken_back", "conflicts", "failures", "taken_back_before", "to_take_back")):
        say("no recorded change matches these options; bonobofs history PATH shows the changes of a path")
        return
    word = "would be taken back" if dry_run else "were taken back"
    say(f"{len(result['taken_back'])} changes {word}, {len(result['conflicts'])} not")
    if result["taken_back_before"]:
        say(f"{len(result['taken_back_before'])} changes were taken back before")
    which = "this undo" if result["taken_back"] else "the earlier undo"
    for selection in result["to_take_back"]:
        say(f"to take back {which}: bonobofs undo {selection}")


def _described(step: dict[str, Any]) -> str:
    arguments, path = step["arguments"], step["path"]
    texts = {
        "rename": f"move {path} to {arguments.get('to')}",
        "exchange": f"exchange {path} and {arguments.get('to')}",
        "put": f"{'restore' if arguments.get('new') else 'write'} {path} ({arguments.get('size')} bytes)",
        "link": f"link {path} to {arguments.get('of')}",
        "symlink": f"symlink {path} to {arguments.get('target')}",
        "mkdir": f"make directory {path}",
        "rmdir": f"remove directory {path}",
    }
    if step["do"] == "publish":
        moves = (f"{ref} to {new[:12] or 'no commit'}" for ref, _, new in arguments["updates"])
        return f"move back {', '.join(moves)}"
    return texts.get(step["do"]) or (f"remove {path}" if step["do"] == "remove" else f"set {step['do']} of {path}")


def history(
    path: Annotated[str, Argument(metavar="PATH", help="A path in a mount or source.")],
    lines: Annotated[int, Option("-n", "--lines", minimum=1, metavar="N", help="Number of changes.")] = 50,
    json: Json = False,
) -> None:
    """Show the changes and refusals of a path, newest first.

    Each has its time, agent, program, turn and number of bytes.

    \b
    Example:
      bonobofs history src/app.py
    """
    home, began = session.home(), time.monotonic()
    sessions, inside = change_history.locate(home, path)
    found = change_history.history(home, sessions, inside, lines)
    if json:
        document(found.changes)
    else:
        _print_history(inside or sessions[0].source, found.changes)
    if found.needs_index_update:
        sys.stdout.flush()
        try:
            change_history.update_index(home, time.monotonic() - began)
        except StateError as error:
            note(str(error))


def _print_history(path: str, changes: list[dict[str, Any]]) -> None:
    rows = [
        [
            each["change"],
            local_time(each["time"]),
            each["agent"],
            each["tool"],
            each["operation"],
            each["result"],
            "" if each["bytes"] is None else str(each["bytes"]),
            each["turn"],
        ]
        for each in changes
    ]
    if not rows:
        say(f"no change of {path} is recorded")
        return
    with paged():
        table(["CHANGE", "TIME", "AGENT", "PROGRAM", "OPERATION", "RESULT", "BYTES", "TURN"], rows)


def show(
    change: Annotated[str, Argument(metavar="CHANGE", help="A change, such as 3d1fbd0c:17.")],
    json: Json = False,
) -> None:
    """Show one change: its record, the old and new state of the file, and the difference.

    \b
    Example:
      bonobofs show 3d1fbd0c:17
    """
    home = session.home()
    found = session.undo_service.show(home, change)
    if json:
        document(found)
        return
    with paged():
        for name in ("change", "time", "agent", "tool", "operation", "path", "to", "result", "reason", "turn", "kept"):
            if found.get(name):
                say(f"{name}: {local_time(found[name]) if name == 'time' else found[name]}")
        _print_diff(found["diff"])


def diff(
    of_session: SessionOption = None,
    turn: TurnOption = None,
    since: SinceOption = None,
    path: PathOption = None,
    stat: Annotated[bool, Option("--stat", help="Only the number of lines of each file.")] = False,
    json: Json = False,
) -> None:
    """Show what changes did to the files, as a patch.

    \b
    Examples:
      bonobofs diff --turn last
      bonobofs diff --session 3d1fbd0c --stat
    """
    home = session.home()
    source, selection = _selected(home, None, turn, of_session, since, path, None)
    found = session.undo_service.differences_of(home, source, selection)
    if json:
        document([session.undo_service.difference_document(each, stat=stat) for each in found])
        return
    with paged():
        for each in found:
            if stat:
                counts = each.counts()
                numbers = "binary or not kept" if counts is None else f"+{counts[0]} -{counts[1]}"
                say(f"{each.status:8} {numbers:12} {each.path}")
            else:
                _print_diff(each.unified())


def _print_diff(lines: list[str]) -> None:
    """Print a patch: on a terminal escaped and in colours, else each byte as it is in the file."""
    if sys.__stdout__ is None or not sys.__stdout__.isatty():
        sys.stdout.flush()
        sys.stdout.buffer.writelines(os.fsencode(f"{line}\n") for line in lines)
        return
    colours = {} if "NO_COLOR" in os.environ else {"+": "32", "-": "31", "@": "36", "d": "1"}
    for line in lines:
        say(line, colours.get(line[:1], ""))


def _selected(
    home: Path,
    change: str | None,
    turn: str | None,
    of_session: str | None,
    since: str | None,
    path: str | None,
    agent: str | None,
) -> tuple[str, Selection]:
    """Return the source that the options name, and the selection."""
    moment = None if since is None else reader.since(since, datetime.now(UTC))
    inside = None
    if path is not None:
        sessions, inside = change_history.locate(home, path)
        source = sessions[0].source
    elif of_session is not None:
        source = change_history.session_named(home, of_session).source
    elif change is not None or (turn is not None and ID.fullmatch(turn)):
        source = change_history.session_named(home, (change or turn or "").partition(":")[0]).source
    else:
        source = change_history.sessions_around(home, Path.cwd())[0].source
    return source, session.undo_service.selection(
        home, source, change=change, turn=turn, of_session=of_session, since=moment, path=inside, agent=agent
    )
