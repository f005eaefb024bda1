"""Words that bd knows, and what it checks of the fields of an issue."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .answers import Failed
from .store import Store

TYPES = (
    "task", "epic", "bug", "feature", "chore", "decision", "message", "molecule", "gate", "spike", "story",
    "milestone", "event",
)  # fmt: skip
ALIASES = {"enhancement": "feature", "dec": "decision"}
TOLD_TYPES = TYPES[:6]
"""Those that `types` and the texts of errors name."""
INFRA = ("agent", "role", "rig", "message")
STATUSES = ("open", "in_progress", "blocked", "deferred", "closed", "pinned", "hooked")
EDGES = frozenset(
    (
        "blocks", "parent-child", "conditional-blocks", "waits-for", "related", "discovered-from", "replies-to",
        "relates-to", "duplicates", "supersedes", "authored-by", "assigned-to", "approved-by", "attests", "tracks",
        "until", "caused-by", "validates", "delegated-from", "depends-on", "blocked-by",
    )
)  # fmt: skip
"""What `create --deps` accepts; `dep add` takes any word."""

LABEL = 255

TEXTS = {"description": "description", "design": "design", "notes": "notes", "acceptance": "acceptance_criteria"}
"""Flag -> key of the texts that are stored as given."""


def title(text: str, where: str) -> str:
    if not text:
        raise Failed("title is required", where)
    size = len(text.encode(errors="surrogateescape"))  # what it calls characters are bytes
    if size > 500:
        raise Failed(f"title must be 500 characters or less (got {size})", where)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Failed("Error 1105: invalid string for charset utf8mb4", where) from None
    return text


def description(text: str) -> str:
    """The text, or what standard input holds where it is a dash."""
    return sys.stdin.read() if text == "-" else text


def issue_type(word: str, where: str) -> str:
    word = ALIASES.get(word, word)
    if word not in TYPES:
        raise Failed(f"invalid issue type {word!r}; valid types: {', '.join(TOLD_TYPES)}", where)
    return word


def priority(word: str, where: str) -> int:
    digits = word[1:] if word[:1] in ("P", "p") else word
    if digits not in {"0", "1", "2", "3", "4"}:
        raise Failed(f"invalid priority {word!r} (expected 0-4 or P0-P4)", where)
    return int(digits)


def status(word: str, store: Store, where: str) -> str:
    if word not in STATUSES and word not in store.custom_statuses():
        raise Failed(f"invalid status {word!r} (built-in: {', '.join(STATUSES)})", where)
    return word


def assignee(name: str, where: str) -> str:
    if len(name) > 255:
        raise Failed("Error 1105: string is too large for column 'assignee'", where)
    return name


def metadata(text: str, where: str) -> Any:
    """The JSON, or that of the file which `@` names."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except OSError as error:
            raise Failed(f"failed to read metadata file {text[1:]}: {error.strerror}", where) from None
    try:
        return json.loads(text)
    except ValueError:
        raise Failed("invalid JSON in --metadata: must be valid JSON", where) from None


def labels(words: list[str]) -> set[str]:
    """As they are stored: of a long one the beginning."""
    return {word if len(word) <= LABEL else word.encode()[:LABEL].decode(errors="replace") for word in words}


def infra(store: Store) -> list[str]:
    """Types whose issues are ephemeral, and listed only on request."""
    return [word.strip() for word in store.config.get("types.infra", ",".join(INFRA)).split(",")]
