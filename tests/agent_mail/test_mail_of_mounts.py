"""From a mount to the thread and back: the complete path, with the daemon as a process and real servers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from bonobofs import daemon, session
from bonobofs.agent_mail.letter import Posted, parse_subject
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.daemon.main import Daemon
from bonobofs.session.mail_settings import Settings, open_mailbox, settings_of
from bonobofs.state.home import home_id, read_document, session_directory
from bonobofs.system.processes import send, wait_for_end
from tests.agent_mail.servers import TOKEN, Fork, Original, running
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World, bonobofs


@pytest.fixture(autouse=True)
def _no_daemon_is_left(home: Path) -> Iterator[None]:
    yield
    daemon.stop(home)


def policy(server: Fork | Original, tmp_path: Path, more: str = "") -> str:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return (
        f'{ALLOW_ALL}[[protect]]\npaths = ["kept"]\n[agent_mail]\nurl = "{server.url}"\n'
        f'token_file = "{tmp_path}/token"\nproject = "/srv/{uuid.uuid4()}"\n{more}'
    )


def settings(world: World) -> Settings:
    found = settings_of(world.home, home_id(world.home), world.session)
    assert found is not None
    return found


def letters(world: World) -> list[Posted]:
    found = [parse_subject(sent.subject) for sent in open_mailbox(world.home, settings(world)).sent()]
    return [one for one in found if one is not None and one.session == world.session.session]


def refuse(world: World) -> None:
    with pytest.raises(OSError, match="Read-only"):
        (world.path / "kept").touch()


def all_is_posted(world: World) -> bool:
    """Whether the last letter names the last entry."""
    return [one.last for one in letters(world)][-1:] == [len(world.trail.read_bytes().splitlines())]


def assert_whole(world: World) -> None:
    """Each entry of the trail is in one letter, to its end."""
    found = letters(world)
    assert [one.first for one in found] == [1, *(one.last + 1 for one in found[:-1])]
    assert all_is_posted(world)


def test_a_denial_in_a_mount_is_sent_at_once(
    home: Path, mounted: Mounted, server: Fork | Original, tmp_path: Path
) -> None:
    """At the end of the session the complete record is in the thread, in both dialects."""
    world = mounted(policy=policy(server, tmp_path))
    daemon.start(home)
    (world.path / "file").write_text("text")
    refuse(world)
    until(lambda: letters(world), "the refusal is posted", seconds=30)
    world.umount()
    until(
        lambda: letters(world)[-1].last == len(world.trail.read_bytes().splitlines()), "the end is posted", seconds=30
    )
    assert_whole(world)
    assert bonobofs("audit", "verify", "--witness").returncode == 0


def test_during_an_outage_mounts_continue_and_entries_are_sent_later(
    home: Path, mounted: Mounted, tmp_path: Path
) -> None:
    """The daemon reports the problem, and continues without intervention."""
    server = Original()
    world = mounted(policy=policy(server, tmp_path))
    daemon.start(home)
    refuse(world)
    until(lambda: "cannot be reached" in daemon.status(home).problems.get("mail", ""), "it is reported", seconds=30)
    (world.path / "file").write_text("text")
    with running(server):
        world.umount()
        until(lambda: all_is_posted(world), "all is posted", seconds=60)
        assert_whole(world)


def test_a_courier_killed_after_sending_sends_no_entry_twice(
    home: Path, mounted: Mounted, original: Original, tmp_path: Path
) -> None:
    """The letter is in the thread, and only reading it back reveals that."""
    world = mounted(policy=policy(original, tmp_path))
    for number in range(3):
        found = daemon.start(home)
        original.when_stored = partial(os.kill, found.pid, signal.SIGKILL)
        refuse(world)
        assert wait_for_end(found.pid, found.starttime, 60)
        assert len(letters(world)) == number + 1
    daemon.start(home)
    world.umount()
    until(lambda: all_is_posted(world), "all is posted", seconds=60)
    assert_whole(world)


@pytest.mark.timeout(400)
def test_a_courier_killed_at_any_moment_sends_each_entry_once(
    home: Path, mounted: Mounted, fork: Fork, tmp_path: Path
) -> None:
    """To the real server, during changes."""
    world = mounted(policy=policy(fork, tmp_path))
    for number in range(4):
        (world.path / f"file-{number}").write_text("text")
        before = len(letters(world))
        refuse(world)
        found = daemon.start(home)
        until(lambda before=before: len(letters(world)) > before, "a letter arrives", seconds=60)  # type: ignore[misc]
        refuse(world)
        os.kill(found.pid, signal.SIGKILL)
        assert wait_for_end(found.pid, found.starttime, 30)
    daemon.start(home)
    world.umount()
    until(lambda: all_is_posted(world), "all is posted", seconds=60)
    assert_whole(world)


def test_the_witness_reveals_a_trail_rewritten_with_its_head(
    home: Path, mounted: Mounted, server: Fork | Original, tmp_path: Path
) -> None:
    """The state directory is consistent, and the letters differ. A session without any file is found too."""
    text = policy(server, tmp_path)
    (home / "policy.toml").write_text(text)
    worlds = [mounted(policy=text), mounted(policy=text), mounted(policy=text)]
    daemon.start(home)
    for world in worlds:
        refuse(world)
        world.umount()
    kept, redone, gone = worlds
    until(lambda: all(all_is_posted(world) for world in worlds), "all is posted", seconds=60)
    daemon.stop(home)
    rewrite(redone)
    assert bonobofs("audit", "verify").returncode == 0
    for path in (gone.trail, gone.head):
        path.unlink()
    shutil.rmtree(home / "sessions" / gone.session.session)
    assert bonobofs("audit", "verify").returncode == 0
    told = bonobofs("audit", "verify", "--witness", "--json")
    assert told.returncode == 1
    found = {report["session"]: [one["what"] for one in report["findings"]] for report in json.loads(told.stdout)}
    assert found == {
        kept.session.session: [],
        redone.session.session: ["witness"],
        gone.session.session: ["witness"],
    }


def test_a_name_is_registered_once_by_many_at_the_same_time(
    mounted: Mounted, original: Original, tmp_path: Path
) -> None:
    """The server returns the token of a name only once; the other callers wait until it is stored."""
    world = mounted(policy=policy(original, tmp_path))
    wanted = settings(world)
    with ThreadPoolExecutor(6) as pool:
        names = [pool.submit(open_mailbox(world.home, wanted).open) for _ in range(6)]
        assert {name.result() for name in names} == {open_mailbox(world.home, wanted).open()}


def test_a_witness_without_letters_confirms_nothing(
    home: Path, mounted: Mounted, original: Original, tmp_path: Path
) -> None:
    """The courier has sent no letter yet, or the letters name another state directory."""
    world = mounted(policy=policy(original, tmp_path))
    refuse(world)
    told = bonobofs("audit", "verify", "--witness")
    assert told.returncode == 1
    assert "it confirms nothing" in told.stderr
    daemon.start(home)
    world.umount()
    until(lambda: all_is_posted(world), "all is posted", seconds=60)
    daemon.stop(home)
    later = mounted(policy=None)
    told = bonobofs("audit", "verify", "--witness")
    assert (told.returncode, told.stderr) == (0, "")
    later.umount()
    (home / "home.id").unlink()
    told = bonobofs("audit", "verify", "--witness")
    assert told.returncode == 1
    assert f"has no letter of session {world.session.session}" in told.stderr


def rewrite(world: World) -> None:
    """The owner of the state directory can do this: write another history with a valid chain and head."""
    identity = TrailIdentity(world.session.session, world.session.agent, world.session.agent_id)
    count = len(world.trail.read_bytes().splitlines())
    world.trail.unlink()
    world.head.unlink()
    trail = Trail.create(world.trail, world.head, identity)
    for _ in range(count - 1):
        trail.event("nothing")
    trail.close()


def test_a_corrected_token_is_read(home: Path, mounted: Mounted, original: Original, tmp_path: Path) -> None:
    """Without a restart."""
    text = policy(original, tmp_path)
    (tmp_path / "token").write_text("another")
    world = mounted(policy=text)
    daemon.start(home)
    refuse(world)
    until(lambda: "answers 401" in daemon.status(home).problems.get("mail", ""), "it is reported", seconds=30)
    (tmp_path / "token").write_text(TOKEN)
    until(lambda: letters(world), "the refusal is posted", seconds=60)


def test_a_hanging_server_delays_no_other_mail(
    home: Path, mounted: Mounted, original: Original, tmp_path: Path
) -> None:
    """It does not delay the end of the daemon either. Interrupted letters are found again."""
    with running(Original()) as hanging:
        (tmp_path / "one").mkdir()
        stuck, other = mounted(policy=policy(hanging, tmp_path / "one")), mounted(policy=policy(original, tmp_path))
        hanging.hangs.set()
        refuse(stuck)
        found = daemon.start(home)
        until(lambda: "mail" in daemon.status(home).problems, "it has begun", seconds=30)
        refuse(other)
        until(lambda: letters(other), "the other's refusal is posted", seconds=10)
        until(lambda: ended(found), "it ends after two requests", seconds=10)
        hanging.hangs.clear()
        daemon.start(home)
        stuck.umount()
        until(lambda: all_is_posted(stuck), "all is posted", seconds=60)
        assert_whole(stuck)


def ended(found: Daemon) -> bool:
    send(found.pid, found.starttime, signal.SIGTERM)
    return wait_for_end(found.pid, found.starttime, 0.2)


def test_a_policy_changed_and_changed_back_sends_no_entry_twice(
    home: Path, mounted: Mounted, original: Original, tmp_path: Path
) -> None:
    """During one session, with one daemon."""
    file = tmp_path / "team.toml"
    file.write_text(text := policy(original, tmp_path))
    world = mounted(policy=file)
    daemon.start(home)
    for number in range(4):
        carries = ("all", "denials")[number % 2]
        file.write_text(f'{text}carry = "{carries}"\n')
        until(lambda carries=carries: in_force(world) == carries, "it is in force", seconds=30)  # type: ignore[misc]
        refuse(world)
        until(lambda number=number: len(letters(world)) > number, "it is posted", seconds=30)  # type: ignore[misc]
    world.umount()
    until(lambda: all_is_posted(world), "all is posted", seconds=60)
    assert_whole(world)


def in_force(world: World) -> str:
    return str(
        read_document(session_directory(world.home, world.session.session) / "policy.json")["agent_mail"]["carry"]
    )


def test_a_token_is_in_its_file_only(home: Path, mounted: Mounted, original: Original, tmp_path: Path) -> None:
    """Not in a log and not in the process list. Texts of a server cannot control a terminal."""
    original.status, original.detail = 500, "\x1b[2J your header was {}"
    world = mounted(policy=policy(original, tmp_path))
    daemon.start(home)
    refuse(world)
    until(lambda: "500" in daemon.status(home).problems.get("mail", ""), "it is reported", seconds=30)
    (tmp_path / "token").write_text(f"{TOKEN} {TOKEN}\n{TOKEN}")
    until(lambda: "one word" in daemon.status(home).problems.get("mail", ""), "that is reported", seconds=60)
    (tmp_path / "token").write_text(TOKEN)
    original.status = 200
    until(lambda: letters(world), "the refusal is posted", seconds=60)
    told = bonobofs("serve", "--status", "--json").stdout
    daemon.stop(home)
    kept = {path.name: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert b"500" in kept["serve.log"]
    assert b"\x1b" not in kept["serve.log"]
    assert [name for name, data in kept.items() if TOKEN.encode() in data] == []
    assert TOKEN not in told
    own = original.agents.values()
    assert [name for name, data in kept.items() if any(one.encode() in data for one in own)] == ["agent_mail.json"]
    assert (home / "agent_mail.json").stat().st_mode & 0o077 == 0


def test_the_record_of_a_source_with_a_non_utf8_name_is_sent(
    home: Path, mounted: Mounted, original: Original, tmp_path: Path
) -> None:
    """It does not delay the records of other sources."""
    odd = tmp_path / os.fsdecode(b"odd-\xff")
    odd.mkdir()
    (tmp_path / "token").write_text(TOKEN)
    world = mounted(
        source=odd,
        policy=f'{ALLOW_ALL}[[protect]]\npaths = ["kept"]\n[agent_mail]\nurl = "{original.url}"\n'
        f'token_file = "{tmp_path}/token"\nmirror_reservations = true\n',
    )
    daemon.start(home)
    refuse(world)
    until(lambda: letters(world), "the refusal is posted", seconds=30)
    until(lambda: daemon.status(home).problems.get("reservations") == "", "nothing is in the way", seconds=30)


def test_a_damaged_policy_delays_no_other_mail(
    home: Path, mounted: Mounted, original: Original, tmp_path: Path
) -> None:
    """It is reported."""
    damaged, other = mounted(policy=policy(original, tmp_path)), mounted(policy=policy(original, tmp_path))
    damaged.umount()
    (session_directory(home, damaged.session.session) / "policy.json").write_text('{"agent_mail": {"url": 5}}')
    daemon.start(home)
    refuse(other)
    until(lambda: letters(other), "the refusal is posted", seconds=30)
    until(lambda: "is not the policy" in daemon.status(home).problems.get("mail", ""), "it is reported", seconds=30)


def test_verify_without_a_witness_is_a_usage_error(home: Path, mounted: Mounted) -> None:
    """It is not a finding."""
    world = mounted(policy=ALLOW_ALL)
    world.umount()
    told = bonobofs("audit", "verify", "--witness")
    assert told.returncode == 2
    assert "[agent_mail]" in told.stderr
    assert session.statuses(home) == []


def test_an_unreachable_witness_is_a_failure(home: Path, mounted: Mounted, tmp_path: Path) -> None:
    """It is not treated as a witness that agrees."""
    world = mounted(policy=policy(Original(), tmp_path))
    world.umount()
    told = bonobofs("audit", "verify", "--witness")
    assert told.returncode == 1
    assert "cannot be reached" in told.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('url = "http://:secret@host/"', "without a user"),
        ('url = "http://host/é"', "is no server"),
        ('url = "ftp://host/"', "is no server"),
        ('url = "http://user@host/"', "without a user"),
        ('url = "http://host/"\ntoken_file = "token"', "is not an absolute path"),
        ('url = "http://host/"\nsender = "#ops"', "is not a name of Agent Mail"),
        ('url = "http://host/"\ncarry = "some"', "'all' or 'denials'"),
        ('url = "http://host/"\ncolour = "red"', "unknown key"),
        ("carry = 'all'", "agent_mail.url: is missing"),
    ],
)
def test_invalid_mail_settings_are_refused(tmp_path: Path, line: str, said: str) -> None:
    """When the policy is loaded, with the key."""
    file = tmp_path / "policy.toml"
    file.write_text(f"[agent_mail]\n{line}\n")
    told = bonobofs("policy", "check", file)
    assert told.returncode == 1
    assert said in told.stderr
