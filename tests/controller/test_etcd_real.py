"""The journal in a real etcd, which each test starts for itself."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("grpc")

import grpc
from compat.harness import ETCD, Controller, Etcd, Raw

from phalanx.controller.etcd import EtcdJournal
from phalanx.controller.journal import JournalError, StoredJob, WriteFailed
from phalanx.proto import recover_pb2 as pb

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(ETCD is None, reason="needs the etcd program (apt-get install etcd-server)"),
]


@pytest.fixture(scope="module")
def etcd():
    with Etcd() as one:
        yield one


def test_what_is_written_comes_back(etcd) -> None:
    journal = EtcdJournal(etcd.address, "/a", timeout=20)
    jobs = {f"job/{n}-é": StoredJob(f"body {n}", n % 2 == 0) for n in range(450)}
    journal.write(jobs, {"a/b": "{}", "c": "{1}"})
    journal.write({"job/7-é": None}, {"c": None})
    assert journal.jobs() == {k: v for k, v in jobs.items() if k != "job/7-é"}
    assert journal.faults() == {"a/b": "{}"}
    journal.close()
    again = EtcdJournal(etcd.address, "/a", timeout=20)  # at once: the lease was given back
    assert len(again.jobs()) == 449
    again.close()
    assert etcd.get("/a/owner") is None


def test_one_owner_at_a_time(etcd) -> None:
    first = EtcdJournal(etcd.address, "/b", timeout=20)
    assert etcd.get("/b/owner").lease == first._lease
    with pytest.raises(JournalError, match="another controller"):
        EtcdJournal(etcd.address, "/b", timeout=20)
    made: list[EtcdJournal] = []
    thread = threading.Thread(
        target=lambda: made.append(EtcdJournal(etcd.address, "/b", wait=60, ttl=5, timeout=20))
    )
    thread.start()
    first.write({"j": StoredJob("x", True)}, {})
    first.close()
    thread.join(60)
    assert made[0].jobs() == {"j": StoredJob("x", True)}
    made[0].close()


def test_who_has_lost_the_lease_writes_nothing(etcd) -> None:
    first = EtcdJournal(etcd.address, "/c", timeout=20)
    lost = threading.Event()
    first.on_lost = lost.set
    first.write({"j": StoredJob("x", True)}, {})
    etcd.drop(first._lease)
    second = EtcdJournal(etcd.address, "/c", timeout=20)
    with pytest.raises(WriteFailed, match="another controller"):
        first.write({"j": StoredJob("z", True)}, {})
    assert first.lost and lost.is_set()
    assert second.jobs() == {"j": StoredJob("x", True)}
    first.close()
    assert etcd.get("/c/owner").value == second._me  # what the loser gives back is not ours
    second.close()


def test_an_etcd_that_answers_nobody_for_a_while(etcd) -> None:
    journal = EtcdJournal(etcd.address, "/d", ttl=120, timeout=20)
    journal._timeout = 0.5
    etcd.hang(True)
    try:
        with pytest.raises(WriteFailed, match="DEADLINE_EXCEEDED"):
            journal.write({"j": StoredJob("x", True)}, {})
        assert not journal.lost
    finally:
        etcd.hang(False)
    journal._timeout = 20.0
    journal.write({"j": StoredJob("y", True)}, {})
    assert journal.jobs() == {"j": StoredJob("y", True)}
    journal.close()


def test_another_controller_takes_over_in_the_middle_of_an_episode(etcd) -> None:
    info = pb.ClientInfo(jobId="j")
    where = ("--etcd", etcd.address, "--etcd-prefix", "/e")
    with Controller(*where) as first:
        raw = Raw(grpc.insecure_channel(first.address))
        raw("Init", info)
        raw("Register", info)
        fault = [pb.FaultRank(rankId="1", faultType="1")]
        raw("ReportProcessFault", pb.ProcessFaultRequest(jobId="j", faultRanks=fault))
        first.kill()
    etcd.drop(etcd.get("/e/owner").lease)  # what time does
    with Controller(*where, "--standby") as second:
        raw = Raw(grpc.insecure_channel(second.address))
        stream = raw("SubscribeProcessManageSignal", info)
        assert next(stream).signalType == "stopTrain"
        stream.cancel()
        assert second.stop() == 0
    assert etcd.get("/e/owner") is None
