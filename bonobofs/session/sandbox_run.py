"""`run`: mount a source, run one command in the sandbox on it, unmount.

A second process, the keeper, unmounts. It ends with the launcher, also when the launcher is killed: the kernel then
kills the sandbox, and the keeper removes the mount and closes the record.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import secrets
import select
import shutil
import signal
import stat
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from bonobofs.errors import BonobofsError, MountError, UsageError, reason
from bonobofs.policy.document import PolicyDocument, RunTable
from bonobofs.sandbox import bwrap_arguments, control_group, environment, last_step
from bonobofs.sandbox.bwrap_arguments import Account, View
from bonobofs.sandbox.sandbox_process import CommandUser, EgressProcess, ResourceLimits, SandboxProcess, find_bwrap
from bonobofs.sandbox.terminal_relay import TerminalRelay
from bonobofs.session import mount_checks, worktrees
from bonobofs.session.agent_shell import provision
from bonobofs.session.mount_setup import Guest, MountedSession, MountRequest, find_guest, remove_session, start
from bonobofs.session.protected_run import ProtectedRun, Protection
from bonobofs.session.registration import choose_policy
from bonobofs.session.session_list import CallableSession
from bonobofs.session.unmount import unmount_session
from bonobofs.state.home import head_path, inside_directory, session_directory
from bonobofs.state.sessions import live_at, read_all
from bonobofs.system import mounts, syscalls
from bonobofs.system.locks import locked_if_free, try_once
from bonobofs.system.paths import is_within
from bonobofs.system.processes import is_stopped

TIMED_OUT: Final = 124
_SECONDS_TO_END: Final = 5.0
"""Seconds for the command to end after a signal, before it is killed."""
_SECONDS_TO_RETRY: Final = 0.05
_SECONDS_TO_FAIL: Final = 1.0
"""Seconds for bubblewrap to end after its network namespace has gone."""
_FOREVER: Final = float("inf")
_FORWARDED: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


class RunRequest(NamedTuple):
    """The arguments of `run`."""

    source: Path
    command: Sequence[str]
    directory: Path
    """Working directory of the caller. The command begins there if it is in the source, else in the source."""
    agent: str | None = None
    role: str | None = None
    chain: str | None = None
    policy: Path | None = None
    issue: str | None = None
    """Issue whose worktree is the workspace; `source` is a directory of its repository."""
    user: str | None = None
    """As root: name or uid of the user of the command."""
    env: Sequence[str] = ()
    """Names of variables of the caller that pass, besides those of the policy."""
    protection: Protection | None = None


class _Workspace(NamedTuple):
    """A mount for a command. The keeper removes `mountpoint` at the end, unless it is that of a worktree."""

    mounted: MountedSession
    mountpoint: Path
    shown_as: Path
    """The path of the mount in the sandbox."""


def run(home: Path, request: RunRequest, report: Callable[[str], None]) -> int:
    """Run a command in the sandbox and return its exit status. `report` gets sentences for the operator.

    Returns 128 and the number for a signal, 127 if there is no such command, 126 if it cannot be run, 124 after its
    time limit, and 77 after a violation of `request.protection`. BonobofsError: the sandbox or one of its layers is not
    available, and the command has not run.
    """
    find_bwrap()
    if last_step.landlock_abi() < last_step.OLDEST_ABI:
        raise MountError(
            "the kernel has no Landlock, which the sandbox needs; use Linux 5.19 or later, with landlock in the list "
            "of /sys/kernel/security/lsm (boot parameter lsm=)"
        )
    guest = _guest(request.user)
    source = mount_checks.resolve(request.source, "source", allow_writable_parents=False)
    repository = None if request.issue is None else worktrees.find_repository(home, source)
    if repository is not None:
        source = repository.top
    policy = PolicyDocument.model_validate(choose_policy(home, request.policy, source).plain)
    account = _account(guest)
    _check_source(source, account)
    for directory in repository or ():
        _check_hidden(directory, _read_paths(policy.run, account))
    with (
        ProtectedRun(home, request.protection, report) as protected,
        contextlib.ExitStack() as locks,
        _Keeper(home) as keeper,
        contextlib.closing(EgressProcess()) as egress,
    ):
        workspace = _mount(home, request, source, guest, keeper)
        for text in workspace.mounted.notes:
            report(text)
        view = _view(home, workspace, account, policy.run, request)
        if view.kept_home:
            locks.enter_context(_lock_kept_home(view, workspace.mounted.session.agent))
        variables = _environment(home, workspace, view, [*policy.run.env, *request.env])
        _check_command(request.command[0], view)
        record = workspace.mounted.session
        egress.configure(session_directory(home, record.session), None if guest is None else guest.uid)
        protected.begin(Path(record.source), record.session)
        status = _Runner(keeper, view, policy, egress, report).run(request.command, variables, guest)
    return protected.status(status)


def _guest(name: str | None) -> Guest | None:
    if os.geteuid() != 0:
        return None if name is None else find_guest(name)
    named = name or os.environ.get("SUDO_UID")
    if not named:
        raise UsageError("run never starts a command as root; name its user: --user NAME")
    return find_guest(named)


def _account(guest: Guest | None) -> Account:
    uid, gid = (os.geteuid(), os.getegid()) if guest is None else (guest.uid, guest.gid)
    try:
        found = pwd.getpwuid(uid)
        name, home, shell = found.pw_name, found.pw_dir, found.pw_shell
    except KeyError:
        name, home, shell = f"uid-{uid}", "", ""
    if guest is None:
        home = os.environ.get("HOME") or home
    home = os.path.realpath(home or "/")
    if home == "/":
        home = f"/home/{name}"
    return Account(name, uid, gid, home, shell if os.path.exists(shell) and "nologin" not in shell else "/bin/sh")


def _check_source(source: Path, account: Account) -> None:
    if is_within(account.home, source):
        raise UsageError(f"the home directory {account.home} lies inside the source; name a directory below it")
    for path in bwrap_arguments.own_code():
        if is_within(path, source):
            raise MountError(
                f"bonobofs itself runs from {path}, inside the source, where the agent could change it; install it "
                "elsewhere, for instance with pipx"
            )


def _check_hidden(directory: Path, read: Sequence[str]) -> None:
    """Raise UsageError if the sandbox would show more of a repository than its worktree."""
    for path in (*map(os.path.realpath, bwrap_arguments.SYSTEM), *bwrap_arguments.own_code(), *read):
        if is_within(directory, path) or is_within(path, directory):
            raise UsageError(
                f"the sandbox shows {path}, which covers the repository {directory} or lies inside it, and --issue "
                "shows only a worktree; move the repository, or change read of [run] in the policy"
            )


def _read_paths(policy: RunTable, account: Account) -> list[str]:
    return [os.path.realpath(_expand(path, account)) for path in policy.read]


def _mount(home: Path, request: RunRequest, source: Path, guest: Guest | None, keeper: _Keeper) -> _Workspace:
    if request.issue is not None:
        return _mount_worktree(home, request, source, guest, keeper)
    # The mount lets the user of the command search both.
    for name in ("runs", "homes"):
        (home / name).mkdir(mode=0o700, exist_ok=True)
    mountpoint = home / "runs" / secrets.token_hex(8)
    mountpoint.mkdir(mode=0o700)
    keeper.tell(mountpoint=str(mountpoint), removes=True)
    order = MountRequest(
        source,
        mountpoint,
        agent=request.agent or (None if guest is None else guest.name),
        role=request.role,
        policy=request.policy,
        chain=request.chain,
        user=None if guest is None else str(guest.uid),
        workspace=source,
    )
    return _Workspace(start(home, order), mountpoint, source)


def _mount_worktree(home: Path, request: RunRequest, source: Path, guest: Guest | None, keeper: _Keeper) -> _Workspace:
    if request.agent is None or request.issue is None:
        raise UsageError("--issue needs --agent: a worktree belongs to an agent")
    if guest is not None:
        raise UsageError("a worktree belongs to the user who makes it; use --issue as that user, without root")
    wanted = worktrees.WorktreeRequest(
        source,
        request.issue,
        request.agent,
        request.role,
        request.policy,
        before_mount=lambda work: keeper.tell(mountpoint=str(work)),
    )
    added = worktrees.add(home, wanted)
    if added.mounted is None:
        raise MountError(
            f"the worktree of {request.issue} is already mounted; unmount it first: bonobofs umount {added.work}"
        )
    return _Workspace(added.mounted, added.work, added.work)


def _view(home: Path, workspace: _Workspace, account: Account, policy: RunTable, request: RunRequest) -> View:
    session = workspace.mounted.session
    shown = workspace.shown_as
    here = os.path.realpath(request.directory)
    read = _read_paths(policy, account)
    for path in read:
        for forbidden, what in ((shown, "source"), (home, "state directory")):
            if is_within(path, forbidden) or is_within(forbidden, path):
                raise UsageError(f"read of [run] names {path}, which covers the {what} {forbidden} or lies inside it")
    kept = home / "homes" / session.agent_id if policy.home == "kept" else None
    if kept is not None:
        kept.mkdir(mode=0o700, exist_ok=True)
        os.chown(kept, account.uid, account.gid)
    return View(
        account,
        workspace=str(shown),
        mount=str(workspace.mountpoint),
        directory=here if is_within(here, shown) else str(shown),
        inside=str(inside_directory(home, session.session)),
        state=str(home),
        read=(*bwrap_arguments.own_code(), *(path for path in read if os.path.lexists(path))),
        kept_home=str(kept or ""),
        tmp_size=int(policy.tmp),
    )


@contextlib.contextmanager
def _lock_kept_home(view: View, agent: str) -> Iterator[None]:
    """Hold the lock of the kept home, after a check of the paths that the sandbox shows below it.

    MountError: another run holds the lock. UsageError: the agent replaced a directory on the way to such a path.
    """
    with locked_if_free(f"{view.kept_home}.lock", retry=try_once) as is_locked:
        if not is_locked:
            raise MountError(
                f"another run uses the kept home of {agent}; wait until it ends, or name another agent: --agent"
            )
        for path in (*view.read, view.state, view.inside, view.workspace):
            if is_within(path, view.account.home):
                _check_kept_path(view.kept_home, os.path.relpath(path, view.account.home), os.path.isdir(path))
        yield


def _check_kept_path(kept: str, path: str, is_directory: bool) -> None:
    """Raise UsageError unless bubblewrap can make the mountpoint `path` in the kept home without leaving it.

    Bubblewrap follows symlinks on the way to a mountpoint, so a symlink of the agent would cover another path.
    """
    here, names = kept, path.split("/")
    for number, name in enumerate(names, 1):
        here = os.path.join(here, name)
        try:
            mode = os.lstat(here).st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{here} in the kept home cannot be read: {error.strerror}; remove it") from error
        is_place = number == len(names) and not is_directory
        if not (stat.S_ISREG(mode) if is_place else stat.S_ISDIR(mode)):
            what = "a symlink" if stat.S_ISLNK(mode) else "a directory" if stat.S_ISDIR(mode) else "no directory"
            raise UsageError(f"{here} is {what}, where the sandbox shows another path; remove it")


def _expand(path: str, account: Account) -> str:
    return account.home + path[1:] if path == "~" or path.startswith("~/") else path


def _environment(home: Path, workspace: _Workspace, view: View, names: Sequence[str]) -> dict[str, str]:
    session, account = workspace.mounted.session, view.account
    called = CallableSession(
        Path(view.inside), workspace.mountpoint, session.session, session.agent_id, session.role, session.source
    )
    fixed = {
        **provision(home, called, shown_as=view.workspace).env,
        "HOME": account.home,
        "USER": account.name,
        "LOGNAME": account.name,
        "SHELL": account.shell,
        "PWD": view.directory,
    }
    programs = os.path.join(view.inside, "bin")
    return environment.build(os.environ, names, fixed, programs, lambda path: not bwrap_arguments.hidden(path, view))


def _check_command(name: str, view: View) -> None:
    """Raise UsageError if the machine has the command and the sandbox hides it."""
    found = shutil.which(name) if "/" not in name or name.startswith("/") else None
    if found is None or name in ("git", "bd"):
        return
    paths = bwrap_arguments.hidden(found, view)
    if paths:
        directories = list(dict.fromkeys(map(os.path.dirname, paths)))
        raise UsageError(
            f"the sandbox does not show {' and '.join(paths)}; add to read of [run] in the policy, for instance "
            f"read = {json.dumps(directories)}"
        )


class _Keeper:
    """The process that unmounts when the launcher has ended, even if the launcher was killed."""

    def __init__(self, home: Path) -> None:
        self._home = home
        read, self._orders = os.pipe()
        self._answer, write = os.pipe()
        saved = termios.tcgetattr(0) if os.isatty(0) else None
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                syscalls.close_all_but({*([] if saved is None else [0]), 2, read, write})
                code = self._keep(read, write, saved)
            finally:
                os._exit(code)
        os.close(read)
        os.close(write)

    def tell(self, **facts: Any) -> None:
        """Send the keeper facts for the end: the mountpoint, or the first process of the sandbox."""
        with contextlib.suppress(BrokenPipeError):  # __exit__ reports that the keeper was killed
            os.write(self._orders, json.dumps(facts).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the session. MountError: it could not be ended."""
        self.tell(launcher_ends=True)
        os.close(self._orders)
        with os.fdopen(self._answer, "rb") as pipe:
            text = os.fsdecode(pipe.read())
        status = os.waitpid(self._pid, 0)[1]
        if text or status:
            raise MountError(text or "the mount may still exist; see bonobofs status")

    def _keep(self, read: int, write: int, saved: list[Any] | None) -> int:
        """Wait until the launcher ends, then end the mount and the sandbox. Runs in the keeper."""
        os.setsid()
        for number in (*_FORWARDED, signal.SIGTTOU, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        os.chdir("/")
        facts: dict[str, Any] = {}
        first = -1
        with os.fdopen(read, "rb") as pipe:
            for line in pipe:
                facts.update(json.loads(line))
                if "first" in facts and first < 0:
                    with contextlib.suppress(ProcessLookupError):
                        first = os.pidfd_open(facts["first"])
        if "launcher_ends" not in facts and saved is not None:
            with contextlib.suppress(termios.error):  # the operator's terminal is gone
                termios.tcsetattr(0, termios.TCSANOW, saved)
        if first >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
            select.select([first], [], [], _SECONDS_TO_END)
        if "group" in facts:
            with contextlib.suppress(OSError):  # an empty group limits nothing
                control_group.remove(Path(facts["group"]))
        if "mountpoint" in facts:
            try:
                self._unmount(Path(facts["mountpoint"]), removes="removes" in facts)
            except (BonobofsError, OSError) as error:
                os.write(write, os.fsencode(reason(error)))
        return 0

    def _unmount(self, mountpoint: Path, *, removes: bool) -> None:
        """Unmount. Remove the session if the launcher was killed before its server made a record."""
        begun = [one for one in read_all(self._home)[0] if one.mountpoint == str(mountpoint) and one.ended is None]
        until = time.monotonic() + _SECONDS_TO_END
        while mounts.at(mountpoint) or live_at(self._home, mountpoint) is not None:
            try:
                unmount_session(self._home, mountpoint)
            except MountError:  # the server or the probe of a killed launcher may use the mount still
                if time.monotonic() > until:
                    raise
                time.sleep(_SECONDS_TO_RETRY)
        for session in begun:
            if not head_path(self._home, session.session).exists() and live_at(self._home, mountpoint) is None:
                remove_session(self._home, session)
        if removes:
            mountpoint.rmdir()


class _Runner:
    """One command from its start in the sandbox to its end."""

    def __init__(
        self,
        keeper: _Keeper,
        view: View,
        policy: PolicyDocument,
        egress: EgressProcess,
        report: Callable[[str], None],
    ) -> None:
        self._keeper: Final = keeper
        self._view: Final = view
        self._policy: Final = policy.run
        self._allowed: Final = len(policy.network.allow)
        self._egress: Final = egress
        self._report: Final = report
        self._kill_at = _FOREVER
        self._timed_out = False
        self._has_ended = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self, command: Sequence[str], variables: dict[str, str], guest: Guest | None) -> int:
        """Return the exit status of the command."""
        relay = TerminalRelay(None if guest is None else guest.uid)
        identity = None
        if guest is not None:
            identity = CommandUser(guest.uid, guest.gid, os.getgrouplist(guest.name, guest.gid))
        sandbox = SandboxProcess(
            self._view, variables, streams=relay.streams, terminal=relay.terminal, identity=identity
        )
        self._keeper.tell(first=sandbox.pid)
        try:
            self._egress.attach(sandbox.pid)
        except MountError:
            sandbox.check(_SECONDS_TO_FAIL)
            raise
        group = self._make_group(sandbox)
        self._report(f"layers in force: {self._layers(group)}")
        relay.begin()
        # The command may run before its failure is known. A signal that arrives then waits for the handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        try:
            failure = sandbox.release(
                self._view, command, ResourceLimits(self._policy.processes, int(self._policy.memory or 0))
            )
            self._install_signals(sandbox, relay)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            if failure:
                code, _, text = failure.partition(" ")
                if code == "125":
                    raise MountError(f"the sandbox cannot start: {text}; run bonobofs doctor")
                relay.restore()
                self._report(text)
                return int(code)
            self._serve(sandbox, relay)
        finally:
            self._has_ended = True
            sandbox.kill()
            relay.drain({self._wake_read: self._on_signal}, lambda: self._kill_at + _SECONDS_TO_END)
        return TIMED_OUT if self._timed_out else sandbox.wait()

    def _make_group(self, sandbox: SandboxProcess) -> str:
        """Limit the processes of the sandbox together. Returns by what; "" if this machine has no control group."""
        memory, processes = int(self._policy.memory or 0), self._policy.processes
        name = f"bonobofs-{secrets.token_hex(8)}"
        place = control_group.find_place(name)
        if place is not None:
            self._keeper.tell(group=str(place))
            if control_group.make(place, sandbox.pids(), memory, processes):
                return "control group"
        if memory and control_group.make_scope(name, sandbox.pids(), memory, processes):
            return "systemd scope"
        return ""

    def _layers(self, group: str) -> str:
        parts = ["mount", "namespaces", f"Landlock ABI {last_step.landlock_abi()}", "seccomp"]
        parts.append(f"network of {self._allowed} entries" if self._allowed else "no network")
        parts.append(f"at most {self._policy.processes} processes")
        if self._policy.memory is not None:
            whose = f"of all processes ({group})" if group else "of each process (this machine offers no control group)"
            parts.append(f"at most {self._policy.memory} bytes of memory {whose}")
        return ", ".join(parts)

    def _serve(self, sandbox: SandboxProcess, relay: TerminalRelay) -> None:
        """Move bytes and pass signals on until the sandbox ends."""
        ends_at = _FOREVER if self._policy.time is None else time.monotonic() + self._policy.time
        ended = False
        others: dict[int, Callable[[], None]] = {}

        def on_end() -> None:
            nonlocal ended
            ended = True

        others[sandbox.exit_fd] = on_end
        others[self._wake_read] = self._on_signal
        others[self._egress.fd] = lambda: self._on_egress_end(others)

        while not ended:
            if relay.run(others, min(ends_at, self._kill_at), lambda: is_stopped(sandbox.command_pid)):
                sandbox.send(signal.SIGCONT)
            now = time.monotonic()
            if now >= ends_at:
                ends_at = _FOREVER
                self._timed_out = True
                self._kill_at = now + _SECONDS_TO_END
                sandbox.send(signal.SIGTERM)
            if now >= self._kill_at:
                sandbox.kill()

    def _on_signal(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _on_egress_end(self, others: dict[int, Callable[[], None]]) -> None:
        del others[self._egress.fd]
        self._report("the network of the sandbox has ended, and every connection is refused; see egress.log")

    def _install_signals(self, sandbox: SandboxProcess, relay: TerminalRelay) -> None:
        def forward(number: int, _: object) -> None:
            if number in _ENDING or self._has_ended:
                # A second signal does not wait.
                waits = self._kill_at == _FOREVER
                self._kill_at = time.monotonic() + (_SECONDS_TO_END if waits else 0)
                sandbox.send(signal.SIGCONT)
            sandbox.send(number)

        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in _FORWARDED:
            signal.signal(number, forward)
        signal.signal(signal.SIGWINCH, lambda *_: relay.copy_size())
