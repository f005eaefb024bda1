"""A companion with two more calls: `change`, which is in flight until the test ends it, and `requests`."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from bonobofs.companion import main as process
from bonobofs.companion.calls import CALLS
from bonobofs.companion.session_context import SessionContext
from bonobofs.enforcement.authorizer import Caller
from bonobofs.ipc.channel import Channel, MessageKind
from bonobofs.policy.request import Operation, Request, WorkspacePath


def change(
    session: SessionContext,
    path: str,
    makes: list[str],
    until: str,
    touches: list[str] | None = None,
    by: str | None = None,
    alone: bool = False,
) -> None:
    """Authorize a change of `path`, create the files `makes`, and end when the file `until` exists.

    `alone`: it holds the change lock, so that no other call changes anything meanwhile.
    """
    request = Request(Operation.WRITE_FILE, WorkspacePath(path))
    details: dict[str, Any] = {name: value for name, value in (("touches", touches), ("by", by)) if value is not None}
    lock = session.change_lock if alone else nullcontext()
    with lock, session.guard.authorize(request, caller=Caller("change"), details=details):
        for name in makes:
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            Path(name).write_text("made", encoding="utf-8")
        while not Path(until).exists():
            time.sleep(0.005)


class CountingChannel(Channel):
    """Notes the requests to the server: the messages that have an id."""

    def send(self, kind: MessageKind, document: Any = None) -> bool:
        if isinstance(document, dict) and "id" in document:
            REQUESTS.append(kind.name)
        return super().send(kind, document)


REQUESTS: Final[list[str]] = []
vars(process)["Channel"] = CountingChannel


def requests(session: SessionContext) -> list[str]:
    """Return the kinds of the requests to the server since the last call of this name."""
    kinds = [*REQUESTS]
    REQUESTS.clear()
    return kinds


CALLS["change"] = change
CALLS["requests"] = requests
main = process.main
