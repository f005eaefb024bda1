"""Calls, answered by threads: a few of each name at once, so that none keeps those of another name waiting."""

from __future__ import annotations

import errno
import json
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from bonobofs.errors import BonobofsError, UsageError
from bonobofs.policy.decision import Refused, as_document

"""What a call gives, by its name and its arguments."""

_AT_ONCE: Final = 4
"""Calls of one name that are answered at once, where nothing else is said."""
_MOST_WAITING: Final = 32
"""Calls that wait for that, of a name of which it is said otherwise; of all there are no more than connections."""
_LONGEST: Final = 1 << 20
"""Bytes of a call that brings neither content of a file nor a list of paths."""
_LISTS: Final = 4 << 20
"""Bytes of a call that brings a list of paths; its entry in the trail has each of them, and readers take 16 MiB."""
_LONG: Final = {
    "write_file": 17 << 20,  # the entrance takes 16 MiB, and a block more
    "git.preflight": _LISTS,
}
_NAME: Final = re.compile(rb'\s*\{\s*"call"\s*:\s*"([a-z_.]{1,64})"')
"""The beginning of a long call, whose name has to come first."""
_LONGEST_REST: Final = 1 << 18
"""Bytes of a call beside what stands in its texts: each value takes some, and much more memory once it is read."""
_LONGEST_TOLD: Final = 200

Caller = TypeVar("Caller")


class _Lane(Generic[Caller]):
    """The calls of one name."""

    def __init__(self) -> None:
        self.waiting: Final[deque[tuple[Caller, dict[str, Any]]]] = deque()
        self.working = 0


class Answering(Generic[Caller]):
    """Takes calls from one thread, and hands back the answers from others."""

    def __init__(
        self,
        answer: Callable[[Caller, str, dict[str, Any]], Any],
        at_once: Mapping[str, int],
        hand_back: Callable[[Caller, bytes], None],
    ) -> None:
        """`at_once` says of some names how many calls are answered at once."""
        self._answer: Final = answer
        self._at_once: Final = at_once
        self._hand_back: Final = hand_back
        self._turn: Final = threading.Lock()
        self._lanes: Final[dict[str, _Lane[Caller]]] = {}
        self._told: Final[set[tuple[str, type[Exception]]]] = set()

    def take(self, caller: Caller, line: bytes) -> None:
        """Have a call answered; what cannot be one is answered at once."""
        try:
            name, arguments = _call(line)
        except UsageError as error:
            self._hand_back(caller, failure(error))
            return
        with self._turn:
            lane = self._lanes.setdefault(name, _Lane())
            full = name in self._at_once and len(lane.waiting) >= _MOST_WAITING
            begins = not full and lane.working < self._at_once.get(name, _AT_ONCE)
            lane.working += begins
            if not full:
                lane.waiting.append((caller, arguments))
        if full:
            much = f"{_MOST_WAITING} calls of {name} wait to be answered; try again"
            self._hand_back(caller, failure(OSError(errno.EAGAIN, much)))
        elif begins:
            try:
                threading.Thread(target=self._work, args=(name, lane), name="bonobofs-call", daemon=True).start()
            except RuntimeError:
                self._give_up(name, lane)

    def _give_up(self, name: str, lane: _Lane[Caller]) -> None:
        """There can be no more threads just now: who waits for one is told, unless another will come to it."""
        left = []
        with self._turn:
            lane.working -= 1
            if not lane.working:
                left = list(lane.waiting)
                del self._lanes[name]
        for caller, _ in left:
            self._hand_back(caller, failure(OSError(errno.EAGAIN, "there can be no more threads; try again")))

    def _work(self, name: str, lane: _Lane[Caller]) -> None:
        while True:
            with self._turn:
                if not lane.waiting:
                    lane.working -= 1
                    if not lane.working:
                        del self._lanes[name]
                    return
                caller, arguments = lane.waiting.popleft()
            self._hand_back(caller, self._answered(caller, name, arguments))

    def _answered(self, caller: Caller, name: str, arguments: dict[str, Any]) -> bytes:
        try:
            return _line({"ok": True, "result": self._answer(caller, name, arguments)})
        except Refused as refused:
            denied = refused.decision
            return _line({"ok": False, "denied": as_document(denied, denied.path, denied.operation)})
        except UnicodeError as error:
            return failure(UsageError(f"a text of this call is none: {getattr(error, 'reason', error)}"))
        except (BonobofsError, OSError) as error:
            return failure(error)
        except Exception as error:  # noqa: BLE001 - the edge at which an unknown failure becomes an answer and a record
            self._tell(name, error)
            return failure(error)

    def _tell(self, name: str, error: Exception) -> None:
        """Tell in the log what failed, once: who calls could fill a disk by it."""
        if (name, type(error)) not in self._told:
            self._told.add((name, type(error)))
            sys.stderr.write(f"bonobofs: a call of {name} has failed: {error!r:.{_LONGEST_TOLD}}\n")
            sys.stderr.flush()


def failure(error: Exception) -> bytes:
    """The answer that tells of a failure."""
    told: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, OSError):
        told["message"] = error.strerror or str(error)
        if error.errno is not None:
            told["errno"] = error.errno
    return _line({"ok": False, "error": told})


def _call(line: bytes) -> tuple[str, dict[str, Any]]:
    """The name of a call, and its arguments. UsageError."""
    if len(line) > _LONGEST:
        first = _NAME.match(line)
        if first is None:
            raise UsageError(f"a call of more than {_LONGEST} bytes begins with its name")
        _check_size(first[1].decode(), line)
    if len(line) > _LONGEST_REST and _has_much_beside_texts(line):
        raise UsageError(f"a call has at most {_LONGEST_REST} bytes beside its texts")
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is no JSON document: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("call"), str):
        raise UsageError('a call is an object such as {"call": "whoami"}')
    _check_size(document["call"], line)
    return document.pop("call"), document


def _check_size(name: str, line: bytes) -> None:
    """Refuse a call that is longer than calls of that name may be. UsageError."""
    longest = _LONG.get(name, _LONGEST)
    if len(line) > longest:
        raise UsageError(f"a call of {name:.{_LONGEST_TOLD}} has at most {longest} bytes; send less in one call")


def _has_much_beside_texts(line: bytes) -> bool:
    plain = line.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > _LONGEST_REST:
        return True
    return sum(map(len, plain.split(b'"')[::2])) > _LONGEST_REST


def _line(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"
