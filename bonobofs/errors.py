"""Every failure of bonobofs, as one tree. Each knows its errno and its exit code; both are an interface."""

from __future__ import annotations

import errno
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


class TrailError(BonobofsError):
    """The trail cannot be written or read; changes are refused while it lasts."""


class MountError(BonobofsError):
    """The mount cannot be made, found or ended."""


class StateError(BonobofsError):
    """The state directory cannot be used as it is."""


class ForbiddenError(BonobofsError):
    """The registry, or somebody else's lease, does not admit what was asked for."""

    errno = errno.EACCES
    exit_code = 77


class ProtocolError(BonobofsError):
    """The kernel sent what this version cannot read."""

    errno = errno.EIO
