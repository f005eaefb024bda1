"""What a session is made of: whose it is, in which role, under which policy, and where its record goes."""

from __future__ import annotations

import os
import pwd
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.errors import GitError, PolicyError, UsageError
from bonobofs.policy.compiled import Tracked
from bonobofs.policy.document import PolicyDocument, load
from bonobofs.policy.engine import Policy, compile_policy
from bonobofs.policy.presets import PRESET, PRESETS, origin_of, preset_file
from bonobofs.state import agent_registry, heartbeats, project_policies
from bonobofs.state.database import Database
from bonobofs.state.home import read_document, session_directory, write_document
from bonobofs.state.sessions import PolicyMark, Session, save
from bonobofs.system.processes import boot_id


class ChosenPolicy(NamedTuple):
    """A policy, where it came from, and its two forms."""

    origin: str
    """`preset:NAME`, else the file without symlinks."""
    file: Path
    """The name by which it was chosen, and is looked for again when it changes."""
    document: PolicyDocument
    compiled: Policy
    why: str
    """Why this policy was chosen, without a full stop; empty after a reload."""

    @property
    def plain(self) -> dict[str, Any]:
        """The document as plain data, which is what `compile_policy` takes in whichever process."""
        return self.document.model_dump(mode="json")


class SessionRequest(NamedTuple):
    """For whom a session is asked for. Without an agent it is the user's own; without a role, the agent's."""

    agent: str | None = None
    role: str | None = None
    chain: str | None = None
    """The chain of work that it belongs to, which then holds its leases."""
    issue: str | None = None
    """The issue that it is for."""


class RegisteredSession(NamedTuple):
    """A session that is entered in the register, before anything serves it."""

    session: Session
    policy: ChosenPolicy
    registered: agent_registry.MountingAgent
    tracked: TrackedFiles


def choose_policy(
    home: Path, named: Path | None, source: Path | None = None, *, preset: str | None = None, store: bool = False
) -> ChosenPolicy:
    """The policy of a session on `source`: the named one, the project's, the operator's own, else a preset.

    Without a source it is the one of a session on the working directory.

    `named` is a file, or the name of a preset. `preset` is the one to take in the last case; None takes the stored one,
    and before the first session `aidlc` if the source has aidlc-docs/, else `project`. `store` stores that choice.
    A policy that cannot be read or enforced is an error, and so is a file inside the source, because a program that
    works there could change it. PolicyError, StateError, UsageError.
    """
    if named is not None:
        if str(named) in PRESETS:
            return _of_preset(str(named), "named")
        return load_policy(Path(os.path.abspath(named)), source, "named")
    source = Path(os.path.realpath(source or "."))
    for file, why in (
        (project_policies.policy_file(home, source), "the policy of this project"),
        (home / "policy.toml", "the policy of this state directory"),
    ):
        if project_policies.exists(file):
            # No source contains the state directory, but the working directory of `why` and `policy show` may.
            return load_policy(file, None if source in (home, *home.parents) else source, why)
    if preset is not None:
        return _of_preset(preset, "no other policy is given")
    return _of_preset(*_preset_for(home, source, store=store))


def _preset_for(home: Path, source: Path, *, store: bool) -> tuple[str, str]:
    """The preset for a source that has no policy, and why."""
    stored = project_policies.stored_preset(home, source)
    if stored is not None:
        return stored.preset, f"stored at the first session of this source, on {stored.chosen[:10]}"
    found = os.path.isdir(source / "aidlc-docs")
    preset = "aidlc" if found else "project"
    if store:
        preset = project_policies.store_preset(home, source, preset)
    return preset, "the source has aidlc-docs/" if found else "the source has no aidlc-docs/"


def _of_preset(name: str, why: str) -> ChosenPolicy:
    if name not in PRESETS:
        raise PolicyError(f"there is no preset {name}; there are {', '.join(PRESETS)}")
    file = preset_file(name)
    document = load(file)
    compiled = compile_policy(document.model_dump(mode="json"))
    return ChosenPolicy(f"{PRESET}{name}", file, document, compiled, why)


def load_policy(file: Path, source: Path | None, why: str = "") -> ChosenPolicy:
    """The policy in a file that is not inside the source. PolicyError, UsageError."""
    origin = Path(os.path.realpath(file))
    if source is not None and source in origin.parents:
        raise UsageError(
            f"the policy {origin} lies inside the source, where those it binds could change it; copy it elsewhere"
        )
    if not origin.is_file():
        raise PolicyError(f"there is no policy file {origin}; name one, or leave --policy out")
    document = load(origin)
    compiled = compile_policy(document.model_dump(mode="json"))
    return ChosenPolicy(origin_of(origin), file, document, compiled, why)


def default_agent() -> str:
    """The label of whoever names none: the login name of the user who runs this."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid-{os.getuid()}"


def identity_of(home: Path, label: str) -> str | None:
    """The UUID of the living agent of that label; None where there is none."""
    with Database.open(home) as database:
        return agent_registry.identity_of(database, label)


def register_session(
    home: Path,
    *,
    source: Path,
    mountpoint: Path | None,
    who: SessionRequest,
    policy: ChosenPolicy,
    transport: str,
) -> RegisteredSession:
    """Enter a new session in the register: agent, role, directory, session.json and policy.json (0700, 0600).

    Raises ForbiddenError where the agent may not mount with that role, StateError, UsageError.
    """
    agent, role, chain, issue = who
    if chain is not None:
        agent_registry.check_label(chain, "a chain")
    with Database.open(home) as database:
        registered = agent_registry.register(database, agent if agent is not None else default_agent(), role)
        session = Session(
            session=str(uuid.uuid4()),
            agent=registered.label,
            agent_id=registered.id,
            team=registered.team,
            role=role or registered.role or policy.document.default_role or "agent",
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
        heartbeats.insert_session(database, session)
    directory = session_directory(home, session.session)
    directory.mkdir(mode=0o700)
    write_document(directory / "policy.json", policy.plain)
    found = find_tracked(home, source, policy.compiled)
    if found.paths:
        save_tracked(home, session.session, found.paths)
        policy = policy._replace(compiled=policy.compiled.with_tracked(Tracked(found.paths)))
    save(home, session)
    return RegisteredSession(session, policy, registered, found)


MOST: Final = 10_000
"""Paths that a session keeps one by one. Of a repository with more, whole directories count as tracked."""
_FILE: Final = "tracked.json"


class TrackedFiles(NamedTuple):
    """What git tracks below [[scratch]]."""

    paths: list[str]
    """From the root of the source; one that ends in a slash stands for all that lies below it, too."""
    notes: tuple[str, ...] = ()
    """What the operator should know, a sentence each."""


def find_tracked(home: Path, source: Path, policy: Policy) -> TrackedFiles:
    """The tracked paths of a source. Where its repository cannot be read, all that the source has there counts."""
    if not policy.scratch:
        return TrackedFiles([])
    root = next((place for place in (source, *source.parents) if os.path.lexists(place / ".git")), None)
    if root is None:
        return TrackedFiles([])
    prefix = "" if root == source else f"{source.relative_to(root)}/"

    def wanted(path: str) -> bool:
        return path.startswith(prefix) and policy.is_scratch(path[len(prefix) :].split("/"))

    try:
        found = import_module("bonobofs.git.checkout").tracked_paths(root, home, wanted)
    except GitError as error:
        note = (
            f"Git could not be asked which files it tracks ({error}); so the rules decide, in this session, about all "
            "that the source has at scratch paths now."
        )
        return TrackedFiles(compact(_standing(source, policy)), (note,))
    return TrackedFiles(compact(path[len(prefix) :] for path in found))


def _standing(source: Path, policy: Policy) -> list[str]:
    """What the source has at scratch paths: of a directory the path, with a slash, and nothing below it."""
    found: list[str] = []
    waiting = [""]
    while waiting:
        above = waiting.pop()
        try:
            entries = list(os.scandir(source / above))
        except OSError:
            continue  # who may not list it now is shown nothing of it in the session
        for entry in entries:
            path = above + entry.name
            directory = entry.is_dir(follow_symlinks=False)
            if policy.is_scratch(path.split("/")):
                found.append(f"{path}/" if directory else path)
            elif directory and entry.name != ".git":
                waiting.append(f"{path}/")
    return found


def compact(paths: Iterable[str], most: int = MOST) -> list[str]:
    """At most so many paths that cover these: of too many, those that lie deepest give way to the directory above."""
    kept = set(paths)
    depth = max((path.rstrip("/").count("/") for path in kept), default=0)
    while len(kept) > most and depth:
        kept = {
            path if path.rstrip("/").count("/") < depth else f"{path.rstrip('/').rpartition('/')[0]}/" for path in kept
        }
        depth -= 1
    return sorted(kept)


def save_tracked(home: Path, session: str, paths: list[str]) -> None:
    """Keep them in the session's directory, for `why` and `policy show`."""
    write_document(session_directory(home, session) / _FILE, {"paths": paths})


def load_tracked(home: Path, session: str) -> Tracked | None:
    """Those that were kept; None where there are none. StateError."""
    path = session_directory(home, session) / _FILE
    paths = read_document(path)["paths"] if path.exists() else []
    return Tracked(paths) if paths else None
