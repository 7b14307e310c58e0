"""The rooms of docs/architecture.md: arrows point down only, and the pure rooms are pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "phalanx"
WITH_TORCH = {"training", "torch_bridge"}
IMPURE = {
    "asyncio", "ctypes", "fcntl", "glob", "http", "io", "logging", "mmap", "multiprocessing",
    "os", "pathlib", "random", "secrets", "select", "selectors", "shutil", "signal", "socket",
    "socketserver", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time", "urllib",
    "uuid",
}  # fmt: skip


def rows() -> list[list[str]]:
    """The rooms from the top down; those of one row stand side by side."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("## Rooms", 1)[1].split("\n## ", 1)[0]
    found = [re.findall(r"`(\w+)/`", line.split("|")[1]) for line in table.splitlines()
             if line.startswith("| `")]  # fmt: skip
    return [row for row in found if row]


FLOOR = {room: number for number, row in enumerate(rows()) for room in row}
ROOMS = sorted(
    p.name
    for p in SOURCE.iterdir()
    if p.is_dir() and any(f.stat().st_size for f in p.glob("**/*.py"))
)
# They run in a child of the keeper that is to become a worker or the store server.
IN_A_CHILD = {
    ("process/nursery.py", "phalanx.torch_bridge.store_server"),
    ("process/nursery.py", "phalanx.torch_bridge.rehearsal"),
    ("process/preload.py", "torch"),
}


@cache
def parsed(path: Path) -> list[ast.AST]:
    """What of a file matters here."""
    wanted = (ast.If, ast.Import, ast.ImportFrom)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, wanted)]


@cache
def imports(room: str, *, hints: bool) -> list[tuple[str, str]]:
    return list(_imports(room, hints))


def _imports(room: str, hints: bool) -> Iterator[tuple[str, str]]:
    """(where, full name) of all that a room imports, inside functions too.

    Not what is under ``if __name__ == "__main__"``, and unless ``hints`` not what is under
    ``if TYPE_CHECKING``.
    """
    for path in sorted((SOURCE / room).glob("**/*.py")):
        if path.name.endswith("_pb2.py"):
            continue
        nodes = parsed(path)
        skipped: set[ast.AST] = set()
        unseen = ("__main__",) if hints else ("__main__", "TYPE_CHECKING")
        for node in nodes:
            if isinstance(node, ast.If) and any(word in ast.dump(node.test) for word in unseen):
                for one in node.body:
                    skipped.update(ast.walk(one))
        package = ("phalanx", *path.relative_to(SOURCE).parts[:-1])
        for node in nodes:
            if node in skipped:
                continue
            where = str(path.relative_to(SOURCE))
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield where, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
                module = ".".join(filter(None, (base, node.module)))
                for alias in node.names:
                    yield where, f"{module}.{alias.name}"


def test_every_room_is_in_the_architecture() -> None:
    assert set(ROOMS) <= set(FLOOR)
    assert len(FLOOR) > 10


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_down_only(room: str) -> None:
    up = []
    for where, name in imports(room, hints=False):
        parts = name.split(".")
        other = parts[1] if parts[0] == "phalanx" and len(parts) > 1 else None
        if other in FLOOR and FLOOR[other] < FLOOR[room] and (where, name) not in IN_A_CHILD:
            up.append(f"{where} imports {name}")
    assert up == []


@pytest.mark.parametrize("room", [r for r in ROOMS if r not in WITH_TORCH])
def test_torch_is_imported_in_its_rooms_only(room: str) -> None:
    found = {(w, n) for w, n in imports(room, hints=True) if n.split(".")[0] == "torch"}
    assert found - IN_A_CHILD == set()


@pytest.mark.parametrize("room", [r for r in ("recovery", "rendezvous") if r in ROOMS])
def test_decisions_are_pure(room: str) -> None:
    found = [f"{w} imports {n}" for w, n in imports(room, hints=True) if n.split(".")[0] in IMPURE]
    assert found == []
