"""Commits are signed as the operator asks, and by nothing that the repository names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.errors import GitError
from tests.git.conftest import FREE, Gate, Repo
from tests.worlds import ROOT, register


@pytest.fixture
def on_work(repo: Repo) -> Repo:
    repo.git("checkout", "-q", "-b", "aidlc/work")
    repo.write("docs/plan.md", "Changed\n")
    return repo


@pytest.fixture
def ssh_key(tmp_path: Path) -> Path:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return key


def test_a_commit_is_signed_by_ssh(on_work: Repo, gated: Gate, ssh_key: Path, tmp_path: Path) -> None:
    """git verifies the signature of a commit, and of a tag with a message, against the operator's key."""
    alice = gated(on_work, policy=FREE + f'[git]\nsign = "ssh:{ssh_key}"\n')
    alice.gate.commit("[gt-1] Signed", ["docs/plan.md"])
    alice.gate.tag("v1", message="Version")
    signers = tmp_path / "signers"
    signers.write_text(
        f"bonobofs@bonobofs.invalid,{alice.session.guard.agent.id}@bonobofs.invalid "
        + ssh_key.with_suffix(".pub").read_text()
    )
    verify = ("-c", f"gpg.ssh.allowedSignersFile={signers}", "-c", "gpg.format=ssh")
    assert on_work.git(*verify, "log", "-1", "--format=%G?") == "G\n"
    assert on_work.run(*verify, "verify-tag", "v1").returncode == 0
    assert on_work.status() == ""
    on_work.check()


def test_a_commit_is_signed_by_gpg(on_work: Repo, gated: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by OpenPGP."""
    keys = Path("/tmp") / f"bonobofs-gpg-{os.getpid()}"  # the path of gpg's socket is short
    keys.mkdir(mode=0o700)
    monkeypatch.setenv("GNUPGHOME", str(keys))
    try:
        who = "Service <service@example.org>"
        subprocess.run(
            ["gpg", "--batch", "--quiet", "--passphrase", "", "--quick-gen-key", who, "ed25519", "sign"],
            check=True,
            capture_output=True,
        )
        alice = gated(on_work, policy=FREE + '[git]\nsign = "openpgp:service@example.org"\n')
        alice.gate.commit("[gt-1] Signed", ["docs/plan.md"])
        done = on_work.run("verify-commit", "HEAD", GNUPGHOME=str(keys))
        assert done.returncode == 0, done.stderr
    finally:
        subprocess.run(["gpgconf", "--kill", "all"], check=False)
        subprocess.run(["rm", "-rf", str(keys)], check=True)


@pytest.mark.parametrize("sign", ["ssh:/nowhere/key", "openpgp:nobody@example.org"])
def test_what_cannot_be_signed_is_not_committed(on_work: Repo, gated: Gate, sign: str) -> None:
    """Without the key there is no commit, and index and branch are as before."""
    alice = gated(on_work, policy=FREE + f'[git]\nsign = "{sign}"\n')
    before = on_work.head(), on_work.staged()
    with pytest.raises(GitError) as caught:
        alice.gate.commit("[gt-1] Signed", ["docs/plan.md"])
    assert caught.value.kind == "signing"
    assert (on_work.head(), on_work.staged()) == before
    assert alice.of("commit")[-1].result == "error"


@pytest.mark.parametrize(("sign", "signature"), [("", "G\n"), ("[git]\nsign = 'off'\n", "N\n")])
def test_the_operators_own_configuration_signs(
    on_work: Repo, ssh_key: Path, tmp_path: Path, sign: str, signature: str
) -> None:
    """Where the policy says nothing, the operator's own configuration does, but not the repository's."""
    register("alice")
    person = tmp_path / "person"
    person.mkdir()
    (person / ".gitconfig").write_text(
        f"[commit]\n\tgpgSign = true\n[gpg]\n\tformat = ssh\n[user]\n\tsigningKey = {ssh_key}\n"
    )
    mark = tmp_path / "ran"
    on_work.git("config", "gpg.ssh.program", f"/bin/touch {mark}")
    on_work.git("config", "user.signingKey", "/nowhere")
    policy = tmp_path / "policy.toml"
    policy.write_text(FREE + sign)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bonobofs",
            "git",
            "commit",
            "-m",
            "[gt-1] Signed",
            "docs/plan.md",
            "--agent",
            "alice",
            "--policy",
            policy,
        ],
        cwd=on_work.root,
        env={**os.environ, "HOME": str(person), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    signers = tmp_path / "signers"
    signers.write_text("bonobofs@bonobofs.invalid " + ssh_key.with_suffix(".pub").read_text())
    verify = ("-c", f"gpg.ssh.allowedSignersFile={signers}", "-c", "gpg.format=ssh", "-c", "gpg.ssh.program=ssh-keygen")
    assert on_work.git(*verify, "log", "-1", "--format=%G?") == signature
    assert not mark.exists()
