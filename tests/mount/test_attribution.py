"""Attribution of a change: what is proved, what is observed and what is claimed are kept apart."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import timeit
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.enforcement.caller_processes import LONGEST_COMMAND, CallerTable, redacted
from bonobofs.ipc.client import call
from bonobofs.state.home import inside_directory
from bonobofs.system.processes import start_time
from tests.support.world import ALLOW_ALL, NOBODY, Mounted, World, bonobofs

CLAIMS = {"CLAUDE_CODE_SESSION_ID": "5f0c-1", "TRACEPARENT": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


@pytest.fixture
def world(mounted: Mounted) -> World:
    return mounted(policy=ALLOW_ALL)


def run(world: World, script: str, **env: str) -> None:
    subprocess.run(["/bin/bash", "-c", script], cwd=world.path, env={"PATH": os.environ["PATH"], **env}, check=True)


def made(world: World, path: str) -> AuditEntry:
    """The first intent of a path."""
    return next(entry for entry in world.all_entries() if entry.kind == "intent" and entry.path == path)


def chain(world: World, path: str) -> list[dict[str, Any]]:
    """The process that first changed a path, and its parents: the details of their entries."""
    events = {entry.seq: entry for entry in world.all_entries() if entry.operation == "process"}
    found = []
    seq = made(world, path).details["process"]
    while seq:
        details = events[seq].details
        found.append(details)
        seq = details["observed"]["parent"]
    return found


def test_a_change_names_its_process_and_the_parents_up_to_the_session(world: World) -> None:
    run(world, "bash -c 'touch a.md; true'; true")
    change = made(world, "a.md")
    touch, shell, outer, *_ = chain(world, "a.md")
    assert touch["observed"] == {
        "pid": change.details["pid"],
        "start": touch["observed"]["start"],
        "name": "touch",
        "program": os.path.realpath("/usr/bin/touch"),
        "command": "touch a.md",
        "parent_pid": shell["observed"]["pid"],
        "parent": touch["observed"]["parent"],
    }
    assert shell["observed"]["command"] == "bash -c 'touch a.md; true'"
    assert outer["observed"]["command"] == """/bin/bash -c 'bash -c '"'"'touch a.md; true'"'"'; true'"""
    # The chain ends with the first process that is older than the session: that of the test, or its server.
    server_start = start_time(world.pid)
    assert server_start is not None
    older = [each["observed"]["start"] < server_start for each in chain(world, "a.md")]
    assert older == [False] * (len(older) - 1) + [True]
    assert change.details["uid"] == os.getuid()
    assert "claimed" not in touch


def test_claims_come_from_three_variables_and_nothing_else_of_the_environment(world: World) -> None:
    run(world, "touch a.md", **CLAIMS, CODEX_THREAD_ID="not an id;", API_TOKEN="hunter2-secret", HOME="/home/of/alice")
    assert chain(world, "a.md")[0]["claimed"] == CLAIMS
    text = world.trail.read_text()
    assert "hunter2" not in text
    assert "/home/of/alice" not in text
    assert "not an id" not in text


def test_a_process_is_recorded_once(world: World) -> None:
    script = "import os\nfor n in range(50):\n    open(f'{n}.md', 'w').close()\n    os.unlink(f'{n}.md')\n"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], cwd=world.path, check=True)
    changes = [entry for entry in world.all_entries() if entry.kind == "intent"]
    (process,) = {entry.details["process"] for entry in changes}
    described = [entry for entry in world.all_entries() if entry.operation == "process"]
    assert [entry.details["observed"]["pid"] for entry in described].count(changes[0].details["pid"]) == 1
    assert process in {entry.seq for entry in described}
    assert all(entry.seq < changes[0].seq for entry in described)


def test_a_thread_is_its_process(world: World) -> None:
    script = (
        "import threading\nthread = threading.Thread(target=lambda: open('t.md', 'w').close())\n"
        "open('m.md', 'w').close()\nthread.start()\nthread.join()\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", script], cwd=world.path, check=True)
    main, thread = made(world, "m.md"), made(world, "t.md")
    assert main.details["process"] == thread.details["process"]
    assert main.details["pid"] == thread.details["pid"]


def writes(world: World, path: str) -> list[AuditEntry]:
    """The intents of the write batches of a file."""
    operations = ("create_file", "write_file")
    return [
        each for each in world.entries() if (each.kind, each.path) == ("intent", path) and each.operation in operations
    ]


def test_a_write_batch_has_the_writes_of_one_process(world: World) -> None:
    """Each further program writes to the file while the batch of the one before is open."""
    for command, data in (("tee log", b"1234"), ("dd of=log oflag=append conv=notrunc", b"56"), ("tee -a log", b"7")):
        subprocess.run(command.split(), cwd=world.path, input=data, capture_output=True, check=True)
    assert [(each.tool, each.operation) for each in writes(world, "log")] == [
        ("tee", "create_file"),
        ("dd", "write_file"),
        ("tee", "write_file"),
    ]
    outcomes = [each for each in world.entries() if (each.kind, each.path) == ("outcome", "log")]
    assert [(each.bytes, each.details["size"]) for each in outcomes] == [(4, 4), (2, 6), (1, 7)]
    for command, tool in (("dd of=log", "dd"), ("tee -a log", "tee")):
        ran = bonobofs("audit", "query", "--json", "--command", command, "--operation", "write_file")
        assert [entry["tool"] for entry in json.loads(ran.stdout)] == [tool]


def test_a_program_that_a_shell_starts_after_it_opened_the_file_has_its_own_write_batch(world: World) -> None:
    """The shell forks, creates the file, and then calls execve in the same process."""
    run(world, "seq 3 > log; true")
    assert [(each.tool, each.operation) for each in writes(world, "log")] == [
        ("bash", "create_file"),
        ("seq", "write_file"),
    ]
    assert len({each.details["pid"] for each in writes(world, "log")}) == 1


@pytest.mark.root
def test_a_write_batch_has_the_writes_of_one_user(mounted: Mounted) -> None:
    """The uid of an entry is proved: a process that becomes another user begins a new batch."""
    world = mounted(policy=ALLOW_ALL, allow_other=True)
    with open(world.path / "log", "wb", buffering=0) as file:
        for uid in (0, NOBODY, 0):
            os.seteuid(uid)
            file.write(b"line")
            file.write(b"line")
    assert [each.details["uid"] for each in writes(world, "log")] == [0, NOBODY, 0]


def test_the_threads_of_a_process_write_one_batch(world: World) -> None:
    """The kernel names the thread in each request. They take turns."""
    with open(world.path / "log", "wb", buffering=0) as file, ThreadPoolExecutor(1) as other:
        for _ in range(20):
            file.write(b"line")
            other.submit(file.write, b"line").result()
    assert len(writes(world, "log")) == 1
    (outcome,) = [each for each in world.entries() if each.kind == "outcome"]
    assert outcome.details["writes"] == 40


def test_a_refusal_names_its_process_too(mounted: Mounted) -> None:
    world = mounted(policy='default = "deny"\n')
    subprocess.run(["touch", world.path / "a.md"], check=False, capture_output=True)
    denied = made(world, "a.md")
    assert denied.result == "denied"
    assert chain(world, "a.md")[0]["observed"]["command"].startswith("touch ")


def test_a_page_of_a_mapping_that_the_kernel_writes_has_no_process(world: World) -> None:
    """Another process may have dirtied it: no guess."""
    path = world.path / "m.bin"
    path.write_bytes(bytes(8192))
    world.entries()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 8192) as mapping:
        mapping[0] = 1
    os.sync()
    writes = [
        e for e in world.all_entries() if e.path == "m.bin" and e.kind == "intent" and e.operation == "write_file"
    ]
    late = [entry for entry in writes if entry.details["pid"] == 0]
    assert late
    assert all("process" not in entry.details and entry.tool == "" for entry in late)


def test_a_page_of_a_mapping_joins_no_write_batch_of_a_process(world: World) -> None:
    with open(world.path / "m.bin", "w+b", buffering=0) as file:
        file.write(bytes(4096))
        with mmap.mmap(file.fileno(), 4096) as mapping:
            mapping[0] = 1
            os.sync()
        os.pwrite(file.fileno(), b"x", 0)  # the kernel waits until the page is written
    assert [each.details["pid"] for each in writes(world, "m.bin")] == [os.getpid(), 0, os.getpid()]


def test_command_lines_can_be_left_out(mounted: Mounted) -> None:
    world = mounted(policy=f"{ALLOW_ALL}[attribution]\ncommands = false\n")
    run(world, "touch a.md; true")
    for details in chain(world, "a.md"):
        assert "command" not in details["observed"]
        assert details["observed"]["program"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["make", "test"], "make test"),
        (["tool", "--password=hunter2", "x"], "tool '--password=***' x"),
        (["tool", "--password", "hunter 2", "x"], "tool --password *** x"),
        (["tool", "--api-key=hunter2"], "tool '--api-key=***'"),
        (["env", "GITHUB_TOKEN=hunter2", "gh", "pr"], "env 'GITHUB_TOKEN=***' gh pr"),
        (["sh", "-c", "TOKEN=hunter2 make; x"], "sh -c 'TOKEN=***'"),
        (["sh", "-c", 'tool --secret "hunter 2" y'], "sh -c 'tool --secret *** y'"),
        (["git", "clone", "https://bob:hunter2@example.org/x"], "git clone https://bob:***@example.org/x"),
        (["curl", "-u", "bob:hunter2", "x"], "curl -u bob:*** x"),
        (["git", "commit", "--author=alice", "-m", "pass"], "git commit --author=alice -m pass"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(words: list[str], shown: str) -> None:
    assert redacted(words) == shown


def test_headers_with_secrets_are_hidden() -> None:
    for header in ("Authorization: Bearer hunter2hunter2", "authorization: token hunter2", "X-Api-Key: hunter2"):
        assert "hunter2" not in redacted(["curl", "-H", header, "https://example.org"])
        assert "hunter2" not in redacted(["sh", "-c", f"curl -H '{header}' https://example.org"])


@pytest.mark.parametrize("word", ["-", "a", "a-", "--token", "x://", "authorization:", "-u a:", "token="])
def test_no_command_line_delays_the_server(word: str) -> None:
    """The server reads the command line of a program that waits for its change, and all others wait too."""
    words = [word * (4000 // len(word)), "token"]
    seconds = min(timeit.repeat(lambda: redacted(words), number=1, repeat=3))
    assert seconds < 0.1


def test_a_command_line_is_bounded(world: World) -> None:
    assert len(redacted(["x" * 10_000])) == LONGEST_COMMAND
    assert len(redacted(["--token=" + "x" * 10_000] * 50)) <= LONGEST_COMMAND
    subprocess.run(["touch", *(["a.md"] * 20_000)], cwd=world.path, check=True)
    assert len(chain(world, "a.md")[0]["observed"]["command"]) == LONGEST_COMMAND


def test_odd_arguments_and_names_are_recorded_in_one_line(world: World, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/two\nlines\\ \xff"
    with open("/usr/bin/touch", "rb") as source, open(odd, "wb") as copy:
        copy.write(source.read())
    os.chmod(odd, 0o755)
    subprocess.run([odd, b"a\xfe\n.md"], cwd=world.path, check=True)
    observed = chain(world, os.fsdecode(b"a\xfe\n.md"))[0]["observed"]
    assert observed["name"] == os.fsdecode(b"two\nlines\\ \xff")
    assert os.fsdecode(b"a\xfe\n.md") in observed["command"]


def test_a_pid_that_another_program_has_now_is_another_process() -> None:
    """After execve, and after the pid was given to another process."""
    program = "import os, sys\nprint(flush=True)\nos.read(0, 1)\nos.execvp('cat', ['cat'])\n"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        table = CallerTable(lambda: True)
        first = table.find(process.pid, 0, 0.0).process
        assert table.find(process.pid, 0, 1.0).process is first
        process.stdin.write(b"\nx\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"x\n"
        assert table.find(process.pid, 0, 1.0).process is first
        second = table.find(process.pid, 0, 2.0).process
        assert second is not None
        assert second.observed["command"] == "cat"
        assert first is not second
        # The same program under a pid with another start time.
        second.program = (1, *second.program[1:])
        assert table.find(process.pid, 0, 3.0).process is not second
        process.stdin.close()


@pytest.mark.parametrize("pid", [0, -1, 2**31 - 1])
def test_an_unknown_process_stays_unknown(pid: int) -> None:
    caller = CallerTable(lambda: True).find(pid, 7, 0.0)
    assert (caller.tool, caller.details, caller.process) == ("", {"pid": pid, "uid": 7}, None)


def test_query_and_report_by_command_and_turn(world: World) -> None:
    run(world, "bash -c 'for n in one two; do touch $n.md; done'")
    turn = call(inside_directory(world.home, world.session.session), "mark", name="tidy up")["turn"]
    run(world, "rm one.md; touch three.md; true")  # the shell forks for each command but the last

    def query(*arguments: str) -> list[str]:
        ran = bonobofs("audit", "query", "--json", *arguments)
        assert ran.returncode == 0, ran.stderr
        return [f"{entry['operation']} {entry['path']}" for entry in json.loads(ran.stdout) if entry["path"]]

    assert query("--command", "touch two", "--operation", "create_file") == ["create_file two.md"]
    by_parent = query("--command", "for n in one two", "--operation", "create_file")
    assert by_parent == ["create_file one.md", "create_file two.md"]
    assert query("--turn", turn, "--operation", "create_file") == ["create_file three.md"]
    assert query("--turn", "tidy up", "--operation", "delete_file") == ["delete_file one.md"]
    assert query("--turn", turn, "--command", "rm one.md", "--operation", "delete_file") == ["delete_file one.md"]
    assert query("--turn", turn, "--command", "touch two") == []
    ran = bonobofs("audit", "query", "--turn", "tidy-up")
    assert ran.returncode == 2
    assert "tidy up" in ran.stderr
    report = json.loads(bonobofs("audit", "report", "--json").stdout)
    first, second = report["turns"]
    assert (first["name"], second["name"], second["turn"], second["by"]) == ("", "tidy up", turn, "mark")
    assert {each["command"] for each in second["commands"]} == {"rm one.md", "touch three.md"}
    markdown = bonobofs("audit", "report", "--turn", "tidy up").stdout
    assert "## Turns" in markdown
    assert "`tidy up`" in markdown
    assert "two.md" not in markdown
