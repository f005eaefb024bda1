"""The questions of a session's `[[ask]]` tables, and the operator's answers, as files of the session's directory.

questions.json   written by the companion: {"questions", "applied", "live"}: the questions by id, the last answer that
                 the server has applied, and the numbers of the answers in force
answers.json     written by `bonobofs ask` under answers.lock: {"number", "answers"}: the answers that are not revoked
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Any, Final

from bonobofs.errors import PolicyError, StateError, UsageError
from bonobofs.policy.answers import REMOVE, WRITE, question_id
from bonobofs.policy.pattern import Matcher, parse
from bonobofs.state.home import read_document, session_directory, write_document
from bonobofs.system.locks import locked

MOST_OPEN: Final = 50
"""Questions of one session that wait for an answer. A further question is not stored."""
QUESTIONS: Final = "questions.json"
ANSWERS: Final = "answers.json"
_LOCK: Final = "answers.lock"


class QuestionState(enum.StrEnum):
    """State of a question."""

    OPEN = "open"
    ALLOWED = "allowed"
    DENIED = "denied"
    EXPIRED = "expired"
    """It had no answer within the `timeout` of its [[ask]]. The next refusal opens it again."""


@dataclasses.dataclass
class Question:
    """A question, for which a session waits for the operator. Times are ISO 8601 in UTC."""

    question: str
    session: str
    agent: str
    path: str
    operation: str
    effect: str
    rule: str
    first: str
    last: str
    expires: str
    count: int
    """Refusals so far."""
    tool: str = ""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The caller of the last refusal, as in the trail."""

    def __post_init__(self) -> None:
        if question_id(self.session, self.effect, self.path) != self.question:
            raise StateError(f"the id of the question {self.question} does not fit its path")


@dataclasses.dataclass
class AnswerRecord:
    """An answer. It covers `path` if `pattern` is "", else every path that the pattern matches."""

    number: int
    """The `number` of answers.json with which it came."""
    question: str
    path: str
    pattern: str
    effect: str
    allows: bool
    once: bool
    until: str
    """ISO 8601; "" for the end of the session."""
    expires_at: float
    """`until` of CLOCK_BOOTTIME."""
    note: str
    by: str
    """The user who answered."""
    policy: str
    """Digest of the policy in force. Under another policy the answer ends."""

    def matches(self, question: Question) -> bool:
        """True if the answer is about the question's change."""
        if self.effect != question.effect:
            return False
        if not self.pattern:
            return self.path == question.path
        return bool(Matcher([(parse(self.pattern), True)]).find(question.path.split("/")))


@dataclasses.dataclass
class Questions:
    """All questions and answers of one session."""

    questions: dict[str, Question] = dataclasses.field(default_factory=dict)
    applied: int = 0
    live: list[int] = dataclasses.field(default_factory=list)
    answers: list[AnswerRecord] = dataclasses.field(default_factory=list)
    number: int = 0
    """Number of changes of answers.json."""

    def answer_of(self, question: Question) -> AnswerRecord | None:
        """Return the newest answer in force about the question."""
        live = [one for one in self.answers if one.number in self.live and one.matches(question)]
        return max(live, key=lambda one: one.number, default=None)

    def state_of(self, question: Question) -> QuestionState:
        """Return the state of a question. An answer counts from the moment at which the server applies it."""
        answer = self.answer_of(question)
        if answer is not None:
            return QuestionState.ALLOWED if answer.allows else QuestionState.DENIED
        return QuestionState.EXPIRED if question.expires <= now_text() else QuestionState.OPEN


def now_text(later: float = 0.0) -> str:
    """Return the time in `later` seconds in ISO 8601."""
    return (datetime.now(UTC) + timedelta(seconds=later)).isoformat(timespec="milliseconds")


def effect_of(question: str, session: str, path: str) -> str:
    """Return the effect that the id of a question stands for."""
    return next(effect for effect in (WRITE, REMOVE) if question_id(session, effect, path) == question)


def read_questions(directory: Path) -> Questions:
    """Read both files of a session's directory; a missing file has no content. StateError: damaged. OSError."""
    try:
        asked, given = _read(directory / QUESTIONS), _read(directory / ANSWERS)
        return Questions(
            {name: Question(**each) for name, each in asked.get("questions", {}).items()},
            asked.get("applied", 0),
            asked.get("live", []),
            [AnswerRecord(**each) for each in given.get("answers", [])],
            given.get("number", 0),
        )
    except (TypeError, AttributeError) as error:
        raise StateError(f"the questions in {directory} are not those that bonobofs wrote: {error}") from error


def open_questions(home: Path, session: str) -> int:
    """Return how many questions of a session wait for an answer; 0 if its files cannot be read."""
    try:
        found = read_questions(session_directory(home, session))
    except (OSError, StateError):
        return 0
    return sum(found.state_of(one) is QuestionState.OPEN for one in found.questions.values())


def write_questions(directory: Path, found: Questions) -> None:
    """Write questions.json. Only the companion of the session calls this."""
    questions = {name: dataclasses.asdict(each) for name, each in found.questions.items()}
    write_document(directory / QUESTIONS, {"questions": questions, "applied": found.applied, "live": found.live})


def change_answers(home: Path, session: str, change: Callable[[Questions], None]) -> Questions:
    """Change the answers of a session under their lock, and return them."""
    directory = session_directory(home, session)
    with locked(directory / _LOCK):
        found = read_questions(directory)
        change(found)
        found.number += 1
        answers = [dataclasses.asdict(each) for each in found.answers]
        write_document(directory / ANSWERS, {"number": found.number, "answers": answers})
    return found


def give_answer(  # noqa: PLR0913 - the fields of an answer
    home: Path,
    question: Question,
    *,
    allows: bool,
    by: str,
    policy: str,
    pattern: str = "",
    once: bool = False,
    seconds: float | None = None,
    note: str = "",
) -> Questions:
    """Answer a question. UsageError: it is answered already, or the pattern is invalid or does not match its path."""
    until = "" if seconds is None else now_text(seconds)
    expires_at = clock_gettime(CLOCK_BOOTTIME) + (seconds if seconds is not None else 3e9)

    def add(found: Questions) -> None:
        if (other := found.answer_of(question)) is not None:
            word = "allowed" if other.allows else "denied"
            raise UsageError(f"{question.question} is {word} already, by {other.by}; bonobofs ask revoke ends that")
        pending = next((one for one in found.answers if one.number > found.applied and one.matches(question)), None)
        if pending is not None:
            raise UsageError(f"{question.question} was answered a moment ago, by {pending.by}")
        answer = AnswerRecord(
            found.number + 1,
            question.question,
            question.path,
            pattern,
            question.effect,
            allows,
            once,
            until,
            expires_at,
            note,
            by,
            policy,
        )
        try:
            is_covered = answer.matches(question)
        except PolicyError as error:
            raise UsageError(f"{pattern!a} is not a valid pattern: {error}") from None
        if not is_covered:
            raise UsageError(
                f"the pattern {pattern} does not match {question.path}, so the answer would change nothing"
            )
        found.answers.append(answer)

    return change_answers(home, question.session, add)


def revoke(home: Path, question: Question) -> AnswerRecord:
    """Remove the answer in force about a question, and return it. UsageError: there is none."""
    removed: list[AnswerRecord] = []

    def remove(found: Questions) -> None:
        answer = found.answer_of(question)
        if answer is None:
            raise UsageError(f"no answer about {question.question} is in force")
        found.answers.remove(answer)
        removed.append(answer)

    change_answers(home, question.session, remove)
    return removed[0]


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_document(path)
    except FileNotFoundError:
        return {}
