"""Facts about bd 1.0.5 that the tests check on the bd in use: output, streams and exit statuses."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.beads_workspace import Workspace
from tests.support.wait import until

Done = subprocess.CompletedProcess[str]


@pytest.fixture
def one(beads_workspace: Workspace) -> str:
    return beads_workspace.create("one")


@pytest.fixture
def two(beads_workspace: Workspace) -> str:
    return beads_workspace.create("two")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def error_of(text: str) -> str:
    told = json.loads(text)
    assert set(told) == {"error", "schema_version"}
    return str(told["error"])


def test_create_prints_an_object(beads_workspace: Workspace) -> None:
    """Its times have nanoseconds, and the stored ones whole seconds."""
    told = beads_workspace.json("create", "one", "-l", "a", "-a", "bob")
    assert told["schema_version"] == 1
    assert (told["status"], told["issue_type"], told["priority"]) == ("open", "task", 2)
    assert (told["labels"], told["assignee"]) == (["a"], "bob")
    assert "." in told["created_at"]
    assert "." not in beads_workspace.issue(told["id"])["created_at"]
    assert not {"description", "metadata", "ephemeral"} & set(told)


def test_show_prints_an_array_whose_dependencies_are_issues(beads_workspace: Workspace, one: str, two: str) -> None:
    """There is no schema_version, and a parent is named."""
    parent = beads_workspace.create("an epic", "-t", "epic")
    beads_workspace.json("dep", "add", one, two)
    beads_workspace.json("dep", "add", one, parent, "-t", "parent-child")
    shown = beads_workspace.issue(one)
    assert "schema_version" not in shown
    assert (shown["dependency_count"], shown["dependent_count"], shown["comment_count"]) == (2, 0, 0)
    assert shown["parent"] == parent
    assert {(each["id"], each["title"], each["dependency_type"]) for each in shown["dependencies"]} == {
        (two, "two", "blocks"),
        (parent, "an epic", "parent-child"),
    }


def test_list_and_ready_print_edges_and_count_blocking_ones(beads_workspace: Workspace, one: str, two: str) -> None:
    """A dependency is a record there and no issue."""
    beads_workspace.json("dep", "add", one, two, "-t", "related")
    for command in ("list", "ready"):
        listed = {issue["id"]: issue for issue in beads_workspace.json(command)}[one]
        (edge,) = listed["dependencies"]
        assert (edge["issue_id"], edge["depends_on_id"], edge["type"]) == (one, two, "related")
        assert {"created_at", "created_by"} <= set(edge)
        assert listed["dependency_count"] == 0
    beads_workspace.json("dep", "remove", one, two)
    beads_workspace.json("dep", "add", one, two)
    assert beads_workspace.all_issues()[one]["dependency_count"] == 1


def test_update_close_and_reopen_print_an_array_and_short_forms_an_object(beads_workspace: Workspace, one: str) -> None:
    """in_progress adds started_at. Closing adds closed_at and a reason, by default Closed."""
    assert beads_workspace.json("update", one, "-s", "in_progress")[0]["started_at"]
    (closed,) = beads_workspace.json("close", one)
    assert closed["closed_at"]
    assert closed["close_reason"] == "Closed"
    assert beads_workspace.json("reopen", one)[0]["status"] == "open"
    for words in (("assign", one, "bob"), ("priority", one, "1"), ("note", one, "n"), ("tag", one, "t")):
        assert beads_workspace.json(*words)["id"] == one


def test_dep_prints_the_added_or_removed_edge(beads_workspace: Workspace, one: str, two: str) -> None:
    """The reverse form has other keys."""
    added = beads_workspace.json("dep", "add", one, two)
    assert added.items() >= {"status": "added", "issue_id": one, "depends_on_id": two, "type": "blocks"}.items()
    removed = beads_workspace.json("dep", "remove", one, two)
    assert removed.items() >= {"status": "removed", "issue_id": one, "depends_on_id": two}.items()
    other = beads_workspace.json("dep", one, "--blocks", two)
    assert (other["blocker_id"], other["blocked_id"]) == (one, two)


def test_labels_and_comments_have_their_own_forms(beads_workspace: Workspace, one: str) -> None:
    """A label is printed with its issue, a comment with a UUID as id."""
    assert beads_workspace.json("label", "add", one, "a") == [{"issue_id": one, "label": "a", "status": "added"}]
    assert beads_workspace.json("label", "list", one) == ["a"]
    said = beads_workspace.json("comment", one, "hello")
    assert (said["issue_id"], said["text"], len(said["id"])) == (one, "hello", 36)
    assert [each["id"] for each in beads_workspace.json("comments", one)] == [said["id"]]


def test_some_commands_ignore_json(beads_workspace: Workspace, one: str, tmp_path: Path) -> None:
    """q, info, rename, export -o, a delete without --force, and commands without work print text."""
    run = beads_workspace.run
    assert run("q", "two", "--json").stdout.strip().startswith("gt-")
    exported = run("export", "-o", tmp_path / "issues.jsonl", "--json")
    assert not is_json(exported.stderr)
    for words in (("info",), ("delete", one), ("update", one), ("rename", one, "gt-other")):
        done = run(*words, "--json")
        assert (done.returncode, is_json(done.stdout)) == (0, False), words
    assert "No updates specified" in run("update", "gt-other", "--json").stdout
    opened = run("reopen", "gt-other", "--json")
    assert (opened.returncode, opened.stdout) == (0, "")
    assert opened.stderr


def test_an_envelope_contains_results_and_errors(beads_workspace: Workspace, one: str) -> None:
    """BD_JSON_ENVELOPE=1 wraps both. BD_JSON=true equals --json."""
    wrapped = json.loads(beads_workspace.run("show", one, "--json", env={"BD_JSON_ENVELOPE": "1"}).stdout)
    assert (wrapped["schema_version"], wrapped["data"][0]["id"]) == (1, one)
    failed = json.loads(beads_workspace.run("show", "gt-zzzz", "--json", env={"BD_JSON_ENVELOPE": "1"}).stdout)
    assert failed["data"]["error"]
    assert is_json(beads_workspace.run("show", one, env={"BD_JSON": "true"}).stdout)


def test_silent_prints_the_id_and_a_dry_run_stores_nothing(beads_workspace: Workspace) -> None:
    """--json overrides --silent. A dry run has no id and a time of the year 1."""
    assert beads_workspace.run("create", "one", "--silent").stdout.strip() in beads_workspace.all_issues()
    assert is_json(beads_workspace.run("create", "two", "--silent", "--json").stdout)
    before = beads_workspace.all_issues()
    tried = beads_workspace.json("create", "three", "--dry-run")
    assert tried["id"] == ""
    assert tried["created_at"].startswith("0001-")
    assert beads_workspace.all_issues() == before


def test_list_shows_fifty_open_issues_with_a_notice_on_stderr(beads_workspace: Workspace) -> None:
    """-n 0 shows all. Closed issues, messages and gates need flags. Invalid filters fail with JSON on stderr."""
    lines = [json.dumps({"id": f"gt-{n}", "title": f"{n}", "status": "open", "issue_type": "task"}) for n in range(60)]
    file = beads_workspace.person / "issues.jsonl"
    file.write_text("\n".join(lines))
    assert beads_workspace.run("import", file).returncode == 0
    cut = beads_workspace.run("list", "--json")
    assert (cut.returncode, len(json.loads(cut.stdout))) == (0, 50)
    assert cut.stderr.strip()
    assert len(beads_workspace.json("list", "-n", "0")) == 60
    beads_workspace.json("close", "gt-7")
    gate = beads_workspace.create("a gate", "-t", "gate")
    assert not {"gt-7", gate} & {issue["id"] for issue in beads_workspace.json("list", "-n", "0")}
    assert [issue["id"] for issue in beads_workspace.json("list", "-s", "closed")] == ["gt-7"]
    assert gate in {issue["id"] for issue in beads_workspace.json("list", "-n", "0", "--include-gates")}
    for filter_ in (("-s", "bogus"), ("-t", "bogus")):
        done = beads_workspace.run("list", *filter_, "--json")
        assert done.returncode == 1
        assert error_of(done.stderr)


def test_list_accepts_several_filters_and_ready_omits_children_of_blocked_issues(
    beads_workspace: Workspace, one: str
) -> None:
    """A child names its parent in lists. With --json, an unknown parent has no children."""
    urgent = beads_workspace.create("urgent", "-p", "P0", "--deps", one)
    child = beads_workspace.create("child", "--parent", urgent)
    closed = beads_workspace.create("closed")
    beads_workspace.json("close", closed)

    def listed(*words: str) -> set[str]:
        return {issue["id"] for issue in beads_workspace.json(*words)}

    assert listed("list", "-p", "0") == {urgent}
    assert listed("list", "--title", "urg") == {urgent}
    assert listed("list", "--id", f"{one},{urgent}") == {one, urgent}
    assert listed("list", "--parent", urgent) == listed("children", urgent) == {child}
    assert listed("list", "--status=open,closed") == {one, urgent, child, closed}
    assert listed("list", "--status=all", "--id", closed) == {closed}
    assert beads_workspace.all_issues()[child]["parent"] == urgent
    assert listed("ready") == {one}
    assert listed("blocked") == {urgent, child}
    assert listed("children", "nope") == set()
    assert beads_workspace.run("create", "x", "--id", f"{urgent}.7", "--parent", urgent).returncode == 1


def test_the_exit_status_is_0_or_1_and_errors_have_no_code(beads_workspace: Workspace, tmp_path: Path) -> None:
    """An error is a sentence; only that of where has more fields."""
    failed = beads_workspace.run("show", "gt-zzzz", "--json")
    assert failed.returncode == 1
    assert error_of(failed.stdout)
    nowhere = beads_workspace.run("where", "--json", env={"BEADS_DIR": None}, cwd=tmp_path / "person")
    assert nowhere.returncode == 1
    assert {"error", "hint", "message"} <= set(json.loads(nowhere.stdout))


@pytest.mark.parametrize(
    ("words", "stream"),
    [
        (("create", "--title="), "stderr"),
        (("create", "x", "-t", "bogus"), "stderr"),
        (("create", "x", "-p", "9"), "stderr"),
        (("create", "x", "--deps", "bogus:ONE"), "stdout"),
        (("show", "gt-zzzz"), "stdout"),
        (("dep", "add", "ONE", "gt-zzzz"), "stdout"),
        (("close", "gt-zzzz"), "stdout"),
        (("update", "ONE", "-s", "bogus"), "stdout"),
        (("update", "ONE", "-p", "9"), "stdout"),
        (("update", "ONE", "--title="), "stdout"),
    ],
    ids=" ".join,
)
def test_json_errors_are_on_either_stream(
    beads_workspace: Workspace, one: str, words: tuple[str, ...], stream: str
) -> None:
    """It depends on the command."""
    done = beads_workspace.run(*(word.replace("ONE", one) for word in words), "--json")
    assert done.returncode == 1
    assert error_of(getattr(done, stream))


def test_an_unknown_kind_of_dependency_fails_after_the_issue_is_stored(beads_workspace: Workspace, one: str) -> None:
    """create --deps exits with 1 and does not mention the stored issue."""
    done = beads_workspace.run("create", "two", "--deps", f"bogus:{one}", "--json")
    assert done.returncode == 1
    assert "gt-" not in done.stdout.replace(one, "")
    assert "two" in {issue["title"] for issue in beads_workspace.all_issues().values()}


def test_many_errors_are_text_with_or_without_json(beads_workspace: Workspace, one: str, two: str) -> None:
    """Unknown ids and types in update, a failed claim, a refused close, reopen, no database, flags."""
    beads_workspace.json("dep", "add", one, two)
    beads_workspace.json("update", two, "--claim", "--actor=other")
    outside: dict[str, Any] = {"env": {"BEADS_DIR": None}}
    for words, how in (
        (("update", "gt-zzzz", "-p", "1"), {}),
        (("update", one, "-t", "bogus"), {}),
        (("update", two, "--claim"), {}),
        (("close", one), {}),
        (("reopen", "gt-zzzz"), {}),
        (("list",), outside),
        (("list", "--no-daemon"), {}),
    ):
        done = beads_workspace.run(*words, "--json", **how)
        assert done.returncode == 1, words
        assert done.stdout == "", words
        assert done.stderr.strip(), words
        assert not is_json(done.stderr), words


def test_a_valid_id_hides_an_invalid_one(beads_workspace: Workspace, one: str) -> None:
    """show and update of both succeed with the valid one. show of an invalid one alone reports it twice."""
    alone = beads_workspace.run("show", "gt-zzzz", "--json")
    assert alone.returncode == 1
    assert "no issues found" in error_of(alone.stdout)
    assert alone.stderr.strip()
    assert [issue["id"] for issue in beads_workspace.json("show", one, "gt-zzzz")] == [one]
    assert [issue["id"] for issue in beads_workspace.json("update", one, "gt-zzzz", "-p", "1")] == [one]


@pytest.mark.parametrize("word", ["add", "remove"])
def test_labelling_an_unknown_issue_succeeds_without_effect(beads_workspace: Workspace, word: str) -> None:
    """Exit status 0, an empty array, and a line of text on standard error."""
    done = beads_workspace.run("label", word, "gt-zzzz", "a", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, [])
    assert done.stderr.strip()


def test_closing_several_is_all_or_nothing_only_for_unknown_ids(beads_workspace: Workspace, one: str, two: str) -> None:
    """An unknown id keeps all open. A refused one does not, and the status is 0."""
    assert beads_workspace.run("close", one, "gt-zzzz").returncode == 1
    assert beads_workspace.issue(one)["status"] == "open"
    three = beads_workspace.create("three")
    beads_workspace.json("dep", "add", two, three)
    done = beads_workspace.run("close", two, one, "--json")
    assert (done.returncode, [issue["id"] for issue in json.loads(done.stdout)]) == (0, [one])
    assert beads_workspace.issue(two)["status"] == "open"


def test_bd_reports_a_locked_database_only_when_it_is_terminated(beads_workspace: Workspace, one: str) -> None:
    """It waits without output. On SIGTERM it reports the lock as JSON on standard error, and fails."""
    with beads_workspace.lock.open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = beads_workspace.start("show", one, "--json")
        until(lambda: beads_workspace.has_open(waiting, beads_workspace.lock), "bd waits for its lock")
        waiting.send_signal(signal.SIGTERM)
        _, stderr = waiting.communicate(timeout=30)
    assert waiting.returncode == 1
    assert "locked" in error_of(stderr)
