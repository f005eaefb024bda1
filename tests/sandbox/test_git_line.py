"""Git's own command line, read without running anything."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bonobofs.policy.families import GIT
from bonobofs.sandbox.git.line import Line, NotUnderstood, resolve, split
from bonobofs.sandbox.git.options import Unsupported, parse, spec
from bonobofs.sandbox.git.reading import ALWAYS, AT_ONCE, is_of_git, only_reads


def line(text: str) -> Line:
    return split(tuple(text.split()))


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("commit -m x", "commit", ("-m", "x")),
        ("-C /other commit", "commit", ()),
        ("-c user.name=x -c a.b commit -a", "commit", ("-a",)),
        ("--no-pager -P -p push", "push", ()),
        ("--git-dir /x --work-tree=/y add a", "add", ("a",)),
        ("--git-dir=/x add", "add", ()),
        ("--config-env=a.b=C checkout x", "checkout", ("x",)),
        ("--config-env a.b=C checkout x", "checkout", ("x",)),
        ("--literal-pathspecs add *", "add", ("*",)),
        ("-C push status", "status", ()),
        ("-c push", "", ()),
        ("", "", ()),
        ("--version push", "", ()),
        ("--help push", "", ()),
    ],
)
def test_options_of_git_are_seen_through(text: str, name: str, arguments: tuple[str, ...]) -> None:
    """The subcommand is the first word that is no option of git and no value of one."""
    found = line(text)
    assert (found.name, found.arguments) == (name, arguments)


def test_what_leads_elsewhere_is_known() -> None:
    """Where `-C` leads and that another repository or other programs are named is kept."""
    assert line("-C a -C b add").directories == ("a", "b")
    for text in ("--git-dir=x add", "--work-tree x add", "--bare add", "--namespace=n add", "--exec-path=/x add"):
        assert line(text).elsewhere, text
    assert not line("-C a add").elsewhere


@pytest.mark.parametrize("text", ["--frobnicate push", "-x push", "-Cx push", "-cx=y push", "--git-di=x push"])
def test_an_option_that_git_does_not_have_is_not_understood(text: str) -> None:
    """What stands before the subcommand and is not known may take the next word or not: nothing is guessed."""
    with pytest.raises(NotUnderstood):
        line(text)


ALIASES = {
    "ci": "commit -v",
    "wip": 'ci -m "work in progress"',
    "at": "-C /other -c a.b=c ci",
    "sh": "!git push",
    "a": "b",
    "b": "a",
    "open": "commit -m 'x",
    "status": "push",
    "bad": "--frobnicate push",
    "sp": r"commit -m a\ b 'c\d' \"",
}


def resolved(text: str) -> Line:
    return resolve(line(text), is_of_git, lambda found: ALIASES.get(found.name, ""))


def test_aliases_are_what_they_stand_for() -> None:
    """An alias is replaced by its words, in as many steps as it takes; a subcommand of git cannot be one."""
    assert resolved("wip -a")[1:3] == ("commit", ("-v", "-m", "work in progress", "-a"))
    assert resolved("-P at x") == Line(("-P", "-C", "/other", "-c", "a.b=c"), "commit", ("-v", "x"), ("/other",))
    assert resolved("sp").arguments == ("-m", "a b", "c\\d", '"')
    assert resolved("status").name == "status"
    assert resolved("nonsense").name == "nonsense"


@pytest.mark.parametrize("alias", ["sh", "a", "open", "bad"])
def test_an_alias_that_runs_a_program_or_a_circle_is_not_understood(alias: str) -> None:
    """Nothing is executed to find out what an alias means."""
    with pytest.raises(NotUnderstood):
        resolved(alias)


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0\n\r\x0b\x0c"), max_size=5), max_size=4))
def test_an_alias_is_split_as_a_shell_would(words: list[str]) -> None:
    """Quoted as for a shell, any words are found again."""
    text = " ".join(["commit", *("'" + word.replace("'", "'\\''") + "'" for word in words)])
    assert resolve(line("x"), is_of_git, lambda _: text).arguments == tuple(words)


READS = """
status; diff --stat HEAD~1; log -p; show HEAD; branch; branch -a; branch -vv; branch --list a*; branch --merged
main; branch --contains HEAD; branch --show-current; branch --sort=-committerdate; branch --sort committerdate;
branch -l x; tag; tag -l; tag -n; tag -n3; tag --list v*; tag -v v1; tag --points-at HEAD; stash list; stash show
-p; remote; remote -v; remote get-url origin; worktree list; config --get a.b; config a.b; config -l; config
--global --list; reflog; reflog show HEAD; notes; notes show; submodule; submodule status; bisect log; symbolic-ref
HEAD; symbolic-ref -q HEAD; apply --check x; apply --stat x; clean -n; clean -nd; hash-object a; bundle verify x;
commit -h; push --help; rev-parse HEAD; ls-files -s; cat-file -p HEAD; grep x; blame a; sparse-checkout list; rerere
status; version; help log
"""

WRITES = """
add a; commit; commit -a; push; pull; fetch; rebase; rm a; mv a b; restore a; branch x; branch -f x; branch -d x;
branch -D x; branch -fd x; branch -m a b; branch -c a b; branch -v x; branch -u origin/x; branch --del x; branch
--set-up x; branch --unset-upstream; branch --edit-description; checkout x; switch x; merge x; stash; stash push;
stash -m list; stash pop; stash apply; stash drop; stash clear; stash branch x; stash -u; stash save list; stash
create; reset; reset a; tag x; tag -d x; tag -a x; tag -f x; tag -mx x; tag -am x y; remote add a b; remote -v add a
b; remote rm a; remote set-url a b; worktree add x; worktree remove x; worktree prune; config a.b c; config --unset
a.b; config --add a.b c; config -e; config edit; config a.b -- --get; config --global a.b c; reflog expire; reflog
delete; notes add; submodule update; submodule add x; bisect start; bisect good; symbolic-ref HEAD refs/heads/x;
symbolic-ref -d X; symbolic-ref -m r HEAD; apply x; apply --index x; apply --stat --apply x; clean; clean -f; clean
-xdf; hash-object -w a; bundle unbundle x; am x; cherry-pick x; revert x; update-ref a b; filter-branch; gc; prune;
init; clone x; read-tree x; write-tree; update-index a; checkout-index -a; replace a b; symbolic-ref HEAD --
refs/heads/x; fast-import; pack-refs; stage a; merge-tree a b; sparse-checkout set x; rerere clear; maintenance run;
commit-tree x; mktree; mktag; unpack-objects; index-pack x
"""


def _lines(text: str) -> list[str]:
    return [one.strip() for one in text.replace("\n", " ").split(";")]


@pytest.mark.parametrize("text", _lines(READS))
def test_what_only_reads_is_known(text: str) -> None:
    """These forms change nothing in a repository."""
    found = line(text)
    assert only_reads(found.name, found.arguments)


@pytest.mark.parametrize("text", _lines(WRITES))
def test_what_may_write_is_never_taken_for_reading(text: str) -> None:
    """These forms may change a repository."""
    found = line(text)
    assert is_of_git(found.name)
    assert not only_reads(found.name, found.arguments)


def test_every_subcommand_of_this_git_is_known() -> None:
    """A subcommand that nobody has thought of could be named by an alias, so all of git's are listed."""
    listed = subprocess.run(["git", "--list-cmds=builtins"], capture_output=True, text=True, check=True).stdout
    assert [name for name in listed.split() if not is_of_git(name)] == []


def test_the_lists_do_not_meet() -> None:
    """What always reads is not asked of the gate, and each line that the shell hands on at once only reads."""
    assert not ALWAYS & set(GIT)
    for text in AT_ONCE:
        found = line(text)
        assert not found.name or only_reads(found.name, found.arguments), text


TABLE = spec("force,f message,m= track,t? all,a no-ff")


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ("-am x", (("all", ""), ("message", "x")), ()),
        ("-mfoo -a", (("message", "foo"), ("all", "")), ()),
        ("-mf -a b", (("message", "f"), ("all", "")), ("b",)),
        ("--mess=x --mes y", (("message", "x"), ("message", "y")), ()),
        ("a -f b", (("force", ""),), ("a", "b")),
        ("-t x", (("track", ""),), ("x",)),
        ("-tdirect --track=x", (("track", "direct"), ("track", "x")), ()),
        ("--no-force --no-ff --force", (("no-force", ""), ("no-ff", ""), ("force", "")), ()),
        ("- -- -f", (), ("-", "-f")),
    ],
)
def test_options_are_read_as_git_reads_them(
    text: str, given: tuple[tuple[str, str], ...], words: tuple[str, ...]
) -> None:
    """Clusters, values that cling, abbreviations, `--no-` and `--`."""
    options = parse(TABLE, tuple(text.split()))
    assert options.given == given
    assert options.words == words


def test_an_option_that_is_undone_does_not_hold() -> None:
    """The last of an option and its undoing counts."""
    assert parse(TABLE, ("--no-force", "--force")).has("force")
    assert not parse(TABLE, ("-f", "--no-force")).has("force")


@pytest.mark.parametrize("text", ["-x", "--other", "--force=x", "-m", "--message", "-fx", "--a=b"])
def test_an_option_that_is_not_in_the_table_is_unsupported(text: str) -> None:
    """Nothing is guessed about what is not known."""
    with pytest.raises(Unsupported):
        parse(TABLE, (text,))
