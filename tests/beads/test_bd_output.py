"""The parser accepts every form of bd's output, and no other text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bonobofs.beads.bd_runner import Output, error_line, output_json

USAGE = "Usage:\n  bd list [flags]\n" + "".join(f"  --flag-{n}\n" for n in range(50))


@pytest.mark.parametrize(
    "text",
    [
        '[{"id": "gt-1"}]',
        '{"data": [{"id": "gt-1"}], "schema_version": 1}',
        '{"data": [{"id": "gt-1"}], "schema_version": 2, "more": []}',
        '\n\nA notice\n[{"id": "gt-1"}]\nanother',
        '[not json]\n{nor this}\n[1]\n{"level": 1}\n[\n {"id": "gt-1"}\n]\n{}\n',
    ],
)
def test_a_payload_is_found_in_every_form(text: str) -> None:
    """Bare, in an envelope, or among notices."""
    assert output_json(Output(0, text, "")) == [{"id": "gt-1"}]


@pytest.mark.parametrize("text", ["", "No updates specified\n", "the id is {1}", "[" * 100_000])
def test_text_with_json_marks_is_no_payload(text: str) -> None:
    """Such as braces and brackets."""
    assert output_json(Output(0, text, "")) is None


ERROR: dict[str, Any] = {"error": "it is locked"}


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (Output(1, json.dumps(ERROR), ""), "it is locked"),
        (Output(1, "", json.dumps({**ERROR, "schema_version": 1})), "it is locked"),
        (Output(1, json.dumps({"data": ERROR, "schema_version": 1}), "text"), "it is locked"),
        (Output(0, json.dumps(ERROR), ""), "it is locked"),
        (Output(1, "[]", "Error: no issue found\n"), "no issue found"),
        (Output(1, "", "Warning: a role\n  is not set\nError: no issue found\n"), "no issue found"),
        (Output(1, "", "Error: unknown flag: --x\n" + USAGE), "unknown flag: --x"),
        (Output(1, "", "cannot close gt-1: blocked\n"), "cannot close gt-1: blocked"),
        (Output(1, "", json.dumps({"error": "no_beads", "message": "no workspace"})), "no workspace"),
        (Output(1, "", ""), ""),
        (Output(0, "{}", "Warning: a role is not set"), ""),
        (Output(1, "", "Error: \x1b[31mred\x07"), "[31mred"),
    ],
)  # fmt: skip
def test_an_error_is_reported_in_one_line(output: Output, told: str) -> None:
    """From JSON on either stream, otherwise from text, without terminal controls."""
    assert error_line(output) == told


def test_an_error_is_at_most_300_characters() -> None:
    assert len(error_line(Output(1, "", "Error: " + "x" * 10_000))) == 300
