"""The policy decided a second time, as slowly and plainly as it can be said, to compare the engine with.

Nothing here is shared with the engine: patterns are matched by recursion over characters, every rule is looked at for
every request, and the order of the contracts stands as it is written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bonobofs.policy.decision import Code, Layer
from bonobofs.policy.request import Context, Kind, Operation, Principal, Request

EXECUTABLE = [
    *(b"#!", b"\x7fELF", b"MZ", b"\0asm"),
    *(bytes.fromhex(magic) for magic in ("feedface", "feedfacf", "cefaedfe", "cffaedfe", "cafebabe", "bebafeca")),
]
ON_THE_ROOT = ["set_mode", "set_owner", "set_times", "set_xattr", "remove_xattr"]
ON_THE_INODE = [*ON_THE_ROOT, "write_file", "create_file", "truncate", "allocate", "copy_range"]

WORDS_OF_CALLS = {
    "read_file": ("tools", ["read_file"]),
    "list_files": ("tools", ["list_files"]),
    "search_files": ("tools", ["search_files"]),
    "undo": ("tools", ["undo"]),
    "add": ("git", ["add"]),
    "commit": ("git", ["commit"]),
    "rm": ("git", ["rm"]),
    "mv": ("git", ["mv"]),
    "restore": ("git", ["restore"]),
    "create_branch": ("git", ["branch"]),
    "delete_branch": ("git", ["branch"]),
    "checkout_branch": ("git", ["checkout", "switch"]),
    "merge": ("git", ["merge"]),
    "stash": ("git", ["stash"]),
    "reset": ("git", ["reset"]),
    "tag": ("git", ["tag"]),
    "publish": ("git", ["commit", "branch", "merge", "reset", "tag"]),
    "create_worktree": ("git", []),
    "remove_worktree": ("git", []),
    "create_issue": ("beads", ["create"]),
    "create_epic": ("beads", ["epic"]),
    "update_issue": ("beads", ["update"]),
    "close_issue": ("beads", ["close"]),
    "reopen_issue": ("beads", ["reopen"]),
    "add_dependency": ("beads", ["dep"]),
    "remove_dependency": ("beads", ["dep"]),
    "label_issue": ("beads", ["label"]),
    "comment_issue": ("beads", ["comment"]),
    "call": ("socket", []),
}
UNDEFINED_AGENT = {
    "write": ["**"],
    "deny": [],
    "tools": ["read_file", "write_file", "list_files", "search_files", "undo"],
    "git": ["*"],
    "beads": ["create", "update", "close", "dep", "label", "comment"],
}


def name_matches(glob: str, name: str) -> bool:
    if not glob:
        return not name
    if glob[0] == "*":
        return any(name_matches(glob[1:], name[cut:]) for cut in range(len(name) + 1))
    if glob[0] == "[":
        end = glob.index("]", 3 if glob[1] in "!^" else 2)
        return bool(name) and in_class(glob[1:end], name[0]) and name_matches(glob[end + 1 :], name[1:])
    return bool(name) and glob[0] in ("?", name[0]) and name_matches(glob[1:], name[1:])


def in_class(body: str, character: str) -> bool:
    return not is_listed(body[1:], character) if body[0] in "!^" else is_listed(body, character)


def is_listed(body: str, character: str) -> bool:
    if len(body) >= 3 and body[1] == "-":
        return body[0] <= character <= body[2] or (len(body) > 3 and is_listed(body[3:], character))
    return body[0] == character or (len(body) > 1 and is_listed(body[1:], character))


def path_matches(pattern: str, parts: list[str]) -> bool:
    while "**/**" in pattern:
        pattern = pattern.replace("**/**", "**")
    if pattern.replace("**/", "") in ("", "**"):
        return True
    if pattern.endswith("/**"):
        return any(path_matches(pattern[:-3], parts[:cut]) for cut in range(len(parts)))
    if pattern.endswith("/**/"):
        return path_matches(pattern[:-1], parts)
    if pattern.endswith("/"):
        return any(path_matches(pattern[:-1], parts[:cut]) for cut in range(len(parts) + 1))
    return components_match(pattern.split("/"), parts)


def components_match(components: list[str], parts: list[str]) -> bool:
    if not components:
        return not parts
    if components[0] == "**":
        return any(components_match(components[1:], parts[cut:]) for cut in range(len(parts) + 1))
    return bool(parts) and name_matches(components[0], parts[0]) and components_match(components[1:], parts[1:])


def any_matches(patterns: list[str], parts: list[str]) -> bool:
    return any(path_matches(pattern, parts) for pattern in patterns)


def any_names_above(patterns: list[str], parts: list[str]) -> bool:
    return any(names_above(pattern, parts) for pattern in patterns)


def names_above(pattern: str, parts: list[str]) -> bool:
    """Whether a beginning of the pattern that ends in a name matches the path, and the rest matches paths below."""
    while "**/**" in pattern:
        pattern = pattern.replace("**/**", "**")
    pattern = pattern.removesuffix("/")
    components = pattern.split("/")
    return any(
        components[end - 1] != "**" and components_match(components[:end], parts) for end in range(1, len(components))
    )


def hidden_is_open(entries: list[str], parts: list[str]) -> bool:
    for depth, name in enumerate(parts, 1):
        by_name = any(entry == "**" or ("/" not in entry and name_matches(entry, name)) for entry in entries)
        by_path = any("/" in entry and path_matches(entry, parts[:depth]) for entry in entries)
        if name.startswith(".") and not by_name and not by_path:
            return False
    return True


def target_is_good(protect: list[str], parts: list[str], target: str, *, anywhere: bool) -> bool:
    if not parts or target == "" or "\0" in target:
        return False
    if target.startswith("/"):
        return anywhere
    place = parts[:-1]
    down = False
    for step in target.split("/"):
        if step in ("", "."):
            continue
        if step == "..":
            if not anywhere and (down or not place):
                return False
            if not place:
                return True
            place.pop()
        else:
            down = True
            place.append(step)
    return not any_matches(protect, place) or any_matches(protect, parts)


def suffix_of(name: str) -> str:
    dot = name.rfind(".")
    return name[dot:] if dot >= 0 and set(name[:dot]) - {"."} else ""


def refusal_by(rule: dict[str, Any], parts: list[str], kind: Kind, context: Context, leaves: bool) -> Code | None:
    if kind is Kind.DIRECTORY:
        return None
    if rule["suffixes"] is not None and suffix_of(parts[-1] if parts else "") not in rule["suffixes"]:
        return Code.SUFFIX
    if leaves or kind is not Kind.FILE:
        return None
    runs = (context.mode != -1 and context.mode & 0o111) or any(context.head.startswith(magic) for magic in EXECUTABLE)
    if not rule["executable"] and runs:
        return Code.EXECUTABLE
    shrinks = context.size < context.size_before
    if rule["max_size"] is not None and context.size > rule["max_size"] and not shrinks:
        return Code.SIZE
    return None


def is_temporary(document: dict[str, Any], parts: list[str], request: Request, context: Context) -> bool:
    """Whether the request is for a name that is staged until it is renamed, unless a rule allows it."""
    if context.in_source or request.kind not in (Kind.FILE, Kind.SYMLINK) or not parts:
        return False
    if parts[-1] == "4913" or parts[-1][-1:] == "~":
        return False
    return any_matches(document["temporary"], parts)


def is_scratch(document: dict[str, Any], parts: list[str], tracked: Sequence[str]) -> bool:
    if not any_matches([pattern for table in document["scratch"] for pattern in table["paths"]], parts):
        return False
    if is_tracked(tracked, parts):
        return False
    temporary = any_matches(document["temporary"], parts) and parts[-1] != "4913" and parts[-1][-1] != "~"
    return not (temporary and is_tracked(tracked, parts[:-1]))


def is_tracked(tracked: Sequence[str], parts: list[str]) -> bool:
    """Whether git tracks the path, something below it, or a whole directory that it lies in."""
    path = "/".join(parts)
    for one in tracked:
        if (one.rstrip("/") + "/").startswith(path + "/") and path:
            return True
        if one.endswith("/") and (path + "/").startswith(one):
            return True
    return False


def codes(document: dict[str, Any], agent: Principal, request: Request, context: Context) -> set[Code]:
    """The codes that a refusal may have, where several rules refuse any of theirs; empty: the change is allowed."""
    answer = decide(document, agent, request, context)
    return answer if isinstance(answer, set) else set()


def decide(  # noqa: PLR0911 # the order of the contracts, one step a line
    document: dict[str, Any], agent: Principal, request: Request, context: Context, tracked: Sequence[str] = ()
) -> set[Code] | Layer:
    """Where the bytes of an allowed change go, or the codes that its refusal may have."""
    parts = request.path.split("/") if request.path else []
    operation = request.operation
    leaves = context.leaves or operation in (Operation.DELETE_FILE, Operation.RMDIR)
    protect = [".bonobofs/", "**/.git/", "**/.beads/"]
    protect += [pattern for table in document["protect"] for pattern in table["paths"]]
    role = document["role"].get(agent.role, UNDEFINED_AGENT if agent.role == "agent" else None)

    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        return {Code.OUTSIDE}
    if any("\ud800" <= character <= "\udfff" and not "\udc80" <= character <= "\udcff" for character in request.path):
        return {Code.OUTSIDE}
    if operation.value in WORDS_OF_CALLS:
        return Layer.SOURCE if role is not None and may_call(role, operation.value) else {Code.ROLE}
    if not parts and (leaves or operation.value not in ON_THE_ROOT):
        return {Code.OUTSIDE}
    scratch = parts != [] and is_scratch(document, parts, tracked)
    if context.target is not None and not leaves:
        bound = context.carried and not context.target.startswith("/")
        anywhere = document["symlinks"] == "any" or (scratch and not bound)
        if not target_is_good(protect, parts, context.target, anywhere=anywhere):
            return {Code.OUTSIDE}
    makes_device = operation is Operation.MKNOD and request.kind is Kind.DEVICE
    if makes_device and not (document["devices"] and context.privileged):
        return {Code.DEVICE}
    if context.tool and (role is None or operation.value not in role["tools"]):
        return {Code.ROLE}
    if any_matches(protect, parts):
        return {Code.PROTECTED}
    if role is None or any_matches(role["deny"], parts):
        return {Code.ROLE}
    if scratch:
        return Layer.SCRATCH
    if context.target is not None and not leaves and (above := refusals_below(document, protect, role, parts)):
        return above
    in_source = judge_in_source(document, role, parts, request, context, leaves)
    if is_temporary(document, parts, request, context) and (context.staged or in_source):
        return {Code.HARDLINK} if has_foreign_names(request, context) else Layer.STAGED
    if in_source:
        return in_source
    return {Code.HARDLINK} if has_foreign_names(request, context) else Layer.SOURCE


def refusals_below(document: dict[str, Any], protect: list[str], role: dict[str, Any], parts: list[str]) -> set[Code]:
    """The code of a refusal of paths below, of which a symlink here would take in others; empty: there is none."""
    if any_names_above(protect, parts):
        return {Code.PROTECTED}
    if any_names_above(role["deny"], parts):
        return {Code.ROLE}
    refusing = [rule["paths"] for rule in document["rule"] if rule.get("refuse") is not None]
    return {Code.PROTECTED} if any(any_names_above(paths, parts) for paths in refusing) else set()


def judge_in_source(
    document: dict[str, Any], role: dict[str, Any], parts: list[str], request: Request, context: Context, leaves: bool
) -> set[Code]:
    """The codes that a refusal of an ordinary file may have; empty: it may be written."""
    keep = [pattern for table in document["keep"] for pattern in table["paths"]]
    if not hidden_is_open(document["hidden"], parts):
        return {Code.HIDDEN}
    if not any_matches(role["write"], parts):
        return {Code.ROLE}
    if leaves and any_matches(keep, parts):
        return {Code.KEEP}
    matching = [rule for rule in document["rule"] if any_matches(rule["paths"], parts)]
    if not matching and document["default"] == "deny":
        return {Code.DEFAULT}
    if any(rule.get("refuse") is not None for rule in matching):
        return {Code.PROTECTED}
    refusals = {refusal_by(rule, parts, request.kind, context, leaves) for rule in matching}
    if matching and None not in refusals:
        return {code for code in refusals if code is not None}
    return set()


def may_call(role: dict[str, Any], operation: str) -> bool:
    family, words = WORDS_OF_CALLS[operation]
    listed = role.get(family, [])
    return any(word in listed or "*" in listed for word in words)


def has_foreign_names(request: Request, context: Context) -> bool:
    on_the_inode = request.operation.value in ON_THE_INODE and request.kind is not Kind.DIRECTORY
    return on_the_inode and context.foreign_names > 0
