"""Mount: check, register the session, start the server, probe the mount; undo everything on failure."""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import pwd
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from bonobofs.audit import temp_cleanup
from bonobofs.audit.reader import trails_in
from bonobofs.errors import BonobofsError, GitError, MountError, UsageError
from bonobofs.git.branch_rules import identity, rules_of
from bonobofs.git.session_repository import Author, Owner, build, keep_ended
from bonobofs.ipc.session_config import RepositoryConfig, SessionConfig, StartConfig
from bonobofs.policy.engine import Policy
from bonobofs.policy.request import Principal
from bonobofs.session import agent_shell, launcher, mount_checks
from bonobofs.session.registration import (
    RegisteredSession,
    SessionRequest,
    choose_policy,
    note_on_audit,
    register_session,
)
from bonobofs.session.session_list import unreadable, was_closed
from bonobofs.session.unmount import detach_all
from bonobofs.state import scratch_dir
from bonobofs.state.home import GUARD_SOCKET, head_path, inside_directory, session_directory, trail_path
from bonobofs.state.session_rows import Holder
from bonobofs.state.sessions import Session, live_at, lives, note_ends, read_all, save
from bonobofs.state.sqlite_file import database_environment
from bonobofs.system import mounts, processes
from bonobofs.system.locks import locked
from bonobofs.undo.image_expiry import drop_unmade_changes

_SECONDS_TO_END = 5.0
_MOST_DIFFERENCES = 100_000


class MountRequest(NamedTuple):
    """The arguments of `mount`."""

    source: Path
    mountpoint: Path
    agent: str | None = None
    role: str | None = None
    policy: Path | None = None
    transport: str = "auto"
    allow_other: bool = False
    allow_writable_parents: bool = False
    """Accept a source and mountpoint that another user can replace before bonobofs opens them."""
    keep_scratch: bool = False
    observe: bool = False
    """Make and record changes that the policy refuses by rule, role or name."""
    chain: str | None = None
    user: str | None = None
    """Name or uid of another user, except root, who may use the mount and call the session."""
    issue: str | None = None
    """Issue of the work; the session's commits name it."""
    workspace: Path | None = None
    """Path under which the agent sees the mount; None: the mountpoint."""
    policy_of: Path | None = None
    """Source whose policy applies, such as the repository of a worktree; None: `source`."""
    companion: str = launcher.COMPANION
    """Module of the companion; see `CompanionProgram`."""


class MountedSession(NamedTuple):
    """A mounted session. `notes`: sentences for the operator."""

    session: Session
    notes: tuple[str, ...]
    why: str
    """Reason for the choice of the policy."""


def start(home: Path, request: MountRequest) -> MountedSession:
    """Mount in the background and return when the mount answers. A failure undoes everything. BonobofsError."""
    with launcher.ServerStart(str(request.mountpoint)) as server:
        return start_with(server, home, request)


def start_with(server: launcher.ServerStart, home: Path, request: MountRequest) -> MountedSession:
    """As `start`, with a server that the caller has started."""
    with _mount_lock(home):
        registered, config, earlier, notes = _prepare(home, request, server)
        session, mountpoint = registered.session, config.mountpoint
        covered = len(mounts.at(Path(mountpoint)))
        served = False
        try:
            pid, starttime = server.process
            session = session._replace(pid=pid, starttime=starttime)
            save(home, session)
            log = str(session_directory(home, session.session) / "server.log")
            failure = server.serve(config._replace(ready_fd=server.ready_fd, log=log))
            if failure:
                raise MountError(failure)
            served = True
            note_ends(home, earlier)
            failure = server.read()
            if failure:
                raise MountError(
                    f"the mount on {mountpoint} did not answer ({failure}) and was unmounted; run bonobofs doctor"
                )
        except BaseException:
            _undo(home, session, covered, served=served)
            raise
        if earlier:
            from bonobofs.session.retention import compress_ended  # noqa: PLC0415 - few mounts follow a crash

            compress_ended(home)
        return MountedSession(session, notes, registered.policy.why)


def prepare_foreground(home: Path, request: MountRequest) -> tuple[MountedSession, Callable[[], NoReturn]]:
    """Register the session with this process as its server.

    Calling the returned function turns this process into the server.
    """
    # The mask survives exec and fork. A Ctrl-C stays pending until the server can unmount cleanly.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    with _mount_lock(home):
        registered, config, earlier, notes = _prepare(home, request, None)
        pid = os.getpid()
        session = registered.session._replace(pid=pid, starttime=processes.start_time(pid))
        save(home, session)
        return MountedSession(session, notes, registered.policy.why), partial(launcher.exec_server, config, earlier)


def _prepare(
    home: Path, request: MountRequest, server: launcher.ServerStart | None
) -> tuple[RegisteredSession, SessionConfig, list[str], tuple[str, ...]]:
    """Return the new session, its configuration, the earlier sessions whose end it records, and notes.

    The server starts the companion as soon as source and mountpoint are checked and the policy is loaded.
    """
    transport = launcher.choose_transport(request.transport)
    source, mountpoint = (
        mount_checks.resolve(path, what, allow_writable_parents=request.allow_writable_parents)
        for path, what in ((request.source, "source"), (request.mountpoint, "mountpoint"))
    )
    notes = transport.notes + _clear_mountpoint(home, mountpoint, source=source)
    mount_checks.check(source, mountpoint, home)
    policy = choose_policy(home, request.policy, request.policy_of or source, store=True)
    if request.observe:
        policy = policy.observing()
    start_config = _begin(server, source, mountpoint, request.companion, policy.plain)
    notes += _note_processes(mountpoint) + _also_mounted(home, source)
    notes += tuple(f"A session cannot be read: {error}." for error in unreadable(home).values())
    scratch_dir.remove_stale(home)
    notes += tuple(f"{kept}." for kept in keep_ended(home))
    drop_unmade_changes(home, str(source))
    earlier, differences = _crashed_sessions(home, source, policy.compiled)
    guest = None if request.user is None else find_guest(request.user)
    if guest is not None:
        admit_guest(home, guest)
    registered = register_session(
        home,
        source=source,
        mountpoint=mountpoint,
        request=SessionRequest(request.agent, request.role, request.chain, request.issue),
        policy=policy,
        transport=transport.name,
    )
    session = registered.session
    inside = inside_directory(home, session.session)
    agent_shell.make_programs(inside, home)
    if guest is not None:
        permit_directory(home, inside, guest)
    if ignored := note_on_audit(home, policy.file, policy.plain):
        notes += (f"{ignored}.",)
    notes += _note_role(session.role, policy.compiled) + _note_crash(differences)
    notes += _note_staging(source, policy.compiled) + registered.tracked.notes
    repository, more = _repository(home, registered, guest)
    notes += more
    config = SessionConfig(
        source=session.source,
        mountpoint=str(mountpoint),
        workspace=str(request.workspace or ""),
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
        tracked=registered.tracked.paths,
        repository=repository,
        companion=start_config.companion,
        transport=transport.name,
        packages=transport.packages,
        allow_other=request.allow_other or guest is not None,
        user=None if guest is None else guest.uid,
        umask=_umask(),
        source_identity=start_config.source_identity,
        mountpoint_identity=_identity(mountpoint),
        keep_scratch=request.keep_scratch,
        observe=request.observe,
        out_of_band=differences,
        strays=temp_cleanup.strays_of(home, source),
    )
    return registered, config, earlier, notes


def _begin(
    server: launcher.ServerStart | None, source: Path, mountpoint: Path, companion: str, policy: dict[str, Any]
) -> StartConfig:
    """Let the server start the companion, and compile the policy. Return what it was sent. MountError."""
    program = launcher.companion_program(str(source), str(mountpoint), companion)
    config = StartConfig(str(source), policy, _identity(source), program)
    if server is not None:
        server.begin(config)
    return config


def _repository(
    home: Path, registered: RegisteredSession, guest: Guest | None
) -> tuple[RepositoryConfig | None, tuple[str, ...]]:
    """Create the session's own `.git`. Return its configuration, None if the source has none, and notes."""
    session = registered.session
    source = Path(session.source)
    if not os.path.lexists(source / ".git"):
        return None, ()
    rules = rules_of(registered.policy.plain)
    author = Author(*identity(Principal(session.agent, session.agent_id, session.role), rules))
    if guest is None:
        uid, gid, groups = os.geteuid(), os.getegid(), os.getgroups()
    else:
        uid, gid, groups = guest.uid, guest.gid, os.getgrouplist(guest.name, guest.gid)
    socket = inside_directory(home, session.session) / GUARD_SOCKET
    git_dir = session_directory(home, session.session) / scratch_dir.REPOSITORY
    try:
        built = build(source, git_dir, author, rules.protected_branches, socket, Owner(uid, gid))
    except GitError as error:
        shutil.rmtree(git_dir, ignore_errors=True)
        return None, (f"Git cannot change anything in this mount: {error}.",)
    return RepositoryConfig(built.common, built.stores, uid, gid, groups), built.notes


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode number, by which the server recognizes the checked directory. MountError."""
    try:
        fd = mounts.open_directory(path)
    except OSError as error:
        raise MountError(f"{path} was replaced during the checks ({error.strerror}); mount again") from error
    try:
        return mounts.identity(fd)
    finally:
        os.close(fd)


def _umask() -> int:
    """Return the umask of the operator, for files that the session's tools create."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _clear_mountpoint(home: Path, mountpoint: Path, source: Path) -> tuple[str, ...]:
    """Refuse a mountpoint that is in use; unmount a dead mount that the new one cannot cover."""
    if not mounts.at(mountpoint):
        return ()
    session = live_at(home, mountpoint)
    if session is not None:
        raise MountError(
            f"{mountpoint} is already mounted by {session.agent} (pid {session.pid}); "
            f"unmount it first: bonobofs umount {mountpoint}"
        )
    if not launcher.is_dead(str(mountpoint)):
        raise MountError(f"{mountpoint} is already mounted from another state directory than {home}; unmount it there")
    if os.geteuid() == 0 and source != mountpoint:
        return (f"This mount covers a dead mount on {mountpoint}.",)
    # fusermount3 cannot mount on a dead mount, and a source below its own dead mount cannot be opened.
    detach_all(mountpoint)
    return (f"A dead mount on {mountpoint} was unmounted.",)


def _note_processes(mountpoint: Path) -> tuple[str, ...]:
    inside = [str(process) for process in processes.with_cwd_in(mountpoint) if process.pid != os.getpid()]
    if not inside:
        return ()
    return (
        f"Processes with their working directory in {mountpoint} stay outside the mount: {', '.join(inside)}; "
        "let them cd again.",
    )


def _also_mounted(home: Path, source: Path) -> tuple[str, ...]:
    return tuple(
        f"{source} is also mounted on {session.mountpoint}; file locks do not reach from one mount to the other."
        for session in read_all(home)[0]
        if session.source == str(source) and lives(session)
    )


def _crashed_sessions(home: Path, source: Path, policy: Policy) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the crashed sessions of this source, and the differences between the source and their trails.

    The source is compared only after an unclean boot, which may lose the last changes or the last entries.
    """
    sessions = [session for session in read_all(home)[0] if session.source == str(source)]
    over = [one for one in sessions if one.ended is None and not lives(one)]
    boot = processes.boot_id()
    differences: list[dict[str, Any]] = []
    if any(one.boot_id != boot and not was_closed(home, one) for one in over):
        from bonobofs.audit.recovery import compare  # noqa: PLC0415 - few mounts follow an unclean boot

        trails = [(trail_path(home, one.session), head_path(home, one.session)) for one in sessions]
        kept = {*trails_in(home / "trails")}
        known = [pair for pair in trails if pair[0] in kept]
        for path, what, _ in islice(compare(source, known), _MOST_DIFFERENCES):
            protected = bool(policy.protect.find(path.split("/")))
            differences.append({"path": path, "what": what, "protected": protected})
    return [one.session for one in over], differences


def _note_crash(differences: list[dict[str, Any]]) -> tuple[str, ...]:
    if not differences:
        return ()
    return (
        f"The machine went down during an earlier session. The source differs from the record in {len(differences)} "
        "places; see bonobofs audit query --operation out_of_band.",
    )


def _note_role(role: str, policy: Policy) -> tuple[str, ...]:
    if role in policy.roles:
        return ()
    return (
        f"The policy does not define the role {role}, so the agent may only read; it defines: "
        f"{', '.join(sorted(policy.roles))}.",
    )


def _note_staging(source: Path, policy: Policy) -> tuple[str, ...]:
    if policy.temporary is None or mount_checks.has_nameless_files(source):
        return ()
    return (
        f"The file system of {source} does not support O_TMPFILE, so files cannot be staged: creating a temporary "
        "name fails with EOPNOTSUPP.",
    )


def _undo(home: Path, session: Session, covered: int, *, served: bool) -> None:
    """End the server and remove everything that was created. This includes the trail of a session that never served."""
    if session.pid is not None and session.starttime is not None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            processes.send(session.pid, session.starttime, number)
            if processes.wait_for_end(session.pid, session.starttime, _SECONDS_TO_END):
                break
    with contextlib.suppress(BonobofsError):
        detach_all(Path(session.mountpoint or ""), remaining=covered)
    if served:
        note_ends(home, [session.session])
        return
    remove_session(home, session)


def remove_session(home: Path, session: Session) -> None:
    """Remove a session that never served, with its trail."""
    shutil.rmtree(session_directory(home, session.session), ignore_errors=True)
    for path in (trail_path(home, session.session), head_path(home, session.session)):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _mount_lock(home: Path) -> Iterator[None]:
    """Run one mount at a time, so that the mountpoint does not change between check and mount."""
    with locked(home / "mount.lock"):
        yield


_ACL: Final = "system.posix_acl_access"
_HEAD: Final = struct.pack("<I", 2)
_ENTRY: Final = struct.Struct("<HHI")
_NO_ID: Final = 0xFFFFFFFF
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 1, 2, 4, 8, 0x10, 0x20
_SEARCH: Final = 1
_READ_AND_SEARCH: Final = 5
_ALL: Final = 7
_PACKAGE: Final = Path(__file__).resolve().parent.parent
_PROBE: Final = "import os, sys; p = sys.argv[1]; sys.exit(not os.access(p, os.X_OK if os.path.isdir(p) else os.R_OK))"


class Guest(NamedTuple):
    """A user who is not the operator."""

    name: str
    uid: int
    gid: int


def find_guest(name: str) -> Guest:
    """Return the user of this name or number. UsageError: unknown user, or this process is not root."""
    if os.geteuid() != 0:
        raise UsageError("--user needs root: an ordinary user cannot let another user into a mount; leave it out")
    try:
        user = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        raise UsageError(f"--user {name}: there is no such user; name one of /etc/passwd") from None
    if user.pw_uid == 0:
        raise UsageError("--user names root, who may call every session; leave it out")
    return Guest(user.pw_name, user.pw_uid, user.pw_gid)


def admit_guest(home: Path, guest: Guest) -> None:
    """Let the guest search the state directory and its `sessions`; deny other users everything else there.

    MountError: the guest cannot reach these directories, or cannot run the programs of `bin`.
    """
    _close_to_others(home)
    for path in (home, home / "sessions", home / "runs", home / "homes"):
        if path.is_dir():
            _allow(path, guest, _SEARCH)
    if not _reaches(guest, _PACKAGE / "__init__.py"):
        raise MountError(
            f"{guest.name} cannot run {sys.executable} or read {_PACKAGE}, which the programs in its PATH need; "
            "install bonobofs where it can, such as /opt/bonobofs"
        )
    if not _reaches(guest, home / "sessions"):
        raise MountError(
            f"{guest.name} cannot reach the state directory {home}; set BONOBOFS_HOME to a directory that it can "
            "search down to, such as /var/lib/bonobofs"
        )


def permit_directory(home: Path, inside: Path, guest: Guest) -> None:
    """Let the guest read `inside` and its programs, and search the session's directory above it."""
    _close_to_others(home)
    _allow(inside.parent, guest, _SEARCH)
    _allow(inside, guest, _READ_AND_SEARCH)
    for path in (inside / "bin", *(inside / "bin").iterdir()):
        path.chmod(0o755)


def _close_to_others(home: Path) -> None:
    for entry in os.scandir(home):
        mode = entry.stat(follow_symlinks=False).st_mode
        if mode & 0o007 and not entry.is_symlink():
            os.chmod(entry.path, mode & 0o7770)


def _reaches(guest: Guest, path: Path) -> bool:
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE, path],
            user=guest.uid,
            group=guest.gid,
            extra_groups=os.getgrouplist(guest.name, guest.gid),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            check=False,
        )
    except PermissionError:
        return False
    return ran.returncode == 0


def _allow(path: Path, guest: Guest, permissions: int) -> None:
    """Add the guest to the ACL of a directory. MountError: the file system has none."""
    entries = _entries(path)
    entries[_USER, guest.uid] = entries.get((_USER, guest.uid), 0) | permissions
    named = (bits for (tag, _), bits in entries.items() if tag in (_USER, _GROUP_OBJ, _GROUP))
    entries[_MASK, _NO_ID] = functools.reduce(operator.or_, named)
    acl = _HEAD + b"".join(_ENTRY.pack(tag, bits, number) for (tag, number), bits in sorted(entries.items()))
    try:
        os.setxattr(path, _ACL, acl)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        raise MountError(
            f"the file system of {path} has no POSIX ACLs, which --user needs; set BONOBOFS_HOME to a directory of "
            "a file system that has them, such as ext4, xfs or btrfs"
        ) from error


def closing_command(directory: Path) -> str:
    """Return the command that closes a directory to other users; "" if it is closed. A guest may search it."""
    entries = _entries(directory)
    mask = entries.get((_MASK, _NO_ID), _ALL)
    permitted = ((tag, bits & mask) for (tag, _), bits in entries.items() if tag in (_USER, _GROUP_OBJ, _GROUP))
    if not entries[_OTHER, _NO_ID] and not any(bits & ~(_SEARCH if tag == _USER else 0) for tag, bits in permitted):
        return ""
    # With an ACL, chmod 700 would take the right of the guest.
    return f"setfacl -m g::-,o::- {directory}" if (_MASK, _NO_ID) in entries else f"chmod 700 {directory}"


def _entries(path: Path) -> dict[tuple[int, int], int]:
    try:
        acl = os.getxattr(path, _ACL)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        mode = path.stat().st_mode
        return {
            (_USER_OBJ, _NO_ID): mode >> 6 & 7,
            (_GROUP_OBJ, _NO_ID): mode >> 3 & 7,
            (_OTHER, _NO_ID): mode & 7,
        }
    return {(tag, number): bits for tag, bits, number in _ENTRY.iter_unpack(acl[len(_HEAD) :])}
