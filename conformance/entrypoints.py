"""What workers run in the cases. Imported in workers too: nothing here may import torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

# What a worker finds in its environment by contract.
VARIABLES = (
    "LOCAL_RANK RANK GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE"
    " LOCAL_WORLD_SIZE WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT"
    " TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE"
    " TORCH_NCCL_ASYNC_ERROR_HANDLING TORCHELASTIC_ERROR_FILE OMP_NUM_THREADS"
    " TORCHELASTIC_TIMER_FILE CUDA_VISIBLE_DEVICES TORCHELASTIC_SIGNALS_TO_HANDLE"
    " TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_HEALTH_CHECK_PORT"
).split()


def nothing() -> None:
    return None


def echo(value: Any) -> Any:
    return value


def local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def variables(*names: str) -> dict[str, str | None]:
    return {n: os.environ.get(n) for n in (names or VARIABLES)}


def large(size: int) -> list[int]:
    return list(range(size))


def fail(text: str = "sad") -> None:
    raise RuntimeError(text)


def fail_on_rank(rank: int, text: str = "sad") -> str:
    if int(os.environ["RANK"]) == rank:
        raise ValueError(text)
    time.sleep(60)
    return "never"


def fail_first(times: int) -> str:
    """Fails in the first attempts."""
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < times:
        raise ValueError("not yet")
    return "attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"]


def die_first(rank: int, number: int = signal.SIGKILL) -> str:
    """One rank kills itself in attempt 0."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), number)
        time.sleep(60)
    return "attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"]


def leave(code: int) -> None:
    os._exit(code)


def leave_on_rank(rank: int, code: int) -> str:
    if int(os.environ["RANK"]) == rank:
        os._exit(code)
    return "stayed"


def say(out: str, err: str) -> None:
    print(out, flush=True)
    print(err, file=sys.stderr, flush=True)


def sleep_then(seconds: float, value: Any = None) -> Any:
    time.sleep(seconds)
    return value


def drift(seconds: float) -> str:
    """Rank 0 ends at once, the others later."""
    if os.environ["RANK"] != "0":
        time.sleep(seconds)
    return "done"


def overrun_first(after: float, sleep: float) -> str:
    """In attempt 0 rank 0 overruns a timer; uses the client of whoever runs the case."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
        write_timer(time.time() + after)
        time.sleep(sleep)
    return "attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"]


def write_timer(expiration: float, scope: str = "scope", number: int = signal.SIGKILL) -> None:
    """One line of the file timer's wire, by hand."""
    line = json.dumps(
        {
            "version": 1,
            "pid": os.getpid(),
            "scope_id": scope,
            "expiration_time": expiration,
            "signal": int(number),
        }
    )
    deadline = time.monotonic() + 10
    while True:
        try:
            fd = os.open(os.environ["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    os.write(fd, line.encode() + b"\n")
    os.close(fd)


def write_pid(folder: str, name: str = "") -> None:
    target = Path(folder) / (name or os.environ.get("LOCAL_RANK", "0"))
    temporary = target.with_suffix(".new")
    temporary.write_text(str(os.getpid()))
    temporary.rename(target)


def wait_to_be_killed(folder: str) -> None:
    """A worker that does nothing; its pid is in the folder."""
    write_pid(folder)
    time.sleep(60)


def ignore_and_wait(folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_pid(folder)
    time.sleep(60)


def exits(code: int) -> None:
    sys.exit(code)
