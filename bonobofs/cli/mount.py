"""`bonobofs mount`. It loads little before the server is started."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import Annotated

from bonobofs import session
from bonobofs.cli.actor import check_agent, check_role, policy_path
from bonobofs.cli.options import Argument, Option
from bonobofs.cli.output import note, say, waiting
from bonobofs.fuse import cpu_latency


def mount(
    source: Annotated[str, Argument(metavar="SOURCE", help="The source directory.")],
    mountpoint: Annotated[
        str,
        Argument(
            metavar="MOUNTPOINT",
            help="Where to mount it: an existing directory outside the source, or the source itself.",
        ),
    ],
    agent: Annotated[
        str | None,
        Option(metavar="A", help="The agent; a new name needs --new. Default: your login name."),
    ] = None,
    role: Annotated[
        str | None,
        Option(metavar="R", help="Its role. Default: the agent's own, else the policy's default_role."),
    ] = None,
    chain: Annotated[
        str | None, Option(metavar="C", help="The chain of work, which then holds the session's leases.")
    ] = None,
    policy: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="The policy file, or the name of a preset. Default: the project's, else policy.toml in the state "
            "directory, else the preset of the first mount.",
        ),
    ] = None,
    transport: Annotated[
        str,
        Option(metavar="T", help="auto, kernel or portable (libfuse). auto takes kernel where available."),
    ] = "auto",
    foreground: Annotated[bool, Option("--foreground", help="Serve in this process until Ctrl-C.")] = False,
    allow_other: Annotated[
        bool, Option("--allow-other", help="Admit other users; with a root server, new files belong to them.")
    ] = False,
    user: Annotated[
        str | None,
        Option(metavar="NAME", help="As root: admit this user, also to the session's git, leases, why and tools."),
    ] = None,
    allow_writable_parents: Annotated[
        bool,
        Option("--allow-writable-parents", help="Accept paths that another user could replace."),
    ] = False,
    keep_scratch: Annotated[
        bool, Option("--keep-scratch", help="Keep the scratch files in the session's directory.")
    ] = False,
    observe: Annotated[
        bool, Option("--observe", help="Make and record what the rules refuse; then: bonobofs policy propose.")
    ] = False,
    new: Annotated[bool, Option("--new", help="Register the agent if its name is new.")] = False,
) -> None:
    """Mount a directory under a policy.

    Reads are not restricted. Every change in MOUNTPOINT, by any program, is checked against the policy and recorded
    before it happens. MOUNTPOINT/.bonobofs/policy.md describes the policy.

    \b
    Examples:
      bonobofs mount ~/src/app ~/work --agent alice
      bonobofs mount . ~/work --role reviewer --policy ./strict.toml
      bonobofs mount /srv/app /srv/app --foreground       mount over the source itself, from a service
    """
    with contextlib.ExitStack() as stack:
        # The server loads its modules while this process loads its own and checks.
        place = Path(os.path.abspath(mountpoint))
        server = None if foreground else stack.enter_context(session.ServerStart(str(place)))
        home = session.home()
        request = session.MountRequest(
            source=Path(os.path.abspath(source)),
            mountpoint=place,
            agent=agent,
            role=role,
            policy=policy_path(policy),
            transport=transport,
            allow_other=allow_other,
            allow_writable_parents=allow_writable_parents,
            keep_scratch=keep_scratch,
            observe=observe,
            user=user,
            chain=chain,
        )
        check_agent(home, agent, new=new)
        if role is not None:
            check_role(role, session.choose_policy(home, request.policy, request.source))
        # The mount may cover the working directory, which this process must not use.
        os.chdir("/")
        if server is None:
            mounted, serve = session.prepare_foreground(home, request)
            _print_mounted(mounted)
            serve()
        with waiting(f"mounting {request.source}"):
            mounted = session.start_with(server, home, request)
    _print_mounted(mounted)
    if cpu_latency.is_needed() and not cpu_latency.device():
        note("idle processors halt here, so a change costs 1.4 times as much; bonobofs doctor says what helps")


def _print_mounted(mounted: session.MountedSession) -> None:
    record = mounted.session
    say(f"{record.source} on {record.mountpoint} for {record.agent}, role {record.role}")
    served = f"transport {record.transport}, {session.build()}"
    say(f"policy {record.policy.origin} ({mounted.why}), {served}, session {record.session}")
    where = shlex.quote(record.mountpoint or "")
    say(f"work there: cd {where}, or bonobofs shell {where} for git, issues and leases")
    say(f"rules: {where}/.bonobofs/policy.md; for one path: bonobofs why PATH; end: bonobofs umount {where}")
    for text in mounted.notes:
        note(text)
