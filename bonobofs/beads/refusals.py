"""The refusals of the Beads gate: one constant sentence for each rule, and what to do instead."""

from __future__ import annotations

from typing import Final, NamedTuple

from bonobofs.policy.decision import Code
from bonobofs.policy.denials import Refusal, listed
from bonobofs.policy.grants import Conventions

LONGEST_TITLE: Final = 500
"""Limit of bd, in bytes."""
LARGEST_TEXT: Final = 100_000
"""Limit in bytes: bd gets a text as an argument, and Linux limits an argument to 128 KiB."""

MOST: Final = 100
"""Limit of the labels, and of the dependencies, of one call."""


class Fault(NamedTuple):
    """The reason of a refusal, and details for people, such as the issue or the label."""

    refusal: Refusal
    about: str = ""


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
    "The issue is assigned to somebody else.",
    "Comment on it, or ask its assignee; work on what is assigned to you or to nobody.",
)
AUTHOR: Final = _refusal(
    "author",
    "Title, description, design, acceptance and notes of an issue are changed only by the agent that made it.",
    "Say it in a comment.",
)
IMMUTABLE: Final = _refusal(
    "immutable", "The type of an issue stays what it was created with.", "Create an issue of the other type."
)
FIELD: Final = _refusal(
    "field",
    "The gate sets no field of this name.",
    "Set title, description, design, acceptance, notes, priority, assignee and labels; the status of an issue that is"
    " there; parent and dependencies of a new one, and later one by one.",
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
    "An issue is not closed while one that it waits for is not.",
    "Close those first, or remove the dependency.",
)
CHILDREN: Final = _refusal("children", "An issue is not closed while one of its children is not.", "Close those first.")
KIND: Final = _refusal(
    "dependency",
    "There is no dependency of this type here.",
    "Use blocks, conditional-blocks, waits-for, parent, related or discovered-from.",
)
PAIR: Final = _refusal(
    "pair",
    "These two issues are already connected by a dependency of another type.",
    "Remove that one first, if this one is meant.",
)
CYCLE: Final = _refusal(
    "cycle",
    "The issues would wait for each other in a circle.",
    "Leave it out, or remove another dependency of the circle first.",
)
PARENT: Final = _refusal(
    "parent", "The issue has another parent already.", "Remove it from that parent first, or leave it there."
)
PARENT_CLOSED: Final = _refusal(
    "parent_closed",
    "No open issue comes below a closed one.",
    "Name a parent that is open; a closed one is reopened first.",
)
BEGUN: Final = _refusal(
    "begun",
    "Work on the issue may have begun, so nothing new is put before it.",
    "Create an issue of its own for what is left, and let that one wait.",
)
WAITING: Final = _refusal(
    "waiting",
    "No worktree is made for an issue that waits for others.",
    "Work on those first, or remove the dependency.",
)


UNANSWERED: Final = {
    "command": _refusal(
        "command",
        "The session's bd does not answer this command.",
        "Use create, update, close, reopen, dep, label, comment, or what reads, such as list and show; the rest is"
        " the operator's.",
    ),
    "flag": _refusal(
        "flag",
        "The session's bd does not take this flag: it could lead elsewhere, past a rule, or to another name.",
        "Leave it out; place, agent and id are the session's and bd's to choose.",
    ),
    "form": _refusal(
        "form",
        "The command is not whole, or is more than it can have.",
        "Name each issue in full, and give what bd help shows for the command.",
    ),
    "file": _refusal(
        "file",
        "The session's bd reads and writes no files, nor its standard input.",
        "Give the text itself; let it not begin with @.",
    ),
    "environment": _refusal(
        "environment",
        "The session's bd is not steered by the environment.",
        "Take the variable away; place and agent are the session's.",
    ),
}
"""The refusals of command lines, by the rule of `Unanswered`."""


def wrong_type(known: Conventions) -> Refusal:
    return _refusal("type", "There is no type of issue of this name here.", f"Use {_any(known.types)}.")


def wrong_label(known: Conventions) -> Refusal:
    forms = [f"{prefix}:NAME" for prefix in known.label_prefixes]
    return _refusal(
        "label",
        "A label is a prefix that the policy lists, a colon and a name without blanks, commas or quotes.",
        f"Write {_any(forms)}.",
    )


def not_to_human(known: Conventions) -> Refusal:
    return _refusal(
        "message",
        "A message is a question to a person, and is assigned to that person.",
        f"Assign it to {known.human}.",
    )


def _any(words: list[str] | tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)


def named(ids: list[str]) -> str:
    """Format a list of ids for people. A long list ends with the number of further ids."""
    return listed(ids, "and")
