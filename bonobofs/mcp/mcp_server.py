"""The MCP server of one session, on the official SDK.

A refusal is a result with `isError` and the decision as structured content: `code`, `rule`, `message`, `instead`. Any
other failure has `error` there: `type`, `message` and, for system errors, `errno`.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from anyio import to_thread
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ResourceError
from mcp_types import CallToolResult, TextContent, Tool
from pydantic import ValidationError

import bonobofs
from bonobofs.errors import BonobofsError, StateError, UsageError, reason
from bonobofs.ipc.codec import encode_failure
from bonobofs.mcp.session_link import SessionLink
from bonobofs.mcp.tool_arguments import Arguments
from bonobofs.mcp.tool_results import Result
from bonobofs.mcp.tools import TOOLS, SessionTool
from bonobofs.policy.decision import Refused, as_document

_INSTRUCTIONS: Final = """You work in a mount of bonobofs, which admits or refuses every change by a policy.
Read the resource bonobofs://policy before you write, or ask the tool `why` about one path. A refused call has `isError`
and says in `instead` what you can do. Do not repeat a refused call: its answer stays the same. Ordinary programs may
read and write files in the mount too; the same policy applies."""
_MOST_MISTAKES: Final = 5
"""Mistakes that the error about invalid arguments or an invalid answer lists."""


class SessionServer(MCPServer[Any]):
    """The tools and resources of one session."""

    def __init__(self, link: SessionLink) -> None:
        """Nothing is called yet."""
        super().__init__(
            "bonobofs",
            title="bonobofs",
            description=bonobofs.__doc__,
            instructions=_INSTRUCTIONS,
            version=bonobofs.__version__,
            log_level="ERROR",
        )
        self.link: Final = link
        self._add_resource("policy", "What may be written", "text/markdown", link.policy)
        self._add_resource("refusals", "The last refusals", "application/jsonl", link.refusals)
        self._add_resource("session", "Agent, role and session", "application/json", self._session)

    async def list_tools(self) -> list[Tool]:
        """Return the tools."""
        return [tool.listed() for tool in TOOLS.values()]

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult:
        """Call a tool. Every failure is a result with `isError`."""
        del context  # the session is that of the mount, whatever the client is
        tool = TOOLS.get(name)
        if tool is None:
            return _failed(UsageError(f"there is no tool {name[:64]!a}; there are {', '.join(TOOLS)}"))
        return await to_thread.run_sync(partial(run_tool, self.link, tool, arguments), abandon_on_cancel=True)

    def _session(self) -> str:
        return json.dumps(self.link.call("whoami"), indent=2)

    def _add_resource(self, name: str, title: str, mime_type: str, read: Callable[[], str]) -> None:
        def answer() -> str:
            try:
                return read()
            except (BonobofsError, OSError) as error:
                raise ResourceError(_as_text(reason(error))) from None

        self.resource(f"bonobofs://{name}", name=name, title=title, mime_type=mime_type)(answer)


def run_tool(link: SessionLink, tool: SessionTool, arguments: dict[str, Any]) -> CallToolResult:
    """Check the arguments, make the call, and return its result, refusal or failure."""
    try:
        answer = _as_text(tool.run(link, _parse(tool, arguments)))
        return _answer(_checked(tool, answer).model_dump(mode="json", by_alias=True, exclude_unset=True))
    except Refused as refused:
        decision = refused.decision
        document = as_document(decision, decision.path, decision.operation)
        return _answer({**document, "message": refused.strerror}, is_error=True)
    except (BonobofsError, OSError, RecursionError) as error:
        return _failed(error)
    except Exception as error:  # noqa: BLE001 - the edge at which an unknown failure becomes an answer and a record
        traceback.print_exc()
        return _failed(error)


def _parse(tool: SessionTool, arguments: dict[str, Any]) -> Arguments:
    """Return the arguments of a tool. UsageError."""
    try:
        return tool.arguments.model_validate(arguments)
    except ValidationError as error:
        takes = ", ".join(tool.arguments.model_fields)
        raise UsageError(f"the arguments of {tool.name} are invalid: {_mistakes(error)}; it takes {takes}") from None


def _checked(tool: SessionTool, answer: Any) -> Result:
    """Return the answer of a call as the result of its tool. StateError: another program answered with other data."""
    try:
        return tool.result.model_validate(answer)
    except ValidationError as error:
        raise StateError(
            f"the call {tool.name} may have been carried out, but its answer is invalid: {_mistakes(error)}; "
            "look before you repeat it"
        ) from None


def _failed(error: Exception) -> CallToolResult:
    return _answer({"error": encode_failure(error)}, is_error=True)


def _answer(document: dict[str, Any], *, is_error: bool = False) -> CallToolResult:
    structured = _as_text(document)
    text = json.dumps(structured, ensure_ascii=False)
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content=structured, is_error=is_error
    )


def _as_text(value: Any) -> Any:
    """Return JSON data whose texts can be sent: the bytes of a path that are not UTF-8 are shown as escapes."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    return value


def _mistakes(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    shown = "; ".join(f"{'.'.join(map(str, each['loc']))[:64]!a}: {each['msg']}" for each in found[:_MOST_MISTAKES])
    return f"{shown}; and {len(found) - _MOST_MISTAKES} more" if len(found) > _MOST_MISTAKES else shown
