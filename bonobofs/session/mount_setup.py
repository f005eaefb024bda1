"""From `mount` to a mount that answers, or to nothing at all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from bonobofs.audit import temp_cleanup
from bonobofs.audit.reader import trails_in
from bonobofs.audit.recovery import compare
from bonobofs.errors import BonobofsError, GitError, MountError
from bonobofs.git.branch_rules import identity, rules_of
from bonobofs.git.kept_repository import settle
from bonobofs.git.session_repository import Author, Owner, build
from bonobofs.ipc.session_config import RepositoryConfig, SessionConfig
from bonobofs.policy.engine import Policy
from bonobofs.policy.request import Principal
from bonobofs.session import agent_shell, launcher, mount_checks, transport_choice
from bonobofs.session.guest_user import Guest, find_guest, let_inside, open_way
from bonobofs.session.registration import RegisteredSession, SessionRequest, choose_policy, register_session
from bonobofs.session.retention import compress_ended
from bonobofs.session.session_list import unreadable, was_closed
from bonobofs.session.unmount import detach_all
from bonobofs.state import scratch_dir
from bonobofs.state.database import database_environment
from bonobofs.state.home import GUARD_SOCKET, head_path, inside_directory, session_directory, trail_path
from bonobofs.state.leases import Holder
from bonobofs.state.sessions import Session, live_at, lives, note_ends, read_all, save
from bonobofs.system import mounts, processes
from bonobofs.system.locks import locked

_SECONDS_TO_END = 5.0
_MOST_DIFFERENCES = 100_000


class MountRequest(NamedTuple):
    """What `mount` was asked for."""

    source: Path
    mountpoint: Path
    agent: str | None = None
    role: str | None = None
    policy: Path | None = None
    transport: str = "auto"
    allow_other: bool = False
    allow_writable_parents: bool = False
    """Accept a source and a mountpoint that another user can replace before they are opened."""
    keep_scratch: bool = False
    chain: str | None = None
    user: str | None = None
    """Name or number of a user beside root who may use the mount and call the session."""
    issue: str | None = None
    """What the work there is for; commits of the session name it."""
    policy_of: Path | None = None
    """The source whose policy applies, such as the repository of a worktree; None: `source`."""


class MountedSession(NamedTuple):
    """A session that serves, and what its operator should know, a sentence each."""

    session: Session
    notes: tuple[str, ...]
    why: str
    """Why the policy was chosen."""


def start(home: Path, order: MountRequest) -> MountedSession:
    """Mount in the background and return when the mount answers. On failure nothing is left of it; BonobofsError."""
    with _alone(home):
        drawn, config, earlier, notes = _prepare(home, order)
        session, mountpoint = drawn.session, config.mountpoint
        covered = len(mounts.at(Path(mountpoint)))
        served = False
        try:
            with launcher.Starting(session_directory(home, session.session) / "server.log", mountpoint) as starting:
                session = dataclasses.replace(session, pid=starting.pid, starttime=starting.starttime)
                save(home, session)
                failure = starting.serve(config._replace(ready_fd=starting.ready_fd))
            if failure:
                raise MountError(failure)
            served = True
            note_ends(home, earlier)
            failure = launcher.look(mountpoint)
            if failure:
                raise MountError(f"the mount on {mountpoint} did not answer ({failure}); it was taken off again")
        except BaseException:
            _undo(home, session, covered, served=served)
            raise
        compress_ended(home)
        return MountedSession(session, notes, drawn.policy.why)


def prepare_foreground(home: Path, order: MountRequest) -> tuple[MountedSession, Callable[[], NoReturn]]:
    """All but the serving itself: the session is on record with this process as its server.

    Calling what comes with it turns this process into the server.
    """
    # The mask survives exec and fork: a Ctrl-C before the server can end the mount cleanly waits until it can.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    with _alone(home):
        drawn, config, earlier, notes = _prepare(home, order)
        pid = os.getpid()
        session = dataclasses.replace(drawn.session, pid=pid, starttime=processes.start_time(pid))
        save(home, session)
        return MountedSession(session, notes, drawn.policy.why), partial(launcher.become, config, earlier)


def _prepare(home: Path, order: MountRequest) -> tuple[RegisteredSession, SessionConfig, list[str], tuple[str, ...]]:
    """The new session, what its server is told, the earlier sessions that it accounts for, and notes."""
    transport = transport_choice.choose(order.transport)
    source, mountpoint = (
        mount_checks.resolve(path, what, allow_writable_parents=order.allow_writable_parents)
        for path, what in ((order.source, "source"), (order.mountpoint, "mountpoint"))
    )
    notes = transport.notes + _clear(home, mountpoint, source=source)
    mount_checks.check(source, mountpoint, home)
    policy = choose_policy(home, order.policy, order.policy_of or source, store=True)
    notes += _standing(mountpoint) + _also_mounted(home, source)
    notes += tuple(f"A session that cannot be read is left out: {error}." for error in unreadable(home).values())
    scratch_dir.remove_stale(home)
    notes += tuple(f"{kept}." for kept in settle(home))
    earlier, differences = _look_back(home, source, policy.compiled)
    guest = None if order.user is None else find_guest(order.user)
    if guest is not None:
        open_way(home, guest)
    drawn = register_session(
        home,
        source=source,
        mountpoint=mountpoint,
        who=SessionRequest(order.agent, order.role, order.chain, order.issue),
        policy=policy,
        transport=transport.name,
    )
    session = drawn.session
    inside = inside_directory(home, session.session)
    agent_shell.make_programs(inside, home)
    if guest is not None:
        let_inside(home, inside, guest)
    notes += _unknown_role(session.role, policy.compiled) + _went_down(differences)
    notes += _cannot_hold(source, policy.compiled) + drawn.tracked.notes
    repository, more = _repository(home, drawn, guest)
    notes += more
    config = SessionConfig(
        source=session.source,
        mountpoint=str(mountpoint),
        home=str(home),
        session=session.session,
        session_dir=str(session_directory(home, session.session)),
        trail=str(trail_path(home, session.session)),
        head=str(head_path(home, session.session)),
        agent=session.agent,
        agent_id=session.agent_id,
        role=session.role,
        team=session.team,
        chain=session.chain,
        issue=session.issue,
        holder=Holder(session.agent, session.agent_id, session.chain).key,
        database=database_environment(),
        policy=policy.plain,
        policy_origin=session.policy.origin,
        policy_file=str(policy.file),
        tracked=drawn.tracked.paths,
        repository=repository,
        companion=launcher.companion_program(session.source, str(mountpoint)),
        transport=transport.name,
        packages=transport.packages,
        allow_other=order.allow_other or guest is not None,
        user=None if guest is None else guest.uid,
        umask=_umask(),
        source_identity=_identity(source),
        mountpoint_identity=_identity(mountpoint),
        keep_scratch=order.keep_scratch,
        out_of_band=differences,
        strays=temp_cleanup.left_in(home, source),
    )
    return drawn, config, earlier, notes


def _repository(
    home: Path, drawn: RegisteredSession, guest: Guest | None
) -> tuple[RepositoryConfig | None, tuple[str, ...]]:
    """Make the session's own `.git`: what the server is to show of it, and notes; None: the source has none."""
    session = drawn.session
    source = Path(session.source)
    if not os.path.lexists(source / ".git"):
        return None, ()
    rules = rules_of(drawn.policy.plain)
    author = Author(*identity(Principal(session.agent, session.agent_id, session.role), rules))
    if guest is None:
        uid, gid, groups = os.geteuid(), os.getegid(), os.getgroups()
    else:
        uid, gid, groups = guest.uid, guest.gid, os.getgrouplist(guest.name, guest.gid)
    socket = inside_directory(home, session.session) / GUARD_SOCKET
    place = session_directory(home, session.session) / scratch_dir.REPOSITORY
    try:
        made = build(source, place, author, rules.protected_branches, socket, Owner(uid, gid))
    except GitError as error:
        shutil.rmtree(place, ignore_errors=True)
        return None, (f"Git cannot change anything in this mount: {error}.",)
    return RepositoryConfig(made.common, made.stores, uid, gid, groups), made.notes


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode number, by which the server knows the directory that was checked. MountError."""
    try:
        fd = mounts.open_directory(path)
    except OSError as error:
        raise MountError(f"{path} was replaced while it was checked ({error.strerror}); mount again") from error
    try:
        return mounts.identity(fd)
    finally:
        os.close(fd)


def _umask() -> int:
    """Of whoever mounts, for the files that the session's tools make."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _clear(home: Path, mountpoint: Path, source: Path) -> tuple[str, ...]:
    """Refuse a mountpoint that is served; take a dead mount off it where the new one cannot go on top."""
    if not mounts.at(mountpoint):
        return ()
    session = live_at(home, mountpoint)
    if session is not None:
        raise MountError(
            f"{mountpoint} is mounted already, by {session.agent} (pid {session.pid}); "
            f"end that first: bonobofs umount {mountpoint}"
        )
    if not launcher.is_dead(str(mountpoint)):
        raise MountError(f"{mountpoint} is mounted already, not from the state directory {home}; unmount it there")
    if os.geteuid() == 0 and source != mountpoint:
        return (f"A dead mount on {mountpoint} is covered by this one.",)
    # fusermount3 cannot mount on a dead mount, and a source below its own dead mount cannot be opened.
    detach_all(mountpoint)
    return (f"A dead mount was taken off {mountpoint}.",)


def _standing(mountpoint: Path) -> tuple[str, ...]:
    inside = [str(process) for process in processes.with_cwd_in(mountpoint) if process.pid != os.getpid()]
    if not inside:
        return ()
    return (f"Outside the mount, as they stood in {mountpoint} before it: {', '.join(inside)}; let them cd again.",)


def _also_mounted(home: Path, source: Path) -> tuple[str, ...]:
    return tuple(
        f"{source} is mounted on {session.mountpoint} too; locks do not reach from one mount to the other."
        for session in read_all(home)[0]
        if session.source == str(source) and lives(session)
    )


def _look_back(home: Path, source: Path, policy: Policy) -> tuple[list[str], list[dict[str, Any]]]:
    """This source's sessions that ended without noting it, and where the source is not as their record says.

    The two are compared only where the machine went down meanwhile: then what was recorded or done last may be missing.
    """
    sessions = [session for session in read_all(home)[0] if session.source == str(source)]
    over = [one for one in sessions if one.ended is None and not lives(one)]
    boot = processes.boot_id()
    differences: list[dict[str, Any]] = []
    if any(one.boot_id != boot and not was_closed(home, one) for one in over):
        trails = [(trail_path(home, one.session), head_path(home, one.session)) for one in sessions]
        kept = {*trails_in(home / "trails")}
        known = [pair for pair in trails if pair[0] in kept]
        for path, what, _ in islice(compare(source, known), _MOST_DIFFERENCES):
            protected = bool(policy.protect.find(path.split("/")))
            differences.append({"path": path, "what": what, "protected": protected})
    return [one.session for one in over], differences


def _went_down(differences: list[dict[str, Any]]) -> tuple[str, ...]:
    if not differences:
        return ()
    return (
        f"The machine went down during an earlier session. In {len(differences)} places the source is not as the "
        "record says; they are entered: bonobofs audit query --operation out_of_band.",
    )


def _unknown_role(role: str, policy: Policy) -> tuple[str, ...]:
    if role in policy.roles:
        return ()
    return (
        f"The policy does not define the role {role}, so it may do nothing but read; it defines: "
        f"{', '.join(sorted(policy.roles))}.",
    )


def _cannot_hold(source: Path, policy: Policy) -> tuple[str, ...]:
    if policy.temporary is None or mount_checks.has_nameless_files(source):
        return ()
    return (
        f"The file system of {source} has no files without names (O_TMPFILE), so temporary names cannot be held: to "
        "make one fails with EOPNOTSUPP.",
    )


def _undo(home: Path, session: Session, covered: int, *, served: bool) -> None:
    """End the server and take away what was made. The trail of a session that never served says nothing."""
    if session.pid is not None and session.starttime is not None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            processes.send(session.pid, session.starttime, number)
            if processes.wait_for_end(session.pid, session.starttime, _SECONDS_TO_END):
                break
    with contextlib.suppress(BonobofsError):
        detach_all(Path(session.mountpoint or ""), permit=covered)
    if served:
        note_ends(home, [session.session])
        return
    shutil.rmtree(session_directory(home, session.session), ignore_errors=True)
    for path in (trail_path(home, session.session), head_path(home, session.session)):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One mount at a time in a home: between the look at the mountpoint and the mount nobody else may take it."""
    with locked(home / "mount.lock"):
        yield
