"""A job from its configuration to its exit status."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.agent import exit_codes
from phalanx.agent.console import Console, ConsoleHandler, Patient
from phalanx.agent.crew import CannotStart
from phalanx.agent.job import JobAgent
from phalanx.agent.node_check import NodeUnfit, check
from phalanx.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from phalanx.elastic.events import Event, get_logging_handler, record
from phalanx.elastic.multiprocessing import SignalException
from phalanx.elastic.multiprocessing.errors import get_error_handler
from phalanx.elastic.rendezvous.api import RendezvousError
from phalanx.elastic.rendezvous.local import LocalRendezvousHandler
from phalanx.events import EventLog
from phalanx.health import LoopHealth
from phalanx.process import errorfile
from phalanx.process.numa import NumaError
from phalanx.process.supervisor import SupervisorError

if TYPE_CHECKING:
    from phalanx.agent.config import JobConfig
    from phalanx.agent.crew import Crew
    from phalanx.agent.signals import JobSignals
    from phalanx.agent.story import Story
    from phalanx.health import Metric
    from phalanx.process.supervisor import Supervisor


class Agent(Protocol):
    """An agent, of one node or of many."""

    config: JobConfig
    supervisor: Supervisor
    signals: JobSignals
    crew: Crew
    events: EventLog
    story: Story

    def facts(self) -> Mapping[str, Any]: ...

    def numbers(self) -> list[Metric]: ...


@dataclass(frozen=True)
class Surroundings:
    """What the agent of a job speaks and is looked at through."""

    console: Console
    events: EventLog
    health: LoopHealth

    def of(self, agent: Agent) -> None:
        """It is this agent's from now on."""
        self.health.facts, self.health.numbers = agent.facts, agent.numbers
        self.health.lacks = agent.crew.lacks
        supervisor = agent.supervisor

        def turn() -> None:
            self.health.tick()
            self.console.catch_up()
            if agent.signals.held():
                agent.crew.pause()

        supervisor.on_turn = turn


@contextlib.contextmanager
def surroundings(config: JobConfig, supervisor: Supervisor) -> Iterator[Surroundings]:
    """Console, events record and health server of a job; at its end the supervisor is closed,
    and all is said that was to be said.
    """
    sys.stdout, sys.stderr = Patient.over(sys.stdout), Patient.over(sys.stderr)
    console = Console()
    logging.getLogger("phalanx").addHandler(ConsoleHandler(console))
    # what the edge would warn of is said by our own lines
    logging.getLogger("phalanx.elastic.agent.server.api").setLevel(logging.ERROR)
    epoch = config.nodes.epoch if config.nodes else 0
    events = EventLog(config.events, "agent", run_id=config.run_id, epoch=epoch, node=0)
    health = LoopHealth()
    server = None
    if config.health_port is not None:
        from phalanx.health import HealthServer

        server = HealthServer(health, config.health_port, config.health_host)
        server.start()
    try:
        yield Surroundings(console, events, health)
    finally:
        supervisor.close(grace=1.0)
        if server is not None:
            server.stop()
        events.close()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Patient):
                with contextlib.suppress(OSError):
                    stream.drain()


def run_opened(config: JobConfig, supervisor: Supervisor) -> int:
    """Run the job with a supervisor that is open; closes it."""
    handler = LocalRendezvousHandler(
        "phalanx",
        config.run_id,
        host=config.local_addr or config.master_addr,
        port=config.master_port,
    )
    agent = None
    with surroundings(config, supervisor) as around:
        console = around.console
        try:
            spec = WorkerSpec(
                role=config.role,
                local_world_size=config.nproc,
                entrypoint=config.program.argv[0],
                args=config.program.argv[1:],
                rdzv_handler=handler,
                max_restarts=config.max_restarts,
                monitor_interval=config.monitor_interval,
                event_log_handler=config.event_log_handler,
                virtual_local_rank=config.virtual_local_rank,
            )
            try:
                get_logging_handler(config.event_log_handler)
                agent = JobAgent(spec, config, supervisor, console, around.events, around.health)
            except (ValueError, KeyError, OSError, NumaError) as error:
                return cannot_be(error, console)
            around.of(agent)
            agent.signals.install()
            if agent.counsel is not None:
                agent.counsel.start()
            argv = list(config.program.argv)
            around.events.record("run_began", argv=argv, nproc=config.nproc)
            status = _run(agent, console)
            around.events.record("run_ended", status=status)
            return status
        finally:
            supervisor.close(grace=1.0)
            if agent is not None:
                if agent.counsel is not None:
                    agent.counsel.close()
                agent.crew.streams.close()
                agent.signals.restore()
            handler.shutdown()


def cannot_be(error: Exception, console: Console) -> int:
    """What the agent was asked for is not possible."""
    # str() of a KeyError puts its text in quotes.
    console.fail(str(error.args[0] if isinstance(error, KeyError) else error))
    return exit_codes.USAGE


def outcome(agent: Agent, work: Callable[[], int]) -> int:
    """The exit status of ``work``, or of what it raises, after ``--node-check``."""
    console, story = agent.story.console, agent.story
    try:
        if agent.config.node_check:
            _check_node(agent, agent.config.node_check)
        return work()
    except SignalException as error:
        number = signal.Signals(error.sigval)
        console.say(story.summary(f"stopped by {number.name}"))
        return 128 + number
    except NodeUnfit as error:
        console.fail(f"this node stays out of the job: {error}")
        console.quote([f"  {line}" for line in error.lines])
        agent.events.record("node_unfit", why=str(error), lines=list(error.lines))
        return exit_codes.NODE_CHECK
    except CannotStart as error:
        console.fail(str(error))
        return error.status
    except SupervisorError as error:
        console.fail(str(error))
        return exit_codes.KEEPER
    except RendezvousError as error:
        console.fail(f"the rendezvous failed: {error}")
        return exit_codes.RENDEZVOUS
    except Exception:
        console.fail("a defect of phalanx ended the job")
        traceback.print_exc(file=sys.stderr)
        return exit_codes.INTERNAL


def _run(agent: JobAgent, console: Console) -> int:
    def work() -> int:
        try:
            result = agent.run()
        except Exception:
            _tell(agent, agent.get_event_failed())
            raise
        _tell(agent, agent.get_event_succeeded())  # the agent, whatever its workers did
        return _status(agent, result, console)

    return outcome(agent, work)


def _check_node(agent: Agent, command: str) -> None:
    config = agent.config
    env = {**os.environ, **config.environment}
    with agent.signals.interruptible():
        took = check(agent.supervisor, command, config.node_check_timeout, env)
    agent.events.record("node_checked", seconds=took)


def _tell(agent: JobAgent, event: Event) -> None:
    record(event, agent.get_worker_group().spec.event_log_handler)


def _pass_on(agent: JobAgent, result: RunResult) -> None:
    """Give whoever started us the root cause's error file, as PyTorch's ``record`` does."""
    own = os.environ.get(errorfile.VARIABLE)
    failure = result.failures.get(agent.root.rank) if agent.root is not None else None
    if not own or failure is None or failure.error_file == "<N/A>":
        return
    handler = get_error_handler()
    data = failure.error_file_data
    handler.override_error_code_in_rootcause_data(own, data, failure.exitcode)
    handler._rm(own)
    handler._write_error_file(own, json.dumps(data))


def _status(agent: JobAgent, result: RunResult, console: Console) -> int:
    if agent.crew.unkillable:
        console.fail(f"processes that SIGKILL did not end: {sorted(set(agent.crew.unkillable))}")
    if result.state == WorkerState.SUCCEEDED:
        console.good(agent.story.summary("done"))
        return exit_codes.UNKILLABLE if agent.crew.unkillable else exit_codes.OK
    console.fail(agent.story.summary("failed"))
    _pass_on(agent, result)
    root = agent.root
    if root is not None and root.hung:
        return exit_codes.HUNG
    if root is None and agent.in_place.ended is not None:
        return exit_codes.CONTROLLER
    if root is None or root.returncode is None:
        return exit_codes.UNKILLABLE if agent.crew.unkillable else exit_codes.KEEPER
    return exit_codes.of_returncode(root.returncode)
