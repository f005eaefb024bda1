"""show, list and what else only looks."""

from __future__ import annotations

from typing import Any

from . import fields
from .answers import Answers, Failed
from .call import Call
from .store import Issue

_WHICH = {"type": "t:text", "assignee": "a:text", "label": "l:list"}
LIST_FLAGS = {
    **_WHICH, "status": "s:text", "priority": "p:text", "limit": "n:text", "all": "flag", "include-infra": "flag",
    "include-gates": "flag", "id": "text", "title": "text", "long": "flag", "parent": "text",
}  # fmt: skip
READY_FLAGS = {
    **_WHICH, "sort": "s:text", "priority": "p:text", "limit": "n:text", "claim": "flag", "parent": "text",
    "unassigned": "u:flag",
}  # fmt: skip
COUNT_FLAGS = {**_WHICH, "status": "s:text", "priority": "p:text", "id": "text", "title": "text"}
SEARCH_FLAGS = {**_WHICH, "status": "s:text", "limit": "n:text", "long": "flag", "query": "text"}
LIMIT = 50


def show(call: Call) -> None:
    found, unknown = [], []
    for word in call.ids():
        id_ = call.store.resolve(word)
        if id_ is None:
            unknown.append(word)
            Answers.notice(f"Error fetching {word}: no issue found matching {word!r}")
        else:
            found.append(_whole(call, id_))
    if not found:
        raise Failed("no issues found matching the provided IDs", "stdout")
    call.answers.tell(found, "\n".join(f"{issue['id']}: {issue['title']} [{issue['status']}]" for issue in found))


def _whole(call: Call, id_: str) -> Issue:
    """An issue as show prints it: its dependencies are issues, and one of its parents is named."""
    ends = [(edge["depends_on_id"], edge["type"]) for edge in call.edges_of(id_)]
    dependencies = [{**call.shown(end), "dependency_type": kind} for end, kind in ends if end in call.store.issues]
    more: dict[str, Any] = {"dependencies": dependencies} if dependencies else {}
    for parent in call.store.parents(id_)[:1]:
        more["parent"] = parent
    return {**call.shown(id_), **more, **call.counts(id_)}


def list_(call: Call) -> None:
    status, kind = call.flags.get("status", "all"), call.flags.get("type")
    for word in () if status == "all" else status.split(","):
        fields.status(word, call.store, "stderr")
    if kind is not None:
        fields.issue_type(kind, "stderr")
    _tell_issues(call, [id_ for id_ in sorted(call.store.issues) if _is_wanted(call, call.store.issues[id_])])


def _is_wanted(call: Call, issue: Issue) -> bool:
    flags = call.flags
    status: str | None = flags.get("status")
    kind = flags.get("type")
    if status is None:
        # A status of one's own is as hidden as closed.
        has_status = bool(flags.get("all")) or issue["status"] in fields.STATUSES[:4] + fields.STATUSES[5:]
    else:
        has_status = status == "all" or issue["status"] in status.split(",")
    passes_away = bool(issue.get("ephemeral"))
    if kind is not None:
        named = fields.ALIASES.get(kind, kind)
        # Such a type is looked for among what passes away, and nowhere else.
        has_type = issue["issue_type"] == named and (passes_away or named not in fields.infra(call.store))
    elif issue["issue_type"] == "gate":
        has_type = bool(flags.get("include-gates"))
    else:
        is_infra = issue["issue_type"] in fields.infra(call.store)
        has_type = not (is_infra or passes_away) or bool(flags.get("include-infra"))
    is_theirs = flags.get("assignee", issue["assignee"]) == issue["assignee"]
    is_named = (
        issue["id"] in str(flags.get("id", issue["id"])).split(",")
        and flags.get("title", "").lower() in issue["title"].lower()
        and flags.get("priority", str(issue["priority"])).removeprefix("P") == str(issue["priority"])
        and ("parent" not in flags or flags["parent"] in call.store.parents(issue["id"]))
    )
    has_labels = all(label in issue["labels"] for label in flags.get("label", []))
    return has_status and has_type and is_theirs and is_named and has_labels


def _tell_issues(call: Call, ids: list[str]) -> None:
    limit = int(call.flags.get("limit", LIMIT))
    shown = call.counted(ids[:limit] if limit else ids)
    call.answers.tell(shown, "\n".join(f"{issue['id']} [{issue['status']}] {issue['title']}" for issue in shown))
    if limit and len(ids) > limit:
        Answers.notice(f"Showing {limit} of {len(ids)} issues; use --limit 0 for all")


def ready(call: Call) -> None:
    issues = call.store.issues
    waiting = _waiting(call)
    _tell_issues(
        call,
        [
            id_
            for id_ in sorted(issues)
            if issues[id_]["status"] == "open" and id_ not in waiting and _is_wanted(call, issues[id_])
        ],
    )


def _waiting(call: Call) -> dict[str, list[str]]:
    """What waits -> for what: for its blockers, or as a child for a parent that waits."""
    store = call.store
    found = {id_: store.blockers(id_) for id_ in sorted(store.issues) if not store.is_closed(id_)}
    found = {id_: ends for id_, ends in found.items() if ends}
    parents = list(found)
    while parents:
        parent = parents.pop()
        for child in store.children(parent):
            if child not in found and not store.is_closed(child):
                found[child] = [parent]
                parents.append(child)
    return found


def blocked(call: Call) -> None:
    rows = [
        {**call.shown(id_), "blocked_by_count": len(ends), "blocked_by": ends} for id_, ends in _waiting(call).items()
    ]
    call.answers.tell(rows, "\n".join(row["id"] for row in rows))


def children(call: Call) -> None:
    id_ = call.store.resolve(call.arguments[0])
    if id_ is None and not call.answers.as_json:
        raise Failed(f"error checking parent issue: not found: issue {call.arguments[0]}")
    found = call.counted(call.store.children(id_) if id_ else [])
    call.answers.tell(found, "\n".join(issue["id"] for issue in found))


def count(call: Call) -> None:
    number = sum(not issue.get("ephemeral") for issue in call.store.issues.values())
    call.answers.tell({"count": number}, str(number))


def search(call: Call) -> None:
    wanted = call.flags.get("query", " ".join(call.arguments)).lower()
    issues = call.store.issues.values()
    found = call.counted([issue["id"] for issue in issues if wanted in issue["title"].lower()])
    call.answers.tell(found, "\n".join(issue["id"] for issue in found))


def status(call: Call) -> None:
    number = len(call.store.issues)
    call.answers.tell({"summary": {"total_issues": number}}, f"{number} issues")


def types(call: Call) -> None:
    told = [{"name": name, "description": f"A {name}"} for name in fields.TOLD_TYPES]
    call.answers.tell({"core_types": told}, "\n".join(fields.TOLD_TYPES))


def statuses(call: Call) -> None:
    told = [{"name": name, "category": "", "icon": "", "description": ""} for name in fields.STATUSES]
    custom = [{"name": name} for name in call.store.custom_statuses()]
    call.answers.tell({"built_in_statuses": told, "custom_statuses": custom}, "\n".join(fields.STATUSES))


def history(call: Call) -> None:
    """Its keys are capitalised, and its committer is the user of the machine, not the actor."""
    issue = call.shown(call.id_of(call.arguments[0]))
    entry = {"CommitHash": "0" * 32, "Committer": "root", "CommitDate": issue["updated_at"], "Issue": issue}
    call.answers.tell([entry], issue["updated_at"])


def comments(call: Call) -> None:
    id_ = call.id_of(call.arguments[0], "stdout")
    found = [comment for comment in call.store.comments if comment["issue_id"] == id_]
    call.answers.tell(found, "\n".join(comment["text"] for comment in found) or f"No comments on {id_}")


def nothing(call: Call) -> None:
    """The many commands that look at what the world does not have."""
    call.answers.tell([], "")
