"""Decide about a request. The engine is pure and total: equal inputs give equal decisions, and it never raises.

The checks have this order: outside, devices, the session's own `.git` (permitted in the scratch layer), protect,
secrets, the role's `deny`, scratch paths that git does not track (permitted in the scratch layer), hidden, the role's
`write`, keep, and the rules, or `default` if no rule matches the path. If one of the last four denies a temporary name,
the change is permitted as a staged file. The last checks deny a change outside scratch if the file has unknown names, a
change of the source if another holder has leased the path, and a change of an `[[ask]]` path that the operator has not
permitted. The first denial is final: no later check can widen it.

A new symlink outside scratch is also denied if a pattern that denies, a lease of another holder or an `[[ask]]` names
its path as a directory. Through the symlink, programs would find other files at the paths of that pattern.

The operation of a gate is not a change of a path. The role's lists decide it, and the engine judges each file that it
changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bonobofs.policy import denials
from bonobofs.policy.answers import REMOVE, WRITE, Ask, question_id
from bonobofs.policy.compiled import Policy, Rule, Scratch, Temporary, compile_policy, digest
from bonobofs.policy.decision import Code, Decision, Denied, Layer, Permit
from bonobofs.policy.denials import Refusal
from bonobofs.policy.description import allowed_directories, callable_words, describe
from bonobofs.policy.pattern import NO_CHARACTER
from bonobofs.policy.request import NO_FACTS, Context, Kind, Operation, Principal, Request, WorkspacePath
from bonobofs.policy.role_lists import OF_A_GATE

__all__ = [
    "Policy",
    "allowed_directories",
    "callable_words",
    "compile_policy",
    "decide",
    "decide_in_source",
    "decide_move",
    "decide_published",
    "describe",
    "digest",
    "in_source",
]

EXECUTABLE_HEADS: Final = (
    b"#!",
    b"\x7fELF",
    b"MZ",
    b"\xfe\xed\xfa\xce",
    b"\xfe\xed\xfa\xcf",
    b"\xce\xfa\xed\xfe",
    b"\xcf\xfa\xed\xfe",
    b"\xca\xfe\xba\xbe",
    b"\xbe\xba\xfe\xca",
    b"\0asm",
)
"""First bytes of executable files: scripts, ELF, DOS and Windows, Mach-O of both orders and widths, wasm."""

OBSERVABLE: Final = frozenset(
    {Code.ROLE, Code.HIDDEN, Code.SUFFIX, Code.EXECUTABLE, Code.KEEP, Code.DEFAULT, Code.SIZE}
)
"""Refusals that a policy with `observe` only records. All others protect more than the policy's choice of paths."""
OBSERVED: Final = "observe:"
"""Begins the rule of a change that was permitted only because the policy observes; code and rule follow."""

_X_BITS: Final = 0o111
_FILE: Final = Kind.FILE
_DIRECTORY: Final = Kind.DIRECTORY
_DEVICE: Final = Kind.DEVICE
_SYMLINK: Final = Kind.SYMLINK
_SOURCE: Final = Layer.SOURCE
_SCRATCH: Final = Layer.SCRATCH
_MKNOD: Final = Operation.MKNOD

_REMOVALS: Final = frozenset({Operation.DELETE_FILE, Operation.RMDIR})
_NOT_PLAIN: Final = frozenset({*_REMOVALS, *OF_A_GATE, Operation.CONNECT})
_OF_THE_ROOT: Final = frozenset(
    {
        *OF_A_GATE,
        Operation.SET_MODE,
        Operation.SET_OWNER,
        Operation.SET_TIMES,
        Operation.SET_XATTR,
        Operation.REMOVE_XATTR,
    }
)
"""Operations without a path, or that may change the root directory. All others would create, remove or replace it."""
_OF_THE_INODE: Final = frozenset(
    {
        Operation.WRITE_FILE,
        Operation.CREATE_FILE,
        Operation.TRUNCATE,
        Operation.ALLOCATE,
        Operation.COPY_RANGE,
        Operation.SET_MODE,
        Operation.SET_OWNER,
        Operation.SET_TIMES,
        Operation.SET_XATTR,
        Operation.REMOVE_XATTR,
    }
)
"""Operations that change a file under all its names. They include owner, times and attributes: a new owner clears
set-id bits, ACLs and capabilities are attributes, and build tools compare times. Delete, rename and link change one
name only."""


def decide(policy: Policy, agent: Principal, request: Request, context: Context = NO_FACTS) -> Decision:
    """Decide whether the agent may make this change. Never raises, for any path.

    A Permit holds for later changes of the same path too, up to the size `max_size`, while mode and first bytes stay
    the same. If its `judges_content` is false, the first bytes may change.
    """
    operation, path, kind = request
    components = path.split("/") if path else []
    dotted = "/." in path or path[:1] == "."
    leaves = context.leaves
    if operation in _NOT_PLAIN:
        if operation is Operation.CONNECT:
            return _by_allow_list(policy, agent, request, context)
        if operation in OF_A_GATE:
            return _by_lists(policy, agent, request, _refuse_path(path, components, operation, dotted, leaves=False))
        leaves = True
    refusal = _refuse_path(path, components, operation, dotted, leaves)
    target = None if leaves else context.target
    if refusal is None and target is not None:
        refusal = _refuse_target(policy, components, target, carried=context.carried)
    if refusal is None and operation is _MKNOD and kind is _DEVICE and not (policy.devices and context.privileged):
        refusal = denials.DEVICE
    if refusal is None and context.tool:
        refusal = _refuse_operation(policy, agent, operation)
    if refusal is None:
        result = _judge_path(policy, agent.role, components, kind, context, dotted, leaves)
        if policy.observe and isinstance(result, Refusal) and result.code in OBSERVABLE:
            result = _observed(policy, result)
        if isinstance(result, Refusal):
            refusal = result
        elif (
            context.foreign_names > 0
            and operation in _OF_THE_INODE
            and kind is not _DIRECTORY
            and result.layer is not _SCRATCH  # copy-up precedes the change of a source file
        ):
            refusal = denials.HARDLINK
        elif result.layer is not _SOURCE and not context.carried:
            return result
        elif policy.leases is not None and not policy.leases.known:
            refusal = denials.LEASES_UNKNOWN
        elif policy.leases is not None and (holding := policy.leases.held_by_other(components)) is not None:
            return Denied(*denials.LEASED, path, operation, holding)
        elif target is not None and policy.leases is not None and (holding := policy.leases.held_below(components)):
            return Denied(*denials.LEASED_BELOW, path, operation, holding)
        elif (
            result.layer is _SOURCE
            and not policy.asks.is_empty
            and (asks := policy.asks.find(components) if target is None else _asks_of_symlink(policy, components))
        ):
            return _by_answer(policy, request, components, asks, result, leaves=leaves)
        else:
            return result
    # Equal to Denied(*refusal, path, operation), at a third of its time. Some agents cause very many denials.
    return tuple.__new__(Denied, (*refusal, path, operation, None, "", ""))


def _observed(policy: Policy, refusal: Refusal) -> Permit | Refusal:
    """Return the permit of a change that the policy refuses and only observes."""
    if refusal is policy.unknown_role:
        return refusal
    return Permit(f"{OBSERVED}{refusal.code}:{refusal.rule}")


def _asks_of_symlink(policy: Policy, components: list[str]) -> list[Ask]:
    """Return the [[ask]] patterns of a new symlink: those of its path, and those that name it as a directory."""
    below = policy.asks.find_below(components)
    return policy.asks.find(components) + [ask._replace(operations=None) for ask in below]


def _by_answer(
    policy: Policy, request: Request, components: list[str], asks: list[Ask], permit: Permit, *, leaves: bool
) -> Decision:
    """Decide a permitted change of the source by the [[ask]] tables of its path and the operator's answer."""
    operation, path, _ = request
    asks = [ask for ask in asks if ask.operations is None or operation in ask.operations]
    if not asks:
        return permit
    ask = asks[0]
    effect = REMOVE if leaves else WRITE
    answer = policy.answers.find(effect, path, components)
    if answer is None:
        question = question_id(policy.answers.session, effect, path)
        about = "" if question else "This session has no mount, so the operator cannot answer in it."
        return Denied(*ask.open, path, operation, about=about, question=question)
    if not answer.allows:
        about = answer.note and f"The operator's note: {answer.note}"
        return Denied(*ask.answered, path, operation, about=about)
    return permit._replace(answer=answer.number)


def _by_allow_list(policy: Policy, agent: Principal, request: Request, context: Context) -> Decision:
    """Decide a connection by [network] of the policy."""
    if agent.role not in policy.roles:
        return Denied(*policy.unknown_role, request.path, request.operation)
    if not request.path and policy.network.admits(*context.endpoint):
        return Permit(denials.NETWORK_RULE)
    return Denied(*denials.NETWORK["policy"], request.path, request.operation)


def _by_lists(policy: Policy, agent: Principal, request: Request, refusal: Refusal | None) -> Decision:
    """Decide an operation of a gate by the role's lists."""
    refusal = refusal or _refuse_operation(policy, agent, request.operation)
    if refusal is not None:
        return Denied(*refusal, request.path, request.operation)
    result = policy.roles[agent.role].calls[request.operation]
    assert isinstance(result, Permit)
    return result


def _refuse_operation(policy: Policy, agent: Principal, operation: Operation) -> Refusal | None:
    """Return the refusal if the role's lists do not have the operation."""
    role = policy.roles.get(agent.role)
    if role is None:
        return policy.unknown_role
    result = role.calls.get(operation, denials.NO_TOOL)
    return None if isinstance(result, Permit) else result


def decide_in_source(policy: Policy, agent: Principal, request: Request, context: Context = NO_FACTS) -> Decision:
    """Decide for a caller that has the source layer only. A change in another layer is denied."""
    return in_source(decide(policy, agent, request, context), request)


def decide_published(policy: Policy, request: Request) -> Decision:
    """Decide whether a git command may bring this path to its content in a protected branch.

    The caller verifies the content. Only a lease can deny the change, not a rule.
    """
    leases = policy.leases
    if leases is not None and not leases.known:
        return Denied(*denials.LEASES_UNKNOWN, request.path, request.operation)
    holding = None if leases is None else leases.held_by_other(request.path.split("/"))
    if holding is not None:
        return Denied(*denials.LEASED, request.path, request.operation, holding)
    return Permit(denials.PUBLISHED)


def in_source(decision: Decision, request: Request) -> Decision:
    """Turn a permit for another layer than the source into a denial."""
    if isinstance(decision, Denied) or decision.layer is Layer.SOURCE:
        return decision
    reason, instead = denials.ONLY_IN_A_MOUNT[decision.layer]
    return Denied(Code.DEFAULT, decision.rule, reason, instead, request.path, request.operation)


def _refuse_path(path: str, components: list[str], operation: Operation, dotted: bool, leaves: bool) -> Refusal | None:
    """Return the refusal of an invalid or outside path, or of the root if the operation cannot apply to it."""
    if "" in components or "\0" in path or (dotted and (".." in components or "." in components)):
        return denials.BAD_PATH
    if not path and (leaves or operation not in _OF_THE_ROOT):
        return denials.ROOT
    if not path.isascii() and NO_CHARACTER.search(path):
        return denials.BAD_PATH
    return None


def _refuse_target(policy: Policy, components: list[str], target: str, *, carried: bool) -> Refusal | None:
    """Return the refusal of a symlink's target, resolved textually from the directory that contains the symlink.

    A `..` after a name is refused: the name can be or become a symlink, and the `..` then leads elsewhere than the text
    shows. With `symlinks = "any"` and in scratch, only a target that leads into a protected path is refused. A name in
    the target may be another symlink, which leads elsewhere: the mount judges a change by its resolved path.
    """
    if not components or not target or "\0" in target:
        return denials.UNKNOWN_TARGET
    # The target of an absolute symlink does not depend on its directory.
    bound = carried and target[0] != "/"
    repository = policy.repository_of(components) is not None
    anywhere = not repository and (policy.symlinks_anywhere or (not bound and policy.is_scratch(components)))
    if target[0] == "/":
        return None if anywhere else denials.TARGET
    resolved, descended = components[:-1], False
    for step in target.split("/"):
        if step == "..":
            if descended and not anywhere:
                return denials.UNKNOWN_TARGET
            if not resolved:
                return None if anywhere else denials.TARGET
            resolved.pop()
        elif step not in ("", "."):
            descended = True
            resolved.append(step)
    if repository:
        return None if policy.repository_of(resolved) is not None else denials.REPOSITORY_TARGET
    # If the path of the symlink is protected too, that is the reason, which a later check gives.
    is_reason = policy.protect.find(resolved) and not policy.protect.find(components)
    return denials.PROTECTED_TARGET if is_reason else None


def _judge_path(
    policy: Policy, role_name: str, components: list[str], kind: Kind, context: Context, dotted: bool, leaves: bool
) -> Permit | Refusal:
    """Return the decision on the path and on the file that will be there."""
    result = _decide_before_rules(policy, role_name, components)
    if result is None and context.target is not None and not leaves:
        result = _refuse_above(policy, role_name, components)
    if result is not None:
        return result
    temporary = policy.temporary
    if temporary is None or context.in_source or not _is_temporary(temporary, components, kind):
        return _judge_ordinary(policy, role_name, components, kind, context, dotted, leaves)
    if context.staged:
        return temporary.permit
    result = _judge_ordinary(policy, role_name, components, kind, context, dotted, leaves)
    return result if isinstance(result, Permit) else temporary.permit


def _decide_before_rules(policy: Policy, role_name: str, components: list[str]) -> Permit | Refusal | None:
    """Return the decision of the checks from `.git` to scratch (see the module); None if they do not decide."""
    if policy.repository is not None and (repository := policy.repository_of(components)) is not None:
        return repository.judge(components) if role_name in policy.roles else policy.unknown_role
    found = policy.protect_and_scratch.find(components)
    if found:
        for one in found:
            if isinstance(one, Refusal):
                return one
        if policy.goes_by_rules(components):
            found = []
    if not policy.secrets.is_empty and (secret := policy.secret(components)) is not None:
        return secret
    role = policy.roles.get(role_name)
    if role is None:
        return policy.unknown_role
    if not role.deny.is_empty and (refusals := role.deny.find(components)):
        return refusals[0]
    return _first_scratch(found) if found else None


def _refuse_above(policy: Policy, role_name: str, components: list[str]) -> Refusal | None:
    """Return the refusal of a symlink in place of a directory that a denying pattern names."""
    found = [
        *policy.protect.find_below(components),
        *policy.secrets.find_below(components),
        *policy.roles[role_name].deny.find_below(components),
        *(rule.refusal for rule in policy.rules.find_below(components) if rule.refusal is not None),
    ]
    return denials.symlink_above(found[0]) if found else None


def _is_temporary(temporary: Temporary, components: list[str], kind: Kind) -> bool:
    return (kind is _FILE or kind is _SYMLINK) and components != [] and temporary.admits(components)


def _judge_ordinary(
    policy: Policy, role_name: str, components: list[str], kind: Kind, context: Context, dotted: bool, leaves: bool
) -> Permit | Refusal:
    """Return the decision of `hidden`, the role's `write`, `keep` and the rules on a change of the source."""
    role = policy.roles[role_name]
    if dotted and not policy.hidden.everything and not policy.hidden.admits(components):
        return policy.hidden.refusal
    if role.write is not None and not role.write.find(components):
        return role.elsewhere
    if leaves and (refusals := policy.keep.find(components)):
        return refusals[0]
    matched = policy.rules.find(components)
    return _by_rules(matched, components, kind, context, leaves) if matched else policy.default or role.default


def _first_scratch(matches: list[Refusal | Scratch]) -> Permit:
    return min((match for match in matches if isinstance(match, Scratch)), key=_order).permit


def _by_rules(
    matched: list[Rule], components: list[str], kind: Kind, context: Context, leaves: bool
) -> Permit | Refusal:
    """Return the permit of the widest rule that permits the change, or the refusal of the rule that comes closest."""
    for rule in matched:
        if rule.refusal is not None:
            return rule.refusal
    if len(matched) > 1:
        matched.sort(key=_rank)
    if kind is _DIRECTORY:
        return matched[0].permit
    stem, _, extension = components[-1].rpartition(".") if components else ("", "", "")
    if not stem.strip("."):
        extension = ""
    closest: tuple[int, int, Refusal] | None = None
    for rule in matched:
        if rule.extensions is not None and extension not in rule.extensions:
            fault = (2, rule.order, rule.wrong_suffix if kind is _FILE else rule.wrong_name)
        elif leaves or kind is not _FILE:
            return rule.permit
        elif not rule.executable and _runs(context):
            fault = (1, rule.order, rule.is_executable)
        elif rule.max_size is not None and context.size > rule.max_size and context.size >= context.size_before:
            fault = (0, rule.order, rule.too_large)
        else:
            return rule.permit
        if closest is None or fault < closest:
            closest = fault
    assert closest is not None
    return closest[2]


def _rank(rule: Rule) -> int:
    return rule.rank


def _order(scratch: Scratch) -> int:
    return scratch.order


def _runs(context: Context) -> bool:
    return (context.mode != -1 and context.mode & _X_BITS != 0) or context.head.startswith(EXECUTABLE_HEADS)


def decide_move(path: str, operation: Operation, decisions: Iterable[Decision]) -> Decision:
    """Return the first denial, else a denial of a move across layers, else the first decision.

    `decisions` has those on all names that a rename or link of `path` changes, the old name of `path` first.
    """
    permits = []
    for decision in decisions:
        if isinstance(decision, Denied):
            return decision
        permits.append(decision)
    layers = {permit.layer for permit in permits}
    if _SCRATCH in layers and len(layers) > 1:
        return Denied(Code.ELSEWHERE, *denials.ELSEWHERE, WorkspacePath(path), operation)
    return permits[0]
