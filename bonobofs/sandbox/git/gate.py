"""The gate as the shim asks it: over the guard socket of the session in whose directory the shim lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bonobofs.state.calling import call


class Failure(Exception):  # noqa: N818 - git's failure, not ours
    """What git would call fatal: nothing was changed. `kind` is a stable word of the gate's."""

    def __init__(self, kind: str, message: str, paths: Sequence[str]) -> None:
        super().__init__(message)
        self.kind: Final = kind
        self.paths: Final = tuple(paths)


class Gate:
    """One session's gate for git. Every call raises Refused, Failure, or BonobofsError where nobody answers."""

    def __init__(self, session: str) -> None:
        """`session` is the session's directory."""
        self._session: Final = Path(session)

    def begin(self, subcommand: str, arguments: Sequence[str], directory: str, top: str, *, elsewhere: bool) -> str:
        """Ask for leave to go on with a subcommand that changes something; gives the top of the session's work tree.

        `directory` is the working directory and `top` that of the repository there, both without symlinks and "" for
        none; `elsewhere` says that another repository was named.
        """
        answer = self.call(
            "begin",
            subcommand=subcommand,
            arguments=list(arguments),
            directory=directory,
            top=top,
            elsewhere=elsewhere,
        )
        return str(answer["root"])

    def refuse(self, rule: str, subcommand: str, arguments: Sequence[str]) -> None:
        """Have a refusal entered; it comes as Refused."""
        self.call("refuse", rule=rule, subcommand=subcommand, arguments=list(arguments))

    def call(self, name: str, /, **arguments: Any) -> Any:
        """One call of the gate."""
        answer = call(self._session, f"git.{name}", **arguments)
        if isinstance(answer, dict) and "failed" in answer:
            failed = answer["failed"]
            raise Failure(failed["kind"], failed["message"], failed["paths"])
        return answer
