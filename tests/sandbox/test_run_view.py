"""What a command sees: the policy's [run], git and why of the session, worktrees, and the tools of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bonobofs.state.project_policies import policy_file
from tests.sandbox.boxes import POLICY, Box
from tests.support.world import NOBODY, ROOT, OrdinaryUser

pytestmark = pytest.mark.root


@pytest.fixture
def box() -> Iterator[Box]:
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        yield Box(OrdinaryUser(Path(name)))


@pytest.fixture(params=["as a user", "as root for a user"])
def any_box(request: pytest.FixtureRequest) -> Iterator[Box]:
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        yield Box(OrdinaryUser(Path(name)), as_root=request.param == "as root for a user")


def lines(ran: subprocess.CompletedProcess[str]) -> list[str]:
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def make_repository(box: Box) -> None:
    script = "git init -q -b main && git add -A && git -c user.name=o -c user.email=o@example.org commit -qm first"
    subprocess.run(["sh", "-c", script], cwd=box.source, user=NOBODY, group=NOBODY, env={**os.environ}, check=True)


def test_a_private_home_is_empty_and_a_kept_home_stays(any_box: Box) -> None:
    script = "cat ~/note 2>/dev/null || echo none; echo kept > ~/note"
    assert lines(any_box.run("sh", "-c", script)) == ["none"]
    assert lines(any_box.run("sh", "-c", script)) == ["none"]
    any_box.write_policy(POLICY + 'home = "kept"\n')
    assert lines(any_box.run("sh", "-c", script)) == ["none"]
    assert lines(any_box.run("sh", "-c", script)) == ["kept"]


@pytest.mark.parametrize("plan", ["ln -s {package} ~/src", "touch ~/src"])
def test_an_agent_cannot_move_a_mountpoint_below_its_kept_home(box: Box, plan: str) -> None:
    """Bubblewrap follows symlinks: the source would cover bonobofs/sandbox, and so replace the program last_step.py."""
    box.source = box.source.rename(box.top / "sandbox")
    box.write_policy(POLICY + 'home = "kept"\n')
    # An absolute symlink would lead below the root directory of bubblewrap.
    package = os.path.relpath(ROOT / "bonobofs", box.top)
    assert box.run("sh", "-c", plan.format(package=package)).returncode == 0
    moved = box.top / "src"
    moved.mkdir()
    box.source = box.source.rename(moved / "sandbox")
    (box.source / "last_step.py").write_text("import os\nos.write(int(os.sys.argv[2]), b'0 agent code')\n")
    ran = box.run("true")
    assert (ran.returncode, "/src is " in ran.stderr, "remove it" in ran.stderr) == (2, True, True), ran.stderr
    assert box.bonobofs("status").stdout == "nothing is mounted\n"


def test_a_kept_home_has_one_run_at_a_time(any_box: Box) -> None:
    any_box.write_policy(POLICY + 'home = "kept"\n')
    words = any_box.run_words("sh", "-c", "echo begun; read line")
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, env=any_box.environment, cwd=any_box.source, stdin=pipe, stdout=pipe, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "begun\n"
        second = any_box.run("true")
        assert (second.returncode, "another run uses the kept home" in second.stderr) == (1, True), second.stderr
        assert any_box.run("true", options=("--agent", "other", "--new")).returncode == 0
    assert any_box.run("true").returncode == 0


def test_the_policy_shows_paths_read_only_and_passes_variables(box: Box) -> None:
    tools = box.top / "tools"
    tools.mkdir()
    (tools / "hello").write_text("#!/bin/sh\necho hello $WORD $OTHER\n")
    (tools / "hello").chmod(0o755)
    hidden = box.run("hello", env={"PATH": f"{tools}:{os.environ['PATH']}"})
    assert (hidden.returncode, f'read = ["{tools}"]' in hidden.stderr) == (2, True)
    box.write_policy(POLICY + f'read = ["{tools}"]\nenv = ["WORD", "LD_PRELOAD"]\n')
    variables = {"PATH": f"{tools}:{os.environ['PATH']}", "WORD": "there", "OTHER": "secret", "LD_PRELOAD": ""}
    assert lines(box.run("hello", env=variables)) == ["hello there"]
    changed = box.run("sh", "-c", f"echo x > {tools}/hello || echo refused; env | grep -c LD_PRELOAD", env=variables)
    assert changed.stdout.splitlines() == ["refused", "0"]


def test_the_advice_about_a_hidden_command_shows_its_symlinks_and_its_target(box: Box) -> None:
    """The last symlink is a directory, which only a path above it can show."""
    names = ("bin", "shared/links", "share/versions/2/bin")
    programs, links, real = directories = [box.top / name for name in names]
    for directory in directories:
        directory.mkdir(parents=True)
    (real / "tool").write_text("#!/bin/sh\necho here\n")
    (real / "tool").chmod(0o755)
    current = box.top / "share" / "current"
    current.symlink_to("versions/2")
    (programs / "tool").symlink_to(links / "tool")
    (links / "tool").symlink_to(f"{current}/bin/tool")
    variables = {"PATH": f"{programs}:{os.environ['PATH']}"}
    refused = box.run("tool", env=variables)
    assert refused.returncode == 2, refused.stderr
    for path in (programs / "tool", links / "tool", current, real / "tool"):
        assert str(path) in refused.stderr
    box.write_policy(POLICY + refused.stderr[refused.stderr.index("read = [") :])
    assert lines(box.run("tool", env=variables)) == ["here"]


@pytest.mark.parametrize("part", ["", "source/below", "home", "home/sessions"])
def test_a_path_that_covers_the_source_or_the_state_directory_is_refused(box: Box, part: str) -> None:
    (box.source / "below").mkdir()
    box.write_policy(POLICY + f'read = ["{box.top / part}"]\n')
    ran = box.run("true")
    assert (ran.returncode, "read of [run] names" in ran.stderr) == (2, True)
    assert box.bonobofs("status").stdout == "nothing is mounted\n"


def test_a_source_that_contains_the_home_directory_is_refused(box: Box) -> None:
    words = box.words("run", box.top, "--", "true")
    ran = subprocess.run(words, env=box.environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, "lies inside the source" in ran.stderr) == (2, True)


def test_a_source_that_another_user_can_replace_is_refused(box: Box) -> None:
    box.source = box.source.rename(box.top / "app")
    box.top.chmod(0o777)
    ran = box.run("true")
    message = f"another user can replace {box.source}, which is on the way to the source {box.source}; use a source"
    assert (ran.returncode, message in ran.stderr) == (1, True), ran.stderr


def test_a_symlink_to_the_source_shows_the_source_at_its_own_path(box: Box) -> None:
    link = box.top / "link"
    link.symlink_to(box.source)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    words = box.words("run", "--policy", box.policy, link, "--", "sh", "-c", f"pwd; ls {link}")
    ran = subprocess.run(words, env=box.environment, capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == [str(box.source)]
    assert "No such file" in ran.stderr


def test_git_and_the_guard_socket_work_under_the_path_of_the_source(any_box: Box) -> None:
    """The agent commits on a branch, and the operator's repository has it afterwards."""
    make_repository(any_box)
    any_box.write_policy(POLICY + '[git]\nbranch_prefix = "aidlc/"\n')
    script = (
        "git switch -q -c aidlc/work && echo two > b.md && git add b.md && git commit -qm '[gt-1] Add b' && "
        "git log --oneline | wc -l; cat .bonobofs/whoami.json; getfattr --only-values -n user.bonobofs.why a.md"
    )
    ran = any_box.run("sh", "-c", script)
    first, *rest = lines(ran)
    assert first.strip() == "2", ran.stderr
    document, end = json.JSONDecoder().raw_decode("\n".join(rest))
    assert document["source"] == str(any_box.source)
    assert json.loads("\n".join(rest)[end:])["allowed"] is True
    branches = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", any_box.source, "log", "--format=%s", "aidlc/work"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert branches.stdout == "[gt-1] Add b\nfirst\n"


def test_an_issue_gets_a_worktree_that_is_the_workspace(box: Box) -> None:
    make_repository(box)
    options = ("--issue", "gt-7", "--agent", "alice", "--new")
    script = "pwd; git rev-parse --abbrev-ref HEAD; echo x > made.md; ls"
    where, branch, *names = lines(box.run("sh", "-c", script, options=options))
    assert (Path(where).name, branch) == ("work", "aidlc/gt-7")
    assert names == ["a.md", "attack_programs.py", "made.md"]
    assert not (box.source / "made.md").exists()
    assert box.bonobofs("status").stdout == "nothing is mounted\n"
    assert box.run("true", options=("--issue", "gt-7")).returncode == 2


def test_an_issue_from_a_subdirectory_gets_the_policy_of_the_repository(box: Box) -> None:
    """The policy of the repository's top refuses, and the table [run] of the same policy shows a path."""
    (box.source / "below").mkdir()
    make_repository(box)
    tools = box.top / "tools"
    tools.mkdir()
    assert box.bonobofs("status").returncode == 0
    file = policy_file(box.state, box.source)
    file.parent.mkdir(exist_ok=True)
    file.write_text(POLICY + f'read = ["{tools}"]\n')
    for path in (file.parent, file):
        os.chown(path, NOBODY, NOBODY)
    words = box.words("run", "--issue", "gt-7", "--agent", "alice", "--new", box.source / "below", "--")
    ran = subprocess.run(
        [*words, "sh", "-c", f"test -d {tools} && echo shown; (echo x > a.txt) || echo refused"],
        env=box.environment,
        cwd=box.source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert lines(ran) == ["shown", "refused"]


@pytest.mark.parametrize("read", ["outer", "outer/source", "outer/source/below", ""])
def test_an_issue_of_a_repository_that_the_sandbox_shows_is_refused(box: Box, read: str) -> None:
    """The untracked files of the repository would be readable: below a path of `read`, or below /opt."""
    (box.source / "below").mkdir()
    make_repository(box)
    outer = box.top / "outer"
    outer.mkdir()
    os.chown(outer, NOBODY, NOBODY)
    repository = box.source = box.source.rename(outer / "source")
    if read:
        box.write_policy(POLICY + f'read = ["{box.top / read}"]\n')
    else:
        box.network = ["unshare", "--net", "--mount", "sh", "-c", 'mount --bind "$0" /opt && exec "$@"', str(outer)]
        repository = Path("/opt/source")
    words = box.words("run", "--policy", box.policy, "--issue", "gt-7", "--agent", "alice", "--new", repository)
    ran = subprocess.run(
        [*words, "--", "true"], env=box.environment, cwd=box.top, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, f"covers the repository {repository}" in ran.stderr) == (2, True), ran.stderr
    assert not list(box.state.glob("worktrees/*/tree"))


def test_two_runs_beside_each_other_share_nothing(box: Box) -> None:
    """Each has its own processes, home and /tmp; both see the source."""
    count = "ps -eo comm= | grep -c '^sleep$'"
    script = f"echo 1 > /tmp/one; echo 1 > ~/one; echo begun; read line; {count}"
    first = subprocess.Popen(
        box.run_words("sh", "-c", "sleep 54321 & " + script),
        env=box.environment,
        cwd=box.source,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "begun\n"
    second = box.run("sh", "-c", f"ls /tmp ~; {count}; echo shared > shared.md")
    assert "one" not in second.stdout.split()
    assert second.stdout.split()[-1] == "0"
    out, _ = first.communicate("go\n", timeout=60)
    assert out.split()[-1] == "1"
    assert (box.source / "shared.md").read_text() == "shared\n"


TOOLS = {
    "gcc and make": r"""
printf 'int main(){return 0;}' > x.c
printf 'x: x.c\n\tgcc -o /tmp/x x.c && /tmp/x && echo built\n' > m
make -f m""",
    "go": r"""
export GOFLAGS=-mod=mod GOCACHE=/tmp/go
printf 'package main\nfunc main(){println(1)}' > x.go
go run x.go""",
    "node with workers": r"""
printf 'const w = require("worker_threads");\nif (w.isMainThread) new w.Worker(__filename);' > w.js
node w.js""",
    "java": r"""
printf 'class X{public static void main(String[] a){System.out.println(3);}}' > X.java
java X.java""",
    "multiprocessing": "python3 -c 'import multiprocessing as m; print(m.Pool(2).map(abs,[-4]))'",
    "SQLite WAL": 'python3 -c \'import sqlite3 as s; s.connect("x.db").execute("pragma journal_mode=wal")\'',
    "strace": "strace -f -o /tmp/trace true && grep -c execve /tmp/trace",
    "gdb": "gdb -q -batch -ex run -ex bt /bin/true 2>&1 | grep -o 'exited normally'",
    "flock": "flock /tmp/lock -c 'echo locked'",
    "ssh-keygen": "ssh-keygen -q -t ed25519 -N '' -f ~/key && ls ~",
    "a server on localhost": r"""
python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &
until curl -s --noproxy '*' http://127.0.0.1:8123/a.md; do sleep 0.1; done""",
    "tmux": "tmux -L x new-session -d 'sleep 5' && tmux -L x ls",
    "vim": "vim -u NONE -es -c 's/a/b/' -c wq a.md && grep b a.md",
    "venv": "python3 -m venv --without-pip /tmp/v && /tmp/v/bin/python -c 'print(5)'",
    "npm from a directory": r"""
mkdir -p /tmp/p /tmp/w && printf '{"name": "p", "version": "1.0.0"}' > /tmp/p/package.json
cd /tmp/w && npm install --offline --no-audit --no-fund /tmp/p && test -d node_modules/p""",
    "pytest": r"""
printf 'def test_x(tmp_path):\n    (tmp_path / "a").write_text("x")\n' > test_x.py
PYTHONPATH=$(cat packages) python3 -m pytest -q test_x.py""",
    "git in HOME": "cd; git init -q x && git -C x -c user.name=a -c user.email=a@b.c commit -q --allow-empty -m x",
}


@pytest.fixture(scope="module")
def outputs() -> Iterator[dict[str, str]]:
    """Run all tools in one sandbox."""
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        box = Box(OrdinaryUser(Path(name)))
        packages = Path(pytest.__file__).parent.parent
        box.write_policy(f'default = "allow"\nhidden = ["**"]\n[run]\nread = ["{packages}"]\n')
        (box.source / "packages").write_text(str(packages))
        for number, script in enumerate(TOOLS.values()):
            path = box.source / f"tool{number}.sh"
            path.write_text(script + "\n")
            path.chmod(0o755)
        loop = 'for n in $(seq 0 16); do sh tool$n.sh > /tmp/out 2>&1; echo "=$?"; cat /tmp/out; done'
        ran = box.run("bash", "-c", loop)
        parts = ran.stdout.split("=")[1:] if ran.returncode == 0 else []
        yield dict(zip(TOOLS, parts, strict=False))


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_a_tool_works_in_the_sandbox(outputs: dict[str, str], tool: str) -> None:
    assert outputs.get(tool, "").startswith("0\n"), outputs.get(tool)
