"""FileGuard: each rule of its contract allows once and denies once, on real files with a real record."""

from __future__ import annotations

import inspect
import os
import threading
from pathlib import Path

import pytest

from bonobofs import guards
from bonobofs.audit.reader import AuditLog
from bonobofs.errors import UsageError
from bonobofs.files.file_guard import FileGuard
from bonobofs.files.results import ValidationResult
from bonobofs.policy.decision import Code, Refused
from tests.files.conftest import Guarded, Opened, Program

SH = "#!/bin/sh\n"


def denied(result: object) -> ValidationResult:
    assert isinstance(result, ValidationResult)
    assert not result.allowed
    assert not result, "a denial is false"
    assert result.reason
    assert result.instead
    return result


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("aidlc-docs/plan.md.tmp", "temporary"),
        ("aidlc-docs/sedAbCdEf", "temporary"),
        ("aidlc-docs/.plan.md.swp", "temporary"),
        ("tests/__pycache__/test_a.pyc", "scratch:**/__pycache__/"),
        ("node_modules/left-pad/index.js", "scratch:**/node_modules/"),
        ("build", "scratch:build/"),
    ],
)
def test_staged_and_scratch_paths_are_refused_with_a_reason(alice: Guarded, path: str, rule: str) -> None:
    """A write must not succeed if the file would not be there afterwards."""
    for result in (
        alice.files.validate_path(path),
        alice.files.write_file(path, "text\n", "alice"),
        alice.files.delete_file(path, "alice"),
    ):
        told = denied(result)
        assert (told.code, told.rule) == (Code.DEFAULT, rule)
        assert "mount" in told.reason
    with pytest.raises(Refused, match="inside a mount"):
        alice.files.guarded_write_file(path, "text\n", "alice")
    assert alice.names() == []


def test_the_listed_directories_are_those_in_the_workspace(alice: Guarded) -> None:
    assert not [line for line in alice.files.list_allowed_directories() if "node_modules" in line or "tmp" in line]


def test_the_names_are_those_of_the_contract() -> None:
    assert (guards.FileGuard, guards.ValidationResult) == (FileGuard, ValidationResult)
    assert str(inspect.signature(FileGuard.write_file)).startswith("(self, path: ")
    writing = inspect.signature(FileGuard.write_file).parameters
    assert list(writing) == ["self", "path", "content", "agent", "overwrite"]
    assert (writing["overwrite"].kind, writing["overwrite"].default) == (inspect.Parameter.KEYWORD_ONLY, False)
    assert list(inspect.signature(FileGuard.delete_file).parameters) == ["self", "path", "agent"]
    assert list(inspect.signature(FileGuard.validate_path).parameters)[:3] == ["self", "path", "operation"]


def test_an_allowed_write_returns_the_absolute_path_and_writes_the_content(alice: Guarded) -> None:
    """Parent directories are created. The text is stored as UTF-8 with its newlines."""
    written = alice.files.write_file(Path("aidlc-docs/units/1/plan.md"), "# Plän\r\n\n", "alice")
    assert written == alice.root / "aidlc-docs/units/1/plan.md"
    assert written.read_bytes() == "# Plän\r\n\n".encode()
    assert alice.names() == ["aidlc-docs", "aidlc-docs/units", "aidlc-docs/units/1", "aidlc-docs/units/1/plan.md"]


@pytest.mark.parametrize(
    "path",
    [
        "aidlc-docs/a.md",
        "aidlc-docs/a..b.md",
        "aidlc-docs/deep/er/a.md",
        "aidlc-docs/with\nnewline and \x1b[31m.md",
        "aidlc-docs/not-utf-8-\udcff.md",
        f"aidlc-docs/{'n' * 252}.md",
        "./aidlc-docs//a.md",
        "templates/plan.md",
        "orchestrator/lib/guard.py",
        "tests/unit/test_enforcer.py",
    ],
)
def test_an_allowed_file_is_written_and_deleted(alice: Guarded, path: str) -> None:
    assert alice.files.validate_path(path)
    written = alice.files.write_file(path, "text\n", "alice")
    assert written == alice.root / path
    assert written.read_text() == "text\n"
    assert alice.files.delete_file(path, "alice") is None
    assert not written.exists()
    assert [entry.result for entry in alice.entries()] == ["allowed"] * len(alice.entries())


@pytest.mark.parametrize(
    ("path", "content", "code"),
    [
        ("../outside.md", "", Code.OUTSIDE),
        ("aidlc-docs/../../outside.md", "", Code.OUTSIDE),
        ("aidlc-docs/../aidlc-docs/a.md", "", Code.OUTSIDE),
        ("/etc/outside.md", "", Code.OUTSIDE),
        ("//etc/outside.md", "", Code.OUTSIDE),
        ("/proc/self/root/etc/outside.md", "", Code.OUTSIDE),
        ("", "", Code.OUTSIDE),
        (".", "", Code.OUTSIDE),
        ("/", "", Code.OUTSIDE),
        ("aidlc-docs/a\0.md", "", Code.OUTSIDE),
        ("aidlc-docs/no-character-\ud800.md", "", Code.OUTSIDE),
        ("aidlc-docs/run.py", "", Code.SUFFIX),
        ("aidlc-docs/A.MD", "", Code.SUFFIX),
        ("aidlc-docs/a.md.", "", Code.SUFFIX),
        ("aidlc-docs/a.md ", "", Code.SUFFIX),
        ("aidlc-docs/a", "", Code.SUFFIX),
        ("aidlc-docs/a.md", SH, Code.EXECUTABLE),
        ("templates/a.txt", "", Code.SUFFIX),
        ("templates/a.md", SH, Code.EXECUTABLE),
        ("orchestrator/notes.md", "", Code.SUFFIX),
        ("tests/data.json", "", Code.SUFFIX),
        (".beads/issues.jsonl", "", Code.PROTECTED),
        ("aidlc-docs/.beads/a.md", "", Code.PROTECTED),
        (".git/config", "", Code.PROTECTED),
        (".git", "", Code.PROTECTED),
        ("aidlc-docs/.git/a.md", "", Code.PROTECTED),
        (".bonobofs/policy.md", "", Code.PROTECTED),
        ("policy.toml", "", Code.PROTECTED),
        ("aidlc-docs/.hidden.md", "", Code.HIDDEN),
        ("aidlc-docs/.hidden/a.md", "", Code.HIDDEN),
        ("src/app.py", "", Code.DEFAULT),
        ("setup.py", "", Code.DEFAULT),
        ("aidlc-docs", "", Code.SUFFIX),
    ],
)
def test_a_denied_file_is_not_written(alice: Guarded, tmp_path: Path, path: str, content: str, code: Code) -> None:
    """The denial is returned, not raised. No file appears. The record has the agent, the request and the reason."""
    before = sorted(tmp_path.rglob("*.md"))
    result = denied(alice.files.write_file(path, content, "alice"))
    assert result.code == code
    assert alice.names() == []
    assert sorted(tmp_path.rglob("*.md")) == before
    entry = alice.entries()[0]
    assert (entry.kind, entry.result, entry.operation, entry.agent) == ("intent", "denied", "write_file", "alice")
    assert (entry.code, entry.rule, entry.reason) == (result.code, result.rule, result.reason)
    assert (entry.tool, entry.details["overwrite"]) == ("write_file", False)
    with pytest.raises(PermissionError) as raised:
        alice.files.guarded_write_file(path, content, "alice")
    assert isinstance(raised.value, Refused)
    assert raised.value.decision.code == code


@pytest.mark.parametrize(
    ("path", "limit"), [("aidlc-docs/a.md", 1_000_000), ("templates/a.md", 1_000_000), ("tests/a.py", 500_000)]
)
def test_sizes_are_bytes_of_utf_8(alice: Guarded, path: str, limit: int) -> None:
    at_the_limit = "é" * (limit // 2)
    result = denied(alice.files.write_file(path, at_the_limit + "a", "alice"))
    assert result.code == Code.SIZE
    assert alice.names() == []
    assert alice.files.write_file(path, at_the_limit, "alice") == alice.root / path
    assert (alice.root / path).stat().st_size == limit


def test_a_file_over_the_limit_may_shrink(alice: Guarded) -> None:
    path = alice.root / "aidlc-docs/a.md"
    path.parent.mkdir()
    path.write_text("x" * 3_000_000)
    assert alice.files.write_file(path, "x" * 2_000_000, "alice", overwrite=True) == path
    assert denied(alice.files.write_file(path, "x" * 2_000_001, "alice", overwrite=True)).code == Code.SIZE
    assert path.stat().st_size == 2_000_000


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("AGENTS.md", Code.KEEP),
        ("README.md", Code.KEEP),
        (".git/config", Code.PROTECTED),
        (".beads/issues.jsonl", Code.PROTECTED),
        ("src/app.py", Code.DEFAULT),
        ("aidlc-docs/.hidden.md", Code.HIDDEN),
        ("aidlc-docs/run.py", Code.SUFFIX),
        ("../other.md", Code.OUTSIDE),
    ],
)
def test_a_kept_file_cannot_be_deleted(alice: Guarded, path: str, code: Code) -> None:
    file = alice.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("kept")
    result = alice.files.delete_file(path, "alice")
    assert denied(result).code == code
    with pytest.raises(PermissionError):
        alice.files.guarded_delete_file(path, "alice")
    assert file.read_text() == "kept"
    entry = alice.entries()[0]
    assert (entry.operation, entry.action, entry.result, entry.code) == ("delete_file", "delete", "denied", code)


def test_a_readme_in_another_directory_is_an_ordinary_file(alice: Guarded) -> None:
    alice.files.guarded_write_file("aidlc-docs/README.md", "# Here\n", "alice")
    alice.files.guarded_delete_file("aidlc-docs/README.md", "alice")
    assert alice.names() == ["aidlc-docs"]


def test_an_existing_file_is_overwritten_only_with_overwrite(alice: Guarded) -> None:
    """FileExistsError is raised and recorded as an error, not as a denial."""
    alice.files.guarded_write_file("aidlc-docs/a.md", "old", "alice")
    with pytest.raises(FileExistsError):
        alice.files.write_file("aidlc-docs/a.md", "new", "alice")
    with pytest.raises(FileExistsError):
        alice.files.guarded_write_file("aidlc-docs/a.md", "new", "alice", overwrite=False)
    assert (alice.root / "aidlc-docs/a.md").read_text() == "old"
    assert alice.files.write_file("aidlc-docs/a.md", "new", "alice", overwrite=True) == alice.root / "aidlc-docs/a.md"
    assert (alice.root / "aidlc-docs/a.md").read_text() == "new"
    ends = [(entry.result, entry.reason) for entry in alice.of("aidlc-docs/a.md") if entry.kind == "outcome"]
    exists = ("error", "EEXIST: File exists")
    assert ends == [("allowed", None), exists, exists, ("allowed", None)]


def test_the_record_has_agent_path_size_and_overwrite(alice: Guarded) -> None:
    """Each directory and each file has an intent and an outcome, in the order of creation."""
    alice.files.write_file("aidlc-docs/units/a.md", "é", "alice")
    alice.files.write_file("aidlc-docs/units/a.md", "ab\n", "alice", overwrite=True)
    alice.files.delete_file("aidlc-docs/units/a.md", "alice")
    entries = alice.entries()
    assert [(each.kind, each.operation, each.path, each.action) for each in entries] == [
        (kind, *rest)
        for rest in (
            ("mkdir", "aidlc-docs", "create"),
            ("mkdir", "aidlc-docs/units", "create"),
            ("write_file", "aidlc-docs/units/a.md", "create"),
            ("write_file", "aidlc-docs/units/a.md", "modify"),
            ("delete_file", "aidlc-docs/units/a.md", "delete"),
        )
        for kind in ("intent", "outcome")
    ]
    created, modified = entries[4], entries[6]
    assert (created.bytes, created.details["size"], created.details["overwrite"]) == (2, 2, False)
    assert (modified.bytes, modified.details["size"], modified.details["overwrite"]) == (3, 3, True)
    assert {(each.agent, each.agent_id, each.guard, each.result) for each in entries} == {
        ("alice", alice.session.guard.agent.id, "file", "allowed")
    }
    assert [each.tool for each in entries if each.kind == "intent"] == ["write_file"] * 4 + ["delete_file"]
    assert all(each.details["intent"] == entries[number - 1].seq for number, each in enumerate(entries) if number % 2)


def test_only_the_agent_of_the_session_is_accepted(alice: Guarded) -> None:
    """Another name is refused as IDENTITY with an alert, for every call. Label and UUID both name the agent."""
    alice.files.guarded_write_file("aidlc-docs/a.md", "one", "alice")
    identity = alice.session.guard.agent.id
    assert alice.files.write_file("aidlc-docs/a.md", "two", identity, overwrite=True)
    for claimed in ("bob", "Alice", "", "alice "):
        result = denied(alice.files.write_file("aidlc-docs/a.md", "three", claimed, overwrite=True))
        assert (result.code, result.rule) == (Code.IDENTITY, "identity")
    assert denied(alice.files.delete_file("aidlc-docs/a.md", "bob")).code == Code.IDENTITY
    with pytest.raises(PermissionError):
        alice.files.guarded_delete_file("aidlc-docs/a.md", "bob")
    assert (alice.root / "aidlc-docs/a.md").read_text() == "two"
    refused = [entry for entry in alice.entries() if entry.code == Code.IDENTITY and entry.kind == "intent"]
    assert (refused[0].agent, refused[0].details["claimed"]) == ("alice", "bob")
    assert Code.IDENTITY in {entry.code for entry in alice.alerts()}


def test_leaving_the_workspace_is_an_alert(alice: Guarded) -> None:
    alice.files.write_file("aidlc-docs/run.py", "", "alice")
    assert alice.alerts() == []
    alice.files.write_file("../a.md", "", "alice")
    (alert,) = alice.alerts()
    assert (alert.code, alert.path, alert.agent) == ("OUTSIDE", "../a.md", "alice")


def test_the_third_denial_is_an_alert(alice: Guarded) -> None:
    for number in range(5):
        assert len(alice.alerts()) == (1 if number >= 3 else 0)
        alice.files.write_file(f"src/{number}.py", "", "alice")


def test_validate_path_changes_no_file_and_records_denials(alice: Guarded) -> None:
    assert alice.files.validate_path("aidlc-docs/units/a.md", "write_file") == ValidationResult(True, rule="artifacts")
    assert alice.files.validate_path("aidlc-docs/units", "mkdir").allowed
    assert alice.files.validate_path("README.md", "delete_file").code == Code.KEEP
    assert alice.files.validate_path("aidlc-docs/a.sh").code == Code.SUFFIX
    assert alice.files.validate_path(alice.root / "aidlc-docs/a.md").allowed
    assert alice.files.validate_path(f"aidlc-docs/{'n' * 300}.md").allowed, "the policy says nothing about lengths"
    assert alice.names() == []
    assert [(entry.result, entry.tool) for entry in alice.entries()] == [("denied", "validate_path")] * 2


def test_validate_path_accepts_only_the_known_operations(alice: Guarded) -> None:
    with pytest.raises(UsageError, match="write_file"):
        alice.files.validate_path("aidlc-docs/a.md", "frobnicate")


def test_validate_path_reads_the_state_of_the_path(alice: Guarded) -> None:
    """A file with several names may be replaced, not changed in place. A directory is judged as a directory."""
    file = alice.files.guarded_write_file("aidlc-docs/a.md", "a", "alice")
    (alice.root / "b.md").hardlink_to(file)
    assert alice.files.validate_path("aidlc-docs/a.md", "write_file").allowed
    assert alice.files.validate_path("aidlc-docs/a.md", "set_mode").code == Code.HARDLINK
    assert alice.files.validate_path("aidlc-docs", "rename").allowed
    assert alice.files.validate_path("", "set_mode").code == Code.DEFAULT


def test_no_directory_is_created_for_a_refused_file(opened: Opened) -> None:
    """The guard judges the file and the directories before it creates any."""
    policy = '[[rule]]\nname = "pages"\npaths = ["docs/*/*.md"]\nmax_size = "10B"\n'
    policy += '[[rule]]\nname = "places"\npaths = ["more/"]\nmax_size = "10B"\n'
    world = opened(policy=policy)
    assert denied(world.files.write_file("docs/one/a.md", "a", "alice")).code == Code.DEFAULT
    assert world.files.validate_path("docs/one/a.md").code == Code.DEFAULT
    assert denied(world.files.write_file("more/one/a.md", "a" * 11, "alice")).code == Code.SIZE
    assert world.names() == []
    (world.root / "docs/one").mkdir(parents=True)
    assert world.files.write_file("docs/one/a.md", "a", "alice")


def test_the_role_restricts_the_caller(opened: Opened) -> None:
    policy = 'default = "allow"\n[role.writer]\nwrite = ["docs/"]\ndeny = ["docs/old/"]\n[role.reader]\nwrite = []\n'
    writer, reader = opened(policy=policy, role="writer"), opened(policy=policy, agent="bob", role="reader")
    assert writer.files.write_file("docs/a.md", "", "alice")
    assert denied(writer.files.write_file("docs/old/a.md", "", "alice")).code == Code.ROLE
    assert denied(writer.files.write_file("src/a.md", "", "alice")).code == Code.ROLE
    assert denied(reader.files.write_file("docs/b.md", "", "bob")).code == Code.ROLE
    assert (writer.files.list_allowed_directories(), reader.files.list_allowed_directories()) == (
        ["docs/ (any file)"],
        [],
    )


def test_allowed_directories_are_listed_with_their_limits(alice: Guarded) -> None:
    assert alice.files.list_allowed_directories() == [
        "aidlc-docs/ (.md, 1 MB)",
        "templates/ (.md, 1 MB)",
        "orchestrator/ (.py, 500 KB)",
        "tests/ (.py, 500 KB)",
    ]


def test_unexpected_errors_are_recorded_and_raised(alice: Guarded) -> None:
    docs = alice.root / "aidlc-docs"
    (docs / "taken.md").mkdir(parents=True)
    (docs / "a.md").write_text("a")
    write, delete = alice.files.write_file, alice.files.delete_file
    with pytest.raises(FileNotFoundError):
        delete("aidlc-docs/none.md", "alice")
    with pytest.raises(FileNotFoundError):
        delete("aidlc-docs/none/a.md", "alice")
    with pytest.raises(IsADirectoryError):
        delete("aidlc-docs/taken.md", "alice")
    with pytest.raises(IsADirectoryError):
        write("aidlc-docs/taken.md", "a", "alice", overwrite=True)
    with pytest.raises(FileExistsError):
        write("aidlc-docs/taken.md", "a", "alice")
    with pytest.raises(NotADirectoryError):
        write("aidlc-docs/a.md/b.md", "a", "alice")
    with pytest.raises(OSError, match="File name too long"):
        write(f"aidlc-docs/{'n' * 253}.md", "a", "alice")
    with pytest.raises(UnicodeEncodeError):
        write("aidlc-docs/b.md", "\ud800", "alice")
    with pytest.raises(TypeError):
        write("aidlc-docs/b.md", b"bytes", "alice")  # type: ignore[arg-type] # it is what some callers do
    ends = [entry for entry in alice.entries() if entry.kind == "outcome"]
    assert [entry.reason for entry in ends] == [
        "ENOENT: No such file or directory",
        "ENOENT: No such file or directory",
        "EISDIR: Is a directory",
        "EISDIR: Is a directory",
        "EEXIST: File exists",
        "ENOTDIR: Not a directory",
        "ENAMETOOLONG: File name too long",
        "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed",
        "TypeError: descriptor 'encode' for 'str' objects doesn't apply to a 'bytes' object",
    ]
    assert {entry.result for entry in ends} == {"error"}
    assert [entry.details.get("error") for entry in ends[-2:]] == ["UnicodeEncodeError", "TypeError"]
    assert alice.names() == ["aidlc-docs", "aidlc-docs/a.md", "aidlc-docs/taken.md"]


def test_only_regular_files_are_replaced(alice: Guarded) -> None:
    docs = alice.root / "aidlc-docs"
    docs.mkdir()
    os.mkfifo(docs / "pipe.md")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError):
            alice.files.write_file("aidlc-docs/pipe.md", "a", "alice", overwrite=overwrite)
    assert (docs / "pipe.md").is_fifo()
    assert alice.files.delete_file("aidlc-docs/pipe.md", "alice") is None


def test_the_audit_is_that_of_the_session(alice: Guarded) -> None:
    alice.files.write_file("aidlc-docs/a.md", "a", "alice")
    audit = alice.files.audit
    assert isinstance(audit, AuditLog)
    assert [entry.seq for entry in audit.recent(2)] == [3, 4]
    for agent in ("alice", alice.session.guard.agent.id):
        assert len(audit.filter_by_agent(agent)) == 4
    assert audit.filter_by_agent("bob") == []


def test_each_agent_has_its_own_record(opened: Opened) -> None:
    alice, bob = opened(), opened(agent="bob")
    alice.files.write_file("aidlc-docs/a.md", "a", "alice")
    bob.files.write_file("aidlc-docs/a.md", "b", "bob", overwrite=True)
    assert {entry.agent for entry in alice.entries()} == {"alice"}
    assert {entry.agent for entry in bob.entries()} == {"bob"}


def test_the_record_has_the_order_of_the_changes(alice: Guarded) -> None:
    """Four threads write one file. Each change ends before the next begins, and the last recorded content is in the
    file.
    """

    def write(letter: str) -> None:
        for number in range(20):
            alice.files.guarded_write_file("aidlc-docs/a.md", letter * (number + 1), "alice", overwrite=True)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = alice.of("aidlc-docs/a.md")
    assert [entry.kind for entry in entries] == ["intent", "outcome"] * 80
    assert entries[-1].bytes == (alice.root / "aidlc-docs/a.md").stat().st_size
    assert alice.names() == ["aidlc-docs", "aidlc-docs/a.md"]


def test_a_change_is_refused_if_its_record_fails(program: Program, source: Path) -> None:
    """While the trail's file system is full, writes and deletions are refused as UNRECORDED."""
    said = program(
        """
import resource
with open_session(sys.argv[1], agent="alice") as session:
    files = FileGuard(session)
    files.guarded_write_file("aidlc-docs/a.md", "old", "alice")
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (session.guard.trail.path.stat().st_size, room[1]))
    print(files.write_file("aidlc-docs/a.md", "new", "alice", overwrite=True).code)
    print(files.write_file("aidlc-docs/b/b.md", "new", "alice").code)
    print(files.delete_file("aidlc-docs/a.md", "alice").code)
    print(files.write_file("aidlc-docs/b.sh", "new", "alice").code)
    print([name for _, *names in os.walk(sys.argv[1]) for each in names for name in each])
    print(Path(sys.argv[1], "aidlc-docs/a.md").read_text())
    resource.setrlimit(resource.RLIMIT_FSIZE, room)
    print(files.write_file("aidlc-docs/a.md", "new", "alice", overwrite=True))
""",
        source,
    )
    assert said.splitlines() == [
        *["UNRECORDED"] * 3,
        "SUFFIX",
        "['aidlc-docs', 'a.md']",
        "old",
        f"{source}/aidlc-docs/a.md",
    ]
