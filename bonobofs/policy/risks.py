"""The warnings of `policy check`: what a policy that can be enforced still leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bonobofs.policy.compiled import EVERYTHING, Policy, compile_policy, defined_roles, meet
from bonobofs.policy.decision import Denied
from bonobofs.policy.document import load
from bonobofs.policy.examples import create
from bonobofs.policy.pattern import parse
from bonobofs.policy.presets import preset_file
from bonobofs.policy.request import Principal
from bonobofs.policy.toml_positions import Place

_SHOWN: Final = 3
_RISKS: Final = {
    "runs-by-itself": "files that take effect when the project is only opened or pushed",
    "secrets": "files that hold secrets",
}
"""The refusing rules of the preset `project`. Their examples are the paths that are tried."""


def warnings(document: Mapping[str, Any]) -> list[tuple[Place, str]]:
    """Each warning with the key it is about. `document` is `PolicyDocument.model_dump(mode="json")`."""
    policy = compile_policy(document)
    return [*_open_keys(document), *_open_risks(policy, document), *_idle_roles(policy, document)]


def _open_keys(document: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    if document.get("default") == "allow":
        yield ("default",), "every path that no rule names may be changed"
    if document.get("symlinks") == "any":
        yield ("symlinks",), "symlinks may lead out of the workspace"
    if document.get("devices"):
        yield ("devices",), "device files may be made if the server runs as root"


def _open_risks(policy: Policy, document: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """One warning for each kind of file that some role may change and the preset `project` refuses."""
    project = load(preset_file("project")).model_dump(mode="json")
    rules = {rule["name"]: index for index, rule in enumerate(document.get("rule", ()))}
    hidden = False
    for name, kind in _RISKS.items():
        paths = next(rule["examples"]["deny"] for rule in project["rule"] if rule["name"] == name)
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
        place: Place = ("rule", rules[by]) if by in rules else ("default",)
        more = f" and {len(admitted) - _SHOWN} more" if len(admitted) > _SHOWN else ""
        shown = ", ".join([*admitted][:_SHOWN]) + more
        yield place, f'{kind} may be changed: {shown}; extends = "project" refuses them'
    if hidden and EVERYTHING in document.get("hidden", ()):
        yield ("hidden",), '"**" opens every hidden name, those that hold settings and secrets too'


def _idle_roles(policy: Policy, document: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """Roles in which nothing can be done, or whose `write` meets no rule."""
    for name, role in defined_roles(document).items():
        write = [parse(text) for text in role.get("write", ())]
        if not any(role.get(key) for key in ("write", "tools", "git", "beads")):
            yield ("role", name), "this role may do nothing but read in a mount"
        elif write and policy.default is None and not any(meet(offer.patterns, write) for offer in policy.offers):
            yield ("role", name, "write"), "no rule admits a change of these paths, so the role writes nowhere"
