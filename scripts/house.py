"""Check the rules of names, words and weight that a program can check; [tool.house] of pyproject.toml has the numbers.

Prints a line for each finding, with its place and its remedy. Exit 1 if there is one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bonobofs"
REPEATED = {"__init__", "__main__", "main"}


def module_names(modules: list[Path], most: int) -> Iterator[str]:
    """A module has a name of its own that is no gerund."""
    places: defaultdict[str, list[Path]] = defaultdict(list)
    for module in modules:
        places[module.stem].append(module)
        if module.stem.endswith("ing"):
            yield f"{shown(module)}: the name is a gerund; name the thing, such as `reader` for `reading`"
    for name, same in places.items():
        if len(same) > 1 and name not in REPEATED:
            yield f"{', '.join(map(shown, same))}: the name repeats; give each module a name of its own"
    count = sum(len(same) for name, same in places.items() if name not in REPEATED)
    if count > most:
        yield f"bonobofs/: {count} modules, at most {most}; merge a module into the only one that uses it"


def lengths(modules: list[Path], budgets: dict[str, int], readme: int) -> Iterator[str]:
    """Each package keeps within its budget of lines, and the README within its own."""
    lines: defaultdict[str, int] = defaultdict(int)
    for module in modules:
        parts = module.relative_to(PACKAGE).parts
        lines[parts[0] if len(parts) > 1 else "."] += len(module.read_text(encoding="utf-8").splitlines())
    for name in sorted(lines.keys() | budgets.keys()):
        found, most = lines[name], budgets.get(name)
        if most is None:
            yield f"bonobofs/{name}: no budget of lines; add it to [tool.house.lines] in pyproject.toml"
        elif found > most:
            yield f"bonobofs/{name}: {found} lines, at most {most}; shorten it, or raise its budget in pyproject.toml"
    found = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    if found > readme:
        yield f"README.md: {found} lines, at most {readme}; move details to docs/"


def words(module: Path, forbidden: dict[str, str]) -> Iterator[str]:
    """Comments, docstrings and messages use the field's words; the module says in its first line what it does."""
    text = module.read_text(encoding="utf-8")
    if module.stem not in REPEATED and not ast.get_docstring(ast.parse(text)):
        yield f"{shown(module)}:1: no docstring; begin with a sentence that says what the module does"
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, forbidden))})\b", re.IGNORECASE)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for match in pattern.finditer(" ".join(token.string.split())):
                word = match[0].lower()
                yield f"{shown(module)}:{token.start[0]}: {word!r}; write {forbidden[word]}"


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def main() -> int:
    house: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["house"]
    modules = sorted(PACKAGE.rglob("*.py"))
    findings = [*module_names(modules, house["modules"]), *lengths(modules, house["lines"], house["readme"])]
    for module in modules:
        findings += words(module, house["words"])
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
