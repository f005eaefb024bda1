"""The result of the engine: a permit or a denial, its errno, and its JSON form."""

from __future__ import annotations

import enum
import errno
import os
from typing import Any, ClassVar, Final, NamedTuple

from bonobofs.policy.request import Operation, WorkspacePath, with_plain_members


@with_plain_members
class Code(enum.StrEnum):
    """The reason of a denial. The values are an interface; SECURITY.md lists them."""

    OUTSIDE = "OUTSIDE"
    DEVICE = "DEVICE"
    SECRET = "SECRET"  # noqa: S105 - a name
    HARDLINK = "HARDLINK"
    PROTECTED = "PROTECTED"
    ROLE = "ROLE"
    HIDDEN = "HIDDEN"
    SUFFIX = "SUFFIX"
    EXECUTABLE = "EXECUTABLE"
    KEEP = "KEEP"
    DEFAULT = "DEFAULT"
    SIZE = "SIZE"
    SPACE = "SPACE"
    LEASED = "LEASED"
    ASK = "ASK"
    IDENTITY = "IDENTITY"
    GIT = "GIT"
    BEADS = "BEADS"
    UNRECORDED = "UNRECORDED"
    ELSEWHERE = "ELSEWHERE"
    NETWORK = "NETWORK"


@with_plain_members
class Layer(enum.StrEnum):
    """The layer that gets the bytes of a permitted change."""

    SOURCE = "source"
    SCRATCH = "scratch"
    """The session's scratch layer; the path matches a `[[scratch]]`."""
    STAGED = "staged"
    """A staged file. It enters the source when it is renamed or linked to a name that the rules permit."""


OTHER_LAYER: Final[dict[Layer, tuple[str, str]]] = {
    Layer.SCRATCH: (
        "Scratch files live in the session's scratch layer; they never reach the workspace and end with the session.",
        "Write what must stay to a path that a rule admits.",
    ),
    Layer.STAGED: (
        "A file of this temporary name exists in the mount only. A rename or link to a name that the rules admit writes"
        " it into the workspace; otherwise it ends with the session.",
        "Rename it to its final name, or write to that name directly.",
    ),
}
"""For a permitted change of another layer: what happens to its bytes, and how to keep them."""
REPOSITORY_RULE: Final = "repository"
OF_REPOSITORY: Final = (
    "`.git` is the repository of this session. The source takes over what is published: a branch, commit by commit.",
    "Commit on a branch of your own; a commit is published at once, or git says why it is not.",
)

ERRNO: Final[dict[Code, int]] = {
    Code.OUTSIDE: errno.EPERM,
    Code.DEVICE: errno.EPERM,
    Code.SECRET: errno.EACCES,
    Code.HARDLINK: errno.EPERM,
    Code.PROTECTED: errno.EROFS,
    Code.ROLE: errno.EACCES,
    Code.HIDDEN: errno.EACCES,
    Code.SUFFIX: errno.EACCES,
    Code.EXECUTABLE: errno.EACCES,
    Code.KEEP: errno.EACCES,
    Code.DEFAULT: errno.EACCES,
    Code.SIZE: errno.EFBIG,
    Code.SPACE: errno.ENOSPC,
    Code.LEASED: errno.EACCES,
    Code.ASK: errno.EACCES,
    Code.IDENTITY: errno.EACCES,
    Code.GIT: errno.EACCES,
    Code.BEADS: errno.EACCES,
    Code.UNRECORDED: errno.EIO,
    Code.ELSEWHERE: errno.EXDEV,
    Code.NETWORK: errno.EACCES,
}


class Permit(NamedTuple):
    """Permission to make one change. Only `policy.engine` creates permits, and every effect takes one as an argument.

    `ipc.codec` passes a permit to another process of the same session.
    """

    rule: str
    """Name of the rule that permits the change."""
    max_size: int | None = None
    """Largest size in bytes for which this decision holds; None: any."""
    judges_content: bool = False
    """The rule forbids executable content: a change of the first bytes needs a new decision."""
    layer: Layer = Layer.SOURCE
    """A change in any layer but SOURCE must not touch the source. Only requests inside a mount get such a permit."""
    answer: int = 0
    """Number of the operator's answer that permits the change of an [[ask]] path; 0: none was needed."""


class Holding(NamedTuple):
    """The lease of another holder on a path."""

    holder: str
    """Label of the agent who acquired it."""
    chain: str | None
    """The chain that holds it; None: the agent holds it."""
    until: str
    """Its expiry in ISO 8601."""
    holder_id: str | None = None
    """UUID of the agent, for the trail; None: only Agent Mail knows the agent."""

    def __str__(self) -> str:
        by = self.holder if self.chain is None else f"{self.holder} for chain {self.chain}"
        return f"It is held by {by} until {self.until}."


class Denied(NamedTuple):
    """A denial: its rule, a stable code, one constant sentence, and what to do instead."""

    code: Code
    rule: str
    reason: str
    instead: str
    path: WorkspacePath
    operation: Operation
    holding: Holding | None = None
    """The lease, if a lease is the reason."""
    about: str = ""
    """A sentence with the particulars, such as the issue or the branch."""
    question: str = ""
    """Id of the question to the operator, with the code ASK."""

    @property
    def errno(self) -> int:
        return ERRNO[self.code]


Decision = Permit | Denied


def as_document(decision: Decision, path: str, operation: Operation) -> dict[str, Any]:
    """Return the JSON form of a decision: `why --json`, the extended attribute, `denials.jsonl`, exceptions."""
    if isinstance(decision, Denied):
        holder, chain, until, _ = decision.holding or (None, None, None, None)
        holding = {} if holder is None else {"holder": holder, "chain": chain, "until": until}
        about = {"about": decision.about} if decision.about else {}
        question = {"question": decision.question} if decision.question else {}
        return {
            "allowed": False,
            "code": decision.code.value,
            "rule": decision.rule,
            "reason": decision.reason,
            "instead": decision.instead,
            "path": decision.path,
            "operation": decision.operation.value,
            **holding,
            **about,
            **question,
        }
    reason, instead = OTHER_LAYER.get(decision.layer, (None, None))
    if decision.rule == REPOSITORY_RULE:
        reason, instead = OF_REPOSITORY
    return {
        "allowed": True,
        "code": None,
        "rule": decision.rule,
        "reason": reason,
        "instead": instead,
        "path": path,
        "operation": operation.value,
    }


# mypyc compiles no subclass of OSError. So these classes are in this module, which is not compiled.
class Refused(PermissionError):  # noqa: N818 - a denial is a result, not a fault
    """The policy denies a change. `errno` follows from the code; `decision` is the denial."""

    exit_code: ClassVar[int] = 77

    def __init__(self, decision: Denied) -> None:
        held = "" if decision.holding is None else str(decision.holding)
        question = decision.question and f"The question is {decision.question}."
        sentences = filter(None, (decision.reason, decision.about, held, question, decision.instead))
        super().__init__(decision.errno, " ".join(sentences), decision.path)
        self.decision = decision


class WrongLayerError(OSError):
    """The decision permits the change, but in another layer than the caller is about to change; EXDEV."""

    def __init__(self, permit: Permit) -> None:
        super().__init__(errno.EXDEV, os.strerror(errno.EXDEV))
        self.permit = permit


class CrossLayerError(OSError):
    """EXDEV with its rule, reason and advice."""

    def __init__(self, words: tuple[str, str, str]) -> None:
        super().__init__(errno.EXDEV, os.strerror(errno.EXDEV))
        self.words = words
