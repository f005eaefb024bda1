"""Run a story in a process of its own, as a given user.

Its error is raised here. A story that hangs can be killed, unlike a thread.
"""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

_T = TypeVar("_T")


class User(NamedTuple):
    """Ids under which a story runs."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


NOBODY: Final = User(65534, 65534)
ANN: Final = User(21001, 22001, (22009,))
BEN: Final = User(21002, 22002)
PATIENCE: Final = 100
"""Seconds after which a story is killed."""
IS_ROOT: Final = os.geteuid() == 0


def run_in_child(story: Callable[..., _T], *args: object, user: User | None = None) -> _T:
    """Run the story as `user`. Return its result, or raise its exception."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            signal.alarm(PATIENCE)
            with open(writer, "wb") as stream:
                stream.write(_outcome_of(story, args, user))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        answer = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the story ended by signal {-status}"
    good, value = pickle.loads(answer)
    if not good:
        raise value
    result: _T = value
    return result


def _outcome_of(story: Callable[..., Any], args: tuple[object, ...], user: User | None) -> bytes:
    try:
        if user is not None:
            os.setgroups(user.groups)
            os.setresgid(user.gid, user.gid, user.gid)
            os.setresuid(user.uid, user.uid, user.uid)
        return pickle.dumps((True, story(*args)))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised in the test
        text = traceback.format_exc()
        error.add_note(text)
        try:
            answer = pickle.dumps((False, error))
            pickle.loads(answer)
        except Exception:  # noqa: BLE001 - some exceptions do not travel; what they say does
            answer = pickle.dumps((False, AssertionError(text)))
        return answer


def outcome(call: Callable[..., object], *args: object) -> object:
    """Return the call's result, or the number of its error."""
    try:
        return call(*args)
    except OSError as error:
        return error.errno
