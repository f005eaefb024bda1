"""validate_result_json: every rule of the schema, all errors at once, and the metrics that a claim names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bonobofs.guards import validate_result_json
from bonobofs.integrity.result_document import LARGEST, ResultError
from tests.support.world import bonobofs

VALID: dict[str, Any] = {
    "schema_version": "1.0",
    "summary": "Brief outcome summary",
    "proposed_changes": ["List", "of", "changes"],
    "kr_targets": ["kr-123", "kr-456"],
    "kr_impact_claim": "Quantified impact with evidence",
}


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A result.json three levels below the workspace's root."""
    directory = tmp_path / "workspace/runs/ITEM-1/out"
    directory.mkdir(parents=True)
    (tmp_path / "workspace/okrs").mkdir()
    (tmp_path / "workspace/metrics/q1").mkdir(parents=True)
    (tmp_path / "workspace/metrics/latency.json").write_text("{}")
    (tmp_path / "workspace/metrics/q1/größe.csv").write_text("1")
    return directory / "result.json"


def problems(path: Path, document: Any = None, **fields: Any) -> tuple[str, ...]:
    path.write_text(json.dumps({**VALID, **fields} if document is None else document))
    try:
        validate_result_json(path)
    except ResultError as error:
        return error.problems
    return ()


def test_a_valid_result_has_no_problem(result: Path) -> None:
    assert problems(result) == ()
    assert problems(result, proposed_changes=[], kr_targets=[]) == ()


@pytest.mark.parametrize("name", VALID)
def test_each_field_is_required(result: Path, name: str) -> None:
    document = {key: value for key, value in VALID.items() if key != name}
    assert problems(result, document) == (f"the field {name} is missing",)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("schema_version", "1.1", "1.1"),
        ("schema_version", 1.0, "a number"),
        ("schema_version", None, "null"),
        ("summary", "", "empty"),
        ("summary", " \n", "empty"),
        ("summary", ["x"], "an array"),
        ("kr_impact_claim", "", "empty"),
        ("kr_impact_claim", 3, "a number"),
        ("proposed_changes", "x", "a text"),
        ("proposed_changes", None, "null"),
        ("proposed_changes", ["x", 1], "proposed_changes[1]"),
        ("kr_targets", {"kr": 1}, "an object"),
        ("kr_targets", True, "a boolean"),
        ("extra", 1, "'extra'"),
        ("Summary", "x", "'Summary'"),
    ],
)
def test_each_rule_has_its_sentence(result: Path, name: str, value: Any, words: str) -> None:
    (problem,) = problems(result, **{name: value})
    assert name in problem
    assert words in problem


def test_all_errors_come_at_once(result: Path) -> None:
    found = problems(result, {"schema_version": "2", "summary": "", "proposed_changes": 1, "more": 0})
    assert len(found) == 6
    assert ResultError("result.json", list(found)).args[0] == f"result.json: {'; '.join(found)}"


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"', '{"summary": NaN}', "[" * 100_000, "\ufeff{}"])
def test_other_documents_are_refused(result: Path, text: str) -> None:
    result.write_text(text)
    with pytest.raises(ResultError):
        validate_result_json(result)


def test_a_field_that_occurs_twice_is_refused(result: Path) -> None:
    """Two readers could disagree about its value."""
    result.write_text(json.dumps(VALID)[:-1] + ', "summary": "other"}')
    with pytest.raises(ResultError, match="'summary' occurs twice"):
        validate_result_json(result)


def test_files_that_are_none_are_refused(result: Path) -> None:
    with pytest.raises(ResultError, match="cannot be read"):
        validate_result_json(result)
    os.mkfifo(result)
    with pytest.raises(ResultError, match="not a regular file"):
        validate_result_json(result)
    with pytest.raises(ResultError, match="directory"):
        validate_result_json(result.parent)
    result.unlink()
    result.write_bytes(b'{"summary": "\xff"}')
    with pytest.raises(ResultError, match="not a JSON document"):
        validate_result_json(result)
    result.write_bytes(b" " * (LARGEST + 1))
    with pytest.raises(ResultError, match="bytes"):
        validate_result_json(result)


@pytest.mark.parametrize(
    "claim",
    [
        "p99 fell by 20 % (see metrics/latency.json)",
        "It fell: metrics/latency.json.",
        "`metrics/latency.json`, metrics/q1/größe.csv",
        "./metrics/latency.json!",
        "\u201cmetrics/latency.json\u201d, \xabmetrics/latency.json\xbb, metrics/latency.json\u2014it fell\u2026",
        "the directory metrics/ is described elsewhere",
        "other/metrics/none.json and https://example.org/metrics/none are other places",
    ],
)
def test_metrics_that_exist_are_evidence(result: Path, claim: str) -> None:
    assert problems(result, kr_impact_claim=claim) == ()


@pytest.mark.parametrize(
    "name",
    ["none.json", "q1", "../okrs/kr.yml", "q1/../../../secret", "link", "/etc/passwd", "../metrics/latency.json"],
)
def test_metrics_that_do_not_exist_are_named(result: Path, name: str) -> None:
    root = result.parents[3]
    (root / "okrs/kr.yml").write_text("x")
    (root.parent / "secret").write_text("x")
    (root / "metrics/link").symlink_to(root.parent / "secret")
    (problem,) = problems(result, kr_impact_claim=f"good: metrics/latency.json, bad: metrics/{name}")
    assert f"metrics/{name}" in problem


def test_the_root_is_the_nearest_parent_with_okrs(result: Path) -> None:
    inner = result.parents[1]
    (inner / "okrs").mkdir()
    (problem,) = problems(result, kr_impact_claim="metrics/latency.json")
    assert str(inner) in problem
    (inner / "metrics").mkdir()
    (inner / "metrics/latency.json").touch()
    assert problems(result, kr_impact_claim="metrics/latency.json") == ()


def test_without_okrs_no_metric_can_exist(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert problems(path) == ()
    (problem,) = problems(path, kr_impact_claim="metrics/latency.json")
    assert "okrs/" in problem


def test_the_command_names_every_problem_and_records_a_violation(result: Path, home: Path) -> None:
    del home
    result.write_text(json.dumps(VALID))
    ran = bonobofs("result", "check", "result.json", cwd=result.parent)
    assert (ran.returncode, ran.stdout) == (0, "result.json is valid\n")
    result.write_text(json.dumps({**VALID, "summary": "", "extra": 1}))
    artifacts = result.parent / "artifacts"
    ran = bonobofs("result", "check", str(result), "--item", "ITEM-1", "--artifacts", str(artifacts), "--json")
    assert ran.returncode == 1
    document = json.loads(ran.stdout)
    assert (document["valid"], len(document["problems"])) == (False, 2)
    violation = json.loads((artifacts / "violation.json").read_text())
    assert violation["violation_type"] == "result_schema"
    assert violation["details"]["problems"] == document["problems"]
    (entry,) = [json.loads(line) for line in bonobofs("audit", "tail", "--alerts", "--json").stdout.splitlines()]
    assert (entry["agent"], entry["operation"]) == ("daemon", "guardrail_violation")


def test_an_invalid_result_is_reported_and_recorded_without_its_artifacts(result: Path, home: Path) -> None:
    del home
    result.write_text("{}")
    ran = bonobofs("result", "check", "result.json", "--artifacts", "result.json", cwd=result.parent)
    assert ran.returncode == 1
    assert "the field summary is missing" in ran.stdout
    assert "violation.json cannot be written" in ran.stderr
    assert "choose a directory" in ran.stderr
    assert "guardrail_violation" in bonobofs("audit", "tail", "--alerts").stdout
