"""The trees of the benchmarks: a generated one that is always equal, or a real one. Each is a git repository."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sysconfig
from pathlib import Path

from benchmarks.plan import READ_BYTES, BenchError

GIT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_COUNT": "3",
    "GIT_CONFIG_KEY_0": "gc.auto",
    "GIT_CONFIG_VALUE_0": "0",
    "GIT_CONFIG_KEY_1": "safe.directory",
    "GIT_CONFIG_VALUE_1": "*",
    "GIT_CONFIG_KEY_2": "core.fsync",
    "GIT_CONFIG_VALUE_2": "none",
    "GIT_AUTHOR_NAME": "bench",
    "GIT_AUTHOR_EMAIL": "bench@bonobofs.invalid",
    "GIT_COMMITTER_NAME": "bench",
    "GIT_COMMITTER_EMAIL": "bench@bonobofs.invalid",
}
"""Git without anybody's configuration; a tree that is handed to another user stays usable."""

RENAME_GIT = r"s,^tree/\.git\(/\|$\),tree/repository\1,"
"""How tar names the repository's own directory in the archive: a mount refuses a nested `.git`."""

GENERATED_FILES = 3_700
GENERATED_MODULES = 160
MEAN_BYTES = 14_000
COMMITS = 3
SUFFIXES = (".md", ".c", ".h", ".js", ".json", ".txt", ".rst", ".toml")
COMPILED_BYTES = 1_500_000


def prepare(name: str, base: Path, scale: float) -> None:
    """Fill BASE: `source/tree`, `source/big` (1 GiB at scale 1), `tree.tar`, `modules`.

    NAME is "generated", "stdlib" or the path of a directory; the tree is copied or cloned, never worked on in place.
    """
    tree = base / "source" / "tree"
    tree.parent.mkdir(parents=True)
    if name == "generated":
        _generate(tree, scale)
        _commit(tree)
    else:
        _copy(Path(sysconfig.get_path("stdlib") if name == "stdlib" else name), tree)
    _fill(base / "source" / "big", int(READ_BYTES * scale))
    _run("tar", "-cf", str(base / "tree.tar"), "-C", str(tree.parent), "--transform", RENAME_GIT, "tree")
    _collect_modules(tree, base / "modules")
    for directory in ("mnt", "home"):
        (base / directory).mkdir(mode=0o700)


def measure_of(tree: Path) -> tuple[int, int]:
    """How many entries other than directories TREE has, and their bytes."""
    count = size = 0
    for directory, _, names in os.walk(tree):
        count += len(names)
        size += sum(os.lstat(os.path.join(directory, name)).st_size for name in names)
    return count, size


def hand_over(base: Path, user: int, group: int) -> None:
    """Make everything below BASE belong to the user who is measured next."""
    os.chown(base, user, group)
    for directory, directories, names in os.walk(base):
        for name in (*directories, *names):
            os.chown(os.path.join(directory, name), user, group, follow_symlinks=False)


def _generate(tree: Path, scale: float) -> None:
    chance = random.Random(20_240_611)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 11))) for _ in range(4_000)]
    pool = "".join(chance.choice(words) + chance.choice("   .\n") for _ in range(400_000)).encode()
    directories = [tree]
    for number in range(max(4, int(GENERATED_FILES * scale / 11))):
        parent = chance.choice(directories[-40:])
        directories.append(parent / f"{chance.choice(words)}{number}")
    for directory in directories:
        directory.mkdir()
    for number in range(int(GENERATED_FILES * scale)):
        size = min(len(pool) // 2, int(chance.lognormvariate(0, 1.3) * MEAN_BYTES * 0.43))
        begin = chance.randrange(len(pool) - size)
        name = f"{chance.choice(words)}_{number}{chance.choice(SUFFIXES)}"
        (chance.choice(directories) / name).write_bytes(pool[begin : begin + size])
    package = tree / "package"
    package.mkdir()
    for number in range(max(2, int(GENERATED_MODULES * scale))):
        (package / f"module_{number}.py").write_text(_module(chance, words))


def _module(chance: random.Random, words: list[str]) -> str:
    functions = []
    for number in range(40):
        name, other, third = chance.choices(words, k=3)
        functions.append(
            f"def {name}_{number}(x_{other}: int, y_{third}: list[int]) -> int:\n"
            f'    """{" ".join(chance.choices(words, k=8))}"""\n'
            f"    for step in range(x_{other}):\n"
            f"        if step % {chance.randint(2, 9)} and step not in y_{third}:\n"
            f"            y_{third}.append(step * {chance.randint(2, 99)} + len(y_{third}))\n"
            f"    return sum(y_{third}) + x_{other}\n"
        )
    return "\n\n".join(functions)


def _copy(origin: Path, tree: Path) -> None:
    if not origin.is_dir():
        raise BenchError(f"{origin} is not a directory: give --tree generated, stdlib or a directory")
    if (origin / ".git").exists():
        _run("git", "clone", "--quiet", "--no-hardlinks", str(origin.resolve()), str(tree))
        return
    shutil.copytree(origin, tree, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "site-packages"))
    _commit(tree)


def _commit(tree: Path) -> None:
    """Commit TREE in three steps, so that .git has a history of loose objects."""
    _run("git", "-C", str(tree), "init", "--quiet", "--initial-branch", "main")
    tops = sorted(entry.name for entry in tree.iterdir() if entry.name != ".git")
    for step in range(COMMITS):
        if part := tops[step::COMMITS]:
            _run("git", "-C", str(tree), "add", "--force", "--", *part)
            _run("git", "-C", str(tree), "commit", "--quiet", "--message", f"Part {step}")


def _fill(path: Path, size: int) -> None:
    piece = random.Random(1).randbytes(1 << 20)
    with path.open("wb", buffering=0) as file:
        for begin in range(0, size, len(piece)):
            file.write(piece[: size - begin])


def _collect_modules(tree: Path, modules: Path) -> None:
    """Copy Python files, in the order of their paths, until there are 1.5 MB of them."""
    modules.mkdir()
    room = COMPILED_BYTES
    for number, path in enumerate(sorted(tree.rglob("*.py"))):
        size = path.lstat().st_size
        if path.is_file() and not path.is_symlink() and size <= room:
            shutil.copyfile(path, modules / f"m{number}_{path.name}")
            room -= size


def _run(*command: str) -> None:
    done = subprocess.run(command, env=os.environ | GIT, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{' '.join(command[:4])}: {done.stderr.strip().splitlines()[-1:]}")
