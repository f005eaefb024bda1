"""A program that runs the timed loops of single system calls. It imports little, and shares nothing.

Its own overhead (about 0.1 us a call) is the same in every world. It prints one JSON object: seconds by row.
Usage: client.py write COUNT | files COUNT | open COUNT FILE... | read FILE   (in the directory to work in)
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections.abc import Callable
from time import perf_counter_ns

BLOCK = 4096
BATCH = 10
CHUNK = 128 * 1024


def write(arguments: list[str]) -> dict[str, float]:
    """COUNT appends of 4 KiB to one new file."""
    block = b"\xa5" * BLOCK
    descriptor = os.open("written", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    put = os.write
    started = perf_counter_ns()
    for _ in range(int(arguments[0])):
        put(descriptor, block)
    seconds = (perf_counter_ns() - started) / 1e9
    os.close(descriptor)
    return {"write": seconds}


def files(arguments: list[str]) -> dict[str, float]:
    """COUNT files made with 100 bytes each, then all renamed, then all removed."""
    names = [f"f{number:06}" for number in range(int(arguments[0]))]
    pairs = [(name, f"g{name}") for name in names]
    flags, content = os.O_WRONLY | os.O_CREAT | os.O_EXCL, b"x" * 100
    begin, put, end, rename, unlink = os.open, os.write, os.close, os.rename, os.unlink
    times = [perf_counter_ns()]
    for name in names:
        descriptor = begin(name, flags, 0o644)
        put(descriptor, content)
        end(descriptor)
    times.append(perf_counter_ns())
    for old, new in pairs:
        rename(old, new)
    times.append(perf_counter_ns())
    for _, new in pairs:
        unlink(new)
    times.append(perf_counter_ns())
    create, move, remove = ((after - before) / 1e9 for before, after in itertools.pairwise(times))
    return {"create": create, "rename": move, "unlink": remove}


def opens(arguments: list[str]) -> dict[str, float]:
    """COUNT times open(read-only)+close over the FILES in turn: the median of one, taken in batches of ten."""
    count, paths = int(arguments[0]), arguments[1:]
    begin, end, clock = os.open, os.close, perf_counter_ns
    for path in paths:
        end(begin(path, os.O_RDONLY))
    batches = []
    for turn in range(max(1, count // BATCH)):
        path = paths[turn % len(paths)]
        started = clock()
        for _ in range(BATCH):
            end(begin(path, 0))
        batches.append(clock() - started)
    batches.sort()
    return {"open": batches[len(batches) // 2] / BATCH / 1e9}


def read(arguments: list[str]) -> dict[str, float]:
    """The FILE from end to end in 128 KiB pieces into one buffer, twice: the first is cold, the second warm."""
    buffer = bytearray(CHUNK)
    passes = []
    for _ in range(2):
        descriptor = os.open(arguments[0], os.O_RDONLY)
        started = perf_counter_ns()
        while os.readv(descriptor, [buffer]):
            continue
        passes.append((perf_counter_ns() - started) / 1e9)
        os.close(descriptor)
    return {"read-cold": passes[0], "read-warm": passes[1]}


LOOPS: dict[str, Callable[[list[str]], dict[str, float]]] = {
    "write": write,
    "files": files,
    "open": opens,
    "read": read,
}

if __name__ == "__main__":
    gc.disable()
    print(json.dumps(LOOPS[sys.argv[1]](sys.argv[2:])))
