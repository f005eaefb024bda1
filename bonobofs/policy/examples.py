"""Trying the examples that rules carry, for `policy test`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bonobofs.policy.decision import Decision, Denied
from bonobofs.policy.engine import Policy, compile_policy, decide_in_source
from bonobofs.policy.request import Context, Kind, Operation, Principal, Request, WorkspacePath

_SMALL_FILE: Final = Context(size=1, mode=0o644, head=b"a")


def failures(document: Mapping[str, Any]) -> list[str]:
    """One line for each example that the whole policy decides otherwise than expected; empty: all hold.

    `document` is `PolicyDocument.model_dump(mode="json")`. Examples of [role.NAME] are tried in that role, all others
    in the default role. An example is tried as the creation of a small plain file in the source, or of a directory if
    it ends in a slash. A path that would be kept apart counts as denied. PolicyError as from `compile_policy`.
    """
    policy = compile_policy(document)
    return [line for name, role, table in _tables(document) for line in _failures(policy, name, role, table)]


def count(document: Mapping[str, Any]) -> int:
    """The number of examples in the policy."""
    return sum(len(paths) for _, _, table in _tables(document) for paths in table.values())


def _tables(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The name that messages give to a table of examples, the role in which they are tried, and the table."""
    usual = document.get("default_role", "agent")
    yield "examples", usual, document.get("examples", {})
    for rule in document.get("rule", ()):
        yield f"rule {rule['name']}", usual, rule.get("examples", {})
    for name, role in document.get("role", {}).items():
        yield f"role {name}", name, role.get("examples", {})


def _failures(policy: Policy, name: str, role: str, table: Mapping[str, Any]) -> Iterator[str]:
    agent = Principal("example", "", role)
    for path in table.get("allow", ()):
        decision = create(policy, agent, path)
        if isinstance(decision, Denied):
            why = f"{decision.rule} refuses it: {decision.code}: {decision.reason}"
            yield f"{name}: {_shown(path)} should be allowed, but {why}"
    for path in table.get("deny", ()):
        decision = create(policy, agent, path)
        if not isinstance(decision, Denied):
            yield f"{name}: {_shown(path)} should be denied, but {decision.rule} admits it"


def create(policy: Policy, agent: Principal, path: str) -> Decision:
    """The decision on the creation of a small plain file in the source; of a directory, if the path ends in a slash."""
    if path.endswith("/"):
        return decide_in_source(policy, agent, Request(Operation.MKDIR, WorkspacePath(path[:-1]), Kind.DIRECTORY))
    return decide_in_source(policy, agent, Request(Operation.CREATE_FILE, WorkspacePath(path)), _SMALL_FILE)


def _shown(path: str) -> str:
    return path if path.isprintable() else ascii(path)[1:-1]
