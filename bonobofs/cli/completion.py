"""Completion of commands, options and values in bash, zsh and fish.

A shell's script runs `bonobofs WORD...` with the variable of `app.COMPLETE`; the last word is the incomplete one. Each
line of the answer is a candidate, a tab and its explanation.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from bonobofs.cli.options import HELP, Command, Group, Option, first_sentence
from bonobofs.errors import UsageError

Members = Mapping[str, Command | Group]

_SCRIPTS: Final = {
    "bash": """_bonobofs() {
    local IFS=$'\\n'
    COMPREPLY=($(_BONOBOFS_COMPLETE=1 "$1" "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f1))
}
complete -o default -F _bonobofs bonobofs
""",
    "zsh": """#compdef bonobofs
_bonobofs() {
    local -a found
    found=(${(f)"$(_BONOBOFS_COMPLETE=1 bonobofs ${words[2,CURRENT]} 2>/dev/null)"})
    found=(${${found//:/\\\\:}//$'\\t'/:})
    if (( $#found )); then _describe bonobofs found; else _files; fi
}
compdef _bonobofs bonobofs
""",
    "fish": """function _bonobofs
    set -l words (commandline -opc) (commandline -ct)
    _BONOBOFS_COMPLETE=1 bonobofs $words[2..] 2>/dev/null
end
complete -c bonobofs -a "(_bonobofs)"
""",
}
_FILES: Final = {
    "bash": ".bash_completions/bonobofs.sh",
    "zsh": ".zfunc/_bonobofs",
    "fish": ".config/fish/completions/bonobofs.fish",
}
_STARTUP: Final = {
    "bash": (".bashrc", "source '{file}'"),
    "zsh": (".zshrc", "fpath+=('{file.parent}'); autoload -Uz compinit; compinit"),
}
"""The startup file of a shell, and its line that loads the script; fish loads it itself."""


def run(arguments: Sequence[str], members: Callable[[], Members], options: Sequence[str]) -> int:
    """Install or print the script of a shell, else print the completions of the arguments. UsageError."""
    if arguments[0] in ("--install-completion", "--show-completion"):
        shell = arguments[1] if len(arguments) > 1 else os.path.basename(os.environ.get("SHELL", ""))
        if shell not in _SCRIPTS:
            raise UsageError(f"there is no completion for the shell {shell!r}; name one of {', '.join(_SCRIPTS)}")
        if arguments[0] == "--show-completion":
            print(_SCRIPTS[shell], end="")
        else:
            _install(shell)
        return 0
    for name, text in _candidates(members(), arguments, options):
        print(f"{name}\t{text}")
    return 0


def _install(shell: str) -> None:
    file = Path.home() / _FILES[shell]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_SCRIPTS[shell])
    print(f"{file}: written; start a new shell")
    if shell in _STARTUP:
        name, line = _STARTUP[shell]
        startup = Path.home() / name
        line = line.format(file=file)
        if not startup.exists() or line not in startup.read_text(errors="surrogateescape"):
            with startup.open("a") as end:
                end.write(f"{line}\n")


def _candidates(members: Members, words: Sequence[str], options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word that can stand for the last one, with its explanation."""
    *before, last = words
    found: Command | Group | None = None
    for word in before:
        if isinstance(found, Command) or word not in members:
            break
        found = members[word]
        members = found.members if isinstance(found, Group) else {}
    named = [*found.options.items()] if isinstance(found, Command) else []
    chosen = dict(named).get(before[-1]) if before else None
    if chosen is not None and issubclass(chosen.kind, enum.Enum):
        yield from ((each.value, "") for each in chosen.kind if each.value.startswith(last))
    elif last.startswith("-"):
        general = [name.partition(" ")[0] for name in options] if found is None else []
        known = {name: first_sentence(option.given.help) for name, option in named if isinstance(option.given, Option)}
        known |= dict.fromkeys((*general, *HELP), "")
        yield from ((name, text) for name, text in known.items() if name.startswith(last))
    else:
        yield from ((name, member.summary) for name, member in members.items() if name.startswith(last))
