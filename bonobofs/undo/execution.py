"""Make the steps of an undo, through the enforcer, and journal them so that a killed undo is completed.

The journal is the plan in `undo/SESSION.plan` of the state directory. `SESSION.done` has a dot for each step that
has ended, before it the inode number of a file that the step writes, moves or exchanges, `@` with number and time of
each directory in which it has changed a name, and `!` with the reason in hex if the step has failed. A step that was
made without its dot is recognized by its result.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import signal
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Unpack

from bonobofs.audit.entry import BY, INODE, NEW_VALUE, OLD_VALUE, TOUCHES, UNDO
from bonobofs.audit.temp_cleanup import stray_name
from bonobofs.enforcement.authorizer import Admission, Caller, ChangeRecord, RelatedChange
from bonobofs.errors import StateError, error_text
from bonobofs.policy.decision import Code, Denied, Permit, Refused
from bonobofs.policy.request import HEAD_BYTES, Context, Kind, Request, kind_of
from bonobofs.state.home import write_text
from bonobofs.system import syscalls
from bonobofs.system.paths import Name, exchange, leads_to, remove_file, rename_to_free, replace_file, return_file
from bonobofs.undo.images import EMPTY, Image, Images
from bonobofs.undo.plan import SourceRefs
from bonobofs.undo.preimages import xattrs_of
from bonobofs.undo.step_replay import Judge
from bonobofs.undo.steps import (
    FailedSteps,
    FileFacts,
    UndoStep,
    arrived_changes,
    expectation,
    judged_changes,
    read_journal,
)

CALLER: Final = Caller("undo")
_INODE_NOTE: Final = re.compile(rb"(?<![^ ])(\d+) ")
_DIR_TIME_NOTE: Final = re.compile(rb"@(\d+):(-?\d+) ")
_LONGEST_VALUE: Final = 1 << 16
"""Bytes of the largest extended attribute of Linux."""
_SENT: Final = 0x7FFFF000
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_KEEP_TIME: Final = -1
_NEW_PATHS: Final = ("rename", "exchange", "link")
"""Steps that give a file of the source another path."""
_AFTER_FAILURE: Final = "an earlier step of its files was not made"


class Failure(NamedTuple):
    """A step that was not made, because the file changed since the plan was made, or an error."""

    path: str
    reason: str
    change: str
    """Name of the change that it should have taken back."""


class StepAuthorizer(Protocol):
    """What an execution needs of an `Authorizer`."""

    def decide(self, request: Request, context: Context) -> Permit | Denied:
        """As `Authorizer.decide`."""

    def authorize(
        self, request: Request, context: Context, *related: RelatedChange, **record: Unpack[ChangeRecord]
    ) -> Admission:
        """As `Authorizer.authorize`."""

    def deny(self, denied: Denied, caller: Caller) -> Refused:
        """As `Authorizer.deny`."""


class Execution:
    """Makes steps in a source for one principal."""

    def __init__(
        self, source: Path, authorizer: StepAuthorizer, images: Images, refs: SourceRefs, *, judge: Judge | None
    ) -> None:
        """`source`: the path by which to open it. `judge`: the policy of an agent; None: the operator's undo."""
        self._authorizer: Final = authorizer
        self._judge: Final = judge
        self._images: Final = images
        self._root: Final = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._dir_times: Final[dict[int, int]] = {}
        """Time of each directory after the last step in it, by inode number; _KEEP_TIME: another change of it stays."""
        self._expected: list[int] | None = None
        """What the present step expects at its path (`UndoStep.expected`)."""
        self._may_exist = False
        """Whether the killed undo may have created the file of the present step, but not set owner, mode and time."""
        self._is_half_written = False
        """Whether the present step has begun to write a file in place, and has not set its mode and time."""
        self._make: Final[dict[str, Callable[[UndoStep], None]]] = {
            "remove": self._remove,
            "rmdir": self._rmdir,
            "mkdir": self._mkdir,
            "put": self._put,
            "rename": self._rename,
            "exchange": self._rename,
            "link": self._link,
            "symlink": self._symlink,
            "mode": self._set_mode,
            "owner": self._set_owner,
            "times": self._set_times,
            "dir_times": self._set_dir_time,
            "publish": refs.move_back,
            "xattr": self._set_xattr,
        }

    def close(self) -> None:
        """Close the source."""
        os.close(self._root)

    def make(self, journal: UndoJournal) -> list[Failure]:
        """Make the steps of a journal in order. A file whose step fails is left as it is then.

        Return all failures of the journal, also those before the undo was killed.
        """
        steps = journal.steps
        failures = [Failure(steps[number].path, reason, steps[number].change) for number, reason in journal.failures]
        failed = FailedSteps()
        for number, _ in journal.failures:
            failed.add(steps[number])
        known = (step.arguments for step in steps if step.do == "dir_times" and "ino" in step.arguments)
        self._dir_times.update({arguments["ino"]: arguments["now"] for arguments in known} | journal.dir_times)
        if journal.is_resumed and journal.done < len(steps):
            self._forget_dir_times(steps[journal.done], journal)
        for number, step in enumerate(steps):
            if number < journal.done:
                continue
            reason, self._may_exist = "", journal.is_resumed
            try:
                if failed.blocks(step):
                    reason = _AFTER_FAILURE
                elif not self._is_made(step, journal):
                    self._prepare(step, journal)
                    self._make_and_track(step, journal)
                else:
                    self._check_made(step)
                    self._note_dir_times(step, journal, is_complete=True)
            except OSError as error:
                if self._stops_undo(error):
                    raise
                reason = error.strerror or str(error)
                self._reverse_move(steps[number - 1 : number], step, failed)
            if reason:
                failed.add(step)
                failures.append(Failure(step.path, reason, step.change))
                self._note_dir_times(step, journal, is_complete=False)
            journal.advance(reason)
        syscalls.syncfs(self._root)
        return failures

    def _stops_undo(self, error: OSError) -> bool:
        """Return whether the next call must make the step: a disk is full, or a file is half written."""
        is_unrecorded = isinstance(error, Refused) and error.decision.code is Code.UNRECORDED
        return error.errno in _FULL or is_unrecorded or self._is_half_written

    def _reverse_move(self, before: Sequence[UndoStep], step: UndoStep, failed: FailedSteps) -> None:
        """Reverse the step before a failed step, if that should have restored what the rename of both had replaced."""
        for move in before:
            if (move.do, move.change, move.path) == ("rename", step.change, step.path):
                self._expected = move.expected
                with suppress(OSError):
                    self._rename(UndoStep("rename", move.arguments["to"], move.change, {"to": move.path}))
                failed.add(move)

    def _forget_dir_times(self, step: UndoStep, journal: UndoJournal) -> None:
        """Rely on the present times of the directories of a step that was killed: it may have changed them."""
        for st in self._dir_stats(step):
            if st.st_ino not in journal.begun_dir_times:
                self._dir_times.pop(st.st_ino, None)

    def _prepare(self, step: UndoStep, journal: UndoJournal) -> None:
        """Note the inode at the path. ESTALE: the file is neither as it was for the plan nor half written by it."""
        st = self._stat(step.arguments.get("of", step.path))
        is_half_written = st is not None and step.do == "put" and st.st_nlink > 1 and journal.begun == st.st_ino
        self._expected = None if is_half_written else step.expected
        self._check_expected(st)
        if st is not None and step.do in ("put", "rename", "exchange") and not is_half_written:
            journal.note_inode(st.st_ino)

    def _check_expected(self, st: os.stat_result | None) -> None:
        """Compare a file with what the present step expects at its path. ESTALE: it is another one."""
        _check(st, self._expected)

    def _is_made(self, step: UndoStep, journal: UndoJournal) -> bool:
        """Return whether the killed undo made a step, but was killed before it wrote the dot."""
        if not journal.is_resumed:
            return False
        st = self._stat(step.path)
        arguments = step.arguments
        if step.do in ("remove", "rmdir"):
            return st is None
        if step.do in ("rename", "exchange"):
            other = self._stat(arguments["to"])
            if other is None or journal.begun:
                return other is not None and other.st_ino == journal.begun
            # A power loss may cut the note of the inode.
            is_same = expectation(other.st_mode, other.st_size, other.st_mtime_ns) == step.expected
            return step.do == "rename" and st is None and is_same
        if step.do == "put":
            if st is None or (st.st_ino == journal.begun and st.st_nlink == 1):
                return False
            return (st.st_size, st.st_mtime_ns) == (arguments["size"], arguments["mtime"])
        if step.do == "times":
            return st is not None and st.st_mtime_ns == arguments["mtime"]
        return step.do == "link" and self._is_linked(step)

    def _is_linked(self, step: UndoStep) -> bool:
        """Return whether the path of a link step leads to its file, and to no file that took the name."""
        st, of = self._stat(step.path), self._stat(step.arguments["of"])
        return st is not None and of is not None and st.st_ino == of.st_ino

    def _stat(self, path: str) -> os.stat_result | None:
        try:
            with self._directory(path) as (directory, name):
                return os.stat(name, dir_fd=directory, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    @contextmanager
    def _directory(self, path: str) -> Iterator[Name]:
        above, _, name = os.fsencode(path).rpartition(b"/")
        directory = syscalls.open_beneath(self._root, above or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield directory, name or b"."
        finally:
            os.close(directory)

    @contextmanager
    def _change(self, step: UndoStep, details: dict[str, Any] | None = None) -> Iterator[Name]:
        """Authorize the change of a step, and yield its open directory and the name."""
        record = {UNDO: step.change, **(details or {})}
        first, *related = judged_changes(step, self, self._images)
        admission = self._authorizer.authorize(first.request, first.context, *related, caller=CALLER, details=record)
        with admission, self._directory(step.path) as (directory, name):
            yield directory, name

    @contextmanager
    def _compared(self, directory: int, name: bytes, expected: list[int] | None = None) -> Iterator[str]:
        """Yield a path that leads to the file that has the name now, whatever takes the name later.

        `expected`: the `expectation` of the file; None: that of the present step. ESTALE: the file is another one.
        """
        with _opened(directory, name, os.O_PATH) as fd:
            _check(os.fstat(fd), self._expected if expected is None else expected)
            yield f"/proc/self/fd/{fd}"

    def facts_of(self, path: str) -> FileFacts:
        """As `StepFiles.facts_of`."""
        with self._directory(path) as (directory, name):
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
            kind, context = kind_of(st.st_mode), Context(in_source=True)
            if kind is Kind.SYMLINK:
                target = os.readlink(os.fsdecode(name), dir_fd=directory)
                return FileFacts(kind, context._replace(target=target))
            if kind not in (Kind.FILE, Kind.DIRECTORY) or self._judge is None:
                return FileFacts(kind, context)
            with _opened(directory, name) as fd:
                if kind is Kind.DIRECTORY:
                    return FileFacts(kind, context, os.listdir(fd))
                head, mode = os.pread(fd, HEAD_BYTES, 0), stat.S_IMODE(st.st_mode)
                return FileFacts(kind, context._replace(size=st.st_size, mode=mode, head=head))

    def size_of(self, path: str) -> int | None:
        """As `StepFiles.size_of`."""
        st = self._stat(path)
        return None if st is None else st.st_size

    def kind_of(self, path: str) -> Kind:
        """As `StepFiles.kind_of`."""
        st = self._stat(path)
        return Kind.FILE if st is None else kind_of(st.st_mode)

    def _remove(self, step: UndoStep) -> None:
        """Remove a file under a temporary name, so that a file that takes the name meanwhile stays."""
        st, temporary = self._stat(step.path), stray_name()
        details = {BY: temporary, INODE: 0 if st is None else st.st_ino}
        with self._change(step, details) as start, self._compared(*start) as file:
            remove_file(start, (start[0], temporary.encode()), partial(self._check_moved, file))

    def _check_moved(self, file: str, at: Name) -> None:
        """Check a file that was renamed. ESTALE: it is another file, or a program has written it."""
        _check_same(file, at)
        self._check_expected(os.stat(file))

    def _rmdir(self, step: UndoStep) -> None:
        with self._change(step) as (directory, name), self._compared(directory, name):
            os.rmdir(name, dir_fd=directory)

    def _mkdir(self, step: UndoStep) -> None:
        arguments = step.arguments
        with self._change(step) as (directory, name):
            with suppress(FileExistsError) if self._may_exist else nullcontext():
                os.mkdir(name, 0o700, dir_fd=directory)
            made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            try:
                if self._may_exist and os.listdir(made):  # the killed undo had made an empty one
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                _set_state(made, arguments, arguments["xattrs"])
            except OSError:
                if leads_to((directory, name), os.fstat(made)):
                    with suppress(OSError):  # another program has made a file in it
                        os.rmdir(name, dir_fd=directory)
                raise
            finally:
                os.close(made)

    def _put(self, step: UndoStep) -> None:
        arguments = step.arguments
        image = Image(*arguments["image"])
        opened = io.FileIO(os.devnull) if image == EMPTY else self._images.open(image)
        if opened is None:
            raise OSError(errno.ENODATA, "the old content is no longer kept")
        old = self._stat(step.path)
        with opened as content:
            if os.fstat(content.fileno()).st_size < arguments["size"]:
                raise _cut()
            if old is not None and old.st_nlink > 1 and not arguments["new"]:
                self._write(step, content.fileno())
                return
            temporary = stray_name().encode()
            with self._directory(step.path) as above, _unnamed(above[0]) as unnamed:
                inos = [] if unnamed is None else [os.fstat(unnamed).st_ino, *([] if old is None else [old.st_ino])]
                details = {BY: temporary.decode(), **({INODE: inos} if inos else {})}
                with self._change(step, details) as start, _named(unnamed, start[0], temporary) as fd:
                    self._replace(step, content.fileno(), fd, start, (start[0], temporary))

    def _replace(self, step: UndoStep, content: int, new: int, start: Name, end: Name) -> None:
        """Write a new file, and rename it from a temporary name `end` onto the path `start`."""
        try:
            size = step.arguments["size"]
            _fill(new, content, size, _data_of(content, size))
            _set_state(new, step.arguments, self._xattrs(step, *start))
            if not os.fstat(new).st_nlink:
                os.link(f"/proc/self/fd/{new}", end[1], dst_dir_fd=end[0], follow_symlinks=True)
            if step.arguments["new"]:
                rename_to_free(end, start)
            else:
                # Another program may have written while the content was copied.
                with self._compared(*start) as file:
                    replace_file(end, start, partial(self._check_moved, file))
        except BaseException:
            if leads_to(end, os.fstat(new)):  # after an exchange, a file of another program may have the name
                os.unlink(end[1], dir_fd=end[0])
            raise

    def _xattrs(self, step: UndoStep, directory: int, name: bytes) -> dict[str, str]:
        """Return the extended attributes of a restored file: those in the store, or those that the file has now."""
        kept = step.arguments["xattrs"]
        if kept is None:
            return xattrs_of(_of(directory, name), _LONGEST_VALUE)
        content = self._images.open(Image(*kept))
        if content is None:
            return {}
        with content:
            found = {each: os.getxattr(content.fileno(), each).hex() for each in os.listxattr(content.fileno())}
        changed = {**found, **step.arguments.get("values", {})}
        return {name: value for name, value in changed.items() if value is not None}

    def _write(self, step: UndoStep, content: int) -> None:
        """Write in place a file that has several names, which all keep leading to it."""
        size = step.arguments["size"]
        with self._change(step) as start, self._compared(*start) as file:
            made = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            try:
                _lease(made)
                st = os.fstat(made)
                self._check_expected(st)
                os.utime(made, ns=(st.st_atime_ns, st.st_mtime_ns))  # EPERM: this user may not restore the time
                self._is_half_written = True
                _fill(made, content, size, [(0, size)])
                _set_state(made, step.arguments)
                self._is_half_written = False
            finally:
                os.close(made)

    def _rename(self, step: UndoStep) -> None:
        to, is_exchange = step.arguments["to"], step.do == "exchange"
        details: dict[str, Any] = {"to": to, TOUCHES: [to], **({"exchange": True} if is_exchange else {})}
        with (
            self._directory(to) as end,
            self._change(step, details) as start,
            self._compared(*start) as file,
            self._compared(*end, step.arguments.get("other")) if is_exchange else nullcontext() as other,
        ):
            (exchange if is_exchange else rename_to_free)(start, end)
            try:
                _check_same(file, end)
                if other is not None:
                    _check_same(other, start)
            except OSError:
                (exchange if is_exchange else return_file)(end, start)
                raise
            self._check_arrival(step, start, end)

    def _check_made(self, step: UndoStep) -> None:
        """As `_check_arrival`, for a step that the killed undo has made."""
        if self._judge is not None and step.do in _NEW_PATHS:
            with self._directory(step.path) as start, self._directory(step.arguments.get("to", step.path)) as end:
                self._check_arrival(step, start, end)

    def _check_arrival(self, step: UndoStep, start: Name, end: Name) -> None:
        """Judge again what a step has brought to a path, and reverse the step if the policy refuses it. OSError.

        The agent may have changed the files after the first judgement. Since the step, the mount judges their changes
        by the new path. `start` and `end`: the opened directories of the step, each with the name; of a link the same.
        """
        if self._judge is None:
            return
        try:
            denied = next(iter(self._judge(arrived_changes(step, self)).values()), None)
            if denied is not None:
                raise self._authorizer.deny(denied, CALLER)
        except OSError:
            self._reverse(step, start, end)
            raise

    def _reverse(self, step: UndoStep, start: Name, end: Name) -> None:
        directory, name = start
        if step.do == "link":
            if self._is_linked(step):
                os.unlink(name, dir_fd=directory)
        else:
            (exchange if step.do == "exchange" else return_file)(end, start)

    def _link(self, step: UndoStep) -> None:
        of = step.arguments["of"]
        with self._directory(of) as old, self._change(step, {"from": of}) as place, self._compared(*old) as file:
            directory, name = place
            os.link(file, name, dst_dir_fd=directory, follow_symlinks=True)
            self._check_arrival(step, place, place)

    def _symlink(self, step: UndoStep) -> None:
        target, mtime = step.arguments["target"], step.arguments["mtime"]
        with self._change(step, {"target": target}) as (directory, name):
            if not (self._may_exist and _is_symlink(directory, name, target)):
                os.symlink(target, name, dir_fd=directory)
            with _opened(directory, name, os.O_PATH) as fd:
                if not _is_symlink(fd, b"", target):
                    raise _changed()
                try:
                    file = f"/proc/self/fd/{fd}"
                    if os.geteuid() == 0:
                        os.chown(file, step.arguments["uid"], step.arguments["gid"])
                    os.utime(file, ns=(mtime, mtime))
                except OSError:
                    if leads_to((directory, name), os.fstat(fd)):
                        os.unlink(name, dir_fd=directory)
                    raise

    def _set_mode(self, step: UndoStep) -> None:
        mode = step.arguments["mode"]
        with self._change(step, {"mode": f"{mode:04o}"}) as place, self._compared(*place) as file:
            os.chmod(file, mode)  # fails for a symlink

    def _set_owner(self, step: UndoStep) -> None:
        uid, gid = step.arguments["uid"], step.arguments["gid"]
        with self._change(step, {"owner": uid, "group": gid}) as place, self._compared(*place) as file:
            os.chown(file, uid, gid)

    def _set_times(self, step: UndoStep) -> None:
        mtime = step.arguments["mtime"]
        with self._change(step) as place, self._compared(*place) as file:
            os.utime(file, ns=(os.stat(file).st_atime_ns, mtime))

    def _set_dir_time(self, step: UndoStep) -> None:
        """Set the time of a directory whose changes were all taken back; the policy and the owner must permit it."""
        st = self._stat(step.path)
        if st is None or self._dir_times.get(st.st_ino, st.st_mtime_ns) != st.st_mtime_ns:
            return  # another program has changed a name meanwhile
        ((request, context, *_),) = judged_changes(step, self, self._images)
        is_permitted = isinstance(self._authorizer.decide(request, context), Permit)
        if st.st_mtime_ns != step.arguments["mtime"] and is_permitted:
            try:
                self._set_times(step)
            except OSError as error:  # the changes in the directory were taken back nevertheless
                if self._stops_undo(error):
                    raise

    def _make_and_track(self, step: UndoStep, journal: UndoJournal) -> None:
        """Make a step, and keep the times of the directories in which it or another program changes names."""
        for st in self._dir_stats(step):
            if self._dir_times.setdefault(st.st_ino, st.st_mtime_ns) != st.st_mtime_ns:
                self._dir_times[st.st_ino] = _KEEP_TIME
        try:
            self._make[step.do](step)
        except OSError as error:
            if error.errno in _FULL:
                self._note_dir_times(step, journal, is_complete=True)  # the next call makes the step
            raise
        self._note_dir_times(step, journal, is_complete=True)

    def _note_dir_times(self, step: UndoStep, journal: UndoJournal, *, is_complete: bool) -> None:
        """Note the times of the directories of a step. If it was not made, they keep their present times."""
        made = self._stat(step.path) if step.do == "mkdir" and is_complete else None
        if made is not None:
            self._dir_times.pop(made.st_ino, None)  # a removed directory had the number
        for st in self._dir_stats(step):
            is_own = is_complete and self._dir_times.get(st.st_ino) != _KEEP_TIME
            self._dir_times[st.st_ino] = st.st_mtime_ns if is_own else _KEEP_TIME
            journal.note_dir_time(st.st_ino, self._dir_times[st.st_ino])

    def _dir_stats(self, step: UndoStep) -> Iterator[os.stat_result]:
        """Yield the states of the directories of a step. Leaves out what is no directory any more."""
        for path in _directories(step):
            with suppress(OSError):
                st = self._stat(path)
                if st is not None:
                    yield st

    def _set_xattr(self, step: UndoStep) -> None:
        name, value, old = step.arguments["name"], step.arguments["value"], self._xattr(step)
        if old == value:
            return  # the killed undo has set it, or the plan dropped the step that restored the content
        details = {"name": name, OLD_VALUE: old, NEW_VALUE: value}
        with self._change(step, details) as place, self._compared(*place) as file:
            if value is None:
                os.removexattr(file, name)
            else:
                os.setxattr(file, name, bytes.fromhex(value))

    def _xattr(self, step: UndoStep) -> str | None:
        """Return the value of the extended attribute that a step sets, in hex; None: there is none."""
        with self._directory(step.path) as (directory, name), suppress(OSError):
            return os.getxattr(_of(directory, name), step.arguments["name"], follow_symlinks=False).hex()
        return None


class UndoJournal:
    """The steps of one undo, and how many of them were made."""

    def __init__(self, directory: Path, name: str, steps: Sequence[UndoStep], progress: bytes | None = None) -> None:
        """`progress`: the content of `SESSION.done`; None: the undo is new."""
        self._plan: Final = directory / f"{name}.plan"
        self._done: Final = directory / f"{name}.done"
        self.steps: Final = steps
        *ended, begun = (progress or b"").split(b".")
        self.dir_times: Final = {ino: time for text in (*ended, begun) for ino, time in _dir_times(text).items()}
        """Time of each directory after the last step in it, by inode number."""
        self.begun_dir_times: Final = _dir_times(begun)
        """The same, of the step that did not end."""
        self._resumes_at: Final = -1 if progress is None else len(ended)
        self.done = len(ended)
        """Number of steps that have ended."""
        self.failures: Final = [
            (number, bytes.fromhex(text.partition(b"!")[2].decode()).decode())
            for number, text in enumerate(ended)
            if b"!" in text
        ]
        """Numbers of the steps that failed before the undo was killed, with the reasons."""
        self._begun: Final = int([b"0", *_INODE_NOTE.findall(begun)][-1])
        self._descriptor = -1

    @classmethod
    def begin(cls, directory: Path, name: str, steps: Sequence[UndoStep], about: dict[str, Any]) -> UndoJournal:
        """Write a journal. `about`: what the undo is for. StateError: it cannot be written."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        journal = cls(directory, name, steps)
        document = {**about, "steps": [step.document() for step in steps]}
        try:
            write_text(journal._plan, json.dumps(document))
        except OSError as error:
            text = f"the undo has not begun: its journal cannot be written in {directory}: {error_text(error)}"
            raise StateError(text) from error
        return journal

    @classmethod
    def unfinished(cls, directory: Path, source: str) -> list[tuple[UndoJournal, dict[str, Any]]]:
        """Return the journals of killed undos of a source, and what each is for. StateError, OSError."""
        found = []
        for plan in sorted(directory.glob("*.plan")):
            journal = read_journal(plan, source)
            if journal is not None:
                steps, about, progress = journal
                found.append((cls(directory, plan.stem, steps, progress), about))
        return found

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Open the journal for the notes of its steps. Remove it at the end: every step was made, or has failed."""
        self._descriptor = os.open(self._done, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            yield
        finally:
            os.close(self._descriptor)
        for path in (self._plan, self._done):
            path.unlink(missing_ok=True)

    @property
    def is_resumed(self) -> bool:
        """Whether the killed undo may have made the next step."""
        return self.done == self._resumes_at

    @property
    def begun(self) -> int:
        """The inode number that the killed undo noted for the next step; 0: none."""
        return self._begun if self.is_resumed else 0

    def note_inode(self, ino: int) -> None:
        """Note the inode that the next step writes, moves or exchanges."""
        os.write(self._descriptor, b"%d " % ino)

    def note_dir_time(self, ino: int, time: int) -> None:
        """Note the time of a directory after the next step."""
        os.write(self._descriptor, b"@%d:%d " % (ino, time))

    def advance(self, failure: str = "") -> None:
        """Note that the next step was made, or why it failed."""
        os.write(self._descriptor, b"!%s." % failure.encode().hex().encode() if failure else b".")
        self.done += 1


def _changed() -> OSError:
    return OSError(errno.ESTALE, "the file was changed while it was taken back")


def _cut() -> OSError:
    return OSError(errno.EIO, "the kept content is shorter than it was")


def _check(st: os.stat_result | None, expected: list[int] | None) -> None:
    """Compare a file with its `expectation`. ESTALE: it is another one."""
    found = None if st is None else expectation(st.st_mode, st.st_size, st.st_mtime_ns)
    if expected not in (None, found):
        raise _changed()


def _check_same(file: str, at: Name) -> None:
    """ESTALE: a name leads to another file."""
    if not os.path.samestat(os.stat(file), os.stat(at[1], dir_fd=at[0], follow_symlinks=False)):
        raise _changed()


@contextmanager
def _unnamed(directory: int) -> Iterator[int | None]:
    """Yield a new file without a name; None: this file system, such as NFS, has none."""
    try:
        fd = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _named(unnamed: int | None, directory: int, name: bytes) -> Iterator[int]:
    """Yield `unnamed`, or a new file with a name."""
    if unnamed is not None:
        yield unnamed
        return
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


def _lease(fd: int) -> None:
    """Let other programs wait with opening a file until it is closed. Without effect if one has it open."""
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # the kernel tells of a waiting program; this signal is ignored
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)


@contextmanager
def _opened(directory: int, name: bytes, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


def _directories(step: UndoStep) -> set[str]:
    """Return the directories in which a step changes names, and the one that it makes."""
    return step.directories | {step.path} if step.do == "mkdir" else step.directories


def _is_symlink(directory: int, name: bytes, target: str) -> bool:
    """Return whether a name is a symlink with a target."""
    with suppress(OSError):
        return os.readlink(os.fsdecode(name), dir_fd=directory) == target
    return False


def _dir_times(text: bytes) -> dict[int, int]:
    return {int(ino): int(time) for ino, time in _DIR_TIME_NOTE.findall(text)}


def _of(directory: int, name: bytes) -> bytes:
    return b"/proc/self/fd/%d/%s" % (directory, name)


def _fill(fd: int, content: int, size: int, blocks: Iterable[tuple[int, int]]) -> None:
    """Copy these ranges of a kept content to the same offsets."""
    for start, end in blocks:
        at = os.lseek(fd, start, os.SEEK_SET)
        while at < end:
            sent = os.sendfile(fd, content, at, min(end - at, _SENT))
            if not sent:
                raise _cut()
            at += sent
    os.ftruncate(fd, size)


def _data_of(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of the ranges of a file that are no hole."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole follows
                return
            raise
        at = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        yield start, at


def _set_state(fd: int, arguments: dict[str, Any], xattrs: dict[str, str] | None = None) -> None:
    """Give a file its old owner, mode and time, and a new file its extended attributes."""
    st = os.fstat(fd)
    if (st.st_uid, st.st_gid) != (arguments["uid"], arguments["gid"]):
        with suppress(PermissionError):
            os.fchown(fd, arguments["uid"], arguments["gid"])  # clears set-id bits and capabilities
    if xattrs is not None:
        _set_xattrs(fd, xattrs)
    os.fchmod(fd, stat.S_IMODE(arguments["mode"]))
    os.utime(fd, ns=(st.st_atime_ns, arguments["mtime"]))


def _set_xattrs(fd: int, values: dict[str, str]) -> None:
    with suppress(OSError):  # this file system has none
        for name in os.listxattr(fd):
            if name.startswith("system.posix_acl") and name not in values:
                os.removexattr(fd, name)  # inherited from the default ACL of the directory
    for name, value in values.items():
        try:
            os.setxattr(fd, name, bytes.fromhex(value))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EPERM):  # this file system, and this user
                raise
