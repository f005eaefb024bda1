"""Which commands there are, and what happens before and after each."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from . import changes, creation, dependencies, flags, queries, setup, workspace
from .answers import USAGE, Answers, Failed
from .call import Call


class Command(NamedTuple):
    """`writes`: --readonly refuses it. Many write and are not refused."""

    run: Callable[[Call], Any]
    flags: dict[str, str] = {}  # noqa: RUF012 - never changed
    writes: bool = False


def _elsewhere(call: Call) -> None:
    raise Failed("this world does not have that command")


def _unsupported(call: Call) -> None:
    raise Failed("not yet supported in embedded mode")


def _doctor(call: Call) -> None:
    print("doctor is not yet supported in embedded mode")


COMMANDS = {
    "create": Command(creation.create, creation.FLAGS, writes=True),
    "q": Command(creation.quick, creation.QUICK_FLAGS, writes=True),
    "update": Command(changes.update, changes.UPDATE_FLAGS, writes=True),
    "close": Command(changes.close, changes.CLOSE_FLAGS, writes=True),
    "done": Command(changes.close, changes.CLOSE_FLAGS, writes=True),
    "reopen": Command(changes.reopen, changes.REOPEN_FLAGS, writes=True),
    "delete": Command(changes.delete, {"force": "f:flag"}, writes=True),
    "assign": Command(changes.one_field("assignee"), writes=True),
    "priority": Command(changes.one_field("priority"), writes=True),
    "note": Command(changes.one_field("notes"), writes=True),
    "tag": Command(changes.tag, writes=True),
    "comment": Command(changes.comment, {"file": "text"}, writes=True),
    "comments": Command(queries.comments),
    "comments add": Command(changes.comment, {"file": "f:text"}, writes=True),
    "label": Command(changes.label, writes=True),
    "label list": Command(changes.label),
    "label list-all": Command(changes.label),
    "dep": Command(dependencies.dep, dependencies.FLAGS, writes=True),
    "dep add": Command(dependencies.dep, dependencies.ADD_FLAGS, writes=True),
    "dep remove": Command(dependencies.dep, writes=True),
    "dep list": Command(dependencies.dep, dependencies.LIST_FLAGS),
    "dep tree": Command(dependencies.dep, dependencies.TREE_FLAGS),
    "dep cycles": Command(dependencies.dep),
    "promote": Command(changes.promote, writes=True),
    "show": Command(queries.show, {"short": "flag", "refs": "flag", "long": "flag"}),
    "list": Command(queries.list_, queries.LIST_FLAGS),
    "ready": Command(queries.ready, queries.READY_FLAGS),
    "blocked": Command(queries.blocked),
    "children": Command(queries.children),
    "count": Command(queries.count, queries.COUNT_FLAGS),
    "search": Command(queries.search, queries.SEARCH_FLAGS),
    "status": Command(queries.status),
    "types": Command(queries.types),
    "statuses": Command(queries.statuses),
    "history": Command(queries.history),
    "info": Command(setup.info),
    "config": Command(setup.config),
    "import": Command(setup.import_),
    "export": Command(setup.export, {"output": "o:text", "all": "flag"}),
    "rename": Command(setup.rename),
    "hooks": Command(setup.hooks),
    "mail": Command(setup.mail),
    "doctor": Command(_doctor),
    "sql": Command(_unsupported),
    "admin": Command(_unsupported),
    **{
        name: Command(queries.nothing)
        for name in (
            "query", "state", "stale", "lint", "diff", "graph", "gate", "epic", "swarm", "recall", "memories",
            "context", "ping", "quickstart", "prime", "onboard", "find-duplicates", "vc", "dolt", "formula", "repo",
            "federation", "upgrade", "setup", "backup", "audit", "branch",
        )
    },
    **{
        name: Command(_elsewhere, writes=True)
        for name in (
            "link", "edit", "defer", "undefer", "duplicate", "supersede", "merge-slot", "mol", "set-state", "todo",
            "kv", "remember", "forget", "batch", "gc", "prune", "purge", "compact", "flatten", "migrate",
            "rename-prefix", "ship", "worktree", "create-form", "human", "epic close-eligible", "swarm create",
        )
    },
}  # fmt: skip
WITHOUT_WORKSPACE = frozenset({"init", "version", "where"})


def main(words: list[str]) -> int:
    """Run one command and give its exit status."""
    signal.signal(signal.SIGTERM, _canceled)
    sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr] # it is a stream of text
    answers = Answers(
        as_json="--json" in words or workspace.is_true(os.environ.get("BD_JSON", "")),
        envelope=workspace.is_true(os.environ.get("BD_JSON_ENVELOPE", "")),
    )
    try:
        return _run(words, answers)
    except Failed as failed:
        return answers.fail(failed)
    finally:
        sys.stdout.flush()


def _canceled(*_: object) -> None:
    raise Failed("context canceled")


def _run(words: list[str], answers: Answers) -> int:
    name, command, rest = _named(words)
    if name == "mail":  # whatever is said beside it is its delegate's, flags too
        positional: list[str] = ["mail", *(word for at, word in enumerate(rest) if at != rest.index("mail"))]
        given: dict[str, Any] = {}
    else:
        positional, given = flags.read(rest, {**command.flags, **(setup.INIT_FLAGS if name == "init" else {})})
    positional = positional[2 if name == "comments add" else 1 :]
    if "directory" in given:
        os.chdir(given["directory"])
    if name == "init":
        return setup.init(given)
    if name == "version":
        return setup.version(answers)
    found = workspace.find(given.get("db"))
    if found is not None:
        workspace.load_environment(found.path)
    if name == "where":
        return setup.where(answers, found)
    if "repo" in given:
        os.environ.pop("BEADS_DIR", None)
        os.chdir(given["repo"])
        found = workspace.find(None)
    if found is None:
        raise Failed("no beads database found\nHint: run 'bd init' to create one")
    return _call(command, positional, given, answers, found)


def _call(
    command: Command, positional: list[str], given: dict[str, Any], answers: Answers, found: workspace.Workspace
) -> int:
    answers.as_json = answers.as_json or workspace.is_true(workspace.setting("json", found.path))
    person = workspace.Person(given.get("actor", ""), found.path)
    workspace.check(found, person)
    readonly = given.get("readonly") or workspace.is_true(workspace.setting("readonly", found.path))
    if readonly and (command.writes or given.get("claim")):
        raise Failed("operation not allowed in read-only mode")
    return command.run(Call(positional, given, answers, found, person)) or 0


def _named(words: list[str]) -> tuple[str, Command, list[str]]:
    """The command that is meant. Its name may stand behind flags that hold for all commands."""
    rest = list(words)
    names: list[str] = []
    skip = False
    for word in rest:
        if skip:
            skip = False
        elif word.startswith("-"):
            kind = flags.GLOBAL.get(word[2:], "flag") if word.startswith("--") else "text" if word == "-C" else "flag"
            skip = kind.endswith("text")
        else:
            names.append(word)
            if len(names) == 2:
                break
    if not names:
        raise Failed(USAGE)
    for name in (" ".join(names[:2]), names[0]):
        if name in COMMANDS:
            return name, COMMANDS[name], rest
    if names[0] in WITHOUT_WORKSPACE:
        return names[0], Command(_elsewhere), rest
    raise Failed(f'unknown command "{names[0]}" for "bd"')
