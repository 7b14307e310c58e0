"""Malformed, half-empty and absurd messages against a live controller.

Each has to get a code or a gRPC error, while another job goes through a recovery undisturbed
and the controller's memory stays flat.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from compat.harness import PATHS, Controller, Raw
from phalanx.proto import MAX_MESSAGE_BYTES
from phalanx.proto import recover_pb2 as pb

_WORDS = (
    "",
    "job-x",
    "0",
    "-1",
    "1e9",
    "retry",
    "recover",
    "é" * 40,
    "x" * 400,
    "\x00",
    "99999999",
)


@dataclass
class Report:
    """What became of the messages."""

    sent: int = 0
    codes: int = 0
    errors: int = 0
    lost: int = 0
    memory_before: int = 0
    memory_after: int = 0
    bystander_rounds: int = 0
    kinds: dict[str, int] | None = None


def fill(rnd: random.Random, kind: Any, depth: int = 0) -> Any:
    """A message with fields left out, repeated, and filled with nonsense."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if rnd.random() < 0.4 or depth > 4:
            continue
        many = rnd.choice((0, 1, 2, 5)) if field.is_repeated else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            target = getattr(message, field.name)
            value = field.message_type.fields_by_name["value"]
            for _ in range(many):
                key = rnd.choice(_WORDS)
                if value.message_type is not None:
                    target[key].CopyFrom(fill(rnd, type(target["k"]), depth + 1))
                else:
                    target[key] = rnd.choice(_WORDS)
        elif field.message_type is not None:
            target = getattr(message, field.name)
            if field.is_repeated:
                for _ in range(many):
                    made = target.add()
                    made.CopyFrom(fill(rnd, type(made), depth + 1))
            else:
                target.CopyFrom(fill(rnd, type(target), depth + 1))
        else:
            values = [_scalar(rnd, field.type) for _ in range(many)]
            if field.is_repeated:
                getattr(message, field.name).extend(values)
            else:
                setattr(message, field.name, values[0])
    return message


def _scalar(rnd: random.Random, kind: int) -> Any:
    if kind == 9:
        return rnd.choice(_WORDS)
    if kind == 8:
        return rnd.random() < 0.5
    if kind in (5, 14):
        return rnd.choice((0, 1, -1, 2**31 - 1, -(2**31), 404, 201))
    return rnd.choice((0, 1, -1, 2**63 - 1, 1_800_000_000_000))


def spoil(rnd: random.Random, data: bytes) -> bytes:
    """Cuts, flips, doubles, or replaces by noise."""
    what = rnd.randrange(6)
    if what == 0:
        return data[: rnd.randrange(len(data) + 1)]
    if what == 1 and data:
        at = rnd.randrange(len(data))
        return data[:at] + bytes([rnd.randrange(256)]) + data[at + 1 :]
    if what == 2:
        return data + data
    if what == 3:
        return rnd.randbytes(rnd.randrange(64))
    if what == 4:
        return b""
    return data


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def run(controller: Controller, count: int, seed: int = 1, window: int = 64) -> Report:
    """Sends ``count`` messages; streams are cancelled as soon as they stand."""
    rnd = random.Random(seed)
    report = Report(kinds={})
    channel = grpc.insecure_channel(
        controller.address, [("grpc.max_send_message_length", 64 << 20)]
    )
    assert controller.process is not None
    free = threading.Semaphore(window)
    lock = threading.Lock()
    stop = threading.Event()
    unary = {n: m for n, m in PATHS.items() if not m.server_streams}
    streams = {n: m for n, m in PATHS.items() if m.server_streams}

    def done(call: Any) -> None:
        with lock:
            try:
                call.result()
                report.codes += 1
                name = "answered"
            except grpc.RpcError as error:
                name = error.code().name
                if name == "DEADLINE_EXCEEDED" or name == "UNAVAILABLE":
                    report.lost += 1
                else:
                    report.errors += 1
            assert report.kinds is not None
            report.kinds[name] = report.kinds.get(name, 0) + 1
        free.release()

    def bystander() -> None:
        """A job that must not notice."""
        own = Raw(grpc.insecure_channel(controller.address))
        info = pb.ClientInfo(jobId="bystander")
        own("Init", info)
        own("Register", info)
        stream = own("SubscribeProcessManageSignal", info)
        fault = [pb.FaultRank(rankId="1", faultType="1")]
        while not stop.is_set():
            assert (
                own(
                    "ReportProcessFault",
                    pb.ProcessFaultRequest(jobId="bystander", faultRanks=fault),
                ).code
                == 0
            )
            for word in ("stopTrain", "globalFault", "changeStrategy"):
                signal = next(s for s in stream if s.signalType != "keep-alive")
                assert signal.signalType == word, signal
                if word == "stopTrain":
                    own("ReportStopComplete", pb.StopCompleteRequest(jobId="bystander"))
                elif word == "globalFault":
                    own(
                        "ReportRecoverStrategy",
                        pb.RecoverStrategyRequest(
                            jobId="bystander", strategies=["recover", "exit"]
                        ),
                    )
                else:
                    own(
                        "ReportRecoverStatus",
                        pb.RecoverStatusRequest(jobId="bystander", strategy="recover"),
                    )
            report.bystander_rounds += 1
            stop.wait(0.05)
        stream.cancel()

    problem: list[BaseException] = []

    def watched() -> None:
        try:
            bystander()
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=watched, daemon=True)
    thread.start()
    warm = min(count // 4, 5000)
    for index in range(count):
        if index == warm:
            report.memory_before = memory(controller.process.pid)
        if not free.acquire(timeout=60):
            raise TimeoutError("the controller no longer answers")
        report.sent += 1
        if rnd.random() < 0.02:
            method = rnd.choice(list(streams.values()))
            data = spoil(rnd, fill(rnd, method.request).SerializeToString())
            call = channel.unary_stream(method.path)(data, timeout=20)
            # cancelled when the controller has either accepted or refused it
            call.initial_metadata()
            call.cancel()
            with lock:
                report.errors += 1
            free.release()
            continue
        method = rnd.choice(list(unary.values()))
        message = fill(rnd, method.request)
        if "jobId" in message.DESCRIPTOR.fields_by_name and rnd.random() < 0.5:
            message.jobId = f"fuzz-{rnd.randrange(50)}"
        data = spoil(rnd, message.SerializeToString())
        if rnd.random() < 0.0005:
            data = b"\x0a" + b"\x80" * (MAX_MESSAGE_BYTES + 1)
        call = channel.unary_unary(method.path).future(data, timeout=30)
        call.add_done_callback(done)
    for _ in range(window):
        assert free.acquire(timeout=60), "a message was never answered"
    stop.set()
    thread.join(20)
    report.memory_after = memory(controller.process.pid)
    channel.close()
    if problem:
        raise AssertionError(f"the other job noticed: {problem[0]!r}")
    return report
