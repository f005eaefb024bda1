"""`bonobofs git branch|checkout|commit|merge|status|diff`.

In a mount, the commands that change something run the session's git. Elsewhere they call GitGuard.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from bonobofs import session
from bonobofs.cli.actor import ActingAs, AgentOption, PolicyOption, RoleOption
from bonobofs.cli.options import Argument, Group, Option
from bonobofs.cli.output import document, say
from bonobofs.errors import GitError
from bonobofs.git.session_git import GitExitError, SessionGit

if TYPE_CHECKING:
    from bonobofs.git.git_guard import GitGuard

app = Group(
    help="""Branch, commit and merge under the policy. Every change is recorded.

In a mount, the session's agent acts. Elsewhere the operator names the agent with --agent.""",
)

_SHORT: Final = 12

IssueOption = Annotated[str | None, Option("--issue", metavar="ID", help="The issue of the commit.")]
JsonOption = Annotated[bool, Option("--json", help="One JSON document.")]
MessageOption = Annotated[str, Option("-m", "--message", metavar="TEXT", help="The commit message.")]


@contextmanager
def _acting(identity: ActingAs, issue: str | None = None) -> Iterator[GitGuard | SessionGit]:
    """Give the git of the mount around the working directory; outside a mount, the GitGuard of a new session."""
    called = identity.mount_session()
    if called is not None:
        try:
            yield SessionGit(called.directory / "bin/git", issue or called.issue)
        except GitExitError as error:
            raise SystemExit(error.status) from None
        return
    from bonobofs.git.git_guard import GitGuard  # noqa: PLC0415 - loads libgit2

    with identity.open_session(_top(Path.cwd())) as opened, GitGuard(opened, issue=issue) as guard:
        yield guard


def _top(directory: Path) -> Path:
    for above in (directory, *directory.parents):
        if (above / ".git").exists():
            return above
    raise GitError(f"{directory} is in no git repository; run this in one", kind="no-repository")


@app.command("branch")
def branch(
    name: Annotated[str, Argument(metavar="NAME", help="The new branch.")],
    base: Annotated[str, Argument(metavar="[BASE]", help="The commit or branch where it starts.")] = "main",
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
) -> None:
    """Create a branch.

    \b
    Example:
      bonobofs git branch aidlc/gt-17 --agent alice
    """
    with _acting(ActingAs(agent, role, policy)) as git:
        if isinstance(git, SessionGit):
            git.branch(name, base)
        else:
            git.guarded_create_branch(name, git.agent, base)
            say(f"{name} made at {base}")


@app.command("checkout")
def checkout(
    name: Annotated[str, Argument(metavar="BRANCH", help="The branch to check out.")],
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
) -> None:
    """Check out a branch. The working tree must have no uncommitted changes.

    \b
    Example:
      bonobofs git checkout aidlc/gt-17 --agent alice
    """
    with _acting(ActingAs(agent, role, policy)) as git:
        if isinstance(git, SessionGit):
            git.checkout(name)
        else:
            git.guarded_checkout_branch(name, git.agent)
            say(f"on {name}")


@app.command("commit")
def commit(
    message: MessageOption,
    files: Annotated[
        list[Path] | None,
        Argument(metavar="[FILE]...", help="Commit only these. Default: what is staged."),
    ] = None,
    issue: IssueOption = None,
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
) -> None:
    """Commit the named files as they are now, or the staged files.

    \b
    Example:
      bonobofs git commit -m 'Add the plan' --issue gt-17 aidlc-docs/plan.md --agent alice
    """
    with _acting(ActingAs(agent, role, policy), issue) as git:
        if isinstance(git, SessionGit):
            git.commit(message, [str(file) for file in files or ()])
        else:
            paths = [os.path.abspath(path) for path in files] if files else _staged(git)
            made = git.guarded_commit(message, paths, git.agent, issue or "")
            say(f"{made[:_SHORT]} committed")


def _staged(guard: GitGuard) -> list[str]:
    """Return the staged files. GitError: none is staged, or one differs from the working tree."""
    found = guard.get_status(guard.agent)
    both = sorted(set(found.staged) & set(found.modified))
    if both:
        raise GitError(f"{both[0]} changed after it was staged; stage it again, or name the files", kind="dirty")
    if not found.staged:
        raise GitError("nothing is staged; stage files with git add, or name them", kind="empty")
    return list(found.staged)


@app.command("merge")
def merge(
    source: Annotated[str, Argument(metavar="SOURCE", help="The branch to merge.")],
    target: Annotated[
        str | None, Argument(metavar="[TARGET]", help="The branch that changes. Default: the current one.")
    ] = None,
    strategy: Annotated[str, Option(metavar="S", help="merge or squash.")] = "merge",
    issue: IssueOption = None,
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
) -> None:
    """Merge a branch into another. If there are conflicts, nothing changes; they are listed and the exit status is 1.

    \b
    Example:
      bonobofs git merge aidlc/gt-17 aidlc/release --agent alice
    """
    with _acting(ActingAs(agent, role, policy), issue) as git:
        if isinstance(git, SessionGit):
            try:
                git.merge(source, target, strategy)
            except GitError as error:
                for path in error.paths:
                    say(f"conflict: {path}")
                raise
            return
        into = target or git.get_status(git.agent).branch
        merged = git.guarded_merge(source, into, git.agent, strategy)
        for path in merged.conflicts:
            say(f"conflict: {path}")
        if not merged.success:
            raise GitError("there are conflicts, and nothing was changed", kind="conflict", paths=merged.conflicts)
        say(f"{into} at {str(merged.commit_hash)[:_SHORT]}{' by fast-forward' if merged.fast_forward else ''}")


@app.command("status")
def status(json: JsonOption = False) -> None:
    """List staged, modified and untracked files."""
    from bonobofs.git.checkout import status_of  # noqa: PLC0415 - loads libgit2

    found = status_of(_top(Path.cwd()), session.home())
    if json:
        document(found.__dict__)
        return
    say(f"on {found.branch}" if found.branch else "HEAD is detached")
    for word, paths in (("staged", found.staged), ("modified", found.modified), ("untracked", found.untracked)):
        for path in paths:
            say(f"{word}: {path}")
    if found.clean and not found.untracked:
        say("nothing to commit")


@app.command("diff")
def diff(
    path: Annotated[Path | None, Argument(metavar="[PATH]", help="One file or directory. Default: all.")] = None,
    json: JsonOption = False,
) -> None:
    """Print the changes since the last commit as a patch."""
    from bonobofs.git.checkout import diff_of  # noqa: PLC0415 - loads libgit2

    top = _top(Path.cwd())
    named = None if path is None else os.path.relpath(Path.cwd() / path, top)
    patch = diff_of(top, session.home(), named)
    if json:
        document({"path": named, "patch": patch})
    else:
        sys.stdout.buffer.write(os.fsencode(patch))
