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
from bonobofs.system.locks import lock, try_once
from bonobofs.system.paths import is_within

GRACE: Final = 2.0
"""Seconds from SIGTERM, on which bd ends without a half-stored issue, to SIGKILL."""
OLDEST: Final = (1, 0, 4)
"""First supported version. In earlier ones, files beside the database can change issues."""
BEFORE: Final = (2,)
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Program:
    """bd for one `.beads` and one agent, run in the environment of `around`."""

    def __init__(self, path: Path, beads: Path, around: BdEnvironment, agent: Principal, limit: float) -> None:
        """`limit` is the time limit of one call, in seconds."""
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
            # bd stores this as the owner of new issues.
            "GIT_AUTHOR_EMAIL": f"{agent.id}@bonobofs.invalid",
            "GIT_CEILING_DIRECTORIES": str(around.cwd.parent),
            "GIT_CONFIG_GLOBAL": str(around.configuration),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
        }
        self._environment: Final = {**self._bare, "BD_JSON_ENVELOPE": "1"}

    def run(self, arguments: Sequence[str], lock: Lock, *, bare: bool = False) -> Output:
        """Run bd once, and kill its process group at the end. `bare`: print JSON without an envelope.

        bd inherits the lock. Raises UsageError for too long arguments or NUL, BeadsError if bd cannot be started.
        """
        with _Stream() as stdout, _Stream() as stderr:
            try:
                process = subprocess.Popen(
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
                raise UsageError(f"bd cannot take this argument: {error}") from error
            except OSError as error:
                if error.errno == errno.E2BIG:
                    raise UsageError("the text is too long for bd; shorten it to 100 KB") from error
                raise BeadsError(f"{self.path} cannot be started: {error.strerror}; {INSTALL}") from error
            in_time = _await_end(process, self._limit, lock)
            return Output(process.returncode if in_time else None, stdout.text(), stderr.text())

    def check_version(self, lock: Lock) -> str:
        """Return the version. Raises BeadsError if it is unknown or not supported."""
        output = self.run(["version", "--json"], lock)
        document = output_json(output)
        word = document.get("version") if isinstance(document, dict) else output.stdout
        numbers = _VERSION.search(word) if isinstance(word, str) and output.status == 0 else None
        if numbers is None:
            reason = error_line(output) or "it gives no reason"
            raise BeadsError(f"{self.path} does not print its version ({reason}); {INSTALL}")
        version = tuple(map(int, numbers.groups()))
        if not OLDEST <= version < BEFORE:
            raise BeadsError(f"{self.path} is bd {numbers.group()}, which is not supported; {INSTALL}")
        return numbers.group()


class _Stream:
    """A memory file for output of bd. A process that outlives bd would keep a pipe open and delay the caller."""

    def __init__(self) -> None:
        self.descriptor: Final = os.memfd_create("bd")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def text(self) -> str:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0).decode("utf-8", "replace")


def _await_end(process: subprocess.Popen[bytes], limit: float, lock: Lock) -> bool:
    """Wait for the process, then kill its process group. Returns False if it reached the time limit."""
    try:
        lock.note(process.pid, limit + GRACE)
        in_time = _has_ended(process.pid, limit)
        if not in_time:
            _signal_group(process.pid, signal.SIGTERM)
            _has_ended(process.pid, GRACE)
    finally:
        # The kernel does not reuse the pid before wait(), so this kills no other group.
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
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
"""Characters of an error that are reported: bd answers an unknown flag with fifty lines."""


class Output(NamedTuple):
    """The result of one call of bd."""

    status: int | None
    """Exit status, or the negative number of a signal; None if it reached its time limit."""
    stdout: str
    stderr: str


def output_json(output: Output) -> Any:
    """Return the JSON on standard output without its envelope, also of an error; None if there is none."""
    return _longest_json(output.stdout)


def error_line(output: Output) -> str:
    """Return the error that bd prints, on one line; "" if it prints none."""
    for stream in (output.stdout, output.stderr):
        document = _longest_json(stream)
        if isinstance(document, dict) and "error" in document:
            return _line(str(document.get("message") or document["error"]))
    if output.status == 0:
        return ""
    # The error stands before the usage text, or after the notices.
    lines = [line.strip() for line in output.stderr.partition("\nUsage:")[0].splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    line = (errors or lines or [""])[0 if errors else -1]
    return _line(line.removeprefix("Error: "))


def _longest_json(text: str) -> Any:
    """Return the longest JSON that starts a line, because JSON in a notice is shorter than an answer."""
    document: Any = None
    longest = start = 0
    while (start := _opening(text, start)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            if end - start > longest:
                document, longest = value, end - start
        start = end
    if isinstance(document, dict) and document.keys() >= {"data", "schema_version"}:
        return document["data"]
    return document


def _opening(text: str, start: int) -> int:
    """Return the index of the next line that starts with an object or array; -1 if there is none."""
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
    """The held lock of one `.beads`."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor: Final = descriptor
        """Read-only: bd inherits it, and must not choose the process that a waiter kills."""
        self._path: Final = path

    def note(self, pid: int, seconds: float) -> None:
        """Write the process of bd and its time limit in seconds to the lock file, for processes that wait."""
        numbers = (os.getpid(), processes.start_time(os.getpid()), pid, processes.start_time(pid), _now() + seconds)
        notes = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(notes, " ".join(map(str, numbers)).ljust(_LINE).encode("ascii"), 0)
        finally:
            os.close(notes)


def lock_path(home: Path, beads: Path) -> Path:
    """Return the path of the lock file, and create its directory. A start of bd writes the file, a release touches it.

    Raises OSError if the `.beads` does not exist or the directory cannot be created.
    """
    status = beads.stat()
    directory = home / "beads" / "locks"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory / f"{status.st_dev:x}-{status.st_ino:x}"


@contextmanager
def hold_lock(home: Path, beads: Path, seconds: float) -> Iterator[Lock]:
    """Hold the lock of this `.beads`. Raises BeadsError if it is not free within `seconds`, or cannot be opened."""
    try:
        path = lock_path(home, beads)
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise BeadsError(f"cannot open the lock of {beads}: {error.strerror}") from error
    try:
        _wait(descriptor, beads, seconds)
        try:
            yield Lock(descriptor, path)
        finally:
            os.utime(descriptor)
            # Unlock explicitly: a process that bd started can still have the descriptor open.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return True if a process holds the lock. Raises OSError if the file does not exist."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        lock(descriptor, shared=True, retry=try_once)
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
    """Kill a bd whose caller has exited and whose time limit has passed."""
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
"""Git configuration for bd. Without a role, bd warns at every call."""
_FOR_OTHERS: Final = "/run"
"""Where root creates the directories of a bd that runs as another user. Only root can write here."""


class Ids(TypedDict, total=False):
    """User and groups of bd, if it runs as another user; otherwise empty."""

    user: int
    group: int
    extra_groups: list[int]


class BdEnvironment(NamedTuple):
    """The directories, PATH and user of a bd."""

    home: Path
    cwd: Path
    configuration: Path
    """The global git configuration file."""
    path: str
    ids: Ids


@contextmanager
def bd_environment(home: Path, beads: Path) -> Iterator[BdEnvironment]:
    """Create directories for bd: in the state directory, or temporary ones if bd runs as another user.

    Raises BeadsError if they cannot be created, or if `.beads` does not exist.
    """
    path = search_path(home, beads)
    try:
        owner = beads.stat()
        if os.geteuid() != 0 or owner.st_uid == 0:
            temporary, around = None, _prepare(home / "beads", path, {})
        else:
            temporary = Path(tempfile.mkdtemp(prefix="bonobofs-bd-", dir=_FOR_OTHERS))
            around = _prepare(temporary, path, _ids(owner))
            for each, mode in ((temporary, 0o755), (around.cwd, 0o755), (around.configuration, 0o644)):
                each.chmod(mode)
            os.chown(around.home, owner.st_uid, owner.st_gid)
    except OSError as error:
        raise BeadsError(f"cannot create the directories for bd: {error}") from error
    try:
        yield around
    finally:
        if temporary is not None:
            shutil.rmtree(temporary)


def _prepare(directory: Path, path: str, ids: Ids) -> BdEnvironment:
    """Create the directories and the git configuration below `directory`."""
    around = BdEnvironment(directory / "home", directory / "empty", directory / "gitconfig", path, ids)
    for each in (around.home, around.cwd):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not around.configuration.exists() or around.configuration.read_text(encoding="utf-8") != _CONFIGURATION:
        around.configuration.write_text(_CONFIGURATION, encoding="utf-8")
    return around


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
    """Return `$BONOBOFS_BD`, else `bd` on PATH. Raises BeadsError if there is none, or if agents can write it."""
    chosen = os.environ.get("BONOBOFS_BD")
    path = search_path(home, beads)
    program = shutil.which(chosen or "bd", path=path)
    if program is None and chosen:
        raise BeadsError(f"BONOBOFS_BD names {chosen}, which is no program; {INSTALL}")
    if program is None:
        excluded = "" if path == os.environ.get("PATH") else " outside of the directories that agents can write"
        raise BeadsError(f"there is no bd on PATH{excluded}; {INSTALL}")
    if _is_below(os.path.realpath(program), _of_agents(home, beads)):
        raise BeadsError(f"{program} is not run, because agents can write it; {INSTALL}")
    return Path(program).absolute()


def search_path(home: Path, beads: Path) -> str:
    """Return PATH without relative directories and directories that agents can write."""
    excluded = _of_agents(home, beads)
    directories = [each for each in os.environ.get("PATH", os.defpath).split(":") if os.path.isabs(each)]
    # Compare the written path first: realpath can hang in a dead mount.
    for resolve in (os.path.normpath, os.path.realpath):
        directories = [each for each in directories if not _is_below(resolve(each), excluded)]
    return ":".join(directories)


def _of_agents(home: Path, beads: Path) -> list[str]:
    """Return the directories that agents can write: shims, worktrees, this workspace and all mounts."""
    return [str(home), str(beads.parent), *(str(mount.mountpoint) for mount in mounts.bonobofs_mounts())]


def _is_below(path: str, tops: list[str]) -> bool:
    return any(is_within(path, top) for top in tops)
