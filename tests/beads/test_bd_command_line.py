"""The gate's parser of bd command lines. No program runs here."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.beads.bd_command_line import (
    READING,
    WRITING,
    ReadCommand,
    Step,
    UnsupportedCommand,
    WriteCommand,
    parse_command_line,
)


def asking(*arguments: str) -> WriteCommand:
    found = parse_command_line(arguments)
    assert isinstance(found, WriteCommand), found
    return found


def step(*arguments: str) -> Step:
    (only,) = asking(*arguments).steps
    return only


def unanswered(*arguments: str) -> UnsupportedCommand:
    with pytest.raises(UnsupportedCommand) as caught:
        parse_command_line(arguments)
    return caught.value


@pytest.mark.parametrize(
    ("said", "written_out"),
    [
        ("", "help"),
        ("list", "list"),
        ("list --json -s open,in_progress -n0 --all", "list --status=open,in_progress --limit=0 --all --json"),
        ("--json list -a=alice", "list --assignee=alice --json"),
        ("show gt-1 gt-2 --long", "show --long -- gt-1 gt-2"),
        ("view -- gt-1", "show -- gt-1"),
        ("ready -up1 --label phase:a", "ready --priority=1 --label=phase:a --unassigned"),
        ("search login bug", "search -- login bug"),
        ("query status=open", "query -- status=open"),
        ("dep tree gt-1 --direction up", "dep tree --direction=up -- gt-1"),
        ("dep cycles", "dep cycles"),
        ("label list-all --json", "label list-all --json"),
        ("comments gt-1", "comments -- gt-1"),
        ("create --help", "help create"),
        ("dep add -h", "help dep add"),
        ("help create", "help create"),
        ("--version", "version"),
    ],
)
def test_a_reading_command_is_rebuilt_for_the_real_bd(said: str, written_out: str) -> None:
    """bd gets the parsed command, never the text of the caller."""
    assert parse_command_line(said.split()) == ReadCommand(tuple(written_out.split()))


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("create Title", Step("create", "", {"title": "Title", "type": "task", "priority": 2})),
        (
            "new --title=-x -tbug -p P1 -d text -l phase:a,unit:b -l stage:c --parent gt-1 --deps gt-2,blocks:gt-3",
            Step(
                "create",
                "",
                {
                    "title": "-x",
                    "type": "bug",
                    "priority": "P1",
                    "description": "text",
                    "parent": "gt-1",
                    "labels": ["phase:a", "unit:b", "stage:c"],
                    "dependencies": ["gt-2", "blocks:gt-3"],
                },
            ),
        ),
        ("update gt-1 --claim", Step("update", "gt-1", {"claim": True})),
        (
            "update gt-1 -s done --set-labels phase:a --remove-label unit:b -a=",
            Step(
                "update", "gt-1", {"status": "done", "assignee": "", "remove_labels": ["unit:b"], "labels": ["phase:a"]}
            ),
        ),
        ("close gt-1", Step("close", "gt-1", {"reason": None})),
        ("done gt-1 -r because", Step("close", "gt-1", {"reason": "because"})),
        ("reopen gt-1 --reason=again", Step("reopen", "gt-1", {"reason": "again"})),
        ("dep add gt-1 gt-2", Step("tie", "gt-1", {"other": "gt-2", "type": "blocks"})),
        ("dep add gt-1 --blocked-by gt-2 -t waits-for", Step("tie", "gt-1", {"other": "gt-2", "type": "waits-for"})),
        ("dep gt-1 --blocks gt-2", Step("tie", "gt-2", {"other": "gt-1", "type": "blocks"})),
        ("dep rm gt-1 gt-2", Step("untie", "gt-1", {"other": "gt-2"})),
        ("label add gt-1 phase:a", Step("label", "gt-1", {"add": ["phase:a"]})),
        ("label remove gt-1 unit:b", Step("label", "gt-1", {"remove": ["unit:b"]})),
        ("comment gt-1 two words", Step("comment", "gt-1", {"text": "two words"})),
        ("comments add gt-1 -- -x", Step("comment", "gt-1", {"text": "-x"})),
    ],
)
def test_a_changing_command_is_an_operation_of_the_gate(said: str, call: Step) -> None:
    assert step(*said.split()) == call


def test_several_issues_are_several_calls() -> None:
    assert [each.issue for each in asking("close", "gt-1", "gt-2", "--json").steps] == ["gt-1", "gt-2"]
    labels = asking("label", "add", "gt-1", "gt-2", "phase:a").steps
    assert [(each.issue, each.arguments) for each in labels] == [
        ("gt-1", {"add": ["phase:a"]}),
        ("gt-2", {"add": ["phase:a"]}),
    ]
    assert asking("create", "--silent", "x").silent
    assert asking("update", "gt-1", "--json", "--title=x").json


@pytest.mark.parametrize(
    "said",
    [
        "init",
        "import",
        "export -o x",
        "delete gt-1",
        "edit gt-1",
        "sql x",
        "config set a b",
        "hooks install",
        "q x",
        "batch",
        "rename gt-1 gt-2",
        "mail",
        "sync",
        "setup claude",
        "dolt push",
        "vc merge x",
        "gate create",
        "label propagate a b",
        "epic close-eligible",
        "assign gt-1 bob",
        "note gt-1 x",
        "remember x",
        "worktree create x",
        "repo add x",
        "LIST",
        "purge",
        "admin reset",
        "restore",
        "audit record",
        "list-",
        "create-form",
        "./bd list",
    ],
)
def test_every_other_command_is_refused(said: str) -> None:
    """This includes commands that `--readonly` lets write."""
    assert unanswered(*said.split()).rule == "command"


@pytest.mark.parametrize(
    "flag",
    [
        "--db=x",
        "--actor=x",
        "--force",
        "--id=gt-1",
        "--repo=x",
        "-C",
        "-Cx",
        "--global",
        "--dolt-auto-commit=off",
        "--ignore-schema-skew",
        "--profile",
        "--sandbox",
        "--readonly",
        "--ephemeral",
        "--dry-run",
        "--no-cycle-check",
        "--claim-next",
        "--watch",
        "-w",
        "-f",
        "--silent=false",
        "--json=false",
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        "list",
        "show gt-1",
        "create x",
        "update gt-1",
        "close gt-1",
        "dep add gt-1 gt-2",
        "comment gt-1 x",
        "label add gt-1 x",
        "ready",
        "reopen gt-1",
    ],
)
def test_flags_that_select_another_database_or_bypass_a_rule_are_refused(command: str, flag: str) -> None:
    """At every position, also if another flag would take them as its value."""
    assert unanswered(*command.split(), flag).rule == "flag"
    assert unanswered(flag, *command.split()).rule == "flag"


@pytest.mark.parametrize(
    "said",
    [
        "create --body-file=x y",
        "create y --body-file x",
        "create -d @notes.txt y",
        "create @x",
        "update gt-1 --notes=@x",
        "update gt-1 --metadata=@x",
        "create --file plan.md",
        "create --graph=x",
        "comments add gt-1 --file x",
        "comment gt-1 @x",
        "update gt-1 --design-file=x",
        "close gt-1 --reason-file x",
        "create x --stdin",
        "dep add --file x",
        "list -s @x",
    ],
)
def test_no_argument_makes_bd_read_a_file(said: str) -> None:
    assert unanswered(*said.split()).rule == "file"


@pytest.mark.parametrize(
    "said",
    [
        "create",
        "create a b",
        "create --title=a b",
        "update",
        "close",
        "reopen",
        "show",
        "dep add gt-1",
        "dep gt-1",
        "dep add gt-1 gt-2 --depends-on gt-3",
        "label add gt-1",
        "comment gt-1",
        "close gt-1 -r",
        "update gt-1 --title",
        "comments list gt-1",
        "dep relate gt-1 gt-2",
        "help ../x",
    ],
)
def test_an_incomplete_command_is_refused(said: str) -> None:
    """bd would use the last touched issue."""
    assert unanswered(*said.split()).rule == "form"


def test_a_wrong_number_of_words_is_named() -> None:
    assert unanswered("close").about == "It has 0 words that are not flags, and takes at least 1."
    assert unanswered("create", "a", "b").about == "It has 2 words that are not flags, and takes at most 1."


words = st.one_of(
    st.sampled_from(sorted({part for name in (*READING, *WRITING) for part in name.split()})),
    st.sampled_from(
        ["--json", "-s", "--status=open", "--", "gt-1", "-p1", "-abc", "--db", "x", "-", "=", "--=", "-=", ""]
    ),
    st.text(max_size=6),
)


@given(st.lists(words, max_size=6))
@settings(max_examples=500)
def test_every_command_line_is_a_read_an_operation_or_refused(said: list[str]) -> None:
    """A command for bd is on the list, and its flags have the list's form."""
    found: ReadCommand | WriteCommand | UnsupportedCommand
    try:
        found = parse_command_line(said)
    except UnsupportedCommand as refused:
        found = refused
    if isinstance(found, UnsupportedCommand):
        assert found.rule in {"command", "flag", "form", "file"}
        assert found.about.isprintable()
        return
    if isinstance(found, WriteCommand):
        assert found.command in WRITING
        return
    name = next(name for name in READING if tuple(name.split()) == found.arguments[: len(name.split())])
    rest = found.arguments[len(name.split()) :]
    flags = rest[: rest.index("--")] if "--" in rest else rest
    for flag in flags:
        known = {*READING[name].values.values(), *READING[name].switches.values(), "json", "quiet", "verbose"}
        assert name == "help" or flag.removeprefix("--").partition("=")[0] in known


@pytest.mark.parametrize("word", ["--actor=bob", "--db=/tmp/x", "--force", "-C"])
def test_arguments_after_two_dashes_are_no_flags(word: str) -> None:
    """They are a title, a comment or a search text, and reach bd as such."""
    assert step("create", "--", word).arguments["title"] == word
    assert step("comment", "gt-1", "--", word).arguments["text"] == word
    assert parse_command_line(["search", "--", word]) == ReadCommand(("search", "--", word))
