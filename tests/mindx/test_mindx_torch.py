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
    tmp_path, controller, **env: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    (tmp_path / "worker.py").write_text(WORKER)
    done = python(
        f"""
        import logging, mindx_elastic.api
        logging.basicConfig(level=logging.WARNING)
        from torch.distributed.run import main
        main(['--nproc-per-node', '4', '--standalone', '--no-python', '--monitor-interval', '0.05',
              {sys.executable!r}, {str(tmp_path / "worker.py")!r}, {str(tmp_path)!r}])
        """,
        MINDX_TASK_ID="torch-job",
        MINDX_SERVER_IP=controller.address,
        ELASTIC_PROCESS_RECOVER_ENABLE="1",
        OMP_NUM_THREADS="1",
        TMPDIR=str(tmp_path),  # torchrun leaves its log folder
        **env,
    )
    return done, sorted((tmp_path / "started").read_text().splitlines())


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
