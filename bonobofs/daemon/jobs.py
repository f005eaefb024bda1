"""The jobs of the daemon. Each runs in a thread of its own, so that no job waits for another."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from bonobofs.agent_mail.courier import Courier, CourierCursors, Pace
from bonobofs.audit.index import AuditIndex
from bonobofs.audit.reader import trails_in
from bonobofs.errors import BonobofsError, StateError
from bonobofs.session import undo_service
from bonobofs.session.mail_settings import Settings, open_mailbox, settings_of
from bonobofs.session.retention import open_index, prune
from bonobofs.state.database import Database
from bonobofs.state.home import home_id, session_directory
from bonobofs.state.sessions import load

_MOST: Final = 16
"""Servers that can hang at the same time."""


class KeyedExecutor:
    """Runs at most one task for each key, so that a server that hangs delays no other. A task can outlast a `run`."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the threads. No thread is started yet."""
        self._pool: Final = ThreadPoolExecutor(_MOST, thread_name_prefix=name)
        self._under_way: dict[str, Future[list[str]]] = {}
        self._results: dict[str, list[str]] = {}

    def run(self, work: Mapping[str, Callable[[], list[str]]], seconds: float) -> list[str]:
        """Start the task of each idle key, wait for all tasks up to `seconds`, and return the last result of each.

        An exception of a task is raised here.
        """
        for key, task in work.items():
            if key not in self._under_way:
                self._under_way[key] = self._pool.submit(task)
        wait(self._under_way.values(), seconds)
        for key in [key for key, future in self._under_way.items() if future.done()]:
            self._results[key] = self._under_way.pop(key).result()
        return [line for key in work for line in self._results.get(key, ())]

    def close(self) -> None:
        """Wait for the running tasks."""
        self._pool.shutdown(cancel_futures=True)


Condition = Callable[[], bool]
"""Returns False when the daemon ends; a step then returns soon."""


class PeriodicJob(ABC):
    """A periodic job."""

    name: ClassVar[str]
    pause: ClassVar[float] = 0.5
    """Seconds between two steps."""

    def __init__(self, home: Path) -> None:
        """A step opens what it needs, and tries again after a failure."""
        self._home: Final = home
        self._opened = contextlib.ExitStack()
        self._database: Database | None = None

    @property
    def database(self) -> Database:
        """The database, open until `close`. StateError."""
        if self._database is None:
            self._database = self._opened.enter_context(Database.open(self._home))
        return self._database

    @abstractmethod
    def step(self, may_continue: Condition, /) -> str:
        """Do the pending work; return the problems as a sentence, or "".

        If it raises, the daemon reports the error, closes the job and runs it again later.
        """

    def close(self) -> None:
        """Close everything that a step has opened."""
        self._opened.close()
        self._database = None


class ServerJob(PeriodicJob):
    """A job that calls servers, each in a thread."""

    _executor: KeyedExecutor | None = None

    def _run_tasks(self, tasks: Mapping[str, Callable[[], list[str]]], problems: list[str]) -> str:
        """Run a task for each key; return `problems` and the problems of the tasks."""
        if self._executor is None:
            self._executor = KeyedExecutor(self.name)
        return "; ".join([*problems, *self._executor.run(tasks, self.pause)])

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()  # its tasks use the database
            self._executor = None
        super().close()


class IndexJob(PeriodicJob):
    """Updates the search index."""

    name = "index"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._index: AuditIndex | None = None
        self._redone: dict[str, None] = {}

    def step(self, may_continue: Condition) -> str:
        if self._index is None:
            self._index = self._opened.enter_context(open_index(self._home))
        progress = self._index.catch_up(may_continue)
        self._redone |= dict.fromkeys(progress.redone)
        problems = list(progress.unread)
        if self._redone:
            problems.append(f"these trails were replaced: {', '.join(self._redone)}; run `bonobofs audit verify`")
        return "; ".join(problems)

    def close(self) -> None:
        super().close()
        self._index = None


class RetentionJob(PeriodicJob):
    """Compresses the trails of ended sessions, and prunes the oldest trails and pre-images."""

    name = "retention"
    pause = 30.0

    def step(self, may_continue: Condition) -> str:
        found = prune(self._home, may_continue=may_continue)
        undo_service.expire_images(self._home)
        kept = [f"the trail of session {name} is kept: {reason}" for name, reason in found.kept.items()]
        return "; ".join([*found.failures, *kept])


class MailJob(ServerJob):
    """Sends the trail of each session to the Agent Mail server of its policy."""

    name = "mail"
    LONGEST_WAIT: Final = 30.0
    """Most seconds between two tries of a server that failed."""

    def __init__(self, home: Path, pace: Pace = Pace()) -> None:  # noqa: B008 - a constant
        super().__init__(home)
        self._pace = pace
        self._settings: dict[str, tuple[int, Settings | None]] = {}
        """By session: mtime of its policy.json, and the settings in it."""
        self._rounds: dict[Settings, _CourierRun] = {}

    def step(self, may_continue: Condition) -> str:
        database = self.database
        trails: dict[Settings, dict[str, Path]] = {}
        problems = []
        for path in trails_in(self._home / "trails"):
            try:
                settings = self._settings_of(path.stem)
            except StateError as error:
                problems.append(str(error))
                continue
            if settings is not None:
                trails.setdefault(settings, {})[path.stem] = path
        for settings in trails:
            if settings not in self._rounds:
                self._rounds[settings] = _CourierRun(self._home, settings, CourierCursors(database), self._pace)
        # One task for each sender: if a session's policy changes, two couriers share a mailbox and must not send at the
        # same time. A courier without trails discards its cursors, because another courier may move them.
        tasks: dict[str, list[Callable[[], list[str]]]] = {}
        for settings, each in self._rounds.items():
            tasks.setdefault(settings.name, []).append(partial(each.run, trails.get(settings, {}), may_continue))
        return self._run_tasks({name: partial(_run_each, rounds) for name, rounds in tasks.items()}, problems)

    def close(self) -> None:
        super().close()
        self._rounds.clear()

    def _settings_of(self, session: str) -> Settings | None:
        """Return the settings of a session's policy, which can be reloaded while the session lives."""
        try:
            written = (session_directory(self._home, session) / "policy.json").stat().st_mtime_ns
        except FileNotFoundError:
            return None
        known = self._settings.get(session)
        if known is None or known[0] != written:
            entered = load(self._home, session)
            found = None if entered is None else settings_of(self._home, home_id(self._home), entered)
            known = self._settings[session] = (written, found)
        return known[1]


def _run_each(rounds: list[Callable[[], list[str]]]) -> list[str]:
    return [problem for run in rounds for problem in run()]


class _CourierRun:
    """One courier, and the time of its next try after a failure."""

    def __init__(self, home: Path, settings: Settings, cursors: CourierCursors, pace: Pace) -> None:
        self._home = home
        self._settings = settings
        self._cursors = cursors
        self._pace = pace
        self._courier: Courier | None = None
        self._alarms: dict[str, None] = {}
        self._problem = ""
        self._wait = 0.0
        self._again_at = 0.0

    def run(self, trails: dict[str, Path], may_continue: Condition) -> list[str]:
        """Send the due letters, unless the last failure is too recent; return the problems."""
        if time.monotonic() >= self._again_at:
            try:
                self._run(trails, may_continue)
            except BonobofsError as error:
                # The next courier loads the cursors and reads the token again.
                self._courier = None
                self._problem = str(error)
                self._wait = min(max(2 * self._wait, 0.5), MailJob.LONGEST_WAIT)
                self._again_at = time.monotonic() + self._wait
            else:
                self._problem, self._wait = "", 0.0
        return [*filter(None, [self._problem]), *self._alarms]

    def _run(self, trails: dict[str, Path], may_continue: Condition) -> None:
        if self._courier is None:
            self._courier = Courier(
                self._settings.name,
                open_mailbox(self._home, self._settings),
                self._cursors,
                home_id(self._home),
                only_denials=self._settings.only_denials,
                pace=self._pace,
                warn=self._alarms.setdefault,
            )
        self._courier.run(trails, may_continue)
