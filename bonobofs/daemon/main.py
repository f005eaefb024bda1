"""Run, start, stop and query the daemon: at most one per state directory, each job in a thread."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from bonobofs.daemon.jobs import IndexJob, MailJob, PeriodicJob, RetentionJob
from bonobofs.daemon.reservation_mirror import LeaseExpiryJob, ReservationJob
from bonobofs.errors import BonobofsError, StateError, reason
from bonobofs.session.launcher import ROOT, RUN
from bonobofs.state.home import home, read_document, write_document
from bonobofs.system.locks import locked, try_once
from bonobofs.system.processes import is_alive, send, start_time, wait_for_end
from bonobofs.system.terminal import escape

_LOCK: Final = "serve.lock"
_PID_FILE: Final = "serve.pid"


class Daemon(NamedTuple):
    """A running daemon."""

    pid: int
    starttime: int
    """Clock ticks since the boot. The kernel reuses process ids."""


@contextlib.contextmanager
def daemon_lock(home: Path) -> Iterator[Callable[[], bool]]:
    """Hold the lock of the daemon of a state directory. StateError: another daemon has it.

    Yields a function that returns False after the state directory was replaced.
    """
    with contextlib.ExitStack() as stack:
        try:
            handle = stack.enter_context(locked(home / _LOCK, retry=try_once))
        except BlockingIOError:
            other = running(home)
            which = f", pid {other.pid}" if other is not None else ""
            raise StateError(f"a daemon already serves {home}{which}; stop it first: bonobofs serve --stop") from None
        this = f"{os.getpid()} {start_time(os.getpid())}\n"
        os.ftruncate(handle, 0)
        os.pwrite(handle, this.encode(), 0)
        path = home / _PID_FILE
        path.write_text(this, encoding="ascii")
        try:
            yield lambda: _is_same(home / _LOCK, handle)
        finally:
            if _is_same(home / _LOCK, handle):
                path.unlink(missing_ok=True)
            os.ftruncate(handle, 0)


def running(home: Path) -> Daemon | None:
    """Return the daemon of a state directory, or None."""
    for name in (_PID_FILE, _LOCK):
        try:
            pid, starttime = map(int, (home / name).read_text(encoding="ascii").split())
        except (FileNotFoundError, ValueError):
            continue
        if is_alive(pid, starttime):
            return Daemon(pid, starttime)
    return None


def _is_same(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False


_LONGEST_PAUSE: Final = 10.0
_SECONDS_BETWEEN_LOOKS: Final = 1.0


def serve(directory: Path, ready: Callable[[], None] = lambda: None) -> None:
    """Run the daemon of a state directory until SIGTERM or SIGINT; call `ready` when it has started.

    A second signal ends the process at once, as a crash does; the next daemon continues its work. The caller is the
    main thread, which gets the signals. StateError: another daemon runs.
    """
    ended = threading.Event()
    # The handlers are set before the PID file exists: a reader of it may send a signal at once.
    with _signals(ended), daemon_lock(directory) as is_ours:
        notes = _JobStatus(directory)
        threads = [
            threading.Thread(target=_run_job, args=(job, ended, notes), name=job.name)
            for job in (
                IndexJob(directory),
                MailJob(directory),
                ReservationJob(directory),
                LeaseExpiryJob(directory),
                RetentionJob(directory),
            )
        ]
        for thread in threads:
            thread.start()
        ready()
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            if not is_ours():
                notes.say(f"{directory} was replaced; its daemon ends")
                ended.set()
        # Wait without a limit: the process holds the lock as long as a thread uses the state directory.
        for thread in threads:
            thread.join()
        if is_ours():
            notes.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon in the background: write `ready` or an error to the descriptor of the argument."""
    (descriptor,) = sys.argv[1:] if arguments is None else arguments
    with os.fdopen(int(descriptor), "w", encoding="utf-8", errors="backslashreplace") as waiting:

        def say(text: str) -> None:
            # The process that started the daemon may have ended.
            with contextlib.suppress(BrokenPipeError):
                print(" ".join(text.split()), file=waiting, flush=True)

        try:
            serve(home(), lambda: say("ready"))
        except (BonobofsError, OSError) as error:
            say(f"error: {reason(error)}")
            return 1
    return 0


class _JobStatus:
    """The state of each job: written to serve.json, and to standard error at each change."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "serve.json"
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._problems: dict[str, str] = {}
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """Write one line to the log, escaped: it can have the text of a server, and a terminal shows it."""
        print(f"{datetime.now(UTC).isoformat(timespec='seconds')} {escape(text)}", file=sys.stderr, flush=True)

    def note(self, job: str, problem: str) -> None:
        with self._lock:
            if self._problems.get(job) == problem:
                return
            known = self._problems.get(job, "")
            self._problems[job] = problem
            if problem or known:
                self.say(f"{job}: {problem or 'the problem is solved'}")
            pid = os.getpid()
            document = {"pid": pid, "starttime": start_time(pid), "started": self._started, "parts": self._problems}
            with contextlib.suppress(OSError):
                write_document(self._path, document)

    def end(self) -> None:
        self._path.unlink(missing_ok=True)


def _run_job(job: PeriodicJob, ended: threading.Event, notes: _JobStatus) -> None:
    """Run a job until the end. No failure of a job may end the other threads."""
    pause = job.pause
    while not ended.is_set():
        try:
            problem = job.step(lambda: not ended.is_set())
        except BonobofsError as error:
            problem, failed = str(error), True
        except Exception as error:  # noqa: BLE001 - the edge of the thread: log the failure, and try again
            for line in traceback.format_exc().splitlines():
                notes.say(f"{job.name}: {line}")
            problem, failed = f"{type(error).__name__}: {error}", True
        else:
            failed = False
        if failed:
            job.close()
        pause = min(2 * pause, _LONGEST_PAUSE) if failed else job.pause
        notes.note(job.name, problem)
        ended.wait(pause)
    job.close()


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


SECONDS_TO_START: Final = 30.0
SECONDS_TO_END: Final = 60.0
LONGEST_LOG: Final = 4 * 1024 * 1024
"""Size of serve.log in bytes above which the next start begins a new file. One old file is kept."""

# The parent exits at once, so that init adopts the daemon.
_RUN_DETACHED: Final = f"import os; os.fork() and os._exit(0); {RUN}"


class DaemonStatus(NamedTuple):
    """The state of the daemon and its jobs."""

    daemon: Daemon | None
    """None: no daemon runs."""
    started: str = ""
    problems: dict[str, str] = {}  # noqa: RUF012 - never changed
    """The problem of each job; "" if it has none."""


def start(home: Path) -> Daemon:
    """Start the daemon in the background; return when it serves. StateError: it does not start."""
    ready, ready_end = os.pipe()
    log = home / "serve.log"
    try:
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > LONGEST_LOG:
                log.rename(home / "serve.log.1")
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as errors:
            subprocess.run(
                [sys.executable, "-X", "utf8", "-c", _RUN_DETACHED, ROOT, __name__, str(ready_end)],
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
        answer = _read_ready(ready)
    finally:
        os.close(ready)
    if answer != "ready":
        raise StateError(answer.removeprefix("error: ") or f"the daemon ended at once; read {log}")
    daemon = running(home)
    if daemon is None:
        raise StateError(f"the daemon ended at once; read {log}")
    return daemon


def stop(home: Path) -> Daemon | None:
    """Stop the daemon and wait for its end; None: no daemon runs. StateError: it does not end."""
    daemon = running(home)
    if daemon is None:
        return None
    send(daemon.pid, daemon.starttime, signal.SIGTERM)
    if not wait_for_end(daemon.pid, daemon.starttime, SECONDS_TO_END):
        raise StateError(f"the daemon (pid {daemon.pid}) did not end after SIGTERM; read {home}/serve.log")
    return daemon


def status(home: Path) -> DaemonStatus:
    """Return the status of the daemon of a state directory."""
    daemon = running(home)
    if daemon is None:
        return DaemonStatus(None)
    try:
        document = read_document(home / "serve.json")
    except FileNotFoundError:
        return DaemonStatus(daemon)
    if document.get("pid") != daemon.pid:
        return DaemonStatus(daemon)
    return DaemonStatus(daemon, str(document.get("started")), dict(document.get("parts", {})))


def _read_ready(ready: int) -> str:
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    if not poll.poll(SECONDS_TO_START * 1000):
        return f"error: the daemon did not start in {SECONDS_TO_START:.0f} s"
    return os.read(ready, 4096).decode(errors="replace").strip()
