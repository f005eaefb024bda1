"""Agent's side of publication: one file that needs only the standard library, run by `python -I -S -E`.

    publish_client.py SOCKET publish [HOOK…]    publish HEAD; print one line. HOOK: name and arguments of a git hook
    publish_client.py SOCKET receive-pack PATH  remote end of `git push source`, set as remote.source.receivepack
    publish_client.py SOCKET upload-pack PATH   remote end of `git fetch source`

The program is not trusted: the session judges its calls at the other end of the socket. It imports no slow module,
because it runs after every commit.
"""

from __future__ import annotations

import _socket
import os
import sys
import time

_BLOCK = 1 << 16
_FAILED = 1
_CONNECT_SECONDS = 10.0
"""A killed companion is restarted within this time."""
_RETRY_SECONDS = 0.05


def main() -> int:
    socket, command = sys.argv[1], sys.argv[2]
    if command in ("receive-pack", "upload-pack"):
        answer = _call(socket, b'{"call": "git.%s"}' % command.encode(), (0, 1))
        return _number(answer, b'"status": ')
    # `git commit --amend` has run post-commit already. `git checkout FILE` does not move HEAD.
    if sys.argv[3:5] == ["post-rewrite", "amend"] or (sys.argv[3:4] == ["post-checkout"] and sys.argv[-1] == "0"):
        return 0
    git_dir = _find_git_dir()
    if "/.git/modules/" in git_dir:  # a commit in a submodule stays in the session
        return 0
    with open(f"{git_dir}/HEAD", encoding="utf-8", errors="surrogateescape") as file:
        head = file.read().strip()
    if _is_under_way(git_dir, sys.argv[3:]):
        return 0
    return _publish(socket, head, is_linked="/.git/worktrees/" in git_dir)


def _is_under_way(git_dir: str, hook: list[str]) -> bool:
    """True if git works on several commits, and this is not the hook that it runs after the last one.

    git removes the directory of the operation after that hook.
    """
    if os.path.isdir(f"{git_dir}/rebase-merge"):
        return hook[:2] != ["post-rewrite", "rebase"]
    if os.path.isdir(f"{git_dir}/rebase-apply"):
        is_rebase = os.path.exists(f"{git_dir}/rebase-apply/rebasing")
        number, last = (_read_lines(f"{git_dir}/rebase-apply/{name}") for name in ("next", "last"))
        return is_rebase or number != last or hook[:1] != ["post-applypatch"]
    if os.path.isdir(f"{git_dir}/sequencer"):  # its first command is the current one
        return len(_read_lines(f"{git_dir}/sequencer/todo")) > 1 or hook[:1] != ["post-commit"]
    return False


def _read_lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read().splitlines()


def _publish(socket: str, head: str, *, is_linked: bool) -> int:
    """Publish HEAD. HEAD of the source does not follow that of a linked worktree."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    pushing = 0
    ref = head.removeprefix("ref: ")
    if ref != head:
        os.set_inheritable(ours.fileno(), True)
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
        command = ["git", "push", "--quiet", "--no-verify", "--no-thin", f"fd::{ours.fileno()}", f"+{ref}:{ref}"]
        pushing = os.posix_spawnp("git", command, os.environ, file_actions=actions)
    ours.close()
    try:
        words = b'"head": "%s", "is_linked": %s' % (_quoted(head), b"true" if is_linked else b"false")
        answer = _call(socket, b'{"call": "git.publish", %s}' % words, (theirs.fileno(),), theirs)
    finally:
        theirs.close()  # git push ends when the other end of its socket is closed
        if pushing:
            os.waitpid(pushing, 0)
    line = _text(answer, b'"line": "')
    if line:
        sys.stderr.write(f"{line}\n")
    return _number(answer, b'"status": ')


def _call(path: str, line: bytes, descriptors: tuple[int, ...], lent: _socket.socket | None = None) -> bytes:
    """Call the guard socket at `path` with descriptors, close `lent`, and return the answer; b"": there is none."""
    end = _connect(path)
    if end is None:
        return b""
    rights = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
    answer = b""
    try:
        end.sendmsg([line + b"\n"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        if lent is not None:
            lent.close()
        while not answer.endswith(b"\n"):
            data = end.recv(_BLOCK)
            if not data:
                break
            answer += data
    except ConnectionError:  # the companion was killed
        return b""
    return answer


def _connect(path: str) -> _socket.socket | None:
    """Connect to the guard socket, and retry while the companion is restarted. None: it does not come back."""
    # A socket address holds at most 107 bytes of path.
    handle = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    deadline = time.monotonic() + _CONNECT_SECONDS
    while time.monotonic() < deadline:
        end = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            end.connect(f"/proc/self/fd/{handle}/{os.path.basename(path)}")
        except (ConnectionRefusedError, FileNotFoundError):
            time.sleep(_RETRY_SECONDS)
        else:
            return end
    return None


def _find_git_dir() -> str:
    named = os.environ.get("GIT_DIR")
    if named:
        return named
    directory = os.getcwd()
    while not os.path.exists(f"{directory}/.git") and directory != "/":
        directory = os.path.dirname(directory)
    if not os.path.isfile(f"{directory}/.git"):
        return f"{directory}/.git"
    with open(f"{directory}/.git", encoding="utf-8", errors="surrogateescape") as file:
        return os.path.join(directory, file.read().removeprefix("gitdir: ").rstrip("\n"))


def _quoted(text: str) -> bytes:
    """Encode `text` as the content of a JSON string."""
    plain = (letter if (letter.isalnum() and letter.isascii()) or letter in "/-_.: " else None for letter in text)
    return "".join(shown or f"\\u{ord(letter):04x}" for shown, letter in zip(plain, text, strict=True)).encode()


def _text(answer: bytes, key: bytes) -> str:
    """Return the string after `key` in ASCII JSON, else the reason or message of a failed call."""
    for name in (key, b'"reason": "', b'"message": "'):
        at = answer.find(name)
        if at >= 0:
            end = at = at + len(name)
            while answer[end : end + 1] not in (b'"', b""):
                end += 2 if answer[end : end + 1] == b"\\" else 1
            return answer[at:end].decode("unicode_escape", "replace")
    return "" if answer else "not published: the session does not answer; look at bonobofs status"


def _number(answer: bytes, key: bytes) -> int:
    at = answer.find(key)
    digits = answer[at + len(key) :].split(b",")[0].strip(b" }\n") if at >= 0 else b""
    return int(digits) if digits.isdigit() else _FAILED


if __name__ == "__main__":
    sys.exit(main())
