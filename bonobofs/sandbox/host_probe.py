"""Find out whether the sandbox works on this host: start it with the real flags, and try to escape from it."""

from __future__ import annotations

import json
import os
import platform
import re
import select
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import BonobofsError
from bonobofs.sandbox import bwrap_arguments, escape_attempts, last_step
from bonobofs.sandbox.bwrap_arguments import Account, View
from bonobofs.sandbox.sandbox_process import SEE_DOCTOR, CommandUser, ResourceLimits, SandboxProcess

_SECONDS: Final = 30.0
_BLOCK: Final = 1 << 16
_NOBODY: Final = 65534
_APPARMOR: Final = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_UNREACHABLE: Final = re.compile(r"Can't find source path (.+): Permission denied")
_PROFILE: Final = "abi <abi/4.0>, include <tunables/global> profile bwrap /usr/bin/bwrap flags=(unconfined) { userns, }"


class LayerScore(NamedTuple):
    """The result of the attempts that one layer must stop."""

    layer: str
    tried: int
    succeeded: tuple[str, ...]
    """Names of the attempts that were not stopped."""


class ProbeResult(NamedTuple):
    """The result of a probe."""

    scores: tuple[LayerScore, ...] = ()
    """Empty if the sandbox did not start."""
    failure: str = ""
    """Why the sandbox did not start, in one line."""
    remedy: str = ""


def probe() -> ProbeResult:
    """Start the sandbox as `run` does, without a mount and a network, and try to escape. Root acts as user `nobody`."""
    if last_step.landlock_abi() < last_step.OLDEST_ABI:
        return ProbeResult(
            failure="the kernel has no Landlock",
            remedy="use Linux 5.19 or later, and add landlock to the boot parameter lsm=",
        )
    with tempfile.TemporaryDirectory(prefix="bonobofs-probe-") as directory:
        try:
            text, failure = _run(Path(directory))
        except (BonobofsError, OSError) as error:
            text, failure = "", str(error).removesuffix(SEE_DOCTOR)
    if not text:
        return ProbeResult(failure=failure or "the probe printed nothing", remedy=remedy(failure))
    found = json.loads(text)
    return ProbeResult(tuple(LayerScore(layer, tried, tuple(names)) for layer, (tried, names) in found.items()))


def _run(directory: Path) -> tuple[str, str]:
    """Return what the attempts printed, and why the sandbox failed."""
    uid, gid = (os.geteuid(), os.getegid()) if os.geteuid() else (_NOBODY, _NOBODY)
    identity = CommandUser(uid, gid, ()) if os.geteuid() == 0 else None
    source, inside = directory / "source", directory / "state" / "inside"
    source.mkdir()
    inside.mkdir(parents=True)
    directory.chmod(0o711)
    account = Account("probe", uid, gid, "/home/probe", "/bin/sh")
    own = bwrap_arguments.own_code()
    view = View(account, str(source), str(source), str(source), str(inside), str(inside.parent), own)
    read, write = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    try:
        sandbox = SandboxProcess(
            view, {"PATH": os.defpath}, streams=(null, write, null), terminal=-1, identity=identity
        )
    finally:
        os.close(write)
        os.close(null)
    failure = sandbox.release(view, [sys.executable, "-I", "-S", escape_attempts.__file__], ResourceLimits())
    until = time.monotonic() + _SECONDS
    text = b""
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            data = pipe.read(_BLOCK)
            if not data:
                break
            text += data
        else:
            failure = f"125 the attempts to escape did not end within {_SECONDS:.0f} s"
    sandbox.kill()
    sandbox.wait()
    return "" if failure else text.decode(), failure.partition(" ")[2]


def remedy(failure: str) -> str:
    """Return what the operator can do if the sandbox does not start here; `failure` is bubblewrap's message."""
    unreachable = _UNREACHABLE.search(failure)
    if unreachable is not None:
        path = unreachable[1]
        return (
            f"the command's user cannot reach {path}; install Python and bonobofs where it can, such as /opt/bonobofs"
        )
    closed = _setting(Path("/proc/sys/user/max_user_namespaces")) == "0"
    if closed or _setting(Path("/proc/sys/kernel/unprivileged_userns_clone")) == "0":
        settings = "user.max_user_namespaces=15000 kernel.unprivileged_userns_clone=1"
        return f"user namespaces are closed; as root: sysctl {settings}"
    if _setting(_APPARMOR) == "1":
        return f"AppArmor closes user namespaces; as root, write to /etc/apparmor.d/bwrap and load it: {_PROFILE}"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "the container closes namespaces; start it with --security-opt seccomp=unconfined --security-opt "
            "apparmor=unconfined --security-opt systempaths=unconfined, or run bonobofs on the host"
        )
    if "microsoft" in platform.release().lower():
        return "WSL 1 has no namespaces; use WSL 2: wsl --set-version DISTRIBUTION 2"
    return "bubblewrap 0.8 or later is needed, and a Python that the command's user can run"


def _setting(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
