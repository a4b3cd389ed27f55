"""What the hosts of a run share so that nobody else can speak to their servers.

    secret ──HKDF──► key and certificate of the run    the only ones that both ends of TLS take
           ──HMAC──► signature of a server's address   which travels through a store open to others

The secret itself never travels: the user's own means bring the file to each host.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phalanx.cluster.certificate import certificate_and_key
from phalanx.errors import ConfigError
from phalanx.files import open_regular

__all__ = ["Secret", "make_secret"]

_SECRET_BYTES = 32
_SHORTEST, _LONGEST = 32, 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Secret:
    """The bytes of a secret; made by :meth:`read`."""

    content: bytes

    def __repr__(self) -> str:
        return "Secret(…)"

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read the file that :func:`make_secret` made.

        Raises:
            ConfigError: It is no file, others may read it, or it is too short or too long.
        """
        try:
            with open_regular(Path(path)) as file:
                status = os.fstat(file.fileno())
                content = file.read(_LONGEST + 1)
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
        if not _SHORTEST <= len(content) <= _LONGEST:
            raise ConfigError(
                f"`secret_file` must hold {_SHORTEST} to {_LONGEST} bytes, but {str(path)!r} holds "
                f"{'more' if len(content) > _LONGEST else len(content)}. Make one with "
                "`phalanx secret`."
            )
        return cls(content)

    def tls(self, run: str, *, server: bool) -> ssl.SSLContext:
        """Return what one end of a run's connections is encrypted with.

        Both ends show the run's certificate, and take no other.
        """
        side = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # hosts are known by the certificate, not by a name
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0
        certificate, key = certificate_and_key(self._derive(f"tls {run}"), "phalanx tables")
        context.load_verify_locations(cadata=certificate)
        # OpenSSL reads keys from files alone; this one has no name and is gone when it is closed.
        descriptor = os.memfd_create("phalanx-key", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, (certificate + key).encode())
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return context

    def sign(self, message: bytes) -> bytes:
        """Return 32 bytes that only holders of the secret can make of a message."""
        return hmac.digest(self._derive("sign"), message, hashlib.sha256)

    def _derive(self, purpose: str) -> bytes:
        """Derive 32 bytes: HKDF (RFC 5869) with SHA-256 and one block of output."""
        extracted = hmac.digest(b"phalanx secret 1", self.content, hashlib.sha256)
        return hmac.digest(extracted, purpose.encode() + b"\x01", hashlib.sha256)


def make_secret(path: Path | str) -> None:
    """Write a new secret to a file of mode 0600.

    Raises:
        ConfigError: There is such a file, or it cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as exc:
        raise ConfigError(
            f"`path` must be where a new file can be made, but {str(path)!r} is not: "
            f"{exc.strerror}. An older secret stays valid; remove it to make another."
        ) from exc
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(_SECRET_BYTES))
        file.flush()
        os.fsync(descriptor)
