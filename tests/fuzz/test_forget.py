"""Long lists of nodes that the kernel forgets: others are served between any two of them."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from bonobofs.fuse import abi as p
from bonobofs.fuse.mount_context import Header
from bonobofs.fuse.slices import finished
from tests.fuzz.rig import Rig


def test_a_batch_of_forgets_is_served_in_steps(tmp_path: Path) -> None:
    """Each step forgets one node; the reply of a request that came meanwhile goes out before the next."""
    rig = Rig(tmp_path)
    try:
        nodes = [rig.node("docs"), rig.node("docs", "a.md"), rig.node("docs", "link")]
        known = rig.operations.mount.nodes
        counts = [node.lookups for node in map(known.get, nodes) if node is not None]
        body = p.BATCH_FORGET_IN.pack(len(nodes), 0)
        body += b"".join(map(p.FORGET_ONE.pack, reversed(nodes), reversed(counts)))
        handler = rig.operations.handlers[p.Opcode.BATCH_FORGET]
        steps = handler(Header(0, 0, 0, 0, 0), memoryview(body))
        assert isinstance(steps, Generator)
        left = []
        for _ in nodes:
            next(steps)
            left.append([node in known for node in nodes])
        assert left == [[True, True, False], [True, False, False], [False, False, False]]
        assert finished(steps) == b""
    finally:
        rig.close()
