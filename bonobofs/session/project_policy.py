"""`init`: generate a policy for one project from the content of its directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import PolicyError, StateError, UsageError
from bonobofs.policy.compiled import Policy, compile_policy
from bonobofs.policy.decision import Denied, Layer
from bonobofs.policy.document import parse
from bonobofs.policy.engine import decide
from bonobofs.policy.examples import create, failures
from bonobofs.policy.pattern import Matcher
from bonobofs.policy.pattern import parse as parse_pattern
from bonobofs.policy.request import Kind, Operation, Principal, Request, WorkspacePath
from bonobofs.session.mount_checks import check_source
from bonobofs.state.home import write_text
from bonobofs.state.project_policies import exists, policy_file
from bonobofs.system import mounts

_LANGUAGES: Final = {
    "pyproject.toml": "Python",
    "setup.py": "Python",
    "requirements.txt": "Python",
    "package.json": "JavaScript",
    "tsconfig.json": "TypeScript",
    "Cargo.toml": "Rust",
    "go.mod": "Go",
    "pom.xml": "Java",
    "build.gradle": "Java",
    "build.gradle.kts": "Kotlin",
    "Gemfile": "Ruby",
    "composer.json": "PHP",
    "mix.exs": "Elixir",
    "CMakeLists.txt": "C or C++",
    "meson.build": "C or C++",
    "pubspec.yaml": "Dart",
    "Package.swift": "Swift",
}
_LOCKS: Final = (
    *("uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "package-lock.json", "pnpm-lock.yaml", "yarn.lock"),
    *("bun.lock", "bun.lockb", "deno.lock", "Cargo.lock", "go.sum", "Gemfile.lock", "composer.lock", "mix.lock"),
    *("pubspec.lock", "Package.resolved", "gradle.lockfile"),
)
_BUILDS: Final = frozenset(
    {
        *("build", "dist", "out", "target", "bin", "obj", "_build", "site", ".build", ".output", ".next", ".nuxt"),
        *(".svelte-kit", ".astro", ".vite", ".cache", ".turbo", ".parcel-cache", ".angular", ".docusaurus", ".gradle"),
        *(
            "node_modules",
            ".yarn",
            ".pnpm-store",
            "bower_components",
            "venv",
            ".venv",
            "env",
            "__pypackages__",
            ".eggs",
        ),
        *("coverage", "htmlcov", ".nyc_output", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".tox", ".nox"),
        *("__pycache__", ".ipynb_checkpoints", ".dart_tool", ".stack-work", "dist-newstyle", "elm-stuff", "deps"),
        *("cmake-build-debug", "cmake-build-release", ".terraform", ".serverless", "storybook-static", "DerivedData"),
    }
)
"""Directory names that builds and tools create again. An ignored directory of another name may hold work."""
_MAX_SIZE: Final = "8GB"
_MAX_LISTED: Final = 8
_MAX_PATHS: Final = 100_000
_GIT_SECONDS: Final = 60


class Project(NamedTuple):
    """The content of a source when `init` read it."""

    source: Path
    languages: tuple[str, ...]
    lock_files: tuple[str, ...]
    scratch: tuple[str, ...]
    """Patterns of ignored build directories that the preset does not list as scratch."""
    ignored: tuple[str, ...]
    """Other directories of .gitignore, which stay in the source, each as `PATTERN (REASON)`."""


class WrittenPolicy(NamedTuple):
    """Result of `init`."""

    project: Project
    preset: str
    file: Path
    examples: int


def write_policy(home: Path, source: Path, *, force: bool = False) -> WrittenPolicy:
    """Write the policy of a project to the state directory. The source is only read.

    UsageError: a policy exists and `force` is false, or the source is inside a mount. MountError: the source cannot be
    guarded. PolicyError: an example fails. StateError.
    """
    source = Path(os.path.realpath(source))
    if mounts.mount_around(source) is not None:
        raise UsageError(f"{source} lies in a mount of bonobofs; name the source of the mount")
    check_source(source, home)
    file = policy_file(home, source)
    if exists(file) and not force:
        raise UsageError(f"{file}: the project has a policy already; edit it, or replace it with --force")
    preset = "aidlc" if (source / "aidlc-docs").is_dir() else "project"
    paths = _paths(source)
    project = _look_at(source, paths, _compiled(f'extends = "{preset}"\n'))
    policy = _compiled(_body(preset, project, (), ()))
    allow, deny = _examples(policy, project, paths)
    text = _heading(project, preset) + _body(preset, project, allow, deny)
    wrong = failures(parse(text, str(file)).model_dump(mode="json"))
    if wrong:
        raise PolicyError(f"{file}: not written, since an example does not hold: {wrong[0]}")
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write_text(file, text)
    except OSError as error:
        raise StateError(f"{file} cannot be written: {error.strerror}") from error
    return WrittenPolicy(project, preset, file, len(allow) + len(deny))


def _compiled(text: str) -> Policy:
    return compile_policy(parse(text, "init").model_dump(mode="json"))


def _paths(source: Path) -> list[str]:
    """Return the files that git tracks; without a repository, the files at the root and one level below."""
    tracked = _tracked(source)
    if tracked is not None:
        return tracked
    names = sorted(source.iterdir())
    below = [child for name in names if name.is_dir() and not name.is_symlink() for child in _children(name)]
    files = [path for path in (*names, *below) if path.is_file() and not path.is_symlink()]
    return [os.path.relpath(path, source) for path in files[:_MAX_PATHS]]


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _tracked(source: Path) -> list[str] | None:
    """Return the paths in the git index of a source; None without a repository. StateError: git failed."""
    if not os.path.lexists(source / ".git"):
        return None
    # core.fsmonitor of the repository could start a program.
    safe = ("-c", "core.fsmonitor=false", "-c", f"safe.directory={source}")
    try:
        listed = subprocess.run(
            ["git", *safe, "-C", source, "ls-files", "-z"],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_GIT_SECONDS,
        )
    except FileNotFoundError as error:
        raise StateError("git is not installed, so the tracked files are unknown; install git") from error
    except subprocess.TimeoutExpired as error:
        raise StateError(f"git ls-files took longer than {_GIT_SECONDS} s in {source}; try again") from error
    if listed.returncode != 0:
        raise StateError(f"git cannot list the files of {source}: {os.fsdecode(listed.stderr).strip()}")
    return [os.fsdecode(path) for path in listed.stdout.split(b"\0") if path]


def _look_at(source: Path, paths: Sequence[str], preset: Policy) -> Project:
    names = {os.path.basename(path) for path in paths}
    names |= {name.name for name in source.iterdir()}
    scratch, ignored = [], []
    for pattern in _ignored_directories(source):
        reason = _reason_to_keep(pattern, paths, preset)
        if reason is None:
            scratch.append(pattern)
        elif reason:
            ignored.append(f"{pattern} ({reason})")
    return Project(
        source,
        tuple(sorted({language for name, language in _LANGUAGES.items() if name in names})),
        tuple(name for name in _LOCKS if name in names),
        tuple(scratch),
        tuple(ignored),
    )


def _ignored_directories(source: Path) -> Iterator[str]:
    """Yield the directories in the root .gitignore as policy patterns. Wildcards and `!` lines are skipped."""
    try:
        lines = (source / ".gitignore").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    admitted = [line.strip()[1:].strip("/") for line in lines if line.startswith("!")]
    seen = set()
    for line in map(str.strip, lines):
        name = line.removeprefix("**/").strip("/").removesuffix("/*")
        plain = re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", name) is not None
        directory = line.endswith(("/", "/*")) or os.path.basename(name) in _BUILDS or (source / name).is_dir()
        if line.startswith(("#", "!")) or not plain or not directory or {".", ".."} & {*name.split("/")}:
            continue
        # git matches a line without an inner slash at any depth.
        anchored = line.startswith("/") or "/" in name
        pattern = f"{name}/" if anchored else f"**/{name}/"
        if pattern not in seen and not any(f"{one}/".startswith(f"{name}/") for one in admitted):
            seen.add(pattern)
            yield pattern


def _reason_to_keep(pattern: str, paths: Iterable[str], preset: Policy) -> str | None:
    """Return why a directory stays in the source; None if it becomes scratch, "" if the preset has it as scratch."""
    name = os.path.basename(pattern.strip("/"))
    # The preset lists some names at the root only, so test one level below.
    inner = f"a/{name}" if pattern.startswith("**/") else pattern.strip("/")
    decision = decide(
        preset, Principal("", "", "agent"), Request(Operation.MKDIR, WorkspacePath(inner), Kind.DIRECTORY)
    )
    if not isinstance(decision, Denied) and decision.layer is Layer.SCRATCH:
        return ""
    if isinstance(decision, Denied):
        return "the policy refuses it"
    if name not in _BUILDS:
        return "it may hold work, so its changes reach the source"
    below = Matcher([(parse_pattern(pattern), True)])
    if any(below.find(path.split("/")) for path in paths):
        return "git tracks files in it"
    return None


def _examples(policy: Policy, project: Project, paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return paths of the project that the policy permits, and paths that it refuses."""
    agent = Principal("example", "", "agent")
    plain = [path for path in paths if path.isprintable() and path.isascii()]
    known = {*_LANGUAGES, *_LOCKS, "Makefile", "README.md"}
    at_root = [path for path in plain if path in known]
    first_of = {path.partition("/")[0]: path for path in reversed(plain) if "/" in path}
    allow, closed = list[str](), list[str]()
    for path in [*at_root, *sorted(first_of.values())]:
        if not isinstance(decision := create(policy, agent, path), Denied) and decision.layer is Layer.SOURCE:
            allow.append(path)
    for path in plain:
        decision = create(policy, agent, path)
        if isinstance(decision, Denied) and len(closed) < _MAX_LISTED:
            closed.append(path)
    scratch = [re.sub(r"^\*\*/", "", pattern) + "example" for pattern in project.scratch[:_MAX_LISTED]]
    return allow[:_MAX_LISTED], [*closed, ".git/config", *scratch]


def _heading(project: Project, preset: str) -> str:
    def found(name: str, values: Sequence[str]) -> str:
        return f"#   {name:<12} {', '.join(values) or 'none'}\n"

    return (
        f"# The policy of {json.dumps(str(project.source))}, written by `bonobofs init` on"
        f" {datetime.now(UTC).date()}.\n"
        "# Found there:\n"
        + found("languages", project.languages)
        + found("lock files", project.lock_files)
        + found("scratch", [f"{one}, which .gitignore names" for one in project.scratch])
        + found("not scratch", project.ignored)
        + "#\n"
        "# After each change: bonobofs policy check FILE, and bonobofs policy test FILE.\n"
        "# `bonobofs policy show` prints all that it inherits. The policy.toml of bonobofs explains every key.\n\n"
        f"# All keys of the preset {preset} hold, unless this file sets them. Lists here are added to those of the\n"
        "# preset. A list, rule or role that `replace` names is dropped first:\n"
        '#   replace = ["hidden", "rule.sources"]\n'
    )


def _body(preset: str, project: Project, allow: Sequence[str], deny: Sequence[str]) -> str:
    scratch = ""
    if project.scratch:
        scratch = (
            "# Build directories that .gitignore names. Changes in them stay in the session and end with it.\n"
            f'[[scratch]]\n{_array("paths", project.scratch)}max_total = "{_MAX_SIZE}"\n\n'
        )
    return (
        f'extends = "{preset}"\n\n{scratch}'
        "# To refuse more, with the reason that the agent reads:\n"
        '#\n# [[rule]]\n# name = "generated"\n# paths = ["**/*_pb2.py"]\n'
        '# refuse = "This file is generated; change its source."\n\n'
        "# Paths of this project, tried by `bonobofs policy test` in the default role.\n"
        f"[examples]\n{_array('allow', allow)}{_array('deny', deny)}"
    )


def _array(key: str, values: Sequence[str]) -> str:
    return f"{key} = [\n" + "".join(f"    {json.dumps(value)},\n" for value in values) + "]\n"
