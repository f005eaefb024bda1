"""Editors, as scripts and at a terminal."""

from __future__ import annotations

import os

from tests.support.wait import until
from tests.workflows.workshop import DEFAULT, Place, workflow

VIM = ("vim", "-N", "-u", "NONE", "-i", "NONE", "--cmd", "set directory=.")
EMACS = ("emacs", "-Q", "--eval", "(setq native-comp-deferred-compilation nil)")


@workflow()
def test_vim_saves_a_file(at: Place) -> None:
    """vim replaces words and saves, with its default settings."""
    at.run(*VIM, "-es", "-c", "%s/two/TWO/", "-c", "wq", "aidlc-docs/plan.md")
    assert at.text("aidlc-docs/plan.md") == "one\nTWO\nthree\n"


@workflow(policy=DEFAULT, refused=["aidlc-docs/4913", "aidlc-docs/plan.md~"])
def test_vim_under_the_default_policy(at: Place) -> None:
    """vim may create neither its test file nor a backup, and writes into the file itself."""
    at.run(*VIM, "-es", "-c", "%s/two/TWO/", "-c", "wq", "aidlc-docs/plan.md")
    assert at.text("aidlc-docs/plan.md") == "one\nTWO\nthree\n"


@workflow()
def test_vim_keeps_a_backup(at: Place) -> None:
    """vim with `backup` leaves the old text in a second file."""
    at.run(*VIM, "-es", "-c", "set backup", "-c", "%s/two/TWO/", "-c", "wq", "aidlc-docs/plan.md")
    assert at.text("aidlc-docs/plan.md~") == "one\ntwo\nthree\n"


@workflow()
def test_vim_at_a_terminal(at: Place) -> None:
    """vim at a terminal keeps a swap file while a file is changed, saves twice and exits."""
    vim = at.terminal(*VIM, "aidlc-docs/plan.md")
    vim.wait("three")
    vim.type("ggcwONE\x1b:w\r")
    vim.wait("written")
    assert (at / "aidlc-docs/.plan.md.swp").exists()
    vim.type("Gofour\x1b:wq\r")
    assert vim.end() == 0
    assert at.text("aidlc-docs/plan.md") == "ONE\ntwo\nthree\nfour\n"


@workflow()
def test_vim_recovers(at: Place) -> None:
    """A new vim recovers the unsaved text of a killed one from its swap file."""
    vim = at.terminal(*VIM, "-c", "set updatecount=1", "aidlc-docs/plan.md")
    vim.wait("three")
    vim.type("ggcwLOST\x1b:preserve\r")
    vim.wait("preserved")
    vim.kill()
    assert at.text("aidlc-docs/plan.md") == "one\ntwo\nthree\n"
    at.run(*VIM, "-es", "-r", "aidlc-docs/plan.md", "-c", "wq!")
    at.run("rm", "aidlc-docs/.plan.md.swp")
    assert at.text("aidlc-docs/plan.md") == "LOST\ntwo\nthree\n"


@workflow()
def test_nano_at_a_terminal(at: Place) -> None:
    """nano locks, changes and saves a file."""
    nano = at.terminal("nano", "--ignorercfiles", "--locking", "aidlc-docs/plan.md")
    nano.wait("three")
    nano.type("zero\r")
    nano.wait("zero")
    assert (at / "aidlc-docs/.plan.md.swp").exists()
    nano.type("\x0f")
    nano.wait("File Name to Write")
    nano.type("\r")
    nano.wait("Wrote")
    nano.type("\x18")
    assert nano.end() == 0
    assert at.text("aidlc-docs/plan.md") == "zero\none\ntwo\nthree\n"


@workflow()
def test_nano_keeps_a_backup(at: Place) -> None:
    """nano with --backup leaves the old text, with its mode and times."""
    nano = at.terminal("nano", "--ignorercfiles", "--backup", "aidlc-docs/design.md")
    nano.wait("Design")
    nano.type("new\x0f")
    nano.wait("File Name to Write")
    nano.type("\r")
    nano.wait("Wrote")
    nano.type("\x18")
    assert nano.end() == 0
    assert at.text("aidlc-docs/design.md").startswith("new# Design")


@workflow()
def test_emacs_at_a_terminal(at: Place) -> None:
    """emacs -nw locks a file while it is changed, saves it, and leaves the old text in a backup."""
    emacs = at.terminal(*EMACS, "-nw", "aidlc-docs/plan.md")
    emacs.wait("three")
    emacs.type("zero ")
    until(lambda: os.path.lexists(at / "aidlc-docs/.#plan.md"), "emacs locks the file")
    emacs.type("\x18\x13")
    emacs.wait("Wrote")
    emacs.type("\x18\x03")
    assert emacs.end() == 0
    assert not os.path.lexists(at / "aidlc-docs/.#plan.md")
    assert at.text("aidlc-docs/plan.md") == "zero one\ntwo\nthree\n"
    assert at.text("aidlc-docs/plan.md~") == "one\ntwo\nthree\n"


@workflow()
def test_a_second_emacs_sees_the_lock(at: Place) -> str:
    """A file with unsaved changes in one emacs is locked for another."""
    emacs = at.terminal(*EMACS, "-nw", "aidlc-docs/plan.md")
    emacs.wait("three")
    emacs.type("zero ")
    until(lambda: os.path.lexists(at / "aidlc-docs/.#plan.md"), "emacs locks the file")
    locked = '(princ (if (stringp (file-locked-p "aidlc-docs/plan.md")) "another" "nobody"))'
    holder = at.run(*EMACS, "--batch", "--eval", locked)
    emacs.type("\x18\x13")
    emacs.wait("Wrote")
    emacs.type("\x18\x03")
    assert emacs.end() == 0
    assert holder == "another"
    return at.run(*EMACS, "--batch", "--eval", locked)


@workflow()
def test_emacs_auto_saves(at: Place) -> str:
    """emacs keeps unsaved text in an auto-save file, which it removes after saving."""
    steps = """(progn
        (auto-save-mode 1)
        (insert "zero ")
        (do-auto-save)
        (princ (with-temp-buffer (insert-file-contents "#plan.md#") (buffer-string)))
        (save-buffer)
        (princ (file-exists-p "#plan.md#")))"""
    said = at.run(*EMACS, "--batch", "aidlc-docs/plan.md", "--eval", steps)
    assert said == "zero one\ntwo\nthree\nnil"
    return said
