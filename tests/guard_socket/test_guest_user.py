"""`mount --user NAME`: another user calls the session that root serves, and reaches nothing else of root's."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from bonobofs.system import mounts
from tests.support.users import BEN, User, outcome, run_in_child
from tests.support.wait import until
from tests.support.world import NOBODY, OrdinaryUser, environment

pytestmark = pytest.mark.root
POLICY: Final = 'default = "allow"\n[role.agent]\nwrite = ["**"]\ndeny = ["closed/"]\ngit = ["add", "commit"]\n'
TOOLS: Final = 'tools = ["write_file"]\n'


class Guested(NamedTuple):
    """A mount that root serves for another user, whose commands `user` runs."""

    home: Path
    source: Path
    path: Path
    whoami: dict[str, Any]
    user: OrdinaryUser

    @property
    def inside(self) -> Path:
        return Path(self.whoami["socket"]).parent

    def shell(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.user.bonobofs("shell", self.path, "--", *command)


def _run_as_root(user: OrdinaryUser, home: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command by the interpreter that the guest may run too."""
    env = environment(BONOBOFS_HOME=str(home), PYTHONPATH=user.packages)
    command = [user.python, "-m", "bonobofs", *arguments]
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def guested(ordinary_user: OrdinaryUser) -> Iterator[Guested]:
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        base = Path(name).resolve()
        base.chmod(0o755)
        home, source, path = base / "home", base / "source", base / "mount"
        for directory in (source, path):
            directory.mkdir()
        subprocess.run(["git", "init", "-q", "-b", "work", source], check=True)
        for each in (source, *source.rglob("*")):
            os.chown(each, NOBODY, NOBODY)
        (base / "policy.toml").write_text(POLICY + TOOLS)
        policy = base / "policy.toml"
        made = _run_as_root(ordinary_user, home, "mount", source, path, "--policy", policy, "--user", str(NOBODY))
        assert made.returncode == 0, made.stderr
        try:
            whoami = json.loads((path / ".bonobofs/whoami.json").read_text())
            yield Guested(home, source, path, whoami, ordinary_user)
        finally:
            _run_as_root(ordinary_user, home, "umount", path)
            assert not mounts.at(path)


def test_the_guest_works_in_the_mount_and_calls_the_session(guested: Guested) -> None:
    """Files, git, why and leases work for a user whose own state directory is elsewhere."""
    shell = guested.shell(
        "sh", "-ec", "echo text > plan.md; git add plan.md; git commit -qm '[gt-1] Add the plan'; git log -1"
    )
    assert shell.returncode == 0, shell.stderr
    assert f"{guested.whoami['agent_id']}@bonobofs.invalid" in shell.stdout
    assert (guested.source / "plan.md").stat().st_uid == NOBODY
    why = guested.user.bonobofs("why", "--json", guested.path / "closed/new", "--op", "mkdir")
    assert (why.returncode, json.loads(why.stdout)["code"]) == (77, "ROLE")
    acquire = f"exec {guested.user.python} -m bonobofs lease acquire 'docs/**'"
    leased = guested.shell("sh", "-c", acquire)
    assert leased.returncode == 0, leased.stderr
    (lease,) = json.loads(_run_as_root(guested.user, guested.home, "lease", "list", "--json").stdout)
    assert (lease["patterns"], lease["holder"]) == (["docs/**"], f"agent:{guested.whoami['agent_id']}")


def test_files_that_the_guest_writes_by_a_call_are_its_own(guested: Guested) -> None:
    """So are directories. A file that is replaced keeps its owner, and another user's directory is closed."""
    (guested.source / "roots.md").write_text("root's")
    (guested.source / "roots").mkdir()
    write = (
        "from bonobofs.ipc.client import call; import sys; call(None, 'write_file', path=sys.argv[1], content='new')"
    )
    (guested.source / "roots.md").chmod(0o666)
    for path in ("new/below/a.md", "roots.md"):
        ran = guested.shell(guested.user.python, "-c", write, path)
        assert ran.returncode == 0, ran.stderr
        assert (guested.source / path).read_text() == "new"
    for path, uid in (("new", NOBODY), ("new/below", NOBODY), ("new/below/a.md", NOBODY), ("roots.md", 0)):
        assert (guested.source / path).stat()[4:6] == (uid, uid), path
    refused = guested.shell(guested.user.python, "-c", write, "roots/a.md")
    assert "PermissionError" in refused.stderr
    assert list((guested.source / "roots").iterdir()) == []
    by_root = _run_as_root(
        guested.user, guested.home, "shell", guested.path, "--", guested.user.python, "-c", write, "b.md"
    )
    assert by_root.returncode == 0, by_root.stderr
    assert (guested.source / "b.md").stat().st_uid == 0


def test_the_shell_names_socket_and_policy(guested: Guested) -> None:
    """BONOBOFS_SOCKET and BONOBOFS_POLICY are paths that the guest can open; `call(None, …)` uses the former."""
    program = "from bonobofs.ipc.client import call; import os; print(call(None, 'whoami')['session'])"
    ran = guested.shell(guested.user.python, "-c", program)
    assert ran.stdout.strip() == guested.whoami["session"], ran.stderr
    ran = guested.shell(
        "sh", "-c", 'echo "$BONOBOFS_SOCKET"; cd /; test -S "$BONOBOFS_SOCKET" && cat "$BONOBOFS_POLICY"'
    )
    first, _, policy = ran.stdout.partition("\n")
    assert first == guested.whoami["socket"]
    assert policy.startswith("# What may be written here")


def test_why_outside_the_mount_asks_the_session_of_the_shell(guested: Guested) -> None:
    program = f"cd / && exec {guested.user.python} -m bonobofs why --json closed/new"
    answer = json.loads(guested.shell("sh", "-c", program).stdout)
    assert (answer["code"], answer["path"]) == ("ROLE", "closed/new")


def _reaches(paths: list[Path]) -> list[str]:
    """The paths that this user can open, list or connect to."""
    return [str(path) for path in paths if any(os.access(path, mode) for mode in (os.R_OK, os.W_OK))]


def test_the_guest_reaches_nothing_else(guested: Guested) -> None:
    """Neither trail, policy, database, server.log nor another session; it can list only `inside`."""
    other = guested.home / "sessions" / "other"
    (other / "inside").mkdir(parents=True, mode=0o755)
    other.chmod(0o700)
    (other / "inside/guard.sock").touch()
    paths = [path for path in guested.home.rglob("*") if guested.inside not in (path, *path.parents)]
    paths.append(guested.home)
    assert len(paths) > 8
    user = guested.user
    reached = run_in_child(_reaches, paths, user=BEN._replace(uid=NOBODY, gid=NOBODY, groups=()))
    assert reached == []
    assert user.run("ls", guested.inside).stdout.split() == ["bin", "guard.sock"]
    assert user.run("touch", guested.inside / "new").returncode != 0
    assert user.run("rm", "-f", guested.inside / "guard.sock").returncode != 0
    assert user.run("rm", "-f", guested.inside / "bin/git").returncode != 0


def test_a_third_user_has_no_access(guested: Guested) -> None:
    """By the modes of the directories, and behind them by the uid of the caller."""
    assert run_in_child(_reaches, [guested.inside, Path(guested.whoami["socket"])], user=BEN) == []
    for directory in (guested.home, guested.home / "sessions", guested.inside.parent, guested.inside):
        directory.chmod(0o755)
    Path(guested.whoami["socket"]).chmod(0o666)
    answered = run_in_child(outcome, _call_whoami, Path(guested.whoami["socket"]), user=BEN)
    assert "belongs to another user" in str(answered)
    assert guested.user.bonobofs("why", guested.path / "closed/x").returncode == 77


def _call_whoami(path: Path) -> str:
    import socket

    with socket.socket(socket.AF_UNIX) as end:
        end.connect(str(path))
        end.settimeout(30)
        return end.recv(4096).decode()


@pytest.mark.parametrize(
    ("name", "said"),
    [("no-such-user", "there is no such user"), ("0", "names root"), ("99999999999999999999", "there is no such user")],
)
def test_an_invalid_guest_is_refused(
    ordinary_user: OrdinaryUser, name: str, said: str, source: Path, home: Path
) -> None:
    refused = _run_as_root(ordinary_user, home, "mount", source, source, "--user", name)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert said in refused.stderr
    assert list((home / "sessions").iterdir()) == []


def test_an_unreachable_state_directory_is_refused_before_the_mount(
    ordinary_user: OrdinaryUser, source: Path, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "mount").mkdir()
    tmp_path.chmod(0o700)
    refused = _run_as_root(ordinary_user, home, "mount", source, tmp_path / "mount", "--user", str(NOBODY))
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "set BONOBOFS_HOME to a directory" in refused.stderr
    assert list((home / "sessions").iterdir()) == []


def test_an_ordinary_user_cannot_mount_for_a_guest(ordinary_user: OrdinaryUser) -> None:
    for name in ("source", "mount"):
        ordinary_user.run("mkdir", name)
    refused = ordinary_user.bonobofs("mount", "source", "mount", "--user", "daemon")
    assert refused.returncode == 2
    assert "--user needs root" in refused.stderr


def _git(path: Path, *arguments: str, user: int = NOBODY) -> subprocess.CompletedProcess[str]:
    """Run git as a user, with no environment at all."""
    command = [shutil.which("git") or "", *arguments]
    return subprocess.run(
        command, cwd=path, env={}, user=user, group=user, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("transport", ["kernel", "portable"])
def test_only_the_guest_sees_the_repository_of_the_session(guested: Guested, transport: str) -> None:
    """Root and other users see the repository of the source, unchanged, while the guest works."""
    _run_as_root(guested.user, guested.home, "umount", guested.path)
    policy = guested.source.parent / "policy.toml"
    mount = ("mount", guested.source, guested.path, "--policy", policy, "--user", str(NOBODY), "--transport", transport)
    assert _run_as_root(guested.user, guested.home, *mount).returncode == 0
    (guested.source / ".git/marker").touch()
    assert (guested.path / ".git/marker").exists()

    def look() -> tuple[bool, object, object, object]:
        os.chdir(guested.path)
        return (
            os.path.exists(".git/marker"),
            outcome(os.mkdir, ".git/made"),
            outcome(os.listdir, ".bonobofs/objects"),
            outcome(os.unlink, ".git/marker"),
        )

    def work() -> tuple[bool, int, bool]:
        os.chdir(guested.path / ".git")
        before = os.path.exists("marker")
        os.mkdir("made")
        os.rmdir("made")
        return before, os.stat("../.git").st_uid, os.path.exists("../.git/marker")

    for _ in range(3):
        assert run_in_child(work, user=User(NOBODY, NOBODY)) == (False, NOBODY, False)
        assert run_in_child(look, user=BEN) == (True, errno.EACCES, errno.EACCES, errno.EACCES)
        assert run_in_child(look) == (True, errno.EROFS, errno.EACCES, errno.EROFS)
    assert (guested.source / ".git/marker").exists()
    status = _git(guested.path, "status", "--porcelain", user=0)
    assert "dubious ownership" in status.stderr


def test_git_trusts_a_work_tree_of_root_and_gains_no_right_there(guested: Guested) -> None:
    """The mount shows the guest as the owner of its root; the real owner's mode bits apply."""
    _run_as_root(guested.user, guested.home, "umount", guested.path)
    for each in (guested.source, *guested.source.rglob("*")):
        os.chown(each, 0, 0)
    (guested.source / "mine").write_text("root's")
    policy = guested.source.parent / "policy.toml"
    mount = ("mount", guested.source, guested.path, "--policy", policy, "--user", str(NOBODY))
    assert _run_as_root(guested.user, guested.home, *mount).returncode == 0
    assert guested.path.stat().st_uid == NOBODY
    commit = _git(guested.path, "commit", "-q", "--allow-empty", "-m", "[gt-1] One")
    assert commit.returncode == 0, commit.stderr
    by_root = ("-c", "user.name=o", "-c", "user.email=o@x.y", "commit", "-q", "--allow-empty", "-m", "By root")
    assert _git(guested.source, *by_root, user=0).returncode == 0
    for branch in ("main", "develop"):
        assert _git(guested.source, "branch", branch, "work", user=0).returncode == 0
        followed = _git(guested.path, "log", "-1", "--format=%s", branch)
        assert (followed.stdout, followed.stderr) == ("By root\n", "")

    def work() -> list[object]:
        os.chdir(guested.path)
        return [
            outcome(os.mkdir, "made"),
            outcome(os.unlink, "mine"),
            outcome(os.rename, "mine", "other"),
            outcome(os.chmod, ".", 0o777),
            outcome(os.setxattr, ".", "user.mine", b"1"),
        ]

    refused = (errno.EACCES, errno.EPERM)
    assert all(result in refused for result in run_in_child(work, user=User(NOBODY, NOBODY)))
    assert (guested.source / "mine").read_text() == "root's"
    guested.source.chmod(0o777)

    def make() -> object:
        os.chdir(guested.path)
        return outcome(os.mkdir, "made")

    until(lambda: run_in_child(make, user=User(NOBODY, NOBODY)) is None, "the mount shows the new mode")
