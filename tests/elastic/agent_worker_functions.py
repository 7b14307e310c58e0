"""What the workers of test_agent_processes.py do: spawned processes import this module."""

import os
import signal
import sys
import time


def nothing():
    pass


def echo(value):
    return value


def environment(*names):
    return {name: os.environ.get(name) for name in names}


def big():
    return list(range(200_000))


def sad():
    raise RuntimeError("sad because i throw")


def sad_if_odd():
    if int(os.environ["RANK"]) % 2:
        raise RuntimeError("odd")


def killed_at_first():
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def exits_with(code):
    os._exit(code)


def ready_then_sleep(fifo):
    with open(fifo, "w") as told:
        told.write(f"{os.getpid()}\n")
    time.sleep(600)


def timer_runs_out():
    from phalanx.elastic import timer

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        with timer.expires(after=0.2):
            time.sleep(600)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def sum_of_ranks():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(int(os.environ["RANK"]))
    dist.all_reduce(total)
    dist.destroy_process_group()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "FAIL_ONCE" in os.environ:
        os._exit(9)
    return int(total), os.environ["TORCHELASTIC_USE_AGENT_STORE"]


if __name__ == "__main__":
    # As a program: the name of a function above, then its arguments.
    outcome = globals()[sys.argv[1]](*sys.argv[2:])
    if outcome is not None:
        print(outcome, flush=True)
