"""What is the portable transport's own: how it finds nodes for paths, and what libfuse makes it do."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.errors import MountError
from bonobofs.session import launcher
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.users import outcome

POLICY = """
default = "deny"
temporary = ["**/sed??????"]

[[rule]]
name = "notes"
paths = ["**/"]
suffixes = [".md"]
max_size = 1000

[[keep]]
paths = ["kept.md"]
"""


@pytest.fixture
def world(place: MakePlace) -> Place:
    return place(policy=POLICY, transport="portable")


def _records(world: Place) -> list[tuple[str, str, str]]:
    """Operation, path and result of each intent."""
    return [(entry.operation, entry.path, entry.result) for entry in world.entries() if entry.kind == "intent"]


def test_every_kind_of_change_is_judged_and_recorded_once(world: Place) -> None:
    """The trail is as with the kernel transport, although libfuse splits some requests."""

    def story() -> None:
        os.chdir(world.path)
        Path("a.md").write_text("content")
        os.mkdir("d")
        os.rename("a.md", "d/b.md")
        os.chmod("d/b.md", 0o600)
        os.link("d/b.md", "c.md")
        os.unlink("c.md")
        os.symlink("d/b.md", "l.md")
        os.setxattr("d/b.md", "user.mark", b"1")
        os.utime("d/b.md", ns=(1, 2))
        assert os.stat("d/b.md").st_mtime_ns == 2
        with open("d/b.md", "r+b") as file:
            file.truncate(3)
            assert outcome(file.truncate, 2000) == errno.EFBIG
        assert Path("l.md").read_text() == "con"
        assert outcome(Path("n.txt").write_text, "no") == errno.EACCES
        why = json.loads(os.getxattr("d/b.md", "user.bonobofs.why"))
        assert (why["allowed"], why["path"]) == (True, "d/b.md")
        assert outcome(Path(".bonobofs/policy.md").write_text, "mine") in (errno.EPERM, errno.EACCES)
        assert "n.txt" in Path(".bonobofs/denials.jsonl").read_text()
        os.chdir("/")

    world.does(story)
    assert [record for record in _records(world) if not record[1].startswith(".bonobofs")] == [
        ("create_file", "a.md", "allowed"),
        ("mkdir", "d", "allowed"),
        ("rename", "a.md", "allowed"),
        ("set_mode", "d/b.md", "allowed"),
        ("link", "c.md", "allowed"),
        ("delete_file", "c.md", "allowed"),
        ("symlink", "l.md", "allowed"),
        ("set_xattr", "d/b.md", "allowed"),
        ("set_times", "d/b.md", "allowed"),
        ("truncate", "d/b.md", "allowed"),
        ("truncate", "d/b.md", "denied"),
        ("create_file", "n.txt", "denied"),
    ]


def test_an_open_file_is_removed_and_not_renamed(world: Place) -> None:
    """Neither source nor trail ever has the hidden name that libfuse would use."""

    def story() -> None:
        os.chdir(world.path)
        Path("a.md").write_text("content")
        with open("a.md", "r+b", buffering=0) as file:
            os.unlink("a.md")
            assert os.listdir(".") == os.listdir(world.source) == []
            file.write(b"CONTENT")
            os.fchmod(file.fileno(), 0o400)
            told = os.fstat(file.fileno())
            assert (told.st_nlink, told.st_mode & 0o777, told.st_size) == (0, 0o400, 7)
            assert os.pread(file.fileno(), 10, 0) == b"CONTENT"
        assert os.listdir(world.source) == []
        os.chdir("/")

    world.does(story)
    assert [one[:2] for one in _records(world)] == [
        ("create_file", "a.md"),
        ("delete_file", "a.md"),
        ("write_file", "a.md"),
        ("set_mode", "a.md"),
    ]


def test_a_refused_rename_over_an_open_file_loses_nothing(world: Place) -> None:
    """An open target changes neither the decision nor the result, also for a file under [[keep]]."""

    def story() -> None:
        os.chdir(world.path)
        for name in ("kept.md", "a.md"):
            Path(name).write_text(name)
        (world.source / "large.md").write_bytes(bytes(2000))
        with open("kept.md", "r+b", buffering=0) as file:
            assert outcome(os.rename, "large.md", "kept.md") == errno.EFBIG
            assert sorted(os.listdir(world.source)) == ["a.md", "kept.md", "large.md"]
            assert Path("kept.md").read_text() == "kept.md"
            file.write(b"KEPT")
            assert os.fstat(file.fileno()).st_nlink == 1
        assert (world.source / "kept.md").read_text() == "KEPT.md"
        with open("kept.md", "rb") as file:
            assert outcome(os.unlink, "kept.md") == errno.EACCES
            os.rename("a.md", "kept.md")
            assert file.read() == b"KEPT.md"
        assert Path("kept.md").read_text() == "a.md"
        os.unlink("large.md")
        assert os.listdir(world.source) == ["kept.md"]
        os.chdir("/")

    world.does(story)


def test_libfuses_hidden_names_reach_no_file(world: Place) -> None:
    """A program that uses such a name gets the decision for that name."""

    def story() -> None:
        os.chdir(world.path)
        Path("a.md").write_text("content")
        with open("a.md", "rb"):
            for number in range(1, 40):
                assert outcome(os.rename, "a.md", f".fuse_hidden{number:08x}00000001") == errno.EACCES
        assert os.listdir(world.source) == ["a.md"]
        os.chdir("/")

    world.does(story)


def test_external_changes_show_at_once(world: Place) -> None:
    """The kernel caches nothing: content, names and kinds are those of the source."""

    def story() -> None:
        path, below = world.path / "d/a.md", world.source / "d/a.md"
        (world.path / "d").mkdir()
        path.write_text("one")
        below.write_text("two, longer")
        assert path.read_text() == "two, longer"
        below.unlink()
        assert not path.exists()
        below.parent.rmdir()
        below.parent.symlink_to("/")
        assert path.parent.is_symlink()
        below.parent.unlink()
        below.parent.write_text("a file")
        assert outcome(path.write_text, "through a file") == errno.ENOTDIR

    world.does(story)


def test_the_portable_transport_stages_temporary_names_too(world: Place) -> None:
    """`sed -i` works under a policy that denies the name it writes first."""

    def story() -> None:
        (world.path / "a.md").write_text("one\n")
        subprocess.run(["sed", "-i", "s/one/two/", world.path / "a.md"], check=True, cwd="/")
        assert (world.source / "a.md").read_text() == "two\n"
        assert os.listdir(world.source) == ["a.md"]

    world.does(story)


def test_many_names_are_dropped_and_looked_up_again(own_place: MakePlace) -> None:
    """More names than the path table keeps, with few descriptors; an open file stays usable."""
    world = own_place(transport="portable", limit=100)

    def story() -> None:
        (world.path / "first").write_text("first")
        with open(world.path / "first", "r+") as file:
            for number in range(1500):
                directory = world.path / f"d{number % 50}"
                directory.mkdir(exist_ok=True)
                (directory / str(number)).touch()
            assert sum(len(files) for _, _, files in os.walk(world.path)) == 1501
            (world.path / "first").rename(world.path / "d1/moved")
            file.write("FIRST")
        assert (world.path / "d1/moved").read_text() == "FIRST"
        subprocess.run(["rm", "-r", *world.path.glob("d*")], check=True, cwd="/")
        assert os.listdir(world.source) == []

    world.does(story)


def test_auto_chooses_the_kernel_transport_if_available() -> None:
    """Linux 5.12 or later; on other systems it says why not."""
    assert launcher.choose_transport("auto") == launcher.TransportChoice("kernel")
    assert launcher.lacks_kernel("Linux", "5.12.0") == ""
    assert launcher.lacks_kernel("Linux", "6.18.44-cloud") == ""
    assert launcher.lacks_kernel("Linux", "5.11.22-generic") == "Linux 5.11.22-generic is older than 5.12"
    assert launcher.lacks_kernel("FreeBSD", "14.3-RELEASE") == "this is FreeBSD 14.3-RELEASE and not Linux"


def test_an_unavailable_transport_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package to install."""
    monkeypatch.setitem(sys.modules, "mfusepy", None)
    with pytest.raises(MountError, match="needs the Python package mfusepy; install it"):
        launcher.choose_transport("portable")
