"""The examples of the documentation are executed and produce the shown output."""

from __future__ import annotations

import errno
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.cli.app import members
from bonobofs.cli.options import Group
from bonobofs.policy.decision import ERRNO
from bonobofs.system import mounts
from tests.docs.pages import PAGES, PageRun, blocks
from tests.support.beads_workspace import find_bd
from tests.support.world import ROOT


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.fixture
def page_run(tmp_path: Path) -> Iterator[PageRun]:
    """An empty home directory. What a page has mounted is unmounted after it."""
    place = tmp_path / "alice"
    place.mkdir()
    run = PageRun(place, find_bd())
    yield run
    for mount in mounts.bonobofs_mounts():
        if place in mount.mountpoint.parents:
            run.step(f"bonobofs umount {mount.mountpoint}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_have_the_shown_output(page: Path, page_run: PageRun) -> None:
    """The test runs each block of a page in order."""
    for block in blocks(page.read_text(encoding="utf-8")):
        difference = page_run.run(block)
        assert not difference, difference


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_has_a_target(page: Path) -> None:
    """Each relative link names a file of the repository and a heading of it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert not anchor or anchor in {_anchor(heading) for heading in headings}, target


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_command_is_listed() -> None:
    """The table of commands in docs/quickstart.md names each command."""
    text = _text("docs/quickstart.md")
    names = {
        f"{name} {below}".rstrip()
        for name, member in members().items()
        for below in (member.members if isinstance(member, Group) else ("",))
    }
    assert names
    assert {name for name in names if f"`{name}" not in text} == set()


def test_every_refusal_code_is_listed() -> None:
    """docs/agents.md has each code with its errno."""
    text = _text("docs/agents.md")
    for code, number in ERRNO.items():
        assert f"| `{code}` | {errno.errorcode[number]} |" in text


def test_the_example_entry_has_all_fields() -> None:
    """docs/audit.md shows an entry with all fields, and describes each."""
    text = _text("docs/audit.md")
    line = next(block.text for block in blocks(text) if block.language == "json")
    assert AuditEntry.from_line(line).to_json() == line.strip()
    assert {
        name for name in json.loads(line) if not re.search(f"^\\|.*`{name}`.*\\|.*\\|$", text, re.MULTILINE)
    } == set()


def test_the_architecture_page_names_existing_modules() -> None:
    """The layers on the page are those that import-linter checks."""
    text = _text("docs/architecture.md")
    named = set(re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", text + _text("CONTRIBUTING.md")))
    assert len(named) > 20
    assert {name for name in named if not any((ROOT / top / name).exists() for top in ("bonobofs", "."))} == set()
    contracts = tomllib.loads(_text("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert "```text\n" + "\n".join(layers) + "\n```" in text


def test_the_figures_of_the_readme_equal_those_of_the_page() -> None:
    """README.md shows some rows of docs/figures.md, without the columns of the floors."""
    found = re.search(r"<!-- figures -->\n(.*?)<!-- /figures -->", _text("README.md"), re.DOTALL)
    assert found is not None
    rows = found[1].splitlines()
    assert len(rows) == 2 + 6
    page = _text("docs/figures.md").splitlines()
    assert [row for row in rows if not any(line.startswith(row) for line in page)] == []


def test_the_glossary_has_at_most_thirty_terms_with_existing_types() -> None:
    """A term has one row, the rows are sorted, and each type that a row names is a class."""
    text = _text("docs/glossary.md")
    terms = re.findall(r"^\| \*\*(.*)\*\* \|", text, re.MULTILINE)
    assert terms == sorted(set(terms))
    assert len(terms) <= 30
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "bonobofs").rglob("*.py"))
    types = re.findall(r"Type `(\w+)`", text)
    assert types
    assert {name for name in types if not re.search(rf"^class {name}\b", code, re.MULTILINE)} == set()
