"""docs/server.json, the entry for the MCP registry, follows the registry's schema."""

from __future__ import annotations

import json
from typing import Any, Final

import jsonschema  # type: ignore[import-untyped] # it has no types

import bonobofs
from tests.support.world import ROOT

_ARGUMENT: Final = {
    "type": "object",
    "required": ["type", "value"],
    "properties": {"type": {"enum": ["positional", "named"]}, "name": {"type": "string"}, "value": {"type": "string"}},
    "if": {"properties": {"type": {"const": "named"}}},
    "then": {"required": ["name"]},
    "additionalProperties": False,
}
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["$schema", "name", "description", "version", "packages"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"const": "https://static.modelcontextprotocol.io/schemas/2025-12-11/server.schema.json"},
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+$", "minLength": 3, "maxLength": 200},
        "title": {"type": "string", "minLength": 1, "maxLength": 100},
        "description": {"type": "string", "minLength": 1, "maxLength": 100},
        "version": {"const": bonobofs.__version__},
        "packages": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["registryType", "identifier", "version", "transport"],
                "additionalProperties": False,
                "properties": {
                    "registryType": {"const": "pypi"},
                    "identifier": {"const": "bonobofs"},
                    "version": {"const": bonobofs.__version__},
                    "runtimeHint": {"const": "uvx"},
                    "runtimeArguments": {"type": "array", "items": _ARGUMENT},
                    "packageArguments": {"type": "array", "items": _ARGUMENT},
                    "transport": {"const": {"type": "stdio"}},
                },
            },
        },
    },
}
"""The parts of the registry's schema that the entry uses, with our name and version."""


def test_the_entry_for_the_registry_is_valid() -> None:
    document = json.loads((ROOT / "docs/server.json").read_bytes())
    jsonschema.validate(document, SCHEMA)
    (package,) = document["packages"]
    assert f"=={bonobofs.__version__}" in package["runtimeArguments"][0]["value"]
