"""docs/git.md lists the commands that the tests compare."""

from __future__ import annotations

import re
from typing import Final

from tests.git.stories import STORIES
from tests.support.world import ROOT

_PAGE: Final = (ROOT / "docs" / "git.md").read_text(encoding="utf-8")


def table() -> str:
    """The rows that the page must have: one for each story."""
    rows = [
        f"| {name} | {'refused: ' + story.refused if story.refused else 'same'} |" for name, story in STORIES.items()
    ]
    return "\n".join(["| command | in a mount |", "|---|---|", *rows])


def test_the_page_has_every_command() -> None:
    found = re.search(r"<!-- commands -->\n(.*?)\n?<!-- /commands -->", _PAGE, re.DOTALL)
    assert found is not None
    assert found[1] == table()
