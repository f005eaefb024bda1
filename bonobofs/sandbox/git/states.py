"""reset and stash: what puts aside or gives up what was being done."""

from __future__ import annotations

import re
from typing import Final

from bonobofs.sandbox.git.gate import Failure
from bonobofs.sandbox.git.index import SEPARATE, is_there, split_revision, tell_unstaged, unstage
from bonobofs.sandbox.git.options import Unsupported, parse, spec
from bonobofs.sandbox.git.telling import complain, say
from bonobofs.sandbox.git.work import Work, error, fatal, told

_RESET: Final = spec("soft mixed hard merge keep quiet,q patch,p intent-to-add,N pathspec-from-file= refresh")
_MODES: Final = ("soft", "mixed", "hard")
_PUSH: Final = spec(
    "message,m= include-untracked,u all,a keep-index,k quiet,q patch,p staged,S pathspec-from-file= pathspec-file-nul"
)
_POP: Final = spec("index quiet,q")


def reset(work: Work) -> int:
    """`git reset`, of all or of files."""
    options = work.options(_RESET)
    options.keep_to((*_MODES, "quiet", "refresh"))
    modes = [mode for mode in _MODES if options.has(mode)]
    source, words, status = split_revision(work, options)
    if status != 0:
        return status
    if words:
        unknown = next((word for word in words if not options.dashes and not is_there(work, word)), None)
        if unknown is not None:
            what = "unknown revision or path not in the working tree"
            return fatal(f"ambiguous argument '{unknown}': {what}.\n{SEPARATE}")
        if modes and modes != ["mixed"]:
            return fatal(f"Cannot do {modes[-1]} reset with paths.")
        return unstage(work, words, work.git.commit(source) if source else "", quiet=options.has("quiet"))
    mode = modes[-1] if modes else "mixed"
    commit = work.git.commit(source or "HEAD")
    if not commit:
        return fatal(f"Failed to resolve '{source or 'HEAD'}' as a valid revision.")
    work.call("reset", commit=commit, mode=mode)
    if not options.has("quiet"):
        if mode == "hard":
            say(f"HEAD is now at {work.git.said('%h %s')}\n")
        elif mode == "mixed":
            tell_unstaged(work)
    return 0


def stash(work: Work) -> int:
    """`git stash` push, pop, apply, drop and clear."""
    verb, arguments = "push", work.arguments
    if arguments and not arguments[0].startswith("-"):
        verb, arguments = arguments[0], arguments[1:]
    if verb in ("push", "save"):
        return _push(work, arguments, saves=verb == "save")
    if verb in ("pop", "apply"):
        return _pop(work, arguments, drops=verb == "pop")
    if verb == "drop":
        return _drop(work, arguments)
    if verb == "clear" and not arguments:
        work.call("stash_clear")
        return 0
    raise Unsupported(f"stash {verb}")


def _push(work: Work, arguments: tuple[str, ...], *, saves: bool) -> int:
    options = parse(_PUSH, arguments)
    options.keep_to(("message", "include-untracked", "keep-index", "quiet"))
    if not work.git.commit("HEAD"):
        return error("You do not have the initial commit yet")
    message = " ".join(options.words) if saves else "".join(options.values("message")[-1:])
    paths = None if saves or not options.words else _matching(work, options.words, options.has("include-untracked"))
    try:
        work.call(
            "stash_push",
            message=message or None,
            include_untracked=options.has("include-untracked"),
            paths=paths,
            keep_index=options.has("keep-index"),
        )
    except Failure as failure:
        if failure.kind != "nothing":
            return told(failure, "stash")
        if not options.has("quiet"):
            say("No local changes to save\n")
        return 0
    if not options.has("quiet"):
        say(f"Saved working directory and index state {work.git.said('%s', 'refs/stash')}\n")
    return 0


def _matching(work: Work, words: tuple[str, ...], untracked: bool) -> list[str]:
    command = ("ls-files", "-z", "--full-name", "--cached")
    return work.git.run(*command, *(["--others", "--exclude-standard"] if untracked else []), "--", *words).names


def _pop(work: Work, arguments: tuple[str, ...], *, drops: bool) -> int:
    options = parse(_POP, arguments)
    at = _number(work, options.words)
    if isinstance(at, str):
        complain(f"{at}\n")
        return 1
    kept = work.git.object(f"refs/stash@{{{at}}}")
    try:
        work.call("stash_apply", index=at, drop=drops, restore_index=options.has("index"))
    except Failure as failure:
        status = told(failure, "merge")
        if drops:
            say("The stash entry is kept in case you need it again.\n")
        return status
    if not options.has("quiet"):
        work.git.run("status").say()
        if drops:
            say(f"Dropped {_name(options.words, at)} ({kept})\n")
    return 0


def _drop(work: Work, arguments: tuple[str, ...]) -> int:
    options = parse(_POP, arguments)
    at = _number(work, options.words)
    if isinstance(at, str):
        complain(f"{at}\n")
        return 1
    kept = work.git.object(f"refs/stash@{{{at}}}")
    work.call("stash_drop", index=at)
    if not options.has("quiet"):
        say(f"Dropped {_name(options.words, at)} ({kept})\n")
    return 0


def _name(words: tuple[str, ...], at: int) -> str:
    return words[0] if words and not words[0].isdigit() else f"refs/stash@{{{at}}}"


def _number(work: Work, words: tuple[str, ...]) -> int | str:
    """Which entry is meant, or why it is none."""
    if not work.git.object("refs/stash"):
        return "No stash entries found."
    if not words:
        return 0
    found = re.fullmatch(r"(?:(?:refs/)?stash@\{)?(\d+)\}?", words[0])
    if found is None or len(words) > 1:
        return f"error: {words[0]} is not a valid reference" if len(words) == 1 else "Too many revisions specified"
    if not work.git.object(f"refs/stash@{{{found[1]}}}"):
        return f"error: stash@{{{found[1]}}} is not a valid reference"
    return int(found[1])
