"""branch, checkout and switch: what is there beside, and what is checked out."""

from __future__ import annotations

from typing import Final

from bonobofs.sandbox.git.gate import Failure
from bonobofs.sandbox.git.index import give_back, split_revision
from bonobofs.sandbox.git.options import Options, Unsupported, spec, words
from bonobofs.sandbox.git.telling import complain, say
from bonobofs.sandbox.git.work import FATAL, Work, error, fatal, told

_BRANCH: Final = spec(
    "delete,d delete-merged-or-not,D move,m move-over,M copy,c copy-over,C force,f quiet,q track,t? list,l all,a"
    " remotes,r verbose,v set-upstream-to,u= unset-upstream edit-description create-reflog"
)
_BRANCHING: Final = words("delete delete-merged-or-not move move-over force quiet verbose track create-reflog")
_SWITCH: Final = spec(
    "create,c= force-create,C= detach,d force,f discard-changes quiet,q merge,m conflict= guess track,t? orphan="
    " progress ignore-other-worktrees recurse-submodules?"
)
_CHECKOUT: Final = spec(
    "create,b= force-create,B= detach,d force,f quiet,q merge,m conflict= guess track,t? orphan= progress ours,2"
    " theirs,3 patch,p ignore-other-worktrees overlay overwrite-ignore recurse-submodules? pathspec-from-file="
    " pathspec-file-nul ignore-skip-worktree-bits log,l"
)
_SWITCHING: Final = ("create", "detach", "force", "discard-changes", "quiet", "guess", "progress", "overwrite-ignore")

_DETACHED: Final = """\
You are in 'detached HEAD' state. You can look around, make experimental
changes and commit them, and you can discard any commits you make in this
state without impacting any branches by switching back to a branch.

If you want to create a new branch to retain commits you create, you may
do so (now or later) by using -c with the switch command. Example:

  git switch -c <new-branch-name>

Or undo this operation with:

  git switch -

"""


def branch(work: Work) -> int:
    """`git branch NAME [START]`, `-d`, `-D`, `-m` and `-M`."""
    options = work.options(_BRANCH)
    options.keep_to(_BRANCHING)
    if options.has("delete") or options.has("delete-merged-or-not"):
        force = options.has("delete-merged-or-not") or options.has("force")
        return _delete(work, options.words, force=force, quiet=options.has("quiet"))
    if options.has("move") or options.has("move-over"):
        return _rename(work, options.words, force=options.has("move-over") or options.has("force"))
    if options.has("force") or options.has("track") or options.has("verbose"):
        raise Unsupported("--force, --track")
    if len(options.words) > 2:
        raise Unsupported("more than a name and a start")
    name, start = (*options.words, "HEAD")[:2]
    base = work.git.commit(start)
    if not base:
        return fatal(f"not a valid object name: '{start}'")
    try:
        work.call("create_branch", name=name, base=base)
    except Failure as failure:
        return _not_made(failure, name)
    return 0


def _not_made(failure: Failure, name: str) -> int:
    if failure.kind == "exists":
        return fatal(f"a branch named '{name}' already exists")
    if failure.kind == "name":
        return fatal(f"'{name}' is not a valid branch name.")
    return told(failure, "checkout")


def _delete(work: Work, names: tuple[str, ...], *, force: bool, quiet: bool) -> int:
    if not names:
        return fatal("branch name required")
    status = 0
    for name in names:
        old = work.git.object(f"refs/heads/{name}")
        if not old:
            status = error(f"branch '{name}' not found.")
            continue
        short = work.git.short(old)
        try:
            work.call("delete_branch", name=name, force=force)
        except Failure as failure:
            status = _not_deleted(failure, name)
            continue
        if not quiet:
            say(f"Deleted branch {name} (was {short}).\n")
    return status


def _not_deleted(failure: Failure, name: str) -> int:
    if failure.kind == "not-merged":
        return error(
            f"The branch '{name}' is not fully merged.\n"
            f"If you are sure you want to delete it, run 'git branch -D {name}'."
        )
    if failure.kind == "checked-out":
        return error(f"Cannot delete branch '{name}' checked out at '{''.join(failure.paths)}'")
    return told(failure, "checkout")


def _rename(work: Work, words: tuple[str, ...], *, force: bool) -> int:
    if not 1 <= len(words) <= 2:
        return fatal("too many arguments for a rename operation" if words else "branch name required")
    old = words[0] if len(words) == 2 else work.git.branch()
    if not old or not (work.git.object(f"refs/heads/{old}") or old == work.git.branch()):
        return error(f"refname refs/heads/{old} not found") and fatal("Branch rename failed")
    try:
        work.call("rename_branch", old=old, new=words[-1], force=force)
    except Failure as failure:
        return _not_made(failure, words[-1])
    return 0


def switch(work: Work) -> int:
    """`git switch`."""
    options = work.options(_SWITCH)
    options.keep_to(_SWITCHING)
    if len(options.words) > 1:
        return fatal("only one reference expected")
    if options.values("create"):
        return _go_to_new(work, options, options.values("create")[-1], (*options.words, "HEAD")[0])
    if not options.words:
        return fatal("missing branch or commit argument")
    name = options.words[0]
    if not options.has("detach") and name != "-" and not work.git.object(f"refs/heads/{name}"):
        if work.git.commit(name):
            complain(f"fatal: a branch is expected, got commit '{name}'\n")
            complain("hint: If you want to detach HEAD at the commit, try again with the --detach option.\n")
            return FATAL
        return fatal(f"invalid reference: {name}")
    return _go_to(work, options, name)


def checkout(work: Work) -> int:
    """`git checkout` of a branch, of a commit, or of files."""
    options = work.options(_CHECKOUT)
    options.keep_to(_SWITCHING)
    if options.values("create") and len(options.words) <= 1 and not options.after:
        return _go_to_new(work, options, options.values("create")[-1], (*options.words, "HEAD")[0])
    source, paths, status = split_revision(work, options)
    if status != 0:
        return status
    if paths:
        return _give_back(work, options, source, paths)
    if source:
        return _go_to(work, options, source)
    _tell_changes(work)
    return 0


def _give_back(work: Work, options: Options, source: str, paths: tuple[str, ...]) -> int:
    options.keep_to(("quiet", "force", "progress"))
    commit = work.git.commit(source) if source else ""
    status, count = give_back(work, paths, source=commit, staged=bool(commit), worktree=True, overlay=True)
    if status == 0 and not options.has("quiet") and not options.dashes:
        origin = work.git.short(commit) if commit else "the index"
        complain(f"Updated {count} path{'' if count == 1 else 's'} from {origin}\n")
    return status


def _go_to_new(work: Work, options: Options, name: str, start: str) -> int:
    base = work.git.commit(start)
    if not base and start != "HEAD":
        return fatal(f"'{start}' is not a commit and a branch '{name}' cannot be created from it")
    try:
        work.call("switch", branch=name, create=True, base=base or None, force=_forces(options))
    except Failure as failure:
        return _not_made(failure, name)
    if not options.has("quiet"):
        if start != "HEAD":
            _tell_changes(work, tracking=False)
        complain(f"Switched to a new branch '{name}'\n")
    return 0


def _go_to(work: Work, options: Options, name: str) -> int:
    before = (work.git.branch(), work.git.commit("HEAD"))
    name = _last(work) if name == "-" else name
    is_branch = bool(work.git.object(f"refs/heads/{name}")) and not options.has("detach")
    commit = work.git.commit(f"refs/heads/{name}" if is_branch else name)
    if not commit:
        return fatal(f"invalid reference: {name}")
    place = {"branch": name} if is_branch else {"commit": commit}
    try:
        work.call("switch", force=_forces(options), **place)
    except Failure as failure:
        return told(failure, "checkout")
    if not options.has("quiet"):
        _tell_switch(work, options, before, name, commit, is_branch=is_branch)
    return 0


def _forces(options: Options) -> bool:
    return options.has("force") or options.has("discard-changes")


def _last(work: Work) -> str:
    named = work.git.run("rev-parse", "--abbrev-ref", "@{-1}").out.strip()
    return named if named not in ("", "HEAD", "@{-1}") else "@{-1}"


def _tell_switch(
    work: Work, options: Options, before: tuple[str, str], name: str, commit: str, *, is_branch: bool
) -> None:
    if not _forces(options):
        _tell_local(work)
    was, at = before
    if not was and at and at != commit:
        complain(f"Previous HEAD position was {work.git.said('%h %s', at)}\n")
    if not is_branch:
        if was and work.name == "checkout" and not options.has("detach"):
            complain(f"Note: switching to '{name}'.\n\n{_DETACHED}")
        complain(f"HEAD is now at {work.git.said('%h %s', commit)}\n")
        return
    complain(f"Already on '{name}'\n" if was == name else f"Switched to branch '{name}'\n")
    _tell_tracking(work)


def _tell_changes(work: Work, *, tracking: bool = True) -> None:
    _tell_local(work)
    if tracking:
        _tell_tracking(work)


def _tell_local(work: Work) -> None:
    """What of the work tree is not as in the commit, as git lists it when it goes there."""
    if work.git.commit("HEAD"):
        with work.git.room() as room:
            work.git.show("diff", "--name-status", "--no-renames", "--no-ext-diff", "--no-color", "HEAD", room=room)


def _tell_tracking(work: Work) -> None:
    """How the branch stands to the one that it follows."""
    lines = work.git.at_top("status", "--long", "--untracked-files=no", "--ignore-submodules=all").lines[1:]
    told_of = lines[: lines.index("")] if "" in lines else []
    if told_of and told_of[0].startswith("Your branch"):
        say("".join(f"{line}\n" for line in told_of))
