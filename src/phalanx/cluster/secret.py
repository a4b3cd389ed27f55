"""The credential that the hosts of a run share: a private key and its certificate, in one file.

Both ends of a connection show this certificate and take no other. The file never travels by
itself: the user brings it to each host.
"""

from __future__ import annotations

import os
import ssl
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phalanx.errors import ConfigError, UnsupportedError

_OPENSSL = "openssl req -x509 -newkey ed25519 -nodes -subj /CN=phalanx -days 36500 -keyout - -out -"
_LONGEST = 64 << 10
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME: hosts' clocks may differ


@dataclass(frozen=True)
class Secret:
    """The content of a secret file; made by :meth:`read`."""

    content: bytes

    def __repr__(self) -> str:
        return "Secret(…)"

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read the file that :func:`make_secret` made.

        Raises:
            ConfigError: It is no such file, or others may read it.
        """
        try:
            with Path(path).open("rb") as file:
                status = os.fstat(file.fileno())
                secret = cls(file.read(_LONGEST))
            secret.tls(server=False)
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"`secret_file` must be a file made by `phalanx secret`, but {str(path)!r} is not: "
                f"{exc}."
            ) from exc
        if status.st_mode & _OTHERS or status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"`secret_file` must be yours and closed to others (mode 0600), but {str(path)!r} "
                f"has mode {stat.S_IMODE(status.st_mode):04o}. Say `chmod 600` and make a new "
                "secret if somebody may have read it."
            )
        return secret

    def tls(self, *, server: bool) -> ssl.SSLContext:
        """Return what one end of the run's connections is encrypted with."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # hosts are known by the certificate, not by a name
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= _NO_CHECK_TIME
        if server:
            context.num_tickets = 0
        # OpenSSL reads keys from files alone; this one has no name and is gone when it is closed.
        descriptor = os.memfd_create("phalanx-key", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, self.content)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
            context.load_verify_locations(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return context


def draw_secret() -> bytes:
    """Return the content of a new secret: a key and its certificate as PEM.

    Raises:
        UnsupportedError: The program ``openssl``, which makes it, is missing or failed.
    """
    try:
        return subprocess.run(_OPENSSL.split(), check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as exc:
        raise UnsupportedError(
            f"A secret is made by the program `openssl` (1.1.1 or later), but: {exc}. Install it, "
            "or make the secret on another machine."
        ) from exc


def make_secret(path: Path | str) -> None:
    """Write a new secret to a file of mode 0600.

    Raises:
        ConfigError: There is such a file, or it cannot be made.
        UnsupportedError: The program ``openssl`` is missing.
    """
    content = draw_secret()
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
    except OSError as exc:
        raise ConfigError(
            f"`path` must be where a new file can be made, but {str(path)!r} is not: "
            f"{exc.strerror}. An older secret stays valid; remove it to make another."
        ) from exc
