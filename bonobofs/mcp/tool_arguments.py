"""The arguments of the MCP tools, and their JSON schemas.

The schemas of `read_file`, `write_file`, `list_files` and `search_files` are those of seed 002, word for word.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

LARGEST_TEXT: Final = 12 << 20
"""Bytes of UTF-8 in one text. With its escapes, the call must fit the 16 MiB of guard.sock."""


class _PlainSchema(GenerateJsonSchema):
    """JSON schemas without titles, defaults and null: an optional argument is one that can be left out."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        document = super().model_schema(schema)
        return {name: value for name, value in document.items() if name not in ("title", "additionalProperties")}

    def generate(self, schema: CoreSchema, mode: Any = "validation") -> JsonSchemaValue:
        document = super().generate(schema, mode)
        return {name: value for name, value in document.items() if name != "description"}


class Arguments(BaseModel):
    """The arguments of one tool. Unknown arguments are an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the `inputSchema`."""
        return cls.model_json_schema(schema_generator=_PlainSchema)

    def values(self) -> dict[str, Any]:
        """Return the arguments that have a value."""
        return self.model_dump(exclude_none=True)


def _whole(number: float) -> float:
    if not number.is_integer():
        raise PydanticCustomError("whole", "it must be a whole number")
    return int(number)


def _bounded(text: str) -> str:
    if len(text.encode()) > LARGEST_TEXT:
        raise PydanticCustomError("long", "a text has at most {most} bytes", {"most": LARGEST_TEXT})
    return text


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise PydanticCustomError("nul", "it must have no NUL character")
    return text


Whole = Annotated[float, AfterValidator(_whole)]
"""A JSON number, as the seed writes it, that must be whole."""
Text = Annotated[str, AfterValidator(_bounded)]
Texts = list[Text]


class NoArguments(Arguments):
    pass


class ReadFile(Arguments):
    path: Text = Field(description="Path to file (relative to project root)")
    offset: Whole | None = Field(None, description="Line number to start from (1-indexed)")
    limit: Whole | None = Field(None, description="Maximum lines to return")


class WriteFile(Arguments):
    path: Text = Field(description="Path to file (relative to project root)")
    content: Text = Field(description="Content to write")
    createOnly: bool | None = Field(None, description="If true, fail if file exists")  # noqa: N815 - the seed's name


class ListFiles(Arguments):
    path: Text = Field(description="Directory path (relative to project root)")
    pattern: Text | None = Field(None, description="Glob pattern to filter results")
    recursive: bool | None = Field(None, description="Include subdirectories")


class SearchFiles(Arguments):
    query: Text = Field(description="Search query (regex supported)")
    path: Text | None = Field(None, description="Directory to search in")
    include: Text | None = Field(None, description="Glob pattern for files to include")
    exclude: Text | None = Field(None, description="Glob pattern for files to exclude")


class Why(Arguments):
    path: Text = Field(description="Path of the change (relative to project root)")
    operation: Text | None = Field(
        None, description="Planned operation, such as write_file, delete_file, rename or mkdir. Default: write the file"
    )
    to: Text | None = Field(None, description="New path of a rename or link")
    size: int | None = Field(None, description="Planned size of the file in bytes")


class LeaseAcquire(Arguments):
    patterns: Texts = Field(description="Paths and patterns to reserve, such as src/**")
    shared: bool | None = Field(None, description="If true, other shared leases of the same files are admitted")
    seconds: int | None = Field(None, description="Duration. Default: the longest that the policy admits, or 24 h")
    reason: Text | None = Field(None, description="What the files are reserved for")


class LeaseExtend(Arguments):
    lease: Text | None = Field(None, description="UUID of the lease. Default: the agent's oldest lease")
    seconds: int | None = Field(None, description="Duration from now")


class LeaseRelease(Arguments):
    lease: Text | None = Field(None, description="UUID of the lease. Default: the agent's oldest lease")


class MailboxSend(Arguments):
    to: Texts = Field(description="Names of the agents that get the message")
    subject: Text = Field(description="One line")
    body: Text = Field(description="Markdown")
    thread: Text | None = Field(None, description="Thread, such as the id of the issue")
    importance: Literal["low", "normal", "high", "urgent"] | None = Field(None, description="Default: normal")


class MailboxInbox(Arguments):
    limit: int | None = Field(None, description="Maximum messages to return. Default: 20")
    since: Text | None = Field(None, description="Only messages after this time (ISO 8601)")
    urgent: bool | None = Field(None, description="Only messages of importance high or urgent")


class TaskCreate(Arguments):
    title: Text = Field(description="One line that says what is to be done")
    type: Text | None = Field(None, description="task, bug, feature, chore, decision, message or epic. Default: task")
    priority: int | None = Field(None, description="0, the most urgent, to 4. Default: 2")
    description: Text | None = Field(None, description="What is to be done, and why")
    design: Text | None = Field(None, description="How it is to be done")
    acceptance: Text | None = Field(None, description="When it is done")
    notes: Text | None = Field(None, description="Anything else")
    assignee: Text | None = Field(None, description="Agent or person that does it")
    labels: Texts | None = Field(None, description="Labels")
    parent: Text | None = Field(None, description="Issue of which it is a part")
    dependencies: Texts | None = Field(None, description="Issues that must be closed first: ID or TYPE:ID")


class TaskList(Arguments):
    status: Literal["open", "in_progress", "blocked", "deferred", "closed", "done"] | None = Field(
        None, description="Only issues in this status"
    )
    assignee: Text | None = Field(None, description="Only issues of this assignee")
    label: Text | None = Field(None, description="Only issues with this label")


class TaskShow(Arguments):
    issue: Text = Field(description="Id of the issue")


class TaskAssign(Arguments):
    issue: Text = Field(description="Id of the issue")
    assignee: Text = Field(description="Agent or person; an empty text removes the assignee")


class TaskStatus(Arguments):
    issue: Text = Field(description="Id of the issue")
    status: Literal["open", "in_progress", "done", "closed"] = Field(description="New status")


class TaskComment(Arguments):
    issue: Text = Field(description="Id of the issue")
    text: Text = Field(description="The comment")


class TaskCancel(Arguments):
    issue: Text = Field(description="Id of the issue")
    reason: Text = Field(description="Why it is closed without being done")


class TaskAttach(Arguments):
    issue: Text = Field(description="Id of the issue")
    path: Text = Field(description="Path of a file (relative to project root)")


class GitCommit(Arguments):
    message: Annotated[Text, AfterValidator(_without_nul)] = Field(description="The commit message")
    files: Texts | None = Field(None, description="Commit only these files, as they are now. Default: what is staged")


class GitBranch(Arguments):
    name: Text = Field(description="The branch")
    base: Text | None = Field(None, description="Create it at this commit or branch. Default: HEAD")
    checkout: bool | None = Field(None, description="If true, check the branch out")
    create: bool | None = Field(None, description="If false, the branch exists. Default: true")


class GitMerge(Arguments):
    source: Text = Field(description="The branch to merge")
    target: Text | None = Field(None, description="The branch that changes. Default: the current one")
    strategy: Literal["merge", "squash"] | None = Field(None, description="Default: merge")


class GitDiff(Arguments):
    path: Text | None = Field(None, description="One file or directory. Default: all")


class AskWait(Arguments):
    question: Text = Field(description="Id of the question, from the refusal")
    seconds: int | None = Field(None, description="How long to wait for the operator's answer. Default and most: 100")


class Undo(Arguments):
    change: Text | None = Field(None, description="Id of one change, SESSION:NUMBER")
    turn: Text | None = Field(None, description="Id or name of a turn: all its changes")
    since: Text | None = Field(None, description="All changes since this time (ISO 8601)")
    path: Text | None = Field(None, description="Only changes of this path, or below it")
    this_session: bool | None = Field(None, description="If true, all changes of this session")
