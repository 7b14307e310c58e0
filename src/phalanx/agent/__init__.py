"""The agent of ``phalanx run``.

``run_job(config)`` runs one job, or this machine's part of one, to its end and returns the
exit status of docs/exit-codes.md. The keeper is started before anything else is imported here,
so that its imports and ours overlap.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent.config import JobConfig

__all__ = ["run_job"]


def run_job(config: JobConfig) -> int:
    """Run a job; returns the exit status."""
    import signal

    # Nobody is there to take them yet: they wait until JobSignals is installed.
    early = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, early)
    try:
        return _run_job(config)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_job(config: JobConfig) -> int:
    import os

    from phalanx.process.supervisor import Supervisor

    supervisor = Supervisor(
        job=config.run_id,
        python=config.python[:1],
        env={**os.environ, **config.environment},
    )
    try:
        supervisor.open()
    except OSError as error:
        import sys

        from phalanx.agent import exit_codes

        print(f"phalanx: {config.python[0]} cannot be started: {error}", file=sys.stderr)
        return exit_codes.NOT_FOUND
    if config.starts_warm:
        from phalanx.process.preload import plan_for
        from phalanx.process.scan import scan

        named = [m for m in config.preload if m != "auto"]
        plan = plan_for(scan(config.program), named, "auto" in config.preload)
        if plan.modules:
            supervisor.preload(plan)
        else:  # a fork of a process that has imported nothing saves nothing
            from dataclasses import replace

            config = replace(config, warm=False)
    if config.nodes is not None:
        from phalanx.agent import many_main

        return many_main.run_opened(config, supervisor)
    from phalanx.agent.main import run_opened

    return run_opened(config, supervisor)
