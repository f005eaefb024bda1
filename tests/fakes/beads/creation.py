"""create, q, and what becomes of an issue that is made under an id that is taken."""

from __future__ import annotations

from typing import Any

from . import fields
from .answers import Answers, Failed
from .call import Call
from .dependencies import add_edge
from .store import UNINITIALIZED, Issue, now

FLAGS = {
    "title": "text", "type": "t:text", "priority": "p:text", "description": "d:text", "design": "text",
    "notes": "text", "acceptance": "text", "assignee": "a:text", "labels": "l:list", "parent": "text", "deps": "list",
    "metadata": "text", "id": "text", "force": "flag", "silent": "flag", "dry-run": "flag", "ephemeral": "flag",
    "no-history": "flag", "no-inherit-labels": "flag", "repo": "text", "waits-for": "text",
}  # fmt: skip
QUICK_FLAGS = {"type": "t:text", "priority": "p:text", "labels": "l:list"}

_BEFORE = frozenset({"depends-on", "blocked-by"})
"""Words of --deps for an ordinary blocks edge."""


def create(call: Call) -> None:
    flags, store = call.flags, call.store
    issue = _fields(call)
    parent = flags.get("parent", "")
    if parent and flags.get("id"):
        raise Failed("cannot specify both --id and --parent flags", "stderr")
    if parent and store.resolve(parent) is None:
        raise Failed(f"parent issue {parent} not found", "stderr")
    if parent:
        parent = call.id_of(parent)
    wisp = bool(flags.get("ephemeral")) or (issue["issue_type"] == "message" and "message" in fields.infra(store))
    if wisp and flags.get("no-history"):
        raise Failed("--no-history cannot be used with an ephemeral issue", "stderr")
    if wisp:
        issue["ephemeral"] = True
    if flags.get("dry-run"):
        call.answers.tell({**_printed(issue), "id": "", "created_at": "0001-01-01T00:00:00Z"}, "would create")
        return
    if not store.prefix:
        raise Failed(UNINITIALIZED, "stderr")
    issue["id"] = id_ = _id(call, parent, wisp=wisp)
    if parent and not flags.get("no-inherit-labels"):
        issue["labels"] = sorted({*issue["labels"], *store.issues[parent]["labels"]})
    if id_ in store.issues:  # whatever is there is written over, without a word
        issue["created_at"] = store.issues[id_]["created_at"]
    store.issues[id_] = issue
    if parent:
        add_edge(store, id_, parent, "parent-child", call.person.actor)
    call.changed(id_, "create")
    warnings = _depend(call, id_)
    if call.answers.as_json:
        call.answers.tell({**_printed(issue), "created_at": now(exact=True), "updated_at": now(exact=True)}, "")
    else:
        print(id_ if flags.get("silent") else f"Created issue: {id_}\n  Title: {issue['title']}")
    for warning in warnings:
        Answers.notice(f"Warning: {warning}")


def quick(call: Call) -> None:
    """`q` prints the id, also with --json."""
    call.answers.as_json = False
    call.flags["silent"] = True
    create(call)


def _fields(call: Call) -> Issue:
    flags = call.flags
    if call.arguments and call.arguments[0].startswith("-"):
        raise Failed(f"title {call.arguments[0]!r} looks like a flag", "stderr")
    title = fields.title(flags.get("title") or (call.arguments[0] if call.arguments else ""), "stderr")
    time = now()
    return {
        "id": "",
        "title": title,
        **{key: flags.get(flag, "") for flag, key in fields.TEXTS.items()},
        "description": fields.description(flags.get("description", "")),
        "status": "open",
        "priority": fields.priority(flags.get("priority", "2"), "stderr"),
        "issue_type": fields.issue_type(flags.get("type", "task"), "stderr"),
        "assignee": fields.assignee(flags.get("assignee", ""), "stderr"),
        "owner": call.person.owner,
        "created_at": time,
        "created_by": call.person.actor,
        "updated_at": time,
        "labels": sorted(fields.labels(flags.get("labels", []))),
        "metadata": fields.metadata(flags["metadata"], "stderr") if "metadata" in flags else None,
    }


def _id(call: Call, parent: str, *, wisp: bool) -> str:
    wanted = str(call.flags.get("id", ""))
    if not wanted:
        return call.store.new_id(parent, wisp=wisp)
    if not wanted.startswith(call.store.prefix + "-") and not call.flags.get("force"):
        raise Failed(f"issue ID {wanted!r} does not match the prefix {call.store.prefix!r}", "stderr")
    return wanted


def _printed(issue: Issue) -> dict[str, Any]:
    return {key: value for key, value in issue.items() if value or key == "priority"}


def _depend(call: Call, id_: str) -> list[str]:
    """Add what --deps and --waits-for name, the issue being stored already; what could not be added is a warning."""
    warnings = []
    words = [*call.flags.get("deps", []), *(f"waits-for:{word}" for word in [call.flags.get("waits-for")] if word)]
    for word in words:
        kind, colon, end = word.partition(":")
        if colon and kind not in fields.EDGES:
            raise Failed(f"invalid dependency type {kind!r}", "stdout")
        other = call.store.resolve(end if colon else word)
        if other is None:
            warnings.append(f"failed to add dependency {id_} -> {end or word}: issue not found")
            continue
        from_, to = (other, id_) if kind == "blocks" and colon else (id_, other)
        try:
            add_edge(call.store, from_, to, kind if colon and kind not in _BEFORE else "blocks", call.person.actor)
        except Failed as failed:
            warnings.append(f"failed to add dependency {from_} -> {to}: {failed.message}")
    if words:
        call.store.save()
    return warnings
