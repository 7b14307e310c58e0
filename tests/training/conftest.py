"""One preloaded parent for all workers of these tests, and runs to compare with."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _load(name: str) -> Any:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small_agent() -> Any:
    pytest.importorskip("torch")
    return _load("small_agent")


@pytest.fixture(scope="session")
def nursery(small_agent: Any) -> Iterator[Any]:
    nursery = small_agent.Nursery()
    yield nursery
    nursery.close()


class Outcome:
    """What a run left behind."""

    def __init__(self, agent: Any, folder: Path, world: int) -> None:
        self.agent = agent
        self.folder = folder
        self.traces = {}
        self.ends = {}
        for rank in range(world):
            trace = folder / f"trace-{rank}.jsonl"
            lines = trace.read_text().splitlines() if trace.exists() else []
            self.traces[rank] = [json.loads(line) for line in lines]
            end = folder / f"end-{rank}"
            if end.exists():
                self.ends[rank] = json.loads(end.read_text())

    def same_as(self, other: Any) -> None:
        """Every step of every rank, gradients, final weights, to the last bit."""
        for rank, lines in other.traces.items():
            mine = {line["step"]: line for line in self.traces[rank]}
            for line in lines:
                # A rank that died after its update has not written that step down.
                if line["step"] in mine:
                    assert mine[line["step"]] == line, f"rank {rank}"
            missing = {line["step"] for line in lines} - set(mine)
            assert len(missing) <= 1, f"rank {rank} has not written {missing}"
            assert self.ends[rank]["weights"] == other.ends[rank]["weights"], f"rank {rank}"
            assert self.ends[rank]["rate"] == other.ends[rank]["rate"], f"rank {rank}"


@pytest.fixture
def train(small_agent: Any, nursery: Any, tmp_path: Path) -> Iterator[Callable[..., Outcome]]:
    agents = []
    count = 0

    def start(
        world: int = 4,
        *,
        drive: Callable[[Any], None] | None = None,
        timeout: float = 40.0,
        folder: Path | None = None,
        policy: Any = None,
        env: dict[str, str] | None = None,
        standby: bool = False,
        **spec: Any,
    ) -> Outcome:
        nonlocal count
        count += 1
        place = folder or tmp_path / str(count)
        place.mkdir(exist_ok=True)
        agent = small_agent.Agent(
            nursery, world, spec, place, policy=policy, env=env, standby=standby
        )
        agents.append(agent)
        agent.start()
        if drive is not None:
            drive(agent)
        agent.run(timeout)
        return Outcome(agent, place, world)

    yield start
    for agent in agents:
        agent.close()


_undisturbed: dict[str, Outcome] = {}


@pytest.fixture
def undisturbed(
    small_agent: Any, nursery: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Outcome]:
    """The same run without faults; done once per kind."""

    def get(world: int = 4, **spec: Any) -> Outcome:
        spec.pop("faults", None)
        key = json.dumps([world, spec], sort_keys=True)
        if key not in _undisturbed:
            place = tmp_path_factory.mktemp("undisturbed")
            agent = small_agent.Agent(nursery, world, spec, place)
            try:
                agent.start()
                agent.run(40)
                _undisturbed[key] = Outcome(agent, place, world)
            finally:
                agent.close()
        return _undisturbed[key]

    return get
