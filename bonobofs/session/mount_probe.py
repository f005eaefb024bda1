"""Open one file of a new mount and list its root: `python -m bonobofs.session.mount_probe MOUNTPOINT`.

It opens one file and lists the directory. That shows that the mount works, and it is needed besides: from the first
open and the first listing on the kernel knows that it need not ask about opens, and a file that was created before
would be followed by a release that nobody expects.

With more arguments, a descriptor for the server's word, the state directory, the session and those that it accounts
for, it waits for the server first. On success it notes the end of those; on failure it takes the session away: nobody
else is left to do so when the command itself has become the server.
"""

from __future__ import annotations

import os
import signal
import sys

_SECONDS = 20


def look(mountpoint: bytes) -> str:
    """Open a file and list the directory there; "" when both work, else what went wrong."""
    try:
        os.close(os.open(os.path.join(mountpoint, b".bonobofs", b"policy.md"), os.O_RDONLY | os.O_CLOEXEC))
        with os.scandir(mountpoint) as entries:
            next(entries, None)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    mountpoint = os.fsencode(sys.argv[1])
    if len(sys.argv) == 2:
        signal.alarm(_SECONDS)
        failure = look(mountpoint)
        print(failure, end="", file=sys.stderr)
        return 1 if failure else 0
    # Each mount waits for the probe above, which needs none of these.
    import shutil  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    from bonobofs.state.home import session_directory  # noqa: PLC0415
    from bonobofs.state.sessions import note_ends  # noqa: PLC0415
    from bonobofs.system import mounts  # noqa: PLC0415

    ready, home, session, *earlier = sys.argv[2:]
    # The command waits for this process only; its child looks, and is nobody's zombie afterwards.
    if os.fork():
        return 0
    with os.fdopen(int(ready), "rb") as pipe:
        said = os.fsdecode(pipe.readline()).strip()
    if said != "ready":
        # The server has told its reason itself, on the same terminal.
        shutil.rmtree(session_directory(Path(home), session), ignore_errors=True)
        return 0
    note_ends(Path(home), earlier)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.alarm(_SECONDS)
    failure = look(mountpoint)
    if failure and mounts.at(Path(os.fsdecode(mountpoint))):
        print(f"bonobofs: the mount does not answer: {failure}; end it with Ctrl-C", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
