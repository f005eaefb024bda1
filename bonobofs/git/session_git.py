"""The session's own `git`, run in the mount by a command or a tool of the agent: branch, checkout, commit and merge."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bonobofs.errors import GitError, UsageError
from bonobofs.git import branch_rules
from bonobofs.policy.decision import Refused
from bonobofs.policy.request import Operation


class GitExitError(Exception):
    """The program ended with an exit status other than 0."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status: Final = status


class SessionGit:
    """The git of the session in whose mount this process works. Its output is that of this process."""

    def __init__(self, program: Path, issue: str | None) -> None:
        """`issue` is put before the message of a commit that names none."""
        self.program: Final = program
        self._issue: Final = issue

    def run(self, *arguments: str, quiet: bool = False) -> int:
        """Run it, and return its exit status. `quiet`: drop its output."""
        output = subprocess.DEVNULL if quiet else None
        return subprocess.run([self.program, *arguments], check=False, stdout=output, stderr=output).returncode

    def read(self, *arguments: str) -> str:
        """Run it, and return what it prints, without the last newline; "" if it fails."""
        done = subprocess.run([self.program, *arguments], check=False, capture_output=True)
        return "" if done.returncode else os.fsdecode(done.stdout).removesuffix("\n")

    def demand(self, *arguments: str) -> None:
        """Run it. GitExitError: it failed."""
        if status := self.run(*arguments):
            raise GitExitError(status)

    def check_clean(self) -> None:
        """Refused: a tracked file differs from HEAD."""
        if self.run("diff", "--quiet", "HEAD", quiet=True):
            raise Refused(branch_rules.CLEAN.of(Operation.CHECKOUT_BRANCH))

    def branch(self, name: str, base: str, *, checkout: bool = False) -> None:
        """Create a branch, and check it out with `checkout`. Uncommitted changes stay if `base` is at HEAD.

        GitExitError. Refused: `base` is another commit, and the work tree has uncommitted changes.
        """
        if not checkout:
            self.demand("branch", name, base)
            return
        if self.read("rev-parse", "--verify", f"{base}^{{commit}}") != self.read("rev-parse", "--verify", "HEAD"):
            self.check_clean()
        self.demand("checkout", "-b", name, base, "--")

    def checkout(self, name: str) -> None:
        """Check out a branch. GitExitError. Refused: the work tree has uncommitted changes."""
        self.check_clean()
        self.demand("checkout", name, "--")

    def commit(self, message: str, files: Sequence[str]) -> None:
        """Commit the files as they are now, or without files what is staged. GitExitError."""
        named = ["--", *files] if files else []
        if files:
            self.demand("add", *named)
        self.demand("commit", "-m", self._with_issue(message), *(["--only", *named] if files else []))

    def merge(self, source: str, target: str | None, strategy: str) -> None:
        """Merge a branch into `target`, by default into HEAD. `strategy`: merge or squash.

        GitError: there are conflicts, which `paths` lists, and nothing was changed. GitExitError, Refused, UsageError.
        """
        if strategy not in ("merge", "squash"):
            raise UsageError(f"there is no merge strategy {strategy!r}: use merge or squash")
        self.check_clean()
        before = self.read("symbolic-ref", "--quiet", "--short", "HEAD") or self.read("rev-parse", "HEAD")
        elsewhere = target not in (None, before)
        if target is not None and elsewhere:
            self.demand("checkout", "--quiet", target, "--")
        try:
            self._merge_into_head(source, squash=strategy == "squash")
        finally:
            if elsewhere:
                self.run("checkout", "--quiet", before, "--", quiet=True)

    def _merge_into_head(self, source: str, *, squash: bool) -> None:
        status = self.run("merge", *(["--squash"] if squash else ["--no-edit"]), source)
        if status == 0:
            if squash and self.run("diff", "--cached", "--quiet", quiet=True):
                self.demand("commit", "--quiet", "-m", self._with_issue(f"Squash {source}"))
            return
        conflicts = self.read("diff", "--name-only", "-z", "--diff-filter=U").split("\0")[:-1]
        self.run("reset", "--quiet", "--hard" if squash else "--merge", quiet=True)
        if not conflicts:
            raise GitExitError(status)
        raise GitError("git could not merge, and nothing was changed", kind="conflict", paths=conflicts)

    def _with_issue(self, message: str) -> str:
        return message if self._issue is None or message.startswith("[") else f"[{self._issue}] {message}"
