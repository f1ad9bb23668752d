"""Sharding of the model: FSDP2 by blocks, or tensor parallelism within them and FSDP2 around."""

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

PLAN = {
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def mesh_of(device, tensor_parallel):
    """The ranks as (data, tensor); raises ValueError where they cannot be shared so."""
    ranks = distributed.get_world_size()
    if ranks % tensor_parallel:
        raise ValueError(f"{ranks} ranks cannot be groups of {tensor_parallel}: change `tensor_parallel`")
    shape = (ranks // tensor_parallel, tensor_parallel)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))


def shard(model, mesh, tensor_parallel):
    """Shard in place. Ranks of one `tensor` group have to read the same samples.

    What a forward gathers stays until the backward has used it: the model is small, and waiting costs more.
    """
    for block in model.blocks:
        if tensor_parallel > 1:
            parallelize_module(block, mesh["tensor"], PLAN)
        fully_shard(block, mesh=mesh["data"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["data"], reshard_after_forward=False)
    return model


def clip(parameters, most):
    """Scale gradients to a norm of at most `most`, over any number of meshes.

    torch's clip_grad_norm_ takes gradients of one mesh; beside tensor parallel layers there are two.
    """
    by_mesh = {}
    for one in parameters:
        if one.grad is not None:
            by_mesh.setdefault(getattr(one.grad, "device_mesh", None), []).append(one)
    norms = [get_total_norm([one.grad for one in group]) for group in by_mesh.values()]
    whole = torch.stack([one.full_tensor() if hasattr(one, "full_tensor") else one for one in norms])
    total = torch.linalg.vector_norm(whole)
    for group in by_mesh.values():
        clip_grads_with_norm_(group, most, total)
    return total
