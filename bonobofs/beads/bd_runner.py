"""Run the installed bd: find the binary, prepare its environment, hold the lock, limit its time, parse its output.

Binary: `$BONOBOFS_BD`, else the first `bd` on PATH. A binary below a directory that agents can write is refused.

Environment: bd gets a HOME, a working directory and a git configuration of its own, and PATH without directories that
agents can write. No `.beads` and no git repository lies above its working directory. bd runs programs that files in
`.beads` name. Therefore root runs bd as the owner of `.beads`.

Lock: one call of bd at a time for each `.beads`, across threads and processes. bd's own lock waits without a limit, and
admits other processes between two calls that belong together. Each bd inherits the descriptor of the lock, so the lock
stays held until that bd has ended, even if its caller was killed. A waiter kills a bd whose caller is gone and whose
time limit has passed.

Output: bd prints JSON bare or in an envelope, and errors as JSON or text on either stream. Notices may surround both.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypedDict

from bonobofs.errors import BeadsError, UsageError
from bonobofs.policy.request import Principal
from bonobofs.system import mounts, processes
from bonobofs.system.locks import lock, never
from bonobofs.system.paths import is_within

GRACE: Final = 2.0
"""Seconds between asking a bd that is out of time to end, which it does without a half-stored issue, and ending it."""
OLDEST: Final = (1, 0, 4)
"""The first version that keeps everything in its database alone; before, files beside it changed issues."""
BEFORE: Final = (2,)
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Program:
    """bd, for one `.beads` and one agent, where `around` lets it run."""

    def __init__(self, path: Path, beads: Path, around: Surroundings, agent: Principal, limit: float) -> None:
        """`limit`: seconds for one call."""
        self.path: Final = path
        self._around: Final = around
        self._limit: Final = limit
        self._bare: Final = {
            "PATH": around.path,
            "HOME": str(around.home),
            "LC_ALL": "C.UTF-8",
            "BEADS_DIR": str(beads),
            "BD_NON_INTERACTIVE": "1",
            "BD_NO_HOOKS": "1",
            "BD_NO_PAGER": "1",
            # bd takes this for the owner of what it creates.
            "GIT_AUTHOR_EMAIL": f"{agent.id}@bonobofs.invalid",
            "GIT_CEILING_DIRECTORIES": str(around.cwd.parent),
            "GIT_CONFIG_GLOBAL": str(around.configuration),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
        }
        self._environment: Final = {**self._bare, "BD_JSON_ENVELOPE": "1"}

    def run(self, arguments: Sequence[str], lock: Lock, *, bare: bool = False) -> Output:
        """One call; `bare`: its JSON is as people's tools read it. When this returns no process of it is left.

        bd holds the lock too. UsageError: the arguments are too long, or hold NUL; BeadsError: it cannot be started.
        """
        with _Stream() as stdout, _Stream() as stderr:
            try:
                started = subprocess.Popen(
                    [self.path, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout.descriptor,
                    stderr=stderr.descriptor,
                    cwd=self._around.cwd,
                    env=self._bare if bare else self._environment,
                    pass_fds=(lock.descriptor,),
                    start_new_session=True,
                    **self._around.ids,
                )
            except ValueError as error:
                raise UsageError(f"bd cannot be told that: {error}") from error
            except OSError as error:
                if error.errno == errno.E2BIG:
                    raise UsageError("bd cannot be told so long a text; shorten it to 100 KB") from error
                raise BeadsError(f"{self.path} cannot be started: {error.strerror}; {INSTALL}") from error
            in_time = _await_end(started, self._limit, lock)
            return Output(started.returncode if in_time else None, stdout.text(), stderr.text())

    def check_version(self, lock: Lock) -> str:
        """The version, once it is known to be one that keeps what we rely on; else BeadsError."""
        output = self.run(["version", "--json"], lock)
        told = payload(output)
        word = told.get("version") if isinstance(told, dict) else output.stdout
        numbers = _VERSION.search(word) if isinstance(word, str) and output.status == 0 else None
        if numbers is None:
            why = complaint(output) or "it does not say"
            raise BeadsError(f"{self.path} does not tell its version ({why}); {INSTALL}")
        version = tuple(map(int, numbers.groups()))
        if not OLDEST <= version < BEFORE:
            raise BeadsError(f"{self.path} is bd {numbers.group()}, which is not supported; {INSTALL}")
        return numbers.group()


class _Stream:
    """Where bd writes. Not a pipe: a program that outlived bd would keep that open, and we would wait for it."""

    def __init__(self) -> None:
        self.descriptor: Final = os.memfd_create("bd")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def text(self) -> str:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0).decode("utf-8", "replace")


def _await_end(started: subprocess.Popen[bytes], limit: float, lock: Lock) -> bool:
    """Wait for it and end its process group, in any case; false when it took too long."""
    try:
        lock.note(started.pid, limit + GRACE)
        in_time = _has_ended(started.pid, limit)
        if not in_time:
            _signal_group(started.pid, signal.SIGTERM)
            _has_ended(started.pid, GRACE)
    finally:
        # Its number is not free for others before it is waited for, so no other group can be meant.
        _signal_group(started.pid, signal.SIGKILL)
        started.wait()
    return in_time


def _has_ended(pid: int, seconds: float) -> bool:
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(handle)


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


_DECODER: Final = json.JSONDecoder()
_MESSAGE_LIMIT: Final = 300
"""Characters of a complaint that are told; an unknown flag is answered with fifty lines."""


class Output(NamedTuple):
    """How one call of bd ended."""

    status: int | None
    """Its exit status, or the negative number of a signal; None: it was ended at its time limit."""
    stdout: str
    stderr: str


def payload(output: Output) -> Any:
    """The JSON on standard output, without its envelope; None where there is none. An error is its object."""
    return _payload(output.stdout)


def complaint(output: Output) -> str:
    """Why bd says that it failed, on one line; "" where it says nothing of the kind."""
    for stream in (output.stdout, output.stderr):
        found = _payload(stream)
        if isinstance(found, dict) and "error" in found:
            return _line(str(found.get("message") or found["error"]))
    if output.status == 0:
        return ""
    # What was wrong stands before the usage, or behind the notices.
    lines = [line.strip() for line in output.stderr.partition("\nUsage:")[0].splitlines() if line.strip()]
    wrong = [line for line in lines if line.lower().startswith("error")]
    told = (wrong or lines or [""])[0 if wrong else -1]
    return _line(told.removeprefix("Error: "))


def notices(output: Output) -> tuple[str, ...]:
    """What bd said beside its answer, a line each."""
    lines = output.stderr.splitlines() if _payload(output.stderr) is None else ()
    return tuple(_line(line) for line in lines if line.strip())


def _payload(text: str) -> Any:
    """The longest JSON that begins a line: what a notice holds of it is shorter than an answer."""
    found: Any = None
    longest = start = 0
    while (start := _opening(text, start)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            if end - start > longest:
                found, longest = value, end - start
        start = end
    if isinstance(found, dict) and found.keys() >= {"data", "schema_version"}:
        return found["data"]
    return found


def _opening(text: str, start: int) -> int:
    """Where the next line begins that could be JSON: an object or an array opens with it; -1 for none."""
    while start <= len(text):
        if text[start : start + 1] in ("{", "[") and (start == 0 or text[start - 1] == "\n"):
            return start
        end = text.find("\n", start)
        if end < 0:
            return -1
        start = end + 1
    return -1


def _line(text: str) -> str:
    text = "".join(character if character.isprintable() else " " for character in text).strip()
    return text if len(text) <= _MESSAGE_LIMIT else text[: _MESSAGE_LIMIT - 1] + "…"


_LINE: Final = 128


class Lock:
    """A lock that is held."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor: Final = descriptor
        """For reading alone: what bd is given of it tells nobody whom to end."""
        self._path: Final = path

    def note(self, pid: int, seconds: float) -> None:
        """Write down, for whoever waits, that this bd runs under the lock, and how long it may."""
        numbers = (os.getpid(), processes.start_time(os.getpid()), pid, processes.start_time(pid), _now() + seconds)
        notes = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(notes, " ".join(map(str, numbers)).ljust(_LINE).encode("ascii"), 0)
        finally:
            os.close(notes)


def lock_path(home: Path, beads: Path) -> Path:
    """The file of the lock; its directory is made. It is written when a bd is started, and touched when it is let go.

    OSError: there is no such `.beads`, or the directory cannot be made.
    """
    status = beads.stat()
    directory = home / "beads" / "locks"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory / f"{status.st_dev:x}-{status.st_ino:x}"


@contextmanager
def hold_lock(home: Path, beads: Path, seconds: float) -> Iterator[Lock]:
    """Hold the lock of this `.beads`. BeadsError: others have held it for all of these seconds, or there is none."""
    try:
        path = lock_path(home, beads)
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise BeadsError(f"the lock of {beads} cannot be had: {error.strerror}") from error
    try:
        _wait(descriptor, beads, seconds)
        try:
            yield Lock(descriptor, path)
        finally:
            os.utime(descriptor)
            # Said outright, and not left to the closing: what bd may have started must not keep it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock of this file. OSError: there is none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        lock(descriptor, shared=True, retry=never)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _wait(descriptor: int, beads: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds

    def retry() -> bool:
        _end_orphan(descriptor)
        return time.monotonic() < deadline

    try:
        lock(descriptor, retry=retry)
    except BlockingIOError:
        raise BeadsError(f"{beads} has been in use by other calls for {seconds:.0f} seconds; try again") from None


def _end_orphan(descriptor: int) -> None:
    """End a bd whose caller is gone and whose time is over."""
    words = os.pread(descriptor, _LINE, 0).decode("ascii", "replace").split()
    try:
        caller, called, pid, started = map(int, words[:4])
        until = float(words[4])
    except (ValueError, IndexError):
        return
    if _now() < until or processes.is_alive(caller, called) or processes.start_time(pid) != started:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_CONFIGURATION: Final = "[beads]\n\trole = maintainer\n"
"""What git is configured with; without a role bd complains at every call."""
_FOR_OTHERS: Final = "/run"
"""Where root makes a directory for another user: nobody else can put anything above it."""


class Ids(TypedDict, total=False):
    """Whom bd runs as, where that is another user than ours."""

    user: int
    group: int
    extra_groups: list[int]


class Surroundings(NamedTuple):
    """What bd is given beside its arguments."""

    home: Path
    cwd: Path
    configuration: Path
    """Git's, for this user."""
    path: str
    ids: Ids


@contextmanager
def surroundings(home: Path, beads: Path) -> Iterator[Surroundings]:
    """Directories for bd, in the state directory, or for the time of this where bd may not reach that.

    BeadsError: they cannot be made, or `.beads` is gone.
    """
    path = search_path(home, beads)
    try:
        owner = beads.stat()
        if os.geteuid() != 0 or owner.st_uid == 0:
            own, made = None, _made(home / "beads", path, {})
        else:
            own = Path(tempfile.mkdtemp(prefix="bonobofs-bd-", dir=_FOR_OTHERS))
            made = _made(own, path, _ids(owner))
            for each, mode in ((own, 0o755), (made.cwd, 0o755), (made.configuration, 0o644)):
                each.chmod(mode)
            os.chown(made.home, owner.st_uid, owner.st_gid)
    except OSError as error:
        raise BeadsError(f"there is no place for bd to run: {error}") from error
    try:
        yield made
    finally:
        if own is not None:
            shutil.rmtree(own)


def _made(directory: Path, path: str, ids: Ids) -> Surroundings:
    made = Surroundings(directory / "home", directory / "empty", directory / "gitconfig", path, ids)
    for each in (made.home, made.cwd):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not made.configuration.exists() or made.configuration.read_text(encoding="utf-8") != _CONFIGURATION:
        made.configuration.write_text(_CONFIGURATION, encoding="utf-8")
    return made


def _ids(owner: os.stat_result) -> Ids:
    try:
        user = pwd.getpwuid(owner.st_uid)
    except KeyError:
        return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    groups = os.getgrouplist(user.pw_name, user.pw_gid)
    return {"user": owner.st_uid, "group": user.pw_gid, "extra_groups": groups}


INSTALL: Final = (
    "install bd 1.0.5 or a later 1.x from the releases of Beads and put it on PATH, or name it in BONOBOFS_BD"
)


def find_program(home: Path, beads: Path) -> Path:
    """`$BONOBOFS_BD`, else `bd` on PATH; BeadsError where there is none, or where agents could change it."""
    named = os.environ.get("BONOBOFS_BD")
    path = search_path(home, beads)
    found = shutil.which(named or "bd", path=path)
    if found is None and named:
        raise BeadsError(f"BONOBOFS_BD names {named}, which is no program; {INSTALL}")
    if found is None:
        closed = "" if path == os.environ.get("PATH") else " outside of the directories that agents can write"
        raise BeadsError(f"there is no bd on PATH{closed}; {INSTALL}")
    if _is_below(os.path.realpath(found), _of_agents(home, beads)):
        raise BeadsError(f"{found} lies where agents can write, and is not run; {INSTALL}")
    return Path(found).absolute()


def search_path(home: Path, beads: Path) -> str:
    """PATH without relative directories, and without what an agent could put there."""
    closed = _of_agents(home, beads)
    absolute = [each for each in os.environ.get("PATH", os.defpath).split(":") if os.path.isabs(each)]
    # As it is written first: what hangs in a dead mount is not to be looked at.
    named = [each for each in absolute if not _is_below(os.path.normpath(each), closed)]
    return ":".join(each for each in named if not _is_below(os.path.realpath(each), closed))


def _of_agents(home: Path, beads: Path) -> list[str]:
    """Our shims and worktrees, this workspace, and what is mounted."""
    return [str(home), str(beads.parent), *(str(mount.mountpoint) for mount in mounts.bonobofs_mounts())]


def _is_below(path: str, tops: list[str]) -> bool:
    return any(is_within(path, top) for top in tops)
