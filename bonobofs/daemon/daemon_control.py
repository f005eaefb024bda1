"""Starting the daemon in the background, ending it, and asking how it stands."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.daemon.daemon_lock import Daemon, running
from bonobofs.errors import StateError
from bonobofs.state.home import read_document
from bonobofs.system.processes import send, wait_for_end

SECONDS_TO_START: Final = 30.0
SECONDS_TO_END: Final = 60.0
LONGEST_LOG: Final = 4 * 1024 * 1024
"""Bytes of serve.log after which a new one is begun, with the next start; one is kept."""

_ROOT: Final = str(Path(__file__).resolve().parent.parent.parent)
# As for a server: what is loaded stays, and is not looked through.
_RUN: Final = (
    "import gc, sys; gc.set_threshold(50_000); sys.path.insert(0, sys.argv.pop(1)); "
    "from bonobofs.daemon.main import main; gc.freeze(); code = main(); gc.freeze(); sys.exit(code)"
)
# The parent ends at once, so that the daemon is nobody's child.
_RUN_DETACHED: Final = f"import os; os.fork() and os._exit(0); {_RUN}"


class Standing(NamedTuple):
    """How the daemon stands."""

    daemon: Daemon | None
    """None: there is none."""
    started: str = ""
    problems: dict[str, str] = {}  # noqa: RUF012 - never changed
    """By part, what stands in its way; "" where nothing does."""


def start(home: Path) -> Daemon:
    """Start the daemon in the background and return when it serves. StateError where it does not."""
    ready, ready_end = os.pipe()
    log = home / "serve.log"
    try:
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > LONGEST_LOG:
                log.rename(home / "serve.log.1")
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as errors:
            subprocess.run(
                [sys.executable, "-X", "utf8", "-c", _RUN_DETACHED, _ROOT, str(ready_end)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(ready_end,),
                cwd="/",
                env={**os.environ, "BONOBOFS_HOME": str(home)},
                start_new_session=True,
                check=True,
            )
    finally:
        os.close(ready_end)
    try:
        said = _said(ready)
    finally:
        os.close(ready)
    if said != "ready":
        raise StateError(said.removeprefix("error: ") or f"the daemon ended at once; what it said is in {log}")
    daemon = running(home)
    if daemon is None:
        raise StateError(f"the daemon ended at once; what it said is in {log}")
    return daemon


def stop(home: Path) -> Daemon | None:
    """End the daemon and wait until it is gone; None where there is none. StateError when it does not end."""
    daemon = running(home)
    if daemon is None:
        return None
    send(daemon.pid, daemon.starttime, signal.SIGTERM)
    if not wait_for_end(daemon.pid, daemon.starttime, SECONDS_TO_END):
        raise StateError(f"the daemon (pid {daemon.pid}) was told to end and has not yet; look at {home}/serve.log")
    return daemon


def standing(home: Path) -> Standing:
    """How the daemon of a state directory stands."""
    daemon = running(home)
    if daemon is None:
        return Standing(None)
    try:
        document = read_document(home / "serve.json")
    except FileNotFoundError:
        return Standing(daemon)
    if document.get("pid") != daemon.pid:
        return Standing(daemon)
    return Standing(daemon, str(document.get("started")), dict(document.get("parts", {})))


def _said(ready: int) -> str:
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    if not poll.poll(SECONDS_TO_START * 1000):
        return f"error: the daemon did not start in {SECONDS_TO_START:.0f} s"
    return os.read(ready, 4096).decode(errors="replace").strip()
