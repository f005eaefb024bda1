"""The integrity commands, and the violation in the audit log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.wait import until
from tests.support.world import OrdinaryUser, bonobofs, environment


@pytest.fixture
def root(tmp_path: Path, home: Path) -> Path:
    del home
    root = tmp_path / "workspace"
    (root / "okrs").mkdir(parents=True)
    (root / "okrs/company.yml").write_text("objective: grow\n")
    return root


def alerts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in bonobofs("audit", "tail", "--alerts", "--json").stdout.splitlines()]


def test_verify_needs_a_snapshot(root: Path) -> None:
    ran = bonobofs("integrity", "verify", cwd=root)
    assert ran.returncode == 2
    assert "bonobofs integrity snapshot" in ran.stderr


def test_a_change_is_found_reverted_and_recorded(root: Path, tmp_path: Path) -> None:
    assert bonobofs("integrity", "snapshot", str(root)).returncode == 0
    assert bonobofs("integrity", "verify", cwd=root).stdout == "as in the snapshot\n"
    (root / "okrs/company.yml").write_text("objective: rest\n")
    (root / "okrs/new.yml").touch()
    ran = bonobofs("integrity", "verify", cwd=root)
    assert ran.returncode == 1
    assert ran.stdout == "changed  okrs/company.yml\nadded    okrs/new.yml\n"
    assert alerts() == []
    artifacts = tmp_path / "artifacts"
    ran = bonobofs("integrity", "revert", str(root), "--item", "ITEM-1", "--artifacts", str(artifacts), "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["reverted"] is True
    assert (root / "okrs/company.yml").read_text() == "objective: grow\n"
    assert not (root / "okrs/new.yml").exists()
    violation = json.loads((artifacts / "violation.json").read_text())
    assert violation["details"]["item_id"] == "ITEM-1"
    (entry,) = alerts()
    assert (entry["agent"], entry["operation"], entry["kind"]) == ("daemon", "guardrail_violation", "alert")
    assert entry["details"]["violation_type"] == "okrs_direct_edit"
    assert entry["details"]["changed_files"] == ["okrs/company.yml", "okrs/new.yml"]
    assert entry["details"]["reverted"] is True
    assert bonobofs("integrity", "verify", cwd=root).returncode == 0
    assert bonobofs("audit", "verify").returncode == 0
    assert "guardrail_violation" in bonobofs("audit", "query", "--agent", "daemon").stdout


def test_a_new_snapshot_replaces_the_former_of_the_same_directories(root: Path, home: Path) -> None:
    (root / "plans").mkdir()
    for arguments in ((), ("--protect", "plans"), ()):
        ran = bonobofs("integrity", "snapshot", *arguments, "--json", cwd=root)
        assert ran.returncode == 0, ran.stderr
    assert len(list((home / "integrity").iterdir())) == 2
    newest = json.loads(ran.stdout)
    (root / "plans/a").touch()
    assert bonobofs("integrity", "verify", cwd=root).returncode == 0
    (other,) = {path.name for path in (home / "integrity").iterdir()} - {newest["snapshot"]}
    assert bonobofs("integrity", "verify", "--snapshot", other[:6], cwd=root).returncode == 1


@pytest.mark.parametrize("artifacts", ["file", "/proc/x", "okrs/art", "okrs/company.yml", "link/art", "away/art"])
def test_unusable_artifacts_are_an_error_and_the_violation_is_recorded(root: Path, artifacts: str) -> None:
    (root / "file").touch()
    (root / "link").symlink_to("okrs")
    (root / "away").symlink_to("okrs/q1")
    assert bonobofs("integrity", "snapshot", cwd=root).returncode == 0
    (root / "okrs/company.yml").write_text("objective: rest\n")
    (root / "okrs/new.yml").symlink_to("company.yml")
    ran = bonobofs("integrity", "revert", "--artifacts", artifacts, cwd=root)
    assert ran.returncode == 1
    assert "the revert is incomplete: " in ran.stderr
    assert "choose a directory" in ran.stderr
    assert ran.stdout == "changed  okrs/company.yml\nadded    okrs/new.yml\n"
    assert sorted(os.listdir(root / "okrs")) == ["company.yml", "new.yml"]
    assert (root / "okrs/company.yml").read_text() == "objective: rest\n"
    (entry,) = alerts()
    assert entry["details"]["changed_files"] == ["okrs/company.yml", "okrs/new.yml"]
    assert entry["details"]["reverted"] is False
    assert "choose a directory" in entry["details"]["revert_error"]
    assert bonobofs("integrity", "revert", cwd=root).returncode == 0


def test_artifacts_of_a_protected_directory_that_is_a_symlink_now_are_refused(root: Path, tmp_path: Path) -> None:
    (outside := tmp_path / "outside").mkdir()
    assert bonobofs("integrity", "snapshot", cwd=root).returncode == 0
    (root / "okrs").rename(tmp_path / "away")
    (root / "okrs").symlink_to(outside)
    assert bonobofs("integrity", "revert", "--artifacts", "okrs/art", cwd=root).returncode == 1
    assert os.listdir(outside) == []
    assert len(alerts()) == 1


def test_protected_artifacts_are_refused_without_a_violation(root: Path) -> None:
    assert bonobofs("integrity", "snapshot", cwd=root).returncode == 0
    ran = bonobofs("integrity", "revert", "--artifacts", "okrs/art", cwd=root)
    assert ran.returncode == 2
    assert "choose a directory" in ran.stderr
    assert alerts() == []


def test_a_directory_that_is_not_writable_loses_no_violation(ordinary_user: OrdinaryUser) -> None:
    user = ordinary_user
    script = """
        mkdir -p w/okrs; chmod 500 art; cd w; integrity() { "$0" -m bonobofs integrity "$@"; }
        echo before > okrs/a; integrity snapshot; echo after > okrs/a
        integrity revert --artifacts ../art && exit 9
        cat okrs/a; "$0" -m bonobofs audit tail --alerts
    """
    user.run("mkdir", "art")
    ran = user.run("sh", "-c", script, user.python)
    assert ran.returncode == 0, ran.stderr
    assert "Permission denied; choose a directory" in ran.stderr
    assert "\nafter\n" in ran.stdout
    assert "guardrail_violation" in ran.stdout


def test_a_file_system_that_exchanges_no_names_gets_the_same_revert(root: Path, tmp_path: Path) -> None:
    (root / "okrs/gone.yml").touch()
    assert bonobofs("integrity", "snapshot", cwd=root).returncode == 0
    (root / "okrs/company.yml").write_text("objective: rest\n")
    (root / "okrs/gone.yml").rename(root / "okrs/new.yml")
    fault = ("-e", "trace=renameat2", "-e", "inject=renameat2:error=EINVAL")
    revert = (sys.executable, "-m", "bonobofs", "integrity", "revert", "--artifacts", tmp_path / "artifacts")
    command = ("strace", "-f", "-qq", "-o", tmp_path / "log", *fault, *revert)
    subprocess.run(command, cwd=root, env=environment(), check=True)
    assert "INJECTED" in (tmp_path / "log").read_text()
    assert bonobofs("integrity", "verify", cwd=root).returncode == 0
    (kept,) = (tmp_path / "artifacts").glob("reverted-*")
    assert (kept / "okrs/company.yml").read_text() == "objective: rest\n"


def test_a_file_that_is_saved_twice_during_the_exchange_keeps_its_name(root: Path, tmp_path: Path) -> None:
    """The first save comes before the exchange, the second before its reversal."""
    path, log = root / "okrs/company.yml", tmp_path / "log"

    def save(text: str) -> None:
        (root / "saved").write_text(text)
        (root / "saved").rename(path)

    def other_names() -> dict[str, str]:
        return {each.read_text(): each.name for each in path.parent.iterdir() if each.is_file() and each != path}

    assert bonobofs("integrity", "snapshot", cwd=root).returncode == 0
    path.write_text("objective: rest\n")
    delay = ("-e", "trace=renameat2", "-e", "inject=renameat2:delay_enter=1000000:delay_exit=1500000:when=1")
    revert = (sys.executable, "-m", "bonobofs", "integrity", "revert", "--artifacts", tmp_path / "artifacts")
    with subprocess.Popen(("strace", "-qq", "-o", log, *delay, *revert), cwd=root, env=environment()) as tracer:
        until(lambda: log.exists() and "renameat2(" in log.read_text(), "the file is copied")
        save("first\n")
        until(lambda: "first\n" in other_names(), "the names are exchanged")
        save("second\n")
    assert tracer.returncode == 1
    assert path.read_text() == "second\n"
    assert other_names()["first\n"].startswith("company.yml.")


@pytest.mark.parametrize("damage", ["", '{"root": 7, "before": []}', '{"root": "a", "directories": [7], "before": {}}'])
def test_a_damaged_snapshot_is_an_error_and_no_older_one_is_used(root: Path, home: Path, damage: str) -> None:
    assert bonobofs("integrity", "snapshot", str(root)).returncode == 0
    (older,) = (home / "integrity").iterdir()
    assert bonobofs("integrity", "snapshot", "--protect", "plans", cwd=root).returncode == 0
    (newest,) = set((home / "integrity").iterdir()) - {older}
    (newest / "snapshot.json").write_text(damage)
    for command in ("verify", "revert"):
        ran = bonobofs("integrity", command, cwd=root)
        assert ran.returncode == 1
        assert f"{newest}/snapshot.json is damaged" in ran.stderr
        assert "--snapshot" in ran.stderr
    assert bonobofs("integrity", "verify", "--snapshot", older.name, cwd=root).returncode == 0
    assert bonobofs("integrity", "snapshot", cwd=root).returncode == 0
    assert bonobofs("integrity", "verify", cwd=root).returncode == 0


def _snapshot_of(home: Path) -> Path:
    (directory,) = (home / "integrity").iterdir()
    return directory / "snapshot.json"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("company.yml", "companx.yml"),
        ('"okrs/company.yml"', '"src/company.yml"'),
        ('["okrs"]', '"okrs"'),
        ('"before": {', '"before": {}, "other": {'),
        ('"file", 4', '"file", 1' + 40 * "0" + "4"),
        ("company", r"\ud800"),
        (', "sha256": "', ', "sha255": "'),
    ],
)
def test_a_changed_byte_of_a_snapshot_is_an_error_and_reverts_nothing(
    root: Path, home: Path, old: str, new: str
) -> None:
    (root / "okrs/plan.yml").write_text("plan\n")
    (root / "okrs/company.yml").chmod(0o600)
    assert bonobofs("integrity", "snapshot", cwd=root).returncode == 0
    snapshot = _snapshot_of(home)
    text = snapshot.read_text()
    assert old in text
    snapshot.write_text(text.replace(old, new))
    for command in ("verify", "revert"):
        ran = bonobofs("integrity", command, cwd=root)
        assert ran.returncode == 1
        assert f"{snapshot} is damaged" in ran.stderr
    assert sorted(os.listdir(root / "okrs")) == ["company.yml", "plan.yml"]
    assert not (root / "src").exists()
    assert alerts() == []


def test_a_snapshot_that_cannot_be_parsed_or_is_a_fifo_is_an_error(root: Path, home: Path) -> None:
    assert bonobofs("integrity", "snapshot", cwd=root).returncode == 0
    snapshot = _snapshot_of(home)
    snapshot.write_text("[" * 100_000)
    assert f"{snapshot} is damaged" in bonobofs("integrity", "revert", cwd=root).stderr
    snapshot.unlink()
    os.mkfifo(snapshot)
    ran = bonobofs("integrity", "verify", cwd=root)
    assert ran.returncode == 1
    assert f"{snapshot} cannot be read: it is not a regular file" in ran.stderr


def test_a_snapshot_that_was_not_completed_is_not_used(root: Path, home: Path) -> None:
    assert bonobofs("integrity", "snapshot", cwd=root).returncode == 0
    (made,) = (home / "integrity").iterdir()
    (made / "snapshot.json").unlink()
    assert bonobofs("integrity", "verify", cwd=root).returncode == 2
