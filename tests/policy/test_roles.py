"""The operations that a role may call at the gates are exactly those of its lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from bonobofs.policy.decision import Code, Denied, Permit
from bonobofs.policy.engine import compile_policy, decide
from bonobofs.policy.lease_set import UNKNOWN, compile_leases
from bonobofs.policy.request import NO_FACTS, Context, Operation, Principal, Request, WorkspacePath
from bonobofs.policy.role_lists import BEADS, CALLS, EVERY, FAMILIES, GIT, OF_A_GATE, TOOLS
from tests.policy.random_policies import context, documents

ALICE = Principal("alice", "1", "agent")
ROOT = WorkspacePath("")
NOBODYS = {Operation.CREATE_WORKTREE, Operation.REMOVE_WORKTREE, Operation.CALL}


def code(document: dict[str, Any], role: str, operation: Operation, path: str = "", known: Context = NO_FACTS) -> str:
    request = Request(operation, WorkspacePath(path))
    decision = decide(compile_policy(document), ALICE._replace(role=role), request, known)
    return decision.code.value if isinstance(decision, Denied) else "allowed"


def test_every_word_grants_an_operation_and_every_operation_has_a_word() -> None:
    files = {"write_file", "create_file", "delete_file", "rename", "link", "symlink", "mkdir", "rmdir", "mknod"}
    files |= {"truncate", "allocate", "copy_range", "set_mode", "set_owner", "set_times", "set_xattr", "remove_xattr"}
    of_a_gate = {operation.value for operation in OF_A_GATE}
    assert {operation.value for operation in Operation} == files | of_a_gate | {"connect"}
    assert "connect" not in files | of_a_gate
    for family, words in {**FAMILIES, "git": GIT}.items():
        assert {word for call in CALLS.values() if call.family == family for word in call.words} == {*words}


@pytest.mark.parametrize(("family", "word"), [(family, word) for family, words in FAMILIES.items() for word in words])
def test_a_word_grants_its_operations_only(family: str, word: str) -> None:
    document = {"role": {"r": {family: [word]}}}
    for operation, call in OF_A_GATE.items():
        has = word in call.words or (word == EVERY and call.words)
        expected = "allowed" if call.family == family and has else "ROLE"
        assert code(document, "r", operation) == expected, operation


def test_a_role_without_lists_may_call_nothing_and_the_built_in_role_has_defaults() -> None:
    policy = {"role": {"r": {"write": ["**"]}}, "default": "allow"}
    assert {code(policy, "r", operation) for operation in OF_A_GATE} == {"ROLE"}
    refused = {operation for operation in OF_A_GATE if code(policy, "agent", operation) != "allowed"}
    assert refused == {*NOBODYS, Operation.CREATE_EPIC, Operation.REOPEN_ISSUE}
    defined = {"role": {"agent": {"write": ["**"]}}}
    assert {code(defined, "agent", operation) for operation in OF_A_GATE} == {"ROLE"}


def test_no_list_grants_worktree_operations_or_unknown_calls() -> None:
    everything = {"role": {"r": {"tools": [*TOOLS], "git": [*GIT], "beads": [*BEADS]}}}
    refused = {operation for operation in OF_A_GATE if code(everything, "r", operation) != "allowed"}
    assert refused == NOBODYS


@settings(deadline=None)
@given(documents, context)
def test_path_rules_do_not_apply_to_gate_operations(document: dict[str, Any], known: Context) -> None:
    """Reads are free. A commit is judged file by file."""
    bare = {"role": document["role"]}
    for role in ("agent", "writer", "nobody"):
        for operation in (Operation.READ_FILE, Operation.COMMIT, Operation.UPDATE_ISSUE):
            for path in ("", ".git/config", "a/x.md"):
                assert code(document, role, operation, path, known) == code(bare, role, operation, path)


def test_leases_apply_to_changes_and_not_to_reads() -> None:
    """The files of a commit are judged as its related changes. Reads succeed also while the leases are unknown."""
    theirs = {"shared": False, "own": False, "holder": "bob", "chain": None, "until": "2030-01-01T00:00:00+00:00"}
    policy = compile_policy({"default": "allow"})
    for leases in (compile_leases([{**theirs, "patterns": ["**"]}]), UNKNOWN):
        bound = policy.bound_by(leases)
        for operation in (Operation.READ_FILE, Operation.COMMIT, Operation.UPDATE_ISSUE):
            assert isinstance(decide(bound, ALICE, Request(operation, WorkspacePath("a"))), Permit)
        refused = decide(bound, ALICE, Request(Operation.WRITE_FILE, WorkspacePath("a")), Context(size=1, tool=True))
        assert isinstance(refused, Denied)
        assert refused.code is Code.LEASED


@pytest.mark.parametrize("path", ["..", "a/../b", "/etc/passwd", "a//b", "./a", "a\0b", "\ud800"])
def test_a_read_tool_refuses_a_path_that_leads_out(path: str) -> None:
    for operation in (Operation.READ_FILE, Operation.LIST_FILES, Operation.SEARCH_FILES):
        assert code({}, "agent", operation, path) == "OUTSIDE"


def test_write_file_needs_the_tool_and_the_right_to_write() -> None:
    document = {
        "protect": [{"paths": ["locked/"]}],
        "rule": [{"name": "r", "paths": ["docs/", "locked/"]}],
        "role": {
            "impl": {"write": ["**"], "tools": ["write_file"]},
            "mounted": {"write": ["**"]},
            "control": {"tools": ["write_file"]},
        },
    }
    through = Context(size=1, tool=True)
    assert code(document, "impl", Operation.WRITE_FILE, "docs/a", through) == "allowed"
    assert code(document, "impl", Operation.WRITE_FILE, "src/a", through) == "DEFAULT"
    assert code(document, "impl", Operation.WRITE_FILE, "locked/a", through) == "PROTECTED"
    assert code(document, "impl", Operation.WRITE_FILE, "docs/../a", through) == "OUTSIDE"
    assert code(document, "mounted", Operation.WRITE_FILE, "docs/a", through) == "ROLE"
    assert code(document, "mounted", Operation.WRITE_FILE, "docs/a", Context(size=1)) == "allowed"
    assert code(document, "control", Operation.WRITE_FILE, "docs/a", through) == "ROLE"
    assert code(document, "nobody", Operation.WRITE_FILE, "docs/a", through) == "ROLE"
    assert code(document, "impl", Operation.DELETE_FILE, "docs/a", through) == "ROLE"


def test_a_denial_lists_the_calls_of_the_role_and_the_roles_of_the_call() -> None:
    document = {
        "role": {
            "control": {"tools": ["search_files", "read_file"]},
            "impl": {"tools": [*TOOLS], "git": ["add"]},
            "lead": {"git": ["merge", "add"]},
        }
    }
    policy = compile_policy(document)

    def told(role: str, operation: Operation, known: Context = NO_FACTS) -> tuple[Code, str, str, str]:
        decision = decide(policy, ALICE._replace(role=role), Request(operation, WorkspacePath("a")), known)
        assert isinstance(decision, Denied)
        return decision.code, decision.rule, decision.reason, decision.instead

    assert told("control", Operation.WRITE_FILE, Context(tool=True)) == (
        Code.ROLE,
        "role:control:tools:write_file",
        "The role control does not have the tool write_file.",
        "Use what this role has there: read_file, search_files; or work in a role that has it: agent or impl.",
    )
    assert told("impl", Operation.MERGE)[2:] == (
        "The role impl does not have git merge.",
        "Use what this role has there: add; or work in a role that has it: agent or lead.",
    )
    assert told("impl", Operation.CREATE_EPIC)[2:] == (
        "The role impl does not have epic at the Beads gate.",
        "Ask the operator; no role of this policy has it.",
    )
    assert told("lead", Operation.CREATE_ISSUE)[3] == "Work in a role that has it: agent."
    assert told("nobody", Operation.READ_FILE)[2] == "The policy does not define this role, so it may do nothing."


def test_the_permit_names_the_role_and_its_word() -> None:
    policy = compile_policy({"role": {"r": {"git": ["switch"], "beads": ["dep"]}}})
    agent = ALICE._replace(role="r")
    assert decide(policy, agent, Request(Operation.CHECKOUT_BRANCH, ROOT)) == Permit("role:r:git:switch")
    assert decide(policy, agent, Request(Operation.REMOVE_DEPENDENCY, ROOT)) == Permit("role:r:beads:dep")


def test_an_undefined_role_may_not_connect() -> None:
    document = {"network": {"allow": ["*"]}}
    known = Context(endpoint=("example.com", 443))
    assert code(document, "agent", Operation.CONNECT, known=known) == "allowed"
    assert code(document, "nobody", Operation.CONNECT, known=known) == "ROLE"
