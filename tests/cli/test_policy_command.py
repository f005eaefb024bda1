"""`policy check|test|show`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.world import ALLOW_ALL, ROOT, bonobofs

RULE = '[[rule]]\nname = "docs"\npaths = ["docs/"]\nsuffixes = [".md"]\n'


def test_the_packaged_policy_passes_check_and_test() -> None:
    """policy.toml at the top of the repository is the default."""
    checked = bonobofs("policy", "check", ROOT / "policy.toml")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert ": valid, " in checked.stdout
    tried = bonobofs("policy", "test", "aidlc")
    assert tried.returncode == 0, tried.stderr
    assert f"{ROOT / 'policy.toml'}: " in tried.stdout


def test_check_names_file_line_and_key(tmp_path: Path) -> None:
    """An unknown key is refused in one line."""
    file = tmp_path / "policy.toml"
    file.write_text('default = "deny"\ncolour = "red"\n')
    checked = bonobofs("policy", "check", file)
    assert checked.returncode == 1
    assert checked.stderr.startswith(f"bonobofs: {file}:2: colour: ")
    assert checked.stderr.count("\n") == 1


def test_check_and_mount_warn_of_limits_that_have_no_effect(tmp_path: Path, home: Path, source: Path) -> None:
    """[audit] counts in policy.toml of the state directory only."""
    limits = 'default = "deny"\n[audit]\nkeep = "1d"\n'
    other, mountpoint = tmp_path / "other.toml", tmp_path / "work"
    for file in (other, home / "policy.toml"):
        file.write_text(limits)
    mountpoint.mkdir()
    ignored = f"[audit] has no effect in {other}; only {home / 'policy.toml'} limits the audit log"
    assert f"{other}:2: warning: {ignored}" in bonobofs("policy", "check", other).stderr
    assert bonobofs("policy", "check", home / "policy.toml").stderr == ""
    made = bonobofs("mount", source, mountpoint, "--new", "--policy", other)
    assert bonobofs("umount", mountpoint).returncode == 0
    assert ignored in made.stderr


def test_test_names_each_failed_example(tmp_path: Path) -> None:
    """The exit code is 1, and the summary has the count."""
    file = tmp_path / "policy.toml"
    file.write_text(RULE + 'examples = { allow = ["docs/a.md", "docs/b.txt"], deny = ["c"] }\n')
    tried = bonobofs("policy", "test", file)
    assert tried.returncode == 1
    assert "docs/b.txt should be allowed" in tried.stderr
    assert tried.stdout == f"{file}: 2 of 3 examples hold\n"


def test_show_prints_the_policy_in_force(home: Path) -> None:
    """As text for a person, as JSON for a program. The operator's own policy has precedence."""
    told = bonobofs("policy", "show", "--policy", "aidlc", "--role", "control").stdout
    assert "roles agent, control, Harmbe, impl, lead, orchestrator, ProjectMinder, worker\n" in told
    assert "- Tools of the guard socket: `read_file`, `list_files`, `search_files`." in told
    assert "`aidlc-docs/`" in bonobofs("policy", "show", "--policy", "aidlc").stdout
    (home / "policy.toml").write_text(ALLOW_ALL + "[role.reader]\n")
    shown = json.loads(bonobofs("policy", "show", "--json").stdout)
    assert shown["origin"] == str(home / "policy.toml")
    assert shown["policy"]["default"] == "allow"
    assert "the role writes nowhere" in bonobofs("policy", "show", "--role", "reader").stdout
