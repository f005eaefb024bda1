"""Install what the comparison needs: tools from the distribution, and Python environments outside of the repository."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plan import BenchError

TOOLS = {
    "git": "git",
    "rg": "ripgrep",
    "fusermount3": "fuse3",
    "mergerfs": "mergerfs",
    "bindfs": "bindfs",
    "gcc": "gcc",
}
"""Program, and the Debian or Ubuntu package that brings it."""
BUILD = ["hatchling", "hatch-mypyc>=0.16", "mypy[mypyc]>=1.13"]
"""What compiles bonobofs."""
MFUSEPY = "mfusepy==3.1.1"


def install_tools(programs: set[str]) -> None:
    """Install by apt-get what PATH does not have. Only root can; anybody else is told what to type."""
    missing = sorted(TOOLS[program] for program in programs if shutil.which(program) is None)
    if not missing:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BenchError(f"{', '.join(missing)} not installed: run {' '.join(command)} as root, or leave out --worlds")
    print(f"installing {', '.join(missing)}", file=sys.stderr)
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run(command, env=quiet, capture_output=True).returncode:
        subprocess.run(["apt-get", "update"], env=quiet, capture_output=True)
        subprocess.run(command, env=quiet, stdout=sys.stderr, check=True)


def interpreter(users: list[pwd.struct_passwd]) -> str:
    """A Python 3.11 or later that each of USERS can run: root's own under its home directory is nobody else's."""
    for candidate in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        if all(_runs(candidate, "import sys; sys.exit(sys.version_info < (3, 11))", user) for user in users):
            return candidate
    raise BenchError("no Python 3.11 that all users can run: install python3 and python3-venv")


def for_bonobofs(python: str, checkout: Path, users: list[pwd.struct_passwd], also: Sequence[str] = ()) -> str:
    """PYTHON itself if it has the dependencies of pyproject.toml and `also`, else an environment made from it."""
    project = checkout / "pyproject.toml"
    needs = tomllib.loads(project.read_text())["project"].get("dependencies", []) if project.exists() else []
    needs = [*needs, *also]
    names = [re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0] for need in needs]
    check = f"import importlib.metadata as m; [m.version(name) for name in {names}]"
    if all(_runs(python, check, user) for user in users):
        return python
    return environment(python, needs)


def environment(python: str, needs: list[str]) -> str:
    """The interpreter of an environment with NEEDS, made once and kept in the cache directory."""
    key = hashlib.sha256("\n".join([os.path.realpath(python), *needs]).encode()).hexdigest()[:12]
    place = cache() / key
    made = place / "bin" / "python"
    if not (place / "complete").exists():
        print(f"making {place} with {', '.join(needs)}", file=sys.stderr)
        shutil.rmtree(place, ignore_errors=True)
        for command in ([python, "-m", "venv", str(place)], [str(made), "-m", "pip", "install", "--quiet", *needs]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines()[-1:]
                raise BenchError(f"{' '.join(command[:4])} failed ({said}): is python3-venv installed?")
        (place / "complete").touch()
    return str(made)


def cache() -> Path:
    """Root's environments serve the users that it measures as, so they lie where all can read."""
    if os.geteuid() == 0:
        return Path("/var/cache/bonobofs-bench")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "bonobofs-bench")


def versions(names: list[str], loopback_python: str, checkout: Path) -> dict[str, str]:
    """What each of the worlds and tools says of its own version; for bonobofs, the commit."""
    asked = {
        "bonobofs": ["git", "-C", str(checkout), "describe", "--always", "--dirty"],
        "mergerfs": ["mergerfs", "--version"],
        "bindfs": ["bindfs", "--version"],
        "mfusepy": [loopback_python, "-c", "import importlib.metadata as m; print(m.version('mfusepy'))"],
        "git": ["git", "--version"],
        "rg": ["rg", "--version"],
    }
    found = {}
    for name in (name for name in names if name in asked):
        done = subprocess.run(asked[name], capture_output=True, text=True)
        found[name] = (done.stdout.strip().splitlines() or ["uncommitted"])[0].split()[-1]
    return found


def _runs(python: str, code: str, user: pwd.struct_passwd) -> bool:
    command = [python, "-c", code]
    try:
        if user.pw_uid == os.geteuid():
            return subprocess.run(command, capture_output=True).returncode == 0
        done = subprocess.run(
            command, capture_output=True, user=user.pw_uid, group=user.pw_gid, extra_groups=[], cwd="/"
        )
    except OSError:
        return False
    return done.returncode == 0
