"""Time stamps of a worker; imported first, so it imports next to nothing."""

import os
import time

began = time.time_ns()
RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
_out = os.open(
    f"{os.environ['BENCH_OUT']}/worker.{os.getpid()}.jsonl",
    os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    0o644,
)


def stamp(name: str, at: int | None = None, **more: int) -> None:
    extra = "".join(f', "{k}": {v}' for k, v in more.items())
    line = f'{{"ev": "{name}", "t": {at or time.time_ns()}, "rank": {RANK}, "attempt": {ATTEMPT}'
    os.write(_out, f"{line}{extra}}}\n".encode())


stamp("first_line", began)
