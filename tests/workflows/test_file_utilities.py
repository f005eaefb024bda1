"""Tools that change a file in place, and tools that copy, move, link and pack."""

from __future__ import annotations

import os

from tests.workflows.workshop import Place, workflow

DIFF = "--- a/plan.md\n+++ b/plan.md\n@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n"


@workflow()
def test_sed_edits_in_place(at: Place) -> None:
    """`sed -i` edits several files in place and keeps their modes."""
    at.run("sed", "-i", "s/e/E/", "aidlc-docs/plan.md", "aidlc-docs/design.md", "orchestrator/sum.py")
    assert at.text("aidlc-docs/plan.md") == "onE\ntwo\nthrEe\n"
    assert os.stat(at / "aidlc-docs/design.md").st_mode & 0o777 == 0o640


@workflow()
def test_sed_breaks_a_hard_link(at: Place) -> None:
    """`sed -i` on one of two names of a file leaves the other unchanged."""
    at.run("sed", "-i", "s/first/FIRST/", "aidlc-docs/units/unit-1/same.md")
    assert at.text("aidlc-docs/units/unit-1/notes.md") == "first\n"


@workflow()
def test_perl_edits_in_place(at: Place) -> None:
    """`perl -i` edits in place, and `perl -i.orig` keeps the old file under another name."""
    at.run("perl", "-pi", "-e", "s/one/ONE/", "aidlc-docs/plan.md")
    at.run("perl", "-pi.orig", "-e", "s/Plan/PLAN/", "templates/plan.md")
    assert at.text("aidlc-docs/plan.md") == "ONE\ntwo\nthree\n"
    assert at.text("templates/plan.md.orig") == "# Plan\n"


@workflow()
def test_patch_applies_a_difference(at: Place) -> None:
    """`patch` keeps the old file if the difference applies with an offset."""
    at.run("patch", "-p1", text=DIFF, cwd="aidlc-docs")
    at.write("templates/plan.md", "zero\none\ntwo\nthree\n")
    at.run("patch", "-p1", text=DIFF, cwd="templates")
    assert at.text("aidlc-docs/plan.md") == "one\nTWO\nthree\n"
    assert at.names("templates") == ["plan.md", "plan.md.orig"]


@workflow()
def test_git_apply_changes_files(at: Place) -> None:
    """`git apply` applies a difference, outside any repository."""
    at.run("git", "apply", "-p1", text=DIFF, cwd="aidlc-docs")
    assert at.text("aidlc-docs/plan.md") == "one\nTWO\nthree\n"


@workflow()
def test_tar_packs_and_unpacks(at: Place) -> str:
    """`tar` packs a directory, and unpacks it elsewhere and over itself with modes, links and times."""
    archive = at.home / "docs.tar"
    at.run("tar", "--sort=name", "-cf", archive, "aidlc-docs")
    at.run("tar", "-xf", archive, "--strip-components=1", cwd="templates")
    at.run("tar", "-xf", archive)
    return at.run("tar", "--full-time", "-tvf", archive)


@workflow()
def test_rsync_synchronizes_directories(at: Place) -> str:
    """`rsync -a --delete` updates a directory from another, and has no work in a second run."""
    source = at.home / "docs"
    at.run("cp", "-a", "aidlc-docs", source)
    (source / "plan.md").write_text("another plan\n")
    (source / "latest.md").unlink()
    (source / "units" / "new.md").write_text("new\n")
    at.run("rsync", "-aH", "--delete", f"{source}/", "aidlc-docs/")
    assert at.text("aidlc-docs/plan.md") == "another plan\n"
    assert not os.path.lexists(at / "aidlc-docs/latest.md")
    return at.run("rsync", "-aHi", "--delete", f"{source}/", "aidlc-docs/")


@workflow()
def test_cp_copies_a_tree(at: Place) -> None:
    """`cp -a` copies a tree with modes, links and times."""
    at.run("cp", "-a", "aidlc-docs", "templates/copy")
    at.run("cp", "--reflink=auto", "aidlc-docs/plan.md", "aidlc-docs/design.md")
    assert at.text("templates/copy/latest.md") == "second\n"


@workflow()
def test_mv_moves_files_and_directories(at: Place) -> None:
    """To other directories, over files, out of the tree and back."""
    at.run("mv", "aidlc-docs/plan.md", "templates/")
    at.run("mv", "aidlc-docs/units", "templates/units")
    at.run("mv", "templates/units/unit-1", "aidlc-docs/unit-1")
    at.run("mv", "aidlc-docs/design.md", at.home / "design.md")
    at.run("mv", at.home / "design.md", "templates/design.md")
    assert at.names("templates") == ["design.md", "plan.md", "units"]


@workflow()
def test_touch_creates_files_and_sets_times(at: Place) -> None:
    """From a date and from another file."""
    at.run("touch", "aidlc-docs/new.md")
    at.run("touch", "-d", "2001-02-03 04:05:06.789", "aidlc-docs/plan.md")
    at.run("touch", "-r", "aidlc-docs/plan.md", "aidlc-docs/units", "aidlc-docs/new.md")
    at.run("touch", "-h", "-d", "2001-01-01", "aidlc-docs/latest.md")
    assert os.stat(at / "aidlc-docs/new.md").st_mtime_ns == 981_173_106_789_000_000


@workflow()
def test_ln_makes_links(at: Place) -> None:
    """`ln` gives a file a second name, makes a symlink, and replaces one."""
    at.run("ln", "aidlc-docs/plan.md", "templates/second.md")
    at.run("ln", "-s", "plan.md", "aidlc-docs/current.md")
    at.run("ln", "-sf", "design.md", "aidlc-docs/current.md")
    at.write("templates/second.md", "both\n")
    assert at.text("aidlc-docs/plan.md") == "both\n"
    assert os.readlink(at / "aidlc-docs/current.md") == "design.md"


@workflow()
def test_rm_and_find_remove_files(at: Place) -> str:
    """`find -delete`, `rm -r` and `rmdir`."""
    at.run("find", "aidlc-docs", "-name", "notes.md", "-delete")
    at.run("rm", "-r", "aidlc-docs/units/unit-1")
    at.run("rmdir", "aidlc-docs/units/unit-2")
    return at.run("find", ".", "-name", ".", "-o", "-printf", "%P %y %m %n %l\n")


@workflow()
def test_a_shell_redirects_and_reads(at: Place) -> str:
    """A shell redirects, appends, truncates and reads back, with dd, install, tee, sort and truncate."""
    script = """set -eu
        echo first > new.md; echo second >> new.md; tee -a new.md <<< third > /dev/null
        sort -o new.md -r new.md; cat new.md
        dd if=/dev/zero of=sparse.md bs=1 count=1 seek=9999 status=none; truncate -s 5000 sparse.md
        install -m 0600 new.md installed.md; : > plan.md; umask 077; echo private > private.md
        exec 3<> design.md; read -r line <&3; echo "$line"; echo over >&3"""
    return at.run("bash", "-c", script, cwd="aidlc-docs")
