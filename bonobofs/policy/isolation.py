"""The boundaries of an agent's worktree, as CLEO's programs define them: by the text of paths, without disk access.

The caller resolves symlinks first, because the text of a path does not show that a symlink leads out of the worktree.
The shell exports the variables CLEO_* for other programs. No decision of bonobofs reads them from the environment.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MUTATION_SUBCOMMANDS: Final = frozenset({"add", "commit", "rm", "mv", "restore", "apply", "am"})
"""The subcommands of git that write to the index or create commits, and so must run inside the worktree."""

ISOLATION_ENV_KEYS: Final = (
    "CLEO_WORKTREE_ROOT",
    "CLEO_AGENT_ROLE",
    "CLEO_WORKTREE_BRANCH",
    "CLEO_PROJECT_HASH",
    "CLEO_SESSION_ID",
    "CLEO_AGENT_ID",
)
"""Variables of an isolated shell. The order is an interface: the first two are the root and the role."""

ISOLATED_ROLE: Final = "worker"
OUTSIDE_WORKTREE: Final = "E_GIT_BOUNDARY_CWD_OUTSIDE_WORKTREE"
OUTSIDE_PREFIXES: Final = "E_BOUNDARY_VIOLATION"


@dataclass(frozen=True, slots=True)
class AbsolutePathRules:
    """The absolute paths that a tool may use."""

    allowed_prefixes: tuple[str, ...]
    """Absolute directories. Each permits itself and everything below it."""
    denied_outside_worktree: bool = True
    """False: every path is permitted."""


@dataclass(frozen=True, slots=True)
class BoundaryContract:
    """The parameters of an isolated shell."""

    worktree_root: str
    role: str
    absolute_path_rules: AbsolutePathRules
    env_keys: tuple[str, ...] = ISOLATION_ENV_KEYS


@dataclass(frozen=True, slots=True)
class BoundaryViolation:
    """The reason why a path is outside, in CLEO's words."""

    code: str
    boundary: str
    """`isolation` or `absolute-path`."""
    message: str
    remediation: str
    context: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AbsolutePathResult:
    """The result for one absolute path. It is true if the path is permitted."""

    allowed: bool
    message: str = ""

    def __bool__(self) -> bool:
        return self.allowed


@dataclass(frozen=True, slots=True)
class IsolatedShell:
    """The setup of a shell for one worktree."""

    cwd: str
    env: dict[str, str]
    preamble: str
    """Lines of sh that change to the worktree, exit if that fails, and export `env`."""
    boundary_contract: BoundaryContract


def is_cwd_inside_worktree(cwd: str, worktree_root: str) -> bool:
    """True if a directory is the root or below it, after both are made absolute and normalized."""
    return _is_below(_plain(os.path.abspath(cwd)), _plain(os.path.abspath(worktree_root)))


def evaluate_isolation_boundary(
    subcommand: str, *, env: Mapping[str, str] | None = None, cwd: str | None = None
) -> BoundaryViolation | None:
    """Return why this subcommand of git may not run here, or None if it may.

    Callers check this first. `env` has the keys of ISOLATION_ENV_KEYS. `cwd` is the working directory, or "" if it was
    deleted. The defaults are the environment and the working directory of this process.
    """
    env = os.environ if env is None else env
    root, role = env.get(ISOLATION_ENV_KEYS[0], ""), env.get(ISOLATION_ENV_KEYS[1], "")
    if role != ISOLATED_ROLE or not root or subcommand not in MUTATION_SUBCOMMANDS:
        return None
    cwd = _working_directory() if cwd is None else cwd
    if cwd and is_cwd_inside_worktree(cwd, root):
        return None
    return BoundaryViolation(
        OUTSIDE_WORKTREE,
        "isolation",
        f'git {subcommand} refused: the working directory "{cwd}" is outside the assigned worktree "{root}"',
        "Run it from inside the assigned worktree.",
        {"cwd": cwd, "worktree_root": root, "role": role},
    )


def validate_absolute_path(absolute_path: str, contract: BoundaryContract) -> AbsolutePathResult:
    """Check a path against a contract. If `denied_outside_worktree` is true, no relative path is permitted."""
    rules = contract.absolute_path_rules
    if not rules.denied_outside_worktree:
        return AbsolutePathResult(True)
    if not os.path.isabs(absolute_path) or "\0" in absolute_path:
        return AbsolutePathResult(False, f'"{absolute_path}" is no absolute path')
    path = _plain(absolute_path)
    if any(_is_below(path, _plain(prefix)) for prefix in rules.allowed_prefixes):
        return AbsolutePathResult(True)
    return AbsolutePathResult(False, f'"{absolute_path}" is outside "{contract.worktree_root}"')


def enforce_absolute_path_boundary(absolute_path: str, contract: BoundaryContract) -> BoundaryViolation | None:
    """Return why a tool may not use this absolute path, or None if it may."""
    result = validate_absolute_path(absolute_path, contract)
    if result:
        return None
    return BoundaryViolation(
        OUTSIDE_PREFIXES,
        "absolute-path",
        result.message,
        "Use a path within the assigned worktree.",
        {
            "attempted_path": absolute_path,
            "worktree_root": contract.worktree_root,
            "allowed_prefixes": ", ".join(contract.absolute_path_rules.allowed_prefixes),
        },
    )


def boundary_of(worktree_root: str, role: str = "") -> BoundaryContract:
    """Return the contract that permits one worktree only."""
    return BoundaryContract(worktree_root, role, AbsolutePathRules((worktree_root,)))


def provision_isolated_shell(
    *,
    worktree_path: str,
    branch: str,
    role: str,
    project_hash: str,
    session_id: str = "",
    agent_id: str = "",
) -> IsolatedShell:
    """Return the setup of a shell in this worktree. It depends on the arguments only. Empty ids are not exported.

    ValueError: the path is not absolute, or a value contains a NUL.
    """
    values = (worktree_path, role, branch, project_hash, session_id, agent_id)
    if not os.path.isabs(worktree_path) or any("\0" in value for value in values):
        raise ValueError("a worktree is named by its absolute path, and nothing that is exported holds a NUL")
    root = _plain(worktree_path)
    env = dict(zip(ISOLATION_ENV_KEYS, (root, *values[1:]), strict=True))
    env = {key: value for key, value in env.items() if value or key not in ISOLATION_ENV_KEYS[4:]}
    return IsolatedShell(root, env, _preamble(root, env), boundary_of(root, role))


def _preamble(root: str, env: Mapping[str, str]) -> str:
    quoted = shlex.quote(root)
    below = shlex.quote(root.rstrip("/") + "/")
    lines = [
        f"cd -- {quoted} || exit 1",
        f'case "$PWD" in {quoted}|{below}*) ;; *) echo "ISOLATION ERROR: not in the worktree" >&2; exit 1 ;; esac',
        *(f"export {key}={shlex.quote(value)}" for key, value in env.items()),
    ]
    return "\n".join(lines) + "\n"


def _plain(path: str) -> str:
    """Normalize an absolute path. POSIX does not define two leading slashes; they become one."""
    return "/" + os.path.normpath(path).lstrip("/")


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
