"""The output of `diff` is a patch that `git apply` and `patch` apply."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.system import syscalls
from tests.support.commands import bonobofs, environment
from tests.support.mount_fixtures import MakePlace, Place

_TEXTS = {
    "crlf": (b"one\r\ntwo\r\n", b"one\ntwo\n"),
    "without end": (b"x\n", b"x"),
    "with end": (b"x", b"x\n"),
    "feed": (b"p\x0cq\nr\x1ds\n", b"p\x0cq2\nr\x1ds\n"),
    "controls": (b"\t\\n\x1b[31m\rold\xff\n", b"\t\\n\x1b[31m\rnew\xff\n"),
    "comments": (b"-- a\n-- b\n@@ c\n", b"++ a\n++ b\n@@ c\n"),
}
"""Contents before and after, by name."""
_NAMES = ["plain", "with space", 'quote " and \\', "new\nline", "tab\tname", "é", "\udcff", "sub/deep"]


def _contents(path: Path) -> dict[str, tuple[str, object]]:
    """Return kind and content of each file below a directory, by path."""
    found: dict[str, tuple[str, object]] = {}
    for above, directories, files in os.walk(path):
        for name in files + [each for each in directories if Path(above, each).is_symlink()]:
            file = Path(above, name)
            kind = "link" if file.is_symlink() else f"executable {os.access(file, os.X_OK)}"
            found[str(file.relative_to(path))] = (kind, os.readlink(file) if file.is_symlink() else file.read_bytes())
    return found


def _change(directory: Path) -> None:
    """Make changes of texts of every kind."""
    for name, (_, text) in _TEXTS.items():
        (directory / name).write_bytes(text)
    (directory / "removed").unlink()
    (directory / "emptied").write_bytes(b"")
    (directory / "link").unlink()
    (directory / "link").write_text("no link any more\n")
    (directory / "file").unlink()
    (directory / "file").symlink_to("target")
    (directory / "old name").rename(directory / "sub/new name")
    (directory / "sub/new name").write_bytes(b"moved\nand changed\n" * 3)
    (directory / "moved").rename(directory / "elsewhere")
    (directory / "gone").rename(directory / "gone too")
    (directory / "gone too").unlink()
    (directory / "added").write_bytes(b"")
    for name in _NAMES:
        (directory / name).write_bytes(b"new\n")
    (directory / "script").write_text("#!/bin/sh\n")
    (directory / "script").chmod(0o755)
    for name in ("mode", "mode then text", "text then mode"):
        if name == "text then mode":
            (directory / name).write_bytes(b"new\n")
        (directory / name).chmod(0o755)
        if name == "mode then text":
            (directory / name).write_bytes(b"new\n")


def _make(directory: Path) -> None:
    (directory / "sub").mkdir(parents=True)
    for name in ("mode", "mode then text", "text then mode"):
        (directory / name).write_bytes(b"old\n")
    for name, (text, _) in _TEXTS.items():
        (directory / name).write_bytes(text)
    for name in ("removed", "emptied", "gone"):
        (directory / name).write_bytes(b"old\n")
    (directory / "link").symlink_to("target")
    (directory / "file").write_bytes(b"file\n")
    (directory / "old name").write_bytes(b"moved\n" * 3)
    (directory / "moved").write_bytes(b"\0binary")
    for name in _NAMES[::2]:
        (directory / name).write_bytes(b"old\n")


def _patch_of(place: Place) -> bytes:
    command = [sys.executable, "-m", "bonobofs", "diff", "--path", str(place.source)]
    return subprocess.run(command, cwd="/", env=environment(), capture_output=True, check=True).stdout


@pytest.mark.parametrize("program", ["git apply", "patch"])
def test_a_difference_is_a_patch(own_place: MakePlace, tmp_path: Path, program: str) -> None:
    """Applied to the tree before the changes, it gives the tree after them. Texts, symlinks and names of any kind."""
    place = own_place()
    _make(place.source)
    copy = tmp_path / "copy"
    shutil.copytree(place.source, copy, symlinks=True)
    _change(place.path)
    place.umount()
    command = ["git", "apply", "-"] if program == "git apply" else ["patch", "-p1", "--no-backup-if-mismatch", "-s"]
    patched = subprocess.run(command, cwd=copy, input=_patch_of(place), capture_output=True, check=False)
    assert (patched.returncode, patched.stderr) == (0, b"")
    assert _contents(copy) == _contents(place.source)


def test_the_counts_of_lines_leave_out_headers(own_place: MakePlace) -> None:
    place = own_place()
    (place.source / "comments").write_text("-- a\n-- b\n")
    (place.source / "file").write_text("one\ntwo\n")
    (place.path / "comments").write_text("++ a\n")
    (place.path / "file").unlink()
    (place.path / "file").symlink_to("target")
    lines = bonobofs("diff", "--path", place.source, "--stat").stdout.splitlines()
    assert [line.split() for line in lines] == [["changed", "+1", "-2", "comments"], ["changed", "+1", "-2", "file"]]


def test_a_binary_file_leaves_the_rest_of_the_patch(own_place: MakePlace, tmp_path: Path) -> None:
    place = own_place()
    copy = tmp_path / "copy"
    copy.mkdir()
    for directory in (place.source, copy):
        (directory / "binary").write_bytes(b"\0")
        (directory / "text").write_bytes(b"old\n")
    (place.path / "binary").write_bytes(b"\1\0")
    (place.path / "text").write_bytes(b"new\n")
    for command in (["git", "apply", "-"], ["patch", "-p1", "-R"], ["patch", "-p1"]):
        subprocess.run(command, cwd=copy, input=_patch_of(place), check=True)
    assert ((copy / "binary").read_bytes(), (copy / "text").read_bytes()) == (b"\0", b"new\n")


def test_a_renamed_directory_has_a_line(own_place: MakePlace) -> None:
    place = own_place()
    (place.source / "old/sub").mkdir(parents=True)
    (place.path / "old").rename(place.path / "new")
    first, second = _patch_of(place).decode().splitlines()
    assert (first, second[:30]) == ("diff a/old b/new", "# the directory was renamed; t")


def test_a_file_that_was_renamed_often_is_one_rename(own_place: MakePlace) -> None:
    """Its old content is found after all renames."""
    place = own_place()
    (place.source / "0").write_text("old\n")
    for number in range(1200):
        (place.path / str(number % 2)).rename(place.path / str((number + 1) % 2))
    (place.path / "0").rename(place.path / "end")
    with (place.path / "end").open("a") as file:
        file.write("more\n")
    assert _patch_of(place).decode().splitlines() == [
        "diff --git a/0 b/end",
        "rename from 0",
        "rename to end",
        "--- a/0",
        "+++ b/end",
        "@@ -1 +1,2 @@",
        " old",
        "+more",
    ]


def test_a_difference_follows_a_file_that_replaced_another_one(own_place: MakePlace, tmp_path: Path) -> None:
    """As editors and `sed -i` save a file. The rename is in another turn."""
    (source := tmp_path / "source").mkdir()
    (source / "a").write_text("old\n")
    place = own_place()
    bonobofs("mark", "write", cwd=place.path)
    (place.path / "b").write_text("new\n")
    bonobofs("mark", "save", cwd=place.path)
    (place.path / "b").rename(place.path / "a")
    bonobofs("mark", "exchange", cwd=place.path)
    (place.path / "b").write_text("other\n")
    names = os.fsencode(place.path / "a"), os.fsencode(place.path / "b")
    syscalls.renameat2(-100, names[0], -100, names[1], syscalls.RENAME_EXCHANGE)
    selections: tuple[tuple[str | Path, ...], ...] = (("--path", source), ())
    for options in selections:
        result = bonobofs("diff", "--turn", "write", *options, cwd=place.path)
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        assert [line for line in lines if line[0] in "+-"] == ["--- /dev/null", "+++ b/b", "+new"]
    created = json.loads(bonobofs("history", source / "b", "--json").stdout)[-1]["change"]
    assert json.loads(bonobofs("show", created, "--json").stdout)["diff"][-1] == "+new"


def test_a_renamed_file_that_became_a_symlink_is_applied(own_place: MakePlace, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "a").write_text("text\n")
    shutil.copytree(source, tmp_path / "other")
    place = own_place()
    (place.path / "a").rename(place.path / "b")
    (place.path / "b").unlink()
    (place.path / "b").symlink_to("target")
    subprocess.run(["git", "apply"], input=_patch_of(place), cwd=tmp_path / "other", env=environment(), check=True)
    assert _contents(tmp_path / "other") == _contents(source)
