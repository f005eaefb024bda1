"""The daemon's process: every part in a thread, until a signal ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final

from bonobofs.audit.reader import shown
from bonobofs.daemon.daemon_lock import alone
from bonobofs.daemon.jobs import Indexing, Job, Mailing, Retention
from bonobofs.daemon.reservation_mirror import Expiring, Mirroring
from bonobofs.errors import BonobofsError
from bonobofs.state.home import home, write_document
from bonobofs.system.processes import start_time

_LONGEST_PAUSE: Final = 10.0
_SECONDS_BETWEEN_LOOKS: Final = 1.0


def serve(directory: Path, ready: Callable[[], None] = lambda: None) -> None:
    """Be the daemon of a state directory until SIGTERM or SIGINT; `ready` is called once it is.

    A second signal ends it at once, as a crash would: what is under way then is found again by the next one. To be
    called in the main thread, which takes the signals. StateError where there is a daemon already.
    """
    ended = threading.Event()
    with alone(directory) as is_ours, _signals(ended):
        notes = _Notes(directory)
        threads = [
            threading.Thread(target=_keep, args=(part, ended, notes), name=part.name)
            for part in (
                Indexing(directory),
                Mailing(directory),
                Mirroring(directory),
                Expiring(directory),
                Retention(directory),
            )
        ]
        for thread in threads:
            thread.start()
        ready()
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            if not is_ours():
                notes.say(f"{directory} is not the state directory that it was; its daemon ends")
                ended.set()
        # However long they take: the lock is held as long as anything of this process works there.
        for thread in threads:
            thread.join()
        if is_ours():
            notes.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Be the daemon in the background: say `ready` on the descriptor that is named, or what is in the way."""
    (descriptor,) = sys.argv[1:] if arguments is None else arguments
    with os.fdopen(int(descriptor), "w", encoding="utf-8", errors="backslashreplace") as waiting:

        def say(text: str) -> None:
            # Whoever started it may have gone.
            with contextlib.suppress(BrokenPipeError):
                print(" ".join(text.split()), file=waiting, flush=True)

        try:
            serve(home(), lambda: say("ready"))
        except (BonobofsError, OSError) as error:
            say(f"error: {error}")
            return 1
    return 0


class _Notes:
    """How each part stands, in serve.json and, when it changes, as a line on standard error."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "serve.json"
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._problems: dict[str, str] = {}
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """One line in the log. It may hold what a server says, and a log is read on a terminal."""
        print(f"{datetime.now(UTC).isoformat(timespec='seconds')} {shown(text)}", file=sys.stderr, flush=True)

    def note(self, part: str, problem: str) -> None:
        with self._lock:
            if self._problems.get(part) == problem:
                return
            known = self._problems.get(part, "")
            self._problems[part] = problem
            if problem or known:
                self.say(f"{part}: {problem or 'all is well again'}")
            pid = os.getpid()
            document = {"pid": pid, "starttime": start_time(pid), "started": self._started, "parts": self._problems}
            with contextlib.suppress(OSError):
                write_document(self._path, document)

    def end(self) -> None:
        self._path.unlink(missing_ok=True)


def _keep(part: Job, ended: threading.Event, notes: _Notes) -> None:
    """Step a part until the end. The edge of its thread: no failure may end the others."""
    pause = part.pause
    while not ended.is_set():
        try:
            problem = part.step(lambda: not ended.is_set())
        except BonobofsError as error:
            problem, failed = str(error), True
        except Exception as error:  # noqa: BLE001 - the edge: whatever was not foreseen is told, and tried again
            for line in traceback.format_exc().splitlines():
                notes.say(f"{part.name}: {line}")
            problem, failed = f"{type(error).__name__}: {error}", True
        else:
            failed = False
        if failed:
            part.close()
        pause = min(2 * pause, _LONGEST_PAUSE) if failed else part.pause
        notes.note(part.name, problem)
        ended.wait(pause)
    part.close()


@contextlib.contextmanager
def _signals(ended: threading.Event) -> Iterator[None]:
    def end(_: int, __: FrameType | None) -> None:
        ended.set()
        for number in before:
            signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
