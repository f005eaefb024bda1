"""The tree of commands, and how a command line that cannot be meant is told."""

from __future__ import annotations

from typing import Annotated

import typer

import bonobofs
from bonobofs.cli import (
    agents,
    audit,
    beads,
    db,
    doctor,
    git,
    lease,
    mount,
    policy,
    serve,
    shell,
    status,
    why,
    worktree,
)
from bonobofs.errors import UsageError

app = typer.Typer(
    name="bonobofs",
    help="""A write policy for programs that write code, applied at the system call.

\b
Examples:
  bonobofs mount ~/src/app ~/work --agent alice    mount a directory under the policy
  bonobofs why docs/plan.txt                       may this be written, and if not, why
  bonobofs audit tail --denied                     what was refused of late
  bonobofs umount ~/work                           end it

Exit codes: 0 done, 1 failed, 2 usage, 77 refused by policy.""",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"bonobofs {bonobofs.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version  # acted on before anything else


app.command("mount")(mount.mount)
app.command("umount")(mount.umount)
app.command("shell")(shell.shell)
app.command("status")(status.status)
app.command("why")(why.why)
app.add_typer(policy.app, name="policy")
app.add_typer(audit.app, name="audit")
app.add_typer(agents.agent_app, name="agent")
app.add_typer(agents.team_app, name="team")
app.add_typer(lease.app, name="lease")
app.add_typer(git.app, name="git")
app.add_typer(worktree.app, name="worktree")
app.add_typer(beads.app, name="beads")
app.add_typer(db.app, name="db")
app.command("serve")(serve.serve)
app.command("doctor")(doctor.doctor)


def invoke(arguments: list[str]) -> int:
    """Run the command that the arguments name, and give its exit code. UsageError when they name none."""
    try:
        result = app(args=arguments, prog_name="bonobofs", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "bonobofs"
        message = error.format_message().rstrip(".").replace("Value error, ", "")
        raise UsageError(f"{message}; see {command} --help") from error
    return result if isinstance(result, int) else 0
