"""torchrun with time stamps around its parts: the same code path as the console script."""

import os
import time

began = time.time_ns()
import torch.distributed.elastic.agent.server.api as api  # noqa: E402
import torch.distributed.elastic.agent.server.local_elastic_agent as local  # noqa: E402
import torch.distributed.run  # noqa: E402

out = os.open(
    f"{os.environ['BENCH_OUT']}/launcher.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
)


def stamp(name: str, at: int | None = None) -> None:
    os.write(out, b'{"ev": "%s", "t": %d}\n' % (name.encode(), at or time.time_ns()))


stamp("launcher_began", began)
stamp("launcher_imported")
monitor = local.LocalElasticAgent._monitor_workers


def monitor_stamped(self, group):  # type: ignore[no-untyped-def]
    result = monitor(self, group)
    if result.state in (api.WorkerState.FAILED, api.WorkerState.UNHEALTHY):
        stamp("noticed")
    return result


local.LocalElasticAgent._monitor_workers = monitor_stamped
torch.distributed.run.main()
