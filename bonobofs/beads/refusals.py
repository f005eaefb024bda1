"""The refusals of the Beads gate: one constant sentence for each rule, and what to do instead."""

from __future__ import annotations

from typing import Final

from bonobofs.policy.decision import Code
from bonobofs.policy.denials import Refusal, listed
from bonobofs.policy.role_lists import Conventions

LONGEST_TITLE: Final = 500
"""Limit of bd, in bytes."""
LARGEST_TEXT: Final = 100_000
"""Limit in bytes: bd gets a text as an argument, and Linux limits an argument to 128 KiB."""

MOST: Final = 100
"""Limit of the labels, and of the dependencies, of one call."""


class Fault(Exception):  # noqa: N818 - a refusal, not an error
    """A rule refuses a call. `about` has details for people, such as the issue or the label."""

    def __init__(self, refusal: Refusal, about: str = "") -> None:
        super().__init__(refusal.reason, about)
        self.refusal: Final = refusal
        self.about: Final = about


def _refusal(rule: str, reason: str, instead: str) -> Refusal:
    return Refusal(Code.BEADS, f"beads.{rule}", reason, instead)


TITLE: Final = _refusal(
    "title",
    f"A title is one line of 1 to {LONGEST_TITLE} bytes of UTF-8, not blank and without control characters.",
    "Give a title that says in one line what is to be done; put the rest into the description.",
)
TEXT: Final = _refusal(
    "text",
    f"A text of an issue is UTF-8 of at most {LARGEST_TEXT:,} bytes without NUL; a comment is not blank.",
    "Shorten it, or put it into a file of the workspace and name that.",
)
PRIORITY: Final = _refusal("priority", "A priority is a number from 0, the most urgent, to 4.", "Give 0, 1, 2, 3 or 4.")
ASSIGNEE: Final = _refusal(
    "assignee",
    "An assignee is a name of at most 64 printable characters without blanks around it.",
    "Give the label of an agent, or the name of the person.",
)
EXISTS: Final = _refusal(
    "exists", "There is no issue of this id.", "Give the id in full, as bd list shows it; abbreviations are not taken."
)
OWNER: Final = _refusal(
    "owner",
    "The issue is assigned to another agent or person.",
    "Comment on it, or ask its assignee; change issues that are assigned to you, or unassigned.",
)
AUTHOR: Final = _refusal(
    "author",
    "Only the agent that created an issue changes its title, description, design, acceptance and notes.",
    "Add a comment.",
)
ATTACHMENTS: Final = _refusal(
    "attachments", f"An issue has at most {MOST} attached files.", "Detach a file, or attach a list of files."
)
IMMUTABLE: Final = _refusal(
    "immutable", "The type of an issue cannot be changed.", "Create an issue of the other type."
)
FIELD: Final = _refusal(
    "field",
    "The gate sets no field of this name.",
    "Set title, description, design, acceptance, notes, priority, assignee and labels. Status: of an existing issue."
    " Parent and dependencies: of a new issue, or one by one with dep add.",
)
MANY: Final = _refusal(
    "many",
    f"One call has at most {MOST} labels, and as many dependencies.",
    "Give those that matter, or give them in several calls.",
)
PHASE: Final = _refusal(
    "phase", "A phase: label stays on its issue.", "Leave it there; a label of another phase may be added."
)
STATUS: Final = _refusal(
    "status",
    "The status of an issue goes from open to in_progress to done, or from any to closed.",
    "Take the next step, or close it; a closed issue is reopened by reopen, in a role that has it.",
)
BLOCKERS: Final = _refusal(
    "blockers",
    "An issue cannot be closed while an issue that it waits for is open.",
    "Close those first, or remove the dependency.",
)
CHILDREN: Final = _refusal("children", "An issue cannot be closed while a child is open.", "Close those first.")
KIND: Final = _refusal(
    "dependency",
    "There is no dependency of this type here.",
    "Use blocks, conditional-blocks, waits-for, parent, related or discovered-from.",
)
PAIR: Final = _refusal(
    "pair",
    "These two issues are already connected by a dependency of another type.",
    "Remove the other dependency first.",
)
CYCLE: Final = _refusal(
    "cycle",
    "The issues would wait for each other in a cycle.",
    "Leave it out, or remove another dependency of the cycle first.",
)
PARENT: Final = _refusal("parent", "The issue already has another parent.", "Remove it from that parent first.")
PARENT_CLOSED: Final = _refusal(
    "parent_closed",
    "An open issue cannot have a closed parent.",
    "Name an open parent, or reopen the parent first.",
)
BEGUN: Final = _refusal(
    "begun",
    "Work on the issue may have begun, so it gets no new blocker.",
    "Create another issue for the rest of the work, and let that issue wait.",
)
WAITING: Final = _refusal(
    "waiting",
    "An issue that waits for others gets no worktree.",
    "Close those first, or remove the dependency.",
)


UNSUPPORTED: Final = {
    "command": _refusal(
        "command",
        "The session's bd does not support this command.",
        "Use create, update, close, reopen, dep, label, comment, or a command that reads, such as list. Ask the"
        " operator for other commands.",
    ),
    "flag": _refusal(
        "flag",
        "The session's bd does not take this flag: it could select another database or agent, or override a rule.",
        "Leave it out; the session sets the database and the agent, and bd chooses the id.",
    ),
    "form": _refusal(
        "form",
        "The command lacks a word or a value, or has one too many.",
        "Give the full id of each issue, and the words that bd help shows for the command.",
    ),
    "file": _refusal(
        "file",
        "The session's bd reads and writes no files, nor its standard input.",
        "Give the text itself, without an @ at its start.",
    ),
    "environment": _refusal(
        "environment",
        "Environment variables do not configure the session's bd.",
        "Unset the variable; the session sets the database and the agent.",
    ),
}
"""The refusals of command lines, by the rule of `UnsupportedCommand`."""


def wrong_type(conventions: Conventions) -> Refusal:
    return _refusal("type", "There is no type of issue of this name here.", f"Use {_any(conventions.types)}.")


def wrong_label(conventions: Conventions) -> Refusal:
    forms = [f"{prefix}:NAME" for prefix in conventions.label_prefixes]
    return _refusal(
        "label",
        "A label is a prefix that the policy lists, a colon and a name without blanks, commas or quotes.",
        f"Write {_any(forms)}.",
    )


def not_to_human(conventions: Conventions) -> Refusal:
    return _refusal(
        "message",
        "A message is a question to a person, and is assigned to that person.",
        f"Assign it to {conventions.human}.",
    )


def _any(words: list[str] | tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)


def format_ids(ids: list[str]) -> str:
    """Format a list of ids for people. A long list ends with the number of further ids."""
    return listed(ids, "and")
