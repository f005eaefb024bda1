"""The results of the MCP tools. Their JSON schemas are the `outputSchema` of the tools."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Result(BaseModel):
    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the `outputSchema`."""
        return cls.model_json_schema()


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
    question: str | None = Field(None, description="Id of the question to the operator, for ask_wait")


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


class SentMessage(Result):
    id: int | str | None
    sent: str = Field(description="Time of the mail server")


class Message(BaseModel):
    id: int | str | None
    sender: str | None = Field(alias="from")
    subject: str | None
    body_md: str | None
    thread_id: str | None
    importance: str | None
    ack_required: bool | int | None
    created_ts: str | float | None

    model_config = ConfigDict(populate_by_name=True)


class Inbox(Result):
    messages: list[Message] = Field(description="The newest first")


class TaskSummary(BaseModel):
    id: str
    title: str
    issue_type: str
    status: str
    priority: int
    assignee: str = ""
    labels: list[str] = []


class TaskListing(Result):
    issues: list[TaskSummary] = Field(description="The most urgent first, at most 1000")


class Dependency(BaseModel):
    issue_id: str
    depends_on_id: str
    type: str


class TaskComments(BaseModel):
    id: str
    author: str
    text: str
    created_at: str = ""


class Task(Result, TaskSummary):
    description: str = ""
    design: str = ""
    acceptance_criteria: str = ""
    notes: str = ""
    created_by: str = ""
    created_at: str = ""
    updated_at: str = ""
    closed_at: str = ""
    close_reason: str = ""
    dependencies: list[Dependency] = []


class TaskDetails(Task):
    comments: list[TaskComments] = []
    attachments: dict[str, str] = Field({}, description="SHA-256 by path")


class Attachments(Result):
    issue: str
    attachments: dict[str, str] = Field(description="SHA-256 by path")


class RepositoryPlace(BaseModel):
    kind: str = Field(description="source or worktree")
    path: str
    branch: str | None
    issue: str | None
    agent: str | None
    mounted: bool


class RepositoryList(Result):
    repositories: list[RepositoryPlace]


class GitState(Result):
    branch: str = Field(description='"" if HEAD is detached')
    commit: str = Field(description='Commit of HEAD; "" if there is none')
    output: str = Field("", description="What git said")


class WorkTreeState(Result):
    branch: str = Field(description='"" if HEAD is detached')
    clean: bool = Field(description="No file is staged or modified")
    staged: list[str]
    modified: list[str]
    untracked: list[str]


class Patch(Result):
    patch: str
    cut: str = Field("", description='What is missing; "" if the patch is complete')


class AnswerResult(Result):
    question: str
    path: str
    state: str = Field(description="open: no answer yet; allowed: try again; denied: work in another way")
    note: str = Field(description="What the operator says to the agent")
    until: str = Field(description='End of the permission; "" until the session ends')


class TakenBack(BaseModel):
    change: str
    path: str
    operation: str


class ConflictingChange(BaseModel):
    change: str
    path: str
    reason: str


class UndoOutcome(Result):
    taken_back: list[TakenBack]
    conflicts: list[ConflictingChange] = Field(description="Changes that stay, because the file has changed since")
    failures: list[dict[str, Any]] = Field(description="Changes that could not be taken back")
    completed: int = Field(description="Interrupted undos that this one has completed")
