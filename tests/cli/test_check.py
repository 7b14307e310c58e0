"""``phalanx check``."""

from __future__ import annotations

import json
import os
import sys
import textwrap

import pytest

from phalanx.cli import check
from phalanx.process.scan import ImportScan


@pytest.fixture
def look(tmp_path, monkeypatch, capsys):
    """Write a script, check it: (status, what was printed; an object with ``--json``)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHON_EXEC", raising=False)

    def run(source=None, *words, **others):
        for name, text in {"train": source, **others}.items():
            if text is not None:
                (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        status = check.main([*words, "train.py"])
        out = capsys.readouterr().out
        return status, json.loads(out) if "--json" in words else out

    return run


def test_words(capsys):
    assert check.main(["--help"]) == 0
    assert "--preload" in capsys.readouterr().out
    assert check.main([]) == 2
    assert check.main(["--js", "x.py"]) == 2, "no abbreviations"
    assert check.main(["--timeout", "soon", "x.py"]) == 2


def test_missing_script(look):
    status, out = look(None)
    assert status == 1
    assert "PROBLEM" in out and "train.py: no such file" in out


def test_missing_module(capsys):
    assert check.main(["-m", "nowhere.at.all"]) == 1
    assert "nowhere.at.all" in capsys.readouterr().out


def test_only_reading(look):
    status, out = look("import torch, something_missing", "--no-import", "--json")
    assert status == 0 and out["ok"] and out["warm"] is None
    assert out["plan"]["modules"] == ["torch"] and out["report"] is None
    status, out = look("import torch\nx = (", "--no-import")
    assert status == 1 and "train.py, line 2" in out


@pytest.mark.process
def test_nothing_to_preload(look):
    status, out = look("import json", "--json")
    assert status == 0
    assert (out["ok"], out["warm"], out["problems"]) == (True, False, [])
    assert out["plan"]["modules"] == [] and "nothing" in out["why"]
    assert list(out["strategies"]) == ["restart"]
    assert out["interpreter"] == sys.executable


@pytest.mark.process
def test_syntax(look):
    status, out = look("import os\ndef f(:\n", "--json")
    assert status == 1
    assert len(out["problems"]) == 1 and "train.py, line 2" in out["problems"][0]


@pytest.mark.process
def test_imports_that_cannot_be_found(look):
    status, out = look(
        """
        import gone
        try:
            import quick_variant
        except ImportError:
            pass
        import helper
        """,
        "--json",
        helper="import gone_too",
    )
    assert status == 1
    assert out["problems"] == ["there is no module gone, which the script imports"]
    assert [n.split(";")[0] for n in out["notes"] if "no module" in n] == [
        "there is no module gone_too",
        "there is no module quick_variant",
    ]


@pytest.mark.process
def test_not_safe_to_fork(look):
    status, out = look(
        "import mine", "--preload", "auto", "--json", mine="import os\npipe = os.pipe()"
    )
    assert status == 0, "it runs, with fresh interpreters"
    assert out["warm"] is False and "pipe" in out["why_not"]
    assert "fresh" in out["strategies"]["restart"]
    status, text = look("import mine", "--preload", "mine", mine="import os\npipe = os.pipe()")
    assert "no: imports opened a descriptor" in text


@pytest.mark.process
def test_import_that_fails_or_kills(look):
    status, out = look("import mine", "--preload", "auto", "--json", mine="1 / 0")
    assert status == 1
    assert out["problems"] == ["import mine: ZeroDivisionError: division by zero"]
    status, out = look("import mine", "--preload", "auto", "--json", mine="import os; os.abort()")
    assert status == 1 and "status -6" in out["problems"][0]


@pytest.mark.process
def test_import_without_end(look):
    status, out = look(
        "import mine",
        *("--preload", "auto", "--timeout", "1", "--json"),
        mine="import threading; threading.Event().wait()",
    )
    assert status == 1 and out["problems"] == ["the imports did not end within 1 s"]


@pytest.mark.process
def test_other_interpreter(look, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHON_EXEC", str(tmp_path / "python9"))
    status, out = look("import json", "--json")
    assert status == 1 and "python9: No such file" in out["problems"][0]
    (tmp_path / "python9").write_text("#!/bin/sh\necho ModuleNotFoundError: phalanx >&2; exit 1\n")
    os.chmod(tmp_path / "python9", 0o755)
    status, out = look("import json", "--json")
    assert status == 1 and "phalanx is not installed there" in out["problems"][0]


def test_program_that_takes_part(look):
    status, out = look(
        "import torch\nimport phalanx.training\ntorch.optim.SGD", "--no-import", "--json"
    )
    assert status == 0, out
    assert out["plan"]["optimizer_step"] and out["plan"]["modules"][0] == "torch"
    assert list(out["strategies"]) == ["restart", "retry", "recover-in-place", "dump"]


def test_untested_torch(monkeypatch):
    answer = {
        "report": {"imported": ["torch"]},
        "measured": {},
        "syntax": "",
        "missing": [],
        "torch": "1.9.0",
    }

    class Done:
        stdout = json.dumps(answer)

    monkeypatch.setattr(check.subprocess, "run", lambda *args, **kind: Done)
    findings = check.Findings("x", "python")
    check._try(findings, ImportScan(), check.PreloadPlan(("torch",)), 1)
    assert "torch 1.9.0 is not a version" in findings.notes[0]


def test_machine(monkeypatch):
    class Small:
        f_bavail, f_frsize = 10, 4096

    import resource

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    findings = check.Findings("x", "python")
    check._machine(findings, ImportScan(imports=frozenset({"torch"})))
    assert [n.split(" ", 3)[:3] for n in findings.notes] == [
        ["/dev/shm", "has", "0"],
        ["at", "most", "1024"],
        ["memory", "that", "may"],
    ]
