"""A hostile pusher: packs of chosen bytes, and the protocol of receive-pack spoken by hand."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zlib
from collections.abc import Iterable

from bonobofs.git.session_repository import CLIENT
from tests.git.conftest import Publishing

ZERO = "0" * 40
_COMMIT, _TREE, _BLOB, _REF_DELTA = 1, 2, 3, 7
KINDS = {"commit": _COMMIT, "tree": _TREE, "blob": _BLOB}


def oid(kind: str, data: bytes) -> str:
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(data)) + data).hexdigest()


def _head(kind: int, size: int) -> bytes:
    first, size = (kind << 4) | (size & 15), size >> 4
    found = bytearray()
    while size:
        found.append(first | 0x80)
        first, size = size & 0x7F, size >> 7
    return bytes([*found, first])


def entry(kind: str, data: bytes) -> bytes:
    return _head(KINDS[kind], len(data)) + zlib.compress(data)


def delta(base: str, data: bytes) -> bytes:
    """An entry whose content is `data` applied to the object `base`."""
    return _head(_REF_DELTA, len(data)) + bytes.fromhex(base) + zlib.compress(data)


def number(size: int) -> bytes:
    found = bytearray()
    while size >= 0x80:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*found, size])


def copies(size: int, times: int) -> bytes:
    """A delta that copies the whole base (of less than 16 MiB) so many times."""
    return number(size) + number(size * times) + (b"\xf0" + size.to_bytes(3, "little")) * times


def pack(entries: Iterable[bytes]) -> bytes:
    found = list(entries)
    data = b"PACK" + (2).to_bytes(4, "big") + len(found).to_bytes(4, "big") + b"".join(found)
    return data + hashlib.sha1(data).digest()


def tree(*entries: tuple[int, bytes, str]) -> bytes:
    """Entries as they are given, in that order."""
    return b"".join(b"%o %s\0" % (mode, name) + bytes.fromhex(each) for mode, name, each in entries)


def commit(one: Publishing, of: str, *parents: str, message: str = "[gt-1] A change", more: bytes = b"") -> bytes:
    """A commit in the agent's name."""
    person = one.repo.git("var", "GIT_COMMITTER_IDENT").strip().encode()
    lines = [b"tree " + of.encode(), *(b"parent " + parent.encode() for parent in parents)]
    lines += [b"author " + person, b"committer " + person]
    return b"\n".join(lines) + b"\n" + more + b"\n" + message.encode() + b"\n"


def push(one: Publishing, commands: Iterable[tuple[str, str, str]], data: bytes) -> str:
    """Send commands (old, new, ref) and bytes in place of a pack, and return all that comes back."""
    command = [sys.executable, "-I", "-S", "-E", str(CLIENT), str(one.socket), "receive-pack", "x"]
    lines = []
    for at, (old, new, ref) in enumerate(commands):
        line = f"{old} {new} {ref}".encode() + (b"" if at else b"\0report-status") + b"\n"
        lines.append(b"%04x" % (len(line) + 4) + line)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdin is not None
        try:
            running.stdin.write(b"".join(lines) + b"0000" + data)
            running.stdin.close()
        except BrokenPipeError:
            running.stdin = None
        assert running.stdout is not None
        return running.stdout.read().decode(errors="replace")
