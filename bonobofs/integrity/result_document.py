"""Validate `result.json`, in which an agent proposes changes: the strict schema 1.0, and the evidence that it names."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bonobofs.errors import BonobofsError, error_text
from bonobofs.integrity.integrity_check import OKRS
from bonobofs.system import syscalls

SCHEMA_VERSION: Final = "1.0"
METRICS: Final = "metrics"
LARGEST: Final = 1 << 20
"""Maximum bytes of a result."""
_TEXTS: Final = ("summary", "kr_impact_claim")
_LISTS: Final = ("proposed_changes", "kr_targets")
_FIELDS: Final = ("schema_version", "summary", "proposed_changes", "kr_targets", "kr_impact_claim")
_MARKS: Final = r"\s\"'`()<>\[\]{},;|*\u2014\u2018-\u201f\u2026\xab\xbb"
"""Characters, typographic ones among them, that end a name."""
_METRIC: Final = re.compile(rf"(?<![\w/.-])(?:\./)?{METRICS}/([^{_MARKS}]+)")
_STOPS: Final = ".:!?"
"""Characters that end a sentence and can follow a name."""
_BENEATH: Final = 0x08
"""RESOLVE_BENEATH."""


class ResultError(BonobofsError):
    """A result.json is invalid. `problems` has one sentence for each rule that it breaks."""

    def __init__(self, path: str, problems: list[str]) -> None:
        super().__init__(f"{path}: {'; '.join(problems)}")
        self.problems = tuple(problems)


def validate_result_json(path: str | Path) -> None:
    """Check a result.json against every rule. ResultError: it breaks rules, and names all of them."""
    problems = list(_problems(Path(path)))
    if problems:
        raise ResultError(str(path), problems)


def workspace_root(path: str | Path) -> Path | None:
    """Return the nearest parent directory of a path that has the directory `okrs`; None if there is none."""
    real = Path(os.path.realpath(path))
    return next((above for above in real.parents if (above / OKRS).is_dir()), None)


def _problems(path: Path) -> Iterator[str]:
    try:
        document = _parse(_read(path))
    except OSError as error:
        yield f"the file cannot be read: {error_text(error)}"
        return
    except (ValueError, RecursionError) as error:
        yield f"the file is not a JSON document: {error}"
        return
    if not isinstance(document, dict):
        yield f"the document is not an object but {_kind(document)}"
        return
    yield from (f"the field {name} is missing" for name in _FIELDS if name not in document)
    yield from (f"the field {name!a} is not part of the schema; remove it" for name in document if name not in _FIELDS)
    version = document.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        yield f'schema_version is not "{SCHEMA_VERSION}" but {_shown(version)}'
    for name in _TEXTS:
        text = document.get(name, "x")
        if not isinstance(text, str):
            yield f"{name} is not a text but {_kind(text)}"
        elif not text.strip():
            yield f"{name} is empty"
    for name in _LISTS:
        items = document.get(name, [])
        if not isinstance(items, list):
            yield f"{name} is not an array but {_kind(items)}"
        else:
            yield from (
                f"{name}[{number}] is not a text but {_kind(item)}"
                for number, item in enumerate(items)
                if not isinstance(item, str)
            )
    claim = document.get("kr_impact_claim")
    if isinstance(claim, str):
        yield from _missing_metrics(path, claim)


def _missing_metrics(path: Path, claim: str) -> Iterator[str]:
    """Yield a sentence for each `metrics/NAME` of a claim that names no file below the workspace's root."""
    names = list(dict.fromkeys(_METRIC.findall(claim)))
    if not names:
        return
    root = workspace_root(path)
    if root is None:
        yield f"kr_impact_claim names {METRICS}/{names[0]}, and no parent directory has {OKRS}/ and {METRICS}/"
        return
    for name in names:
        ends = [name, name.rstrip(_STOPS)]
        if not any(_is_file(root, f"{METRICS}/{each}") for each in ends if each):
            yield f"kr_impact_claim names {ascii(f'{METRICS}/{ends[1]}')[1:-1]}, which is no file below {root}"


def _is_file(root: Path, path: str) -> bool:
    """True if the path names a regular file in `metrics/` of the root. Symlinks that leave the directory do not."""
    try:
        top = os.open(root / METRICS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = syscalls.openat2(top, os.fsencode(path.removeprefix(f"{METRICS}/")), os.O_PATH, _BENEATH)
        finally:
            os.close(top)
        try:
            return stat.S_ISREG(os.fstat(fd).st_mode)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return False


def _read(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("it is not a regular file")
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise OSError(f"it has more than {LARGEST} bytes")
    return data.decode()


def _parse(text: str) -> Any:
    """Parse JSON as RFC 8259 defines it. ValueError: it is none, or names a field twice."""
    return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)!a} occurs twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "an array", dict: "an object"}
    return kinds[type(value)]


def _shown(value: Any) -> str:
    return ascii(value)[:100] if isinstance(value, str) else _kind(value)
