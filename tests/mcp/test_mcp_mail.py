"""The mail tools, on the real server of Agent Mail and on the other dialect."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from bonobofs.session.mail_settings import open_mailbox, settings_of
from bonobofs.state.home import home_id
from tests.agent_mail.conftest import fork, original, server  # noqa: F401 - fixtures
from tests.agent_mail.servers import TOKEN, Fork, Original, running
from tests.mcp.conftest import Serve, Served
from tests.support.world import ALLOW_ALL


def _policy(url: str, directory: Path, project: str) -> str:
    (directory / "token").write_text(f"{TOKEN}\n")
    return f'{ALLOW_ALL}[agent_mail]\nurl = "{url}"\ntoken_file = "{directory}/token"\nproject = "{project}"\n'


@pytest.fixture
def post(served: Serve, tmp_path: Path, server: Fork | Original) -> Serve:  # noqa: F811 - the fixture
    project = f"/srv/{uuid.uuid4()}"
    return lambda agent: served(policy=_policy(server.url, tmp_path, project), agent=agent)


def test_agents_write_to_each_other(post: Serve) -> None:
    name = f"alice-{uuid.uuid4().hex[:8]}"
    alice, bob = post(name), post(f"bob-{uuid.uuid4().hex[:8]}")
    to_bob = bob.world.session.agent
    assert bob.result("mailbox_inbox") == {"messages": []}
    sent = alice.result(
        "mailbox_send", to=[to_bob], subject="The plan", body="# Read it\n", thread="gt-17", importance="high"
    )
    assert sent["sent"]
    (message,) = bob.result("mailbox_inbox", limit=5)["messages"]
    shown = {part: message[part] for part in ("subject", "body_md", "thread_id", "importance")}
    assert shown == {"subject": "The plan", "body_md": "# Read it\n", "thread_id": "gt-17", "importance": "high"}
    assert _plain(message["from"]) == _plain(name)
    recorded = [entry for entry in alice.world.entries() if entry.operation == "mail_send"]
    assert [(entry.agent, entry.details["subject"]) for entry in recorded] == [(name, "The plan")]
    assert "Read it" not in alice.world.trail.read_text(encoding="utf-8")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def test_bad_messages_are_not_sent(served: Serve, tmp_path: Path, original: Original) -> None:  # noqa: F811
    alice = served(policy=_policy(original.url, tmp_path, f"/srv/{uuid.uuid4()}"), agent="alice-1")
    message = {"to": ["bob-1"], "subject": "s", "body": "b"}
    mistakes: tuple[dict[str, Any], ...] = (
        {"to": []},
        {"to": ["a/b"]},
        {"to": ["x"] * 101},
        {"subject": "two\nlines"},
        {"subject": " "},
        {"subject": "s" * 201},
        {"body": "b" * ((1 << 20) + 1)},
        {"thread": "../../etc"},
        {"thread": "#ops"},
        {"importance": "very"},
    )
    for wrong in mistakes:
        assert alice.refusal("mailbox_send", **{**message, **wrong})["error"]["type"] == "UsageError", wrong
    assert original.subjects() == []


def test_the_sender_of_the_audit_log_has_no_mailbox(
    served: Serve,
    tmp_path: Path,
    original: Original,  # noqa: F811
) -> None:
    """`audit verify --witness` believes the letters of that name."""
    project = f"/srv/{uuid.uuid4()}"
    policy = _policy(original.url, tmp_path, project)
    first = served(policy=policy, agent="alice-1")
    settings = settings_of(first.world.home, home_id(first.world.home), first.world.session)
    assert settings is not None
    for name in (settings.address.sender, settings.address.sender.upper().replace("-", ".")):
        liar = served(policy=policy, agent=name)
        error = liar.refusal("mailbox_send", to=["alice-1"], subject="s", body="b")["error"]
        assert (error["type"], "sender of the audit log" in error["message"]) == ("ForbiddenError", True)
    assert open_mailbox(first.world.home, settings).sent() == []


def test_without_a_server_the_tools_say_so(served: Serve, tmp_path: Path) -> None:
    alice: Served = served(policy=ALLOW_ALL)
    assert "[agent_mail]" in alice.refusal("mailbox_inbox")["error"]["message"]
    down = Original()
    bob = served(policy=_policy(down.url, tmp_path, f"/srv/{uuid.uuid4()}"), agent="bob-1")
    assert "cannot be reached" in bob.refusal("mailbox_inbox")["error"]["message"]
    assert [entry.result for entry in bob.world.entries() if entry.tool == "mail.inbox"] == ["error"]
    assert any(entry.operation == "mail_inbox" for entry in bob.world.entries())
    with running(down):
        assert bob.result("mailbox_inbox") == {"messages": []}


class Careless(Original):
    """A server that answers with ids that are objects, and ignores the limit of an inbox."""

    def _send_message(self, given: dict[str, Any]) -> dict[str, Any] | None:
        self.messages.append({"subject": given["subject"]})
        return {"deliveries": [{"payload": {"id": {"number": 1}, "created_ts": "2026-11-23T01:05:27Z"}}]}

    def _fetch_inbox(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        del given
        return [{"id": number, "from": "bob-1", "subject": "s"} for number in range(300)]


def test_a_bad_answer_of_the_mail_server_is_no_mistake_of_the_agent(served: Serve, tmp_path: Path) -> None:
    """The message may have been sent, so the agent must not repeat it with other arguments."""
    with running(Careless()) as careless:
        alice = served(policy=_policy(careless.url, tmp_path, f"/srv/{uuid.uuid4()}"), agent="alice-1")
        error = alice.refusal("mailbox_send", to=["bob-1"], subject="s", body="b")["error"]
        assert careless.subjects() == ["s"]
        assert error["type"] == "StateError"
        assert "may have been carried out" in error["message"]
        assert "arguments" not in error["message"]


def test_an_inbox_has_at_most_the_messages_of_its_limit(served: Serve, tmp_path: Path) -> None:
    with running(Careless()) as careless:
        alice = served(policy=_policy(careless.url, tmp_path, f"/srv/{uuid.uuid4()}"), agent="alice-1")
        assert [each["id"] for each in alice.result("mailbox_inbox", limit=5)["messages"]] == [0, 1, 2, 3, 4]
