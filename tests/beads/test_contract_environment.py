"""Facts about bd 1.0.5 that the tests check on the bd in use: variables, files and directories that control it."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.support.beads_workspace import Workspace
from tests.support.wait import until


@pytest.fixture
def one(beads_workspace: Workspace) -> str:
    return beads_workspace.create("one")


@pytest.fixture
def other(bd: Path, tmp_path: Path) -> Workspace:
    """Another workspace, whose ids begin alike."""
    return Workspace(bd, tmp_path / "other", tmp_path / "person").init()


def creator(workspace: Workspace, *flags: str, **variables: str) -> str:
    told = workspace.run("create", "x", "--json", *flags, env={**variables})
    return str(json.loads(told.stdout)["created_by"])


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_only_the_flag_sets_the_actor_reliably(beads_workspace: Workspace) -> None:
    """The order is --actor, BD_ACTOR, a file's actor:, BEADS_ACTOR, git's user.name, USER, unknown. An empty flag
    is ignored.
    """
    assert creator(beads_workspace, USER="user") == "operator"
    assert creator(beads_workspace, BEADS_ACTOR="beads") == "beads"
    (beads_workspace.beads / "config.yaml").write_text("actor: file\n")
    assert creator(beads_workspace, BEADS_ACTOR="beads") == "file"
    assert creator(beads_workspace, BEADS_ACTOR="beads", BD_ACTOR="bd") == "bd"
    assert creator(beads_workspace, "--actor=flag", BD_ACTOR="bd") == "flag"
    assert creator(beads_workspace, "--actor=", BD_ACTOR="bd") == "bd"
    (beads_workspace.beads / "config.yaml").write_text("")
    (beads_workspace.person / ".gitconfig").write_text("[beads]\n\trole = maintainer\n")
    assert creator(beads_workspace, USER="user") == "user"
    assert creator(beads_workspace) == "unknown"


def test_the_owner_is_an_address_of_git(beads_workspace: Workspace) -> None:
    """GIT_AUTHOR_EMAIL, otherwise the user's own, otherwise none."""
    assert "owner" not in beads_workspace.issue(beads_workspace.create("x"))
    told = beads_workspace.run("create", "x", "--json", env={"GIT_AUTHOR_EMAIL": "a@b"})
    assert json.loads(told.stdout)["owner"] == "a@b"


def test_a_file_in_beads_sets_variables(beads_workspace: Workspace) -> None:
    """Every command reads .env, which does not replace variables that are set."""
    (beads_workspace.beads / ".env").write_text("BEADS_ACTOR=file\nGIT_AUTHOR_EMAIL=file@x\n")
    assert creator(beads_workspace) == "file"
    assert creator(beads_workspace, BEADS_ACTOR="set") == "set"
    assert beads_workspace.issue(beads_workspace.create("x"))["owner"] == "file@x"


def test_every_key_of_the_configuration_is_a_variable_too(beads_workspace: Workspace) -> None:
    """Three files are read. BD_READONLY=1 refuses changes, and BD_BACKEND every command."""
    (beads_workspace.person / ".config" / "bd").mkdir(parents=True)
    (beads_workspace.person / ".config" / "bd" / "config.yaml").write_text("actor: at home\n")
    assert creator(beads_workspace) == "at home"
    assert beads_workspace.run("create", "x", env={"BD_READONLY": "1"}).returncode == 1
    assert beads_workspace.run("list", env={"BD_READONLY": "1"}).returncode == 0
    assert beads_workspace.run("list", env={"BD_BACKEND": "dolt"}).returncode == 1


def test_a_missing_beads_dir_is_ignored(beads_workspace: Workspace, other: Workspace) -> None:
    """bd then uses one above its working directory. `where` shows it."""
    nowhere: dict[str, str | None] = {"BEADS_DIR": str(other.directory / "none")}
    told = beads_workspace.run("where", "--json", env=nowhere, cwd=other.directory)
    assert json.loads(told.stdout)["path"] == str(other.beads)
    assert beads_workspace.run("create", "lost", env=nowhere, cwd=other.directory).returncode == 0
    assert {issue["title"] for issue in other.all_issues().values()} == {"lost"}
    assert beads_workspace.all_issues() == {}
    assert beads_workspace.run("list", env=nowhere).returncode == 1


def test_a_redirect_in_beads_dir_is_followed(beads_workspace: Workspace, other: Workspace) -> None:
    """`where` shows source and target. With another prefix bd keeps its own database name: it creates an empty
    database, and create fails.
    """
    (beads_workspace.beads / "redirect").write_text(str(other.beads) + "\n")
    assert beads_workspace.json("where")["path"] == str(other.beads)
    there = beads_workspace.run("where", "--json", env={"BEADS_DIR": None}, cwd=beads_workspace.directory)
    told = json.loads(there.stdout)
    assert (told["path"], told["redirected_from"]) == (str(other.beads), str(beads_workspace.beads))
    beads_workspace.create("elsewhere")
    assert {issue["title"] for issue in other.all_issues().values()} == {"elsewhere"}
    third = Workspace(other.bd, other.directory.parent / "third", other.person).init("yy")
    (beads_workspace.beads / "redirect").write_text(str(third.beads) + "\n")
    third.create("there")
    assert beads_workspace.json("where")["prefix"] == "yy"
    assert beads_workspace.all_issues() == {}
    failed = beads_workspace.run("create", "nowhere")
    assert (failed.returncode, "issue_prefix config is missing" in failed.stderr) == (1, True)
    assert {issue["title"] for issue in third.all_issues().values()} == {"there"}


def test_an_empty_beads_is_ignored(beads_workspace: Workspace) -> None:
    """In BEADS_DIR, above the working directory, and behind a redirect."""
    beads_workspace.create("above")
    empty = beads_workspace.directory / "sub" / ".beads"
    empty.mkdir(parents=True)
    for steered in (str(empty), None):
        done = beads_workspace.run("list", "--json", env={"BEADS_DIR": steered}, cwd=empty.parent)
        assert [issue["title"] for issue in json.loads(done.stdout)] == ["above"]
    (beads_workspace.beads / "redirect").write_text(str(empty) + "\n")
    lost = beads_workspace.run("list", "--json")
    assert (lost.returncode, lost.stdout, "no beads database found" in lost.stderr) == (1, "", True)
    (beads_workspace.beads / "redirect").write_text(str(empty / "nowhere") + "\n")
    assert [issue["title"] for issue in beads_workspace.all_issues().values()] == ["above"]


def test_flags_select_other_databases(beads_workspace: Workspace, other: Workspace, tmp_path: Path) -> None:
    """--db creates a missing one, --repo writes into another workspace, -C without a workspace fails."""
    made = beads_workspace.run("list", "--db", tmp_path / "new" / ".beads", "--json")
    assert (made.returncode, json.loads(made.stdout)) == (0, [])
    assert (tmp_path / "new").is_dir()
    for place in (beads_workspace.beads, beads_workspace.beads / "embeddeddolt" / "gt"):
        assert list(beads_workspace.json("list", "--db", place)) == []
    assert beads_workspace.run("create", "x", "--repo", other.directory).returncode == 0
    assert beads_workspace.all_issues() == {}
    assert len(other.all_issues()) == 1
    assert beads_workspace.run("-C", tmp_path / "person", "list", env={"BEADS_DIR": None}).returncode == 1


def test_the_workspace_is_searched_upwards_and_shared_by_git_worktrees(bd: Path, tmp_path: Path) -> None:
    """From any directory below it, and from a worktree of its repository."""
    workspace = Workspace(bd, tmp_path / "main", tmp_path / "person")
    workspace.directory.mkdir()
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"], ["worktree", "add", "-q", "../tree"]):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=workspace.directory, check=True
        )
    workspace.init()
    (workspace.directory / "a" / "b").mkdir(parents=True)
    for directory in (workspace.directory / "a" / "b", tmp_path / "tree"):
        told = workspace.run("where", "--json", env={"BEADS_DIR": None}, cwd=directory)
        assert json.loads(told.stdout)["path"] == str(workspace.beads)


REFUSED = [
    "create x",
    "q x",
    "update ONE -p 1",
    "close ONE",
    "reopen ONE",
    "delete ONE --force",
    "assign ONE a",
    "priority ONE 1",
    "tag ONE a",
    "note ONE a",
    "comment ONE a",
    "label add ONE a",
    "dep add ONE ONE",
    "link ONE ONE",
    "edit ONE",
    "defer ONE",
    "undefer ONE",
    "duplicate ONE",
    "supersede ONE",
    "epic close-eligible",
    "swarm create ONE",
    "merge-slot create",
    "mol bond a b",
    "set-state ONE a",
    "todo add a",
    "kv set a b",
    "remember a",
    "forget a",
    "batch",
    "gc",
    "prune",
    "purge",
    "compact",
    "flatten",
    "migrate",
    "rename-prefix a",
    "promote ONE",
    "ship a",
    "ready --claim",
    "worktree create a",
    "create-form",
    "human respond ONE",
]


def test_read_only_mode_refuses_the_listed_commands(beads_workspace: Workspace, one: str) -> None:
    """Each fails, and no issue has changed."""
    before = beads_workspace.all_issues()
    for words in REFUSED:
        done = beads_workspace.run("--readonly", *words.replace("ONE", one).split())
        assert done.returncode == 1, words
    assert beads_workspace.all_issues() == before


def test_read_only_mode_permits_some_writes(beads_workspace: Workspace, one: str, tmp_path: Path) -> None:
    """import, rename, config set and unset, and export -o."""
    file = tmp_path / "issues.jsonl"
    file.write_text(json.dumps({"id": one, "title": "imported", "status": "closed", "issue_type": "task"}))
    assert beads_workspace.run("--readonly", "import", file).returncode == 0
    assert beads_workspace.issue(one)["title"] == "imported"
    assert beads_workspace.run("--readonly", "rename", one, "gt-new").returncode == 0
    assert set(beads_workspace.all_issues()) == {"gt-new"}
    assert beads_workspace.run("--readonly", "config", "set", "status.custom", "done:done").returncode == 0
    assert beads_workspace.run("update", "gt-new", "-s", "done").returncode == 0
    assert beads_workspace.run("--readonly", "config", "unset", "status.custom").returncode == 0
    assert beads_workspace.run("--readonly", "export", "-o", tmp_path / "out").returncode == 0
    assert (tmp_path / "out").read_text()


def test_mail_runs_the_configured_program(beads_workspace: Workspace, tmp_path: Path) -> None:
    """In read-only mode too. Its status is bd's."""
    delegate = program(tmp_path / "delegate", f'echo "$@" > {tmp_path}/said; exit 7')
    done = beads_workspace.run("--readonly", "mail", "send", "--flag", env={"BEADS_MAIL_DELEGATE": str(delegate)})
    assert done.returncode == 7
    assert (tmp_path / "said").read_text().endswith("send --flag\n")


READING = [
    "show ONE",
    "list",
    "ready",
    "blocked",
    "children ONE",
    "count",
    "search one",
    "status",
    "statuses",
    "types",
    "history ONE",
    "dep list ONE",
    "dep tree ONE",
    "dep cycles",
    "label list ONE",
    "label list-all",
    "comments ONE",
    "config list",
    "info",
    "where",
    "version",
    "stale",
    "lint --json",
]


def test_reading_commands_change_nothing(beads_workspace: Workspace, one: str) -> None:
    """They succeed in read-only mode."""
    before = beads_workspace.all_issues()
    for words in READING:
        assert beads_workspace.run("--readonly", *words.replace("ONE", one).split()).returncode == 0, words
    assert beads_workspace.all_issues() == before


def test_bd_runs_git_and_programs_of_the_workspace(beads_workspace: Workspace, one: str, tmp_path: Path) -> None:
    """git at every call, through PATH. Hooks run after changes, without waiting, unless they are disabled."""
    path = f"{tmp_path / 'bin'}:{beads_workspace.environment['PATH']}"
    program(tmp_path / "bin" / "git", f"echo called >> {tmp_path}/git")
    beads_workspace.run("list", env={"PATH": path})
    assert (tmp_path / "git").exists()
    said = tmp_path / "said"
    for event in ("create", "update", "close"):
        program(beads_workspace.beads / "hooks" / f"on_{event}", f'echo "$1 $2 $(cat | wc -c)" >> {said}; exit 3')

    def has_run(event: str) -> bool:
        return said.exists() and f"{one} {event} " in said.read_text()

    for words in (("update", one, "-p", "1"), ("close", one)):
        assert beads_workspace.run(*words, env={"BD_NO_HOOKS": "1"}).returncode == 0
        assert beads_workspace.run(*words).returncode == 0
        until(partial(has_run, words[0]), "the hook has run")
    assert len(said.read_text().splitlines()) == 2
