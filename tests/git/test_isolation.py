"""CLEO's isolation rules as its programs know them: names, order, and the paths inside."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bonobofs.policy.isolation import (
    ISOLATION_ENV_KEYS,
    MUTATION_SUBCOMMANDS,
    AbsolutePathRules,
    BoundaryContract,
    BoundaryViolation,
    enforce_absolute_path_boundary,
    evaluate_isolation_boundary,
    is_cwd_inside_worktree,
    provision_isolated_shell,
    validate_absolute_path,
)
from tests.support.world import ROOT

WORKER = {"CLEO_WORKTREE_ROOT": "/wt", "CLEO_AGENT_ROLE": "worker"}


def test_the_constants_equal_those_of_cleo() -> None:
    """The keys have CLEO's order, root and role first, and there are seven mutations."""
    assert ISOLATION_ENV_KEYS[0] == "CLEO_WORKTREE_ROOT"
    assert ISOLATION_ENV_KEYS[1] == "CLEO_AGENT_ROLE"
    assert ISOLATION_ENV_KEYS[2:] == (
        "CLEO_WORKTREE_BRANCH",
        "CLEO_PROJECT_HASH",
        "CLEO_SESSION_ID",
        "CLEO_AGENT_ID",
    )
    assert {"add", "commit", "rm", "mv", "restore", "apply", "am"} == MUTATION_SUBCOMMANDS


def test_the_variable_names_are_defined_once() -> None:
    """No other module of the package has a CLEO_* name."""
    spelled = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "bonobofs").rglob("*.py"))
        if re.search(r"CLEO_[A-Z]", file.read_text(encoding="utf-8"))
    ]
    assert spelled == ["bonobofs/policy/isolation.py"]


@pytest.mark.parametrize(
    ("cwd", "root", "inside"),
    [
        ("/wt", "/wt", True),
        ("/wt/", "/wt", True),
        ("/wt", "/wt/", True),
        ("/wt/a/b", "/wt", True),
        ("/wt-evil", "/wt", False),
        ("//wt/a", "/wt", True),
        ("/wt/../etc", "/wt", False),
        ("/wt/a/../..", "/wt", False),
        ("/", "/wt", False),
        ("/etc", "/", True),
    ],
)
def test_inside_means_the_root_and_everything_below(cwd: str, root: str, inside: bool) -> None:
    """Complete components count, after `.`, `..` and trailing slashes are resolved."""
    assert is_cwd_inside_worktree(cwd, root) is inside


def test_a_relative_directory_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.` is inside of it, and `..` is not."""
    monkeypatch.chdir(tmp_path)
    assert is_cwd_inside_worktree(".", str(tmp_path))
    assert not is_cwd_inside_worktree("..", str(tmp_path))


@pytest.mark.parametrize("subcommand", sorted(MUTATION_SUBCOMMANDS))
def test_a_mutation_of_a_worker_outside_its_worktree_is_a_violation(subcommand: str) -> None:
    """With CLEO's code, for every mutation."""
    violation = evaluate_isolation_boundary(subcommand, env=WORKER, cwd="/wt-evil")
    assert isinstance(violation, BoundaryViolation)
    assert violation.code == "E_GIT_BOUNDARY_CWD_OUTSIDE_WORKTREE"
    assert violation.boundary == "isolation"
    assert violation.context == {"cwd": "/wt-evil", "worktree_root": "/wt", "role": "worker"}
    assert evaluate_isolation_boundary(subcommand, env=WORKER, cwd="/wt/docs") is None


@pytest.mark.parametrize(
    ("subcommand", "env"),
    [
        ("status", WORKER),
        ("push", WORKER),
        ("commit", {**WORKER, "CLEO_AGENT_ROLE": "lead"}),
        ("commit", {**WORKER, "CLEO_AGENT_ROLE": "Worker"}),
        ("commit", {**WORKER, "CLEO_WORKTREE_ROOT": ""}),
        ("commit", {}),
    ],
)
def test_the_isolation_applies_to_workers_and_mutations_only(subcommand: str, env: dict[str, str]) -> None:
    """For another role, another subcommand or without a root it has no result."""
    assert evaluate_isolation_boundary(subcommand, env=env, cwd="/elsewhere") is None


def test_the_default_arguments_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in CLEO: its environment and its working directory."""
    for key, value in {**WORKER, "CLEO_WORKTREE_ROOT": str(tmp_path / "wt")}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    assert evaluate_isolation_boundary("commit") is not None
    (tmp_path / "wt").mkdir()
    monkeypatch.chdir(tmp_path / "wt")
    assert evaluate_isolation_boundary("commit") is None
    (tmp_path / "wt").rmdir()
    gone = evaluate_isolation_boundary("commit")
    assert gone is not None, "a directory that was deleted is inside nothing"


def test_an_absolute_path_is_below_a_prefix_or_outside() -> None:
    """A prefix contains itself and everything below, by complete components. Other paths are violations."""
    contract = BoundaryContract("/wt", "worker", AbsolutePathRules(("/wt", "/tmp/cache/")))
    for path in ("/wt", "/wt/a.md", "/wt//a/./b", "/tmp/cache", "/tmp/cache/x", "/wt/a/../b"):
        assert validate_absolute_path(path, contract), path
        assert enforce_absolute_path_boundary(path, contract) is None
    for path in ("/wt-evil/a.md", "/wt/../etc/passwd", "/tmp", "/", "wt/a.md", "", "/wt/a\0b"):
        assert not validate_absolute_path(path, contract), path
        violation = enforce_absolute_path_boundary(path, contract)
        assert violation is not None
        assert violation.code == "E_BOUNDARY_VIOLATION"
        assert violation.boundary == "absolute-path"


def test_an_orchestrator_may_opt_out() -> None:
    """If no outside path is denied, every path is permitted."""
    contract = BoundaryContract("/wt", "orchestrator", AbsolutePathRules(("/wt",), denied_outside_worktree=False))
    assert enforce_absolute_path_boundary("/etc/passwd", contract) is None


_PART = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=6)


@given(
    st.lists(_PART | st.just(".."), max_size=8),
    st.lists(_PART.filter(lambda part: part not in (".", "..")), max_size=3),
)
def test_an_allowed_path_stays_inside(path: list[str], root: list[str]) -> None:
    """An allowed path never leaves the root when its components are walked one by one."""
    where = "/" + "/".join(root)
    named = where.rstrip("/") + "/" + "/".join(path)
    walked: list[str] = []
    for part in named.split("/"):
        if part == "..":
            walked = walked[:-1]
        elif part not in ("", "."):
            walked.append(part)
    contract = BoundaryContract(where, "worker", AbsolutePathRules((where,)))
    assert bool(validate_absolute_path(named, contract)) is (walked[: len(root)] == root)


def test_the_preamble_exports_root_role_and_known_ids(tmp_path: Path) -> None:
    """It enters the worktree and exports exactly `env`, for any names. Empty ids are omitted."""
    root = tmp_path / "it's $HOME `x`"
    root.mkdir()
    shell = provision_isolated_shell(
        worktree_path=str(root), branch="aidlc/gt-1", role="worker", project_hash="", session_id="s", agent_id=""
    )
    assert shell.cwd == str(root)
    assert shell.env == {
        "CLEO_WORKTREE_ROOT": str(root),
        "CLEO_AGENT_ROLE": "worker",
        "CLEO_WORKTREE_BRANCH": "aidlc/gt-1",
        "CLEO_PROJECT_HASH": "",
        "CLEO_SESSION_ID": "s",
    }
    assert shell.boundary_contract.env_keys == ISOLATION_ENV_KEYS
    assert shell.boundary_contract.absolute_path_rules.allowed_prefixes == (str(root),)
    ran = subprocess.run(
        ["sh", "-c", shell.preamble + "pwd; env"],
        check=False,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    where, *exported = ran.stdout.splitlines()
    assert where == str(root)
    assert {line for line in exported if line.startswith("CLEO_")} == {f"{k}={v}" for k, v in shell.env.items()}
    root.rename(tmp_path / "gone")
    left = subprocess.run(["sh", "-c", shell.preamble + "echo still here"], check=False, capture_output=True, text=True)
    assert left.returncode == 1
    assert left.stdout == ""


def test_provisioning_is_deterministic() -> None:
    """It depends on its arguments, and names the worktree by its absolute path."""
    first, second = (
        provision_isolated_shell(worktree_path="/wt/", branch="b", role="lead", project_hash="h") for _ in range(2)
    )
    assert first == second
    assert first.cwd == "/wt"
    with pytest.raises(ValueError, match="absolute"):
        provision_isolated_shell(worktree_path="wt", branch="b", role="lead", project_hash="h")
