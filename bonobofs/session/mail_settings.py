"""Agent Mail settings from the sessions' policies: server, project and sender for each session's trail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from bonobofs.agent_mail.courier import CourierCursors, TrailCursor
from bonobofs.agent_mail.letter import compare, parse_subject
from bonobofs.agent_mail.mail_client import Address, Mailbox, MailServer
from bonobofs.audit.tombstones import tombstones
from bonobofs.audit.verify import Finding
from bonobofs.errors import MailError, StateError, UsageError
from bonobofs.session.registration import choose_policy
from bonobofs.state.home import home_id, read_document, session_directory, write_document
from bonobofs.state.sessions import Session, load_all
from bonobofs.system.locks import locked


class Settings(NamedTuple):
    """[agent_mail] of one policy for one source. Sessions with equal settings share a courier."""

    address: Address
    token_file: str | None
    only_denials: bool
    mirrors: bool
    """True if reservations on the server are mirrored as leases."""

    @property
    def name(self) -> str:
        """Name of the courier, unique in this state directory."""
        url, project, sender, _ = self.address
        return f"{url} {project} {sender}"


def settings_of(home: Path, home_id: str, session: Session) -> Settings | None:
    """Return the settings of a session; None without a policy file or [agent_mail]. StateError: the file is damaged."""
    path = session_directory(home, session.session) / "policy.json"
    try:
        return settings_in(read_document(path), home_id, session.source)
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError) as error:
        raise StateError(f"{path} is not the policy that bonobofs wrote there; move it away") from error


def settings_in(policy: dict[str, Any], home_id: str, source: str) -> Settings | None:
    """Return the settings in a policy, given as JSON data, for a source; None without [agent_mail].

    The default sender is unique per source and state directory, because some servers move a name to the project that
    requested it last.
    """
    table = policy.get("agent_mail")
    if not table:
        return None
    # A path can have bytes outside UTF-8. A project name must be text.
    project = table["project"] or source.encode(errors="backslashreplace").decode()
    sender = table["sender"] or f"bonobo-{sha256(f'{home_id} {project}'.encode()).hexdigest()[:8]}"
    address = Address(table["url"], project, sender, tuple(table["to"]))
    return Settings(address, table["token_file"], table["carry"] == "denials", bool(table["mirror_reservations"]))


def is_carried(home: Path, session: Session, seq: int) -> bool:
    """Return True if Agent Mail has the trail up to entry `seq`, or if the session has no settings. StateError."""
    from bonobofs.state.database import Database  # noqa: PLC0415 - most commands need no database

    settings = settings_of(home, home_id(home), session)
    if settings is None:
        return True
    with Database.open(home) as database:
        return CourierCursors(database).load(settings.name).get(session.session, TrailCursor()).seq >= seq


class WitnessReport(NamedTuple):
    """Result of `ask_witnesses`."""

    findings: list[Finding]
    """Differences between the trails and the posted heads."""
    letters: int
    """Number of letters of this state directory on the servers. 0 confirms no trail."""
    unknown: list[str]
    """UUIDs of sessions that have settings and no letter: the first letter is still to be sent, or it was removed."""


def ask_witnesses(home: Path) -> WitnessReport:
    """Compare the trails with the letters in all mailboxes that may have letters of these sessions.

    The mailboxes are those of the sessions' stored policies and of the current policies for the same sources, because
    an attacker may have changed the stored policies together with the trails. UsageError: no policy names a mailbox.
    MailError: a server cannot be queried. PolicyError, StateError, TrailError.
    """
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
        if (letter := parse_subject(sent.subject)) is not None and letter.home == mine[:8]
    ]
    known = {letter.session for letter in letters}
    unknown = [session for session, settings in named.items() if settings is not None and session not in known]
    return WitnessReport(
        list(compare(letters, home / "trails", mine, partial(tombstones, home))), len(letters), unknown
    )


def open_mailbox(home: Path, settings: Settings) -> Mailbox:
    """Return the mailbox of these settings without contacting the server. MailError: the token cannot be read."""
    token = ""
    if settings.token_file is not None:
        try:
            token = Path(settings.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise MailError(f"the token of Agent Mail in {settings.token_file} cannot be read: {reason}") from error
        if not token.isprintable() or " " in token:
            raise MailError(f"the token of Agent Mail in {settings.token_file} is more than one word")
    return Mailbox(MailServer(settings.address.url, token), settings.address, _TokensInFile(home / "agent_mail.json"))


class _TokensInFile:
    """Stores the tokens of registered names in one file (0600), because a server returns each token only once."""

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

    @contextmanager
    def registration(self, address: Address) -> Iterator[None]:
        number = sha256(_key(address).encode()).hexdigest()[:16]
        try:
            with locked(self._path.with_name(f"agent_mail-{number}.lock")):
                yield
        except OSError as error:
            raise StateError(f"{self._path.parent} cannot be written: {error.strerror}") from error

    def _read(self) -> dict[str, Any]:
        try:
            return read_document(self._path)
        except FileNotFoundError:
            return {}


def _key(address: Address) -> str:
    return f"{address.url} {address.project} {address.sender}"
