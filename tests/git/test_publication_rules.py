"""Each rule of publication, on real repositories and through the Enforcer of a session."""

from __future__ import annotations

import pytest

from bonobofs.audit.reader import read
from bonobofs.git.branch_rules import COMMIT_MESSAGE_PATTERN, BranchRules, judge_message, read_commit
from bonobofs.git.publication import RefUpdate
from tests.git.conftest import FREE, GUARDED, Direct, DirectMaker

OTHER = {"GIT_AUTHOR_NAME": "Olga", "GIT_AUTHOR_EMAIL": "olga@example.org"}


# -- which branch


def test_the_kind_of_each_update_is_derived_and_recorded(direct: DirectMaker) -> None:
    one = direct()
    first = one.repo.commit("[gt-1] One", {"one.md": "1"})
    assert [(each.kind, each.commits) for each in one.publish()] == [("create", (first,))]
    one.repo.commit("[gt-1] Two", {"two.md": "2"})
    assert one.publish()[0].kind == "fast-forward"
    one.repo.git("switch", "-q", "--detach", first)
    one.repo.git("switch", "-qc", "side")
    one.repo.commit("[gt-1] Side", {"side.md": "s"})
    one.repo.git("switch", "-q", "aidlc/x")
    one.repo.git("merge", "-q", "-m", "Merge side", "side")
    assert one.publish()[0].kind == "merge"
    one.repo.git("reset", "-q", "--hard", first)
    one.repo.commit("[gt-1] Instead", {"two.md": "3"})
    assert one.publish()[0].kind == "force"
    assert one.publish("aidlc/x", new="")[0].kind == "delete"
    assert one.source.id("aidlc/x") == ""
    intents = [entry for entry in read(one.trail) if entry.kind == "intent" and entry.operation == "publish"]
    assert [entry.details["updates"][0]["kind"] for entry in intents] == [
        "create",
        "fast-forward",
        "merge",
        "force",
        "delete",
    ]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("main", "git.protected"),
        ("develop", "git.protected"),
        ("feature", "git.prefix"),
        ("aidlc/Upper", "git.name"),
        ("aidlc/a.b", "git.name"),
        ("aidlc/ä", "git.name"),
        ("refs/notes/commits", "git.ref"),
        ("refs/replace/" + "a" * 40, "git.ref"),
        ("refs/remotes/origin/main", "git.ref"),
        ("HEAD", "git.name"),
    ],
)
def test_refs_outside_the_agents_branches_are_refused(direct: DirectMaker, name: str, rule: str) -> None:
    one = direct()
    made = one.repo.commit("[gt-1] One", {"one.md": "1"})
    assert one.rule(name, new=made) == rule


def test_a_name_that_a_tag_or_a_remote_branch_has_is_refused(direct: DirectMaker) -> None:
    one = direct(GUARDED + '[git]\nbranch_prefix = ""\n')
    one.source.git("tag", "v1")
    one.source.git("update-ref", "refs/remotes/origin/topic", "HEAD")
    made = one.repo.commit("[gt-1] One", {"one.md": "1"})
    paths = ("heads/main", "refs/heads/main", "tags/v1")
    for name in ("v1", "origin/topic", "origin", "a" * 40, made[:7], "c0ffee1", *paths):
        assert one.rule(f"refs/heads/{name}", new=made) == "git.ambiguous"
    for name in ("origin", made[:7], made[:7].upper()):
        assert one.rule(f"refs/tags/{name}", new=made) == "git.ambiguous"


def test_a_name_that_excludes_a_protected_branch_is_refused(direct: DirectMaker) -> None:
    """Git cannot have both `develop` and `develop/x`. The protected branch need not exist yet."""
    one = direct(GUARDED + '[git]\nbranch_prefix = ""\nprotected_branches = ["main", "develop", "release/*"]\n')
    made = one.repo.commit("[gt-1] One", {"one.md": "1"})
    for name in ("develop/x", "main/x/y", "release", "release/1/x"):
        assert one.rule(f"refs/heads/{name}", new=made) == "git.protected"
    for name in ("developer", "releases/x", "x/develop"):
        one.publish(name, new=made)


def test_a_branch_of_the_operator_may_have_a_name_that_agents_cannot_add(direct: DirectMaker) -> None:
    one = direct(GUARDED + '[git]\nbranch_prefix = ""\n')
    one.source.git("update-ref", "refs/remotes/origin/topic", "HEAD")
    made = one.repo.commit("[gt-1] One", {"one.md": "1"})
    for name in ("origin", "1234", "develop/x"):
        one.source.git("branch", name)
        assert one.publish(name, new=made)[0].kind == "fast-forward"


def test_a_tag_must_be_new_and_made_by_the_agent(direct: DirectMaker) -> None:
    one = direct(GUARDED + '[git]\nbranch_prefix = ""\n')
    made = one.repo.commit("[gt-1] One", {"one.md": "1"})
    one.repo.git("tag", "-m", "Version 1", "v1")
    one.repo.git("tag", "-m", "Another's", "v2", GIT_COMMITTER_NAME="Olga")
    one.repo.git("tag", "blob", f"{made}:one.md")
    assert one.publish("refs/tags/v1")[0].kind == "tag"
    assert one.publish("refs/tags/20261121", new=made)[0].kind == "tag"
    assert one.source.id("v1^{commit}") == made
    assert one.rule("refs/tags/v2") == "git.tagger"
    assert one.rule("refs/tags/blob") == "git.tagger"
    assert one.rule("refs/tags/v1", new=made) == "git.tag"
    assert one.rule("refs/tags/v1", new="") == "git.tag"
    for name in ("main", "HEAD", "ORIG_HEAD", "heads/main"):
        assert one.rule(f"refs/tags/{name}", new=made) == "git.ambiguous"


def test_a_symbolic_branch_of_the_source_is_not_followed(direct: DirectMaker) -> None:
    one = direct()
    one.source.git("symbolic-ref", "refs/heads/aidlc/x", "refs/heads/main")
    one.repo.commit("[gt-1] One", {"one.md": "1"})
    assert one.rule() == "git.symbolic"
    one.source.git("symbolic-ref", "-d", "refs/heads/aidlc/x")


def test_only_the_publisher_of_a_branch_may_move_force_or_delete_it(direct: DirectMaker) -> None:
    alice = direct()
    alice.repo.commit("[gt-1] One", {"one.md": "1"})
    alice.publish()
    bob = direct(agent="bob", source=alice.source)
    bob.repo.git("reset", "-q", "--hard", "origin/aidlc/x")
    bob.repo.commit("[gt-1] Two", {"two.md": "2"})
    assert bob.rule() == "git.publisher"
    assert bob.rule(new="") == "git.publisher"
    # The operator has committed on top: the agent may go on from there, and not drop it.
    alice.source.git("switch", "-q", "aidlc/x")
    operators = alice.source.commit("[gt-1] The operator's", {"op.md": "o"})
    alice.source.git("switch", "-q", "main")
    alice.repo.commit("[gt-1] Forced", {"f.md": "f"})
    assert alice.rule() == "git.force"
    assert alice.rule(new="") == "git.force"
    alice.repo.git("fetch", "-q", "origin", "aidlc/x")
    alice.repo.git("rebase", "-q", "FETCH_HEAD")
    assert alice.publish()[0].kind == "fast-forward"
    assert alice.source.git("merge-base", "aidlc/x", operators).strip() == operators


def test_a_branch_that_the_operator_deleted_has_no_publisher(direct: DirectMaker) -> None:
    alice = direct()
    alice.repo.commit("[gt-1] One", {"one.md": "1"})
    alice.publish()
    alice.source.git("branch", "-D", "aidlc/x")
    bob = direct(agent="bob", source=alice.source)
    bob.repo.commit("[gt-1] Two", {"two.md": "2"})
    assert bob.publish()[0].kind == "create"
    assert alice.rule() == "git.publisher"


def test_a_branch_of_the_operator_is_neither_forced_nor_deleted(direct: DirectMaker) -> None:
    one = direct()
    one.source.git("branch", "aidlc/op")
    one.source.commit("[gt-0] More", {"m.md": "m"})
    one.source.git("branch", "-f", "aidlc/op", "main")
    one.repo.commit("[gt-1] Other", {"o.md": "o"})
    one.repo.git("branch", "aidlc/op")
    assert one.rule("aidlc/op") == "git.force"
    assert one.rule("aidlc/op", new="") == "git.force"


def test_an_update_from_an_outdated_value_is_refused(direct: DirectMaker) -> None:
    one = direct()
    first = one.repo.commit("[gt-1] One", {"one.md": "1"})
    one.publish()
    second = one.repo.commit("[gt-1] Two", {"two.md": "2"})
    one.publish()
    third = one.repo.commit("[gt-1] Three", {"three.md": "3"})
    with pytest.raises(PermissionError, match="moved since"):
        one.update([RefUpdate("refs/heads/aidlc/x", first, third)])
    assert one.source.id("aidlc/x") == second


def test_a_branch_checked_out_in_another_work_tree_is_not_changed(direct: DirectMaker, tmp_path: object) -> None:
    one = direct()
    one.repo.commit("[gt-1] One", {"one.md": "1"})
    one.publish()
    one.source.git("worktree", "add", "-q", f"{tmp_path}/tree", "aidlc/x")
    one.repo.commit("[gt-1] Two", {"two.md": "2"})
    assert one.rule() == "git.checked-out"


def test_several_updates_are_published_together_or_not_at_all(direct: DirectMaker) -> None:
    one = direct()
    made = one.repo.commit("[gt-1] One", {"one.md": "1"})
    with pytest.raises(PermissionError):
        one.update([RefUpdate("refs/heads/aidlc/y", "", made), RefUpdate("refs/heads/main", one.source.id(), made)])
    assert set(one.source.refs()) == {"refs/heads/main"}
    one.update([RefUpdate("refs/heads/aidlc/y", "", made), RefUpdate("refs/heads/aidlc/z", "", made)])
    assert one.source.id("aidlc/y") == one.source.id("aidlc/z") == made


def test_the_role_needs_the_word_of_the_update_kind(direct: DirectMaker) -> None:
    policy = FREE + '[role.agent]\nwrite = ["**"]\ngit = ["commit"]\n'
    one = direct(policy)
    made = one.repo.commit("[gt-1] One", {"one.md": "1"})
    assert one.refused().code == "ROLE"
    one.source.git("branch", "aidlc/x")
    assert one.publish()[0].kind == "fast-forward"
    one.repo.git("tag", "v1")
    assert one.refused("refs/tags/v1").code == "ROLE"
    one.repo.git("reset", "-q", "--hard", "HEAD^")
    assert one.refused().code == "ROLE"  # a force that only drops commits is a reset
    assert one.source.id("aidlc/x") == made


# -- which commits


def test_every_commit_is_judged(direct: DirectMaker) -> None:
    one = direct()
    one.repo.commit("[gt-1] In", {"ci/run.md": "x"})
    one.repo.commit("[gt-1] Out", {"ci/run.md": None})
    assert (one.refused().code, one.refused().path) == ("ROLE", "ci/run.md")


def test_a_path_with_the_content_of_a_protected_branch_is_allowed(direct: DirectMaker) -> None:
    one = direct()
    one.repo.commit("[gt-1] One", {"one.md": "1"})
    one.publish()
    one.source.commit("[gt-0] New version", {"Cargo.toml": "version = 2\n", "ci/new.md": "ci\n"})
    one.repo.git("fetch", "-q")
    one.repo.git("merge", "-q", "-m", "Merge main", "origin/main")
    assert one.publish()[0].kind == "merge"
    one.source.commit("[gt-0] Newer version", {"Cargo.toml": "version = 3\n", "ci/new.md": None})
    one.repo.git("fetch", "-q")
    one.repo.git("rebase", "-q", "origin/main")
    assert one.publish()[0].kind == "force"
    assert one.source.id("aidlc/x:Cargo.toml") == one.source.id("main:Cargo.toml")


def test_a_merge_of_a_main_that_has_moved_on_is_published(direct: DirectMaker) -> None:
    one = direct()
    one.repo.commit("[gt-1] One", {"one.md": "1"})
    one.source.commit("[gt-0] 2", {"Cargo.toml": "version = 2\n"})
    one.repo.git("fetch", "-q")
    one.repo.git("merge", "-q", "-m", "Merge main", "origin/main")
    one.source.commit("[gt-0] 3", {"Cargo.toml": "version = 3\n"})
    assert one.publish()[0].kind == "create"


def test_a_fake_merge_that_reverts_files_is_refused(direct: DirectMaker) -> None:
    one = direct()
    base = one.source.id()
    one.source.commit("[gt-0] New version", {"Cargo.toml": "version = 2\n"})
    one.repo.git("fetch", "-q")
    for parents in ((base, "origin/main"), ("origin/main", base)):
        arguments = [word for parent in parents for word in ("-p", parent)]
        fake = one.repo.git("commit-tree", f"{base}^{{tree}}", *arguments, "-m", "Merge main").strip()
        assert one.refused(new=fake).path == "Cargo.toml"
    one.repo.commit("[gt-1] One", {"one.md": "1"})
    one.publish()
    ours = one.repo.git("commit-tree", "HEAD^{tree}", "-p", "HEAD", "-p", "origin/main", "-m", "Merge main").strip()
    assert one.refused(new=ours).path == "Cargo.toml"


def test_a_fake_merge_of_the_parents_of_a_merge_is_refused(direct: DirectMaker) -> None:
    """Both parents are merge bases with main, and git's merge takes what one of them has changed."""
    one = direct()
    one.source.git("switch", "-qc", "feature")
    one.source.commit("[gt-0] New version", {"Cargo.toml": "version = 2\n"})
    one.source.git("switch", "-q", "main")
    one.source.commit("[gt-0] More", {"more.md": "m"})
    one.source.git("merge", "-q", "--no-ff", "-m", "Merge feature", "feature")
    one.source.git("branch", "-qD", "feature")
    one.repo.git("fetch", "-q")
    old, new = one.repo.id("origin/main^1"), one.repo.id("origin/main^2")
    for parents in ((old, new), (new, old)):
        arguments = [word for parent in parents for word in ("-p", parent)]
        fake = one.repo.git("commit-tree", f"{old}^{{tree}}", *arguments, "-m", "Merge feature").strip()
        assert one.refused(new=fake).path == "Cargo.toml"
    merge = one.repo.git("commit-tree", "origin/main^{tree}", "-p", old, "-p", new, "-m", "Merge feature").strip()
    assert one.publish(new=merge)[0].kind == "create"
    # The same on a branch that is published already.
    fake = one.repo.git("commit-tree", f"{old}^{{tree}}", "-p", merge, "-m", "[gt-1] Back").strip()
    assert one.refused(new=fake).path == "Cargo.toml"


def test_an_old_published_version_of_a_file_is_judged(direct: DirectMaker) -> None:
    one = direct()
    one.source.commit("[gt-0] New version", {"Cargo.toml": "version = 2\n"})
    one.repo.git("fetch", "-q")
    one.repo.git("reset", "-q", "--hard", "origin/main")
    one.repo.commit("[gt-1] Back", {"Cargo.toml": "version = 1\n"})
    assert one.refused().path == "Cargo.toml"


def test_a_deletion_is_allowed_if_the_protected_branch_deleted(direct: DirectMaker) -> None:
    one = direct()
    one.repo.commit("[gt-1] One", {"one.md": "1"})
    one.publish()
    one.source.commit("[gt-0] Without", {"Cargo.toml": None})
    one.repo.git("fetch", "-q")
    one.repo.git("merge", "-q", "-m", "Merge main", "origin/main")
    one.publish()
    one.source.git("switch", "-q", "aidlc/x")
    one.source.commit("[gt-0] The operator's", {"ci/prepared.md": "p"})
    one.source.git("switch", "-q", "main")
    one.repo.git("fetch", "-q", "origin", "aidlc/x")
    one.repo.git("reset", "-q", "--hard", "FETCH_HEAD")
    one.repo.commit("[gt-1] Away with it", {"ci/prepared.md": None})
    assert one.refused().path == "ci/prepared.md"


def test_kinds_of_content_are_judged_as_in_the_mount(direct: DirectMaker) -> None:
    policy = (
        '[[rule]]\nname = "text"\npaths = ["**"]\nsuffixes = [".md"]\nmax_size = "10B"\nexecutable = false\n'
        '[role.agent]\nwrite = ["**"]\ngit = ["commit", "branch"]\n'
    )
    one = direct(policy)
    start = one.repo.id()
    for files, code in (
        ({"x.exe": "x"}, "SUFFIX"),
        ({"x.md": "#!/bin/sh\n"}, "EXECUTABLE"),
        ({"x.md": "more than ten bytes"}, "SIZE"),
        ({".hidden/x.md": "x"}, "HIDDEN"),
    ):
        one.repo.commit("[gt-1] Change", dict(files))
        assert one.refused().code == code
        one.repo.git("reset", "-q", "--hard", start)
    (one.repo.root / "link.md").symlink_to("/etc/passwd")
    one.repo.commit("[gt-1] Link")
    assert one.refused().code == "OUTSIDE"
    one.repo.git("reset", "-q", "--hard", start)
    one.repo.write("x.md", "x", 0o755)
    one.repo.commit("[gt-1] Executable")
    assert one.refused().code == "EXECUTABLE"


def test_submodule_changes_are_judged(direct: DirectMaker) -> None:
    one = direct(FREE)
    start = one.repo.id()
    one.repo.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},lib")
    one.repo.git("commit", "-qm", "[gt-1] A submodule")
    assert one.rule() == "git.submodule"
    for text in (
        '[submodule "l"]\n\tpath = ../l\n\turl = https://example.org/l\n',
        '[submodule "l"]\n\tpath = l\n\turl = ../../elsewhere\n',
        '[submodule "l"] path = l\n\turl = "/etc"\n',
        '[submodule "l"]\n\tpath = l\n\turl = ext::sh -c x\n',
        '[submodule "l"]\n\tpath = .GIT/hooks\n\turl = https://example.org/l\n',
    ):
        one.repo.git("reset", "-q", "--hard", start)
        one.repo.commit("[gt-1] Modules", {".gitmodules": text})
        assert one.rule() == "git.submodule", text
    one.repo.git("reset", "-q", "--hard", start)
    one.repo.commit("[gt-1] Modules", {".gitmodules": '[submodule "l"]\n\tpath = l\n\turl = https://example.org/l\n'})
    one.publish()


# -- who and what


@pytest.mark.parametrize(
    ("env", "rule"),
    [
        ({"GIT_COMMITTER_NAME": "Olga"}, "git.committer"),
        ({"GIT_COMMITTER_EMAIL": "olga@example.org"}, "git.committer"),
        (OTHER, "git.author"),
        ({"GIT_AUTHOR_EMAIL": "alice@example.org"}, "git.author"),
        ({"GIT_COMMITTER_DATE": "4000000000 +0000"}, "git.date"),
        ({"GIT_AUTHOR_DATE": "4000000000 +0000"}, "git.date"),
        ({"GIT_COMMITTER_DATE": "1000000000 +0000"}, "git.date"),
    ],
)
def test_foreign_names_and_forged_dates_are_refused(direct: DirectMaker, env: dict[str, str], rule: str) -> None:
    one = direct()
    one.repo.commit("[gt-1] One", {"one.md": "1"}, **env)
    assert one.rule() == rule


def _picked(one: Direct) -> None:
    """A commit of Olga's on main, cherry-picked onto the agent's branch."""
    one.repo.commit("[gt-1] One", {"one.md": "1"})
    one.source.commit("Hers\n\nReviewed-by: Rita <rita@example.org>", {"hers.md": "1\n  2\n3\n"})
    one.repo.git("fetch", "-q")
    one.repo.git("cherry-pick", "-x", "origin/main")


def test_a_foreign_author_and_trailer_pass_with_the_change_of_a_published_commit(direct: DirectMaker) -> None:
    one = direct()
    _picked(one)
    one.publish()


@pytest.mark.parametrize(
    ("arguments", "files", "rule"),
    [
        (["-m", "[gt-1] Mine now"], {}, "git.author"),
        (["-m", "Hers\n\nReviewed-by: Rita <rita@example.org>"], {"hers.md": "1\n 2\n3\n"}, "git.author"),
        (
            ["-m", "Hers\n\nReviewed-by: Rita <rita@example.org>\nAcked-by: Ada <ada@example.org>"],
            {},
            "git.trailer",
        ),
        (["--no-edit", "--date=1234567890 +0000"], {}, "git.author"),
    ],
)
def test_a_changed_copy_of_a_foreign_commit_is_refused(
    direct: DirectMaker, arguments: list[str], files: dict[str, str], rule: str
) -> None:
    one = direct()
    _picked(one)
    for path, content in files.items():
        one.repo.write(path, content)
    one.repo.git("commit", "-qa", "--amend", *arguments)
    assert one.rule() == rule


def test_trailers_with_other_people_are_refused(direct: DirectMaker) -> None:
    one = direct()
    own = one.repo.env["GIT_AUTHOR_NAME"], one.repo.env["GIT_AUTHOR_EMAIL"]
    one.repo.commit(f"[gt-1] One\n\nSigned-off-by: {own[0]} <{own[1]}>", {"one.md": "1"})
    one.publish()
    for trailer in (
        "Signed-off-by: Olga <olga@example.org>",
        "co-authored-BY : Olga <olga@example.org>",
        " Acked-by: O",
    ):
        one.repo.commit(f"[gt-1] Two\n\n{trailer}", {"two.md": trailer})
        assert one.rule() == "git.trailer"
        one.repo.git("reset", "-q", "--hard", "HEAD^")


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("unicode_escape", b"[gt-1] Two\\\n\\\nSigned-off-by: Olga <olga@example.org>\\\n"),
        ("utf-7", b"[gt-1] Two\n\nSigned+AC0-off+AC0-by: Olga <olga@example.org>\n"),
        ("hz", b"[gt-1] Two ~\nSigned-off-by: Olga <olga@example.org>\n"),
        ("iso-2022-jp", b"[gt-1] Two\n"),
        ("cp037", "[gt-1] Two\n".encode("cp037")),
        ("idna", b"[gt-1] Two\n"),
    ],
)
def test_an_encoding_that_could_hide_a_trailer_is_refused(direct: DirectMaker, encoding: str, message: bytes) -> None:
    one = direct()
    one.repo.commit("[gt-1] One", {"one.md": "1"})
    header, _, _ = one.repo.git("cat-file", "commit", "HEAD").encode().partition(b"\n\n")
    made = one.repo.object("commit", header + b"\nencoding " + encoding.encode() + b"\n\n" + message)
    assert one.rule(new=made) == "git.object"


def test_encodings_that_keep_ascii_are_read(direct: DirectMaker) -> None:
    """A trailer is found after any byte, also after half a character."""
    one = direct()
    one.repo.git("commit", "-q", "--allow-empty", "-m", "[gt-1] One")
    header, _, _ = one.repo.git("cat-file", "commit", "HEAD").encode().partition(b"\n\n")
    names = ("UTF-8", "us-ascii", "ascii", "ISO-8859-1", "latin1", "latin-1", "windows-1252", "CP1251", "koi8-r")
    for encoding in (*names, "cp866", "euc-jp", "euc-kr", "Shift_JIS", "cp932", "gbk", "gb18030", "big5"):
        kept = header + b"\nencoding " + encoding.encode() + b"\n\n[gt-1] "
        forged = one.repo.object("commit", kept + b"\x81\xe4\n\x81\nAcked-by: Ada <ada@example.org>\n")
        assert one.rule(new=forged) == "git.trailer", encoding
        one.publish(new=one.repo.object("commit", kept + b"One\n"))


def test_commits_of_another_source_branch_keep_their_author_and_have_their_paths_judged(direct: DirectMaker) -> None:
    one = direct()
    one.source.git("switch", "-qc", "topic")
    one.source.commit("Anything", {"topic.md": "t"})
    one.source.git("switch", "-q", "main")
    one.repo.git("fetch", "-q")
    one.repo.git("merge", "-q", "--ff-only", "origin/topic")
    one.publish()
    one.source.git("switch", "-q", "topic")
    one.source.commit("Anything", {"Cargo.toml": "version = 9\n"})
    one.source.git("switch", "-q", "main")
    one.repo.git("fetch", "-q")
    one.repo.git("merge", "-q", "--ff-only", "origin/topic")
    assert one.refused().path == "Cargo.toml"


@pytest.mark.parametrize(
    ("text", "issue", "fits"),
    [
        ("[gt-1] Text", None, True),
        ("[gt-1] Text", "gt-1", True),
        ("[gt-2] Text", "gt-1", False),
        ("[gt-2] Text", None, True),
        ("Text", None, False),
        ("Text", "gt-1", False),
        ("[gt-1]", None, False),
        ("fixup! [gt-1] Text", "gt-1", True),
        ("squash! fixup! [gt-1] Text", "gt-1", True),
        ("amend! [gt-1] Text\n\n[gt-1] Other", "gt-1", True),
        ("fixup! Text", None, False),
        ("fixup! [gt-2] Text", "gt-1", False),
        ('Revert "[gt-2] Text"\n\nThis reverts it.', "gt-1", True),
        ('Revert "Revert "[gt-2] Text""', "gt-1", True),
        ('Reapply "[gt-2] Text"', "gt-1", True),
        ('Revert "Text"', "gt-1", False),
        ("[gt-1] Te\0xt", None, False),
        ("", None, False),
    ],
)
def test_messages_must_match_the_pattern(text: str, issue: str | None, fits: bool) -> None:
    assert (judge_message(BranchRules(message_pattern=COMMIT_MESSAGE_PATTERN), text, issue) is None) == fits


def test_the_message_names_the_issue_of_the_session_except_in_merges(direct: DirectMaker) -> None:
    one = direct()
    one.repo.commit("[gt-7] Other issue", {"one.md": "1"})
    assert one.rule(issue="gt-1") == "git.message"
    one.repo.git("commit", "-q", "--amend", "-m", "[gt-1] This issue")
    one.source.commit("[gt-0] More", {"more.md": "m"})
    one.repo.git("fetch", "-q")
    one.repo.git("merge", "-q", "-m", "Merge branch main", "origin/main")
    one.publish(issue="gt-1")


PERSON = b"alice <a@b> 1700000000 +0000"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"tree " + b"1" * 40 + b"\nauthor " + PERSON + b"\ncommitter " + PERSON + b"\n",
        b"tree " + b"1" * 40 + b"\nauthor " + PERSON + b"\nauthor " + PERSON + b"\ncommitter " + PERSON + b"\n\nx",
        b"tree " + b"1" * 40 + b"\nauthor " + PERSON + b"\ncommitter " + PERSON + b"\ncommitter " + PERSON + b"\n\nx",
        b"tree " + b"1" * 40 + b"\ncommitter " + PERSON + b"\nauthor " + PERSON + b"\n\nx",
        b"tree " + b"1" * 40 + b"\nauthor " + PERSON + b"\nparent " + b"1" * 40 + b"\ncommitter " + PERSON + b"\n\nx",
        b"tree " + b"1" * 40 + b"\nauthor alice <a@b> now +0000\ncommitter " + PERSON + b"\n\nx",
        b"tree " + b"1" * 40 + b"\nauthor " + PERSON + b"\ncommitter " + PERSON + b"\nHG:extra x\n\nx",
    ],
)
def test_ambiguous_commits_are_refused(data: bytes) -> None:
    assert read_commit("1" * 40, data) is None
