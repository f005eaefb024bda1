"""Lease times come from the database's clock: hosts with different clocks agree."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bonobofs.state import leases
from bonobofs.state.database import Database
from tests.state.test_mount_leases import acquire
from tests.support.postgres import Postgres
from tests.support.world import environment

WRONG_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t which, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int said = real(which, now);
    if (which == CLOCK_REALTIME) now->tv_sec += atol(getenv("SECONDS_WRONG"));
    return said;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
"""
ELSEWHERE = """
import json, sys, time
from pathlib import Path
from bonobofs import session
from bonobofs.errors import ForbiddenError
from bonobofs.guards import FileGuard
from bonobofs.session import lease_service

def acquire(*patterns):
    try:
        terms = lease_service.LeaseTerms(seconds=3600)
        lease = lease_service.acquire(session.home(), lease_service.HolderOption("ann"), patterns, terms)
        return lease.until.isoformat()
    except ForbiddenError:
        return None

with session.open_session(sys.argv[1], agent="ann", policy=Path(sys.argv[2])) as opened, FileGuard(opened) as files:
    said = {path: str(getattr(files.write_file(path, "text", "ann"), "code", None)) for path in ("docs/a", "free")}
    print(json.dumps({"clock": time.time(), **said, "refused": acquire("docs/x"), "granted": acquire("src/**")}))
"""


@pytest.mark.parametrize("wrong", [timedelta(days=2), timedelta(days=-2)])
def test_a_host_with_a_wrong_clock_uses_the_database_clock(
    wrong: timedelta, postgres: Postgres, source: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that has expired by the host's clock is in force, and its own leases expire by the database's clock."""
    monkeypatch.setenv("BONOBOFS_DATABASE", postgres.make_database())
    (tmp_path / "wrong.c").write_text(WRONG_CLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "wrong.so", tmp_path / "wrong.c", "-ldl"], check=True)
    (tmp_path / "policy.toml").write_text('default = "allow"\n')
    with Database.open(home) as database:
        held = acquire(database, "bob", "docs/**").lease
        ran = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, source, tmp_path / "policy.toml"],
            env=environment(
                LD_PRELOAD=str(tmp_path / "wrong.so"),
                SECONDS_WRONG=str(round(wrong.total_seconds())),
                BONOBOFS_HOME=str(tmp_path / "elsewhere"),
            ),
            check=True,
            capture_output=True,
        )
        said = json.loads(ran.stdout)
        assert abs(datetime.fromtimestamp(said["clock"], UTC) - datetime.now(UTC) - wrong) < timedelta(hours=1)
        assert (said["docs/a"], said["free"], said["refused"]) == ("LEASED", "None", None)
        ends = datetime.fromisoformat(said["granted"])
        assert abs(ends - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=5)
        found = leases.list_leases(database)
        assert [(lease.holder.agent, lease.until) for lease in found] == [("bob", held.until), ("ann", ends)]
