"""Random policies, paths, requests and facts. Names are few, so that patterns and paths meet often."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

from bonobofs.errors import PolicyError
from bonobofs.policy import pattern
from bonobofs.policy.compiled import parse_hidden, parse_temporary
from bonobofs.policy.request import Context, Kind, Operation, Principal, Request, WorkspacePath
from bonobofs.policy.role_lists import FAMILIES, OF_A_GATE

NAMES = ["a", "b", "ab", "A", ".a", ".git", ".bonobofs", "x.md", "x.py", ".md", "x.md.py", "x.", "..md", "a..b.md", "é"]
NAMES += ["sedAb1", ".a.swp", "x.md~", "4913"]
STRANGE = [*NAMES, "\udcff", "a\nb", "[a]", "*", "", ".", "..", "\0", "\ud800", " a", "a" * 300]
TEMPORARY = ["**/sed???", "**/.*.sw[a-p]", "**/[!A-Z]*[~p]", "a/sed*", "**/a", "a/**/x.*", "**/[0-9]*[0-9]", "*/?b"]
OPERATIONS = [operation for operation in Operation if operation is not Operation.CONNECT]
"""All but connections, which have no path."""
CHANGES = [operation for operation in OPERATIONS if operation not in OF_A_GATE]
"""Operations that rules for paths speak of."""
GLOBS = ["*", "?", "a*", "*b", "*.md", "x.*", "[ab]", "[!a]*", "[a-x].py", ".*", ".?*", "*.*", "?b", "*a*b*", "[.]git"]


def mostly(common: st.SearchStrategy[Any], rare: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The rare one in one case of six. (`one_of` counts a strategy that it is given twice only once.)"""
    return st.integers(0, 5).flatmap(lambda number: rare if number == 5 else common)


def _parses(text: str) -> bool:
    try:
        pattern.parse(text)
    except PolicyError:
        return False
    return True


def _opens(text: str) -> bool:
    try:
        parse_hidden(text)
    except PolicyError:
        return False
    return True


def _is_held(text: str) -> bool:
    try:
        parse_temporary(text)
    except PolicyError:
        return False
    return True


components = st.one_of(st.sampled_from(NAMES), st.sampled_from(NAMES), st.sampled_from(GLOBS), st.just("**"))
patterns = st.builds(
    lambda parts, end: "/".join(parts) + end, st.lists(components, min_size=1, max_size=4), st.sampled_from(["", "/"])
).filter(_parses)
wide = st.one_of(patterns, patterns, st.sampled_from(["**", "**/*", "a/", "*/", "**/*.md", "**/*.py"]))
hidden = st.one_of(components.filter(lambda text: "." in text or "*" in text), patterns).filter(_opens)
temporary = st.lists(st.sampled_from(TEMPORARY) | patterns.filter(_is_held), max_size=4)
plain_paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=5).map("/".join)
strange_paths = st.lists(st.sampled_from(STRANGE), max_size=4).map("/".join)
paths = mostly(plain_paths, strange_paths | st.text())
sizes = st.integers(0, 8)
suffixes = st.sampled_from([".md", ".py", ".a", ".b"])

rules = st.fixed_dictionaries(
    {
        "paths": st.lists(wide, min_size=1, max_size=3),
        "suffixes": st.none() | st.lists(suffixes, min_size=1, max_size=2),
        "max_size": st.none() | sizes,
        "executable": st.booleans(),
    }
)
refusing = st.fixed_dictionaries(
    {
        "paths": st.lists(patterns, min_size=1, max_size=2),
        "suffixes": st.none(),
        "max_size": st.none(),
        "executable": st.just(True),
        "refuse": st.just("No."),
    }
)
path_tables = st.lists(st.fixed_dictionaries({"paths": st.lists(patterns, min_size=1, max_size=2)}), max_size=1)
scratch_tables = st.lists(
    st.fixed_dictionaries(
        {"paths": st.lists(patterns, min_size=1, max_size=2), "max_total": st.none() | st.integers(0, 20)}
    ),
    max_size=2,
)
write = mostly(st.just(["**"]), st.lists(wide, max_size=3))
roles = st.fixed_dictionaries(
    {
        "write": write,
        "deny": st.lists(patterns, max_size=2),
        **{family: st.lists(st.sampled_from(words), max_size=6) for family, words in FAMILIES.items()},
    }
)


def _named(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": f"rule{index}", **table} for index, table in enumerate(tables)]


documents = st.fixed_dictionaries(
    {
        "default": st.sampled_from(["deny", "allow"]),
        "default_role": st.just("agent"),
        "hidden": st.just(["**"]) | st.lists(hidden, max_size=3),
        "temporary": mostly(st.just([]), temporary) | temporary,
        "devices": st.booleans(),
        "symlinks": mostly(st.just("inside"), st.just("any")),
        "protect": path_tables,
        "keep": path_tables,
        "scratch": mostly(st.just([]), scratch_tables) | scratch_tables,
        "rule": st.lists(mostly(rules, refusing), max_size=4).map(_named),
        "role": st.dictionaries(st.sampled_from(["agent", "writer"]), roles, max_size=2),
    }
)
agents = st.sampled_from([*["agent"] * 6, *["writer"] * 3, "nobody"]).map(lambda role: Principal("alice", "1", role))


def _requests(operations: st.SearchStrategy[Operation]) -> st.SearchStrategy[Request]:
    return st.builds(
        lambda operation, path, kind: Request(operation, WorkspacePath(path), kind),
        operations,
        paths,
        st.sampled_from([*[Kind.FILE] * 6, *Kind]),
    )


changes = _requests(st.sampled_from(CHANGES))
requests = _requests(mostly(st.sampled_from(CHANGES), st.sampled_from(OPERATIONS)))
heads = st.sampled_from(
    [b"", b"text", b"#!/bin/s", b"\x7fELF", b"MZ", b"\xca\xfe\xba\xbe", b"\0asm", b"#", b"\xfe\xed"]
)
targets = mostly(
    st.none(),
    st.sampled_from(["/etc/passwd", "", "..", "../..", "a/../b", "./a", "../.git/config", ".bonobofs/x"])
    | st.lists(st.sampled_from([*NAMES, "..", ".", "", "\0"]), max_size=4).map("/".join),
)
context = st.builds(
    Context,
    size=st.integers(-1, 12),
    size_before=st.integers(0, 12),
    mode=st.sampled_from([-1, 0o644, 0o600, 0o755, 0o2, 0o1, 0o7666]),
    head=heads,
    target=targets,
    leaves=st.sampled_from([False, False, False, True]),
    in_source=st.booleans(),
    staged=st.booleans(),
    carried=st.booleans(),
    foreign_names=st.sampled_from([0, 0, 0, 1]),
    privileged=st.booleans(),
    tool=st.sampled_from([False, False, False, True]),
)


tracked = st.lists(
    st.builds(lambda path, end: path + end, plain_paths, st.sampled_from(["", "", "/"])), min_size=1, max_size=4
)


def one_line(text: str) -> bool:
    return re.search(r"[\r\n\x00-\x1f\x7f]", text) is None
