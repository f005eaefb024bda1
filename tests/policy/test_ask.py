"""`[[ask]]`: which changes ask, and what an answer permits."""

from __future__ import annotations

from typing import Any

import pytest

from bonobofs.errors import PolicyError
from bonobofs.policy.answers import Answers, compile_answers, question_id
from bonobofs.policy.decision import Code, Decision, Denied, Permit
from bonobofs.policy.document import parse
from bonobofs.policy.engine import compile_policy, decide
from bonobofs.policy.lease_set import UNKNOWN, compile_leases
from bonobofs.policy.request import NO_FACTS, Context, Operation, Principal, Request, WorkspacePath

ALICE = Principal("alice", "1", "agent")
SESSION = "5f2c"
POLICY: dict[str, Any] = {
    "default": "allow",
    "hidden": ["**"],
    "temporary": ["**/*.tmp"],
    "protect": [{"paths": ["ci/locked"]}],
    "scratch": [{"paths": ["ci/cache/"]}],
    "ask": [{"paths": ["ci/"]}, {"paths": ["docs/"], "operations": ["delete_file"]}],
}


def judge(path: str, operation: Operation = Operation.WRITE_FILE, *answers: dict[str, Any], **context: Any) -> Decision:
    policy = compile_policy(POLICY).with_answers(compile_answers(SESSION, answers))
    return decide(policy, ALICE, Request(operation, WorkspacePath(path)), Context(**context))


def answer(path: str = "", *, allows: bool = True, number: int = 1, **fields: Any) -> dict[str, Any]:
    return {"number": number, "allows": allows, "note": "", "effect": "write", "path": path, "pattern": "", **fields}


def test_a_matching_change_asks_and_the_same_change_has_the_same_question() -> None:
    first, again = judge("ci/a"), judge("ci/a", Operation.TRUNCATE)
    assert isinstance(first, Denied)
    assert isinstance(again, Denied)
    assert first.code is Code.ASK
    assert first.question == again.question == question_id(SESSION, "write", "ci/a")
    removal = judge("ci/a", Operation.DELETE_FILE)
    assert isinstance(removal, Denied)
    assert removal.question not in ("", first.question)


def test_only_the_listed_operations_ask() -> None:
    assert isinstance(judge("docs/a"), Permit)
    assert isinstance(judge("docs/a", Operation.DELETE_FILE), Denied)


def test_an_answer_permits_its_path_and_effect_alone() -> None:
    permit = judge("ci/a", Operation.WRITE_FILE, answer("ci/a"))
    assert isinstance(permit, Permit)
    assert permit.answer == 1
    assert isinstance(judge("ci/b", Operation.WRITE_FILE, answer("ci/a")), Denied)
    assert isinstance(judge("ci/a", Operation.DELETE_FILE, answer("ci/a")), Denied)
    assert isinstance(judge("ci/a", Operation.RENAME, answer("ci/a"), leaves=True), Denied)


def test_the_newest_answer_decides_and_a_no_shows_the_note() -> None:
    no = answer(pattern="ci/**", allows=False, number=2, note="Leave it.")
    denied = judge("ci/a", Operation.WRITE_FILE, answer("ci/a"), no)
    assert isinstance(denied, Denied)
    assert "Leave it." in denied.about
    assert denied.question == ""
    assert isinstance(judge("ci/a", Operation.WRITE_FILE, no, answer("ci/a", number=3)), Permit)


@pytest.mark.parametrize("path", ["ci/locked", ".git/config", "../a"])
def test_an_answer_lifts_no_other_refusal(path: str) -> None:
    denied = judge(path, Operation.WRITE_FILE, answer(pattern="**"), answer(path, number=2))
    assert isinstance(denied, Denied)
    assert denied.code is not Code.ASK


def test_an_answer_lifts_no_lease() -> None:
    lease = {"patterns": ["ci/"], "shared": False, "own": False, "holder": "bob", "chain": None, "until": "2030-01-01"}
    answers = compile_answers(SESSION, [answer(pattern="**")])
    for leases, word in ((compile_leases([lease]), "bob"), (UNKNOWN, "lease")):
        policy = compile_policy(POLICY).with_answers(answers).bound_by(leases)
        denied = decide(policy, ALICE, Request(Operation.WRITE_FILE, WorkspacePath("ci/a")))
        assert isinstance(denied, Denied)
        assert denied.code is Code.LEASED
        assert word in f"{denied.holding} {denied.reason}"


def test_scratch_and_staged_files_do_not_ask() -> None:
    assert isinstance(judge("ci/cache/a", Operation.CREATE_FILE), Permit)
    assert isinstance(judge("other/a.tmp", Operation.CREATE_FILE), Permit)


def test_without_a_mount_no_question_has_an_id() -> None:
    policy = compile_policy(POLICY)
    assert policy.answers == Answers()
    denied = decide(policy, ALICE, Request(Operation.WRITE_FILE, WorkspacePath("ci/a")), NO_FACTS)
    assert isinstance(denied, Denied)
    assert denied.question == ""
    assert "no mount" in denied.about


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ('paths = ["a/"]\noperations = ["read_file"]', "read_file"),
        ("paths = []", "paths"),
        ('paths = ["a/"]\ntimeout = "soon"', "duration"),
        ('paths = ["a/"]\neffect = "ask"', "unknown key"),
    ],
)
def test_a_mistake_in_an_ask_table_is_reported(table: str, word: str) -> None:
    with pytest.raises(PolicyError, match=word):
        parse(f"[[ask]]\n{table}\n", "p.toml")
