"""Work on several servers at once, so that one which hangs keeps nobody waiting for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

_MOST: Final = 16
"""Servers that may hang at the same time."""


class Lanes:
    """One lane for each key. What is begun in a lane goes on until it is done, also over several calls of `go`."""

    def __init__(self, name: str) -> None:
        """No thread is started yet; `name` is theirs."""
        self._pool: Final = ThreadPoolExecutor(_MOST, thread_name_prefix=name)
        self._under_way: dict[str, Future[list[str]]] = {}
        self._said: dict[str, list[str]] = {}

    def go(self, work: Mapping[str, Callable[[], list[str]]], seconds: float) -> list[str]:
        """Begin each work whose lane is free, wait for all of it so long, and give what each said last.

        Whatever a work raises is raised here.
        """
        for key, do in work.items():
            if key not in self._under_way:
                self._under_way[key] = self._pool.submit(do)
        wait(self._under_way.values(), seconds)
        for key in [key for key, future in self._under_way.items() if future.done()]:
            self._said[key] = self._under_way.pop(key).result()
        return [said for key in work for said in self._said.get(key, ())]

    def close(self) -> None:
        """Wait for what is under way."""
        self._pool.shutdown(cancel_futures=True)
