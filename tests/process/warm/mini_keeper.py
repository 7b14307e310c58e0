"""A keeper in a few lines, for tests: forks a warm worker per order and tells its status.

argv: a descriptor to read orders from (JSON lines), one to write answers to, a preload plan.
"""

import json
import os
import signal
import sys

from phalanx.process import bootstrap, preload
from phalanx.process.program import Program


def serve(orders, answers, plan):
    report = preload.perform(preload.PreloadPlan.from_json(plan))
    # What a keeper may have about it: handlers of the package, signals blocked, a wakeup.
    signal.signal(signal.SIGTERM, bootstrap.become)
    signal.signal(signal.SIGINT, bootstrap.become)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.set_wakeup_fd(os.open("/dev/null", os.O_WRONLY | os.O_NONBLOCK))
    os.write(answers, json.dumps(report.to_json()).encode() + b"\n")
    for line in orders:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            orders.close()
            os.closerange(3, 256)
            for fd, (path, flags) in enumerate(order["stdio"]):
                if path is None:
                    os.close(fd)
                else:
                    opened = os.open(path, flags, 0o600)
                    if opened != fd:
                        os.dup2(opened, fd)
                        os.close(opened)
                    os.set_inheritable(fd, True)
            return order
        _, status = os.waitpid(pid, 0)
        os.write(answers, json.dumps(os.waitstatus_to_exitcode(status)).encode() + b"\n")
    return None


def finished(path):
    def write(status):
        with open(path, "a") as file:
            file.write(f"{status}\n")

    return write


found = serve(open(int(sys.argv[1])), int(sys.argv[2]), json.loads(sys.argv[3]))
if found is not None:
    bootstrap.become(
        Program(**found["program"]), found["env"], found["cwd"], finished(found["finish"])
    )
