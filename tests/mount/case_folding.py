"""A directory that folds case, as some servers' file systems do: `python case_folding.py MOUNTPOINT` serves one.

It holds one file, `Name`, which answers to every way of writing it. Just enough of the protocol to look at it.
"""

from __future__ import annotations

import os
import struct
import sys

from bonobofs.fuse.kernel_transport import mount, unmount

LOOKUP, FORGET, GETATTR, INIT, OPENDIR, READDIR, BATCH_FORGET = 1, 2, 3, 26, 27, 28, 42
ROOT, FILE = 1, 2
HEADER = struct.Struct("<IIQQIIII")


def _attr(node: int) -> bytes:
    mode = 0o40755 if node == ROOT else 0o100644
    return struct.pack("<6Q3I7I", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, os.getuid(), os.getgid(), 0, 4096, 0)


def _answer(opcode: int, node: int, body: bytes) -> bytes | int:
    match opcode:
        case n if n == INIT:
            return struct.pack("<IIIIHHIIHHI7I", 7, 31, 65536, 0, 16, 12, 65536, 1, 0, 0, *[0] * 8)
        case n if n == GETATTR:
            return struct.pack("<QII", 0, 0, 0) + _attr(node)
        case n if n == LOOKUP and body.rstrip(b"\0").lower() == b"name":
            return struct.pack("<QQQQII", FILE, 0, 0, 0, 0, 0) + _attr(FILE)
        case n if n == LOOKUP:
            return 2
        case n if n == OPENDIR:
            return struct.pack("<QII", 0, 0, 0)
        case n if n == READDIR:
            return b"" if struct.unpack_from("<QQ", body)[1] else struct.pack("<QQII8s", FILE, 1, 4, 8, b"Name")
    return 38


def main() -> None:
    mountpoint = sys.argv[1]
    here = os.open(mountpoint, os.O_RDONLY)
    device = mount("folding", mountpoint, here, allow_other=False, devices=False)
    os.set_blocking(device, True)
    os.close(here)
    print("ready", flush=True)
    try:
        while True:
            request = os.read(device, 1 << 18)
            _, opcode, unique, node, *_ = HEADER.unpack_from(request)
            if opcode in (FORGET, BATCH_FORGET):
                continue
            answer = _answer(opcode, node, request[HEADER.size :])
            error, body = (-answer, b"") if isinstance(answer, int) else (0, answer)
            os.write(device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)
    except OSError:
        unmount(mountpoint, lazy=True)


if __name__ == "__main__":
    main()
