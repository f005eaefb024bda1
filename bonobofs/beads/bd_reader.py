"""One agent's calls of bd under the lock: each is run once, and what it has done is read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bonobofs.beads.bd_commands import check_text, command
from bonobofs.beads.bd_lock import Lock
from bonobofs.beads.bd_output import Output, complaint, notices, payload
from bonobofs.beads.bd_runner import Program
from bonobofs.beads.issue import BeadsIssue, Comment, Issues, read_comment, read_issues
from bonobofs.errors import BeadsError, UsageError


class Calls:
    """What reads. For one thread, and until `end`."""

    def __init__(self, program: Program, held: Lock, actor: str) -> None:
        self._program: Final = program
        self._held: Final = held
        self._actor: Final = actor
        self._known: Issues | None = None
        self._last: Issues | None = None
        self._ended = False

    def end(self) -> None:
        """The lock is no longer ours."""
        self._ended = True

    def everything(self, *, fresh: bool = False) -> Issues:
        """All issues, as they were when this turn last asked or changed something; `fresh`: as they are now."""
        if self._known is None or fresh:
            before, self._known = self._last, None
            flags = [("limit", "0"), ("all", None), ("include-infra", None), ("include-gates", None)]
            told = self._array(command("list", self._actor, flags), "its issues")
            try:
                self._known = self._last = read_issues(told, before)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise BeadsError(f"bd lists what is no issue to us ({error}); is it a bd 1.x?") from error
        return self._known

    def find(self, id: str) -> BeadsIssue | None:  # noqa: A002 - it is bd's word
        """The issue of this full id, None where there is none. UsageError: it names none."""
        if not id.strip():
            raise UsageError("name an issue: bd would take the one that was touched last")
        return self.everything().get(id)

    def comments(self, id: str) -> list[Comment]:  # noqa: A002 - it is bd's word
        """What has been said of an issue, the oldest first."""
        self.issue(id)
        told = self._array(command("comments", self._actor, named=[id]), f"the comments of {id}")
        try:
            return [read_comment(each) for each in told]
        except (KeyError, TypeError) as error:
            raise BeadsError(f"bd lists what is no comment to us ({error}); is it a bd 1.x?") from error

    def read(self, arguments: Sequence[str]) -> Output:
        """Run a reading command, in bd's own words, which the caller has held to a list of what only reads.

        Nothing but `--readonly` and `--actor` is added to it, and read-only mode refuses a part of what writes.
        """
        first, *rest = arguments
        for argument in arguments:
            check_text(argument)
        return self._run([first, "--readonly", f"--actor={self._actor}", *rest], bare=True)

    def issue(self, id: str) -> BeadsIssue:  # noqa: A002 - it is bd's word
        """The issue. BeadsError for an id that is none, or the short form of one: bd would take what fits."""
        found = self.find(id)
        if found is None:
            raise BeadsError(f"there is no issue {id}; ids are given in full")
        return found

    def _run(self, arguments: Sequence[str], *, bare: bool = False) -> Output:
        if self._ended:
            raise RuntimeError("the turn is over, and the lock somebody else's")
        return self._program.run(arguments, self._held, bare=bare)

    def _array(self, arguments: Sequence[str], what: str) -> list[Any]:
        output = self._run(arguments)
        told = payload(output)
        if output.status != 0 or not isinstance(told, list):
            raise BeadsError(f"bd does not list {what}: {why(output)}")
        return told

    def _read_back(self, output: Output) -> Issues:
        """Everything, after a change that ended so."""
        try:
            return self.everything(fresh=True)
        except BeadsError as error:
            what = f"{why(output)}, and reading back failed: {error}"
            raise BeadsError(f"whether bd has done it cannot be told: {what}", carried_out=None) from error


def why(output: Output) -> str:
    """Why a call has not done what was asked, as far as bd says."""
    if output.status is None:
        return "bd was ended at its time limit"
    if output.status < 0:
        return f"bd was ended by signal {-output.status}"
    return complaint(output) or f"bd ended with {output.status} and does not say why"


def said(output: Output) -> tuple[str, ...]:
    """What is worth telling of a call that has done what was asked, a line each."""
    failed = () if output.status == 0 else (why(output),)
    return (*failed, *(line for line in notices(output) if line not in failed))
