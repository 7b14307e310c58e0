"""What a root certificate must be before a channel trusts it.

The rules are those of MindCluster's Elastic Agent: valid now, X.509 v3, RSA of 3072 bits or
EC of 256 at least, signed with SHA-256 or better, a CA, allowed to sign. Reads just as much
DER as that takes; needs nothing beyond the standard library.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

_MAX_BYTES = 1 << 20

_SIGNATURES = {
    "1.2.840.113549.1.1.11": "sha256WithRSAEncryption",
    "1.2.840.113549.1.1.12": "sha384WithRSAEncryption",
    "1.2.840.113549.1.1.13": "sha512WithRSAEncryption",
    "1.2.840.10045.4.3.2": "ecdsa-with-SHA256",
    "1.2.840.10045.4.3.3": "ecdsa-with-SHA384",
    "1.2.840.10045.4.3.4": "ecdsa-with-SHA512",
}
_RSA = "1.2.840.113549.1.1.1"
_EC = "1.2.840.10045.2.1"
_CURVES = {"1.2.840.10045.3.1.7": 256, "1.3.132.0.34": 384, "1.3.132.0.35": 521}
_CN = "2.5.4.3"
_BASIC = "2.5.29.19"
_USAGE = "2.5.29.15"


@dataclass(frozen=True)
class Certificate:
    """What a check needs to know of one certificate."""

    version: int
    signature: str
    not_before: datetime
    not_after: datetime
    common_name: str
    key_kind: str
    key_bits: int
    is_ca: bool
    may_sign: bool


def _items(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(tag, content) of each DER element in a row."""
    at = 0
    while at < len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            if not 0 < size <= 4:
                raise ValueError("bad length")
            length = int.from_bytes(data[at : at + size], "big")
            at += size
        if at + length > len(data):
            raise ValueError("cut short")
        yield tag, data[at : at + length]
        at += length


def _oid(data: bytes) -> str:
    parts, value = [], 0
    for byte in data:
        value = value << 7 | byte & 0x7F
        if not byte & 0x80:
            parts.append(value)
            value = 0
    first = min(parts[0] // 40, 2)
    return ".".join(map(str, (first, parts[0] - 40 * first, *parts[1:])))


def _time(tag: int, data: bytes) -> datetime:
    form = "%y%m%d%H%M%SZ" if tag == 0x17 else "%Y%m%d%H%M%SZ"
    return datetime.strptime(data.decode(), form).replace(tzinfo=timezone.utc)


def read(der: bytes) -> Certificate:
    """Reads one DER certificate. ValueError: it is none."""
    try:
        return _read(der)
    except (IndexError, UnicodeDecodeError, StopIteration, ValueError) as error:
        raise ValueError(f"not a certificate ({error})") from None


def _read(der: bytes) -> Certificate:
    ((_, body),) = _items(der)
    tbs, algorithm, _ = (content for _, content in _items(body))
    fields = list(_items(tbs))
    version = 1
    if fields[0][0] == 0xA0:
        version = next(_items(fields[0][1]))[1][0] + 1
        fields = fields[1:]
    _serial, _sig, _issuer, validity, subject, spki = (content for _, content in fields[:6])
    (start_tag, start), (end_tag, end) = _items(validity)
    name = ""
    for _, rdn in _items(subject):
        for _, pair in _items(rdn):
            (_, oid), (_, value) = _items(pair)
            if _oid(oid) == _CN:
                name = value.decode("utf-8", "replace")
    (_, key_algorithm), (_, key) = _items(spki)
    parts = list(_items(key_algorithm))
    kind, bits = _oid(parts[0][1]), 0
    if kind == _RSA:
        ((_, numbers),) = _items(key[1:])
        bits = int.from_bytes(next(_items(numbers))[1], "big").bit_length()
    elif kind == _EC:
        bits = _CURVES.get(_oid(parts[1][1]), 0) if len(parts) > 1 else 0
    is_ca = may_sign = False
    for tag, content in fields[6:]:
        if tag != 0xA3:
            continue
        ((_, extensions),) = _items(content)
        for _, extension in _items(extensions):
            entries = list(_items(extension))
            kind_of, (_, value) = _oid(entries[0][1]), entries[-1]
            if kind_of == _BASIC:
                ((_, inner),) = _items(value)
                is_ca = any(t == 0x01 and v != b"\x00" for t, v in _items(inner))
            elif kind_of == _USAGE:
                ((_, usage),) = _items(value)
                may_sign = bool(usage[1] & 0x80)  # digitalSignature
    return Certificate(
        version,
        _SIGNATURES.get(_oid(next(_items(algorithm))[1]), "unknown"),
        _time(start_tag, start),
        _time(end_tag, end),
        name,
        {_RSA: "RSA", _EC: "EC"}.get(kind, "unknown"),
        bits,
        is_ca,
        may_sign,
    )


def check_root(path: str, now: datetime | None = None) -> tuple[bytes, str]:
    """The PEM bytes and the common name of a good root certificate.

    Raises ValueError that names what is wrong with it.
    """
    file = Path(path)
    try:
        with file.open("rb") as stream:
            pem = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read the certificate {path}: {error.strerror}") from None
    if len(pem) > _MAX_BYTES:
        raise ValueError(f"the certificate {path} is larger than 1 MiB")
    begin, end = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
    start, stop = pem.find(begin), pem.find(end)
    if start < 0 or stop < start:
        raise ValueError(f"{path} holds no PEM certificate")
    try:
        der = ssl.PEM_cert_to_DER_cert(pem[start : stop + len(end)].decode("ascii").strip())
        cert = read(der)
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    now = now or datetime.now(timezone.utc)
    problems = []
    if not cert.not_before <= now <= cert.not_after:
        problems.append(f"it is valid from {cert.not_before} to {cert.not_after} only")
    if cert.version != 3:
        problems.append(f"it is X.509 v{cert.version}, not v3")
    if cert.key_kind == "RSA" and cert.key_bits < 3072:
        problems.append(f"its RSA key has {cert.key_bits} bits, less than 3072")
    elif cert.key_kind == "EC" and cert.key_bits < 256:
        problems.append("its EC key has less than 256 bits")
    elif cert.key_kind == "unknown":
        problems.append("its key is neither RSA nor EC")
    if cert.signature == "unknown":
        problems.append("it is not signed with SHA-256 or better")
    if not cert.is_ca:
        problems.append("it is not a CA (basicConstraints)")
    if not cert.may_sign:
        problems.append("its keyUsage does not contain Digital Signature")
    if problems:
        raise ValueError(f"the certificate {path} cannot be trusted: {'; '.join(problems)}")
    return pem, cert.common_name
