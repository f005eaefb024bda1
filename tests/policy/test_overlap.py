"""Two patterns overlap exactly if a path matches both."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.errors import PolicyError
from bonobofs.policy.overlap import meets, names_meet, patterns_meet
from bonobofs.policy.pattern import parse
from tests.policy import oracle

LETTERS = "ab."
NAMES = [
    name
    for length in range(1, 7)
    for name in map("".join, itertools.product(LETTERS, repeat=length))
    if name not in (".", "..")
]
"""All names of up to six of three letters: globs of up to three pieces that meet have such a name in common."""

pieces = st.sampled_from(["a", "b", ".", "*", "?", "[ab]", "[!a]", "[!ab]", "[.]", "[a-b.]", "[b-z]"])
globs = (
    st.lists(pieces, min_size=1, max_size=3)
    .map("".join)
    .filter(lambda text: text not in (".", "..") and "**" not in text)
)

COMPONENTS = ["a", "b", "*", "a*", "?", "[!a]", "**"]
PATHS = [list(parts) for depth in range(8) for parts in itertools.product(["a", "b", "ab"], repeat=depth)]
"""All paths of up to seven of three names."""
patterns = st.builds(
    lambda components, end: "/".join(components) + end,
    st.lists(st.sampled_from(COMPONENTS), min_size=1, max_size=3),
    st.sampled_from(["", "", "/", "/**"]),
)


@settings(max_examples=400, deadline=None)
@given(globs, globs)
def test_globs_overlap_exactly_if_a_name_matches_both(one: str, other: str) -> None:
    both = [name for name in NAMES if oracle.name_matches(one, name) and oracle.name_matches(other, name)]
    beyond = ("[b-z]" in one and "[b-z]" in other) or "[!ab]" in one or "[!ab]" in other
    if both or not beyond:
        assert names_meet(one, other) == bool(both)
    assert names_meet(one, other) == names_meet(other, one)


@settings(max_examples=400, deadline=None)
@given(patterns, patterns)
def test_patterns_overlap_exactly_if_a_path_matches_both(one: str, other: str) -> None:
    some = any(oracle.path_matches(one, parts) and oracle.path_matches(other, parts) for parts in PATHS)
    assert patterns_meet(one, other) == some
    assert patterns_meet(other, one) == some


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_two_patterns_made_from_one_path_overlap(data: st.DataObject) -> None:
    """There are no false negatives, for any characters."""
    name = st.text(
        st.characters(exclude_characters="/\0*?[]\\!", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=8
    )
    parts = data.draw(st.lists(name.filter(lambda text: text not in (".", "..")), min_size=1, max_size=5))
    one, other = (_blur(data, parts) for _ in range(2))
    try:
        first, second = parse(one), parse(other)
    except PolicyError:
        return
    assert meets(first, second), (one, other, parts)


def _blur(data: st.DataObject, parts: list[str]) -> str:
    """A pattern that matches the path."""
    blurred: list[str] = []
    for part in parts:
        how = data.draw(st.sampled_from(["as it is", "one character", "a class", "a star", "any", "depth"]))
        at = data.draw(st.integers(0, len(part) - 1))
        end = data.draw(st.integers(at, len(part)))
        after = {
            "as it is": part,
            "one character": part[:at] + "?" + part[at + 1 :],
            "a class": part[:at]
            + "["
            + ("-" + part[at] if part[at] == "-" else part[at] + "\u00fc")
            + "]"
            + part[at + 1 :],
            "a star": part[:at] + "*" + part[end:],
            "any": "*",
            "depth": "**",
        }[how]
        blurred.append(after)
    return "/".join(blurred) + data.draw(st.sampled_from(["", "/"]))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("*.md", "*.py", False),
        ("test_*", "*_test", True),
        ("a*b", "b*a", False),
        ("a?", "a??", False),
        ("[a-m]*", "[n-z]*", False),
        ("[!a-z]*", "[a-c]x", False),
        ("[.]", "[.]", False),
        ("?[.]", ".*", False),
        ("??[.]", ".*", True),
        ("[.]*", "?", False),
        ("docs/**", "**/*.md", True),
        ("docs/**", "docs", False),
        ("docs/", "docs", True),
        ("**", "x", True),
        ("**/a/**/b", "a/c/d/b", True),
        ("**/a", "b/**/c", False),
        ("src/*/test_*.py", "src/core/**", True),
        ("src/*.py", "src/core/**", False),
        ("[\U00010000-\U00010010]" * 32 + "?" * 128, "?" * 160, False),
        ("[\U00010000-\U00010010]" * 31 + "?" * 128, "?" * 159, True),
        ("\udcff*", "?\udcfe", True),
    ],
)
def test_examples_of_overlap(one: str, other: str, expected: bool) -> None:
    assert patterns_meet(one, other) is expected
    assert patterns_meet(other, one) is expected


def test_overlap_is_fast_for_every_pair_of_patterns() -> None:
    """A requester of a lease chooses the pattern, and other requesters wait meanwhile."""
    began = time.process_time()
    assert patterns_meet("/".join(["**/*a*"] * 128), "/".join(["**/*b*"] * 128))
    assert not patterns_meet("*a" * 60 + "b", "*a" * 60 + "c")
    assert not patterns_meet("/".join(["a"] * 256), "/".join(["a"] * 255))
    assert time.process_time() - began < 5
