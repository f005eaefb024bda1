"""The command line. `main` is the edge at which every failure becomes one line and an exit code."""

from __future__ import annotations

import gc
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from bonobofs.errors import BonobofsError
from bonobofs.policy.decision import Refused

INTERRUPTED = 130
_CHECKOUT = Path(__file__).resolve().parent.parent.parent


def run() -> NoReturn:
    """The installed program `bonobofs`, and `python -m bonobofs`."""
    # What is loaded stays: looking through it for garbage, again and again and at the end, takes longer than most
    # commands do.
    gc.set_threshold(50_000)
    code = main()
    gc.freeze()
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 failed, 2 usage, 77 refused by policy, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Here, so that an interrupt while modules are read is as quiet as one later.
        from bonobofs.cli.app import invoke  # noqa: PLC0415

        return invoke(given or ["--help"])
    except KeyboardInterrupt:
        return INTERRUPTED
    except (BonobofsError, Refused) as error:
        _complain(str(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        if str(error.name).startswith("bonobofs"):
            raise
        _complain(
            f"the Python package {error.name} is not installed; install bonobofs and its packages: "
            f"python3 -m venv ~/.bonobofs && ~/.bonobofs/bin/pip install {shlex.quote(str(_CHECKOUT))}, "
            "then run ~/.bonobofs/bin/bonobofs"
        )
        return 1
    except Exception as error:  # noqa: BLE001 - the edge: whatever was not foreseen is one line and a diagnostic
        _complain(f"{_said(error)}; {_diagnose()}")
        return 1


def _complain(message: str) -> None:
    line = " ".join(message.split())
    print(f"bonobofs: {line}".encode(errors="backslashreplace").decode(), file=sys.stderr)


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _diagnose() -> str:
    """Keep the traceback for whoever mends it, and say where it is."""
    from bonobofs.state.home import home  # noqa: PLC0415

    try:
        log: Path = home() / "bonobofs.log"
        log.touch(mode=0o600)
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            traceback.print_exc(file=file)
    except (OSError, BonobofsError):
        return "and the diagnostic could not be written either; run bonobofs doctor"
    return f"the diagnostic is at the end of {log}"
