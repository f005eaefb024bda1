"""The texts that a policy produces: examples, the text for the agent, denial sentences."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.policy import denials, examples
from bonobofs.policy.decision import as_document
from bonobofs.policy.engine import allowed_directories, callable_words, compile_policy, decide, describe
from bonobofs.policy.request import Operation, Principal, Request, WorkspacePath
from tests.policy.random_policies import documents, one_line

DOCUMENT: dict[str, Any] = {
    "hidden": [".github"],
    "default_role": "writer",
    "protect": [{"paths": ["docs/frozen/"]}],
    "keep": [{"paths": ["docs/index.md"]}],
    "rule": [
        {"name": "docs", "paths": ["docs/", "docs/frozen/"], "suffixes": [".md", ".rst"], "max_size": 2048},
        {"name": "src", "paths": ["src/**/*.py"], "executable": False},
    ],
    "role": {
        "writer": {"write": ["docs/", "src/a/"], "deny": ["docs/private/"]},
        "reader": {"write": []},
        "clerk": {"write": ["notes/"]},
    },
}


def test_examples_are_checked_against_the_whole_policy_in_the_default_role() -> None:
    rules = [
        {
            **DOCUMENT["rule"][0],
            "examples": {
                "allow": ["docs/a.md", "docs/new/", "docs/private/a.md", "docs/a.py"],
                "deny": ["docs/frozen/a.md", "docs/.a.md", "docs/b.md", "docs/a\nb.rst", "docs/../x"],
            },
        }
    ]
    document = {**DOCUMENT, "rule": rules}
    assert examples.count(document) == 9
    assert examples.failures(document) == [
        "rule docs: docs/private/a.md should be allowed, but role:writer:docs/private/ refuses it: "
        "ROLE: The role writer may not change this path.",
        "rule docs: docs/a.py should be allowed, but docs refuses it: "
        "SUFFIX: Only .md or .rst files may be written here.",
        "rule docs: docs/b.md should be denied, but docs admits it",
        "rule docs: docs/a\\nb.rst should be denied, but docs admits it",
    ]


def test_an_example_says_what_reaches_the_source() -> None:
    """A scratch or staged file is allowed, and does not reach the source."""
    rule = {**DOCUMENT["rule"][0], "examples": {"allow": ["docs/a.md", "docs/a.tmp"], "deny": ["docs/b.tmp", "out/"]}}
    document = {**DOCUMENT, "rule": [rule], "temporary": ["**/*.tmp"], "scratch": [{"paths": ["out/"]}]}
    assert examples.failures(document) == [
        "rule docs: docs/a.tmp should be allowed, but temporary refuses it: "
        "DEFAULT: Temporary names are staged only inside a mount. None of them is written into the workspace."
    ]


def test_the_text_for_an_agent_names_scratch_and_staged_files() -> None:
    assert "in the session only" not in describe(compile_policy(DOCUMENT), "agent")
    scratch = [{"paths": ["out/", "**/.cache/"], "max_total": 5000}, {"paths": ["obj[0-9][0-9]/"]}]
    told = describe(compile_policy({**DOCUMENT, "scratch": scratch, "temporary": ["**/sed??", "docs/*.tmp"]}), "agent")
    for part in (
        "Scratch: `out/`, `**/.cache/`: anything, at most 5 KB together.",
        "Scratch: `obj[0-9]{2}/`: anything.",
        "`**/sed??`, `docs/*.tmp`",
        "end with the session",
        "`.bonobofs/scratch`",
    ):
        assert part in told
    only_scratch = describe(compile_policy({"scratch": scratch}), "agent")
    assert "Temporary names" not in only_scratch


def test_a_permit_for_another_layer_says_so() -> None:
    rule = {"name": "notes", "paths": ["**"], "suffixes": [".md"]}
    policy = compile_policy({"scratch": [{"paths": ["out/"]}], "temporary": ["**/*.tmp"], "rule": [rule]})
    for path, word in (("out/x", "scratch layer"), ("x.tmp", "rename"), ("x.md", None)):
        request = Request(Operation.CREATE_FILE, WorkspacePath(path))
        answer = as_document(decide(policy, Principal("alice", "1", "agent"), request), path, request.operation)
        assert answer["allowed"]
        assert set(answer) == {"allowed", "code", "rule", "reason", "instead", "path", "operation"}
        for key in ("reason", "instead"):
            assert (answer[key] is None) == (word is None)
        assert word is None or word in answer["reason"]


def test_the_text_for_a_role_has_only_the_rules_of_the_role() -> None:
    policy = compile_policy(DOCUMENT)
    docs, frozen, src = "docs/ (.md, .rst, 2 KiB)", "docs/frozen/ (.md, .rst, 2 KiB)", "src/**/*.py (any file)"
    assert allowed_directories(policy, "agent") == [docs, src]
    assert frozen not in allowed_directories(policy, "writer")
    assert allowed_directories(policy, "reader") == []
    assert allowed_directories(policy, "clerk") == []
    assert allowed_directories(compile_policy({**DOCUMENT, "default": "allow"}), "clerk") == ["notes/ (any file)"]


def test_the_text_for_an_agent_names_its_role_and_its_limits() -> None:
    policy = compile_policy(DOCUMENT)
    writer = describe(policy, "writer")
    for part in ("`writer`", "`docs/private/`", "`.github`", "`docs/index.md`", "at most 2 KiB", "(rule `docs`)"):
        assert part in writer
    assert "writes nowhere" in describe(policy, "reader")
    assert "does not define this role" in describe(policy, "nobody")
    assert "Everything that no rule names." in describe(compile_policy({"default": "allow", "hidden": ["**"]}), "agent")


def test_the_text_for_an_agent_says_what_it_may_call() -> None:
    roles = {"r": {"tools": ["search_files", "read_file"], "beads": ["comment"]}}
    policy = compile_policy({"role": roles})
    told = describe(policy, "r").partition("## Tools and gates")[2]
    for line in (
        "- Tools of the guard socket: `read_file`, `search_files`.",
        "- Subcommands of git that change something: none, for this role.",
        "- Operations on issues: `comment`.",
    ):
        assert line in told
    assert "`reopen`" not in describe(policy, "agent")
    assert callable_words(policy, "r") == {"tools": ["read_file", "search_files"], "git": [], "beads": ["comment"]}
    assert callable_words(policy, "nobody") == {"tools": [], "git": [], "beads": []}


@settings(max_examples=150, deadline=None)
@given(documents, st.sampled_from(["agent", "writer", "nobody"]))
def test_every_policy_has_a_description(document: dict[str, Any], role: str) -> None:
    policy = compile_policy(document)
    assert describe(policy, role).endswith("\n")
    assert all(one_line(line) for line in allowed_directories(policy, role))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *[(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (500_000, "500 KB"), (1_000_000, "1 MB")],
        *[(1_048_576, "1 MiB"), (1_500_000, "1500 KB"), (1_234_567, "1,234,567 bytes"), (3 * 2**30, "3 GiB")],
    ],
)
def test_sizes_in_words(count: int, text: str) -> None:
    assert denials.size(count) == text


def test_long_lists_end_in_how_many_more_there_are() -> None:
    assert denials.listed(["a"]) == "a"
    assert denials.listed(["a", "b"]) == "a or b"
    assert denials.listed(["a", "b", "c"]) == "a, b or c"
    assert denials.listed([str(number) for number in range(1000)]) == "0, 1, 2, 3, 4, 5 or 994 more"
    assert denials.listed([]) == ""


def test_denial_advice_is_complete() -> None:
    """A denial lists every suffix, and names the path that the role is denied."""
    suffixes = [f".{letter}" for letter in "abcdefghi"]
    document = {
        "rule": [{"name": "all", "paths": ["docs/"], "suffixes": suffixes}],
        "role": {"agent": {"write": ["**"], "deny": ["docs/private/"]}},
    }
    policy, agent = compile_policy(document), Principal("", "", "agent")
    wrong = decide(policy, agent, Request(Operation.CREATE_FILE, WorkspacePath("docs/x.zip")))
    told = as_document(wrong, "", Operation.CREATE_FILE)
    assert [suffix for suffix in suffixes if suffix not in told["reason"] or suffix not in told["instead"]] == []
    denied = decide(policy, agent, Request(Operation.CREATE_FILE, WorkspacePath("docs/private/x.a")))
    assert "docs/private/" in as_document(denied, "", Operation.CREATE_FILE)["instead"]


def test_the_description_says_how_to_work_here() -> None:
    """It names the shell, git, issues, leases, the socket, the attribute of a name, and the times of refusals."""
    text = describe(compile_policy(DOCUMENT), "writer")
    for word in ("`bonobofs shell", "`bd`", "lease acquire", "$BONOBOFS_SOCKET", "user.bonobofs.why.NAME", "its time"):
        assert word in text
