"""The MCP tools of a session: name, title, description, hints, arguments, result, and the call that each one makes.

No tool administers, and none decides: the session judges every call and records it under its own agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from mcp_types import Tool, ToolAnnotations

from bonobofs.mcp import tool_arguments as inputs
from bonobofs.mcp import tool_results as results
from bonobofs.mcp.session_link import SessionLink

Run = Callable[[SessionLink, Any], Any]
"""Makes the call with its parsed arguments, and returns the result as JSON data."""


class Hints(NamedTuple):
    """What a tool does, for the client to show. Nothing rests on it."""

    is_read_only: bool = False
    is_destructive: bool = False
    is_idempotent: bool = False
    is_open_world: bool = False


READS: Final = Hints(is_read_only=True, is_idempotent=True)
ADDS: Final = Hints()
SETS: Final = Hints(is_idempotent=True)
REPLACES: Final = Hints(is_destructive=True, is_idempotent=True)


class SessionTool(NamedTuple):
    name: str
    title: str
    description: str
    hints: Hints
    arguments: type[inputs.Arguments]
    result: type[results.Result]
    run: Run

    def listed(self) -> Tool:
        """Return the entry of `tools/list`."""
        read_only, destructive, idempotent, open_world = self.hints
        return Tool(
            name=self.name,
            title=self.title,
            description=self.description,
            input_schema=self.arguments.json_schema(),
            output_schema=self.result.json_schema(),
            annotations=ToolAnnotations(
                title=self.title,
                read_only_hint=read_only,
                destructive_hint=destructive,
                idempotent_hint=idempotent,
                open_world_hint=open_world,
            ),
        )


def _calls(name: str, key: str | None = None) -> Run:
    """Make a `Run` that calls guard.sock with the arguments as they are. `key` wraps a result that is a list."""

    def run(link: SessionLink, arguments: inputs.Arguments) -> Any:
        answer = link.call(name, **arguments.values())
        return answer if key is None else {key: answer}

    return run


_FILES: Final = (
    SessionTool(
        "read_file", "Read a file", "Read the contents of a file", READS,
        inputs.ReadFile, results.FileContent, _calls("read_file"),
    ),
    SessionTool(
        "write_file", "Write a file", "Write content to a file. Creates parent directories if needed.", REPLACES,
        inputs.WriteFile, results.WrittenFile, _calls("write_file"),
    ),
    SessionTool(
        "list_files", "List files", "List files and directories at a path", READS,
        inputs.ListFiles, results.DirectoryContent, _calls("list_files"),
    ),
    SessionTool(
        "search_files", "Search files", "Search for text in files", READS,
        inputs.SearchFiles, results.MatchingLines, _calls("search_files"),
    ),
    SessionTool(
        "why", "Ask whether a change is allowed",
        "Say whether the policy allows a change; if not, which rule refuses it and what to do instead.",
        READS, inputs.Why, results.DecisionResult, _calls("why"),
    ),
)  # fmt: skip

_LEASES: Final = (
    SessionTool(
        "lease_acquire", "Reserve files",
        "Reserve files: until the lease ends, other agents cannot change them. Refused if another lease overlaps.",
        SETS, inputs.LeaseAcquire, results.LeaseResult, _calls("lease.acquire"),
    ),
    SessionTool(
        "lease_extend", "Extend a lease", "Set a new end for a lease of this agent.", SETS,
        inputs.LeaseExtend, results.LeaseResult, _calls("lease.extend"),
    ),
    SessionTool(
        "lease_release", "Release a lease", "End a lease of this agent, so that other agents can change its files.",
        ADDS, inputs.LeaseRelease, results.LeaseResult, _calls("lease.release"),
    ),
    SessionTool(
        "lease_list", "List leases", "List the leases in effect, of all agents.", READS,
        inputs.NoArguments, results.LeaseList, _calls("lease.list", "leases"),
    ),
)  # fmt: skip

TOOLS: Final = {tool.name: tool for tool in (*_FILES, *_LEASES)}
