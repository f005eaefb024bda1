"""Decisions: each change is judged at the system call, at both of its names, and again when its facts change."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import stat
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from bonobofs.system import syscalls
from tests.support.commands import bonobofs
from tests.support.mount_fixtures import MakePlace
from tests.support.users import outcome
from tests.support.wait import until

CLOSED: Final = """
default = "allow"
hidden = ["**"]
[[protect]]
paths = ["**/closed/", "**/closed.*"]
"""
"""Everything is allowed but what lies in, or is, something that is called closed."""
NOTES: Final = """
default = "deny"
[[rule]]
name = "notes"
paths = ["notes/"]
suffixes = [".md"]
max_size = "100B"
executable = false
[[rule]]
name = "code"
paths = ["code/"]
[[rule]]
name = "small"
paths = ["small/"]
max_size = "10B"
"""


def _copy_range(path: Path, other: Path) -> int:
    with other.open("rb") as source, path.open("r+b") as target:
        return os.copy_file_range(source.fileno(), target.fileno(), 3)


def _append(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, b"more")
    finally:
        os.close(fd)


def _with(path: Path, call: Callable[[int], object]) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        call(fd)
    finally:
        os.close(fd)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _exchange(one: Path, other: Path) -> None:
    syscalls.renameat2(-100, bytes(one), -100, bytes(other), syscalls.RENAME_EXCHANGE)


def _noreplace(old: Path, new: Path) -> None:
    syscalls.renameat2(-100, bytes(old), -100, bytes(new), syscalls.RENAME_NOREPLACE)


ACL: Final = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHi", tag, bits, -1) for tag, bits in ((1, 7), (4, 0), (0x20, 0))
)

CHANGES: Final[dict[str, Callable[[Path], object]]] = {
    "create": lambda at: os.close(os.open(at / "closed" / "new", os.O_CREAT | os.O_WRONLY, 0o644)),
    "create, a name": lambda at: os.close(os.open(at / "closed.new", os.O_CREAT | os.O_WRONLY, 0o644)),
    "create, a regular file by mknod": lambda at: os.mknod(at / "closed" / "new"),
    "write": lambda at: _with(at / "closed" / "file", lambda fd: os.write(fd, b"written")),
    "append": lambda at: _append(at / "closed" / "file"),
    "open that truncates": lambda at: os.close(os.open(at / "closed" / "file", os.O_WRONLY | os.O_TRUNC)),
    "truncate": lambda at: os.truncate(at / "closed" / "file", 1),
    "extend": lambda at: os.truncate(at / "closed" / "file", 100),
    "allocate": lambda at: _with(at / "closed" / "file", lambda fd: os.posix_fallocate(fd, 0, 10000)),
    "punch a hole": lambda at: _with(at / "closed" / "file", lambda fd: syscalls.fallocate(fd, 3, 0, 4)),
    "copy_file_range": lambda at: _copy_range(at / "closed" / "file", at / "file"),
    "unlink": lambda at: os.unlink(at / "closed" / "file"),
    "rmdir": lambda at: os.rmdir(at / "closed" / "empty"),
    "rmdir, itself": lambda at: os.rmdir(at / "sub" / "closed"),
    "rename away": lambda at: os.rename(at / "closed" / "file", at / "moved"),
    "rename within": lambda at: os.rename(at / "closed" / "file", at / "closed" / "moved"),
    "rename into": lambda at: os.rename(at / "file", at / "closed" / "moved"),
    "rename onto": lambda at: os.rename(at / "file", at / "closed" / "file"),
    "rename onto, without replacing": lambda at: _noreplace(at / "file", at / "closed" / "moved"),
    "exchange, this end": lambda at: _exchange(at / "closed" / "file", at / "file"),
    "exchange, that end": lambda at: _exchange(at / "file", at / "closed" / "file"),
    "rename a directory that holds it": lambda at: os.rename(at / "above", at / "elsewhere"),
    "rename a directory to its name": lambda at: os.rename(at / "plain", at / "closed.d"),
    "exchange with a directory that holds it": lambda at: _exchange(at / "plain", at / "above"),
    "link from": lambda at: os.link(at / "closed" / "file", at / "linked"),
    "link into": lambda at: os.link(at / "file", at / "closed" / "linked"),
    "symlink in": lambda at: os.symlink("../file", at / "closed" / "link"),
    "mkdir": lambda at: os.mkdir(at / "closed" / "made"),
    "mkdir, itself": lambda at: os.mkdir(at / "plain" / "closed"),
    "fifo": lambda at: os.mkfifo(at / "closed" / "fifo"),
    "socket": lambda at: _socket(at / "closed" / "socket"),
    "chmod": lambda at: os.chmod(at / "closed" / "file", 0o600),
    "chmod, a directory": lambda at: os.chmod(at / "closed", 0o700),
    "chown": lambda at: os.chown(at / "closed" / "file", os.geteuid(), os.getegid()),
    "utimens": lambda at: os.utime(at / "closed" / "file"),
    "setxattr": lambda at: os.setxattr(at / "closed" / "file", "user.new", b"value"),
    "setxattr, a directory": lambda at: os.setxattr(at / "closed", "user.new", b"value"),
    "removexattr": lambda at: os.removexattr(at / "closed" / "file", "user.mark"),
    "set an ACL": lambda at: os.setxattr(at / "closed" / "file", "system.posix_acl_access", ACL),
}


def _tree(top: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in [top, *sorted(top.rglob("*"))]:
        s = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        attributes = {name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path)}
        found[str(path.relative_to(top))] = (
            *(s.st_ino, s.st_mode, s.st_uid, s.st_gid, s.st_size, s.st_nlink, s.st_mtime_ns, s.st_blocks),
            *(content, attributes),
        )
    return found


def _fill(top: Path) -> None:
    for directory in ("closed/empty", "sub/closed", "above/closed", "plain"):
        (top / directory).mkdir(parents=True)
    for file in ("file", "closed/file", "above/closed/file", "plain/file"):
        (top / file).write_bytes(b"content")
        os.setxattr(top / file, "user.mark", b"here")


def test_every_change_of_a_protected_path_is_refused(place: MakePlace) -> None:
    """Each system call on a protected path, and each move of it, fails with EROFS and changes nothing in the source."""
    world = place(policy=CLOSED)

    def story() -> dict[str, object]:
        _fill(world.source)
        before = _tree(world.source)
        found = {what: outcome(change, world.path) for what, change in CHANGES.items()}
        assert _tree(world.source) == before
        return found

    found = world.does(story)
    assert {what: code for what, code in found.items() if code != errno.EROFS} == {}
    denied = [entry for entry in world.entries() if entry.result == "denied" and "settles" not in entry.details]
    assert {entry.code for entry in denied} == {"PROTECTED"}


@pytest.mark.root
def test_devices_are_refused_unless_the_policy_says_so(own_place: MakePlace) -> None:
    """mknod of a device is EPERM under a policy without `devices = true`, and works under one with it."""
    world, null = own_place(policy='default = "allow"'), os.makedev(1, 3)
    assert outcome(os.mknod, world.path / "null", 0o666 | stat.S_IFCHR, null) == errno.EPERM
    assert os.listdir(world.source) == []
    open_world = own_place()
    os.mknod(open_world.path / "null", 0o666 | stat.S_IFCHR, null)
    assert (open_world.source / "null").stat().st_rdev == null


def test_the_files_below_a_moved_directory_are_judged(own_place: MakePlace) -> None:
    """A rename of a directory is a rename of everything below: each old and each new path must be permitted."""
    world = own_place(policy=NOTES)

    def story() -> None:
        for path in ("code/good", "code/bad/deep", "code/big", "notes/kept"):
            (world.source / path).mkdir(parents=True)
        (world.source / "code/good/a.md").write_text("fine")
        (world.source / "code/bad/deep/run.sh").write_text("no note")
        (world.source / "code/big/a.md").write_text("x" * 101)
        (world.source / "notes/kept/a.txt").write_text("may not leave")
        at = world.path
        assert outcome(os.rename, at / "code/bad", at / "notes/bad") == errno.EACCES
        assert outcome(os.rename, at / "code/big", at / "notes/big") == errno.EFBIG
        assert outcome(os.rename, at / "notes/kept", at / "code/kept") == errno.EACCES
        assert outcome(_exchange, at / "code/good", at / "notes/kept") == errno.EACCES
        os.rename(at / "code/good", at / "notes/good")
        assert sorted(os.listdir(world.source / "notes")) == ["good", "kept"]

    world.does(story)


def test_a_symlink_is_judged_by_its_target(own_place: MakePlace) -> None:
    """An absolute target, one outside the workspace and one in a protected path are refused, also after a move."""
    world = own_place(policy=CLOSED)

    def story() -> None:
        (world.source / "a/b").mkdir(parents=True)
        (world.source / "closed").mkdir()
        at = world.path
        for target in ("/etc/passwd", "../out", "a/../../out", "..", "/", str(world.path / "a")):
            assert outcome(os.symlink, target, at / "link") == errno.EPERM, target
        for target in ("closed", "closed/file", "./closed/"):
            assert outcome(os.symlink, target, at / "link") == errno.EPERM, target
        assert outcome(os.symlink, "file", at / "closed/link") == errno.EROFS, "it leads nowhere else"
        os.symlink("../../top", at / "a/b/link")
        assert outcome(os.rename, at / "a/b/link", at / "a/link") == errno.EPERM
        assert outcome(os.rename, at / "a/b", at / "b") == errno.EPERM
        (world.source / "c").mkdir()
        assert outcome(_exchange, at / "a/b", at / "c") == errno.EPERM
        assert outcome(os.link, at / "a/b/link", at / "link") == errno.EPERM
        os.rename(at / "a/b/link", at / "a/b/other")
        assert os.readlink(world.source / "a/b/other") == "../../top"
        os.symlink("../closed", world.source / "a/planted")
        assert outcome(os.rename, at / "a/planted", at / "planted") == errno.EPERM
        assert not (world.source / "link").is_symlink()

    world.does(story)


def test_a_symlink_does_not_take_the_place_of_a_directory_above_restricted_paths(own_place: MakePlace) -> None:
    """Through it, files that any agent may write would be at these paths. A directory is judged whole."""
    restricted = '[[protect]]\npaths = ["ci/deploy.yml", "conf/*/db", "**/.tool/run", "**/*.pem"]\n'
    world = own_place(policy=f'extends = "project"\n{restricted}[[scratch]]\npaths = ["ci/cache/"]\n')

    def story() -> None:
        at = world.path
        (at / "x/workflows").mkdir(parents=True)
        (at / "x/deploy.yml").write_text("evil")
        (at / "x/workflows/ci.yml").write_text("evil")
        os.symlink("x", at / "link")
        (at / "tree").mkdir()
        os.symlink("../x", at / "tree/prod")
        refused = {"ci": errno.EROFS, "conf": errno.EROFS, ".tool": errno.EROFS, ".github": errno.EACCES}
        for name, code in refused.items():
            assert outcome(os.symlink, "x", at / name) == code, name
            assert outcome(os.rename, at / "link", at / name) == code, name
            assert outcome(os.link, at / "link", at / name) == code, name
        assert outcome(os.rename, at / "tree", at / "conf") == errno.EROFS
        assert outcome(os.rename, at / "x", at / "ci") == errno.EROFS
        for name in ("tree/other", "docs", "tree/.github"):
            os.symlink("x", at / name)
        for name in ("ci", "conf/prod", ".github/workflows"):
            above = at / name
            above.parent.mkdir(exist_ok=True)
            assert outcome(above.mkdir) == (errno.EACCES if "." in name else None), name
        os.symlink("../../x", at / "ci/cache")
        assert not os.path.lexists(world.source / "ci/cache")
        assert sorted(os.listdir(world.source)) == [".github", "ci", "conf", "docs", "link", "tree", "x"]

    world.does(story)
    why = bonobofs("why", world.path / ".github", "--op", "symlink")
    assert (why.returncode, "rule ask:.github/workflows/" in why.stdout) == (77, True), why.stdout + why.stderr
    why = bonobofs("why", world.path / "link", "--op", "rename", "--to", world.path / "conf/a")
    assert "(PROTECTED, rule symlink:protect:conf/*/db)" in why.stdout, why.stdout + why.stderr


def test_the_file_type_is_judged_at_its_new_name(own_place: MakePlace) -> None:
    """A rename or link brings suffix, size, mode and first bytes to the new path, whose rules judge them."""
    world = own_place(policy=NOTES)

    def story() -> None:
        (world.source / "notes").mkdir()
        (world.source / "code").mkdir()
        at = world.path
        files = {"plain.md": "fine", "large.md": "x" * 101, "script.md": "#!/bin/sh\n", "name.sh": "fine"}
        for name, text in files.items():
            (world.source / "code" / name).write_text(text)
        (world.source / "code/runs.md").write_text("fine")
        (world.source / "code/runs.md").chmod(0o755)
        expected = {
            "large.md": errno.EFBIG,
            "script.md": errno.EACCES,
            "runs.md": errno.EACCES,
            "name.sh": errno.EACCES,
        }
        for name, code in expected.items():
            assert outcome(os.rename, at / "code" / name, at / "notes" / name) == code, name
            assert outcome(os.link, at / "code" / name, at / "notes" / name) == code, name
        assert outcome(os.rename, at / "code/plain.md", at / "plain.md") == errno.EACCES
        os.rename(at / "code/plain.md", at / "notes/plain.md")
        assert os.listdir(world.source / "notes") == ["plain.md"]

    world.does(story)


def test_an_executable_cannot_be_made_in_pieces(own_place: MakePlace) -> None:
    """First bytes are judged at each change, even of one byte, and modes at each call that sets them."""
    world = own_place(policy=NOTES)

    def story() -> None:
        (world.source / "notes").mkdir()
        path = world.path / "notes/a.md"
        flags = os.O_RDWR | os.O_CREAT
        assert outcome(os.open, path, flags, 0o755) == errno.EACCES
        fd = os.open(path, flags, 0o644)
        os.write(fd, b"_!/bin/sh\n")
        assert outcome(os.pwrite, fd, b"#", 0) == errno.EACCES
        os.pwrite(fd, b"#_", 0)
        assert outcome(os.pwrite, fd, b"!", 1) == errno.EACCES
        assert outcome(os.fchmod, fd, 0o744) == errno.EACCES
        assert outcome(os.setxattr, path, "system.posix_acl_access", ACL) == errno.EACCES
        assert outcome(os.chmod, path, 0o601) == errno.EACCES
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"!", 1)
        assert outcome(os.pwrite, fd, b"#", 0) == errno.EACCES
        os.close(fd)
        assert (world.source / "notes/a.md").read_bytes() == b"\0!"
        assert stat.S_IMODE((world.source / "notes/a.md").stat().st_mode) == 0o600

    world.does(story)


def test_copy_and_holes_do_not_make_executables_or_grow_files(own_place: MakePlace) -> None:
    """copy_file_range and fallocate are judged by what the file is afterwards."""
    world = own_place(policy=NOTES)

    def story() -> None:
        for directory in ("notes", "code", "small"):
            (world.source / directory).mkdir()
        (world.source / "code/script").write_bytes(b"#!/bin/sh\n" + b"x" * 200)
        (world.source / "notes/a.md").write_bytes(b"text")
        with (world.path / "code/script").open("rb") as source, (world.path / "notes/a.md").open("r+b") as target:
            assert outcome(os.copy_file_range, source.fileno(), target.fileno(), 10, 0, 0) == errno.EACCES
            assert outcome(os.copy_file_range, source.fileno(), target.fileno(), 200, 10, 4) == errno.EFBIG
            assert outcome(syscalls.fallocate, target.fileno(), 0, 0, 101) == errno.EFBIG
            assert outcome(os.ftruncate, target.fileno(), 101) == errno.EFBIG
            assert os.copy_file_range(source.fileno(), target.fileno(), 4, 10, 4) == 4
        assert (world.source / "notes/a.md").read_bytes() == b"textxxxx"

    world.does(story)


def test_a_size_limit_is_exact_and_binds_each_write(own_place: MakePlace) -> None:
    """A file grows to its limit and not one byte beyond, by write, append or truncate; shrinking is never too large."""
    world = own_place(policy=NOTES)

    def story() -> None:
        (world.source / "small").mkdir()
        (world.source / "small/old").write_bytes(b"x" * 30)
        path = world.path / "small/file"
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        for _ in range(5):
            assert os.write(fd, b"12") == 2
        assert outcome(os.write, fd, b"3") == errno.EFBIG
        assert outcome(os.pwrite, fd, b"3", 10) == errno.EFBIG
        assert os.pwrite(fd, b"9", 9) == 1
        os.close(fd)
        assert outcome(_append, path) == errno.EFBIG
        assert (world.source / "small/file").read_bytes() == b"121212121" + b"9"
        old = world.path / "small/old"
        assert outcome(_append, old) == errno.EFBIG
        os.truncate(old, 20)
        assert outcome(os.truncate, old, 21) == errno.EFBIG
        os.truncate(old, 10)
        assert (world.source / "small/old").stat().st_size == 10

    world.does(story)


def test_a_rename_invalidates_the_decision_of_an_open_file(own_place: MakePlace) -> None:
    """A file opened under one name is judged by the name that it has at the write."""
    world = own_place(policy=NOTES)

    def story() -> None:
        for directory in ("code", "small"):
            (world.source / directory).mkdir()
        fd = os.open(world.path / "code/file", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"1234567890")
        os.rename(world.path / "code/file", world.path / "small/file")
        assert outcome(os.write, fd, b"more") == errno.EFBIG
        os.rename(world.path / "small/file", world.path / "code/file")
        assert os.write(fd, b"more") == 4
        os.close(fd)
        assert (world.source / "code/file").read_bytes() == b"1234567890more"

    world.does(story)


def test_an_exchange_invalidates_the_decisions_of_open_files(own_place: MakePlace) -> None:
    """After an exchange, each file is judged by the name that it has then."""
    world = own_place(policy=NOTES)

    def story() -> None:
        for directory in ("code", "small"):
            (world.source / directory).mkdir()
            for number in range(2):
                (world.source / directory / str(number)).touch()
        for number, ends in enumerate((("code", "small"), ("small", "code"))):
            fd = os.open(world.path / "code" / str(number), os.O_RDWR)
            os.write(fd, b"x" * 8)
            _exchange(world.path / ends[0] / str(number), world.path / ends[1] / str(number))
            assert outcome(os.write, fd, b"more") == errno.EFBIG
            os.close(fd)

    world.does(story)


def test_a_rename_of_a_directory_invalidates_decisions_below(own_place: MakePlace) -> None:
    """An open file whose directory moves is judged by its new path."""
    world = own_place(policy=NOTES)

    def story() -> None:
        for directory in ("code/sub", "small"):
            (world.source / directory).mkdir(parents=True)
        fd = os.open(world.path / "code/sub/file", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"1234567890")
        os.rename(world.path / "code/sub", world.path / "small/sub")
        assert outcome(os.write, fd, b"more") == errno.EFBIG
        os.close(fd)

    world.does(story)


def test_exchanged_directories_are_judged_and_recorded_by_their_new_names(own_place: MakePlace) -> None:
    """Open files in two exchanged directories are judged by their new paths."""
    world = own_place(policy=NOTES)

    def story() -> None:
        for directory in ("code/dir", "small/dir"):
            (world.source / directory).mkdir(parents=True)
            (world.source / directory / "file").touch()
        one = os.open(world.path / "code/dir/file", os.O_RDWR)
        other = os.open(world.path / "small/dir/file", os.O_RDWR)
        _exchange(world.path / "code/dir", world.path / "small/dir")
        assert outcome(os.write, one, b"x" * 11) == errno.EFBIG
        assert outcome(os.write, other, b"x" * 11) == 11
        os.close(one)
        os.close(other)
        assert (world.source / "code/dir/file").stat().st_size == 11

    world.does(story)
    assert {entry.path for entry in world.entries() if entry.bytes == 11} == {"code/dir/file"}


def test_flags_that_no_rule_knows_are_refused(own_place: MakePlace) -> None:
    """A rename that would leave a whiteout, which is a device, is EINVAL."""
    world = own_place()

    def story() -> None:
        (world.path / "file").touch()
        call = (-100, bytes(world.path / "file"), -100, bytes(world.path / "moved"), 4)
        assert outcome(syscalls.renameat2, *call) in (errno.EINVAL, errno.EPERM)
        assert os.listdir(world.source) == ["file"]

    world.does(story)


def test_a_denied_truncating_open_fails_at_open(own_place: MakePlace) -> None:
    """If a change is denied, `> file` fails at open and `>> file` at the first write. Readers see the old content."""
    world = own_place(policy=CLOSED)

    def story() -> None:
        (world.source / "closed").mkdir()
        (world.source / "closed/file").write_text("kept")
        path = world.path / "closed/file"
        assert path.read_text() == "kept"
        said = subprocess.run(["sh", "-c", 'echo new > "$0"', path], capture_output=True, text=True, check=False)
        assert "ead-only file system" in said.stderr
        said = subprocess.run(["sh", "-c", 'echo new >> "$0"', path], capture_output=True, text=True, check=False)
        assert said.returncode != 0
        assert path.read_text() == "kept"
        assert path.stat().st_size == 4

    world.does(story)


def test_a_denied_mapping_is_refused_when_written_back_and_forgotten(own_place: MakePlace) -> None:
    """msync of a denied file fails. The source and the mount's readers keep the old bytes."""
    world = own_place(policy=CLOSED)

    def story() -> None:
        (world.source / "closed").mkdir()
        (world.source / "closed/file").write_bytes(b"kept" * 1024)
        path = world.path / "closed/file"
        with path.open("r+b") as file:
            view = mmap.mmap(file.fileno(), 4096)
            view[:5] = b"sneak"
            assert outcome(view.flush) == errno.EROFS
            assert (world.source / "closed/file").read_bytes() == b"kept" * 1024
            view.close()
        until(lambda: path.read_bytes() == b"kept" * 1024, "readers of the mount see what is below")

    world.does(story)


def test_unnamed_files_and_inode_flags_are_refused(own_place: MakePlace) -> None:
    """O_TMPFILE and chattr, which no rule could judge, are refused by the transport."""
    world = own_place()

    def story() -> None:
        assert outcome(os.open, world.path, os.O_TMPFILE | os.O_RDWR) == errno.EOPNOTSUPP
        (world.path / "file").touch()
        with (world.path / "file").open("rb") as file:
            code = outcome(fcntl.ioctl, file, 0x40086602, struct.pack("l", 0x10))
        assert code in (errno.ENOTTY, errno.ENOSYS)

    world.does(story)


def test_a_hard_link_to_a_protected_file_cannot_be_changed(own_place: MakePlace) -> None:
    """If a protected file gets a name in a writable place, a change by that name fails with EPERM."""
    world = own_place(policy=CLOSED)

    def story() -> None:
        (world.source / "closed").mkdir()
        (world.source / "closed/hook").write_text("kept")
        os.setxattr(world.source / "closed/hook", "user.mark", b"here")
        os.link(world.source / "closed/hook", world.source / "open.md")
        path = world.path / "open.md"
        assert path.read_text() == "kept"
        changes: list[Callable[[], object]] = [
            lambda: _append(path),
            lambda: path.write_text("gone"),
            lambda: os.truncate(path, 0),
            lambda: _with(path, lambda fd: os.pwrite(fd, b"x", 0)),
            lambda: _with(path, lambda fd: syscalls.fallocate(fd, 0, 0, 100)),
            lambda: path.chmod(0o777),
            lambda: os.chown(path, os.geteuid(), os.getegid()),
            lambda: os.utime(path, (1, 1)),
            lambda: os.setxattr(path, "user.new", b"x"),
            lambda: os.removexattr(path, "user.mark"),
        ]
        assert [outcome(change) for change in changes] == [errno.EPERM] * len(changes)
        (world.path / "closed/hook").stat()  # the mount knows both names now, and one of them is closed
        assert {outcome(change) for change in changes} <= {errno.EPERM, errno.EROFS}
        assert (world.source / "closed/hook").read_text() == "kept"
        path.unlink()
        assert (world.source / "closed/hook").read_text() == "kept"

    world.does(story)


def test_a_file_with_two_names_obeys_the_rules_of_both(own_place: MakePlace) -> None:
    """A change permitted under one name is refused if it breaks the rule of the other."""
    world = own_place(policy=NOTES)

    def story() -> None:
        for directory in ("code", "notes", "small"):
            (world.source / directory).mkdir()
        at = world.path
        for name in ("notes/a.md", "small/a"):
            code = at / "code" / name.replace("/", "-")
            code.write_text("fine")
            os.link(code, at / name)
            code.write_text("fine too")
        note, small = at / "code/notes-a.md", at / "code/small-a"
        assert outcome(small.write_text, "x" * 11) in (errno.EPERM, errno.EFBIG)
        assert outcome(os.truncate, small, 11) in (errno.EPERM, errno.EFBIG)
        assert outcome(note.chmod, 0o755) in (errno.EPERM, errno.EACCES)
        assert outcome(note.write_text, "#!/bin/sh\n") in (errno.EPERM, errno.EACCES)
        fd = os.open(small, os.O_WRONLY | os.O_APPEND)
        for _ in range(3):
            outcome(os.write, fd, b"x" * 4)
        os.close(fd)
        assert (world.source / "small/a").stat().st_size <= 10
        os.unlink(at / "small/a")
        small.write_text("x" * 11)
        assert (world.source / "notes/a.md").read_text() in ("fine too", "")

    world.does(story)


@pytest.mark.parametrize("how", ["unlink", "rename over", "rename over the other way", "unlink and truncate"])
def test_losing_its_allowed_name_does_not_open_a_protected_file(own_place: MakePlace, how: str) -> None:
    """A program opens a protected file by another name, which is then removed. The descriptor cannot write to it."""
    world = own_place(policy=CLOSED)

    def story() -> None:
        (world.source / "closed").mkdir()
        (world.source / "closed/hook").write_text("kept")
        os.link(world.source / "closed/hook", world.source / "open.md")
        fd = os.open(world.path / "open.md", os.O_RDWR)
        assert outcome(os.write, fd, b"sneak") == errno.EPERM
        if how == "rename over the other way":
            (world.path / "closed/hook").stat()
        if how.startswith("unlink"):
            (world.path / "open.md").unlink()
        else:
            (world.path / "other").touch()
            (world.path / "other").rename(world.path / "open.md")
        code = outcome(os.ftruncate, fd, 0) if how.endswith("truncate") else outcome(os.write, fd, b"sneak")
        assert code in (errno.EPERM, errno.EROFS)
        assert outcome(os.fchmod, fd, 0o777) in (errno.EPERM, errno.EROFS)
        assert (world.source / "closed/hook").read_text() == "kept"
        os.close(fd)

    world.does(story)


def test_a_new_hard_link_invalidates_the_decision_of_an_open_file(own_place: MakePlace) -> None:
    """A file that gets a name externally while it is being written can no longer be written."""
    world = own_place(policy=CLOSED)

    def story() -> None:
        (world.source / "closed").mkdir()
        fd = os.open(world.path / "file", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"first")
        os.link(world.source / "file", world.source / "closed/other")
        assert outcome(os.write, fd, b"second") == errno.EPERM
        os.unlink(world.source / "closed/other")
        assert os.write(fd, b"second") == 6
        os.close(fd)

    world.does(story)


def test_a_file_whose_names_are_all_known_and_allowed_can_be_changed(own_place: MakePlace) -> None:
    """Hard links made or looked up through the mount keep a file writable. One unknown name does not."""
    world = own_place(policy=CLOSED)

    def story() -> None:
        (world.path / "one").write_text("text")
        os.link(world.path / "one", world.path / "two")
        (world.path / "two").write_text("through two")
        assert (world.path / "one").read_text() == "through two"
        os.link(world.source / "one", world.source / "three")
        assert outcome((world.path / "one").write_text, "no") == errno.EPERM
        assert (world.path / "three").exists()
        (world.path / "one").write_text("yes")
        assert {(world.path / name).read_text() for name in ("one", "two", "three")} == {"yes"}
        os.unlink(world.path / "two")
        (world.path / "three").write_text("still")
        os.rename(world.path / "three", world.path / "four")
        (world.path / "four").write_text("still")

    world.does(story)


def test_a_kept_file_may_be_edited_and_replaced(own_place: MakePlace) -> None:
    """A kept file can be edited, also by a rename over it. It cannot be deleted, renamed or exchanged away."""
    world = own_place(policy='default = "allow"\n[[keep]]\npaths = ["README.md"]\n')

    def story() -> None:
        at = world.path
        (at / "README.md").write_text("one")
        (at / "new").write_text("two")
        assert outcome(os.unlink, at / "README.md") == errno.EACCES
        assert outcome(os.rename, at / "README.md", at / "gone") == errno.EACCES
        assert outcome(_exchange, at / "README.md", at / "new") == errno.EACCES
        assert outcome(_exchange, at / "new", at / "README.md") == errno.EACCES
        os.rename(at / "new", at / "README.md")
        assert (world.source / "README.md").read_text() == "two"

    world.does(story)


def test_a_kept_file_is_not_replaced_by_another_kind(own_place: MakePlace) -> None:
    """A symlink or FIFO over it would leave nothing of the file. A kept symlink may be replaced by a file."""
    world = own_place(
        policy='default = "allow"\ntemporary = ["**/*.tmp"]\n[[rule]]\nname = "t"\npaths = ["staged/*.tmp"]\n'
        'refuse = "No."\n[[keep]]\npaths = ["*/KEEP.md", "KEEP.md"]\n'
    )

    def story() -> None:
        at = world.path
        (at / "staged").mkdir()
        for name in ("KEEP.md", "staged/KEEP.md"):
            (at / name).write_text("kept")
        os.symlink("gone.md", at / "link")
        os.mkfifo(at / "fifo")
        for name in ("link", "fifo"):
            assert outcome(os.rename, at / name, at / "KEEP.md") == errno.EACCES, name
        os.symlink("gone.md", at / "staged/new.tmp")
        assert not os.path.lexists(world.source / "staged/new.tmp")
        assert outcome(os.rename, at / "staged/new.tmp", at / "staged/KEEP.md") == errno.EACCES
        assert (world.source / "KEEP.md").read_text() == (world.source / "staged/KEEP.md").read_text() == "kept"
        (world.source / "sub").mkdir()
        os.symlink("old.md", world.source / "sub/KEEP.md")
        (at / "new").write_text("new")
        os.rename(at / "new", at / "sub/KEEP.md")
        assert (world.source / "sub/KEEP.md").read_text() == "new"

    world.does(story)


def test_the_umask_counts_when_a_mode_is_judged(place: MakePlace) -> None:
    """A mode with x is not executable if the umask clears the x."""
    world = place(policy=NOTES)

    def story() -> None:
        (world.source / "notes").mkdir()
        os.umask(0o111)
        os.close(os.open(world.path / "notes/a.md", os.O_CREAT | os.O_WRONLY, 0o777))
        os.umask(0o022)
        assert outcome(os.open, world.path / "notes/b.md", os.O_CREAT | os.O_WRONLY, 0o777) == errno.EACCES
        assert os.listdir(world.source / "notes") == ["a.md"]
        assert stat.S_IMODE((world.source / "notes/a.md").stat().st_mode) == 0o666

    world.does(story)


def test_a_default_acl_makes_nothing_executable(place: MakePlace) -> None:
    """In a directory with a default ACL, the mode is judged without the umask."""
    world = place(policy=NOTES)
    everything = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", tag, 7, -1) for tag in (1, 4, 0x20))

    def story() -> None:
        (world.source / "notes").mkdir()
        os.setxattr(world.path / "notes", "system.posix_acl_default", everything)
        os.umask(0o111)
        outcome(lambda: os.close(os.open(world.path / "notes/a.md", os.O_CREAT | os.O_WRONLY, 0o777)))
        outcome(os.mknod, world.path / "notes/b.md", 0o777 | stat.S_IFREG)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (world.source / "notes").iterdir()}
        assert {name: mode for name, mode in modes.items() if mode & 0o111} == {}

    world.does(story)


def test_names_that_are_not_utf8_are_judged_and_recorded(own_place: MakePlace) -> None:
    """Names are bytes: rules apply to them, and the record has them exactly."""
    world = own_place(policy=CLOSED)
    name = os.fsdecode(b"caf\xe9 \xff\n")

    def story() -> None:
        (world.path / name).write_text("text")
        assert os.listdir(bytes(world.source)) == [b"caf\xe9 \xff\n"]
        assert outcome(os.mkdir, world.path / f"closed.{name}") == errno.EROFS

    world.does(story)
    assert name in [entry.path for entry in world.entries()]
