"""Symlinks, FIFOs and sockets follow the name rules of files that programs run later."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.users import outcome
from tests.support.world import Mounted

RUN_LATER = (
    "conftest.py",
    "setup.py",
    "sitecustomize.py",
    "Makefile",
    "Dockerfile",
    "Jenkinsfile",
    "package.json",
    "configure",
    "run.sh",
    "build.rs",
    "noxfile.py",
    "Rakefile",
    "notes.MD",
)
"""Names that tools execute when they find them. The default policy admits none of them below aidlc-docs."""


def _symlink(path: str) -> None:
    os.symlink("notes.md", path)


def _socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)


def _device(path: str) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


MAKERS: dict[str, Callable[[str], None]] = {"symlink": _symlink, "fifo": os.mkfifo, "socket": _socket}


@pytest.fixture
def docs(mounted: Mounted, source: Path) -> Iterator[Path]:
    """The working directory, aidlc-docs of a mount under the default policy: AF_UNIX paths have at most 108 bytes."""
    (source / "aidlc-docs").mkdir()
    (source / "aidlc-docs/notes.md").write_text("notes\n")
    (source / "aidlc-docs/old-link").symlink_to("notes.md")
    world = mounted()
    docs = world.path / "aidlc-docs"
    with contextlib.chdir(docs):
        yield docs


@pytest.mark.parametrize("maker", MAKERS)
def test_no_special_file_gets_a_name_that_a_file_may_not_have(maker: str, docs: Path, source: Path) -> None:
    """All 13 names are refused at creation, by a rename and by a link. A permitted one succeeds."""
    make = MAKERS[maker]
    assert {name: outcome(make, name) for name in RUN_LATER} == dict.fromkeys(RUN_LATER, errno.EACCES)
    make("good.md")
    for name in RUN_LATER:
        assert outcome(os.rename, "good.md", name) == errno.EACCES, name
        assert outcome(lambda: os.link("good.md", name, follow_symlinks=False)) == errno.EACCES, name  # noqa: B023
    os.rename("good.md", "better.md")
    assert sorted(os.listdir(source / "aidlc-docs")) == ["better.md", "notes.md", "old-link"]


def test_a_staged_symlink_is_judged_by_its_final_name(docs: Path, source: Path) -> None:
    """`ln -sf` and editors create a temporary name first. The lock of emacs stays in the mount."""
    os.symlink("me@host.123:456", ".#notes.md")
    os.symlink("notes.md", "link.tmp")
    assert [outcome(os.rename, "link.tmp", name) for name in RUN_LATER] == [errno.EACCES] * len(RUN_LATER)
    os.rename("link.tmp", "link.md")
    assert os.readlink(source / "aidlc-docs/link.md") == "notes.md"
    os.unlink(".#notes.md")


def test_a_move_of_a_directory_with_a_refused_symlink_is_refused(docs: Path, source: Path) -> None:
    """A directory may have any name. Special files in it may not get a name that a rule refuses."""
    os.mkdir("conftest.py")
    os.rename("conftest.py", "Makefile")
    (source / "aidlc-docs/Makefile/configure").symlink_to("../notes.md")
    assert outcome(os.rename, "Makefile", "other") == errno.EACCES
    assert outcome(os.unlink, "old-link") == errno.EACCES
    assert os.path.islink(source / "aidlc-docs/Makefile/configure")


@pytest.mark.root
def test_a_device_needs_the_name_of_a_file_too(mounted: Mounted, source: Path) -> None:
    policy = 'devices = true\n[[rule]]\nname = "docs"\npaths = ["docs/"]\nsuffixes = [".md"]\n'
    (source / "docs").mkdir()
    world = mounted(policy=policy)
    assert outcome(_device, f"{world.path}/docs/null") == errno.EACCES
    assert outcome(_device, f"{world.path}/docs/null.md") is None
