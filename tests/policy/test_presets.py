"""The presets: what each allows and denies; shared lists exist once."""

from __future__ import annotations

import pytest

from bonobofs.git.branch_rules import new_branch, rules_of
from bonobofs.policy import examples
from bonobofs.policy.decision import Code, Denied, Layer
from bonobofs.policy.document import load
from bonobofs.policy.engine import Policy, compile_policy, decide
from bonobofs.policy.examples import warnings
from bonobofs.policy.presets import PRESETS, origin_of, preset_file
from bonobofs.policy.request import Context, Kind, Operation, Principal, Request, WorkspacePath

PLAIN = {name: load(preset_file(name)).model_dump(mode="json") for name in PRESETS}
POLICIES = {name: compile_policy(plain) for name, plain in PLAIN.items()}
SMALL = Context(size=1, mode=0o644, head=b"a")


def verdict(policy: Policy, path: str, role: str = "agent", operation: Operation = Operation.CREATE_FILE) -> str:
    kind = Kind.DIRECTORY if path.endswith("/") else Kind.FILE
    chosen = Operation.MKDIR if path.endswith("/") else operation
    decision = decide(
        policy, Principal("alice", "1", role), Request(chosen, WorkspacePath(path.rstrip("/")), kind), SMALL
    )
    if isinstance(decision, Denied):
        return ASKED if decision.code is Code.ASK else f"{decision.code} {decision.rule}"
    return decision.layer.value


ASKED = "ASK"
SECRET = "PROTECTED secrets"
PROJECT = {
    "src/app.py": "source",
    "src/": "source",
    "tests/test_app.py": "source",
    "Makefile": "source",
    "package.json": "source",
    "pyproject.toml": "source",
    "Cargo.toml": "source",
    "build.rs": "source",
    "setup.py": "source",
    "conftest.py": "source",
    "Dockerfile": "source",
    "README.md": "source",
    "CLAUDE.md": ASKED,
    "docs/CLAUDE.md": ASKED,
    "AGENTS.md": ASKED,
    "docs/AGENTS.md": ASKED,
    "uv.lock": "source",
    "package-lock.json": "source",
    "GEMINI.md": ASKED,
    ".cursorrules": ASKED,
    "venv39/lib/python3.9/site-packages/x.pth": ASKED,
    "models/weights.pth": "source",
    ".gitignore": "source",
    ".gitattributes": ASKED,
    "docs/.gitattributes": ASKED,
    ".editorconfig": "source",
    ".eslintrc.json": "source",
    ".prettierrc": "source",
    ".python-version": "source",
    ".github/CODEOWNERS": "source",
    ".github/ISSUE_TEMPLATE/bug.md": "source",
    ".github/": "source",
    ".env.example": "source",
    "weights/model.pth": "source",
    "environment.py": "source",
    "docs/keyboard.md": "source",
    "scripts/run.sh": "source",
    "node_modules/left-pad/.vscode/settings.json": "scratch",
    "node_modules/x/.github/workflows/ci.yml": "scratch",
    ".venv/lib/python3.12/site-packages/certifi/cacert.pem": "scratch",
    ".venv/lib/python3.12/site-packages/sitecustomize.py": "scratch",
    ".venv/lib/python3.12/site-packages/distutils-precedence.pth": "scratch",
    "target/debug/app": "scratch",
    "dist/app.whl": "scratch",
    ".git/config": "PROTECTED protect:**/.git/",
    ".git": "PROTECTED protect:**/.git/",
    "sub/.git/hooks/post-checkout": "PROTECTED protect:**/.git/",
    "node_modules/x/.git/config": "PROTECTED protect:**/.git/",
    ".beads/issues.db": "PROTECTED protect:**/.beads/",
    "policy.toml": "PROTECTED protect:policy.toml",
    ".bonobofs/x": "PROTECTED protect:.bonobofs/",
    "../app.py": "OUTSIDE outside",
    ".github/workflows/ci.yml": ASKED,
    ".github/workflows/": ASKED,
    ".github/actions/build/action.yml": ASKED,
    ".gitlab-ci.yml": ASKED,
    "Jenkinsfile": ASKED,
    ".circleci/config.yml": ASKED,
    "azure-pipelines.yml": ASKED,
    ".claude/settings.json": ASKED,
    ".claude/hooks/run.sh": ASKED,
    "packages/web/.claude/": ASKED,
    ".mcp.json": ASKED,
    ".cursor/mcp.json": ASKED,
    ".codex/config.toml": ASKED,
    ".gemini/settings.json": ASKED,
    ".vscode": ASKED,
    ".vscode/tasks.json": ASKED,
    "packages/web/.vscode/settings.json": ASKED,
    "app.code-workspace": ASKED,
    ".idea/workspace.xml": ASKED,
    ".envrc": ASKED,
    ".husky/pre-commit": ASKED,
    ".pre-commit-config.yaml": ASKED,
    ".gitmodules": ASKED,
    ".devcontainer/devcontainer.json": ASKED,
    "src/sitecustomize.py": ASKED,
    ".env": SECRET,
    "app/.env.production": SECRET,
    "certs/server.pem": SECRET,
    "server.key": SECRET,
    ".ssh/id_ed25519": SECRET,
    "deploy/id_rsa": SECRET,
    ".netrc": SECRET,
    ".npmrc": SECRET,
    ".aws/credentials": SECRET,
    "credentials.json": SECRET,
}


@pytest.mark.parametrize("path", PROJECT)
def test_the_decisions_of_the_preset_project(path: str) -> None:
    assert verdict(POLICIES["project"], path) == PROJECT[path]


@pytest.mark.parametrize("operation", [Operation.WRITE_FILE, Operation.DELETE_FILE, Operation.RENAME, Operation.LINK])
def test_project_refuses_every_kind_of_change_of_a_protected_path(operation: Operation) -> None:
    for path in (".vscode/tasks.json", ".mcp.json", ".env", ".github/workflows/ci.yml"):
        assert verdict(POLICIES["project"], path, operation=operation).startswith(("PROTECTED", ASKED))


def test_a_directory_of_settings_cannot_be_a_symlink() -> None:
    """With a symlink in its place, a file of another name could take effect."""
    request = Request(Operation.SYMLINK, WorkspacePath(".vscode"), Kind.SYMLINK)
    decision = decide(POLICIES["project"], Principal("alice", "1", "agent"), request, Context(target="editor"))
    assert isinstance(decision, Denied)
    assert decision.rule == "ask:**/.vscode/"


@pytest.mark.parametrize("role", ["impl", "worker", "lead", "orchestrator"])
def test_the_roles_of_aidlc_keep_their_denials(role: str) -> None:
    assert verdict(POLICIES["project"], "src/app.py", role) == "source"
    assert verdict(POLICIES["project"], ".mcp.json", role) == ASKED
    assert verdict(POLICIES["project"], "src/app.py", "control").startswith("ROLE")


def test_a_denial_says_why_and_what_to_do() -> None:
    request = Request(Operation.CREATE_FILE, WorkspacePath(".env"))
    decision = decide(POLICIES["project"], Principal("alice", "1", "agent"), request, SMALL)
    assert isinstance(decision, Denied)
    assert "secrets or credentials" in decision.reason
    assert "tell the operator" in decision.instead


def test_each_pattern_of_the_rule_pack_says_what_would_run_it() -> None:
    for name in ("project", "strict"):
        text = preset_file(name).read_text(encoding="utf-8")
        pack = text[text.index("[[ask]]") : text.index("[[rule]]", text.index("[[ask]]"))]
        bare = [line for line in pack.splitlines() if line.startswith('    "') and "#" not in line]
        assert bare in ([], ['    "**/sitecustomize.py",', '    "**/usercustomize.py",']), name


@pytest.mark.parametrize("path", ["tests/test_app.py", "Makefile", "package.json", "setup.py", "src/app_test.go"])
def test_strict_asks_for_code_that_a_person_runs(path: str) -> None:
    assert verdict(POLICIES["strict"], path) == ASKED
    assert verdict(POLICIES["project"], path) == "source"
    assert verdict(POLICIES["strict"], "src/app.py") == "source"
    for refused in (".mcp.json", ".github/workflows/ci.yml"):
        assert verdict(POLICIES["strict"], refused) == ASKED
    assert verdict(POLICIES["strict"], ".env") == "PROTECTED secrets"


def test_git_in_project_requires_no_prefix_and_no_message_pattern() -> None:
    rules = rules_of(PLAIN["project"])
    assert new_branch(rules, "fix-login") is None
    assert rules.message_pattern.match("Fix the login")
    for branch in ("main", "master", "develop"):
        assert new_branch(rules, branch) is not None
    assert new_branch(rules_of(PLAIN["aidlc"]), "fix-login") is not None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("docs/guide.md", "source"),
        ("docs/guide/", "source"),
        ("docs/a.py", "SUFFIX docs"),
        ("src/app.py", "DEFAULT default"),
        ("docs/.x.md", "HIDDEN hidden"),
        (".git/config", "PROTECTED protect:**/.git/"),
    ],
)
def test_docs_allows_only_markdown_below_docs(path: str, expected: str) -> None:
    assert verdict(POLICIES["docs"], path) == expected


def test_read_only_allows_no_change_of_the_source() -> None:
    for path in ("src/app.py", "docs/a.md", "aidlc-docs/a.md", "README.md", "x/", "a.tmp", ".env"):
        assert verdict(POLICIES["read-only"], path).split()[0] in ("DEFAULT", "ROLE", "HIDDEN")
    assert verdict(POLICIES["read-only"], "target/debug/app") == Layer.SCRATCH
    assert verdict(POLICIES["read-only"], "src/app.py", "worker") == "ROLE role"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_passes_policy_check_and_policy_test(name: str) -> None:
    assert examples.failures(PLAIN[name]) == []
    assert examples.count(PLAIN[name]) >= 5
    assert [text for place, text in warnings(PLAIN[name]) if place[0] != "role"] == []
    assert origin_of(preset_file(name)) == f"preset:{name}"


def test_the_shared_lists_are_those_of_aidlc() -> None:
    for name in ("project", "docs"):
        for key in ("temporary", "scratch", "protect", "role"):
            mine = {one: {**role, "examples": None} for one, role in PLAIN[name]["role"].items()}
            theirs = {one: {**role, "examples": None} for one, role in PLAIN["aidlc"]["role"].items()}
            assert (mine == theirs) if key == "role" else (PLAIN[name][key] == PLAIN["aidlc"][key])


@pytest.mark.parametrize("text", [{}, {"default": "allow", "hidden": ["**"], "devices": True}])
def test_git_and_beads_are_protected_by_every_policy(text: dict[str, object]) -> None:
    policy = compile_policy(text)
    for path in (".git", ".git/hooks/x", "a/b/.git/config", ".beads/issues.db", "a/.beads"):
        assert verdict(policy, path).startswith("PROTECTED")
