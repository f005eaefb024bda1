"""A policy made ready for deciding: plain data, patterns in automata, every sentence already written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bonobofs.decision import Allowed
from bonobofs.errors import PolicyError
from bonobofs.policy import words
from bonobofs.policy.pattern import Matcher, Pattern, Reach, compile_name, is_wild, may_begin_with, parse

EVERYTHING: Final = "**"
DEFAULT_ROLE: Final = "agent"
"""The role that exists, and writes everywhere, unless the policy defines it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One [[rule]]. `order` is its place in the file, `rank` its place from the widest to the narrowest."""

    order: int
    rank: int
    extensions: frozenset[str] | None
    """The suffixes without their dots."""
    max_size: int | None
    executable: bool
    leave: Allowed
    offer: words.Offer
    wrong_suffix: words.Refusal
    too_large: words.Refusal
    is_executable: words.Refusal


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """One role. `write` is None where the role writes everywhere."""

    name: str
    deny: Matcher[words.Refusal]
    write: Matcher[bool] | None
    elsewhere: words.Refusal
    default: words.Refusal


@dataclasses.dataclass(frozen=True, slots=True)
class Hidden:
    """Which hidden names are open: all, by name at any depth, or by the path up to and including the name."""

    everything: bool
    names: frozenset[str]
    globs: tuple[Callable[[str], object], ...]
    paths: Matcher[bool]
    refusal: words.Refusal

    def admits(self, parts: Sequence[str]) -> bool:
        """Whether every hidden component of the path is open."""
        for depth, name in enumerate(parts, 1):
            if not name.startswith(".") or name in self.names or any(fits(name) for fits in self.globs):
                continue
            if not self.paths.find(parts[:depth]):
                return False
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What the engine decides by. Never changed once made; a new policy, role or lease is a new generation."""

    document: Mapping[str, Any]
    digest: str
    generation: int
    devices: bool
    protect: Matcher[words.Refusal]
    keep: Matcher[words.Refusal]
    hidden: Hidden
    rules: Matcher[Rule]
    offers: tuple[words.Offer, ...]
    roles: Mapping[str, Role]
    unknown_role: words.Refusal
    default: Allowed | None
    """The leave where no rule matches, or None: refused."""
    judges_content: bool
    """Some rule refuses executable content, so that the first bytes of a file are worth reading."""


def digest(document: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of the document as canonical JSON."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def compile_policy(document: Mapping[str, Any], generation: int = 1) -> Policy:
    """Make a policy ready. `document` is `PolicyDocument.model_dump(mode="json")`, or as much of it as there is.

    PolicyError, without file and line, for a pattern that cannot be enforced.
    """
    protect = [parse(text) for table in document.get("protect", ()) for text in table["paths"]]
    keep = [parse(text) for table in document.get("keep", ()) for text in table["paths"]]
    rules = _rules(document.get("rule", ()))
    offers = tuple(rule.offer for rule in sorted(rules, key=lambda rule: rule.order))
    roles = {DEFAULT_ROLE: {"write": [EVERYTHING]}, **document.get("role", {})}
    return Policy(
        document=document,
        digest=digest(document),
        generation=generation,
        devices=bool(document.get("devices", False)),
        protect=Matcher([(parse(".bonobofs/"), words.RESERVED), *((one, words.protected(one)) for one in protect)]),
        keep=Matcher((one, words.kept(one)) for one in keep),
        hidden=_hidden(document.get("hidden", ())),
        rules=Matcher((pattern, rule) for rule in rules for pattern in rule.offer.patterns),
        offers=offers,
        roles={name: _role(name, table, offers) for name, table in roles.items()},
        unknown_role=words.unknown_role(sorted(roles)),
        default=Allowed("default") if document.get("default", "deny") == "allow" else None,
        judges_content=any(not offer.executable for offer in offers),
    )


def _rules(tables: Sequence[Mapping[str, Any]]) -> list[Rule]:
    offers = [_offer(table) for table in tables]
    # From the widest on, so that the first rule to admit a change is the one whose verdict extends furthest: none that
    # also admits it goes to a greater size, nor to the same size with executable content.
    widest = sorted(range(len(offers)), key=lambda index: _narrowness(offers[index]))
    return [_rule(offers[order], order, rank) for rank, order in enumerate(widest)]


def _narrowness(offer: words.Offer) -> tuple[bool, int, bool, str]:
    limit = offer.max_size
    return limit is not None, -(limit or 0), not offer.executable, offer.name


def _offer(table: Mapping[str, Any]) -> words.Offer:
    suffixes = table.get("suffixes")
    return words.Offer(
        name=table["name"],
        patterns=tuple(parse(text) for text in table["paths"]),
        suffixes=None if suffixes is None else tuple(suffixes),
        max_size=table.get("max_size"),
        executable=bool(table.get("executable", True)),
    )


def _rule(offer: words.Offer, order: int, rank: int) -> Rule:
    return Rule(
        order=order,
        rank=rank,
        extensions=None if offer.suffixes is None else frozenset(suffix[1:] for suffix in offer.suffixes),
        max_size=offer.max_size,
        executable=offer.executable,
        leave=Allowed(offer.name, offer.max_size, not offer.executable),
        offer=offer,
        wrong_suffix=words.suffix(offer),
        too_large=words.too_large(offer),
        is_executable=words.executable(offer),
    )


def _role(name: str, table: Mapping[str, Any], offers: Sequence[words.Offer]) -> Role:
    write = [parse(text) for text in table.get("write", ())]
    deny = [parse(text) for text in table.get("deny", ())]
    everywhere = any(not pattern.components for pattern in write)
    usable = [offer for offer in offers if meet(offer.patterns, write)]
    return Role(
        name=name,
        deny=Matcher((pattern, words.role_denies(name, pattern, write)) for pattern in deny),
        write=None if everywhere else Matcher((pattern, True) for pattern in write),
        elsewhere=words.role_writes_elsewhere(name, write),
        default=words.default(usable),
    )


def meet(some: Sequence[Pattern], others: Sequence[Pattern]) -> bool:
    """Whether a path may exist that both sides match."""
    return any(one.may_meet(other) for one in some for other in others)


def _hidden(entries: Sequence[str]) -> Hidden:
    for entry in entries:
        parse_hidden(entry)
    names = [entry for entry in entries if "/" not in entry and entry != EVERYTHING]
    return Hidden(
        everything=EVERYTHING in entries,
        names=frozenset(entry for entry in names if not is_wild(entry)),
        globs=tuple(compile_name(entry) for entry in names if is_wild(entry)),
        paths=Matcher((parse(entry), True) for entry in entries if "/" in entry),
        refusal=words.hidden(entries),
    )


def parse_hidden(entry: str) -> Pattern:
    """Take an entry of `hidden` apart. PolicyError also where it could open no hidden name.

    An entry without a slash is a name or a glob for one name, at any depth: `.github`, `.env.*`. An entry with a slash
    is a pattern for the path that ends in the hidden name: `docs/.cache` opens that name, `docs/.cache/` and `docs/**`
    also the hidden names below. `**` opens all.
    """
    pattern = parse(entry)
    if pattern.reach is Reach.ONLY and not may_begin_with(pattern.components[-1], "."):
        raise PolicyError("this can match no hidden name: its last component does not begin with a dot")
    return pattern
