"""A hostile push or repository is refused and recorded, and the source is unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from bonobofs.git.session_repository import CLIENT
from tests.git import packs
from tests.git.conftest import FILES, GUARDED, Publishing, PublishingMaker
from tests.git.packs import ZERO
from tests.support.repositories import Repo

REF = "refs/heads/aidlc/x"


def _state(one: Publishing) -> tuple[dict[str, str], set[str]]:
    """The references of the source, and the files of its object store."""
    objects = one.git_dir / "objects"
    return one.source.refs(), {str(path.relative_to(objects)) for path in objects.rglob("*") if path.is_file()}


def _is_refused(one: Publishing, data: bytes, new: str, what: object = "") -> dict[str, object]:
    """Push by hand what must be refused; the refusal as denials.jsonl has it."""
    before, seen = _state(one), len(one.denials())
    said = packs.push(one, [(ZERO, new, REF)], data)
    assert f"ok {REF}" not in said, what
    assert _state(one) == before, what
    denials = one.denials()
    assert len(denials) > seen, (what, said)
    return denials[-1]


def test_malformed_objects_are_refused(publishing: PublishingMaker) -> None:
    one = publishing()
    main = one.source.id()
    blob = packs.entry("blob", b"x")
    x = packs.oid("blob", b"x")
    inner = packs.tree((0o100644, b"x", x))
    trees = {
        "dot git": packs.tree((0o40000, b".git", packs.oid("tree", inner))),
        "dot git as a file": packs.tree((0o100644, b".GIT", x)),
        "short name of dot git": packs.tree((0o40000, b"git~1", packs.oid("tree", inner))),
        "dot dot": packs.tree((0o40000, b"..", packs.oid("tree", inner))),
        "dot": packs.tree((0o40000, b".", packs.oid("tree", inner))),
        "slash": packs.tree((0o100644, b"../../x", x)),
        "empty name": packs.tree((0o100644, b"", x)),
        "duplicate": packs.tree((0o100644, b"a", x), (0o100644, b"a", x)),
        "file and directory": packs.tree((0o100644, b"a", x), (0o40000, b"a", packs.oid("tree", inner))),
        "unsorted": packs.tree((0o100644, b"b", x), (0o100644, b"a", x)),
        "mode": packs.tree((0o104755, b"a", x)),
        "zero object": packs.tree((0o100644, b"a", ZERO)),
        "unseen characters": packs.tree((0o40000, ".g\u200cit".encode(), packs.oid("tree", inner))),
    }
    for what, content in trees.items():
        made = packs.commit(one, packs.oid("tree", content), main)
        entries = [blob, packs.entry("tree", inner), packs.entry("tree", content), packs.entry("commit", made)]
        _is_refused(one, packs.pack(entries), packs.oid("commit", made), what)

    link = packs.tree((0o120000, b".gitmodules", packs.oid("blob", b"x")))
    option = b'[submodule "l"]\n\tpath = l\n\turl = -u./payload\n'
    modules = packs.tree((0o100644, b".gitmodules", packs.oid("blob", option)))
    for content, more in ((link, b"x"), (modules, option)):
        made = packs.commit(one, packs.oid("tree", content), main)
        entries = [packs.entry("blob", more), packs.entry("tree", content), packs.entry("commit", made)]
        _is_refused(one, packs.pack(entries), packs.oid("commit", made), more)


def test_missing_and_damaged_objects_are_refused(publishing: PublishingMaker) -> None:
    one = publishing()
    main, inner = one.source.id(), packs.tree((0o100644, b"x", packs.oid("blob", b"x")))
    cases = {
        "missing parent": packs.commit(one, one.source.id("main^{tree}"), "1" * 40),
        "missing tree": packs.commit(one, "2" * 40, main),
        "missing blob": packs.commit(one, packs.oid("tree", inner), main),
        "parent is a tree": packs.commit(one, one.source.id("main^{tree}"), one.source.id("main^{tree}")),
        "unknown header": packs.commit(one, one.source.id("main^{tree}"), main, more=b"HG:extra x\n"),
        "two committers": packs.commit(one, one.source.id("main^{tree}"), main, more=b"committer E <e@x> 1 +0000\n"),
    }
    for what, made in cases.items():
        entries = [packs.entry("tree", inner), packs.entry("commit", made)]
        _is_refused(one, packs.pack(entries), packs.oid("commit", made), what)
    # Bytes that change on the way, a pack that is cut, and a commit that is not in the pack.
    made = packs.commit(one, one.source.id("main^{tree}"), main)
    whole = packs.pack([packs.entry("commit", made)])
    damaged = whole[:20] + bytes([whole[20] ^ 1]) + whole[21:]
    for what, data in (("damaged", damaged), ("cut", whole[:-30]), ("empty", packs.pack([]))):
        _is_refused(one, data, packs.oid("commit", made), what)
    assert f"ok {REF}" in packs.push(one, [(ZERO, packs.oid("commit", made), REF)], whole)
    assert one.source.id(REF) == packs.oid("commit", made)


def test_a_delta_bomb_and_200_000_references_are_refused(publishing: PublishingMaker) -> None:
    one = publishing()
    base = bytes(1 << 16)
    levels, content, size = [packs.entry("blob", base)], packs.oid("blob", base), 1 << 16
    # The second level would be 16 GiB, which no process of the worker may take.
    first = bytes(size * 240)
    levels.append(packs.delta(content, packs.copies(size, 240)))
    levels.append(packs.delta(packs.oid("blob", first), packs.copies(len(first), 1100)))
    made = packs.commit(one, one.source.id("main^{tree}"), one.source.id())
    _is_refused(one, packs.pack([*levels, packs.entry("commit", made)]), packs.oid("commit", made))

    main = one.source.id()
    before = _state(one)
    said = packs.push(one, ((ZERO, main, f"refs/heads/aidlc/b{number}") for number in range(200_000)), packs.pack([]))
    assert "ok refs/heads" not in said
    assert _state(one) == before
    assert one.denials()[-1]["rule"] == "git.limit"
    few = [(ZERO, main, f"refs/heads/aidlc/b{number}") for number in range(101)]
    packs.push(one, few, packs.pack([]))
    assert _state(one) == before
    # The worker serves on.
    one.repo.git("switch", "-qc", "aidlc/y")
    assert one.source.id("aidlc/y") == main


def test_publication_runs_no_program_of_the_source(publishing: PublishingMaker, tmp_path: Path) -> None:
    source = Repo(tmp_path / "armed").init()
    source.commit("[gt-0] The beginning", {**FILES, ".gitattributes": "*.md filter=f diff=d merge=m\n"})
    one = publishing(source=source)
    program = tmp_path / "armed.sh"
    program.write_text(f'#!/bin/sh\necho "$0 $@" >>{tmp_path}/ran\ncat\n')
    program.chmod(0o755)
    for name in (
        "pre-receive",
        "update",
        "post-receive",
        "post-update",
        "proc-receive",
        "reference-transaction",
        "post-index-change",
        "push-to-checkout",
        "pre-auto-gc",
        "post-checkout",
    ):
        (one.git_dir / "hooks" / name).symlink_to(program)
    config = {
        "receive.procReceiveRefs": "refs",
        "core.fsmonitor": str(program),
        "core.alternateRefsCommand": str(program),
        "core.gitProxy": str(program),
        "core.sshCommand": str(program),
        "filter.f.clean": str(program),
        "filter.f.smudge": str(program),
        "diff.d.command": str(program),
        "diff.d.textconv": str(program),
        "merge.m.driver": str(program),
        "uploadpack.packObjectsHook": str(program),
        "gc.auto": "1",
        "receive.autogc": "true",
        "receive.fsckObjects": "false",
        "receive.denyCurrentBranch": "refuse",
    }
    for key, value in config.items():
        source.git("config", key, value)
    # A replacement and a graft hide from the operator's git what main has; publication reads the objects themselves.
    other = source.git("commit-tree", "-m", "Empty", source.git("mktree").strip()).strip()
    source.git("replace", source.id("main"), other)
    (one.git_dir / "info").mkdir(exist_ok=True)
    (one.git_dir / "info/grafts").write_text(f"{source.id('main')} {other}\n")
    (tmp_path / "ran").unlink(missing_ok=True)

    one.repo.git("switch", "-qc", "aidlc/x")
    made = one.repo.commit("[gt-1] Change a", {"a.md": "changed\n"})
    one.repo.git("fetch", "-q", "source")
    one.repo.git("switch", "-q", "main")

    assert (one.git_dir / REF).read_text().strip() == made
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    for path in (one.git_dir / "hooks").iterdir():
        path.unlink()
    for key in config:
        source.git("config", "--unset", key)
    source.git("replace", "-d", source.id("main"), GIT_NO_REPLACE_OBJECTS="1")
    (one.git_dir / "info/grafts").unlink()


def test_replacements_and_grafts_of_the_session_have_no_effect(publishing: PublishingMaker) -> None:
    one = publishing(GUARDED)
    bad = one.repo.git("mktree", given=f"100644 blob {one.source.id('main:a.md')}\tCargo.toml\n").strip()
    made = one.repo.git("commit-tree", "-p", "main", "-m", "[gt-1] Bad", bad).strip()
    good = one.repo.git("commit-tree", "-p", "main", "-m", "[gt-1] Good", "main^{tree}").strip()
    one.repo.git("replace", made, good)
    before = _state(one)
    one.push(f"{made}:{REF}", code=1)
    grafts = one.world.path / ".git/info/grafts"
    one.repo.git("replace", "-d", made)
    grafts.write_text(f"{made}\n")
    one.push(f"{made}:{REF}", code=1)
    grafts.unlink()
    assert _state(one) == before
    paths = [entry.path for entry in one.entries() if entry.kind == "intent" and entry.result == "denied"]
    assert "Cargo.toml" in paths


def test_concurrent_pushes_and_operator_commits_lose_nothing(publishing: PublishingMaker, tmp_path: Path) -> None:
    alice = publishing()
    bob = publishing(source=alice.source, agent="bob")
    refused: list[str] = []
    base = alice.source.id("main")

    def work(one: Publishing, name: str) -> None:
        made = base
        for number in range(5):
            made = one.repo.git("commit-tree", "main^{tree}", "-p", made, "-m", f"[gt-1] {name} {number}").strip()
            for ref in (f"aidlc/{name}", "aidlc/both"):
                done = one.repo.run("push", "source", f"{made}:refs/heads/{ref}")
                if done.returncode and "both" not in ref:
                    refused.append(done.stderr.decode())

    def operate() -> None:
        for number in range(5):
            alice.source.commit(f"[gt-0] Operator {number}", {f"op{number}.md": "x"})
            alice.source.git("gc", "-q", "--prune=now")

    threads = [
        threading.Thread(target=work, args=(alice, "alice")),
        threading.Thread(target=work, args=(bob, "bob")),
        threading.Thread(target=operate),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == []
    for name in ("alice", "bob"):
        assert alice.source.git("rev-list", "--count", f"aidlc/{name}").strip() == "6"
    assert alice.source.git("rev-list", "--count", "main").strip() == "6"
    subjects = set(alice.source.git("log", "--format=%s", "-5", "aidlc/both").splitlines())
    assert len({subject.split()[1] for subject in subjects}) == 1  # one agent's branch alone


def test_a_call_with_wrong_descriptors_is_refused(publishing: PublishingMaker, tmp_path: Path) -> None:
    one = publishing()
    command = [sys.executable, "-I", "-S", "-E", str(CLIENT), str(one.socket), "receive-pack", "x"]
    for path in (Path("/dev/null"), tmp_path, Path("/dev/full")):
        number = os.open(path, os.O_RDONLY)
        subprocess.run(command, stdin=number, stdout=number, stderr=number, check=False, timeout=60)
        os.close(number)
    one.repo.git("switch", "-qc", "aidlc/y")
    assert one.source.id("aidlc/y") == one.source.id("main")
