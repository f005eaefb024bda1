"""`why`: the engine's decision on a change, without making the change."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.errors import BonobofsError, UsageError
from bonobofs.ipc.client import SOCKET_VARIABLE, call
from bonobofs.policy import denials
from bonobofs.policy.decision import Code, Decision, Denied, Layer, Permit, as_document
from bonobofs.policy.engine import Policy, compile_policy, decide
from bonobofs.policy.request import HEAD_BYTES, Context, Kind, Operation, Principal, Request, WorkspacePath, kind_of
from bonobofs.session.lease_service import leases_of
from bonobofs.session.registration import choose_policy, load_tracked
from bonobofs.session.session_list import callable_session, check_served, session_around, statuses
from bonobofs.state import scratch_dir
from bonobofs.state.home import read_document, session_directory
from bonobofs.state.sessions import Session
from bonobofs.system import mounts
from bonobofs.system.paths import is_within

WHY: Final = "user.bonobofs.why"

_OF_CONTENT: Final = frozenset(
    {Operation.WRITE_FILE, Operation.TRUNCATE, Operation.ALLOCATE, Operation.COPY_RANGE, Operation.CREATE_FILE}
)
_THROUGH_SYMLINKS: Final = _OF_CONTENT | {Operation.SET_MODE}
_MADE: Final = {
    Operation.MKDIR: Kind.DIRECTORY,
    Operation.RMDIR: Kind.DIRECTORY,
    Operation.SYMLINK: Kind.SYMLINK,
    Operation.MKNOD: Kind.DEVICE,
}
_PLAIN_FILE: Final = 0o644


Decide = Callable[[Request, Context], Decision]


class _Workspace(NamedTuple):
    """A workspace and the function that decides about it."""

    root: Path
    decide: Decide
    mounted: bool


def explain(
    home: Path,
    path: str,
    *,
    operation: Operation | None = None,
    to: str | None = None,
    size: int | None = None,
    role: str | None = None,
    workspace: Path | None = None,
) -> dict[str, Any]:
    """Decide on a change of `path`; return a document in the schema of decisions. `size`: bytes after the change.

    `to` is the new name of a rename or link. Both names are judged, and for a directory all names below it.

    The default workspace is the mount or source of a session that contains `path`, else the working directory. In a
    session its own policy and role apply, elsewhere the policy that `mount` would choose. The default operation is the
    one that writing at `path` needs. Raises UsageError, PolicyError, StateError.
    """
    base = Path(os.path.realpath(workspace)) if workspace is not None else Path.cwd()
    # Textual only: resolving symlinks would access a mount, and the engine judges `..` unresolved.
    named = Path(os.path.normpath(base / path))
    check_served(home, named)
    if role is None and ".." not in path.split("/"):
        answer = _explain_by_session(home, named, (os.path.join(base, path), operation, _absolute(base, to), size))
        if answer is not None:
            return answer
    foreign = _foreign_mount(home, named)
    if foreign is not None:
        return _explain_by_mount(named, foreign, plain=not (operation or to or size or role))
    if role is None and workspace is None and SOCKET_VARIABLE in os.environ and session_around(home, named) is None:
        here: dict[str, Any] = call(None, "why", path=path, operation=operation, to=to, size=size)
        return here
    place = _place(home, named, base if workspace is not None else None, role)
    return _explain(place, base, path, operation, to, size)


def explain_in_mount(
    root: Path, path: str, operation: Operation | None, to: str | None, size: int | None, decide: Decide
) -> dict[str, Any]:
    """Decide with `decide` on a change of `path`, which is relative to the root of the mount or absolute."""
    return _explain(_Workspace(root, decide, mounted=True), root, path, operation, to, size)


def _absolute(base: Path, path: str | None) -> str | None:
    return None if path is None else os.path.join(base, path)


def _explain_by_session(
    home: Path, named: Path, asked: tuple[str, Operation | None, str | None, int | None]
) -> dict[str, Any] | None:
    """Ask the session, which applies its current policy and leases. None: it cannot be called."""
    session = callable_session(home, named)
    if session is None or str(session.mountpoint) == session.source:
        return None
    path, operation, to, size = asked
    try:
        answer: dict[str, Any] = call(session.directory, "why", path=path, operation=operation, to=to, size=size)
    except (BonobofsError, OSError):
        return None  # decide from the session's files instead
    return answer


def _explain(
    place: _Workspace, base: Path, path: str, operation: Operation | None, to: str | None, size: int | None
) -> dict[str, Any]:
    if to is not None and operation not in (Operation.RENAME, Operation.LINK):
        raise UsageError("--to names the new path of a rename or link; add --op rename or --op link")
    relative, found = _locate(place.root, base, path, operation)
    chosen = operation or _usual(path, found)
    kind = kind_of(found.st_mode) if found is not None else None
    kind = _MADE.get(chosen) or kind or (Kind.DIRECTORY if path.endswith("/") else Kind.FILE)
    context = _context(place, relative, chosen, size, found if kind is Kind.FILE else None)
    context = context._replace(in_source=_in_source(place, relative, found))
    decision = place.decide(Request(chosen, WorkspacePath(relative), kind), context)
    if chosen is Operation.RENAME or to is not None:
        target = None if to is None else _locate(place.root, base, to, chosen)[0]
        decision = _judge_move(place, (relative, kind, found), chosen, target, decision)
    return as_document(decision, relative, chosen)


def _judge_move(
    place: _Workspace,
    origin: tuple[str, Kind, os.stat_result | None],
    operation: Operation,
    target: str | None,
    leaving: Decision,
) -> Decision:
    """Judge removal at the old path and creation at the new one, for all names below too; return the first denial."""
    relative, kind, found = origin
    below = _below(place.root / relative) if found is not None and kind is Kind.DIRECTORY else ()
    decisions = [leaving]
    for path, each, st in (("", kind, found), *below):
        old, new = relative + path, None if target is None else target + path
        if path and operation is Operation.RENAME:
            decisions.append(place.decide(Request(operation, WorkspacePath(old), each), Context(leaves=True)))
        if new is not None:
            decisions.append(
                place.decide(Request(operation, WorkspacePath(new), each), _appearing(place.root / old, each, st))
            )
    denied = next((one for one in decisions if isinstance(one, Denied)), None)
    if denied is not None:
        return denied
    layers = {one.layer for one in decisions if isinstance(one, Permit)}
    return leaving if Layer.SCRATCH not in layers or len(layers) == 1 else _crosses(relative, operation)


def _below(directory: Path) -> Iterator[tuple[str, Kind, os.stat_result]]:
    """Yield each name below a directory: its path relative to it with a leading `/`, its kind, its lstat result."""
    for top, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = os.path.join(top, name)
            st = _lstat(Path(path))
            if st is not None:
                yield path[len(str(directory)) :], kind_of(st.st_mode), st


def _appearing(path: Path, kind: Kind, found: os.stat_result | None) -> Context:
    if kind is Kind.SYMLINK and found is not None:
        return Context(target=os.readlink(path), in_source=True)
    if kind is not Kind.FILE or found is None:
        return Context(in_source=found is not None)
    return Context(size=found.st_size, mode=stat.S_IMODE(found.st_mode), head=_head(path), in_source=True)


def _head(path: Path) -> bytes:
    """Return the first HEAD_BYTES bytes of a regular file; empty if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, HEAD_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _crosses(path: str, operation: Operation) -> Decision:
    """Return the denial of a rename or link between scratch and the rest of the workspace."""
    return Denied(Code.ELSEWHERE, *denials.ELSEWHERE, WorkspacePath(path), operation)


def _place(home: Path, named: Path, workspace: Path | None, role: str | None) -> _Workspace:
    session, root, mounted = _session_of(home, workspace or named)
    if session is not None:
        policy = compile_policy(read_document(session_directory(home, session.session) / "policy.json"))
        bound = policy.bound_by(leases_of(home, session)).with_tracked(load_tracked(home, session.session))
        if mounted and scratch_dir.shows_repository(session_directory(home, session.session)):
            bound = bound.with_repository()
        return _Workspace(workspace or root, _by(bound, role or session.role), mounted)
    root = workspace or Path.cwd()
    chosen = choose_policy(home, None, root)
    return _Workspace(root, _by(chosen.compiled, role or chosen.document.default_role), mounted=False)


def _by(policy: Policy, role: str) -> Decide:
    return partial(decide, policy, Principal("", "", role))


def _session_of(home: Path, path: Path) -> tuple[Session | None, Path, bool]:
    """Return the live session whose mount or source contains a path, that directory, and whether it is the mount."""
    one = session_around(home, path)
    if one is None:
        return None, path, False
    session = one.session
    mounted = session.mountpoint is not None and is_within(path, session.mountpoint)
    return session, Path(session.mountpoint if mounted and session.mountpoint else session.source), mounted


def _locate(root: Path, base: Path, path: str, operation: Operation | None) -> tuple[str, os.stat_result | None]:
    """Resolve a name as the kernel would; return its path in the workspace and its lstat result, or None."""
    if ".." in path.split("/"):
        return path, None
    name = base / path
    resolved = Path(os.path.realpath(name.parent), name.name)
    found = _lstat(resolved)
    if found is not None and stat.S_ISLNK(found.st_mode) and (operation is None or operation in _THROUGH_SYMLINKS):
        resolved = Path(os.path.realpath(resolved))
        found = _lstat(resolved)
    relative = os.path.relpath(resolved, os.path.realpath(root))
    return "" if relative == "." else relative, found


def _usual(path: str, found: os.stat_result | None) -> Operation:
    if path.endswith("/") or (found is not None and stat.S_ISDIR(found.st_mode)):
        return Operation.MKDIR
    return Operation.CREATE_FILE if found is None else Operation.WRITE_FILE


def _context(
    place: _Workspace, relative: str, operation: Operation, size: int | None, found: os.stat_result | None
) -> Context:
    before = found.st_size if found is not None else 0
    after = size if size is not None else before
    return Context(
        size=after if operation in _OF_CONTENT else -1,
        size_before=before,
        mode=_PLAIN_FILE if operation is Operation.CREATE_FILE and found is None else -1,
        leaves=operation is Operation.RENAME and found is not None,
        foreign_names=_foreign_names(place, relative, found),
        privileged=os.geteuid() == 0,
    )


def _in_source(place: _Workspace, relative: str, found: os.stat_result | None) -> bool:
    """Return True if the source has the name. In a mount it may be a staged file, so the mount is asked."""
    if found is None:
        return False
    return not place.mounted or _read_explanation(place.root / relative).get("rule") != Layer.STAGED


def _foreign_names(place: _Workspace, relative: str, found: os.stat_result | None) -> int:
    """Count the other hard links of a file; 0 if the mount, which knows their paths, permits them."""
    if found is None or found.st_nlink < 2:
        return 0
    if not place.mounted:
        return found.st_nlink - 1
    answer = _read_explanation(place.root / relative)
    # The mount answers for the name of the file that it saw last.
    by_another_name = answer.get("code") == Code.LEASED and answer.get("path") != relative
    return found.st_nlink - 1 if by_another_name or answer.get("code") == Code.HARDLINK else 0


def _foreign_mount(home: Path, named: Path) -> mounts.Mount | None:
    """Return the mount that contains a path if it belongs to another state directory, else None."""
    mount = mounts.mount_around(named)
    if mount is None:
        return None
    own = {one.session.mountpoint for one in statuses(home)}
    return None if str(mount.mountpoint) in own else mount


def _explain_by_mount(named: Path, mount: mounts.Mount, *, plain: bool) -> dict[str, Any]:
    answer = _read_explanation(named) if plain else {}
    if not answer:
        raise UsageError(
            f"{mount.mountpoint} is mounted from another state directory, or its session cannot be read (see bonobofs "
            "status), so only what exists can be asked about, without options; what may be written is in "
            f"{mount.mountpoint}/.bonobofs/policy.md"
        )
    return answer


def _read_explanation(path: Path) -> dict[str, Any]:
    """Read the mount's decision from the WHY attribute; empty if there is none."""
    try:
        answer = json.loads(os.getxattr(path, WHY))
    except (OSError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


class PolicyInForce(NamedTuple):
    """A policy and the session in which it is in force."""

    origin: str
    compiled: Policy
    role: str
    session: str | None
    """UUID of the session; None: a new mount would use this policy."""
    error: str | None
    """Why the current policy file is not in force; None if it is."""
    why: str
    """Why this policy was chosen; empty for a session."""


def in_force(home: Path, file: Path | None, path: Path) -> PolicyInForce:
    """Return the policy of `file`, else of the session whose mount or source contains `path`, else of a new mount.

    PolicyError, StateError, UsageError.
    """
    one = session_around(home, path) if file is None else None
    if one is None:
        chosen = choose_policy(home, file, path if file is None else None)
        return PolicyInForce(chosen.origin, chosen.compiled, chosen.document.default_role, None, None, chosen.why)
    made = one.session
    plain = read_document(session_directory(home, made.session) / "policy.json")
    compiled = compile_policy(plain, made.policy.generation)
    return PolicyInForce(made.policy.origin, compiled, made.role, made.session, one.policy_error, "")
