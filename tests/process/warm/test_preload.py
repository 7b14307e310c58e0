"""What to preload, and whether one may fork afterwards."""

from __future__ import annotations

import json
import textwrap

import pytest

from phalanx.process.preload import PreloadPlan, PreloadReport, plan_for, unlike
from phalanx.process.program import Program
from phalanx.process.scan import ImportScan, Setting, scan


def scanned(*imports, **kind):
    tops = frozenset(name.partition(".")[0] for name in imports)
    lines = dict.fromkeys(tops, 10)
    return ImportScan(imports=tops, dotted=frozenset(imports), direct=imports, lines=lines, **kind)


@pytest.mark.parametrize(
    ("found", "modules"),
    [
        (scanned("os", "json"), ()),
        (scanned("numpy"), ("numpy",)),
        (scanned("numpy", "torch"), ("torch", "numpy")),
        (
            scanned("torch", "torch.nn", "torch.distributed.fsdp"),
            ("torch", "torch.distributed.fsdp", "torch.nn"),
        ),
        (scanned("torch", "torch.utils.tensorboard"), ("torch",)),
        (scanned("transformers"), ("torch", "transformers")),
        (scanned("deepspeed", "jax"), ()),
        (scanned("torch", local=frozenset({"torch"})), ()),
        (scanned("datasets", "torch", local=frozenset({"datasets"})), ("torch",)),
        (scanned("datasets", "torch", changes_path=True), ("torch",)),
    ],
)
def test_modules(found, modules):
    assert plan_for(found).modules == modules


def test_optimizer_step_only_with_torch():
    assert plan_for(scanned("torch", uses_optimizer=True)).optimizer_step
    assert not plan_for(scanned("torch")).optimizer_step
    assert not plan_for(scanned("numpy", uses_optimizer=True)).optimizer_step


def test_named_and_automatic():
    assert plan_for(scanned("os"), extra=["mine"]).modules == ("mine",)
    assert plan_for(scanned("os", "mine.part"), auto=True).modules == ("os", "mine.part")
    assert plan_for(scanned("os"), extra=["os"], auto=True).modules == ("os",)


@pytest.mark.parametrize(
    ("setting", "modules", "environment"),
    [
        (
            Setting("OMP_NUM_THREADS", "4", False, 1, ""),
            ("torch",),
            (("OMP_NUM_THREADS", "4", False),),
        ),
        (
            Setting("OMP_NUM_THREADS", "4", True, 1, ""),
            ("torch",),
            (("OMP_NUM_THREADS", "4", True),),
        ),
        (Setting("OMP_NUM_THREADS", None, False, 1, ""), (), ()),
        (Setting("OMP_NUM_THREADS", None, False, 11, ""), ("torch",), ()),
        (Setting("TORCH_LOGS", None, False, 1, ""), (), ()),
        (Setting("HF_HOME", None, False, 1, ""), ("torch",), ()),
        (Setting("MASTER_ADDR", None, False, 1, ""), ("torch",), ()),
        (Setting("MASTER_ADDR", "x", False, 1, ""), ("torch",), ()),
    ],
)
def test_variables_that_imports_read(setting, modules, environment):
    plan = plan_for(scanned("torch", settings=(setting,)))
    assert plan.modules == modules
    assert plan.environment == environment
    if not modules:
        assert setting.name in plan.why


def test_why_is_one_line():
    for found in (scanned("os"), scanned("torch", uses_optimizer=True)):
        why = plan_for(found).why
        assert why and "\n" not in why


def test_json():
    plan = PreloadPlan(("a", "b"), True, "why", "/x", (("K", "v", True),))
    assert PreloadPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    report = PreloadReport(("a",), {"b": "no"}, False, "because", 1.5, "text")
    assert PreloadReport.from_json(json.loads(json.dumps(report.to_json()))) == report


@pytest.mark.parametrize("kind", [PreloadPlan, PreloadReport])
@pytest.mark.parametrize(
    "data",
    [
        *(None, [], "x", {"nix": 1}, {"modules": 3}, {"modules": [1]}, {"imported": [[]]}),
        *({"environment": [["a"]]}, {"environment": [["a", 1, 2]]}, {"failed": [1]}),
        *({"why": 1}, {"why_not": None}, {"seconds": "x"}, {"first_path": 1}),
    ],
)
def test_malformed_json(kind, data):
    with pytest.raises(ValueError, match="not a Preload"):
        kind.from_json(data)


def test_environments_that_differ_too_late():
    ours = {"A": "1", "OMP_NUM_THREADS": "1", "LANG": "C", "RANK": "0"}
    assert unlike(ours, {**ours, "RANK": "1", "B": "2"}) == []
    assert unlike(ours, {"A": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "2"}) == [
        "LANG",
        "OMP_NUM_THREADS",
        "PYTHONHASHSEED",
    ]


# ---------------------------------------------------------------------------------------
# In a keeper
# ---------------------------------------------------------------------------------------


@pytest.fixture
def perform(tmp_path, base_env, mini_keeper):
    def run(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        plan = PreloadPlan(tuple(modules), first_path=str(tmp_path))
        return mini_keeper(plan, base_env)

    return run


@pytest.mark.process
def test_failing_imports_are_reported(perform):
    report = perform(
        fine="",
        raises="1 / 0",
        leaves="import sys; sys.exit(3)",
        wants="import something_missing",
        broken="def",
    ).report
    assert report.imported == ("fine",)
    assert report.failed["raises"] == "ZeroDivisionError: division by zero"
    assert report.failed["leaves"] == "SystemExit: 3"
    assert report.failed["wants"].startswith("ModuleNotFoundError: No module named")
    assert report.failed["broken"].startswith("SyntaxError: ")
    assert report.safe and report.why_not == ""


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()", "thread"),
        ("import socket; s = socket.socket()", "socket:"),
        ("import os; p = os.pipe()", "pipe:"),
        ("import select; e = select.epoll()", "eventpoll"),
        ("import subprocess; p = subprocess.Popen(['sleep', '60'])", "started a process"),
        ("import os; os.register_at_fork(after_in_child=lambda: os._exit(3))", "forked child died"),
    ],
)
def test_unsafe_imports(text, why, perform):
    keeper = perform(module=text)
    assert not keeper.report.safe
    assert why in keeper.report.why_not and "\n" not in keeper.report.why_not
    keeper.sweep()


@pytest.mark.process
@pytest.mark.parametrize(
    "text",
    [
        "import threading; t = threading.Thread(target=int); t.start(); t.join()",
        "import os; f = os.open('/dev/null', os.O_RDONLY)",
        "f = open(__file__)",
        "import subprocess; subprocess.run(['true'])",
    ],
)
def test_safe_imports(text, perform):
    assert perform(module=text).report.safe


@pytest.mark.process
def test_what_imports_do_reaches_the_program(perform, tmp_path, base_env):
    """Variables that imports set are set; what they print is kept; a logger still works."""
    keeper = perform(
        module="""
            import logging, os, signal, sys, warnings
            os.environ["SET_BY_IMPORT"] = "1"
            os.environ["OTHERWISE"] = "import"
            os.environ.pop("OMP_NUM_THREADS")
            print("printed")
            os.write(2, b"written")
            logging.basicConfig(format="%(message)s")
            signal.signal(signal.SIGUSR2, print)
        """
    )
    assert keeper.report.output.split() == ["printed", "written"]
    (tmp_path / "program.py").write_text(
        "import logging, module, os, signal, sys\n"
        "print([os.environ.get(n) for n in ('SET_BY_IMPORT', 'OTHERWISE', 'OMP_NUM_THREADS')])\n"
        "print(signal.getsignal(signal.SIGUSR2) is print)\n"
        "print(logging.root.handlers[0].stream is sys.stderr)\n"
        "logging.error('logged')\n"
    )
    status = keeper.order(
        program={"argv": ["python", "-u", "program.py"], "script": "program.py"},
        env={**base_env, "OTHERWISE": "worker"},
        cwd=str(tmp_path),
        stdio=[("/dev/null", 0), (str(tmp_path / "out"), 0o101), (str(tmp_path / "err"), 0o101)],
        finish=str(tmp_path / "finish"),
    )
    assert status == 0
    assert (tmp_path / "out").read_text() == "['1', 'worker', None]\nTrue\nTrue\n"
    assert (tmp_path / "err").read_text() == "logged\n"


@pytest.mark.process
@pytest.mark.torch
def test_torch(keepers):
    plan = PreloadPlan(("torch", "numpy"), optimizer_step=True)
    report = keepers(plan).report
    assert report.imported == ("torch", "numpy")
    assert report.failed == {} and report.safe, report
    assert report.seconds > 0


def test_scan_and_plan_together(tmp_path):
    (tmp_path / "train.py").write_text(
        'import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport torch\ntorch.optim.SGD\n'
    )
    script = str(tmp_path / "train.py")
    plan = plan_for(scan(Program(("python", script), script=script)))
    assert plan.modules == ("torch",) and plan.optimizer_step
    assert plan.first_path == str(tmp_path)
    assert plan.environment == (("OMP_NUM_THREADS", "1", False),)
