"""Who is let in: a token that all agents of a job share, and certificates on both sides."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.controller.etcd import Access

_MAX = 1 << 20


class SecurityError(ValueError):
    """A token or certificate cannot be used; the text says why and what to do."""


@dataclass(frozen=True)
class Security:
    """What an agent or coordinator shows, and asks of others.

    ``token``: "" asks for none. ``certificate``, ``key``, ``ca``: PEM texts, all three or none;
    with them each side must show a certificate that ``ca`` signed. ``name``: the name that the
    others' certificates bear; "": the host that was dialled.
    """

    token: str = field(default="", repr=False)
    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ca: bytes = b""
    name: str = ""

    @property
    def tls(self) -> bool:
        return bool(self.certificate)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def admits(self, metadata: Iterable[tuple[str, Any]]) -> bool:
        """Whether a call with this metadata shows the token."""
        if not self.token:
            return True
        wanted = f"Bearer {self.token}".encode()
        return any(
            key == "authorization"
            and hmac.compare_digest(value if isinstance(value, bytes) else value.encode(), wanted)
            for key, value in metadata
        )


OPEN = Security()


def load(
    *,
    token_file: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
    ca: str | None = None,
    name: str = "",
) -> Security:
    """From ``--token-file`` (else ``PHALANX_TOKEN``), ``--tls-cert``, ``--tls-key``, ``--tls-ca``.

    ``PHALANX_TLS_NAME`` is the name that the others' certificates bear, where it is not the
    host that is dialled: one certificate for all agents of a job. Raises SecurityError.
    """
    token = os.environ.get("PHALANX_TOKEN", "")
    if token_file:
        token = _read(token_file, "token").decode("utf-8", "replace").strip()
        if not token:
            raise SecurityError(f"the token file {token_file} is empty: write a secret into it")
    if token and not (token.isascii() and token.isprintable()):
        raise SecurityError("the token may hold printable ASCII characters only")
    given = [bool(certificate), bool(key), bool(ca)]
    if any(given) and not all(given):
        raise SecurityError("--tls-cert, --tls-key and --tls-ca go together: give all three")
    if not (certificate and key and ca):
        return Security(token)
    return Security(
        token,
        _read(certificate, "certificate"),
        _read(key, "key"),
        _read(ca, "certificate"),
        name or os.environ.get("PHALANX_TLS_NAME", ""),
    )


def to_etcd(
    *,
    protocol: str = "",
    cacert: str = "",
    cert: str = "",
    key: str = "",
    username: str = "",
    password: str = "",
) -> Access:
    """How etcd is spoken to, from the keys of ``--rdzv-conf``; the password also from the variable
    ``PHALANX_ETCD_PASSWORD``. Raises SecurityError."""
    if protocol not in ("", "http", "https"):
        raise SecurityError(f"--rdzv-conf protocol is http or https, not {protocol!r}")
    if protocol != "https" and (cacert or cert or key):
        raise SecurityError("--rdzv-conf cacert, cert and key need protocol=https")
    if bool(cert) != bool(key):
        raise SecurityError("--rdzv-conf cert and key go together: give both")
    password = password or os.environ.get("PHALANX_ETCD_PASSWORD", "") if username else password
    if bool(username) != bool(password):
        raise SecurityError(
            "--rdzv-conf username and password (or the variable PHALANX_ETCD_PASSWORD) go together"
        )
    return Access(
        protocol == "https",
        _read(cacert, "authority's certificate of etcd") if cacert else b"",
        _read(cert, "certificate for etcd") if cert else b"",
        _read(key, "key for etcd") if key else b"",
        username,
        password,
    )


def _read(path: str, what: str) -> bytes:
    try:
        with Path(path).open("rb") as stream:
            return stream.read(_MAX)
    except OSError as error:
        raise SecurityError(f"cannot read the {what} {path}: {error.strerror}") from None
