"""The view of `.bonobofs` for each user of a mount with --allow-other."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.syscalls import opened
from tests.support.users import ANN, BEN, outcome, run_in_child
from tests.support.world import Mounted

pytestmark = pytest.mark.root
POLICY = '[[scratch]]\npaths = ["build/"]\n'


def _shown() -> tuple[str, list[str]]:
    with open(".bonobofs/scratch") as scratch, open(".bonobofs/denials.jsonl") as denials:
        return scratch.read(), [json.loads(line)["path"] for line in denials]


def test_no_user_sees_names_below_a_private_directory_of_another(mounted: Mounted) -> None:
    """Each user sees its own scratch files and denials, in any order of reads. The session's user sees all."""
    world = mounted(policy=POLICY, allow_other=True)
    world.source.chmod(0o777)
    (world.path / "build").mkdir()
    (world.path / "build").chmod(0o777)
    with opened(world.path, os.O_RDONLY | os.O_DIRECTORY) as top:

        def work(name: str) -> None:
            os.fchdir(top)
            os.mkdir(f"build/{name}", 0o700)
            with open(f"build/{name}/secret-of-{name}", "w") as file:
                file.write(name)
            outcome(os.mkdir, f"refused-{name}")

        def look() -> tuple[str, list[str]]:
            os.fchdir(top)
            return _shown()

        run_in_child(work, "ann", user=ANN)
        run_in_child(work, "ben", user=BEN)
        for _ in range(3):
            for user, own, other in ((ANN, "ann", "ben"), (BEN, "ben", "ann")):
                scratch, denials = run_in_child(look, user=user)
                assert f"build/{own}/secret-of-{own}\n" in scratch
                assert other not in scratch
                assert denials == [f"refused-{own}"]
            scratch, denials = run_in_child(look)
            assert "secret-of-ann" in scratch
            assert "secret-of-ben" in scratch
            assert denials == ["refused-ann", "refused-ben"]
