"""The patch on the real torch: stock torchrun with a controller."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("torch")

from compat.harness import Controller

pytestmark = [pytest.mark.torch, pytest.mark.process]

slow = pytest.mark.skipif(
    os.environ.get("PHALANX_SLOW_TESTS") != "1", reason="slow: PHALANX_SLOW_TESTS=1 runs it"
)

SRC = Path(__file__).parents[2] / "mindx_elastic" / "src"


def python(code: str, timeout: float = 90, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(SRC), **env},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_the_patch_comes_and_goes():
    done = python(
        """
        import mindx_elastic.api as api, sys
        assert not api.patched() and 'torch' not in sys.modules
        from torch.distributed.launcher import api as launcher
        from torch.distributed.elastic.agent.server.api import SimpleElasticAgent as Agent
        assert api.patched()  # as soon as torch's launcher was imported
        import torch.distributed.run
        ours = launcher.launch_agent, Agent._invoke_run, Agent._initialize_workers
        api.patch_torch_methods()
        api.patch_torch_methods()
        assert ours == (launcher.launch_agent, Agent._invoke_run, Agent._initialize_workers)
        api.unpatch()
        assert not api.patched()
        for mine, now in zip(ours, (launcher.launch_agent, Agent._invoke_run,
                                    Agent._initialize_workers)):
            assert mine is not now and mine.__wrapped__ is now
        api.unpatch()
        # another torch, and one whose agent is another
        import torch
        version, torch.__version__ = torch.__version__, '2.14.0'
        for change in (lambda: None, lambda: setattr(torch, '__version__', version)):
            change()
            if torch.__version__ == version:
                saved, Agent._invoke_run = Agent._invoke_run, lambda self: None
            try:
                api.patch_torch_methods()
            except api.UnknownTorch as error:
                assert 'nothing was changed' in str(error), error
                assert not api.patched()
            else:
                raise AssertionError('patched')
        Agent._invoke_run = saved
        api.patch_torch_methods()
        assert api.patched()
        print('good')
        """
    )
    assert done.stdout.strip() == "good", done.stderr


WORKER = """
import os, sys, time
rank, folder = os.environ["RANK"], sys.argv[1]
again = os.environ.get("RESTART_FAULT_PROCESS_TYPE") == "worker"
whole = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
open(f"{folder}/started", "a").write(f"{rank} {'again' if again else 'first'} {whole}\\n")
if rank == "1" and not again and not whole:
    sys.exit(3)
if rank == "1":
    open(f"{folder}/go", "w").close()
end = time.monotonic() + 60
while not os.path.exists(f"{folder}/go"):  # waits for the word, as a MindIO processor does
    if time.monotonic() > end:
        sys.exit(9)
    time.sleep(0.02)
"""


def torchrun(
    tmp_path, controller, source: str = "", options: str = "'--no-python', {sys!r}", **env: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    (tmp_path / "worker.py").write_text(source or WORKER)
    words = options.format(sys=sys.executable)
    done = python(
        f"""
        import logging, mindx_elastic.api
        logging.basicConfig(level=logging.WARNING)
        from torch.distributed.run import main
        main(['--nproc-per-node', '4', '--standalone', '--monitor-interval', '0.05',
              {words}, {str(tmp_path / "worker.py")!r}, {str(tmp_path)!r}])
        """,
        MINDX_TASK_ID="torch-job",
        MINDX_SERVER_IP=controller.address,
        ELASTIC_PROCESS_RECOVER_ENABLE="1",
        OMP_NUM_THREADS="1",
        TMPDIR=str(tmp_path),  # torchrun leaves its log folder
        **env,
    )
    return done, sorted((tmp_path / "started").read_text().splitlines())


SESSION = """
import os, sys, torch
from phalanx import training
folder = sys.argv[1]
with training.session(backend="gloo") as job:
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    job.protect(model=net, optim=optim)
    open(f"{folder}/started", "a").write(f"{job.rank} {os.getpid()}\\n")
    for step in job.steps(8):
        with step:
            if job.rank == 1 and int(step) == 3 and not os.path.exists(f"{folder}/died"):
                open(f"{folder}/died", "w").close()
                os.kill(os.getpid(), 9)
            optim.zero_grad()
            net(torch.ones(2, 4)).sum().backward()
            optim.step()
    open(f"{folder}/ended", "a").write(f"{job.rank} {os.getpid()}\\n")
"""


def outcome(controller) -> str:
    import grpc
    from compat.harness import Raw

    from phalanx.proto import control_pb2

    raw = Raw(grpc.insecure_channel(controller.address))
    (view,) = raw("Jobs", control_pb2.Query(jobId="torch-job")).jobs
    return view.lastOutcome


def test_only_the_dead_rank_is_restarted(tmp_path):
    with Controller("--strategies", "recover-in-place,dump") as controller:
        done, started = torchrun(tmp_path, controller, ENABLE_RESTART_FAULT_PROCESS="on")
        assert done.returncode == 0, done.stderr
        assert started == [
            "0 first False",
            "1 again False",
            "1 first False",
            "2 first False",
            "3 first False",
        ]
        assert outcome(controller) == "recover-in-place succeeded"
        assert "restarted only local ranks (1,)" in done.stderr


def test_without_leave_the_whole_group_restarts_and_the_log_says_why(tmp_path):
    with Controller("--strategies", "recover-in-place,dump") as controller:
        done, started = torchrun(tmp_path, controller)
        assert done.returncode == 0, done.stderr
        assert len(started) == 8 and sum("True" in line for line in started) == 4
        assert outcome(controller) == "exit"
        assert "in place was not offered: ENABLE_RESTART_FAULT_PROCESS is not on" in done.stderr


DDP = """
import os, sys, torch
import torch.distributed as dist
folder, rank = sys.argv[1], os.environ["RANK"]
whole = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
open(f"{folder}/started", "a").write(f"{rank} {whole}\\n")
for step in range(8):
    if rank == "1" and step == 3 and not whole:
        os.kill(os.getpid(), 9)
    net(torch.ones(2, 4)).sum().backward()
"""


@slow
@pytest.mark.parametrize("in_place", ["off", "on"])
def test_plain_ddp_restarts_as_a_whole_and_the_log_says_why(tmp_path, in_place):
    with Controller("--strategies", "recover-in-place,dump") as controller:
        done, started = torchrun(
            tmp_path, controller, DDP, "'--tee', '0'", ENABLE_RESTART_FAULT_PROCESS=in_place
        )
        assert done.returncode == 0, done.stderr
        assert sum("True" in line for line in started) == 4, started
        assert outcome(controller)
    assert "restarting the whole group" in done.stderr
    assert "like plain DDP" in done.stderr


@slow
def test_workers_with_a_session_keep_their_processes(tmp_path):
    with Controller("--strategies", "recover-in-place,dump") as controller:
        done, started = torchrun(tmp_path, controller, SESSION, "'--tee', '0'")
        assert done.returncode == 0, done.stderr
        assert outcome(controller) == "recover-in-place succeeded"
    by_rank = {line.split()[0] for line in started}
    assert by_rank == {"0", "1", "2", "3"} and len(started) == 5, started
    ended = (tmp_path / "ended").read_text().splitlines()
    again = [line for line in started if line not in ended]
    assert len(again) == 1 and again[0].startswith("1 "), (started, ended)
    assert "decided by the controller: recover-in-place" in done.stderr
