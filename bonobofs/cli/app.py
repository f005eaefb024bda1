"""The command tree. Each command's module is imported when the command runs."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Final, NamedTuple

import bonobofs
from bonobofs.cli.options import HELP, Command, Group, command_name, print_help


class _TreeEntry(NamedTuple):
    """A command: module and name of its function or Group. `summary`: the first sentence of its help."""

    attribute: str
    summary: str


_TREE: Final = {
    "mount": _TreeEntry("mount.mount", "Mount a directory under a policy."),
    "umount": _TreeEntry("session_commands.umount", "Unmount, and wait until the session's record is complete."),
    "init": _TreeEntry(
        "policy.init", "Write a commented policy for a project to the state directory, based on the project's files."
    ),
    "shell": _TreeEntry("session_commands.shell", "Start a shell in a mount."),
    "run": _TreeEntry(
        "run_command.run",
        "Run a command in a sandbox: the workspace is the policy mount, the rest of the machine is read-only or "
        "absent.",
    ),
    "status": _TreeEntry("session_commands.status", "List the sessions of this state directory and their states."),
    "mark": _TreeEntry(
        "session_commands.mark",
        "Begin a turn of the session in whose mount you are: the unit of audit report --turn and of undo.",
    ),
    "history": _TreeEntry("undo.history", "Show the changes and refusals of a path, newest first."),
    "show": _TreeEntry(
        "undo.show", "Show one change: its record, the old and new state of the file, and the difference."
    ),
    "diff": _TreeEntry("undo.diff", "Show what changes did to the files, as a patch."),
    "undo": _TreeEntry(
        "undo.undo",
        "Take back changes of files and publications: exactly the selected ones, newest first.",
    ),
    "why": _TreeEntry("why.why", "Explain whether a change is allowed and, if not, why and what to do instead."),
    "serve": _TreeEntry(
        "admin.serve",
        "Run the daemon of this state directory: it updates the index, expires leases and sends the record to Agent "
        "Mail.",
    ),
    "mcp": _TreeEntry("mcp_command.mcp", "Serve the session's tools to an MCP client, under the session's policy."),
    "hook": _TreeEntry(
        "hook_command.hook", "Answer a hook event of Claude Code or Codex, whose JSON is on standard input."
    ),
    "install": _TreeEntry(
        "hook_command.install",
        "Write the hooks and the MCP server into the settings of a client, after it has shown the difference.",
    ),
    "uninstall": _TreeEntry(
        "hook_command.uninstall",
        "Remove from the settings of a client what bonobofs install has written, after it has shown the difference.",
    ),
    "doctor": _TreeEntry(
        "doctor.doctor", "Check what mounting needs on this machine, and print a remedy for each problem."
    ),
    "policy": _TreeEntry("policy.app", "Check, test and describe a policy."),
    "audit": _TreeEntry("audit.app", "Read, search, summarize, verify and export the record of every change."),
    "agent": _TreeEntry("agents.agent_app", "Register agents and their roles."),
    "team": _TreeEntry("agents.team_app", "Register teams."),
    "lease": _TreeEntry("lease.app", "Acquire, extend, release and list leases."),
    "git": _TreeEntry("git.app", "Branch, commit and merge under the policy."),
    "worktree": _TreeEntry("worktree.app", "Make and remove a work tree and branch of an agent for an issue."),
    "beads": _TreeEntry("beads.app", "Create and change the issues of bd under the policy."),
    "network": _TreeEntry("network.app", "Show and edit the operator's list of hosts for bonobofs run."),
    "ask": _TreeEntry("ask.app", "Answer the questions of sessions: changes that [[ask]] matches."),
    "integrity": _TreeEntry("integrity.app", "Find and revert direct edits of protected directories."),
    "result": _TreeEntry("integrity.result_app", "Check what an agent hands over."),
    "db": _TreeEntry("admin.db_app", "Check, upgrade and back up the database."),
}
"""All commands and families of commands, in the order of the help."""

_HELP: Final = """A FUSE file system that enforces a write policy on AI agents.

\b
Examples:
  bonobofs mount ~/src/app ~/work --agent alice    mount a directory under the policy
  bonobofs why docs/plan.txt                       may this file be written? if not, why not?
  bonobofs audit tail --denied                     what was refused recently
  bonobofs umount ~/work                           unmount

Exit status: 0 done, 1 failed, 2 usage, 77 refused by policy."""
_OPTIONS: Final = {
    "--version": "Print the version and exit.",
    "--show-completion": "Print the completion for bash, zsh or fish; it follows, else the shell in SHELL.",
}
COMPLETE: Final = "_BONOBOFS_COMPLETE"
"""Variable with which the shells' scripts ask for completions."""


def members() -> dict[str, Command | Group]:
    """Return all commands and families by name; imports the modules of all."""
    return {name: _member(name) for name in _TREE}


def _member(name: str) -> Command | Group:
    module, _, attribute = _TREE[name].attribute.partition(".")
    found = getattr(import_module(f"bonobofs.cli.{module}"), attribute)
    return found if isinstance(found, Group) else Command(found)


def invoke(arguments: list[str]) -> int:
    """Run the command that the arguments name, and return its exit status. UsageError: they name none."""
    first, result = arguments[0], None
    if COMPLETE in os.environ or first == "--show-completion":
        from bonobofs.cli import completion  # noqa: PLC0415 - few invocations complete a command

        print(
            completion.script(arguments[1:]) if COMPLETE not in os.environ else completion.words(arguments, members())
        )
    elif first in HELP:
        print_help("bonobofs", _HELP, {name: each.summary for name, each in _TREE.items()}, _OPTIONS)
    elif first == "--version":
        print(f"bonobofs {bonobofs.__version__}")
    else:
        name = command_name("bonobofs", arguments, _TREE)
        result = _member(name).invoke(f"bonobofs {name}", arguments[1:])
    sys.stdout.flush()
    return result if isinstance(result, int) else 0
