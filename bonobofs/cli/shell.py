"""`bonobofs shell`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bonobofs import session


def shell(
    mountpoint: Annotated[
        str, typer.Argument(metavar="MOUNTPOINT", help="A directory on which bonobofs mount was run.")
    ],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="What to run instead of the shell, after --.")
    ] = None,
) -> None:
    """Start a shell in a mount, where `git` asks the session's gate for what changes something.

    What reads, the real git does. The CLEO_* variables are set for programs that read them; nothing rests on them.

    \b
    Examples:
      bonobofs shell ~/work
      bonobofs shell ~/work -- git commit -m "Say more"
    """
    session.enter_shell(session.home(), Path(os.path.abspath(mountpoint)), command or [])
