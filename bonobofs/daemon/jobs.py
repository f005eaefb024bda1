"""What the daemon does. Each part is stepped by a thread of its own, so that none waits for another."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from bonobofs.agent_mail.courier import Courier, Pace
from bonobofs.audit.index import Index
from bonobofs.audit.reader import trails_in
from bonobofs.errors import BonobofsError, StateError
from bonobofs.session.mail_settings import Settings, open_mailbox, settings_of
from bonobofs.session.retention import open_index, prune
from bonobofs.state.courier_cursors import CourierCursors
from bonobofs.state.database import Database, home_id
from bonobofs.state.home import session_directory
from bonobofs.state.sessions import load

_MOST: Final = 16
"""Servers that may hang at the same time."""


class Lanes:
    """One lane for each key. What is begun in a lane goes on until it is done, also over several calls of `go`."""

    def __init__(self, name: str) -> None:
        """No thread is started yet; `name` is theirs."""
        self._pool: Final = ThreadPoolExecutor(_MOST, thread_name_prefix=name)
        self._under_way: dict[str, Future[list[str]]] = {}
        self._said: dict[str, list[str]] = {}

    def go(self, work: Mapping[str, Callable[[], list[str]]], seconds: float) -> list[str]:
        """Begin each work whose lane is free, wait for all of it so long, and give what each said last.

        Whatever a work raises is raised here.
        """
        for key, do in work.items():
            if key not in self._under_way:
                self._under_way[key] = self._pool.submit(do)
        wait(self._under_way.values(), seconds)
        for key in [key for key, future in self._under_way.items() if future.done()]:
            self._said[key] = self._under_way.pop(key).result()
        return [said for key in work for said in self._said.get(key, ())]

    def close(self) -> None:
        """Wait for what is under way."""
        self._pool.shutdown(cancel_futures=True)


GoesOn = Callable[[], bool]
"""False: the daemon ends, and a step should soon."""


class Job(ABC):
    """One thing that is done again and again."""

    name: ClassVar[str]
    pause: ClassVar[float] = 0.5
    """Seconds between two steps."""

    def __init__(self, home: Path) -> None:
        """Nothing is opened yet: what cannot be opened is tried again with the next step."""
        self._home: Final = home
        self._open = contextlib.ExitStack()

    @abstractmethod
    def step(self, goes_on: GoesOn, /) -> str:
        """Do what there is to do, and say what stands in the way, in a sentence; "" when nothing does.

        Whatever it raises is told, what it has open is closed, and it is stepped again later.
        """

    def close(self) -> None:
        self._open.close()


class Indexing(Job):
    """Keeps the index up with the trails."""

    name = "index"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._index: Index | None = None
        self._redone: dict[str, None] = {}

    def step(self, goes_on: GoesOn) -> str:
        if self._index is None:
            self._index = self._open.enter_context(open_index(self._home))
        progress = self._index.catch_up(goes_on)
        self._redone |= dict.fromkeys(progress.redone)
        problems = list(progress.unread)
        if self._redone:
            problems.append(
                f"trails that are not those that were read before: {', '.join(self._redone)}; run bonobofs audit verify"
            )
        return "; ".join(problems)

    def close(self) -> None:
        super().close()
        self._index = None


class Retention(Job):
    """Compresses the trails of ended sessions and prunes the oldest."""

    name = "retention"
    pause = 30.0

    def step(self, goes_on: GoesOn) -> str:
        found = prune(self._home, goes_on=goes_on)
        kept = [f"the trail of session {name} is kept: {reason}" for name, reason in found.kept.items()]
        return "; ".join([*found.failures, *kept])


class Mailing(Job):
    """Carries each session's record to the Agent Mail that its policy names."""

    name = "mail"
    LONGEST_WAIT: Final = 30.0
    """Seconds after which a server that failed is tried again, at the most."""

    def __init__(self, home: Path, pace: Pace = Pace()) -> None:  # noqa: B008 - a constant
        super().__init__(home)
        self._pace = pace
        self._database: Database | None = None
        self._settings: dict[str, tuple[int, Settings | None]] = {}
        """By session, as its policy.json of that time has them."""
        self._lanes: Lanes
        self._rounds: dict[Settings, _Round] = {}

    def step(self, goes_on: GoesOn) -> str:
        if self._database is None:
            self._database = self._open.enter_context(Database.open(self._home))
            self._lanes = self._open.enter_context(contextlib.closing(Lanes(self.name)))
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
                self._rounds[settings] = _Round(self._home, settings, CourierCursors(self._database), self._pace)
        # One lane for each sender: two couriers at one mailbox, of a session whose policy changes, would not know of
        # each other's letters. One without trails forgets them, as another may carry them until they are its own again.
        lanes: dict[str, list[Callable[[], list[str]]]] = {}
        for settings, each in self._rounds.items():
            lanes.setdefault(settings.name, []).append(partial(each.go, trails.get(settings, {}), goes_on))
        work = {name: partial(_in_turn, rounds) for name, rounds in lanes.items()}
        return "; ".join([*problems, *self._lanes.go(work, self.pause)])

    def close(self) -> None:
        super().close()
        self._database = None
        self._rounds.clear()

    def _settings_of(self, session: str) -> Settings | None:
        """What the session's policy says, which may be loaded anew while it lives."""
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


def _in_turn(rounds: list[Callable[[], list[str]]]) -> list[str]:
    return [problem for go in rounds for problem in go()]


class _Round:
    """One courier, and when it goes again after a failure: others do not wait for it."""

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

    def go(self, trails: dict[str, Path], goes_on: GoesOn) -> list[str]:
        """Carry what is due, unless it is too early after a failure, and say what is wrong."""
        if time.monotonic() >= self._again_at:
            try:
                self._run(trails, goes_on)
            except BonobofsError as error:
                # The next one begins with what is on record here and there, and reads the token anew.
                self._courier = None
                self._problem = str(error)
                self._wait = min(max(2 * self._wait, 0.5), Mailing.LONGEST_WAIT)
                self._again_at = time.monotonic() + self._wait
            else:
                self._problem, self._wait = "", 0.0
        return [*filter(None, [self._problem]), *self._alarms]

    def _run(self, trails: dict[str, Path], goes_on: GoesOn) -> None:
        if self._courier is None:
            self._courier = Courier(
                self._settings.name,
                open_mailbox(self._home, self._settings),
                self._cursors,
                home_id(self._home),
                only_denials=self._settings.only_denials,
                pace=self._pace,
                tell=self._alarms.setdefault,
            )
        self._courier.run(trails, goes_on)
