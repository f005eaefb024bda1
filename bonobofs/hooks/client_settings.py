"""The settings of Claude Code and Codex that call `bonobofs hook` and `bonobofs mcp`: add them, and take them away.

Only our entries change. A file that cannot be parsed, or that a JSON or TOML writer would not give back whole, is left
as it is. User scope has no MCP server and no hooks of worktrees: they would also act in other projects.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.errors import StateError
from bonobofs.state.home import write_text

CLIENTS: Final = ("claude", "codex")
_SERVER: Final = {"command": "bonobofs", "args": ["mcp"]}
_TOML: Final = """
# >>> bonobofs
[mcp_servers.bonobofs]
command = "bonobofs"
args = ["mcp"]
# <<< bonobofs
"""
_HOOKS: Final = ("SessionStart", "UserPromptSubmit", "PreToolUse", "PostToolUse", "PermissionRequest", "Stop")
_OF_CLAUDE: Final = ("PostToolUseFailure",)
_OF_CLAUDE_PROJECTS: Final = ("WorktreeCreate", "WorktreeRemove")
_HOOK_SECONDS: Final = 30
_WORKTREE_SECONDS: Final = 300
_PREFIX: Final = "bonobofs hook "


class SettingsFile(NamedTuple):
    """One file as it is and as it should be. Absent is None."""

    path: Path
    before: str | None
    after: str | None

    def difference(self) -> str:
        """Return a unified diff; "" if there is none."""
        old, new = (text.splitlines(keepends=True) if text else [] for text in (self.before, self.after))
        names = (str(self.path) if self.before is not None else "/dev/null", str(self.path))
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in difflib.unified_diff(old, new, *names))

    def write(self) -> None:
        """Write the file whole, or remove it. StateError: it has changed since it was read, or cannot be written."""
        place = Path(os.path.realpath(self.path))
        try:
            if _content(self.path) != self.before:
                raise StateError(f"{self.path} was changed by another program; try again")
            if self.after is None:
                place.unlink()
                if place.parent.name in (".claude", ".codex"):
                    with suppress(OSError):  # it is not empty
                        place.parent.rmdir()
                return
            place.parent.mkdir(parents=True, exist_ok=True)
            mode = place.stat().st_mode & 0o7777 if place.exists() else 0o644
            write_text(place, self.after)
            place.chmod(mode)
        except OSError as error:
            raise StateError(f"{self.path} cannot be written: {error.strerror}") from error


def installed(client: str, project: Path | None) -> list[SettingsFile]:
    """Return the files of a client with our settings in them. `project` None: of the user. StateError."""
    found = [_json(_hooks_file(client, project), lambda old: _with_hooks(old, _events(client, project)))]
    if project is not None and client == "claude":
        found.append(_json(project / ".mcp.json", _with_server))
    if project is not None and client == "codex":
        found.append(_toml(project / ".codex/config.toml"))
    return found


def uninstalled(client: str, project: Path | None) -> list[SettingsFile]:
    """Return the files of a client without our settings. A file that had nothing else goes. StateError."""
    found = [_json(_hooks_file(client, project), _without_hooks)]
    if project is not None and client == "claude":
        found.append(_json(project / ".mcp.json", _without_server))
    if project is not None and client == "codex":
        path = project / ".codex/config.toml"
        before = _content(path)
        found.append(SettingsFile(path, before, None if before == _TOML.lstrip() else _without_block(before)))
    return found


def _hooks_file(client: str, project: Path | None) -> Path:
    if client == "claude":
        directory = os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude"
        return (project / ".claude" if project is not None else Path(directory)) / "settings.json"
    directory = os.environ.get("CODEX_HOME") or Path.home() / ".codex"
    return (project / ".codex" if project is not None else Path(directory)) / "hooks.json"


def _events(client: str, project: Path | None) -> tuple[str, ...]:
    if client == "codex":
        return _HOOKS
    return (*_HOOKS, *_OF_CLAUDE, *(_OF_CLAUDE_PROJECTS if project is not None else ()))


def _with_hooks(old: dict[str, Any], events: tuple[str, ...]) -> dict[str, Any]:
    """Add our handler to each event that lacks it."""
    new = deepcopy(old)
    hooks = _table(new, "hooks")
    for event in events:
        groups = hooks.setdefault(event, [])
        if not isinstance(groups, list):
            raise TypeError(f"hooks.{event} is no list")
        if not any(_is_ours(handler) for group in groups for handler in _handlers(group)):
            seconds = _WORKTREE_SECONDS if event in _OF_CLAUDE_PROJECTS else _HOOK_SECONDS
            handler = {"type": "command", "command": f"{_PREFIX}{event}", "timeout": seconds}
            groups.append({"hooks": [handler]})
    return new


def _without_hooks(old: dict[str, Any]) -> dict[str, Any]:
    """Remove our handlers, and the lists and tables that are empty without them."""
    new = deepcopy(old)
    hooks = new.get("hooks")
    if not isinstance(hooks, dict):
        return new
    for event, groups in list(hooks.items()):
        if not isinstance(groups, list):
            continue
        kept = []
        for group in groups:
            left = [handler for handler in _handlers(group) if not _is_ours(handler)]
            if len(left) == len(_handlers(group)):
                kept.append(group)
            elif left:
                kept.append({**group, "hooks": left})
        hooks[event] = kept
        if groups and not kept:
            del hooks[event]
    if not hooks and old["hooks"]:
        del new["hooks"]
    return new


def _handlers(group: Any) -> list[Any]:
    found = group.get("hooks") if isinstance(group, dict) else None
    return found if isinstance(found, list) else []


def _is_ours(handler: Any) -> bool:
    command = handler.get("command") if isinstance(handler, dict) else None
    return isinstance(command, str) and command.startswith(_PREFIX)


def _with_server(old: dict[str, Any]) -> dict[str, Any]:
    new = deepcopy(old)
    servers = _table(new, "mcpServers")
    if servers.setdefault("bonobofs", dict(_SERVER)) != _SERVER:
        raise TypeError("it has another server named bonobofs; remove that first")
    return new


def _without_server(old: dict[str, Any]) -> dict[str, Any]:
    new = deepcopy(old)
    servers = new.get("mcpServers")
    if isinstance(servers, dict) and servers.get("bonobofs") == _SERVER:
        del servers["bonobofs"]
        if not servers:
            del new["mcpServers"]
    return new


def _table(document: dict[str, Any], key: str) -> dict[str, Any]:
    table = document.setdefault(key, {})
    if not isinstance(table, dict):
        raise TypeError(f"{key} is no object")
    return table


def _json(path: Path, change: Any) -> SettingsFile:
    """Return a JSON file with a change. StateError: it is no JSON object that can be written back whole."""
    before = _content(path)
    try:
        old = json.loads(before or "{}", object_pairs_hook=_unique, parse_constant=_no_number)
        if not isinstance(old, dict):
            raise TypeError("it is no JSON object")
        new = change(old)
        if new == old:
            return SettingsFile(path, before, before)
        if not new:
            return SettingsFile(path, before, None)
        indent = re.search(r"^([ \t]+)\S", before or "", re.MULTILINE)
        ends = "\n" if before is None or before.endswith("\n") else ""
        style: Mapping[str, Any] = {"indent": indent[1] if indent else 2, "ensure_ascii": (before or "").isascii()}
        after = json.dumps(new, allow_nan=False, **style) + ends
        after.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise StateError(f"{path} is left as it is: {error}") from error
    return SettingsFile(path, before, after)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _toml(path: Path) -> SettingsFile:
    """Return a TOML file with our block at its end. StateError: it is no TOML, or has another server of our name."""
    before = _content(path)
    try:
        old = tomllib.loads(before or "")
        if old.get("mcp_servers", {}).get("bonobofs") == _SERVER:
            return SettingsFile(path, before, before)
        after = (before or "") + (_TOML if before else _TOML.lstrip())
        new = tomllib.loads(after)
        new["mcp_servers"].pop("bonobofs")
        if new not in (old, {**old, "mcp_servers": {}}):
            raise ValueError("a block at its end would change other settings")
    except (ValueError, TypeError, AttributeError) as error:
        raise StateError(f"{path} is left as it is: {error}") from error
    return SettingsFile(path, before, after)


def _without_block(before: str | None) -> str | None:
    return before if before is None else before.replace(_TOML, "")


def _content(path: Path) -> str | None:
    """Return the text of a file; None if it is absent. StateError."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StateError(f"{path} cannot be read: {error}") from error
