"""`bonobofs policy check|test|show|import` and `bonobofs init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from bonobofs import session
from bonobofs.cli.actor import check_role
from bonobofs.cli.options import Argument, Group, Option
from bonobofs.cli.output import document, note, say
from bonobofs.errors import PolicyError
from bonobofs.policy import examples
from bonobofs.policy.document import AuditTable, load, located, parse
from bonobofs.policy.engine import describe
from bonobofs.policy.examples import warnings
from bonobofs.policy.presets import PRESETS, choragen_import, preset_file
from bonobofs.session.project_policy import write_policy

app = Group(help="Check, test and describe a policy.")


FileOrPreset = Annotated[str, Argument(metavar="FILE", help="The policy file, or the name of a preset.")]
JsonOption = Annotated[bool, Option("--json", help="One JSON document.")]


def _file_of(name: str) -> Path:
    return preset_file(name) if name in PRESETS else Path(name)


@app.command("check")
def check(file: FileOrPreset, json: JsonOption = False) -> int:
    """Check a policy: print every mistake with its line, and warnings about what it leaves open.

    Exit 1 if there is a mistake. Warnings do not change the exit status.

    \b
    Examples:
      bonobofs policy check ./policy.toml
      bonobofs policy check project         a preset
    """
    path, mistakes, remarks, rules = _file_of(file), list[str](), list[str](), 0
    try:
        policy = load(path)
        plain = policy.model_dump(mode="json")
        rules = len(plain["rule"])
        found = warnings(plain)
        if policy.audit != AuditTable() and (ignored := session.note_on_audit(session.home(), path, policy)):
            found.append((("audit",), ignored))
        text = path.read_text(encoding="utf-8")
        remarks = [f"{path}:{line}: warning: {problem}" for line, problem in located(text, found)]
    except PolicyError as error:
        mistakes = list(error.problems or (str(error),))
    if json:
        document({"file": str(path), "rules": None if mistakes else rules, "errors": mistakes, "warnings": remarks})
        return 1 if mistakes else 0
    for line in mistakes or remarks:
        note(line)
    if not mistakes:
        say(f"{path}: in order, {rules} rule{'' if rules == 1 else 's'}")
    return 1 if mistakes else 0


@app.command("test")
def test(
    file: Annotated[
        str | None,
        Argument(metavar="FILE", help="The policy file, or the name of a preset. Default: the one in force."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Run the examples of a policy's rules and roles; exit 1 if one fails.

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
    file: Annotated[Path, Argument(metavar="FILE", help="Choragen's choragen.governance.yaml.")],
) -> int:
    """Convert a governance file of Choragen to a policy that allows no more; exit 1 if a part cannot be converted.

    Each such part is listed with its line.

    \b
    Example:
      bonobofs policy import choragen.governance.yaml > policy.toml
    """
    script = choragen_import()
    text, lost = script.read_governance(script.text_of(file))
    parse(text, str(file))
    print(text, end="")
    for line in lost:
        note(f"{file}: {line}")
    return 1 if lost else 0


@app.command("show")
def show(
    role: Annotated[str | None, Option(metavar="R", help="The role. Default: the policy's default_role.")] = None,
    policy: Annotated[
        Path | None,
        Option(metavar="FILE", help="The policy file, or the name of a preset. Default: the one in force."),
    ] = None,
    json: Annotated[bool, Option("--json", help="The policy itself, as one JSON document.")] = False,
) -> None:
    """Describe the policy in force: of the session around the working directory, else of a new mount.

    The generation counts the reloads of a mount's policy.

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
        note(f"the changed policy file could not be loaded, so this policy stays in force: {shown.error}")
    print()
    for line in describe(compiled, role or shown.role).splitlines():
        say(line)


def init(
    source: Annotated[Path, Argument(metavar="SOURCE", help="The project. Default: this directory.")] = Path(),
    force: Annotated[bool, Option("--force", help="Replace the project's policy.")] = False,
    json: Annotated[bool, Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write a commented policy for a project to the state directory, based on the project's files.

    The next mount of the project uses it. The project is not changed.

    \b
    Example:
      bonobofs init ~/src/app
    """
    written = write_policy(session.home(), source, force=force)
    project, file = written.project, shlex.quote(str(written.file))
    workspace = shlex.quote(str(project.source))
    commands = [
        f"bonobofs policy check {file}",
        f"bonobofs policy test {file}",
        f"bonobofs why --workspace {workspace} PATH",
        f"bonobofs mount {workspace} MOUNTPOINT",
    ]
    if json:
        found = {**project._asdict(), "source": str(project.source)}
        document({**found, "extends": written.preset, "policy": str(written.file), "next": commands})
        return
    say(f"{written.file}: written, with {written.examples} examples; it extends the preset {written.preset}")
    say(f"languages    {', '.join(project.languages) or 'none found'}")
    say(f"lock files   {', '.join(project.lock_files) or 'none'}")
    say(f"scratch      {', '.join(project.scratch) or 'only that of the preset'}")
    for line in project.ignored:
        say(f"not scratch  {line}")
    say("next:")
    for command in commands:
        say(f"  {command}")
