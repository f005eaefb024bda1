"""`bonobofs status`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from bonobofs import session
from bonobofs.cli.output import document, note, say, table
from bonobofs.git.kept_repository import Kept
from bonobofs.session import State

_STYLES = {
    State.SERVING: "green",
    State.STOPPED: "red",
    State.SOURCE_REMOVED: "red",
    State.DEAD: "red",
    State.CRASHED: "red",
    State.ENDING: "yellow",
    State.ENDED: "dim",
}


def status(
    everything: Annotated[bool, typer.Option("--all", help="Also the sessions that have ended.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document: a list.")] = False,
) -> int:
    """List the sessions of this state directory and how each stands.

    \b
    serving  it works                     ending   unmounted, its record is being settled
    dead     its server is gone, and everything in the mount fails: mount again, or umount
    crashed  server and mount are gone without a closing entry: mount again, or audit verify
    stopped  its server is stopped by a signal, and everything in the mount waits
    source removed  the source was removed, renamed or replaced under the mount: umount

    Exit 1 when a session cannot be read: it is named on standard error, the others are listed.
    """
    home = session.home()
    kept = {one.session: one for one in session.all_kept(home)}
    found = [
        one
        for one in session.statuses(home, ended=True)
        if everything or one.state is not State.ENDED or one.session.session in kept
    ]
    unreadable = session.unreadable(home)
    for error in unreadable.values():
        note(str(error))
    if json:
        document([_plain(one, kept.get(one.session.session)) for one in found])
    else:
        _print(found)
        for each in kept.values():
            say(str(each))
    return 1 if unreadable or any(one.unreadable for one in found) else 0


def _print(found: list[session.Status]) -> None:
    if not found:
        say("nothing is mounted")
        return
    table(
        ("STATE", "MOUNTPOINT", "SOURCE", "AGENT", "ROLE", "PID", "TRANSPORT", "POLICY"),
        [_row(one) for one in found],
        [_STYLES[one.state] for one in found],
    )
    for one in found:
        for text in _notes(one):
            say(text)


def _notes(one: session.Status) -> list[str]:
    """What its operator should know, a sentence each."""
    where = one.session.mountpoint or one.session.source
    notes = [_remedy(one)] if one.state not in (State.SERVING, State.ENDED) else []
    if one.unwatched:
        notes.append(
            f"{where}: {one.unwatched}; a change behind the mount that is not watched may show a second late, and is "
            f"not entered in the record: {one.watch}"
        )
    if one.policy_error is not None:
        notes.append(
            f"{where}: the policy as it is now could not be loaded, the last good one holds: {one.policy_error}"
        )
    if one.unreadable is not None:
        notes.append(f"{where}: {one.unreadable}")
    if one.leases is not None:
        notes.append(f"{where}: it is not known what is leased, so every change is refused: {one.leases}")
    if one.caches is not None:
        notes.append(f"{where}: {one.caches}")
    return notes


def _remedy(one: session.Status) -> str:
    made = one.session
    where = made.mountpoint or made.source
    if one.state is State.STOPPED:
        return f"{where}: its server is stopped, and everything in the mount waits; continue it: kill -CONT {made.pid}"
    if one.state is State.SOURCE_REMOVED:
        return (
            f"{where}: {made.source} was removed, renamed or replaced, and the mount shows the old directory; "
            f"run bonobofs umount {where}, then mount again"
        )
    if one.state is State.ENDING:
        return f"{where}: unmounted, but the server has not ended; bonobofs umount {where} ends it and waits"
    if one.state is State.DEAD:
        return f"{where}: its server is gone; run bonobofs mount again, or bonobofs umount {where}"
    return f"{where}: ended without a closing entry; run bonobofs mount again, or look: bonobofs audit verify"


def _row(one: session.Status) -> tuple[str, ...]:
    made = one.session
    pid = str(made.pid) if made.pid is not None and one.state in {*session.SERVED, State.ENDING} else "-"
    return (
        one.state,
        made.mountpoint or "-",
        made.source,
        made.agent,
        made.role,
        pid,
        made.transport,
        made.policy.origin,
    )


def _plain(one: session.Status, kept: Kept | None) -> dict[str, Any]:
    plain = {**dataclasses.asdict(one.session), "state": one.state.value}
    plain |= {"watch": one.watch, "policy_error": one.policy_error, "leases": one.leases, "caches": one.caches}
    plain["kept"] = None if kept is None else kept._asdict()
    notes = _notes(one)
    if notes:
        plain["note"] = " ".join(notes)
    return plain
