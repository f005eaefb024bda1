"""Every message on the connection is answered, and no change is made without a record."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bonobofs.fuse import abi as p
from tests.fuzz.kernel_messages import Message, cut, noise, sound
from tests.fuzz.rig import Rig, is_silent

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@contextmanager
def _rig() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="bonobofs-fuzz-") as directory:
        rig = Rig(Path(directory))
        try:
            # The kernel never asks about a node that it was not told of; so some are known.
            for path in (
                (),
                ("docs",),
                ("docs", "a.md"),
                ("docs", "b.md"),
                ("docs", "sub"),
                ("docs", "hard.md"),
                ("closed",),
            ):
                rig.node(*path)
            yield rig
        finally:
            rig.close()


def _serve(rig: Rig, message: Message) -> None:
    before = rig.snapshot()
    reply = rig.request(message.opcode, message.node, message.body, uid=message.uid, extensions=message.extensions)
    assert reply.came is not is_silent(message.opcode)
    if reply.error:
        assert rig.snapshot() == before, "a request that failed has changed something"


@settings(max_examples=120, deadline=None, suppress_health_check=_SLOW)
@given(st.lists(sound(), min_size=1, max_size=12))
def test_requests_with_any_values_make_no_unrecorded_change(messages: list[Message]) -> None:
    """Each request gets one reply. Every change has its intent, and a rule allows it."""
    with _rig() as rig:
        for message in messages:
            _serve(rig, message)
        assert rig.wrong() == []


@settings(max_examples=120, deadline=None, suppress_health_check=_SLOW)
@given(st.lists(cut() | noise(), min_size=1, max_size=12))
@example([Message(p.Opcode.WRITE, 3, p.WRITE_IN.pack(0, 0, 4, 0, 0, os.O_WRONLY, 0))])
@example(
    [
        Message(p.Opcode.CREATE, 2, p.CREATE_IN.pack(os.O_RDWR, 0o644, 1 << 31, 0) + b"new.md\0"),
        Message(p.Opcode.STATFS, 1, b""),
    ]
)
def test_truncated_and_random_requests_get_a_reply(messages: list[Message]) -> None:
    """Truncated structures, unterminated strings, wrong lengths, unknown opcodes."""
    with _rig() as rig:
        for message in messages:
            _serve(rig, message)
        assert rig.wrong() == []


@settings(max_examples=40, deadline=None)
@given(message=st.binary(max_size=p.IN_SIZE - 1), before=sound())
def test_a_message_shorter_than_a_header_is_ignored(message: bytes, before: Message) -> None:
    """It is not parsed with the rest of the previous message."""
    with _rig() as rig:
        rig.request(p.Opcode.UNLINK, before.node, b"a.md\0")
        now = rig.snapshot()
        assert not rig.send(message).came
        assert rig.snapshot() == now
        assert rig.wrong() == []
