"""An unexpected exception in a guard call is one entry with result `error`, and the caller gets the exception."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pygit2
import pytest

from bonobofs.audit.reader import read
from bonobofs.errors import BonobofsError, GitError
from bonobofs.guards import BeadsGuard, FileGuard, FileTools, GitGuard, ValidationResult
from bonobofs.policy.role_lists import BEADS, GIT, TOOLS
from bonobofs.session import OpenSession, open_session

A: Any = "alice"
CALLS: dict[type, dict[str, tuple[Any, ...]]] = {
    FileGuard: {
        "validate_path": ("aidlc-docs/a.md", "write"),
        "write_file": ("aidlc-docs/a.md", None, A),
        "guarded_write_file": (None, "a", A),
        "delete_file": (None, A),
        "guarded_delete_file": (7, A),
        "list_allowed_directories": ("too many",),
    },
    FileTools: {
        "read_file": (None,),
        "guarded_read_file": ("aidlc-docs", "first"),
        "guarded_hash_file": ("aidlc-docs",),
        "write_file": ("aidlc-docs/a.md", 7),
        "guarded_write_file": (None, "a"),
        "list_files": (3.5,),
        "guarded_list_files": ("", 7),
        "search_files": (None,),
        "guarded_search_files": ("(", ""),
    },
    GitGuard: {
        "create_branch": (None, A),
        "guarded_create_branch": ("aidlc/a", A, 7),
        "checkout_branch": (7, A),
        "guarded_checkout_branch": ({}, A),
        "commit": ("[gt-1] a", None, A, "gt-1"),
        "guarded_commit": ("[gt-1] a", [None], A, "gt-1"),
        "merge": ("main",),
        "guarded_merge": ("main", 7, A),
        "get_status": (),
        "get_diff": (7,),
    },
    BeadsGuard: {
        "validate_create": (None, "task", [], A),
        "validate_update": (None, None, A),
        "validate_dependency": ("gt-1", "gt-2", [], A),
        "guarded_create": (None, "task", 1, A),
        "guarded_update": ("gt-1",),
        "guarded_label": ("gt-1",),
        "guarded_close": ("gt-1", A, 7),
        "guarded_reopen": ("gt-1", A, []),
        "guarded_dependency": ("gt-1", "gt-2", "blocks"),
        "guarded_remove_dependency": ("gt-1",),
        "guarded_comment": ("gt-1", None, A),
        "begin_work": ("gt-1",),
    },
}


class _NoBeads:
    """These calls do not concern bd: a call that reaches the lock fails there."""

    def locked_client(self) -> Any:
        raise TypeError("the call came as far as bd")


def _guard_of(of: type, session: OpenSession) -> Any:
    return BeadsGuard(session, _NoBeads()) if of is BeadsGuard else of(session)  # type: ignore[arg-type]


@pytest.fixture
def repository(source: Path) -> Path:
    repository = pygit2.init_repository(str(source), initial_head="main")
    who = pygit2.Signature("o", "o@example.com", 1, 0)
    repository.create_commit("HEAD", who, who, "a", repository.index.write_tree(), [])
    return source


def test_the_table_has_every_public_call() -> None:
    for of, calls in CALLS.items():
        public = {name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_")}
        assert set(calls) == public - {"close", "has_issue"}, of


@pytest.mark.parametrize(("of", "name"), [(of, name) for of, calls in CALLS.items() for name in calls])
def test_wrong_types_are_one_error_in_the_record(home: Path, repository: Path, of: type, name: str) -> None:
    with open_session(repository, agent="alice", policy=_policy(home)) as session:
        guard = _guard_of(of, session)
        with pytest.raises((TypeError, ValueError, AttributeError, BonobofsError, OSError)) as raised:
            getattr(guard, name)(*CALLS[of][name])
        assert not isinstance(raised.value, PermissionError)
        trail = session.guard.trail.path
    found = [entry for entry in read(trail) if entry.result != "allowed"]
    assert [entry.result for entry in found] == ["error"], found
    (entry,) = found
    assert entry.reason
    assert "EIO" not in entry.reason
    guards = {GitGuard: "git", BeadsGuard: "beads"}
    assert entry.guard == guards.get(of, "file")


def _policy(home: Path) -> Path:
    path = home.parent / "allow.toml"
    text = f'[role.agent]\nwrite = ["**"]\ntools = {[*TOOLS]}\ngit = {[*GIT]}\nbeads = {[*BEADS]}\n'
    path.write_text(f'default = "allow"\nhidden = ["**"]\n{text}', encoding="utf-8")
    return path


def test_a_failed_git_call_is_one_entry_with_its_reason(repository: Path) -> None:
    with open_session(repository, agent="alice") as session:
        guard = GitGuard(session)
        guard.guarded_create_branch("aidlc/gt-1", "alice")
        guard.guarded_checkout_branch("aidlc/gt-1", "alice")
        with pytest.raises(GitError):
            guard.commit("[gt-1] a", ["aidlc-docs/none.md"], "alice", "gt-1")
        denied = guard.create_branch("aidlc/a", "alice", base="nowhere")
        assert isinstance(denied, ValidationResult)
        entries = [entry for entry in session.log.recent() if entry.result != "allowed"]
    assert [(entry.operation, entry.result) for entry in entries] == [("commit", "error"), ("create_branch", "denied")]
    assert entries[0].reason is not None
    assert "none.md" in entries[0].reason
