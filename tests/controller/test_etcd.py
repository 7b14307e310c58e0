"""The journal in etcd, against a stand-in that can fail as it is told (the real one:
test_etcd_real.py)."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

pytest.importorskip("grpc")

import grpc
from compat.doubles.etcd import FakeEtcd
from compat.harness import Controller, Raw

from phalanx.controller.etcd import EtcdJournal, owner
from phalanx.controller.journal import JournalError, StoredJob, WriteFailed
from phalanx.proto import recover_pb2 as pb


def test_what_is_written_comes_back():
    with FakeEtcd() as etcd:
        journal = EtcdJournal(etcd.address)
        jobs = {f"job/{n}-é": StoredJob(f"body {n}", n % 2 == 0) for n in range(450)}
        journal.write(jobs, {"a/b": "{}", "c": "{1}"})
        journal.write({"job/7-é": None}, {"c": None})
        assert journal.jobs() == {k: v for k, v in jobs.items() if k != "job/7-é"}
        assert journal.faults() == {"a/b": "{}"}
        journal.close()
        again = EtcdJournal(etcd.address)  # at once: the lease was given back
        assert len(again.jobs()) == 449
        again.close()
        other = EtcdJournal(etcd.address, "/another")
        assert other.jobs() == {}
        other.close()


def test_one_owner_at_a_time():
    with FakeEtcd() as etcd:
        first = EtcdJournal(etcd.address)
        with pytest.raises(JournalError, match="another controller"):
            EtcdJournal(etcd.address)
        made = []
        thread = threading.Thread(
            target=lambda: made.append(EtcdJournal(etcd.address, wait=20, ttl=1))
        )
        thread.start()
        first.write({"j": StoredJob("x", True)}, {})
        first.close()
        thread.join(20)
        assert made[0].jobs() == {"j": StoredJob("x", True)}
        made[0].close()


def test_a_write_that_was_given_up_comes_to_nothing_later():
    class GivenUp(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.DEADLINE_EXCEEDED

        def details(self):
            return "too late"

    with FakeEtcd() as etcd:
        journal = EtcdJournal(etcd.address)
        send, late = journal._client._calls["Txn"], []

        def give_up(request, timeout, metadata):
            late.append(request)
            raise GivenUp

        for text in "ab":
            journal._client._calls["Txn"] = give_up
            with pytest.raises(WriteFailed, match="DEADLINE_EXCEEDED"):
                journal.write({"j": StoredJob(text, True)}, {})  # the second gives up its fence
        journal._client._calls["Txn"] = send
        journal.write({"j": StoredJob("c", True)}, {})
        for request in (*late, *late):
            assert not send(request, timeout=20).succeeded
        journal.write({}, {"f": "d"})
        assert journal.jobs() == {"j": StoredJob("c", True)}
        assert journal.faults() == {"f": "d"}
        assert not journal.lost
        journal.close()


def test_a_fence_that_was_given_up_and_put_all_the_same():
    with FakeEtcd() as etcd:
        journal = EtcdJournal(etcd.address, "/p", me="host:1")
        journal._unsure = True
        send, before = journal._client._calls["Txn"], journal._me

        def give_up_once(request, timeout, metadata):
            journal._client._calls["Txn"] = send
            send(request, timeout=timeout)  # carried out, and the answer is lost
            raise grpc.RpcError

        journal._client._calls["Txn"] = give_up_once
        with pytest.raises(grpc.RpcError):
            journal._fence()
        journal.write({"j": StoredJob("x", True)}, {})
        assert journal._me != before
        assert owner(etcd.address, "/p") == "host:1"
        assert journal.jobs() == {"j": StoredJob("x", True)}
        journal.close()


def test_who_has_lost_the_lease_writes_nothing():
    with FakeEtcd() as etcd:
        first = EtcdJournal(etcd.address)
        lost = threading.Event()
        first.on_lost = lost.set
        etcd.drop(first._lease)
        second = EtcdJournal(etcd.address)
        before = etcd.writes
        with pytest.raises(WriteFailed, match="another controller"):
            first.write({"j": StoredJob("x", True)}, {})
        assert first.lost and lost.is_set() and etcd.writes == before
        first.close()
        second.write({"j": StoredJob("y", True)}, {})
        assert second.jobs() == {"j": StoredJob("y", True)}
        second.close()


def test_an_etcd_that_is_away():
    with pytest.raises(JournalError, match="etcd at"):
        EtcdJournal("127.0.0.1:1", timeout=0.3)
    with pytest.raises(JournalError, match="HOST:PORT"):
        EtcdJournal("nonsense")
    with FakeEtcd() as etcd:
        journal = EtcdJournal(etcd.address)
        etcd.down = True
        with pytest.raises(WriteFailed, match="etcd is down"):
            journal.write({"j": StoredJob("x", True)}, {})
        assert not journal.lost
        etcd.down = False
        journal.write({"j": StoredJob("x", True)}, {})
        journal.close()


@pytest.mark.process
def test_another_controller_takes_over():
    info = pb.ClientInfo(jobId="j")
    with FakeEtcd() as etcd:
        with Controller("--etcd", etcd.address) as first:
            raw = Raw(grpc.insecure_channel(first.address))
            raw("Init", info)
            raw("Register", info)
            fault = [pb.FaultRank(rankId="1", faultType="1")]
            raw("ReportProcessFault", pb.ProcessFaultRequest(jobId="j", faultRanks=fault))
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "phalanx",
                    "controller",
                    "--listen",
                    "127.0.0.1:0",
                    "--etcd",
                    etcd.address,
                ],
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert done.returncode == 1 and "--standby" in done.stderr
            first.kill()
        for lease in list(etcd.leases):
            etcd.drop(lease)  # what time does
        with Controller("--etcd", etcd.address) as second:
            raw = Raw(grpc.insecure_channel(second.address))
            stream = raw("SubscribeProcessManageSignal", info)
            assert next(stream).signalType == "stopTrain"
            stream.cancel()
            assert second.stop() == 0
        assert not etcd.leases
