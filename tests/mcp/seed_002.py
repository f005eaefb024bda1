"""The four tools of seed 002, as its definition has them: `input_schema` and description."""

from __future__ import annotations

from typing import Any, Final

_TEXT: Final = "string"


def _property(kind: str, description: str) -> dict[str, str]:
    return {"type": kind, "description": description}


def _tool(description: str, required: list[str], **properties: dict[str, str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    return {"description": description, "input_schema": schema}


TOOLS: Final[dict[str, dict[str, Any]]] = {
    "read_file": _tool(
        "Read the contents of a file",
        ["path"],
        path=_property(_TEXT, "Path to file (relative to project root)"),
        offset=_property("number", "Line number to start from (1-indexed)"),
        limit=_property("number", "Maximum lines to return"),
    ),
    "write_file": _tool(
        "Write content to a file. Creates parent directories if needed.",
        ["path", "content"],
        path=_property(_TEXT, "Path to file (relative to project root)"),
        content=_property(_TEXT, "Content to write"),
        createOnly=_property("boolean", "If true, fail if file exists"),
    ),
    "list_files": _tool(
        "List files and directories at a path",
        ["path"],
        path=_property(_TEXT, "Directory path (relative to project root)"),
        pattern=_property(_TEXT, "Glob pattern to filter results"),
        recursive=_property("boolean", "Include subdirectories"),
    ),
    "search_files": _tool(
        "Search for text in files",
        ["query"],
        query=_property(_TEXT, "Search query (regex supported)"),
        path=_property(_TEXT, "Directory to search in"),
        include=_property(_TEXT, "Glob pattern for files to include"),
        exclude=_property(_TEXT, "Glob pattern for files to exclude"),
    ),
}
