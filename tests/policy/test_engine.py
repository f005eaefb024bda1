"""The properties that policy authors rely on. Each test has the property as its name."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.errors import PolicyError
from bonobofs.policy.compiled import Tracked
from bonobofs.policy.decision import Code, Decision, Denied, Layer, Permit
from bonobofs.policy.engine import EXECUTABLE_HEADS, compile_policy, decide, decide_in_source, digest
from bonobofs.policy.request import NO_FACTS, STAGED, Context, Kind, Operation, Principal, Request, WorkspacePath
from tests.policy.random_policies import (
    CHANGES,
    agents,
    changes,
    context,
    documents,
    paths,
    patterns,
    plain_paths,
    requests,
    scratch_tables,
    temporary,
)

ALICE = Principal("alice", "1", "agent")
ALLOW_ALL: dict[str, Any] = {"default": "allow", "hidden": ["**"], "devices": True}


def ask(
    document: dict[str, Any],
    path: str,
    operation: Operation = Operation.WRITE_FILE,
    known: Context = NO_FACTS,
    *,
    kind: Kind = Kind.FILE,
    role: str = "agent",
) -> Decision:
    request = Request(operation, WorkspacePath(path), kind)
    return decide(compile_policy(document), ALICE._replace(role=role), request, known)


def code(decision: Decision) -> Code | None:
    return decision.code if isinstance(decision, Denied) else None


def rule(paths: list[str], name: str = "rule", **limits: object) -> dict[str, Any]:
    return {"name": name, "paths": paths, **limits}


# What holds for every policy


@settings(deadline=None)
@given(documents, agents, paths, st.sampled_from(CHANGES), st.sampled_from(Kind), context)
def test_every_request_gets_a_decision(
    document: dict[str, Any], agent: Principal, path: str, operation: Operation, kind: Kind, known: Context
) -> None:
    request = Request(operation, WorkspacePath(path), kind)
    policy = compile_policy(document)
    decision = decide(policy, agent, request, known)
    assert isinstance(decision, Permit | Denied)
    assert decide(policy, agent, request, known) == decision


@settings(deadline=None)
@given(documents, agents, changes, context)
def test_default_deny(document: dict[str, Any], agent: Principal, request: Request, known: Context) -> None:
    """If no rule matches, a change of the source is denied."""
    decision = decide_in_source(compile_policy({**document, "default": "deny", "rule": []}), agent, request, known)
    assert isinstance(decision, Denied)


@settings(deadline=None)
@given(documents, agents, requests, context, patterns)
def test_a_deny_overrides_an_allow(
    document: dict[str, Any], agent: Principal, request: Request, known: Context, pattern: str
) -> None:
    """More protected paths, or more denials of a role, never allow more."""
    before = decide(compile_policy(document), agent, request, known)
    tables = {name: {**table, "deny": [*table["deny"], pattern]} for name, table in document["role"].items()}
    for narrowed in (
        {**document, "protect": [*document["protect"], {"paths": [pattern]}]},
        {**document, "keep": [*document["keep"], {"paths": [pattern]}]},
        {**document, "role": tables},
    ):
        after = decide(compile_policy(narrowed), agent, request, known)
        assert isinstance(before, Permit) or isinstance(after, Denied)


@settings(deadline=None)
@given(documents, agents, requests, context, st.randoms(use_true_random=False))
def test_the_order_of_rules_does_not_matter(
    document: dict[str, Any], agent: Principal, request: Request, known: Context, random: Any
) -> None:
    """The order changes only which denial is reported. A Permit is equal in every field."""
    shuffled = [*document["rule"]]
    random.shuffle(shuffled)
    one = decide(compile_policy(document), agent, request, known)
    other = decide(compile_policy({**document, "rule": shuffled}), agent, request, known)
    assert one == other or (isinstance(one, Denied) and isinstance(other, Denied))


@settings(deadline=None)
@given(documents, agents, changes, context)
def test_an_additional_rule_never_forbids_what_a_rule_allows(
    document: dict[str, Any], agent: Principal, request: Request, known: Context
) -> None:
    """Rules with `refuse` are the exception: they exist to forbid."""
    one, *others = [each for each in document["rule"] if "refuse" not in each] or [rule(["a/"])]
    alone = decide(compile_policy({**document, "default": "deny", "rule": [one]}), agent, request, known)
    together = decide(compile_policy({**document, "default": "deny", "rule": [one, *others]}), agent, request, known)
    assert isinstance(alone, Denied) or isinstance(together, Permit)


@settings(deadline=None)
@given(documents, agents, changes, context, st.integers(0, 20), st.integers(1, 20))
def test_shrinking_is_never_too_large(
    document: dict[str, Any], agent: Principal, request: Request, known: Context, size: int, more: int
) -> None:
    smaller = known._replace(size=size, size_before=size + more)
    assert code(decide(compile_policy(document), agent, request, smaller)) is not Code.SIZE


@settings(deadline=None)
@given(documents, agents, plain_paths)
def test_a_writable_file_may_be_deleted_at_any_size_and_content(
    document: dict[str, Any], agent: Principal, path: str
) -> None:
    policy = compile_policy({**document, "keep": []})
    written = decide(policy, agent, Request(Operation.WRITE_FILE, WorkspacePath(path)), Context(size=0))
    big = Context(size=10**12, mode=0o755, head=b"#!", leaves=True, foreign_names=3)
    deleted = decide(policy, agent, Request(Operation.DELETE_FILE, WorkspacePath(path)), big)
    assert isinstance(written, Denied) or isinstance(deleted, Permit)


@settings(deadline=None)
@given(changes, context)
def test_an_allow_all_policy_allows_every_change_except_the_fixed_denials(request: Request, known: Context) -> None:
    decision = decide(compile_policy(ALLOW_ALL), ALICE, request, known._replace(tool=False))
    never = {Code.OUTSIDE, Code.HARDLINK, *([] if known.privileged else [Code.DEVICE])}
    parts = request.path.split("/")
    reserved = parts[0] == ".bonobofs" or bool({".git", ".beads"} & {*parts})
    assert code(decision) in {None, *never, *([Code.PROTECTED] if reserved else [])}


@settings(deadline=None)
@given(documents, requests, context)
def test_an_undefined_role_may_do_nothing(document: dict[str, Any], request: Request, known: Context) -> None:
    decision = decide(compile_policy(document), ALICE._replace(role="nobody"), request, known)
    assert code(decision) in {Code.ROLE, Code.OUTSIDE, Code.DEVICE, Code.PROTECTED}


@settings(deadline=None)
@given(documents, agents, requests, context, plain_paths)
def test_a_denial_contains_only_the_path_of_its_request(
    document: dict[str, Any], agent: Principal, request: Request, known: Context, path: str
) -> None:
    """One rule and one code give one sentence, so the log can count denials together."""
    policy = compile_policy(document)
    one = decide(policy, agent, request, known)
    other = decide(policy, agent, request._replace(path=WorkspacePath(path)), known)
    if isinstance(one, Denied) and isinstance(other, Denied) and (one.code, one.rule) == (other.code, other.rule):
        assert (one.reason, one.instead) == (other.reason, other.instead)


# Scratch and temporary names


@settings(deadline=None)
@given(documents, agents, changes, context, scratch_tables, temporary)
def test_scratch_and_temporary_names_never_let_more_into_the_source(
    document: dict[str, Any],
    agent: Principal,
    request: Request,
    known: Context,
    scratch: list[dict[str, Any]],
    staged: list[str],
) -> None:
    """Their changes go to another layer. Other paths are decided as if the tables were empty.

    A symlink may be refused for another reason: at a scratch path its target is not the first reason.
    """
    without = {**document, "scratch": [], "temporary": []}
    wider = {**document, "scratch": [*document["scratch"], *scratch], "temporary": [*document["temporary"], *staged]}
    before = decide(compile_policy(without), agent, request, known)
    after = decide(compile_policy(wider), agent, request, known)
    if known.target is not None and isinstance(before, Denied) and isinstance(after, Denied):
        return
    assert (
        after == before
        or (isinstance(after, Permit) and after.layer is not Layer.SOURCE)
        or code(after) is Code.HARDLINK
    )


@settings(deadline=None)
@given(documents, agents, changes, context)
def test_no_outside_protected_or_role_denied_path_goes_to_another_layer(
    document: dict[str, Any], agent: Principal, request: Request, known: Context
) -> None:
    """If every path but the root is scratch and every name temporary, these paths are still refused."""
    # A rule that refuses comes after scratch, as every rule.
    document = {**document, "rule": [rule for rule in document["rule"] if "refuse" not in rule]}
    wide = {**document, "scratch": [{"paths": ["**"]}], "temporary": ["**/?a?"]}
    known = known._replace(target=None)  # a symlink in scratch may lead anywhere but into a protected path
    without = decide(compile_policy({**document, "scratch": [], "temporary": []}), agent, request, known)
    decision = decide(compile_policy(wide), agent, request, known)
    if not request.path or code(without) in {Code.OUTSIDE, Code.DEVICE, Code.PROTECTED} or agent.role == "nobody":
        assert decision == without
    else:
        assert code(decision) in {None, Code.ROLE}


def test_scratch_permits_every_change() -> None:
    document = {
        "scratch": [{"paths": ["build/", "**/.cache/"], "max_total": 100}],
        "keep": [{"paths": ["build/x"]}],
        "role": {"agent": {"write": ["docs/"], "deny": ["build/no/"]}},
    }
    known = Context(size=10**12, mode=0o777, head=b"#!", foreign_names=3)
    for path in ("build", "build/x", "build/a/.b/c", ".cache", "a/b/.cache/x.py"):
        for operation in CHANGES:
            for kind in (Kind.FILE, Kind.DIRECTORY, Kind.SYMLINK, Kind.FIFO, Kind.SOCKET):
                decision = ask(document, path, operation, known, kind=kind)
                assert isinstance(decision, Permit)
                assert (decision.layer, decision.max_size, decision.judges_content) == (Layer.SCRATCH, None, False)
    assert code(ask(document, "build/no/x")) is Code.ROLE
    assert code(ask(document, "builds/x")) is Code.ROLE
    assert code(ask(document, "a/.caches")) is Code.HIDDEN


LINKS = {
    "scratch": [{"paths": ["build/"]}],
    "temporary": ["**/.#*"],
    "protect": [{"paths": ["**/.git/"]}],
    "rule": [rule(["src/"])],
}
LEADING_OUT = ("/etc/passwd", "../../..", "../../../x", "a/../../../x", "../../work/.git/x")
PROTECTED = ("../.git/config", "a/../../.git", "../a/../.git/x")


def link(document: dict[str, Any], path: str, target: str, known: Context = NO_FACTS) -> Decision:
    return ask(document, path, Operation.SYMLINK, known._replace(target=target), kind=Kind.SYMLINK)


def test_a_symlink_in_scratch_leads_anywhere_but_into_a_protected_path() -> None:
    for target in LEADING_OUT:
        decision = link(LINKS, "build/x", target)
        assert isinstance(decision, Permit)
        assert decision.layer is Layer.SCRATCH
        assert code(link(LINKS, "src/x", target)) is Code.OUTSIDE
        assert code(link(LINKS, "docs/.#x", target)) is Code.OUTSIDE
    for target in (*PROTECTED, "", "a\0"):
        for path in ("build/x", "src/x", "docs/.#x"):
            assert code(link(LINKS, path, target)) is Code.OUTSIDE
    assert link(LINKS, "docs/.#x", "alice@host.1:2") == Permit("temporary", layer=Layer.STAGED)


def test_a_moved_directory_may_not_make_a_source_symlink_lead_out() -> None:
    carried = Context(carried=True)
    assert code(link(LINKS, "build/x", "../../x", carried)) is Code.OUTSIDE
    assert code(link(LINKS, "build/x", "../src/x", carried)) is None
    assert code(link(LINKS, "build/x", "/usr/bin/python3", carried)) is None, "it leads where it led before"


def test_free_symlinks_lead_anywhere_but_into_a_protected_path() -> None:
    anywhere = {**LINKS, "symlinks": "any"}
    for target in LEADING_OUT:
        assert link(anywhere, "src/x", target) == Permit("rule")
        assert code(link(anywhere, "elsewhere/x", target)) is Code.DEFAULT, "a rule must admit the path all the same"
    for target in (*PROTECTED, ""):
        assert code(link(anywhere, "src/x", target)) is Code.OUTSIDE


def test_a_path_that_git_tracks_is_never_scratch() -> None:
    document = {**LINKS, "rule": [rule(["build/a.js", "build/sub/"])]}
    policy = compile_policy(document).with_tracked(
        Tracked(["build/a.js", "build/sub/b.js", "build/no.js", "build/lib/"])
    )
    expected = {
        "build": "DEFAULT",
        "build/a.js": "source",
        "build/no.js": "DEFAULT",
        "build/sub": "source",
        "build/sub/b.js": "source",
        "build/lib/deep/c.js": "DEFAULT",
        "build/new.js": "scratch",
        "build/sub/new.js": "scratch",
        "build/other/x": "scratch",
        # From scratch it could not be renamed over a tracked file.
        "build/.#a.js": "staged",
        "build/sub/.#b.js": "staged",
        "build/other/.#x": "scratch",
    }
    for path, answer in expected.items():
        decision = decide(policy, ALICE, Request(Operation.WRITE_FILE, WorkspacePath(path)))
        assert (decision.code if isinstance(decision, Denied) else decision.layer) == answer, path


def test_the_root_is_never_scratch_and_never_a_symlink() -> None:
    scratch = {"scratch": [{"paths": ["**"]}]}
    assert code(ask(scratch, "", Operation.SET_MODE, kind=Kind.DIRECTORY)) is Code.DEFAULT
    assert ask({**scratch, "default": "allow"}, "", Operation.SET_MODE, kind=Kind.DIRECTORY) == Permit("default")
    for document in (scratch, ALLOW_ALL):
        assert code(ask(document, "", Operation.SET_MODE, Context(target="a"), kind=Kind.SYMLINK)) is Code.OUTSIDE


def test_a_scratch_permit_names_the_first_matching_pattern_and_its_table() -> None:
    tables: list[dict[str, Any]] = [{"paths": ["**/x/", "a/**"], "max_total": 5}, {"paths": ["a/b/", "**/*.o"]}]
    policy = compile_policy({"scratch": tables})
    expected = {
        "a/b": ("scratch:a/**", 0),
        "a/x/b": ("scratch:**/x/", 0),
        "b/c.o": ("scratch:**/*.o", 1),
        "c.o": ("scratch:**/*.o", 1),
    }
    for path, (rule, index) in expected.items():
        decision = decide(policy, ALICE, Request(Operation.WRITE_FILE, WorkspacePath(path)))
        table = policy.scratch_table(path)
        assert isinstance(decision, Permit)
        assert decision.rule == rule
        assert table is policy.scratch[index]
        assert (table.number, table.max_total) == (index, tables[index].get("max_total"))
        assert table.full.code is Code.SIZE
    assert policy.scratch_table("a") is None
    assert policy.scratch_table("") is None


def test_a_temporary_name_is_staged_unless_it_is_a_source_file() -> None:
    document = {"temporary": ["**/sed??????", "docs/*.tmp"], "rule": [rule(["docs/"], suffixes=[".tmp"], max_size=1)]}
    for kind in (Kind.FILE, Kind.SYMLINK):
        for path in ("sedAbCdEf", "a/b/sed123456"):
            for operation in CHANGES:
                decision = ask(document, path, operation, Context(size=9, mode=0o755, head=b"#!"), kind=kind)
                assert decision == Permit("temporary", layer=Layer.STAGED)
    assert code(ask(document, "a.tmp")) is Code.DEFAULT
    assert code(ask(document, "a/sedAbCdEf", known=Context(in_source=True))) is Code.DEFAULT
    assert ask(document, "docs/a.tmp", known=Context(size=1, in_source=True)) == Permit("rule", 1)
    assert code(ask(document, "docs/a.tmp", known=Context(size=2, in_source=True))) is Code.SIZE
    assert code(ask(document, "docs/a.tmp", known=Context(foreign_names=1))) is Code.HARDLINK


def test_a_temporary_name_that_a_rule_allows_is_an_ordinary_file() -> None:
    document = {"temporary": ["**/*.tmp"], "rule": [rule(["docs/"], suffixes=[".tmp", ".md"], max_size=1)]}
    staged = Permit("temporary", layer=Layer.STAGED)
    assert ask(document, "docs/a.tmp", known=Context(size=1)) == Permit("rule", 1)
    assert ask(document, "docs/a.tmp", Operation.DELETE_FILE) == Permit("rule", 1)
    # What the rule does not admit as it is asked for is held, and so is a name in a place that is closed.
    assert ask(document, "docs/a.tmp", known=Context(size=2)) == staged
    assert ask(document, "docs/.a.tmp", known=Context(size=1)) == staged
    assert ask(document, "src/a.tmp", known=Context(size=1)) == staged
    assert ask({**document, "role": {"agent": {"write": ["src/"]}}}, "docs/a.tmp", known=Context(size=1)) == staged
    # What is held stays held, so that each change of it goes where it lies.
    assert ask(document, "docs/a.tmp", known=STAGED._replace(size=1)) == staged
    assert ask({**document, "default": "allow"}, "a.tmp") == Permit("default")


def test_only_files_and_symlinks_are_staged() -> None:
    document = {"temporary": ["**/sed??????"]}
    for kind in set(Kind) - {Kind.FILE, Kind.SYMLINK}:
        operation = Operation.MKDIR if kind is Kind.DIRECTORY else Operation.MKNOD
        known = Context(privileged=True)
        assert code(ask({**document, "devices": True}, "sedAbCdEf", operation, known, kind=kind)) is Code.DEFAULT


def test_write_probes_and_backups_of_editors_are_not_staged() -> None:
    """If these are refused, the editor writes into the file itself, which cannot lose it."""
    document = {"temporary": ["**/[0-9]???", "**/.*.md*", "**/?a?"]}
    staged = {path: bool(getattr(ask(document, path), "layer", "")) for path in ("4912", "d/.x.md.un", "bab", "d/4913")}
    assert staged == {"4912": True, "d/.x.md.un": True, "bab": True, "d/4913": False}
    assert code(ask(document, "4913")) is Code.DEFAULT
    assert code(ask(document, "d/.x.md~")) is Code.HIDDEN
    assert code(ask(document, "ba~")) is Code.DEFAULT


def test_a_caller_without_layers_is_refused_with_a_reason() -> None:
    policy = compile_policy({"scratch": [{"paths": ["build/"]}], "temporary": ["**/*.tmp"], "rule": [rule(["docs/"])]})
    for path, named, word in (("build/x", "scratch:build/", "Scratch"), ("src/a.tmp", "temporary", "Temporary")):
        decision = decide_in_source(policy, ALICE, Request(Operation.WRITE_FILE, WorkspacePath(path)))
        assert isinstance(decision, Denied)
        assert (decision.code, decision.rule, decision.path) == (Code.DEFAULT, named, path)
        assert decision.reason.startswith(word)
    allowed = decide_in_source(policy, ALICE, Request(Operation.WRITE_FILE, WorkspacePath("docs/a.md")))
    assert allowed == Permit("rule")


# The order of the contracts


def test_the_first_denial_in_the_documented_order_is_reported() -> None:
    """One path that every check refuses; the test removes one check at a time."""
    everything: dict[str, Any] = {
        "protect": [{"paths": ["a/"]}],
        "keep": [{"paths": ["a/"]}],
        "role": {"agent": {"write": ["b/"], "deny": ["a/"]}},
        "scratch": [{"paths": ["a/.*"]}],
        "temporary": ["**/.x*"],
        "rule": [rule(["a/"], suffixes=[".md"], max_size=1, executable=False)],
    }
    leaving = Context(leaves=True)
    device = Kind.DEVICE
    steps: list[tuple[dict[str, Any], str, Context, Kind, Code | None]] = [
        ({}, "a/../.x", leaving, device, Code.OUTSIDE),
        ({}, "a/.x", leaving, device, Code.DEVICE),
        ({}, "a/.x", leaving, Kind.FILE, Code.PROTECTED),
        ({"protect": []}, "a/.x", leaving, Kind.FILE, Code.ROLE),
        ({"role": {"agent": {"write": ["b/"]}}}, "a/.x", leaving, Kind.FILE, None),
        ({"scratch": []}, "a/.x", leaving, Kind.FILE, None),
        ({"temporary": []}, "a/.x", leaving, Kind.FILE, Code.HIDDEN),
        ({"hidden": [".x"]}, "a/.x", leaving, Kind.FILE, Code.ROLE),
        ({"role": {}}, "a/.x", leaving, Kind.FILE, Code.KEEP),
        ({"keep": []}, "a/.x", leaving, Kind.FILE, Code.SUFFIX),
        ({"rule": []}, "a/.x", leaving, Kind.FILE, Code.DEFAULT),
        ({"default": "allow"}, "a/.x", Context(foreign_names=1), Kind.FILE, Code.HARDLINK),
        ({}, "a/.x", leaving, Kind.FILE, None),
    ]
    for opened, path, known, kind, expected in steps:
        everything |= opened
        operation = Operation.MKNOD if kind is device else Operation.WRITE_FILE
        assert code(ask(everything, path, operation, known, kind=kind)) == expected, (opened, path)


# Places


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "a/..",
        "../a",
        "a/../b",
        "/a",
        "a/",
        "a//b",
        "/",
        "//",
        ".",
        "a/./b",
        "./a",
        "a\0b",
        "\0",
        "\ud800",
        "a/\udfff",
    ],
)
def test_a_path_with_dots_or_empty_components_is_outside(path: str) -> None:
    for operation in CHANGES:
        assert code(ask(ALLOW_ALL, path, operation)) is Code.OUTSIDE


@pytest.mark.parametrize(
    "path", ["a..b.md", "...", "..a", "a..", "a/..b", "\udcff", "a\nb", " ", "%2e%2e", "\uff0e\uff0e"]
)
def test_two_dots_within_a_name_are_allowed(path: str) -> None:
    assert code(ask(ALLOW_ALL, path)) is None


def test_the_root_cannot_move_but_its_mode_and_times_may_change() -> None:
    for operation in CHANGES:
        changes_only_attributes = operation.value.startswith(("set_", "remove_"))
        decision = ask(ALLOW_ALL, "", operation, kind=Kind.DIRECTORY)
        assert code(decision) == (None if changes_only_attributes else Code.OUTSIDE), operation
    assert code(ask(ALLOW_ALL, "", Operation.SET_MODE, Context(leaves=True), kind=Kind.DIRECTORY)) is Code.OUTSIDE
    assert code(ask({"rule": [rule(["a/"])]}, "", Operation.SET_MODE, kind=Kind.DIRECTORY)) is Code.DEFAULT
    assert code(ask({"rule": [rule(["**"])]}, "", Operation.SET_MODE, kind=Kind.DIRECTORY)) is None


@pytest.mark.parametrize(
    ("path", "target", "inside"),
    [
        ("a/x", "b", True),
        ("a/x", "../b", True),
        ("a/x", "..", True),
        ("x", ".", True),
        ("a/x", "./b//c/", True),
        ("a/x", "a..b", True),
        ("a/b/x", "../../c", True),
        ("a/x", "../..", False),
        ("x", "..", False),
        ("x", "../source/a", False),
        ("x", "/a", False),
        ("x", "/proc/self/root/etc", False),
        ("x", "", False),
        ("x", "a\0", False),
        # `b` may be a symlink, now or later, and then `b/..` is not `a`.
        ("a/x", "b/../c", False),
        ("a/x", "../b/../../c", False),
        ("a/x", "../.git/config", False),
        ("x", ".git", False),
        ("x", "sub/.git/hooks", False),
        ("x", ".bonobofs/policy.md", False),
        ("a/x", "../policy.toml", False),
        ("a/x", "policy.toml", True),
    ],
)
def test_a_symlink_stays_inside_and_enters_nothing_protected(path: str, target: str, inside: bool) -> None:
    document = {**ALLOW_ALL, "protect": [{"paths": ["**/.git/", "policy.toml"]}]}
    for operation in (Operation.SYMLINK, Operation.RENAME, Operation.LINK):
        decision = ask(document, path, operation, Context(target=target), kind=Kind.SYMLINK)
        assert code(decision) == (None if inside else Code.OUTSIDE)


@pytest.mark.parametrize(
    ("path", "target", "expected"),
    [
        ("a/x", "/etc", ("outside:symlink", "out of the workspace")),
        ("a/x", "../../b", ("outside:symlink", "out of the workspace")),
        ("a/x", "b/../c", ("outside:symlink:unknown", "a .. after a name")),
        ("a/x", "", ("outside:symlink:unknown", "is empty")),
        ("a/x", "../secret/a", ("outside:symlink:protected", "into a protected path")),
        ("secret/x", "a", ("protect:secret/", "protects this path")),
        (".git/x", "../a", ("outside:symlink:repository", "`.git`")),
    ],
)
def test_the_refusal_of_a_symlink_names_its_one_reason(path: str, target: str, expected: tuple[str, str]) -> None:
    policy = compile_policy({**ALLOW_ALL, "protect": [{"paths": ["secret/"]}]})
    policy = policy.with_repository() if path.startswith(".git") else policy
    request = Request(Operation.SYMLINK, WorkspacePath(path), Kind.SYMLINK)
    decision = decide(policy, ALICE, request, Context(target=target))
    assert isinstance(decision, Denied)
    assert (decision.rule, expected[1] in decision.reason) == (expected[0], True), decision


def test_a_symlink_that_leads_out_may_be_removed() -> None:
    for known in (Context(target="/etc", leaves=True), Context(target="/etc")):
        assert code(ask(ALLOW_ALL, "x", Operation.DELETE_FILE, known, kind=Kind.SYMLINK)) is None


def test_creating_a_device_needs_policy_and_privilege_and_changing_one_needs_its_path() -> None:
    for devices in (False, True):
        for privileged in (False, True):
            decision = ask(
                {**ALLOW_ALL, "devices": devices},
                "x",
                Operation.MKNOD,
                Context(privileged=privileged),
                kind=Kind.DEVICE,
            )
            assert code(decision) == (None if devices and privileged else Code.DEVICE)
    for operation in set(CHANGES) - {Operation.MKNOD}:
        assert code(ask({"default": "allow"}, "x", operation, kind=Kind.DEVICE)) is None
    assert code(ask({"default": "allow"}, "x", Operation.MKNOD, kind=Kind.FIFO)) is None


@pytest.mark.parametrize("path", [".bonobofs", ".bonobofs/policy.md", ".bonobofs/a/b"])
def test_the_virtual_directory_is_read_only_under_every_policy(path: str) -> None:
    assert code(ask(ALLOW_ALL, path)) is Code.PROTECTED
    assert code(ask(ALLOW_ALL, f"a/{path}")) is None


@pytest.mark.parametrize(
    ("hidden", "opened", "closed"),
    [
        ([], ["a", "a.b", "a/b."], [".a", "a/.b", ".a/b", "a/.b/c"]),
        ([".github"], [".github", ".github/a", "a/.github/b"], [".githubx", ".github/.x", ".gith"]),
        ([".env.*"], [".env.local", "a/.env.x/b"], [".env", ".environ"]),
        (["docs/.vale/"], ["docs/.vale", "docs/.vale/a", "docs/.vale/.x/b"], [".vale", "a/docs/.vale", "docs/.x"]),
        (["docs/.vale"], ["docs/.vale", "docs/.vale/a"], ["docs/.vale/.x"]),
        (["docs/**"], ["docs/.a", "docs/b/.c/.d"], [".docs", "a/.b"]),
        (["**/.cache/"], [".cache/.x", "a/.cache/.x/.y"], [".x/.cache"]),
        (["**"], [".a", "a/.b/.c"], []),
        (["*"], [".a", "a/.b/.c"], []),
        ([".*"], [".a", "a/.b/.c"], []),
    ],
)
def test_hidden_names_are_refused_unless_each_is_listed(
    hidden: list[str], opened: list[str], closed: list[str]
) -> None:
    document = {"default": "allow", "hidden": hidden}
    assert [path for path in opened if code(ask(document, path)) is not None] == []
    assert [path for path in closed if code(ask(document, path)) is not Code.HIDDEN] == []


# Roles and kept files


def test_the_role_agent_writes_everywhere_unless_it_is_defined() -> None:
    assert code(ask({"default": "allow"}, "a")) is None
    assert code(ask({"default": "allow", "role": {"agent": {"write": ["b/"]}}}, "a")) is Code.ROLE
    assert code(ask({"default": "allow", "role": {"agent": {}}}, "a")) is Code.ROLE


def test_a_role_narrows_and_never_widens() -> None:
    document = {"rule": [rule(["a/", "b/"])], "role": {"writer": {"write": ["a/", "c/"], "deny": ["a/x/"]}}}
    expected = {"a/y": None, "a/x": Code.ROLE, "a/x/y": Code.ROLE, "b/y": Code.ROLE, "c/y": Code.DEFAULT}
    assert {path: code(ask(document, path, role="writer")) for path in expected} == expected


def test_a_kept_file_may_be_edited_and_replaced_but_not_removed() -> None:
    document = {"default": "allow", "keep": [{"paths": ["README.md"]}]}
    assert code(ask(document, "README.md", Operation.DELETE_FILE)) is Code.KEEP
    assert code(ask(document, "README.md", Operation.DELETE_FILE, Context(leaves=True))) is Code.KEEP
    assert code(ask(document, "README.md", Operation.RENAME, Context(leaves=True))) is Code.KEEP
    assert code(ask(document, "README.md", Operation.RENAME, Context(size=9))) is None
    assert code(ask(document, "README.md", Operation.WRITE_FILE, Context(size=9))) is None
    assert code(ask(document, "docs/README.md", Operation.DELETE_FILE)) is None


# Suffix, size, content


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("x.md", True),
        ("x.py.md", True),
        (".x.md", True),
        ("..x.md", True),
        ("x..md", True),
        (" .md", True),
        ("\udcff.md", True),
        ("x.MD", False),
        ("x.md.", False),
        ("x.md ", False),
        ("x.md\n", False),
        ("x.md.py", False),
        ("x", False),
        ("md", False),
        (".md", False),
        ("..md", False),
        ("...md", False),
        ("x.mdx", False),
        ("x.m\u200bd", False),
    ],
)
def test_the_suffix_is_the_last_extension_with_its_exact_case(name: str, fits: bool) -> None:
    document = {"hidden": ["**"], "rule": [rule(["a/"], suffixes=[".md"])]}
    assert code(ask(document, f"a/{name}")) == (None if fits else Code.SUFFIX)


@pytest.mark.parametrize("kind", [Kind.DIRECTORY, Kind.SYMLINK, Kind.FIFO, Kind.SOCKET, Kind.DEVICE])
def test_suffixes_apply_to_all_but_directories_and_other_limits_to_files(kind: Kind) -> None:
    document = {"rule": [rule(["a/"], suffixes=[".md"], max_size=1, executable=False)]}
    known = Context(size=9, mode=0o755, head=b"#!")
    assert code(ask(document, "a/x.md", known=known, kind=kind)) is None
    assert code(ask(document, "a/x", known=known, kind=kind)) is (None if kind is Kind.DIRECTORY else Code.SUFFIX)
    assert code(ask(document, "b/x.md", known=known, kind=kind)) is Code.DEFAULT


def test_a_special_file_is_allowed_by_any_rule_that_allows_its_name() -> None:
    document = {
        "rule": [rule(["a/"], name="md", suffixes=[".md"]), rule(["a/"], name="py", suffixes=[".py"], max_size=1)]
    }
    answers = {"a/x.md": None, "a/x.py": None, "a/x": Code.SUFFIX}
    for kind in (Kind.SYMLINK, Kind.FIFO, Kind.SOCKET):
        assert {path: code(ask(document, path, kind=kind)) for path in answers} == answers


def test_a_file_is_too_large_from_the_first_byte_over_the_limit() -> None:
    document = {"rule": [rule(["a/"], max_size=10)]}
    sizes = {Context(size=10): None, Context(size=11): Code.SIZE, NO_FACTS: None}
    sizes |= {Context(size=20, size_before=21): None, Context(size=20, size_before=20): Code.SIZE}
    assert {known: code(ask(document, "a/x", known=known)) for known in sizes} == sizes


@pytest.mark.parametrize("head", EXECUTABLE_HEADS)
def test_executable_content_is_refused_if_the_rule_forbids_it(head: bytes) -> None:
    forbidding, tolerating = (
        {"rule": [rule(["a/"], executable=False)]},
        {"rule": [rule(["a/"])]},
    )
    assert code(ask(forbidding, "a/x", known=Context(head=head))) is Code.EXECUTABLE
    assert code(ask(forbidding, "a/x", known=Context(head=head + b"more"))) is Code.EXECUTABLE
    assert code(ask(forbidding, "a/x", known=Context(head=head[:-1]))) is None
    assert code(ask(forbidding, "a/x", known=Context(head=b" " + head))) is None
    assert code(ask(tolerating, "a/x", known=Context(head=head))) is None


def test_any_x_bit_makes_a_file_executable() -> None:
    document = {"rule": [rule(["a/"], executable=False)]}
    policy = compile_policy(document)
    for mode in range(0o10000):
        decision = decide(policy, ALICE, Request(Operation.SET_MODE, WorkspacePath("a/x")), Context(mode=mode))
        assert (code(decision) is Code.EXECUTABLE) == bool(mode & 0o111), oct(mode)
    assert code(ask(document, "a/x", known=Context(mode=-1))) is None


def test_the_denial_of_the_closest_rule_is_reported() -> None:
    """If one rule fits another file kind and one fits this kind, the denial names what the second rule requires."""
    markdown = rule(["a/"], "markdown", suffixes=[".md"], max_size=10, executable=False)
    python = rule(["a/"], "python", suffixes=[".py"], max_size=5)
    for rules in ([markdown, python], [python, markdown]):
        decision = ask({"rule": rules}, "a/x.py", known=Context(size=9))
        assert isinstance(decision, Denied)
        assert (decision.code, decision.rule) == (Code.SIZE, "python")
        decision = ask({"rule": rules}, "a/x.md", known=Context(size=9, head=b"#!"))
        assert isinstance(decision, Denied)
        assert (decision.code, decision.rule) == (Code.EXECUTABLE, "markdown")
    decision = ask({"rule": [markdown, python]}, "a/x.sh")
    assert isinstance(decision, Denied)
    assert (decision.code, decision.rule) == (Code.SUFFIX, "markdown")


def test_the_widest_matching_rule_gives_the_permit() -> None:
    """A cached permit must not outlive its rule: a rule for large plain files does not make scripts large."""
    scripts = rule(["a/"], "scripts", max_size=5)
    plain = rule(["a/"], "plain", max_size=10, executable=False)
    document = {"rule": [scripts, plain]}
    assert ask(document, "a/x", known=Context(size=3)) == Permit("plain", 10, judges_content=True)
    assert ask(document, "a/x", known=Context(size=3, head=b"#!")) == Permit("scripts", 5, judges_content=False)
    assert code(ask(document, "a/x", known=Context(size=9, head=b"#!"))) is Code.SIZE
    unlimited = rule(["a/"], "unlimited")
    assert ask({"rule": [plain, unlimited]}, "a/x", known=Context(size=3)) == Permit("unlimited", None)


def test_the_widest_rule_is_found_at_any_position() -> None:
    rules = [
        rule(["a/"], "narrow", max_size=5),
        rule(["**/x"], "wide", max_size=10),
        rule(["a/b/*"], "plain", max_size=10, executable=False),
    ]
    for ordered in itertools.permutations(rules):
        assert ask({"rule": list(ordered)}, "a/b/x", known=Context(size=3)) == Permit("wide", 10, judges_content=False)
        assert ask({"rule": list(ordered)}, "a/b/y", known=Context(size=3)) == Permit("plain", 10, judges_content=True)
        assert ask({"rule": list(ordered)}, "a/b", known=Context(size=3)) == Permit("narrow", 5, judges_content=False)


def test_the_link_count_of_a_directory_is_ignored() -> None:
    """It counts the subdirectories."""
    assert code(ask(ALLOW_ALL, "a", Operation.SET_MODE, Context(foreign_names=1), kind=Kind.DIRECTORY)) is None


def test_a_file_with_unknown_names_cannot_be_changed() -> None:
    changes = {"delete_file", "rename", "link", "symlink", "mkdir", "rmdir", "mknod"}
    for operation in CHANGES:
        decision = ask(ALLOW_ALL, "a/x", operation, Context(foreign_names=1))
        assert code(decision) == (None if operation.value in changes else Code.HARDLINK), operation
    refused_anyway = ask({}, "a/x", known=Context(foreign_names=1))
    assert code(refused_anyway) is Code.DEFAULT


# The compiled form


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    one = {"default": "deny", "hidden": [".a"]}
    assert digest(one) == digest({"hidden": [".a"], "default": "deny"}) == compile_policy(one).digest
    assert digest(one) != digest({"default": "deny", "hidden": [".b"]})
    assert compile_policy(one).generation == 1
    assert compile_policy(one, 7).generation == 7


@pytest.mark.parametrize(
    "template", ["d{}/", "d{}/**", "src/d{}/*.md", "**/d{}/", "d{}-*/", "*-d{}/", "d{}", "src/*-d{}.md"]
)
def test_a_decision_takes_as_many_steps_with_a_thousand_rules_as_with_two(template: str) -> None:
    """Time grows with the path, not with the policy. The test counts calls, as a clock would measure the machine."""

    def calls(count: int, path: str) -> int:
        policy = compile_policy({"rule": [rule([template.format(n)], f"r{n}") for n in range(count)]})
        counted = 0

        def count_one(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count_one)
        try:
            decide(policy, ALICE, Request(Operation.WRITE_FILE, WorkspacePath(path)))
        finally:
            sys.setprofile(None)
        return counted

    for path in ("d1/a/b.md", "src/d1/b.md", "a/d1/b", "d1-x/a/b", "x-d1/a/b", "src/x-d1.md", "other/a/b"):
        # A dozen more for globs whose literal part has another length, which are looked up one length at a time.
        assert calls(1000, path) <= calls(2, path) + 12


def test_the_engine_loads_nothing_but_the_standard_library() -> None:
    program = (
        "import sys, bonobofs.policy.engine\n"
        "names = {name.split('.')[0] for name in sys.modules if not name.endswith('__mypyc')}\n"
        "print(names - sys.stdlib_module_names - {'bonobofs', '__main__'})"
    )
    top = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True, cwd=top)
    assert run.stdout.strip() == "set()"


def test_unenforceable_patterns_do_not_compile() -> None:
    table = [{"paths": ["/a"]}]
    for document in (
        {"hidden": ["a"]},
        {"temporary": ["*"]},
        {"scratch": table},
        {"protect": table},
        {"rule": [rule(["a**b"])]},
    ):
        with pytest.raises(PolicyError):
            compile_policy(document)
