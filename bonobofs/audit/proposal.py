"""Propose the smallest change of a policy file that permits what the record shows as refused (`policy propose`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tomlkit

from bonobofs.audit.replay import Occurrences, TriedChange, judge
from bonobofs.policy.compiled import EVERYTHING, Policy, compile_policy
from bonobofs.policy.decision import Code, Denied
from bonobofs.policy.document import parse
from bonobofs.policy.request import Operation

_BY_RULE: Final = frozenset({Code.DEFAULT, Code.SUFFIX, Code.SIZE, Code.EXECUTABLE})
_FEW: Final = 3
"""More files of one directory and suffix than this are proposed as one pattern."""
_MOST_EXAMPLES: Final = 10
_UNKNOWN_SIZE: Final = 1_000_000
_NAME: Final = "proposed"


class Proposal(NamedTuple):
    """A changed policy file, and notes for the operator."""

    text: str
    """The file with the change."""
    difference: str
    """Unified diff from the old text; "" if nothing is proposed."""
    wider: list[str]
    """One sentence for each part that permits more than was tried."""
    left: list[tuple[TriedChange, Denied]]
    """Changes that the proposal does not permit, with the decision."""


def propose(text: str, name: str, changes: Mapping[TriedChange, Occurrences], *, is_new: bool = False) -> Proposal:
    """Return the proposal for the policy file `name` with the content `text`. PolicyError: the file is not valid.

    `is_new`: the file does not exist yet, so the difference has the whole text.
    """
    document, wider = tomlkit.parse(text), list[str]()
    _admit_hidden(document, name, changes, wider)
    refused = _refused(_compiled(document, name), changes)
    groups: dict[str, dict[TriedChange, Occurrences]] = {}
    for change, decision in refused:
        if decision.code in _BY_RULE:
            groups.setdefault(decision.path.rpartition("/")[0], {})[change] = changes[change]
    taken = {rule["name"] for rule in parse(tomlkit.dumps(document), name).model_dump()["rule"]}
    rules = document.setdefault("rule", tomlkit.aot()) if groups else None
    for directory, members in sorted(groups.items()):
        rule_name = next(each for each in _names() if each not in taken)
        taken.add(rule_name)
        assert rules is not None
        if rules:
            rules[-1].add(tomlkit.nl())
        rules.append(_rule(rule_name, directory, members, refused, wider))
    new = tomlkit.dumps(document)
    old, origin = ("", "/dev/null") if is_new else (text, f"a/{name}")
    lines = (each.splitlines(keepends=True) for each in (old, new))
    difference = "".join(difflib.unified_diff(next(lines), next(lines), origin, f"b/{name}")) if new != text else ""
    return Proposal(new, difference, wider, _refused(_compiled(document, name), changes))


def _compiled(document: tomlkit.TOMLDocument, name: str) -> Policy:
    plain = parse(tomlkit.dumps(document), name).model_dump(mode="json")
    return compile_policy({**plain, "observe": False, "ask": []})


def _refused(policy: Policy, changes: Mapping[TriedChange, Occurrences]) -> list[tuple[TriedChange, Denied]]:
    judged = ((change, judge(policy, change, seen)) for change, seen in changes.items())
    return [(change, decision) for change, decision in judged if isinstance(decision, Denied)]


def _admit_hidden(
    document: tomlkit.TOMLDocument, name: str, changes: Mapping[TriedChange, Occurrences], wider: list[str]
) -> None:
    """Add the hidden names that refuse a change to `hidden`."""
    policy = _compiled(document, name)
    entries = list[str]()
    for _, decision in _refused(policy, changes):
        if decision.code is not Code.HIDDEN:
            continue
        components = decision.path.split("/")
        for depth, component in enumerate(components, 1):
            entry = "/".join(_literal(each) for each in components[:depth])
            if component.startswith(".") and not policy.hidden.admits(components[:depth]) and entry not in entries:
                entries.append(entry)
                if depth == 1:
                    wider.append(f'hidden = ["{entry}"] admits this name in every directory')
    if entries:
        hidden = document.setdefault("hidden", tomlkit.array())
        for entry in entries:
            hidden.append(entry)


def _rule(
    name: str,
    directory: str,
    members: Mapping[TriedChange, Occurrences],
    refused: Iterable[tuple[TriedChange, Denied]],
    wider: list[str],
) -> Any:
    """Return the [[rule]] for the refused changes in one directory."""
    paths = sorted({decision.path for change, decision in refused if change in members})
    patterns = _patterns(directory, paths, wider)
    sizes = [seen.size for seen in members.values()]
    executable = [seen.is_executable for seen in members.values()]
    rule = tomlkit.table()
    rule["name"] = name
    rule["paths"] = patterns
    rule["max_size"] = max(sizes) if max(sizes) > 0 else _UNKNOWN_SIZE
    if max(sizes) <= 0:
        wider.append(f"rule {name}: the sizes are unknown; max_size = {_UNKNOWN_SIZE} is a guess")
    if not any(executable):
        rule["executable"] = False
    elif not all(executable):
        wider.append(f"rule {name} admits executable content at all its paths")
    directories = {change.path for change in members if change.operation is Operation.MKDIR}
    examples = [f"{path}/" if path in directories else path for path in paths[:_MOST_EXAMPLES]]
    rule["examples"] = {"allow": examples}
    return rule


def _patterns(directory: str, paths: Sequence[str], wider: list[str]) -> list[str]:
    """Return patterns for the paths: the paths themselves, or one pattern for many files of one suffix."""
    by_suffix: dict[str, list[str]] = {}
    for path in paths:
        stem, dot, suffix = path.rpartition("/")[2].rpartition(".")
        by_suffix.setdefault(f".{suffix}" if dot and stem else "", []).append(path)
    found = list[str]()
    for suffix, listed in by_suffix.items():
        if suffix and len(listed) > _FEW:
            pattern = "/".join(
                filter(None, (*(_literal(each) for each in directory.split("/")), f"*{_literal(suffix)}"))
            )
            found.append(pattern)
            wider.append(f"{pattern} admits all files of this suffix there; {len(listed)} were seen")
        else:
            found += ["/".join(_literal(each) for each in path.split("/")) for path in listed]
    return sorted(found)


def _literal(component: str) -> str:
    """Return the pattern that matches this name alone."""
    name = "".join(f"[{char}]" if char in "*?[" else "?" if char == "\\" else char for char in component)
    return "[*][*]" if component == EVERYTHING else name


def _names() -> Iterable[str]:
    yield _NAME
    number = 1
    while True:
        number += 1
        yield f"{_NAME}-{number}"
