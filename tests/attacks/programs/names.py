"""Rename, link, unlink and make: a name that appears, leaves or changes places."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bonobofs.policy.decision import Code
from tests.attacks.attack import CONTENT, DRAFT, Place, add, attack, draft, draft_path, module, notes
from tests.support.syscalls import (
    AT_SYMLINK_FOLLOW,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    link_open,
    linkat,
    make,
    opened,
    renameat2,
)

_SCRIPT = b"#!/bin/sh\necho evil\n"

# -- rename


@attack(Code.DEFAULT, "{closed}")
def move_onto_a_closed_file(place: Place) -> None:
    os.rename(draft(place), place.closed)


@attack(Code.DEFAULT, "{closed}.md")
def move_to_a_closed_name(place: Place) -> None:
    os.rename(draft(place), f"{place.closed}.md")


@attack(Code.DEFAULT, "{closed}")
def move_a_closed_file_away(place: Place) -> None:
    os.rename(place.closed, draft_path(place))


@attack(Code.DEFAULT, "{closed}.md")
def move_without_replacing(place: Place) -> None:
    renameat2(draft(place), f"{place.closed}.md", RENAME_NOREPLACE)


@attack(Code.PROTECTED, "{hook}")
def move_onto_a_hook(place: Place) -> None:
    os.rename(draft(place), place.hook)


@attack(Code.PROTECTED, "{hook}")
def move_a_hook_away(place: Place) -> None:
    os.rename(place.hook, draft_path(place))


@attack(Code.PROTECTED, ".git")
def move_git_away(place: Place) -> None:
    os.rename(".git", f"{place.code}/git")


@attack(Code.PROTECTED, ".beads")
def exchange_beads_with_a_directory(place: Place) -> None:
    os.mkdir(f"{place.code}/beads")
    renameat2(f"{place.code}/beads", ".beads", RENAME_EXCHANGE)


@attack(Code.KEEP, "README.md")
def move_a_kept_file_away(place: Place) -> None:
    os.rename("README.md", draft_path(place))


@attack(Code.KEEP, "AGENTS.md")
def exchange_a_kept_file(place: Place) -> None:
    renameat2("AGENTS.md", draft(place), RENAME_EXCHANGE)


@attack(Code.DEFAULT, "README.md")
def replace_a_kept_file_that_no_rule_admits(place: Place) -> None:
    os.rename(draft(place), "README.md")


@attack(Code.DEFAULT, "{closed}")
def exchange_with_a_closed_file(place: Place) -> None:
    renameat2(draft(place), place.closed, RENAME_EXCHANGE)


@attack(Code.DEFAULT, "{closed}")
def exchange_a_closed_file(place: Place) -> None:
    renameat2(place.closed, draft(place), RENAME_EXCHANGE)


@attack(Code.SUFFIX, "{docs}/draft.txt")
def a_suffix_that_only_the_new_name_breaks(place: Place) -> None:
    os.rename(draft(place), f"{place.docs}/draft.txt")


@attack(Code.EXECUTABLE, DRAFT)
def a_script_becomes_a_document(place: Place) -> None:
    os.rename(module(place, _SCRIPT), draft_path(place))


@attack(Code.EXECUTABLE, DRAFT)
def a_file_with_execute_permission_becomes_a_document(place: Place) -> None:
    os.rename(module(place, b"text", 0o755), draft_path(place))


@attack(Code.EXECUTABLE, DRAFT)
def an_exchange_brings_a_script_at_its_other_end(place: Place) -> None:
    renameat2(draft(place), module(place, _SCRIPT), RENAME_EXCHANGE)


@attack(Code.SUFFIX, "{code}/package/draft.md")
def an_exchange_of_directories_brings_a_denied_file_at_its_other_end(place: Place) -> None:
    os.mkdir(f"{place.docs}/drafts")
    os.mkdir(f"{place.code}/package")
    make(f"{place.docs}/drafts/draft.md")
    renameat2(f"{place.code}/package", f"{place.docs}/drafts", RENAME_EXCHANGE)


@attack(Code.HIDDEN, "{code}/.module.py")
def a_hidden_name_by_rename(place: Place) -> None:
    os.rename(module(place), f"{place.code}/.module.py")


# -- directories that bring their children


def _repository(source: Path, place: Place) -> None:
    (source / place.code / "sub/.git").mkdir(parents=True)
    (source / place.code / "sub/.git/config").write_bytes(CONTENT)


def _sub_notes(source: Path, place: Place) -> None:
    (source / place.docs / "sub/deep").mkdir(parents=True)
    (source / place.docs / "sub/deep/notes.txt").write_bytes(CONTENT)
    (source / place.docs / "empty").mkdir()


def _hidden(source: Path, place: Place) -> None:
    (source / place.code / "sub").mkdir()
    (source / place.code / "sub/.env").write_bytes(CONTENT)


@attack(Code.PROTECTED, "{code}/sub/.git", below=_repository)
def move_a_directory_with_a_repository_in_it(place: Place) -> None:
    os.rename(f"{place.code}/sub", f"{place.code}/other")


@attack(Code.SUFFIX, "{docs}/sub/deep/notes.txt", below=_sub_notes)
def move_a_directory_with_a_denied_file_in_it(place: Place) -> None:
    os.rename(f"{place.docs}/sub", f"{place.docs}/other")


@attack(Code.SUFFIX, "{docs}/sub/deep/notes.txt", below=_sub_notes)
def exchange_a_directory_with_a_denied_file_in_it(place: Place) -> None:
    renameat2(f"{place.docs}/empty", f"{place.docs}/sub", RENAME_EXCHANGE)


@attack(Code.HIDDEN, "{code}/sub/.env", below=_hidden)
def move_a_directory_with_a_hidden_file_in_it(place: Place) -> None:
    os.rename(f"{place.code}/sub", f"{place.code}/other")


@attack(Code.SUFFIX, "{docs}/package/module.py")
def move_a_directory_to_where_its_children_are_not_admitted(place: Place) -> None:
    os.mkdir(f"{place.code}/package")
    make(f"{place.code}/package/module.py", b"pass\n")
    os.rename(f"{place.code}/package", f"{place.docs}/package")


@attack(Code.DEFAULT, "src/whole")
def move_a_directory_to_a_closed_place(place: Place) -> None:
    os.mkdir(f"{place.docs}/whole")
    os.rename(f"{place.docs}/whole", "src/whole")


@attack(Code.DEFAULT, "src")
def move_a_closed_directory_away(place: Place) -> None:
    os.rename("src", f"{place.code}/src")


@attack(Code.PROTECTED, "{code}/package/.git")
def a_directory_becomes_a_repository(place: Place) -> None:
    os.makedirs(f"{place.code}/package/git")
    os.rename(f"{place.code}/package/git", f"{place.code}/package/.git")


# -- link


@attack(Code.DEFAULT, "{closed}")
def link_a_closed_file_to_an_allowed_name(place: Place) -> None:
    os.link(place.closed, draft_path(place))


@attack(Code.PROTECTED, "{hook}")
def link_a_hook_to_an_allowed_name(place: Place) -> None:
    os.link(place.hook, draft_path(place))


@attack(Code.DEFAULT, "{closed}.md")
def link_an_allowed_file_to_a_closed_name(place: Place) -> None:
    os.link(draft(place), f"{place.closed}.md")


@attack(Code.PROTECTED, "{hook}-linked")
def link_an_allowed_file_to_a_hook(place: Place) -> None:
    os.link(draft(place), f"{place.hook}-linked")


@attack(Code.DEFAULT, "{closed}")
def link_a_closed_file_by_its_descriptor(place: Place) -> None:
    with opened(place.closed, os.O_RDONLY) as fd:
        link_open(fd, draft_path(place))


@attack(Code.DEFAULT, "{closed}")
def link_what_a_symlink_leads_to(place: Place) -> None:
    os.symlink(f"../../{place.closed}", f"{place.docs}/way.md")
    linkat(f"{place.docs}/way.md", draft_path(place), AT_SYMLINK_FOLLOW)


@attack(Code.EXECUTABLE, DRAFT)
def link_a_script_to_a_document(place: Place) -> None:
    os.link(module(place, _SCRIPT), draft_path(place))


# -- remove


@attack(Code.DEFAULT, "{closed}")
def remove_a_closed_file(place: Place) -> None:
    os.unlink(place.closed)


@attack(Code.PROTECTED, "{hook}")
def remove_a_hook(place: Place) -> None:
    os.unlink(place.hook)


@attack(Code.KEEP, "README.md")
def remove_the_readme(place: Place) -> None:
    os.unlink("README.md")


@attack(Code.KEEP, "AGENTS.md")
def remove_the_agents_file(place: Place) -> None:
    os.unlink("AGENTS.md")


def _closed_directory(source: Path, place: Place) -> None:
    (source / f"{place.closed}-directory").mkdir()


@attack(Code.DEFAULT, "{closed}-directory", below=_closed_directory)
def remove_a_closed_directory(place: Place) -> None:
    os.rmdir(f"{place.closed}-directory")


@attack(Code.PROTECTED, ".beads")
def remove_beads(place: Place) -> None:
    os.rmdir(".beads")


@attack(Code.SUFFIX, "{docs}/notes.txt", below=notes)
def remove_a_denied_file_from_an_allowed_directory(place: Place) -> None:
    os.unlink(f"{place.docs}/notes.txt")


@attack(Code.OUTSIDE, DRAFT)
def put_a_symlink_in_the_place_of_a_file(place: Place) -> None:
    os.unlink(draft(place))
    os.symlink("/etc/passwd", draft_path(place))


@attack(Code.SUFFIX, "{docs}/draft.md/notes.txt")
def put_a_directory_in_the_place_of_a_file(place: Place) -> None:
    os.unlink(draft(place))
    os.mkdir(draft_path(place))
    make(f"{draft_path(place)}/notes.txt")


@attack(Code.SUFFIX, "{docs}/draft.txt")
def put_a_pipe_in_the_place_of_a_file(place: Place) -> None:
    """A pipe goes by path and suffix; a file that replaces it is judged as a file."""
    os.unlink(draft(place))
    os.mkfifo(draft_path(place))
    make(f"{place.docs}/other.md")
    os.rename(f"{place.docs}/other.md", draft_path(place))
    os.rename(draft_path(place), f"{place.docs}/draft.txt")


# -- make


@attack(Code.DEFAULT, "{closed}-directory")
def make_a_directory_in_a_closed_place(place: Place) -> None:
    os.mkdir(f"{place.closed}-directory")


@attack(Code.DEFAULT, "{closed}-pipe")
def make_a_pipe_in_a_closed_place(place: Place) -> None:
    os.mkfifo(f"{place.closed}-pipe")


@attack(Code.PROTECTED, "{hook}-pipe")
def make_a_pipe_in_git(place: Place) -> None:
    os.mkfifo(f"{place.hook}-pipe")


@attack(Code.DEFAULT, "src/s.sock")
def bind_a_socket_in_a_closed_place(place: Place) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("src/s.sock")


@attack(Code.PROTECTED, ".git/s.sock")
def bind_a_socket_in_git(place: Place) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(".git/s.sock")


@attack(Code.DEVICE, "{docs}/disk.md", root=True)
def make_a_block_device(place: Place) -> None:
    os.mknod(f"{place.docs}/disk.md", 0o600 | stat.S_IFBLK, os.makedev(7, 0))


@attack(Code.DEVICE, "{code}/mem.py", root=True)
def make_a_character_device(place: Place) -> None:
    os.mknod(f"{place.code}/mem.py", 0o600 | stat.S_IFCHR, os.makedev(1, 1))


@attack(Code.EXECUTABLE, DRAFT)
def make_a_file_with_execute_permission_by_mknod(place: Place) -> None:
    os.mknod(draft_path(place), 0o755 | stat.S_IFREG)


@attack(Code.EXECUTABLE, DRAFT)
def make_a_file_with_execute_permission(place: Place) -> None:
    make(draft_path(place), b"", 0o755)


@attack(Code.SUFFIX, "{docs}/node.txt")
def make_a_denied_file_by_mknod(place: Place) -> None:
    os.mknod(f"{place.docs}/node.txt", 0o644 | stat.S_IFREG)


# -- what configures programs that run later


def _make(path: str, place: Place) -> None:
    make(path.replace("{code}", place.code), b"[core]\n\thooksPath = /tmp/evil\n")


def _make_hidden_directory(path: str, _: Place) -> None:
    os.mkdir(path)


def _making(act: Callable[[str, Place], None], code: Code, *paths: str) -> None:
    for path in paths:
        label = re.sub(r"\W+", "_", path.replace("{code}", "below")).strip("_")
        add(f"create_{code.lower()}_{label}", partial(act, path), code, path)


_making(
    _make,
    Code.PROTECTED,
    ".git/hooks/post-checkout",
    ".git/config.worktree",
    ".git/commondir",
    ".git/info/attributes",
    ".git/objects/info/alternates",
    ".beads/config.yaml",
    "{code}/.git",
    "{code}/.beads",
)
_making(_make, Code.HIDDEN, ".gitmodules", ".gitattributes", ".envrc", ".mcp.json", ".npmrc", "{code}/.pth.py")
_making(_make, Code.DEFAULT, "Makefile", "conftest.py", "sitecustomize.py", "package.json", "setup.py")
_making(_make_hidden_directory, Code.HIDDEN, ".vscode", ".cursor", ".github", ".devcontainer")


@attack(Code.PROTECTED, "policy.toml")
def append_to_the_policy_in_the_source(place: Place) -> None:
    with opened("policy.toml", os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b'default = "allow"\n')


@attack(Code.PROTECTED, "policy.toml")
def replace_the_policy_in_the_source(place: Place) -> None:
    os.rename(draft(place, b'default = "allow"\n'), "policy.toml")


@attack(Code.PROTECTED, "policy.toml")
def remove_the_policy_in_the_source(place: Place) -> None:
    os.unlink("policy.toml")


# -- what bonobofs shows in the mount


@attack(Code.PROTECTED, ".bonobofs", error=errno.EPERM)
def move_ours_away_or_something_onto_it(place: Place) -> None:
    """Both are refused; the second is counted as a repetition of the first."""
    os.mkdir(f"{place.code}/ours")
    with contextlib.suppress(PermissionError):
        os.rename(".bonobofs", f"{place.code}/theirs")
        raise AssertionError("it was moved away")
    os.rename(f"{place.code}/ours", ".bonobofs")


@attack(Code.PROTECTED, ".bonobofs", error=errno.EPERM)
def remove_ours(place: Place) -> None:
    os.rmdir(".bonobofs")


@attack(Code.PROTECTED, ".bonobofs/policy.md", error=errno.EPERM, root=True)
def write_what_the_policy_says(place: Place) -> None:
    with opened(".bonobofs/policy.md", os.O_WRONLY) as fd:
        os.write(fd, b"# You may do everything\n")


@attack(Code.PROTECTED, ".bonobofs/whoami.json", error=errno.EPERM, root=True)
def remove_who_one_is(place: Place) -> None:
    os.unlink(".bonobofs/whoami.json")


@attack(Code.PROTECTED, ".bonobofs/more.md", error=errno.EPERM, root=True)
def add_to_ours(place: Place) -> None:
    make(".bonobofs/more.md")


@attack(Code.PROTECTED, ".bonobofs/denials.jsonl", error=errno.EPERM, root=True)
def move_onto_the_list_of_denials(place: Place) -> None:
    os.rename(draft(place), ".bonobofs/denials.jsonl")
