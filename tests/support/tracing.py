"""System calls of a server under strace."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.wait import until
from tests.support.world import World


@contextmanager
def traced(place: World, log: Path, *options: str, process: int | None = None) -> Iterator[None]:
    """Trace the threads of a mount's server by strace, or those of another process."""
    pid = process or place.session.pid
    command = ["strace", "-f", "-qq", "-s", "0", "-o", str(log), *options, "-p", str(pid)]
    with subprocess.Popen(command) as tracer:
        tasks = Path(f"/proc/{pid}/task")
        try:
            until(
                lambda: all("TracerPid:\t0\n" not in (task / "status").read_text() for task in tasks.iterdir()),
                "strace traces all threads",
            )
            yield
        finally:
            tracer.terminate()
