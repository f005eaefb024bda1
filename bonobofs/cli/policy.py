"""`bonobofs policy check|test|show|import|propose|diff` and `bonobofs init`."""

from __future__ import annotations

import difflib
import os
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bonobofs import session
from bonobofs.cli.actor import check_role, policy_path
from bonobofs.cli.options import Argument, Group, Option
from bonobofs.cli.output import document, note, progress, say
from bonobofs.errors import PolicyError, UsageError
from bonobofs.policy.decision import Denied
from bonobofs.policy.engine import describe
from bonobofs.policy.presets import PRESETS, choragen_import, preset_file

if TYPE_CHECKING:
    from bonobofs.audit.replay import Occurrences, TriedChange

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
        plain = session.policy_document.load(path).model_dump(mode="json")
        rules = len(plain["rule"])
        found = session.policy_examples.warnings(plain)
        if ignored := session.note_on_audit(session.home(), path, plain):
            found.append((("audit",), ignored))
        text = path.read_text(encoding="utf-8")
        remarks = [
            f"{path}:{line}: warning: {problem}" for line, problem in session.policy_document.located(text, found)
        ]
    except PolicyError as error:
        mistakes = list(error.problems or (str(error),))
    if json:
        document({"file": str(path), "rules": None if mistakes else rules, "errors": mistakes, "warnings": remarks})
        return 1 if mistakes else 0
    for line in mistakes or remarks:
        note(line)
    if not mistakes:
        say(f"{path}: valid, {rules} rule{'' if rules == 1 else 's'}")
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
    plain = session.policy_document.load(origin).model_dump(mode="json")
    failures, tried = session.policy_examples.failures(plain), session.policy_examples.count(plain)
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
    session.policy_document.parse(text, str(file))
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
    shown = session.in_force(session.home(), policy)
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
    written = session.project_policy.write_policy(session.home(), source, force=force)
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
    plural = "" if written.examples == 1 else "s"
    say(f"{written.file}: written with {written.examples} example{plural}; it extends the preset {written.preset}")
    say(f"languages    {', '.join(project.languages) or 'none found'}")
    say(f"lock files   {', '.join(project.lock_files) or 'none'}")
    say(f"scratch      {', '.join(project.scratch) or 'only that of the preset'}")
    for line in project.ignored:
        say(f"not scratch  {line}")
    say("next:")
    for command in commands:
        say(f"  {command}")


SessionOption = Annotated[str | None, Option("--session", metavar="UUID", help="One session. Default: all.")]
SinceOption = Annotated[str | None, Option(metavar="MOMENT", help="30m, 2h, 1d, or a moment in ISO 8601.")]


@app.command("propose")
def propose(
    of_session: SessionOption = None,
    since: SinceOption = None,
    policy: Annotated[
        str | None, Option(metavar="FILE", help="The policy to change, or a preset. Default: the one in force.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print, as a diff, the smallest change of the policy that permits what the record shows as refused.

    The record is that of the sessions under this policy: their refusals, and what a session with mount --observe
    permitted. What the proposal permits beyond it, and what it leaves refused, is on standard error. Nothing is
    written.

    \b
    Examples:
      bonobofs policy propose --since 1d
      bonobofs policy propose --policy ./policy.toml | patch policy.toml
    """
    from bonobofs.audit.proposal import propose as make  # noqa: PLC0415 - loads the parser of TOML

    origin = session.in_force(session.home(), policy_path(policy)).origin
    preset = origin.removeprefix("preset:")
    is_new = preset in PRESETS
    text = f'extends = "{preset}"\n' if is_new else Path(origin).read_text(encoding="utf-8")
    name = "policy.toml" if is_new else Path(origin).name
    place = f"preset:{preset}" if is_new else os.path.realpath(origin)
    tried = _tried(of_session, since, session.policy_document.parse(text, name).default_role, place)
    made = make(text, name, tried, is_new=is_new)
    if json:
        left = [{**change._asdict(), "code": denied.code, "rule": denied.rule} for change, denied in made.left]
        document({"file": origin, "diff": made.difference, "wider": made.wider, "left": left})
        return
    print(made.difference, end="")
    for line in made.wider:
        note(f"wider than the record: {line}")
    for change, denied in made.left:
        note(f"still refused: {change.operation} {change.path} ({denied.code}, rule {denied.rule})")
    if not made.difference:
        note("the record shows no refusal that a rule of this policy could permit")


@app.command("diff")
def diff(
    before: Annotated[str, Argument(metavar="A", help="A policy file, or the name of a preset.")],
    after: Annotated[str, Argument(metavar="B", help="Another one.")],
    replay: Annotated[bool, Option("--replay", help="List recorded changes that B decides otherwise.")] = False,
    of_session: SessionOption = None,
    since: SinceOption = None,
    role: Annotated[str | None, Option(metavar="R", help="The role to describe. Default: default_role of B.")] = None,
    json: JsonOption = False,
) -> int:
    """Compare two policies in words; with --replay, by what the record shows. Exit 1 if they differ.

    A replay rests on operation, paths, size and role. Leases, answers and the first bytes of files are left out.

    \b
    Examples:
      bonobofs policy diff project ./policy.toml
      bonobofs policy diff ./policy.toml ./new.toml --replay --since 7d
    """
    if not replay and (since is not None or of_session is not None):
        raise UsageError("--since and --session select what --replay reads; add --replay")
    from bonobofs.audit import replay as replays  # noqa: PLC0415 - loads the engine
    from bonobofs.policy.compiled import compile_policy  # noqa: PLC0415

    files = [session.policy_document.load(_file_of(each)) for each in (before, after)]
    old, new = (compile_policy({**file.model_dump(mode="json"), "observe": False}) for file in files)
    if not replay:
        shown = (describe(each, role or files[1].default_role).splitlines() for each in (old, new))
        lines = list(difflib.unified_diff(next(shown), next(shown), before, after, lineterm="", n=1))
        if json:
            document({"difference": lines})
        for line in () if json else lines:
            say(line)
        return 1 if lines else 0
    found = replays.replay(_tried(of_session, since, files[0].default_role), old, new)
    changed = sorted((each for each in found if each.differs), key=lambda each: -each.seen.count)
    if json:
        document(
            [
                {
                    **each.change._asdict(),
                    "count": each.seen.count,
                    "allowed": not isinstance(each.after, Denied),
                    "before": each.before.rule,
                    "after": each.after.rule,
                }
                for each in changed
            ]
        )
        return 1 if changed else 0
    for each in changed:
        word = "refused" if isinstance(each.after, Denied) else "allowed"
        to = f" to {each.change.to}" if each.change.to else ""
        change = f"{each.change.operation} {each.change.path}{to}"
        say(f"now {word}: {change}, {each.seen.count} times (rule {each.before.rule}, then {each.after.rule})")
    say(f"the record has {len(found)} different changes; B decides {len(changed)} of them otherwise")
    return 1 if changed else 0


def _tried(
    of_session: str | None, since: str | None, default_role: str, origin: str | None = None
) -> dict[TriedChange, Occurrences]:
    """Collect what the record shows of one session, else of those under the policy `origin`, else of all.

    UsageError: no session has this UUID.
    """
    from bonobofs.audit import reader, replay  # noqa: PLC0415 - as above

    home = session.home()
    session.flush_servers(home)
    facts = session.about_sessions(home)
    trails = [trail for trail in reader.trails_in(home / "trails") if of_session in (None, trail.stem)]
    if of_session is None and origin is not None:
        known = (each.session for each in session.statuses(home, include_ended=True))
        under = {each.session for each in known if each.policy.origin == origin}
        trails = [trail for trail in trails if trail.stem in under]
    if of_session is not None and not trails:
        raise UsageError(f"no session has the UUID {of_session}; see bonobofs status --all")
    start = reader.since(since, datetime.now(UTC)) if since is not None else reader.EPOCH
    total = sum(facts[trail.stem].seq for trail in trails if trail.stem in facts)
    entries = progress((entry for trail in trails for entry in reader.read(trail)), total, "reading the record")
    roles = {name: each.role for name, each in facts.items() if each.role}
    return replay.tried_changes((entry for entry in entries if entry.timestamp >= start), roles, default_role)
