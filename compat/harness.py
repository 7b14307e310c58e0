"""Starts controllers and makes certificates for the checks."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from phalanx.client.channel import METHODS
from phalanx.proto import fault_pb2, pubfault_pb2

PATHS = {
    **METHODS,
    **{f"Fault.{n}": m for n, m in fault_pb2.SERVICES["fault.Fault"].items()},
    **{f"PubFault.{n}": m for n, m in pubfault_pb2.SERVICES["PubFault"].items()},
}


class Controller:
    """A ``phalanx controller`` process on loopback. ``with Controller(...) as c: c.address``."""

    def __init__(self, *args: str, state: Path | None = None, listen: str = "127.0.0.1:0") -> None:
        self.args = [*args]
        if state is not None:
            self.args += ["--state-dir", str(state)]
        self.listen = listen
        self.process: subprocess.Popen[str] | None = None
        self.address = ""
        self.metrics = ""
        self.lines: queue.Queue[str] = queue.Queue()

    def start(self) -> Controller:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "controller", "--listen", self.listen, *self.args],
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("COMPAT_VERBOSE") else subprocess.DEVNULL,
            text=True,
        )
        self.lines = queue.Queue()
        threading.Thread(
            target=self._read, args=(self.process.stdout, self.lines), daemon=True
        ).start()
        try:
            self.address = self._line("listens on ")
            if "--metrics" in self.args:
                self.metrics = self._line("metrics on ")
        except BaseException:
            self.kill()
            raise
        self.listen = self.address  # a restart comes back to the same port
        return self

    @staticmethod
    def _read(stream: Any, lines: queue.Queue[str]) -> None:
        with contextlib.suppress(ValueError, OSError), stream:
            for line in stream:
                lines.put(line)
        lines.put("")

    def _line(self, after: str) -> str:
        assert self.process is not None
        try:
            line = self.lines.get(timeout=90)
        except queue.Empty:
            raise TimeoutError("the controller did not come up in 90 s") from None
        if after not in line:
            raise RuntimeError(f"the controller said {line!r} instead")
        return line.split(after, 1)[1].strip()

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def restart(self) -> None:
        """kill -9 and a new one on the same address."""
        self.kill()
        until = time.monotonic() + 10
        while True:
            try:
                self.start()
                return
            except RuntimeError:
                if time.monotonic() > until:
                    raise

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(10)
        return code

    def __enter__(self) -> Controller:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.stop()


ETCD = shutil.which("etcd")


class Etcd:
    """A real etcd of our own on loopback. ``with Etcd() as e: e.address``. Needs ``ETCD``.

    ``tls``: PEM files (authority, certificate, key) with which it speaks TLS and asks for it.
    """

    def __init__(self, tls: tuple[str, str, str] | None = None) -> None:
        self.tls = tls
        self.folder = tempfile.TemporaryDirectory(prefix="etcd-")
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ""
        self.calls: dict[str, Any] = {}

    def __enter__(self) -> Etcd:
        import grpc

        from phalanx.proto import etcd_pb2

        for _ in range(3):  # a port that was free may be taken before etcd has it
            self._start()
            channel = grpc.insecure_channel(self.address)
            if self.tls:
                ca, certificate, key = (Path(file).read_bytes() for file in self.tls)
                credentials = grpc.ssl_channel_credentials(ca, key, certificate)
                channel = grpc.secure_channel(self.address, credentials)
            try:
                grpc.channel_ready_future(channel).result(20)
            except grpc.FutureTimeoutError:
                channel.close()
                self.kill()
                continue
            self.calls = {
                name: channel.unary_unary(
                    m.path, m.request.SerializeToString, m.response.FromString
                )
                for service in etcd_pb2.SERVICES.values()
                for name, m in service.items()
                if not m.client_streams
            }
            self.channel = channel
            return self
        self.folder.cleanup()
        raise TimeoutError("etcd did not come up")

    def _start(self) -> None:
        assert ETCD is not None
        with (
            socket.create_server(("127.0.0.1", 0)) as a,
            socket.create_server(("127.0.0.1", 0)) as b,
        ):
            client, peer = (f"http://127.0.0.1:{s.getsockname()[1]}" for s in (a, b))
        self.address = client.removeprefix("http://")
        if self.tls:
            client = f"https://{self.address}"
        words = {
            "name": "one", "data-dir": self.folder.name, "log-level": "error",
            "listen-client-urls": client, "advertise-client-urls": client,
            "listen-peer-urls": peer, "initial-advertise-peer-urls": peer,
            "initial-cluster": f"one={peer}",
        }  # fmt: skip
        if self.tls:
            ca, certificate, key = self.tls
            words |= {"trusted-ca-file": ca, "cert-file": certificate, "key-file": key}
            words["client-cert-auth"] = "true"
        self.process = subprocess.Popen(
            [ETCD, *(f"--{k}={v}" for k, v in words.items())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def drop(self, lease: int) -> None:
        """The lease has run out."""
        from phalanx.proto import etcd_pb2

        self.calls["LeaseRevoke"](etcd_pb2.LeaseRevokeRequest(ID=lease), timeout=10)

    def get(self, key: str) -> Any:
        """The key with its value, lease and revisions; None: there is none."""
        from phalanx.proto import etcd_pb2

        kvs = self.calls["Range"](etcd_pb2.RangeRequest(key=key.encode()), timeout=10).kvs
        return kvs[0] if kvs else None

    def hang(self, on: bool) -> None:
        """Answer nobody, or go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.kill()
        self.folder.cleanup()


class Cable:
    """A TCP connection's middle, which can be cut. ``with Cable(address) as c: c.address``."""

    def __init__(self, address: str) -> None:
        self.target = address.rsplit(":", 1)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.ends: list[socket.socket] = []

    def __enter__(self) -> Cable:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()

    def cut(self) -> None:
        """Every connection ends now, in both directions."""
        ends, self.ends = self.ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection((self.target[0], int(self.target[1])), 5)
            except OSError:
                return
            self.ends += [near, far]
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(a, b), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Raw:
    """Bare calls on one channel."""

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.channel, self.metadata = channel, metadata

    def __call__(self, name: str, request: Any, timeout: float = 10) -> Any:
        method = PATHS[name]
        make = self.channel.unary_stream if method.server_streams else self.channel.unary_unary
        call = make(method.path, method.request.SerializeToString, method.response.FromString)
        return call(
            request,
            timeout=None if method.server_streams else timeout,
            metadata=self.metadata,
        )


def certificates(folder: Path) -> dict[str, str]:
    """A CA that is trusted, a server and a client certificate of it, and some that are not.

    Needs the ``openssl`` command.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def run(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    def root(
        name: str, *more: str, kind: tuple[str, ...] = ("ec", "prime256v1"), cn: str = "clusterd"
    ) -> None:
        usage = ("digitalSignature,keyCertSign", "critical,CA:TRUE")
        if more:
            usage = (more[0], more[1])
        key = (
            ["-newkey", "ec", "-pkeyopt", f"ec_paramgen_curve:{kind[1]}"]
            if kind[0] == "ec"
            else ["-newkey", f"rsa:{kind[1]}"]
        )
        run(
            "req",
            "-x509",
            *key,
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-sha256",
            "-days",
            "30",
            "-subj",
            f"/O=test/CN={cn}",
            "-addext",
            f"keyUsage={usage[0]}",
            "-addext",
            f"basicConstraints={usage[1]}",
        )

    root("ca")
    root("no-ca", "digitalSignature", "critical,CA:FALSE")
    root("no-sign", "keyCertSign", "critical,CA:TRUE")
    root("short", kind=("rsa", "2048"))
    root("rsa", kind=("rsa", "3072"))
    for name, cn in (("server", "clusterd"), ("client", "job-a")):
        run(
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={cn}",
        )
        (folder / "ext").write_text(f"subjectAltName=DNS:{cn}\n")
        run(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-out",
            f"{name}.pem",
            "-days",
            "30",
            "-sha256",
            "-extfile",
            "ext",
        )
    return {path.name: str(path) for path in folder.iterdir()}
