"""Taking a scratch layer away, however it was left."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from bonobofs.state import scratch_dir


def test_a_layer_is_removed_however_deep_it_is(tmp_path: Path) -> None:
    """Neither the stack nor the length of a path ends it: an agent may go as deep as it likes."""
    layer = scratch_dir.create(tmp_path, keep=False)
    fd = os.open(layer, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(3000):
        os.mkdir("below", dir_fd=fd)
        os.symlink("/", "link", dir_fd=fd)
        below = os.open("below", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)

    scratch_dir.remove(tmp_path)

    assert not layer.exists()


def test_one_process_removes_a_layer_and_others_do_not_wait(tmp_path: Path) -> None:
    layer = scratch_dir.create(tmp_path, keep=False)
    remover = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(remover, fcntl.LOCK_EX)
    scratch_dir.remove(tmp_path)
    assert layer.exists()
    os.close(remover)

    scratch_dir.remove(tmp_path)

    assert not layer.exists()
    scratch_dir.remove(tmp_path)
