"""Check a policy: try the examples of its rules (`policy test`), and warn about open risks (`policy check`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bonobofs.policy.compiled import DEFAULT_ROLE, EVERYTHING, Policy, compile_policy, defined_roles, meet
from bonobofs.policy.decision import Code, Decision, Denied
from bonobofs.policy.document import load
from bonobofs.policy.engine import decide_in_source
from bonobofs.policy.pattern import parse
from bonobofs.policy.presets import preset_file
from bonobofs.policy.request import Context, Kind, Operation, Principal, Request, WorkspacePath
from bonobofs.policy.toml_positions import KeyPath

_SMALL_FILE: Final = Context(size=1, mode=0o644, head=b"a")


def failures(document: Mapping[str, Any]) -> list[str]:
    """Return one line for each example for which the policy decides otherwise than the example states.

    `document` is `PolicyDocument.model_dump(mode="json")`. Examples of [role.NAME] are tried in that role, all others
    in the default role. An example is tried as the creation of a small plain file in the source, or of a directory if
    it ends in a slash. A path in another layer than the source counts as denied. PolicyError as from `compile_policy`.
    """
    policy = compile_policy(document)
    return [line for name, role, table in _tables(document) for line in _failures(policy, name, role, table)]


def count(document: Mapping[str, Any]) -> int:
    """Return the number of examples in the policy."""
    return sum(len(paths) for _, _, table in _tables(document) for paths in table.values())


def _tables(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Return each table of examples with its name in messages and the role that tries it."""
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
    """Decide the creation of a small plain file in the source, or of a directory if the path ends in a slash."""
    if path.endswith("/"):
        return decide_in_source(policy, agent, Request(Operation.MKDIR, WorkspacePath(path[:-1]), Kind.DIRECTORY))
    return decide_in_source(policy, agent, Request(Operation.CREATE_FILE, WorkspacePath(path)), _SMALL_FILE)


def _shown(path: str) -> str:
    return path if path.isprintable() else ascii(path)[1:-1]


_SHOWN: Final = 3
_RISKS: Final = {
    Code.ASK: "files that take effect when the project is only opened or pushed",
    Code.PROTECTED: "files that hold secrets",
}
"""By the code with which the preset `project` refuses them. `warnings` tries the paths of its examples."""


def warnings(document: Mapping[str, Any]) -> list[tuple[KeyPath, str]]:
    """Return each warning with its key. `document` is `PolicyDocument.model_dump(mode="json")`."""
    policy = compile_policy(document)
    return [*_open_keys(document), *_open_risks(policy, document), *_idle_roles(policy, document)]


def _open_keys(document: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    if document.get("default") == "allow":
        yield ("default",), "every path that no rule names may be changed"
    if document.get("observe"):
        yield ("observe",), "refused changes are made and recorded; remove it once the rules are complete"
    if document.get("symlinks") == "any":
        yield ("symlinks",), "symlinks may lead out of the workspace"
    if document.get("devices"):
        yield ("devices",), "device files may be made if the server runs as root"


def _open_risks(policy: Policy, document: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yield one warning for each kind of file that a role may change and that the preset `project` refuses."""
    project = load(preset_file("project")).model_dump(mode="json")
    denied = [path for rule in project["rule"] for path in rule["examples"]["deny"]]
    preset, agent = compile_policy(project), Principal("", "", DEFAULT_ROLE)
    codes = {path: getattr(create(preset, agent, path), "code", None) for path in denied}
    rules = {rule["name"]: index for index, rule in enumerate(document.get("rule", ()))}
    hidden = False
    for code, kind in _RISKS.items():
        paths = [path for path, found in codes.items() if found is code]
        admitted: dict[str, str] = {}
        for role in policy.roles:
            for path in paths:
                decision = create(policy, Principal("", "", role), path)
                if not isinstance(decision, Denied):
                    admitted.setdefault(path, decision.rule)
        if not admitted:
            continue
        hidden = hidden or any("/." in f"/{path}" for path in admitted)
        by = next(iter(admitted.values()))
        key_path: KeyPath = ("rule", rules[by]) if by in rules else ("default",)
        more = f" and {len(admitted) - _SHOWN} more" if len(admitted) > _SHOWN else ""
        shown = ", ".join([*admitted][:_SHOWN]) + more
        yield key_path, f'{kind} may be changed: {shown}; extends = "project" refuses them'
    if hidden and EVERYTHING in document.get("hidden", ()):
        yield ("hidden",), '"**" opens every hidden name, those that hold settings and secrets too'


def _idle_roles(policy: Policy, document: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yield a warning for each role that permits nothing, or whose `write` overlaps with no rule."""
    for name, role in defined_roles(document).items():
        write = [parse(text) for text in role.get("write", ())]
        if not any(role.get(key) for key in ("write", "tools", "git", "beads")):
            yield ("role", name), "this role may do nothing but read in a mount"
        elif write and policy.default is None and not any(meet(offer.patterns, write) for offer in policy.offers):
            yield ("role", name, "write"), "no rule admits a change of these paths, so the role writes nowhere"
