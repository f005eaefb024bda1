"""The session's `bd`: bd's own command line, under the rules, for the source and in the mount."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.errors import UsageError
from bonobofs.ipc.client import call
from bonobofs.policy.decision import Code, Refused
from bonobofs.state.home import inside_directory
from tests.support.beads_workspace import Workspace
from tests.support.wait import until
from tests.support.world import Mounted, World

LEAD = """
default = "allow"
hidden = ["**"]
[[protect]]
paths = ["**/.beads/"]
[role.agent]
write = ["**"]
beads = ["create", "update", "close", "dep", "label", "comment", "reopen", "epic"]
[role.reader]
write = ["**"]
"""


class Inside:
    """A mount, and its bd."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.directory = inside_directory(world.home, world.session.session)

    def __call__(self, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run bd as an agent does, in the mount."""
        return subprocess.run(
            [self.directory / "bin" / "bd", *words],
            cwd=self.world.path,
            env={"PATH": "/usr/bin:/bin", **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            timeout=60,
        )

    def json(self, *words: str) -> Any:
        done = self(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def refused(self, *words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        """The decision on a command line that is refused."""
        done = self(*words, env=env)
        assert (done.returncode, done.stdout) == (77, "")
        document, told = done.stderr.splitlines()
        decision: dict[str, Any] = json.loads(document)
        assert told.startswith(f"bd: {decision['reason']} ")
        assert told.endswith(decision["instead"])
        return decision

    def calls(self) -> list[AuditEntry]:
        """What the gate has entered, one entry for each call."""
        return [
            entry
            for entry in self.world.entries()
            if entry.guard == "beads" and entry.kind in ("intent", "event") and entry.operation != "out_of_band"
        ]

    def alerts(self) -> list[AuditEntry]:
        return [entry for entry in self.world.entries() if entry.kind == "alert" or entry.operation == "out_of_band"]


@pytest.fixture
def inside(beads_workspace: Workspace, mounted: Mounted, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Inside]:
    monkeypatch.setenv("BONOBOFS_BD", str(beads_workspace.bd))

    def mount(**order: Any) -> Inside:
        return Inside(mounted(**{"policy": LEAD, **order}))

    return mount


def test_an_agent_uses_the_bd_command_line(inside: Callable[..., Inside], beads_workspace: Workspace) -> None:
    """It creates, claims, labels, orders, comments and closes issues, and reads the real bd's output."""
    bd = inside()
    epic = bd.json("create", "All of it", "-t", "epic", "-p1")["id"]
    one = bd(
        "create", "One part", "--parent", epic, "-l", "phase:build,unit:3", "-d", "what", "--silent"
    ).stdout.strip()
    other = bd.json("create", "--title=-x", "--deps", one)["id"]
    (taken,) = bd.json("update", one, "--claim")
    assert (taken["assignee"], taken["status"]) == ("alice", "in_progress")
    assert bd.json("dep", "add", other, epic, "-t", "related")["status"] == "added"
    assert bd("label", "add", one, "stage:x").returncode == 0
    assert bd("comment", one, "going", "well").returncode == 0
    assert one not in {each["id"] for each in bd.json("ready")}
    (closed,) = bd.json("close", one, "-r", "built")
    assert (closed["status"], closed["close_reason"]) == ("closed", "built")
    assert [each["id"] for each in bd.json("list", "-s", "closed")] == [one]
    assert other in bd("list").stdout
    assert beads_workspace.issue(one)["created_by"] == "alice"
    assert [comment["author"] for comment in bd.json("comments", one)] == ["alice"]
    assert [entry.tool for entry in bd.calls()][:3] == ["bd create"] * 3
    assert bd.alerts() == []


def test_a_change_against_the_rules_is_refused_with_the_reason(
    inside: Callable[..., Inside], beads_workspace: Workspace
) -> None:
    bd = inside()
    bobs = beads_workspace.create("Bob's", "--assignee=bob")
    free = beads_workspace.create("Free")
    decision = bd.refused("update", bobs, "-p0")
    assert (decision["code"], decision["rule"], decision["subcommand"]) == ("BEADS", "beads.owner", "update")
    assert "bob" in decision["about"]
    assert bd.refused("close", free[:-1])["rule"] == "beads.exists"
    assert bd.refused("update", free, "-s", "done")["rule"] == "beads.status"
    assert bd.refused("create", "x", "-t", "message")["rule"] == "beads.message"
    assert bd.refused("dep", "add", free, free)["rule"] == "beads.cycle"
    both = bd("close", bobs, free)
    assert (both.returncode, f"Closed {free}" in both.stdout, "beads.owner" in both.stderr) == (77, True, True)
    assert [entry.details["issue"] for entry in bd.calls() if entry.operation == "close_issue"] == [
        free[:-1],
        bobs,
        free,
    ]
    reader = inside(agent="ray", role="reader")
    assert reader.refused("create", "x")["code"] == "ROLE"
    assert reader("list").returncode == 0
    nobody = inside(agent="nell", role="undefined")
    assert [nobody.refused(word)["rule"] for word in ("list", "help")] == ["role", "role"]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("init",), "command"),
        (("import", "x.jsonl"), "command"),
        (("delete", "gt-1", "--force"), "command"),
        (("export", "-o", "/tmp/x"), "command"),
        (("list", "--db", "/tmp/x"), "flag"),
        (("--actor=bob", "create", "x"), "flag"),
        (("create", "x", "--id=gt-1"), "flag"),
        (("-C", "/tmp", "list"), "flag"),
        (("create", "x", "-d", "@/etc/passwd"), "file"),
        (("close",), "form"),
    ],
)
def test_every_other_command_line_is_refused_and_recorded(
    inside: Callable[..., Inside], beads_workspace: Workspace, words: tuple[str, ...], rule: str
) -> None:
    bd = inside()
    assert bd.refused(*words)["rule"] == f"beads.{rule}"
    (entry,) = bd.calls()
    assert (entry.result, entry.tool, entry.details["command"]) == ("denied", "bd", list(words))
    assert beads_workspace.all_issues() == {}


def test_the_environment_has_no_effect(
    inside: Callable[..., Inside], beads_workspace: Workspace, tmp_path: Path
) -> None:
    bd = inside()
    for variable in ("BEADS_DIR", "BEADS_DB", "BD_ACTOR", "BEADS_ACTOR", "BD_DB", "BD_FORCE", "BEADS_X"):
        assert bd.refused("create", "x", env={variable: str(tmp_path)})["rule"] == "beads.environment"
    elsewhere = Workspace(beads_workspace.bd, tmp_path / "elsewhere", tmp_path / "other").init("xx")
    made = bd("create", "x", "--silent", env={"HOME": str(elsewhere.directory), "BD_JSON": "true", "USER": "bob"})
    assert made.stdout.startswith("gt-")
    assert elsewhere.all_issues() == {}


def test_direct_calls_of_the_socket_obey_the_same_rules(inside: Callable[..., Inside]) -> None:
    bd = inside()
    made = call(bd.directory, "beads.create", title="A", type="bug", priority=0, labels=["unit:a"])
    assert (made["issue_type"], made["priority"], made["created_by"]) == ("bug", 0, "alice")
    other = call(bd.directory, "beads.create", title="B")
    assert call(bd.directory, "beads.update", issue=made["id"], status="in_progress")["status"] == "in_progress"
    assert call(bd.directory, "beads.label", issue=made["id"], add=["unit:b"])["labels"] == ["unit:a", "unit:b"]
    assert call(bd.directory, "beads.tie", issue=other["id"], other=made["id"], type="waits-for")["dependencies"]
    assert "dependencies" not in call(bd.directory, "beads.untie", issue=other["id"], other=made["id"])
    assert call(bd.directory, "beads.comment", issue=made["id"], text="said")["id"] == made["id"]
    assert call(bd.directory, "beads.close", issue=made["id"], reason="done")["close_reason"] == "done"
    assert call(bd.directory, "beads.reopen", issue=made["id"])["status"] == "open"
    with pytest.raises(Refused) as refused:
        call(bd.directory, "beads.close", issue="gt-none")
    assert (refused.value.decision.code, refused.value.decision.rule) == (Code.BEADS, "beads.exists")
    for wrong in ({"issue": 3}, {}, {"issue": made["id"], "force": True}):
        with pytest.raises(UsageError):
            call(bd.directory, "beads.close", **wrong)
    with pytest.raises(Refused):
        call(bd.directory, "beads.create", title="A", id="gt-1")
    with pytest.raises(UsageError):
        call(bd.directory, "beads.bd", arguments="list", variables=[])


FORMS = (
    ".beads/embeddeddolt/gt/.dolt/noms/manifest",
    ".beads/embeddeddolt/.lock",
    ".beads/dolt/gt/x",
    ".beads/beads.db",
    ".beads/beads.db-wal",
    ".beads/.env",
    ".beads/config.yaml",
    ".beads/metadata.json",
    ".beads/redirect",
    ".beads/hooks/on_create",
    ".beads/issues.jsonl",
    ".beads/interactions.jsonl",
    ".beads/.local_version",
    ".beads/.gitignore",
    ".beads/bd.sock",
    ".beads/last-touched",
    "sub/.beads/redirect",
)


@pytest.mark.parametrize("policy", [None, "shipped"])
def test_the_files_that_control_bd_are_read_only_in_the_mount(
    inside: Callable[..., Inside], beads_workspace: Workspace, policy: str | None
) -> None:
    """Every form of bd's state, existing or not, and a `.beads` that does not exist yet."""
    (beads_workspace.directory / "sub").mkdir()
    bd = inside() if policy is None else inside(policy=None)
    before = sorted(beads_workspace.directory.rglob("*"))
    for form in FORMS:
        path = bd.world.path / form
        with pytest.raises(OSError, match=r"Read-only|No such file"):
            path.write_text("x")
        with pytest.raises(OSError, match=r"Read-only|File exists|No such file"):
            path.parent.mkdir()
    with pytest.raises(OSError, match="Read-only"):
        os.rename(bd.world.path / ".beads", bd.world.path / "gone")
    with pytest.raises(OSError, match="Read-only"):
        os.symlink("sub", bd.world.path / "sub" / ".beads")
    assert sorted(beads_workspace.directory.rglob("*")) == before


def test_no_beads_can_be_created_in_the_mount(inside: Callable[..., Inside], beads_workspace: Workspace) -> None:
    """No file, no moved or linked directory, and none below a moved directory."""
    (beads_workspace.directory / "sub").mkdir()
    (beads_workspace.directory / "kept" / ".beads").mkdir(parents=True)
    (beads_workspace.directory / "kept" / ".beads" / "redirect").write_text("/elsewhere\n")
    place = inside().world.path
    (place / "made").mkdir()
    (place / "made" / "redirect").write_text("/elsewhere\n")
    (place / "a.md").write_text("/elsewhere\n")
    for target in (place / "sub" / ".beads", place / "made" / ".beads"):
        with pytest.raises(OSError, match="Read-only"):
            target.write_text("x")
        with pytest.raises(OSError, match="Read-only"):
            os.mkfifo(target)
        with pytest.raises(OSError, match="Read-only"):
            os.link(place / "a.md", target)
        for moved in ("a.md", "made"):
            with pytest.raises(OSError, match=r"Read-only|Invalid argument"):
                os.rename(place / moved, target)
        assert not os.path.lexists(target)
    changes: tuple[Callable[[], object], ...] = (
        lambda: os.unlink(place / "kept" / ".beads" / "redirect"),
        lambda: os.rename(place / "kept" / ".beads" / "redirect", place / "out"),
        lambda: os.link(place / "kept" / ".beads" / "redirect", place / "out"),
        lambda: os.chmod(place / "kept" / ".beads" / "redirect", 0o600),
        lambda: os.truncate(place / "kept" / ".beads" / "redirect", 0),
        lambda: os.rename(place / "kept" / ".beads", place / "sub" / "beads"),
    )
    for change in changes:
        with pytest.raises(OSError, match="Read-only"):
            change()
    assert (beads_workspace.directory / "kept" / ".beads" / "redirect").read_text() == "/elsewhere\n"


def test_a_change_of_the_issues_without_the_gate_is_out_of_band(
    inside: Callable[..., Inside], beads_workspace: Workspace
) -> None:
    """The writes of the gate's own bd are not, in this mount or another, also when it only reads."""
    bd, other = inside(), inside(agent="bob")
    bd("create", "x")
    bd("list")
    other("show", "gt-none")
    assert (bd.alerts(), other.alerts()) == ([], [])
    numbers = itertools.count()

    def is_told() -> bool:
        (beads_workspace.beads / "config.yaml").write_text(f"actor: eve{next(numbers)}\n")
        return any(".beads" in entry.path for entry in bd.alerts())

    until(is_told, "the change was entered")
