"""`bonobofs doctor`."""

from __future__ import annotations

import dataclasses
import enum
import grp
import os
import platform
import resource
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final

from bonobofs import session
from bonobofs.cli.options import Option
from bonobofs.cli.output import document, say, table
from bonobofs.errors import BonobofsError, UsageError, reason
from bonobofs.fuse import cpu_latency
from bonobofs.policy.allow_list import EVERYTHING
from bonobofs.sandbox import network_list
from bonobofs.session import launcher, mount_setup
from bonobofs.session.undo_service import limits_of
from bonobofs.system import syscalls
from bonobofs.system.paths import is_within
from bonobofs.undo.image_expiry import places_of, size_text, usage

FEW_FILES: Final = 4096
LITTLE_SPACE: Final = 100 * 10**6
_RULES: Final = Path("etc/udev/rules.d/70-bonobofs.rules")
_LATENCY: Final = Path("dev/cpu_dma_latency")


class Verdict(enum.StrEnum):
    """Result of a check. `note`: only some uses need it."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One check: what was found and, if it is not ok, the remedy."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


HALTING: Final = (
    "waking a halted processor makes each change cost 1.4 times as much; to let the group fuse keep them awake while "
    "its mounts serve: sudo bonobofs doctor --fix, then usermod -aG fuse USER and log in again"
)
_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.FAIL: "red"}


def doctor(
    json: Annotated[bool, Option("--json", help="One JSON document.")] = False,
    fix: Annotated[
        bool, Option("--fix", help="As root: let a group keep processors awake while its mounts serve.")
    ] = False,
    group: Annotated[str, Option(metavar="NAME", help="The group for --fix, which must exist.")] = "fuse",
) -> int:
    """Check what mounting needs on this machine, and print a remedy for each problem.

    Exit 1 if something that mounting needs is missing. A note matters only to some uses.

    \b
    Example:
      sudo bonobofs doctor --fix --group fuse
    """
    if fix:
        if os.geteuid() != 0:
            raise UsageError("--fix changes /dev and /etc; run: sudo bonobofs doctor --fix")
        rules = permit_group(group)
        say(f"the members of {group} may open /{_LATENCY}, also after a restart: {rules}")
    checks = [check for look in _LOOKS for check in look()]
    well = all(check.verdict is not Verdict.FAIL for check in checks)
    if json:
        document({"ok": well, "checks": [dataclasses.asdict(check) for check in checks]})
        return 0 if well else 1
    table(
        ("CHECK", "", "FOUND"),
        [(check.name, check.verdict, check.found) for check in checks],
        [_STYLES[check.verdict] for check in checks],
    )
    for check in checks:
        if check.remedy:
            say(f"{check.name}: {check.remedy}")
    return 0 if well else 1


def _check(name: str, problem: str, state: str, remedy: str, *, needed: bool = False) -> Check:
    """Return OK with `state` if there is no problem, else the problem with its remedy; FAIL if mounting `needed` it."""
    if not problem:
        return Check(name, Verdict.OK, state)
    return Check(name, Verdict.FAIL if needed else Verdict.NOTE, problem, remedy)


def _kernel() -> Iterator[Check]:
    release = platform.release()
    missing = launcher.lacks_kernel(platform.system(), release)
    oldest = ".".join(map(str, launcher.OLDEST_KERNEL))
    remedy = f"only the portable transport serves here; the kernel's own needs Linux {oldest} or later"
    yield _check("kernel", missing, f"Linux {release}", remedy)
    yield Check("python", Verdict.OK, f"{platform.python_version()}, {sys.executable}")
    yield Check("build", Verdict.OK, launcher.build())
    absent = launcher.lacks_portable()
    state, remedy = f"mfusepy, {syscalls.libfuse()}", f"--transport portable {absent}"
    yield _check("portable", absent and "cannot be used", state, remedy, needed=bool(missing))


def _device() -> Iterator[Check]:
    path = Path("/dev/fuse")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        remedy = "load the module, as root: modprobe fuse; in a container, pass --device /dev/fuse"
        yield Check("/dev/fuse", Verdict.FAIL, error.strerror or "missing", remedy)
        return
    state = f"mode {stat.S_IMODE(mode):04o}"
    if not stat.S_ISCHR(mode):
        remedy = "as root: rm /dev/fuse; mknod -m 666 /dev/fuse c 10 229"
        yield Check("/dev/fuse", Verdict.FAIL, "not a device", remedy)
    elif not os.access(path, os.R_OK | os.W_OK):
        yield Check("/dev/fuse", Verdict.FAIL, state, "this user cannot open it; as root: chmod 0666 /dev/fuse")
    else:
        problem = "" if stat.S_IMODE(mode) & 0o666 == 0o666 else state
        yield _check("/dev/fuse", problem, state, "for other users to mount, as root: chmod 0666 /dev/fuse")


def _fusermount() -> Iterator[Check]:
    needed = os.geteuid() != 0
    program = shutil.which("fusermount3")
    if program is None:
        remedy = "ordinary users need it to mount; install the package fuse3"
        yield _check("fusermount3", "missing", "", remedy, needed=needed)
        return
    is_set_uid = Path(program).stat().st_mode & stat.S_ISUID
    problem = "" if is_set_uid else f"{program}, not set-uid"
    yield _check("fusermount3", problem, program, f"as root: chmod u+s {program}", needed=needed)
    problem = "" if Path("/etc/mtab").exists() else "missing"
    remedy = "fusermount3 unmounts nothing without it; as root: ln -s /proc/self/mounts /etc/mtab"
    yield _check("/etc/mtab", problem, "there", remedy, needed=needed)
    try:
        lines = Path("/etc/fuse.conf").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    problem = "" if "user_allow_other" in map(str.strip, lines) else "not set in /etc/fuse.conf"
    remedy = "only for --allow-other as an ordinary user; as root: echo user_allow_other >> /etc/fuse.conf"
    yield _check("user_allow_other", problem, "set in /etc/fuse.conf", remedy)


def _sandbox() -> Iterator[Check]:
    """Start the sandbox of `run` with its real flags, and try to escape from it."""
    from bonobofs.sandbox import host_probe, last_step  # noqa: PLC0415

    program = shutil.which("bwrap")
    if program is None:
        yield Check("sandbox", Verdict.NOTE, "bubblewrap is missing", "only run needs it; install bubblewrap")
        return
    probe = host_probe.probe()
    state = f"{program}, Landlock ABI {last_step.landlock_abi()}"
    yield _check("sandbox", probe.failure, state, f"bonobofs run refuses to start here: {probe.remedy}")
    for layer, count, succeeded in probe.scores:
        score = f"{count - len(succeeded)} of {count} escapes stopped"
        remedy = f"not stopped: {', '.join(succeeded)}; do not use run"
        yield _check(f"escapes: {layer}", score if succeeded else "", score, remedy, needed=True)


def _limits() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = f"{_limit(soft)}, at most {_limit(hard)}"
    problem = state if hard != resource.RLIM_INFINITY and hard < FEW_FILES else ""
    remedy = f"programs that hold many removed or new files open may reach the limit; raise it: ulimit -Hn {FEW_FILES}"
    yield _check("open files", problem, state, remedy)
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    problem = "" if soft == resource.RLIM_INFINITY else _limit(soft)
    remedy = "no file and no record can grow beyond it through a mount made from here; ulimit -f unlimited"
    yield _check("file size", problem, "unlimited", remedy)
    cpus = len(os.sched_getaffinity(0))
    remedy = "changes cost less if the server has a processor of its own"
    yield _check("processors", "" if cpus > 1 else "1", str(cpus), remedy)


def _watching() -> Iterator[Check]:
    """Watching a source needs an inotify watch per directory and an instance per mount."""
    for name, few in (("max_user_watches", 65_536), ("max_user_instances", 16)):
        limit = _number(Path("/proc/sys/fs/inotify", name))
        if limit is None:
            remedy = "external changes are then looked for once a second; a kernel with inotify sees them at once"
            yield Check("inotify", Verdict.NOTE, "not in this kernel", remedy)
            return
        if limit < few:
            remedy = f"where it is reached, sources are not watched; as root: sysctl fs.inotify.{name}={few * 16}"
            yield Check("inotify", Verdict.NOTE, f"{name} is {limit}", remedy)
            return
    yield Check("inotify", Verdict.OK, "enough watches")


def _mounts() -> Iterator[Check]:
    """Problems of the sessions that are mounted now."""
    try:
        found = session.statuses(session.home())
    except BonobofsError:
        return  # the state directory has a check of its own
    for one in found:
        if one.unwatched:
            where = one.session.mountpoint or one.session.source
            remedy = f"an unwatched external change may show a second late and is not recorded: {one.watch}"
            yield Check("watching", Verdict.NOTE, f"{where}: {one.unwatched}", remedy)
        if one.leases is not None:
            where = one.session.mountpoint or one.session.source
            remedy = f"every change of the source is refused until they are known: {one.leases}"
            yield Check("leases", Verdict.FAIL, f"{where}: the leases are unknown", remedy)


def _idling() -> Iterator[Check]:
    """Only on a virtual machine that could poll while idle: a halted processor is woken through the host."""
    polled = cpu_latency.halt_poll_ns()
    if polled is None:
        return
    problem = "" if polled or cpu_latency.device() else "halt at once"
    state = f"poll for {polled // 1000} us before they halt" if polled else "halt at once; mounts keep them awake"
    yield _check("idle processors", problem, state, HALTING)


def permit_group(group: str, root: Path = Path("/")) -> Path:
    """Let a group open the device of `cpu_latency`, now and by a rule for udev; return the file of the rule.

    `root` is the directory in place of `/`. Raises BonobofsError: there is no such group, or no such device.
    """
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        raise UsageError(f"there is no group {group}; create it: groupadd --system {group}") from None
    rules = root / _RULES
    try:
        os.chown(root / _LATENCY, -1, number)
        (root / _LATENCY).chmod(0o660)
        rules.parent.mkdir(parents=True, exist_ok=True)
        rules.write_text(f'KERNEL=="{_LATENCY.name}", SUBSYSTEM=="misc", GROUP="{group}", MODE="0660"\n')
    except OSError as error:
        raise BonobofsError(f"processors still halt at once: {reason(error)}") from error
    return rules


def _state() -> Iterator[Check]:
    try:
        home = session.home()
    except BonobofsError as error:
        yield Check("state directory", Verdict.FAIL, "cannot be used", str(error))
        return
    command = mount_setup.closing_command(home)
    problem = f"{home}, mode {stat.S_IMODE(home.stat().st_mode):04o}" if command else ""
    yield _check("state directory", problem, str(home), f"other users can reach it; {command}")
    system = os.statvfs(home)
    free = system.f_bavail * system.f_frsize
    space = f"{free // 10**6} MB"
    remedy = "without space for the record changes are refused; free some, or set BONOBOFS_HOME to another disk"
    yield _check("space for records", space if free < LITTLE_SPACE else "", space, remedy, needed=True)


def _old_contents() -> Iterator[Check]:
    try:
        home = session.home()
    except BonobofsError:
        return  # `_state` says so
    # A directory below the mount of a stopped server would hang.
    stopped = [one.session.mountpoint for one in session.statuses(home) if one.state is session.SessionState.STOPPED]
    held = usage(each for each in places_of(home) if not any(is_within(each, path) for path in stopped if path))
    try:
        size = size_text(held.bytes, int(limits_of(home).max_total))
    except BonobofsError as error:
        yield Check("old contents", Verdict.NOTE, "the limit cannot be read", str(error))
        return
    yield Check("old contents", Verdict.OK, f"{held.files} files, {size} in {home / 'undo'}")


def _network() -> Iterator[Check]:
    try:
        home = session.home()
        policy = session.in_force(home)
        operator = network_list.operator_list(home, Path.cwd())
    except (BonobofsError, OSError) as error:
        yield Check("network lists", Verdict.NOTE, "cannot be read", f"`run` refuses every connection: {reason(error)}")
        return
    problem = "`run` admits every host" if policy.compiled.network.admits_all and EVERYTHING in operator else ""
    remedy = f'list the hosts that are needed instead of "*" in allow of [network] of {policy.origin}'
    yield _check("network lists", problem, "`run` admits listed hosts only", remedy)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


_LOOKS: Final[tuple[Callable[[], Iterator[Check]], ...]] = (
    _kernel,
    _device,
    _fusermount,
    _sandbox,
    _limits,
    _watching,
    _idling,
    _state,
    _old_contents,
    _network,
    _mounts,
)
