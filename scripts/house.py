"""Check the rules of names, words and weight that a program can check; [tool.house] of pyproject.toml has the data.

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
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bonobofs"
REPEATED = {"__init__", "__main__", "main"}
Texts = Iterator[tuple[Path, int, str]]
"""File, line and text."""


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


def docstrings(modules: list[Path]) -> Iterator[str]:
    """A module says in its first line what it does."""
    for module in modules:
        if module.stem not in REPEATED and not ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))):
            yield f"{shown(module)}:1: no docstring; begin with a sentence that says what the module does"


def names(modules: list[Path], forbidden: list[str]) -> Iterator[str]:
    """No public class name repeats in two modules, and each parameter has a name that says what it is."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules:
        tree = ast.parse(module.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{shown(module)}:{node.lineno}")
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and node.arg in forbidden:
                yield f"{shown(module)}:{node.lineno}: parameter {node.arg!r}; name the thing that it is"
    for name, same in places.items():
        if len(same) > 1:
            yield f"{', '.join(same)}: the class name {name} repeats; give each class a name of its own"


def test_files(tests: list[Path]) -> Iterator[str]:
    """A file of tests has a name of its own."""
    places: defaultdict[str, list[Path]] = defaultdict(list)
    for test in tests:
        places[test.name].append(test)
    for name, same in places.items():
        if len(same) > 1 and name.startswith("test_"):
            yield f"{', '.join(map(shown, same))}: the name repeats; name the subject of each"


def words(texts: Texts, forbidden: dict[str, str]) -> Iterator[str]:
    """Sentences use the field's words. Code in backticks and the fields of an f-string are no sentences."""
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, forbidden))})\b", re.IGNORECASE)
    for path, line, text in texts:
        for match in pattern.finditer(re.sub(r"`[^`]*`|\{[^{}]*\}", "", " ".join(text.split()))):
            word = match[0].lower()
            yield f"{shown(path)}:{line}: {word!r}; write {forbidden[word]}"


def texts_of_module(module: Path) -> Texts:
    """Comments, docstrings and messages."""
    for token in tokenize.generate_tokens(io.StringIO(module.read_text(encoding="utf-8")).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield module, token.start[0], token.string


def texts_of_test(test: Path) -> Texts:
    """Docstrings and the names of tests."""
    for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            line = getattr(node, "lineno", 1)
            yield test, line, ast.get_docstring(node) or ""
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield test, line, node.name.replace("_", " ")


def texts_of_page(page: Path) -> Texts:
    yield from ((page, number, line) for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def main() -> int:
    house: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["house"]
    modules, tests = sorted(PACKAGE.rglob("*.py")), sorted((ROOT / "tests").rglob("*.py"))
    pages = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")) if path.name != "CHANGELOG.md"]
    findings = [*module_names(modules, house["modules"]), *lengths(modules, house["lines"], house["readme"])]
    findings += [*docstrings(modules), *test_files(tests), *names(modules, house["parameters"])]
    texts = (map(texts_of_module, modules), map(texts_of_test, tests), map(texts_of_page, pages))
    findings += words(chain.from_iterable(chain(*texts)), house["words"])
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
