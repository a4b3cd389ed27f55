"""Secrets: files that are closed to others, and the certificate that both ends show."""

from __future__ import annotations

import stat
import sys

import pytest

from phalanx.cli.app import main
from phalanx.cluster import Secret, make_secret
from phalanx.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.promise("files-and-messages-hold-no-code")


@pytest.fixture
def file(tmp_path):
    make_secret(tmp_path / "secret")
    return tmp_path / "secret"


def test_a_secret_is_closed_to_others_and_made_once(file):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() not in repr(Secret.read(file))
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


def test_where_openssl_is_missing_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"by the program `openssl` .* Install it, or make"):
        make_secret(tmp_path / "secret")
    assert not (tmp_path / "secret").exists()


def test_a_file_that_others_may_read_or_that_is_none_is_refused(file, tmp_path):
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"closed to others \(mode 0600\), but .* has mode 0640"):
        Secret.read(file)
    (tmp_path / "other").write_bytes(b"x" * 64)
    (tmp_path / "other").chmod(0o600)
    for name, why in (("other", "PEM"), ("nothing", "No such file")):
        with pytest.raises(ConfigError, match=f"must be a file made by `phalanx secret`.*{why}"):
            Secret.read(tmp_path / name)
