"""Facts about bd 1.0.5 that the tests check on the bd in use: fields of an issue."""

from __future__ import annotations

import concurrent.futures
import json
from pathlib import Path

import pytest

from tests.support.beads_workspace import Workspace

ORDINARY = ("task", "epic", "bug", "feature", "chore", "decision")


@pytest.fixture
def one(beads_workspace: Workspace) -> str:
    return beads_workspace.create("one")


def test_there_are_thirteen_types_with_two_aliases(beads_workspace: Workspace) -> None:
    """Case matters, and the list that bd prints is shorter."""
    types = {*ORDINARY, "message", "molecule", "gate", "spike", "story", "milestone", "event"}
    for word in types:
        assert beads_workspace.json("create", "x", "-t", word)["issue_type"] == word
    assert beads_workspace.json("create", "x", "-t", "enhancement")["issue_type"] == "feature"
    assert beads_workspace.json("create", "x", "-t", "dec")["issue_type"] == "decision"
    for word in ("TASK", "docs", "question", "agent", "role"):
        assert beads_workspace.run("create", "x", "-t", word).returncode == 1
    told = {each["name"] for each in beads_workspace.json("types")["core_types"]}
    assert told < types


def test_a_message_is_ephemeral(beads_workspace: Workspace) -> None:
    """Its id shows it, and it is neither listed nor counted. With a parent only the id is ordinary."""
    before = beads_workspace.json("count")
    message = beads_workspace.json("create", "hello", "-t", "message")
    assert message["id"].startswith("gt-wisp-")
    assert message["ephemeral"] is True
    assert beads_workspace.json("count") == before
    assert message["id"] not in {issue["id"] for issue in beads_workspace.json("list", "--all")}
    parent = beads_workspace.create("a parent")
    below = beads_workspace.json("create", "hello", "-t", "message", "--parent", parent)
    assert (below["id"], below["ephemeral"]) == (f"{parent}.1", True)


def test_most_commands_accept_an_ephemeral_message(beads_workspace: Workspace, one: str) -> None:
    """It is shown, found, changed and closed, is listed by its type, and blocks while it is open."""
    message = beads_workspace.create("hello", "-t", "message")
    assert beads_workspace.issue(message)["title"] == "hello"
    beads_workspace.json("update", message, "-p", "1")
    beads_workspace.json("label", "add", message, "a")
    beads_workspace.json("dep", "add", one, message)
    assert message in {issue["id"] for issue in beads_workspace.json("search", "hello")}
    for flags in (("-t", "message"), ("--include-infra",)):
        assert message in {issue["id"] for issue in beads_workspace.json("list", *flags)}
    assert beads_workspace.run("close", one).returncode == 1
    beads_workspace.json("close", message)
    beads_workspace.json("close", one)


def test_a_message_is_permanent_by_a_setting_by_promotion_or_if_it_was_a_task(beads_workspace: Workspace) -> None:
    """It is then listed with --include-infra, and not by its type. --no-history makes a permanent one."""
    promoted = beads_workspace.create("hello", "-t", "message")
    assert beads_workspace.run("promote", promoted).returncode == 0
    turned = beads_workspace.create("hello")
    assert beads_workspace.json("update", turned, "-t", "message")[0]["issue_type"] == "message"
    for id_ in (promoted, turned):
        assert not beads_workspace.issue(id_).get("ephemeral")
        assert id_ in {issue["id"] for issue in beads_workspace.json("list", "--include-infra")}
        assert id_ not in {issue["id"] for issue in beads_workspace.json("list", "-t", "message")}
    assert beads_workspace.run("create", "x", "-t", "message", "--no-history").returncode == 1
    beads_workspace.run("config", "set", "types.infra", "agent,role,rig")
    ordinary = beads_workspace.json("create", "hello", "-t", "message")
    assert "wisp" not in ordinary["id"]
    assert ordinary["id"] in {issue["id"] for issue in beads_workspace.json("list")}


def test_there_are_seven_statuses_and_done_only_if_configured(beads_workspace: Workspace, one: str) -> None:
    """A custom one has no closed_at, is hidden, and stays after its setting is removed. Every change is accepted."""
    for status in ["in_progress", "blocked", "deferred", "closed", "pinned", "hooked", "open"]:
        assert beads_workspace.json("update", one, "-s", status)[0]["status"] == status
    assert beads_workspace.run("update", one, "-s", "OPEN").returncode == 1
    assert beads_workspace.run("update", one, "-s", "done").returncode == 1
    beads_workspace.run("config", "set", "status.custom", "done:done")
    assert "closed_at" not in beads_workspace.json("update", one, "-s", "done")[0]
    for command in ("list", "ready"):
        assert one not in {issue["id"] for issue in beads_workspace.json(command)}
    beads_workspace.run("config", "unset", "status.custom")
    beads_workspace.json("update", one, "-s", "open")
    assert beads_workspace.json("update", one, "-s", "done")[0]["status"] == "done"


@pytest.mark.parametrize("title", ["   ", "two\nlines", "a\ttab", "\x1b[31mred", "x" * 500])
def test_a_title_may_be_blank_or_any_text(beads_workspace: Workspace, title: str) -> None:
    """It is returned unchanged."""
    assert beads_workspace.issue(beads_workspace.create(title))["title"] == title


def test_an_empty_a_long_and_a_flag_like_title_are_refused(beads_workspace: Workspace) -> None:
    """Only --title= accepts a leading dash. The limit is 500 bytes."""
    assert beads_workspace.run("create", "--title=").returncode == 1
    assert beads_workspace.run("create", "x" * 501).returncode == 1
    assert beads_workspace.run("create", "ä" * 251).returncode == 1
    assert beads_workspace.run("create", "--title=\udcff").returncode == 1
    assert beads_workspace.run("create", "--", "-x").returncode == 1
    assert beads_workspace.issue(beads_workspace.create("-x"))["title"] == "-x"


def test_update_strips_blanks_around_a_title(beads_workspace: Workspace, one: str) -> None:
    """It refuses a blank one; create keeps blanks."""
    assert beads_workspace.issue(beads_workspace.create(" y "))["title"] == " y "
    assert beads_workspace.json("update", one, "--title= x\n")[0]["title"] == "x"
    assert beads_workspace.run("update", one, "--title= ").returncode == 1


def test_numbers_names_and_json_are_checked_and_a_file_is_read(beads_workspace: Workspace, tmp_path: Path) -> None:
    """--metadata @FILE reads a file; -d @file does not."""
    assert beads_workspace.json("create", "x", "-p", "P0")["priority"] == 0
    for flags in (("-p", "9"), ("-p", "-1"), ("-p", "high"), ("-a", "x" * 300), ("--metadata", "{")):
        assert beads_workspace.run("create", "x", *flags).returncode == 1
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    read = beads_workspace.create("x", f"--metadata=@{tmp_path / 'secret.json'}", f"-d@{tmp_path / 'secret.json'}")
    assert beads_workspace.issue(read)["metadata"] == {"secret": 1}
    assert beads_workspace.issue(read)["description"] == f"@{tmp_path / 'secret.json'}"


def test_a_description_of_a_dash_is_read_from_standard_input(beads_workspace: Workspace, one: str) -> None:
    """Standard input is empty here: a new issue accepts that, and an issue with a description does not. Notes
    are not read.
    """
    assert "description" not in beads_workspace.issue(beads_workspace.create("x", "-d", "-", "--notes=-"))
    assert beads_workspace.json("update", one, "--description=text", "--notes=-")[0]["notes"] == "-"
    refused = beads_workspace.run("update", one, "--description=-", "--json")
    assert (refused.returncode, "stdin" in json.loads(refused.stdout)["error"]) == (1, True)
    assert beads_workspace.issue(one)["description"] == "text"
    assert "description" not in beads_workspace.json("update", one, "--description=")[0]


def test_control_characters_in_metadata_break_the_list(beads_workspace: Workspace, one: str) -> None:
    """Until that issue is deleted. It is not shown either, and no change of it is reported."""
    bad = beads_workspace.json("create", "bad", '--metadata={"a": "\\t", "b": "\\u001b"}')["id"]
    for words in (("list",), ("show", bad), ("update", bad, "-p", "1"), ("close", bad)):
        failed = beads_workspace.run(*words, "--json")
        assert (failed.returncode, "encoding JSON" in json.loads(failed.stderr)["error"]) == (1, True)
    assert beads_workspace.issue(one)["title"]
    assert beads_workspace.run("list").returncode == 0
    beads_workspace.json("delete", bad, "--force")
    assert set(beads_workspace.all_issues()) == {one}


def test_a_long_label_is_truncated(beads_workspace: Workspace, one: str) -> None:
    """At 255 characters, by every command, without a message."""
    beads_workspace.json("label", "add", one, "x" * 300)
    beads_workspace.json("update", one, "--add-label", "y" * 256, "--add-label", "ä" * 255)
    made = beads_workspace.create("two", "-l", "z" * 1000)
    assert beads_workspace.issue(one)["labels"] == ["x" * 255, "y" * 255, "ä" * 255]
    assert beads_workspace.issue(made)["labels"] == ["z" * 255]


def test_labels_are_free_text_and_only_create_splits_them_at_commas(beads_workspace: Workspace, one: str) -> None:
    """No form is required. Adding twice and removing a missing one succeed."""
    two = beads_workspace.create("two", "-l", "a,,b", "-l", " ")
    assert set(beads_workspace.issue(two)["labels"]) == {"a", "", "b", " "}
    for _ in range(2):
        assert beads_workspace.json("label", "add", one, "a,b")[0]["status"] == "added"
    assert beads_workspace.json("label", "list", one) == ["a,b"]
    assert beads_workspace.json("label", "remove", one, "absent")[0]["status"] == "removed"
    for label in ("", "provides:x"):
        assert beads_workspace.run("label", "add", one, label).returncode == 1
    beads_workspace.json("label", "add", one, "phase:build")
    beads_workspace.json("label", "remove", one, "phase:build")


def test_bd_has_no_ownership(beads_workspace: Workspace, one: str) -> None:
    """An actor may change and close an issue that another has claimed. An assignee is any name."""
    beads_workspace.json("update", one, "--claim", "--actor=alice")
    beads_workspace.json("update", one, "-p", "1", "-a", "nobody there", "--actor=bob")
    beads_workspace.json("close", one, "--actor=bob")


def test_only_an_open_unassigned_issue_can_be_claimed(beads_workspace: Workspace, one: str) -> None:
    """An actor may claim its own again. Another's, a closed one and an unassigned one in progress cannot be claimed."""
    for _ in range(2):
        (claimed,) = beads_workspace.json("update", one, "--claim", "--actor=alice")
        assert (claimed["assignee"], claimed["status"]) == ("alice", "in_progress")
    other = beads_workspace.run("update", one, "--claim", "--actor=bob")
    assert (other.returncode, "already claimed by alice" in other.stderr) == (1, True)
    beads_workspace.json("update", one, "-a", "")
    free = beads_workspace.run("update", one, "--claim", "--actor=bob")
    assert (free.returncode, "not claimable" in free.stderr) == (1, True)
    beads_workspace.json("close", one)
    assert beads_workspace.run("update", one, "--claim", "--actor=bob").returncode == 1


def test_one_of_many_concurrent_claims_wins(beads_workspace: Workspace, one: str) -> None:
    """Exactly one of five."""
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        ended = pool.map(lambda n: beads_workspace.run("update", one, "--claim", f"--actor=a{n}").returncode, range(5))
    assert sorted(ended) == [0, 1, 1, 1, 1]


def test_ids_are_short_and_a_child_id_extends_its_parents(beads_workspace: Workspace) -> None:
    """Four levels deep. A child gets the labels of the parent by default."""
    id_ = beads_workspace.create("one", "-l", "a")
    assert id_.startswith("gt-")
    assert len(id_) == 6
    other = beads_workspace.create("x", "--parent", id_, "--no-inherit-labels")
    assert "labels" not in beads_workspace.issue(other)
    for _ in range(4):
        child = beads_workspace.create("x", "--parent", id_)
        assert child.rpartition(".")[0] == id_
        assert beads_workspace.issue(child)["labels"] == ["a"]
        id_ = child


def test_a_unique_part_of_an_id_is_accepted(beads_workspace: Workspace) -> None:
    """With the right case."""
    for id_ in ("gt-abc", "gt-abd", "gt-xyz"):
        beads_workspace.json("create", "x", "--id", id_)
    assert beads_workspace.json("show", "yz")[0]["id"] == "gt-xyz"
    beads_workspace.json("close", "z")
    assert beads_workspace.issue("gt-xyz")["status"] == "closed"
    several = beads_workspace.run("close", "ab")
    assert several.returncode == 1
    assert "gt-abc" in several.stderr
    assert "gt-abd" in several.stderr
    assert beads_workspace.run("show", "XYZ").returncode == 1


def test_creating_with_a_used_id_overwrites_the_issue(beads_workspace: Workspace, one: str) -> None:
    """A closed one is open again. Only its creation time and its edges are kept."""
    two = beads_workspace.create("two")
    beads_workspace.json("dep", "add", one, two, "-t", "related")
    beads_workspace.json("update", one, "-a", "bob", "-d", "text")
    created = beads_workspace.issue(one)["created_at"]
    beads_workspace.json("close", one)
    beads_workspace.json("create", "another", "--id", one, "-t", "bug", "-p", "0")
    now = beads_workspace.issue(one)
    assert (now["title"], now["issue_type"], now["priority"], now["status"]) == ("another", "bug", 0, "open")
    assert not {"assignee", "description"} & set(now)
    assert now["created_at"] == created
    assert [each["id"] for each in now["dependencies"]] == [two]


def test_only_the_prefix_of_an_id_is_checked(beads_workspace: Workspace) -> None:
    """A path is an id too. Another prefix needs --force."""
    assert beads_workspace.json("create", "x", "--id", "gt-../x")["id"] == "gt-../x"
    assert beads_workspace.run("create", "x", "--id", "other-1").returncode == 1
    assert beads_workspace.run("create", "x", "--id", "other-1", "--force").returncode == 0


def test_without_an_id_the_last_touched_issue_is_changed(beads_workspace: Workspace, one: str) -> None:
    """By update and close."""
    assert json.loads(beads_workspace.run("update", "-s", "closed", "--json").stdout)[0]["id"] == one
    beads_workspace.json("reopen", one)
    assert json.loads(beads_workspace.run("close", "--json").stdout)[0]["id"] == one
