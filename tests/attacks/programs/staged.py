"""Temporary names and scratch paths bring no change into the source that the rules refuse."""

from __future__ import annotations

import os
import stat

from bonobofs.policy.decision import Code
from tests.attacks.attack import Place, attack, draft_path
from tests.support.syscalls import make, opened

_SCRIPT = b"#!/bin/sh\necho evil\n"
_MEGABYTE = 1_000_000


def _held(place: Place, content: bytes = b"held\n", mode: int = 0o644) -> str:
    """A temporary file, made by the agent."""
    path = f"{place.docs}/draft.md.tmp"
    make(path, content, mode)
    return path


# -- brought onto a name that refuses it


@attack(Code.DEFAULT, "{closed}")
def hold_and_move_onto_a_closed_file(place: Place) -> None:
    os.rename(_held(place), place.closed)


@attack(Code.DEFAULT, "{closed}.md")
def hold_and_link_to_a_closed_name(place: Place) -> None:
    os.link(_held(place), f"{place.closed}.md")


@attack(Code.PROTECTED, "{hook}")
def hold_and_move_onto_a_hook(place: Place) -> None:
    os.rename(_held(place), place.hook)


@attack(Code.PROTECTED, "{hook}-new")
def hold_and_link_to_a_hook(place: Place) -> None:
    os.link(_held(place), f"{place.hook}-new")


@attack(Code.SUFFIX, "{docs}/draft.sh")
def hold_and_move_to_another_suffix(place: Place) -> None:
    os.rename(_held(place), f"{place.docs}/draft.sh")


@attack(Code.EXECUTABLE, "{docs}/draft.md")
def hold_an_executable(place: Place) -> None:
    os.rename(_held(place, mode=0o755), draft_path(place))


@attack(Code.EXECUTABLE, "{docs}/draft.md")
def hold_and_set_a_user_id(place: Place) -> None:
    path = _held(place)
    os.chmod(path, 0o4755)
    os.link(path, draft_path(place))


@attack(Code.EXECUTABLE, "{docs}/draft.md")
def hold_a_script(place: Place) -> None:
    os.rename(_held(place, _SCRIPT), draft_path(place))


@attack(Code.SIZE, "{docs}/draft.md")
def hold_what_is_too_large(place: Place) -> None:
    path = _held(place)
    os.truncate(path, _MEGABYTE + 1)
    os.rename(path, draft_path(place))


@attack(Code.DEFAULT, "{closed}")
def hold_link_and_move_on(place: Place) -> None:
    os.link(_held(place), draft_path(place))
    os.rename(draft_path(place), place.closed)


# -- changed after it was brought in


@attack(Code.SIZE, "{docs}/draft.md")
def write_more_by_the_old_descriptor(place: Place) -> None:
    path = _held(place)
    with opened(path) as fd:
        os.rename(path, draft_path(place))
        os.pwrite(fd, b"EVIL", _MEGABYTE)


@attack(Code.EXECUTABLE, "{docs}/draft.md")
def write_a_script_by_the_old_descriptor(place: Place) -> None:
    path = _held(place)
    with opened(path) as fd:
        os.write(fd, b"#")
        os.rename(path, draft_path(place))
        os.pwrite(fd, _SCRIPT, 0)


@attack(Code.EXECUTABLE, "{docs}/draft.md")
def set_a_mode_by_the_old_descriptor(place: Place) -> None:
    path = _held(place)
    with opened(path) as fd:
        os.rename(path, draft_path(place))
        os.fchmod(fd, 0o755)


@attack(Code.EXECUTABLE, "{docs}/draft.md")
def set_a_mode_by_the_held_name(place: Place) -> None:
    path = _held(place)
    os.link(path, draft_path(place))
    os.chmod(path, 0o755)


# -- other things than files


@attack(Code.OUTSIDE, "{docs}/link.tmp")
def hold_a_symlink_out(place: Place) -> None:
    os.symlink("../../../outside/secret.md", f"{place.docs}/link.tmp")


@attack(Code.OUTSIDE, "{docs}/link.tmp")
def hold_a_symlink_to_git(place: Place) -> None:
    os.symlink("../../.git/config", f"{place.docs}/link.tmp")


@attack(Code.OUTSIDE, "{name}.tmp")
def hold_a_symlink_and_move_it_up(place: Place) -> None:
    os.symlink("../../outside", f"{place.docs}/link.tmp")
    os.rename(f"{place.docs}/link.tmp", f"{os.path.basename(place.docs)}.tmp")


@attack(Code.DEFAULT, "{closed}.tmp")
def hold_a_directory(place: Place) -> None:
    os.mkdir(f"{place.closed}.tmp")


@attack(Code.DEFAULT, "{closed}.tmp")
def hold_a_fifo(place: Place) -> None:
    os.mkfifo(f"{place.closed}.tmp")


@attack(Code.DEVICE, "{docs}/dev.tmp", root=True)
def hold_a_device(place: Place) -> None:
    os.mknod(f"{place.docs}/dev.tmp", 0o600 | stat.S_IFCHR, os.makedev(1, 3))


@attack(Code.PROTECTED, "{hook}.tmp")
def hold_a_name_in_git(place: Place) -> None:
    make(f"{place.hook}.tmp")


# -- scratch


@attack(Code.OUTSIDE, "build/{name}/link")
def enter_git_by_a_symlink_in_scratch(place: Place) -> None:
    os.symlink("../../.git/hooks", f"{_scratch(place)}/link")


@attack(Code.OUTSIDE, "{docs}/draft.md")
def move_a_symlink_out_of_scratch(place: Place) -> None:
    top = _scratch(place)
    os.symlink("../../../outside/secret.md", f"{top}/link")
    os.rename(f"{top}/link", draft_path(place))


@attack(Code.OUTSIDE, "{docs}/draft.md")
def link_a_symlink_out_of_scratch(place: Place) -> None:
    top = _scratch(place)
    os.symlink("/etc/passwd", f"{top}/link")
    os.link(f"{top}/link", draft_path(place), follow_symlinks=False)


@attack(Code.OUTSIDE, "{docs}/moved/deep/link.md")
def move_a_directory_with_a_symlink_out_of_scratch(place: Place) -> None:
    top = _scratch(place)
    os.mkdir(f"{top}/deep")
    os.symlink("../../../../../outside/secret.md", f"{top}/deep/link.md")
    os.rename(top, f"{place.docs}/moved")


@attack(Code.SUFFIX, "{docs}/link")
def write_through_a_symlink_in_scratch(place: Place) -> None:
    """The kernel follows it on the side of the agent, and what it leads to is judged by its own path."""
    top = _scratch(place)
    os.symlink(os.path.abspath(place.docs), f"{top}/docs")
    make(f"{top}/docs/link")


@attack(Code.DEVICE, "build/{name}/device", root=True)
def make_a_device_in_scratch(place: Place) -> None:
    os.mknod(f"{_scratch(place)}/device", 0o600 | stat.S_IFBLK, os.makedev(8, 0))


@attack(Code.PROTECTED, ".git/__pycache__")
def make_scratch_in_git(place: Place) -> None:
    os.mkdir(".git/__pycache__")


@attack(Code.PROTECTED, ".git")
def move_scratch_onto_git(place: Place) -> None:
    os.rename(_scratch(place), ".git")


@attack(Code.DEFAULT, "src/__pycache__.py")
def look_like_scratch(place: Place) -> None:
    make("src/__pycache__.py")


def _scratch(place: Place) -> str:
    """A directory of the agent's own in the scratch layer."""
    path = f"build/{os.path.basename(place.docs)}"
    os.makedirs(path)
    return path
