"""The server over its transports, with the official client in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from bonobofs.mcp.tools import TOOLS
from bonobofs.state.home import inside_directory
from tests.support.commands import bonobofs, environment
from tests.support.world import Mounted, World

Story = Callable[[Client], Awaitable[Any]]


@pytest.fixture
def world(mounted: Mounted) -> World:
    return mounted(role="impl")


def _stdio(
    world: World, story: Story, mode: Literal["auto", "legacy"] = "auto", variables: dict[str, str] | None = None
) -> Any:
    """Run a story with a server that was started in the mount, as an MCP client starts it."""
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "bonobofs", "mcp"], cwd=world.path, env=environment(**(variables or {}))
    )

    async def run() -> Any:
        async with Client(stdio_client(server), mode=mode) as client:
            return await story(client)

    return anyio.run(run)


async def _write(client: Client) -> Any:
    tools = await client.list_tools()
    written = await client.call_tool("write_file", {"path": "tests/test_a.py", "content": "a = 1\n"})
    refused = await client.call_tool("write_file", {"path": ".git/config", "content": ""})
    return {tool.name for tool in tools.tools}, written, refused


def _check(world: World, told: Any) -> None:
    names, written, refused = told
    assert names == set(TOOLS)
    assert written.structured_content == {"path": "tests/test_a.py"}
    assert refused.is_error
    assert refused.structured_content["code"] == "PROTECTED"
    assert (world.source / "tests/test_a.py").read_text(encoding="utf-8") == "a = 1\n"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_stdio_in_both_protocols(world: World, mode: Literal["auto", "legacy"]) -> None:
    _check(world, _stdio(world, _write, mode))


def test_the_environment_chooses_no_session(world: World, mounted: Mounted, tmp_path: Path) -> None:
    other = mounted(role="impl", agent="bob")
    lies = {
        "BONOBOFS_SOCKET": str(inside_directory(other.home, other.session.session) / "guard.sock"),
        "BONOBOFS_HOME": str(tmp_path / "empty"),
    }

    async def read(client: Client) -> Any:
        return (await client.read_resource("bonobofs://session")).contents[0]

    assert '"agent": "alice"' in _stdio(world, read, variables=lies).text


def test_two_servers_of_one_session_at_once(world: World) -> None:
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "bonobofs", "mcp", str(world.path)], env=environment()
    )

    async def run() -> list[Any]:
        found = []
        async with Client(stdio_client(server)) as one, Client(stdio_client(server)) as two:
            for client, number in ((one, 1), (two, 2), (one, 3)):
                arguments = {"path": f"tests/test_{number}.py", "content": f"{number}"}
                found.append(await client.call_tool("write_file", arguments))
        return found

    assert not any(answer.is_error for answer in anyio.run(run))
    assert sorted(os.listdir(world.source / "tests")) == ["test_1.py", "test_2.py", "test_3.py"]


class _Http:
    """A server over HTTP."""

    def __init__(self, world: World, token_file: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bonobofs", "mcp", world.path, "--http", "0", "--token-file", token_file],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.token = token_file.read_text(encoding="ascii").strip()

    def end(self) -> int:
        self.process.terminate()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(30)


@pytest.fixture
def http(world: World, tmp_path: Path) -> Iterator[_Http]:
    server = _Http(world, tmp_path / "token")
    yield server
    server.end()


def test_http_with_the_token(world: World, http: _Http, tmp_path: Path) -> None:
    async def run() -> Any:
        headers = {"Authorization": f"Bearer {http.token}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as connection,
            Client(streamable_http_client(http.address, http_client=connection)) as client,
        ):
            return await _write(client)

    _check(world, anyio.run(run))
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_http_without_the_token_is_401(http: _Http) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    for header in (None, "", "Bearer wrong", "Basic x", f"bearer  {http.token}", http.token):
        answer = httpx2.post(http.address, json=message, headers={} if header is None else {"Authorization": header})
        assert (answer.status_code, answer.content) == (401, b""), header


def test_http_refuses_the_name_of_another_host(http: _Http) -> None:
    """A page in a browser that resolves its own name to 127.0.0.1 sends that name as Host."""
    headers = {"Authorization": f"Bearer {http.token}", "Host": "attacker.example"}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    assert httpx2.post(http.address, json=message, headers=headers).status_code in (403, 421)


def test_the_command_says_what_is_wrong(world: World, tmp_path: Path) -> None:
    outside = bonobofs("mcp", cwd=tmp_path)
    assert outside.returncode == 1
    assert "in no mount" in outside.stderr
    assert bonobofs("mcp", "--http", "0", cwd=world.path).returncode == 2
    open_file = tmp_path / "open"
    open_file.write_text("a-token-of-enough-length\n", encoding="ascii")
    open_file.chmod(0o644)
    readable = bonobofs("mcp", "--http", "0", "--token-file", open_file, cwd=world.path)
    assert (readable.returncode, "chmod 600" in readable.stderr) == (1, True)
    short = tmp_path / "short"
    short.write_text("x\n", encoding="ascii")
    short.chmod(0o600)
    assert "at least 16" in bonobofs("mcp", "--http", "0", "--token-file", short, cwd=world.path).stderr


def test_without_the_sdk_the_command_names_the_package(world: World, tmp_path: Path) -> None:
    (tmp_path / "mcp.py").write_text("raise ModuleNotFoundError('gone', name='mcp')\n", encoding="utf-8")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    missing = subprocess.run(
        [sys.executable, "-m", "bonobofs", "mcp", world.path],
        env={**environment(), "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert missing.returncode == 1
    assert "pip install 'bonobofs[mcp]'" in missing.stderr
