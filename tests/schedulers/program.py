"""What the schedulers' jobs run: a plain program that counts steps until there is ``enough``.

It says what it is and what it gets in ``$TEST_OUT/said``, one line a happening, and goes on from
its checkpoint. A file ``enough`` ends it, ``fail`` with the exit code that is in it.
"""

import os
import signal
import sys
import time
from pathlib import Path

OUT = Path(os.environ["TEST_OUT"])
RANK, WORLD = os.environ["RANK"], os.environ["WORLD_SIZE"]
HOST = os.uname().nodename
ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"]


def say(what: str) -> None:
    fd = os.open(OUT / "said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{what} {HOST} rank={RANK}/{WORLD} attempt={ATTEMPT}\n".encode())
    os.close(fd)


def told(number: int, _: object) -> None:
    say(signal.Signals(number).name)
    raise SystemExit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, told)
    saved = OUT / f"checkpoint.{RANK}"
    step = int(saved.read_text()) if saved.exists() else 0
    say(f"began-at-{step}")
    while not (OUT / "enough").exists():
        if (OUT / "fail").exists():
            sys.exit(int((OUT / "fail").read_text()))
        step += 1
        (OUT / f"new.{RANK}").write_text(str(step))
        os.replace(OUT / f"new.{RANK}", saved)
        time.sleep(0.02)
    say("ended")


main()
