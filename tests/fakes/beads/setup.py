"""init, config, where and other commands without issues: the files that they write and the programs that they start."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from . import workspace
from .answers import Answers, Failed
from .call import Call
from .store import UNINITIALIZED, Store, now, random_uuid
from .workspace import Workspace

VERSION = "1.0.5"
BUILD = "tests/fakes/bd"
INIT_FLAGS = {
    "prefix": "text", "stealth": "flag", "non-interactive": "flag", "skip-hooks": "flag", "skip-agents": "flag",
    "force": "flag", "reinit-local": "flag", "destroy-token": "text",
}  # fmt: skip


def init(flags: dict[str, Any]) -> int:
    """Make a workspace; human text, also with --json."""
    named = os.environ.get("BEADS_DIR")
    path = Path(named) if named else Path.cwd() / ".beads"
    prefix = flags.get("prefix") or path.parent.name
    if not all(character.isalnum() or character in "-_" for character in prefix):
        raise Failed(f"invalid prefix {prefix!r}")
    name = prefix.replace("-", "_")
    if path.is_dir() and any((path / "embeddeddolt").glob("*")):
        if not flags.get("force") and not flags.get("reinit-local"):
            raise Failed(f"{path} is initialized already")
        there = Store(Workspace(path, None, name))
        if not there.is_empty() and flags.get("destroy-token") != f"DESTROY-{prefix}":
            raise Failed("the database has issues; a --destroy-token is needed", status=12)
        return 0
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    Store.make(Workspace(path, None, name), prefix)
    config = "no-git-ops: true\n" if flags.get("stealth") else "# bd's own settings\n"
    for file, text in {
        ".gitignore": "embeddeddolt/\n",
        ".local_version": VERSION + "\n",
        "README.md": "# Beads\n",
        "config.yaml": config,
        "interactions.jsonl": "",
        "metadata.json": json.dumps(
            {"database": "dolt", "backend": "dolt", "dolt_mode": "embedded", "dolt_database": name}
            | {"project_id": random_uuid()}
        ),
    }.items():
        (path / file).write_text(text)
    if not flags.get("stealth"):
        hook = path / "hooks" / "pre-commit"
        hook.parent.mkdir()
        hook.write_text("#!/bin/sh\n")
    print(f"bd initialized in {path} with prefix {prefix}")
    return 0


def version(answers: Answers) -> int:
    answers.tell({"version": VERSION, "build": BUILD}, f"bd version {VERSION} ({BUILD})")
    return 0


def where(answers: Answers, found: Workspace | None) -> int:
    if found is None:
        told = {"hint": "run 'bd init' to create one", "message": "no active beads workspace found"}
        raise Failed("no_beads_directory", "stdout", more=told)
    # Told where the redirect is found from the working directory; one that BEADS_DIR has led to is followed unsaid.
    is_told = found.redirected_from is not None and not os.environ.get("BEADS_DIR")
    more = {"redirected_from": str(found.redirected_from)} if is_told else {}
    prefix = Store.prefix_at(found.path)
    more = {**more, **({"prefix": prefix} if prefix else {})}
    place = {"path": str(found.path), **more, "database_path": str(found.path / "embeddeddolt")}
    answers.tell(place, place["path"])
    return 0


def info(call: Call) -> None:
    """Human text, also with --json."""
    print(f"Beads database: {call.workspace.path}\nIssues: {len(call.store.issues)}")


def config(call: Call) -> None:
    word, *rest = call.arguments
    if word in {"get", "list", "show"}:
        shown = {key: value for key, value in call.store.config.items() if word != "get" or key == rest[0]}
        call.answers.tell(shown, "\n".join(f"{key} = {value}" for key, value in shown.items()))
        return
    pairs = [pair.partition("=")[::2] for pair in rest] if word == "set-many" else [(rest[0], " ".join(rest[1:]))]
    for key, value in pairs:
        if word == "unset":
            call.store.config.pop(key, None)
            continue
        call.store.config[key] = value
        if key == "status.custom":
            call.store.add_statuses(value)
    call.store.save()
    call.answers.tell(dict(pairs), f"Set {rest[0]}")


def import_(call: Call) -> None:
    """An upsert: each line replaces an existing issue."""
    lines = Path(call.arguments[0]).read_text().splitlines()
    if any(lines) and not call.store.prefix:
        raise Failed(f"import failed: {UNINITIALIZED}")
    for issue in map(json.loads, filter(str.strip, lines)):
        there = call.store.issues.get(issue["id"], {"labels": [], "metadata": None, "created_at": now()})
        base = {"title": "", "status": "open", "priority": 2, "issue_type": "task", "created_by": "", "updated_at": ""}
        fresh = {key: value for key, value in issue.items() if key != "_type"}
        labels = sorted({*there["labels"], *fresh.get("labels", [])})
        call.store.issues[issue["id"]] = {**base, **there, "assignee": "", **fresh, "labels": labels}
    call.store.save()
    call.answers.tell({"created": len(lines)}, f"Imported {len(lines)} issues")


def export(call: Call) -> None:
    shown = [json.dumps({"_type": "issue", **issue}) for issue in call.counted(sorted(call.store.issues))]
    if "output" in call.flags:
        Path(call.flags["output"]).write_text("".join(line + "\n" for line in shown))
        Answers.notice(f"Exported {len(shown)} issues")
    else:
        print("\n".join(shown))


def rename(call: Call) -> None:
    """Another id for an issue; a line of text, also with --json."""
    old, new = call.id_of(call.arguments[0]), call.arguments[1]
    call.store.issues[new] = {**call.store.issues.pop(old), "id": new}
    for edge in call.store.edges:
        for end in ("issue_id", "depends_on_id"):
            edge[end] = new if edge[end] == old else edge[end]
    call.store.save()
    print(f"Renamed {old} to {new}")


def hooks(call: Call) -> None:
    """Programs of git that call bd."""
    place = workspace.git("rev-parse", "--path-format=absolute", "--git-path", "hooks")
    hook = Path(place) / "pre-commit" if place else call.workspace.path / "hooks" / "pre-commit"
    if call.arguments[:1] == ["install"]:
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\nbd export -o .beads/issues.jsonl\n")
    elif call.arguments[:1] == ["uninstall"]:
        hook.unlink(missing_ok=True)
    print(f"hooks: {hook}")


def mail(call: Call) -> int:
    """Run the program that the environment or the configuration names, with all arguments after `mail`."""
    delegate = os.environ.get("BEADS_MAIL_DELEGATE") or call.store.config.get("mail.delegate", "")
    if not delegate:
        raise Failed("no mail delegate configured")
    return subprocess.run([*shlex.split(delegate), *call.arguments], check=False).returncode
