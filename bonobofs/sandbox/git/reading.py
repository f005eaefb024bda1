"""Which commands of git only read. They are everybody's, and the real git runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from bonobofs.policy.families import GIT
from bonobofs.sandbox.git.options import words

Arguments = tuple[str, ...]

ALWAYS: Final = words(
    """
    annotate archive blame cat-file check-attr check-ignore check-mailmap check-ref-format cherry column
    count-objects describe diff diff-files diff-index diff-pairs diff-tree difftool fast-export fmt-merge-msg
    for-each-ref for-each-repo format-patch fsck fsck-objects get-tar-commit-id grep help interpret-trailers
    last-modified log ls-files ls-remote ls-tree mailinfo mailsplit merge-base merge-file name-rev patch-id
    pickaxe range-diff refs request-pull rev-list rev-parse shortlog show show-branch show-index show-ref status
    stripspace unpack-file upload-archive upload-pack var verify-commit verify-pack verify-tag version
    whatchanged
    """
)
"""Without a form that writes in `.git`. What some of them write elsewhere, they write through the mount."""

AT_ONCE: Final = (
    "branch",
    "branch --list",
    "branch --show-current",
    "branch -a",
    "branch -r",
    "branch -v",
    "branch -vv",
    "config --list",
    "config -l",
    "remote",
    "remote -v",
    "stash list",
    "tag",
    "tag --list",
    "tag -l",
    "worktree list",
    "--version",
)
"""Whole command lines that only read, of subcommands that have other forms too."""

_BRANCH_WRITES: Final = frozenset("dDmMcCfut")
_BRANCH_LISTS: Final = ("--list", "--contains", "--no-contains", "--merged", "--no-merged", "--points-at")
_BRANCH_WRITES_LONG: Final = (
    "--delete",
    "--move",
    "--copy",
    "--force",
    "--set-upstream-to",
    "--unset-upstream",
    "--edit-description",
    "--track",
    "--create-reflog",
)
_TAG_LISTS: Final = (*_BRANCH_LISTS, "--verify")
_TAG_WRITES: Final = frozenset("adsufmF")
_TAG_WRITES_LONG: Final = ("--annotate", "--sign", "--local-user", "--force", "--delete", "--message", "--file")


def only_reads(name: str, arguments: Arguments) -> bool:
    """Whether git changes nothing in the repository by this subcommand with these arguments."""
    if arguments[:1] == ("--help",) or arguments == ("-h",) or name in ALWAYS:
        return True
    form = _FORMS.get(name)
    return form is not None and form(arguments)


def is_of_git(name: str) -> bool:
    """Whether a word is a subcommand of git itself, after which no alias can be named."""
    return name in ALWAYS or name in _FORMS or name in GIT or name in _WRITING


def _verb(*verbs: str, bare: bool = False) -> Callable[[Arguments], bool]:
    """The first word that is no option says it; `bare`: so does there being none."""

    def reads(arguments: Arguments) -> bool:
        verb = next((word for word in arguments if not word.startswith("-")), None)
        return bare if verb is None else verb in verbs

    return reads


def _has(arguments: Arguments, short: frozenset[str], long: Sequence[str]) -> bool:
    """Whether one of these options is among the arguments: in a cluster, abbreviated, or with a value."""
    for word in arguments:
        if word == "--":
            return False
        name = word.partition("=")[0]
        if word.startswith("--"):
            if any(option.startswith(name) for option in long):
                return True
        elif word.startswith("-") and any(letter in short for letter in word[1:]):
            return True
    return False


def _branch(arguments: Arguments) -> bool:
    if _has(arguments, _BRANCH_WRITES, _BRANCH_WRITES_LONG):
        return False
    return _has(arguments, frozenset("lar"), _BRANCH_LISTS) or not _names_one(arguments)


def _names_one(arguments: Arguments) -> bool:
    """A word that is not the value of an option before it, such as `--sort NAME`."""
    return any(
        not word.startswith("-") and (at == 0 or arguments[at - 1] not in ("--sort", "--format"))
        for at, word in enumerate(arguments)
    )


def _tag(arguments: Arguments) -> bool:
    if _has(arguments, _TAG_WRITES, _TAG_WRITES_LONG):
        return False
    return _has(arguments, frozenset("lvn"), _TAG_LISTS) or not _names_one(arguments)


def _config(arguments: Arguments) -> bool:
    if "--" in arguments:
        return False
    asks = ("--get", "--get-all", "--get-regexp", "--get-urlmatch", "--get-color", "--get-colorbool", "--list", "-l")
    if any(word in asks for word in arguments):
        return True
    options = [word for word in arguments if word.startswith("-")]
    named = [word for word in arguments if not word.startswith("-")]
    scopes = ("--global", "--system", "--local", "--worktree", "-z", "--null", "--bool", "--int", "--path")
    if any(word not in (*scopes, "--name-only", "--show-origin", "--show-scope") for word in options):
        return False
    return named[:1] in (["get"], ["list"]) or (len(named) == 1 and "." in named[0])


def _symbolic_ref(arguments: Arguments) -> bool:
    named = [word for word in arguments if not word.startswith("-")]
    return len(named) == 1 and not _has(arguments, frozenset("dm"), ("--delete",))


def _apply(arguments: Arguments) -> bool:
    return _has(arguments, frozenset(), ("--check", "--stat", "--numstat", "--summary")) and "--apply" not in arguments


def _clean(arguments: Arguments) -> bool:
    return _has(arguments, frozenset("n"), ("--dry-run",))


def _hash_object(arguments: Arguments) -> bool:
    return not _has(arguments, frozenset("w"), ())


def _reflog(arguments: Arguments) -> bool:
    return arguments[:1] not in (("expire",), ("delete",))


def _stash(arguments: Arguments) -> bool:
    return arguments[:1] in (("list",), ("show",))


_FORMS: Final[dict[str, Callable[[Arguments], bool]]] = {
    "apply": _apply,
    "bisect": _verb("log", "view", "visualize", "terms"),
    "branch": _branch,
    "bundle": _verb("verify", "list-heads", "create"),
    "clean": _clean,
    "commit-graph": _verb("verify"),
    "config": _config,
    "hash-object": _hash_object,
    "multi-pack-index": _verb("verify"),
    "notes": _verb("list", "show", bare=True),
    "reflog": _reflog,
    "remote": _verb("get-url", "show", bare=True),
    "rerere": _verb("status", "diff", "remaining"),
    "sparse-checkout": _verb("list"),
    "stash": _stash,
    "submodule": _verb("status", "summary", bare=True),
    "symbolic-ref": _symbolic_ref,
    "tag": _tag,
    "worktree": _verb("list"),
}
"""Subcommands that read in some forms."""

_WRITING: Final = words(
    """
    am backfill bisect--helper bugreport checkout--worker checkout-index cherry-pick clone commit-tree
    credential credential-cache credential-cache--daemon credential-store daemon diagnose env--helper
    fast-import fetch fetch-pack filter-branch fsmonitor--daemon gc hook http-backend http-fetch http-push
    imap-send index-pack init init-db instaweb maintenance merge-index merge-octopus merge-one-file
    merge-ours merge-recursive merge-recursive-ours merge-recursive-theirs merge-resolve merge-subtree
    merge-tree mergetool mktag mktree p4 pack-objects pack-redundant pack-refs prune prune-packed pull push
    quiltimport read-tree rebase receive-pack remote-ext remote-fd repack replace replay revert scalar
    send-email send-pack sh-i18n--envsubst shell stage submodule--helper svn unpack-objects update-index
    update-ref update-server-info upload-archive--writer write-tree
    """
)
"""Subcommands that write, and that no role has."""
