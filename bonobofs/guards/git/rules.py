"""What `[git]` of the policy demands of branches and messages. Pure.

rules = rules_of(policy.document)
refusal = new_branch(rules, "aidlc/unit-1-scribe")
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from bonobofs.decision import Code, Denied
from bonobofs.request import Operation, WorkspacePath

AIDLC_BRANCH_PREFIX: Final = "aidlc/"
PROTECTED_BRANCHES: Final = ["main", "master", "develop"]
COMMIT_MESSAGE_PATTERN: Final = re.compile(r"^\[[\w.-]+\]\s.+")

NO_BRANCH: Final = ""
"""What a detached HEAD is on."""

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]*(/[a-z0-9][a-z0-9-]*)*")
_LONGEST_NAME: Final = 200
_BRACKETED: Final = re.compile(r"\[([^\]\n]*)\]")


class Rules(NamedTuple):
    """`[git]`, ready to be asked."""

    branch_prefix: str = AIDLC_BRANCH_PREFIX
    protected_branches: tuple[str, ...] = tuple(PROTECTED_BRANCHES)
    """Names, or patterns with `*`."""
    message_pattern: re.Pattern[str] = COMMIT_MESSAGE_PATTERN
    author_email: str | None = None
    """May hold {agent} and {id}; None: `ID@bonobofs.invalid`."""
    sign: str | None = None
    """`off`, `ssh:FILE` or `openpgp:KEY`; None: as the operator's own configuration of git has it."""

    def protects(self, branch: str) -> bool:
        """Whether only the operator moves this branch."""
        return any(fnmatchcase(branch, pattern) for pattern in self.protected_branches)


class Refusal(NamedTuple):
    """Why a rule of the git gate refuses; constant for its rule, but for what the policy says."""

    code: Code
    rule: str
    reason: str
    instead: str

    def of(self, operation: Operation, path: str = "") -> Denied:
        """The decision, about an operation on the repository or on one path of it."""
        return Denied(self.code, self.rule, self.reason, self.instead, WorkspacePath(path), operation)


BRANCH: Final = Refusal(
    Code.GIT, "git.branch", "There is no branch of this name.", "Name a branch that `git branch --list` shows."
)
BASE: Final = Refusal(
    Code.GIT, "git.base", "There is nothing of this name to start from.", "Name a branch that exists as the base."
)
EXISTS: Final = Refusal(
    Code.GIT, "git.exists", "A branch of this name is there already.", "Check it out, or choose another name."
)
CLEAN: Final = Refusal(
    Code.GIT,
    "git.clean",
    "The working tree has uncommitted changes.",
    "Commit them, or put them aside with `git stash`, and try again.",
)
CHECKED_OUT: Final = Refusal(
    Code.GIT,
    "git.checked-out",
    "The branch is checked out in another worktree.",
    "Work in that worktree, or on another branch.",
)
STRATEGY: Final = Refusal(
    Code.GIT, "git.strategy", "There is no such way to merge.", "Use the strategy merge or squash."
)
SYMBOLIC: Final = Refusal(
    Code.GIT,
    "git.symbolic",
    "The branch is another name of a branch.",
    "Name the branch itself; the gate moves none by way of another.",
)
SUBMODULE: Final = Refusal(
    Code.GIT,
    "git.submodule",
    "Which commit of a submodule belongs here is the operator's to change.",
    "Leave the submodule as it is, or ask the operator.",
)
FILTER: Final = Refusal(
    Code.GIT,
    "git.filter",
    "The content of this path goes through a program that the repository names, and the gate runs none.",
    "Ask the operator to commit it.",
)
NOT_OURS: Final = Refusal(
    Code.OUTSIDE,
    "outside",
    "No commit may hold a path like this.",
    "Name a file that lies in the workspace, and none of git's own.",
)


def rules_of(document: Mapping[str, Any]) -> Rules:
    """The rules of a policy document, with the defaults for what it leaves out."""
    table = {key: value for key, value in (document.get("git") or {}).items() if value is not None}
    if "message_pattern" in table:
        table["message_pattern"] = re.compile(table["message_pattern"])
    if "protected_branches" in table:
        table["protected_branches"] = tuple(table["protected_branches"])
    return Rules(**table)


def protected(rules: Rules) -> Refusal:
    names = ", ".join(rules.protected_branches)
    return Refusal(
        Code.PROTECTED,
        "git.protected",
        f"Protected branches ({names}) are the operator's to move.",
        f"Work on a branch of your own, such as {rules.branch_prefix}ISSUE.",
    )


def bad_name(rules: Rules) -> Refusal:
    return Refusal(
        Code.GIT,
        "git.name",
        "The name of a branch is lower-case letters, digits, hyphens and slashes.",
        f"Use a name such as {rules.branch_prefix}unit-1-scribe.",
    )


def bad_prefix(rules: Rules) -> Refusal:
    return Refusal(
        Code.GIT,
        "git.prefix",
        f"Branches of agents begin with {rules.branch_prefix}.",
        f"Use a name such as {rules.branch_prefix}unit-1-scribe.",
    )


def bad_message(rules: Rules, why: str) -> Refusal:
    return Refusal(
        Code.GIT,
        "git.message",
        f"A message {why}.",
        "Begin with the issue, as in: [gt-17] Add the functional design."
        if rules.message_pattern == COMMIT_MESSAGE_PATTERN
        else f"Write a message that matches {rules.message_pattern.pattern}",
    )


def new_branch(rules: Rules, name: str) -> Refusal | None:
    """Whether a branch of this name may be made, renamed or removed."""
    if rules.protects(name):
        return protected(rules)
    if not name.isascii() or len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        return bad_name(rules)
    if not name.startswith(rules.branch_prefix) or name == rules.branch_prefix:
        return bad_prefix(rules)
    return None


def moved_branch(rules: Rules, name: str) -> Refusal | None:
    """Whether a branch that exists may be committed to, merged into or reset."""
    return protected(rules) if rules.protects(name) else None


def message(rules: Rules, text: str, issue: str | None) -> str | Refusal:
    """The message with which a commit may be made, for an issue or, None, for the one that it names itself."""
    text = tidy(text)
    if not is_text(text):
        return bad_message(rules, "is text")
    found = _BRACKETED.match(text)
    if found is not None:
        if issue is not None and found[1] != issue:
            return bad_message(rules, "names the issue that it is for, and no other")
        if not text[found.end() :].strip():
            return bad_message(rules, "says what was done, not only for which issue")
    elif issue is not None and text:
        prefixed = f"[{issue}] {text.lstrip()}"
        if rules.message_pattern.match(prefixed):
            return prefixed
    if not rules.message_pattern.match(text):
        return bad_message(rules, f"matches {rules.message_pattern.pattern}")
    return text


def is_text(message: str) -> bool:
    """Whether git can keep it whole: it is UTF-8, and no NUL is in it."""
    try:
        message.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in message


def tidy(text: str) -> str:
    """As git stores a message: no space at the end of lines, none empty around it or twice, a newline at the end."""
    lines: list[str] = []
    for line in text.split("\n"):
        line = line.rstrip(" \t\r\f\v")  # noqa: PLW2901 - the line as it is stored
        if line or (lines and lines[-1]):
            lines.append(line)
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines) + "\n" if lines else ""
