"""A PostgreSQL server of the tests' own: its files in a temporary directory, its socket there too, no port open."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from tests.support.wait import until
from tests.support.world import NOBODY


class Postgres:
    """A server that can be stopped and started; what it holds stays. It runs as a user without rights."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._data = directory / "data"
        self._server: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        self._as: dict[str, Any] = {"cwd": directory, "env": {"LC_ALL": "C", "PATH": os.environ["PATH"]}}
        if os.geteuid() == 0:
            os.chown(directory, NOBODY, NOBODY)
            self._as |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        self._programs = _programs()
        options = ["--encoding=UTF8", "--locale=C", "--auth=trust", "--username=tests", "--no-sync"]
        command = [str(self._programs / "initdb"), *options, str(self._data)]
        subprocess.run(command, check=True, capture_output=True, **self._as)
        self.start()

    def start(self) -> None:
        settings = {"listen_addresses": "", "unix_socket_directories": str(self._directory), "fsync": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with open(self._directory / "log", "ab") as log:
            self._server = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._as,
            )
        until(self._answers, "the server of PostgreSQL answers", seconds=60)

    def stop(self) -> None:
        """End the server as an operator would at once: what is connected is cut off."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.wait(60)
            self._server = None

    def make_database(self) -> str:
        """The URL of a new, empty database."""
        name = f"tests_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return f"postgresql://tests@/{name}?host={self._directory}"

    def connect(self, name: str = "postgres") -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(host=str(self._directory), user="tests", dbname=name, autocommit=True)

    def _answers(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, (self._directory / "log").read_text()
        with contextlib.suppress(psycopg.OperationalError), self.connect():
            return True
        return False


def _programs() -> Path:
    """Debian keeps the server's programs out of the PATH, by version; the newest is taken."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    assert initdb is not None, "PostgreSQL is missing; install the package postgresql"
    return Path(initdb).resolve().parent
