"""Secrets: files that are closed to others, and what is derived from them."""

from __future__ import annotations

import os
import ssl
import stat
import sys

import pytest

from phalanx.cli.app import main
from phalanx.cluster import Secret, make_secret
from phalanx.cluster.certificate import public_key, sign
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


def test_hosts_with_the_same_file_have_one_certificate_and_others_have_not(file, tmp_path):
    ours, theirs = Secret.read(file), Secret.read(file)
    make_secret(tmp_path / "other")
    strangers = Secret.read(tmp_path / "other")
    server = ours.tls("run", server=True)
    assert shake_hands(server, theirs.tls("run", server=False))
    for client in (theirs.tls("another run", server=False), strangers.tls("run", server=False)):
        assert not shake_hands(server, client)
    assert file.read_bytes().hex() not in repr(ours)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    """Tell whether both ends take each other."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [server.wrap_bio(up, down, server_side=True), client.wrap_bio(down, up)]
    shaken: set[ssl.SSLObject] = set()
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
                shaken.add(end)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
    return len(shaken) == 2


@pytest.mark.parametrize(
    ("seed", "public", "message", "signature"),
    [  # RFC 8032, section 7.1, tests 1 and 3
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39"
            "701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f7"
            "60984dc6594a7c15e9716ed28dc027beceea1ec40a",
        ),
    ],
)
def test_keys_and_signatures_are_those_of_rfc_8032(seed, public, message, signature):
    assert public_key(bytes.fromhex(seed)).hex() == public
    assert sign(bytes.fromhex(seed), bytes.fromhex(message)).hex() == signature


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
