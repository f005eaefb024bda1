"""The courier sends every entry to the thread once, also after failures of the server or of the courier."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.agent_mail.courier import Courier, CourierCursors, Pace, TrailCursor
from bonobofs.agent_mail.letter import MOST_CHARACTERS, MOST_ENTRIES, Letter, Posted, compare, parse_subject
from bonobofs.agent_mail.mail_client import Address, Mailbox, MailServer
from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.errors import MailError, StateError
from bonobofs.policy.decision import Code, Denied
from bonobofs.policy.request import Operation, WorkspacePath
from tests.agent_mail.servers import TOKEN, Fork, Original, answering, running

HOME = str(uuid.uuid4())
DENIED = Denied(Code.SUFFIX, "artifacts", "Only .md.", "Write .md.", WorkspacePath("a.sh"), Operation.CREATE_FILE)
AT_ONCE = Pace(digest=0.0, head=0.0)


class Kept(CourierCursors):
    """Cursors in memory, which can fail as a database can."""

    def __init__(self) -> None:
        self.cursor: dict[str, TrailCursor] = {}
        self.down = False

    def load(self, _courier: str) -> dict[str, TrailCursor]:
        return dict(self.cursor)

    def save(self, _courier: str, session: str, cursor: TrailCursor) -> None:
        if self.down:
            raise StateError("the database is down")
        self.cursor[session] = cursor


class Tokens(dict[str, str]):
    """Tokens of senders in memory."""

    def find(self, address: Address) -> str | None:
        return self.get(address.sender)

    def keep(self, address: Address, token: str) -> None:
        self[address.sender] = token

    def registration(self, _: Address) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Desk:
    """A courier's surroundings: trails, cursors, a mailbox; couriers come and go."""

    def __init__(self, home: Path, url: str, project: str, to: tuple[str, ...] = ()) -> None:
        self.trails = home / "trails"
        self.kept = Kept()
        self.told: list[str] = []
        self.tokens = Tokens()
        self.address = Address(url, project, f"guard-{uuid.uuid4().hex[:8]}", to)

    def mailbox(self) -> Mailbox:
        return Mailbox(MailServer(self.address.url, TOKEN, 5.0), self.address, self.tokens)

    def courier(self, *, only_denials: bool = False, pace: Pace = AT_ONCE) -> Courier:
        return Courier(
            "mail", self.mailbox(), self.kept, HOME, only_denials=only_denials, pace=pace, warn=self.told.append
        )

    def trail(self) -> Trail:
        session = str(uuid.uuid4())
        return Trail.create(
            self.trails / f"{session}.jsonl", self.trails / f"{session}.head", TrailIdentity(session, "alice", "a-uuid")
        )

    def run(self, courier: Courier) -> int:
        return courier.run({path.stem: path for path in sorted(self.trails.glob("*.jsonl"))})

    def parse_subject(self) -> list[Posted]:
        found = [parse_subject(sent.subject) for sent in self.mailbox().sent()]
        return [one for one in found if one is not None]


def change(trail: Trail, *paths: str) -> None:
    for path in paths:
        trail.outcome(trail.intent(Operation.CREATE_FILE, path, "create", "code"), Operation.CREATE_FILE, path)
    trail.flush()


def test_mailboxes_of_one_sender_may_open_concurrently(tmp_path: Path, fork: Fork, project: str) -> None:
    """The courier, the mirror and `audit verify --witness` each open one. The server refuses one of two."""
    for _ in range(3):
        desk = Desk(tmp_path, fork.url, project)
        start = threading.Barrier(4)

        def opened(desk: Desk = desk, start: threading.Barrier = start) -> str:
            mailbox = desk.mailbox()
            start.wait()
            return mailbox.open()

        with ThreadPoolExecutor(4) as threads:
            found = [threads.submit(opened) for _ in range(4)]
        assert len({one.result() for one in found}) == 1


def ranges(letters: list[Posted]) -> list[tuple[int, int]]:
    return [(letter.first, letter.last) for letter in letters]


def assert_each_entry_once(desk: Desk, trail: Trail) -> None:
    """The letters of a trail follow one another without a gap or an overlap, to its end."""
    ours = ranges([one for one in desk.parse_subject() if one.session == trail.identity.session])
    assert [first for first, _ in ours] == [1, *(last + 1 for _, last in ours[:-1])]
    assert ours[-1][1] == trail.head[0]


@pytest.fixture
def desk(home: Path, server: Fork | Original, project: str) -> Desk:
    return Desk(home, server.url, project)


@pytest.fixture
def far_desk(home: Path, original: Original, project: str) -> Desk:
    """At the server of our own, which can be made to fail."""
    return Desk(home, original.url, project)


def test_entries_are_sent_once_and_in_order(desk: Desk) -> None:
    """In both dialects and from several trails. Another courier does not send them again."""
    one, two = desk.trail(), desk.trail()
    change(one, "a", "b")
    change(two, "c")
    courier = desk.courier()
    assert desk.run(courier) == 2
    assert desk.run(courier) == 0
    change(one, "d")
    assert desk.run(desk.courier()) == 1
    for trail in (one, two):
        assert_each_entry_once(desk, trail)
    letter = next(one for one in desk.parse_subject() if one.first == 5)
    assert one.head[1].startswith(letter.hash)
    assert letter.home == HOME[:8]


def test_a_denial_is_sent_at_once_and_other_entries_in_a_digest(desk: Desk) -> None:
    """Entries before the denial are sent with it, so that the letters are consecutive."""
    trail = desk.trail()
    change(trail, "a")
    courier = desk.courier(pace=Pace(digest=3600, head=3600))
    assert desk.run(courier) == 0
    trail.denial(DENIED, "create")
    assert desk.run(courier) == 1
    assert ranges(desk.parse_subject()) == [(1, 3)]
    change(trail, "b")
    trail.alert("three denials")
    assert desk.run(courier) == 1
    change(trail, "c")
    assert desk.run(courier) == 0
    trail.close()
    assert desk.run(courier) == 1
    assert_each_entry_once(desk, trail)


def test_the_courier_uses_the_name_that_the_server_returns(home: Path, original: Original, project: str) -> None:
    """A server may register another name than the requested one."""
    desk = Desk(home, original.url, project)
    desk.address = desk.address._replace(sender="Bonobo")
    assert desk.mailbox().open() == "PearlEagle"


def test_recipients_see_the_agent_and_the_change(home: Path, original: Original, project: str) -> None:
    """A letter has agent and change in a code block that no file name can end."""
    original.agents["lead-1"] = "x"
    desk = Desk(home, original.url, project, to=("lead-1",))
    trail = desk.trail()
    change(trail, "a\n~~~\n# forged")
    trail.denial(DENIED, "create", details={"pid": 1})
    trail.alert("three denials", code="SUFFIX", path="a.sh")
    desk.run(desk.courier())
    (message,) = original.messages
    assert "lead-1" in message["to"]
    assert message["importance"] == "urgent"
    assert message["thread_id"] == "ops"
    assert message["subject"].startswith("alice: 1 alert, 1 denied, 4 entries [")
    lines = message["body_md"].splitlines()
    assert (lines[3], lines[-1]) == ("~~~text", "~~~")
    assert [re.sub(r"\d\d:\d\d:\d\d\.\d{6} ", "", line) for line in lines[4:-1]] == [
        "#1 allowed create_file a\\n~~~\\n# forged",
        "#2 done 1",
        "#3 denied create_file a.sh SUFFIX: Only .md.",
        "#4 alert alert a.sh SUFFIX: three denials",
    ]


def test_with_denials_only_the_courier_posts_heads(far_desk: Desk, original: Original) -> None:
    """Other entries are not sent. The chain head is posted at intervals."""
    trail = far_desk.trail()
    change(trail, "secret-name")
    assert far_desk.run(far_desk.courier(only_denials=True)) == 1
    (message,) = original.messages
    assert "secret-name" not in message["body_md"]
    assert "2 of them are not listed" in message["body_md"]
    assert_each_entry_once(far_desk, trail)


def test_a_long_trail_is_sent_in_several_letters(far_desk: Desk) -> None:
    """A letter is limited in entries and in characters. Each change is two entries."""
    trail = far_desk.trail()
    change(trail, *(f"f{number}" for number in range(MOST_ENTRIES + 1)))
    assert far_desk.run(far_desk.courier()) == 3
    change(trail, *["x" * 1000] * (MOST_CHARACTERS // 1000 + 1))
    assert far_desk.run(far_desk.courier()) == 2
    assert_each_entry_once(far_desk, trail)


def test_the_courier_continues_after_an_outage(home: Path, project: str) -> None:
    """It sends the delayed entries when the server is reachable again."""
    server = Original()
    desk = Desk(home, server.url, project)
    trail = desk.trail()
    courier = desk.courier()
    with running(server):
        change(trail, "a")
        desk.run(courier)
    change(trail, "b")
    with pytest.raises(MailError, match="cannot be reached"):
        desk.run(courier)
    with running(server):
        server.status = 503
        with pytest.raises(MailError, match="answers 503"):
            desk.run(courier)
        server.status = 200
        assert desk.run(courier) == 1
        assert_each_entry_once(desk, trail)


def test_a_letter_without_a_reply_is_looked_up(far_desk: Desk, original: Original) -> None:
    """It has arrived, and the courier has no reply. Neither this courier nor the next sends an entry twice."""
    trail = far_desk.trail()
    courier = far_desk.courier()
    for number, again in enumerate((courier, far_desk.courier(), far_desk.courier())):
        change(trail, f"f{number}")
        original.silent_after = 0
        with pytest.raises(MailError, match="closed the connection"):
            far_desk.run(courier)
        assert len(original.messages) == number + 1
        courier = again
        assert far_desk.run(courier) == 0
        assert_each_entry_once(far_desk, trail)


def test_a_letter_sent_before_a_database_failure_is_not_sent_again(desk: Desk) -> None:
    """The database may fail after the mail server accepted the letter, and the courier may be killed then."""
    trail = desk.trail()
    change(trail, "a")
    desk.kept.down = True
    courier = desk.courier()
    with pytest.raises(StateError):
        desk.run(courier)
    with pytest.raises(StateError):
        desk.run(courier)
    desk.kept.down = False
    for again in (courier, desk.courier()):
        desk.kept.cursor.clear()
        change(trail, "b")
        assert desk.run(again) == 1
        assert_each_entry_once(desk, trail)


def test_two_state_directories_may_share_a_mailbox(far_desk: Desk) -> None:
    """Two hosts may send under one name."""
    trail = far_desk.trail()
    change(trail, "a")
    far_desk.run(far_desk.courier())
    other = Courier("mail", far_desk.mailbox(), Kept(), str(uuid.uuid4()), pace=AT_ONCE)
    assert far_desk.run(other) == 1


def test_a_reply_as_event_stream_is_read(far_desk: Desk, original: Original) -> None:
    """Streamable HTTP leaves the form to the server."""
    original.events = True
    trail = far_desk.trail()
    change(trail, "a")
    assert far_desk.run(far_desk.courier()) == 1
    assert_each_entry_once(far_desk, trail)


def test_a_wrong_token_and_a_wrong_server_are_reported(home: Path, original: Original, project: str) -> None:
    """Each in one line."""
    wrong = Mailbox(MailServer(original.url, "wrong"), Address(original.url, project, "a-b"), Tokens())
    with pytest.raises(MailError, match=r"answers 401: .*Unauthorized"):
        wrong.open()
    unknown = Mailbox(MailServer(original.url, TOKEN), Address(original.url, "relative", "a-b"), Tokens())
    with pytest.raises(MailError, match=r"refuses: .*absolute"):
        unknown.open()


def test_the_letters_reveal_a_rewritten_trail(desk: Desk) -> None:
    """The rewritten head matches the rewritten trail, and the letters do not."""
    kept, rewritten, cut, gone = (desk.trail() for _ in range(4))
    for trail in (kept, rewritten, cut, gone):
        change(trail, "a", "b")
    desk.run(desk.courier())
    assert list(compare(desk.parse_subject(), desk.trails, HOME)) == []
    for trail in (rewritten, cut):
        trail.path.unlink()
        trail.path.with_suffix(".head").unlink()
        anew = Trail.create(trail.path, trail.path.with_suffix(".head"), trail.identity)
        change(anew, *("x", "b")[: 2 if trail is rewritten else 1])
        anew.close()
    gone.path.unlink()
    found = {one.session: one for one in compare(desk.parse_subject(), desk.trails, HOME)}
    assert set(found) == {trail.identity.session for trail in (rewritten, cut, gone)}
    assert "the trail was rewritten" in found[rewritten.identity.session].message
    assert "entry 4 is missing" in found[cut.identity.session].message
    assert "is missing: the witness has its entries" in found[gone.identity.session].message
    assert list(compare(desk.parse_subject(), desk.trails, str(uuid.uuid4()))) == []


def test_a_trail_changed_during_sending_is_reported(far_desk: Desk) -> None:
    """The courier continues and reports the difference."""
    trail = far_desk.trail()
    change(trail, "a", "b")
    far_desk.run(far_desk.courier())
    raw = trail.path.read_bytes()
    trail.path.write_bytes(raw[: len(raw) // 2])
    far_desk.run(far_desk.courier())
    assert far_desk.told == [f"the trail of session {trail.identity.session} is shorter than the part that was sent"]


def test_an_unreadable_trail_does_not_delay_others(far_desk: Desk) -> None:
    """It is reported. A removed trail is ignored."""
    (far_desk.trails / "a.jsonl").symlink_to("a.jsonl")
    (far_desk.trails / "b.jsonl").symlink_to("nothing")
    change(trail := far_desk.trail(), "a")
    assert far_desk.run(far_desk.courier()) == 1
    assert_each_entry_once(far_desk, trail)
    (told,) = far_desk.told
    assert "a.jsonl cannot be read: Too many levels" in told


def test_a_refused_letter_is_shortened_and_delays_no_other_trail(far_desk: Desk, original: Original) -> None:
    """Servers have size limits. The size grows again after a success."""
    long, short = sorted((far_desk.trail(), far_desk.trail()), key=lambda trail: trail.identity.session)
    change(long, *("x" * 200 for _ in range(300)))
    change(short, "a")
    original.largest = 20_000
    courier = far_desk.courier()
    with pytest.raises(MailError, match="answers 413"):
        far_desk.run(courier)
    assert {one.session for one in far_desk.parse_subject()} == {short.identity.session}
    original.largest = 2**62
    while far_desk.run(courier):
        pass
    assert_each_entry_once(far_desk, long)
    assert 600 // 8 in [one.last for one in far_desk.parse_subject()]
    original.largest = 2_000
    change(long, *("y" * 200 for _ in range(20)))
    while len([one for one in far_desk.parse_subject() if one.last == 640]) == 0:
        with contextlib.suppress(MailError):
            far_desk.run(courier)
    assert_each_entry_once(far_desk, long)


def test_a_server_that_refuses_every_letter_loses_no_entry(far_desk: Desk, original: Original) -> None:
    """Refused entries stay pending."""
    change(far_desk.trail(), "a")
    courier = far_desk.courier()
    original.status = 500
    for _ in range(3):
        with pytest.raises(MailError, match="answers 500"):
            far_desk.run(courier)
    original.status = 200
    assert far_desk.run(courier) == 1


def test_an_agent_with_endless_denials_delays_no_other(far_desk: Desk) -> None:
    """An agent with many denials must not delay the alerts of other agents."""
    hammering, other = sorted((far_desk.trail(), far_desk.trail()), key=lambda trail: trail.identity.session)
    other.alert("look")
    hammering.denial(DENIED, "create")

    def may_continue() -> bool:
        hammering.denial(DENIED, "create")
        return True

    trails = {path.stem: path for path in sorted(far_desk.trails.glob("*.jsonl"))}
    far_desk.courier().run(trails, may_continue)
    assert other.identity.session in {one.session for one in far_desk.parse_subject()}


def test_a_session_may_change_its_courier_and_return(far_desk: Desk) -> None:
    """For instance if its policy is changed, and changed back. The mailbox is the same."""
    trail = far_desk.trail()
    couriers = far_desk.courier(), far_desk.courier(only_denials=True)
    trails = {trail.path.stem: trail.path}
    for number in range(5):
        change(trail, f"f{number}")
        for courier in couriers:
            courier.run(trails if courier is couriers[number % 2] else {})
    assert_each_entry_once(far_desk, trail)


def test_a_trail_whose_letters_cannot_be_read_delays_no_other(far_desk: Desk, original: Original) -> None:
    """When they can be read again, no entry is sent twice."""
    lost, other = sorted((far_desk.trail(), far_desk.trail()), key=lambda trail: trail.identity.session)
    change(lost, "a")
    original.silent_after = 0
    with pytest.raises(MailError):
        far_desk.run(far_desk.courier())
    aside = lost.path.with_suffix(".aside")
    lost.path.rename(aside)
    lost.path.symlink_to(lost.path.name)
    change(other, "b")
    courier = far_desk.courier()
    far_desk.run(courier)
    assert_each_entry_once(far_desk, other)
    aside.replace(lost.path)
    far_desk.run(courier)
    change(lost, "c")
    far_desk.run(courier)
    assert_each_entry_once(far_desk, lost)


def test_damaged_lines_are_sent_too(far_desk: Desk, original: Original) -> None:
    """They are marked, and the letters continue after the last entry."""
    trail = far_desk.trail()
    change(trail, "a")
    courier = far_desk.courier()
    far_desk.run(courier)
    with trail.path.open("ab") as out:
        out.write(b"garbage\n")
    assert far_desk.run(courier) == 1
    assert "unreadable" in original.messages[-1]["body_md"]
    assert far_desk.kept.cursor[trail.identity.session].seq == 2
    change(trail, "b")
    assert far_desk.run(far_desk.courier()) == 1
    assert [one.last for one in far_desk.parse_subject()] == [2, 2, 4]
    assert far_desk.told == []


def test_a_rewritten_trail_is_reported_at_its_next_entry(far_desk: Desk) -> None:
    """No witness request is needed."""
    trail = far_desk.trail()
    change(trail, "a")
    far_desk.run(far_desk.courier())
    trail.path.unlink()
    trail.path.with_suffix(".head").unlink()
    anew = Trail.create(trail.path, trail.path.with_suffix(".head"), trail.identity)
    change(anew, "another", "more")
    far_desk.run(far_desk.courier())
    (told,) = far_desk.told
    assert told.endswith(f"{trail.identity.session} does not continue the part that was sent")
    anew.close()


def http(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.0 %d x\r\nContent-Type: application/json\r\n\r\n%s" % (status, body)


def rpc(result: object) -> bytes:
    return http(json.dumps({"jsonrpc": "2.0", "id": 1, "result": result}).encode())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\xfe\x00",
        b"HTTP/1.0 200",
        b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 x\r\nContent-Length: 50\r\n\r\n{",
        http(b"<html>"),
        http(b"[" * 100_000),
        http(b"null"),
        http(b'"error"'),
        http(b'[{"error": {}}]'),
        http(b'{"error": null}'),
        http(b'{"error": "no"}'),
        http(b'{"result": []}'),
        http(b"", 204),
        http(b"", 302),
        *map(
            rpc,
            (
                {},
                {"tools": {}},
                {"tools": [1, {}, {"name": None, "inputSchema": []}, {"name": "send_message", "inputSchema": 5}]},
                {"tools": [{"name": "send_message"}, {"name": "ensure_project"}, {"name": "register_agent"}]},
                {"content": 5, "isError": True},
                {"content": [{"text": 5}, 7]},
                {"contents": 7},
            ),
        ),
    ],
)
def test_an_invalid_reply_is_one_failure(answer: bytes) -> None:
    """It is reported in one line, and the call is retried."""
    with answering(answer) as url:
        mailbox = Mailbox(MailServer(url, TOKEN, 5.0), Address(url, "/p", "a-b"), Tokens())
        server = MailServer(url, TOKEN, 5.0)
        for ask in (
            lambda: mailbox.send("s", "b", "low"),
            mailbox.sent,
            mailbox.reservations,
            lambda: server.read("resource://x"),
        ):
            with pytest.raises(MailError) as told:
                ask()
            assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize(
    "listed",
    [{}, [5], ["x"], [{}], [{"id": "x"}], [{"expires_ts": 5}], [{"id": 1, "agent": "a", "path_pattern": "p",
     "exclusive": True, "expires_ts": "9999-12-31T23:59:59-12:00"}], None, 7],
)  # fmt: skip
def test_an_invalid_reservation_list_is_one_failure(original: Original, listed: object) -> None:
    """The courier does not treat it as an empty list."""
    original.reservations = listed  # type: ignore[assignment]
    mailbox = Mailbox(MailServer(original.url, TOKEN), Address(original.url, "/p", "a-b"), Tokens())
    if listed == {}:
        assert mailbox.reservations() == []
        return
    with pytest.raises(MailError, match="in an unknown format"):
        mailbox.reservations()


def test_a_slow_reply_times_out() -> None:
    """The limit applies to the complete reply. The server may have executed the call."""
    began = time.monotonic()
    slowly = [b"HTTP/1.0 200 x\r\n"] + [b"X-More: y\r\n"] * 90
    with answering(*slowly, between=0.5) as url, pytest.raises(MailError, match="took more than 1 s") as told:
        MailServer(url, TOKEN, 1.0).call("send_message", {})
    assert told.value.carried_out is None
    assert time.monotonic() - began < 20


def test_reports_contain_no_token(original: Original) -> None:
    """Also if the server repeats the token."""
    original.status, original.detail = 403, "your header was {}"
    mailbox = Mailbox(MailServer(original.url, TOKEN), Address(original.url, "/p", "a-b"), Tokens())
    with pytest.raises(MailError, match=r"Bearer \*\*\*"):
        mailbox.open()
    refusal = rpc({"isError": True, "content": [{"text": "no agent has the token s3cret"}]})
    with answering(refusal) as url, pytest.raises(MailError, match=r"the token \*\*\*"):
        MailServer(url, TOKEN).call("send_message", {"sender_token": "s3cret"})


_TEXT = st.text(st.characters(), max_size=40)


@settings(deadline=None)
@given(agent=_TEXT, path=_TEXT, reason=_TEXT, seq=st.integers(1, 10**12))
def test_a_subject_can_be_parsed_for_any_entries(agent: str, path: str, reason: str, seq: int) -> None:
    """It is one line of less than 200 characters, and the code block of the body ends at its end."""
    entry = AuditEntry(
        datetime(2026, 1, 31, tzinfo=UTC) + timedelta(seconds=1), "file", "create_file", agent, {}, "denied", reason,
        kind="intent", path=path, seq=seq, hash="ab" * 32,
    )  # fmt: skip
    letter = Letter(str(uuid.uuid4()), HOME)
    letter.add_entry(entry, only_denials=False)
    assert len(letter.subject) < 200
    assert len(letter.subject.splitlines()) == 1
    assert parse_subject(letter.subject) == Posted(letter.session, seq, seq, "ab" * 16, HOME[:8])
    assert [line for line in letter.body.splitlines() if line.startswith("~~~")] == ["~~~text", "~~~"]


def test_a_foreign_subject_is_ignored() -> None:
    """For any text."""
    for text in ("", "hello", "[x 1-2 ab cd]", f"[{uuid.uuid4()} 1-2 {'a' * 31} {'b' * 8}]"):
        assert parse_subject(text) is None
