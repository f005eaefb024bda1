"""Every failure of bonobofs as one tree. Each class has an errno and an exit status; both are an interface."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import ClassVar


class BonobofsError(Exception):
    """A failure that bonobofs reports. The message is one line and says what to do."""

    errno: ClassVar[int] = errno.EIO
    exit_code: ClassVar[int] = 1


def reason(error: BaseException) -> str:
    """Return what failed in one line: `PATH: TEXT OF THE SYSTEM` for an OSError, the message of our own errors."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


class UsageError(BonobofsError):
    """The command line or the arguments of a call are invalid."""

    errno = errno.EINVAL
    exit_code = 2


class PolicyError(BonobofsError):
    """The policy cannot be enforced as written. The message names the file, the line and the key."""

    errno = errno.EINVAL
    problems: tuple[str, ...] = ()
    """One line for each mistake in a file of valid TOML. The message has the first."""


class TrailError(BonobofsError):
    """The trail cannot be written or read. Every change is denied until it can be written."""


class MountError(BonobofsError):
    """The mount cannot be created, found or unmounted."""


class StateError(BonobofsError):
    """The state directory or its database cannot be used."""


class InterruptedWaitError(StateError):
    """The wait was interrupted. Work already done is kept; the message says what."""

    errno = errno.EINTR
    exit_code = 130


class ForbiddenError(BonobofsError):
    """The agent registry, or a lease of another holder, forbids the request."""

    errno = errno.EACCES
    exit_code = 77


class GitError(BonobofsError):
    """A failure that git itself would report, not a denial by the policy. Nothing was changed."""

    def __init__(self, message: str, *, kind: str, paths: Sequence[str] = ()) -> None:
        """`kind` is one word for programs: not-found, dirty, conflict, busy, ...; `paths` are the paths concerned."""
        super().__init__(message)
        self.kind = kind
        self.paths = tuple(paths)


class MailError(BonobofsError):
    """Agent Mail cannot be reached, or its server failed. Letters stay pending."""

    def __init__(self, message: str, *, carried_out: bool | None = False, refused: bool = False) -> None:
        """`carried_out`: True if the server executed the request; None if that is unknown.

        `refused`: the server answered and rejected this request. It may accept another.
        """
        super().__init__(message)
        self.carried_out = carried_out
        self.refused = refused


class BeadsError(BonobofsError):
    """bd cannot be used, or reading back shows that it did not store a change."""

    def __init__(
        self,
        message: str,
        *,
        carried_out: bool | None = False,
        stored: tuple[str, ...] = (),
        missing: tuple[str, ...] = (),
    ) -> None:
        """`carried_out`: None if bd stored the change in part, as `stored` and `missing` say, or if that is unknown."""
        super().__init__(message)
        self.carried_out = carried_out
        self.stored = stored
        self.missing = missing


class ProtocolError(BonobofsError):
    """The kernel sent a message that this version cannot read."""

    errno = errno.EIO


def error_text(error: BaseException) -> str:
    """Return the text of an error: that of its errno, its message, or the name of its class."""
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__


def os_error(number: int) -> OSError:
    """Return the OSError of an errno: FileNotFoundError for ENOENT, and so on."""
    return OSError(number, os.strerror(number))
