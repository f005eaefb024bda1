"""Several processes at once: what one does must never show another a state that cannot be."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.posix.harness import See, attempt, case
from tests.support.syscalls import make, names, opened, opening, read, write

pytestmark = pytest.mark.alone


def _together(*calls: Callable[[], object]) -> list[Any]:
    """What each call gives, each made by a process of its own, all at the same time."""
    gate_out, gate_in = os.pipe()
    running = []
    for call in calls:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(gate_in)
            os.read(gate_out, 1)
            with open(writer, "wb") as answer:
                pickle.dump(attempt(call), answer)
            os._exit(0)
        os.close(writer)
        running.append((child, reader))
    os.close(gate_in)
    os.close(gate_out)
    results = []
    for child, reader in running:
        with open(reader, "rb") as answer:
            results.append(pickle.load(answer))
        os.waitpid(child, 0)
    return results


def _outcomes(times: int, *calls: Callable[[], object]) -> set[object]:
    """The different outcomes of calls that are repeated in turn."""
    return {attempt(call) for _ in range(times) for call in calls}


@case()
def test_replaced_and_read(see: See) -> None:
    """Who reads a file that is replaced again and again always reads one whole version."""
    make("a.md", b"00" * 500)

    def replace() -> None:
        for number in range(150):
            make("b.md", b"%02d" % (number % 100) * 500)
            os.rename("b.md", "a.md")

    def look() -> tuple[set[object], set[object]]:
        outcomes = [attempt(read, "a.md") for _ in range(300)]
        contents = [each for each in outcomes if isinstance(each, bytes)]
        wholes: set[object] = {(len(content), content == content[:2] * 500) for content in contents}
        return wholes, {each for each in outcomes if not isinstance(each, bytes)}

    replaced, *seen = _together(replace, look, look)
    see("replaced", None, lambda: replaced)
    see("contents", [{(1000, True)}] * 2, lambda: [wholes for wholes, _ in seen])
    see("errors", [set(), set()], lambda: [errors for _, errors in seen])
    see("left", ["a.md"], names, see.at)


@case()
def test_made_and_removed(see: See) -> None:
    """Opening a file that comes and goes gives it whole or says that there is none."""

    def come_and_go() -> set[object]:
        return _outcomes(150, lambda: make("a.md", b"content"), lambda: os.unlink("a.md"))

    def look() -> set[object]:
        return _outcomes(300, lambda: read("a.md"))

    mine, *theirs = _together(come_and_go, look, look)
    see("made and removed", {None}, lambda: mine)
    see("seen otherwise", [set(), set()], lambda: [found - {"ENOENT", b"", b"content"} for found in theirs])


@case()
def test_opened_while_removed(see: See) -> None:
    """O_CREAT opens or creates while another process removes the name; an open file can be used."""

    def use() -> set[object]:
        def once() -> int:
            with opened("a.md", os.O_RDWR | os.O_CREAT) as fd:
                os.write(fd, b"x")
                return len(os.pread(fd, 1, 0))

        return _outcomes(200, once)

    def remove() -> set[object]:
        return _outcomes(400, lambda: os.unlink("a.md"))

    one, two, removed = _together(use, use, remove)
    see("used", [{1}, {1}], lambda: [one, two])
    see("removed", set(), lambda: removed - {None, "ENOENT"})


@case()
def test_made_while_its_directory_moves(see: See) -> None:
    """A file created below a directory descriptor is there, under any present name of the directory."""
    os.makedirs("d/e")
    make("d/e/kept.md", b"kept")

    def move() -> None:
        for _ in range(100):
            os.rename("d", "f")
            os.rename("f", "d")

    with opened("d/e", os.O_RDONLY | os.O_DIRECTORY) as fd:

        def fill() -> set[object]:
            for number in range(150):
                with os.fdopen(os.open(f"{number}.md", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=fd), "wb") as file:
                    file.write(b"%d" % number)
            return {len(os.listdir(fd))}

        def look() -> set[object]:
            return _outcomes(300, lambda: read("d/e/kept.md")) - {"ENOENT", b"kept"}

        see("outcomes", [None, {151}, set()], _together, move, fill, look)
    see("contents", [b"%d" % number for number in range(150)], lambda: [read(f"d/e/{n}.md") for n in range(150)])


@case()
def test_one_winner(see: See) -> None:
    """Of several that make, remove or take one name, one succeeds each time."""
    won: dict[str, list[int]] = {"mkdir": [], "rmdir": [], "symlink": [], "unlink": [], "rename": [], "link": []}
    for turn in range(8):
        make(f"{turn}.md")
        for what, call in (
            ("mkdir", lambda: os.mkdir("d")),
            ("rmdir", lambda: os.rmdir("d")),
            ("symlink", lambda: os.symlink("x", "l.md")),
            ("unlink", lambda: os.unlink("l.md")),
            ("link", lambda turn=turn: os.link(f"{turn}.md", f"link-{turn}.md")),
            ("rename", lambda turn=turn: os.rename(f"{turn}.md", f"renamed-{turn}.md")),
        ):
            won[what].append(_together(call, call, call).count(None))
    for what, winners in won.items():
        see(what, [1] * 8, lambda winners=winners: winners)


@case()
def test_hard_links_and_writers(see: See) -> None:
    """Writers through different names of one file write one file, while names come and go."""
    make("a.md", bytes(100))
    os.link("a.md", "b.md")

    def put(name: str, at: int) -> set[object]:
        def once() -> int:
            with opened(name, os.O_WRONLY) as fd:
                return os.pwrite(fd, b"x", at)

        return _outcomes(100, once)

    def rename() -> set[object]:
        return _outcomes(100, lambda: os.link("a.md", "c.md"), lambda: os.unlink("c.md"))

    see("outcomes", [{1}, {1}, {None}], _together, lambda: put("a.md", 1), lambda: put("b.md", 2), rename)
    see("content", b"\0xx\0", lambda: read("a.md")[:4])
    see("links", 2, lambda: os.stat("b.md").st_nlink)


@case()
def test_random_names_together(see: See) -> None:
    """Four processes that make, move and remove at random leave a tree in which everything can be used."""
    for name in ("d", "e"):
        os.mkdir(name)

    def stir(seed: int) -> set[object]:
        dice, found = random.Random(seed), set()
        pool = [f"{d}{n}.md" for d in ("", "d/", "e/", "d/f/") for n in range(4)]
        for _ in range(250):
            one, two = dice.choice(pool), dice.choice(pool)
            changes: tuple[tuple[Any, ...], ...] = (
                *((os.rename, one, two), (os.link, one, two), (os.unlink, one), (opening, one)),
                *((make, one, two.encode()), (write, one, two.encode()), (os.mkdir, "d/f"), (os.rmdir, "d/f")),
            )
            call, *arguments = dice.choice(changes)
            found.add(attempt(call, *arguments))
        return {outcome for outcome in found if isinstance(outcome, str)}

    outcomes = _together(*(lambda seed=seed: stir(seed) for seed in range(4)))
    usual = {"ENOENT", "EEXIST", "ENOTEMPTY"}
    see("errors that should not be", [set()] * 4, lambda: [found - usual for found in outcomes])
    see("use", {"ok"}, lambda: {_use(f"{top}/{name}") for top, _, files in os.walk(".") for name in files})


def _use(path: str) -> str:
    write(path, b"used")
    return "ok" if read(path)[:4] == b"used" and os.stat(path).st_nlink > 0 else path
