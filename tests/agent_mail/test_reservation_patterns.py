"""A lease covers at least the paths of the reservation that it mirrors."""

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
def test_a_star_matches_slashes_and_a_directory_its_content(
    tmp_path: Path, reserved: str, patterns: tuple[str, ...]
) -> None:
    """Agent Mail matches patterns this way."""
    (tmp_path / "docs").mkdir()
    assert lease_patterns(reserved, "/project", tmp_path) == patterns
    assert lease_patterns(f"{tmp_path}/src/x.py", "/project", tmp_path) == ("src/x.py",)


@pytest.mark.parametrize("reserved", ["a/../b", "", "/elsewhere/x", "a\0b"])
def test_an_invalid_pattern_is_refused(tmp_path: Path, reserved: str) -> None:
    """It is reported then, and no lease is made."""
    with pytest.raises(PolicyError):
        lease_patterns(reserved, "/project", tmp_path)


@given(
    reserved=st.text("ab*/", min_size=1, max_size=8), path=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1)
)
def test_every_reserved_path_is_covered_by_the_lease(reserved: str, path: list[str]) -> None:
    """This holds for every reservation that has a lease."""
    try:
        patterns = lease_patterns(reserved, "/project", Path("/nowhere"))
    except PolicyError:
        return
    if fnmatch.fnmatchcase("/".join(path), reserved):
        assert list(Matcher((parse(pattern), pattern) for pattern in patterns).find(tuple(path)))
