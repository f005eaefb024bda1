"""The calls that egress makes to its session over guard.sock: the lists, and the record of connections."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from bonobofs.state.home import GUARD_SOCKET

_RETRY_SECONDS: Final = 3.0
"""How long a call waits for a companion that restarts."""
_PAUSE: Final = 0.05
_ANSWER_SECONDS: Final = 10.0
_LONGEST_ANSWER: Final = 1 << 20
_MOST_DISTINCT: Final = 4096
_IN_ONE_CALL: Final = 256

Refused = tuple[str, int, str, str]
"""Host, port, via, and the word of the refusal (`policy.denials.NETWORK`)."""


class SessionError(Exception):
    """The session does not answer, or it refuses the call."""

    def __init__(self, message: str, word: str = "") -> None:
        """`word`: the session has recorded this refusal itself."""
        super().__init__(message)
        self.word: Final = word


class SessionCalls:
    """Calls one after the other on one connection, which is opened again after the companion has restarted."""

    def __init__(self, inside: str, key: str) -> None:
        """`inside` is the directory of guard.sock; `key` proves that the caller is egress."""
        self._inside: Final = inside
        self._key: Final = key
        self._lock: Final = asyncio.Lock()
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, name: str, **arguments: Any) -> Any:
        """Return the result of a call. SessionError."""
        line = json.dumps({"call": name, "key": self._key, **arguments}).encode() + b"\n"
        async with self._lock:
            answer = await self._exchange(line)
        if answer.get("ok"):
            return answer["result"]
        denied = answer.get("denied")
        if denied is not None:
            raise SessionError(denied["reason"], denied["rule"].rpartition(":")[2])
        raise SessionError(str(answer.get("error", {}).get("message", "it failed")))

    async def _exchange(self, line: bytes) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        until = loop.time() + _RETRY_SECONDS
        while True:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    reader, writer = self._ends or await self._connect()
                    writer.write(line)
                    answer = await reader.readline()
                if answer.endswith(b"\n"):
                    document: dict[str, Any] = json.loads(answer)
                    return document
                error = "it closed the connection"
            except (OSError, ValueError) as failure:
                error = str(failure) or type(failure).__name__
            await self.close()
            if loop.time() > until:
                raise SessionError(f"the session does not answer: {error}; look at bonobofs status")
            await asyncio.sleep(_PAUSE)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # A socket address holds at most 107 bytes; the path of the state directory may be longer.
        handle = os.open(self._inside, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = f"/proc/self/fd/{handle}/{GUARD_SOCKET}"
            self._ends = await asyncio.open_unix_connection(path, limit=_LONGEST_ANSWER)
        finally:
            os.close(handle)
        return self._ends

    async def close(self) -> None:
        """Close the connection; the next call opens another one."""
        if self._ends is not None:
            _, writer = self._ends
            self._ends = None
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


class RefusalCounter:
    """Refused connections that are not yet in the record. Equal ones are counted."""

    def __init__(self, calls: SessionCalls, log: Callable[[str], None]) -> None:
        self._calls: Final = calls
        self._log: Final = log
        self._counts: dict[Refused, int] = {}
        self._added: Final = asyncio.Event()

    def add(self, host: str, port: int, via: str, word: str, count: int = 1) -> None:
        """Count a refusal. Beyond _MOST_DISTINCT different ones, count it by its word only."""
        key = (host, port, via, word)
        if key not in self._counts and len(self._counts) >= _MOST_DISTINCT:
            key = ("", 0, "other", word)
        self._counts[key] = self._counts.get(key, 0) + count
        self._added.set()

    async def run(self) -> None:
        """Record refusals until the task is cancelled."""
        while True:
            await self._added.wait()
            await asyncio.sleep(_PAUSE)
            try:
                await self.flush()
            except SessionError as error:
                self._log(f"refused connections are not yet recorded: {error}")

    async def flush(self) -> None:
        """Record all refusals. SessionError: the rest stays for the next time."""
        self._added.clear()
        while self._counts:
            batch = list(self._counts.items())[:_IN_ONE_CALL]
            for key, _ in batch:
                del self._counts[key]
            try:
                await self._calls.call("network.refused", refusals=[[*key, count] for key, count in batch])
            except SessionError:
                for key, count in batch:
                    self.add(*key, count)
                raise
