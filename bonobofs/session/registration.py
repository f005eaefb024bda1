"""Choose a session's policy and register it: agent, role, policy and tracked files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from bonobofs.errors import GitError, PolicyError, StateError, UsageError
from bonobofs.policy import presets
from bonobofs.policy.compiled import Tracked
from bonobofs.policy.engine import Policy, compile_policy
from bonobofs.policy.presets import PRESET, PRESETS, origin_of, preset_file
from bonobofs.state import project_policies, session_rows
from bonobofs.state.home import new_uuid, read_document, session_directory, write_document
from bonobofs.state.sessions import PolicyMark, Session, save
from bonobofs.system.processes import boot_id


class ChosenPolicy(NamedTuple):
    """A policy, its origin, and its two forms."""

    origin: str
    """`preset:NAME`, else the file's path without symlinks."""
    file: Path
    """The requested path. A reload reads it again."""
    plain: dict[str, Any]
    """`PolicyDocument` as JSON data, the input of `compile_policy` in every process."""
    compiled: Policy
    why: str
    """Why this policy was chosen, without a full stop; empty after a reload."""

    @property
    def default_role(self) -> str:
        """The role of an agent without a role of its own."""
        return str(self.plain["default_role"])

    def observing(self) -> Self:
        """Return the policy with `observe`."""
        plain = {**self.plain, "observe": True}
        return self._replace(plain=plain, compiled=compile_policy(plain))


AUDIT_DEFAULTS: Final = {"keep": "90d", "max_total": 5_000_000_000}
"""`AuditTable` as JSON data."""


def note_on_audit(home: Path, file: Path, policy: Mapping[str, Any]) -> str:
    """Return a sentence if limits of the audit log in the policy have no effect, else ""."""
    if policy["audit"] == AUDIT_DEFAULTS or os.path.realpath(file) == os.path.realpath(home / "policy.toml"):
        return ""
    return f"[audit] has no effect in {file}; only {home / 'policy.toml'} limits the audit log"


class SessionRequest(NamedTuple):
    """Agent, role, chain and issue of a new session. Default: the user's login name, and the agent's default role."""

    agent: str | None = None
    role: str | None = None
    chain: str | None = None
    """The chain of the session, which then holds its leases."""
    issue: str | None = None
    """The issue that the session works on."""
    is_operator: bool = False
    """True for a session of the operator, whose agent has a reserved label."""


class RegisteredSession(NamedTuple):
    """A session in the register, before a process serves it."""

    session: Session
    policy: ChosenPolicy
    registered: session_rows.MountingAgent
    tracked: TrackedFiles


def choose_policy(
    home: Path, policy: Path | None, source: Path | None = None, *, preset: str | None = None, store: bool = False
) -> ChosenPolicy:
    """Choose a session's policy: `policy`, else that of the project, else that of the state directory, else a preset.

    `source` defaults to the working directory. `policy` is a file or the name of a preset. `preset` is used in the last
    case; with None it is the stored preset, and before the first session `aidlc` if the source has aidlc-docs/, else
    `project`. `store` stores that choice.

    PolicyError: the policy cannot be read or enforced. UsageError: the file is inside the source, where a program of
    the session could change it. StateError.
    """
    if policy is not None:
        if str(policy) in PRESETS:
            return _of_preset(home, str(policy), "named")
        return load_policy(home, Path(os.path.abspath(policy)), source, "named")
    source = Path(os.path.realpath(source or "."))
    for file, why in (
        (project_policies.policy_file(home, source), "the policy of this project"),
        (home / "policy.toml", "the policy of this state directory"),
    ):
        if project_policies.exists(file):
            # A source never contains the state directory, but the working directory of `why` and `policy show` may.
            return load_policy(home, file, None if source in (home, *home.parents) else source, why)
    if preset is not None:
        return _of_preset(home, preset, "no other policy is given")
    return _of_preset(home, *_preset_for(home, source, store=store))


def _preset_for(home: Path, source: Path, *, store: bool) -> tuple[str, str]:
    """Return the preset for a source without a policy, and the reason."""
    stored = project_policies.stored_preset(home, source)
    if stored is not None:
        return stored.preset, f"stored at the first session of this source, on {stored.chosen[:10]}"
    has_docs = os.path.isdir(source / "aidlc-docs")
    preset = "aidlc" if has_docs else "project"
    if store:
        preset = project_policies.store_preset(home, source, preset)
    return preset, "the source has aidlc-docs/" if has_docs else "the source has no aidlc-docs/"


def _of_preset(home: Path, name: str, why: str) -> ChosenPolicy:
    if name not in PRESETS:
        raise PolicyError(f"there is no preset {name}; use one of {', '.join(PRESETS)}")
    file = preset_file(name)
    plain = _load_plain(home, file)
    return ChosenPolicy(f"{PRESET}{name}", file, plain, compile_policy(plain), why)


def load_policy(home: Path, file: Path, source: Path | None, why: str = "") -> ChosenPolicy:
    """Load a policy file. PolicyError: absent or invalid. UsageError: it is inside the source."""
    origin = Path(os.path.realpath(file))
    if source is not None and source in origin.parents:
        raise UsageError(
            f"the policy {origin} lies inside the source, where an agent could change it; copy it elsewhere"
        )
    if not origin.is_file():
        raise PolicyError(f"there is no policy file {origin}; name one, or leave --policy out")
    plain = _load_plain(home, origin)
    return ChosenPolicy(origin_of(origin), file, plain, compile_policy(plain), why)


def default_agent() -> str:
    """Return the default label of an agent: the user's login name, else `uid-NUMBER`."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid-{os.getuid()}"


def identity_of(home: Path, label: str) -> str | None:
    """Return the UUID of the agent of that label; None if there is none or it was removed. StateError."""
    from bonobofs.state.agent_registry import identity_of as identity  # noqa: PLC0415 - loads SQLAlchemy
    from bonobofs.state.database import Database  # noqa: PLC0415

    with Database.open(home) as database:
        return identity(database, label)


def register_session(
    home: Path,
    *,
    source: Path,
    mountpoint: Path | None,
    request: SessionRequest,
    policy: ChosenPolicy,
    transport: str,
) -> RegisteredSession:
    """Register a new session: a row in the database, a directory (0700), session.json and policy.json (0600).

    It also registers a new agent. ForbiddenError: the agent may not mount with that role. StateError, UsageError.
    """
    agent, role, chain, issue, is_operator = request
    if chain is not None:
        session_rows.check_label(chain, "a chain")
    with session_rows.open_queries(home) as database:
        label = agent if agent is not None else default_agent()
        registered = session_rows.register(database, label, role, is_operator=is_operator)
        session = Session(
            session=new_uuid(),
            agent=registered.label,
            agent_id=registered.id,
            team=registered.team,
            role=role or registered.role or policy.default_role or "agent",
            chain=chain,
            source=str(source),
            mountpoint=None if mountpoint is None else str(mountpoint),
            pid=None,
            starttime=None,
            transport=transport,
            policy=PolicyMark(policy.origin, policy.compiled.digest, policy.compiled.generation),
            boot_id=boot_id(),
            started=datetime.now(UTC).isoformat(),
            ended=None,
            issue=issue,
            source_inode=os.stat(source).st_ino,
        )
        session_rows.insert_session(database, home, session)
    directory = session_directory(home, session.session)
    directory.mkdir(mode=0o700)
    write_document(directory / "policy.json", policy.plain)
    tracked = find_tracked(home, source, policy.compiled)
    if tracked.paths:
        save_tracked(home, session.session, tracked.paths)
        policy = policy._replace(compiled=policy.compiled.with_tracked(Tracked(tracked.paths)))
    save(home, session)
    return RegisteredSession(session, policy, registered, tracked)


MOST: Final = 10_000
"""Number of tracked paths that a session stores. Above it, whole directories count as tracked."""
_FILE: Final = "tracked.json"


class TrackedFiles(NamedTuple):
    """The paths that git tracks and that a [[scratch]] or `secrets` matches."""

    paths: list[str]
    """Relative to the source. A path that ends in a slash includes everything below it."""
    notes: tuple[str, ...] = ()
    """Messages to the operator, one sentence each."""


def find_tracked(home: Path, source: Path, policy: Policy) -> TrackedFiles:
    """Find the tracked paths of a source. If its repository cannot be read, all existing scratch paths count."""
    if not policy.scratch and not policy.secrets:
        return TrackedFiles([])
    root = next((above for above in (source, *source.parents) if os.path.lexists(above / ".git")), None)
    if root is None:
        return TrackedFiles([])
    prefix = "" if root == source else f"{source.relative_to(root)}/"

    def wanted(path: str) -> bool:
        parts = path[len(prefix) :].split("/")
        return path.startswith(prefix) and (policy.is_scratch(parts) or bool(policy.secrets.find(parts)))

    from bonobofs.git.private_checkout import tracked_paths  # noqa: PLC0415 - only for a repository

    try:
        tracked = tracked_paths(root, home, wanted)
    except GitError as error:
        note = (
            f"Git cannot list its tracked files ({error}), so in this session every existing file at a scratch path "
            "counts as tracked and is judged by the rules."
        )
        return TrackedFiles(compact(_existing(source, policy)), (note,))
    names = {path[len(prefix) :] for path in tracked}
    # An untracked secret next to many tracked ones stays hidden, because only their names count.
    secrets = {name for name in names if policy.secrets.find(name.rstrip("/").split("/"))}
    return TrackedFiles([*compact(names - secrets), *sorted(secrets)])


def _existing(source: Path, policy: Policy) -> list[str]:
    """Return the existing scratch paths of the source: a directory with a slash, without the names below it."""
    paths: list[str] = []
    waiting = [""]
    while waiting:
        above = waiting.pop()
        try:
            entries = list(os.scandir(source / above))
        except OSError:
            continue  # the session cannot list this directory either
        for entry in entries:
            path = above + entry.name
            directory = entry.is_dir(follow_symlinks=False)
            if policy.is_scratch(path.split("/")):
                paths.append(f"{path}/" if directory else path)
            elif directory and entry.name != ".git":
                waiting.append(f"{path}/")
    return paths


def compact(paths: Iterable[str], most: int = MOST) -> list[str]:
    """Return paths that cover `paths`: while there are more than `most`, the deepest become their parents.

    Paths at the root stay, however many there are.
    """
    kept = set(paths)
    depth = max((path.rstrip("/").count("/") for path in kept), default=0)
    while len(kept) > most and depth:
        kept = {
            path if path.rstrip("/").count("/") < depth else f"{path.rstrip('/').rpartition('/')[0]}/" for path in kept
        }
        depth -= 1
    return sorted(kept)


def save_tracked(home: Path, session: str, paths: list[str]) -> None:
    """Write tracked paths to the session's directory, for `why` and `policy show`. OSError."""
    write_document(session_directory(home, session) / _FILE, {"paths": paths})


def load_tracked(home: Path, session: str) -> Tracked | None:
    """Read the paths of `save_tracked`; None if there are none. StateError."""
    path = session_directory(home, session) / _FILE
    paths = read_document(path)["paths"] if path.exists() else []
    return Tracked(paths) if paths else None


def _load_plain(home: Path, file: Path) -> dict[str, Any]:
    """Return the policy of a file as JSON data, the input of `compile_policy`. PolicyError.

    The validated policy is stored in the state directory, because loading pydantic takes longer than a mount. It is
    used only while its file, the presets and the modules that validate a policy are those that made it.
    """
    place = home / "policies" / f"{hashlib.sha256(os.fsencode(file)).hexdigest()}.cache"
    key = _policy_key(file)
    with contextlib.suppress(OSError, StateError, KeyError):
        stored = read_document(place)
        if key is not None and stored["key"] == key:
            plain: dict[str, Any] = stored["policy"]
            return plain
    from bonobofs.policy.document import load  # noqa: PLC0415 - loads pydantic

    plain = load(file).model_dump(mode="json")
    # A file that changed meanwhile is not stored: the key would belong to another content.
    if key is not None and key == _policy_key(file):
        with contextlib.suppress(OSError):
            place.parent.mkdir(mode=0o700, exist_ok=True)
            write_document(place, {"key": key, "policy": plain})
    return plain


def _policy_key(file: Path) -> str | None:
    """Return a digest of all that decides what the file means; None if a part cannot be read."""
    try:
        whole = hashlib.sha256(file.read_bytes())
        for path in _policy_parts():
            status = os.stat(path)
            whole.update(f"{path} {status.st_mtime_ns} {status.st_size}".encode(errors="surrogateescape"))
    except OSError:
        return None
    return whole.hexdigest()


def _policy_parts() -> Iterator[str]:
    """Yield the files of the package that decide what a policy file means."""
    package = Path(presets.__file__).resolve().parent
    for directory in (package, package / "presets"):
        yield from sorted(entry.path for entry in os.scandir(directory) if entry.is_file())
    yield str(presets.packaged_default())
