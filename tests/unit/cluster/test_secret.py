"""Secrets: files that are closed to others, and what is derived from them."""

from __future__ import annotations

import os
import stat
import sys

import pytest

from phalanx.cli.app import main
from phalanx.cluster import Secret, make_secret
from phalanx.errors import ConfigError

pytestmark = pytest.mark.promise("files-and-messages-hold-no-code")


@pytest.fixture
def file(tmp_path):
    make_secret(tmp_path / "secret")
    return tmp_path / "secret"


def test_a_secret_is_closed_to_others_and_made_once(file):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="`path` must be where a new file can be made"):
        make_secret(file)


def test_the_command_names_an_absolute_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["phalanx", "secret", "a secret"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    path = tmp_path / "a secret"
    said = capsys.readouterr().out
    assert said.startswith(f"Made {path}. ")
    assert said.endswith(f" export PHALANX_SECRET_FILE='{path}'\n")
    assert path.is_file()


def test_hosts_with_the_same_file_have_the_same_keys_and_others_have_not(file, tmp_path):
    ours, theirs = Secret.read(file), Secret.read(file)
    assert ours.keys("server 1 of run") == theirs.keys("server 1 of run")
    assert ours.keys("server 1 of run") != ours.keys("server 2 of run")
    make_secret(tmp_path / "other")
    assert Secret.read(tmp_path / "other").keys("server 1 of run") != ours.keys("server 1 of run")
    assert file.read_bytes().hex() not in repr(ours)


def test_what_was_signed_is_taken_and_any_other_byte_is_not(file):
    secret = Secret.read(file)
    signed = secret.sign(b"tcp://10.0.0.1:4000")
    assert secret.verify(signed) == b"tcp://10.0.0.1:4000"
    for at in range(len(signed)):
        changed = signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :]
        with pytest.raises(ConfigError, match="must be signed with the secret of this run"):
            secret.verify(changed)


def test_a_file_that_others_may_read_or_that_is_none_is_refused(file, tmp_path):
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"closed to others \(mode 0600\), but .* has mode 0640"):
        Secret.read(file)
    (tmp_path / "short").write_bytes(b"x" * 31)
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(ConfigError, match=r"must hold 32 to 4096 bytes, but .* holds 31"):
        Secret.read(tmp_path / "short")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a pipe"):
        Secret.read(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="must be a file made by `phalanx secret`"):
        Secret.read(tmp_path / "nothing")
