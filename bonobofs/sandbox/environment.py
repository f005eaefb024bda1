"""The environment of a command in the sandbox. It is built from nothing, so no variable of the caller leaks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from bonobofs.ipc.client import SOCKET_VARIABLE

_PASSED: Final = ("LANG", "LANGUAGE", "TERM", "COLORTERM", "TZ", "NO_COLOR", "LINES", "COLUMNS")
_LOCALE: Final = re.compile(r"LC_[A-Z_]+")
_NEVER: Final = re.compile(
    r"(LD|GIT|PYTHON|DBUS|BONOBOFS)_.*|PYTHON.*|SSH_AUTH_SOCK|DISPLAY|WAYLAND_DISPLAY|XDG_RUNTIME_DIR"
)
"""Variables that would lead the session's programs to other files, or to a service of the host."""
PROXY: Final = {
    "HTTP_PROXY": "http://127.0.0.1:3128",
    "HTTPS_PROXY": "http://127.0.0.1:3128",
    "ALL_PROXY": "socks5h://127.0.0.1:3128",
    "NO_PROXY": "localhost,127.0.0.1,::1",
    "NODE_USE_ENV_PROXY": "1",
}
"""For programs that ask a proxy. Programs that ignore these variables reach the same proxy."""
_DEFAULT_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


def is_refused(name: str) -> bool:
    """Return True if the policy and --env may not pass a variable of this name."""
    return _NEVER.fullmatch(name) is not None


def build(
    caller: Mapping[str, str],
    names: Iterable[str],
    fixed: Mapping[str, str],
    programs: str,
    is_visible: Callable[[str], bool],
) -> dict[str, str]:
    """Return the environment of the command.

    `caller` is the environment of the caller, of which the variables `names` pass. `fixed` are the variables of the
    session. `programs` is the directory of the session's git and bd, the first one on PATH. The directories of the
    caller's PATH follow that `is_visible` in the sandbox.
    """
    passed = [name for name in caller if name in _PASSED or _LOCALE.fullmatch(name)]
    passed += [name for name in names if name in caller and not is_refused(name)]
    path = [part for part in caller.get("PATH", "").split(os.pathsep) if part.startswith("/") and is_visible(part)]
    return {
        **{name: caller[name] for name in passed},
        **proxy_variables(),
        **fixed,
        "PATH": os.pathsep.join([programs, *(path or _DEFAULT_PATH.split(os.pathsep))]),
        "TMPDIR": "/tmp",  # noqa: S108 - the sandbox has its own
        SOCKET_VARIABLE: os.path.join(os.path.dirname(programs), "guard.sock"),
    }


def proxy_variables() -> dict[str, str]:
    """Return PROXY under the names in upper case and in lower case: curl reads only `http_proxy`."""
    lower = {name.lower(): value for name, value in PROXY.items() if name.endswith("_PROXY") and "_USE_" not in name}
    return {**PROXY, **lower}
