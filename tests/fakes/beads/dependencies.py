"""dep: what orders work, and the little that bd checks of it."""

from __future__ import annotations

import json
from typing import Any

from .answers import Failed
from .call import Call
from .store import ORDERING, Edge, Store, now

FLAGS = {"blocks": "b:text", "no-cycle-check": "flag"}
ADD_FLAGS = {"type": "t:text", "no-cycle-check": "flag"}
LIST_FLAGS = {"type": "t:text", "direction": "text"}
TREE_FLAGS = {"direction": "text", "max-depth": "d:text"}


def dep(call: Call) -> None:
    word = call.arguments[0] if call.arguments else ""
    if word in _PARTS:
        call.arguments = call.arguments[1:]
        _PARTS[word](call)
    elif word and "blocks" in call.flags:
        blocker, blocked = call.id_of(word, "stdout"), call.id_of(call.flags["blocks"], "stdout")
        add_edge(call.store, blocked, blocker, "blocks", call.person.actor)
        call.store.save()
        call.answers.tell({"status": "added", "blocker_id": blocker, "blocked_id": blocked, "type": "blocks"}, "Added")
    else:
        raise Failed(f"unknown command {word!r} for bd dep")


def add_edge(store: Store, from_: str, to: str, kind: str, actor: str) -> None:
    """`from_` depends on `to`. The same edge again changes nothing; Failed, as JSON on stdout, for what bd refuses."""
    if from_ == to:
        raise Failed("cannot add self-dependency", "stdout")
    if not 1 <= len(kind) <= 50:
        raise Failed(f"dependency type must be 1-50 characters: {kind!r}", "stdout")
    for edge in store.edges:
        if (edge["issue_id"], edge["depends_on_id"]) == (from_, to):
            if edge["type"] == kind:
                return
            there = f"dependency {from_} -> {to} already exists with type {json.dumps(edge['type'])}"
            raise Failed(f"{there} (requested {json.dumps(kind)}); remove it first", "stdout")
    if kind == "blocks" and to in store.issues:
        epics = [store.issues[end]["issue_type"] == "epic" for end in (from_, to)]
        if epics[0] != epics[1]:
            told = ("epics can only block other epics, not tasks", "tasks can only block other tasks, not epics")
            raise Failed(told[epics[0]], "stdout")
    if kind in ORDERING and _leads(store, to, from_):
        raise Failed(f"adding dependency {from_} -> {to} would create a cycle", "stdout")
    time = now()
    store.edges.append(
        {
            "issue_id": from_,
            "depends_on_id": to,
            "type": kind,
            "created_at": time,
            "created_by": actor,
            "metadata": "{}",
        }
    )


def _leads(store: Store, start: str, end: str) -> bool:
    """Whether blocking edges alone lead from one to the other."""
    seen = set()
    open_ = [start]
    while open_:
        at = open_.pop()
        if at == end:
            return True
        if at not in seen:
            seen.add(at)
            open_ += [e["depends_on_id"] for e in store.edges if e["issue_id"] == at and e["type"] in ORDERING]
    return False


def _add(call: Call) -> None:
    if len(call.arguments) != 2:
        raise Failed("accepts 2 arg(s)")
    kind = call.flags.get("type", "blocks")
    from_ = call.id_of(call.arguments[0], "stdout")
    to = call.arguments[1] if call.arguments[1].startswith("external:") else call.id_of(call.arguments[1], "stdout")
    add_edge(call.store, from_, to, kind, call.person.actor)
    call.store.save()
    call.answers.tell(
        {"status": "added", "issue_id": from_, "depends_on_id": to, "type": kind}, f"Added: {from_} depends on {to}"
    )


def _remove(call: Call) -> None:
    if len(call.arguments) != 2:
        raise Failed("accepts 2 arg(s)")
    from_, to = (call.id_of(word, "stdout") for word in call.arguments)
    ends = {(edge["issue_id"], edge["depends_on_id"]): edge for edge in call.store.edges}
    if (from_, to) in ends:
        call.store.edges.remove(ends[from_, to])
        call.store.save()
    call.answers.tell({"status": "removed", "issue_id": from_, "depends_on_id": to}, f"Removed: {from_} -> {to}")


def _list(call: Call) -> None:
    ids = [call.id_of(word, "stdout") for word in call.arguments]
    edges = [edge for id_ in ids for edge in call.edges_of(id_)]
    if len(ids) > 1:
        call.answers.tell(edges, "\n".join(map(_line, edges)))
        return
    upwards = call.flags.get("direction") == "up"
    if upwards:
        edges = [edge for edge in call.store.edges if edge["depends_on_id"] == ids[0]]
    edges = [edge for edge in edges if call.flags.get("type", edge["type"]) == edge["type"]]
    ends = [(edge["issue_id" if upwards else "depends_on_id"], edge["type"]) for edge in edges]
    found = [{**call.shown(end), "dependency_type": kind} for end, kind in ends if end in call.store.issues]
    call.answers.tell(found, "\n".join(map(_line, edges)))


def _line(edge: Edge) -> str:
    return f"  {edge['issue_id']} depends on {edge['depends_on_id']} ({edge['type']})"


def _tree(call: Call) -> None:
    rows: list[dict[str, Any]] = []

    def walk(id_: str, depth: int, parent: str, kind: str, above: tuple[str, ...]) -> None:
        rows.append(
            {**call.shown(id_), "depth": depth, "parent_id": parent, "edge_from_parent": kind, "truncated": depth >= 50}
        )
        for edge in call.edges_of(id_):
            end = edge["depends_on_id"]
            if end in call.store.issues and end not in above and depth < 50:
                walk(end, depth + 1, id_, edge["type"], (*above, end))

    start = call.id_of(call.arguments[0], "stdout")
    walk(start, 0, "", "", (start,))
    call.answers.tell(rows, "\n".join("  " * row["depth"] + str(row["id"]) for row in rows))


def _cycles(call: Call) -> None:
    """There is never one to be seen: the store refuses those along blocks, and nothing looks for the others."""
    call.answers.tell([], "No dependency cycles detected")


_PARTS = {"add": _add, "remove": _remove, "list": _list, "tree": _tree, "cycles": _cycles}
