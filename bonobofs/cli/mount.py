"""`bonobofs mount` and `bonobofs umount`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Final

import typer

from bonobofs import session
from bonobofs.cli.output import note, say, waiting
from bonobofs.cli.suggestions import check_agent, check_role
from bonobofs.policy.presets import PRESETS

_NAMED: Final = 5


def mount(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The directory that is guarded.")],
    mountpoint: Annotated[
        str,
        typer.Argument(
            metavar="MOUNTPOINT", help="Where it is to be used: an existing directory outside it, or the source itself."
        ),
    ],
    agent: Annotated[
        str | None,
        typer.Option(metavar="A", help="The agent; a new name needs --new. Default: your login name."),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(metavar="R", help="In which role. Default: the agent's own, else the policy's default_role."),
    ] = None,
    chain: Annotated[
        str | None, typer.Option(metavar="C", help="The chain of work it belongs to, which then holds its leases.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The policy file, or the name of a preset. Default: the project's, else policy.toml in the state "
            "directory, else the preset that the first mount took.",
        ),
    ] = None,
    transport: Annotated[
        str,
        typer.Option(
            metavar="T", help="auto, kernel or portable: the kernel's own protocol where it can be, else by libfuse."
        ),
    ] = "auto",
    foreground: Annotated[bool, typer.Option("--foreground", help="Serve in this process until Ctrl-C.")] = False,
    allow_other: Annotated[
        bool, typer.Option("--allow-other", help="Let other users in; new files are theirs where root serves.")
    ] = False,
    user: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="As root: let this user in, and let it call the session's git, leases, why and tools."
        ),
    ] = None,
    allow_writable_parents: Annotated[
        bool,
        typer.Option("--allow-writable-parents", help="Accept paths that another user could replace during the mount."),
    ] = False,
    keep_scratch: Annotated[
        bool, typer.Option("--keep-scratch", help="Leave what is in scratch paths in the session's directory.")
    ] = False,
    new: Annotated[bool, typer.Option("--new", help="Register the agent if its name is new.")] = False,
) -> None:
    """Mount a directory under a policy.

    Reading goes on as before. Every change made in MOUNTPOINT, by any program, is judged by the policy and recorded
    before it happens. What the policy says is in MOUNTPOINT/.bonobofs/policy.md.

    \b
    Examples:
      bonobofs mount ~/src/app ~/work --agent alice
      bonobofs mount . ~/work --role reviewer --policy ./strict.toml
      bonobofs mount /srv/app /srv/app --foreground       guard a directory in its own place, from a service
    """
    home = session.home()
    order = session.Order(
        source=Path(os.path.abspath(source)),
        mountpoint=Path(os.path.abspath(mountpoint)),
        agent=agent,
        role=role,
        policy=Path(policy if policy in PRESETS else os.path.abspath(policy)) if policy is not None else None,
        transport=transport,
        allow_other=allow_other,
        allow_writable_parents=allow_writable_parents,
        keep_scratch=keep_scratch,
        user=user,
        chain=chain,
    )
    check_agent(home, agent, new=new)
    if role is not None:
        check_role(role, session.choose_policy(home, order.policy, order.source))
    # The mount may come to stand where we do, and we must not stand in it.
    os.chdir("/")
    if foreground:
        mounted, serve = session.prepare_foreground(home, order)
        _tell(mounted)
        serve()
    with waiting(f"mounting {order.source}"):
        mounted = session.start(home, order)
    _tell(mounted)


def umount(
    mountpoint: Annotated[
        str, typer.Argument(metavar="MOUNTPOINT", help="A directory on which bonobofs mount was run.")
    ],
) -> None:
    """Unmount, and wait until the record of the session is settled and closed.

    What a killed server left behind is taken off too.

    \b
    Example:
      bonobofs umount ~/work
    """
    home = session.home()
    path = Path(os.path.abspath(mountpoint))
    os.chdir("/")
    with waiting(f"settling the record of {path}"):
        ended = session.stop(home, path)
    if ended.live:
        say(f"{path}: unmounted")
    if ended.dead:
        say(f"{path}: {ended.dead} dead mount{'s' if ended.dead > 1 else ''} taken off")
    if ended.copies:
        some = ", ".join(ended.copies[:_NAMED])
        more = f" and {len(ended.copies) - _NAMED} more" if len(ended.copies) > _NAMED else ""
        note(f"a copy of the mount is left, and every access to it fails: {some}{more}; unmount it there too")
    if ended.remover is not None:
        note(f"the record is closed; the server (pid {ended.remover}) still removes the session's scratch files")
    for kept in ended.kept:
        say(str(kept))
    if not ended.live and not ended.dead and ended.closed:
        say(f"{path}: already unmounted; the record is closed")
    elif not ended.live and not ended.dead:
        say(f"{path}: nothing was mounted; the end of a session that crashed is noted")
    if not ended.closed:
        note("the record has no closing entry; look at it: bonobofs audit verify")


def _tell(mounted: session.Mounted) -> None:
    made = mounted.session
    say(f"{made.source} on {made.mountpoint} for {made.agent}, role {made.role}")
    say(f"policy {made.policy.origin} ({mounted.why}), transport {made.transport}, session {made.session}")
    where = shlex.quote(made.mountpoint or "")
    say(f"work there: cd {where}, or bonobofs shell {where} for git, issues and leases")
    say(f"rules: {where}/.bonobofs/policy.md; of one path: bonobofs why PATH; end: bonobofs umount {where}")
    for text in mounted.notes:
        note(text)
