"""Parse policy.toml into pydantic models.

The parser rejects every text that the engine would not enforce: unknown keys, keys without an implementation, and
patterns that match no path. Each error is one line with the file, the line and the key.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from bonobofs.errors import PolicyError
from bonobofs.policy import pattern
from bonobofs.policy.allow_list import EVERYTHING, parse_entry
from bonobofs.policy.compiled import DEFAULT_ROLE, parse_hidden, parse_temporary
from bonobofs.policy.denials import BUILT_IN_RULES
from bonobofs.policy.inheritance import merge
from bonobofs.policy.inheritance import problems as problems_between
from bonobofs.policy.lease_limits import DEFAULT_MAX, seconds_of
from bonobofs.policy.presets import PRESETS, preset_file
from bonobofs.policy.request import CHANGES
from bonobofs.policy.role_lists import FAMILIES, HUMAN, LABEL_PREFIXES, TYPES
from bonobofs.policy.toml_positions import KeyPath, positions

LARGEST: Final = 2**63 - 1
"""The largest size of a file on Linux."""

_SIZE: Final = re.compile(r"[0-9]{1,30}(\.[0-9]{1,30})? ?[A-Za-z]*")
_LONGEST_LEASE: Final = 366 * 86_400
_LONGEST_SENTENCE: Final = 200
_LARGEST_FILE: Final = 4 << 20
"""Bytes of a policy file."""


def _refuse(problem: str, key_path: KeyPath = ()) -> PydanticCustomError:
    """Return an error for pydantic. `key_path` is the path of the key in the model that raises the error."""
    return PydanticCustomError("policy", "{problem}", {"problem": problem, "key_path": key_path})


def _check(accepts: Callable[[str], object], problem: str) -> AfterValidator:
    """Refuse a text that `accepts` rejects. In `problem`, `{}` stands for the text."""

    def check(text: str) -> str:
        if not accepts(text):
            raise _refuse(problem.replace("{}", ascii(text)))
        return text

    return AfterValidator(check)


def _match(expression: str, problem: str) -> AfterValidator:
    return _check(re.compile(expression).fullmatch, problem)


def _parse(parser: Callable[[str], object]) -> AfterValidator:
    """Refuse a text for which the parser raises an error."""

    def check(text: str) -> str:
        try:
            parser(text)
        except (PolicyError, re.error) as error:
            raise _refuse(f"{text!a}: {error}") from None
        return text

    return AfterValidator(check)


def _is_trimmed(text: str) -> bool:
    """Return whether a text is printable, not empty, and has no space around it."""
    return text != "" and text.isprintable() and text == text.strip()


def _is_server(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_host = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return False
    is_plain = text.isascii() and text.isprintable() and " " not in text
    return bool(has_host) and is_plain and "@" not in parts.netloc and not parts.fragment


def _size(value: object) -> object:
    number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST
    if not number and not (isinstance(value, str) and _SIZE.fullmatch(value)):
        raise _refuse('a size is a number of bytes, or text such as "500KB", "1MB" (1,000,000 bytes) or "1MiB"')
    return value


def _size_that_exists(size: ByteSize) -> ByteSize:
    if size > LARGEST:
        raise _refuse("no file can be that large; leave it out for no limit")
    return size


def _duration(value: object) -> object:
    seconds = value if isinstance(value, int) and not isinstance(value, bool) else seconds_of(str(value))
    if seconds is None or not 0 < seconds <= _LONGEST_LEASE:
        raise _refuse('a duration is a text such as "10m", "24h" or "7d", and at most "366d"')
    return seconds


def _word(family: str) -> AfterValidator:
    return _check(FAMILIES[family].__contains__, f"{{}} is no word for {family}: {', '.join(FAMILIES[family])}")


def _allow(entries: list[Any]) -> list[Any]:
    for index, entry in enumerate(entries):
        try:
            if entry != EVERYTHING:
                parse_entry(entry)
        except PolicyError as error:
            raise _refuse(str(error), (index,)) from None
    if EVERYTHING in entries and len(entries) > 1:
        raise _refuse('"*" admits every host; remove the other entries, or remove "*"')
    return entries


PathPattern = Annotated[str, _parse(pattern.parse)]
HiddenPattern = Annotated[str, _parse(parse_hidden)]
TemporaryPattern = Annotated[str, _parse(parse_temporary)]
MessagePattern = Annotated[str, _parse(re.compile)]
Suffix = Annotated[
    str,
    _match(r"\.[^./\x00-\x1f\x7f]{1,254}", '{} is not a suffix; write the last extension with its dot, such as ".md"'),
]
Size = Annotated[ByteSize, BeforeValidator(_size), AfterValidator(_size_that_exists)]
Name = Annotated[
    str,
    _check(
        lambda text: _is_trimmed(text) and ":" not in text and len(text) <= 64,
        "a name is 1 to 64 printable characters without a colon or space around it",
    ),
]
RuleName = Annotated[
    Name,
    _check(
        lambda text: text not in BUILT_IN_RULES,
        "the audit log uses the rule name {} for a part of the policy itself; choose another",
    ),
]
ServerUrl = Annotated[
    str, _check(_is_server, "{} is no server; write http://HOST:PORT/PATH or https://, without a user")
]
AbsolutePath = Annotated[
    str, _check(lambda text: text.startswith("/") and text.isprintable(), "{} is not an absolute path")
]
BranchPrefix = Annotated[
    str,
    _match(
        r"([a-z0-9][a-z0-9-]*/)*",
        '{} cannot begin a branch name; write lower-case letters, digits and hyphens and a final slash, or ""',
    ),
]
BranchPattern = Annotated[
    str,
    _check(
        lambda text: text and not re.search(r"[\x00-\x20\x7f~^:\\]|\.\.|@\{|//|^/|/$", text),
        "{} is not a branch; write its name, such as main, or a pattern such as release/*",
    ),
]
Email = Annotated[
    str,
    _match(r"[^\s<>@]+@[^\s<>@]+", "{} is not an address; it may contain {agent} and {id}, as in {agent}@example.org"),
]
Sign = Annotated[
    str,
    _match(r"off|(ssh|openpgp):[^\s-].*", '{} is not a way to sign; write "off", "ssh:/path/to/key" or "openpgp:KEY"'),
]
MailName = Annotated[
    str,
    _match(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
        "{} is not a name of Agent Mail; write letters, digits, dots and dashes, at most 128",
    ),
]
Duration = Annotated[int, BeforeValidator(_duration)]
BeadsWord = Annotated[
    str,
    _match(r"[a-z][a-z0-9_-]{0,31}", "{} is not such a word; write small letters, digits, - and _, a letter first"),
]
Age = Annotated[
    str,
    _match(
        r"[1-9][0-9]{0,4}[hdw]",
        '{} is not an age; write hours, days or weeks, such as "12h", "90d" or "8w"',
    ),
]
ReadPath = Annotated[
    str,
    _check(
        lambda text: re.fullmatch(r"~?/.*|~", text) and text.isprintable(),
        "{} is not an absolute path; it may begin with ~/",
    ),
]
AskedOperation = Annotated[
    str, _check(CHANGES.__contains__, f"{{}} is no change of a file; there are {', '.join(sorted(CHANGES))}")
]
VariableName = Annotated[str, _match(r"[A-Za-z_][A-Za-z0-9_]{0,127}", "{} is not the name of a variable")]
ExamplePath = Annotated[str, _check(len, "an example is a path from the workspace's root")]
Sentence = Annotated[
    str,
    _check(
        lambda text: _is_trimmed(text) and len(text) <= _LONGEST_SENTENCE,
        f"write the reason as one printable sentence of at most {_LONGEST_SENTENCE} characters",
    ),
]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class PathsTable(_Table):
    """[[protect]]: paths that no change may touch. [[keep]]: paths that no change may delete or rename away."""

    paths: list[PathPattern] = Field(min_length=1)


class AskTable(_Table):
    """[[ask]]: changes that need the operator's permission. Without `operations`, every change of the paths does.

    `timeout`: seconds for which a question waits for an answer; after them the same change asks again.
    """

    paths: list[PathPattern] = Field(min_length=1)
    operations: list[AskedOperation] | None = Field(default=None, min_length=1)
    timeout: Duration = 86_400


class ScratchTable(_Table):
    """[[scratch]]: paths in the scratch layer, which the session may write freely. `max_total` limits their bytes."""

    paths: list[PathPattern] = Field(min_length=1)
    max_total: Size | None = None


class Examples(_Table):
    """Paths that `policy test` tries against the whole policy. A path with a final slash is a directory."""

    allow: list[ExamplePath] = []
    deny: list[ExamplePath] = []


class RuleTable(_Table):
    """[[rule]]: permits changes of matching paths, or refuses them with a reason. A missing key sets no limit."""

    name: RuleName
    paths: list[PathPattern] = Field(min_length=1)
    suffixes: list[Suffix] | None = Field(default=None, min_length=1)
    max_size: Size | None = None
    executable: bool = True
    refuse: Sentence | None = None
    examples: Examples = Examples()

    @model_validator(mode="after")
    def _refuses_all(self) -> RuleTable:
        limits = {
            "suffixes": self.suffixes,
            "max_size": self.max_size,
            "executable": None if self.executable else False,
        }
        for key, limit in limits.items():
            if self.refuse is not None and limit is not None:
                raise _refuse("a rule with refuse refuses every change; remove this key", (key,))
        return self


class RoleTable(_Table):
    """[role.NAME]: paths that the role may write, exceptions from them, and operations that it may call."""

    write: list[PathPattern] = []
    deny: list[PathPattern] = []
    tools: list[Annotated[str, _word("tools")]] = []
    git: list[Annotated[str, _word("git")]] = []
    beads: list[Annotated[str, _word("beads")]] = []
    examples: Examples = Examples()


class LeasesTable(_Table):
    """[leases]: the longest lease of a session, and the roles that may acquire one.

    `max` is in seconds. If `who` is None, every role that may write may acquire leases.
    """

    max: Duration = DEFAULT_MAX
    who: list[Name] | None = None


class BeadsTable(_Table):
    """[beads]: the issue conventions. A label has the form `PREFIX:NAME` with one of the prefixes."""

    types: list[BeadsWord] = Field(default=[*TYPES], min_length=1)
    label_prefixes: list[BeadsWord] = Field(default=[*LABEL_PREFIXES], min_length=1)
    human: Name = HUMAN


class GitTable(_Table):
    """[git]: the requirements for branch names and commit messages, and the author and signature of commits."""

    branch_prefix: BranchPrefix = "aidlc/"
    protected_branches: list[BranchPattern] = ["main", "master", "develop"]
    message_pattern: MessagePattern | None = None
    author_email: Email | None = None
    sign: Sign | None = None


class AgentMailTable(_Table):
    """[agent_mail]: the mailbox that gets the trails. Default project: the source; default sender: a unique name."""

    url: ServerUrl
    token_file: AbsolutePath | None = None
    project: AbsolutePath | None = None
    sender: MailName | None = None
    to: list[MailName] = []
    carry: Literal["all", "denials"] = "all"
    mirror_reservations: bool = False


class AuditTable(_Table):
    """[audit]: how long the trails of ended sessions are kept, and the size limit of all trails."""

    keep: Age = "90d"
    max_total: Size = ByteSize(5_000_000_000)


class AttributionTable(_Table):
    """[attribution]: whether the audit log has the command lines of processes, with secrets removed."""

    commands: bool = True


class UndoTable(_Table):
    """[undo]: how long old contents are kept, and the size limits of all and of one file. 0B: nothing is kept."""

    keep: Age = "7d"
    max_total: Size = ByteSize(2_000_000_000)
    max_file: Size = ByteSize(64_000_000)


class RunTable(_Table):
    """[run]: what `bonobofs run` shows besides the workspace, and its limits. `time` is in seconds; None: no limit.

    `read`: further paths, read-only, absolute or below `~`. `env`: names of variables that pass.
    """

    home: Literal["private", "kept"] = "private"
    read: list[ReadPath] = []
    env: list[VariableName] = []
    processes: Annotated[int, Field(ge=1, le=4_194_304)] = 2000
    memory: Size | None = None
    tmp: Size = ByteSize(2_000_000_000)
    time: Duration | None = None


class NetworkTable(_Table):
    """[network]: the hosts to which `run` lets a session connect; each entry as in `allow_list`. Default: none."""

    allow: Annotated[list[Any], AfterValidator(_allow)] = []


class PolicyDocument(_Table):
    """A policy, merged with its preset. `policy.engine.compile_policy` takes its `model_dump(mode="json")`."""

    extends: Literal["project", "strict", "aidlc", "docs", "read-only"] | None = Field(default=None, exclude=True)
    replace: list[str] = Field(default=[], exclude=True)
    default: Literal["deny", "allow"] = "deny"
    default_role: Name = DEFAULT_ROLE
    hidden: list[HiddenPattern] = []
    temporary: list[TemporaryPattern] = []
    devices: bool = False
    observe: bool = False
    secrets: list[PathPattern] = []
    symlinks: Literal["inside", "any"] = "inside"
    protect: list[PathsTable] = []
    keep: list[PathsTable] = []
    ask: list[AskTable] = []
    scratch: list[ScratchTable] = []
    rule: list[RuleTable] = []
    role: dict[Name, RoleTable] = {}
    git: GitTable = GitTable()
    leases: LeasesTable = LeasesTable()
    beads: BeadsTable = BeadsTable()
    agent_mail: AgentMailTable | None = None
    examples: Examples = Examples()
    audit: AuditTable = AuditTable()
    attribution: AttributionTable = AttributionTable()
    undo: UndoTable = UndoTable()
    run: RunTable = RunTable()
    network: NetworkTable = NetworkTable()


def load(path: Path) -> PolicyDocument:
    """Read a policy file. PolicyError: `FILE:LINE: KEY: problem`; without a line if the file cannot be read."""
    origin = _shown(str(path))
    try:
        content = _content(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a file name"
        raise PolicyError(f"{origin}: the policy cannot be read: {reason}") from None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PolicyError(f"{origin}:{line}: the file is not UTF-8 text; a policy must be") from None
    return parse(text, str(path))


def _content(path: Path) -> bytes:
    """Return the bytes of a regular file, or of the pipe of `/dev/stdin` or `<(COMMAND)`. OSError, ValueError."""
    mode, is_pipe = path.stat().st_mode, os.path.realpath(path).startswith("/proc/")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (stat.S_ISFIFO(mode) and is_pipe)):
        raise OSError(errno.EINVAL, "it is a device or a FIFO; name a regular file")
    with path.open("rb") as file:
        content = file.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise OSError(errno.EFBIG, f"it has more than {_LARGEST_FILE >> 20} MiB")
    return content


def parse(text: str, origin: str) -> PolicyDocument:
    """Parse a policy from TOML text. Errors name the text `origin`. PolicyError as from `load`.

    The message of the error has the first mistake in the file. Its attribute `problems` has one line for each mistake.
    """
    try:
        raw = tomllib.loads(text)
    except RecursionError:
        raise PolicyError(f"{_shown(origin)}:1: the values are nested too deeply") from None
    except ValueError as error:
        raise PolicyError(f"{_shown(origin)}:{_syntax_error(text, error)}") from None
    mistakes: list[tuple[KeyPath, str]] = []
    base = _preset_of(raw, origin, mistakes)
    inherited = None if base is None else base.model_dump(mode="json")
    own = None
    try:
        own = PolicyDocument.model_validate(raw)
    except ValidationError as error:
        mistakes += map(_problem, error.errors(include_url=False, include_input=False))
    mistakes += problems_between(raw, inherited)
    if own is None or mistakes:
        raise _mistaken(text, origin, mistakes)
    if inherited is None:
        return own
    plain = own.model_dump(mode="json", exclude_unset=True)
    return PolicyDocument.model_validate(merge(inherited, plain, own.replace))


def _preset_of(raw: dict[str, Any], origin: str, mistakes: list[tuple[KeyPath, str]]) -> PolicyDocument | None:
    """Return the preset that a policy extends, or None."""
    name = raw.get("extends")
    if not isinstance(name, str) or name not in PRESETS:
        return None
    file = preset_file(name)
    if os.path.realpath(origin) == os.path.realpath(file):
        mistakes.append((("extends",), f"this file is the preset {name}, and cannot extend itself"))
        return None
    return load(file)


def located(text: str, remarks: Iterable[tuple[KeyPath, str]]) -> list[tuple[int, str]]:
    """Return remarks with their lines, counted from 1. Remarks about inherited roles are omitted."""
    lines = positions(text)
    return sorted(
        (_line(lines, key_path), remark)
        for key_path, remark in remarks
        if key_path[0] != "role" or key_path[:2] in lines
    )


def _line(lines: dict[KeyPath, int], key_path: KeyPath) -> int:
    return next((lines[key_path[:depth]] for depth in range(len(key_path), 0, -1) if key_path[:depth] in lines), 1)


def _mistaken(text: str, origin: str, mistakes: list[tuple[KeyPath, str]]) -> PolicyError:
    try:
        lines = positions(text)
    except RecursionError:
        lines = {}
    located = sorted((_line(lines, key_path), _key(key_path), _shown(message)) for key_path, message in mistakes)
    problems = [f"{_shown(origin)}:{line}: {key}: {message}" for line, key, message in located]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    error = PolicyError(problems[0] + more)
    error.problems = tuple(problems)
    return error


def _syntax_error(text: str, error: ValueError) -> str:
    """Return `LINE: problem`. The message of tomllib ends with the line, or says that the text ended too soon."""
    message = str(error)
    at = re.search(r" \(at line (\d+), column \d+\)$", message)
    if at is not None:
        return f"{at[1]}: not TOML: {_shown(message[: at.start()])}"
    if message.endswith(" (at end of document)"):
        return f"{text.count(chr(10)) + 1}: not TOML: {_shown(message)}"
    return f"1: not TOML: {_shown(message)}"


def _problem(details: ErrorDetails) -> tuple[KeyPath, str]:
    context: dict[str, Any] = details.get("ctx", {})
    key_path: KeyPath = (*details["loc"], *context.get("key_path", ()))
    if key_path[-1:] == ("[key]",):
        key_path = key_path[:-1]
    if details["type"] == "extra_forbidden":
        return key_path, "unknown key; remove it or correct its spelling"
    return key_path, "is missing" if details["type"] == "missing" else details["msg"]


def _key(key_path: KeyPath) -> str:
    """Format a key path as `rule[1].paths[0]`, with indices from 0. A key that is not bare in TOML is quoted."""
    key = ""
    for part in key_path:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", part) is not None
            key += ("." if key else "") + (part if bare else ascii(part))
    return key or "policy"


def _shown(text: str) -> str:
    """Escape control characters and unencodable characters, so that the text stays on one line of a terminal."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
