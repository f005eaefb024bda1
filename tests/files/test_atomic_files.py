"""A file write is atomic: after a crash, an interrupt or a full disk there is the old file or the new one, with its
metadata.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bonobofs.audit.reader import AuditLog, read
from bonobofs.audit.recovery import compare
from bonobofs.audit.verify import read_head, verify
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.guards import FileGuard
from bonobofs.policy.document import parse
from bonobofs.policy.engine import compile_policy
from bonobofs.policy.request import Principal
from bonobofs.session import open_session
from tests.files.conftest import Guarded, Program
from tests.support.world import ALLOW_ALL, NOBODY, Mounted, OrdinaryUser

OLD, NEW = "old\n" * 5_000, "new!\n" * 20_000
ACL = "system.posix_acl_access"
DEFAULT_ACL = "system.posix_acl_default"


def acl(group: int) -> bytes:
    """An access control list: owner rw, user 12345 rw, the group as said, mask rw, others nothing."""
    entries = ((1, 6, 0xFFFFFFFF), (2, 6, 12345), (4, group, 0xFFFFFFFF), (16, 6, 0xFFFFFFFF), (32, 0, 0xFFFFFFFF))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- what a written file is


def test_a_new_file_has_mode_644_minus_the_umask(alice: Guarded) -> None:
    before = os.umask(0o077)
    try:
        assert mode(alice.files.guarded_write_file("aidlc-docs/a.md", "a", "alice")) == 0o600
        os.umask(0)
        assert mode(alice.files.guarded_write_file("aidlc-docs/b.md", "a", "alice")) == 0o644
        assert mode(alice.files.guarded_write_file("aidlc-docs/c.md", "a", "alice", overwrite=True)) == 0o644
    finally:
        os.umask(before)


@pytest.mark.parametrize("bits", [0o600, 0o664, 0o640, 0o755, 0o200])
def test_an_overwritten_file_keeps_its_mode(alice: Guarded, bits: int) -> None:
    """This includes an x bit that it already has: executable is judged when the mode changes."""
    file = alice.files.guarded_write_file("aidlc-docs/a.md", OLD, "alice")
    file.chmod(bits)
    alice.files.guarded_write_file(file, NEW, "alice", overwrite=True)
    assert mode(file) == bits
    file.chmod(0o600)
    assert file.read_text() == NEW


def test_a_write_clears_set_id_bits(alice: Guarded) -> None:
    file = alice.files.guarded_write_file("tests/a.py", OLD, "alice")
    file.chmod(0o6755)
    alice.files.guarded_write_file(file, NEW, "alice", overwrite=True)
    assert mode(file) == 0o755


def test_attributes_and_the_acl_are_kept(alice: Guarded) -> None:
    """The directory's default ACL does not widen a file that has none."""
    listed = alice.files.guarded_write_file("aidlc-docs/listed.md", OLD, "alice")
    plain = alice.files.guarded_write_file("aidlc-docs/plain.md", OLD, "alice")
    os.setxattr(listed, "user.origin", b"somewhere")
    os.setxattr(listed, ACL, acl(4))
    plain.chmod(0o660)
    os.setxattr(listed.parent, DEFAULT_ACL, acl(6))
    for file in (listed, plain):
        before = {name: os.getxattr(file, name) for name in os.listxattr(file)}, file.stat().st_mode
        alice.files.guarded_write_file(file, NEW, "alice", overwrite=True)
        assert ({name: os.getxattr(file, name) for name in os.listxattr(file)}, file.stat().st_mode) == before
        assert file.read_text() == NEW
    fresh = alice.files.guarded_write_file("aidlc-docs/fresh.md", NEW, "alice")
    assert os.getxattr(fresh, ACL)[12:16] == os.getxattr(listed, ACL)[12:16], "a new file has the list of its directory"


def test_the_owner_is_kept_if_the_user_may_set_it(alice: Guarded) -> None:
    file = alice.files.guarded_write_file("aidlc-docs/a.md", OLD, "alice")
    owner = (NOBODY, NOBODY) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(file, *owner)
    alice.files.guarded_write_file(file, NEW, "alice", overwrite=True)
    assert (file.stat().st_uid, file.stat().st_gid) == owner


def test_other_names_of_the_file_keep_the_old_content(alice: Guarded) -> None:
    """This is why a file with several names may be overwritten here, and not in place."""
    file = alice.files.guarded_write_file("aidlc-docs/a.md", OLD, "alice")
    other = alice.root / "elsewhere"
    other.hardlink_to(file)
    alice.files.guarded_write_file(file, NEW, "alice", overwrite=True)
    assert (file.read_text(), other.read_text()) == (NEW, OLD)


def test_an_open_reader_keeps_the_old_file(alice: Guarded) -> None:
    file = alice.files.guarded_write_file("aidlc-docs/a.md", OLD, "alice")
    with file.open() as reader:
        alice.files.guarded_write_file(file, NEW, "alice", overwrite=True)
        assert reader.read() == OLD


def test_a_file_without_write_permission_is_not_replaced(ordinary_user: OrdinaryUser) -> None:
    """A rename needs only write access to the directory; the mode of the file is checked too."""
    said = ordinary_user.run(
        ordinary_user.python,
        "-c",
        """
import os
import threading
from pathlib import Path
from bonobofs.guards import FileGuard
from bonobofs.session import open_session
Path("ws/aidlc-docs").mkdir(parents=True)
file = Path("ws/aidlc-docs/a.md")
file.write_text("old")
file.chmod(0o444)
with open_session("ws", agent="alice") as session:
    files = FileGuard(session)
    try:
        files.write_file("aidlc-docs/a.md", "new", "alice", overwrite=True)
    except PermissionError as error:
        print(type(error).__name__, file.read_text(), os.listdir("ws/aidlc-docs"))
    file.chmod(0o600)
    print(files.write_file("aidlc-docs/a.md", "new", "alice", overwrite=True).name, oct(file.stat().st_mode))
    print([entry.reason for entry in files.audit.recent() if entry.kind == "outcome"])
""",
    )
    assert said.stdout.splitlines() == [
        "PermissionError old ['a.md']",
        "a.md 0o100600",
        "['EACCES: Permission denied', None]",
    ], said.stderr


class _Source(NamedTuple):
    source: str


class _Session(NamedTuple):
    session: _Source
    guard: Enforcer
    log: AuditLog
    change_lock: threading.Lock
    access_path: str
    home: Path


@pytest.fixture
def on_fuse(mounted: Mounted, tmp_path: Path) -> Iterator[FileGuard]:
    """A guard on a file system that has no files without names."""
    world = mounted(policy=ALLOW_ALL)
    alice = Principal("alice", "3f0c8a52-6a6e-4e55-9c7e-0b6f0b6d6d10", "agent")
    trail = Trail.create(tmp_path / "own.jsonl", tmp_path / "own.head", TrailIdentity("own", alice.label, alice.id))
    policy = compile_policy(parse('default = "allow"', "test").model_dump(mode="json"))
    with FileGuard(
        _Session(
            _Source(str(world.path)),
            Enforcer(policy, alice, trail),
            AuditLog(trail),
            threading.Lock(),
            str(world.path),
            tmp_path,
        )
    ) as files:
        yield files
    trail.close()


def test_without_o_tmpfile_a_hidden_name_is_used(on_fuse: FileGuard) -> None:
    file = on_fuse.guarded_write_file("docs/a.md", OLD, "alice")
    with pytest.raises(OSError, match="not supported"):
        os.open(file.parent, os.O_TMPFILE | os.O_RDWR)
    file.chmod(0o640)
    with pytest.raises(FileExistsError):
        on_fuse.write_file("docs/a.md", NEW, "alice")
    assert file.read_text() == OLD
    on_fuse.guarded_write_file("docs/a.md", NEW, "alice", overwrite=True)
    assert (file.read_text(), mode(file), os.listdir(file.parent)) == (NEW, 0o640, ["a.md"])


# -- crashes, interrupts, full disks

STEPS = ("open", "write", "fsync", "link", "rename", "unlink", "mkdir", "fchmod", "fchown", "setxattr")
"""What a write does to the file system, but for reading it."""

AT_A_STEP = """
import json, signal
from bonobofs.files import atomic_write
root, overwrite, nameless, way = Path(sys.argv[1]), sys.argv[2] == "overwrite", sys.argv[3] == "nameless", sys.argv[4]
OLD, NEW = "old\\n" * 5_000, "new!\\n" * 20_000
file = root / "aidlc-docs/units/a.md"
real = {name: getattr(os, name) for name in json.loads(sys.argv[5])}

class Stopped:
    '''Every call on the way is made; at one of them, before or after it, the process is stopped.'''
    def __init__(self):
        self.at, self.count = -1, 0
    def arm(self, at):
        self.at, self.count = at, 0
    def stop(self):
        self.count += 1
        if self.count - 1 == self.at:
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt
    def wrap(self, name):
        def call(*arguments, **options):
            if not nameless and options.get("dir_fd") is not None and arguments[0] == ".":
                raise OSError(95, "Operation not supported")
            self.stop()
            result = real[name](*arguments, **options)
            self.stop()
            return result
        return call

stopped = Stopped()
for name in real:
    setattr(os, name, stopped.wrap(name))

def ready():
    stopped.arm(-1)
    if overwrite:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(OLD)
        os.chmod(file, 0o640)
    else:
        file.unlink(missing_ok=True)

def attempt(step):
    with open_session(root, agent="alice") as session:
        files = FileGuard(session)
        stopped.arm(step)
        try:
            files.write_file(file, NEW, "alice", overwrite=overwrite)
        finally:
            stopped.arm(-1)

def looked_at():
    content = file.read_text() if file.exists() else ""
    assert content in (("" if not overwrite else OLD), NEW), len(content)
    return "new" if content == NEW else "old"

def in_a_process_of_its_own(step):
    '''Whether it was stopped.'''
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status)
    try:
        attempt(step)
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)

def in_this_process(step):
    try:
        attempt(step)
    except KeyboardInterrupt:
        return True
    return False

seen = []
step = 0
while True:
    ready()
    was_stopped = (in_a_process_of_its_own if way == "kill" else in_this_process)(step)
    left = [name for name in os.listdir(file.parent) if name != "a.md"] if file.parent.exists() else []
    seen.append([looked_at(), left])
    if not was_stopped:
        break
    with open_session(root, agent="bob") as session:
        FileGuard(session)
    looked_at()
    assert not file.parent.exists() or os.listdir(file.parent) in ([], ["a.md"]), os.listdir(file.parent)
    step += 1
print(json.dumps(seen))
"""


@pytest.mark.parametrize("way", ["kill", "interrupt"])
@pytest.mark.parametrize("content", ["nameless", "named"])
@pytest.mark.parametrize("what", ["create", "overwrite"])
def test_a_write_stopped_at_any_step_leaves_the_old_or_the_new_file(
    program: Program, home: Path, source: Path, what: str, content: str, way: str
) -> None:
    """The test kills or interrupts the process before and after every call of a write. The next session removes what
    is left; every record verifies, and every difference has its intent.
    """
    seen = json.loads(program(AT_A_STEP, source, what, content, way, json.dumps(STEPS)))
    assert len(seen) > 12
    assert seen[0][0] == "old"
    assert seen[-1] == ["new", []]
    left = [names for _, names in seen if names]
    if way == "interrupt":
        assert left == [], "an interrupt leaves nothing"
    elif what == "overwrite" or content == "named":
        assert left, "the moment in which something is left was not hit"
        assert {name[:10] for names in left for name in names} == {".bonobofs-"}
    else:
        assert left == [], "a new file needs no other name"
    reports = list(verify(home / "trails"))
    assert [report.findings for report in reports if report.findings] == []
    unfinished = [(entry.operation, entry.path) for report in reports for entry in report.unfinished]
    if way == "kill":
        assert set(unfinished) <= {
            ("mkdir", "aidlc-docs"),
            ("mkdir", "aidlc-docs/units"),
            ("write_file", "aidlc-docs/units/a.md"),
        }
    else:
        assert unfinished == []


def test_the_next_session_removes_the_hidden_name_of_a_killed_writer(
    program: Program, home: Path, source: Path
) -> None:
    """The process is killed between the link to the hidden name and the rename. The record on the disk names the
    hidden file.
    """
    program(
        """
import signal
from bonobofs.audit.verify import read_head
if not os.fork():
    with open_session(sys.argv[1], agent="alice") as session:
        files = FileGuard(session)
        files.guarded_write_file("aidlc-docs/a.md", "old", "alice")
        os.rename = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
        files.guarded_write_file("aidlc-docs/a.md", "new", "alice", overwrite=True)
os.wait()
""",
        source,
    )
    (trail,) = (home / "trails").glob("*.jsonl")
    intent = list(read(trail))[-1]
    stray = intent.details["by"]
    assert sorted(os.listdir(source / "aidlc-docs")) == [stray, "a.md"]
    assert (source / "aidlc-docs/a.md").read_text() == "old"
    assert (source / "aidlc-docs" / stray).read_text() == "new"
    assert read_head(trail.with_suffix(".head")).seq == intent.seq, "the record is on the disk before the change"
    with open_session(source, agent="bob") as session:
        files = FileGuard(session)
        assert os.listdir(source / "aidlc-docs") == ["a.md"]
        (entry,) = files.audit.filter_by_agent("bob")
        assert (entry.kind, entry.operation, entry.path) == ("event", "remove_temporary", f"aidlc-docs/{stray}")
        assert entry.details == {"session": intent.session, "intent": intent.seq}
        assert list(compare(source, [(trail, trail.with_suffix(".head"))])) == [], "all is explained after a crash"


def test_only_declared_temporary_names_are_removed(program: Program, home: Path, source: Path) -> None:
    """A file that a forged entry names stays, and so do other file kinds and files of live sessions."""
    kept = source / "aidlc-docs/kept.md"
    kept.parent.mkdir()
    kept.write_text("kept")
    program(
        """
import signal
if not os.fork():
    with open_session(sys.argv[1], agent="alice") as session:
        trail = session.guard.trail
        os.mkdir(sys.argv[1] + "/aidlc-docs/.bonobofs-" + 32 * "0")
        for name in ("kept.md", "../aidlc-docs/kept.md", ".bonobofs-" + 32 * "0", ".bonobofs-1", 7):
            trail.intent("write_file", "aidlc-docs/a.md", "modify", "artifacts", details={"by": name})
        os.kill(os.getpid(), signal.SIGKILL)
os.wait()
""",
        source,
    )
    with open_session(source, agent="carol") as living:
        used = ".bonobofs-" + 32 * "f"
        (source / "aidlc-docs" / used).write_text("in use")
        living.guard.trail.intent("write_file", "aidlc-docs/a.md", "modify", "x", details={"by": used})
        with open_session(source, agent="bob") as session:
            FileGuard(session)
            assert session.log.filter_by_agent("bob") == []
    assert sorted(os.listdir(source / "aidlc-docs")) == [".bonobofs-" + 32 * "0", used, "kept.md"]


KILLED = """
import json, random, signal
root, file = sys.argv[1], Path(sys.argv[1], "aidlc-docs/a.md")
file.parent.mkdir()
file.write_text("")
random.seed(int(sys.argv[2]))
strays = writes = 0
for _ in range(50):
    ready, say = os.pipe()
    child = os.fork()
    if not child:
        with open_session(root, agent="alice") as session:
            files = FileGuard(session)
            number = 0
            while True:
                number += 1
                files.guarded_write_file(file, f"{number}\\n" * 30_000, "alice", overwrite=True)
                os.write(say, b".")
    os.read(ready, 1)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.02))
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    os.close(say)
    writes += 1 + len(os.read(ready, 100_000))
    os.close(ready)
    lines = file.read_text().splitlines()
    assert len(lines) == 30_000 and len(set(lines)) == 1, (len(lines), set(lines))
    names = os.listdir(file.parent)
    strays += len(names) - 1
    assert len(names) <= 2 and all(name == "a.md" or name.startswith(".bonobofs-") for name in names)
with open_session(root, agent="bob") as session:
    FileGuard(session)
assert os.listdir(file.parent) == ["a.md"]
print(json.dumps([writes, strays]))
"""


def test_a_writer_killed_at_random_leaves_a_complete_file(program: Program, home: Path, source: Path) -> None:
    """After fifty times kill -9 the file is complete and every record verifies."""
    writes, _ = json.loads(program(KILLED, source, 7))
    assert writes >= 50
    reports = list(verify(home / "trails"))
    assert len(reports) == 51
    assert [finding for report in reports for finding in report.findings] == []
    assert {entry.path for report in reports for entry in report.unfinished} <= {"aidlc-docs/a.md"}
    assert max(len(report.unfinished) for report in reports) <= 1


INTERRUPTED = """
import random, signal
root, file = sys.argv[1], Path(sys.argv[1], "aidlc-docs/a.md")
random.seed(7)
contents = {letter: letter * 30_000 for letter in "ab"}
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
interrupted = 0
with open_session(root, agent="alice") as session:
    files = FileGuard(session)
    files.guarded_write_file(file, contents["a"], "alice")
    for number in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, 0.003))
            files.guarded_write_file(file, contents["ab"[number % 2]], "alice", overwrite=True)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
        assert file.read_text() in contents.values()
        assert os.listdir(file.parent) == ["a.md"], os.listdir(file.parent)
print(interrupted)
"""


def test_a_writer_interrupted_at_random_leaves_only_the_file(program: Program, home: Path, source: Path) -> None:
    assert int(program(INTERRUPTED, source)) > 30
    (report,) = verify(home / "trails")
    assert report.findings == []


FULL = """
import resource, subprocess
way, root = sys.argv[1], Path(sys.argv[2])
if way == "disk":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", root], check=True)
file, new = root / "aidlc-docs/a.md", root / "aidlc-docs/new/b.md"
with open_session(root, agent="alice") as session:
    files = FileGuard(session)
    files.guarded_write_file(file, "old", "alice")
    free = os.statvfs(root).f_bfree
    if way == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    for path, overwrite in ((file, True), (new, False), (new, True)):
        try:
            files.write_file(path, "x" * 500_000, "alice", overwrite=overwrite)
        except OSError as error:
            print(error.strerror)
    print(file.read_text(), sorted(name for _, *names in os.walk(root) for each in names for name in each))
    print(files.write_file(file, "there is room for this", "alice", overwrite=True).read_text())
    print([entry.reason for entry in files.audit.recent() if entry.kind == "outcome" and entry.result == "error"])
"""


@pytest.mark.parametrize(
    ("way", "error"),
    [("limit", "EFBIG: File too large"), *([("disk", "ENOSPC: No space left on device")] * (os.geteuid() == 0))],
)
def test_a_full_disk_leaves_only_the_old_file(program: Program, source: Path, way: str, error: str) -> None:
    """OSError is raised and recorded. The next write that fits succeeds."""
    before = ("unshare", "--mount") if way == "disk" else ()
    said = program(FULL, way, source, before=before).splitlines()
    assert said == [
        *[error.partition(": ")[2]] * 3,
        "old ['a.md', 'aidlc-docs', 'new']",
        "there is room for this",
        str([error] * 3),
    ]


def test_a_failed_rename_does_not_fall_back_to_a_plain_write(program: Program, source: Path) -> None:
    """The error is raised, and the old content stays."""
    said = program(
        """
def fails(*arguments, **options):
    raise OSError(5, "Input/output error")
with open_session(sys.argv[1], agent="alice") as session:
    files = FileGuard(session)
    file = files.guarded_write_file("aidlc-docs/a.md", "old", "alice")
    os.rename = fails
    try:
        files.write_file(file, "new", "alice", overwrite=True)
    except OSError as error:
        print(error.strerror, file.read_text(), os.listdir(file.parent), files.audit.recent(1)[0].reason)
""",
        source,
    )
    assert said == "Input/output error old ['a.md'] EIO: Input/output error\n"
