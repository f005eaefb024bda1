"""`why` explains the decision about an operation without performing it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bonobofs.policy.decision import ERRNO, Code
from bonobofs.state import project_policies
from bonobofs.state.home import inside_directory
from tests.support.world import ALLOW_ALL, Mounted, bonobofs


def _why(*arguments: str | Path, code: int, cwd: Path) -> dict[str, Any]:
    asked = bonobofs("why", "--json", *arguments, cwd=cwd)
    assert asked.returncode == code, asked.stderr + asked.stdout
    answer = json.loads(asked.stdout)
    assert isinstance(answer, dict)
    assert set(answer) == {"allowed", "code", "rule", "reason", "instead", "path", "operation"}
    assert answer["allowed"] is (code == 0)
    return answer


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["aidlc-docs/plan.md"], None),
        (["aidlc-docs/new/"], None),
        (["aidlc-docs/plan.md", "--size", "1MB"], None),
        (["aidlc-docs/plan.md", "--size", "1000001"], "SIZE"),
        (["aidlc-docs/plan.txt"], "SUFFIX"),
        (["elsewhere.md"], "DEFAULT"),
        ([".git/config"], "PROTECTED"),
        (["aidlc-docs/.hidden.md"], "HIDDEN"),
        (["../x.md"], "OUTSIDE"),
        (["aidlc-docs/../../x.md"], "OUTSIDE"),
        (["/etc/passwd"], "OUTSIDE"),
        (["README.md", "--op", "delete_file"], "KEEP"),
        (["aidlc-docs/dev", "--op", "mknod"], "DEVICE"),
        (["aidlc-docs/plan.md", "--role", "control"], "ROLE"),
        ([".git/config", "--op", "read_file", "--role", "control"], None),
        ([".", "--op", "merge", "--role", "lead"], None),
        ([".", "--op", "merge", "--role", "worker"], "ROLE"),
        ([".", "--op", "create_epic"], "ROLE"),
    ],
)
def test_why_returns_the_code_of_the_rule(arguments: list[str], expected: str | None, source: Path) -> None:
    """Exit 0 without a code, or 77 with the code, in the schema of decisions."""
    answer = _why(*arguments, code=0 if expected is None else 77, cwd=source)
    assert answer["code"] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["aidlc-docs/sedAb12Cd"], "temporary"),
        (["aidlc-docs/held.tmp"], "temporary"),
        (["aidlc-docs/there.tmp"], None),
        (["aidlc-docs/there.tmp", "--op", "delete_file"], None),
        (["node_modules/x/index.js"], "scratch:**/node_modules/"),
        (["build/", "--op", "mkdir"], "scratch:build/"),
        (["node_modules/.git/config"], None),
    ],
)
def test_why_names_the_layer_of_an_allowed_change(arguments: list[str], expected: str | None, source: Path) -> None:
    """A source file with a temporary name is no staged file; the rules apply."""
    (source / "aidlc-docs").mkdir()
    (source / "aidlc-docs" / "there.tmp").touch()
    answer = _why(*arguments, code=0 if expected else 77, cwd=source)
    if expected:
        assert answer["rule"] == expected
        assert "session" in answer["reason"]
        told = bonobofs("why", *arguments, cwd=source).stdout.splitlines()
        assert told[1:] == [answer["reason"], answer["instead"]]


def test_why_prints_decision_reason_and_remedy(source: Path) -> None:
    """Three lines."""
    asked = bonobofs("why", "aidlc-docs/plan.txt", cwd=source)
    what, reason, instead = asked.stdout.splitlines()
    assert what == "refused: create_file aidlc-docs/plan.txt (SUFFIX, rule artifacts)"
    assert ".md" in reason
    assert "aidlc-docs/" in instead
    assert bonobofs("why", "aidlc-docs/plan.md", cwd=source).stdout.startswith("allowed: ")


def test_in_a_mount_the_policy_and_role_of_the_session_apply(mounted: Mounted) -> None:
    """Also below its root, by absolute path, by the source's path, and after the policy file was emptied."""
    policy = ALLOW_ALL + '[role.reader]\ndeny = ["src/"]\nwrite = ["**"]\n'
    world = mounted(policy=policy, role="reader")
    (world.path / "docs").mkdir()
    Path(world.session.policy.origin).write_text('default = "de')
    assert _why("x.txt", code=0, cwd=world.path / "docs")["path"] == "docs/x.txt"
    assert _why(world.path / "src" / "x", code=77, cwd=Path("/"))["code"] == "ROLE"
    assert _why(world.source / "src" / "x", code=77, cwd=Path("/"))["path"] == "src/x"
    assert _why("src/x", "--workspace", world.path, code=77, cwd=Path("/"))["code"] == "ROLE"
    assert _why("src/x", "--role", "agent", code=0, cwd=world.path)["rule"] == "default"
    assert _why("src/x", "--role", "agent", code=0, cwd=world.source)["rule"] == "default"


def test_why_agrees_with_the_mount(mounted: Mounted) -> None:
    """The answer, the attempt and the extended attribute agree."""
    world = mounted()
    (world.source / "aidlc-docs").mkdir()
    for name in ("plan.md", "plan.sh", "plan"):
        path = world.source / "aidlc-docs" / name
        path.write_text("what was there")
        through = world.path / "aidlc-docs" / name
        answer = json.loads(bonobofs("why", "--json", through).stdout)
        assert answer == json.loads(os.getxattr(through, "user.bonobofs.why"))
        try:
            with through.open("a") as file:
                file.write("more")
        except PermissionError:
            assert not answer["allowed"]
        else:
            assert answer["allowed"]


def test_the_target_of_a_symlink_is_judged(source: Path) -> None:
    """A write through a link changes its target, and a link out of the workspace leads outside."""
    (source / "aidlc-docs").mkdir()
    (source / "aidlc-docs" / "link.md").symlink_to("../elsewhere.md")
    (source / "aidlc-docs" / "out.md").symlink_to("/etc/hostname")
    (source / "elsewhere.md").touch()
    assert _why("aidlc-docs/link.md", code=77, cwd=source)["path"] == "elsewhere.md"
    assert _why("aidlc-docs/out.md", code=77, cwd=source)["code"] == "OUTSIDE"
    assert _why("aidlc-docs/link.md", "--op", "delete_file", code=0, cwd=source)["path"] == "aidlc-docs/link.md"


def test_a_file_with_other_names_has_its_own_reason(source: Path) -> None:
    """The other names are unknown."""
    (source / "aidlc-docs").mkdir()
    (source / "aidlc-docs" / "plan.md").touch()
    (source / "other").hardlink_to(source / "aidlc-docs" / "plan.md")
    assert _why("aidlc-docs/plan.md", code=77, cwd=source)["code"] == "HARDLINK"


def test_an_invalid_size_is_a_usage_error(source: Path) -> None:
    """The message shows valid forms."""
    asked = bonobofs("why", "x", "--size", "much", cwd=source)
    assert asked.returncode == 2
    assert "700KB or 1MiB" in asked.stderr


def test_a_mount_of_another_state_directory_answers_for_itself(mounted: Mounted, tmp_path: Path) -> None:
    """Through its socket. If the socket refuses this user, through the extended attribute, without options."""
    world = mounted()
    (world.path / "aidlc-docs").mkdir()
    (world.path / "aidlc-docs" / "plan.md").touch()
    agents = {"BONOBOFS_HOME": str(tmp_path / "agents-home")}
    assert bonobofs("why", world.path / "aidlc-docs" / "new.md", env=agents).returncode == 0
    (inside_directory(world.home, world.session.session) / "guard.sock").unlink()
    asked = bonobofs("why", world.path / "aidlc-docs" / "plan.md", env=agents)
    assert (asked.returncode, asked.stdout) == (0, "allowed: write_file aidlc-docs/plan.md (rule artifacts)\n")
    assert bonobofs("why", world.path / "aidlc-docs" / "new.txt", env=agents).returncode == 77
    asked = bonobofs("why", world.path / "aidlc-docs" / "new.md", "--size", "1", env=agents)
    assert asked.returncode == 2
    assert f"{world.path}/.bonobofs/policy.md" in asked.stderr


RENAMES = """
default = "allow"
[[keep]]
paths = ["docs/index.md"]
[[scratch]]
paths = ["out/"]
[role.agent]
write = ["**"]
deny = ["closed/"]
"""


def test_a_link_across_the_layers_is_explained(mounted: Mounted) -> None:
    """EXDEV from link has an entry in denials.jsonl, and `why` predicts it."""
    world = mounted(policy=RENAMES)
    for name in ("free", "out"):
        (world.path / name).mkdir()
        (world.path / name / "a.txt").touch()
    for old, new in (("free/a.txt", "out/b.txt"), ("out/a.txt", "free/b.txt")):
        answer = _why(old, "--op", "link", "--to", new, code=77, cwd=world.path)
        with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
            os.link(world.path / old, world.path / new)
        last = json.loads((world.path / ".bonobofs/denials.jsonl").read_text().splitlines()[-1])
        assert (last["code"], last["operation"], last["path"]) == ("ELSEWHERE", "link", new)
        assert (answer["code"], answer["reason"]) == (last["code"], last["reason"])


def test_a_directory_of_the_source_at_a_scratch_path_has_its_own_reason(mounted: Mounted, source: Path) -> None:
    """Its move is EXDEV within scratch too, as its content is in the source."""
    (source / "out/held").mkdir(parents=True)
    world = mounted(policy=RENAMES)
    with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
        (world.path / "out/held").rename(world.path / "out/moved")
    last = json.loads((world.path / ".bonobofs/denials.jsonl").read_text().splitlines()[-1])
    assert (last["code"], last["path"]) == ("ELSEWHERE", "out/held")
    assert last["reason"].startswith("The source has this at a scratch path.")


def test_executable_content_below_a_directory_is_detected(mounted: Mounted) -> None:
    """`why --op rename --to` reads the first bytes of the files below, as the mount does."""
    free, docs = (f'[[rule]]\nname = "{name}"\npaths = ["{name}/"]\n' for name in ("free", "docs"))
    world = mounted(policy=free + docs + "executable = false\n")
    (world.path / "free/tool").mkdir(parents=True)
    (world.path / "docs").mkdir()
    (world.path / "free/tool/run").write_text("#!/bin/sh\n")
    answer = _why("free/tool", "--op", "rename", "--to", "docs/tool", code=77, cwd=world.path)
    with pytest.raises(PermissionError):
        (world.path / "free/tool").rename(world.path / "docs/tool")
    last = json.loads((world.path / ".bonobofs/denials.jsonl").read_text().splitlines()[-1])
    assert (answer["code"], last["code"]) == ("EXECUTABLE", "EXECUTABLE")


def test_a_rename_is_judged_by_both_names_and_all_below(mounted: Mounted, source: Path) -> None:
    """`why --op rename` and the mount agree; a rename across the layers has an entry in denials.jsonl."""
    (source / "closed").mkdir()
    world = mounted(policy=RENAMES)
    for name in ("docs", "free", "out"):
        (world.path / name).mkdir()
    for name in ("docs/index.md", "free/a.txt", "out/a.txt"):
        (world.path / name).touch()
    for old, new, code in (
        ("docs", "moved", "KEEP"),
        ("free", "closed", "ROLE"),
        ("free/a.txt", "closed/a.txt", "ROLE"),
        ("free/a.txt", "out/b.txt", "ELSEWHERE"),
        ("out/a.txt", "free/b.txt", "ELSEWHERE"),
    ):
        answer = _why(old, "--op", "rename", "--to", new, code=77, cwd=world.path)
        assert answer["code"] == code
        with pytest.raises(OSError, match=os.strerror(ERRNO[Code(code)])):
            (world.path / old).rename(world.path / new)
        *_, last = (world.path / ".bonobofs/denials.jsonl").read_text().splitlines()
        assert (json.loads(last)["code"], json.loads(last)["operation"]) == (code, "rename")
    assert _why("docs", "--op", "rename", code=77, cwd=world.path)["code"] == "KEEP"
    _why("free", "--op", "rename", "--to", "moved", code=0, cwd=world.path)
    (world.path / "free").rename(world.path / "moved")
    asked = bonobofs("why", "moved", "--to", "free", cwd=world.path)
    assert (asked.returncode, "add --op rename" in asked.stderr) == (2, True)


def test_a_path_that_the_session_cannot_look_up_is_named(mounted: Mounted) -> None:
    """The session serves, so its state is not the reason."""
    world = mounted(policy=ALLOW_ALL)
    said = bonobofs("why", world.path / ("a" * 256))
    assert said.returncode == 2
    assert f"cannot look up {world.path}/aaa" in said.stderr
    assert "aaa: File name too long, so" in said.stderr
    assert "cannot be called" not in said.stderr


def test_a_dead_mount_is_named(mounted: Mounted) -> None:
    """The answer names the commands to mount again or unmount, for the own state directory and for another."""
    world = mounted(policy=ALLOW_ALL)
    world.kill()
    for env, advice in (
        ({}, f"bonobofs umount {world.path}"),
        ({"BONOBOFS_HOME": f"{world.home}2"}, "ask the operator"),
    ):
        asked = bonobofs("why", world.path / "x", env=env)
        assert asked.returncode == 1
        assert f"the server of the mount on {world.path} is gone" in asked.stderr
        assert advice in asked.stderr
    assert "is gone" in bonobofs("shell", world.path, "--", "true").stderr


@pytest.mark.parametrize("command", [("why", "aidlc-docs/plan.md"), ("policy", "show")])
def test_an_undefined_role_is_a_usage_error(command: tuple[str, ...], source: Path) -> None:
    """In the directory of a new mount, and in a mounted source, by the policy in force there."""
    wrong = bonobofs(*command, "--role", "wroker", cwd=source)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "does not define the role wroker; did you mean worker? it defines: agent, control, " in wrong.stderr


def test_why_accepts_the_roles_of_the_policy_in_force(mounted: Mounted) -> None:
    world = mounted(policy='default = "allow"\n[role.own]\nwrite = ["**"]\n')
    assert bonobofs("why", "a.md", "--role", "own", cwd=world.path).returncode == 0
    assert bonobofs("why", world.source / "a.md", "--role", "worker").returncode == 2


DOCS_ONLY = '[[rule]]\nname = "docs"\npaths = ["docs/"]\n'


@pytest.mark.parametrize("is_mounted_once", [False, True])
def test_a_source_without_a_mount_is_judged_by_its_own_policy(
    is_mounted_once: bool, mounted: Mounted, source: Path, home: Path
) -> None:
    """The root is the innermost source that has a policy or had a session, wherever the command runs."""
    (source / "src").mkdir()
    if is_mounted_once:
        (home / "policy.toml").write_text(DOCS_ONLY)
        mounted(agent="ann").umount()
    else:
        project_policies.policy_file(home, source).parent.mkdir(exist_ok=True)
        project_policies.policy_file(home, source).write_text(DOCS_ONLY)
    for cwd in (source.parent, source / "src", Path("/")):
        assert _why(source / "src/docs/a.py", code=77, cwd=cwd)["path"] == "src/docs/a.py"
        assert _why(source / "docs/a.py", code=0, cwd=cwd)["path"] == "docs/a.py"
    assert _why("docs/a.py", code=77, cwd=source / "src")["path"] == "src/docs/a.py"
    shown = [json.loads(bonobofs("policy", "show", "--json", cwd=cwd).stdout) for cwd in (source, source / "src")]
    assert shown[0] == shown[1]


def test_a_workspace_that_is_no_directory_is_a_usage_error(source: Path) -> None:
    (source / "file").touch()
    for name in ("absent", "file"):
        asked = bonobofs("why", "--workspace", source / name, "x")
        assert (asked.returncode, f"{source / name} is not a directory" in asked.stderr) == (2, True)
