"""A mount of root with --allow-other: new files belong to their caller, and modes, ACLs, set-ids and sticky
bits apply.
"""

from __future__ import annotations

import itertools
import os
import stat
import struct
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.mount_fixtures import Commons, Traffic
from tests.support.users import ANN, BEN, User, outcome, run_in_child

pytestmark = pytest.mark.root
MakeCommons = Callable[..., Commons]
GROUP: Final = ANN.groups[0]


def _said(path: Path) -> tuple[int, int, str]:
    s = path.lstat()
    return s.st_uid, s.st_gid, stat.filemode(s.st_mode)


def _as(user: User, call: Callable[..., object], *args: object) -> object:
    """What a call gives another user, or the number of its error."""
    return run_in_child(outcome, call, *args, user=user)


def _make_all(top: Path, umask: int) -> None:
    os.umask(umask)
    os.close(os.open(top / "file", os.O_CREAT | os.O_WRONLY, 0o777))
    os.mkdir(top / "dir", 0o777)
    os.mkfifo(top / "fifo", 0o666)
    os.mknod(top / "node", 0o666)
    os.symlink("file", top / "link")


def _all(top: Path) -> dict[str, tuple[int, int, str]]:
    return {path.name: _said(path) for path in sorted(top.iterdir())}


def test_new_files_belong_to_their_caller(commons: MakeCommons) -> None:
    """Files, directories, FIFOs and symlinks get the caller's user, group and umask."""

    def story(top: Path, user: User, umask: int) -> object:
        inner = top / f"{user.uid}-{umask}"
        inner.mkdir()
        inner.chmod(0o777)
        run_in_child(_make_all, inner, umask, user=user)
        return _all(inner)

    place = commons()
    for user, umask in itertools.product((ANN, BEN), (0o022, 0o077, 0o000)):
        made: Any = place.alike(partial(story, user=user, umask=umask))
        assert {(uid, gid) for uid, gid, _ in made.values()} == {(user.uid, user.gid)}


def test_alternating_callers_each_own_their_files(commons: MakeCommons) -> None:
    """The server changes its identity with each request, and is itself in between."""

    def story(top: Path) -> object:
        for number in range(6):
            run_in_child((top / f"file-{number}").touch, user=(ANN, BEN, None)[number % 3])
        return _all(top)

    made: Any = commons().alike(story)
    assert [uid for uid, _, _ in made.values()] == [ANN.uid, BEN.uid, 0] * 2


def test_a_set_gid_directory_gives_its_group(commons: MakeCommons) -> None:
    """New files get the directory's group. Directories inherit the bit; files lose it for users outside the group."""

    def story(top: Path) -> object:
        shared = top / "shared"
        shared.mkdir()
        os.chown(shared, 0, GROUP)
        shared.chmod(0o2777)
        run_in_child(_make_all, shared, 0o002, user=ANN)
        (shared / "for ben").mkdir()
        (shared / "for ben").chmod(0o2777)
        run_in_child(_make_all, shared / "for ben", 0o002, user=BEN)
        _as(BEN, lambda: os.close(os.open(shared / "set-gid", os.O_CREAT | os.O_WRONLY, 0o2775)))
        _as(ANN, lambda: os.close(os.open(shared / "member's", os.O_CREAT | os.O_WRONLY, 0o2775)))
        return _all(shared), _all(shared / "for ben")

    commons().alike(story)


def test_a_supplementary_group_lets_its_members_make_files(commons: MakeCommons) -> None:
    """A directory that a group may write to is writable for users with it as a supplementary group, and for
    no others.
    """

    def story(top: Path) -> object:
        ours = top / "ours"
        ours.mkdir()
        os.chown(ours, 0, GROUP)
        ours.chmod(0o770)
        attempts = [_as(user, (ours / name).touch) for user, name in ((ANN, "ann"), (BEN, "ben"))]
        return attempts, _all(ours)

    found: Any = commons().alike(story)
    assert found[0] == [None, 13]


def test_modes_apply_to_other_users(commons: MakeCommons) -> None:
    """Reads, writes, searches, listings and attribute changes depend on mode and owner, except for root."""

    def story(top: Path) -> object:
        private, shown = top / "private", top / "shown"
        for directory, mode in ((private, 0o700), (shown, 0o755)):
            directory.mkdir()
            (directory / "file").write_text("content")
            (directory / "file").chmod(0o640)
            os.chown(directory / "file", ANN.uid, ANN.gid)
            os.chown(directory, ANN.uid, ANN.gid)
            directory.chmod(mode)
        calls: list[Callable[[], object]] = [
            (private / "file").read_text,
            lambda: os.listdir(private),
            (shown / "file").read_text,
            lambda: os.listdir(shown),
            lambda: (shown / "file").write_text("other"),
            (shown / "new").touch,
            lambda: (shown / "file").chmod(0o666),
            lambda: os.chown(shown / "file", BEN.uid, -1),
            lambda: os.utime(shown / "file", (1, 1)),
            lambda: os.truncate(shown / "file", 0),
            lambda: os.rename(shown / "file", top / "moved"),
            lambda: os.unlink(shown / "file"),
            lambda: os.access(shown / "file", os.W_OK),
            lambda: os.access(shown, os.R_OK | os.X_OK),
            lambda: os.setxattr(shown / "file", "user.x", b"x"),
        ]
        found = [_as(BEN, call) for call in calls]
        assert run_in_child((private / "file").read_text, user=ANN) == "content"
        return found

    found: Any = commons().alike(story)
    assert found[:5] == [13, 13, 13, ["file"], 13]


def test_cached_content_is_not_shown_without_read_permission(commons: MakeCommons) -> None:
    """Content that one user has read is not shown from the cache to a user without permission."""
    place = commons()
    (place.path / "file").write_text("secret")
    os.chown(place.path / "file", ANN.uid, ANN.gid)
    (place.path / "file").chmod(0o600)
    for _ in range(2):
        assert run_in_child((place.path / "file").read_text, user=ANN) == "secret"
        assert _as(BEN, (place.path / "file").read_text) == 13


def test_a_sticky_directory_protects_what_is_in_it(commons: MakeCommons) -> None:
    """Only the owner removes or renames entries, as in /tmp."""

    def story(top: Path) -> object:
        shared = top / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        run_in_child((shared / "ann's").touch, user=ANN)
        run_in_child((shared / "ben's").touch, user=BEN)
        found = [
            _as(BEN, os.unlink, shared / "ann's"),
            _as(BEN, os.rename, shared / "ann's", shared / "mine"),
            _as(BEN, os.rename, shared / "ben's", shared / "ann's"),
            _as(BEN, os.rename, shared / "ben's", shared / "still ben's"),
            _as(ANN, os.unlink, shared / "ann's"),
        ]
        return found, _all(shared)

    seen: Any = commons().alike(story)
    assert seen[0] == [1, 1, 1, None, None]


def _acl(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NO_ID: Final = 0xFFFFFFFF
FORBIDS_BEN: Final = _acl((1, 6, NO_ID), (2, 0, BEN.uid), (4, 4, NO_ID), (0x10, 6, NO_ID), (0x20, 4, NO_ID))
FOR_GROUP: Final = _acl((1, 6, NO_ID), (4, 0, NO_ID), (8, 6, GROUP), (0x10, 6, NO_ID), (0x20, 0, NO_ID))
DEFAULT: Final = _acl((1, 7, NO_ID), (2, 6, BEN.uid), (4, 5, NO_ID), (0x10, 6, NO_ID), (0x20, 0, NO_ID))


def test_acls_apply(commons: MakeCommons) -> None:
    """An ACL that forbids a user, or permits a group, applies in the mount, also to cached content."""

    def story(top: Path) -> object:
        file = top / "file"
        file.write_text("content")
        file.chmod(0o644)
        before = [run_in_child(file.read_text, user=user) for user in (ANN, BEN)]
        os.setxattr(file, "system.posix_acl_access", FORBIDS_BEN)
        forbidden = [_as(user, file.read_text) for user in (ANN, BEN)]
        os.setxattr(file, "system.posix_acl_access", FOR_GROUP)
        allowed = [_as(user, file.write_text, "changed") for user in (ANN, BEN)]
        return before, forbidden, allowed, _said(file)[2], os.getxattr(file, "system.posix_acl_access")

    found: Any = commons().alike(story)
    assert found[1] == ["content", 13]
    assert found[2] == [7, 13]


def test_default_acls_take_the_umasks_place(commons: MakeCommons) -> None:
    """New files in a directory with a default ACL get that ACL. The umask has no effect."""

    def story(top: Path, umask: int) -> object:
        inner = top / f"{umask}"
        inner.mkdir()
        inner.chmod(0o777)
        os.setxattr(inner, "system.posix_acl_default", DEFAULT)
        run_in_child(_make_all, inner, umask, user=ANN)
        acls = {
            path.name: {name: os.getxattr(path, name) for name in sorted(os.listxattr(path))}
            for path in sorted(inner.iterdir())
            if not path.is_symlink()
        }
        return _all(inner), acls

    place = commons()
    for umask in (0o022, 0o077):
        made: Any = place.alike(partial(story, umask=umask))
        assert made[0]["dir"][2] == "drwxrw----"


def test_chmod_by_a_caller_outside_the_group_clears_set_gid(commons: MakeCommons) -> None:
    """chmod and setting an ACL clear set-gid if the caller is not in the file's group, as on a local file system."""

    def story(top: Path) -> object:
        found = []
        for how in ("chmod", "acl"):
            for user in (ANN, BEN):
                file = top / f"{how}-{user.uid}"
                file.touch()
                os.chown(file, user.uid, GROUP)
                file.chmod(0o2755)
                if how == "chmod":
                    found.append(_as(user, file.chmod, 0o2775))
                else:
                    found.append(_as(user, os.setxattr, file, "system.posix_acl_access", FORBIDS_BEN))
                found.append(_said(file)[2])
        return found

    commons().alike(story)


WRITING: Final[dict[str, Callable[[Path], object]]] = {
    "write": lambda path: _opened(path, lambda fd: os.pwrite(fd, b"x", 0)),
    "append": lambda path: _opened(path, lambda fd: os.write(fd, b"x"), os.O_APPEND),
    "truncate": lambda path: os.truncate(path, 1),
    "open that truncates": lambda path: _opened(path, lambda fd: fd, os.O_TRUNC),
    "allocate": lambda path: _opened(path, lambda fd: os.posix_fallocate(fd, 0, 10_000)),
    "copy_file_range": lambda path: _opened(path, _copied),
    "chown": lambda path: os.chown(path, -1, ANN.gid),
    "chmod": lambda path: path.chmod(0o6777),
    "setxattr": lambda path: os.setxattr(path, "user.x", b"x"),
}


def _opened(path: Path, call: Callable[[int], object], flags: int = 0) -> None:
    fd = os.open(path, os.O_RDWR | flags)
    try:
        call(fd)
    finally:
        os.close(fd)


def _copied(fd: int) -> None:
    source = os.open("file", os.O_RDONLY)
    os.copy_file_range(source, fd, 3)
    os.close(source)


def test_set_id_bits_are_cleared_as_on_a_local_file_system(commons: MakeCommons) -> None:
    """A write, truncation or chown by an ordinary user clears set-user-id and set-group-id; one by root does not."""

    def story(top: Path, mode: int) -> object:
        (top / "file").write_text("content")
        (top / "file").chmod(0o644)
        os.chdir(top)
        found = {}
        for what, change in WRITING.items():
            for user in (ANN, BEN, None):
                file = top / f"{what} {user} {mode}"
                file.write_text("long content")
                os.chown(file, ANN.uid, ANN.gid)
                file.chmod(mode)
                code = run_in_child(outcome, change, file, user=user)
                found[f"{what} by {user}"] = (code, _said(file))
        os.chdir("/")
        return found

    place = commons()
    for mode in (0o6777, 0o2777, 0o4755):
        found: Any = place.alike(partial(story, mode=mode))
        assert found[f"write by {ANN}"][1][2].lower().count("s") < 2


def test_a_write_by_others_clears_the_set_id_bits_that_they_see(commons: MakeCommons) -> None:
    """The cleared bits are visible in the mount at once."""
    place = commons()
    file = place.path / "file"
    file.write_text("content")
    file.chmod(0o4777)
    assert file.stat().st_mode & stat.S_ISUID
    run_in_child(file.write_text, "changed", user=BEN)
    assert not file.stat().st_mode & stat.S_ISUID
    assert not (place.world.source / "file").stat().st_mode & stat.S_ISUID


def test_the_writing_process_is_judged_and_not_the_opening_one(commons: MakeCommons) -> None:
    """If root opens a file and another user writes to the descriptor, set-id bits are cleared as for that user."""

    def story(top: Path) -> object:
        file = top / "file"
        file.write_text("content")
        file.chmod(0o6777)
        fd = os.open(file, os.O_RDWR)
        by_root = (os.write(fd, b"x"), _said(file))
        by_ben = (run_in_child(os.write, fd, b"x", user=BEN), _said(file))
        os.close(fd)
        return by_root, by_ben

    commons().alike(story)


def test_capabilities_of_a_file_end_when_it_is_written(commons: MakeCommons) -> None:
    """A write by any user clears security.capability."""
    capability = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)

    def story(top: Path) -> object:
        found = []
        for number, change in enumerate((lambda path: path.write_text("x"), lambda path: os.truncate(path, 1))):
            for user in (None, BEN):
                file = top / f"file-{number}-{user is None}"
                file.write_text("content")
                file.chmod(0o777)
                os.setxattr(file, "security.capability", capability)
                run_in_child(change, file, user=user)
                found.append(os.listxattr(file))
        return found

    commons().alike(story)


def test_other_users_have_no_access_without_allow_other(traffic: Traffic) -> None:
    """The mount's user alone has access. Root has none to mounts of others."""
    (traffic.source / "file").write_text("content")
    traffic.settle()
    for parent in [traffic.path, *list(traffic.path.parents)[:-2]]:
        if parent != traffic.path:
            parent.chmod(parent.stat().st_mode | 0o011)
    assert _as(BEN, os.listdir, traffic.path) == 13
    assert _as(BEN, (traffic.path / "file").read_text) == 13


def test_everything_but_creation_acts_as_the_server(commons: MakeCommons) -> None:
    """A file that its owner made read-only, and then removes or renames, is subject to the kernel's check alone."""
    place = commons()
    inner = place.path / "inner"
    run_in_child(inner.mkdir, user=ANN)
    run_in_child((inner / "file").write_text, "content", user=ANN)
    run_in_child((inner / "file").chmod, 0o400, user=ANN)
    run_in_child(os.rename, inner / "file", inner / "moved", user=ANN)
    run_in_child(os.link, inner / "moved", inner / "linked", user=ANN)
    run_in_child(os.unlink, inner / "linked", user=ANN)
    run_in_child(os.setxattr, inner, "user.x", b"x", user=ANN)
    assert _said(place.world.source / "inner/moved") == (ANN.uid, ANN.gid, "-r--------")


def test_the_caller_is_in_the_record(commons: MakeCommons) -> None:
    """An entry has the program and user that the kernel reports for the request."""
    place = commons()
    command = ["touch", str(place.path / "by ann")]
    run_in_child(lambda: subprocess.run(command, check=True).returncode, user=ANN)
    (entry,) = [entry for entry in place.world.entries() if entry.path == "by ann" and entry.kind == "intent"][:1]
    assert (entry.tool, entry.details["uid"]) == ("touch", ANN.uid)


def test_other_users_can_read_the_virtual_directory(commons: MakeCommons) -> None:
    """Every user with access to the mount can read `.bonobofs`."""
    place = commons('default = "deny"')
    assert _as(BEN, (place.path / "new").touch) == 13
    assert "default" in run_in_child((place.path / ".bonobofs/denials.jsonl").read_text, user=BEN).lower()
    assert run_in_child((place.path / ".bonobofs/policy.md").read_text, user=ANN).startswith("# ")
