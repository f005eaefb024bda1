"""A tree of paths that follows renames: the node of a path moves with the path and with the directories above it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self


class PathNode:
    """One path. The paths below it are its children, so they move with a renamed directory."""

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[str, Self] = {}

    def reach(self, path: str) -> Self:
        """Return the node of a path below this one; missing nodes are created."""
        node = self
        for name in path.split("/") if path else ():
            child = node.children.get(name)
            if child is None:
                child = node.children[name] = type(self)()
            node = child
        return node

    def above(self, path: str) -> Self:
        """Return the node of the directory that contains a path."""
        return self.reach(path.rpartition("/")[0])

    def take(self, path: str) -> Self | None:
        """Remove the node of a path, and return it."""
        return self.above(path).children.pop(path.rpartition("/")[2], None)

    def put(self, path: str, node: Self) -> None:
        """Set the node of a path."""
        self.above(path).children[path.rpartition("/")[2]] = node

    def walk(self) -> Iterator[tuple[str, Self]]:
        """Yield every path and its node, each directory before its content, by name."""
        waiting: list[tuple[str, Self]] = [("", self)]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            waiting += [
                (f"{path}/{name}" if path else name, child)
                for name, child in sorted(node.children.items(), reverse=True)
            ]


def with_renames(paths: set[str], renames: dict[tuple[str, str], float]) -> set[str]:
    """Add, for each renamed directory, the new names of the paths below its old name."""
    found = set(paths)
    for old, new in renames:
        found |= {new + path.removeprefix(old) for path in found if path.startswith(f"{old}/")}
    return found
