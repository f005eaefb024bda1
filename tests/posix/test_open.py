"""open(2): what its flags mean for names that exist, do not exist, or are not files."""

from __future__ import annotations

import fcntl
import os

from tests.posix.harness import ANY, See, case
from tests.support.syscalls import (
    inode,
    kind,
    link_open,
    make,
    mode,
    names,
    opened,
    opening,
    read,
    reread,
    size,
    times,
    write,
)

NEW = os.O_WRONLY | os.O_CREAT


@case()
def test_create(see: See) -> None:
    """A name that does not exist becomes an empty file with the given mode."""
    see("a missing name", "ENOENT", opening, "a.md")
    see("asked once more", "ENOENT", os.stat, "a.md")
    see("create", None, opening, "a.md", NEW, 0o640)
    see("kind", "-", kind, "a.md")
    see("size", 0, size, "a.md")
    see("mode", "0640", mode, "a.md")
    see("listed", ["a.md"], names, see.at)
    see("create what exists", None, opening, "a.md", NEW, 0o600)
    see("mode stays", "0640", mode, "a.md")
    see("owned by the caller", True, lambda: os.stat("a.md").st_uid == os.geteuid())


@case()
def test_create_modes(see: See) -> None:
    """A file gets each requested mode without an executable bit."""
    for number in (0o000, 0o200, 0o400, 0o444, 0o600, 0o644, 0o604, 0o620, 0o4644, 0o2644, 0o1644):
        os.umask(0)
        see(f"create {number:o}", None, make, f"{number:o}.md", b"", number)
        see(f"mode {number:o}", f"{number:04o}", mode, f"{number:o}.md")


@case()
def test_create_executable(see: See) -> None:
    """A file can be created with executable bits."""
    see("create", None, make, "a.md", b"", 0o755)
    see("mode", "0755", mode, "a.md")
    see("create for the group alone", None, make, "b.md", b"", 0o610)
    see("mode of that", "0610", mode, "b.md")


@case()
def test_umask(see: See) -> None:
    """The umask takes bits from what is created, and from nothing else."""
    for mask in (0o000, 0o027, 0o077, 0o777):
        os.umask(mask)
        make(f"{mask:o}.md", b"", 0o666)
        os.mkdir(f"{mask:o}", 0o777)
        os.mkfifo(f"{mask:o}.fifo.md", 0o666)
        see(f"file under {mask:03o}", f"{0o666 & ~mask:04o}", mode, f"{mask:o}.md")
        see(f"directory under {mask:03o}", f"{0o777 & ~mask:04o}", mode, f"{mask:o}")
        see(f"fifo under {mask:03o}", f"{0o666 & ~mask:04o}", mode, f"{mask:o}.fifo.md")
    os.chmod("0.md", 0o666)
    see("chmod asks no umask", "0666", mode, "0.md")


@case()
def test_exclusive(see: See) -> None:
    """O_EXCL refuses every existing name, of every kind."""
    make("a.md", b"kept")
    os.mkdir("d")
    os.symlink("nowhere.md", "dangling.md")
    os.mkfifo("fifo.md")
    for name in ("a.md", "d", "dangling.md", "fifo.md"):
        see(name, "EEXIST", opening, name, NEW | os.O_EXCL)
    see("with O_TRUNC", "EEXIST", opening, "a.md", NEW | os.O_EXCL | os.O_TRUNC)
    see("nothing was cut", b"kept", read, "a.md")
    see("no target appeared", "ENOENT", os.stat, "nowhere.md")
    see("a new name", None, opening, "b.md", NEW | os.O_EXCL)


@case()
def test_truncating(see: See) -> None:
    """O_TRUNC empties a file that exists and keeps its inode."""
    make("a.md", b"old content")
    before = inode("a.md")
    see("open", None, opening, "a.md", os.O_WRONLY | os.O_TRUNC)
    see("content", b"", read, "a.md")
    see("inode", True, lambda: inode("a.md") == before)
    see("write less than before", 3, write, "a.md", b"new")
    see("no tail is left", b"new", read, "a.md")
    see("with O_CREAT", None, opening, "a.md", NEW | os.O_TRUNC)
    see("content after that", b"", read, "a.md")
    see("a directory", "EISDIR", opening, see.at, os.O_WRONLY | os.O_TRUNC)
    see("a missing file", "ENOENT", opening, "b.md", os.O_WRONLY | os.O_TRUNC)


@case()
def test_truncating_is_seen_by_open_readers(see: See) -> None:
    """A descriptor opened before sees a file emptied and rewritten."""
    make("a.md", b"a long old content")
    with opened("a.md", os.O_RDONLY) as reader:
        see("before", b"a long old content", reread, reader, 100, 0)
        with opened("a.md", os.O_WRONLY | os.O_TRUNC) as writer:
            see("emptied", b"", reread, reader, 100, 0)
            os.write(writer, b"new")
            see("rewritten", b"new", reread, reader, 100, 0)
            see("size", 3, size, reader)


@case()
def test_appending(see: See) -> None:
    """O_APPEND writes at the end, for any offset and after writes of others."""
    make("a.md", b"one ")
    with opened("a.md", os.O_RDWR | os.O_APPEND) as one, opened("a.md", os.O_WRONLY | os.O_APPEND) as two:
        os.write(one, b"two ")
        os.write(two, b"three ")
        os.lseek(one, 0, os.SEEK_SET)
        os.write(one, b"four ")
        see("content", b"one two three four ", read, "a.md")
        see("offset is the end", 19, os.lseek, one, 0, os.SEEK_CUR)
        see("pwrite appends too", 4, os.pwrite, one, b"five", 0)
        see("content after pwrite", b"one two three four five", read, "a.md")
        os.truncate("a.md", 3)
        os.write(two, b"!")
        see("after a cut", b"one!", read, "a.md")
        see("flags", True, lambda: bool(fcntl.fcntl(one, fcntl.F_GETFL) & os.O_APPEND))


@case()
def test_append_flag_set_later(see: See) -> None:
    """O_APPEND can be set and taken from a descriptor that is open."""
    make("a.md", b"0123456789")
    with opened("a.md") as fd:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        os.write(fd, b"end")
        see("set", b"0123456789end", read, "a.md")
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        os.pwrite(fd, b"start", 0)
        see("taken", b"start56789end", read, "a.md")
        see("one write with RWF_APPEND", 1, os.pwritev, fd, [b"!"], 0, os.RWF_APPEND)
        see("that went to the end", b"start56789end!", read, "a.md")


@case()
def test_no_follow(see: See) -> None:
    """O_NOFOLLOW refuses a symlink as the last component only."""
    os.mkdir("d")
    make("d/a.md", b"x")
    os.symlink("d/a.md", "file.md")
    os.symlink("d", "directory.md")
    see("a link to a file", "ELOOP", opening, "file.md", os.O_RDONLY | os.O_NOFOLLOW)
    see("for writing", "ELOOP", opening, "file.md", os.O_WRONLY | os.O_NOFOLLOW)
    see("with O_CREAT", "ELOOP", opening, "file.md", NEW | os.O_NOFOLLOW)
    see("a link to a directory", "ELOOP", opening, "directory.md", os.O_RDONLY | os.O_NOFOLLOW)
    see("with O_DIRECTORY", "ENOTDIR", opening, "directory.md", os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    see("a link on the way", None, opening, "directory.md/a.md", os.O_RDONLY | os.O_NOFOLLOW)
    see("no link", None, opening, "d/a.md", os.O_RDONLY | os.O_NOFOLLOW)
    with opened("file.md", os.O_PATH | os.O_NOFOLLOW) as fd:
        see("O_PATH gives the link itself", "d/a.md", lambda: os.readlink("", dir_fd=fd))


@case()
def test_through_a_dangling_link(see: See) -> None:
    """O_CREAT through a symlink makes the target."""
    os.symlink("target.md", "link.md")
    see("reading", "ENOENT", opening, "link.md")
    see("creating", None, opening, "link.md", NEW)
    see("target", "-", kind, "target.md")
    see("the link stays", "l", kind, "link.md")
    see("listed", ["link.md", "target.md"], names, see.at)


@case()
def test_directory_flag(see: See) -> None:
    """O_DIRECTORY takes directories only, and directories are not opened for writing."""
    make("a.md")
    os.mkdir("d")
    see("a file", "ENOTDIR", opening, "a.md", os.O_RDONLY | os.O_DIRECTORY)
    see("a directory", None, opening, "d", os.O_RDONLY | os.O_DIRECTORY)
    see("for writing", "EISDIR", opening, "d", os.O_WRONLY)
    see("for both", "EISDIR", opening, "d", os.O_RDWR)
    see("with O_CREAT", "EISDIR", opening, "d", NEW)
    see("reading only with O_CREAT", "EISDIR", opening, "d", os.O_RDONLY | os.O_CREAT)
    see("a missing name", "ENOENT", opening, "x", os.O_RDONLY | os.O_DIRECTORY)
    with opened("d", os.O_RDONLY) as fd:
        see("read(2) of a directory", "EISDIR", os.read, fd, 10)
        see("write(2) to a directory", "EBADF", os.write, fd, b"x")


@case()
def test_paths_that_cannot_be(see: See) -> None:
    """A missing directory, a file in its place, and an empty name each have their error."""
    make("a.md")
    see("in a missing directory", "ENOENT", opening, "d/b.md", NEW)
    see("below a file", "ENOTDIR", opening, "a.md/b.md", NEW)
    see("a file with a slash", "ENOTDIR", opening, "a.md/")
    see("a new file with a slash", "EISDIR", opening, "b.md/", NEW)
    see("an empty name", "ENOENT", opening, "")
    see("a dot below a file", "ENOTDIR", opening, "a.md/.")
    see("dots", None, opening, "./../" + see.at.name + "//a.md")


@case()
def test_descriptor_rights(see: See) -> None:
    """A descriptor does what it was opened for."""
    make("a.md", b"content")
    with opened("a.md", os.O_RDONLY) as reader, opened("a.md", os.O_WRONLY) as writer:
        see("write through a reader", "EBADF", os.write, reader, b"x")
        see("read through a writer", "EBADF", os.read, writer, 1)
        see("truncate through a reader", "EINVAL", os.ftruncate, reader, 0)
        see("truncate through a writer", None, os.ftruncate, writer, 3)
        see("fchmod through a reader", None, os.fchmod, reader, 0o600)
    with opened("a.md", os.O_PATH) as fd:
        see("read through O_PATH", "EBADF", os.read, fd, 1)
        see("stat through O_PATH", 3, size, fd)
        see("fchmod through O_PATH", "EBADF", os.fchmod, fd, 0o644)
    see("content", b"con", read, "a.md")


@case()
def test_writable_though_its_mode_is_not(see: See) -> None:
    """The creator of a file may write through that descriptor, for any mode afterwards."""
    with opened("a.md", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o444) as fd:
        see("write", 4, os.write, fd, b"data")
        see("read", b"data", reread, fd, 10, 0)
        see("truncate", None, os.ftruncate, fd, 2)
        see("take all rights", None, os.fchmod, fd, 0)
        see("write on", 3, os.write, fd, b"end")
        see("read on", b"da\0\0end", reread, fd, 10, 0)
        see("sync", None, os.fsync, fd)
        os.fchmod(fd, 0o600)
    see("content", b"da\0\0end", read, "a.md")


@case()
def test_rights_taken_from_an_open_file(see: See) -> None:
    """A descriptor opened before chmod 0 goes on working."""
    make("a.md", b"0123456789")
    with opened("a.md") as fd:
        os.chmod("a.md", 0)
        see("write", 3, os.write, fd, b"abc")
        see("read", b"abc3456789", reread, fd, 20, 0)
        see("truncate", None, os.ftruncate, fd, 5)
        see("cut", 5, size, fd)
        os.chmod("a.md", 0o644)
    see("content", b"abc34", read, "a.md")


@case()
def test_relative_to_a_descriptor(see: See) -> None:
    """openat and similar calls work below an open directory, under any present name of it."""
    os.mkdir("d")
    with opened("d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        see("create", None, lambda: os.close(os.open("a.md", NEW, 0o644, dir_fd=fd)))
        os.rename("d", "e")
        see("create after a rename", None, lambda: os.close(os.open("b.md", NEW, 0o644, dir_fd=fd)))
        see("mkdir", None, lambda: os.mkdir("f", dir_fd=fd))
        see("rename", None, lambda: os.rename("a.md", "c.md", src_dir_fd=fd, dst_dir_fd=fd))
        see("link", None, lambda: os.link("c.md", "l.md", src_dir_fd=fd, dst_dir_fd=fd))
        see("stat", 2, lambda: os.stat("c.md", dir_fd=fd).st_nlink)
        see("unlink", None, lambda: os.unlink("b.md", dir_fd=fd))
        see("listed", ["c.md", "f", "l.md"], names, fd)
    see("listed by name", ["c.md", "f", "l.md"], names, see.at / "e")


@case()
def test_unnamed(see: See) -> None:
    """O_TMPFILE makes a file without a name, which can be given one."""

    def named_later() -> bytes:
        with opened(".", os.O_TMPFILE | os.O_RDWR) as fd:
            os.write(fd, b"unnamed")
            link_open(fd, "a.md")
        return read("a.md")

    see("content under its later name", b"unnamed", named_later)


@case()
def test_reopened_through_proc(see: See) -> None:
    """A descriptor can be opened again through /proc, with other rights."""
    make("a.md", b"content")
    with opened("a.md", os.O_RDONLY) as fd, opened(f"/proc/self/fd/{fd}", os.O_WRONLY) as again:
        see("write", 3, os.write, again, b"CON")
        see("read", b"CONtent", os.read, fd, 10)


@case()
def test_creation_stamps(see: See) -> None:
    """Creating stamps the file and its directory; opening what exists stamps neither."""
    os.mkdir("d")
    os.utime("d", ns=(0, 0))
    make("d/a.md")
    see("directory stamped", True, lambda: times("d")[0] > 0)
    see("file and directory alike", ANY, lambda: abs(times("d/a.md")[0] - times("d")[0]) < 10**9)
    os.utime("d", ns=(0, 0))
    os.utime("d/a.md", ns=(0, 0))
    opening("d/a.md", NEW)
    see("file not stamped again", 0, lambda: times("d/a.md")[0])
    see("directory not stamped again", 0, lambda: times("d")[0])
    opening("d/a.md", NEW | os.O_TRUNC)
    see("O_TRUNC stamps, though it was empty", ANY, lambda: times("d/a.md")[0] > 0)


@case()
def test_many_at_once(see: See) -> None:
    """Two hundred files can be open at once, each with its own content."""
    descriptors = []
    for number in range(200):
        descriptors.append(os.open(f"{number}.md", os.O_RDWR | os.O_CREAT, 0o644))
        os.write(descriptors[-1], b"%d" % number)
    see("contents", [b"%d" % number for number in range(200)], lambda: [os.pread(fd, 9, 0) for fd in descriptors])
    for fd in descriptors:
        os.close(fd)


@case()
def test_created_again_and_again(see: See) -> None:
    """A name that is removed and created again is a new file every time."""
    found: list[object] = []
    for number in range(50):
        make("a.md", b"%d" % number)
        found.append(read("a.md"))
        os.unlink("a.md")
        found.append(os.path.exists("a.md"))
    see("contents", [x for number in range(50) for x in (b"%d" % number, False)], lambda: found)
