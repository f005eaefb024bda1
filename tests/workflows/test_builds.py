"""Package managers, compilers and test runners, whose products are scratch."""

from __future__ import annotations

import gzip
import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.workflows.workshop import PACKAGES, Place, workflow

NPM = ("npm", "--offline", "--no-audit", "--no-fund", "--no-update-notifier")
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-cache-dir")


def _wheel(at: Place, version: str) -> Path:
    """A package with a command, outside the place."""
    return make_wheel(at.home, version)


def make_wheel(directory: Path, version: str) -> Path:
    """A package with a command, in a directory that is made where it is missing."""
    directory.mkdir(exist_ok=True)
    files = {
        "tiny/__init__.py": f"def main():\n    print('tiny {version}')\n",
        f"tiny/only_in_{version[0]}.py": "",
        f"tiny-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
        f"tiny-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"tiny-{version}.dist-info/entry_points.txt": "[console_scripts]\ntiny = tiny:main\n",
        f"tiny-{version}.dist-info/RECORD": "",
    }
    wheel = directory / f"tiny-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return wheel


# The interpreter below the one of the tests: an environment of an environment is not what people make.
PYTHON = Path(sys.base_prefix) / "bin" / "python3"


@pytest.mark.timeout(300)
@workflow()
def test_pip_installs_and_uninstalls(at: Place) -> str:
    """`python -m venv` and `pip install` make an environment whose new command runs, and pip removes it again."""
    at.run(PYTHON, "-m", "venv", ".venv")
    at.run(".venv/bin/python", *PIP, "install", "--no-index", _wheel(at, "1.0"))
    said = at.run(".venv/bin/tiny")
    at.run(".venv/bin/python", *PIP, "uninstall", "--yes", "tiny")
    assert said == "tiny 1.0\n"
    assert not (at / ".venv/bin/tiny").exists()
    return said


def environment(at: Place) -> None:
    """An environment with an old package, as a person may have made it before."""
    at.run(PYTHON, "-m", "venv", "--without-pip", ".venv")
    at.run(sys.executable, *PIP, "--python", ".venv/bin/python", "install", "--no-index", _wheel(at, "0.9"))


@workflow(environment)
def test_pip_upgrades_an_environment_of_the_source(at: Place) -> list[str]:
    """The environment in the source is unchanged."""
    old = at.run(".venv/bin/python", "-c", "import tiny; tiny.main()")
    at.run(sys.executable, *PIP, "--python", ".venv/bin/python", "install", "--no-index", _wheel(at, "1.0"))
    said = [old, at.run(".venv/bin/python", "-c", "import tiny; tiny.main()")]
    assert said == ["tiny 0.9\n", "tiny 1.0\n"]
    return [*said, *sorted(at.run("find", ".venv", "-name", "*tiny*", "-o", "-name", "~*").splitlines())]


def node_project(at: Place) -> None:
    """An application, and the archives of two versions of a package with a command for it."""
    at.write("package.json", '{"name": "app", "version": "1.0.0"}\n')
    (at / "vendor").mkdir()
    for version in ("0.9.0", "1.0.0"):
        package = {
            "package.json": f'{{"name": "tiny", "version": "{version}", "main": "it.js", "bin": "cli.js"}}',
            "it.js": f"module.exports = 'tiny {version}';\n",
            f"only-in-{version[0]}.js": "",
            "cli.js": "#!/usr/bin/env node\nconsole.log(require('tiny'));\n",
        }
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, text in package.items():
                member = tarfile.TarInfo(f"package/{name}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        (at / f"vendor/tiny-{version}.tgz").write_bytes(gzip.compress(packed.getvalue(), mtime=0))


@workflow(node_project)
def test_npm_installs_a_package(at: Place) -> list[str]:
    """`npm install` brings a package with a command into node_modules and both manifests, and `npm ci` repeats it."""
    at.run(*NPM, "install", "./vendor/tiny-1.0.0.tgz")
    said = at.run("node_modules/.bin/tiny")
    at.run(*NPM, "ci")
    assert said == "tiny 1.0.0\n"
    return [said, at.run(*NPM, "exec", "tiny"), os.readlink(at / "node_modules/.bin/tiny"), *at.names("node_modules")]


def node_modules(at: Place) -> None:
    """An application that has the old version installed."""
    node_project(at)
    at.run(*NPM, "install", "./vendor/tiny-0.9.0.tgz")


@workflow(node_modules)
def test_npm_upgrades_node_modules_of_the_source(at: Place) -> list[str]:
    """`npm install` upgrades a package, and removes it."""
    old = at.run("node_modules/.bin/tiny")
    at.run(*NPM, "install", "./vendor/tiny-1.0.0.tgz")
    said = [old, at.run("node_modules/.bin/tiny"), *at.names("node_modules/tiny")]
    at.run(*NPM, "uninstall", "tiny")
    assert said[:2] == ["tiny 0.9.0\n", "tiny 1.0.0\n"]
    return [*said, at.text("package.json"), str((at / "node_modules/tiny").exists())]


def rust_project(at: Place) -> None:
    manifest = '[package]\nname = "tiny"\nversion = "0.1.0"\nedition = "2021"\n\n[lib]\npath = "src/lib.rs"\n'
    at.write("Cargo.toml", manifest)
    at.write("src/lib.rs", 'pub fn word() -> &\'static str {\n    "tiny"\n}\n')
    at.write("src/main.rs", 'fn main() {\n    println!("{}", tiny::word());\n}\n')


@workflow(rust_project)
def test_cargo_builds_a_crate(at: Place) -> list[str]:
    """`cargo build` compiles a crate, rebuilds it after a change, and leaves Cargo.lock."""
    at.run("cargo", "build", "--offline", "--quiet")
    said = [at.run("target/debug/tiny")]
    at.run("sed", "-i", 's/"tiny"/"changed"/', "src/lib.rs")
    said.append(at.run("cargo", "run", "--offline", "--quiet"))
    assert said == ["tiny\n", "changed\n"]
    return [*said, at.text("Cargo.lock")]


def rust_target(at: Place) -> None:
    """A crate that was built where it lies."""
    rust_project(at)
    at.run("cargo", "build", "--offline", "--quiet")


@workflow(rust_target)
def test_cargo_rebuilds_and_cleans_a_target_of_the_source(at: Place) -> list[str]:
    """The earlier build in the source is unchanged."""
    said = [at.run("target/debug/tiny")]
    at.run("sed", "-i", 's/"tiny"/"changed"/', "src/lib.rs")
    said.append(at.run("cargo", "run", "--offline", "--quiet"))
    at.run("cargo", "clean")
    assert not (at / "target").exists()
    said.append(at.run("cargo", "run", "--offline", "--quiet"))
    assert said == ["tiny\n", "changed\n", "changed\n"]
    return said


def stale_build(at: Place) -> None:
    (at / "build").mkdir()
    at.write("build/main.o", "not an object\n")
    at.write("build/kept.txt", "kept\n")
    for name in ("main.o", "kept.txt"):
        os.utime(at / "build" / name, (1, 1))


@workflow(stale_build)
def test_make_rebuilds_and_cleans(at: Place) -> list[str]:
    """`make` with gcc builds over an earlier build, does not rebuild without a change, rebuilds and cleans."""
    at.run("make")
    said = [at.run("build/sum"), at.run("make"), *at.names("build")]
    at.run("sed", "-i", "s/a + b/a * b/", "src/sum.c")
    at.run("make")
    said.append(at.run("build/sum"))
    at.run("make", "clean")
    assert not (at / "build").exists()
    at.run("make")
    assert said[0] == "3\n"
    return [*said, at.run("build/sum"), *at.names("build")]


@workflow()
def test_pytest_runs_with_its_caches(at: Place) -> list[str]:
    """pytest runs tests, keeps its cache and its bytecode, and knows in the next run which test failed."""
    program = (sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "--tb=no", "--rootdir=.", "tests")
    at.run(*program, code=1, env={"PYTHONPATH": PACKAGES})
    again = at.run(*program, "--last-failed", code=1, env={"PYTHONPATH": PACKAGES})
    assert "1 failed in" in again
    said = [*at.names(".pytest_cache"), at.text(".pytest_cache/v/cache/lastfailed"), *at.names("tests")]
    at.run("python3", "-m", "compileall", "-q", "orchestrator")
    return [*said, *at.names("orchestrator")]
