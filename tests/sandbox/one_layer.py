"""Enter single layers of the sandbox without the others, then run a program: LAYERS CONFIG PROGRAM... .

LAYERS is a list of `landlock` and `seccomp`, separated by commas, or `none`. CONFIG is a JSON object with the paths
`read` and `write` of Landlock, and `package`, the directory that contains the package bonobofs.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def main() -> None:
    layers, config, *command = sys.argv[1:]
    settings = json.loads(config)
    sys.path.insert(0, settings["package"])
    libc = ctypes.CDLL(None, use_errno=True)
    from bonobofs.sandbox import last_step, seccomp_filter

    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if "landlock" in layers:
        last_step.restrict(settings["read"], settings["write"], [])
    if "seccomp" in layers:
        code = seccomp_filter.build()
        program = _Program(len(code) // struct.calcsize("=HBBI"), code)
        assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, os.strerror(ctypes.get_errno())
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
