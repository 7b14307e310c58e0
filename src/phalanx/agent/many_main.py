"""One node of a job on several, from its configuration to its exit status."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from phalanx.agent.main import cannot_be, outcome, surroundings
from phalanx.agent.many import NodeAgent
from phalanx.coordinator import net, security
from phalanx.coordinator.node import CoordinatorNode, Plan
from phalanx.elastic.events import get_logging_handler
from phalanx.elastic.multiprocessing import SignalException
from phalanx.process.numa import NumaError
from phalanx.rendezvous import job
from phalanx.rendezvous import model as m

if TYPE_CHECKING:
    from phalanx.agent.config import JobConfig, NodesConfig
    from phalanx.process.supervisor import Supervisor


def bond_of(
    nodes: NodesConfig,
    *,
    run_id: str,
    slots: int,
    max_restarts: int,
    local: str,
    line: Callable[[str], object],
    record: Callable[[str, Mapping[str, object]], object] | None = None,
) -> CoordinatorNode:
    """This agent's end of the job's coordination. Raises SecurityError (a ValueError)."""
    host = socket.gethostname()
    spare = nodes.node_rank is not None and nodes.node_rank >= nodes.most
    me = m.Node(
        f"{host}-{os.getpid()}-{os.urandom(3).hex()}",
        "",
        slots=slots,
        rank=None if spare else nodes.node_rank,
        spare=spare,
        host=host,
    )
    options = m.Options(
        least=nodes.least,
        most=nodes.most,
        spares=nodes.spares,
        join=nodes.join,
        last_call=nodes.last_call,
        rejoin=nodes.rejoin,
        max_restarts=max_restarts,
        on_split=nodes.on_split,
        epoch=nodes.epoch,
    )
    plan = Plan(
        run_id,
        me,
        net.join(*nodes.endpoint),
        options,
        epoch=nodes.epoch,
        is_host=nodes.is_host,
        local=local,
        ports=nodes.ports,
        security=security.load(
            token_file=nodes.token_file or None,
            certificate=nodes.tls_cert or None,
            key=nodes.tls_key or None,
            ca=nodes.tls_ca or None,
            name=nodes.tls_name,
        ),
        silence=nodes.silence,
        on_split=nodes.on_split,
        linger=nodes.close,
        etcd=net.join(*nodes.endpoint) if nodes.backend == "etcd" else "",
        etcd_access=security.to_etcd(**nodes.etcd),
    )
    return CoordinatorNode(plan, machine=job, fresh=job.State.fresh, line=line, record=record)


def run_opened(config: JobConfig, supervisor: Supervisor) -> int:
    """Run one node's part of the job with a supervisor that is open; closes it."""
    nodes = config.nodes
    assert nodes is not None
    with surroundings(config, supervisor) as around:
        console, events = around.console, around.events
        try:
            get_logging_handler(config.event_log_handler)
            bond = bond_of(
                nodes,
                run_id=config.run_id,
                slots=config.nproc,
                max_restarts=config.max_restarts,
                local=config.local_addr or "",
                line=console.say,
                record=lambda kind, data: events.record(kind, **data),
            )
            agent = NodeAgent(config, nodes, bond, supervisor, console, events, around.health)
        except (ValueError, KeyError, OSError, NumaError) as error:
            return cannot_be(error, console)
        around.of(agent)
        agent.signals.install()
        events.record("run_began", argv=list(config.program.argv), nproc=config.nproc)

        def work() -> int:
            try:
                return agent.run()
            except SignalException as error:
                agent.leave(int(error.sigval))
                raise

        try:
            status = outcome(agent, work)
            events.record("run_ended", status=status)
            return status
        finally:
            agent.close("its job is over")
            agent.signals.restore()
