"""A bd that fails at the point that a test names; it wraps the bd in use."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HOWS = (
    "killed before",  # by a signal, with nothing stored
    "killed after",  # by a signal, with everything stored and nothing said
    "killed midway",  # some seconds after it has begun
    "hangs before",
    "hangs after",  # with everything stored and nothing said; both do not end when they are told to
    "fails before",  # text on stderr, nothing stored
    "fails after",  # JSON on stderr, everything stored
    "stores later",  # it fails, and what it has left behind stores everything
    "lies",  # success, and nothing stored
    "mumbles",  # success, and no answer; nothing stored
    "waits",  # until it is let go, and then does all that it should
    "notices",  # text around the answer, on both streams
    "bare",  # the answer without its envelope
    "partly",  # without the flags that are named
)


class Faulty:
    """A launcher of a bd that has faults; `path` is the program."""

    def __init__(self, bd: Path, directory: Path) -> None:
        directory.mkdir()
        self.path = directory / "bd"
        self._faults = directory / "faults.json"
        self.calls = directory / "calls"
        """A line of words for each call."""
        self.let_go = directory / "let go"
        """As soon as it is there, what has been left behind goes on."""
        told = f"{str(bd)!r}, {str(directory)!r}"
        self.path.write_text(
            f"#!{sys.executable} -S\nimport runpy\nrunpy.run_path({__file__!r})['main']({told})\n", encoding="utf-8"
        )
        self.path.chmod(0o755)

    def will(self, how: str, on: str, *, times: int = 1, without: tuple[str, ...] = (), seconds: float = 0) -> None:
        """Let the next calls of that command go wrong so."""
        assert how in HOWS
        fault = {"how": how, "on": on.split(), "times": times, "without": without, "seconds": seconds}
        self._faults.write_text(json.dumps([*self._read(), fault]), encoding="utf-8")

    def _read(self) -> list[Any]:
        return json.loads(self._faults.read_text(encoding="utf-8")) if self._faults.exists() else []

    def called(self) -> list[str]:
        """The commands that were run, in their order, without their flags."""
        return self.calls.read_text(encoding="utf-8").splitlines() if self.calls.exists() else []


def main(bd: str, directory: str) -> None:
    """What the launcher runs; it does not return."""
    here = Path(directory)
    words = sys.argv[1:]
    with (here / "calls").open("a", encoding="utf-8") as calls:
        calls.write(" ".join(itertools.takewhile(lambda word: not word.startswith("-"), words)) + "\n")
    fault = _next(here, words)
    how = fault["how"] if fault else ""
    if how == "partly":
        words = [word for word in words if word.partition("=")[0].removeprefix("--") not in fault["without"]]
    if how == "bare":
        del os.environ["BD_JSON_ENVELOPE"]
    while how == "waits" and not (here / "let go").exists():
        time.sleep(0.01)
    if how in {"", "waits", "partly", "bare"}:
        os.execv(bd, [bd, *words])
    if how == "killed midway":
        _kill_midway([bd, *words], fault["seconds"])
    sys.exit(_go_wrong(how, [bd, *words], here))


def _kill_midway(call: list[str], seconds: float) -> None:
    """Both at once; what bd has said by then is said."""
    started = subprocess.Popen(call)
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.wait(timeout=seconds)
    started.kill()
    started.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def _next(here: Path, words: list[str]) -> Any:
    """The fault of this call, which is taken from those to come."""
    file = here / "faults.json"
    faults = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    for fault in faults:
        if words[: len(fault["on"])] == fault["on"] and fault["times"]:
            fault["times"] -= 1
            file.write_text(json.dumps(faults), encoding="utf-8")
            return fault
    return None


def _go_wrong(how: str, call: list[str], here: Path) -> int:
    if how == "stores later":
        if os.fork() == 0:
            while not (here / "let go").exists():
                time.sleep(0.01)
            subprocess.run(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            (here / "stored later").touch()
        print("Error: the lock is somebody else's", file=sys.stderr)
        return 1
    if how.endswith("after"):
        subprocess.run(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    if how.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how.startswith("hangs"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    if how.startswith("fails"):
        told = "Error: the database is away" if how == "fails before" else json.dumps({"error": "the database is away"})
        print(told, file=sys.stderr)
        return 1
    if how == "lies":
        print(json.dumps({"data": [], "schema_version": 1}))
    if how == "notices":
        print("A new version of bd is available!\n[see its page]\n{maybe}", flush=True)
        print("Warning: the role is not set", file=sys.stderr, flush=True)
        status = subprocess.run(call, check=False).returncode
        print("[]\nHave you tried `bd prime`?")
        return status
    return 0
