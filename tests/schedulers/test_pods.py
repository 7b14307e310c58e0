"""The containers of examples/kubernetes, run as pods would run them, without a cluster.

Each is process 1 of a process namespace on a host of its own, under the pod's name, which
the others can resolve; the test is kubelet and Job controller.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "many_nodes"))

import hosts
from waiting import until

yaml = pytest.importorskip("yaml")

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("program.py")
LIMIT = 60.0

ASK = r"""
exec 3<>"/dev/tcp/$0/$1" && printf 'GET %s HTTP/1.1\r\nHost: pod\r\n\r\n' "$2" >&3 && head -n 1 <&3
"""


class Pods:
    """The pods of the Job in indexed-job.yaml. ``folder`` is what they share."""

    def __init__(self, network: hosts.Hosts, folder: Path) -> None:
        manifest = (ROOT / "examples" / "kubernetes" / "indexed-job.yaml").read_text()
        objects = {d["kind"]: d for d in yaml.safe_load_all(manifest)}
        self.job, self.folder, self.network = objects["Job"], folder, network
        pod = self.job["spec"]["template"]["spec"]
        (self.container,) = pod["containers"]
        self.names = [
            f"{self.job['metadata']['name']}-{n}" for n in range(self.job["spec"]["completions"])
        ]
        table = "".join(
            f"{network[n].address} {name}.{pod['subdomain']} {name}\n"
            for n, name in enumerate(self.names)
        )
        for number, name in enumerate(self.names):
            network[number].name = name
            with (hosts.NETNS / network[number].namespace / "hosts").open("a") as file:
                file.write(table)
        (folder / "token").write_text("a secret of the test")
        (folder / "train.py").write_text(PROGRAM.read_text())
        self.running: dict[int, subprocess.Popen[str]] = {}

    def start(self, number: int) -> None:
        """The pod of this index, (again)."""
        c = self.container
        values = {"JOB_UID": "4711"}
        assert {e["name"] for e in c["env"]} == set(values)
        words = [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], w) for w in c["args"]]
        words = [w.replace("/run/phalanx", str(self.folder)) for w in words]  # its mount
        words = [w.replace("per-node=auto", "per-node=1") for w in words]
        own = ("PET_", "TORCHELASTIC_", "PHALANX_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        (self.folder / "temporary").mkdir(exist_ok=True)
        env |= {**values, "TEST_OUT": str(self.folder), "TMPDIR": str(self.folder / "temporary")}
        command = [sys.executable, "-m", *c["command"], *words]
        with (self.folder / "log").open("a") as log:
            self.running[number] = self.network[number].start(
                ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command],
                env,
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: int, what: int) -> None:
        """To process 1 of the pod."""
        for pid in self.network[number].pids():
            status = Path(f"/proc/{pid}/status").read_text()
            spaces = re.search(r"^NSpid:\s+(.*)$", status, re.MULTILINE)
            if spaces and len(spaces[1].split()) > 1 and spaces[1].split()[-1] == "1":
                os.kill(pid, what)
                return
        raise AssertionError(f"there is no process 1 in pod {number}\n{self.log()}")

    def ended(self, number: int) -> int:
        """The exit code of the container."""
        try:
            code = self.running[number].wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pod {number} does not end\n{self.log()}") from None
        return 128 - code if code < 0 else code

    def probe(self, number: int, kind: str) -> str:
        """What the probe of that kind gets from another host."""
        get = self.container[f"{kind}Probe"]["httpGet"]
        port = {p["name"]: p["containerPort"] for p in self.container["ports"]}[get["port"]]
        other = self.network[(number + 1) % len(self.names)]
        words = ["bash", "-c", ASK, self.network[number].address, str(port), get["path"]]
        with other.start(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as asked:
            answer = asked.communicate(timeout=LIMIT)[0].split()
        return answer[1] if len(answer) > 1 else ""

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-6000:]

    def said(self, what: str = "") -> list[str]:
        path = self.folder / "said"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(what)]

    def began(self, count: int) -> list[int]:
        """On which pods workers were started, once there were so many starts."""
        self.until(lambda: len(self.said("began")) >= count, f"{count} starts of workers")
        return [self.names.index(line.split()[1]) for line in self.said("began")]

    def until(self, ready: Callable[[], Any], what: str) -> None:
        until(ready, what, lambda: f"{self.said()}\n{self.log()}")


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    if reason := hosts.why_not():
        pytest.skip(reason)
    with hosts.Hosts(3) as network:
        made = Pods(network, tmp_path)
        yield made
        network.close()
        for process in made.running.values():
            process.wait(LIMIT)


def test_pods_die_are_told_to_go_and_are_made_again(pods: Pods) -> None:
    pods.start(0)
    pods.until(lambda: "1 of" in pods.log(), "the first waits for the others")
    pods.start(1)
    pods.start(2)
    first = pods.began(2)
    spare = next(n for n in range(3) if n not in first)
    pods.until(
        lambda: [pods.probe(n, "readiness") for n in (*first, spare)] == ["200", "200", "503"],
        "those that train are ready, the spare is not",
    )
    assert [pods.probe(n, "liveness") for n in range(3)] == ["200"] * 3

    victim = next(n for n in first if n != 0)  # the other one is the coordinator
    pods.signal(victim, signal.SIGKILL)
    assert pods.ended(victim) != 0
    assert spare in pods.began(4)[2:]
    pods.start(victim)
    pods.until(lambda: pods.probe(victim, "liveness") == "200", "it is there again")

    pods.signal(spare, signal.SIGTERM)  # its node is drained
    assert pods.ended(spare) == 143
    assert victim in pods.began(6)[4:]
    assert f"SIGTERM {pods.names[spare]}" in " ".join(pods.said("SIGTERM"))
    pods.start(spare)

    (pods.folder / "enough").touch()
    assert [pods.ended(n) for n in (0, victim)] == [0, 0]
    assert len(pods.said("ended")) == 2
