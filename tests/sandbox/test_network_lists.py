"""The operator's network lists: edited under a lock, the old file kept, a broken file never taken for a list."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from bonobofs.errors import PolicyError, UsageError
from bonobofs.sandbox import network_list
from bonobofs.state.worktree_registry import Worktree, save, worktree_paths
from tests.support.world import bonobofs


def test_a_new_state_directory_admits_what_the_policy_admits(home: Path) -> None:
    assert network_list.operator_list(home, Path("/source")) == ["*"]


def test_a_source_has_its_own_list_once_it_was_edited(home: Path) -> None:
    one, other = Path("/one"), Path("/other")
    network_list.disallow(home, None, ["*"])
    network_list.allow(home, None, ["a.test"])
    network_list.allow(home, one, ["b.test:22"])
    network_list.disallow(home, one, ["a.test"])
    assert network_list.operator_list(home, one) == ["b.test:22"]
    assert network_list.operator_list(home, other) == ["a.test"]
    network_list.reset(home, one)
    assert network_list.operator_list(home, one) == ["a.test"]
    assert network_list.reset(home, None) == ["*"]


def test_each_edit_keeps_the_file_before_it(home: Path) -> None:
    network_list.disallow(home, None, ["*"])
    first = (home / "network.toml").read_text()
    network_list.allow(home, None, ["a.test"])
    assert (home / "network.toml.old").read_text() == first
    assert (home / "network.toml").stat().st_mode & 0o777 == 0o600


def test_the_list_is_in_force_during_each_edit(home: Path) -> None:
    """A missing file would admit every host."""
    network_list.disallow(home, None, ["*"])
    ended = threading.Event()

    def edit() -> None:
        for _ in range(100):
            network_list.allow(home, None, ["a.test"])
            network_list.disallow(home, None, ["a.test"])
        ended.set()

    thread = threading.Thread(target=edit)
    thread.start()
    seen = set()
    while not ended.is_set():
        seen.update(network_list.operator_list(home, Path("/")))
    thread.join()
    assert seen <= {"a.test"}


def test_a_worktree_has_the_list_of_its_repository(home: Path) -> None:
    network_list.disallow(home, Path("/repository"), ["*"])
    made = Worktree("id", "gt-1", "gt-1", "alice", "/repository", "/repository/.git", "gt-1", "", "", True, None, None)
    save(home, made)
    assert network_list.operator_list(home, worktree_paths(home, "id").tree) == []


def test_concurrent_edits_all_count(home: Path) -> None:
    network_list.disallow(home, None, ["*"])
    edits = [
        threading.Thread(target=network_list.allow, args=(home, None, [f"host{number}.test"])) for number in range(20)
    ]
    for edit in edits:
        edit.start()
    for edit in edits:
        edit.join()
    assert sorted(network_list.operator_list(home, Path("/"))) == sorted(f"host{number}.test" for number in range(20))


@pytest.mark.parametrize(
    "text",
    [
        "allow = [",
        "allow = 5",
        'allow = ["http://x"]',
        'allow = ["*", "a.test"]',
        "allow = [5]",
        "other = 1",
        "\xff",
        "source = []",
    ],
)
def test_a_broken_file_is_no_list(home: Path, text: str) -> None:
    (home / "network.toml").write_text(text, encoding="latin-1")
    with pytest.raises(PolicyError, match=r"network\.toml.*network reset"):
        network_list.operator_list(home, Path("/"))
    with pytest.raises(PolicyError):
        network_list.allow(home, None, ["a.test"])
    assert (home / "network.toml").read_text(encoding="latin-1") == text
    network_list.reset(home, None)
    assert (home / "network.toml.old").read_text(encoding="latin-1") == text


def test_an_entry_that_is_no_host_or_not_listed_is_an_error(home: Path) -> None:
    with pytest.raises(UsageError, match="no host"):
        network_list.allow(home, None, ["http://a.test"])
    with pytest.raises(UsageError, match="not in the list"):
        network_list.disallow(home, None, ["a.test"])
    assert not (home / "network.toml").exists()


def test_the_commands_show_and_edit_the_list(home: Path, source: Path) -> None:
    assert "operator: *" in bonobofs("network", "show").stdout
    assert bonobofs("network", "disallow", "*").stdout == "operator: no host\n"
    done = bonobofs("network", "allow", "api.test", "*.b.test:99", "--source", source)
    assert done.returncode == 0
    assert "still refuses api.test" in done.stderr
    shown = json.loads(bonobofs("network", "show", "--source", source, "--json").stdout)
    assert shown["operator"] == ["api.test", "*.b.test:99"]
    assert shown["sources"] == {str(source.resolve()): ["api.test", "*.b.test:99"]}
    assert shown["policy"] == []
    assert bonobofs("network", "allow", "a b").returncode == 2
    assert bonobofs("network", "reset").stdout == "operator: *\n"


def test_doctor_notes_that_every_host_is_admitted(home: Path, tmp_path: Path) -> None:
    def found() -> str:
        checks = json.loads(bonobofs("doctor", "--json").stdout)["checks"]
        return str(next(check["found"] for check in checks if check["name"] == "network lists"))

    assert found() == "`run` admits listed hosts only"
    (home / "policy.toml").write_text('[network]\nallow = ["*"]\n')
    assert found() == "`run` admits every host"
    bonobofs("network", "disallow", "*")
    assert found() == "`run` admits listed hosts only"
    (home / "network.toml").write_text("allow")
    assert found() == "cannot be read"
