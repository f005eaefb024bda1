"""`bonobofs integrity snapshot|verify|revert` and `bonobofs result check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from bonobofs import session
from bonobofs.cli.options import Argument, Group, Option
from bonobofs.cli.output import document, note, say
from bonobofs.integrity.integrity_check import OKRS, IntegrityCheck, new_run_id, write_violation
from bonobofs.integrity.result_document import ResultError, validate_result_json
from bonobofs.session.protected_run import find_snapshot, record_violation, revert_and_record, take_snapshot

app = Group(help="Find and revert direct edits of protected directories.")
result_app = Group(help="Check what an agent hands over.")

Root = Annotated[Path, Argument(metavar="[ROOT]", help="The directory with the protected ones. Default: this one.")]
Named = Annotated[str | None, Option("--snapshot", metavar="ID", help="The snapshot. Default: the newest of the root.")]
Json = Annotated[bool, Option("--json", help="One JSON document.")]
Item = Annotated[str, Option("--item", metavar="ID", help="The work item, for the violation.")]
Artifacts = Annotated[
    Path | None, Option("--artifacts", metavar="DIR", help="Write violation.json into this directory.")
]


@app.command("snapshot")
def snapshot(
    root: Root = Path(),
    protect: Annotated[
        list[str] | None,
        Option("--protect", metavar="DIR", help=f"A protected directory below the root. Default: {OKRS}."),
    ] = None,
    json: Json = False,
) -> None:
    """Save the content of protected directories. A new snapshot of the same directories replaces the former.

    \b
    Examples:
      bonobofs integrity snapshot
      bonobofs integrity snapshot ~/src/app --protect okrs --protect plans
    """
    taken = take_snapshot(session.home(), root, protect or [OKRS])
    if json:
        check = taken.check
        document({"snapshot": taken.id, "root": check.root, "directories": check.directories, "paths": [*check.before]})
    else:
        say(f"{taken.id}  {len(taken.check.before)} paths in {', '.join(taken.check.directories)}")


@app.command("verify")
def verify(root: Root = Path(), name: Named = None, json: Json = False) -> int:
    """Compare the protected directories with a snapshot; exit 1 if a path was added, removed or changed.

    \b
    Example:
      bonobofs integrity verify
    """
    check = find_snapshot(session.home(), root, name).check
    check.capture_after()
    _print_changes(check, json=json)
    return 1 if check.has_changes() else 0


@app.command("revert")
def revert(
    root: Root = Path(), name: Named = None, item: Item = "", artifacts: Artifacts = None, json: Json = False
) -> int:
    """Restore the protected directories from a snapshot, and record the violation; exit 1 if a path is not restored.

    Files that are removed or replaced are kept in the directory `reverted-TIME` of --artifacts. If violation.json
    cannot be written there, nothing is restored.

    \b
    Examples:
      bonobofs integrity revert
      bonobofs integrity revert --item ITEM-1 --artifacts ~/artifacts/ITEM-1
    """
    home = session.home()
    check = find_snapshot(home, root, name).check
    check.capture_after()
    if check.has_changes():
        revert_and_record(home, check, artifacts, item_id=item, run_id=new_run_id())
    elif artifacts is not None:
        check.check_artifacts(artifacts)
    _print_changes(check, json=json)
    if check.revert_error:
        note(f"the revert is incomplete: {check.revert_error}")
    return 1 if check.revert_error else 0


def _print_changes(check: IntegrityCheck, *, json: bool) -> None:
    if json:
        document({"root": check.root, "reverted": check.reverted, "files": [each.document() for each in check.changes]})
        return
    for change in check.changes:
        say(f"{change.what:8} {change.path}")
    if not check.changes:
        say("as in the snapshot")


@result_app.command("check")
def check_result(
    file: Annotated[Path, Argument(metavar="FILE", help="A result.json.")],
    item: Item = "",
    artifacts: Artifacts = None,
    json: Json = False,
) -> int:
    """Check a result.json against the schema 1.0; exit 1 and name every rule that it breaks.

    A `metrics/NAME` in kr_impact_claim must be a file below the nearest parent directory with okrs/.

    \b
    Examples:
      bonobofs result check result.json
      bonobofs result check result.json --item ITEM-1 --artifacts ~/artifacts/ITEM-1
    """
    problems: tuple[str, ...] = ()
    try:
        validate_result_json(file)
    except ResultError as error:
        problems = error.problems
    if json:
        document({"file": str(file), "valid": not problems, "problems": problems})
    else:
        for problem in problems:
            say(f"{file}: {problem}")
        if not problems:
            say(f"{file} is valid")
    if problems and artifacts is not None:
        _record_result(problems, item, artifacts)
    return 1 if problems else 0


def _record_result(problems: tuple[str, ...], item: str, artifacts: Path) -> None:
    details: dict[str, Any] = {
        "message": "Agent handed over a result.json that breaks its schema",
        "problems": problems,
        "item_id": item,
        "run_id": new_run_id(),
    }
    violation = {"violation_type": "result_schema", "details": details}
    record_violation(session.home(), violation)
    write_violation(artifacts, violation)
