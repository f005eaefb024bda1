"""Merge a policy with the preset that it extends (`extends`, `replace`), as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bonobofs.policy.compiled import DEFAULT_ROLE
from bonobofs.policy.toml_positions import KeyPath

_LISTS: Final = ("hidden", "temporary", "secrets", "protect", "keep", "ask", "scratch", "rule", "role")
_NAMED: Final = ("rule", "role")
"""Lists with elements that can be replaced one by one, as `rule.NAME`."""
_IN_TABLES: Final = (
    "git.protected_branches", "leases.who", "beads.types", "beads.label_prefixes", "agent_mail.to", "run.read",
    "run.env", "network.allow",
)  # fmt: skip


def merge(inherited: Mapping[str, Any], own: Mapping[str, Any], replace: Sequence[str]) -> dict[str, Any]:
    """Merge a file with its preset. Both are `model_dump(mode="json")`, `own` with the set keys only.

    A scalar of the file replaces that of the preset. A list of the file is appended to that of the preset, unless
    `replace` names the list. The examples of the preset are dropped, because they describe the preset.
    """
    rest = {key: value for key, value in inherited.items() if key != "examples"}
    rest["rule"] = [
        {key: value for key, value in rule.items() if key != "examples"}
        for rule in inherited["rule"]
        if f"rule.{rule['name']}" not in replace
    ]
    rest["role"] = {
        name: {key: value for key, value in role.items() if key != "examples"}
        for name, role in inherited["role"].items()
        if f"role.{name}" not in replace
    }
    for entry in replace:
        table, _, key = entry.partition(".")
        if entry in _LISTS:
            rest[entry] = {} if entry == "role" else []
        elif entry in _IN_TABLES and rest[table] is not None:
            rest[table] = {**rest[table], key: []}
    return {**rest, **{key: _extended(rest.get(key), value) for key, value in own.items()}}


def _extended(old: Any, new: Any) -> Any:
    if isinstance(old, list) and isinstance(new, list):
        return old + new
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{key: _extended(old.get(key), value) for key, value in new.items()}}
    return new


def problems(raw: Mapping[str, Any], inherited: Mapping[str, Any] | None) -> Iterator[tuple[KeyPath, str]]:
    """Yield the mistakes between several keys of a file, or between a file and its preset. `raw` is not validated."""
    base: Mapping[str, Any] = inherited or {"rule": [], "role": {}}
    listed = raw.get("replace", [])
    replace = [entry for entry in listed if isinstance(entry, str)] if isinstance(listed, list) else []
    if "replace" in raw and inherited is None:
        yield ("replace",), 'there is nothing to replace; add extends = "project" or another preset'
    elif inherited is not None:
        for index, entry in enumerate(replace):
            problem = _not_replaceable(entry, base, raw)
            if problem:
                yield ("replace", index), problem
    kept = [rule["name"] for rule in base["rule"] if not {"rule", f"rule.{rule['name']}"} & {*replace}]
    yield from _rule_names(_tables(raw.get("rule")), kept)
    own = raw.get("role")
    roles = list(own) if isinstance(own, Mapping) else []
    inherited_roles = [name for name in base["role"] if not {"role", f"role.{name}"} & {*replace}]
    for name in roles:
        if name in inherited_roles:
            yield ("role", name), f'the preset defines this role; add "role.{name}" to replace, or choose another name'
    leases = raw.get("leases")
    who = leases.get("who") if isinstance(leases, Mapping) else None
    for index, role in enumerate(who if isinstance(who, list) else ()):
        if isinstance(role, str) and role not in (DEFAULT_ROLE, *roles, *inherited_roles):
            yield ("leases", "who", index), f"the role {role!a} is not defined; add [role.NAME]"
    default = raw.get("default_role", base.get("default_role", DEFAULT_ROLE))
    if isinstance(default, str) and default not in (DEFAULT_ROLE, *roles, *inherited_roles):
        yield ("default_role",), f"the role {default!a} is not defined; add [role.NAME]"


def _not_replaceable(entry: str, base: Mapping[str, Any], raw: Mapping[str, Any]) -> str | None:
    table, _, name = entry.partition(".")
    if entry in _LISTS:
        return None
    if entry in _IN_TABLES:
        own = raw.get(table)
        return None if isinstance(own, Mapping) and name in own else f"the file gives no new list {entry}; add it"
    if table in _NAMED and name:
        names = [rule["name"] for rule in base["rule"]] if table == "rule" else [*base["role"]]
        return None if name in names else f"the preset has no {table} {name!a}; it has {', '.join(names) or 'none'}"
    return f"{entry!a} is not a list of a policy; write {', '.join([*_LISTS, 'rule.NAME', 'role.NAME', *_IN_TABLES])}"


def _rule_names(rules: Sequence[Any], kept: Sequence[str]) -> Iterator[tuple[KeyPath, str]]:
    names = [rule.get("name") if isinstance(rule, Mapping) else None for rule in rules]
    counted = Counter(name for name in names if isinstance(name, str))
    seen: set[str] = set()
    for index, name in enumerate(names):
        if not isinstance(name, str):
            continue
        if name in seen:
            problem = f"{name!a} names {counted[name]} rules; records could not tell which decided"
            yield ("rule", index, "name"), problem
        elif name in kept:
            problem = f'the preset has a rule of this name; add "rule.{name}" to replace, or choose another name'
            yield ("rule", index, "name"), problem
        seen.add(name)


def _tables(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
