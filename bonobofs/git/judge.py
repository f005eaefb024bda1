"""The rules of publication that concern references and commits. Pure: the facts are collected by `publication`.

kind = kind_of(update, facts)
refusal = judge_branch(rules, name, facts) or judge_commit(rules, commit, standing)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from bonobofs.git import branch_rules
from bonobofs.git.branch_rules import Refusal, Rules, foreign_trailers, judge_message
from bonobofs.policy.request import Operation

CREATE: Final = "create"
FAST_FORWARD: Final = "fast-forward"
MERGE: Final = "merge"
FORCE: Final = "force"
DELETE: Final = "delete"
TAG: Final = "tag"

OPERATIONS: Final = {
    CREATE: Operation.CREATE_BRANCH,
    FAST_FORWARD: Operation.COMMIT,
    MERGE: Operation.MERGE,
    FORCE: Operation.COMMIT,
    DELETE: Operation.DELETE_BRANCH,
    TAG: Operation.TAG,
}
"""The operation that the role must have for each kind of update. A force that adds no commit needs RESET."""

SLACK: Final = 24 * 3600
"""Seconds by which the clock of a committer may differ from that of the service."""
_PERSON: Final = re.compile(rb"(.*?) ?<([^<>\n]*)> (\d{1,12}) [+-]\d{4}", re.DOTALL)
_HEADERS: Final = (b"encoding", b"gpgsig", b"gpgsig-sha256", b"mergetag")


class Person(NamedTuple):
    """An author, committer or tagger; `time` in seconds since the epoch."""

    name: str
    email: str
    time: int


class CommitFacts(NamedTuple):
    """What the rules know of a commit."""

    oid: str
    parents: tuple[str, ...]
    author: Person
    committer: Person
    message: str


class Standing(NamedTuple):
    """Who publishes, when, and for which issue."""

    own: tuple[str, str]
    """Name and e-mail address of the agent."""
    issue: str | None
    now: int
    """Seconds since the epoch."""
    parent_time: Callable[[CommitFacts], int]
    """The latest committer time of the parents of a commit; 0 without parents."""
    originals: Callable[[CommitFacts], Sequence[CommitFacts]]
    """The published commits that have the same author, author time and change as a commit."""


class BranchFacts(NamedTuple):
    """What the rules know of a branch and its update; object ids are hex, "" for none."""

    current: str
    """What the source has now."""
    old: str
    """What the publisher expects it to have."""
    new: str
    is_fast_forward: bool
    publisher: str
    """UUID of the agent who published the branch; "": no agent did."""
    published_tip: str
    agent: str
    """UUID of the agent who publishes."""
    has_namesake: bool
    """A tag or a remote branch has the name."""
    is_checked_out: bool
    """Another work tree has the branch checked out, or this one has it and it is to be deleted."""


def judge_branch(rules: Rules, name: str, context: BranchFacts) -> Refusal | None:
    """Why a branch may not be moved so; None: it may, as far as its commits are admitted."""
    refusal = branch_rules.new_branch(rules, name)
    if refusal is not None:
        return refusal
    if context.has_namesake:
        return branch_rules.AMBIGUOUS
    if context.publisher not in ("", context.agent):
        return branch_rules.PUBLISHER
    if context.is_checked_out:
        return branch_rules.CHECKED_OUT
    if context.current != context.old:
        return branch_rules.MOVED
    drops = bool(context.current) and not context.is_fast_forward
    if drops and (context.publisher != context.agent or context.published_tip != context.current):
        return branch_rules.FORCE
    return None


def judge_tag(name: str, *, exists: bool, has_namesake: bool) -> Refusal | None:
    """Why a tag may not be published; None: it may."""
    if exists:
        return branch_rules.TAG_EXISTS
    return branch_rules.AMBIGUOUS if has_namesake else branch_rules.new_tag(name)


def kind_of(context: BranchFacts, *, merges: bool) -> str:
    """The kind of the update of a branch; `merges`: its new commits hold a merge, or it has none of its own."""
    if not context.new:
        return DELETE
    if not context.current:
        return CREATE
    if not context.is_fast_forward:
        return FORCE
    return MERGE if merges else FAST_FORWARD


def judge_commit(rules: Rules, commit: CommitFacts, standing: Standing) -> Refusal | None:
    """Why a commit may not be published, apart from its paths; None: it may."""
    own = standing.own
    if (commit.committer.name, commit.committer.email) != own:
        return branch_rules.COMMITTER
    latest = standing.now + SLACK
    earliest = min(standing.parent_time(commit), standing.now) - SLACK
    if not earliest <= commit.committer.time <= latest or commit.author.time > latest:
        return branch_rules.DATE
    is_foreign = (commit.author.name, commit.author.email) != own
    trailers = foreign_trailers(commit.message, own)
    if is_foreign or trailers:
        originals = [one for one in standing.originals(commit) if commit.message.startswith(one.message.rstrip())]
        if is_foreign and not originals:
            return branch_rules.AUTHOR
        if not trailers <= frozenset[str]().union(*(foreign_trailers(one.message, own) for one in originals)):
            return branch_rules.TRAILER
    if len(commit.parents) > 1:
        return None
    return None if is_foreign else judge_message(rules, commit.message, standing.issue)


def read_commit(oid: str, data: bytes) -> CommitFacts | None:
    """Read a commit object strictly; None: git would read it in several ways, or has no such header."""
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
    return CommitFacts(oid, tuple(parents), people[0], people[1], _decoded(body, encoding))


def read_tagger(data: bytes) -> tuple[str, Person] | None:
    """The target of an annotated tag of a commit, and its tagger; None: it is of something else, or malformed."""
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
    except (LookupError, UnicodeError):
        return body.decode("utf-8", "surrogateescape")
