"""`bonobofs hook`, `bonobofs install` and `bonobofs uninstall`."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

from bonobofs.cli.options import Argument, Option
from bonobofs.cli.output import say
from bonobofs.errors import UsageError
from bonobofs.hooks.client_settings import SettingsFile


class HookClient(enum.StrEnum):
    CLAUDE = "claude"
    CODEX = "codex"


class Scope(enum.StrEnum):
    PROJECT = "project"
    USER = "user"


ClientArgument = Annotated[HookClient, Argument(metavar="CLIENT", help="claude or codex.")]
ScopeOption = Annotated[Scope, Option(metavar="SCOPE", help="project (this directory) or user.")]
YesOption = Annotated[bool, Option("--yes", help="Write without a question.")]


def hook(event: Annotated[str, Argument(metavar="EVENT", help="The event, such as SessionStart.")]) -> None:
    """Answer a hook event of Claude Code or Codex, whose JSON is on standard input. Outside a mount it does nothing.

    \b
    Example:
      echo '{"cwd": "/home/alice/work"}' | bonobofs hook SessionStart
    """
    from bonobofs.hooks.hook_events import answer, parse_event  # noqa: PLC0415 - a command loads its own parts

    if output := answer(event, parse_event(sys.stdin.buffer.read())):
        print(output)


def install(client: ClientArgument, scope: ScopeOption = Scope.PROJECT, yes: YesOption = False) -> None:
    """Write the hooks and the MCP server into the settings of a client, after it has shown the difference.

    User scope has no MCP server and no hooks of worktrees, because these would act in other projects too.

    \b
    Example:
      bonobofs install claude --scope user
    """
    from bonobofs.hooks import client_settings  # noqa: PLC0415 - as above

    _apply(client_settings.installed(client, _project(scope)), yes=yes)


def uninstall(client: ClientArgument, scope: ScopeOption = Scope.PROJECT, yes: YesOption = False) -> None:
    """Remove from the settings of a client what bonobofs install has written, after it has shown the difference.

    \b
    Example:
      bonobofs uninstall claude --scope user
    """
    from bonobofs.hooks import client_settings  # noqa: PLC0415 - as above

    _apply(client_settings.uninstalled(client, _project(scope)), yes=yes)


def _project(scope: Scope) -> Path | None:
    return Path.cwd() if scope is Scope.PROJECT else None


def _apply(files: list[SettingsFile], *, yes: bool) -> None:
    changed = [file for file in files if file.before != file.after]
    if not changed:
        say("nothing to change")
        return
    for file in changed:
        for line in file.difference().splitlines():
            say(line)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nothing is written without an answer; give --yes")
        if input("Write this? [y/N] ").strip().lower() not in ("y", "yes"):
            say("nothing is written")
            return
    for file in changed:
        file.write()
        say(f"{'removed' if file.after is None else 'wrote'} {file.path}")
