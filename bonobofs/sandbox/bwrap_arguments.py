"""The arguments of bubblewrap: which files a command sees, and under which paths.

The root directory is empty at first. Each entry names a path that becomes visible; everything else of the machine is
absent. The workspace comes last, so that no other entry covers it.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.system.paths import is_within, symlinks_and_target

SYSTEM: Final = ("/usr", "/opt")
"""Directories that every sandbox shows, read-only."""
_TOP: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC: Final = (
    "alternatives", "ssl", "ca-certificates*", "pki", "crypto-policies", "ld.so.*", "localtime", "timezone",
    "locale.alias", "mime.types", "magic*", "protocols", "services", "gai.conf", "host.conf", "os-release",
    "debian_version", "lsb-release", "bash.bashrc", "profile*", "inputrc", "terminfo", "fonts", "java-*", "maven",
    "perl", "python3*", "gitconfig", "vim", "shells", "login.defs",
)  # fmt: skip
"""Entries of /etc without secrets. Not shadow, sudoers, ssh, machine-id, krb5*, pip.conf, npmrc, docker, systemd."""
_TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - directories of the sandbox
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "console")


class Account(NamedTuple):
    """The user of the command."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str


class View(NamedTuple):
    """What the command sees. All paths are absolute and without symlinks."""

    account: Account
    workspace: str
    """Path of the workspace in the sandbox."""
    mount: str
    """Path of the mount outside."""
    directory: str
    """Working directory of the command, in the workspace."""
    inside: str
    """Directory of guard.sock and bin, at the same path inside and outside."""
    state: str
    """The state directory, which is hidden except `inside`."""
    read: tuple[str, ...] = ()
    """Further paths that are visible, read-only."""
    kept_home: str = ""
    """Directory that becomes the home directory; empty: an empty home directory in memory."""
    tmp_size: int = 0
    """Bytes of each directory in memory."""


class Descriptors(NamedTuple):
    """Descriptors that bubblewrap inherits."""

    info: int
    seccomp: int
    files: Mapping[str, int]
    """Content of files in /etc, by path."""


def etc_files(account: Account) -> dict[str, str]:
    """Return the text of the files that the sandbox has instead of the machine's."""
    name, uid, gid, home, shell = account
    nobody = f"{'nobody'}:x:65534:65534:{'nobody'}:/nonexistent:/usr/sbin/nologin\n"
    return {
        "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\n{name}:x:{uid}:{gid}:{name}:{home}:{shell}\n{nobody}",
        "/etc/group": f"root:x:0:\n{name}:x:{gid}:\nnogroup:x:65534:\n",
        "/etc/hosts": "127.0.0.1 localhost bonobofs\n::1 localhost ip6-localhost\n",
        "/etc/resolv.conf": "nameserver 127.0.0.1\noptions timeout:2 attempts:2\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
    }


def build(view: View, descriptors: Descriptors) -> list[str]:
    """Return the options of bubblewrap for a view of the machine."""
    options = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--cap-drop", "ALL"]
    options += ["--hostname", "bonobofs", "--info-fd", str(descriptors.info)]
    if descriptors.seccomp >= 0:
        options += ["--seccomp", str(descriptors.seccomp)]
    options += _system()
    for path, fd in descriptors.files.items():
        options += ["--perms", "0444", "--ro-bind-data", str(fd), path]
    # The command's user owns /proc/sys if that user is root outside, and bubblewrap leaves it writable then.
    options += ["--dev", "/dev", "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
    size = ["--size", str(view.tmp_size)] if view.tmp_size else []
    for path in _TEMPORARY:
        options += ["--perms", "1777", *size, "--tmpfs", path]
    options += ["--dir", "/run", "--symlink", "/run", "/var/run"]
    home = view.account.home
    options += ["--bind", view.kept_home, home] if view.kept_home else ["--perms", "0700", *size, "--tmpfs", home]
    for path in view.read:
        options += ["--ro-bind", path, path]
    if any(is_within(view.state, path) for path in (*SYSTEM, *view.read)):
        options += ["--perms", "0700", "--tmpfs", view.state]
    options += ["--ro-bind", view.inside, view.inside]
    return [*options, "--bind", view.mount, view.workspace, "--remount-ro", "/", "--chdir", view.directory]


def _system() -> Iterator[str]:
    for path in SYSTEM:
        if os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    for path in _TOP:
        yield from _copy(path)
    yield from ("--perms", "0755", "--dir", "/etc")
    for name in sorted(os.listdir("/etc")):
        if any(fnmatchcase(name, pattern) for pattern in _ETC):
            yield from _copy(f"/etc/{name}")


def _copy(path: str) -> tuple[str, ...]:
    """Show a path as it is outside: a symlink as a symlink. Returns nothing if it is absent."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ()
    return ("--symlink", os.readlink(path), path) if stat.S_ISLNK(mode) else ("--ro-bind", path, path)


def readable(view: View) -> list[str]:
    """Return the paths that Landlock lets the command read and execute."""
    return [*SYSTEM, *_TOP, "/etc", "/proc", "/run", *view.read, view.inside]


def writable(view: View) -> list[str]:
    """Return the paths on which Landlock gives all rights."""
    devices = [f"/dev/{name}" for name in _DEVICES]
    return [view.workspace, view.account.home, *_TEMPORARY, "/proc/self", *devices]


def hidden(path: str, view: View) -> list[str]:
    """Return the symlinks that a path outside passes, and its target, as far as the sandbox does not show them."""
    shown = [*SYSTEM, *_TOP, "/etc/alternatives", *view.read]
    return [each for each in symlinks_and_target(path) if not _is_shown(each, shown, view)]


def _is_shown(path: str, shown: list[str], view: View) -> bool:
    if is_within(path, view.workspace) or is_within(path, view.inside):
        return True
    return not is_within(path, view.state) and any(is_within(path, top) for top in shown)


def own_code() -> tuple[str, ...]:
    """Return the paths of this Python and this package, which the last step and the session's programs need.

    A path with symlinks is there too: the interpreter of a virtual environment is a symlink through such a path.
    """
    package = Path(__file__).resolve().parent.parent
    found = (os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix, str(package))
    return tuple(dict.fromkeys(path for path in found if not any(is_within(path, top) for top in SYSTEM)))
