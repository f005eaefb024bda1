"""The questions of a session: store them for the operator, and pass the answers to the server and to waiting agents."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any, Final

from bonobofs.errors import BonobofsError, UsageError, reason
from bonobofs.ipc.channel import Channel, MessageKind
from bonobofs.ipc.session_config import SessionConfig
from bonobofs.state.question_files import (
    ANSWERS,
    MOST_OPEN,
    Question,
    QuestionState,
    effect_of,
    now_text,
    read_questions,
    write_questions,
)

_INTERVAL: Final = 0.2
"""Seconds between two checks of answers.json, and between two writes of questions.json."""
_MOST_STORED: Final = 1000
_ARRIVAL_SECONDS: Final = 2.0
"""Seconds for which `wait` waits for the question itself."""
LONGEST_WAIT: Final = 3600.0
"""Seconds for which one call waits for an answer."""


class SessionQuestions:
    """The event loop of the companion uses it. The threads that answer calls use `wait`."""

    def __init__(self, channel: Channel, config: SessionConfig) -> None:
        """After a restart of the companion, the files have the earlier questions and answers."""
        self._channel: Final = channel
        self._config: Final = config
        self._directory: Final = Path(config.session_dir)
        self._changed: Final = threading.Condition()
        self._found = read_questions(self._directory)
        self._sent: tuple[int, int] | None = None
        """Inode number and mtime of the answers.json that was sent."""
        self._timeouts = _timeouts(config.policy)
        self._is_dirty = False
        self._next_check = 0.0

    def change_policy(self, policy: dict[str, Any]) -> None:
        """Use the timeouts of a new policy."""
        self._timeouts = _timeouts(policy)

    def due(self, now: float) -> float:
        """Seconds until the next `check`; inf while the session has no question and no [[ask]]."""
        if not self._timeouts and not self._found.questions:
            return float("inf")
        return max(0.0, self._next_check - now)

    def check(self, now: float) -> None:
        """Send new answers to the server, and write new questions."""
        self._next_check = now + _INTERVAL
        try:
            self._send_answers()
            if self._is_dirty:
                write_questions(self._directory, self._found)
                self._is_dirty = False
        except (BonobofsError, OSError) as error:
            sys.stderr.write(f"bonobofs: the questions of the session: {reason(error)}\n")
            sys.stderr.flush()
            self._next_check = now + 10 * _INTERVAL

    def _send_answers(self) -> None:
        try:
            st = (self._directory / ANSWERS).stat()
        except FileNotFoundError:
            return
        if self._sent == (st.st_ino, st.st_mtime_ns):
            return
        found = read_questions(self._directory)
        with self._changed:
            self._found.answers, self._found.number = found.answers, found.number
        answers = [dataclasses.asdict(each) for each in found.answers]
        self._channel.send(MessageKind.ANSWERS, {"number": found.number, "answers": answers})
        self._sent = st.st_ino, st.st_mtime_ns

    def on_applied(self, body: bytes) -> None:
        """Note which answers the server applies; an answer in force before is now at its end."""
        document = json.loads(body)
        with self._changed:
            self._found.applied, self._found.live = document["number"], document["live"]
            self._changed.notify_all()
        self._is_dirty = True
        self._next_check = 0.0

    def on_asked(self, body: bytes) -> None:
        """Store a question of the server, or count it."""
        asked = json.loads(body)
        number, now = asked["question"], now_text()
        with self._changed:
            question = self._found.questions.get(number)
            expires = now_text(self._timeouts.seconds(asked["rule"]))
            if question is not None:
                question.count += asked["count"]
                if self._found.state_of(question) is QuestionState.EXPIRED:
                    question.first, question.expires = now, expires
            elif self._make_room():
                config = self._config
                question = self._found.questions[number] = Question(
                    question=number,
                    session=config.session,
                    agent=config.agent,
                    path=asked["path"],
                    operation=asked["operation"],
                    effect=effect_of(number, config.session, asked["path"]),
                    rule=asked["rule"],
                    first=now,
                    last=now,
                    expires=expires,
                    count=asked["count"],
                )
            else:
                return
            question.last, question.tool, question.details = now, asked["tool"], asked["details"]
            self._changed.notify_all()
        self._is_dirty = True

    def _make_room(self) -> bool:
        """Return whether a new question may be stored; forget the oldest that is not open if there are too many."""
        questions = self._found.questions
        states = {number: self._found.state_of(question) for number, question in questions.items()}
        if sum(state is QuestionState.OPEN for state in states.values()) >= MOST_OPEN:
            return False
        if len(questions) >= _MOST_STORED:
            closed = [number for number, state in states.items() if state is not QuestionState.OPEN]
            del questions[min(closed, key=lambda number: questions[number].last)]
        return True

    def wait(self, number: str, seconds: float) -> dict[str, Any]:
        """Return {"question", "path", "state", "note", "until"} once a question is answered, or after `seconds`.

        UsageError: the session has no such question.
        """
        deadline = monotonic() + min(max(0.0, seconds), LONGEST_WAIT)
        with self._changed:
            # The mount sends the question of a refusal after the refusal itself.
            self._changed.wait_for(lambda: number in self._found.questions, _ARRIVAL_SECONDS)
            while True:
                question = self._found.questions.get(number)
                if question is None:
                    raise UsageError(
                        f"this session has no question {number}; make the change first: a refusal stores its question. "
                        f"A session with {MOST_OPEN} open questions stores no more"
                    )
                answer, state = self._found.answer_of(question), self._found.state_of(question)
                left = deadline - monotonic()
                if state is not QuestionState.OPEN or left <= 0:
                    note, until = ("", "") if answer is None else (answer.note, answer.until)
                    return {"question": number, "path": question.path, "state": state, "note": note, "until": until}
                self._changed.wait(min(left, 1.0))


class _Timeouts:
    """The `timeout` of each [[ask]] pattern."""

    def __init__(self, tables: list[dict[str, Any]]) -> None:
        self._seconds: Final = {text: table["timeout"] for table in tables for text in table["paths"]}

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def seconds(self, rule: str) -> float:
        """Seconds for which a question of a rule `ask:PATTERN` stays open."""
        return float(self._seconds.get(rule.removeprefix("ask:"), 86_400))


def _timeouts(policy: dict[str, Any]) -> _Timeouts:
    return _Timeouts(policy.get("ask", []))
