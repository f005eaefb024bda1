"""A converted Choragen policy permits what Choragen permitted and no more; each dropped line is listed."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from bonobofs.errors import PolicyError
from bonobofs.policy.decision import Permit
from bonobofs.policy.document import parse
from bonobofs.policy.engine import Policy, callable_words, compile_policy, decide
from bonobofs.policy.request import Operation, Principal, Request, WorkspacePath
from scripts.choragen_import import read_governance, read_locks

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)

GOVERNANCE = """\
mutations:
  allow:
    - pattern: "src/**/*.{ts,tsx}"
    - pattern: "docs/**"
      actions: [create, modify]
    - pattern: "tasks/**"
      actions: [move]
  approve:
    - pattern: package.json
      reason: dependencies
  deny:
    - "*.key"
    - pattern: ".git/**"
    - pattern: "docs/adr/**"
      actions: [delete]
    - pattern: "logs/**"
      actions: [modify]
    - pattern: "a**b"
collision_detection:
  strategy: file-lock
  on_collision: warn
"""

ROLES = """\
mutations:
  deny:
    - pattern: .env*
roles:
  impl:
    allow:
      - pattern: "packages/**"
    deny:
      - pattern: "packages/core/**"
        actions: [delete]
  control:
    allow:
      - pattern: "docs/**"
"""


def policy_of(text: str) -> Policy:
    return compile_policy(parse(text, "imported").model_dump(mode="json"))


def allowed(policy: Policy, path: str, operation: Operation = Operation.WRITE_FILE, role: str = "agent") -> bool:
    request = Request(operation, WorkspacePath(path))
    return isinstance(decide(policy, Principal("ann", "", role), request), Permit)


def test_the_converted_policy_permits_what_choragen_permitted() -> None:
    """This includes names that begin with a dot, braces written out, and deletion where Choragen permitted it."""
    text, _ = read_governance(GOVERNANCE)
    policy = policy_of(text)
    assert [path for path in ("src/a/b.ts", "src/.hidden.tsx", "docs/a") if not allowed(policy, path)] == []
    refused = ("src/a.py", "other", "x.key", ".git/config", "package.json", "tasks/a", "logs/a")
    assert [path for path in refused if allowed(policy, path)] == []
    assert allowed(policy, "src/a.ts", Operation.DELETE_FILE)
    assert not allowed(policy, "docs/a", Operation.DELETE_FILE)


def test_every_dropped_policy_line_is_listed() -> None:
    _, lost = read_governance(GOVERNANCE)
    assert [line.partition(":")[0] for line in lost] == [
        "line 6",
        "line 6",
        "line 9",
        "line 16",
        "line 18",
        "line 21",
    ]
    assert "the action move means nothing" in lost[0]
    assert "needed a person's yes" in lost[2]


def test_each_role_writes_its_choragen_paths_only() -> None:
    """A path that a role could not delete is closed to the role, and the output says so."""
    text, lost = read_governance(ROLES)
    policy = policy_of(text)
    assert allowed(policy, "packages/web/a.ts", role="impl")
    assert not allowed(policy, "packages/core/a.ts", role="impl")
    assert not allowed(policy, "docs/a.md", role="impl")
    assert allowed(policy, "docs/a.md", role="control")
    assert not allowed(policy, "docs/a.md", role="agent")
    assert not allowed(policy, "docs/a.md", role="other")
    assert not allowed(policy, ".env.local", role="control")
    assert [line.partition(":")[0] for line in lost] == ["line 9"]


def test_every_role_has_the_read_tools_and_impl_has_write_file() -> None:
    policy = policy_of(read_governance(ROLES)[0])
    reading = ["read_file", "list_files", "search_files"]
    assert callable_words(policy, "control") == {"tools": reading, "git": [], "beads": []}
    assert sorted(callable_words(policy, "impl")["tools"]) == sorted([*reading, "write_file"])
    assert callable_words(policy, "agent")["tools"] == callable_words(policy, "other")["tools"] == []


def test_locks_are_read_with_chain_and_expiry() -> None:
    document = {
        "version": 1,
        "chains": {
            "CHAIN-001": {
                "files": ["src/**", "docs/{a,b}.md", "!x"],
                "acquired": "2026-11-22T11:00:00Z",
                "agent": "impl",
                "expiresAt": "2026-11-22T13:00:00.000Z",
            },
            "CHAIN-002": {"files": ["old/**"], "expiresAt": "2026-11-22T11:59:59Z"},
            "CHAIN-003": {"files": ["ever/**"]},
        },
    }
    locks, lost = read_locks(json.dumps(document, indent=2), NOW)
    assert [(lock.chain, lock.agent, lock.patterns, lock.seconds) for lock in locks] == [
        ("CHAIN-001", "impl", ["src/**", "docs/a.md", "docs/b.md"], 3600),
        ("CHAIN-003", None, ["ever/**"], 365 * 86400),
    ]
    assert [line.partition(":")[0] for line in lost] == ["line 8", "line 14", "line 20"]


ODD_LOCKS = """\
{
\t"version": 2,
\t"owner": "somebody",
\t"chains": {
\t\t"C1": {
\t\t\t"files": ["a", {"b": 1}, ["c"]],
\t\t\t"acquired": "2026-11-22T11:00:00Z",
\t\t\t"expiresAt": "2026-11-22T13:00:00Z",
\t\t\t"agent": null,
\t\t\t"mode": "shared"
\t\t},
\t\t"C2": {"files": ["d"],
\t\t\t"expiresAt": "soon"},
\t\t"C3": {"files": "e",
\t\t\t"expiresAt": null},
\t\t"C4": 5,
\t\t"C1": {"files": ["f"], "expiresAt": "2026-11-22T13:00:00Z"}
\t}
}
"""


def test_every_dropped_lock_is_listed() -> None:
    """This includes locks that no version of Choragen is known to write. The others are converted."""
    locks, lost = read_locks(ODD_LOCKS, NOW)
    assert [(lock.chain, lock.agent, lock.patterns) for lock in locks] == [("C1", None, ["f"])]
    assert sorted({int(line.partition(":")[0].removeprefix("line ")) for line in lost}) == [
        *(2, 3, 5, 6, 10),  # its version, its owner, C1's first place, its files that are none, its mode
        *(13, 14, 16, 17),  # C2's end, C3's files, C4, C1's last place
    ]
    assert read_locks(json.dumps({"chains": {"C": {"files": ["a"], "acquired": "2026-11-22"}}}), NOW)[0][0].reason == (
        "imported from Choragen, acquired there 2026-11-22"
    )


ODD_GOVERNANCE = """\
version: 3
mutations:
  allow: "docs/**"
  prefer:
    - a
  deny:
    - pattern: "x/**"
      actions: delete
      owner: me
collision_detection: block
roles:
  impl:
    allow:
      - "src/**"
      - pattern: "src/**"
        actions: [create, modify]
        reason: "no \\n[role.evil]\\nwrite = [\\"**\\"]"
    approve:
      - "y"
  broken: yes
"""


def test_every_dropped_governance_line_is_listed() -> None:
    text, lost = read_governance(ODD_GOVERNANCE)
    named = sorted({int(line.partition(":")[0].removeprefix("line ")) for line in lost})
    assert named == [1, 3, 4, 7, 8, 9, 10, 14, 18, 20]
    assert "# src/**: no  [role.evil] write" in text
    assert "evil" not in policy_of(text).roles


def test_governance_keys_without_effect_are_listed() -> None:
    _, lost = read_governance("mutations:\n  allow:\n    - a\nroles:\n  impl:\n    allow: [b]\n")
    assert lost == ["line 3: beside roles this decides nothing, there as here"]


@pytest.mark.parametrize("text", ["", "[]", "no: [", "{}"])
def test_a_file_of_another_format_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        read_locks(text, NOW)
