"""The tools of the MCP server do what the guard socket does, and answer a refusal with the decision."""

from __future__ import annotations

import json
import os
import signal
from typing import Any, Final

import jsonschema  # type: ignore[import-untyped] # it has no types
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp import Client

from bonobofs.errors import MountError
from bonobofs.mcp.mcp_server import run_tool
from bonobofs.mcp.session_link import link_around
from bonobofs.mcp.tools import TOOLS
from bonobofs.policy.decision import Code
from tests.mcp.conftest import Serve, Served
from tests.mcp.seed_002 import TOOLS as SEED
from tests.support.observe import companion_of, recorded
from tests.support.wait import until
from tests.support.world import Mounted


@pytest.fixture
def impl(served: Serve) -> Served:
    return served(role="impl")


def test_the_four_tools_have_the_schemas_of_the_seed() -> None:
    for name, seed in SEED.items():
        listed = TOOLS[name].listed()
        assert {"description": listed.description, "input_schema": listed.input_schema} == seed


def test_each_tool_is_described_whole() -> None:
    for name, tool in TOOLS.items():
        listed = tool.listed()
        assert listed.name == name
        assert listed.title
        assert listed.description
        hints = listed.annotations
        assert hints is not None
        assert hints.title == listed.title
        given_hints = (hints.read_only_hint, hints.destructive_hint, hints.idempotent_hint, hints.open_world_hint)
        assert None not in given_hints
        assert not (hints.read_only_hint and hints.destructive_hint)
        for schema in (listed.input_schema, listed.output_schema):
            assert schema is not None
            assert schema["type"] == "object"
            jsonschema.Draft202012Validator.check_schema(schema)
        assert all("description" in each for each in listed.input_schema["properties"].values())


def test_the_client_lists_the_tools_and_reads_the_resources(impl: Served) -> None:
    async def story(client: Client) -> Any:
        await client.call_tool("write_file", {"path": ".env", "content": "TOKEN=1\n"})
        tools = await client.list_tools()
        resources = await client.list_resources()
        texts = {each.name: (await client.read_resource(each.uri)).contents[0] for each in resources.resources}
        return {tool.name for tool in tools.tools}, texts

    names, texts = impl.tell(story)
    assert names == set(TOOLS)
    assert texts["policy"].text.startswith("# What may be written here")
    assert json.loads(texts["refusals"].text.splitlines()[-1])["path"] == ".env"
    session = json.loads(texts["session"].text)
    assert (session["agent"], session["session"]) == ("alice", impl.world.session.session)


def test_files_are_written_read_listed_and_searched(impl: Served) -> None:
    assert impl.result("write_file", path="aidlc-docs/plan.md", content="# Plan\nsecond\n") == {
        "path": "aidlc-docs/plan.md"
    }
    assert (impl.world.source / "aidlc-docs/plan.md").read_text(encoding="utf-8") == "# Plan\nsecond\n"
    read = impl.result("read_file", path="aidlc-docs/plan.md", offset=2, limit=1.0)
    assert (read["content"].split(), read["start_line"], read["end_line"]) == (["2", "second"], 2, 2)
    listed = impl.result("list_files", path="aidlc-docs", recursive=True)
    assert {"path": "plan.md", "kind": "file", "size": 14} in listed["entries"]
    assert impl.result("search_files", query="sec.nd")["matches"] == [
        {"path": "aidlc-docs/plan.md", "line": 2, "text": "second"}
    ]
    inside = impl.world.path / "aidlc-docs/plan.md"
    assert impl.result("read_file", path=str(inside))["path"] == "aidlc-docs/plan.md"
    tools = {entry.tool for entry in impl.world.entries() if entry.agent == "alice"}
    assert {"write_file", "read_file", "list_files", "search_files"} <= tools


def test_a_refusal_is_the_decision(impl: Served) -> None:
    refused = impl.refusal("write_file", path="aidlc-docs/run.sh", content="true\n")
    assert refused["allowed"] is False
    assert refused["code"] == Code.SUFFIX
    assert refused["operation"] == "write_file"
    for part in ("reason", "instead"):
        assert refused[part] in refused["message"]
    assert impl.result("why", path="aidlc-docs/run.sh")["rule"] == refused["rule"]
    assert not (impl.world.source / "aidlc-docs/run.sh").exists()
    denial = next(entry for entry in impl.world.entries() if entry.result == "denied")
    assert (denial.agent, denial.tool, denial.rule) == ("alice", "write_file", refused["rule"])


def test_a_path_with_nul_is_outside(impl: Served) -> None:
    for change in ({"path": "a\0b"}, {"path": "a\0b/c", "operation": "rename", "to": "d"}):
        decision = impl.result("why", **change)
        assert (decision["allowed"], decision["code"]) == (False, Code.OUTSIDE)
    decision = impl.result("why", path="tests/a.py", operation="rename", to="tests/a\0b.py")
    assert (decision["allowed"], decision["code"]) == (False, Code.OUTSIDE)


def test_an_unknown_failure_is_an_error_and_in_the_log(impl: Served, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> Any:
        raise LookupError("no such thing")

    answer = run_tool(impl.server.link, TOOLS["lease_list"]._replace(run=fail), {})
    assert answer.is_error
    assert answer.structured_content == {"error": {"type": "LookupError", "message": "no such thing"}}
    assert "Traceback" in capfd.readouterr().err


def test_a_role_without_the_tools_is_refused(served: Serve) -> None:
    agent = served(role="docs-reader", policy='default = "allow"\n[role.docs-reader]\nwrite = ["**"]\n')
    assert agent.refusal("write_file", path="a.md", content="a")["code"] == Code.ROLE
    assert agent.refusal("read_file", path="a.md")["code"] == Code.ROLE


def test_create_only_keeps_an_existing_file(impl: Served) -> None:
    impl.result("write_file", path="tests/test_a.py", content="a", createOnly=True)
    error = impl.refusal("write_file", path="tests/test_a.py", content="b", createOnly=True)["error"]
    assert error["type"] == "FileExistsError"
    assert (impl.world.source / "tests/test_a.py").read_text(encoding="utf-8") == "a"


def test_leases_bind_the_other_agent(served: Serve) -> None:
    alice, bob = served(role="impl"), served(role="impl", agent="bob")
    lease = alice.result("lease_acquire", patterns=["tests/**"], seconds=600, reason="rewrite")
    assert [each["id"] for each in bob.result("lease_list")["leases"]] == [lease["id"]]
    refused = bob.refusal("write_file", path="tests/test_a.py", content="b")
    assert (refused["code"], refused["holder"]) == (Code.LEASED, "alice")
    assert "alice" in refused["message"]
    assert "lease" in bob.refusal("lease_release", lease=lease["id"])["error"]["message"]
    assert alice.result("lease_extend", seconds=1200)["until"] > lease["until"]
    assert alice.result("lease_release")["id"] == lease["id"]
    bob.result("write_file", path="tests/test_a.py", content="b")


def test_an_agent_takes_its_own_changes_back(served: Serve) -> None:
    tools = '["read_file", "write_file", "undo"]'
    alice = served(policy=f'default = "allow"\n[role.agent]\nwrite = ["**"]\ntools = {tools}\n')
    alice.result("write_file", path="docs/plan.md", content="one\n")
    preview = alice.result("undo_preview", path="docs/plan.md")
    assert [each["path"] for each in preview["taken_back"]] == ["docs/plan.md"]
    assert (alice.world.source / "docs/plan.md").exists()
    assert alice.result("undo", path="docs/plan.md") == preview
    assert not (alice.world.source / "docs/plan.md").exists()
    assert "say what" in alice.refusal("undo")["error"]["message"]


_BAD: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("write_file", {"path": "a.md"}, "content"),
    ("write_file", {"path": "a.md", "content": 3}, "valid string"),
    ("write_file", {"path": "a.md", "content": "a", "createonly": True}, "createonly"),
    ("write_file", {"path": "a.md", "content": "a" * (12 << 20) + "a"}, "at most"),
    ("write_file", {"path": "a.md", "content": "\1" * (3 << 20)}, "16 MiB"),
    ("read_file", {"path": "a.md", "offset": 1.5}, "whole"),
    ("read_file", {"path": "a.md", "offset": 1e300}, "too large"),
    ("read_file", {"path": "a.md", "offset": 0}, "from 1 on"),
    ("read_file", {"path": "a\0b"}, ""),
    ("list_files", {"path": ".", "recursive": "yes"}, "boolean"),
    ("search_files", {"query": "("}, ""),
    ("why", {"path": "a.md", "operation": "fly"}, "fly"),
    ("git_commit", {"message": "a\0b"}, "NUL"),
    ("lease_acquire", {"patterns": "docs/**"}, "list"),
    ("lease_acquire", {"patterns": ["docs/**"], "seconds": -1}, ""),
    ("lease_extend", {"lease": "no such lease", "seconds": 10}, ""),
    ("lease_list", {"agent": "bob"}, "agent"),
    ("no_such_tool", {}, "no_such_tool"),
]
"""A tool, invalid arguments, and a part of the answer."""


def test_bad_arguments_are_one_line(impl: Served) -> None:
    for tool, arguments, says in _BAD:
        answer = impl.refusal(tool, **arguments)
        message = answer["error"]["message"] if "error" in answer else answer["message"]
        assert says in message, (tool, message)
        assert "\n" not in message
        assert len(message) < 1000
        assert "Traceback" not in message


def test_a_name_that_is_no_utf_8_is_shown_with_escapes(impl: Served) -> None:
    (impl.world.source / "docs-x").mkdir()
    (impl.world.source / os.fsdecode(b"docs-x/caf\xe9.md")).touch()
    assert [entry["path"] for entry in impl.result("list_files", path="docs-x")["entries"]] == ["caf\\udce9.md"]


def test_outside_a_mount_there_is_no_server(home: Any, tmp_path: Any) -> None:
    with pytest.raises(MountError, match="in no mount"):
        link_around(tmp_path)
    with pytest.raises(MountError, match="cannot be entered"):
        link_around(tmp_path / "nothing")


def test_after_the_end_of_the_mount_each_call_fails_at_once(served: Serve, mounted: Mounted) -> None:
    alice = served(role="impl")
    path = alice.world.path
    alice.world.umount()
    assert "does not answer" in alice.refusal("why", path="tests/test_a.py")["error"]["message"]
    mounted(mountpoint=path, agent="bob", role="impl")
    # The server stays that of alice's session: it never acts as bob.
    assert alice.refusal("write_file", path="tests/test_a.py", content="a")["error"]["type"] == "StateError"


def test_a_companion_that_dies_is_waited_for(impl: Served) -> None:
    """The server starts another one, which has the same session."""
    impl.result("write_file", path="tests/test_a.py", content="a")
    before = len(recorded(impl.world, "companion"))
    os.kill(companion_of(impl.world.pid), signal.SIGKILL)
    until(lambda: len(recorded(impl.world, "companion")) > before, "another stands")
    impl.result("write_file", path="tests/test_b.py", content="b")
    assert impl.result("read_file", path="tests/test_b.py")["path"] == "tests/test_b.py"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def _calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A tool, and arguments of which some fit."""
    tool = TOOLS[draw(st.sampled_from(sorted(TOOLS)))]
    names = sorted(tool.arguments.model_fields)
    texts = st.sampled_from(["", ".", "..", "/", "a/../b", "docs", ".git/config", "**", "x" * 5000, "\0", "a\nb"])
    arguments = draw(st.dictionaries(st.sampled_from([*names, "agent"]), _VALUES | texts, max_size=len(names) + 1))
    return tool.name, arguments


@given(call=_calls())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def _check_call(served: Served, call: tuple[str, dict[str, Any]]) -> None:
    name, arguments = call
    answer = run_tool(served.server.link, TOOLS[name], arguments)
    document = answer.structured_content
    assert document is not None
    json.dumps(document, allow_nan=False).encode()
    if not answer.is_error:
        jsonschema.validate(document, TOOLS[name].listed().output_schema or {})
    else:
        assert "code" in document or document["error"]["type"] != "StateError", document


def test_random_arguments_get_a_result_a_refusal_or_an_error(impl: Served) -> None:
    _check_call(impl)
    assert impl.result("why", path="aidlc-docs/a.md")["allowed"]
