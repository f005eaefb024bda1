"""`bonobofs git branch|checkout|commit|merge|status|diff`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from bonobofs import session
from bonobofs.cli.nearest import check_agent, check_role
from bonobofs.cli.output import document, say
from bonobofs.errors import GitError, UsageError
from bonobofs.state.calling import call

app = typer.Typer(
    help="""Branches, commits and merges, judged by the policy and entered in the record.

In a mount the agent is the session's. Elsewhere this is the operator's, and names the agent with --agent.""",
    rich_markup_mode=None,
)

_SHORT: Final = 12

AgentOption = Annotated[str | None, typer.Option("--agent", metavar="A", help="Who does it; needed outside a mount.")]
RoleOption = Annotated[str | None, typer.Option("--role", metavar="R", help="In which role. Default: the agent's own.")]
PolicyOption = Annotated[Path | None, typer.Option("--policy", metavar="FILE", help="Outside a mount: the policy.")]
IssueOption = Annotated[str | None, typer.Option("--issue", metavar="ID", help="What the commit is for.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document.")]
MessageOption = Annotated[str, typer.Option("-m", "--message", metavar="TEXT", help="What was done, and for what.")]


class _Whose(NamedTuple):
    agent: str | None
    role: str | None
    policy: Path | None


@contextmanager
def _gate(whose: _Whose, issue: str | None = None) -> Iterator[Any]:
    """The gate of the mount that this is run in, or one of a session of its own."""
    called = session.callable_around(session.home(), Path.cwd())
    if called is not None:
        if whose != _Whose(None, None, None):
            raise UsageError("in a mount the agent, the role and the policy are the session's; leave them out")
        yield _Called(called.directory, called.mountpoint)
        return
    if whose.agent is None:
        raise UsageError("outside a mount, name the agent with --agent")
    from bonobofs.guards.git.gate import GitGate  # noqa: PLC0415 - libgit2 is loaded where it is asked for

    top, home = _top(Path.cwd()), session.home()
    check_agent(home, whose.agent)
    if whose.role is not None:
        check_role(whose.role, session.choose_policy(home, whose.policy, top))
    with session.open_session(top, agent=whose.agent, role=whose.role, policy=whose.policy, preset=None) as opened:
        gate = GitGate(opened, issue)
        try:
            yield gate
        finally:
            gate.close()


class _Called:
    """The gate of a mount, by the socket of its session."""

    def __init__(self, directory: Path, root: Path) -> None:
        self._directory: Final = directory
        self.root: Final = root

    def __getattr__(self, name: str) -> Any:
        def ask(*given: Any, **arguments: Any) -> Any:
            answer = call(
                self._directory, f"git.{name}", **dict(zip(_FIRST.get(name, ()), given, strict=False)), **arguments
            )
            if isinstance(answer, dict) and "failed" in answer:
                failed = answer["failed"]
                raise GitError(failed["message"], kind=failed["kind"], paths=failed["paths"])
            return _Answer(answer) if isinstance(answer, dict) else answer

        return ask


_FIRST: Final = {
    "create_branch": ("name", "base"),
    "switch": ("branch",),
    "commit": ("message", "files"),
    "merge": ("source",),
}


class _Answer:
    """What a call gave, by name."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.__dict__.update(answer)


def _top(directory: Path) -> Path:
    for place in (directory, *directory.parents):
        if (place / ".git").exists():
            return place
    raise GitError(f"{directory} is in no git repository", kind="no-repository")


def _below(root: Path, paths: list[Path]) -> list[str]:
    """The paths as they are below the root; what lies elsewhere stays as it is, and is refused."""
    found = []
    for path in paths:
        absolute = Path.cwd() / path
        found.append(str(absolute.relative_to(root)) if absolute.is_relative_to(root) else str(absolute))
    return found


@app.command("branch")
def branch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new branch.")],
    base: Annotated[str, typer.Argument(metavar="[BASE]", help="Where it starts.")] = "main",
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
) -> None:
    """Make a branch.

    \b
    Example:
      bonobofs git branch aidlc/gt-17 --agent alice
    """
    with _gate(_Whose(agent, role, policy)) as gate:
        say(f"{name} at {gate.create_branch(name, base)[:_SHORT]}")


@app.command("checkout")
def checkout(
    name: Annotated[str, typer.Argument(metavar="BRANCH", help="The branch to go to.")],
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
) -> None:
    """Go to a branch; the working tree has no uncommitted changes, and follows.

    \b
    Example:
      bonobofs git checkout aidlc/gt-17 --agent alice
    """
    with _gate(_Whose(agent, role, policy)) as gate:
        gate.switch(name, clean=True)
        say(f"on {name}")


@app.command("commit")
def commit(
    message: MessageOption,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="These alone; else what is staged.")
    ] = None,
    issue: IssueOption = None,
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
) -> None:
    """Commit files as they are now, or what is staged.

    \b
    Example:
      bonobofs git commit -m 'Add the plan' --issue gt-17 aidlc-docs/plan.md --agent alice
    """
    with _gate(_Whose(agent, role, policy)) as gate:
        names = _below(gate.root, files) if files else None
        made = gate.commit(message, names, only=names is not None, issue=issue)
        say(f"{made.hash[:_SHORT]} {made.message.splitlines()[0]}")


@app.command("merge")
def merge(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="What is merged.")],
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="Into which branch. Default: where HEAD is.")
    ] = None,
    strategy: Annotated[str, typer.Option(metavar="S", help="merge or squash.")] = "merge",
    issue: IssueOption = None,
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
) -> None:
    """Merge a branch into another. With conflicts nothing is changed; they are listed, and the exit code is 1.

    \b
    Example:
      bonobofs git merge aidlc/gt-17 aidlc/release --agent alice
    """
    with _gate(_Whose(agent, role, policy), issue) as gate:
        merged = gate.merge(source, target=target, strategy=strategy)
        if merged.conflicts:
            for path in merged.conflicts:
                say(f"conflict: {path}")
            raise GitError("there are conflicts, and nothing was changed", kind="conflict", paths=merged.conflicts)
        say(
            "already up to date"
            if merged.up_to_date
            else f"{merged.hash[:_SHORT]} {merged.message.strip() or 'fast-forward'}"
        )


@app.command("status")
def status(json: JsonOption = False) -> None:
    """Show what is staged, changed and untracked."""
    from bonobofs.guards.git.reading import status_of  # noqa: PLC0415 - as above

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
    path: Annotated[Path | None, typer.Argument(metavar="[PATH]", help="One file or directory. Default: all.")] = None,
    json: JsonOption = False,
) -> None:
    """Show what has changed since the last commit, as a patch."""
    from bonobofs.guards.git.reading import diff_of  # noqa: PLC0415 - as above

    top = _top(Path.cwd())
    named = None if path is None else _below(top, [path])[0]
    patch = diff_of(top, session.home(), named)
    if json:
        document({"path": named, "patch": patch})
    else:
        print(patch, end="")
