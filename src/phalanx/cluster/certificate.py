"""A key and its certificate, computed from 32 bytes: the same on every host that has them.

The certificate is X.509 (RFC 5280), signed with its own key by Ed25519 (RFC 8032, RFC 8410). All
hosts of a run have the same one, and trust it alone. TLS itself is OpenSSL's; here is only what
Python's `ssl` lacks, to make a certificate without another package.
"""

from __future__ import annotations

import base64
import hashlib

__all__ = ["certificate_and_key", "public_key", "sign"]

# The curve of RFC 8032, section 5.1; points are (x, y, z, t) with x/z, y/z and t = x·y/z.
_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_Y = 4 * pow(5, -1, _P) % _P
_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
_BASE = (_X, _Y, 1, _X * _Y % _P)
_Point = tuple[int, int, int, int]

_INTEGER, _BITS, _OCTETS, _UTF8, _TIME = 0x02, 0x03, 0x04, 0x0C, 0x18
_SEQUENCE, _SET, _VERSION = 0x30, 0x31, 0xA0
_ED25519 = bytes([0x30, 5, 0x06, 3, 0x2B, 0x65, 0x70])  # the algorithm 1.3.101.112
_COMMON_NAME = bytes([0x06, 3, 0x55, 4, 3])  # 2.5.4.3
_SINCE, _UNTIL = b"20200101000000Z", b"99991231235959Z"  # no host's clock matters


def certificate_and_key(seed: bytes, name: str) -> tuple[str, str]:
    """Return a certificate and its private key, each as PEM.

    Args:
        seed: The private key, 32 bytes.
        name: Whose the certificate is.
    """
    entry = _der(_SEQUENCE, _COMMON_NAME, _der(_UTF8, name.encode()))
    subject = _der(_SEQUENCE, _der(_SET, entry))
    content = _der(
        _SEQUENCE,
        _der(_VERSION, _der(_INTEGER, b"\x02")),  # X.509 version 3
        _der(_INTEGER, b"\x01"),
        _ED25519,
        subject,
        _der(_SEQUENCE, _der(_TIME, _SINCE), _der(_TIME, _UNTIL)),
        subject,
        _der(_SEQUENCE, _ED25519, _der(_BITS, b"\x00", public_key(seed))),
    )
    certificate = _der(_SEQUENCE, content, _ED25519, _der(_BITS, b"\x00", sign(seed, content)))
    key = _der(_OCTETS, _der(_OCTETS, seed))
    private = _der(_SEQUENCE, _der(_INTEGER, b"\x00"), _ED25519, key)
    return _pem("CERTIFICATE", certificate), _pem("PRIVATE KEY", private)


def _der(tag: int, *contents: bytes) -> bytes:
    content = b"".join(contents)
    length = bytes([len(content)])
    if len(content) > 127:
        digits = len(content).to_bytes(2, "big").lstrip(b"\x00")
        length = bytes([0x80 | len(digits)]) + digits
    return bytes([tag]) + length + content


def _pem(kind: str, content: bytes) -> str:
    text = base64.encodebytes(content).decode()
    return f"-----BEGIN {kind}-----\n{text}-----END {kind}-----\n"


def public_key(seed: bytes) -> bytes:
    """Return the public key of a private one (RFC 8032, section 5.1.5)."""
    return _encoded(_times(_scalar(seed)))


def sign(seed: bytes, message: bytes) -> bytes:
    """Return the signature of a message (RFC 8032, section 5.1.6)."""
    prefix = hashlib.sha512(seed).digest()[32:]
    nonce = _number(prefix + message)
    point = _encoded(_times(nonce))
    challenge = _number(point + public_key(seed) + message)
    answer = (nonce + challenge * _scalar(seed)) % _ORDER
    return point + answer.to_bytes(32, "little")


def _scalar(seed: bytes) -> int:
    number = int.from_bytes(hashlib.sha512(seed).digest()[:32], "little")
    return (number & ((1 << 254) - 8)) | (1 << 254)


def _number(message: bytes) -> int:
    return int.from_bytes(hashlib.sha512(message).digest(), "little") % _ORDER


def _times(number: int) -> _Point:
    """Return so many times the base point."""
    total, power = (0, 1, 1, 0), _BASE
    while number:
        if number & 1:
            total = _sum(total, power)
        power = _sum(power, power)
        number >>= 1
    return total


def _sum(p: _Point, q: _Point) -> _Point:
    a = (p[1] - p[0]) * (q[1] - q[0]) % _P
    b = (p[1] + p[0]) * (q[1] + q[0]) % _P
    c = 2 * p[3] * q[3] * _D % _P
    d = 2 * p[2] * q[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _encoded(point: _Point) -> bytes:
    x, y, z, _ = point
    inverse = pow(z, -1, _P)
    x, y = x * inverse % _P, y * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")
