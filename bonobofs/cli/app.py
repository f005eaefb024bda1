"""The command tree. Each command's module is imported when the command runs."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

import bonobofs
from bonobofs.errors import UsageError

_COMMANDS: Final = {
    "mount": "mount.mount",
    "umount": "mount.umount",
    "init": "policy.init",
    "shell": "mount.shell",
    "run": "run_command.run",
    "status": "mount.status",
    "mark": "mount.mark",
    "why": "policy.why",
    "serve": "admin.serve",
    "doctor": "doctor.doctor",
}
"""Module and function of each command."""
_FAMILIES: Final = {
    "policy": "policy.app",
    "audit": "audit.app",
    "agent": "agents.agent_app",
    "team": "agents.team_app",
    "lease": "lease.app",
    "git": "git.app",
    "worktree": "worktree.app",
    "beads": "beads.app",
    "network": "network.app",
    "db": "admin.db_app",
}
"""Module and Typer app of each family of commands."""
_ANY_LENGTH: Final = 1000

_HELP: Final = """A FUSE file system that enforces a write policy on AI agents.

\b
Examples:
  bonobofs mount ~/src/app ~/work --agent alice    mount a directory under the policy
  bonobofs why docs/plan.txt                       may this file be written? if not, why not?
  bonobofs audit tail --denied                     what was refused recently
  bonobofs umount ~/work                           unmount

Exit status: 0 done, 1 failed, 2 usage, 77 refused by policy."""


class WholeSummaries(TyperGroup):
    """A group of commands whose help wraps each summary. Typer cuts them at the width of the terminal."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and summaries of the commands."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(_ANY_LENGTH)) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _print_version(version: bool) -> None:
    if version:
        print(f"bonobofs {bonobofs.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version  # acted on before anything else


def tree(command: str = "") -> typer.Typer:
    """Build the tree: only `command` if it names a command or a family, else all; none for `--version`.

    Importing the modules of all commands takes longer than most commands run.
    """
    app = typer.Typer(
        name="bonobofs",
        cls=WholeSummaries,
        help=_HELP,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    is_known = command == "--version" or command in _COMMANDS or command in _FAMILIES
    for name, place in _COMMANDS.items():
        if name == command or not is_known:
            settings = {"allow_interspersed_args": False} if name == "run" else None
            app.command(name, context_settings=settings)(_at(place))
    for name, place in _FAMILIES.items():
        if name == command or not is_known:
            app.add_typer(_with_whole_summaries(_at(place)), name=name)
    return app


def _with_whole_summaries(family: typer.Typer) -> typer.Typer:
    family.info.cls = WholeSummaries
    for group in family.registered_groups:
        if group.typer_instance is not None:
            _with_whole_summaries(group.typer_instance)
    return family


def _at(place: str) -> Any:
    module, _, name = place.partition(".")
    return getattr(import_module(f"bonobofs.cli.{module}"), name)


def invoke(arguments: list[str]) -> int:
    """Run the command that the arguments name, and return its exit status. UsageError: they name none."""
    if arguments[0] == "run" and "--" in arguments:
        # The parser drops the first `--`, and `run` needs its place.
        arguments = [*arguments[: (at := arguments.index("--"))], "--", *arguments[at:]]
    try:
        result = tree(arguments[0])(args=arguments, prog_name="bonobofs", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "bonobofs"
        message = error.format_message().rstrip(".").replace("Value error, ", "")
        raise UsageError(f"{message}; see {command} --help") from error
    return result if isinstance(result, int) else 0
