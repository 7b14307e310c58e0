"""What docs/ says of the agent is what the agent does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from phalanx.agent import exit_codes

ROOT = Path(__file__).resolve().parents[2]
EVENTS = (ROOT / "docs" / "events.md").read_text()


def recorded() -> dict[str, set[str]]:
    """The kinds that the agent records, each with the names of its data."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src" / "phalanx" / "agent").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("events.record")
                and isinstance(node.args[0], ast.Constant)
            ):
                names = {k.arg for k in node.keywords if k.arg}
                found.setdefault(str(node.args[0].value), set()).update(names)
    return found


def rows() -> dict[str, str]:
    table = EVENTS.split("Kinds that the agent writes", 1)[1]
    out = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            kinds, data = line.strip("| ").split(" | ", 1)
            for kind in re.findall(r"`(\w+)`", kinds):
                out[kind] = data
    return out


def test_no_kind_is_missing_and_none_is_made_up() -> None:
    assert set(rows()) == set(recorded())


@pytest.mark.parametrize("kind", sorted(recorded()))
def test_the_data_of_each_kind_is_named(kind: str) -> None:
    missing = {name for name in recorded()[kind] if f"`{name}`" not in rows()[kind]}
    assert missing == set()


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "exit-codes.md").read_text()
    codes = {v for k, v in vars(exit_codes).items() if k.isupper() and isinstance(v, int)}
    first = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| "))
    assert codes - {int(n) for n in re.findall(r"\d+", first)} == set()
