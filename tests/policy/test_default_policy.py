"""The default policy says what seed 000 says: every rule of it with what it allows and what it denies."""

from __future__ import annotations

import pytest

from bonobofs.decision import Code, Denied
from bonobofs.policy import examples
from bonobofs.policy.document import load, packaged_default
from bonobofs.policy.engine import allowed_directories, compile_policy, decide, describe
from bonobofs.request import NO_FACTS, Agent, Facts, Kind, Operation, Request, WorkspacePath

DOCUMENT = load(packaged_default()).model_dump(mode="json")
POLICY = compile_policy(DOCUMENT)
ALICE = Agent("alice", "1", "agent")
MB, KB = 1_000_000, 1_000


def code(
    path: str, operation: Operation = Operation.WRITE_FILE, known: Facts = NO_FACTS, kind: Kind = Kind.FILE
) -> str:
    decision = decide(POLICY, ALICE, Request(operation, WorkspacePath(path), kind), known)
    return decision.code.value if isinstance(decision, Denied) else "allowed"


@pytest.mark.parametrize(
    ("rule", "allowed", "denied"),
    [
        ("1 within the workspace", "aidlc-docs/a.md", {"../a.md": "OUTSIDE", "/aidlc-docs/a.md": "OUTSIDE"}),
        ("2 aidlc-docs only .md", "aidlc-docs/unit/a.md", {"aidlc-docs/a.py": "SUFFIX", "aidlc-docs/a.MD": "SUFFIX"}),
        (
            "3 orchestrator only .py",
            "orchestrator/lib/a.py",
            {"orchestrator/a.md": "SUFFIX", "orchestrator/a": "SUFFIX"},
        ),
        ("4 tests only .py", "tests/test_a.py", {"tests/a.json": "SUFFIX", "tests/.py": "HIDDEN"}),
        ("5 .beads closed", "aidlc-docs/beads.md", {".beads/issues.db": "PROTECTED", "tests/.beads": "PROTECTED"}),
        (
            "6 .git closed",
            "aidlc-docs/git.md",
            {".git/config": "PROTECTED", ".git": "PROTECTED", "tests/.git/a.py": "PROTECTED"},
        ),
        ("7 templates only .md", "templates/a.md", {"templates/a.html": "SUFFIX"}),
        (
            "8 hidden closed",
            "aidlc-docs/a.md",
            {"aidlc-docs/.a.md": "HIDDEN", ".envrc": "HIDDEN", "tests/.x/a.py": "HIDDEN"},
        ),
        (
            "8 look-alikes too",
            "aidlc-docs/a.md",
            {".GIT/hooks/x": "HIDDEN", ".g\u200cit/config": "HIDDEN", ".git /x": "HIDDEN"},
        ),
        ("9 no ..", "aidlc-docs/a..b.md", {"aidlc-docs/../a.md": "OUTSIDE", "tests/x/../../.git/a": "OUTSIDE"}),
        (
            "everything else denied",
            "tests/a.py",
            {"src/a.py": "DEFAULT", "setup.py": "DEFAULT", "aidlc-docs-x/a.md": "DEFAULT"},
        ),
        ("the policy is not for agents", "tests/policy.py", {"policy.toml": "PROTECTED"}),
    ],
)
def test_seed_000(rule: str, allowed: str, denied: dict[str, str]) -> None:
    assert code(allowed) == "allowed", rule
    assert {path: code(path) for path in denied} == denied


@pytest.mark.parametrize(
    ("path", "limit"),
    [("aidlc-docs/a.md", MB), ("templates/a.md", MB), ("orchestrator/a.py", 500 * KB), ("tests/a.py", 500 * KB)],
)
def test_artifacts_are_at_most_1_mb_and_code_500_kb(path: str, limit: int) -> None:
    assert code(path, known=Facts(size=limit)) == "allowed"
    assert code(path, known=Facts(size=limit + 1)) == "SIZE"
    assert code(path, Operation.TRUNCATE, Facts(size=limit + 1, size_before=limit + 2)) == "allowed"


@pytest.mark.parametrize("path", ["aidlc-docs/a.md", "templates/a.md"])
def test_documents_are_not_executable(path: str) -> None:
    assert code(path, Operation.CREATE_FILE, Facts(mode=0o644)) == "allowed"
    assert code(path, Operation.CREATE_FILE, Facts(mode=0o755)) == "EXECUTABLE"
    assert code(path, known=Facts(size=9, head=b"#!/bin/s")) == "EXECUTABLE"
    assert code(path, known=Facts(size=9, head=b"# Title\n")) == "allowed"


def test_code_may_be_a_script() -> None:
    assert code("orchestrator/run.py", Operation.CREATE_FILE, Facts(mode=0o755, head=b"#!/usr/b")) == "allowed"


@pytest.mark.parametrize("path", ["AGENTS.md", "README.md"])
def test_agents_md_and_readme_md_are_never_deleted(path: str) -> None:
    assert code(path, Operation.DELETE_FILE, Facts(leaves=True)) == "KEEP"
    assert code(path, Operation.RENAME, Facts(leaves=True)) == "KEEP"
    assert code(f"aidlc-docs/{path}", Operation.DELETE_FILE, Facts(leaves=True)) == "allowed"


@pytest.mark.parametrize("path", [".git/HEAD", ".beads/issues.db", ".git", ".beads"])
def test_git_and_beads_are_never_deleted(path: str) -> None:
    assert code(path, Operation.DELETE_FILE, Facts(leaves=True)) == "PROTECTED"
    assert code(path, Operation.RENAME, Facts(leaves=True), Kind.DIRECTORY) == "PROTECTED"


def test_directories_may_be_made_where_files_may() -> None:
    for path in ("aidlc-docs", "aidlc-docs/unit-1", "tests/fixtures"):
        assert code(path, Operation.MKDIR, kind=Kind.DIRECTORY) == "allowed"
    assert code("src", Operation.MKDIR, kind=Kind.DIRECTORY) == "DEFAULT"
    assert code("", Operation.SET_TIMES, kind=Kind.DIRECTORY) == "DEFAULT"


def test_devices_are_closed() -> None:
    assert code("aidlc-docs/null.md", Operation.MKNOD, Facts(privileged=True), Kind.DEVICE) == "DEVICE"


def test_the_allowed_directories_are_listed_as_the_contracts_write_them() -> None:
    assert allowed_directories(POLICY, "agent") == [
        "aidlc-docs/ (.md, 1 MB)",
        "templates/ (.md, 1 MB)",
        "orchestrator/ (.py, 500 KB)",
        "tests/ (.py, 500 KB)",
    ]
    assert allowed_directories(POLICY, "nobody") == []


def test_its_examples_hold() -> None:
    assert examples.failures(DOCUMENT) == []
    assert examples.count(DOCUMENT) > 10


def test_it_can_be_told_in_words() -> None:
    text = describe(POLICY, "agent")
    for part in (
        "`aidlc-docs/`, `templates/`: `.md` files, at most 1 MB, nothing executable",
        "`.bonobofs/`",
        "`README.md`",
    ):
        assert part in text


def test_every_refusal_says_what_to_do_instead() -> None:
    for path, word in {
        "aidlc-docs/a.py": "Write a .md file of at most 1 MB below aidlc-docs/ or templates/.",
        "x": "or a .py file of at most 500 KB below orchestrator/ or tests/.",
        ".git/config": "git gate",
        ".beads/x": "Beads gate",
        "policy.toml": "operator",
        "tests/.x": "without a leading dot",
    }.items():
        decision = decide(POLICY, ALICE, Request(Operation.WRITE_FILE, WorkspacePath(path)))
        assert isinstance(decision, Denied)
        assert word in decision.instead
        assert path not in decision.reason


def test_every_code_of_the_engine_can_be_met_under_it() -> None:
    met = {
        code("a/../b"),
        code("tests/x", Operation.MKNOD, kind=Kind.DEVICE),
        code("tests/a.py", known=Facts(foreign_names=1)),
        code(".git"),
        code("tests/.x"),
        code("tests/a.md"),
        code("aidlc-docs/a.md", known=Facts(mode=0o100)),
        code("README.md", Operation.DELETE_FILE),
        code("x"),
        code("tests/a.py", known=Facts(size=MB)),
    }
    elsewhere = {Code.ROLE, Code.LEASED, Code.ASK, Code.IDENTITY, Code.UNRECORDED}
    assert met == set(Code) - elsewhere
