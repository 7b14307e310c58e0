"""What a worker is told through its environment and its arguments. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from string import Template
from typing import TYPE_CHECKING, Any

from phalanx.elastic.utils.api import macros

if TYPE_CHECKING:
    from phalanx.elastic.agent.server.api import Worker, WorkerGroup

NCCL_ASYNC = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
OMP = "OMP_NUM_THREADS"
CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"


def build(
    *,
    role: str,
    rank: int,
    world_size: int,
    role_rank: int,
    role_world_size: int,
    local_world_size: int,
    group_rank: int | None,
    group_world_size: int | None,
    master_addr: str | None,
    master_port: int | None,
    restart_count: int,
    max_restarts: int,
    run_id: str,
    use_agent_store: bool,
    agent_env: Mapping[str, str],
) -> dict[str, str]:
    """The variables every worker gets, without those of :func:`put_local_rank`.

    ``agent_env`` is the agent's own environment. ``ValueError`` when the rendezvous told no
    master address.
    """
    if master_addr is None or master_port is None:
        raise ValueError(
            f"the rendezvous gave no master address for the workers (got {master_addr}:"
            f"{master_port}): set master_addr and master_port in WorkerSpec, or let the handler "
            "return them in bootstrap_store_info"
        )
    env = {
        "RANK": str(rank),
        "GROUP_RANK": str(group_rank),
        "ROLE_RANK": str(role_rank),
        "ROLE_NAME": role,
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": str(group_world_size),
        "ROLE_WORLD_SIZE": str(role_world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True" if use_agent_store else "False",
        NCCL_ASYNC: agent_env.get(NCCL_ASYNC, "1"),
    }
    if OMP in agent_env:
        env[OMP] = agent_env[OMP]
    return env


def of_worker(
    group: WorkerGroup,
    worker: Worker,
    *,
    restart_count: int,
    use_agent_store: bool,
    agent_env: Mapping[str, str],
) -> dict[str, str]:
    """:func:`build` for a worker of a group that has had its rendezvous."""
    spec = group.spec
    return build(
        role=spec.role,
        rank=worker.global_rank,
        world_size=worker.world_size,
        role_rank=worker.role_rank,
        role_world_size=worker.role_world_size,
        local_world_size=spec.local_world_size,
        group_rank=group.group_rank,
        group_world_size=group.group_world_size,
        master_addr=group.master_addr,
        master_port=group.master_port,
        restart_count=restart_count,
        max_restarts=spec.max_restarts,
        run_id=spec.rdzv_handler.get_run_id(),
        use_agent_store=use_agent_store,
        agent_env=agent_env,
    )


def put_local_rank(
    env: MutableMapping[str, str],
    local_rank: int,
    virtual: bool,
    agent_env: Mapping[str, str],
) -> None:
    """Put ``LOCAL_RANK`` and, where it must be said, ``CUDA_VISIBLE_DEVICES`` into ``env``.

    With ``virtual`` every worker is local rank 0 and sees one device: the agent's device of
    its place, or the device of its number when the agent names none. ``ValueError`` when the
    agent names fewer devices than there are workers.
    """
    visible = agent_env.get(CUDA_DEVICES)
    if not virtual:
        env["LOCAL_RANK"] = str(local_rank)
        if visible is not None:
            env[CUDA_DEVICES] = visible
        return
    env["LOCAL_RANK"] = "0"
    if visible is None:
        env[CUDA_DEVICES] = str(local_rank)
        return
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise ValueError(
            f"local_rank {local_rank} exceeds available GPUs in {CUDA_DEVICES}={visible}"
        )
    env[CUDA_DEVICES] = devices[local_rank].strip()


def arguments(args: Iterable[Any], local_rank: int) -> tuple[Any, ...]:
    """A worker's arguments, with its local rank for ``$local_rank`` and ``${local_rank}``."""
    return tuple(macros.substitute(args, str(local_rank)))


def log_prefix(template: str, **names: Any) -> str:
    """What stands before each line of a worker's output; ``${unknown}`` stays as it is."""
    return Template(template).safe_substitute(names)
