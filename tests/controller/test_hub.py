"""The controller's inside: journal, ownership, quotas, expiry, timers, the command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

pytest.importorskip("grpc")

from phalanx.cli import controller as cli
from phalanx.controller import access
from phalanx.controller.hub import Hub, Options, Unavailable
from phalanx.controller.journal import Journal, JournalError, WriteFailed
from phalanx.controller.metrics import Metrics, serve
from phalanx.controller.resetfile import ResetFiles
from phalanx.proto import recover_pb2 as pb
from phalanx.recovery import devices
from phalanx.recovery import model as m
from phalanx.recovery.model import Fault, JobConfig, Node, State

RECOVER = JobConfig(strategies=("recover", "dump"))


def hub_of(journal=None, **options) -> Hub:
    hub = Hub(journal or Journal(None), Options(**{"defaults": RECOVER, **options}))
    hub.open()
    return hub


async def job(hub: Hub, name: str = "j", declared=None):
    assert hub.init(name, declared or {}, "peer")[0] == 0
    assert (await hub.register(name, declared or {}))[0] == 0
    return hub.entries[name]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_what_is_in_the_journal_comes_back(tmp_path):
    held = Journal(tmp_path)

    async def first():
        hub = hub_of(held)
        entry = await job(hub)
        await hub.tell(entry, m.FaultSeen((Fault(1),)))
        hub.device_fault(devices.DeviceFault("device-1", "n"))
        await hub.settled()
        return entry.job

    async def second():
        journal = Journal(tmp_path)
        hub = hub_of(journal)
        again = hub.entries["j"].job
        assert set(hub.devices) == {"/device-1/n"}
        await hub.close()
        journal.close()
        return again

    before = run(first())
    with pytest.raises(JournalError, match="another controller"):
        run(second())
    held.close()  # not the hub: nothing more was written
    after = run(second())
    assert (after.state, after.open, after.uuid) == (State.STOPPING, before.open, before.uuid)


def test_a_restart_gives_clients_time(tmp_path):
    async def first():
        journal = Journal(tmp_path)
        hub = hub_of(journal, defaults=JobConfig(strategies=("recover",), report_timeout=0.001))
        entry = await job(hub)
        hub.apply(entry, m.FaultSeen((Fault(1),)))
        hub._flush_handle.cancel()
        hub._flush()
        if hub._timer_handle:
            hub._timer_handle.cancel()
        journal.close()
        return entry.job

    async def second():
        journal = Journal(tmp_path)
        hub = hub_of(journal, resume_grace=60)
        await asyncio.sleep(0.05)
        again = hub.entries["j"].job
        assert again.state is State.STOPPING and again.deadline >= hub.now() + 50
        await hub.close()
        journal.close()
        return again

    before, after = run(first()), run(second())
    assert (after.uuid, after.open) == (before.uuid, before.open)


def test_nothing_leaves_before_the_journal_has_it():
    async def play():
        journal = Journal(None)
        hub = hub_of(journal)
        entry = await job(hub)
        subscriber = hub.subscribe(entry, "peer a")
        await hub.settled()
        real, fail = journal.write, True

        def write(*args):
            if fail:
                raise WriteFailed("disk is full")
            real(*args)

        journal.write = write
        with pytest.raises(Unavailable, match="disk is full"):
            await hub.tell(entry, m.FaultSeen((Fault(1),)))
        assert not subscriber.queue
        fail = False
        hub._flush_handle.cancel()
        hub._flush()
        (data, key) = subscriber.queue[0]
        assert pb.ProcessManageSignal.FromString(data).signalType == "stopTrain"
        assert key == entry.job.open.key
        await hub.close()

    run(play())


def test_the_newer_owner_wins_and_there_is_no_ping_pong():
    async def play():
        hub = hub_of()
        entry = await job(hub)
        old = hub.subscribe(entry, "client a", "a", 1, True)
        new = hub.subscribe(entry, "client b", "b", 2, True)
        assert "superseded" in old.end and new.end is None
        assert "newer" in hub.subscribe(entry, "client a", "a", 1, True)
        again = hub.subscribe(entry, "client b", "b", 2, True)
        assert new.end is not None and again.end is None
        hub.unsubscribe(entry, old)
        hub.unsubscribe(entry, new)
        assert entry.subscriber is again and entry.job.subscribed
        hub.unsubscribe(entry, again)
        assert not isinstance(hub.subscribe(entry, "client a", "a", 1, True), str)
        # an original client comes back on its own connection as often as it likes
        first = hub.subscribe(entry, "peer 1")
        hub.subscribe(entry, "peer 2")
        assert isinstance(hub.subscribe(entry, "peer 1"), str) and first.end
        await hub.close()

    run(play())


def test_timers_fire():
    async def play():
        hub = hub_of(
            defaults=JobConfig(strategies=("recover",), report_timeout=0.05, exit_wait=0.05)
        )
        entry = await job(hub)
        await hub.tell(entry, m.FaultSeen((Fault(1),)))
        while entry.job.state is not State.IDLE:
            await asyncio.sleep(0.01)
        assert entry.job.outcome == "exit"
        await hub.close()

    run(play())


def test_idle_registrations_expire():
    async def play():
        hub = hub_of(idle_expiry=0.01)
        await job(hub, "a")
        hub.init("b", {}, "peer")
        while hub.entries or hub.inited:
            await asyncio.sleep(0.05)
        assert not hub._per_peer
        await hub.close()

    run(play())


def test_limits():
    async def play():
        hub = hub_of(max_jobs=2, max_jobs_per_peer=2, max_streams=1, max_faults=1)
        await job(hub, "a")
        await job(hub, "b")
        assert hub.init("c", {}, "peer")[0] == 502
        assert hub.init("c", {}, "other")[0] == 0
        assert (await hub.register("c", {}))[0] == 500
        assert not isinstance(hub.subscribe(hub.entries["a"], "x"), str)
        assert isinstance(hub.subscribe(hub.entries["b"], "x"), str)
        assert hub.device_fault(devices.DeviceFault("one", "n"))
        assert not hub.device_fault(devices.DeviceFault("two", "n"))
        assert hub.forget("a") and not hub.forget("a")
        await hub.close()

    run(play())


def test_device_faults_reach_the_jobs_on_their_node():
    async def play():
        hub = hub_of()
        nodes = {
            "nodes": [
                {"rank": 0, "name": "n0", "ranks": [0, 1]},
                {"rank": 1, "name": "n1", "ranks": [2, 3]},
            ]
        }
        hub.device_fault(devices.DeviceFault("early", "n0"))
        one = await job(hub, "one", nodes)
        two = await job(hub, "two")
        assert one.job.state is State.IDLE and one.job.present  # known, no reason to begin
        hub.device_fault(devices.DeviceFault("late", "n1", devices=(1,), device_type="NPU"))
        assert one.job.state is State.STOPPING and [f.rank for f in one.job.faults] == [3]
        assert two.job.state is State.IDLE
        assert hub.clear_device("/late/n1") and not hub.clear_device("/late/n1")
        assert all(f.source != "/late/n1" for f in one.job.present)
        await hub.close()

    run(play())


def test_configuration_has_an_order():
    async def play():
        hub = hub_of(jobs={"j": {"strategies": ["exit"]}})
        entry = await job(hub, "j", {"strategies": ["dump"], "world_size": 4})
        assert entry.job.config.strategies == ("exit",) and entry.job.config.world_size == 4
        hub.reconfigure(Options(defaults=RECOVER))
        assert entry.job.config.strategies == ("dump",)
        await hub.close()

    run(play())


def test_metrics_text_and_server():
    async def play():
        metrics = Metrics()
        metrics.gauges["jobs"] = lambda: 3
        metrics.count("signals", type='a"b\n')
        metrics.count("signals", type="c", by=2)
        server = await serve(metrics, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for path, wanted in (
            (b"/metrics", b"phalanx_controller_jobs 3"),
            (b"/healthz", b"ok"),
            (b"/x", b"404"),
            (b"", b"404"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET %s HTTP/1.1\r\n\r\n" % path)
            assert wanted in await reader.read()
            writer.close()
        server.close()
        assert 'type="a\\"b\\n"} 1' in metrics.text()

    run(play())


def test_reset_files(tmp_path):
    files = ResetFiles(tmp_path)
    files.write("j", "flushing")
    body = json.loads((tmp_path / "j" / "reset.json").read_text())
    assert body["FaultFlushing"] and body["RankList"] == []
    files.write("j", "faults", (1, 2), True)
    body = json.loads((tmp_path / "j" / "reset.json").read_text())
    assert [r["RankId"] for r in body["RankList"]] == [1, 2] and body["RestartFaultProcess"]
    assert body["RankList"][0]["Status"] == "fault" and not body["FaultFlushing"]
    files.write("j", "restart")
    files.write("j", "restart")
    body = json.loads((tmp_path / "j" / "reset.json").read_text())
    assert body["RetryTime"] == 2 and body["RankList"] == []
    for name in ("../x", "a/b", "..", ""):
        assert files.folder(name).parent == tmp_path


def test_quotas():
    now = [0.0]
    quotas = access.Quotas(1, 2, peers=2, clock=lambda: now[0])
    assert [quotas.take("a") for _ in range(3)] == [True, True, False]
    assert quotas.take("b")
    now[0] = 1.0
    assert quotas.take("a") and not quotas.take("a")
    quotas.take("c")
    assert len(quotas._buckets) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "object"),
        ("{", "cannot read"),
        ('{"x": 1}', "only tokens"),
        ('{"tokens": {"plain": ["*"]}}', "SHA-256"),
        ('{"subjects": {"a": "*"}}', "list"),
    ],
)
def test_access_files_that_are_wrong(tmp_path, text, words):
    file = tmp_path / "access"
    file.write_text(text)
    with pytest.raises(access.AccessError) as caught:
        access.Policy.read(file)
    assert words in str(caught.value) or "cannot read" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/x", True),
        ("0.0.0.0:1", False),
        ("10.1.2.3:1", False),
        ("host:1", False),
        ("[::]:1", False),
    ],
)
def test_loopback(address, inside):
    assert access.is_loopback(address) is inside


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--listen", "0.0.0.0:0"], "say it twice"),
        (["--listen", "0.0.0.0:0", "--insecure"], "say it twice"),
        (["--listen", "x"], "HOST:PORT"),
        (["--tls-cert", "x"], "go together"),
        (["--tls-client-ca", "x"], "needs --tls-cert"),
        (["--strategies", "retry,magic"], "no strategy 'magic'"),
        (["--known-jobs-only"], "--jobs"),
        (["--standby"], "needs --etcd"),
        (["--etcd", "a:1", "--state-dir", "x"], "give one"),
        (["--report-timeout", "-1"], "report_timeout"),
        (["--jobs", "/nowhere"], "cannot read"),
        (["--access", "/nowhere"], "cannot read"),
        (["--tls-cert", "/nowhere", "--tls-key", "/nowhere"], "cannot read /nowhere"),
    ],
)
def test_command_lines_that_make_no_sense(argv, words, capsys):
    if "--listen" not in argv:
        argv = [*argv, "--listen", "127.0.0.1:0"]
    assert cli.main(argv) == 2
    assert words in capsys.readouterr().err


def test_a_jobs_file_that_is_wrong(tmp_path, capsys):
    file = tmp_path / "jobs"
    for text, words in (
        ('{"jobs": {"a": {"stratgies": []}}}', "job a: unknown setting 'stratgies'"),
        ('{"defaults": {"world_size": "x"}}', "world_size"),
        ('{"other": 1}', "defaults and jobs"),
    ):
        file.write_text(text)
        assert cli.main(["--jobs", str(file), "--listen", "127.0.0.1:0"]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.process
def test_two_controllers_on_one_folder_or_port(tmp_path):
    from compat.harness import Controller

    with Controller(state=tmp_path / "s") as first:
        for more in (
            ["--state-dir", str(tmp_path / "s"), "--listen", "127.0.0.1:0"],
            ["--listen", first.address],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "phalanx", "controller", *more],
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert done.returncode == 1
            assert "another controller" in done.stderr or "cannot listen" in done.stderr
        assert first.stop() == 0


@pytest.mark.process
def test_events_metrics_and_reset_dir(tmp_path):
    import urllib.request

    import grpc
    from compat.harness import Controller, Raw

    with Controller(
        "--metrics",
        "127.0.0.1:0",
        "--events",
        str(tmp_path / "events"),
        "--reset-dir",
        str(tmp_path / "reset"),
    ) as c:
        raw = Raw(grpc.insecure_channel(c.address))
        info = pb.ClientInfo(jobId="j")
        raw("Init", info)
        raw("Register", info)
        fault = [pb.FaultRank(rankId="1", faultType="1")]
        raw("ReportProcessFault", pb.ProcessFaultRequest(jobId="j", faultRanks=fault))
        raw("ReportStopComplete", pb.StopCompleteRequest(jobId="j"))
        text = urllib.request.urlopen(c.metrics, timeout=5).read().decode()
        assert "phalanx_controller_busy_jobs 1" in text
        assert 'phalanx_controller_calls{method="/Recover/Init",code="0"} 1' in text
        reset = json.loads((tmp_path / "reset" / "j" / "reset.json").read_text())
        assert [r["RankId"] for r in reset["RankList"]] == [1]
    lines = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [line["kind"] for line in lines][:2] == ["episode.begin", "fault"]
    assert all((line["source"], line["run_id"]) == ("controller", "j") for line in lines)


def test_the_table_is_printed(capsys):
    for form, words in (("text", "as chosen"), ("mermaid", "stateDiagram"), ("dot", "digraph")):
        assert cli.main(["table", "--format", form]) == 0
        assert words in capsys.readouterr().out


def test_node_names_are_not_taken_for_others():
    config = JobConfig(nodes=(Node(0, "", ranks=(0,)),))
    assert devices.on_job(config, devices.DeviceFault("f", "")) == ()


def test_a_reader_that_reads_nothing_loses_its_stream(monkeypatch):
    from phalanx.controller import hub as module

    monkeypatch.setattr(module, "_CLOSE_GRACE", 0.01)

    async def play():
        hub = hub_of()
        entry = await job(hub)
        subscriber = hub.subscribe(entry, "peer a")

        async def write(data):
            await asyncio.get_running_loop().create_future()

        task = asyncio.ensure_future(subscriber.run(write))
        for _ in range(300):
            subscriber.put(b"x")
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "too slow" in subscriber.end and len(subscriber.queue) <= module._QUEUE
        await hub.close()

    run(play())


def test_keep_alives_come_at_each_ones_pace():
    async def play():
        hub = hub_of(keep_alive=100)

        def wake():
            if not hub._beat.done():
                hub._beat.set_result(None)

        slow = hub.subscribe(await job(hub, "slow"), "peer slow")
        none = hub.subscribe(await job(hub, "none"), "peer none", beat=-1)
        await asyncio.sleep(0.02)
        quick = hub.subscribe(await job(hub, "quick"), "peer quick", beat=1)
        quick.beat = 0.03
        hub._beats[0] = (hub.now(), *hub._beats[0][1:])
        wake()
        while not quick.queue:
            await asyncio.sleep(0.01)
        message = pb.ProcessManageSignal.FromString(quick.queue.popleft()[0])
        assert (message.signalType, message.jobId) == ("keep-alive", "quick")
        while not quick.queue:
            await asyncio.sleep(0.01)
        assert not slow.queue and not none.queue
        for _ in range(500):
            hub.unsubscribe(hub.entries["slow"], slow)
            slow = hub.subscribe(hub.entries["slow"], "peer slow")
        wake()
        while len(hub._beats) > 64 + 4 * 3:
            await asyncio.sleep(0.01)
        await hub.close()

    run(play())
