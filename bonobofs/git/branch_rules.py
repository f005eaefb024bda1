"""Rules of the policy's `[git]` table for branch names, tag names, messages and identities. Pure functions.

rules = rules_of(policy.document)
refusal = new_branch(rules, "aidlc/unit-1-scribe")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from bonobofs.policy.decision import Code, Denied
from bonobofs.policy.request import Operation, Principal, WorkspacePath

AIDLC_BRANCH_PREFIX: Final = "aidlc/"
PROTECTED_BRANCHES: Final = ["main", "master", "develop"]
COMMIT_MESSAGE_PATTERN: Final = re.compile(r"^\[[\w.-]+\]\s.+")

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]*(/[a-z0-9][a-z0-9-]*)*")
_TAG_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*(/[A-Za-z0-9][A-Za-z0-9._+-]*)*")
_LONGEST_NAME: Final = 200
_OBJECT_ID: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_ABBREVIATION: Final = re.compile(r"[0-9A-Fa-f]{7,64}")
"""Start of an object id, as git prints it. Git prefers a branch or tag of that name to the object."""
_WILDCARD: Final = re.compile(r"[*?[]")
_FIRST_OF_REFS: Final = ("refs", "heads", "tags", "remotes")
_SPECIAL: Final = re.compile(r"[A-Z_]*HEAD|[A-Z_]+")
_BRACKETED: Final = re.compile(r"\[([^\]\n]*)\]")
_AUTOSQUASH: Final = re.compile(r"(?:(?:fixup|squash|amend)! )+")
_REVERT: Final = re.compile(r'(?:Revert|Reapply) "(.*)"', re.DOTALL)
_TRAILER: Final = re.compile(r"^[ \t]*([A-Za-z-]+-by)[ \t]*:[ \t]*(.*?)[ \t]*$", re.MULTILINE | re.IGNORECASE)
_NOT_IN_IDENTITY: Final = str.maketrans("", "", "<>\n\r\0")


class BranchRules(NamedTuple):
    """The `[git]` table in compiled form."""

    branch_prefix: str = AIDLC_BRANCH_PREFIX
    protected_branches: tuple[str, ...] = tuple(PROTECTED_BRANCHES)
    """Names, or patterns with `*`."""
    message_pattern: re.Pattern[str] = COMMIT_MESSAGE_PATTERN
    author_email: str | None = None
    """Template that may contain {agent} and {id}. None means `ID@bonobofs.invalid`."""
    sign: str | None = None
    """`off`, `ssh:FILE` or `openpgp:KEY`. None means that the operator's git configuration decides."""

    def protects(self, branch: str) -> bool:
        """True if only the operator may move the branch."""
        return any(fnmatchcase(branch, pattern) for pattern in self.protected_branches)

    def excludes_protected(self, branch: str) -> bool:
        """True if git cannot have both this branch and a protected one: one name is a directory of the other."""
        above = (branch[: found.start()] for found in re.finditer("/", branch))
        prefixes = (_WILDCARD.split(pattern, maxsplit=1)[0] for pattern in self.protected_branches)
        return any(map(self.protects, above)) or any(prefix.startswith(f"{branch}/") for prefix in prefixes)


class RuleRefusal(NamedTuple):
    """Refusal by a publication rule. The sentences are constant for a rule and a policy."""

    code: Code
    rule: str
    reason: str
    instead: str

    def of(self, operation: Operation, path: str = "", about: str = "") -> Denied:
        """Return the denial of an operation on the repository ("") or on one of its paths."""
        return Denied(self.code, self.rule, self.reason, self.instead, WorkspacePath(path), operation, None, about)


BRANCH: Final = RuleRefusal(
    Code.GIT, "git.branch", "There is no branch of this name.", "Name a branch that `git branch --list` shows."
)
BASE: Final = RuleRefusal(
    Code.GIT, "git.base", "There is nothing of this name to start from.", "Name a branch that exists as the base."
)
EXISTS: Final = RuleRefusal(
    Code.GIT, "git.exists", "A branch of this name exists already.", "Check it out, or choose another name."
)
CLEAN: Final = RuleRefusal(
    Code.GIT,
    "git.clean",
    "The working tree has uncommitted changes.",
    "Commit them, or put them aside with `git stash`, and try again.",
)
CHECKED_OUT: Final = RuleRefusal(
    Code.GIT,
    "git.checked-out",
    "The branch is checked out in another worktree.",
    "Work in that worktree, or on another branch.",
)
CURRENT: Final = RuleRefusal(
    Code.GIT, "git.checked-out", "A branch that is checked out cannot be deleted.", "Switch its work tree away from it."
)
STRATEGY: Final = RuleRefusal(
    Code.GIT, "git.strategy", "There is no merge strategy of this name.", "Use the strategy merge or squash."
)
SYMBOLIC: Final = RuleRefusal(
    Code.GIT,
    "git.symbolic",
    "The branch of the source is a symbolic reference.",
    "Publish the branch that it stands for.",
)
REF: Final = RuleRefusal(
    Code.GIT,
    "git.ref",
    "Only branches and tags can be published.",
    "Push to refs/heads/NAME, or to refs/tags/NAME.",
)
AMBIGUOUS: Final = RuleRefusal(
    Code.GIT,
    "git.ambiguous",
    "A branch, tag, remote or remote branch of the source has this name, or git reads the name as something else.",
    "Choose another name.",
)
PUBLISHER: Final = RuleRefusal(
    Code.GIT,
    "git.publisher",
    "Another agent published this branch.",
    "Publish under another name, or ask that agent or the operator to move the branch.",
)
_FOLLOW: Final = (
    "Run `git fetch source`, then rebase or merge onto the branch of the source, and publish again. In a work tree "
    "that you share with the operator, run `git reset source/BRANCH` instead, which keeps all files. Then commit your "
    "changes again."
)
FORCE: Final = RuleRefusal(
    Code.GIT,
    "git.force",
    "The update drops commits of the branch that this agent did not publish.",
    _FOLLOW,
)
MOVED: Final = RuleRefusal(
    Code.GIT,
    "git.moved",
    "The branch of the source moved since this session read it.",
    _FOLLOW,
)
TAG_EXISTS: Final = RuleRefusal(
    Code.GIT, "git.tag", "A published tag can be neither moved nor deleted.", "Choose a new name for the tag."
)
TAGGER: Final = RuleRefusal(
    Code.GIT,
    "git.tagger",
    "The tag names another tagger, or it is not a tag of a commit.",
    "Make the tag again with the session's user.name and user.email.",
)
COMMITTER: Final = RuleRefusal(
    Code.GIT,
    "git.committer",
    "The committer of a commit is not the agent.",
    "Unset GIT_COMMITTER_NAME and GIT_COMMITTER_EMAIL, then run `git commit --amend --no-edit` or rebase.",
)
AUTHOR: Final = RuleRefusal(
    Code.GIT,
    "git.author",
    "The author of a commit is another person, and no published commit of that author has the same change.",
    "Run `git commit --amend --reset-author`, or publish the change in the agent's own name.",
)
TRAILER: Final = RuleRefusal(
    Code.GIT,
    "git.trailer",
    "The message has a trailer of another person, and no published commit with the same change has that trailer.",
    "Remove the trailer with `git commit --amend`.",
)
DATE: Final = RuleRefusal(
    Code.GIT,
    "git.date",
    "The date of a commit lies in the future, or before that of its parent.",
    "Unset GIT_COMMITTER_DATE and GIT_AUTHOR_DATE, then run `git commit --amend --no-edit --date=now`.",
)
OBJECT: Final = RuleRefusal(
    Code.GIT,
    "git.object",
    "An object is damaged, has an unknown header or encoding, or is not of the type that git needs there.",
    "Make the commit again with git, with its message in UTF-8.",
)
LIMIT: Final = RuleRefusal(
    Code.GIT,
    "git.limit",
    "The publication exceeds a limit on references, commits, bytes or seconds.",
    "Publish fewer references, or commits in several steps.",
)
SUBMODULE: Final = RuleRefusal(
    Code.GIT,
    "git.submodule",
    "The source has no such commit of the submodule, or .gitmodules names a place outside of the workspace.",
    "Leave the submodule as it is, or ask the operator.",
)
INDEX_CHANGED: Final = RuleRefusal(
    Code.GIT,
    "git.staged",
    "The operator has staged changes in this checkout that the switch would overwrite.",
    "Work in a checkout of its own: ask the operator for `bonobofs worktree add`.",
)
SHARED: Final = RuleRefusal(
    Code.GIT,
    "git.checkout",
    "HEAD of this checkout was moved by another program.",
    "Work in a checkout of its own: ask the operator for `bonobofs worktree add`.",
)
UNPUBLISHED: Final = RuleRefusal(
    Code.GIT,
    "git.unpublished",
    "The source does not have the branch or the commit that HEAD names.",
    "Publish the branch first, or switch to a published branch.",
)
NOT_OURS: Final = RuleRefusal(
    Code.OUTSIDE,
    "outside",
    "No commit may hold a path like this.",
    "Name a file that lies in the workspace, and none of git's own.",
)


def rules_of(document: Mapping[str, Any]) -> BranchRules:
    """Return the rules of a policy document. Missing keys have the defaults of `BranchRules`."""
    table = {key: value for key, value in (document.get("git") or {}).items() if value is not None}
    if "message_pattern" in table:
        table["message_pattern"] = re.compile(table["message_pattern"])
    if "protected_branches" in table:
        table["protected_branches"] = tuple(table["protected_branches"])
    return BranchRules(**table)


def identity(agent: Principal, rules: BranchRules) -> tuple[str, str]:
    """Return name and e-mail address of the agent, for author and committer."""
    name = agent.label.translate(_NOT_IN_IDENTITY).strip(" .,:;\"'\\") or agent.id
    email = f"{agent.id}@bonobofs.invalid"
    if rules.author_email is not None:
        email = rules.author_email.replace("{agent}", name).replace("{id}", agent.id)
    return name, email.translate(_NOT_IN_IDENTITY).strip()


def protected(rules: BranchRules) -> RuleRefusal:
    names = ", ".join(rules.protected_branches)
    return RuleRefusal(
        Code.PROTECTED,
        "git.protected",
        f"Protected branches ({names}) are the operator's to move.",
        f"Work on a branch of your own, such as {rules.branch_prefix}ISSUE.",
    )


def bad_name(rules: BranchRules) -> RuleRefusal:
    return RuleRefusal(
        Code.GIT,
        "git.name",
        "The name of a branch is lower-case letters, digits, hyphens and slashes.",
        f"Use a name such as {rules.branch_prefix}unit-1-scribe.",
    )


def bad_prefix(rules: BranchRules) -> RuleRefusal:
    return RuleRefusal(
        Code.GIT,
        "git.prefix",
        f"Branches of agents begin with {rules.branch_prefix}.",
        f"Use a name such as {rules.branch_prefix}unit-1-scribe.",
    )


def bad_message(rules: BranchRules, why: str) -> RuleRefusal:
    example = (
        "Begin with the issue, as in: [gt-17] Add the functional design."
        if rules.message_pattern == COMMIT_MESSAGE_PATTERN
        else f"Write a message that matches `{rules.message_pattern.pattern}`."
    )
    return RuleRefusal(Code.GIT, "git.message", f"A message must {why}.", f"{example} Use `git commit --amend`.")


def new_branch(rules: BranchRules, name: str, *, exists: bool = False) -> RuleRefusal | None:
    """Return the refusal of a branch name, or None if the name may be published.

    `exists`: the source has the branch, so that the agent adds no name.
    """
    if rules.protects(name) or (not exists and rules.excludes_protected(name)):
        return protected(rules)
    if not name.isascii() or len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        return bad_name(rules)
    if not name.startswith(rules.branch_prefix) or name == rules.branch_prefix:
        return bad_prefix(rules)
    return AMBIGUOUS if is_read_otherwise(name) or (not exists and _ABBREVIATION.fullmatch(name)) else None


def new_tag(name: str) -> RuleRefusal | None:
    """Return the refusal of a tag name, or None if the name may be published."""
    fits = name.isascii() and len(name) <= _LONGEST_NAME and _TAG_NAME.fullmatch(name)
    is_id = _ABBREVIATION.fullmatch(name) and not name.isdecimal()  # a date may name a release
    return None if fits and not is_read_otherwise(name) and not is_id else AMBIGUOUS


def is_read_otherwise(name: str) -> bool:
    """True if git would resolve the name as an object id, a special ref or a ref path."""
    return bool(
        name.partition("/")[0] in _FIRST_OF_REFS
        or _OBJECT_ID.fullmatch(name)
        or _SPECIAL.fullmatch(name)
        or name.endswith(".lock")
        or ".." in name
    )


def message(rules: BranchRules, text: str, issue: str | None) -> str | RuleRefusal:
    """Return the message of a GitGuard commit, with `[ISSUE]` in front if that is missing, or its refusal."""
    if issue is not None and text and _BRACKETED.match(text) is None:
        prefixed = f"[{issue}] {text.lstrip()}"
        text = prefixed if rules.message_pattern.match(prefixed) else text
    refusal = judge_message(rules, text, issue)
    return text if refusal is None else refusal


def judge_message(rules: BranchRules, text: str, issue: str | None) -> RuleRefusal | None:
    """Return the refusal of the message of a non-merge commit, or None. The message is not rewritten."""
    if not is_text(text):
        return bad_message(rules, "be UTF-8 without NUL")
    text = text[found.end() :] if (found := _AUTOSQUASH.match(text)) else text
    subject = text.partition("\n")[0]
    reverted = _REVERT.fullmatch(subject)
    while reverted is not None and (inner := _REVERT.fullmatch(reverted[1])) is not None:
        reverted = inner
    if reverted is not None and rules.message_pattern.match(reverted[1]):
        return None
    found = _BRACKETED.match(text)
    if found is not None and rules.message_pattern == COMMIT_MESSAGE_PATTERN:
        if issue is not None and found[1] != issue:
            return bad_message(rules, "name the issue that it is for, and no other")
        if not text[found.end() :].strip():
            return bad_message(rules, "say what was done, not only for which issue")
    if not rules.message_pattern.match(text):
        return bad_message(rules, f"match `{rules.message_pattern.pattern}`")
    return None


def foreign_trailers(text: str, own: tuple[str, str]) -> frozenset[str]:
    """Return the trailers `WORD-by: PERSON` that name another person than `own` (name and e-mail address)."""
    signature = f"{own[0]} <{own[1]}>"
    return frozenset(f"{word.lower()}: {person}" for word, person in _TRAILER.findall(text) if person != signature)


def is_text(text: str) -> bool:
    """True if the message is valid UTF-8 without NUL, so that git can store all of it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


class UpdateKind(StrEnum):
    """Kind of a ref update."""

    CREATE = "create"
    FAST_FORWARD = "fast-forward"
    MERGE = "merge"
    FORCE = "force"
    DELETE = "delete"
    TAG = "tag"


OPERATIONS: Final = {
    UpdateKind.CREATE: Operation.CREATE_BRANCH,
    UpdateKind.FAST_FORWARD: Operation.COMMIT,
    UpdateKind.MERGE: Operation.MERGE,
    UpdateKind.FORCE: Operation.COMMIT,
    UpdateKind.DELETE: Operation.DELETE_BRANCH,
    UpdateKind.TAG: Operation.TAG,
}
"""Operation that the role must allow for each kind of update. A forced update without new commits needs RESET."""

SLACK: Final = 24 * 3600
"""Seconds by which a committer's clock may differ from ours."""
_PERSON: Final = re.compile(rb"(.*?) ?<([^<>\n]*)> (\d{1,12}) [+-]\d{4}", re.DOTALL)
_HEADERS: Final = (b"encoding", b"gpgsig", b"gpgsig-sha256", b"mergetag")
_ENCODING: Final = re.compile(
    rb"utf-?8|(us-)?ascii|iso-?8859-([1-9]|1[013-6])|latin-?[1-8]|(windows-|cp)125[0-8]|cp(437|85[02]|866|874)"
    rb"|koi8-[ru]|euc-(jp|kr|cn)|shift[_-]jis|sjis|cp9(32|36|49|50)|gb(k|2312|18030)|big5",
    re.IGNORECASE,
)
"""Encodings that git and Python know and that keep ASCII text. Stateful ones and escapes could hide a trailer."""


class Person(NamedTuple):
    """An author, committer or tagger; `time` in seconds since the epoch."""

    name: str
    email: str
    time: int


class CommitRecord(NamedTuple):
    """Fields of a commit that the rules judge."""

    oid: str
    parents: tuple[str, ...]
    author: Person
    committer: Person
    message: str


class CommitContext(NamedTuple):
    """Publishing agent, time and issue of a publication."""

    own: tuple[str, str]
    """Name and e-mail address of the agent."""
    issue: str | None
    now: int
    """Seconds since the epoch."""
    parent_time: Callable[[CommitRecord], int]
    """Return the latest committer time of a commit's parents, or 0 without parents."""
    originals: Callable[[CommitRecord], Sequence[CommitRecord]]
    """Return the published commits with the same author, author time and change."""


class BranchContext(NamedTuple):
    """State of a branch and its update. Object ids are hex; "" means no object."""

    current: str
    """Current tip in the source."""
    old: str
    """Tip that the publisher expects in the source."""
    new: str
    is_fast_forward: bool
    publisher: str
    """UUID of the agent that published the branch, or ""."""
    published_tip: str
    agent: str
    """UUID of the publishing agent."""
    has_namesake: bool
    """A tag or a remote branch has the same name, or a remote if the branch is new."""
    is_checked_out: bool
    """Another work tree has the branch checked out, or this work tree has it and the update deletes it."""


def judge_branch(rules: BranchRules, name: str, context: BranchContext) -> RuleRefusal | None:
    """Return the refusal of a branch update, or None. `judge_commit` judges its commits."""
    refusal = new_branch(rules, name, exists=bool(context.current))
    if refusal is not None:
        return refusal
    if context.has_namesake:
        return AMBIGUOUS
    if context.publisher not in ("", context.agent):
        return PUBLISHER
    if context.is_checked_out:
        return CHECKED_OUT if context.new else CURRENT
    if context.current != context.old:
        return MOVED
    drops = bool(context.current) and not context.is_fast_forward
    if drops and (context.publisher != context.agent or context.published_tip != context.current):
        return FORCE
    return None


def judge_tag(name: str, *, exists: bool, has_namesake: bool) -> RuleRefusal | None:
    """Return the refusal of a tag, or None."""
    if exists:
        return TAG_EXISTS
    return AMBIGUOUS if has_namesake else new_tag(name)


def kind_of(context: BranchContext, *, merges: bool) -> UpdateKind:
    """Return the kind of a branch update. `merges`: the new commits include a merge, or there are none."""
    if not context.new:
        return UpdateKind.DELETE
    if not context.current:
        return UpdateKind.CREATE
    if not context.is_fast_forward:
        return UpdateKind.FORCE
    return UpdateKind.MERGE if merges else UpdateKind.FAST_FORWARD


def judge_commit(rules: BranchRules, commit: CommitRecord, context: CommitContext) -> RuleRefusal | None:
    """Return the refusal of a commit's committer, dates, author, trailers or message, or None."""
    own = context.own
    if (commit.committer.name, commit.committer.email) != own:
        return COMMITTER
    latest = context.now + SLACK
    earliest = min(context.parent_time(commit), context.now) - SLACK
    if not earliest <= commit.committer.time <= latest or commit.author.time > latest:
        return DATE
    is_foreign = (commit.author.name, commit.author.email) != own
    trailers = foreign_trailers(commit.message, own)
    if is_foreign or trailers:
        originals = [one for one in context.originals(commit) if commit.message.startswith(one.message.rstrip())]
        if is_foreign and not originals:
            return AUTHOR
        if not trailers <= frozenset[str]().union(*(foreign_trailers(one.message, own) for one in originals)):
            return TRAILER
    if len(commit.parents) > 1:
        return None
    return None if is_foreign else judge_message(rules, commit.message, context.issue)


def read_commit(oid: str, data: bytes) -> CommitRecord | None:
    """Parse a commit object. Return None if it is ambiguous, or has an unknown header or encoding."""
    head, blank, body = data.partition(b"\n\n")
    if not blank:
        return None
    lines = [line for line in head.split(b"\n") if not line.startswith(b" ")]
    parents: list[str] = []
    if not lines or not lines.pop(0).startswith(b"tree "):
        return None
    while lines and lines[0].startswith(b"parent "):
        parents.append(lines.pop(0)[7:].decode("ascii", "replace"))
    people = []
    for word in (b"author ", b"committer "):
        found = read_person(lines.pop(0).removeprefix(word)) if lines and lines[0].startswith(word) else None
        if found is None:
            return None
        people.append(found)
    words = [line.partition(b" ")[0] for line in lines]
    if any(word not in _HEADERS for word in words) or len(set(words) - {b"mergetag"}) != len(
        [word for word in words if word != b"mergetag"]
    ):
        return None
    encoding = next((line.partition(b" ")[2] for line in lines if line.startswith(b"encoding ")), b"utf-8")
    if not _ENCODING.fullmatch(encoding):
        return None
    return CommitRecord(oid, tuple(parents), people[0], people[1], _decoded(body, encoding))


def read_tagger(data: bytes) -> tuple[str, Person] | None:
    """Return the target and tagger of an annotated tag of a commit, or None if it is malformed or of another type."""
    lines = data.partition(b"\n\n")[0].split(b"\n")
    if len(lines) < 4 or not lines[0].startswith(b"object ") or lines[1] != b"type commit":
        return None
    person = read_person(lines[3].removeprefix(b"tagger ")) if lines[3].startswith(b"tagger ") else None
    return None if person is None else (lines[0][7:].decode("ascii", "replace"), person)


def read_person(line: bytes) -> Person | None:
    found = _PERSON.fullmatch(line)
    if found is None:
        return None
    name, email = (found[at].decode("utf-8", "surrogateescape") for at in (1, 2))
    return Person(name, email, int(found[3]))


def _decoded(body: bytes, encoding: bytes) -> str:
    try:
        return body.decode(encoding.decode("ascii"), "surrogateescape")
    except UnicodeError:
        return body.decode("utf-8", "surrogateescape")
