"""Package managers and build programs of other projects, offline, under the preset `project`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.world import ROOT
from tests.workflows.test_builds import make_wheel
from tests.workflows.workshop import Place, Work, Workshop

TOOLS: Final = Path(os.environ.get("BONOBOFS_TOOLS", ROOT / ".venv-tools"))
"""Where scripts/test puts what Debian does not have."""
POLICY: Final = Path("project")
"""The preset that a person gets who names no policy."""
PATIENCE: Final = 180.0
"""Seconds that one program may take: a compiler with an empty cache on a loaded machine."""
PYTHON: Final = str(Path(sys.base_prefix) / "bin" / "python3")
NOTEBOOK: Final = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}

PROJECT: Final = """\
[project]
name = "app"
version = "1.0"
requires-python = ">=3.11"
dependencies = ["tiny"]
[tool.uv]
package = false
[tool.uv.sources]
tiny = { path = "vendor/tiny-1.0-py3-none-any.whl" }
"""
EDITABLE: Final = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "app"
version = "1.0"
[tool.setuptools.packages.find]
where = ["lib"]
"""
SAFE_WRITE: Final = """\
cp "$1" "$1___jb_old___"; echo new > "$1___jb_tmp___"; mv "$1___jb_tmp___" "$1"; rm "$1___jb_old___"
name=$(mktemp "$1.XXXXXX"); echo newer > "$name"; chmod 644 "$name"; mv "$name" "$1"
"""
CRATE: Final = '[package]\nname = "{0}"\nversion = "0.1.0"\nedition = "2021"\n[workspace]\n'

FILES: Final[dict[str, dict[str, str]]] = {
    "uv": {"pyproject.toml": PROJECT},
    "poetry": {
        "pyproject.toml": '[tool.poetry]\npackage-mode = false\n[tool.poetry.dependencies]\npython = ">=3.11"\n'
        'tiny = { path = "vendor/tiny-1.0-py3-none-any.whl" }\n',
    },
    "virtualenv": {},
    "tox": {"tox.ini": '[tox]\nenvlist = t\n[testenv]\nskip_install = true\ncommands = python -c "print(1)"\n'},
    "nox": {"noxfile.py": 'import nox\n\n@nox.session\ndef t(s):\n    s.run("python", "-c", "print(1)")\n'},
    "pip install -e": {"pyproject.toml": EDITABLE, "lib/app/__init__.py": "def main(): pass\n"},
    "nbconvert": {"notes.ipynb": json.dumps(NOTEBOOK)},
    "pnpm": {
        "package.json": '{"name": "app", "dependencies": {"lib": "file:lib"}}',
        "lib/package.json": '{"name": "lib"}',
    },
    "yarn": {
        "package.json": '{"name": "app", "dependencies": {"lib": "file:lib"}}',
        "lib/package.json": '{"name": "lib"}',
    },
    "vite": {"index.html": '<script type="module" src="/main.js"></script>\n', "main.js": "console.log(1);\n"},
    "go": {
        "go.mod": "module example.org/x\n",
        "x_test.go": 'package x\n\nimport "testing"\n\nfunc TestX(t *testing.T) {}\n',
    },
    "cargo": {
        "crates/a/Cargo.toml": CRATE.format("a"),
        "crates/a/src/main.rs": "fn main() {}\n",
        "crates/b/Cargo.toml": CRATE.format("b"),
        "crates/b/src/lib.rs": "pub fn b() {}\n",
    },
    "safe writes": {},
}
COMMANDS: Final[dict[str, list[list[str]]]] = {
    "uv": [
        ["uv", "venv", "--offline", "--python", PYTHON],
        ["uv", "sync", "--offline", "--python", PYTHON],
        ["uv", "run", "--offline", "tiny"],
    ],
    "poetry": [["poetry", "install", "--quiet"], ["poetry", "run", "tiny"]],
    "virtualenv": [
        ["virtualenv", "--quiet", "--no-periodic-update", "--python", PYTHON, ".venv"],
        [".venv/bin/python", "-c", ""],
    ],
    "tox": [["tox", "-q"]],
    "nox": [["nox"]],
    "pip install -e": [
        [
            "python",
            "-m",
            "pip",
            "install",
            "-q",
            "-e",
            ".",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--target",
            "build/t",
        ]
    ],
    "nbconvert": [
        ["jupyter", "nbconvert", "--to", "html", "notes.ipynb"],
        ["jupyter", "nbconvert", "--inplace", "--to", "notebook", "notes.ipynb"],
    ],
    "pnpm": [["pnpm", "install", "--offline", "--silent"], ["ls", "node_modules/lib"]],
    "yarn": [["yarn", "install"], ["ls", "node_modules/lib"]],
    "vite": [["vite", "build", "--logLevel", "error"], ["ls", "dist/assets"]],
    "go": [["go", "test", "./..."], ["go", "vet", "./..."], ["gofmt", "-w", "x_test.go"]],
    "cargo": [
        ["cargo", "add", "--offline", "--quiet", "--manifest-path", "crates/a/Cargo.toml", "--path", "crates/b"],
        ["sh", "-c", "cd crates/a && cargo build --offline --quiet"],
    ],
    "safe writes": [["sh", "-ec", SAFE_WRITE, "sh", "src/sum.c"], ["cat", "src/sum.c"]],
}
LAYER: Final = {"cargo": ["crates/a/target"]}
ENVIRONMENT: Final = {
    "GOCACHE": str(TOOLS / "go-cache"),
    "GOFLAGS": "-mod=mod",
    "GOTOOLCHAIN": "local",
    "POETRY_VIRTUALENVS_IN_PROJECT": "true",
    "UV_PYTHON_DOWNLOADS": "never",
    "YARN_ENABLE_TELEMETRY": "0",
    "YARN_NODE_LINKER": "node-modules",
}


def _prepare(name: str) -> Work:
    def lay(at: Place) -> None:
        for path, text in FILES[name].items():
            (at / path).parent.mkdir(parents=True, exist_ok=True)
            at.write(path, text)
        if "vendor/" in FILES[name].get("pyproject.toml", ""):
            make_wheel(at / "vendor", "1.0")

    return lay


def _work(name: str) -> Work:
    def work(at: Place) -> list[str]:
        path = f"{TOOLS}/bin:{TOOLS}/node_modules/.bin:{at.env['PATH']}"
        return [at.run(*command, env={**ENVIRONMENT, "PATH": path}, seconds=PATIENCE) for command in COMMANDS[name]][1:]

    return work


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_toolchain_works_under_the_preset_project(name: str, workshop: Workshop) -> None:
    """It leaves the same files in a mount as in a bare directory, and no call is refused."""
    workshop.compare(_work(name), _prepare(name), policy=POLICY, layer=LAYER.get(name, ()))
