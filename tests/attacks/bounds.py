"""What a server uses, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def resident(pid: int) -> int:
    """Bytes of memory that the process has now (VmRSS)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
