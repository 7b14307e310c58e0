from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `python -c code args`; killed at the end if still there."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *args: object, **options: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


@pytest.fixture
def wait_for() -> Callable[[Callable[[], object], float], None]:
    """Waits until something is true; for what tells nobody when it becomes so."""

    def wait(condition: Callable[[], object], timeout: float = 10.0) -> None:
        pause = threading.Event()
        for _ in range(int(timeout / 0.005)):
            if condition():
                return
            pause.wait(0.005)
        raise AssertionError(f"not within {timeout} s: {condition}")

    return wait
