"""A lease covers no less than the reservation that it is made from."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bonobofs.daemon.reservation_mirror import lease_patterns
from bonobofs.errors import PolicyError
from bonobofs.policy.pattern import Matcher, parse


@pytest.mark.parametrize(
    ("reserved", "patterns"),
    [
        ("src/x.py", ("src/x.py",)),
        ("./src/x.py", ("src/x.py",)),
        ("docs", ("docs/",)),
        ("docs/", ("docs/",)),
        ("docs/*", ("docs/**",)),
        ("docs/**", ("docs/**",)),
        ("docs/*.md", ("docs/**/*.md",)),
        ("*.md", ("**/*.md",)),
        ("*", ("**",)),
        ("src/a*", ("src/a*", "src/a*/**")),
        ("a*b", ("a*b", "a*/**/*b")),
        ("/project/docs/*.md", ("docs/**/*.md",)),
        ("x/a*b*c*d*e*f*g/y*z", ("x/**",)),
    ],
)
def test_a_star_passes_over_slashes_and_a_directory_is_all_in_it(
    tmp_path: Path, reserved: str, patterns: tuple[str, ...]
) -> None:
    """As Agent Mail compares them."""
    (tmp_path / "docs").mkdir()
    assert lease_patterns(reserved, "/project", tmp_path) == patterns
    assert lease_patterns(f"{tmp_path}/src/x.py", "/project", tmp_path) == ("src/x.py",)


@pytest.mark.parametrize("reserved", ["a/../b", "", "/elsewhere/x", "a\0b"])
def test_what_can_be_no_pattern_is_refused(tmp_path: Path, reserved: str) -> None:
    """It is told then, and nobody is held to it."""
    with pytest.raises(PolicyError):
        lease_patterns(reserved, "/project", tmp_path)


@given(
    reserved=st.text("ab*/", min_size=1, max_size=8), path=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1)
)
def test_what_matches_there_is_covered_here(reserved: str, path: list[str]) -> None:
    """Whatever is reserved, the lease covers it where there is one."""
    try:
        patterns = lease_patterns(reserved, "/project", Path("/nowhere"))
    except PolicyError:
        return
    if fnmatch.fnmatchcase("/".join(path), reserved):
        assert list(Matcher((parse(pattern), pattern) for pattern in patterns).find(tuple(path)))
