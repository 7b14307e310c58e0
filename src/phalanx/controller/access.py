"""Who may do what: credentials, per-job authorisation, quotas."""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import ipaddress
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class AccessError(ValueError):
    """The access configuration is wrong; the text says how."""


@dataclass(frozen=True)
class Policy:
    """Whose token or certificate is good for which jobs (shell patterns); ``None``: anybody's.

    Read from a JSON file: ``{"tokens": {"<sha256 of the token, hex>": ["job-*"]}, "subjects":
    {"<common name or SAN>": ["*"]}, "operators": ["<sha256 or subject>"]}``. Operators may also
    see and do what belongs to no single job (faults, node reports, public faults).
    """

    tokens: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    subjects: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    open: bool = False
    own_name: bool = False  # a certificate is good for the jobs that bear one of its names

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Raises AccessError naming what is wrong with the file."""
        try:
            data = json.loads(path.read_text())
            tokens, subjects = data.get("tokens", {}), data.get("subjects", {})
            operators = data.get("operators", [])
            if set(data) - {"tokens", "subjects", "operators"}:
                raise AccessError(f"{path}: only tokens, subjects and operators may be in there")
            for table in (tokens, subjects):
                for name, jobs in table.items():
                    if not (isinstance(jobs, list) and all(isinstance(j, str) for j in jobs)):
                        raise AccessError(f"{path}: {name!r} must have a list of job patterns")
            for name in tokens:
                if len(name) != 64 or set(name) - set("0123456789abcdef"):
                    raise AccessError(
                        f"{path}: tokens are written as the SHA-256 of the token in lower-case "
                        "hex (printf %s TOKEN | sha256sum), not in the clear"
                    )
        except (OSError, ValueError, AttributeError, TypeError) as error:
            if isinstance(error, AccessError):
                raise
            raise AccessError(f"cannot read the access file {path}: {error}") from None
        return cls(
            {k: tuple(v) for k, v in tokens.items()},
            {k: tuple(v) for k, v in subjects.items()},
            frozenset(operators),
        )

    def _patterns(self, who: Caller) -> tuple[str, ...]:
        found: tuple[str, ...] = ()
        if who.token:
            digest = hashlib.sha256(who.token.encode()).hexdigest()
            for known, jobs in self.tokens.items():
                if hmac.compare_digest(known, digest):
                    found += jobs
        for subject in who.subjects:
            found += self.subjects.get(subject, ())
        return found

    def allows(self, who: Caller, job_id: str) -> bool:
        """Whether this caller may act for this job."""
        if self.open:
            return True
        if self.is_operator(who):
            return True
        if self.own_name and job_id in who.subjects:
            return True
        return any(fnmatch.fnmatchcase(job_id, pattern) for pattern in self._patterns(who))

    def is_operator(self, who: Caller) -> bool:
        """Whether this caller may do what belongs to no single job."""
        if self.open:
            return True
        names = set(who.subjects)
        if who.token:
            names.add(hashlib.sha256(who.token.encode()).hexdigest())
        return not self.operators.isdisjoint(names)


ANYBODY = Policy(open=True)
OWN_NAME = Policy(own_name=True)


@dataclass(frozen=True)
class Caller:
    """Who calls: the address, the token, the names in a verified certificate."""

    peer: str
    token: str = ""
    subjects: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        """The address without the port; quotas count by it."""
        return self.peer.rsplit(":", 1)[0]


def caller(context: Any, anonymous: bool = False) -> Caller:
    """Who is behind a gRPC call; ``anonymous``: the address alone, which is cheaper."""
    if anonymous:
        return Caller(context.peer())
    token = ""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            scheme, _, rest = value.partition(" ")
            if scheme.lower() == "bearer":
                token = rest.strip()
    names: list[str] = []
    auth = context.auth_context()
    if auth:
        for field_name in ("x509_common_name", "x509_subject_alternative_name"):
            names += [v.decode("utf-8", "replace") for v in auth.get(field_name, ())]
    return Caller(context.peer(), token, tuple(dict.fromkeys(names)))


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a listen address ``HOST:PORT``."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return address.startswith("unix:")


class Quotas:
    """A token bucket per peer address. Not more than ``peers`` are remembered."""

    def __init__(
        self,
        rate: float,
        burst: float,
        peers: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._burst, self._peers, self._clock = rate, burst, peers, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, peer: str) -> bool:
        """Whether this peer may have one more call now."""
        now = self._clock()
        level, at = self._buckets.pop(peer, (self._burst, now))
        level = min(self._burst, level + (now - at) * self._rate)
        good = level >= 1
        self._buckets[peer] = (level - 1 if good else level, now)
        if len(self._buckets) > self._peers:
            self._buckets.popitem(last=False)
        return good
