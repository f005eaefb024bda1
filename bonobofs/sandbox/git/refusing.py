"""What a refusal looks like: one line of JSON, one of help, exit 77."""

from __future__ import annotations

import json
from typing import Final

from bonobofs.decision import Code, Denied, as_document
from bonobofs.sandbox.git.telling import complain

REFUSED: Final = 77

_WORDS: Final = {
    "git.isolation": ("E_GIT_BOUNDARY_CWD_OUTSIDE_WORKTREE", "cwd-outside-worktree"),
    "git.path": ("E_GIT_BOUNDARY_WORKTREE_PATH", "path-outside-worktree"),
    "git.repository": ("E_GIT_BOUNDARY_REPOSITORY", "another-repository"),
    "git.message": ("E_GIT_BOUNDARY_COMMIT_TASK_ID", "commit-task-id"),
    "git.alias": ("E_GIT_OP_BLOCKED", "alias-not-understood"),
    "git.option": ("E_GIT_OP_BLOCKED", "option-not-understood"),
    "git.form": ("E_GIT_OP_BLOCKED", "form-not-answered"),
}
"""The code and CLEO's word for what a rule refuses."""


def show(decision: Denied, subcommand: str) -> int:
    """Tell a decision on standard error, and give the exit status."""
    denied = as_document(decision, decision.path, decision.operation)
    code, error = _WORDS.get(decision.rule) or _by_code(decision)
    document = {"cleo_error": True, **denied, "code": code, "subcommand": subcommand, "error": error}
    help_line = " ".join(f"git: {decision.reason} {decision.instead}".split())
    complain(f"{json.dumps(document)}\n{help_line}\n")
    return REFUSED


def _by_code(decision: Denied) -> tuple[str, str]:
    if decision.code is Code.ROLE:
        return "E_GIT_OP_BLOCKED", "op-blocked"
    word = decision.rule.removeprefix("git.") if decision.code is Code.GIT else decision.code.lower()
    return f"E_GIT_{word.upper().replace('-', '_')}", word
