"""The default policy implements seed 000: each rule with examples that it allows and denies."""

from __future__ import annotations

import re

import pytest

from bonobofs.audit.temp_cleanup import stray_name
from bonobofs.policy import examples
from bonobofs.policy.compiled import Policy
from bonobofs.policy.decision import Code, Denied, Layer
from bonobofs.policy.document import load
from bonobofs.policy.engine import allowed_directories, callable_words, compile_policy, decide, describe
from bonobofs.policy.presets import packaged_default
from bonobofs.policy.request import NO_FACTS, Context, Kind, Operation, Principal, Request, WorkspacePath
from tests.policy import oracle

DOCUMENT = load(packaged_default()).model_dump(mode="json")
POLICY = compile_policy(DOCUMENT)
ALICE = Principal("alice", "1", "agent")
MB, KB = 1_000_000, 1_000


def code(
    path: str,
    operation: Operation = Operation.WRITE_FILE,
    known: Context = NO_FACTS,
    kind: Kind = Kind.FILE,
    policy: Policy = POLICY,
) -> str:
    decision = decide(policy, ALICE, Request(operation, WorkspacePath(path), kind), known)
    return decision.code.value if isinstance(decision, Denied) else "allowed"


@pytest.mark.parametrize(
    ("rule", "allowed", "denied"),
    [
        ("1 within the workspace", "aidlc-docs/a.md", {"../a.md": "OUTSIDE", "/aidlc-docs/a.md": "OUTSIDE"}),
        ("2 aidlc-docs only .md", "aidlc-docs/unit/a.md", {"aidlc-docs/a.py": "SUFFIX", "aidlc-docs/a.MD": "SUFFIX"}),
        (
            "3 orchestrator only .py",
            "orchestrator/lib/a.py",
            {"orchestrator/a.md": "SUFFIX", "orchestrator/a": "SUFFIX"},
        ),
        ("4 tests only .py", "tests/test_a.py", {"tests/a.json": "SUFFIX", "tests/.py": "HIDDEN"}),
        ("5 .beads closed", "aidlc-docs/beads.md", {".beads/issues.db": "PROTECTED", "tests/.beads": "PROTECTED"}),
        (
            "6 .git closed",
            "aidlc-docs/git.md",
            {".git/config": "PROTECTED", ".git": "PROTECTED", "tests/.git/a.py": "PROTECTED"},
        ),
        ("7 templates only .md", "templates/a.md", {"templates/a.html": "SUFFIX"}),
        (
            "8 hidden closed",
            "aidlc-docs/a.md",
            {"aidlc-docs/.a.md": "HIDDEN", ".envrc": "HIDDEN", "tests/.x/a.py": "HIDDEN"},
        ),
        (
            "8 look-alikes too",
            "aidlc-docs/a.md",
            {".GIT/hooks/x": "HIDDEN", ".g\u200cit/config": "HIDDEN", ".git /x": "HIDDEN"},
        ),
        ("9 no ..", "aidlc-docs/a..b.md", {"aidlc-docs/../a.md": "OUTSIDE", "tests/x/../../.git/a": "OUTSIDE"}),
        (
            "everything else denied",
            "tests/a.py",
            {"src/a.py": "DEFAULT", "setup.py": "DEFAULT", "aidlc-docs-x/a.md": "DEFAULT"},
        ),
        ("the policy is not for agents", "tests/policy.py", {"policy.toml": "PROTECTED"}),
    ],
)
def test_seed_000(rule: str, allowed: str, denied: dict[str, str]) -> None:
    assert code(allowed) == "allowed", rule
    assert {path: code(path) for path in denied} == denied


def layer(path: str, kind: Kind = Kind.FILE) -> str:
    decision = decide(POLICY, ALICE, Request(Operation.CREATE_FILE, WorkspacePath(path), kind), Context(size=1))
    return "denied" if isinstance(decision, Denied) else decision.layer.value


@pytest.mark.parametrize(
    ("tool", "names"),
    [
        ("sed -i", ["sedlZ9MNg"]),
        ("perl -i", ["XXhbHxiE"]),
        ("awk -i inplace", ["plan.md.gawk.wKOuHV"]),
        ("patch", ["plan.md.oMNdP5c"]),
        ("dos2unix, unix2dos", ["d2utmpQYjaEJ"]),
        ("rsync", [".n1.md.LaoNwu", ".env.local.RPuuhw"]),
        ("vim", [".plan.md.swp", ".plan.md.swx", ".plan.md.swa", ".Makefile.swp"]),
        ("nano", [".plan.md.swp"]),
        ("emacs", ["#plan.md#", ".#plan.md", "tmpCrfEOj"]),
        ("joe", [".#plan.md"]),
        ("GIO", [".goutputstream-XXH8Y3"]),
        ("Python's tempfile", ["tmpa8iixja8", "tmp_1b2c3d4"]),
        ("mktemp", ["tmp.r5iUj9ZWmQ"]),
        ("Rust's tempfile", [".tmpmzmWCP"]),
        ("Node by hand", ["plan.md.tmp", "plan.md.tmp12345", "plan.md.tmp-1732242000123"]),
        ("write-file-atomic", ["plan.md.3117992939", "plan.md.987429051", "plan.md.97429051", "plan.md.7429051"]),
        ("Claude Code", ["plan.md.tmp.28094.1732242000123", "plan.md.tmp.28094.9f3c", "plan.md.tmp.9f3c01ab"]),
        ("gofmt -w", ["x.go.1498090150323374484", "x.go.149809015"]),
        ("clang-format -i", ["x.c.temp-stream-b55512"]),
        ("sed -i on macOS", [".!28094!plan.md"]),
        ("pnpm", ["_tmp_28094_9f3c01ab", "_tmp_28094_0123456789abcdef0123456789abcdef"]),
        ("cargo add", ["Cargo.tomlXy12Ab"]),
        ("JetBrains", ["plan.md___jb_tmp___", "plan.md___jb_old___"]),
    ],
)
def test_temporary_names_of_tools_are_staged(tool: str, names: list[str]) -> None:
    """The names were observed, with strace where the tool runs on Linux."""
    for name in names:
        for path in (name, f"aidlc-docs/{name}", f"src/a/{name}"):
            assert layer(path) == Layer.STAGED, tool
            assert layer(path, Kind.DIRECTORY) != Layer.STAGED, tool


def test_temporary_names_of_bonobofs_are_not_staged() -> None:
    """They lie in the source for a moment, where recovery finds them."""
    for _ in range(100):
        assert layer(f"aidlc-docs/{stray_name()}") == "denied"


def test_pattern_matching_is_fast_for_every_name() -> None:
    """Every pattern takes time at most linear in the name."""
    for text in (".", "a.", ".tmp", ".tmp.", "#", ".#", ".sw", "tmp.", "1.", "a.1", ".!1!", "A.o", ".0123456789"):
        for name in (text * (255 // len(text)), text * (255 // len(text)) + "x", "." + text * 50 + "~"):
            assert layer(f"src/{name}") in ("denied", Layer.STAGED)


def test_symlinks_are_staged_too() -> None:
    for path in ("aidlc-docs/.#plan.md", "src/CuQT6jQq"):
        assert layer(path, Kind.SYMLINK) == Layer.STAGED


@pytest.mark.parametrize(
    "name",
    [
        *("notes.txt", "notes", "Makefile", "makefile", "LICENSE", "Dockerfile", "Gemfile", "run.sh", "a", "x.c", "~"),
        *("config.json", "package.json", "main.rs", "app.test.js", "types.d.ts", "a.b.c", "data.sqlite", "x.tar.gz"),
        *(".env", ".env.local", ".env.sample", ".envrc", ".gitignore", ".gitattributes", ".gitmodules", ".npmrc"),
        *(
            ".mcp.json",
            ".vscode",
            ".eslintrc.json",
            ".bashrc",
            ".profile",
            ".pre-commit-config.yaml",
            ".python-version",
        ),
        *("plan.md.bak", "plan.md.backup", "plan.md.orig", "plan.md.rej", "plan.md.old", "plan.md.new", "plan.md.save"),
        *(
            "plan.md.20241122",
            "dump.20241122",
            "app.log.1",
            "app.log.2024-11-22",
            "notes.v1.2",
            "python3.11",
            "x.1.0.0",
        ),
        *(
            "plan.md~",
            "x.tmp~",
            ".plan.md.un~",
            "4913",
            "plan.tmp.txt",
            "tmp",
            "tmp.txt",
            "template",
            "temporary",
            "sed",
        ),
        *("settings.toml", "Cargo.lock", "yarn.lock", "index.lock", "data.db-wal", "data.db-shm", "data.db-journal"),
        *("conftest.txt", "sitecustomize.pyc", "authorized_keys", "id_rsa", "swap", ".sw", "x.swp.txt", "#", "# notes"),
    ],
)
def test_ordinary_names_are_not_staged(name: str) -> None:
    """A staged file vanishes with the session although its write succeeded. A refusal is visible."""
    for path in (name, f"aidlc-docs/{name}", f"src/a/{name}"):
        assert layer(path) == "denied"


def test_no_name_that_seed_000_allows_is_staged() -> None:
    """A proof for all names that end in .md or .py and are not hidden."""
    for text in DOCUMENT["temporary"]:
        name = text.rpartition("/")[2]
        for admitted in ("[!.]*.md", "[!.]*.py"):
            assert not globs_meet(name, admitted), text


def globs_meet(one: str, other: str) -> bool:
    """Whether some name of ASCII characters matches both. Exact: every pair of places in the two is looked at."""
    mine, yours = (re.findall(r"\[[^]]+\]|.", text) for text in (one, other))
    letters = [chr(code) for code in range(32, 127)]
    pending, seen = [(0, 0)], {(0, 0)}
    while pending:
        i, j = pending.pop()
        if (i, j) == (len(mine), len(yours)):
            return True
        a, b = "".join(mine[i : i + 1]), "".join(yours[j : j + 1])
        following = [(i + 1, j)] if a == "*" else []
        following += [(i, j + 1)] if b == "*" else []
        if a and b and any(oracle.name_matches(a, c) and oracle.name_matches(b, c) for c in letters):
            following.append((i + (a != "*"), j + (b != "*")))
        pending += [place for place in following if place not in seen]
        seen.update(following)
    return False


def test_two_globs_overlap_if_a_name_matches_both() -> None:
    """The proof above rests on this."""
    meeting = [("*.md", "a*"), ("*", "x"), ("[a-c]?", "?[!x]"), ("*a*b*", "b*a*"), ("a*", "*a"), ("[!.]*.md", "#*")]
    apart_always = [("*.md", "*.py"), ("a*", "b*"), ("??", "???"), ("[!.]*.md", ".*"), ("*[0-9]", "*d"), ("x", "")]
    assert [pair for pair in meeting if not globs_meet(*pair)] == []
    assert [pair for pair in apart_always if globs_meet(*pair)] == []


@pytest.mark.parametrize(
    "path",
    [
        *("tests/__pycache__/test_a.cpython-311.pyc", ".pytest_cache/v/cache/nodeids", "orchestrator/.mypy_cache/x"),
        *("pytest-cache-files-d9lvt2io/README.md", ".ruff_cache/0.17/x", ".hypothesis/unicode_data/x", ".coverage"),
        *(
            "node_modules/.bin/tsc",
            "web/node_modules/a/index.js",
            ".venv/bin/python",
            "target/debug/app",
            "build/lib/x.so",
        ),
        *("targetk39zTU/CACHEDIR.TAG", "dist/app.whl", "htmlcov/index.html"),
        *("app.egg-info/PKG-INFO", ".pnpm-store/v3/x", ".yarn/cache/x.zip"),
    ],
)
def test_caches_and_build_products_are_scratch(path: str) -> None:
    assert layer(path) == Layer.SCRATCH
    assert layer(path.rpartition("/")[0] or path, Kind.DIRECTORY) == Layer.SCRATCH
    table = POLICY.scratch_table(path)
    assert table is not None
    assert table.max_total


@pytest.mark.parametrize(
    "path",
    [
        *("aidlc-docs/build/plan.md", "aidlc-docs/target/plan.md", "templates/dist/a.md", "tests/build/test_a.py"),
        *("orchestrator/target/a.py", "tests/venv/a.py", "tests/node_modules.py", "aidlc-docs/htmlcov/a.md"),
    ],
)
def test_documents_and_code_are_not_scratch(path: str) -> None:
    assert layer(path) == Layer.SOURCE


def test_no_protected_path_is_scratch() -> None:
    for path in ("node_modules/a/.git/config", "build/.beads/x", "target/.git"):
        assert layer(path) == "denied"
    assert code("policy.toml") == "PROTECTED"


@pytest.mark.parametrize(
    ("path", "limit"),
    [("aidlc-docs/a.md", MB), ("templates/a.md", MB), ("orchestrator/a.py", 500 * KB), ("tests/a.py", 500 * KB)],
)
def test_artifacts_are_at_most_1_mb_and_code_500_kb(path: str, limit: int) -> None:
    assert code(path, known=Context(size=limit)) == "allowed"
    assert code(path, known=Context(size=limit + 1)) == "SIZE"
    assert code(path, Operation.TRUNCATE, Context(size=limit + 1, size_before=limit + 2)) == "allowed"


@pytest.mark.parametrize("path", ["aidlc-docs/a.md", "templates/a.md"])
def test_documents_are_not_executable(path: str) -> None:
    assert code(path, Operation.CREATE_FILE, Context(mode=0o644)) == "allowed"
    assert code(path, Operation.CREATE_FILE, Context(mode=0o755)) == "EXECUTABLE"
    assert code(path, known=Context(size=9, head=b"#!/bin/s")) == "EXECUTABLE"
    assert code(path, known=Context(size=9, head=b"# Title\n")) == "allowed"


def test_code_may_be_a_script() -> None:
    assert code("orchestrator/run.py", Operation.CREATE_FILE, Context(mode=0o755, head=b"#!/usr/b")) == "allowed"


@pytest.mark.parametrize("path", ["AGENTS.md", "README.md"])
def test_agents_md_and_readme_md_are_never_deleted(path: str) -> None:
    assert code(path, Operation.DELETE_FILE, Context(leaves=True)) == "KEEP"
    assert code(path, Operation.RENAME, Context(leaves=True)) == "KEEP"
    assert code(f"aidlc-docs/{path}", Operation.DELETE_FILE, Context(leaves=True)) == "allowed"


@pytest.mark.parametrize("path", [".git/HEAD", ".beads/issues.db", ".git", ".beads"])
def test_git_and_beads_are_never_deleted(path: str) -> None:
    assert code(path, Operation.DELETE_FILE, Context(leaves=True)) == "PROTECTED"
    assert code(path, Operation.RENAME, Context(leaves=True), Kind.DIRECTORY) == "PROTECTED"


def test_directories_may_be_created_where_files_may() -> None:
    for path in ("aidlc-docs", "aidlc-docs/unit-1", "tests/fixtures"):
        assert code(path, Operation.MKDIR, kind=Kind.DIRECTORY) == "allowed"
    assert code("src", Operation.MKDIR, kind=Kind.DIRECTORY) == "DEFAULT"
    assert code("", Operation.SET_TIMES, kind=Kind.DIRECTORY) == "DEFAULT"


def test_devices_are_refused() -> None:
    assert code("aidlc-docs/null.md", Operation.MKNOD, Context(privileged=True), Kind.DEVICE) == "DEVICE"


def test_denials_list_the_allowed_directories_as_the_contracts_do() -> None:
    assert allowed_directories(POLICY, "agent") == [
        "aidlc-docs/ (.md, 1 MB)",
        "templates/ (.md, 1 MB)",
        "orchestrator/ (.py, 500 KB)",
        "tests/ (.py, 500 KB)",
    ]
    assert allowed_directories(POLICY, "nobody") == []


def test_its_examples_pass() -> None:
    assert examples.failures(DOCUMENT) == []
    assert examples.count(DOCUMENT) > 10


def test_it_has_a_description() -> None:
    text = describe(POLICY, "agent")
    for part in (
        "`aidlc-docs/`, `templates/`: `.md` files, at most 1 MB, nothing executable",
        "`.bonobofs/`",
        "`README.md`",
    ):
        assert part in text


def test_every_denial_says_what_to_do() -> None:
    for path, word in {
        "aidlc-docs/a.py": "Write a .md file of at most 1 MB below aidlc-docs/ or templates/.",
        "x": "or a .py file of at most 500 KB below orchestrator/ or tests/.",
        ".git/config": "git gate",
        ".beads/x": "Beads gate",
        "policy.toml": "operator",
        "tests/.x": "without a leading dot",
    }.items():
        decision = decide(POLICY, ALICE, Request(Operation.WRITE_FILE, WorkspacePath(path)))
        assert isinstance(decision, Denied)
        assert word in decision.instead
        assert path not in decision.reason


def test_every_denial_code_can_occur() -> None:
    narrow = compile_policy({**DOCUMENT, "secrets": ["tests/key.py"], "network": {"allow": ["example.com"]}})
    assert code("tests/key.py") == "allowed"
    assert code("", Operation.CONNECT, Context(endpoint=("example.com", 443)), policy=narrow) == "allowed"
    met = {
        code("a/../b"),
        code("tests/x", Operation.MKNOD, kind=Kind.DEVICE),
        code("tests/a.py", known=Context(foreign_names=1)),
        code(".git"),
        code("tests/.x"),
        code("tests/a.md"),
        code("aidlc-docs/a.md", known=Context(mode=0o100)),
        code("README.md", Operation.DELETE_FILE),
        code("x"),
        code("tests/a.py", known=Context(size=MB)),
        code("tests/key.py", policy=narrow),
        code("", Operation.CONNECT, Context(endpoint=("example.org", 443)), policy=narrow),
    }
    elsewhere = {
        Code.ROLE,
        Code.LEASED,
        Code.ASK,
        Code.IDENTITY,
        Code.GIT,
        Code.BEADS,
        Code.UNRECORDED,
        Code.ELSEWHERE,
        Code.SPACE,
    }
    assert met == set(Code) - elsewhere


# The roles


GIT_OF_WORKERS = ["add", "commit", "rm", "mv", "restore"]
EVERY = ["*"]
READING = ["read_file", "list_files", "search_files"]


@pytest.mark.parametrize(
    ("role", "writes", "git"),
    [
        ("agent", ["aidlc-docs/", "templates/", "orchestrator/", "tests/"], EVERY),
        ("control", [], []),
        ("impl", ["aidlc-docs/", "templates/", "orchestrator/", "tests/"], EVERY),
        ("worker", ["aidlc-docs/", "templates/", "orchestrator/", "tests/"], GIT_OF_WORKERS),
        ("lead", ["aidlc-docs/", "templates/", "orchestrator/", "tests/"], EVERY),
        ("orchestrator", ["aidlc-docs/", "templates/", "orchestrator/", "tests/"], EVERY),
        ("Harmbe", ["aidlc-docs/", "templates/"], EVERY),
        ("ProjectMinder", [], []),
    ],
)
def test_every_role_has_the_rights_of_its_seed(role: str, writes: list[str], git: list[str]) -> None:
    """Seed 002: only impl has write_file, control has not. Seed 000: only Harmbe and ProjectMinder create epics.

    The built-in role `agent` may also take back its own changes.
    """
    called = callable_words(POLICY, role)
    assert [line.partition(" ")[0] for line in allowed_directories(POLICY, role)] == writes
    assert called["git"] == git
    assert sorted(called["tools"]) == sorted(
        [*READING, *(["write_file"] if writes else []), *(["undo"] if role == "agent" else [])]
    )
    assert "comment" in called["beads"]
    assert ("epic" in called["beads"]) == (role in ("Harmbe", "ProjectMinder"))
    assert set(called["beads"]) <= {"create", "update", "close", "reopen", "epic", "dep", "label", "comment"}


def test_no_role_permits_a_change_that_the_role_agent_is_refused() -> None:
    for role in POLICY.roles:
        for path in ("src/a.py", ".git/config", "tests/a.md", "aidlc-docs/.x.md", "policy.toml", "README.md"):
            decision = decide(POLICY, ALICE._replace(role=role), Request(Operation.WRITE_FILE, WorkspacePath(path)))
            assert isinstance(decision, Denied), (role, path)
