"""Signing commits and tags, as the operator asks for it: by `[git] sign`, or by the operator's own git configuration.

The configuration of the repository is not looked at: it would name the program that runs.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pygit2

from bonobofs.errors import GitError
from bonobofs.guards.git.repository import Settings

_SECONDS: Final = 60
_KEPT: Final = ("HOME", "PATH", "GNUPGHOME", "SSH_AUTH_SOCK", "LANG", "LC_ALL", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR")


class Signer:
    """What signs, if anything does."""

    def __init__(self, sign: str | None) -> None:
        """`sign` is off, ssh:FILE, openpgp:KEY, or None for what the operator's configuration of git says."""
        self._form, self._key, self._program = "off", "", ""
        if sign is None:
            self._as_configured()
        else:
            self._form, _, self._key = sign.partition(":")

    def _as_configured(self) -> None:
        for settings in _operators():
            text = settings.text("commit.gpgsign")
            if text is not None and settings.flag("commit.gpgsign", default=False):
                self._form = settings.text("gpg.format") or "openpgp"
                self._key = settings.text("user.signingkey") or ""
                self._program = settings.text(f"gpg.{self._form}.program") or settings.text("gpg.program") or ""
                return
            if text is not None:
                return

    def signature(self, content: bytes) -> bytes:
        """An armoured signature; b"" where nothing is to be signed. GitError: it cannot be made."""
        if self._form == "off":
            return b""
        if self._form == "ssh":
            return self._ssh(content)
        if self._form == "openpgp":
            key = ["-u", self._key] if self._key else []
            return _run([self._program or "gpg", "--batch", "--status-fd=2", "-bsa", *key], content)
        raise GitError(f"signing by {self._form} is not known here", kind="signing")

    def _ssh(self, content: bytes) -> bytes:
        if not self._key:
            raise GitError("no key to sign with is named", kind="signing")
        with tempfile.TemporaryDirectory(prefix="bonobofs-") as directory:
            file, key = Path(directory, "content"), os.path.expanduser(self._key)
            if key.startswith(("ssh-", "key::", "ecdsa-", "sk-")):
                Path(directory, "key.pub").write_text(key.removeprefix("key::") + "\n", encoding="utf-8")
                key = str(Path(directory, "key.pub"))
            file.write_bytes(content)
            _run([self._program or "ssh-keygen", "-Y", "sign", "-n", "git", "-f", key, str(file)], b"")
            return file.with_name("content.sig").read_bytes()


def _operators() -> list[Settings]:
    """The operator's own configuration, what decides first."""
    found = []
    for read in (pygit2.Config.get_global_config, pygit2.Config.get_xdg_config, pygit2.Config.get_system_config):
        try:
            found.append(Settings(read()))
        except (OSError, pygit2.GitError):
            continue
    return found


def _run(command: list[str], given: bytes) -> bytes:
    env = {key: value for key, value in os.environ.items() if key in _KEPT}
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, check=False, timeout=_SECONDS, cwd="/", env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"{command[0]} cannot sign: {error}", kind="signing") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise GitError(f"{command[0]} cannot sign: {said[-1] if said else done.returncode}", kind="signing")
    return done.stdout
