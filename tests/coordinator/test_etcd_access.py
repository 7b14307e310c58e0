"""etcd with TLS on both sides, and with users: a real one, with certificates made here."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compat.harness import ETCD, Etcd

from phalanx.agent import exit_codes
from phalanx.controller.etcd import Access, Denied, EtcdJournal, owner
from phalanx.controller.journal import JournalError, StoredJob
from phalanx.coordinator import security
from phalanx.coordinator.security import SecurityError

real = [
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(ETCD is None, reason="needs the etcd program (apt-get install etcd-server)"),
]


class Secured:
    """An etcd that asks for a certificate, and a user of it."""

    def __init__(self, etcd: Etcd, folder: Path) -> None:
        self.address, self.etcd, self.folder = etcd.address, etcd, folder

    def file(self, name: str) -> str:
        return str(self.folder / name)

    def access(self, **more: str) -> Access:
        files = {"cacert": "ca.pem", "cert": "job.pem", "key": "job.key"}
        keys = {name: self.file(file) for name, file in files.items()}
        return security.to_etcd(protocol="https", **{**keys, **more})

    def gateway(self, path: str, **body: str) -> dict[str, Any]:
        context = ssl.create_default_context(cafile=self.file("ca.pem"))
        context.load_cert_chain(self.file("job.pem"), self.file("job.key"))
        request = urllib.request.Request(
            f"https://{self.address}/v3/{path}", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found


def openssl(words: str, folder: Path) -> None:
    subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)


def certificates(folder: Path) -> None:
    """``ca.pem``, and of it ``job.pem`` with ``job.key``, for both sides. Without a name of its
    own: etcd would take that for a user's."""
    made = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    openssl(f"req -x509 {made} -days 2 -keyout ca.key -out ca.pem -subj /CN=authority", folder)
    openssl(f"req {made} -keyout job.key -out job.csr -subj /O=job", folder)
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    openssl(
        "x509 -req -in job.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -out job.pem "
        "-extfile names",
        folder,
    )


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("certificates")
    certificates(folder)
    with Etcd((str(folder / "ca.pem"), str(folder / "job.pem"), str(folder / "job.key"))) as etcd:
        made = Secured(etcd, folder)
        for name in ("root", "job", "guest"):
            made.gateway("auth/user/add", name=name, password=f"{name}'s")
        made.gateway("auth/role/add", name="root")
        made.gateway("auth/user/grant", user="root", role="root")
        made.gateway("auth/user/grant", user="job", role="root")
        made.gateway("auth/enable")
        yield made


def run(address: str, conf: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text("import os; print(f'world {os.environ[\"WORLD_SIZE\"]}')")
    command = [sys.executable, "-m", "phalanx", "run", "--nnodes", "2", "--rdzv-backend", "etcd"]
    command += ["--rdzv-endpoint", address, "--rdzv-id", "secured", "--no-warm"]
    command += ["--rdzv-conf", conf, str(program)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


class TestReal:
    pytestmark = real

    def test_a_job(self, secured: Secured, tmp_path: Path) -> None:
        files = f"cacert={secured.file('ca.pem')},cert={secured.file('job.pem')}"
        conf = f"protocol=https,{files},key={secured.file('job.key')},username=job"
        started = [
            run(secured.address, f"{conf},password=job's", tmp_path),
            run(secured.address, conf, tmp_path, PHALANX_ETCD_PASSWORD="job's"),
        ]
        try:
            for process in started:
                out, _ = process.communicate(timeout=200)
                assert process.returncode == 0 and "world 2" in out, out
                assert "job's" not in out
            wrong = run(secured.address, f"{conf},password=guessed", tmp_path)
            started.append(wrong)
            out, _ = wrong.communicate(timeout=200)
            assert wrong.returncode == exit_codes.RENDEZVOUS, out
            assert "correct username and password" in out and "guessed" not in out
        finally:
            for process in started:
                process.kill()
                process.wait()

    def test_who_is_not_let_in(self, secured: Secured) -> None:
        where, prefix = secured.address, "/phalanx/x"
        with pytest.raises(Denied):
            owner(where, prefix, 30.0, secured.access())  # nobody
        with pytest.raises(Denied):
            owner(where, prefix, 30.0, secured.access(username="guest", password="guest's"))
        with pytest.raises(Denied):
            owner(where, prefix, 30.0, secured.access(username="job", password="x"))
        for stranger in (Access(), security.to_etcd(protocol="https")):
            with pytest.raises(JournalError):
                owner(where, prefix, 3.0, stranger)

    def test_a_login_that_etcd_has_forgotten_is_done_again(self, secured: Secured) -> None:
        access = secured.access(username="job", password="job's")
        journal = EtcdJournal(secured.address, "/phalanx/y", timeout=30.0, access=access)
        try:
            journal._client._token = "of.7"  # as of an etcd that was started again since
            journal.write({"a": StoredJob("body", False)}, {})
            journal._client._token = "of.8"
            assert journal._call("LeaseKeepAlive", journal._renewal()).TTL > 0
            assert set(journal.jobs()) == {"a"}
        finally:
            journal.close()


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({"protocol": "ftp"}, "http or https"),
        ({"cacert": "x"}, "need protocol=https"),
        ({"protocol": "https", "cert": "x"}, "go together"),
        ({"protocol": "https", "cacert": "/no/such/file"}, "/no/such/file"),
        ({"username": "x"}, "username and password"),
        ({"password": "x"}, "username and password"),
    ],
)
def test_what_is_given_must_make_sense(
    keys: dict[str, str], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHALANX_ETCD_PASSWORD", raising=False)
    with pytest.raises(SecurityError, match=wrong):
        security.to_etcd(**keys)


def test_secrets_are_not_shown() -> None:
    shown = repr(security.to_etcd(username="job", password="swordfish"))
    assert "job" in shown and "swordfish" not in shown
