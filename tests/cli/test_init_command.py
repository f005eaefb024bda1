"""`bonobofs init`: a policy for one project, from what the project holds."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bonobofs.policy.document import load
from bonobofs.session import choose_policy
from bonobofs.state.project_policies import policy_file
from tests.support.world import OrdinaryUser, bonobofs

IGNORED = (
    "*.log\ndata/\n/coverage\nout/\n**/obj/\nlib/build/\n!lib/build/kept\nbin/\nnode_modules/\n.env\n.git/\n../x/\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of Python and JavaScript, with a build directory that git tracks."""
    path = tmp_path / 'a "project"'
    files = ["src/app.py", "web/index.js", "pyproject.toml", "package.json", "uv.lock", "bin/tool"]
    for name in (*files, ".github/workflows/ci.yml", ".env"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("x\n")
    (path / ".gitignore").write_text(IGNORED)
    for command in (["init", "-q"], ["add", "-f", "."]):
        subprocess.run(["git", "-C", path, *command], check=True)
    return path


def _state(path: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in path.rglob("*") if one.is_file()}


def test_init_writes_a_policy_for_the_project_that_passes_check_and_test(home: Path, project: Path) -> None:
    before = _state(project)
    made = bonobofs("init", "--json", project)
    assert made.returncode == 0, made.stderr
    assert _state(project) == before
    answer = json.loads(made.stdout)
    file = policy_file(home, project)
    assert (answer["policy"], answer["extends"], answer["source"]) == (str(file), "project", str(project))
    assert answer["languages"] == ["JavaScript", "Python"]
    assert answer["lock_files"] == ["uv.lock"]
    assert answer["scratch"] == ["coverage/", "**/out/", "**/obj/"]
    assert [one.partition(" ")[0] for one in answer["ignored"]] == ["**/data/", "**/bin/", "**/.git/"]
    checked = bonobofs("policy", "check", file)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert bonobofs("policy", "test", file).returncode == 0
    document = load(file)
    assert {"src/app.py", "pyproject.toml", "uv.lock"} <= {*document.examples.allow}
    assert {".github/workflows/ci.yml", ".env", ".git/config"} <= {*document.examples.deny}
    assert choose_policy(home, None, project).origin == str(file)


def test_init_prints_its_findings_and_the_next_step(home: Path, project: Path) -> None:
    made = bonobofs("init", cwd=project)
    assert made.returncode == 0, made.stderr
    for part in ("JavaScript, Python", "uv.lock", "**/bin/ (git tracks files in it)", "bonobofs mount", "policy test"):
        assert part in made.stdout
    assert str(policy_file(home, project)) in made.stdout


def test_init_replaces_a_policy_only_with_force(home: Path, project: Path) -> None:
    assert bonobofs("init", project).returncode == 0
    file = policy_file(home, project)
    file.write_text('extends = "docs"\n')
    refused = bonobofs("init", project)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert file.read_text() == 'extends = "docs"\n'
    assert bonobofs("init", "--force", project).returncode == 0
    assert 'extends = "project"' in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in file.parent.iterdir()] == [file.name]


def test_init_works_without_a_repository_and_with_documents(home: Path, tmp_path: Path) -> None:
    plain, docs = tmp_path / "plain", tmp_path / "docs"
    (plain / "src").mkdir(parents=True)
    (plain / "src/main.rs").touch()
    (plain / "Cargo.toml").touch()
    (docs / "aidlc-docs").mkdir(parents=True)
    assert json.loads(bonobofs("init", "--json", plain).stdout)["languages"] == ["Rust"]
    assert json.loads(bonobofs("init", "--json", docs).stdout)["extends"] == "aidlc"
    for source in (plain, docs):
        assert bonobofs("policy", "test", policy_file(home, source)).returncode == 0


def test_init_starts_no_program_of_the_repository(project: Path, tmp_path: Path) -> None:
    """The repository's configuration may name one that git would run to find changes."""
    mark = tmp_path / "ran"
    for key in ("core.fsmonitor", "core.pager", "alias.ls-files"):
        subprocess.run(["git", "-C", project, "config", key, f"!touch '{mark}' #"], check=True)
    subprocess.run(["git", "-C", project, "config", "core.fsmonitor", f"touch '{mark}' #"], check=True)
    assert bonobofs("init", project).returncode == 0
    assert not mark.exists()


@pytest.mark.parametrize("name", ["none", "file", "home"])
def test_init_refuses_a_directory_that_is_no_project(home: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert bonobofs("init", tmp_path / name).returncode == 1
    assert not (home / "policies").exists() or not [*(home / "policies").iterdir()]


def test_an_ordinary_user_may_run_init(ordinary_user: OrdinaryUser) -> None:
    ordinary_user.run("mkdir", "-p", "app/src")
    made = ordinary_user.bonobofs("init", "--json", "app")
    assert made.returncode == 0, made.stderr
    assert ordinary_user.bonobofs("policy", "test", json.loads(made.stdout)["policy"]).returncode == 0
