"""Decide on planned changes from the files of a directory: for a session's calls, and where no session answers."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.errors import UsageError
from bonobofs.policy.decision import Decision, as_document
from bonobofs.policy.engine import Policy, compile_policy, decide, decide_move
from bonobofs.policy.request import (
    EXISTS,
    HEAD_BYTES,
    NO_FACTS,
    OF_CONTENT,
    Context,
    Kind,
    Operation,
    PlannedChange,
    Principal,
    Request,
    WorkspacePath,
    kind_of,
)
from bonobofs.session.session_list import root_around, session_around
from bonobofs.state.home import read_document, session_directory
from bonobofs.state.sessions import Session

_THROUGH_SYMLINKS: Final = OF_CONTENT | {Operation.SET_MODE}

Decide = Callable[[PlannedChange], tuple[Operation, Decision]]
"""Decides on a change of one name. Its paths are relative to the workspace's root."""


def explain_files(
    home: Path, root: Path, base: Path, change: PlannedChange, registered: Session | None
) -> dict[str, Any]:
    """Decide as `registered` would, else as a new mount of `root` would. PolicyError, StateError, UsageError."""
    policy, role = _policy_of_files(home, root, registered)
    return explain_in(root, base, change, partial(_decide_from_files, root, policy, role))


def _policy_of_files(home: Path, root: Path, registered: Session | None) -> tuple[Policy, str]:
    """Return policy and role of a session that cannot be called, else those of a new mount of `root`."""
    # They load pydantic and SQLAlchemy, which the answer of a session does not need.
    from bonobofs.session.lease_service import leases_of  # noqa: PLC0415
    from bonobofs.session.registration import choose_policy, load_tracked  # noqa: PLC0415

    if registered is None:
        chosen = choose_policy(home, None, root)
        return chosen.compiled, chosen.default_role
    policy = compile_policy(read_document(session_directory(home, registered.session) / "policy.json"))
    policy = policy.bound_by(leases_of(home, registered)).with_tracked(load_tracked(home, registered.session))
    return policy, registered.role


def explain_in(root: Path, base: Path, change: PlannedChange, decide: Decide) -> dict[str, Any]:
    """Decide with `decide` on a change in the workspace `root`; its paths are relative to `base`. UsageError."""
    if change.to is not None and change.operation not in (Operation.RENAME, Operation.LINK):
        raise UsageError("--to names the new path of a rename or link; add --op rename or --op link")
    path = _resolve(root, base, change.path, change.operation)
    to = None if change.to is None else _resolve(root, base, change.to, change.operation)
    operation, decision = decide(change._replace(path=path + "/" * change.path.endswith("/"), to=to))
    if operation is Operation.RENAME:
        below = (
            decide(change._replace(path=path + name, to=None if to is None else to + name))[1]
            for name in _names_below(root / path)
        )
        decision = decide_move(path, operation, chain([decision], below))
    return as_document(decision, path, operation)


def _resolve(root: Path, base: Path, path: str, operation: Operation | None) -> str:
    """Resolve the symlinks of a path as the kernel would; return it relative to the root."""
    if ".." in path.split("/") or "\0" in path:
        return path  # the engine refuses it
    name = base / path
    resolved = os.path.join(os.path.realpath(name.parent), name.name)
    if operation is None or operation in _THROUGH_SYMLINKS:
        resolved = os.path.realpath(resolved)
    relative = os.path.relpath(resolved, os.path.realpath(root))
    return "" if relative == "." else relative


def _names_below(directory: Path) -> Iterator[str]:
    """Yield the path of each name below a directory, relative to it, with a leading slash."""
    for top, directories, files in os.walk(directory) if not directory.is_symlink() else ():
        for name in (*directories, *files):
            yield os.path.join(top, name)[len(str(directory)) :]


def _decide_from_files(root: Path, policy: Policy, role: str, change: PlannedChange) -> tuple[Operation, Decision]:
    """As `Decide`, for a directory without a mount."""
    agent, file = Principal("", "", change.role or role), root / change.path
    st = _lstat(file)
    kind = None if st is None else kind_of(st.st_mode)
    request, context = change.request(kind, 0 if st is None else st.st_size, EXISTS, privileged=os.geteuid() == 0)
    if st is not None and kind is Kind.FILE:
        context = context._replace(foreign_names=st.st_nlink - 1)
    decision = decide(policy, agent, request, context)
    if change.to is not None:
        arriving = Request(request.operation, WorkspacePath(change.to), request.kind)
        decisions = [decision, decide(policy, agent, arriving, _arriving_context(file, kind, st))]
        decision = decide_move(request.path, request.operation, decisions)
    return request.operation, decision


def _arriving_context(file: Path, kind: Kind | None, st: os.stat_result | None) -> Context:
    """Return the context of a file that gets another name."""
    if st is None:
        return NO_FACTS
    if kind is Kind.SYMLINK:
        return Context(target=os.readlink(file), in_source=True)
    if kind is Kind.FILE:
        return Context(size=st.st_size, mode=stat.S_IMODE(st.st_mode), head=_head(file), in_source=True)
    return EXISTS


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


def in_force(home: Path, file: Path | None = None, root: Path | None = None) -> PolicyInForce:
    """Return the policy of `file`, else of the session around `root`, else of a new mount of `root`.

    The default of `root` is `root_around` the working directory. PolicyError, StateError, UsageError.
    """
    root = root or root_around(home, Path.cwd())
    one = session_around(home, root) if file is None else None
    if one is None:
        from bonobofs.session.registration import choose_policy  # noqa: PLC0415 - loads pydantic

        chosen = choose_policy(home, file, root if file is None else None)
        return PolicyInForce(chosen.origin, chosen.compiled, chosen.default_role, None, None, chosen.why)
    made = one.session
    plain = read_document(session_directory(home, made.session) / "policy.json")
    compiled = compile_policy(plain, made.policy.generation)
    return PolicyInForce(made.policy.origin, compiled, made.role, made.session, one.policy_error, "")
