"""The client against small servers in this process: bounds, repetition, order, MindIO."""

from __future__ import annotations

import shutil
import sys
import threading
import time
import types
from datetime import datetime, timedelta, timezone

import pytest

pytest.importorskip("grpc")

from compat.doubles.server import OldServer
from compat.harness import Controller, certificates

from phalanx.client import (
    Credentials,
    DLRecoverManager,
    Link,
    LinkDown,
    certs,
    mindio,
    pb,
    reports,
)
from phalanx.client.channel import with_port
from phalanx.proto import recover_pb2


@pytest.fixture(autouse=True)
def _no_manager_left():
    yield
    if DLRecoverManager._instance is not None:
        DLRecoverManager._instance.close()


def signal(**fields):
    fields = {
        "uuid": "u",
        "jobId": "j",
        "signalType": "stopTrain",
        "round": 1,
        "reportWithin": 900,
        **fields,
    }
    return recover_pb2.ProcessManageSignal(**fields)


def test_each_key_is_handed_out_once_and_in_order():
    got = []
    link = Link("127.0.0.1:1", "j", lambda s: got.append((s.signal, s.key.round)))
    for message in (
        signal(),
        signal(again=True),
        signal(round=2),
        signal(signalType="keep-alive"),
        signal(round=3, jobId="other"),
        signal(round=3, signalType="globalFault"),
        signal(),
        # the original repeats nothing and counts no rounds: each is a new one
        signal(round=0),
        signal(round=0),
    ):
        link._take(message)
    link._put(None)
    link._dispatch()
    assert got == [
        ("stopTrain", 1),
        ("stopTrain", 2),
        ("globalFault", 3),
        ("stopTrain", 0),
        ("stopTrain", 0),
    ]


def test_a_rank_that_is_no_number():
    link = Link("127.0.0.1:1", "j", print)
    with pytest.raises(ValueError):
        link._take(signal(faultRanks=[recover_pb2.FaultRank(rankId="x", faultType="1")]))


def test_a_controller_that_is_not_there_costs_a_bounded_time():
    started = time.monotonic()
    link = Link(["127.0.0.1:1", "127.0.0.1:2"], "j", print, report_timeout=0.5, call_timeout=0.2)
    with link, pytest.raises(LinkDown, match=r"127\.0\.0\.1:1, 127\.0\.0\.1:2"):
        link.report_fault({1: 1})
    assert time.monotonic() - started < 8


def test_a_controller_that_swallows_everything_costs_a_bounded_time():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        started = time.monotonic()
        link = Link(address, "j", print, report_timeout=0.5, call_timeout=0.3)
        with link, pytest.raises(LinkDown):
            link.report_fault({1: 1})
        assert time.monotonic() - started < 8


def test_the_next_address_is_tried():
    with (
        OldServer(keep_alive=0.1) as server,
        Link(["127.0.0.1:1", server.address], "j", print, call_timeout=1) as link,
    ):
        assert link.wait_connected(15)


def test_a_switched_off_job_is_told():
    states = []
    server = OldServer(init_codes=(403,) * 100)
    link = Link(server.address, "j", print, on_state=lambda *s: states.append(s))
    with server, link:
        server.wait_for("Init", 2)
    assert [s for s, _ in states] == ["off"]


@pytest.mark.parametrize("what", [("", "j"), ([], "j"), ("a", "")])
def test_links_without_an_address_or_a_job(what):
    with pytest.raises(ValueError, match="needs"):
        Link(what[0], what[1], print)


def test_addresses():
    assert with_port("10.0.0.1") == "10.0.0.1:8899"
    assert with_port("host:1") == "host:1"
    assert with_port("::1") == "[::1]:8899"
    assert with_port("[::1]:5") == "[::1]:5"
    assert with_port("unix:/x") == "unix:/x"


def test_one_manager_per_process():
    a = DLRecoverManager(pb.ClientInfo("j"), "127.0.0.1:1", secure_conn=False)
    assert DLRecoverManager(pb.ClientInfo("j"), "127.0.0.1:1", secure_conn=False) is a
    b = DLRecoverManager(pb.ClientInfo("k"), "127.0.0.1:1", secure_conn=False)
    assert b is not a and a._closed.is_set() and DLRecoverManager.current() is b


def test_secure_without_a_certificate_names_both_remedies():
    with pytest.raises(ValueError) as caught:
        DLRecoverManager(pb.ClientInfo("j"), "127.0.0.1:1")
    assert "cert_path" in str(caught.value) and "secure_conn=False" in str(caught.value)
    assert DLRecoverManager._instance is None
    with pytest.raises(ValueError, match="go together"):
        Credentials(certificate="x")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "MINDX_TASK_ID"),
        ({"MINDX_TASK_ID": "j"}, "MINDX_SERVER_IP"),
        (
            {
                "MINDX_TASK_ID": "j",
                "MINDX_SERVER_IP": "127.0.0.1",
                "ELASTIC_GRPC_SECURE_CONNECT": "on",
            },
            "cert_path",
        ),
    ],
)
def test_the_environment(monkeypatch, env, words):
    for name in (
        "MINDX_TASK_ID",
        "MINDX_SERVER_IP",
        "MINDX_SERVER_DOMAIN",
        "LOCAL_PROXY_ENABLE",
        "ELASTIC_GRPC_SECURE_CONNECT",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        DLRecoverManager.from_environment()


def test_the_environment_when_it_is_complete(monkeypatch):
    monkeypatch.setenv("MINDX_TASK_ID", "j")
    monkeypatch.setenv("MINDX_SERVER_IP", "127.0.0.1:77")
    monkeypatch.setenv("ELASTIC_GRPC_SECURE_CONNECT", "off")
    manager = DLRecoverManager.current()
    assert manager.job_id == "j" and manager.addresses == ["127.0.0.1:77"]
    monkeypatch.setenv("LOCAL_PROXY_ENABLE", "on")
    manager.close()
    assert DLRecoverManager.current().addresses == ["127.0.0.1"]


def test_fault_ranks_that_are_none():
    DLRecoverManager(pb.ClientInfo("j"), "127.0.0.1:1", secure_conn=False)
    for ranks in ({-1: 1}, {1: 7}, {"x": 1}):
        with pytest.raises(ValueError):
            reports.report_process_fault(ranks)


def test_actions():
    manager = DLRecoverManager(pb.ClientInfo("j"), "127.0.0.1:1", secure_conn=False)
    got = []
    with pytest.raises(ValueError, match="no action"):
        manager.on_action("dance", print)
    manager.on_action("unknown", lambda s: got.append("unknown"))
    manager.on_action("change_strategy", lambda s: got.append("change"))
    manager.on_action("tft_destroy_controller", lambda s: got.append("kill"))

    def fails(s):
        got.append("stop")
        raise RuntimeError("on purpose")

    manager.on_action("stop_train", fails)
    for message in (
        signal(actions=["change_strategy", "fault_nodes_exit", "stop_train", "change_strategy"]),
        signal(round=2, signalType="killMaster", reportWithin=0),
    ):
        manager._take(message)
    manager._put(None)
    while (taken := manager._signals.get()) is not None:
        manager._act(taken)
    assert got == ["change", "unknown", "stop", "kill"]
    assert manager.killed


# ---------------------------------------------------------------- MindIO's stand-in


class FakeTtp(types.ModuleType):
    """mindio_ttp's documented interface."""

    def __init__(self):
        super().__init__("mindio_ttp")
        self.calls, self.callbacks, self.ready = [], {}, True
        self.arrived = threading.Condition()
        for name in (
            "init_controller",
            "start_controller",
            "notify_controller_dump",
            "destroy_controller",
            "notify_controller_prepare_action",
        ):
            setattr(self, f"tft_{name}", self._note(name))

    def _note(self, name):
        def call(*args):
            with self.arrived:
                self.calls.append((name, *args))
                self.arrived.notify_all()
            return 0

        return call

    def wait_for(self, name, count=1):
        with self.arrived:
            assert self.arrived.wait_for(
                lambda: sum(c[0] == name for c in self.calls) >= count, 15
            ), (name, self.calls)
        return [c for c in self.calls if c[0] == name][-1]

    def tft_register_mindx_callback(self, name, function):
        self.callbacks[name] = function
        return 0

    def tft_query_high_availability_switch(self):
        return self.ready

    def tft_notify_controller_stop_train(self, ranks, how="stop", timeout=0):
        self._note("stop_train")(ranks, how, timeout)
        threading.Thread(
            target=self.callbacks["report_stop_complete"], args=(0, "ok", ranks)
        ).start()
        return 0

    def tft_notify_controller_on_global_rank(self, ranks, timeout=1):
        self._note("on_global_rank")(ranks, timeout)
        threading.Thread(
            target=self.callbacks["report_strategies"], args=(ranks, ["recover", "dump", "exit"])
        ).start()
        return 0

    def tft_notify_controller_change_strategy(self, name, params=""):
        self._note("change_strategy")(name, params)
        if name != "exit":
            threading.Thread(
                target=self.callbacks["report_result"], args=(0, "ok", {}, name)
            ).start()
        return 0


@pytest.mark.process
@pytest.mark.parametrize("whose", ["ours", "the original"])
def test_mindio_is_driven(monkeypatch, whose):
    ttp = FakeTtp()
    ttp.__spec__ = types.SimpleNamespace(name="mindio_ttp")
    monkeypatch.setitem(sys.modules, "mindio_ttp", ttp)
    server = Controller() if whose == "ours" else OldServer(keep_alive=0.1)
    with server:
        for name, value in {
            "MINDX_TASK_ID": "mindio",
            "MINDX_SERVER_IP": server.address,
            "WORLD_SIZE": "4",
            "POD_IP": "127.0.0.1",
            "TTP_PORT": "8000",
            "PROCESS_RECOVER": "on",
            "ELASTIC_GRPC_SECURE_CONNECT": "off",
        }.items():
            monkeypatch.setenv(name, value)
        manager = reports.init_grpc_client()
        assert ttp.wait_for("start_controller") == (
            "start_controller",
            "127.0.0.1",
            8000,
            False,
            "",
        )
        assert ttp.wait_for("init_controller") == ("init_controller", -1, 4, False, True)
        assert manager.wait_connected(15)
        assert set(ttp.callbacks) == {
            "report_fault_ranks",
            "report_stop_complete",
            "report_strategies",
            "report_result",
        }
        assert ttp.callbacks["report_fault_ranks"]({2: 1}, {2: "code"}) == 0
        assert ttp.wait_for("stop_train") == ("stop_train", {2: 1}, "stop", 0)
        assert ttp.wait_for("on_global_rank")[1] == {2: 1}
        assert ttp.wait_for("change_strategy") == ("change_strategy", "recover", "recover-in-place")
        manager.close()


def test_a_callback_of_mindio_never_raises(monkeypatch):
    ttp = FakeTtp()
    mindio.register_callbacks(ttp)
    monkeypatch.delenv("MINDX_TASK_ID", raising=False)
    assert ttp.callbacks["report_stop_complete"](0, "", {}) == 1


def test_how_long_a_nic_switch_may_take(monkeypatch):
    for value, seconds in (("120", 300), ("10000", 7200), ("x", 600)):
        monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", value)
        assert mindio.nic_pause() == seconds


# ---------------------------------------------------------------- certificates


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_root_certificates(tmp_path):
    pem = certificates(tmp_path)
    for good in ("ca.pem", "rsa.pem"):
        data, name = certs.check_root(pem[good])
        assert name == "clusterd" and data.startswith(b"-----BEGIN")
    for bad, words in (
        ("no-ca.pem", "not a CA"),
        ("no-sign.pem", "Digital Signature"),
        ("short.pem", "2048 bits"),
        ("server.key", "no PEM"),
    ):
        with pytest.raises(ValueError, match=words):
            certs.check_root(pem[bad])
    later = datetime.now(timezone.utc) + timedelta(days=60)
    with pytest.raises(ValueError, match="valid from"):
        certs.check_root(pem["ca.pem"], later)
    with pytest.raises(ValueError, match="cannot read"):
        certs.check_root(str(tmp_path / "nothing"))
    # cut or spoilt at any place it is refused, never believed and never a crash
    import base64

    body = (tmp_path / "ca.pem").read_text().split("-----")[2]
    der = base64.b64decode(body)
    for at in range(0, len(der), 7):
        with pytest.raises(ValueError):
            certs.read(der[:at])


def test_importing_the_client_does_not_import_grpc():
    import subprocess

    code = "import sys, phalanx.client; print('grpc' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "False"


@pytest.mark.process
def test_the_verbs_that_ask(capsys, monkeypatch):
    from phalanx.cli import fault, jobs
    from phalanx.client import Declaration
    from phalanx.recovery.model import Node

    declaration = Declaration(strategies=("recover",), nodes=(Node(0, "node-a", ranks=(0, 1)),))
    with (
        Controller() as controller,
        Link(controller.address, "job-a", lambda s: None, declaration=declaration) as link,
    ):
        assert link.wait_connected(10)
        monkeypatch.setenv("PHALANX_CONTROLLER", controller.address)
        where = ["--controller", controller.address]
        assert fault.main(["report", "f-1", "--node", "node-a", "--device", "1", *where]) == 0
        assert fault.main(["list", *where]) == 0
        assert fault.main(["list", "--job", "job-a", *where]) == 0
        out = capsys.readouterr().out
        assert out.count("f-1  node-a devices 1  SeparateNPU") == 2
        assert jobs.main(where) == 0
        assert "job-a  stopping" in (out := capsys.readouterr().out) and "faults 1:1" in out
        assert jobs.main(["job-a", *where]) == 0
        assert jobs.main(["--json", *where]) == 0
        assert jobs.main(["nobody", *where]) == 1
        assert fault.main(["clear", "f-1", *where]) == 0
        assert fault.main(["clear", "f-1", *where]) == 1
        assert "no fault 'f-1' is known" in capsys.readouterr().err
    assert jobs.main(["--controller", "127.0.0.1:1", "--timeout", "1"]) == 1
    assert "no controller answers" in capsys.readouterr().err
