"""Agent Mail as the policies of the sessions name it: which session's record goes where, and under what name."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from bonobofs.agent_mail.letter import compare, posted
from bonobofs.agent_mail.mail_client import Address, Mailbox, Server
from bonobofs.audit.tombstones import tombstones
from bonobofs.audit.verify import Finding
from bonobofs.errors import MailError, StateError, UsageError
from bonobofs.session.registration import choose_policy
from bonobofs.state.courier_cursors import Carried
from bonobofs.state.home import read_document, session_directory, write_document
from bonobofs.state.sessions import Session, load_all
from bonobofs.system.locks import locked


class Settings(NamedTuple):
    """[agent_mail] of one policy, for one source. Sessions that share them share a courier."""

    address: Address
    token_file: str | None
    only_denials: bool
    mirrors: bool
    """Reservations there are to be leases here."""

    @property
    def name(self) -> str:
        """What the courier is called among those of this state directory."""
        url, project, sender, _ = self.address
        return f"{url} {project} {sender}"


def settings_of(home: Path, home_id: str, session: Session) -> Settings | None:
    """Where the record of a session is carried; None where its policy names no place. StateError."""
    path = session_directory(home, session.session) / "policy.json"
    try:
        return settings_in(read_document(path), home_id, session.source)
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError) as error:
        raise StateError(f"{path} is not the policy that bonobofs wrote there; move it away") from error


def settings_in(policy: dict[str, Any], home_id: str, source: str) -> Settings | None:
    """What a policy, as plain data, says for a source.

    A sender without a name of its own gets one that no other source and no other state directory has: some servers
    take a name from one project when another asks for it.
    """
    table = policy.get("agent_mail")
    if not table:
        return None
    # The name of a directory need not be text; that of a project is.
    project = table["project"] or source.encode(errors="backslashreplace").decode()
    sender = table["sender"] or f"bonobo-{sha256(f'{home_id} {project}'.encode()).hexdigest()[:8]}"
    address = Address(table["url"], project, sender, tuple(table["to"]))
    return Settings(address, table["token_file"], table["carry"] == "denials", bool(table["mirror_reservations"]))


def is_carried(home: Path, session: Session, seq: int) -> bool:
    """Whether Agent Mail has the record of a session up to the entry `seq`, or is not to have it. StateError."""
    from bonobofs.state.courier_cursors import CourierCursors  # noqa: PLC0415 - most commands need no database
    from bonobofs.state.database import Database, home_id  # noqa: PLC0415 - as above

    settings = settings_of(home, home_id(home), session)
    if settings is None:
        return True
    with Database.open(home) as database:
        return CourierCursors(database).load(settings.name).get(session.session, Carried()).seq >= seq


class WitnessReport(NamedTuple):
    """What the witnesses know."""

    findings: list[Finding]
    """Where the trails are not those whose heads were posted."""
    letters: int
    """Number of letters of this state directory that they have. Without a letter they confirm nothing."""
    unknown: list[str]
    """Sessions whose record should be there, and of which they have no letter: it was not carried yet, or removed."""


def ask_witnesses(home: Path) -> WitnessReport:
    """What the letters say, in every mailbox to which those of these sessions may have gone.

    Asked are those that the sessions' policies name, and those that the policy in force names for the same sources: the
    sessions' own documents may have been changed with the trails. UsageError when there is none, MailError when one
    cannot be asked, StateError, TrailError.
    """
    from bonobofs.state.database import home_id  # noqa: PLC0415 - most commands need no database

    mine = home_id(home)
    sessions = load_all(home)
    named = {session.session: settings_of(home, mine, session) for session in sessions}
    found = [
        settings_in(choose_policy(home, None, Path(source)).plain, mine, source)
        for source in {session.source for session in sessions} or {str(Path.cwd())}
    ]
    witnesses = {one.name: one for one in (*named.values(), *found) if one is not None}
    if not witnesses:
        raise UsageError("no policy names a witness; give the server of Agent Mail in [agent_mail]")
    letters = [
        letter
        for settings in witnesses.values()
        for sent in open_mailbox(home, settings).sent()
        if (letter := posted(sent.subject)) is not None and letter.home == mine[:8]
    ]
    known = {letter.session for letter in letters}
    unknown = [session for session, settings in named.items() if settings is not None and session not in known]
    return WitnessReport(
        list(compare(letters, home / "trails", mine, partial(tombstones, home))), len(letters), unknown
    )


def open_mailbox(home: Path, settings: Settings) -> Mailbox:
    """The mailbox there; nothing is asked of the server yet. MailError when the token cannot be read."""
    token = ""
    if settings.token_file is not None:
        try:
            token = Path(settings.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise MailError(f"the token of Agent Mail in {settings.token_file} cannot be read: {reason}") from error
        if not token.isprintable() or " " in token:
            raise MailError(f"the token of Agent Mail in {settings.token_file} is more than one word")
    return Mailbox(Server(settings.address.url, token), settings.address, _TokensInFile(home / "agent_mail.json"))


class _TokensInFile:
    """Tokens of registered names in one document (0600): a server says each of them once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, address: Address) -> str | None:
        token = self._read().get(_key(address))
        return token if isinstance(token, str) else None

    def keep(self, address: Address, token: str) -> None:
        try:
            with locked(self._path.with_suffix(".lock")):
                write_document(self._path, {**self._read(), _key(address): token})
        except OSError as error:
            raise StateError(f"{self._path} cannot be written: {error.strerror}") from error

    def _read(self) -> dict[str, Any]:
        try:
            return read_document(self._path)
        except FileNotFoundError:
            return {}


def _key(address: Address) -> str:
    return f"{address.url} {address.project} {address.sender}"
