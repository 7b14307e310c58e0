"""The replaceable group: complete, and harmless while it is alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from phalanx.training import groups, wrappers  # noqa: E402

pytestmark = pytest.mark.torch

#: what a group does itself
OWN = groups._OWN


def test_every_collective_of_torch_s_group_is_passed_on():
    """A name that is not passed on would run on the empty C++ base class."""
    public = {
        name
        for name in dir(dist.ProcessGroup)
        if not name.startswith("_") and callable(getattr(dist.ProcessGroup, name))
    }
    for name in public - OWN:
        assert name in vars(groups.Group), name
        assert getattr(groups.Group, name) is not getattr(dist.ProcessGroup, name), name
    collectives = {name for name in public if any(w in name for w in ("reduce", "gather", "all"))}
    assert collectives
    assert not collectives & OWN


def test_echo_answers_every_collective():
    echo = set(dir(groups.Echo))
    for name in groups.passed_on():
        assert name in echo or name in ("_get_backend_name",), name


@pytest.fixture
def alone():
    fabric = groups.Fabric(2, 4)
    groups.install(fabric)
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=2, world_size=4)
    yield fabric
    fabric.close()
    dist.destroy_process_group()


def test_a_world_is_built_alone(alone):
    """Rank 2 of 4 with nobody there: group, mesh, DDP, FSDP2, object collectives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    assert (dist.get_rank(), dist.get_world_size()) == (2, 4)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [4.0] * 3
    dist.broadcast(ones, 0)
    gathered = [torch.zeros(3) for _ in range(4)]
    dist.all_gather(gathered, ones)
    assert all(torch.equal(one, ones) for one in gathered)
    whole = torch.zeros(12)
    dist.all_gather_into_tensor(whole, ones)
    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, torch.arange(4.0))
    assert part.item() == 8.0
    dist.all_to_all_single(torch.zeros(4), torch.ones(4))
    dist.barrier()
    objects = [None] * 4
    dist.all_gather_object(objects, {"rank": 2})
    assert objects == [{"rank": 2}] * 4
    assert dist.new_group([0, 1]) == dist.GroupMember.NON_GROUP_MEMBER
    pair = dist.new_group([2, 3])
    dist.all_reduce(torch.ones(1), group=pair)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    ddp(torch.ones(1, 3)).sum().backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    model(torch.ones(1, 4)).sum().backward()
    assert alone.condition == "alone"


def test_after_a_cut_every_collective_fails_at_once(alone):
    alone._condition = "connected"
    alone.generation = 3
    alone.cut(2)
    dist.barrier()  # an old generation's end is nobody's business
    alone.cut(3)
    for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(1))):
        with pytest.raises(groups.GroupBroken, match="generation 3 is over"):
            call()
    with pytest.raises(groups.GroupBroken):
        alone.connect(3, "127.0.0.1:1")


def test_a_torch_without_the_private_names_is_found_out(alone, monkeypatch):
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    assert wrappers.missing_names(ddp) == []
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_ddp_init_helper", None)
    monkeypatch.delattr(torch.nn.parallel.DistributedDataParallel, "_ddp_init_helper")
    assert wrappers.missing_names(ddp) == ["DistributedDataParallel._ddp_init_helper"]


def test_the_layout_of_others_is_taken(alone):
    """Definition order is not execution order; several buckets."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = torch.nn.Linear(30, 30), torch.nn.Linear(30, 30)

        def forward(self, x):
            return self.last(self.first(x))

    def make():
        ddp = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.003)
        return wrappers.DdpWrapper(ddp)

    used, fresh = make(), make()
    for _ in range(2):
        used.ddp(torch.ones(1, 30)).sum().backward()
    assert used.layout() != fresh.layout()
    fresh.adopt(used.layout())
    assert fresh.layout() == used.layout()
    assert all(parameter.grad is None for parameter in fresh.ddp.parameters())
    with pytest.raises(wrappers.LayoutMismatch, match="has 1 parameters"):
        make().adopt([[0]])
