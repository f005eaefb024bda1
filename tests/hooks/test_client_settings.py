"""`bonobofs install` adds our entries to the settings of a client; `uninstall` takes exactly these away."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from bonobofs.errors import StateError
from bonobofs.hooks.client_settings import CLIENTS, SettingsFile, installed, uninstalled
from bonobofs.hooks.hook_events import EVENTS
from tests.support.world import bonobofs

SETTINGS: Final = {
    "model": "opus",
    "hooks": {
        "Stop": [{"hooks": [{"type": "command", "command": "say done"}]}],
        "PreToolUse": [{"matcher": "Bash", "hooks": []}],
        "Notification": [],
    },
    "permissions": {"allow": ["Bash(make:*)"], "ü": 1.5},
}
TOML: Final = 'model = "gpt"\n\n[mcp_servers.other]\ncommand = "other"\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    return directory


def _write(files: list[SettingsFile]) -> None:
    for file in files:
        if file.before != file.after:
            file.write()


def _snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("indent", [2, 4, "\t"])
def test_install_and_uninstall_give_back_the_same_files(client: str, indent: Any, project: Path) -> None:
    text = json.dumps(SETTINGS, indent=indent, ensure_ascii=False)
    for name in (".claude/settings.json", ".codex/hooks.json"):
        (project / name).parent.mkdir()
        (project / name).write_text(text, encoding="utf-8")
    (project / ".codex/config.toml").write_text(TOML, encoding="utf-8")
    (project / ".mcp.json").write_text('{"mcpServers": {"other": {"command": "x"}}}\n', encoding="utf-8")
    compact = json.dumps({"mcpServers": {"other": {"command": "x"}}}, indent=2) + "\n"
    (project / ".mcp.json").write_text(compact, encoding="utf-8")
    before = _snapshot(project)
    _write(installed(client, project))
    assert _snapshot(project) != before
    assert all(file.before == file.after for file in installed(client, project))
    _write(uninstalled(client, project))
    assert _snapshot(project) == before
    assert all(file.before == file.after for file in uninstalled(client, project))


@pytest.mark.parametrize("client", CLIENTS)
def test_files_that_install_has_created_go(client: str, project: Path) -> None:
    _write(installed(client, project))
    assert _snapshot(project)
    _write(uninstalled(client, project))
    assert list(project.iterdir()) == []


def test_the_settings_name_each_event_and_the_server(project: Path) -> None:
    for client in CLIENTS:
        _write(installed(client, project))
    hooks = json.loads((project / ".claude/settings.json").read_bytes())["hooks"]
    assert set(hooks) == set(EVENTS)
    for event, ((group,),) in {event: (groups,) for event, groups in hooks.items()}.items():
        assert group["hooks"][0]["command"] == f"bonobofs hook {event}"
    assert json.loads((project / ".mcp.json").read_bytes())["mcpServers"]["bonobofs"]["args"] == ["mcp"]
    assert set(json.loads((project / ".codex/hooks.json").read_bytes())["hooks"]) < set(EVENTS)
    servers = tomllib.loads((project / ".codex/config.toml").read_text(encoding="utf-8"))["mcp_servers"]
    assert servers == {"bonobofs": {"command": "bonobofs", "args": ["mcp"]}}


def test_user_scope_has_no_server_and_no_worktrees(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project))
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    monkeypatch.setenv("CODEX_HOME", str(project / "codex"))
    for client in CLIENTS:
        _write(installed(client, None))
    assert set(_snapshot(project)) == {".claude/settings.json", "codex/hooks.json"}
    assert "Worktree" not in (project / ".claude/settings.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "// comment\n{}",
        '{"hooks": []}',
        '{"hooks": {"Stop": {}}}',
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"ü": "\\ud800"}',
        "\ufeff{}",
    ],
)
def test_a_file_that_cannot_be_given_back_is_left_alone(text: str, project: Path) -> None:
    file = project / ".claude/settings.json"
    file.parent.mkdir()
    file.write_bytes(text.encode())
    with pytest.raises(StateError, match="is left as it is"):
        installed("claude", project)
    assert file.read_bytes() == text.encode()


@pytest.mark.parametrize(
    "text", ["[", "mcp_servers = 3\n", '[mcp_servers.bonobofs]\ncommand = "mine"\n', "a = 1\na = 2\n"]
)
def test_toml_that_cannot_be_extended_is_left_alone(text: str, project: Path) -> None:
    file = project / ".codex/config.toml"
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    with pytest.raises(StateError, match="is left as it is"):
        installed("codex", project)


def test_another_server_of_our_name_stays(project: Path) -> None:
    text = '{"mcpServers": {"bonobofs": {"command": "mine"}}}'
    (project / ".mcp.json").write_text(text, encoding="utf-8")
    with pytest.raises(StateError, match="another server named bonobofs"):
        installed("claude", project)
    _write(uninstalled("claude", project))
    assert (project / ".mcp.json").read_text(encoding="utf-8") == text


def test_a_file_that_changed_meanwhile_is_not_overwritten(project: Path) -> None:
    (first, _) = installed("claude", project)
    (project / ".claude").mkdir()
    (project / ".claude/settings.json").write_text('{"new": 1}', encoding="utf-8")
    with pytest.raises(StateError, match="was changed"):
        first.write()


def test_a_symlink_and_the_mode_stay(project: Path) -> None:
    real = project / "dotfiles.json"
    real.write_text("{}\n", encoding="utf-8")
    real.chmod(0o640)
    (project / ".claude").mkdir()
    (project / ".claude/settings.json").symlink_to(real)
    _write(installed("claude", project))
    assert (project / ".claude/settings.json").is_symlink()
    assert "bonobofs hook" in real.read_text(encoding="utf-8")
    assert real.stat().st_mode & 0o777 == 0o640


def test_the_command_shows_the_difference_and_writes_with_yes(project: Path) -> None:
    shown = bonobofs("install", "claude", cwd=project)
    assert shown.returncode == 2
    assert '+            "command": "bonobofs hook SessionStart",' in shown.stdout
    assert "--yes" in shown.stderr
    assert list(project.iterdir()) == []
    assert bonobofs("install", "claude", "--yes", cwd=project).returncode == 0
    assert bonobofs("install", "claude", "--yes", cwd=project).stdout == "nothing to change\n"
    assert bonobofs("uninstall", "claude", "--yes", cwd=project).returncode == 0
    assert list(project.iterdir()) == []
    assert bonobofs("install", "emacs", cwd=project).returncode == 2
