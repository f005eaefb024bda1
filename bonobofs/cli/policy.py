"""`bonobofs policy check|test|show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bonobofs import session
from bonobofs.cli.output import document, note, say
from bonobofs.cli.suggestions import check_role
from bonobofs.errors import PolicyError
from bonobofs.policy import examples
from bonobofs.policy.choragen import read_governance, text_of
from bonobofs.policy.document import load, located, parse
from bonobofs.policy.engine import describe
from bonobofs.policy.examples import warnings
from bonobofs.policy.presets import PRESETS, preset_file

app = typer.Typer(help="Look at a policy and try it.", rich_markup_mode=None)


FileOrPreset = Annotated[str, typer.Argument(metavar="FILE", help="The policy file, or the name of a preset.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document.")]


def _file_of(named: str) -> Path:
    return preset_file(named) if named in PRESETS else Path(named)


@app.command("check")
def check(file: FileOrPreset, json: JsonOption = False) -> int:
    """Say whether a policy can be enforced, with every mistake and its line, and what it leaves open.

    Exit 1 if there is a mistake. A warning is none.

    \b
    Examples:
      bonobofs policy check ./policy.toml
      bonobofs policy check project         a preset
    """
    path, mistakes, told, rules = _file_of(file), list[str](), list[str](), 0
    try:
        plain = load(path).model_dump(mode="json")
        rules = len(plain["rule"])
        text = path.read_text(encoding="utf-8")
        told = [f"{path}:{line}: warning: {problem}" for line, problem in located(text, warnings(plain))]
    except PolicyError as error:
        mistakes = list(error.problems or (str(error),))
    if json:
        document({"file": str(path), "rules": None if mistakes else rules, "errors": mistakes, "warnings": told})
        return 1 if mistakes else 0
    for line in mistakes or told:
        note(line)
    if not mistakes:
        say(f"{path}: in order, {rules} rule{'' if rules == 1 else 's'}")
    return 1 if mistakes else 0


@app.command("test")
def test(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="The policy file, or the name of a preset. Default: the one in force."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Try the examples of a policy, of its rules and of its roles; exit 1 when one does not hold.

    \b
    Example:
      bonobofs policy test ./policy.toml
    """
    origin = _file_of(file) if file is not None else session.choose_policy(session.home(), None).file
    plain = load(origin).model_dump(mode="json")
    failures, tried = examples.failures(plain), examples.count(plain)
    if json:
        document({"file": str(origin), "examples": tried, "failures": failures})
        return 1 if failures else 0
    for line in failures:
        note(f"{origin}: {line}")
    say(f"{origin}: {tried - len(failures)} of {tried} examples hold")
    return 1 if failures else 0


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Choragen's choragen.governance.yaml.")],
) -> int:
    """Print a policy that admits no more than a governance of Choragen did; exit 1 where some of it cannot be kept.

    What cannot is named, with its line.

    \b
    Example:
      bonobofs policy import choragen.governance.yaml > policy.toml
    """
    text, lost = read_governance(text_of(file))
    parse(text, str(file))
    print(text, end="")
    for line in lost:
        note(f"{file}: {line}")
    return 1 if lost else 0


@app.command("show")
def show(
    role: Annotated[str | None, typer.Option(metavar="R", help="For whom. Default: the policy's default_role.")] = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The policy file, or the name of a preset. Default: the one in force."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The policy itself, as one JSON document.")] = False,
) -> None:
    """Say what the policy in force admits, in words: here, in a mount or its source, else in a new mount.

    The generation counts how often the policy of a mount was loaded anew.

    \b
    Example:
      bonobofs policy show --role reviewer
    """
    shown = session.in_force(session.home(), policy, Path.cwd())
    check_role(role, shown)
    compiled = shown.compiled
    if json:
        document(
            {
                "origin": shown.origin,
                "why": shown.why,
                "digest": compiled.digest,
                "generation": compiled.generation,
                "session": shown.session,
                "error": shown.error,
                "policy": compiled.document,
            }
        )
        return
    say(f"{shown.origin}" + (f" ({shown.why})" if shown.why else ""))
    say(f"digest {compiled.digest}, generation {compiled.generation}")
    say(f"roles {', '.join(sorted(compiled.roles, key=str.lower))}")
    if shown.session is not None:
        say(f"in force in session {shown.session}")
    if shown.error is not None:
        note(f"the policy as it is now could not be loaded, this one stays in force: {shown.error}")
    print()
    for line in describe(compiled, role or shown.role).splitlines():
        say(line)
