"""Which bd is run, with which environment, and which calls are never made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bonobofs.beads import IssueStore, NewIssue, find_beads
from bonobofs.beads.bd_arguments import FLAGS, command
from bonobofs.errors import BeadsError, UsageError
from bonobofs.policy.decision import Permit
from bonobofs.policy.request import Principal
from tests.beads.conftest import ALICE
from tests.fakes.faulty_bd import Faulty
from tests.support.beads_workspace import WORLD, Workspace, find_bd
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, NOBODY, Mounted, OrdinaryUser


def program(path: Path, text: str) -> Path:
    """A program of Python that stands for bd."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable} -S\nimport json, os, sys\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def place(source: Path) -> Path:
    """A `.beads` in which there is nothing."""
    (source / ".beads").mkdir()
    return find_beads(source)


def asked(place: Path, home: Path, bd: Path | None) -> None:
    with IssueStore(place, home, ALICE, program=bd).locked_client() as client:
        client.all_issues()


@pytest.mark.parametrize("version", ["0.49.6", "1.0.3", "2.0.0", "10.1.0"])
def test_an_unknown_version_is_refused(place: Path, home: Path, tmp_path: Path, version: str) -> None:
    """The message names it and the version to install."""
    bd = program(tmp_path / "bd", f"print(json.dumps({{'data': {{'version': {version!r}}}, 'schema_version': 1}}))")
    with pytest.raises(BeadsError, match=f"bd {version}, which is not supported; install bd 1.0.5"):
        asked(place, home, bd)


@pytest.mark.parametrize("version", ["1.0.4", "1.0.5", "1.3.2", "1.2.2-dc4"])
@pytest.mark.parametrize(
    "form", ["{'data': {'version': V}, 'schema_version': 1}", "{'version': V}", "f'bd version {V}'"]
)
def test_a_version_is_read_from_every_form(place: Path, home: Path, tmp_path: Path, version: str, form: str) -> None:
    """JSON in an envelope, JSON, and text. The next call asks for the location of the database."""
    told = form if form.startswith("f") else f"json.dumps({form})"
    bd = program(tmp_path / "bd", f"V = {version!r}\nif 'version' in sys.argv: print({told})")
    with pytest.raises(BeadsError, match="does not find its issues"):
        asked(place, home, bd)


@pytest.mark.parametrize("text", ["pass", "print('hello')", "sys.exit('Error: no')", "print('bd 1.0.5'); sys.exit(1)"])
def test_a_program_without_a_version_gets_no_further_call(place: Path, home: Path, tmp_path: Path, text: str) -> None:
    """For any program."""
    with pytest.raises(BeadsError, match="does not print its version"):
        asked(place, home, program(tmp_path / "bd", text))


def test_a_missing_bd_is_an_error_with_the_installation(
    place: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If PATH has none, if the environment names a missing one, or if it is not executable."""
    monkeypatch.delenv("BONOBOFS_BD", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BeadsError, match=r"no bd on PATH; install bd 1\.0\.5 .* releases of Beads"):
        asked(place, home, None)
    monkeypatch.setenv("BONOBOFS_BD", str(tmp_path / "none"))
    with pytest.raises(BeadsError, match=r"BONOBOFS_BD names .*/none, which is no program; install"):
        asked(place, home, None)
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    with pytest.raises(BeadsError, match="cannot be started: Exec format error; install"):
        asked(place, home, tmp_path / "text")


def test_a_bd_that_an_agent_could_write_is_not_run(
    place: Path,
    home: Path,
    source: Path,
    tmp_path: Path,
    mounted: Mounted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bd in a mount, in the workspace or in a session directory, or one that another bd's directory has."""
    world = mounted(policy=ALLOW_ALL)
    monkeypatch.delenv("BONOBOFS_BD", raising=False)
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "empty").mkdir()
    for directory in (source, world.path, home / "sessions" / "1" / "bin"):
        program(directory / "bd", "raise AssertionError")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "bd").symlink_to(source / "bd")
    with monkeypatch.context() as changing:
        for directory in (source, world.path, tmp_path / "link", home / "sessions" / "1" / "bin", Path(".")):
            changing.setenv("PATH", f"{directory}:{tmp_path / 'empty'}:")
            changing.chdir(source if directory == Path(".") else tmp_path)
            with pytest.raises(BeadsError, match="outside of the directories that agents can write; install"):
                asked(place, home, None)
        for name, value in (("PATH", tmp_path / "linked"), ("BONOBOFS_BD", world.path / "bd")):
            changing.setenv(name, str(value))
            with pytest.raises(BeadsError, match="is not run, because agents can write it"):
                asked(place, home, None)


def test_bd_inherits_nothing_from_the_caller(
    beads_workspace: Workspace, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, permit: Permit
) -> None:
    """Environment, working directory, standard input and descriptors are set by the gate."""
    (tmp_path / "kept").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'kept'}::relative:{os.environ['PATH']}")
    for name in ("BD_ACTOR", "BEADS_ACTOR", "BEADS_DB", "BD_READONLY", "EDITOR", "LD_PRELOAD", "GIT_DIR"):
        monkeypatch.setenv(name, "caller's")
    telling = f"""
with open({str(tmp_path / "told")!r}, "a") as file:
    print(json.dumps({{
        "env": dict(os.environ), "cwd": os.getcwd(), "stdin": os.readlink("/proc/self/fd/0"), "argv": sys.argv[1:],
        "group": os.getpgid(0) == os.getpid(), "open": [os.readlink(f"/proc/self/fd/{{n}}") for n in range(3, 9)
            if os.path.lexists(f"/proc/self/fd/{{n}}")],
    }}), file=file)
os.execv({str(beads_workspace.bd)!r}, ["bd", *sys.argv[1:]])"""
    bd = program(tmp_path / "bd", telling)
    secret = (tmp_path / "secret").open("w")
    os.set_inheritable(secret.fileno(), True)
    with secret, IssueStore(find_beads(beads_workspace.directory), home, ALICE, program=bd).locked_client() as client:
        client.create_issue(NewIssue("one"), permit)
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [each["argv"][0] for each in told] == ["version", "where", "list", "create", "list"]
    for each in told:
        assert set(each["env"]) - {"LC_CTYPE"} == {
            "PATH", "HOME", "LC_ALL", "BEADS_DIR", "BD_JSON_ENVELOPE", "BD_NON_INTERACTIVE", "BD_NO_HOOKS",
            "BD_NO_PAGER", "GIT_AUTHOR_EMAIL", "GIT_CEILING_DIRECTORIES", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_NOSYSTEM",
            "GIT_TERMINAL_PROMPT",
        }  # fmt: skip
        assert each["env"]["BEADS_DIR"] == str(beads_workspace.beads)
        assert "relative" not in each["env"]["PATH"].split(":")
        assert Path(each["env"]["HOME"]).is_relative_to(home)
        assert Path(each["cwd"]).is_relative_to(home)
        assert not list(Path(each["cwd"]).iterdir())
        assert each["stdin"] == "/dev/null"
        assert each["group"]
        assert not [path for path in each["open"] if "secret" in path or "trails" in path]
        assert each["argv"][0] == "version" or "--actor=alice" in each["argv"]


def test_no_file_in_beads_sets_the_actor(beads: IssueStore, beads_workspace: Workspace, permit: Permit) -> None:
    """Neither .env nor the configuration. Its hooks are not run."""
    (beads_workspace.beads / ".env").write_text("BD_ACTOR=bob\nBEADS_ACTOR=bob\nGIT_AUTHOR_EMAIL=bob@x\n")
    (beads_workspace.beads / "config.yaml").write_text("actor: bob\n")
    hooks = beads_workspace.beads / "hooks"
    for event in ("create", "update", "close"):
        program(hooks / f"on_{event}", f"open({str(beads_workspace.person / 'ran')!r}, 'a')")
    with beads.locked_client() as client:
        made = client.create_issue(NewIssue("one"), permit).issue
        client.add_comment(made.id, "hello", permit)
        client.close_issue(made.id, permit)
        assert [each.author for each in client.comments(made.id)] == ["alice"]
    assert (made.created_by, made.owner) == ("alice", f"{ALICE.id}@bonobofs.invalid")
    # A hook of an ordinary call, to know that they would have run by now.
    program(hooks / "on_update", f"open({str(beads_workspace.person / 'ordinary')!r}, 'a')")
    beads_workspace.json("update", made.id, "-p", "1")
    until((beads_workspace.person / "ordinary").exists, "a hook runs")
    assert not (beads_workspace.person / "ran").exists()


@pytest.mark.root
def test_root_runs_bd_as_the_owner_of_the_issues(
    ordinary_user: OrdinaryUser, home: Path, permit: Permit, bd: Path
) -> None:
    """Files in .beads control bd. New files belong to that user too, and no temporary file is left."""
    said = ordinary_user.directory / "said"
    text = f"""
with open({str(said)!r}, "a") as file:
    print(os.getresuid(), os.getresgid(), os.getgroups(), os.getcwd(), os.environ["HOME"], file=file)
os.execv({str(bd)!r}, ["bd", *sys.argv[1:]])"""
    other = program(ordinary_user.directory / "bd", text)
    if find_bd() == WORLD:
        lines = ["import runpy", f"runpy.run_path({str(WORLD)!r}, run_name='__main__')"]
        (ordinary_user.directory / "world").write_text("\n".join((f"#!{ordinary_user.python} -S", *lines)))
        (ordinary_user.directory / "world").chmod(0o755)
        other.write_text(other.read_text().replace(str(bd), str(ordinary_user.directory / "world")))
    other.write_text(other.read_text().replace(sys.executable, ordinary_user.python))
    source = ordinary_user.directory / "source"
    made = {"BEADS_DIR": str(source / ".beads")}
    done = ordinary_user.run(other, "init", "--stealth", "--non-interactive", "--quiet", "--prefix", "gt", env=made)
    assert done.returncode == 0, done.stderr
    said.unlink()
    before = set(Path("/run").iterdir())
    with IssueStore(find_beads(source), home, ALICE, program=other).locked_client() as client:
        client.create_issue(NewIssue("one"), permit)
    assert set(Path("/run").iterdir()) == before
    for line in said.read_text().splitlines():
        assert line.startswith(f"{(NOBODY,) * 3} {(NOBODY,) * 3} [{NOBODY}] /run/bonobofs-bd-")
    assert {path.lstat().st_uid for path in source.rglob("*")} == {NOBODY}


def test_an_agent_without_a_name_cannot_act(place: Path, home: Path) -> None:
    """bd would use another name."""
    with pytest.raises(UsageError, match="without a name"):
        IssueStore(place, home, Principal(" ", "0b5c1f2a", "agent"))


def test_an_agent_name_may_look_like_a_flag(beads_workspace: Workspace, home: Path, permit: Permit) -> None:
    agent = Principal("--force", ALICE.id, "agent")
    with IssueStore(
        find_beads(beads_workspace.directory), home, agent, program=beads_workspace.bd
    ).locked_client() as client:
        assert client.create_issue(NewIssue("one"), permit).issue.created_by == "--force"


def test_a_redirect_is_not_followed(beads: IssueStore, beads_workspace: Workspace, tmp_path: Path) -> None:
    """Also if it appears between two calls."""
    with beads.locked_client() as client:
        client.all_issues()
    (beads_workspace.beads / "redirect").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BeadsError, match="leads to other issues"), beads.locked_client():
        pass


def test_a_removed_beads_is_not_replaced_by_another(beads: IssueStore, beads_workspace: Workspace) -> None:
    """bd itself would search for one in other directories."""
    with beads.locked_client() as client:
        client.all_issues()
    beads_workspace.beads.rename(beads_workspace.directory / "moved")
    with pytest.raises(BeadsError, match=r"cannot open the lock of .*: No such file"), beads.locked_client():
        pass


def test_the_location_of_the_database_is_read_first_and_after_configuration_changes(
    beads_workspace: Workspace, home: Path, faulty: Faulty
) -> None:
    """And not at every call."""
    beads = IssueStore(find_beads(beads_workspace.directory), home, ALICE, program=faulty.path)
    for _ in range(2):
        with beads.locked_client() as client:
            client.all_issues()
    assert faulty.called() == ["version", "where", "list", "list"]
    (beads_workspace.beads / ".env").write_text("A=b\n")
    with beads.locked_client():
        pass
    assert faulty.called()[4:] == ["version", "where"]


@pytest.mark.parametrize("key", ["path", "database_path"])
def test_a_bd_with_another_location_gets_no_further_call(place: Path, home: Path, tmp_path: Path, key: str) -> None:
    """Or whose database is in another directory."""
    told = {"version": "1.0.5", "path": str(place), "database_path": str(place / "x"), key: str(tmp_path / ".beads")}
    bd = program(tmp_path / "bd", f"print({json.dumps(told)!r})")
    with pytest.raises(BeadsError, match=r"bd works in .* and not in"):
        asked(place, home, bd)


def test_an_issue_created_in_another_workspace_is_reported(
    bd: Path, beads_workspace: Workspace, home: Path, tmp_path: Path, permit: Permit
) -> None:
    """bd may be configured to create issues in another workspace."""
    other = Workspace(bd, tmp_path / "other", tmp_path / "person").init()
    led = f"if sys.argv[1] == 'create': os.environ['BEADS_DIR'] = {str(other.beads)!r}"
    leading = program(tmp_path / "bd", f"{led}\nos.execv({str(bd)!r}, ['bd', *sys.argv[1:]])")
    astray = IssueStore(find_beads(beads_workspace.directory), home, ALICE, program=leading)
    with astray.locked_client() as client, pytest.raises(BeadsError, match="not among these issues") as raised:
        client.create_issue(NewIssue("one"), permit)
    assert raised.value.carried_out is None
    (id_,) = other.all_issues()
    assert id_ in str(raised.value)


def test_a_source_without_beads_is_an_error_with_the_remedy(source: Path) -> None:
    with pytest.raises(BeadsError, match="bd init"):
        find_beads(source)


def test_a_beads_that_leads_into_the_workspace_is_not_used(source: Path, tmp_path: Path) -> None:
    """An agent could write the files that control bd there. A target outside is the operator's choice."""
    (source / "docs").mkdir()
    (source / ".beads").symlink_to("docs")
    with pytest.raises(BeadsError, match="agents can write"):
        find_beads(source)
    (source / ".beads").unlink()
    (tmp_path / "kept").mkdir()
    (source / ".beads").symlink_to(tmp_path / "kept")
    assert find_beads(source) == tmp_path / "kept"


def test_a_worktree_has_the_beads_of_its_repository(
    beads_workspace: Workspace, home: Path, tmp_path: Path, permit: Permit
) -> None:
    """Also if a copy of them was checked out. A directory that only claims to be a worktree does not."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(beads_workspace.directory)]
    for words in (["init", "-q"], ["add", "-f", ".beads/README.md"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    tree = tmp_path / "tree"
    subprocess.run([*git, "worktree", "add", "-q", tree], check=True)
    assert (tree / ".beads").is_dir()
    assert find_beads(tree) == find_beads(beads_workspace.directory)
    with IssueStore(find_beads(tree), home, ALICE, program=beads_workspace.bd).locked_client() as client:
        made = client.create_issue(NewIssue("one"), permit).issue
    assert made.id in beads_workspace.all_issues()
    liar = tmp_path / "liar"
    (liar / ".beads").mkdir(parents=True)
    (liar / ".git").write_text((tree / ".git").read_text())
    assert find_beads(liar) == liar / ".beads"


def test_no_argument_adds_another_flag() -> None:
    """No flag that selects another database, reads a file, chooses an id or overrides the gate."""
    steering = {"db", "repo", "directory", "actor", "id", "file", "body-file", "graph", "deps", "ephemeral", "claim"}
    assert not steering & {flag for flags in FLAGS.values() for flag in flags}
    assert [name for name, flags in FLAGS.items() if "force" in flags] == ["delete"]
    with pytest.raises(KeyError):
        command("create", "alice", [("id", "gt-1")])
    with pytest.raises(KeyError):
        command("import", "alice")


@pytest.mark.parametrize("label", ["a,b", "", " a", 'a"b', "a\nb", "a\0b", "x" * 256])
def test_a_label_that_bd_would_change_is_refused(beads: IssueStore, permit: Permit, label: str) -> None:
    """In a new issue and in an existing one."""
    with beads.locked_client() as client:
        with pytest.raises(UsageError):
            client.create_issue(NewIssue("x", labels=(label,)), permit)
        made = client.create_issue(NewIssue("x"), permit).issue
        for change in ({"add_labels": [label]}, {"remove_labels": [label]}):
            with pytest.raises(UsageError):
                client.update_issue(made.id, permit, **change)  # type: ignore[arg-type] # one of the two


@pytest.mark.parametrize("text", ["a\0b", "\udcff", "x" * 200_000])
def test_a_text_that_cannot_be_an_argument_is_refused(beads: IssueStore, permit: Permit, text: str) -> None:
    """NUL, invalid UTF-8, and more bytes than the kernel accepts."""
    with beads.locked_client() as client, pytest.raises(UsageError):
        client.create_issue(NewIssue("x", description=text), permit)


@pytest.mark.parametrize(
    "text", ["--", "--force", "@/etc/passwd", "$(id)", "; rm -rf /", 'it\'s "so"', "ä\u2028\x1b[31m"]
)
def test_a_text_is_stored_unchanged(beads: IssueStore, permit: Permit, tmp_path: Path, text: str) -> None:
    """In every field, and as a reason."""
    with beads.locked_client() as client:
        new = NewIssue(text, description=text, design=text, acceptance=text, notes=text, assignee=text)
        made = client.create_issue(new, permit).issue
        assert (made.title, made.description, made.design, made.acceptance, made.notes) == (text,) * 5
        assert client.update_issue(made.id, permit, notes=text + text, assignee="").issue.notes == text + text
        assert client.close_issue(made.id, permit, reason=text).issue.close_reason == text


def test_metadata_that_break_the_list_of_bd_are_refused(beads: IssueStore, permit: Permit) -> None:
    """Control characters, in a key or in a value, and no others."""
    harmless = {"k\t\n\x7f\\u0001": ["\b\f\r", "\\"]}
    with beads.locked_client() as client:
        for metadata in ({"\x01": 1}, {"k": {"l": ["\x1b"]}}, {"k": "\\\0"}):
            with pytest.raises(UsageError, match="control characters"):
                client.create_issue(NewIssue("x", metadata=metadata), permit)
        made = client.create_issue(NewIssue("x", metadata=harmless), permit).issue
        with pytest.raises(UsageError, match="control characters"):
            client.update_issue(made.id, permit, metadata={"k": "\x1f"})
        assert harmless.items() <= client.all_issues(fresh=True)[made.id].metadata.items()


def test_a_description_of_one_dash_is_refused(beads: IssueStore, permit: Permit) -> None:
    """bd would read standard input. In every other field "-" is a text."""
    with beads.locked_client() as client:
        with pytest.raises(UsageError, match="standard input"):
            client.create_issue(NewIssue("x", description="-"), permit)
        made = client.create_issue(NewIssue("-", design="-", acceptance="-", notes="-", assignee="-"), permit).issue
        assert (made.title, made.design, made.acceptance, made.notes, made.assignee) == ("-",) * 5
        with pytest.raises(UsageError, match="standard input"):
            client.update_issue(made.id, permit, description="-", notes="x")
        assert client.update_issue(made.id, permit, description="- ").issue.notes == "-"
        client.add_comment(made.id, "-", permit)
        assert [comment.text for comment in client.comments(made.id)] == ["-"]
        assert client.close_issue(made.id, permit, reason="-").issue.close_reason == "-"


def test_a_file_name_in_metadata_is_not_read(beads: IssueStore, permit: Permit, tmp_path: Path) -> None:
    """Metadata is passed as JSON, in which a file name is a text."""
    (tmp_path / "secret").write_text('{"secret": 1}')
    with beads.locked_client() as client:
        made = client.create_issue(NewIssue("x", metadata={"@" + str(tmp_path / "secret"): "@"}), permit).issue
    assert "secret" not in made.metadata


def test_an_update_cannot_close_an_issue(beads: IssueStore, permit: Permit) -> None:
    """bd would close a blocked issue."""
    with beads.locked_client() as client:
        made = client.create_issue(NewIssue("x"), permit).issue
        with pytest.raises(UsageError, match="by closing it"):
            client.update_issue(made.id, permit, status="closed")


def test_only_an_issue_created_under_the_same_lock_can_be_deleted(beads: IssueStore, permit: Permit) -> None:
    """And once."""
    with beads.locked_client() as client:
        first = client.create_issue(NewIssue("x"), permit)
    with beads.locked_client() as client:
        second = client.create_issue(NewIssue("y"), permit)
        assert set(client.undo_create(second, permit)) == {first.issue.id}
        for made in (first, second):
            with pytest.raises(UsageError, match="not created just now"):
                client.undo_create(made, permit)


def test_after_the_lock_is_released_no_call_is_made(beads: IssueStore) -> None:
    """Each call of bd needs the lock."""
    with beads.locked_client() as client:
        pass
    with pytest.raises(RuntimeError):
        client.all_issues()


def test_two_callers_never_have_the_lock_together(
    beads: IssueStore, beads_workspace: Workspace, home: Path, permit: Permit
) -> None:
    """The issues do not change between read and change: of ten increments none is lost."""
    one = beads_workspace.create("0")

    def count_up() -> None:
        with beads.locked_client() as client:
            title = client.all_issues()[one].title
            client.update_issue(one, permit, title=str(int(title) + 1))

    threads = [threading.Thread(target=count_up) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert beads_workspace.issue(one)["title"] == "5"


def test_a_thousand_issues_are_read_and_changed(
    beads_workspace: Workspace, home: Path, faulty: Faulty, permit: Permit
) -> None:
    """With one list before and one after."""
    lines = [
        {"id": f"gt-{n}", "title": f"issue {n}", "status": "open", "issue_type": "task", "description": "x" * 500}
        for n in range(1000)
    ]
    file = beads_workspace.person / "issues.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert beads_workspace.run("import", file).returncode == 0
    with IssueStore(find_beads(beads_workspace.directory), home, ALICE, program=faulty.path).locked_client() as client:
        assert len(client.all_issues()) == 1000
        assert client.add_dependency("gt-1", "gt-999", "blocks", permit).issue.edges
    assert faulty.called()[2:] == ["list", "dep add", "list"]
