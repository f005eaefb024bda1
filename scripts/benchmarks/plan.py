"""The plan that the preparing process sends to the measuring one, and the paths of both. Plain data, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

OPENS = 20_000
WRITES = 20_000
FILES = 5_000
READ_BYTES = 1 << 30
WALKED_FILES = 100_000
RULES = 1_000
RECORDS = 20_000
INDEXED = 200_000
CHANGES = 1_000_000
ISSUES = 1_000


@dataclass(frozen=True, slots=True)
class Plan:
    """One tree measured as one user. Paths are absolute; `scale` multiplies every count and size above."""

    base: str
    """Directory of this tree on a real file system; `source` in it is what gets mounted."""
    rounds: int
    scale: float
    rows: tuple[str, ...]
    worlds: tuple[str, ...]
    parts: tuple[str, ...]
    python: str
    """Interpreter of the clients and of bonobofs, whose dependencies it has."""
    loopback_python: str
    """Interpreter that has mfusepy; empty where that world is not asked for."""
    compiled: str = ""
    """Copy of the checkout with the compiled build; empty if no row needs it."""

    def count(self, full: int) -> int:
        return max(1, int(full * self.scale))

    @property
    def source(self) -> Path:
        return Path(self.base, "source")

    @property
    def mountpoint(self) -> Path:
        return Path(self.base, "mnt")

    @property
    def archive(self) -> Path:
        """The tree as one tar file, outside of what is mounted."""
        return Path(self.base, "tree.tar")

    @property
    def modules(self) -> Path:
        """Python files for compileall; empty where the tree has none."""
        return Path(self.base, "modules")

    @property
    def home(self) -> Path:
        """BONOBOFS_HOME."""
        return Path(self.base, "home")

    @property
    def policy(self) -> Path:
        return Path(self.base, "policy.toml")

    @property
    def complaints(self) -> Path:
        """Where the standard error of every program goes."""
        return Path(self.base, "stderr")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        fields = json.loads(text)
        for name in ("rows", "worlds", "parts"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


class BenchError(Exception):
    """The run cannot go on. The message is one line and says what to do."""
