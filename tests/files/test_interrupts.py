"""An exception from a signal handler releases every lock of a session."""

from __future__ import annotations

from pathlib import Path

from tests.files.conftest import Program

_INTERRUPTED = """
import random, signal, threading
from bonobofs.guards import FileTools
root = sys.argv[1]
random.seed(11)

def interrupt(*_):
    raise KeyboardInterrupt

def interrupt_again(_):
    signal.setitimer(signal.ITIMER_REAL, 0.001)

signal.signal(signal.SIGALRM, interrupt)
# Python drops an exception that the handler raises inside the callback of a weak reference.
sys.unraisablehook = interrupt_again
interrupted = 0
with open_session(root, agent="alice") as session:
    files, tools = FileGuard(session), FileTools(session)
    def call():
        files.validate_path("aidlc-docs/a.md")
        files.write_file("src/a.c", "", "alice")
        tools.list_files("aidlc-docs")
    call()
    while interrupted < 3000:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.000001, 0.002))
            while True:
                call()
        except KeyboardInterrupt:
            interrupted += 1
            # A held lock shows here: the next call of another thread never returns.
            if interrupted % 100 == 0:
                done = threading.Thread(target=call, daemon=True)
                done.start()
                done.join(20)
                if done.is_alive():
                    print("held after", interrupted, flush=True)
                    os._exit(0)
print(interrupted)
"""


def test_an_interrupt_releases_every_lock(program: Program, source: Path) -> None:
    """After 3,000 interrupts at random moments of guarded calls, another thread is served."""
    (source / "aidlc-docs").mkdir()
    assert program(_INTERRUPTED, source).strip() == "3000"
