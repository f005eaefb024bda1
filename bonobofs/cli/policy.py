"""`bonobofs policy check|test|show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bonobofs import session
from bonobofs.cli.output import document, note, say
from bonobofs.errors import PolicyError
from bonobofs.policy import examples
from bonobofs.policy.choragen import read_governance, text_of
from bonobofs.policy.document import load, parse
from bonobofs.policy.engine import compile_policy, describe

app = typer.Typer(help="Look at a policy and try it.", rich_markup_mode=None)


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The policy file.")],
    json: Annotated[bool, typer.Option("--json", help="The result as one JSON document.")] = False,
) -> int:
    """Say whether a policy can be enforced as it is written; else where and why not.

    \b
    Example:
      bonobofs policy check ./policy.toml
    """
    try:
        plain = load(file).model_dump(mode="json")
        compile_policy(plain)
    except PolicyError as error:
        if not json:
            raise
        document({"file": str(file), "rules": None, "errors": [str(error)]})
        return error.exit_code
    rules = len(plain["rule"])
    if json:
        document({"file": str(file), "rules": rules, "errors": []})
    else:
        say(f"{file}: in order, {rules} rule{'' if rules == 1 else 's'}")
    return 0


@app.command("test")
def test(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The policy file. Default: the one that is in force.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The result as one JSON document.")] = False,
) -> int:
    """Try the examples that the rules carry; exit 1 when one does not hold.

    \b
    Example:
      bonobofs policy test ./policy.toml
    """
    origin = file if file is not None else session.choose_policy(session.home(), None).origin
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
        Path | None, typer.Option(metavar="FILE", help="The policy file. Default: the one that is in force.")
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
    compiled = shown.compiled
    if json:
        document(
            {
                "origin": shown.origin,
                "digest": compiled.digest,
                "generation": compiled.generation,
                "session": shown.session,
                "error": shown.error,
                "policy": compiled.document,
            }
        )
        return
    say(f"{shown.origin}")
    say(f"digest {compiled.digest}, generation {compiled.generation}")
    say(f"roles {', '.join(sorted(compiled.roles, key=str.lower))}")
    if shown.session is not None:
        say(f"in force in session {shown.session}")
    if shown.error is not None:
        note(f"the policy as it is now could not be loaded, this one stays in force: {shown.error}")
    print()
    for line in describe(compiled, role or shown.role).splitlines():
        say(line)
