"""Every difference between a world and the bare directory: case, sight, what comes out instead, and why.

The reason is the code of the rule that refuses, also for what only follows from the refusal; otherwise it is a fact
about FUSE in words. What is listed must be seen, and every refusal in a case must be listed, or the suite fails.
"""

from __future__ import annotations

from typing import Final

from bonobofs.policy.decision import Code
from tests.posix.harness import ANY, Differences

_DEVICE, _EXECUTABLE, _HIDDEN = str(Code.DEVICE), str(Code.EXECUTABLE), str(Code.HIDDEN)
_OUTSIDE, _SIZE, _SUFFIX = str(Code.OUTSIDE), str(Code.SIZE), str(Code.SUFFIX)


def _are(value: object, because: str, *sights: str) -> dict[str, tuple[object, str]]:
    """The same outcome for several sights."""
    return dict.fromkeys(sights, (value, because))


KERNEL: Final[Differences] = {
    "link.symlink_outside": {
        **_are("EPERM", _OUTSIDE, "absolute", "far up", "slashes only"),
        **_are("ENOENT", _OUTSIDE, "its text", "its text too"),
    },
    "open.unnamed": {
        "content under its later name": ("EOPNOTSUPP", "a file without a name could not be judged"),
    },
    "space.collapse_and_insert": {
        **_are("EOPNOTSUPP", "the kernel's FUSE has no request for it", "collapse", "insert"),
        "size": (3 * 4096, "the kernel's FUSE has no request for it"),
        "content": (b"ab", "the kernel's FUSE has no request for it"),
    },
}
"""Through a mount under an allow-all policy, by root or by an ordinary user."""

SCRATCH: Final[Differences] = {name: each for name, each in KERNEL.items() if name != "link.symlink_outside"}
"""In the scratch layer, where a symlink may lead anywhere."""

_REMOVED = "libfuse forgets a directory that is removed, and what lies at no path has no attributes there"
_AT_THAT_MOMENT = "libfuse opens by path what it has looked up before: ESTALE if it was removed or replaced since"
_NAMES = "to libfuse each name of a file is an inode of its own, which shares its bytes and nothing else"

PORTABLE: Final[Differences] = {
    **KERNEL,
    "directory.removed_under_the_feet": {
        **_are("ESTALE", _REMOVED, "create", "listed", "upwards"),
    },
    "directory.removed_while_open": {
        **_are("ESTALE", _REMOVED, "links", "listed", "create", "mkdir", "lookup", "its parent", "its mode"),
        **_are("ESTALE", _REMOVED, "another one", "not in the old one"),
    },
    "directory.replaced_while_open": {
        **_are("ESTALE", _REMOVED, "links of the old one", "nothing in the old one"),
    },
    "random.calls": {
        "outcomes 1": (ANY, _REMOVED),
    },
    "concurrency.made_and_removed": {
        "seen otherwise": (ANY, _AT_THAT_MOMENT),
    },
    "concurrency.replaced_and_read": {
        "errors": (ANY, _AT_THAT_MOMENT),
    },
    "concurrency.opened_while_removed": {
        "used": (ANY, _AT_THAT_MOMENT),
    },
    "special.fifo": {
        "by its other name": (b"", _NAMES),
        "without a name": (b"", _NAMES),
        **_are("ESTALE", "libfuse keeps a removed file only if it knows that it is open", "fstat", "its links"),
    },
}
"""Through the portable transport, likewise."""

ORDINARY: Final[Differences] = {
    "permission.closed_directory_renamed": {
        "rename": ("EACCES", "what is below must be judged, and a server without root cannot list it"),
        "listed": (["d"], "what is below must be judged, and a server without root cannot list it"),
    },
}
"""Further, where the server is not root."""

GUARDED: Final[Differences] = {
    **KERNEL,
    "acl.executable": {
        **_are("EACCES", _EXECUTABLE, "set", "for one user alone"),
        **_are("0644", _EXECUTABLE, "mode", "its mode"),
    },
    "content.far_away": {
        **_are("EFBIG", _SIZE, "write", "extend to a gigabyte"),
        "size": (0, _SIZE),
        "the byte": (b"", _SIZE),
        "size after": (10, _SIZE),
    },
    "content.larger_than_a_megabyte": {
        "write": ("EFBIG", _SIZE),
        "size": (0, _SIZE),
        "read": (False, _SIZE),
    },
    "exec.busy": _are("EACCES", _EXECUTABLE, "copy", "chmod", "run while it is written", "run"),
    "exec.other_files_are_not_run": _are("EACCES", _EXECUTABLE, "chmod", "run"),
    "exec.program": _are("EACCES", _EXECUTABLE, "copy", "chmod", "run", "run the other"),
    "exec.rights": _are(
        "EACCES",
        _EXECUTABLE,
        "create",
        *("chmod 755", "root runs 755", "anna runs 755"),
        *("chmod 744", "root runs 744"),
        *("chmod 645", "root runs 645", "anna runs 645"),
    ),
    "exec.running": {
        **_are("EACCES", _EXECUTABLE, "copy", "chmod", "write to it"),
        "its output": ([], _EXECUTABLE),
    },
    "exec.script": {
        **_are("EACCES", _EXECUTABLE, "create", "chmod", "run", "by its whole path", "run again"),
        "access": (False, _EXECUTABLE),
        "by its reader": ((0, "never reached"), _EXECUTABLE),
    },
    "exec.script_just_written": _are("EACCES", _EXECUTABLE, "exit codes"),
    "exec.set_user_id": {
        **_are("EACCES", _EXECUTABLE, "copy", "chmod", "as its owner", "really"),
        **_are("EACCES", _EXECUTABLE, "chmod for the group", "with its group"),
        "content": (False, _EXECUTABLE),
    },
    "mode.executable_bits": {
        **_are("EACCES", _EXECUTABLE, "chmod 100", "chmod 755", "chmod 777", "chmod 711"),
        **_are("EACCES", _EXECUTABLE, "chmod 610", "chmod 601", "fchmod"),
        **_are("0644", _EXECUTABLE, "mode 100", "mode 755", "mode 777", "mode 711", "mode 610", "mode 601", "told"),
    },
    "mode.set_id_bits_go_with_the_owner": {
        **_are("EACCES", _EXECUTABLE, "chmod 6755", "chmod 6711", "chmod 4700"),
        **_are("0600", _EXECUTABLE, "6755 by root", "6711 by root", "4700 by root"),
    },
    "mode.set_id_bits_go_with_writing": {
        **_are("EACCES", _EXECUTABLE, "write", "append", "truncate", "to the same size", "open with O_TRUNC"),
        **_are("EACCES", _EXECUTABLE, "allocate", "punch", "copy a range"),
        **_are("EACCES", _EXECUTABLE, "write, sticky", "append, sticky", "truncate, sticky"),
        **_are("EACCES", _EXECUTABLE, "to the same size, sticky", "open with O_TRUNC, sticky"),
        **_are("EACCES", _EXECUTABLE, "allocate, sticky", "punch, sticky", "copy a range, sticky"),
    },
    "name.hidden": {
        **_are("EACCES", _HIDDEN, "a file", "a directory", "three dots"),
        "read": ("ENOENT", _HIDDEN),
        "listed": ([], _HIDDEN),
    },
    "name.other_endings": {
        **_are("EACCES", _SUFFIX, "plain", "a.txt", "a.py", "a.MD", "a.md.", "a.md.txt", "a.md ", "rename", "link"),
        **_are("ENOENT", _SUFFIX, "kind of plain", "kind of a.txt", "kind of a.py", "kind of a.MD", "kind of a.md."),
        **_are("ENOENT", _SUFFIX, "kind of a.md.txt", "kind of a.md "),
    },
    "open.create_executable": {
        **_are("EACCES", _EXECUTABLE, "create", "create for the group alone"),
        **_are("ENOENT", _EXECUTABLE, "mode", "mode of that"),
    },
    "permission.group_of_the_directory": {
        "with execution": ("EACCES", _EXECUTABLE),
        "its mode too": ("ENOENT", _EXECUTABLE),
    },
    "space.sparse_copy": {
        "write": ("EFBIG", _SIZE),
        **_are(0, _SIZE, "size", "blocks"),
        "a hole": (b"", _SIZE),
    },
    "special.devices": {
        **_are("EPERM", _DEVICE, "character", "block", "large numbers"),
        **_are("ENOENT", _DEVICE, "kinds", "modes", "number", "block's number", "large number", "write", "read"),
        **_are("ENOENT", _DEVICE, "rename", "chmod", "its mode", "chown", "link", "unlink", "under its other name"),
        **_are("ENOENT", _DEVICE, "no such device"),
    },
}
"""In aidlc-docs/ under the default policy: only .md, at most 1 MB, nothing executable, nothing hidden, no devices."""
