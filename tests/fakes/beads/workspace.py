"""Where bd looks for its workspace, what steers it there, and who it takes the caller for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from .answers import Answers, Failed


class Workspace:
    """One `.beads`, as this call has found it."""

    def __init__(self, path: Path, redirected_from: Path | None, name: str) -> None:
        self.path = path
        self.redirected_from = redirected_from
        self.name = name
        """Of the database: the source's own name is kept through a redirect."""

    @property
    def database(self) -> Path:
        return self.path / "embeddeddolt" / self.name


def git(*arguments: str, cwd: Path | None = None) -> str:
    """What git says, found through PATH and steered by the user's own configuration; "" when it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""


def find(database: str | None) -> Workspace | None:
    """Where this call works: --db, BEADS_DIR if it leads somewhere, else upwards from the working directory."""
    if database is not None:
        path = Path(database).absolute()
        place = next((at for at in (path, *path.parents[:2]) if _holds_database(at)), path.parent)
        (place / "embeddeddolt").mkdir(parents=True, exist_ok=True)  # a place that is not there is made, and is empty
        return Workspace(place, None, database_name(place))
    named = os.environ.get("BEADS_DIR")
    places = [Path(os.path.realpath(named))] if named else []
    here = Path.cwd()
    places += [directory / ".beads" for directory in (here, *here.parents)]
    found = next(filter(None, map(_redirected, places)), None)
    if found is not None:
        return found
    common = git("rev-parse", "--path-format=absolute", "--git-common-dir")
    return _redirected(Path(common).parent / ".beads") if common else None


def _redirected(path: Path) -> Workspace | None:
    """None: nothing is there, or where it leads."""
    redirect = path / "redirect"
    if redirect.is_file():
        target = Path(os.path.realpath(path.parent / redirect.read_text().strip()))
        if target.is_dir():
            name = database_name(path if _holds_database(path) else target)
            return Workspace(target, path, name) if _holds_database(target) else None
        Answers.notice(f"Warning: redirect target does not exist or is not a directory: {target}")
    return Workspace(path, None, database_name(path)) if _holds_database(path) else None


def _holds_database(path: Path) -> bool:
    return (path / "metadata.json").is_file() or (path / "embeddeddolt").is_dir()


def database_name(path: Path) -> str:
    """As the metadata have it."""
    try:
        return str(json.loads((path / "metadata.json").read_text())["dolt_database"])
    except FileNotFoundError:
        return "beads"


def load_environment(path: Path) -> None:
    """`.beads/.env`, which does not override what is set."""
    try:
        lines = (path / ".env").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        key, equals, value = line.partition("=")
        if equals and not key.lstrip().startswith("#"):
            os.environ.setdefault(key.strip().removeprefix("export "), value.strip().strip("\"'"))


def setting(key: str, path: Path | None) -> str:
    """A key of the configuration: the environment's BD_KEY, else one of the three files, else ""."""
    named = os.environ.get("BD_" + key.upper().replace(".", "_").replace("-", "_"))
    return named or in_files(key, path)


def in_files(key: str, path: Path | None) -> str:
    home = Path(os.environ.get("HOME", "/"))
    files = [home / ".beads" / "config.yaml", home / ".config" / "bd" / "config.yaml"]
    value = ""
    for file in [*files, *([path / "config.yaml"] if path is not None else [])]:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, colon, rest = line.partition(":")
            if colon and name.strip() == key:
                value = rest.strip().strip("\"'")
    return value


def is_true(value: str) -> bool:
    return value.lower() in {"1", "true", "yes"}


class Person:
    """Whom bd takes the caller for."""

    def __init__(self, given: str, path: Path | None) -> None:
        told = git("config", "--get-regexp", r"^(beads\.role|user\.name|user\.email)$")
        configured = dict(line.partition(" ")[::2] for line in told.splitlines())
        self.has_role = "beads.role" in configured
        self.actor = (
            given
            or os.environ.get("BD_ACTOR")
            or in_files("actor", path)
            or os.environ.get("BEADS_ACTOR")
            or configured.get("user.name")
            or os.environ.get("USER")
            or "unknown"
        )
        self.owner = os.environ.get("GIT_AUTHOR_EMAIL") or configured.get("user.email") or ""


def check(workspace: Workspace, person: Person) -> None:
    """What bd says at every call about where it finds itself, and what it does not work without."""
    if os.environ.get("BD_BACKEND") or os.environ.get("BD_DATABASE_BACKEND"):
        raise Failed("the database backend cannot be chosen in the environment")
    home = os.environ.get("HOME")
    if home is not None:
        if not Path(home).is_dir():
            raise Failed(f"database not found: {workspace.name}")
        settings = Path(home) / ".dolt" / "config_global.json"
        settings.parent.mkdir(exist_ok=True)
        if not settings.exists():
            settings.write_text("{}")
    if workspace.path.stat().st_mode & 0o077:
        Answers.notice(f"Warning: {workspace.path} has permissions wider than 0700; run: chmod 700 {workspace.path}")
    if not person.has_role:
        Answers.notice(
            "Warning: beads.role is not configured.\n  Run: git config beads.role maintainer\n  to end this."
        )
