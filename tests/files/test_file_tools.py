"""The four file tools of an agent: results, roles, records and bounded time."""

from __future__ import annotations

import errno
import inspect
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.errors import UsageError
from bonobofs.files import bounded_reader
from bonobofs.files.bounded_reader import FileList, FileMatches, FileText
from bonobofs.guards import FileTools, ValidationResult
from bonobofs.policy.decision import Code, Refused
from bonobofs.session import OpenSession
from tests.files.conftest import Guarded, Opened, Program
from tests.support.world import bonobofs, register

POLICY = """
default = "allow"
[[protect]]
paths = ["locked/"]
[[scratch]]
paths = ["build/"]
[role.impl]
write = ["**"]
deny = ["docs/"]
tools = ["read_file", "write_file", "list_files", "search_files"]
[role.control]
tools = ["read_file", "list_files", "search_files"]
[role.mute]
write = ["**"]
"""
READING: dict[str, tuple[Any, ...]] = {"read_file": ("a",), "list_files": ("",), "search_files": ("x",)}


class Tools:
    """Tools, and what they stand on."""

    def __init__(self, guarded: Guarded) -> None:
        self.session: OpenSession = guarded.session
        self.root = guarded.root
        self.guarded = guarded
        self.tools = FileTools(guarded.session)

    def made(self, path: str, content: str | bytes = "") -> Path:
        made = self.root / path
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_bytes(content if isinstance(content, bytes) else content.encode())
        return made

    def read(self, path: str, offset: int = 1, limit: int | None = None) -> FileText:
        return self.tools.guarded_read_file(path, offset, limit)

    def names(self, path: str = "", pattern: str | None = None, *, recursive: bool = False) -> list[str]:
        found = self.tools.guarded_list_files(path, pattern, recursive)
        assert found.cut == ""
        return [entry.path for entry in found.entries]

    def lines(self, query: str, path: str = "", **filters: str) -> list[str]:
        found = self.tools.guarded_search_files(query, path, **filters)
        assert found.cut == ""
        return [f"{match.path}:{match.line}:{match.text}" for match in found.matches]

    def last(self) -> AuditEntry:
        return [entry for entry in self.guarded.entries() if entry.kind != "alert"][-1]


@pytest.fixture
def impl(opened: Opened) -> Iterator[Tools]:
    made = Tools(opened(policy=POLICY, role="impl"))
    yield made
    made.tools.close()


def denied(result: object) -> ValidationResult:
    assert isinstance(result, ValidationResult)
    assert not result
    return result


def test_the_tools_have_the_names_and_arguments_of_seed_002() -> None:
    expected = {
        "read_file": ["path", "offset", "limit"],
        "write_file": ["path", "content", "createOnly"],
        "list_files": ["path", "pattern", "recursive"],
        "search_files": ["query", "path", "include", "exclude"],
    }
    for name, arguments in expected.items():
        for prefix in ("", "guarded_"):
            assert list(inspect.signature(getattr(FileTools, prefix + name)).parameters)[1:] == arguments


# read_file


def test_a_file_is_read_with_line_numbers(impl: Tools) -> None:
    impl.made("a.txt", "one\ntwo\n\nfour")
    text = impl.tools.read_file("a.txt")
    assert text == FileText("a.txt", "     1\tone\n     2\ttwo\n     3\t\n     4\tfour", 1, 4, 4)
    assert impl.read("a.txt", 2, 2) == FileText("a.txt", "     2\ttwo\n     3\t", 2, 3, 4)
    assert impl.read("a.txt", 4) == FileText("a.txt", "     4\tfour", 4, 4, 4)
    assert impl.read("a.txt", 5) == FileText("a.txt", "", 5, 4, 4)
    assert impl.read("a.txt", 10**9, 1) == FileText("a.txt", "", 10**9, 10**9 - 1, 4)
    assert impl.read(str(impl.root / "a.txt")).end_line == 4


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\r\nb\r\n", ["a\r", "b\r"]),
        (b"\xff\n", ["\ufffd"]),
    ],
)
def test_the_last_line_may_lack_a_newline(impl: Tools, content: bytes, lines: list[str]) -> None:
    impl.made("a", content)
    text = impl.read("a")
    assert text.content.split("\n") == ([f"{number:6}\t{line}" for number, line in enumerate(lines, 1)] or [""])
    assert (text.end_line, text.total_lines) == (len(lines), len(lines))


def test_a_large_file_can_be_read_in_parts(impl: Tools) -> None:
    lines = [f"line {number} " + "x" * (number % 300) for number in range(1, 40_001)]
    impl.made("large", "\n".join(lines) + "\n")
    given, offset, calls, cut = list[str](), 1, 0, "more"
    while cut:
        text = impl.read("large", offset)
        cut = text.cut
        assert len(text.content) < 1_500_000
        assert text.start_line == offset
        given += [line.partition("\t")[2] for line in text.content.split("\n")]
        offset, calls = text.end_line + 1, calls + 1
        assert not cut or f"offset {offset}" in cut
    assert given == lines
    assert calls > 3
    assert impl.read("large", 39_999).content == f" 39999\t{lines[-2]}\n 40000\t{lines[-1]}"
    for first in (1, 7, 20_000, 33_333, 40_000):
        assert impl.read("large", first, 1).content == f"{first:6}\t{lines[first - 1]}"


def test_a_file_with_one_very_long_line_takes_bounded_memory(impl: Tools) -> None:
    with impl.made("sparse").open("r+b") as file:
        file.write(b"x" * 9000)
        file.truncate(1 << 40)
    before = monotonic()
    with closing(FileTools(impl.session, seconds=1.0)) as reader:
        text = reader.guarded_read_file("sparse")
        assert len(text.content) < 1_100_000
        assert text.cut
        assert text.total_lines is None
        with pytest.raises(TimeoutError):
            reader.guarded_read_file("sparse", 2)
    assert monotonic() - before < 3 * bounded_reader.SECONDS
    assert (impl.last().operation, impl.last().result) == ("read_file", "error")


def test_a_file_that_is_not_text_is_an_error_at_once(impl: Tools) -> None:
    impl.made("binary", b"\x7fELF\0\0")
    (impl.root / "directory").mkdir()
    os.mkfifo(impl.root / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(impl.root / "socket"))
    (impl.root / "loop").symlink_to("loop")
    (impl.root / "dangling").symlink_to("none")
    for path, error, number in (
        ("binary", UsageError, errno.EINVAL),
        ("directory", IsADirectoryError, errno.EISDIR),
        ("fifo", UsageError, errno.EINVAL),
        ("socket", UsageError, errno.EINVAL),
        ("loop", OSError, errno.ELOOP),
        ("dangling", FileNotFoundError, errno.ENOENT),
        ("none/at/all", FileNotFoundError, errno.ENOENT),
        ("binary/x", NotADirectoryError, errno.ENOTDIR),
    ):
        with pytest.raises(error) as raised:
            impl.read(path)
        assert isinstance(raised.value, OSError | UsageError)
        assert raised.value.errno == number, path
        entry = impl.last()
        assert (entry.path, entry.result, entry.governance) == (path, "error", "pass")
        assert entry.reason is not None
        # A UsageError says more than its number.
        assert (errno.errorcode[number] if isinstance(raised.value, OSError) else str(raised.value)) in entry.reason


@pytest.mark.parametrize(("offset", "limit"), [(0, None), (-1, None), (1, 0), (1, -5)])
def test_an_invalid_line_number_is_a_usage_error(impl: Tools, offset: int, limit: int | None) -> None:
    impl.made("a", "x")
    with pytest.raises(UsageError):
        impl.read("a", offset, limit)


# Confinement


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "a\0b", "/proc/self/environ"])
def test_a_path_out_of_the_workspace_is_refused(impl: Tools, path: str) -> None:
    for result in (
        impl.tools.read_file(path),
        impl.tools.write_file(path, "x"),
        impl.tools.list_files(path),
        impl.tools.search_files("x", path),
    ):
        assert denied(result).code is Code.OUTSIDE
    assert len([entry for entry in impl.guarded.entries() if entry.code == "OUTSIDE" and entry.kind == "intent"]) == 4
    assert impl.guarded.alerts()


def test_a_symlink_is_followed_only_inside_the_workspace(impl: Tools, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/file").write_text("secret\n")
    impl.made("d/a.txt", "inside\n")
    (impl.root / "in").symlink_to("d")
    (impl.root / "out").symlink_to(tmp_path / "secret")
    (impl.root / "far").symlink_to("../secret")
    (impl.root / "d/file").symlink_to(tmp_path / "secret/file")
    assert impl.read("in/a.txt").path == "d/a.txt"
    assert impl.last().path == "d/a.txt"
    for path in ("out/file", "far/file", "d/file"):
        assert denied(impl.tools.read_file(path)).code is Code.OUTSIDE
    for path in ("out", "far"):
        assert denied(impl.tools.list_files(path)).code is Code.OUTSIDE
        assert denied(impl.tools.search_files("secret", path)).code is Code.OUTSIDE
    assert impl.names(recursive=True) == ["d", "d/a.txt", "d/file", "far", "in", "out"]
    assert impl.lines("secret|inside") == ["d/a.txt:1:inside"]


def test_a_directory_swapped_for_a_symlink_reveals_no_outside_content(impl: Tools, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text("secret\n")
    impl.made("d/a.txt", "plain\n")
    done = threading.Event()

    def swap() -> None:
        one, other, link = impl.root / "d", impl.root / "e", impl.root / "l"
        link.symlink_to(outside)
        while not done.is_set():
            one.rename(other)
            link.rename(one)
            one.rename(link)
            other.rename(one)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(150):
            with suppress(OSError):
                assert "secret" not in impl.read("d/a.txt").content
        for _ in range(5):
            assert "secret" not in str(impl.tools.guarded_search_files("."))
    finally:
        done.set()
        thread.join()


def test_each_read_of_a_replaced_file_is_complete(impl: Tools) -> None:
    impl.made("a", "0\n" * 1000)
    done = threading.Event()

    def replace() -> None:
        number = 0
        while not done.is_set():
            number += 1
            impl.made(".new", f"{number}\n" * 1000).rename(impl.root / "a")

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(300):
            lines = impl.read("a").content.split("\n")
            assert (len(lines), len({line.partition("\t")[2] for line in lines})) == (1000, 1)
            assert "a" in impl.names()
    finally:
        done.set()
        thread.join()


def test_the_virtual_directory_is_not_visible(impl: Tools) -> None:
    impl.made(".bonobofs/policy.md", "forged\n")
    impl.made("d/.bonobofs/a", "forged\n")
    with pytest.raises(FileNotFoundError):
        impl.read(".bonobofs/policy.md")
    with pytest.raises(FileNotFoundError):
        impl.names(".bonobofs")
    assert impl.names(recursive=True) == ["d", "d/.bonobofs", "d/.bonobofs/a"]
    assert impl.lines("forged") == ["d/.bonobofs/a:1:forged"]


def test_a_mount_below_the_workspace_is_empty(impl: Tools) -> None:
    """A mount of the workspace shows it empty too."""
    place = impl.root / "d"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], capture_output=True, check=False)
    if os.geteuid() != 0:
        assert done.returncode != 0
        return
    assert done.returncode == 0, done.stderr
    try:
        (place / "a").write_text("elsewhere\n")
        assert impl.names(recursive=True) == ["d"]
        assert impl.lines("elsewhere") == []
        with pytest.raises(OSError, match="cross-device"):
            impl.read("d/a")
    finally:
        subprocess.run(["umount", str(place)], check=True)


# write_file


def test_parent_directories_are_created(impl: Tools) -> None:
    assert impl.tools.write_file("new/deep/a.py", "x = 1\n") == impl.root / "new/deep/a.py"
    assert impl.tools.write_file("new/deep/a.py", "x = 2\n") == impl.root / "new/deep/a.py"
    assert (impl.root / "new/deep/a.py").read_text() == "x = 2\n"
    with pytest.raises(FileExistsError):
        impl.tools.write_file("new/deep/a.py", "x = 3\n", createOnly=True)
    assert impl.tools.write_file("new/b.py", "", True) == impl.root / "new/b.py"
    told = [(entry.kind, entry.action, entry.result) for entry in impl.guarded.of("new/deep/a.py")]
    assert told == [
        ("intent", "create", "allowed"),
        ("outcome", "create", "allowed"),
        ("intent", "modify", "allowed"),
        ("outcome", "modify", "allowed"),
        ("intent", "modify", "allowed"),
        ("outcome", "modify", "error"),
    ]
    entry = impl.guarded.of("new/deep/a.py")[0]
    assert (entry.tool, entry.bytes, entry.governance, entry.lock) == ("write_file", 6, "pass", "none")


def test_a_write_is_checked_against_role_rules_and_leases_in_order(opened: Opened, home: Path) -> None:
    control = Tools(opened(policy=POLICY, role="control", agent="carol"))
    mute = Tools(opened(policy=POLICY, role="mute", agent="mia"))
    impl = Tools(opened(policy=POLICY, role="impl"))
    for tools, role in ((control, "control"), (mute, "mute")):
        refusal = denied(tools.tools.write_file("src/a.py", "x"))
        assert (refusal.code, refusal.reason) == (Code.ROLE, f"The role {role} does not have the tool write_file.")
        assert "impl" in refusal.instead
    assert denied(impl.tools.write_file("docs/a.md", "x")).reason == "The role impl may not change this path."
    assert denied(impl.tools.write_file("locked/a", "x")).code is Code.PROTECTED
    assert denied(impl.tools.write_file("build/a", "x")).code is Code.DEFAULT
    register("bob")
    done = bonobofs(
        *("lease", "acquire", "--agent", "bob", "--chain", "CHAIN-7", "--workspace", str(impl.root), "src/"),
        env={"BONOBOFS_HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    refusal = denied(impl.tools.write_file("src/a.py", "x"))
    assert (refusal.code, refusal.reason) == (Code.LEASED, "Another agent has leased this path.")
    assert "bob for chain CHAIN-7 until" in refusal.about
    entry = impl.last()
    assert (entry.governance, entry.lock, entry.tool, entry.result) == ("deny", "CHAIN-7", "write_file", "denied")
    assert not (impl.root / "src").exists()
    impl.made("src/b.py", "readable\n")
    assert impl.read("src/b.py").total_lines == 1
    assert (impl.last().governance, impl.last().lock) == ("pass", "CHAIN-7")
    for each in (control, mute, impl):
        each.tools.close()


# list_files


def test_a_directory_is_listed_by_name_followed_by_its_content(impl: Tools) -> None:
    impl.made("b/c/x.py", "123")
    impl.made("b/a.md", "1")
    impl.made("a.md")
    (impl.root / "link").symlink_to("b")
    os.mkfifo(impl.root / "pipe")
    listed = impl.tools.guarded_list_files()
    assert [(entry.path, entry.kind.value, entry.size) for entry in listed.entries] == [
        ("a.md", "file", 0),
        ("b", "directory", -1),
        ("link", "symlink", -1),
        ("pipe", "fifo", -1),
    ]
    assert impl.names(".", recursive=True) == ["a.md", "b", "b/a.md", "b/c", "b/c/x.py", "link", "pipe"]
    assert impl.names("b", recursive=True) == impl.names("link", recursive=True) == ["a.md", "c", "c/x.py"]
    assert impl.names("", "*.md", recursive=True) == ["a.md", "b/a.md"]
    assert impl.names("", "*.md") == ["a.md"]
    assert impl.names("", "b/*", recursive=True) == ["b/a.md", "b/c"]
    assert impl.names("", "**/*.py", recursive=True) == ["b/c/x.py"]
    assert impl.last().details == {"pattern": "**/*.py", "recursive": True}
    with pytest.raises(NotADirectoryError):
        impl.names("a.md")
    assert impl.names("", "*.{py,md}", recursive=True) == ["a.md", "b/a.md", "b/c/x.py"]
    assert impl.names("", "{b/{a,x},c}.md", recursive=True) == ["b/a.md"]
    assert impl.names("", "{b/,a.m?}", recursive=True) == ["a.md", "b", "b/a.md"]
    for pattern in ("", "a//b", "!a", "../*", "[", "{a,b}" * 9):
        with pytest.raises(UsageError, match="pattern"):
            impl.names("", pattern)


def test_repositories_and_scratch_are_entered_only_if_named(impl: Tools) -> None:
    for path in (".git/config", ".beads/x.db", "build/out.o", "sub/.git/HEAD", ".github/ci.yml"):
        impl.made(path, "needle\n")
    assert impl.names(recursive=True) == [".beads", ".git", ".github", ".github/ci.yml", "build", "sub", "sub/.git"]
    assert impl.names(".git", recursive=True) == ["config"]
    assert impl.names("build", recursive=True) == ["out.o"]
    assert impl.lines("needle") == [".github/ci.yml:1:needle"]
    assert impl.lines("needle", ".git") == [".git/config:1:needle"]
    assert impl.lines("needle", "build/out.o") == ["build/out.o:1:needle"]
    assert impl.read(".beads/x.db").end_line == 1


def test_unreadable_entries_are_left_out_of_the_listing(impl: Tools) -> None:
    impl.made("a", "needle\n")
    impl.made("z", "needle\n")
    at = os.open(impl.root, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=at)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    assert {"a", "z"} < set(impl.names(recursive=True))
    assert impl.lines("needle") == ["a:1:needle", "z:1:needle"]


def test_a_listing_of_100_000_files_is_truncated_with_a_notice(impl: Tools) -> None:
    for directory in range(100):
        made = impl.root / f"d{directory:02}"
        made.mkdir()
        for number in range(1000):
            os.close(os.open(made / f"f{number:03}.txt", os.O_CREAT | os.O_WRONLY))
    (impl.root / "d99/last.md").write_text("needle\n")
    before = monotonic()
    listed = impl.tools.guarded_list_files("", None, True)
    assert len(listed.entries) == bounded_reader.MOST_ENTRIES
    assert "first 10,000" in listed.cut
    found = impl.tools.guarded_list_files("", "*.md", True)
    assert found.cut or [entry.path for entry in found.entries] == ["d99/last.md"]
    matches = impl.tools.guarded_search_files("needle")
    assert matches.cut or (matches.searched == 100_001 and matches.matches[0].path == "d99/last.md")
    assert monotonic() - before < 6 * bounded_reader.SECONDS


# search_files


def test_matching_lines_are_found_with_their_numbers(impl: Tools) -> None:
    impl.made("src/a.py", "import os\n\ndef main():\n    return os\n")
    impl.made("src/b.md", "main\n")
    impl.made("vendor/c.py", "def main2(): pass\n")
    impl.made("binary", b"def main\0")
    assert impl.lines(r"def \w+\(") == ["src/a.py:3:def main():", "vendor/c.py:1:def main2(): pass"]
    assert impl.lines("main", "src") == ["src/a.py:3:def main():", "src/b.md:1:main"]
    assert impl.lines("main", include="*.md") == ["src/b.md:1:main"]
    assert impl.lines("main", exclude="vendor") == ["src/a.py:3:def main():", "src/b.md:1:main"]
    assert impl.lines("main", exclude="*.py") == ["src/b.md:1:main"]
    assert impl.lines("main", "src", include="*.py") == ["src/a.py:3:def main():"]
    assert impl.lines("^MAIN$") == []
    assert impl.lines("(?i)^MAIN$") == ["src/b.md:1:main"]
    assert impl.lines("main", "src/b.md") == ["src/b.md:1:main"]
    result = impl.tools.guarded_search_files("main")
    assert (result.searched, result.skipped) == (3, 1)
    entry = impl.last()
    assert (entry.tool, entry.details, entry.bytes) == ("search_files", {"query": "main"}, 32)


def test_non_utf8_names_and_long_lines_are_found(impl: Tools) -> None:
    (impl.root / os.fsdecode(b"\xff\n")).write_text("needle\n")
    impl.made("long", "x" * 100_000 + "needle" + "y" * 100_000)
    found = impl.tools.guarded_search_files("needle")
    assert [match.path for match in found.matches] == ["long", os.fsdecode(b"\xff\n")]
    assert len(found.matches[0].text) == 500
    assert "needle" in found.matches[0].text


@pytest.mark.parametrize("query", ["(", "[z-a]", "(?P<n>", "a{99999999999}", "", "x" * 1001, "a\nb", "(" * 900])
def test_an_invalid_expression_is_a_usage_error(impl: Tools, query: str) -> None:
    impl.made("a", "x")
    with pytest.raises(UsageError, match="query"):
        impl.tools.search_files(query)
    assert (impl.last().operation, impl.last().result) == ("search_files", "error")


def test_an_endless_search_is_aborted(impl: Tools) -> None:
    """Matches found before are returned. Other callers do not wait for it."""
    searcher = FileTools(impl.session, seconds=2.0)
    impl.made("a", "aaab\n")
    impl.made("b", "a" * 60 + "!\n")
    impl.made("c", "read meanwhile\n")
    found: list[FileMatches] = []
    evil = threading.Thread(target=lambda: found.append(searcher.guarded_search_files("^(a+)+(b|$)")))
    evil.start()
    assert impl.read("c").end_line == 1
    assert impl.tools.write_file("c", "written meanwhile\n") == impl.root / "c"
    assert evil.is_alive()
    evil.join()
    (result,) = found
    assert "reached its limit of time" in result.cut
    assert ([match.path for match in result.matches], result.searched) == (["a"], -1)
    assert (impl.last().operation, impl.last().result) == ("search_files", "allowed")


def test_an_expression_gets_limited_memory(impl: Tools) -> None:
    impl.made("a", "a" * 9_000_000 + "\n")
    impl.made("b", "needle\n")
    found = impl.tools.guarded_search_files(r"(?:(a)|(b)|(c))*needle|needle")
    assert found.cut or [match.path for match in found.matches] == ["b"]


def test_the_result_says_that_more_matches_exist(impl: Tools) -> None:
    impl.made("a", "x\n" * 999)
    assert len(impl.lines("x")) == 999
    impl.made("b", "x\nx\n")
    found = impl.tools.guarded_search_files("x")
    assert (len(found.matches), "first 1,000" in found.cut) == (1000, True)


def test_a_search_skips_files_over_the_limit(impl: Tools) -> None:
    with impl.made("huge").open("r+b") as file:
        file.write(b"needle\n" + b"x" * 9000)
        file.truncate(1 << 40)
    impl.made("small", "needle\n")
    found = impl.tools.guarded_search_files("needle")
    assert ([match.path for match in found.matches], found.searched, found.skipped) == (["small"], 1, 1)


# Roles and the record


def test_a_role_has_only_the_tools_in_its_list(opened: Opened) -> None:
    for role, allowed in (("impl", True), ("control", True), ("mute", False), ("unheard-of", False), ("agent", True)):
        guarded = Tools(opened(policy=POLICY, role=role, agent=f"as-{role}"))
        guarded.made("a", "x\n")
        for name, arguments in READING.items():
            result = getattr(guarded.tools, name)(*arguments)
            assert isinstance(result, FileText | FileList | FileMatches) == allowed, (role, name)
            entry = guarded.last()
            expected = ("allowed", "pass", None) if allowed else ("denied", "deny", "ROLE")
            assert (entry.result, entry.governance, entry.code) == expected
            assert (entry.operation, entry.tool, entry.guard) == (name, name, "file")
            if not allowed:
                with pytest.raises(Refused) as refused:
                    getattr(guarded.tools, f"guarded_{name}")(*arguments)
                assert (refused.value.errno, refused.value.decision.code) == (errno.EACCES, Code.ROLE)
        guarded.tools.close()


def test_every_read_call_is_one_entry_with_its_result(impl: Tools) -> None:
    impl.made("a.txt", "12345\n678\n")
    before = len(impl.guarded.entries())
    impl.read("a.txt", 2)
    impl.names()
    impl.lines("5")
    read, listed, found = impl.guarded.entries()[before:]
    assert (read.operation, read.path, read.bytes, read.details) == ("read_file", "a.txt", 3, {"offset": 2})
    assert (listed.operation, listed.path, listed.bytes) == ("list_files", "", 0)
    assert (found.operation, found.path, found.bytes) == ("search_files", "", 5)
    for entry in (read, listed, found):
        assert (entry.kind, entry.result, entry.governance, entry.lock) == ("event", "allowed", "pass", "none")
        assert entry.rule == f"role:impl:tools:{entry.operation}"
        assert (entry.agent, entry.action) == ("alice", "")


def test_a_call_returns_no_data_if_its_record_fails(program: Program, source: Path) -> None:
    """While the trail's file system is full, every tool is refused as UNRECORDED."""
    (source / "tests").mkdir()
    (source / "tests/a.py").write_text("secret\n")
    said = program(
        """
import resource
from bonobofs.guards import FileTools
with open_session(sys.argv[1], agent="alice", role="impl") as session:
    tools = FileTools(session)
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (session.guard.trail.path.stat().st_size, room[1]))
    print(tools.read_file("tests/a.py").code)
    print(tools.list_files("tests").code)
    print(tools.search_files("secret", "tests/a.py").code)
    print(tools.write_file("tests/a.py", "new").code)
    resource.setrlimit(resource.RLIMIT_FSIZE, room)
    print(tools.read_file("tests/a.py").content)
""",
        source,
    )
    assert said.splitlines() == [*["UNRECORDED"] * 4, "     1\tsecret"]
