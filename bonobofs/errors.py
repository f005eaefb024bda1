"""Every failure of bonobofs, as one tree. Each knows its errno and its exit code; both are an interface."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import ClassVar


class BonobofsError(Exception):
    """Anything that bonobofs itself reports. The message is one line and says what to do."""

    errno: ClassVar[int] = errno.EIO
    exit_code: ClassVar[int] = 1


class UsageError(BonobofsError):
    """The command line, or the arguments of a call, cannot be meant."""

    errno = errno.EINVAL
    exit_code = 2


class PolicyError(BonobofsError):
    """A policy that cannot be enforced as written. The message names the file, the line and the key."""

    errno = errno.EINVAL
    problems: tuple[str, ...] = ()
    """One line for each mistake of a file that is TOML; the message has the first."""


class TrailError(BonobofsError):
    """The trail cannot be written or read; changes are refused while it lasts."""


class MountError(BonobofsError):
    """The mount cannot be made, found or ended."""


class StateError(BonobofsError):
    """The state directory cannot be used as it is."""


class InterruptedWaitError(StateError):
    """Who was waiting does so no more; what was done before stands, and the message says what."""

    errno = errno.EINTR
    exit_code = 130


class ForbiddenError(BonobofsError):
    """The registry, or somebody else's lease, does not admit what was asked for."""

    errno = errno.EACCES
    exit_code = 77


class GitError(BonobofsError):
    """What git itself would call fatal, which is no refusal of the policy. Nothing was changed."""

    def __init__(self, message: str, *, kind: str, paths: Sequence[str] = ()) -> None:
        """`kind` is one word for programs, such as not-found, dirty, conflict, busy; `paths` are those it is about."""
        super().__init__(message)
        self.kind = kind
        self.paths = tuple(paths)


class MailError(BonobofsError):
    """Agent Mail cannot be reached, or does not do what it is asked. What is to be carried waits."""

    def __init__(self, message: str, *, carried_out: bool | None = False, refused: bool = False) -> None:
        """`carried_out`: whether what was asked was done all the same; None where that cannot be told.

        `refused`: the server is there, and would not have this; it may take something else.
        """
        super().__init__(message)
        self.carried_out = carried_out
        self.refused = refused


class BeadsError(BonobofsError):
    """bd cannot be used as it is, or has not done what it was asked, as reading back shows."""

    def __init__(
        self,
        message: str,
        *,
        carried_out: bool | None = False,
        done: tuple[str, ...] = (),
        missing: tuple[str, ...] = (),
    ) -> None:
        """`carried_out`: None where it was done in part, or where that cannot be told; the parts that are known."""
        super().__init__(message)
        self.carried_out = carried_out
        self.done = done
        self.missing = missing


class ProtocolError(BonobofsError):
    """The kernel sent what this version cannot read."""

    errno = errno.EIO
