"""Patterns match as documented, and a pattern that cannot be enforced is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.errors import PolicyError
from bonobofs.policy.compiled import parse_temporary
from bonobofs.policy.overlap import meets
from bonobofs.policy.pattern import Matcher, NameGlobs, Reach, compile_name, parse
from tests.policy import oracle
from tests.policy.random_policies import GLOBS, NAMES, STRANGE, TEMPORARY, patterns, plain_paths


def matches(text: str, path: str) -> bool:
    return bool(Matcher([(parse(text), True)]).find(path.split("/") if path else []))


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("docs/", ["docs", "docs/a", "docs/a/b"], ["", "docs2", "docs2/a", "a/docs", "doc"]),
        ("docs", ["docs"], ["", "docs/a", "a/docs", "docss"]),
        ("docs/**", ["docs/a", "docs/a/b"], ["", "docs", "a/docs/b"]),
        ("docs/**/", ["docs/a", "docs/a/b"], ["", "docs"]),
        ("docs/*", ["docs/a", "docs/.a"], ["docs", "docs/a/b"]),
        ("docs/*/", ["docs/a", "docs/a/b"], ["docs"]),
        ("docs/**/a", ["docs/a", "docs/b/a", "docs/b/c/a"], ["docs", "a", "docs/a/b"]),
        ("docs/**/a/**", ["docs/a/b", "docs/c/a/b/d"], ["docs/a", "docs/b/a"]),
        ("**/a", ["a", "b/a", "a/a"], ["", "a/b", "b"]),
        ("**/a/", ["a", "b/a", "a/b", "b/a/c"], ["", "b", "aa"]),
        ("**/*.md", ["x.md", "a/x.md", ".md"], ["x.mdx", "md", "x.md/a"]),
        ("**", ["", "a", "a/b"], []),
        ("**/", ["", "a", "a/b"], []),
        ("**/**", ["", "a", "a/b"], []),
        ("**/*", ["a", "a/b"], [""]),
        ("a/**/**", ["a/b", "a/b/c"], ["a"]),
        ("a/**/**/b", ["a/b", "a/c/b"], ["a", "b"]),
        ("[ab]?[!c]", ["axd", "bxd"], ["axc", "cxd", "ax"]),
        ("[^a]", ["b", "]", "^"], ["a"]),
        ("[]a]x[[]", ["]x[", "ax["], ["x"]),
        ("[a-c]*[*]", ["a*", "bxy*"], ["d*", "a"]),
        ("*a*b*", ["ab", "xaxbx", "aab"], ["ba", "a", "b"]),
        ("a?", ["aé", "a\udcff", "a\n"], ["a", "aaa"]),
        ("Docs", ["Docs"], ["docs"]),
        ("\u00e9", ["\u00e9"], ["e\u0301"]),
        ("a+(b).md", ["a+(b).md"], ["aab.md"]),
    ],
)
def test_a_pattern_matches(text: str, inside: list[str], outside: list[str]) -> None:
    assert [path for path in inside if not matches(text, path)] == []
    assert [path for path in outside if matches(text, path)] == []


@pytest.mark.parametrize(
    "text",
    [
        *("", "/", "/a", "//", "a//b", "a//", ".", "..", "./a", "../a", "a/..", "a/../b", "a/./b", "!a", "a\\b", "\\"),
        *("a**", "**a", "a**b", "a/**b/c", "***", "[", "a[b", "[]", "[!]", "[b-a]", "[[:alpha:]]", "a[/]b"),
        *("a\0", "a\nb", "\x7f", "\ud800", "a" * 256, "\u00e9" * 128, "/".join("a" * 257)),
    ],
)
def test_an_unenforceable_pattern_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        parse(text)


@given(st.text())
def test_any_text_is_a_pattern_or_refused(text: str) -> None:
    with contextlib.suppress(PolicyError):
        Matcher([(parse(text), True)]).find(text.split("/"))


@settings(max_examples=500)
@given(st.text("*?[]!a./~4913#n", max_size=9) | patterns, plain_paths)
def test_any_text_is_a_pattern_of_temporary_names_or_refused(text: str, path: str) -> None:
    """An accepted pattern matches no directory and none of the common names, and keeps its text."""
    try:
        pattern = parse_temporary(text)
    except PolicyError:
        return
    above = "".join(f"{part}/" for part in text.split("/")[:-1] if part != "**").translate(str.maketrans("*?", "xx"))
    for ordinary in ("notes", "notes.txt", ".notes", ".notes.txt", "Makefile"):
        assert not matches(text, above + ordinary)
    assert matches(text, path) == oracle.path_matches(text, path.split("/"))
    assert pattern.reach is Reach.ONLY


@settings(max_examples=300)
@given(st.lists(patterns, max_size=6), st.just("") | plain_paths)
def test_many_patterns_match_as_each_pattern_does(texts: list[str], path: str) -> None:
    parts = path.split("/") if path else []
    matcher = Matcher((parse(text), text) for text in texts)
    assert set(matcher.find(parts)) == {text for text in texts if oracle.path_matches(text, parts)}
    assert bool(matcher) == bool(texts)
    if parts:
        assert set(matcher.find_below(parts)) == {text for text in texts if oracle.names_above(text, parts)}


@settings(max_examples=300)
@given(patterns, patterns, st.just("") | plain_paths)
def test_patterns_that_match_one_path_may_overlap(one: str, other: str, path: str) -> None:
    assert meets(parse(one), parse(other)) == meets(parse(other), parse(one))
    assert meets(parse(one), parse(one))
    if matches(one, path) and matches(other, path):
        assert meets(parse(one), parse(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [("a/", "b/"), ("a", "a/**"), ("a/*.md", "a/x.py"), ("a/b/", "a/*.md"), ("a/**/c", "b/**/c"), ("*", "a/b")],
)
def test_patterns_that_share_no_path_do_not_overlap(one: str, other: str) -> None:
    assert not meets(parse(one), parse(other))


@given(st.sampled_from(NAMES), st.sampled_from(NAMES))
def test_literal_patterns_overlap_only_if_equal(one: str, other: str) -> None:
    assert meets(parse(one), parse(other)) == (one == other)


last_components = [text.rpartition("/")[2] for text in TEMPORARY]
globs = st.sampled_from([*GLOBS, *NAMES[:8], *last_components, "[é-ü]", "a[!b]", "*[^a]"])


@settings(max_examples=500)
@given(st.lists(globs, max_size=4), st.sampled_from(STRANGE) | st.text("ab.xms~19é", max_size=9))
def test_many_globs_match_a_name_as_each_glob_does(texts: list[str], name: str) -> None:
    assert NameGlobs(texts).match(name) == any(oracle.name_matches(text, name) for text in texts)


def test_match_time_is_bounded_for_deep_paths_and_long_names() -> None:
    """An agent chooses paths. No path may delay other requests."""
    deep = Matcher([(parse("/".join(["**/a"] * 40) + "/**/b"), True), (parse("**/*/**/a/**/?/**/c"), True)])
    assert deep.find(["a"] * 2000) == []
    assert deep.find(["a"] * 2000 + ["b"]) == [True]
    one_of_many = NameGlobs(["x", "*a" * 60 + "*[bc]"])
    assert not one_of_many.match("a" * 254 + "d")
    assert one_of_many.match("a" * 254 + "c")
    stars = compile_name("*a" * 60 + "*b")
    assert not stars("a" * 255)
    assert stars("a" * 254 + "b")
