"""Compile a policy for the engine: plain data, patterns in automata, and the sentences of all refusals."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from bonobofs.errors import PolicyError
from bonobofs.policy import denials
from bonobofs.policy.allow_list import AllowList
from bonobofs.policy.answers import NO_ANSWERS, Answers, Ask
from bonobofs.policy.decision import REPOSITORY_RULE, Layer, Permit
from bonobofs.policy.lease_set import LeaseSet
from bonobofs.policy.overlap import meets
from bonobofs.policy.pattern import (
    ANY_DEPTH,
    Matcher,
    NameGlobs,
    Pattern,
    Reach,
    compile_name,
    first_match,
    is_wild,
    may_begin_with,
    parse,
)
from bonobofs.policy.request import Operation, WorkspacePath
from bonobofs.policy.role_lists import BUILT_IN, CALLS, EVERY, FAMILIES

EVERYTHING: Final = "**"
REPOSITORY: Final = ".git"
"""Path at which a mount shows the repository."""
ALWAYS_PROTECTED: Final = ("**/.git/", "**/.beads/")
"""Protected by every policy. No source contains the state directory (`session.mount_checks`)."""
DEFAULT_ROLE: Final = "agent"
"""The built-in role, unless the policy defines it. It may write everywhere."""
_ORDINARY: Final = ("notes", "notes.txt", ".notes", ".notes.txt", "Makefile")
"""Ordinary names. A pattern that matches one of them is too wide for `temporary`."""

_EXAMPLES: Final = (".example", ".sample", ".template")
"""Suffixes of files that show the form of a secret file."""


class Rule(NamedTuple):
    """One [[rule]]. `order` is its index in the file, `rank` its index from the widest rule to the narrowest."""

    order: int
    rank: int
    extensions: frozenset[str] | None
    """The suffixes without their dots."""
    max_size: int | None
    executable: bool
    refusal: denials.Refusal | None
    """The refusal of a rule with `refuse`. It applies even if another rule permits the change."""
    permit: Permit
    offer: denials.Offer
    wrong_suffix: denials.Refusal
    wrong_name: denials.Refusal
    """The refusal of a symlink, FIFO, socket or device whose name has another suffix."""
    too_large: denials.Refusal
    is_executable: denials.Refusal


class Role(NamedTuple):
    """One role. `write` is None if the role may write everywhere."""

    name: str
    deny: Matcher[denials.Refusal]
    write: Matcher[bool] | None
    elsewhere: denials.Refusal
    default: denials.Refusal
    calls: Mapping[Operation, Permit | denials.Refusal]
    """The decision on every operation of a gate."""


class Hidden(NamedTuple):
    """The hidden names that may be changed: all, names at any depth, or paths that end in the hidden name."""

    everything: bool
    names: frozenset[str]
    globs: tuple[Callable[[str], object], ...]
    paths: Matcher[bool]
    refusal: denials.Refusal

    def admits(self, components: Sequence[str]) -> bool:
        """True if every hidden component of the path may be changed."""
        for depth, name in enumerate(components, 1):
            if not name.startswith(".") or name in self.names or any(fits(name) for fits in self.globs):
                continue
            if not self.paths.find(components[:depth]):
                return False
        return True


class ScratchQuota(NamedTuple):
    """One [[scratch]]. Its paths may have at most `max_total` bytes together; None: no limit.

    Each name of a file, directory or symlink counts 4 KiB, in addition to its content and extended attributes.
    """

    number: int
    """Index among the tables."""
    patterns: tuple[Pattern, ...]
    max_total: int | None
    full: denials.Refusal
    """The refusal of a change that exceeds `max_total`."""


class Scratch(NamedTuple):
    """One pattern of a [[scratch]]. `order` is its index among all these patterns; the first that matches decides."""

    order: int
    table: ScratchQuota
    permit: Permit


class Tracked:
    """Paths that git tracked when the session began or loaded this policy, and the directories above them."""

    def __init__(self, paths: Iterable[str]) -> None:
        """A path with a final slash includes everything below it."""
        self._exact: Final[set[str]] = set()
        self._subtrees: Final[set[str]] = set()
        for path in paths:
            name = path.rstrip("/")
            (self._subtrees if name != path else self._exact).add(name)
            self._exact.update(_above(name))

    def names(self, path: str) -> bool:
        """True if git tracks the path or a path below it, and the list has it by name."""
        return path in self._exact

    def has(self, path: str) -> bool:
        """True if git tracks the path, a path below it, or a whole directory above it."""
        if path in self._exact:
            return True
        return bool(self._subtrees) and (path in self._subtrees or not self._subtrees.isdisjoint(_above(path)))


def _above(path: str) -> Iterator[str]:
    """Yield the directories above a path without the root, the nearest first."""
    while path := path.rpartition("/")[0]:
        yield path


class RepositoryGrant(NamedTuple):
    """The session's own `.git`. Its protected branches follow the source, and the session cannot move them."""

    protected: tuple[str, ...]
    """Names, or patterns with `*`."""
    table: ScratchQuota
    """The table that counts its bytes. They count in no [[scratch]]."""
    permit: Permit

    def protects(self, branch: str) -> bool:
        """True if the branch follows the source."""
        return any(fnmatch.fnmatchcase(branch, pattern) for pattern in self.protected)

    def judge(self, components: Sequence[str]) -> Permit | denials.Refusal:
        """Return the decision on a change of a path that begins with `.git`."""
        if len(components) == 1:
            return denials.REPOSITORY
        # Git also locks branches that it does not move. The rename of the lock moves the branch, and is refused.
        if components[1:3] == ["refs", "heads"] and self.protects("/".join(components[3:])):
            return denials.PROTECTED_BRANCH
        return self.permit


class Temporary(NamedTuple):
    """The names of staged files: by the last component at any depth, or by the whole path."""

    names: NameGlobs
    paths: Matcher[bool]
    permit: Permit

    def admits(self, components: Sequence[str]) -> bool:
        """True if a file or symlink of this name is staged. Test and backup names of editors are never staged."""
        name = components[-1]
        if not self.names.match(name) and not (self.paths and self.paths.find(components)):
            return False
        return not is_never_staged(name)


class Policy(NamedTuple):
    """A compiled policy. No code changes it."""

    document: Mapping[str, Any]
    digest: str
    generation: int
    devices: bool
    protect: Matcher[denials.Refusal]
    scratch: tuple[ScratchQuota, ...]
    protect_and_scratch: Matcher[denials.Refusal | Scratch]
    """[[protect]] and [[scratch]] patterns in one automaton, because every decision needs both."""
    temporary: Temporary | None
    secrets: Matcher[denials.Refusal]
    """Names that the mount hides, with everything below, unless git tracks them or they are scratch."""
    keep: Matcher[denials.Refusal]
    hidden: Hidden
    rules: Matcher[Rule]
    offers: tuple[denials.Offer, ...]
    roles: Mapping[str, Role]
    unknown_role: denials.Refusal
    default: Permit | None
    """The permit if no rule matches. None: the change is refused."""
    symlinks_anywhere: bool
    """A symlink may be absolute, or leave the workspace."""
    judges_content: bool
    """A rule refuses executable content, so a decision depends on the first bytes of a file."""
    network: AllowList
    """[network] allow."""
    observe: bool
    """Changes that the rules, roles, `hidden` and `keep` refuse are permitted, and recorded as such."""
    asks: Matcher[Ask]
    """The changes that need the operator's permission."""
    answers: Answers = NO_ANSWERS
    leases: LeaseSet | None = None
    """The lease snapshot; None: the session tracks no leases."""
    tracked: Tracked | None = None
    """The paths below [[scratch]] that git tracks; None: no paths."""
    repository: RepositoryGrant | None = None
    """The session's own `.git`; None: the mount shows that of the source read-only."""

    def bound_by(self, leases: LeaseSet | None) -> Policy:
        """Return this policy with a lease snapshot."""
        return self._replace(leases=leases)

    def with_answers(self, answers: Answers) -> Policy:
        """Return this policy with the operator's answers."""
        return self._replace(answers=answers)

    def with_tracked(self, tracked: Tracked | None) -> Policy:
        """Return this policy with tracked paths, which are never scratch."""
        return self._replace(tracked=tracked)

    def with_repository(self) -> Policy:
        """Return this policy for a mount in which the session has its own `.git`."""
        protected = self.document.get("git", {}).get("protected_branches", ("main", "master", "develop"))
        table = ScratchQuota(-1, (parse(f"{REPOSITORY}/"),), None, denials.REPOSITORY)
        permit = Permit(REPOSITORY_RULE, layer=Layer.SCRATCH)
        return self._replace(repository=RepositoryGrant(tuple(protected), table, permit))

    def repository_of(self, components: Sequence[str]) -> RepositoryGrant | None:
        """Return the session's repository if the path is it or is below it."""
        return self.repository if self.repository is not None and components and components[0] == REPOSITORY else None

    def is_scratch(self, components: Sequence[str]) -> bool:
        """True if a [[scratch]] matches the path and git does not track it."""
        return bool(self._scratch_patterns(components)) and not self.goes_by_rules(components)

    def _scratch_patterns(self, components: Sequence[str]) -> list[Scratch]:
        return [each for each in self.protect_and_scratch.find(components) if isinstance(each, Scratch)]

    def secret(self, components: Sequence[str]) -> denials.Refusal | None:
        """Return the refusal of a secret path, which the mount hides; None for all others.

        A path is no secret if git tracks it or a path below it, if it is scratch, or if its name ends like that of an
        example (`.env.example`) and its directory is no secret.
        """
        found = self.secrets.find(components) if components and self.secrets else []
        if not found or self.repository_of(components) is not None:
            return None
        if components[-1].endswith(_EXAMPLES):
            return self.secret(components[:-1])
        if self.tracked is not None and self.tracked.names("/".join(components)):
            return None
        return None if self.is_scratch(components) else found[0]

    def goes_by_rules(self, components: Sequence[str]) -> bool:
        """True if the rules decide about a path that a [[scratch]] matches.

        They do if git tracks the path, or if the path is a temporary name in a directory with tracked files: a file in
        scratch cannot be renamed over a tracked one. They also decide about the root, which the scratch layer lacks.
        """
        if not components:
            return True
        if self.tracked is None:
            return False
        if self.tracked.has("/".join(components)):
            return True
        is_temporary = self.temporary is not None and self.temporary.admits(components)
        return is_temporary and self.tracked.has("/".join(components[:-1]))

    def scratch_table(self, path: str) -> ScratchQuota | None:
        """Return the [[scratch]] that counts a path, provided that `decide` permits the path in scratch."""
        components = path.split("/") if path else []
        if (repository := self.repository_of(components)) is not None:
            return repository.table
        first = min(self._scratch_patterns(components), key=lambda scratch: scratch.order, default=None)
        return None if first is None else first.table

    def scratch_top(self, path: WorkspacePath) -> WorkspacePath:
        """Return the topmost scratch path at or above a scratch path: `a/.venv` for `a/.venv/lib/x.py`."""
        components = path.split("/")
        if self.repository_of(components) is not None:
            return WorkspacePath(REPOSITORY)
        for depth in range(1, len(components)):
            if self._scratch_patterns(components[:depth]):
                return WorkspacePath("/".join(components[:depth]))
        return path


def digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of the document as canonical JSON."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def compile_policy(document: Mapping[str, Any], generation: int = 1) -> Policy:
    """Compile a policy. `document` is `PolicyDocument.model_dump(mode="json")`; keys can be missing.

    PolicyError, without file and line, for a pattern that cannot be enforced.
    """
    protect = _protect(document)
    scratch = _scratch(document.get("scratch", ()))
    keep = [parse(text) for table in document.get("keep", ()) for text in table["paths"]]
    rules = _rules(document.get("rule", ()))
    offers = tuple(rule.offer for rule in sorted(rules, key=lambda rule: rule.order) if rule.refusal is None)
    roles = defined_roles(document)
    return Policy(
        document=document,
        digest=digest(document),
        generation=generation,
        devices=bool(document.get("devices", False)),
        protect=Matcher(protect),
        scratch=tuple({pattern.table.number: pattern.table for _, pattern in scratch}.values()),
        protect_and_scratch=Matcher([*protect, *scratch]),
        temporary=_temporary(document.get("temporary", ())),
        secrets=Matcher((parse(f"{text.rstrip('/')}/"), denials.secret(text)) for text in document.get("secrets", ())),
        keep=Matcher((one, denials.kept(one)) for one in keep),
        hidden=_hidden(document.get("hidden", ())),
        rules=Matcher((pattern, rule) for rule in rules for pattern in rule.offer.patterns),
        offers=offers,
        roles={name: _role(name, roles, offers) for name in roles},
        unknown_role=denials.unknown_role(sorted(roles)),
        default=Permit("default") if document.get("default", "deny") == "allow" else None,
        symlinks_anywhere=document.get("symlinks", "inside") == "any",
        judges_content=any(not offer.executable for offer in offers),
        asks=Matcher(_asks(document.get("ask", ()))),
        observe=bool(document.get("observe", False)),
        network=AllowList(document.get("network", {}).get("allow", ())),
    )


def defined_roles(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return all roles by name, as in [role.NAME], with the built-in role."""
    return {DEFAULT_ROLE: {"write": [EVERYTHING], **BUILT_IN}, **document.get("role", {})}


def _protect(document: Mapping[str, Any]) -> list[tuple[Pattern, denials.Refusal]]:
    patterns = [parse(text) for text in protected_paths(document)]
    return [(parse(".bonobofs/"), denials.RESERVED), *((one, denials.protected(one)) for one in patterns)]


def protected_paths(document: Mapping[str, Any]) -> list[str]:
    """Return every protected pattern, with the built-in ones, each once."""
    listed = [text for table in document.get("protect", ()) for text in table["paths"]]
    return list(dict.fromkeys([*listed, *ALWAYS_PROTECTED]))


def _scratch(tables: Sequence[Mapping[str, Any]]) -> list[tuple[Pattern, Scratch]]:
    found: list[tuple[Pattern, Scratch]] = []
    for index, table in enumerate(tables):
        patterns = tuple(parse(text) for text in table["paths"])
        limit = table.get("max_total")
        described = ScratchQuota(index, patterns, limit, denials.scratch_is_full(patterns, limit))
        for pattern in patterns:
            permit = Permit(f"scratch:{pattern.text}", layer=Layer.SCRATCH)
            found.append((pattern, Scratch(len(found), described, permit)))
    return found


def _asks(tables: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Pattern, Ask]]:
    for table in tables:
        listed = table.get("operations")
        operations = None if listed is None else frozenset(Operation(word) for word in listed)
        for text in table["paths"]:
            yield parse(text), Ask(operations, denials.ask_open(text), denials.ask_refused(text))


def _temporary(texts: Sequence[str]) -> Temporary | None:
    if not texts:
        return None
    patterns = [parse_temporary(text) for text in texts]
    anywhere = [len(one.components) == 2 and one.components[0] == ANY_DEPTH for one in patterns]
    return Temporary(
        names=NameGlobs(one.components[1] for one, is_name in zip(patterns, anywhere, strict=True) if is_name),
        paths=Matcher((one, True) for one, is_name in zip(patterns, anywhere, strict=True) if not is_name),
        permit=Permit("temporary", layer=Layer.STAGED),
    )


def parse_temporary(text: str) -> Pattern:
    """Parse an entry of `temporary`. PolicyError: it matches ordinary names, or no file that can be staged.

    The session deletes a staged file at its end, unless a program renames it into the source. So a pattern must match
    temporary names only.
    """
    pattern = parse(text)
    if pattern.reach is not Reach.ONLY:
        raise PolicyError("this would stage every path below; write how the names themselves look, as **/*.tmp")
    name = pattern.components[-1]
    if is_never_staged(name):
        raise PolicyError(
            "4913 and names that end in ~ are never staged; editors that cannot create them write in place"
        )
    ordinary = first_match(name, _ORDINARY)
    if ordinary is not None:
        raise PolicyError(
            f"this would stage {ordinary} too, and the session would delete it; write how temporary names look"
        )
    return pattern


def is_never_staged(name: str) -> bool:
    """True for `4913`, with which vim tests whether it may replace a file, and for backup names (`NAME~`).

    If bonobofs refuses them, vim and emacs write into the existing file, which cannot lose it. If bonobofs staged them,
    the editor would move the only good copy to a staged name, which is deleted at the end of the session.
    """
    return name == "4913" or name.endswith("~")


def _rules(tables: Sequence[Mapping[str, Any]]) -> list[Rule]:
    offers = [_offer(table) for table in tables]
    # The widest rule comes first, so that the first rule that permits a change has the widest decision: no other such
    # rule has a larger size, or the same size with executable content.
    widest = sorted(range(len(offers)), key=lambda index: _narrowness(offers[index]))
    return [_rule(offers[order], order, rank, tables[order].get("refuse")) for rank, order in enumerate(widest)]


def _narrowness(offer: denials.Offer) -> tuple[bool, int, bool, str]:
    limit = offer.max_size
    return limit is not None, -(limit or 0), not offer.executable, offer.name


def _offer(table: Mapping[str, Any]) -> denials.Offer:
    suffixes = table.get("suffixes")
    return denials.Offer(
        name=table["name"],
        patterns=tuple(parse(text) for text in table["paths"]),
        suffixes=None if suffixes is None else tuple(suffixes),
        max_size=table.get("max_size"),
        executable=bool(table.get("executable", True)),
    )


def _rule(offer: denials.Offer, order: int, rank: int, refuse: str | None) -> Rule:
    return Rule(
        order=order,
        rank=rank,
        extensions=None if offer.suffixes is None else frozenset(suffix[1:] for suffix in offer.suffixes),
        max_size=offer.max_size,
        executable=offer.executable,
        refusal=None if refuse is None else denials.rule_refuses(offer.name, refuse),
        permit=Permit(offer.name, offer.max_size, not offer.executable),
        offer=offer,
        wrong_suffix=denials.suffix(offer),
        wrong_name=denials.special_suffix(offer),
        too_large=denials.too_large(offer),
        is_executable=denials.executable(offer),
    )


def _role(name: str, roles: Mapping[str, Mapping[str, Any]], offers: Sequence[denials.Offer]) -> Role:
    table = roles[name]
    write = [parse(text) for text in table.get("write", ())]
    deny = [parse(text) for text in table.get("deny", ())]
    everywhere = any(not pattern.components for pattern in write)
    usable = [offer for offer in offers if meet(offer.patterns, write)]
    return Role(
        name=name,
        deny=Matcher((pattern, denials.role_denies(name, pattern, write)) for pattern in deny),
        write=None if everywhere else Matcher((pattern, True) for pattern in write),
        elsewhere=denials.role_writes_elsewhere(name, write),
        default=denials.default(usable),
        calls=_calls(name, roles),
    )


def _calls(name: str, roles: Mapping[str, Mapping[str, Any]]) -> dict[Operation, Permit | denials.Refusal]:
    verdicts: dict[Operation, Permit | denials.Refusal] = {}
    for operation, (family, spellings) in CALLS.items():
        own = roles[name].get(family, ())
        word = next((each for each in spellings if each in own or EVERY in own), None)
        if word is not None:
            verdicts[operation] = Permit(denials.call_rule(name, family, word))
        elif not spellings:
            verdicts[operation] = denials.NOBODYS[family]
        else:
            others = sorted(other for other, table in roles.items() if {*spellings, EVERY} & {*table.get(family, ())})
            listed = [each for each in FAMILIES[family] if each in own]
            verdicts[operation] = denials.role_lacks(name, family, spellings[0], listed, others)
    return verdicts


def meet(first: Sequence[Pattern], second: Sequence[Pattern]) -> bool:
    """True if a pattern of each side can match the same path."""
    return any(meets(one, other) for one in first for other in second)


def _hidden(entries: Sequence[str]) -> Hidden:
    for entry in entries:
        parse_hidden(entry)
    names = [entry for entry in entries if "/" not in entry and entry != EVERYTHING]
    return Hidden(
        everything=EVERYTHING in entries,
        names=frozenset(entry for entry in names if not is_wild(entry)),
        globs=tuple(compile_name(entry) for entry in names if is_wild(entry)),
        paths=Matcher((parse(entry), True) for entry in entries if "/" in entry),
        refusal=denials.hidden(entries),
    )


def parse_hidden(entry: str) -> Pattern:
    """Parse an entry of `hidden`. PolicyError: it matches no hidden name.

    An entry without a slash is a name or a glob for one name, at any depth: `.github`, `.env.*`. An entry with a slash
    is a pattern for the path that ends in the hidden name: `docs/.cache` permits that name, `docs/.cache/` and
    `docs/**` permit also the hidden names below. `**` permits all hidden names.
    """
    pattern = parse(entry)
    if pattern.reach is Reach.ONLY and not may_begin_with(pattern.components[-1], "."):
        raise PolicyError("this can match no hidden name: its last component does not begin with a dot")
    return pattern
