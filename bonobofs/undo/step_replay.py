"""Replay the steps of a plan in memory: what each expects, on which files it depends, what the policy says to it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from bonobofs.enforcement.authorizer import RelatedChange
from bonobofs.policy.decision import Denied, Refused
from bonobofs.policy.request import EXISTS, Kind
from bonobofs.undo.changes import FileState, Restoration
from bonobofs.undo.images import Image, Images
from bonobofs.undo.steps import FileFacts, UndoStep, expectation, head_of, judged_changes, read_head
from bonobofs.undo.tree import FileNode, SourceTree

Judge = Callable[[Sequence[RelatedChange]], Mapping[int, Denied]]
"""Returns the denials of the policy, by the index of the change."""
_TYPES: Final = {"put": stat.S_IFREG, "mkdir": stat.S_IFDIR, "symlink": stat.S_IFLNK}


class Replay:
    """The source before each step. It is the `StepFiles` of the next one."""

    def __init__(self, source: Path, restored: Mapping[int, list[Restoration]], images: Images) -> None:
        """`restored`: see `changes.restored_files`."""
        self._source: Final = source
        self._tree: Final = SourceTree(source, restored)
        self._images: Final = images
        self._contents: Final[dict[FileNode, Image]] = {}
        self._numbers: Final[dict[FileNode, int]] = {}

    def run(self, steps: Sequence[UndoStep], judge: Judge | None) -> tuple[dict[str, str], list[Denied]]:
        """Set `expected` and `files` of the steps. Return why changes are refused, by their names, and the denials.

        `judge`: the policy; None: all is permitted.
        """
        reasons: dict[str, str] = {}
        judged: list[tuple[str, RelatedChange]] = []
        for step in steps:
            if step.do in ("publish", "dir_times"):
                continue
            try:
                if judge is not None:
                    judged += [(step.change, change) for change in judged_changes(step, self, self._images)]
            except OSError as error:
                reasons.setdefault(step.change, f"the policy cannot judge it: {error.strerror}")
            self._take(step)
        denials = []
        denied = {} if judge is None else judge([change for _, change in judged])
        for number, denial in sorted(denied.items()):
            name = judged[number][0]
            if name not in reasons:
                reasons[name] = str(Refused(denial).strerror)
                denials.append(denial)
        return reasons, denials

    def _take(self, step: UndoStep) -> None:
        """Set what a step expects, and make it in memory."""
        tree, path, arguments = self._tree, step.path, step.arguments
        node = tree.find(arguments["of"] if step.do == "link" else path)
        if node is None and step.do in _TYPES:
            node = self._new(step)
        if node is None:
            return  # another program has removed it
        other = tree.find(arguments["to"]) if step.do == "exchange" else None
        step.files = [self._numbers.setdefault(each, len(self._numbers)) for each in (node, other) if each is not None]
        if step.do not in ("symlink", "mkdir") and not arguments.get("new"):
            step.expected = expectation(node.mode, node.size, node.mtime)
        if other is not None:
            arguments["other"] = expectation(other.mode, other.size, other.mtime)
        if step.do == "put":
            node.size, node.mtime = arguments["size"], arguments["mtime"]
            node.mode = stat.S_IFREG | arguments["mode"]
            self._contents[node] = Image(*arguments["image"])
        elif step.do == "times":
            node.mtime = arguments["mtime"]
        elif step.do == "mode":
            node.mode = stat.S_IFMT(node.mode) | arguments["mode"]
        if step.do in ("remove", "rmdir", "rename"):
            tree.remove(path)
        elif other is not None:
            tree.put(path, other)
        if step.do in ("rename", "exchange"):
            tree.put(arguments["to"], node)
        elif step.do in ("link", *_TYPES):
            tree.put(path, node)

    def _new(self, step: UndoStep) -> FileNode:
        arguments = step.arguments
        mode = _TYPES[step.do] | stat.S_IMODE(arguments["mode"])
        size = arguments.get("size", len(os.fsencode(arguments.get("target", ""))))
        node = FileNode(FileState(mode, arguments["uid"], arguments["gid"], arguments["mtime"], size, 0, 1, 0))
        node.target = arguments.get("target", "")
        return node

    def size_of(self, path: str) -> int | None:
        """As `StepFiles.size_of`."""
        node = self._tree.find(path)
        return None if node is None else node.size

    def kind_of(self, path: str) -> Kind:
        """As `StepFiles.kind_of`."""
        node = self._tree.find(path)
        return Kind.FILE if node is None else node.kind

    def facts_of(self, path: str) -> FileFacts:
        """As `StepFiles.facts_of`."""
        node, context = self._tree.find(path), EXISTS
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "another program has removed it")
        if node.kind is Kind.DIRECTORY:
            return FileFacts(node.kind, context, list(self._tree.names(node)))
        if node.kind is Kind.SYMLINK:
            return FileFacts(node.kind, context._replace(target=node.target))
        if node.kind is not Kind.FILE:
            return FileFacts(node.kind, context)
        if node in self._contents:
            head = head_of(self._images, self._contents[node])[: node.size]
        elif node.real is not None:
            head = read_head(self._source / node.real)
        else:
            head = b""
        return FileFacts(node.kind, context._replace(size=node.size, mode=stat.S_IMODE(node.mode), head=head))
