"""The MCP tools of a session: name, title, description, hints, arguments, result, and the call that each one makes.

No tool administers, and none decides: the session judges every call and records it under its own agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from mcp_types import Tool, ToolAnnotations

from bonobofs.mcp import git_tools
from bonobofs.mcp import tool_arguments as inputs
from bonobofs.mcp import tool_results as results
from bonobofs.mcp.session_link import LONGEST_WAIT, SessionLink

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


def _set_status(link: SessionLink, arguments: inputs.TaskStatus) -> Any:
    """Change the status of an issue. A closed issue is opened by `beads.reopen`; an open one stays as it is."""
    if arguments.status != "open":
        return link.call("beads.update", **arguments.values())
    issue = link.call("beads.show", issue=arguments.issue)
    return issue if issue["status"] == "open" else link.call("beads.reopen", issue=arguments.issue)


def _wait_for_answer(link: SessionLink, arguments: inputs.AskWait) -> Any:
    seconds = LONGEST_WAIT if arguments.seconds is None else min(arguments.seconds, LONGEST_WAIT)
    return link.call("ask.wait", question=arguments.question, seconds=seconds)


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
    SessionTool(
        "ask_wait", "Wait for the operator's answer",
        "Wait for the answer to the question of a refusal with code ASK. If it is allowed, repeat the refused change.",
        READS, inputs.AskWait, results.AnswerResult, _wait_for_answer,
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

_MAIL: Final = (
    SessionTool(
        "mailbox_send", "Send mail", "Send a message to other agents, in the name of this agent.",
        Hints(is_open_world=True), inputs.MailboxSend, results.SentMessage, _calls("mail.send"),
    ),
    SessionTool(
        "mailbox_inbox", "Read mail", "Return the newest messages to this agent.",
        Hints(is_read_only=True, is_idempotent=True, is_open_world=True),
        inputs.MailboxInbox, results.Inbox, _calls("mail.inbox", "messages"),
    ),
)  # fmt: skip

_TASKS: Final = (
    SessionTool(
        "task_create", "Create an issue", "Create an issue of the project.", ADDS,
        inputs.TaskCreate, results.Task, _calls("beads.create"),
    ),
    SessionTool(
        "task_list", "List issues", "List the issues of the project.", READS,
        inputs.TaskList, results.TaskListing, _calls("beads.list", "issues"),
    ),
    SessionTool(
        "task_show", "Show an issue", "Return one issue with its comments and attachments.", READS,
        inputs.TaskShow, results.TaskDetails, _calls("beads.show"),
    ),
    SessionTool(
        "task_assign", "Assign an issue", "Set the assignee of an issue.", SETS,
        inputs.TaskAssign, results.Task, _calls("beads.update"),
    ),
    SessionTool(
        "task_status", "Set the status of an issue",
        "Begin (in_progress), finish (done), close or reopen (open) an issue.", SETS,
        inputs.TaskStatus, results.Task, _set_status,
    ),
    SessionTool(
        "task_comment", "Comment on an issue", "Add a comment to an issue of any assignee.", ADDS,
        inputs.TaskComment, results.Task, _calls("beads.comment"),
    ),
    SessionTool(
        "task_cancel", "Cancel an issue", "Close an issue that will not be done, with the reason.", SETS,
        inputs.TaskCancel, results.Task, _calls("beads.close"),
    ),
    SessionTool(
        "task_attach", "Attach a file", "Store path and SHA-256 of a file of the workspace in an issue.", SETS,
        inputs.TaskAttach, results.Attachments, _calls("beads.attach"),
    ),
    SessionTool(
        "task_detach", "Detach a file", "Remove a path from an issue. The file stays.", SETS,
        inputs.TaskAttach, results.Attachments, _calls("beads.detach"),
    ),
    SessionTool(
        "repo_list", "List repositories", "List the session's source and the worktrees of its repository.", READS,
        inputs.NoArguments, results.RepositoryList, _calls("repo.list", "repositories"),
    ),
)  # fmt: skip

_GIT: Final = (
    SessionTool(
        "git_commit", "Commit", "Commit the named files as they are now, or what is staged.", ADDS,
        inputs.GitCommit, results.GitState, git_tools.commit,
    ),
    SessionTool(
        "git_branch", "Create or check out a branch", "Create a branch, check it out, or both.", ADDS,
        inputs.GitBranch, results.GitState, git_tools.branch,
    ),
    SessionTool(
        "git_merge", "Merge a branch", "Merge a branch. If there are conflicts, nothing changes.", ADDS,
        inputs.GitMerge, results.GitState, git_tools.merge,
    ),
    SessionTool(
        "git_status", "Show the state of the work tree", "List staged, modified and untracked files.", READS,
        inputs.NoArguments, results.WorkTreeState, git_tools.status,
    ),
    SessionTool(
        "git_diff", "Show changes", "Return the changes of tracked files since the last commit as a patch.", READS,
        inputs.GitDiff, results.Patch, git_tools.diff,
    ),
)  # fmt: skip

_UNDO: Final = (
    SessionTool(
        "undo_preview", "Show what an undo would change", "List the changes that undo would take back, and conflicts.",
        READS, inputs.Undo, results.UndoOutcome, _calls("undo.preview"),
    ),
    SessionTool(
        "undo", "Undo changes", "Take back changes of this agent, the newest first. An undo can itself be undone.",
        REPLACES, inputs.Undo, results.UndoOutcome, _calls("undo"),
    ),
)  # fmt: skip

TOOLS: Final = {tool.name: tool for tool in (*_FILES, *_LEASES, *_MAIL, *_TASKS, *_GIT, *_UNDO)}
