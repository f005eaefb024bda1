"""Publication through a real mount: what reaches the source, what is refused, and what the record says."""

from __future__ import annotations

from tests.git_session.conftest import Published


def test_a_commit_on_a_new_branch_is_published_and_recorded(publishing: Published) -> None:
    one = publishing()
    one.repo.git("switch", "-qc", "aidlc/gt-1")
    made = one.repo.commit("[gt-1] Add a page", {"docs/c.md": "c\n"})

    status, line = one.publish()

    assert (status, line) == (0, "published aidlc/gt-1 (1 commit)\n")
    assert one.source.id("aidlc/gt-1") == made
    intent, outcome = [entry for entry in one.entries() if entry.operation == "publish"]
    assert (intent.kind, outcome.kind, outcome.result) == ("intent", "outcome", "allowed")
    [update] = intent.details["updates"]
    assert update == {
        "ref": "refs/heads/aidlc/gt-1",
        "old": "",
        "new": made,
        "kind": "create",
        "commits": [made],
        "count": 1,
    }
    assert intent.details["paths"] == ["docs/c.md"]
