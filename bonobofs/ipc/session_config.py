"""The configuration of a session: `mount` writes it, the server and its companion read it.

Named tuples, because the server starts the companion before it loads anything else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self


class CompanionProgram(NamedTuple):
    """The code that a companion runs."""

    module: str
    """Dotted name of a module; its `main` takes the number of the channel's descriptor and returns the exit status."""
    packages: Sequence[str]
    """Directories to append to sys.path."""


class RepositoryConfig(NamedTuple):
    """The session's own git directory, as the mount shows it."""

    common: str
    """The directory with the refs of the source's repository."""
    stores: Sequence[str]
    """The object stores of the source, the main store first."""
    uid: int
    gid: int
    groups: Sequence[int]
    """Uid, gid and supplementary groups of the session's user."""


class StartConfig(NamedTuple):
    """What the server needs to start the companion, and the policy. Sent first, as one line."""

    source: str
    policy: dict[str, Any]
    source_identity: Sequence[int] | None = None
    """Device and inode number of the directory that `mount` checked; None: not checked."""
    companion: CompanionProgram | None = None
    """None: the mount is served without a companion."""

    def to_line(self) -> bytes:
        """The configuration as one line of JSON."""
        return json.dumps(self).encode() + b"\n"

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Parse `to_line`. ValueError, TypeError: the text is no configuration."""
        config = cls(*json.loads(line))
        return config._replace(companion=config.companion and CompanionProgram(*config.companion))


class SessionConfig(NamedTuple):
    """One session, from the checks of `mount` to its server and companion. Paths are absolute."""

    source: str
    mountpoint: str
    home: str
    """$BONOBOFS_HOME."""
    session: str
    """UUID."""
    session_dir: str
    trail: str
    head: str
    """The file with the last hash of the trail."""
    agent: str
    """Label of the agent."""
    agent_id: str
    role: str
    holder: str
    """Key under which the session holds leases."""
    policy: dict[str, Any]
    policy_origin: str
    """The file of the policy, or `preset:NAME`."""
    policy_file: str
    umask: int
    """Umask of the user who mounts, for files that the session's tools create."""
    workspace: str = ""
    """Path under which the agent sees the mount; empty: the mountpoint."""
    team: str | None = None
    chain: str | None = None
    issue: str | None = None
    database: Mapping[str, str] = {}
    """Environment variables that select the database."""
    tracked: Sequence[str] = ()
    """Paths below [[scratch]] that git tracks in the source."""
    repository: RepositoryConfig | None = None
    """None: the source has no repository."""
    companion: CompanionProgram | None = None
    """As in `StartConfig`."""
    transport: str = "kernel"
    packages: str | None = None
    """Directory from which the libfuse transport imports mfusepy."""
    log: str = ""
    """File that becomes the standard error of server and companion; empty: they keep theirs."""
    allow_other: bool = False
    user: int | None = None
    """Uid of the user of `mount --user`."""
    source_identity: Sequence[int] | None = None
    """As in `StartConfig`."""
    mountpoint_identity: Sequence[int] | None = None
    """Device and inode number of the directory that `mount` checked; None: not checked."""
    keep_scratch: bool = False
    observe: bool = False
    """`mount --observe`: every policy of the session observes."""
    out_of_band: Sequence[dict[str, Any]] = ()
    """Differences between source and record after an unclean boot: {"path", "what", "protected"}."""
    strays: Sequence[Sequence[Any]] = ()
    """Fields of each `audit.temp_cleanup.Stray` that killed sessions left in the source."""
    ready_fd: int | None = None
    """Descriptor to which the server writes `ready` or its error."""

    @property
    def start(self) -> StartConfig:
        """The part that the server reads first."""
        return StartConfig(self.source, self.policy, self.source_identity, self.companion)

    def open_log(self) -> None:
        """Make `log` the standard error. OSError."""
        if self.log:
            fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.dup2(fd, 2)
            os.close(fd)

    def to_json(self) -> str:
        """The configuration as one JSON object."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse `to_json`. ValueError, TypeError: the text is no configuration."""
        return cls.from_document(json.loads(text))

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """As `from_json`, from parsed JSON."""
        config = cls(**document)
        return config._replace(
            companion=config.companion and CompanionProgram(*config.companion),
            repository=config.repository and RepositoryConfig(*config.repository),
        )


class CompanionConfig(NamedTuple):
    """The configuration that the server sends to a companion at its start."""

    session: SessionConfig
    """With the policy in force. Without `tracked`, `out_of_band` and `strays`, which may be large."""
    root: int
    """Descriptor of the source, inherited."""
    namespaces: Sequence[int]
    """Descriptors of the namespaces of the first companion, in the order of entry; empty: it made none."""
    is_first: bool

    def to_document(self) -> dict[str, Any]:
        """As a JSON object."""
        session = self.session._replace(tracked=(), out_of_band=(), strays=())
        return {**self._asdict(), "session": session._asdict()}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Parse `to_document`."""
        return cls(**{**document, "session": SessionConfig.from_document(document["session"])})
