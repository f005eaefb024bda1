"""The build: which modules the server runs, and what `mount` and `doctor` say of it."""

from __future__ import annotations

import importlib
import json
import os
import tomllib
from pathlib import Path
from typing import Final

from tests.support.commands import bonobofs
from tests.support.mount_fixtures import MakePlace
from tests.support.world import ROOT

BUILD: Final = os.environ.get("BONOBOFS_BUILD", "pure Python")
"""The build that is tested; scripts/compiled sets it."""


def _included() -> set[str]:
    """The modules that the compiled build compiles, by their paths without the suffix."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    paths = document["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]["include"]
    return {path.removesuffix(".py") for path in paths}


def test_the_server_runs_the_build(place: MakePlace) -> None:
    """The server loads the shared library of the compiled modules from the package, also for an ordinary user."""
    paths = {line.split()[-1] for line in Path(f"/proc/{place().pid}/maps").read_text().splitlines()}
    libraries = {Path(path).parent for path in paths if "__mypyc." in path}
    assert libraries == ({ROOT} if BUILD == "compiled" else set())


def test_mount_and_doctor_name_the_build(home: Path, source: Path, tmp_path: Path) -> None:
    """They run in other processes than the server, and say what it runs."""
    mountpoint = tmp_path / "mountpoint"
    mountpoint.mkdir()
    mounted = bonobofs("mount", source, mountpoint, "--agent", "alice", "--new", "--transport", "kernel")
    assert mounted.returncode == 0, mounted.stderr
    try:
        assert f"transport kernel, {BUILD}, session" in mounted.stdout
    finally:
        assert bonobofs("umount", mountpoint).returncode == 0
    checks = json.loads(bonobofs("doctor", "--json").stdout)["checks"]
    assert [check["found"] for check in checks if check["name"] == "build"] == [BUILD]


def test_the_modules_of_the_tests_are_those_of_the_build() -> None:
    """Tests that call the package in their own process test the same build."""
    suffix = ".so" if BUILD == "compiled" else ".py"
    files = {path: importlib.import_module(path.replace("/", ".")).__file__ for path in _included()}
    assert {path: file for path, file in files.items() if file is None or not file.endswith(suffix)} == {}
