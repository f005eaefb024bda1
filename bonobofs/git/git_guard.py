r"""Branches, commits and merges for Python callers, authorized by the same enforcer as the mount.

    with open_session("project", agent="alice") as session:
        guard = GitGuard(session)
        guard.create_branch("aidlc/gt-17", agent="alice")
        guard.checkout_branch("aidlc/gt-17", agent="alice")
        made = guard.commit("Add the plan", ["aidlc-docs/plan.md"], agent="alice", issue_id="gt-17")

On denial, `create_branch`, `checkout_branch`, `commit` and `merge` return a `ValidationResult` that is false. Their
`guarded_` twins raise `Refused`, a PermissionError. Both raise GitError for fatal errors of git: a damaged repository,
a lock of another program, a missing file. A merge with conflicts changes nothing and returns them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bonobofs.audit.entry import TOUCHES
from bonobofs.enforcement.authorizer import Caller, RelatedChange
from bonobofs.errors import GitError
from bonobofs.files.results import (
    Closing,
    GuardedSession,
    Log,
    as_result,
    is_session_agent,
    leads_outside,
    record_failure,
    recorded,
    with_claimed_agent,
    wrong_agent,
)
from bonobofs.files.workspace import Workspace
from bonobofs.git import branch_rules
from bonobofs.git.branch_rules import (
    AIDLC_BRANCH_PREFIX,
    COMMIT_MESSAGE_PATTERN,
    PROTECTED_BRANCHES,
    RuleRefusal,
    identity,
    rules_of,
)
from bonobofs.git.checkout import (
    Checkout,
    GitStatus,
    IndexUpdate,
    TreeUpdate,
    diff_of,
    open_checkout,
    status_of,
)
from bonobofs.git.journal import HEAD
from bonobofs.git.private_checkout import join_records, split_records
from bonobofs.git.publication import Publisher, RefUpdate
from bonobofs.git.shared_head import HeadReplacement, is_checked_out_elsewhere
from bonobofs.git.source_refs import BRANCHES, PublishedBranches
from bonobofs.git.tree_changes import TreeChanges, is_refused_path, workspace_path
from bonobofs.policy.decision import Code, Denied, Permit
from bonobofs.policy.request import NO_FACTS, Context, Kind, Operation, Request, WorkspacePath

__all__ = [
    "AIDLC_BRANCH_PREFIX",
    "COMMIT_MESSAGE_PATTERN",
    "PROTECTED_BRANCHES",
    "GitGuard",
    "GitStatus",
    "MergeResult",
]

PathLike = str | os.PathLike[str]
_HERE: Final = WorkspacePath("")
_LISTED: Final = 1000
"""Paths that an entry lists at most."""
_ISSUE: Final = re.compile(r"\[([\w.-]+)\]\s")
_FILTER: Final = RuleRefusal(
    Code.GIT,
    "git.filter",
    "The content of this path goes through a program that a git configuration names, and the service runs none.",
    "Commit or check out the path with git in a mount.",
)


@dataclass(frozen=True)
class MergeResult:
    """Result of a merge. A merge without success changed nothing."""

    success: bool
    commit_hash: str | None
    conflicts: list[str] = field(default_factory=list)
    """Paths with a merge conflict."""
    strategy_used: str = "merge"
    fast_forward: bool = False
    """The target was moved to the source's commit, without a merge commit."""


class _Operation:
    """One call: its checkout, its entry in the trail, and its refusals."""

    def __init__(self, session: GuardedSession, checkout: Checkout, request: Request, caller: Caller) -> None:
        self.session: Final = session
        self.checkout: Final = checkout
        self.request: Final = request
        self.caller = caller
        self.rules: Final = rules_of(session.guard.policy.document)

    def refuse_if(self, refusal: RuleRefusal | Denied | None, path: str = "", **details: Any) -> None:
        """Record the refusal and raise Refused, unless it is None."""
        if refusal is not None:
            denied = refusal if isinstance(refusal, Denied) else refusal.of(self.request.operation, path)
            caller = self.caller._replace(details={**self.caller.details, **details})
            with self.session.change_lock:
                raise self.session.guard.deny(denied, caller, guard="git")

    def require_permit(self, part: RelatedChange, *codes: Code) -> None:
        """Record and raise the engine's denial of `part`. With `codes`, ignore denials with other codes."""
        with self.session.change_lock:
            decision = self.session.guard.decide(part.request, part.context)
        if isinstance(decision, Denied) and (not codes or decision.code in codes):
            self.refuse_if(decision)

    def require_clean(self) -> None:
        """Raise Refused if a tracked file has uncommitted changes."""
        paths = sorted({path for _, path in self.checkout.status(untracked=False)})
        if paths:
            self.refuse_if(branch_rules.CLEAN, paths=paths[:_LISTED])

    def require_free_branch(self, branch: str) -> None:
        """Raise Refused if another worktree has the branch checked out."""
        checkout = self.checkout
        if is_checked_out_elsewhere(checkout.source, checkout.repository.common_dir, BRANCHES + branch):
            self.refuse_if(branch_rules.CHECKED_OUT)

    def update(self, old: str, new: str) -> TreeUpdate:
        """Return the update of the checkout to another commit. Raises Refused for local changes and git filters."""
        self.require_clean()
        try:
            update = TreeUpdate(self.checkout, old, new)
        except GitError as error:
            if error.kind == "untracked":
                self.refuse_if(branch_rules.CLEAN, message=str(error))
            raise
        paths = [workspace_path(one.path) for one in update.differences]
        for path in (*self.checkout.filtered(paths), *self.checkout.filtered(paths, new)):
            self.refuse_if(_FILTER, path)
        return update

    def commit_of(self, branch: str, refusal: RuleRefusal) -> str:
        """Return the commit of a branch. Raises Refused if the branch does not exist or is a symbolic ref."""
        try:
            # libgit2 would truncate the name at a NUL.
            found = self.checkout.repository.target(BRANCHES + branch) if branch.isprintable() else ""
        except GitError:
            self.refuse_if(branch_rules.SYMBOLIC)
            raise
        if not found:
            self.refuse_if(refusal)
        return found

    def publish(
        self, branch: str, old: str, new: str, issue: str | None, update: TreeUpdate | IndexUpdate | None = None
    ) -> None:
        """Authorize the move of a branch and make it, with an update of the checkout.

        Raises Refused, GitError without moving the branch; IncompleteError if a step after the move fails.
        """
        checkout, session = self.checkout, self.session
        objects = checkout.new_objects()
        publisher = Publisher(
            session.guard,
            checkout.repository,
            PublishedBranches(session.home, checkout.repository.common_dir, session.guard.agent.id),
            objects=checkout.objects,
            journal=checkout.journal,
            lock=session.change_lock,
        )

        @contextmanager
        def follow(permit: Permit) -> Iterator[Callable[[], None]]:
            with ExitStack() as stack:
                complete = None if update is None else stack.enter_context(update.apply(permit))

                def finish() -> None:
                    if complete is not None:
                        complete()
                    checkout.give_new_files_to_owner(branch, objects)

                yield finish

        publisher.publish(
            [RefUpdate(BRANCHES + branch, old, new)],
            issue=issue,
            operation=self.request.operation,
            details={"hash": new},
            caller=self.caller,
            touches=() if update is None else touched(update),
            follow=follow,
        )

    @contextmanager
    def moving_head(self, branch: str, commit: str) -> Iterator[HeadReplacement]:
        """Lock HEAD of the checkout, and yield the change to a branch. Raises GitError if it was moved or is locked."""
        checkout = self.checkout
        head = checkout.head
        person = identity(self.session.guard.agent, self.rules)
        old, new = f"ref: {BRANCHES}{head.branch}" if head.branch else head.commit, f"ref: {BRANCHES}{branch}"
        with (
            checkout.writing((HEAD, old, new)) as token,
            HeadReplacement(checkout.source, token, (old, new), (head.commit, commit), person) as replacement,
        ):
            replacement.lock()
            yield replacement

    def write_commit(self, tree: str, parents: Sequence[str], message: str) -> str:
        """Write a commit of the agent and return its id. The policy, else the operator's config, decides on signing."""
        name, email = identity(self.session.guard.agent, self.rules)
        people = {"GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": email}
        people |= {key.replace("AUTHOR", "COMMITTER"): text for key, text in people.items()}
        words = ["-c", "i18n.commitEncoding=UTF-8", *self._signing(), tree]
        for parent in parents:
            words += ["-p", parent]
        try:
            commit_id = self.checkout.run(*words, data=message.encode(), operator=True, more=people)
        except GitError as error:
            raise GitError(f"the commit cannot be made or signed: {error}", kind="signing") from error
        return commit_id.decode().strip()

    def _signing(self) -> list[str]:
        form, _, key = (self.rules.sign or "").partition(":")
        if form == "off":
            return ["commit-tree"]
        if form:
            return ["-c", f"gpg.format={form}", "-c", f"user.signingkey={os.path.expanduser(key)}", "commit-tree", "-S"]
        configured = self.checkout.run("config", "--type=bool", "--default=false", "commit.gpgsign", operator=True)
        return ["commit-tree", *(["-S"] if configured.strip() == b"true" else [])]


@recorded(
    "git",
    create_branch=Operation.CREATE_BRANCH,
    checkout_branch=Operation.CHECKOUT_BRANCH,
    commit=Operation.COMMIT,
    merge=Operation.MERGE,
    get_status=Operation.CALL,
    get_diff=Operation.CALL,
)
class GitGuard(Closing):
    """Guarded repository of one workspace, for the agent of one session. Thread-safe."""

    def __init__(self, session: GuardedSession, *, issue: str | None = None) -> None:
        """Use an open session. `issue` is the issue that the session works on."""
        self._session: Final = session
        self._issue: Final = issue
        self.audit: Final[Log] = session.log
        self._workspace: Final = Workspace(Path(session.session.source), session.access_path)

    @property
    def agent(self) -> str:
        """Label of the session's agent."""
        return self._session.guard.agent.label

    def close(self) -> None:
        """Close the workspace's directory. The session stays open."""
        self._workspace.close()

    def guarded_create_branch(self, branch_name: str, agent: str, base: str = "main") -> str:
        """Make a branch at the tip of the branch `base`, and return its name. Raises Refused, GitError."""
        caller = Caller("create_branch", {"branch": branch_name, "base": base})
        with self._operation(agent, Operation.CREATE_BRANCH, caller) as call:
            call.refuse_if(branch_rules.new_branch(call.rules, branch_name))
            start = call.commit_of(base, branch_rules.BASE)
            if _clashes(call.checkout, branch_name):
                call.refuse_if(branch_rules.EXISTS)
            call.publish(branch_name, "", start, self._issue)
        return branch_name

    create_branch = as_result(guarded_create_branch)

    def guarded_checkout_branch(self, branch_name: str, agent: str) -> None:
        """Switch to a branch. Raises Refused if tracked files have uncommitted changes; GitError."""
        caller = Caller("checkout_branch", {"branch": branch_name})
        with self._operation(agent, Operation.CHECKOUT_BRANCH, caller) as call:
            commit = call.commit_of(branch_name, branch_rules.BRANCH)
            call.require_free_branch(branch_name)
            old = call.checkout.head
            update = call.update(old.commit, commit)
            details = {"from": old.branch or old.commit, "hash": commit, TOUCHES: [".git/", *touched(update)]}
            parts = self._parts(call, update, old.commit)
            authorize = self._session.guard.authorize
            with (
                self._session.change_lock,
                authorize(call.request, NO_FACTS, *parts, caller=caller, details=details, guard="git") as permit,
                call.moving_head(branch_name, commit) as head,
                update.apply(permit) as complete,
            ):
                complete()
                head.install()
                call.checkout.give_new_files_to_owner(branch_name)

    checkout_branch = as_result(guarded_checkout_branch)

    def guarded_commit(self, message: str, files: Sequence[PathLike], agent: str, issue_id: str) -> str:
        """Commit the current content of `files`, and return the commit's hash.

        A missing file is committed as deleted. Other staged changes stay staged. A missing `[ISSUE]` is prepended to
        the message. Raises Refused; GitError if a file is unknown or no file has changed.
        """
        paths = list(dict.fromkeys(self._workspace.relative(path) for path in files))
        caller = Caller("commit", {"message": message, "files": paths[:_LISTED], "issue": issue_id})
        with self._operation(agent, Operation.COMMIT, caller) as call:
            head, issue = call.checkout.head, self._issue or issue_id or None
            call.checkout.check_settled()
            if not head.branch:
                raise GitError("HEAD is detached; check out a branch first", kind="detached")
            if call.rules.protects(head.branch):
                call.refuse_if(branch_rules.protected(call.rules))
            text = branch_rules.message(call.rules, call.checkout.tidied(message), issue)
            if self._issue is not None and issue_id not in ("", self._issue):
                text = branch_rules.bad_message(call.rules, "name the issue that it is for, and no other")
            if isinstance(text, RuleRefusal):
                call.refuse_if(text)
            self._check_files(call, paths)
            tree = _tree_with(call.checkout, paths)
            if tree == call.checkout.tree_of(head.commit):
                raise GitError("there is nothing to commit", kind="nothing")
            commit_id = call.write_commit(tree, [head.commit] if head.commit else [], str(text))
            call.caller = caller._replace(details={**caller.details, "message": text})
            call.publish(head.branch, head.commit, commit_id, issue, IndexUpdate(call.checkout, head.commit, commit_id))
            return commit_id

    commit = as_result(guarded_commit)

    def guarded_merge(self, source: str, target: str, agent: str, strategy: str = "merge") -> MergeResult:
        """Merge the branch `source` into `target` by strategy "merge" (fast-forward where possible) or "squash".

        If the target is checked out, the work tree must be clean and is updated. Raises Refused, GitError.
        """
        caller = Caller("merge", {"source": source, "target": target, "strategy": strategy})
        with self._operation(agent, Operation.MERGE, caller) as call:
            if strategy not in ("merge", "squash"):
                call.refuse_if(branch_rules.STRATEGY)
            if call.rules.protects(target):
                call.refuse_if(branch_rules.protected(call.rules))
            theirs = call.commit_of(source, branch_rules.BRANCH)
            ours = call.commit_of(target, branch_rules.BRANCH)
            call.require_free_branch(target)
            repository = call.checkout.repository
            if repository.reaches(ours, theirs):
                self._note(call, up_to_date=True)
                return MergeResult(True, ours, strategy_used=strategy)
            forward = repository.reaches(theirs, ours)
            tree, conflicts = (call.checkout.tree_of(theirs), []) if forward else _merged(call.checkout, ours, theirs)
            if conflicts:
                self._note(call, conflicts=conflicts[:_LISTED])
                return MergeResult(False, None, conflicts, strategy)
            commit_id = theirs
            if not forward or strategy == "squash":
                parents = [ours] if strategy == "squash" else [ours, theirs]
                commit_id = call.write_commit(tree, parents, self._merge_message(call, source, target, strategy))
            self._publish_merge(call, target, ours, commit_id)
            return MergeResult(True, commit_id, [], strategy, commit_id == theirs)

    merge = as_result(guarded_merge)

    def _publish_merge(self, call: _Operation, target: str, ours: str, commit_id: str) -> None:
        """Move the target branch, and update the checkout if HEAD is on that branch."""
        update = None
        if call.checkout.head.branch == target:
            call.checkout.check_settled()
            update = call.update(ours, commit_id)
        call.publish(target, ours, commit_id, self._issue, update)

    def _merge_message(self, call: _Operation, source: str, target: str, strategy: str) -> str:
        """Return the message of a merge. It names the session's issue, else that of the last commit of `source`."""
        plain = f"{'Squash' if strategy == 'squash' else 'Merge'} branch '{source}' into {target}\n"
        last = call.checkout.run("log", "-1", "--format=%s", call.checkout.repository.target(BRANCHES + source))
        found = _ISSUE.match(last.decode("utf-8", "replace"))
        text = branch_rules.message(call.rules, plain, self._issue or (found[1] if found is not None else None))
        if isinstance(text, RuleRefusal):
            call.refuse_if(text if strategy == "squash" else None)
            return plain
        return text

    def get_status(self, agent: str) -> GitStatus:
        """Return the staged, modified and untracked files. Raises Refused if `agent` is not the session's."""
        self._check_agent(agent, Operation.CALL, Caller("get_status"))
        return status_of(self._workspace.root, self._session.home)

    def get_diff(self, path: PathLike | None = None) -> str:
        """Return the changes of tracked files since HEAD as a patch. `path` selects one file or directory."""
        return diff_of(
            self._workspace.root, self._session.home, None if path is None else self._workspace.relative(path)
        )

    def _check_agent(self, agent: str, operation: Operation, caller: Caller) -> None:
        """Record the refusal and raise Refused if the agent is not the session's."""
        authorizer = self._session.guard
        if not is_session_agent(agent, authorizer.agent):
            with self._session.change_lock:
                raise authorizer.deny(wrong_agent(_HERE, operation), with_claimed_agent(caller, agent), guard="git")

    @contextmanager
    def _operation(self, agent: str, operation: Operation, caller: Caller) -> Iterator[_Operation]:
        """Run one call: check agent and role, open the checkout, record a GitError as failure."""
        self._check_agent(agent, operation, caller)
        request = Request(operation, _HERE)
        with self._session.change_lock:
            decision = self._session.guard.decide(request)
            if isinstance(decision, Denied):
                raise self._session.guard.deny(decision, caller, guard="git")
        try:
            with open_checkout(self._workspace.root, self._session.home) as checkout:
                yield _Operation(self._session, checkout, request, caller)
        except GitError as error:
            details = {"error": error.kind, "message": str(error), "paths": list(error.paths)[:_LISTED]}
            record_failure(self._session, request, error, caller, guard="git", details=details)
            raise

    def _note(self, call: _Operation, **details: Any) -> None:
        with self._session.change_lock:
            self._session.guard.record_call(call.request, caller=call.caller, details=details, guard="git")

    def _parts(self, call: _Operation, update: TreeUpdate, old: str) -> list[RelatedChange]:
        """Return the changes that the policy judges: paths whose new content no protected branch has there."""
        repository = call.checkout.repository
        tips = repository.protected_tips(call.rules)
        judged = [one for one in update.differences if all(repository.entry(tip, one.path) != one.new for tip in tips)]
        changes = TreeChanges(repository, call.request.operation)
        call.refuse_if(changes.refusal(judged))
        return list(changes.related(judged, old))

    def _check_files(self, call: _Operation, paths: Sequence[WorkspacePath]) -> None:
        """Judge each file by its path, kind and size before git reads it.

        Raises Refused; GitError if a path is a directory, is beyond a symlink, or is neither present nor tracked.
        """
        for path in paths:
            call.require_permit(RelatedChange(Request(Operation.WRITE_FILE, path)), Code.OUTSIDE, Code.PROTECTED)
            if is_refused_path(os.fsencode(path)):
                call.refuse_if(branch_rules.NOT_OURS, path)
        for filtered in call.checkout.filtered(paths):
            call.refuse_if(_FILTER, filtered)
        tracked = call.checkout.tracked()
        for path in paths:
            try:
                location = self._workspace.locate(path, follow=False)
            except NotADirectoryError:  # a file has replaced its directory
                kind, size, real = None, 0, path
            else:
                if location is None:
                    call.refuse_if(leads_outside(path, Operation.WRITE_FILE))
                    continue
                with location:
                    kind = None if location.status is None else location.kind
                    size, real = 0 if location.status is None else location.status.st_size, location.path
            if kind is None:
                call.require_permit(
                    RelatedChange(Request(Operation.DELETE_FILE, path), Context(leaves=True, in_source=True))
                )
            elif kind is Kind.FILE:
                call.require_permit(
                    RelatedChange(Request(Operation.WRITE_FILE, path), Context(size=size, in_source=True))
                )
            is_missing = kind is None and path not in tracked
            if real != path or is_missing or kind not in (None, Kind.FILE, Kind.SYMLINK):
                raise GitError(f"{path!a} did not match any file", kind="pathspec", paths=(path,))


def touched(update: TreeUpdate | IndexUpdate) -> list[str]:
    """Return the paths that an update changes, and the directories that it may leave empty."""
    gone = (one.path.rpartition(b"/")[0] for one in update.differences if one.new is None)
    return [
        *sorted({workspace_path(path) for path in gone} - {""}),
        *(workspace_path(one.path) for one in update.differences),
    ]


def _tree_with(checkout: Checkout, paths: Sequence[str]) -> str:
    """Write the tree of HEAD with these files as in the work tree, and return its id."""
    index = {"GIT_INDEX_FILE": str(checkout.room / "commit")}
    checkout.run("read-tree", checkout.tree_of(checkout.head.commit), more=index)
    words = ("add", "--all", "--force", "--sparse", "--pathspec-from-file=-", "--pathspec-file-nul")
    if paths:  # git takes an empty list as all paths
        checkout.run(*words, data=join_records(map(os.fsencode, paths)), more=index)
    return checkout.run("write-tree", more=index).decode().strip()


def _merged(checkout: Checkout, ours: str, theirs: str) -> tuple[str, list[str]]:
    """Return the tree of a merge and the paths in conflict."""
    output = checkout.run(
        "merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", ours, theirs, codes=(0, 1)
    )
    tree, *conflicts = split_records(output)
    return tree, sorted(set(conflicts))


def _clashes(checkout: Checkout, branch: str) -> bool:
    """True if the branch name, a prefix path of it or a name below it exists."""
    found = (name.removeprefix(BRANCHES) for name in checkout.repository.raw.references if name.startswith(BRANCHES))
    return any(f"{name}/".startswith(f"{branch}/") or branch.startswith(f"{name}/") for name in found)
