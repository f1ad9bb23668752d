"""Wrote epochs_wrapped/: an epoch whose names hold what wrappers inserted, by a torchrelay that left it in.

python tests/golden/make_wrapped.py tests/golden/epochs_wrapped

It is frozen: newer ones write other names. `inner` was checkpointed in a layer, `both` is a compiled model in
an activation wrapper, `ranks` a distributed one in such a wrapper. Both groups of `inner_opt` have one `lr`.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from torchrelay import Job, JobRunner, LocalSession, MultiNodeCheckpointManager, max_epochs


def net() -> nn.Sequential:
    """Two layers, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made a step."""
    groups = [{"params": [one]} for one in module.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.5), foreach=False)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29700", rank=0, world_size=1)
    inner = net()
    inner[0] = checkpoint_wrapper(inner[0])
    both = checkpoint_wrapper(torch.compile(net(), backend="eager"))
    ranks = checkpoint_wrapper(DistributedDataParallel(net()))
    modules = {"inner": inner, "both": both, "ranks": ranks}
    job = Job("wrapped", blobs={**modules, **{f"{name}_opt": stepped(one) for name, one in modules.items()}})
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    with LocalSession(["trainer_0"]) as session:
        JobRunner(job, MultiNodeCheckpointManager(sys.argv[1]), best=None).train(session)
    torch.distributed.destroy_process_group()
