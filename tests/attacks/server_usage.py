"""What a server uses, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def resident(pid: int) -> int:
    """Bytes of memory that the process has now (VmRSS)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def waiting(pid: int) -> int:
    """How many threads of the process wait in the kernel, for a lock or a disk, and take no signal."""
    states = (task / "stat" for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "D" for state in states)
