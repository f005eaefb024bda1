"""`bonobofs worktree add|list|remove`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

from bonobofs import session
from bonobofs.cli.actor import check_agent, check_role, policy_path
from bonobofs.cli.options import Argument, Group, Option
from bonobofs.cli.output import document, note, say, table, waiting

app = Group(help="Make and remove a work tree and branch of an agent for an issue.")


@app.command("add")
def add(
    issue: Annotated[str, Option("--issue", metavar="ID", help="The issue, which names the branch.")],
    agent: Annotated[str, Option("--agent", metavar="A", help="The agent; a new name needs --new.")],
    role: Annotated[str | None, Option("--role", metavar="R", help="Its role. Default: as for bonobofs mount.")] = None,
    depends_on: Annotated[
        list[str] | None,
        Option("--depends-on", metavar="ID", help="An issue whose work the base must contain. Repeatable."),
    ] = None,
    base: Annotated[
        str | None,
        Option("--base", metavar="REF", help="Where the branch begins. Default: main, else master, else HEAD."),
    ] = None,
    policy: Annotated[
        str | None, Option("--policy", metavar="FILE", help="The policy file. Default: as for bonobofs mount.")
    ] = None,
    repository: Annotated[
        str, Option("--repository", metavar="DIR", help="A directory in the repository. Default: this one.")
    ] = ".",
    new: Annotated[bool, Option("--new", help="Register the agent if its name is new.")] = False,
) -> None:
    """Create a worktree for an issue, mount it under the policy, and print its path.

    The branch is created if it is missing. An existing worktree is mounted again. The branch is branch_prefix of the
    policy and the id in lower case, with - for . and _: A_B has the branch a-b, or aidlc/a-b under the preset aidlc.

    \b
    Examples:
      bonobofs worktree add --issue gt-17 --agent alice
      bonobofs worktree add --issue gt-18 --agent bob --role lead --depends-on gt-17
    """
    home = session.home()
    request = session.worktrees.WorktreeRequest(
        Path(os.path.abspath(repository)),
        issue,
        agent,
        role,
        policy_path(policy),
        base,
        depends_on or [],
    )
    check_agent(home, agent, new=new)
    if role is not None:
        check_role(role, session.choose_policy(home, request.policy, request.repository))
    with waiting(f"making a worktree for {issue}"):
        added = session.worktrees.add(home, request)
    say(str(added.work))
    note(f"branch {added.worktree.branch} of {added.worktree.repository}, for {added.worktree.agent}")
    for text in added.mounted.notes if added.mounted is not None else ("The worktree was already mounted.",):
        note(text)
    if added.ignored:
        note(f"the worktree exists, so {' and '.join(added.ignored)} had no effect; remove it first to change that")


@app.command("list")
def listed(
    json: Annotated[bool, Option("--json", help="One JSON document.")] = False,
) -> None:
    """List the worktrees.

    \b
    Example:
      bonobofs worktree list
    """
    found = session.worktrees.statuses(session.home())
    if json:
        document([{**dataclasses.asdict(one.worktree), "work": str(one.work), "mounted": one.mounted} for one in found])
        return
    rows = [
        (
            one.worktree.issue,
            one.worktree.agent,
            one.worktree.branch,
            "mounted" if one.mounted else "not mounted" if one.worktree.ready else "unfinished",
            str(one.work),
        )
        for one in found
    ]
    table(("ISSUE", "AGENT", "BRANCH", "STATE", "PATH"), rows)


@app.command("remove")
def remove(
    worktree: Annotated[str, Argument(metavar="WORKTREE", help="Its issue, path or UUID.")],
) -> None:
    """Unmount and remove a worktree. Its branch stays. Uncommitted files are kept and listed.

    \b
    Example:
      bonobofs worktree remove gt-17
    """
    home = session.home()
    with waiting(f"removing the worktree {worktree}"):
        removed = session.worktrees.remove(home, worktree)
    say(f"{removed.worktree.issue}: removed; its branch {removed.worktree.branch} stays")
    if removed.kept is not None:
        say(f"kept in {removed.kept}:")
    for path in removed.files:
        say(f"  {path}")
    for path in removed.staged:
        say(f"  {path}, as it was staged, in {removed.kept}.staged")
    for repository in removed.repositories:
        say(repository)
    for path in removed.deleted:
        note(f"{path} had been deleted, which is in no commit")
