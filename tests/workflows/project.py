"""The project that every workflow begins with: the same bytes, modes, links and times each time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LONG_AGO: Final = 1_600_000_000_000_000_000
"""In nanoseconds. What is older was dated by somebody; what a program writes now is younger."""

_FILES: Final = {
    "AGENTS.md": "# For agents\n",
    "README.md": "# A project\n",
    "Makefile": (
        "build/sum: build/sum.o build/main.o\n\t$(CC) -o $@ $^\n"
        "build/%.o: src/%.c src/sum.h\n\t@mkdir -p build\n\t$(CC) -c -o $@ $<\n"
        "clean:\n\trm -rf build\n.PHONY: clean\n"
    ),
    "aidlc-docs/design.md": "# Design\n\nThe sum of two numbers.\n",
    "aidlc-docs/plan.md": "one\ntwo\nthree\n",
    "aidlc-docs/units/unit-1/notes.md": "first\n",
    "aidlc-docs/units/unit-2/notes.md": "second\n",
    "orchestrator/sum.py": "def total(a, b):\n    return a + b\n",
    "src/main.c": '#include <stdio.h>\n#include "sum.h"\nint main(void) { printf("%d\\n", sum(1, 2)); return 0; }\n',
    "src/sum.c": '#include "sum.h"\nint sum(int a, int b) { return a + b; }\n',
    "src/sum.h": "int sum(int a, int b);\n",
    "src/data/words.txt": "apple\npear\n",
    "templates/plan.md": "# Plan\n",
    "tests/test_sum.py": (
        "from orchestrator.sum import total\n\n\ndef test_total():\n    assert total(1, 2) == 3\n\n\n"
        "def test_wrong():\n    assert total(1, 2) == 4\n"
    ),
}


def lay(root: Path) -> None:
    """Fill an empty directory."""
    for name, text in _FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "aidlc-docs" / "design.md").chmod(0o640)
    os.link(root / "aidlc-docs" / "units" / "unit-1" / "notes.md", root / "aidlc-docs" / "units" / "unit-1" / "same.md")
    (root / "aidlc-docs" / "latest.md").symlink_to("units/unit-2/notes.md")
    date(root)


def date(root: Path) -> None:
    """Give everything in `root` a time long ago, and each name one of its own."""
    for number, path in enumerate([*sorted(root.rglob("*"), reverse=True), root]):
        time = LONG_AGO - (1 + number) * 1_000_000_000 + 123_456_789
        os.utime(path, ns=(time, time), follow_symlinks=False)
