"""Describe a policy in Markdown for the agent of a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from bonobofs.policy import denials
from bonobofs.policy.compiled import EVERYTHING, Policy, defined_roles, meet, protected_paths
from bonobofs.policy.decision import OF_REPOSITORY
from bonobofs.policy.lease_limits import duration, longest_lease, may_lease
from bonobofs.policy.pattern import Pattern, parse
from bonobofs.policy.role_lists import FAMILIES

_WORKING_HERE: Final = """\
## Git, issues and leases

- `bonobofs shell MOUNTPOINT` starts a shell in the mount. In it, `git` and `bd` are the session's own programs;
  `bonobofs shell MOUNTPOINT -- COMMAND` runs one command in the same way.
- git: `.git` is the repository of this session, and any git works in it. A commit is published into the source if each
  path that it changes is allowed; otherwise git prints the reason.
- Issues: `bd` in that shell reads and changes issues under the rules of the policy. Every other change of `.beads` is
  refused.
- Leases: `bonobofs lease acquire 'docs/**'` keeps other agents from changing what matches, `bonobofs lease list` shows
  who holds what, `bonobofs lease release` ends the session's own. A change under another holder's lease is refused with
  the code LEASED.
- Programs: the socket that `.bonobofs/whoami.json` names, `$BONOBOFS_SOCKET` in that shell, takes one JSON call a line,
  such as `{"call": "why", "path": "docs/plan.md"}`."""

_ASKING_WHY: Final = """\
## When something is refused

- `bonobofs why PATH` says whether a path may be written and, if not, what may be done instead. `--op OPERATION` asks
  about another operation than writing.
- The extended attribute `user.bonobofs.why` of a path gives the same answer as JSON, `user.bonobofs.why.NAME` of a
  directory that of NAME in it, which need not exist.
- `.bonobofs/denials.jsonl` holds the last refusals, each with its time, its code, its reason and what to do instead.
- The policy cannot be changed from here. Ask the operator."""


_OTHER_LAYER: Final = (
    "These changes succeed and do not reach the workspace: they end with the session. `.bonobofs/scratch` lists the"
    " present files. Write what must stay to a path of the list above."
)


_FAMILIES: Final = {
    "tools": "Tools of the guard socket",
    "git": "Subcommands of git that change something",
    "beads": "Operations on issues",
}


def allowed_directories(policy: Policy, role: str) -> list[str]:
    """Return the paths that the role may write, such as `aidlc-docs/ (.md, 1 MB)`; none for an undefined role."""
    if role not in policy.roles:
        return []
    lines = [
        f"{pattern.text} ({', '.join(_limits(offer))})"
        for offer in policy.offers
        for pattern in offer.patterns
        if _open(policy, role, pattern)
    ]
    if policy.default is not None:
        lines += [f"{text} (any file)" for text in _writes(policy, role)]
    return lines


def describe(policy: Policy, role: str) -> str:
    """Return the policy for a role in Markdown: the permitted and refused changes, and how to ask for a reason."""
    intro = (
        f"The role is `{role}`. Reading is free. Every change is judged by the operator's policy and recorded; what it"
        " does not admit fails with an error, and nothing is changed."
    )
    if policy.observe:
        intro += " The session observes: what the lists below refuse by rule, role or name is made and recorded."
    if role not in policy.roles:
        sections = [f"{policy.unknown_role.reason} {policy.unknown_role.instead}"]
    else:
        sections = ["## Allowed", _bullets(_allowed(policy, role))]
        if policy.scratch or policy.temporary is not None or policy.repository is not None:
            sections += ["## Allowed, in the session only", _OTHER_LAYER, _bullets(_session_only(policy))]
        sections += ["## Refused", _bullets(_refused(policy, role))]
        sections += ["## Tools and gates", _bullets(_callable(policy, role))]
    return "\n\n".join(["# What may be written here", intro, *sections, _WORKING_HERE, _ASKING_WHY]) + "\n"


def _allowed(policy: Policy, role: str) -> Iterable[str]:
    writes = _writes(policy, role)
    if EVERYTHING not in writes:
        yield f"The role writes only at {_code(writes)}, and there:" if writes else "Nothing: the role writes nowhere."
    for offer in policy.offers:
        if writes and any(_open(policy, role, pattern) for pattern in offer.patterns):
            patterns = _code([pattern.text for pattern in offer.patterns])
            yield f"{patterns}: {_terms(offer)} (rule `{offer.name}`)"
    if policy.default is not None and writes:
        yield "Everything that no rule names."
    yield "A suffix rule binds everything but directories. Size and content rules bind regular files."


def _session_only(policy: Policy) -> Iterable[str]:
    if policy.repository is not None:
        yield " ".join(OF_REPOSITORY)
    for table in policy.scratch:
        limit = f", at most {denials.size(table.max_total)} together" if table.max_total is not None else ""
        yield f"Scratch: {_code(denials.shortened(pattern.text) for pattern in table.patterns)}: anything{limit}."
    if policy.temporary is not None:
        names = _code(denials.shortened(text) for text in policy.document.get("temporary", ()))
        yield (
            f"Temporary names that no rule admits: {names}. Such a file or symlink exists in the mount only. A rename"
            " or link is judged by the new name, and writes the whole file there at once."
        )


def callable_words(policy: Policy, role: str) -> dict[str, list[str]]:
    """Return the words of the role's lists `tools`, `git` and `beads`; all are empty for an undefined role."""
    table = defined_roles(policy.document).get(role, {})
    return {family: [word for word in known if word in table.get(family, ())] for family, known in FAMILIES.items()}


def _callable(policy: Policy, role: str) -> Iterable[str]:
    for family, called in callable_words(policy, role).items():
        yield f"{_FAMILIES[family]}: {_code(called) if called else 'none, for this role'}."
    longest = duration(longest_lease(policy))
    terms = f"at most {longest} long" if may_lease(policy, role) else "none, for this role"
    yield f"Leases of this workspace: {terms}."


def _refused(policy: Policy, role: str) -> Iterable[str]:
    document = policy.document
    keep = [text for table in document.get("keep", ()) for text in table["paths"]]
    deny = document.get("role", {}).get(role, {}).get("deny", ())
    yield f"Any change of {_code([*protected_paths(document), '.bonobofs/'])}."
    for rule in document.get("rule", ()):
        if rule.get("refuse") is not None:
            yield f"Any change of {_code(rule['paths'])}: {rule['refuse']} (rule `{rule['name']}`)"
    if secrets := document.get("secrets", ()):
        yield f"Reading and any change of {_code(secrets)}, unless git tracks the file: the mount does not show them."
    for ask in document.get("ask", ()):
        listed = _code(ask["operations"]) if ask.get("operations") else "any change"
        yield f"Until the operator permits it: {listed} of {_code(ask['paths'])} (code ASK; `bonobofs ask wait`)."
    if deny:
        yield f"Any change of {_code(deny)}, for this role."
    if not policy.hidden.everything:
        hidden = document.get("hidden", ())
        yield "Names that begin with a dot" + (f", except {_code(hidden)}." if hidden else ".")
    if keep:
        yield f"Deleting or renaming away {_code(keep)}; editing them goes by the rules above."
    leads = "" if policy.symlinks_anywhere else "out of the workspace, unless it is scratch, or "
    yield f"A symlink that leads {leads}into a protected path."
    yield "A symlink in place of a directory that a pattern of this list names, as `a` or `a/b` in `a/*/x`."
    if not policy.devices:
        yield "Making device files."
    if policy.default is None:
        yield "Everything that is not allowed above."


def _open(policy: Policy, role: str, pattern: Pattern) -> bool:
    """True if the role may write a path that the pattern matches."""
    if not meet([pattern], [parse(text) for text in _writes(policy, role)]):
        return False
    if not pattern.literal:
        return True
    components = list(pattern.components)
    return not policy.protect.find(components) and not policy.roles[role].deny.find(components)


def _writes(policy: Policy, role: str) -> Sequence[str]:
    table = policy.document.get("role", {}).get(role)
    return [EVERYTHING] if table is None else table.get("write", ())


def _limits(offer: denials.Offer) -> list[str]:
    limits = [*(offer.suffixes or ()), *([denials.size(offer.max_size)] if offer.max_size is not None else [])]
    return limits or ["any file"]


def _terms(offer: denials.Offer) -> str:
    kind = f"{_code(offer.suffixes)} files" if offer.suffixes is not None else "any file"
    limit = f", at most {denials.size(offer.max_size)}" if offer.max_size is not None else ""
    return kind + limit + ("" if offer.executable else ", nothing executable")


def _code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
