"""System calls of a server under strace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import proc
from tests.support.commands import environment
from tests.support.wait import until
from tests.support.world import World


@contextmanager
def traced(place: World, log: Path, *options: str, process: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Trace the threads of a mount's server by strace, or those of another process."""
    pid = process or place.pid
    command = ["strace", "-f", "-qq", "-s", "0", "-o", str(log), *options, "-p", str(pid)]
    with subprocess.Popen(command) as tracer:
        try:
            until(lambda: proc.is_traced(pid), "strace traces all threads")
            yield tracer
        finally:
            tracer.terminate()


@contextmanager
def traced_undo(source: Path, log: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run the operator's undo of all changes of `alice` under strace. Its output is JSON."""
    program = [sys.executable, "-m", "bonobofs", "undo", "--agent", "alice", "--path", str(source), "--json"]
    log.unlink(missing_ok=True)
    command = ["strace", "-qq", "-o", str(log), *options, *program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd="/", env=environment(), stdout=pipe, stderr=pipe, text=True) as tracer:
        yield tracer


def faulty_undo(source: Path, log: Path, *options: str) -> dict[str, Any]:
    """Return the result of `traced_undo`."""
    with traced_undo(source, log, *options) as tracer:
        result: dict[str, Any] = json.loads(tracer.communicate()[0])
    return result
