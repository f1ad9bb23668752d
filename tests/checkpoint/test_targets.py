"""What of a tensor the local part of a DTensor holds, on one of two ranks that only this process plays."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torchrelay.checkpoint.state.leaf import target_of


@pytest.mark.parametrize("rank", [0, 1])
def test_tensors_of_one_shape_that_are_cut_otherwise_have_their_own_targets(rank):
    """What is remembered of one DTensor is not believed of another, nor of another rank."""
    dist.init_process_group("fake", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        boxes = []
        for dim, shape in ((0, (2, 4)), (1, (4, 2)), (0, (2, 4))):
            tensor = DTensor.from_local(torch.ones(shape), mesh, [Shard(dim)], run_check=False)
            boxes += [window.box for window in target_of(tensor, "x").windows]
    finally:
        dist.destroy_process_group()
    mine = (2 * rank, 2 * rank + 2)
    assert boxes == [(mine, (0, 4)), ((0, 4), mine), (mine, (0, 4))]
