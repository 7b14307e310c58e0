"""A real Slurm on hosts of our own: one controller, and nodes that can be killed.

Debian's packages ``slurmctld slurmd slurm-client munge``, as root. Every daemon runs in a
network namespace with a name and an address (``tests/many_nodes/hosts.py``), under a
configuration, key and state in one folder: no service of the machine is used or touched, and
nothing of it is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "many_nodes"))
import hosts as network
from waiting import LIMIT, T, until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "mungekey")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


@cache
def why_not() -> str:
    """Why there can be no Slurm here, and what to do; "" if there can."""
    missing = [p for p in PROGRAMS if shutil.which(p, path=PATH) is None]
    if missing:
        return (
            f"there is no Slurm here ({', '.join(missing)}): "
            "apt-get install slurmctld slurmd slurm-client munge"
        )
    return network.why_not()


CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a requeued job waits until its old credential is void: 120 s by default
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={lost_after}
InactiveLimit=0
KillWait=20
MinJobAge=600
MessageTimeout=20
# TCPTimeout, not the kernel's two minutes, bounds a message to a node that is no more
TCPTimeout=2
RequeueExit=85
"""


class Slurm:
    """A cluster of ``count`` nodes; a context manager.

    ``lost_after``: seconds without an answer after which the controller takes a node to be
    down (``SlurmdTimeout``). Nodes are ``hosts[1]`` and up; the controller is ``hosts[0]``.
    ``shared`` is a folder that all nodes see; ``python`` the interpreter of the jobs.
    """

    def __init__(self, count: int = 3, lost_after: int = 5) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="phx-slurm-"))
        self.shared = self.folder / "shared"
        self.hosts: network.Hosts | None = None
        self.daemons: list[subprocess.Popen[str]] = []
        try:
            self.shared.mkdir()
            self.hosts = network.Hosts(count + 1)
            self.nodes = [self.hosts[n + 1] for n in range(count)]
            self._configure(lost_after)
            self._start()
        except BaseException:
            self.close()
            raise

    def _configure(self, lost_after: int) -> None:
        assert self.hosts is not None
        text = CONFIGURATION.format(
            controller=f"{self.hosts[0].name}({self.hosts[0].address})",
            folder=self.folder,
            lost_after=lost_after,
        )
        for node in self.nodes:
            text += f"NodeName={node.name} NodeAddr={node.address} CPUs=4 State=UNKNOWN\n"
        names = ",".join(node.name for node in self.nodes)
        text += f"PartitionName=main Nodes={names} Default=YES PriorityTier=1 GraceTime=60\n"
        text += f"PartitionName=urgent Nodes={names} PriorityTier=9 PreemptMode=OFF\n"
        (self.folder / "slurm.conf").write_text(text)
        # a host has a /sys of its own, where there is nothing to detect
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "state").mkdir()
        self.env = {
            k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PHALANX_", "PET_"))
        }
        self.env |= {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{PATH}",
        }

    def _daemon(self, host: network.Host, *words: str) -> subprocess.Popen[str]:
        with (self.folder / "daemons.log").open("a") as log:
            daemon = host.start(words, self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.daemons.append(daemon)
        return daemon

    def _start(self) -> None:
        assert self.hosts is not None
        f = self.folder
        subprocess.run(
            ["mungekey", "--create", f"--keyfile={f}/munge.key"],
            check=True,
            capture_output=True,
            env=self.env,
            timeout=LIMIT,
        )
        self._daemon(
            self.hosts[0],
            # by force: it wants its socket to be within everybody's reach
            *("munged", "--force", "--foreground", f"--socket={f}/munge.socket"),
            *(
                f"--key-file={f}/munge.key",
                f"--pid-file={f}/munged.pid",
                f"--log-file={f}/munged.log",
            ),
            *(f"--seed-file={f}/munged.seed", "--num-threads=4"),
        )
        socket = f / "munge.socket"
        self.until(lambda: self._alive() and socket.exists(), "munged answers")
        self._daemon(self.hosts[0], "slurmctld", "-D", "-i")
        for node in self.nodes:
            self.start_node(node)
        idle = ["idle"] * len(self.nodes)
        self.until(lambda: self._alive() and self.states() == idle, "all nodes are idle")

    def _alive(self) -> bool:
        ended = [d.args for d in self.daemons if d.poll() is not None]
        if ended:
            raise RuntimeError(f"a daemon has ended: {ended}\n{self._last_words()}")
        return True

    # ------------------------------------------------------------------ the nodes

    def start_node(self, node: network.Host) -> None:
        """Its slurmd starts (again)."""
        self._daemon(node, "slurmd", "-D", "-N", node.name)

    def kill_node(self, node: network.Host) -> None:
        """Its slurmd and all steps on it die at once, as when the power goes."""
        while node.pids():
            node.kill()

    def kill_slurmd(self, node: network.Host) -> None:
        """Its slurmd dies; the steps there run on."""
        for pid in node.pids():
            if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmd":
                os.kill(pid, signal.SIGKILL)

    def states(self) -> list[str]:
        """The nodes' states, in order of their names."""
        done = self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t", check=False)
        return [line.split()[1] for line in sorted(done.splitlines()) if len(line.split()) == 2]

    # ------------------------------------------------------------------ the jobs

    def command(self, *words: str, check: bool = True, cwd: Path | None = None) -> str:
        """The output of a command on the controller's host.

        Raises:
            RuntimeError: it failed and ``check`` is set.
        """
        assert self.hosts is not None
        done = subprocess.run(
            self.hosts[0].words(words),
            env=self.env,
            cwd=cwd or self.shared,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def submit(self, *words: str, env: Mapping[str, str] | None = None) -> int:
        """``sbatch`` with these words, from the shared folder; the job's number."""
        given = [f"{key}={value}" for key, value in (env or {}).items()]
        return int(self.command("env", *given, "sbatch", "--parsable", *words).split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What ``scontrol show job`` says: JobState, ExitCode, Restarts, Reason, ..."""
        text = self.command("scontrol", "-o", "show", "job", str(number), check=False)
        pairs = (word.partition("=") for word in text.split())
        return {key: value for key, _, value in pairs}

    def ended(self, number: int, limit: float = LIMIT) -> dict[str, str]:
        """The job, once nothing of it runs any more. A node that does not answer may keep it
        COMPLETING for long after that."""
        going = ("PENDING", "CONFIGURING", "RUNNING", "REQUEUED", "")

        def over() -> dict[str, str] | None:
            job = self.job(number)
            return None if job.get("JobState", "") in going else job

        return self.until(over, f"job {number} ends", limit)

    def output(self, number: int) -> str:
        """What the job's batch script and its steps have written so far."""
        path = self.shared / f"slurm-{number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, ready: Callable[[], T], what: str, limit: float = LIMIT) -> T:
        """Wait until ``ready()`` is true; its value.

        Raises:
            RuntimeError: it was not within ``limit`` seconds.
        """
        return until(ready, what, self._last_words, limit)

    def _last_words(self) -> str:
        out = []
        for path in sorted([*self.folder.glob("*.log"), *self.shared.glob("slurm-*.out")]):
            lines = path.read_text(errors="replace").splitlines()[-25:]
            out.append("\n".join([f"-- {path.name}", *lines]))
        return "\n".join(out)

    # ------------------------------------------------------------------ the end

    def __enter__(self) -> Slurm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill it all, and take it away."""
        if self.hosts is not None:
            self.hosts.close()
        for daemon in self.daemons:
            daemon.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


def words_of(script: Path) -> Sequence[str]:
    """The options that a batch script gives to sbatch in its ``#SBATCH`` lines."""
    lines = script.read_text().splitlines()
    return [line.split(None, 1)[1] for line in lines if line.startswith("#SBATCH ")]


if __name__ == "__main__":  # a cluster to play with, until the end of the shell
    if reason := why_not():
        raise SystemExit(reason)
    with Slurm() as cluster:
        assert cluster.hosts is not None
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        shell = cluster.hosts[0].words([os.environ.get("SHELL", "bash"), *sys.argv[1:]])
        subprocess.run(shell, env=cluster.env, cwd=cluster.shared)
