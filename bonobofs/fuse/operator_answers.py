"""The operator's answers to the questions of a mount: reported, recorded and applied. Used by the serving thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from bonobofs.enforcement.authorizer import Caller
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.ipc.channel import MessageKind
from bonobofs.policy.decision import Denied

_MOST_QUESTIONS: Final = 100
"""Questions that are reported between two calls of `tidy`. A program can cause thousands."""
_RECORDED: Final = (
    "number",
    "question",
    "effect",
    "path",
    "pattern",
    "allows",
    "once",
    "until",
    "note",
    "by",
    "policy",
)

Document = dict[str, Any]


class OperatorAnswers:
    """Sends the questions of denials to the companion, and installs the answers that it sends."""

    def __init__(self, enforcer: Enforcer, send: Callable[[MessageKind, Document], None]) -> None:
        self._enforcer: Final = enforcer
        self._send: Final = send
        self._questions: Final[dict[str, Document]] = {}
        """The questions since the last `tidy`, by id."""
        self._answers: dict[int, Document] = {}
        self._number = 0
        enforcer.on_question = self._report
        enforcer.set_answers([])

    def change(self, number: int, answers: list[Document]) -> None:
        """Install and record the answers of ANSWERS. TrailError: the answers are in force, but not recorded."""
        before, self._answers = self._answers, {each["number"]: each for each in answers}
        self._number = number
        self._enforcer.set_answers(answers)
        for each in answers:
            if each["number"] not in before:
                self._enforcer.trail.event("answer", {name: each[name] for name in _RECORDED})
        for gone in before.keys() - self._answers.keys():
            details = {"number": gone, "question": before[gone]["question"]}
            self._enforcer.trail.event("revoke_answer", details)
        self.apply()

    def apply(self) -> None:
        """Remove the answers that have ended, and report those in force."""
        self._enforcer.expire_answers()
        if self._number:
            live = [each["number"] for each in self._enforcer.answers]
            self._send(MessageKind.ANSWERS_APPLIED, {"number": self._number, "live": live})

    def tidy(self) -> None:
        """Report the questions that were repeated since the last call."""
        self._send_questions()
        self._questions.clear()

    def _report(self, denied: Denied, caller: Caller) -> None:
        is_new = denied.question not in self._questions
        if is_new and len(self._questions) >= _MOST_QUESTIONS:
            return
        question = self._questions.setdefault(denied.question, {"question": denied.question, "count": 0})
        question.update(
            path=denied.path,
            operation=denied.operation.value,
            rule=denied.rule,
            count=question["count"] + 1,
            tool=caller.tool,
            details=caller.details,
        )
        if is_new:
            self._send_questions()

    def _send_questions(self) -> None:
        for question in self._questions.values():
            if question["count"]:
                self._send(MessageKind.ASKED, question)
                question["count"] = 0
