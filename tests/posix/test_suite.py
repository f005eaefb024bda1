"""The suite itself: it finds an unlisted difference, and a listed one that does not occur."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.posix import differences
from tests.posix.harness import ANY, Case, Differences, See, Seen, Sight, World, compare

CASE = Case("suite.example", lambda _: None, root=False)


def _compare(
    expected: object, bare: object, mount: object, listed: Differences | None = None, codes: tuple[str, ...] = ()
) -> list[str]:
    below = Seen([Sight("call", expected, bare)], "", [], [])
    above = Seen([Sight("call", expected, mount)], "", [], list(codes))
    return compare(CASE, World("mount", lambda _: above, lambda _: below, listed or {}))


def test_equal_outcomes_as_expected_are_right() -> None:
    assert _compare(1, 1, 1) == []
    assert _compare(ANY, "x", "x") == []


def test_an_outcome_that_is_not_expected_is_found_though_both_agree() -> None:
    assert _compare(1, 2, 2) == ["call: 2, not 1"]


def test_a_difference_is_found_though_anything_is_expected() -> None:
    assert _compare(ANY, "x", "y") == ["call: 'y', but on the bare directory 'x'"]


def test_a_listed_difference_is_right_and_must_be_the_one_that_is_listed() -> None:
    listed: Differences = {CASE.name: {"call": ("EACCES", "SUFFIX")}}
    assert _compare(None, None, "EACCES", listed, ("SUFFIX",)) == []
    assert _compare(None, None, None, listed, ("SUFFIX",)) == ["call: None, but 'EACCES' is listed (SUFFIX)"]
    assert _compare(None, None, "EPERM", listed, ("SUFFIX",)) == ["call: 'EPERM', but 'EACCES' is listed (SUFFIX)"]


def test_a_refusal_must_be_listed_and_have_happened() -> None:
    assert _compare(1, 1, 1, None, ("SUFFIX",)) == ["refused by ['SUFFIX'], listed are []"]
    listed: Differences = {CASE.name: {"call": ("EACCES", "SUFFIX")}}
    assert _compare(None, None, "EACCES", listed, ()) == ["refused by [], listed are ['SUFFIX']"]


def test_a_listed_sight_must_exist() -> None:
    listed: Differences = {CASE.name: {"another": (1, "a fact")}}
    assert _compare(1, 1, 1, listed) == ["listed as different, but not seen: another"]


def test_every_listed_case_exists() -> None:
    modules = [importlib.import_module(f"tests.posix.{path.stem}") for path in Path(__file__).parent.glob("test_*.py")]
    cases = {test.case.name for module in modules for test in vars(module).values() if hasattr(test, "case")}
    assert {*differences.KERNEL, *differences.PORTABLE, *differences.ORDINARY, *differences.GUARDED} <= cases


def test_two_sights_have_two_names() -> None:
    see = See(Path("/"), Path("/"))
    see("call", 1, lambda: 1)
    try:
        see("call", 1, lambda: 1)
    except ValueError as error:
        assert "two sights are called 'call'" in str(error)  # noqa: PT017 - pytest is not loaded where cases run
    else:
        raise AssertionError("a second sight of the same name was taken")
