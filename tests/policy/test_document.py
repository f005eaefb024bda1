"""A policy file either loads or is refused with one line that names place and reason."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.errors import PolicyError
from bonobofs.git.branch_rules import BranchRules, rules_of
from bonobofs.policy.document import PolicyDocument, load, parse
from bonobofs.policy.engine import compile_policy
from bonobofs.policy.presets import packaged_default
from bonobofs.policy.role_lists import FAMILIES, Conventions, conventions
from bonobofs.policy.toml_positions import KeyPath, positions
from tests.policy.random_policies import documents, one_line

DEFAULT = packaged_default().read_text(encoding="utf-8")
RULE = '[[rule]]\nname = "one"\npaths = ["a/"]\n'


def refusal(text: str) -> str:
    with pytest.raises(PolicyError) as caught:
        parse(text, "p.toml")
    message = str(caught.value)
    assert one_line(message)
    return message


@pytest.mark.parametrize(
    ("text", "place", "word"),
    [
        ("colour = 1", "p.toml:1: colour: ", "unknown key"),
        ("\n\ndefualt = 'deny'", "p.toml:3: defualt: ", "unknown key"),
        ("default = 'maybe'", "p.toml:1: default: ", "'deny' or 'allow'"),
        ("devices = 'yes'", "p.toml:1: devices: ", "boolean"),
        ("hidden = '.a'", "p.toml:1: hidden: ", "list"),
        ("hidden = [\n  '.a',\n  'a',\n]", "p.toml:3: hidden[1]: ", "no hidden name"),
        ("default_role = 'lead'", "p.toml:1: default_role: ", "not defined"),
        (RULE + "sufixes = ['.md']", "p.toml:4: rule[0].sufixes: ", "unknown key"),
        (RULE + "\n" + RULE, "p.toml:6: rule[1].name: ", "names 2 rules"),
        (RULE.replace("one", "default"), "p.toml:2: rule[0].name: ", "choose another"),
        (RULE.replace("one", "a:b"), "p.toml:2: rule[0].name: ", "colon"),
        ("[[rule]]\npaths = ['a']", "p.toml:1: rule[0].name: ", "missing"),
        ("[[rule]]\nname = 'one'", "p.toml:1: rule[0].paths: ", "missing"),
        (RULE.replace('["a/"]', "[]"), "p.toml:3: rule[0].paths: ", "at least 1"),
        (RULE.replace("a/", "a**b"), "p.toml:3: rule[0].paths[0]: ", "whole components"),
        (RULE.replace('["a/"]', '["a/",\n"b",\n"/c"]'), "p.toml:5: rule[0].paths[2]: ", "without a slash"),
        (RULE + "max_size = '1 parsec'", "p.toml:4: rule[0].max_size: ", "parsec"),
        (RULE + "max_size = '1.5.2MB'", "p.toml:4: rule[0].max_size: ", "a size is"),
        (RULE + "max_size = -1", "p.toml:4: rule[0].max_size: ", "a size is"),
        (RULE + "max_size = true", "p.toml:4: rule[0].max_size: ", "a size is"),
        (RULE + "max_size = 1.5", "p.toml:4: rule[0].max_size: ", "a size is"),
        (RULE + "max_size = '99999999999999TB'", "p.toml:4: rule[0].max_size: ", "that large"),
        (RULE + "executable = 0", "p.toml:4: rule[0].executable: ", "boolean"),
        (RULE + "suffixes = ['md']", "p.toml:4: rule[0].suffixes[0]: ", "last extension"),
        (RULE + "suffixes = ['.tar.gz']", "p.toml:4: rule[0].suffixes[0]: ", "last extension"),
        (RULE + "suffixes = ['.']", "p.toml:4: rule[0].suffixes[0]: ", "last extension"),
        (RULE + "suffixes = []", "p.toml:4: rule[0].suffixes: ", "at least 1"),
        (RULE + "examples = {alow = ['a']}", "p.toml:4: rule[0].examples.alow: ", "unknown key"),
        (RULE + "examples = {allow = ['']}", "p.toml:4: rule[0].examples.allow[0]: ", "from the workspace's root"),
        ("temporary = '**/*.tmp'", "p.toml:1: temporary: ", "list"),
        ("temporary = [\n  '**/*.tmp',\n  '*',\n]", "p.toml:3: temporary[1]: ", "would stage notes"),
        ("temporary = ['**/*.txt']", "p.toml:1: temporary[0]: ", "would stage notes.txt"),
        ("temporary = ['a/.*.*']", "p.toml:1: temporary[0]: ", "would stage .notes.txt"),
        ("temporary = ['**/????????']", "p.toml:1: temporary[0]: ", "would stage Makefile"),
        ("temporary = ['tmp/']", "p.toml:1: temporary[0]: ", "every path below"),
        ("temporary = ['**']", "p.toml:1: temporary[0]: ", "every path below"),
        ("temporary = ['**/*~']", "p.toml:1: temporary[0]: ", "never staged"),
        ("temporary = ['4913']", "p.toml:1: temporary[0]: ", "never staged"),
        ("temporary = ['/a']", "p.toml:1: temporary[0]: ", "without a slash"),
        ("scratch = ['a']", "p.toml:1: scratch[0]: ", "dictionary"),
        ("[[scratch]]\nmax_total = '1GB'", "p.toml:1: scratch[0].paths: ", "missing"),
        ("[[scratch]]\npaths = []", "p.toml:2: scratch[0].paths: ", "at least 1"),
        ("[[scratch]]\npaths = ['a', '../b']", "p.toml:2: scratch[0].paths[1]: ", "matches nothing"),
        ("[[scratch]]\npaths = ['a']\nmax_total = 'much'", "p.toml:3: scratch[0].max_total: ", "a size is"),
        ("[[scratch]]\npaths = ['a']\nmax_size = 1", "p.toml:3: scratch[0].max_size: ", "unknown key"),
        (RULE.replace("one", "temporary"), "p.toml:2: rule[0].name: ", "choose another"),
        ("[[protect]]\npaths = ['..']", "p.toml:2: protect[0].paths[0]: ", "matches nothing"),
        ("[[keep]]\npath = ['a']\npaths = ['a']", "p.toml:2: keep[0].path: ", "unknown key"),
        ("[protect]\npaths = ['a']", "p.toml:1: protect: ", "list"),
        ("[role.a]\nwrite = ['a']\n\n[role.b]\ndeny = ['!a']", "p.toml:5: role.b.deny[0]: ", "no ! patterns"),
        ("[role.a]\nread = ['a']", "p.toml:2: role.a.read: ", "unknown key"),
        ("[role.'a b:c']\nwrite = []", "p.toml:1: role.'a b:c': ", "colon"),
        ("[role]\na = 1", "p.toml:2: role.a: ", "valid dictionary"),
        ("rule = [{name = 'one', paths = ['a//b']}]", "p.toml:1: rule[0].paths[0]: ", "empty component"),
        ("colour = 1\nhidden = 2\n", "p.toml:1: colour: ", "(and 1 more)"),
        ("default = ", "p.toml:1: ", "not TOML"),
        ("\ndefault = 'deny'\ndefault = 'deny'", "p.toml:3: ", "not TOML"),
        ("\n\nhidden = [", "p.toml:3: ", "not TOML"),
        ("x = 99" + "9" * 5000, "p.toml:1: ", "not TOML"),
        ("x = " + "[" * 10000, "p.toml:1: ", "deeply"),
        ("x = " + "[" * 300 + "]" * 300, "p.toml:1: x: ", "unknown key"),
    ],
)
def test_a_mistake_is_reported_with_file_line_and_key(text: str, place: str, word: str) -> None:
    message = refusal(text)
    assert message.startswith(place)
    assert word in message


@pytest.mark.parametrize(
    ("key", "word"), [("tools", "write"), ("git", "pushes"), ("git", "worktree"), ("beads", "delete"), ("tools", "")]
)
def test_an_unknown_gate_word_is_refused_with_its_line_and_the_known_words(key: str, word: str) -> None:
    message = refusal(f"[role.lead]\n{key} = [\n  '{FAMILIES[key][0]}',\n  '{word}',\n]")
    assert message.startswith(f"p.toml:4: role.lead.{key}[1]: {word!r} is no word for {key}: ")
    assert message.endswith(", ".join(FAMILIES[key]))


@pytest.mark.parametrize(
    ("text", "place", "word"),
    [
        ("colour = 'x'", "p.toml:2: beads.colour: ", "unknown key"),
        ("types = []", "p.toml:2: beads.types: ", "at least 1"),
        ("types = ['task', 'TASK']", "p.toml:2: beads.types[1]: ", "small letters"),
        ("label_prefixes = ['phase:']", "p.toml:2: beads.label_prefixes[0]: ", "small letters"),
        ("human = ' '", "p.toml:2: beads.human: ", "printable"),
    ],
)
def test_a_mistake_in_the_issue_rules_is_reported_with_its_place(text: str, place: str, word: str) -> None:
    message = refusal(f"[beads]\n{text}")
    assert message.startswith(place)
    assert word in message


def test_issue_conventions_have_defaults_that_a_policy_can_replace() -> None:
    """A policy without these keys has the seven types, the four prefixes and the human."""
    assert conventions({}) == conventions(parse("", "p.toml").model_dump(mode="json")) == Conventions()
    said = parse("[beads]\ntypes = ['spike']\nhuman = 'maria'", "p.toml").model_dump(mode="json")
    assert conventions(said) == Conventions(("spike",), ("phase", "unit", "stage", "type"), "maria")


def test_an_unreadable_file_is_a_one_line_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"default = 'deny'\nhidden = ['\xff']\n")
    newline = tmp_path / "a\nb.toml"
    newline.write_text("colour = 1")
    for path, word in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        (binary, ":2: "),
        (newline, "colour"),
    ):
        with pytest.raises(PolicyError) as caught:
            load(path)
        assert word in str(caught.value)
        assert one_line(str(caught.value))
    with pytest.raises(PolicyError):
        load(Path("a\0b"))


def test_a_policy_is_a_regular_file_of_limited_size_or_a_pipe(tmp_path: Path) -> None:
    """A device has no end, and opening a FIFO waits for its writer."""
    fifo, large = tmp_path / "fifo", tmp_path / "large.toml"
    os.mkfifo(fifo)
    large.write_text("# large\n" * 600_000)
    for path, word in ((Path("/dev/zero"), "regular file"), (fifo, "regular file"), (large, "4 MiB")):
        with pytest.raises(PolicyError, match=word) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}: the policy cannot be read: ")
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe, open(writing, "wb") as writer:
        writer.write(b'default = "allow"\n')
        writer.close()
        assert load(Path(f"/dev/fd/{pipe.fileno()}")).default == "allow"


def test_omitted_keys_have_their_documented_defaults() -> None:
    document = parse(RULE + "[role.reader]", "p.toml")
    assert document.default == "deny"
    assert document.default_role == "agent"
    assert not document.devices
    assert document.hidden == []
    assert document.protect == []
    assert document.keep == []
    assert document.rule[0].suffixes is None
    assert document.rule[0].max_size is None
    assert document.rule[0].executable
    assert document.role["reader"].write == []


@pytest.mark.parametrize(
    ("size", "expected"),
    [("'1MB'", 1_000_000), ("'500KB'", 500_000), ("'1MiB'", 1_048_576), ("'1.5 kb'", 1500), ("7", 7), ("'0'", 0)],
)
def test_sizes_are_decimal_unless_the_unit_is_binary(size: str, expected: int) -> None:
    assert parse(RULE + f"max_size = {size}", "p.toml").model_dump(mode="json")["rule"][0]["max_size"] == expected


@settings(max_examples=200, deadline=None)
@given(documents)
def test_a_document_is_equal_after_json(document: dict[str, Any]) -> None:
    """The server compiles the policy that the operator wrote."""
    roles = {"writer": {"write": []}, **document["role"]}
    made = PolicyDocument.model_validate({**document, "role": roles})
    sent = json.loads(json.dumps(made.model_dump(mode="json")))
    assert PolicyDocument.model_validate(sent) == made
    assert compile_policy(sent).digest == compile_policy(made.model_dump(mode="json")).digest


# Random text never does anything but load or be refused


def refused(text: str) -> str | None:
    """The message with which the text is refused, or None for one that loads and compiles."""
    try:
        document = parse(text, "p.toml")
    except PolicyError as error:
        return str(error)
    compile_policy(document.model_dump(mode="json"))
    return None


def loads_or_is_refused(text: str) -> None:
    message = refused(text)
    if message is not None:
        assert one_line(message)
        assert re.match(r"p\.toml:[1-9][0-9]*: ", message), message
        assert int(message.split(":")[1]) <= text.count("\n") + 1


PIECES = [
    *(
        "\n",
        "\n\n",
        " ",
        "\t",
        "\r\n",
        "# x\n",
        "=",
        " = ",
        ".",
        ",",
        "[",
        "]",
        "[[",
        "]]",
        "{",
        "}",
        '"',
        "'",
        '"""',
        "'''",
        "\\",
    ),
    *(
        "[[rule]]\n",
        "[role.a]\n",
        "[role]\n",
        "[[protect]]\n",
        "[[keep]]\n",
        "[[scratch]]\n",
        "[rule.examples]\n",
        "[[role]]\n",
        "[[ rule ]]\n",
    ),
    *(
        "name",
        "paths",
        "rule",
        "role",
        "default",
        "hidden",
        "max_size",
        "suffixes",
        "write",
        "deny",
        "allow",
        "scratch",
        "max_total",
        "temporary",
    ),
    *(
        '"a"',
        "'b/'",
        '"**"',
        '"a**"',
        '".md"',
        '"1MB"',
        "['a/']",
        "['a/',\n'b']",
        "{allow = ['a']}",
        '"""a\nb"""',
        '"\\u0000"',
    ),
    *(
        "1",
        "-1",
        "1.5",
        "true",
        "inf",
        "nan",
        "1979-05-27",
        "1979-05-27 07:32:00",
        "0x1f",
        "1e400",
        '"deny"',
        '"\\ud800"',
    ),
    *(
        "name = 'a'\n",
        "paths = ['a/']\n",
        "default = 'allow'\n",
        "devices = true\n",
        "hidden = ['.a']\n",
        "a.b.c = 1\n",
    ),
]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_random_toml_fragments_load_or_are_refused(text: str) -> None:
    loads_or_is_refused(text)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_random_text_loads_or_is_refused(text: str) -> None:
    loads_or_is_refused(text)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(DEFAULT)), st.integers(0, 40), st.sampled_from(["", *PIECES]))
def test_the_default_policy_with_a_random_edit_loads_or_is_refused(start: int, length: int, put: str) -> None:
    loads_or_is_refused(DEFAULT[:start] + put + DEFAULT[start + length :])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_load_or_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / f"policy-{os.getpid()}.toml"
    path.write_bytes(content)
    with contextlib.suppress(PolicyError):
        load(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = ["default", "default_role", "hidden", "devices", "protect", "keep", "rule", "role", "name", "paths", "suffixes"]


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), values, max_size=4),
    st.dictionaries(st.sampled_from(KEYS), values, max_size=4),
)
def test_known_keys_with_random_values_load_or_are_refused(top: dict[str, Any], rule: dict[str, Any]) -> None:
    loads_or_is_refused(toml({**top, "rule": [rule]}))


def toml(table: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(key)} = {inline(value)}\n" for key, value in table.items())


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)} = {inline(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",\n ".join(inline(inner) for inner in value) + "]"
    if isinstance(value, str):
        return quoted(value)
    return "''" if value is None else json.dumps(value)


def quoted(text: str) -> str:
    return '"' + "".join(f"\\U{ord(character):08x}" for character in text) + '"'


# Lines


def where_text(value: Any, place: KeyPath = ()) -> list[KeyPath]:
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [deeper for key, child in inner for deeper in [(*place, key), *where_text(child, (*place, key))]]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_every_key_and_element_of_a_valid_text_has_a_line(text: str) -> None:
    try:
        raw = tomllib.loads(text)
    except ValueError:
        return
    found = positions(text)
    assert [place for place in where_text(raw) if place not in found] == []
    assert set(found.values()) <= set(range(1, text.count("\n") + 2))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), values, max_size=5))
def test_every_key_and_element_of_random_values_has_a_line(table: dict[str, Any]) -> None:
    text = "".join(f"{quoted(key)} = {inline(value)}\n" for key, value in table.items())
    found = positions(text)
    assert [place for place in where_text(tomllib.loads(text)) if place not in found] == []


def test_a_key_named_line_has_a_position() -> None:
    text = '''\
l1 = "a # no comment"  # a comment with "quotes" and [brackets]
l2 = [ 1, 2,   # l9 = 1
  {l3 = 1, l3b = {"l3c" = 'x'}}, """
l4 = "inside"
""", {l5 = [
  [], {l6 = 1}]}]
l7.l7 . "l7b" = \'\'\'
\'\'\'
# [l9]
[l10.l10b]
l11 = 1979-05-27 07:32:00
[[l12]]
l13 = ""
[l12.l14]
l15 = """a"""""
[[l12]]
l17 = \'a\'
[[l12.l18]]
[[l12.l18]]
l20 = { l20b.l20c = 1 }
[ l21 . l21b ]
"l22" = "\\"\\\\"
'''
    found = positions(text)
    expected = [place for place in where_text(tomllib.loads(text)) if isinstance(place[-1], str)]
    assert {place: found[place] for place in expected} == {place: named_line(place) for place in expected}
    assert (found["l2", 1], found["l2", 2], found["l2", 3]) == (2, 3, 3)
    assert found["l12", 1] == 16
    assert found["l12", 1, "l18", 1] == 19


def named_line(place: KeyPath) -> int:
    return int(re.findall(r"\d+", str(place[-1]))[0])


def test_git_rules_are_read() -> None:
    """[git] has a default for each omitted key, and gives the rules that the git gate uses."""
    table = parse("[git]\n", "p.toml").git
    assert (table.branch_prefix, table.protected_branches) == ("aidlc/", ["main", "master", "develop"])
    assert (table.message_pattern, table.author_email, table.sign) == (None, None, None)
    rules = rules_of(parse("[git]\n", "p.toml").model_dump(mode="json"))
    assert rules == rules_of({}) == BranchRules()
    text = 'branch_prefix = "a/"\nprotected_branches = ["x", "y/*"]\nmessage_pattern = "^x"\nsign = "ssh:/k"\n'
    rules = rules_of(parse("[git]\n" + text, "p.toml").model_dump(mode="json"))
    assert rules == BranchRules("a/", ("x", "y/*"), re.compile("^x"), None, "ssh:/k")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('branch_prefix = "Aidlc/"', "branch_prefix"),
        ('branch_prefix = "aidlc"', "branch_prefix"),
        ('branch_prefix = "-/"', "branch_prefix"),
        ('protected_branches = [""]', "protected_branches[0]"),
        ('protected_branches = ["a b"]', "protected_branches[0]"),
        ('protected_branches = "main"', "protected_branches"),
        ('message_pattern = "("', "message_pattern"),
        ('author_email = "me"', "author_email"),
        ('author_email = "a>@b"', "author_email"),
        ('sign = "yes"', "sign"),
        ('sign = "ssh:"', "sign"),
        ('sign = "openpgp:--x"', "sign"),
        ("sign = true", "sign"),
        ("other = 1", "other"),
    ],
)
def test_git_rules_are_checked(line: str, key: str) -> None:
    """An invalid value of [git] is refused with its line and key."""
    assert refusal(f"[git]\n{line}").startswith(f"p.toml:2: git.{key}: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('keep = "90"', "audit.keep"),
        ('keep = "0d"', "audit.keep"),
        ("keep = 90", "audit.keep"),
        ('max_total = "much"', "audit.max_total"),
        ("max_total = -1", "audit.max_total"),
        ('until = "x"', "audit.until"),
    ],
)
def test_the_retention_of_the_trail_is_checked(line: str, said: str) -> None:
    good = parse('[audit]\nkeep = "8w"\nmax_total = "2GB"\n', "policy.toml").audit
    assert (good.keep, good.max_total) == ("8w", 2_000_000_000)
    assert (parse("", "policy.toml").audit.keep, parse("", "policy.toml").audit.max_total) == ("90d", 5_000_000_000)
    with pytest.raises(PolicyError, match=rf"policy.toml:2: {said}"):
        parse(f"[audit]\n{line}\n", "policy.toml")
