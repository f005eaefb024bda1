"""update, close, reopen, label, comment and delete."""

from __future__ import annotations

from collections import Counter
from typing import Any

from . import fields
from .answers import Answers, Failed
from .call import Call
from .dependencies import add_edge
from .store import Issue, now, random_uuid

UPDATE_FLAGS = {
    "title": "text", "status": "s:text", "priority": "p:text", "type": "t:text", "assignee": "a:text",
    "description": "d:text", "design": "text", "notes": "text", "acceptance": "text", "add-label": "list",
    "remove-label": "list", "set-labels": "list", "parent": "text", "metadata": "text", "claim": "flag",
    "persistent": "flag", "ephemeral": "flag",
}  # fmt: skip
CLOSE_FLAGS = {"reason": "r:text", "force": "f:flag"}
REOPEN_FLAGS = {"reason": "r:text"}


def update(call: Call) -> None:
    """Each of the issues by itself: of one that there is not, only a line on standard error tells."""
    flags = call.flags
    ids = call.ids()
    if not set(flags) & set(UPDATE_FLAGS):
        print("No updates specified")
        return
    changes = _changes(call)
    done = []
    for word in ids:
        id_ = call.store.resolve(word)
        if id_ is None:
            Answers.notice(f"Error resolving {word}: no issue found matching {word!r}")
            continue
        if flags.get("claim"):
            _claim(call, id_)
        _apply(call, id_, changes)
        call.changed(id_, "update")
        done.append(call.shown(id_))
    if not done:
        raise Failed(f"no issues updated: {', '.join(ids)}")
    call.answers.tell(done, "\n".join(f"Updated issue: {issue['id']}" for issue in done))


def _changes(call: Call) -> Issue:
    """What the flags say, checked: status, priority and title fail as JSON on stdout, the type as text."""
    flags = call.flags
    changes: Issue = {key: flags[flag] for flag, key in fields.TEXTS.items() if flag in flags}
    if changes.get("description"):
        changes["description"] = fields.description(changes["description"])
        if not changes["description"]:
            raise Failed("empty description from stdin/file requires --allow-empty-description", "stdout")
    if "status" in flags:
        changes["status"] = fields.status(flags["status"], call.store, "stdout")
    if "priority" in flags:
        changes["priority"] = fields.priority(flags["priority"], "stdout")
    if "title" in flags:
        changes["title"] = fields.title(flags["title"].strip(), "stdout")  # as create does not
    if "type" in flags:
        changes["issue_type"] = fields.issue_type(flags["type"], "text")
    if "assignee" in flags:
        changes["assignee"] = fields.assignee(flags["assignee"], "text")
    if "metadata" in flags:
        changes["metadata"] = fields.metadata(flags["metadata"], "stdout")
        if not isinstance(changes["metadata"], dict):
            raise Failed("metadata must be a JSON object", "stdout")
    return changes


def _apply(call: Call, id_: str, changes: Issue) -> None:
    issue, flags = call.store.issues[id_], call.flags
    metadata = changes.get("metadata")
    if metadata is not None and isinstance(issue["metadata"], dict):
        changes = {**changes, "metadata": {**issue["metadata"], **metadata}}
    before = issue["status"]
    issue.update(changes, updated_at=now())
    if issue["status"] == "in_progress" and before != "in_progress":
        issue["started_at"] = now()
    if issue["status"] == "closed" and before != "closed":
        issue.update(closed_at=now())
    if before == "closed" and issue["status"] != "closed":
        issue.update(closed_at="", close_reason="")
    if "persistent" in flags or changes.get("issue_type") == "message":
        issue["ephemeral"] = False
    kept: list[str] = flags["set-labels"] if flags.get("set-labels") else issue["labels"]
    labels = fields.labels([*kept, *flags.get("add-label", [])])
    issue["labels"] = sorted(labels - set(flags.get("remove-label", [])))
    if "parent" in flags:
        _set_parent(call, id_, flags["parent"])


def _set_parent(call: Call, id_: str, word: str) -> None:
    """Another parent instead of one that there is; of two the other stays. Its own child will do, only not itself."""
    store = call.store
    parent = call.id_of(word) if word else ""
    if parent == id_:
        raise Failed(f"{id_} cannot be its own parent")
    there = next((e for e in store.edges if (e["issue_id"], e["type"]) == (id_, "parent-child")), None)
    if there is not None:
        store.edges.remove(there)
    if parent:
        add_edge(store, id_, parent, "parent-child", call.person.actor)


def _claim(call: Call, id_: str) -> None:
    issue, actor = call.store.issues[id_], call.person.actor
    if issue["assignee"] and issue["assignee"] != actor:
        raise Failed(f"already claimed by {issue['assignee']}")
    if issue["status"] != "open" and not (issue["assignee"] == actor and issue["status"] == "in_progress"):
        raise Failed(f"issue {id_} is not claimable: status {issue['status']}")
    issue.update(assignee=actor, status="in_progress", started_at=issue.get("started_at") or now())


def close(call: Call) -> None:
    """One unknown id refuses them all; one that is refused does not keep the others from being closed."""
    words = call.ids()
    ids = [call.store.resolve(word) for word in words]
    for word, found in zip(words, ids, strict=True):
        if found is None:
            raise Failed(f"no issue found matching {word!r}", "stdout")
    closed, refused = [], []
    for id_ in filter(None, ids):
        reason = "" if call.flags.get("force") else _keeps_open(call, id_)
        if reason:
            refused.append(reason)
            Answers.notice(f"cannot close {id_}: {reason}")
            continue
        call.store.issues[id_].update(
            status="closed", closed_at=now(), updated_at=now(), close_reason=call.flags.get("reason") or "Closed"
        )
        call.changed(id_, "close")
        closed.append(call.shown(id_))
    if refused and not closed:
        raise Failed(refused[0])
    call.answers.tell(closed, "\n".join(f"Closed {issue['id']}" for issue in closed))


def _keeps_open(call: Call, id_: str) -> str:
    store, issue = call.store, call.store.issues[id_]
    if issue["status"] == "pinned":
        return "issue is pinned"
    if issue["status"] != "closed" and store.blockers(id_):
        return f"blocked by open issues {store.blockers(id_)}"
    open_children = [child for child in store.children(id_) if not store.is_closed(child)]
    if issue["issue_type"] == "epic" and open_children:
        return f"epic has {len(open_children)} open child issue(s)"
    return ""


def reopen(call: Call) -> None:
    if not call.arguments:
        raise Failed("requires at least 1 arg(s), only received 0")
    done = []
    for word in call.ids():
        id_ = call.id_of(word)
        if call.store.issues[id_]["status"] != "closed":
            Answers.notice(f"{id_} is already open")
            continue
        call.store.issues[id_].update(status="open", closed_at="", close_reason="", updated_at=now())
        call.changed(id_, "update")
        done.append(call.shown(id_))
    if done:
        call.answers.tell(done, "\n".join(f"Reopened {issue['id']}" for issue in done))


def one_field(key: str) -> Any:
    """assign, priority, note: `bd KEY ID VALUE` sets one field."""

    def change(call: Call) -> None:
        id_ = call.id_of(call.arguments[0])
        value: Any = " ".join(call.arguments[1:])
        call.store.issues[id_][key] = fields.priority(value, "stdout") if key == "priority" else value
        call.changed(id_, "update")
        call.answers.tell(call.shown(id_), f"Updated {id_}")

    return change


def tag(call: Call) -> None:
    id_ = call.id_of(call.arguments[0])
    issue = call.store.issues[id_]
    issue["labels"] = sorted({*issue["labels"], *fields.labels(call.arguments[1:])})
    call.changed(id_, "update")
    call.answers.tell(call.shown(id_), f"Tagged {id_}")


def label(call: Call) -> None:
    word, *rest = call.arguments
    if word == "list":
        labels = call.store.issues[call.id_of(rest[0], "stdout")]["labels"]
        call.answers.tell(labels, "\n".join(labels))
        return
    if word == "list-all":
        numbers = Counter(name for issue in call.store.issues.values() for name in issue["labels"])
        rows = [{"label": name, "count": numbers[name]} for name in sorted(numbers)]
        call.answers.tell(rows, "\n".join(sorted(numbers)))
        return
    *words, name = rest
    if not name.strip():
        raise Failed("label cannot be empty")
    if word == "add" and name.startswith("provides:"):
        raise Failed("'provides:' labels are reserved")
    done = []
    for named in words:
        id_ = call.store.resolve(named)
        if id_ is None:
            Answers.notice(f"Error resolving {named}: no issue found matching {named!r}")
            continue
        issue = call.store.issues[id_]
        there = set(issue["labels"])
        issue["labels"] = sorted(there | fields.labels([name]) if word == "add" else there - {name})
        call.changed(id_, "update")
        done.append({"issue_id": id_, "label": name, "status": "added" if word == "add" else "removed"})
    call.answers.tell(done, "\n".join(f"{entry['status']} {name}" for entry in done))


def comment(call: Call) -> None:
    word, *rest = call.arguments
    id_, text = call.id_of(word, "stdout"), " ".join(rest)
    if not text:
        raise Failed("comment text is required", "stdout")
    entry = {"id": random_uuid(), "issue_id": id_, "author": call.person.actor, "text": text, "created_at": now()}
    call.store.comments.append(entry)
    call.changed(id_, "update")
    call.answers.tell(entry, f"Comment added to {id_}")


def delete(call: Call) -> None:
    id_ = call.id_of(call.arguments[0], "stderr")
    store = call.store
    touching = [edge for edge in store.edges if id_ in (edge["issue_id"], edge["depends_on_id"])]
    if not call.flags.get("force"):
        print(f"Would delete {id_} and {len(touching)} dependencies; use --force")
        return
    del store.issues[id_]
    store.edges[:] = [edge for edge in store.edges if edge not in touching]
    store.comments[:] = [entry for entry in store.comments if entry["issue_id"] != id_]
    store.save()
    call.answers.tell({"deleted": id_, "dependencies_removed": len(touching), "references_updated": 0}, "Deleted")


def promote(call: Call) -> None:
    id_ = call.id_of(call.arguments[0])
    call.store.issues[id_]["ephemeral"] = False
    call.changed(id_, "update")
    call.answers.tell(call.shown(id_), f"Promoted {id_}")
