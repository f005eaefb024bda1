"""`extends` adds to lists, `replace` replaces them, and an invalid use is refused with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bonobofs.errors import PolicyError
from bonobofs.policy import examples
from bonobofs.policy.document import load, parse
from bonobofs.policy.examples import warnings
from bonobofs.policy.presets import preset_file

AIDLC = load(preset_file("aidlc")).model_dump(mode="json")


def plain(text: str) -> dict[str, Any]:
    return parse(text, "p.toml").model_dump(mode="json")


def names(document: dict[str, Any]) -> list[str]:
    return [rule["name"] for rule in document["rule"]]


def test_a_policy_that_only_extends_is_its_preset_without_examples() -> None:
    made = plain('extends = "aidlc"')
    assert examples.count(made) == 0
    without = {**AIDLC, "examples": made["examples"]}
    without["rule"] = [{**rule, "examples": made["examples"]} for rule in AIDLC["rule"]]
    without["role"] = {name: {**role, "examples": made["examples"]} for name, role in AIDLC["role"].items()}
    assert made == without


def test_scalars_override_and_lists_are_added() -> None:
    made = plain(
        'extends = "aidlc"\ndefault = "allow"\nhidden = [".github"]\n'
        '[[rule]]\nname = "more"\npaths = ["src/"]\n[role.extra]\nwrite = ["src/"]\n'
        '[git]\nbranch_prefix = "x/"\nprotected_branches = ["release/*"]\n'
    )
    assert (made["default"], made["hidden"]) == ("allow", [".github"])
    assert names(made) == ["artifacts", "code", "more"]
    assert {*AIDLC["role"], "extra"} == {*made["role"]}
    assert made["git"]["branch_prefix"] == "x/"
    assert made["git"]["protected_branches"] == ["main", "master", "develop", "release/*"]
    assert made["scratch"] == AIDLC["scratch"]


def test_a_list_in_replace_is_dropped_first() -> None:
    made = plain(
        'extends = "aidlc"\nreplace = ["temporary", "keep", "rule.code", "role.worker", "git.protected_branches"]\n'
        'temporary = ["**/*.part"]\n[[rule]]\nname = "code"\npaths = ["src/"]\n'
        '[role.worker]\nwrite = ["src/"]\n[git]\nprotected_branches = ["trunk"]\n'
    )
    assert (made["temporary"], made["keep"]) == (["**/*.part"], [])
    assert [(rule["name"], rule["paths"]) for rule in made["rule"]] == [
        ("artifacts", ["aidlc-docs/", "templates/"]),
        ("code", ["src/"]),
    ]
    assert (made["role"]["worker"]["write"], made["role"]["worker"]["git"]) == (["src/"], [])
    assert made["git"]["protected_branches"] == ["trunk"]
    assert names(plain('extends = "aidlc"\nreplace = ["rule"]')) == []


@pytest.mark.parametrize(
    ("text", "place", "word"),
    [
        ('\nextends = "projct"', "p.toml:2: extends: ", "'project'"),
        ("extends = 3", "p.toml:1: extends: ", "'project'"),
        ('extends = "./base.toml"', "p.toml:1: extends: ", "'project'"),
        ('replace = ["rule"]', "p.toml:1: replace: ", "nothing to replace"),
        (
            'extends = "aidlc"\nreplace = [\n  "rule",\n  "colour",\n]',
            "p.toml:4: replace[1]: ",
            "'colour' is not a list of a policy",
        ),
        ('extends = "aidlc"\nreplace = ["default"]', "p.toml:2: replace[0]: ", "'default' is not a list of a policy"),
        ('extends = "aidlc"\nreplace = ["rule.none"]', "p.toml:2: replace[0]: ", "artifacts, code"),
        ('extends = "aidlc"\nreplace = ["role.none"]', "p.toml:2: replace[0]: ", "no role"),
        ('extends = "aidlc"\nreplace = ["git.protected_branches"]', "p.toml:2: replace[0]: ", "no new list"),
        ('extends = "aidlc"\n[[rule]]\nname = "code"\npaths = ["a"]', "p.toml:3: rule[0].name: ", "rule.code"),
        ('extends = "aidlc"\n\n[role.worker]\nwrite = ["a"]', "p.toml:3: role.worker: ", "role.worker"),
        ('extends = "aidlc"\ndefault_role = "none"', "p.toml:2: default_role: ", "not defined"),
        ('[[rule]]\nname = "a"\npaths = ["a"]\nrefuse = ""', "p.toml:4: rule[0].refuse: ", "one printable sentence"),
        ('[[rule]]\nname = "a"\npaths = ["a"]\nmax_size = 1\nrefuse = "No."', "p.toml:4: rule[0].max_size: ", "remove"),
    ],
)
def test_an_invalid_inheritance_is_refused_with_its_place(text: str, place: str, word: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(text, "p.toml")
    assert str(caught.value).startswith(place)
    assert word in str(caught.value)


def test_a_preset_cannot_extend_itself(tmp_path: Path) -> None:
    file = preset_file("docs")
    link = tmp_path / "p.toml"
    link.symlink_to(file)
    with pytest.raises(PolicyError, match="cannot extend itself"):
        parse('extends = "docs"', str(link))


def test_a_role_of_the_preset_may_be_the_default_role() -> None:
    assert plain('extends = "aidlc"\ndefault_role = "worker"')["default_role"] == "worker"
    with pytest.raises(PolicyError, match="not defined"):
        plain('extends = "aidlc"\nreplace = ["role"]\ndefault_role = "worker"')


def test_every_mistake_is_listed_in_the_order_of_the_file() -> None:
    text = 'colour = 1\n[[rule]]\nname = "a"\npaths = ["/x"]\n[[rule]]\nname = "a"\npaths = ["b"]\nsuffixes = ["md"]\n'
    with pytest.raises(PolicyError) as caught:
        parse(text + "[role.r]\nwrit = []\n", "p.toml")
    lines = [problem.split(":")[1] for problem in caught.value.problems]
    assert lines == ["1", "4", "6", "8", "10"]
    assert str(caught.value).endswith("(and 4 more)")


def test_examples_of_roles_are_tried_in_their_role() -> None:
    document = plain(
        '[[rule]]\nname = "all"\npaths = ["**"]\n[role.docs]\nwrite = ["docs/"]\n'
        '[role.docs.examples]\nallow = ["docs/a", "src/a"]\ndeny = ["src/b", "docs/b"]\n[examples]\nallow = ["src/a"]\n'
    )
    assert examples.count(document) == 5
    first, second = examples.failures(document)
    assert first.startswith("role docs: src/a should be allowed")
    assert second.startswith("role docs: docs/b should be denied")


@pytest.mark.parametrize(
    ("text", "place", "word"),
    [
        ('default = "allow"', ("default",), "no rule names"),
        ('symlinks = "any"', ("symlinks",), "out of the workspace"),
        ("devices = true", ("devices",), "device files"),
        ('default = "allow"\nhidden = ["**"]', ("hidden",), "hidden name"),
        ('hidden = ["**"]\n[[rule]]\nname = "all"\npaths = ["**"]', ("rule", 0), ".github/workflows/ci.yml"),
        ('hidden = ["**"]\n[[rule]]\nname = "all"\npaths = ["**"]', ("rule", 0), ".env, "),
        ("[role.idle]", ("role", "idle"), "nothing but read"),
        ('[role.far]\nwrite = ["far/"]', ("role", "far", "write"), "writes nowhere"),
    ],
)
def test_an_open_policy_gives_warnings(text: str, place: tuple[str | int, ...], word: str) -> None:
    assert any(at == place and word in told for at, told in warnings(plain(text)))


def test_a_closed_policy_has_no_warning() -> None:
    assert warnings(plain('[[rule]]\nname = "docs"\npaths = ["docs/"]\nsuffixes = [".md"]')) == []
