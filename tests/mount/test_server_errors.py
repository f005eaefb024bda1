"""An unexpected error in a handler fails one request, is logged, and the mount serves on."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from tests.support.mount_fixtures import served
from tests.support.wait import until

FAILING = "tests.mount.failing_server"


def refusal(path: Path) -> int | None:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno
    return 0


def failures(complaints: Path) -> int:
    lines = [line for line in complaints.read_text().splitlines() if "LOOKUP failed" in line]
    counts = [re.search(r" (\d+) times more: ", line) for line in lines]
    return sum(int(count[1]) if count else 1 for count in counts)


def test_a_failing_handler_fails_its_request_only(source: Path, home: Path, tmp_path: Path) -> None:
    with served(FAILING, source=source, home=home, place=tmp_path) as mount:
        for _ in range(50):
            assert refusal(mount / "fail") == errno.EIO
        (mount / "after.md").write_text("serves on")
        said = (tmp_path / "stderr").read_text()
        failure = r"LOOKUP failed: ValueError\('an unexpected error'\) at .*failing_server\.py:\d+ _lookup\n"
        assert re.search(failure, said)
        until(
            lambda: "49 times more: LOOKUP failed" in (tmp_path / "stderr").read_text(), "the repetitions are counted"
        )
    assert (source / "after.md").read_text() == "serves on"
    assert (tmp_path / "stderr").read_text().count("LOOKUP failed") == 2


def test_a_failure_between_two_requests_is_logged(source: Path, home: Path, tmp_path: Path) -> None:
    with served(FAILING, source=source, home=home, place=tmp_path) as mount:
        assert not (mount / "fail-later").exists()
        said = tmp_path / "stderr"
        until(lambda: "what follows a request failed: LookupError" in said.read_text(), "the first is written down")
        until(lambda: "tidying up failed: LookupError" in said.read_text(), "the second is written down")
        (mount / "after.md").write_text("serves on")
    assert (source / "after.md").read_text() == "serves on"


def test_an_unwritable_diagnostic_log_does_not_end_the_mount(source: Path, home: Path, tmp_path: Path) -> None:
    with served(FAILING, "full", source=source, home=home, place=tmp_path) as mount:
        assert refusal(mount / "fail") == errno.EIO
        (mount / "after.md").write_text("serves on")
    assert (source / "after.md").read_text() == "serves on"
