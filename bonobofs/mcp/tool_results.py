"""The results of the MCP tools. Their JSON schemas are the `outputSchema` of the tools."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class Result(BaseModel):
    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the `outputSchema`."""
        return cls.model_json_schema(mode="serialization")


class FileContent(Result):
    path: str
    content: str = Field(description="Numbered lines, as cat -n prints them")
    start_line: int
    end_line: int = Field(description="Number of the last line in content")
    total_lines: int | None = Field(description="null: not counted within the time limit")
    cut: str = Field(description='What is missing, and how to get it; "" if the result is complete')


class WrittenFile(Result):
    path: str


class DirectoryItem(BaseModel):
    path: str = Field(description="Relative to the listed directory")
    kind: str
    size: int = Field(description="Bytes of a regular file; -1 for others")


class DirectoryContent(Result):
    path: str
    entries: list[DirectoryItem]
    cut: str = Field(description='What is missing, and how to get it; "" if the result is complete')


class MatchingLine(BaseModel):
    path: str
    line: int
    text: str


class MatchingLines(Result):
    matches: list[MatchingLine]
    searched: int = Field(description="Files that were read; -1 if the search stopped at a limit")
    skipped: int = Field(description="Files that are binary, too large or unreadable")
    cut: str = Field(description='What is missing, and how to get it; "" if the result is complete')


class DecisionResult(Result):
    allowed: bool
    code: str | None = Field(description="Why it is refused; null if it is allowed")
    rule: str
    reason: str | None
    instead: str | None = Field(description="What to do instead")
    path: str
    operation: str
    holder: str | None = Field(None, description="Holder of the lease that refuses the change")
    chain: str | None = None
    until: str | None = None
    about: str | None = None


class LeaseResult(Result):
    id: str
    holder: str
    patterns: list[str]
    shared: bool
    workspace: str | None
    acquired: str
    until: str
    reason: str
    agent: str
    chain: str | None


class LeaseList(Result):
    leases: list[LeaseResult]
