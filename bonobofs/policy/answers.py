"""The questions of `[[ask]]` and the operator's answers, as plain data for the engine.

A question is about one path and one effect in one session. An answer covers one path or a pattern.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from bonobofs.policy.denials import Refusal
from bonobofs.policy.pattern import Matcher, parse
from bonobofs.policy.request import Operation

WRITE: Final = "write"
REMOVE: Final = "remove"
"""What a change does to the name: it writes or makes it, or it removes it (also the old name of a rename)."""


class Ask(NamedTuple):
    """One pattern of an [[ask]]."""

    operations: frozenset[Operation] | None
    """The operations that need an answer; None: all changes."""
    open: Refusal
    """The refusal until the operator answers."""
    answered: Refusal
    """The refusal after the answer no."""


class Answer(NamedTuple):
    """One answer of the operator."""

    number: int
    """Counts the answers of a session, from 1. The newest answer that matches a change decides."""
    allows: bool
    note: str
    """The operator's note for the agent; "" for none."""


class Answers(NamedTuple):
    """The answers of one session."""

    session: str = ""
    """UUID of the session; "": no mount, so that the operator cannot answer."""
    paths: Mapping[tuple[str, str], Answer] = {}
    """By effect and path."""
    patterns: Mapping[str, Matcher[Answer]] = {}
    """By effect."""

    def find(self, effect: str, path: str, components: Sequence[str]) -> Answer | None:
        """Return the newest answer about a change, or None."""
        found = self.patterns[effect].find(components) if effect in self.patterns else []
        if (one := self.paths.get((effect, path))) is not None:
            found.append(one)
        return max(found, default=None)


NO_ANSWERS: Final = Answers()


def compile_answers(session: str, documents: Iterable[Mapping[str, Any]]) -> Answers:
    """Compile answers: each has `number`, `allows`, `note`, `effect`, and `path` or `pattern`. PolicyError."""
    paths: dict[tuple[str, str], Answer] = {}
    patterns: dict[str, list[tuple[Any, Answer]]] = {}
    for each in sorted(documents, key=lambda document: document["number"]):
        answer = Answer(each["number"], each["allows"], each["note"])
        if each.get("pattern"):
            patterns.setdefault(each["effect"], []).append((parse(each["pattern"]), answer))
        else:
            paths[each["effect"], each["path"]] = answer
    return Answers(session, paths, {effect: Matcher(listed) for effect, listed in patterns.items()})


def question_id(session: str, effect: str, path: str) -> str:
    """Return the id of a question: equal changes have one question. "" if no operator can answer it."""
    if not session:
        return ""
    key = f"{session}\0{effect}\0{path}".encode("utf-8", "surrogateescape")
    return f"q-{hashlib.sha256(key).hexdigest()[:10]}"
