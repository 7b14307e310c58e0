"""The patched agent's tick as a table, reset.json, and the parts that need no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindx_elastic._decide import LIMIT, Action, Look, Reset, decide, parse_reset, read_reset

SRC = Path(__file__).parents[2] / "mindx_elastic" / "src"
MINE = (0, 1)


@pytest.mark.parametrize(
    ("look", "action", "ranks"),
    [
        (Look(killed=True, failed=(1,), mine=MINE), Action.KILL, ()),
        (Look(reset=Reset(graceful=True), mine=MINE), Action.LEAVE, ()),
        (
            Look(reset=Reset(faults=(1, 5), restart_process=True), mine=MINE, in_place=True),
            Action.RESTART_RANKS,
            (1,),
        ),
        (Look(reset=Reset(faults=(1,), restart_process=True), mine=MINE), Action.KILL, (1,)),
        (Look(reset=Reset(faults=(1,)), mine=MINE, in_place=True), Action.KILL, (1,)),
        (Look(reset=Reset(faults=(1,), flushing=True), mine=MINE), Action.KEEP, ()),
        (Look(reset=Reset(faults=(1,)), before=Reset(faults=(1,)), mine=MINE), Action.KEEP, ()),
        (Look(reset=Reset(faults=(7,)), mine=MINE), Action.KEEP, ()),
        (Look(reset=Reset(retry=2), before=Reset(retry=1), mine=MINE), Action.RESTART_ALL, ()),
        (
            Look(reset=Reset(retry=2, unrecovered=True), before=Reset(retry=1), mine=MINE),
            Action.KEEP,
            (),
        ),
        (Look(reset=Reset(recovered=True), mine=MINE), Action.RESTART_ALL, ()),
        (Look(all_done=True, mine=MINE), Action.SUCCEED, ()),
        (Look(failed=(1,), mine=MINE), Action.RECOVER, (1,)),
        (Look(mine=MINE), Action.KEEP, ()),
    ],
)
def test_a_tick(look, action, ranks):
    assert decide(look)[:2] == (action, ranks)


def test_the_controllers_reset_file_is_understood(tmp_path):
    pytest.importorskip("grpc")
    from phalanx.controller.resetfile import ResetFiles

    files = ResetFiles(tmp_path)
    path = str(tmp_path / "j" / "reset.json")
    files.write("j", "flushing")
    assert read_reset(path).flushing
    files.write("j", "faults", (3, 1), True)
    assert read_reset(path) == Reset(faults=(1, 3), restart_process=True)
    files.write("j", "restart")
    assert read_reset(path) == Reset(retry=1)


@settings(deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=50).map(str.encode),
        st.recursive(
            st.one_of(st.none(), st.integers(), st.text(max_size=5)),
            lambda c: (
                st.lists(c, max_size=3)
                | st.dictionaries(st.sampled_from(["RankList", "RankId", "RetryTime", "Status"]), c)
            ),
        ).map(lambda v: json.dumps(v).encode()),
    )
)
def test_any_bytes_are_a_reset_or_nothing(data):
    assert isinstance(parse_reset(data), Reset)


def test_files_that_are_not_read(tmp_path):
    good = tmp_path / "good"
    good.write_text('{"RetryTime": 3}')
    assert read_reset(str(good)).retry == 3
    (tmp_path / "link").symlink_to(good)
    (tmp_path / "large").write_bytes(b" " * LIMIT + b'{"RetryTime": 3}')
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "large", "fifo", "nothing"):
        assert read_reset(str(tmp_path / name)) == Reset(), name


def test_old_names_are_there():
    pytest.importorskip("grpc")
    import mindx_elastic
    from mindx_elastic import recover_manager

    assert mindx_elastic.__version__
    for name in recover_manager.__all__:
        assert getattr(recover_manager, name)
    info = recover_manager.pb.ClientInfo(taskId="j", role="r", ip="1.2.3.4", port="8")
    assert (info.jobId, info.role) == ("j", "r")
    with pytest.raises(ValueError, match="give one"):
        recover_manager.pb.ClientInfo(jobId="a", taskId="b")


def test_it_refuses_to_stand_beside_the_vendors(tmp_path):
    place = tmp_path / "site-packages"
    (place / "mindx_elastic-6.0.0.dist-info").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", "import mindx_elastic"],
        env={**os.environ, "PYTHONPATH": f"{SRC}:{place}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1 and "pip uninstall mindx_elastic" in done.stderr


def test_the_pth_file(tmp_path, monkeypatch, capsys):
    from phalanx.cli import mindx

    monkeypatch.setattr(mindx, "_folder", lambda: tmp_path)
    assert mindx.main(["status"]) == 0 and "disabled" in capsys.readouterr().out
    assert mindx.main(["enable"]) == 0 and mindx.main(["enable"]) == 0
    line = (tmp_path / mindx.NAME).read_text()
    # with and without the package
    for place, wanted in ((str(SRC), "True"), (str(tmp_path), "False")):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"{line}\nimport sys; print('mindx_elastic.api' in sys.modules)",
            ],
            env={**os.environ, "PYTHONPATH": place},
            capture_output=True,
            text=True,
            timeout=30,
            cwd=tmp_path,
        )
        assert done.stdout.strip() == wanted, done.stderr
    assert mindx.main(["disable"]) == 0 and not (tmp_path / mindx.NAME).exists()
    assert mindx.main(["disable"]) == 0


def test_importing_the_api_does_not_import_torch_or_grpc():
    code = (
        "import sys, mindx_elastic.api\nprint([n for n in ('torch', 'grpc') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def config_of(**more):
    """What torchrun makes of its command line, as far as it matters here."""
    from types import SimpleNamespace

    made = {
        "max_nodes": 1, "nproc_per_node": 4, "max_restarts": 7, "monitor_interval": 0.5,
        "role": "default", "run_id": "r", "rdzv_backend": "c10d", "rdzv_endpoint": "",
        "local_addr": None, "log_line_prefix_template": None, "logs_specs": None,
    }  # fmt: skip
    return SimpleNamespace(**{**made, **more})


@pytest.fixture
def session(tmp_path):
    (tmp_path / "train.py").write_text("from phalanx import training\n")
    (tmp_path / "plain.py").write_text("import json\n")
    return tmp_path


def test_a_program_with_a_session_is_run_by_our_own_agent(session, monkeypatch):
    from mindx_elastic import _own

    monkeypatch.setenv("PHALANX_RESET_FILE", str(session / "none"))
    monkeypatch.setenv("PHALANX_CONTROLLER_TOKEN", "t")

    def job(program: str, **more):
        line = _own.words(config_of(**more), sys.executable, ["-u", str(session / program), "-x"])
        assert line is not None
        return _own.job_config(line, ("c:1",), "task", 30.0)

    assert job("plain.py") is None
    made = job("train.py", rdzv_backend="static", rdzv_endpoint="127.0.0.1:29511")
    assert made.program.script == str(session / "train.py") and made.program.args == ("-x",)
    assert (made.nproc, made.max_restarts, made.run_id, made.master_port) == (4, 7, "r", 29511)
    asked = made.controller
    assert (asked.addresses, asked.timeout, asked.job, asked.token) == (("c:1",), 30.0, "task", "t")


def test_no_option_of_torchrun_is_lost_on_the_way(session, monkeypatch):
    """What torchrun's own parser makes of all its options arrives as if we had parsed them."""
    pytest.importorskip("torch")
    from mindx_elastic import _own
    from torch.distributed import run as torchrun

    from phalanx.cli.options import parse
    from phalanx.cli.run import config_from

    monkeypatch.setenv("PHALANX_RESET_FILE", str(session / "none"))
    words = [
        "--nproc-per-node", "2", "--max-restarts", "4", "--monitor-interval", "0.25",
        "--role", "r", "--rdzv-id", "j", "--log-dir", str(session), "--redirects", "0:1",
        "--tee", "3", "--local-ranks-filter", "0,1", "--duplicate-stdout-filters", "a,,b,c",
        "--duplicate-stderr-filters", "d", "--signals-to-handle", "SIGTERM,SIGUSR1",
        "--virtual-local-rank", "--shutdown-timeout", "7", "--event-log-handler", "console",
        "--local-addr", "127.0.0.2",
        "--numa-binding", "node", str(session / "train.py"), "--lr", "1",
    ]  # fmt: skip
    config, entrypoint, args = torchrun.config_from_args(torchrun.parse_args(words))
    line = _own.words(config, entrypoint, args)
    assert line is not None
    ours = config_from(parse(line, {}))
    assert ours == config_from(parse(words, {})), line


def test_the_rest_stays_with_torchs_agent(session, monkeypatch):
    from mindx_elastic import _own

    monkeypatch.setenv("PHALANX_RESET_FILE", str(session / "none"))
    script = ["-u", str(session / "train.py")]
    assert _own.words(config_of(), sys.executable, script)
    assert _own.words(config_of(max_nodes=2), sys.executable, script) is None
    assert _own.words(config_of(), print, []) is None
    assert _own.words(config_of(), "/bin/true", []) is None
    assert _own.words(config_of(logs_specs=object()), sys.executable, script) is None
    monkeypatch.setenv("PHALANX_RESET_FILE", str(session / "train.py"))
    assert _own.words(config_of(), sys.executable, script) is None
