"""`.bonobofs` in a mount, and the extended attribute that explains decisions.

Both are found by name and never listed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from bonobofs.policy.engine import callable_words, compile_policy, describe
from bonobofs.session import choose_policy
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.users import IS_ROOT, outcome
from tests.support.wait import until

POLICY: Final = """
default = "deny"
[[rule]]
name = "notes"
paths = ["notes/"]
suffixes = [".md"]
max_size = "100B"
executable = false
"""
FILES: Final = ["denials.jsonl", "policy.md", "scratch", "whoami.json"]
KEYS: Final = {"allowed", "code", "rule", "reason", "instead", "path", "operation"}
WHY: Final = "user.bonobofs.why"


@pytest.mark.parametrize("transport", ["kernel", "portable"])
def test_a_directory_explains_the_decision_for_a_name(own_place: MakePlace, transport: str) -> None:
    """`user.bonobofs.why.NAME` explains the decision about creating or writing NAME. It is never listed or set."""
    world = own_place(policy=POLICY, transport=transport)
    world.does(os.mkdir, world.source / "notes")
    (world.source / "notes/there.txt").touch()
    for name, code, operation in (
        ("new.md", None, "create_file"),
        ("new.txt", "SUFFIX", "create_file"),
        ("there.txt", "SUFFIX", "write_file"),
        ("a" * 230 + ".md", None, "create_file"),
    ):
        answer = json.loads(world.does(os.getxattr, world.path / "notes", f"{WHY}.{name}"))
        assert (answer["code"], answer["operation"], answer["path"]) == (code, operation, f"notes/{name}")
    reserved = json.loads(world.does(os.getxattr, world.path, f"{WHY}..bonobofs"))
    assert reserved["code"] == "PROTECTED"
    for path, name, number in (
        ("notes", "a/b", errno.EINVAL),
        ("notes", "", errno.EINVAL),
        ("notes", "..", errno.EINVAL),
        ("notes", "a" * 300, errno.ERANGE),
        ("notes/there.txt", "x", errno.ENOTDIR),
    ):
        assert world.does(outcome, os.getxattr, world.path / path, f"{WHY}.{name}") == number
    assert world.does(outcome, os.setxattr, world.path / "notes", f"{WHY}.new.md", b"x") == errno.EPERM
    assert world.does(os.listxattr, world.path / "notes") == []


def _denials(world: Place) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (world.path / ".bonobofs/denials.jsonl").read_text().splitlines()]


def test_a_denial_has_the_time_at_which_it_was_made(own_place: MakePlace) -> None:
    """UTC, to the millisecond."""
    world = own_place(policy='default = "deny"\n')
    before = datetime.now(UTC)
    assert world.does(outcome, (world.path / "new").touch) == errno.EACCES
    stamp = world.does(_denials, world)[-1]["timestamp"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", stamp)
    assert before - timedelta(milliseconds=1) <= datetime.fromisoformat(stamp) <= datetime.now(UTC)


def test_the_virtual_directory_is_reachable_by_name_and_lists_its_files(place: MakePlace) -> None:
    """`.bonobofs` is a directory with four files, read-only for every user."""
    world = place(policy=POLICY)

    def story() -> None:
        at = world.path / ".bonobofs"
        assert sorted(os.listdir(at)) == FILES
        assert stat.filemode(at.stat().st_mode) == "dr-xr-xr-x"
        for entry in os.scandir(at):
            assert stat.filemode(entry.stat().st_mode) == "-r--r--r--"
            assert entry.is_file()
            assert Path(entry.path).stat().st_size == len(Path(entry.path).read_bytes())
        assert outcome((at / "other").stat) == errno.ENOENT
        assert not (world.path / "notes/.bonobofs").exists()

    world.does(story)


def test_a_refused_change_of_the_virtual_directory_is_what_why_says(own_place: MakePlace) -> None:
    world = own_place(policy=POLICY)

    def story() -> None:
        told = json.loads(os.getxattr(world.path, f"{WHY}..bonobofs"))
        assert outcome((world.path / ".bonobofs/more.md").touch) == errno.EPERM
        refused = json.loads((world.path / ".bonobofs/denials.jsonl").read_text().splitlines()[-1])
        assert refused["path"] == ".bonobofs/more.md"
        for key in ("code", "rule", "reason", "instead"):
            assert refused[key] == told[key]

    world.does(story)


def test_tree_walks_do_not_see_the_virtual_directory(own_place: MakePlace) -> None:
    """It is not listed, so ls, find, cp, tar and git ignore it."""
    world = own_place()

    def story() -> None:
        at = world.path
        (at / "file").write_text("content")
        assert (at / ".bonobofs/policy.md").exists()
        assert os.listdir(at) == ["file"]
        assert [entry.name for entry in os.scandir(at)] == ["file"]

        def run(*command: str) -> str:
            git = {"GIT_DIR": str(world.source.parent / "git"), "GIT_WORK_TREE": str(at), "GIT_CONFIG_NOSYSTEM": "1"}
            environment = {**os.environ, "HOME": str(world.home), **git}
            return subprocess.run(command, cwd=at, check=True, capture_output=True, text=True, env=environment).stdout

        assert run("ls", "-A").split() == ["file"]
        assert run("find", ".").split() == [".", "./file"]
        assert ".bonobofs" not in run("tar", "-cvf", "/dev/null", ".")
        shutil.copytree(at, world.source.parent / "copied", symlinks=True)
        assert os.listdir(world.source.parent / "copied") == ["file"]
        run("git", "init", "-q")
        assert run("git", "status", "--porcelain", "-uall").split() == ["??", "file"]
        assert run("git", "clean", "-ndx").split() == ["Would", "remove", "file"]

    world.does(story)


def test_the_virtual_directory_cannot_be_changed(place: MakePlace) -> None:
    """Each attempt to change it fails and is recorded, also under a policy that permits everything."""
    world = place()

    def story() -> dict[str, object]:
        at = world.path
        inside = at / ".bonobofs"
        (at / "file").touch()
        (at / "dir").mkdir()
        before = (inside / "policy.md").read_bytes()
        calls: dict[str, Callable[[], object]] = {
            "create": (inside / "new").touch,
            "write": lambda: (inside / "policy.md").write_text("all is allowed"),
            "append": lambda: os.close(_appended(inside / "policy.md")),
            "truncate": lambda: os.truncate(inside / "policy.md", 0),
            "unlink": lambda: os.unlink(inside / "policy.md"),
            "rmdir": inside.rmdir,
            "mkdir": (inside / "new").mkdir,
            "make it": inside.mkdir,
            "rename away": lambda: inside.rename(at / "moved"),
            "rename a file": lambda: (inside / "policy.md").rename(at / "moved"),
            "rename into": lambda: (at / "file").rename(inside / "moved"),
            "rename onto a file": lambda: (at / "file").rename(inside / "policy.md"),
            "rename onto it": lambda: (at / "dir").rename(inside),
            "link": lambda: os.link(inside / "policy.md", at / "linked"),
            "link into": lambda: os.link(at / "file", inside / "linked"),
            "symlink": lambda: (inside / "link").symlink_to("x"),
            "chmod": lambda: (inside / "policy.md").chmod(0o777),
            "chmod of it": lambda: inside.chmod(0o777),
            "chown": lambda: os.chown(inside / "policy.md", os.geteuid(), os.getegid()),
            "utimens": lambda: os.utime(inside / "policy.md", (1, 1)),
            "setxattr": lambda: os.setxattr(inside / "policy.md", "user.x", b"x"),
        }
        found = {what: outcome(call) for what, call in calls.items()}
        assert (inside / "policy.md").read_bytes() == before
        assert sorted(os.listdir(inside)) == FILES
        assert sorted(os.listdir(world.source)) == ["dir", "file"]
        return found

    found = world.does(story)
    allowed = {errno.EPERM, errno.EACCES, errno.EXDEV, errno.EEXIST, errno.ENOTEMPTY, errno.EBUSY}
    assert {what: code for what, code in found.items() if code not in allowed} == {}
    if IS_ROOT and world.user is None:
        exceptions = {"make it": errno.EEXIST}
        assert {what: code for what, code in found.items() if code != exceptions.get(what, errno.EPERM)} == {}
    assert [entry for entry in world.entries() if entry.result == "denied" and entry.code == "PROTECTED"]


def _appended(path: Path) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, b"more")
    except OSError:
        os.close(fd)
        raise
    return fd


def test_denials_are_fresh_at_each_open(own_place: MakePlace) -> None:
    """The last refusals are readable at once, the newest last, in the one schema."""
    world = own_place(policy=POLICY)

    def story() -> None:
        assert _denials(world) == []
        assert outcome((world.path / "one").touch) == errno.EACCES
        (first,) = _denials(world)
        assert set(first) >= KEYS
        assert (first["allowed"], first["code"], first["path"]) == (False, "DEFAULT", "one")
        assert first["operation"] == "create_file"
        assert first["reason"]
        assert first["instead"]
        for number in range(5):
            assert outcome((world.path / f"dir-{number}").mkdir) == errno.EACCES
            assert _denials(world)[-1]["path"] == f"dir-{number}"
        assert [denial["operation"] for denial in _denials(world)] == ["create_file", *["mkdir"] * 5]

    world.does(story)


def test_an_open_reader_sees_one_whole_document(own_place: MakePlace) -> None:
    """A reader that has the file open sees its old content, however many refusals follow."""
    world = own_place(policy=POLICY)

    def story() -> None:
        outcome((world.path / "one").touch)
        with (world.path / ".bonobofs/denials.jsonl").open("rb", buffering=0) as file:
            start = file.read(10)
            for number in range(50):
                outcome((world.path / f"more-{number}").touch)
            _denials(world)
            (denial,) = (start + file.read()).splitlines()
            assert json.loads(denial)["path"] == "one"
        assert len(_denials(world)) == 51

    world.does(story)


def test_only_the_last_refusals_are_kept(own_place: MakePlace) -> None:
    """A program with many refusals fills neither the memory nor the file."""
    world = own_place(policy=POLICY)

    def story() -> None:
        for number in range(150):
            outcome((world.path / f"file-{number}").touch)
        denials = _denials(world)
        assert [denial["path"] for denial in denials] == [f"file-{number}" for number in range(50, 150)]

    world.does(story)


def test_whoami_shows_the_agent(own_place: MakePlace) -> None:
    """Agent, UUID, team, role, chain, issue, session, source, policy digest and permitted calls, and nothing else."""
    world = own_place(policy=POLICY)
    who = json.loads(world.does((world.path / ".bonobofs/whoami.json").read_text))
    made = world.session
    assert who == {
        "agent": "alice",
        "agent_id": made.agent_id,
        "team": None,
        "role": made.role,
        "chain": None,
        "issue": None,
        "session": made.session,
        "source": str(world.source),
        "policy": made.policy.digest,
        "policy_origin": made.policy.origin,
        "socket": str(world.home / "sessions" / made.session / "inside/guard.sock"),
        **callable_words(compile_policy({}), "agent"),
    }


def test_policy_md_shows_what_may_be_written(own_place: MakePlace) -> None:
    """The text is the engine's own description for the role."""
    world = own_place(policy=POLICY)
    chosen = choose_policy(world.home, Path(world.session.policy.origin))
    text = world.does((world.path / ".bonobofs/policy.md").read_text)
    assert text == describe(chosen.compiled, world.session.role)
    assert "notes" in text
    assert ".md" in text


def test_a_bonobofs_directory_of_the_source_is_hidden(own_place: MakePlace) -> None:
    """A `.bonobofs` of the source is not shown, reached or changed under any name."""
    world = own_place()

    def story() -> None:
        own = world.source / ".bonobofs"
        own.mkdir()
        (own / "policy.md").write_text("the source's own")
        (own / "secret").write_text("the source's own")
        os.link(own / "secret", world.source / "linked")
        at = world.path
        assert "the source's own" not in (at / ".bonobofs/policy.md").read_text()
        assert not (at / ".bonobofs/secret").exists()
        assert os.listdir(at) == ["linked"]
        assert outcome((at / "linked").write_text, "changed") == errno.EPERM
        assert outcome((at / ".bonobofs").rename, at / "moved") == errno.EPERM
        assert outcome(shutil.rmtree, at / ".bonobofs") in (errno.EPERM, errno.EACCES)
        assert outcome((at / "link").symlink_to, ".bonobofs/secret") == errno.EPERM
        assert (own / "policy.md").read_text() == (own / "secret").read_text() == "the source's own"

    world.does(story)


def test_a_bonobofs_file_of_the_source_is_hidden(own_place: MakePlace) -> None:
    world = own_place()

    def story() -> None:
        (world.source / ".bonobofs").write_text("a file")
        assert sorted(os.listdir(world.path / ".bonobofs")) == FILES
        assert os.listdir(world.path) == []
        assert (world.source / ".bonobofs").read_text() == "a file"

    world.does(story)


def _why(path: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(os.getxattr(path, WHY))
    return answer


def test_the_attribute_explains_whether_a_path_may_be_written(own_place: MakePlace) -> None:
    """`user.bonobofs.why` of a file or directory is a decision in the one schema, and matches what happens."""
    world = own_place(policy=POLICY)

    def story() -> None:
        (world.source / "notes").mkdir()
        (world.source / "other").mkdir()
        for name in ("notes/a.md", "notes/a.txt", "other/a.md"):
            (world.source / name).write_text("content")
        (world.source / "notes/large.md").write_text("x" * 101)
        for name, code in (
            ("notes", None),
            ("notes/a.md", None),
            ("notes/a.txt", "SUFFIX"),
            ("notes/large.md", "SIZE"),
            ("other", "DEFAULT"),
            ("other/a.md", "DEFAULT"),
        ):
            answer = _why(world.path / name)
            assert set(answer) >= KEYS
            assert (answer["allowed"], answer["code"], answer["path"]) == (code is None, code, name)
            if (world.source / name).is_file():
                wrote = outcome(lambda name=name: _append(world.path / name))
                assert (wrote is None) == (code is None)
        assert _why(world.path)["path"] == ""
        fd = os.open(world.path / "notes/a.md", os.O_RDONLY)
        assert json.loads(os.getxattr(fd, WHY))["allowed"]
        os.close(fd)

    world.does(story)


def _append(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(b"x")


def test_the_attribute_is_not_listed_and_asking_is_not_recorded(own_place: MakePlace) -> None:
    """Programs that copy attributes do not copy it, and reading it is not recorded as a refusal."""
    world = own_place(policy=POLICY)

    def story() -> None:
        (world.source / "file").write_text("content")
        assert not _why(world.path / "file")["allowed"]
        assert os.listxattr(world.path / "file") == []
        assert os.listxattr(world.path) == []
        shutil.copy2(world.path / "file", world.source / "copied")
        assert _denials(world) == []

    world.does(story)
    assert [entry for entry in world.entries() if entry.result == "denied"] == []


def test_the_attribute_cannot_be_set_or_removed(own_place: MakePlace) -> None:
    """The whole namespace is read-only: EPERM, also under a policy that permits everything, and the source is
    unchanged.
    """
    world = own_place()

    def story() -> None:
        (world.path / "file").touch()
        (world.path / "dir").mkdir()
        for path in (world.path / "file", world.path / "dir", world.path):
            for name in (WHY, "user.bonobofs.other"):
                assert outcome(os.setxattr, path, name, b"allowed") == errno.EPERM
                assert outcome(os.removexattr, path, name) == errno.EPERM
        os.setxattr(world.path / "file", "user.bonobofsx", b"free")
        assert os.listxattr(world.source / "file") == ["user.bonobofsx"]
        assert os.listxattr(world.source / "dir") == []

    world.does(story)


def test_a_source_cannot_forge_the_attribute(own_place: MakePlace) -> None:
    """The mount does not show the source's attribute of that name."""
    world = own_place(policy=POLICY)

    def story() -> None:
        (world.source / "file").touch()
        os.setxattr(world.source / "file", WHY, b'{"allowed": true}')
        assert _why(world.path / "file")["allowed"] is False

    world.does(story)


def test_a_value_that_does_not_fit_is_erange(own_place: MakePlace) -> None:
    """getxattr with a small buffer is ERANGE; with none it returns the size, as for any attribute."""
    world = own_place(policy=POLICY)

    def story() -> None:
        (world.source / "file").touch()
        asked = subprocess.run(
            ["getfattr", "-n", WHY, "--only-values", world.path / "file"], capture_output=True, check=True
        )
        assert json.loads(asked.stdout)["code"] == "DEFAULT"

    world.does(story)


@pytest.mark.parametrize("count", [300])
def test_documents_of_many_readers_are_dropped(own_place: MakePlace, count: int) -> None:
    """Documents that no program has open are dropped: the server does not grow with refusals and lookups."""
    world = own_place(policy=POLICY)

    def look(times: int) -> None:
        for number in range(times):
            outcome((world.path / f"{number}-{'x' * 200}").touch)
            (world.path / ".bonobofs/denials.jsonl").read_bytes()

    def resident() -> int:
        return int(Path(f"/proc/{world.pid}/statm").read_text().split()[1]) * 4096

    look(150)
    before = resident()
    look(count)
    until(lambda: resident() - before < 8 << 20, "what was read is let go")
