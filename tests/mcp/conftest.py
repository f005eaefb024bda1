"""MCP servers of real mounts, and the official client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp_types import CallToolResult

from bonobofs.mcp.mcp_server import SessionServer
from bonobofs.mcp.session_link import link_around
from tests.support.world import Mounted, World


class Served:
    """A mount, and a client of its MCP server in this process. Each call has a connection of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.server = SessionServer(link_around(world.path))

    def tell(self, story: Callable[[Client], Awaitable[Any]]) -> Any:
        """Run a story with a connected client."""

        async def run() -> Any:
            async with Client(self.server) as client:
                return await story(client)

        return anyio.run(run)

    def call(self, tool: str, /, **arguments: Any) -> CallToolResult:
        answer: CallToolResult = self.tell(lambda client: client.call_tool(tool, arguments))
        return answer

    def result(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        """The structured result of a call that succeeds."""
        answer = self.call(tool, **arguments)
        assert not answer.is_error, answer.structured_content
        found: dict[str, Any] = answer.structured_content or {}
        return found

    def refusal(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        """The structured content of a call that is refused or fails."""
        answer = self.call(tool, **arguments)
        assert answer.is_error
        found: dict[str, Any] = answer.structured_content or {}
        return found


Serve = Callable[..., Served]


@pytest.fixture
def served(mounted: Mounted) -> Serve:
    """As `mounted`, with an MCP server."""
    return lambda **order: Served(mounted(**order))
