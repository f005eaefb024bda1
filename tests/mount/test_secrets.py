"""The mount hides the names that `secrets` lists, unless git tracks them or they are scratch."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bonobofs.errors import UsageError
from bonobofs.guards import FileTools
from bonobofs.policy.compiled import Tracked, compile_policy
from bonobofs.policy.decision import Code, Permit
from bonobofs.policy.engine import decide
from bonobofs.policy.request import Kind, Operation, Principal, Request, WorkspacePath
from bonobofs.session import open_session
from bonobofs.session.registration import MOST, find_tracked
from tests.support.users import outcome
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World

POLICY = f"""secrets = ["**/.env", "**/.env.*", "**/.aws", "**/id_ed25519"]
{ALLOW_ALL}[[scratch]]
paths = ["**/.venv/"]
"""


@pytest.fixture
def secret_source(source: Path) -> Path:
    """A repository with untracked secrets, a tracked `.env` and an example."""
    for name in (".env", "app/.env.local", "keys/id_ed25519", ".aws/credentials"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("TOKEN=1")
    for name in ("public/.env", ".env.example", "app/main.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("EXAMPLE=1")
    for words in (
        ("init", "-q", "."),
        ("add", "public/.env", ".env.example", "app/main.py"),
        ("-c", "user.name=Olga", "-c", "user.email=olga@example.org", "commit", "-q", "-m", "Begin"),
    ):
        subprocess.run(["git", "-C", source, *words], check=True)
    return source


def _shown(world: World) -> set[str]:
    return {
        os.path.relpath(os.path.join(top, name), world.path)
        for top, directories, files in os.walk(world.path)
        for name in [*directories, *files]
        if not os.path.relpath(top, world.path).startswith((".git", ".bonobofs"))
    } - {".git"}


@pytest.mark.parametrize("transport", ["kernel", "portable"])
def test_secrets_are_neither_listed_nor_found(mounted: Mounted, secret_source: Path, transport: str) -> None:
    world = mounted(policy=POLICY, source=secret_source, transport=transport)
    assert _shown(world) == {"app", "app/main.py", "keys", "public", "public/.env", ".env.example"}
    for name in (".env", "app/.env.local", "keys/id_ed25519", ".aws", ".aws/credentials"):
        assert outcome(os.stat, world.path / name) == errno.ENOENT
        assert outcome((world.path / name).read_text) == errno.ENOENT
    assert (world.path / "public/.env").read_text() == "EXAMPLE=1"
    assert (secret_source / ".env").read_text() == "TOKEN=1"


def test_reads_of_a_secret_are_recorded_and_counted(mounted: Mounted, secret_source: Path) -> None:
    world = mounted(policy=POLICY, source=secret_source)
    for _ in range(5):
        assert not (world.path / ".env").exists()
    assert not (world.path / "missing/.env").exists()
    world.umount()
    denials = [entry for entry in world.entries() if entry.code == Code.SECRET]
    assert {(entry.operation, entry.path) for entry in denials} == {("read_file", ".env")}
    assert len(denials) == 2
    assert [entry.details.get("count") for entry in denials] == [None, 4]


def test_a_secret_name_cannot_be_made_replaced_or_moved(mounted: Mounted, secret_source: Path) -> None:
    world = mounted(policy=POLICY, source=secret_source)
    path = world.path
    (path / "note").write_text("x")
    assert outcome((path / ".env").write_text, "TOKEN=2") == errno.EACCES
    assert outcome((path / "app/.env").write_text, "TOKEN=2") == errno.EACCES
    assert outcome(os.rename, path / "note", path / ".env") == errno.EACCES
    assert outcome(os.link, path / "note", path / "app/.env") == errno.EACCES
    assert outcome(os.symlink, "note", path / "app/.env") == errno.EACCES
    assert outcome(os.mkdir, path / ".aws") == errno.EACCES
    assert outcome(os.rename, path / "keys", path / "moved") == errno.EACCES
    assert outcome(shutil.rmtree, path / "keys") == errno.ENOTEMPTY
    assert (secret_source / ".env").read_text() == "TOKEN=1"
    assert (secret_source / "keys/id_ed25519").read_text() == "TOKEN=1"


def test_scratch_has_no_secrets(mounted: Mounted, secret_source: Path) -> None:
    world = mounted(policy=POLICY, source=secret_source)
    (world.path / ".venv").mkdir()
    (world.path / ".venv/.env").write_text("x")
    assert (world.path / ".venv/.env").read_text() == "x"


def test_a_new_policy_hides_and_shows_names_at_once(mounted: Mounted, secret_source: Path, tmp_path: Path) -> None:
    """The kernel has cached the names before."""
    policy = tmp_path / "secrets.toml"
    policy.write_text(before := ALLOW_ALL)
    world = mounted(policy=policy, source=secret_source)
    assert (world.path / ".env").read_text() == "TOKEN=1"
    policy.write_text(POLICY)
    until(lambda: not (world.path / ".env").exists(), "the name is hidden")
    policy.write_text(before)
    until((world.path / ".env").exists, "the name shows again")


def test_a_secret_next_to_many_tracked_ones_is_hidden(secret_source: Path, home: Path) -> None:
    """The session stores whole directories in place of very many tracked paths, but not for secrets."""
    policy = compile_policy({"secrets": ["**/*.pem", "**/.env"], "scratch": [{"paths": ["build/"]}]})
    (secret_source / "certs").mkdir()
    for number in range(MOST + 1):
        (secret_source / f"certs/{number}.pem").touch()
    subprocess.run(["git", "-C", secret_source, "add", "certs"], check=True)
    (secret_source / "certs/real.pem").touch()
    known = policy.with_tracked(Tracked(find_tracked(home, secret_source, policy).paths))
    assert known.secret(["certs", "real.pem"]) is not None
    assert known.secret(["certs", "7.pem"]) is None
    assert known.secret(["public", ".env"]) is None
    assert known.secret([".env"]) is not None


def test_the_root_is_no_secret() -> None:
    policy = compile_policy({"secrets": ["**"], "default": "allow"})
    request = Request(Operation.SET_MODE, WorkspacePath(""), Kind.DIRECTORY)
    assert isinstance(decide(policy, Principal("alice", "id", "agent"), request), Permit)
    assert policy.secret(["a"]) is not None


def test_the_file_tools_know_no_secrets(home: Path, secret_source: Path, tmp_path: Path) -> None:
    policy = tmp_path / "secrets.toml"
    policy.write_text(POLICY)
    with open_session(secret_source, agent="alice", policy=policy) as session, FileTools(session) as tools:
        listed = {entry.path for entry in tools.guarded_list_files("", recursive=True).entries}
        assert not {name for name in listed if "id_ed25519" in name or ".aws" in name}
        for name in (".env", ".aws/credentials", ".aws/config.example"):
            with pytest.raises((FileNotFoundError, UsageError)):
                tools.guarded_read_file(name)
        assert {match.path for match in tools.guarded_search_files("TOKEN").matches} == set()
        assert {match.path for match in tools.guarded_search_files("EXAMPLE").matches} >= {"public/.env"}
