"""full_state_dict: a copy on the CPU under the names of the bare module."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from torchrelay.runners.session.context import full_state_dict
from torchrelay.runners.session.local import LocalSession


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(2, 2)  # really called so
        self.norm = torch.nn.BatchNorm1d(2)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_wrappers_leave_no_trace_in_the_names(group_of_one):
    """DDP's and torch.compile's prefixes go, in any nesting; a module called `module` keeps its name."""
    net = Net()
    wrapped = torch.nn.ModuleDict(
        {
            "a": torch.nn.parallel.DistributedDataParallel(net),
            "b": torch.compile(net),
            "c": torch.nn.parallel.DistributedDataParallel(torch.compile(net)),
        }
    )
    bare = list(net.state_dict())
    assert list(full_state_dict(net)) == bare
    assert list(full_state_dict(wrapped["a"])) == bare
    assert list(full_state_dict(wrapped)) == [f"{key}.{name}" for key in "abc" for name in bare]


def test_it_is_a_copy():
    """Later training does not change it, and it needs no gradient."""
    net = torch.nn.Linear(2, 2)
    state = LocalSession().run(lambda ctx: ctx.full_state_dict(net)).fetch()
    before = state["weight"].clone()
    with torch.no_grad():
        net.weight.add_(1)
    assert torch.equal(state["weight"], before)
    assert not state["weight"].requires_grad


def test_sharded_parameters_are_gathered(group_of_one):
    """DTensors come out whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    net = torch.nn.Linear(4, 4)
    whole = net.weight.detach().clone()
    mesh = init_device_mesh("cpu", (1,))
    net.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    state = full_state_dict(net)
    assert type(state["weight"]) is torch.Tensor
    assert torch.equal(state["weight"], whole)
