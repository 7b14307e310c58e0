"""What a program imports, read and not run."""

from __future__ import annotations

import ast
import textwrap
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.process import scan as scanning
from phalanx.process.program import Program
from phalanx.process.scan import careful, quick, scan


@pytest.fixture
def read(tmp_path):
    """Scan a program made of these files; the first is the script."""

    def run(module=None, **files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        if module is not None:
            return scan(Program(("python",), module=module), cwd=str(tmp_path))
        script = f"{next(iter(files))}.py"
        return scan(Program(("python", script), script=script), cwd=str(tmp_path))

    return run


SOURCE = """
    import os, sys as system
    import torch.nn.functional as F, json
    from torch import optim, Tensor
    from typing import (
        TYPE_CHECKING,  # a comment
        Any,
    )
    if TYPE_CHECKING:
        import pandas
    else:
        import numpy
    try:
        import fast
    except ImportError:
        import slow
    def f():
        import deferred
    class C:
        import classy
    with open("x") as file:
        import within
    match 1:
        case 1:
            import matched
"""


def test_imports(read):
    found = read(train=SOURCE)
    assert found.imports == {
        *("os", "sys", "torch", "json", "typing", "numpy", "fast", "slow", "deferred"),
        *("classy", "within", "matched"),
    }
    assert "torch.nn.functional" in found.dotted
    assert "torch.Tensor" not in found.dotted
    assert "deferred" not in found.direct and "classy" in found.direct
    assert found.certain[-2:] == ("classy", "within") and "fast" not in found.certain
    assert found.uses_optimizer
    assert found.problem is None and found.complete
    assert found.lines["torch"] == 3


def test_both_readers_agree_on_usual_code():
    text = textwrap.dedent(SOURCE)
    exact = {(i.name, i.member) for i in careful(ast.parse(text))}
    assert {(i.name, i.member) for i in quick(text.encode())} == exact


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("import a.b, c as d", ["a.b", "c"]),
        ("from . import a", [".a"]),
        ("from .a import b as c, d", [".a", ".a.b", ".a.d"]),
        ("from ..a.b import *", ["..a.b"]),
        ("from a import (b,\n  c,\n)", ["a", "a.b", "a.c"]),
        ("from a import b, \\\n    c", ["a", "a.b", "a.c"]),
        ("import a, \\\n b", ["a", "b"]),
        ("import a; import b", ["a"]),
        ("from a import b; c()", ["a", "a.b"]),
        ("import a  # and b", ["a"]),
        ("important = 1", []),
        ("x = 'import a'", []),
        ("from the start it was important", []),
        ("# import a", []),
        ("import a as", ["a"]),
        ("from a import 3", ["a"]),
        ("if TYPE_CHECKING:\n    import a\n\n    import b\nimport c", ["c"]),
        ("if typing.TYPE_CHECKING:\n    import a\nelse:\n    import b", ["b"]),
    ],
)
def test_quick(line, names):
    assert [found.name for found in quick(line.encode())] == names


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("import torch\nopt = torch.optim.SGD(p)", True),
        ("from torch.optim import AdamW", True),
        ("from torch import optim", True),
        ("import torch\ntorch.ones(1)", False),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", True),
        ("from transformers import Trainer", True),
        ("import lightning as L", True),
        ("optimal = 1", False),
    ],
)
def test_optimizer(text, uses, read):
    assert read(train=text).uses_optimizer is uses


def test_follows_local_modules(read):
    found = read(
        train="import helper\nfrom package.deep import thing\nfrom package import sibling",
        helper="import torch\nimport train",
        package__in____init__="import numpy",
        package__in__deep__in____init__="from . import inner\nfrom .. import above",
        package__in__deep__in__inner="import scipy",
        package__in__above="from .cousin import x",
        package__in__cousin="import sklearn",
        package__in__sibling="import pandas",
        unrelated="import jax",
    )
    assert found.local == {"helper", "package", "train"}
    wanted = {"torch", "numpy", "scipy", "sklearn", "pandas"}
    assert wanted <= found.imports and "jax" not in found.imports
    assert len(found.files) == len(set(found.files)) == 8


def test_local_modules_shadow(read):
    found = read(train="import datasets, torch", datasets="import json")
    assert "datasets" in found.local and "torch" not in found.local


def test_a_folder_without_init_gives_way_to_an_installed_package(read, tmp_path):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "part.py").write_text("import torch")
    found = read(train="import numpy\nimport mine.part")
    assert found.local == {"mine"}
    assert "torch" in found.imports


def test_module(read, tmp_path):
    found = read(
        module="package.main",
        package__in____init__="",
        package__in__main="from . import other\nfrom .other import x\nimport beside",
        package__in__other="import torch",
        beside="import numpy",
    )
    assert found.main == str(tmp_path / "package" / "main.py")
    assert found.first_path == str(tmp_path)
    assert {"torch", "numpy"} <= found.imports
    found = read(
        module="runs", runs__in____main__="from . import part", runs__in__part="import scipy"
    )
    assert "scipy" in found.imports


def test_installed_module_is_not_followed_far(read):
    found = read(module="json.tool")
    assert found.main.endswith("json/tool.py") and len(found.files) < 8
    assert read(module="nowhere.to.be.found").problem.kind == "missing"


def test_script_through_a_link(read, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").write_text("import helper")
    (tmp_path / "real" / "helper.py").write_text("import torch")
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "train.py")
    found = scan(Program(("python",), script="link.py"), cwd=str(tmp_path))
    assert found.first_path == str(tmp_path / "real")
    assert "torch" in found.imports


def test_folder_with_main(read, tmp_path):
    read(program__in____main__="import numpy, beside", program__in__beside="import torch")
    found = scan(Program(("python",), script="program"), cwd=str(tmp_path))
    assert {"numpy", "torch"} <= found.imports
    assert found.first_path == str(tmp_path / "program")


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ('os.environ["A"] = "1"', [("A", "1", False, 1)]),
        ("environ['A'] = '1'  # why", [("A", "1", False, 1)]),
        ('\nos.environ.setdefault("A", "1")', [("A", "1", True, 2)]),
        ('os.environ["A"] = str(1)', [("A", None, False, 1)]),
        ('os.environ["A"] = "1" if x else "2"', [("A", None, False, 1)]),
        ('if x:\n    os.environ["A"] = "1"', [("A", None, False, 2)]),
        ('os.environ["A"] == "1"', []),
        ('x = os.environ["A"]', []),
        ('# os.environ["A"] = "1"', []),
    ],
)
def test_settings(text, settings, read):
    found = read(train=text).settings
    assert [(s.name, s.value, s.default, s.line) for s in found] == settings


def test_settings_of_local_modules_count_from_their_import(read):
    found = read(train="import json\nimport setup", setup='import os\nos.environ["A"] = "1"')
    (setting,) = found.settings
    assert (setting.value, setting.line, setting.where) == (None, 2, "setup.py, line 2")


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("sys.path.insert(0, 'x')", True),
        ("sys.path.append('x')", True),
        ("sys.path = []", True),
        ("sys.path += ['x']", True),
        ("sys.path[:0] = ['x']", True),
        ("print(sys.path)", False),
        ("sys.path == x", False),
    ],
)
def test_search_path(text, changes, read):
    assert read(train=text).changes_path is changes


def test_problems(read, tmp_path):
    found = read(train="import torch\nx = (\n")
    assert found.problem.kind == "syntax" and found.problem.line == 2
    assert "train.py, line 2" in str(found.problem)
    assert "torch" in found.imports
    missing = scan(Program(("python",), script=str(tmp_path / "nix.py")))
    assert missing.problem.kind == "missing" and "nix.py" in str(missing.problem)
    (tmp_path / "loop.py").symlink_to("loop.py")
    assert scan(Program(("python",), script=str(tmp_path / "loop.py"))).problem is not None
    (tmp_path / "nothing").mkdir()
    assert scan(Program(("python",), script=str(tmp_path / "nothing"))).problem.kind == "missing"


def test_not_python():
    assert scan(Program(("bash", "-c", "true"))) == scanning.ImportScan()


def test_bounds(read, monkeypatch):
    monkeypatch.setattr(scanning, "MAX_FILES", 5)
    chain = {f"m{n}": f"import m{n + 1}" for n in range(20)}
    found = read(**chain)
    assert len(found.files) == 5 and not found.complete
    monkeypatch.setattr(scanning, "MAX_BYTES", 100)
    found = read(train="import big", big="#" * 200)
    assert found.files[0].endswith("train.py") and len(found.files) == 1 and not found.complete
    assert read(train="#" * 200).problem.kind == "unreadable"


def test_deep_nesting_is_no_crash(read):
    assert read(train="x = " + "(" * 5000).problem is not None
    assert read(train="x = " + "-" * 20000 + "1") is not None


def test_speed(read):
    lines = "".join(f"x{n} = f(a, b[{n}], c={n}) + d.e.f(lambda y: y + {n})\n" for n in range(500))
    read(train="import torch\n" + lines)
    best = min(timed(lambda: read(train="import torch\n" + lines)) for _ in range(3))
    assert best < 0.5  # seconds; it takes some hundredths


def timed(act):
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "any.py"
    file.write_bytes(data)
    scan(Program(("python",), script=str(file)))


PIECES = ["import ", "from ", "torch", ".", ",", "(", ")", "\n", "    ", " as ", "*", "\\\n", "#"]


@settings(deadline=None)
@given(st.lists(st.sampled_from([*PIECES, "if TYPE_CHECKING:", "os.environ['A'] = 'b'"])))
def test_any_imports(tmp_path_factory, pieces):
    file = tmp_path_factory.getbasetemp() / "any.py"
    file.write_text("".join(pieces))
    found = scan(Program(("python",), script=str(file)))
    assert all(name and ".." not in name and not name.startswith(".") for name in found.dotted)
