"""Completion of commands, options and values in bash, zsh and fish, by scripts that call bonobofs."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from typing import Final

from bonobofs.cli.options import HELP, Command, Group
from bonobofs.errors import UsageError

_BASH: Final = """_bonobofs() {
    COMPREPLY=($(_BONOBOFS_COMPLETE=1 "$1" "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _bonobofs bonobofs"""
_FISH: Final = """complete -c bonobofs -a '(set -l words (commandline -opc) (commandline -ct)
    _BONOBOFS_COMPLETE=1 bonobofs $words[2..] 2>/dev/null)'"""
_SCRIPTS: Final = {"bash": _BASH, "zsh": f"autoload -Uz bashcompinit && bashcompinit\n{_BASH}", "fish": _FISH}


def script(arguments: Sequence[str]) -> str:
    """Return the script for the named shell, else for the one in SHELL. UsageError."""
    shell = arguments[0] if arguments else os.path.basename(os.environ.get("SHELL", ""))
    if shell not in _SCRIPTS:
        raise UsageError(f"there is no completion for the shell {shell!r}; name one of {', '.join(_SCRIPTS)}")
    return _SCRIPTS[shell]


def words(arguments: Sequence[str], members: Mapping[str, Command | Group]) -> str:
    """Return the words, one a line, that can stand for the last argument, which is incomplete."""
    *before, last = arguments
    found: Command | Group | None = None
    while before and before[0] in members:
        found = members[before.pop(0)]
        members = found.members if isinstance(found, Group) else {}
    options = {name: each for each in found.parameters for name in each.names} if isinstance(found, Command) else {}
    chosen = options.get(before[-1]) if before else None
    known = [*members, *options, *HELP]
    if chosen is not None and issubclass(chosen.kind, enum.Enum):
        known = [each.value for each in chosen.kind]
    return "\n".join(word for word in known if word.startswith(last))
