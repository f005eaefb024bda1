"""The steps of an undo, and what the policy judges of each: the same before an undo begins and when a step is made."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from bonobofs.enforcement.authorizer import RelatedChange
from bonobofs.errors import StateError
from bonobofs.policy.request import EXISTS, HEAD_BYTES, Context, Kind, Operation, Request, WorkspacePath
from bonobofs.undo.images import EMPTY, Image, Images

_STATE: Final = {"mode": int, "uid": int, "gid": int, "mtime": int}
ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    "remove": {},
    "rmdir": {},
    "mkdir": {**_STATE, "xattrs": dict},
    "put": {**_STATE, "size": int, "image": list, "new": bool, "xattrs": list | None},
    "rename": {"to": str},
    "exchange": {"to": str},
    "link": {"of": str},
    "symlink": {**_STATE, "target": str},
    "mode": {"mode": int},
    "owner": {"uid": int, "gid": int},
    "times": {"mtime": int},
    "xattr": {"name": str, "value": str | None},
    "dir_times": {"mtime": int},
    "publish": {"updates": list, "publishers": dict},
}
"""The types of the arguments that each step must have."""
CHANGING_NAMES: Final = ("remove", "rmdir", "mkdir", "put", "rename", "exchange", "link", "symlink")
"""Steps that change a name in a directory."""
_PROGRESS: Final = re.compile(
    rb"((?:\d{1,20} |@\d{1,20}:-?\d{1,20} |(?:!(?:[0-9a-f]{2})+)?\.)*)"
    rb"(?:\d{0,20}|@\d{0,20}|@\d{1,20}:-?\d{0,20}|![0-9a-f]*)\0*"
)
"""The complete notes, and what a full disk or a power loss leaves of the last one."""
_REASON: Final = re.compile(rb"!([0-9a-f]+)")


@dataclass(slots=True)
class UndoStep:
    """One change that the undo makes. `arguments` have a JSON form."""

    do: str
    """A key of `ARGUMENTS`."""
    path: str
    change: str
    """Name of the change that it takes back."""
    arguments: dict[str, Any] = field(default_factory=dict)
    expected: list[int] | None = None
    """The `expectation` of the file at the path before the step. None: the step does not compare the file.

    A link step makes its path, so it compares the file to which it makes the link.
    """
    files: list[int] = field(default_factory=list)
    """Numbers of the files that it changes. All steps of one file have its number."""

    def check(self) -> None:
        """Check a step that was read from a journal. ValueError, TypeError, KeyError: it is damaged."""
        kinds = {"path": str, "change": str, "files": list, "expected": list | None, **ARGUMENTS[self.do]}
        values = {**self.document(), **self.arguments}
        if not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            raise ValueError(self.do)
        if any("\0" in path for path in self.paths):
            raise ValueError("paths")

    def document(self) -> dict[str, Any]:
        """Return the step as JSON data."""
        return {
            "do": self.do,
            "path": self.path,
            "change": self.change,
            "arguments": self.arguments,
            "expected": self.expected,
            "files": self.files,
        }

    @property
    def paths(self) -> list[str]:
        """The paths that it changes or reads."""
        return [self.path, *(self.arguments[key] for key in ("to", "of") if key in self.arguments)]

    @property
    def directories(self) -> set[str]:
        """The directories in which it changes names."""
        if self.do not in CHANGING_NAMES:
            return set()
        return {path.rpartition("/")[0] for path in (self.path, self.arguments.get("to", self.path))}


def read_journal(plan: Path, source: str) -> tuple[list[UndoStep], dict[str, Any], bytes] | None:
    """Return the steps of a killed undo, what it is for, and its notes; None: it is of another source, or has ended.

    Removes a cut last note: the next note must not extend it. StateError: a file of the journal is damaged; the message
    names it. OSError.
    """
    done, damage = plan.with_suffix(".done"), f"{plan} is not the journal of an undo; move it away"
    try:
        about = json.loads(plan.read_bytes())
        if about.get("source") != source:
            return None
        steps = [UndoStep(**step) for step in about.pop("steps")]
        for step in steps:
            step.check()
        names = [about["selection"], *(text for change in about["changes"] for text in change)]
        if not all(isinstance(text, str) for text in names) or not all(about["changes"]):
            raise ValueError("names")
        damage = f"{done} does not have the notes of an undo; move it away with {plan.name}"
        progress = done.read_bytes() if done.exists() else b""
        notes = _PROGRESS.fullmatch(progress)
        if notes is None or progress.count(b".") > len(steps):
            raise ValueError("notes")
        for text in _REASON.findall(notes[1]):
            bytes.fromhex(text.decode()).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(damage) from error
    if notes.end(1) < len(progress):
        os.truncate(done, notes.end(1))
    return steps, about, notes[1]


def expectation(mode: int, size: int, mtime: int) -> list[int]:
    """Return what a step expects of a file: its type (S_IFMT), and of a file or symlink the size and the time."""
    return [stat.S_IFMT(mode), *((size, mtime) if stat.S_ISREG(mode) or stat.S_ISLNK(mode) else ())]


class FailedSteps:
    """The steps that were not made. They block later steps of their files."""

    def __init__(self) -> None:
        self._files: Final = set[int]()
        self._paths: Final = set[str]()
        self._names: Final = set[str]()
        """Paths of the steps that should have changed a name. A later step may find another file there."""

    def add(self, step: UndoStep) -> None:
        """Add a step that was not made."""
        self._files.update(step.files)
        self._paths.update(step.paths)
        if step.do in CHANGING_NAMES:
            self._names.update(step.paths)

    def blocks(self, step: UndoStep) -> bool:
        """Return whether a step has a file or a path of one that was not made, or a path below a name of it."""
        return not self._files.isdisjoint(step.files) or any(
            path in self._paths or any(above in self._names for above in _directories_of(path)) for path in step.paths
        )


class FileFacts(NamedTuple):
    """What the policy judges of a file that gets another path."""

    kind: Kind
    context: Context
    names: Sequence[str] = ()
    """Names in a directory."""


class StepFiles(Protocol):
    """The files of a source before a step."""

    def size_of(self, path: str) -> int | None:
        """Return the size of the file at a path in bytes; None: there is none."""

    def kind_of(self, path: str) -> Kind:
        """Return the kind of the file at a path; FILE if there is none."""

    def facts_of(self, path: str) -> FileFacts:
        """Return the facts of the file at a path. OSError."""


def head_of(images: Images, image: Image) -> bytes:
    """Return the first HEAD_BYTES of an image. OSError, ENODATA: it is not kept."""
    if image == EMPTY:
        return b""
    content = images.open(image)
    if content is None:
        raise OSError(errno.ENODATA, "the old content is no longer kept")
    with content:
        return content.read(HEAD_BYTES)


def read_head(path: Path) -> bytes:
    """Return the first HEAD_BYTES of a regular file. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.pread(fd, HEAD_BYTES, 0)
    finally:
        os.close(fd)


def judged_changes(step: UndoStep, files: StepFiles, images: Images) -> list[RelatedChange]:
    """Return what the policy judges of a step, that at its path first. OSError: a file cannot be read."""
    arguments = step.arguments
    match step.do:
        case "rename" | "exchange":
            to = arguments["to"]
            arrivals = list(_arrivals(files, step.path, to))
            if step.do == "exchange":
                arrivals += _arrivals(files, to, step.path)
            leaving = RelatedChange(_request(Operation.RENAME, step.path, arrivals[0].request.kind), _LEAVES)
            return [leaving, *arrivals]
        case "link":
            facts = files.facts_of(arguments["of"])
            return [RelatedChange(_request(Operation.LINK, step.path, facts.kind), facts.context)]
        case "put":
            old = files.size_of(step.path)
            context = Context(
                size=arguments["size"],
                size_before=old or 0,
                mode=arguments["mode"],
                head=head_of(images, Image(*arguments["image"]))[: arguments["size"]],
                in_source=old is not None,
            )
            return [RelatedChange(_request(Operation.WRITE_FILE, step.path, Kind.FILE), context)]
        case "mkdir":
            return [RelatedChange(_request(Operation.MKDIR, step.path, Kind.DIRECTORY), Context())]
        case "symlink":
            context = Context(target=arguments["target"])
            return [RelatedChange(_request(Operation.SYMLINK, step.path, Kind.SYMLINK), context)]
    kind, context = files.kind_of(step.path), _LEAVES if step.do in ("remove", "rmdir") else EXISTS
    if step.do == "mode" and kind is Kind.FILE:
        context = EXISTS._replace(mode=arguments["mode"])
    operation = Operation.REMOVE_XATTR if arguments.get("value", "") is None else _OPERATIONS[step.do]
    return [RelatedChange(_request(operation, step.path, kind), context)]


def arrived_changes(step: UndoStep, files: StepFiles) -> list[RelatedChange]:
    """Return what the policy judges of the files that a rename, exchange or link has brought to a path. OSError."""
    if step.do == "link":
        facts = files.facts_of(step.path)
        return [RelatedChange(_request(Operation.LINK, step.path, facts.kind), facts.context)]
    paths = [step.arguments["to"], *([step.path] if step.do == "exchange" else [])]
    return [change for path in paths for change in _arrivals(files, path, path)]


_LEAVES: Final = Context(leaves=True)
_OPERATIONS: Final = {
    "remove": Operation.DELETE_FILE,
    "rmdir": Operation.RMDIR,
    "mode": Operation.SET_MODE,
    "owner": Operation.SET_OWNER,
    "times": Operation.SET_TIMES,
    "dir_times": Operation.SET_TIMES,
    "xattr": Operation.SET_XATTR,
}


def _request(operation: Operation, path: str, kind: Kind) -> Request:
    return Request(operation, WorkspacePath(path), kind)


def _arrivals(files: StepFiles, path: str, to: str) -> Iterator[RelatedChange]:
    """Yield what the policy judges when a file, with all that is below it, gets another path. OSError."""
    pending = [""]  # no recursion: an agent chooses the depth
    while pending:
        below = pending.pop()
        kind, context, names = files.facts_of(path + below)
        yield RelatedChange(_request(Operation.RENAME, to + below, kind), context._replace(carried=bool(below)))
        pending += [f"{below}/{name}" for name in names]


def _directories_of(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path
