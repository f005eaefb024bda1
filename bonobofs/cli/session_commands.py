"""`bonobofs umount`, `status`, `shell` and `mark`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final

from bonobofs import session
from bonobofs.cli.options import Argument, Option
from bonobofs.cli.output import document, note, say, table, waiting
from bonobofs.errors import UsageError
from bonobofs.git.session_repository import Kept
from bonobofs.ipc.client import call
from bonobofs.session import SessionState
from bonobofs.state.question_files import open_questions
from bonobofs.state.sessions import document_of
from bonobofs.undo.image_expiry import size_text

_NAMED: Final = 5


def umount(
    mountpoint: Annotated[str, Argument(metavar="MOUNTPOINT", help="A directory on which bonobofs mount was run.")],
) -> None:
    """Unmount, and wait until the session's record is complete.

    Also unmounts what a killed server left.

    \b
    Example:
      bonobofs umount ~/work
    """
    home = session.home()
    path = Path(os.path.abspath(mountpoint))
    os.chdir("/")
    with waiting(f"closing the record of {path}"):
        result = session.unmount_session(home, path)
    if result.live:
        say(f"{path}: unmounted")
    if result.dead:
        say(f"{path}: {result.dead} dead mount{'s' if result.dead > 1 else ''} taken off")
    if result.copies:
        some = ", ".join(result.copies[:_NAMED])
        more = f" and {len(result.copies) - _NAMED} more" if len(result.copies) > _NAMED else ""
        note(f"a copy of the mount remains, and every access to it fails: {some}{more}; unmount it there too")
    if result.remover is not None:
        note(f"the record is closed; the server (pid {result.remover}) still removes the session's scratch files")
    for repository in result.kept:
        say(str(repository))
    if not result.live and not result.dead and result.closed:
        say(f"{path}: already unmounted; the record is closed")
    elif not result.live and not result.dead:
        say(f"{path}: nothing was mounted; the end of a crashed session is recorded")
    if not result.closed:
        note("the record has no closing entry; run bonobofs audit verify")


_STYLES = {
    SessionState.SERVING: "green",
    SessionState.STOPPED: "red",
    SessionState.SOURCE_REMOVED: "red",
    SessionState.DEAD: "red",
    SessionState.CRASHED: "red",
    SessionState.ENDING: "yellow",
    SessionState.ENDED: "dim",
}


def status(
    everything: Annotated[bool, Option("--all", help="Include ended sessions.")] = False,
    json: Annotated[bool, Option("--json", help="One JSON document: a list.")] = False,
) -> int:
    """List the sessions of this state directory and their states.

    \b
    serving  it works                     ending   unmounted; the server completes its record
    dead     its server is gone, and everything in the mount fails: mount again, or umount
    crashed  server and mount are gone without a closing entry: mount again, or audit verify
    stopped  its server is stopped by a signal, and everything in the mount waits
    source removed  the source was removed, renamed or replaced under the mount: umount

    Exit 1 if a session cannot be read; standard error names it, and the others are listed.
    """
    home = session.home()
    repositories = {entry.session: entry for entry in session.all_kept(home)}
    entries = [
        entry
        for entry in session.statuses(home, include_ended=True)
        if everything or entry.state is not SessionState.ENDED or entry.session.session in repositories
    ]
    unreadable = session.unreadable(home)
    for error in unreadable.values():
        note(str(error))
    if json:
        document([_as_document(entry, repositories.get(entry.session.session)) for entry in entries])
    else:
        _print_statuses(entries)
        disk = os.statvfs(home)
        if entries and disk.f_blocks and not (disk.f_bavail if os.geteuid() else disk.f_bfree):
            say(f"{home} is on a full disk: while the log cannot be written, each change is refused; free space there")
        for repository in repositories.values():
            say(str(repository))
    return 1 if unreadable or any(entry.unreadable for entry in entries) else 0


def _print_statuses(entries: list[session.SessionStatus]) -> None:
    if not entries:
        say("nothing is mounted")
        return
    table(
        ("STATE", "MOUNTPOINT", "SOURCE", "AGENT", "ROLE", "PID", "TRANSPORT", "POLICY"),
        [_row(entry) for entry in entries],
        [_STYLES[entry.state] for entry in entries],
    )
    for entry in entries:
        for text in _notes(entry):
            say(text)
    # The sessions share one store, and each has measured it at another time.
    images = max((entry.images for entry in entries if entry.images is not None), default=None)
    if images is not None:
        say(f"old contents for undo: {size_text(*images)}")


def _notes(entry: session.SessionStatus) -> list[str]:
    """Return sentences for the operator."""
    where = entry.session.mountpoint or entry.session.source
    notes = [_remedy(entry)] if entry.state not in (SessionState.SERVING, SessionState.ENDED) else []
    if entry.unwatched:
        notes.append(
            f"{where}: {entry.unwatched}; an unwatched external change may show a second late and is "
            f"not recorded: {entry.watch}"
        )
    if entry.policy_error is not None:
        notes.append(
            f"{where}: the policy file could not be loaded, so the last good policy stays in force: "
            f"{entry.policy_error}"
        )
    if entry.unreadable is not None:
        notes.append(f"{where}: {entry.unreadable}")
    if entry.observes:
        notes.append(f"{where}: observes: what the rules refuse is made and recorded")
    if entry.state in session.SERVED and (questions := open_questions(session.home(), entry.session.session)):
        what = "1 question waits" if questions == 1 else f"{questions} questions wait"
        notes.append(f"{where}: {what} for an answer: bonobofs ask list")
    if entry.leases is not None:
        notes.append(f"{where}: the leases are unknown, so every change of the source is refused: {entry.leases}")
    if entry.caches is not None:
        notes.append(f"{where}: {entry.caches}")
    return notes


def _remedy(entry: session.SessionStatus) -> str:
    record = entry.session
    where = record.mountpoint or record.source
    if entry.state is SessionState.STOPPED:
        return (
            f"{where}: its server is stopped, and everything in the mount waits; continue it: kill -CONT {record.pid}"
        )
    if entry.state is SessionState.SOURCE_REMOVED:
        return (
            f"{where}: {record.source} was removed, renamed or replaced, and the mount shows the old directory; "
            f"run bonobofs umount {where}, then mount again"
        )
    if entry.state is SessionState.ENDING:
        return f"{where}: unmounted, but the server has not ended; bonobofs umount {where} ends it and waits"
    if entry.state is SessionState.DEAD:
        return f"{where}: its server is gone; run bonobofs mount again, or bonobofs umount {where}"
    return f"{where}: ended without a closing entry; run bonobofs mount again, or look: bonobofs audit verify"


def _row(entry: session.SessionStatus) -> tuple[str, ...]:
    record = entry.session
    pid = str(record.pid) if record.pid is not None and entry.state in {*session.SERVED, SessionState.ENDING} else "-"
    return (
        entry.state,
        record.mountpoint or "-",
        record.source,
        record.agent,
        record.role,
        pid,
        record.transport,
        record.policy.origin,
    )


def _as_document(entry: session.SessionStatus, repository: Kept | None) -> dict[str, Any]:
    plain = {**document_of(entry.session), "state": entry.state.value}
    plain |= {"watch": entry.watch, "policy_error": entry.policy_error, "leases": entry.leases, "caches": entry.caches}
    images = entry.images
    plain["old_contents"] = None if images is None else {"bytes": images[0], "max_total": images[1]}
    plain["kept"] = None if repository is None else repository._asdict()
    notes = _notes(entry)
    if notes:
        plain["note"] = " ".join(notes)
    return plain


def shell(
    mountpoint: Annotated[str, Argument(metavar="MOUNTPOINT", help="A directory on which bonobofs mount was run.")],
    command: Annotated[
        list[str] | None, Argument(metavar="-- COMMAND...", help="What to run instead of the shell, after --.")
    ] = None,
) -> None:
    """Start a shell in a mount. Its `git` and `bd` are the session's own programs.

    Commands that only read run the real git. The shell sets the CLEO_* variables for programs that read them.

    \b
    Examples:
      bonobofs shell ~/work
      bonobofs shell ~/work -- git commit -m "Say more"
    """
    session.enter_shell(session.home(), Path(os.path.abspath(mountpoint)), command or [])


def mark(
    name: Annotated[str, Argument(metavar="NAME", help="A name for the turn, such as the task.")],
    json: Annotated[bool, Option("--json", help="One JSON document.")] = False,
) -> None:
    """Begin a turn of the session in whose mount you are: the unit of audit report --turn and of undo.

    A pause of ten seconds without a change begins a turn too, unless the hooks of an agent mark its turns.

    \b
    Example:
      bonobofs mark "rename the parser"
    """
    called = session.callable_session(session.home(), Path.cwd())
    if called is None:
        raise UsageError("no mount of a session that you may call is here; run this in the mount")
    turn: dict[str, str] = call(called.directory, "mark", name=name)
    if json:
        document(turn)
    else:
        say(turn["turn"])
