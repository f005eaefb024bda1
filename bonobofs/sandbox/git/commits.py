"""commit, merge and tag: what makes something new."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from bonobofs.sandbox.git.gate import Failure
from bonobofs.sandbox.git.options import Options, Unsupported, spec, words
from bonobofs.sandbox.git.real import Ran
from bonobofs.sandbox.git.telling import complain, say
from bonobofs.sandbox.git.work import Work, error, fatal

_COMMIT: Final = spec(
    "message,m= file,F= reuse-message,C= all,a only,o include,i amend edit,e allow-empty verify verify-off,n quiet,q"
    " verbose,v dry-run short porcelain long branch null,z status cleanup= untracked-files,u? gpg-sign,S? signoff,s"
    " author= date= fixup= squash= trailer= template,t= patch,p interactive reset-author reedit-message,c="
    " allow-empty-message pathspec-from-file= pathspec-file-nul post-rewrite"
)
_ANSWERED: Final = words(
    "message file reuse-message all only include amend edit allow-empty verify verify-off quiet verbose dry-run short"
    " porcelain long branch null status cleanup untracked-files no-gpg-sign post-rewrite"
)
_SHOWN: Final = ("dry-run", "short", "porcelain", "long")
_TRIED: Final = ("all", "include", "amend")
_MERGE: Final = spec(
    "message,m= file,F= ff no-ff ff-only squash commit edit,e quiet,q verbose,v stat nostat,n summary strategy,s="
    " strategy-option,X= abort continue quit verify verify-signatures gpg-sign,S? signoff progress"
    " allow-unrelated-histories rerere-autoupdate autostash overwrite-ignore into-name= cleanup="
)
_MERGED: Final = words(
    "message file ff no-ff ff-only squash edit quiet verbose stat nostat summary verify no-gpg-sign progress"
)
_TAG: Final = spec("annotate,a message,m= file,F= force,f delete,d sign,s local-user,u= edit,e cleanup= create-reflog")


def commit(work: Work) -> int:
    """`git commit`: git says whether there is anything to be committed, and then the gate does it."""
    options = work.options(_COMMIT)
    options.keep_to(_ANSWERED)
    if any(options.has(name) for name in _SHOWN):
        if options.words:
            raise Unsupported("--dry-run with paths")
        return _try(work, *work.arguments).say()
    tried = _try_only(work, options) if _is_only(options) else _try_all(work, options)
    if tried.status != 0 and (tried.err or not options.has("allow-empty")):
        return tried.say()
    message = _message(work, options)
    if message == "":
        complain("Aborting commit due to empty commit message.\n")
        return 1
    first = not work.git.commit("HEAD")
    made = work.call(
        "commit",
        message=message,
        files=_files(work, options),
        only=_is_only(options),
        amend=options.has("amend"),
        allow_empty=options.has("allow-empty"),
    )
    if not options.has("quiet"):
        _tell_commit(
            work, str(made["hash"]), first=first, dated=options.has("amend") or bool(options.values("reuse-message"))
        )
    return 0


def _is_only(options: Options) -> bool:
    """Whether nothing but the files that are named is to be committed."""
    return bool(options.words) and not options.has("include")


def _try_all(work: Work, options: Options) -> Ran:
    return _try(work, *(f"--{name}" for name in _TRIED if options.has(name)), "--", *options.words)


def _try_only(work: Work, options: Options) -> Ran:
    """As git would, which writes beside the index for this: the commit before, with the files that are named."""
    named = work.git.run("ls-files", "--error-unmatch", "-z", "--full-name", "--", *options.words)
    if named.status != 0:
        return Ran(1, "", named.err.partition("\n")[0] + "\n")
    with work.git.room() as room:
        work.git.at_top("read-tree", "HEAD" if work.git.commit("HEAD") else "--empty", room=room)
        work.git.at_top("update-index", "--add", "--remove", "-z", "--stdin", room=room, given=named.out)
        return work.git.run("commit", "--dry-run", *(["--amend"] if options.has("amend") else []), room=room)


def _try(work: Work, *arguments: str) -> Ran:
    with work.git.room() as room:
        return work.git.run("commit", "--dry-run", *arguments, room=room)


def _files(work: Work, options: Options) -> list[str] | None:
    """What is to be committed beside what is staged, or instead of it; None: what is staged."""
    if options.has("all"):
        return work.git.differing("--ignore-submodules=dirty", at_top=True)
    if not options.words:
        return None
    if not work.git.commit("HEAD"):
        return work.git.run("ls-files", "-z", "--full-name", "--", *options.words).names
    return work.git.differing("--ignore-submodules=dirty", "HEAD", "--", *options.words)


def _message(work: Work, options: Options) -> str | None:
    """The message, cleaned as git cleans it; None: that of the commit which is amended."""
    given = options.values("message")
    files = options.values("file")
    reused = options.values("reuse-message")
    if given:
        text = "\n\n".join(given)
    elif files:
        text = os.fsdecode(sys.stdin.buffer.read() if files[-1] == "-" else (work.git.base / files[-1]).read_bytes())
    elif reused:
        text = work.git.at_top("show", "--no-patch", "--format=%B", work.git.commit(reused[-1])).out
    elif options.has("amend") and ("no-edit", "") in options.given:
        return None
    else:
        old = work.git.at_top("show", "--no-patch", "--format=%B", "HEAD").out if options.has("amend") else ""
        return _edited(work, old)
    if options.has("edit"):
        return _edited(work, text)
    how = (options.values("cleanup") or ["default"])[-1]
    if how == "verbatim":
        return text
    return work.git.run("stripspace", *(["--strip-comments"] if how == "strip" else []), given=text).out


def _edited(work: Work, text: str) -> str:
    """What the user's editor makes of a message."""
    editor = work.git.run("var", "GIT_EDITOR")
    if editor.status != 0:
        complain(editor.err)
        return ""
    state = _try(work).out
    hint = "\nPlease enter the commit message for your changes. Lines starting\nwith '#' will be ignored.\n\n"
    comments = "".join(f"# {line}".rstrip() + "\n" for line in (hint + state).split("\n")[1:])
    with tempfile.TemporaryDirectory(prefix="bonobofs-git-") as directory:
        file = Path(directory, "COMMIT_EDITMSG")
        file.write_bytes(os.fsencode(f"{text}\n{comments}"))
        command = f"{editor.out.strip()} {shlex.quote(str(file))}"
        if subprocess.run(["/bin/sh", "-c", command], check=False).returncode != 0:
            complain(f"error: There was a problem with the editor '{editor.out.strip()}'.\n")
            return ""
        return work.git.run("stripspace", "--strip-comments", given=os.fsdecode(file.read_bytes())).out


def _tell_commit(work: Work, made: str, *, first: bool, dated: bool) -> None:
    where = work.git.branch() or "detached HEAD"
    root = " (root-commit)" if first else ""
    told = work.git.said(f"[{where.replace('%', '%%')}{root} %h] %s%n%an <%ae>%n%cn <%ce>%n%ad", made)
    if not told:
        complain(f"warning: commit {made} is made, but git cannot read it here at this moment\n")
        return
    head, author, committer, date = told.split("\n")
    say(f"{head}\n")
    if author != committer:
        say(f" Author: {author}\n")
    if dated:
        say(f" Date: {date}\n")
    work.git.show("diff-tree", "--root", "--no-commit-id", "--shortstat", "--summary", "-M", "-B", made)


def merge(work: Work) -> int:
    """`git merge` of one branch or commit. A conflict is told as git tells it, and changes nothing."""
    options = work.options(_MERGE)
    if any(options.has(name) for name in ("abort", "continue", "quit")):
        if work.git.path("MERGE_HEAD").exists():
            raise Unsupported("a merge that git itself began")
        return fatal("There is no merge to abort (MERGE_HEAD missing).")
    options.keep_to(_MERGED)
    if len(options.words) != 1:
        raise Unsupported("other than one branch or commit")
    name = "@{-1}" if options.words[0] == "-" else options.words[0]
    source, before = work.git.commit(name), work.git.commit("HEAD")
    if not source:
        complain(f"merge: {name} - not something we can merge\n")
        return 1
    done = work.call(
        "merge",
        source=work.git.full_name(name) or source,
        strategy="squash" if options.has("squash") else "merge",
        message=_message(work, options) if options.values("message") or options.values("file") else None,
        fast_forward="only" if options.has("ff-only") else "no" if options.has("no-ff") else "auto",
        **({"commit": False} if options.has("squash") else {}),
    )
    if done["conflicts"]:
        return _tell_conflicts(work, before, source)
    if options.has("quiet"):
        return 0
    if done["up_to_date"]:
        say("Already up to date.\n")
        return 0
    fast = not options.has("no-ff") and work.git.run("merge-base", before, source).out.strip() == before
    _tell_merge(work, before, source, options, fast=fast)
    return 0


def _tell_merge(work: Work, before: str, source: str, options: Options, *, fast: bool) -> None:
    squash = options.has("squash")
    if fast:
        say(f"Updating {work.git.said('%h', before)}..{work.git.said('%h', source)}\nFast-forward\n")
    if squash:
        say("Squash commit -- not updating HEAD\n")
        if not fast:
            complain("Automatic merge went well; stopped before committing as requested\n")
            return
    elif not fast:
        say("Merge made by the 'ort' strategy.\n")
    if not options.has("nostat") and ("no-stat", "") not in options.given:
        held = ("diff-index", "--cached", before) if squash else ("diff-tree", before, "HEAD")
        work.git.show(held[0], "--stat", "--summary", "-M", *held[1:])


def _tell_conflicts(work: Work, before: str, source: str) -> int:
    with work.git.room() as room:
        ran = work.git.at_top("merge-tree", "--write-tree", "--messages", "--name-only", before, source, room=room)
    say("".join(f"{line}\n" for line in ran.lines if line.startswith(("Auto-merging ", "CONFLICT "))))
    say("Automatic merge failed; nothing was changed.\n")
    complain("git: The gate leaves no merge half done; make the two agree on a branch, and merge again.\n")
    return 1


def tag(work: Work) -> int:
    """`git tag NAME [COMMIT]`, with or without a message, and `git tag -d NAME...`."""
    options = work.options(_TAG)
    options.keep_to(("annotate", "message", "file", "force", "delete"))
    if options.has("delete"):
        return _delete_tags(work, options.words)
    if not 1 <= len(options.words) <= 2:
        return fatal("too many arguments" if options.words else "no tag name given")
    name, target = options.words[0], (*options.words, "HEAD")[1]
    found = work.git.object(target)
    if not found:
        return fatal(f"Failed to resolve '{target}' as a valid ref.")
    old = work.git.object(f"refs/tags/{name}")
    annotated = options.has("annotate") or options.values("message") or options.values("file")
    message = _message(work, options) if annotated else None
    if annotated and not message:
        return fatal("no tag message?")
    try:
        made = work.call("tag", name=name, target=found, message=message, force=options.has("force"))
    except Failure as failure:
        return fatal(f"tag '{name}' already exists" if failure.kind == "exists" else str(failure))
    if old and options.has("force") and old != made["result"]:
        say(f"Updated tag '{name}' (was {work.git.short(old)})\n")
    return 0


def _delete_tags(work: Work, names: tuple[str, ...]) -> int:
    status = 0
    for name in names:
        old = work.git.object(f"refs/tags/{name}")
        if not old:
            status = error(f"tag '{name}' not found.")
            continue
        short = work.git.short(old)
        work.call("delete_tag", name=name)
        say(f"Deleted tag '{name}' (was {short})\n")
    return status
