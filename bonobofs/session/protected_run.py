"""Snapshots of protected directories in the state directory, and the check of one run.

integrity/ID/   a snapshot: snapshot.json and the contents by hash (`integrity.integrity_check`)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from uuid import uuid4

from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.errors import BonobofsError, StateError, UsageError, error_text
from bonobofs.integrity.integrity_check import IntegrityCheck, new_run_id
from bonobofs.state.home import head_path, trail_path
from bonobofs.state.session_rows import DAEMON
from bonobofs.system.paths import is_within

GUARDRAIL: Final = "guardrail_violation"
"""Operation of the alert about a violation."""
VIOLATED: Final = 77
_LISTED: Final = 100


class Protection(NamedTuple):
    """The directories that `run` protects, and the place of the record of a violation."""

    directories: Sequence[str]
    artifacts: Path
    item: str = ""


class Snapshot(NamedTuple):
    """A snapshot in the state directory."""

    id: str
    directory: Path
    check: IntegrityCheck


def take_snapshot(home: Path, root: Path, directories: Sequence[str]) -> Snapshot:
    """Capture protected directories and save them; replace earlier snapshots of the same. IntegrityError, OSError."""
    check = IntegrityCheck(root, directories)
    former = []
    for directory in _snapshots(home):
        with contextlib.suppress(BonobofsError, FileNotFoundError):
            if _key(IntegrityCheck.load(directory)) == _key(check):
                former.append(directory)
    snapshot = _save(home, check)
    for directory in former:
        shutil.rmtree(directory)
    return snapshot


def find_snapshot(home: Path, root: Path, name: str | None = None) -> Snapshot:
    """Return the newest snapshot of a root or of a directory above it, or the one whose id begins with `name`.

    UsageError: there is none. IntegrityError: a newer snapshot is damaged, and may be that of the root.
    """
    real = os.path.realpath(root)
    for directory in _snapshots(home):
        if not directory.name.startswith(name or ""):
            continue
        with contextlib.suppress(FileNotFoundError):  # a run that has ended removes its snapshot
            check = IntegrityCheck.load(directory)
            if name is not None or is_within(real, check.root):
                return Snapshot(directory.name, directory, check)
    what = f"no snapshot has the id {name}" if name is not None else f"there is no snapshot of {real}"
    raise UsageError(f"{what}; make one: bonobofs integrity snapshot")


def record_violation(home: Path, violation: dict[str, Any], **more: str) -> None:
    """Record a violation as an alert of the actor `daemon`, in a trail of its own. TrailError."""
    details = {**violation["details"], "violation_type": violation["violation_type"], **more}
    for name in ("changed_files", "files"):
        if name in details:
            details[name] = details[name][:_LISTED]
    name = str(uuid4())
    trail = Trail.create(trail_path(home, name), head_path(home, name), TrailIdentity(name, DAEMON, ""))
    try:
        trail.alert(details["message"], operation=GUARDRAIL, details=details)
    finally:
        trail.close()


def revert_and_record(
    home: Path, check: IntegrityCheck, artifacts: Path | None, *, item_id: str, run_id: str, **more: str
) -> str:
    """Revert the changes of a check, and record them in the log in any case; return the message. TrailError.

    `artifacts` gets violation.json before the revert, and again with its outcome. If the first fails, nothing is
    reverted. The `revert_error` of the check says why.
    """
    try:
        if artifacts is not None:
            check.write_violation(artifacts, item_id=item_id, run_id=run_id)
        check.revert(None if artifacts is None else artifacts / f"reverted-{run_id}")
        if artifacts is not None:
            check.write_violation(artifacts, item_id=item_id, run_id=run_id)
    except BonobofsError as error:
        check.revert_error = str(error)
    violation = check.violation(item_id=item_id, run_id=run_id)
    record_violation(home, violation, **more)
    return str(violation["details"]["message"])


class ProtectedRun:
    """The check around one run, as a context manager. Without a protection it does nothing.

    Its exit compares the protected directories, reverts, and records a violation.
    """

    def __init__(self, home: Path, protection: Protection | None, report: Callable[[str], None]) -> None:
        self._home: Final = home
        self._protection: Final = protection
        self._report: Final = report
        self._snapshot: Snapshot | None = None
        self._artifacts = -1
        self._run_id = ""
        self._session = ""
        self._violated = False

    def begin(self, root: Path, session: str) -> None:
        """Capture the state before the command. BonobofsError, OSError: the command must not run."""
        if self._protection is None:
            return
        self._run_id, self._session = new_run_id(), session
        check = IntegrityCheck(root, self._protection.directories)
        artifacts, top = self._protection.artifacts, os.path.realpath(root)
        if any(is_within(named, top) for named in (os.path.abspath(artifacts), os.path.realpath(artifacts))):
            raise UsageError(
                f"--artifacts: the command could remove {artifacts}, which is in {root}; name a directory outside of it"
            )
        try:
            artifacts.mkdir(parents=True, exist_ok=True)
            # The command can replace the directory, and the violation must not follow a symlink of the command.
            self._artifacts = os.open(artifacts, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"--artifacts: {artifacts} cannot be used: {error.strerror}; name a directory") from error
        self._snapshot = _save(self._home, check)

    def status(self, status: int) -> int:
        """Return the exit status of the run: 77 after a violation, else that of the command."""
        return VIOLATED if self._violated else status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Compare. BonobofsError, OSError: the comparison or its record failed."""
        try:
            if self._snapshot is not None:
                self._compare(self._snapshot)
        finally:
            if self._artifacts >= 0:
                os.close(self._artifacts)

    def _compare(self, snapshot: Snapshot) -> None:
        assert self._protection is not None
        check = snapshot.check
        if check.has_changes():
            self._violated = True
            place = Path(f"/proc/self/fd/{self._artifacts}")
            message = revert_and_record(
                self._home, check, place, item_id=self._protection.item, run_id=self._run_id, session=self._session
            )
            message += f": {len(check.changes)} changes"
            if check.revert_error:
                retry = f"then run: bonobofs integrity revert {check.root} --snapshot {snapshot.id}"
                self._report(f"{message}, not all reverted: {check.revert_error}; {retry}")
                return
            self._report(f"{message}, reverted")
        shutil.rmtree(snapshot.directory)


def _key(check: IntegrityCheck) -> tuple[str, tuple[str, ...]]:
    return check.root, check.directories


def _save(home: Path, check: IntegrityCheck) -> Snapshot:
    name = secrets.token_hex(8)
    directory = home / "integrity" / name
    try:
        check.save(directory)
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError):
            raise StateError(f"the snapshot cannot be written in {directory}: {error_text(error)}") from error
        raise
    return Snapshot(name, directory, check)


def _snapshots(home: Path) -> list[Path]:
    """Return the directories of the snapshots, the newest first. A process that is killed leaves one without a file."""
    found = []
    for directory in (home / "integrity").glob("*"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.append((os.stat(directory / "snapshot.json").st_mtime_ns, directory))
    return [directory for _, directory in sorted(found, reverse=True)]
