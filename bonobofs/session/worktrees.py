"""Worktrees of agents: a branch and a mounted work tree for one issue. Removal keeps uncommitted files."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import TOUCHES
from bonobofs.beads.bd_client import seek_beads
from bonobofs.beads.beads_guard import BeadsGuard
from bonobofs.enforcement.authorizer import ACTIONS
from bonobofs.errors import BonobofsError, ForbiddenError, GitError, MountError, UsageError
from bonobofs.git import checkout
from bonobofs.git.branch_rules import new_branch, rules_of
from bonobofs.git.source_refs import PublishedBranches
from bonobofs.policy.request import Operation
from bonobofs.session.mount_setup import MountedSession, MountRequest, start
from bonobofs.session.python_session import OpenSession, open_session
from bonobofs.session.registration import choose_policy
from bonobofs.session.session_list import session_around
from bonobofs.session.unmount import unmount_session
from bonobofs.state.sessions import live_at
from bonobofs.state.worktree_registry import Worktree, WorktreePaths, load_all, save, worktree_paths
from bonobofs.system import mounts
from bonobofs.system.locks import locked

_ISSUE: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


class WorktreeRequest(NamedTuple):
    """Arguments of `worktree add`."""

    repository: Path
    issue: str
    agent: str
    role: str | None = None
    policy: Path | None = None
    base: str | None = None
    """Start of a new branch; None: main, else master, else HEAD."""
    depends_on: Sequence[str] = ()
    """Issues whose commits must be in the base."""
    before_mount: Callable[[Path], None] = lambda _: None
    """Called with the path of the worktree before it is mounted."""
    needs_issue: bool = True
    """False: `issue` may be a name that is no issue. Then no issue is begun."""


class AddedWorktree(NamedTuple):
    """A mounted worktree."""

    worktree: Worktree
    work: Path
    mounted: MountedSession | None
    """None: the worktree was mounted before."""
    ignored: tuple[str, ...] = ()
    """Options of the request that an existing worktree or mount cannot follow."""


class RemovedWorktree(NamedTuple):
    """Result of a removal."""

    worktree: Worktree
    kept: Path | None
    """Directory of the kept files, which were in no commit; None: there were none."""
    files: tuple[str, ...]
    staged: tuple[str, ...]
    """Files whose staged content differed from the work tree. The staged content is kept too."""
    deleted: tuple[str, ...]
    """Files whose deletion was not committed."""
    repositories: tuple[str, ...] = ()
    """One message for each kept session repository with stashes or unpublished commits: its path and its use."""


class WorktreeStatus(NamedTuple):
    """A worktree, its mountpoint, and whether it is mounted."""

    worktree: Worktree
    work: Path
    mounted: bool


def add(home: Path, request: WorktreeRequest) -> AddedWorktree:
    """Create and mount a worktree for an issue, or mount the existing one again.

    ForbiddenError, or Refused from the Beads gate: the issue is blocked by others, or its branch has foreign commits.
    UsageError, GitError, BeadsError, MountError. After an error no new worktree is left.
    """
    if not _ISSUE.fullmatch(request.issue):
        raise UsageError(f"{request.issue!r} is no issue id; use letters, digits, dots, dashes and underscores")
    with _locked(home):
        location = find_repository(home, request.repository)
        _check_not_mounted(location.common)
        existing = next(
            (record for record in _registered(home, location.common) if record.issue == request.issue), None
        )
        if existing is not None and existing.ready:
            return _mount_again(home, existing, request)
        if existing is not None:
            _delete(home, existing)
        base = checkout.base_of(location.common, request.base)
        waits_for = unresolved(home, location, base, request)
        if waits_for:
            raise ForbiddenError(
                f"{request.issue} waits for {', '.join(waits_for)}, whose work is not in the base yet; "
                "finish that first"
            )
        return _make(home, location, base, request)


def unresolved(home: Path, location: checkout.RepositoryLocation, base: str, request: WorktreeRequest) -> list[str]:
    """Return the issues of `depends_on` whose work is not in the base, so that the worktree would lack it."""
    common = location.common
    tips = {
        record.issue: record.tip for record in load_all(home) if record.common == str(common) and record.tip is not None
    }

    def is_in(issue: str) -> bool:
        tip = checkout.tip_of(common, _branch(home, request, location.top, issue)) or tips.get(issue)
        return tip is not None and checkout.has_commit(common, base, tip)

    return [issue for issue in request.depends_on if not is_in(issue)]


def statuses(home: Path) -> list[WorktreeStatus]:
    """Return the status of all worktrees that are not removed."""
    found = []
    for record in load_all(home):
        if record.removed is None:
            work = worktree_paths(home, record.worktree).work
            found.append(WorktreeStatus(record, work, live_at(home, work) is not None))
    return found


def remove(home: Path, name: str) -> RemovedWorktree:
    """Remove the worktree of that issue, path or UUID. Uncommitted files and the branch are kept.

    MountError: a program uses the mount. UsageError: no worktree or several match. After a kill it can be run again,
    and keeps the remaining files.
    """
    with _locked(home):
        record = _find(home, name)
        if not Path(record.repository).is_dir():
            return _unmount_and_remove(home, record, {})
        _check_not_mounted(Path(record.common))
        with (
            open_session(record.repository, preset=None) as opened,
            _recorded(opened, Operation.REMOVE_WORKTREE, record) as more,
        ):
            return _unmount_and_remove(home, record, more)


def _unmount_and_remove(home: Path, record: Worktree, details: dict[str, Any]) -> RemovedWorktree:
    """Unmount, move uncommitted files to the kept directory, and set `details["kept"]`. Then remove the worktree."""
    where = worktree_paths(home, record.worktree)
    repositories: tuple[str, ...] = ()
    if mounts.at(where.work) or live_at(home, where.work) is not None:
        repositories = tuple(map(str, unmount_session(home, where.work).kept))
    removed = _move_unsaved(home, record, where)._replace(repositories=repositories)
    details["kept"] = str(removed.kept or "")
    _delete(home, record)
    return removed


def find_repository(home: Path, path: Path) -> checkout.RepositoryLocation:
    """Return the repository that contains `path`; inside a mount, that of the mount's source. Raises GitError."""
    path = Path(os.path.realpath(path))
    session = session_around(home, path)
    if session is not None and session.session.mountpoint and mounts.mount_around(path) is not None:
        path = Path(session.session.source)
    return checkout.find_repository(path)


def _check_not_mounted(common: Path) -> None:
    over = mounts.mount_around(common)
    if over is not None:
        raise MountError(f"the repository {common} can be written only through the mount on {over.mountpoint}")


def _registered(home: Path, common: Path) -> list[Worktree]:
    return [record for record in load_all(home) if record.removed is None and record.common == str(common)]


def _branch(home: Path, request: WorktreeRequest, repository: Path, issue: str) -> str:
    """Return the branch name of an issue: the prefix and the lower-case id, with `-` for `.` and `_`. UsageError."""
    rules = rules_of(choose_policy(home, request.policy, repository).plain)
    branch = rules.branch_prefix + re.sub(r"[._]", "-", issue.lower())
    refusal = new_branch(rules, branch)
    if refusal is not None:
        raise UsageError(f"the issue {issue} can have no branch {branch}: {refusal.reason} {refusal.instead}")
    return branch


def _make(home: Path, location: checkout.RepositoryLocation, base: str, request: WorktreeRequest) -> AddedWorktree:
    branch = _branch(home, request, location.top, request.issue)
    identity = str(uuid.uuid4())
    record = Worktree(
        worktree=identity,
        issue=request.issue,
        branch=branch,
        agent=request.agent,
        repository=str(location.top),
        common=str(location.common),
        name=f"{branch.replace('/', '-')}-{identity[:8]}",
        base=base,
        made=datetime.now(UTC).isoformat(),
        ready=False,
        removed=None,
        tip=None,
    )
    terms: dict[str, Any] = {"agent": request.agent, "role": request.role, "policy": request.policy, "preset": None}
    with open_session(location.top, **terms) as opened:
        branches = PublishedBranches(home, location.common, opened.guard.agent.id)
        tip = _check_branch(home, record, branches.find(f"refs/heads/{branch}"), opened.guard.agent.id)
        record = dataclasses.replace(record, tip=tip)
        _begin_issue(home, opened, record, identity, is_required=request.needs_issue)
        try:
            with _recorded(opened, Operation.CREATE_WORKTREE, record):
                made = _create(home, record)
                branches.note(f"refs/heads/{branch}", tip or base)
        except BaseException:
            _undo(home, opened, record)
            raise
    try:
        return AddedWorktree(made, worktree_paths(home, identity).work, _mount(home, made, request))
    except BaseException:
        with open_session(location.top, **terms) as opened:
            _undo(home, opened, record)
        raise


def _begin_issue(home: Path, opened: OpenSession, record: Worktree, worktree: str, *, is_required: bool) -> None:
    """Store the UUID `worktree` in the issue, or "" for none. Do nothing if the repository has no issues.

    `is_required`: it is refused if the repository has issues, but not this one.
    """
    if seek_beads(Path(record.repository), home) is None:
        return
    guard = BeadsGuard(opened)
    if is_required or guard.has_issue(record.issue):
        guard.begin_work(record.issue, record.agent, worktree)


def _undo(home: Path, opened: OpenSession, record: Worktree) -> None:
    """Remove a worktree whose creation failed, its publisher, and its mark in the issue."""
    _delete(home, record)
    if record.tip is None:
        PublishedBranches(home, Path(record.common), opened.guard.agent.id).note(f"refs/heads/{record.branch}", "")
    earlier = [each.worktree for each in load_all(home) if (each.common, each.issue) == (record.common, record.issue)]
    _begin_issue(home, opened, record, earlier[-1] if earlier else "", is_required=False)


def _check_branch(home: Path, record: Worktree, published: tuple[str, str], agent_id: str) -> str | None:
    """Return the tip of the branch, or None. ForbiddenError: it has commits that this agent did not publish."""
    common = Path(record.common)
    tip = checkout.tip_of(common, record.branch)
    earlier = {
        each.tip
        for each in load_all(home)
        if (each.common, each.issue, each.agent) == (record.common, record.issue, record.agent)
    }
    if tip is None or published == (agent_id, tip) or tip in earlier:
        return tip
    commits = checkout.commits_since(common, record.base, tip)
    if commits:
        raise ForbiddenError(
            f"the branch {record.branch} has commits that {record.agent} did not publish: {'; '.join(commits)}; "
            "rename or delete the branch, or choose another issue"
        )
    return tip


def _create(home: Path, record: Worktree) -> Worktree:
    """Register the worktree, then create its branch and its directories."""
    where = worktree_paths(home, record.worktree)
    save(home, record)
    checkout.create(Path(record.common), record.name, where.tree, record.branch, record.base)
    where.work.mkdir(mode=0o700)
    save(home, made := dataclasses.replace(record, ready=True, tip=None))
    return made


@contextlib.contextmanager
def _recorded(opened: OpenSession, operation: Operation, record: Worktree) -> Iterator[dict[str, Any]]:
    """Record intent and outcome of the block in the trail. The yielded dictionary becomes the outcome's details."""
    trail, results = opened.guard.trail, dict[str, Any]()
    details: dict[str, Any] = {
        "worktree": record.worktree,
        "issue": record.issue,
        "branch": record.branch,
        "for": record.agent,
        "base": record.base,
    }
    details[TOUCHES] = [".git/"]
    action = ACTIONS[operation]
    seq = trail.intent(operation, "", action, "", guard="git", details=details)
    error = errno.EINTR
    try:
        yield results
        error = 0
    except OSError as failed:
        error = failed.errno or errno.EIO
        raise
    except BonobofsError:
        error = errno.EIO
        raise
    finally:
        trail.outcome(seq, operation, "", guard="git", action=action, error=error, details=results)


def _mount_again(home: Path, record: Worktree, request: WorktreeRequest) -> AddedWorktree:
    if record.agent != request.agent:
        raise UsageError(f"{record.issue} is {record.agent}'s, who has a worktree for it; remove that first")
    where = worktree_paths(home, record.worktree)
    mounted = None if live_at(home, where.work) is not None else _mount(home, record, request)
    options: dict[str, object] = {"--base": request.base, "--depends-on": request.depends_on}
    if mounted is None:
        options |= {"--role": request.role, "--policy": request.policy}
    return AddedWorktree(record, where.work, mounted, tuple(name for name, value in options.items() if value))


def _mount(home: Path, record: Worktree, request: WorktreeRequest) -> MountedSession:
    where = worktree_paths(home, record.worktree)
    order = MountRequest(
        where.tree,
        where.work,
        agent=record.agent,
        role=request.role,
        policy=request.policy,
        issue=record.issue,
        policy_of=Path(record.repository),
    )
    request.before_mount(where.work)
    return start(home, order)


def _find(home: Path, name: str) -> Worktree:
    path = Path(os.path.abspath(name))
    found = []
    for record in load_all(home):
        where = worktree_paths(home, record.worktree)
        if record.removed is None and (
            name in (record.issue, record.worktree) or path in (where.top, where.tree, where.work)
        ):
            found.append(record)
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{name} names {len(found)} worktrees; name one by its path: bonobofs worktree list")
    raise UsageError(f"there is no worktree {name}; see bonobofs worktree list")


def _move_unsaved(home: Path, record: Worktree, where: WorktreePaths) -> RemovedWorktree:
    """Move all content that is in no commit to the directory of kept files."""
    if not where.tree.exists():
        return RemovedWorktree(record, None, (), (), ())
    try:
        unsaved = checkout.unsaved(where.tree, home)
    except GitError as error:
        if error.kind == "busy" or error.paths:
            raise
        # The repository is gone with all commits, so keep the whole tree.
        target = _free_path(where.kept)
        os.rename(where.tree, target)
        return RemovedWorktree(record, target, ("all of it",), (), ())
    for path, content in unsaved.staged.items():
        target = _free_path(Path(f"{where.kept}.staged", path))
        target.write_bytes(content)
    files = _move_to_kept(where, unsaved.files)
    for path in unsaved.tracked:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            (where.tree / path).unlink()
    (where.tree / ".git").unlink(missing_ok=True)
    # Keep files that appeared after the status was read.
    left = [
        os.path.join(at, name)[len(str(where.tree)) + 1 :] for at, _, names in os.walk(where.tree) for name in names
    ]
    files += _move_to_kept(where, left)
    kept = where.kept if files or unsaved.staged else None
    return RemovedWorktree(record, kept, tuple(files), tuple(unsaved.staged), unsaved.deleted)


def _move_to_kept(where: WorktreePaths, paths: Sequence[str]) -> list[str]:
    for path in paths:
        target = _free_path(where.kept / path)
        os.rename(where.tree / path, target)
    return list(paths)


def _free_path(target: Path) -> Path:
    """Return `target`, or the first free `target~N`. Creates the parent directories."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = 2
    free = target
    while os.path.lexists(free):
        free = target.with_name(f"{target.name}~{number}")
        number += 1
    return free


def _delete(home: Path, record: Worktree) -> None:
    """Unmount and remove a worktree. If its creation failed, also remove its record and the branch that it made."""
    where = worktree_paths(home, record.worktree)
    common = Path(record.common)
    tip = None
    with contextlib.suppress(GitError):
        tip = checkout.tip_of(common, record.branch)
    if mounts.at(where.work):
        unmount_session(home, where.work)
    shutil.rmtree(where.tree, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        where.work.rmdir()
    checkout.remove_entry(common, record.name)
    if record.ready:
        save(home, dataclasses.replace(record, ready=False, removed=datetime.now(UTC).isoformat(), tip=tip))
        return
    if record.tip is None and tip == record.base:
        checkout.delete_branch(common, record.branch)
    shutil.rmtree(where.top, ignore_errors=True)


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Hold the lock that serializes worktree commands of a state directory."""
    (home / "worktrees").mkdir(mode=0o700, exist_ok=True)
    with locked(home / "worktrees" / "lock"):
        yield
