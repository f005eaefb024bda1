"""Kinds of messages between server and companion, with the fields of each.

The body of a message is JSON unless its comment says otherwise.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class MessageKind(enum.IntEnum):
    """The number of a message in its header."""

    # server to companion
    CONFIG = 1
    """`CompanionConfig`; the first message."""
    SUSPECTS = 5
    """[[path, kinds, size, is protected], …]: changes that did not come through this mount."""
    RELOAD = 7
    """Load the policy again, even if it is unchanged. No body."""
    FLUSH = 11
    """Send all pending messages, then send FLUSH back. No body."""
    LEASES_APPLIED = 13
    """{"number"}: every change is judged by that lease snapshot from now on."""
    ASKED = 33
    """{"question", "path", "operation", "rule", "count", "tool", "details"}: a change waits for an answer."""
    ANSWERS_APPLIED = 34
    """{"number", "live"}: the last answer that the server knows, and the numbers of those in force."""
    POLICY_APPLIED = 15
    """{"policy", "generation"}: the server judges by this policy from now on."""
    CLOSE_SOCKET = 16
    """Accept no more calls. No body."""
    REPLY = 27
    """{"id", …}: the answer to a request; "failed" (trail error) or "error" (server error) on failure."""

    # companion to server
    STATUS = 2
    """`CompanionStatus`; sent once. Descriptors of its namespaces may come with it."""
    CHANGED = 3
    """Directories and names that changed, as `system.watcher_events` encodes them. Bytes."""
    CHANGES_LOST = 4
    """The watcher lost events. No body."""
    OUT_OF_BAND = 6
    """[{"path", "what", "protected", …}, …]: suspects that no session recorded."""
    POLICY = 8
    """{"origin", "policy", "tracked", "file"}: a new policy.

    "tracked" lists the paths that git tracks below its [[scratch]]; "file" is {"owner", "modified"} of the policy file.
    """
    POLICY_ERROR = 9
    """{"origin", "error"}: the policy file holds no valid policy."""
    WATCH = 10
    """{"reason", "part"}: why the source, or only a part of it, is not watched; "reason" is "" if all is watched."""
    LEASES = 12
    """{"number", "until", "leases"}: a lease snapshot and its expiry by CLOCK_BOOTTIME; null leases: unchanged."""
    ANSWERS = 35
    """{"number", "answers"}: every answer of the operator that is not revoked, and the number of the last change."""
    LEASES_ERROR = 14
    """{"reason"}: why the leases cannot be read."""

    # requests of the companion, each with an "id" that REPLY repeats; a question is what `codec.encode_request` makes
    DECIDE = 20
    """{"question"}: the decision on a change of the source. Without a question, the reply is {"generation", "leases"}:
    the policy and leases by which the server judges now."""
    AUTHORIZE = 21
    """{"question", "related"} and the fields of `ChangeRecord`; a permitted change is in flight until ENDED. With
    "generation", the companion has judged the related changes; the reply is "stale" if the server has a newer one."""
    ENDED = 22
    """{"admission", "error", "reason", "written", "details"}: the outcome of a change. The reply comes when the mount
    shows it."""
    DENY = 23
    """A denial, "caller" and "guard": record it."""
    RECORD_CALL = 24
    """{"question"} and the fields of `CallRecord`: record a call that changes nothing."""
    EVENT = 25
    """{"operation", "details"}: record an event of the session."""
    TURN = 33
    """{"name", "by"}: begin a turn. The reply has its number as "turn"."""
    BARRIER = 28
    """The reply comes when the mount shows every earlier change, whatever process made it."""
    DECIDE_EACH = 30
    """{"questions"}: the reply's "denied" has the number and the denial of each question that the mount refuses."""
    EXPLAIN = 29
    """The fields of `PlannedChange`: the reply is the decision of the mount, and the "operation"."""
    GRANT = 31
    """{"grant", "buffer", "at", "size"} and a descriptor: published files that git may take in (`git_grants`).

    "buffer" is the inode number of the file behind the descriptor."""
    REVOKE = 32
    """{"grant"}: the command has ended. The reply has the paths that it has "taken" in."""


class CompanionStatus(NamedTuple):
    """The state of a companion after its start."""

    watch: str
    """Why the source is not watched; "" if it is."""
    refused: str = ""
    """Why the mount must not be made; "" if it may."""
    has_namespace: bool = False
    """The companion is in a mount namespace in which the mount does not cover the source."""
    part: bool = False
    """`watch` concerns a part of the source; the rest is watched."""
