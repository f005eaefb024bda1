"""Each attack fails with the error of its rule, changes no file, and is recorded with its process."""

from __future__ import annotations

import os
from hashlib import sha256

import pytest

from bonobofs.audit.entry import AuditEntry
from tests.attacks.attack import ATTACKS
from tests.attacks.attacker import TOOL, load
from tests.attacks.ground import Ground
from tests.support.trees import differences

load()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails_changes_no_file_and_is_recorded(name: str, ground: Ground) -> None:
    """The source is unchanged, and the record names the process."""
    attack = ATTACKS[name]
    place = ground.prepare(attack)
    before, outside = ground.snapshot(place)
    ground.news()

    answer = ground.run(attack)

    after, outside_after = ground.snapshot(place)
    denied = [entry for entry in ground.news() if entry.result == "denied" and entry.kind == "intent"]
    own = (f"{place.docs}/", f"{place.code}/")
    target = attack.target(place)
    new = {path for path in after.keys() - before.keys() if path.startswith(own) and path != target}
    spent = {f"{place.docs}/{name}" for name in attack.spends}
    changed = {path for path in differences(before, after) if path not in new | spent and path != place.docs}
    answers = {(code, path): error for error, code, path in attack.answers(place)}
    assert answer.said in answers.values()
    assert differences(outside, outside_after) == {}
    if target in after and target not in before:
        assert target.startswith(own), "it was made by the attacker itself"
        changed.discard(target)
    assert changed == set()
    wanted = {(code, path) for (code, path), error in answers.items() if error == answer.said}
    entry, *_ = (one for one in denied if any(one.code == code and _is_about(one, path) for code, path in wanted))
    assert (entry.agent, entry.agent_id) == ("alice", ground.session.agent_id)
    assert (entry.action, entry.governance) != ("", "pass")
    if attack.by_kernel:
        assert (entry.tool, entry.details["pid"]) == ("", 0)
    else:
        assert (entry.tool, entry.details["pid"]) == (TOOL, answer.pid)


def _is_about(entry: AuditEntry, path: str) -> bool:
    """The entry of a refusal keeps the ends of a long path, and the hash of the whole."""
    return path == entry.path or entry.details.get("path_sha256") == sha256(os.fsencode(path)).hexdigest()
