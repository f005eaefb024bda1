"""What holds something until it is closed, and is closed where it is left."""

from __future__ import annotations

import abc
from typing import Self


class Closing(abc.ABC):
    """A guard, as a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what it holds."""
