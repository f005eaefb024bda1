"""The command line. `main` turns every failure into one line and an exit status."""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from bonobofs.errors import BonobofsError, reason
from bonobofs.system.terminal import escape

INTERRUPTED = 130
_CHECKOUT = Path(__file__).resolve().parent.parent.parent


def run() -> NoReturn:
    """The installed program `bonobofs`, and `python -m bonobofs`."""
    # Garbage collection of the loaded modules takes longer than most commands run.
    gc.set_threshold(50_000)
    _open_missing_streams()
    code = main()
    gc.freeze()
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 1 failed, 2 usage, 77 refused by policy, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Imported here so that an interrupt during the import prints no traceback.
        from bonobofs.cli.app import invoke  # noqa: PLC0415

        return invoke(arguments or ["--help"])
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has ended, as in `bonobofs audit export | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BonobofsError as error:
        _print_error(reason(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        if str(error.name).startswith("bonobofs"):
            raise
        from shlex import quote  # noqa: PLC0415

        _print_error(
            f"the Python package {error.name} is not installed; install bonobofs and its packages: "
            f"python3 -m venv ~/.bonobofs && ~/.bonobofs/bin/pip install {quote(str(_CHECKOUT))}, "
            "then run ~/.bonobofs/bin/bonobofs"
        )
        return 1
    except Exception as error:  # noqa: BLE001 - an unforeseen error is one line and a diagnostic
        from bonobofs.policy.decision import Refused  # noqa: PLC0415 - few commands load the policy

        if isinstance(error, Refused):
            _print_error(reason(error))
            return error.exit_code
        _print_error((isinstance(error, OSError) and _cause(error)) or _unforeseen(error))
        return 1


def _cause(error: OSError) -> str:
    """Return the message for standard output, a working directory or a mount that cannot be used; else ""."""
    try:
        sys.stdout.flush()
    except OSError as failure:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit would try to write again
        return f"standard output cannot be written: {failure.strerror}; free some space, or write elsewhere"
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return "the working directory was removed; change to another one" if error.filename is None else ""
    if error.errno == errno.ENOTCONN:
        from bonobofs.session.session_list import check_served  # noqa: PLC0415 - only after this error
        from bonobofs.state.home import home  # noqa: PLC0415

        try:
            check_served(home(), Path(os.path.join(here, os.fsdecode(error.filename or ""))))
        except BonobofsError as failure:
            return str(failure)
    return ""


def _unforeseen(error: Exception) -> str:
    text = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"unforeseen error: {text}; {_write_diagnostic()}"


def _open_missing_streams() -> None:
    """Open /dev/null for each standard stream that the caller has closed. Another file would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 - to the end


def _print_error(message: str) -> None:
    line = escape(" ".join(message.split())).replace("\\\\", "\\")  # a part may be escaped already
    print(f"bonobofs: {line}", file=sys.stderr)


def _write_diagnostic() -> str:
    """Append the traceback to bonobofs.log, and say where it is."""
    import traceback  # noqa: PLC0415

    from bonobofs.state.home import home  # noqa: PLC0415

    try:
        log: Path = home() / "bonobofs.log"
        log.touch(mode=0o600)
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            traceback.print_exc(file=file)
    except (OSError, BonobofsError):
        return "the traceback could not be written; run bonobofs doctor"
    return f"the diagnostic is at the end of {log}"
