"""add, rm, mv, restore, and whatever else gives back the content of single files."""

from __future__ import annotations

import os
from typing import Final

from bonobofs.sandbox.git.options import Options, Unsupported, spec
from bonobofs.sandbox.git.telling import complain, say
from bonobofs.sandbox.git.work import Work, fatal

_ADD: Final = spec(
    "all,A update,u force,f verbose,v dry-run,n ignore-errors ignore-missing pathspec-from-file= pathspec-file-nul"
    " sparse refresh ignore-removal warn-embedded-repo"
)
_RM: Final = spec(
    "force,f dry-run,n recurse,r cached ignore-unmatch quiet,q pathspec-from-file= pathspec-file-nul sparse"
)
_MV: Final = spec("force,f dry-run,n verbose,v sparse")
_RESTORE: Final = spec("source,s= staged,S worktree,W quiet,q progress overlay ignore-unmerged")

SEPARATE: Final = (
    "Use '--' to separate paths from revisions, like this:\n'git <command> [<revision>...] -- [<file>...]'"
)
"""What git advises where a word may be the one or the other."""


def add(work: Work) -> int:
    """`git add`: it is tried in a room, and what the index there has that ours has not is asked for."""
    options = work.options(_ADD)
    before = work.git.staged()
    with work.git.room() as room:
        ran = work.git.run("add", *work.arguments, room=room)
        after = work.git.staged(room)
    changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    if changed and not options.has("dry-run"):
        work.call("add", paths=changed)
    return ran.say()


def remove(work: Work) -> int:
    """`git rm`: git says what it would remove, or why not, and then the gate does it."""
    options = work.options(_RM)
    if options.values("pathspec-from-file"):
        raise Unsupported("--pathspec-from-file")
    with work.git.room() as room:
        ran = work.git.run("rm", "--dry-run", *work.arguments, room=room)
    if ran.status == 0 and not options.has("dry-run"):
        named = work.git.run("ls-files", "-z", "--full-name", "--", *options.words).names
        if named:
            work.call("remove", paths=named, cached=options.has("cached"), force=options.has("force"))
    return ran.say()


def move(work: Work) -> int:
    """`git mv`, as `rm`."""
    options = work.options(_MV)
    with work.git.room() as room:
        ran = work.git.run("mv", "--dry-run", *work.arguments, room=room)
    if options.has("dry-run"):
        return ran.say()
    if ran.status != 0:
        return ran._replace(out="").say()
    *sources, target = [_from_top(work, word) for word in options.words]
    into = os.path.isdir(os.path.join(work.root, target))
    pairs = [(one, os.path.join(target, os.path.basename(one)) if into else target) for one in sources]
    work.call("move", pairs=pairs, force=options.has("force"))
    if options.has("verbose"):
        say("".join(line + "\n" for line in ran.lines if line.startswith("Renaming ")))
    complain(ran.err)
    return 0


def _from_top(work: Work, word: str) -> str:
    path = os.path.normpath(os.path.join(os.path.realpath(work.git.base), word))
    return os.path.relpath(path, work.root)


def restore(work: Work) -> int:
    """`git restore`."""
    options = work.options(_RESTORE)
    if options.has("overlay"):
        raise Unsupported("--overlay")
    if not options.words:
        return fatal("you must specify path(s) to restore")
    staged = options.has("staged")
    worktree = options.has("worktree") or not staged
    named = options.values("source")
    source = work.git.commit(named[-1]) if named else ""
    if staged and not named:
        named, source = ["HEAD"], work.git.commit("HEAD")
    if named and not source:
        return fatal(f"could not resolve {named[-1]}")
    status, _ = give_back(work, options.words, source=source, staged=staged, worktree=worktree)
    return status


def give_back(
    work: Work, words: tuple[str, ...], *, source: str, staged: bool, worktree: bool, overlay: bool = False
) -> tuple[int, int]:
    """Give the files that are named the content of a commit, or of the index where that is "".

    `overlay`: what the commit lacks stays. The exit status, and how many files there were to be given back.
    """
    known = ["--with-tree", source] if source else []
    ran = work.git.run("ls-files", "--error-unmatch", "-z", *known, "--", *words)
    if ran.status != 0:
        complain(ran.err.partition("\n")[0] + "\n")
        return 1, 0
    changed: dict[str, None] = {}
    against = (source,) if source else ()
    if staged:
        changed |= dict.fromkeys(_differing(work, ("--cached", *against), words, overlay=overlay))
    if worktree:
        changed |= dict.fromkeys(_differing(work, against, words, overlay=overlay))
    if changed:
        work.call("restore", paths=list(changed), staged=staged, worktree=worktree, source=source or None)
    return 0, len(changed)


def _differing(work: Work, against: tuple[str, ...], words: tuple[str, ...], *, overlay: bool) -> list[str]:
    """The paths, of those that are named, that are not as in what they are held against."""
    left_out = ["--diff-filter=a"] if overlay and against else []
    return work.git.differing("--ignore-submodules", *left_out, *against, "--", *words)


def unstage(work: Work, words: tuple[str, ...], source: str, *, quiet: bool) -> int:
    """`git reset COMMIT -- PATH`: what is not known is passed over."""
    against = [source] if source else []
    changed = work.git.differing("--cached", *against, "--", *words)
    if changed:
        work.call("restore", paths=changed, staged=True, worktree=False, source=source or None)
    if not quiet:
        tell_unstaged(work)
    return 0


def tell_unstaged(work: Work) -> None:
    """What differs from the index now, as git tells it after a reset."""
    fields = work.git.differing(what="--name-status", at_top=True)
    lines = [f"{kind}\t{path}\n" for kind, path in zip(fields[::2], fields[1::2], strict=True)]
    if lines:
        say("Unstaged changes after reset:\n" + "".join(lines))


def is_there(work: Work, word: str) -> bool:
    """Whether a word may be meant for a file: one is there, or it is a pattern for files."""
    return word.startswith(":") or any(one in word for one in "*?[") or os.path.lexists(work.git.base / word)


def split_revision(work: Work, options: Options) -> tuple[str, tuple[str, ...], int]:
    """The commit that the first word names, "" for none; the paths; and an exit status, not 0 where it is neither.

    Before `--` a word is a commit; without one, what names both a commit and a file is not guessed at.
    """
    words = options.before
    if options.dashes:
        if len(words) > 1:
            return "", (), fatal(f"'{words[1]}' is no path after a commit; write -- before the paths")
        if words and not work.git.object(words[0]):
            return "", (), fatal(f"bad revision '{words[0]}'")
        return "".join(words), options.after, 0
    if not words:
        return "", (), 0
    is_file = os.path.lexists(work.git.base / words[0])
    if words[0] == "-" or work.git.object(words[0]):
        if is_file:
            ambiguous = f"ambiguous argument '{words[0]}': both revision and filename"
            return "", (), fatal(f"{ambiguous}\n{SEPARATE}")
        return words[0], words[1:], 0
    return "", words, 0
