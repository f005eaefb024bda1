"""The sentences of denials.

The reader of a denial will retry, so each denial says what to do instead. The compiler of a policy builds the sentences
once, so they contain no path, time or id of a request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from bonobofs.policy.decision import Code, Layer
from bonobofs.policy.pattern import Pattern, Reach

_SHOWN: Final = 6
"""Maximum number of patterns or rules in one sentence. `.bonobofs/policy.md` and `policy show` list all of them."""

_UNITS: Final = ((10**12, "TB"), (2**40, "TiB"), (10**9, "GB"), (2**30, "GiB"), (10**6, "MB"), (2**20, "MiB"))
_SMALL_UNITS: Final = ((10**3, "KB"), (2**10, "KiB"))
_REPEATED: Final = re.compile(r"(\[[^]]+\])\1+")


class Refusal(NamedTuple):
    """The constant part of a denial."""

    code: Code
    rule: str
    reason: str
    instead: str


class Offer(NamedTuple):
    """The changes that one rule permits, in the terms of the policy file."""

    name: str
    patterns: tuple[Pattern, ...]
    suffixes: tuple[str, ...] | None
    max_size: int | None
    executable: bool


def size(count: int) -> str:
    """Format a size: `1 MB` for 1,000,000 bytes, `1 MiB` for 1,048,576; bytes if no unit divides it."""
    for unit, name in (*_UNITS, *_SMALL_UNITS):
        if count and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count:,} byte{'' if count == 1 else 's'}"


def listed(words: Sequence[str], last: str = "or", most: int = _SHOWN) -> str:
    """Format a list as `a, b or c`. A list of more than `most` items ends with the number of the others."""
    if len(words) > most:
        return f"{', '.join(words[:most])} {last} {len(words) - most} more"
    return f" {last} ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def where_text(patterns: Sequence[Pattern]) -> str:
    """Format patterns for a sentence: `below docs/ or src/`, or `at *.toml`."""
    if any(not pattern.components for pattern in patterns):
        return "anywhere"
    if all(pattern.reach is Reach.SUBTREE for pattern in patterns):
        return f"below {listed([pattern.text for pattern in patterns])}"
    return f"at {listed([pattern.text for pattern in patterns])}"


def shortened(pattern: str) -> str:
    """Shorten a pattern for people: `[0-9]{6}` for six times `[0-9]`."""
    return _REPEATED.sub(lambda found: f"{found[1]}{{{len(found[0]) // len(found[1])}}}", pattern)


def offer(rule: Offer) -> str:
    """Format the changes that a rule permits: `a .md file of at most 1 MB below docs/`."""
    kind = f"a {listed(rule.suffixes, most=len(rule.suffixes))} file" if rule.suffixes is not None else "a file"
    limit = f" of at most {size(rule.max_size)}" if rule.max_size is not None else ""
    return f"{kind}{limit} {where_text(rule.patterns)}"


def offers(rules: Sequence[Offer]) -> str:
    """Return the advice for a change that no rule permits."""
    if not rules:
        return "Change nothing here; the policy admits no change at all. Ask the operator."
    shown = [offer(rule) for rule in rules[:_SHOWN]]
    more = f"; {len(rules) - _SHOWN} more rules admit changes elsewhere" if len(rules) > _SHOWN else ""
    return f"Write {'; or '.join(shown)}{more}."


BAD_PATH: Final = Refusal(
    Code.OUTSIDE,
    "outside",
    "The path is not a plain path below the workspace's root.",
    "Name the file from the workspace's root, without .., ., empty components or NUL.",
)
ROOT: Final = Refusal(
    Code.OUTSIDE,
    "outside:root",
    "The workspace's root itself cannot be made, removed, renamed or replaced.",
    "Change what lies below the root.",
)
TARGET: Final = Refusal(
    Code.OUTSIDE,
    "outside:symlink",
    "The symlink would lead out of the workspace, as every absolute target does.",
    "Use a relative target inside the workspace.",
)
UNKNOWN_TARGET: Final = Refusal(
    Code.OUTSIDE,
    "outside:symlink:unknown",
    "The target of the symlink is empty, or has a NUL or a .. after a name, so its place is unknown.",
    "Use a target with every .. at its beginning.",
)
REPOSITORY_TARGET: Final = Refusal(
    Code.OUTSIDE,
    "outside:symlink:repository",
    "A symlink in `.git` cannot lead out of it.",
    "Use a target in `.git`.",
)
PROTECTED_TARGET: Final = Refusal(
    Code.OUTSIDE,
    "outside:symlink:protected",
    "The symlink would lead into a protected path.",
    "Use a target that is not protected.",
)
DEVICE: Final = Refusal(
    Code.DEVICE,
    "device",
    "No device file is made here: the policy must say devices = true and the server must run as root.",
    "Use a regular file, a FIFO or a socket.",
)
REPOSITORY: Final = Refusal(
    Code.PROTECTED,
    "repository",
    "`.git` is the repository of this session, and the mount keeps it in its place.",
    "Change what lies in it, with git.",
)
PROTECTED_BRANCH: Final = Refusal(
    Code.PROTECTED,
    "repository:protected",
    "This branch is protected: it follows the source, and the session does not move it.",
    "Commit on a branch of your own: git switch -c NAME.",
)
HARDLINK: Final = Refusal(
    Code.HARDLINK,
    "hardlink",
    "The file has other names that are not known and allowed; a change here would change it there too.",
    "Copy the file to a new name and rename the copy over this one.",
)
ELSEWHERE: Final = (
    "scratch",
    "Scratch files and the rest of the workspace lie on different layers, so nothing is renamed or linked across.",
    "Copy it and remove the old name, as mv does.",
)
"""Rule, reason and advice of a rename or link between scratch and the rest."""
OF_SOURCE: Final = (
    "scratch",
    "The source has this at a scratch path. There, only files and symlinks of the source can be renamed, as copies.",
    "Copy it and remove the old name, as mv does.",
)
TWO_SCRATCH: Final = (
    "scratch",
    "The two paths belong to different [[scratch]] tables, and each table has a limit of its own.",
    "Copy it and remove the old name, as mv does.",
)
OF_STAGED: Final = (
    "temporary",
    "This is a staged file, which is not in the source. It cannot be exchanged with a file or moved to scratch.",
    "Rename it to a name that a rule admits; it enters the source there.",
)
LEASED: Final = Refusal(
    Code.LEASED,
    "lease",
    "Another agent has leased this path.",
    "Wait until the lease ends, or ask its holder to release it; bonobofs lease list shows the holder.",
)
LEASED_BELOW: Final = Refusal(
    Code.LEASED,
    "lease:symlink",
    "Another agent has leased paths below, and a symlink here would lead around the lease.",
    LEASED.instead,
)
LEASES_UNKNOWN: Final = Refusal(
    Code.LEASED,
    "lease",
    "The leases cannot be read, so the holders of this path are unknown.",
    "Try again in a few seconds; if it fails again, ask the operator to run bonobofs db status.",
)
RESERVED: Final = Refusal(
    Code.PROTECTED,
    "protect:.bonobofs/",
    "The name .bonobofs belongs to bonobofs; nothing may change it.",
    "Read .bonobofs/policy.md there, and write somewhere else.",
)
ONLY_IN_A_MOUNT: Final = {
    Layer.SCRATCH: (
        "Scratch files exist only inside a mount. None of them is written into the workspace.",
        "Make it in a mount of the workspace, or write where a rule admits it.",
    ),
    Layer.STAGED: (
        "Temporary names are staged only inside a mount. None of them is written into the workspace.",
        "Write the file under its own name; it appears or changes at once.",
    ),
}
"""Reason and advice for a caller that has the source layer only."""
NO_ROLE_RULE: Final = "role"
NO_TOOL: Final = Refusal(
    Code.ROLE, "role:tools", "There is no such tool.", "Use read_file, write_file, list_files, search_files or undo."
)
NOBODYS: Final = {
    "git": Refusal(
        Code.ROLE,
        "role:git",
        "Worktrees are made and removed by the operator alone.",
        "Ask the operator: bonobofs worktree add and remove do it.",
    ),
    "socket": Refusal(
        Code.ROLE, "role:socket", "There is no such call.", "Call what the documentation of the guard socket lists."
    ),
}
"""The refusals of operations that no role can have, by list."""

LEASES_RULE: Final = "leases"
PUBLISHED: Final = "published"
"""Name of the rule that permits a git command to take in a published file."""
BUILT_IN_RULES: Final = frozenset(
    {"default", "device", "hardlink", "hidden", LEASES_RULE, "outside", PUBLISHED, "repository", "temporary"}
    | {NO_ROLE_RULE}
)
"""Rule names of decisions without a [[rule]]. A [[rule]] may not have one of these names."""


def protected(pattern: Pattern) -> Refusal:
    """The refusal of one [[protect]] pattern."""
    name = pattern.components[-1] if pattern.components else ""
    instead = {
        ".git": "Leave repository data to the git gate; nothing writes .git directly.",
        ".beads": "Leave issue data to the Beads gate; nothing writes .beads directly.",
        "policy.toml": "Ask the operator; the policy in force is kept outside the workspace.",
    }.get(name, "Leave it as it is and write somewhere else, or ask the operator.")
    return Refusal(
        Code.PROTECTED, f"protect:{pattern.text}", "The policy protects this path from every change.", instead
    )


def rule_refuses(name: str, reason: str) -> Refusal:
    """The refusal of a [[rule]] with `refuse`."""
    instead = "Leave the file as it is, and tell the operator which change it needs."
    return Refusal(Code.PROTECTED, name, reason, instead)


def secret(pattern: str) -> Refusal:
    """The refusal of one entry of `secrets`."""
    reason = "The policy hides this name: no program of the session may read or make such a file."
    instead = "Ask the operator for the value, or read it from an environment variable."
    return Refusal(Code.SECRET, f"secrets:{pattern}", reason, instead)


def symlink_above(refusal: Refusal) -> Refusal:
    """The refusal of a symlink in place of a directory above paths that `refusal` restricts."""
    reason = "The policy restricts paths below, and a symlink here would lead around it."
    instead = "Make a directory here, or put the symlink at another path."
    return Refusal(refusal.code, f"symlink:{refusal.rule}", reason, instead)


def kept(pattern: Pattern) -> Refusal:
    """The refusal of one [[keep]] pattern."""
    reason = "The policy keeps this file: it is never deleted or renamed away."
    instead = "Keep it under its name; where a rule admits the path, edit it or rename a new regular file over it."
    return Refusal(Code.KEEP, f"keep:{pattern.text}", reason, instead)


def ask_open(pattern: str) -> Refusal:
    """The refusal of one [[ask]] pattern until the operator answers."""
    reason = "A change here needs the operator's permission."
    instead = "Wait for the answer with `bonobofs ask wait QUESTION` and try again, or do other work first."
    return Refusal(Code.ASK, f"ask:{pattern}", reason, instead)


def ask_refused(pattern: str) -> Refusal:
    """The refusal of one [[ask]] pattern after the operator's no."""
    reason = "The operator has refused this change."
    return Refusal(Code.ASK, f"ask:{pattern}", reason, "Do the work in another way, as the operator's note says.")


def scratch_is_full(patterns: Sequence[Pattern], max_total: int | None) -> Refusal:
    """The refusal of a change that exceeds the limit of one [[scratch]]."""
    limit = size(max_total or 0)
    reason = f"All scratch files {where_text(patterns)}, and 4 KiB for each, would be larger than the {limit} allowed."
    instead = "Delete scratch files that are not needed any more."
    return Refusal(Code.SIZE, f"scratch:{patterns[0].text}", reason, instead)


NO_SPACE: Final = Refusal(
    Code.SPACE,
    "scratch",
    "The disk of the state directory is almost full; the space that is left is reserved for records.",
    "Delete scratch files that are not needed any more, or ask the operator to free space for the state directory.",
)
TEMPORARY_FULL: Final = Refusal(
    Code.SIZE,
    "temporary",
    "The session keeps as many temporary files as it may.",
    "Remove temporary files that are not needed any more, or rename them to a name that a rule admits.",
)


def hidden(allowed: Sequence[str]) -> Refusal:
    """The refusal of hidden names; `allowed` are the entries of `hidden`."""
    also = f", or one that the policy lists: {listed(allowed)}" if allowed else ""
    return Refusal(
        Code.HIDDEN,
        "hidden",
        "Hidden names, which begin with a dot, are closed unless the policy lists them.",
        f"Use a name without a leading dot{also}.",
    )


def unknown_role(defined: Sequence[str]) -> Refusal:
    """The refusal of everything to a role that the policy does not define."""
    reason = "The policy does not define this role, so it may do nothing."
    return Refusal(Code.ROLE, NO_ROLE_RULE, reason, f"Work in a role that is defined: {listed(defined)}.")


def role_denies(name: str, pattern: Pattern, write: Sequence[Pattern]) -> Refusal:
    """The refusal of one pattern of a role's `deny`."""
    reason = f"The role {name} may not change this path."
    instead = f"The role is denied {pattern.text}. {_role_instead(name, write)}"
    return Refusal(Code.ROLE, f"role:{name}:{pattern.text}", reason, instead)


def role_writes_elsewhere(name: str, write: Sequence[Pattern]) -> Refusal:
    """The refusal outside a role's `write`."""
    return Refusal(Code.ROLE, f"role:{name}", f"The role {name} does not write here.", _role_instead(name, write))


def call_rule(role: str, family: str, word: str) -> str:
    """Return the rule name for one word of a role's lists: `role:worker:git:commit`."""
    return f"role:{role}:{family}:{word}"


def role_lacks(role: str, family: str, word: str, own: Sequence[str], others: Sequence[str]) -> Refusal:
    """The refusal of an operation that the role's list lacks. `own` is that list; the roles `others` have it."""
    call = {"tools": f"the tool {word}", "git": f"git {word}", "beads": f"{word} at the Beads gate"}[family]
    ways = [f"use what this role has there: {', '.join(own)}"] if own else []
    ways += [f"work in a role that has it: {listed(others)}"] if others else []
    advice = "; or ".join(ways) or "Ask the operator; no role of this policy has it"
    reason = f"The role {role} does not have {call}."
    return Refusal(Code.ROLE, call_rule(role, family, word), reason, f"{advice[:1].upper()}{advice[1:]}.")


def _role_instead(name: str, write: Sequence[Pattern]) -> str:
    if not write:
        return "Ask the operator for a role that writes; this one only reads."
    if any(not pattern.components for pattern in write):
        return f"Write somewhere that the role {name} is not denied."
    return f"Write {where_text(write)}."


def default(rules: Sequence[Offer]) -> Refusal:
    """The refusal if no rule matches; `rules` are the rules that the role can use."""
    return Refusal(Code.DEFAULT, "default", "No rule of the policy admits a change of this path.", offers(rules))


def suffix(rule: Offer) -> Refusal:
    suffixes = rule.suffixes or ()
    reason = f"Only {listed(suffixes, most=len(suffixes))} files may be written here."
    return Refusal(Code.SUFFIX, rule.name, reason, f"Write {offer(rule)}.")


def special_suffix(rule: Offer) -> Refusal:
    """Return the refusal of a symlink, FIFO, socket or device whose name does not end in a suffix of the rule."""
    suffixes = listed(rule.suffixes or ())
    reason = f"A symlink, FIFO, socket or device needs a name that ends in {suffixes} here, as a file does."
    return Refusal(Code.SUFFIX, rule.name, reason, f"Use a name that ends in {suffixes}, {where_text(rule.patterns)}.")


def too_large(rule: Offer) -> Refusal:
    limit = size(rule.max_size or 0)
    reason = f"The file would be larger than the {limit} allowed here."
    return Refusal(Code.SIZE, rule.name, reason, f"Keep it to {limit}, or split it into several files.")


def executable(rule: Offer) -> Refusal:
    return Refusal(
        Code.EXECUTABLE,
        rule.name,
        "Nothing executable may be written here: no x permission, no #! line, no program.",
        f"Write {offer(rule)}, as plain text without x permission.",
    )


NETWORK_RULE: Final = "network"
"""The rule of a permitted connection."""
_NETWORK_HELP: Final = "Work without this host, or ask the operator to allow it"
NETWORK: Final = {
    word: Refusal(Code.NETWORK, f"{NETWORK_RULE}:{word}", reason, instead)
    for word, reason, instead in (
        (
            "policy",
            "The policy does not admit this host at this port.",
            f"{_NETWORK_HELP}: an entry in [network] allow of the policy.",
        ),
        (
            "list",
            "The operator's list does not admit this host at this port.",
            f"{_NETWORK_HELP}: bonobofs network allow HOST:PORT.",
        ),
        ("host", "This is no plain host name or address.", "Use a name of letters, digits, hyphens and dots."),
        (
            "address",
            "The host has no public address.",
            f"{_NETWORK_HELP}: an entry with private = true in [network] allow of the policy.",
        ),
        (
            "server_name",
            "The TLS server name is not the host of this connection.",
            "Connect to the host by the name that the TLS handshake sends.",
        ),
        (
            "http",
            "The HTTP request is malformed, or names another host than this connection.",
            "Send one well-formed HTTP/1.1 request for the host of this connection, or use HTTPS.",
        ),
        (
            "protocol",
            "Only TCP leaves the sandbox; UDP, ICMP and other protocols do not.",
            "Use TCP, such as HTTPS; names are resolved in the sandbox.",
        ),
        (
            "port",
            "Programs reach this port through the proxy only.",
            "Use the proxy that HTTPS_PROXY and ALL_PROXY name, or ask the operator to list this port.",
        ),
        ("limit", "Too many connections are open.", "Close connections, then try again."),
        (
            "record",
            "The connection cannot be recorded, so it is not made.",
            "Ask the operator to free space for the state directory or to look at `bonobofs status`.",
        ),
        ("removed", "The operator removed this host from the list.", f"{_NETWORK_HELP} again."),
    )
}
"""The refusals of connections, by the word that egress sends with `network.record`."""
